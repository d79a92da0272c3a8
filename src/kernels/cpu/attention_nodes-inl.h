// Nodes of a token tree in attention: tiles with uncommitted positions are each node's own.
// Included inside a path's namespace and target region.
#ifndef QUIRE_KERNELS_CPU_ATTENTION_NODES_INL_H_
#define QUIRE_KERNELS_CPU_ATTENTION_NODES_INL_H_

#include "kernels/cpu/attention_segment-inl.h"

// Tiles of the segment that lie after, or hold, the end of the unit's committed tokens.
static TileSet OwnTiles(const AttentionCall& call, const AttentionUnit& unit, int64_t segment) {
  const AttentionSequence& sequence = call.args->sequences[static_cast<size_t>(unit.sequence)];
  if (unit.shared || sequence.tree == nullptr) return 0;
  const int64_t base = sequence.base - segment * kSegmentPositions;
  return TilesIn(ClampToSegment(base) / kLanes, kTilesPerSegment);
}

static int64_t NodeOfRow(const AttentionCall& call, const AttentionUnit& unit, int64_t r) {
  const int64_t plan_row = (unit.row_begin + r) / call.schedule->group_size();
  return call.args->sequences[static_cast<size_t>(unit.sequence)].tree->first_node + plan_row -
         call.schedule->plan_row_begin()[unit.sequence];
}

// The last node that a row's path may show in this call, -1 if none.
static int64_t ShownNode(const AttentionCall& call, const TokenTreeView& tree, int64_t node) {
  if (!call.args->cached_only) return node;
  while (node >= tree.first_node) node = tree.parents[node];
  return node;
}

// Calls f(row, count, tile number, tile) for each node of rows [begin, end) and each tile of `own`
// that it sees; for one node, in the order of positions. `rotate`: angles of the tile are loaded.
template <typename F>
static void ForEachNodeTile(const AttentionCall& call, const AttentionUnit& unit, int64_t segment,
                            TileSet own, int64_t begin, int64_t end, bool rotate,
                            WorkerSpace& space, const F& f) {
  const AttentionSequence& sequence = call.args->sequences[static_cast<size_t>(unit.sequence)];
  SegmentTile tile;
  for (; own != 0; own &= own - 1) {
    const int t = __builtin_ctz(own);
    const SegmentTile* stored = t < space.tiles->tile_count ? &space.tiles->tiles[t] : nullptr;
    if (rotate) LoadTileAngles(sequence, segment, t, space);
    for (int64_t r = begin; r < end;) {
      const int64_t node = NodeOfRow(call, unit, r);
      int64_t stop = r + 1;
      while (stop < end && NodeOfRow(call, unit, stop) == node) ++stop;
      if ((TilesOf(ViewIn(space.views[r], segment)) >> t & 1) != 0) {
        ResolveNodeTile(call.args->pages, sequence, ShownNode(call, *sequence.tree, node), segment,
                        t, stored, &tile);
        f(r, static_cast<int>(stop - r), t, tile);
      }
      r = stop;
    }
  }
}

// Steps of `count` rows out of groups of `group`.
template <typename Step>
static void GatherSteps(const std::byte* from, int64_t steps, int64_t group, int count,
                        std::byte* to) {
  const size_t bytes = static_cast<size_t>(count) * sizeof(Step);
  for (int64_t d = 0; d < steps; ++d) {
    __builtin_memcpy(to + static_cast<size_t>(d) * bytes,
                     from + static_cast<size_t>(d * group) * sizeof(Step), bytes);
  }
}

// Rows [r, r + count) of the unit's head `h`, which are of one group of StoreQuery, in
// space.node_q.
static void GatherQuery(const AttentionCall& call, const AttentionUnit& unit, const std::byte* q,
                        int64_t h, int64_t r, int count, int64_t steps, WorkerSpace& space) {
  const size_t row_bytes = QueryRowBytes(call, unit);
  const size_t step_bytes = row_bytes / static_cast<size_t>(steps);
  const int64_t together = GroupRows(unit.row_count());
  const int64_t first = r / together * together;
  const int64_t group = SmallerOf(together, unit.row_count() - first);
  const std::byte* from = q + static_cast<size_t>(h * unit.row_count() + first) * row_bytes +
                          static_cast<size_t>(r - first) * step_bytes;
  if (step_bytes == sizeof(uint64_t)) {
    GatherSteps<uint64_t>(from, steps, group, count, space.node_q);
  } else {
    GatherSteps<uint32_t>(from, steps, group, count, space.node_q);
  }
}

// Scores of `count` rows of the unit's queries, from `index` on, against `tiles` of `keys`, by the
// tile unit. `scores`: of the first row.
static void ScoreTileProducts([[maybe_unused]] const AttentionCall& call,
                              [[maybe_unused]] const AttentionUnit& unit,
                              [[maybe_unused]] UnitQueries q, [[maybe_unused]] int64_t index,
                              [[maybe_unused]] int count,
                              [[maybe_unused]] const std::byte* const* keys,
                              [[maybe_unused]] TileSet tiles, [[maybe_unused]] float* scores,
                              [[maybe_unused]] AheadOfTiles ahead) {
#if defined(QUIRE_SIMD_TILES)
  const size_t row_bytes = QueryRowBytes(call, unit);
  const TileScoreArgs args = {.q = q.weights + static_cast<size_t>(index) * row_bytes,
                              .q_row_bytes = static_cast<int64_t>(row_bytes),
                              .rows = count,
                              .k_dim = call.layout().k_dim(),
                              .keys = keys,
                              .tiles = tiles,
                              .scores = scores,
                              .ahead = ahead.tiles,
                              .ahead_begin = ahead.begin,
                              .ahead_step = ahead.step};
  if (OnByteTiles(call, unit)) return ScoreByBytes(args);
  ScoreByTiles(args);
#endif
}

