// Reserving, marking and sending on one cache at a time: the map's encoding, what is legal while
// tokens are pending, what a sink is given, and that a refused call, for whatever reason, leaves
// all as it was. Two caches and a channel are in src/kv/cache/kv_channel_test.cc.
#include "quire/kv_transfer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "kv/cache/paged_kv_cache.h"
#include "kv/testing/allocation_refusal.h"
#include "kv/testing/kv_test_forward.h"
#include "kv/transfer/send_marks.h"
#include "kv/transfer/slot_runs.h"
#include "quire/attention_kv_cache.h"

namespace quire {
namespace {

using Ids = std::vector<int64_t>;
using Tokens = std::vector<uint64_t>;

AttentionKVCacheOptions MakeOptions() {
  return TestCacheOptions(
      {{2, 2, 4, 4, DType::kF32}, {2, 2, 4, 4, DType::kF32}},
      {.max_num_sequences = 8, .token_capacity = 64, .prefill_chunk_size = 64, .page_size = 4});
}

void Extend(AttentionKVCache& cache, int64_t id, int64_t count) {
  Tokens tokens;
  for (int64_t i = 0; i < count; ++i) tokens.push_back(static_cast<uint64_t>(100 * id + i));
  const auto outputs = RunForward(cache, cache.options().layers, Ids{id}, {tokens});
  ASSERT_TRUE(outputs.ok()) << outputs.status().ToString();
}

// Keeps what it is given.
class RecordingSink final : public LayerSink {
 public:
  struct Range {
    int64_t layer, first_position, first_row, count, peer, local_head, remote_head, head_count;
    uint64_t epoch;
    std::vector<int64_t> slots;
    uint32_t digest;
  };
  struct Record {
    std::string what;
    int64_t first_row, count, peer;
    bool operator==(const Record&) const = default;
  };
  std::vector<Range> ranges;
  std::vector<Record> records;
  bool holds = false;
  std::vector<SendRange> held;  // if it holds

  Status OnLayerAppended(int64_t layer, std::span<const SendRange> given) override {
    if (holds) held.insert(held.end(), given.begin(), given.end());
    for (const SendRange& r : given) {
      ranges.push_back({layer, r.first_position, r.first_row, r.count, r.peer, r.local_head,
                        r.remote_head, r.head_count, r.epoch,
                        std::vector<int64_t>(r.remote_slots.begin(), r.remote_slots.end()),
                        DigestOfHeads(r.local, 0, r.local.k.dim(1))});
    }
    return Status();
  }
  Status OnForwardEnded(std::span<const SendRecord> given) override { return Note("end", given); }
  Status OnForwardAborted(std::span<const SendRecord> given) override {
    return Note("abort", given);
  }
  Status OnSendStopped(std::span<const SendRecord> given, const Status& why) override {
    return Note("stop " + std::string(StatusCodeName(why.code())), given);
  }

