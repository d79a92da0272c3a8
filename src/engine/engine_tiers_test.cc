// The engine over the real chunk store with its real time: what comes from RAM and from a folder,
// also after a restart, gives the answers of a cold run, bit for bit.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <functional>

#include "engine/testing/test_server.h"
#include "store/testing/fake_tier.h"
#include "store/tiered/tiered_store.h"

namespace quire {
namespace {

class EngineTiers : public testing::Test {
 protected:
  EngineTiers()
      : folder_(std::filesystem::temp_directory_path() /
                ("engine_tiers_test_" + std::to_string(::getpid()))) {
    identity_.model = "fake";
    options_.chunk_tokens = 8;
    options_.load_timeout_ms = 60'000;  // a busy machine is no reason to compute here
    options_.load_always = true;
  }
  ~EngineTiers() override { std::filesystem::remove_all(folder_); }

  std::shared_ptr<ChunkStore> Open(bool ram, bool disk) {
    ChunkStoreOptions options;
    if (ram) options.ram.bytes_max = int64_t{64} << 20;
    if (disk) options.disk.directory = folder_.string();
    Result<std::unique_ptr<ChunkStore>> store = ChunkStore::Open(options);
    EXPECT_TRUE(store.ok()) << store.status().ToString();
    return *std::move(store);
  }
  std::unique_ptr<Server> Make(const std::shared_ptr<ChunkStore>& store, const Sizes& sizes = {}) {
    auto server = std::make_unique<Server>(sizes);
    const Status attached = server->engine->AttachStore(store, identity_, options_);
    EXPECT_TRUE(attached.ok()) << attached.ToString();
    return server;
  }