// Scores of the tiles `own`, for queries `q`: rows [begin, end) of the unit's head `h`, which are
// of one group. `scores`: of row `begin`.
static void ScoreNodes(const AttentionCall& call, const AttentionUnit& unit, int64_t segment,
                       TileSet own, UnitQueries q, int64_t h, int64_t begin, int64_t end,
                       float* scores, WorkerSpace& space) {
  const bool rotate = RotatesKeys(call, unit);
  const DType keys = KeyDType(call, unit);
  const ChainLoops* loops = LoopsOf(keys);
  const int head = static_cast<int>(unit.head_begin + h);
  ScoreArgs a;
  a.q = space.node_q;
  a.q_column_bytes = 0;
  a.steps = ScoreSteps(call, keys);
  a.s_row = kScoreStride;
  a.s_column = kLanes;
  a.prefetch = nullptr;
  a.into_l1 = false;
  a.ahead_step = 0;
  const bool on_tiles = OnTiles(call, unit);
  const auto score = [&](int64_t r, int count, int t, const SegmentTile& tile) {
    const std::byte* const key =
        PrepareKeys(call, tile, head, rotate, keys, space, space.node_keys);
    float* const row = scores + (r - begin) * kScoreStride;
    if (on_tiles) {
      const std::byte* by_tile[kTilesPerSegment];
      by_tile[t] = key;
      ScoreTileProducts(call, unit, q, h * unit.row_count() + r, count, by_tile, TileSet{1} << t,
                        row, {by_tile, 0, 0});
    } else {
      GatherQuery(call, unit, q.weights, h, r, count, a.steps, space);
      a.k[0] = a.ahead[0] = key;
      a.s = row + t * kLanes;
      loops->score_tile[count - 1](a);
    }
    if (!call.scales_keys) return;
    ScaleScores(
        QueryKind(call, unit), q.scales + h * unit.row_count() + r,
        StoredScales(call.places, call.args->pages, tile, head, 0, space.key_scales + t * kLanes),
        count, row + t * kLanes);
  };
  ForEachNodeTile(call, unit, segment, own, begin, end, rotate, space, score);
}

// SoftmaxRows of the same rows: where values have scales, those of the tiles `own` are each node's
// own.
static void SoftmaxNodes(const AttentionCall& call, const AttentionUnit& unit, int64_t segment,
                         TileSet own, int64_t h, int64_t begin, int64_t end, TileRange range,
                         float* scores, SoftmaxOutput out, WorkerSpace& space) {
  const auto softmax = [&](int64_t r, int64_t count) {
    const int64_t at = r - begin;
    SoftmaxRows(call, ValueWeightKind(call, unit), space.views + r, count, segment, range,
                space.value_scales, scores + at * kScoreStride, out.At(at));
  };
  if (own == 0 || !call.scales_values) {
    softmax(begin, end - begin);
    return;
  }
  const int head = static_cast<int>(unit.head_begin + h);
  const auto gather = [&](int64_t, int, int t, const SegmentTile& tile) {
    StoredScales(call.places, call.args->pages, tile, head, call.layout().v_scale_part(),
                 space.value_scales + t * kLanes);
  };
  for (int64_t r = begin; r < end;) {
    int64_t stop = r + 1;
    while (stop < end && NodeOfRow(call, unit, stop) == NodeOfRow(call, unit, r)) ++stop;
    ForEachNodeTile(call, unit, segment, own, r, stop, false, space, gather);
    softmax(r, stop - r);
    r = stop;
  }
}

// Adds the values of the tiles `own` to the outputs of the same rows.
static void WeighNodes(const AttentionCall& call, const AttentionUnit& unit, int64_t segment,
                       TileSet own, int64_t h, int64_t begin, int64_t end, const float* scores,
                       float* o, WorkerSpace& space) {
  const KVLayout& layout = call.layout();
  const int head = static_cast<int>(unit.head_begin + h);
  const std::byte* data[kTilesPerSegment] = {};
  const DType dtype = ValueDType(call, unit);
  const ValueTiles values = WholeTiles(call, unit, dtype, data);
  const auto weigh = [&](int64_t r, int count, int t, const SegmentTile& tile) {
    data[t] = PrepareValues(call, tile, head, dtype, space, space.node_values);
    const float* const p = scores + (r - begin) * kScoreStride;
    float* const out = o + (r - begin) * layout.v_dim();
    if (tile.v_nonfinite) {
      WeighHiding(call, values, t, space.views + r, segment, p, count, out, space);
    } else {
      WeighTiles(call, values, {t, t + 1}, p, count, out, true);
    }
  };
  ForEachNodeTile(call, unit, segment, own, begin, end, false, space, weigh);
}

#endif  // QUIRE_KERNELS_CPU_ATTENTION_NODES_INL_H_