 private:
  Status Note(const std::string& what, std::span<const SendRecord> given) {
    for (const SendRecord& record : given)
      records.push_back({what, record.first_row, record.count, record.peer});
    return Status();
  }
};

// The map of another cache with the same layers, for `count` tokens from `position` on.
ReceiveMap MapOf(const AttentionKVCacheOptions& options, int64_t position, int64_t count) {
  const auto receiver = MakeTestCache(options);
  EXPECT_TRUE(receiver->AddSequence(0).ok());
  if (position > 0) Extend(*receiver, 0, position);
  const auto map = receiver->transfer()->DisaggPrepareRecv(0, count);
  EXPECT_TRUE(map.ok()) << map.status().ToString();
  return *map;
}

Status Mark(AttentionKVCache& cache, int64_t id, int64_t begin, const ReceiveMap& map) {
  return cache.transfer()->DisaggMarkSend(id, begin, std::span(&map, 1), 6, 0);
}

// Fills part of a reservation with the given bytes.
Status Fill(KVTransfer& cache, uint64_t epoch, int64_t layer, const ReceivePart& part,
            float value) {
  const auto view = cache.View(epoch, layer, part);
  if (!view.ok()) return view.status();
  for (const TensorView* tensor : {&view->rows.k, &view->rows.v})
    std::fill_n(tensor->data_as<float>(), tensor->element_count(), value);
  const uint32_t digest = DigestOfHeads(view->rows, 0, part.head_count);
  QUIRE_RETURN_IF_ERROR(cache.Store(epoch, layer, part, *view, digest));
  return cache.Complete(epoch, layer, part);
}

// ---------------------------------------------------------------------- maps

TEST(KVTransfer, TheMapIsThatOfASequenceOfRuns) {
  const auto cache = MakeTestCache(MakeOptions());
  KVTransfer& transfer = *cache->transfer();
  for (const int64_t id : {0, 1, 2}) ASSERT_TRUE(cache->AddSequence(id).ok());
  // Fresh pages follow one another: one run.
  const auto first = transfer.DisaggPrepareRecv(0, 10);
  ASSERT_TRUE(first.ok());
  EXPECT_EQ(first->slots, (std::vector<int64_t>{1, 0, 10}));
  EXPECT_EQ(first->count, 10);
  EXPECT_EQ(first->kv_heads, (std::vector<int64_t>{2, 2}));
  EXPECT_EQ(cache->GetSequenceLength(0).value(), 10);
  // Behind 5 tokens, in pages 3 and 4, position 5 opens page 5 at slot 1, positions 8 to 11 are in
  // page 6.
  Extend(*cache, 1, 5);
  const auto second = transfer.DisaggPrepareRecv(1, 7);
  ASSERT_TRUE(second.ok());
  EXPECT_EQ(second->slots, (std::vector<int64_t>{1, 21, 7}));
  EXPECT_EQ(second->first_position, 5);
  EXPECT_GT(second->epoch, first->epoch);
  // Freed pages come out the last freed first: runs of a page each.
  ASSERT_TRUE(transfer.DisaggCancelRecv(first->epoch).ok());
  const auto third = transfer.DisaggPrepareRecv(2, 9);
  ASSERT_TRUE(third.ok());
  EXPECT_EQ(DecodeSlots(third->slots, 9).value().size(), 9U);
  EXPECT_EQ(third->slots, (std::vector<int64_t>{1, 0, 9}));
  ASSERT_TRUE(cache->CheckInvariants().ok());
}

TEST(KVTransfer, SeveralGroupsHaveNumbersInPlaceOfSlots) {
  auto options = MakeOptions();
  options.layers[1].dtype = DType::kBF16;
  EXPECT_EQ(MapOf(options, 5, 9).slots, (std::vector<int64_t>{1, 0, 9}));
}

TEST(KVTransfer, MapsAreDecodedOrRefused) {
  using Map = std::vector<int64_t>;
  EXPECT_EQ(DecodeSlots(Map{2, 7, 2, 3, 1}, 9).value(), (Map{7, 8, 3}));
  EXPECT_EQ(DecodeSlots(Map{1, -1, 2}, 9).value(), (Map{-1, 0}));
  for (const Map& bad : {Map{}, Map{0}, Map{1}, Map{1, 0}, Map{2, 0, 1}, Map{1, 0, 1, 2},
                         Map{1, -2, 1}, Map{1, 0, 0}, Map{1, 0, -3}, Map{-1, 0, 1}, Map{1, 0, 10},
                         Map{1, INT64_MAX, 2}, Map{INT64_MAX, 0, 1}}) {
    EXPECT_EQ(DecodeSlots(bad, 9).status().code(), StatusCode::kBadArgument);
  }
}

// A map of three numbers may claim as many tokens as there are positions.
TEST(KVTransfer, AMarkTakesMemoryForTheMapsRunsAlone) {
  const auto cache = MakeTestCache(MakeOptions());
  ASSERT_TRUE(cache->AddSequence(0).ok());
  Extend(*cache, 0, 3);
  const auto sink = std::make_shared<RecordingSink>();
  ASSERT_TRUE(cache->transfer()->SetLayerSink(sink).ok());
  ReceiveMap map = MapOf(MakeOptions(), 0, 4);
  ASSERT_TRUE(Mark(*cache, 0, 0, map).ok());
  map.count = int64_t{1} << 30;
  map.slots = {2, 5, 2, 100, map.count - 2};
  const int64_t before = BytesAllocated();
  ASSERT_TRUE(Mark(*cache, 0, 0, map).ok());
  EXPECT_LT(BytesAllocated() - before, 1 << 17) << "mostly for the ranges of a piece";
  Extend(*cache, 0, 2);
  ASSERT_EQ(sink->ranges.size(), 2U);
  EXPECT_EQ(sink->ranges[0].slots, (std::vector<int64_t>{5, 6, 100, 101, 102}));
  map.slots = {1, 0, map.count - 1};
  EXPECT_EQ(Mark(*cache, 0, 0, map).code(), StatusCode::kBadArgument) << "one slot is missing";
}

TEST(KVTransfer, SlotsOfPartsOfAMap) {
  const std::vector<int64_t> map{4, 7, 2, -1, 1, -1, 3, 20, 4};
  const auto all = DecodeSlots(map, 10);
  ASSERT_TRUE(all.ok());
  EXPECT_EQ(*all, (std::vector<int64_t>{7, 8, -1, -1, 0, 1, 20, 21, 22, 23}));
  const SlotRuns runs = *SlotRuns::Decode(map, 10);
  ASSERT_EQ(runs.count(), 10);
  for (int64_t first = 0; first < 10; ++first) {
    for (int64_t end = first + 1; end <= 10; ++end) {
      std::vector<int64_t> part(static_cast<size_t>(end - first));
      runs.Fill(first, part);
      EXPECT_EQ(part, std::vector<int64_t>(all->begin() + first, all->begin() + end));
    }
  }
}

// ---------------------------------------------------------------------- pending tokens

TEST(KVTransfer, WhatIsPendingIsInNoForwardAndNoCallSeesIt) {
  const auto cache = MakeTestCache(MakeOptions());
  KVTransfer& transfer = *cache->transfer();
  ASSERT_TRUE(cache->AddSequence(0).ok());
  Extend(*cache, 0, 6);
  const uint64_t before = cache->StateDigest();
  const int64_t free_before = cache->GetNumAvailablePages();
  const auto map = transfer.DisaggPrepareRecv(0, 5);
  ASSERT_TRUE(map.ok());
  EXPECT_EQ(cache->GetTotalSequenceLength(), 11);
  EXPECT_EQ(cache->GetDistinctTokenCount(), 11);
  EXPECT_EQ(cache->HeldTokens(0).value(), 6);
  const PageCounts pages = cache->page_counts();
  EXPECT_EQ(pages.exclusive, 4);  // one of its own in mid-range
  EXPECT_EQ(pages.free + pages.exclusive, pages.total);
  const uint64_t pending = cache->StateDigest();

  StoredRows rows(cache->options().layers[0], 1);
  TestTensor k(DType::kF32, {2, 1, 2, 4}), v(DType::kF32, {2, 1, 2, 4});
  const std::vector<std::pair<const char*, std::function<Status()>>> refused = {
      {"forward", [&] { return cache->BeginForward(Ids{0}, Ids{1}); }},
      {"tree", [&] { return cache->BeginTreeForward(Ids{0}, Ids{1}, Ids{-1}); }},
      {"pages", [&] { return cache->PagesNeeded(Ids{0}, Ids{1}).status(); }},
      {"retain", [&] { return cache->SetRetained(0, true); }},
      {"window", [&] { return cache->EnableSlidingWindowForSeq(0, 5, 1); }},
      {"fork", [&] { return cache->ForkSequence(0, 1); }},
      {"fork inside", [&] { return cache->ForkSequence(0, 1, 7); }},
      {"pop inside", [&] { return cache->PopN(0, 4); }},
      {"export", [&] { return cache->ExportKV(0, 0, 6, rows.view()); }},
      {"set", [&] { return cache->DebugSetKV(0, 0, k.view(), v.view()); }},
      {"get", [&] { return cache->DebugGetKV(0, 6, 7, k.view(), v.view()); }},
      {"import",
       [&] {
         const KVBlock block{rows.view(), rows.view()};
         return cache->ImportKV(0, std::span(&block, 1));
       }},
      {"receive", [&] { return transfer.DisaggPrepareRecv(0, 1).status(); }},
      {"commit", [&] { return transfer.DisaggCommitRecv(map->epoch, 1); }},
  };
  for (const auto& [name, call] : refused) {
    EXPECT_EQ(call().code(), StatusCode::kBadState) << name;
    EXPECT_EQ(cache->StateDigest(), pending) << name;
  }
  ASSERT_TRUE(cache->CheckInvariants().ok());
  // Up to the border all is as ever.
  ASSERT_TRUE(cache->ForkSequence(0, 1, 6).ok());
  ASSERT_TRUE(cache->ForkSequence(0, 2, 3).ok());
  Extend(*cache, 1, 3);
  ASSERT_TRUE(cache->CheckInvariants().ok());
  for (const int64_t id : {1, 2}) ASSERT_TRUE(cache->RemoveSequence(id).ok());
  EXPECT_EQ(cache->StateDigest(), pending);
  ASSERT_TRUE(transfer.DisaggCancelRecv(map->epoch).ok());
  EXPECT_EQ(cache->StateDigest(), before);
  EXPECT_EQ(cache->GetNumAvailablePages(), free_before);
}

TEST(KVTransfer, PopRemoveAndClearCancel) {
  using Cancel = std::function<Status(AttentionKVCache&)>;
  for (const Cancel& cancel : {Cancel([](AttentionKVCache& c) { return c.PopN(0, 5); }),
                               Cancel([](AttentionKVCache& c) { return c.PopN(0, 8); }),
                               Cancel([](AttentionKVCache& c) { return c.RemoveSequence(0); }),
                               Cancel([](AttentionKVCache& c) { return c.Clear(); })}) {
    const auto cache = MakeTestCache(MakeOptions());
    ASSERT_TRUE(cache->AddSequence(0).ok());
    Extend(*cache, 0, 6);
    const auto map = cache->transfer()->DisaggPrepareRecv(0, 5);
    ASSERT_TRUE(map.ok());
    ASSERT_TRUE(cancel(*cache).ok());
    ASSERT_TRUE(cache->CheckInvariants().ok());
    const ReceivePart all{.first_row = 0, .count = 5, .first_head = 0, .head_count = 2};
    EXPECT_EQ(cache->transfer()->View(map->epoch, 0, all).status().code(), StatusCode::kNotFound);
    EXPECT_EQ(cache->transfer()->DisaggCommitRecv(map->epoch, 0).code(), StatusCode::kNotFound);
    EXPECT_EQ(cache->transfer()->WaitReceived(map->epoch, 0, *MachineTime(), 0).code(),
              StatusCode::kCancelled);
    if (!cache->HasSequence(0)) {
      ASSERT_TRUE(cache->AddSequence(0).ok());
    }
    const auto again = cache->transfer()->DisaggPrepareRecv(0, 5);
    ASSERT_TRUE(again.ok());
    EXPECT_GT(again->epoch, map->epoch);
  }
}

TEST(KVTransfer, RowsCountWhenAllOfTheirHeadsAreThereInAnyOrder) {
  const auto cache = MakeTestCache(MakeOptions());
  KVTransfer& transfer = *cache->transfer();
  ASSERT_TRUE(cache->AddSequence(0).ok());
  const ReceiveMap map = transfer.DisaggPrepareRecv(0, 20).value();
  const auto fill = [&](int64_t layer, int64_t row, int64_t count, int64_t head, int64_t heads,
                        float value) {
    return Fill(transfer, map.epoch, layer,
                {.first_row = row, .count = count, .first_head = head, .head_count = heads}, value);
  };
  const auto rows = [&] { return transfer.GetReceiveProgress(map.epoch)->layer_rows; };
  ASSERT_TRUE(fill(0, 7, 13, 1, 1, 2).ok());
  EXPECT_EQ(rows(), (std::vector<int64_t>{0, 0}));
  ASSERT_TRUE(fill(0, 5, 15, 0, 1, 1).ok());
  EXPECT_EQ(rows(), (std::vector<int64_t>{13, 0}));
  ASSERT_TRUE(fill(0, 0, 7, 0, 2, 3).ok());  // row 5 and 6 of head 0 once more
  EXPECT_EQ(rows(), (std::vector<int64_t>{20, 0}));
  ASSERT_TRUE(fill(1, 0, 12, 0, 2, 4).ok());
  const Status status = transfer.DisaggCommitRecv(map.epoch, 13);
  EXPECT_EQ(status.code(), StatusCode::kBadState);
  EXPECT_NE(std::string(status.message()).find("token 12"), std::string::npos) << status.ToString();
  // What is stored again is not complete until it is completed again.
  const ReceivePart third{.first_row = 2, .count = 1, .first_head = 1, .head_count = 1};
  const auto view = transfer.View(map.epoch, 1, third);
  ASSERT_TRUE(view.ok());
  std::fill_n(view->rows.k.data_as<float>(), 4, 8.0F);
  std::fill_n(view->rows.v.data_as<float>(), 4, 8.0F);
  EXPECT_EQ(rows(), (std::vector<int64_t>{20, 12}));
  ASSERT_TRUE(transfer.Store(map.epoch, 1, third, *view, DigestOfHeads(view->rows, 0, 1)).ok());
  EXPECT_EQ(rows(), (std::vector<int64_t>{20, 11}));
  ASSERT_TRUE(fill(1, 2, 1, 0, 1, 4).ok());  // the other head, once more
  EXPECT_EQ(rows(), (std::vector<int64_t>{20, 11}));
  EXPECT_EQ(transfer.DisaggCommitRecv(map.epoch, 12).code(), StatusCode::kBadState);
  ASSERT_TRUE(fill(1, 2, 1, 1, 1, 9).ok());
  ASSERT_TRUE(transfer.DisaggCommitRecv(map.epoch, 12).ok());
  EXPECT_EQ(cache->GetSequenceLength(0).value(), 12);
  EXPECT_EQ(cache->page_counts().exclusive, 3);
  ASSERT_TRUE(cache->CheckInvariants().ok());
  TestTensor k(DType::kF32, {2, 12, 2, 4}), v(DType::kF32, {2, 12, 2, 4});
  ASSERT_TRUE(cache->DebugGetKV(0, 0, 12, k.view(), v.view()).ok());
  for (int64_t token = 0; token < 12; ++token) {
    for (int64_t head = 0; head < 2; ++head) {
      const float want0 = token < 7 ? 3.0F : head == 0 ? 1.0F : 2.0F;
      const float want1 = token == 2 && head == 1 ? 9.0F : 4.0F;
      EXPECT_EQ(v.Get((token * 2 + head) * 4), want0) << token;
      EXPECT_EQ(k.Get((96 + token * 2 * 4) + head * 4), want1) << token;
    }
  }
}

// A clock that tells when a thread waits by it.
class WatchedClock final : public Clock {
 public:
  int64_t WallMs() const noexcept override { return MachineTime()->WallMs(); }
  int64_t SteadyNs() const noexcept override { return MachineTime()->SteadyNs(); }
  void Wait(std::condition_variable& changed, std::unique_lock<std::mutex>& lock,
            int64_t until_ns) override {
    waits_.fetch_add(1);
    waits_.notify_all();
    MachineTime()->Wait(changed, lock, until_ns);
  }
  void AwaitAWait() const { waits_.wait(0); }

