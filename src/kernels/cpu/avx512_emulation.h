// The AVX-512 intrinsics that the paths use, done with AVX2 in two halves, so that the sources of
// cpu/avx512.cc and cpu/avx512_bf16.cc can be run on CPUs without these instructions (CMake option
// QUIRE_EMULATE_AVX512, docs/testing.md). Only for tests: the build refuses to make a package of
// it. The names are the compiler's, found first by a using directive inside a path's namespace; an
// intrinsic that is not here would find the compiler's own, which does not compile for AVX2.
//
// Source of what each does: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2,
// the instruction's "Operation"; cpu/avx512_intrinsics_test.cc states it again lane by lane and
// compares, on a CPU with AVX-512 with the CPU.
#ifndef QUIRE_KERNELS_CPU_AVX512_EMULATION_H_
#define QUIRE_KERNELS_CPU_AVX512_EMULATION_H_

#if defined(__clang__)
#error "QUIRE_EMULATE_AVX512 needs GCC: immediates are arguments of functions here"
#endif

#include <immintrin.h>

#include <cstdint>

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")

namespace quire::avx512_emulation {

#define QUIRE_EMULATED static inline __attribute__((always_inline))

struct __m512 {
  __m256 lo, hi;
};
struct __m512i {
  __m256i lo, hi;
};
using __m512bh = __m512i;  // 32 bfloat16

// -------------------------------------------------------------------------------------------------
// memory, constants, casts

QUIRE_EMULATED __m512 _mm512_setzero_ps() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
QUIRE_EMULATED __m512 _mm512_set1_ps(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
QUIRE_EMULATED __m512 _mm512_loadu_ps(const float* p) {
  return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
}
QUIRE_EMULATED void _mm512_storeu_ps(float* p, __m512 v) {
  _mm256_storeu_ps(p, v.lo);
  _mm256_storeu_ps(p + 8, v.hi);
}
QUIRE_EMULATED __m512i _mm512_setzero_si512() {
  return {_mm256_setzero_si256(), _mm256_setzero_si256()};
}
QUIRE_EMULATED __m512i _mm512_set1_epi32(int x) {
  return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)};
}
QUIRE_EMULATED __m512i _mm512_set1_epi16(short x) {
  return {_mm256_set1_epi16(x), _mm256_set1_epi16(x)};
}
QUIRE_EMULATED __m512i _mm512_broadcast_i32x4(__m128i v) {
  return {_mm256_broadcastsi128_si256(v), _mm256_broadcastsi128_si256(v)};
}
QUIRE_EMULATED __m512i _mm512_loadu_si512(const void* p) {
  const auto* const at = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(at), _mm256_loadu_si256(at + 1)};
}
QUIRE_EMULATED void _mm512_storeu_si512(void* p, __m512i v) {
  auto* const at = static_cast<__m256i*>(p);
  _mm256_storeu_si256(at, v.lo);
  _mm256_storeu_si256(at + 1, v.hi);
}
QUIRE_EMULATED __m512 _mm512_castsi512_ps(__m512i v) {
  return {_mm256_castsi256_ps(v.lo), _mm256_castsi256_ps(v.hi)};
}
QUIRE_EMULATED __m512i _mm512_castps_si512(__m512 v) {
  return {_mm256_castps_si256(v.lo), _mm256_castps_si256(v.hi)};
}
QUIRE_EMULATED __m256 _mm512_castps512_ps256(__m512 v) { return v.lo; }
#undef _mm512_extractf32x8_ps
QUIRE_EMULATED __m256 _mm512_extractf32x8_ps(__m512 v, int half) {
  return (half & 1) == 0 ? v.lo : v.hi;
}

// -------------------------------------------------------------------------------------------------
// float32

