// Linear layers with quantised weights. Included once per path, after linear-inl.h; see
// simd-inl.h.
//
// A row is quantised by itself: 32 inputs share a scale. Products inside a group are sums of
// integers, so their order cannot be seen; groups are one chain of fma per output, left to right.
// Tiles of rows and tasks cut between chains and change no bit. All paths give the same bits.

// --------------------------------------------------------------------------------- rows of codes

// What 32 inputs of a row share.
struct RowGroup {
  float scale;            // input = code * scale; NaN where one of them is not finite
  float scaled_sum;       // scale * (sum of all codes)
  int32_t minus_sum;      // - (sum of all codes)
  int32_t minus_half[2];  // of the codes of inputs 0 ... 15 and 16 ... 31
};

// Rows in scratch: codes, one row after the other, then groups. The odd number of lines keeps rows
// out of each other's cache sets.
constexpr int64_t CodeStride(int64_t k) { return (k + 63) / 64 / 2 * 128 + 64; }

struct QuantisedRows {
  int8_t* codes;  // row stride code_stride
  RowGroup* groups;
  int64_t code_stride;
  int64_t group_count;  // of a row
};

static void QuantiseGroup(const float* x, int8_t* codes, RowGroup* group) {
  // Below this 127 / greatest would not be finite.
  constexpr float kLeast = 0x1p-100F;
  const VF first = Load(x);
  const VF second = Load(x + kLanes);
  const VF zero = Zero();
  const VF nothing = Add(Mul(first, zero), Mul(second, zero));  // NaN where one is not finite
  const bool is_finite = ReduceAdd(nothing) == 0.0F;
  const VF magnitude = Max(Max(first, Sub(zero, first)), Max(second, Sub(zero, second)));
  const float greatest = ReduceMax(magnitude);
  if (!is_finite || greatest < kLeast) {
    const float scale = is_finite ? 0.0F : __builtin_nanf("");
    *group = {scale, scale, 0, {0, 0}};
    for (int64_t i = 0; i < kQuantGroup; ++i) codes[i] = 0;
    return;
  }
  const VF inverse = Set1(127.0F / greatest);
  const VF first_codes = RoundToInt(Mul(first, inverse));
  const VF second_codes = RoundToInt(Mul(second, inverse));
  StoreInt8s(codes, first_codes);
  StoreInt8s(codes + kLanes, second_codes);
  const float sums[] = {ReduceAdd(first_codes), ReduceAdd(second_codes)};  // exact
  group->scale = greatest / 127.0F;
  group->scaled_sum = group->scale * (sums[0] + sums[1]);
  group->minus_half[0] = -static_cast<int32_t>(sums[0]);
  group->minus_half[1] = -static_cast<int32_t>(sums[1]);
  group->minus_sum = group->minus_half[0] + group->minus_half[1];
}

// ------------------------------------------------------------------------------------- one tile

// Rows against one strip of outputs.
struct QuantisedTile {
  const std::byte* strip;
  const int8_t* codes;
  const RowGroup* groups;
  int64_t code_stride;
  int64_t group_count;
  bool streams;  // weights come from memory: they are asked for ahead
  StreamPrefetch prefetch;
  float* sums;  // [row][16]
};

template <int kRows>
struct Chains {
  VF sum[kRows];
};

QUIRE_INLINE const RowGroup& RowGroupAt(const QuantisedTile& tile, const WeightGroup& group,
                                        int row) {
  return tile.groups[group.index + row * tile.group_count];
}

// The sums begin with what the offset 2^kBits of the weights' codes makes of the row's.
template <int kRows, int kBits>
QUIRE_INLINE void BeginSums(const QuantisedTile& tile, const WeightGroup& group, VI* sum) {
  QUIRE_UNROLL
  for (int r = 0; r < kRows; ++r) {
    sum[r] =
        kBits == 0 ? SetInts(0) : ShiftInts<kBits>(SetInts(RowGroupAt(tile, group, r).minus_sum));
  }
}

