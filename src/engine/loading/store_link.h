// What the engine knows of the chunk store that it is attached to: names of chunks, and the ways of
// KV between the cache's sequences and the store. It decides nothing; StoreTraffic does.
#ifndef QUIRE_ENGINE_LOADING_STORE_LINK_H_
#define QUIRE_ENGINE_LOADING_STORE_LINK_H_

#include <array>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <vector>

#include "engine/loading/prefix_load.h"
#include "engine/prefix/prefix_cache.h"
#include "quire/chunk_store.h"
#include "quire/engine.h"
#include "quire/kv_export.h"

namespace quire {

// Fewer tokens are computed along with any step; to look for them costs more than it saves.
inline constexpr int64_t kLoadTokensMin = 16;
inline constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();

// Requests that the store is asked for at a time: enough to keep a disk or a network busy. What
// they bring is bounded by ChunkStoreOptions::fetch_bytes_max.
inline constexpr int64_t kLoadsMax = 8;
// Requests whose chunks are brought into the store's RAM before they are loaded: as many again.
// What they hold there is pinned until their load begins or the pins end.
inline constexpr int64_t kPrefetchesMax = 8;

class StoreLink {
 public:
  // What `states` views outlives this. `long_rope`: sequences of both sets of LongRoPE's factors
  // will come. `at_borders`: of a sequence only what is there now can be had.
  static Result<std::unique_ptr<StoreLink>> Create(std::shared_ptr<ChunkStore> store,
                                                   const SequenceStates& states, bool at_borders,
                                                   const Passport& identity,
                                                   const StoreUseOptions& options, bool long_rope);

  int64_t chunk_tokens() const { return chunk_tokens_; }
  int64_t now_ns() const { return clock_->SteadyNs(); }
  ChunkStore& store() { return *store_; }

  // How many tokens of a prompt its chunks hold, with the shorter last one. A sequence that cannot
  // be cut anywhere ends one token before the prompt, which is computed for its logits.
  int64_t PromptEnd(int64_t prompt_tokens) const { return prompt_tokens - (at_borders_ ? 1 : 0); }
  // Where a sequence of which `computed` tokens are there has to stop next, so that there is a
  // state of its recurrent layers to be put into a chunk. kNoLimit without such layers: what a
  // window shows at a chunk's end is there until the forward ends that goes on behind it.
  //
  // A forward could leave a state there on its way, with the same bits. But that would be one more
  // slot for each chunk and each prompt that ends in a forward, kept ready for all samples
  // (StateSlotCount), and states are what such a model has least room for; a stop costs a
  // forward of one token for a prompt.
  int64_t NextStop(int64_t computed, int64_t prompt_tokens) const;

