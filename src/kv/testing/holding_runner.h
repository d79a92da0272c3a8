// A runner that holds up the thread that calls it, when the test wants that: a copy of rows that
// stands still half way.
#ifndef QUIRE_KV_TESTING_HOLDING_RUNNER_H_
#define QUIRE_KV_TESTING_HOLDING_RUNNER_H_

#include <condition_variable>
#include <cstdint>
#include <mutex>

#include "quire/seams.h"

namespace quire {

// Runs everything on the calling thread. Calls from any thread.
class HoldingRunner final : public ParallelRunner {
 public:
  int worker_count() const noexcept override { return 1; }
  void Run(int64_t count, Task task, void* context) noexcept override {
    {
      std::unique_lock lock(mutex_);
      if (to_hold_ > 0) {
        --to_hold_;
        ++held_;
        changed_.notify_all();
        changed_.wait(lock, [&] { return may_go_; });
        --held_;
      }
    }
    for (int64_t i = 0; i < count; ++i) task(context, i, 0);
  }

  // The next `count` calls are held.
  void HoldNext(int count) {
    const std::lock_guard lock(mutex_);
    to_hold_ = count;
    may_go_ = false;
  }
  void AwaitHeld(int count) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return held_ == count; });
  }
  void Release() {
    const std::lock_guard lock(mutex_);
    may_go_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int to_hold_ = 0;
  int held_ = 0;
  bool may_go_ = true;
};

}  // namespace quire

#endif  // QUIRE_KV_TESTING_HOLDING_RUNNER_H_
