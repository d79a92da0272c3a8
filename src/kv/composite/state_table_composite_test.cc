// What every call of CompositeState and its KVTransfer answers in every state.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "kv/testing/kv_test_bytes.h"
#include "kv/testing/kv_test_forward.h"
#include "kv/testing/recurrent_test_forward.h"
#include "kv/testing/state_table.h"
#include "quire/composite_state.h"
#include "quire/recurrent_cache.h"

namespace quire {
namespace {

using Ids = std::vector<int64_t>;
using Tokens = std::vector<uint64_t>;

constexpr int64_t kLoaded = 3;  // tokens

// Takes all it is given.
class DeafSink final : public LayerSink {
 public:
  Status OnLayerAppended(int64_t, std::span<const SendRange>) override { return Status(); }
  Status OnForwardEnded(std::span<const SendRecord>) override { return Status(); }
  Status OnForwardAborted(std::span<const SendRecord>) override { return Status(); }
  Status OnSendStopped(std::span<const SendRecord>, const Status&) override { return Status(); }
};

Tokens Text(int64_t count) {
  Tokens tokens;
  for (int64_t i = 0; i < count; ++i) tokens.push_back(100 + static_cast<uint64_t>(i));
  return tokens;
}

// A composite of an attention cache and a recurrent one, and what its layers are run with.
struct Model {
  Model() {
    AttentionKVCacheOptions attention_options = TestCacheOptions(
        {{2, 1, 4, 4, DType::kF32}},
        {.max_num_sequences = 8, .token_capacity = 100, .prefill_chunk_size = 16, .page_size = 4});
    attention = *AttentionKVCache::Create(attention_options);
    RecurrentCacheOptions options;
    options.layers = AllRecurrentKinds();
    options.max_num_sequences = 8;
    options.prefill_chunk_size = 16;
    options.max_tree_slots = 8;
    options.max_retained_slots = 8;
    options.max_loads = 2;
    options.runner = std::make_shared<SerialRunner>();
    options.poison_freed_slots = true;
    cache = *RecurrentCache::Create(options);
    state = *CompositeState::Create({.attention = attention, .recurrent = {cache}});
  }
  void RunLayers(int64_t rows) const {
    LayerOutputs outputs;
    EXPECT_TRUE(
        RunLayer(*attention, attention->options().layers[0], 0, Text(rows), {}, &outputs).ok());
    EXPECT_TRUE(RunRecurrentLayers(*cache, Text(rows), nullptr).ok());
  }
  void Run(int64_t id, int64_t count) const {
    EXPECT_TRUE(state->BeginForward(Ids{id}, Ids{count}).ok());
    RunLayers(count);
    EXPECT_TRUE(state->EndForward().ok());
  }

  std::shared_ptr<AttentionKVCache> attention;
  std::shared_ptr<RecurrentCache> cache;
  std::unique_ptr<CompositeState> state;
};

// Tokens of one layer, and the states behind them.
class Source final : public LayerSource {
 public:
  Source(const LayerKV& rows, const std::vector<TestTensor>& states)
      : rows_(rows), states_(states) {}
  Result<std::span<const LayerKV>> Load(int64_t) override {
    return std::span<const LayerKV>(&rows_, 1);
  }
  Result<TensorView> LoadState(int64_t layer) override {
    return states_[static_cast<size_t>(layer)].view();
  }

