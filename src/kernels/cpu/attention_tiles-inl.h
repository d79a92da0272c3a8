// The two inner loops of attention by the tile unit: scores of some rows against some tiles of
// keys, outputs of some rows from some tiles of values, with the bits of chain-inl.h's chains of
// chunks. A tile of keys is pairs of dimensions for 16 positions, one of values pairs of positions
// for v_dim dimensions: both are the unit's tiles of columns as they lie in a page. Included inside
// a path's namespace and target region.
#ifndef QUIRE_KERNELS_CPU_ATTENTION_TILES_INL_H_
#define QUIRE_KERNELS_CPU_ATTENTION_TILES_INL_H_

#include "kernels/cpu/tile_unit-inl.h"

// Rows of a group, which meet all tiles together: two tiles of rows.
constexpr int64_t kTileGroupRows = 2 * kTileRows;
constexpr int64_t kScoreRowBytes = kScoreStride * static_cast<int64_t>(sizeof(float));

// Memory to be asked for: `bytes` from `from` on.
QUIRE_INLINE void AskFor(const std::byte* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) PrefetchL2(from + i);
}

struct TileScoreArgs {
  const std::byte* q;  // bfloat16 [row][k_dim]
  int64_t q_row_bytes;
  int rows;  // at most kTileGroupRows
  int k_dim;
  const std::byte* const* keys;   // by tile
  uint32_t tiles;                 // which, one bit each
  float* scores;                  // of the first row and position of the segment
  const std::byte* const* ahead;  // by tile: what is read later, from...
  int64_t ahead_begin;            // ...this byte on...
  int64_t ahead_step;             // ...these bytes with each chunk of dimensions
};

// Dimensions [begin, end), whole tiles of pairs, for `kRowTiles` tiles of rows from `row` on and
// `kColumns` tiles of keys. From the second part of the dimensions on, sums go on from the scores.
template <int kRowTiles, int kColumns>
static void ScoreProducts(TileUnit& unit, const TileScoreArgs& args, int row, const int* tiles,
                          int begin, int end, int step) {
  const TileScoreArgs a = args;
  const std::byte* q0 = a.q + row * a.q_row_bytes + begin * 2;
  const std::byte* const q1 = q0 + kTileRows * a.q_row_bytes;
  float* const s0 = a.scores + row * kScoreStride + tiles[0] * kLanes;
  float* const s1 = a.scores + row * kScoreStride + tiles[kColumns - 1] * kLanes;
  const std::byte* const k0 = a.keys[tiles[0]];
  const std::byte* const k1 = a.keys[tiles[kColumns - 1]];
  if (begin == 0) {
    unit.Clear<0>();
    if constexpr (kColumns > 1) unit.Clear<1>();
    if constexpr (kRowTiles > 1) unit.Clear<2>();
    if constexpr (kRowTiles > 1 && kColumns > 1) unit.Clear<3>();
  } else {
    unit.Read<0>(s0, kScoreRowBytes);
    if constexpr (kColumns > 1) unit.Read<1>(s1, kScoreRowBytes);
    if constexpr (kRowTiles > 1) unit.Read<2>(s0 + kTileRows * kScoreStride, kScoreRowBytes);
    if constexpr (kRowTiles > 1 && kColumns > 1) {
      unit.Read<3>(s1 + kTileRows * kScoreStride, kScoreRowBytes);
    }
  }
  int64_t ahead = a.ahead_begin + begin / kTileInputs * a.ahead_step;
  for (int d = begin; d < end; d += step, ahead += a.ahead_step) {
    const int64_t key_offset = int64_t{d} / 2 * kTileRowBytes;
    const int64_t q_offset = int64_t{d - begin} * 2;
    unit.Read<6>(k0 + key_offset, kTileRowBytes);
    unit.Read<4>(q0 + q_offset, a.q_row_bytes);
    AskFor(a.ahead[tiles[0]] + ahead, a.ahead_step);
    unit.Dot<0, 4, 6>();
    if constexpr (kColumns > 1) {
      unit.Read<7>(k1 + key_offset, kTileRowBytes);
      AskFor(a.ahead[tiles[1]] + ahead, a.ahead_step);
      unit.Dot<1, 4, 7>();
    }
    if constexpr (kRowTiles > 1) {
      unit.Read<5>(q1 + q_offset, a.q_row_bytes);
      unit.Dot<2, 5, 6>();
      if constexpr (kColumns > 1) unit.Dot<3, 5, 7>();
    }
  }
  unit.Write<0>(s0, kScoreRowBytes);
  if constexpr (kColumns > 1) unit.Write<1>(s1, kScoreRowBytes);
  if constexpr (kRowTiles > 1) unit.Write<2>(s0 + kTileRows * kScoreStride, kScoreRowBytes);
  if constexpr (kRowTiles > 1 && kColumns > 1) {
    unit.Write<3>(s1 + kTileRows * kScoreStride, kScoreRowBytes);
  }
}

