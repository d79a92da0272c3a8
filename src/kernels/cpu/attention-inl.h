// Attention over paged keys and values. docs/exactness.md has the arithmetic; attention_schedule.h
// how the work is cut. Included after simd-inl.h, inside a path's namespace and target region; the
// including file includes before it: base/float_environment.h, kernels/attention_schedule.h,
// kernels/backend.h, kernels/kv_slot.h, kernels/segment_tiles.h, tensor/half.h.
//
// Two loop nests compute a segment for a unit's rows, from the same chains:
//   block   one kv head, many rows: tiles of the segment are prepared once (assembled, rotated,
//   widened), then groups of
//           kRowsMax rows run over all of them. Bound by arithmetic.
//   decode  many kv heads, few rows each: K tiles of all heads in the order of memory, softmax, V
//   tiles of all heads, with
//           prefetch. Bound by memory.
#ifndef QUIRE_KERNELS_CPU_ATTENTION_INL_H_
#define QUIRE_KERNELS_CPU_ATTENTION_INL_H_

#include "kernels/cpu/chain-inl.h"
#include "kernels/cpu/latent-inl.h"
#include "kernels/cpu/rotary-inl.h"
#include "kernels/cpu/softmax-inl.h"
#include "kernels/cpu/tiles-inl.h"

// Rows times heads of a unit that reads many heads, at most (AttentionSchedule); a block has
// kRowsMax rows at a time.
constexpr int64_t kScoreRows = 128;
// How far ahead decode asks for memory (measured, specs: performance section 8).
constexpr int64_t kPrefetchBytes = 16384;

