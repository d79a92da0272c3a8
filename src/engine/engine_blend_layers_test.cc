// Documents of blended prompts that come out of a store layer by layer, into the forward that moves
// them: the bits are those of documents that were there before, whatever fails or is late, in any
// company, with few pages.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "engine/testing/blended_prompts.h"
#include "engine/testing/fake_chunk_store.h"

namespace quire {
namespace {

constexpr int64_t kMs = 1'000'000;
constexpr int64_t kLayerNs = 10 * kMs;
constexpr int64_t kTimeoutMs = 100;
constexpr int64_t kChunk = 24;

class EngineBlendLayers : public BlendingEngines {
 protected:
  void SetUp() override {
    BlendingEngines::SetUp();
    const auto writer = Attached(Options(), true);
    for (const size_t i : {0, 1, 2}) {
      Tokens alone = AskAbout({i}).prompt;
      alone.resize(alone.size() - question_.size());
      Generate(writer.get(), alone, {.max_tokens = 0});
    }
    ASSERT_TRUE(writer->FlushStore(1000).ok());
    known_ = Generate(Attached(Options()).get(), prompt_.prompt, Blend(prompt_, 0.2));
    ASSERT_TRUE(known_.blend);
    ASSERT_EQ(known_.blend->moved_tokens, 17 + 61);
    ASSERT_LE(known_.blend->learned_tokens, has_windows() ? 3 : 2) << "the last token of each";
    const auto& loaded = known_.blend->loaded_tokens;
    ASSERT_GE(std::accumulate(loaded.begin(), loaded.end(), int64_t{0}), 17 + 61);
    ASSERT_EQ(known_.blend->miss, MissReason::kNone);
    ASSERT_EQ(known_.bits, Generate(Create().get(), prompt_.prompt, Blend(prompt_, 0.2)).bits);
  }
  std::unique_ptr<Engine> Attached(const EngineOptions& options, bool write = false) const {
    Passport identity;
    identity.model = "test";
    auto engine = Create(options);
    const StoreUseOptions use{.chunk_tokens = kChunk,
                              .load_timeout_ms = kTimeoutMs,
                              .load_always = true,
                              .write = write,
                              .clock = clock_};
    EXPECT_TRUE(engine->AttachStore(store_, identity, use).ok());
    return engine;
  }
  Question AskAbout(const std::vector<size_t>& order, uint64_t question = 5) const {
    Question asked{.prompt = RandomTokens(5, kVocab, 4), .documents = {}};
    for (const size_t i : order) {
      const auto begin = std::ssize(asked.prompt);
      asked.prompt.insert(asked.prompt.end(), documents_[i].begin(), documents_[i].end());
      asked.documents.push_back({begin, std::ssize(asked.prompt)});
    }
    const Tokens rest = question == 5 ? question_ : RandomTokens(6, kVocab, question);
    asked.prompt.insert(asked.prompt.end(), rest.begin(), rest.end());
    return asked;
  }
  // What a window hides is in no chunk, so such documents come whole.
  bool has_windows() const { return GetParam().model.architecture == "Gemma2ForCausalLM"; }
  void ExpectKnown(const Outcome& outcome) const {
    ASSERT_EQ(outcome.reason, FinishReason::kLength) << outcome.error;
    ASSERT_TRUE(outcome.blend);
    EXPECT_EQ(outcome.blend->moved_tokens, known_.blend->moved_tokens);
    EXPECT_EQ(outcome.blend->recomputed_tokens, known_.blend->recomputed_tokens);
    EXPECT_EQ(outcome.bits, known_.bits);
    EXPECT_EQ(store_->live_fetches, 0);
  }