QUIRE_EMULATED __m512 _mm512_add_ps(__m512 a, __m512 b) {
  return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)};
}
QUIRE_EMULATED __m512 _mm512_sub_ps(__m512 a, __m512 b) {
  return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)};
}
QUIRE_EMULATED __m512 _mm512_mul_ps(__m512 a, __m512 b) {
  return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)};
}
QUIRE_EMULATED __m512 _mm512_div_ps(__m512 a, __m512 b) {
  return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)};
}
QUIRE_EMULATED __m512 _mm512_fmadd_ps(__m512 a, __m512 b, __m512 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
QUIRE_EMULATED __m512 _mm512_max_ps(__m512 a, __m512 b) {
  return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)};
}
QUIRE_EMULATED __m512 _mm512_min_ps(__m512 a, __m512 b) {
  return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)};
}
// Only the immediates that keep no fraction bits (the upper four are zero).
#undef _mm512_roundscale_ps
QUIRE_EMULATED __m512 _mm512_roundscale_ps(__m512 a, int imm) {
  return {_mm256_round_ps(a.lo, imm), _mm256_round_ps(a.hi, imm)};
}
// a * 2^floor(b), rounded once: in double, which holds the product exactly.
QUIRE_EMULATED __m128 ScaleFour(__m128 a, __m128 b) {
  const __m256d least = _mm256_set1_pd(-400);  // enough for 0 out of any a, and 400 for infinity
  const __m256d most = _mm256_set1_pd(400);
  const __m256d n = _mm256_min_pd(most, _mm256_max_pd(least, _mm256_floor_pd(_mm256_cvtps_pd(b))));
  const __m256i exponent =
      _mm256_add_epi64(_mm256_cvtepi32_epi64(_mm256_cvtpd_epi32(n)), _mm256_set1_epi64x(1023));
  const __m256d power = _mm256_castsi256_pd(_mm256_slli_epi64(exponent, 52));
  const __m128 scaled = _mm256_cvtpd_ps(_mm256_mul_pd(_mm256_cvtps_pd(a), power));
  return _mm_blendv_ps(scaled, b, _mm_cmpunord_ps(b, b));
}
QUIRE_EMULATED __m256 ScaleEight(__m256 a, __m256 b) {
  return _mm256_set_m128(ScaleFour(_mm256_extractf128_ps(a, 1), _mm256_extractf128_ps(b, 1)),
                         ScaleFour(_mm256_castps256_ps128(a), _mm256_castps256_ps128(b)));
}
// b is finite or NaN here; the table of infinities is not done.
QUIRE_EMULATED __m512 _mm512_scalef_ps(__m512 a, __m512 b) {
  return {ScaleEight(a.lo, b.lo), ScaleEight(a.hi, b.hi)};
}

// -------------------------------------------------------------------------------------------------
// masks: bit i belongs to lane i

QUIRE_EMULATED __m256i LanesOf(unsigned bits) {
  const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i all = _mm256_set1_epi32(static_cast<int>(bits));
  return _mm256_cmpeq_epi32(_mm256_and_si256(all, bit), bit);
}
QUIRE_EMULATED __m512 _mm512_mask_blend_ps(__mmask16 m, __m512 a, __m512 b) {  // m ? b : a
  return {_mm256_blendv_ps(a.lo, b.lo, _mm256_castsi256_ps(LanesOf(m))),
          _mm256_blendv_ps(a.hi, b.hi, _mm256_castsi256_ps(LanesOf(unsigned{m} >> 8)))};
}
QUIRE_EMULATED __m512 _mm512_maskz_mov_ps(__mmask16 m, __m512 a) {
  return _mm512_mask_blend_ps(m, _mm512_setzero_ps(), a);
}
#undef _mm512_cmp_ps_mask
QUIRE_EMULATED __mmask16 _mm512_cmp_ps_mask(__m512 a, __m512 b, int predicate) {
  const int lo = _mm256_movemask_ps(_mm256_cmp_ps(a.lo, b.lo, predicate));
  const int hi = _mm256_movemask_ps(_mm256_cmp_ps(a.hi, b.hi, predicate));
  return static_cast<__mmask16>(lo | hi << 8);
}

// -------------------------------------------------------------------------------------------------
// integers

