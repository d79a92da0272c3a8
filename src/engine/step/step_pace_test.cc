#include "engine/step/step_pace.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>

namespace quire {
namespace {

constexpr int64_t kTokenNs = 1'000'000;

TEST(StepPace, OnlyStepsWithPromptsAndWithoutLoadsCount) {
  StepPace pace;
  EXPECT_EQ(pace.seconds_per_token(), 0);
  pace.Note({.tokens = 4, .is_telling = false}, 4 * kTokenNs);
  EXPECT_EQ(pace.seconds_per_token(), 0);
  for (int i = 0; i < 3; ++i) pace.Note({.tokens = 100, .is_telling = true}, 100 * kTokenNs);
  EXPECT_DOUBLE_EQ(pace.seconds_per_token(), 1e-3) << "equal steps need no room";
  pace.Note({.tokens = 4, .is_telling = false}, 400 * kTokenNs);
  EXPECT_DOUBLE_EQ(pace.seconds_per_token(), 1e-3);
}

// Each step gets what its predecessors allow in 100 ms; tokens become slower as the prompt grows.
TEST(StepPace, FewStepsOfANoisyMachineTakeLonger) {
  constexpr double kLimitNs = 100e6;
  std::mt19937_64 random(7);
  for (const double noise : {0.0, 0.1, 0.3}) {
    StepPace pace;
    pace.Note({.tokens = 512, .is_telling = true}, 512 * kTokenNs);
    int over = 0;
    double used = 0;
    constexpr int kSteps = 4000;
    for (int step = 0; step < kSteps; ++step) {
      const auto tokens =
          std::max<int64_t>(16, static_cast<int64_t>(0.1 / pace.seconds_per_token()));
      std::normal_distribution<double> factor(1 + 0.01 * (step % 50), noise);
      const double ns = static_cast<double>(tokens * kTokenNs) * std::max(0.1, factor(random));
      over += ns > 1.05 * kLimitNs ? 1 : 0;
      used += ns;
      pace.Note({.tokens = tokens, .is_telling = true}, static_cast<int64_t>(ns));
    }
    EXPECT_LE(over, kSteps * 3 / 100) << "noise " << noise;
    EXPECT_GE(used / kSteps, kLimitNs * (noise > 0.2 ? 0.4 : 0.65)) << "noise " << noise;
  }
}

// A machine that stood still for ten seconds does not slow prompts down for long.
TEST(StepPace, OneStandstillIsForgotten) {
  StepPace pace;
  for (int i = 0; i < 20; ++i) pace.Note({.tokens = 100, .is_telling = true}, 100 * kTokenNs);
  pace.Note({.tokens = 100, .is_telling = true}, 10'000 * kTokenNs);
  EXPECT_GT(pace.seconds_per_token(), 20e-3);
  for (int i = 0; i < 60; ++i) pace.Note({.tokens = 16, .is_telling = true}, 16 * kTokenNs);
  EXPECT_LT(pace.seconds_per_token(), 1.01e-3);
}

}  // namespace
}  // namespace quire
