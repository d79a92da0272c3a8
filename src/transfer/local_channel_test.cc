// The channel alone, between a sink's calls and a receiver that records what it is asked for. Whole
// caches are in src/kv/cache/kv_channel_test.cc.
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/testing/refuse_each.h"
#include "quire/transfer.h"
#include "transfer/testing/channel_receiver.h"
#include "transfer/testing/gate.h"

namespace quire {
namespace {

// One layer of rows [8, 2, 4], float32 keys and float16 values.
struct Rows {
  Rows() : k(8 * 2 * 4), v(8 * 2 * 4) {}
  LayerKV view(int64_t first, int64_t count) {
    return {.k = TensorView(k.data() + first * 8, DType::kF32, {count, 2, 4}),
            .v = TensorView(v.data() + first * 8, DType::kF16, {count, 2, 4})};
  }
  std::vector<float> k;
  std::vector<uint16_t> v;
};

class Recorder final : public ChannelReceiver {
 public:
  struct Completed {
    uint64_t epoch;
    int64_t layer, first_row, count, first_head;
  };
  Rows pages;
  std::vector<int64_t> stored_rows;  // of each part
  bool damages = false;              // what comes next
  StagingUse use;
  std::vector<Completed> completed;
  std::vector<std::string> failures;
  uint64_t epoch = 7;  // the only one that is known
  std::function<void()> on_store;

  Result<ReceiveView> View(uint64_t of, int64_t, const ReceivePart& part) override {
    if (of != epoch) return Status(StatusCode::kNotFound, "over");
    const auto memory = std::make_shared<Rows>();
    const int64_t shape[] = {part.count, part.head_count, 4};
    return ReceiveView{.rows = {.k = TensorView(memory->k.data(), DType::kF32, std::span(shape)),
                                .v = TensorView(memory->v.data(), DType::kF16, std::span(shape))},
                       .memory = memory};
  }
  Status Store(uint64_t of, int64_t, const ReceivePart& part, const ReceiveView& view,
               std::optional<uint32_t> digest) override {
    if (on_store) on_store();
    const std::lock_guard lock(mutex_);
    if (of != epoch) return Status(StatusCode::kNotFound, "over");
    if (damages) view.rows.v.data_as<uint16_t>()[0] ^= 1;
    if (digest.has_value() && DigestOfHeads(view.rows, 0, part.head_count) != *digest)
      return Status(StatusCode::kCorrupt, "damaged");
    CopyHeads(view.rows, 0, pages.view(part.first_row, part.count), part.first_head,
              part.head_count);
    stored_rows.push_back(part.count);
    return Status();
  }
  Status Complete(uint64_t of, int64_t layer, const ReceivePart& part) override {
    const std::lock_guard lock(mutex_);
    if (of != epoch) return Status(StatusCode::kNotFound, "over");
    completed.push_back({of, layer, part.first_row, part.count, part.first_head});
    return Status();
  }
  StagingUse staging() const override { return use; }
  Status FailReceive(uint64_t of, const Status& why) override {
    if (of != epoch) return Status(StatusCode::kNotFound, "over");
    failures.push_back(why.ToString());
    return Status();
  }

 private:
  Status Unasked() const override {
    ADD_FAILURE() << "a channel has made a control call";
    return ChannelReceiver::Unasked();
  }

  std::mutex mutex_;  // of what Store and Complete write
};

class LocalChannelTest : public testing::Test {
 protected:
  LocalChannelTest() {
    for (size_t i = 0; i < source_.k.size(); ++i) {
      source_.k[i] = static_cast<float>(i + 1);
      source_.v[i] = static_cast<uint16_t>(i + 100);
    }
    EXPECT_TRUE(channel_->Connect(4, &receiver_).ok());
  }
  SendRange Range(int64_t first_row, int64_t count) {
    return {.seq_id = 1,
            .epoch = 7,
            .first_position = first_row,
            .first_row = first_row,
            .count = count,
            .local = source_.view(first_row, count),
            .local_head = 0,
            .remote_head = 0,
            .head_count = 2,
            .remote_slots = {},
            .peer = 4};
  }
  Status Give(int64_t layer, const SendRange& range) {
    return channel_->OnLayerAppended(layer, std::span(&range, 1));
  }
  static SendRecord Record(int64_t first_row, int64_t count, int64_t peer = 4) {
    return {.seq_id = 1, .epoch = 7, .first_row = first_row, .count = count, .peer = peer};
  }
  Status End(const SendRecord& record) { return channel_->OnForwardEnded(std::span(&record, 1)); }

