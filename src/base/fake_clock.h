// A clock that stands until a test advances it.
#ifndef QUIRE_BASE_FAKE_CLOCK_H_
#define QUIRE_BASE_FAKE_CLOCK_H_

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <set>

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
    std::multiset<Waiter>::iterator self;
    {
      const std::lock_guard<std::mutex> guard(mutex_);
      if (now_ns_ >= until_ns) return;
      self = waiters_.insert({&changed, lock.mutex()});
      entered_.notify_all();
    }
    changed.wait(lock);
    const std::lock_guard<std::mutex> guard(mutex_);
    waiters_.erase(self);
  }

  // Time passes for all that wait. REQUIRES: the caller holds no mutex that a waiter waits with.
  void Advance(int64_t ns) {
    std::multiset<Waiter> waiters;
    {
      const std::lock_guard<std::mutex> guard(mutex_);
      now_ns_ += ns;
      waiters = waiters_;
    }
    for (const Waiter& waiter : waiters) {
      // Taken, so that nobody is between reading the time and falling asleep.
      { const std::lock_guard<std::mutex> guard(*waiter.mutex); }
      waiter.changed->notify_all();
    }
  }
  // Returns once `count` threads wait with this clock.
  void AwaitWaiters(size_t count) {
    std::unique_lock<std::mutex> lock(mutex_);
    entered_.wait(lock, [&] { return waiters_.size() >= count; });
  }

 private:
  struct Waiter {
    std::condition_variable* changed;
    std::mutex* mutex;
    auto operator<=>(const Waiter&) const = default;
  };
  static constexpr int64_t kStartMs = 1'700'000'000'000;  // some day in 2023

  mutable std::mutex mutex_;
  std::condition_variable entered_;
  int64_t now_ns_ = 0;
  std::multiset<Waiter> waiters_;
};

}  // namespace quire

#endif  // QUIRE_BASE_FAKE_CLOCK_H_
