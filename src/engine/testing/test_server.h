// Test only: an engine over the small deterministic model of fake_model.h whose parts stay within
// reach, requests of all kinds for it, and their answers when each is computed alone.
#ifndef QUIRE_ENGINE_TESTING_TEST_SERVER_H_
#define QUIRE_ENGINE_TESTING_TEST_SERVER_H_

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/random.h"
#include "base/testing/fake_clock.h"
#include "engine/engine_impl.h"
#include "engine/testing/fake_model.h"
#include "engine/testing/fallible_kv_cache.h"
#include "kernels/backend.h"

namespace quire {

using Tokens = std::vector<int32_t>;

struct Sizes {
  int64_t pages = 2000;
  int64_t page_size = 4;
  int64_t chunk = 32;
  int64_t sequences = 8;
  int64_t waiting = 100;
  int64_t step_ms = 100;
  bool prefix_cache = true;
  bool long_rope = false;
  std::shared_ptr<Clock> clock = nullptr;
  Speculation speculation = {};
  int64_t tree_nodes = 0;
  std::optional<uint64_t> draft_seed = {};  // of the draft model; 0: it is the same model
  int64_t draft_pages = 2000;
  int64_t draft_vocab = FakeModel::kVocabSize;
  int64_t layer_window = 0;  // of the model's second attention layer
  bool recurrent = false;    // the model has recurrent layers too
  int64_t max_pop = 0;       // of the caches
  int64_t sending_bytes = 0;
};

// For prompt + max_tokens of more than 16.
inline RopeOptions LongRope() {
  return {.mode = RopeMode::kNormal,
          .scaling = RopeScaling::kLongRope,
          .factor = 4,
          .original_max_position_embeddings = 16,
          .short_factors = {1, 1},
          .long_factors = {2, 3}};
}

struct Answer {
  Tokens tokens;
  std::vector<std::vector<TokenLogprob>> logprobs;
  FinishReason reason = FinishReason::kNone;
  std::string error;
  int64_t prompt_tokens = 0, cached_tokens = 0, completion_tokens = 0;
  CachedTokens cached;
  MissReason miss = MissReason::kNone;
  PrefixMiss prefix_miss;
  double load_seconds = 0;
  int64_t drafted_tokens = 0, accepted_tokens = 0, decode_forwards = 0;
  RequestTimes times;
};
using Answers = std::map<std::pair<int64_t, int64_t>, Answer>;  // by (request, sample)

inline std::unique_ptr<AttentionKVCache> MakeCache(const Model& model, const Sizes& sizes,
                                                   int64_t pages) {
  AttentionKVCacheOptions options;
  options.layers = model.info().layers;
  options.rope = model.info().rope;
  options.max_num_sequences = CacheSequencesMax(sizes.sequences);
  options.token_capacity = (pages - 1) * sizes.page_size;
  options.prefill_chunk_size = sizes.chunk;
  options.page_size = sizes.page_size;
  options.max_pop = sizes.max_pop;
  options.runner = CreateThreadPool(1).value();
  options.poison_freed_pages = true;
  Result<std::unique_ptr<AttentionKVCache>> cache = AttentionKVCache::Create(options);
  EXPECT_TRUE(cache.ok()) << cache.status().ToString();
  return *std::move(cache);
}

inline std::shared_ptr<RecurrentCache> MakeStates(const Model& model, const Sizes& sizes) {
  RecurrentCacheOptions options;
  options.layers = model.info().recurrent_layers;
  options.max_num_sequences = CacheSequencesMax(sizes.sequences);
  options.prefill_chunk_size = sizes.chunk;
  options.max_tree_slots = sizes.tree_nodes;
  options.max_retained_slots = 32;
  options.max_loads = kLoadsMax;
  options.runner = CreateThreadPool(1).value();
  options.poison_freed_slots = true;
  Result<std::unique_ptr<RecurrentCache>> states = RecurrentCache::Create(options);
  EXPECT_TRUE(states.ok()) << states.status().ToString();
  return *std::move(states);
}

// An engine whose parts stay within reach.
struct Server {
  explicit Server(const Sizes& sizes = {}) {
    auto owned_model = std::make_unique<FakeModel>();
    if (sizes.long_rope) owned_model->mutable_info().rope = LongRope();
    owned_model->mutable_info().layers[1].window = sizes.layer_window;
    if (sizes.recurrent) owned_model->AddRecurrentLayers();
    auto owned_cache =
        std::make_unique<FallibleKVCache>(MakeCache(*owned_model, sizes, sizes.pages));
    model = owned_model.get();
    cache = owned_cache.get();
    EngineImpl::Parts parts;
    if (sizes.recurrent) parts.recurrent = MakeStates(*owned_model, sizes);
    parts.model = std::move(owned_model);
    parts.cache = std::move(owned_cache);
    parts.runner = CreateThreadPool(1).value();
    parts.backend = FindBackend("").value();
    parts.options.page_size = sizes.page_size;
    parts.options.prefill_chunk = sizes.chunk;
    parts.options.max_num_sequences = sizes.sequences;
    parts.options.max_waiting = sizes.waiting;
    parts.options.max_step_ms = sizes.step_ms;
    parts.options.prefix_cache = sizes.prefix_cache;
    parts.options.sending_bytes = sizes.sending_bytes;
    parts.clock = sizes.clock;
    parts.kv_bytes_per_token = FakeModel::kLayers * 2 * FakeModel::kDim * int64_t{sizeof(float)};
    parts.options.speculation = sizes.speculation;
    parts.options.max_tree_nodes = sizes.tree_nodes;
    if (sizes.draft_seed) {
      auto owned_draft = std::make_unique<FakeModel>(*sizes.draft_seed, sizes.draft_vocab);
      draft_model = owned_draft.get();
      ModelDrafter::Parts draft;
      draft.cache = MakeCache(*owned_draft, sizes, sizes.draft_pages);
      draft.model = std::move(owned_draft);
      draft.prefill_chunk = sizes.chunk;
      draft.rows_max = StepSamplesMax(sizes.sequences, sizes.chunk);
      draft.vocab_size = FakeModel::kVocabSize;
      parts.model_drafter = std::make_unique<ModelDrafter>(std::move(draft));
    }
    engine = std::make_unique<EngineImpl>(std::move(parts));
  }

