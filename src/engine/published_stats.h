// What any thread may ask of an engine at any time: the state after the last call that was inside.
#ifndef QUIRE_ENGINE_PUBLISHED_STATS_H_
#define QUIRE_ENGINE_PUBLISHED_STATS_H_

#include <atomic>
#include <mutex>

#include "quire/engine.h"

namespace quire {

class PublishedStats {
 public:
  void Set(const EngineStats& stats, bool idle) noexcept {
    idle_.store(idle, std::memory_order_release);
    const std::lock_guard<std::mutex> lock(mutex_);
    stats_ = stats;
  }
  EngineStats stats() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return stats_;
  }
  // Whether no request is there, and nothing is to be reported.
  bool idle() const noexcept { return idle_.load(std::memory_order_acquire); }

 private:
  std::atomic<bool> idle_ = true;
  mutable std::mutex mutex_;
  EngineStats stats_;  // guarded by mutex_
};

}  // namespace quire

#endif  // QUIRE_ENGINE_PUBLISHED_STATS_H_
