// Two caches and a channel, when something cannot be had: each single allocation of each call, in
// the caches and in the channel, and pages, sequences, positions and peers. Whatever is refused,
// the digests of both caches are those of before, and the same works when it is asked for again. A
// forward is never refused for what its sending lacks: then the mark ends, and the receiver holds
// what it held. operator new is replaced in this program (allocation_refusal.h).
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kv/testing/allocation_refusal.h"
#include "kv/testing/kv_test_forward.h"
#include "quire/attention_kv_cache.h"
#include "quire/kv_transfer.h"
#include "quire/transfer.h"

namespace quire {
namespace {

using Ids = std::vector<int64_t>;

constexpr int64_t kPeer = 3;
constexpr int64_t kStored = 5;     // tokens that the sender has before the mark
constexpr int64_t kReserved = 12;  // behind the receiver's own 2
constexpr int64_t kFirst = 2;

// Plain, quantised and latent layers: several groups.
std::vector<AttentionLayerSpec> Layers() {
  AttentionLayerSpec latent{2, 1, 6, 4, DType::kBF16};
  latent.latent = true;
  return {{4, 2, 4, 4, DType::kF32}, {2, 2, 4, 4, DType::kI8, DType::kF8E4M3}, latent};
}

AttentionKVCacheOptions MakeOptions(int64_t page_size) {
  return TestCacheOptions(Layers(), {.max_num_sequences = 4,
                                     .token_capacity = 48,
                                     .prefill_chunk_size = 40,
                                     .page_size = page_size});
}

std::vector<uint64_t> Text(int64_t start, int64_t count) {
  std::vector<uint64_t> tokens;
  for (int64_t i = start; i < start + count; ++i) tokens.push_back(700 + static_cast<uint64_t>(i));
  return tokens;
}

void Extend(AttentionKVCache& cache, int64_t id, const std::vector<uint64_t>& tokens) {
  const auto outputs = RunForward(cache, cache.options().layers, Ids{id}, {tokens});
  ASSERT_TRUE(outputs.ok()) << outputs.status().ToString();
}

enum class Marked : uint8_t { kNo, kYes };

// A sender of kStored tokens and a receiver of kFirst of them that waits for kReserved more.
struct Ends {
  explicit Ends(Marked marked = Marked::kYes)
      : sender(MakeTestCache(MakeOptions(4))), receiver(MakeTestCache(MakeOptions(3))) {
    for (AttentionKVCache* cache : {sender.get(), receiver.get()}) {
      EXPECT_TRUE(cache->AddSequence(0).ok());
      EXPECT_TRUE(cache->AddSequence(1).ok());
      Extend(*cache, 1, Text(90, 4));
    }
    Extend(*sender, 0, Text(0, kStored));
    Extend(*receiver, 0, Text(0, kFirst));
    bare_receiver = receiver->StateDigest();
    const auto reserved = receiver->transfer()->DisaggPrepareRecv(0, kReserved);
    EXPECT_TRUE(reserved.ok()) << reserved.status().ToString();
    map = *reserved;
    EXPECT_TRUE(channel->Connect(kPeer, receiver->transfer()).ok());
    EXPECT_TRUE(sender->transfer()->SetLayerSink(channel).ok());
    bare_sender = sender->StateDigest();
    if (marked == Marked::kYes) {
      EXPECT_TRUE(Mark().ok());
    }
  }
  Status Mark() const {
    return sender->transfer()->DisaggMarkSend(0, kFirst, std::span(&map, 1), kPeer, 0);
  }
  void ExpectSound() const {
    for (const AttentionKVCache* cache : {sender.get(), receiver.get()}) {
      const Status sound = cache->CheckInvariants();
      ASSERT_TRUE(sound.ok()) << sound.ToString();
    }
  }
  std::vector<int64_t> received_rows() const {
    return receiver->transfer()->GetReceiveProgress(map.epoch)->layer_rows;
  }
  // Marked again, all tokens arrive, and the receiver has what the sender has.
  void ExpectWorks() const {
    if (receiver->StateDigest() == bare_receiver) return;  // its reservation is over
    const int64_t length = sender->GetSequenceLength(0).value();
    Status status = Mark();
    ASSERT_TRUE(status.ok()) << status.ToString();
    status = sender->transfer()->DisaggFlushSend(0);
    ASSERT_TRUE(status.ok()) << status.ToString();
    status = receiver->transfer()->DisaggCommitRecv(map.epoch, length - kFirst);
    ASSERT_TRUE(status.ok()) << status.ToString();
    ExpectSound();
    const auto layers = Layers();
    for (size_t l = 0; l < layers.size(); ++l) {
      StoredRows sent(layers[l], length), received(layers[l], length);
      ASSERT_TRUE(sender->ExportKV(0, static_cast<int64_t>(l), 0, sent.view()).ok());
      ASSERT_TRUE(receiver->ExportKV(0, static_cast<int64_t>(l), 0, received.view()).ok());
      EXPECT_TRUE(sent == received) << "layer " << l;
    }
  }