 private:
  std::atomic<int> waits_ = 0;
};

TEST(KVTransfer, ThoseWhoWaitForSomeRowsAreToldInAnyOrderOfTheParts) {
  const auto cache = MakeTestCache(MakeOptions());
  KVTransfer& transfer = *cache->transfer();
  ASSERT_TRUE(cache->AddSequence(0).ok());
  const ReceiveMap map = transfer.DisaggPrepareRecv(0, 8).value();
  WatchedClock clocks[2];
  Status told[2];
  std::vector<std::thread> waiting;
  for (int i = 0; i < 2; ++i) {
    waiting.emplace_back(
        [&, i] { told[i] = transfer.WaitReceived(map.epoch, 4 * (i + 1), clocks[i], kNever); });
    clocks[i].AwaitAWait();  // it waits, or will before the lock is free
  }
  const auto fill = [&](int64_t row) {
    for (const int64_t layer : {1, 0})
      EXPECT_TRUE(Fill(transfer, map.epoch, layer, {row, 2, 0, 2}, 1).ok());
  };
  const auto complete = [&] { return transfer.GetReceiveProgress(map.epoch)->complete; };
  for (const int64_t row : {6, 0}) fill(row);
  EXPECT_EQ(complete(), 2);
  fill(2);
  EXPECT_EQ(complete(), 4);
  waiting[0].join();
  EXPECT_TRUE(told[0].ok()) << told[0].ToString();
  const ReceivePart second{.first_row = 2, .count = 2, .first_head = 0, .head_count = 2};
  const auto again = transfer.View(map.epoch, 0, second);
  ASSERT_TRUE(again.ok());
  ASSERT_TRUE(transfer.Store(map.epoch, 0, second, *again, std::nullopt).ok());
  EXPECT_EQ(complete(), 2);  // what is stored again does not count
  fill(4);
  EXPECT_EQ(complete(), 2);
  ASSERT_TRUE(transfer.Complete(map.epoch, 0, second).ok());
  EXPECT_EQ(complete(), 8);
  waiting[1].join();
  EXPECT_TRUE(told[1].ok()) << told[1].ToString();
}

TEST(KVTransfer, BadPartsAndDigestsAreRefused) {
  const auto cache = MakeTestCache(MakeOptions());
  KVTransfer& transfer = *cache->transfer();
  ASSERT_TRUE(cache->AddSequence(0).ok());
  const ReceiveMap map = transfer.DisaggPrepareRecv(0, 8).value();
  for (const ReceivePart& part : {ReceivePart{-1, 1, 0, 1},
                                  {0, 0, 0, 1},
                                  {0, 9, 0, 1},
                                  {8, 1, 0, 1},
                                  {4, INT64_MAX, 0, 1},
                                  {0, 1, -1, 1},
                                  {0, 1, 0, 0},
                                  {0, 1, 0, 3},
                                  {0, 1, 2, 1}}) {
    EXPECT_EQ(transfer.View(map.epoch, 0, part).status().code(), StatusCode::kBadArgument);
    EXPECT_EQ(transfer.Store(map.epoch, 0, part, {}, 0).code(), StatusCode::kBadArgument);
    EXPECT_EQ(transfer.Complete(map.epoch, 0, part).code(), StatusCode::kBadArgument);
  }
  const ReceivePart all{.first_row = 0, .count = 8, .first_head = 0, .head_count = 2};
  for (const int64_t layer : {-1, 2})
    EXPECT_EQ(transfer.View(map.epoch, layer, all).status().code(), StatusCode::kBadArgument);
  const auto view = transfer.View(map.epoch, 0, all);
  ASSERT_TRUE(view.ok());
  std::fill_n(view->rows.k.data_as<float>(), 64, 1.0F);
  std::fill_n(view->rows.v.data_as<float>(), 64, 1.0F);
  const uint32_t digest = DigestOfHeads(view->rows, 0, 2);
  EXPECT_EQ(transfer.Complete(map.epoch, 0, all).code(), StatusCode::kBadState);
  ReceivePart seven = all;
  seven.count = 7;
  EXPECT_EQ(transfer.Store(map.epoch, 0, seven, *view, digest).code(), StatusCode::kBadArgument);
  EXPECT_EQ(transfer.Store(map.epoch, 0, all, *view, digest ^ 1).code(), StatusCode::kCorrupt);
  EXPECT_EQ(transfer.Complete(map.epoch, 0, all).code(), StatusCode::kBadState);
  EXPECT_EQ(transfer.GetReceiveProgress(map.epoch)->layer_rows, (std::vector<int64_t>{0, 0}));
  EXPECT_EQ(transfer.GetReceiveProgress(map.epoch)->failure.code(), StatusCode::kCorrupt);
  EXPECT_EQ(transfer.FailReceive(map.epoch, Status()).code(), StatusCode::kBadArgument);
  // The first failure is the one that is told.
  ASSERT_TRUE(transfer.FailReceive(map.epoch, Status(StatusCode::kUnavailable, "gone")).ok());
  EXPECT_EQ(transfer.GetReceiveProgress(map.epoch)->failure.code(), StatusCode::kCorrupt);
  // Sent again it is right, and the failure is history.
  ASSERT_TRUE(transfer.Store(map.epoch, 0, all, *view, digest).ok());
  EXPECT_EQ(transfer.GetReceiveProgress(map.epoch)->layer_rows, (std::vector<int64_t>{0, 0}));
  ASSERT_TRUE(transfer.Complete(map.epoch, 0, all).ok());
  ASSERT_TRUE(Fill(transfer, map.epoch, 1, all, 2).ok());
  EXPECT_TRUE(transfer.WaitReceived(map.epoch, 8, *MachineTime(), 0).ok());
  EXPECT_EQ(transfer.WaitReceived(map.epoch, 9, *MachineTime(), 0).code(),
            StatusCode::kBadArgument);
  EXPECT_EQ(transfer.DisaggCommitRecv(map.epoch, 9).code(), StatusCode::kBadArgument);
  ASSERT_TRUE(transfer.DisaggCommitRecv(map.epoch, 8).ok());
}

TEST(KVTransfer, APartWithoutADigestIsWhatItsChannelHasChecked) {
  const auto cache = MakeTestCache(MakeOptions());
  ASSERT_TRUE(cache->AddSequence(0).ok());
  KVTransfer& transfer = *cache->transfer();
  const ReceiveMap map = *transfer.DisaggPrepareRecv(0, 8);
  const ReceivePart all{.first_row = 0, .count = 8, .first_head = 0, .head_count = 2};
  const auto view = transfer.View(map.epoch, 0, all);
  ASSERT_TRUE(view.ok());
  std::fill_n(view->rows.k.data_as<float>(), view->rows.k.element_count(), 1.0F);
  std::fill_n(view->rows.v.data_as<float>(), view->rows.v.element_count(), 2.0F);
  ASSERT_TRUE(transfer.Store(map.epoch, 0, all, *view, std::nullopt).ok());
  ASSERT_TRUE(transfer.Complete(map.epoch, 0, all).ok());
  EXPECT_EQ(transfer.GetReceiveProgress(map.epoch)->layer_rows, (std::vector<int64_t>{8, 0}));
  // 0 is a digest as any other.
  EXPECT_EQ(transfer.Store(map.epoch, 0, all, *view, 0).code(), StatusCode::kCorrupt);
  EXPECT_EQ(transfer.GetReceiveProgress(map.epoch)->layer_rows, (std::vector<int64_t>{8, 0}));
}

TEST(KVTransfer, ADigestIsOfAllHeadsAndRows) {
  TestTensor k(DType::kF32, {3, 2, 4});
  TestTensor v(DType::kF32, {3, 2, 4});
  for (int64_t i = 0; i < k.count(); ++i) {
    k.Set(i, static_cast<float>(i));
    v.Set(i, static_cast<float>(-i));
  }
  const LayerKV rows = {.k = k.view(), .v = v.view()};
  const uint32_t digest = DigestOfHeads(rows, 0, 2);
  for (TestTensor* tensor : {&k, &v}) {
    for (int64_t i = 0; i < k.count(); ++i) {
      const float value = tensor->Get(i);
      tensor->Set(i, value + 0.5F);
      EXPECT_NE(DigestOfHeads(rows, 0, 2), digest) << i;
      tensor->Set(i, value);
    }
  }
  EXPECT_EQ(DigestOfHeads(rows, 0, 2), digest);
}

TEST(KVTransfer, HeadsOfATargetThatDoNotDivideAreNone) {
  EXPECT_EQ(HeadsFor(2, 4, 1, 0, 1).remote_head, 2);
  EXPECT_EQ(HeadsFor(2, 4, 1, 0, 1).head_count, 2);
  EXPECT_EQ(HeadsFor(2, 4, 1, 0, 2).head_count, 0);
  EXPECT_EQ(HeadsFor(2, 3, 0, 0, 1).head_count, 0);
  EXPECT_EQ(HeadsFor(4, 2, 0, 1, 2).local_head, 2);
  EXPECT_EQ(HeadsFor(4, 2, 0, 1, 3).head_count, 0);
}

// The other rows of a tile come when its last one is there: it must stay.
TEST(KVTransfer, RowsOfATileComeInAnyOrder) {
  auto options = MakeOptions();
  options.page_size = 16;
  const auto cache = MakeTestCache(options);
  ASSERT_TRUE(cache->AddSequence(0).ok());
  const ReceiveMap map = cache->transfer()->DisaggPrepareRecv(0, 16).value();
  for (const int64_t layer : {0, 1}) {
    ASSERT_TRUE(Fill(*cache->transfer(), map.epoch, layer, {15, 1, 0, 2}, 3).ok());
    ASSERT_TRUE(Fill(*cache->transfer(), map.epoch, layer, {0, 15, 0, 2}, 2).ok());
  }
  ASSERT_TRUE(cache->transfer()->DisaggCommitRecv(map.epoch, 16).ok());
  const StoredRows stored(options.layers[0], 16);
  ASSERT_TRUE(cache->ExportKV(0, 0, 0, stored.view()).ok());
  for (int64_t i = 0; i < stored.v.count(); ++i)
    ASSERT_EQ(stored.v.Get(i), i < 15 * 8 ? 2.0F : 3.0F) << i;
}

// The tiles in which positions [begin, end) lie.
int64_t TileCount(int64_t page_size, int64_t begin, int64_t end) {
  std::set<std::pair<int64_t, int64_t>> tiles;
  for (int64_t position = begin; position < end; ++position)
    tiles.emplace(position / page_size, position % page_size / 16);
  return std::ssize(tiles);
}

// A reservation writes to no page: that would take the caller's thread as long as its tokens are
// many. Memory that was never opened is NaN here, and a forward would show it.
TEST(KVTransfer, ATileIsOpenedByTheFirstRowThatComesAndNoneByAReservation) {
  for (const int64_t page_size : {16, 48, 20, 4, 5, 1}) {
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kI8}) {
      SCOPED_TRACE(std::to_string(page_size) + " " + std::string(DTypeName(dtype)));
      auto options = MakeOptions();
      options.layers = {{2, 2, 4, 4, dtype}, {2, 2, 4, 4, dtype}};
      options.page_size = page_size;
      options.token_capacity = 192;
      const auto sender = MakeTestCache(options);
      const auto cache = MakeTestCache(options);
      for (AttentionKVCache* of : {sender.get(), cache.get()}) ASSERT_TRUE(of->AddSequence(0).ok());
      Extend(*sender, 0, 45);
      Extend(*cache, 0, 5);
      const auto tiles = [&] {
        return static_cast<PagedKVCache&>(*cache).figures().tiles_received;
      };
      KVTransfer& transfer = *cache->transfer();
      const ReceiveMap map = transfer.DisaggPrepareRecv(0, 40).value();
      EXPECT_EQ(tiles(), 0);
      for (const int64_t layer : {0, 1}) {
        const StoredRows rows(options.layers[0], 40);
        ASSERT_TRUE(sender->ExportKV(0, layer, 5, rows.view()).ok());
        const auto send = [&](const ReceivePart& part) {
          const auto view = transfer.View(map.epoch, layer, part);
          ASSERT_TRUE(view.ok()) << view.status().ToString();
          const LayerKV from = RowsOf(rows.view(), part.first_row, part.count);
          CopyHeads(from, part.first_head, view->rows, 0, part.head_count);
          const uint32_t digest = DigestOfHeads(view->rows, 0, part.head_count);
          ASSERT_TRUE(transfer.Store(map.epoch, layer, part, *view, digest).ok());
          ASSERT_TRUE(transfer.Complete(map.epoch, layer, part).ok());
        };
        const int64_t before = tiles();
        if (layer == 1) send({.first_row = 0, .count = 40, .first_head = 0, .head_count = 2});
        for (int64_t row = layer == 0 ? 39 : -1; row >= 0; --row) {
          for (const int64_t head : {1, 0}) {
            send({.first_row = row, .count = 1, .first_head = head, .head_count = 1});
            ASSERT_EQ(tiles() - before, TileCount(page_size, 5 + row, 45)) << row;
          }
        }
        EXPECT_EQ(tiles() - before, TileCount(page_size, 5, 45));
      }
      ASSERT_TRUE(transfer.DisaggCommitRecv(map.epoch, 32).ok());
      ASSERT_TRUE(sender->PopN(0, 8).ok());
      const std::vector<Tokens> next{{700, 701, 702}};
      const auto here = RunForward(*cache, options.layers, Ids{0}, next);
      const auto there = RunForward(*sender, options.layers, Ids{0}, next);
      ASSERT_TRUE(here.ok() && there.ok());
      for (const size_t layer : {0, 1})
        EXPECT_TRUE(std::ranges::equal((*here)[layer].o.bytes(), (*there)[layer].o.bytes()));
      ASSERT_TRUE(cache->CheckInvariants().ok());
    }
  }
}