  // Jobs go through engines that share a store and are replaced again and again; `open` gives each
  // generation its store.
  void RunGenerations(TierKind tier, const std::function<std::shared_ptr<ChunkStore>()>& open) {
    const Sizes small{.pages = 80, .chunk = 16};
    const std::vector<Job> jobs = RandomJobs(16, 77);
    const Answers want = Alone(jobs);
    int64_t loaded = 0;
    std::shared_ptr<ChunkStore> store;
    for (uint64_t generation = 0; generation < 4; ++generation) {
      store = open();
      RandomSequence random(generation, 9);
      const std::unique_ptr<Server> servers[] = {Make(store, small), Make(store, small)};
      size_t next = 0;
      for (int moves = 0;
           next < jobs.size() || !servers[0]->engine->Idle() || !servers[1]->engine->Idle();
           ++moves) {
        ASSERT_LT(moves, 100'000) << "no progress";
        Server& server = *servers[random.Below(2)];
        if (next < jobs.size() && random.Below(3) == 0) {
          // Both get all of them, so that a request has the number of its job.
          for (const auto& each : servers) each->Submit(jobs[next].prompt, jobs[next].options);
          ++next;
        } else {
          ASSERT_TRUE(server.Step().ok());
        }
      }
      for (const auto& server : servers) {
        for (const auto& [key, answer] : want) {
          ExpectEqual(server->answers[key], answer, "job " + std::to_string(key.first));
        }
        EXPECT_TRUE(server->engine->FlushStore(60'000).ok());
        loaded += server->engine->Stats().loaded_tokens[static_cast<size_t>(tier)];
      }
    }
    EXPECT_GT(loaded, 500);
  }

  const std::filesystem::path folder_;
  StoreUseOptions options_;
  Passport identity_;
};

TEST_F(EngineTiers, RamGivesWhatAColdRunGives) {
  const std::shared_ptr<ChunkStore> store = Open(true, false);
  RunGenerations(TierKind::kRam, [&] { return store; });
}

TEST_F(EngineTiers, AFolderGivesItAfterARestart) {
  RunGenerations(TierKind::kDisk, [&] { return Open(false, true); });
}

TEST_F(EngineTiers, WhatTheFolderLostOrDamagedIsComputed) {
  RandomSequence random(3);
  const Tokens prompt = RandomTokens(60, &random);
  const SamplingOptions options{.max_tokens = 6, .logprobs = 2, .ignore_eos = true};
  const Answer want = Server({.prefix_cache = false}).Generate(prompt, options);
  {
    const auto store = Open(false, true);
    const auto server = Make(store);
    server->Generate(prompt, options);
    ASSERT_TRUE(server->engine->FlushStore(60'000).ok());
  }
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder_)) {
    if (entry.is_regular_file() && entry.file_size() > 1000) files.push_back(entry.path());
  }
  ASSERT_GE(files.size(), 7U);
  for (int round = 0; round < 12; ++round) {
    SCOPED_TRACE(round);
    const auto& file = files[static_cast<size_t>(random.Below(static_cast<int64_t>(files.size())))];
    if (std::filesystem::exists(file)) {
      std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
      const int64_t size = static_cast<int64_t>(std::filesystem::file_size(file));
      const int64_t at = random.Below(size);
      stream.seekg(at);
      const char byte = static_cast<char>(stream.get() ^ (1 << random.Below(8)));
      stream.seekp(at);
      stream.put(byte);
    }
    const auto store = Open(false, true);
    const auto server = Make(store);
    const Answer answer = server->Generate(prompt, options);
    ExpectEqual(answer, want, "after a flipped bit");
    ASSERT_TRUE(server->engine->FlushStore(60'000).ok());
  }
}

// The store is shut while a request waits for it and engines go on.
TEST_F(EngineTiers, AClosedStoreIsAMiss) {
  RandomSequence random(4);
  const Tokens prompt = RandomTokens(60, &random);
  const SamplingOptions options{.max_tokens = 6, .ignore_eos = true};
  const auto store = Open(true, false);
  const auto server = Make(store);
  const Answer want = server->Generate(prompt, options);
  const auto other = Make(store);
  store->Close();
  const Answer answer = other->Generate(prompt, options);
  ExpectEqual(answer, want, "closed");
  EXPECT_EQ(answer.cached_tokens, 0);
  EXPECT_EQ(answer.miss, MissReason::kUnavailable);
  EXPECT_EQ(other->engine->FlushStore(10).code(), StatusCode::kClosed);
}

// ---- The store's own threads, over a tier that does what the test says, in fake time

class EngineSlowTier : public testing::TestWithParam<TierKind> {
 protected:
  EngineSlowTier() {
    identity_.model = "fake";
    options_.chunk_tokens = 8;
    options_.load_timeout_ms = 1000;
    options_.clock = clock_;
    Open(/*ram_bytes=*/0);
  }
  // A store over an empty tier.
  void Open(int64_t ram_bytes) {
    store_ = nullptr;
    auto tier = std::make_unique<FakeTier>(GetParam(), clock_);
    tier_ = tier.get();
    SlowTiers slow;
    slow[static_cast<size_t>(GetParam())] = std::move(tier);
    ChunkStoreOptions options;
    options.ram.bytes_max = ram_bytes;
    options.clock = clock_;
    Result<std::unique_ptr<ChunkStore>> store =
        TieredStore::Create(std::move(options), std::move(slow));
    EXPECT_TRUE(store.ok()) << store.status().ToString();
    store_ = *std::move(store);
  }
  ~EngineSlowTier() override {
    tier_->Change([](auto& script) { script = {}; });  // what is held goes on
  }

  std::unique_ptr<Server> Make(Sizes sizes = {}) {
    sizes.clock = clock_;
    auto server = std::make_unique<Server>(sizes);
    const Status attached = server->engine->AttachStore(store_, identity_, options_);
    EXPECT_TRUE(attached.ok()) << attached.ToString();
    return server;
  }
  // What an engine without a store answers; the store gets the KV.
  Answer Write(const Tokens& prompt) {
    const auto writer = Make();
    writer->Generate(prompt, kOptions);
    EXPECT_TRUE(writer->engine->FlushStore(1000).ok());
    return Server({.prefix_cache = false}).Generate(prompt, kOptions);
  }
  static Tokens Text(int64_t count, uint64_t seed) {
    RandomSequence random(seed);
    return RandomTokens(count, &random);
  }
  // The tier does not go on behind layer 0 until a forward has computed that layer; then `change`.
  void HoldBehindLayer0(Server* server, std::function<void(FakeTier::Script&)> change) {
    tier_->Change([](auto& script) { script.layers = 1; });
    is_computed_ = false;
    server->cache->fault = [this, server, change, layer = int64_t{0}](auto call) mutable {
      if (call == "BeginForward" || call == "BeginLoadingForward") layer = 0;
      const bool is_second = call == "AttentionWithFusedQKV" && layer++ == 1;
      if (is_second && server->cache->loading_forwards == 1 && !is_computed_) {
        is_computed_ = true;
        tier_->Change(change);
      }
      return Status();
    };
  }

  static inline const SamplingOptions kOptions{.max_tokens = 5, .logprobs = 2, .ignore_eos = true};
  const std::shared_ptr<FakeClock> clock_ = std::make_shared<FakeClock>();
  FakeTier* tier_ = nullptr;
  std::shared_ptr<ChunkStore> store_;
  StoreUseOptions options_;
  Passport identity_;
  bool is_computed_ = false;
};

INSTANTIATE_TEST_SUITE_P(Tiers, EngineSlowTier, testing::Values(TierKind::kDisk, TierKind::kRedis),
                         [](const auto& tier) { return std::string(TierName(tier.param)); });

// Were layer 0 computed only when all layers are there, none would ever be.
TEST_P(EngineSlowTier, Layer0IsComputedBeforeTheLastLayerIsThere) {
  for (const int64_t length : {18, 30, 130, 400}) {
    SCOPED_TRACE(length);
    const Tokens prompt = Text(length, static_cast<uint64_t>(length));
    const Answer want = Write(prompt);
    const auto server = Make();
    HoldBehindLayer0(server.get(), [this](auto& script) {
      clock_->Advance(3'000'000);
      script.layers = FakeModel::kLayers;
    });
    const Answer answer = server->Generate(prompt, kOptions);
    ExpectEqual(answer, want, "by layers");
    EXPECT_TRUE(is_computed_);
    EXPECT_EQ(server->cache->loading_forwards, 1);
    EXPECT_EQ(answer.cached.tiers[static_cast<size_t>(GetParam())],
              std::min(length / 8 * 8, length - 1));
    EXPECT_EQ(answer.miss, MissReason::kNone);
    const EngineStats stats = server->engine->Stats();
    EXPECT_EQ(stats.layer_loads, 1);
    EXPECT_EQ(stats.loads, 1);
  }
}

// The tier is read although the engine makes no step.
TEST_P(EngineSlowTier, ARequestThatWaitsIsReadBeforeItIsLoaded) {
  Open(int64_t{64} << 20);
  const Tokens prompt = Text(60, 4);
  const Answer want = Write(prompt);
  const std::vector<ChunkListing> chunks = store_->List(TierKind::kRam).value();
  ASSERT_FALSE(chunks.empty());
  const KeySpace keys(chunks[0].fingerprint, "");
  ASSERT_TRUE(store_->SetQuota(keys, {.bytes_max = 1}).ok());
  EXPECT_TRUE(store_->CollectGarbage(TierKind::kRam).ok());
  ASSERT_TRUE(store_->List(TierKind::kRam)->empty());
  ASSERT_TRUE(store_->SetQuota(keys, {}).ok());
  const auto server = Make();
  server->Submit(Text(12, 5), kOptions);
  tier_->Change([](auto& script) { script.layers = 0; });
  server->Submit(prompt, kOptions);
  tier_->AwaitHeld(1);
  tier_->Change([](auto& script) { script = {}; });
  server->Finish();
  ExpectEqual(server->answers[{1, 0}], want, "prefetched");
  EXPECT_EQ((server->answers[{1, 0}].cached_tokens), 56);
}

// Behind layer 0 comes nothing more, the tier fails, or what comes is damaged.
TEST_P(EngineSlowTier, ALoadThatFailsInsideTheForwardCostsItsDeadlineAndNoBit) {
  enum class Failure { kSilence, kDamage };
  for (const Failure failure : {Failure::kSilence, Failure::kDamage}) {
    SCOPED_TRACE(static_cast<int>(failure));
    const Tokens prompt = Text(61, static_cast<uint64_t>(failure));
    const Answer want = Write(prompt);
    const auto server = Make();
    if (failure == Failure::kDamage) {
      const auto listed = store_->List(GetParam());
      ASSERT_TRUE(listed.ok());
      tier_->Change([&](auto& script) {
        for (const ChunkListing& chunk : *listed) script.damaged.insert(chunk.key);
      });
    }
    HoldBehindLayer0(server.get(), [&](auto& script) {
      if (failure == Failure::kSilence) clock_->Advance(1000 * int64_t{1'000'000});
      if (failure == Failure::kDamage) script.layers = FakeModel::kLayers;
    });
    const int64_t start_ns = clock_->SteadyNs();
    const Answer answer = server->Generate(prompt, kOptions);
    ExpectEqual(answer, want, "computed");
    EXPECT_TRUE(is_computed_);
    EXPECT_EQ(server->cache->loading_forwards, 1);
    EXPECT_EQ(answer.cached_tokens, 0);
    EXPECT_EQ(answer.miss,
              failure == Failure::kSilence ? MissReason::kTimeout : MissReason::kCorrupt);
    EXPECT_LE(clock_->SteadyNs() - start_ns, 1000 * int64_t{1'000'000});
    EXPECT_EQ(server->engine->Stats().layer_loads, 0);
    tier_->Change([](auto& script) { script = {}; });
  }
}

// Several at once, each behind its own chunks; and one that shares a beginning with another.
TEST_P(EngineSlowTier, SeveralRequestsTakeTheirLayersTogether) {
  std::vector<Tokens> prompts = {Text(20, 1), Text(41, 2), Text(90, 3)};
  std::vector<Answer> wants;
  for (const Tokens& prompt : prompts) wants.push_back(Write(prompt));
  Tokens fork = prompts[2];
  fork.back() ^= 1;
  wants.push_back(Server({.prefix_cache = false}).Generate(fork, kOptions));
  prompts.push_back(fork);
  const auto server = Make();
  HoldBehindLayer0(server.get(), [](auto& script) { script.layers = FakeModel::kLayers; });
  for (const Tokens& prompt : prompts) server->Submit(prompt, kOptions);
  server->Finish();
  for (size_t i = 0; i < prompts.size(); ++i) {
    const Answer& answer = server->answers[{static_cast<int64_t>(i), 0}];
    ExpectEqual(answer, wants[i], "request " + std::to_string(i));
    EXPECT_GE(answer.cached_tokens, static_cast<int64_t>(prompts[i].size() - 1) / 8 * 8);
  }
  EXPECT_TRUE(is_computed_);
  EXPECT_GE(server->engine->Stats().layer_loads, 1);
}

}  // namespace
}  // namespace quire