// As BeginSums, where each output has an offset of its own, beside 2^kBits of raised codes.
template <WeightFormat kFormat, int kRows, int kBits>
QUIRE_INLINE void BeginSumsWithZeros(const QuantisedTile& tile, const WeightGroup& group, VI* sum) {
  const VI offsets = ZerosOf<kFormat, kBits>(group);
  QUIRE_UNROLL
  for (int r = 0; r < kRows; ++r) {
    sum[r] = MulInts(SetInts(RowGroupAt(tile, group, r).minus_sum), offsets);
  }
}

// One step of a row's chain: fma(float(sum), scale of the row's group * scale of the weights,
// chain).
QUIRE_INLINE VF ScaleStep(const RowGroup& row, VF scale, VI sum, VF chain) {
  return Fma(SumsToF32(sum), Mul(Set1(row.scale), scale), chain);
}

template <int kRows>
QUIRE_INLINE void ApplyScale(const QuantisedTile& tile, const WeightGroup& group, VF scale,
                             const VI* sum, Chains<kRows>* chains) {
  QUIRE_UNROLL
  for (int r = 0; r < kRows; ++r) {
    chains->sum[r] = ScaleStep(RowGroupAt(tile, group, r), scale, sum[r], chains->sum[r]);
  }
}

// Adds the sums of a group of 8-bit codes, of all rows.
template <int kRows>
QUIRE_INLINE void AddBytes(const QuantisedTile& tile, const WeightGroup& group, VI* sum) {
  const int8_t* const x = tile.codes + group.index * kQuantGroup;
  QUIRE_UNROLL
  for (int quad = 0; quad < 8; ++quad) {
    const SignedCodes w = MakeSigned(LoadBytes(group.codes + quad * 64));
    QUIRE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      sum[r] = DotSigned(sum[r], w, x + r * tile.code_stride + quad * 4);
    }
  }
}

template <WeightFormat kFormat, int kQuad, int kRows>
QUIRE_INLINE void AddNibbleQuad(const QuantisedTile& tile, const WeightGroup& group, VB fifth,
                                VI* sum) {
  const int8_t* const x = tile.codes + group.index * kQuantGroup + kQuad * 4;
  const NibbleQuad quad = NibblesOf<kFormat, kQuad>(group, fifth);
  if constexpr (LayoutOf(kFormat).values != nullptr) {
    const SignedCodes first = MakeSigned(quad.low);
    const SignedCodes second = MakeSigned(quad.high);
    QUIRE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const int8_t* const row = x + r * tile.code_stride;
      sum[r] = DotSigned(DotSigned(sum[r], first, row), second, row + 16);
    }
  } else {
    QUIRE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const int8_t* const row = x + r * tile.code_stride;
      sum[r] = DotUnsigned(DotUnsigned(sum[r], quad.low, row), quad.high, row + 16);
    }
  }
}

// Adds the sums of a group of 4-bit or 5-bit codes, of all rows.
template <WeightFormat kFormat, int kRows>
QUIRE_INLINE void AddNibbles(const QuantisedTile& tile, const WeightGroup& group, VI* sum) {
  const VB fifth = FifthBits<kFormat>(group);
  AddNibbleQuad<kFormat, 0, kRows>(tile, group, fifth, sum);
  AddNibbleQuad<kFormat, 1, kRows>(tile, group, fifth, sum);
  AddNibbleQuad<kFormat, 2, kRows>(tile, group, fifth, sum);
  AddNibbleQuad<kFormat, 3, kRows>(tile, group, fifth, sum);
}

// The second step of formats whose weights have a summand: fma(scale * sum of the row's codes,
// summand, chain).
template <int kRows>
QUIRE_INLINE void AddSummand(const QuantisedTile& tile, const WeightGroup& group, VF summand,
                             Chains<kRows>* chains) {
  QUIRE_UNROLL
  for (int r = 0; r < kRows; ++r) {
    const float row_sum = RowGroupAt(tile, group, r).scaled_sum;
    chains->sum[r] = Fma(Set1(row_sum), summand, chains->sum[r]);
  }
}

