// More rows of a kv head than a group, head by head: its tiles of the segment are prepared once
// (assembled, rotated; widened where a block of many rows shares the work), then all of them are
// scored and weighed, a batch of rows at a time. Few rows are one batch, so that each tile's keys
// meet all groups in turn; of many rows a group is one. Bound by arithmetic. Included inside a
// path's namespace and target region.
#ifndef QUIRE_KERNELS_CPU_ATTENTION_BLOCK_INL_H_
#define QUIRE_KERNELS_CPU_ATTENTION_BLOCK_INL_H_

#include "kernels/cpu/attention_nodes-inl.h"

// Values that few rows make out of keys are made this number of dimensions at a time, which stay in
// L1 (16 KiB of bfloat16) until all rows have met them.
constexpr int kPanelColumns = 2 * kLanes;

static constexpr int64_t DivideUp(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A head's tiles of a segment.
struct BlockTiles {
  int head;
  TileSet stored;  // all but the nodes' own
  DType key_dtype;
  DType value_dtype;
  const std::byte* keys[kTilesPerSegment];
  const std::byte* values[kTilesPerSegment];
};

// A stored tile of `pair_rows` rows of pairs as the unit's products take it, at `to`.
static const std::byte* AsQuads([[maybe_unused]] const std::byte* stored,
                                [[maybe_unused]] int pair_rows, [[maybe_unused]] int columns,
                                std::byte* to) {
#if defined(QUIRE_SIMD_TILES)
  MakeQuads(stored, pair_rows, columns, to);
#endif
  return to;
}

static void PrepareBlockKeys(const AttentionCall& call, const AttentionUnit& unit, int64_t segment,
                             WorkerSpace& space, BlockTiles* block) {
  const AttentionSequence& sequence = call.args->sequences[static_cast<size_t>(unit.sequence)];
  const size_t bytes = call.layout().k_tile_elements() * sizeof(float);
  const bool rotate = RotatesKeys(call, unit);
  const bool quads = OnByteTiles(call, unit);
  for (TileSet left = block->stored; left != 0; left &= left - 1) {
    const int t = __builtin_ctz(left);
    if (rotate) LoadTileAngles(sequence, segment, t, space);
    std::byte* const own = space.key_tiles + static_cast<size_t>(t) * bytes;
    const std::byte* const keys = PrepareKeys(call, space.tiles->tiles[t], block->head, rotate,
                                              block->key_dtype, space, quads ? space.stored : own);
    block->keys[t] = quads ? AsQuads(keys, call.layout().k_dim() / 2, kLanes, own) : keys;
  }
}

static void PrepareBlockValues(const AttentionCall& call, const AttentionUnit& unit,
                               WorkerSpace& space, BlockTiles* block) {
  const bool quads = OnByteTiles(call, unit);  // which lie one tile after the other
  const size_t bytes = call.layout().v_tile_elements() * (quads ? 1 : sizeof(float));
  for (TileSet left = block->stored; left != 0; left &= left - 1) {
    const int t = __builtin_ctz(left);
    std::byte* const own = space.value_tiles + static_cast<size_t>(t) * bytes;
    const std::byte* const values =
        PrepareValues(call, space.tiles->tiles[t], block->head, block->value_dtype, space,
                      quads ? space.stored : own);
    block->values[t] =
        quads ? AsQuads(values, kTilePositions / 2, call.layout().v_dim(), own) : values;
  }
}

// Columns [d, d + columns) of a tile's values out of its keys.
static const std::byte* MakePanel(const BlockTiles& block, int tile, int d, int columns,
                                  const WorkerSpace& space) {
  const int64_t bytes = kTilePositions * DTypeBytes(block.key_dtype);
  std::byte* const panel = space.value_tiles + tile * columns * bytes;
  LatentValueTile(block.key_dtype, block.keys[tile] + d * bytes, columns, panel);
  return panel;
}

static void GatherBlockScales(const AttentionCall& call, const BlockTiles& block,
                              WorkerSpace& space) {
  if (call.scales_keys) {
    GatherScales(call, *space.tiles, block.stored, block.head, 0, space.key_scales);
  }
  if (call.scales_values) {
    GatherScales(call, *space.tiles, block.stored, block.head, call.layout().v_scale_part(),
                 space.value_scales);
  }
}

// Rows [begin, begin + count) of a unit that are computed together, in groups of `together`.
struct RowBatch {
  int64_t begin;
  int64_t count;
  int64_t together;
  int64_t first_group;  // counted from the unit's first

  // Calls f(row, count, group) for each group; rows count from the batch's first.
  template <typename F>
  void ForEachGroup(const F& f) const {
    int64_t group = first_group;
    for (int64_t r = 0; r < count; r += together, ++group) {
      f(r, static_cast<int>(SmallerOf(together, count - r)), group);
    }
  }
};

// The tiles that are read after those of a block, asked for while it is computed, evenly: memory
// has nothing else to do, in one burst they would hold up the computation, and without being asked
// for they would hold up the first rows that need them.
class NextTiles {
 public:
  // Tiles of a head. `tiles`: null if none follow.
  NextTiles(const AttentionCall& call, const SegmentTiles* tiles, int head) {
    const TilePlaces& places = call.places;
    const int count = tiles == nullptr ? 0 : tiles->tile_count;
    const bool latent = call.layout().latent;  // values are the keys
    if (count > 0) {
      key_bytes_ = static_cast<int64_t>(latent ? places.key_head / 2 : places.key_head);
      value_bytes_ = latent ? key_bytes_ : static_cast<int64_t>(places.value_head);
    }
    for (int t = 0; t < kTilesPerSegment; ++t) {
      keys_[t] = values_[t] = places.base;
      if (count == 0) continue;
      const SegmentTile& tile = tiles->tiles[t < count ? t : count - 1];
      if (!tile.in_place) continue;
      keys_[t] = places.Keys(tile, head);
      values_[t] = latent ? keys_[t] + key_bytes_ : places.Values(tile, head);
    }
  }
  // For a latent unit's first segment, which nothing has asked for: its own keys beside scores, all
  // of the next ones beside values.
  void AskForFirst(const AttentionCall& call, const BlockTiles& block) {
    value_bytes_ += key_bytes_;
    key_bytes_ = static_cast<int64_t>(call.places.key_head);
    for (int t = 0; t < kTilesPerSegment; ++t) {
      values_[t] = keys_[t];
      const int later = t + kTilesAtOnce;
      if (later < kTilesPerSegment && (block.stored >> later & 1) != 0) {
        keys_[t] = block.keys[later];
      }
    }
  }
  // Shares the bytes among `groups` groups, each of `score_steps` steps per tile of keys and
  // `value_steps` per tile and vector of values.
  void Share(int64_t groups, int64_t score_steps, int v_dim, int64_t value_steps) {
    score_steps_ = score_steps;
    vector_count_ = v_dim / kLanes;
    value_steps_ = value_steps;
    key_step_ = DivideUp(key_bytes_, groups * score_steps_);
    value_step_ = DivideUp(value_bytes_, groups * vector_count_ * value_steps_);
  }
  // The same for products of tiles, which take all tiles of a group in turn.
  AheadOfTiles AskBesideProducts(int64_t group) const {
    return {keys_, group * score_steps_ * key_step_, key_step_};
  }
  // What a group of rows asks for while it is scored against tiles from `tile` on.
  void AskBesideScores(int64_t group, int tile, int columns, ScoreArgs* args) const {
    for (int c = 0; c < columns; ++c) {
      args->ahead[c] = keys_[tile + c] + group * score_steps_ * key_step_;
    }
    args->ahead_step = key_step_;
  }
  // What a group asks for while it meets values from output dimension `d` on.
  AheadOfTiles AskBesideValues(int64_t group, int d) const {
    const int64_t vectors = group * vector_count_ + d / kLanes;
    return {values_, vectors * value_steps_ * value_step_, value_step_};
  }

 private:
  const std::byte* keys_[kTilesPerSegment];
  const std::byte* values_[kTilesPerSegment];
  int64_t key_bytes_ = 0;
  int64_t value_bytes_ = 0;
  int64_t score_steps_ = 0;
  int64_t value_steps_ = 0;
  int64_t vector_count_ = 0;
  int64_t key_step_ = 0;
  int64_t value_step_ = 0;
};

// Scores of a batch of rows of the unit's head `h`.
static void ScoreTiles(const AttentionCall& call, const AttentionUnit& unit,
                       const BlockTiles& block, TileSet tiles, UnitQueries q, int64_t h,
                       const RowBatch& rows, float* scores, const NextTiles& next,
                       const WorkerSpace& space) {
  const TileSet all = tiles;
  const ChainLoops& loops = *LoopsOf(block.key_dtype);
  const int64_t first = h * unit.row_count() + rows.begin;
  if (OnTiles(call, unit)) {
    rows.ForEachGroup([&](int64_t r, int count, int64_t group) {
      ScoreTileProducts(call, unit, q, first + r, count, block.keys, tiles,
                        scores + r * kScoreStride, next.AskBesideProducts(group));
    });
    tiles = 0;
  }
  const size_t q_row_bytes = QueryRowBytes(call, unit);
  ScoreArgs a;
  a.q_column_bytes = 0;
  a.steps = ScoreSteps(call, block.key_dtype);
  a.s_row = kScoreStride;
  a.s_column = kLanes;
  a.prefetch = nullptr;
  a.into_l1 = false;
  for (TileRange run; TakeRun(&tiles, &run);) {
    for (int t = run.begin; t < run.end;) {
      const int columns = t + kTilesAtOnce <= run.end ? kTilesAtOnce : 1;
      for (int c = 0; c < columns; ++c) a.k[c] = block.keys[t + c];
      rows.ForEachGroup([&](int64_t r, int count, int64_t group) {
        a.q = q.weights + static_cast<size_t>(first + r) * q_row_bytes;
        a.s = scores + r * kScoreStride + t * kLanes;
        next.AskBesideScores(group, t, columns, &a);
        (columns == kTilesAtOnce ? loops.score_tiles : loops.score_tile)[count - 1](a);
      });
      t += columns;
    }
  }
  for (TileSet left = call.scales_keys ? all : 0; left != 0; left &= left - 1) {
    const int t = __builtin_ctz(left);
    ScaleScores(QueryKind(call, unit), q.scales + first, space.key_scales + t * kLanes,
                static_cast<int>(rows.count), scores + t * kLanes);
  }
}

// Scores of the batch, each with the query that the row has there.
static void ScoreBatch(const AttentionCall& call, const AttentionUnit& unit, int64_t segment,
                       const BlockTiles& block, TileSet seen, int64_t h, const RowBatch& rows,
                       const NextTiles& next, WorkerSpace& space) {
  const RowView* const views = space.views + rows.begin;
  const TileSet sinks =
      space.has_sink_q ? seen & SinkTiles(views, rows.count, segment) : TileSet{0};
  const auto score = [&](TileSet tiles, UnitQueries q, float* scores) {
    ScoreTiles(call, unit, block, tiles & block.stored, q, h, rows, scores, next, space);
    rows.ForEachGroup([&](int64_t r, int count, int64_t) {
      const int64_t row = rows.begin + r;
      ScoreNodes(call, unit, segment, tiles & ~block.stored, q, h, row, row + count,
                 scores + r * kScoreStride, space);
    });
  };
  score(seen, space.queries(), space.scores);
  if (sinks == 0) return;
  score(sinks, space.sink_queries(), space.sink_scores);
  PlaceSinkScores(views, rows.count, segment, space.sink_scores, space.scores);
}

// Outputs of the batch from the values of tiles that are finite where that matters.
static void WeighBatch(const AttentionCall& call, const AttentionUnit& unit,
                       const BlockTiles& block, TileSet tiles, const RowBatch& rows, float* o,
                       const NextTiles& next, const WorkerSpace& space) {
  const int v_dim = call.layout().v_dim();
  const bool made = MakesPanels(call, unit);
  const int64_t column_bytes = ChainPair(block.value_dtype) * DTypeBytes(block.value_dtype);
  const std::byte* data[kTilesPerSegment];
  const int most = made ? kPanelColumns : v_dim;
  for (int d = 0; d < v_dim; d += most) {
    const int columns = v_dim - d < most ? v_dim - d : most;
    for (TileSet left = tiles; left != 0; left &= left - 1) {
      const int t = __builtin_ctz(left);
      data[t] = made ? MakePanel(block, t, d, columns, space) : block.values[t] + d * column_bytes;
    }
    ValueTiles values = WholeTiles(call, unit, block.value_dtype, data);
    values.columns = columns;
    values.row_columns = made ? columns : v_dim;
    rows.ForEachGroup([&](int64_t r, int count, int64_t group) {
      float* const weights = space.scores + r * kScoreStride;
#if defined(QUIRE_SIMD_TILES)
      if (OnByteTiles(call, unit)) SplitValueWeights(tiles, count, weights);
#endif
      WeighTileSet(call, values, tiles, weights, count, o + r * v_dim + d,
                   next.AskBesideValues(group, d));
    });
  }
}

// The same where values that are not finite must be hidden from some rows, or where there are none.
static void WeighBatchCarefully(const AttentionCall& call, const AttentionUnit& unit,
                                const BlockTiles& block, TileSet tiles, int64_t segment,
                                const RowBatch& rows, float* o, WorkerSpace& space) {
  const ValueTiles values = WholeTiles(call, unit, block.value_dtype, block.values);
  rows.ForEachGroup([&](int64_t r, int count, int64_t) {
    WeighCarefully(call, *space.tiles, values, space.views + rows.begin + r, segment, tiles,
                   space.scores + r * kScoreStride, count, o + r * call.layout().v_dim(), space);
  });
}

// A batch of rows of the unit's head `h`, from scores to the fold.
static void AttendBatch(const AttentionCall& call, const AttentionUnit& unit, int64_t segment,
                        BlockTiles* block, int64_t h, const RowBatch& rows, const NextTiles& next,
                        const SegmentSink& sink, WorkerSpace& space) {
  const int v_dim = call.layout().v_dim();
  const RowView* const views = space.views + rows.begin;
  const TileSet seen = SeenTiles(views, rows.count, segment);
  const TileSet stored = seen & block->stored;
  const TileSet own = seen & ~block->stored;
  const RowStates out = SegmentOutput(call, unit, sink, h * unit.row_count() + rows.begin, space);
  ScoreBatch(call, unit, segment, *block, seen, h, rows, next, space);
  SoftmaxNodes(call, unit, segment, own, h, rows.begin, rows.begin + rows.count, SpanOf(seen),
               space.scores, {out.m, out.l, space.p_scales}, space);
  if (seen == 0) return;  // l is 0: nothing to fold
  const bool careful = stored == 0 || NeedsHiding(*space.tiles, views, rows.count, segment, stored);
  if (careful) {
    if (MakesPanels(call, unit)) PrepareBlockValues(call, unit, space, block);
    WeighBatchCarefully(call, unit, *block, stored, segment, rows, out.o, space);
  } else {
    WeighBatch(call, unit, *block, stored, rows, out.o, next, space);
  }
  rows.ForEachGroup([&](int64_t r, int count, int64_t) {
    const int64_t row = rows.begin + r;
    WeighNodes(call, unit, segment, own, h, row, row + count, space.scores + r * kScoreStride,
               out.o + r * v_dim, space);
  });
  ScaleOutputs(call, space.p_scales, rows.count, out.o);
  if (sink.slot != nullptr) return;
  FoldRows(StatesAt(sink.states.first, h * sink.states.head_rows + rows.begin, v_dim), out,
           rows.count, v_dim);
}

// How often a group that is scored against a tile asks for what is read later.
static int64_t StepsBetweenRequests(const AttentionCall& call, const AttentionUnit& unit,
                                    const BlockTiles& block) {
#if defined(QUIRE_SIMD_TILES)
  if (OnByteTiles(call, unit)) return ByteSteps(call.layout().k_dim()).count;
  if (OnTiles(call, unit)) return DivideUp(call.layout().k_dim(), kTileInputs);
#else
  static_cast<void>(unit);
#endif
  return ScoreSteps(call, block.key_dtype);
}

// space.tiles as in DecodeSegment.
static void BlockSegment(const AttentionCall& call, const AttentionUnit& unit, int64_t segment,
                         bool has_next, const SegmentSink& sink, WorkerSpace& space) {
  const int64_t rows = unit.row_count();
  const int64_t together = RowsTogether(call, unit);
  const int64_t batch = rows < kBlockRowsMin ? rows : together;
  BlockTiles block;
  block.stored = SeenTiles(space.views, rows, segment) & ~OwnTiles(call, unit, segment);
  block.key_dtype = KeyDType(call, unit);
  block.value_dtype = ValueDType(call, unit);
  for (int64_t h = 0; h < unit.head_count(); ++h) {
    const bool last = h + 1 == unit.head_count();
    const SegmentTiles* const following = has_next ? space.tiles + 1 : nullptr;
    block.head = static_cast<int>(unit.head_begin + h);
    NextTiles next(call, last ? following : space.tiles, last ? unit.head_begin : block.head + 1);
    PrepareBlockKeys(call, unit, segment, space, &block);
    if (!MakesPanels(call, unit)) PrepareBlockValues(call, unit, space, &block);
    GatherBlockScales(call, block, space);
    const bool reads_keys = !OnByteTiles(call, unit);  // not quads that were made of them
    if (call.layout().latent && space.is_first_segment && reads_keys) next.AskForFirst(call, block);
    next.Share(DivideUp(rows, together), StepsBetweenRequests(call, unit, block),
               call.layout().v_dim(),
               OnTiles(call, unit) ? 1 : kTilePositions / ChainPair(block.value_dtype));
    for (int64_t r = 0, group = 0; r < rows; r += batch, ++group) {
      AttendBatch(call, unit, segment, &block, h, {r, SmallerOf(batch, rows - r), together, group},
                  next, sink, space);
    }
  }
}

#endif  // QUIRE_KERNELS_CPU_ATTENTION_BLOCK_INL_H_
