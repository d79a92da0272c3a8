// What all linear layers of a path share: tiles of rows, the plan of a call, its blocks of rows,
// and the end of an output's sum. Included once per path, by linear-inl.h, whose order of sums it
// keeps.

// Rows of one tile: with these the accumulators of a tile fill the registers but for the operands.
#if defined(QUIRE_SIMD_AVX512)
constexpr int kMaxTileRows = 12;
#elif defined(QUIRE_SIMD_AVX2) || defined(QUIRE_SIMD_NEON)
constexpr int kMaxTileRows = 6;
#else
constexpr int kMaxTileRows = 4;
#endif
// Vectors of outputs per tile. The registers of AVX2 and NEON hold half as many vectors: a full
// tile takes one vector at a time.
template <int kRows>
constexpr int kTileVectors =
#if defined(QUIRE_SIMD_AVX2) || defined(QUIRE_SIMD_NEON)
    kRows > kMaxTileRows / 2 ? 1 :
#endif
                             kOutputBlock / kLanes;

// Tiles of rows that go over the same widened weights: 120 rows of 1024 inputs take half of a 1 MiB
// L2.
constexpr int64_t kMaxBlockTiles = 120 / kMaxTileRows;
// Output blocks whose sums are kept while the rows stay in L2 with one block of inputs.
constexpr int64_t kGroupBlocks = 8;
// The part of x that stays in L2 beside the weights.
constexpr int64_t kResidentBytes = int64_t{512} << 10;
// From this number of tiles on, widening once into a panel is cheaper than widening in each tile.
constexpr int64_t kPanelTiles = 3;
// Distance of the prefetch when weights are read once: more than the latency of memory at one
// thread's share of its speed.
constexpr int64_t kStreamAhead = 4096;

// A row of x of one input block: the odd number of lines keeps rows out of each other's cache sets.
constexpr int64_t kRowFloats = kMaxInputBlock + 16;
constexpr int64_t kPanelFloats = kMaxInputBlock * kOutputBlock;
constexpr int64_t kSumFloats = kMaxBlockTiles * kMaxTileRows * kGroupBlocks * kOutputBlock;
constexpr int64_t kWorkerFloats = kPanelFloats + kSumFloats;

// -------------------------------------------------------------------------------- forms of weights
// How one step of a chain reads weights: kInputs inputs of kOutputBlock outputs. `x` is a row at
// the step's first input.

struct F32Loads {
  using Element = float;
  QUIRE_INLINE VF LoadAt(const float* w) { return Load(w); }
};
struct F16Loads {
  using Element = uint16_t;
  QUIRE_INLINE VF LoadAt(const uint16_t* w) { return LoadF16(w); }
};
template <class Loads>
struct SingleWeights : Loads {
  using X = float;
  static constexpr int kInputs = 1;
  using Vector = VF;
  QUIRE_INLINE VF Step(VF sum, Vector w, const float* x) { return Fma(w, Set1(x[0]), sum); }
  QUIRE_INLINE VF LastStep(VF sum, Vector, const float*) { return sum; }
};
using F32Weights = SingleWeights<F32Loads>;
using F16Weights = SingleWeights<F16Loads>;

struct WidePair {
  VF even, odd;
};
#if defined(QUIRE_SIMD_BF16)
QUIRE_INLINE WidePair LoadWidePair(const uint16_t* p) {
  const __m512i bits = _mm512_loadu_si512(p);
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xFFFF0000U));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(bits, 16)),
          _mm512_castsi512_ps(_mm512_and_si512(bits, high))};
}
#else
QUIRE_INLINE WidePair LoadWidePair(const uint16_t* p) {
  const VPair pair = LoadPair(p);
  return {pair.even, pair.odd};
}
#endif

// bfloat16 weights, products singly.
struct BF16Weights {
  using Element = uint16_t;
  using X = float;
  static constexpr int kInputs = 2;
  using Vector = WidePair;
  QUIRE_INLINE Vector LoadAt(const uint16_t* w) { return LoadWidePair(w); }
  QUIRE_INLINE VF Step(VF sum, Vector w, const float* x) {
    return Fma(w.odd, Set1(x[1]), Fma(w.even, Set1(x[0]), sum));
  }
  QUIRE_INLINE VF LastStep(VF sum, Vector w, const float* x) {
    return Fma(w.even, Set1(x[0]), sum);
  }
};

