// What every call of RNNState and RecurrentCache answers in every state.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "kv/testing/kv_test_forward.h"
#include "kv/testing/recurrent_test_forward.h"
#include "kv/testing/state_table.h"
#include "quire/recurrent_cache.h"
#include "quire/rnn_state.h"

namespace quire {
namespace {

using Ids = std::vector<int64_t>;
using Tokens = std::vector<uint64_t>;

Tokens Text(int64_t count) {
  Tokens tokens;
  for (int64_t i = 0; i < count; ++i) tokens.push_back(100 + static_cast<uint64_t>(i));
  return tokens;
}

// Whose answer is not a Status is a question that cannot fail.
template <typename F>
TableCall Question(F&& f) {
  return {[f] {
    static_cast<void>(f());
    return Status();
  }};
}

// Those of RecurrentState. `states`: all tensors of a state.
void AddRecurrentCalls(RecurrentState& s, const std::vector<TensorView>& states,
                       TableCalls* calls) {
  TableCalls& c = *calls;
  const TensorView one = states[0];
  c["SetRetained"] = {[&] { return s.SetRetained(kSubject, true); }};
  c["SetRetained: active"] = {[&] { return s.SetRetained(kSubject, false); }};
  c["SetRetained: another"] = {[&] { return s.SetRetained(kOther, true); }};
  c["ReplayStart"] = {[&] { return Answered(s.ReplayStart(kSubject, kSubjectLength)); }};
  c["ExportState"] = {[&s, one] { return s.ExportState(0, kSubject, kSubjectLength, one); }};
  c["ExportState: where none is held"] = {[&s, one] { return s.ExportState(0, kSubject, 2, one); }};
  c["ExportState: another"] = {[&s, one] { return s.ExportState(0, kOther, kOtherLength, one); }};
  c["ImportState"] = {[&s, states] { return s.ImportState(kSubject, kSubjectLength + 4, states); }};
  c["ImportState: another"] = {
      [&s, states] { return s.ImportState(kOther, kOtherLength + 4, states); }};
  c["HasSequence"] = Question([&] { return s.HasSequence(kSubject); });
  c["sequence_count"] = Question([&] { return s.sequence_count(); });
  c["retained_sequence_count"] = Question([&] { return s.retained_sequence_count(); });
  c["GetSequenceLength"] = {[&] { return Answered(s.GetSequenceLength(kSubject)); }};
  c["slot_counts"] = Question([&] { return s.slot_counts(); });
  c["storage_bytes"] = Question([&] { return s.storage_bytes(); });
  c["StateDigest"] = Question([&] { return s.StateDigest(); });
  c["CheckInvariants"] = {[&] { return s.CheckInvariants(); }};
}

// What scenes of both classes share.
class RecurrentScene : public TableScene {
 public:
  KVState& state() override { return *state_; }
  uint64_t StateDigest() const override { return state_->StateDigest(); }
  Status CheckInvariants() const override { return state_->CheckInvariants(); }
  bool IsEmpty() const override {
    const StateSlotCounts slots = state_->slot_counts();
    return state_->sequence_count() == 0 && slots.free == slots.total;
  }

 protected:
  explicit RecurrentScene(std::shared_ptr<RecurrentState> state) : state_(std::move(state)) {
    for (const int64_t id : {kSubject, kOther, kEmpty}) EXPECT_TRUE(state_->AddSequence(id).ok());
  }
  // Runs all layers of the open forward of `rows` rows, and ends it.
  virtual void Finish(int64_t rows) = 0;
  // Makes a call of a layer that is refused.
  virtual Status Refuse() = 0;
  void Enter(At at) {
    for (const auto& [id, length] : {std::pair(kSubject, kSubjectLength), {kOther, kOtherLength}}) {
      EXPECT_TRUE(state_->BeginForward(Ids{id}, Ids{length}).ok());
      Finish(length);
    }
    if (at == At::kChain || at == At::kFailed) {
      EXPECT_TRUE(state_->BeginForward(Ids{kSubject}, Ids{kNewRows}).ok());
    }
    if (at == At::kFailed) {
      EXPECT_FALSE(Refuse().ok());
    }
    if (at == At::kTree || at == At::kUncommitted) {
      EXPECT_TRUE(state_->BeginTreeForward(Ids{kSubject}, Ids{kNewRows}, Ids{-1, 0}).ok());
    }
    if (at == At::kUncommitted) Finish(kNewRows);
    if (at == At::kRetained) {
      EXPECT_TRUE(state_->SetRetained(kSubject, true).ok());
    }
  }

