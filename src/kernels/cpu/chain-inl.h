// The two inner loops of attention: scores of some rows against some tiles (Q K^T), outputs of some
// rows from tiles (P V). Each result is one chain of fused steps in a fixed order; how many chains
// run side by side is chosen per path and cannot be seen in the bits. Included after simd-inl.h,
// inside a path's namespace and target region.
#ifndef QUIRE_KERNELS_CPU_CHAIN_INL_H_
#define QUIRE_KERNELS_CPU_CHAIN_INL_H_

#if defined(QUIRE_SIMD_TILES)
#include "kernels/cpu/tile_unit-inl.h"
#endif

// Row stride of scores and weights in floats: off a power of two, so that rows do not fall into the
// same cache sets.
constexpr int kScoreStride = kSegmentPositions + kLanes;

struct NoScope {};

// How a tile's elements enter a chain: `kPair` elements per lane and step, weighed by one Weight.
// Sums lie in memory for floats.
struct FloatSums {
  using Sum = VF;
  using Scope = NoScope;
  static constexpr int kChunkSteps = 0;  // sums are not cut
  QUIRE_INLINE void EndChunk(Sum*) {}
  QUIRE_INLINE Sum None() { return Zero(); }
  QUIRE_INLINE Sum LoadSum(const float* p) { return Load(p); }
  QUIRE_INLINE void StoreSum(float* p, Sum v) { Store(p, v); }
};
struct ChainF32 : FloatSums {
  using Element = float;
  using Weight = float;
  using Vector = VF;
  static constexpr int kPair = 1;
  QUIRE_INLINE Vector LoadVector(const Element* p) { return Load(p); }
  QUIRE_INLINE VF Step(VF acc, Vector v, Weight w) { return Fma(v, Set1(w), acc); }
};
struct ChainF16 : FloatSums {
  using Element = uint16_t;
  using Weight = float;
  using Vector = VF;
  static constexpr int kPair = 1;
  QUIRE_INLINE Vector LoadVector(const Element* p) { return LoadF16(p); }
  QUIRE_INLINE VF Step(VF acc, Vector v, Weight w) { return Fma(v, Set1(w), acc); }
};
#if defined(QUIRE_SIMD_TILES)
// In the tile unit's order (tile_unit-inl.h): chunks of at most 16 pairs; of values, those of one
// tile.
struct ChainBF16 {
  using Element = uint16_t;
  using Weight = QPair;
  using Vector = VPair;
  using Scope = ScopedFlush;
  struct Sum {
    VF total;
    VF even, odd;  // of the chunk
  };
  static constexpr int kPair = 2;
  static constexpr int kChunkSteps = kTilePairs;
  QUIRE_INLINE Sum None() { return {Zero(), Zero(), Zero()}; }
  QUIRE_INLINE Sum LoadSum(const float* p) { return {Load(p), Zero(), Zero()}; }
  QUIRE_INLINE void StoreSum(float* p, const Sum& v) { Store(p, v.total); }
  QUIRE_INLINE Vector LoadVector(const Element* p) { return LoadPair(p); }
  QUIRE_INLINE Sum Step(const Sum& acc, Vector v, Weight w) {
    return {acc.total, Fma(v.even, Set1(w.even), acc.even), Fma(v.odd, Set1(w.odd), acc.odd)};
  }
  QUIRE_INLINE void EndChunk(Sum* acc) {
    *acc = {Add(acc->total, Add(acc->even, acc->odd)), Zero(), Zero()};
  }
};
#else
struct ChainBF16 : FloatSums {
  using Element = uint16_t;
  using Weight = QPair;
  using Vector = VPair;
  static constexpr int kPair = 2;
  QUIRE_INLINE Vector LoadVector(const Element* p) { return LoadPair(p); }
  QUIRE_INLINE VF Step(VF acc, Vector v, Weight w) { return DotPair(acc, v, w); }
};
#endif

