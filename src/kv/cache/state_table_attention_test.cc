// What every call of AttentionKVCache and its KVTransfer answers in every state of the cache.
#include <gtest/gtest.h>

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "kv/testing/kv_test_forward.h"
#include "kv/testing/state_table.h"
#include "quire/attention_kv_cache.h"

namespace quire {
namespace {

using Ids = std::vector<int64_t>;
using Tokens = std::vector<uint64_t>;

constexpr int64_t kLayer = 0;
constexpr int64_t kLatentLayer = 1;
constexpr double kScale = 0.5;

// Takes all it is given.
class DeafSink final : public LayerSink {
 public:
  Status OnLayerAppended(int64_t, std::span<const SendRange>) override { return Status(); }
  Status OnForwardEnded(std::span<const SendRecord>) override { return Status(); }
  Status OnForwardAborted(std::span<const SendRecord>) override { return Status(); }
  Status OnSendStopped(std::span<const SendRecord>, const Status&) override { return Status(); }
};

AttentionKVCacheOptions Options() {
  AttentionLayerSpec latent{2, 1, 6, 4, DType::kF32};
  latent.rope = RopeOptions();
  latent.latent = true;
  AttentionKVCacheOptions options = TestCacheOptions(
      {{2, 1, 4, 4, DType::kF32}, latent},
      {.max_num_sequences = 8, .token_capacity = 100, .prefill_chunk_size = 16, .page_size = 4});
  options.rope.scaling = RopeScaling::kLongRope;
  options.rope.original_max_position_embeddings = 32;
  options.rope.factor = 2;
  options.rope.short_factors = {1, 1};
  options.rope.long_factors = {2, 4};
  return options;
}

Tokens Text(int64_t count) {
  Tokens tokens;
  for (int64_t i = 0; i < count; ++i) tokens.push_back(100 + static_cast<uint64_t>(i));
  return tokens;
}

// The map of a cache that waits for kSubjectLength + 3 tokens.
ReceiveMap MapOfAnother() {
  const auto receiver = MakeTestCache(Options());
  EXPECT_TRUE(receiver->AddSequence(0).ok());
  return *receiver->transfer()->DisaggPrepareRecv(0, kSubjectLength + 3);
}

// Nothing that a forward which is begun and aborted asks.
class NoHook final : public LayerHook {
 public:
  Result<RowSelection> BeforeAttention(int64_t, const FreshRows&) override {
    return RowSelection{};
  }
};
class NoSource final : public MovedSource {
 public:
  Result<std::span<const MovedRows>> Load(int64_t) override { return std::span<const MovedRows>(); }
};

class Scene final : public TableScene {
 public:
  explicit Scene(At at) : cache_(MakeTestCache(Options())), map_(MapOfAnother()) {
    for (const int64_t id : {kSubject, kOther, kEmpty, kArrived})
      EXPECT_TRUE(cache_->AddSequence(id).ok());
    for (const auto& [id, length] : {std::pair(kSubject, kSubjectLength), {kOther, kOtherLength}})
      EXPECT_TRUE(RunForward(*cache_, layers(), Ids{id}, {Text(length)}).ok());
    EXPECT_TRUE(transfer().SetLayerSink(std::make_shared<DeafSink>()).ok());
    Receive();
    for (size_t l = 0; l < layers().size(); ++l) {
      stored_.emplace_back(layers()[l], 3);
      block_.push_back(stored_.back().view());
      EXPECT_TRUE(cache_->ExportKV(kOther, static_cast<int64_t>(l), 0, block_.back()).ok());
    }
    Enter(at);
  }

  KVState& state() override { return *cache_; }
  uint64_t StateDigest() const override { return cache_->StateDigest(); }
  Status CheckInvariants() const override { return cache_->CheckInvariants(); }
  bool IsEmpty() const override { return cache_->Empty() && cache_->pages_in_use() == 0; }
  TableCalls Calls() override {
    TableCalls calls;
    AddStateCalls(*cache_, &calls);
    AddTransferCalls({&transfer(), arrived_, own_, &map_}, &calls);
    AddSequenceCalls(&calls);
    AddQueries(&calls);
    AddAttention(&calls);
    AddPieces(&calls);
    AddDebugCalls(&calls);
    return calls;
  }

 private:
  KVTransfer& transfer() { return *cache_->transfer(); }
  const std::vector<AttentionLayerSpec>& layers() const { return cache_->options().layers; }