QUIRE_EMULATED __m512i _mm512_and_si512(__m512i a, __m512i b) {
  return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)};
}
QUIRE_EMULATED __m512i _mm512_or_si512(__m512i a, __m512i b) {
  return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)};
}
QUIRE_EMULATED __m512i _mm512_mask_or_epi32(__m512i src, __mmask16 m, __m512i a, __m512i b) {
  return {_mm256_blendv_epi8(src.lo, _mm256_or_si256(a.lo, b.lo), LanesOf(m)),
          _mm256_blendv_epi8(src.hi, _mm256_or_si256(a.hi, b.hi), LanesOf(unsigned{m} >> 8))};
}
QUIRE_EMULATED __m512i _mm512_add_epi32(__m512i a, __m512i b) {
  return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)};
}
#undef _mm512_slli_epi32
QUIRE_EMULATED __m512i _mm512_slli_epi32(__m512i a, int count) {
  return {_mm256_slli_epi32(a.lo, count), _mm256_slli_epi32(a.hi, count)};
}
#undef _mm512_srli_epi32
QUIRE_EMULATED __m512i _mm512_srli_epi32(__m512i a, int count) {
  return {_mm256_srli_epi32(a.lo, count), _mm256_srli_epi32(a.hi, count)};
}
#undef _mm512_srai_epi32
QUIRE_EMULATED __m512i _mm512_srai_epi32(__m512i a, int count) {
  return {_mm256_srai_epi32(a.lo, count), _mm256_srai_epi32(a.hi, count)};
}
QUIRE_EMULATED __m512i _mm512_add_epi16(__m512i a, __m512i b) {
  return {_mm256_add_epi16(a.lo, b.lo), _mm256_add_epi16(a.hi, b.hi)};
}
#undef _mm512_slli_epi16
QUIRE_EMULATED __m512i _mm512_slli_epi16(__m512i a, int count) {
  return {_mm256_slli_epi16(a.lo, count), _mm256_slli_epi16(a.hi, count)};
}
// Bit i of the mask: word i of a & b is zero.
QUIRE_EMULATED __mmask32 _mm512_testn_epi16_mask(__m512i a, __m512i b) {
  const __m256i zero = _mm256_setzero_si256();
  const __m256i lo = _mm256_cmpeq_epi16(_mm256_and_si256(a.lo, b.lo), zero);
  const __m256i hi = _mm256_cmpeq_epi16(_mm256_and_si256(a.hi, b.hi), zero);
  const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packs_epi16(lo, hi), 0xD8);
  return static_cast<__mmask32>(_mm256_movemask_epi8(bytes));
}
// Word i of the result: that word of `table` which the lower five bits of word i of `at` name,
// where the mask is set; else word i of src.
QUIRE_EMULATED __m512i _mm512_mask_permutexvar_epi16(__m512i src, __mmask32 m, __m512i at,
                                                     __m512i table) {
  uint16_t words[3][32];
  _mm512_storeu_si512(words[0], src);
  _mm512_storeu_si512(words[1], at);
  _mm512_storeu_si512(words[2], table);
  for (int i = 0; i < 32; ++i) {
    if ((m >> i & 1) != 0) words[0][i] = words[2][words[1][i] & 31];
  }
  return _mm512_loadu_si512(words[0]);
}
// Bytes of each 16 by the lower bits of the bytes of `at`, zero where their highest bit is set.
// VPERMPS: the low four bits of an index count.
QUIRE_EMULATED __m256 EightOfSixteen(__m256i at, __m512 table) {
  const __m256 low = _mm256_permutevar8x32_ps(table.lo, at);
  const __m256 high = _mm256_permutevar8x32_ps(table.hi, at);
  return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(at, 28)));
}
QUIRE_EMULATED __m512 _mm512_permutexvar_ps(__m512i at, __m512 table) {
  return {EightOfSixteen(at.lo, table), EightOfSixteen(at.hi, table)};
}
QUIRE_EMULATED __m512i _mm512_shuffle_epi8(__m512i a, __m512i at) {
  return {_mm256_shuffle_epi8(a.lo, at.lo), _mm256_shuffle_epi8(a.hi, at.hi)};
}
QUIRE_EMULATED __m512i _mm512_unpacklo_epi64(__m512i a, __m512i b) {
  return {_mm256_unpacklo_epi64(a.lo, b.lo), _mm256_unpacklo_epi64(a.hi, b.hi)};
}
QUIRE_EMULATED __m512i _mm512_unpackhi_epi64(__m512i a, __m512i b) {
  return {_mm256_unpackhi_epi64(a.lo, b.lo), _mm256_unpackhi_epi64(a.hi, b.hi)};
}
// Quarters of 16 bytes: two of a, then two of b, by two bits each of the immediate.
#undef _mm512_shuffle_i64x2
QUIRE_EMULATED __m512i _mm512_shuffle_i64x2(__m512i a, __m512i b, int imm) {
  const auto quarter = [](const __m512i& v, int n) {
    const __m256i half = (n & 2) == 0 ? v.lo : v.hi;
    return (n & 1) == 0 ? _mm256_castsi256_si128(half) : _mm256_extracti128_si256(half, 1);
  };
  return {_mm256_set_m128i(quarter(a, imm >> 2), quarter(a, imm)),
          _mm256_set_m128i(quarter(b, imm >> 6), quarter(b, imm >> 4))};
}
QUIRE_EMULATED __m512i _mm512_madd_epi16(__m512i a, __m512i b) {
  return {_mm256_madd_epi16(a.lo, b.lo), _mm256_madd_epi16(a.hi, b.hi)};
}

// -------------------------------------------------------------------------------------------------
// conversions

