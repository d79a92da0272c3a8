// Copies to pages that go on at the same time, and outlast their reservations: what they hold up,
// and what they do not.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/testing/soak.h"
#include "kv/cache/paged_kv_cache.h"
#include "kv/testing/holding_runner.h"
#include "kv/testing/kv_test_forward.h"
#include "quire/attention_kv_cache.h"
#include "quire/composite_state.h"

namespace quire {
namespace {

using Ids = std::vector<int64_t>;
using Tokens = std::vector<uint64_t>;

constexpr auto kSoon = std::chrono::minutes(1);  // for what must come; nothing waits so long
constexpr auto kLook = std::chrono::milliseconds(50);

std::vector<AttentionLayerSpec> Layers() {
  return {{4, 2, 8, 8, DType::kF32}, {4, 2, 8, 8, DType::kI8}};
}

bool IsSame(const std::vector<LayerOutputs>& a, const std::vector<LayerOutputs>& b) {
  return std::ranges::equal(a, b, [](const LayerOutputs& one, const LayerOutputs& other) {
    return std::ranges::equal(one.o.bytes(), other.o.bytes());
  });
}

// Tokens as a sender's cache has them, on their way to sequences of another cache. Any thread, but
// for Compute.
class Sender {
 public:
  void Compute(const AttentionKVCacheOptions& options, const Tokens& tokens) {
    const auto cache = MakeTestCache(options);
    ASSERT_TRUE(cache->AddSequence(0).ok());
    ExtendSequence(*cache, 0, tokens);
    rows_.clear();
    for (const AttentionLayerSpec& spec : options.layers) {
      rows_.emplace_back(spec, std::ssize(tokens));
      const Status exported = cache->ExportKV(0, std::ssize(rows_) - 1, 0, rows_.back().view());
      ASSERT_TRUE(exported.ok()) << exported.ToString();
    }
  }
  Status Store(KVTransfer& to, uint64_t epoch, int64_t layer, const ReceivePart& part) const {
    const LayerKV rows =
        RowsOf(rows_[static_cast<size_t>(layer)].view(), part.first_row, part.count);
    QUIRE_ASSIGN_OR_RETURN(const ReceiveView view, to.View(epoch, layer, part));
    CopyHeads(rows, part.first_head, view.rows, 0, part.head_count);
    return to.Store(epoch, layer, part, view,
                    DigestOfHeads(rows, part.first_head, part.head_count));
  }
  // Rows in all layers, and they count.
  Status Send(KVTransfer& to, uint64_t epoch, ReceivePart part) const {
    for (int64_t layer = 0; layer < std::ssize(rows_); ++layer) {
      QUIRE_RETURN_IF_ERROR(Store(to, epoch, layer, part));
      QUIRE_RETURN_IF_ERROR(to.Complete(epoch, layer, part));
    }
    return Status();
  }

 private:
  std::vector<StoredRows> rows_;
};

ReceivePart Rows(int64_t first, int64_t count) {
  return {.first_row = first, .count = count, .first_head = 0, .head_count = 2};
}

// A receiver whose copies the test holds, and a cache that computes everything alone. Sequences 0
// to 2 are there.
class KVCopies : public testing::Test {
 protected:
  static AttentionKVCacheOptions Options() {
    AttentionKVCacheOptions options = TestCacheOptions(
        Layers(), {.max_num_sequences = 8, .token_capacity = 400, .page_size = 16});
    options.poison_freed_pages = false;  // a page is written when it is taken
    return options;
  }
  static std::unique_ptr<AttentionKVCache> Make(std::shared_ptr<ParallelRunner> runner) {
    auto cache = PagedKVCache::Create(Options(), std::move(runner)).value();
    for (const int64_t id : {0, 1, 2}) EXPECT_TRUE(cache->AddSequence(id).ok());
    return cache;
  }
  ReceiveMap Reserve(int64_t id, int64_t count) {
    return cache->transfer()->DisaggPrepareRecv(id, count).value();
  }
  // A store that stands still in its copy. REQUIRES: the part has a whole tile.
  std::future<Status> StoreHeld(uint64_t epoch, const ReceivePart& part) {
    runner->HoldNext(1);
    auto stored = std::async(std::launch::async, [this, epoch, part] {
      return sender.Store(*cache->transfer(), epoch, 0, part);
    });
    runner->AwaitHeld(1);
    return stored;
  }
  void ExpectSameKV(int64_t id) {
    const int64_t length = cache->GetSequenceLength(id).value();
    ASSERT_EQ(length, alone->GetSequenceLength(id).value());
    for (int64_t layer = 0; layer < std::ssize(Layers()); ++layer) {
      const AttentionLayerSpec spec = Layers()[static_cast<size_t>(layer)];
      const StoredRows found(spec, length), due(spec, length);
      ASSERT_TRUE(cache->ExportKV(id, layer, 0, found.view()).ok());
      ASSERT_TRUE(alone->ExportKV(id, layer, 0, due.view()).ok());
      EXPECT_TRUE(found == due) << "layer " << layer << " of sequence " << id;
    }
  }

