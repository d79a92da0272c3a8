// How long a forward may wait for a peer that takes rows slowly.
#include "transfer/send_pace.h"

#include <gtest/gtest.h>

namespace quire {
namespace {

constexpr int64_t kWait = 1000;

TEST(SendPace, TheWaitsOfAForwardAreCountedTogether) {
  SendPace pace(kWait);
  for (int64_t i = 0; i < SendPace::kWaits; ++i) {
    EXPECT_EQ(pace.left_ns(), kWait) << i;
    pace.Waited(kWait);
    pace.Sent(1);
  }
  EXPECT_EQ(pace.left_ns(), 0);
  pace.Reset();
  EXPECT_EQ(pace.left_ns(), kWait);
  pace.Waited(SendPace::kWaits * kWait - 10);
  EXPECT_EQ(pace.left_ns(), 10);
  pace.Waited(11);
  EXPECT_EQ(pace.left_ns(), 0);
}

TEST(SendPace, ALinkThatMovesBytesMayTakeLong) {
  SendPace pace(kWait);
  for (int64_t i = 0; i < 100; ++i) {
    EXPECT_EQ(pace.left_ns(), kWait) << i;
    pace.Waited(kWait);
    pace.Sent(SendPace::kBytes / SendPace::kWaits);
  }
}

}  // namespace
}  // namespace quire
