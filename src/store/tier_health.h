// TierHealth: a circuit breaker. A tier that does not answer several times in a row is left alone,
// and tried again with one call every two seconds. Thread-safe.
#ifndef QUIRE_STORE_TIER_HEALTH_H_
#define QUIRE_STORE_TIER_HEALTH_H_

#include <cstdint>
#include <mutex>

#include "quire/status.h"

namespace quire {

class TierHealth {
 public:
  // Whether the tier may be called now. While it is left alone, one caller in two seconds may.
  bool Allow(int64_t now_ns) noexcept {
    const std::lock_guard lock(mutex_);
    if (failures_ < kFailuresToOpen) return true;
    if (now_ns < retry_ns_) return false;
    retry_ns_ = now_ns + kRetryNs;
    return true;
  }
  // Without being that caller.
  bool IsUsable(int64_t now_ns) const noexcept {
    const std::lock_guard lock(mutex_);
    return failures_ < kFailuresToOpen || now_ns >= retry_ns_;
  }
  // What a call that took so long said.
  void Report(const Status& status, int64_t now_ns, int64_t took_ns) noexcept {
    const bool failed = status.code() == StatusCode::kUnavailable ||
                        (status.code() == StatusCode::kTimeout && took_ns >= kPatienceNs);
    // A caller in a greater hurry than the tier can be tells nothing about it.
    if (!failed && status.code() == StatusCode::kTimeout) return;
    if (status.code() == StatusCode::kCancelled) return;
    const std::lock_guard lock(mutex_);
    if (!failed) {
      failures_ = 0;
      return;
    }
    if (failures_ < kFailuresToOpen) ++failures_;
    retry_ns_ = now_ns + kRetryNs;
  }
  bool closed() const noexcept {
    const std::lock_guard lock(mutex_);
    return failures_ < kFailuresToOpen;
  }

 private:
  static constexpr int kFailuresToOpen = 3;
  static constexpr int64_t kRetryNs = 2'000'000'000;
  static constexpr int64_t kPatienceNs = 20'000'000;  // what a lookup may take

  mutable std::mutex mutex_;
  int failures_ = 0;  // in a row
  int64_t retry_ns_ = 0;
};

}  // namespace quire

#endif  // QUIRE_STORE_TIER_HEALTH_H_
