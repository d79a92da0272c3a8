// Composites of whatever parts: several attention caches, attention alone, and parts that plan in
// any order. A call that one part refuses changes none of them.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "kv/control/control_call.h"
#include "kv/testing/kv_test_forward.h"
#include "kv/testing/recurrent_test_forward.h"
#include "quire/composite_state.h"
#include "quire/kv_transfer.h"
#include "quire/recurrent_cache.h"
#include "quire/transfer.h"

namespace quire {
namespace {

using Ids = std::vector<int64_t>;
using Tokens = std::vector<uint64_t>;

std::shared_ptr<AttentionKVCache> MakeCache(std::vector<AttentionLayerSpec> layers,
                                            int64_t token_capacity, int64_t page_size) {
  return MakeTestCache(TestCacheOptions(
      std::move(layers),
      {.max_num_sequences = 4, .token_capacity = token_capacity, .page_size = page_size}));
}

std::shared_ptr<AttentionKVCache> MakeFirst() {
  return MakeCache({{2, 1, 4, 4, DType::kF32}, {2, 2, 4, 4, DType::kF32}}, 400, 4);
}
// Pages of other sizes, and few of them.
std::shared_ptr<AttentionKVCache> MakeSecond() {
  return MakeCache({{4, 2, 8, 8, DType::kBF16}}, 32, 16);
}

std::shared_ptr<RecurrentCache> MakeRecurrent() {
  RecurrentCacheOptions options;
  options.layers = AllRecurrentKinds();
  options.max_num_sequences = 4;
  options.prefill_chunk_size = 64;
  options.max_tree_slots = 8;
  options.max_retained_slots = 8;
  options.max_loads = 2;
  options.runner = std::make_shared<SerialRunner>();
  return *RecurrentCache::Create(options);
}

Tokens Text(int64_t count) {
  Tokens tokens;
  for (int64_t i = 0; i < count; ++i) tokens.push_back(100 + static_cast<uint64_t>(i));
  return tokens;
}

void RunLayersOf(AttentionKVCache& cache, const Tokens& tokens) {
  const std::vector<AttentionLayerSpec>& layers = cache.options().layers;
  for (size_t l = 0; l < layers.size(); ++l) {
    LayerOutputs outputs;
    ASSERT_TRUE(RunLayer(cache, layers[l], static_cast<int64_t>(l), tokens, {}, &outputs).ok());
  }
}

// A composite with its parts in reach.
struct Joined {
  explicit Joined(bool with_second = true, bool with_recurrent = true)
      : second(with_second ? MakeSecond() : nullptr),
        recurrent(with_recurrent ? MakeRecurrent() : nullptr) {
    CompositeState::Parts parts{.attention = first};
    if (second != nullptr) parts.more_attention = {second};
    if (recurrent != nullptr) parts.recurrent = {recurrent};
    state = *CompositeState::Create(parts);
  }
  void RunLayers(const Tokens& tokens) const {
    RunLayersOf(*first, tokens);
    if (second != nullptr) RunLayersOf(*second, tokens);
    if (recurrent != nullptr) {
      ASSERT_TRUE(RunRecurrentLayers(*recurrent, tokens, nullptr).ok());
    }
  }
  void Run(int64_t id, const Tokens& tokens) const {
    ASSERT_TRUE(state->BeginForward(Ids{id}, Ids{std::ssize(tokens)}).ok());
    RunLayers(tokens);
    ASSERT_TRUE(state->EndForward().ok());
  }
  void ExpectLength(int64_t id, int64_t length) const {
    EXPECT_EQ(*state->GetSequenceLength(id), length);
    EXPECT_EQ(*first->GetSequenceLength(id), length);
    if (second != nullptr) {
      EXPECT_EQ(*second->GetSequenceLength(id), length);
    }
    const Status valid = state->CheckInvariants();
    EXPECT_TRUE(valid.ok()) << valid.ToString();
  }

