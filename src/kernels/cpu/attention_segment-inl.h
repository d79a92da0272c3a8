// What one segment of attention is made of: which tiles the rows see, scores, softmax and weighing
// of some rows over prepared tiles. Included inside a path's namespace and target region.
#ifndef QUIRE_KERNELS_CPU_ATTENTION_SEGMENT_INL_H_
#define QUIRE_KERNELS_CPU_ATTENTION_SEGMENT_INL_H_

#include "kernels/cpu/attention_rows-inl.h"

static int ClampToSegment(int64_t offset) {
  return static_cast<int>(SmallerOf(LargerOf(offset, 0), kSegmentPositions));
}

// A gap at either end of what is seen shortens it instead.
static SegmentView ViewIn(const RowView& view, int64_t segment) {
  const int64_t first = segment * kSegmentPositions;
  SegmentView in = {ClampToSegment(view.begin - first), ClampToSegment(view.end - first),
                    kSegmentPositions, kSegmentPositions};
  in.mask = view.mask.tiles;
  in.mask_begin = view.mask.first_tile - segment * kTilesPerSegment;
  const int gap_begin = ClampToSegment(view.gap_begin - first);
  const int gap_end = ClampToSegment(view.gap_end - first);
  if (gap_begin >= gap_end) return in;
  if (gap_begin <= in.begin) {
    in.begin = gap_end;
  } else if (gap_end >= in.end) {
    in.end = gap_begin;
  } else {
    in.gap_begin = gap_begin;
    in.gap_end = gap_end;
  }
  return in;
}

// Tiles of a segment, one bit each. What no row of a group sees is not read: it may be gone.
using TileSet = uint32_t;

// Tiles [begin, end).
struct TileRange {
  int begin;
  int end;
};

static TileSet TilesIn(int begin, int end) {
  return begin >= end ? TileSet{0} : (TileSet{1} << end) - (TileSet{1} << begin);
}

static TileSet TilesOf(const SegmentView& view) {
  if (view.begin >= view.end) return 0;
  const TileSet all = TilesIn(view.begin / kLanes, (view.end + kLanes - 1) / kLanes);
  return all & ~TilesIn((view.gap_begin + kLanes - 1) / kLanes, view.gap_end / kLanes);
}

// Tiles that some of the rows see.
static TileSet SeenTiles(const RowView* views, int64_t count, int64_t segment) {
  TileSet seen = 0;
  for (int64_t r = 0; r < count; ++r) seen |= TilesOf(ViewIn(views[r], segment));
  return seen;
}

// Tiles in which some of the rows see sinks that have a query of their own.
static TileSet SinkTiles(const RowView* views, int64_t count, int64_t segment) {
  int end = 0;
  for (int64_t r = 0; r < count; ++r) {
    const int sink_end = ClampToSegment(views[r].sink_end - segment * kSegmentPositions);
    end = sink_end > end ? sink_end : end;
  }
  return TilesIn(0, (end + kLanes - 1) / kLanes);
}

// From the first to the last of them.
static TileRange SpanOf(TileSet tiles) {
  if (tiles == 0) return {0, 0};
  return {__builtin_ctz(tiles), 32 - __builtin_clz(tiles)};
}

// Takes the first run of neighbours out of the set; false if it is empty.
static bool TakeRun(TileSet* tiles, TileRange* run) {
  if (*tiles == 0) return false;
  run->begin = __builtin_ctz(*tiles);
  run->end = run->begin + __builtin_ctz(~(*tiles >> run->begin));
  *tiles &= ~TilesIn(run->begin, run->end);
  return true;
}