  std::unique_ptr<AttentionKVCache> sender;
  std::unique_ptr<AttentionKVCache> receiver;
  std::shared_ptr<LocalChannel> channel = CreateLocalChannel();
  ReceiveMap map;
  uint64_t bare_sender = 0;  // digests without mark, and without reservation
  uint64_t bare_receiver = 0;
};

using Call = std::function<Status(Ends&)>;

// `call` with the n-th allocation refused, for each n. `check` is asked about each trial in which
// one was.
void ForEachRefusal(Marked marked, const Call& prepare, const Call& call,
                    const std::function<void(Ends&, const Status&)>& check) {
  for (int64_t n = 0;; ++n) {
    SCOPED_TRACE("allocation " + std::to_string(n));
    ASSERT_LT(n, 1000) << "never succeeds";
    Ends ends(marked);
    ASSERT_TRUE(prepare(ends).ok());
    Status status;
    bool refused = false;
    {
      RefuseAllocation refusal(n);
      status = call(ends);
      refused = refusal.refused();
    }
    ends.ExpectSound();
    if (!refused) {
      EXPECT_TRUE(status.ok()) << status.ToString();
      EXPECT_GT(n, 0) << "nothing is allocated here";
      return;
    }
    check(ends, status);
    if (testing::Test::HasFatalFailure()) return;
  }
}

const Call kNothing = [](Ends&) { return Status(); };

// Control calls: refused, both caches are as before; asked for again, they work.
TEST(KVChannelFailure, ARefusedControlCallChangesNeitherCache) {
  struct Case {
    const char* name;
    Marked marked;
    Call call;
  };
  const auto flushed = [](Ends& ends) { return ends.sender->transfer()->DisaggFlushSend(0); };
  const std::vector<Case> cases = {
      {"reserve", Marked::kYes,
       [](Ends& ends) { return ends.receiver->transfer()->DisaggPrepareRecv(1, 9).status(); }},
      {"mark", Marked::kNo, [](Ends& ends) { return ends.Mark(); }},
      {"mark again", Marked::kYes, [](Ends& ends) { return ends.Mark(); }},
      {"connect", Marked::kYes,
       [](Ends& ends) { return ends.channel->Connect(kPeer + 1, ends.receiver->transfer()); }},
      {"view", Marked::kYes,
       [](Ends& ends) {
         const ReceivePart part{.first_row = 1, .count = 2, .first_head = 0, .head_count = 1};
         return ends.receiver->transfer()->View(ends.map.epoch, 2, part).status();
       }},
      {"progress", Marked::kYes,
       [](Ends& ends) {
         return ends.receiver->transfer()->GetReceiveProgress(ends.map.epoch).status();
       }},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name);
    uint64_t sender = 0, receiver = 0;
    const Call prepare = [&](Ends& ends) {
      sender = ends.sender->StateDigest();
      receiver = ends.receiver->StateDigest();
      return Status();
    };
    const auto check = [&](Ends& ends, const Status& status) {
      if (status.ok()) return;  // what was refused was not needed
      ASSERT_EQ(status.code(), StatusCode::kOutOfMemory) << status.ToString();
      ASSERT_EQ(ends.sender->StateDigest(), sender);
      ASSERT_EQ(ends.receiver->StateDigest(), receiver);
      const Status again = c.call(ends);
      ASSERT_TRUE(again.ok()) << again.ToString();
      ends.ExpectWorks();
    };
    ForEachRefusal(c.marked, prepare, c.call, check);
  }
  // Taking over and giving back allocate nothing at all.
  for (const bool commits : {true, false}) {
    Ends ends;
    ASSERT_TRUE(flushed(ends).ok());
    KVTransfer& receiver = *ends.receiver->transfer();
    const int64_t made = AllocationsMade();
    const Status status = commits ? receiver.DisaggCommitRecv(ends.map.epoch, kStored - kFirst)
                                  : receiver.DisaggCancelRecv(ends.map.epoch);
    EXPECT_TRUE(status.ok()) << status.ToString();
    EXPECT_EQ(AllocationsMade(), made);
  }
}

// What becomes of both ends when a send has found no memory: the mark has ended, or all was well.
void ExpectMarkEndedOrNot(Ends& ends, uint64_t receiver_digest, int64_t sent_before) {
  ASSERT_EQ(ends.receiver->StateDigest(), receiver_digest);
  const SendProgress progress = ends.sender->transfer()->GetSendProgress(0).value();
  if (progress.failure.ok()) return;
  EXPECT_EQ(progress.failure.code(), StatusCode::kOutOfMemory);
  EXPECT_FALSE(progress.active);
  EXPECT_EQ(progress.sent, sent_before);
  // Only one allocation was refused, so the receiver has been told.
  const Status waited =
      ends.receiver->transfer()->WaitReceived(ends.map.epoch, kReserved, *MachineTime(), 0);
  EXPECT_EQ(waited.code(), StatusCode::kOutOfMemory) << waited.ToString();
}

TEST(KVChannelFailure, AFlushWithoutMemoryEndsTheMarkAndLeavesBothCaches) {
  uint64_t receiver = 0;
  int64_t failures = 0;
  const Call prepare = [&](Ends& ends) {
    receiver = ends.receiver->StateDigest();
    return Status();
  };
  const Call flush = [](Ends& ends) { return ends.sender->transfer()->DisaggFlushSend(0); };
  ForEachRefusal(Marked::kYes, prepare, flush, [&](Ends& ends, const Status& status) {
    ExpectMarkEndedOrNot(ends, receiver, 0);
    failures += !status.ok();
    if (status.ok()) return;
    EXPECT_EQ(flush(ends).code(), StatusCode::kOutOfMemory);  // it stays failed
    ASSERT_TRUE(ends.sender->transfer()->DisaggUnmarkSend(0).ok());
    ASSERT_EQ(ends.sender->StateDigest(), ends.bare_sender);
    ends.ExpectWorks();
  });
  EXPECT_GE(failures, 3);
}

// Appending, the end and the abort of a forward whose tokens are sent. Outputs are those of a cache
// that sends nothing.
TEST(KVChannelFailure, AForwardGoesOnWithoutMemoryForItsSending) {
  const auto layers = Layers();
  const auto tokens = Text(kStored, 4);
  std::vector<LayerOutputs> expected;
  {
    Ends ends(Marked::kNo);
    auto outputs = RunForward(*ends.sender, layers, Ids{0}, {tokens});
    ASSERT_TRUE(outputs.ok());
    expected = *std::move(outputs);
  }
  const auto run_layer = [&](Ends& ends, size_t l, LayerOutputs* outputs) {
    return RunLayer(*ends.sender, layers[l], static_cast<int64_t>(l), tokens, ForwardStyle(),
                    outputs);
  };
  for (size_t at = 0; at < layers.size() + 2; ++at) {  // a layer, the end, or an abort
    SCOPED_TRACE("step " + std::to_string(at));
    uint64_t receiver = 0;
    int64_t failures = 0;
    std::vector<LayerOutputs> outputs(layers.size());
    TokenInputs inputs;
    const Call prepare = [&](Ends& ends) -> Status {
      receiver = ends.receiver->StateDigest();
      QUIRE_RETURN_IF_ERROR(ends.sender->BeginForward(Ids{0}, Ids{4}));
      for (size_t l = 0; l < std::min(at, layers.size()); ++l)
        QUIRE_RETURN_IF_ERROR(run_layer(ends, l, &outputs[l]));
      if (at >= layers.size()) return Status();
      inputs = MakeTokenInputs(layers[at], static_cast<int64_t>(at), DType::kF32, tokens);
      return Status();
    };
    const Call call = [&](Ends& ends) -> Status {
      if (at == layers.size()) return ends.sender->EndForward();
      if (at > layers.size()) return ends.sender->AbortForward();
      return AppendInputs(*ends.sender, layers[at], static_cast<int64_t>(at), inputs);
    };
    const auto check = [&](Ends& ends, const Status& status) {
      ASSERT_TRUE(status.ok()) << status.ToString();
      if (at < layers.size()) {  // the rest of the forward
        const TensorView q = inputs.q.view();
        outputs[at].o =
            TestTensor(DType::kF32, {4, layers[at].num_qo_heads, layers[at].v_head_dim});
        ASSERT_TRUE(ends.sender
                        ->Attend(static_cast<int64_t>(at), q, outputs[at].o.view(), nullptr,
                                 ScoreScale(layers[at]))
                        .ok());
        for (size_t l = at + 1; l < layers.size(); ++l)
          ASSERT_TRUE(run_layer(ends, l, &outputs[l]).ok());
        ASSERT_TRUE(ends.sender->EndForward().ok());
      }
      ExpectMarkEndedOrNot(ends, receiver, 0);
      failures += !ends.sender->transfer()->GetSendProgress(0)->failure.ok();
      for (size_t l = 0; l < layers.size(); ++l) {
        EXPECT_TRUE(std::ranges::equal(outputs[l].o.bytes(), expected[l].o.bytes()))
            << "layer " << l;
      }
      if (at > layers.size()) {
        EXPECT_EQ(ends.received_rows(), std::vector<int64_t>(layers.size()));
        EXPECT_EQ(ends.sender->GetSequenceLength(0).value(), kStored);
      }
      ends.ExpectWorks();
    };
    if (at < layers.size()) {
      ForEachRefusal(Marked::kYes, prepare, call, check);
      EXPECT_GT(failures, 0);
      continue;
    }
    // Neither end needs memory.
    Ends ends;
    ASSERT_TRUE(prepare(ends).ok());
    const int64_t made = AllocationsMade();
    ASSERT_TRUE(call(ends).ok());
    EXPECT_EQ(AllocationsMade(), made);
    check(ends, Status());
  }
}

// A sender that goes tells its receiver, which takes memory. Without it the sender goes all the
// same, and the receiver learns of it at its deadline.
TEST(KVChannelFailure, ASenderGoesWhetherOrNotItsReceiverCanBeTold) {
  const std::vector<Call> calls = {
      [](Ends& ends) { return ends.sender->transfer()->DisaggUnmarkSend(0); },
      [](Ends& ends) { return ends.sender->RemoveSequence(0); },
      [](Ends& ends) { return ends.sender->Clear(); }};
  for (size_t i = 0; i < calls.size(); ++i) {
    SCOPED_TRACE("call " + std::to_string(i));
    uint64_t receiver = 0;
    int64_t untold = 0;
    const Call prepare = [&](Ends& ends) {
      receiver = ends.receiver->StateDigest();
      return Status();
    };
    ForEachRefusal(Marked::kYes, prepare, calls[i], [&](Ends& ends, const Status& status) {
      ASSERT_TRUE(status.ok()) << status.ToString();
      ASSERT_EQ(ends.receiver->StateDigest(), receiver);
      const StatusCode code = ends.receiver->transfer()
                                  ->WaitReceived(ends.map.epoch, kReserved, *MachineTime(), 0)
                                  .code();
      untold += code == StatusCode::kTimeout;
      EXPECT_TRUE(code == StatusCode::kTimeout || code == StatusCode::kCancelled);
      if (i != 0) return;
      ASSERT_EQ(ends.sender->StateDigest(), ends.bare_sender);
      ends.ExpectWorks();
    });
    EXPECT_GT(untold, 0);
  }
}

// ---------------------------------------------------------------------- capacity

TEST(KVChannelFailure, EachCapacityIsRefusedWithoutAChange) {
  Ends ends;
  KVTransfer& sender = *ends.sender->transfer();
  KVTransfer& receiver = *ends.receiver->transfer();
  const uint64_t sender_digest = ends.sender->StateDigest();
  const uint64_t receiver_digest = ends.receiver->StateDigest();
  const auto expect = [&](StatusCode code, const Status& status) {
    EXPECT_EQ(status.code(), code) << status.ToString();
    EXPECT_EQ(ends.sender->StateDigest(), sender_digest);
    EXPECT_EQ(ends.receiver->StateDigest(), receiver_digest);
    ends.ExpectSound();
  };
  // Pages: from one token more than fit on.
  const int64_t room = [&] {
    int64_t n = 1;
    while (receiver.DisaggPrepareRecv(1, n).ok()) {
      EXPECT_TRUE(ends.receiver->PopN(1, n).ok());
      EXPECT_EQ(ends.receiver->StateDigest(), receiver_digest);
      ++n;
    }
    return n;
  }();
  EXPECT_GT(room, 10);
  for (int64_t n = room; n < room + 5; ++n)
    expect(StatusCode::kOutOfPages, receiver.DisaggPrepareRecv(1, n).status());
  expect(StatusCode::kTooLarge, receiver.DisaggPrepareRecv(1, int64_t{1} << 31).status());
  expect(StatusCode::kBadState, receiver.DisaggPrepareRecv(0, 1).status());
  // The sender's forward: pages, rows of a forward.
  expect(StatusCode::kTooLarge, ends.sender->BeginForward(Ids{0}, Ids{41}));
  ASSERT_TRUE(ends.sender->AddSequence(2).ok());
  Extend(*ends.sender, 2, Text(100, 36));
  const uint64_t full = ends.sender->StateDigest();
  EXPECT_EQ(ends.sender->BeginForward(Ids{0}, Ids{8}).code(), StatusCode::kOutOfPages);
  EXPECT_EQ(ends.sender->StateDigest(), full);
  EXPECT_TRUE(sender.GetSendProgress(0)->active);
  ASSERT_TRUE(ends.sender->RemoveSequence(2).ok());
  expect(StatusCode::kOk, Status());
  // Sequences, on either side.
  for (AttentionKVCache* cache : {ends.sender.get(), ends.receiver.get()}) {
    for (const int64_t id : {2, 3}) ASSERT_TRUE(cache->AddSequence(id).ok());
    const uint64_t digest = cache->StateDigest();
    EXPECT_EQ(cache->ForkSequence(0, 4, 1).code(), StatusCode::kTooLarge);
    EXPECT_EQ(cache->StateDigest(), digest);
    for (const int64_t id : {2, 3}) ASSERT_TRUE(cache->RemoveSequence(id).ok());
  }
  // The map: nothing of it is left to send, and none.
  expect(StatusCode::kBadArgument,
         sender.DisaggMarkSend(0, kFirst, std::span(&ends.map, 1), kPeer, 0, ends.map.count));
  expect(StatusCode::kBadArgument, sender.DisaggMarkSend(0, kFirst, {}, kPeer, 0));
  // Peers.
  expect(StatusCode::kBadArgument, ends.channel->Connect(kPeer, ends.receiver->transfer()));
  expect(StatusCode::kNotFound, ends.channel->Disconnect(kPeer + 1));
  ends.ExpectWorks();
}

TEST(KVChannelFailure, WhatNobodyReceivesIsNotSent) {
  Ends ends;
  const uint64_t receiver = ends.receiver->StateDigest();
  ASSERT_TRUE(ends.channel->Disconnect(kPeer).ok());
  EXPECT_EQ(ends.sender->transfer()->DisaggFlushSend(0).code(), StatusCode::kUnavailable);
  EXPECT_EQ(ends.receiver->StateDigest(), receiver);
  EXPECT_EQ(ends.received_rows(), std::vector<int64_t>(Layers().size()));
  ASSERT_TRUE(ends.sender->transfer()->DisaggUnmarkSend(0).ok());
  EXPECT_EQ(ends.sender->StateDigest(), ends.bare_sender);
  ASSERT_TRUE(ends.channel->Connect(kPeer, ends.receiver->transfer()).ok());
  ends.ExpectWorks();
}

}  // namespace
}  // namespace quire
