// Bytes and sums of integers, for linear layers with quantised weights. Included once per path, by
// quantised_groups-inl.h.
//
// VB: 64 bytes, [16 outputs][4 inputs]. VI: 16 int32, one per output. A dot adds to each output the
// products of its four codes with four codes of a row.
#if defined(QUIRE_SIMD_AVX512)

using VB = __m512i;

QUIRE_INLINE VI SetInts(int32_t x) { return _mm512_set1_epi32(x); }
QUIRE_INLINE VI AddInts(VI a, VI b) { return _mm512_add_epi32(a, b); }
QUIRE_INLINE VI MulInts(VI a, VI b) { return _mm512_mullo_epi32(a, b); }
template <int kBits>
QUIRE_INLINE VI ShiftInts(VI a) {
  return _mm512_slli_epi32(a, kBits);
}
template <int kBits>
QUIRE_INLINE VI ShiftIntsRight(VI a) {  // of no negative number
  return _mm512_srli_epi32(a, kBits);
}
QUIRE_INLINE VI LoadInt8s(const std::byte* p) {
  return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
QUIRE_INLINE VI LoadUint8s(const std::byte* p) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
QUIRE_INLINE VI LoadWords(const std::byte* p) { return _mm512_loadu_si512(p); }
QUIRE_INLINE VI AndInts(VI a, int32_t mask) { return _mm512_and_si512(a, _mm512_set1_epi32(mask)); }
QUIRE_INLINE VF BitsAsF32(VI a) { return _mm512_castsi512_ps(a); }
QUIRE_INLINE VB LoadBytes(const std::byte* p) { return _mm512_loadu_si512(p); }
QUIRE_INLINE VB AndBytes(VB a, int mask) {
  return _mm512_and_si512(a, _mm512_set1_epi32(mask * 0x01010101));
}
QUIRE_INLINE VB OrBytes(VB a, VB b) { return _mm512_or_si512(a, b); }
// table[i] for each byte i < 16.
QUIRE_INLINE VB LookUp(const int8_t* table, VB i) {
  const __m128i values = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(values), i);
}
template <int kCount>
QUIRE_INLINE VB ShiftRight(VB a) {
  return _mm512_srli_epi32(a, kCount);
}
template <int kCount>
QUIRE_INLINE VB ShiftLeft(VB a) {
  return _mm512_slli_epi32(a, kCount);
}
// Sixteen integral numbers of at most 127 as int8.
QUIRE_INLINE void StoreInt8s(int8_t* p, VF v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(v)));
}
QUIRE_INLINE VB FourOfRow(const int8_t* x) {
  int32_t four;
  __builtin_memcpy(&four, x, sizeof(four));
  return _mm512_set1_epi32(four);
}

// Byte kInput of each output's four, a signed one.
template <int kInput>
QUIRE_INLINE VI CodesOfInput(VB four) {
  return _mm512_srai_epi32(_mm512_slli_epi32(four, 24 - 8 * kInput), 24);
}

