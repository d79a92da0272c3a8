#include "engine/prefix/evicted_prefixes.h"

#include <gtest/gtest.h>

#include <numeric>
#include <vector>

namespace quire {
namespace {

using Tokens = std::vector<int32_t>;

Tokens Text(int64_t count, int32_t first = 0) {
  Tokens tokens(static_cast<size_t>(count));
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

TEST(EvictedPrefixes, ATextThatGoesOnIntoWhatWasGivenUpFindsIt) {
  EvictedPrefixes evicted;
  evicted.Note({"ann"}, 1, Text(100), 40, 7);
  EXPECT_EQ(evicted.Find({"ann"}, Text(100), 40), 7);
  EXPECT_EQ(evicted.Find({"ann"}, Text(56), 40), 7) << "16 tokens of it are enough";
  EXPECT_EQ(evicted.Find({"ann"}, Text(55), 40), std::nullopt);
  EXPECT_EQ(evicted.Find({"ann"}, Text(100), 56), std::nullopt) << "that much is known again";
  Tokens other = Text(100);
  other[50] = -1;
  EXPECT_EQ(evicted.Find({"ann"}, other, 40), std::nullopt);
}

TEST(EvictedPrefixes, NobodyFindsWhatWasOfAnother) {
  EvictedPrefixes evicted;
  evicted.Note({"ann"}, 1, Text(100), 0, 7);
  EXPECT_EQ(evicted.Find({"bob"}, Text(100), 0), std::nullopt);
  EXPECT_EQ(evicted.Find({""}, Text(100), 0), std::nullopt);
  EXPECT_EQ(evicted.Find({"ann", true}, Text(100), 0), std::nullopt);
}

TEST(EvictedPrefixes, TheNewestAreKept) {
  EvictedPrefixes evicted;
  for (int32_t i = 0; i < 20; ++i) evicted.Note({"ann"}, i, Text(10, i), 0, i);
  for (int32_t i = 0; i < 20; ++i) {
    const bool is_kept = i >= 20 - EvictedPrefixes::kRecordsMax;
    EXPECT_EQ(evicted.Find({"ann"}, Text(30, i), 0).has_value(), is_kept) << i;
  }
  evicted.Note({"ann"}, 20, Text(10, 19), 0, 90);
  EXPECT_EQ(evicted.Find({"ann"}, Text(30, 19), 0), 90);
}

TEST(EvictedPrefixes, ASequenceThatShrinksTakesTheRoomOfOne) {
  EvictedPrefixes evicted;
  evicted.Note({"ann"}, 1, Text(50, 100), 0, 7);
  for (int64_t kept = 400; kept >= 0; kept -= 10) {
    evicted.Note({"ann"}, 2, Text(kept + 10), kept, 8 + kept);
    EXPECT_EQ(evicted.Find({"ann"}, Text(500), kept), 8 + kept);
  }
  EXPECT_EQ(evicted.Find({"ann"}, Text(50, 100), 0), 7);
}

TEST(EvictedPrefixes, SpacesAreBounded) {
  EvictedPrefixes evicted;
  for (int64_t i = 0; i <= EvictedPrefixes::kSpacesMax; ++i)
    evicted.Note({std::to_string(i)}, i, Text(10), 0, i == 5 ? -1 : i);
  EXPECT_EQ(evicted.space_count(), EvictedPrefixes::kSpacesMax);
  EXPECT_EQ(evicted.Find({"5"}, Text(10), 0), std::nullopt) << "its record was the oldest";
  EXPECT_EQ(evicted.Find({"4"}, Text(10), 0), 4);
}

}  // namespace
}  // namespace quire
