// What the paths rely on when they call an AVX-512 intrinsic whose meaning is not plain, said lane
// by lane as in the "Operation" of Intel's manual (volume 2). In a build with QUIRE_EMULATE_AVX512
// the emulation has to agree with it, in any other the CPU itself, where it has the instructions.
#include <gtest/gtest.h>
#include <immintrin.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "base/random.h"
#include "kernels/backend.h"
#include "tensor/half.h"

#if QUIRE_EMULATE_AVX512
#include "kernels/cpu/avx512_emulation.h"
#endif

// -------------------------------------------------------------------------------------------------
// each intrinsic between arrays; nothing but these functions is compiled wide

#if QUIRE_EMULATE_AVX512
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#elif defined(__clang__)
#pragma clang attribute push(                                                               \
    __attribute__((                                                                         \
        target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,avx512bf16,avx512vnni"))), \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,avx512bf16,avx512vnni")
#endif

namespace quire::intrinsics {
#if QUIRE_EMULATE_AVX512
using namespace avx512_emulation;
#endif
namespace {

__m256i Load16(const uint16_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
void Store16(uint16_t* p, __m256i v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v); }

void DotBF16(float* acc, const uint16_t* a, const uint16_t* b) {
  _mm512_storeu_ps(acc, _mm512_dpbf16_ps(_mm512_loadu_ps(acc), (__m512bh)_mm512_loadu_si512(a),
                                         (__m512bh)_mm512_loadu_si512(b)));
}
void DotI16(int32_t* acc, const uint16_t* a, const uint16_t* b) {
  _mm512_storeu_si512(acc, _mm512_dpwssd_epi32(_mm512_loadu_si512(acc), _mm512_loadu_si512(a),
                                               _mm512_loadu_si512(b)));
}
void Products(int32_t* sums, const uint16_t* a, const uint16_t* b) {
  _mm512_storeu_si512(sums, _mm512_madd_epi16(_mm512_loadu_si512(a), _mm512_loadu_si512(b)));
}
void Scale(const float* a, const float* b, float* to) {
  _mm512_storeu_ps(to, _mm512_scalef_ps(_mm512_loadu_ps(a), _mm512_loadu_ps(b)));
}
void Round(const float* a, float* to) {
  _mm512_storeu_ps(
      to, _mm512_roundscale_ps(_mm512_loadu_ps(a), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
void MaxMin(const float* a, const float* b, float* max, float* min) {
  _mm512_storeu_ps(max, _mm512_max_ps(_mm512_loadu_ps(a), _mm512_loadu_ps(b)));
  _mm512_storeu_ps(min, _mm512_min_ps(_mm512_loadu_ps(a), _mm512_loadu_ps(b)));
}
unsigned NotLess(const float* a, const float* b) {
  return _mm512_cmp_ps_mask(_mm512_loadu_ps(a), _mm512_loadu_ps(b), _CMP_NLT_UQ);
}
unsigned Unordered(const float* a, const float* b) {
  return _mm512_cmp_ps_mask(_mm512_loadu_ps(a), _mm512_loadu_ps(b), _CMP_UNORD_Q);
}
void Keep(unsigned mask, const float* a, float* to) {
  _mm512_storeu_ps(to, _mm512_maskz_mov_ps(static_cast<__mmask16>(mask), _mm512_loadu_ps(a)));
}
void Blend(unsigned mask, const float* a, const float* b, float* to) {
  _mm512_storeu_ps(to, _mm512_mask_blend_ps(static_cast<__mmask16>(mask), _mm512_loadu_ps(a),
                                            _mm512_loadu_ps(b)));
}
void MaskedOr(unsigned mask, const uint32_t* from, const uint32_t* a, const uint32_t* b,
              uint32_t* to) {
  _mm512_storeu_si512(to,
                      _mm512_mask_or_epi32(_mm512_loadu_si512(from), static_cast<__mmask16>(mask),
                                           _mm512_loadu_si512(a), _mm512_loadu_si512(b)));
}
void Narrow32(const uint32_t* a, uint16_t* to) {
  Store16(to, _mm512_cvtepi32_epi16(_mm512_loadu_si512(a)));
}
void WidenSigned(const uint16_t* a, uint32_t* to) {
  _mm512_storeu_si512(to, _mm512_cvtepi16_epi32(Load16(a)));
}
void WidenUnsigned(const uint16_t* a, uint32_t* to) {
  _mm512_storeu_si512(to, _mm512_cvtepu16_epi32(Load16(a)));
}
void WidenBytes(const uint16_t* a, uint16_t* to) {
  _mm512_storeu_si512(to, _mm512_cvtepi8_epi16(Load16(a)));
}
void ToInts(const float* a, uint32_t* to) {
  _mm512_storeu_si512(to, _mm512_cvtps_epi32(_mm512_loadu_ps(a)));
}
void FromInts(const uint32_t* a, float* to) {
  _mm512_storeu_ps(to, _mm512_cvtepi32_ps(_mm512_loadu_si512(a)));
}
void FromHalves(const uint16_t* a, float* to) { _mm512_storeu_ps(to, _mm512_cvtph_ps(Load16(a))); }
void ToHalves(const float* a, uint16_t* to) {
  Store16(to, _mm512_cvtps_ph(_mm512_loadu_ps(a), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
void ToBF16(const float* a, uint16_t* to) {
  Store16(to, (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(a)));
}
void TwoToBF16(const float* high, const float* low, uint16_t* to) {
  _mm512_storeu_si512(to,
                      (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(high), _mm512_loadu_ps(low)));
}
void PickFloats(const uint32_t* at, const float* table, float* to) {
  _mm512_storeu_ps(to, _mm512_permutexvar_ps(_mm512_loadu_si512(at), _mm512_loadu_ps(table)));
}
void Shifts(const uint32_t* a, uint32_t* left, uint32_t* right, uint32_t* signed_right) {
  _mm512_storeu_si512(left, _mm512_slli_epi32(_mm512_loadu_si512(a), 24));
  _mm512_storeu_si512(right, _mm512_srli_epi32(_mm512_loadu_si512(a), 16));
  _mm512_storeu_si512(signed_right, _mm512_srai_epi32(_mm512_loadu_si512(a), 8));
}
void Words(const uint16_t* a, const uint16_t* b, uint16_t* sums, uint16_t* left, uint32_t* none) {
  const __m512i v = _mm512_loadu_si512(a);
  const __m512i w = _mm512_loadu_si512(b);
  _mm512_storeu_si512(sums, _mm512_add_epi16(v, w));
  _mm512_storeu_si512(left, _mm512_slli_epi16(v, 4));
  *none = _mm512_testn_epi16_mask(v, w);
}
void PickWords(const uint16_t* from, uint32_t mask, const uint16_t* at, const uint16_t* table,
               uint16_t* to) {
  _mm512_storeu_si512(
      to, _mm512_mask_permutexvar_epi16(_mm512_loadu_si512(from), mask, _mm512_loadu_si512(at),
                                        _mm512_loadu_si512(table)));
}
void Repeat(const uint16_t* eight, uint16_t* to) {
  _mm512_storeu_si512(
      to, _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(eight))));
}
void SubtractBytes(const uint8_t* a, const uint8_t* b, uint8_t* to) {
  _mm512_storeu_si512(to, _mm512_sub_epi8(_mm512_loadu_si512(a), _mm512_loadu_si512(b)));
}
void PickBytes(const uint8_t* a, const uint8_t* at, uint8_t* to) {
  _mm512_storeu_si512(to, _mm512_shuffle_epi8(_mm512_loadu_si512(a), _mm512_loadu_si512(at)));
}
void Zip(const uint64_t* a, const uint64_t* b, uint64_t* low, uint64_t* high) {
  const __m512i v = _mm512_loadu_si512(a);
  const __m512i w = _mm512_loadu_si512(b);
  _mm512_storeu_si512(low, _mm512_unpacklo_epi64(v, w));
  _mm512_storeu_si512(high, _mm512_unpackhi_epi64(v, w));
}
void PickQuarters(const uint64_t* a, const uint64_t* b, uint64_t* even, uint64_t* mixed) {
  const __m512i v = _mm512_loadu_si512(a);
  const __m512i w = _mm512_loadu_si512(b);
  _mm512_storeu_si512(even, _mm512_shuffle_i64x2(v, w, 0x88));
  _mm512_storeu_si512(mixed, _mm512_shuffle_i64x2(v, w, 1 | 3 << 2 | 2 << 4 | 1 << 6));
}
void Upper(const float* a, float* lower_to, float* upper_to) {
  const __m512 v = _mm512_loadu_ps(a);
  _mm256_storeu_ps(lower_to, _mm512_castps512_ps256(v));
  _mm256_storeu_ps(upper_to, _mm512_extractf32x8_ps(v, 1));
}

}  // namespace
}  // namespace quire::intrinsics

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

// -------------------------------------------------------------------------------------------------

namespace quire {
namespace {

constexpr int kLanes = 16;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kLeastNormal = std::numeric_limits<float>::min();

uint32_t Bits(float x) { return std::bit_cast<uint32_t>(x); }
bool Same(float a, float b) { return std::isnan(a) ? std::isnan(b) : Bits(a) == Bits(b); }

class Avx512Intrinsics : public testing::Test {
 protected:
  void SetUp() override {
    if (!FindBackend("avx512_bf16").ok()) {
      GTEST_SKIP() << "this CPU has no AVX-512 with bfloat16 and VNNI, and this build does not "
                      "emulate them (preset avx512-emulated)";
    }
  }
  uint32_t Word() { return static_cast<uint32_t>(random_.Bits()); }
  // Any bits, or numbers of about one size, or one of the special ones.
  float Float() {
    const float special[] = {0.0F,       -0.0F,        1.0F, 0.5F,      2.5F,       kInfinity,
                             -kInfinity, kLeastNormal, kNaN, 0x1p-149F, -0x1p-130F, 0x1p127F};
    switch (random_.Bits() % 4) {
      case 0:
        return std::bit_cast<float>(Word());
      case 1:
        return special[random_.Bits() % std::size(special)];
      default:
        return std::ldexp(static_cast<float>(static_cast<int32_t>(Word())), -28);
    }
  }
  void FillFloats(float* to) {
    for (int i = 0; i < kLanes; ++i) to[i] = Float();
  }
  void FillWords(uint32_t* to) {
    for (int i = 0; i < kLanes; ++i) to[i] = Word();
  }
  void FillHalves(uint16_t* to, int count) {
    for (int i = 0; i < count; ++i) to[i] = static_cast<uint16_t>(Word());
  }

  RandomSequence random_{1};
};

float WithoutDenormal(float x) { return std::fabs(x) < kLeastNormal ? std::copysign(0.0F, x) : x; }

// One fused step of VDPBF16PS. The sum is rounded as if exponents had no end, and becomes zero if
// it is below the least normal number then.
float FusedStep(float acc, uint16_t a, uint16_t b) {
  const float x = WithoutDenormal(Bf16ToF32(a));
  const float y = WithoutDenormal(Bf16ToF32(b));
  const float sum = std::fmaf(x, y, WithoutDenormal(acc));
  if (std::fabs(sum) == kLeastNormal) {
    // Rounded up to it from below, where 24 bits would have stayed below?
    const float larger = std::fmaf(x * 0x1p60F, y, WithoutDenormal(acc) * 0x1p60F);
    if (std::fabs(larger) < kLeastNormal * 0x1p60F) return std::copysign(0.0F, sum);
  }
  return WithoutDenormal(sum);
}

TEST_F(Avx512Intrinsics, BFloat16DotsAddTheOddProductThenTheEvenOneAndKnowNoDenormals) {
  bool order_shows = false;
  for (int round = 0; round < 20000; ++round) {
    float acc[kLanes];
    uint16_t a[2 * kLanes];
    uint16_t b[2 * kLanes];
    FillFloats(acc);
    for (int i = 0; i < 2 * kLanes; ++i) {
      // Products about as large as the sum in half of the rounds, of any size in the others.
      a[i] = round % 2 == 0 ? F32ToBf16(Float()) : static_cast<uint16_t>(Word());
      b[i] = round % 2 == 0 ? F32ToBf16(Float()) : static_cast<uint16_t>(Word());
    }
    float result[kLanes];
    std::memcpy(result, acc, sizeof acc);
    intrinsics::DotBF16(result, a, b);
    for (int i = 0; i < kLanes; ++i) {
      const float odd = FusedStep(acc[i], a[2 * i + 1], b[2 * i + 1]);
      const float expected = FusedStep(odd, a[2 * i], b[2 * i]);
      ASSERT_TRUE(Same(result[i], expected))
          << "lane " << i << ": " << acc[i] << " + " << Bf16ToF32(a[2 * i + 1]) << " * "
          << Bf16ToF32(b[2 * i + 1]) << " + " << Bf16ToF32(a[2 * i]) << " * " << Bf16ToF32(b[2 * i])
          << " = " << result[i] << " instead of " << expected;
      const float even = FusedStep(acc[i], a[2 * i], b[2 * i]);
      order_shows = order_shows || !Same(FusedStep(even, a[2 * i + 1], b[2 * i + 1]), expected);
    }
  }
  EXPECT_TRUE(order_shows) << "the other order gives the same: the numbers show nothing";
}

TEST_F(Avx512Intrinsics, BFloat16DotsFlushWhatIsTiny) {
  const uint16_t one = F32ToBf16(1.0F);
  const uint16_t tiny = 1;  // a denormal bfloat16
  const uint16_t least = F32ToBf16(kLeastNormal);
  const uint16_t half = F32ToBf16(0.5F);
  float acc[kLanes] = {0x1p-130F, -0x1p-149F, 0.0F, kLeastNormal, -kLeastNormal};
  uint16_t a[2 * kLanes] = {0, 0, 0, 0, tiny, tiny, half, 0, 0x8000, half};
  uint16_t b[2 * kLanes] = {one, one, one, one, one, one, F32ToBf16(-kLeastNormal), 0, 0, least};
  intrinsics::DotBF16(acc, a, b);
  EXPECT_EQ(Bits(acc[0]), Bits(0.0F));   // the sum comes in as a denormal
  EXPECT_EQ(Bits(acc[1]), Bits(0.0F));   // -0 + 0
  EXPECT_EQ(Bits(acc[2]), Bits(0.0F));   // both products have a denormal factor
  EXPECT_EQ(Bits(acc[3]), Bits(0.0F));   // the difference is half of the least normal number
  EXPECT_EQ(Bits(acc[4]), Bits(-0.0F));  // likewise; it keeps its sign, and -0 * 0 is added
}

TEST_F(Avx512Intrinsics, BFloat16DotsLeaveTheFloatEnvironmentAlone) {
  const unsigned before = _mm_getcsr();
  float acc[kLanes] = {kInfinity, 1.0F};
  uint16_t a[2 * kLanes] = {F32ToBf16(-kInfinity), 1, 3, 0x7f80};
  intrinsics::DotBF16(acc, a, a);
  EXPECT_EQ(_mm_getcsr(), before);
}

TEST_F(Avx512Intrinsics, IntegerDotsAddTwoProductsAndWrap) {
  for (int round = 0; round < 2000; ++round) {
    uint32_t acc[kLanes];
    uint16_t a[2 * kLanes];
    uint16_t b[2 * kLanes];
    FillWords(acc);
    FillHalves(a, 2 * kLanes);
    FillHalves(b, 2 * kLanes);
    if (round == 0) {
      for (int i = 0; i < 2 * kLanes; ++i) a[i] = b[i] = 0x8000;
    }
    int32_t sums[kLanes];
    std::memcpy(sums, acc, sizeof acc);
    intrinsics::DotI16(sums, a, b);
    int32_t products[kLanes];
    intrinsics::Products(products, a, b);
    for (int i = 0; i < kLanes; ++i) {
      int64_t sum = 0;
      for (int n = 2 * i; n < 2 * i + 2; ++n) {
        sum += int64_t{static_cast<int16_t>(a[n])} * static_cast<int16_t>(b[n]);
      }
      EXPECT_EQ(static_cast<uint32_t>(products[i]), static_cast<uint32_t>(sum));
      EXPECT_EQ(static_cast<uint32_t>(sums[i]), acc[i] + static_cast<uint32_t>(sum));
    }
  }
}

TEST_F(Avx512Intrinsics, ScalingRoundsOnceAndPassesNaN) {
  for (int round = 0; round < 2000; ++round) {
    float a[kLanes];
    float b[kLanes];
    float scaled[kLanes];
    FillFloats(a);
    for (int i = 0; i < kLanes; ++i) {
      b[i] = random_.Bits() % 8 == 0 ? kNaN : static_cast<float>(Word() % 6000) / 8 - 375.0F;
    }
    intrinsics::Scale(a, b, scaled);
    for (int i = 0; i < kLanes; ++i) {
      const float expected =
          std::isnan(b[i]) ? b[i] : std::ldexp(a[i], static_cast<int>(std::floor(b[i])));
      EXPECT_TRUE(Same(scaled[i], expected)) << a[i] << " * 2^" << b[i] << ": " << scaled[i];
    }
  }
}

TEST_F(Avx512Intrinsics, FloatsRoundAndCompareByX86Rules) {
  for (int round = 0; round < 2000; ++round) {
    float a[kLanes];
    float b[kLanes];
    FillFloats(a);
    FillFloats(b);
    if (round % 3 == 0) std::memcpy(b, a, sizeof a / 2);
    float rounded[kLanes];
    float max[kLanes];
    float min[kLanes];
    intrinsics::Round(a, rounded);
    intrinsics::MaxMin(a, b, max, min);
    const unsigned not_less = intrinsics::NotLess(a, b);
    const unsigned unordered = intrinsics::Unordered(a, b);
    for (int i = 0; i < kLanes; ++i) {
      EXPECT_TRUE(Same(rounded[i], std::nearbyint(a[i])));
      EXPECT_TRUE(Same(max[i], a[i] > b[i] ? a[i] : b[i]));
      EXPECT_TRUE(Same(min[i], a[i] < b[i] ? a[i] : b[i]));
      EXPECT_EQ((not_less >> i & 1) != 0, !(a[i] < b[i]));
      EXPECT_EQ((unordered >> i & 1) != 0, std::isnan(a[i]) || std::isnan(b[i]));
    }
  }
}

TEST_F(Avx512Intrinsics, BitsOfMasksAreLanes) {
  for (unsigned mask = 0; mask < 0x10000; mask += 1 + mask / 64) {
    float a[kLanes];
    float b[kLanes];
    uint32_t words[3][kLanes];
    FillFloats(a);
    FillFloats(b);
    for (auto& w : words) FillWords(w);
    float kept[kLanes];
    float blended[kLanes];
    uint32_t joined[kLanes];
    intrinsics::Keep(mask, a, kept);
    intrinsics::Blend(mask, a, b, blended);
    intrinsics::MaskedOr(mask, words[0], words[1], words[2], joined);
    for (int i = 0; i < kLanes; ++i) {
      const bool set = (mask >> i & 1) != 0;
      EXPECT_EQ(Bits(kept[i]), set ? Bits(a[i]) : 0);
      EXPECT_EQ(Bits(blended[i]), Bits(set ? b[i] : a[i]));
      EXPECT_EQ(joined[i], set ? words[1][i] | words[2][i] : words[0][i]);
    }
  }
}

TEST_F(Avx512Intrinsics, WordsAddShiftAndPickEachOther) {
  for (int round = 0; round < 2000; ++round) {
    uint16_t a[2 * kLanes];
    uint16_t b[2 * kLanes];
    uint16_t table[2 * kLanes];
    FillHalves(a, 2 * kLanes);
    FillHalves(b, 2 * kLanes);
    FillHalves(table, 2 * kLanes);
    for (int i = 0; i < 2 * kLanes; i += 3) b[i] &= 0x78;  // so that some share no bit
    const uint32_t mask = Word();
    uint16_t sums[2 * kLanes];
    uint16_t left[2 * kLanes];
    uint16_t picked[2 * kLanes];
    uint16_t repeated[2 * kLanes];
    uint32_t none = 0;
    intrinsics::Words(a, b, sums, left, &none);
    intrinsics::PickWords(a, mask, b, table, picked);
    intrinsics::Repeat(table, repeated);
    for (int i = 0; i < 2 * kLanes; ++i) {
      EXPECT_EQ(sums[i], static_cast<uint16_t>(a[i] + b[i]));
      EXPECT_EQ(left[i], static_cast<uint16_t>(a[i] << 4));
      EXPECT_EQ(none >> i & 1, (a[i] & b[i]) == 0 ? 1U : 0U);
      EXPECT_EQ(picked[i], (mask >> i & 1) != 0 ? table[b[i] % 32] : a[i]);
      EXPECT_EQ(repeated[i], table[i % 8]);
    }
  }
}

TEST_F(Avx512Intrinsics, BytesAndQuartersArePicked) {
  constexpr int kQuads = 8;
  for (int round = 0; round < 2000; ++round) {
    uint64_t a[kQuads];
    uint64_t b[kQuads];
    for (uint64_t& x : a) x = random_.Bits();
    for (uint64_t& x : b) x = random_.Bits();
    uint8_t bytes[3][64];
    std::memcpy(bytes[0], a, sizeof a);
    std::memcpy(bytes[1], b, sizeof b);
    uint8_t left[64];
    intrinsics::PickBytes(bytes[0], bytes[1], bytes[2]);
    intrinsics::SubtractBytes(bytes[0], bytes[1], left);
    for (int i = 0; i < 64; ++i) {
      const uint8_t at = bytes[1][i];
      EXPECT_EQ(bytes[2][i], at >= 128 ? 0 : bytes[0][i / 16 * 16 + at % 16]);
      EXPECT_EQ(left[i], static_cast<uint8_t>(bytes[0][i] - at));  // modulo 256
    }
    uint64_t low[kQuads];
    uint64_t high[kQuads];
    uint64_t even[kQuads];
    uint64_t mixed[kQuads];
    intrinsics::Zip(a, b, low, high);
    intrinsics::PickQuarters(a, b, even, mixed);
    for (int i = 0; i < kQuads; ++i) {
      const uint64_t* const side = i % 2 == 0 ? a : b;
      EXPECT_EQ(low[i], side[i / 2 * 2]);
      EXPECT_EQ(high[i], side[i / 2 * 2 + 1]);
      constexpr int kMixed[] = {1, 3, 2, 1};
      const uint64_t* const half = i < kQuads / 2 ? a : b;
      EXPECT_EQ(even[i], half[i / 2 % 2 * 4 + i % 2]);
      EXPECT_EQ(mixed[i], half[kMixed[i / 2] * 2 + i % 2]);
    }
  }
}

TEST_F(Avx512Intrinsics, ConversionsKeepTheOrderOfLanes) {
  for (int round = 0; round < 2000; ++round) {
    uint32_t words[kLanes];
    uint16_t halves[kLanes];
    float floats[kLanes];
    FillWords(words);
    FillHalves(halves, kLanes);
    FillFloats(floats);
    float from_high[kLanes];
    FillFloats(from_high);

    uint16_t narrow[kLanes];
    intrinsics::Narrow32(words, narrow);
    uint32_t with_sign[kLanes];
    uint32_t without_sign[kLanes];
    uint16_t bytes[2 * kLanes];
    intrinsics::WidenSigned(halves, with_sign);
    intrinsics::WidenUnsigned(halves, without_sign);
    intrinsics::WidenBytes(halves, bytes);
    uint32_t left[kLanes];
    uint32_t right[kLanes];
    uint32_t signed_right[kLanes];
    intrinsics::Shifts(words, left, right, signed_right);
    uint32_t ints[kLanes];
    float from_ints[kLanes];
    float from_halves[kLanes];
    uint16_t to_halves[kLanes];
    uint16_t to_bf16[kLanes];
    intrinsics::ToBF16(floats, to_bf16);
    uint16_t two_to_bf16[2 * kLanes];
    intrinsics::TwoToBF16(from_high, floats, two_to_bf16);
    uint16_t high_to_bf16[kLanes];
    intrinsics::ToBF16(from_high, high_to_bf16);
    float picked[kLanes];
    intrinsics::PickFloats(words, floats, picked);
    intrinsics::ToInts(floats, ints);
    intrinsics::FromInts(words, from_ints);
    intrinsics::FromHalves(halves, from_halves);
    intrinsics::ToHalves(floats, to_halves);
    float parts[kLanes];
    intrinsics::Upper(floats, parts, parts + kLanes / 2);

    for (int i = 0; i < kLanes; ++i) {
      EXPECT_EQ(narrow[i], words[i] & 0xffffU);
      EXPECT_EQ(static_cast<int32_t>(with_sign[i]), static_cast<int16_t>(halves[i]));
      EXPECT_EQ(without_sign[i], halves[i]);
      EXPECT_EQ(static_cast<int16_t>(bytes[2 * i]), static_cast<int8_t>(halves[i] & 0xff));
      EXPECT_EQ(static_cast<int16_t>(bytes[2 * i + 1]), static_cast<int8_t>(halves[i] >> 8));
      EXPECT_EQ(left[i], words[i] << 24);
      EXPECT_EQ(right[i], words[i] >> 16);
      EXPECT_EQ(static_cast<int32_t>(signed_right[i]), static_cast<int32_t>(words[i]) >> 8);
      EXPECT_EQ(ints[i], std::fabs(floats[i]) < 0x1p31F
                             ? static_cast<uint32_t>(std::lrint(floats[i]))
                             : 0x80000000U);  // "integer indefinite"; also for NaN
      EXPECT_EQ(from_ints[i], static_cast<float>(static_cast<int32_t>(words[i])));
      EXPECT_TRUE(Same(from_halves[i], F16ToF32(halves[i])));
      EXPECT_TRUE(Same(F16ToF32(to_halves[i]), F16ToF32(F32ToF16(floats[i]))));
      EXPECT_EQ(to_bf16[i], std::fpclassify(floats[i]) == FP_SUBNORMAL
                                ? Bits(floats[i]) >> 16 & 0x8000U
                                : F32ToBf16(floats[i]));
      EXPECT_EQ(two_to_bf16[i], to_bf16[i]);
      EXPECT_EQ(two_to_bf16[kLanes + i], high_to_bf16[i]);
      EXPECT_EQ(Bits(picked[i]), Bits(floats[words[i] % kLanes]));
      EXPECT_EQ(Bits(parts[i]), Bits(floats[i]));
    }
  }
}

}  // namespace
}  // namespace quire
