// Vectors of 16 float32 lanes, one meaning on every path. Included once per path, inside that
// path's namespace and target region (cpu/avx512.cc and its sisters), never by other headers; hence
// no include guard, no namespace, no #include here.
//
// The including file defines exactly one of QUIRE_SIMD_AVX512, QUIRE_SIMD_AVX2, QUIRE_SIMD_NEON,
// QUIRE_SIMD_SCALAR, and besides QUIRE_SIMD_AVX512 QUIRE_SIMD_BF16 where the CPU has bfloat16 dot
// products, or QUIRE_SIMD_TILES where bfloat16 is summed as the tile unit does (tile_unit-inl.h);
// QUIRE_SIMD_VNNI where it has dot products of integers, which change no bit.
//
// Every operation gives the same bits on every path (the caller has MXCSR or FPCR at its default,
// base/float_environment.h), except DotPair with QUIRE_SIMD_BF16, and except the sign and payload
// of a NaN, which is a NaN on all. That is why reductions have a fixed tree and why Max has x86's
// rule for NaN.

#define QUIRE_INLINE static inline __attribute__((always_inline))

constexpr int kLanes = 16;

// -------------------------------------------------------------------------------------------------
// the vector
#if defined(QUIRE_SIMD_AVX512)

using VF = __m512;
using VMask = __mmask16;

QUIRE_INLINE VF Set1(float x) { return _mm512_set1_ps(x); }
QUIRE_INLINE VF Zero() { return _mm512_setzero_ps(); }
QUIRE_INLINE VF Load(const float* p) { return _mm512_loadu_ps(p); }
QUIRE_INLINE void Store(float* p, VF v) { _mm512_storeu_ps(p, v); }
QUIRE_INLINE VF Add(VF a, VF b) { return _mm512_add_ps(a, b); }
QUIRE_INLINE VF Sub(VF a, VF b) { return _mm512_sub_ps(a, b); }
QUIRE_INLINE VF Mul(VF a, VF b) { return _mm512_mul_ps(a, b); }
QUIRE_INLINE VF Div(VF a, VF b) { return _mm512_div_ps(a, b); }
QUIRE_INLINE VF Fma(VF a, VF b, VF c) {
  return _mm512_fmadd_ps(a, b, c);
}  // a * b + c, rounded once
QUIRE_INLINE VF Max(VF a, VF b) { return _mm512_max_ps(a, b); }  // a > b ? a : b
QUIRE_INLINE VF Min(VF a, VF b) { return _mm512_min_ps(a, b); }  // a < b ? a : b
QUIRE_INLINE VF RoundToInt(VF a) {                               // nearest, ties to even
  return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
QUIRE_INLINE VF Scale2(VF a, VF n) {
  return _mm512_scalef_ps(a, n);
}  // a * 2^n, integral n in [-126, 127]
QUIRE_INLINE VMask MaskRange(int lo, int hi) {  // lanes lo <= i < hi, 0 <= lo, hi <= 16
  return lo >= hi ? VMask(0) : static_cast<VMask>((0xffffU << lo) & (0xffffU >> (kLanes - hi)));
}
QUIRE_INLINE VMask MaskOf(uint32_t lanes) { return static_cast<VMask>(lanes); }  // bit i: lane i
QUIRE_INLINE VMask NotLess(VF a, VF b) {
  return _mm512_cmp_ps_mask(a, b, _CMP_NLT_UQ);
}  // !(a < b): true for NaN
QUIRE_INLINE VF KeepIf(VMask m, VF a) { return _mm512_maskz_mov_ps(m, a); }  // lane of a, or +0
QUIRE_INLINE VF Select(VMask m, VF a, VF b) { return _mm512_mask_blend_ps(m, b, a); }  // m ? a : b
QUIRE_INLINE VF LoadBits16AsHigh(const uint16_t* p) {  // 16 bfloat16 -> float32
  return _mm512_castsi512_ps(_mm512_slli_epi32(
      _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16));
}
QUIRE_INLINE VF LoadF16(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
QUIRE_INLINE void StoreF16(uint16_t* p, VF v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
// The bits of a number, of which the upper half is the nearest bfloat16.
QUIRE_INLINE __m512i RoundUpperHalves(__m512i u) {
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  return _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
}
// float32 rounded to the nearest bfloat16, kept as float32; NaN stays NaN (quiet).
QUIRE_INLINE VF RoundToBF16(VF v) {
  const __m512i u = _mm512_castps_si512(v);
  __m512i r = RoundUpperHalves(u);
  const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  r = _mm512_mask_or_epi32(r, nan, u, _mm512_set1_epi32(0x00400000));
  return _mm512_castsi512_ps(_mm512_and_si512(r, _mm512_set1_epi32(static_cast<int>(0xffff0000U))));
}
// REQUIRES: v is no NaN.
QUIRE_INLINE VF RoundNumberToBF16(VF v) {
  const __m512i r = RoundUpperHalves(_mm512_castps_si512(v));
  return _mm512_castsi512_ps(_mm512_and_si512(r, _mm512_set1_epi32(static_cast<int>(0xffff0000U))));
}
// REQUIRES: v is exactly representable in bfloat16 (see RoundToBF16).
QUIRE_INLINE void StoreBF16Exact(uint16_t* p, VF v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(v), 16)));
}
// ((i + (i + 8)) + 4) + 2) + 1: halves are added until one lane is left.
QUIRE_INLINE float ReduceAdd(VF v) {
  const __m256 a = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
  const __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  const __m128 c = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(c, _mm_shuffle_ps(c, c, 1)));
}
QUIRE_INLINE float ReduceMax(VF v) {
  const __m256 a = _mm256_max_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
  const __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  const __m128 c = _mm_max_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_max_ss(c, _mm_shuffle_ps(c, c, 1)));
}

#elif defined(QUIRE_SIMD_AVX2)

struct VF {
  __m256 lo, hi;
};
struct VMask {
  __m256 lo, hi;  // all ones or all zeros per lane
};

