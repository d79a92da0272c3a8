#include "kv/pages/kv_export_tiles.h"

#include <cstdint>
#include <cstring>

#include "kernels/kv_slot.h"

namespace quire {
namespace {

// Vectors of the compiler's own, which every machine has: no instruction set is named here.
using Words = uint32_t __attribute__((vector_size(16)));   // 4 lanes
using Halves = uint16_t __attribute__((vector_size(16)));  // 8 elements
using FourHalves = uint16_t __attribute__((vector_size(8)));
using Bytes = uint8_t __attribute__((vector_size(16)));
constexpr int kLanes = 4;  // of a block

template <typename Vector>
Vector Load(const void* from) noexcept {
  Vector vector;
  std::memcpy(&vector, from, sizeof vector);
  return vector;
}
template <typename Vector>
void Store(Vector vector, void* to) noexcept {
  std::memcpy(to, &vector, sizeof vector);
}

// The key tile as words of 4 bytes: [word][16 lanes]. A word is what lies side by side in a row: an
// element of float32, or two of 16 bits.
struct WordTile {  // float32; bfloat16, whose pairs lie so
  static Words Get(const std::byte* tile, int word, int lane) noexcept {
    return Load<Words>(tile + (word * kTilePositions + lane) * 4);
  }
  static void Put(Words words, std::byte* tile, int word, int lane) noexcept {
    Store(words, tile + (word * kTilePositions + lane) * 4);
  }
};
struct HalfTile {  // float16: [dim][16 lanes]; pairs of codes of a byte: [pair][16 lanes]
  static const std::byte* At(const std::byte* tile, int dim, int lane) noexcept {
    return tile + (dim * kTilePositions + lane) * 2;
  }
  static Words Get(const std::byte* tile, int word, int lane) noexcept {
    const auto first = Load<FourHalves>(At(tile, 2 * word, lane));
    const auto second = Load<FourHalves>(At(tile, 2 * word + 1, lane));
    return reinterpret_cast<Words>(__builtin_shufflevector(first, second, 0, 4, 1, 5, 2, 6, 3, 7));
  }
  static void Put(Words words, std::byte* tile, int word, int lane) noexcept {
    const auto halves = reinterpret_cast<Halves>(words);
    std::byte* const to = tile + (2 * word * kTilePositions + lane) * 2;
    Store(__builtin_shufflevector(halves, halves, 0, 2, 4, 6), to);
    Store(__builtin_shufflevector(halves, halves, 1, 3, 5, 7), to + kTilePositions * 2);
  }
};

void Transpose(Words m[kLanes]) noexcept {
  const Words a = __builtin_shufflevector(m[0], m[1], 0, 4, 1, 5);
  const Words b = __builtin_shufflevector(m[0], m[1], 2, 6, 3, 7);
  const Words c = __builtin_shufflevector(m[2], m[3], 0, 4, 1, 5);
  const Words d = __builtin_shufflevector(m[2], m[3], 2, 6, 3, 7);
  m[0] = __builtin_shufflevector(a, c, 0, 1, 4, 5);
  m[1] = __builtin_shufflevector(a, c, 2, 3, 6, 7);
  m[2] = __builtin_shufflevector(b, d, 0, 1, 4, 5);
  m[3] = __builtin_shufflevector(b, d, 2, 3, 6, 7);
}

template <typename Tile>
void ReadKeys(const std::byte* tile, int words, std::byte* rows, size_t stride) noexcept {
  const int whole = words / kLanes * kLanes;
  for (int lane = 0; lane < kTilePositions; lane += kLanes) {
    std::byte* const to = rows + static_cast<size_t>(lane) * stride;
    for (int word = 0; word < whole; word += kLanes) {
      Words m[kLanes];
      for (int i = 0; i < kLanes; ++i) m[i] = Tile::Get(tile, word + i, lane);
      Transpose(m);
      for (int i = 0; i < kLanes; ++i) Store(m[i], to + static_cast<size_t>(i) * stride + word * 4);
    }
    for (int word = whole; word < words; ++word) {
      const Words lanes = Tile::Get(tile, word, lane);
      for (int i = 0; i < kLanes; ++i) {
        const uint32_t one = lanes[i];
        Store(one, to + static_cast<size_t>(i) * stride + word * 4);
      }
    }
  }
}

template <typename Tile>
void WriteKeys(std::byte* tile, int words, const std::byte* rows, size_t stride) noexcept {
  const int whole = words / kLanes * kLanes;
  for (int lane = 0; lane < kTilePositions; lane += kLanes) {
    const std::byte* const from = rows + static_cast<size_t>(lane) * stride;
    for (int word = 0; word < whole; word += kLanes) {
      Words m[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        m[i] = Load<Words>(from + static_cast<size_t>(i) * stride + word * 4);
      }
      Transpose(m);
      for (int i = 0; i < kLanes; ++i) Tile::Put(m[i], tile, word + i, lane);
    }
    for (int word = whole; word < words; ++word) {
      Words lanes{};
      for (int i = 0; i < kLanes; ++i) {
        lanes[i] = Load<uint32_t>(from + static_cast<size_t>(i) * stride + word * 4);
      }
      Tile::Put(lanes, tile, word, lane);
    }
  }
}

// Values of bfloat16, and codes of a byte: [lane / 2][v_dim][2].
struct HalfPairs {
  static constexpr int kBytes = 2;
  static constexpr int kStep = 8;  // dimensions at once
  using Vector = Halves;
  static void Split(Vector a, Vector b, std::byte* even, std::byte* odd) noexcept {
    Store(__builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14), even);
    Store(__builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15), odd);
  }
  static void Join(Vector a, Vector b, std::byte* to) noexcept {
    Store(__builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11), to);
    Store(__builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15), to + sizeof(Vector));
  }
};
struct BytePairs {
  static constexpr int kBytes = 1;
  static constexpr int kStep = 16;
  using Vector = Bytes;
  static void Split(Vector a, Vector b, std::byte* even, std::byte* odd) noexcept {
    Store(__builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30),
          even);
    Store(__builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31),
          odd);
  }
  static void Join(Vector a, Vector b, std::byte* to) noexcept {
    Store(__builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23),
          to);
    Store(
        __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31),
        to + sizeof(Vector));
  }
};