static int64_t SmallerOf(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t LargerOf(int64_t a, int64_t b) { return a > b ? a : b; }
static size_t Align64(size_t bytes) { return (bytes + 63) / 64 * 64; }

// ----------------------------------------------------------------------------------------------------
// memory of a worker

// Queries of a unit: weights, and the scales of those that are integers.
struct UnitQueries {
  std::byte* weights;
  float* scales;
};

struct WorkerSpace {
  std::byte* q;            // weights of the unit: [head][group of kRowsMax rows][step][row]
  std::byte* sink_q;       // the same for keys of sinks
  std::byte* node_q;       // of some rows of one group: [step][row]
  bool has_sink_q;         // some row of the unit scores sinks with a query of its own
  float* states;           // o, m, l of the unit's rows, if it keeps them itself
  float* segment;          // o, m, l of one segment
  float* scores;           // [row][kScoreStride]
  float* sink_scores;      // the same
  float* row;              // one row of q or o, padded to whole vectors
  std::byte* weights;      // one row of q as weights
  RowView* views;          // [row]
  std::byte* key_tiles;    // of a segment (block) or some heads (decode), prepared
  std::byte* value_tiles;  // of a segment (block) or one (decode)
  std::byte* node_keys;    // a tile as one node of a token tree sees it
  std::byte* node_values;
  std::byte* stored;  // a tile assembled in the cache's type
  std::byte* hidden;  // a V tile with lanes hidden
  float* tile;        // a K tile in float32
  float* cos;         // [rotary_dim / 2][16]
  float* sin;
  SegmentTiles* tiles;  // of this and of the next segment
  float* q_scales;      // of weights that are integers, [head][row]
  float* sink_q_scales;
  float* p_scales;
  float* key_scales;  // of the segment's positions, of one head
  float* value_scales;

  UnitQueries queries() const { return {q, q_scales}; }
  UnitQueries sink_queries() const { return {sink_q, sink_q_scales}; }

  // Sets the pointers for the memory at `base`; returns the bytes that they span.
  size_t Place(const KVLayout& layout, std::byte* base) {
    const size_t k_tile = layout.k_tile_elements() * sizeof(float);
    const size_t v_tile = layout.v_tile_elements() * sizeof(float);
    const size_t k_dim = static_cast<size_t>(layout.k_dim());
    const size_t v_dim = static_cast<size_t>(layout.v_dim());
    const size_t key_tiles_count = kTilesPerSegment > kWidest ? kTilesPerSegment : kWidest;
    uintptr_t next = reinterpret_cast<uintptr_t>(base);  // a null pointer has no neighbours
    q = Take(&next, kUnitRows * k_dim * sizeof(float));
    sink_q = Take(&next, kUnitRows * k_dim * sizeof(float));
    node_q = Take(&next, kRowsMax * k_dim * sizeof(float));
    has_sink_q = false;
    states = reinterpret_cast<float*>(Take(&next, kUnitRows * (v_dim + 2) * sizeof(float)));
    segment = reinterpret_cast<float*>(Take(&next, kScoreRows * (v_dim + 2) * sizeof(float)));
    scores = reinterpret_cast<float*>(Take(&next, kScoreRows * kScoreStride * sizeof(float)));
    sink_scores = reinterpret_cast<float*>(Take(&next, kScoreRows * kScoreStride * sizeof(float)));
    row = reinterpret_cast<float*>(Take(&next, (k_dim + v_dim + 2 * kLanes) * sizeof(float)));
    weights = Take(&next, (k_dim + kLanes) * sizeof(float));
    views = reinterpret_cast<RowView*>(Take(&next, kUnitRows * sizeof(RowView)));
    key_tiles = Take(&next, key_tiles_count * k_tile);
    value_tiles = Take(&next, kTilesPerSegment * v_tile);
    node_keys = Take(&next, k_tile);
    node_values = Take(&next, v_tile);
    stored = Take(&next, k_tile > v_tile ? k_tile : v_tile);
    hidden = Take(&next, v_tile);
    tile = reinterpret_cast<float*>(Take(&next, k_tile));
    cos = reinterpret_cast<float*>(Take(&next, k_tile / 2));
    sin = reinterpret_cast<float*>(Take(&next, k_tile / 2));
    tiles = reinterpret_cast<SegmentTiles*>(Take(&next, 2 * sizeof(SegmentTiles)));
    q_scales = reinterpret_cast<float*>(Take(&next, kUnitRows * sizeof(float)));
    sink_q_scales = reinterpret_cast<float*>(Take(&next, kUnitRows * sizeof(float)));
    p_scales = reinterpret_cast<float*>(Take(&next, kUnitRows * sizeof(float)));
    key_scales = reinterpret_cast<float*>(Take(&next, kSegmentPositions * sizeof(float)));
    value_scales = reinterpret_cast<float*>(Take(&next, kSegmentPositions * sizeof(float)));
    return next - reinterpret_cast<uintptr_t>(base);
  }

 private:
  static std::byte* Take(uintptr_t* next, size_t bytes) {
    const uintptr_t begin = *next;
    *next += Align64(bytes);
    return reinterpret_cast<std::byte*>(begin);
  }
};

static size_t WorkerBytes(const KVLayout& layout) {
  WorkerSpace space;
  return space.Place(layout, nullptr);
}

// ----------------------------------------------------------------------------------------------------
// the call

// What all tasks of one Attention call share. Read-only but for the memory that it points to.
struct AttentionCall {
  const AttentionArgs* args;
  AttentionSchedule* schedule;
  TilePlaces places;
  WeightKind p_weights;
  bool scales_keys;
  bool scales_values;
  RowStates states;  // o [kv head][query row][v_dim], m, l [kv head][query row], of all rows
  std::byte* workers;
  size_t worker_bytes;

  const KVLayout& layout() const { return args->pages.layout; }
};

static const ChainLoops* LoopsOf(DType dtype) {
  if (dtype == DType::kBF16) return &kLoopsBF16;
  if (dtype == DType::kF16) return &kLoopsF16;
  if (dtype == DType::kI8) return &kLoopsI8;
  return dtype == DType::kF8E4M3 ? &kLoopsF8 : &kLoopsF32;
}

static WorkerSpace SpaceOf(const AttentionCall& call, int worker) {
  WorkerSpace space;
  space.Place(call.layout(), call.workers + static_cast<size_t>(worker) * call.worker_bytes);
  return space;
}

static RowStates StatesAt(RowStates states, int64_t row, int v_dim) {
  return {states.o + row * v_dim, states.m + row, states.l + row};
}

// `count` rows' states in memory of count * (v_dim + 2) floats.
static RowStates StatesIn(float* memory, int64_t count, int v_dim) {
  return {memory, memory + count * v_dim, memory + count * v_dim + count};
}

// Where a unit's states are kept: head h, row r at index h * head_rows + r (both counted from the
// unit's first).
struct UnitStates {
  RowStates first;
  int64_t head_rows;
};

static UnitStates SharedStates(const AttentionCall& call, const AttentionUnit& unit) {
  const int64_t total = call.schedule->total_rows();
  const int64_t index = unit.head_begin * total + unit.row_begin;
  return {StatesAt(call.states, index, call.layout().v_dim()), total};
}

static void ClearUnitStates(const AttentionCall& call, const AttentionUnit& unit,
                            UnitStates states) {
  const int v_dim = call.layout().v_dim();
  for (int64_t h = 0; h < unit.head_count(); ++h) {
    ClearStates(StatesAt(states.first, h * states.head_rows, v_dim), unit.row_count(), v_dim);
  }
}

// Keys of the unit are rotated here (RopeMode::kInline).
static bool RotatesKeys(const AttentionCall& call, const AttentionUnit& unit) {
  return call.args->sequences[static_cast<size_t>(unit.sequence)].inline_cos != nullptr;
}

// How the unit's queries are kept. Keys that are rotated here are no codes any more.
static WeightKind QueryKind(const AttentionCall& call, const AttentionUnit& unit) {
  const DType stored = call.layout().dtype;
  return WeightKindOf(RotatesKeys(call, unit) ? ComputeDType(stored) : stored);
}

// The type in which a block's tiles enter their chains. int8 is widened by the chains; widening
// anything else in every group of rows would cost more than once before. With packed weights, pairs
// of bfloat16 are wanted, and float32 else, in whose loops a pair is two steps.
static DType BlockDType(DType stored, WeightKind weights) {
  if (weights == WeightKind::kI16) return stored;
  return weights == WeightKind::kPackedBF16 ? ComputeDType(stored) : DType::kF32;
}

// What PrepareKeys returns for the unit.
static DType KeyDType(const AttentionCall& call, const AttentionUnit& unit) {
  const DType stored = call.layout().dtype;
  const bool rotates = RotatesKeys(call, unit);
  DType dtype = stored;
  if (unit.row_count() >= kBlockRowsMin) {
    dtype = BlockDType(stored, QueryKind(call, unit));
  } else if (rotates) {
    dtype = ComputeDType(stored);
  }
  return rotates && dtype == DType::kF16 ? DType::kF32 : dtype;
}

static size_t QueryRowBytes(const AttentionCall& call, const AttentionUnit& unit) {
  return static_cast<size_t>(call.layout().k_dim()) * WeightBytes(QueryKind(call, unit));
}

static int64_t ScoreSteps(const AttentionCall& call, DType keys) {
  return call.layout().k_dim() / ChainPair(keys);
}

// ----------------------------------------------------------------------------------------------------
// rows in and out

// Walks the query rows of a unit: which row of q and o, which query head of the group.
class RowWalker {
 public:
  RowWalker(const AttentionCall& call, int64_t query_row, int64_t sequence)
      : call_(call),
        sequence_(sequence),
        plan_row_(query_row / call.schedule->group_size()),
        head_in_group_(query_row % call.schedule->group_size()) {
    FindSequence();
  }
  const AttentionSequence& sequence() const {
    return call_.args->sequences[static_cast<size_t>(sequence_)];
  }
  int64_t row() const { return sequence().first_row + row_in_sequence(); }
  RowView view() const { return ViewOf(*call_.args, sequence(), row_in_sequence()); }
  int64_t head(int64_t kv_head) const {
    return kv_head * call_.schedule->group_size() + head_in_group_;
  }
  // REQUIRES: there is a next row.
  void Next() {
    if (++head_in_group_ < call_.schedule->group_size()) return;
    head_in_group_ = 0;
    ++plan_row_;
    is_behind_ = true;
  }
  // To be called after Next, before the row is looked at.
  void Settle() {
    if (is_behind_) FindSequence();
  }

 private:
  int64_t row_in_sequence() const {
    return plan_row_ - call_.schedule->plan_row_begin()[sequence_];
  }
  void FindSequence() {
    while (plan_row_ >= call_.schedule->plan_row_begin()[sequence_ + 1]) ++sequence_;
    is_behind_ = false;
  }

  const AttentionCall& call_;
  int64_t sequence_;
  int64_t plan_row_;
  int64_t head_in_group_;
  bool is_behind_ = false;
};

static void WidenRow(const void* from, DType dtype, int64_t offset, int count, float* to) {
  int i = 0;
  if (dtype == DType::kF32) {
    __builtin_memcpy(to, static_cast<const float*>(from) + offset,
                     static_cast<size_t>(count) * sizeof(float));
    return;
  }
  const auto* half = static_cast<const uint16_t*>(from) + offset;
  if (dtype == DType::kBF16) {
    for (; i + kLanes <= count; i += kLanes) Store(to + i, LoadBits16AsHigh(half + i));
    for (; i < count; ++i) to[i] = Bf16ToF32(half[i]);
  } else {
    for (; i + kLanes <= count; i += kLanes) Store(to + i, LoadF16(half + i));
    for (; i < count; ++i) to[i] = F16ToF32(half[i]);
  }
}

static void NarrowRow(const float* from, int count, void* to, DType dtype, int64_t offset) {
  int i = 0;
  if (dtype == DType::kF32) {
    __builtin_memcpy(static_cast<float*>(to) + offset, from,
                     static_cast<size_t>(count) * sizeof(float));
    return;
  }
  auto* half = static_cast<uint16_t*>(to) + offset;
  if (dtype == DType::kBF16) {
    for (; i + kLanes <= count; i += kLanes) StoreBF16(half + i, Load(from + i));
    for (; i < count; ++i) half[i] = F32ToBf16(from[i]);
  } else {
    for (; i + kLanes <= count; i += kLanes) StoreF16(half + i, Load(from + i));
    for (; i < count; ++i) half[i] = F32ToF16(from[i]);
  }
}

// Puts the steps of a row `stride` steps apart.
template <typename Step>
static void SpreadSteps(const std::byte* row, int64_t steps, int64_t stride, std::byte* to) {
  for (int64_t d = 0; d < steps; ++d) {
    __builtin_memcpy(to + d * stride * static_cast<int64_t>(sizeof(Step)),
                     row + d * static_cast<int64_t>(sizeof(Step)), sizeof(Step));
  }
}

// Row `index` of `count` rows of one head, whose weights lie at `to` for chains of `steps` steps.
// The rows of a group stand side by side, so that a chain's step finds them at fixed distances.
static void StoreQuery(const std::byte* row, size_t row_bytes, int64_t steps, int64_t index,
                       int64_t count, std::byte* to) {
  const int64_t together = GroupRows(count);
  const int64_t first = index / together * together;
  const int64_t group = SmallerOf(together, count - first);
  const size_t step_bytes = row_bytes / static_cast<size_t>(steps);
  std::byte* const at =
      to + static_cast<size_t>(first) * row_bytes + static_cast<size_t>(index - first) * step_bytes;
  if (group == 1) {
    __builtin_memcpy(at, row, row_bytes);
  } else if (step_bytes == sizeof(uint64_t)) {
    SpreadSteps<uint64_t>(row, steps, group, at);
  } else {
    SpreadSteps<uint32_t>(row, steps, group, at);
  }
}

// Calls f(begin, count) for the groups in which StoreQuery puts rows.
template <typename F>
static void ForEachGroup(int64_t rows, const F& f) {
  if (rows == 0) return;
  const int64_t together = GroupRows(rows);
  for (int64_t r = 0; r < rows; r += together) {
    f(r, static_cast<int>(SmallerOf(together, rows - r)));
  }
}

// Row r of the unit, which is `row` of q, for all heads of the unit: rotated, as weights for
// `keys`.
static void LoadQuery(const AttentionCall& call, const AttentionUnit& unit, const RowWalker& walker,
                      int64_t r, const RotaryRows& rotary, DType keys, UnitQueries to,
                      WorkerSpace& space) {
  const HeadRows& q = call.args->q;
  const int k_dim = call.layout().k_dim();
  const WeightKind kind = QueryKind(call, unit);
  const size_t row_bytes = QueryRowBytes(call, unit);
  const int64_t rows = unit.row_count();
  for (int64_t h = 0; h < unit.head_count(); ++h) {
    WidenRow(q.data, q.dtype,
             walker.row() * q.row_stride + walker.head(unit.head_begin + h) * q.head_stride,
             call.layout().qk_head_dim, space.row);
    RotateRow(space.row, rotary, walker.row());
    if (kind == WeightKind::kI16) {
      to.scales[h * rows + r] = QuantiseWeights(space.row, KVLayout::RoundUp(k_dim, kLanes),
                                                MostI16(k_dim), space.weights);
    } else {
      for (int i = 0; i < k_dim; i += kLanes) {
        StoreWeights(kind, space.weights, i, Load(space.row + i));
      }
    }
    StoreQuery(space.weights, row_bytes, ScoreSteps(call, keys), r, rows,
               to.weights + static_cast<size_t>(h * rows) * row_bytes);
  }
}

// Query rows of the unit and what each row sees.
static void LoadQueries(const AttentionCall& call, const AttentionUnit& unit, DType keys,
                        WorkerSpace& space) {
  const AttentionArgs& args = *call.args;
  RotaryRows sink_rotary = args.rotary;
  sink_rotary.angles = args.sink_angles;
  for (int i = call.layout().qk_head_dim; i < call.layout().k_dim() + kLanes; ++i)
    space.row[i] = 0.0F;
  space.has_sink_q = false;
  RowWalker walker(call, unit.row_begin, unit.sequence);
  for (int64_t r = 0; r < unit.row_count(); ++r, walker.Next()) {
    walker.Settle();
    RowView& view = space.views[r];
    view = walker.view();
    if (unit.shared) view.end = INT64_MAX;
    if (args.sink_angles == nullptr) view.sink_end = 0;
    LoadQuery(call, unit, walker, r, args.rotary, keys, space.queries(), space);
    // A group's rows are scored together, so a row that has slid gives all of them such a query.
    space.has_sink_q |= view.sink_end > 0;
  }
  if (!space.has_sink_q) return;
  RowWalker again(call, unit.row_begin, unit.sequence);
  for (int64_t r = 0; r < unit.row_count(); ++r, again.Next()) {
    again.Settle();
    LoadQuery(call, unit, again, r, sink_rotary, keys, space.sink_queries(), space);
  }
}

// Folds the learned logit of a head into a row's finished state, as a segment with l = 1 and o = 0.
static void FoldHeadSink(float logit_log2, const RowStates& state, int v_dim, WorkerSpace& space) {
  float m = logit_log2;
  float l = 1.0F;
  __builtin_memset(space.segment, 0, static_cast<size_t>(v_dim) * sizeof(float));
  FoldRows(state, {space.segment, &m, &l}, 1, v_dim);
}

// Writes o and lse of rows [begin, end) of the unit's heads x rows.
static void FinishRows(const AttentionCall& call, const AttentionUnit& unit, UnitStates states,
                       int64_t begin, int64_t end, WorkerSpace& space) {
  const AttentionArgs& args = *call.args;
  const int v_dim = call.layout().v_dim();
  for (int64_t i = begin; i < end;) {
    const int64_t h = i / unit.row_count();
    const int64_t stop = SmallerOf(end, (h + 1) * unit.row_count());
    const int64_t first = unit.row_begin + i % unit.row_count();
    RowWalker walker(call, first, call.schedule->SequenceOf(first));
    for (; i < stop; ++i, walker.Next()) {
      walker.Settle();
      const RowStates state =
          StatesAt(states.first, h * states.head_rows + i % unit.row_count(), v_dim);
      const int64_t head = walker.head(unit.head_begin + h);
      if (args.head_sinks_log2 != nullptr)
        FoldHeadSink(args.head_sinks_log2[head], state, v_dim, space);
      FinishRow(state.o, *state.l, v_dim, space.row);
      NarrowRow(space.row, call.layout().v_head_dim, args.o.data, args.o.dtype,
                walker.row() * args.o.row_stride + head * args.o.head_stride);
      if (args.lse != nullptr) {
        args.lse[walker.row() * args.lse_row_stride + head] = FinishLse(*state.m, *state.l);
      }
    }
  }
}

// ----------------------------------------------------------------------------------------------------
// one segment

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

// Softmax of `count` rows of one head. value_scales: of the segment's positions.
static void SoftmaxRows(const AttentionCall& call, const RowView* views, int64_t count,
                        int64_t segment, TileRange range, const float* value_scales, float* scores,
                        SoftmaxOutput out) {
  const float soft_cap = call.args->soft_cap;
  const auto softmax = call.scales_values ? SoftmaxRow<true> : SoftmaxRow<false>;
  for (int64_t r = 0; r < count; ++r, scores += kScoreStride) {
    const SegmentView view = ViewIn(views[r], segment);
    if (view.begin < view.end) {
      float scale = call.args->scale_log2;
      if (soft_cap > 0.0F) {
        CapScores(scores, view, scale, soft_cap);
        scale = 1.0F;
      }
      softmax(call.p_weights, scores, value_scales, view, range.begin, range.end, scale, out.m + r,
              out.l + r, out.weight_scale + r);
    } else {
      HiddenRow(call.p_weights, scores, range.begin, range.end, out.m + r, out.l + r,
                out.weight_scale + r);
    }
  }
}

// V tiles of one head of a segment, ready for a chain.
struct ValueTiles {
  const ChainLoops* loops;
  DType dtype;  // of the tiles, as the chain reads them
  const std::byte* const* data;
};

// log2 of the widest loop for at most `wanted` columns, where `at_once` are held.
static int WidthFor(int64_t wanted, int at_once) {
  int width = 0;
  while ((2 << width) <= wanted && (2 << width) <= at_once) ++width;
  return width;
}

// Chains over the tiles [range) for `count` <= kRowsMax rows; weights at `scores`. `prefetch`: what
// is read later, or null.
static void WeighTiles(const AttentionCall& call, const ValueTiles& values, TileRange range,
                       const float* scores, int count, float* o, bool resume,
                       const std::byte* prefetch) {
  const int v_dim = call.layout().v_dim();
  WeighArgs a;
  a.p = reinterpret_cast<const std::byte*>(scores) +
        static_cast<size_t>(range.begin * kLanes) * WeightBytes(call.p_weights);
  a.v = values.data + range.begin;
  a.tile_count = range.end - range.begin;
  a.v_row_elements = v_dim * ChainPair(values.dtype);
  a.o_row = v_dim;
  a.resume = resume;
  a.prefetch = prefetch;
  for (int d = 0; d < v_dim;) {
    const int width = WidthFor((v_dim - d) / kLanes, ColumnsAtOnce(count));
    const int columns = kLanes << width;
    a.column = d;
    a.column_end = v_dim / columns * columns;
    a.o = o;
    values.loops->weigh[count - 1][width](a);
    if (prefetch != nullptr) {
      a.prefetch += (a.column_end - d) * kTilePositions * DTypeBytes(values.dtype);
    }
    d = a.column_end;
  }
}

// The same for all runs of a set of tiles.
static void WeighTileSet(const AttentionCall& call, const ValueTiles& values, TileSet tiles,
                         const float* scores, int count, float* o) {
  bool resume = false;
  for (TileRange run; TakeRun(&tiles, &run); resume = true) {
    WeighTiles(call, values, run, scores, count, o, resume, nullptr);
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
    WeighTiles(call, {values.loops, values.dtype, shown}, {tile, tile + 1}, scores, 1, o, true,
               nullptr);
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
      WeighTiles(call, values, {t, t + 1}, scores, count, o, true, nullptr);
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

static void LoadTileAngles(const AttentionCall& call, const AttentionSequence& sequence,
                           int64_t segment, int tile, WorkerSpace& space) {
  const int half = call.args->rotary.rotary_dim / 2;
  const int64_t position = segment * kSegmentPositions + tile * kLanes;
  const int64_t count = LargerOf(SmallerOf(LastPosition(sequence) + 1 - position, kLanes), 0);
  LoadAngles(sequence.inline_cos, position, static_cast<int>(count), half, space.cos);
  LoadAngles(sequence.inline_sin, position, static_cast<int>(count), half, space.sin);
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

// ----------------------------------------------------------------------------------------------------
// nodes of a token tree: tiles with uncommitted positions are each node's own

// Tiles of the segment that lie behind, or hold, the end of the unit's committed tokens.
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
    if (rotate) LoadTileAngles(call, sequence, segment, t, space);
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
  const auto score = [&](int64_t r, int count, int t, const SegmentTile& tile) {
    GatherQuery(call, unit, q.weights, h, r, count, a.steps, space);
    a.k[0] = PrepareKeys(call, tile, head, rotate, keys, space, space.node_keys);
    float* const row = scores + (r - begin) * kScoreStride;
    a.s = row + t * kLanes;
    loops->score_tile[count - 1](a);
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
    SoftmaxRows(call, space.views + r, count, segment, range, space.value_scales,
                scores + at * kScoreStride, out.At(at));
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
  const std::byte* data[kTilesPerSegment];
  const bool block = unit.row_count() >= kBlockRowsMin;
  const DType dtype = block ? BlockDType(layout.v_dtype(), call.p_weights) : layout.v_dtype();
  const ValueTiles values = {LoopsOf(dtype), dtype, data};
  const auto weigh = [&](int64_t r, int count, int t, const SegmentTile& tile) {
    data[t] = PrepareValues(call, tile, head, dtype, space, space.node_values);
    const float* const p = scores + (r - begin) * kScoreStride;
    float* const out = o + (r - begin) * layout.v_dim();
    if (tile.v_nonfinite) {
      WeighHiding(call, values, t, space.views + r, segment, p, count, out, space);
    } else {
      WeighTiles(call, values, {t, t + 1}, p, count, out, true, nullptr);
    }
  };
  ForEachNodeTile(call, unit, segment, own, begin, end, false, space, weigh);
}

// ----------------------------------------------------------------------------------------------------
// block

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

// Scores of `count` rows from row r on, which are of one group of StoreQuery.
static void ScoreTiles(const AttentionCall& call, const AttentionUnit& unit,
                       const BlockTiles& block, TileSet tiles, UnitQueries q, int64_t r, int count,
                       float* scores, const WorkerSpace& space) {
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
      t += columns;
    }
  }
  for (TileSet left = call.scales_keys ? all : 0; left != 0; left &= left - 1) {
    const int t = __builtin_ctz(left);
    ScaleScores(QueryKind(call, unit), q.scales + r, space.key_scales + t * kLanes, count,
                scores + t * kLanes);
  }
}

static void BlockSegment(const AttentionCall& call, const AttentionUnit& unit, int64_t segment,
                         const SegmentSink& sink, WorkerSpace& space) {
  const AttentionSequence& sequence = call.args->sequences[static_cast<size_t>(unit.sequence)];
  const int v_dim = call.layout().v_dim();
  ResolveSegment(call.args->pages, sequence, segment, PositionsEnd(call, unit, sequence, segment),
                 space.tiles);
  BlockTiles block;
  const TileSet own = OwnTiles(call, unit, segment);
  PrepareBlock(call, unit, segment, SeenTiles(space.views, unit.row_count(), segment) & ~own, space,
               &block);
  ForEachGroup(unit.row_count(), [&](int64_t r, int count) {
    const RowView* views = space.views + r;
    const TileSet seen = SeenTiles(views, count, segment);
    const RowStates out = SegmentOutput(call, unit, sink, r, space);
    const TileRange span = SpanOf(seen);
    ScoreTiles(call, unit, block, seen & ~own, space.queries(), r, count, space.scores, space);
    ScoreNodes(call, unit, segment, seen & own, space.queries(), 0, r, r + count, space.scores,
               space);
    const TileSet sinks = space.has_sink_q ? seen & SinkTiles(views, count, segment) : 0;
    if (sinks != 0) {
      ScoreTiles(call, unit, block, sinks & ~own, space.sink_queries(), r, count, space.sink_scores,
                 space);
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

// ----------------------------------------------------------------------------------------------------
// decode

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
    const int ahead =
        static_cast<int>((kPrefetchBytes + call.places.key_head - 1) / call.places.key_head);
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
  const ValueTiles values = {LoopsOf(dtype), dtype, data};
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
                   r == 0 ? order.AheadOfValue(tile, h) : nullptr);
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
    if (rotate) LoadTileAngles(call, sequence, segment, t, space);
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

// ----------------------------------------------------------------------------------------------------
// units

static void DecodeSegments(const AttentionCall& call, const AttentionUnit& unit, int64_t begin,
                           int64_t end, SegmentSink sink, WorkerSpace& space) {
  const AttentionSequence& sequence = call.args->sequences[static_cast<size_t>(unit.sequence)];
  const KVPages& pages = call.args->pages;
  SegmentTiles* tiles = space.tiles;
  SegmentTiles* next = space.tiles + 1;
  const auto resolve = [&](int64_t s, SegmentTiles* to) {
    const int64_t segment = unit.SegmentAt(s);
    ResolveSegment(pages, sequence, segment, PositionsEnd(call, unit, sequence, segment), to);
  };
  resolve(begin, tiles);
  for (int64_t s = begin; s < end; ++s) {
    const bool has_next = s + 1 < end;
    if (has_next) resolve(s + 1, next);
    DecodeSegment(call, unit, unit.SegmentAt(s), has_next, sink, space);
    if (has_next) *tiles = *next;
    if (sink.slot != nullptr) sink.slot += call.schedule->SlotFloats(unit);
  }
}

static void RunSegments(const AttentionCall& call, const AttentionUnit& unit, int64_t begin,
                        int64_t end, SegmentSink sink, WorkerSpace& space) {
  if (begin >= end) return;
  const bool block = unit.row_count() >= kBlockRowsMin;
  LoadQueries(call, unit, KeyDType(call, unit), space);
  if (!block) {
    DecodeSegments(call, unit, begin, end, sink, space);
    return;
  }
  for (int64_t s = begin; s < end; ++s) {
    BlockSegment(call, unit, unit.SegmentAt(s), sink, space);
    if (sink.slot != nullptr) sink.slot += call.schedule->SlotFloats(unit);
  }
}

// A unit from its first to its last segment. Only rows that also see shared segments need states
// that outlive the task.
static void RunWholeUnit(void* context, int64_t index, int worker) {
  const ScopedFloatEnvironment environment;
  const AttentionCall& call = *static_cast<const AttentionCall*>(context);
  const AttentionSchedule& schedule = *call.schedule;
  const AttentionUnit& unit = schedule.whole_units()[static_cast<size_t>(index)];
  WorkerSpace space = SpaceOf(call, worker);
  const bool is_alone = schedule.final_group() && unit.segment_begin == 0;
  const int64_t count = unit.row_count() * unit.head_count();
  const UnitStates states =
      is_alone ? UnitStates{StatesIn(space.states, count, call.layout().v_dim()), unit.row_count()}
               : SharedStates(call, unit);
  if (unit.segment_begin == 0) ClearUnitStates(call, unit, states);
  RunSegments(call, unit, unit.segment_begin, unit.segment_end, {states, nullptr}, space);
  if (schedule.final_group()) FinishRows(call, unit, states, 0, count, space);
}

// Some segments of a cut unit, each into its slot of the arena.
static void RunPiece(void* context, int64_t index, int worker) {
  const ScopedFloatEnvironment environment;
  const AttentionCall& call = *static_cast<const AttentionCall*>(context);
  const AttentionSchedule& schedule = *call.schedule;
  const AttentionPiece& piece = schedule.pieces()[static_cast<size_t>(index)];
  const AttentionWavePart& part = schedule.parts()[static_cast<size_t>(piece.part)];
  const AttentionUnit& unit = schedule.unit(part.unit);
  WorkerSpace space = SpaceOf(call, worker);
  float* slot =
      schedule.arena() + part.arena +
      static_cast<size_t>(piece.segment_begin - part.segment_begin) * schedule.SlotFloats(unit);
  RunSegments(call, unit, piece.segment_begin, piece.segment_end, {{}, slot}, space);
}

// Tasks per cut unit for the folds behind a wave.
constexpr int64_t kFoldTasks = 8;

// A share of the rows of a wave's part: folds their segments in order, and finishes them behind the
// last wave.
static void RunFold(void* context, int64_t index, int worker) {
  const ScopedFloatEnvironment environment;
  const AttentionCall& call = *static_cast<const AttentionCall*>(context);
  const AttentionSchedule& schedule = *call.schedule;
  const AttentionWavePart& part = schedule.parts()[static_cast<size_t>(index / kFoldTasks)];
  const AttentionUnit& unit = schedule.unit(part.unit);
  const int v_dim = call.layout().v_dim();
  const int64_t rows = unit.row_count();
  const int64_t count = rows * unit.head_count();
  const int64_t begin = count * (index % kFoldTasks) / kFoldTasks;
  const int64_t end = count * (index % kFoldTasks + 1) / kFoldTasks;
  const UnitStates states = SharedStates(call, unit);
  for (int64_t i = begin; i < end;) {
    const int64_t stop = SmallerOf(end, (i / rows + 1) * rows);
    const RowStates into = StatesAt(states.first, i / rows * states.head_rows + i % rows, v_dim);
    if (part.segment_begin == 0) ClearStates(into, stop - i, v_dim);
    float* slot = schedule.arena() + part.arena;
    for (int64_t s = part.segment_begin; s < part.segment_end; ++s) {
      FoldRows(into, StatesAt(StatesIn(slot, count, v_dim), i, v_dim), stop - i, v_dim);
      slot += schedule.SlotFloats(unit);
    }
    i = stop;
  }
  if (!schedule.final_group() || !part.last) return;
  WorkerSpace space = SpaceOf(call, worker);
  FinishRows(call, unit, states, begin, end, space);
}

// ----------------------------------------------------------------------------------------------------
// entry points

static size_t StateBytes(const KVLayout& layout, int num_qo_heads, int64_t row_count) {
  return Align64(static_cast<size_t>(row_count * num_qo_heads) *
                 static_cast<size_t>(layout.v_dim() + 2) * sizeof(float));
}

static size_t AttentionScratchBytes(const KVLayout& layout, int num_qo_heads, int64_t row_count,
                                    int64_t sequence_count, int worker_count) {
  return AttentionSchedule::ScratchBytes(layout, num_qo_heads, row_count, sequence_count,
                                         worker_count) +
         StateBytes(layout, num_qo_heads, row_count) +
         WorkerBytes(layout) * static_cast<size_t>(worker_count);
}

static void Attention(const AttentionArgs& args, ParallelRunner& runner) {
  const KVLayout& layout = args.pages.layout;
  const int workers = runner.worker_count();
  auto* scratch = static_cast<std::byte*>(args.scratch);
  AttentionSchedule schedule(args, workers, scratch);
  scratch += AttentionSchedule::ScratchBytes(layout, args.num_qo_heads, args.row_count,
                                             static_cast<int64_t>(args.sequences.size()), workers);
  AttentionCall call = {
      .args = &args,
      .schedule = &schedule,
      .places = TilePlaces(args.pages),
      .p_weights = WeightKindOf(layout.v_dtype()),
      .scales_keys = IsQuantised(layout.dtype),
      .scales_values = IsQuantised(layout.v_dtype()),
      .states = StatesIn(reinterpret_cast<float*>(scratch), args.row_count * args.num_qo_heads,
                         layout.v_dim()),
      .workers = scratch + StateBytes(layout, args.num_qo_heads, args.row_count),
      .worker_bytes = WorkerBytes(layout),
  };
  while (schedule.NextGroup()) {
    while (schedule.NextWave()) {
      runner.Run(static_cast<int64_t>(schedule.pieces().size()), RunPiece, &call);
      runner.Run(static_cast<int64_t>(schedule.parts().size()) * kFoldTasks, RunFold, &call);
    }
    const auto whole = static_cast<int64_t>(schedule.whole_units().size());
    if (whole > 0) runner.Run(whole, RunWholeUnit, &call);
  }
}

#endif  // QUIRE_KERNELS_CPU_ATTENTION_INL_H_