#if defined(QUIRE_SIMD_BF16)
// bfloat16 weights and rows, products in pairs. An odd last input has a zero beside it in both.
struct BF16PairWeights {
  using Element = uint16_t;
  using X = uint16_t;
  static constexpr int kInputs = 2;
  using Vector = VPair;
  QUIRE_INLINE Vector LoadAt(const uint16_t* w) { return LoadPair(w); }
  QUIRE_INLINE VF Step(VF sum, Vector w, const uint16_t* x) {
    QPair pair;
    __builtin_memcpy(&pair, x, sizeof(pair));
    return DotPair(sum, w, pair);
  }
  QUIRE_INLINE VF LastStep(VF sum, Vector w, const uint16_t* x) { return Step(sum, w, x); }
};
#endif

// ---------------------------------------------------------------------------------------- one tile

// One tile of rows against one block of outputs and of inputs.
struct Tile {
  const void* w;   // packed, at the first input
  const float* x;  // rows kRowFloats apart
  int64_t inputs;
  float* sums;  // row stride sum_stride; 32 outputs
  int64_t sum_stride;
  bool first;  // the first block of inputs: sums are set, else added to
  // Whether the inputs are the first and the last ones of their block. Between its parts the chains
  // lie in `chains`, [row][kOutputBlock].
  bool begins, ends;
  float* chains;
  const char* ahead;  // what to prefetch, ahead_step bytes on per step
  int64_t ahead_step;
};

// The chains of some outputs of a tile: as the part before has left them, or zeros.
template <int kRows, int kVectors>
QUIRE_INLINE void BeginChains(const Tile& tile, int64_t output, VF (&sum)[kRows][kVectors]) {
  QUIRE_UNROLL
  for (int r = 0; r < kRows; ++r) {
    QUIRE_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      sum[r][v] = Zero();
      if (!tile.begins) sum[r][v] = Load(tile.chains + r * kOutputBlock + output + v * kLanes);
    }
  }
}

// Into the sums at the end of a block of inputs, else where the next part finds them.
template <int kRows, int kVectors>
QUIRE_INLINE void EndChains(const Tile& tile, int64_t output, const VF (&sum)[kRows][kVectors]) {
  QUIRE_UNROLL
  for (int r = 0; r < kRows; ++r) {
    QUIRE_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      if (!tile.ends) {
        Store(tile.chains + r * kOutputBlock + output + v * kLanes, sum[r][v]);
        continue;
      }
      float* const out = tile.sums + r * tile.sum_stride + output + v * kLanes;
      Store(out, tile.first ? sum[r][v] : Add(Load(out), sum[r][v]));
    }
  }
}

template <class W, int kRows>
static void RunTile(const Tile& tile) {
  constexpr int kVectors = kTileVectors<kRows>;
  constexpr int64_t kXStride =
      kRowFloats * static_cast<int64_t>(sizeof(float) / sizeof(typename W::X));
  const int64_t steps = tile.inputs / W::kInputs;
  const char* ahead = tile.ahead;
  int64_t ahead_step = tile.ahead_step;
  for (int64_t output = 0; output < kOutputBlock; output += kVectors * kLanes) {
    const auto* w = static_cast<const typename W::Element*>(tile.w) + output * W::kInputs;
    const auto* x = reinterpret_cast<const typename W::X*>(tile.x);
    VF sum[kRows][kVectors];
    BeginChains(tile, output, sum);
    for (int64_t step = 0; step < steps; ++step) {
      PrefetchL2(ahead);
      PrefetchL2(ahead + 64);
      ahead += ahead_step;
      typename W::Vector weights[kVectors];
      QUIRE_UNROLL
      for (int v = 0; v < kVectors; ++v) weights[v] = W::LoadAt(w + v * kLanes * W::kInputs);
      QUIRE_UNROLL
      for (int r = 0; r < kRows; ++r) {
        QUIRE_UNROLL
        for (int v = 0; v < kVectors; ++v) {
          sum[r][v] = W::Step(sum[r][v], weights[v], x + r * kXStride);
        }
      }
      w += kOutputBlock * W::kInputs;
      x += W::kInputs;
    }
    if (tile.inputs % W::kInputs != 0) {
      QUIRE_UNROLL
      for (int r = 0; r < kRows; ++r) {
        QUIRE_UNROLL
        for (int v = 0; v < kVectors; ++v) {
          sum[r][v] =
              W::LastStep(sum[r][v], W::LoadAt(w + v * kLanes * W::kInputs), x + r * kXStride);
        }
      }
    }
    EndChains(tile, output, sum);
    ahead_step = 0;  // a second pass over the same inputs finds them there
  }
}

using TileFunction = void (*)(const Tile&);

