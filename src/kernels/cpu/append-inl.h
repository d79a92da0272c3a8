// Storing new keys and values. Included after simd-inl.h, inside a path's namespace and target
// region; the including file includes before it: base/float_environment.h, kernels/backend.h,
// kernels/kv_slot.h, tensor/half.h.
#ifndef QUIRE_KERNELS_CPU_APPEND_INL_H_
#define QUIRE_KERNELS_CPU_APPEND_INL_H_

#include "kernels/cpu/rotary-inl.h"

// Rows per task: the tokens of a tile share its cache lines, so a task should have about a tile.
constexpr int64_t kAppendRows = 16;

template <DType kType>
struct StoredAs {
  using Element = uint16_t;
};
template <>
struct StoredAs<DType::kF32> {
  using Element = float;
};

template <DType kType>
QUIRE_INLINE float Wide(typename StoredAs<kType>::Element x) {
  if constexpr (kType == DType::kF32) {
    return x;
  } else {
    return kType == DType::kBF16 ? Bf16ToF32(x) : F16ToF32(x);
  }
}
template <DType kType>
QUIRE_INLINE typename StoredAs<kType>::Element Narrow(float x) {
  if constexpr (kType == DType::kF32) {
    return x;
  } else {
    return kType == DType::kBF16 ? F32ToBf16(x) : F32ToF16(x);
  }
}

// Equal types keep their bits: a NaN its payload.
template <DType kFrom, DType kTo>
QUIRE_INLINE typename StoredAs<kTo>::Element Convert(typename StoredAs<kFrom>::Element x) {
  if constexpr (kFrom == kTo) {
    return x;
  } else {
    return Narrow<kTo>(Wide<kFrom>(x));
  }
}

template <DType kFrom, DType kTo>
static void AppendKey(const AppendArgs& args, int64_t row, int head) {
  using Element = typename StoredAs<kTo>::Element;
  const KVLayout& layout = args.pages.layout;
  const AppendTarget target = args.targets[row];
  const auto* from = static_cast<const typename StoredAs<kFrom>::Element*>(args.k.data) +
                     row * args.k.row_stride + head * args.k.head_stride;
  auto* page = reinterpret_cast<Element*>(PageAt(args.pages, target.page));
  const SlotElements key = KeyOfSlot(layout, target.slot, head);
  const int rotary_dim = args.rotary.rotary_dim;
  for (int i = 0; i < rotary_dim / 2; ++i) {
    const int first = PairFirst(i, args.rotary.interleaved);
    const int second = PairSecond(i, rotary_dim, args.rotary.interleaved);
    float x = Wide<kFrom>(from[first]);
    float y = Wide<kFrom>(from[second]);
    RotatePair(&x, &y, args.rotary.angles[row].cos[i], args.rotary.angles[row].sin[i]);
    page[key[first]] = Narrow<kTo>(x);
    page[key[second]] = Narrow<kTo>(y);
  }
  for (int d = rotary_dim; d < layout.qk_head_dim; ++d) {
    page[key[d]] = Convert<kFrom, kTo>(from[d]);
  }
  for (int d = layout.qk_head_dim; d < layout.k_dim(); ++d) page[key[d]] = Narrow<kTo>(0.0F);
}

// Several tasks may set the flag of one tile.
static void NoteNonfinite(const AppendArgs& args, int64_t row) {
  const AppendTarget target = args.targets[row];
  __atomic_store_n(args.pages.v_nonfinite + TileFlag(args.pages.layout, target.page, target.slot),
                   uint8_t{1}, __ATOMIC_RELAXED);
}

// True if all stored values are finite.
template <DType kFrom, DType kTo>
static bool AppendValue(const AppendArgs& args, int64_t row, int head) {
  using Element = typename StoredAs<kTo>::Element;
  const KVLayout& layout = args.pages.layout;
  const AppendTarget target = args.targets[row];
  const auto* from = static_cast<const typename StoredAs<kFrom>::Element*>(args.v.data) +
                     row * args.v.row_stride + head * args.v.head_stride;
  auto* page = reinterpret_cast<Element*>(ValuesAt(args.pages, target.page));
  const SlotElements value = ValueOfSlot(layout, target.slot, head);
  float sum = 0.0F;  // of x * 0: NaN if some x is not finite
  for (int d = 0; d < layout.v_head_dim; ++d) {
    const Element x = Convert<kFrom, kTo>(from[d]);
    page[value[d]] = x;
    sum += Wide<kTo>(x) * 0.0F;
  }
  for (int d = layout.v_head_dim; d < layout.v_dim(); ++d) page[value[d]] = Narrow<kTo>(0.0F);
  return sum == 0.0F;
}