QUIRE_INLINE VF Set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
QUIRE_INLINE VF Zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
QUIRE_INLINE VF Load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
QUIRE_INLINE void Store(float* p, VF v) {
  _mm256_storeu_ps(p, v.lo);
  _mm256_storeu_ps(p + 8, v.hi);
}
QUIRE_INLINE VF Add(VF a, VF b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
QUIRE_INLINE VF Sub(VF a, VF b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
QUIRE_INLINE VF Mul(VF a, VF b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
QUIRE_INLINE VF Div(VF a, VF b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
QUIRE_INLINE VF Fma(VF a, VF b, VF c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
QUIRE_INLINE VF Max(VF a, VF b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
QUIRE_INLINE VF Min(VF a, VF b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
QUIRE_INLINE VF RoundToInt(VF a) {
  return {_mm256_round_ps(a.lo, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
          _mm256_round_ps(a.hi, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
QUIRE_INLINE __m256 PowerOfTwo(__m256 n) {
  return _mm256_castsi256_ps(
      _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
QUIRE_INLINE VF Scale2(VF a, VF n) {
  return {_mm256_mul_ps(a.lo, PowerOfTwo(n.lo)), _mm256_mul_ps(a.hi, PowerOfTwo(n.hi))};
}
QUIRE_INLINE __m256 MaskRange8(int lo, int hi) {
  const __m256i i = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_castsi256_ps(_mm256_andnot_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(lo), i),
                                                 _mm256_cmpgt_epi32(_mm256_set1_epi32(hi), i)));
}
QUIRE_INLINE VMask MaskRange(int lo, int hi) {
  return {MaskRange8(lo, hi), MaskRange8(lo - 8, hi - 8)};
}
QUIRE_INLINE __m256 MaskOf8(uint32_t lanes) {
  const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i all = _mm256_set1_epi32(static_cast<int>(lanes));
  return _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(all, bit), bit));
}
QUIRE_INLINE VMask MaskOf(uint32_t lanes) { return {MaskOf8(lanes), MaskOf8(lanes >> 8)}; }
QUIRE_INLINE VMask NotLess(VF a, VF b) {
  return {_mm256_cmp_ps(a.lo, b.lo, _CMP_NLT_UQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_NLT_UQ)};
}
QUIRE_INLINE VF KeepIf(VMask m, VF a) {
  return {_mm256_and_ps(m.lo, a.lo), _mm256_and_ps(m.hi, a.hi)};
}
QUIRE_INLINE VF Select(VMask m, VF a, VF b) {
  return {_mm256_blendv_ps(b.lo, a.lo, m.lo), _mm256_blendv_ps(b.hi, a.hi, m.hi)};
}
QUIRE_INLINE __m256 LoadBits16AsHigh8(const uint16_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(
      _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16));
}
QUIRE_INLINE VF LoadBits16AsHigh(const uint16_t* p) {
  return {LoadBits16AsHigh8(p), LoadBits16AsHigh8(p + 8)};
}
QUIRE_INLINE VF LoadF16(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
QUIRE_INLINE void StoreF16(uint16_t* p, VF v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm256_cvtps_ph(v.lo, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8),
                   _mm256_cvtps_ph(v.hi, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
QUIRE_INLINE __m256i RoundUpperHalves(__m256i u) {
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  return _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
}
QUIRE_INLINE __m256 RoundToBF16x8(__m256 v) {
  const __m256i u = _mm256_castps_si256(v);
  const __m256i r = RoundUpperHalves(u);
  const __m256i quiet = _mm256_or_si256(u, _mm256_set1_epi32(0x00400000));
  const __m256 nan = _mm256_cmp_ps(v, v, _CMP_UNORD_Q);
  const __m256 b = _mm256_blendv_ps(_mm256_castsi256_ps(r), _mm256_castsi256_ps(quiet), nan);
  return _mm256_and_ps(b, _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(0xffff0000U))));
}
QUIRE_INLINE VF RoundToBF16(VF v) { return {RoundToBF16x8(v.lo), RoundToBF16x8(v.hi)}; }
QUIRE_INLINE __m256 RoundNumberToBF16x8(__m256 v) {
  const __m256i r = RoundUpperHalves(_mm256_castps_si256(v));
  return _mm256_castsi256_ps(_mm256_and_si256(r, _mm256_set1_epi32(static_cast<int>(0xffff0000U))));
}
QUIRE_INLINE VF RoundNumberToBF16(VF v) {
  return {RoundNumberToBF16x8(v.lo), RoundNumberToBF16x8(v.hi)};
}
QUIRE_INLINE __m128i HighHalves(__m256 v) {
  const __m256i s = _mm256_srli_epi32(_mm256_castps_si256(v), 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1));
}
QUIRE_INLINE void StoreBF16Exact(uint16_t* p, VF v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), HighHalves(v.lo));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), HighHalves(v.hi));
}
QUIRE_INLINE float ReduceAdd(VF v) {
  const __m256 a = _mm256_add_ps(v.lo, v.hi);
  const __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  const __m128 c = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(c, _mm_shuffle_ps(c, c, 1)));
}
QUIRE_INLINE float ReduceMax(VF v) {
  const __m256 a = _mm256_max_ps(v.lo, v.hi);
  const __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  const __m128 c = _mm_max_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_max_ss(c, _mm_shuffle_ps(c, c, 1)));
}

#elif defined(QUIRE_SIMD_NEON)

struct VF {
  float32x4_t v[4];
};
struct VMask {
  uint32x4_t v[4];  // all ones or all zeros per lane
};

// f of each quarter of one, two or three vectors.
#define QUIRE_QUARTERS1(f, a) \
  { f((a).v[0]), f((a).v[1]), f((a).v[2]), f((a).v[3]) }
#define QUIRE_QUARTERS2(f, a, b) \
  { f((a).v[0], (b).v[0]), f((a).v[1], (b).v[1]), f((a).v[2], (b).v[2]), f((a).v[3], (b).v[3]) }
#define QUIRE_QUARTERS3(f, a, b, c)                                      \
  {                                                                      \
    f((a).v[0], (b).v[0], (c).v[0]), f((a).v[1], (b).v[1], (c).v[1]),    \
        f((a).v[2], (b).v[2], (c).v[2]), f((a).v[3], (b).v[3], (c).v[3]) \
  }

QUIRE_INLINE VF Set1(float x) {
  const float32x4_t all = vdupq_n_f32(x);
  return {{all, all, all, all}};
}
QUIRE_INLINE VF Zero() { return Set1(0.0F); }
QUIRE_INLINE VF Load(const float* p) {
  return {{vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}};
}
QUIRE_INLINE void Store(float* p, VF v) {
  vst1q_f32(p, v.v[0]);
  vst1q_f32(p + 4, v.v[1]);
  vst1q_f32(p + 8, v.v[2]);
  vst1q_f32(p + 12, v.v[3]);
}
QUIRE_INLINE VF Add(VF a, VF b) { return {QUIRE_QUARTERS2(vaddq_f32, a, b)}; }
QUIRE_INLINE VF Sub(VF a, VF b) { return {QUIRE_QUARTERS2(vsubq_f32, a, b)}; }
QUIRE_INLINE VF Mul(VF a, VF b) { return {QUIRE_QUARTERS2(vmulq_f32, a, b)}; }
QUIRE_INLINE VF Div(VF a, VF b) { return {QUIRE_QUARTERS2(vdivq_f32, a, b)}; }
QUIRE_INLINE VF Fma(VF a, VF b, VF c) { return {QUIRE_QUARTERS3(vfmaq_f32, c, a, b)}; }
// NEON's own maximum is NaN where either operand is.
QUIRE_INLINE float32x4_t MaxQuarter(float32x4_t a, float32x4_t b) {
  return vbslq_f32(vcgtq_f32(a, b), a, b);
}
QUIRE_INLINE float32x4_t MinQuarter(float32x4_t a, float32x4_t b) {
  return vbslq_f32(vcltq_f32(a, b), a, b);
}
QUIRE_INLINE VF Max(VF a, VF b) { return {QUIRE_QUARTERS2(MaxQuarter, a, b)}; }
QUIRE_INLINE VF Min(VF a, VF b) { return {QUIRE_QUARTERS2(MinQuarter, a, b)}; }
QUIRE_INLINE VF RoundToInt(VF a) { return {QUIRE_QUARTERS1(vrndnq_f32, a)}; }
QUIRE_INLINE float32x4_t ScaleQuarter(float32x4_t a, float32x4_t n) {
  const int32x4_t exponent = vaddq_s32(vcvtnq_s32_f32(n), vdupq_n_s32(127));
  return vmulq_f32(a, vreinterpretq_f32_s32(vshlq_n_s32(exponent, 23)));
}
QUIRE_INLINE VF Scale2(VF a, VF n) { return {QUIRE_QUARTERS2(ScaleQuarter, a, n)}; }
QUIRE_INLINE uint32x4_t MaskRange4(int lo, int hi) {
  const int32x4_t i =
      vcombine_s32(vcreate_s32(0x0000000100000000U), vcreate_s32(0x0000000300000002U));
  return vandq_u32(vcgeq_s32(i, vdupq_n_s32(lo)), vcltq_s32(i, vdupq_n_s32(hi)));
}
QUIRE_INLINE VMask MaskRange(int lo, int hi) {
  return {{MaskRange4(lo, hi), MaskRange4(lo - 4, hi - 4), MaskRange4(lo - 8, hi - 8),
           MaskRange4(lo - 12, hi - 12)}};
}
QUIRE_INLINE uint32x4_t MaskOf4(uint32_t lanes) {
  const uint32x4_t bits =
      vcombine_u32(vcreate_u32(0x0000000200000001U), vcreate_u32(0x0000000800000004U));
  return vtstq_u32(vdupq_n_u32(lanes), bits);
}
QUIRE_INLINE VMask MaskOf(uint32_t lanes) {
  return {{MaskOf4(lanes), MaskOf4(lanes >> 4), MaskOf4(lanes >> 8), MaskOf4(lanes >> 12)}};
}
QUIRE_INLINE uint32x4_t NotLessQuarter(float32x4_t a, float32x4_t b) {
  return vmvnq_u32(vcltq_f32(a, b));
}
QUIRE_INLINE VMask NotLess(VF a, VF b) { return {QUIRE_QUARTERS2(NotLessQuarter, a, b)}; }
QUIRE_INLINE float32x4_t KeepQuarter(uint32x4_t m, float32x4_t a) {
  return vreinterpretq_f32_u32(vandq_u32(m, vreinterpretq_u32_f32(a)));
}
QUIRE_INLINE VF KeepIf(VMask m, VF a) { return {QUIRE_QUARTERS2(KeepQuarter, m, a)}; }
QUIRE_INLINE VF Select(VMask m, VF a, VF b) { return {QUIRE_QUARTERS3(vbslq_f32, m, a, b)}; }
// Eight numbers of 16 bits in the upper halves of words.
QUIRE_INLINE float32x4_t FirstAsHigh(uint16x8_t bits) {
  return vreinterpretq_f32_u16(vzip1q_u16(vdupq_n_u16(0), bits));
}
QUIRE_INLINE float32x4_t LastAsHigh(uint16x8_t bits) {
  return vreinterpretq_f32_u16(vzip2q_u16(vdupq_n_u16(0), bits));
}
QUIRE_INLINE VF AsHigh(uint16x8_t first, uint16x8_t last) {
  return {{FirstAsHigh(first), LastAsHigh(first), FirstAsHigh(last), LastAsHigh(last)}};
}
QUIRE_INLINE VF LoadBits16AsHigh(const uint16_t* p) {
  return AsHigh(vld1q_u16(p), vld1q_u16(p + 8));
}
QUIRE_INLINE VF WidenF16(uint16x8_t first, uint16x8_t last) {
  const float16x8_t a = vreinterpretq_f16_u16(first);
  const float16x8_t b = vreinterpretq_f16_u16(last);
  return {{vcvt_f32_f16(vget_low_f16(a)), vcvt_high_f32_f16(a), vcvt_f32_f16(vget_low_f16(b)),
           vcvt_high_f32_f16(b)}};
}
QUIRE_INLINE VF LoadF16(const uint16_t* p) { return WidenF16(vld1q_u16(p), vld1q_u16(p + 8)); }
QUIRE_INLINE void StoreF16(uint16_t* p, VF v) {
  const float16x8_t first = vcvt_high_f16_f32(vcvt_f16_f32(v.v[0]), v.v[1]);
  const float16x8_t last = vcvt_high_f16_f32(vcvt_f16_f32(v.v[2]), v.v[3]);
  vst1q_u16(p, vreinterpretq_u16_f16(first));
  vst1q_u16(p + 8, vreinterpretq_u16_f16(last));
}
QUIRE_INLINE uint32x4_t RoundUpperHalves(uint32x4_t u) {
  const uint32x4_t odd = vandq_u32(vshrq_n_u32(u, 16), vdupq_n_u32(1));
  return vaddq_u32(u, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
}
QUIRE_INLINE float32x4_t RoundNumbersOfQuarter(float32x4_t v) {
  const uint32x4_t r = RoundUpperHalves(vreinterpretq_u32_f32(v));
  return vreinterpretq_f32_u32(vandq_u32(r, vdupq_n_u32(0xffff0000U)));
}
QUIRE_INLINE float32x4_t RoundQuarter(float32x4_t v) {
  const uint32x4_t u = vreinterpretq_u32_f32(v);
  const uint32x4_t quiet = vorrq_u32(u, vdupq_n_u32(0x00400000));
  const uint32x4_t r = vbslq_u32(vceqq_f32(v, v), RoundUpperHalves(u), quiet);
  return vreinterpretq_f32_u32(vandq_u32(r, vdupq_n_u32(0xffff0000U)));
}
QUIRE_INLINE VF RoundToBF16(VF v) { return {QUIRE_QUARTERS1(RoundQuarter, v)}; }
QUIRE_INLINE VF RoundNumberToBF16(VF v) { return {QUIRE_QUARTERS1(RoundNumbersOfQuarter, v)}; }
QUIRE_INLINE uint16x8_t HighHalves(float32x4_t first, float32x4_t last) {
  return vuzp2q_u16(vreinterpretq_u16_f32(first), vreinterpretq_u16_f32(last));
}
QUIRE_INLINE void StoreBF16Exact(uint16_t* p, VF v) {
  vst1q_u16(p, HighHalves(v.v[0], v.v[1]));
  vst1q_u16(p + 8, HighHalves(v.v[2], v.v[3]));
}
QUIRE_INLINE float ReduceAdd(VF v) {
  const float32x4_t b = vaddq_f32(vaddq_f32(v.v[0], v.v[2]), vaddq_f32(v.v[1], v.v[3]));
  const float32x2_t c = vadd_f32(vget_low_f32(b), vget_high_f32(b));
  return vget_lane_f32(c, 0) + vget_lane_f32(c, 1);
}
QUIRE_INLINE float ReduceMax(VF v) {
  const float32x4_t b = MaxQuarter(MaxQuarter(v.v[0], v.v[2]), MaxQuarter(v.v[1], v.v[3]));
  const float32x4_t c = MaxQuarter(b, vextq_f32(b, b, 2));
  return vgetq_lane_f32(MaxQuarter(c, vextq_f32(c, c, 1)), 0);
}

#else  // QUIRE_SIMD_SCALAR

struct VF {
  float v[kLanes];
};
struct VMask {
  bool v[kLanes];
};

#define QUIRE_LANES(expr)                           \
  VF r;                                             \
  for (int i = 0; i < kLanes; ++i) r.v[i] = (expr); \
  return r

QUIRE_INLINE VF Set1(float x) { QUIRE_LANES(x); }
QUIRE_INLINE VF Zero() { return Set1(0.0F); }
QUIRE_INLINE VF Load(const float* p) { QUIRE_LANES(p[i]); }
QUIRE_INLINE void Store(float* p, VF v) {
  for (int i = 0; i < kLanes; ++i) p[i] = v.v[i];
}
QUIRE_INLINE VF Add(VF a, VF b) { QUIRE_LANES(a.v[i] + b.v[i]); }
QUIRE_INLINE VF Sub(VF a, VF b) { QUIRE_LANES(a.v[i] - b.v[i]); }
QUIRE_INLINE VF Mul(VF a, VF b) { QUIRE_LANES(a.v[i] * b.v[i]); }
QUIRE_INLINE VF Div(VF a, VF b) { QUIRE_LANES(a.v[i] / b.v[i]); }
QUIRE_INLINE VF Fma(VF a, VF b, VF c) { QUIRE_LANES(__builtin_fmaf(a.v[i], b.v[i], c.v[i])); }
QUIRE_INLINE VF Max(VF a, VF b) { QUIRE_LANES(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
QUIRE_INLINE VF Min(VF a, VF b) { QUIRE_LANES(a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
QUIRE_INLINE float RoundToInt1(
    float x) {  // |x| < 2^22: adding 1.5 * 2^23 rounds to the nearest integer, ties to even
  return (x + 12582912.0F) - 12582912.0F;
}
QUIRE_INLINE VF RoundToInt(VF a) { QUIRE_LANES(RoundToInt1(a.v[i])); }
QUIRE_INLINE float PowerOfTwo(float n) {
  const uint32_t u = static_cast<uint32_t>(static_cast<int32_t>(n == n ? n : 0.0F) + 127) << 23;
  float f;
  __builtin_memcpy(&f, &u, 4);
  return f;
}
QUIRE_INLINE VF Scale2(VF a, VF n) { QUIRE_LANES(a.v[i] * PowerOfTwo(n.v[i])); }
QUIRE_INLINE VMask MaskRange(int lo, int hi) {
  VMask m;
  for (int i = 0; i < kLanes; ++i) m.v[i] = lo <= i && i < hi;
  return m;
}
QUIRE_INLINE VMask MaskOf(uint32_t lanes) {
  VMask m;
  for (int i = 0; i < kLanes; ++i) m.v[i] = (lanes >> i & 1) != 0;
  return m;
}
QUIRE_INLINE VMask NotLess(VF a, VF b) {
  VMask m;
  for (int i = 0; i < kLanes; ++i) m.v[i] = !(a.v[i] < b.v[i]);
  return m;
}
QUIRE_INLINE VF KeepIf(VMask m, VF a) { QUIRE_LANES(m.v[i] ? a.v[i] : 0.0F); }
QUIRE_INLINE VF Select(VMask m, VF a, VF b) { QUIRE_LANES(m.v[i] ? a.v[i] : b.v[i]); }
QUIRE_INLINE VF LoadBits16AsHigh(const uint16_t* p) { QUIRE_LANES(Bf16ToF32(p[i])); }
QUIRE_INLINE VF LoadF16(const uint16_t* p) { QUIRE_LANES(F16ToF32(p[i])); }
QUIRE_INLINE void StoreF16(uint16_t* p, VF v) {
  for (int i = 0; i < kLanes; ++i) p[i] = F32ToF16(v.v[i]);
}
QUIRE_INLINE VF RoundToBF16(VF v) { QUIRE_LANES(Bf16ToF32(F32ToBf16(v.v[i]))); }
QUIRE_INLINE VF RoundNumberToBF16(VF v) { return RoundToBF16(v); }
QUIRE_INLINE void StoreBF16Exact(uint16_t* p, VF v) {
  for (int i = 0; i < kLanes; ++i) p[i] = F32ToBf16(v.v[i]);
}
QUIRE_INLINE float ReduceAdd(VF v) {
  for (int n = kLanes / 2; n > 0; n /= 2) {
    for (int i = 0; i < n; ++i) v.v[i] = v.v[i] + v.v[i + n];
  }
  return v.v[0];
}
QUIRE_INLINE float ReduceMax(VF v) {
  for (int n = kLanes / 2; n > 0; n /= 2) {
    for (int i = 0; i < n; ++i) v.v[i] = v.v[i] > v.v[i + n] ? v.v[i] : v.v[i + n];
  }
  return v.v[0];
}
#undef QUIRE_LANES

#endif

// -------------------------------------------------------------------------------------------------
// pairs of bfloat16 Memory holds 16 outputs x 2 inputs, [lane][2]. VPair is what a chain step needs
// of it; QPair is one broadcast pair of the other operand, prepared once (MakeQPair, both values
// already rounded to bfloat16).
#if defined(QUIRE_SIMD_BF16)

using VPair = __m512bh;
using QPair = uint32_t;
QUIRE_INLINE VPair LoadPair(const uint16_t* p) { return (__m512bh)_mm512_loadu_si512(p); }
QUIRE_INLINE QPair MakeQPair(float even, float odd) {
  uint32_t a, b;
  __builtin_memcpy(&a, &even, 4);
  __builtin_memcpy(&b, &odd, 4);
  return (a >> 16) | (b & 0xffff0000U);
}
// acc + even + odd in the hardware's order (one VDPBF16PS).
QUIRE_INLINE VF DotPair(VF acc, VPair k, QPair q) {
  return _mm512_dpbf16_ps(acc, k, (__m512bh)_mm512_set1_epi32(static_cast<int>(q)));
}

#else

struct VPair {
  VF even, odd;
};
struct QPair {
  float even, odd;
};
#if defined(QUIRE_SIMD_AVX512)
QUIRE_INLINE VPair LoadPair(const uint16_t* p) {
  const __m512i u = _mm512_loadu_si512(p);
  return {
      _mm512_castsi512_ps(_mm512_slli_epi32(u, 16)),
      _mm512_castsi512_ps(_mm512_and_si512(u, _mm512_set1_epi32(static_cast<int>(0xffff0000U))))};
}
#elif defined(QUIRE_SIMD_AVX2)
QUIRE_INLINE VPair LoadPair(const uint16_t* p) {
  const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 16));
  const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000U));
  return {{_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)),
           _mm256_castsi256_ps(_mm256_slli_epi32(b, 16))},
          {_mm256_castsi256_ps(_mm256_and_si256(a, high)),
           _mm256_castsi256_ps(_mm256_and_si256(b, high))}};
}
#elif defined(QUIRE_SIMD_NEON)
QUIRE_INLINE VPair LoadPair(const uint16_t* p) {
  const uint16x8x2_t first = vld2q_u16(p);  // the even ones, the odd ones
  const uint16x8x2_t last = vld2q_u16(p + 16);
  return {AsHigh(first.val[0], last.val[0]), AsHigh(first.val[1], last.val[1])};
}
#else
QUIRE_INLINE VPair LoadPair(const uint16_t* p) {
  VPair r;
  for (int i = 0; i < kLanes; ++i) {
    r.even.v[i] = Bf16ToF32(p[2 * i]);
    r.odd.v[i] = Bf16ToF32(p[2 * i + 1]);
  }
  return r;
}
#endif
QUIRE_INLINE QPair MakeQPair(float even, float odd) { return {even, odd}; }
QUIRE_INLINE VF DotPair(VF acc, VPair k, QPair q) {
  return Fma(k.odd, Set1(q.odd), Fma(k.even, Set1(q.even), acc));
}

#endif

// -------------------------------------------------------------------------------------------------
// pairs of bytes Memory holds 16 outputs x 2 inputs, [lane][2], as int8 or float8 e4m3; both widen
// exactly.

#if defined(QUIRE_SIMD_AVX512)

QUIRE_INLINE void SplitI8(const uint8_t* p, VF* even, VF* odd) {
  const __m512i u = _mm512_cvtepi16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  *even = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(u, 24), 24));
  *odd = _mm512_cvtepi32_ps(_mm512_srai_epi32(u, 8));
}
// The code's exponent and fraction, put where float16 has them, are the number times 2^-8.
QUIRE_INLINE __m256i F8AsF16(__m256i high) {  // codes in the high bytes
  return _mm256_and_si256(_mm256_srai_epi16(high, 1),
                          _mm256_set1_epi16(static_cast<int16_t>(0xbf80)));
}
QUIRE_INLINE void SplitF8Small(const uint8_t* p, VF* even, VF* odd) {
  const __m256i u = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  *even = _mm512_cvtph_ps(F8AsF16(_mm256_slli_epi16(u, 8)));
  *odd = _mm512_cvtph_ps(F8AsF16(u));
}

