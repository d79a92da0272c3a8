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
// rows i and i + kCount side by side, so that transposing within the halves gives 2 * kCount
// consecutive units of each of kCount rows of values.
#if defined(QUIRE_SIMD_NEON)

struct Rows {
  uint8x16_t half[2];
};
QUIRE_INLINE Rows LoadRows(const std::byte* first, const std::byte* second) {
  return {{vld1q_u8(reinterpret_cast<const uint8_t*>(first)),
           vld1q_u8(reinterpret_cast<const uint8_t*>(second))}};
}
QUIRE_INLINE void StoreRows(std::byte* to, Rows rows) {
  vst1q_u8(reinterpret_cast<uint8_t*>(to), rows.half[0]);
  vst1q_u8(reinterpret_cast<uint8_t*>(to) + 16, rows.half[1]);
}
// Moves the bytes of each 16: byte i is that at places[i].
QUIRE_INLINE Rows Shuffle(Rows rows, const uint8_t* places) {
  const uint8x16_t at = vld1q_u8(places);
  return {{vqtbl1q_u8(rows.half[0], at), vqtbl1q_u8(rows.half[1], at)}};
}
// Interleaves the units of `kBytes` of the lower (upper) half of each 16 bytes of a and b.
template <int kBytes>
QUIRE_INLINE uint8x16_t ZipLowHalf(uint8x16_t a, uint8x16_t b) {
  if constexpr (kBytes == 2) {
    return vreinterpretq_u8_u16(vzip1q_u16(vreinterpretq_u16_u8(a), vreinterpretq_u16_u8(b)));
  } else if constexpr (kBytes == 4) {
    return vreinterpretq_u8_u32(vzip1q_u32(vreinterpretq_u32_u8(a), vreinterpretq_u32_u8(b)));
  } else {
    return vreinterpretq_u8_u64(vzip1q_u64(vreinterpretq_u64_u8(a), vreinterpretq_u64_u8(b)));
  }
}
template <int kBytes>
QUIRE_INLINE uint8x16_t ZipHighHalf(uint8x16_t a, uint8x16_t b) {
  if constexpr (kBytes == 2) {
    return vreinterpretq_u8_u16(vzip2q_u16(vreinterpretq_u16_u8(a), vreinterpretq_u16_u8(b)));
  } else if constexpr (kBytes == 4) {
    return vreinterpretq_u8_u32(vzip2q_u32(vreinterpretq_u32_u8(a), vreinterpretq_u32_u8(b)));
  } else {
    return vreinterpretq_u8_u64(vzip2q_u64(vreinterpretq_u64_u8(a), vreinterpretq_u64_u8(b)));
  }
}
template <int kBytes>
QUIRE_INLINE Rows ZipLow(Rows a, Rows b) {
  return {{ZipLowHalf<kBytes>(a.half[0], b.half[0]), ZipLowHalf<kBytes>(a.half[1], b.half[1])}};
}
template <int kBytes>
QUIRE_INLINE Rows ZipHigh(Rows a, Rows b) {
  return {{ZipHighHalf<kBytes>(a.half[0], b.half[0]), ZipHighHalf<kBytes>(a.half[1], b.half[1])}};
}

#else

using Rows = __m256i;
QUIRE_INLINE Rows LoadRows(const std::byte* first, const std::byte* second) {
  const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(first));
  const __m128i high = _mm_loadu_si128(reinterpret_cast<const __m128i*>(second));
  return _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
}
QUIRE_INLINE void StoreRows(std::byte* to, Rows rows) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), rows);
}
// Moves the bytes of each 16: byte i is that at places[i].
QUIRE_INLINE Rows Shuffle(Rows rows, const uint8_t* places) {
  const __m128i at = _mm_loadu_si128(reinterpret_cast<const __m128i*>(places));
  return _mm256_shuffle_epi8(rows, _mm256_broadcastsi128_si256(at));
}
// Interleaves the units of `kBytes` of the lower (upper) half of each 16 bytes of a and b.
template <int kBytes>
QUIRE_INLINE Rows ZipLow(Rows a, Rows b) {
  if constexpr (kBytes == 2) return _mm256_unpacklo_epi16(a, b);
  if constexpr (kBytes == 4) return _mm256_unpacklo_epi32(a, b);
  return _mm256_unpacklo_epi64(a, b);
}
template <int kBytes>
QUIRE_INLINE Rows ZipHigh(Rows a, Rows b) {
  if constexpr (kBytes == 2) return _mm256_unpackhi_epi16(a, b);
  if constexpr (kBytes == 4) return _mm256_unpackhi_epi32(a, b);
  return _mm256_unpackhi_epi64(a, b);
}

#endif

struct UnitsF32 {
  static constexpr int kBytes = 4;
  static constexpr int kDims = 1;
  QUIRE_INLINE Rows Turn(Rows rows) { return rows; }
};
struct UnitsF16 {
  static constexpr int kBytes = 2;
  static constexpr int kDims = 1;
  QUIRE_INLINE Rows Turn(Rows rows) { return rows; }
};
#if !defined(QUIRE_SIMD_AVX512)
struct UnitsBF16 {
  static constexpr int kBytes = 8;
  static constexpr int kDims = 2;
  QUIRE_INLINE Rows Turn(Rows rows) {
    alignas(16) static constexpr uint8_t kPlaces[] = {0, 1, 4,  5,  2,  3,  6,  7,
                                                      8, 9, 12, 13, 10, 11, 14, 15};
    return Shuffle(rows, kPlaces);
  }
};
#endif
struct UnitsCodes {
  static constexpr int kBytes = 4;
  static constexpr int kDims = 2;
  QUIRE_INLINE Rows Turn(Rows rows) {
    alignas(16) static constexpr uint8_t kPlaces[] = {0, 2,  1, 3,  4,  6,  5,  7,
                                                      8, 10, 9, 11, 12, 14, 13, 15};
    return Shuffle(rows, kPlaces);
  }
};

// Rows of 16 / kBytes units each, transposed within the halves of the registers: zipping the first
// half of the rows with the second, as often as it takes until units stand in the order of rows.
template <int kBytes>
QUIRE_INLINE void TransposeUnits(Rows* rows) {
  constexpr int kCount = 16 / kBytes;
  Rows next[kCount];
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
      Rows block[kCount];
      QUIRE_UNROLL
      for (int i = 0; i < kCount; ++i) {
        const std::byte* const first = from + i * kRowBytes + chunk * 16;
        block[i] = Units::Turn(LoadRows(first, first + kCount * kRowBytes));
      }
      TransposeUnits<Units::kBytes>(block);
      std::byte* const to =
          values + chunk * kCount * value_row_bytes + int64_t{row} * Units::kBytes;
      QUIRE_UNROLL
      for (int i = 0; i < kCount; ++i) StoreRows(to + i * value_row_bytes, block[i]);
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
