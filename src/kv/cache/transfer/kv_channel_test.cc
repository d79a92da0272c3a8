// Two caches, or three, and a channel between them: what the receiver holds in the end is, bit for
// bit, what it would have computed, and what goes wrong on the way is never seen.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "kv/testing/kv_test_forward.h"
#include "kv/testing/saboteur.h"
#include "quire/attention_kv_cache.h"
#include "quire/transfer.h"

namespace quire {
namespace {

using Ids = std::vector<int64_t>;
using Tokens = std::vector<uint64_t>;

AttentionKVCacheOptions MakeOptions(int64_t page_size, std::vector<AttentionLayerSpec> layers) {
  return TestCacheOptions(std::move(layers), {.max_num_sequences = 8,
                                              .token_capacity = 400,
                                              .prefill_chunk_size = 400,
                                              .page_size = page_size});
}

// Every kind of stored element, in one group and in several.
std::vector<AttentionLayerSpec> Plain() {
  return {{4, 2, 8, 8, DType::kF32}, {4, 2, 8, 8, DType::kF32}};
}
std::vector<AttentionLayerSpec> Mixed() {
  return {{4, 2, 8, 8, DType::kF32},
          {4, 4, 8, 4, DType::kF16},
          {4, 2, 8, 8, DType::kI8},
          {4, 2, 8, 8, DType::kBF16, DType::kF8E4M3}};
}

// Layers without values of their own, beside one that has some.
std::vector<AttentionLayerSpec> Latent() {
  AttentionLayerSpec latent{4, 1, 12, 8, DType::kBF16};
  latent.latent = true;
  AttentionLayerSpec codes = latent;
  codes.dtype = DType::kI8;
  return {latent, {4, 2, 8, 8, DType::kF32}, codes};
}

void ExpectSameOutputs(const std::vector<LayerOutputs>& a, const std::vector<LayerOutputs>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t l = 0; l < a.size(); ++l)
    EXPECT_TRUE(std::ranges::equal(a[l].o.bytes(), b[l].o.bytes())) << "layer " << l;
}

void ExpectSameKV(AttentionKVCache& a, AttentionKVCache& b, int64_t id) {
  const int64_t length = a.GetSequenceLength(id).value();
  ASSERT_EQ(length, b.GetSequenceLength(id).value());
  for (size_t l = 0; l < a.options().layers.size(); ++l) {
    const AttentionLayerSpec& spec = a.options().layers[l];
    StoredRows of_a(spec, length), of_b(spec, length);
    ASSERT_TRUE(a.ExportKV(id, static_cast<int64_t>(l), 0, of_a.view()).ok());
    ASSERT_TRUE(b.ExportKV(id, static_cast<int64_t>(l), 0, of_b.view()).ok());
    EXPECT_TRUE(of_a == of_b) << "layer " << l;
  }
}

void ExpectSound(const AttentionKVCache& cache) {
  const Status sound = cache.CheckInvariants();
  ASSERT_TRUE(sound.ok()) << sound.ToString();
}

// Sender and receiver, sequence 0 in both, and a third that computes everything alone.
struct Pair {
  Pair(const AttentionKVCacheOptions& send, const AttentionKVCacheOptions& receive)
      : sender(MakeTestCache(send)),
        receiver(MakeTestCache(receive)),
        alone(MakeTestCache(receive)) {
    for (AttentionKVCache* cache : {sender.get(), receiver.get(), alone.get()})
      EXPECT_TRUE(cache->AddSequence(0).ok());
    sink = std::make_shared<Saboteur>(channel);
    EXPECT_TRUE(channel->Connect(3, receiver->transfer()).ok());
    EXPECT_TRUE(sender->transfer()->SetLayerSink(sink).ok());
  }
  explicit Pair(const AttentionKVCacheOptions& options) : Pair(options, options) {}

