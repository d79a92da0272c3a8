// The arithmetic between and after the two chains: softmax of a segment, fold of segments, end of
// a row. One implementation for every caller. Included after simd-inl.h, inside a path's namespace
// and target region.
#ifndef QUIRE_KERNELS_CPU_SOFTMAX_INL_H_
#define QUIRE_KERNELS_CPU_SOFTMAX_INL_H_

QUIRE_INLINE float NegativeInfinity() { return -__builtin_inff(); }

// How weights (rotated q, softmax p) are kept: as chains of the layout's dtype take them. kI16: as
// int16 with a scale of the row, for sums with int8 codes.
enum class WeightKind : uint8_t { kF32, kRoundedF32, kPackedBF16, kI16 };

QUIRE_INLINE WeightKind WeightKindOf(DType cache_dtype) {
  if (cache_dtype == DType::kI8) return WeightKind::kI16;
  if (ComputeDType(cache_dtype) != DType::kBF16) return WeightKind::kF32;
#if defined(QUIRE_SIMD_BF16)
  return WeightKind::kPackedBF16;
#else
  return WeightKind::kRoundedF32;
#endif
}
QUIRE_INLINE size_t WeightBytes(WeightKind kind) {
  const bool narrow = kind == WeightKind::kPackedBF16 || kind == WeightKind::kI16;
  return narrow ? sizeof(uint16_t) : sizeof(float);
}
// Stores weights first .. first + 15 of a row. kI16: they are integers.
QUIRE_INLINE void StoreWeights(WeightKind kind, std::byte* row, int64_t first, VF w) {
  if (kind == WeightKind::kPackedBF16) {
    StoreBF16ForDots(reinterpret_cast<uint16_t*>(row) + first, w);
  } else if (kind == WeightKind::kI16) {
    StoreI16(reinterpret_cast<int16_t*>(row) + first, w);
  } else {
    Store(reinterpret_cast<float*>(row) + first,
          kind == WeightKind::kRoundedF32 ? RoundForDots(w) : w);
  }
}

// The largest weight of kI16 in a sum over `count` codes of at most 128: the sum fits into int32.
constexpr float MostI16(int count) {
  const int most = INT32_MAX / (128 * count);
  return static_cast<float>(most < INT16_MAX ? most : INT16_MAX);
}

// `count` weights as kI16 into `to`, which may lie at `from` (count is a multiple of 16). Returns
// their scale: the greatest magnitude is `most`. NaN, and all weights 0, if one of them is not
// finite.
static float QuantiseWeights(const float* from, int count, float most, std::byte* to) {
  VF greatest = Zero();
  VF sum = Zero();
  for (int i = 0; i < count; i += kLanes) {
    const VF x = Load(from + i);
    greatest = Max(Max(x, Sub(Zero(), x)), greatest);
    sum = Add(sum, Mul(x, Zero()));
  }
  const bool finite = ReduceAdd(sum) == 0.0F;
  const float scale = finite ? ReduceMax(greatest) / most : __builtin_nanf("");
  if (!(scale > 0.0F)) {
    __builtin_memset(to, 0, static_cast<size_t>(count) * sizeof(int16_t));
    return scale;
  }
  const VF divisor = Set1(scale);
  const VF highest = Set1(most);
  const VF lowest = Set1(-most);
  for (int i = 0; i < count; i += kLanes) {
    const VF x = Max(Min(Div(Load(from + i), divisor), highest), lowest);
    StoreWeights(WeightKind::kI16, to, i, x);
  }
  return scale;
}

// What a row sees of a segment, relative to its first position: [begin, end) without [gap_begin,
// gap_end), which lies strictly inside, or after the segment if there is none. Empty if begin >=
// end. In tiles from mask_begin on, only the lanes whose bit is set.
struct SegmentView {
  int begin;
  int end;
  int gap_begin;
  int gap_end;
  const uint16_t* mask = nullptr;  // of tile mask_begin, one after the other; null: no mask
  int64_t mask_begin = 0;
};

constexpr uint32_t kAllLanes = (uint32_t{1} << kLanes) - 1;

