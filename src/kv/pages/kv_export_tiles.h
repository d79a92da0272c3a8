// Whole tiles of one kv head out of pages as logical rows and back, bit for bit: the fast half of
// kv_export_rows.h. A tile is a small matrix with lanes where rows have dimensions, so moving it is
// a transposition in registers; plain 128-bit vectors reach the speed of a copy from memory.
#ifndef QUIRE_KV_PAGES_KV_EXPORT_TILES_H_
#define QUIRE_KV_PAGES_KV_EXPORT_TILES_H_

#include <cstddef>

#include "kernels/kv_layout.h"

namespace quire {

// Whether the two functions below know the layout: tiles, and keys of an even dimension, or a
// multiple of 4 if they are codes.
bool MovesWholeTiles(const KVLayout& layout);

// `page`: the page's begin. k, v: row of the tile's first lane, this head; the next lane's row lies
// k_stride (v_stride) bytes behind. REQUIRES: MovesWholeTiles.
void ReadTile(const KVLayout& layout, const std::byte* page, int tile, int head, std::byte* k,
              size_t k_stride, std::byte* v, size_t v_stride) noexcept;
// Fills the tile with its padding. True if all values are finite.
bool WriteTile(const KVLayout& layout, std::byte* page, int tile, int head, const std::byte* k,
               size_t k_stride, const std::byte* v, size_t v_stride) noexcept;

}  // namespace quire

#endif  // QUIRE_KV_PAGES_KV_EXPORT_TILES_H_
