// Two states of models with recurrent layers and a channel between them: what the receiver holds in
// the end is, bit for bit, what it would have computed, and what goes wrong changes nothing.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kv/testing/allocation_refusal.h"
#include "kv/testing/kv_test_forward.h"
#include "kv/testing/recurrent_test_forward.h"
#include "kv/testing/saboteur.h"
#include "quire/composite_state.h"
#include "quire/rnn_state.h"
#include "quire/transfer.h"

namespace quire {
namespace {

using Ids = std::vector<int64_t>;
using Tokens = std::vector<uint64_t>;

constexpr int64_t kPeer = 7;
constexpr int64_t kSeq = 3;

Tokens Text(int64_t begin, int64_t end, uint64_t first = 100) {
  Tokens tokens;
  for (int64_t i = begin; i < end; ++i) tokens.push_back(first + static_cast<uint64_t>(i));
  return tokens;
}

struct With {
  bool attention = true;
  bool cache = true;
  bool rnn = false;
};

std::string NameOf(const With& with) {
  return std::string(with.attention ? "Attention" : "") + (with.cache ? "Recurrent" : "") +
         (with.rnn ? "Callers" : "");
}

// A state, and forwards of one sequence in it.
class Model {
 public:
  explicit Model(const With& with, int64_t page_size = 4,
                 std::vector<RecurrentLayerSpec> layers = AllRecurrentKinds()) {
    const auto runner = std::make_shared<SerialRunner>();
    CompositeState::Parts parts;
    if (with.attention) {
      AttentionKVCacheOptions options = TestCacheOptions(
          {{2, 1, 4, 4, DType::kF32}, {2, 2, 8, 4, DType::kI8}}, {.max_num_sequences = 5,
                                                                  .token_capacity = 300,
                                                                  .prefill_chunk_size = 100,
                                                                  .page_size = page_size});
      options.runner = runner;
      parts.attention = attention_ = *AttentionKVCache::Create(options);
    }
    if (with.cache) {
      RecurrentCacheOptions options;
      options.layers = std::move(layers);
      options.max_num_sequences = 5;
      options.prefill_chunk_size = 100;
      options.max_tree_slots = 20;
      options.max_retained_slots = 10;
      options.runner = runner;
      options.poison_freed_slots = true;
      parts.recurrent.push_back(cache_ = *RecurrentCache::Create(options));
    }
    if (with.rnn) {
      RNNStateOptions options;
      options.num_layers = 2;
      options.states = {{.shape = {3}}, {.shape = {1, 2}, .dtype = DType::kI64}};
      options.max_num_sequences = 5;
      options.max_history = 3;
      options.max_retained_slots = 10;
      options.poison_freed_slots = true;
      parts.recurrent.push_back(rnn_ = *RNNState::Create(options));
    }
    state_ = *CompositeState::Create(parts);
  }

  CompositeState& state() { return *state_; }
  KVTransfer& transfer() { return *state_->transfer(); }
  RecurrentCache& cache() { return *cache_; }

  // Runs an open forward of one sequence: what all layers give, and the caller's states.
  Result<std::vector<float>> RunLayers(const Tokens& tokens) {
    std::vector<float> values;
    for (size_t l = 0; attention_ != nullptr && l < attention_->options().layers.size(); ++l) {
      LayerOutputs out;
      QUIRE_RETURN_IF_ERROR(RunLayer(*attention_, attention_->options().layers[l],
                                     static_cast<int64_t>(l), tokens, {}, &out));
      for (int64_t i = 0; i < out.o.count(); ++i) values.push_back(out.o.Get(i));
    }
    RecurrentOutputs outputs;
    if (cache_ != nullptr) QUIRE_RETURN_IF_ERROR(RunRecurrentLayers(*cache_, tokens, &outputs));
    for (const auto& layer : outputs) values.insert(values.end(), layer.begin(), layer.end());
    for (int64_t l = 0; rnn_ != nullptr && l < 2; ++l) {
      std::vector<float> sums(3);
      const TensorView of_sums(sums.data(), DType::kF32, {1, 3});
      QUIRE_RETURN_IF_ERROR(rnn_->Get(l, 0, of_sums));
      std::vector<int64_t> counts(2);
      const TensorView of_counts(counts.data(), DType::kI64, {1, 1, 2});
      QUIRE_RETURN_IF_ERROR(rnn_->Get(l, 1, of_counts));
      for (const uint64_t token : tokens) {
        for (float& sum : sums) sum = 0.5F * sum + static_cast<float>(token) * 0.125F;
        for (int64_t& count : counts) count = 3 * count + static_cast<int64_t>(token);
      }
      QUIRE_RETURN_IF_ERROR(rnn_->Set(l, 0, of_sums));
      QUIRE_RETURN_IF_ERROR(rnn_->Set(l, 1, of_counts));
      values.insert(values.end(), sums.begin(), sums.end());
      for (const int64_t count : counts) values.push_back(static_cast<float>(count));
    }
    return values;
  }

