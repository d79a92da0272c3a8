// Quantised weights for rows that stay numbers: groups become the numbers that they stand for,
// rounded once to the type in which the call multiplies, in a panel (linear_panel-inl.h). Included
// by linear-inl.h.

// What makes numbers of a group's codes, or of those of a half of it: (code - zero) * scale +
// summand.
struct CodeNumbers {
  VI minus_zero;
  VF scale;
  VF summand;
};

// kRounded: to bfloat16, else they are float32.
template <class Panel, bool kRounded, WeightFormat kFormat>
struct BlockNumbers {
  using Element = typename Panel::Element;
  static constexpr WeightLayout kLayout = LayoutOf(kFormat);
  static constexpr bool kHasZero =
      kLayout.offset_bits != 0 || kLayout.scales == BlockScales::kWordWithZero;
  static constexpr bool kHasSummand = HasSummand(kFormat);
  // Scales of float16 times integers.
  static constexpr bool kAreNormal =
      !HasWords(kFormat) && kLayout.scales != BlockScales::kPowerOfTwo;

  // `code`: the zero taken off.
  QUIRE_INLINE VF Scaled(VF code, const CodeNumbers& numbers) {
    const VF number = Mul(code, numbers.scale);
    return kHasSummand ? Add(number, numbers.summand) : number;
  }

  template <int kInput>
  QUIRE_INLINE VF Number(VB quad, const CodeNumbers& numbers) {
    VI code = CodesOfInput<kInput>(quad);
    if constexpr (kHasZero) code = AddInts(code, numbers.minus_zero);
    return Scaled(SumsToF32(code), numbers);
  }

  QUIRE_INLINE void Put(Element* panel, int64_t pair, WidePair numbers) {
    if constexpr (kRounded)
      return Panel::template StoreRounded<kAreNormal>(panel, pair, 0, numbers);
    Panel::StorePair(panel, pair, 0, numbers);
  }

  // Four inputs of 16 outputs.
  QUIRE_INLINE void StoreQuad(VB quad, const CodeNumbers& numbers, Element* panel, int64_t input) {
    Put(panel, input / 2, {Number<0>(quad, numbers), Number<1>(quad, numbers)});
    Put(panel, input / 2 + 1, {Number<2>(quad, numbers), Number<3>(quad, numbers)});
  }

  QUIRE_INLINE CodeNumbers NumbersOf(const WeightGroup& group) {
    CodeNumbers numbers{SetInts(-(1 << kLayout.offset_bits)), ScaleOf<kFormat>(group), Zero()};
    if constexpr (kLayout.scales == BlockScales::kWordWithZero) {
      numbers.minus_zero = MulInts(ZerosOf<kFormat, 0>(group), SetInts(-1));
    }
    if constexpr (kHasSummand) numbers.summand = SummandOf<kFormat>(group);
    return numbers;
  }

#if defined(QUIRE_SIMD_AVX512)
  // What 4-bit codes stand for, by a table of numbers whose index takes the lower four bits.
  struct Table {
    float numbers[16];
  };
  static constexpr Table kTable = [] {
    constexpr int kOffset = kLayout.offset_bits == 0 ? 0 : 1 << kLayout.offset_bits;
    Table table{};
    for (int code = 0; code < 16; ++code) {
      const int number = kLayout.values == nullptr ? code - kOffset : kLayout.values[code];
      table.numbers[code] = static_cast<float>(number);
    }
    return table;
  }();
  template <int kShift>
  QUIRE_INLINE VF NibbleNumber(VB both, VF table, const CodeNumbers& numbers) {
    VF code = _mm512_permutexvar_ps(ShiftRight<kShift>(both), table);
    if constexpr (kLayout.scales == BlockScales::kWordWithZero) {
      code = Add(code, SumsToF32(numbers.minus_zero));
    }
    return Scaled(code, numbers);
  }
  template <int kShift>
  QUIRE_INLINE void StoreTabled(VB both, VF table, const CodeNumbers& numbers, Element* panel,
                                int64_t input) {
    Put(panel, input / 2,
        {NibbleNumber<kShift>(both, table, numbers),
         NibbleNumber<kShift + 8>(both, table, numbers)});
    Put(panel, input / 2 + 1,
        {NibbleNumber<kShift + 16>(both, table, numbers),
         NibbleNumber<kShift + 24>(both, table, numbers)});
  }
  QUIRE_INLINE void StoreTabledGroup(const WeightGroup& group, const CodeNumbers& numbers,
                                     Element* panel) {
    const VF table = Load(kTable.numbers);
    QUIRE_UNROLL
    for (int64_t quad = 0; quad < 4; ++quad) {
      const VB both = LoadBytes(group.codes + quad * 64);
      StoreTabled<0>(both, table, numbers, panel, 4 * quad);
      StoreTabled<4>(both, table, numbers, panel, 16 + 4 * quad);
    }
  }
#endif

  template <int kQuad>
  QUIRE_INLINE void StoreNibbles(const WeightGroup& group, VB fifth, const CodeNumbers& numbers,
                                 Element* panel) {
    const NibbleQuad quad = NibblesOf<kFormat, kQuad>(group, fifth);
    StoreQuad(quad.low, numbers, panel, 4 * kQuad);
    StoreQuad(quad.high, numbers, panel, 16 + 4 * kQuad);
  }

