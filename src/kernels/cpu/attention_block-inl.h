// One kv head, many rows: tiles of the segment are prepared once (assembled, rotated, widened),
// then groups of rows run over all of them. Bound by arithmetic. Included inside a path's namespace
// and target region.
#ifndef QUIRE_KERNELS_CPU_ATTENTION_BLOCK_INL_H_
#define QUIRE_KERNELS_CPU_ATTENTION_BLOCK_INL_H_

#include "kernels/cpu/attention_nodes-inl.h"

struct BlockTiles {
  const std::byte* keys[kTilesPerSegment];
  const std::byte* values[kTilesPerSegment];
  DType key_dtype;
  ValueTiles value_tiles;
};

static void PrepareBlock(const AttentionCall& call, const AttentionUnit& unit, int64_t segment,
                         TileSet set, WorkerSpace& space, BlockTiles* block) {
  const KVLayout& layout = call.layout();
  const AttentionSequence& sequence = call.args->sequences[static_cast<size_t>(unit.sequence)];
  const int head = unit.head_begin;
  const bool rotate = RotatesKeys(call, unit);
  const DType values = BlockDType(layout.v_dtype(), call.p_weights);
  const size_t k_bytes = layout.k_tile_elements() * sizeof(float);
  const size_t v_bytes = layout.v_tile_elements() * sizeof(float);
  block->key_dtype = KeyDType(call, unit);
  const TileSet all = set;
  for (; set != 0; set &= set - 1) {
    const int t = __builtin_ctz(set);
    const SegmentTile& tile = space.tiles->tiles[t];
    if (rotate) LoadTileAngles(call, sequence, segment, t, space);
    block->keys[t] = PrepareKeys(call, tile, head, rotate, block->key_dtype, space,
                                 space.key_tiles + static_cast<size_t>(t) * k_bytes);
    block->values[t] = PrepareValues(call, tile, head, values, space,
                                     space.value_tiles + static_cast<size_t>(t) * v_bytes);
  }
  if (call.scales_keys) GatherScales(call, *space.tiles, all, head, 0, space.key_scales);
  if (call.scales_values) {
    GatherScales(call, *space.tiles, all, head, layout.v_scale_part(), space.value_scales);
  }
  block->value_tiles = {LoopsOf(values), values, block->values};
}

// Asks for the tiles of the next segment while this one is computed, some lines at a time: memory
// has nothing else to do, and the first rows of the next segment would wait for every line.
class NextTiles {
 public:
  // Tiles of the unit's head that are read in place. `tiles`: null if no segment follows.
  NextTiles(const AttentionCall& call, const AttentionUnit& unit, const SegmentTiles* tiles) {
    int64_t lines = 0;
    const auto add = [&](const std::byte* at, size_t bytes) {
      parts_[part_count_] = {at, static_cast<int>(bytes) / kLineBytes};
      lines += parts_[part_count_++].lines;
    };
    for (int t = 0; tiles != nullptr && t < tiles->tile_count; ++t) {
      const SegmentTile& tile = tiles->tiles[t];
      if (!tile.in_place) continue;
      add(call.places.Keys(tile, unit.head_begin), call.places.key_head);
      if (call.layout().latent) continue;  // values are the keys
      add(call.places.Values(tile, unit.head_begin), call.places.value_head);
    }
    const int64_t calls = GroupCount(unit.row_count()) * (kTilesPerSegment / kTilesAtOnce);
    lines_per_call_ = static_cast<int>((lines + calls - 1) / calls);
  }

  // To be called beside each tile's scores; all lines are asked for by the last one.
  void Ask() {
    for (int n = 0; n < lines_per_call_ && part_ < part_count_; ++n) {
      PrefetchL2(parts_[part_].at + line_ * kLineBytes);
      if (++line_ < parts_[part_].lines) continue;
      line_ = 0;
      ++part_;
    }
  }

 private:
  static constexpr int kLineBytes = 64;
  struct Part {
    const std::byte* at;
    int lines;
  };

  Part parts_[2 * kTilesPerSegment];
  int part_count_ = 0;
  int lines_per_call_;
  int part_ = 0;
  int line_ = 0;
};