  Rows source_;
  Recorder receiver_;
  std::shared_ptr<LocalChannel> channel_ = CreateLocalChannel();
};

TEST_F(LocalChannelTest, WritesAtOnceAndCompletesAtTheRecord) {
  ASSERT_TRUE(Give(0, Range(2, 3)).ok());
  ASSERT_TRUE(Give(1, Range(2, 3)).ok());
  ASSERT_TRUE(Give(0, Range(5, 1)).ok());  // of another record, right after
  EXPECT_EQ(receiver_.pages.k[2 * 8], source_.k[2 * 8]);
  EXPECT_TRUE(receiver_.completed.empty());
  ASSERT_TRUE(End(Record(2, 3)).ok());
  ASSERT_EQ(receiver_.completed.size(), 2U);
  EXPECT_EQ(receiver_.completed[1].layer, 1);
  ASSERT_TRUE(End(Record(2, 3)).ok());  // nothing is left of it
  EXPECT_EQ(receiver_.completed.size(), 2U);
  ASSERT_TRUE(End(Record(5, 2)).ok());
  EXPECT_EQ(receiver_.completed.size(), 3U);
}

TEST_F(LocalChannelTest, MovesHeadsWhereTheyBelong) {
  SendRange range = Range(0, 8);
  range.local_head = 1;
  range.remote_head = 0;
  range.head_count = 1;
  ASSERT_TRUE(Give(0, range).ok());
  for (size_t row = 0; row < 8; ++row) {
    EXPECT_EQ(receiver_.pages.k[row * 8], source_.k[row * 8 + 4]);
    EXPECT_EQ(receiver_.pages.v[row * 8 + 3], source_.v[row * 8 + 7]);
    EXPECT_EQ(receiver_.pages.k[row * 8 + 4], 0);  // the other head is another sender's
  }
  ASSERT_TRUE(End(Record(0, 8)).ok());
  EXPECT_EQ(receiver_.completed[0].first_head, 0);
}

TEST_F(LocalChannelTest, AnAbortForgetsAndDamageIsReported) {
  ASSERT_TRUE(Give(0, Range(0, 4)).ok());
  const SendRecord record = Record(0, 4);
  ASSERT_TRUE(channel_->OnForwardAborted(std::span(&record, 1)).ok());
  ASSERT_TRUE(End(record).ok());
  EXPECT_TRUE(receiver_.completed.empty());
  ASSERT_TRUE(Give(0, Range(0, 4)).ok());
  ASSERT_TRUE(Give(1, Range(0, 4)).ok());
  receiver_.damages = true;
  EXPECT_EQ(Give(2, Range(0, 4)).code(), StatusCode::kCorrupt);
  ASSERT_TRUE(End(record).ok());
  EXPECT_EQ(receiver_.completed.size(), 2U);
}

TEST_F(LocalChannelTest, MoreRowsThanTheStagingMemoryHoldsGoInParts) {
  receiver_.use.limit = 3 * 2 * 4 * (4 + 2) + 5;  // of three rows, and a part of one
  ASSERT_TRUE(Give(0, Range(0, 8)).ok());
  EXPECT_EQ(receiver_.stored_rows, (std::vector<int64_t>{3, 3, 2}));
  EXPECT_EQ(receiver_.pages.k, source_.k);
  EXPECT_EQ(receiver_.pages.v, source_.v);
  ASSERT_TRUE(End(Record(0, 8)).ok());
  EXPECT_EQ(receiver_.completed.size(), 3U);
}

TEST_F(LocalChannelTest, ErrorsOfAndAboutPeersAreReturned) {
  SendRange range = Range(0, 1);
  range.peer = 5;
  EXPECT_EQ(Give(0, range).code(), StatusCode::kUnavailable);
  range = Range(0, 1);
  range.epoch = 6;
  EXPECT_EQ(Give(0, range).code(), StatusCode::kNotFound);
  EXPECT_EQ(End(Record(0, 1, 5)).code(), StatusCode::kUnavailable);
  const SendRecord stopped[] = {Record(0, 1, 5), Record(0, 1)};
  EXPECT_EQ(channel_->OnSendStopped(stopped, Status(StatusCode::kCancelled, "enough")).code(),
            StatusCode::kUnavailable);
  EXPECT_EQ(receiver_.failures, std::vector<std::string>{"Cancelled: enough"});
  EXPECT_EQ(channel_->Connect(4, &receiver_).code(), StatusCode::kBadArgument);
  EXPECT_EQ(channel_->Connect(-1, &receiver_).code(), StatusCode::kBadArgument);
  EXPECT_EQ(channel_->Connect(9, nullptr).code(), StatusCode::kBadArgument);
  ASSERT_TRUE(Give(0, Range(0, 1)).ok());
  ASSERT_TRUE(channel_->Disconnect(4).ok());
  EXPECT_EQ(channel_->Disconnect(4).code(), StatusCode::kNotFound);
  EXPECT_EQ(End(Record(0, 1)).code(), StatusCode::kUnavailable);
  ASSERT_TRUE(channel_->Connect(4, &receiver_).ok());  // of before it knows nothing
  ASSERT_TRUE(End(Record(0, 1)).ok());
  EXPECT_TRUE(receiver_.completed.empty());
}

TEST_F(LocalChannelTest, ARecordWhoseRowsAreNotTakenSaysSo) {
  ASSERT_TRUE(Give(0, Range(0, 2)).ok());
  ASSERT_TRUE(Give(1, Range(0, 2)).ok());
  receiver_.epoch = 8;
  EXPECT_EQ(End(Record(0, 2)).code(), StatusCode::kNotFound);
  receiver_.epoch = 7;
  EXPECT_TRUE(End(Record(0, 2)).ok());  // nothing is left of it
  EXPECT_TRUE(receiver_.completed.empty());
}

// A receiver that stores rows holds up the call that gives these, and nothing else: no other sender
// to the same receiver, and no sender to another one, which may be the other direction.
TEST_F(LocalChannelTest, NobodyWaitsForTheRowsOfOthers) {
  Gate held;
  receiver_.on_store = [&] { held.Pass(); };
  std::future<Status> given = std::async(std::launch::async, [&] { return Give(0, Range(0, 4)); });
  EXPECT_TRUE(held.AwaitInside());
  Recorder other;
  std::future<Status> called = std::async(std::launch::async, [&]() -> Status {
    QUIRE_RETURN_IF_ERROR(channel_->Connect(5, &other));
    SendRange range = Range(0, 8);
    range.peer = 5;
    QUIRE_RETURN_IF_ERROR(Give(0, range));
    QUIRE_RETURN_IF_ERROR(End(Record(0, 8, 5)));
    QUIRE_RETURN_IF_ERROR(channel_->Disconnect(5));
    QUIRE_RETURN_IF_ERROR(Give(1, Range(4, 2)));
    QUIRE_RETURN_IF_ERROR(End(Record(4, 2)));
    const SendRecord aborted = Record(6, 2);
    return channel_->OnForwardAborted(std::span(&aborted, 1));
  });
  EXPECT_EQ(called.wait_for(std::chrono::minutes(1)), std::future_status::ready);
  held.Release();
  EXPECT_EQ(called.get().ToString(), "Ok");
  EXPECT_EQ(given.get().ToString(), "Ok");
  EXPECT_EQ(other.completed.size(), 1U);
  EXPECT_EQ(other.pages.k, source_.k);
  ASSERT_EQ(receiver_.completed.size(), 1U);
  EXPECT_EQ(receiver_.completed[0].layer, 1);
  ASSERT_TRUE(End(Record(0, 4)).ok());
  EXPECT_EQ(receiver_.completed.size(), 2U);
}

TEST_F(LocalChannelTest, APeerLeavesWhenNothingIsStoredInItAnyMore) {
  Gate held;
  receiver_.on_store = [&] { held.Pass(); };
  std::future<Status> given = std::async(std::launch::async, [&] { return Give(0, Range(0, 4)); });
  EXPECT_TRUE(held.AwaitInside());
  std::future<Status> left =
      std::async(std::launch::async, [&] { return channel_->Disconnect(4); });
  EXPECT_EQ(left.wait_for(std::chrono::milliseconds(50)), std::future_status::timeout);
  held.Release();
  EXPECT_EQ(left.get().ToString(), "Ok");
  EXPECT_EQ(given.get().ToString(), "Ok");
  EXPECT_EQ(receiver_.stored_rows.size(), 1U);
  ASSERT_TRUE(channel_->Connect(4, &receiver_).ok());
  ASSERT_TRUE(End(Record(0, 4)).ok());
  EXPECT_TRUE(receiver_.completed.empty()) << "what was given before it left counts";
}

TEST_F(LocalChannelTest, EachAllocationRefused) {
  // What was connected, given or completed by a refused call is not there afterwards.
  RefuseEach("Connect", StatusCode::kOk, [&] { return channel_->Connect(5, &receiver_); });
  RefuseEach("Connect again", StatusCode::kBadArgument,
             [&] { return channel_->Connect(5, &receiver_); });
  EXPECT_TRUE(channel_->Disconnect(5).ok());
  RefuseEach("Disconnect", StatusCode::kNotFound, [&] { return channel_->Disconnect(5); });
  const SendRange range = Range(0, 4);
  RefuseEach("OnLayerAppended", StatusCode::kOk, [&] { return Give(0, range); });
  const SendRecord stranger = Record(0, 4, 9);
  RefuseEach("OnForwardEnded", StatusCode::kUnavailable, [&] { return End(stranger); });
  const Status why(StatusCode::kCancelled, "");
  RefuseEach("OnSendStopped", StatusCode::kUnavailable,
             [&] { return channel_->OnSendStopped(std::span(&stranger, 1), why); });
  ASSERT_TRUE(End(Record(0, 4)).ok());
  ASSERT_EQ(receiver_.completed.size(), 1U);
}

}  // namespace
}  // namespace quire