// Formats whose groups have one scale.
template <WeightFormat kWeights>
struct PlainWeights {
  static constexpr WeightFormat kFormat = kWeights;
  static constexpr int kMostRows = 12;

  template <int kRows>
  QUIRE_INLINE void Add(const QuantisedTile& tile, const WeightGroup& group,
                        Chains<kRows>* chains) {
    constexpr WeightLayout kLayout = LayoutOf(kFormat);
    constexpr bool kIsSigned = kLayout.codes == CodeBits::kEight || kLayout.values != nullptr;
    constexpr int kBits = kIsSigned ? kRaisedBits : kLayout.offset_bits;
    VI sum[kRows];
    if constexpr (kLayout.scales == BlockScales::kWordWithZero) {
      BeginSumsWithZeros<kFormat, kRows, kBits>(tile, group, sum);
    } else {
      BeginSums<kRows, kBits>(tile, group, sum);
    }
    if constexpr (kLayout.codes == CodeBits::kEight) {
      AddBytes<kRows>(tile, group, sum);
    } else {
      AddNibbles<kFormat, kRows>(tile, group, sum);
    }
    ApplyScale(tile, group, ScaleOf<kFormat>(group), sum, chains);
    if constexpr (HasSummand(kFormat)) {
      AddSummand(tile, group, SummandOf<kFormat>(group), chains);
    }
  }
};

// Formats whose groups have a scale for each half.
template <WeightFormat kWeights>
struct HalvesWeights : HalfGroups<kWeights> {
  using Groups = HalfGroups<kWeights>;
  using Groups::kHasLeasts;
  static constexpr WeightFormat kFormat = kWeights;
  static constexpr WeightLayout kLayout = LayoutOf(kWeights);
  static constexpr int kMostRows = 8;

  template <int kRows, int kQuad>
  QUIRE_INLINE void AddQuad(const QuantisedTile& tile, VB w, const int8_t* x, VI* sum) {
    QUIRE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      sum[r] = DotUnsigned(sum[r], w, x + r * tile.code_stride + kQuad * 4);
    }
  }

  // The integer sums of 16 inputs times their scale.
  template <int kRows, int kHalf>
  QUIRE_INLINE void HalfSums(const QuantisedTile& tile, const WeightGroup& group, VI* sum) {
    const std::byte* const codes = group.codes;
    const int8_t* const x = tile.codes + group.index * kQuantGroup + kHalf * 16;
    QUIRE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const VI minus = SetInts(RowGroupAt(tile, group, r).minus_half[kHalf]);
      sum[r] = kLayout.offset_bits == 0 ? SetInts(0) : ShiftInts<kLayout.offset_bits>(minus);
    }
    const VB pairs = Groups::template PairBits<kHalf>(codes);
    const VB singles = Groups::SingleBits(codes);
    AddQuad<kRows, 0>(tile, Groups::template Codes<kHalf, 0>(codes, pairs, singles), x, sum);
    AddQuad<kRows, 1>(tile, Groups::template Codes<kHalf, 1>(codes, pairs, singles), x, sum);
    AddQuad<kRows, 2>(tile, Groups::template Codes<kHalf, 2>(codes, pairs, singles), x, sum);
    AddQuad<kRows, 3>(tile, Groups::template Codes<kHalf, 3>(codes, pairs, singles), x, sum);
    const VI scale = Groups::template ScaleOfHalf<kHalf>(group);
    QUIRE_UNROLL
    for (int r = 0; r < kRows; ++r) sum[r] = MulInts(sum[r], scale);
  }

  // The second step of formats with a summand per half, whose integers stand for it: fma(float(sum
  // of - t times the row's codes), scale of the row's group * m, chain).
  template <int kRows>
  QUIRE_INLINE void AddLeasts(const QuantisedTile& tile, const WeightGroup& group,
                              Chains<kRows>* chains) {
    const VI first = ShiftIntsRight<4>(LoadUint8s(group.scales));
    const VI second = ShiftIntsRight<4>(LoadUint8s(group.scales + kStripOutputs));
    VI sum[kRows];
    QUIRE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const int32_t* const minus_half = RowGroupAt(tile, group, r).minus_half;
      sum[r] =
          AddInts(MulInts(SetInts(minus_half[0]), first), MulInts(SetInts(minus_half[1]), second));
    }
    ApplyScale(tile, group, LoadF16(group.supers + kStripOutputs), sum, chains);
  }

  template <int kRows>
  QUIRE_INLINE void Add(const QuantisedTile& tile, const WeightGroup& group,
                        Chains<kRows>* chains) {
    VI sum[kRows];
    VI second[kRows];
    HalfSums<kRows, 0>(tile, group, sum);
    HalfSums<kRows, 1>(tile, group, second);
    QUIRE_UNROLL
    for (int r = 0; r < kRows; ++r) sum[r] = AddInts(sum[r], second[r]);
    ApplyScale(tile, group, LoadF16(group.supers), sum, chains);
    if constexpr (kHasLeasts) AddLeasts(tile, group, chains);
  }
};