// Lanes of tile t that the mask lets through, one bit each.
QUIRE_INLINE uint32_t MaskedLanes(const SegmentView& view, int t) {
  return view.mask == nullptr || t < view.mask_begin ? kAllLanes : view.mask[t - view.mask_begin];
}

// Lanes lo <= i < hi of tile t, both counted from the segment's first position.
QUIRE_INLINE VMask LanesFrom(int lo, int hi, int t) {
  const int begin = lo - t * kLanes;
  const int end = hi - t * kLanes;
  return MaskRange(begin > 0 ? begin : 0, end < kLanes ? end : kLanes);
}

QUIRE_INLINE bool TouchesGap(const SegmentView& view, int t) {
  return view.gap_begin < (t + 1) * kLanes && view.gap_end > t * kLanes;
}

// `x` where the row sees tile t, `hidden` elsewhere.
QUIRE_INLINE VF WhereSeen(const SegmentView& view, int t, VF x, VF hidden) {
  if (view.begin > t * kLanes || view.end < (t + 1) * kLanes) {
    x = Select(LanesFrom(view.begin, view.end, t), x, hidden);
  }
  if (TouchesGap(view, t)) x = Select(LanesFrom(view.gap_begin, view.gap_end, t), hidden, x);
  if (view.mask != nullptr) x = Select(MaskOf(MaskedLanes(view, t)), x, hidden);
  return x;
}

// Tiles [first, last) hold what the row sees; of [whole_begin, whole_end) it sees all lanes.
struct SeenSpan {
  int first;
  int whole_begin;
  int whole_end;
  int last;

  explicit SeenSpan(const SegmentView& view)
      : first(view.begin / kLanes), last((view.end + kLanes - 1) / kLanes) {
    whole_begin = whole_end = last;
    if (view.mask != nullptr || (view.gap_begin < view.end && view.gap_end > view.begin)) return;
    const int begin = (view.begin + kLanes - 1) / kLanes;
    const int end = view.end / kLanes;
    if (begin >= end) return;
    whole_begin = begin;
    whole_end = end;
  }
};

// Scores become cap * tanh(score * sm_scale / cap) * log2(e): tanh(x) = (1 - u) / (1 + u) with u =
// e^(-2 |x|), and the sign of x.
static void CapScores(float* scores, const SegmentView& view, float scale_log2, float cap) {
  const VF scale = Set1(scale_log2);
  const VF exponent = Set1(-2.0F / cap);
  const VF one = Set1(1.0F);
  const VF cap_log2 = Set1(cap * 1.44269504F);
  for (int t = view.begin / kLanes; t * kLanes < view.end; ++t) {
    const VF y = Mul(Load(scores + t * kLanes), scale);
    const VF negative = Sub(Zero(), y);
    const VMask is_positive = NotLess(y, Zero());  // or NaN, which goes through
    const VF u = Exp2(Mul(Select(is_positive, y, negative), exponent));
    const VF size = Mul(Div(Sub(one, u), Add(one, u)), cap_log2);
    Store(scores + t * kLanes, Select(is_positive, size, Sub(Zero(), size)));
  }
}

// The greatest scaled score of tiles [begin, end), and `greatest`. kWhole: the row sees all lanes.
template <bool kWhole>
QUIRE_INLINE VF GreatestScore(const float* scores, const SegmentView& view, int begin, int end,
                              VF scale, VF greatest) {
  for (int t = begin; t < end; ++t) {
    VF y = Mul(Load(scores + t * kLanes), scale);
    if constexpr (!kWhole) y = WhereSeen(view, t, y, Set1(NegativeInfinity()));
    greatest = Max(y, greatest);  // a NaN in y leaves `greatest`
  }
  return greatest;
}