#elif defined(QUIRE_SIMD_AVX2)

QUIRE_INLINE void SplitI8(const uint8_t* p, VF* even, VF* odd) {
  const __m128i* const q = reinterpret_cast<const __m128i*>(p);
  const __m256i lo = _mm256_cvtepi16_epi32(_mm_loadu_si128(q));
  const __m256i hi = _mm256_cvtepi16_epi32(_mm_loadu_si128(q + 1));
  *even = {_mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(lo, 24), 24)),
           _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(hi, 24), 24))};
  *odd = {_mm256_cvtepi32_ps(_mm256_srai_epi32(lo, 8)),
          _mm256_cvtepi32_ps(_mm256_srai_epi32(hi, 8))};
}
// The code's exponent and fraction, put where float16 has them, are the number times 2^-8.
QUIRE_INLINE VF F8ToSmall(__m256i high) {  // codes in the high bytes
  const __m256i half =
      _mm256_and_si256(_mm256_srai_epi16(high, 1), _mm256_set1_epi16(static_cast<int16_t>(0xbf80)));
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(half)),
          _mm256_cvtph_ps(_mm256_extracti128_si256(half, 1))};
}
QUIRE_INLINE void SplitF8Small(const uint8_t* p, VF* even, VF* odd) {
  const __m256i u = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  *even = F8ToSmall(_mm256_slli_epi16(u, 8));
  *odd = F8ToSmall(u);
}

