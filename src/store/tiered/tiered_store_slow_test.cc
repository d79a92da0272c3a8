// The store with slow tiers behind it, which are fakes that do what the test says.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/random.h"
#include "base/testing/fake_clock.h"
#include "base/testing/threads_of_process.h"
#include "store/testing/fake_tier.h"
#include "store/testing/test_chain.h"
#include "store/tiered/tiered_store.h"

namespace quire {
namespace {

constexpr int64_t kMs = 1'000'000;

class SlowStore : public testing::Test {
 protected:
  struct Tiers {
    bool ram = true;
    bool disk = true;
    bool redis = false;
  };
  void Open(const Tiers& tiers, ChunkStoreOptions options = {}) {
    if (tiers.ram && options.ram.bytes_max == 0) options.ram.bytes_max = 64 * TestChunkBytes();
    options.clock = clock_;
    SlowTiers slow;
    if (tiers.disk) slow[1] = MakeTier(TierKind::kDisk, &disk_);
    if (tiers.redis) slow[2] = MakeTier(TierKind::kRedis, &redis_);
    Result<std::unique_ptr<ChunkStore>> store =
        TieredStore::Create(std::move(options), std::move(slow));
    ASSERT_TRUE(store.ok()) << store.status().ToString();
    store_ = *std::move(store);
    ASSERT_TRUE(store_->AddPassport(TestPassport()).ok());
  }
  void TearDown() override {
    // What a test left held goes on, so that the store can close.
    for (FakeTier* tier : {disk_, redis_})
      if (tier != nullptr && store_ != nullptr) tier->Change([](auto& script) { script = {}; });
  }

  // As if an earlier process had left them there.
  void Fill(FakeTier* tier, const std::vector<int32_t>& tokens, int64_t first = 0,
            int64_t count = 1000) {
    const std::vector<ChunkId> ids = Ids(tokens);
    for (int64_t i = first; i < std::min(first + count, static_cast<int64_t>(ids.size())); ++i) {
      ChunkBuffer buffer = TestChunk(keys_, tokens, i);
      Result<ChunkHeader> header = DecodeChunkHeader(
          std::as_const(buffer).bytes().first(
              static_cast<size_t>(*ChunkHeaderBytes(std::as_const(buffer).bytes(), ChunkLimits{}))),
          ChunkLimits{});
      const StoredChunk chunk(*header, std::move(buffer));
      const TierWrite write{.id = ids[static_cast<size_t>(i)], .chunk = &chunk};
      ASSERT_TRUE(tier->Write(std::span(&write, 1), kNever)[0].ok());
    }
  }
  std::vector<ChunkId> Ids(const std::vector<int32_t>& tokens) const {
    std::vector<ChunkId> ids;
    const std::vector<ChunkKey> chain = keys_.Chain(tokens, kTestBlock).value();
    for (const ChunkKey& key : chain) ids.push_back({keys_.fingerprint(), keys_.root(), key});
    return ids;
  }
  std::vector<ChunkKey> Chain(const std::vector<int32_t>& tokens) const {
    return keys_.Chain(tokens, kTestBlock).value();
  }
  FetchRequest Request(const std::vector<int32_t>& tokens, int64_t timeout_ns = 0) const {
    return {.keys = &keys_,
            .tokens = tokens,
            .chunk_tokens = kTestBlock,
            .deadline_ns = timeout_ns == 0 ? 0 : clock_->SteadyNs() + timeout_ns};
  }
  std::shared_ptr<ChunkFetch> Start(const FetchRequest& request) {
    auto fetch = store_->Fetch(request);
    EXPECT_TRUE(fetch.ok()) << fetch.status().ToString();
    return *fetch;
  }
  // Done, with all chunks that are ready being what was put.
  std::shared_ptr<ChunkFetch> Fetch(const std::vector<int32_t>& tokens) {
    auto fetch = Start(Request(tokens));
    EXPECT_TRUE(fetch->Wait(kNever));
    ExpectExact(*fetch, tokens);
    return fetch;
  }
  void ExpectExact(const ChunkFetch& fetch, const std::vector<int32_t>& tokens) {
    const std::vector<ChunkKey> chain = Chain(tokens);
    for (int64_t i = 0; i < fetch.ready(); ++i)
      EXPECT_TRUE(IsTestChunk(*fetch.chunk(i), chain[static_cast<size_t>(i)]));
  }
  std::shared_ptr<ChunkPut> Put(const std::vector<int32_t>& tokens, int64_t i = 0) {
    auto put = store_->Put(keys_, TestChunk(keys_, tokens, i), {});
    EXPECT_TRUE(put.ok()) << put.status().ToString();
    return *put;
  }
  TierStatistics Statistics(TierKind tier) const {
    return store_->Statistics().tiers[static_cast<size_t>(tier)];
  }

  const std::shared_ptr<FakeClock> clock_ = std::make_shared<FakeClock>();
  const KeySpace keys_ = TestKeys();
  FakeTier* disk_ = nullptr;
  FakeTier* redis_ = nullptr;
  std::unique_ptr<ChunkStore> store_;

