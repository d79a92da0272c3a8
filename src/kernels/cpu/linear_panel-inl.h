// Panels: the numbers of codes of weights, of some inputs and a block of outputs, in the order in
// which tiles of rows read them. Included by linear-inl.h.

// Inputs of a panel: 16 KiB of float32. Whole chunks of the tile unit.
constexpr int64_t kPartInputs = 128;
constexpr int64_t kPartFloats = kPartInputs * kOutputBlock;
// Chains of all rows follow the panel.
static_assert(kPartFloats + kMaxBlockTiles * kMaxTileRows * kOutputBlock <= kPanelFloats);

// Numbers as float32, [input][32].
struct SinglePanel {
  using Element = float;
  static constexpr bool kIsBF16 = false;  // of no other numbers
  QUIRE_INLINE float* AtOutput(float* panel, int64_t output) { return panel + output; }
  QUIRE_INLINE void StorePair(float* panel, int64_t pair, int64_t output, WidePair numbers) {
    float* const to = panel + 2 * pair * kOutputBlock + output;
    Store(to, numbers.even);
    Store(to + kOutputBlock, numbers.odd);
  }
  template <bool kAreNormal>
  QUIRE_INLINE void StoreRounded(float* panel, int64_t pair, int64_t output, WidePair numbers) {
    StorePair(panel, pair, output, {RoundToBF16(numbers.even), RoundToBF16(numbers.odd)});
  }
};
#if defined(QUIRE_SIMD_BF16) || defined(QUIRE_SIMD_TILES)
// As pairs of bfloat16, [pair][32][2].
struct PairPanel {
  using Element = uint16_t;
  static constexpr bool kIsBF16 = true;
  QUIRE_INLINE uint16_t* AtOutput(uint16_t* panel, int64_t output) { return panel + 2 * output; }
  // REQUIRES: they are such numbers.
  QUIRE_INLINE void StorePair(uint16_t* panel, int64_t pair, int64_t output, WidePair numbers) {
    const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(numbers.even), 16);
    const __m512i high = _mm512_castps_si512(numbers.odd);
    _mm512_storeu_si512(panel + 2 * (pair * kOutputBlock + output), _mm512_or_si512(high, low));
  }
  // kAreNormal: none of them is subnormal, which the instruction takes for zero.
  template <bool kAreNormal>
  QUIRE_INLINE void StoreRounded(uint16_t* panel, int64_t pair, int64_t output, WidePair numbers) {
#if defined(QUIRE_SIMD_BF16)
    if constexpr (kAreNormal) {
      // Word 2 i is that of even number i, word 2 i + 1 that of the odd one.
      static constexpr uint16_t kOrder[] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                            21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                            11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
      const auto both = (__m512i)_mm512_cvtne2ps_pbh(numbers.odd, numbers.even);
      const __m512i pairs =
          _mm512_mask_permutexvar_epi16(both, 0xFFFFFFFFU, _mm512_loadu_si512(kOrder), both);
      return _mm512_storeu_si512(panel + 2 * (pair * kOutputBlock + output), pairs);
    }
#endif
    StorePair(panel, pair, output, {RoundToBF16(numbers.even), RoundToBF16(numbers.odd)});
  }
};
#endif