#if defined(QUIRE_SIMD_VNNI)
QUIRE_INLINE VI DotUnsigned(VI sum, VB w, const int8_t* x) {
  return _mm512_dpbusd_epi32(sum, w, FourOfRow(x));
}
// Signed codes are raised by 128 and the sums begin with what that adds.
using SignedCodes = VB;
constexpr int kRaisedBits = 7;  // 0: they are not raised
QUIRE_INLINE SignedCodes MakeSigned(VB w) {
  return _mm512_xor_si512(w, _mm512_set1_epi32(static_cast<int>(0x80808080U)));
}
QUIRE_INLINE VI DotSigned(VI sum, SignedCodes w, const int8_t* x) { return DotUnsigned(sum, w, x); }
#else
QUIRE_INLINE VI DotUnsigned(VI sum, VB w, const int8_t* x) {
  const __m512i pairs = _mm512_maddubs_epi16(w, FourOfRow(x));
  return _mm512_add_epi32(sum, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
}
// |w| times x with the sign of w.
struct SignedCodes {
  VB magnitude;
  __mmask64 negative;
};
constexpr int kRaisedBits = 0;
QUIRE_INLINE SignedCodes MakeSigned(VB w) { return {_mm512_abs_epi8(w), _mm512_movepi8_mask(w)}; }
QUIRE_INLINE VI DotSigned(VI sum, SignedCodes w, const int8_t* x) {
  const __m512i four = FourOfRow(x);
  const __m512i turned = _mm512_mask_sub_epi8(four, w.negative, _mm512_setzero_si512(), four);
  const __m512i pairs = _mm512_maddubs_epi16(w.magnitude, turned);
  return _mm512_add_epi32(sum, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
}
#endif

#elif defined(QUIRE_SIMD_AVX2)

using VB = VI;

QUIRE_INLINE VI SetInts(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
QUIRE_INLINE VI AddInts(VI a, VI b) {
  return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)};
}
QUIRE_INLINE VI MulInts(VI a, VI b) {
  return {_mm256_mullo_epi32(a.lo, b.lo), _mm256_mullo_epi32(a.hi, b.hi)};
}
template <int kBits>
QUIRE_INLINE VI ShiftInts(VI a) {
  return {_mm256_slli_epi32(a.lo, kBits), _mm256_slli_epi32(a.hi, kBits)};
}
template <int kBits>
QUIRE_INLINE VI ShiftIntsRight(VI a) {
  return {_mm256_srli_epi32(a.lo, kBits), _mm256_srli_epi32(a.hi, kBits)};
}
QUIRE_INLINE VI LoadInt8s(const std::byte* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8))};
}
QUIRE_INLINE VI LoadUint8s(const std::byte* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8))};
}
QUIRE_INLINE VB LoadBytes(const std::byte* p) {
  const auto* const at = reinterpret_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(at), _mm256_loadu_si256(at + 1)};
}
QUIRE_INLINE VI LoadWords(const std::byte* p) { return LoadBytes(p); }
QUIRE_INLINE VI AndInts(VI a, int32_t mask) {
  const __m256i all = _mm256_set1_epi32(mask);
  return {_mm256_and_si256(a.lo, all), _mm256_and_si256(a.hi, all)};
}
QUIRE_INLINE VF BitsAsF32(VI a) { return {_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)}; }
QUIRE_INLINE VB AndBytes(VB a, int mask) {
  const __m256i all = _mm256_set1_epi8(static_cast<char>(mask));
  return {_mm256_and_si256(a.lo, all), _mm256_and_si256(a.hi, all)};
}
QUIRE_INLINE VB OrBytes(VB a, VB b) {
  return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)};
}
QUIRE_INLINE VB LookUp(const int8_t* table, VB i) {
  const __m128i values = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  const __m256i twice = _mm256_broadcastsi128_si256(values);
  return {_mm256_shuffle_epi8(twice, i.lo), _mm256_shuffle_epi8(twice, i.hi)};
}
template <int kCount>
QUIRE_INLINE VB ShiftRight(VB a) {
  return {_mm256_srli_epi32(a.lo, kCount), _mm256_srli_epi32(a.hi, kCount)};
}
template <int kCount>
QUIRE_INLINE VB ShiftLeft(VB a) {
  return {_mm256_slli_epi32(a.lo, kCount), _mm256_slli_epi32(a.hi, kCount)};
}
QUIRE_INLINE void StoreInt8s(int8_t* p, VF v) {
  const __m256i pairs = _mm256_packs_epi32(_mm256_cvtps_epi32(v.lo), _mm256_cvtps_epi32(v.hi));
  const __m256i ordered = _mm256_permute4x64_epi64(pairs, 0xD8);
  const __m128i bytes =
      _mm_packs_epi16(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}
template <int kInput>
QUIRE_INLINE VI CodesOfInput(VB four) {
  return {_mm256_srai_epi32(_mm256_slli_epi32(four.lo, 24 - 8 * kInput), 24),
          _mm256_srai_epi32(_mm256_slli_epi32(four.hi, 24 - 8 * kInput), 24)};
}
QUIRE_INLINE __m256i FourOfRow(const int8_t* x) {
  int32_t four;
  __builtin_memcpy(&four, x, sizeof(four));
  return _mm256_set1_epi32(four);
}
QUIRE_INLINE __m256i AddPairs(__m256i sum, __m256i w, __m256i x) {
  const __m256i pairs = _mm256_maddubs_epi16(w, x);
  return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
QUIRE_INLINE VI DotUnsigned(VI sum, VB w, const int8_t* x) {
  const __m256i four = FourOfRow(x);
  return {AddPairs(sum.lo, w.lo, four), AddPairs(sum.hi, w.hi, four)};
}
// |w| times x with the sign of w.
using SignedCodes = VB;
constexpr int kRaisedBits = 0;
QUIRE_INLINE SignedCodes MakeSigned(VB w) { return w; }
QUIRE_INLINE VI DotSigned(VI sum, SignedCodes w, const int8_t* x) {
  const __m256i four = FourOfRow(x);
  return {AddPairs(sum.lo, _mm256_abs_epi8(w.lo), _mm256_sign_epi8(four, w.lo)),
          AddPairs(sum.hi, _mm256_abs_epi8(w.hi), _mm256_sign_epi8(four, w.hi))};
}

#elif defined(QUIRE_SIMD_NEON)

struct VB {
  uint8x16_t v[4];
};

QUIRE_INLINE VI SetInts(int32_t x) {
  const int32x4_t all = vdupq_n_s32(x);
  return {{all, all, all, all}};
}
QUIRE_INLINE VI AddInts(VI a, VI b) { return {QUIRE_QUARTERS2(vaddq_s32, a, b)}; }
QUIRE_INLINE VI MulInts(VI a, VI b) { return {QUIRE_QUARTERS2(vmulq_s32, a, b)}; }
template <int kBits>
QUIRE_INLINE VI ShiftInts(VI a) {
  return {{vshlq_n_s32(a.v[0], kBits), vshlq_n_s32(a.v[1], kBits), vshlq_n_s32(a.v[2], kBits),
           vshlq_n_s32(a.v[3], kBits)}};
}
template <int kBits>
QUIRE_INLINE VI ShiftIntsRight(VI a) {
  return {{vshrq_n_s32(a.v[0], kBits), vshrq_n_s32(a.v[1], kBits), vshrq_n_s32(a.v[2], kBits),
           vshrq_n_s32(a.v[3], kBits)}};
}
QUIRE_INLINE uint8x16_t LoadQuarter(const std::byte* p) {
  return vld1q_u8(reinterpret_cast<const uint8_t*>(p));
}
QUIRE_INLINE VI LoadInt8s(const std::byte* p) {
  const int8x16_t bytes = vreinterpretq_s8_u8(LoadQuarter(p));
  const int16x8_t first = vmovl_s8(vget_low_s8(bytes));
  const int16x8_t last = vmovl_high_s8(bytes);
  return {{vmovl_s16(vget_low_s16(first)), vmovl_high_s16(first), vmovl_s16(vget_low_s16(last)),
           vmovl_high_s16(last)}};
}
QUIRE_INLINE VI LoadUint8s(const std::byte* p) {
  const uint8x16_t bytes = LoadQuarter(p);
  const uint16x8_t first = vmovl_u8(vget_low_u8(bytes));
  const uint16x8_t last = vmovl_high_u8(bytes);
  const uint32x4_t words[] = {vmovl_u16(vget_low_u16(first)), vmovl_high_u16(first),
                              vmovl_u16(vget_low_u16(last)), vmovl_high_u16(last)};
  return {{vreinterpretq_s32_u32(words[0]), vreinterpretq_s32_u32(words[1]),
           vreinterpretq_s32_u32(words[2]), vreinterpretq_s32_u32(words[3])}};
}
QUIRE_INLINE VB LoadBytes(const std::byte* p) {
  return {{LoadQuarter(p), LoadQuarter(p + 16), LoadQuarter(p + 32), LoadQuarter(p + 48)}};
}
QUIRE_INLINE VI LoadWords(const std::byte* p) {
  const VB bytes = LoadBytes(p);
  return {QUIRE_QUARTERS1(vreinterpretq_s32_u8, bytes)};
}
QUIRE_INLINE VI AndInts(VI a, int32_t mask) {
  const VI all = SetInts(mask);
  return {QUIRE_QUARTERS2(vandq_s32, a, all)};
}
QUIRE_INLINE VF BitsAsF32(VI a) { return {QUIRE_QUARTERS1(vreinterpretq_f32_s32, a)}; }
QUIRE_INLINE VB AndBytes(VB a, int mask) {
  const uint8x16_t all = vdupq_n_u8(static_cast<uint8_t>(mask));
  return {
      {vandq_u8(a.v[0], all), vandq_u8(a.v[1], all), vandq_u8(a.v[2], all), vandq_u8(a.v[3], all)}};
}
QUIRE_INLINE VB OrBytes(VB a, VB b) { return {QUIRE_QUARTERS2(vorrq_u8, a, b)}; }
QUIRE_INLINE VB LookUp(const int8_t* table, VB i) {
  const uint8x16_t values = vreinterpretq_u8_s8(vld1q_s8(table));
  return {{vqtbl1q_u8(values, i.v[0]), vqtbl1q_u8(values, i.v[1]), vqtbl1q_u8(values, i.v[2]),
           vqtbl1q_u8(values, i.v[3])}};
}
template <int kCount>
QUIRE_INLINE VB ShiftRight(VB a) {
  if constexpr (kCount == 0) {  // which the instruction has not
    return a;
  } else {
    return {{vshrq_n_u8(a.v[0], kCount), vshrq_n_u8(a.v[1], kCount), vshrq_n_u8(a.v[2], kCount),
             vshrq_n_u8(a.v[3], kCount)}};
  }
}
template <int kCount>
QUIRE_INLINE VB ShiftLeft(VB a) {
  return {{vshlq_n_u8(a.v[0], kCount), vshlq_n_u8(a.v[1], kCount), vshlq_n_u8(a.v[2], kCount),
           vshlq_n_u8(a.v[3], kCount)}};
}
QUIRE_INLINE void StoreInt8s(int8_t* p, VF v) {
  const int8x8_t first = vmovn_s16(NearestI16(v.v[0], v.v[1]));
  vst1q_s8(p, vmovn_high_s16(first, NearestI16(v.v[2], v.v[3])));
}
template <int kInput>
QUIRE_INLINE int32x4_t CodesOfQuarter(uint8x16_t four) {
  return vshrq_n_s32(vshlq_n_s32(vreinterpretq_s32_u8(four), 24 - 8 * kInput), 24);
}
template <int kInput>
QUIRE_INLINE VI CodesOfInput(VB four) {
  return {{CodesOfQuarter<kInput>(four.v[0]), CodesOfQuarter<kInput>(four.v[1]),
           CodesOfQuarter<kInput>(four.v[2]), CodesOfQuarter<kInput>(four.v[3])}};
}
QUIRE_INLINE int8x16_t FourOfRow(const int8_t* x) {
  int32_t four;
  __builtin_memcpy(&four, x, sizeof(four));
  return vreinterpretq_s8_s32(vdupq_n_s32(four));
}
// Two products of a weight of at least -128 and a row's code of at least -127 fit into int16.
QUIRE_INLINE int32x4_t AddFours(int32x4_t sum, uint8x16_t w, int8x16_t x) {
  const int8x16_t weights = vreinterpretq_s8_u8(w);
  const int16x8_t first = vmull_s8(vget_low_s8(weights), vget_low_s8(x));
  const int16x8_t last = vmull_high_s8(weights, x);
  return vpadalq_s16(sum, vpaddq_s16(first, last));
}
using SignedCodes = VB;
constexpr int kRaisedBits = 0;
QUIRE_INLINE SignedCodes MakeSigned(VB w) { return w; }
QUIRE_INLINE VI DotSigned(VI sum, SignedCodes w, const int8_t* x) {
  const int8x16_t four = FourOfRow(x);
  return {{AddFours(sum.v[0], w.v[0], four), AddFours(sum.v[1], w.v[1], four),
           AddFours(sum.v[2], w.v[2], four), AddFours(sum.v[3], w.v[3], four)}};
}
// Unsigned codes have at most 6 bits.
QUIRE_INLINE VI DotUnsigned(VI sum, VB w, const int8_t* x) { return DotSigned(sum, w, x); }

#else  // QUIRE_SIMD_SCALAR

struct VB {
  uint8_t v[kLanes * 4];
};

QUIRE_INLINE VI SetInts(int32_t x) {
  VI r;
  for (int i = 0; i < kLanes; ++i) r.v[i] = x;
  return r;
}
QUIRE_INLINE VI AddInts(VI a, VI b) {
  for (int i = 0; i < kLanes; ++i) a.v[i] += b.v[i];
  return a;
}
QUIRE_INLINE VI MulInts(VI a, VI b) {
  for (int i = 0; i < kLanes; ++i) a.v[i] *= b.v[i];
  return a;
}
template <int kBits>
QUIRE_INLINE VI ShiftInts(VI a) {
  return MulInts(a, SetInts(1 << kBits));
}
template <int kBits>
QUIRE_INLINE VI ShiftIntsRight(VI a) {
  for (int32_t& number : a.v) number >>= kBits;
  return a;
}
QUIRE_INLINE VI LoadInt8s(const std::byte* p) {
  VI r;
  for (int i = 0; i < kLanes; ++i) r.v[i] = static_cast<int8_t>(p[i]);
  return r;
}
QUIRE_INLINE VI LoadUint8s(const std::byte* p) {
  VI r;
  for (int i = 0; i < kLanes; ++i) r.v[i] = static_cast<uint8_t>(p[i]);
  return r;
}
QUIRE_INLINE VI LoadWords(const std::byte* p) {
  VI r;
  __builtin_memcpy(r.v, p, sizeof(r.v));
  return r;
}
QUIRE_INLINE VI AndInts(VI a, int32_t mask) {
  for (int32_t& word : a.v) word &= mask;
  return a;
}
QUIRE_INLINE VF BitsAsF32(VI a) {
  VF r;
  __builtin_memcpy(r.v, a.v, sizeof(r.v));
  return r;
}
QUIRE_INLINE VB LoadBytes(const std::byte* p) {
  VB r;
  __builtin_memcpy(r.v, p, sizeof(r.v));
  return r;
}
QUIRE_INLINE VB AndBytes(VB a, int mask) {
  for (uint8_t& byte : a.v) byte = static_cast<uint8_t>(byte & mask);
  return a;
}
QUIRE_INLINE VB OrBytes(VB a, VB b) {
  for (int i = 0; i < kLanes * 4; ++i) a.v[i] = static_cast<uint8_t>(a.v[i] | b.v[i]);
  return a;
}
QUIRE_INLINE VB LookUp(const int8_t* table, VB i) {
  for (uint8_t& byte : i.v) byte = static_cast<uint8_t>(table[byte]);
  return i;
}
// Shifts each byte: bits that a wider shift moves into a neighbour are masked by the caller.
template <int kCount>
QUIRE_INLINE VB ShiftRight(VB a) {
  for (uint8_t& byte : a.v) byte = static_cast<uint8_t>(byte >> kCount);
  return a;
}
template <int kCount>
QUIRE_INLINE VB ShiftLeft(VB a) {
  for (uint8_t& byte : a.v) byte = static_cast<uint8_t>(byte << kCount);
  return a;
}
QUIRE_INLINE void StoreInt8s(int8_t* p, VF v) {
  for (int i = 0; i < kLanes; ++i) p[i] = static_cast<int8_t>(v.v[i]);
}
template <int kInput>
QUIRE_INLINE VI CodesOfInput(VB four) {
  VI r;
  for (int i = 0; i < kLanes; ++i) r.v[i] = static_cast<int8_t>(four.v[4 * i + kInput]);
  return r;
}
QUIRE_INLINE VI DotUnsigned(VI sum, VB w, const int8_t* x) {
  for (int i = 0; i < kLanes * 4; ++i) sum.v[i / 4] += w.v[i] * x[i % 4];
  return sum;
}
using SignedCodes = VB;
constexpr int kRaisedBits = 0;
QUIRE_INLINE SignedCodes MakeSigned(VB w) { return w; }
QUIRE_INLINE VI DotSigned(VI sum, SignedCodes w, const int8_t* x) {
  for (int i = 0; i < kLanes * 4; ++i) sum.v[i / 4] += static_cast<int8_t>(w.v[i]) * x[i % 4];
  return sum;
}

#endif
