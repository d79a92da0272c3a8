#include "quire/store_buffer.h"

#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <thread>

#include "base/testing/refuse_each.h"
#include "buffers/testing/remote_pair.h"
#include "wire/testing/test_tensor.h"

namespace quire {
namespace {

// Whether the buffer is of this process, or of another one as seen from here.
enum class Kind : uint8_t { kLocal, kRemote };

class StoreBufferTest : public testing::TestWithParam<Kind> {
 protected:
  static std::unique_ptr<StoreBuffer> NewStore(int64_t capacity = 1 << 20) {
    const StoreBufferOptions options{.capacity_bytes = capacity};
    if (GetParam() == Kind::kRemote) return std::make_unique<RemoteStorePair>(options);
    return StoreBuffer::Create(options).value();
  }
};
INSTANTIATE_TEST_SUITE_P(, StoreBufferTest, testing::Values(Kind::kLocal, Kind::kRemote),
                         [](const auto& test) {
                           return test.param == Kind::kLocal ? "Local" : "Remote";
                         });

StatusCode CodeOf(const Status& status) { return status.code(); }

TEST_P(StoreBufferTest, GivesBackEveryTypeAndShapeBitForBit) {
  const auto store = NewStore();
  const ElementType types[] = {{kDLPackBool, 8}, {kDLUInt, 8},   {kDLInt, 8},    {kDLInt, 16},
                               {kDLInt, 32},     {kDLInt, 64},   {kDLFloat, 16}, {kDLBfloat, 16},
                               {kDLFloat, 32},   {kDLFloat, 64}, {10, 8},        {12, 8}};
  const std::vector<int64_t> shapes[] = {{}, {0, 3}, {2, 0}, {3, 4}};
  for (const ElementType type : types) {
    for (const std::vector<int64_t>& shape : shapes) {
      int64_t count = 1;
      for (const int64_t size : shape) count *= size;
      std::vector<uint8_t> bytes(static_cast<size_t>(count * type.bytes()));
      // With NaN of a payload (bfloat16 0x7FC1) and -0.0 among them.
      for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(0xC1 - 66 * i);
      ASSERT_TRUE(store->Put("k", TensorOf(type, shape, bytes)).ok());
      const std::optional<HostTensor> got = store->Get("k").value();
      ASSERT_TRUE(got.has_value());
      EXPECT_EQ(got->dtype(), type);
      EXPECT_EQ(std::vector(got->shape().begin(), got->shape().end()), shape);
      EXPECT_EQ(ValuesOf<uint8_t>(*got), bytes);
    }
  }
}

TEST_P(StoreBufferTest, ReplacesAndDeletes) {
  const auto store = NewStore();
  ASSERT_TRUE(store->Put("k", Ids({1})).ok());
  ASSERT_TRUE(store->Put("k", Ids({2, 3})).ok());
  EXPECT_EQ(ValuesOf<int64_t>(*store->Get("k").value()), (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(store->used_bytes(), 1 + 16);
  EXPECT_TRUE(store->Delete("k").value());
  EXPECT_FALSE(store->Delete("k").value());
  EXPECT_FALSE(store->Get("k").value().has_value());
  EXPECT_FALSE(store->Get("never there").value().has_value());
  EXPECT_EQ(store->used_bytes(), 0);
  EXPECT_EQ(store->size(), 0);
}

TEST_P(StoreBufferTest, StaysWithinItsCapacity) {
  const auto store = NewStore(100);
  ASSERT_TRUE(store->Put("a", Floats({20}, 1)).ok());  // 81 bytes
  EXPECT_EQ(CodeOf(store->Put("b", Floats({20}, 1))), StatusCode::kFull);
  EXPECT_EQ(CodeOf(store->Put("a", Floats({25}, 2))), StatusCode::kTooLarge);
  EXPECT_EQ(ValuesOf<float>(*store->Get("a").value()), std::vector<float>(20, 1));
  ASSERT_TRUE(store->Put("a", Floats({24}, 3)).ok()) << "in place of the old one";
  EXPECT_EQ(store->used_bytes(), 97);
  EXPECT_EQ(store->size(), 1);
}

TEST_P(StoreBufferTest, ChecksKeys) {
  const auto store = NewStore();
  EXPECT_EQ(CodeOf(store->Put("", Ids({1}))), StatusCode::kBadArgument);
  EXPECT_EQ(CodeOf(store->Put(std::string(513, 'k'), Ids({1}))), StatusCode::kBadArgument);
  EXPECT_TRUE(store->Put(std::string(512, '\0'), Ids({1})).ok());
  EXPECT_TRUE(store->Put("../{tag}\n*", Ids({1})).ok());
  EXPECT_EQ(CodeOf(store->Get("").status()), StatusCode::kBadArgument);
}

TEST_P(StoreBufferTest, TakesSeveralKeysAtOnce) {
  const auto store = NewStore(100);
  const std::string_view keys[] = {"a", "b", "c"};
  const HostTensor values[] = {Ids({1}), Ids({2}), Ids({3})};
  int64_t stored = -1;
  ASSERT_TRUE(store->MultiPut(keys, values, &stored).ok());
  EXPECT_EQ(stored, 3);
  const std::string_view asked[] = {"a", "b", "x", "c"};
  EXPECT_EQ(store->MultiExists(asked).value(), (std::vector<bool>{true, true, false, true}));
  EXPECT_EQ(store->PrefixHits(asked).value(), 2);
  const auto got = store->MultiGet(asked).value();
  EXPECT_EQ(ValuesOf<int64_t>(*got[3]), std::vector<int64_t>{3});
  EXPECT_FALSE(got[2].has_value());
  const HostTensor big[] = {Ids({4}), Floats({30}, 0), Ids({5})};
  EXPECT_EQ(CodeOf(store->MultiPut(keys, big, &stored)), StatusCode::kTooLarge);
  EXPECT_EQ(stored, 1);
  EXPECT_EQ(ValuesOf<int64_t>(*store->Get("a").value()), std::vector<int64_t>{4});
  EXPECT_EQ(ValuesOf<int64_t>(*store->Get("b").value()), std::vector<int64_t>{2});
  EXPECT_EQ(CodeOf(store->MultiPut(asked, values)), StatusCode::kBadArgument);
}

TEST_P(StoreBufferTest, RefusesEverythingOnceClosed) {
  const auto store = NewStore();
  ASSERT_TRUE(store->Put("k", Ids({1})).ok());
  store->Close();
  store->Close();
  EXPECT_EQ(store->used_bytes(), 0);
  EXPECT_EQ(CodeOf(store->Put("k", Ids({1}))), StatusCode::kClosed);
  EXPECT_EQ(CodeOf(store->Get("k").status()), StatusCode::kClosed);
  EXPECT_EQ(CodeOf(store->Delete("k").status()), StatusCode::kClosed);
  EXPECT_EQ(CodeOf(store->Exists("k").status()), StatusCode::kClosed);
}

TEST_P(StoreBufferTest, ReadersNeverSeeAMix) {
  const auto store = NewStore();
  ASSERT_TRUE(store->Put("k", Floats({64}, -1)).ok());
  std::atomic<int> writers = 8;
  std::vector<std::thread> threads;
  for (int id = 0; id < 8; ++id) {
    threads.emplace_back([&, id] {
      for (int i = 0; i < 1000; ++i) {
        EXPECT_TRUE(store->Put("k", Floats({64}, static_cast<float>(id))).ok());
      }
      --writers;
    });
    threads.emplace_back([&] {
      while (writers > 0) {
        const std::vector<float> got = ValuesOf<float>(*store->Get("k").value());
        EXPECT_EQ(got, std::vector<float>(64, got[0]));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(store->used_bytes(), 1 + 256);
}

TEST_P(StoreBufferTest, RefusesNoCapacity) {
  EXPECT_EQ(CodeOf(StoreBuffer::Create({.capacity_bytes = 0}).status()), StatusCode::kBadArgument);
}

TEST(StoreBufferFailure, EachAllocationRefused) {
  const auto store = StoreBuffer::Create({.capacity_bytes = 1000}).value();
  const HostTensor value = Ids({1, 2, 3});
  const std::string key = "a key that is too long to be kept within a string object";
  const std::vector<std::string_view> keys = {key, "b"};
  RefuseEach("Create", StatusCode::kOk,
             [] { return StoreBuffer::Create({.capacity_bytes = 1}).status(); });
  // Each starts where the key is not there, and a refused one leaves it so.
  RefuseEach("Put", StatusCode::kOk, [&] {
    HostTensor copy;
    {
      const AllocationsAllowed allowed;
      EXPECT_EQ(store->size(), 0);
      EXPECT_EQ(store->used_bytes(), 0);
      copy = value;
    }
    return store->Put(key, std::move(copy));
  });
  EXPECT_EQ(store->size(), 1);
  RefuseEach("Put too much", StatusCode::kTooLarge, [&] {
    HostTensor large;
    {
      const AllocationsAllowed allowed;
      large = Floats({1000}, 1);
    }
    return store->Put("b", std::move(large));
  });
  RefuseEach("Get", StatusCode::kOk, [&] { return store->Get(key).status(); });
  RefuseEach("MultiGet", StatusCode::kOk, [&] { return store->MultiGet(keys).status(); });
  RefuseEach("MultiExists", StatusCode::kOk, [&] { return store->MultiExists(keys).status(); });
  EXPECT_EQ(ValuesOf<int64_t>(**store->Get(key)), (std::vector<int64_t>{1, 2, 3}));
}

}  // namespace
}  // namespace quire
