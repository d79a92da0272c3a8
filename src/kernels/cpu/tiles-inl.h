// Tiles as attention's chains read them: in place, assembled by position, V out of the keys of a
// latent layout, rotated (RopeMode::kInline), widened to float32 (many rows share the work), or
// with some lanes of V set to zero. Included inside a path's namespace and target region.
#ifndef QUIRE_KERNELS_CPU_TILES_INL_H_
#define QUIRE_KERNELS_CPU_TILES_INL_H_

#include "kernels/cpu/latent-inl.h"
#include "kernels/cpu/rotary-inl.h"

// -------------------------------------------------------------------------------------------------
// places

// Where tiles that are read in place lie: the arithmetic of KVLayout's tiled layout in bytes,
// worked out once for all tiles of a call.
struct TilePlaces {
  std::byte* base;
  size_t page;
  size_t key_tile, key_head;
  size_t values, value_tile, value_head;
  size_t scales, scale_tile, scale_head;

  explicit TilePlaces(const KVPages& pages) : base(pages.base) {
    const KVLayout& layout = pages.layout;
    const auto heads = static_cast<size_t>(layout.num_kv_heads);
    page = pages.stride();
    key_head = layout.k_tile_elements() * layout.k_element_bytes();
    key_tile = heads * key_head;
    values = layout.v_offset();
    value_head = layout.v_tile_stored_elements() * layout.v_element_bytes();
    value_tile = heads * value_head;
    scales = layout.scale_offset();
    scale_head = static_cast<size_t>(layout.scale_parts()) * kTilePositions * sizeof(float);
    scale_tile = heads * scale_head;
  }
  // REQUIRES of all: tile.in_place.
  const std::byte* Keys(const SegmentTile& tile, int64_t head) const {
    return At(tile) + static_cast<size_t>(tile.tile) * key_tile +
           static_cast<size_t>(head) * key_head;
  }
  const std::byte* Values(const SegmentTile& tile, int64_t head) const {
    return At(tile) + values + static_cast<size_t>(tile.tile) * value_tile +
           static_cast<size_t>(head) * value_head;
  }
  const float* Scales(const SegmentTile& tile, int64_t head, int part) const {
    return reinterpret_cast<const float*>(At(tile) + scales +
                                          static_cast<size_t>(tile.tile) * scale_tile +
                                          static_cast<size_t>(head) * scale_head) +
           part * kTilePositions;
  }

 private:
  const std::byte* At(const SegmentTile& tile) const {
    return base + static_cast<size_t>(tile.pieces[0].page) * page;
  }
};

// -------------------------------------------------------------------------------------------------
// assembling

template <typename Element>
static void AssembleKeys(const KVPages& pages, const SegmentTile& tile, int head, Element* out) {
  const KVLayout& layout = pages.layout;
  const int pair = ChainPair(layout.dtype);
  const size_t bytes = layout.k_tile_elements() * sizeof(Element);
  if (tile.patched) {
    const std::byte* page = PageAt(pages, tile.pieces[0].page);
    __builtin_memcpy(out, page + layout.k_tile_offset(tile.tile, head) * sizeof(Element), bytes);
  } else {
    __builtin_memset(out, 0, bytes);
  }
  for (int i = tile.patched ? 1 : 0; i < tile.piece_count; ++i) {
    const TilePiece& piece = tile.pieces[i];
    const auto* page = reinterpret_cast<const Element*>(PageAt(pages, piece.page));
    for (int n = 0; n < piece.count; ++n) {
      const SlotElements key = KeyOfSlot(layout, piece.slot + n, head);
      Element* lane = out + (piece.lane + n) * pair;
      for (int d = 0; d < layout.k_dim(); d += pair) {
        for (int e = 0; e < pair; ++e) lane[d * kLanes + e] = page[key[d + e]];
      }
    }
  }
}