 private:
  const LayerKV rows_;
  const std::vector<TestTensor>& states_;
};

class Scene final : public TableScene {
 public:
  explicit Scene(At at) {
    CompositeState& s = *model_.state;
    for (const int64_t id : {kSubject, kOther, kEmpty, kArrived})
      EXPECT_TRUE(s.AddSequence(id).ok());
    model_.Run(kSubject, kSubjectLength);
    model_.Run(kOther, kOtherLength);
    Model receiver;
    EXPECT_TRUE(receiver.state->AddSequence(0).ok());
    map_ = *receiver.state->transfer()->DisaggPrepareRecv(0, kSubjectLength + 3);
    EXPECT_TRUE(s.transfer()->SetLayerSink(std::make_shared<DeafSink>()).ok());
    stored_ = StoredRows(model_.attention->options().layers[0], kLoaded);
    EXPECT_TRUE(model_.attention->ExportKV(kOther, 0, 0, stored_.view()).ok());
    block_ = {stored_.view()};
    for (const RecurrentLayerSpec& spec : AllRecurrentKinds()) {
      const bool convolves = spec.kind == RecurrentLayerKind::kConvolution;
      states_.push_back(
          convolves ? TestTensor(DType::kF32, {spec.width - 1, spec.num_channels})
                    : TestTensor(DType::kF32, {spec.num_heads, spec.key_dim, spec.value_dim}));
      views_[0].push_back(states_.back().view());
    }
    source_ = std::make_unique<Source>(stored_.view(), states_);
    Receive();
    Enter(at);
  }

  KVState& state() override { return *model_.state; }
  uint64_t StateDigest() const override { return model_.state->StateDigest(); }
  Status CheckInvariants() const override { return model_.state->CheckInvariants(); }
  bool IsEmpty() const override {
    const StateSlotCounts slots = model_.cache->slot_counts();
    return model_.state->sequence_count() == 0 && model_.attention->pages_in_use() == 0 &&
           slots.free == slots.total;
  }
  TableCalls Calls() override {
    TableCalls calls;
    AddStateCalls(*model_.state, &calls);
    AddTransferCalls({model_.state->transfer(), arrived_, own_, &map_}, &calls);
    AddOwnCalls(&calls);
    return calls;
  }

 private:
  // Two tokens of kArrived, and the states behind them.
  void Receive() {
    KVTransfer& transfer = *model_.state->transfer();
    arrived_ = transfer.DisaggPrepareRecv(kArrived, 2)->epoch;
    for (int64_t layer = 0; layer <= std::ssize(states_); ++layer) {
      const bool is_state = layer > 0;
      const ReceivePart part{.first_row = is_state ? 1 : 0,
                             .count = is_state ? 1 : 2,
                             .first_head = 0,
                             .head_count = 1};
      const ReceiveView view = *transfer.View(arrived_, layer, part);
      for (const TensorView* tensor : {&view.rows.k, &view.rows.v}) {
        if (tensor->rank() > 0)
          std::fill_n(tensor->data_as<float>(), tensor->element_count(), 0.5F);
      }
      const uint32_t digest = DigestOfHeads(view.rows, 0, 1);
      EXPECT_TRUE(transfer.Store(arrived_, layer, part, view, digest).ok());
      EXPECT_TRUE(transfer.Complete(arrived_, layer, part).ok());
    }
  }

  void Enter(At at) {
    CompositeState& s = *model_.state;
    Status status;
    switch (at) {
      case At::kIdle:
        break;
      case At::kFailed:
      case At::kChain:
        status = s.BeginForward(Ids{kSubject}, Ids{kNewRows});
        if (at == At::kFailed) {
          EXPECT_FALSE(model_.attention->Append(9, TensorView(), TensorView()).ok());
        }
        break;
      case At::kTree:
      case At::kUncommitted:
        status = s.BeginTreeForward(Ids{kSubject}, Ids{kNewRows}, Ids{-1, 0});
        if (at == At::kTree) break;
        model_.RunLayers(kNewRows);
        EXPECT_TRUE(s.EndForward().ok());
        break;
      case At::kLoading: {
        const LayerLoad load{.seq_id = kSubject, .tokens = kLoaded, .source = source_.get()};
        status = s.BeginLoadingForward(Ids{kSubject}, Ids{kNewRows}, std::span(&load, 1));
        break;
      }
      case At::kPending: {
        const auto map = s.transfer()->DisaggPrepareRecv(kSubject, kNewRows);
        status = map.status();
        if (map.ok()) own_ = map->epoch;
        break;
      }
      case At::kRetained:
        status = s.SetRetained(kSubject, true);
        break;
      case At::kSending:
        status = s.transfer()->DisaggMarkSend(kSubject, 0, std::span(&map_, 1), 6, 0);
        break;
    }
    EXPECT_TRUE(status.ok()) << status.ToString();
  }

