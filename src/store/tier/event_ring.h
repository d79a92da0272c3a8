// The newest events of a store, until somebody takes them.
#ifndef QUIRE_STORE_TIER_EVENT_RING_H_
#define QUIRE_STORE_TIER_EVENT_RING_H_

#include <algorithm>
#include <cstddef>
#include <mutex>
#include <vector>

#include "quire/chunk_store.h"

namespace quire {

class EventRing {
 public:
  static constexpr size_t kEventsMax = 65536;  // as include/quire/chunk_store.h says

  // A place for each event is taken here, so that Add needs no memory.
  EventRing() { events_.resize(kEventsMax); }

  void Add(const ChunkEvent& event) noexcept {
    const std::lock_guard lock(mutex_);
    events_[(first_ + count_) % kEventsMax] = event;
    if (count_ < kEventsMax) {
      ++count_;
      return;
    }
    first_ = (first_ + 1) % kEventsMax;
    ++dropped_;
  }
  // Oldest first. std::bad_alloc leaves them here.
  std::vector<ChunkEvent> Take() {
    const std::lock_guard lock(mutex_);
    std::vector<ChunkEvent> taken;
    taken.reserve(count_);
    for (size_t i = 0; i < count_; ++i) taken.push_back(events_[(first_ + i) % kEventsMax]);
    first_ = count_ = 0;
    return taken;
  }
  int64_t dropped() const {
    const std::lock_guard lock(mutex_);
    return dropped_;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<ChunkEvent> events_;
  size_t first_ = 0;
  size_t count_ = 0;
  int64_t dropped_ = 0;
};

}  // namespace quire

#endif  // QUIRE_STORE_TIER_EVENT_RING_H_