QUIRE_EMULATED __m512i _mm512_cvtepu16_epi32(__m256i v) {
  return {_mm256_cvtepu16_epi32(_mm256_castsi256_si128(v)),
          _mm256_cvtepu16_epi32(_mm256_extracti128_si256(v, 1))};
}
QUIRE_EMULATED __m512i _mm512_cvtepi16_epi32(__m256i v) {
  return {_mm256_cvtepi16_epi32(_mm256_castsi256_si128(v)),
          _mm256_cvtepi16_epi32(_mm256_extracti128_si256(v, 1))};
}
QUIRE_EMULATED __m512i _mm512_cvtepi8_epi16(__m256i v) {
  return {_mm256_cvtepi8_epi16(_mm256_castsi256_si128(v)),
          _mm256_cvtepi8_epi16(_mm256_extracti128_si256(v, 1))};
}
// The lower 16 bits of each lane.
QUIRE_EMULATED __m256i _mm512_cvtepi32_epi16(__m512i v) {
  const __m256i low = _mm256_set1_epi32(0xffff);
  const __m256i both =
      _mm256_packus_epi32(_mm256_and_si256(v.lo, low), _mm256_and_si256(v.hi, low));
  return _mm256_permute4x64_epi64(both, 0xD8);
}
QUIRE_EMULATED __m512 _mm512_cvtepi32_ps(__m512i v) {
  return {_mm256_cvtepi32_ps(v.lo), _mm256_cvtepi32_ps(v.hi)};
}
QUIRE_EMULATED __m512i _mm512_cvtps_epi32(__m512 v) {
  return {_mm256_cvtps_epi32(v.lo), _mm256_cvtps_epi32(v.hi)};
}
QUIRE_EMULATED __m512 _mm512_cvtph_ps(__m256i v) {
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(v)),
          _mm256_cvtph_ps(_mm256_extracti128_si256(v, 1))};
}
#undef _mm512_cvtps_ph
QUIRE_EMULATED __m256i _mm512_cvtps_ph(__m512 v, int rounding) {
  return _mm256_set_m128i(_mm256_cvtps_ph(v.hi, rounding), _mm256_cvtps_ph(v.lo, rounding));
}

// -------------------------------------------------------------------------------------------------
// AVX512_BF16 and AVX512_VNNI

// VDPBF16PS: the odd elements first, then the even ones, each step a fused one rounded to nearest
// even; denormals are zeros where they come in and where they come out. The instruction neither
// reads nor changes MXCSR; here MXCSR says the same to the CPU's own fused steps.
QUIRE_EMULATED __m512 _mm512_dpbf16_ps(__m512 acc, __m512bh a, __m512bh b) {
  constexpr unsigned kNearestZeroDenormals = 0x9fc0;  // all exceptions masked, FTZ and DAZ set
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000U));
  const __m512i a_odd = _mm512_and_si512(a, high);
  const __m512i b_odd = _mm512_and_si512(b, high);
  const __m512i a_even = _mm512_slli_epi32(a, 16);
  const __m512i b_even = _mm512_slli_epi32(b, 16);
  unsigned before;
  __asm__(
      "stmxcsr %[before]\n\t"
      "ldmxcsr %[during]\n\t"
      "vfmadd231ps %[a_odd_lo], %[b_odd_lo], %[lo]\n\t"
      "vfmadd231ps %[a_odd_hi], %[b_odd_hi], %[hi]\n\t"
      "vfmadd231ps %[a_even_lo], %[b_even_lo], %[lo]\n\t"
      "vfmadd231ps %[a_even_hi], %[b_even_hi], %[hi]\n\t"
      "ldmxcsr %[before]"
      : [before] "=&m"(before), [lo] "+&x"(acc.lo), [hi] "+&x"(acc.hi)
      : [during] "m"(kNearestZeroDenormals), [a_odd_lo] "x"(a_odd.lo), [a_odd_hi] "x"(a_odd.hi),
        [b_odd_lo] "x"(b_odd.lo), [b_odd_hi] "x"(b_odd.hi), [a_even_lo] "x"(a_even.lo),
        [a_even_hi] "x"(a_even.hi), [b_even_lo] "x"(b_even.lo), [b_even_hi] "x"(b_even.hi));
  return acc;
}
// VCVTNEPS2BF16: nearest, ties to even; denormals become zeros of their sign, NaN quiet.
QUIRE_EMULATED __m128i EightToBF16(__m256 v) {
  const __m256i bits = _mm256_castps_si256(v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i result = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i exponent = _mm256_and_si256(bits, _mm256_set1_epi32(0x7f800000));
  const __m256i denormal = _mm256_cmpeq_epi32(exponent, _mm256_setzero_si256());
  const __m256i sign = _mm256_set1_epi32(static_cast<int>(0x80000000U));
  result = _mm256_blendv_epi8(result, _mm256_and_si256(bits, sign), denormal);
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x00400000));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  result = _mm256_srli_epi32(_mm256_blendv_epi8(result, quiet, nan), 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(result), _mm256_extracti128_si256(result, 1));
}
QUIRE_EMULATED __m256i _mm512_cvtneps_pbh(__m512 v) {
  return _mm256_set_m128i(EightToBF16(v.hi), EightToBF16(v.lo));
}
QUIRE_EMULATED __m512i _mm512_cvtne2ps_pbh(__m512 high, __m512 low) {
  return {_mm512_cvtneps_pbh(low), _mm512_cvtneps_pbh(high)};
}
// VPDPWSSD: sums wrap around.
QUIRE_EMULATED __m512i _mm512_dpwssd_epi32(__m512i acc, __m512i a, __m512i b) {
  return _mm512_add_epi32(acc, _mm512_madd_epi16(a, b));
}