// The functions for 1, 2, ... rows.
template <class W>
struct TileFunctions {
#if defined(QUIRE_SIMD_AVX512)
  static constexpr TileFunction kFor[kMaxTileRows] = {
      RunTile<W, 1>, RunTile<W, 2>, RunTile<W, 3>, RunTile<W, 4>,  RunTile<W, 5>,  RunTile<W, 6>,
      RunTile<W, 7>, RunTile<W, 8>, RunTile<W, 9>, RunTile<W, 10>, RunTile<W, 11>, RunTile<W, 12>};
#elif defined(QUIRE_SIMD_AVX2) || defined(QUIRE_SIMD_NEON)
  static constexpr TileFunction kFor[kMaxTileRows] = {RunTile<W, 1>, RunTile<W, 2>, RunTile<W, 3>,
                                                      RunTile<W, 4>, RunTile<W, 5>, RunTile<W, 6>};
#else
  static constexpr TileFunction kFor[kMaxTileRows] = {RunTile<W, 1>, RunTile<W, 2>, RunTile<W, 3>,
                                                      RunTile<W, 4>};
#endif
};

#if defined(QUIRE_SIMD_TILES)
#include "kernels/cpu/linear_chunks-inl.h"
#endif

// ----------------------------------------------------------------------------------- rows in lanes

// See linear_lanes-inl.h.
#if defined(QUIRE_SIMD_AVX2)
constexpr int64_t kLeastRowsInLanes = 13;
#else
constexpr int64_t kLeastRowsInLanes = kLanes + 1;  // none: the registers are many, or narrow, or
                                                   // it was not measured (NEON)
#endif
constexpr int64_t kLaneBlockFloats = kMaxInputBlock * kLanes;  // of x
constexpr int64_t kLaneSums = kOutputBlock * kLanes;

QUIRE_INLINE bool RowsLieInLanes(DType dtype, int64_t row_count) {
  return dtype == DType::kBF16 && row_count >= kLeastRowsInLanes && row_count <= kLanes;
}

// ---------------------------------------------------------------------------- the plan of one call

struct LinearPlan {
  const LinearArgs* args;
  const TileFunction* direct;  // on the packed weights
  bool codes;                  // the weights are codes: linear_widened-inl.h
  bool pairs;                  // x is stored as bfloat16 for dot products of pairs
  bool lanes;                  // linear_lanes-inl.h
  int64_t input_block;
  int64_t input_blocks;
  int64_t tiles;  // of all rows
  int64_t row_blocks;
  int64_t output_blocks;
  int64_t chunk_blocks;  // output blocks of one task
  int64_t chunks;
  bool along_outputs;     // LinearTaskAt
  float* x;               // [input block][row][kRowFloats], or of lanes
  float* worker_scratch;  // kWorkerFloats each
};

QUIRE_INLINE int64_t CeilDivide(int64_t a, int64_t b) { return (a + b - 1) / b; }

QUIRE_INLINE int64_t InputsOfBlock(const LinearPlan& plan, int64_t block) {
  const int64_t begin = block * plan.input_block;
  const int64_t left = plan.args->w.k - begin;
  return left < plan.input_block ? left : plan.input_block;
}

// Whether the sums are those of the tile unit.
QUIRE_INLINE bool InTileOrder([[maybe_unused]] const LinearArgs& args) {
#if defined(QUIRE_SIMD_TILES)
  return args.w.dtype == DType::kBF16 && args.x_rounding == DType::kBF16;
#else
  return false;
#endif
}

// Whether codes become pairs of bfloat16, else float32 numbers.
QUIRE_INLINE bool WidensToPairs([[maybe_unused]] const LinearArgs& args) {
#if defined(QUIRE_SIMD_BF16) || defined(QUIRE_SIMD_TILES)
  return args.w.dtype == DType::kBF16 && args.x_rounding == DType::kBF16;
#else
  return false;
#endif
}

