// SlowTier: a ChunkTier with what the store knows about it.
#ifndef QUIRE_STORE_TIERED_SLOW_TIER_H_
#define QUIRE_STORE_TIERED_SLOW_TIER_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "net/circuit_breaker.h"
#include "quire/chunk_store.h"
#include "store/tier/chunk_tier.h"
#include "store/tiered/load_predictor.h"

namespace quire {

struct SlowTier {
  SlowTier(TierKind tier_kind, std::unique_ptr<ChunkTier> chunk_tier, int64_t timeout_ms,
           std::shared_ptr<Clock> clock)
      : kind(tier_kind),
        tier(std::move(chunk_tier)),
        io_timeout_ns(timeout_ms * 1'000'000),
        breaker(std::move(clock), TierName(tier_kind)) {}

  // Whether a call would be let through now.
  bool usable() const { return breaker.available() && !tier->IsUnavailable(); }
  // The right to one call that may block; nothing while the tier is left alone.
  std::optional<CircuitBreaker::Call> Admit(int64_t deadline_ns) {
    if (tier->IsUnavailable()) return std::nullopt;
    return breaker.Admit(deadline_ns);
  }

  // What a call said of one chunk, or as a whole.
  void Count(const Status& status) noexcept {
    if (status.code() == StatusCode::kTimeout) ++timeouts;
    if (status.code() == StatusCode::kUnavailable || status.code() == StatusCode::kIoError)
      ++errors;
  }

  TierStatistics Statistics(int64_t queue_bytes) const {
    const TierUsage usage = tier->Usage();
    const LoadPredictor::Summary loads = predictor.Summarize();
    return {.present = true,
            .chunks = usage.chunks,
            .bytes = usage.bytes,
            .bytes_max = usage.bytes_max,
            .hits = hits,
            .misses = misses,
            .corrupt = usage.corrupt,
            .errors = errors,
            .timeouts = timeouts,
            .writes = writes,
            .dropped_writes = dropped_writes,
            .deduplicated = deduplicated + usage.deduplicated,
            .evicted = usage.evicted,
            .expired = usage.expired,
            .bytes_read = bytes_read,
            .bytes_written = bytes_written,
            .queue_bytes = queue_bytes,
            .latency_seconds = loads.latency_seconds,
            .bytes_per_second = loads.bytes_per_second,
            .loads = loads.loads,
            .not_worth = loads.not_worth,
            .predicted_seconds = loads.predicted_seconds,
            .measured_seconds = loads.measured_seconds,
            .available = usage.available && !breaker.open()};
  }

  const TierKind kind;
  const std::unique_ptr<ChunkTier> tier;
  const int64_t io_timeout_ns;
  LoadPredictor predictor;
  CircuitBreaker breaker;
  std::atomic<int64_t> hits{0}, misses{0}, errors{0}, timeouts{0};
  std::atomic<int64_t> writes{0}, dropped_writes{0}, deduplicated{0};
  std::atomic<int64_t> bytes_read{0}, bytes_written{0};
};

}  // namespace quire

#endif  // QUIRE_STORE_TIERED_SLOW_TIER_H_