#elif defined(QUIRE_SIMD_NEON)

QUIRE_INLINE VF I8ToF32(int8x16_t codes) {
  const int16x8_t first = vmovl_s8(vget_low_s8(codes));
  const int16x8_t last = vmovl_high_s8(codes);
  return {{vcvtq_f32_s32(vmovl_s16(vget_low_s16(first))), vcvtq_f32_s32(vmovl_high_s16(first)),
           vcvtq_f32_s32(vmovl_s16(vget_low_s16(last))), vcvtq_f32_s32(vmovl_high_s16(last))}};
}
QUIRE_INLINE void SplitI8(const uint8_t* p, VF* even, VF* odd) {
  const uint8x16x2_t codes = vld2q_u8(p);
  *even = I8ToF32(vreinterpretq_s8_u8(codes.val[0]));
  *odd = I8ToF32(vreinterpretq_s8_u8(codes.val[1]));
}
// The code's exponent and fraction, put where float16 has them, are the number times 2^-8.
QUIRE_INLINE uint16x8_t F8AsF16(uint8x16_t high) {  // codes in the high bytes
  const int16x8_t moved = vshrq_n_s16(vreinterpretq_s16_u8(high), 1);
  return vandq_u16(vreinterpretq_u16_s16(moved), vdupq_n_u16(0xbf80));
}
QUIRE_INLINE VF F8ToSmall(uint8x16_t codes) {
  const uint8x16_t zero = vdupq_n_u8(0);
  return WidenF16(F8AsF16(vzip1q_u8(zero, codes)), F8AsF16(vzip2q_u8(zero, codes)));
}
QUIRE_INLINE void SplitF8Small(const uint8_t* p, VF* even, VF* odd) {
  const uint8x16x2_t codes = vld2q_u8(p);
  *even = F8ToSmall(codes.val[0]);
  *odd = F8ToSmall(codes.val[1]);
}

