// How keys and values of one layer lie in memory, and the views through which kernels read and
// write them.
//
// Positions are the ground: a tile is 16 consecutive positions, the key at position p is in lane p
// mod 16; a segment is 256 positions. A page holds `page_size` consecutive positions, slot = p mod
// page_size.
//
// Tiled layout (page_size a multiple of 16), per page of one layer, elements of `dtype`:
//   K: [tile][kv head][...one K tile...]   then   V: [tile][kv head][...one V tile...]
//   K tile  bf16: [k_dim / 2][16 lanes][2]    f32, f16: [k_dim][16 lanes]
//   V tile  bf16: [16 lanes / 2][v_dim][2]    f32, f16: [16 lanes][v_dim]
//   k_dim = qk_head_dim rounded up to even, v_dim = v_head_dim rounded up to 16; the padding is
//   zero.
// int8 and float8 keys or values lie as bfloat16 ones do, a byte each, and have scales (float32, by
// token and head, kv_quantise.h) after all V tiles: [tile][kv head][K's 16, V's 16], those of what
// is quantised; in the row layout [slot][kv head][K's, V's].
// Why: with keys in lanes a score is a chain over the head dimension without horizontal sums; with
// pairs AVX-512 BF16 dot products apply; K and V each form one long run per page, which memory
// delivers at full speed. Row layout (any other page_size): K: [slot][kv head][k_dim], V: [slot][kv
// head][v_dim]; attention assembles tiles from it.
// A latent layout has keys alone, k_dim being rounded up to 16: the values are their first
// v_head_dim dimensions. Attention turns a tile of keys into one of values, once per segment for
// all query heads.
#ifndef QUIRE_KERNELS_KV_LAYOUT_H_
#define QUIRE_KERNELS_KV_LAYOUT_H_

#include <cstddef>
#include <cstdint>
#include <optional>

#include "quire/tensor.h"

namespace quire {

inline constexpr int kTilePositions = 16;  // one AVX-512 register of float32 scores
inline constexpr int kSegmentPositions =
    256;  // part of the arithmetic: changing it changes bits (docs/exactness.md)
inline constexpr int kTilesPerSegment = kSegmentPositions / kTilePositions;

// The type in which chains multiply what is stored as `dtype`.
constexpr DType ComputeDType(DType dtype) { return IsQuantised(dtype) ? DType::kBF16 : dtype; }

struct KVLayout {
  DType dtype = DType::kF32;  // of keys, and of values unless value_dtype says otherwise
  int num_kv_heads = 0;
  int qk_head_dim = 0;
  int v_head_dim = 0;
  int page_size = 0;
  std::optional<DType> value_dtype = std::nullopt;
  bool latent = false;  // one kv head, v_head_dim <= qk_head_dim, no value_dtype

  static constexpr int RoundUp(int x, int m) { return (x + m - 1) / m * m; }
  static constexpr size_t RoundUpBytes(size_t x, size_t m) { return (x + m - 1) / m * m; }
  DType v_dtype() const { return value_dtype.value_or(dtype); }
  size_t k_element_bytes() const { return static_cast<size_t>(DTypeBytes(dtype)); }
  size_t v_element_bytes() const { return static_cast<size_t>(DTypeBytes(v_dtype())); }
  // Scales of one token and head: K's, then V's.
  int scale_parts() const { return v_scale_part() + int{IsQuantised(v_dtype())}; }
  int v_scale_part() const { return latent ? 0 : int{IsQuantised(dtype)}; }
  int k_dim() const { return RoundUp(qk_head_dim, latent ? 16 : 2); }
  int v_dim() const { return RoundUp(v_head_dim, 16); }
  bool tiled() const { return page_size % kTilePositions == 0; }
  int tiles_per_page() const { return RoundUp(page_size, kTilePositions) / kTilePositions; }
  // Element counts.
  size_t k_tile_elements() const { return static_cast<size_t>(k_dim()) * kTilePositions; }
  size_t v_tile_elements() const { return static_cast<size_t>(v_dim()) * kTilePositions; }
  // Elements of the memory that holds the values of a tile and head.
  size_t v_tile_stored_elements() const { return latent ? k_tile_elements() : v_tile_elements(); }
  size_t k_bytes() const {
    return static_cast<size_t>(page_size) * num_kv_heads * k_dim() * k_element_bytes();
  }
  size_t v_bytes() const {
    if (latent) return 0;
    return static_cast<size_t>(page_size) * num_kv_heads * v_dim() * v_element_bytes();
  }
  // Bytes from the beginning of a page to its values and scales.
  size_t v_offset() const { return latent ? 0 : RoundUpBytes(k_bytes(), sizeof(float)); }
  size_t element_bytes() const { return RoundUpBytes(k_bytes(), sizeof(float)) + v_bytes(); }
  size_t scale_offset() const { return RoundUpBytes(element_bytes(), 64); }
  size_t page_bytes() const {
    if (scale_parts() == 0) return element_bytes();
    const size_t slots = tiled() ? static_cast<size_t>(tiles_per_page()) * kTilePositions
                                 : static_cast<size_t>(page_size);
    return RoundUpBytes(
        scale_offset() + slots * num_kv_heads * static_cast<size_t>(scale_parts()) * sizeof(float),
        64);
  }
  // Elements from the beginning of a page's keys (values), tiled layout.
  size_t k_tile_offset(int tile, int head) const {
    return (static_cast<size_t>(tile) * num_kv_heads + head) * k_tile_elements();
  }
  size_t v_tile_offset(int tile, int head) const {
    if (latent) return k_tile_offset(tile, head);
    return (static_cast<size_t>(tile) * num_kv_heads + head) * v_tile_elements();
  }
  // Floats from the beginning of a page's scales to those of a tile, tiled layout.
  size_t scale_tile_offset(int tile, int head) const {
    return (static_cast<size_t>(tile) * num_kv_heads + head) * static_cast<size_t>(scale_parts()) *
           kTilePositions;
  }
  // The same, row layout.
  size_t k_row_offset(int slot, int head) const {
    return (static_cast<size_t>(slot) * num_kv_heads + head) * k_dim();
  }
  size_t v_row_offset(int slot, int head) const {
    return (static_cast<size_t>(slot) * num_kv_heads + head) * v_dim();
  }

  bool operator==(const KVLayout&) const = default;
};

// Pages of one layer. `v_nonfinite[page * tiles_per_page + tile]` is set when a value stored in
// that tile was NaN or infinite since the tile was opened.
struct KVPages {
  KVLayout layout;
  std::byte* base = nullptr;       // page i at base + i * stride()
  uint8_t* v_nonfinite = nullptr;  // [page_count * tiles_per_page]
  size_t page_stride = 0;          // bytes from a page to the next one; 0: they lie side by side

  size_t stride() const { return page_stride != 0 ? page_stride : layout.page_bytes(); }
};

// One entry of a page table: positions from `start` on lie in `page`, up to the next entry's start
// or the end of the run. start / page_size is the page range that the entry is about; an entry
// with a page never crosses its end.
struct PageEntry {
  int64_t start;
  int32_t page;  // negative: freed, no row sees a position of it
};

// Consecutive entries that cover the positions [begin, end): entry 0 covers from `begin` (its own
// start may be lower, the run is clipped), the last one to `end`. Entries are ascending. Never
// empty.
struct PageRun {
  const PageEntry* entries;
  int64_t entry_count;
  int64_t begin;
  int64_t end;
};

}  // namespace quire

#endif  // QUIRE_KERNELS_KV_LAYOUT_H_
