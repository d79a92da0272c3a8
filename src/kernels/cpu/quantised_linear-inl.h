// Linear layers with quantised weights. Included once per path, after linear-inl.h; see
// simd-inl.h.
//
// A row is quantised by itself: 32 inputs share a scale. Products inside a group are sums of
// integers, so their order cannot be seen; groups are one chain of fma per output, left to right.
// Tiles of rows and tasks cut between chains and change no bit. All paths give the same bits.

// ------------------------------------------------------------------------- bytes and integer sums
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

// One group of weights.
struct WeightGroup {
  int64_t index;
  const std::byte* codes;
  const std::byte* scales;
  const uint16_t* supers;  // of the block of 256
};

QUIRE_INLINE const uint16_t* F16Scales(const WeightGroup& group) {
  return reinterpret_cast<const uint16_t*>(group.scales);
}

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

// The words of a group's block: of blocks of 32 beside it, of those of 128 before both of a run.
template <WeightFormat kFormat>
QUIRE_INLINE VI WordsOf(const WeightGroup& group) {
  if constexpr (IsWide(kFormat)) {
    const int64_t block = group.index % kSuperGroups / (kSuperGroups / 2);
    return LoadWords(reinterpret_cast<const std::byte*>(group.supers) + block * 64);
  } else {
    return LoadWords(group.scales);
  }
}

// As BeginSums, where each output has an offset of its own, beside 2^kBits of raised codes.
template <WeightFormat kFormat, int kRows, int kBits>
QUIRE_INLINE void BeginSumsWithZeros(const QuantisedTile& tile, const WeightGroup& group, VI* sum) {
  constexpr int kOffset = (kBits == 0 ? 0 : 1 << kBits) - kZeroRaised;
  const VI zeros = AndInts(WordsOf<kFormat>(group), static_cast<int32_t>(kZeroBits));
  const VI offsets = AddInts(zeros, SetInts(kOffset));
  QUIRE_UNROLL
  for (int r = 0; r < kRows; ++r) {
    sum[r] = MulInts(SetInts(RowGroupAt(tile, group, r).minus_sum), offsets);
  }
}

// One step of the chains: fma(float(sum), scale of the row's group * scale of the weights, chain).
template <int kRows>
QUIRE_INLINE void ApplyScale(const QuantisedTile& tile, const WeightGroup& group, VF scale,
                             const VI* sum, Chains<kRows>* chains) {
  QUIRE_UNROLL
  for (int r = 0; r < kRows; ++r) {
    const float row_scale = RowGroupAt(tile, group, r).scale;
    chains->sum[r] = Fma(SumsToF32(sum[r]), Mul(Set1(row_scale), scale), chains->sum[r]);
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

// Quad kQuad of the lower and of the upper 16 inputs of 4-bit and 5-bit codes. `fifth`: the bytes
// of fifth bits.
template <WeightFormat kFormat, int kQuad, int kRows>
QUIRE_INLINE void AddNibbleQuad(const QuantisedTile& tile, const WeightGroup& group, VB fifth,
                                VI* sum) {
  constexpr WeightLayout kLayout = LayoutOf(kFormat);
  const int8_t* const x = tile.codes + group.index * kQuantGroup + kQuad * 4;
  const VB both = LoadBytes(group.codes + kQuad * 64);
  VB low = AndBytes(both, 15);
  VB high = AndBytes(ShiftRight<4>(both), 15);
  if constexpr (kLayout.codes == CodeBits::kFive) {
    low = OrBytes(low, AndBytes(ShiftLeft<4 - kQuad>(fifth), 16));
    high = OrBytes(high, AndBytes(ShiftRight<kQuad>(fifth), 16));
  }
  if constexpr (kLayout.values != nullptr) {
    const SignedCodes first = MakeSigned(LookUp(kLayout.values, low));
    const SignedCodes second = MakeSigned(LookUp(kLayout.values, high));
    QUIRE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const int8_t* const row = x + r * tile.code_stride;
      sum[r] = DotSigned(DotSigned(sum[r], first, row), second, row + 16);
    }
  } else {
    QUIRE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const int8_t* const row = x + r * tile.code_stride;
      sum[r] = DotUnsigned(DotUnsigned(sum[r], low, row), high, row + 16);
    }
  }
}

// Adds the sums of a group of 4-bit or 5-bit codes, of all rows.
template <WeightFormat kFormat, int kRows>
QUIRE_INLINE void AddNibbles(const QuantisedTile& tile, const WeightGroup& group, VI* sum) {
  constexpr bool kHasFifth = LayoutOf(kFormat).codes == CodeBits::kFive;
  const VB fifth = LoadBytes(group.codes + (kHasFifth ? 256 : 0));
  AddNibbleQuad<kFormat, 0, kRows>(tile, group, fifth, sum);
  AddNibbleQuad<kFormat, 1, kRows>(tile, group, fifth, sum);
  AddNibbleQuad<kFormat, 2, kRows>(tile, group, fifth, sum);
  AddNibbleQuad<kFormat, 3, kRows>(tile, group, fifth, sum);
}

