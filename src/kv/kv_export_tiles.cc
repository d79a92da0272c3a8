#include "kv/kv_export_tiles.h"

#include <cstdint>
#include <cstring>

#include "kernels/kv_slot.h"

namespace quire {
namespace {

// Vectors of the compiler's own, which every machine has: no instruction set is named here.
using Words = uint32_t __attribute__((vector_size(16)));   // 4 lanes
using Halves = uint16_t __attribute__((vector_size(16)));  // 8 elements
using FourHalves = uint16_t __attribute__((vector_size(8)));
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
struct HalfTile {  // float16: [dim][16 lanes]
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

// Values of bfloat16: [lane / 2][v_dim][2].
void ReadValuePairs(const std::byte* tile, int v_dim, int dims, std::byte* rows,
                    size_t stride) noexcept {
  constexpr int kStep = 8;
  const int whole = dims / kStep * kStep;
  for (int pair = 0; pair < kTilePositions / 2; ++pair) {
    const std::byte* const from = tile + static_cast<size_t>(pair) * v_dim * 4;
    std::byte* const even = rows + static_cast<size_t>(2 * pair) * stride;
    std::byte* const odd = even + stride;
    for (int d = 0; d < whole; d += kStep) {
      const auto a = Load<Halves>(from + d * 4);
      const auto b = Load<Halves>(from + d * 4 + 16);
      Store(__builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14), even + d * 2);
      Store(__builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15), odd + d * 2);
    }
    for (int d = whole; d < dims; ++d) {
      std::memcpy(even + d * 2, from + d * 4, 2);
      std::memcpy(odd + d * 2, from + d * 4 + 2, 2);
    }
  }
}

void WriteValuePairs(std::byte* tile, int v_dim, int dims, const std::byte* rows,
                     size_t stride) noexcept {
  constexpr int kStep = 8;
  const int whole = dims / kStep * kStep;
  for (int pair = 0; pair < kTilePositions / 2; ++pair) {
    std::byte* const to = tile + static_cast<size_t>(pair) * v_dim * 4;
    const std::byte* const even = rows + static_cast<size_t>(2 * pair) * stride;
    const std::byte* const odd = even + stride;
    for (int d = 0; d < whole; d += kStep) {
      const auto a = Load<Halves>(even + d * 2);
      const auto b = Load<Halves>(odd + d * 2);
      Store(__builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11), to + d * 4);
      Store(__builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15), to + d * 4 + 16);
    }
    for (int d = whole; d < dims; ++d) {
      std::memcpy(to + d * 4, even + d * 2, 2);
      std::memcpy(to + d * 4 + 2, odd + d * 2, 2);
    }
    std::memset(to + dims * 4, 0, static_cast<size_t>(v_dim - dims) * 4);
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

}  // namespace

bool MovesWholeTiles(const KVLayout& layout) {
  return layout.tiled() && layout.qk_head_dim == layout.k_dim();
}

void ReadTile(const KVLayout& layout, const std::byte* page, int tile, int head, std::byte* k,
              size_t k_stride, std::byte* v, size_t v_stride) noexcept {
  const size_t element = static_cast<size_t>(DTypeBytes(layout.dtype));
  const std::byte* const keys = page + layout.k_tile_offset(tile, head) * element;
  const std::byte* const values =
      page + layout.v_offset() + layout.v_tile_offset(tile, head) * element;
  const int words = layout.k_dim() * static_cast<int>(element) / 4;
  if (layout.dtype == DType::kF16) {
    ReadKeys<HalfTile>(keys, words, k, k_stride);
  } else {
    ReadKeys<WordTile>(keys, words, k, k_stride);
  }
  if (layout.dtype == DType::kBF16) {
    ReadValuePairs(values, layout.v_dim(), layout.v_head_dim, v, v_stride);
  } else {
    ReadValueRows(values, static_cast<size_t>(layout.v_dim()) * element,
                  static_cast<size_t>(layout.v_head_dim) * element, v, v_stride);
  }
}

bool WriteTile(const KVLayout& layout, std::byte* page, int tile, int head, const std::byte* k,
               size_t k_stride, const std::byte* v, size_t v_stride) noexcept {
  const size_t element = static_cast<size_t>(DTypeBytes(layout.dtype));
  std::byte* const keys = page + layout.k_tile_offset(tile, head) * element;
  std::byte* const values = page + layout.v_offset() + layout.v_tile_offset(tile, head) * element;
  const int words = layout.k_dim() * static_cast<int>(element) / 4;
  if (layout.dtype == DType::kF16) {
    WriteKeys<HalfTile>(keys, words, k, k_stride);
  } else {
    WriteKeys<WordTile>(keys, words, k, k_stride);
  }
  if (layout.dtype == DType::kBF16) {
    WriteValuePairs(values, layout.v_dim(), layout.v_head_dim, v, v_stride);
  } else {
    WriteValueRows(values, static_cast<size_t>(layout.v_dim()) * element,
                   static_cast<size_t>(layout.v_head_dim) * element, v, v_stride);
  }
  const size_t count = layout.v_tile_elements();
  if (layout.dtype == DType::kF32) return AllFinite<uint32_t>(values, count, 0x7F800000U);
  return AllFinite<uint16_t>(values, count, layout.dtype == DType::kBF16 ? 0x7F80U : 0x7C00U);
}

}  // namespace quire