// Pages take whole rows: heads that come by themselves leave the others as they are, whatever the
// layout of the pages and in whatever order they come.
TEST(KVTransfer, HeadsOfARowComeInAnyOrderAndSizes) {
  for (const int64_t page_size : {16, 4, 5}) {
    for (const DType dtype : {DType::kF32, DType::kI8, DType::kBF16}) {
      SCOPED_TRACE(std::to_string(page_size) + " " + std::string(DTypeName(dtype)));
      auto options = MakeOptions();
      options.page_size = page_size;
      options.layers = {{4, 4, 6, 5, dtype}};
      const auto cache = MakeTestCache(options);
      KVTransfer& transfer = *cache->transfer();
      ASSERT_TRUE(cache->AddSequence(0).ok());
      const ReceiveMap map = transfer.DisaggPrepareRecv(0, 40).value();
      StoredRows due(options.layers[0], 40);
      const auto fill = [&](const ReceivePart& part, uint8_t seed) {
        const auto view = transfer.View(map.epoch, 0, part);
        ASSERT_TRUE(view.ok()) << view.status().ToString();
        uint8_t byte = seed;
        for (const TensorView* t :
             {&view->rows.k, &view->rows.v, &view->rows.k_scale, &view->rows.v_scale}) {
          if (t->rank() == 0) continue;
          // Below 0x40: finite in every dtype.
          std::generate_n(t->data_as<uint8_t>(), t->element_count() * DTypeBytes(t->dtype()),
                          [&] { return static_cast<uint8_t>((byte += 7) & 0x3f); });
        }
        CopyHeads(view->rows, 0, RowsOf(due.view(), part.first_row, part.count), part.first_head,
                  part.head_count);
        const uint32_t digest = DigestOfHeads(view->rows, 0, part.head_count);
        ASSERT_TRUE(transfer.Store(map.epoch, 0, part, *view, digest).ok());
        ASSERT_TRUE(transfer.Complete(map.epoch, 0, part).ok());
      };
      fill({.first_row = 7, .count = 33, .first_head = 2, .head_count = 2}, 1);
      fill({.first_row = 0, .count = 40, .first_head = 0, .head_count = 1}, 2);
      fill({.first_row = 0, .count = 20, .first_head = 0, .head_count = 4}, 3);
      fill({.first_row = 3, .count = 37, .first_head = 1, .head_count = 1}, 4);
      fill({.first_row = 18, .count = 1, .first_head = 1, .head_count = 3}, 5);
      ASSERT_TRUE(transfer.DisaggCommitRecv(map.epoch, 40).ok());
      const StoredRows stored(options.layers[0], 40);
      ASSERT_TRUE(cache->ExportKV(0, 0, 0, stored.view()).ok());
      EXPECT_TRUE(stored == due);
    }
  }
}