template <WeightFormat kFormat>
using WeightsOf =
    std::conditional_t<HasHalves(kFormat), HalvesWeights<kFormat>, PlainWeights<kFormat>>;

// Both groups of a pair, or the first alone.
template <class W, int kRows>
QUIRE_INLINE void AddPairOfGroups(const QuantisedTile& tile, int64_t index, const std::byte* pair,
                                  const std::byte* supers, Chains<kRows>* chains) {
  constexpr int64_t kCodeBytes = GroupCodeBytes(W::kFormat);
  constexpr int64_t kScaleBytes = GroupScaleBytes(W::kFormat);
  const std::byte* const codes = pair + 2 * kScaleBytes;
  const auto* const scales_of_block = reinterpret_cast<const uint16_t*>(supers);
  W::template Add<kRows>(tile, {index, codes, pair, scales_of_block}, chains);
  if (index + 1 == tile.group_count) return;
  W::template Add<kRows>(tile, {index + 1, codes + kCodeBytes, pair + kScaleBytes, scales_of_block},
                         chains);
}

template <class W, int kRows>
static void RunQuantisedTile(const QuantisedTile& tile) {
  constexpr int64_t kPairBytes = PairBytes(W::kFormat);
  constexpr int64_t kSuperBytes = SuperScaleBytes(W::kFormat);
  Chains<kRows> chains;
  QUIRE_UNROLL
  for (int r = 0; r < kRows; ++r) chains.sum[r] = Zero();
  const std::byte* at = tile.strip;
  const std::byte* supers = at;
  for (int64_t index = 0; index < tile.group_count; index += 2) {
    if (kSuperBytes > 0 && index % kSuperGroups == 0) {
      supers = at;
      at += kSuperBytes;
    }
    if (tile.streams) FetchAhead(at, kPairBytes, tile.prefetch);
    AddPairOfGroups<W, kRows>(tile, index, at, supers, &chains);
    at += kPairBytes;
  }
  QUIRE_UNROLL
  for (int r = 0; r < kRows; ++r) Store(tile.sums + r * kStripOutputs, chains.sum[r]);
}

// ---------------------------------------------------------------------------- the plan of one call

struct QuantisedPlan {
  const QuantisedLinearArgs* args;
  QuantisedRows rows;
  int64_t block_rows;  // rows that stay in L2 together
  int64_t row_blocks;
  int64_t strips;        // of all parts
  int64_t chunk_strips;  // of one task
  int64_t chunks;
  bool along_outputs;  // LinearTaskAt
};

static size_t QuantisedScratchBytes(int64_t row_count, int64_t k) {
  const int64_t row_bytes =
      CodeStride(k) + k / kQuantGroup * static_cast<int64_t>(sizeof(RowGroup));
  return static_cast<size_t>(row_count * row_bytes);
}

