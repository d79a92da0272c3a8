// What a PagedKVCache takes from the machine, known before one is made: the same functions size its
// allocations.
#ifndef QUIRE_KV_CACHE_KV_MEMORY_H_
#define QUIRE_KV_CACHE_KV_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/backend.h"
#include "kv/pages/layer_groups.h"
#include "quire/attention_kv_cache.h"
#include "quire/status.h"

namespace quire {

// Scratch of one forward of `row_count` new tokens of `sequence_count` sequences; attention runs
// layer by layer, so the largest layer's.
size_t AttentionScratchBytes(const Backend& backend, std::span<const LayerGroup> groups,
                             std::span<const AttentionLayerSpec> layers, int64_t row_count,
                             int64_t sequence_count, int worker_count);

struct KVMemory {
  int64_t page_bytes = 0;     // keys and values of one page, in all layers of all groups
  int64_t storage_bytes = 0;  // mapped for all pages, with what belongs to them, in whole pages of
                              // the machine
  int64_t scratch_bytes = 0;  // of attention, in a forward of prefill_chunk_size tokens of
                              // `sequences_max` sequences
  int64_t angle_bytes = 0;    // of RoPE: what its tables take at most
  int64_t blend_bytes = 0;    // what BeginBlendingForward takes beside that, in such a forward
};

// BadArgument for options out of range. Takes and maps nothing. REQUIRES: options.runner.
Result<KVMemory> MeasureKVCache(const AttentionKVCacheOptions& options, int64_t sequences_max);

}  // namespace quire

#endif  // QUIRE_KV_CACHE_KV_MEMORY_H_
