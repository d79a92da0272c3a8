// The engine over the real chunk store with its real time: what comes from RAM and from a folder,
// also after a restart, gives the answers of a cold run, bit for bit.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <functional>

#include "engine/test_server.h"

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

}  // namespace
}  // namespace quire
