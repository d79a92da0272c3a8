// KVReceiver: tokens of a cache's sequences that other caches send: the cache's part of a
// TransferReceiver.
//
// Invariants:
// - A sequence has pending tokens exactly while the receiver has a reservation of its epoch, of as
//   many tokens.
// - Pending tokens stand in pages of their own, after the committed ones; nobody else sees them
//   until they are committed.
#ifndef QUIRE_KV_CACHE_KV_RECEIVER_H_
#define QUIRE_KV_CACHE_KV_RECEIVER_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kv/cache/kv_importer.h"
#include "kv/cache/paged_sequences.h"
#include "kv/cache/window_book.h"
#include "kv/plan/forward_plan.h"
#include "kv/transfer/transfer_receiver.h"
#include "quire/seams.h"
#include "quire/status.h"

namespace quire {

class KVReceiver final : public ReceivingPart, private ReceivedRows {
 public:
  // All must outlive it. `runner` runs what Store has to do, on any thread.
  KVReceiver(PagedSequences& kv, KVImporter& importer, WindowBook& windows,
             std::shared_ptr<ParallelRunner> runner);

  // ---- ReceivingPart.
  std::vector<TransferLayer> receive_layers() override;
  size_t receive_groups() const override { return kv_.groups.size(); }
  void SetReceiver(TransferReceiver* receiver) noexcept override;
  // REQUIRES: no forward is open.
  Result<ReservePlan> PlanReserve(const char* call, int64_t seq_id, int64_t count) override;
  void CommitReserve(const ReceiveShare& share) noexcept override;
  Status PlanTake(const char* call, const ReceiveShare& share, int64_t n) override;
  void CommitTake() noexcept override { Keep(index_, taken_); }
  void DropPlanned() noexcept override { reserve_ = {}; }

  // ---- The sequence's own calls. REQUIRES: SetReceiver.
  // The sequence's pending tokens go. REQUIRES: it has some.
  void End(int32_t index) noexcept;
  // All reservations go; their sequences do, too.
  void Clear() noexcept { receiver_->receives().Clear(); }
  // Internal if an invariant is violated.
  Status CheckInvariants() const;
  // Tiles of pages that rows have opened as they came, counted for each layer, ever.
  int64_t tiles_opened() const { return tiles_opened_; }

 private:
  Status CheckSequence(const char* call, int32_t index, int64_t count) const;
  // The first n pending tokens of the sequence stay, as committed ones. REQUIRES: nobody writes to
  // the pages of those that stay any more.
  void Keep(int32_t index, int64_t n) noexcept;
  void StoreReceived(const TokenSlots& slots, int64_t layer, const ReceivePart& part,
                     const LayerKV& rows, OtherHeads& others) noexcept override;
  bool WritesFreedPages() const override { return kv_.options.poison_freed_pages; }
  void Write(const TokenSlots& slots, int64_t layer, int64_t first, const LayerKV& rows,
             int64_t count) noexcept;
  // Some heads of at most a tile's rows. is_there: [row of these][head].
  void StoreHeads(const TokenSlots& slots, int64_t layer, const ReceivePart& part,
                  const LayerKV& rows, std::byte* tile, const uint8_t* is_there) noexcept;

  PagedSequences& kv_;
  KVImporter& importer_;
  WindowBook& windows_;
  const std::shared_ptr<ParallelRunner> runner_;
  TransferReceiver* receiver_ = nullptr;
  int32_t index_ = SequenceTable::kAbsent;  // of the planned call
  int64_t taken_ = 0;
  ForwardPlan reserve_;  // from PlanReserve to its end; of one sequence that gets no rows
  std::atomic<int64_t> tiles_opened_ = 0;
};

}  // namespace quire

#endif  // QUIRE_KV_CACHE_KV_RECEIVER_H_