#else

QUIRE_INLINE void SplitI8(const uint8_t* p, VF* even, VF* odd) {
  for (int i = 0; i < kLanes; ++i) even->v[i] = static_cast<float>(static_cast<int8_t>(p[2 * i]));
  for (int i = 0; i < kLanes; ++i) {
    odd->v[i] = static_cast<float>(static_cast<int8_t>(p[2 * i + 1]));
  }
}
QUIRE_INLINE void SplitF8Small(const uint8_t* p, VF* even, VF* odd) {
  for (int i = 0; i < kLanes; ++i) even->v[i] = F8E4M3ToF32(p[2 * i]) * 0x1p-8F;
  for (int i = 0; i < kLanes; ++i) odd->v[i] = F8E4M3ToF32(p[2 * i + 1]) * 0x1p-8F;
}

#endif

// SplitF8Small gives the codes' numbers times 2^-8, exactly: a scale may have the rest.
constexpr float kF8Rest = 256.0F;
QUIRE_INLINE void SplitF8(const uint8_t* p, VF* even, VF* odd) {
  SplitF8Small(p, even, odd);
  *even = Mul(*even, Set1(kF8Rest));
  *odd = Mul(*odd, Set1(kF8Rest));
}

// 16 pairs of float8 codes as pairs of bfloat16, exactly.
#if defined(QUIRE_SIMD_BF16)
QUIRE_INLINE VPair LoadF8Pair(const uint8_t* p) {
  const __m512i codes =
      _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  // Exponent and fraction move to where bfloat16 has them; its exponents count from 120 lower.
  const __m512i moved =
      _mm512_and_si512(_mm512_slli_epi16(codes, 4), _mm512_set1_epi16(0x0f << 7 | 7 << 4));
  const __m512i normal = _mm512_add_epi16(moved, _mm512_set1_epi16(120 << 7));
  // Denormals of float8 are normal in bfloat16: 0 to 7 times 2^-9.
  const __mmask32 denormal = _mm512_testn_epi16_mask(codes, _mm512_set1_epi16(0x78));
  const __m512i multiples = _mm512_broadcast_i32x4(
      _mm_setr_epi16(0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60));
  const __m512i magnitude = _mm512_mask_permutexvar_epi16(normal, denormal, codes, multiples);
  const __m512i sign = _mm512_set1_epi16(static_cast<int16_t>(0x8000));
  return (__m512bh)_mm512_or_si512(magnitude, _mm512_and_si512(codes, sign));
}
#else
QUIRE_INLINE VPair LoadF8Pair(const uint8_t* p) {
  VPair pair;
  SplitF8(p, &pair.even, &pair.odd);
  return pair;
}
#endif

