// MemoryTier: chunks in RAM, shared with their users: a hit copies nothing. What is evicted
// goes when its last user is done with it. Thread-safe; holds its lock for bookkeeping only, and
// frees chunks outside of it.
#ifndef QUIRE_STORE_TIERED_MEMORY_TIER_H_
#define QUIRE_STORE_TIERED_MEMORY_TIER_H_

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "quire/chunk_store.h"
#include "quire/status.h"
#include "store/tier/chunk_index.h"
#include "store/tier/chunk_tier.h"
#include "store/tier/event_ring.h"
#include "store/tiered/pin_board.h"

namespace quire {

// A chunk that RAM has and slower tiers may lack.
struct KeptChunk {
  ChunkId id{};
  std::shared_ptr<const StoredChunk> chunk = nullptr;
  ChunkWorth worth{};
  int64_t expires_ms = 0;  // that was set and is before the chunk's own end; 0 = none
};

// What SetExpiry makes of a chunk's time: `expires_ms`, or 0 where the chunk's own end, which
// stays, is the earlier one.
int64_t ExpiryBeside(const StoredChunk& chunk, int64_t expires_ms);

// Verifies all sections. Corrupt.
Status CheckSections(const StoredChunk& chunk);

class MemoryTier {
 public:
  MemoryTier(EvictionKind eviction, int64_t bytes_max, EventRing* events, PinBoard* pins);

  // The chunk, used and pinned in the same step. nullopt: `miss` says why.
  std::optional<KeptChunk> Take(const ChunkId& id, int64_t now_ms, MissReason* miss) noexcept;
  // Without a use or a count.
  bool Has(const ChunkId& id, int64_t now_ms) const noexcept;

  enum class Outcome { kStored, kThere, kNoRoom };
  // `unwritten`: slower tiers get it when it is evicted. Those that had to go for it and are
  // unwritten are appended to *evicted. std::bad_alloc: nothing changed.
  Outcome Insert(const KeptChunk& kept, bool unwritten, int64_t now_ms,
                 std::vector<KeptChunk>* evicted);
  std::vector<ChunkId> Unwritten() const;
  // If it is there still and unwritten; it counts as written from here on.
  std::optional<KeptChunk> TakeUnwritten(const ChunkId& id) noexcept;
  void MarkUnwritten(const ChunkId& id) noexcept;

  // ---- By key; false: not there.
  bool Pin(const ChunkKey& key, int change) noexcept;
  bool Touch(const ChunkKey& key) noexcept;
  // The chunk's own expiry stays: the earlier one counts.
  bool SetExpiry(const ChunkKey& key, int64_t expires_ms) noexcept;
  bool SetPriority(const ChunkKey& key, int priority) noexcept;
  bool Remove(const ChunkKey& key, ChunkEvent::Kind why) noexcept;

  void SetQuota(const ChunkKey& root, const ChunkQuota& quota);
  int64_t Clear(const Digest& fingerprint, const ChunkKey& root);
  // What is expired or over its quota. Bytes freed. Those that were over it and are unwritten are
  // appended to *evicted. std::bad_alloc: what went so far is gone, and is there.
  int64_t CollectGarbage(int64_t now_ms, std::vector<KeptChunk>* evicted);

  std::vector<ChunkListing> List() const;
  // Null: not there.
  std::shared_ptr<const StoredChunk> Get(const ChunkKey& key) const;
  // Verifies each chunk's sections and removes those that fail.
  int64_t Verify();
  TierStatistics Statistics() const;

 private:
  struct Record {
    std::shared_ptr<const StoredChunk> chunk = nullptr;
    ChunkWorth worth{};
    bool unwritten = false;
  };
  using Records = std::map<ChunkId, Record>;

  KeptChunk KeptLocked(const Records::value_type& entry) const noexcept;
  // Takes it out of the books; the caller frees the record without the lock.
  Records::node_type EraseLocked(const ChunkId& id, ChunkEvent::Kind why) noexcept;
  std::optional<std::vector<ChunkId>> PlanRoomLocked(const IndexedChunk& chunk) noexcept(false);

  EventRing* const events_;
  PinBoard* const pins_;
  mutable std::mutex mutex_;
  const std::unique_ptr<ChunkIndex> index_;
  Records records_;  // of the same ids as the index
  TierStatistics statistics_;
};

}  // namespace quire

#endif  // QUIRE_STORE_TIERED_MEMORY_TIER_H_
