// Single stored tokens: where they lie, and that moving them keeps their bits.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "kernels/backend.h"
#include "kernels/kv_slot.h"
#include "tensor/half.h"

namespace quire {
namespace {

constexpr uint8_t kPoison = 0xFF;  // a NaN in every element type

struct Pool {
  std::vector<std::byte> memory;
  std::vector<uint8_t> v_nonfinite;
  KVPages pages;

  Pool(const KVLayout& layout, int page_count)
      : memory(layout.page_bytes() * static_cast<size_t>(page_count), std::byte{kPoison}),
        v_nonfinite(static_cast<size_t>(page_count * layout.tiles_per_page()), 1),
        pages{layout, memory.data(), v_nonfinite.data()} {}

  uint16_t Half(int page, size_t element) const {
    uint16_t bits;
    std::memcpy(&bits, PageAt(pages, page) + element * sizeof bits, sizeof bits);
    return bits;
  }
  float Single(int page, size_t element) const {
    float value;
    std::memcpy(&value, PageAt(pages, page) + element * sizeof value, sizeof value);
    return value;
  }
};

// Key d of head h is 100 h + d + 1, value d is its negative; small integers are exact in all
// element types.
std::vector<float> Row(int heads, int dim, float sign) {
  std::vector<float> row;
  for (int h = 0; h < heads; ++h) {
    for (int d = 0; d < dim; ++d) row.push_back(sign * static_cast<float>(100 * h + d + 1));
  }
  return row;
}

const std::vector<KVLayout> kLayouts = {
    {DType::kF32, 2, 5, 7, 16},  {DType::kF16, 2, 5, 7, 16},  {DType::kBF16, 2, 5, 7, 16},
    {DType::kF32, 1, 16, 16, 3}, {DType::kF16, 3, 7, 20, 20}, {DType::kBF16, 3, 8, 16, 64},
    {DType::kBF16, 1, 1, 1, 1},
};

TEST(SlotCopies, TheTiledLayoutIsWhatItsHeaderSays) {
  Pool pool({DType::kBF16, 2, 5, 7, 32}, 2);
  const std::vector<float> k = Row(2, 5, 1.0F);
  const std::vector<float> v = Row(2, 7, -1.0F);
  // Slot 21 is lane 5 of tile 1. K: [tile][head][k_dim 6 / 2][16][2], V after it:
  // [tile][head][8][v_dim 16][2].
  WriteSlot(pool.pages, {1, 21}, DType::kF32, k.data(), v.data(), true);
  for (size_t h = 0; h < 2; ++h) {
    for (size_t d = 0; d < 5; ++d) {
      const size_t element = ((1 * 2 + h) * 3 + d / 2) * 32 + 5 * 2 + d % 2;
      EXPECT_EQ(Bf16ToF32(pool.Half(1, element)), static_cast<float>(100 * h + d + 1));
    }
    for (size_t d = 0; d < 7; ++d) {
      const size_t element = 32 * 2 * 6 + ((1 * 2 + h) * 8 + 5 / 2) * 32 + d * 2 + 5 % 2;
      EXPECT_EQ(Bf16ToF32(pool.Half(1, element)), -static_cast<float>(100 * h + d + 1));
    }
  }
  Pool single({DType::kF32, 2, 5, 7, 32}, 2);
  WriteSlot(single.pages, {1, 21}, DType::kF32, k.data(), v.data(), true);
  for (size_t h = 0; h < 2; ++h) {
    EXPECT_EQ(single.Single(1, ((1 * 2 + h) * 6 + 4) * 16 + 5), static_cast<float>(100 * h + 5));
    EXPECT_EQ(single.Single(1, 32 * 2 * 6 + ((1 * 2 + h) * 16 + 5) * 16 + 6),
              -static_cast<float>(100 * h + 7));
  }
}

TEST(SlotCopies, WhatIsWrittenIsReadBackInAnyLayout) {
  for (const KVLayout& layout : kLayouts) {
    Pool pool(layout, 3);
    const std::vector<float> k = Row(layout.num_kv_heads, layout.qk_head_dim, 1.0F);
    const std::vector<float> v = Row(layout.num_kv_heads, layout.v_head_dim, -1.0F);
    for (int slot = 0; slot < layout.page_size; ++slot) {
      std::vector<float> k_slot = k;
      for (float& x : k_slot) x += static_cast<float>(slot % 8);
      WriteSlot(pool.pages, {1, slot}, DType::kF32, k_slot.data(), v.data(),
                slot % kTilePositions == 0);
    }
    for (int slot = 0; slot < layout.page_size; ++slot) {
      std::vector<float> k_read(k.size());
      std::vector<float> v_read(v.size());
      ReadSlot(pool.pages, {1, slot}, DType::kF32, k_read.data(), v_read.data());
      for (float& x : k_read) x -= static_cast<float>(slot % 8);
      EXPECT_EQ(k_read, k) << "page size " << layout.page_size << ", slot " << slot;
      EXPECT_EQ(v_read, v) << "page size " << layout.page_size << ", slot " << slot;
    }
    // The pages beside it are untouched.
    for (size_t i = 0; i < layout.page_bytes(); ++i) {
      ASSERT_EQ(pool.memory[i], std::byte{kPoison});
      ASSERT_EQ(pool.memory[2 * layout.page_bytes() + i], std::byte{kPoison});
    }
  }
}

TEST(SlotCopies, OpeningATileZeroesItsValuesAndItsFlag) {
  Pool pool({DType::kBF16, 2, 6, 16, 32}, 1);
  const std::vector<float> k = Row(2, 6, 1.0F);
  const std::vector<float> v = Row(2, 16, 1.0F);
  WriteSlot(pool.pages, {0, 18}, DType::kF32, k.data(), v.data(), true);
  EXPECT_EQ(pool.v_nonfinite, (std::vector<uint8_t>{1, 0}));
  std::vector<uint16_t> k_read(12);
  std::vector<uint16_t> v_read(32);
  ReadSlot(pool.pages, {0, 19}, DType::kBF16, k_read.data(), v_read.data());
  EXPECT_EQ(v_read, std::vector<uint16_t>(32, 0)) << "the same tile";
  ReadSlot(pool.pages, {0, 15}, DType::kBF16, k_read.data(), v_read.data());
  EXPECT_EQ(v_read, std::vector<uint16_t>(32, 0xFFFF)) << "another tile";
}

TEST(SlotCopies, PaddingIsZero) {
  for (const KVLayout& layout : kLayouts) {
    Pool pool(layout, 1);
    const std::vector<float> k = Row(layout.num_kv_heads, layout.qk_head_dim, 1.0F);
    const std::vector<float> v = Row(layout.num_kv_heads, layout.v_head_dim, 1.0F);
    WriteSlot(pool.pages, {0, 0}, DType::kF32, k.data(), v.data(), false);
    const auto bytes = static_cast<size_t>(DTypeBytes(layout.dtype));
    const std::vector<std::byte> zero(bytes);
    for (int h = 0; h < layout.num_kv_heads; ++h) {
      for (int d = layout.qk_head_dim; d < layout.k_dim(); ++d) {
        const size_t at = KeyOfSlot(layout, 0, h)[d] * bytes;
        EXPECT_EQ(std::memcmp(pool.memory.data() + at, zero.data(), bytes), 0);
      }
      for (int d = layout.v_head_dim; d < layout.v_dim(); ++d) {
        const size_t at = layout.v_offset() + ValueOfSlot(layout, 0, h)[d] * bytes;
        EXPECT_EQ(std::memcmp(pool.memory.data() + at, zero.data(), bytes), 0);
      }
    }
  }
}

TEST(SlotCopies, CopiesKeepBitsAndFlags) {
  for (const KVLayout& layout : kLayouts) {
    Pool pool(layout, 2);
    const auto k_count = static_cast<size_t>(layout.num_kv_heads * layout.qk_head_dim);
    const auto v_count = static_cast<size_t>(layout.num_kv_heads * layout.v_head_dim);
    const auto bytes = static_cast<size_t>(DTypeBytes(layout.dtype));
    const int last = layout.page_size - 1;
    std::vector<std::byte> k(k_count * bytes);
    std::vector<std::byte> v(v_count * bytes);
    // Every bit pattern may occur, NaN with payloads included.
    for (size_t i = 0; i < k.size(); ++i) k[i] = static_cast<std::byte>(37 * i + 0x7F);
    for (size_t i = 0; i < v.size(); ++i) v[i] = std::byte{0x3D};  // finite in every type
    WriteSlot(pool.pages, {0, 0}, layout.dtype, k.data(), v.data(), true);
    const AppendTarget from[] = {{0, 0}};
    const AppendTarget to[] = {{1, last}};
    const uint8_t opens[] = {1};
    CopySlots(pool.pages, from, to, opens);
    std::vector<std::byte> k_read(k.size());
    std::vector<std::byte> v_read(v.size());
    ReadSlot(pool.pages, to[0], layout.dtype, k_read.data(), v_read.data());
    EXPECT_EQ(k_read, k);
    EXPECT_EQ(v_read, v);
    EXPECT_EQ(pool.v_nonfinite[TileFlag(layout, 1, last)], 0);
    std::memset(v.data() + (v_count - 1) * bytes, kPoison, bytes);
    WriteSlot(pool.pages, {0, 0}, layout.dtype, k.data(), v.data(), true);
    EXPECT_EQ(pool.v_nonfinite[TileFlag(layout, 0, 0)], 1);
    CopySlots(pool.pages, from, to, opens);
    ReadSlot(pool.pages, to[0], layout.dtype, k_read.data(), v_read.data());
    EXPECT_EQ(v_read, v);
    EXPECT_EQ(pool.v_nonfinite[TileFlag(layout, 1, last)], 1);
  }
}

TEST(SlotCopies, AValueThatOverflowsTheStoredTypeIsFlagged) {
  Pool pool({DType::kF16, 1, 2, 16, 16}, 1);
  const std::vector<float> k = {1.0F, 2.0F};
  std::vector<float> v(16, 65504.0F);
  WriteSlot(pool.pages, {0, 0}, DType::kF32, k.data(), v.data(), true);
  EXPECT_EQ(pool.v_nonfinite[0], 0);
  v[3] = 65520.0F;  // rounds to infinity
  WriteSlot(pool.pages, {0, 1}, DType::kF32, k.data(), v.data(), false);
  EXPECT_EQ(pool.v_nonfinite[0], 1);
}

}  // namespace
}  // namespace quire
