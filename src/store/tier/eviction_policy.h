// EvictionPolicy: how much a chunk is worth keeping, as a standing that its index sorts by. Least
// goes first. The rules that hold under every policy (pins, chains, shares, priorities) are the
// index's.
#ifndef QUIRE_STORE_TIER_EVICTION_POLICY_H_
#define QUIRE_STORE_TIER_EVICTION_POLICY_H_

#include <cstdint>
#include <memory>

#include "quire/chunk_store.h"

namespace quire {

struct IndexedChunk;

// Two queues: chunks on probation, and the main one. Policies without a probation use the main one.
inline constexpr int kProbation = 0;
inline constexpr int kMain = 1;
inline constexpr int kLaneCount = 2;

// Where a chunk stands in its lane: by value, then by order.
struct Standing {
  int lane = kMain;
  double value = 0;
  uint64_t order = 0;  // distinct in an index
  int uses = 0;
};

// Stamps are distinct and rise. No call allocates.
class EvictionPolicy {
 public:
  static std::unique_ptr<EvictionPolicy> Create(EvictionKind kind);
  virtual ~EvictionPolicy() = default;

  // A new chunk. `remembered`: it was evicted from probation not long ago.
  virtual Standing Enter(const IndexedChunk& chunk, uint64_t stamp,
                         bool remembered) const noexcept = 0;
  virtual void Use(const IndexedChunk& chunk, uint64_t stamp,
                   Standing* standing) const noexcept = 0;
  // The chunk that was next to go is gone. Whether the index remembers its key for a while.
  virtual bool Evicted(const Standing& standing) noexcept = 0;
  // The lane to evict from if both have a candidate of the same priority.
  virtual int PreferredLane(int64_t probation_bytes, int64_t bytes_max) const noexcept = 0;
};

// Seconds that it takes to compute the chunk again: as stated, or estimated by its tokens.
double RecomputeSeconds(const IndexedChunk& chunk);

}  // namespace quire

#endif  // QUIRE_STORE_TIER_EVICTION_POLICY_H_