 private:
  const std::shared_ptr<RecurrentState> state_;
};

// ---------------------------------------------------------------------- RNNState

std::shared_ptr<RNNState> MakeRNNState() {
  RNNStateOptions options;
  options.num_layers = 1;
  options.states = {{.shape = {2}}};
  options.max_num_sequences = 8;
  options.max_checkpoints = 2;
  options.max_tree_slots = 8;
  options.max_retained_slots = 8;
  options.poison_freed_slots = true;
  return *RNNState::Create(options);
}

class RNNScene final : public RecurrentScene {
 public:
  explicit RNNScene(At at) : RNNScene(at, MakeRNNState()) {}
  TableCalls Calls() override {
    TableCalls c;
    RNNState& s = *state_;
    AddStateCalls(s, &c);
    AddRecurrentCalls(s, {one_.view()}, &c);
    const TensorView& row = row_.view();
    const TensorView& rows = rows_.view();
    c["options"] = Question([&] { return s.options().num_layers; });
    c["Get"] = {[&] { return s.Get(0, 0, row); }};
    c["Set"] = {[&] { return s.Set(0, 0, row); }};
    c["GetBefore"] = {[&] { return s.GetBefore(0, 0, Ids{0}, row); }};
    c["GetBefore: behind a row that was not set"] = {
        [&] { return s.GetBefore(0, 0, Ids{1}, row); }};
    c["GetAt"] = {[&] {
                    return s.GetAt(0, 0, Ids{0, 1}, rows);
                  },
                  [&] {
                    static_cast<void>(s.SetAt(0, 0, Ids{0, 1}, rows));
                  }};
    c["GetAt: rows that were not set"] = {[&] { return s.GetAt(0, 0, Ids{0, 1}, rows); }};
    c["SetAt"] = {[&] { return s.SetAt(0, 0, Ids{0, 1}, rows); }};
    c["EndForward: all set"] = {[&] { return s.EndForward(); },
                                [&] {
                                  static_cast<void>(s.SetAt(0, 0, Ids{0, 1}, rows));
                                }};
    c["DebugGet"] = {[&] { return s.DebugGet(0, 0, kSubject, one_.view()); }};
    return c;
  }

 private:
  RNNScene(At at, std::shared_ptr<RNNState> state)
      : RecurrentScene(state), state_(std::move(state)) {
    Enter(at);
  }
  // The last kNewRows: all of a tree, of a chain its end and a checkpoint.
  void Finish(int64_t rows) override {
    for (int64_t at = rows - kNewRows; at < rows; ++at)
      EXPECT_TRUE(state_->SetAt(0, 0, Ids{at}, row_.view()).ok());
    EXPECT_TRUE(state_->EndForward().ok());
  }
  Status Refuse() override { return state_->Set(9, 0, row_.view()); }

