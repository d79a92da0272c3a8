// Engines over models with recurrent layers: what is reused and what is said where it cannot be,
// and how many states are kept. That no schedule can be seen in an answer is shown
// by engine_exactness_test.cc.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <ostream>

#include "engine/engine_impl.h"
#include "model/testing/test_model.h"

namespace quire {
namespace {

using Tokens = std::vector<int32_t>;

class RecurrentEngine : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    model_.architecture = GetParam();
    WriteTestModel(folder_, model_);
  }
  bool has_pages() const { return GetParam() != "Mamba2ForCausalLM"; }
  EngineOptions Options() const {
    return {.model_directory = folder_.path(),
            .dtype = DType::kF32,
            .threads = 1,
            .max_num_sequences = 4,
            .kv_bytes = 4 << 20};
  }
  static std::unique_ptr<Engine> Create(const EngineOptions& options) {
    Result<std::unique_ptr<Engine>> engine = Engine::Create(options);
    EXPECT_TRUE(engine.ok()) << engine.status().ToString();
    return engine.ok() ? *std::move(engine) : nullptr;
  }
  Tokens Random(int64_t count, uint64_t seed) const {
    return RandomTokens(count, model_.vocab_size, seed);
  }

  struct Answer {
    Tokens tokens;
    StepOutput end;
  };
  static Answer Generate(Engine* engine, const Tokens& prompt, int64_t max_tokens) {
    EXPECT_TRUE(engine->Submit(prompt, {.max_tokens = max_tokens, .ignore_eos = true}).ok());
    Answer answer;
    while (!engine->Idle()) {
      Result<std::vector<StepOutput>> outputs = engine->Step();
      EXPECT_TRUE(outputs.ok()) << outputs.status().ToString();
      if (!outputs.ok()) return answer;
      for (StepOutput& output : *outputs) {
        answer.tokens.insert(answer.tokens.end(), output.tokens.begin(), output.tokens.end());
        answer.end = std::move(output);
      }
    }
    static_cast<EngineImpl*>(engine)->CheckInvariants();
    return answer;
  }
  static Tokens Joined(Tokens a, const Tokens& b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
  }

  TestFolder folder_;
  TestModel model_;
};

TEST_P(RecurrentEngine, ReusesWhatIsKeptAndSaysWhatIsNot) {
  const auto engine = Create(Options());
  const auto alone = [&] {
    EngineOptions options = Options();
    options.prefix_cache = false;
    return Create(options);
  }();
  const Tokens prompt = Random(200, 1);
  const Answer first = Generate(engine.get(), prompt, 10);
  EXPECT_EQ(first.end.cached_tokens, 0);
  EXPECT_EQ(first.end.recomputed_tokens, 0);
  // 209 tokens were computed: states at 209, 192, 128 and two before.
  const Tokens turn = Joined(Joined(prompt, first.tokens), Random(5, 2));
  const Answer second = Generate(engine.get(), turn, 10);
  EXPECT_EQ(second.end.cached_tokens, 209);
  EXPECT_EQ(second.end.recomputed_tokens, 0);
  EXPECT_EQ(second.tokens, Generate(alone.get(), turn, 10).tokens);
  const Tokens parted = Joined(Tokens(prompt.begin(), prompt.begin() + 150), Random(9, 3));
  const Answer third = Generate(engine.get(), parted, 10);
  EXPECT_EQ(third.end.cached_tokens, 128);
  EXPECT_EQ(third.end.recomputed_tokens, 22);
  EXPECT_EQ(third.tokens, Generate(alone.get(), parted, 10).tokens);
  EXPECT_EQ(engine->Stats().recomputed_tokens, 22);
}

TEST_P(RecurrentEngine, WhatIsStoppedIsKeptToTheStop) {
  const auto engine = Create(Options());
  const Tokens prompt = Random(40, 4);
  const Result<int64_t> id = engine->Submit(prompt, {.max_tokens = 60, .ignore_eos = true});
  ASSERT_TRUE(id.ok());
  Tokens answer;
  while (answer.size() < 50) {
    const Result<std::vector<StepOutput>> outputs = engine->Step();
    ASSERT_TRUE(outputs.ok()) << outputs.status().ToString();
    for (const StepOutput& output : *outputs) {
      answer.insert(answer.end(), output.tokens.begin(), output.tokens.end());
    }
  }
  ASSERT_TRUE(engine->Stop(*id, 0, 30).ok());
  while (!engine->Idle()) ASSERT_TRUE(engine->Step().ok());
  answer.resize(30);
  const Tokens turn = Joined(Joined(prompt, answer), {1, 2, 3});
  EXPECT_EQ(Generate(engine.get(), turn, 2).end.cached_tokens, 70);
}