  // Two tokens of kArrived, all of them.
  void Receive() {
    arrived_ = transfer().DisaggPrepareRecv(kArrived, 2)->epoch;
    const ReceivePart part{.first_row = 0, .count = 2, .first_head = 0, .head_count = 1};
    for (const int64_t layer : {kLayer, kLatentLayer}) {
      const ReceiveView view = *transfer().View(arrived_, layer, part);
      for (const TensorView* tensor : {&view.rows.k, &view.rows.v}) {
        if (tensor->rank() > 0)
          std::fill_n(tensor->data_as<float>(), tensor->element_count(), 0.5F);
      }
      const uint32_t digest = DigestOfHeads(view.rows, 0, 1);
      EXPECT_TRUE(transfer().Store(arrived_, layer, part, view, digest).ok());
      EXPECT_TRUE(transfer().Complete(arrived_, layer, part).ok());
    }
  }

  void Enter(At at) {
    Status status;
    switch (at) {
      case At::kIdle:
        break;
      case At::kFailed:
      case At::kChain:
        status = cache_->BeginForward(Ids{kSubject}, Ids{kNewRows});
        if (at == At::kFailed) {
          EXPECT_FALSE(cache_->AppendMLAKV(9, TensorView()).ok());
        }
        break;
      case At::kTree:
      case At::kUncommitted:
        status = cache_->BeginTreeForward(Ids{kSubject}, Ids{kNewRows}, Ids{-1, 0});
        if (at == At::kUncommitted) {
          EXPECT_TRUE(FinishForward(*cache_, layers(), Text(kNewRows)).ok());
        }
        break;
      case At::kLoading: {
        source_ = std::make_unique<BlockSource>(std::span(&block_, 1));
        const LayerLoad load{.seq_id = kSubject, .tokens = 3, .source = source_.get()};
        status = cache_->BeginLoadingForward(Ids{kSubject}, Ids{kNewRows}, std::span(&load, 1));
        break;
      }
      case At::kPending: {
        const auto map = transfer().DisaggPrepareRecv(kSubject, kNewRows);
        status = map.status();
        if (map.ok()) own_ = map->epoch;
        break;
      }
      case At::kRetained:
        status = cache_->SetRetained(kSubject, true);
        break;
      case At::kSending:
        status = transfer().DisaggMarkSend(kSubject, 0, std::span(&map_, 1), 6, 0);
        break;
    }
    EXPECT_TRUE(status.ok()) << status.ToString();
  }

  void AddSequenceCalls(TableCalls* calls) {
    TableCalls& c = *calls;
    AttentionKVCache& s = *cache_;
    c["SetRetained"] = {[&] { return s.SetRetained(kSubject, true); }};
    c["SetRetained: active"] = {[&] { return s.SetRetained(kSubject, false); }};
    c["SetRetained: another"] = {[&] { return s.SetRetained(kOther, true); }};
    c["EnableSlidingWindowForSeq"] = {[&] { return s.EnableSlidingWindowForSeq(kSubject, 4, 1); }};
    c["EnableSlidingWindowForSeq: another"] = {
        [&] { return s.EnableSlidingWindowForSeq(kOther, 4, 1); }};
    c["DisableSlidingWindowForSeq"] = {[&] { return s.DisableSlidingWindowForSeq(kSubject); }};
    c["DisableSlidingWindowForSeq: another"] = {
        [&] { return s.DisableSlidingWindowForSeq(kOther); },
        [&] { static_cast<void>(s.EnableSlidingWindowForSeq(kOther, 4, 1)); }};
    c["SelectLongRope"] = {[&] { return s.SelectLongRope(kSubject, true); }};
    c["SelectLongRope: of an empty one"] = {[&] { return s.SelectLongRope(kEmpty, true); }};
    c["BeginLoadingForward"] = {[this, &s] {
      BlockSource source(std::span(&block_, 1));
      const LayerLoad load{.seq_id = kSubject, .tokens = 3, .source = &source};
      const Status status = s.BeginLoadingForward(Ids{kSubject}, Ids{1}, std::span(&load, 1));
      return status.ok() ? s.AbortForward() : status;
    }};
    c["BeginBlendingForward"] = {[&s] {
      const int64_t checks[] = {0};
      NoHook hook;
      NoSource source;
      const BlendMember blend{
          .seq_id = kSubject, .hook = &hook, .source = &source, .check_layers = checks};
      const Status status = s.BeginBlendingForward(Ids{kSubject}, Ids{1}, {}, {&blend, 1});
      return status.ok() ? s.AbortForward() : status;
    }};
    c["ImportKV"] = {[this, &s] { return s.ImportKV(kSubject, std::span(&block_, 1)); }};
    c["ImportKV: another"] = {[this, &s] { return s.ImportKV(kOther, std::span(&block_, 1)); }};
    c["ImportVisibleKV"] = {[this, &s] { return Import(s, kSubject); }};
    c["ImportVisibleKV: another"] = {[this, &s] { return Import(s, kOther); }};
  }
  Status Import(AttentionKVCache& s, int64_t id) const {
    const int64_t count = 3;
    return s.ImportVisibleKV(
        id, {.blocks = std::span(&block_, 1), .tokens = std::span(&count, 1), .windows = {}});
  }