  int64_t Submit(const Tokens& prompt, const SamplingOptions& options) {
    const Result<int64_t> id = engine->Submit(prompt, options);
    EXPECT_TRUE(id.ok()) << id.status().ToString();
    return id.ok() ? *id : -1;
  }

  // One step, its outputs added to `answers`.
  Status Step() {
    Result<std::vector<StepOutput>> outputs = engine->Step();
    engine->CheckInvariants();
    QUIRE_RETURN_IF_ERROR(outputs.status());
    Take(*std::move(outputs));
    return {};
  }
  void Take(std::vector<StepOutput> outputs) {
    for (const StepOutput& output : outputs) {
      Answer& answer = answers[{output.request_id, output.sample}];
      EXPECT_EQ(answer.reason, FinishReason::kNone) << "an output behind the end";
      EXPECT_TRUE(!output.tokens.empty() || output.finish_reason != FinishReason::kNone);
      answer.tokens.insert(answer.tokens.end(), output.tokens.begin(), output.tokens.end());
      answer.logprobs.insert(answer.logprobs.end(), output.logprobs.begin(), output.logprobs.end());
      answer.reason = output.finish_reason;
      answer.error = output.error;
      answer.prompt_tokens = output.prompt_tokens;
      answer.cached_tokens = output.cached_tokens;
      answer.completion_tokens = output.completion_tokens;
      answer.cached = output.cached;
      answer.miss = output.miss;
      answer.prefix_miss = output.prefix_miss;
      answer.load_seconds = output.load_seconds;
      answer.drafted_tokens = output.drafted_tokens;
      answer.accepted_tokens = output.accepted_tokens;
      answer.decode_forwards = output.decode_forwards;
      answer.times = output.times;
    }
  }

