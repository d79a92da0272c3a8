// Many kv heads, a group of rows each or keys that are rotated here: K tiles of all heads in the
// order of memory, softmax, V tiles of all heads, with prefetch. Bound by memory. Included inside a
// path's namespace and target region.
#ifndef QUIRE_KERNELS_CPU_ATTENTION_DECODE_INL_H_
#define QUIRE_KERNELS_CPU_ATTENTION_DECODE_INL_H_

#include "kernels/cpu/attention_nodes-inl.h"

// What decode reads of a segment, in the order in which it reads it: K tiles [tile][head], then V
// tiles [tile][head], then the next segment. Gives the address that lies some steps ahead, for
// prefetching.
class ReadOrder {
 public:
  ReadOrder(const AttentionCall& call, const AttentionUnit& unit, const SegmentTiles* tiles,
            TileRange range, bool has_next)
      : call_(call),
        tiles_(tiles),
        range_(range),
        has_next_(has_next),
        head_begin_(unit.head_begin),
        heads_(static_cast<int>(unit.head_count())) {
    const auto head_bytes = static_cast<int64_t>(call.places.key_head);
    const auto ahead = static_cast<int>((call.stream.bytes_ahead + head_bytes - 1) / head_bytes);
    ahead_tiles_ = ahead / heads_;
    ahead_heads_ = ahead % heads_;
  }
  const std::byte* AheadOfKey(int tile, int64_t head) const {
    return Ahead(tile - range_.begin, static_cast<int>(head));
  }
  const std::byte* AheadOfValue(int tile, int64_t head) const {
    return Ahead(tile - range_.begin + tile_count(), static_cast<int>(head));
  }
  // Scales of the head in the next tile.
  const float* AheadOfScales(int tile, int64_t head) const {
    const bool in_segment = tile + 1 < range_.end;
    if (!in_segment && !has_next_) return ScalesOf(tiles_[0].tiles[tile], head);
    return ScalesOf(in_segment ? tiles_[0].tiles[tile + 1] : tiles_[1].tiles[0], head);
  }

 private:
  int tile_count() const { return range_.end - range_.begin; }
  // `tile`: K tiles, then V tiles, then the next segment's K tiles.
  const std::byte* Ahead(int tile, int head) const {
    tile += ahead_tiles_;
    head += ahead_heads_;
    if (head >= heads_) {
      head -= heads_;
      ++tile;
    }
    const int count = tile_count();
    const SegmentTile* const own = tiles_[0].tiles + range_.begin;
    if (tile < count) return Key(own[tile], head);
    if (tile < 2 * count) return Value(own[tile - count], head);
    if (!has_next_) return Value(own[count - 1], heads_ - 1);
    const int last = tiles_[1].tile_count - 1;
    return Key(tiles_[1].tiles[tile - 2 * count < last ? tile - 2 * count : last], head);
  }
  const std::byte* Key(const SegmentTile& tile, int head) const {
    return tile.in_place ? call_.places.Keys(tile, head_begin_ + head)
                         : PageAt(call_.args->pages, tile.pieces[0].page);
  }
  const std::byte* Value(const SegmentTile& tile, int head) const {
    return tile.in_place ? call_.places.Values(tile, head_begin_ + head)
                         : PageAt(call_.args->pages, tile.pieces[0].page);
  }
  const float* ScalesOf(const SegmentTile& tile, int64_t head) const {
    if (tile.in_place) return call_.places.Scales(tile, head_begin_ + head, 0);
    return ScaleOfSlot(call_.args->pages, tile.pieces[0].page, tile.pieces[0].slot,
                       static_cast<int>(head_begin_ + head), 0);
  }

  const AttentionCall& call_;
  const SegmentTiles* tiles_;
  TileRange range_;
  bool has_next_;
  int head_begin_;
  int heads_;
  int ahead_tiles_;
  int ahead_heads_;
};

// Scores of one tile, for queries `q`: rows [row, row + count) of all heads of the unit.
static void ScoreHeads(const AttentionCall& call, const AttentionUnit& unit, int tile, bool rotate,
                       UnitQueries q, float* scores, int64_t row, int count, const ReadOrder& order,
                       WorkerSpace& space) {
  const DType keys = KeyDType(call, unit);
  const WeightKind queries = QueryKind(call, unit);
  const ChainLoops* loops = LoopsOf(keys);
  const size_t buffer_bytes = call.layout().k_tile_elements() * sizeof(float);
  const int64_t rows = unit.row_count();
  const size_t q_row_bytes = QueryRowBytes(call, unit);
  ScoreArgs a;
  a.into_l1 = call.stream.into_l1;
  a.q_column_bytes = static_cast<size_t>(rows) * q_row_bytes;
  a.steps = ScoreSteps(call, keys);
  a.s_row = kScoreStride;
  a.s_column = static_cast<size_t>(rows) * kScoreStride;
  for (int64_t h = 0; h < unit.head_count();) {
    const int width = WidthFor(unit.head_count() - h, HeadsAtOnce(count));
    const int columns = 1 << width;
    for (int c = 0; c < columns; ++c) {
      a.k[c] =
          PrepareKeys(call, space.tiles->tiles[tile], static_cast<int>(unit.head_begin + h + c),
                      rotate, keys, space, space.key_tiles + static_cast<size_t>(c) * buffer_bytes);
    }
    a.prefetch = order.AheadOfKey(tile, h);
    a.q = q.weights + static_cast<size_t>(h * rows + row) * q_row_bytes;
    a.s = scores + (h * rows + row) * kScoreStride + tile * kLanes;
    loops->score_heads[count - 1][width](a);
    for (int c = 0; call.scales_keys && c < columns; ++c) {
      PrefetchL2(order.AheadOfScales(tile, h + c));
      const float* scales =
          StoredScales(call.places, call.args->pages, space.tiles->tiles[tile],
                       static_cast<int>(unit.head_begin + h + c), 0, space.key_scales);
      const int64_t at = (h + c) * rows + row;
      ScaleScores(queries, q.scales + at, scales, count,
                  scores + at * kScoreStride + tile * kLanes);
    }
    h += columns;
  }
}