// -------------------------------------------------------------------------------------------------
// integers: sums of products of int8 and int16, exact in any order as long as they fit

#if defined(QUIRE_SIMD_AVX512)

using VI = __m512i;    // 16 sums
using VI16 = __m512i;  // [lane][2]
QUIRE_INLINE VI LoadSums(const float* p) { return _mm512_loadu_si512(p); }
QUIRE_INLINE void StoreSums(float* p, VI v) { _mm512_storeu_si512(p, v); }
QUIRE_INLINE VI NoSums() { return _mm512_setzero_si512(); }
QUIRE_INLINE VF SumsToF32(VI v) { return _mm512_cvtepi32_ps(v); }
QUIRE_INLINE VI16 WidenI8(const uint8_t* p) {
  return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
// acc + v[0] w[0] + v[1] w[1]; w: two int16.
QUIRE_INLINE VI DotI16(VI acc, VI16 v, uint32_t w) {
  const __m512i weights = _mm512_set1_epi32(static_cast<int>(w));
#if defined(QUIRE_SIMD_VNNI)
  return _mm512_dpwssd_epi32(acc, v, weights);
#else
  return _mm512_add_epi32(acc, _mm512_madd_epi16(v, weights));
#endif
}
// Nearest integers, ties to even. REQUIRES: they are int16.
QUIRE_INLINE void StoreI16(int16_t* p, VF v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(v)));
}

