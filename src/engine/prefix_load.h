// The chunks of a waiting request on their way from the store to the engine.
//
// Invariant: once it has ended, nothing changes any more, whatever the store does: decisions of one
// step agree with each other.
#ifndef QUIRE_ENGINE_PREFIX_LOAD_H_
#define QUIRE_ENGINE_PREFIX_LOAD_H_

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "quire/chunk_store.h"

namespace quire {

// How much of a sequence was offered to the store: its first tokens, whole chunks with the key of
// the last one, and the shorter chunk at the prompt's end.
struct StoredPrefix {
  int64_t tokens = 0;
  ChunkKey key{};  // if tokens > 0
  bool tail = false;
};

class PrefixLoad {
 public:
  // One that is there: tokens [begin, end) of the request.
  struct Chunk {
    std::shared_ptr<const StoredChunk> stored;
    ChunkKey key;
    TierKind tier;
    int64_t begin;
    int64_t end;
  };

  // `keys`: those of the chain over `tokens` from first_chunk on, as many as `fetch` brings.
  PrefixLoad(std::shared_ptr<ChunkFetch> fetch, std::vector<ChunkKey> keys,
             std::vector<int32_t> tokens, int64_t chunk_tokens, int64_t first_chunk,
             int64_t start_ns, int64_t deadline_ns);
  PrefixLoad(const PrefixLoad&) = delete;
  PrefixLoad& operator=(const PrefixLoad&) = delete;
  ~PrefixLoad();  // cancels what is not there yet

  bool ended() const { return fetch_ == nullptr; }
  // Ends it if the store is done or the deadline has passed. May throw std::bad_alloc.
  void Poll(int64_t now_ns);
  // Waits until the store is done or the moment, and not beyond the deadline.
  void Wait(int64_t until_ns);

  std::span<const int32_t> tokens() const { return tokens_; }
  int64_t begin() const { return first_chunk_ * chunk_tokens_; }
  // ---- REQUIRES: ended().
  const std::vector<Chunk>& chunks() const { return chunks_; }
  int64_t end() const { return chunks_.empty() ? begin() : chunks_.back().end; }
  MissReason miss() const { return miss_; }
  double seconds() const { return static_cast<double>(end_ns_ - start_ns_) * 1e-9; }

 private:
  std::shared_ptr<ChunkFetch> fetch_;  // null when it has ended
  std::vector<ChunkKey> keys_;
  std::vector<int32_t> tokens_;
  int64_t chunk_tokens_;
  int64_t first_chunk_;
  int64_t start_ns_;
  int64_t deadline_ns_;
  int64_t end_ns_ = 0;
  std::vector<Chunk> chunks_;
  MissReason miss_ = MissReason::kNone;
};

}  // namespace quire

#endif  // QUIRE_ENGINE_PREFIX_LOAD_H_
