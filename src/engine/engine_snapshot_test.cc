// Snapshots of an engine's prefix cache: another engine goes on from them exactly.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "base/testing/replaced_new.h"
#include "engine/engine_impl.h"
#include "model/testing/test_model.h"

namespace quire {
namespace {

// Allocations of this thread that have this number of bytes are refused; 0: none.
thread_local size_t refused_bytes = 0;

}  // namespace

bool RefusesAllocation(size_t bytes) noexcept { return bytes > 0 && bytes == refused_bytes; }

namespace {

using Tokens = std::vector<int32_t>;

Tokens Text(size_t count, int32_t first = 1) {
  Tokens tokens(count);
  for (size_t i = 0; i < count; ++i) tokens[i] = static_cast<int32_t>((first + 7 * i) % 101);
  return tokens;
}

class EngineSnapshot : public testing::Test {
 protected:
  explicit EngineSnapshot(TestModel model = {}) {
    WriteTestModel(folder_, model);
    path_ = std::filesystem::temp_directory_path() /
            ("engine_snapshot_test_" + std::to_string(::getpid()));
    contents_.identity.model = "test";
    contents_.identity.block_tokens = 16;
  }
  ~EngineSnapshot() override { std::filesystem::remove(path_); }

  std::unique_ptr<EngineImpl> Create(int64_t page_size = 16, int64_t kv_bytes = 4 << 20) {
    auto engine = Engine::Create({.model_directory = folder_.path(),
                                  .dtype = DType::kF32,
                                  .threads = 1,
                                  .page_size = page_size,
                                  .kv_bytes = kv_bytes});
    EXPECT_TRUE(engine.ok()) << engine.status().ToString();
    return std::unique_ptr<EngineImpl>(static_cast<EngineImpl*>(engine->release()));
  }

  // The answer to a prompt, alone.
  StepOutput Run(EngineImpl& engine, const Tokens& prompt, int64_t max_tokens) {
    SamplingOptions options;
    options.max_tokens = max_tokens;
    options.ignore_eos = true;
    StepOutput answer;
    EXPECT_TRUE(engine.Submit(prompt, options).ok());
    while (!engine.Idle()) {
      const auto outputs = engine.Step();
      EXPECT_TRUE(outputs.ok()) << outputs.status().ToString();
      for (const StepOutput& output : *outputs) {
        answer.tokens.insert(answer.tokens.end(), output.tokens.begin(), output.tokens.end());
        answer.cached_tokens = output.cached_tokens;
      }
    }
    engine.CheckInvariants();
    return answer;
  }

  Result<int64_t> Save(EngineImpl& engine, const Tokens& tokens) {
    contents_.tokens = tokens;
    const Result<int64_t> saved = engine.SaveSnapshot(contents_, path_);
    engine.CheckInvariants();
    return saved;
  }
  // Saves what a cache alone holds as KV of an engine with products in float32.
  Status SaveOf(AttentionKVCache& cache) {
    SnapshotContents contents = contents_;
    contents.identity.numerics = "model=float32";
    return quire::SaveSnapshot(cache, 0, contents, path_);
  }
  Result<SnapshotInfo> Load(EngineImpl& engine) {
    Result<SnapshotInfo> info = engine.LoadSnapshot(contents_.identity, path_, {});
    engine.CheckInvariants();
    return info;
  }

