// Linear layers whose weights are codes of 8-bit floating point (kernels/float8_weights.h).
// Included by linear-inl.h.
//
// One tile of rows widens codes in registers. For more, and where pairs are multiplied, they are
// widened into panels (linear_widened-inl.h).

// Pairs of inputs that share their scales.
struct Float8Run {
  const uint8_t* codes;  // of a block of outputs, at the first pair
  int64_t pairs;
  const float* even;  // scales of the pairs' even inputs
  const float* odd;   // others where a segment ends inside the one pair
  bool of_outputs;    // 32 scales, else one
};

// The run of a block of outputs from input `begin`, an even one, to `end` at most.
static Float8Run RunAt(const PackedLinear& w, int64_t output_block, int64_t begin, int64_t end) {
  const Float8Scales& scales = w.float8;
  const int64_t segment = begin / scales.segment_inputs;
  const int64_t segment_end = (segment + 1) * scales.segment_inputs;
  const int64_t stop = segment_end < end ? segment_end : end;
  const bool is_cut = segment_end == begin + 1 && segment_end < w.k;
  const bool has_last = is_cut || stop == end;  // an odd last input, with what stands beside it
  Float8Run run{};
  run.codes = static_cast<const uint8_t*>(w.data) + output_block * PackedFloat8BlockBytes(w.k) +
              begin * kOutputBlock;
  run.pairs = (stop - begin + (has_last ? 1 : 0)) / 2;
  run.even = scales.data + (output_block * Float8Segments(scales, w.k) + segment) * scales.lanes();
  run.odd = is_cut ? run.even + scales.lanes() : run.even;
  run.of_outputs = scales.of_outputs;
  return run;
}

// -------------------------------------------------------------------------- from codes to numbers

// The scales of 16 outputs, with what SplitF8Small leaves to them.
QUIRE_INLINE VF Float8ScalesAt(const Float8Run& run, const float* scales, int64_t output) {
  return Mul(run.of_outputs ? Load(scales + output) : Set1(scales[0]), Set1(kF8Rest));
}

// The numbers of kVectors times 16 outputs of a run, as products of codes and scales.
template <bool kRounded, int kVectors>
struct ScaledCodes {
  VF even[kVectors];
  VF odd[kVectors];

  QUIRE_INLINE void Begin(ScaledCodes* codes, const Float8Run& run, int64_t output) {
    QUIRE_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      codes->even[v] = Float8ScalesAt(run, run.even, output + v * kLanes);
      codes->odd[v] = Float8ScalesAt(run, run.odd, output + v * kLanes);
    }
  }
  QUIRE_INLINE WidePair At(const ScaledCodes& codes, int v, const uint8_t* at) {
    WidePair pair;
    SplitF8Small(at, &pair.even, &pair.odd);
    pair = {Mul(pair.even, codes.even[v]), Mul(pair.odd, codes.odd[v])};
    return kRounded ? WidePair{RoundNumberToBF16(pair.even), RoundNumberToBF16(pair.odd)} : pair;
  }
};
template <int kVectors>
using RoundedCodes = ScaledCodes<true, kVectors>;
template <int kVectors>
using ExactCodes = ScaledCodes<false, kVectors>;

#if defined(QUIRE_SIMD_AVX2)
// The rounded numbers of a run with one scale, by tables. The product of a scale and a code of
// another exponent is another power of two of the same number, and is rounded alike, while both are
// normal and finite: 16 products stand for all.
template <int kVectors>
struct TabledCodes {
  __m256i low, high;  // bytes of bfloat16: of 0 to 7 times 2^-9, then of 8 to 15 times 2^-10

