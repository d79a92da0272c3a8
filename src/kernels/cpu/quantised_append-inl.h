// Storing keys and values as codes with a scale per token and head (kv_quantise.h). Included by
// append-inl.h.
#ifndef QUIRE_KERNELS_CPU_QUANTISED_APPEND_INL_H_
#define QUIRE_KERNELS_CPU_QUANTISED_APPEND_INL_H_

// Calls f(dimension, rotated element) for a key: twice per key, since a row of any dimension has no
// place in registers.
template <DType kFrom, typename F>
QUIRE_INLINE void ForEachRotated(const AppendArgs& args, int64_t row,
                                 const typename StoredAs<kFrom>::Element* from, F&& f) {
  const int rotary_dim = args.rotary.rotary_dim;
  for (int i = 0; i < rotary_dim / 2; ++i) {
    const int first = PairFirst(i, args.rotary.interleaved);
    const int second = PairSecond(i, rotary_dim, args.rotary.interleaved);
    float x = Wide<kFrom>(from[first]);
    float y = Wide<kFrom>(from[second]);
    RotatePair(&x, &y, args.rotary.angles[row].cos[i], args.rotary.angles[row].sin[i]);
    f(first, x);
    f(second, y);
  }
  for (int d = rotary_dim; d < args.pages.layout.qk_head_dim; ++d) f(d, Wide<kFrom>(from[d]));
}

template <DType kFrom>
static void QuantiseKeys(const AppendArgs& args, int64_t row) {
  const KVLayout& layout = args.pages.layout;
  const AppendTarget target = args.targets[row];
  auto* const page = reinterpret_cast<uint8_t*>(PageAt(args.pages, target.page));
  for (int head = 0; head < layout.num_kv_heads; ++head) {
    const auto* from = static_cast<const typename StoredAs<kFrom>::Element*>(args.k.data) +
                       row * args.k.row_stride + head * args.k.head_stride;
    HeadRange range;
    ForEachRotated<kFrom>(args, row, from, [&](int, float x) { range.Add(x); });
    const float scale = range.Scale(layout.dtype);
    const SlotElements key = KeyOfSlot(layout, target.slot, head);
    ForEachRotated<kFrom>(args, row, from, [&](int d, float x) {
      page[key[d]] = QuantiseElement(layout.dtype, x, scale);
    });
    for (int d = layout.qk_head_dim; d < layout.k_dim(); ++d) page[key[d]] = 0;
    *ScaleOfSlot(args.pages, target.page, target.slot, head, 0) = scale;
  }
}

template <DType kFrom>
static void QuantiseValues(const AppendArgs& args, int64_t row) {
  const KVLayout& layout = args.pages.layout;
  const DType to = layout.v_dtype();
  const AppendTarget target = args.targets[row];
  auto* const page = reinterpret_cast<uint8_t*>(ValuesAt(args.pages, target.page));
  for (int head = 0; head < layout.num_kv_heads; ++head) {
    const auto* from = static_cast<const typename StoredAs<kFrom>::Element*>(args.v.data) +
                       row * args.v.row_stride + head * args.v.head_stride;
    HeadRange range;
    for (int d = 0; d < layout.v_head_dim; ++d) range.Add(Wide<kFrom>(from[d]));
    const float scale = range.Scale(to);
    const SlotElements value = ValueOfSlot(layout, target.slot, head);
    for (int d = 0; d < layout.v_head_dim; ++d) {
      page[value[d]] = QuantiseElement(to, Wide<kFrom>(from[d]), scale);
    }
    for (int d = layout.v_head_dim; d < layout.v_dim(); ++d) page[value[d]] = 0;
    *ScaleOfSlot(args.pages, target.page, target.slot, head, layout.v_scale_part()) = scale;
  }
}

// One head of a row of codes.
template <typename Elements>
static void StoreCodes(const HeadRows& rows, int64_t row, int head, Elements elements,
                       std::byte* page, int dim, int padded_dim) {
  const auto* from =
      static_cast<const std::byte*>(rows.data) + row * rows.row_stride + head * rows.head_stride;
  for (int d = 0; d < dim; ++d) page[elements[d]] = from[d];
  for (int d = dim; d < padded_dim; ++d) page[elements[d]] = std::byte{0};
}

static void StoreKeyCodes(const AppendArgs& args, int64_t row) {
  const KVLayout& layout = args.pages.layout;
  const AppendTarget target = args.targets[row];
  for (int head = 0; head < layout.num_kv_heads; ++head) {
    StoreCodes(args.k, row, head, KeyOfSlot(layout, target.slot, head),
               PageAt(args.pages, target.page), layout.qk_head_dim, layout.k_dim());
    *ScaleOfSlot(args.pages, target.page, target.slot, head, 0) =
        args.k_scale[row * layout.num_kv_heads + head];
  }
}
static void StoreValueCodes(const AppendArgs& args, int64_t row) {
  const KVLayout& layout = args.pages.layout;
  const AppendTarget target = args.targets[row];
  for (int head = 0; head < layout.num_kv_heads; ++head) {
    StoreCodes(args.v, row, head, ValueOfSlot(layout, target.slot, head),
               ValuesAt(args.pages, target.page), layout.v_head_dim, layout.v_dim());
    *ScaleOfSlot(args.pages, target.page, target.slot, head, layout.v_scale_part()) =
        args.v_scale[row * layout.num_kv_heads + head];
  }
}

static AppendRow QuantisedKeysFrom(DType from) {
  if (IsQuantised(from)) return StoreKeyCodes;
  if (from == DType::kF32) return QuantiseKeys<DType::kF32>;
  return from == DType::kF16 ? QuantiseKeys<DType::kF16> : QuantiseKeys<DType::kBF16>;
}
static AppendRow QuantisedValuesFrom(DType from) {
  if (IsQuantised(from)) return StoreValueCodes;
  if (from == DType::kF32) return QuantiseValues<DType::kF32>;
  return from == DType::kF16 ? QuantiseValues<DType::kF16> : QuantiseValues<DType::kBF16>;
}

#endif  // QUIRE_KERNELS_CPU_QUANTISED_APPEND_INL_H_
