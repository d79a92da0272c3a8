// Single stored tokens, moved as bits. Not on the path of a forward's rows: clarity before speed.
#include <cmath>
#include <cstring>

#include "kernels/backend.h"
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

// Row layout: unused slots are never read, so only the flag is reset.
void OpenTile(const KVPages& pages, AppendTarget slot) {
  const KVLayout& layout = pages.layout;
  pages.v_nonfinite[TileFlag(layout, slot.page, slot.slot)] = 0;
  if (!layout.tiled()) return;
  const size_t element_bytes = static_cast<size_t>(DTypeBytes(layout.dtype));
  const size_t first = layout.v_tile_offset(slot.slot / kTilePositions, 0);
  std::memset(PageAt(pages, slot.page) + first * element_bytes, 0,
              layout.v_tile_elements() * static_cast<size_t>(layout.num_kv_heads) * element_bytes);
}

// Calls f(page element, row element) for each element of the token's keys (values), row elements
// counted [head][dim].
template <typename F>
void ForEachKey(const KVLayout& layout, int slot, F&& f) {
  size_t row_element = 0;
  for (int head = 0; head < layout.num_kv_heads; ++head) {
    const KeyElements key = KeyOfSlot(layout, slot, head);
    for (int d = 0; d < layout.qk_head_dim; ++d) f(key[d], row_element++);
  }
}
template <typename F>
void ForEachValue(const KVLayout& layout, int slot, F&& f) {
  size_t row_element = 0;
  for (int head = 0; head < layout.num_kv_heads; ++head) {
    const ValueElements value = ValueOfSlot(layout, slot, head);
    for (int d = 0; d < layout.v_head_dim; ++d) f(value[d], row_element++);
  }
}

void ZeroPadding(const KVPages& pages, AppendTarget slot) {
  const KVLayout& layout = pages.layout;
  const size_t bytes = static_cast<size_t>(DTypeBytes(layout.dtype));
  std::byte* page = PageAt(pages, slot.page);
  for (int head = 0; head < layout.num_kv_heads; ++head) {
    const KeyElements key = KeyOfSlot(layout, slot.slot, head);
    for (int d = layout.qk_head_dim; d < layout.k_dim(); ++d) {
      std::memset(page + key[d] * bytes, 0, bytes);
    }
    const ValueElements value = ValueOfSlot(layout, slot.slot, head);
    for (int d = layout.v_head_dim; d < layout.v_dim(); ++d) {
      std::memset(page + value[d] * bytes, 0, bytes);
    }
  }
}

}  // namespace

void ReadSlot(const KVPages& pages, AppendTarget slot, DType dtype, void* k, void* v) {
  const KVLayout& layout = pages.layout;
  const std::byte* page = PageAt(pages, slot.page);
  const size_t from_bytes = static_cast<size_t>(DTypeBytes(layout.dtype));
  const size_t to_bytes = static_cast<size_t>(DTypeBytes(dtype));
  ForEachKey(layout, slot.slot, [&](size_t element, size_t row) {
    ConvertElement(page + element * from_bytes, layout.dtype,
                   static_cast<std::byte*>(k) + row * to_bytes, dtype);
  });
  ForEachValue(layout, slot.slot, [&](size_t element, size_t row) {
    ConvertElement(page + element * from_bytes, layout.dtype,
                   static_cast<std::byte*>(v) + row * to_bytes, dtype);
  });
}

void WriteSlot(const KVPages& pages, AppendTarget slot, DType dtype, const void* k, const void* v,
               bool opens_tile) {
  const KVLayout& layout = pages.layout;
  std::byte* page = PageAt(pages, slot.page);
  const size_t from_bytes = static_cast<size_t>(DTypeBytes(dtype));
  const size_t to_bytes = static_cast<size_t>(DTypeBytes(layout.dtype));
  if (opens_tile) OpenTile(pages, slot);
  ZeroPadding(pages, slot);
  ForEachKey(layout, slot.slot, [&](size_t element, size_t row) {
    ConvertElement(static_cast<const std::byte*>(k) + row * from_bytes, dtype,
                   page + element * to_bytes, layout.dtype);
  });
  ForEachValue(layout, slot.slot, [&](size_t element, size_t row) {
    std::byte* to = page + element * to_bytes;
    ConvertElement(static_cast<const std::byte*>(v) + row * from_bytes, dtype, to, layout.dtype);
    if (!std::isfinite(Widen(to, layout.dtype))) {
      pages.v_nonfinite[TileFlag(layout, slot.page, slot.slot)] = 1;
    }
  });
}

void CopySlots(const KVPages& pages, std::span<const AppendTarget> from,
               std::span<const AppendTarget> to, const uint8_t* opens_tile) {
  const KVLayout& layout = pages.layout;
  const size_t bytes = static_cast<size_t>(DTypeBytes(layout.dtype));
  for (size_t i = 0; i < from.size(); ++i) {
    const std::byte* source = PageAt(pages, from[i].page);
    std::byte* target = PageAt(pages, to[i].page);
    if (opens_tile[i] != 0) OpenTile(pages, to[i]);
    ZeroPadding(pages, to[i]);
    for (int head = 0; head < layout.num_kv_heads; ++head) {
      const KeyElements key_from = KeyOfSlot(layout, from[i].slot, head);
      const KeyElements key_to = KeyOfSlot(layout, to[i].slot, head);
      for (int d = 0; d < layout.qk_head_dim; ++d) {
        std::memcpy(target + key_to[d] * bytes, source + key_from[d] * bytes, bytes);
      }
      const ValueElements value_from = ValueOfSlot(layout, from[i].slot, head);
      const ValueElements value_to = ValueOfSlot(layout, to[i].slot, head);
      for (int d = 0; d < layout.v_head_dim; ++d) {
        std::memcpy(target + value_to[d] * bytes, source + value_from[d] * bytes, bytes);
        if (!std::isfinite(Widen(source + value_from[d] * bytes, layout.dtype))) {
          pages.v_nonfinite[TileFlag(layout, to[i].page, to[i].slot)] = 1;
        }
      }
    }
  }
}

}  // namespace quire
