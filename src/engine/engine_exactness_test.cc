// The promise of exactness on whole engines over real models: whatever is submitted, cancelled,
// stopped and preempted around a request, its tokens and the logprobs behind them are those of the
// request alone, bit for bit. Schedules are drawn at random; a failure names the seed.
#include <gtest/gtest.h>

#include <array>
#include <map>
#include <ostream>

#include "base/random.h"
#include "base/testing/soak.h"
#include "engine/engine_impl.h"
#include "engine/testing/fake_chunk_store.h"
#include "model/testing/test_model.h"

namespace quire {
namespace {

using Tokens = std::vector<int32_t>;

// Short enough that requests of the schedules lie on both sides of it.
constexpr int64_t kOriginalLength = 40;

constexpr int64_t kWindow = 20;

TestModel DynamicModel() {
  TestModel model;
  model.extra = {{"max_position_embeddings", kOriginalLength},
                 {"rope_scaling", {{"type", "dynamic"}, {"factor", 4.0}}}};
  return model;
}

struct Variant {
  std::string name;
  TestModel model;
  DType dtype;
};

void PrintTo(const Variant& variant, std::ostream* out) { *out << variant.name; }

std::vector<Variant> Variants() {
  std::vector<Variant> variants;
  const auto add = [&](const std::string& name, const TestModel& model) {
    variants.push_back({name + "Float32", model, DType::kF32});
    variants.push_back({name + "Bfloat16", model, DType::kBF16});
  };
  add("Llama", {});
  add("Mistral", {.architecture = "MistralForCausalLM", .num_key_value_heads = 1});
  add("Qwen2", {.architecture = "Qwen2ForCausalLM", .tie_word_embeddings = true});
  add("Qwen3", {.architecture = "Qwen3ForCausalLM", .head_dim = 12, .dtype = DType::kBF16});
  add("LongRope", LongRopeModel(kOriginalLength));
  // Windows that requests of the schedules slide out of, in all layers and in some.
  add("MistralWindow",
      {.architecture = "MistralForCausalLM", .extra = {{"sliding_window", kWindow}}});
  add("Gemma2", {.architecture = "Gemma2ForCausalLM",
                 .tie_word_embeddings = true,
                 .extra = {{"sliding_window", kWindow}, {"query_pre_attn_scalar", 24}}});
  add("Gemma3", {.architecture = "Gemma3ForCausalLM",
                 .num_hidden_layers = 3,
                 .tie_word_embeddings = true,
                 .extra = {{"sliding_window", kWindow},
                           {"sliding_window_pattern", 3},
                           {"query_pre_attn_scalar", 24},
                           {"rope_scaling", {{"rope_type", "linear"}, {"factor", 4.0}}}}});
  // Recurrent layers alone, and with attention and experts.
  add("Mamba2", {.architecture = "Mamba2ForCausalLM"});
  add("Qwen3Next", {.architecture = "Qwen3NextForCausalLM"});
  // Latent attention and experts.
  add("DeepseekV3", {.architecture = "DeepseekV3ForCausalLM"});
  add("Qwen3Moe", {.architecture = "Qwen3MoeForCausalLM"});
  return variants;
}

struct Job {
  Tokens prompt;
  SamplingOptions options;
};

struct Answer {
  Tokens tokens;
  std::vector<std::vector<TokenLogprob>> logprobs;
  FinishReason reason = FinishReason::kNone;
};
using Answers = std::map<std::pair<int64_t, int64_t>, Answer>;  // by (request, sample)

// An answer up to `length` tokens, in a form whose == compares bits. (Logprobs are never NaN, and
// 0 and -0 do not both come out of the same sum.)
using Bits = std::vector<std::pair<int32_t, std::vector<std::pair<int32_t, float>>>>;
Bits BitsOf(const Answer& answer, size_t length) {
  Bits bits;
  for (size_t i = 0; i < std::min(length, answer.tokens.size()); ++i) {
    auto& entry = bits.emplace_back(answer.tokens[i], std::vector<std::pair<int32_t, float>>());
    if (i >= answer.logprobs.size()) continue;
    for (const TokenLogprob& logprob : answer.logprobs[i]) {
      entry.second.emplace_back(logprob.token, logprob.logprob);
    }
  }
  return bits;
}

// One step; its outputs go into `answers`.
void Step(Engine* engine, Answers* answers) {
  Result<std::vector<StepOutput>> outputs = engine->Step();
  ASSERT_TRUE(outputs.ok()) << outputs.status().ToString();
  for (StepOutput& output : *outputs) {
    Answer& answer = (*answers)[{output.request_id, output.sample}];
    ASSERT_EQ(answer.reason, FinishReason::kNone) << "an output behind the end";
    answer.tokens.insert(answer.tokens.end(), output.tokens.begin(), output.tokens.end());
    answer.logprobs.insert(answer.logprobs.end(), output.logprobs.begin(), output.logprobs.end());
    answer.reason = output.finish_reason;
  }
}

std::vector<float> LogitsOf(Engine* engine, const Tokens& tokens) {
  std::vector<float> logits(tokens.size() * engine->model_info().vocab_size);
  const std::span<const int32_t> prompts[] = {tokens};
  float* const buffers[] = {logits.data()};
  const Status status = engine->Logits(prompts, buffers);
  if (status.code() == StatusCode::kOutOfPages) return {};
  EXPECT_TRUE(status.ok()) << status.ToString();
  return logits;
}

class EngineExactness : public testing::TestWithParam<Variant> {
 protected:
  void SetUp() override {
    WriteTestModel(folder_, GetParam().model);
    WriteTestModel(draft_folder_, {.num_hidden_layers = 1, .seed = 5});
    MakeJobs();
    for (size_t i = 0; i < jobs_.size(); ++i) {
      const auto engine = Roomy();
      ASSERT_NE(engine, nullptr);
      Answers answers;
      ASSERT_TRUE(engine->Submit(jobs_[i].prompt, jobs_[i].options).ok());
      while (!engine->Idle()) Step(engine.get(), &answers);
      for (auto& [key, answer] : answers) alone_[{i, key.second}] = std::move(answer);
      logits_.push_back(LogitsOf(engine.get(), jobs_[i].prompt));
    }
  }