  template <int kHalf>
  QUIRE_INLINE CodeNumbers NumbersOfHalf(const WeightGroup& group) {
    using Groups = HalfGroups<kFormat>;
    const VF scale = SumsToF32(Groups::template ScaleOfHalf<kHalf>(group));
    CodeNumbers numbers{SetInts(-(1 << kLayout.offset_bits)), Mul(LoadF16(group.supers), scale),
                        Zero()};
    if constexpr (Groups::kHasLeasts) {
      const VI least = ShiftIntsRight<4>(LoadUint8s(group.scales + kHalf * kStripOutputs));
      const VF minus_m = Sub(Zero(), LoadF16(group.supers + kStripOutputs));
      numbers.summand = Mul(minus_m, SumsToF32(least));
    }
    return numbers;
  }

  template <int kHalf>
  QUIRE_INLINE void StoreHalf(const WeightGroup& group, Element* panel) {
    using Groups = HalfGroups<kFormat>;
    const CodeNumbers numbers = NumbersOfHalf<kHalf>(group);
    const VB pairs = Groups::template PairBits<kHalf>(group.codes);
    const VB singles = Groups::SingleBits(group.codes);
    constexpr int64_t kFirst = 16 * kHalf;
    StoreQuad(Groups::template Codes<kHalf, 0>(group.codes, pairs, singles), numbers, panel,
              kFirst);
    StoreQuad(Groups::template Codes<kHalf, 1>(group.codes, pairs, singles), numbers, panel,
              kFirst + 4);
    StoreQuad(Groups::template Codes<kHalf, 2>(group.codes, pairs, singles), numbers, panel,
              kFirst + 8);
    StoreQuad(Groups::template Codes<kHalf, 3>(group.codes, pairs, singles), numbers, panel,
              kFirst + 12);
  }

  // A group's 32 inputs of 16 outputs, at the first of both in the panel.
  QUIRE_INLINE void StoreGroup(const WeightGroup& group, Element* panel) {
    if constexpr (HasHalves(kFormat)) {
      StoreHalf<0>(group, panel);
      StoreHalf<1>(group, panel);
    } else {
      const CodeNumbers numbers = NumbersOf(group);
      if constexpr (kLayout.codes == CodeBits::kEight) {
        QUIRE_UNROLL
        for (int64_t quad = 0; quad < 8; ++quad) {
          StoreQuad(LoadBytes(group.codes + quad * 64), numbers, panel, 4 * quad);
        }
#if defined(QUIRE_SIMD_AVX512)
      } else if constexpr (kLayout.codes == CodeBits::kFour) {
        StoreTabledGroup(group, numbers, panel);
#endif
      } else {
        const VB fifth = FifthBits<kFormat>(group);
        StoreNibbles<0>(group, fifth, numbers, panel);
        StoreNibbles<1>(group, fifth, numbers, panel);
        StoreNibbles<2>(group, fifth, numbers, panel);
        StoreNibbles<3>(group, fifth, numbers, panel);
      }
    }
  }
};

// Inputs [begin, begin + count) of a strip, whole groups.
struct StripPart {
  const std::byte* strip;
  int64_t begin, count;
  bool streams;  // weights come from memory: they are asked for ahead
};

template <class Panel, bool kRounded>
struct StripWidening {
  using Function = void (*)(const StripPart&, typename Panel::Element*);

  template <WeightFormat kFormat>
  static void Widen(const StripPart& part, typename Panel::Element* panel) {
    const StreamPrefetch prefetch =
        WeightPrefetchOfCpu(LayoutOf(kFormat).codes == CodeBits::kEight, false);
    const int64_t first = part.begin / kQuantGroup;
    for (int64_t g = 0; g < part.count / kQuantGroup; ++g) {
      const WeightGroup group = GroupAt<kFormat>(part.strip, first + g);
      if (part.streams && g % 2 == 0) FetchAhead(group.scales, PairBytes(kFormat), prefetch);
      BlockNumbers<Panel, kRounded, kFormat>::StoreGroup(group,
                                                         panel + g * kQuantGroup * kOutputBlock);
    }
  }
  template <WeightFormat kFormat>
  static constexpr Function kOf = Widen<kFormat>;
};

// Both strips of a block of outputs; where n ends before the second one, zeros.
template <class Panel, bool kRounded>
static void WidenStrips(const PackedLinear& w, int64_t output_block, StripPart part,
                        typename Panel::Element* panel) {
  const int64_t first = output_block * (kOutputBlock / kStripOutputs);
  const int64_t strip_bytes = StripBytes(*w.blocks, w.k);
  for (int64_t strip = 0; strip < kOutputBlock / kStripOutputs; ++strip) {
    auto* const to = Panel::AtOutput(panel, strip * kStripOutputs);
    if (first + strip < Strips(w.n)) {
      part.strip = static_cast<const std::byte*>(w.data) + (first + strip) * strip_bytes;
      OfFormat<StripWidening<Panel, kRounded>> (*w.blocks)(part, to);
      continue;
    }
    for (int64_t pair = 0; pair < part.count / 2; ++pair) {
      Panel::StorePair(to, pair, 0, {Zero(), Zero()});
    }
  }
}

template <class Panel>
static void WidenBlocks(const PackedLinear& w, int64_t output_block, int64_t begin, int64_t count,
                        bool streams, typename Panel::Element* panel) {
  const StripPart part = {nullptr, begin, count, streams};
  if constexpr (!Panel::kIsBF16) {
    if (w.dtype != DType::kBF16) return WidenStrips<Panel, false>(w, output_block, part, panel);
  }
  WidenStrips<Panel, true>(w, output_block, part, panel);
}