// -------------------------------------------------------------------------------------------------
// bytes

QUIRE_EMULATED __m512i _mm512_xor_si512(__m512i a, __m512i b) {
  return {_mm256_xor_si256(a.lo, b.lo), _mm256_xor_si256(a.hi, b.hi)};
}
QUIRE_EMULATED __m512i _mm512_mullo_epi32(__m512i a, __m512i b) {
  return {_mm256_mullo_epi32(a.lo, b.lo), _mm256_mullo_epi32(a.hi, b.hi)};
}
QUIRE_EMULATED __m512i _mm512_cvtepi8_epi32(__m128i v) {
  return {_mm256_cvtepi8_epi32(v), _mm256_cvtepi8_epi32(_mm_srli_si128(v, 8))};
}
QUIRE_EMULATED __m512i _mm512_cvtepu8_epi32(__m128i v) {
  return {_mm256_cvtepu8_epi32(v), _mm256_cvtepu8_epi32(_mm_srli_si128(v, 8))};
}
// The lowest byte of each lane.
QUIRE_EMULATED __m128i _mm512_cvtepi32_epi8(__m512i v) {
  const __m256i pairs = _mm512_cvtepi32_epi16(v);
  const __m256i bytes = _mm256_and_si256(pairs, _mm256_set1_epi16(0xff));
  return _mm_packus_epi16(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1));
}
QUIRE_EMULATED __m512i _mm512_sub_epi8(__m512i a, __m512i b) {
  return {_mm256_sub_epi8(a.lo, b.lo), _mm256_sub_epi8(a.hi, b.hi)};
}
QUIRE_EMULATED __m512i _mm512_abs_epi8(__m512i v) {
  return {_mm256_abs_epi8(v.lo), _mm256_abs_epi8(v.hi)};
}
QUIRE_EMULATED __mmask64 _mm512_movepi8_mask(__m512i v) {
  const auto low = static_cast<uint32_t>(_mm256_movemask_epi8(v.lo));
  const auto high = static_cast<uint32_t>(_mm256_movemask_epi8(v.hi));
  return static_cast<uint64_t>(high) << 32 | low;
}
QUIRE_EMULATED __m512i _mm512_mask_sub_epi8(__m512i src, __mmask64 m, __m512i a, __m512i b) {
  alignas(32) uint8_t x[64];
  alignas(32) uint8_t y[64];
  alignas(32) uint8_t r[64];
  _mm512_storeu_si512(x, a);
  _mm512_storeu_si512(y, b);
  _mm512_storeu_si512(r, src);
  for (int i = 0; i < 64; ++i) {
    if ((m >> i & 1) != 0) r[i] = static_cast<uint8_t>(x[i] - y[i]);
  }
  return _mm512_loadu_si512(r);
}
QUIRE_EMULATED __m512i _mm512_maddubs_epi16(__m512i a, __m512i b) {
  return {_mm256_maddubs_epi16(a.lo, b.lo), _mm256_maddubs_epi16(a.hi, b.hi)};
}
// VPDPBUSD: unsigned bytes of a times signed ones of b, four products per lane.
QUIRE_EMULATED __m512i _mm512_dpbusd_epi32(__m512i acc, __m512i a, __m512i b) {
  alignas(32) uint8_t x[64];
  alignas(32) int8_t y[64];
  alignas(32) int32_t r[16];
  _mm512_storeu_si512(x, a);
  _mm512_storeu_si512(y, b);
  _mm512_storeu_si512(r, acc);
  for (int i = 0; i < 64; ++i) r[i / 4] += x[i] * y[i];
  return _mm512_loadu_si512(r);
}

#undef QUIRE_EMULATED

}  // namespace quire::avx512_emulation

#pragma GCC pop_options

#endif  // QUIRE_KERNELS_CPU_AVX512_EMULATION_H_