template <DType kKey, DType kTo>
static void AppendKeys(const AppendArgs& args, int64_t row) {
  for (int head = 0; head < args.pages.layout.num_kv_heads; ++head) {
    AppendKey<kKey, kTo>(args, row, head);
  }
}
template <DType kValue, DType kTo>
static void AppendValues(const AppendArgs& args, int64_t row) {
  bool is_finite = true;
  for (int head = 0; head < args.pages.layout.num_kv_heads; ++head) {
    is_finite = AppendValue<kValue, kTo>(args, row, head) && is_finite;
  }
  if (!is_finite) NoteNonfinite(args, row);
}
// For a latent layout: its values are stored already.
template <DType kTo>
static void LatentValues(const AppendArgs& args, int64_t row) {
  using Element = typename StoredAs<kTo>::Element;
  const AppendTarget target = args.targets[row];
  const auto* page = reinterpret_cast<const Element*>(ValuesAt(args.pages, target.page));
  const SlotElements value = ValueOfSlot(args.pages.layout, target.slot, 0);
  float sum = 0.0F;  // as in AppendValue
  for (int d = 0; d < args.pages.layout.v_head_dim; ++d) sum += Wide<kTo>(page[value[d]]) * 0.0F;
  if (!(sum == 0.0F)) NoteNonfinite(args, row);
}
static void LatentCodes(const AppendArgs&, int64_t) {}  // are finite

using AppendRow = void (*)(const AppendArgs& args, int64_t row);

#include "kernels/cpu/quantised_append-inl.h"

template <DType kTo>
static AppendRow KeysFrom(DType from) {
  if (from == DType::kF32) return AppendKeys<DType::kF32, kTo>;
  return from == DType::kF16 ? AppendKeys<DType::kF16, kTo> : AppendKeys<DType::kBF16, kTo>;
}
template <DType kTo>
static AppendRow ValuesFrom(DType from) {
  if (from == DType::kF32) return AppendValues<DType::kF32, kTo>;
  return from == DType::kF16 ? AppendValues<DType::kF16, kTo> : AppendValues<DType::kBF16, kTo>;
}

static AppendRow KeysTo(DType to, DType from) {
  if (IsQuantised(to)) return QuantisedKeysFrom(from);
  if (to == DType::kF32) return KeysFrom<DType::kF32>(from);
  return to == DType::kF16 ? KeysFrom<DType::kF16>(from) : KeysFrom<DType::kBF16>(from);
}
static AppendRow ValuesTo(DType to, DType from) {
  if (IsQuantised(to)) return QuantisedValuesFrom(from);
  if (to == DType::kF32) return ValuesFrom<DType::kF32>(from);
  return to == DType::kF16 ? ValuesFrom<DType::kF16>(from) : ValuesFrom<DType::kBF16>(from);
}

static AppendRow LatentValuesOf(DType dtype) {
  if (IsQuantised(dtype)) return LatentCodes;
  if (dtype == DType::kF32) return LatentValues<DType::kF32>;
  return dtype == DType::kF16 ? LatentValues<DType::kF16> : LatentValues<DType::kBF16>;
}

struct AppendCall {
  const AppendArgs* args;
  AppendRow keys;
  AppendRow values;
};

static AppendCall MakeAppendCall(const AppendArgs& args) {
  const KVLayout& layout = args.pages.layout;
  const AppendRow values =
      layout.latent ? LatentValuesOf(layout.dtype) : ValuesTo(layout.v_dtype(), args.v.dtype);
  return {&args, KeysTo(layout.dtype, args.k.dtype), values};
}

// The end of the rows of task `index`.
static int64_t AppendEnd(const AppendArgs& args, int64_t index) {
  const int64_t end = (index + 1) * kAppendRows;
  return end < args.row_count ? end : args.row_count;
}

static void RunOpenTiles(void* context, int64_t index, int /*worker*/) {
  const AppendArgs& args = *static_cast<const AppendCall*>(context)->args;
  for (int64_t row = index * kAppendRows; row < AppendEnd(args, index); ++row) {
    if (args.targets[row].page >= 0 && args.opens_tile[row] != 0) {
      OpenTile(args.pages, args.targets[row]);
    }
  }
}

static void RunAppendRows(void* context, int64_t index, int /*worker*/) {
  const ScopedFloatEnvironment environment;
  const AppendCall& call = *static_cast<const AppendCall*>(context);
  for (int64_t row = index * kAppendRows; row < AppendEnd(*call.args, index); ++row) {
    if (call.args->targets[row].page < 0) continue;
    call.keys(*call.args, row);
    call.values(*call.args, row);
  }
}

// All tiles are opened before any row is stored: the rows of a tile may belong to several tasks.
static void AppendKV(const AppendArgs& args, ParallelRunner& runner) {
  AppendCall call = MakeAppendCall(args);
  const int64_t tasks = (args.row_count + kAppendRows - 1) / kAppendRows;
  if (tasks <= 1) {  // a barrier costs more than a few rows
    for (int64_t index = 0; index < tasks; ++index) {
      RunOpenTiles(&call, index, 0);
      RunAppendRows(&call, index, 0);
    }
    return;
  }
  runner.Run(tasks, RunOpenTiles, &call);
  runner.Run(tasks, RunAppendRows, &call);
}

#endif  // QUIRE_KERNELS_CPU_APPEND_INL_H_
