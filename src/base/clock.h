// Time behind an interface, so that tests advance it and nothing waits for real.
#ifndef QUIRE_BASE_CLOCK_H_
#define QUIRE_BASE_CLOCK_H_

#include <condition_variable>
#include <cstdint>
#include <limits>
#include <mutex>

#include "quire/seams.h"

namespace quire {

inline constexpr int64_t kNsPerMs = 1'000'000;
// A moment on Clock::SteadyNs, and the one that never comes.
inline constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

// `ns` after a moment; kNever if that is too far. REQUIRES: neither is negative.
inline int64_t MomentAfter(int64_t moment_ns, int64_t ns) {
  return ns > kNever - moment_ns ? kNever : moment_ns + ns;
}

// Waits until `is_over()` or the moment `until_ns`; false if it is not over then. `lock` guards
// what is_over reads, and a thread that changes it notifies `changed`.
template <typename IsOver>
bool WaitUntil(Clock& clock, std::condition_variable& changed, std::unique_lock<std::mutex>& lock,
               int64_t until_ns, IsOver&& is_over) {
  while (!is_over()) {
    if (clock.SteadyNs() >= until_ns) return false;
    clock.Wait(changed, lock, until_ns);
  }
  return true;
}

}  // namespace quire

#endif  // QUIRE_BASE_CLOCK_H_
