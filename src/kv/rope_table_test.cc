#include "kv/rope_table.h"

#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <vector>

namespace quire {
namespace {

RopeFrequencies SomeFrequencies() { return {.inv_freq = {1.0, 0.1, 1e-4}, .amplitude = 1.25}; }

TEST(RopeTable, IsCosAndSinInDoubleRoundedOnce) {
  const std::shared_ptr<ParallelRunner> runner = CreateThreadPool(1);
  RopeTable table(SomeFrequencies());
  EXPECT_EQ(table.position_count(), 0);
  table.Grow(100001, *runner);
  ASSERT_GE(table.position_count(), 100001);
  ASSERT_EQ(table.pair_count(), 3);
  for (const int64_t position : {0, 1, 255, 256, 99999, 100000}) {
    for (int64_t i = 0; i < 3; ++i) {
      const double angle =
          static_cast<double>(position) * SomeFrequencies().inv_freq[static_cast<size_t>(i)];
      EXPECT_EQ(table.cos()[position * 3 + i], static_cast<float>(std::cos(angle) * 1.25));
      EXPECT_EQ(table.sin()[position * 3 + i], static_cast<float>(std::sin(angle) * 1.25));
    }
  }
}

TEST(RopeTable, ItsStepsOfGrowthCannotBeSeen) {
  const std::shared_ptr<ParallelRunner> runner = CreateThreadPool(2);
  RopeTable once(SomeFrequencies());
  once.Grow(2000, *runner);
  RopeTable steps(SomeFrequencies());
  for (const int64_t count : {1, 5, 300, 299, 301, 1024, 2000}) steps.Grow(count, *runner);
  ASSERT_EQ(once.position_count(), steps.position_count());
  for (int64_t i = 0; i < 2000 * 3; ++i) {
    ASSERT_EQ(once.cos()[i], steps.cos()[i]) << i;
    ASSERT_EQ(once.sin()[i], steps.sin()[i]) << i;
  }
}

TEST(RopeRows, GivesTheTablesRowsAndThoseBehindItsEnd) {
  const std::shared_ptr<ParallelRunner> runner = CreateThreadPool(1);
  RopeTable whole(SomeFrequencies());
  whole.Grow(1000, *runner);
  RopeTable table(SomeFrequencies());
  table.Grow(1, *runner);
  ASSERT_LT(table.position_count(), 900);
  RopeRows rows;
  for (int round = 0; round < 2; ++round) {
    rows.Reserve(3, 3);
    rows.Clear();
    for (const int64_t position : {0, 255, 256, 900, 999}) {
      const RotaryAngles angles = rows.At(table, position);
      EXPECT_EQ(angles.cos == table.cos() + position * 3, position < table.position_count());
      for (int64_t i = 0; i < 3; ++i) {
        EXPECT_EQ(angles.cos[i], whole.cos()[position * 3 + i]) << position;
        EXPECT_EQ(angles.sin[i], whole.sin()[position * 3 + i]) << position;
      }
    }
  }
}

}  // namespace
}  // namespace quire
