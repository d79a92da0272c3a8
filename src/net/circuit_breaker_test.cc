#include "net/circuit_breaker.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/testing/fake_clock.h"

namespace quire {
namespace {

constexpr int64_t kMs = 1'000'000;

const Status kRefused(StatusCode::kUnavailable, "refused");
const Status kTimedOut(StatusCode::kTimeout, "no answer");

class Breaker : public testing::Test {
 protected:
  explicit Breaker(const std::string& name = "a server") : breaker_(clock_, name) {}

  // A call that takes so long and ends so. False if it was not let through.
  bool Call(const Status& status, int64_t took_ns = 0, int64_t patience_ns = 1000 * kMs) {
    auto call = breaker_.Admit(clock_->SteadyNs() + patience_ns);
    if (!call) return false;
    clock_->Advance(took_ns);
    call->Report(status);
    return true;
  }
  void Open() {
    for (int i = 0; i < 3; ++i) EXPECT_TRUE(Call(kRefused));
  }
  // Waits until a call is let through; how long that took in milliseconds.
  int64_t BackOff() {
    int64_t ms = 0;
    for (; !breaker_.available(); ++ms) clock_->Advance(kMs);
    return ms;
  }

  const std::shared_ptr<FakeClock> clock_ = std::make_shared<FakeClock>();
  CircuitBreaker breaker_;
};
using CircuitBreakerTest = Breaker;

TEST_F(CircuitBreakerTest, OpensAfterThreeFailuresInARow) {
  for (int i = 0; i < 20; ++i) {
    EXPECT_FALSE(breaker_.suspect());
    EXPECT_TRUE(Call(kRefused));
    EXPECT_TRUE(Call(kRefused));
    EXPECT_TRUE(breaker_.suspect());
    EXPECT_TRUE(Call(Status()));
  }
  Open();
  EXPECT_FALSE(Call(Status()));
  EXPECT_TRUE(breaker_.open());
}

TEST_F(CircuitBreakerTest, WhatIsNoFailureIsAnAnswer) {
  for (int i = 0; i < 20; ++i) {
    EXPECT_TRUE(Call(kRefused));
    EXPECT_TRUE(Call(kRefused));
    EXPECT_TRUE(Call(Status(i % 2 == 0 ? StatusCode::kNotFound : StatusCode::kCorrupt, "odd")));
  }
  EXPECT_FALSE(breaker_.suspect());
}

TEST_F(CircuitBreakerTest, WhatSaysNothingNeitherFailsNorHeals) {
  Call(kRefused);
  Call(kRefused);
  for (int i = 0; i < 20; ++i) {
    EXPECT_TRUE(Call(Status(StatusCode::kCancelled, "left")));
    EXPECT_TRUE(Call(Status::OutOfMemory()));
    // In a greater hurry than anybody can be.
    EXPECT_TRUE(Call(kTimedOut, 19 * kMs, 19 * kMs));
    EXPECT_TRUE(breaker_.Admit(0).has_value());  // ends without a report
  }
  EXPECT_TRUE(breaker_.suspect());
  EXPECT_FALSE(breaker_.open());
  Call(kRefused);
  EXPECT_TRUE(breaker_.open());
}

TEST_F(CircuitBreakerTest, TimeoutsAreFailuresOfPatientCallers) {
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(Call(kTimedOut, 20 * kMs, 20 * kMs));
  EXPECT_TRUE(breaker_.open());
  BackOff();
  EXPECT_TRUE(Call(Status()));
  // The caller has less patience than the breaker.
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(Call(kTimedOut, 5 * kMs));
  EXPECT_TRUE(breaker_.open());
}

TEST_F(CircuitBreakerTest, LetsOneProbeThroughThatDecides) {
  Open();
  BackOff();
  auto probe = breaker_.Admit(kNever);
  ASSERT_TRUE(probe.has_value());
  EXPECT_FALSE(breaker_.Admit(kNever).has_value());  // one is under way
  EXPECT_FALSE(breaker_.available());
  probe->Report(kRefused);
  probe->Report(Status());  // only the first report counts
  EXPECT_FALSE(breaker_.Admit(kNever).has_value());
  BackOff();
  {
    const auto silent = breaker_.Admit(kNever);
    EXPECT_TRUE(silent.has_value());
  }  // says nothing: the next one may try
  EXPECT_TRUE(Call(Status()));
  EXPECT_FALSE(breaker_.open());
  EXPECT_TRUE(Call(Status()));
}

TEST_F(CircuitBreakerTest, BacksOffFromATenthToTenSecondsWithJitter) {
  std::set<int64_t> first;
  for (int name = 0; name < 8; ++name) {
    CircuitBreaker breaker(clock_, "server " + std::to_string(name));
    const auto call = [&](const Status& status) {
      auto admitted = breaker.Admit(kNever);
      ASSERT_TRUE(admitted.has_value());
      admitted->Report(status);
    };
    const auto back_off = [&] {
      int64_t ms = 0;
      for (; !breaker.available(); ++ms) clock_->Advance(kMs);
      return ms;
    };
    for (int i = 0; i < 3; ++i) call(kRefused);
    int64_t longest = 200;
    for (int i = 0; i < 12; ++i) {
      const int64_t ms = back_off();
      if (i == 0) first.insert(ms);
      EXPECT_GE(ms, longest / 2);
      EXPECT_LE(ms, longest + 1);
      call(kRefused);
      longest = std::min<int64_t>(2 * longest, 10'000);
    }
    back_off();
    call(Status());
    for (int i = 0; i < 3; ++i) call(kRefused);  // and from the beginning
    EXPECT_LE(back_off(), 201);
  }
  EXPECT_GT(first.size(), 4U);
}

TEST_F(CircuitBreakerTest, OpensWhenMoreThanOneInAHundredIsLate) {
  for (int i = 0; i < 2000; ++i) Call(Status(), i % 100 == 0 ? 30 * kMs : 0, 20 * kMs);
  EXPECT_FALSE(breaker_.open());
  CircuitBreaker often(clock_, "often late");
  int count = 0;
  // Never two failures in a row.
  for (; count < 2000 && !often.open(); ++count) {
    auto call = often.Admit(clock_->SteadyNs() + 20 * kMs);
    if (count % 50 == 0) clock_->Advance(30 * kMs);
    call->Report(count % 100 == 0 ? kTimedOut : Status());
  }
  EXPECT_TRUE(often.open());
  EXPECT_GE(count, 200);  // not before it has seen enough
}

TEST_F(CircuitBreakerTest, LateReportsFromBeforeItOpenedChangeNothing) {
  // Two breakers of one name draw the same back-off.
  CircuitBreaker other(clock_, "a server");
  std::vector<std::optional<CircuitBreaker::Call>> before, stragglers;
  for (int i = 0; i < 3; ++i) before.push_back(other.Admit(kNever));
  for (int i = 0; i < 3; ++i) stragglers.push_back(other.Admit(kNever));
  Open();
  for (auto& call : before) call->Report(kRefused);
  stragglers[0]->Report(kRefused);
  stragglers[1]->Report(kRefused);
  for (int64_t ms = 0; !breaker_.available(); ++ms) {
    EXPECT_FALSE(other.available()) << ms;
    clock_->Advance(kMs);
  }
  EXPECT_TRUE(other.available());
  stragglers[2]->Report(kRefused);
  EXPECT_TRUE(other.available());
}

TEST_F(CircuitBreakerTest, ReportsFromBeforeItOpenedCanOnlyCloseIt) {
  auto failed = breaker_.Admit(kNever);
  auto silent = breaker_.Admit(kNever);
  auto late = breaker_.Admit(clock_->SteadyNs());
  auto answered = breaker_.Admit(kNever);
  Open();
  BackOff();
  const auto probe = breaker_.Admit(kNever);
  ASSERT_TRUE(probe.has_value());
  failed->Report(kRefused);
  late->Report(Status());
  silent.reset();
  EXPECT_TRUE(breaker_.open());
  EXPECT_FALSE(breaker_.available());  // the probe is still under way
  answered->Report(Status());
  EXPECT_FALSE(breaker_.open());
  EXPECT_TRUE(breaker_.available());
}

}  // namespace
}  // namespace quire