  // Whose answer is not a Status is a question that cannot fail.
  template <typename F>
  static TableCall Question(F&& f) {
    return {[f] {
      static_cast<void>(f());
      return Status();
    }};
  }
  void AddQueries(TableCalls* calls) {
    TableCalls& c = *calls;
    const AttentionKVCache& s = *cache_;
    c["options"] = Question([&] { return s.options().page_size; });
    c["HeldTokens"] = {[&] { return Answered(s.HeldTokens(kSubject)); }};
    c["SlidRange"] = {[&] { return Answered(s.SlidRange(kSubject)); }};
    c["GetWindows"] = {[&] { return Answered(s.GetWindows(kSubject)); }};
    c["CanFork"] = Question([&] { return s.CanFork(kSubject, 3); });
    c["Empty"] = Question([&] { return s.Empty(); });
    c["GetNumAvailablePages"] = Question([&] { return s.GetNumAvailablePages(); });
    c["GetTotalSequenceLength"] = Question([&] { return s.GetTotalSequenceLength(); });
    c["GetDistinctTokenCount"] = Question([&] { return s.GetDistinctTokenCount(); });
    c["sequence_count"] = Question([&] { return s.sequence_count(); });
    c["retained_sequence_count"] = Question([&] { return s.retained_sequence_count(); });
    c["page_counts"] = Question([&] { return s.page_counts(); });
    c["pages_in_use"] = Question([&] { return s.pages_in_use(); });
    c["pages_allocated"] = Question([&] { return s.pages_allocated(); });
    c["HasSequence"] = Question([&] { return s.HasSequence(kSubject); });
    c["GetSequenceLength"] = {[&] { return Answered(s.GetSequenceLength(kSubject)); }};
    c["PagesNeeded"] = {[&] { return Answered(s.PagesNeeded(Ids{kSubject}, Ids{2})); }};
    c["PagesNeeded: another"] = {[&] { return Answered(s.PagesNeeded(Ids{kOther}, Ids{2})); }};
    c["PagesNeededForTree"] = {[&] {
      return Answered(s.PagesNeededForTree(Ids{kSubject}, Ids{2}, Ids{-1, 0}));
    }};
    c["PagesNeededForTree: another"] = {[&] {
      return Answered(s.PagesNeededForTree(Ids{kOther}, Ids{2}, Ids{-1, 0}));
    }};
    c["UsesLongRope"] = {[&] { return Answered(s.UsesLongRope(kSubject)); }};
    c["GetQueryRows"] = {[&] { return Answered(s.GetQueryRows()); }};
    c["GetQueryPositions"] = {[&] { return Answered(s.GetQueryPositions()); }};
    c["transfer"] = Question([this] { return cache_->transfer(); });
    c["DebugPlan"] = {[&] { return Answered(s.DebugPlan()); }};
    c["StateDigest"] = Question([&] { return s.StateDigest(); });
    c["CheckInvariants"] = {[&] { return s.CheckInvariants(); }};
  }

