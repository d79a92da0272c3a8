// Linear layers of bfloat16 by the tile unit, with the bits of linear_chunks-inl.h. Packed weights
// are tiles of columns as they lie: 16 pairs of 16 outputs, 128 bytes apart. Included inside a
// path's namespace and target region, by linear-inl.h.
#ifndef QUIRE_KERNELS_CPU_LINEAR_TILES_INL_H_
#define QUIRE_KERNELS_CPU_LINEAR_TILES_INL_H_

constexpr int64_t kTileElements = kTileRows * kTileInputs;      // of x
constexpr int64_t kChunkElements = kTileInputs * kOutputBlock;  // of weights: two tiles
constexpr int64_t kSumsOfTile = kTileRows * kLanes;

// ------------------------------------------------------------------------------------------- tiles

// Rows of a task, in tiles: with 2048 inputs they are half of an L2 of 2 MiB.
constexpr int64_t kTaskTiles = 16;
// Chunks of which the rows of a task stay in L2, and those whose weights stay in L1 while all of
// the task's rows meet them (32 KiB).
constexpr int64_t kChunksInL2 = 64;
constexpr int64_t kChunksInL1 = 16;

// Sums, then weights that do not lie in memory as tiles: those of a last chunk, or of codes.
constexpr int64_t kTileWorkerFloats =
    kTaskTiles * kGroupBlocks * 2 * kSumsOfTile + kChunksInL1 * kChunkElements / 2;

struct TilePlan {
  const LinearArgs* args;
  int64_t chunks;     // of inputs, the last one may be filled up
  int64_t row_tiles;  // of all rows
  int64_t row_tasks;
  int64_t output_blocks;
  int64_t task_blocks;  // output blocks of one task
  int64_t output_tasks;
  bool along_outputs;     // LinearTaskAt
  uint16_t* x;            // [row tile][chunk][16 rows][32]
  float* worker_scratch;  // kWorkerFloats each
};

QUIRE_INLINE int64_t TileRowFloats(int64_t row_count, int64_t k) {
  return CeilDivide(row_count, kTileRows) * CeilDivide(k, kTileInputs) * kTileElements / 2;
}

// The rows of a task and a block of outputs, in a part of the inputs.
struct TileBlock {
  const uint16_t* x;  // at the first row tile and chunk
  int64_t x_stride;   // elements from a row tile to the next
  const uint16_t* w;
  int64_t row_tiles;
  int64_t chunks;
  float* sums;  // of the first row tile: two tiles; row tiles are sum_stride apart
  int64_t sum_stride;
  bool first;         // sums begin at zero, else go on
  const char* ahead;  // what to prefetch: as many bytes as there are weights
};

// Asks for lines [begin, end) of `lines`.
template <int kBegin, int kEnd>
QUIRE_INLINE void AskForLines(const char* lines) {
  QUIRE_UNROLL
  for (int line = kBegin; line < kEnd; ++line) PrefetchL2(lines + 64 * line);
}

// Two row tiles against all of the block's weights. kLines: to prefetch per chunk.
template <int kLines>
static void RunTwoRowTiles(TileUnit& unit, const TileBlock& block, int64_t row_tile,
                           const char* ahead) {
  constexpr int64_t kWeightStride = 2 * kTileRowBytes;
  const uint16_t* x0 = block.x + row_tile * block.x_stride;
  const uint16_t* x1 = x0 + block.x_stride;
  const uint16_t* w = block.w;
  float* const sums0 = block.sums + row_tile * block.sum_stride;
  float* const sums1 = sums0 + block.sum_stride;
  const int64_t chunks = block.chunks;
  if (block.first) {
    unit.Clear<0>();
    unit.Clear<1>();
    unit.Clear<2>();
    unit.Clear<3>();
  } else {
    unit.ReadOnce<0>(sums0, kTileRowBytes);
    unit.ReadOnce<1>(sums0 + kSumsOfTile, kTileRowBytes);
    unit.ReadOnce<2>(sums1, kTileRowBytes);
    unit.ReadOnce<3>(sums1 + kSumsOfTile, kTileRowBytes);
  }
  // Loads and prefetches come evenly between the products: in a lump they would hold up the loads
  // behind them.
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    unit.Read<6>(w, kWeightStride);
    AskForLines<0, kLines / 4>(ahead);
    unit.ReadOnce<4>(x0, kTileRowBytes);
    AskForLines<kLines / 4, kLines / 2>(ahead);
    unit.Dot<0, 4, 6>();
    unit.Read<7>(w + 2 * kLanes, kWeightStride);
    AskForLines<kLines / 2, kLines * 3 / 4>(ahead);
    unit.Dot<1, 4, 7>();
    unit.ReadOnce<5>(x1, kTileRowBytes);
    AskForLines<kLines * 3 / 4, kLines>(ahead);
    unit.Dot<2, 5, 6>();
    unit.Dot<3, 5, 7>();
    x0 += kTileElements;
    x1 += kTileElements;
    w += kChunkElements;
    ahead += 64 * kLines;
  }
  unit.Write<0>(sums0, kTileRowBytes);
  unit.Write<1>(sums0 + kSumsOfTile, kTileRowBytes);
  unit.Write<2>(sums1, kTileRowBytes);
  unit.Write<3>(sums1 + kSumsOfTile, kTileRowBytes);
}

