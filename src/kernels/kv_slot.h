// Where the elements of one stored token of one kv head lie: the address arithmetic of kv_layout.h,
// spelled out per element. For code that touches single tokens (append, copies, assembling);
// attention reads whole tiles.
#ifndef QUIRE_KERNELS_KV_SLOT_H_
#define QUIRE_KERNELS_KV_SLOT_H_

#include <cstddef>

#include "kernels/backend.h"
#include "kernels/kv_layout.h"

namespace quire {

// Elements that lie side by side in a chain step: 2 with bfloat16 and what becomes it (a pair for
// dot products), else 1. In the K tile these are dimensions 2i and 2i + 1 of one lane, in the V
// tile lanes 2i and 2i + 1 of one dimension.
inline int ChainPair(DType dtype) { return ComputeDType(dtype) == DType::kBF16 ? 2 : 1; }

// Dimension d of a key or value: element `first + d / pair * step + d % pair` of the page's keys or
// values.
struct SlotElements {
  size_t first;
  size_t step;
  int pair;
  size_t operator[](int d) const {
    // d / pair and d % pair for a pair of 1 or 2, without the division that a variable pair costs.
    return first + static_cast<size_t>(d >> (pair - 1)) * step +
           static_cast<size_t>(d & (pair - 1));
  }
};

inline SlotElements KeyOfSlot(const KVLayout& layout, int slot, int head) {
  if (!layout.tiled()) return {layout.k_row_offset(slot, head), 1, 1};
  const int pair = ChainPair(layout.dtype);
  const int lane = slot % kTilePositions;
  return {layout.k_tile_offset(slot / kTilePositions, head) + static_cast<size_t>(lane) * pair,
          static_cast<size_t>(kTilePositions) * pair, pair};
}

inline SlotElements ValueOfSlot(const KVLayout& layout, int slot, int head) {
  if (layout.latent) return KeyOfSlot(layout, slot, head);
  if (!layout.tiled()) return {layout.v_row_offset(slot, head), 1, 1};
  const int pair = ChainPair(layout.v_dtype());
  const int lane = slot % kTilePositions;
  const size_t row = static_cast<size_t>(lane / pair) * layout.v_dim() * pair;
  return {
      layout.v_tile_offset(slot / kTilePositions, head) + row + static_cast<size_t>(lane % pair),
      static_cast<size_t>(pair), 1};
}

// Index into KVPages::v_nonfinite of the tile that holds a slot.
inline size_t TileFlag(const KVLayout& layout, int page, int slot) {
  return static_cast<size_t>(page) * layout.tiles_per_page() + slot / kTilePositions;
}

inline std::byte* PageAt(const KVPages& pages, int page) {
  return pages.base + static_cast<size_t>(page) * pages.stride();
}

inline std::byte* ValuesAt(const KVPages& pages, int page) {
  return PageAt(pages, page) + pages.layout.v_offset();
}
inline float* ScalesAt(const KVPages& pages, int page) {
  return reinterpret_cast<float*>(PageAt(pages, page) + pages.layout.scale_offset());
}

// The scale of a slot and head; `part` of KVLayout::scale_parts().
inline float* ScaleOfSlot(const KVPages& pages, int page, int slot, int head, int part) {
  const KVLayout& layout = pages.layout;
  if (!layout.tiled()) {
    return ScalesAt(pages, page) +
           (static_cast<size_t>(slot) * layout.num_kv_heads + head) *
               static_cast<size_t>(layout.scale_parts()) +
           part;
  }
  return ScalesAt(pages, page) + layout.scale_tile_offset(slot / kTilePositions, head) +
         part * kTilePositions + slot % kTilePositions;
}

// Makes the slot's tile one whose other slots hold no values: they are multiplied with 0.
void OpenTile(const KVPages& pages, AppendTarget slot);

}  // namespace quire

#endif  // QUIRE_KERNELS_KV_SLOT_H_