  std::shared_ptr<AttentionKVCache> first = MakeFirst();
  std::shared_ptr<AttentionKVCache> second;
  std::shared_ptr<RecurrentCache> recurrent;
  std::unique_ptr<CompositeState> state;
};

void ExpectRefused(const Joined& joined, StatusCode code, const Status& status, uint64_t digest) {
  EXPECT_EQ(status.code(), code) << status.ToString();
  EXPECT_EQ(joined.state->StateDigest(), digest) << status.ToString();
  const Status valid = joined.state->CheckInvariants();
  EXPECT_TRUE(valid.ok()) << valid.ToString();
}

void RunAllCalls(const Joined& joined) {
  CompositeState& s = *joined.state;
  ASSERT_TRUE(s.AddSequence(0).ok());
  joined.Run(0, Text(10));
  ASSERT_TRUE(s.ForkSequence(0, 1, 10).ok());
  ASSERT_TRUE(s.SetRetained(0, true).ok());
  joined.Run(1, Text(1));
  joined.Run(1, Text(1));  // the same batch, one token further
  joined.ExpectLength(1, 12);
  ASSERT_TRUE(s.BeginTreeForward(Ids{1}, Ids{3}, Ids{-1, 0, 0}).ok());
  joined.RunLayers(Text(3));
  ASSERT_TRUE(s.EndForward().ok());
  EXPECT_EQ(*s.GetTreeSize(1), 3);
  ASSERT_TRUE(s.CommitAcceptedTokenTreeNodes(Ids{1}, Ids{2}).ok());
  joined.ExpectLength(1, 14);
  ASSERT_TRUE(s.PopN(1, 1).ok());
  ASSERT_TRUE(s.BeginForward(Ids{1}, Ids{2}).ok());
  ASSERT_TRUE(s.AbortForward().ok());
  joined.ExpectLength(1, 13);
  ASSERT_TRUE(s.RemoveSequence(0).ok());
  ASSERT_TRUE(s.Clear().ok());
  EXPECT_EQ(s.sequence_count(), 0);
  EXPECT_EQ(joined.first->pages_in_use(), 0);
}

TEST(CompositeParts, EveryCallReachesAllOfThem) {
  for (const bool with_second : {true, false}) {
    for (const bool with_recurrent : {true, false}) {
      SCOPED_TRACE(std::to_string(with_second) + std::to_string(with_recurrent));
      RunAllCalls(Joined(with_second, with_recurrent));
    }
  }
}

TEST(CompositeParts, WhatTheLastCacheRefusesChangesNothing) {
  for (const bool with_recurrent : {true, false}) {
    const Joined joined(true, with_recurrent);
    CompositeState& s = *joined.state;
    for (const int64_t id : {0, 1}) ASSERT_TRUE(s.AddSequence(id).ok());
    int64_t length = 0;
    for (; joined.second->GetNumAvailablePages() > 0; length += 16) joined.Run(0, Text(16));
    const uint64_t digest = s.StateDigest();
    ExpectRefused(joined, StatusCode::kOutOfPages, s.BeginForward(Ids{1}, Ids{1}), digest);
    ExpectRefused(joined, StatusCode::kOutOfPages, s.BeginTreeForward(Ids{1}, Ids{1}, Ids{-1}),
                  digest);
    ExpectRefused(joined, StatusCode::kBadArgument, s.PopN(0, length + 1), digest);
    ExpectRefused(joined, StatusCode::kUnknownSequence, s.RemoveSequence(7), digest);
    ExpectRefused(joined, StatusCode::kBadState, s.EndForward(), digest);
    ASSERT_TRUE(s.PopN(0, 1).ok());
    const uint64_t shorter = s.StateDigest();
    // Once a part is behind with its layers, no part ends the forward.
    ASSERT_TRUE(s.BeginForward(Ids{0}, Ids{1}).ok());
    RunLayersOf(*joined.first, Text(1));
    const uint64_t open = s.StateDigest();
    ExpectRefused(joined, StatusCode::kBadState, s.EndForward(), open);
    ASSERT_TRUE(s.AbortForward().ok());
    EXPECT_EQ(s.StateDigest(), shorter);
  }
}

TEST(CompositeParts, AnImportGivesEachCacheItsLayers) {
  const Joined joined(true, false);
  ASSERT_TRUE(joined.state->AddSequence(0).ok());
  joined.Run(0, Text(9));
  KVBlock block;
  std::vector<StoredRows> rows;
  for (AttentionKVCache* cache : {joined.first.get(), joined.second.get()}) {
    const std::vector<AttentionLayerSpec>& layers = cache->options().layers;
    for (size_t l = 0; l < layers.size(); ++l) {
      rows.emplace_back(layers[l], 9);
      ASSERT_TRUE(cache->ExportKV(0, static_cast<int64_t>(l), 0, rows.back().view()).ok());
      block.push_back(rows.back().view());
    }
  }
  const int64_t count = 9;
  const KVImport import{.blocks = std::span(&block, 1), .tokens = std::span(&count, 1)};
  const Joined other(true, false);
  ASSERT_TRUE(other.state->AddSequence(3).ok());
  ASSERT_TRUE(other.state->ImportState(3, 9, import, {}).ok());
  other.ExpectLength(3, 9);
  StoredRows again(other.second->options().layers[0], 9);
  ASSERT_TRUE(other.second->ExportKV(3, 0, 0, again.view()).ok());
  EXPECT_TRUE(again == rows[2]);
  const uint64_t digest = other.state->StateDigest();
  block.pop_back();
  ASSERT_TRUE(other.state->GetSequenceLength(3).ok());
  ExpectRefused(other, StatusCode::kBadArgument, other.state->ImportState(3, 18, import, {}),
                digest);
}

// ---------------------------------------------------------------------- transfer

constexpr int64_t kPeer = 7;

// The rows of all layers of all caches.
std::vector<StoredRows> RowsOfCaches(const Joined& joined, int64_t id, int64_t count) {
  std::vector<StoredRows> rows;
  for (AttentionKVCache* cache : {joined.first.get(), joined.second.get()}) {
    if (cache == nullptr) continue;
    const std::vector<AttentionLayerSpec>& layers = cache->options().layers;
    for (size_t l = 0; l < layers.size(); ++l) {
      rows.emplace_back(layers[l], count);
      EXPECT_TRUE(cache->ExportKV(id, static_cast<int64_t>(l), 0, rows.back().view()).ok());
    }
  }
  return rows;
}

// A sender and a receiver of 9 tokens, and the channel between them.
struct Transferring {
  Transferring(bool with_second, bool with_recurrent)
      : from(with_second, with_recurrent), to(with_second, with_recurrent) {
    EXPECT_TRUE(channel->Connect(kPeer, to.state->transfer()).ok());
    EXPECT_TRUE(from.state->transfer()->SetLayerSink(channel).ok());
    EXPECT_TRUE(from.state->AddSequence(0).ok());
    EXPECT_TRUE(to.state->AddSequence(5).ok());
    map = *to.state->transfer()->DisaggPrepareRecv(5, 9);
  }
  Status Mark() const {
    return from.state->transfer()->DisaggMarkSend(0, 0, std::span(&map, 1), kPeer, 0);
  }

