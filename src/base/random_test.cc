#include "base/random.h"

#include <gtest/gtest.h>

#include <set>

namespace quire {
namespace {

using Words = std::array<uint32_t, 4>;

// The known-answer vectors of Random123.
TEST(Philox, KnownAnswers) {
  EXPECT_EQ(Philox4x32({0, 0, 0, 0}, {0, 0}),
            (Words{0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8}));
  EXPECT_EQ(Philox4x32({~0u, ~0u, ~0u, ~0u}, {~0u, ~0u}),
            (Words{0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD}));
  EXPECT_EQ(Philox4x32({0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344}, {0xA4093822, 0x299F31D0}),
            (Words{0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1}));
}

// Sampled tokens depend on these values: they must never change.
TEST(RandomBits, IsFixedForEver) {
  EXPECT_EQ(RandomBits(0, 0, 0), 0xE169C58D6627E8D5u);
  EXPECT_EQ(RandomBits(~uint64_t{0}, ~uint64_t{0}, ~uint64_t{0}), 0x41C83B0E408F276Du);
}

TEST(RandomBits, DiffersInEveryArgument) {
  std::set<uint64_t> seen;
  for (uint64_t high : {uint64_t{0}, uint64_t{1} << 32}) {
    for (uint64_t i = 0; i < 8; ++i) {
      seen.insert(RandomBits(high + i, 5, 5));
      seen.insert(RandomBits(5, high + i, 5));
      seen.insert(RandomBits(5, 5, high + i));
    }
  }
  EXPECT_EQ(seen.size(), 2u * 3 * 8 - 2);  // (5, 5, 5) came three times
}

TEST(RandomUniform, LiesInTheUnitIntervalWithTheRightMean) {
  double sum = 0;
  for (uint64_t i = 0; i < 4096; ++i) {
    const double u = RandomUniform(1, 2, i);
    ASSERT_GE(u, 0);
    ASSERT_LT(u, 1);
    sum += u;
  }
  EXPECT_NEAR(sum / 4096, 0.5, 5 * 0.289 / 64);
}

TEST(RandomSequence, NormalHasMeanZeroAndVarianceOne) {
  RandomSequence random(3);
  double sum = 0;
  double squares = 0;
  for (int i = 0; i < 4096; ++i) {
    const double x = random.Normal();
    sum += x;
    squares += x * x;
  }
  EXPECT_NEAR(sum / 4096, 0, 5.0 / 64);
  EXPECT_NEAR(squares / 4096, 1, 5 * 1.42 / 64);
}

TEST(RandomSequence, BelowReachesEveryValue) {
  RandomSequence random(4);
  std::set<int64_t> seen;
  for (int i = 0; i < 200; ++i) seen.insert(random.Below(5));
  EXPECT_EQ(seen, (std::set<int64_t>{0, 1, 2, 3, 4}));
}

}  // namespace
}  // namespace quire
