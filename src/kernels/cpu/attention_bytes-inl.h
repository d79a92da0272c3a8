// The inner loops of attention over int8 codes by the tile unit, with the bits of chain-inl.h's
// ChainI8: sums of integers have no order. A weight of 16 bits enters as two bytes, of which the
// high one is signed: w c = 256 (high c) + low c, modulo 2^32, which the sum fits into.
//
// Codes lie in pages as pairs and the unit takes quads: a segment's tiles are turned into quads
// once, for all rows of a unit. Included inside a path's namespace and target region.
#ifndef QUIRE_KERNELS_CPU_ATTENTION_BYTES_INL_H_
#define QUIRE_KERNELS_CPU_ATTENTION_BYTES_INL_H_

#include "kernels/cpu/attention_tiles-inl.h"

// Dimensions of a score, in steps of products: `bytes` of each, zeros after the last dimension.
struct ByteSteps {
  int count;
  int bytes;

  explicit constexpr ByteSteps(int k_dim)
      : count((k_dim + kQuadInputs - 1) / kQuadInputs),
        bytes(((k_dim + count - 1) / count + kLanes - 1) / kLanes * kLanes) {}
  constexpr int64_t all() const { return int64_t{count} * bytes; }

 private:
  static constexpr int kQuadInputs = 4 * kTilePairs;  // of a product
};

// The bytes of weights stand behind them, in the row of scores that they came from: all high ones
// of a segment, then all low ones.
constexpr int64_t kHighWeights = int64_t{kSegmentPositions} * 2;
constexpr int64_t kLowWeights = kHighWeights + kSegmentPositions;
static_assert(kLowWeights + kSegmentPositions <= kScoreRowBytes);

// 16 weights.
QUIRE_INLINE void SplitWeights(const std::byte* weights, std::byte* high, std::byte* low) {
  const __m512i w =
      _mm512_cvtepi16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(weights)));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(high), _mm512_cvtepi32_epi8(_mm512_srai_epi32(w, 8)));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(low), _mm512_cvtepi32_epi8(w));
}

// A query's int16 weights as the bytes of its steps, high ones first.
static void SplitQuery(const std::byte* weights, int k_dim, std::byte* to) {
  const int64_t bytes = ByteSteps(k_dim).all();
  __builtin_memset(to, 0, static_cast<size_t>(2 * bytes));
  for (int d = 0; d < k_dim; d += kLanes) SplitWeights(weights + 2 * d, to + d, to + bytes + d);
}

// The weights of values of `count` rows; those of other tiles of a step count as zeros.
static void SplitValueWeights(uint32_t tiles, int count, float* scores) {
  if (tiles == 0) return;
  const int begin = __builtin_ctz(tiles) / 4 * 4;
  const int end = 32 - __builtin_clz(tiles);
  for (int r = 0; r < count; ++r, scores += kScoreStride) {
    auto* const row = reinterpret_cast<std::byte*>(scores);
    for (int t = begin; t < (end + 3) / 4 * 4; ++t) {
      std::byte* const high = row + kHighWeights + t * kLanes;
      std::byte* const low = row + kLowWeights + t * kLanes;
      if ((tiles >> t & 1) != 0) {
        SplitWeights(row + int64_t{t} * kLanes * 2, high, low);
      } else {
        __builtin_memset(high, 0, kLanes);
        __builtin_memset(low, 0, kLanes);
      }
    }
  }
}

// Rows of pairs, two by two, as rows of quads; `columns` is a multiple of 16.
static void MakeQuads(const std::byte* pairs, int pair_rows, int columns, std::byte* quads) {
  for (int i = 0; i < pair_rows; i += 2) {
    for (int c = 0; c < columns; c += kLanes, quads += kTileRowBytes) {
      const std::byte* const first = pairs + 2 * (int64_t{i} * columns + c);
      __m512i quad =
          _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(first)));
      if (i + 1 < pair_rows) {
        const __m512i second = _mm512_cvtepu16_epi32(
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(first + 2 * columns)));
        quad = _mm512_or_si512(quad, _mm512_slli_epi32(second, 16));
      }
      _mm512_storeu_si512(quads, quad);
    }
  }
}

// Some rows against one or two blocks of 16 columns.
struct ByteOperands {
  const std::byte* high;  // of the first row
  const std::byte* low;
  int64_t row_stride;
  int64_t row_step;             // to the next step
  const std::byte* columns[2];  // quads
  int64_t column_stride;
  int64_t column_step;
  float* sums[2];      // int32, of the first row
  int64_t sum_stride;  // bytes
};

// 256 times the sums of high bytes and those of low ones.
static void JoinSums(const float* low, int rows, float* sums, int64_t sum_stride) {
  for (int r = 0; r < rows; ++r, low += kLanes) {
    auto* const at = reinterpret_cast<float*>(reinterpret_cast<std::byte*>(sums) + r * sum_stride);
    StoreSums(at, _mm512_add_epi32(_mm512_slli_epi32(LoadSums(at), 8), LoadSums(low)));
  }
}

