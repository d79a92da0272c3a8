#include "net/host_resolver.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <string_view>

#include "base/clock.h"
#include "base/guard.h"
#include "base/testing/fake_clock.h"
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

// Nor does one whose own thread lacks memory end the process.
TEST(HostResolver, ALookUpThatFindsNoMemorySaysSo) {
  std::atomic<int> look_ups{0};
  HostResolver resolver(MachineTime(), [&look_ups](const std::string&) -> std::string {
    if (look_ups.fetch_add(1) == 0) throw std::bad_alloc();
    return "an address";
  });
  EXPECT_EQ(resolver.Resolve("a host", kNever).status().code(), StatusCode::kOutOfMemory);
  EXPECT_EQ(resolver.Resolve("a host", kNever).value(), "an address");
}

constexpr size_t kMost = HostResolver::kNamesMax;

std::string Name(size_t number) { return "host-" + std::to_string(number); }

TEST(HostResolver, TheOldestNameIsForgottenBeyondALimit) {
  const auto clock = std::make_shared<FakeClock>();
  std::atomic<int> look_ups{0};
  HostResolver resolver(clock, [&look_ups](const std::string& host) {
    look_ups.fetch_add(1);
    return host == Name(3) ? std::string() : "address of " + host;
  });
  const auto resolve = [&](size_t number) {
    clock->Advance(1);
    return resolver.Resolve(Name(number), kNever);
  };
  for (size_t number = 0; number < kMost + 10; ++number) {
    const auto address = resolve(number);
    EXPECT_EQ(address.ok(), number != 3);
    EXPECT_EQ(resolver.name_count(), std::min(number + 1, kMost));
  }
  const int before = look_ups.load();
  ASSERT_TRUE(resolve(10).ok());
  ASSERT_TRUE(resolve(kMost + 9).ok());
  EXPECT_EQ(look_ups.load(), before) << "these are remembered";
  ASSERT_TRUE(resolve(9).ok());
  EXPECT_EQ(look_ups.load(), before + 1) << "and this one was the last that was not";
  EXPECT_EQ(resolver.name_count(), kMost);
}

// It has a thread, and callers that wait for it.
TEST(HostResolver, ALookUpUnderWayIsNeverForgotten) {
  struct Gate {
    std::mutex mutex;
    std::condition_variable changed;
    size_t waiting = 0;
    bool is_open = false;
  };
  const auto gate = std::make_shared<Gate>();
  const auto clock = MachineTime();
  HostResolver resolver(clock, [gate](const std::string& host) {
    std::unique_lock<std::mutex> lock(gate->mutex);
    ++gate->waiting;
    gate->changed.notify_all();
    gate->changed.wait(lock, [&] { return gate->is_open; });
    return host;
  });
  const int64_t past_ns = clock->SteadyNs();
  for (size_t number = 0; number < kMost; ++number)
    EXPECT_EQ(resolver.Resolve(Name(number), past_ns).status().code(), StatusCode::kTimeout);
  const Status refused = resolver.Resolve("one-more", past_ns).status();
  EXPECT_EQ(refused.code(), StatusCode::kUnavailable);
  EXPECT_NE(refused.message().find("256 names"), std::string_view::npos) << refused.ToString();
  EXPECT_EQ(resolver.name_count(), kMost);
  {
    std::unique_lock<std::mutex> lock(gate->mutex);
    gate->changed.wait(lock, [&] { return gate->waiting == kMost; });
    gate->is_open = true;
    gate->changed.notify_all();
  }
  for (size_t number = 0; number < kMost; ++number)
    EXPECT_EQ(resolver.Resolve(Name(number), kNever).value(), Name(number));
  EXPECT_EQ(resolver.Resolve("one-more", kNever).value(), "one-more");
  EXPECT_EQ(resolver.name_count(), kMost);
}

}  // namespace
}  // namespace quire