template <typename Element>
static void AssembleValues(const KVPages& pages, const SegmentTile& tile, int head, Element* out) {
  const KVLayout& layout = pages.layout;
  const int pair = ChainPair(layout.v_dtype());
  const int v_dim = layout.v_dim();
  const size_t bytes = layout.v_tile_elements() * sizeof(Element);
  if (tile.patched) {
    const std::byte* page = ValuesAt(pages, tile.pieces[0].page);
    const std::byte* stored = page + layout.v_tile_offset(tile.tile, head) * sizeof(Element);
    if (layout.latent) {
      LatentValueTile(layout.dtype, stored, v_dim, reinterpret_cast<std::byte*>(out));
    } else {
      __builtin_memcpy(out, stored, bytes);
    }
  } else {
    __builtin_memset(out, 0, bytes);
  }
  for (int i = tile.patched ? 1 : 0; i < tile.piece_count; ++i) {
    const TilePiece& piece = tile.pieces[i];
    const auto* page = reinterpret_cast<const Element*>(ValuesAt(pages, piece.page));
    for (int n = 0; n < piece.count; ++n) {
      const int lane = piece.lane + n;
      const SlotElements value = ValueOfSlot(layout, piece.slot + n, head);
      Element* row = out + (lane / pair) * v_dim * pair + lane % pair;
      for (int d = 0; d < v_dim; ++d) row[d * pair] = page[value[d]];
    }
  }
}

// The tile in the cache's own type and tile layout: in place, or made in `buffer`.
static const std::byte* StoredKeys(const TilePlaces& places, const KVPages& pages,
                                   const SegmentTile& tile, int head, std::byte* buffer) {
  if (tile.in_place) return places.Keys(tile, head);
  const KVLayout& layout = pages.layout;
  if (layout.dtype == DType::kF32) {
    AssembleKeys(pages, tile, head, reinterpret_cast<float*>(buffer));
  } else if (IsQuantised(layout.dtype)) {
    AssembleKeys(pages, tile, head, reinterpret_cast<uint8_t*>(buffer));
  } else {
    AssembleKeys(pages, tile, head, reinterpret_cast<uint16_t*>(buffer));
  }
  return buffer;
}

static const std::byte* StoredValues(const TilePlaces& places, const KVPages& pages,
                                     const SegmentTile& tile, int head, std::byte* buffer) {
  const KVLayout& layout = pages.layout;
  if (tile.in_place) {
    const std::byte* stored = places.Values(tile, head);
    if (!layout.latent) return stored;
    LatentValueTile(layout.dtype, stored, layout.v_dim(), buffer);
    return buffer;
  }
  if (layout.v_dtype() == DType::kF32) {
    AssembleValues(pages, tile, head, reinterpret_cast<float*>(buffer));
  } else if (IsQuantised(layout.v_dtype())) {
    AssembleValues(pages, tile, head, reinterpret_cast<uint8_t*>(buffer));
  } else {
    AssembleValues(pages, tile, head, reinterpret_cast<uint16_t*>(buffer));
  }
  return buffer;
}

// Scales of the tile's 16 positions: in place, or assembled into `buffer`, 0 where no token is.
static const float* StoredScales(const TilePlaces& places, const KVPages& pages,
                                 const SegmentTile& tile, int head, int part, float* buffer) {
  if (tile.in_place) return places.Scales(tile, head, part);
  for (int i = 0; i < kLanes; ++i) buffer[i] = 0.0F;
  for (int i = 0; i < tile.piece_count; ++i) {
    const TilePiece& piece = tile.pieces[i];
    for (int n = 0; n < piece.count; ++n) {
      buffer[piece.lane + n] = *ScaleOfSlot(pages, piece.page, piece.slot + n, head, part);
    }
  }
  return buffer;
}

// -------------------------------------------------------------------------------------------------
// widening

// 16 pairs of bfloat16 in memory order.
QUIRE_INLINE void SplitPairs(const uint16_t* p, VF* even, VF* odd) {
#if defined(QUIRE_SIMD_BF16)
  const __m512i u = _mm512_loadu_si512(p);
  *even = _mm512_castsi512_ps(_mm512_slli_epi32(u, 16));
  *odd = _mm512_castsi512_ps(_mm512_and_si512(u, _mm512_set1_epi32(static_cast<int>(0xffff0000U))));
#else
  const VPair pair = LoadPair(p);
  *even = pair.even;
  *odd = pair.odd;
#endif
}

// Rows 2i and 2i + 1 of `out` from row i of pairs; `columns` a multiple of 16.
static void WidenPairs(const uint16_t* pairs, int row_count, int columns, float* out) {
  for (int i = 0; i < row_count; i += 2, out += 2 * columns) {
    for (int c = 0; c < columns; c += kLanes, pairs += 2 * kLanes) {
      VF even;
      VF odd;
      SplitPairs(pairs, &even, &odd);
      Store(out + c, even);
      Store(out + columns + c, odd);
    }
  }
}