template <typename Pairs>
void ReadValuePairs(const std::byte* tile, int v_dim, int dims, std::byte* rows,
                    size_t stride) noexcept {
  constexpr int kBytes = Pairs::kBytes;
  const int whole = dims / Pairs::kStep * Pairs::kStep;
  for (int pair = 0; pair < kTilePositions / 2; ++pair) {
    const std::byte* const from = tile + static_cast<size_t>(pair) * v_dim * 2 * kBytes;
    std::byte* const even = rows + static_cast<size_t>(2 * pair) * stride;
    std::byte* const odd = even + stride;
    for (int d = 0; d < whole; d += Pairs::kStep) {
      const auto a = Load<typename Pairs::Vector>(from + d * 2 * kBytes);
      const auto b = Load<typename Pairs::Vector>(from + d * 2 * kBytes + sizeof a);
      Pairs::Split(a, b, even + d * kBytes, odd + d * kBytes);
    }
    for (int d = whole; d < dims; ++d) {
      std::memcpy(even + d * kBytes, from + d * 2 * kBytes, kBytes);
      std::memcpy(odd + d * kBytes, from + (d * 2 + 1) * kBytes, kBytes);
    }
  }
}

template <typename Pairs>
void WriteValuePairs(std::byte* tile, int v_dim, int dims, const std::byte* rows,
                     size_t stride) noexcept {
  constexpr int kBytes = Pairs::kBytes;
  const int whole = dims / Pairs::kStep * Pairs::kStep;
  for (int pair = 0; pair < kTilePositions / 2; ++pair) {
    std::byte* const to = tile + static_cast<size_t>(pair) * v_dim * 2 * kBytes;
    const std::byte* const even = rows + static_cast<size_t>(2 * pair) * stride;
    const std::byte* const odd = even + stride;
    for (int d = 0; d < whole; d += Pairs::kStep) {
      Pairs::Join(Load<typename Pairs::Vector>(even + d * kBytes),
                  Load<typename Pairs::Vector>(odd + d * kBytes), to + d * 2 * kBytes);
    }
    for (int d = whole; d < dims; ++d) {
      std::memcpy(to + d * 2 * kBytes, even + d * kBytes, kBytes);
      std::memcpy(to + (d * 2 + 1) * kBytes, odd + d * kBytes, kBytes);
    }
    std::memset(to + dims * 2 * kBytes, 0, static_cast<size_t>(v_dim - dims) * 2 * kBytes);
  }
}

// Values of the other types: [lane][v_dim].
void ReadValueRows(const std::byte* tile, size_t tile_stride, size_t bytes, std::byte* rows,
                   size_t stride) noexcept {
  for (size_t lane = 0; lane < kTilePositions; ++lane)
    std::memcpy(rows + lane * stride, tile + lane * tile_stride, bytes);
}

void WriteValueRows(std::byte* tile, size_t tile_stride, size_t bytes, const std::byte* rows,
                    size_t stride) noexcept {
  for (size_t lane = 0; lane < kTilePositions; ++lane) {
    std::memcpy(tile + lane * tile_stride, rows + lane * stride, bytes);
    std::memset(tile + lane * tile_stride + bytes, 0, tile_stride - bytes);
  }
}

