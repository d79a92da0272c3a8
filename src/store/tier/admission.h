// Admission: how often chunks were wanted lately, so that what nobody wants twice is not written to
// slow tiers. Thread-safe; remembers a limited number of chunks, the newest.
#ifndef QUIRE_STORE_TIER_ADMISSION_H_
#define QUIRE_STORE_TIER_ADMISSION_H_

#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <new>

#include "quire/chunk.h"

namespace quire {

class Admission {
 public:
  explicit Admission(int64_t admit_after) : admit_after_(admit_after) {}

  // Counts; true the one time that admits the chunk. Without memory it counts nothing.
  bool Admit(const ChunkKey& key) noexcept {
    const std::lock_guard lock(mutex_);
    try {
      const auto [at, is_new] = counts_.try_emplace(key, 0);
      if (is_new) {
        try {
          order_.push_back(key);
        } catch (...) {
          counts_.erase(at);
          throw;
        }
      }
      const bool admitted = ++at->second == admit_after_;
      while (order_.size() > kChunksMax) {
        counts_.erase(order_.front());
        order_.pop_front();
      }
      return admitted;
    } catch (const std::bad_alloc&) {
      return false;
    }
  }

 private:
  // Chunks of 256 tokens of some ten million tokens; a few megabytes.
  static constexpr size_t kChunksMax = 65536;

  const int64_t admit_after_;
  std::mutex mutex_;
  std::map<ChunkKey, int64_t> counts_;
  std::deque<ChunkKey> order_;  // as they came into counts_
};

}  // namespace quire

#endif  // QUIRE_STORE_TIER_ADMISSION_H_
