// Groups of quantised weights in packed strips: where they lie, and their codes and scales as
// vectors. Included once per path, by linear-inl.h.
#include "kernels/cpu/quantised_bytes-inl.h"

// One group of weights.
struct WeightGroup {
  int64_t index;
  const std::byte* codes;
  const std::byte* scales;
  const uint16_t* supers;  // of the block of 256
};

QUIRE_INLINE const uint16_t* F16Scales(const WeightGroup& group) {
  return reinterpret_cast<const uint16_t*>(group.scales);
}

// Group `index` of a strip.
template <WeightFormat kFormat>
QUIRE_INLINE WeightGroup GroupAt(const std::byte* strip, int64_t index) {
  const std::byte* const run = strip + index / kSuperGroups * RunBytes(kFormat);
  const int64_t in_run = index % kSuperGroups;
  const std::byte* const pair = run + SuperScaleBytes(kFormat) + in_run / 2 * PairBytes(kFormat);
  const std::byte* const codes = pair + 2 * GroupScaleBytes(kFormat);
  const int64_t second = in_run % 2;
  return {index, codes + second * GroupCodeBytes(kFormat), pair + second * GroupScaleBytes(kFormat),
          reinterpret_cast<const uint16_t*>(run)};
}

// The words of a group's block: of blocks of 32 beside it, of those of 128 before both of a run.
template <WeightFormat kFormat>
QUIRE_INLINE VI WordsOf(const WeightGroup& group) {
  if constexpr (IsWide(kFormat)) {
    const int64_t block = group.index % kSuperGroups / (kSuperGroups / 2);
    return LoadWords(reinterpret_cast<const std::byte*>(group.supers) + block * 64);
  } else {
    return LoadWords(group.scales);
  }
}

// What is taken off the codes of a group whose outputs have offsets of their own, which are raised
// by 2^kBits.
template <WeightFormat kFormat, int kBits>
QUIRE_INLINE VI ZerosOf(const WeightGroup& group) {
  constexpr int kOffset = (kBits == 0 ? 0 : 1 << kBits) - kZeroRaised;
  const VI zeros = AndInts(WordsOf<kFormat>(group), static_cast<int32_t>(kZeroBits));
  return AddInts(zeros, SetInts(kOffset));
}
// The fifth bits of a group's codes, bytes; of 4-bit codes, which have none, not used.
template <WeightFormat kFormat>
QUIRE_INLINE VB FifthBits(const WeightGroup& group) {
  constexpr bool kHasFifth = LayoutOf(kFormat).codes == CodeBits::kFive;
  return LoadBytes(group.codes + (kHasFifth ? 256 : 0));
}

// Quad kQuad of the lower and of the upper 16 inputs of 4-bit and 5-bit codes: the codes, or what
// they stand for.
struct NibbleQuad {
  VB low;
  VB high;
};
template <WeightFormat kFormat, int kQuad>
QUIRE_INLINE NibbleQuad NibblesOf(const WeightGroup& group, VB fifth) {
  constexpr WeightLayout kLayout = LayoutOf(kFormat);
  const VB both = LoadBytes(group.codes + kQuad * 64);
  VB low = AndBytes(both, 15);
  VB high = AndBytes(ShiftRight<4>(both), 15);
  if constexpr (kLayout.codes == CodeBits::kFive) {
    low = OrBytes(low, AndBytes(ShiftLeft<4 - kQuad>(fifth), 16));
    high = OrBytes(high, AndBytes(ShiftRight<kQuad>(fifth), 16));
  }
  if constexpr (kLayout.values != nullptr) {
    return {LookUp(kLayout.values, low), LookUp(kLayout.values, high)};
  }
  return {low, high};
}

template <WeightFormat kFormat>
QUIRE_INLINE VF ScaleOf(const WeightGroup& group) {
  constexpr BlockScales kScales = LayoutOf(kFormat).scales;
  if constexpr (kScales == BlockScales::kOwn || kScales == BlockScales::kOwnWithSummand) {
    return LoadF16(F16Scales(group));
  } else if constexpr (kScales == BlockScales::kPowerOfTwo) {
    return LoadBits16AsHigh(F16Scales(group));
  } else if constexpr (kScales == BlockScales::kWord) {
    return BitsAsF32(WordsOf<kFormat>(group));
  } else if constexpr (kScales == BlockScales::kWordWithZero) {
    return BitsAsF32(AndInts(WordsOf<kFormat>(group), static_cast<int32_t>(~kZeroBits)));
  } else if constexpr (kScales == BlockScales::kPairs) {
    return Mul(LoadF16(group.supers), SumsToF32(LoadUint8s(group.scales)));
  } else {
    return Mul(LoadF16(group.supers), SumsToF32(LoadInt8s(group.scales)));
  }
}