  Status Import(int64_t id, int64_t length) const {
    return model_.state->ImportState(
        id, length + kLoaded,
        {.blocks = std::span(&block_, 1), .tokens = std::span(&kLoaded, 1), .windows = {}}, views_);
  }
  void AddOwnCalls(TableCalls* calls) {
    TableCalls& c = *calls;
    CompositeState& s = *model_.state;
    const auto question = [](auto&& f) {
      return TableCall{[f] {
        static_cast<void>(f());
        return Status();
      }};
    };
    c["parts"] = question([&] { return &s.parts(); });
    c["SetRetained"] = {[&] { return s.SetRetained(kSubject, true); }};
    c["SetRetained: active"] = {[&] { return s.SetRetained(kSubject, false); }};
    c["SetRetained: another"] = {[&] { return s.SetRetained(kOther, true); }};
    c["ReplayStart"] = {[&] { return Answered(s.ReplayStart(kSubject, kSubjectLength)); }};
    c["ImportState"] = {[this] { return Import(kSubject, kSubjectLength); }};
    c["ImportState: another"] = {[this] { return Import(kOther, kOtherLength); }};
    c["BeginLoadingForward"] = {[this, &s] {
      const LayerLoad load{.seq_id = kSubject, .tokens = kLoaded, .source = source_.get()};
      return s.BeginLoadingForward(Ids{kSubject}, Ids{1}, std::span(&load, 1));
    }};
    c["BeginBlendingForward"] = {
        [&s] { return s.BeginBlendingForward(Ids{kSubject}, Ids{1}, {}, {}); }};
    c["EndForward: all run"] = {[&s] { return s.EndForward(); }, [this] { TryLayers(); }};
    c["transfer"] = question([&] { return s.transfer(); });
    c["HasSequence"] = question([&] { return s.HasSequence(kSubject); });
    c["sequence_count"] = question([&] { return s.sequence_count(); });
    c["GetSequenceLength"] = {[&] { return Answered(s.GetSequenceLength(kSubject)); }};
    c["StateDigest"] = question([&] { return s.StateDigest(); });
    c["CheckInvariants"] = {[&] { return s.CheckInvariants(); }};
  }
  // Where a forward is open and has not failed.
  void TryLayers() const {
    LayerOutputs outputs;
    const AttentionLayerSpec& spec = model_.attention->options().layers[0];
    static_cast<void>(RunLayer(*model_.attention, spec, 0, Text(kNewRows), {}, &outputs));
    static_cast<void>(RunRecurrentLayers(*model_.cache, Text(kNewRows), nullptr));
  }

