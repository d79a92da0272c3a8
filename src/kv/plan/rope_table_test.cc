#include "kv/plan/rope_table.h"

#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <vector>

namespace quire {
namespace {

constexpr int64_t kLeafPositions = kAngleLeafTiles * kTilePositions;

RopeFrequencies SomeFrequencies() { return {.inv_freq = {1.0, 0.1, 1e-4}, .amplitude = 1.25}; }

class RopeTableTest : public testing::Test {
 protected:
  void Provide(int64_t begin, int64_t end) {
    table_.Want(begin, end);
    table_.AddWanted(*runner_);
  }
  void ExpectRow(int64_t position) {
    const RotaryAngles row = table_.At(position);
    for (size_t i = 0; i < 3; ++i) {
      const double angle = static_cast<double>(position) * SomeFrequencies().inv_freq[i];
      EXPECT_EQ(row.cos[i], static_cast<float>(std::cos(angle) * 1.25)) << position;
      EXPECT_EQ(row.sin[i], static_cast<float>(std::sin(angle) * 1.25)) << position;
    }
  }
  bool IsAbsent(int64_t position) { return std::isnan(table_.At(position).cos[0]); }

  const std::shared_ptr<ParallelRunner> runner_ = CreateThreadPool(2).value();
  RopeTable table_{SomeFrequencies()};
};

TEST_F(RopeTableTest, IsCosAndSinInDoubleRoundedOnce) {
  EXPECT_EQ(table_.dense_end(), 0);
  Provide(0, 100001);
  EXPECT_EQ(table_.dense_end(), 100016);
  EXPECT_EQ(table_.tile_count(), 100016 / 16);
  for (const int64_t position : {0, 1, 15, 16, 4095, 4096, 99999, 100000}) ExpectRow(position);
}

TEST_F(RopeTableTest, HasTilesOnlyWherePositionsWereWanted) {
  const int64_t far = int64_t{INT32_MAX} - 20;
  Provide(far, far + 2);
  Provide(0, 3);
  Provide(40, 41);
  EXPECT_EQ(table_.tile_count(), 3);
  EXPECT_EQ(table_.dense_end(), 16);
  for (const int64_t position : {far, far + 1, int64_t{0}, int64_t{15}, int64_t{40}})
    ExpectRow(position);
  for (const int64_t position :
       {int64_t{16}, int64_t{31}, int64_t{48}, 3 * kLeafPositions, far - 16})
    EXPECT_TRUE(IsAbsent(position)) << position;
  Provide(0, 48);
  EXPECT_EQ(table_.tile_count(), 4) << "only what was missing";
  EXPECT_EQ(table_.dense_end(), 48);
}

TEST_F(RopeTableTest, WhatIsWantedTwiceIsComputedOnce) {
  table_.Want(5, 20);
  table_.Want(0, 40);
  table_.Want(33, 33);
  EXPECT_EQ(table_.wanted_tile_count(), 3);
  table_.ForgetWanted();
  EXPECT_EQ(table_.wanted_tile_count(), 0);
  table_.Want(16, 32);
  EXPECT_EQ(table_.wanted_tile_count(), 1);
  table_.AddWanted(*runner_);
  EXPECT_EQ(table_.tile_count(), 1);
}

TEST_F(RopeTableTest, ASweepDropsAllThatIsNotKept) {
  Provide(0, 3 * kLeafPositions);
  const float* const place = table_.At(100).cos;
  const int64_t bytes = table_.memory_bytes();
  table_.StartSweep();
  table_.Keep(90, 130);
  table_.Keep(10, 20);
  table_.Keep(2 * kLeafPositions + 1, 2 * kLeafPositions + 2);
  table_.Keep(7, 7);
  table_.EndSweep();
  EXPECT_EQ(table_.tile_count(), 4 + 2 + 1);
  EXPECT_EQ(table_.At(100).cos, place);
  for (const int64_t position : {int64_t{0}, int64_t{31}, int64_t{80}, int64_t{143},
                                 2 * kLeafPositions, 2 * kLeafPositions + 15})
    ExpectRow(position);
  for (const int64_t position : {int64_t{32}, int64_t{79}, int64_t{144}, kLeafPositions})
    EXPECT_TRUE(IsAbsent(position)) << position;
  EXPECT_EQ(table_.dense_end(), 32);
  EXPECT_LT(table_.memory_bytes(), bytes / 10);
  Provide(0, 100);
  for (int64_t position = 0; position < 100; ++position) ExpectRow(position);
}

TEST_F(RopeTableTest, TilesWantedBeforeASweepAreStillComputed) {
  Provide(0, 16);
  const int64_t far = 5 * kLeafPositions;
  table_.Want(far, far + 16);
  table_.StartSweep();
  table_.EndSweep();
  table_.AddWanted(*runner_);
  EXPECT_EQ(table_.tile_count(), 1);
  ExpectRow(far);
}

TEST_F(RopeTableTest, ClearGivesAllBack) {
  Provide(0, 10000);
  table_.Clear();
  EXPECT_EQ(table_.tile_count(), 0);
  EXPECT_EQ(table_.memory_bytes(), 0);
  EXPECT_EQ(table_.dense_end(), 0);
  Provide(100, 101);
  ExpectRow(100);
}

TEST_F(RopeTableTest, ProvideKeepsAtMostTheTilesItWasTold) {
  std::vector<int32_t> positions = {0, 1};
  for (int step = 0; step < 1000; ++step) {
    table_.Provide(positions, 10, *runner_);
    for (const int32_t position : positions) ExpectRow(position);
    ASSERT_LE(table_.tile_count(), 10);
    positions = {17 * step, 17 * step + 1, 40};
  }
}

// So far that leaves stand alone, the table is no larger than the plan says.
TEST_F(RopeTableTest, BytesMaxHolds) {
  int64_t tiles = 0;
  for (int64_t range = 0; range < 8; ++range) {
    const int64_t begin = int64_t{INT32_MAX} - (range + 1) * 50000;
    Provide(begin, begin + 20);
    tiles = table_.tile_count();
    EXPECT_LE(table_.memory_bytes(), RopeTable::BytesMax(tiles, range + 1, 3));
  }
}

TEST(SweepPace, IsDueByTilesOrByCalls) {
  SweepPace pace;
  EXPECT_FALSE(pace.IsDue(64));
  EXPECT_TRUE(pace.IsDue(65));
  pace.Swept(1000, 200);
  EXPECT_FALSE(pace.IsDue(364));
  EXPECT_TRUE(pace.IsDue(365));
  for (int call = 0; call < 1064; ++call) pace.CountCall();
  EXPECT_FALSE(pace.IsDue(0));
  pace.CountCall();
  EXPECT_TRUE(pace.IsDue(0));
}

}  // namespace
}  // namespace quire