TEST(KVTransfer, ViewsHoldNoMoreThanTheStagingMemory) {
  const auto cache = MakeTestCache(MakeOptions());
  KVTransfer& transfer = *cache->transfer();
  constexpr int64_t kRow = 2 * 4 * 4 * 2;  // heads, dimensions, float32, keys and values
  EXPECT_EQ(transfer.staging().limit, StagingUse::kLimitDefault);
  const Status less = transfer.SetStagingLimit(kRow - 1);
  EXPECT_EQ(less.code(), StatusCode::kBadArgument);
  EXPECT_NE(less.message().find("staging_bytes"), std::string::npos) << less.ToString();
  ASSERT_TRUE(transfer.SetStagingLimit(8 * kRow).ok());
  ASSERT_TRUE(cache->AddSequence(0).ok());
  const ReceiveMap map = transfer.DisaggPrepareRecv(0, 40).value();
  EXPECT_EQ(transfer.staging().held, 0);  // a reservation holds none
  const auto rows = [](int64_t first, int64_t count) {
    return ReceivePart{.first_row = first, .count = count, .first_head = 0, .head_count = 2};
  };
  const Status large = transfer.View(map.epoch, 0, rows(0, 9)).status();
  EXPECT_EQ(large.code(), StatusCode::kTooLarge);
  EXPECT_NE(large.message().find("raise staging_bytes"), std::string::npos) << large.ToString();
  auto first = transfer.View(map.epoch, 0, rows(0, 5));
  ASSERT_TRUE(first.ok());
  EXPECT_EQ(transfer.staging().held, 5 * kRow);
  EXPECT_EQ(transfer.View(map.epoch, 1, rows(0, 4)).status().code(), StatusCode::kFull);
  const auto second = transfer.View(map.epoch, 1, rows(0, 3));
  ASSERT_TRUE(second.ok());
  // What is stored is held until the channel lets go, also behind the end of the reservation.
  std::fill_n(first->rows.k.data_as<float>(), 5 * 8, 1.0F);
  std::fill_n(first->rows.v.data_as<float>(), 5 * 8, 1.0F);
  const uint32_t digest = DigestOfHeads(first->rows, 0, 2);
  ASSERT_TRUE(transfer.Store(map.epoch, 0, rows(0, 5), *first, digest).ok());
  EXPECT_EQ(transfer.staging().held, 8 * kRow);
  first = Status(StatusCode::kNotFound, "");
  EXPECT_EQ(transfer.staging().held, 3 * kRow);
  ASSERT_TRUE(transfer.DisaggCancelRecv(map.epoch).ok());
  EXPECT_EQ(transfer.staging().held, 3 * kRow);
  EXPECT_EQ(transfer.staging().largest, 8 * kRow);
}

