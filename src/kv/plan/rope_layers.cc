#include "kv/plan/rope_layers.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/check.h"
#include "kv/plan/rope_table.h"
#include "tensor/checked_size.h"

namespace quire {
namespace {

// Tiles of all positions that are held in pages of the group, each page apart.
std::optional<int64_t> TilesOfPages(const LayerGroup& group) {
  const int64_t page_size = group.layout.page_size;
  QUIRE_DCHECK(page_size > 0);
  int64_t tiles = (page_size + kTilePositions - 1) / kTilePositions;
  if (page_size % kTilePositions != 0 && kTilePositions % page_size != 0) ++tiles;
  return CheckedProduct({group.page_count, tiles});
}

// Tiles that the rows of a forward stand in. Rows of a chain are consecutive, those of a tree stand
// at its levels.
int64_t TilesOfRows(const AttentionKVCacheOptions& options) {
  const int64_t rows = options.prefill_chunk_size;
  const int64_t sequences = std::min(options.max_num_sequences, rows);
  const int64_t levels = sequences * (options.max_tree_size / kTilePositions);
  return rows / kTilePositions + 2 * sequences + std::min(rows, levels);
}

// What a cache holds: near tiles, those of what is visible (kInline), and those of the batch's rows
// twice, for their own positions and for those that sinks are seen from.
Status FillLimits(const AttentionKVCacheOptions& options, std::span<const LayerGroup> groups,
                  const RopeLimits& limits, RopeLayers* rope) {
  const RopeOptions& of = rope->options ? *rope->options : options.rope;
  const int64_t tables = HasLongSet(of.scaling) ? 2 : 1;
  const int64_t near = (limits.table_positions + kTilePositions - 1) / kTilePositions;
  std::optional<int64_t> visible = 0;
  for (const LayerGroup& group : groups) {
    const AttentionLayerSpec& layer = options.layers[static_cast<size_t>(group.layers[0])];
    if (rope->inline_window == 0 || !rope->IsOf(layer) || group.window != rope->inline_window)
      continue;
    const std::optional<int64_t> tiles = TilesOfPages(group);
    visible = tiles && visible ? std::optional(std::max(*visible, *tiles)) : std::nullopt;
  }
  const int64_t pairs = static_cast<int64_t>(rope->short_set.inv_freq.size());
  if (visible) {
    rope->tile_count_max = tables * near + *visible + 2 * TilesOfRows(options);
    const int64_t ranges = 4 * std::min(options.max_num_sequences, options.prefill_chunk_size);
    // A leaf is smaller than 64 tiles of one pair.
    if (CheckedProduct({rope->tile_count_max + 64 * ranges, 2, RopeTable::TileBytes(pairs)})) {
      rope->bytes_max = RopeTable::BytesMax(rope->tile_count_max, ranges + tables, pairs);
      return {};
    }
  }
  return Status(StatusCode::kBadArgument,
                "AttentionKVCacheOptions: token_capacity is " +
                    std::to_string(options.token_capacity) +
                    "; the angles of its positions would be more than 2^60 bytes; lower it, or "
                    "prefill_chunk_size, or max_num_sequences");
}

}  // namespace

const RopeOptions* RopeOf(const AttentionKVCacheOptions& options, const AttentionLayerSpec& layer) {
  const RopeOptions& rope = layer.rope ? *layer.rope : options.rope;
  return rope.mode == RopeMode::kNone || RopeDim(layer) == 0 ? nullptr : &rope;
}

bool RopeLayers::IsOf(const AttentionLayerSpec& layer) const {
  return head_dim == RopeDim(layer) && options == layer.rope;
}

Result<std::vector<RopeLayers>> MakeRopeLayers(const AttentionKVCacheOptions& options,
                                               std::span<const LayerGroup> groups,
                                               const RopeLimits& limits) {
  std::vector<RopeLayers> ropes;
  for (const AttentionLayerSpec& layer : options.layers) {
    const RopeOptions* const of_layer = RopeOf(options, layer);
    if (of_layer == nullptr) continue;
    auto rope = std::ranges::find_if(ropes, [&](const RopeLayers& r) { return r.IsOf(layer); });
    if (rope == ropes.end()) {
      RopeLayers made{.head_dim = RopeDim(layer), .options = layer.rope};
      QUIRE_ASSIGN_OR_RETURN(made.short_set,
                             ComputeRopeFrequencies(*of_layer, made.head_dim, false));
      QUIRE_ASSIGN_OR_RETURN(made.long_set, ComputeRopeFrequencies(*of_layer, made.head_dim, true));
      rope = ropes.insert(ropes.end(), std::move(made));
    }
    if (layer.latent || options.rope.mode != RopeMode::kInline) continue;
    rope->inline_window =
        std::max(rope->inline_window, layer.window == 0 ? kNoWindow : layer.window);
  }
  for (RopeLayers& rope : ropes) QUIRE_RETURN_IF_ERROR(FillLimits(options, groups, limits, &rope));
  return ropes;
}

}  // namespace quire
