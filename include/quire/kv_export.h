// KV and recurrent states between caches and chunks, bit for bit. Page size, page order and sharing
// of the writer's cache do not matter to the reader: chunks have the logical layout.
//
// A chunk has, of each layer, what it takes to go on after its last token: all of its tokens' keys
// and values, of a layer with a window of w the last w - 1, and the states of recurrent layers. So
// a prefix is made of all its chunks, and each may be the last one.
//
//   const auto passport = CachePassport(cache, {.model = ..., .revision = ...}, false);
//   const KeySpace keys(*passport->Fingerprint(), salt);
//   int64_t start = 0;
//   for (ChunkFields& fields : ChainFields(*passport, keys, tokens, /*tail=*/false)) {
//     const int64_t count = fields.tokens.size();
//     store(ExportChunk(cache, seq_id, start, std::move(fields)));
//     start += count;
//   }
//   ...
//   ImportChunks(other_cache, seq_id, views);
#ifndef QUIRE_KV_EXPORT_H_
#define QUIRE_KV_EXPORT_H_

#include <cstdint>
#include <span>
#include <vector>

#include "quire/attention_kv_cache.h"
#include "quire/chunk.h"
#include "quire/composite_state.h"
#include "quire/recurrent_state.h"
#include "quire/status.h"

namespace quire {

// Whose sequences are moved: those of a cache, of recurrent states, or of all parts of a
// CompositeState. A view.
class SequenceStates {
 public:
  SequenceStates(AttentionKVCache& cache) : kv_(&cache), attention_(&cache) {}  // NOLINT
  SequenceStates(RecurrentState& state) : kv_(&state), alone_(&state) {}        // NOLINT
  SequenceStates(CompositeState& composite);                                    // NOLINT

  KVState& kv() const { return *kv_; }
  AttentionKVCache* attention() const { return attention_; }  // null without such layers
  size_t recurrent_count() const;                             // parts, in the composite's order
  RecurrentState& recurrent(size_t part) const;
  CompositeState* composite() const { return composite_; }  // null for a cache alone
  bool HasSequence(int64_t seq_id) const;
  Result<int64_t> GetSequenceLength(int64_t seq_id) const;

 private:
  KVState* kv_;
  AttentionKVCache* attention_ = nullptr;
  RecurrentState* alone_ = nullptr;
  CompositeState* composite_ = nullptr;
};

// The passport of what the cache stores: `identity` has model, revision, tokenizer, adapter,
// block_tokens, and in numerics what the model adds; layers (attention first) and RoPE are the
// cache's. What computes the states of an RNNState, from which initial ones, is part of `revision`.
// `long_factors`: AttentionKVCache::UsesLongRope. BadArgument as Passport::ToJson.
Result<Passport> CachePassport(const SequenceStates& states, Passport identity, bool long_factors);

// The chunks of the prefix chain over `tokens`, from position 0 on, with their tokens; times,
// generation and flags are the caller's. With `tail` also a shorter last one.
// BadArgument for a passport of blocks below one token, OutOfMemory.
// REQUIRES: a passport that has a fingerprint, which is that of `keys`.
Result<std::vector<ChunkFields>> ChainFields(const Passport& passport, const KeySpace& keys,
                                             std::span<const int32_t> tokens, bool tail);

// The one chunk of such a chain that holds `tokens`, from position `start` on, after the chunk
// with the key `previous` (keys.root() if it is the first).
ChunkFields NextFields(const Passport& passport, const KeySpace& keys, const ChunkKey& previous,
                       int64_t start, std::span<const int32_t> tokens);

// The KV of fields.tokens.size() tokens from position `start` on, and the states after them.
// BadArgument for a range that the sequence has not, or holds no more; NeedsReplay for a position
// at which no state is held; UnknownSequence, TooLarge, OutOfMemory.
Result<ChunkBuffer> ExportChunk(const SequenceStates& states, int64_t seq_id, int64_t start,
                                ChunkFields fields, const ChunkWriteOptions& options = {});

// The layer's verified keys and values in a chunk whose tokens are to stand from `position` on:
// what a token at `end` sees of them, empty tensors if nothing; the other layers need not be there.
// Views of the chunk's bytes. Corrupt, Incompatible. REQUIRES: `end` > position, and the chunk's
// end or after it where the layer has a window.
Result<LayerKV> ChunkLayer(const ChunkView& chunk, const AttentionLayerSpec& spec, int64_t layer,
                           int64_t position, int64_t end);
// `count` tokens of it from token `first` on. May throw std::bad_alloc.
LayerKV SomeTokens(const LayerKV& kv, int64_t first, int64_t count);
// A RecurrentCache's layer: its verified state after the chunk's last token. BadArgument for a
// layer out of range, Corrupt, Incompatible.
Result<TensorView> ChunkState(const ChunkView& chunk, const SequenceStates& states, int64_t layer);

// Appends the chunks' tokens to the sequence, which is added if it is absent. What is needed at
// their end is verified first; whatever fails, the sequence is as it was. Corrupt; Incompatible for
// other layers or keys that were rotated for another position; OutOfPages, BadState as
// BeginForward.
Status ImportChunks(const SequenceStates& states, int64_t seq_id,
                    std::span<const ChunkView> chunks);

}  // namespace quire

#endif  // QUIRE_KV_EXPORT_H_