// Scores of tiles [begin, end) become weights 2^(score - base); `sum` and their sums are returned.
template <bool kScaled, bool kWhole>
QUIRE_INLINE VF WeighScores(WeightKind kind, float* scores, const float* value_scales,
                            const SegmentView& view, int begin, int end, VF scale, VF base,
                            VF sum) {
  for (int t = begin; t < end; ++t) {
    VF p = Exp2(Sub(Mul(Load(scores + t * kLanes), scale), base));
    if constexpr (!kWhole) p = WhereSeen(view, t, p, Zero());
    sum = Add(sum, p);
    VF w = p;
    if constexpr (kScaled) {
      w = Mul(p, Load(value_scales + t * kLanes));
      if constexpr (!kWhole) w = WhereSeen(view, t, w, Zero());  // there a scale may be NaN
    }
    StoreWeights(kind, reinterpret_cast<std::byte*>(scores), t * kLanes, w);
  }
  return sum;
}

// The maximum of a row's scaled scores of one segment, NaN aside: -inf if all that it sees is -inf
// or a mask hides all.
static float MaximumOfRow(const float* scores, const SegmentView& view, float scale_log2) {
  const VF scale = Set1(scale_log2);
  const SeenSpan span(view);
  VF greatest = Set1(NegativeInfinity());
  greatest = GreatestScore<false>(scores, view, span.first, span.whole_begin, scale, greatest);
  greatest = GreatestScore<true>(scores, view, span.whole_begin, span.whole_end, scale, greatest);
  greatest = GreatestScore<false>(scores, view, span.whole_end, span.last, scale, greatest);
  return ReduceMax(greatest);
}

// Scores of one row of one segment become weights, in place (a narrower weight lies at or before
// the score that it comes from). The row sees something; `maximum` is of MaximumOfRow; weights of
// all tiles [tile_begin, tile_end) are defined, 0 if the maximum is -inf. *l is the sum of the
// weights before they are rounded; a NaN is in *l and in its weight. With kScaled, weights are
// multiplied by value_scales before they are rounded, and *l is of those that are not;
// *weight_scale is set if they are of kI16.
template <bool kScaled>
static void WeighRow(WeightKind kind, float* scores, const float* value_scales,
                     const SegmentView& view, int tile_begin, int tile_end, float scale_log2,
                     float maximum, float* l, float* weight_scale) {
  auto* weights = reinterpret_cast<std::byte*>(scores);
  const bool integral = kScaled && kind == WeightKind::kI16;
  if (integral) kind = WeightKind::kF32;
  const VF scale = Set1(scale_log2);
  const VF base = Set1(maximum == NegativeInfinity() ? 0.0F : maximum);
  const SeenSpan span(view);
  for (int t = tile_begin; t < span.first; ++t) StoreWeights(kind, weights, t * kLanes, Zero());
  VF sum = Zero();
  sum = WeighScores<kScaled, false>(kind, scores, value_scales, view, span.first, span.whole_begin,
                                    scale, base, sum);
  sum = WeighScores<kScaled, true>(kind, scores, value_scales, view, span.whole_begin,
                                   span.whole_end, scale, base, sum);
  sum = WeighScores<kScaled, false>(kind, scores, value_scales, view, span.whole_end, span.last,
                                    scale, base, sum);
  for (int t = span.last; t < tile_end; ++t) StoreWeights(kind, weights, t * kLanes, Zero());
  *l = ReduceAdd(sum);
  if (!integral) return;
  const int64_t begin = int64_t{tile_begin} * kLanes;
  *weight_scale =
      QuantiseWeights(scores + begin, (tile_end - tile_begin) * kLanes, MostI16(kSegmentPositions),
                      weights + begin * static_cast<int64_t>(sizeof(int16_t)));
}

// A row that sees nothing of the tiles: weights 0, and a state that changes no fold.
static void HiddenRow(WeightKind kind, float* scores, int tile_begin, int tile_end, float* m,
                      float* l, float* weight_scale) {
  auto* weights = reinterpret_cast<std::byte*>(scores);
  for (int t = tile_begin; t < tile_end; ++t) StoreWeights(kind, weights, t * kLanes, Zero());
  *m = NegativeInfinity();
  *l = 0.0F;
  *weight_scale = 0.0F;
}

// State of consecutive rows of one head: o [row][v_dim], m [row], l [row].
struct RowStates {
  float* o;
  float* m;
  float* l;
};