static LinearPlan MakeLinearPlan(const LinearArgs& args, ParallelRunner& runner) {
  LinearPlan plan{};
  plan.args = &args;
  plan.direct = args.w.dtype == DType::kF32   ? TileFunctions<F32Weights>::kFor
                : args.w.dtype == DType::kF16 ? TileFunctions<F16Weights>::kFor
                                              : TileFunctions<BF16Weights>::kFor;
#if defined(QUIRE_SIMD_BF16)
  if (args.w.dtype == DType::kBF16 && args.x_rounding == DType::kBF16) {
    plan.direct = TileFunctions<BF16PairWeights>::kFor;
    plan.pairs = true;
  }
#endif
#if defined(QUIRE_SIMD_TILES)
  if (InTileOrder(args)) plan.direct = kFewRowFunctions;
#endif
  plan.codes = args.w.IsCodes();
  if (plan.codes && !WidensToPairs(args)) plan.direct = TileFunctions<F32Weights>::kFor;
  plan.input_block = InputBlockSize(args.w.k);
  plan.input_blocks = CeilDivide(args.w.k, plan.input_block);
  plan.tiles = CeilDivide(args.row_count, kMaxTileRows);
  plan.row_blocks = CeilDivide(plan.tiles, kMaxBlockTiles);
  plan.output_blocks = OutputBlocks(args.w.n);
  plan.chunk_blocks = BlocksOfTask(plan.output_blocks, plan.row_blocks, runner.worker_count(),
                                   plan.row_blocks > 1 ? kGroupBlocks : plan.output_blocks);
  plan.chunks = CeilDivide(plan.output_blocks, plan.chunk_blocks);
  plan.along_outputs = runner.numa_nodes() != nullptr;
  plan.lanes = !plan.pairs && !plan.codes && RowsLieInLanes(args.w.dtype, args.row_count);
  plan.x = static_cast<float*>(args.scratch);
  plan.worker_scratch =
      plan.x + plan.input_blocks * (plan.lanes ? kLaneBlockFloats : args.row_count * kRowFloats);
  return plan;
}

// --------------------------------------------------------------------------------------- rows of x

QUIRE_INLINE VF RoundRow(const LinearArgs& args, VF x) {
  if (args.x_rounding != DType::kBF16) return x;
  return InTileOrder(args) ? RoundForDots(x) : RoundToBF16(x);
}

// kLanes inputs of a row from `input` on: where they lie, or a copy in the order of the weights and
// with zeros after the last one. `count`: of inputs that there are.
QUIRE_INLINE const float* InputsAt(const LinearArgs& args, int64_t row, int64_t input,
                                   int64_t count, float* copy) {
  const float* const x = args.x + row * args.x_stride;
  const int32_t* const order = args.w.input_order;
  if (order == nullptr && count >= kLanes) return x + input;
  for (int64_t i = 0; i < kLanes; ++i) {
    copy[i] = i >= count ? 0.0F : x[order == nullptr ? input + i : order[input + i]];
  }
  return copy;
}

// Rows [first, first + count) into scratch, rounded if asked. After the last input follow zeros up
// to a whole vector.
static void PackRows(const LinearPlan& plan, int64_t first, int64_t count) {
  const LinearArgs& args = *plan.args;
  for (int64_t block = 0; block < plan.input_blocks; ++block) {
    const int64_t inputs = InputsOfBlock(plan, block);
    for (int64_t row = first; row < first + count; ++row) {
      float* const to = plan.x + (block * args.row_count + row) * kRowFloats;
      for (int64_t i = 0; i < inputs; i += kLanes) {
        float copy[kLanes];
        const VF v = Load(InputsAt(args, row, block * plan.input_block + i, inputs - i, copy));
        if (plan.pairs) {
          StoreBF16ForDots(reinterpret_cast<uint16_t*>(to) + i, v);
        } else {
          Store(to + i, RoundRow(args, v));
        }
      }
    }
  }
}

constexpr int64_t kRowsPerPackTask = 8;

static void PackRowsTask(void* context, int64_t index, int) {
  const ScopedFloatEnvironment environment;
  const auto& plan = *static_cast<const LinearPlan*>(context);
  const int64_t first = index * kRowsPerPackTask;
  const int64_t left = plan.args->row_count - first;
  PackRows(plan, first, left < kRowsPerPackTask ? left : kRowsPerPackTask);
}

// ------------------------------------------------------------------------------ the work of a task

// Weights of one block of outputs and of inputs in float32, [input][32].
static void WidenPanel(DType dtype, const uint16_t* w, int64_t inputs, float* panel) {
  if (dtype == DType::kF16) {
    for (int64_t i = 0; i < inputs * kOutputBlock; i += kLanes) Store(panel + i, LoadF16(w + i));
    return;
  }
  for (int64_t i = 0; i < inputs; i += 2) {
    for (int64_t output = 0; output < kOutputBlock; output += kLanes) {
      const WidePair pair = LoadWidePair(w + i * kOutputBlock + 2 * output);
      Store(panel + i * kOutputBlock + output, pair.even);
      Store(panel + (i + 1) * kOutputBlock + output, pair.odd);
    }
  }
}