// The same for one row tile.
template <int kLines>
static void RunOneRowTile(TileUnit& unit, const TileBlock& block, int64_t row_tile,
                          const char* ahead) {
  constexpr int64_t kWeightStride = 2 * kTileRowBytes;
  const uint16_t* x = block.x + row_tile * block.x_stride;
  const uint16_t* w = block.w;
  float* const sums = block.sums + row_tile * block.sum_stride;
  if (block.first) {
    unit.Clear<0>();
    unit.Clear<1>();
  } else {
    unit.Read<0>(sums, kTileRowBytes);
    unit.Read<1>(sums + kSumsOfTile, kTileRowBytes);
  }
  for (int64_t chunk = 0; chunk < block.chunks; ++chunk) {
    unit.Read<4>(x, kTileRowBytes);
    unit.Read<6>(w, kWeightStride);
    AskForLines<0, kLines / 2>(ahead);
    unit.Dot<0, 4, 6>();
    unit.Read<7>(w + 2 * kLanes, kWeightStride);
    AskForLines<kLines / 2, kLines>(ahead);
    unit.Dot<1, 4, 7>();
    x += kTileElements;
    w += kChunkElements;
    ahead += 64 * kLines;
  }
  unit.Write<0>(sums, kTileRowBytes);
  unit.Write<1>(sums + kSumsOfTile, kTileRowBytes);
}

template <int kCount>
struct Lines {
  static constexpr int kValue = kCount;
};

// All of a block: what is read after it is shared out among its pairs of row tiles.
static void RunTileBlock(TileUnit& unit, const TileBlock& block) {
  constexpr int kLinesOfChunk = kChunkElements * 2 / 64;
  const int64_t pairs = block.row_tiles / 2;
  for (int64_t pair = 0; pair < pairs; ++pair) {
    const auto run = [&](auto lines) {
      constexpr int kLines = decltype(lines)::kValue;
      RunTwoRowTiles<kLines>(unit, block, 2 * pair,
                             block.ahead + pair * block.chunks * 64 * kLines);
    };
    if (pairs >= 8) {
      run(Lines<kLinesOfChunk / 8>());
    } else if (pairs >= 4) {
      run(Lines<kLinesOfChunk / 4>());
    } else if (pairs >= 2) {
      run(Lines<kLinesOfChunk / 2>());
    } else {
      run(Lines<kLinesOfChunk>());
    }
  }
  if (block.row_tiles % 2 == 0) return;
  if (pairs > 0) {
    RunOneRowTile<0>(unit, block, block.row_tiles - 1, block.ahead);
  } else {
    RunOneRowTile<kLinesOfChunk>(unit, block, 0, block.ahead);
  }
}

// ---------------------------------------------------------------------------------------- one call

// Rows and outputs [begin, end) of a task.
struct TileTask {
  int64_t first_tile;  // of the rows
  int64_t row_tiles;
  int64_t begin;  // output blocks
  int64_t end;
};

// Pairs of row tiles stay together.
QUIRE_INLINE int64_t FirstTileOfTask(const TilePlan& plan, int64_t row_task) {
  const int64_t first = CeilDivide(plan.row_tiles, 2) * row_task / plan.row_tasks * 2;
  return first < plan.row_tiles ? first : plan.row_tiles;
}

static TileTask TileTaskAt(const TilePlan& plan, int64_t index) {
  const LinearTaskPlace place =
      LinearTaskAt(index, plan.row_tasks, plan.output_tasks, plan.along_outputs);
  const int64_t first = FirstTileOfTask(plan, place.rows);
  const int64_t begin = place.outputs * plan.task_blocks;
  const int64_t end = begin + plan.task_blocks;
  return {first, FirstTileOfTask(plan, place.rows + 1) - first, begin,
          end < plan.output_blocks ? end : plan.output_blocks};
}

