#include "base/check.h"

#include <gtest/gtest.h>

#include <cstdio>

namespace quire {
namespace {

TEST(Check, TrueCostsNothingAndEvaluatesNoMessage) {
  int evaluated = 0;
  const auto message = [&] { return ++evaluated; };
  if (evaluated == 0)
    QUIRE_CHECK(1 + 1 == 2) << message();
  else
    FAIL() << "the macro swallowed an else";
  EXPECT_EQ(evaluated, 0);
}

TEST(Check, FalsePrintsPlaceConditionAndMessageAndAborts) {
  EXPECT_DEATH(QUIRE_CHECK(2 < 1) << "two is " << 2,
               "check_test.cc:[0-9]+: check failed: 2 < 1 two is 2");
}

TEST(Check, HandlerIsReplaceable) {
  const auto die_with_handler = [] {
    SetCheckFailureHandler([](std::string_view message) {
      std::fprintf(stderr, "handler got <%.*s>\n", static_cast<int>(message.size()),
                   message.data());
    });
    QUIRE_CHECK(false) << "why";
  };
  EXPECT_DEATH(die_with_handler(), "handler got <.*check failed: false why>");
}

TEST(Check, DcheckIsEvaluatedInDebugBuildsOnly) {
  int evaluated = 0;
  QUIRE_DCHECK(++evaluated > 0);
#ifdef NDEBUG
  EXPECT_EQ(evaluated, 0);
#else
  EXPECT_EQ(evaluated, 1);
#endif
}

}  // namespace
}  // namespace quire