// A reservation behind a range that lies in as many pages as it may: the range is gathered first,
// and the pending tokens still have a page of their own.
TEST(KVTransfer, ReservationsKeepTheLimitOfPagesPerRange) {
  auto options = MakeOptions();
  options.page_size = 16;
  options.token_capacity = 300;
  const auto cache = MakeTestCache(options);
  ASSERT_TRUE(cache->AddSequence(0).ok());
  Extend(*cache, 0, 10);
  std::vector<uint64_t> epochs;
  for (int64_t id = 0; id < 6; ++id) {
    // Each commits one token less than it reserves; its child begins in mid-page.
    const auto map = cache->transfer()->DisaggPrepareRecv(id, 3);
    ASSERT_TRUE(map.ok()) << map.status().ToString();
    ASSERT_TRUE(cache->CheckInvariants().ok()) << cache->CheckInvariants().ToString();
    const ReceivePart all{.first_row = 0, .count = 3, .first_head = 0, .head_count = 2};
    for (const int64_t layer : {0, 1})
      ASSERT_TRUE(Fill(*cache->transfer(), map->epoch, layer, all, 1).ok());
    ASSERT_TRUE(cache->transfer()->DisaggCommitRecv(map->epoch, 1).ok());
    ASSERT_TRUE(cache->ForkSequence(id, id + 1).ok());
    Extend(*cache, id, 2);
    ASSERT_TRUE(cache->CheckInvariants().ok()) << cache->CheckInvariants().ToString();
  }
}

TEST(KVTransfer, OutOfPagesChangesNothing) {
  const auto cache = MakeTestCache(MakeOptions());
  ASSERT_TRUE(cache->AddSequence(0).ok());
  Extend(*cache, 0, 6);
  const uint64_t before = cache->StateDigest();
  EXPECT_EQ(cache->transfer()->DisaggPrepareRecv(0, 61).status().code(), StatusCode::kOutOfPages);
  EXPECT_EQ(cache->transfer()->DisaggPrepareRecv(0, 0).status().code(), StatusCode::kBadArgument);
  EXPECT_EQ(cache->transfer()->DisaggPrepareRecv(0, int64_t{1} << 31).status().code(),
            StatusCode::kTooLarge);
  EXPECT_EQ(cache->transfer()->DisaggPrepareRecv(9, 1).status().code(),
            StatusCode::kUnknownSequence);
  EXPECT_EQ(cache->StateDigest(), before);
  ASSERT_TRUE(cache->SetRetained(0, true).ok());
  EXPECT_EQ(cache->transfer()->DisaggPrepareRecv(0, 1).status().code(), StatusCode::kBadState);
}

// ---------------------------------------------------------------------- marks

struct Sender {
  explicit Sender(const AttentionKVCacheOptions& options) : cache(MakeTestCache(options)) {
    EXPECT_TRUE(cache->AddSequence(0).ok());
    EXPECT_TRUE(cache->transfer()->SetLayerSink(sink).ok());
  }
  std::shared_ptr<RecordingSink> sink = std::make_shared<RecordingSink>();
  std::unique_ptr<AttentionKVCache> cache;
};

TEST(KVTransfer, EachLayerIsGivenOnceItIsStoredAndNothingBehindTheMap) {
  Sender sender(MakeOptions());
  Extend(*sender.cache, 0, 3);
  ReceiveMap map = MapOf(MakeOptions(), 2, 6);
  map.slots = {3, 40, 1, -1, 1, 8, 4};  // the second token is not stored there
  ASSERT_TRUE(Mark(*sender.cache, 0, 2, map).ok());
  // Attention in halves: the layer goes when it is appended to.
  ASSERT_TRUE(sender.cache->BeginForward(Ids{0}, Ids{2}).ok());
  LayerOutputs outputs;
  const auto& layers = sender.cache->options().layers;
  const Tokens tokens{50, 51};
  const TokenInputs inputs = MakeTokenInputs(layers[0], 0, DType::kF32, tokens);
  ASSERT_TRUE(sender.cache->Append(0, inputs.k.view(), inputs.v.view()).ok());
  ASSERT_EQ(sender.sink->ranges.size(), 2U);
  const RecordingSink::Range& first = sender.sink->ranges[0];
  EXPECT_EQ(first.layer, 0);
  EXPECT_EQ(first.first_position, 2);
  EXPECT_EQ(first.first_row, 0);
  EXPECT_EQ(first.slots, (std::vector<int64_t>{40}));
  EXPECT_EQ(first.epoch, map.epoch);
  EXPECT_EQ(first.peer, 6);
  const RecordingSink::Range& second = sender.sink->ranges[1];
  EXPECT_EQ(second.first_position, 4);
  EXPECT_EQ(second.first_row, 2);
  EXPECT_EQ(second.slots, (std::vector<int64_t>{8}));
  // Bit for bit what is stored.
  StoredRows rows(layers[0], 1);
  ASSERT_TRUE(sender.cache->ExportKV(0, 0, 2, rows.view()).ok());
  EXPECT_EQ(first.digest, DigestOfHeads(rows.view(), 0, 2));
  ASSERT_TRUE(sender.cache->AbortForward().ok());
  EXPECT_EQ(sender.sink->records, (std::vector<RecordingSink::Record>{{"abort", 0, 3, 6}}));
  sender.sink->records.clear();
  sender.sink->ranges.clear();
  Extend(*sender.cache, 0, 2);
  Extend(*sender.cache, 0, 20);
  Extend(*sender.cache, 0, 1);
  EXPECT_EQ(sender.sink->records,
            (std::vector<RecordingSink::Record>{{"end", 0, 3, 6}, {"end", 3, 3, 6}}));
  int64_t per_layer[2] = {0, 0};
  for (const RecordingSink::Range& range : sender.sink->ranges)
    per_layer[range.layer] += range.count;
  EXPECT_EQ(per_layer[0], 5);
  EXPECT_EQ(per_layer[1], 5);
  const SendProgress progress = sender.cache->transfer()->GetSendProgress(0).value();
  EXPECT_FALSE(progress.active);
  EXPECT_EQ(progress.sent, 6);
  EXPECT_EQ(progress.begin, 2);
}

TEST(KVTransfer, WhatASinkHoldsStaysAsItWasGiven) {
  Sender sender(MakeOptions());
  ASSERT_TRUE(Mark(*sender.cache, 0, 0, MapOf(MakeOptions(), 0, 40)).ok());
  sender.sink->holds = true;
  for (int i = 0; i < 4; ++i) Extend(*sender.cache, 0, 10);
  const RecordingSink& sink = *sender.sink;
  ASSERT_EQ(sink.held.size(), 8U);
  for (size_t i = 0; i < sink.held.size(); ++i) {
    EXPECT_NE(sink.held[i].memory, nullptr);
    EXPECT_EQ(DigestOfHeads(sink.held[i].local, 0, 2), sink.ranges[i].digest) << i;
  }
}

// Memory that no sink holds is used again.
TEST(KVTransfer, WhatNobodyHoldsMakesRoom) {
  Sender sender(MakeOptions());
  ASSERT_TRUE(Mark(*sender.cache, 0, 0, MapOf(MakeOptions(), 0, 40)).ok());
  sender.sink->holds = true;
  std::set<const void*> places;
  for (int i = 0; i < 4; ++i) {
    Extend(*sender.cache, 0, 10);
    for (const SendRange& range : sender.sink->held) places.insert(range.local.k.data());
    sender.sink->held.clear();
  }
  EXPECT_EQ(places.size(), 2U);
}