static QuantisedPlan MakeQuantisedPlan(const QuantisedLinearArgs& args, ParallelRunner& runner) {
  QuantisedPlan plan{};
  plan.args = &args;
  const int64_t k = args.parts.front().k;
  plan.rows.code_stride = CodeStride(k);
  plan.rows.group_count = k / kQuantGroup;
  plan.rows.codes = static_cast<int8_t*>(args.scratch);
  plan.rows.groups =
      reinterpret_cast<RowGroup*>(plan.rows.codes + args.row_count * plan.rows.code_stride);
  constexpr int64_t kWholeTiles = 48;  // a multiple of every tile's
  plan.block_rows = kResidentBytes / plan.rows.code_stride / kWholeTiles * kWholeTiles;
  if (plan.block_rows < kWholeTiles) plan.block_rows = kWholeTiles;
  plan.row_blocks = CeilDivide(args.row_count, plan.block_rows);
  for (const QuantisedLinear& part : args.parts) plan.strips += Strips(part.n);
  plan.chunk_strips =
      BlocksOfTask(plan.strips, plan.row_blocks, runner.worker_count(), plan.strips);
  plan.chunks = CeilDivide(plan.strips, plan.chunk_strips);
  plan.along_outputs = runner.numa_nodes() != nullptr;
  return plan;
}

// Inputs that weights take in another order, 32 from `begin` on.
static void GatherGroup(const float* x, const int32_t* order, int64_t begin, float* inputs) {
  for (int64_t i = 0; i < kQuantGroup; ++i) inputs[i] = x[order[begin + i]];
}

static void QuantiseRows(const QuantisedPlan& plan, int64_t first, int64_t count) {
  const QuantisedRows& rows = plan.rows;
  const int32_t* const order = plan.args->parts.front().input_order;
  alignas(64) float inputs[kQuantGroup];
  for (int64_t row = first; row < first + count; ++row) {
    const float* const x = plan.args->x + row * plan.args->x_stride;
    int8_t* const codes = rows.codes + row * rows.code_stride;
    RowGroup* const groups = rows.groups + row * rows.group_count;
    for (int64_t g = 0; g < rows.group_count; ++g) {
      const float* group = x + g * kQuantGroup;
      if (order != nullptr) {
        GatherGroup(x, order, g * kQuantGroup, inputs);
        group = inputs;
      }
      QuantiseGroup(group, codes + g * kQuantGroup, groups + g);
    }
  }
}

static void QuantiseRowsTask(void* context, int64_t index, int) {
  const ScopedFloatEnvironment environment;
  const auto& plan = *static_cast<const QuantisedPlan*>(context);
  const int64_t first = index * kRowsPerPackTask;
  const int64_t left = plan.args->row_count - first;
  QuantiseRows(plan, first, left < kRowsPerPackTask ? left : kRowsPerPackTask);
}

// ------------------------------------------------------------------------------ the work of a task

// Strips of one part against some rows.
struct QuantisedWork {
  const QuantisedPlan* plan;
  const QuantisedLinear* part;
  float* y;  // [row][n], at the part's first output
  int64_t begin_row, end_row;
  int64_t begin_strip, end_strip;
};

static float* OutputsOf(const QuantisedWork& work, int64_t row, int64_t strip) {
  return work.y + row * work.plan->args->y_stride + strip * kStripOutputs;
}

// The sums of one row and strip, bias added, into y.
static void FinishStrip(const QuantisedWork& work, int64_t row, int64_t strip, const float* sums) {
  const QuantisedLinearArgs& args = *work.plan->args;
  const int64_t output = strip * kStripOutputs;
  const int64_t left = work.part->n - output;
  const int64_t count = left < kStripOutputs ? left : kStripOutputs;
  float* const y = OutputsOf(work, row, strip);
  const float* const bias = work.part->bias != nullptr ? work.part->bias + output : nullptr;
  for (int64_t i = 0; i < count; ++i) {
    float v = sums[i];
    if (bias != nullptr) v += bias[i];
    y[i] = args.accumulate ? y[i] + v : v;
  }
}