  const std::shared_ptr<RNNState> state_;
  TestTensor one_{DType::kF32, {2}}, row_{DType::kF32, {1, 2}}, rows_{DType::kF32, {2, 2}};
};

// clang-format off
constexpr TableRow kRNNRows[] = {
  //                                           idle chain tree uncom load pend fail ret send
  {"Clear",                                       "o o o o - - o o -"},
  {"AddSequence",                                 "o o o o - - o o -"},
  {"RemoveSequence",                              "o S S o - - S o -"},
  {"RemoveSequence: another",                     "o o o o - - o o -"},
  {"ForkSequence",                                "o S S S - - S o -"},
  {"ForkSequence: at its tokens' end",            "o S S o - - S o -"},
  {"ForkSequence: another",                       "o o o o - - o o -"},
  {"PopN",                                        "R S S o - - S R -"},
  {"PopN: nothing",                               "o S S o - - S o -"},
  {"PopN: another",                               "o o o o - - o o -"},
  {"BeginForward",                                "o S S S - - S S -"},
  {"BeginForward: another",                       "o S S o - - S o -"},
  {"BeginTreeForward",                            "o S S o - - S S -"},
  {"BeginTreeForward: another",                   "o S S o - - S o -"},
  {"CommitAcceptedTokenTreeNodes",                "S S S o - - S S -"},
  {"CommitAcceptedTokenTreeNodes: none",          "S S S o - - S S -"},
  {"GetTreeSize",                                 "o o o o - - o o -"},
  {"EndForward",                                  "S S S S - - S S -"},
  {"AbortForward",                                "S o o S - - o S -"},
  {"SetRetained",                                 "o S S S - - S o -"},
  {"SetRetained: active",                         "o S S o - - S o -"},
  {"SetRetained: another",                        "o o o o - - o o -"},
  {"ReplayStart",                                 "o o o o - - o o -"},
  {"ExportState",                                 "o o o o - - o o -"},
  {"ExportState: where none is held",             "R R R R - - R R -"},
  {"ExportState: another",                        "o o o o - - o o -"},
  {"ImportState",                                 "o S S S - - S S -"},
  {"ImportState: another",                        "o S S o - - S o -"},
  {"HasSequence",                                 "o o o o - - o o -"},
  {"sequence_count",                              "o o o o - - o o -"},
  {"retained_sequence_count",                     "o o o o - - o o -"},
  {"GetSequenceLength",                           "o o o o - - o o -"},
  {"slot_counts",                                 "o o o o - - o o -"},
  {"storage_bytes",                               "o o o o - - o o -"},
  {"StateDigest",                                 "o o o o - - o o -"},
  {"CheckInvariants",                             "o o o o - - o o -"},
  {"options",                                     "o o o o - - o o -"},
  {"Get",                                         "S o o S - - o S -"},
  {"Set",                                         "S o S S - - o S -"},
  {"GetBefore",                                   "S o o S - - o S -"},
  {"GetBefore: behind a row that was not set",    "S S S S - - S S -"},
  {"GetAt",                                       "S o o S - - o S -"},
  {"GetAt: rows that were not set",               "S S S S - - S S -"},
  {"SetAt",                                       "S o o S - - o S -"},
  {"EndForward: all set",                         "S o o S - - o S -"},
  {"DebugGet",                                    "o o o o - - o o -"},
};
// clang-format on

TEST(StateTable, RNNState) {
  constexpr std::pair<const char*, const char*> kInterfaces[] = {
      {"kv_state.h", "KVState"},
      {"recurrent_state.h", "RecurrentState"},
      {"rnn_state.h", "RNNState"}};
  ExpectTable([](At at) { return std::make_unique<RNNScene>(at); }, kRNNRows, kInterfaces);
}

// ---------------------------------------------------------------------- RecurrentCache

// Layers of AllRecurrentKinds.
constexpr int64_t kConvolutionLayer = 0;
constexpr int64_t kLinearLayer = 1;
constexpr int64_t kDeltaLayer = 2;
constexpr int64_t kSpaceLayer = 3;
constexpr double kScale = 0.5;

std::shared_ptr<RecurrentCache> MakeRecurrentCache() {
  RecurrentCacheOptions options;
  options.layers = AllRecurrentKinds();
  options.max_num_sequences = 8;
  options.prefill_chunk_size = 64;
  options.max_tree_slots = 8;
  options.max_retained_slots = 8;
  options.runner = std::make_shared<SerialRunner>();
  options.poison_freed_slots = true;
  return *RecurrentCache::Create(options);
}

class RecurrentCacheScene final : public RecurrentScene {
 public:
  explicit RecurrentCacheScene(At at) : RecurrentCacheScene(at, MakeRecurrentCache()) {}
  TableCalls Calls() override {
    TableCalls c;
    RecurrentCache& s = *state_;
    AddStateCalls(s, &c);
    std::vector<TensorView> states;
    for (const TestTensor& tensor : states_) states.push_back(tensor.view());
    AddRecurrentCalls(s, states, &c);
    c["options"] = Question([&] { return s.options().max_num_sequences; });
    c["LinearAttention"] = {[this] { return RunLayer(kLinearLayer); }};
    c["LinearAttention: again"] = {[this] { return RunLayer(kLinearLayer); },
                                   [this] { static_cast<void>(RunLayer(kLinearLayer)); }};
    c["LinearAttention: of a layer of another kind"] = {[this, &s] {
      const TensorView& t = states_[0].view();
      return s.LinearAttention(kDeltaLayer, t, t, t, t, t, kScale);
    }};
    c["GatedDelta"] = {[this] { return RunLayer(kDeltaLayer); }};
    c["StateSpace"] = {[this] { return RunLayer(kSpaceLayer); }};
    c["Convolution"] = {[this] { return RunLayer(kConvolutionLayer); }};
    c["EndForward: all run"] = {
        [&s] { return s.EndForward(); },
        [&s] { static_cast<void>(RunRecurrentLayers(s, Text(kNewRows), nullptr)); }};
    c["DebugGet"] = {[this, &s] { return s.DebugGet(0, kSubject, states_[0].view()); }};
    return c;
  }