#elif defined(QUIRE_SIMD_AVX2)

struct VI {
  __m256i lo, hi;
};
using VI16 = VI;
QUIRE_INLINE VI LoadSums(const float* p) {
  const auto* at = reinterpret_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(at), _mm256_loadu_si256(at + 1)};
}
QUIRE_INLINE void StoreSums(float* p, VI v) {
  auto* at = reinterpret_cast<__m256i*>(p);
  _mm256_storeu_si256(at, v.lo);
  _mm256_storeu_si256(at + 1, v.hi);
}
QUIRE_INLINE VI NoSums() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
QUIRE_INLINE VF SumsToF32(VI v) { return {_mm256_cvtepi32_ps(v.lo), _mm256_cvtepi32_ps(v.hi)}; }
QUIRE_INLINE VI16 WidenI8(const uint8_t* p) {
  const auto* at = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtepi8_epi16(_mm_loadu_si128(at)), _mm256_cvtepi8_epi16(_mm_loadu_si128(at + 1))};
}
QUIRE_INLINE VI DotI16(VI acc, VI16 v, uint32_t w) {
  const __m256i weights = _mm256_set1_epi32(static_cast<int>(w));
  return {_mm256_add_epi32(acc.lo, _mm256_madd_epi16(v.lo, weights)),
          _mm256_add_epi32(acc.hi, _mm256_madd_epi16(v.hi, weights))};
}
QUIRE_INLINE void StoreI16(int16_t* p, VF v) {
  const __m256i both = _mm256_packs_epi32(_mm256_cvtps_epi32(v.lo), _mm256_cvtps_epi32(v.hi));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(both, 0xD8));
}

#elif defined(QUIRE_SIMD_NEON)

struct VI {
  int32x4_t v[4];
};
struct VI16 {
  int16x8_t even[2], odd[2];  // the first and the second number of each lane
};
QUIRE_INLINE VI LoadSums(const float* p) {
  const VF bits = Load(p);
  return {QUIRE_QUARTERS1(vreinterpretq_s32_f32, bits)};
}
QUIRE_INLINE void StoreSums(float* p, VI v) {
  Store(p, {QUIRE_QUARTERS1(vreinterpretq_f32_s32, v)});
}
QUIRE_INLINE VI NoSums() {
  const int32x4_t none = vdupq_n_s32(0);
  return {{none, none, none, none}};
}
QUIRE_INLINE VF SumsToF32(VI v) { return {QUIRE_QUARTERS1(vcvtq_f32_s32, v)}; }
QUIRE_INLINE VI16 WidenI8(const uint8_t* p) {
  const uint8x16x2_t codes = vld2q_u8(p);
  const int8x16_t even = vreinterpretq_s8_u8(codes.val[0]);
  const int8x16_t odd = vreinterpretq_s8_u8(codes.val[1]);
  return {{vmovl_s8(vget_low_s8(even)), vmovl_high_s8(even)},
          {vmovl_s8(vget_low_s8(odd)), vmovl_high_s8(odd)}};
}
// sum + v * w for the lower (upper) four of eight.
QUIRE_INLINE int32x4_t AddLow(int32x4_t sum, int16x8_t v, int16_t w) {
  return vmlal_n_s16(sum, vget_low_s16(v), w);
}
QUIRE_INLINE int32x4_t AddHigh(int32x4_t sum, int16x8_t v, int16_t w) {
  return vmlal_high_n_s16(sum, v, w);
}
QUIRE_INLINE VI DotI16(VI acc, VI16 v, uint32_t w) {
  const auto even = static_cast<int16_t>(w & 0xffff);
  const auto odd = static_cast<int16_t>(w >> 16);
  return {{AddLow(AddLow(acc.v[0], v.even[0], even), v.odd[0], odd),
           AddHigh(AddHigh(acc.v[1], v.even[0], even), v.odd[0], odd),
           AddLow(AddLow(acc.v[2], v.even[1], even), v.odd[1], odd),
           AddHigh(AddHigh(acc.v[3], v.even[1], even), v.odd[1], odd)}};
}
// Nearest integers, ties to even. REQUIRES: they are int16.
QUIRE_INLINE int16x8_t NearestI16(float32x4_t first, float32x4_t last) {
  return vmovn_high_s32(vmovn_s32(vcvtnq_s32_f32(first)), vcvtnq_s32_f32(last));
}
QUIRE_INLINE void StoreI16(int16_t* p, VF v) {
  vst1q_s16(p, NearestI16(v.v[0], v.v[1]));
  vst1q_s16(p + 8, NearestI16(v.v[2], v.v[3]));
}

