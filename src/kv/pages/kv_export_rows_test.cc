// Ranges of stored tokens as rows and back, against the functions for single tokens.
#include "kv/pages/kv_export_rows.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "kernels/kv_slot.h"

namespace quire {
namespace {

constexpr int kPages = 3;

struct Pool {
  explicit Pool(const KVLayout& layout)
      : memory(layout.page_bytes() * kPages, std::byte{0xFF}),
        flags(static_cast<size_t>(kPages * layout.tiles_per_page()), 1),
        pages{layout, memory.data(), flags.data()} {}
  std::vector<std::byte> memory;
  std::vector<uint8_t> flags;
  KVPages pages;
};

struct Rows {
  Rows(const KVLayout& layout, size_t count)
      : heads(static_cast<size_t>(layout.num_kv_heads)),
        k_bytes(heads * static_cast<size_t>(layout.qk_head_dim) * layout.k_element_bytes()),
        v_bytes(heads * static_cast<size_t>(layout.v_head_dim) * layout.v_element_bytes()),
        k(k_bytes * count),
        v(v_bytes * count),
        k_scale(heads * count),
        v_scale(heads * count) {}
  RowsOut out() { return {k.data(), v.data(), k_scale.data(), v_scale.data()}; }
  RowsIn in() const { return {k.data(), v.data(), k_scale.data(), v_scale.data()}; }
  size_t heads;
  size_t k_bytes, v_bytes;  // of a row
  std::vector<std::byte> k, v;
  std::vector<float> k_scale, v_scale;  // not used where there are none
};

// Every head dimension meets the vectors' width differently.
std::vector<KVLayout> Layouts() {
  std::vector<KVLayout> layouts;
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const int k : {2, 4, 6, 8, 10, 16, 5, 64, 128}) {
      for (const int v : {1, 7, 8, 16, 21, 128}) layouts.push_back({dtype, 2, k, v, 32});
    }
    layouts.push_back({dtype, 3, 8, 8, 5});  // rows
    layouts.push_back({dtype, 1, 8, 16, 16});
  }
  for (const DType dtype : {DType::kI8, DType::kF8E4M3}) {
    for (const int k : {4, 6, 8, 20, 5, 128}) {
      for (const int v : {1, 15, 16, 37, 128}) layouts.push_back({dtype, 2, k, v, 32});
    }
    layouts.push_back({dtype, 3, 8, 8, 5});
    for (const DType other : {DType::kF32, DType::kF16, DType::kBF16, DType::kI8}) {
      layouts.push_back({dtype, 2, 12, 21, 32, other});
      layouts.push_back({other, 2, 12, 21, 32, dtype});
      layouts.push_back({other, 3, 7, 9, 5, dtype});
    }
  }
  return layouts;
}

// Slots of positions [first, first + count), page p / page_size, but pages in another order.
std::vector<AppendTarget> SlotsOf(const KVLayout& layout, int first, int count) {
  std::vector<AppendTarget> slots;
  for (int p = first; p < first + count; ++p) {
    slots.push_back({.page = kPages - 1 - p / layout.page_size, .slot = p % layout.page_size});
  }
  return slots;
}

// 1 where a slot begins its tile among these.
std::vector<uint8_t> Opens(const std::vector<AppendTarget>& slots) {
  std::vector<uint8_t> opens;
  for (size_t i = 0; i < slots.size(); ++i) {
    const bool same = i > 0 && slots[i].page == slots[i - 1].page &&
                      slots[i].slot / kTilePositions == slots[i - 1].slot / kTilePositions;
    opens.push_back(same ? 0 : 1);
  }
  return opens;
}

Rows RandomRows(const KVLayout& layout, size_t count, uint32_t seed) {
  Rows rows(layout, count);
  std::minstd_rand random(seed);
  for (std::byte& byte : rows.k) byte = static_cast<std::byte>(random() >> 8);
  for (std::byte& byte : rows.v) byte = static_cast<std::byte>((random() >> 8) & 0x3F);  // finite
  for (float& scale : rows.k_scale) scale = static_cast<float>(random() >> 8);
  for (float& scale : rows.v_scale) scale = static_cast<float>(random() >> 8);
  return rows;
}

// One token after the other; codes as append_kv takes them.
void StoreSingly(const KVPages& pages, const std::vector<AppendTarget>& slots,
                 const std::vector<uint8_t>& opens, const Rows& rows, ParallelRunner& runner) {
  const KVLayout& layout = pages.layout;
  if (layout.scale_parts() == 0 && layout.dtype == layout.v_dtype()) {
    for (size_t i = 0; i < slots.size(); ++i) {
      WriteSlot(pages, slots[i], layout.dtype, rows.k.data() + i * rows.k_bytes,
                rows.v.data() + i * rows.v_bytes, opens[i] != 0);
    }
    return;
  }
  const int64_t k_row = layout.num_kv_heads * layout.qk_head_dim;
  const int64_t v_row = layout.num_kv_heads * layout.v_head_dim;
  Backends().back()->append_kv({.pages = pages,
                                .row_count = static_cast<int64_t>(slots.size()),
                                .k = {rows.k.data(), layout.dtype, k_row, layout.qk_head_dim},
                                .v = {rows.v.data(), layout.v_dtype(), v_row, layout.v_head_dim},
                                .k_scale = rows.k_scale.data(),
                                .v_scale = rows.v_scale.data(),
                                .rotary = {},
                                .targets = slots.data(),
                                .opens_tile = opens.data()},
                               runner);
}