  Status Append() { return cache_->Append(kLayer, inputs_.k.view(), inputs_.v.view()); }
  void AddAttention(TableCalls* calls) {
    TableCalls& c = *calls;
    AttentionKVCache& s = *cache_;
    inputs_ = MakeTokenInputs(layers()[kLayer], kLayer, DType::kF32, Text(kNewRows));
    latent_ = MakeTokenInputs(layers()[kLatentLayer], kLatentLayer, DType::kF32, Text(kNewRows));
    c["AttentionWithFusedQKV"] = {
        [&] { return s.AttentionWithFusedQKV(kLayer, inputs_.qkv.view(), o_.view(), kScale); }};
    c["AttentionWithFusedQKV: of a latent layer"] = {[&] {
      return s.AttentionWithFusedQKV(kLatentLayer, inputs_.qkv.view(), o_.view(), kScale);
    }};
    c["Append"] = {[this] { return Append(); }};
    c["Append: again"] = {[this] { return Append(); }, [this] { static_cast<void>(Append()); }};
    const auto attend = [&] {
      return s.Attend(kLayer, inputs_.q.view(), o_.view(), &lse_.view(), kScale);
    };
    c["Attend"] = {attend, [this] { static_cast<void>(Append()); }};
    c["Attend: before Append"] = {attend};
    c["AppendMLAKV"] = {[&] { return s.AppendMLAKV(kLatentLayer, latent_.kv()); }};
    c["AttentionWithMLA"] = {[&] {
      return s.AttentionWithMLA(kLatentLayer, latent_.q.view(), latent_.kv(), o_.view(), kScale);
    }};
    const auto shared = [&] {
      return s.AttentionWithSharedKV(kLayer, inputs_.q.view(), o_.view(), nullptr, kScale);
    };
    c["AttentionWithSharedKV"] = {shared, [this] { static_cast<void>(Append()); }};
    c["AttentionWithSharedKV: before Append"] = {shared};
  }
  void AddPieces(TableCalls* calls) {
    TableCalls& c = *calls;
    AttentionKVCache& s = *cache_;
    c["SelfAttention"] = {[&] {
      return s.SelfAttention(kLayer, inputs_.q.view(), inputs_.k.view(), inputs_.v.view(),
                             o_.view(), lse_.view(), kScale);
    }};
    c["CrossAttention"] = {
        [&] { return s.CrossAttention(kLayer, inputs_.q.view(), o_.view(), lse_.view(), kScale); }};
    c["MergeAttnOutputInplace"] = {[&] {
      return s.MergeAttnOutputInplace(o_.view(), lse_.view(), other_o_.view(), other_lse_.view());
    }};
  }

  void AddDebugCalls(TableCalls* calls) {
    TableCalls& c = *calls;
    AttentionKVCache& s = *cache_;
    const auto read = [&](int64_t id, int64_t start) {
      return [this, &s, id, start] {
        return s.DebugGetKV(id, start, start + 2, k_.view(), v_.view());
      };
    };
    c["ExportKV"] = {[this, &s] { return s.ExportKV(kSubject, kLayer, 0, block_[0]); }};
    c["ExportKV: another"] = {[this, &s] { return s.ExportKV(kOther, kLayer, 0, block_[0]); }};
    const auto export_new = [this, &s] {
      return s.ExportKV(kSubject, kLayer, kSubjectLength, {.k = new_k_.view(), .v = new_v_.view()});
    };
    const auto append = [this] { static_cast<void>(Append()); };
    c["ExportKV: its new tokens"] = {export_new};
    c["ExportKV: its new tokens, appended"] = {export_new, append};
    c["DebugGetKV: its new tokens, appended"] = {read(kSubject, kSubjectLength), append};
    c["DebugGetKV"] = {read(kSubject, 0)};
    c["DebugGetKV: its new tokens"] = {read(kSubject, kSubjectLength)};
    c["DebugGetKV: another"] = {read(kOther, 0)};
    c["DebugGetKVMLA"] = {[&] { return s.DebugGetKVMLA(kSubject, 0, 2, kv_.view()); }};
    c["DebugGetKVMLA: another"] = {[&] { return s.DebugGetKVMLA(kOther, 0, 2, kv_.view()); }};
    c["DebugSetKV"] = {[&] { return s.DebugSetKV(kSubject, 0, k_.view(), v_.view()); }};
    c["DebugSetKV: another"] = {[&] { return s.DebugSetKV(kOther, 0, k_.view(), v_.view()); }};
    c["DebugSetKVMLA"] = {[&] { return s.DebugSetKVMLA(kSubject, 0, kv_.view()); }};
    c["DebugSetKVMLA: another"] = {[&] { return s.DebugSetKVMLA(kOther, 0, kv_.view()); }};
  }