// The scores of sinks take the place of those that the ordinary query gave there.
static void PlaceSinkScores(const RowView* views, int64_t count, int64_t segment,
                            const float* sink_scores, float* scores) {
  for (int64_t r = 0; r < count; ++r, scores += kScoreStride, sink_scores += kScoreStride) {
    const int end = ClampToSegment(views[r].sink_end - segment * kSegmentPositions);
    for (int t = 0; t * kLanes < end; ++t) {
      const int lanes = end - t * kLanes < kLanes ? end - t * kLanes : kLanes;
      float* const to = scores + t * kLanes;
      Store(to, Select(MaskRange(0, lanes), Load(sink_scores + t * kLanes), Load(to)));
    }
  }
}

// What a row's softmax leaves beside its weights.
struct SoftmaxOutput {
  float* m;
  float* l;
  float* weight_scale;  // set where weights are integers

  SoftmaxOutput At(int64_t row) const { return {m + row, l + row, weight_scale + row}; }
};

// Softmax of `count` rows of one head, weights as `kind`. value_scales: of the segment's positions.
// All maxima come before all weights, so that no row waits for its own.
static void SoftmaxRows(const AttentionCall& call, WeightKind kind, const RowView* views,
                        int64_t count, int64_t segment, TileRange range, const float* value_scales,
                        float* scores, SoftmaxOutput out) {
  const float soft_cap = call.args->soft_cap;
  const float scale = soft_cap > 0.0F ? 1.0F : call.args->scale_log2;
  const auto weigh = call.scales_values ? WeighRow<true> : WeighRow<false>;
  for (int64_t r = 0; r < count; ++r) {
    const SegmentView view = ViewIn(views[r], segment);
    if (view.begin >= view.end) continue;
    float* const row = scores + r * kScoreStride;
    if (soft_cap > 0.0F) CapScores(row, view, call.args->scale_log2, soft_cap);
    out.m[r] = MaximumOfRow(row, view, scale);
  }
  for (int64_t r = 0; r < count; ++r) {
    const SegmentView view = ViewIn(views[r], segment);
    float* const row = scores + r * kScoreStride;
    if (view.begin < view.end) {
      weigh(kind, row, value_scales, view, range.begin, range.end, scale, out.m[r], out.l + r,
            out.weight_scale + r);
    } else {
      HiddenRow(kind, row, range.begin, range.end, out.m + r, out.l + r, out.weight_scale + r);
    }
  }
}

// V tiles of one head of a segment, or some columns of them, ready for a chain.
struct ValueTiles {
  const ChainLoops* loops;  // null: products of tiles
  DType dtype;              // of the tiles, as the chain reads them
  int columns;
  int row_columns;  // of the tiles in memory
  const std::byte* const* data;
};

// All columns of tiles that lie as they do in a page.
static ValueTiles WholeTiles(const AttentionCall& call, const AttentionUnit& unit, DType dtype,
                             const std::byte* const* data) {
  const int v_dim = call.layout().v_dim();
  return {OnTiles(call, unit) ? nullptr : LoopsOf(dtype), dtype, v_dim, v_dim, data};
}

// What is read later, to be asked for while values are weighed: after each tile's pointer, from
// byte `begin` on, `step` bytes per step and vector of outputs.
struct AheadOfTiles {
  const std::byte* const* tiles;
  int64_t begin;
  int64_t step;
};

// log2 of the widest loop for at most `wanted` columns, where `at_once` are held.
static int WidthFor(int64_t wanted, int at_once) {
  int width = 0;
  while ((2 << width) <= wanted && (2 << width) <= at_once) ++width;
  return width;
}

#if defined(QUIRE_SIMD_TILES)
// The same as WeighTiles for `count` <= kTileGroupRows rows and any tiles.
static void WeighTileProducts(const AttentionCall& call, const ValueTiles& values, TileSet tiles,
                              const float* scores, int count, float* o, bool resume,
                              AheadOfTiles ahead) {
  const TileWeighArgs args = {.p = reinterpret_cast<const std::byte*>(scores),
                              .rows = count,
                              .values = values.data,
                              .tiles = tiles,
                              .v_row_bytes = int64_t{values.row_columns} * 4,
                              .columns = values.columns,
                              .o = o,
                              .o_row = call.layout().v_dim(),
                              .resume = resume,
                              .ahead = ahead.tiles,
                              .ahead_begin = ahead.begin,
                              .ahead_step = ahead.step};
  if (values.dtype == DType::kI8) return WeighByBytes(args);
  WeighByTiles(args);
}
#endif