  EngineOptions Options() const {
    return {.model_directory = folder_.path(), .dtype = GetParam().dtype, .threads = 1};
  }
  std::unique_ptr<Engine> Create(const EngineOptions& options) {
    Result<std::unique_ptr<Engine>> engine = Engine::Create(options);
    EXPECT_TRUE(engine.ok()) << engine.status().ToString();
    return engine.ok() ? *std::move(engine) : nullptr;
  }
  // The yardstick: every request in one piece, with nothing to reuse and room for all.
  std::unique_ptr<Engine> Roomy() {
    EngineOptions options = Options();
    options.prefix_cache = false;
    options.kv_bytes = 8 << 20;
    return Create(options);
  }

  // Prompts of which most begin like one of two texts, with every kind of option.
  void MakeJobs() {
    RandomSequence random(11);
    const int64_t vocab_size = GetParam().model.vocab_size;
    const Tokens shared[] = {RandomTokens(45, vocab_size, 1), RandomTokens(45, vocab_size, 2)};
    for (uint64_t i = 0; i < 14; ++i) {
      Job& job = jobs_.emplace_back();
      const Tokens& text = shared[random.Below(2)];
      job.prompt.assign(text.begin(), text.begin() + random.Below(45));
      const Tokens own = RandomTokens(1 + random.Below(12), vocab_size, 10 + i);
      job.prompt.insert(job.prompt.end(), own.begin(), own.end());
      SamplingOptions& options = job.options;
      options.max_tokens = 1 + random.Below(20);
      options.n = 1 + random.Below(3);
      options.seed = random.Bits();
      options.logprobs = random.Below(4);
      options.ignore_eos = random.Below(2) == 0;
      if (random.Below(3) != 0) options.temperature = static_cast<float>(random.Uniform(0.3, 2));
      if (random.Below(3) == 0) options.top_k = 1 + random.Below(20);
      if (random.Below(3) == 0) options.top_p = static_cast<float>(random.Uniform(0.3, 1));
      if (random.Below(4) == 0) options.min_p = 0.05F;
      if (random.Below(4) == 0) options.repetition_penalty = 1.3F;
      if (random.Below(4) == 0) options.presence_penalty = 0.3F;
      if (random.Below(4) == 0) options.logit_bias = {{3, 2.0F}, {90, -1.0F}};
      if (random.Below(3) == 0) options.stop = {RandomTokens(1, vocab_size, 40 + i)};
      if (i % 5 == 2 && GetParam().model.architecture != "Mamba2ForCausalLM") {
        options.window = 10 + static_cast<int64_t>(i);
        options.sinks = static_cast<int64_t>(i % 4);
      }
    }
  }