QUIRE_INLINE bool HasCodes(const TilePlan& plan) { return plan.args->w.IsCodes(); }

QUIRE_INLINE const char* WeightChunk(const TilePlan& plan, int64_t output_block, int64_t chunk) {
  const PackedLinear& w = plan.args->w;
  if (w.blocks) return static_cast<const char*>(w.data);  // read strip by strip
  const int64_t element =
      output_block * PackedBlockElements(DType::kBF16, w.k) + chunk * kChunkElements;
  return static_cast<const char*>(w.data) + element * (HasCodes(plan) ? 1 : 2);
}

// The inputs of the last chunk, if it is not whole, else 0.
QUIRE_INLINE int64_t RestInputs(const TilePlan& plan) { return plan.args->w.k % kTileInputs; }

// A copy of an output block's last chunk that is not whole, zeros after its inputs.
static void CopyRest(const TilePlan& plan, int64_t output_block, uint16_t* to) {
  const int64_t elements = PackedInputs(DType::kBF16, RestInputs(plan)) * kOutputBlock;
  __builtin_memset(to, 0, kChunkElements * sizeof(uint16_t));
  __builtin_memcpy(to, WeightChunk(plan, output_block, plan.chunks - 1),
                   static_cast<size_t>(elements) * sizeof(uint16_t));
}

// Chunks [begin, end) of codes, widened; zeros after the inputs of the last one.
static void WidenChunks(const TilePlan& plan, int64_t output_block, int64_t begin, int64_t end,
                        bool streams, uint16_t* to) {
  const int64_t first = begin * kTileInputs;
  const int64_t left = plan.args->w.k - first;
  const int64_t all = (end - begin) * kTileInputs;
  if (left < all) __builtin_memset(to + (all - kTileInputs) * kOutputBlock, 0, kChunkElements * 2);
  WidenCodes<PairPanel>(plan.args->w, output_block, first, left < all ? left : all, streams, to);
}

// Chunks [begin, end) of an output block.
static void RunChunks(TileUnit& unit, const TilePlan& plan, const TileTask& task,
                      int64_t output_block, int64_t begin, int64_t end, const char* next,
                      float* sums, uint16_t* copy) {
  const bool has_rest = !HasCodes(plan) && end == plan.chunks && RestInputs(plan) != 0;
  const bool once = task.row_tiles <= 2;  // weights are read once: their own continuation
  TileBlock block{};
  block.x_stride = plan.chunks * kTileElements;
  block.x = plan.x + task.first_tile * block.x_stride + begin * kTileElements;
  const char* const packed = WeightChunk(plan, output_block, begin);
  block.w = HasCodes(plan) ? copy : reinterpret_cast<const uint16_t*>(packed);
  block.row_tiles = task.row_tiles;
  block.chunks = end - begin - (has_rest ? 1 : 0);
  block.sums = sums;
  block.sum_stride = 2 * kSumsOfTile;
  block.first = begin == 0;
  block.ahead = once ? packed + kStreamAhead : next;
  if (plan.args->w.blocks) block.ahead = reinterpret_cast<const char*>(copy);
  if (HasCodes(plan)) WidenChunks(plan, output_block, begin, end, once, copy);
  if (block.chunks > 0) RunTileBlock(unit, block);
  if (!has_rest) return;
  CopyRest(plan, output_block, copy);
  block.x += block.chunks * kTileElements;
  block.first = block.first && block.chunks == 0;
  block.w = copy;
  block.chunks = 1;
  RunTileBlock(unit, block);
}

// Sums of the task's rows and of a group of output blocks, into y.
static void FinishGroup(const TilePlan& plan, const TileTask& task, int64_t begin, int64_t end,
                        const float* sums) {
  const int64_t first_row = task.first_tile * kTileRows;
  const int64_t left = plan.args->row_count - first_row;
  const int64_t rows = left < task.row_tiles * kTileRows ? left : task.row_tiles * kTileRows;
  for (int64_t row = 0; row < rows; ++row) {
    const float* from = sums + row / kTileRows * 2 * kSumsOfTile + row % kTileRows * kLanes;
    for (int64_t block = begin; block < end; ++block) {
      float outputs[kOutputBlock];
      Store(outputs, Load(from));
      Store(outputs + kLanes, Load(from + kSumsOfTile));
      FinishOutputs(*plan.args, first_row + row, block * kOutputBlock, outputs);
      from += task.row_tiles * 2 * kSumsOfTile;
    }
  }
}