  std::shared_ptr<HoldingRunner> runner = std::make_shared<HoldingRunner>();
  std::unique_ptr<AttentionKVCache> cache = Make(runner);
  std::unique_ptr<AttentionKVCache> alone = Make(nullptr);
  Sender sender;
};

TEST_F(KVCopies, OneGoesOnWhileAnotherStandsStill) {
  sender.Compute(Options(), NumberedTokens(0, 20));
  KVTransfer& transfer = *cache->transfer();
  const ReceiveMap held = Reserve(0, 20), other = Reserve(1, 20);
  std::future<Status> first = StoreHeld(held.epoch, Rows(0, 20));
  std::future<Status> second = std::async(std::launch::async, [&]() -> Status {
    QUIRE_RETURN_IF_ERROR(sender.Send(transfer, other.epoch, Rows(0, 20)));
    EXPECT_EQ(transfer.GetReceiveProgress(held.epoch)->complete, 0);
    return transfer.DisaggCommitRecv(other.epoch, 20);
  });
  EXPECT_EQ(second.wait_for(kSoon), std::future_status::ready);
  runner->Release();
  EXPECT_EQ(first.get().ToString(), "Ok");
  EXPECT_EQ(second.get().ToString(), "Ok");
  ASSERT_TRUE(sender.Send(transfer, held.epoch, Rows(0, 20)).ok());
  ASSERT_TRUE(transfer.DisaggCommitRecv(held.epoch, 20).ok());
  for (const int64_t id : {0, 1}) {
    ExtendSequence(*alone, id, NumberedTokens(0, 20));
    ExpectSameKV(id);
    EXPECT_TRUE(IsSame(ExtendSequence(*cache, id, NumberedTokens(20, 3)),
                       ExtendSequence(*alone, id, NumberedTokens(20, 3))));
  }
}

// Whatever ends a reservation, all is at once as before it; the copy ends with no effect.
TEST_F(KVCopies, NothingThatCancelsWaitsForOne) {
  sender.Compute(Options(), NumberedTokens(0, 20));
  for (const int64_t id : {0, 1}) {
    ExtendSequence(*cache, id, NumberedTokens(100, 3));
    ExtendSequence(*alone, id, NumberedTokens(100, 3));
  }
  const std::pair<const char*, std::function<Status(uint64_t)>> ways[] = {
      {"cancel", [&](uint64_t epoch) { return cache->transfer()->DisaggCancelRecv(epoch); }},
      {"pop", [&](uint64_t) { return cache->PopN(0, 20); }},
      {"remove", [&](uint64_t) { return cache->RemoveSequence(0); }},
      {"clear", [&](uint64_t) { return cache->Clear(); }},
  };
  for (const auto& [name, end] : ways) {
    SCOPED_TRACE(name);
    const uint64_t digest = cache->StateDigest();
    const int64_t free = cache->GetNumAvailablePages();
    const uint64_t epoch = Reserve(0, 20).epoch;
    std::future<Status> stored = StoreHeld(epoch, Rows(0, 20));
    std::future<Status> ended =
        std::async(std::launch::async, [end = end, epoch] { return end(epoch); });
    const bool has_ended = ended.wait_for(kSoon) == std::future_status::ready;
    EXPECT_TRUE(has_ended);
    const bool is_cancel = name == std::string("cancel") || name == std::string("pop");
    if (is_cancel && has_ended) {
      EXPECT_EQ(cache->StateDigest(), digest);
      EXPECT_EQ(cache->GetNumAvailablePages(), free);
      ExpectSameKV(0);
    }
    if (has_ended) {
      EXPECT_TRUE(cache->CheckInvariants().ok());
    }
    runner->Release();
    EXPECT_EQ(ended.get().ToString(), "Ok");
    EXPECT_EQ(stored.get().code(), StatusCode::kNotFound);
    EXPECT_EQ(cache->transfer()->GetReceiveProgress(epoch).status().code(), StatusCode::kNotFound);
    if (is_cancel) ExpectSameKV(1);
    if (!cache->HasSequence(0)) {
      ASSERT_TRUE(cache->AddSequence(0).ok());
    }
  }
}

// Pages that a copy still writes to are free, and nobody writes there before the copy ends. What
// takes no page does not wait.
TEST_F(KVCopies, PagesAreTakenWhenNoLateCopyWritesToThem) {
  sender.Compute(Options(), NumberedTokens(0, 20));
  ExtendSequence(*cache, 1, NumberedTokens(100, 3));
  ExtendSequence(*alone, 1, NumberedTokens(100, 3));
  const uint64_t epoch = Reserve(0, 20).epoch;
  std::future<Status> stored = StoreHeld(epoch, Rows(0, 20));
  ASSERT_TRUE(cache->transfer()->DisaggCancelRecv(epoch).ok());
  EXPECT_TRUE(IsSame(ExtendSequence(*cache, 1, NumberedTokens(103, 4)),
                     ExtendSequence(*alone, 1, NumberedTokens(103, 4))));
  std::future<std::vector<LayerOutputs>> taken = std::async(
      std::launch::async, [&] { return ExtendSequence(*cache, 2, NumberedTokens(300, 40)); });
  EXPECT_EQ(taken.wait_for(kLook), std::future_status::timeout) << "it writes beside a copy";
  runner->Release();
  EXPECT_EQ(stored.get().code(), StatusCode::kNotFound);
  EXPECT_TRUE(IsSame(taken.get(), ExtendSequence(*alone, 2, NumberedTokens(300, 40))));
  ExpectSameKV(1);
  ExpectSameKV(2);
  EXPECT_TRUE(cache->CheckInvariants().ok());
}

// The tokens that stay may share a page with the rows that are being copied.
TEST_F(KVCopies, ACommitWaitsForThatOfItsReservationAlone) {
  sender.Compute(Options(), NumberedTokens(0, 40));
  KVTransfer& transfer = *cache->transfer();
  const ReceiveMap map = Reserve(0, 40), other = Reserve(1, 40);
  ASSERT_TRUE(sender.Send(transfer, map.epoch, Rows(0, 5)).ok());
  std::future<Status> stored = StoreHeld(map.epoch, Rows(5, 35));
  ASSERT_TRUE(sender.Send(transfer, other.epoch, Rows(0, 5)).ok());
  ASSERT_TRUE(transfer.DisaggCommitRecv(other.epoch, 5).ok());
  std::future<Status> committed =
      std::async(std::launch::async, [&] { return transfer.DisaggCommitRecv(map.epoch, 5); });
  EXPECT_EQ(committed.wait_for(kLook), std::future_status::timeout) << "a copy writes to its page";
  runner->Release();
  EXPECT_EQ(stored.get().ToString(), "Ok");
  EXPECT_EQ(committed.get().ToString(), "Ok");
  for (const int64_t id : {0, 1}) {
    ExtendSequence(*alone, id, NumberedTokens(0, 5));
    EXPECT_TRUE(IsSame(ExtendSequence(*cache, id, NumberedTokens(50, 30)),
                       ExtendSequence(*alone, id, NumberedTokens(50, 30))));
    ExpectSameKV(id);
  }
}

TEST_F(KVCopies, RowsThatAreCopiedDoNotCountAndAreNotCompleted) {
  sender.Compute(Options(), NumberedTokens(0, 20));
  KVTransfer& transfer = *cache->transfer();
  const ReceiveMap map = Reserve(0, 20);
  ASSERT_TRUE(sender.Send(transfer, map.epoch, Rows(0, 20)).ok());
  std::future<Status> again = StoreHeld(map.epoch, Rows(0, 20));
  EXPECT_EQ(transfer.GetReceiveProgress(map.epoch)->layer_rows, (Ids{0, 20}));
  EXPECT_EQ(transfer.Complete(map.epoch, 0, Rows(0, 20)).code(), StatusCode::kBadState);
  runner->Release();
  EXPECT_EQ(again.get().ToString(), "Ok");
  EXPECT_EQ(transfer.DisaggCommitRecv(map.epoch, 20).code(), StatusCode::kBadState);
  EXPECT_EQ(transfer.Complete(map.epoch, 0, Rows(0, 20)).ToString(), "Ok");
  EXPECT_EQ(transfer.DisaggCommitRecv(map.epoch, 20).ToString(), "Ok");
  ExtendSequence(*alone, 0, NumberedTokens(0, 20));
  ExpectSameKV(0);
}

// A freed page is filled with NaN at once: this cache's cancel waits.
TEST_F(KVCopies, APoisonedPageIsNotWrittenByALateOne) {
  AttentionKVCacheOptions options = Options();
  options.poison_freed_pages = true;
  cache = PagedKVCache::Create(options, runner).value();
  ASSERT_TRUE(cache->AddSequence(0).ok());
  sender.Compute(Options(), NumberedTokens(0, 20));
  const uint64_t epoch = Reserve(0, 20).epoch;
  std::future<Status> stored = StoreHeld(epoch, Rows(0, 20));
  std::future<Status> cancelled =
      std::async(std::launch::async, [&] { return cache->transfer()->DisaggCancelRecv(epoch); });
  EXPECT_EQ(cancelled.wait_for(kLook), std::future_status::timeout);
  runner->Release();
  EXPECT_EQ(stored.get().ToString(), "Ok");
  EXPECT_EQ(cancelled.get().ToString(), "Ok");
}

TEST_F(KVCopies, ThoseOfACompositeHoldUpThePagesOfItsCaches) {
  CompositeState::Parts parts;
  parts.attention = PagedKVCache::Create(Options(), runner).value();
  AttentionKVCache& part = *parts.attention;
  const auto state = CompositeState::Create(std::move(parts)).value();
  for (const int64_t id : {0, 1}) ASSERT_TRUE(state->AddSequence(id).ok());
  sender.Compute(Options(), NumberedTokens(0, 20));
  KVTransfer& transfer = *state->transfer();
  const uint64_t epoch = transfer.DisaggPrepareRecv(0, 20)->epoch;
  runner->HoldNext(1);
  std::future<Status> stored =
      std::async(std::launch::async, [&] { return sender.Store(transfer, epoch, 0, Rows(0, 20)); });
  runner->AwaitHeld(1);
  ASSERT_TRUE(transfer.DisaggCancelRecv(epoch).ok());
  std::future<Status> taken =
      std::async(std::launch::async, [&] { return state->BeginForward(Ids{1}, Ids{4}); });
  EXPECT_EQ(taken.wait_for(kLook), std::future_status::timeout) << "it writes beside a copy";
  runner->Release();
  EXPECT_EQ(stored.get().code(), StatusCode::kNotFound);
  ASSERT_EQ(taken.get().ToString(), "Ok");
  const auto found = FinishForward(part, Layers(), NumberedTokens(7, 4));
  ASSERT_TRUE(found.ok()) << found.status().ToString();
  EXPECT_TRUE(IsSame(*found, ExtendSequence(*alone, 1, NumberedTokens(7, 4))));
}

// Two senders with a head each, of the same rows, tile by tile.
TEST_F(KVCopies, HeadsOfTheSameRowsComeFromSeveralThreads) {
  sender.Compute(Options(), NumberedTokens(0, 60));
  KVTransfer& transfer = *cache->transfer();
  ExtendSequence(*alone, 0, NumberedTokens(0, 60));
  for (int round = 0; round < 20; ++round) {
    const ReceiveMap map = Reserve(0, 60);
    Status statuses[2];
    const auto send = [&](int64_t head) -> Status {
      for (int64_t first = 0; first < 60; first += 5) {
        const ReceivePart part{.first_row = first, .count = 5, .first_head = head, .head_count = 1};
        QUIRE_RETURN_IF_ERROR(sender.Send(transfer, map.epoch, part));
      }
      return Status();
    };
    std::thread other([&] { statuses[1] = send(1); });
    statuses[0] = send(0);
    other.join();
    for (const Status& status : statuses) ASSERT_EQ(status.ToString(), "Ok");
    ASSERT_TRUE(transfer.DisaggCommitRecv(map.epoch, 60).ok());
    ExpectSameKV(0);
    ASSERT_TRUE(cache->PopN(0, 60).ok());
  }
}

// Senders store all the time; reservations end at any moment, and others' forwards take their
// pages.
TEST_F(KVCopies, EndsAtAnyMomentCostNobodyABit) {
  constexpr int64_t kSenders = 3;
  constexpr int64_t kFirst = 3;  // the senders' sequences follow
  const int64_t rounds = RoundsOf(2000);
  ReportFigure("cancels", rounds);
  sender.Compute(Options(), NumberedTokens(0, 40));
  KVTransfer& transfer = *cache->transfer();
  std::atomic<uint64_t> epochs[kSenders] = {};  // 0: none
  std::atomic<bool> is_over = false;
  std::vector<std::thread> threads;
  for (int64_t s = 0; s < kSenders; ++s) {
    ASSERT_TRUE(cache->AddSequence(kFirst + s).ok());
    threads.emplace_back([&, s] {
      for (int64_t first = 0; !is_over; first = (first + 10) % 40) {
        const Status sent = sender.Send(transfer, epochs[s], Rows(first, 10));
        if (!sent.ok()) {
          EXPECT_EQ(sent.code(), StatusCode::kNotFound) << sent.ToString();
        }
      }
    });
  }
  std::mt19937 random(static_cast<uint32_t>(SoakSeed(1)));
  for (int64_t round = 0; round < rounds; ++round) {
    const int64_t s = static_cast<int64_t>(random() % kSenders);
    if (epochs[s] == 0) {
      epochs[s] = Reserve(kFirst + s, 40).epoch;
    } else {
      const uint64_t epoch = epochs[s].exchange(0);
      const int64_t complete = transfer.GetReceiveProgress(epoch)->complete;
      // What is complete may be on its way again.
      const Status kept = transfer.DisaggCommitRecv(epoch, random() % 2 == 0 ? 0 : complete);
      if (!kept.ok()) {
        EXPECT_EQ(transfer.DisaggCancelRecv(epoch).ToString(), "Ok");
      }
      const int64_t length = cache->GetSequenceLength(kFirst + s).value();
      ASSERT_TRUE(cache->PopN(kFirst + s, length).ok());
    }
    const int64_t id = static_cast<int64_t>(random() % 3);
    const int64_t length = cache->GetSequenceLength(id).value();
    for (AttentionKVCache* each : {cache.get(), alone.get()}) {
      if (length > 60) {
        ASSERT_TRUE(each->PopN(id, length).ok());
      }
    }
    const Tokens text = NumberedTokens(round, 1 + static_cast<int64_t>(random() % 20));
    ASSERT_TRUE(IsSame(ExtendSequence(*cache, id, text), ExtendSequence(*alone, id, text)))
        << round;
  }
  is_over = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(cache->CheckInvariants().ok());
  for (const int64_t id : {0, 1, 2}) ExpectSameKV(id);
}

}  // namespace
}  // namespace quire