  ReceiveMap Reserve(int64_t count) {
    auto map = receiver->transfer()->DisaggPrepareRecv(0, count);
    EXPECT_TRUE(map.ok()) << map.status().ToString();
    return map.ok() ? *std::move(map) : ReceiveMap();
  }
  Status Mark(const ReceiveMap& map, int64_t begin) {
    return sender->transfer()->DisaggMarkSend(0, begin, std::span(&map, 1), 3, 0);
  }
  SendProgress Sent() { return sender->transfer()->GetSendProgress(0).value(); }
  void Commit(const ReceiveMap& map) {
    const Status status = receiver->transfer()->DisaggCommitRecv(map.epoch, map.count);
    EXPECT_TRUE(status.ok()) << status.ToString();
  }
  // The receiver goes on where the sender's tokens end, as the lone cache does.
  void ExpectSameFuture(int64_t length) {
    ExpectSound(*receiver);
    if (length > 0 && alone->GetSequenceLength(0).value() == 0)
      ExtendSequence(*alone, 0, NumberedTokens(0, length));
    ExpectSameOutputs(ExtendSequence(*receiver, 0, NumberedTokens(length, 1)),
                      ExtendSequence(*alone, 0, NumberedTokens(length, 1)));
    ExpectSameOutputs(ExtendSequence(*receiver, 0, NumberedTokens(length + 1, 20)),
                      ExtendSequence(*alone, 0, NumberedTokens(length + 1, 20)));
    ExpectSound(*receiver);
  }

