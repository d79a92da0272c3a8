// The chunks of a waiting request on their way from the store to the engine.
//
// It is used when it has ended, or before, a layer at a time, by the forward that computes behind
// it.
//
// Invariant: once it has ended, nothing changes any more, whatever the store does, and before, only
// Poll, TakeLayers and End change what can be seen: decisions of one step agree with each other.
#ifndef QUIRE_ENGINE_LOADING_PREFIX_LOAD_H_
#define QUIRE_ENGINE_LOADING_PREFIX_LOAD_H_

#include <algorithm>
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
  bool broken = false;  // a chunk is missing that the sequence cannot give any more
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
  // Whether a request can go on with what it brings: it has ended, or comes layer by layer.
  bool usable() const { return ended() || comes_by_layers_; }
  // Ends it if the store is done or the deadline has passed. May throw std::bad_alloc.
  void Poll(int64_t now_ns);
  // Cancels what is not there yet. REQUIRES: usable().
  void End(int64_t now_ns) noexcept;

  // ---- REQUIRES: !ended().
  // How many of the model's first layers are there of all that was found; 0 while that is not
  // known.
  int64_t LayersThere(int64_t layer_count, int64_t now_ns) const;
  // Where the tokens end of which those layers are.
  int64_t found_end() const { return EndOf(FoundCount()); }
  // All that was found is usable from now on. REQUIRES: its first layer is there.
  void TakeLayers();
  // Waits until the layer is there, or the store is done, or the moment, and not beyond the
  // deadline.
  void AwaitLayer(int64_t layer, int64_t until_ns);

  // Waits until the layer of all chunks() is there, and not beyond the deadline: Timeout then, or
  // why it will never be. REQUIRES: usable().
  Status WaitLayer(int64_t layer);
  // Whether nothing is on its way any more.
  bool complete() const { return ended() || fetch_->done(); }

  std::span<const int32_t> tokens() const { return tokens_; }
  int64_t begin() const { return first_chunk_ * chunk_tokens_; }
  int64_t start_ns() const { return start_ns_; }
  // ---- REQUIRES: usable().
  const std::vector<Chunk>& chunks() const { return chunks_; }
  int64_t end() const { return chunks_.empty() ? begin() : chunks_.back().end; }
  MissReason miss() const;  // why there are no more chunks
  // ---- REQUIRES: ended().
  double seconds() const { return static_cast<double>(end_ns_ - start_ns_) * 1e-9; }

 private:
  int64_t FoundCount() const;
  // Where the first `count` chunks end.
  int64_t EndOf(int64_t count) const;
  // The first `count` that the fetch brings.
  std::vector<Chunk> ChunksOf(int64_t count) const;

  std::shared_ptr<ChunkFetch> fetch_;  // null when it has ended
  std::vector<ChunkKey> keys_;
  std::vector<int32_t> tokens_;
  int64_t chunk_tokens_;
  int64_t first_chunk_;
  int64_t start_ns_;
  int64_t deadline_ns_;
  int64_t end_ns_ = 0;
  bool comes_by_layers_ = false;
  std::vector<Chunk> chunks_;
  MissReason miss_ = MissReason::kNone;
};

}  // namespace quire

#endif  // QUIRE_ENGINE_LOADING_PREFIX_LOAD_H_