// Which heads go to which peer when both sides have split them.
TEST(KVTransfer, EachRankSendsItsHeadsToItsPeers) {
  struct Case {
    int64_t heads, remote_heads, rank;
    // For a range to each peer: {peer, local head, remote head, heads}.
    std::vector<std::array<int64_t, 4>> expected;
  };
  for (const Case& c : {Case{4, 2, 0, {{6, 0, 0, 2}, {7, 2, 0, 2}}},
                        Case{4, 2, 1, {{8, 0, 0, 2}, {9, 2, 0, 2}}}, Case{2, 4, 1, {{6, 0, 2, 2}}},
                        Case{2, 4, 2, {{7, 0, 0, 2}}}, Case{2, 2, 3, {{9, 0, 0, 2}}}}) {
    AttentionKVCacheOptions here = MakeOptions();
    AttentionKVCacheOptions there = MakeOptions();
    for (AttentionLayerSpec& layer : here.layers) layer.num_qo_heads = layer.num_kv_heads = c.heads;
    for (AttentionLayerSpec& layer : there.layers)
      layer.num_qo_heads = layer.num_kv_heads = c.remote_heads;
    Sender sender(here);
    const std::vector<ReceiveMap> maps(c.expected.size(), MapOf(there, 0, 3));
    ASSERT_TRUE(sender.cache->transfer()->DisaggMarkSend(0, 0, maps, 6, c.rank).ok());
    Extend(*sender.cache, 0, 3);
    std::vector<std::array<int64_t, 4>> given;
    for (const RecordingSink::Range& r : sender.sink->ranges) {
      EXPECT_EQ(r.count, 3);
      if (r.layer == 1) given.push_back({r.peer, r.local_head, r.remote_head, r.head_count});
    }
    EXPECT_EQ(given, c.expected) << c.heads << " to " << c.remote_heads << ", rank " << c.rank;
  }
}

TEST(KVTransfer, MarksAreCheckedAndARefusedOneArmsNothing) {
  Sender sender(MakeOptions());
  AttentionKVCache& cache = *sender.cache;
  Extend(cache, 0, 5);
  ASSERT_TRUE(cache.AddSequence(1).ok());
  const ReceiveMap good = MapOf(MakeOptions(), 0, 8);
  ASSERT_TRUE(Mark(cache, 0, 0, good).ok());
  const uint64_t before = cache.StateDigest();
  const auto expect = [&](StatusCode code, const Status& status) {
    EXPECT_EQ(status.code(), code) << status.ToString();
    EXPECT_EQ(cache.StateDigest(), before);
  };
  expect(StatusCode::kUnknownSequence, Mark(cache, 7, 0, good));
  expect(StatusCode::kBadArgument, Mark(cache, 0, -1, good));
  expect(StatusCode::kIncompatible, Mark(cache, 0, 1, good));  // keys are rotated
  ReceiveMap bad = good;
  bad.layout ^= 1;
  expect(StatusCode::kIncompatible, Mark(cache, 0, 0, bad));
  bad = good;
  bad.kv_heads[1] = 3;
  expect(StatusCode::kIncompatible, Mark(cache, 0, 0, bad));
  // Two senders fill a row of one layer and three one of the other: no rank has one place in both.
  bad.kv_heads = {2 * good.kv_heads[0], 3 * good.kv_heads[1]};
  expect(StatusCode::kIncompatible, Mark(cache, 0, 0, bad));
  bad = good;
  bad.kv_heads.pop_back();
  expect(StatusCode::kIncompatible, Mark(cache, 0, 0, bad));
  bad = good;
  bad.slots = {1, 0, 7};  // shorter than it says
  expect(StatusCode::kBadArgument, Mark(cache, 0, 0, bad));
  bad.slots = {2, 0, 8};
  expect(StatusCode::kBadArgument, Mark(cache, 0, 0, bad));
  bad.count = 0;
  expect(StatusCode::kBadArgument, Mark(cache, 0, 0, bad));
  for (const int64_t row : {-1, 8}) {
    expect(StatusCode::kBadArgument,
           cache.transfer()->DisaggMarkSend(0, 0, std::span(&good, 1), 6, 0, row));
  }
  expect(StatusCode::kBadArgument, cache.transfer()->DisaggMarkSend(0, 0, {}, 6, 0));
  expect(StatusCode::kBadArgument,
         cache.transfer()->DisaggMarkSend(0, 0, std::span(&good, 1), 6, -1));
  const std::vector<ReceiveMap> two{good, good};
  expect(StatusCode::kIncompatible, [&] {
    std::vector<ReceiveMap> halves = two;
    for (ReceiveMap& map : halves) map.kv_heads = {1, 3};
    return cache.transfer()->DisaggMarkSend(0, 0, halves, 6, 0);
  }());
  // Ranks and peers of which no peer's number can be made.
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  std::vector<ReceiveMap> halves = two;
  for (ReceiveMap& map : halves) map.kv_heads = {1, 1};
  for (const auto& [peer, rank] : {std::pair{kMost, int64_t{1}}, {6, kMost}, {0, kMost / 2 + 1}}) {
    expect(StatusCode::kBadArgument, cache.transfer()->DisaggMarkSend(0, 0, halves, peer, rank));
  }
  expect(StatusCode::kBadArgument,
         cache.transfer()->DisaggMarkSend(0, 0, std::span(&good, 1), 6, kMost));
  expect(StatusCode::kBadState, cache.transfer()->SetLayerSink(nullptr));
  expect(StatusCode::kNotFound, cache.transfer()->DisaggFlushSend(1));
  expect(StatusCode::kNotFound, cache.transfer()->DisaggUnmarkSend(1));
  EXPECT_TRUE(sender.sink->records.empty());
  // In a forward no mark is made.
  ASSERT_TRUE(cache.BeginForward(Ids{1}, Ids{1}).ok());
  EXPECT_EQ(Mark(cache, 0, 0, good).code(), StatusCode::kBadState);
  EXPECT_EQ(cache.transfer()->DisaggPrepareRecv(0, 1).status().code(), StatusCode::kBadState);
  EXPECT_EQ(cache.transfer()->DisaggFlushSend(0).code(), StatusCode::kBadState);
  EXPECT_EQ(cache.transfer()->SetLayerSink(nullptr).code(), StatusCode::kBadState);
  ASSERT_TRUE(cache.AbortForward().ok());
  EXPECT_TRUE(sender.sink->ranges.empty());
  // The old mark is as it was.
  Extend(cache, 0, 3);
  EXPECT_EQ(cache.transfer()->GetSendProgress(0)->sent, 8);
  const auto without = MakeTestCache(MakeOptions());
  ASSERT_TRUE(without->AddSequence(0).ok());
  EXPECT_EQ(Mark(*without, 0, 0, good).code(), StatusCode::kBadState);
}

TEST(KVTransfer, MarksEndWithTheirSequenceAndAreNotInherited) {
  Sender sender(MakeOptions());
  AttentionKVCache& cache = *sender.cache;
  const ReceiveMap map = MapOf(MakeOptions(), 0, 8);
  ASSERT_TRUE(Mark(cache, 0, 0, map).ok());
  Extend(cache, 0, 3);
  ASSERT_TRUE(cache.ForkSequence(0, 1).ok());
  Extend(cache, 1, 2);
  EXPECT_EQ(cache.transfer()->GetSendProgress(1).status().code(), StatusCode::kNotFound);
  EXPECT_EQ(sender.sink->records.size(), 1U);
  ASSERT_TRUE(Mark(cache, 0, 0, map).ok());  // replaces the first, which goes on at its receiver
  ReceiveMap other = map;
  other.epoch = 99;
  ASSERT_TRUE(Mark(cache, 0, 0, other).ok());  // it does not
  ASSERT_TRUE(cache.RemoveSequence(0).ok());
  ASSERT_TRUE(Mark(cache, 1, 0, map).ok());
  ASSERT_TRUE(cache.transfer()->DisaggUnmarkSend(1).ok());
  ASSERT_TRUE(Mark(cache, 1, 0, map).ok());
  ASSERT_TRUE(cache.BeginForward(Ids{1}, Ids{1}).ok());
  LayerOutputs outputs;
  ASSERT_TRUE(
      RunLayer(cache, cache.options().layers[0], 0, Tokens{9}, ForwardStyle(), &outputs).ok());
  ASSERT_TRUE(cache.Clear().ok());
  using Record = RecordingSink::Record;
  EXPECT_EQ(sender.sink->records, (std::vector<Record>{{"end", 0, 3, 6},
                                                       {"stop Cancelled", 0, 8, 6},
                                                       {"stop Cancelled", 0, 8, 6},
                                                       {"stop Cancelled", 0, 8, 6},
                                                       {"abort", 0, 6, 6},
                                                       {"stop Cancelled", 0, 8, 6}}));
  ASSERT_TRUE(cache.transfer()->SetLayerSink(nullptr).ok());
}