  TestFolder folder_;
  std::string path_;
  SnapshotContents contents_;
};

class LongRopeEngineSnapshot : public EngineSnapshot {
 protected:
  LongRopeEngineSnapshot() : EngineSnapshot(LongRopeModel(40)) {}
};

TEST_F(EngineSnapshot, AnotherEngineGoesOnExactly) {
  const auto writer = Create();
  const Tokens prompt = Text(37);
  const StepOutput answer = Run(*writer, prompt, 9);
  Tokens text = prompt;
  text.insert(text.end(), answer.tokens.begin(), answer.tokens.end());
  const Result<int64_t> saved = Save(*writer, text);
  ASSERT_TRUE(saved.ok()) << saved.status().ToString();
  EXPECT_EQ(*saved, 45);  // the last token's KV was never needed
  text.push_back(5);
  const StepOutput cold = Run(*Create(), text, 6);
  for (const int64_t page_size : {16, 5, 64}) {
    const auto reader = Create(page_size);
    const auto info = Load(*reader);
    ASSERT_TRUE(info.ok()) << info.status().ToString();
    EXPECT_EQ(info->tokens.size(), 45u);
    EXPECT_EQ(reader->Stats().retained_tokens, 45);
    const StepOutput warm = Run(*reader, text, 6);
    EXPECT_EQ(warm.tokens, cold.tokens);
    EXPECT_EQ(warm.cached_tokens, 45);
  }
}

TEST_F(LongRopeEngineSnapshot, BothSetsOfFactorsComeBack) {
  for (const int64_t max_tokens : {3, 30}) {  // below and beyond the original length
    const auto writer = Create();
    const Tokens prompt = Text(20);
    const StepOutput answer = Run(*writer, prompt, max_tokens);
    ASSERT_TRUE(Save(*writer, prompt).ok());
    const auto reader = Create();
    const auto info = Load(*reader);
    ASSERT_TRUE(info.ok()) << info.status().ToString();
    EXPECT_EQ(info->long_factors, max_tokens == 30);
    const StepOutput warm = Run(*reader, prompt, max_tokens);
    EXPECT_EQ(warm.tokens, answer.tokens);
    EXPECT_EQ(warm.cached_tokens, 19);
    // The other set has no use for it.
    EXPECT_EQ(Run(*reader, prompt, 33 - max_tokens).cached_tokens, 0);
  }
}

TEST_F(EngineSnapshot, OldKVMakesRoom) {
  const auto writer = Create();
  const Tokens prompt = Text(60);
  Run(*writer, prompt, 1);
  ASSERT_TRUE(Save(*writer, prompt).ok());
  // Five pages: room for one of the two texts.
  const auto plan = Engine::PlanMemory({.model_directory = folder_.path(),
                                        .dtype = DType::kF32,
                                        .threads = 1,
                                        .page_size = 16,
                                        .kv_bytes = 4 << 20});
  ASSERT_TRUE(plan.ok());
  const auto reader = Create(16, 5 * plan->page_bytes);
  Run(*reader, Text(60, 50), 1);
  ASSERT_GT(reader->Stats().retained_tokens, 0);
  const auto info = Load(*reader);
  ASSERT_TRUE(info.ok()) << info.status().ToString();
  EXPECT_EQ(Run(*reader, prompt, 1).cached_tokens, 59);
}

// Old KV was given up before it was known whether the file is of any use.
TEST_F(EngineSnapshot, OldKVIsKeptWhereNothingIsLoaded) {
  const auto writer = Create();
  Run(*writer, Text(60), 1);
  ASSERT_TRUE(Save(*writer, Text(60)).ok());
  const auto plan = Engine::PlanMemory(
      {.model_directory = folder_.path(), .dtype = DType::kF32, .threads = 1, .page_size = 16});
  ASSERT_TRUE(plan.ok());
  // Five pages: room for one of the two texts.
  const auto reader = Create(16, 5 * plan->page_bytes);
  const Tokens old = Text(60, 50);
  Run(*reader, old, 1);
  const int64_t kept = reader->Stats().retained_tokens;
  Passport other = contents_.identity;
  other.revision = "other";
  EXPECT_EQ(reader->LoadSnapshot(other, path_, {}).status().code(), StatusCode::kIncompatible);
  EXPECT_EQ(reader->Stats().retained_tokens, kept);
  // A request in work holds the pages.
  ASSERT_TRUE(reader->Submit(old, {.max_tokens = 9, .ignore_eos = true}).ok());
  ASSERT_TRUE(reader->Step().ok());
  const int64_t beside = reader->Stats().retained_tokens;
  EXPECT_EQ(Load(*reader).status().code(), StatusCode::kOutOfPages);
  EXPECT_EQ(reader->Stats().retained_tokens, beside);
  while (!reader->Idle()) ASSERT_TRUE(reader->Step().ok());
  {
    std::fstream file(path_, std::ios::binary | std::ios::in | std::ios::out);
    file.seekp(-300, std::ios::end).put('\x7f');
  }
  const int64_t at_last = reader->Stats().retained_tokens;
  EXPECT_EQ(Load(*reader).status().code(), StatusCode::kCorrupt);
  EXPECT_EQ(reader->Stats().retained_tokens, at_last);
  EXPECT_EQ(Run(*reader, old, 1).cached_tokens, 59);
}

TEST_F(EngineSnapshot, RequestsGoOnMeanwhile) {
  const auto engine = Create();
  const Tokens prompt = Text(30);
  Run(*engine, prompt, 1);
  SamplingOptions options;
  options.max_tokens = 12;
  options.ignore_eos = true;
  const Tokens other = Text(25, 40);
  const StepOutput alone = Run(*Create(), other, 12);
  ASSERT_TRUE(engine->Submit(other, options).ok());
  Tokens tokens;
  for (int step = 0; !engine->Idle(); ++step) {
    const auto outputs = engine->Step();
    ASSERT_TRUE(outputs.ok()) << outputs.status().ToString();
    for (const StepOutput& output : *outputs)
      tokens.insert(tokens.end(), output.tokens.begin(), output.tokens.end());
    if (step == 2) {
      ASSERT_TRUE(Save(*engine, prompt).ok());
    }
    if (step == 4) {
      ASSERT_TRUE(Load(*engine).ok());
    }
  }
  EXPECT_EQ(tokens, alone.tokens);
}

TEST_F(EngineSnapshot, FailuresChangeNothing) {
  const auto engine = Create();
  EXPECT_EQ(Save(*engine, Text(5)).status().code(), StatusCode::kNotFound);
  EXPECT_EQ(Load(*engine).status().code(), StatusCode::kNotFound);
  Run(*engine, Text(40), 1);
  ASSERT_TRUE(Save(*engine, Text(40)).ok());
  const EngineStats before = engine->Stats();
  Passport other = contents_.identity;
  other.revision = "other";
  EXPECT_EQ(engine->LoadSnapshot(other, path_, {}).status().code(), StatusCode::kIncompatible);
  {
    std::fstream file(path_, std::ios::binary | std::ios::in | std::ios::out);
    file.seekp(-300, std::ios::end).put('\x7f');
  }
  EXPECT_EQ(Load(*engine).status().code(), StatusCode::kCorrupt);
  engine->CheckInvariants();
  EXPECT_EQ(engine->Stats().pages_free, before.pages_free);
  EXPECT_EQ(engine->Stats().retained_tokens, before.retained_tokens);
}

// Without memory for its salt, the sequence of the file stayed in the cache and belonged to nobody.
TEST_F(EngineSnapshot, LoadLosesNoSequenceWithoutMemoryForTheSalt) {
  const auto writer = Create();
  Run(*writer, Text(40), 1);
  ASSERT_TRUE(Save(*writer, Text(40)).ok());
  const auto reader = Create();
  const SnapshotLoadOptions options{.cache_salt = std::string(12'344, 's')};
  refused_bytes = options.cache_salt.size() + 1;
  const Status refused = reader->LoadSnapshot(contents_.identity, path_, options).status();
  refused_bytes = 0;
  EXPECT_EQ(refused.code(), StatusCode::kOutOfMemory) << refused.ToString();
  reader->CheckInvariants();
  EXPECT_EQ(reader->Stats().pages_free, reader->Stats().pages_total);
  const auto loaded = reader->LoadSnapshot(contents_.identity, path_, options);
  EXPECT_TRUE(loaded.ok()) << loaded.status().ToString();
}

// Sound files of the same model that the engine cannot use: ids beyond the vocabulary, more tokens
// than there is room for.
TEST_F(EngineSnapshot, WhatDoesNotFitIsRefused) {
  const auto model = LoadTestModel(folder_, DType::kF32);
  const auto cache = CreateTestCache(*model, {});
  const Tokens tokens = Text(100);
  ASSERT_FALSE(RunForward(*model, *cache, 0, tokens).empty());
  contents_.tokens = tokens;
  contents_.tokens[70] = 101;
  ASSERT_TRUE(SaveOf(*cache).ok());
  const auto engine = Create();
  EXPECT_EQ(Load(*engine).status().code(), StatusCode::kBadArgument);
  contents_.tokens = tokens;
  ASSERT_TRUE(SaveOf(*cache).ok());
  ASSERT_TRUE(Load(*engine).ok());
  const auto plan = Engine::PlanMemory(
      {.model_directory = folder_.path(), .dtype = DType::kF32, .threads = 1, .page_size = 16});
  ASSERT_TRUE(plan.ok());
  const auto small = Create(16, 3 * plan->page_bytes);
  EXPECT_EQ(Load(*small).status().code(), StatusCode::kTooLarge);
  EXPECT_EQ(small->Stats().retained_tokens, 0);
}

// Requests went on with the window of the file.
TEST_F(EngineSnapshot, AWindowOfTheFileIsNoneOfRequests) {
  const auto model = LoadTestModel(folder_, DType::kF32);
  const Tokens tokens = Text(40), prompt = Text(70);
  const StepOutput alone = Run(*Create(), prompt, 8);
  for (const int64_t window : {64, 20}) {
    const auto cache = CreateTestCache(*model, {});
    ASSERT_TRUE(cache->AddSequence(0).ok());
    ASSERT_TRUE(cache->EnableSlidingWindowForSeq(0, window, 4).ok());
    ASSERT_FALSE(RunForward(*model, *cache, 0, tokens).empty());
    contents_.tokens = tokens;
    ASSERT_TRUE(SaveOf(*cache).ok());
    const auto engine = Create();
    const Status loaded = Load(*engine).status();
    EXPECT_EQ(loaded.ok(), window > 40) << loaded.ToString();
    if (!loaded.ok()) {
      EXPECT_EQ(loaded.code(), StatusCode::kIncompatible);
    }
    const StepOutput answer = Run(*engine, prompt, 8);
    EXPECT_EQ(answer.cached_tokens, window > 40 ? 40 : 0);
    EXPECT_EQ(answer.tokens, alone.tokens);
  }
}

TEST_F(EngineSnapshot, NeedsAPrefixCache) {
  const auto engine = Engine::Create({.model_directory = folder_.path(),
                                      .dtype = DType::kF32,
                                      .threads = 1,
                                      .prefix_cache = false,
                                      .kv_bytes = 4 << 20});
  ASSERT_TRUE(engine.ok());
  EXPECT_EQ((*engine)->SaveSnapshot(contents_, path_).status().code(), StatusCode::kBadState);
  EXPECT_EQ((*engine)->LoadSnapshot(contents_.identity, path_, {}).status().code(),
            StatusCode::kBadState);
}

}  // namespace
}  // namespace quire
