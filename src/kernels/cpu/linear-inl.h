// Linear layers. Included once per path, after simd-inl.h; see there.
//
// One output is, per block of inputs, one chain of fma from zero with ascending inputs; then the
// block sums, left to right; then the bias (bfloat16 by tiles: linear_tiles-inl.h). Everything else
// (tiles of rows, chunks of outputs, widened panels) is a choice of order between chains and
// changes no bit: a chain belongs to one row and one output and is never cut.
#include "kernels/cpu/linear_plan-inl.h"
// The parts below use the plan, and each those above it.
// clang-format off
#include "kernels/cpu/linear_panel-inl.h"
#include "kernels/cpu/linear_float8-inl.h"
#include "kernels/cpu/quantised_groups-inl.h"
#include "kernels/cpu/linear_blocks-inl.h"
#include "kernels/cpu/linear_widened-inl.h"
#include "kernels/cpu/linear_lanes-inl.h"
// clang-format on
#if defined(QUIRE_SIMD_TILES)
#include "kernels/cpu/linear_tiles-inl.h"
#endif

// Blocks of inputs go round outside the group of output blocks, so that a block of rows stays in L2
// for the whole group; where all of x stays there, groups of one block read the weights as they lie
// in memory.
static void RunGroup(const LinearPlan& plan, const RowBlock& rows, int64_t begin, int64_t end,
                     float* panel, float* sums) {
  for (int64_t input_block = 0; input_block < plan.input_blocks; ++input_block) {
    for (int64_t block = begin; block < end; ++block) {
      const bool last = block + 1 == end;
      const bool wraps = last && input_block + 1 < plan.input_blocks;
      const char* const next = wraps  ? PackedAt(plan, begin, input_block + 1)
                               : last ? PackedAt(plan, end, 0)
                                      : PackedAt(plan, block + 1, input_block);
      if (plan.lanes) {
        RunLanes(plan, block, input_block, next, sums + (block - begin) * kLaneSums);
      } else if (plan.codes) {
        RunWidened(plan, rows, block, input_block, next, panel,
                   sums + (block - begin) * kOutputBlock);
      } else {
        RunTiles(plan, rows, block, input_block, next, panel,
                 sums + (block - begin) * kOutputBlock);
      }
    }
  }
  if (plan.lanes) {
    for (int64_t block = begin; block < end; ++block) {
      FinishLanes(*plan.args, block * kOutputBlock, sums + (block - begin) * kLaneSums);
    }
    return;
  }
  for (int64_t row = 0; row < rows.row_count; ++row) {
    for (int64_t block = begin; block < end; ++block) {
      FinishOutputs(*plan.args, rows.first_row + row, block * kOutputBlock,
                    sums + (row * kGroupBlocks + block - begin) * kOutputBlock);
    }
  }
}

static void LinearTask(void* context, int64_t index, int worker) {
  const ScopedFloatEnvironment environment;
  const auto& plan = *static_cast<const LinearPlan*>(context);
  const LinearTaskPlace place =
      LinearTaskAt(index, plan.row_blocks, plan.chunks, plan.along_outputs);
  const RowBlock rows = RowBlockAt(plan, place.rows);
  const int64_t begin = place.outputs * plan.chunk_blocks;
  const int64_t chunk_end = begin + plan.chunk_blocks;
  const int64_t end = chunk_end < plan.output_blocks ? chunk_end : plan.output_blocks;
  const int64_t x_bytes = rows.row_count * plan.args->w.k * (plan.pairs ? 2 : 4);
  const int64_t group = x_bytes <= kResidentBytes ? 1 : kGroupBlocks;
  float* const panel = plan.worker_scratch + worker * kWorkerFloats;
  for (int64_t block = begin; block < end; block += group) {
    const int64_t group_end = block + group < end ? block + group : end;
    RunGroup(plan, rows, block, group_end, panel, panel + kPanelFloats);
  }
}

// Scratch holds the rows of x, padded, then each worker's part.
static size_t LinearScratchBytes(int64_t row_count, int64_t, int64_t k, int worker_count) {
  const int64_t input_blocks = CeilDivide(k, InputBlockSize(k));
  int64_t x_floats = row_count * kRowFloats;
  if (RowsLieInLanes(DType::kBF16, row_count) && x_floats < kLaneBlockFloats) {
    x_floats = kLaneBlockFloats;
  }
  int64_t floats = input_blocks * x_floats + worker_count * kWorkerFloats;
#if defined(QUIRE_SIMD_TILES)
  const int64_t tile_floats = TileScratchFloats(row_count, k, worker_count);
  if (tile_floats > floats) floats = tile_floats;
#endif
  return static_cast<size_t>(floats) * sizeof(float);
}

static void Linear(const LinearArgs& args, ParallelRunner& runner) {
  if (args.row_count == 0) return;
#if defined(QUIRE_SIMD_TILES)
  if (InTileOrder(args) && args.row_count > kFewTileRows) return LinearByTiles(args, runner);
#endif
  LinearPlan plan = MakeLinearPlan(args, runner);
  if (plan.lanes) {
    const ScopedFloatEnvironment environment;
    PackLaneRows(plan);
  } else if (args.row_count * args.w.k < kMinParallelElements) {
    const ScopedFloatEnvironment environment;
    PackRows(plan, 0, args.row_count);
  } else {
    runner.Run(CeilDivide(args.row_count, kRowsPerPackTask), PackRowsTask, &plan);
  }
  Along(runner).Run(plan.row_blocks * plan.chunks, LinearTask, &plan);
}