// Chains over the tiles [range) for `count` <= kRowsMax rows; weights at `scores`. What is read
// later: `prefetch`, as many bytes as there are values, or, if that is null, `ahead`.
static void WeighTiles(const AttentionCall& call, const ValueTiles& values, TileRange range,
                       const float* scores, int count, float* o, bool resume,
                       const std::byte* prefetch, AheadOfTiles ahead) {
#if defined(QUIRE_SIMD_TILES)
  if (values.loops == nullptr) {
    return WeighTileProducts(call, values, TilesIn(range.begin, range.end), scores, count, o,
                             resume, ahead);
  }
#endif
  const int pair = ChainPair(values.dtype);
  WeighArgs a;
  a.p = reinterpret_cast<const std::byte*>(scores) +
        static_cast<size_t>(range.begin * kLanes) * WeightBytes(call.p_weights);
  a.v = values.data + range.begin;
  a.tile_count = range.end - range.begin;
  a.v_row_elements = values.row_columns * pair;
  a.o_row = call.layout().v_dim();
  a.resume = resume;
  a.prefetch = prefetch;
  a.into_l1 = call.stream.into_l1;
  a.ahead = ahead.tiles + range.begin;
  a.ahead_begin = ahead.begin;
  for (int d = 0; d < values.columns;) {
    const int width = WidthFor((values.columns - d) / kLanes, ColumnsAtOnce(count));
    const int columns = kLanes << width;
    a.column = d;
    a.column_end = values.columns / columns * columns;
    a.o = o;
    a.ahead_step = ahead.step << width;
    values.loops->weigh[count - 1][width](a);
    a.ahead_begin += (a.column_end - d) / pair * ahead.step;  // kLanes / pair steps per vector
    if (prefetch != nullptr) {
      a.prefetch += (a.column_end - d) * kTilePositions * DTypeBytes(values.dtype);
    }
    d = static_cast<int>(a.column_end);
  }
}

// The same where nothing is asked for.
static void WeighTiles(const AttentionCall& call, const ValueTiles& values, TileRange range,
                       const float* scores, int count, float* o, bool resume) {
  WeighTiles(call, values, range, scores, count, o, resume, nullptr, {values.data, 0, 0});
}

// The same for all runs of a set of tiles.
static void WeighTileSet(const AttentionCall& call, const ValueTiles& values, TileSet tiles,
                         const float* scores, int count, float* o, AheadOfTiles ahead) {
#if defined(QUIRE_SIMD_TILES)
  if (values.loops == nullptr) {
    return WeighTileProducts(call, values, tiles, scores, count, o, false, ahead);
  }
#endif
  bool resume = false;
  for (TileRange run; TakeRun(&tiles, &run); resume = true) {
    WeighTiles(call, values, run, scores, count, o, resume, nullptr, ahead);
  }
}

// Lanes of a tile that are seen, one bit each.
static uint32_t LanesOf(const SegmentView& view, int tile) {
  const auto lanes_in = [tile](int begin, int end) {
    const int first = tile * kLanes;
    return TilesIn(begin < first ? 0 : begin - first, end > first + kLanes ? kLanes : end - first);
  };
  return lanes_in(view.begin, view.end) & ~lanes_in(view.gap_begin, view.gap_end) &
         MaskedLanes(view, tile);
}

