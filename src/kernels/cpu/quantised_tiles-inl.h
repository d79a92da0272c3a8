// Linear layers with quantised weights by the tile unit, from 16 rows on. Packed strips are those
// of fewer rows. Codes of 8 bits lie in them as a tile of columns; others are made into signed
// bytes, their offset taken off, some groups at a time, and all row tiles of a pass meet them. A
// row's codes are a tile of rows as they lie. A product is one group (one half of it, where halves
// have scales): its sums are those that dot products give, and the chains take the same steps in
// the same order. Included inside a path's namespace and target region, by quantised_linear-inl.h.

// Groups of weights that a pass has at a time, and its row tiles: the groups' bytes (8 KiB) and the
// chains (8 KiB) stay in L1.
constexpr int64_t kStretchGroups = 16;
constexpr int64_t kPassTiles = 8;
// A rest of this number of rows is a tile, too, which begins in the tile before: per group a tile
// takes 132 instructions, dot products of 4 rows 106, of one more row 40 (GCC 12, Q4_0;
// docs/notes/speed.md).
constexpr int64_t kRestRows = 5;

constexpr int64_t kGroupTileBytes = kQuantGroup * kStripOutputs;
constexpr int64_t kSumTileBytes = kTileRows * kTileRowBytes;

template <class W>
struct TileParts {
  static constexpr WeightLayout kLayout = LayoutOf(W::kFormat);
  static constexpr bool kHalves = HasHalves(W::kFormat);
  static constexpr int kCount = kHalves ? 2 : 1;  // products of a group
  static constexpr int kInputs = static_cast<int>(kQuantGroup) / kCount;
  static constexpr int kStepGroups = kSumTiles / kCount;  // whose sums are in tiles together
  static constexpr bool kInPlace = kLayout.codes == CodeBits::kEight;
};

// Groups [begin, end) of a strip.
struct Stretch {
  const std::byte* strip;
  const std::byte* unpacked;  // tiles of the groups' codes, unless they are used in place
  int64_t begin, end;
};

// --------------------------------------------------------------------------------------- unpacking

// Codes as signed bytes.
template <WeightFormat kFormat>
QUIRE_INLINE void StoreSigned(VB codes, std::byte* to) {
  constexpr int kBits = LayoutOf(kFormat).offset_bits;
  constexpr int kOffset = kBits == 0 ? 0 : 1 << kBits;
  _mm512_storeu_si512(to, _mm512_sub_epi8(codes, _mm512_set1_epi32(kOffset * 0x01010101)));
}

template <WeightFormat kFormat, int kQuad>
QUIRE_INLINE void UnpackNibbles(const WeightGroup& group, VB fifth, std::byte* to) {
  const NibbleQuad quad = NibblesOf<kFormat, kQuad>(group, fifth);
  StoreSigned<kFormat>(quad.low, to + kQuad * kTileRowBytes);
  StoreSigned<kFormat>(quad.high, to + (4 + kQuad) * kTileRowBytes);
}

template <class W, int kHalf>
QUIRE_INLINE void UnpackHalf(const std::byte* codes, std::byte* to) {
  const VB pairs = W::template PairBits<kHalf>(codes);
  const VB singles = W::SingleBits(codes);
  StoreSigned<W::kFormat>(W::template Codes<kHalf, 0>(codes, pairs, singles), to);
  StoreSigned<W::kFormat>(W::template Codes<kHalf, 1>(codes, pairs, singles), to + kTileRowBytes);
  StoreSigned<W::kFormat>(W::template Codes<kHalf, 2>(codes, pairs, singles),
                          to + 2 * kTileRowBytes);
  StoreSigned<W::kFormat>(W::template Codes<kHalf, 3>(codes, pairs, singles),
                          to + 3 * kTileRowBytes);
}

// The tiles of a stretch. REQUIRES: the codes are not of 8 bits.
template <class W>
static void UnpackStretch(const Stretch& stretch, std::byte* to) {
  constexpr WeightFormat kFormat = W::kFormat;
  for (int64_t index = stretch.begin; index < stretch.end; ++index, to += kGroupTileBytes) {
    const WeightGroup group = GroupAt<kFormat>(stretch.strip, index);
    if constexpr (TileParts<W>::kHalves) {
      UnpackHalf<W, 0>(group.codes, to);
      UnpackHalf<W, 1>(group.codes, to + kGroupTileBytes / 2);
    } else {
      const VB fifth = FifthBits<kFormat>(group);
      UnpackNibbles<kFormat, 0>(group, fifth, to);
      UnpackNibbles<kFormat, 1>(group, fifth, to);
      UnpackNibbles<kFormat, 2>(group, fifth, to);
      UnpackNibbles<kFormat, 3>(group, fifth, to);
    }
  }
}

// ---------------------------------------------------------------------------------------- one tile

