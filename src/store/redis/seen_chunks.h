// SeenChunks: the chunks that a server had not long ago. The newest are remembered; one that is
// forgotten costs a question, no more. Not thread-safe: its owner's lock.
//
// Two generations: once the younger one has half of the chunks, it becomes the older one, and what
// the older one had is forgotten. So what was added last is there whatever came before it.
#ifndef QUIRE_STORE_REDIS_SEEN_CHUNKS_H_
#define QUIRE_STORE_REDIS_SEEN_CHUNKS_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <unordered_map>

#include "quire/chunk.h"

namespace quire {

class SeenChunks {
 public:
  explicit SeenChunks(size_t count_max) : generation_max_(count_max / 2) {}

  // When it was seen last; nullopt: never, or that is forgotten.
  std::optional<int64_t> Find(const ChunkKey& key) const {
    for (const Generation* generation : {&younger_, &older_}) {
      const auto at = generation->find(key);
      if (at != generation->end()) return at->second;
    }
    return std::nullopt;
  }
  // std::bad_alloc: it is not remembered.
  void Add(const ChunkKey& key, int64_t seen_ns) {
    if (younger_.size() >= generation_max_ && !younger_.contains(key)) {
      older_.swap(younger_);
      younger_.clear();
    }
    younger_[key] = seen_ns;
  }
  void Remove(const ChunkKey& key) {
    younger_.erase(key);
    older_.erase(key);
  }

 private:
  struct KeyHash {
    size_t operator()(const ChunkKey& key) const {
      size_t hash;  // a digest is as good as any hash of it
      std::memcpy(&hash, key.digest.bytes.data(), sizeof(hash));
      return hash;
    }
  };
  using Generation = std::unordered_map<ChunkKey, int64_t, KeyHash>;

  const size_t generation_max_;
  Generation younger_, older_;
};

}  // namespace quire

#endif  // QUIRE_STORE_REDIS_SEEN_CHUNKS_H_