  const std::shared_ptr<FakeClock> clock_ = std::make_shared<FakeClock>();
  const std::shared_ptr<FakeChunkStore> store_ = std::make_shared<FakeChunkStore>(clock_);
  // Behind the anchor of 5 tokens: a shorter chunk, two and a shorter one, three whole ones.
  const std::vector<Tokens> documents_ = {RandomTokens(kChunk - 7, kVocab, 1),
                                          RandomTokens(2 * kChunk + 13, kVocab, 2),
                                          RandomTokens(3 * kChunk - 5, kVocab, 3)};
  const Tokens question_ = RandomTokens(6, kVocab, 5);
  const Question prompt_ = AskAbout({2, 0, 1});
  Outcome known_;
};

INSTANTIATE_TEST_SUITE_P(Models, EngineBlendLayers, testing::ValuesIn(Variants()),
                         [](const auto& variant) { return std::string(variant.param.name); });

TEST_P(EngineBlendLayers, TheForwardThatTakesThemMovesThem) {
  store_->layer_ns = kLayerNs;
  const auto engine = Attached(Options());
  const int64_t start_ns = clock_->SteadyNs();
  const Result<int64_t> id = engine->Submit(prompt_.prompt, Blend(prompt_, 0.2));
  ASSERT_TRUE(id.ok());
  Outcomes outcomes;
  while (engine->Stats().layer_loads == 0) {
    ASSERT_FALSE(engine->Idle());
    Step(engine.get(), &outcomes);
    if (HasFatalFailure()) return;
  }
  if (!has_windows()) {
    const EngineStats stats = engine->Stats();
    EXPECT_EQ(stats.layer_loads, 3) << "the prompt's own beginning and two documents";
    EXPECT_EQ(stats.blend_moved_tokens, known_.blend->moved_tokens) << "in the same forward";
  }
  while (!engine->Idle()) {
    Step(engine.get(), &outcomes);
    if (HasFatalFailure()) return;
  }
  EXPECT_EQ(clock_->SteadyNs() - start_ns, 4 * kLayerNs) << "each layer is waited for once";
  const Outcome& outcome = outcomes[{*id, 0}];
  ExpectKnown(outcome);
  EXPECT_EQ(outcome.blend->learned_tokens, known_.blend->learned_tokens);
  EXPECT_EQ(outcome.blend->exact_tokens, known_.blend->exact_tokens);
  EXPECT_EQ(outcome.blend->moved_bytes, known_.blend->moved_bytes);
  EXPECT_GT(outcome.blend->wait_seconds, 0);
  EXPECT_LE(outcome.blend->wait_seconds, outcome.times.queue_seconds);
  EXPECT_EQ(store_->cancelled, 0);
  // The documents are in pages now.
  store_->fetch_fault = [] { return Status(StatusCode::kUnavailable, "injected"); };
  const Question other = AskAbout({1, 0, 2}, 77);
  const Outcome again = Generate(engine.get(), other.prompt, Blend(other, 0.2));
  EXPECT_EQ(again.blend->learned_tokens, 0);
  EXPECT_EQ(again.bits, Generate(Create().get(), other.prompt, Blend(other, 0.2)).bits);
}

TEST_P(EngineBlendLayers, ALayerThatDoesNotComeMakesTheDocumentComputed) {
  store_->layer_ns = kLayerNs;
  for (const StatusCode code : {StatusCode::kTimeout, StatusCode::kCorrupt,
                                StatusCode::kUnavailable, StatusCode::kOutOfMemory}) {
    for (int64_t failing = 0; failing < 4; ++failing) {
      SCOPED_TRACE(std::string(StatusCodeName(code)) + " of layer " + std::to_string(failing));
      store_->layer_fault = [code, failing](int64_t layer) {
        return layer < failing ? Status() : Status(code, "injected");
      };
      const auto engine = Attached(Options());
      const Outcome outcome = Generate(engine.get(), prompt_.prompt, Blend(prompt_, 0.2));
      ExpectKnown(outcome);
      // No forward begins without the layers in which rows are selected.
      if (failing < 2 || has_windows()) continue;
      EXPECT_GT(outcome.blend->learned_tokens, 17 + 61) << "anchors and documents";
      EXPECT_EQ(engine->Stats().layer_loads, 0);
    }
  }
}

TEST_P(EngineBlendLayers, ALayerThatIsLateCostsTheDeadlineAndNoMore) {
  store_->layer_ns = 30 * kMs;  // the last one is late
  const auto engine = Attached(Options());
  const int64_t start_ns = clock_->SteadyNs();
  const Outcome outcome = Generate(engine.get(), prompt_.prompt, Blend(prompt_, 0.2));
  ExpectKnown(outcome);
  EXPECT_EQ(clock_->SteadyNs() - start_ns, kTimeoutMs * kMs);
  EXPECT_GT(outcome.blend->learned_tokens, 17 + 61);
  EXPECT_GE(engine->Stats().misses[static_cast<size_t>(MissReason::kTimeout)], 3);
}

// The store says that a layer is there, and its bytes are wrong.
TEST_P(EngineBlendLayers, ADamagedLayerIsNotMoved) {
  store_->layer_ns = kLayerNs;
  int64_t computed = 0;
  for (int64_t damaged = 0; damaged < 7; ++damaged) {
    SCOPED_TRACE(damaged);
    int64_t asked = 0;
    store_->is_damaged = [&] { return asked++ == damaged; };  // in its last layer
    const auto engine = Attached(Options());
    const Outcome outcome = Generate(engine.get(), prompt_.prompt, Blend(prompt_, 0.2));
    ExpectKnown(outcome);
    const bool is_computed = outcome.blend->learned_tokens > known_.blend->learned_tokens;
    computed += is_computed ? 1 : 0;
    EXPECT_EQ(outcome.blend->miss, is_computed ? MissReason::kCorrupt : MissReason::kNone);
  }
  EXPECT_GE(computed, 3) << "each chunk of the two documents that is needed";
}

// Blended and exact prompts at once, cancelled ones among them, over a store that fails at random.
TEST_P(EngineBlendLayers, SchedulesOverAFailingStoreAreAsEachAlone) {
  struct Job {
    Tokens prompt;
    SamplingOptions options;
    Bits alone;
  };
  std::vector<Job> jobs;
  const std::vector<std::vector<size_t>> orders = {{2, 0, 1}, {2, 1, 0}, {0, 1, 2},
                                                   {1, 2, 0}, {2, 0},    {0, 2, 1, 0}};
  for (const std::vector<size_t>& order : orders) {
    const Question asked = AskAbout(order, 50 + jobs.size());
    jobs.push_back({asked.prompt, Blend(asked, 0.2), {}});
  }
  jobs.push_back({RandomTokens(70, kVocab, 60), Exact(20), {}});
  for (Job& job : jobs) job.alone = Generate(Create().get(), job.prompt, job.options).bits;
  int64_t compared = 0;
  int64_t layer_loads = 0;
  for (uint64_t seed = 0; seed < 8; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    RandomSequence random(seed, 3);
    store_->layer_ns = kLayerNs;
    if (seed % 4 != 0) {
      store_->layer_fault = [&](int64_t) {
        return random.Below(40) == 0 ? Status(StatusCode::kUnavailable, "injected") : Status();
      };
      store_->is_damaged = [&] { return random.Below(12) == 0; };
    }
    EngineOptions options = Options();
    options.max_num_sequences = 4 + random.Below(6);
    options.prefill_chunk = 5 + random.Below(60);
    const auto engine = Attached(options);
    Outcomes outcomes;
    std::map<int64_t, size_t> job_of;
    RunSchedule(engine.get(), jobs, 10, 10, &random, &outcomes, &job_of);
    if (HasFatalFailure()) return;
    for (const auto& [key, outcome] : outcomes) {
      SCOPED_TRACE("request " + std::to_string(key.first));
      ASSERT_NE(outcome.reason, FinishReason::kError) << outcome.error;
      Bits want = jobs[job_of.at(key.first)].alone;
      if (outcome.reason == FinishReason::kCancelled) want.resize(outcome.bits.size());
      EXPECT_EQ(outcome.bits, want);
      compared += outcome.reason == FinishReason::kLength ? 1 : 0;
    }
    layer_loads += engine->Stats().layer_loads;
    EXPECT_EQ(store_->live_fetches, 0);
    store_->layer_fault = nullptr;
    store_->is_damaged = nullptr;
  }
  EXPECT_GT(compared, 30);
  EXPECT_GT(layer_loads, 5);
}

// Pages for the prompt and a little more, while a layer fails behind the selection or none does:
// the prompt gives its pages back to what learns its documents. Nothing hangs and nothing fails.
TEST_P(EngineBlendLayers, WithFewPagesThePromptMakesRoomForItsDocuments) {
  store_->layer_ns = kLayerNs;
  const int64_t page_bytes = Engine::PlanMemory(Options())->page_bytes;
  const Bits full = Generate(Create().get(), prompt_.prompt, Exact()).bits;
  int64_t as_known = 0;
  for (const bool fails : {false, true}) {
    store_->layer_fault = [fails](int64_t layer) {
      return fails && layer == 3 ? Status(StatusCode::kUnavailable, "injected") : Status();
    };
    for (int64_t pages = 11; pages < 21; ++pages) {
      SCOPED_TRACE(std::to_string(pages) + (fails ? " pages, a layer fails" : " pages"));
      EngineOptions options = Options();
      options.kv_bytes = pages * page_bytes;
      const auto engine = Attached(options);
      const Outcome outcome = Generate(engine.get(), prompt_.prompt, Blend(prompt_, 0.2));
      ASSERT_EQ(outcome.reason, FinishReason::kLength) << outcome.error;
      if (outcome.blend->moved_tokens == known_.blend->moved_tokens) {
        ++as_known;
        EXPECT_EQ(outcome.bits, known_.bits);
      } else if (!outcome.blend->approximate) {
        EXPECT_EQ(outcome.bits, full);
      }
    }
  }
  EXPECT_GE(as_known, 4);
}

}  // namespace
}  // namespace quire
