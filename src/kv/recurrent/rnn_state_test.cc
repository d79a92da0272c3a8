#include "kv/recurrent/rnn_state.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "kv/testing/kv_test_forward.h"

namespace quire {
namespace {

using Ids = std::vector<int64_t>;
using Values = std::vector<float>;

RNNStateOptions ScalarOptions(int64_t max_history, int64_t max_checkpoints = 0) {
  static const float initial = 9;
  RNNStateOptions options;
  options.num_layers = 1;
  options.states = {{.shape = {1}, .initial = TensorView(&initial, DType::kF32, {1})}};
  options.max_num_sequences = 4;
  options.max_history = max_history;
  options.max_checkpoints = max_checkpoints;
  options.max_retained_slots = 4;
  options.poison_freed_slots = true;
  return options;
}

// One layer with one state of one number.
class ScalarState {
 public:
  explicit ScalarState(const RNNStateOptions& options) : state_(*RNNState::Create(options)) {}

  RNNState& operator*() { return *state_; }
  RNNState* operator->() { return state_.get(); }

  Status Begin(const Ids& ids, const Ids& lengths) { return state_->BeginForward(ids, lengths); }
  Status Set(Values values) {
    return state_->Set(0, 0, View(values, static_cast<int64_t>(values.size())));
  }
  Status SetAt(const Ids& rows, Values values) {
    return state_->SetAt(0, 0, rows, View(values, static_cast<int64_t>(values.size())));
  }
  // A forward of one sequence.
  Status Step(int64_t id, float value, int64_t length = 1) {
    QUIRE_RETURN_IF_ERROR(Begin({id}, {length}));
    QUIRE_RETURN_IF_ERROR(Set({value}));
    return state_->EndForward();
  }
  Values Get(int64_t count) {
    Values values(static_cast<size_t>(count), NAN);
    EXPECT_TRUE(state_->Get(0, 0, View(values, count)).ok());
    return values;
  }
  float Current(int64_t id) {
    float value = NAN;
    EXPECT_TRUE(state_->DebugGet(0, 0, id, TensorView(&value, DType::kF32, {1})).ok());
    return value;
  }
  // Whether the call fails with the code and leaves the digest as it was.
  template <typename F>
  testing::AssertionResult Refuses(StatusCode code, F&& call) {
    const uint64_t digest = state_->StateDigest();
    const Status status = call();
    if (status.ok()) return testing::AssertionFailure() << "it works";
    if (status.code() != code) return testing::AssertionFailure() << status.ToString();
    if (state_->StateDigest() != digest) return testing::AssertionFailure() << "state has changed";
    const Status sound = state_->CheckInvariants();
    if (!sound.ok()) return testing::AssertionFailure() << sound.ToString();
    last_message_ = status.message();
    return testing::AssertionSuccess();
  }
  const std::string& last_message() const { return last_message_; }

