#include "base/check.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <memory>
#include <stdexcept>
#include <string>

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

// What a host's handler may throw.
struct Defect : std::runtime_error {
  using std::runtime_error::runtime_error;
};

void ThrowDefect(std::string_view message) { throw Defect(std::string(message)); }

TEST(Check, WhatTheHandlerThrowsLeavesTheCheck) {
  const CheckFailureHandler before = SetCheckFailureHandler(&ThrowDefect);
  const auto unwound = std::make_shared<int>(0);
  try {
    const auto held = unwound;
    QUIRE_CHECK(2 < 1) << "two is " << 2;
    ADD_FAILURE() << "the check let a false condition pass";
  } catch (const Defect& defect) {
    EXPECT_NE(std::string_view(defect.what()).find("check failed: 2 < 1 two is 2"),
              std::string_view::npos);
  }
  EXPECT_EQ(unwound.use_count(), 1);
  EXPECT_EQ(SetCheckFailureHandler(before), &ThrowDefect);
}

TEST(Check, InANoexceptFunctionTheProcessEndsWithTheMessage) {
  const auto commit = []() noexcept { QUIRE_CHECK(2 < 1) << "two is " << 2; };
  EXPECT_DEATH(
      {
        SetCheckFailureHandler(&ThrowDefect);
        commit();
      },
      "check failed: 2 < 1 two is 2");
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