template <WeightFormat kFormat>
QUIRE_INLINE VF ScaleOf(const WeightGroup& group) {
  constexpr BlockScales kScales = LayoutOf(kFormat).scales;
  if constexpr (kScales == BlockScales::kOwn || kScales == BlockScales::kOwnWithSummand) {
    return LoadF16(F16Scales(group));
  } else if constexpr (kScales == BlockScales::kPowerOfTwo) {
    return LoadBits16AsHigh(F16Scales(group));
  } else if constexpr (kScales == BlockScales::kWord) {
    return BitsAsF32(WordsOf<kFormat>(group));
  } else if constexpr (kScales == BlockScales::kWordWithZero) {
    return BitsAsF32(AndInts(WordsOf<kFormat>(group), static_cast<int32_t>(~kZeroBits)));
  } else if constexpr (kScales == BlockScales::kPairs) {
    return Mul(LoadF16(group.supers), SumsToF32(LoadUint8s(group.scales)));
  } else {
    return Mul(LoadF16(group.supers), SumsToF32(LoadInt8s(group.scales)));
  }
}

template <WeightFormat kFormat>
QUIRE_INLINE VF SummandOf(const WeightGroup& group) {
  if constexpr (LayoutOf(kFormat).scales == BlockScales::kOwnWithSummand) {
    return LoadF16(F16Scales(group) + kStripOutputs);
  } else {
    return Mul(Sub(Zero(), LoadF16(group.supers + kStripOutputs)),
               SumsToF32(LoadUint8s(group.scales + kStripOutputs)));
  }
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

// Bits that begin at kFrom moved so that they begin at kTo; the caller masks all others.
template <int kFrom, int kTo>
QUIRE_INLINE VB MoveBits(VB bytes) {
  if constexpr (kFrom <= kTo) return ShiftLeft<kTo - kFrom>(bytes);
  if constexpr (kFrom > kTo) return ShiftRight<kFrom - kTo>(bytes);
}

// Formats whose groups have a scale for each half.
template <WeightFormat kWeights>
struct HalvesWeights {
  static constexpr WeightFormat kFormat = kWeights;
  static constexpr WeightLayout kLayout = LayoutOf(kWeights);
  static constexpr bool kHasNibbles = kLayout.codes == CodeBits::kSix;
  static constexpr bool kHasLeasts = kLayout.scales == BlockScales::kHalfPairs;
  static constexpr int kMostRows = 8;

  // Quad kQuad of a half, as numbers from 0 on. `pairs`: bits of the half's codes that stand two by
  // two; `singles`: the third bits of the group's.
  template <int kHalf, int kQuad>
  QUIRE_INLINE VB Codes(const std::byte* codes, VB pairs, VB singles) {
    if constexpr (kHasNibbles) {
      const VB both = LoadBytes(codes + kQuad * 64);
      const VB nibbles = AndBytes(kHalf == 0 ? both : ShiftRight<4>(both), 15);
      return OrBytes(nibbles, AndBytes(MoveBits<2 * kQuad, 4>(pairs), 0x30));
    } else if constexpr (kLayout.codes == CodeBits::kThree) {
      return OrBytes(AndBytes(MoveBits<2 * kQuad, 0>(pairs), 3),
                     AndBytes(MoveBits<4 * kHalf + kQuad, 2>(singles), 4));
    } else {
      return AndBytes(MoveBits<2 * kQuad, 0>(pairs), 3);
    }
  }

  template <int kRows, int kQuad>
  QUIRE_INLINE void AddQuad(const QuantisedTile& tile, VB w, const int8_t* x, VI* sum) {
    QUIRE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      sum[r] = DotUnsigned(sum[r], w, x + r * tile.code_stride + kQuad * 4);
    }
  }

  template <int kHalf>
  QUIRE_INLINE VI ScaleOfHalf(const WeightGroup& group) {
    const std::byte* const scales = group.scales + kHalf * kStripOutputs;
    if constexpr (kHasLeasts) return AndInts(LoadUint8s(scales), 15);
    return LoadInt8s(scales);
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
    const VB pairs = LoadBytes(codes + (kHasNibbles ? 256 : 0) + kHalf * 64);
    const VB singles = LoadBytes(codes + (kLayout.codes == CodeBits::kThree ? 128 : 0));
    AddQuad<kRows, 0>(tile, Codes<kHalf, 0>(codes, pairs, singles), x, sum);
    AddQuad<kRows, 1>(tile, Codes<kHalf, 1>(codes, pairs, singles), x, sum);
    AddQuad<kRows, 2>(tile, Codes<kHalf, 2>(codes, pairs, singles), x, sum);
    AddQuad<kRows, 3>(tile, Codes<kHalf, 3>(codes, pairs, singles), x, sum);
    const VI scale = ScaleOfHalf<kHalf>(group);
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

// Asks for what comes some steps behind `at`.
QUIRE_INLINE void FetchAhead(const std::byte* at, int64_t bytes, const StreamPrefetch& prefetch) {
  const char* const ahead = reinterpret_cast<const char*>(at) + prefetch.bytes_ahead;
  if (prefetch.into_l1) {
    for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(ahead + line, 0, 3);
  } else {
    for (int64_t line = 0; line < bytes; line += 64) PrefetchL2(ahead + line);
  }
}

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

// The sums of one row and strip, bias added, into y.
static void FinishStrip(const QuantisedWork& work, int64_t row, int64_t output, const float* sums) {
  const QuantisedLinearArgs& args = *work.plan->args;
  const int64_t left = work.part->n - output;
  const int64_t count = left < kStripOutputs ? left : kStripOutputs;
  float* const y = work.y + row * args.y_stride + output;
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
  tile.prefetch = WeightPrefetchOfCpu(LayoutOf(W::kFormat).codes == CodeBits::kEight);
  tile.sums = sums;
  for (; row + kRows <= work.end_row; row += kRows) {
    tile.codes = rows.codes + row * tile.code_stride;
    tile.groups = rows.groups + row * tile.group_count;
    RunQuantisedTile<W, kRows>(tile);
    for (int r = 0; r < kRows; ++r) {
      FinishStrip(work, row + r, strip * kStripOutputs, sums + r * kStripOutputs);
    }
    tile.streams = false;
  }
  return row;
}

template <class W>
static void RunStrips(const QuantisedWork& work) {
  for (int64_t strip = work.begin_strip; strip < work.end_strip; ++strip) {
    int64_t row = work.begin_row;
#if defined(QUIRE_SIMD_AVX512)
    row = RunTilesOf<W, W::kMostRows>(work, row, strip);
    row = RunTilesOf<W, 8>(work, row, strip);
#endif
    row = RunTilesOf<W, 4>(work, row, strip);
    row = RunTilesOf<W, 2>(work, row, strip);
    RunTilesOf<W, 1>(work, row, strip);
  }
}

static void RunStripsOf(const QuantisedWork& work) {
  switch (work.part->format) {
    case WeightFormat::kQ8_0:
      return RunStrips<PlainWeights<WeightFormat::kQ8_0>>(work);
    case WeightFormat::kQ4_0:
      return RunStrips<PlainWeights<WeightFormat::kQ4_0>>(work);
    case WeightFormat::kQ4_1:
      return RunStrips<PlainWeights<WeightFormat::kQ4_1>>(work);
    case WeightFormat::kQ5_0:
      return RunStrips<PlainWeights<WeightFormat::kQ5_0>>(work);
    case WeightFormat::kQ5_1:
      return RunStrips<PlainWeights<WeightFormat::kQ5_1>>(work);
    case WeightFormat::kIQ4_NL:
      return RunStrips<PlainWeights<WeightFormat::kIQ4_NL>>(work);
    case WeightFormat::kMXFP4:
      return RunStrips<PlainWeights<WeightFormat::kMXFP4>>(work);
    case WeightFormat::kQ4_K:
      return RunStrips<PlainWeights<WeightFormat::kQ4_K>>(work);
    case WeightFormat::kQ5_K:
      return RunStrips<PlainWeights<WeightFormat::kQ5_K>>(work);
    case WeightFormat::kQ6_K:
      return RunStrips<HalvesWeights<WeightFormat::kQ6_K>>(work);
    case WeightFormat::kIQ4_XS:
      return RunStrips<PlainWeights<WeightFormat::kIQ4_XS>>(work);
    case WeightFormat::kQ3_K:
      return RunStrips<HalvesWeights<WeightFormat::kQ3_K>>(work);
    case WeightFormat::kQ2_K:
      return RunStrips<HalvesWeights<WeightFormat::kQ2_K>>(work);
    case WeightFormat::kI8G:
      return RunStrips<PlainWeights<WeightFormat::kI8G>>(work);
    case WeightFormat::kI8Z:
      return RunStrips<PlainWeights<WeightFormat::kI8Z>>(work);
    case WeightFormat::kI4G:
      return RunStrips<PlainWeights<WeightFormat::kI4G>>(work);
    case WeightFormat::kI4Z:
      return RunStrips<PlainWeights<WeightFormat::kI4Z>>(work);
    case WeightFormat::kI8GWide:
      return RunStrips<PlainWeights<WeightFormat::kI8GWide>>(work);
    case WeightFormat::kI8ZWide:
      return RunStrips<PlainWeights<WeightFormat::kI8ZWide>>(work);
    case WeightFormat::kI4GWide:
      return RunStrips<PlainWeights<WeightFormat::kI4GWide>>(work);
    case WeightFormat::kI4ZWide:
      return RunStrips<PlainWeights<WeightFormat::kI4ZWide>>(work);
  }
}

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
    if (work.begin_strip < work.end_strip) RunStripsOf(work);
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
