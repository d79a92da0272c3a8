#include "kv/control/sequence_control.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace quire {
namespace {

using Ids = std::vector<int64_t>;

constexpr int64_t kFar = int64_t{1} << 40;

int32_t Add(SequenceControl& control, int64_t id) {
  control.table().ReserveOne();
  return control.table().Insert(id);
}

int32_t AddRetained(SequenceControl& control, int64_t id) {
  const int32_t index = Add(control, id);
  control.table().SetRetained(index, true);
  return index;
}

// Opens a forward of the sequences with these indices.
void Open(SequenceControl& control, const std::vector<int32_t>& members) {
  control.StartPlanning();
  for (const int32_t index : members) control.Name(index);
  control.OpenForward();
}

TEST(SequenceControl, MessagesNameTheCallAndTheSequence) {
  EXPECT_EQ(OfSequence("PopN", 7), "PopN: sequence 7 ");
  const SequenceControl control(2);
  const Status status = control.Find("PopN", 7).status();
  EXPECT_EQ(status.code(), StatusCode::kUnknownSequence);
  EXPECT_EQ(status.message(), "PopN: sequence 7 does not exist");
}

TEST(SequenceControl, ANewIdIsNeitherNegativeNorTaken) {
  SequenceControl control(2);
  Add(control, 5);
  EXPECT_TRUE(control.CheckNew("AddSequence", 0).ok());
  EXPECT_EQ(control.CheckNew("AddSequence", -1).code(), StatusCode::kBadArgument);
  EXPECT_EQ(control.CheckNew("AddSequence", 5).code(), StatusCode::kSequenceExists);
}

TEST(SequenceControl, RetainedSequencesDoNotCountAgainstTheLimit) {
  SequenceControl control(2);
  Add(control, 0);
  for (int64_t id = 10; id < 15; ++id) AddRetained(control, id);
  EXPECT_EQ(control.active_count(), 1);
  EXPECT_TRUE(control.CheckRoomForActive("SetRetained", 10).ok());
  Add(control, 1);
  EXPECT_EQ(control.CheckRoomForActive("SetRetained", 10).code(), StatusCode::kTooLarge);
  EXPECT_EQ(control.CheckNew("AddSequence", 2).code(), StatusCode::kTooLarge);
  EXPECT_EQ(control.CheckNew("AddSequence", 0).code(), StatusCode::kSequenceExists)
      << "that is said first: room would not help";
}

TEST(SequenceControl, OnlyMembersOfAnOpenForwardAreInTheBatch) {
  SequenceControl control(3);
  const int32_t member = Add(control, 0);
  const int32_t other = Add(control, 1);
  control.StartPlanning();
  control.Name(member);
  EXPECT_FALSE(control.InBatch(member)) << "planned only";
  EXPECT_TRUE(control.RequireIdle("Clear").ok());
  control.OpenForward();
  EXPECT_TRUE(control.InBatch(member));
  EXPECT_FALSE(control.InBatch(other));
  EXPECT_EQ(control.FindOutsideBatch("PopN", 0).status().code(), StatusCode::kBadState);
  EXPECT_EQ(control.FindOutsideBatch("PopN", 1).value(), other);
  EXPECT_EQ(control.FindOutsideBatch("PopN", 2).status().code(), StatusCode::kUnknownSequence);
  EXPECT_EQ(control.RequireIdle("Clear").code(), StatusCode::kBadState);
  control.CloseForward();
  EXPECT_FALSE(control.InBatch(member));
  EXPECT_TRUE(control.FindOutsideBatch("PopN", 0).ok());
}

TEST(SequenceControl, AFailureEndsWithItsForward) {
  SequenceControl control(1);
  const int32_t member = Add(control, 0);
  EXPECT_EQ(control.RequireForward("Attend").code(), StatusCode::kBadState);
  Open(control, {member});
  EXPECT_TRUE(control.RequireForward("Attend").ok());
  control.set_failed(true);
  EXPECT_EQ(control.RequireForward("Attend").code(), StatusCode::kBadState);
  control.CloseForward();
  Open(control, {member});
  EXPECT_TRUE(control.RequireForward("Attend").ok());
  control.Clear();
  EXPECT_TRUE(control.RequireIdle("Clear").ok());
  EXPECT_EQ(control.table().count(), 0);
}

TEST(SequenceControl, AMemberIsKnownActiveAndNamedOnce) {
  SequenceControl control(3);
  const int32_t active = Add(control, 0);
  const int32_t retained = AddRetained(control, 1);
  const auto code = [&](int64_t id, int32_t index) {
    const Status status = control.CheckMember("BeginForward", id, index);
    EXPECT_EQ(status.ok(), control.MayTake(index));
    return status.code();
  };
  control.StartPlanning();
  EXPECT_EQ(code(9, SequenceTable::kAbsent), StatusCode::kUnknownSequence);
  EXPECT_EQ(code(1, retained), StatusCode::kBadState);
  EXPECT_EQ(code(0, active), StatusCode::kOk);
  control.Name(active);
  EXPECT_EQ(code(0, active), StatusCode::kBadArgument);
  EXPECT_EQ(control.NameOnce("Commit", active).code(), StatusCode::kBadArgument);
  control.StartPlanning();
  EXPECT_EQ(code(0, active), StatusCode::kOk) << "named by another planning";
  EXPECT_TRUE(control.NameOnce("Commit", active).ok());
  EXPECT_FALSE(control.MayTake(active));
}

TEST(SequenceControl, KnowsWhetherAnotherBatchHasBeenPlanned) {
  SequenceControl control(2);
  const int32_t member = Add(control, 0);
  Open(control, {member});
  control.CloseForward();
  EXPECT_TRUE(control.HasBatchOfLastForward());
  control.StartPlanning();
  EXPECT_FALSE(control.HasBatchOfLastForward());
}

TEST(SequenceControl, ABatchHasALengthForEachSequence) {
  SequenceControl control(2);
  const int32_t member = Add(control, 0);
  const auto code = [&](const Ids& ids, const Ids& lengths) {
    return control.CheckBatch("BeginForward", ids, lengths).code();
  };
  EXPECT_EQ(code({0}, {1}), StatusCode::kOk);
  EXPECT_EQ(code({0}, {1, 1}), StatusCode::kBadArgument);
  EXPECT_EQ(code({}, {}), StatusCode::kBadArgument);
  Open(control, {member});
  EXPECT_EQ(code({0}, {1}), StatusCode::kBadState);
}

TEST(SequenceControl, PositionsEndAt2To31) {
  const auto code = [](int64_t length, int64_t rows, int64_t imported) {
    return CheckPositions("BeginForward", 0, length, rows, imported).code();
  };
  EXPECT_EQ(code(kPositionsMax - 3, 2, 1), StatusCode::kOk);
  EXPECT_EQ(code(kPositionsMax - 3, 3, 1), StatusCode::kTooLarge);
  EXPECT_EQ(code(kPositionsMax - 3, 2, 2), StatusCode::kTooLarge);
  EXPECT_EQ(code(0, kFar, 0), StatusCode::kTooLarge);
  EXPECT_EQ(code(0, 1, kFar), StatusCode::kTooLarge);
  EXPECT_EQ(CheckRowCount("BeginForward", 0, 0).code(), StatusCode::kBadArgument);
  EXPECT_TRUE(CheckRowCount("BeginForward", 0, 1).ok());
  const auto receives = [](int64_t length, int64_t count) {
    return CheckReceiveCount("DisaggPrepareRecv", 0, length, count).code();
  };
  EXPECT_EQ(receives(1, 0), StatusCode::kBadArgument);
  EXPECT_EQ(receives(1, kPositionsMax - 1), StatusCode::kOk);
  EXPECT_EQ(receives(1, kPositionsMax), StatusCode::kTooLarge);
}

class NoSource final : public LayerSource {
 public:
  Result<std::span<const LayerKV>> Load(int64_t) override {
    return Status(StatusCode::kNotFound, "there is nothing");
  }
};

TEST(SequenceControl, LoadsAreTakenInTheOrderOfTheBatch) {
  NoSource source;
  const LayerLoad loads[] = {{.seq_id = 1, .tokens = 4, .source = &source},
                             {.seq_id = 3, .tokens = 4, .source = &source}};
  std::span<const LayerLoad> left(loads);
  EXPECT_EQ(TakeLoad(0, left), nullptr);
  EXPECT_EQ(TakeLoad(1, left), &loads[0]);
  EXPECT_EQ(TakeLoad(1, left), nullptr);
  EXPECT_EQ(RequireNoLoadLeft("BeginLoadingForward", left).code(), StatusCode::kBadArgument);
  EXPECT_EQ(TakeLoad(3, left), &loads[1]);
  EXPECT_TRUE(RequireNoLoadLeft("BeginLoadingForward", left).ok());
  EXPECT_EQ(TakeLoad(3, left), nullptr);
}

TEST(SequenceControl, ALoadHasTokensAndASource) {
  NoSource source;
  const auto code = [](const LayerLoad& load) {
    return CheckLoad("BeginLoadingForward", load).code();
  };
  EXPECT_EQ(code({.seq_id = 0, .tokens = 1, .source = &source}), StatusCode::kOk);
  EXPECT_EQ(code({.seq_id = 0, .tokens = 0, .source = &source}), StatusCode::kBadArgument);
  EXPECT_EQ(code({.seq_id = 0, .tokens = 1, .source = nullptr}), StatusCode::kBadArgument);
}

TEST(SequenceControl, EachMemberTakesItsNodesParents) {
  const Ids parents{-1, 0, -1};
  NodeParents left("BeginTreeForward", parents);
  EXPECT_EQ(left.Take(0, 0).value().size(), 0U);
  EXPECT_EQ(left.Take(0, -5).value().size(), 0U);
  EXPECT_EQ(left.Take(0, 2).value().data(), parents.data());
  EXPECT_EQ(left.RequireNoneLeft().code(), StatusCode::kBadArgument);
  EXPECT_EQ(left.Take(1, 2).status().code(), StatusCode::kBadArgument);
  EXPECT_EQ(left.Take(1, kFar).status().code(), StatusCode::kBadArgument);
  EXPECT_EQ(left.Take(1, 1).value().data(), parents.data() + 2);
  EXPECT_TRUE(left.RequireNoneLeft().ok());
}

TEST(SequenceControl, ATreeHasALimitAndItsLeavesAreItsNodes) {
  EXPECT_TRUE(CheckTreeSize("BeginTreeForward", 0, 3, 5, 8).ok());
  EXPECT_EQ(CheckTreeSize("BeginTreeForward", 0, 3, 6, 8).code(), StatusCode::kTooLarge);
  EXPECT_TRUE(RequireNoTree("ImportKV", 0, 0).ok());
  EXPECT_EQ(RequireNoTree("ImportKV", 0, 1).code(), StatusCode::kBadState);
  EXPECT_EQ(CheckLeaf("Commit", 0, 0, -1).code(), StatusCode::kBadState);
  EXPECT_EQ(CheckLeaf("Commit", 0, 3, -2).code(), StatusCode::kBadArgument);
  EXPECT_EQ(CheckLeaf("Commit", 0, 3, 3).code(), StatusCode::kBadArgument);
  EXPECT_TRUE(CheckLeaf("Commit", 0, 3, -1).ok());
  EXPECT_TRUE(CheckLeaf("Commit", 0, 3, 2).ok());
  EXPECT_EQ(CheckLeafCount("Commit", Ids{0}, Ids{}).code(), StatusCode::kBadArgument);
  EXPECT_TRUE(CheckLeafCount("Commit", Ids{}, Ids{}).ok());
}

}  // namespace
}  // namespace quire
