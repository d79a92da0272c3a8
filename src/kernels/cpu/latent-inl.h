// Values out of the keys of a latent layout (MLA): a K tile, whose lanes are positions, becomes the
// V tile of its first v_dim dimensions, whose lanes are dimensions. Bytes move and none is computed
// with, so what follows has the arithmetic of any other layer. Included inside a path's namespace
// and target region.
#ifndef QUIRE_KERNELS_CPU_LATENT_INL_H_
#define QUIRE_KERNELS_CPU_LATENT_INL_H_

// Both tiles are matrices of units: an element, or where chains take pairs 2 x 2 elements (two
// dimensions, two positions). The keys' row r of units (a dimension or two) becomes column r of the
// values, after the elements of each unit have been turned around.
#if defined(QUIRE_SIMD_SCALAR)

// `Element`s in units of `kPair` x `kPair`.
template <typename Element, int kPair>
static void TransposeTile(const std::byte* keys, int v_dim, std::byte* values) {
  const auto* from = reinterpret_cast<const Element*>(keys);
  auto* to = reinterpret_cast<Element*>(values);
  for (int d = 0; d < v_dim; ++d) {
    for (int lane = 0; lane < kLanes; ++lane) {
      to[((lane / kPair) * v_dim + d) * kPair + lane % kPair] =
          from[(d / kPair * kLanes + lane) * kPair + d % kPair];
    }
  }
}

static void LatentValueTile(DType dtype, const std::byte* keys, int v_dim, std::byte* values) {
  if (dtype == DType::kF32) return TransposeTile<float, 1>(keys, v_dim, values);
  if (dtype == DType::kF16) return TransposeTile<uint16_t, 1>(keys, v_dim, values);
  if (dtype == DType::kBF16) return TransposeTile<uint16_t, 2>(keys, v_dim, values);
  TransposeTile<uint8_t, 2>(keys, v_dim, values);
}

#else

// A chunk is 16 bytes of a row of units, kCount of them. A block is a chunk of 2 * kCount rows:
// rows i and i + kCount side by side in a register, so that transposing within the halves gives 2 *
// kCount consecutive units of each of kCount rows of values.
struct UnitsF32 {
  static constexpr int kBytes = 4;
  static constexpr int kDims = 1;
  QUIRE_INLINE __m256i Turn(__m256i rows) { return rows; }
};
struct UnitsF16 {
  static constexpr int kBytes = 2;
  static constexpr int kDims = 1;
  QUIRE_INLINE __m256i Turn(__m256i rows) { return rows; }
};
#if !defined(QUIRE_SIMD_AVX512)
struct UnitsBF16 {
  static constexpr int kBytes = 8;
  static constexpr int kDims = 2;
  QUIRE_INLINE __m256i Turn(__m256i rows) {
    return _mm256_shuffle_epi8(
        rows, _mm256_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15,  //
                               0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
  }
};
#endif
struct UnitsCodes {
  static constexpr int kBytes = 4;
  static constexpr int kDims = 2;
  QUIRE_INLINE __m256i Turn(__m256i rows) {
    return _mm256_shuffle_epi8(
        rows, _mm256_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15,  //
                               0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15));
  }
};

// Interleaves the units of `kBytes` of the lower (upper) half of each 16 bytes of a and b.
template <int kBytes>
QUIRE_INLINE __m256i ZipLow(__m256i a, __m256i b) {
  if constexpr (kBytes == 2) return _mm256_unpacklo_epi16(a, b);
  if constexpr (kBytes == 4) return _mm256_unpacklo_epi32(a, b);
  return _mm256_unpacklo_epi64(a, b);
}
template <int kBytes>
QUIRE_INLINE __m256i ZipHigh(__m256i a, __m256i b) {
  if constexpr (kBytes == 2) return _mm256_unpackhi_epi16(a, b);
  if constexpr (kBytes == 4) return _mm256_unpackhi_epi32(a, b);
  return _mm256_unpackhi_epi64(a, b);
}

// Rows of 16 / kBytes units each, transposed within the halves of the registers: zipping the first
// half of the rows with the second, as often as it takes until units stand in the order of rows.
template <int kBytes>
QUIRE_INLINE void TransposeUnits(__m256i* rows) {
  constexpr int kCount = 16 / kBytes;
  __m256i next[kCount];
  for (int done = 1; done < kCount; done *= 2) {
    QUIRE_UNROLL
    for (int i = 0; i < kCount / 2; ++i) {
      next[2 * i] = ZipLow<kBytes>(rows[i], rows[i + kCount / 2]);
      next[2 * i + 1] = ZipHigh<kBytes>(rows[i], rows[i + kCount / 2]);
    }
    QUIRE_UNROLL
    for (int i = 0; i < kCount; ++i) rows[i] = next[i];
  }
}

