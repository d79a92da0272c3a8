// Token filters over the real cache and the small deterministic model: what is drawn is allowed,
// each sample has a filter of its own, and answers are the same with guesses, in any batch, after
// preemption and after failed forwards.
#include <gtest/gtest.h>

#include <string>

#include "engine/testing/scripted_filter.h"
#include "engine/testing/test_server.h"

namespace quire {
namespace {

constexpr int32_t kEnd = 60;
constexpr Speculation kNGrams{.draft = DraftKind::kNGram, .draft_tokens = 8, .branches = 3};
constexpr Speculation kModel{.draft = DraftKind::kModel, .draft_tokens = 6, .branches = 2};
using Script = std::shared_ptr<ScriptedFilter::Script>;

std::shared_ptr<const TokenFilter> FilterOf(const Script& script) {
  return std::make_shared<ScriptedFilter>(script);
}

Script HashScript(uint64_t seed, int64_t part = 6, int64_t least = 3, int64_t most = 40) {
  return MakeScript(FakeModel::kVocabSize, HashRule(seed, part, kEnd, least, most));
}

// Texts that repeat themselves, so that guesses are right now and then.
void Prepare(FakeModel* model) {
  model->mutable_info().eos_token_ids = {kEnd};
  model->edit = [](int32_t token, int32_t, std::span<float> logits) {
    logits[static_cast<size_t>((token + 1) % 7)] += 6;
  };
}

struct FilteredJob {
  Job job;
  Script script;
};

std::vector<FilteredJob> FilteredJobs(int count, uint64_t seed) {
  std::vector<FilteredJob> jobs;
  for (Job& job : RandomJobs(count, seed)) {
    const uint64_t number = jobs.size();
    jobs.push_back({std::move(job), number % 4 == 3 ? nullptr : HashScript(number)});
    Job& last = jobs.back().job;
    last.options.max_tokens = 25;
    if (jobs.back().script != nullptr) last.options.filter = FilterOf(jobs.back().script);
    if (number % 3 == 0) last.options.logit_bias = {{1, 90.0F}, {2, 90.0F}};
  }
  return jobs;
}

Answers AnswersOf(const std::vector<FilteredJob>& jobs, const Sizes& sizes, EngineStats* stats) {
  Server server(sizes);
  Prepare(server.model);
  if (server.draft_model != nullptr) Prepare(server.draft_model);
  for (const FilteredJob& job : jobs) server.Submit(job.job.prompt, job.job.options);
  server.Finish();
  *stats = server.engine->Stats();
  return server.answers;
}

void ExpectAllowed(const Answer& answer, const FilteredJob& job, const std::string& what) {
  ASSERT_TRUE(answer.error.empty()) << what << ": " << answer.error;
  if (job.script == nullptr) return;
  const std::span<const int32_t> tokens = answer.tokens;
  for (size_t i = 0; i < tokens.size(); ++i)
    EXPECT_TRUE(job.script->rule(tokens.first(i), tokens[i])) << what << ", token " << i;
  const bool ended = answer.reason == FinishReason::kStop && job.job.options.stop.empty();
  if (ended) {
    EXPECT_TRUE(job.script->rule(tokens, kEnd)) << what;
  }
}

TEST(TokenFilter, AnswersAreAllowedAndTheSameWithGuessesInAnyBatch) {
  const std::vector<FilteredJob> jobs = FilteredJobs(16, 5);
  Answers want;
  for (size_t i = 0; i < jobs.size(); ++i) {
    EngineStats stats;
    for (const auto& [key, answer] : AnswersOf({jobs[i]}, {.prefix_cache = false}, &stats)) {
      want[{static_cast<int64_t>(i), key.second}] = answer;
      ExpectAllowed(answer, jobs[i], "request " + std::to_string(i));
    }
  }
  int64_t accepted = 0;
  for (const int64_t chunk : {3, 16, 200}) {
    for (const Speculation& speculation : {Speculation{}, kNGrams, kModel}) {
      for (const uint64_t draft_seed : {uint64_t{0}, uint64_t{5}}) {
        // So few pages that requests are preempted.
        Sizes sizes{.pages = 60, .chunk = chunk, .speculation = speculation, .tree_nodes = 40};
        sizes.draft_seed = draft_seed;
        EngineStats stats;
        Answers got = AnswersOf(jobs, sizes, &stats);
        ASSERT_EQ(got.size(), want.size());
        for (const auto& [key, answer] : want) {
          ExpectEqual(got[key], answer,
                      "chunk " + std::to_string(chunk) + ", draft " +
                          std::to_string(static_cast<int>(speculation.draft)) + ", request " +
                          std::to_string(key.first) + ", sample " + std::to_string(key.second));
        }
        accepted += stats.accepted_tokens;
        if (HasFailure()) return;
      }
    }
  }
  EXPECT_GT(accepted, 300);
  for (const FilteredJob& job : jobs) {
    if (job.script == nullptr) continue;
    EXPECT_EQ(job.script->living, 1) << "forks of samples that have ended";
    EXPECT_GT(job.script->forks, 0);
  }
}

TEST(TokenFilter, GuessesThatItRefusesAreTakenBack) {
  const Script script = HashScript(3, 12, 200, 200);
  Server server({.chunk = 64, .speculation = kNGrams, .tree_nodes = 64});
  Prepare(server.model);
  SamplingOptions options{.max_tokens = 100, .temperature = 0.7F, .seed = 4};
  options.filter = FilterOf(script);
  server.Generate({1, 2, 3, 4, 5, 6, 0, 1, 2, 3}, options);
  EXPECT_GT(script->rollbacks, 10);
  EXPECT_GT(script->refusals, 0) << "guesses are asked about before they are run";
  EXPECT_GT(server.engine->Stats().accepted_tokens, 10);
}

// A filter that fails for a guess, as one that is too slow there does, was made again in each step
// and accepted the whole answer, which all other requests waited for.
TEST(TokenFilter, OneThatFailsForAGuessIsMadeAnewOnce) {
  for (const Speculation& speculation : {kNGrams, kModel}) {
    SCOPED_TRACE(static_cast<int>(speculation.draft));
    SamplingOptions options{.max_tokens = 60, .temperature = 0.7F, .seed = 4};
    const auto run = [&](Server* server, const Script& script, const std::function<void()>& begin) {
      Prepare(server->model);
      if (server->draft_model != nullptr) Prepare(server->draft_model);
      options.filter = FilterOf(script);
      const int64_t id = server->Submit({1, 2, 3, 4, 5, 6, 0, 1, 2, 3}, options);
      while (!server->engine->Idle() && !testing::Test::HasFailure()) {
        begin();
        EXPECT_TRUE(server->Step().ok());
      }
      return server->answers[{id, 0}];
    };
    Server plain({.chunk = 64});
    const Answer want = run(&plain, HashScript(3, 12, 200, 200), [] {});
    Sizes sizes{.chunk = 64, .speculation = speculation, .tree_nodes = 64};
    sizes.draft_seed = 5;
    Server server(sizes);
    const Script script = HashScript(3, 12, 200, 200);
    bool guesses = false;  // the step has not come to its forward
    int64_t place = 0;     // of the token that was asked about last
    script->rule = [&, rule = script->rule](std::span<const int32_t> came, int32_t token) {
      place = std::ssize(came);
      return rule(came, token);
    };
    int64_t failures = 0;
    script->fault = [&]() -> Status {
      const int64_t answer = std::ssize(server.answers[{0, 0}].tokens);
      if (!guesses || answer == 0 || place <= answer) return {};
      place = 0;
      ++failures;
      return Status(StatusCode::kTooLarge, "asked for");
    };
    server.model->fault = [&](std::span<const int32_t>) {
      guesses = false;
      return Status();
    };
    ExpectEqual(run(&server, script, [&] { guesses = true; }), want, "as without guesses");
    EXPECT_EQ(failures, 1);
    EXPECT_EQ(script->forks, 2);
    options.filter = nullptr;
  }
}

// The draft model draws what the filter allows: with the same weights all its guesses are right.
TEST(TokenFilter, TheDraftModelDrawsBehindTheFilter) {
  const Script script = HashScript(8, 3, 200, 200);
  Server server({.chunk = 64, .speculation = kModel, .tree_nodes = 64, .draft_seed = 0});
  server.model->mutable_info().eos_token_ids = {kEnd};
  SamplingOptions options{.max_tokens = 60, .temperature = 1.2F, .seed = 4};
  options.speculation = kModel;
  options.speculation->branches = 1;
  options.filter = FilterOf(script);
  server.Generate({1, 2, 3}, options);
  const EngineStats stats = server.engine->Stats();
  EXPECT_GT(stats.drafted_tokens, 40);
  EXPECT_EQ(stats.accepted_tokens, stats.drafted_tokens);
}

TEST(TokenFilter, EachSampleHasItsOwn) {
  const Script script = HashScript(1, 5, 30, 30);
  Server server({.chunk = 64});
  Prepare(server.model);
  SamplingOptions options{.max_tokens = 50, .temperature = 2, .seed = 9, .n = 4};
  options.filter = FilterOf(script);
  server.Generate({7, 8, 9}, options);
  ASSERT_EQ(server.answers.size(), 4U);
  for (const auto& [key, answer] : server.answers) {
    ExpectAllowed(answer, {{{}, options}, script}, "sample " + std::to_string(key.second));
    EXPECT_EQ(answer.tokens.size(), 30U);
    EXPECT_EQ(answer.reason, FinishReason::kStop);
  }
  EXPECT_NE((server.answers[{0, 0}].tokens), (server.answers[{0, 1}].tokens));
  EXPECT_EQ(script->forks, 4);
  EXPECT_EQ(script->living, 1);
}

// A forward that fails after its tokens were drawn: filters have gone on, answers have not. What
// is run of a batch is then its first request alone.
TEST(TokenFilter, FollowsTheAnswerAfterFailedForwards) {
  for (const bool speculates : {false, true}) {
    const auto run = [&](bool with_faults) {
      Server server({.chunk = 64,
                     .speculation = speculates ? kNGrams : Speculation{},
                     .tree_nodes = speculates ? 40 : 0});
      Prepare(server.model);
      int64_t failures = 0;
      if (with_faults) {
        server.cache->fault = [&, calls = 0](std::string_view call) mutable -> Status {
          const bool both_run = server.answers[{0, 0}].reason == FinishReason::kNone &&
                                server.answers[{1, 0}].reason == FinishReason::kNone;
          if (call != "EndForward" || !both_run || ++calls % 3 != 1) return {};
          ++failures;
          return Status(StatusCode::kIoError, "asked for");
        };
      }
      SamplingOptions options{.max_tokens = 40, .temperature = 1, .seed = 2};
      options.filter = FilterOf(HashScript(2, 6, 30));
      server.Submit({1, 2, 3, 1, 2, 3, 1, 2}, options);
      server.Submit({7, 2, 3, 1, 2, 3, 1, 2}, options);
      server.Finish();
      EXPECT_EQ(failures > 5, with_faults) << failures;
      return server.answers;
    };
    Answers want = run(false);
    for (const auto& [key, answer] : run(true)) {
      EXPECT_EQ(answer.error, "");
      ExpectEqual(answer, want[key], "after failures");
    }
  }
}

TEST(TokenFilter, OneThatAllowsNothingEndsItsSample) {
  Server server({.chunk = 64});
  Prepare(server.model);
  SamplingOptions options{.max_tokens = 50};
  options.filter =
      FilterOf(MakeScript(FakeModel::kVocabSize, [](std::span<const int32_t> came, int32_t token) {
        return came.size() < 2 && token < 9;
      }));
  const int64_t other = server.Submit({4, 5}, {.max_tokens = 8});
  const Answer answer = server.Generate({1, 2, 3}, options);
  EXPECT_EQ(answer.reason, FinishReason::kError);
  EXPECT_EQ(answer.tokens.size(), 2U);
  EXPECT_EQ(
      answer.error,
      "BadArgument: SamplingOptions::filter allows no token for token 5 of sample 0, not even "
      "the end of the answer");
  EXPECT_EQ((server.answers[{other, 0}].reason), FinishReason::kLength);
}

TEST(TokenFilter, OneThatFailsEndsItsRequestAlone) {
  for (int64_t call = 1; call < 12; ++call) {
    const Script script = HashScript(2);
    Server server({.chunk = 64, .speculation = kNGrams, .tree_nodes = 40});
    Prepare(server.model);
    script->fault = [calls = int64_t{0}, call]() mutable {
      return ++calls >= call ? Status(StatusCode::kIoError, "asked for") : Status();
    };
    SamplingOptions options{.max_tokens = 30, .temperature = 1};
    const Answer want = Server().Generate({4, 5}, {.max_tokens = 8, .ignore_eos = true});
    const int64_t other = server.Submit({4, 5}, {.max_tokens = 8, .ignore_eos = true});
    options.filter = FilterOf(script);
    const Answer answer = server.Generate({1, 2, 3, 1, 2, 3, 1, 2}, options);
    EXPECT_EQ(answer.reason, FinishReason::kError) << call;
    EXPECT_EQ(answer.error.substr(0, 18), "IoError: asked for") << call;
    EXPECT_EQ((server.answers[{other, 0}].tokens.size()), want.tokens.size());
    options.filter = nullptr;
    EXPECT_EQ(script->living, 0) << call;
  }
}

// All others waited until the requests before it had ended.
TEST(TokenFilter, OneThatCannotBeForkedEndsInTheFirstStepOfItsPrompt) {
  const Script script = HashScript(2);
  script->fault = [calls = 0]() mutable {  // the second sample has none
    return ++calls == 2 ? Status(StatusCode::kIoError, "asked for") : Status();
  };
  Server server({.chunk = 64});
  Prepare(server.model);
  const int64_t before = server.Submit({4, 5}, {.max_tokens = 8});
  SamplingOptions options{.max_tokens = 8, .n = 2};
  options.filter = FilterOf(script);
  const int64_t id = server.Submit({1, 2, 3}, options);
  const int64_t behind = server.Submit({4, 6}, {.max_tokens = 8});
  ASSERT_TRUE(server.Step().ok());
  const Answer& failed = server.answers[{id, 1}];
  EXPECT_EQ(failed.reason, FinishReason::kError);
  EXPECT_EQ(failed.error,
            "IoError: asked for; SamplingOptions::filter failed for token 3 of sample 1");
  for (const auto& key : {std::pair(before, int64_t{0}), {id, 0}, {behind, 0}})
    EXPECT_EQ(server.answers[key].tokens.size(), 1U) << key.first;
  server.Finish();
  EXPECT_EQ((server.answers[{behind, 0}].reason), FinishReason::kLength);
}

// The others computed the prompt again.
TEST(TokenFilter, OneThatFailsForASampleLeavesThePromptToTheOthers) {
  const Script script =
      MakeScript(FakeModel::kVocabSize, [](std::span<const int32_t>, int32_t) { return true; });
  script->fault = [calls = 0]() mutable {  // three forks, then the mask of the first sample
    return ++calls == 4 ? Status(StatusCode::kIoError, "asked for") : Status();
  };
  Server server({.chunk = 64});
  RandomSequence random(5);
  SamplingOptions options{.max_tokens = 4, .n = 3};
  options.filter = FilterOf(script);
  const int64_t id = server.Submit(RandomTokens(40, &random), options);
  server.Finish();
  EXPECT_EQ((server.answers[{id, 0}].reason), FinishReason::kError);
  for (const int64_t sample : {1, 2}) {
    EXPECT_EQ((server.answers[{id, sample}].reason), FinishReason::kLength);
    EXPECT_EQ((server.answers[{id, sample}].tokens.size()), 4U);
  }
  EXPECT_EQ(server.engine->Stats().computed_tokens, 40 + 2 * 3);
}

TEST(TokenFilter, OptionsThatDoNotGoWithItAreRefused) {
  Server server;
  SamplingOptions options;
  options.filter = FilterOf(MakeScript(7, [](std::span<const int32_t>, int32_t) { return true; }));
  Result<int64_t> id = server.engine->Submit(Tokens{1}, options);
  EXPECT_EQ(id.status().ToString(),
            "BadArgument: SamplingOptions::filter vocab_size is 7; it must be that of the model, "
            "61");
  options.filter = FilterOf(HashScript(1));
  options.ignore_eos = true;
  id = server.engine->Submit(Tokens{1}, options);
  EXPECT_EQ(id.status().code(), StatusCode::kBadArgument);
  EXPECT_NE(id.status().ToString().find("ignore_eos"), std::string::npos);
}

}  // namespace
}  // namespace quire