static void ClearStates(RowStates states, int64_t count, int v_dim) {
  __builtin_memset(states.o, 0, static_cast<size_t>(count * v_dim) * sizeof(float));
  for (int64_t i = 0; i < count; ++i) states.m[i] = NegativeInfinity();
  for (int64_t i = 0; i < count; ++i) states.l[i] = 0.0F;
}

// Factors of old and new state: 2^(own m - common m), 0 for a state that holds nothing.
QUIRE_INLINE VF FoldFactor(VF own, VF common) {
  // !(-inf < own): own is -inf, and own - common may be NaN.
  return Select(NotLess(Set1(NegativeInfinity()), own), Zero(), Exp2(Sub(own, common)));
}

// Folds at most 16 rows of a segment into the states of the segments before it.
static void FoldRows16(RowStates into, RowStates from, int count, int v_dim) {
  float old_m[kLanes];
  float old_l[kLanes];
  float new_m[kLanes];
  float new_l[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    const bool used = i < count;
    old_m[i] = used ? into.m[i] : 0.0F;
    old_l[i] = used ? into.l[i] : 0.0F;
    new_m[i] = used ? from.m[i] : 0.0F;
    new_l[i] = used ? from.l[i] : 0.0F;
  }
  const VF common = Max(Load(old_m), Load(new_m));
  const VF a = FoldFactor(Load(old_m), common);
  const VF b = FoldFactor(Load(new_m), common);
  float factor_old[kLanes];
  float factor_new[kLanes];
  Store(factor_old, a);
  Store(factor_new, b);
  Store(new_l, Fma(Load(new_l), b, Mul(Load(old_l), a)));
  Store(new_m, common);
  for (int i = 0; i < count; ++i) {
    if (from.l[i] == 0.0F) continue;  // contributes nothing, and from.o may be undefined
    into.m[i] = new_m[i];
    into.l[i] = new_l[i];
    float* o = into.o + i * v_dim;
    const float* segment = from.o + i * v_dim;
    const VF fa = Set1(factor_old[i]);
    const VF fb = Set1(factor_new[i]);
    for (int d = 0; d < v_dim; d += kLanes) {
      Store(o + d, Fma(Load(segment + d), fb, Mul(Load(o + d), fa)));
    }
  }
}

static void FoldRows(RowStates into, RowStates from, int64_t count, int v_dim) {
  for (int64_t i = 0; i < count; i += kLanes) {
    const int n = static_cast<int>(count - i < kLanes ? count - i : kLanes);
    FoldRows16({into.o + i * v_dim, into.m + i, into.l + i},
               {from.o + i * v_dim, from.m + i, from.l + i}, n, v_dim);
  }
}

// Which payload and sign a NaN has, and whether a zero is -0, depends on how chains were grouped;
// outputs do not show it.
QUIRE_INLINE VF Canonical(VF x) {
  const VF infinity = Set1(__builtin_inff());
  const VF positive = Add(x, Zero());  // -0 becomes +0
  const VF nan = Set1(__builtin_nanf(""));
  // NaN, and nothing else, is neither less than +inf nor, negated, less than +inf.
  return Select(NotLess(x, infinity), Select(NotLess(Sub(Zero(), x), infinity), nan, positive),
                positive);
}

// The output of one row: o / l, 0 where the row saw nothing; `out` holds v_dim floats.
static void FinishRow(const float* o, float l, int v_dim, float* out) {
  const VF scale = Set1(l == 0.0F ? 0.0F : 1.0F / l);
  for (int d = 0; d < v_dim; d += kLanes) Store(out + d, Canonical(Mul(Load(o + d), scale)));
}

QUIRE_INLINE float FinishLse(float m, float l) {
  if (l == 0.0F) return NegativeInfinity();
  const float lse = m + static_cast<float>(__builtin_log2(static_cast<double>(l)));
  return lse == lse ? lse : __builtin_nanf("");
}

#endif  // QUIRE_KERNELS_CPU_SOFTMAX_INL_H_
