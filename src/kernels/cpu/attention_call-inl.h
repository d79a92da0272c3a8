// What an Attention call and the memory of its workers hold, and how a unit of it keeps queries and
// tiles (attention-inl.h). Included inside a path's namespace and target region.
#ifndef QUIRE_KERNELS_CPU_ATTENTION_CALL_INL_H_
#define QUIRE_KERNELS_CPU_ATTENTION_CALL_INL_H_

#include "kernels/cpu/chain-inl.h"
#if defined(QUIRE_SIMD_TILES)
#include "kernels/cpu/attention_bytes-inl.h"
#include "kernels/cpu/attention_tiles-inl.h"
#endif
#include "kernels/cpu/softmax-inl.h"
#include "kernels/cpu/tiles-inl.h"

// Rows times heads of a unit that reads many heads, at most (AttentionSchedule); a block has
// kRowsMax rows at a time.
constexpr int64_t kScoreRows = 128;
// Rows of q that are laid side by side at a time.
constexpr int64_t kRowsWaiting = 4;
// From this number of query rows on, which are more than one group, a unit's heads are computed one
// after the other: arithmetic bounds them, and tiles that all rows meet together stay in L1.
constexpr int64_t kHeadRowsMin = kRowsMax + 1;

static int64_t SmallerOf(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t LargerOf(int64_t a, int64_t b) { return a > b ? a : b; }
static size_t Align64(size_t bytes) { return (bytes + 63) / 64 * 64; }

// -------------------------------------------------------------------------------------------------
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
  std::byte* weights;      // kRowsWaiting rows of q as weights
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
  SegmentTiles* tiles;    // of this and of the next segment
  bool is_first_segment;  // of those that the worker computes in a row
  float* q_scales;        // of weights that are integers, [head][row]
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
    weights = Take(&next, (kRowsWaiting * k_dim + kLanes) * sizeof(float));
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

// -------------------------------------------------------------------------------------------------
// the call

// What all tasks of one Attention call share. Read-only but for the memory that it points to.
struct AttentionCall {
  const AttentionArgs* args;
  AttentionSchedule* schedule;
  TilePlaces places;
  StreamPrefetch stream;
  WeightKind p_weights;  // but see ValueWeightKind
  bool scales_keys;
  bool scales_values;
  RowStates states;  // o [kv head][query row][v_dim], m, l [kv head][query row], of all rows
  std::byte* workers;
  size_t worker_bytes;
  int64_t whole_units;  // of the group, that have not run

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
  return call.args->sequences[static_cast<size_t>(unit.sequence)].inline_angles != nullptr;
}

// What the unit's queries are multiplied with. Keys that are rotated here are no codes any more.
static WeightKind PlainQueryKind(const AttentionCall& call, const AttentionUnit& unit) {
  const DType stored = call.layout().dtype;
  return WeightKindOf(RotatesKeys(call, unit) ? ComputeDType(stored) : stored);
}

// Few rows make values out of keys panel by panel, while they meet them.
static bool MakesPanels(const AttentionCall& call, const AttentionUnit& unit) {
  return call.layout().latent && unit.row_count() < kBlockRowsMin;
}

#if defined(QUIRE_SIMD_TILES)

// From this number of query rows on, tiles are faster than fma.
constexpr int64_t kTileUnitRows = 8;
// The same over int8 codes: a whole tile of rows, since all of a segment is turned into quads first
// (docs/notes/speed.md).
constexpr int64_t kByteUnitRows = kTileRows;

// Whether the tile unit sums products of the unit's bytes: where both keys and values are codes.
// What a token tree's nodes see of their own is not turned into quads; queries of few dimensions
// have no room for their steps.
static bool OnByteTiles(const AttentionCall& call, const AttentionUnit& unit) {
  const bool has_nodes =
      !unit.shared && call.args->sequences[static_cast<size_t>(unit.sequence)].tree != nullptr;
  return unit.row_count() >= kByteUnitRows && call.p_weights == WeightKind::kI16 &&
         PlainQueryKind(call, unit) == WeightKind::kI16 && !MakesPanels(call, unit) && !has_nodes &&
         call.layout().k_dim() >= kLanes;
}

// Whether the tile unit computes scores and outputs of the unit.
static bool OnTiles(const AttentionCall& call, const AttentionUnit& unit) {
  if (OnByteTiles(call, unit)) return true;
  return unit.row_count() >= kTileUnitRows && call.p_weights == WeightKind::kRoundedF32 &&
         PlainQueryKind(call, unit) == WeightKind::kRoundedF32;
}

#else

static bool OnByteTiles(const AttentionCall&, const AttentionUnit&) { return false; }
static bool OnTiles(const AttentionCall&, const AttentionUnit&) { return false; }

#endif

// Weights of float32 as the unit takes them: for tiles pairs of bfloat16, row by row.
static WeightKind WeightKindOn(bool tiles, WeightKind plain) {
  return tiles && plain != WeightKind::kI16 ? WeightKind::kPackedBF16 : plain;
}

// How the unit's queries are kept: for tiles row by row, else side by side (StoreQueries).
static WeightKind QueryKind(const AttentionCall& call, const AttentionUnit& unit) {
  return WeightKindOn(OnTiles(call, unit), PlainQueryKind(call, unit));
}

// How its weights of values are kept.
static WeightKind ValueWeightKind(const AttentionCall& call, const AttentionUnit& unit) {
  return WeightKindOn(OnTiles(call, unit), call.p_weights);
}

// Rows of the unit that are computed together: a group of chains or of tiles.
static int64_t RowsTogether(const AttentionCall& call, const AttentionUnit& unit) {
#if defined(QUIRE_SIMD_TILES)
  if (OnTiles(call, unit)) return SmallerOf(unit.row_count(), kTileGroupRows);
#else
  static_cast<void>(call);
#endif
  return GroupRows(unit.row_count());
}

// The type in which a block's tiles enter their chains. int8 is widened by the chains; widening
// anything else in every group of rows would cost more than once before. With packed weights, pairs
// of bfloat16 are wanted, and float32 else, in whose loops a pair is two steps; but not where
// chains of bfloat16 have chunks.
static DType BlockDType(DType stored, WeightKind weights) {
  if (weights == WeightKind::kI16) return stored;
  if (weights == WeightKind::kRoundedF32 && ChainBF16::kChunkSteps > 0) return stored;
  return weights == WeightKind::kPackedBF16 ? ComputeDType(stored) : DType::kF32;
}

// What PrepareKeys returns for the unit.
static DType KeyDType(const AttentionCall& call, const AttentionUnit& unit) {
  const DType stored = call.layout().dtype;
  const bool rotates = RotatesKeys(call, unit);
  DType dtype = stored;
  if (unit.row_count() >= kBlockRowsMin || OnTiles(call, unit)) {
    dtype = BlockDType(rotates ? ComputeDType(stored) : stored, QueryKind(call, unit));
  } else if (rotates) {
    dtype = ComputeDType(stored);
  }
  return rotates && dtype == DType::kF16 ? DType::kF32 : dtype;
}

// What PrepareValues returns for the unit.
static DType ValueDType(const AttentionCall& call, const AttentionUnit& unit) {
  const DType stored = call.layout().v_dtype();
  const bool is_block = unit.row_count() >= kBlockRowsMin || OnTiles(call, unit);
  return is_block ? BlockDType(stored, ValueWeightKind(call, unit)) : stored;
}

static size_t QueryRowBytes(const AttentionCall& call, const AttentionUnit& unit) {
#if defined(QUIRE_SIMD_TILES)
  if (OnByteTiles(call, unit)) {
    return static_cast<size_t>(2 * ByteSteps(call.layout().k_dim()).all());
  }
#endif
  return static_cast<size_t>(call.layout().k_dim()) * WeightBytes(QueryKind(call, unit));
}

static int64_t ScoreSteps(const AttentionCall& call, DType keys) {
  return call.layout().k_dim() / ChainPair(keys);
}

#endif  // QUIRE_KERNELS_CPU_ATTENTION_CALL_INL_H_