// Tiles [begin, end) of the plan. All tiles of a plan are as equal as can be: a small last one
// would run at a fraction of the speed.
struct RowBlock {
  int64_t begin;
  int64_t end;
  int64_t first_row;
  int64_t row_count;
  int64_t tiles() const { return end - begin; }
};

QUIRE_INLINE int64_t FirstRowOfTile(const LinearPlan& plan, int64_t tile) {
  return plan.args->row_count * tile / plan.tiles;
}

QUIRE_INLINE RowBlock RowBlockAt(const LinearPlan& plan, int64_t index) {
  const int64_t begin = plan.tiles * index / plan.row_blocks;
  const int64_t end = plan.tiles * (index + 1) / plan.row_blocks;
  const int64_t first_row = FirstRowOfTile(plan, begin);
  return {begin, end, first_row, FirstRowOfTile(plan, end) - first_row};
}

QUIRE_INLINE const char* PackedAt(const LinearPlan& plan, int64_t output_block,
                                  int64_t input_block) {
  const PackedLinear& w = plan.args->w;
  if (w.blocks) return static_cast<const char*>(w.data);  // read strip by strip
  if (plan.codes) {
    return static_cast<const char*>(w.data) + output_block * PackedFloat8BlockBytes(w.k) +
           input_block * plan.input_block * kOutputBlock;
  }
  const int64_t element = output_block * PackedBlockElements(w.dtype, w.k) +
                          input_block * plan.input_block * kOutputBlock;
  return static_cast<const char*>(w.data) + element * (w.dtype == DType::kF32 ? 4 : 2);
}

// All rows of a block against one block of outputs and of inputs. `next` is the block of weights
// that comes after.
static void RunTiles(const LinearPlan& plan, const RowBlock& rows, int64_t output_block,
                     int64_t input_block, const char* next, float* panel, float* sums) {
  const PackedLinear& w = plan.args->w;
  const char* const packed = PackedAt(plan, output_block, input_block);
  const int64_t inputs = InputsOfBlock(plan, input_block);
  const int64_t element_bytes = w.dtype == DType::kF32 ? 4 : 2;
  const int64_t packed_bytes = inputs * kOutputBlock * element_bytes;
  const bool widen = w.dtype != DType::kF32 && !plan.pairs && rows.tiles() >= kPanelTiles;
  if (widen) WidenPanel(w.dtype, reinterpret_cast<const uint16_t*>(packed), inputs, panel);
  const TileFunction* const functions = widen ? TileFunctions<F32Weights>::kFor : plan.direct;

  Tile tile{};
  tile.w = widen ? static_cast<const void*>(panel) : packed;
  tile.inputs = inputs;
  tile.sum_stride = kGroupBlocks * kOutputBlock;
  tile.first = input_block == 0;
  tile.begins = tile.ends = true;
  const int64_t steps = CeilDivide(inputs, w.dtype == DType::kBF16 && !widen ? 2 : 1);
  for (int64_t t = rows.begin; t < rows.end; ++t) {
    const int64_t row = FirstRowOfTile(plan, t);
    const int64_t count = FirstRowOfTile(plan, t + 1) - row;
    tile.x = plan.x + (input_block * plan.args->row_count + row) * kRowFloats;
    tile.sums = sums + (row - rows.first_row) * tile.sum_stride;
    if (rows.tiles() == 1) {  // weights are read once: their own continuation
      tile.ahead = packed + kStreamAhead;
      tile.ahead_step = CeilDivide(packed_bytes, steps);
    } else {  // spread over all tiles, so that memory is never waited for
      tile.ahead = next + packed_bytes * (t - rows.begin) / rows.tiles();
      tile.ahead_step = CeilDivide(packed_bytes, rows.tiles() * steps);
    }
    functions[count - 1](tile);
  }
}

// The sums of one row and block of outputs, bias added, into y.
static void FinishOutputs(const LinearArgs& args, int64_t row, int64_t output, const float* sums) {
  float* const y = args.y + row * args.y_stride + output;
  const float* const bias = args.w.bias != nullptr ? args.w.bias + output : nullptr;
  const int64_t left = args.w.n - output;
  const int64_t count = left < kOutputBlock ? left : kOutputBlock;
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    VF v = Load(sums + i);
    if (bias != nullptr) v = Add(v, Load(bias + i));
    Store(y + i, args.accumulate ? Add(Load(y + i), v) : v);
  }
  for (; i < count; ++i) {
    float v = sums[i];
    if (bias != nullptr) v += bias[i];
    y[i] = args.accumulate ? y[i] + v : v;
  }
}

// Below this, waking the other threads costs more than a copy of the rows.
constexpr int64_t kMinParallelElements = int64_t{1} << 15;
