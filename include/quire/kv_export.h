// KV between a cache and chunks, bit for bit. Page size, page order and sharing of the writer's
// cache do not matter to the reader: chunks have the logical layout.
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
#include "quire/status.h"

namespace quire {

// The passport of what the cache stores: `identity` has model, revision, tokenizer, adapter and
// block_tokens; layers, RoPE and numerics are the cache's. `long_factors`: the sequence's choice
// (AttentionKVCache::UsesLongRope). BadArgument as Passport::ToJson.
Result<Passport> CachePassport(const AttentionKVCache& cache, Passport identity, bool long_factors);

// The chunks of the prefix chain over `tokens`, from position 0 on, with their tokens; times,
// generation and flags are the caller's. With `tail` also a shorter last one.
// REQUIRES: a passport that has a fingerprint, which is that of `keys`.
std::vector<ChunkFields> ChainFields(const Passport& passport, const KeySpace& keys,
                                     std::span<const int32_t> tokens, bool tail);

// The one chunk of such a chain that holds `tokens`, from position `start` on, behind the chunk
// with the key `previous` (keys.root() if it is the first).
ChunkFields NextFields(const Passport& passport, const KeySpace& keys, const ChunkKey& previous,
                       int64_t start, std::span<const int32_t> tokens);

// The KV of fields.tokens.size() tokens from position `start` on. BadArgument for a range that the
// sequence has not, UnknownSequence, TooLarge, OutOfMemory.
Result<ChunkBuffer> ExportChunk(AttentionKVCache& cache, int64_t seq_id, int64_t start,
                                ChunkFields fields, const ChunkWriteOptions& options = {});

// The layer's verified keys and values in a chunk whose tokens are to stand from `position` on; the
// other layers need not be there. Views of the chunk's bytes. Corrupt, Incompatible.
Result<LayerKV> ChunkLayer(const ChunkView& chunk, const AttentionLayerSpec& spec, int64_t layer,
                           int64_t position);
// The first `count` tokens of it.
LayerKV FirstTokens(const LayerKV& kv, int64_t count);

// Appends the chunks' tokens to the sequence, which is added if it is absent. All digests are
// verified first; whatever fails, the cache is as it was. Corrupt; Incompatible for other layers or
// keys that were rotated for another position; OutOfPages, BadState as BeginForward.
Status ImportChunks(AttentionKVCache& cache, int64_t seq_id, std::span<const ChunkView> chunks);

}  // namespace quire

#endif  // QUIRE_KV_EXPORT_H_
