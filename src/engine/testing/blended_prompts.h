// Test only: prompts with documents for small real models, blended and exact requests about them,
// and their answers to the bit.
#ifndef QUIRE_ENGINE_TESTING_BLENDED_PROMPTS_H_
#define QUIRE_ENGINE_TESTING_BLENDED_PROMPTS_H_

#include <gtest/gtest.h>

#include <map>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "base/random.h"
#include "engine/engine_impl.h"
#include "model/testing/test_model.h"

namespace quire {

using Tokens = std::vector<int32_t>;
// Tokens and the bits of their log-probabilities.
using Bits = std::vector<std::pair<int32_t, float>>;

inline constexpr int64_t kVocab = 101;
inline constexpr int64_t kWindow = 70;

struct Variant {
  const char* name;
  TestModel model;
  DType dtype = DType::kF32;
  std::optional<DType> kv_dtype = {};
};
inline void PrintTo(const Variant& variant, std::ostream* out) { *out << variant.name; }

inline std::vector<Variant> Variants() {
  const nlohmann::json window = {{"sliding_window", kWindow}, {"query_pre_attn_scalar", 24}};
  std::vector<Variant> variants = {
      {"Llama", {.num_hidden_layers = 4}},
      {"LlamaBfloat16", {.num_hidden_layers = 4}, DType::kBF16},
      {"LlamaInt8", {.num_hidden_layers = 4}, DType::kBF16, DType::kI8},
      {"LlamaFp8", {.num_hidden_layers = 4}, DType::kBF16, DType::kF8E4M3},
      {"Qwen3",
       {.architecture = "Qwen3ForCausalLM", .num_hidden_layers = 4, .dtype = DType::kBF16},
       DType::kBF16},
      {"Gemma2",
       {.architecture = "Gemma2ForCausalLM",
        .num_hidden_layers = 4,
        .tie_word_embeddings = true,
        .extra = window}},
      {"DeepseekV3", {.architecture = "DeepseekV3ForCausalLM", .num_hidden_layers = 4}}};
  return variants;
}

struct Outcome {
  Bits bits;
  FinishReason reason = FinishReason::kNone;
  std::string error;
  int64_t cached_tokens = 0;
  std::optional<BlendUsage> blend;
  std::optional<BlendUsage> first_blend;  // as told with the first token of the request
  RequestTimes times;
};
using Outcomes = std::map<std::pair<int64_t, int64_t>, Outcome>;

inline void Step(Engine* engine, Outcomes* outcomes) {
  Result<std::vector<StepOutput>> outputs = engine->Step();
  ASSERT_TRUE(outputs.ok()) << outputs.status().ToString();
  for (const StepOutput& output : *outputs) {
    ASSERT_GE(output.request_id, 0) << "a request of the engine's own";
    Outcome& outcome = (*outcomes)[{output.request_id, output.sample}];
    for (size_t i = 0; i < output.tokens.size(); ++i) {
      outcome.bits.emplace_back(output.tokens[i], output.logprobs[i].front().logprob);
    }
    outcome.reason = output.finish_reason;
    outcome.error = output.error;
    outcome.cached_tokens = output.cached_tokens;
    outcome.times = output.times;
    if (output.blend) outcome.blend = output.blend;
    if (!outcome.first_blend) outcome.first_blend = output.blend;
  }
  static_cast<EngineImpl*>(engine)->CheckInvariants();
}

// Submits a prompt and steps until its answer has begun, or a step has failed. Returns its id.
inline int64_t Begin(Engine* engine, const Tokens& prompt, const SamplingOptions& options,
                     Outcomes* outcomes) {
  const int64_t id = engine->Submit(prompt, options).value();
  while ((*outcomes)[{id, 0}].bits.empty() && !testing::Test::HasFatalFailure())
    Step(engine, outcomes);
  return id;
}

// Steps until nothing is left to do, or a step has failed.
inline void Finish(Engine* engine, Outcomes* outcomes) {
  while (!engine->Idle() && !testing::Test::HasFatalFailure()) Step(engine, outcomes);
}

inline Outcome Generate(Engine* engine, const Tokens& prompt, const SamplingOptions& options) {
  Outcomes outcomes;
  const Result<int64_t> id = engine->Submit(prompt, options);
  EXPECT_TRUE(id.ok()) << id.status().ToString();
  if (!id.ok()) return {};
  Finish(engine, &outcomes);
  if (testing::Test::HasFatalFailure()) return {};
  return outcomes[{*id, 0}];
}

// A prompt of an anchor, documents and a question.
struct Question {
  Tokens prompt;
  std::vector<PromptDocument> documents;
};

inline Tokens Document(uint64_t seed) {
  return RandomTokens(20 + static_cast<int64_t>(seed % 7) * 4, kVocab, 100 + seed);
}

inline Question Ask(const std::vector<uint64_t>& documents, uint64_t question, int64_t anchor = 5) {
  Question asked;
  asked.prompt = RandomTokens(anchor, kVocab, 1);
  for (const uint64_t seed : documents) {
    const Tokens document = Document(seed);
    const auto begin = static_cast<int64_t>(asked.prompt.size());
    asked.prompt.insert(asked.prompt.end(), document.begin(), document.end());
    asked.documents.push_back({begin, static_cast<int64_t>(asked.prompt.size())});
  }
  const Tokens rest = RandomTokens(6, kVocab, 1000 + question);
  asked.prompt.insert(asked.prompt.end(), rest.begin(), rest.end());
  return asked;
}

// Submits `count` requests of jobs that are drawn, cancels some, and steps until the engine is
// idle. One of `moves` draws is a cancel, and four are requests.
template <typename Job>
void RunSchedule(Engine* engine, const std::vector<Job>& jobs, int64_t count, int64_t moves,
                 RandomSequence* random, Outcomes* outcomes, std::map<int64_t, size_t>* job_of) {
  for (int64_t submitted = 0; submitted < count || !engine->Idle();) {
    const int64_t move = random->Below(moves);
    if (move < 4 && submitted < count) {
      const auto job = static_cast<size_t>(random->Below(std::ssize(jobs)));
      const Result<int64_t> id = engine->Submit(jobs[job].prompt, jobs[job].options);
      ASSERT_TRUE(id.ok()) << id.status().ToString();
      (*job_of)[*id] = job;
      ++submitted;
    } else if (move == 4 && submitted > 0) {
      static_cast<void>(engine->Cancel(random->Below(submitted)));
    } else {
      Step(engine, outcomes);
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

inline SamplingOptions Exact(int64_t max_tokens = 8) {
  return {.max_tokens = max_tokens, .logprobs = 0, .ignore_eos = true};
}

inline SamplingOptions Blend(const Question& question, double ratio,
                             DocumentLearning learn = DocumentLearning::kFirst) {
  SamplingOptions options = Exact();
  options.blend = BlendRequest{.documents = question.documents,
                               .options = {.ratios = {ratio}, .link_tokens = 2},
                               .learn = learn,
                               .unverified = true};
  return options;
}

// Engines over a small model, in which prompts can be blended.
class BlendingEngines : public testing::TestWithParam<Variant> {
 protected:
  void SetUp() override { WriteTestModel(folder_, GetParam().model); }

  EngineOptions Options() const {
    return {.model_directory = folder_.path(),
            .dtype = GetParam().dtype,
            .k_dtype = GetParam().kv_dtype,
            .v_dtype = GetParam().kv_dtype,
            .threads = 1,
            .page_size = 16,
            .prefill_chunk = 24,
            .kv_bytes = 16 << 20,
            .blend_piece = 80};
  }
  std::unique_ptr<Engine> Create(const EngineOptions& options) const {
    Result<std::unique_ptr<Engine>> engine = Engine::Create(options);
    EXPECT_TRUE(engine.ok()) << engine.status().ToString();
    return engine.ok() ? *std::move(engine) : nullptr;
  }
  std::unique_ptr<Engine> Create() const { return Create(Options()); }

  TestFolder folder_;
};

}  // namespace quire

#endif  // QUIRE_ENGINE_TESTING_BLENDED_PROMPTS_H_