#else

struct VI {
  int32_t v[kLanes];
};
struct VI16 {
  int16_t v[kLanes][2];
};
QUIRE_INLINE VI LoadSums(const float* p) {
  VI r;
  __builtin_memcpy(&r, p, sizeof r);
  return r;
}
QUIRE_INLINE void StoreSums(float* p, VI v) { __builtin_memcpy(p, &v, sizeof v); }
QUIRE_INLINE VI NoSums() { return {}; }
QUIRE_INLINE VF SumsToF32(VI v) {
  VF r;
  for (int i = 0; i < kLanes; ++i) r.v[i] = static_cast<float>(v.v[i]);
  return r;
}
QUIRE_INLINE VI16 WidenI8(const uint8_t* p) {
  VI16 r;
  for (int i = 0; i < kLanes; ++i) {
    for (int n = 0; n < 2; ++n) r.v[i][n] = static_cast<int8_t>(p[2 * i + n]);
  }
  return r;
}
QUIRE_INLINE VI DotI16(VI acc, VI16 v, uint32_t w) {
  int16_t weights[2];
  __builtin_memcpy(weights, &w, sizeof weights);
  for (int i = 0; i < kLanes; ++i) acc.v[i] += v.v[i][0] * weights[0] + v.v[i][1] * weights[1];
  return acc;
}
QUIRE_INLINE void StoreI16(int16_t* p, VF v) {
  for (int i = 0; i < kLanes; ++i) p[i] = static_cast<int16_t>(RoundToInt1(v.v[i]));
}

#endif

// -------------------------------------------------------------------------------------------------
// functions 2^x. Exact at integers; elsewhere within 1.5 ulp on [-126, 127]. 0 below -126 (and at
// -inf), 2^127 from 127 on; NaN for NaN. Own minimax polynomial of degree 6 for 2^f - 1 on [-0.5,
// 0.5] (relative error 2e-9 before rounding).
QUIRE_INLINE VF Exp2(VF x) {
  const VF least = Set1(-126.0F);
  const VMask keep = NotLess(x, least);
  const VF c = Max(least, Min(Set1(127.0F), x));  // operand order: NaN passes through
  const VF n = RoundToInt(c);
  const VF f = Sub(c, n);
  VF p = Set1(0.00015353361959569156F);
  p = Fma(p, f, Set1(0.0013398875016719103F));
  p = Fma(p, f, Set1(0.00961843691766262F));
  p = Fma(p, f, Set1(0.055503323674201965F));
  p = Fma(p, f, Set1(0.24022647738456726F));
  p = Fma(p, f, Set1(0.6931471824645996F));
  p = Fma(p, f, Set1(1.0F));
  return KeepIf(keep, Scale2(p, n));
}
QUIRE_INLINE float Exp2Scalar(float x) {
  float lanes[kLanes];
  Store(lanes, Exp2(Set1(x)));
  return lanes[0];
}

QUIRE_INLINE void StoreBF16(uint16_t* p, VF v) { StoreBF16Exact(p, RoundToBF16(v)); }

// For numbers that only products read which take denormals for zeros: DotPair's instruction or the
// tile unit. So does the rounding.
#if defined(QUIRE_SIMD_TILES) && QUIRE_EMULATE_TILES
QUIRE_INLINE VF RoundForDots(VF v) {
  const VF size = Max(v, Sub(Zero(), v));
  return KeepIf(NotLess(size, Set1(0x1p-126F)), RoundToBF16(v));
}
QUIRE_INLINE void StoreBF16ForDots(uint16_t* p, VF v) { StoreBF16Exact(p, RoundForDots(v)); }
#elif defined(QUIRE_SIMD_BF16) || defined(QUIRE_SIMD_TILES)
QUIRE_INLINE void StoreBF16ForDots(uint16_t* p, VF v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(v));
}
QUIRE_INLINE VF RoundForDots(VF v) {
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(v)), 16));
}
#else
QUIRE_INLINE VF RoundForDots(VF v) { return RoundToBF16(v); }
QUIRE_INLINE void StoreBF16ForDots(uint16_t* p, VF v) { StoreBF16(p, v); }
#endif

#if defined(QUIRE_SIMD_SCALAR)
QUIRE_INLINE void PrefetchL1(const void*) {}
QUIRE_INLINE void PrefetchL2(const void*) {}
#elif defined(QUIRE_SIMD_NEON)
QUIRE_INLINE void PrefetchL1(const void* p) { __builtin_prefetch(p, 0, 3); }
QUIRE_INLINE void PrefetchL2(const void* p) { __builtin_prefetch(p, 0, 2); }
#else
QUIRE_INLINE void PrefetchL1(const void* p) {
  _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0);
}
QUIRE_INLINE void PrefetchL2(const void* p) {
  _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1);
}
#endif
// As StreamPrefetch says.
QUIRE_INLINE void PrefetchStream(const void* p, bool into_l1) {
  if (into_l1) {
    PrefetchL1(p);
  } else {
    PrefetchL2(p);
  }
}