template <WeightFormat kFormat>
QUIRE_INLINE VF SummandOf(const WeightGroup& group) {
  if constexpr (LayoutOf(kFormat).scales == BlockScales::kOwnWithSummand) {
    return LoadF16(F16Scales(group) + kStripOutputs);
  } else {
    return Mul(Sub(Zero(), LoadF16(group.supers + kStripOutputs)),
               SumsToF32(LoadUint8s(group.scales + kStripOutputs)));
  }
}

// Bits that begin at kFrom moved so that they begin at kTo; the caller masks all others.
template <int kFrom, int kTo>
QUIRE_INLINE VB MoveBits(VB bytes) {
  if constexpr (kFrom <= kTo) return ShiftLeft<kTo - kFrom>(bytes);
  if constexpr (kFrom > kTo) return ShiftRight<kFrom - kTo>(bytes);
}

// Groups that have a scale for each half.
template <WeightFormat kFormat>
struct HalfGroups {
  static constexpr WeightLayout kLayout = LayoutOf(kFormat);
  static constexpr bool kHasNibbles = kLayout.codes == CodeBits::kSix;
  static constexpr bool kHasLeasts = kLayout.scales == BlockScales::kHalfPairs;

  // Bits of a half's codes that stand two by two, and the third bits of the group's.
  template <int kHalf>
  QUIRE_INLINE VB PairBits(const std::byte* codes) {
    return LoadBytes(codes + (kHasNibbles ? 256 : 0) + kHalf * 64);
  }
  QUIRE_INLINE VB SingleBits(const std::byte* codes) {
    return LoadBytes(codes + (kLayout.codes == CodeBits::kThree ? 128 : 0));
  }

  // Quad kQuad of a half, as numbers from 0 on.
  template <int kHalf, int kQuad>
  QUIRE_INLINE VB Codes(const std::byte* codes, VB pairs, VB singles) {
    if constexpr (kHasNibbles) {
      const VB both = LoadBytes(codes + kQuad * 64);
      const VB nibbles = AndBytes(kHalf == 0 ? both : ShiftRight<4>(both), 15);
      return OrBytes(nibbles, AndBytes(MoveBits<2 * kQuad, 4>(pairs), 0x30));
    } else if constexpr (kLayout.codes == CodeBits::kThree) {
      return OrBytes(AndBytes(MoveBits<2 * kQuad, 0>(pairs), 3),
                     AndBytes(MoveBits<4 * kHalf + kQuad, 2>(singles), 4));
    } else {
      return AndBytes(MoveBits<2 * kQuad, 0>(pairs), 3);
    }
  }

  template <int kHalf>
  QUIRE_INLINE VI ScaleOfHalf(const WeightGroup& group) {
    const std::byte* const scales = group.scales + kHalf * kStripOutputs;
    if constexpr (kHasLeasts) return AndInts(LoadUint8s(scales), 15);
    return LoadInt8s(scales);
  }
};

// Asks for what comes some steps behind `at`.
QUIRE_INLINE void FetchAhead(const std::byte* at, int64_t bytes, const StreamPrefetch& prefetch) {
  const char* const ahead = reinterpret_cast<const char*>(at) + prefetch.bytes_ahead;
  if (prefetch.into_l1) {
    for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(ahead + line, 0, 3);
  } else {
    for (int64_t line = 0; line < bytes; line += 64) PrefetchL2(ahead + line);
  }
}

// Of::Function of each format: kOf<format>.
template <class Of, class At>
struct FormatTable;
template <class Of, size_t... kAt>
struct FormatTable<Of, std::index_sequence<kAt...>> {
  static constexpr typename Of::Function kOf[] = {Of::template kOf<kWeightFormats[kAt]>...};
};
template <class Of>
QUIRE_INLINE typename Of::Function OfFormat(WeightFormat format) {
  using Formats = std::make_index_sequence<sizeof(kWeightFormats) / sizeof(WeightFormat)>;
  return FormatTable<Of, Formats>::kOf[static_cast<int>(format)];
}
