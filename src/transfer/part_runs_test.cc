#include "transfer/part_runs.h"

#include <gtest/gtest.h>

#include <vector>

namespace quire {
namespace {

// The parts of rows [first, first + count).
std::vector<int64_t> PartsOf(int64_t first, int64_t count, int64_t rows_max) {
  std::vector<int64_t> parts;
  for (const int64_t end = first + count; first < end; first += parts.back())
    parts.push_back(RowsOfPart(first, end - first, rows_max));
  return parts;
}

TEST(PartRuns, RowsAreCutWhereTilesEnd) {
  using Parts = std::vector<int64_t>;
  EXPECT_EQ(PartsOf(0, 256, 256), (Parts{256}));
  EXPECT_EQ(PartsOf(0, 256, 255), (Parts{128, 128}));
  EXPECT_EQ(PartsOf(0, 100, 40), (Parts{32, 32, 36}));
  EXPECT_EQ(PartsOf(5, 100, 40), (Parts{27, 32, 32, 9}));
  EXPECT_EQ(PartsOf(15, 18, 17), (Parts{1, 17}));
  // Nothing is cut that need not be, nor where a part is smaller than a tile.
  EXPECT_EQ(PartsOf(5, 40, 40), (Parts{40}));
  EXPECT_EQ(PartsOf(5, 40, 15), (Parts{15, 15, 10}));
}

TEST(PartRuns, EachPartHoldsARowAndNoMoreThanFit) {
  for (int64_t first = 0; first < 20; ++first) {
    for (int64_t count = 1; count < 100; ++count) {
      for (int64_t rows_max = 1; rows_max < 40; ++rows_max) {
        int64_t sum = 0;
        for (const int64_t rows : PartsOf(first, count, rows_max)) {
          ASSERT_GE(rows, 1);
          ASSERT_LE(rows, rows_max);
          sum += rows;
        }
        ASSERT_EQ(sum, count) << first << " " << rows_max;
      }
    }
  }
}

TEST(PartRuns, TensorsSideBySideMakeOneRun) {
  std::vector<std::byte> memory(60);
  const LayerKV rows{.k = TensorView(memory.data(), DType::kI8, {5, 2, 4}),
                     .v = TensorView(memory.data() + 40, DType::kI8, {5, 2, 2})};
  const auto all = PartRuns(rows, {0, 5, 0, 2});
  ASSERT_EQ(all.size(), 1U);
  EXPECT_EQ(all[0].size(), 60U);
  EXPECT_EQ(PartRuns(rows, {1, 3, 0, 2}).size(), 2U);
  EXPECT_EQ(PartRuns(rows, {1, 3, 1, 1}).size(), 6U);
  EXPECT_EQ(RowBytes(rows, 1), 6);
}

}  // namespace
}  // namespace quire
