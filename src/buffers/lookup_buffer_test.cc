// The examples of the interface that it re-does, and what those left open.
#include "quire/lookup_buffer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <numeric>
#include <thread>

#include "base/random.h"
#include "base/testing/refuse_each.h"
#include "buffers/testing/remote_pair.h"
#include "wire/testing/test_tensor.h"

namespace quire {
namespace {

using std::chrono::milliseconds;
using std::chrono::nanoseconds;
using List = std::vector<int64_t>;

constexpr Timeout kNoWait = nanoseconds(0);

// Whether the buffer is of this process, or of another one as seen from here.
enum class Kind : uint8_t { kLocal, kRemote };

class LookupBufferTest : public testing::TestWithParam<Kind> {
 protected:
  static std::unique_ptr<LookupBuffer> NewBuffer(LookupBufferOptions options = {}) {
    if (options.capacity_bytes == 0) options.capacity_bytes = 1000;
    if (GetParam() == Kind::kRemote) return std::make_unique<RemoteLookupPair>(options);
    return LookupBuffer::Create(options).value();
  }
};
INSTANTIATE_TEST_SUITE_P(, LookupBufferTest, testing::Values(Kind::kLocal, Kind::kRemote),
                         [](const auto& test) {
                           return test.param == Kind::kLocal ? "Local" : "Remote";
                         });

LookupEntry Entry(const List& tokens, std::vector<uint8_t> roi = {}) {
  if (roi.empty()) roi.assign(tokens.size(), 1);
  return {.tokens = Ids(tokens), .roi = Mask(roi), .tensors = {}};
}

// 275 bytes.
LookupEntry Example() {
  LookupEntry entry = Entry({1, 2, 3});
  entry.tensors = {{"key", Floats({5, 6}, 2)}, {"value", Floats({5, 6}, 3)}, {"hidden", Ids({1})}};
  return entry;
}

LookupQuery Query(const List& tokens, std::vector<uint8_t> roi = {}) {
  if (roi.empty()) roi.assign(tokens.size(), 1);
  return {.tokens = Ids(tokens), .roi = Mask(roi)};
}

Status Insert(LookupBuffer& buffer, LookupEntry entry) {
  return buffer.Insert(std::move(entry), kNoWait);
}

// Tokens of the entry that is selected; {} if none is.
List Select(LookupBuffer& buffer, const LookupQuery& query, Timeout timeout = kNoWait) {
  const auto entry = buffer.DropSelect(query, timeout).value();
  return entry ? ValuesOf<int64_t>(entry->tokens) : List{};
}

void AwaitWaiting(const LookupBuffer& buffer, int64_t count) {
  while (buffer.waiting() != count) std::this_thread::yield();
}

TEST_P(LookupBufferTest, CountsBytes) {
  const auto buffer = NewBuffer();
  ASSERT_TRUE(Insert(*buffer, Example()).ok());
  EXPECT_EQ(buffer->used_bytes(), 275);
  EXPECT_EQ(buffer->size(), 1);
  const LookupEntry entry = *buffer->DropSelect(Query({1, 2, 3}), kNoWait).value();
  EXPECT_EQ(ValuesOf<int64_t>(entry.tokens), (List{1, 2, 3}));
  EXPECT_EQ(entry.roi.dtype(), ElementType(kDLPackBool, 8));
  EXPECT_EQ(entry.tensors[0].first, "key");
  EXPECT_EQ(ValuesOf<float>(entry.tensors[0].second), std::vector<float>(30, 2));
  EXPECT_EQ(ValuesOf<float>(entry.tensors[1].second), std::vector<float>(30, 3));
  EXPECT_EQ(ValuesOf<int64_t>(entry.tensors[2].second), List{1});
  EXPECT_EQ(buffer->used_bytes(), 0);
  EXPECT_EQ(buffer->size(), 0);
}

TEST_P(LookupBufferTest, MatchesShorterAndLongerQueries) {
  const auto buffer = NewBuffer();
  ASSERT_TRUE(Insert(*buffer, Entry({5, 6, 7, 8})).ok());
  EXPECT_EQ(Select(*buffer, Query({5, 6})), (List{5, 6, 7, 8}));
  ASSERT_TRUE(Insert(*buffer, Entry({5, 6})).ok());
  EXPECT_EQ(Select(*buffer, Query({5, 6, 7, 8})), (List{5, 6}));
}

TEST_P(LookupBufferTest, TakesTheFirstOrTheLongest) {
  for (const SelectOrder prefer : {SelectOrder::kFifo, SelectOrder::kLongest}) {
    const auto buffer = NewBuffer({.prefer = prefer});
    ASSERT_TRUE(Insert(*buffer, Entry({9})).ok());
    ASSERT_TRUE(Insert(*buffer, Entry({9, 10})).ok());
    const bool fifo = prefer == SelectOrder::kFifo;
    EXPECT_EQ(Select(*buffer, Query({9, 10})), (fifo ? List{9} : List{9, 10}));
    EXPECT_EQ(Select(*buffer, Query({9, 10})), (fifo ? List{9, 10} : List{9}));
  }
}

TEST_P(LookupBufferTest, ComparesOnlyWhereRoiIsSet) {
  const auto buffer = NewBuffer();
  ASSERT_TRUE(Insert(*buffer, Entry({1, 2, 3}, {1, 0, 1})).ok());
  EXPECT_EQ(Select(*buffer, Query({1, 7, 3}, {0, 0, 0})), List{}) << "nothing to compare";
  EXPECT_EQ(buffer->used_bytes(), 27);
  EXPECT_EQ(Select(*buffer, Query({1, 7, 3}, {1, 0, 1})), (List{1, 2, 3}));
}

TEST_P(LookupBufferTest, ComparesIdsExactly) {
  const auto buffer = NewBuffer();
  ASSERT_TRUE(Insert(*buffer, Entry({100000})).ok());
  EXPECT_EQ(Select(*buffer, Query({100001})), List{});
  const LookupQuery narrow{.tokens = TensorOf<int32_t>(ElementType(kDLInt, 32), {1}, {100000})};
  EXPECT_EQ(Select(*buffer, narrow), List{100000}) << "integers of another width";
  LookupEntry floats = {.tokens = Floats({2}, -0.0F), .roi = Ones(2), .tensors = {}};
  ASSERT_TRUE(Insert(*buffer, floats).ok());
  EXPECT_FALSE(buffer->DropSelect({.tokens = Floats({2}, 0.0F)}, kNoWait).value().has_value());
  EXPECT_FALSE(buffer->DropSelect(Query({0, 0}), kNoWait).value().has_value());
  EXPECT_TRUE(buffer->DropSelect({.tokens = Floats({2}, -0.0F)}, kNoWait).value().has_value());
}

TEST_P(LookupBufferTest, KeepsTheOrderOfInsertion) {
  const auto buffer = NewBuffer();
  for (const int64_t id : {1, 2, 3}) ASSERT_TRUE(Insert(*buffer, Entry({id})).ok());
  EXPECT_EQ(Select(*buffer, Query({2})), List{2});
  EXPECT_EQ(Select(*buffer, {}), List{1});
  EXPECT_EQ(Select(*buffer, {.roi = Ones(1)}), List{3}) << "without tokens any entry will do";
  EXPECT_EQ(Select(*buffer, {}), List{});
}

TEST_P(LookupBufferTest, TakesEntriesThatCompareNothingOnlyAsAny) {
  const auto buffer = NewBuffer();
  ASSERT_TRUE(Insert(*buffer, Entry({4}, {0})).ok());
  EXPECT_EQ(Select(*buffer, Query({4})), List{});
  EXPECT_EQ(Select(*buffer, {}), List{4});
}

TEST_P(LookupBufferTest, WaitsForAMatch) {
  const auto buffer = NewBuffer();
  List got;
  std::thread consumer([&] { got = Select(*buffer, Query({7}), std::nullopt); });
  AwaitWaiting(*buffer, 1);
  ASSERT_TRUE(Insert(*buffer, Entry({8})).ok());
  EXPECT_EQ(buffer->waiting(), 1);
  ASSERT_TRUE(Insert(*buffer, Entry({7})).ok());
  consumer.join();
  EXPECT_EQ(got, List{7});
  EXPECT_EQ(Select(*buffer, {}), List{8});
}

TEST_P(LookupBufferTest, ServesWaitingQueriesInTheOrderOfTheirCalls) {
  const auto buffer = NewBuffer();
  List first, any, third;
  std::thread a([&] { first = Select(*buffer, Query({7, 1}), std::nullopt); });
  AwaitWaiting(*buffer, 1);
  std::thread b([&] { any = Select(*buffer, {}, std::nullopt); });
  AwaitWaiting(*buffer, 2);
  std::thread c([&] { third = Select(*buffer, Query({7}), std::nullopt); });
  AwaitWaiting(*buffer, 3);
  ASSERT_TRUE(Insert(*buffer, Entry({7})).ok());  // matches all three
  a.join();
  ASSERT_TRUE(Insert(*buffer, Entry({7, 2})).ok());  // the second and the third
  b.join();
  ASSERT_TRUE(Insert(*buffer, Entry({7, 3})).ok());
  c.join();
  EXPECT_EQ(first, List{7});
  EXPECT_EQ(any, (List{7, 2}));
  EXPECT_EQ(third, (List{7, 3}));
  EXPECT_EQ(buffer->used_bytes(), 0);
}

TEST_P(LookupBufferTest, GivesUpInTime) {
  const auto buffer = NewBuffer({.capacity_bytes = 300});
  EXPECT_FALSE(buffer->DropSelect(Query({1}), milliseconds(1)).value().has_value());
  ASSERT_TRUE(Insert(*buffer, Example()).ok());
  EXPECT_EQ(buffer->Insert(Example(), milliseconds(1)).code(), StatusCode::kFull);
  EXPECT_EQ(buffer->used_bytes(), 275);
  EXPECT_EQ(buffer->waiting(), 0);
  EXPECT_FALSE(buffer->DropSelect(Query({9}), kNoWait).value().has_value());
  // Less than no time is not for ever.
  for (const nanoseconds time : {nanoseconds(-1), nanoseconds::min()})
    EXPECT_FALSE(buffer->DropSelect(Query({9}), time).value().has_value());
}

TEST_P(LookupBufferTest, HoldsInsertsBackUntilThereIsRoom) {
  const auto buffer = NewBuffer({.capacity_bytes = 300});
  ASSERT_TRUE(Insert(*buffer, Example()).ok());
  std::thread producer([&] { EXPECT_TRUE(buffer->Insert(Example()).ok()); });
  AwaitWaiting(*buffer, 1);
  EXPECT_EQ(Insert(*buffer, Entry({1})).code(), StatusCode::kFull)
      << "it would fit, but is behind another";
  EXPECT_EQ(buffer->used_bytes(), 275);
  EXPECT_EQ(Select(*buffer, {}), (List{1, 2, 3}));
  producer.join();
  EXPECT_EQ(buffer->used_bytes(), 275);
  EXPECT_EQ(buffer->size(), 1);
}

TEST_P(LookupBufferTest, AnInsertThatGivesUpLetsSmallerOnesPass) {
  const auto buffer = NewBuffer({.capacity_bytes = 300});
  ASSERT_TRUE(Insert(*buffer, Example()).ok());
  std::atomic<bool> gave_up = false;
  std::thread large([&] {
    EXPECT_EQ(buffer->Insert(Example(), milliseconds(50)).code(), StatusCode::kFull);
    gave_up = true;
  });
  // A busy machine may see it only when it is over.
  while (buffer->waiting() != 1 && !gave_up) std::this_thread::yield();
  EXPECT_TRUE(buffer->Insert(Entry({1})).ok());  // once the large one is gone
  large.join();
  EXPECT_EQ(buffer->used_bytes(), 275 + 9);
}

TEST_P(LookupBufferTest, RefusesWhatNeverFits) {
  const auto buffer = NewBuffer({.capacity_bytes = 270});
  EXPECT_EQ(buffer->Insert(Example()).code(), StatusCode::kTooLarge);
  EXPECT_EQ(buffer->used_bytes(), 0);
}

TEST_P(LookupBufferTest, ClosingEndsWaitingCalls) {
  const auto buffer = NewBuffer({.capacity_bytes = 300});
  ASSERT_TRUE(Insert(*buffer, Example()).ok());
  std::thread consumer(
      [&] { EXPECT_EQ(buffer->DropSelect(Query({77})).status().code(), StatusCode::kClosed); });
  std::thread producer([&] { EXPECT_EQ(buffer->Insert(Example()).code(), StatusCode::kClosed); });
  AwaitWaiting(*buffer, 2);
  buffer->Close();
  buffer->Close();
  consumer.join();
  producer.join();
  EXPECT_EQ(buffer->used_bytes(), 0);
  EXPECT_EQ(Insert(*buffer, Entry({1})).code(), StatusCode::kClosed);
  EXPECT_EQ(buffer->DropSelect({}, kNoWait).status().code(), StatusCode::kClosed);
}

TEST_P(LookupBufferTest, PutsBackWhatWasNotHandedOver) {
  const auto buffer = NewBuffer();
  for (const int64_t id : {1, 2, 3}) ASSERT_TRUE(Insert(*buffer, Entry({7, id})).ok());
  {
    const Handover taken = std::move(*buffer->Take(Query({7}), kNoWait).value());
    EXPECT_EQ(ValuesOf<int64_t>(taken.entry().tokens), (List{7, 1}));
    EXPECT_EQ(buffer->size(), 2);
    EXPECT_EQ(buffer->used_bytes(), 54) << "its bytes still count";
  }
  EXPECT_EQ(buffer->size(), 3);
  EXPECT_EQ(Select(*buffer, Query({7})), (List{7, 1})) << "at its old place";
  Handover second = std::move(*buffer->Take(Query({7}), kNoWait).value());
  List waiting;
  std::thread consumer([&] { waiting = Select(*buffer, Query({7, 2}), std::nullopt); });
  AwaitWaiting(*buffer, 1);
  second.Fail();
  second.Fail();
  consumer.join();
  EXPECT_EQ(waiting, (List{7, 2})) << "a query that waits for it gets it";
  EXPECT_EQ(ValuesOf<int64_t>(buffer->Take({}, kNoWait).value()->Complete().tokens), (List{7, 3}));
  EXPECT_EQ(buffer->used_bytes(), 0);
}

TEST_P(LookupBufferTest, DropsWhatWasNotHandedOverIfAsked) {
  const auto buffer = NewBuffer({.put_back = false});
  ASSERT_TRUE(Insert(*buffer, Entry({1})).ok());
  buffer->Take({}, kNoWait).value()->Fail();
  EXPECT_EQ(buffer->size(), 0);
  EXPECT_EQ(buffer->used_bytes(), 0);
}

TEST_P(LookupBufferTest, AHandoverMayOutliveItsBuffer) {
  auto buffer = NewBuffer();
  ASSERT_TRUE(Insert(*buffer, Entry({1})).ok());
  Handover taken = std::move(*buffer->Take({}, kNoWait).value());
  buffer = nullptr;
  EXPECT_EQ(ValuesOf<int64_t>(taken.Complete().tokens), List{1});
}

TEST_P(LookupBufferTest, RefusesBadEntriesAndQueries) {
  const auto buffer = NewBuffer();
  const auto bad = [&](LookupEntry entry) {
    EXPECT_EQ(Insert(*buffer, std::move(entry)).code(), StatusCode::kBadArgument);
  };
  bad({.tokens = Ids({1, 2}), .roi = Ones(3), .tensors = {}});
  bad({.tokens = Ids({1}), .roi = Mask({2}), .tensors = {}});
  bad({.tokens = Ids({1}), .roi = Floats({1}, 1), .tensors = {}});
  bad({.tokens = Floats({1, 1}, 1), .roi = Ones(1), .tensors = {}});
  bad({.tokens = TensorOf<uint64_t>(ElementType(kDLUInt, 64), {1}, {uint64_t{1} << 63}),
       .roi = Ones(1),
       .tensors = {}});
  LookupEntry twice = Example();
  twice.tensors.emplace_back("key", Ids({1}));
  bad(twice);
  EXPECT_EQ(buffer->size(), 0);
  EXPECT_EQ(buffer->used_bytes(), 0);
  const auto status = buffer->DropSelect({.tokens = Ids({1}), .roi = Ones(2)}, kNoWait).status();
  EXPECT_EQ(status.code(), StatusCode::kBadArgument);
  EXPECT_NE(status.message().find("roi has 2 elements and tokens 1"), std::string::npos);
  EXPECT_EQ(LookupBuffer::Create({.capacity_bytes = 0}).status().code(), StatusCode::kBadArgument);
}

TEST_P(LookupBufferTest, MatchesManyEntriesBetweenManyThreads) {
  constexpr int64_t kEntries = 200;
  const auto buffer = NewBuffer({.capacity_bytes = 17000});
  const auto shuffled = [](uint64_t seed) {
    List ids(kEntries);
    std::iota(ids.begin(), ids.end(), 1000);
    RandomSequence random(seed);
    for (size_t i = ids.size(); i > 1; --i) {
      std::swap(ids[i - 1], ids[static_cast<size_t>(random.Below(static_cast<int64_t>(i)))]);
    }
    return ids;
  };
  std::atomic<int64_t> most = 0;
  std::vector<std::thread> threads;
  std::atomic<int64_t> sum = 0;
  for (int worker = 0; worker < 2; ++worker) {
    threads.emplace_back([&, worker] {
      const List ids = shuffled(static_cast<uint64_t>(worker) + 1);
      for (const int64_t id : ids) {
        if (id % 2 != worker) continue;
        LookupEntry entry = Entry({id, 1, 2});
        entry.tensors = {{"key", Floats({100}, static_cast<float>(id))}};
        EXPECT_TRUE(buffer->Insert(std::move(entry)).ok());
        most = std::max<int64_t>(most, buffer->used_bytes());
      }
    });
    threads.emplace_back([&] {
      for (int64_t i = 0; i < kEntries / 2; ++i) {
        const LookupEntry entry = *buffer->DropSelect({}).value();
        const int64_t id = ValuesOf<int64_t>(entry.tokens)[0];
        EXPECT_EQ(ValuesOf<float>(entry.tensors[0].second)[99], static_cast<float>(id));
        sum += id;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(sum, (1000 + 1199) * kEntries / 2);
  EXPECT_LE(most, 17000);
  EXPECT_EQ(buffer->used_bytes(), 0);
}

TEST(LookupBufferFailure, EachAllocationRefused) {
  const auto buffer = LookupBuffer::Create({.capacity_bytes = 1000}).value();
  RefuseEach("Create", StatusCode::kOk,
             [] { return LookupBuffer::Create({.capacity_bytes = 1}).status(); });
  RefuseEach("Insert", StatusCode::kOk, [&] {
    LookupEntry entry;
    {
      const AllocationsAllowed allowed;
      EXPECT_EQ(buffer->size(), 0);
      EXPECT_EQ(buffer->used_bytes(), 0);
      entry = Example();
    }
    return buffer->Insert(std::move(entry), kNoWait);
  });
  EXPECT_EQ(buffer->size(), 1);
  const LookupQuery other = Query({7, 8});
  RefuseEach("DropSelect of what is not there", StatusCode::kOk,
             [&] { return buffer->DropSelect(other, kNoWait).status(); });
  EXPECT_EQ(buffer->used_bytes(), 275);
  const LookupQuery query = Query({1, 2, 3});
  bool taken = false;
  RefuseEach("DropSelect", StatusCode::kOk, [&]() -> Status {
    EXPECT_EQ(buffer->size(), 1);  // a refused one has removed nothing
    const auto entry = buffer->DropSelect(query, kNoWait);
    taken = entry.ok() && entry->has_value();
    return entry.status();
  });
  EXPECT_TRUE(taken);
  EXPECT_EQ(buffer->size(), 0);
  EXPECT_EQ(buffer->used_bytes(), 0);
}

}  // namespace
}  // namespace quire