 private:
  std::unique_ptr<ChunkTier> MakeTier(TierKind kind, FakeTier** place) {
    auto tier = std::make_unique<FakeTier>(kind, clock_);
    *place = tier.get();
    return tier;
  }
};

// ---------------------------------------------------------------------- bringing back

// Chains that have nothing in common, that begin alike, of which one is there in part and one not
// at all: the tier is asked once and reads once.
TEST_F(SlowStore, ChainsThatAreFetchedTogetherAreReadTogether) {
  for (const bool knows : {true, false}) {
    SCOPED_TRACE(knows ? "the tier knows what it has" : "the tier has to be asked");
    Open({.disk = false, .redis = true});
    redis_->Change([&](auto& script) { script.knows = knows; });
    std::vector<std::vector<int32_t>> chains;
    for (const int32_t first : {100, 200, 300, 400, 500}) chains.push_back(TokensFrom(first, 12));
    chains.push_back(chains[0]);
    chains.back()[11] = 7;  // another last chunk
    const std::vector<int64_t> held = {3, 3, 2, 0, 3, 3};
    for (size_t i = 0; i < chains.size(); ++i) Fill(redis_, chains[i], 0, held[i]);
    std::vector<FetchRequest> requests;
    for (const auto& tokens : chains) requests.push_back(Request(tokens));
    const auto fetches = store_->FetchAll(requests);
    ASSERT_TRUE(fetches.ok()) << fetches.status().ToString();
    ASSERT_EQ(fetches->size(), chains.size());
    for (size_t i = 0; i < chains.size(); ++i) {
      ChunkFetch& fetch = *(*fetches)[i];
      EXPECT_TRUE(fetch.Wait(kNever));
      EXPECT_EQ(fetch.ready(), held[i]);
      EXPECT_EQ(fetch.miss(), held[i] == 3 ? MissReason::kNone : MissReason::kNotStored);
      ExpectExact(fetch, chains[i]);
    }
    const FakeTier::Calls calls = redis_->calls();
    EXPECT_EQ(calls.asks, knows ? 0 : 2) << "and once more for the chunk that one has not";
    EXPECT_EQ(calls.reads, 1);
    for (const auto& [key, count] : calls.chunk_reads) EXPECT_EQ(count, 1);
    EXPECT_EQ(store_->Statistics().fetches, 6);
    store_ = nullptr;
  }
}

TEST_F(SlowStore, LayersOfChainsThatAreFetchedTogetherComeTogether) {
  Open({});
  std::vector<std::vector<int32_t>> chains;
  for (const int32_t first : {100, 200, 300, 400, 500}) chains.push_back(TokensFrom(first, 8));
  for (const auto& tokens : chains) Fill(disk_, tokens);
  disk_->Change([](auto& script) { script.layers = 1; });
  std::vector<FetchRequest> requests;
  for (const auto& tokens : chains) requests.push_back(Request(tokens));
  const auto fetches = store_->FetchAll(requests).value();
  for (const auto& fetch : fetches) {
    EXPECT_TRUE(fetch->WaitLayer(0, kNever).ok());
    EXPECT_EQ(fetch->ready(), 0);
  }
  disk_->Change([](auto& script) { script = {}; });
  for (size_t i = 0; i < chains.size(); ++i) {
    EXPECT_TRUE(fetches[i]->Wait(kNever));
    EXPECT_EQ(fetches[i]->ready(), 2);
    ExpectExact(*fetches[i], chains[i]);
  }
  EXPECT_EQ(disk_->calls().reads, 1);
}

TEST_F(SlowStore, ChainsAreFetchedTogetherOrNotAtAll) {
  Open({});
  const auto tokens = TokensFrom(1, 8);
  Fill(disk_, tokens);
  std::vector<FetchRequest> requests = {Request(tokens), Request(tokens)};
  requests[1].chunk_tokens = 0;
  EXPECT_EQ(store_->FetchAll(requests).status().code(), StatusCode::kBadArgument);
  EXPECT_EQ(store_->Statistics().fetches, 0);
  EXPECT_TRUE(store_->FetchAll({})->empty());
  store_->Close();
  requests[1] = requests[0];
  EXPECT_EQ(store_->FetchAll(requests).status().code(), StatusCode::kClosed);
  EXPECT_EQ(disk_->calls().reads, 0);
}

// Keys that the caller has are not hashed again: those of other tokens bring nothing.
TEST_F(SlowStore, GivenKeysAreTakenForThoseOfTheTokens) {
  Open({});
  const auto tokens = TokensFrom(1, 8);
  const auto other = TokensFrom(100, 8);
  Fill(disk_, tokens);
  Fill(disk_, other);
  FetchRequest request = Request(tokens);
  const std::vector<ChunkKey> chain = Chain(tokens), wrong = Chain(other);
  request.chain = chain;
  const auto fetch = Start(request);
  EXPECT_TRUE(fetch->Wait(kNever));
  EXPECT_EQ(fetch->ready(), 2);
  ExpectExact(*fetch, tokens);
  request.chain = wrong;
  const auto nothing = Start(request);
  EXPECT_TRUE(nothing->Wait(kNever));
  EXPECT_EQ(nothing->ready(), 0) << "the chunks are of other tokens";
  for (const size_t count : {1, 3}) {
    std::vector<ChunkKey> bad(count, chain.front());
    request.chain = bad;
    const Status status = store_->Fetch(request).status();
    EXPECT_EQ(status.code(), StatusCode::kBadArgument);
    EXPECT_NE(status.message().find("keys, but there are 2 chunks"), std::string_view::npos);
  }
}

TEST_F(SlowStore, TwoPrefetchesReadEachChunkOnceAndThenItIsInRam) {  // example 29
  Open({});
  const auto tokens = TokensFrom(1, 12);
  Fill(disk_, tokens);
  EXPECT_EQ(store_->KnownPrefix(keys_, Chain(tokens)), 3);
  disk_->Change([](auto& script) { script.layers = 1; });
  const auto first = *store_->Prefetch(Request(tokens));
  disk_->AwaitHeld(1);
  const auto second = *store_->Prefetch(Request(tokens));
  EXPECT_FALSE(first->done());
  EXPECT_EQ(second->found(), 3);
  disk_->Change([](auto& script) { script.layers = kTestLayers; });
  for (const auto& fetch : {first, second}) {
    EXPECT_TRUE(fetch->Wait(kNever));
    EXPECT_EQ(fetch->ready(), 3);
    EXPECT_EQ(fetch->tier(2), TierKind::kDisk);
    ExpectExact(*fetch, tokens);
  }
  for (const auto& [key, reads] : disk_->calls().chunk_reads) EXPECT_EQ(reads, 1);
  EXPECT_EQ(disk_->calls().chunk_reads.size(), 3u);
  const auto hit = Start(Request(tokens));
  EXPECT_TRUE(hit->done());
  EXPECT_EQ(hit->tier(0), TierKind::kRam);
  EXPECT_EQ(disk_->pins(), 0);
}

TEST_F(SlowStore, LayersComeInOrderWhileTheRestIsOnItsWay) {  // example 33
  Open({});
  const auto tokens = TokensFrom(1, 8);
  Fill(disk_, tokens);
  disk_->Change([](auto& script) { script.layers = 1; });
  const auto fetch = Start(Request(tokens));
  ASSERT_TRUE(fetch->WaitLayer(0, kNever).ok());
  EXPECT_EQ(fetch->WaitLayer(1, clock_->SteadyNs()).code(), StatusCode::kTimeout);
  EXPECT_EQ(fetch->ready(), 0);
  EXPECT_EQ(fetch->found(), 2);
  for (int64_t layer = 0; layer < kTestLayers; ++layer) {
    disk_->Change([&](auto& script) { script.layers = layer + 1; });
    ASSERT_TRUE(fetch->WaitLayer(layer, kNever).ok());
    for (int64_t i = 0; i < 2; ++i)
      EXPECT_TRUE(IsTestChunk(*fetch->chunk(i), Chain(tokens)[static_cast<size_t>(i)], layer + 1));
  }
  EXPECT_TRUE(fetch->Wait(kNever));
  EXPECT_EQ(fetch->ready(), 2);
}

TEST_F(SlowStore, AChunkThatIsDamagedHalfwayEndsItsLayers) {
  Open({});
  const auto tokens = TokensFrom(1, 12);
  Fill(disk_, tokens);
  disk_->Change([&](auto& script) { script.damaged = {Chain(tokens)[1]}; });
  const auto fetch = Start(Request(tokens));
  EXPECT_TRUE(fetch->Wait(kNever));
  EXPECT_EQ(fetch->ready(), 1);
  EXPECT_EQ(fetch->miss(), MissReason::kCorrupt);
  EXPECT_TRUE(fetch->WaitLayer(0, kNever).ok() ||
              fetch->WaitLayer(0, kNever).code() == StatusCode::kCorrupt);
  EXPECT_EQ(fetch->WaitLayer(3, kNever).code(), StatusCode::kCorrupt);
  ExpectExact(*fetch, tokens);
}

TEST_F(SlowStore, WhatIsBehindADamagedChunkIsNotReadOn) {
  Open({});
  const auto tokens = TokensFrom(1, 16);
  Fill(disk_, tokens);
  disk_->Change([&](auto& script) {
    script.damaged = {Chain(tokens)[1]};  // which shows in its second layer
    script.layers = 2;
  });
  const auto fetch = Start(Request(tokens));
  disk_->AwaitHeld(1);
  EXPECT_EQ(disk_->calls().unwanted, 2);
  disk_->Change([](auto& script) { script.layers = kTestLayers; });
  EXPECT_TRUE(fetch->Wait(kNever));
  EXPECT_EQ(fetch->ready(), 1);
  EXPECT_EQ(fetch->miss(), MissReason::kCorrupt);
  ExpectExact(*fetch, tokens);
}

TEST_F(SlowStore, OneChainMayComeFromAllTiers) {
  Open({.redis = true});
  const auto tokens = TokensFrom(1, 16);
  redis_->Change([](auto& script) { script.knows = false; });
  Fill(redis_, tokens);
  Fill(disk_, tokens, 1, 1);
  Fill(disk_, tokens, 3, 1);
  ASSERT_TRUE(Put(tokens, 0)->Wait(kNever));
  const auto fetch = Fetch(tokens);
  ASSERT_EQ(fetch->ready(), 4);
  EXPECT_EQ(fetch->tier(0), TierKind::kRam);
  EXPECT_EQ(fetch->tier(1), TierKind::kDisk);
  EXPECT_EQ(fetch->tier(2), TierKind::kRedis);
  EXPECT_EQ(fetch->miss(), MissReason::kNone);
  ASSERT_TRUE(store_->Flush(kNever).ok());
  EXPECT_EQ(disk_->Knows(Ids(tokens)[2]), 1);  // promoted to RAM and to disk
  EXPECT_EQ(Fetch(tokens)->tier(2), TierKind::kRam);
}

TEST_F(SlowStore, WithoutPromotionChunksStayWhereTheyAre) {
  Open({.redis = true}, {.promote = false});
  const auto tokens = TokensFrom(1, 4);
  Fill(redis_, tokens);
  EXPECT_EQ(Fetch(tokens)->tier(0), TierKind::kRedis);
  EXPECT_EQ(Fetch(tokens)->tier(0), TierKind::kRedis);
  EXPECT_EQ(disk_->Knows(Ids(tokens)[0]), 0);
  EXPECT_EQ(Statistics(TierKind::kRam).chunks, 0);
  const auto prefetch = *store_->Prefetch(Request(tokens));
  EXPECT_TRUE(prefetch->Wait(kNever));
  EXPECT_EQ(Statistics(TierKind::kRam).chunks, 1);
}

TEST_F(SlowStore, WhatTheDiskHasDamagedRedisMayHaveSound) {
  Open({.redis = true});
  const auto tokens = TokensFrom(1, 8);
  Fill(disk_, tokens);
  Fill(redis_, tokens);
  disk_->Change([](auto& script) { script.read = Status(StatusCode::kCorrupt, "fake: damaged"); });
  const auto fetch = Fetch(tokens);
  EXPECT_EQ(fetch->ready(), 2);
  EXPECT_EQ(fetch->tier(0), TierKind::kRedis);
}

TEST_F(SlowStore, AGapOnDiskEndsThePrefix) {
  Open({});
  const auto tokens = TokensFrom(1, 12);
  Fill(disk_, tokens);
  disk_->Drop(Chain(tokens)[1]);
  EXPECT_EQ(Fetch(tokens)->ready(), 1);
}

TEST_F(SlowStore, ExpiryHoldsInEveryTier) {  // example 28
  Open({.redis = true});
  const auto tokens = TokensFrom(1, 4);
  ASSERT_TRUE(Put(tokens)->Wait(kNever));
  ASSERT_TRUE(store_->Flush(kNever).ok());
  ASSERT_TRUE(store_->SetTtl(Chain(tokens), 50).ok());
  clock_->Advance(10 * kMs);
  EXPECT_EQ(Fetch(tokens)->ready(), 1);
  clock_->Advance(90 * kMs);
  EXPECT_EQ(Fetch(tokens)->ready(), 0);
  // The sweeper frees the bytes.
  while (Statistics(TierKind::kRam).bytes > 0) {
    clock_->Advance(1000 * kMs);
    std::this_thread::yield();
  }
}

TEST_F(SlowStore, HigherPrioritiesAreReadFirst) {
  Open({.ram = false});
  const std::vector<std::vector<int32_t>> chains = {TokensFrom(100, 4), TokensFrom(200, 4),
                                                    TokensFrom(300, 4), TokensFrom(400, 4)};
  for (const auto& tokens : chains) Fill(disk_, tokens);
  disk_->Change([](auto& script) { script.layers = 0; });
  std::vector<std::shared_ptr<ChunkFetch>> fetches;
  for (int i = 0; i < 2; ++i) fetches.push_back(Start(Request(chains[static_cast<size_t>(i)])));
  disk_->AwaitHeld(2);  // both threads
  for (int i = 2; i < 4; ++i) {
    FetchRequest request = Request(chains[static_cast<size_t>(i)], 1000 * kMs);
    request.priority = i;
    fetches.push_back(Start(request));
  }
  fetches[0]->Cancel();  // one thread is free once time passes; it takes the last one
  clock_->Advance(1);
  while (disk_->calls().chunk_reads.size() < 3) std::this_thread::yield();
  EXPECT_EQ(disk_->calls().chunk_reads.count(Chain(chains[3])[0]), 1u);
  EXPECT_EQ(disk_->calls().chunk_reads.count(Chain(chains[2])[0]), 0u);
}

// ---------------------------------------------------------------------- deadlines and cancelling

TEST_F(SlowStore, ATierThatHangsCostsTheDeadline) {
  Open({.redis = true});
  const auto tokens = TokensFrom(1, 8);
  Fill(redis_, tokens);
  redis_->Change([](auto& script) {
    script.knows = false;
    script.hold_prefix = true;
  });
  const auto fetch = Start(Request(tokens, 50 * kMs));
  redis_->AwaitHeld(1);
  EXPECT_FALSE(fetch->done());
  EXPECT_FALSE(fetch->Wait(clock_->SteadyNs()));
  clock_->Advance(50 * kMs);
  EXPECT_TRUE(fetch->done());
  EXPECT_EQ(fetch->ready(), 0);
  EXPECT_EQ(fetch->miss(), MissReason::kTimeout);
  EXPECT_EQ(fetch->WaitLayer(0, kNever).code(), StatusCode::kOk);  // nothing was found
}

TEST_F(SlowStore, QueuedWorkHasTheDeadlineToo) {
  Open({.ram = false});
  std::vector<std::shared_ptr<ChunkFetch>> fetches;
  disk_->Change([](auto& script) { script.layers = 0; });
  for (int i = 0; i < 8; ++i) {
    const auto tokens = TokensFrom(100 * (i + 1), 4);
    disk_->Change([](auto& script) { script.hold_writes = false; });
    Fill(disk_, tokens);
    fetches.push_back(Start(Request(tokens, 50 * kMs)));
  }
  disk_->AwaitHeld(2);
  clock_->Advance(50 * kMs);
  for (const auto& fetch : fetches) {
    EXPECT_TRUE(fetch->done());
    EXPECT_EQ(fetch->miss(), MissReason::kTimeout);
  }
}

TEST_F(SlowStore, WhoWaitsLongerIsNotEndedByAnothersDeadline) {
  Open({});
  const auto tokens = TokensFrom(1, 4);
  Fill(disk_, tokens);
  disk_->Change([](auto& script) { script.layers = 0; });
  const auto hurried = Start(Request(tokens, 10 * kMs));
  disk_->AwaitHeld(1);
  const auto patient = Start(Request(tokens, 1000 * kMs));
  clock_->Advance(10 * kMs);
  EXPECT_EQ(hurried->miss(), MissReason::kTimeout);
  EXPECT_FALSE(patient->done());
  disk_->Change([](auto& script) { script.layers = kTestLayers; });
  EXPECT_TRUE(patient->Wait(kNever));
  EXPECT_EQ(patient->ready(), 1);
}

TEST_F(SlowStore, CancelStormsLeaveNothingBehind) {
  Open({});
  constexpr int kFetches = 64;
  for (int i = 0; i < 8; ++i) Fill(disk_, TokensFrom(100 * i + 1, 12));
  disk_->Change([](auto& script) { script.layers = 1; });
  std::vector<std::shared_ptr<ChunkFetch>> fetches;
  for (int i = 0; i < kFetches; ++i)
    fetches.push_back(Start(Request(TokensFrom(100 * (i % 8) + 1, 12))));
  for (const auto& fetch : fetches) fetch->Cancel();
  for (const auto& fetch : fetches) {
    EXPECT_TRUE(fetch->done());
    EXPECT_EQ(fetch->miss(), MissReason::kCancelled);
    EXPECT_EQ(fetch->ready(), 0);
  }
  fetches.clear();
  disk_->Change([](auto& script) { script = {}; });
  EXPECT_EQ(Fetch(TokensFrom(1, 12))->ready(), 3);
  store_->Close();
  EXPECT_EQ(disk_->pins(), 0);
  EXPECT_EQ(store_->Statistics().pins, 0);
}

TEST_F(SlowStore, CloseEndsAllFetches) {
  Open({.redis = true});
  const auto tokens = TokensFrom(1, 8);
  redis_->Change([](auto& script) {
    script.knows = false;
    script.hold_prefix = true;
  });
  const auto fetch = Start(Request(tokens));
  redis_->AwaitHeld(1);
  std::thread closer([&] { store_->Close(); });
  EXPECT_TRUE(fetch->Wait(kNever));
  EXPECT_EQ(fetch->miss(), MissReason::kCancelled);
  redis_->Change([](auto& script) { script.hold_prefix = false; });
  closer.join();
  EXPECT_EQ(store_->Fetch(Request(tokens)).status().code(), StatusCode::kClosed);
}

TEST_F(SlowStore, AFetchOutlivesItsStore) {
  Open({});
  const auto tokens = TokensFrom(1, 8);
  Fill(disk_, tokens);
  const auto fetch = Fetch(tokens);
  store_.reset();
  ExpectExact(*fetch, tokens);
  EXPECT_EQ(fetch->ready(), 2);
}

// ---------------------------------------------------------------------- tiers that fail and lie

TEST_F(SlowStore, ALyingTierServesNothingAndLeavesNothing) {
  for (const FakeTier::Lie lie : {FakeTier::Lie::kNoEnd, FakeTier::Lie::kNoSections,
                                  FakeTier::Lie::kOtherHeader, FakeTier::Lie::kCancelled}) {
    Open({});
    const auto tokens = TokensFrom(1, 12);
    Fill(disk_, tokens);
    disk_->Change([&](auto& script) { script.lie = lie; });
    const auto fetch = Fetch(tokens);
    EXPECT_EQ(fetch->ready(), 0) << static_cast<int>(lie);
    EXPECT_NE(fetch->miss(), MissReason::kNone);
    disk_->Change([](auto& script) { script.lie = FakeTier::Lie::kNone; });
    const auto others = TokensFrom(100, 12);
    Fill(disk_, others);
    EXPECT_EQ(Fetch(others)->ready(), 3) << static_cast<int>(lie);
    store_->Close();
    EXPECT_EQ(disk_->pins(), 0);
    store_.reset();
    disk_ = nullptr;
  }
}

TEST_F(SlowStore, ATierThatPromisesTooMuchIsAMiss) {
  Open({.disk = false, .redis = true});
  const auto tokens = TokensFrom(1, 12);
  Fill(redis_, tokens, 0, 2);
  redis_->Change([](auto& script) {
    script.knows = false;
    script.lie = FakeTier::Lie::kPrefix;
  });
  const auto fetch = Fetch(tokens);
  EXPECT_EQ(fetch->found(), 3);
  EXPECT_EQ(fetch->ready(), 2);
  EXPECT_EQ(fetch->miss(), MissReason::kNotStored);
}

TEST_F(SlowStore, RedisThatIsDownCostsNothingAndComesBack) {  // example 30
  Open({.ram = false, .disk = false, .redis = true});
  const auto tokens = TokensFrom(1, 4);
  Fill(redis_, tokens);
  const auto down = [](auto& script) {
    script.knows = false;
    script.prefix = script.read = script.write = Status(StatusCode::kUnavailable, "fake: refused");
  };
  redis_->Change(down);
  const auto fetch = Start(Request(tokens, 50 * kMs));
  EXPECT_TRUE(fetch->Wait(kNever));
  EXPECT_EQ(fetch->ready(), 0);
  EXPECT_EQ(fetch->miss(), MissReason::kUnavailable);
  for (int i = 0; i < 1000; ++i) {
    const auto put = Put(TokensFrom(100 + 10 * i, 4));
    EXPECT_TRUE(put->Wait(kNever));
    EXPECT_EQ(put->status().code(), StatusCode::kUnavailable);
  }
  EXPECT_EQ(Statistics(TierKind::kRedis).dropped_writes, 1000);
  EXPECT_EQ(Statistics(TierKind::kRedis).queue_bytes, 0);
  EXPECT_FALSE(Statistics(TierKind::kRedis).available);
  EXPECT_LE(redis_->calls().writes, 4);  // it was left alone
  redis_->Change([](auto& script) { script = {.knows = false}; });
  EXPECT_EQ(Fetch(tokens)->ready(), 0);
  clock_->Advance(2000 * kMs);
  EXPECT_EQ(Fetch(tokens)->ready(), 1);
  EXPECT_TRUE(Statistics(TierKind::kRedis).available);
}

TEST_F(SlowStore, ADiskThatTimesOutIsUnavailable) {
  Open({});
  const auto tokens = TokensFrom(1, 4);
  Fill(disk_, tokens);
  disk_->Change([](auto& script) {
    script.read = Status(StatusCode::kTimeout, "fake: slow");
    script.read_ns = 30 * kMs;
  });
  EXPECT_EQ(Fetch(tokens)->ready(), 0);  // asked again, as nobody's deadline had passed
  const int64_t reads = disk_->calls().reads;
  EXPECT_EQ(reads, 3);
  EXPECT_EQ(Fetch(tokens)->miss(), MissReason::kUnavailable);
  EXPECT_EQ(disk_->calls().reads, reads);
  EXPECT_EQ(Statistics(TierKind::kDisk).timeouts, 3);
  // One probe each time that its back-off is over, and twice as long until the next.
  EXPECT_FALSE(Statistics(TierKind::kDisk).available);
  clock_->Advance(200 * kMs);
  EXPECT_EQ(Fetch(tokens)->ready(), 0);
  EXPECT_EQ(disk_->calls().reads, reads + 1);
  disk_->Change([](auto& script) { script = {}; });
  clock_->Advance(199 * kMs);
  EXPECT_EQ(Fetch(tokens)->ready(), 0);
  EXPECT_EQ(disk_->calls().reads, reads + 1);
  clock_->Advance(400 * kMs);
  EXPECT_EQ(Fetch(tokens)->ready(), 1);
  EXPECT_TRUE(Statistics(TierKind::kDisk).available);
}

TEST_F(SlowStore, ATierThatKeepsCallsAwayItselfIsNotAskedAndNotBlamed) {
  Open({.ram = false, .disk = false, .redis = true});
  const auto tokens = TokensFrom(1, 4);
  Fill(redis_, tokens);
  redis_->Change([](auto& script) { script.left_alone = true; });
  for (int i = 0; i < 10; ++i) EXPECT_EQ(Fetch(tokens)->miss(), MissReason::kUnavailable);
  EXPECT_EQ(redis_->calls().reads, 0);
  EXPECT_TRUE(Statistics(TierKind::kRedis).available);
  redis_->Change([](auto& script) { script.left_alone = false; });
  EXPECT_EQ(Fetch(tokens)->ready(), 1);  // at once: the store's own breaker never opened
}

// ---------------------------------------------------------------------- is it worth it

TEST_F(SlowStore, ALoadThatIsSlowerThanComputingIsNotBegun) {
  Open({.ram = false});
  const auto tokens = TokensFrom(1, 16);
  Fill(disk_, tokens);
  disk_->Change([](auto& script) { script.read_ns = 100 * kMs; });
  FetchRequest request = Request(tokens);
  request.compute_seconds_per_token = 1e-3;  // 16 ms in all
  const auto run = [&] {
    const auto fetch = Start(request);
    EXPECT_TRUE(fetch->Wait(kNever));
    return std::pair(fetch->ready(), fetch->miss());
  };
  EXPECT_EQ(run().first, 4);  // nobody knew
  EXPECT_EQ(run(), std::pair(int64_t{0}, MissReason::kNotWorth));
  TierStatistics statistics = Statistics(TierKind::kDisk);
  EXPECT_EQ(statistics.loads, 1);
  EXPECT_EQ(statistics.not_worth, 1);
  EXPECT_EQ(store_->Statistics().misses[static_cast<size_t>(MissReason::kNotWorth)], 1);
  request.compute_seconds_per_token = 1;
  EXPECT_EQ(run().first, 4);
  statistics = Statistics(TierKind::kDisk);
  EXPECT_NEAR(statistics.measured_seconds, 0.1, 1e-9);
  EXPECT_NEAR(statistics.predicted_seconds, 0.1, 1e-9);
  // It got faster; a probe finds out.
  disk_->Change([](auto& script) { script.read_ns = kMs; });
  request.compute_seconds_per_token = 1e-3;
  int refused = 0;
  while (run().first == 0) ++refused;
  EXPECT_EQ(refused, 32);
  request.compute_seconds_per_token = 0;
  EXPECT_EQ(run().first, 4);
}

TEST_F(SlowStore, FetchesHaveALimitOfBytes) {
  Open({.ram = false}, {.fetch_bytes_max = 2 * TestChunkBytes()});
  const auto tokens = TokensFrom(1, 16);
  Fill(disk_, tokens);
  auto fetch = Fetch(tokens);
  EXPECT_EQ(fetch->ready(), 2);
  EXPECT_EQ(fetch->miss(), MissReason::kNoRoom);
  EXPECT_EQ(Fetch(tokens)->ready(), 0);
  fetch.reset();
  // The thread that read them lets go of them, too.
  while (Fetch(tokens)->ready() < 2) std::this_thread::yield();
}

// ---------------------------------------------------------------------- putting

TEST_F(SlowStore, TwoPutsOfOneKeyAreOneWriteToEachTier) {  // example 34
  Open({.redis = true}, {.redis = {.replicas = 1}});
  const auto tokens = TokensFrom(1, 4);
  disk_->Change([](auto& script) { script.hold_writes = true; });
  std::vector<std::shared_ptr<ChunkPut>> puts(2);
  std::vector<std::thread> threads;
  for (auto& put : puts) threads.emplace_back([&] { put = Put(tokens); });
  for (std::thread& thread : threads) thread.join();
  disk_->Change([](auto& script) { script.hold_writes = false; });
  for (const auto& put : puts) {
    EXPECT_TRUE(put->Wait(kNever));
    EXPECT_TRUE(put->status().ok());
  }
  EXPECT_EQ(disk_->calls().chunk_writes[Chain(tokens)[0]], 1);
  EXPECT_EQ(redis_->calls().chunk_writes[Chain(tokens)[0]], 1);
  EXPECT_EQ(Statistics(TierKind::kRam).chunks, 1);
  EXPECT_EQ(store_->Wanted(keys_, Chain(tokens)), std::vector<bool>{false});
}

TEST_F(SlowStore, AcknowledgedMeansWhatTheDurabilitySays) {
  for (const Durability durability :
       {Durability::kNone, Durability::kAsync, Durability::kOs, Durability::kSync}) {
    Open({}, {.disk = {.durability = durability}});
    disk_->Change([](auto& script) { script.hold_writes = true; });
    const auto put = Put(TokensFrom(1, 4));
    const bool awaited = durability == Durability::kOs || durability == Durability::kSync;
    EXPECT_EQ(put->done(), !awaited);
    EXPECT_EQ(store_->Flush(clock_->SteadyNs()).code(), StatusCode::kTimeout);
    disk_->Change([](auto& script) { script.hold_writes = false; });
    EXPECT_TRUE(put->Wait(kNever));
    EXPECT_TRUE(put->status().ok());
    EXPECT_TRUE(store_->Flush(kNever).ok());
    EXPECT_EQ(disk_->Knows(Ids(TokensFrom(1, 4))[0]), 1);
    store_.reset();
    disk_ = nullptr;
  }
}

TEST_F(SlowStore, AFailedWriteIsToldAndCounted) {
  Open({});
  disk_->Change([](auto& script) { script.write = Status(StatusCode::kIoError, "fake: EIO"); });
  const auto put = Put(TokensFrom(1, 4));
  EXPECT_TRUE(put->Wait(kNever));
  EXPECT_EQ(put->status().code(), StatusCode::kIoError);
  EXPECT_EQ(Statistics(TierKind::kDisk).dropped_writes, 1);
  EXPECT_EQ(Fetch(TokensFrom(1, 4))->ready(), 1);  // RAM has it
  disk_->Change([](auto& script) {
    script.write = {};
    script.lie = FakeTier::Lie::kShortWrite;
  });
  const auto lied = Put(TokensFrom(100, 4));
  EXPECT_TRUE(lied->Wait(kNever));
  EXPECT_EQ(lied->status().code(), StatusCode::kInternal);
}

TEST_F(SlowStore, AFullQueueDropsAndDelaysNobodyElse) {
  const int64_t queue_bytes = 3 * TestChunkBytes();
  Open({.redis = true}, {.queue_bytes_max = queue_bytes});
  disk_->Change([](auto& script) { script.hold_writes = true; });
  int64_t full = 0;
  for (int i = 0; i < 20; ++i) {
    const auto put = Put(TokensFrom(100 * (i + 1), 4));
    full += put->done() && put->status().code() == StatusCode::kFull;
    EXPECT_LE(Statistics(TierKind::kDisk).queue_bytes, queue_bytes);
  }
  EXPECT_EQ(full, 17);
  EXPECT_EQ(Statistics(TierKind::kDisk).dropped_writes, 17);
  EXPECT_EQ(Statistics(TierKind::kRam).chunks, 20);
  while (Statistics(TierKind::kRedis).writes + Statistics(TierKind::kRedis).dropped_writes < 20)
    std::this_thread::yield();  // Redis goes on
  EXPECT_EQ(Fetch(TokensFrom(100, 4))->ready(), 1);
}

TEST_F(SlowStore, WriteBackWritesWhatRamGivesUpAndAllAtFlush) {
  Open({}, {.ram = {.bytes_max = 2 * TestChunkBytes()}, .write_policy = WritePolicy::kBack});
  const auto a = TokensFrom(100, 4), b = TokensFrom(200, 4), c = TokensFrom(300, 4);
  for (const auto& tokens : {a, b, c}) {
    const auto put = Put(tokens);
    EXPECT_TRUE(put->done());
    EXPECT_TRUE(put->status().ok());
  }
  while (disk_->Knows(Ids(a)[0]) != 1) std::this_thread::yield();
  EXPECT_EQ(disk_->Knows(Ids(b)[0]), 0);
  EXPECT_TRUE(store_->Flush(kNever).ok());
  EXPECT_EQ(disk_->Knows(Ids(b)[0]), 1);
  EXPECT_EQ(disk_->Knows(Ids(c)[0]), 1);
  EXPECT_TRUE(store_->Flush(kNever).ok());
  EXPECT_EQ(Statistics(TierKind::kDisk).writes, 3);
}

TEST_F(SlowStore, WriteBackWritesWhatAQuotaTakesOutOfRam) {
  Open({}, {.write_policy = WritePolicy::kBack});
  std::vector<ChunkId> ids;
  for (const int32_t first : {100, 200, 300}) {
    Put(TokensFrom(first, 4));
    ids.push_back(Ids(TokensFrom(first, 4))[0]);
  }
  ASSERT_TRUE(store_->SetQuota(keys_, {.bytes_max = TestChunkBytes()}).ok());
  const auto freed = store_->CollectGarbage(TierKind::kRam);
  ASSERT_TRUE(freed.ok());  // the store's thread may have been faster
  EXPECT_EQ(Statistics(TierKind::kRam).chunks, 1);
  EXPECT_TRUE(store_->Flush(kNever).ok());
  for (const ChunkId& id : ids) EXPECT_EQ(disk_->Knows(id), 1);
}

TEST_F(SlowStore, CloseWritesWhatOnlyRamHas) {
  Open({}, {.write_policy = WritePolicy::kBack});
  for (int i = 0; i < 40; ++i) Put(TokensFrom(100 * (i + 1), 4));
  store_->Close();
  EXPECT_EQ(disk_->Usage().chunks, 40);
}

TEST_F(SlowStore, SelectiveWritesWhatIsWantedTwice) {
  Open({}, {.write_policy = WritePolicy::kSelective, .admit_after = 2});
  const auto once = TokensFrom(100, 4), twice = TokensFrom(200, 4);
  Put(once);
  Put(twice);
  EXPECT_TRUE(store_->Flush(kNever).ok());
  EXPECT_EQ(disk_->Usage().chunks, 0);
  Fetch(twice);
  EXPECT_TRUE(store_->Flush(kNever).ok());
  EXPECT_EQ(disk_->Knows(Ids(twice)[0]), 1);
  EXPECT_EQ(disk_->Knows(Ids(once)[0]), 0);
}

// What a put or SetPriority said of a chunk is not forgotten on its way between the tiers.
TEST_F(SlowStore, WorthGoesWithAChunkThatIsWrittenLater) {
  Open({}, {.write_policy = WritePolicy::kSelective, .admit_after = 2});
  const auto tokens = TokensFrom(100, 4);
  ASSERT_TRUE(
      store_->Put(keys_, TestChunk(keys_, tokens, 0), {.recompute_seconds = 2.5, .priority = 90})
          .ok());
  Fetch(tokens);
  EXPECT_TRUE(store_->Flush(kNever).ok());
  EXPECT_EQ(disk_->Worth(Ids(tokens)[0]), (ChunkWorth{2.5, 90}));
}

TEST_F(SlowStore, APromotedChunkKeepsItsPriority) {
  Open({}, {.ram = {.bytes_max = 2 * TestChunkBytes()}, .priority = 60});
  const auto a = TokensFrom(100, 4), b = TokensFrom(200, 4), c = TokensFrom(300, 4);
  Fill(disk_, a);
  ASSERT_EQ(*store_->SetPriority(Chain(a), 90), 1);
  Fetch(a);
  Put(b);
  Put(c);
  std::vector<ChunkKey> in_ram;
  const auto listings = store_->List(TierKind::kRam);
  ASSERT_TRUE(listings.ok());
  for (const ChunkListing& listing : *listings) in_ram.push_back(listing.key);
  std::vector<ChunkKey> wanted = {Chain(a)[0], Chain(c)[0]};
  std::ranges::sort(in_ram);
  std::ranges::sort(wanted);
  EXPECT_EQ(in_ram, wanted) << "b was used later and is worth less";
}

// The end of a chunk's time reaches a tier also if the chunk comes there after it was set.
TEST_F(SlowStore, ATimeToLiveGoesWithAChunkThatIsWrittenLater) {
  for (const WritePolicy policy : {WritePolicy::kBack, WritePolicy::kThrough}) {
    SCOPED_TRACE(static_cast<int>(policy));
    Open({}, {.write_policy = policy});
    const bool waits = policy == WritePolicy::kThrough;
    disk_->Change([&](auto& script) { script.hold_writes = waits; });
    const auto set = TokensFrom(100, 4), twice = TokensFrom(200, 4), kept = TokensFrom(300, 4);
    const int64_t own_ms = clock_->WallMs() + 500;
    for (const auto& tokens : {set, twice, kept}) Put(tokens);
    ASSERT_TRUE(
        store_->Put(keys_, TestChunk(keys_, TokensFrom(400, 4), 0, {.expires_ms = own_ms}), {})
            .ok());
    if (waits) disk_->AwaitHeld(1);
    for (const auto& tokens : {set, twice, TokensFrom(400, 4)})
      EXPECT_EQ(*store_->SetTtl(Chain(tokens), 1000), 1);
    EXPECT_EQ(*store_->SetTtl(Chain(twice), 0), 1);
    disk_->Change([](auto& script) { script.hold_writes = false; });
    EXPECT_TRUE(store_->Flush(kNever).ok());
    EXPECT_EQ(disk_->expires_ms(Ids(set)[0]), clock_->WallMs() + 1000);
    EXPECT_EQ(disk_->expires_ms(Ids(twice)[0]), 0);
    EXPECT_EQ(disk_->expires_ms(Ids(kept)[0]), 0);
    EXPECT_EQ(disk_->expires_ms(Ids(TokensFrom(400, 4))[0]), 0) << "the chunk's own is earlier";
    store_ = nullptr;
  }
}

// One that cannot be told the end of the chunk's time does not keep the chunk for longer.
TEST_F(SlowStore, AChunkWhoseTimeCannotBeSetIsNotKept) {
  Open({}, {.write_policy = WritePolicy::kBack});
  const auto tokens = TokensFrom(100, 4);
  Put(tokens);
  EXPECT_EQ(*store_->SetTtl(Chain(tokens), 1000), 1);
  disk_->Change(
      [](auto& script) { script.expiry = Status(StatusCode::kIoError, "fake: no expiry"); });
  EXPECT_TRUE(store_->Flush(kNever).ok());
  EXPECT_EQ(Statistics(TierKind::kDisk).dropped_writes, 1);
  EXPECT_EQ(disk_->Knows(Ids(tokens)[0]), 0);
}

// A tier may have a chunk that it would not vouch for: one that another process wrote.
TEST_F(SlowStore, WhatIsThereIsNoDuplicateBeforeItIsAsDurableAsPromised) {
  Open({});
  const auto tokens = TokensFrom(100, 4);
  Fill(disk_, tokens);
  const int64_t before = disk_->calls().writes;
  EXPECT_TRUE(Put(tokens)->Wait(kNever));
  EXPECT_EQ(disk_->calls().writes, before);
  disk_->Change([](auto& script) { script.durable = false; });
  EXPECT_TRUE(Put(tokens)->Wait(kNever));
  EXPECT_EQ(disk_->calls().writes, before + 1);
}

TEST_F(SlowStore, ATierThatHangsCostsAnAdministratorOneTimeOut) {
  Open({.redis = true});
  const auto tokens = TokensFrom(100, 12);
  for (int64_t i = 0; i < 3; ++i) Put(tokens, i);
  ASSERT_TRUE(store_->Flush(kNever).ok());
  redis_->Change([](auto& script) { script.control = Status(StatusCode::kTimeout, "fake"); });
  EXPECT_EQ(store_->SetTtl(Chain(tokens), 1000).status().code(), StatusCode::kTimeout);
  EXPECT_EQ(store_->Remove(Chain(tokens)).status().code(), StatusCode::kTimeout);
  EXPECT_EQ(redis_->calls().controls, 2);
  EXPECT_EQ(disk_->calls().controls, 6) << "the other tier is asked for all of them";
  EXPECT_EQ(Statistics(TierKind::kDisk).chunks, 0);
}

TEST_F(SlowStore, EventsThatATierHasDroppedCountToo) {
  Open({.redis = true});
  EXPECT_EQ(store_->Statistics().events_dropped, 0);
  disk_->Change([](auto& script) { script.events_dropped = 3; });
  redis_->Change([](auto& script) { script.events_dropped = 4; });
  EXPECT_EQ(store_->Statistics().events_dropped, 7);
}

TEST_F(SlowStore, ItsThreadsTakeNoSignals) {
  const int64_t before = ThreadsThatTakeSignals();
  Open({.redis = true});
  EXPECT_LE(ThreadsThatTakeSignals(), before);
}

// To look through all that there is takes as long as it takes.
TEST_F(SlowStore, UpkeepHasNoDeadlineAndEndsWithTheStore) {
  Open({}, {.scrub_bytes_per_second = 1});
  EXPECT_TRUE(store_->Clear(keys_).ok());
  EXPECT_EQ(disk_->calls().upkeep_deadline_ns, kNever);
  disk_->Change([](auto& script) { script.hold_upkeep = true; });
  clock_->AwaitWaiters(2);  // one thread looks after RAM, one after the disk
  clock_->Advance(60'000 * kMs);
  disk_->AwaitHeld(1);
  EXPECT_EQ(disk_->calls().upkeep_deadline_ns, kNever);
  store_->Close();
}

TEST_F(SlowStore, RemoveAndClearReachAllTiers) {
  Open({.redis = true});
  const auto tokens = TokensFrom(1, 8);
  for (int64_t i = 0; i < 2; ++i) Put(tokens, i);
  ASSERT_TRUE(store_->Flush(kNever).ok());
  const std::vector<ChunkKey> chain = Chain(tokens);
  EXPECT_EQ(*store_->Remove(std::span(chain).subspan(1)), 1);
  EXPECT_EQ(Fetch(tokens)->ready(), 1);
  EXPECT_EQ(*store_->Clear(keys_), 3);
  EXPECT_EQ(Fetch(tokens)->ready(), 0);
  EXPECT_EQ(store_->List(TierKind::kRedis)->size(), 0u);
}

TEST_F(SlowStore, WhatWaitsToBeWrittenIsRemovedToo) {
  Open({.disk = false, .redis = true});  // whose queue has one writer
  redis_->Change([](auto& script) { script.hold_writes = true; });
  const auto tokens = TokensFrom(0, 8);
  const auto first = Put(tokens, 0);
  redis_->AwaitHeld(1);
  const auto second = Put(tokens, 1);  // behind the first, which is being written
  const std::vector<ChunkKey> chain = Chain(tokens);
  EXPECT_EQ(*store_->Remove(std::span(chain).last(1)), 1);
  ASSERT_TRUE(second->Wait(kNever));
  EXPECT_EQ(second->status().code(), StatusCode::kCancelled);
  // What is being written is waited for. What was not hears of it at once.
  std::thread remover([&] { EXPECT_EQ(*store_->Remove(std::span(chain).first(1)), 1); });
  clock_->AwaitWaiters(2);  // the write, and the remover
  clock_->Advance(2000 * kMs);
  remover.join();
  redis_->Change([](auto& script) { script = {}; });
  EXPECT_EQ(*store_->Clear(keys_), 0);
  EXPECT_EQ(Fetch(tokens)->ready(), 0);
}

TEST_F(SlowStore, APutHearsThatItsChunkWasRemovedBeforeTheRemoverWaits) {
  Open({.disk = false, .redis = true});
  redis_->Change([](auto& script) { script.hold_writes = true; });
  const auto tokens = TokensFrom(0, 8);
  Put(tokens, 0);
  redis_->AwaitHeld(1);
  const auto second = Put(tokens, 1);
  std::thread remover([&] { EXPECT_EQ(*store_->Remove(Chain(tokens)), 2); });
  clock_->AwaitWaiters(3);  // the write, the remover, and the thread that looks after RAM
  EXPECT_TRUE(second->done());
  redis_->Change([](auto& script) { script.hold_writes = false; });
  remover.join();
  EXPECT_EQ(second->status().code(), StatusCode::kCancelled);
}

TEST_F(SlowStore, WhatIsOnItsWayIsNotKeptOnceItIsRemoved) {
  Open({.redis = true});
  const auto tokens = TokensFrom(0, 4);
  Fill(redis_, tokens);
  redis_->Change([](auto& script) { script.layers = 1; });
  const auto fetch = Start(Request(tokens));
  ASSERT_TRUE(fetch->WaitLayer(0, kNever).ok());
  redis_->AwaitHeld(1);
  EXPECT_EQ(*store_->Clear(keys_), 1);
  const auto later = Start(Request(tokens));
  redis_->Change([](auto& script) { script = {}; });
  ASSERT_TRUE(fetch->Wait(kNever));
  EXPECT_EQ(fetch->ready(), 1);  // a fetch that had begun gets it
  ASSERT_TRUE(later->Wait(kNever));
  EXPECT_EQ(later->ready(), 0) << "a fetch that began after the removal does not";
  ExpectExact(*fetch, tokens);
  ASSERT_TRUE(store_->Flush(kNever).ok());
  EXPECT_EQ(Fetch(tokens)->ready(), 0);  // and no tier does
}

TEST_F(SlowStore, WhatIsPutAgainIsFoundWhileTheRemovedOneIsOnItsWay) {
  Open({.redis = true});
  const auto tokens = TokensFrom(0, 4);
  Fill(redis_, tokens);
  redis_->Change([](auto& script) { script.layers = 1; });
  const auto fetch = Start(Request(tokens));
  redis_->AwaitHeld(1);
  EXPECT_EQ(*store_->Clear(keys_), 1);
  Put(tokens);
  const auto again = Start(Request(tokens));
  ASSERT_TRUE(again->Wait(kNever));
  EXPECT_EQ(again->ready(), 1);
  EXPECT_EQ(again->tier(0), TierKind::kRam);
  redis_->Change([](auto& script) { script = {}; });
  ASSERT_TRUE(fetch->Wait(kNever));
  ExpectExact(*again, tokens);
}

TEST_F(SlowStore, PinsReachTheTiersAndEndThere) {
  Open({.redis = true}, {.pin_timeout_ms = 1000});
  const auto tokens = TokensFrom(1, 8);
  Fill(disk_, tokens);
  EXPECT_EQ(store_->Pin(Chain(tokens)), 2);
  EXPECT_EQ(disk_->pins(), 2);
  Fill(redis_, TokensFrom(100, 4));
  EXPECT_EQ(store_->Pin(Chain(TokensFrom(100, 4))), 0) << "Redis has no pins";
  const std::vector<ChunkKey> chain = Chain(tokens);
  EXPECT_EQ(store_->Unpin(std::span(chain).first(1)), 1);
  EXPECT_EQ(disk_->pins(), 1);
  while (disk_->pins() > 0) {  // the sweeper ends it
    clock_->Advance(1000 * kMs);
    std::this_thread::yield();
  }
  EXPECT_EQ(store_->Statistics().forced_unpins, 1);
}

TEST_F(SlowStore, TheScrubberReadsEveryChunk) {
  Open({}, {.scrub_bytes_per_second = 1});
  const auto tokens = TokensFrom(1, 8);
  Fill(disk_, tokens);
  while (disk_->calls().chunk_reads.size() < 2) {
    clock_->Advance(1'000'000 * kMs);
    std::this_thread::yield();
  }
}

// ---------------------------------------------------------------------- many threads

TEST_F(SlowStore, ManyThreadsOnFewKeys) {
  constexpr int kThreads = 8;
  constexpr int kRounds = 200;
  constexpr int kChains = 16;  // of four chunks: 64 keys
  Open({.redis = true}, {.ram = {.bytes_max = 24 * TestChunkBytes()},
                         .write_policy = WritePolicy::kBack,
                         .queue_bytes_max = 8 * TestChunkBytes(),
                         .fetch_bytes_max = 64 * TestChunkBytes()});
  redis_->Change([](auto& script) { script.knows = false; });
  std::atomic<int64_t> wrong{0}, hits{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      RandomSequence random(11, static_cast<uint64_t>(t));
      for (int round = 0; round < kRounds; ++round) {
        const auto tokens = TokensFrom(static_cast<int32_t>(1000 * random.Below(kChains)), 16);
        const std::vector<ChunkKey> chain = keys_.Chain(tokens, kTestBlock).value();
        switch (random.Below(8)) {
          case 0:
          case 1:
          case 2:
            for (int64_t i = 0; i < 4; ++i)
              static_cast<void>(store_->Put(keys_, TestChunk(keys_, tokens, i), {}));
            break;
          case 3:
            store_->Pin(chain);
            store_->Touch(chain);
            store_->Unpin(chain);
            break;
          case 4:
            static_cast<void>(store_->Remove(std::span(chain).subspan(3)));
            break;
          case 5: {
            const auto fetch = store_->Prefetch(Request(tokens));
            (*fetch)->Cancel();
            static_cast<void>(store_->Statistics());
            static_cast<void>(store_->TakeEvents());
            break;
          }
          default: {
            const auto fetch = store_->Fetch(Request(tokens));
            static_cast<void>((*fetch)->WaitLayer(0, kNever));
            (*fetch)->Wait(kNever);
            for (int64_t i = 0; i < (*fetch)->ready(); ++i) {
              ++hits;
              if (!IsTestChunk(*(*fetch)->chunk(i), chain[static_cast<size_t>(i)])) ++wrong;
            }
          }
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_GT(hits, 0);
  EXPECT_LE(Statistics(TierKind::kRam).bytes, 24 * TestChunkBytes());
  store_->Close();
  EXPECT_EQ(store_->Statistics().pins, 0);
  EXPECT_EQ(disk_->pins() + redis_->pins(), 0);
}

}  // namespace
}  // namespace quire