  Model model_;
  ReceiveMap map_;
  StoredRows stored_;
  KVBlock block_;  // the first tokens of kOther
  std::vector<TestTensor> states_;
  std::vector<std::vector<TensorView>> views_{1};  // [part][tensor]
  std::unique_ptr<Source> source_;
  uint64_t arrived_ = 0;
  uint64_t own_ = 1000;
};

// clang-format off
constexpr TableRow kRows[] = {
  //                                           idle chain tree uncom load pend fail ret send
  {"Clear",                                       "o o o o o o o o o"},
  {"AddSequence",                                 "o o o o o o o o o"},
  {"RemoveSequence",                              "o S S o S o S o o"},
  {"RemoveSequence: another",                     "o o o o o o o o o"},
  {"ForkSequence",                                "o S S S S o S o o"},
  {"ForkSequence: at its tokens' end",            "o S S o S o S o o"},
  {"ForkSequence: another",                       "o o o o o o o o o"},
  {"PopN",                                        "o S S o S o S R o"},
  {"PopN: nothing",                               "o S S o S o S o o"},
  {"PopN: another",                               "o o o o o o o o o"},
  {"BeginForward",                                "o S S S S S S S o"},
  {"BeginForward: another",                       "o S S o S o S o o"},
  {"BeginTreeForward",                            "o S S o S S S S o"},
  {"BeginTreeForward: another",                   "o S S o S o S o o"},
  {"CommitAcceptedTokenTreeNodes",                "S S S o S S S S S"},
  {"CommitAcceptedTokenTreeNodes: none",          "S S S o S S S S S"},
  {"GetTreeSize",                                 "o o o o o o o o o"},
  {"EndForward",                                  "S S S S S S S S S"},
  {"AbortForward",                                "S o o S o S o S S"},
  {"DisaggPrepareRecv",                           "o S S S S S S S o"},
  {"DisaggPrepareRecv: another",                  "o S S o S o S o o"},
  {"DisaggCommitRecv",                            "N S S N S S S N N"},
  {"DisaggCommitRecv: another",                   "o S S o S o S o o"},
  {"DisaggCommitRecv: nothing",                   "N N N N N o N N N"},
  {"DisaggCancelRecv",                            "N N N N N o N N N"},
  {"DisaggCancelRecv: another",                   "o o o o o o o o o"},
  {"View",                                        "N N N N N o N N N"},
  {"View: another",                               "o o o o o o o o o"},
  {"Store",                                       "N N N N N o N N N"},
  {"Store: another",                              "o o o o o o o o o"},
  {"Complete",                                    "N N N N N o N N N"},
  {"Complete: another",                           "o o o o o o o o o"},
  {"FailReceive",                                 "N N N N N o N N N"},
  {"FailReceive: another",                        "o o o o o o o o o"},
  {"GetReceiveProgress",                          "N N N N N o N N N"},
  {"GetReceiveProgress: another",                 "o o o o o o o o o"},
  {"WaitReceived",                                "C C C C C T C C C"},
  {"WaitReceived: another",                       "o o o o o o o o o"},
  {"staging",                                     "o o o o o o o o o"},
  {"SetStagingLimit",                             "o o o o o o o o o"},
  {"SetLayerSink",                                "o S S o S o S o S"},
  {"DisaggMarkSend",                              "o S S o S o S o o"},
  {"DisaggMarkSend: another",                     "o S S o S o S o o"},
  {"DisaggUnmarkSend",                            "N S S N S N S N o"},
  {"DisaggDetachSend",                            "N S S N S N S N o"},
  {"DisaggFlushSend",                             "N S S N S N S N o"},
  {"GetSendProgress",                             "N N N N N N N N o"},
  {"parts",                                       "o o o o o o o o o"},
  {"SetRetained",                                 "o S S S S S S o o"},
  {"SetRetained: active",                         "o S S o S o S o o"},
  {"SetRetained: another",                        "o o o o o o o o o"},
  {"ReplayStart",                                 "o o o o o o o o o"},
  {"ImportState",                                 "o S S S S S S S o"},
  {"ImportState: another",                        "o S S o S o S o o"},
  {"BeginLoadingForward",                         "o S S S S S S S o"},
  {"BeginBlendingForward",                        "S S S S S S S S S"},
  {"EndForward: all run",                         "S o o S o S S S S"},
  {"transfer",                                    "o o o o o o o o o"},
  {"HasSequence",                                 "o o o o o o o o o"},
  {"sequence_count",                              "o o o o o o o o o"},
  {"GetSequenceLength",                           "o o o o o o o o o"},
  {"StateDigest",                                 "o o o o o o o o o"},
  {"CheckInvariants",                             "o o o o o o o o o"},
};
// clang-format on

TEST(StateTable, CompositeState) {
  constexpr std::pair<const char*, const char*> kInterfaces[] = {
      {"kv_state.h", "KVState"},
      {"composite_state.h", "CompositeState"},
      {"kv_transfer.h", "KVTransfer"}};
  ExpectTable([](At at) { return std::make_unique<Scene>(at); }, kRows, kInterfaces);
}

}  // namespace
}  // namespace quire