TEST(KVTransfer, AMarkOfStoredTokensIsFlushed) {
  for (const int64_t count : {5, 3}) {  // all that there is, and less
    Sender sender(MakeOptions());
    Extend(*sender.cache, 0, 5);
    ASSERT_TRUE(Mark(*sender.cache, 0, 0, MapOf(MakeOptions(), 0, count)).ok());
    EXPECT_TRUE(sender.sink->records.empty());
    ASSERT_TRUE(sender.cache->transfer()->DisaggFlushSend(0).ok());
    EXPECT_EQ(sender.sink->records, (std::vector<RecordingSink::Record>{{"end", 0, count, 6}}));
    EXPECT_FALSE(sender.cache->transfer()->GetSendProgress(0)->active);
  }
}

// As of a prompt that was preempted: its sequence goes, is computed once more, and sends the rest.
TEST(KVTransfer, ADetachedMarkIsResumedAndItsReceiverHearsNothing) {
  Sender sender(MakeOptions());
  AttentionKVCache& cache = *sender.cache;
  KVTransfer& transfer = *cache.transfer();
  const ReceiveMap map = MapOf(MakeOptions(), 0, 8);
  EXPECT_EQ(transfer.DisaggDetachSend(0).status().code(), StatusCode::kNotFound);
  ASSERT_TRUE(Mark(cache, 0, 0, map).ok());
  Extend(cache, 0, 3);
  ASSERT_EQ(transfer.DisaggDetachSend(0).value(), 3);
  EXPECT_EQ(transfer.GetSendProgress(0).status().code(), StatusCode::kNotFound);
  ASSERT_TRUE(cache.RemoveSequence(0).ok());
  ASSERT_TRUE(cache.AddSequence(1).ok());
  ASSERT_TRUE(transfer.DisaggMarkSend(1, 0, std::span(&map, 1), 6, 0, 3).ok());
  EXPECT_EQ(transfer.GetSendProgress(1)->sent, 3);
  Extend(cache, 1, 2);  // the receiver has these
  Extend(cache, 1, 6);
  using Record = RecordingSink::Record;
  EXPECT_EQ(sender.sink->records, (std::vector<Record>{{"end", 0, 3, 6}, {"end", 3, 5, 6}}));
  int64_t rows = 0;
  for (const RecordingSink::Range& range : sender.sink->ranges)
    rows += range.layer == 0 ? range.count : 0;
  EXPECT_EQ(rows, 8);
  EXPECT_FALSE(transfer.GetSendProgress(1)->active);
}

TEST(KVTransfer, ASentPrefixMustBeHeld) {
  auto options = MakeOptions();
  Sender sender(options);
  AttentionKVCache& cache = *sender.cache;
  ASSERT_TRUE(cache.EnableSlidingWindowForSeq(0, 6, 0).ok());
  Extend(cache, 0, 20);
  EXPECT_EQ(Mark(cache, 0, 0, MapOf(options, 0, 24)).code(), StatusCode::kBadArgument);
  const ReceiveMap map = MapOf(options, 16, 8);
  ASSERT_TRUE(Mark(cache, 0, 16, map).ok());
  Extend(cache, 0, 4);
  EXPECT_EQ(cache.transfer()->GetSendProgress(0)->sent, 8);
}

// ---------------------------------------------------------------------- refused allocations

// `call` with the n-th allocation refused, for each n, on a new cache every time.
void ExpectEachRefusalIsHarmless(const std::function<std::unique_ptr<Sender>()>& build,
                                 const std::function<Status(Sender&)>& call) {
  for (int64_t n = 0;; ++n) {
    ASSERT_LT(n, 500) << "never succeeds";
    const auto sender = build();
    const uint64_t digest = sender->cache->StateDigest();
    Status status;
    bool refused = false;
    {
      RefuseAllocation refusal(n);
      status = call(*sender);
      refused = refusal.refused();
    }
    ASSERT_TRUE(sender->cache->CheckInvariants().ok()) << "allocation " << n;
    if (!refused) {
      EXPECT_TRUE(status.ok()) << status.ToString();
      return;
    }
    if (status.ok()) continue;  // what was refused was not needed
    ASSERT_EQ(status.code(), StatusCode::kOutOfMemory) << "allocation " << n;
    ASSERT_EQ(sender->cache->StateDigest(), digest) << "allocation " << n;
    status = call(*sender);
    ASSERT_TRUE(status.ok()) << "again after allocation " << n << ": " << status.ToString();
  }
}

TEST(KVTransfer, EachAllocationMayFail) {
  auto options = MakeOptions();
  options.layers[1].dtype = DType::kI8;
  AttentionLayerSpec latent{2, 1, 6, 4, DType::kF32};
  latent.latent = true;
  options.layers.push_back(latent);
  const ReceiveMap map = MapOf(options, 0, 12);
  const auto build = [&] {
    auto sender = std::make_unique<Sender>(options);
    Extend(*sender->cache, 0, 7);
    EXPECT_TRUE(sender->cache->ForkSequence(0, 1, 6).ok());
    return sender;
  };
  ExpectEachRefusalIsHarmless(build, [](Sender& sender) {
    return sender.cache->transfer()->DisaggPrepareRecv(1, 9).status();
  });
  ExpectEachRefusalIsHarmless(build,
                              [&](Sender& sender) { return Mark(*sender.cache, 0, 0, map); });
  uint64_t epoch = 0;
  const auto part_of = [&](int64_t layer) {
    return ReceivePart{.first_row = 0,
                       .count = 9,
                       .first_head = 0,
                       .head_count = options.layers[static_cast<size_t>(layer)].num_kv_heads};
  };
  std::array<ReceiveView, 3> views = {};
  const auto written = [&] {
    views = {};
    auto sender = build();
    epoch = sender->cache->transfer()->DisaggPrepareRecv(1, 9)->epoch;
    for (const int64_t layer : {0, 1, 2}) {
      ReceiveView& view = views[static_cast<size_t>(layer)];
      view = *sender->cache->transfer()->View(epoch, layer, part_of(layer));
      for (const TensorView* t :
           {&view.rows.k, &view.rows.v, &view.rows.k_scale, &view.rows.v_scale}) {
        if (t->rank() == 0) continue;
        std::fill_n(t->data_as<std::byte>(), t->element_count() * DTypeBytes(t->dtype()),
                    std::byte{0});
      }
    }
    return sender;
  };
  const auto complete = [&](Sender& sender, int64_t layer) -> Status {
    KVTransfer& transfer = *sender.cache->transfer();
    const ReceivePart part = part_of(layer);
    const ReceiveView& view = views[static_cast<size_t>(layer)];
    const uint32_t digest = DigestOfHeads(view.rows, 0, part.head_count);
    QUIRE_RETURN_IF_ERROR(transfer.Store(epoch, layer, part, view, digest));
    return transfer.Complete(epoch, layer, part);
  };
  const auto receiving = [&] {
    auto sender = written();
    for (const int64_t layer : {0, 1, 2}) EXPECT_TRUE(complete(*sender, layer).ok());
    return sender;
  };
  for (const int64_t layer : {0, 1, 2})
    ExpectEachRefusalIsHarmless(written, [&](Sender& sender) { return complete(sender, layer); });
  ExpectEachRefusalIsHarmless(receiving, [&](Sender& sender) {
    return sender.cache->transfer()->DisaggCommitRecv(epoch, 8);
  });
  ExpectEachRefusalIsHarmless(
      receiving, [&](Sender& sender) { return sender.cache->transfer()->DisaggCancelRecv(epoch); });
  ExpectEachRefusalIsHarmless(receiving, [&](Sender& sender) {
    return sender.cache->transfer()->View(epoch, 0, {2, 3, 0, 1}).status();
  });
}

}  // namespace
}  // namespace quire