TEST_P(RecurrentEngine, OldTextsGiveWayWhenStatesAreShort) {
  EngineOptions options = Options();
  const MemoryPlan none = [&] {
    options.prefix_cache = false;
    return *Engine::PlanMemory(options);
  }();
  options.prefix_cache = true;
  options.state_bytes = 16 << 20;
  const Result<MemoryPlan> plan = Engine::PlanMemory(options);
  ASSERT_TRUE(plan.ok());
  // Both are rounded up to large pages of the machine.
  EXPECT_LE(plan->state_bytes - none.state_bytes, (16 << 20) + (2 << 20));
  EXPECT_GT(plan->state_bytes - none.state_bytes, (16 << 20) - (4 << 20));
  // As few as five states, by halving.
  int64_t slots = 0;
  std::unique_ptr<Engine> engine;
  for (;;) {
    engine = Create(options);
    slots = static_cast<EngineImpl&>(*engine).caches().recurrent()->options().max_retained_slots;
    if (slots <= 5) break;
    options.state_bytes /= 2;
  }
  ASSERT_GE(slots, 1);
  std::vector<Tokens> texts;
  for (uint64_t i = 0; i < 8; ++i) {
    texts.push_back(Random(30, 20 + i));
    texts.back() = Joined(texts.back(), Generate(engine.get(), texts.back(), 4).tokens);
    EXPECT_LE(engine->Stats().retained_states, slots);
    EXPECT_LE(engine->Stats().retained_sequences, slots);
  }
  EXPECT_EQ(engine->Stats().retained_sequences, slots);
  EXPECT_EQ(Generate(engine.get(), Joined(texts[0], {1}), 2).end.cached_tokens, 0);
  EXPECT_EQ(Generate(engine.get(), Joined(texts[7], {1}), 2).end.cached_tokens, 33);
}

TEST_P(RecurrentEngine, SamplesForkFromThePromptsEnd) {
  const auto engine = Create(Options());
  const Tokens prompt = Random(90, 6);
  ASSERT_TRUE(
      engine->Submit(prompt, {.max_tokens = 12, .temperature = 1, .n = 4, .ignore_eos = true})
          .ok());
  std::map<int64_t, Tokens> answers;
  while (!engine->Idle()) {
    const Result<std::vector<StepOutput>> outputs = engine->Step();
    ASSERT_TRUE(outputs.ok()) << outputs.status().ToString();
    for (const StepOutput& output : *outputs) {
      Tokens& answer = answers[output.sample];
      answer.insert(answer.end(), output.tokens.begin(), output.tokens.end());
    }
  }
  // One prompt of 90 tokens, a step of the three other first tokens, ten more.
  EXPECT_LE(engine->Stats().steps, 14);
  EXPECT_EQ(answers.size(), 4U);
  EXPECT_NE(answers[0], answers[1]);
}

// What a window bounds are keys and values.
TEST_P(RecurrentEngine, WindowsAreForAttentionLayers) {
  const auto engine = Create(Options());
  SamplingOptions options{.max_tokens = 300, .ignore_eos = true};
  options.window = 40;
  options.sinks = 3;
  const Result<int64_t> id = engine->Submit(Random(50, 8), options);
  if (!has_pages()) {
    EXPECT_EQ(id.status().code(), StatusCode::kBadArgument);
    EXPECT_NE(id.status().ToString().find("no attention layers"), std::string::npos);
    return;
  }
  ASSERT_TRUE(id.ok()) << id.status().ToString();
  const EngineStats before = engine->Stats();
  int64_t pages = 0;
  while (!engine->Idle()) {
    ASSERT_TRUE(engine->Step().ok());
    pages = std::max(pages, engine->Stats().pages_in_use);
  }
  EXPECT_EQ(engine->Stats().completion_tokens, 300);
  const int64_t max_pop = AttentionKVCacheOptions().max_pop;
  EXPECT_LE(pages, PagesForWindow(40 + max_pop, 3, before.page_size) + 1);
}

TEST_P(RecurrentEngine, WithoutAttentionThereIsNoLongestText) {
  EngineOptions options = Options();
  options.kv_bytes = 200'000;
  const auto engine = Create(options);
  const EngineStats stats = engine->Stats();
  const Result<int64_t> id = engine->Submit(Random(3000, 7), {.max_tokens = 200'000});
  EXPECT_EQ(id.status().code(), has_pages() ? StatusCode::kTooLarge : StatusCode::kOk);
  EXPECT_EQ(stats.pages_total > 0, has_pages());
  EXPECT_EQ(stats.kv_bytes > 0, has_pages());
  if (!id.ok()) return;
  for (int i = 0; i < 8; ++i) ASSERT_TRUE(engine->Step().ok());
  EXPECT_TRUE(engine->Cancel(*id).ok());
  EXPECT_EQ(engine->Stats().pages_in_use, 0);
}

INSTANTIATE_TEST_SUITE_P(Models, RecurrentEngine,
                         testing::Values("Mamba2ForCausalLM", "Qwen3NextForCausalLM"),
                         [](const auto& test) { return test.param; });

}  // namespace
}  // namespace quire
