// Stores and snapshots of models whose sequences cannot be cut anywhere: recurrent layers, whose
// states exist at the borders of chunks, and windows, of which a chunk has what its end sees. What
// another process or a restart finds gives the answer of a cold run, bit for bit.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <ostream>

#include "base/random.h"
#include "engine/engine_impl.h"
#include "model/testing/test_model.h"
#include "store/testing/test_redis.h"

namespace quire {
namespace {

using Tokens = std::vector<int32_t>;

constexpr int64_t kChunk = 32;

struct Variant {
  const char* name;
  TestModel model;
};

void PrintTo(const Variant& variant, std::ostream* out) { *out << variant.name; }

std::vector<Variant> Variants() {
  return {{"Mamba2", {.architecture = "Mamba2ForCausalLM"}},
          {"Qwen3Next", {.architecture = "Qwen3NextForCausalLM"}},
          {"Mistral", {.architecture = "MistralForCausalLM", .extra = {{"sliding_window", 12}}}},
          {"Gemma2",
           {.architecture = "Gemma2ForCausalLM",
            .tie_word_embeddings = true,
            .extra = {{"sliding_window", 40}, {"query_pre_attn_scalar", 24}}}},
          {"Gemma3",
           {.architecture = "Gemma3ForCausalLM",
            .num_hidden_layers = 3,
            .tie_word_embeddings = true,
            .extra = {{"sliding_window", 12},
                      {"sliding_window_pattern", 3},
                      {"query_pre_attn_scalar", 24},
                      {"rope_scaling", {{"rope_type", "linear"}, {"factor", 4.0}}}}}}};
}

class EngineBorders : public testing::TestWithParam<Variant> {
 protected:
  void SetUp() override {
    WriteTestModel(folder_, GetParam().model);
    contents_.identity.model = "test";
    contents_.identity.block_tokens = kChunk;
  }

