#include "store/tier/eviction_policy.h"

#include <algorithm>

#include "store/tier/chunk_index.h"

namespace quire {
namespace {

class Lru final : public EvictionPolicy {
 public:
  Standing Enter(const IndexedChunk&, uint64_t stamp, bool) const noexcept override {
    return {.order = stamp};
  }
  void Use(const IndexedChunk&, uint64_t stamp, Standing* standing) const noexcept override {
    standing->order = stamp;
  }
  bool Evicted(const Standing&) noexcept override { return false; }
  int PreferredLane(int64_t, int64_t) const noexcept override { return kMain; }
};

// S3-FIFO (Yang et al., SOSP 2023). What is new is on probation, a FIFO of a tenth of the bytes,
// and goes from there unless it was used twice; a chunk that comes back soon after that is taken
// in at once. The main queue is a FIFO whose hand passes a chunk once for each of its last uses.
// Laps of the hand stand for the counters that it would decrement: a chunk goes in lap `value`.
class S3Fifo final : public EvictionPolicy {
 public:
  Standing Enter(const IndexedChunk&, uint64_t stamp, bool remembered) const noexcept override {
    if (remembered) return {.lane = kMain, .value = lap_, .order = stamp};
    return {.lane = kProbation, .order = stamp};
  }
  void Use(const IndexedChunk&, uint64_t stamp, Standing* standing) const noexcept override {
    if (standing->lane == kProbation) {
      if (++standing->uses < kUsesToStay) return;
      *standing = {.lane = kMain, .value = lap_, .order = stamp};
      return;
    }
    const double laps_left = std::max(0.0, standing->value - lap_);
    standing->value = lap_ + std::min(laps_left + 1, kLapsMax);
  }
  bool Evicted(const Standing& standing) noexcept override {
    if (standing.lane == kProbation) return true;
    lap_ = std::max(lap_, standing.value);
    return false;
  }
  int PreferredLane(int64_t probation_bytes, int64_t bytes_max) const noexcept override {
    return probation_bytes > bytes_max / kProbationShare ? kProbation : kMain;
  }

 private:
  // As in the paper: more than one use, two bits of counter, ten percent.
  static constexpr int kUsesToStay = 2;
  static constexpr double kLapsMax = 3;
  static constexpr int64_t kProbationShare = 10;

  double lap_ = 0;
};

// GreedyDual-Size (Cao and Irani, 1997): seconds saved per byte on top of the level that the last
// eviction had, so that what was dear once and is not used any more sinks below what is used.
class CostAware final : public EvictionPolicy {
 public:
  Standing Enter(const IndexedChunk& chunk, uint64_t stamp, bool) const noexcept override {
    return {.value = Value(chunk), .order = stamp};
  }
  void Use(const IndexedChunk& chunk, uint64_t stamp, Standing* standing) const noexcept override {
    standing->value = Value(chunk);
    standing->order = stamp;
  }
  bool Evicted(const Standing& standing) noexcept override {
    level_ = std::max(level_, standing.value);
    return false;
  }
  int PreferredLane(int64_t, int64_t) const noexcept override { return kMain; }

 private:
  double Value(const IndexedChunk& chunk) const {
    return level_ +
           RecomputeSeconds(chunk) / static_cast<double>(std::max<int64_t>(1, chunk.bytes));
  }

  double level_ = 0;
};

}  // namespace

double RecomputeSeconds(const IndexedChunk& chunk) {
  if (chunk.recompute_seconds > 0) return chunk.recompute_seconds;
  // A guess that only has to order chunks: a millisecond a token, and attention over some thousands
  // of earlier tokens costs as much again.
  constexpr double kSecondsPerToken = 1e-3;
  constexpr double kTokensThatDoubleIt = 8192;
  const double behind = static_cast<double>(std::max<int64_t>(0, chunk.first_token));
  return kSecondsPerToken * static_cast<double>(chunk.tokens) * (1 + behind / kTokensThatDoubleIt);
}

std::unique_ptr<EvictionPolicy> EvictionPolicy::Create(EvictionKind kind) {
  switch (kind) {
    case EvictionKind::kS3Fifo:
      return std::make_unique<S3Fifo>();
    case EvictionKind::kCost:
      return std::make_unique<CostAware>();
    case EvictionKind::kLru:
      break;
  }
  return std::make_unique<Lru>();
}

}  // namespace quire