  const std::shared_ptr<LocalChannel> channel = CreateLocalChannel();
  const Joined from, to;
  ReceiveMap map;
};

TEST(CompositeParts, EveryPartIsTransferred) {
  for (const bool with_second : {true, false}) {
    for (const bool with_recurrent : {true, false}) {
      SCOPED_TRACE(std::to_string(with_second) + std::to_string(with_recurrent));
      const Transferring pair(with_second, with_recurrent);
      ASSERT_TRUE(pair.Mark().ok());
      EXPECT_EQ(*pair.to.state->GetSequenceLength(5), 0) << "pending tokens count";
      pair.from.Run(0, Text(4));
      EXPECT_EQ(pair.from.state->transfer()->GetSendProgress(0)->sent, 4);
      Tokens rest = Text(9);
      rest.erase(rest.begin(), rest.begin() + 4);
      pair.from.Run(0, rest);
      EXPECT_FALSE(pair.from.state->transfer()->GetSendProgress(0)->active);
      EXPECT_EQ(pair.to.state->transfer()->GetReceiveProgress(pair.map.epoch)->complete, 9);
      const Status committed = pair.to.state->transfer()->DisaggCommitRecv(pair.map.epoch, 9);
      ASSERT_TRUE(committed.ok()) << committed.ToString();
      pair.to.ExpectLength(5, 9);
      EXPECT_TRUE(RowsOfCaches(pair.to, 5, 9) == RowsOfCaches(pair.from, 0, 9));
      pair.from.Run(0, Text(2));
      pair.to.Run(5, Text(2));
      EXPECT_TRUE(RowsOfCaches(pair.to, 5, 11) == RowsOfCaches(pair.from, 0, 11));
    }
  }
}

TEST(CompositeParts, RowsAreCommittedInAForwardAndStatesAreNot) {
  for (const bool with_recurrent : {true, false}) {
    const Transferring pair(true, with_recurrent);
    CompositeState& s = *pair.to.state;
    KVTransfer& transfer = *s.transfer();
    ASSERT_TRUE(pair.Mark().ok());
    pair.from.Run(0, Text(9));
    ASSERT_TRUE(s.AddSequence(6).ok());
    ASSERT_TRUE(s.BeginForward(Ids{6}, Ids{2}).ok());
    const uint64_t digest = s.StateDigest();
    const Status within = transfer.DisaggCommitRecv(pair.map.epoch, 9);
    if (with_recurrent) {
      ExpectRefused(pair.to, StatusCode::kBadState, within, digest);
    } else {
      EXPECT_TRUE(within.ok()) << within.ToString();
    }
    pair.to.RunLayers(Text(2));
    ASSERT_TRUE(s.EndForward().ok());
    const Status after = transfer.DisaggCommitRecv(pair.map.epoch, 9);
    EXPECT_EQ(after.code(), with_recurrent ? StatusCode::kOk : StatusCode::kNotFound);
    pair.to.ExpectLength(5, 9);
    pair.to.ExpectLength(6, 2);
  }
}

TEST(CompositeParts, AReservationIsOfAllCachesOrOfNone) {
  for (const bool with_recurrent : {true, false}) {
    const Joined joined(true, with_recurrent);
    CompositeState& s = *joined.state;
    KVTransfer& transfer = *s.transfer();
    for (const int64_t id : {0, 1}) ASSERT_TRUE(s.AddSequence(id).ok());
    int64_t length = 0;
    for (; joined.second->GetNumAvailablePages() > 1; length += 16) joined.Run(0, Text(16));
    const uint64_t digest = s.StateDigest();
    // The second cache has one page of 16 left.
    ExpectRefused(joined, StatusCode::kOutOfPages, transfer.DisaggPrepareRecv(1, 17).status(),
                  digest);
    const ReceiveMap map = *transfer.DisaggPrepareRecv(1, 16);
    joined.ExpectLength(0, length);
    EXPECT_EQ(*s.GetSequenceLength(1), 0);
    EXPECT_EQ(s.BeginForward(Ids{1}, Ids{1}).code(), StatusCode::kBadState);
    EXPECT_EQ(transfer.DisaggCommitRecv(map.epoch, 1).code(), StatusCode::kBadState);
    ASSERT_TRUE(s.ForkSequence(1, 2, -1).ok());
    joined.ExpectLength(2, 0);
    ASSERT_TRUE(s.RemoveSequence(2).ok());
    ASSERT_TRUE(transfer.DisaggCancelRecv(map.epoch).ok());
    EXPECT_EQ(s.StateDigest(), digest);
    ASSERT_TRUE(transfer.DisaggPrepareRecv(1, 16).ok());
    ASSERT_TRUE(s.RemoveSequence(1).ok());
    EXPECT_EQ(joined.second->GetNumAvailablePages(), 1);
  }
}

TEST(CompositeParts, WhatOneCacheCannotSendEndsTheMarkOfAll) {
  const Transferring pair(true, true);
  ASSERT_TRUE(pair.Mark().ok());
  ASSERT_TRUE(pair.to.state->RemoveSequence(5).ok());
  pair.from.Run(0, Text(9));
  const auto progress = pair.from.state->transfer()->GetSendProgress(0);
  EXPECT_EQ(progress->failure.code(), StatusCode::kNotFound);
  EXPECT_EQ(progress->sent, 0);
  pair.from.ExpectLength(0, 9);
  // Two equal caches are not one.
  ReceiveMap other = pair.map;
  other.layout ^= 1;
  EXPECT_EQ(
      pair.from.state->transfer()->DisaggMarkSend(0, 0, std::span(&other, 1), kPeer, 0).code(),
      StatusCode::kIncompatible);
}

TEST(CompositeParts, APartAloneTransfersNothing) {
  Joined joined;
  ASSERT_TRUE(joined.state->AddSequence(0).ok());
  KVTransfer& part = *joined.second->transfer();
  EXPECT_EQ(part.DisaggPrepareRecv(0, 2).status().code(), StatusCode::kBadState);
  EXPECT_EQ(part.DisaggMarkSend(0, 0, {}, 0, 0).code(), StatusCode::kBadState);
  EXPECT_EQ(part.SetLayerSink(nullptr).code(), StatusCode::kBadState);
  EXPECT_EQ(part.DisaggCommitRecv(1, 0).code(), StatusCode::kBadState);
  EXPECT_EQ(part.DisaggCancelRecv(1).code(), StatusCode::kBadState);
  EXPECT_EQ(part.DisaggUnmarkSend(0).code(), StatusCode::kBadState);
  EXPECT_EQ(part.DisaggDetachSend(0).status().code(), StatusCode::kBadState);
  EXPECT_EQ(part.DisaggFlushSend(0).code(), StatusCode::kBadState);
  EXPECT_EQ(part.GetSendProgress(0).status().code(), StatusCode::kBadState);
  // Its state goes: what is reserved there is given back, and the part is its own again.
  ASSERT_TRUE(joined.state->transfer()->DisaggPrepareRecv(0, 2).ok());
  joined.state.reset();
  EXPECT_EQ(*joined.second->GetSequenceLength(0), 0);
  EXPECT_TRUE(joined.second->CheckInvariants().ok());
  EXPECT_TRUE(part.DisaggPrepareRecv(0, 2).ok());
  EXPECT_TRUE(part.SetLayerSink(nullptr).ok());
  EXPECT_TRUE(joined.second->CheckInvariants().ok());
}

// All calls of a transfer that its state's gate keeps apart, made as a forward ends.
class CallingSink final : public LayerSink {
 public:
  CallingSink(KVTransfer& transfer, ReceiveMap map) : transfer_(transfer), map_(std::move(map)) {}