  std::shared_ptr<LocalChannel> channel = CreateLocalChannel();
  std::shared_ptr<Saboteur> sink;
  std::unique_ptr<AttentionKVCache> sender, receiver, alone;
};

TEST(KVChannel, AChunkedPrefillArrivesLayerByLayerForEveryPairOfPageSizes) {
  for (const auto& layers : {Plain(), Mixed(), Latent()}) {
    for (const auto& [from, to] : {std::pair{16, 16}, {16, 32}, {4, 16}, {3, 32}, {48, 5}}) {
      SCOPED_TRACE(std::to_string(from) + " to " + std::to_string(to));
      Pair pair(MakeOptions(from, layers), MakeOptions(to, layers));
      const ReceiveMap map = pair.Reserve(70);
      ASSERT_TRUE(pair.Mark(map, 0).ok());
      ExtendSequence(*pair.sender, 0, NumberedTokens(0, 33));
      ExpectSound(*pair.receiver);
      const auto half = pair.receiver->transfer()->GetReceiveProgress(map.epoch).value();
      EXPECT_EQ(half.layer_rows, std::vector<int64_t>(layers.size(), 33));
      ExtendSequence(*pair.sender, 0, NumberedTokens(33, 2));
      ExtendSequence(*pair.sender, 0, NumberedTokens(35, 40));  // 5 behind the map are not sent
      EXPECT_FALSE(pair.Sent().active);
      EXPECT_EQ(pair.Sent().sent, 70);
      ExtendSequence(*pair.sender, 0, NumberedTokens(75, 1));
      pair.Commit(map);
      EXPECT_TRUE(pair.sender->PopN(0, 6).ok());
      ExpectSameKV(*pair.receiver, *pair.sender, 0);
      pair.ExpectSameFuture(70);
    }
  }
}

TEST(KVChannel, WhatIsStoredWhenTheMarkIsMadeGoesWithTheNextForwardOrTheFence) {
  for (const bool fence : {false, true}) {
    Pair pair(MakeOptions(4, Mixed()), MakeOptions(16, Mixed()));
    ExtendSequence(*pair.sender, 0, NumberedTokens(0, 300));  // more than one piece
    const ReceiveMap map = pair.Reserve(310);
    ASSERT_TRUE(pair.Mark(map, 0).ok());
    if (fence) {
      ASSERT_TRUE(pair.sender->transfer()->DisaggFlushSend(0).ok());
      EXPECT_EQ(pair.Sent().sent, 300);
    }
    ExtendSequence(*pair.sender, 0, NumberedTokens(300, 10));
    EXPECT_EQ(pair.Sent().sent, 310);
    pair.Commit(map);
    pair.ExpectSameFuture(310);
  }
}

TEST(KVChannel, TokensGoBehindThoseThatTheReceiverHas) {
  // The receiver's border lies in mid-page and mid-tile, and others fork and write there meanwhile.
  Pair pair(MakeOptions(16, Mixed()), MakeOptions(16, Mixed()));
  ExtendSequence(*pair.receiver, 0, NumberedTokens(0, 21));
  ExtendSequence(*pair.sender, 0, NumberedTokens(0, 21));
  const ReceiveMap map = pair.Reserve(20);
  EXPECT_EQ(map.first_position, 21);
  ASSERT_TRUE(pair.receiver->ForkSequence(0, 1, 21).ok());
  ASSERT_TRUE(pair.Mark(map, 21).ok());
  ExtendSequence(*pair.sender, 0, NumberedTokens(21, 7));
  ExtendSequence(*pair.receiver, 1, NumberedTokens(900, 3));
  ExtendSequence(*pair.sender, 0, NumberedTokens(28, 13));
  pair.Commit(map);
  pair.ExpectSameFuture(41);
  // The fork is what it would be alone.
  ASSERT_TRUE(pair.alone->AddSequence(1).ok());
  ExtendSequence(*pair.alone, 1, NumberedTokens(0, 21));
  ExtendSequence(*pair.alone, 1, NumberedTokens(900, 3));
  ExpectSameOutputs(ExtendSequence(*pair.receiver, 1, NumberedTokens(950, 4)),
                    ExtendSequence(*pair.alone, 1, NumberedTokens(950, 4)));
}

TEST(KVChannel, WindowsOfLayersAndOfTheSequence) {
  auto layers = Mixed();
  layers[1].window = 18;
  auto options = MakeOptions(4, layers);
  Pair pair(options, MakeOptions(16, layers));
  for (AttentionKVCache* cache : {pair.sender.get(), pair.receiver.get(), pair.alone.get()})
    ASSERT_TRUE(cache->EnableSlidingWindowForSeq(0, 25, 3).ok());
  const ReceiveMap map = pair.Reserve(90);
  ASSERT_TRUE(pair.Mark(map, 0).ok());
  for (int64_t start = 0; start < 90; start += 15)
    ExtendSequence(*pair.sender, 0, NumberedTokens(start, 15));
  pair.Commit(map);
  ExtendSequence(*pair.alone, 0, NumberedTokens(0, 90));
  EXPECT_EQ(pair.receiver->HeldTokens(0).value(), pair.alone->HeldTokens(0).value());
  pair.ExpectSameFuture(90);
}

TEST(KVChannel, ReceiversShareTheHeadsOfOneSender) {
  auto half = Mixed();
  for (AttentionLayerSpec& layer : half) {
    layer.num_qo_heads /= 2;
    layer.num_kv_heads /= 2;
  }
  const auto whole = MakeTestCache(MakeOptions(16, Mixed()));
  ASSERT_TRUE(whole->AddSequence(0).ok());
  const auto channel = CreateLocalChannel();
  std::vector<std::unique_ptr<AttentionKVCache>> halves;
  std::vector<ReceiveMap> maps;
  for (int64_t peer = 0; peer < 2; ++peer) {
    halves.push_back(MakeTestCache(MakeOptions(peer == 0 ? 4 : 32, half)));
    ASSERT_TRUE(halves.back()->AddSequence(7).ok());
    maps.push_back(*halves.back()->transfer()->DisaggPrepareRecv(7, 40));
    ASSERT_TRUE(channel->Connect(10 + peer, halves.back()->transfer()).ok());
  }
  ASSERT_TRUE(whole->transfer()->SetLayerSink(channel).ok());
  ASSERT_TRUE(whole->transfer()->DisaggMarkSend(0, 0, maps, 10, 0).ok());
  ExtendSequence(*whole, 0, NumberedTokens(0, 40));
  for (size_t l = 0; l < half.size(); ++l) {
    StoredRows all(Mixed()[l], 40);
    ASSERT_TRUE(whole->ExportKV(0, static_cast<int64_t>(l), 0, all.view()).ok());
    for (int64_t peer = 0; peer < 2; ++peer) {
      AttentionKVCache& cache = *halves[static_cast<size_t>(peer)];
      if (l == 0) {
        ASSERT_TRUE(
            cache.transfer()->DisaggCommitRecv(maps[static_cast<size_t>(peer)].epoch, 40).ok());
      }
      StoredRows part(half[l], 40);
      ASSERT_TRUE(cache.ExportKV(7, static_cast<int64_t>(l), 0, part.view()).ok());
      const int64_t heads = half[l].num_kv_heads;
      EXPECT_EQ(DigestOfHeads(part.view(), 0, heads),
                DigestOfHeads(all.view(), peer * heads, heads))
          << "layer " << l << " of peer " << peer;
    }
  }
  // And back: two senders, each with half of the heads, fill one receiver. A row counts when both
  // have sent it.
  constexpr int64_t kStaging = 1000;  // some rows of a layer, and not all
  ASSERT_TRUE(whole->AddSequence(1).ok());
  ReceiveMap back = *whole->transfer()->DisaggPrepareRecv(1, 41);
  const auto other = CreateLocalChannel();
  ASSERT_TRUE(other->Connect(5, whole->transfer()).ok());
  for (int64_t rank = 0; rank < 2; ++rank) {
    AttentionKVCache& cache = *halves[static_cast<size_t>(rank)];
    ASSERT_TRUE(cache.transfer()->SetLayerSink(other).ok());
    ASSERT_TRUE(cache.transfer()->DisaggMarkSend(7, 0, std::span(&back, 1), 5, rank).ok());
    ASSERT_TRUE(whole->transfer()->SetStagingLimit(kStaging).ok());
    ASSERT_TRUE(cache.transfer()->DisaggFlushSend(7).ok());
    EXPECT_LE(whole->transfer()->staging().largest, kStaging);
    EXPECT_GT(whole->transfer()->staging().largest, 0);
    EXPECT_EQ(whole->transfer()->staging().held, 0);
    const auto rows = whole->transfer()->GetReceiveProgress(back.epoch)->layer_rows;
    EXPECT_EQ(rows, std::vector<int64_t>(half.size(), rank == 0 ? 0 : 40));
  }
  EXPECT_EQ(whole->transfer()->DisaggCommitRecv(back.epoch, 41).code(), StatusCode::kBadState);
  ASSERT_TRUE(whole->transfer()->DisaggCommitRecv(back.epoch, 40).ok());
  ExpectSound(*whole);
  for (size_t l = 0; l < half.size(); ++l) {
    StoredRows sent(Mixed()[l], 40), returned(Mixed()[l], 40);
    ASSERT_TRUE(whole->ExportKV(0, static_cast<int64_t>(l), 0, sent.view()).ok());
    ASSERT_TRUE(whole->ExportKV(1, static_cast<int64_t>(l), 0, returned.view()).ok());
    EXPECT_TRUE(sent == returned) << "layer " << l;
  }
}

// The received tokens begin within a tile of a page of their own, and nothing before them is held:
// so the tile is read where it lies, with slots that no token was written to.
TEST(KVChannel, TokensAreReceivedBehindOnesThatWereLeftOut) {
  for (const auto& kinds : {Mixed(), Latent()}) {
    std::vector<AttentionLayerSpec> layers = kinds;
    for (AttentionLayerSpec& layer : layers) layer.window = 1;
    Pair pair(MakeOptions(16, layers));
    const KVBlock nothing(layers.size());
    const int64_t left_out = 5;
    ASSERT_TRUE(pair.receiver
                    ->ImportVisibleKV(
                        0, {.blocks = std::span(&nothing, 1), .tokens = std::span(&left_out, 1)})
                    .ok());
    ExtendSequence(*pair.sender, 0, NumberedTokens(0, left_out));
    const ReceiveMap map = pair.Reserve(8);
    ASSERT_TRUE(pair.Mark(map, left_out).ok());
    ExtendSequence(*pair.sender, 0, NumberedTokens(left_out, 8));
    pair.Commit(map);
    pair.ExpectSameFuture(13);
  }
}

TEST(KVChannel, DamagedBytesAreNeverSeen) {
  Pair pair(MakeOptions(16, Mixed()));
  ExtendSequence(*pair.receiver, 0, NumberedTokens(0, 5));
  ExtendSequence(*pair.sender, 0, NumberedTokens(0, 5));
  const uint64_t before = pair.receiver->StateDigest();
  const ReceiveMap map = pair.Reserve(30);
  ASSERT_TRUE(pair.Mark(map, 5).ok());
  ExtendSequence(*pair.sender, 0, NumberedTokens(5, 10));
  pair.sink->victim = pair.receiver->transfer();
  ExtendSequence(*pair.sender, 0, NumberedTokens(15, 10));  // the forward itself is unharmed
  EXPECT_EQ(pair.Sent().failure.code(), StatusCode::kCorrupt);
  EXPECT_EQ(pair.Sent().sent, 10);
  EXPECT_EQ(pair.receiver->transfer()->WaitReceived(map.epoch, 30, *MachineTime(), 0).code(),
            StatusCode::kCorrupt);
  EXPECT_TRUE(pair.receiver->transfer()->WaitReceived(map.epoch, 10, *MachineTime(), 0).ok());
  EXPECT_EQ(pair.receiver->transfer()->DisaggCommitRecv(map.epoch, 11).code(),
            StatusCode::kBadState);
  EXPECT_EQ(pair.receiver->BeginForward(Ids{0}, Ids{1}).code(), StatusCode::kBadState);
  ASSERT_TRUE(pair.receiver->transfer()->DisaggCancelRecv(map.epoch).ok());
  EXPECT_EQ(pair.receiver->StateDigest(), before);
  // Computed here instead, all is as if nothing had been sent.
  ExtendSequence(*pair.receiver, 0, NumberedTokens(5, 30));
  pair.ExpectSameFuture(35);
}

TEST(KVChannel, AnAbortedForwardCountsForNothingAndIsSentAnew) {
  Pair pair(MakeOptions(4, Plain()));
  const ReceiveMap map = pair.Reserve(12);
  ASSERT_TRUE(pair.Mark(map, 0).ok());
  ExtendSequence(*pair.sender, 0, NumberedTokens(0, 4));
  ASSERT_TRUE(pair.sender->BeginForward(Ids{0}, Ids{8}).ok());
  LayerOutputs outputs;
  ASSERT_TRUE(
      RunLayer(*pair.sender, Plain()[0], 0, NumberedTokens(700, 8), ForwardStyle(), &outputs).ok());
  ASSERT_TRUE(pair.sender->AbortForward().ok());
  const auto progress = pair.receiver->transfer()->GetReceiveProgress(map.epoch).value();
  EXPECT_EQ(progress.layer_rows, (std::vector<int64_t>{4, 4}));
  EXPECT_EQ(pair.Sent().sent, 4);
  ExtendSequence(*pair.sender, 0, NumberedTokens(4, 8));
  pair.Commit(map);
  pair.ExpectSameFuture(12);
}

TEST(KVChannel, PoppedTokensAreSentAnew) {
  Pair pair(MakeOptions(16, Mixed()));
  const ReceiveMap map = pair.Reserve(20);
  ASSERT_TRUE(pair.Mark(map, 0).ok());
  ExtendSequence(*pair.sender, 0, NumberedTokens(0, 8));
  ExtendSequence(*pair.sender, 0, NumberedTokens(800, 12));
  EXPECT_FALSE(pair.Sent().active);
  ASSERT_TRUE(pair.sender->PopN(0, 13).ok());
  EXPECT_EQ(pair.Sent().sent, 7);
  ExtendSequence(*pair.sender, 0, NumberedTokens(7, 13));
  pair.Commit(map);
  pair.ExpectSameFuture(20);
}

TEST(KVChannel, TreesAreSentOnceTheyAreCommitted) {
  Pair pair(MakeOptions(4, Plain()));
  const ReceiveMap map = pair.Reserve(6);
  ASSERT_TRUE(pair.Mark(map, 0).ok());
  ExtendSequence(*pair.sender, 0, NumberedTokens(0, 3));
  // Two branches of which the second is right.
  ASSERT_TRUE(pair.sender->BeginTreeForward(Ids{0}, Ids{3}, Ids{-1, -1, 1}).ok());
  const Tokens nodes{777, NumberedTokens(3, 1)[0], NumberedTokens(4, 1)[0]};
  ASSERT_TRUE(FinishForward(*pair.sender, Plain(), nodes).ok());
  EXPECT_EQ(pair.Sent().sent, 3);
  ASSERT_TRUE(pair.sender->CommitAcceptedTokenTreeNodes(Ids{0}, Ids{2}).ok());
  ASSERT_TRUE(pair.sender->transfer()->DisaggFlushSend(0).ok());
  EXPECT_EQ(pair.Sent().sent, 5);
  ExtendSequence(*pair.sender, 0, NumberedTokens(5, 1));
  pair.Commit(map);
  pair.ExpectSameFuture(6);
}

TEST(KVChannel, LateWritesOfAnOldEpochReachNobody) {
  Pair pair(MakeOptions(16, Plain()));
  const ReceiveMap old = pair.Reserve(16);
  const ReceivePart part{.first_row = 0, .count = 16, .first_head = 0, .head_count = 2};
  const auto late = pair.receiver->transfer()->View(old.epoch, 0, part);
  ASSERT_TRUE(late.ok());
  ASSERT_TRUE(pair.Mark(old, 0).ok());
  ExtendSequence(*pair.sender, 0, NumberedTokens(0, 4));
  ASSERT_TRUE(pair.receiver->transfer()->DisaggCancelRecv(old.epoch).ok());
  const ReceiveMap map = pair.Reserve(16);
  EXPECT_NE(map.epoch, old.epoch);
  EXPECT_EQ(map.slots, old.slots);  // the same pages
  // The view is still memory, but nobody's.
  const uint32_t digest = DigestOfHeads(late->rows, 0, 2);
  std::fill_n(late->rows.k.data_as<float>(), 16 * 2 * 8, 1.5F);
  EXPECT_EQ(pair.receiver->transfer()->Store(old.epoch, 0, part, *late, digest).code(),
            StatusCode::kNotFound);
  EXPECT_EQ(pair.receiver->transfer()->Complete(old.epoch, 0, part).code(), StatusCode::kNotFound);
  ExtendSequence(*pair.sender, 0, NumberedTokens(4, 4));
  EXPECT_EQ(pair.Sent().failure.code(), StatusCode::kNotFound);
  // The new reservation has heard of none of this; marked again, it is filled.
  EXPECT_TRUE(pair.receiver->transfer()->GetReceiveProgress(map.epoch)->failure.ok());
  ASSERT_TRUE(pair.Mark(map, 0).ok());
  ExtendSequence(*pair.sender, 0, NumberedTokens(8, 8));
  pair.Commit(map);
  pair.ExpectSameFuture(16);
}

TEST(KVChannel, ASenderThatStopsIsReportedAndOneThatDiesTimesOut) {
  Pair pair(MakeOptions(16, Plain()));
  KVTransfer& receiver = *pair.receiver->transfer();
  const uint64_t before = pair.receiver->StateDigest();
  for (const bool removed : {true, false}) {
    const ReceiveMap map = pair.Reserve(10);
    ASSERT_TRUE(pair.Mark(map, 0).ok());
    ExtendSequence(*pair.sender, 0, NumberedTokens(0, 4));
    EXPECT_EQ(receiver.WaitReceived(map.epoch, 10, *MachineTime(), 0).code(), StatusCode::kTimeout);
    if (removed) {
      ASSERT_TRUE(pair.sender->RemoveSequence(0).ok());
      ASSERT_TRUE(pair.sender->AddSequence(0).ok());
      EXPECT_EQ(pair.sender->transfer()->GetSendProgress(0).status().code(), StatusCode::kNotFound);
    } else {
      ASSERT_TRUE(pair.sender->Clear().ok());
    }
    EXPECT_EQ(receiver.WaitReceived(map.epoch, 10, *MachineTime(), 0).code(),
              StatusCode::kCancelled);
    ASSERT_TRUE(receiver.DisaggCancelRecv(map.epoch).ok());
    EXPECT_EQ(pair.receiver->StateDigest(), before);
  }
  ExtendSequence(*pair.receiver, 0, NumberedTokens(0, 10));
  pair.ExpectSameFuture(10);
}

TEST(KVChannel, ABrokenChannelHarmsNoForward) {
  Pair pair(MakeOptions(16, Plain()));
  const ReceiveMap map = pair.Reserve(10);
  ASSERT_TRUE(pair.Mark(map, 0).ok());
  pair.sink->refusal = Status(StatusCode::kUnavailable, "the cable is cut");
  const auto outputs = ExtendSequence(*pair.sender, 0, NumberedTokens(0, 9));
  ExpectSameOutputs(outputs, ExtendSequence(*pair.alone, 0, NumberedTokens(0, 9)));
  EXPECT_EQ(pair.Sent().failure.code(), StatusCode::kUnavailable);
  EXPECT_FALSE(pair.Sent().active);
  ASSERT_TRUE(pair.channel->Disconnect(3).ok());
  pair.sink->refusal = Status();
  ASSERT_TRUE(pair.Mark(map, 0).ok());
  ExtendSequence(*pair.sender, 0, NumberedTokens(9, 3));
  EXPECT_EQ(pair.Sent().failure.code(), StatusCode::kUnavailable);
  EXPECT_EQ(pair.channel->Disconnect(3).code(), StatusCode::kNotFound);
  EXPECT_EQ(pair.channel->Connect(3, nullptr).code(), StatusCode::kBadArgument);
}

// Many small transfers with forks, pops, cancels, aborts and re-sends, against a cache that
// computes everything itself.
TEST(KVChannel, RandomWalkAgainstComputingAlone) {
  for (uint32_t seed = 0; seed < 30; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const auto pick = [&](int64_t low, int64_t high) {
      return low + static_cast<int64_t>(random() % static_cast<uint32_t>(high - low + 1));
    };
    const std::vector<int64_t> sizes{3, 4, 16, 20, 32};
    const auto size = [&] { return sizes[static_cast<size_t>(pick(0, 4))]; };
    const int64_t kind = pick(0, 2);
    const auto layers = kind == 0 ? Plain() : kind == 1 ? Mixed() : Latent();
    const auto options = [&] {
      AttentionKVCacheOptions drawn = MakeOptions(size(), layers);
      drawn.token_capacity = 1200;  // children that go their own way take pages, too
      return drawn;
    };
    const AttentionKVCacheOptions sender = options();
    const AttentionKVCacheOptions receiver = options();
    Pair pair(sender, receiver);
    pair.alone = MakeTestCache(options());
    ASSERT_TRUE(pair.alone->AddSequence(0).ok());
    int64_t length = 0;  // of sequence 0, everywhere
    for (int round = 0; round < 6 && length < 250; ++round) {
      const int64_t count = pick(2, 45);
      const ReceiveMap map = pair.Reserve(count);
      // A child at the border, or above it, that goes its own way.
      const int64_t child = 1 + round % 3;
      if (pair.receiver->HasSequence(child)) {
        ASSERT_TRUE(pair.receiver->RemoveSequence(child).ok());
      }
      ASSERT_TRUE(pair.receiver->ForkSequence(0, child, pick(0, length)).ok());
      ASSERT_TRUE(pair.Mark(map, length).ok());
      for (int64_t sent = 0; sent < count;) {
        const int64_t step = pick(1, count - sent);
        if (pick(0, 3) == 0) {  // something else first, which is popped or aborted
          ExtendSequence(*pair.sender, 0, NumberedTokens(2000, step));
          ASSERT_TRUE(pair.sender->PopN(0, step).ok());
        }
        ExtendSequence(*pair.sender, 0, NumberedTokens(length + sent, step));
        sent += step;
        ExtendSequence(*pair.receiver, child, NumberedTokens(3000 + sent, pick(1, 3)));
        ExpectSound(*pair.receiver);
        ExpectSound(*pair.sender);
      }
      const int64_t kept = pick(0, 2) == 0 ? pick(0, count) : count;
      ASSERT_TRUE(pair.receiver->transfer()->DisaggCommitRecv(map.epoch, kept).ok());
      ExpectSound(*pair.receiver);
      if (kept < count) {
        ASSERT_TRUE(pair.sender->PopN(0, count - kept).ok());
      }
      if (kept > 0) ExtendSequence(*pair.alone, 0, NumberedTokens(length, kept));
      length += kept;
      if (pick(0, 1) == 0) {  // the receiver decodes, and the sender learns of it
        ExpectSameOutputs(ExtendSequence(*pair.receiver, 0, NumberedTokens(length, 2)),
                          ExtendSequence(*pair.alone, 0, NumberedTokens(length, 2)));
        ExtendSequence(*pair.sender, 0, NumberedTokens(length, 2));
        length += 2;
      }
      if (length > 0) ExpectSameKV(*pair.receiver, *pair.alone, 0);
    }
    pair.ExpectSameFuture(length);
  }
}

// Parts arrive from another thread while the receiver runs forwards of other sequences.
TEST(KVChannel, PartsArriveDuringForwardsOfOtherSequences) {
  Pair pair(MakeOptions(16, Mixed()));
  ExtendSequence(*pair.receiver, 0, NumberedTokens(0, 21));
  ExtendSequence(*pair.sender, 0, NumberedTokens(0, 21));
  ASSERT_TRUE(pair.receiver->ForkSequence(0, 1).ok());
  ASSERT_TRUE(pair.alone->AddSequence(1).ok());
  ExtendSequence(*pair.alone, 1, NumberedTokens(0, 21));
  const ReceiveMap map = pair.Reserve(60);
  ASSERT_TRUE(pair.Mark(map, 21).ok());
  std::atomic<bool> done = false;
  std::thread sending([&] {
    for (int64_t sent = 0; sent < 60; sent += 4)
      ExtendSequence(*pair.sender, 0, NumberedTokens(21 + sent, 4));
    done = true;
  });
  int64_t step = 0;
  for (; step < 200 && (step < 10 || !done); ++step)
    ExpectSameOutputs(ExtendSequence(*pair.receiver, 1, NumberedTokens(100 + step, 1)),
                      ExtendSequence(*pair.alone, 1, NumberedTokens(100 + step, 1)));
  const Status received =
      pair.receiver->transfer()->WaitReceived(map.epoch, 60, *MachineTime(), INT64_MAX);
  EXPECT_TRUE(received.ok()) << received.ToString();
  sending.join();
  pair.Commit(map);
  pair.ExpectSameFuture(81);
}

}  // namespace
}  // namespace quire
