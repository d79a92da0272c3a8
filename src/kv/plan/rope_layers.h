// Which layers of a cache share angles, and how many tiles of angles they need at most.
#ifndef QUIRE_KV_PLAN_ROPE_LAYERS_H_
#define QUIRE_KV_PLAN_ROPE_LAYERS_H_

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "kv/pages/layer_groups.h"
#include "quire/attention_kv_cache.h"
#include "quire/rope.h"
#include "quire/status.h"

namespace quire {

// Positions below this keep their angles once they have been computed, as most sequences begin
// there: 32 MiB with 64 pairs. Behind it a table holds what is needed.
struct RopeLimits {
  int64_t table_positions = 65536;
};

// Layers of one dimension that is rotated and one set of options.
struct RopeLayers {
  int64_t head_dim = 0;
  std::optional<RopeOptions> options{};  // as in the layers' specs
  RopeFrequencies short_set{};
  RopeFrequencies long_set{};  // another one where HasLongSet
  // RopeMode::kInline: the largest window of these layers; else 0. What a row sees in another one
  // of them it sees there, too.
  int64_t inline_window = 0;
  // The tiles of both tables together, while they hold what is needed and what is near.
  int64_t tile_count_max = 0;
  int64_t bytes_max = 0;

  bool IsOf(const AttentionLayerSpec& layer) const;
};

// The dimensions that RoPE is about: of a latent layer those behind its value.
inline int64_t RopeDim(const AttentionLayerSpec& layer) {
  return layer.latent ? layer.qk_head_dim - layer.v_head_dim : layer.qk_head_dim;
}
// Null where nothing says how the layer's rows are rotated.
const RopeOptions* RopeOf(const AttentionKVCacheOptions& options, const AttentionLayerSpec& layer);

// BadArgument for options of RoPE out of range, with the field's name.
Result<std::vector<RopeLayers>> MakeRopeLayers(const AttentionKVCacheOptions& options,
                                               std::span<const LayerGroup> groups,
                                               const RopeLimits& limits = {});

}  // namespace quire

#endif  // QUIRE_KV_PLAN_ROPE_LAYERS_H_