template <typename Units>
static void TransposeTile(const std::byte* keys, int v_dim, std::byte* values) {
  constexpr int kCount = 16 / Units::kBytes;
  const int rows = v_dim / Units::kDims;
  constexpr int kRowBytes = kLanes / Units::kDims * Units::kBytes;
  const int64_t value_row_bytes = int64_t{rows} * Units::kBytes;
  for (int row = 0; row < rows; row += 2 * kCount) {
    const std::byte* const from = keys + int64_t{row} * kRowBytes;
    for (int chunk = 0; chunk < kRowBytes / 16; ++chunk) {
      __m256i block[kCount];
      QUIRE_UNROLL
      for (int i = 0; i < kCount; ++i) {
        const auto* low = reinterpret_cast<const __m128i*>(from + i * kRowBytes) + chunk;
        const auto* high =
            reinterpret_cast<const __m128i*>(from + (i + kCount) * kRowBytes) + chunk;
        block[i] = Units::Turn(_mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(low)),
                                                       _mm_loadu_si128(high), 1));
      }
      TransposeUnits<Units::kBytes>(block);
      std::byte* const to =
          values + chunk * kCount * value_row_bytes + int64_t{row} * Units::kBytes;
      QUIRE_UNROLL
      for (int i = 0; i < kCount; ++i) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i * value_row_bytes), block[i]);
      }
    }
  }
}

#if defined(QUIRE_SIMD_AVX512)

// bfloat16 in blocks of 8 x 8 units, a row of a block in each register.
static void TransposeBF16(const std::byte* keys, int v_dim, std::byte* values) {
  constexpr int kUnits = 8;
  constexpr int kVectorBytes = 64;
  const int64_t value_row_bytes = int64_t{v_dim} / 2 * kUnits;
  const __m512i turn =
      _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
  for (int row = 0; row < v_dim / 2; row += kUnits, keys += kUnits * kVectorBytes) {
    // Quarter q of zipped[i] has rows i and i + 1 of column 2q, zipped[i + 1] those of the column
    // after it.
    __m512i zipped[kUnits];
    QUIRE_UNROLL
    for (int i = 0; i < kUnits; i += 2) {
      const std::byte* const from = keys + i * kVectorBytes;
      const __m512i even = _mm512_shuffle_epi8(_mm512_loadu_si512(from), turn);
      const __m512i odd = _mm512_shuffle_epi8(_mm512_loadu_si512(from + kVectorBytes), turn);
      zipped[i] = _mm512_unpacklo_epi64(even, odd);
      zipped[i + 1] = _mm512_unpackhi_epi64(even, odd);
    }
    // Then quarters are sorted: those of columns 0 and 4 (2 and 6) of four rows, then one column's
    // of all rows.
    QUIRE_UNROLL
    for (int n = 0; n < 2; ++n) {
      constexpr int kEven = 0x88;  // quarters 0 and 2 of either operand
      constexpr int kOdd = 0xdd;   // quarters 1 and 3
      const __m512i low_even = _mm512_shuffle_i64x2(zipped[n], zipped[n + 2], kEven);
      const __m512i low_odd = _mm512_shuffle_i64x2(zipped[n], zipped[n + 2], kOdd);
      const __m512i high_even = _mm512_shuffle_i64x2(zipped[n + 4], zipped[n + 6], kEven);
      const __m512i high_odd = _mm512_shuffle_i64x2(zipped[n + 4], zipped[n + 6], kOdd);
      std::byte* const to = values + n * value_row_bytes + int64_t{row} * kUnits;
      _mm512_storeu_si512(to, _mm512_shuffle_i64x2(low_even, high_even, kEven));
      _mm512_storeu_si512(to + 2 * value_row_bytes, _mm512_shuffle_i64x2(low_odd, high_odd, kEven));
      _mm512_storeu_si512(to + 4 * value_row_bytes,
                          _mm512_shuffle_i64x2(low_even, high_even, kOdd));
      _mm512_storeu_si512(to + 6 * value_row_bytes, _mm512_shuffle_i64x2(low_odd, high_odd, kOdd));
    }
  }
}

#else

static void TransposeBF16(const std::byte* keys, int v_dim, std::byte* values) {
  TransposeTile<UnitsBF16>(keys, v_dim, values);
}

#endif

// `keys` and `values` in the layouts of kv_layout.h. REQUIRES: v_dim is a multiple of 16.
static void LatentValueTile(DType dtype, const std::byte* keys, int v_dim, std::byte* values) {
  if (dtype == DType::kF32) return TransposeTile<UnitsF32>(keys, v_dim, values);
  if (dtype == DType::kF16) return TransposeTile<UnitsF16>(keys, v_dim, values);
  if (dtype == DType::kBF16) return TransposeBF16(keys, v_dim, values);
  TransposeTile<UnitsCodes>(keys, v_dim, values);
}

#endif  // QUIRE_SIMD_SCALAR

#endif  // QUIRE_KERNELS_CPU_LATENT_INL_H_