  // Whether the last chunk of a prompt is a shorter one.
  bool EndsInTail(int64_t prompt_tokens) const {
    return ChunksEnd(PromptEnd(prompt_tokens), true) % chunk_tokens_ != 0;
  }
  // Whether `length` tokens have chunks worth asking for behind the first `held` ones. `tail`: the
  // last one may be shorter.
  bool HasMore(int64_t length, int64_t held, bool tail) const;
  // The keys of the tokens' chunks; `tail`: the last one may be shorter. OutOfMemory.
  Result<std::vector<ChunkKey>> KeysOf(const PrefixSpace& space, std::span<const int32_t> tokens,
                                       bool tail) const;
  // How many tokens the leading chunks have that are in the store, as far as it knows without
  // asking a disk or a network; a last one counts as a whole one.
  int64_t Known(const PrefixSpace& space, std::span<const ChunkKey> keys) const;
  // What is asked for a request.
  struct Wish {
    const PrefixSpace* space = nullptr;
    std::span<const int32_t> tokens = {};
    int64_t held = 0;
    bool tail = false;
    std::span<const ChunkKey> keys = {};  // KeysOf
  };
  // Asks for all of them in one call of the store; an error begins none. [i]: of wishes[i].
  // REQUIRES: HasMore.
  Result<std::vector<std::unique_ptr<PrefixLoad>>> StartLoads(std::span<const Wish> wishes,
                                                              double compute_seconds_per_token);
  // Brings the same chunks into the store's RAM, for a load to come. Null if the store has no
  // RAM tier or refuses. Destroying the fetch cancels what is not there yet. REQUIRES: HasMore.
  std::shared_ptr<ChunkFetch> Prefetch(const Wish& wish, double compute_seconds_per_token) const;
  // The chunk, if it is exactly that which was asked for; else an error.
  Result<ChunkView> Open(const PrefixSpace& space, std::span<const int32_t> tokens,
                         const PrefixLoad::Chunk& chunk) const;
  // One layer of it, verified, to stand from `position` on: what a token at `end` sees of it.
  Result<LayerKV> LayerOf(const ChunkView& chunk, int64_t layer, int64_t position,
                          int64_t end) const;
  // One recurrent layer's state at its end, verified.
  Result<TensorView> StateOf(const ChunkView& chunk, int64_t layer) const {
    return ChunkState(chunk, states_, layer);
  }
  // Chunks have attention layers first, then the recurrent ones.
  int64_t attention_layer_count() const;
  // Appends chunks to the sequence, which holds the tokens before them. What is not exactly what
  // was asked for is an error, and the sequence as it was.
  Status Import(int64_t sequence_id, const PrefixSpace& space, std::span<const int32_t> tokens,
                std::span<const PrefixLoad::Chunk> chunks);

  // What was put, since the engine began.
  struct PutCounts {
    int64_t chunks = 0, bytes = 0;
    int64_t refused = 0;  // by the store, or for want of memory
  };
  const PutCounts& put_counts() const { return put_counts_; }

  // Puts the chunks of a sequence that are whole, lie behind `stored` and are wanted, until
  // `bytes_max` are put; `tail`: the shorter last one as well. `tokens`: all that the sequence
  // holds, or its first ones. What the store refuses is counted and left. Returns the bytes.
  int64_t Export(int64_t sequence_id, const PrefixSpace& space, std::span<const int32_t> tokens,
                 bool tail, int64_t bytes_max, double compute_seconds_per_token,
                 StoredPrefix* stored) noexcept;

 private:
  // The keys of one set of RoPE factors.
  struct KeyKind {
    Passport passport;
    Digest fingerprint;
    ChunkLimits limits;
  };

  StoreLink(std::shared_ptr<ChunkStore> store, const SequenceStates& states, bool at_borders,
            const StoreUseOptions& options, int64_t chunk_tokens);
  // Where the last of the chunks of `length` tokens ends.
  int64_t ChunksEnd(int64_t length, bool tail) const;
  Status AddKind(const Passport& identity, bool long_rope);
  // What a load asks for, without a deadline. `keys` and `tokens` outlive it.
  FetchRequest RequestOf(const KeySpace& keys, const Wish& wish,
                         double compute_seconds_per_token) const;
  const KeyKind& KindOf(const PrefixSpace& space) const { return kinds_[space.long_rope ? 1 : 0]; }
  int64_t ExportUntil(int64_t sequence_id, const PrefixSpace& space,
                      std::span<const int32_t> tokens, int64_t bytes_max,
                      double compute_seconds_per_token, StoredPrefix* stored);
  // The bytes that it put; 0 if the store refused them. NeedsReplay, BadArgument: the sequence does
  // not hold what the chunk needs any more.
  Result<int64_t> ExportOne(int64_t sequence_id, const KeySpace& keys, int64_t start,
                            ChunkFields fields, const ChunkLimits& limits,
                            double compute_seconds_per_token);

  std::shared_ptr<ChunkStore> store_;
  SequenceStates states_;
  bool at_borders_;
  StoreUseOptions options_;
  std::shared_ptr<Clock> clock_;
  bool has_ram_;  // the store has a RAM tier
  int64_t chunk_tokens_;
  std::array<KeyKind, 2> kinds_;  // of the short factors (and all models without LongRoPE), long
  PutCounts put_counts_;
};

}  // namespace quire

#endif  // QUIRE_ENGINE_LOADING_STORE_LINK_H_