template <class W>
QUIRE_INLINE const std::byte* TileOfGroup(const Stretch& stretch, int64_t index) {
  if constexpr (TileParts<W>::kInPlace) return GroupAt<W::kFormat>(stretch.strip, index).codes;
  return stretch.unpacked + (index - stretch.begin) * kGroupTileBytes;
}

// Products kPart and on of the groups from `index` on, each into the tile of its number.
template <class W, int kCount, int kPart = 0>
QUIRE_INLINE void SumParts(TileUnit& unit, const QuantisedTile& tile, const Stretch& stretch,
                           int64_t index) {
  if constexpr (kPart < kCount) {
    using Parts = TileParts<W>;
    constexpr int kRowsAt = kSumTiles + kPart % kRowTiles;
    constexpr int kColumnsAt = kSumTiles + kRowTiles + kPart % 2;
    constexpr int kFirst = kPart % Parts::kCount * Parts::kInputs;
    const int64_t group = index + kPart / Parts::kCount;
    unit.Clear<kPart>();
    unit.Read<kRowsAt>(tile.codes + group * kQuantGroup + kFirst, tile.code_stride);
    unit.Read<kColumnsAt>(TileOfGroup<W>(stretch, group) + kFirst * kStripOutputs, kTileRowBytes);
    unit.DotBytes<kPart, kRowsAt, kColumnsAt>();
    SumParts<W, kCount, kPart + 1>(unit, tile, stretch, index);
  }
}

template <int kCount, int kPart = 0>
QUIRE_INLINE void WriteParts(TileUnit& unit, std::byte* sums) {
  if constexpr (kPart < kCount) {
    unit.Write<kPart>(sums + kPart * kSumTileBytes, kTileRowBytes);
    WriteParts<kCount, kPart + 1>(unit, sums);
  }
}

// The steps of the chains that a group makes, out of the sums of its products.
template <class W>
QUIRE_INLINE void FoldGroup(const QuantisedTile& tile, const WeightGroup& group,
                            const std::byte* sums, Chains<kTileRows>* chains) {
  constexpr WeightFormat kFormat = W::kFormat;
  if constexpr (TileParts<W>::kHalves) {
    const VI first = W::template ScaleOfHalf<0>(group);
    const VI second = W::template ScaleOfHalf<1>(group);
    const VF scale = LoadF16(group.supers);
    QUIRE_UNROLL
    for (int r = 0; r < kTileRows; ++r) {
      const std::byte* const at = sums + r * kTileRowBytes;
      const VI sum =
          AddInts(MulInts(LoadWords(at), first), MulInts(LoadWords(at + kSumTileBytes), second));
      chains->sum[r] = ScaleStep(RowGroupAt(tile, group, r), scale, sum, chains->sum[r]);
    }
    if constexpr (W::kHasLeasts) W::template AddLeasts<kTileRows>(tile, group, chains);
  } else {
    constexpr bool kHasZeros = LayoutOf(kFormat).scales == BlockScales::kWordWithZero;
    const VF scale = ScaleOf<kFormat>(group);
    QUIRE_UNROLL
    for (int r = 0; r < kTileRows; ++r) {
      const RowGroup& row = RowGroupAt(tile, group, r);
      VI sum = LoadWords(sums + r * kTileRowBytes);
      if constexpr (kHasZeros) {
        sum = AddInts(sum, MulInts(SetInts(row.minus_sum), ZerosOf<kFormat, 0>(group)));
      }
      chains->sum[r] = ScaleStep(row, scale, sum, chains->sum[r]);
    }
    if constexpr (HasSummand(kFormat)) {
      AddSummand(tile, group, SummandOf<kFormat>(group), chains);
    }
  }
}

// The sums of kGroups groups from `index` on, [part][row][output].
template <class W, int kGroups>
QUIRE_INLINE void SumGroups(TileUnit& unit, const QuantisedTile& tile, const Stretch& stretch,
                            int64_t index, std::byte* sums) {
  constexpr int kParts = kGroups * TileParts<W>::kCount;
  SumParts<W, kParts>(unit, tile, stretch, index);
  WriteParts<kParts>(unit, sums);
}

template <class W, int kGroups>
QUIRE_INLINE void FoldGroups(const QuantisedTile& tile, const Stretch& stretch, int64_t index,
                             const std::byte* sums, Chains<kTileRows>* chains) {
  for (int g = 0; g < kGroups; ++g, sums += TileParts<W>::kCount * kSumTileBytes) {
    FoldGroup<W>(tile, GroupAt<W::kFormat>(stretch.strip, index + g), sums, chains);
  }
}