 private:
  static TensorView View(Values& values, int64_t count) {
    return TensorView(values.data(), DType::kF32, {count, 1});
  }
  std::unique_ptr<RNNState> state_;
  std::string last_message_;
};

// ---------------------------------------------------------------------- the specification's
// examples

TEST(RNNStateTest, PopGoesBackByHistory) {  // 6.16
  ScalarState s(ScalarOptions(3));
  ASSERT_TRUE(s->AddSequence(0).ok());
  for (const float value : {1.0F, 2.0F, 3.0F, 4.0F}) ASSERT_TRUE(s.Step(0, value).ok());
  ASSERT_TRUE(s->PopN(0, 1).ok());
  EXPECT_EQ(s.Current(0), 3);
  ASSERT_TRUE(s->PopN(0, 1).ok());
  EXPECT_EQ(s.Current(0), 2);
  EXPECT_TRUE(s.Refuses(StatusCode::kNeedsReplay, [&] { return s->PopN(0, 1); }));
  ASSERT_TRUE(s.Step(0, 7).ok());
  ASSERT_TRUE(s->PopN(0, 1).ok());
  EXPECT_EQ(s.Current(0), 2);
  EXPECT_TRUE(s.Refuses(StatusCode::kNeedsReplay, [&] { return s->PopN(0, 1); }));
}

TEST(RNNStateTest, PrefillIsOneStepOfHistory) {  // 6.17, and across the prefill
  ScalarState s(ScalarOptions(4));
  ASSERT_TRUE(s->AddSequence(0).ok());
  ASSERT_TRUE(s.Step(0, 1).ok());
  ASSERT_TRUE(s.Step(0, 2).ok());
  ASSERT_TRUE(s.Step(0, 5, 4).ok());
  EXPECT_TRUE(s.Refuses(StatusCode::kNeedsReplay, [&] { return s->PopN(0, 1); }));
  EXPECT_NE(s.last_message().find("position 2 "), std::string::npos) << s.last_message();
  ASSERT_TRUE(s.Step(0, 6).ok());
  EXPECT_TRUE(s.Refuses(StatusCode::kNeedsReplay, [&] { return s->PopN(0, 2); }));
  ASSERT_TRUE(s->PopN(0, 1).ok());
  EXPECT_EQ(s.Current(0), 5);
  ASSERT_TRUE(s->PopN(0, 4).ok());
  EXPECT_EQ(s.Current(0), 2);
  EXPECT_EQ(s->GetSequenceLength(0).value(), 2);
}

TEST(RNNStateTest, ForkSharesAndGoesItsOwnWay) {  // 6.18
  ScalarState s(ScalarOptions(3));
  ASSERT_TRUE(s->AddSequence(0).ok());
  for (const float value : {1.0F, 2.0F, 3.0F}) ASSERT_TRUE(s.Step(0, value).ok());
  const int64_t free = s->slot_counts().free;
  ASSERT_TRUE(s->ForkSequence(0, 1).ok());
  EXPECT_EQ(s->slot_counts().free, free) << "a fork copies nothing";
  ASSERT_TRUE(s->PopN(1, 2).ok());
  EXPECT_EQ(s.Current(1), 1);
  EXPECT_EQ(s.Current(0), 3);
  ASSERT_TRUE(s.Step(1, 20).ok());
  ASSERT_TRUE(s.Step(0, 4).ok());
  EXPECT_EQ(s.Current(1), 20);
  ASSERT_TRUE(s->RemoveSequence(0).ok());
  ASSERT_TRUE(s->PopN(1, 1).ok());
  EXPECT_EQ(s.Current(1), 1) << "held by the child alone now";
  EXPECT_TRUE(s->CheckInvariants().ok());
}

TEST(RNNStateTest, GetSeesTheStateBeforeTheForward) {  // 6.18, also with a history of 1
  for (const int64_t history : {1, 2, 5}) {
    ScalarState s(ScalarOptions(history));
    ASSERT_TRUE(s->AddSequence(0).ok());
    ASSERT_TRUE(s.Begin({0}, {1}).ok());
    ASSERT_TRUE(s.Set({1}).ok());
    EXPECT_EQ(s.Get(1), Values{9});
    EXPECT_EQ(s.Current(0), 9);
    ASSERT_TRUE(s->EndForward().ok());
    ASSERT_TRUE(s.Begin({0}, {1}).ok());
    ASSERT_TRUE(s.Set({2}).ok());
    EXPECT_EQ(s.Get(1), Values{1});
    ASSERT_TRUE(s->AbortForward().ok());
    EXPECT_EQ(s.Current(0), 1);
  }
}

// ---------------------------------------------------------------------- the defects B20

TEST(RNNStateTest, WithTheOptionAndOneStateOfHistoryGetSeesSet) {
  for (const int64_t history : {1, 2}) {
    RNNStateOptions options = ScalarOptions(history);
    options.tvm_rnn_history1 = true;
    ScalarState state(options);
    ASSERT_TRUE(state->AddSequence(0).ok());
    ASSERT_TRUE(state->AddSequence(1).ok());
    ASSERT_TRUE(state.Begin({1, 0}, {1, 3}).ok());
    EXPECT_EQ(state.Get(2), (Values{9, 9}));
    ASSERT_TRUE(state.Set({5, 6}).ok());
    EXPECT_EQ(state.Get(2), history == 1 ? (Values{5, 6}) : (Values{9, 9}));
    EXPECT_EQ(state.Current(1), 9);
    ASSERT_TRUE(state->AbortForward().ok());
    EXPECT_EQ(state.Current(1), 9);
    ASSERT_TRUE(state.Step(0, 7).ok());
    EXPECT_EQ(state.Current(0), 7);
  }
}

TEST(RNNStateTest, ForkPositionIsKept) {
  ScalarState s(ScalarOptions(4));
  ASSERT_TRUE(s->AddSequence(0).ok());
  for (const float value : {1.0F, 2.0F, 3.0F}) ASSERT_TRUE(s.Step(0, value).ok());
  ASSERT_TRUE(s->ForkSequence(0, 1, 2).ok());
  EXPECT_EQ(s.Current(1), 2);
  EXPECT_EQ(s->GetSequenceLength(1).value(), 2);
  ASSERT_TRUE(s->ForkSequence(0, 2, 0).ok());
  EXPECT_EQ(s.Current(2), 9);
  EXPECT_TRUE(s.Refuses(StatusCode::kBadArgument, [&] { return s->ForkSequence(0, 3, 99); }));
  EXPECT_TRUE(s.Refuses(StatusCode::kBadArgument, [&] { return s->ForkSequence(0, 3, -2); }));
  ASSERT_TRUE(s.Step(0, 7, 10).ok());
  EXPECT_TRUE(s.Refuses(StatusCode::kNeedsReplay, [&] { return s->ForkSequence(0, 3, 8); }));
  EXPECT_EQ(s->ReplayStart(0, 8).value(), 3);
  ASSERT_TRUE(s->ForkSequence(0, 3, 3).ok());
  EXPECT_EQ(s.Current(3), 3);
}

TEST(RNNStateTest, BeginInsideAForwardIsRefused) {
  ScalarState s(ScalarOptions(2));
  for (const int64_t id : {0, 1}) {
    ASSERT_TRUE(s->AddSequence(id).ok());
    ASSERT_TRUE(s.Step(id, static_cast<float>(10 + id)).ok());
  }
  ASSERT_TRUE(s.Begin({0}, {1}).ok());
  EXPECT_TRUE(s.Refuses(StatusCode::kBadState, [&] { return s.Begin({1}, {1}); }));
  EXPECT_EQ(s.Get(1), Values{10}) << "the state of the batch that was begun";
}

TEST(RNNStateTest, EndWantsEveryState) {
  RNNStateOptions options = ScalarOptions(1);
  options.num_layers = 2;
  options.states = {{.shape = {}}, {.shape = {2, 3}, .dtype = DType::kI64}};
  const auto state = *RNNState::Create(options);
  ASSERT_TRUE(state->AddSequence(0).ok());
  ASSERT_TRUE(state->BeginForward(Ids{0}, Ids{3}).ok());
  float scalar = 5;
  std::vector<int64_t> matrix = {1, 2, 3, 4, 5, 6};
  for (int64_t layer = 0; layer < 2; ++layer) {
    for (int64_t s = 0; s < 2; ++s) {
      const Status status = state->EndForward();
      EXPECT_EQ(status.code(), StatusCode::kBadState);
      const std::string missing =
          "state " + std::to_string(s) + " of layer " + std::to_string(layer);
      EXPECT_NE(status.message().find(missing), std::string::npos) << status.ToString();
      const TensorView data = s == 0 ? TensorView(&scalar, DType::kF32, {1})
                                     : TensorView(matrix.data(), DType::kI64, {1, 2, 3});
      ASSERT_TRUE(state->Set(layer, s, data).ok());
    }
  }
  ASSERT_TRUE(state->EndForward().ok());
  std::vector<int64_t> read(6);
  ASSERT_TRUE(state->DebugGet(1, 1, 0, TensorView(read.data(), DType::kI64, {2, 3})).ok());
  EXPECT_EQ(read, matrix);
}

TEST(RNNStateTest, NoStateIsTakenFromAnEarlierForward) {  // what one forward set, the next must too
  ScalarState s(ScalarOptions(1));
  ASSERT_TRUE(s->AddSequence(0).ok());
  ASSERT_TRUE(s.Step(0, 1).ok());
  ASSERT_TRUE(s.Begin({0}, {1}).ok());
  EXPECT_TRUE(s.Refuses(StatusCode::kBadState, [&] { return s->EndForward(); }));
  ASSERT_TRUE(s->AbortForward().ok());
  ASSERT_TRUE(s.Begin({0}, {1}).ok());
  ASSERT_TRUE(s.Set({3}).ok());
  ASSERT_TRUE(s->AbortForward().ok());
  ASSERT_TRUE(s.Begin({0}, {1}).ok());
  EXPECT_TRUE(s.Refuses(StatusCode::kBadState, [&] { return s->EndForward(); }));
}

TEST(RNNStateTest, AppendOfNothingIsRefused) {
  ScalarState s(ScalarOptions(2));
  ASSERT_TRUE(s->AddSequence(0).ok());
  EXPECT_TRUE(s.Refuses(StatusCode::kBadArgument, [&] { return s.Begin({0}, {0}); }));
  EXPECT_TRUE(s.Refuses(StatusCode::kBadArgument, [&] { return s.Begin({0}, {-1}); }));
  EXPECT_TRUE(s.Refuses(StatusCode::kTooLarge, [&] { return s.Begin({0}, {int64_t{1} << 40}); }));
  EXPECT_TRUE(s.Refuses(StatusCode::kBadArgument, [&] { return s.Begin({}, {}); }));
  EXPECT_TRUE(s.Refuses(StatusCode::kBadArgument, [&] { return s.Begin({0}, {1, 1}); }));
  EXPECT_TRUE(s.Refuses(StatusCode::kBadArgument, [&] { return s.Begin({0, 0}, {1, 1}); }));
  EXPECT_TRUE(s.Refuses(StatusCode::kUnknownSequence, [&] { return s.Begin({0, 5}, {1, 1}); }));
  ASSERT_TRUE(s.Step(0, 1).ok());
}

TEST(RNNStateTest, EndTwiceIsRefused) {
  ScalarState s(ScalarOptions(2));
  EXPECT_TRUE(s.Refuses(StatusCode::kBadState, [&] { return s->EndForward(); }));
  ASSERT_TRUE(s->AddSequence(0).ok());
  ASSERT_TRUE(s.Step(0, 1).ok());
  EXPECT_TRUE(s.Refuses(StatusCode::kBadState, [&] { return s->EndForward(); }));
  EXPECT_EQ(s->GetSequenceLength(0).value(), 1);
}

TEST(RNNStateTest, MembersOfTheBatchStayAsTheyAre) {
  ScalarState s(ScalarOptions(2));
  for (const int64_t id : {0, 1, 2}) {
    ASSERT_TRUE(s->AddSequence(id).ok());
    ASSERT_TRUE(s.Step(id, static_cast<float>(id)).ok());
  }
  ASSERT_TRUE(s.Begin({1, 0}, {1, 3}).ok());
  EXPECT_EQ(s->GetSequenceLength(0).value(), 4);
  for (const int64_t id : {0, 1}) {
    EXPECT_TRUE(s.Refuses(StatusCode::kBadState, [&] { return s->RemoveSequence(id); }));
    EXPECT_TRUE(s.Refuses(StatusCode::kBadState, [&] { return s->PopN(id, 1); }));
    EXPECT_TRUE(s.Refuses(StatusCode::kBadState, [&] { return s->ForkSequence(id, 7); }));
    EXPECT_TRUE(s.Refuses(StatusCode::kBadState, [&] { return s->SetRetained(id, true); }));
  }
  ASSERT_TRUE(s->ForkSequence(2, 7).ok());
  ASSERT_TRUE(s->PopN(7, 1).ok());
  ASSERT_TRUE(s->RemoveSequence(2).ok());
  ASSERT_TRUE(s->AddSequence(8).ok());
  EXPECT_EQ(s.Get(2), (Values{1, 0})) << "in the order of the batch";
  ASSERT_TRUE(s.Set({11, 10}).ok());
  ASSERT_TRUE(s->EndForward().ok());
  EXPECT_EQ(s.Current(0), 10);
  EXPECT_EQ(s.Current(1), 11);
  EXPECT_EQ(s.Current(7), 9);
  EXPECT_TRUE(s->CheckInvariants().ok());
}

// ---------------------------------------------------------------------- beyond

TEST(RNNStateTest, HistoryWrapsManyTimes) {
  for (const int64_t history : {1, 2, 3, 7}) {
    ScalarState s(ScalarOptions(history));
    for (const int64_t id : {0, 1}) ASSERT_TRUE(s->AddSequence(id).ok());
    for (int i = 1; i <= 50; ++i) {
      ASSERT_TRUE(s.Begin({0, 1}, {1, 1 + i % 3}).ok());
      ASSERT_TRUE(s.Set({static_cast<float>(i), static_cast<float>(100 + i)}).ok());
      ASSERT_TRUE(s->EndForward().ok());
    }
    for (int64_t back = 1; back < history; ++back) {
      ASSERT_TRUE(s->PopN(0, 1).ok()) << history;
      EXPECT_EQ(s.Current(0), static_cast<float>(50 - back));
    }
    EXPECT_TRUE(s.Refuses(StatusCode::kNeedsReplay, [&] { return s->PopN(0, 1); }));
    EXPECT_EQ(s.Current(1), 150);
    ASSERT_TRUE(s->PopN(1, s->GetSequenceLength(1).value()).ok()) << "0 is always reached";
    EXPECT_EQ(s.Current(1), 9);
  }
}

TEST(RNNStateTest, CheckpointsInsideAForward) {
  ScalarState s(ScalarOptions(1, 2));
  for (const int64_t id : {0, 1}) ASSERT_TRUE(s->AddSequence(id).ok());
  ASSERT_TRUE(s.Begin({0, 1}, {5, 10}).ok());
  ASSERT_TRUE(s.SetAt({8, 1, 4}, {24, 12, 15}).ok());  // row 8 is sequence 1's fourth token
  EXPECT_TRUE(s.Refuses(StatusCode::kTooLarge, [&] { return s.SetAt({0, 2}, {0, 0}); }));
  EXPECT_TRUE(s.Refuses(StatusCode::kBadArgument, [&] { return s.SetAt({2, 2}, {0, 0}); }));
  EXPECT_TRUE(s.Refuses(StatusCode::kBadArgument, [&] { return s.SetAt({15}, {0}); }));
  float read[2] = {NAN, NAN};
  const TensorView o(read, DType::kF32, {2, 1});
  ASSERT_TRUE(s->GetAt(0, 0, Ids{1, 8}, o).ok());
  EXPECT_EQ(read[0], 12);
  EXPECT_EQ(read[1], 24);
  EXPECT_TRUE(s.Refuses(StatusCode::kBadState, [&] { return s->GetAt(0, 0, Ids{1, 14}, o); }));
  EXPECT_TRUE(s.Refuses(StatusCode::kBadState, [&] { return s->EndForward(); }));
  ASSERT_TRUE(s.SetAt({14}, {30}).ok());  // sequence 0's end was given as row 4
  ASSERT_TRUE(s->EndForward().ok());
  EXPECT_EQ(s.Current(0), 15);
  EXPECT_EQ(s.Current(1), 30);
  ASSERT_TRUE(s->ForkSequence(1, 2, 4).ok());
  EXPECT_EQ(s.Current(2), 24);
  EXPECT_TRUE(s.Refuses(StatusCode::kNeedsReplay, [&] { return s->PopN(0, 2); }));
  EXPECT_EQ(s->ReplayStart(0, 3).value(), 2);
  ASSERT_TRUE(s->PopN(0, 3).ok());
  EXPECT_EQ(s.Current(0), 12);
  ASSERT_TRUE(s.Step(0, 13).ok());
  ASSERT_TRUE(s->PopN(0, 1).ok()) << "the checkpoint outlives the step";
  EXPECT_EQ(s.Current(0), 12);
  EXPECT_TRUE(s->CheckInvariants().ok());
}

TEST(RNNStateTest, CheckpointsAreThinned) {
  ScalarState s(ScalarOptions(1, 4));
  ASSERT_TRUE(s->AddSequence(0).ok());
  for (int64_t i = 0; i < 64; ++i) {
    ASSERT_TRUE(s.Begin({0}, {2}).ok());
    ASSERT_TRUE(s.SetAt({0}, {static_cast<float>(2 * i + 1)}).ok());
    ASSERT_TRUE(s.Set({static_cast<float>(2 * i + 2)}).ok());
    ASSERT_TRUE(s->EndForward().ok());
  }
  Ids held;
  for (int64_t p = 1; p < 128; ++p) {
    if (s->ReplayStart(0, p).value() == p) held.push_back(p);
  }
  ASSERT_EQ(held.size(), 4u);
  for (size_t i = 2; i < held.size(); ++i) {
    EXPECT_LE(held[i] - held[i - 1], held[i - 1] - held[i - 2]) << "denser towards the end";
  }
  EXPECT_EQ(held.back(), 127);
  for (size_t i = held.size(); i-- > 0;) {
    ASSERT_TRUE(s->PopN(0, s->GetSequenceLength(0).value() - held[i]).ok());
    EXPECT_EQ(s.Current(0), static_cast<float>(held[i]));
  }
}

TEST(RNNStateTest, RetainedSequencesKeepStateAndCheckpoints) {
  ScalarState s(ScalarOptions(3, 1));
  ASSERT_TRUE(s->AddSequence(0).ok());
  ASSERT_TRUE(s.Begin({0}, {4}).ok());
  ASSERT_TRUE(s.SetAt({1, 3}, {2, 4}).ok());
  ASSERT_TRUE(s->EndForward().ok());
  ASSERT_TRUE(s.Step(0, 5).ok());
  const int64_t free = s->slot_counts().free;
  ASSERT_TRUE(s->SetRetained(0, true).ok());
  EXPECT_EQ(s->slot_counts().retained, 2);
  EXPECT_EQ(s->slot_counts().free, free + 1) << "history is given up";
  EXPECT_EQ(s->retained_sequence_count(), 1);
  EXPECT_TRUE(s.Refuses(StatusCode::kBadState, [&] { return s.Begin({0}, {1}); }));
  ASSERT_TRUE(s->ForkSequence(0, 1, 2).ok());
  EXPECT_EQ(s.Current(1), 2);
  EXPECT_EQ(s->retained_sequence_count(), 1) << "forks are active";
  for (const int64_t id : {2, 3, 4}) ASSERT_TRUE(s->AddSequence(id).ok());
  EXPECT_TRUE(s.Refuses(StatusCode::kTooLarge, [&] { return s->AddSequence(5); }));
  EXPECT_TRUE(s.Refuses(StatusCode::kTooLarge, [&] { return s->SetRetained(0, false); }));
  for (const int64_t id : {2, 3, 4}) ASSERT_TRUE(s.Step(id, 1).ok());
  ASSERT_TRUE(s->SetRetained(1, true).ok()) << "its slot is counted already";
  EXPECT_EQ(s->slot_counts().retained, 2);
  ASSERT_TRUE(s->SetRetained(2, true).ok());
  ASSERT_TRUE(s->SetRetained(3, true).ok());
  EXPECT_TRUE(s.Refuses(StatusCode::kOutOfPages, [&] { return s->SetRetained(4, true); }));
  ASSERT_TRUE(s->RemoveSequence(0).ok());
  EXPECT_EQ(s->slot_counts().retained, 3);
  ASSERT_TRUE(s->SetRetained(1, false).ok());
  EXPECT_EQ(s->slot_counts().retained, 2);
  ASSERT_TRUE(s.Step(1, 3).ok());
  EXPECT_TRUE(s->CheckInvariants().ok());
  ASSERT_TRUE(s->Clear().ok());
  EXPECT_EQ(s->slot_counts().retained, 0);
  EXPECT_EQ(s->slot_counts().free, s->slot_counts().total);
}

TEST(RNNStateTest, ClearAbortsTheForward) {
  ScalarState s(ScalarOptions(2, 1));
  ASSERT_TRUE(s->AddSequence(0).ok());
  ASSERT_TRUE(s.Step(0, 1).ok());
  ASSERT_TRUE(s.Begin({0}, {3}).ok());
  ASSERT_TRUE(s.SetAt({0}, {1}).ok());
  ASSERT_TRUE(s->Clear().ok());
  EXPECT_EQ(s->sequence_count(), 0);
  EXPECT_EQ(s->slot_counts().free, s->slot_counts().total);
  EXPECT_TRUE(s.Refuses(StatusCode::kBadState, [&] { return s->EndForward(); }));
  ASSERT_TRUE(s->AddSequence(0).ok());
  EXPECT_EQ(s.Current(0), 9);
}

TEST(RNNStateTest, CallsInTheWrongState) {
  ScalarState s(ScalarOptions(1, 1));
  ASSERT_TRUE(s->AddSequence(0).ok());
  Values value(1, 0.0F);
  const TensorView view(value.data(), DType::kF32, {1, 1});
  EXPECT_TRUE(s.Refuses(StatusCode::kBadState, [&] { return s->Get(0, 0, view); }));
  EXPECT_TRUE(s.Refuses(StatusCode::kBadState, [&] { return s->Set(0, 0, view); }));
  EXPECT_TRUE(s.Refuses(StatusCode::kBadState, [&] { return s->GetAt(0, 0, Ids{0}, view); }));
  EXPECT_TRUE(s.Refuses(StatusCode::kBadState, [&] { return s->SetAt(0, 0, Ids{0}, view); }));
  EXPECT_TRUE(s.Refuses(StatusCode::kBadState, [&] { return s->AbortForward(); }));
}

TEST(RNNStateTest, BadArguments) {
  ScalarState s(ScalarOptions(1));
  EXPECT_TRUE(s.Refuses(StatusCode::kBadArgument, [&] { return s->AddSequence(-1); }));
  ASSERT_TRUE(s->AddSequence(0).ok());
  EXPECT_TRUE(s.Refuses(StatusCode::kSequenceExists, [&] { return s->AddSequence(0); }));
  EXPECT_TRUE(s.Refuses(StatusCode::kSequenceExists, [&] { return s->ForkSequence(0, 0); }));
  EXPECT_TRUE(s.Refuses(StatusCode::kUnknownSequence, [&] { return s->ForkSequence(1, 2); }));
  EXPECT_TRUE(s.Refuses(StatusCode::kUnknownSequence, [&] { return s->RemoveSequence(1); }));
  EXPECT_TRUE(s.Refuses(StatusCode::kBadArgument, [&] { return s->PopN(0, 1); }));
  EXPECT_TRUE(s.Refuses(StatusCode::kBadArgument, [&] { return s->PopN(0, -1); }));
  ASSERT_TRUE(s.Begin({0}, {1}).ok());
  Values two(2, 0.0F);
  const TensorView good(two.data(), DType::kF32, {1, 1});
  const auto refuses = [&](int64_t layer, int64_t state, const TensorView& view) {
    return s.Refuses(StatusCode::kBadArgument, [&] { return s->Set(layer, state, view); }) &&
           s.Refuses(StatusCode::kBadArgument, [&] { return s->Get(layer, state, view); });
  };
  EXPECT_TRUE(refuses(1, 0, good));
  EXPECT_TRUE(refuses(-1, 0, good));
  EXPECT_TRUE(refuses(0, 1, good));
  EXPECT_TRUE(refuses(0, -1, good));
  EXPECT_TRUE(refuses(0, 0, TensorView(two.data(), DType::kF32, {2, 1})));
  EXPECT_TRUE(refuses(0, 0, TensorView(two.data(), DType::kF32, {1})));
  EXPECT_TRUE(refuses(0, 0, TensorView(two.data(), DType::kI32, {1, 1})));
  EXPECT_TRUE(refuses(0, 0, TensorView(static_cast<void*>(nullptr), DType::kF32, {1, 1})));
}

TEST(RNNStateTest, BadOptions) {
  const auto refused = [](auto&& change) {
    RNNStateOptions options = ScalarOptions(1);
    change(options);
    return RNNState::Create(options).status().code() == StatusCode::kBadArgument;
  };
  EXPECT_TRUE(refused([](RNNStateOptions& o) { o.num_layers = 0; }));
  EXPECT_TRUE(refused([](RNNStateOptions& o) { o.max_num_sequences = 0; }));
  EXPECT_TRUE(refused([](RNNStateOptions& o) { o.max_num_sequences = int64_t{1} << 50; }));
  EXPECT_TRUE(refused([](RNNStateOptions& o) { o.max_history = 0; }));
  EXPECT_TRUE(refused([](RNNStateOptions& o) { o.max_history = int64_t{1} << 30; }));
  EXPECT_TRUE(refused([](RNNStateOptions& o) { o.max_checkpoints = -1; }));
  EXPECT_TRUE(refused([](RNNStateOptions& o) { o.max_retained_slots = -1; }));
  EXPECT_TRUE(refused([](RNNStateOptions& o) { o.states.clear(); }));
  EXPECT_TRUE(refused([](RNNStateOptions& o) { o.states[0].shape = {0}; }));
  EXPECT_TRUE(refused([](RNNStateOptions& o) { o.states[0].shape = {int64_t{1} << 40, 1 << 20}; }));
  EXPECT_TRUE(refused([](RNNStateOptions& o) { o.states[0].shape.assign(6, 1); }));
  EXPECT_TRUE(refused([](RNNStateOptions& o) { o.states[0].shape = {2}; })) << "initial has {1}";
  EXPECT_TRUE(refused([](RNNStateOptions& o) { o.states[0].dtype = DType::kBF16; }));
}

TEST(RNNStateTest, MemoryIsKnownBeforehand) {
  RNNStateOptions options = ScalarOptions(3, 2);
  options.states.push_back({.shape = {1024}, .dtype = DType::kBF16});
  options.num_layers = 5;
  const auto state = *RNNState::Create(options);
  const int64_t slots = 4 * (3 + 2 + 2 + 1) + 4;
  EXPECT_EQ(state->slot_counts().total, slots);
  EXPECT_EQ(state->storage_bytes(), static_cast<int64_t>(HostMemory::AllocatedBytes(
                                        static_cast<size_t>(slots * 5 * (64 + 2048)))));
}

TEST(RNNStateTest, RowsMayBeApart) {
  RNNStateOptions options = ScalarOptions(1);
  options.states = {{.shape = {2}}};
  const auto state = *RNNState::Create(options);
  for (const int64_t id : {0, 1}) ASSERT_TRUE(state->AddSequence(id).ok());
  float data[6] = {1, 2, -1, 3, 4, -1};
  DLTensor wide{};
  int64_t shape[2] = {2, 2};
  int64_t strides[2] = {3, 1};
  wide.data = data;
  wide.device = {kDLCPU, 0};
  wide.ndim = 2;
  wide.dtype = ToDLDataType(DType::kF32);
  wide.shape = shape;
  wide.strides = strides;
  ASSERT_TRUE(state->BeginForward(Ids{0, 1}, Ids{1, 1}).ok());
  ASSERT_TRUE(state->Set(0, 0, *TensorView::FromDLPack(wide)).ok());
  ASSERT_TRUE(state->EndForward().ok());
  float read[2];
  ASSERT_TRUE(state->DebugGet(0, 0, 1, TensorView(read, DType::kF32, {2})).ok());
  EXPECT_EQ(read[0], 3);
  EXPECT_EQ(read[1], 4);
}

TEST(ThinPositionsTest, GapsGrowWithTheDistanceFromTheEnd) {
  std::vector<int64_t> positions;
  for (int64_t p = 64; p <= 64 * 1024; p += 64) {
    positions.push_back(p);
    ThinPositions(positions, 8, p + 1);
  }
  ASSERT_EQ(positions.size(), 8u);
  for (size_t i = 1; i + 1 < positions.size(); ++i) {
    EXPECT_LE(positions[i + 1] - positions[i], positions[i] - positions[i - 1]);
  }
  EXPECT_GE(positions.back(), 64 * 1023);
  ThinPositions(positions, 0, 1 << 20);
  EXPECT_TRUE(positions.empty());
}

}  // namespace
}  // namespace quire