  void Finish() {
    for (int step = 0; !engine->Idle(); ++step) {
      ASSERT_LT(step, 20000) << "no progress";
      const Status status = Step();
      ASSERT_TRUE(status.ok()) << status.ToString();
    }
  }

  Answer Generate(const Tokens& prompt, const SamplingOptions& options) {
    const int64_t id = Submit(prompt, options);
    Finish();
    return answers[{id, 0}];
  }

  FakeModel* model;
  FakeModel* draft_model = nullptr;
  FallibleKVCache* cache;
  std::unique_ptr<EngineImpl> engine;
  Answers answers;
};

struct Job {
  Tokens prompt;
  SamplingOptions options;
};

inline Tokens RandomTokens(int64_t count, RandomSequence* random) {
  Tokens tokens(count);
  for (int32_t& token : tokens) token = static_cast<int32_t>(random->Below(FakeModel::kVocabSize));
  return tokens;
}

// Prompts of which some begin alike, with every kind of option.
inline std::vector<Job> RandomJobs(int count, uint64_t seed) {
  RandomSequence random(seed);
  const Tokens shared = RandomTokens(30, &random);
  std::vector<Job> jobs(count);
  for (Job& job : jobs) {
    const int64_t common = random.Below(3) == 0 ? 0 : random.Below(31);
    job.prompt.assign(shared.begin(), shared.begin() + common);
    const Tokens own = RandomTokens(1 + random.Below(20), &random);
    job.prompt.insert(job.prompt.end(), own.begin(), own.end());
    job.options.max_tokens = 1 + random.Below(25);
    job.options.n = random.Below(3) == 0 ? 1 + random.Below(3) : 1;
    job.options.seed = random.Bits();
    job.options.logprobs = random.Below(4) - 1;
    if (random.Below(2) == 0) job.options.temperature = static_cast<float>(random.Uniform(0.3, 2));
    if (random.Below(3) == 0) job.options.top_k = 1 + random.Below(20);
    if (random.Below(3) == 0) job.options.top_p = static_cast<float>(random.Uniform(0.3, 1));
    if (random.Below(4) == 0) job.options.repetition_penalty = 1.3F;
    if (random.Below(4) == 0) job.options.frequency_penalty = 0.4F;
    if (random.Below(3) == 0) job.options.stop = {RandomTokens(1 + random.Below(2), &random)};
  }
  return jobs;
}

inline void ExpectEqual(const Answer& got, const Answer& want, const std::string& what) {
  EXPECT_EQ(got.tokens, want.tokens) << what;
  EXPECT_EQ(got.reason, want.reason) << what;
  EXPECT_EQ(got.prompt_tokens, want.prompt_tokens) << what;
  ASSERT_EQ(got.logprobs.size(), want.logprobs.size()) << what;
  for (size_t i = 0; i < got.logprobs.size(); ++i) {
    ASSERT_EQ(got.logprobs[i].size(), want.logprobs[i].size()) << what;
    for (size_t j = 0; j < got.logprobs[i].size(); ++j) {
      EXPECT_EQ(got.logprobs[i][j].token, want.logprobs[i][j].token) << what;
      EXPECT_EQ(got.logprobs[i][j].logprob, want.logprobs[i][j].logprob) << what;
    }
  }
}

// Answers of each job alone, keyed by (index of the job, sample).
inline Answers Alone(const std::vector<Job>& jobs) {
  Answers all;
  for (size_t i = 0; i < jobs.size(); ++i) {
    Server server({.prefix_cache = false});
    server.Generate(jobs[i].prompt, jobs[i].options);
    for (const auto& [key, answer] : server.answers) {
      all[{static_cast<int64_t>(i), key.second}] = answer;
    }
  }
  return all;
}

}  // namespace quire

#endif  // QUIRE_ENGINE_TESTING_TEST_SERVER_H_