 private:
  RecurrentCacheScene(At at, std::shared_ptr<RecurrentCache> state)
      : RecurrentScene(state), state_(std::move(state)) {
    for (const RecurrentLayerSpec& spec : AllRecurrentKinds()) {
      const bool convolves = spec.kind == RecurrentLayerKind::kConvolution;
      states_.push_back(
          convolves ? TestTensor(DType::kF32, {spec.width - 1, spec.num_channels})
                    : TestTensor(DType::kF32, {spec.num_heads, spec.key_dim, spec.value_dim}));
    }
    Enter(at);
  }
  Status RunLayer(int64_t layer) {
    return RunRecurrentLayer(*state_, layer, Text(kNewRows), nullptr);
  }
  void Finish(int64_t rows) override {
    EXPECT_TRUE(RunRecurrentLayers(*state_, Text(rows), nullptr).ok());
    EXPECT_TRUE(state_->EndForward().ok());
  }
  Status Refuse() override {
    const TensorView& t = states_[0].view();
    return state_->Convolution(kConvolutionLayer, t, t, nullptr, false, t);
  }

  const std::shared_ptr<RecurrentCache> state_;
  std::vector<TestTensor> states_;
};

// clang-format off
constexpr TableRow kCacheRows[] = {
  //                                           idle chain tree uncom load pend fail ret send
  {"Clear",                                       "o o o o - - o o -"},
  {"AddSequence",                                 "o o o o - - o o -"},
  {"RemoveSequence",                              "o S S o - - S o -"},
  {"RemoveSequence: another",                     "o o o o - - o o -"},
  {"ForkSequence",                                "o S S S - - S o -"},
  {"ForkSequence: at its tokens' end",            "o S S o - - S o -"},
  {"ForkSequence: another",                       "o o o o - - o o -"},
  {"PopN",                                        "o S S o - - S R -"},
  {"PopN: nothing",                               "o S S o - - S o -"},
  {"PopN: another",                               "o o o o - - o o -"},
  {"BeginForward",                                "o S S S - - S S -"},
  {"BeginForward: another",                       "o S S o - - S o -"},
  {"BeginTreeForward",                            "o S S o - - S S -"},
  {"BeginTreeForward: another",                   "o S S o - - S o -"},
  {"CommitAcceptedTokenTreeNodes",                "S S S o - - S S -"},
  {"CommitAcceptedTokenTreeNodes: none",          "S S S o - - S S -"},
  {"GetTreeSize",                                 "o o o o - - o o -"},
  {"EndForward",                                  "S S S S - - S S -"},
  {"AbortForward",                                "S o o S - - o S -"},
  {"SetRetained",                                 "o S S S - - S o -"},
  {"SetRetained: active",                         "o S S o - - S o -"},
  {"SetRetained: another",                        "o o o o - - o o -"},
  {"ReplayStart",                                 "o o o o - - o o -"},
  {"ExportState",                                 "o o o o - - o o -"},
  {"ExportState: where none is held",             "R R R R - - R R -"},
  {"ExportState: another",                        "o o o o - - o o -"},
  {"ImportState",                                 "o S S S - - S S -"},
  {"ImportState: another",                        "o S S o - - S o -"},
  {"HasSequence",                                 "o o o o - - o o -"},
  {"sequence_count",                              "o o o o - - o o -"},
  {"retained_sequence_count",                     "o o o o - - o o -"},
  {"GetSequenceLength",                           "o o o o - - o o -"},
  {"slot_counts",                                 "o o o o - - o o -"},
  {"storage_bytes",                               "o o o o - - o o -"},
  {"StateDigest",                                 "o o o o - - o o -"},
  {"CheckInvariants",                             "o o o o - - o o -"},
  {"options",                                     "o o o o - - o o -"},
  {"LinearAttention",                             "S o o S - - o S -"},
  {"LinearAttention: again",                      "S o o S - - o S -"},
  {"LinearAttention: of a layer of another kind", "S A A S - - A S -"},
  {"GatedDelta",                                  "S o o S - - o S -"},
  {"StateSpace",                                  "S o o S - - o S -"},
  {"Convolution",                                 "S o o S - - o S -"},
  {"EndForward: all run",                         "S o o S - - o S -"},
  {"DebugGet",                                    "o o o o - - o o -"},
};
// clang-format on

TEST(StateTable, RecurrentCache) {
  constexpr std::pair<const char*, const char*> kInterfaces[] = {
      {"kv_state.h", "KVState"},
      {"recurrent_state.h", "RecurrentState"},
      {"recurrent_cache.h", "RecurrentCache"}};
  ExpectTable([](At at) { return std::make_unique<RecurrentCacheScene>(at); }, kCacheRows,
              kInterfaces);
}

}  // namespace
}  // namespace quire