// 16 rows against a stretch of a strip; their chains go on from tile.sums. The products of a step
// are on their way before the sums of the step before are folded, which takes as long.
template <class W>
static void RunRowTile(TileUnit& unit, const QuantisedTile& tile, const Stretch& stretch) {
  constexpr int kStep = TileParts<W>::kStepGroups;
  alignas(64) std::byte sums[2][kSumTiles * kSumTileBytes];
  Chains<kTileRows> chains;
  QUIRE_UNROLL
  for (int r = 0; r < kTileRows; ++r) chains.sum[r] = Load(tile.sums + r * kStripOutputs);
  int64_t index = stretch.begin;
  const int64_t steps_end = index + (stretch.end - index) / kStep * kStep;
  if (index < steps_end) SumGroups<W, kStep>(unit, tile, stretch, index, sums[0]);
  for (int now = 0; index < steps_end; index += kStep, now = 1 - now) {
    if (tile.streams) {
      FetchAhead(GroupAt<W::kFormat>(stretch.strip, index).scales,
                 kStep / 2 * PairBytes(W::kFormat), tile.prefetch);
    }
    if (index + kStep < steps_end) {
      SumGroups<W, kStep>(unit, tile, stretch, index + kStep, sums[1 - now]);
    }
    FoldGroups<W, kStep>(tile, stretch, index, sums[now], &chains);
  }
  for (; index < stretch.end; ++index) {
    SumGroups<W, 1>(unit, tile, stretch, index, sums[0]);
    FoldGroups<W, 1>(tile, stretch, index, sums[0], &chains);
  }
  QUIRE_UNROLL
  for (int r = 0; r < kTileRows; ++r) Store(tile.sums + r * kStripOutputs, chains.sum[r]);
}

// ------------------------------------------------------------------------------ the work of a task

// The first row of a tile: the last one ends with the last row.
QUIRE_INLINE int64_t RowTileBegin(const QuantisedWork& work, int64_t tile) {
  const int64_t first = work.begin_row + tile * kTileRows;
  const int64_t last = work.end_row - kTileRows;
  return first < last ? first : last;
}

// Row tiles [first, first + count) of a strip: their chains, from zero, into `sums`.
template <class W>
static void RunPass(TileUnit& unit, const QuantisedWork& work, int64_t strip, int64_t first,
                    int64_t count, float* sums) {
  const QuantisedRows& rows = work.plan->rows;
  const auto* const data =
      static_cast<const std::byte*>(work.part->data) + strip * StripBytes(W::kFormat, work.part->k);
  alignas(64) std::byte unpacked[kStretchGroups * kGroupTileBytes];
  QuantisedTile tile{};
  tile.code_stride = rows.code_stride;
  tile.group_count = rows.group_count;
  tile.prefetch = WeightPrefetchOfCpu(TileParts<W>::kInPlace, false);
  __builtin_memset(sums, 0, static_cast<size_t>(count * kSumTileBytes));
  for (int64_t begin = 0; begin < rows.group_count; begin += kStretchGroups) {
    const int64_t left = rows.group_count - begin;
    const int64_t end = begin + (left < kStretchGroups ? left : kStretchGroups);
    const Stretch stretch = {data, unpacked, begin, end};
    if constexpr (!TileParts<W>::kInPlace) UnpackStretch<W>(stretch, unpacked);
    for (int64_t t = 0; t < count; ++t) {
      const int64_t row = RowTileBegin(work, first + t);
      tile.codes = rows.codes + row * rows.code_stride;
      tile.groups = rows.groups + row * rows.group_count;
      tile.sums = sums + t * kTileRows * kStripOutputs;
      tile.streams = first == 0 && t == 0;
      RunRowTile<W>(unit, tile, stretch);
    }
  }
}

// REQUIRES: 16 rows or more.
template <class W>
static void RunStripsByTiles(const QuantisedWork& work) {
  const int64_t rows = work.end_row - work.begin_row;
  const int64_t tiles = rows / kTileRows + (rows % kTileRows >= kRestRows ? 1 : 0);
  alignas(64) float sums[kPassTiles * kTileRows * kStripOutputs];
  TileUnit unit({kTileRows, TileParts<W>::kInputs / 4});
  for (int64_t strip = work.begin_strip; strip < work.end_strip; ++strip) {
    int64_t next = work.begin_row;
    for (int64_t first = 0; first < tiles; first += kPassTiles) {
      const int64_t count = tiles - first < kPassTiles ? tiles - first : kPassTiles;
      RunPass<W>(unit, work, strip, first, count, sums);
      for (int64_t t = 0; t < count; ++t) {
        const int64_t row = RowTileBegin(work, first + t);
        for (int64_t r = next - row; r < kTileRows; ++r) {
          FinishStrip(work, row + r, strip, sums + (t * kTileRows + r) * kStripOutputs);
        }
        next = row + kTileRows;
      }
    }
    RunStrip<W>(work, next, strip);
  }
}