// A weight of 0 hides a finite value, but 0 * Inf is NaN: a row must not meet such a value where it
// does not see it.
static bool NeedsHiding(const SegmentTiles& tiles, const RowView* views, int64_t count,
                        int64_t segment, TileSet set) {
  for (; set != 0; set &= set - 1) {
    const int t = __builtin_ctz(set);
    if (!tiles.tiles[t].v_nonfinite) continue;
    for (int64_t r = 0; r < count; ++r) {
      if (LanesOf(ViewIn(views[r], segment), t) != kAllLanes) return true;
    }
  }
  return false;
}

// One tile with values that are not finite, row by row: each meets only what it sees.
static void WeighHiding(const AttentionCall& call, const ValueTiles& values, int tile,
                        const RowView* views, int64_t segment, const float* scores, int count,
                        float* o, WorkerSpace& space) {
  const int v_dim = call.layout().v_dim();
  const int pair = ChainPair(values.dtype);
  for (int r = 0; r < count; ++r, scores += kScoreStride, o += v_dim) {
    const uint32_t seen = LanesOf(ViewIn(views[r], segment), tile);
    if (seen == 0) continue;
    const std::byte* shown[kTilesPerSegment];
    shown[tile] = space.hidden;
    if (values.dtype == DType::kF32) {
      HideLanes(reinterpret_cast<const float*>(values.data[tile]), v_dim, pair, seen,
                reinterpret_cast<float*>(space.hidden));
    } else {
      HideLanes(reinterpret_cast<const uint16_t*>(values.data[tile]), v_dim, pair, seen,
                reinterpret_cast<uint16_t*>(space.hidden));
    }
    WeighTiles(call, {values.loops, values.dtype, v_dim, v_dim, shown}, {tile, tile + 1}, scores, 1,
               o, true);
  }
}

static void WeighCarefully(const AttentionCall& call, const SegmentTiles& tiles,
                           const ValueTiles& values, const RowView* views, int64_t segment,
                           TileSet set, const float* scores, int count, float* o,
                           WorkerSpace& space) {
  __builtin_memset(o, 0, static_cast<size_t>(count * call.layout().v_dim()) * sizeof(float));
  for (; set != 0; set &= set - 1) {
    const int t = __builtin_ctz(set);
    if (tiles.tiles[t].v_nonfinite) {
      WeighHiding(call, values, t, views, segment, scores, count, o, space);
    } else {
      WeighTiles(call, values, {t, t + 1}, scores, count, o, true);
    }
  }
}

// K tile of a head as `as`, which KeyDType names; `buffer` holds a float32 tile. Rotated in
// RopeMode::kInline (angles of the tile are in `space`).
static const std::byte* PrepareKeys(const AttentionCall& call, const SegmentTile& tile, int head,
                                    bool rotate, DType as, WorkerSpace& space, std::byte* buffer) {
  const KVLayout& layout = call.layout();
  if (!rotate && as == layout.dtype)
    return StoredKeys(call.places, call.args->pages, tile, head, buffer);
  const std::byte* stored = StoredKeys(call.places, call.args->pages, tile, head, space.stored);
  const bool pack = as == DType::kBF16;
  float* wide = pack ? space.tile : reinterpret_cast<float*>(buffer);
  WidenTile(layout.dtype, stored, layout.k_dim(), kLanes, wide);
  if (rotate) {
    RotateTile(wide, space.cos, space.sin, call.args->rotary.rotary_dim,
               call.args->rotary.interleaved);
    if (ComputeDType(layout.dtype) == DType::kBF16) {
      RoundTileToBF16(wide, layout.k_dim() * kLanes);
    }
  }
  if (pack) PackPairs(wide, layout.k_dim(), kLanes, reinterpret_cast<uint32_t*>(buffer));
  return buffer;
}

