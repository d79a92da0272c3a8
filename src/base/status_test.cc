#include "quire/status.h"

#include <gtest/gtest.h>

#include <new>
#include <set>
#include <string>
#include <vector>

#include "base/guard.h"

namespace quire {
namespace {

TEST(Status, OkHasNoMessage) {
  const Status status;
  EXPECT_TRUE(status.ok());
  EXPECT_EQ(status.code(), StatusCode::kOk);
  EXPECT_EQ(status.message(), "");
  EXPECT_EQ(status.ToString(), "Ok");
}

TEST(Status, CopiesKeepCodeAndMessage) {
  const std::string text = "BeginForward: a message that is too long for the string itself";
  Status copy;
  {
    const Status status(StatusCode::kOutOfPages, text);
    copy = status;
  }
  EXPECT_EQ(copy.code(), StatusCode::kOutOfPages);
  EXPECT_EQ(copy.message(), text);
  EXPECT_EQ(copy.ToString(), "OutOfPages: " + text);
}

TEST(Status, CopiesKeepWhatItIsAbout) {
  Status copy;
  {
    const Status status(StatusCode::kBadArgument, "no room",
                        {"predicted_tokens", RefusalReason::kNoGuessRoom});
    copy = status;
  }
  EXPECT_EQ(copy.detail().option, "predicted_tokens");
  EXPECT_EQ(copy.detail().reason, RefusalReason::kNoGuessRoom);
}

TEST(Status, WithoutADetailItIsAboutNoOption) {
  for (const Status& status :
       {Status(), Status(StatusCode::kFull, "full"), Status::OutOfMemory()}) {
    EXPECT_EQ(status.detail().option, "");
    EXPECT_EQ(status.detail().reason, RefusalReason::kOther);
  }
}

TEST(Status, EveryReasonButOtherHasANameOfItsOwn) {
  std::set<std::string_view> names;
  for (int reason = 0; reason < kRefusalReasonCount; ++reason) {
    names.insert(RefusalReasonName(static_cast<RefusalReason>(reason)));
  }
  EXPECT_EQ(names.size(), static_cast<size_t>(kRefusalReasonCount));
  EXPECT_EQ(RefusalReasonName(RefusalReason::kOther), "");
  EXPECT_EQ(RefusalReasonName(static_cast<RefusalReason>(kRefusalReasonCount)), "");
}

TEST(Status, EveryCodeHasANameOfItsOwn) {
  std::set<std::string_view> names;
  for (int code = 0; code < kStatusCodeCount; ++code) {
    const std::string_view name = StatusCodeName(static_cast<StatusCode>(code));
    EXPECT_FALSE(name.empty()) << code;
    names.insert(name);
  }
  EXPECT_EQ(names.size(), static_cast<size_t>(kStatusCodeCount));
  EXPECT_EQ(StatusCodeName(StatusCode::kNeedsReplay), "NeedsReplay");
  EXPECT_EQ(StatusCodeName(StatusCode::kInternal), "Internal");
  EXPECT_EQ(StatusCodeName(static_cast<StatusCode>(kStatusCodeCount)), "UnknownStatusCode");
}

TEST(Status, ACodeThatIsNoErrorIsInternal) {
  for (const int number : {0, -1, kStatusCodeCount, 1000}) {
    const Status status(static_cast<StatusCode>(number), "fine");
    EXPECT_EQ(status.code(), StatusCode::kInternal) << number;
    EXPECT_EQ(status.message(), "a status was made with the code " + std::to_string(number) +
                                    ", which is none of an error; its message: fine");
  }
}

TEST(Guard, TurnsBadAllocIntoOutOfMemory) {
  const Status status = GuardEntry([]() -> Status { throw std::bad_alloc(); });
  EXPECT_EQ(status.code(), StatusCode::kOutOfMemory);
  EXPECT_NE(status.message(), "");
  const Result<int> result = GuardEntry([]() -> Result<int> { throw std::bad_alloc(); });
  EXPECT_EQ(result.status().code(), StatusCode::kOutOfMemory);
}

TEST(Guard, PassesValuesAndErrorsThrough) {
  EXPECT_TRUE(GuardEntry([] { return Status(); }).ok());
  EXPECT_EQ(GuardEntry([]() -> Result<int> { return 7; }).value(), 7);
  EXPECT_EQ(GuardEntry([]() -> Result<int> { return Status(StatusCode::kFull, "f"); })
                .status()
                .ToString(),
            "Full: f");
}

Result<std::vector<int>> Ones(bool fail) {
  if (fail) return Status(StatusCode::kNotFound, "no ones");
  return std::vector<int>{1, 1};
}

Result<size_t> CountOnes(bool fail) {
  QUIRE_ASSIGN_OR_RETURN(const std::vector<int> ones, Ones(fail));
  return ones.size();
}

TEST(Result, AssignOrReturn) {
  EXPECT_EQ(CountOnes(false).value(), 2u);
  EXPECT_EQ(CountOnes(true).status().message(), "no ones");
}

}  // namespace
}  // namespace quire