// ------------------------------------------------------------------------------ packing of weights

static size_t PackedLinearBytes(DType dtype, int64_t n, int64_t k) {
  const int64_t elements = OutputBlocks(n) * PackedBlockElements(dtype, k);
  return static_cast<size_t>(elements * (dtype == DType::kF32 ? 4 : 2));
}

struct PackPlan {
  const void* weights;
  DType from;
  int64_t n, k;
  DType to;
  void* packed;
};

// Sixteen numbers of `from` at `index`, widened.
QUIRE_INLINE VF LoadAs(DType from, const void* data, int64_t index) {
  if (from == DType::kF32) return Load(static_cast<const float*>(data) + index);
  const auto* const bits = static_cast<const uint16_t*>(data) + index;
  return from == DType::kF16 ? LoadF16(bits) : LoadBits16AsHigh(bits);
}

QUIRE_INLINE float LoadOneAs(DType from, const void* data, int64_t index) {
  if (from == DType::kF32) return static_cast<const float*>(data)[index];
  const uint16_t bits = static_cast<const uint16_t*>(data)[index];
  return from == DType::kF16 ? F16ToF32(bits) : Bf16ToF32(bits);
}

QUIRE_INLINE void StoreAs(DType to, void* data, int64_t index, VF v) {
  if (to == DType::kF32) return Store(static_cast<float*>(data) + index, v);
  auto* const bits = static_cast<uint16_t*>(data) + index;
  if (to == DType::kF16) return StoreF16(bits, v);
  StoreBF16(bits, v);
}

// Inputs a task takes at a time: those of 32 outputs stay in L1.
constexpr int64_t kPackInputs = 128;

// Inputs [begin, begin + count) of one output in the packed type; zeros up to a whole vector.
static void ConvertRow(const PackPlan& plan, int64_t output, int64_t begin, int64_t count,
                       void* to) {
  const int64_t base = output * plan.k + begin;
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    StoreAs(plan.to, to, i, LoadAs(plan.from, plan.weights, base + i));
  }
  if (i == count) return;
  float last[kLanes] = {};
  for (int64_t j = i; j < count; ++j) last[j - i] = LoadOneAs(plan.from, plan.weights, base + j);
  StoreAs(plan.to, to, i, Load(last));
}

// Columns of the rows' units (a float32, a float16 or a pair of bfloat16) one after the other.
template <typename Unit>
static void WriteColumns(const void* rows, int64_t row_bytes, int64_t columns, void* packed) {
  auto* to = static_cast<Unit*>(packed);
  for (int64_t i = 0; i < columns; ++i) {
    const char* from = static_cast<const char*>(rows) + i * static_cast<int64_t>(sizeof(Unit));
    for (int64_t r = 0; r < kOutputBlock; ++r) {
      __builtin_memcpy(to + r, from + r * row_bytes, sizeof(Unit));
    }
    to += kOutputBlock;
  }
}

// One block of outputs: rows are read in long runs into a buffer that stays in L1, whose columns
// are written in order.
static void PackTask(void* context, int64_t block, int) {
  const ScopedFloatEnvironment environment;
  const auto& plan = *static_cast<const PackPlan*>(context);
  constexpr int64_t kBufferFloats = kPackInputs + kLanes;  // an odd number of lines, see kRowFloats
  constexpr int64_t kRowBytes = kBufferFloats * static_cast<int64_t>(sizeof(float));
  alignas(64) float rows[kOutputBlock][kBufferFloats] = {};  // outputs from n on stay zero
  const int64_t element_bytes = plan.to == DType::kF32 ? 4 : 2;
  const int64_t packed_inputs = PackedInputs(plan.to, plan.k);
  char* packed = static_cast<char*>(plan.packed) +
                 block * PackedBlockElements(plan.to, plan.k) * element_bytes;
  for (int64_t begin = 0; begin < packed_inputs; begin += kPackInputs) {
    const int64_t left = plan.k - begin;
    const int64_t count = left < kPackInputs ? left : kPackInputs;
    for (int64_t r = 0; r < kOutputBlock && block * kOutputBlock + r < plan.n; ++r) {
      ConvertRow(plan, block * kOutputBlock + r, begin, count, rows[r]);
    }
    const int64_t inputs = PackedInputs(plan.to, count);
    if (plan.to == DType::kF32) WriteColumns<uint32_t>(rows, kRowBytes, inputs, packed);
    if (plan.to == DType::kF16) WriteColumns<uint16_t>(rows, kRowBytes, inputs, packed);
    if (plan.to == DType::kBF16) WriteColumns<uint32_t>(rows, kRowBytes, inputs / 2, packed);
    packed += inputs * kOutputBlock * element_bytes;
  }
}

static void PackLinear(const void* weights, DType from, int64_t n, int64_t k, DType to,
                       void* packed, ParallelRunner& runner) {
  PackPlan plan{weights, from, n, k, to, packed};
  Along(runner).Run(OutputBlocks(n), PackTask, &plan);
}
