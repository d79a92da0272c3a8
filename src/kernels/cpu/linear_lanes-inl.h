// Linear layers of about sixteen rows, with a row in each lane. Included by linear-inl.h.
//
// A decode step of a batch has too few rows to pay for a panel of widened weights, and tiles of
// rows would widen each weight once for each of them. Here a weight is broadcast and widened once
// for all rows, straight from where it lies. The chains are those of the tiles: one for each row
// and output, over ascending inputs.

// Outputs at a time: with two vectors of x and a weight, their sums fill AVX2's registers.
constexpr int kLaneOutputs = 4;

// Two inputs of one output, in all lanes.
QUIRE_INLINE WidePair BroadcastPair(const uint16_t* w) {
#if defined(QUIRE_SIMD_AVX2)
  const __m256i bits = _mm256_castps_si256(_mm256_broadcast_ss(reinterpret_cast<const float*>(w)));
  const __m256i high = _mm256_set1_epi32(static_cast<int>(0xFFFF0000U));
  const __m256 even = _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
  const __m256 odd = _mm256_castsi256_ps(_mm256_and_si256(bits, high));
  return {{even, even}, {odd, odd}};
#else
  return {Set1(Bf16ToF32(w[0])), Set1(Bf16ToF32(w[1]))};
#endif
}

// x as [input block][input][lane]; lanes without a row are zero.
static void PackLaneRows(const LinearPlan& plan) {
  const LinearArgs& args = *plan.args;
  for (int64_t block = 0; block < plan.input_blocks; ++block) {
    const int64_t inputs = InputsOfBlock(plan, block);
    float* const to = plan.x + block * kLaneBlockFloats;
    for (int64_t i = 0; i < inputs; i += kLanes) {
      const int64_t count = inputs - i < kLanes ? inputs - i : kLanes;
      float square[kLanes][kLanes] = {};  // [row][input]
      for (int64_t row = 0; row < args.row_count; ++row) {
        const float* const from = args.x + row * args.x_stride + block * plan.input_block + i;
        __builtin_memcpy(square[row], from, static_cast<size_t>(count) * sizeof(float));
        if (args.x_rounding != DType::kBF16) continue;
        Store(square[row], RoundToBF16(Load(square[row])));
      }
      for (int64_t j = 0; j < count; ++j) {
        for (int64_t row = 0; row < kLanes; ++row) to[(i + j) * kLanes + row] = square[row][j];
      }
    }
  }
}

// All rows against one block of outputs and of inputs. `sums`: [kOutputBlock][lane]. The block of
// weights that comes after lies at `next`.
static void RunLanes(const LinearPlan& plan, int64_t output_block, int64_t input_block,
                     const char* next, float* sums) {
  const auto* const packed =
      reinterpret_cast<const uint16_t*>(PackedAt(plan, output_block, input_block));
  const int64_t inputs = InputsOfBlock(plan, input_block);
  constexpr int64_t kAheadBytes = 2 * kLaneOutputs * sizeof(uint16_t);  // of a step
  const char* ahead = next;
  for (int64_t output = 0; output < kOutputBlock; output += kLaneOutputs) {
    const uint16_t* w = packed + 2 * output;
    const float* x = plan.x + input_block * kLaneBlockFloats;
    VF sum[kLaneOutputs];
    QUIRE_UNROLL
    for (int o = 0; o < kLaneOutputs; ++o) sum[o] = Zero();
    for (int64_t step = 0; step < inputs / 2; ++step) {
      PrefetchL2(ahead);
      ahead += kAheadBytes;
      const VF even = Load(x);
      const VF odd = Load(x + kLanes);
      QUIRE_UNROLL
      for (int o = 0; o < kLaneOutputs; ++o) {
        const WidePair pair = BroadcastPair(w + 2 * o);
        sum[o] = Fma(pair.odd, odd, Fma(pair.even, even, sum[o]));
      }
      w += 2 * kOutputBlock;
      x += 2 * kLanes;
    }
    if (inputs % 2 != 0) {
      const VF even = Load(x);
      QUIRE_UNROLL
      for (int o = 0; o < kLaneOutputs; ++o) {
        sum[o] = Fma(BroadcastPair(w + 2 * o).even, even, sum[o]);
      }
    }
    QUIRE_UNROLL
    for (int o = 0; o < kLaneOutputs; ++o) {
      float* const out = sums + (output + o) * kLanes;
      Store(out, input_block == 0 ? sum[o] : Add(Load(out), sum[o]));
    }
  }
}

// The sums of one block of outputs, from lanes into rows of y.
static void FinishLanes(const LinearArgs& args, int64_t output, const float* sums) {
  for (int64_t row = 0; row < args.row_count; ++row) {
    float outputs[kOutputBlock];
    for (int64_t o = 0; o < kOutputBlock; ++o) outputs[o] = sums[o * kLanes + row];
    FinishOutputs(args, row, output, outputs);
  }
}
