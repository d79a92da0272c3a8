// A clock that stands until a test advances it.
#ifndef QUIRE_BASE_TESTING_FAKE_CLOCK_H_
#define QUIRE_BASE_TESTING_FAKE_CLOCK_H_

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>

#include "base/clock.h"

namespace quire {

class FakeClock final : public Clock {
 public:
  int64_t WallMs() const noexcept override { return kStartMs + SteadyNs() / 1'000'000; }
  int64_t SteadyNs() const noexcept override {
    const std::lock_guard<std::mutex> guard(mutex_);
    return now_ns_;
  }
  void Wait(std::condition_variable& changed, std::unique_lock<std::mutex>& lock,
            int64_t until_ns) override {
    {
      const std::lock_guard<std::mutex> guard(mutex_);
      if (now_ns_ >= until_ns) return;
      ++waiting_;
      entered_.notify_all();
    }
    // Advance notifies nobody: the condition variable may be gone by then. The caller looks again.
    changed.wait_for(lock, kLook);
    const std::lock_guard<std::mutex> guard(mutex_);
    --waiting_;
  }

  // Time passes for all that wait.
  void Advance(int64_t ns) {
    const std::lock_guard<std::mutex> guard(mutex_);
    now_ns_ += ns;
  }
  // Returns once `count` threads wait with this clock.
  void AwaitWaiters(size_t count) {
    std::unique_lock<std::mutex> lock(mutex_);
    entered_.wait(lock, [&] { return waiting_ >= count; });
  }

 private:
  static constexpr std::chrono::milliseconds kLook{1};
  static constexpr int64_t kStartMs = 1'700'000'000'000;  // some day in 2023

  mutable std::mutex mutex_;
  std::condition_variable entered_;
  int64_t now_ns_ = 0;
  size_t waiting_ = 0;
};

}  // namespace quire

#endif  // QUIRE_BASE_TESTING_FAKE_CLOCK_H_