static void TileProductsTask(void* context, int64_t index, int worker) {
  const ScopedFloatEnvironment environment;
  const auto& plan = *static_cast<const TilePlan*>(context);
  const TileTask task = TileTaskAt(plan, index);
  float* const sums = plan.worker_scratch + worker * kTileWorkerFloats;
  auto* const copy =
      reinterpret_cast<uint16_t*>(sums + kTaskTiles * kGroupBlocks * 2 * kSumsOfTile);
  const bool once = task.row_tiles <= 2;
  const int64_t part = once ? plan.chunks : kChunksInL2;
  const int64_t step = once && !HasCodes(plan) ? plan.chunks : kChunksInL1;
  TileUnit unit({kTileRows, kTilePairs});
  for (int64_t begin = task.begin; begin < task.end; begin += kGroupBlocks) {
    const int64_t end = begin + kGroupBlocks < task.end ? begin + kGroupBlocks : task.end;
    for (int64_t first = 0; first < plan.chunks; first += part) {
      const int64_t last = first + part < plan.chunks ? first + part : plan.chunks;
      for (int64_t block = begin; block < end; ++block) {
        float* const at = sums + (block - begin) * task.row_tiles * 2 * kSumsOfTile;
        for (int64_t chunk = first; chunk < last; chunk += step) {
          const int64_t stop = chunk + step < last ? chunk + step : last;
          const bool ends = stop == last;
          const char* const next = WeightChunk(plan, ends ? block + 1 : block, ends ? first : stop);
          RunChunks(unit, plan, task, block, chunk, stop, next, at, copy);
        }
      }
    }
    FinishGroup(plan, task, begin, end, sums);
  }
}

static int64_t TileScratchFloats(int64_t row_count, int64_t k, int worker_count) {
  return TileRowFloats(row_count, k) + worker_count * kTileWorkerFloats;
}

// Rows of one tile as tiles of `a`, zeros where there is no row or no input.
static void PackTileRows(void* context, int64_t row_tile, int) {
  const ScopedFloatEnvironment environment;
  const auto& plan = *static_cast<const TilePlan*>(context);
  const LinearArgs& args = *plan.args;
  for (int64_t r = 0; r < kTileRows; ++r) {
    const int64_t row = row_tile * kTileRows + r;
    uint16_t* to = plan.x + row_tile * plan.chunks * kTileElements + r * kTileInputs;
    for (int64_t chunk = 0; chunk < plan.chunks; ++chunk, to += kTileElements) {
      for (int64_t i = 0; i < kTileInputs; i += kLanes) {
        const int64_t input = chunk * kTileInputs + i;
        const int64_t left = row < args.row_count ? args.w.k - input : 0;
        float copy[kLanes];
        StoreBF16ForDots(to + i, Load(InputsAt(args, row, input, left, copy)));
      }
    }
  }
}

static void LinearByTiles(const LinearArgs& args, ParallelRunner& runner) {
  TilePlan plan{};
  plan.args = &args;
  plan.chunks = CeilDivide(args.w.k, kTileInputs);
  plan.row_tiles = CeilDivide(args.row_count, kTileRows);
  plan.row_tasks = CeilDivide(plan.row_tiles, kTaskTiles);
  plan.output_blocks = OutputBlocks(args.w.n);
  // As in MakeLinearPlan; whole groups, whose sums are written in long runs.
  constexpr int64_t kTasksPerWorker = 8;
  const int64_t tasks = kTasksPerWorker * runner.worker_count();
  plan.task_blocks = CeilDivide(plan.output_blocks * plan.row_tasks, tasks);
  if (plan.task_blocks > kGroupBlocks) {
    plan.task_blocks = CeilDivide(plan.task_blocks, kGroupBlocks) * kGroupBlocks;
  }
  plan.output_tasks = CeilDivide(plan.output_blocks, plan.task_blocks);
  plan.along_outputs = runner.numa_nodes() != nullptr;
  plan.x = static_cast<uint16_t*>(args.scratch);
  plan.worker_scratch = static_cast<float*>(args.scratch) + TileRowFloats(args.row_count, args.w.k);
  if (args.row_count * args.w.k < kMinParallelElements) {
    for (int64_t tile = 0; tile < plan.row_tiles; ++tile) PackTileRows(&plan, tile, 0);
  } else {
    runner.Run(plan.row_tiles, PackTileRows, &plan);
  }
  Along(runner).Run(plan.row_tasks * plan.output_tasks, TileProductsTask, &plan);
}

#endif  // QUIRE_KERNELS_CPU_LINEAR_TILES_INL_H_
