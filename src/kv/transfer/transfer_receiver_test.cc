#include "kv/transfer/transfer_receiver.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <thread>
#include <utility>
#include <vector>

namespace quire {
namespace {

// A part of one state. In each half of a call another thread asks how many reservations there are,
// as a query of a part does that holds the part's own lock.
class AskedPart final : public ReceivingPart {
 public:
  std::vector<TransferLayer> receive_layers() override { return {TransferLayer{.elements = 1}}; }
  size_t receive_groups() const override { return 0; }
  void SetReceiver(TransferReceiver* receiver) noexcept override { receiver_ = receiver; }
  Result<ReservePlan> PlanReserve(const char*, int64_t, int64_t) override {
    Ask();
    return ReservePlan{};
  }
  void CommitReserve(const ReceiveShare&) noexcept override { Ask(); }
  Status PlanTake(const char*, const ReceiveShare&, int64_t) override {
    Ask();
    return refuses ? Status(StatusCode::kOutOfPages, "no") : Status();
  }
  void CommitTake() noexcept override { Ask(); }
  void DropPlanned() noexcept override { Ask(); }

  // What was answered since the last call of this.
  std::vector<int64_t> TakeAnswers() { return std::exchange(answers_, {}); }

  bool refuses = false;

 private:
  void Ask() {
    std::thread([&] { answers_.push_back(receiver_->receives().count()); }).join();
  }

  TransferReceiver* receiver_ = nullptr;
  std::vector<int64_t> answers_;
};

using Answers = std::vector<int64_t>;

class TransferReceiverTest : public ::testing::Test {
 protected:
  TransferReceiverTest() { part.SetReceiver(&receiver); }

  // The state after the reservation's last token comes and counts.
  void Fill(const ReceiveMap& map) {
    const ReceivePart state{.first_row = map.count - 1, .count = 1, .head_count = 1};
    PendingReceives& receives = receiver.receives();
    const auto view = receives.View(map.epoch, 0, state);
    ASSERT_TRUE(view.ok()) << view.status().ToString();
    *view->rows.k.data_as<float>() = 1;
    ASSERT_TRUE(receives.Store(map.epoch, 0, state, *view, {}).ok());
    ASSERT_TRUE(receives.Complete(map.epoch, 0, state).ok());
  }

  AskedPart part;
  ReceivingPart* const parts[1] = {&part};
  TransferReceiver receiver{parts};
};

// A reservation is there as soon as a part has it, and gone before a part has given it up.
TEST_F(TransferReceiverTest, PartsCanBeAskedInEveryHalf) {
  const auto cancelled = receiver.Prepare("Prepare", 3, 2);
  ASSERT_TRUE(cancelled.ok());
  EXPECT_EQ(part.TakeAnswers(), (Answers{0, 1}));
  EXPECT_TRUE(receiver.Cancel("Cancel", cancelled->epoch).ok());
  EXPECT_EQ(part.TakeAnswers(), (Answers{1, 0}));
  const auto committed = receiver.Prepare("Prepare", 3, 2);
  ASSERT_TRUE(committed.ok());
  ASSERT_NO_FATAL_FAILURE(Fill(*committed));
  part.TakeAnswers();
  EXPECT_TRUE(receiver.Commit("Commit", committed->epoch, 2).ok());
  EXPECT_EQ(part.TakeAnswers(), (Answers{1, 0}));
}

TEST_F(TransferReceiverTest, WhatAPartRefusesStaysReserved) {
  const auto map = receiver.Prepare("Prepare", 3, 2);
  ASSERT_TRUE(map.ok());
  part.refuses = true;
  EXPECT_EQ(receiver.Commit("Commit", map->epoch, 0).code(), StatusCode::kOutOfPages);
  EXPECT_EQ(receiver.receives().PendingOf(3), 2);
  ASSERT_NO_FATAL_FAILURE(Fill(*map)) << "parts are taken again";
  part.refuses = false;
  EXPECT_TRUE(receiver.Commit("Commit", map->epoch, 2).ok());
  EXPECT_EQ(receiver.receives().PendingOf(3), 0);
}

}  // namespace
}  // namespace quire
