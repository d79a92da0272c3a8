// Linear layers whose rows and weights are bfloat16, in the tile unit's order of sums
// (tile_unit-inl.h): inputs ascending in chunks of 32, the last one filled up with zeros, and one
// accumulator over all of them. Here a few rows, by fma; more in linear_tiles-inl.h. Included
// inside a path's namespace and target region, by linear-inl.h.
#ifndef QUIRE_KERNELS_CPU_LINEAR_CHUNKS_INL_H_
#define QUIRE_KERNELS_CPU_LINEAR_CHUNKS_INL_H_

#include "kernels/cpu/tile_unit-inl.h"

// Up to this number of rows one pass over the weights by fma keeps up with memory, and beyond it
// tiles are faster.
constexpr int kFewTileRows = 4;

// RunTile for pairs of bfloat16 in the tile unit's order; sums go on from one block of inputs to
// the next. REQUIRES: the rows have zeros up to a whole pair.
template <int kRows>
static void RunFewRows(const Tile& tile) {
  constexpr int kVectors = kOutputBlock / kLanes;
  const ScopedFlush flush;
  const int64_t pairs = (tile.inputs + 1) / 2;
  const auto* w = static_cast<const uint16_t*>(tile.w);
  const float* x = tile.x;
  const char* ahead = tile.ahead;
  VF sum[kRows][kVectors];
  QUIRE_UNROLL
  for (int r = 0; r < kRows; ++r) {
    QUIRE_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      const float* const at = tile.sums + r * tile.sum_stride + v * kLanes;
      sum[r][v] = tile.first ? Zero() : Load(at);
    }
  }
  for (int64_t begin = 0; begin < pairs; begin += kTilePairs) {
    VF even[kRows][kVectors];
    VF odd[kRows][kVectors];
    QUIRE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      QUIRE_UNROLL
      for (int v = 0; v < kVectors; ++v) even[r][v] = odd[r][v] = Zero();
    }
    const int64_t left = pairs - begin;
    const int64_t steps = left < kTilePairs ? left : kTilePairs;
    for (int64_t step = 0; step < steps; ++step) {
      PrefetchL2(ahead);
      PrefetchL2(ahead + 64);
      ahead += tile.ahead_step;
      VPair weights[kVectors];
      QUIRE_UNROLL
      for (int v = 0; v < kVectors; ++v) weights[v] = LoadPair(w + 2 * v * kLanes);
      QUIRE_UNROLL
      for (int r = 0; r < kRows; ++r) {
        QUIRE_UNROLL
        for (int v = 0; v < kVectors; ++v) {
          even[r][v] = Fma(weights[v].even, Set1(x[r * kRowFloats]), even[r][v]);
          odd[r][v] = Fma(weights[v].odd, Set1(x[r * kRowFloats + 1]), odd[r][v]);
        }
      }
      w += 2 * kOutputBlock;
      x += 2;
    }
    QUIRE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      QUIRE_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        // Zero: a tile's missing pairs turn -0 into +0.
        const VF both = steps < kTilePairs ? Add(Add(even[r][v], Zero()), Add(odd[r][v], Zero()))
                                           : Add(even[r][v], odd[r][v]);
        sum[r][v] = Add(sum[r][v], both);
      }
    }
  }
  QUIRE_UNROLL
  for (int r = 0; r < kRows; ++r) {
    QUIRE_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      Store(tile.sums + r * tile.sum_stride + v * kLanes, sum[r][v]);
    }
  }
}

static constexpr TileFunction kFewRowFunctions[kFewTileRows] = {RunFewRows<1>, RunFewRows<2>,
                                                                RunFewRows<3>, RunFewRows<4>};

#endif  // QUIRE_KERNELS_CPU_LINEAR_CHUNKS_INL_H_