// Integers: sums are int32, for the caller to scale.
struct ChainI8 {
  using Element = uint8_t;
  using Weight = uint32_t;  // two int16
  using Vector = VI16;
  using Sum = VI;
  using Scope = NoScope;
  static constexpr int kPair = 2;
  static constexpr int kChunkSteps = 0;
  QUIRE_INLINE void EndChunk(Sum*) {}
  QUIRE_INLINE Sum None() { return NoSums(); }
  QUIRE_INLINE Sum LoadSum(const float* p) { return LoadSums(p); }
  QUIRE_INLINE void StoreSum(float* p, Sum v) { StoreSums(p, v); }
  QUIRE_INLINE Vector LoadVector(const Element* p) { return WidenI8(p); }
  QUIRE_INLINE Sum Step(Sum acc, Vector v, Weight w) { return DotI16(acc, v, w); }
};
struct ChainF8 : ChainBF16 {
  using Element = uint8_t;
  QUIRE_INLINE Vector LoadVector(const Element* p) { return LoadF8Pair(p); }
};

// Registers of a path: rows held at once, and how many tiles of one head, heads of one tile or
// columns of 16 outputs beside them (powers of two). At least 8 chains keep two FMA units busy.
#if defined(QUIRE_SIMD_AVX512)
constexpr int kRowsMax = 12;  // a tenth faster than 8 without dot products, a twentieth with them
constexpr int kTilesAtOnce = 2;
constexpr int HeadsAtOnce(int rows) { return rows == 1 ? 8 : rows == 2 ? 4 : 2; }
constexpr int ColumnsAtOnce(int rows) { return rows <= 2 ? 8 : rows <= 4 ? 4 : 2; }
#elif defined(QUIRE_SIMD_AVX2) || defined(QUIRE_SIMD_NEON)
// A vector is two registers of 16, or four of 32: 6 chains, a step's vector, a weight.
constexpr int kRowsMax = 6;
constexpr int kTilesAtOnce = 1;
constexpr int HeadsAtOnce(int rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }
constexpr int ColumnsAtOnce(int rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }
#else
constexpr int kRowsMax = 2;
constexpr int kTilesAtOnce = 1;
constexpr int HeadsAtOnce(int) { return 1; }
constexpr int ColumnsAtOnce(int) { return 1; }
#endif
// Rows of a group, where `rows` rows are cut into as few groups as there can be, all but the last
// of one size.
constexpr int64_t GroupCount(int64_t rows) { return (rows + kRowsMax - 1) / kRowsMax; }
constexpr int64_t GroupRows(int64_t rows) {
  return (rows + GroupCount(rows) - 1) / GroupCount(rows);
}
constexpr int kWidths = 4;  // 1, 2, 4, 8
constexpr int kWidest = 1 << (kWidths - 1);
// Steps ahead at which a tile is fetched from L2 into L1 where many rows use it (8 of 4 to 32
// tried: 0.93 of the peak).
constexpr int kStepsAhead = 8;
constexpr int kWeighAhead = kStepsAhead / 2;  // steps of values, of which a tile has few

struct ScoreArgs {
  const std::byte* q;           // weights of column 0, [step][row]
  size_t q_column_bytes;        // between columns, where these are heads
  const std::byte* k[kWidest];  // K tile per column
  int64_t steps;
  float* s;      // 16 scores of row 0 and column 0
  size_t s_row;  // strides in floats
  size_t s_column;
  const std::byte* prefetch;             // heads: what is read later, as many bytes as now...
  bool into_l1;                          // ...and where to (StreamPrefetch)
  const std::byte* ahead[kTilesAtOnce];  // tiles: what is read later, by column...
  int64_t ahead_step;                    // ...moved by these bytes with each step
};