  static bool Takes(const Float8Run& run) {
    return !run.of_outputs && run.even == run.odd && *run.even >= 0x1p-116F &&
           *run.even <= 0x1p118F;
  }
  QUIRE_INLINE void Begin(TabledCodes* codes, const Float8Run& run, int64_t) {
    const __m256i eight = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const VF steps = {_mm256_cvtepi32_ps(_mm256_slli_epi32(eight, 1)),
                      _mm256_cvtepi32_ps(_mm256_add_epi32(eight, _mm256_set1_epi32(8)))};
    const VF products = RoundNumberToBF16(Mul(Mul(steps, Set1(0x1p-10F)), Set1(*run.even)));
    const __m128i first = HighHalves(products.lo);
    const __m128i last = HighHalves(products.hi);
    const __m128i byte = _mm_set1_epi16(0xFF);
    codes->low = _mm256_broadcastsi128_si256(
        _mm_packus_epi16(_mm_and_si128(first, byte), _mm_and_si128(last, byte)));
    codes->high = _mm256_broadcastsi128_si256(
        _mm_packus_epi16(_mm_srli_epi16(first, 8), _mm_srli_epi16(last, 8)));
  }
  // The exponents of bfloat16 and the signs of codes in the high bytes.
  QUIRE_INLINE __m256i Exponents(__m256i high) {
    return _mm256_and_si256(_mm256_srai_epi16(high, 4),
                            _mm256_set1_epi16(static_cast<int16_t>(0x8780)));
  }
  QUIRE_INLINE WidePair At(const TabledCodes& codes, int, const uint8_t* at) {
    // Unpacking then leaves the first eight outputs side by side.
    const __m256i code =
        _mm256_permute4x64_epi64(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)), 0xD8);
    // The fraction, and 8 more where the code is normal.
    const __m256i size = _mm256_and_si256(code, _mm256_set1_epi8(0x7F));
    const __m256i index = _mm256_or_si256(_mm256_and_si256(code, _mm256_set1_epi8(7)),
                                          _mm256_min_epu8(size, _mm256_set1_epi8(8)));
    const __m256i low = _mm256_shuffle_epi8(codes.low, index);
    const __m256i high = _mm256_shuffle_epi8(codes.high, index);
    const __m256i none = _mm256_setzero_si256();
    const __m256i first = _mm256_add_epi16(_mm256_unpacklo_epi8(low, high),
                                           Exponents(_mm256_unpacklo_epi8(none, code)));
    const __m256i last = _mm256_add_epi16(_mm256_unpackhi_epi8(low, high),
                                          Exponents(_mm256_unpackhi_epi8(none, code)));
    const __m256i odd = _mm256_set1_epi32(static_cast<int>(0xFFFF0000U));
    return {{_mm256_castsi256_ps(_mm256_slli_epi32(first, 16)),
             _mm256_castsi256_ps(_mm256_slli_epi32(last, 16))},
            {_mm256_castsi256_ps(_mm256_and_si256(first, odd)),
             _mm256_castsi256_ps(_mm256_and_si256(last, odd))}};
  }
};
#endif

// ---------------------------------------------------------------------------------------- panels

template <class Panel, class Codes>
static void WidenRun(const Float8Run& run, typename Panel::Element* panel) {
  for (int64_t output = 0; output < kOutputBlock; output += kLanes) {
    Codes codes;
    Codes::Begin(&codes, run, output);
    for (int64_t pair = 0; pair < run.pairs; ++pair) {
      Panel::StorePair(panel, pair, output,
                       Codes::At(codes, 0, run.codes + 2 * (pair * kOutputBlock + output)));
    }
  }
}

// Inputs [begin, begin + count) of a block of outputs; `begin` is even. With an odd count follow
// zeros of one input more.
template <class Panel>
static void WidenFloat8(const PackedLinear& w, int64_t output_block, int64_t begin, int64_t count,
                        typename Panel::Element* panel) {
  for (int64_t input = begin; input < begin + count;) {
    const Float8Run run = RunAt(w, output_block, input, begin + count);
    auto* const to = panel + (input - begin) * kOutputBlock;
    input += 2 * run.pairs;
    if (w.dtype != DType::kBF16) {
      WidenRun<Panel, ExactCodes<1>>(run, to);
      continue;
    }
#if defined(QUIRE_SIMD_AVX2)
    if (TabledCodes<1>::Takes(run)) {
      WidenRun<Panel, TabledCodes<1>>(run, to);
      continue;
    }
#endif
    WidenRun<Panel, RoundedCodes<1>>(run, to);
  }
}

// -------------------------------------------------------------------------------------- in tiles

