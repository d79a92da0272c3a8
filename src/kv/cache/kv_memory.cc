#include "kv/cache/kv_memory.h"

#include <algorithm>
#include <vector>

#include "base/check.h"
#include "kv/cache/blending_forward.h"
#include "kv/pages/page_storage.h"
#include "kv/plan/rope_layers.h"

namespace quire {

size_t AttentionScratchBytes(const Backend& backend, std::span<const LayerGroup> groups,
                             std::span<const AttentionLayerSpec> layers, int64_t row_count,
                             int64_t sequence_count, int worker_count) {
  QUIRE_DCHECK(row_count > 0 && worker_count > 0);
  size_t bytes = 0;
  for (const LayerGroup& group : groups) {
    int64_t heads = 0;  // layers of a group may differ in their query heads
    for (const int64_t layer : group.layers) {
      const int64_t layer_heads = layers[static_cast<size_t>(layer)].num_qo_heads;
      if (layer_heads == heads) continue;
      heads = layer_heads;
      bytes =
          std::max(bytes, backend.attention_scratch_bytes(group.layout, static_cast<int>(heads),
                                                          row_count, sequence_count, worker_count));
    }
  }
  return bytes;
}

Result<KVMemory> MeasureKVCache(const AttentionKVCacheOptions& options, int64_t sequences_max) {
  QUIRE_ASSIGN_OR_RETURN(const Backend* const backend, FindBackend(options.kernel_path));
  QUIRE_ASSIGN_OR_RETURN(const std::vector<LayerGroup> groups, MakeLayerGroups(options));
  KVMemory memory;
  for (const LayerGroup& group : groups) {
    memory.page_bytes += static_cast<int64_t>(group.layers.size() * group.layout.page_bytes());
  }
  memory.storage_bytes = PageStorage::Bytes(groups);
  const auto scratch_bytes = [&](int64_t sequences) {
    return static_cast<int64_t>(AttentionScratchBytes(*backend, groups, options.layers,
                                                      options.prefill_chunk_size, sequences,
                                                      options.runner->worker_count()));
  };
  memory.scratch_bytes = scratch_bytes(sequences_max);
  memory.blend_bytes =
      scratch_bytes(QueryPlan::SequenceCountMax(options.prefill_chunk_size, sequences_max)) -
      memory.scratch_bytes + BlendingForward::Bytes(options, std::ssize(groups), sequences_max);
  QUIRE_DCHECK(memory.blend_bytes >= 0) << "more sequences need less memory";
  QUIRE_ASSIGN_OR_RETURN(const std::vector<RopeLayers> ropes, MakeRopeLayers(options, groups));
  for (const RopeLayers& rope : ropes) memory.angle_bytes += rope.bytes_max;
  return memory;
}

}  // namespace quire