// Scores of `kRowTiles` tiles of `tile_rows` rows each, from `row` on.
template <int kRowTiles>
static void ScoreRowTiles(const TileScoreArgs& args, int row, int tile_rows) {
  const int whole = args.k_dim / kTileInputs * kTileInputs;
  const auto score = [&](int begin, int end) {
    const int step = end - begin < kTileInputs ? end - begin : kTileInputs;
    TileUnit unit({tile_rows, step / 2});
    for (uint32_t left = args.tiles; left != 0;) {
      const int first = __builtin_ctz(left);
      left &= left - 1;
      const int tiles[2] = {first, left != 0 ? __builtin_ctz(left) : first};
      if (left != 0) {
        ScoreProducts<kRowTiles, 2>(unit, args, row, tiles, begin, end, step);
        left &= left - 1;
      } else {
        ScoreProducts<kRowTiles, 1>(unit, args, row, tiles, begin, end, step);
      }
    }
  };
  if (whole > 0) score(0, whole);
  if (whole < args.k_dim) score(whole, args.k_dim);
}

static void ScoreByTiles(const TileScoreArgs& args) {
  if (args.rows == kTileGroupRows) return ScoreRowTiles<2>(args, 0, kTileRows);
  for (int row = 0; row < args.rows; row += kTileRows) {
    const int left = args.rows - row;
    ScoreRowTiles<1>(args, row, left < kTileRows ? left : kTileRows);
  }
}

struct TileWeighArgs {
  const std::byte* p;  // bfloat16 of row 0 and the segment's first position; kScoreRowBytes a row
  int rows;            // at most kTileGroupRows
  const std::byte* const* values;  // by tile
  uint32_t tiles;                  // which, one bit each
  int64_t v_row_bytes;             // of a pair of positions
  int columns;                     // a multiple of 16
  float* o;                        // of row 0
  int64_t o_row;                   // stride in floats
  bool resume;                     // sums go on from o; else from zero
  const std::byte* const* ahead;   // by tile: what is read later, from...
  int64_t ahead_begin;             // ...this byte on...
  int64_t ahead_step;              // ...these bytes with each tile and 16 columns
};

// Columns [column, column + 16 kColumns) of `kRowTiles` tiles of rows from `row` on.
template <int kRowTiles, int kColumns>
static void WeighProducts(TileUnit& unit, const TileWeighArgs& args, int row, int column) {
  const TileWeighArgs a = args;
  const std::byte* const p0 = a.p + row * kScoreRowBytes;
  const std::byte* const p1 = p0 + kTileRows * kScoreRowBytes;
  const int64_t o_bytes = a.o_row * static_cast<int64_t>(sizeof(float));
  float* const o0 = a.o + row * a.o_row + column;
  float* const o1 = o0 + kTileRows * a.o_row;
  if (a.resume) {
    unit.Read<0>(o0, o_bytes);
    if constexpr (kColumns > 1) unit.Read<1>(o0 + kLanes, o_bytes);
    if constexpr (kRowTiles > 1) unit.Read<2>(o1, o_bytes);
    if constexpr (kRowTiles > 1 && kColumns > 1) unit.Read<3>(o1 + kLanes, o_bytes);
  } else {
    unit.Clear<0>();
    if constexpr (kColumns > 1) unit.Clear<1>();
    if constexpr (kRowTiles > 1) unit.Clear<2>();
    if constexpr (kRowTiles > 1 && kColumns > 1) unit.Clear<3>();
  }
  const int64_t ahead = a.ahead_begin + column / kLanes * a.ahead_step;
  for (uint32_t left = a.tiles; left != 0; left &= left - 1) {
    const int t = __builtin_ctz(left);
    const std::byte* const v = a.values[t] + column * 4;
    unit.Read<6>(v, a.v_row_bytes);
    unit.Read<4>(p0 + t * kLanes * 2, kScoreRowBytes);
    AskFor(a.ahead[t] + ahead, kColumns * a.ahead_step);
    unit.Dot<0, 4, 6>();
    if constexpr (kColumns > 1) {
      unit.Read<7>(v + kTileRowBytes, a.v_row_bytes);
      unit.Dot<1, 4, 7>();
    }
    if constexpr (kRowTiles > 1) {
      unit.Read<5>(p1 + t * kLanes * 2, kScoreRowBytes);
      unit.Dot<2, 5, 6>();
      if constexpr (kColumns > 1) unit.Dot<3, 5, 7>();
    }
  }
  unit.Write<0>(o0, o_bytes);
  if constexpr (kColumns > 1) unit.Write<1>(o0 + kLanes, o_bytes);
  if constexpr (kRowTiles > 1) unit.Write<2>(o1, o_bytes);
  if constexpr (kRowTiles > 1 && kColumns > 1) unit.Write<3>(o1 + kLanes, o_bytes);
}

// Outputs of `kRowTiles` tiles of `tile_rows` rows each, from `row` on.
template <int kRowTiles>
static void WeighRowTiles(const TileWeighArgs& args, int row, int tile_rows) {
  TileUnit unit({tile_rows, kLanes / 2});
  int column = 0;
  for (; column + 2 * kLanes <= args.columns; column += 2 * kLanes) {
    WeighProducts<kRowTiles, 2>(unit, args, row, column);
  }
  if (column < args.columns) WeighProducts<kRowTiles, 1>(unit, args, row, column);
}

static void WeighByTiles(const TileWeighArgs& args) {
  if (args.rows == kTileGroupRows) return WeighRowTiles<2>(args, 0, kTileRows);
  for (int row = 0; row < args.rows; row += kTileRows) {
    const int left = args.rows - row;
    WeighRowTiles<1>(args, row, left < kTileRows ? left : kTileRows);
  }
}

#endif  // QUIRE_KERNELS_CPU_ATTENTION_TILES_INL_H_