// Scores of `count` rows from row r on, which are of one group of StoreQuery.
static void ScoreTiles(const AttentionCall& call, const AttentionUnit& unit,
                       const BlockTiles& block, TileSet tiles, UnitQueries q, int64_t r, int count,
                       float* scores, NextTiles& next, const WorkerSpace& space) {
  const TileSet all = tiles;
  const ChainLoops& loops = *LoopsOf(block.key_dtype);
  ScoreArgs a;
  a.q = q.weights + static_cast<size_t>(r) * QueryRowBytes(call, unit);
  a.q_column_bytes = 0;
  a.steps = ScoreSteps(call, block.key_dtype);
  a.s_row = kScoreStride;
  a.s_column = kLanes;
  a.prefetch = nullptr;
  for (TileRange run; TakeRun(&tiles, &run);) {
    for (int t = run.begin; t < run.end;) {
      const int columns = t + kTilesAtOnce <= run.end ? kTilesAtOnce : 1;
      for (int c = 0; c < columns; ++c) a.k[c] = block.keys[t + c];
      a.s = scores + t * kLanes;
      if (columns == kTilesAtOnce) {
        loops.score_tiles[count - 1](a);
      } else {
        loops.score_tile[count - 1](a);
      }
      next.Ask();
      t += columns;
    }
  }
  for (TileSet left = call.scales_keys ? all : 0; left != 0; left &= left - 1) {
    const int t = __builtin_ctz(left);
    ScaleScores(QueryKind(call, unit), q.scales + r, space.key_scales + t * kLanes, count,
                scores + t * kLanes);
  }
}

// space.tiles as in DecodeSegment.
static void BlockSegment(const AttentionCall& call, const AttentionUnit& unit, int64_t segment,
                         bool has_next, const SegmentSink& sink, WorkerSpace& space) {
  const int v_dim = call.layout().v_dim();
  NextTiles next(call, unit, has_next ? space.tiles + 1 : nullptr);
  BlockTiles block;
  const TileSet own = OwnTiles(call, unit, segment);
  PrepareBlock(call, unit, segment, SeenTiles(space.views, unit.row_count(), segment) & ~own, space,
               &block);
  ForEachGroup(unit.row_count(), [&](int64_t r, int count) {
    const RowView* views = space.views + r;
    const TileSet seen = SeenTiles(views, count, segment);
    const RowStates out = SegmentOutput(call, unit, sink, r, space);
    const TileRange span = SpanOf(seen);
    ScoreTiles(call, unit, block, seen & ~own, space.queries(), r, count, space.scores, next,
               space);
    ScoreNodes(call, unit, segment, seen & own, space.queries(), 0, r, r + count, space.scores,
               space);
    const TileSet sinks = space.has_sink_q ? seen & SinkTiles(views, count, segment) : 0;
    if (sinks != 0) {
      ScoreTiles(call, unit, block, sinks & ~own, space.sink_queries(), r, count, space.sink_scores,
                 next, space);
      ScoreNodes(call, unit, segment, sinks & own, space.sink_queries(), 0, r, r + count,
                 space.sink_scores, space);
      PlaceSinkScores(views, count, segment, space.sink_scores, space.scores);
    }
    SoftmaxNodes(call, unit, segment, seen & own, 0, r, r + count, span, space.scores,
                 {out.m, out.l, space.p_scales}, space);
    if (seen == 0) return;  // l is 0: nothing to fold
    const TileSet stored = seen & ~own;
    if (stored == 0 || NeedsHiding(*space.tiles, views, count, segment, stored)) {
      WeighCarefully(call, *space.tiles, block.value_tiles, views, segment, stored, space.scores,
                     count, out.o, space);
    } else {
      WeighTileSet(call, block.value_tiles, stored, space.scores, count, out.o);
    }
    WeighNodes(call, unit, segment, seen & own, 0, r, r + count, space.scores, out.o, space);
    ScaleOutputs(call, space.p_scales, count, out.o);
    if (sink.slot == nullptr) {
      FoldRows(StatesAt(sink.states.first, r, v_dim), out, count, v_dim);
    }
  });
}

#endif  // QUIRE_KERNELS_CPU_ATTENTION_BLOCK_INL_H_
