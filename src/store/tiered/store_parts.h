// What the parts of a TieredStore share. It lives until the last fetch handle is gone.
//
// Locks. None is held while a slow tier reads or writes. The order, outermost first:
//   Removals::Move  ->  StoreParts::fetch_mutex (fetches and loads)  ->  WriteQueue::mutex_,
//   ReadQueue::mutex_
//   ->  MemoryTier::mutex_  ->  Removals::mutex_, PinBoard, EventRing, LoadPredictor,
//   CircuitBreaker, Admission
// A tier's own locks come after all of these; it is asked what it Knows and whether it
// IsUnavailable under them, as that needs no I/O.
#ifndef QUIRE_STORE_TIERED_STORE_PARTS_H_
#define QUIRE_STORE_TIERED_STORE_PARTS_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "quire/chunk_store.h"
#include "store/tier/admission.h"
#include "store/tier/chunk_tier.h"
#include "store/tier/event_ring.h"
#include "store/tier/spare_chunks.h"
#include "store/tiered/chunk_load.h"
#include "store/tiered/memory_tier.h"
#include "store/tiered/pin_board.h"
#include "store/tiered/removals.h"
#include "store/tiered/slow_tier.h"
#include "store/tiered/write_queue.h"

namespace quire {

// Slow tiers by TierKind; none at kRam.
using SlowTiers = std::array<std::unique_ptr<ChunkTier>, kTierCount>;

inline constexpr std::array<TierKind, 2> kSlowTiers = {TierKind::kDisk, TierKind::kRedis};

inline size_t At(TierKind tier) { return static_cast<size_t>(tier); }
inline uint8_t TierBit(TierKind tier) { return static_cast<uint8_t>(1u << At(tier)); }

// Passports that were added.
class PassportTable {
 public:
  struct Entry {
    ChunkLimits limits{};
    int64_t block_bytes = 0;  // of a full chunk, about
    Passport passport{};
  };
  void Add(const Digest& fingerprint, const Passport& passport);
  // Null: not added. An entry stays as it is.
  const Entry* Find(const Digest& fingerprint) const;
  std::vector<Passport> All() const;

 private:
  mutable std::mutex mutex_;
  std::map<Digest, Entry> entries_;
};

struct StoreParts {
  // REQUIRES: options.clock is there.
  explicit StoreParts(ChunkStoreOptions store_options);

  bool has_memory() const { return memory != nullptr; }
  // Makes the slow tiers and the threads that write to them. std::system_error without a thread.
  void AddTiers(SlowTiers tiers);
  // Hands a chunk to the queues of all slow tiers, unless it is being removed. What fails is
  // counted there. REQUIRES: a Move.
  void WriteToSlow(const KeptChunk& kept) noexcept;
  // The chunk was put or found: under WritePolicy::kSelective it may be due for the slow tiers.
  // REQUIRES: a Move since it was in its place.
  void Wanted(const KeptChunk& kept) noexcept;
  // Keeps the chunk in RAM; what has to go for it is written to the slow tiers unless it is there.
  // REQUIRES: a Move.
  MemoryTier::Outcome Keep(const KeptChunk& kept, bool unwritten);
  // Takes out of RAM what is expired or over its quota; bytes freed. What is over it goes as in
  // Keep. std::bad_alloc: some of it goes later.
  int64_t CollectMemory();
  // Brings the slow tiers' events to the others. std::bad_alloc: some of them come later.
  void CollectEvents();
  bool HasSlow() const { return slow[At(TierKind::kDisk)] || slow[At(TierKind::kRedis)]; }
  // Whether a tier is known to have it, without asking a disk or a network.
  bool Knows(const ChunkId& id) const;
  // When a call of an administrator on one chunk gives up.
  int64_t AdminDeadline(TierKind tier) const;
  // Pins the chunk in the tier; false if it is not there.
  bool PinIn(TierKind tier, const ChunkKey& key, int change) noexcept;
  void Unpin(const PinnedChunk& pin) noexcept;
  // Ends pins whose time is over.
  void ReleaseExpiredPins() noexcept;

  const ChunkStoreOptions options;
  const std::shared_ptr<Clock> clock;
  std::mutex fetch_mutex;
  std::set<FetchState*> open_fetches;                           // not done; under fetch_mutex
  std::array<std::atomic<int64_t>, kMissReasonCount> misses{};  // of fetches, by MissReason
  std::atomic<int64_t> fetched_tokens{0};
  PassportTable passports;
  EventRing events;
  PinBoard pins;
  std::unique_ptr<MemoryTier> memory;                        // null: no such tier
  std::array<std::unique_ptr<SlowTier>, kTierCount> slow{};  // by TierKind; null: no such tier
  // One for each slow tier. Closed before the tiers go.
  std::array<std::unique_ptr<WriteQueue>, kTierCount> writes{};
  Removals removals;
  Admission admission;
  const std::shared_ptr<ByteBudget> fetch_budget;
  const std::shared_ptr<SpareChunks> spares;
};

}  // namespace quire

#endif  // QUIRE_STORE_TIERED_STORE_PARTS_H_