  // Sizes for a schedule: pages for the largest job and a few more, so that requests are preempted.
  EngineOptions RandomOptions(RandomSequence* random) {
    EngineOptions options = Options();
    options.page_size = std::array<int64_t, 5>{1, 3, 4, 16, 32}[random->Below(5)];
    options.prefill_chunk = std::array<int64_t, 4>{1, 5, 17, 64}[random->Below(4)];
    options.threads = 1 + static_cast<int>(random->Below(2));
    options.max_num_sequences = 3 + random->Below(6);
    options.prefix_cache = random->Below(4) != 0;
    int64_t pages = 2;
    for (const Job& job : jobs_) {
      pages = std::max(
          pages, PagesForRequest(static_cast<int64_t>(job.prompt.size()), job.options.max_tokens,
                                 job.options.n, options.page_size));
    }
    options.kv_bytes = 1 << 20;
    const int64_t page_bytes = Engine::PlanMemory(options)->page_bytes;
    options.kv_bytes = page_bytes * (pages + random->Below(1 + 20 / options.page_size));
    options.state_bytes = (1 + random->Below(30)) * 20'000;  // from two or so states on
    return options;
  }

  // Guesses of all kinds: by n-grams, by another model, and by the model itself.
  void Speculate(uint64_t seed, EngineOptions* options) const {
    if (seed % 4 == 0) return;
    options->max_tree_nodes = std::array<int64_t, 3>{64, 9, 3}[seed % 3];
    options->speculation = {.draft = seed % 4 == 1 ? DraftKind::kNGram : DraftKind::kModel,
                            .draft_tokens = 1 + static_cast<int64_t>(seed % 7),
                            .branches = 1 + static_cast<int64_t>(seed % 3)};
    options->draft_model_directory = seed % 4 == 2 ? draft_folder_.path() : folder_.path();
  }

  TestFolder folder_;
  TestFolder draft_folder_;
  std::vector<Job> jobs_;
  Answers alone_;                           // by (index of the job, sample)
  std::vector<std::vector<float>> logits_;  // of the jobs' prompts
};

// One engine under a random schedule of submits, steps, cancels, stops and calls of Logits.
class Schedule {
 public:
  Schedule(Engine* engine, const std::vector<Job>& jobs, const Answers& alone,
           const std::vector<std::vector<float>>& logits, RandomSequence* random)
      : engine_(engine),
        impl_(*static_cast<EngineImpl*>(engine)),
        jobs_(jobs),
        alone_(alone),
        logits_(logits),
        random_(*random),
        submit_weight_(1 + random->Below(30)) {}