TEST(KVExportRows, ReadWhatSingleTokensRead) {
  const auto runner = CreateThreadPool(2).value();
  for (const KVLayout& layout : Layouts()) {
    const int all = layout.page_size * kPages;
    Pool pool(layout);
    const Rows written = RandomRows(layout, static_cast<size_t>(all), 3);
    const std::vector<AppendTarget> everywhere = SlotsOf(layout, 0, all);
    const std::vector<uint8_t> opens = Opens(everywhere);
    StoreSingly(pool.pages, everywhere, opens, written, *runner);
    for (const auto& [first, count] : {std::pair(0, all), {1, all - 2}, {7, 3}, {15, 2}, {4, 0}}) {
      if (first + count > all) continue;
      Rows read(layout, static_cast<size_t>(count));
      ReadRows(pool.pages, SlotsOf(layout, first, count), read.out(), *runner);
      const size_t row = static_cast<size_t>(first);
      const std::string what =
          std::string(DTypeName(layout.dtype)) + " " + std::string(DTypeName(layout.v_dtype())) +
          " " + std::to_string(layout.qk_head_dim) + " " + std::to_string(layout.v_head_dim);
      const auto same = [&](const auto& got, const auto& expected, size_t row_bytes) {
        return std::equal(got.begin(), got.end(),
                          expected.begin() + static_cast<ptrdiff_t>(row * row_bytes));
      };
      ASSERT_TRUE(same(read.k, written.k, written.k_bytes)) << what;
      ASSERT_TRUE(same(read.v, written.v, written.v_bytes)) << what;
      for (size_t i = 0; i < read.k_scale.size(); ++i) {
        const size_t at = row * read.heads + i;
        if (IsQuantised(layout.dtype)) {
          ASSERT_EQ(read.k_scale[i], written.k_scale[at]) << what;
        }
        if (IsQuantised(layout.v_dtype())) {
          ASSERT_EQ(read.v_scale[i], written.v_scale[at]) << what;
        }
      }
    }
  }
}

// Byte for byte the same pages, padding and flags included.
TEST(KVExportRows, WholeTilesAreWrittenAsSingleTokensAre) {
  const auto runner = CreateThreadPool(2).value();
  for (const KVLayout& layout : Layouts()) {
    const std::vector<AppendTarget> slots = SlotsOf(layout, 0, layout.page_size * kPages);
    const std::vector<uint8_t> opens = Opens(slots);
    const RowRun run = FirstRun(layout, slots, opens.data());
    if (!run.whole_tiles) {
      const int multiple = IsQuantised(layout.dtype) ? 4 : 2;
      EXPECT_TRUE(!layout.tiled() || layout.qk_head_dim % multiple != 0);
      continue;
    }
    EXPECT_EQ(run.rows, static_cast<int64_t>(slots.size()));
    struct BadValue {
      int row;
      int head;
    };
    const int last_head = layout.num_kv_heads - 1;
    for (const BadValue bad : {BadValue{-1, 0}, BadValue{0, last_head}, BadValue{17, 0},
                               BadValue{17, last_head}, BadValue{47, last_head / 2}}) {
      Rows rows = RandomRows(layout, slots.size(), 5);
      if (bad.row >= 0 && !IsQuantised(layout.v_dtype())) {  // the head's last value is not finite
        const size_t size = layout.v_element_bytes();
        const size_t end = static_cast<size_t>(bad.row) * rows.v_bytes +
                           static_cast<size_t>((bad.head + 1) * layout.v_head_dim) * size;
        const uint32_t infinity = layout.v_dtype() == DType::kF16 ? 0x7C007C00U : 0x7F800000U;
        std::memcpy(rows.v.data() + end - size,
                    reinterpret_cast<const std::byte*>(&infinity) + 4 - size, size);
      }
      Pool want(layout);
      Pool got(layout);
      StoreSingly(want.pages, slots, opens, rows, *runner);
      WriteTiles(got.pages, slots, rows.in(), *runner);
      ASSERT_EQ(got.memory, want.memory);
      ASSERT_EQ(got.flags, want.flags) << "row " << bad.row << ", head " << bad.head;
    }
  }
}

TEST(KVExportRows, RunsEndWhereTilesBeginAndEnd) {
  const KVLayout layout{DType::kBF16, 2, 8, 8, 32};
  const std::vector<AppendTarget> slots =
      SlotsOf(layout, 10, 60);  // tiles from row 6 on: 3 of them
  std::vector<uint8_t> opens = Opens(slots);
  const auto run_at = [&](size_t row) {
    return FirstRun(layout, std::span(slots).subspan(row), opens.data() + row);
  };
  EXPECT_EQ(run_at(0).rows, 6);
  EXPECT_FALSE(run_at(0).whole_tiles);
  EXPECT_EQ(run_at(6).rows, 48);
  EXPECT_TRUE(run_at(6).whole_tiles);
  EXPECT_EQ(run_at(54).rows, 6);
  EXPECT_FALSE(run_at(54).whole_tiles);
  opens[22] = 0;  // others have slots of the second tile
  EXPECT_EQ(run_at(6).rows, 16);
  EXPECT_EQ(run_at(22).rows, 16);
  EXPECT_FALSE(run_at(22).whole_tiles);
}

}  // namespace
}  // namespace quire