// The same from pairs of bytes.
static void WidenBytes(DType dtype, const uint8_t* pairs, int row_count, int columns, float* out) {
  for (int i = 0; i < row_count; i += 2, out += 2 * columns) {
    for (int c = 0; c < columns; c += kLanes, pairs += 2 * kLanes) {
      VF even;
      VF odd;
      if (dtype == DType::kI8) {
        SplitI8(pairs, &even, &odd);
      } else {
        SplitF8(pairs, &even, &odd);
      }
      Store(out + c, even);
      Store(out + columns + c, odd);
    }
  }
}

// A stored tile of row_count x columns elements as float32 [row][column]: K has k_dim rows of 16
// columns, V 16 rows of v_dim.
static void WidenTile(DType dtype, const std::byte* stored, int row_count, int columns,
                      float* out) {
  if (dtype == DType::kBF16) {
    WidenPairs(reinterpret_cast<const uint16_t*>(stored), row_count, columns, out);
    return;
  }
  if (IsQuantised(dtype)) {
    WidenBytes(dtype, reinterpret_cast<const uint8_t*>(stored), row_count, columns, out);
    return;
  }
  const int count = row_count * columns;
  if (dtype == DType::kF16) {
    const auto* half = reinterpret_cast<const uint16_t*>(stored);
    for (int i = 0; i < count; i += kLanes) Store(out + i, LoadF16(half + i));
    return;
  }
  __builtin_memcpy(out, stored, static_cast<size_t>(count) * sizeof(float));
}

// -------------------------------------------------------------------------------------------------
// rotating

// cos and sin of 16 positions with the positions in lanes: [rotary_dim / 2][16], zero from `count`
// on.
static void LoadAngles(const AngleTable& table, int64_t position, int count, float* cos,
                       float* sin) {
  const int half = static_cast<int>(table.pair_count);
  for (int lane = 0; lane < count; ++lane) {
    const RotaryAngles row = table.At(position + lane);
    for (int i = 0; i < half; ++i) cos[i * kLanes + lane] = row.cos[i];
    for (int i = 0; i < half; ++i) sin[i * kLanes + lane] = row.sin[i];
  }
  for (int lane = count; lane < kLanes; ++lane) {
    for (int i = 0; i < half; ++i) cos[i * kLanes + lane] = sin[i * kLanes + lane] = 0.0F;
  }
}

// Rotates a float32 K tile in place.
static void RotateTile(float* tile, const float* cos, const float* sin, int rotary_dim,
                       bool interleaved) {
  for (int i = 0; i < rotary_dim / 2; ++i) {
    float* first = tile + PairFirst(i, interleaved) * kLanes;
    float* second = tile + PairSecond(i, rotary_dim, interleaved) * kLanes;
    VF x = Load(first);
    VF y = Load(second);
    RotatePair(&x, &y, Load(cos + i * kLanes), Load(sin + i * kLanes));
    Store(first, x);
    Store(second, y);
  }
}

static void RoundTileToBF16(float* tile, int count) {
  for (int i = 0; i < count; i += kLanes) Store(tile + i, RoundToBF16(Load(tile + i)));
}

// A float32 tile of row_count x columns values that are bfloat16 already, in pairs of rows.
static void PackPairs(const float* tile, int row_count, int columns, uint32_t* out) {
  for (int row = 0; row < row_count; row += 2) {
    for (int column = 0; column < columns; ++column) {
      uint32_t even;
      uint32_t odd;
      __builtin_memcpy(&even, tile + row * columns + column, sizeof even);
      __builtin_memcpy(&odd, tile + (row + 1) * columns + column, sizeof odd);
      out[row / 2 * columns + column] = even >> 16 | (odd & 0xffff0000U);
    }
  }
}

// -------------------------------------------------------------------------------------------------
// hiding

// A copy of a V tile in chain layout with zeros in the lanes whose bit is not in `seen`.
template <typename Element>
static void HideLanes(const Element* tile, int v_dim, int pair, uint32_t seen, Element* out) {
  for (int lane = 0; lane < kLanes; ++lane) {
    const int first = (lane / pair) * v_dim * pair + lane % pair;
    const bool visible = (seen >> lane & 1) != 0;
    for (int d = 0; d < v_dim; ++d) {
      out[first + d * pair] = visible ? tile[first + d * pair] : Element{0};
    }
  }
}

#endif  // QUIRE_KERNELS_CPU_TILES_INL_H_