  // Every job `rounds` times.
  void Run(int64_t rounds) {
    const auto total = rounds * static_cast<int64_t>(jobs_.size());
    for (int64_t moves = 0; submitted() < total || !engine_->Idle(); ++moves) {
      ASSERT_LT(moves, 100'000) << "no progress";
      const int64_t move = random_.Below(60);
      if (move == 0 && submitted() > 0) {
        Cancel();
      } else if (move == 1) {
        Stop();
      } else if (move < 4) {
        CheckLogits();
      } else if (move < 4 + submit_weight_ && submitted() < total) {
        Submit();
      } else {
        Step(engine_, &answers_);
      }
      impl_.CheckInvariants();
      if (testing::Test::HasFatalFailure()) return;
    }
    CheckAnswers();
    CheckAllIsFree();
  }

 private:
  int64_t submitted() const { return static_cast<int64_t>(job_of_.size()); }

  void Submit() {
    const int64_t job = random_.Below(static_cast<int64_t>(jobs_.size()));
    const Result<int64_t> id = engine_->Submit(jobs_[job].prompt, jobs_[job].options);
    ASSERT_TRUE(id.ok()) << id.status().ToString();
    ASSERT_EQ(*id, submitted());
    job_of_.push_back(job);
  }

  void Cancel() {
    const int64_t id = random_.Below(submitted());
    const Status status = engine_->Cancel(id);
    EXPECT_TRUE(status.ok() || status.code() == StatusCode::kUnknownSequence);
  }

  // Ends a sample that has given something out, at any token of that.
  void Stop() {
    std::vector<std::pair<int64_t, int64_t>> live;
    for (const auto& [key, answer] : answers_) {
      if (answer.reason == FinishReason::kNone && cut_.count(key) == 0) live.push_back(key);
    }
    if (live.empty()) return;
    const auto key = live[random_.Below(static_cast<int64_t>(live.size()))];
    const int64_t length = random_.Below(static_cast<int64_t>(answers_[key].tokens.size()) + 1);
    const Status status = engine_->Stop(key.first, key.second, length);
    if (status.ok()) cut_[key] = static_cast<size_t>(length);
    EXPECT_TRUE(status.ok() || status.code() == StatusCode::kUnknownSequence) << status.ToString();
  }

  void CheckLogits() {
    const int64_t job = random_.Below(static_cast<int64_t>(jobs_.size()));
    const std::vector<float> logits = LogitsOf(engine_, jobs_[job].prompt);
    if (!logits.empty()) {
      EXPECT_TRUE(logits == logits_[job]) << "logits of job " << job;
    }
  }

  void CheckAnswers() {
    for (int64_t id = 0; id < submitted(); ++id) {
      for (int64_t sample = 0; sample < jobs_[job_of_[id]].options.n; ++sample) {
        const Answer& got = answers_[{id, sample}];
        const Answer& want = alone_.at({job_of_[id], sample});
        const auto cut = cut_.find({id, sample});
        SCOPED_TRACE("request " + std::to_string(id) + ", sample " + std::to_string(sample));
        if (cut != cut_.end()) {
          EXPECT_NE(got.reason, FinishReason::kError);
          EXPECT_EQ(BitsOf(got, cut->second), BitsOf(want, cut->second));
        } else if (got.reason == FinishReason::kCancelled) {
          EXPECT_EQ(BitsOf(got, got.tokens.size()), BitsOf(want, got.tokens.size()));
        } else {
          EXPECT_EQ(got.reason, want.reason);
          EXPECT_EQ(BitsOf(got, got.tokens.size()), BitsOf(want, want.tokens.size()));
        }
      }
    }
  }

  void CheckAllIsFree() {
    const EngineStats stats = engine_->Stats();
    // The engine's count is of the group that has the least free.
    if (const AttentionKVCache* const cache = impl_.caches().state().attention();
        cache != nullptr) {
      EXPECT_EQ(cache->pages_in_use(), stats.retained_pages);
    }
    EXPECT_LE(stats.pages_in_use, stats.retained_pages);
    EXPECT_EQ(stats.states_total - stats.states_free, stats.retained_states);
    EXPECT_EQ(impl_.caches().state().sequence_count(), stats.retained_sequences);
    EXPECT_EQ(stats.running + stats.waiting, 0);
  }

  Engine* const engine_;
  const EngineImpl& impl_;
  const std::vector<Job>& jobs_;
  const Answers& alone_;
  const std::vector<std::vector<float>>& logits_;
  RandomSequence& random_;
  const int64_t submit_weight_;
  Answers answers_;
  std::vector<int64_t> job_of_;                        // [request]
  std::map<std::pair<int64_t, int64_t>, size_t> cut_;  // stopped samples: where
};

TEST_P(EngineExactness, NoScheduleCanBeSeenInAnAnswer) {
  int64_t preemptions = 0;
  int64_t cached_tokens = 0;
  int64_t loaded_tokens = 0;
  int64_t layer_loads = 0;
  // Every other engine shares a store with some before it: one in RAM, and one whose layers come
  // one after another.
  const auto clock = std::make_shared<FakeClock>();
  const auto slow_store = std::make_shared<FakeChunkStore>(clock);
  slow_store->layer_ns = 1;
  Result<std::unique_ptr<ChunkStore>> opened =
      ChunkStore::Open({.ram = {.bytes_max = int64_t{64} << 20}});
  ASSERT_TRUE(opened.ok()) << opened.status().ToString();
  const std::shared_ptr<ChunkStore> store = *std::move(opened);
  int64_t drafted_tokens = 0;
  int64_t accepted_tokens = 0;
  int64_t recomputed_tokens = 0;
  bool is_recurrent = false;
  bool has_pages = true;
  bool has_windows = false;
  int64_t answers = 0;
  const auto seeds = static_cast<uint64_t>(RoundsOf(16));
  for (uint64_t seed = 0; seed < seeds; ++seed) {
    RandomSequence random(SoakSeed(seed), 3);
    EngineOptions options = RandomOptions(&random);
    Speculate(seed, &options);
    SCOPED_TRACE("seed " + std::to_string(seed) + ": page size " +
                 std::to_string(options.page_size) + ", chunk " +
                 std::to_string(options.prefill_chunk) + ", threads " +
                 std::to_string(options.threads));
    const auto engine = Create(options);
    ASSERT_NE(engine, nullptr);
    if (seed % 2 == 1) {
      StoreUseOptions use{.chunk_tokens = 16, .load_timeout_ms = 60'000, .load_always = true};
      const bool by_layers = seed % 4 == 3;
      if (by_layers) use.clock = clock;
      const Status attached = by_layers ? engine->AttachStore(slow_store, {.model = "test"}, use)
                                        : engine->AttachStore(store, {.model = "test"}, use);
      const EngineStates& state = static_cast<const EngineImpl&>(*engine).caches().state();
      is_recurrent = state.is_recurrent();
      has_pages = state.attention() != nullptr;
      has_windows = state.has_windows();
      ASSERT_TRUE(attached.ok()) << attached.ToString();
    }
    Schedule(engine.get(), jobs_, alone_, logits_, &random).Run(2);
    ASSERT_FALSE(HasFailure());
    answers += 2 * std::ssize(jobs_);
    const EngineStats stats = engine->Stats();
    preemptions += stats.preemptions;
    cached_tokens += stats.cached_tokens;
    layer_loads += stats.layer_loads;
    recomputed_tokens += stats.recomputed_tokens;
    drafted_tokens += stats.drafted_tokens;
    accepted_tokens += stats.accepted_tokens;
    loaded_tokens += stats.loaded_tokens[static_cast<size_t>(TierKind::kRam)];
    if (!options.prefix_cache) {
      EXPECT_EQ(stats.pages_in_use, 0);
    }
  }
  ReportFigure("answers", answers);
  EXPECT_EQ(slow_store->live_fetches, 0);
  if (!IsOrdinaryRun()) return;
  if (has_pages) {
    EXPECT_GT(preemptions, has_windows ? 0 : 2);  // what slides out makes room
  } else {
    EXPECT_EQ(preemptions, 0);
  }
  EXPECT_GT(accepted_tokens, 100);
  EXPECT_GT(drafted_tokens, accepted_tokens + 300);
  EXPECT_GT(cached_tokens, is_recurrent ? 200 : 1000);
  EXPECT_GT(loaded_tokens, 100);
  if (is_recurrent) {
    EXPECT_GT(recomputed_tokens, 200);
  }
  EXPECT_GT(layer_loads, 5);
  if (!is_recurrent && !has_windows) {
    EXPECT_LT(recomputed_tokens, 100);  // of requests with windows alone
  }
}

INSTANTIATE_TEST_SUITE_P(Variants, EngineExactness, testing::ValuesIn(Variants()),
                         [](const auto& test) { return test.param.name; });

// ---- LongRoPE and dynamic NTK: the factors are chosen by prompt + max_tokens, and KV of one
// choice is of no use to the other.

struct LongSet {
  const char* name;
  TestModel (*model)();
};
void PrintTo(const LongSet& set, std::ostream* out) { *out << set.name; }

class EngineLongRope : public testing::TestWithParam<LongSet> {
 protected:
  void SetUp() override {
    WriteTestModel(folder_, GetParam().model());
    Result<std::unique_ptr<Engine>> engine = Engine::Create({.model_directory = folder_.path(),
                                                             .dtype = DType::kF32,
                                                             .threads = 1,
                                                             .kv_bytes = 1 << 20});
    ASSERT_TRUE(engine.ok()) << engine.status().ToString();
    engine_ = *std::move(engine);
  }

  // Its only answer; `cached` gets the tokens found in the prefix cache.
  Answer Generate(const Tokens& prompt, int64_t max_tokens, int64_t* cached) {
    const int64_t before = engine_->Stats().cached_tokens;
    EXPECT_TRUE(
        engine_->Submit(prompt, {.max_tokens = max_tokens, .logprobs = 0, .ignore_eos = true})
            .ok());
    Answers answers;
    while (!engine_->Idle()) Step(engine_.get(), &answers);
    static_cast<EngineImpl*>(engine_.get())->CheckInvariants();
    *cached = engine_->Stats().cached_tokens - before;
    return answers.begin()->second;
  }

  // Logits of all tokens, straight from model and cache.
  std::vector<float> Reference(const Tokens& tokens, bool long_factors) {
    const auto model = LoadTestModel(folder_, DType::kF32);
    const auto cache = CreateTestCache(*model, {});
    EXPECT_TRUE(cache->AddSequence(0).ok());
    EXPECT_TRUE(cache->SelectLongRope(0, long_factors).ok());
    return RunForward(*model, *cache, 0, tokens);
  }

  TestFolder folder_;
  std::unique_ptr<Engine> engine_;
};

TEST_P(EngineLongRope, LogitsUseTheFactorsOfThePromptsLength) {
  for (const int64_t length : {kOriginalLength, kOriginalLength + 1}) {
    const Tokens tokens = RandomTokens(length, 101, 5);
    const bool is_long = length > kOriginalLength;
    EXPECT_EQ(LogitsOf(engine_.get(), tokens), Reference(tokens, is_long));
    EXPECT_NE(LogitsOf(engine_.get(), tokens), Reference(tokens, !is_long));
  }
}

TEST_P(EngineLongRope, PrefixesAreReusedAmongRequestsOfTheSameFactorsOnly) {
  const Tokens prompt = RandomTokens(30, 101, 6);
  int64_t cached = 0;
  const Answer short_answer = Generate(prompt, kOriginalLength - 30, &cached);
  EXPECT_EQ(cached, 0);
  const Answer long_answer = Generate(prompt, kOriginalLength - 30 + 1, &cached);
  EXPECT_EQ(cached, 0) << "what is there was computed with the short factors";
  EXPECT_NE(BitsOf(long_answer, 5), BitsOf(short_answer, 5));
  const Answer short_again = Generate(prompt, kOriginalLength - 30, &cached);
  EXPECT_EQ(cached, 29);
  EXPECT_EQ(BitsOf(short_again, 99), BitsOf(short_answer, 99));
  const Answer long_again = Generate(prompt, kOriginalLength - 30 + 1, &cached);
  EXPECT_EQ(cached, 29);
  EXPECT_EQ(BitsOf(long_again, 99), BitsOf(long_answer, 99));

  // The first token, drawn from the logits of the reference.
  const auto best = [&](bool long_factors) {
    const std::vector<float> logits = Reference(prompt, long_factors);
    return static_cast<int32_t>(std::max_element(logits.end() - 101, logits.end()) -
                                (logits.end() - 101));
  };
  EXPECT_EQ(short_answer.tokens[0], best(false));
  EXPECT_EQ(long_answer.tokens[0], best(true));
}

// Both at once: neither waits for the other's prefix or forks from its running sequence.
TEST_P(EngineLongRope, RunningRequestsOfOtherFactorsAreNoPrefix) {
  const Tokens prompt = RandomTokens(35, 101, 7);
  int64_t cached = 0;
  const Answer want_short = Generate(prompt, 5, &cached);
  const Answer want_long = Generate(prompt, 20, &cached);
  TearDown();
  SetUp();
  const auto submit = [&](int64_t max_tokens) {
    return engine_->Submit(prompt, {.max_tokens = max_tokens, .logprobs = 0, .ignore_eos = true})
        .ok();
  };
  ASSERT_TRUE(submit(5));
  ASSERT_TRUE(submit(20));
  Answers answers;
  while (!engine_->Idle()) Step(engine_.get(), &answers);
  EXPECT_EQ(engine_->Stats().cached_tokens, 0);
  EXPECT_EQ(BitsOf(answers[{0, 0}], 99), BitsOf(want_short, 99));
  EXPECT_EQ(BitsOf(answers[{1, 0}], 99), BitsOf(want_long, 99));
}

INSTANTIATE_TEST_SUITE_P(Sets, EngineLongRope,
                         testing::Values(LongSet{"LongRope",
                                                 [] { return LongRopeModel(kOriginalLength); }},
                                         LongSet{"Dynamic", DynamicModel}),
                         [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace quire