  const std::unique_ptr<AttentionKVCache> cache_;
  const ReceiveMap map_;
  std::unique_ptr<BlockSource> source_;
  std::vector<StoredRows> stored_;
  KVBlock block_;  // the first 3 tokens of kOther
  uint64_t arrived_ = 0;
  uint64_t own_ = 1000;
  TokenInputs inputs_, latent_;
  TestTensor o_{DType::kF32, {kNewRows, 2, 4}}, other_o_{DType::kF32, {kNewRows, 2, 4}};
  TestTensor lse_{DType::kF32, {kNewRows, 2}}, other_lse_{DType::kF32, {kNewRows, 2}};
  TestTensor k_{DType::kF32, {1, 2, 1, 4}}, v_{DType::kF32, {1, 2, 1, 4}};
  TestTensor new_k_{DType::kF32, {2, 1, 4}}, new_v_{DType::kF32, {2, 1, 4}};
  TestTensor kv_{DType::kF32, {1, 2, 6}};
};

// clang-format off
constexpr TableRow kRows[] = {
  //                                           idle chain tree uncom load pend fail ret send
  {"Clear",                                 "o o o o o o o o o"},
  {"AddSequence",                           "o o o o o o o o o"},
  {"RemoveSequence",                        "o S S o S o S o o"},
  {"RemoveSequence: another",               "o o o o o o o o o"},
  {"ForkSequence",                          "o S S S S S S o o"},
  {"ForkSequence: at its tokens' end",      "o S S o S o S o o"},
  {"ForkSequence: another",                 "o o o o o o o o o"},
  {"PopN",                                  "o S S o S o S o o"},
  {"PopN: nothing",                         "o S S o S o S o o"},
  {"PopN: another",                         "o o o o o o o o o"},
  {"BeginForward",                          "o S S S S S S S o"},
  {"BeginForward: another",                 "o S S o S o S o o"},
  {"BeginTreeForward",                      "o S S o S S S S o"},
  {"BeginTreeForward: another",             "o S S o S o S o o"},
  {"CommitAcceptedTokenTreeNodes",          "S S S o S S S S S"},
  {"CommitAcceptedTokenTreeNodes: none",    "S S S o S S S S S"},
  {"GetTreeSize",                           "o o o o o o o o o"},
  {"EndForward",                            "S S S S S S S S S"},
  {"AbortForward",                          "S o o S o S o S S"},
  {"DisaggPrepareRecv",                     "o S S S S S S S o"},
  {"DisaggPrepareRecv: another",            "o S S o S o S o o"},
  {"DisaggCommitRecv",                      "N N N N N S N N N"},
  {"DisaggCommitRecv: another",             "o o o o o o o o o"},
  {"DisaggCommitRecv: nothing",             "N N N N N o N N N"},
  {"DisaggCancelRecv",                      "N N N N N o N N N"},
  {"DisaggCancelRecv: another",             "o o o o o o o o o"},
  {"View",                                  "N N N N N o N N N"},
  {"View: another",                         "o o o o o o o o o"},
  {"Store",                                 "N N N N N o N N N"},
  {"Store: another",                        "o o o o o o o o o"},
  {"Complete",                              "N N N N N o N N N"},
  {"Complete: another",                     "o o o o o o o o o"},
  {"FailReceive",                           "N N N N N o N N N"},
  {"FailReceive: another",                  "o o o o o o o o o"},
  {"GetReceiveProgress",                    "N N N N N o N N N"},
  {"GetReceiveProgress: another",           "o o o o o o o o o"},
  {"WaitReceived",                          "C C C C C T C C C"},
  {"WaitReceived: another",                 "o o o o o o o o o"},
  {"staging",                               "o o o o o o o o o"},
  {"SetStagingLimit",                       "o o o o o o o o o"},
  {"SetLayerSink",                          "o S S o S o S o S"},
  {"DisaggMarkSend",                        "o S S o S o S o o"},
  {"DisaggMarkSend: another",               "o S S o S o S o o"},
  {"DisaggUnmarkSend",                      "N S S N S N S N o"},
  {"DisaggDetachSend",                      "N S S N S N S N o"},
  {"DisaggFlushSend",                       "N S S N S N S N o"},
  {"GetSendProgress",                       "N N N N N N N N o"},
  {"SetRetained",                           "o S S S S S S o o"},
  {"SetRetained: active",                   "o S S o S o S o o"},
  {"SetRetained: another",                  "o o o o o o o o o"},
  {"EnableSlidingWindowForSeq",             "o S S S S S S o o"},
  {"EnableSlidingWindowForSeq: another",    "o o o o o o o o o"},
  {"DisableSlidingWindowForSeq",            "S S S S S S S S S"},
  {"DisableSlidingWindowForSeq: another",   "o o o o o o o o o"},
  {"SelectLongRope",                        "S S S S S S S S S"},
  {"SelectLongRope: of an empty one",       "o o o o o o o o o"},
  {"BeginLoadingForward",                   "o S S S S S S S o"},
  {"BeginBlendingForward",                  "o S S S S S S S S"},
  {"ImportKV",                              "o S S S S S S o o"},
  {"ImportKV: another",                     "o S S o S o S o o"},
  {"ImportVisibleKV",                       "o S S S S S S o o"},
  {"ImportVisibleKV: another",              "o S S o S o S o o"},
  {"options",                               "o o o o o o o o o"},
  {"HeldTokens",                            "o o o o o o o o o"},
  {"SlidRange",                             "o o o o o o o o o"},
  {"GetWindows",                            "o o o o o o o o o"},
  {"CanFork",                               "o o o o o o o o o"},
  {"Empty",                                 "o o o o o o o o o"},
  {"GetNumAvailablePages",                  "o o o o o o o o o"},
  {"GetTotalSequenceLength",                "o o o o o o o o o"},
  {"GetDistinctTokenCount",                 "o o o o o o o o o"},
  {"sequence_count",                        "o o o o o o o o o"},
  {"retained_sequence_count",               "o o o o o o o o o"},
  {"page_counts",                           "o o o o o o o o o"},
  {"pages_in_use",                          "o o o o o o o o o"},
  {"pages_allocated",                       "o o o o o o o o o"},
  {"HasSequence",                           "o o o o o o o o o"},
  {"GetSequenceLength",                     "o o o o o o o o o"},
  {"PagesNeeded",                           "o S S S S S S S o"},
  {"PagesNeeded: another",                  "o S S o S o S o o"},
  {"PagesNeededForTree",                    "o S S o S S S S o"},
  {"PagesNeededForTree: another",           "o S S o S o S o o"},
  {"UsesLongRope",                          "o o o o o o o o o"},
  {"GetQueryRows",                          "S o o S o S o S S"},
  {"GetQueryPositions",                     "S o o S o S o S S"},
  {"transfer",                              "o o o o o o o o o"},
  {"DebugPlan",                             "S o o S o S o S S"},
  {"StateDigest",                           "o o o o o o o o o"},
  {"CheckInvariants",                       "o o o o o o o o o"},
  {"AttentionWithFusedQKV",                 "S o o S o S S S S"},
  {"AttentionWithFusedQKV: of a latent layer", "S A A S A S S S S"},
  {"Append",                                "S o o S o S S S S"},
  {"Append: again",                         "S S S S S S S S S"},
  {"Attend",                                "S o o S o S S S S"},
  {"Attend: before Append",                 "S S S S S S S S S"},
  {"AppendMLAKV",                           "S o o S o S S S S"},
  {"AttentionWithMLA",                      "S o o S o S S S S"},
  {"AttentionWithSharedKV",                 "S o o S o S S S S"},
  {"AttentionWithSharedKV: before Append",  "S S S S S S S S S"},
  {"SelfAttention",                         "S o o S o S S S S"},
  {"CrossAttention",                        "S o o S o S S S S"},
  {"MergeAttnOutputInplace",                "o o o o o o o o o"},
  {"ExportKV",                              "o o o o o o o o o"},
  {"ExportKV: another",                     "o o o o o o o o o"},
  {"ExportKV: its new tokens",                "A S S S S S S A A"},
  {"ExportKV: its new tokens, appended",      "A o S S o S S A A"},
  {"DebugGetKV",                            "o o o o o o o o o"},
  {"DebugGetKV: its new tokens",            "A S S o S S S A A"},
  {"DebugGetKV: its new tokens, appended",    "A o o o o S S A A"},
  {"DebugGetKV: another",                   "o o o o o o o o o"},
  {"DebugGetKVMLA",                         "o o o o o o o o o"},
  {"DebugGetKVMLA: another",                "o o o o o o o o o"},
  {"DebugSetKV",                            "o S S S S S S o o"},
  {"DebugSetKV: another",                   "o o o o o o o o o"},
  {"DebugSetKVMLA",                         "o S S S S S S o o"},
  {"DebugSetKVMLA: another",                "o o o o o o o o o"},
};
// clang-format on

TEST(StateTable, AttentionKVCache) {
  constexpr std::pair<const char*, const char*> kInterfaces[] = {
      {"kv_state.h", "KVState"},
      {"attention_kv_cache.h", "AttentionKVCache"},
      {"kv_transfer.h", "KVTransfer"}};
  ExpectTable([](At at) { return std::make_unique<Scene>(at); }, kRows, kInterfaces);
}

}  // namespace
}  // namespace quire