// RunTile for a run of codes, which are widened in registers.
template <template <int> class Codes, int kRows>
static void RunCodes(const Tile& tile, const Float8Run& run) {
  constexpr int kVectors = kTileVectors<kRows>;
  const char* ahead = tile.ahead;
  int64_t ahead_step = tile.ahead_step;
  for (int64_t output = 0; output < kOutputBlock; output += kVectors * kLanes) {
    const uint8_t* at = run.codes + 2 * output;
    const float* x = tile.x;
    VF sum[kRows][kVectors];
    BeginChains(tile, output, sum);
    Codes<kVectors> codes;
    Codes<kVectors>::Begin(&codes, run, output);
    const int64_t whole = tile.inputs / 2;
    for (int64_t pair = 0; pair < whole; ++pair) {
      PrefetchL2(ahead);
      ahead += ahead_step;
      WidePair weights[kVectors];
      QUIRE_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        weights[v] = Codes<kVectors>::At(codes, v, at + 2 * v * kLanes);
      }
      QUIRE_UNROLL
      for (int r = 0; r < kRows; ++r) {
        QUIRE_UNROLL
        for (int v = 0; v < kVectors; ++v) {
          sum[r][v] = BF16Weights::Step(sum[r][v], weights[v], x + r * kRowFloats);
        }
      }
      at += 2 * kOutputBlock;
      x += 2;
    }
    if (tile.inputs % 2 != 0) {
      QUIRE_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        const WidePair weights = Codes<kVectors>::At(codes, v, at + 2 * v * kLanes);
        QUIRE_UNROLL
        for (int r = 0; r < kRows; ++r) {
          sum[r][v] = BF16Weights::LastStep(sum[r][v], weights, x + r * kRowFloats);
        }
      }
    }
    EndChains(tile, output, sum);
    ahead_step = 0;  // as in RunTile
  }
}

using CodesFunction = void (*)(const Tile&, const Float8Run&);

// The functions for 1, 2, ... rows.
template <template <int> class Codes>
struct CodesFunctions {
#if defined(QUIRE_SIMD_AVX512)
  static constexpr CodesFunction kFor[kMaxTileRows] = {
      RunCodes<Codes, 1>, RunCodes<Codes, 2>,  RunCodes<Codes, 3>,  RunCodes<Codes, 4>,
      RunCodes<Codes, 5>, RunCodes<Codes, 6>,  RunCodes<Codes, 7>,  RunCodes<Codes, 8>,
      RunCodes<Codes, 9>, RunCodes<Codes, 10>, RunCodes<Codes, 11>, RunCodes<Codes, 12>};
#elif defined(QUIRE_SIMD_AVX2) || defined(QUIRE_SIMD_NEON)
  static constexpr CodesFunction kFor[kMaxTileRows] = {RunCodes<Codes, 1>, RunCodes<Codes, 2>,
                                                       RunCodes<Codes, 3>, RunCodes<Codes, 4>,
                                                       RunCodes<Codes, 5>, RunCodes<Codes, 6>};
#else
  static constexpr CodesFunction kFor[kMaxTileRows] = {RunCodes<Codes, 1>, RunCodes<Codes, 2>,
                                                       RunCodes<Codes, 3>, RunCodes<Codes, 4>};
#endif
};

QUIRE_INLINE const CodesFunction* FunctionsOfRun(const PackedLinear& w,
                                                 [[maybe_unused]] const Float8Run& run) {
  if (w.dtype != DType::kBF16) return CodesFunctions<ExactCodes>::kFor;
#if defined(QUIRE_SIMD_AVX2)
  if (TabledCodes<1>::Takes(run)) return CodesFunctions<TabledCodes>::kFor;
#endif
  return CodesFunctions<RoundedCodes>::kFor;
}

// One tile of rows against a block of outputs and of inputs.
static void RunFloat8Tile(const LinearPlan& plan, const RowBlock& rows, int64_t output_block,
                          int64_t input_block, float* chains, float* sums) {
  const PackedLinear& w = plan.args->w;
  const int64_t first = input_block * plan.input_block;
  const int64_t end = first + InputsOfBlock(plan, input_block);
  Tile tile{};
  tile.sums = sums;
  tile.sum_stride = kGroupBlocks * kOutputBlock;
  tile.first = input_block == 0;
  tile.chains = chains;
  const float* const x =
      plan.x + (input_block * plan.args->row_count + rows.first_row) * kRowFloats;
  for (int64_t input = first; input < end;) {
    const Float8Run run = RunAt(w, output_block, input, end);
    const int64_t next = input + 2 * run.pairs;
    tile.x = x + input - first;
    tile.inputs = (next < end ? next : end) - input;
    tile.begins = input == first;
    tile.ends = next >= end;
    tile.ahead = reinterpret_cast<const char*>(run.codes) + kStreamAhead;
    tile.ahead_step = 2 * kOutputBlock;
    FunctionsOfRun(w, run)[rows.row_count - 1](tile, run);
    input = next;
  }
}
