// Tiles as attention's chains read them: in place, assembled by position, rotated
// (RopeMode::kInline), widened to float32 (many rows share the work), or with some lanes of V set
// to zero. Included after rotary-inl.h, inside a path's namespace and target region.
#ifndef QUIRE_KERNELS_CPU_TILES_INL_H_
#define QUIRE_KERNELS_CPU_TILES_INL_H_

// ----------------------------------------------------------------------------------------------------
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
      const KeyElements key = KeyOfSlot(layout, piece.slot + n, head);
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
  const int pair = ChainPair(layout.dtype);
  const int v_dim = layout.v_dim();
  const size_t bytes = layout.v_tile_elements() * sizeof(Element);
  if (tile.patched) {
    const std::byte* page = PageAt(pages, tile.pieces[0].page);
    __builtin_memcpy(out, page + layout.v_tile_offset(tile.tile, head) * sizeof(Element), bytes);
  } else {
    __builtin_memset(out, 0, bytes);
  }
  for (int i = tile.patched ? 1 : 0; i < tile.piece_count; ++i) {
    const TilePiece& piece = tile.pieces[i];
    const auto* page = reinterpret_cast<const Element*>(PageAt(pages, piece.page));
    for (int n = 0; n < piece.count; ++n) {
      const int lane = piece.lane + n;
      const ValueElements value = ValueOfSlot(layout, piece.slot + n, head);
      Element* row = out + (lane / pair) * v_dim * pair + lane % pair;
      for (int d = 0; d < v_dim; ++d) row[d * pair] = page[value[d]];
    }
  }
}

// The tile in the cache's own type and tile layout: in place, or assembled into `buffer`.
static const std::byte* StoredKeys(const KVPages& pages, const SegmentTile& tile, int head,
                                   std::byte* buffer) {
  const KVLayout& layout = pages.layout;
  const bool wide = layout.dtype == DType::kF32;
  if (tile.in_place) {
    return PageAt(pages, tile.pieces[0].page) +
           layout.k_tile_offset(tile.tile, head) * (wide ? sizeof(float) : sizeof(uint16_t));
  }
  if (wide) {
    AssembleKeys(pages, tile, head, reinterpret_cast<float*>(buffer));
  } else {
    AssembleKeys(pages, tile, head, reinterpret_cast<uint16_t*>(buffer));
  }
  return buffer;
}

static const std::byte* StoredValues(const KVPages& pages, const SegmentTile& tile, int head,
                                     std::byte* buffer) {
  const KVLayout& layout = pages.layout;
  const bool wide = layout.dtype == DType::kF32;
  if (tile.in_place) {
    return PageAt(pages, tile.pieces[0].page) +
           layout.v_tile_offset(tile.tile, head) * (wide ? sizeof(float) : sizeof(uint16_t));
  }
  if (wide) {
    AssembleValues(pages, tile, head, reinterpret_cast<float*>(buffer));
  } else {
    AssembleValues(pages, tile, head, reinterpret_cast<uint16_t*>(buffer));
  }
  return buffer;
}

// ----------------------------------------------------------------------------------------------------
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

// A stored tile of row_count x columns elements as float32 [row][column]: K has k_dim rows of 16
// columns, V 16 rows of v_dim.
static void WidenTile(DType dtype, const std::byte* stored, int row_count, int columns,
                      float* out) {
  if (dtype == DType::kBF16) {
    WidenPairs(reinterpret_cast<const uint16_t*>(stored), row_count, columns, out);
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

// ----------------------------------------------------------------------------------------------------
// rotating

// cos and sin of 16 positions with the positions in lanes: [rotary_dim / 2][16], zero from `count`
// on.
static void LoadAngles(const float* table, int64_t position, int count, int half, float* out) {
  for (int lane = 0; lane < kLanes; ++lane) {
    const float* row = table + (position + lane) * half;
    for (int i = 0; i < half; ++i) out[i * kLanes + lane] = lane < count ? row[i] : 0.0F;
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

// A float32 K tile whose values are bfloat16 already, in the cache's pair layout.
static void PackKeyPairs(const float* tile, int k_dim, uint32_t* out) {
  for (int d = 0; d < k_dim; d += 2) {
    for (int lane = 0; lane < kLanes; ++lane) {
      uint32_t even;
      uint32_t odd;
      __builtin_memcpy(&even, tile + d * kLanes + lane, sizeof even);
      __builtin_memcpy(&odd, tile + (d + 1) * kLanes + lane, sizeof odd);
      out[d / 2 * kLanes + lane] = even >> 16 | (odd & 0xffff0000U);
    }
  }
}

// ----------------------------------------------------------------------------------------------------
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