// kRows rows from `row` on while that number is left; returns the next one.
template <class W, int kRows>
static int64_t RunTilesOf(const QuantisedWork& work, int64_t row, int64_t strip) {
  const QuantisedRows& rows = work.plan->rows;
  alignas(64) float sums[kRows * kStripOutputs];
  QuantisedTile tile{};
  tile.strip =
      static_cast<const std::byte*>(work.part->data) + strip * StripBytes(W::kFormat, work.part->k);
  tile.code_stride = rows.code_stride;
  tile.group_count = rows.group_count;
  tile.streams = row == work.begin_row;
  tile.prefetch = WeightPrefetchOfCpu(LayoutOf(W::kFormat).codes == CodeBits::kEight, kRows == 1);
  tile.sums = sums;
  for (; row + kRows <= work.end_row; row += kRows) {
    tile.codes = rows.codes + row * tile.code_stride;
    tile.groups = rows.groups + row * tile.group_count;
    // Each row's outputs lie on a page of their own: they come while the tile is computed.
    for (int r = 0; r < kRows; ++r) __builtin_prefetch(OutputsOf(work, row + r, strip), 1);
    RunQuantisedTile<W, kRows>(tile);
    for (int r = 0; r < kRows; ++r) {
      FinishStrip(work, row + r, strip, sums + r * kStripOutputs);
    }
    tile.streams = false;
  }
  return row;
}

// All rows from `row` on.
template <class W>
static void RunStrip(const QuantisedWork& work, int64_t row, int64_t strip) {
#if defined(QUIRE_SIMD_AVX512)
  row = RunTilesOf<W, W::kMostRows>(work, row, strip);
  row = RunTilesOf<W, 8>(work, row, strip);
#endif
  row = RunTilesOf<W, 4>(work, row, strip);
  row = RunTilesOf<W, 2>(work, row, strip);
  RunTilesOf<W, 1>(work, row, strip);
}

#if defined(QUIRE_SIMD_TILES)
#include "kernels/cpu/quantised_tiles-inl.h"
#endif

template <class W>
static void RunStrips(const QuantisedWork& work) {
#if defined(QUIRE_SIMD_TILES)
  if (work.end_row - work.begin_row >= kTileRows) return RunStripsByTiles<W>(work);
#endif
  for (int64_t strip = work.begin_strip; strip < work.end_strip; ++strip) {
    RunStrip<W>(work, work.begin_row, strip);
  }
}

struct StripsRun {
  using Function = void (*)(const QuantisedWork&);
  template <WeightFormat kFormat>
  static constexpr Function kOf = RunStrips<WeightsOf<kFormat>>;
};

// Strips are counted through all parts.
static void QuantisedLinearTask(void* context, int64_t index, int) {
  const ScopedFloatEnvironment environment;
  const auto& plan = *static_cast<const QuantisedPlan*>(context);
  QuantisedWork work{};
  work.plan = &plan;
  work.y = plan.args->y;
  const LinearTaskPlace place =
      LinearTaskAt(index, plan.row_blocks, plan.chunks, plan.along_outputs);
  work.begin_row = place.rows * plan.block_rows;
  const int64_t rows_end = work.begin_row + plan.block_rows;
  work.end_row = rows_end < plan.args->row_count ? rows_end : plan.args->row_count;
  int64_t begin = place.outputs * plan.chunk_strips;
  int64_t end = begin + plan.chunk_strips;
  for (const QuantisedLinear& part : plan.args->parts) {
    const int64_t strips = Strips(part.n);
    work.part = &part;
    work.begin_strip = begin > 0 ? begin : 0;
    work.end_strip = end < strips ? end : strips;
    if (work.begin_strip < work.end_strip) OfFormat<StripsRun>(part.format)(work);
    work.y += part.n;
    begin -= strips;
    end -= strips;
  }
}

static void MultiplyQuantised(const QuantisedLinearArgs& args, ParallelRunner& runner) {
  if (args.row_count == 0) return;
  QuantisedPlan plan = MakeQuantisedPlan(args, runner);
  if (args.row_count * args.parts.front().k < kMinParallelElements) {
    const ScopedFloatEnvironment environment;
    QuantiseRows(plan, 0, args.row_count);
  } else {
    runner.Run(CeilDivide(args.row_count, kRowsPerPackTask), QuantiseRowsTask, &plan);
  }
  Along(runner).Run(plan.row_blocks * plan.chunks, QuantisedLinearTask, &plan);
}
