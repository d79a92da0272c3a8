// KVReceiver: tokens of a cache's sequences that other caches send.
//
// Invariants:
// - A sequence has pending tokens exactly while PendingReceives has a reservation of its epoch, of
//   as many tokens: Prepare makes both, End takes both away.
// - Pending tokens stand in pages of their own, after the committed ones; nobody else sees them
//   until they are committed.
#ifndef QUIRE_KV_CACHE_KV_RECEIVER_H_
#define QUIRE_KV_CACHE_KV_RECEIVER_H_

#include <cstdint>
#include <memory>

#include "kv/cache/kv_importer.h"
#include "kv/cache/paged_sequences.h"
#include "kv/cache/window_book.h"
#include "kv/transfer/pending_receives.h"
#include "quire/kv_transfer.h"
#include "quire/seams.h"
#include "quire/status.h"

namespace quire {

class KVReceiver : private PendingReceives::Pages {
 public:
  // All must outlive it. `runner` runs what Complete has to do, on any thread.
  KVReceiver(PagedSequences& kv, KVImporter& importer, WindowBook& windows,
             std::shared_ptr<ParallelRunner> runner);

  // Reserves `count` tokens of the sequence. REQUIRES: no forward is open.
  Result<ReceiveMap> Prepare(const char* call, int32_t index, int64_t count);
  // The first n tokens become committed ones, the others go. BadState unless they are complete.
  Status Commit(const char* call, uint64_t epoch, int64_t n);
  Status Cancel(const char* call, uint64_t epoch);
  // The first n pending tokens of the sequence stay, as committed ones. REQUIRES: it has some.
  void End(int32_t index, int64_t n) noexcept;
  // Forgets all reservations; their sequences go, too.
  void Clear() noexcept { receives_.Clear(); }

  // What channels call, from any thread.
  PendingReceives& receives() { return receives_; }
  const PendingReceives& receives() const { return receives_; }
  // Internal if an invariant is violated.
  Status CheckInvariants() const;

 private:
  Status CheckSequence(const char* call, int32_t index, int64_t count) const;
  void OpenTiles(PendingReceives::Receive& receive, TokenSlots* tiles) noexcept;
  void StoreReceived(const TokenSlots& slots, int64_t layer, int64_t first,
                     const LayerKV& rows) noexcept override;

  PagedSequences& kv_;
  KVImporter& importer_;
  WindowBook& windows_;
  const std::shared_ptr<ParallelRunner> runner_;
  PendingReceives receives_;
};

}  // namespace quire

#endif  // QUIRE_KV_CACHE_KV_RECEIVER_H_