// NaN and infinities are the numbers whose exponent is all ones.
template <typename Element>
bool AllFinite(const std::byte* tile, size_t count, Element exponent) noexcept {
  Element found = 0;
  for (size_t i = 0; i < count; ++i) {
    const auto bits = Load<Element>(tile + i * sizeof(Element));
    found = static_cast<Element>(found | ((bits & exponent) == exponent));
  }
  return found == 0;
}

// Whether the first `count` elements are.
bool IsFinite(DType dtype, const std::byte* tile, size_t count) noexcept {
  if (IsQuantised(dtype)) return true;  // codes are
  if (dtype == DType::kF32) return AllFinite<uint32_t>(tile, count, 0x7F800000U);
  return AllFinite<uint16_t>(tile, count, dtype == DType::kBF16 ? 0x7F80U : 0x7C00U);
}

bool HasHalfTiles(DType dtype) { return dtype == DType::kF16 || IsQuantised(dtype); }

}  // namespace

// Whole words of 4 bytes; four codes are one.
bool MovesWholeTiles(const KVLayout& layout) {
  const int multiple = layout.k_element_bytes() == 1 ? 4 : 2;
  return layout.tiled() && layout.qk_head_dim % multiple == 0;
}

void ReadTile(const KVLayout& layout, const std::byte* page, int tile, int head, std::byte* k,
              size_t k_stride, std::byte* v, size_t v_stride) noexcept {
  const std::byte* const keys = page + layout.k_tile_offset(tile, head) * layout.k_element_bytes();
  const size_t element = layout.v_element_bytes();
  const std::byte* const values =
      page + layout.v_offset() + layout.v_tile_offset(tile, head) * element;
  const int words = layout.qk_head_dim * static_cast<int>(layout.k_element_bytes()) / 4;
  if (HasHalfTiles(layout.dtype)) {
    ReadKeys<HalfTile>(keys, words, k, k_stride);
  } else {
    ReadKeys<WordTile>(keys, words, k, k_stride);
  }
  if (layout.latent) return;
  if (layout.v_dtype() == DType::kBF16) {
    ReadValuePairs<HalfPairs>(values, layout.v_dim(), layout.v_head_dim, v, v_stride);
  } else if (IsQuantised(layout.v_dtype())) {
    ReadValuePairs<BytePairs>(values, layout.v_dim(), layout.v_head_dim, v, v_stride);
  } else {
    ReadValueRows(values, static_cast<size_t>(layout.v_dim()) * element,
                  static_cast<size_t>(layout.v_head_dim) * element, v, v_stride);
  }
}

bool WriteTile(const KVLayout& layout, std::byte* page, int tile, int head, const std::byte* k,
               size_t k_stride, const std::byte* v, size_t v_stride) noexcept {
  std::byte* const keys = page + layout.k_tile_offset(tile, head) * layout.k_element_bytes();
  const size_t element = layout.v_element_bytes();
  std::byte* const values = page + layout.v_offset() + layout.v_tile_offset(tile, head) * element;
  const int words = layout.qk_head_dim * static_cast<int>(layout.k_element_bytes()) / 4;
  if (HasHalfTiles(layout.dtype)) {
    WriteKeys<HalfTile>(keys, words, k, k_stride);
  } else {
    WriteKeys<WordTile>(keys, words, k, k_stride);
  }
  if (layout.latent) {
    const size_t used = static_cast<size_t>(layout.qk_head_dim) * kTilePositions * element;
    std::memset(keys + used, 0, layout.k_tile_elements() * element - used);
    // The values are the tile's beginning, an odd last dimension's neighbour besides.
    const int value_dims = KVLayout::RoundUp(layout.v_head_dim, ChainPair(layout.dtype));
    return IsFinite(layout.dtype, keys, static_cast<size_t>(value_dims) * kTilePositions);
  }
  if (IsQuantised(layout.v_dtype())) {
    WriteValuePairs<BytePairs>(values, layout.v_dim(), layout.v_head_dim, v, v_stride);
  } else if (layout.v_dtype() == DType::kBF16) {
    WriteValuePairs<HalfPairs>(values, layout.v_dim(), layout.v_head_dim, v, v_stride);
  } else {
    WriteValueRows(values, static_cast<size_t>(layout.v_dim()) * element,
                   static_cast<size_t>(layout.v_head_dim) * element, v, v_stride);
  }
  return IsFinite(layout.v_dtype(), values, layout.v_tile_elements());
}

}  // namespace quire