  Result<std::vector<float>> TryRun(int64_t id, const Tokens& tokens) {
    QUIRE_RETURN_IF_ERROR(state_->BeginForward(Ids{id}, Ids{std::ssize(tokens)}));
    QUIRE_ASSIGN_OR_RETURN(std::vector<float> values, RunLayers(tokens));
    QUIRE_RETURN_IF_ERROR(state_->EndForward());
    return values;
  }
  std::vector<float> Run(int64_t id, const Tokens& tokens) {
    const auto values = TryRun(id, tokens);
    EXPECT_TRUE(values.ok()) << values.status().ToString();
    return values.ok() ? *values : std::vector<float>();
  }

 private:
  std::shared_ptr<AttentionKVCache> attention_;
  std::shared_ptr<RecurrentCache> cache_;
  std::shared_ptr<RNNState> rnn_;
  std::unique_ptr<CompositeState> state_;
};

void ExpectSound(Model& model) {
  const Status sound = model.state().CheckInvariants();
  EXPECT_TRUE(sound.ok()) << sound.ToString();
}

void ExpectOk(const Status& status) { EXPECT_TRUE(status.ok()) << status.ToString(); }

// A sender and a receiver that have the first 5 tokens of kSeq, and the receiver's map of 12 more.
class Pair {
 public:
  explicit Pair(const With& with = {}, int64_t count = 12)
      : sender(with, 4), receiver(with, 16), alone(with, 4) {
    ExpectOk(channel->Connect(kPeer, &receiver.transfer()));
    ExpectOk(sender.transfer().SetLayerSink(sink));
    for (Model* model : {&sender, &receiver, &alone}) {
      ExpectOk(model->state().AddSequence(kSeq));
      model->Run(kSeq, Text(0, 5));
    }
    map = receiver.transfer().DisaggPrepareRecv(kSeq, count).value();
  }

  // The sender tells the channel that its marks end when it is destroyed, behind the receiver.
  ~Pair() { static_cast<void>(channel->Disconnect(kPeer)); }
  Pair(const Pair&) = delete;
  Pair& operator=(const Pair&) = delete;

  Status Mark() { return sender.transfer().DisaggMarkSend(kSeq, 5, std::span(&map, 1), kPeer, 0); }
  Status Commit(int64_t n) { return receiver.transfer().DisaggCommitRecv(map.epoch, n); }
  Status Waited(int64_t n) {
    return receiver.transfer().WaitReceived(map.epoch, n, *MachineTime(), 0);
  }

  // The receiver goes on as the one that has computed these tokens behind the first 5.
  void ExpectGoesOn(const Tokens& tokens) {
    alone.Run(kSeq, tokens);
    ASSERT_EQ(receiver.state().GetSequenceLength(kSeq).value(), 5 + std::ssize(tokens));
    for (int64_t step = 0; step < 3; ++step) {
      const Tokens next = Text(step, 2 * step + 1, 9000);
      EXPECT_EQ(receiver.Run(kSeq, next), alone.Run(kSeq, next)) << "step " << step;
    }
    ExpectSound(sender);
    ExpectSound(receiver);
  }

