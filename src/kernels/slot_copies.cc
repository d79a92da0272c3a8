// Single stored tokens, moved as bits. Only OpenTile is on the path of a forward's rows: clarity
// before speed.
#include <cmath>
#include <cstring>

#include "kernels/backend.h"
#include "kernels/kv_quantise.h"
#include "kernels/kv_slot.h"
#include "tensor/half.h"

namespace quire {
namespace {

float Widen(const std::byte* element, DType dtype) {
  uint16_t bits;
  std::memcpy(&bits, element, sizeof bits);
  if (dtype == DType::kBF16) return Bf16ToF32(bits);
  if (dtype == DType::kF16) return F16ToF32(bits);
  float value;
  std::memcpy(&value, element, sizeof value);
  return value;
}

void Narrow(float value, std::byte* element, DType dtype) {
  if (dtype == DType::kF32) {
    std::memcpy(element, &value, sizeof value);
    return;
  }
  const uint16_t bits = dtype == DType::kBF16 ? F32ToBf16(value) : F32ToF16(value);
  std::memcpy(element, &bits, sizeof bits);
}

// Equal types are copied as bits, so that a NaN keeps its payload.
void ConvertElement(const std::byte* from, DType from_dtype, std::byte* to, DType to_dtype) {
  if (from_dtype == to_dtype) {
    std::memcpy(to, from, static_cast<size_t>(DTypeBytes(to_dtype)));
  } else {
    Narrow(Widen(from, from_dtype), to, to_dtype);
  }
}

// The keys or the values of one token and head in a page.
struct KeySide {
  const KVPages& pages;
  DType dtype() const { return pages.layout.dtype; }
  int dim() const { return pages.layout.qk_head_dim; }
  int padded_dim() const { return pages.layout.k_dim(); }
  int scale_part() const { return 0; }
  std::byte* Base(int page) const { return PageAt(pages, page); }
  SlotElements Elements(int slot, int head) const { return KeyOfSlot(pages.layout, slot, head); }
};
struct ValueSide {
  const KVPages& pages;
  DType dtype() const { return pages.layout.v_dtype(); }
  int dim() const { return pages.layout.v_head_dim; }
  int padded_dim() const { return pages.layout.v_dim(); }
  int scale_part() const { return pages.layout.v_scale_part(); }
  std::byte* Base(int page) const { return ValuesAt(pages, page); }
  SlotElements Elements(int slot, int head) const { return ValueOfSlot(pages.layout, slot, head); }
};

template <typename Side>
void ReadHead(const Side& side, AppendTarget slot, int head, DType dtype, std::byte* to) {
  const std::byte* const base = side.Base(slot.page);
  const auto elements = side.Elements(slot.slot, head);
  const size_t from_bytes = static_cast<size_t>(DTypeBytes(side.dtype()));
  const size_t to_bytes = static_cast<size_t>(DTypeBytes(dtype));
  const bool quantised = IsQuantised(side.dtype());
  const float scale =
      quantised ? *ScaleOfSlot(side.pages, slot.page, slot.slot, head, side.scale_part()) : 0.0F;
  for (int d = 0; d < side.dim(); ++d, to += to_bytes) {
    const std::byte* const from = base + elements[d] * from_bytes;
    if (quantised) {
      Narrow(CodeToF32(side.dtype(), static_cast<uint8_t>(*from)) * scale, to, dtype);
    } else {
      ConvertElement(from, side.dtype(), to, dtype);
    }
  }
}

template <typename Side>
void WriteHead(const Side& side, AppendTarget slot, int head, DType dtype, const std::byte* from) {
  std::byte* const base = side.Base(slot.page);
  const auto elements = side.Elements(slot.slot, head);
  const size_t from_bytes = static_cast<size_t>(DTypeBytes(dtype));
  const size_t to_bytes = static_cast<size_t>(DTypeBytes(side.dtype()));
  const bool quantised = IsQuantised(side.dtype());
  float scale = 0.0F;
  if (quantised) {
    HeadRange range;
    for (int d = 0; d < side.dim(); ++d) {
      range.Add(Widen(from + static_cast<size_t>(d) * from_bytes, dtype));
    }
    scale = range.Scale(side.dtype());
    *ScaleOfSlot(side.pages, slot.page, slot.slot, head, side.scale_part()) = scale;
  }
  for (int d = 0; d < side.dim(); ++d, from += from_bytes) {
    std::byte* const to = base + elements[d] * to_bytes;
    if (quantised) {
      *to = std::byte{QuantiseElement(side.dtype(), Widen(from, dtype), scale)};
    } else {
      ConvertElement(from, dtype, to, side.dtype());
    }
  }
}

template <typename Side>
void CopyHead(const Side& side, AppendTarget from, AppendTarget to, int head) {
  const auto source = side.Elements(from.slot, head);
  const auto target = side.Elements(to.slot, head);
  const size_t bytes = static_cast<size_t>(DTypeBytes(side.dtype()));
  for (int d = 0; d < side.dim(); ++d) {
    std::memcpy(side.Base(to.page) + target[d] * bytes, side.Base(from.page) + source[d] * bytes,
                bytes);
  }
  if (!IsQuantised(side.dtype())) return;
  *ScaleOfSlot(side.pages, to.page, to.slot, head, side.scale_part()) =
      *ScaleOfSlot(side.pages, from.page, from.slot, head, side.scale_part());
}

template <typename Side>
void ZeroPadding(const Side& side, AppendTarget slot, int head) {
  const auto elements = side.Elements(slot.slot, head);
  const size_t bytes = static_cast<size_t>(DTypeBytes(side.dtype()));
  for (int d = side.dim(); d < side.padded_dim(); ++d) {
    std::memset(side.Base(slot.page) + elements[d] * bytes, 0, bytes);
  }
}

// Notes in the tile's flag that a value of the slot is NaN or infinite.
void NoteNonfinite(const KVPages& pages, AppendTarget slot, int head) {
  const KVLayout& layout = pages.layout;
  if (IsQuantised(layout.v_dtype())) return;
  const SlotElements value = ValueOfSlot(layout, slot.slot, head);
  const std::byte* const base = ValuesAt(pages, slot.page);
  for (int d = 0; d < layout.v_head_dim; ++d) {
    if (std::isfinite(Widen(base + value[d] * layout.v_element_bytes(), layout.v_dtype())))
      continue;
    pages.v_nonfinite[TileFlag(layout, slot.page, slot.slot)] = 1;
  }
}

}  // namespace

void ReadSlot(const KVPages& pages, AppendTarget slot, DType dtype, void* k, void* v) {
  const KVLayout& layout = pages.layout;
  const size_t bytes = static_cast<size_t>(DTypeBytes(dtype));
  for (int head = 0; head < layout.num_kv_heads; ++head) {
    const auto row = static_cast<size_t>(head);
    ReadHead(KeySide{pages}, slot, head, dtype,
             static_cast<std::byte*>(k) + row * static_cast<size_t>(layout.qk_head_dim) * bytes);
    if (v == nullptr) continue;
    ReadHead(ValueSide{pages}, slot, head, dtype,
             static_cast<std::byte*>(v) + row * static_cast<size_t>(layout.v_head_dim) * bytes);
  }
}

// Row layout: unused slots are never read, so only the flag is reset. Codes are finite, whatever
// they are.
void OpenTile(const KVPages& pages, AppendTarget slot) {
  const KVLayout& layout = pages.layout;
  pages.v_nonfinite[TileFlag(layout, slot.page, slot.slot)] = 0;
  if (!layout.tiled() || IsQuantised(layout.v_dtype())) return;
  const size_t bytes = layout.v_element_bytes();
  const size_t first = layout.v_tile_offset(slot.slot / kTilePositions, 0);
  std::memset(ValuesAt(pages, slot.page) + first * bytes, 0,
              layout.v_tile_stored_elements() * static_cast<size_t>(layout.num_kv_heads) * bytes);
}

void WriteSlot(const KVPages& pages, AppendTarget slot, DType dtype, const void* k, const void* v,
               bool opens_tile) {
  const KVLayout& layout = pages.layout;
  const size_t bytes = static_cast<size_t>(DTypeBytes(dtype));
  if (opens_tile) OpenTile(pages, slot);
  for (int head = 0; head < layout.num_kv_heads; ++head) {
    const auto row = static_cast<size_t>(head);
    ZeroPadding(KeySide{pages}, slot, head);
    WriteHead(
        KeySide{pages}, slot, head, dtype,
        static_cast<const std::byte*>(k) + row * static_cast<size_t>(layout.qk_head_dim) * bytes);
    if (!layout.latent) {
      ZeroPadding(ValueSide{pages}, slot, head);
      WriteHead(
          ValueSide{pages}, slot, head, dtype,
          static_cast<const std::byte*>(v) + row * static_cast<size_t>(layout.v_head_dim) * bytes);
    }
    NoteNonfinite(pages, slot, head);
  }
}

void CopySlots(const KVPages& pages, std::span<const AppendTarget> from,
               std::span<const AppendTarget> to, const uint8_t* opens_tile) {
  for (size_t i = 0; i < from.size(); ++i) {
    if (opens_tile[i] != 0) OpenTile(pages, to[i]);
    for (int head = 0; head < pages.layout.num_kv_heads; ++head) {
      ZeroPadding(KeySide{pages}, to[i], head);
      CopyHead(KeySide{pages}, from[i], to[i], head);
      if (!pages.layout.latent) {
        ZeroPadding(ValueSide{pages}, to[i], head);
        CopyHead(ValueSide{pages}, from[i], to[i], head);
      }
      NoteNonfinite(pages, to[i], head);
    }
  }
}

}  // namespace quire
