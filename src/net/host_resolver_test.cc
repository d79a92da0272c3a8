#include "net/host_resolver.h"

#include <gtest/gtest.h>

#include "base/clock.h"
#include "base/guard.h"
#include "base/testing/refuse_each.h"

namespace quire {
namespace {

// A look-up that lacks memory for its thread is no look-up under way, for which others would wait.
TEST(HostResolver, ALookUpThatLacksMemoryIsTriedAgain) {
  const auto clock = MachineTime();
  HostResolver resolver(clock);
  const int64_t past_ns = clock->SteadyNs();
  RefuseEach("Resolve", StatusCode::kOk, [&] {
    return GuardEntry([&]() -> Status {
      const auto address = resolver.Resolve("localhost", past_ns);
      // Late, unless a thread of an earlier call was faster.
      return address.status().code() == StatusCode::kTimeout ? Status() : address.status();
    });
  });
  const auto address = resolver.Resolve("localhost", past_ns + 120'000 * kNsPerMs);
  EXPECT_TRUE(address.ok()) << address.status().ToString();
}

}  // namespace
}  // namespace quire