// The same R rows of C tiles, or (kHeads) R rows of each of C heads.
template <typename Chain, int R, int C, bool kHeads>
static void Score(const ScoreArgs& args) {
  const ScoreArgs a = args;  // stores of scores cannot change a local, so it stays in registers
  [[maybe_unused]] const typename Chain::Scope scope;
  using Element = typename Chain::Element;
  using Weight = typename Chain::Weight;
  constexpr int64_t kStepElements = kLanes * Chain::kPair;
  [[maybe_unused]] const bool into_l1 = a.into_l1;
  typename Chain::Sum acc[R][C];
  QUIRE_UNROLL
  for (int r = 0; r < R; ++r) {
    QUIRE_UNROLL
    for (int c = 0; c < C; ++c) acc[r][c] = Chain::None();
  }
  [[maybe_unused]] int64_t chunk_end = Chain::kChunkSteps;
  for (int64_t d = 0; d < a.steps; ++d) {
    const std::byte* const q = a.q + d * static_cast<int64_t>(R * sizeof(Weight));
    typename Chain::Vector k[C];
    QUIRE_UNROLL
    for (int c = 0; c < C; ++c) {
      const Element* tile = reinterpret_cast<const Element*>(a.k[c]) + d * kStepElements;
      k[c] = Chain::LoadVector(tile);
      if constexpr (kHeads) {
        PrefetchStream(reinterpret_cast<const Element*>(a.prefetch) + (d * C + c) * kStepElements,
                       into_l1);
      } else {
        PrefetchL1(tile + kStepsAhead * kStepElements);
        PrefetchL2(a.ahead[c] + d * a.ahead_step);
      }
    }
    QUIRE_UNROLL
    for (int r = 0; r < R; ++r) {
      QUIRE_UNROLL
      for (int c = 0; c < C; ++c) {
        const std::byte* column = kHeads ? q + c * a.q_column_bytes : q;
        acc[r][c] = Chain::Step(acc[r][c], k[c], reinterpret_cast<const Weight*>(column)[r]);
      }
    }
    if constexpr (Chain::kChunkSteps > 0) {
      if (d + 1 != chunk_end && d + 1 != a.steps) continue;
      chunk_end += Chain::kChunkSteps;
      QUIRE_UNROLL
      for (int r = 0; r < R; ++r) {
        QUIRE_UNROLL
        for (int c = 0; c < C; ++c) Chain::EndChunk(&acc[r][c]);
      }
    }
  }
  QUIRE_UNROLL
  for (int r = 0; r < R; ++r) {
    QUIRE_UNROLL
    for (int c = 0; c < C; ++c) Chain::StoreSum(a.s + r * a.s_row + c * a.s_column, acc[r][c]);
  }
}

struct WeighArgs {
  const std::byte* p;  // weights of row 0 for the first tile; rows are kScoreStride floats apart
  const std::byte* const* v;  // V tiles
  int tile_count;
  int64_t v_row_elements;     // of one step: v_dim * pair
  int64_t column;             // first output dimension
  int64_t column_end;         // a number of whole loops after it
  float* o;                   // row 0
  int64_t o_row;              // stride in floats
  bool resume;                // the chains go on from o; else from zero
  const std::byte* prefetch;  // what is read later, as many bytes as now; null: the tiles are in L2
  bool into_l1;               // where that is fetched to (StreamPrefetch)
  const std::byte* const* ahead;  // tiles in L2: what is read later, beside each of them, from...
  int64_t ahead_begin;            // ...this byte on
  int64_t ahead_step;             // ...moved by these bytes with each step
};