  // An engine; another process is another engine over another store of the same folder.
  std::unique_ptr<EngineImpl> Create(int64_t page_size = 16, bool prefix_cache = true) const {
    EngineOptions options;
    options.model_directory = folder_.path();
    options.dtype = DType::kF32;
    options.threads = 1;
    options.max_num_sequences = 4;
    options.page_size = page_size;
    options.kv_bytes = 4 << 20;
    options.prefill_chunk = 100;
    options.prefix_cache = prefix_cache;
    auto engine = Engine::Create(options);
    EXPECT_TRUE(engine.ok()) << engine.status().ToString();
    return std::unique_ptr<EngineImpl>(static_cast<EngineImpl*>(engine->release()));
  }
  std::shared_ptr<ChunkStore> Open(const std::string& redis = "") const {
    ChunkStoreOptions options;
    if (redis.empty()) {
      options.disk.directory = folder_.File("store");
    } else {
      options.redis = {.endpoints = redis, .connect_timeout_ms = 30'000, .io_timeout_ms = 30'000};
    }
    Result<std::unique_ptr<ChunkStore>> store = ChunkStore::Open(options);
    EXPECT_TRUE(store.ok()) << store.status().ToString();
    return *std::move(store);
  }
  std::unique_ptr<EngineImpl> WithStore(const std::shared_ptr<ChunkStore>& store,
                                        int64_t page_size = 16) const {
    auto engine = Create(page_size);
    const Status attached = engine->AttachStore(
        store, contents_.identity,
        {.chunk_tokens = kChunk, .load_timeout_ms = 60'000, .load_always = true});
    EXPECT_TRUE(attached.ok()) << attached.ToString();
    return engine;
  }
  Tokens Random(int64_t count, uint64_t seed) const {
    return RandomTokens(count, GetParam().model.vocab_size, seed);
  }

  // The answer to a prompt, alone.
  static StepOutput Generate(EngineImpl& engine, const Tokens& prompt, int64_t max_tokens) {
    StepOutput answer;
    EXPECT_TRUE(
        engine.Submit(prompt, {.max_tokens = max_tokens, .logprobs = 0, .ignore_eos = true}).ok());
    while (!engine.Idle()) {
      const auto outputs = engine.Step();
      EXPECT_TRUE(outputs.ok()) << outputs.status().ToString();
      if (!outputs.ok()) return answer;
      engine.CheckInvariants();
      for (const StepOutput& output : *outputs) {
        answer.tokens.insert(answer.tokens.end(), output.tokens.begin(), output.tokens.end());
        answer.logprobs.insert(answer.logprobs.end(), output.logprobs.begin(),
                               output.logprobs.end());
        answer.cached = output.cached;
        answer.cached_tokens = output.cached_tokens;
        answer.miss = output.miss;
      }
    }
    return answer;
  }
  StepOutput Cold(const Tokens& prompt, int64_t max_tokens) const {
    return Generate(*Create(16, false), prompt, max_tokens);
  }
  static void ExpectSame(const StepOutput& got, const StepOutput& want) {
    EXPECT_EQ(got.tokens, want.tokens);
    ASSERT_EQ(got.logprobs.size(), want.logprobs.size());
    for (size_t i = 0; i < got.logprobs.size(); ++i)
      EXPECT_EQ(got.logprobs[i][0].logprob, want.logprobs[i][0].logprob) << i;
  }
  // Computes a prompt and its answer into the store.
  void Store(const Tokens& prompt, int64_t max_tokens, const std::string& redis = "") const {
    const auto store = Open(redis);
    const auto engine = WithStore(store);
    ExpectSame(Generate(*engine, prompt, max_tokens), Cold(prompt, max_tokens));
    const Status flushed = engine->FlushStore(60'000);
    EXPECT_TRUE(flushed.ok()) << flushed.ToString();
    EXPECT_EQ(engine->Stats().refused_chunks, 0);
  }
  static int64_t FromTier(const StepOutput& answer, TierKind tier) {
    return answer.cached.tiers[static_cast<size_t>(tier)];
  }

  TestFolder folder_;
  SnapshotContents contents_;
};

TEST_P(EngineBorders, AnotherProcessStartsBehindWhatOneHasComputed) {
  const Tokens prompt = Random(150, 1);
  Store(prompt, 60);
  const StepOutput cold = Cold(prompt, 60);
  for (const int64_t page_size : {5, 16}) {
    const StepOutput again = Generate(*WithStore(Open(), page_size), prompt, 60);
    ExpectSame(again, cold);
    EXPECT_EQ(FromTier(again, TierKind::kDisk), 149) << "word for word, but its last token";
    EXPECT_EQ(again.miss, MissReason::kNone);
  }
  // The conversation goes on: of 209 tokens whose KV was needed six chunks are whole.
  Tokens turn = prompt;
  turn.insert(turn.end(), cold.tokens.begin(), cold.tokens.end());
  const Tokens more = Random(9, 2);
  turn.insert(turn.end(), more.begin(), more.end());
  const StepOutput next = Generate(*WithStore(Open()), turn, 20);
  ExpectSame(next, Cold(turn, 20));
  EXPECT_EQ(FromTier(next, TierKind::kDisk), 192);
  // It parts from the stored one: the chunks in common are found.
  Tokens parted(prompt.begin(), prompt.begin() + 100);
  parted.insert(parted.end(), more.begin(), more.end());
  const StepOutput other = Generate(*WithStore(Open()), parted, 20);
  ExpectSame(other, Cold(parted, 20));
  EXPECT_EQ(FromTier(other, TierKind::kDisk), 96);
}

TEST_P(EngineBorders, WhatMemoryHasUpToABorderIsForked) {
  const Tokens prompt = Random(150, 1);
  Store(prompt, 2);
  const auto engine = WithStore(Open());
  const Tokens beginning(prompt.begin(), prompt.begin() + 65);
  Generate(*engine, beginning, 1);
  const StepOutput answer = Generate(*engine, prompt, 8);
  ExpectSame(answer, Cold(prompt, 8));
  EXPECT_EQ(answer.cached_tokens, 149);
  // With recurrent layers the state at 64 is a checkpoint; with windows it depends on their pages.
  if (engine->caches().state().is_recurrent()) {
    EXPECT_EQ(answer.cached.memory, 64);
    EXPECT_EQ(FromTier(answer, TierKind::kDisk), 149 - 64);
  }
}

// The last sound border counts, and what is not needed there may be damaged.
TEST_P(EngineBorders, DamagedChunksFallBack) {
  const Tokens prompt = Random(150, 3);
  Store(prompt, 2);
  const StepOutput cold = Cold(prompt, 8);
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder_.File("store"))) {
    if (entry.is_regular_file() && entry.file_size() > 1000) files.push_back(entry.path());
  }
  ASSERT_GE(files.size(), 5U);
  RandomSequence random(5);
  for (int round = 0; round < 10; ++round) {
    SCOPED_TRACE(round);
    const auto& file = files[static_cast<size_t>(random.Below(static_cast<int64_t>(files.size())))];
    if (std::filesystem::exists(file)) {
      std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
      const int64_t at = random.Below(static_cast<int64_t>(std::filesystem::file_size(file)));
      stream.seekg(at);
      const char byte = static_cast<char>(stream.get() ^ (1 << random.Below(8)));
      stream.seekp(at);
      stream.put(byte);
    }
    const auto engine = WithStore(Open());
    const StepOutput answer = Generate(*engine, prompt, 8);
    ExpectSame(answer, cold);
    const int64_t found = answer.cached_tokens;
    EXPECT_TRUE(found == 149 || found % kChunk == 0) << found;
    ASSERT_TRUE(engine->FlushStore(60'000).ok());
  }
}

TEST_P(EngineBorders, ManyAtATimeAreAsEachAlone) {
  const Tokens prompt = Random(150, 4);
  Store(prompt, 30);
  const auto engine = WithStore(Open());
  std::vector<Tokens> prompts;
  std::vector<StepOutput> want;
  for (const int64_t common : {150, 97, 40, 10}) {
    prompts.emplace_back(prompt.begin(), prompt.begin() + common);
    prompts.back().push_back(static_cast<int32_t>(common % 100));
    want.push_back(Cold(prompts.back(), 12));
    ASSERT_TRUE(
        engine->Submit(prompts.back(), {.max_tokens = 12, .n = 2, .ignore_eos = true}).ok());
  }
  std::map<std::pair<int64_t, int64_t>, Tokens> answers;
  while (!engine->Idle()) {
    const auto outputs = engine->Step();
    ASSERT_TRUE(outputs.ok()) << outputs.status().ToString();
    engine->CheckInvariants();
    for (const StepOutput& output : *outputs) {
      Tokens& answer = answers[{output.request_id, output.sample}];
      answer.insert(answer.end(), output.tokens.begin(), output.tokens.end());
    }
  }
  for (int64_t id = 0; id < 4; ++id) {
    for (const int64_t sample : {0, 1})
      EXPECT_EQ((answers[{id, sample}]), want[static_cast<size_t>(id)].tokens) << id;
  }
  EXPECT_GE(engine->Stats().cached_tokens, 128 + 96 + 32);
}

TEST_P(EngineBorders, RedisGivesItToo) {
  if (!HaveRedisServer()) GTEST_SKIP() << "redis-server is not installed; tools/setup.sh does it";
  RedisServer server;
  const Tokens prompt = Random(150, 6);
  Store(prompt, 3, server.tcp());
  const StepOutput answer = Generate(*WithStore(Open(server.tcp()), 5), prompt, 20);
  ExpectSame(answer, Cold(prompt, 20));
  EXPECT_EQ(FromTier(answer, TierKind::kRedis), 149);
}

TEST_P(EngineBorders, SnapshotsGoOnInAnotherEngine) {
  const std::string path = folder_.File("snapshot");
  const auto writer = Create();
  const Tokens prompt = Random(70, 7);
  const StepOutput answer = Generate(*writer, prompt, 9);
  contents_.tokens = prompt;
  contents_.tokens.insert(contents_.tokens.end(), answer.tokens.begin(), answer.tokens.end());
  const Result<int64_t> saved = writer->SaveSnapshot(contents_, path);
  ASSERT_TRUE(saved.ok()) << saved.status().ToString();
  EXPECT_EQ(*saved, 78);
  writer->CheckInvariants();
  Tokens text = contents_.tokens;
  text.push_back(5);
  const StepOutput cold = Cold(text, 30);
  for (const int64_t page_size : {16, 5}) {
    const auto reader = Create(page_size);
    const auto info = reader->LoadSnapshot(contents_.identity, path, {});
    ASSERT_TRUE(info.ok()) << info.status().ToString();
    reader->CheckInvariants();
    EXPECT_EQ(info->tokens.size(), 78U);
    EXPECT_EQ(info->version, 2);
    EXPECT_EQ(info->state_bytes > 0, reader->caches().state().is_recurrent());
    const StepOutput warm = Generate(*reader, text, 30);
    ExpectSame(warm, cold);
    EXPECT_EQ(warm.cached_tokens, 78);
  }
  const auto verified = VerifySnapshot(path);
  EXPECT_TRUE(verified.ok()) << verified.status().ToString();
  // One bit of the state of a recurrent layer, or of the rows that are held.
  std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
  const auto size = static_cast<int64_t>(std::filesystem::file_size(path));
  file.seekp(size - 100).put('\x7f');
  file.close();
  const auto reader = Create();
  if (reader->caches().state().is_recurrent()) {
    EXPECT_EQ(reader->LoadSnapshot(contents_.identity, path, {}).status().code(),
              StatusCode::kCorrupt);
  }
  reader->CheckInvariants();
}

INSTANTIATE_TEST_SUITE_P(Models, EngineBorders, testing::ValuesIn(Variants()),
                         [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace quire
