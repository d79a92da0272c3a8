// Models with windows: what they hold, and that what slid changes no bit.
#include <gtest/gtest.h>

#include <cstring>

#include "model/testing/test_model.h"

namespace quire {
namespace {

constexpr int64_t kWindow = 40;
constexpr int64_t kPageSize = 16;
constexpr int64_t kChunk = 32;
constexpr int64_t kLength = 400;

TestModel Mistral() {
  return {.architecture = "MistralForCausalLM", .extra = {{"sliding_window", kWindow}}};
}

// One local and one global layer.
TestModel Gemma2() {
  return {.architecture = "Gemma2ForCausalLM",
          .tie_word_embeddings = true,
          .extra = {{"sliding_window", kWindow}, {"query_pre_attn_scalar", 24}}};
}

// Two local layers with a RoPE of their own, and a global one.
TestModel Gemma3() {
  return {.architecture = "Gemma3ForCausalLM",
          .num_hidden_layers = 3,
          .tie_word_embeddings = true,
          .extra = {{"sliding_window", kWindow},
                    {"sliding_window_pattern", 3},
                    {"query_pre_attn_scalar", 24}}};
}

struct Loaded {
  explicit Loaded(const TestModel& test_model) {
    WriteTestModel(folder, test_model);
    model = LoadTestModel(folder, DType::kF32);
    cache = CreateTestCache(*model, {.page_size = kPageSize});
    tokens = RandomTokens(kLength, model->info().vocab_size, 5);
  }
  std::vector<float> Run(int64_t seq_id, int64_t begin, int64_t end) {
    return RunForward(
        *model, *cache, seq_id,
        std::span(tokens).subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin)));
  }

  TestFolder folder;
  std::unique_ptr<Model> model;
  std::unique_ptr<AttentionKVCache> cache;
  std::vector<int32_t> tokens;
};

TEST(WindowedModel, LocalLayersHoldTheWindowOnly) {
  struct Case {
    TestModel model;
    int64_t global_groups;
  };
  for (const Case& test : {Case{Mistral(), 0}, Case{Gemma2(), 1}, Case{Gemma3(), 1}}) {
    SCOPED_TRACE(test.model.architecture);
    Loaded loaded(test.model);
    // The window's tokens, and those kept for pops, lie in one page more than they fill.
    const int64_t local_max = (kWindow + loaded.cache->options().max_pop - 1) / kPageSize + 2;
    for (int64_t begin = 0; begin < kLength; begin += kChunk) {
      const int64_t end = std::min(begin + kChunk, kLength);
      loaded.Run(1, begin, end);
      const int64_t all = (end + kPageSize - 1) / kPageSize;
      EXPECT_LE(loaded.cache->pages_in_use(), local_max + test.global_groups * all) << end;
      EXPECT_GE(loaded.cache->pages_in_use(),
                std::min(all, kWindow / kPageSize) + test.global_groups * all)
          << end;
    }
    EXPECT_TRUE(loaded.cache->CheckInvariants().ok());
  }
}

TEST(WindowedModel, CutsOfThePromptChangeNoBit) {
  for (const TestModel& test_model : {Mistral(), Gemma2(), Gemma3()}) {
    SCOPED_TRACE(test_model.architecture);
    Loaded loaded(test_model);
    const std::vector<float> whole = loaded.Run(0, 0, kLength);
    for (const int64_t chunk : {int64_t{7}, kChunk, kWindow, int64_t{211}}) {
      std::vector<float> cut;
      for (int64_t begin = 0; begin < kLength; begin += chunk) {
        const std::vector<float> part = loaded.Run(chunk, begin, std::min(begin + chunk, kLength));
        cut.insert(cut.end(), part.begin(), part.end());
      }
      ASSERT_EQ(cut.size(), whole.size());
      EXPECT_EQ(0, std::memcmp(cut.data(), whole.data(), whole.size() * sizeof(float))) << chunk;
    }
  }
}

TEST(WindowedModel, ForksWhereTheWindowIsHeldGiveTheSameBits) {
  Loaded loaded(Gemma3());
  const std::vector<float> whole = loaded.Run(0, 0, kLength);
  const int64_t vocab = loaded.model->info().vocab_size;
  EXPECT_FALSE(loaded.cache->CanFork(0, kLength / 2));
  EXPECT_FALSE(loaded.cache->ForkSequence(0, 9, kLength / 2).ok());
  loaded.Run(1, 0, 200);
  int64_t legal = 0;
  for (int64_t position = 0; position <= 200; ++position) {
    const bool can_fork = loaded.cache->CanFork(1, position);
    EXPECT_EQ(loaded.cache->ForkSequence(1, 2, position).ok(), can_fork) << position;
    if (!can_fork) continue;
    ++legal;
    const std::vector<float> rest = loaded.Run(2, position, 220);
    EXPECT_EQ(
        0, std::memcmp(rest.data(), whole.data() + position * vocab, rest.size() * sizeof(float)))
        << position;
    EXPECT_TRUE(loaded.cache->RemoveSequence(2).ok());
  }
  EXPECT_GE(legal, 2);
  // 0, and back to where the first page begins of the window and of what is kept for pops.
  EXPECT_LE(legal, 1 + kPageSize + 1 + loaded.cache->options().max_pop);
  EXPECT_FALSE(loaded.cache->CanFork(1, 201));
  EXPECT_FALSE(loaded.cache->CanFork(1, -1));
  EXPECT_FALSE(loaded.cache->CanFork(7, 0));
}

TEST(WindowedModel, LocalLayersTurnWithTheirOwnRope) {
  Loaded loaded(Gemma3());
  const std::vector<AttentionLayerSpec>& layers = loaded.model->info().layers;
  ASSERT_TRUE(layers[0].rope.has_value());
  EXPECT_EQ(layers[0].rope->theta, 1e4);
  EXPECT_EQ(layers[0].window, kWindow);
  EXPECT_FALSE(layers[2].rope.has_value());
  EXPECT_EQ(layers[2].window, 0);
  EXPECT_EQ(loaded.model->info().rope.theta, 1e6);
  const std::vector<float> two_ropes = loaded.Run(0, 0, 30);
  AttentionKVCacheOptions options = loaded.cache->options();
  for (AttentionLayerSpec& layer : options.layers) layer.rope.reset();
  loaded.cache = *AttentionKVCache::Create(options);
  EXPECT_NE(loaded.Run(0, 0, 30), two_ropes);
}

TEST(LayerRope, HasModeAndPairingOfTheCache) {
  Loaded loaded(Gemma3());
  const auto refused = [&](const RopeOptions& rope, const std::string& why) {
    AttentionKVCacheOptions options = loaded.cache->options();
    options.layers[1].rope = rope;
    const auto cache = AttentionKVCache::Create(options);
    ASSERT_FALSE(cache.ok());
    EXPECT_EQ(cache.status().code(), StatusCode::kBadArgument);
    EXPECT_NE(cache.status().message().find("layers[1].rope: its " + why), std::string::npos)
        << cache.status().ToString();
  };
  RopeOptions rope = loaded.model->info().rope;
  rope.mode = RopeMode::kInline;
  refused(rope, "mode");
  rope = loaded.model->info().rope;
  rope.pairing = RopePairing::kInterleaved;
  refused(rope, "pairing");
  rope = loaded.model->info().rope;
  rope.scaling = RopeScaling::kLongRope;
  refused(rope, "scaling");
}

}  // namespace
}  // namespace quire