// Adds one tile's values to the outputs of all heads and rows of the unit.
static void WeighHeads(const AttentionCall& call, const AttentionUnit& unit, int64_t segment,
                       int tile, const ReadOrder& order, const RowStates& out, WorkerSpace& space) {
  const int v_dim = call.layout().v_dim();
  const int64_t rows = unit.row_count();
  const bool hide = NeedsHiding(*space.tiles, space.views, rows, segment, TileSet{1} << tile);
  const std::byte* data[kTilesPerSegment];
  const DType dtype = call.layout().v_dtype();
  const ValueTiles values = WholeTiles(call, unit, dtype, data);
  for (int64_t h = 0; h < unit.head_count(); ++h) {
    data[tile] = StoredValues(call.places, call.args->pages, space.tiles->tiles[tile],
                              static_cast<int>(unit.head_begin + h), space.value_tiles);
    ForEachGroup(rows, [&](int64_t r, int count) {
      const float* scores = space.scores + (h * rows + r) * kScoreStride;
      float* o = out.o + (h * rows + r) * v_dim;
      if (hide) {
        WeighHiding(call, values, tile, space.views + r, segment, scores, count, o, space);
      } else {
        WeighTiles(call, values, {tile, tile + 1}, scores, count, o, true,
                   r == 0 ? order.AheadOfValue(tile, h) : nullptr, {data, 0, 0});
      }
    });
  }
}

// space.tiles[0] holds the segment's tiles, space.tiles[1] the next one's where the unit goes on.
static void DecodeSegment(const AttentionCall& call, const AttentionUnit& unit, int64_t segment,
                          bool has_next, const SegmentSink& sink, WorkerSpace& space) {
  const AttentionSequence& sequence = call.args->sequences[static_cast<size_t>(unit.sequence)];
  const int v_dim = call.layout().v_dim();
  const int64_t rows = unit.row_count();
  const int64_t heads = unit.head_count();
  const bool rotate = RotatesKeys(call, unit);
  const TileSet seen = SeenTiles(space.views, rows, segment);
  const TileSet sinks = space.has_sink_q ? seen & SinkTiles(space.views, rows, segment) : 0;
  const TileSet own = OwnTiles(call, unit, segment);
  const TileSet stored = seen & ~own;
  const TileRange range = SpanOf(seen);
  const ReadOrder order(call, unit, space.tiles, SpanOf(stored),
                        has_next && space.tiles[1].tile_count > 0);
  const RowStates out = SegmentOutput(call, unit, sink, 0, space);
  for (TileSet left = stored; left != 0; left &= left - 1) {
    const int t = __builtin_ctz(left);
    if (rotate) LoadTileAngles(sequence, segment, t, space);
    ForEachGroup(rows, [&](int64_t r, int count) {
      ScoreHeads(call, unit, t, rotate, space.queries(), space.scores, r, count, order, space);
      if ((sinks >> t & 1) == 0) return;
      ScoreHeads(call, unit, t, rotate, space.sink_queries(), space.sink_scores, r, count, order,
                 space);
    });
  }
  for (int64_t h = 0; h < heads; ++h) {
    ForEachGroup(own == 0 ? 0 : rows, [&](int64_t r, int count) {
      const int64_t at = (h * rows + r) * kScoreStride;
      ScoreNodes(call, unit, segment, seen & own, space.queries(), h, r, r + count,
                 space.scores + at, space);
      ScoreNodes(call, unit, segment, sinks & own, space.sink_queries(), h, r, r + count,
                 space.sink_scores + at, space);
    });
    if (sinks != 0) {
      PlaceSinkScores(space.views, rows, segment, space.sink_scores + h * rows * kScoreStride,
                      space.scores + h * rows * kScoreStride);
    }
    if (call.scales_values) {
      GatherScales(call, *space.tiles, stored, static_cast<int>(unit.head_begin + h),
                   call.layout().v_scale_part(), space.value_scales);
    }
    SoftmaxNodes(call, unit, segment, seen & own, h, 0, rows, range,
                 space.scores + h * rows * kScoreStride,
                 SoftmaxOutput{out.m, out.l, space.p_scales}.At(h * rows), space);
  }
  __builtin_memset(out.o, 0, static_cast<size_t>(heads * rows * v_dim) * sizeof(float));
  for (TileSet left = stored; left != 0; left &= left - 1) {
    WeighHeads(call, unit, segment, __builtin_ctz(left), order, out, space);
  }
  for (int64_t h = 0; h < heads && own != 0; ++h) {
    ForEachGroup(rows, [&](int64_t r, int count) {
      WeighNodes(call, unit, segment, seen & own, h, r, r + count,
                 space.scores + (h * rows + r) * kScoreStride, out.o + (h * rows + r) * v_dim,
                 space);
    });
  }
  ScaleOutputs(call, space.p_scales, heads * rows, out.o);
  if (sink.slot != nullptr) return;
  for (int64_t h = 0; h < heads; ++h) {
    FoldRows(StatesAt(sink.states.first, h * sink.states.head_rows, v_dim),
             StatesAt(out, h * rows, v_dim), rows, v_dim);
  }
}

#endif  // QUIRE_KERNELS_CPU_ATTENTION_DECODE_INL_H_