// Steps [begin, end); calls ask(step) in each, for what is read later.
template <int kColumns, typename Ask>
static void ByteProducts(TileUnit& unit, const ByteOperands& operands, int rows, int begin, int end,
                         const Ask& ask) {
  const ByteOperands o = operands;
  alignas(64) float low[kColumns][kTileRows * kLanes];
  unit.Clear<0>();
  unit.Clear<1>();
  if constexpr (kColumns > 1) unit.Clear<2>();
  if constexpr (kColumns > 1) unit.Clear<3>();
  for (int step = begin; step < end; ++step) {
    unit.Read<4>(o.high + step * o.row_step, o.row_stride);
    unit.Read<6>(o.columns[0] + step * o.column_step, o.column_stride);
    unit.DotBytes<0, 4, 6>();
    unit.Read<5>(o.low + step * o.row_step, o.row_stride);
    ask(step);
    unit.DotUnsignedBytes<1, 5, 6>();
    if constexpr (kColumns > 1) {
      unit.Read<7>(o.columns[1] + step * o.column_step, o.column_stride);
      unit.DotBytes<2, 4, 7>();
      unit.DotUnsignedBytes<3, 5, 7>();
    }
  }
  unit.Write<0>(o.sums[0], o.sum_stride);
  unit.Write<1>(low[0], kTileRowBytes);
  if constexpr (kColumns > 1) unit.Write<2>(o.sums[1], o.sum_stride);
  if constexpr (kColumns > 1) unit.Write<3>(low[1], kTileRowBytes);
  for (int c = 0; c < kColumns; ++c) JoinSums(low[c], rows, o.sums[c], o.sum_stride);
}

// As ScoreByTiles: queries of SplitQuery, keys in quads.
static void ScoreByBytes(const TileScoreArgs& args) {
  const ByteSteps steps(args.k_dim);
  for (int row = 0; row < args.rows; row += kTileRows) {
    const int rows = args.rows - row < kTileRows ? args.rows - row : kTileRows;
    TileUnit unit({rows, steps.bytes / 4});
    ByteOperands o{};
    o.high = args.q + row * args.q_row_bytes;
    o.low = o.high + steps.all();
    o.row_stride = args.q_row_bytes;
    o.row_step = steps.bytes;
    o.column_stride = kTileRowBytes;
    o.column_step = steps.bytes / 4 * kTileRowBytes;
    o.sum_stride = kScoreRowBytes;
    for (uint32_t left = args.tiles; left != 0;) {
      int tiles[2];
      int count = 0;
      for (; count < 2 && left != 0; ++count, left &= left - 1) {
        tiles[count] = __builtin_ctz(left);
        o.columns[count] = args.keys[tiles[count]];
        o.sums[count] = args.scores + row * kScoreStride + tiles[count] * kLanes;
      }
      const auto ask = [&](int step) {
        const int64_t from = args.ahead_begin + step * args.ahead_step;
        for (int i = 0; i < count; ++i) AskFor(args.ahead[tiles[i]] + from, args.ahead_step);
      };
      if (count == 2) {
        ByteProducts<2>(unit, o, rows, 0, steps.count, ask);
      } else {
        ByteProducts<1>(unit, o, rows, 0, steps.count, ask);
      }
    }
  }
}

// As WeighByTiles: weights of SplitValueWeights, values in quads, all tiles of the segment one
// after the other. A step is four tiles. Sums begin at zero.
static void WeighByBytes(const TileWeighArgs& args) {
  if (args.tiles == 0) return;
  const int begin = __builtin_ctz(args.tiles) / 4;
  const int end = (31 - __builtin_clz(args.tiles)) / 4 + 1;
  const int64_t tile_bytes = args.v_row_bytes * (kLanes / 4);
  const int first = __builtin_ctz(args.tiles);
  const std::byte* const values = args.values[first] - first * tile_bytes;
  for (int row = 0; row < args.rows; row += kTileRows) {
    const int rows = args.rows - row < kTileRows ? args.rows - row : kTileRows;
    TileUnit unit({rows, kTilePairs});
    ByteOperands o{};
    o.high = args.p + row * kScoreRowBytes + kHighWeights;
    o.low = o.high + (kLowWeights - kHighWeights);
    o.row_stride = kScoreRowBytes;
    o.row_step = 4 * kLanes;
    o.column_stride = args.v_row_bytes;
    o.column_step = 4 * tile_bytes;
    o.sum_stride = args.o_row * static_cast<int64_t>(sizeof(float));
    for (int column = 0; column < args.columns;) {
      const int count = column + kLanes < args.columns ? 2 : 1;
      for (int i = 0; i < count; ++i) {
        o.columns[i] = values + (column + i * kLanes) * 4;
        o.sums[i] = args.o + row * args.o_row + column + i * kLanes;
      }
      const auto ask = [&](int step) {
        const int64_t from = args.ahead_begin + column / kLanes * args.ahead_step;
        for (uint32_t left = args.tiles & (15U << (4 * step)); left != 0; left &= left - 1) {
          AskFor(args.ahead[__builtin_ctz(left)] + from, count * args.ahead_step);
        }
      };
      if (count == 2) {
        ByteProducts<2>(unit, o, rows, begin, end, ask);
      } else {
        ByteProducts<1>(unit, o, rows, begin, end, ask);
      }
      column += count * kLanes;
    }
  }
}

#endif  // QUIRE_KERNELS_CPU_ATTENTION_BYTES_INL_H_