// V tile of a head as `as`; `buffer` holds a float32 tile.
static const std::byte* PrepareValues(const AttentionCall& call, const SegmentTile& tile, int head,
                                      DType as, WorkerSpace& space, std::byte* buffer) {
  const KVLayout& layout = call.layout();
  if (as == layout.v_dtype())
    return StoredValues(call.places, call.args->pages, tile, head, buffer);
  const std::byte* stored = StoredValues(call.places, call.args->pages, tile, head, space.stored);
  const bool pack = as == DType::kBF16;
  float* wide = reinterpret_cast<float*>(pack ? space.hidden : buffer);
  WidenTile(layout.v_dtype(), stored, kTilePositions, layout.v_dim(), wide);
  if (pack) PackPairs(wide, kTilePositions, layout.v_dim(), reinterpret_cast<uint32_t*>(buffer));
  return buffer;
}

// Scales of the tiles of a set, of one head, by position of the segment.
static void GatherScales(const AttentionCall& call, const SegmentTiles& tiles, TileSet set,
                         int head, int part, float* scales) {
  for (; set != 0; set &= set - 1) {
    const int t = __builtin_ctz(set);
    float* const at = scales + t * kLanes;
    const float* stored =
        StoredScales(call.places, call.args->pages, tiles.tiles[t], head, part, at);
    if (stored != at) Store(at, Load(stored));
  }
}

// Finished scores of a tile times the scales of its keys; where they are sums of integers, times
// those of their queries before.
static void ScaleScores(WeightKind queries, const float* q_scales, const float* key_scales,
                        int count, float* scores) {
  const VF scale = Load(key_scales);
  for (int r = 0; r < count; ++r, scores += kScoreStride) {
    const VF score = queries == WeightKind::kI16
                         ? Mul(SumsToF32(LoadSums(scores)), Set1(q_scales[r]))
                         : Load(scores);
    Store(scores, Mul(score, scale));
  }
}

// Outputs that are sums of integers become floats; those of rows that see nothing are not looked
// at.
static void ScaleOutputs(const AttentionCall& call, const float* p_scales, int64_t count,
                         float* o) {
  if (call.p_weights != WeightKind::kI16) return;
  const int v_dim = call.layout().v_dim();
  for (int64_t r = 0; r < count; ++r, o += v_dim) {
    const VF scale = Set1(p_scales[r]);
    for (int d = 0; d < v_dim; d += kLanes) Store(o + d, Mul(SumsToF32(LoadSums(o + d)), scale));
  }
}

static void LoadTileAngles(const AttentionSequence& sequence, int64_t segment, int tile,
                           WorkerSpace& space) {
  const int64_t position = segment * kSegmentPositions + tile * kLanes;
  const int64_t count = LargerOf(SmallerOf(LastPosition(sequence) + 1 - position, kLanes), 0);
  LoadAngles(*sequence.inline_angles, sequence.inline_base + position, static_cast<int>(count),
             space.cos, space.sin);
}

// The end of the positions of a unit that are looked at in a segment, where its runs say.
static int64_t PositionsEnd(const AttentionCall& call, const AttentionUnit& unit,
                            const AttentionSequence& sequence, int64_t segment) {
  const int64_t segment_end = (segment + 1) * kSegmentPositions;
  if (unit.shared) return segment_end;
  if (sequence.tree != nullptr) return SmallerOf(segment_end, RunsEnd(sequence));
  return SmallerOf(segment_end, call.args->SeenEnd(sequence, sequence.row_count - 1));
}

// Where the state of one segment goes: folded into the unit's states, or kept as it is in a slot of
// the arena.
struct SegmentSink {
  UnitStates states;
  float* slot;  // null: fold
};

static RowStates SegmentOutput(const AttentionCall& call, const AttentionUnit& unit,
                               const SegmentSink& sink, int64_t index, WorkerSpace& space) {
  const int v_dim = call.layout().v_dim();
  if (sink.slot == nullptr) return StatesIn(space.segment, kScoreRows, v_dim);
  return StatesAt(StatesIn(sink.slot, unit.row_count() * unit.head_count(), v_dim), index, v_dim);
}

#endif  // QUIRE_KERNELS_CPU_ATTENTION_SEGMENT_INL_H_