  const std::shared_ptr<LocalChannel> channel = CreateLocalChannel();
  const std::shared_ptr<Saboteur> sink = std::make_shared<Saboteur>(channel);
  Model sender, receiver, alone;
  ReceiveMap map;
};

// ---------------------------------------------------------------------- what arrives

class JointTransferOf : public testing::TestWithParam<With> {};

TEST_P(JointTransferOf, APrefillGoesOnInAnotherStateBitForBit) {
  Pair pair(GetParam());
  pair.sender.Run(kSeq, Text(5, 9));  // before the mark: goes with the next forward
  ASSERT_TRUE(pair.Mark().ok());
  EXPECT_EQ(pair.Waited(1).code(), StatusCode::kTimeout);
  pair.sender.Run(kSeq, Text(9, 14));
  EXPECT_TRUE(pair.Waited(9).ok());
  EXPECT_EQ(pair.Waited(10).code(), StatusCode::kTimeout);
  EXPECT_EQ(pair.sender.transfer().GetSendProgress(kSeq)->sent, 9);
  pair.sender.Run(kSeq, Text(14, 17));
  EXPECT_FALSE(pair.sender.transfer().GetSendProgress(kSeq)->active);
  pair.sender.Run(kSeq, Text(17, 19));  // behind the map nothing is sent
  EXPECT_TRUE(pair.Waited(12).ok());
  ASSERT_TRUE(pair.Commit(12).ok());
  pair.ExpectGoesOn(Text(5, 17));
}

TEST_P(JointTransferOf, WhatIsPendingIsNotUsed) {
  Pair pair(GetParam());
  CompositeState& state = pair.receiver.state();
  const uint64_t before = state.StateDigest();
  EXPECT_EQ(state.GetSequenceLength(kSeq).value(), 5);
  EXPECT_EQ(state.BeginForward(Ids{kSeq}, Ids{1}).code(), StatusCode::kBadState);
  EXPECT_EQ(state.BeginTreeForward(Ids{kSeq}, Ids{1}, Ids{-1}).code(), StatusCode::kBadState);
  EXPECT_EQ(state.SetRetained(kSeq, true).code(), StatusCode::kBadState);
  EXPECT_EQ(pair.receiver.transfer().DisaggPrepareRecv(kSeq, 2).status().code(),
            StatusCode::kBadState);
  EXPECT_EQ(pair.Commit(1).code(), StatusCode::kBadState);
  EXPECT_EQ(pair.Commit(13).code(), StatusCode::kBadArgument);
  EXPECT_EQ(state.ForkSequence(kSeq, 4, 6).code(), StatusCode::kBadArgument);
  EXPECT_TRUE(state.PopN(kSeq, 0).ok());
  EXPECT_EQ(state.StateDigest(), before);
  ASSERT_TRUE(state.ForkSequence(kSeq, 4, -1).ok());
  EXPECT_EQ(pair.receiver.Run(4, Text(40, 43)), pair.alone.Run(kSeq, Text(40, 43)));
  ASSERT_TRUE(state.PopN(kSeq, 5).ok());  // to where nothing is pending: that is cancelled
  EXPECT_EQ(state.GetSequenceLength(kSeq).value(), 0);
  EXPECT_EQ(pair.Commit(1).code(), StatusCode::kNotFound);
  EXPECT_EQ(pair.Waited(1).code(), StatusCode::kCancelled);
  ExpectSound(pair.receiver);
}

TEST_P(JointTransferOf, ReservationsGoWithTheirSequence) {
  for (const bool clear : {false, true}) {
    Pair pair(GetParam());
    ASSERT_TRUE(pair.Mark().ok());
    ExpectOk(clear ? pair.receiver.state().Clear() : pair.receiver.state().RemoveSequence(kSeq));
    EXPECT_EQ(pair.receiver.transfer().GetReceiveProgress(pair.map.epoch).status().code(),
              StatusCode::kNotFound);
    pair.sender.Run(kSeq, Text(5, 9));  // the mark ends, the forward does not care
    EXPECT_EQ(pair.sender.transfer().GetSendProgress(kSeq)->failure.code(), StatusCode::kNotFound);
    ExpectSound(pair.receiver);
  }
}

TEST_P(JointTransferOf, TokensAreCommittedWhereTheirStatesAre) {
  Pair pair(GetParam());
  ASSERT_TRUE(pair.Mark().ok());
  pair.sender.Run(kSeq, Text(5, 10));
  const uint64_t before = pair.receiver.state().StateDigest();
  EXPECT_EQ(pair.Commit(4).code(), StatusCode::kBadState);
  EXPECT_EQ(pair.Commit(6).code(), StatusCode::kBadState);
  EXPECT_EQ(pair.receiver.state().StateDigest(), before);
  ASSERT_TRUE(pair.Commit(5).ok());
  pair.ExpectGoesOn(Text(5, 10));
}

TEST_P(JointTransferOf, WhatIsComputedAnewIsSentAnew) {
  Pair pair(GetParam());
  ASSERT_TRUE(pair.Mark().ok());
  pair.sender.Run(kSeq, Text(5, 9));
  pair.sender.Run(kSeq, Text(9, 12));
  ASSERT_TRUE(pair.sender.state().PopN(kSeq, 3).ok());
  pair.sender.Run(kSeq, Text(60, 63));
  ASSERT_TRUE(pair.Commit(7).ok());
  Tokens tokens = Text(5, 9);
  for (const uint64_t token : Text(60, 63)) tokens.push_back(token);
  pair.ExpectGoesOn(tokens);
}

TEST_P(JointTransferOf, CancelledReservationsLeaveTheSequenceAsItWas) {
  Pair pair(GetParam());
  ASSERT_TRUE(pair.Mark().ok());
  pair.sender.Run(kSeq, Text(5, 9));
  ASSERT_TRUE(pair.receiver.transfer().DisaggCancelRecv(pair.map.epoch).ok());
  EXPECT_EQ(pair.receiver.transfer().DisaggCancelRecv(pair.map.epoch).code(),
            StatusCode::kNotFound);
  EXPECT_EQ(pair.receiver.Run(kSeq, Text(5, 17)), pair.alone.Run(kSeq, Text(5, 17)));
  ExpectSound(pair.receiver);
}

INSTANTIATE_TEST_SUITE_P(Parts, JointTransferOf,
                         testing::Values(With{.attention = true, .cache = true},
                                         With{.attention = false, .cache = true},
                                         With{.attention = true, .cache = true, .rnn = true},
                                         With{.attention = false, .cache = false, .rnn = true}),
                         [](const auto& parts) { return NameOf(parts.param); });

TEST(JointTransfer, NodesOfATreeAreSentWhenTheyAreTokens) {
  Pair pair;
  ASSERT_TRUE(pair.Mark().ok());
  ASSERT_TRUE(pair.sender.state().BeginTreeForward(Ids{kSeq}, Ids{4}, Ids{-1, 0, 0, 2}).ok());
  ASSERT_TRUE(pair.sender.RunLayers(Text(5, 9)).ok());
  ASSERT_TRUE(pair.sender.state().EndForward().ok());
  ASSERT_TRUE(pair.sender.transfer().DisaggFlushSend(kSeq).ok());
  EXPECT_EQ(pair.Waited(1).code(), StatusCode::kTimeout);
  ASSERT_TRUE(pair.sender.state().CommitAcceptedTokenTreeNodes(Ids{kSeq}, Ids{3}).ok());
  ASSERT_TRUE(pair.sender.transfer().DisaggFlushSend(kSeq).ok());
  EXPECT_EQ(pair.sender.transfer().GetSendProgress(kSeq)->sent, 3);
  ASSERT_TRUE(pair.Commit(3).ok());
  pair.ExpectGoesOn({105, 107, 108});
}

TEST(JointTransfer, ChildrenOfASenderSendNothing) {
  Pair pair;
  ASSERT_TRUE(pair.Mark().ok());
  ASSERT_TRUE(pair.sender.state().ForkSequence(kSeq, 4).ok());
  pair.sender.Run(4, Text(80, 84));
  EXPECT_EQ(pair.Waited(1).code(), StatusCode::kTimeout);
  EXPECT_EQ(pair.sender.transfer().GetSendProgress(4).status().code(), StatusCode::kNotFound);
  pair.sender.Run(kSeq, Text(5, 17));
  ASSERT_TRUE(pair.Commit(12).ok());
  pair.ExpectGoesOn(Text(5, 17));
}

// ---------------------------------------------------------------------- what goes wrong

TEST(JointTransfer, ADamagedStateIsNeverTakenOver) {
  Pair pair;
  ASSERT_TRUE(pair.Mark().ok());
  pair.sink->victim = &pair.receiver.transfer();
  pair.sink->layer = 3;  // the second recurrent one
  pair.sender.Run(kSeq, Text(5, 17));
  EXPECT_EQ(pair.sender.transfer().GetSendProgress(kSeq)->failure.code(), StatusCode::kCorrupt);
  EXPECT_EQ(pair.Waited(12).code(), StatusCode::kCorrupt);
  const uint64_t before = pair.receiver.state().StateDigest();
  const Status refused = pair.Commit(12);
  EXPECT_EQ(refused.code(), StatusCode::kBadState);
  EXPECT_NE(refused.message().find("layer 3"), std::string::npos) << refused.ToString();
  EXPECT_EQ(pair.receiver.state().StateDigest(), before);
  ASSERT_TRUE(pair.receiver.transfer().DisaggCancelRecv(pair.map.epoch).ok());
  EXPECT_EQ(pair.receiver.Run(kSeq, Text(5, 17)), pair.alone.Run(kSeq, Text(5, 17)));
}

TEST(JointTransfer, AStateThatALaterOneHasReplacedIsNotCompleted) {
  Pair pair;
  KVTransfer& receiver = pair.receiver.transfer();
  const ReceivePart first = {.first_row = 3, .count = 1, .first_head = 0, .head_count = 1};
  const ReceivePart later = {.first_row = 5, .count = 1, .first_head = 0, .head_count = 1};
  for (const ReceivePart& part : {first, later}) {
    const auto view = receiver.View(pair.map.epoch, 2, part);
    ASSERT_TRUE(view.ok());
    const TensorView& state = view->rows.k;
    std::fill_n(state.data_as<std::byte>(), state.element_count() * DTypeBytes(state.dtype()),
                std::byte{1});
    const uint32_t digest = DigestOfHeads(view->rows, 0, 1);
    EXPECT_TRUE(receiver.Store(pair.map.epoch, 2, part, *view, digest).ok());
  }
  EXPECT_EQ(receiver.GetReceiveProgress(pair.map.epoch)->layer_rows[2], 0);
  EXPECT_EQ(receiver.Complete(pair.map.epoch, 2, first).code(), StatusCode::kBadState);
  EXPECT_TRUE(receiver.Complete(pair.map.epoch, 2, later).ok());
  EXPECT_EQ(receiver.GetReceiveProgress(pair.map.epoch)->layer_rows[2], 6);
}

TEST(JointTransfer, AFailingSinkEndsTheMarkAndNotTheForward) {
  for (const int64_t layer : {0, 1, 2, 5}) {
    Pair pair;
    ASSERT_TRUE(pair.Mark().ok());
    pair.sink->layer = layer;
    pair.sink->refusal = Status(StatusCode::kUnavailable, "the wire is cut");
    EXPECT_EQ(pair.sender.Run(kSeq, Text(5, 17)), pair.alone.Run(kSeq, Text(5, 17)));
    const auto progress = pair.sender.transfer().GetSendProgress(kSeq);
    EXPECT_EQ(progress->failure.code(), StatusCode::kUnavailable) << "layer " << layer;
    EXPECT_FALSE(progress->active);
    EXPECT_EQ(pair.Waited(12).code(), StatusCode::kUnavailable) << "layer " << layer;
    EXPECT_EQ(pair.Commit(12).code(), StatusCode::kBadState);
    ExpectSound(pair.sender);
  }
}

// Some states of a position were given when the next one was refused: they are not those that a
// later mark completes.
TEST(JointTransfer, WhatAFailedMarkHasGivenIsForgotten) {
  for (const bool attention : {true, false}) {
    Pair pair({.attention = attention});
    ASSERT_TRUE(pair.Mark().ok());
    pair.sink->layer = attention ? 3 : 1;  // the second recurrent one
    pair.sink->refusal = Status(StatusCode::kUnavailable, "the wire is cut");
    pair.sender.Run(kSeq, Text(5, 17));
    pair.sink->refusal = Status();
    ASSERT_TRUE(pair.sender.state().PopN(kSeq, 12).ok());
    ASSERT_TRUE(pair.Mark().ok());
    pair.sender.Run(kSeq, Text(60, 72));
    ExpectOk(pair.sender.transfer().GetSendProgress(kSeq)->failure);
    ASSERT_TRUE(pair.Commit(12).ok());
    pair.ExpectGoesOn(Text(60, 72));
  }
}

// Those that stood there before the mark go with its sequence's next forward, and so count then.
TEST(JointTransfer, AnotherSequencesForwardSendsNoTokens) {
  Pair pair;
  pair.sender.Run(kSeq, Text(5, 9));
  ASSERT_TRUE(pair.Mark().ok());
  ASSERT_TRUE(pair.sender.state().AddSequence(4).ok());
  pair.sender.Run(4, Text(30, 33));
  EXPECT_EQ(pair.sender.transfer().GetSendProgress(kSeq)->sent, 0);
  pair.sender.Run(kSeq, Text(9, 11));
  EXPECT_EQ(pair.sender.transfer().GetSendProgress(kSeq)->sent, 6);
  ASSERT_TRUE(pair.Commit(6).ok());
  pair.ExpectGoesOn(Text(5, 11));
}

TEST(JointTransfer, StatesThatWentAheadWaitForTheRows) {
  Pair pair;
  pair.sender.Run(kSeq, Text(5, 17));
  ASSERT_TRUE(pair.Mark().ok());
  ASSERT_TRUE(pair.sender.state().AddSequence(4).ok());
  pair.sender.Run(4, Text(30, 33));
  const SendProgress ahead = pair.sender.transfer().GetSendProgress(kSeq).value();
  EXPECT_TRUE(ahead.active);
  EXPECT_EQ(ahead.sent, 0);
  EXPECT_EQ(pair.Commit(12).code(), StatusCode::kBadState);
  ASSERT_TRUE(pair.sender.transfer().DisaggFlushSend(kSeq).ok());
  const SendProgress all = pair.sender.transfer().GetSendProgress(kSeq).value();
  EXPECT_FALSE(all.active);
  EXPECT_EQ(all.sent, 12);
  ASSERT_TRUE(pair.Commit(12).ok());
  pair.ExpectGoesOn(Text(5, 17));
}

TEST(JointTransfer, AForwardOverTheMapsEndHasNoStateThere) {
  Pair pair({}, 4);
  ASSERT_TRUE(pair.Mark().ok());
  pair.sender.Run(kSeq, Text(5, 11));
  EXPECT_EQ(pair.sender.transfer().GetSendProgress(kSeq)->failure.code(), StatusCode::kNeedsReplay);
  EXPECT_EQ(pair.Waited(4).code(), StatusCode::kNeedsReplay);
}

// As of a prompt that was preempted, and of one that was stored before it was asked for.
TEST_P(JointTransferOf, ADetachedMarkIsResumedAndAStoredPromptIsFlushed) {
  Pair pair(GetParam());
  KVTransfer& transfer = pair.sender.transfer();
  EXPECT_EQ(transfer.DisaggDetachSend(kSeq).status().code(), StatusCode::kNotFound);
  ASSERT_TRUE(pair.Mark().ok());
  pair.sender.Run(kSeq, Text(5, 9));
  ASSERT_EQ(transfer.DisaggDetachSend(kSeq).value(), 4);
  ASSERT_TRUE(pair.sender.state().RemoveSequence(kSeq).ok());
  EXPECT_EQ(pair.Waited(12).code(), StatusCode::kTimeout) << "it was told";
  EXPECT_EQ(pair.receiver.transfer().GetReceiveProgress(pair.map.epoch)->complete, 4);
  ASSERT_TRUE(pair.sender.state().AddSequence(kSeq).ok());
  pair.sender.Run(kSeq, Text(0, 17));  // all of the map's
  ASSERT_TRUE(transfer.DisaggMarkSend(kSeq, 5, std::span(&pair.map, 1), kPeer, 0, 4).ok());
  EXPECT_EQ(transfer.GetSendProgress(kSeq)->sent, 4);
  ASSERT_TRUE(transfer.DisaggFlushSend(kSeq).ok());
  EXPECT_FALSE(transfer.GetSendProgress(kSeq)->active);
  EXPECT_EQ(pair.receiver.transfer().GetReceiveProgress(pair.map.epoch)->complete, 12);
  ASSERT_TRUE(pair.Commit(12).ok());
  pair.ExpectGoesOn(Text(5, 17));
}

TEST(JointTransfer, AnEndedMarkIsHeardOf) {
  const std::vector<std::function<Status(Pair&)>> ends = {
      [](Pair& p) { return p.sender.transfer().DisaggUnmarkSend(kSeq); },
      [](Pair& p) { return p.sender.state().RemoveSequence(kSeq); },
      [](Pair& p) { return p.sender.state().Clear(); },
      [](Pair& p) {
        ReceiveMap other = p.map;
        other.epoch += 1000;
        return p.sender.transfer().DisaggMarkSend(kSeq, 5, std::span(&other, 1), kPeer, 0);
      },
  };
  for (const bool attention : {true, false}) {
    for (const auto& end : ends) {
      Pair pair({.attention = attention});
      ASSERT_TRUE(pair.Mark().ok());
      ASSERT_TRUE(end(pair).ok());
      EXPECT_EQ(pair.Waited(1).code(), StatusCode::kCancelled);
      EXPECT_TRUE(pair.receiver.transfer().GetReceiveProgress(pair.map.epoch).ok());
    }
  }
}

TEST(JointTransfer, MarksThatCannotWorkAreRefused) {
  for (const bool attention : {true, false}) {
    Pair pair({.attention = attention});
    const uint64_t before = pair.sender.state().StateDigest();
    const auto refused = [&](StatusCode code, auto&& change, int64_t begin = 5) {
      std::vector<ReceiveMap> maps = {pair.map};
      change(maps);
      const Status status = pair.sender.transfer().DisaggMarkSend(kSeq, begin, maps, kPeer, 0);
      EXPECT_EQ(status.code(), code) << status.ToString();
      EXPECT_EQ(pair.sender.state().StateDigest(), before);
    };
    refused(StatusCode::kBadArgument, [](auto& maps) { maps.clear(); });
    refused(StatusCode::kBadArgument, [](auto& maps) { maps.push_back(maps[0]); });
    refused(
        StatusCode::kBadArgument, [](auto&) {}, -1);
    refused(
        StatusCode::kIncompatible, [](auto&) {}, 4);
    refused(StatusCode::kIncompatible, [](auto& maps) { maps[0].layout ^= 1; });
    refused(StatusCode::kIncompatible, [](auto& maps) { maps[0].kv_heads.pop_back(); });
    refused(StatusCode::kIncompatible, [](auto& maps) { maps[0].kv_heads[0] *= 2; });
    refused(StatusCode::kBadArgument, [](auto& maps) { maps[0].slots.back() -= 1; });
    refused(StatusCode::kBadArgument, [](auto& maps) { maps[0].count = 0; });
    // Recurrent layers of other shapes.
    auto layers = AllRecurrentKinds();
    layers[1].value_dim += 1;
    Model other({.attention = attention}, 4, layers);
    ExpectOk(other.state().AddSequence(kSeq));
    other.Run(kSeq, Text(0, 5));
    const ReceiveMap theirs = other.transfer().DisaggPrepareRecv(kSeq, 12).value();
    refused(StatusCode::kIncompatible, [&](auto& maps) { maps = {theirs}; });
    EXPECT_EQ(other.transfer().DisaggMarkSend(kSeq, 5, std::span(&pair.map, 1), kPeer, 0).code(),
              StatusCode::kBadState);  // has no sink
    ASSERT_TRUE(pair.Mark().ok());
    EXPECT_EQ(pair.sender.transfer().SetLayerSink(nullptr).code(), StatusCode::kBadState);
  }
}

TEST(JointTransfer, NothingOfItIsDoneInAForward) {
  for (const bool attention : {true, false}) {
    Pair pair({.attention = attention});
    Model& sender = pair.sender;
    ASSERT_TRUE(sender.state().AddSequence(1).ok());
    ASSERT_TRUE(sender.state().BeginForward(Ids{1}, Ids{2}).ok());
    EXPECT_EQ(pair.Mark().code(), StatusCode::kBadState);
    EXPECT_EQ(sender.transfer().SetLayerSink(nullptr).code(), StatusCode::kBadState);
    EXPECT_EQ(sender.transfer().DisaggFlushSend(kSeq).code(), StatusCode::kBadState);
    EXPECT_EQ(sender.transfer().DisaggPrepareRecv(kSeq, 2).status().code(), StatusCode::kBadState);
    ASSERT_TRUE(sender.state().AbortForward().ok());
    EXPECT_TRUE(pair.Mark().ok());
  }
}

// ---------------------------------------------------------------------- no memory

// Each allocation of the call is refused in turn: an error and all as it was, then it works.
void ExpectEachRefusalIsHarmless(const With& with, const std::function<void(Pair&)>& prepare,
                                 const std::function<Status(Pair&)>& call) {
  for (int64_t n = 0;; ++n) {
    ASSERT_LT(n, 500) << "never succeeds";
    Pair pair(with);
    prepare(pair);
    const uint64_t sender = pair.sender.state().StateDigest();
    const uint64_t receiver = pair.receiver.state().StateDigest();
    Status status;
    bool refused = false;
    {
      const RefuseAllocation refusal(n);
      status = call(pair);
      refused = refusal.refused();
    }
    if (!refused) {
      EXPECT_TRUE(status.ok()) << status.ToString();
      return;
    }
    if (status.ok()) continue;  // attention's block merges are left out without memory
    ASSERT_EQ(status.code(), StatusCode::kOutOfMemory) << n << ": " << status.ToString();
    ASSERT_EQ(pair.sender.state().StateDigest(), sender) << "allocation " << n;
    ASSERT_EQ(pair.receiver.state().StateDigest(), receiver) << "allocation " << n;
    ExpectSound(pair.sender);
    ExpectSound(pair.receiver);
    const Status again = call(pair);
    ASSERT_TRUE(again.ok()) << n << ": " << again.ToString();
  }
}

class JointTransferMemory : public testing::TestWithParam<With> {};

TEST_P(JointTransferMemory, ReservationsMarksAndCommitsWorkOrChangeNothing) {
  const auto nothing = [](Pair&) {};
  ExpectEachRefusalIsHarmless(
      GetParam(), [](Pair& p) { ExpectOk(p.receiver.transfer().DisaggCancelRecv(p.map.epoch)); },
      [](Pair& p) { return p.receiver.transfer().DisaggPrepareRecv(kSeq, 7).status(); });
  ExpectEachRefusalIsHarmless(GetParam(), nothing, [](Pair& p) { return p.Mark(); });
  ExpectEachRefusalIsHarmless(
      GetParam(),
      [](Pair& p) {
        ExpectOk(p.Mark());
        p.sender.Run(kSeq, Text(5, 17));
      },
      [](Pair& p) { return p.Commit(12); });
}

// What a send finds no memory for ends its mark, never the forward.
TEST_P(JointTransferMemory, SendingNeedsNoMemoryForTheForward) {
  for (int64_t n = 0;; ++n) {
    ASSERT_LT(n, 200) << "never succeeds";
    Pair pair(GetParam());
    ASSERT_TRUE(pair.Mark().ok());
    ASSERT_TRUE(pair.sender.state().BeginForward(Ids{kSeq}, Ids{12}).ok());
    ASSERT_TRUE(pair.sender.RunLayers(Text(5, 17)).ok());
    Status status;
    bool refused = false;
    {
      const RefuseAllocation refusal(n);
      status = pair.sender.state().EndForward();
      refused = refusal.refused();
    }
    ASSERT_TRUE(status.ok()) << status.ToString();
    ExpectSound(pair.sender);
    const auto progress = pair.sender.transfer().GetSendProgress(kSeq);
    if (!refused) {
      EXPECT_TRUE(progress->failure.ok()) << progress->failure.ToString();
      ASSERT_TRUE(pair.Commit(12).ok());
      return pair.ExpectGoesOn(Text(5, 17));
    }
    if (progress->failure.ok()) continue;
    EXPECT_NE(pair.Commit(12).code(), StatusCode::kOk) << "allocation " << n;
  }
}

INSTANTIATE_TEST_SUITE_P(Parts, JointTransferMemory,
                         testing::Values(With{}, With{.attention = false, .rnn = true}),
                         [](const auto& parts) { return NameOf(parts.param); });

}  // namespace
}  // namespace quire