// R rows x C vectors of 16 output dimensions at a time, over all keys of the tiles.
template <typename Chain, int R, int C>
static void Weigh(const WeighArgs& args) {
  const WeighArgs a = args;  // as in Score
  [[maybe_unused]] const typename Chain::Scope scope;
  using Element = typename Chain::Element;
  using Weight = typename Chain::Weight;
  constexpr int kSteps = kLanes / Chain::kPair;
  constexpr int kVector = kLanes * Chain::kPair;
  constexpr size_t kRowBytes = kScoreStride * sizeof(float);
  const auto* next = reinterpret_cast<const Element*>(a.prefetch);
  const bool into_l1 = a.into_l1;
  int64_t ahead_begin = a.ahead_begin;
  for (int64_t column = a.column; column < a.column_end; column += C * kLanes) {
    float* const o = a.o + column;
    typename Chain::Sum acc[R][C];
    if (a.resume) {
      QUIRE_UNROLL
      for (int r = 0; r < R; ++r) {
        QUIRE_UNROLL
        for (int c = 0; c < C; ++c) acc[r][c] = Chain::LoadSum(o + r * a.o_row + c * kLanes);
      }
    } else {
      QUIRE_UNROLL
      for (int r = 0; r < R; ++r) {
        QUIRE_UNROLL
        for (int c = 0; c < C; ++c) acc[r][c] = Chain::None();
      }
    }
    const std::byte* p = a.p;
    for (int t = 0; t < a.tile_count; ++t, p += kSteps * sizeof(Weight)) {
      const Element* v = reinterpret_cast<const Element*>(a.v[t]) + column * Chain::kPair;
      const Element* soon = v + kWeighAhead * a.v_row_elements;
      const std::byte* ahead = next == nullptr ? a.ahead[t] + ahead_begin : nullptr;
      for (int step = 0; step < kSteps; ++step, v += a.v_row_elements) {
        typename Chain::Vector values[C];
        QUIRE_UNROLL
        for (int c = 0; c < C; ++c) values[c] = Chain::LoadVector(v + c * kVector);
        if (next == nullptr) {
          if (step == kSteps - kWeighAhead) {  // the next tile may lie anywhere
            const int tile = t + 1 < a.tile_count ? t + 1 : t;
            soon = reinterpret_cast<const Element*>(a.v[tile]) + column * Chain::kPair;
          }
          QUIRE_UNROLL
          for (int c = 0; c < C; ++c) PrefetchL1(soon + c * kVector);
          soon += a.v_row_elements;
          PrefetchL2(ahead);
          ahead += a.ahead_step;
        } else {
          QUIRE_UNROLL
          for (int c = 0; c < C; ++c) PrefetchStream(next + c * kVector, into_l1);
          next += C * kVector;
        }
        QUIRE_UNROLL
        for (int r = 0; r < R; ++r) {
          const Weight w = reinterpret_cast<const Weight*>(p + r * kRowBytes)[step];
          QUIRE_UNROLL
          for (int c = 0; c < C; ++c) acc[r][c] = Chain::Step(acc[r][c], values[c], w);
        }
      }
      QUIRE_UNROLL
      for (int r = 0; r < R; ++r) {
        QUIRE_UNROLL
        for (int c = 0; c < C; ++c) Chain::EndChunk(&acc[r][c]);
      }
    }
    QUIRE_UNROLL
    for (int r = 0; r < R; ++r) {
      QUIRE_UNROLL
      for (int c = 0; c < C; ++c) Chain::StoreSum(o + r * a.o_row + c * kLanes, acc[r][c]);
    }
    ahead_begin += kSteps * a.ahead_step;
  }
}

// The loops for one chain, by number of rows - 1 and by log2 of the number of heads or columns;
// null where that is more than the path holds at once.
struct ChainLoops {
  void (*score_tiles[kRowsMax])(const ScoreArgs&);  // kTilesAtOnce tiles
  void (*score_tile[kRowsMax])(const ScoreArgs&);
  void (*score_heads[kRowsMax][kWidths])(const ScoreArgs&);
  void (*weigh[kRowsMax][kWidths])(const WeighArgs&);
};

template <typename Chain, int R, int kWidth>
constexpr void FillWidths(ChainLoops* loops) {
  if constexpr (kWidth < kWidths) {
    if constexpr ((1 << kWidth) <= HeadsAtOnce(R)) {
      loops->score_heads[R - 1][kWidth] = Score<Chain, R, 1 << kWidth, true>;
    }
    if constexpr ((1 << kWidth) <= ColumnsAtOnce(R)) {
      loops->weigh[R - 1][kWidth] = Weigh<Chain, R, 1 << kWidth>;
    }
    FillWidths<Chain, R, kWidth + 1>(loops);
  }
}
template <typename Chain, int R>
constexpr void FillRows(ChainLoops* loops) {
  if constexpr (R > 0) {
    loops->score_tiles[R - 1] = Score<Chain, R, kTilesAtOnce, false>;
    loops->score_tile[R - 1] = Score<Chain, R, 1, false>;
    FillWidths<Chain, R, 0>(loops);
    FillRows<Chain, R - 1>(loops);
  }
}

template <typename Chain>
constexpr ChainLoops MakeLoops() {
  ChainLoops loops = {};
  FillRows<Chain, kRowsMax>(&loops);
  return loops;
}
static constexpr ChainLoops kLoopsF32 = MakeLoops<ChainF32>();
static constexpr ChainLoops kLoopsF16 = MakeLoops<ChainF16>();
static constexpr ChainLoops kLoopsBF16 = MakeLoops<ChainBF16>();
static constexpr ChainLoops kLoopsI8 = MakeLoops<ChainI8>();
static constexpr ChainLoops kLoopsF8 = MakeLoops<ChainF8>();

#endif  // QUIRE_KERNELS_CPU_CHAIN_INL_H_
