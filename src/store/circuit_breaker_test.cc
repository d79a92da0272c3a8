#include "store/circuit_breaker.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

namespace quire {
namespace {

constexpr int64_t kMs = 1'000'000;

void Open(CircuitBreaker& breaker, int64_t now_ns) {
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(breaker.Admit(now_ns));
    breaker.Failed(now_ns, false);
  }
}

// When the next call is let through, in milliseconds from `now_ns`.
int64_t BackOffMs(const CircuitBreaker& breaker, int64_t now_ns) {
  int64_t ms = 0;
  while (!breaker.available(now_ns + ms * kMs)) ++ms;
  return ms;
}

TEST(CircuitBreaker, OpensAfterThreeFailuresInARow) {
  CircuitBreaker breaker(1);
  for (int i = 0; i < 20; ++i) {
    EXPECT_FALSE(breaker.suspect());
    breaker.Failed(0, false);
    breaker.Failed(0, false);
    EXPECT_TRUE(breaker.suspect());
    EXPECT_TRUE(breaker.Admit(0));
    breaker.Succeeded(0, false);
  }
  Open(breaker, 0);
  EXPECT_FALSE(breaker.Admit(0));
  EXPECT_TRUE(breaker.open());
}

TEST(CircuitBreaker, LetsOneProbeThroughThatDecides) {
  CircuitBreaker breaker(1);
  Open(breaker, 0);
  const int64_t at = BackOffMs(breaker, 0) * kMs;
  EXPECT_TRUE(breaker.Admit(at));
  EXPECT_FALSE(breaker.Admit(at));  // one is under way
  breaker.Failed(at, false);
  EXPECT_FALSE(breaker.Admit(at));
  const int64_t again = at + BackOffMs(breaker, at) * kMs;
  EXPECT_TRUE(breaker.Admit(again));
  breaker.Abandoned();  // says nothing: the next one may try
  EXPECT_TRUE(breaker.Admit(again));
  breaker.Succeeded(again, false);
  EXPECT_FALSE(breaker.open());
  EXPECT_TRUE(breaker.Admit(again));
  EXPECT_TRUE(breaker.Admit(again));
}

TEST(CircuitBreaker, BacksOffFromATenthToTenSecondsWithJitter) {
  std::set<int64_t> first;
  for (uint64_t seed = 0; seed < 8; ++seed) {
    CircuitBreaker breaker(seed);
    Open(breaker, 0);
    int64_t now_ns = 0, longest = 200;
    first.insert(BackOffMs(breaker, 0));
    for (int i = 0; i < 12; ++i) {
      const int64_t ms = BackOffMs(breaker, now_ns);
      EXPECT_GE(ms, longest / 2);
      EXPECT_LE(ms, longest + 1);
      now_ns += ms * kMs;
      EXPECT_TRUE(breaker.Admit(now_ns));
      breaker.Failed(now_ns, true);
      longest = std::min<int64_t>(2 * longest, 10'000);
    }
    now_ns += BackOffMs(breaker, now_ns) * kMs;
    EXPECT_TRUE(breaker.Admit(now_ns));
    breaker.Succeeded(now_ns, false);
    Open(breaker, now_ns);  // and from the beginning
    EXPECT_LE(BackOffMs(breaker, now_ns), 201);
  }
  EXPECT_GT(first.size(), 4U);
}

TEST(CircuitBreaker, OpensWhenMoreThanOneInAHundredIsLate) {
  CircuitBreaker seldom(1), often(1);
  for (int i = 0; i < 2000; ++i) seldom.Succeeded(0, i % 100 == 0);
  EXPECT_FALSE(seldom.open());
  int count = 0;
  // Never two failures in a row.
  for (; count < 2000 && !often.open(); ++count) {
    if (count % 50 == 0) {
      often.Failed(0, true);
    } else {
      often.Succeeded(0, false);
    }
  }
  EXPECT_TRUE(often.open());
  EXPECT_GE(count, 200);  // not before it has seen enough
}

TEST(CircuitBreaker, LateReportsFromBeforeItOpenedChangeNothing) {
  CircuitBreaker breaker(1);
  Open(breaker, 0);
  const int64_t before = BackOffMs(breaker, 0);
  breaker.Failed(0, false);
  EXPECT_EQ(BackOffMs(breaker, 0), before);
}

}  // namespace
}  // namespace quire