  Status OnLayerAppended(int64_t, std::span<const SendRange>) override { return Status(); }
  Status OnForwardEnded(std::span<const SendRecord>) override {
    answers = {transfer_.DisaggPrepareRecv(0, 1).status(),
               transfer_.DisaggCommitRecv(1, 0),
               transfer_.DisaggCancelRecv(1),
               transfer_.SetLayerSink(nullptr),
               transfer_.DisaggMarkSend(0, 0, std::span(&map_, 1), kPeer, 0),
               transfer_.DisaggUnmarkSend(0),
               transfer_.DisaggDetachSend(0).status(),
               transfer_.DisaggFlushSend(0),
               transfer_.GetSendProgress(0).status()};
    return Status();
  }
  Status OnForwardAborted(std::span<const SendRecord>) override { return Status(); }
  Status OnSendStopped(std::span<const SendRecord>, const Status&) override { return Status(); }

  std::vector<Status> answers;

 private:
  KVTransfer& transfer_;
  const ReceiveMap map_;
};

TEST(CompositeParts, NoTransferCallComesWithinAnotherCall) {
  for (const bool is_composite : {true, false}) {
    SCOPED_TRACE(is_composite);
    const Joined from, to;
    const std::shared_ptr<AttentionKVCache> cache = MakeFirst(), receiver = MakeFirst();
    KVState& state = is_composite ? static_cast<KVState&>(*from.state) : *cache;
    KVTransfer& transfer = is_composite ? *from.state->transfer() : *cache->transfer();
    KVState& other = is_composite ? static_cast<KVState&>(*to.state) : *receiver;
    ASSERT_TRUE(state.AddSequence(0).ok());
    ASSERT_TRUE(other.AddSequence(0).ok());
    const ReceiveMap map =
        *(is_composite ? to.state->transfer() : receiver->transfer())->DisaggPrepareRecv(0, 2);
    const auto sink = std::make_shared<CallingSink>(transfer, map);
    ASSERT_TRUE(transfer.SetLayerSink(sink).ok());
    ASSERT_TRUE(transfer.DisaggMarkSend(0, 0, std::span(&map, 1), kPeer, 0).ok());
    ASSERT_TRUE(state.BeginForward(Ids{0}, Ids{2}).ok());
    if (is_composite) {
      from.RunLayers(Text(2));
    } else {
      RunLayersOf(*cache, Text(2));
    }
    ASSERT_TRUE(state.EndForward().ok());
    ASSERT_EQ(sink->answers.size(), 9U);
    for (const Status& answer : sink->answers) {
      EXPECT_EQ(answer.code(), StatusCode::kBadState);
      EXPECT_NE(answer.message().find("another call"), std::string::npos) << answer.ToString();
    }
    EXPECT_EQ(transfer.GetSendProgress(0)->sent, 2);
  }
}

TEST(CompositeParts, SeveralCachesLoadNothing) {
  const Joined joined;
  ASSERT_TRUE(joined.state->AddSequence(0).ok());
  const LayerLoad load{.seq_id = 0, .tokens = 1, .source = nullptr};
  EXPECT_EQ(joined.state->BeginLoadingForward(Ids{0}, Ids{1}, std::span(&load, 1)).code(),
            StatusCode::kBadArgument);
}

TEST(CompositeParts, FurtherCachesFollowAFirstOne) {
  const auto code = [](CompositeState::Parts parts) {
    return CompositeState::Create(std::move(parts)).status().code();
  };
  const auto cache = MakeFirst();
  EXPECT_EQ(code({.more_attention = {cache}}), StatusCode::kBadArgument);
  EXPECT_EQ(code({.attention = cache, .more_attention = {cache}}), StatusCode::kBadArgument);
  EXPECT_EQ(code({.attention = cache, .more_attention = {nullptr}}), StatusCode::kBadArgument);
  ASSERT_TRUE(cache->AddSequence(0).ok());
  EXPECT_EQ(code({.attention = cache}), StatusCode::kBadArgument);
}

// The order in which parts plan is nobody's business: neither is what a refusal leaves behind.
TEST(CompositeParts, PartsPlanInAnyOrder) {
  uint64_t digests[2];
  for (const bool attention_first : {false, true}) {
    const auto attention = MakeFirst();
    const auto recurrent = MakeRecurrent();
    std::vector<PlannedState*> parts{dynamic_cast<PlannedState*>(recurrent.get()),
                                     dynamic_cast<PlannedState*>(attention.get())};
    if (attention_first) std::swap(parts[0], parts[1]);
    const auto run = [&](const ControlCall& call) -> Status {
      PlannedParts planned(parts);
      QUIRE_RETURN_IF_ERROR(planned.Plan([&](size_t) -> const ControlCall& { return call; }));
      planned.Commit();
      return Status();
    };
    using Kind = ControlCall::Kind;
    const Ids ids{0}, lengths{6};
    ASSERT_TRUE(run({.kind = Kind::kAdd, .seq_id = 0}).ok());
    ASSERT_TRUE(run({.kind = Kind::kBegin, .seq_ids = ids, .append_lengths = lengths}).ok());
    RunLayersOf(*attention, Text(6));
    ASSERT_TRUE(RunRecurrentLayers(*recurrent, Text(6), nullptr).ok());
    ASSERT_TRUE(run({.kind = Kind::kEnd}).ok());
    const uint64_t before = attention->StateDigest() ^ recurrent->StateDigest();
    const auto refused = [&](StatusCode code, const ControlCall& call) {
      EXPECT_EQ(run(call).code(), code) << call.name();
      EXPECT_EQ(attention->StateDigest() ^ recurrent->StateDigest(), before) << call.name();
    };
    refused(StatusCode::kUnknownSequence, {.kind = Kind::kRemove, .seq_id = 4});
    refused(StatusCode::kSequenceExists, {.kind = Kind::kAdd, .seq_id = 0});
    refused(StatusCode::kBadArgument, {.kind = Kind::kPop, .seq_id = 0, .count = 7});
    refused(StatusCode::kBadState, {.kind = Kind::kEnd});
    ASSERT_TRUE(run({.kind = Kind::kFork, .seq_id = 0, .child_id = 1, .count = 6}).ok());
    ASSERT_TRUE(run({.kind = Kind::kPop, .seq_id = 1, .count = 6}).ok());
    digests[attention_first] = attention->StateDigest() ^ recurrent->StateDigest();
  }
  EXPECT_EQ(digests[0], digests[1]);
}

}  // namespace
}  // namespace quire
