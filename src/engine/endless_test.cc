// Requests with a window and sinks: text without an end on the pages of the window, exactly what
// model and cache give with that window, and prefixes that are shared as far as they are equal.
#include <gtest/gtest.h>

#include "engine/testing/test_server.h"

namespace quire {
namespace {

SamplingOptions Endless(int64_t max_tokens, int64_t window, int64_t sinks) {
  SamplingOptions options{.max_tokens = max_tokens};
  options.window = window;
  options.sinks = sinks;
  return options;
}

// The answer token by token, straight from model and cache.
Answer Oracle(FakeModel* model, const Tokens& prompt, const SamplingOptions& options) {
  const auto cache = MakeCache(*model, {}, 2000);
  EXPECT_TRUE(cache->AddSequence(0).ok());
  EXPECT_TRUE(cache->EnableSlidingWindowForSeq(0, options.window, options.sinks).ok());
  Answer answer;
  DrawScratch scratch(FakeModel::kVocabSize, *FindBackend("").value());
  std::vector<float> logits(FakeModel::kVocabSize);
  for (int64_t i = 0; i < std::ssize(prompt) + options.max_tokens - 1; ++i) {
    const int32_t token = i < std::ssize(prompt)
                              ? prompt[static_cast<size_t>(i)]
                              : answer.tokens[static_cast<size_t>(i - std::ssize(prompt))];
    const int64_t id = 0, one = 1, row = 0;
    EXPECT_TRUE(cache->BeginForward({&id, 1}, {&one, 1}).ok());
    EXPECT_TRUE(model->Forward(*cache, {&token, 1}, {&row, 1}, logits.data()).ok());
    EXPECT_TRUE(cache->EndForward().ok());
    if (i + 1 < std::ssize(prompt)) continue;
    Draw draw;
    ReserveLogprobs(options, FakeModel::kVocabSize, &draw);
    DrawToken({.logits = logits, .prompt = prompt, .answer = answer.tokens, .options = &options},
              &scratch, &draw);
    answer.tokens.push_back(draw.token);
    if (options.logprobs >= 0) answer.logprobs.push_back(draw.logprobs);
  }
  answer.reason = FinishReason::kLength;
  answer.prompt_tokens = std::ssize(prompt);
  return answer;
}

TEST(Endless, AnswersAreThoseOfModelAndCacheWithThatWindow) {
  RandomSequence random(1);
  for (const int64_t prompt_tokens : {3, 24, 25, 150}) {
    for (const int64_t sinks : {0, 1, 6}) {
      for (const int64_t chunk : {5, 64}) {
        Server server({.chunk = chunk});
        server.model->mutable_info().max_position_embeddings = 64;
        const Tokens prompt = RandomTokens(prompt_tokens, &random);
        SamplingOptions options = Endless(130, 24, sinks);
        options.temperature = sinks == 1 ? 1.0F : 0.0F;
        options.logprobs = 2;
        ExpectEqual(server.Generate(prompt, options), Oracle(server.model, prompt, options),
                    std::to_string(prompt_tokens) + " tokens, sinks " + std::to_string(sinks));
      }
    }
  }
  // The window is seen in the answer.
  Server server;
  const Tokens prompt = RandomTokens(60, &random);
  EXPECT_NE(server.Generate(prompt, Endless(40, 16, 2)).tokens,
            server.Generate(prompt, {.max_tokens = 40}).tokens);
}

TEST(Endless, PagesStayThoseOfTheWindow) {
  for (const int64_t prompt_tokens : {3, 900}) {
    for (const bool speculates : {false, true}) {
      const int64_t max_pop = speculates ? 16 : 0;
      Server server({.pages = PagesForWindow(40 + max_pop, 5, 4),
                     .chunk = 16,
                     .speculation = {.draft = speculates ? DraftKind::kNGram : DraftKind::kNone},
                     .tree_nodes = 16,
                     .max_pop = max_pop});
      RandomSequence random(2);
      const Tokens prompt = RandomTokens(prompt_tokens, &random);
      server.Submit(prompt, Endless(600, 40, 5));
      server.Finish();
      const EngineStats stats = server.engine->Stats();
      const Answer& answer = server.answers.begin()->second;
      EXPECT_EQ(answer.tokens.size(), 600U);
      EXPECT_EQ(answer.reason, FinishReason::kLength) << answer.error;
      EXPECT_EQ(stats.preemptions, 0);
      EXPECT_EQ(stats.pages_in_use, 0) << "nothing that slid is kept";
      EXPECT_EQ(stats.accepted_tokens > 0, speculates);
    }
  }
}

TEST(Endless, ManyAtATimeEachWithTheCostOfItsWindow) {
  // Eight texts of 210 tokens on pages for three of them.
  Server server({.pages = 160, .chunk = 32, .prefix_cache = false});
  RandomSequence random(3);
  std::vector<Job> jobs(8);
  for (Job& job : jobs) {
    job.prompt = RandomTokens(10, &random);
    job.options = Endless(200, 32, 4);
    server.Submit(job.prompt, job.options);
  }
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(server.Step().ok());
  EXPECT_EQ(server.engine->Stats().running, 8);
  server.Finish();
  EXPECT_EQ(server.engine->Stats().preemptions, 0);
  for (const auto& [key, answer] : server.answers) {
    const Job& job = jobs[static_cast<size_t>(key.first)];
    ExpectEqual(answer, Oracle(server.model, job.prompt, job.options), "");
  }
}

// ---- Nothing that the scheduler does can be seen in an answer.

std::vector<Job> WindowedJobs(uint64_t seed) {
  std::vector<Job> jobs = RandomJobs(24, seed);
  for (size_t i = 0; i < jobs.size(); ++i) {
    jobs[i].options.max_tokens += 20;
    if (i % 4 == 0) continue;
    jobs[i].options.window = i % 4 == 1 ? 12 : 30;
    jobs[i].options.sinks = static_cast<int64_t>(i % 3);
  }
  return jobs;
}

TEST(Endless, SchedulesCannotBeSeenInAnAnswer) {
  const std::vector<Job> jobs = WindowedJobs(4);
  const Answers want = Alone(jobs);
  int64_t needed = 0;
  for (const Job& job : jobs) {
    needed = std::max(needed, PagesForRequest(static_cast<int64_t>(job.prompt.size()),
                                              job.options.max_tokens, job.options.n, 4));
  }
  int64_t preemptions = 0, cached = 0, accepted = 0;
  for (const int64_t pages : {needed, needed + 7, int64_t{2000}}) {
    for (const DraftKind draft : {DraftKind::kNone, DraftKind::kNGram, DraftKind::kModel}) {
      for (const int64_t chunk : {7, 64}) {
        Server server({.pages = pages,
                       .chunk = chunk,
                       .speculation = {.draft = draft},
                       .tree_nodes = 32,
                       .draft_seed = 0});
        for (const Job& job : jobs) server.Submit(job.prompt, job.options);
        server.Finish();
        for (const auto& [key, answer] : want) {
          ExpectEqual(server.answers[key], answer,
                      "pages " + std::to_string(pages) + ", request " + std::to_string(key.first));
        }
        EXPECT_EQ(server.engine->short_counts(), 0);
        if (HasFailure()) return;
        preemptions += server.engine->Stats().preemptions;
        cached += server.engine->Stats().cached_tokens;
        accepted += server.engine->Stats().accepted_tokens;
      }
    }
  }
  EXPECT_GT(preemptions, 5);
  EXPECT_GT(cached, 500);
  EXPECT_GT(accepted, 100);
}

// ---- Prefixes.

TEST(Endless, ReadsOfPlainTextsWhatSeesAllAndLeavesNothingThatSlid) {
  RandomSequence random(5);
  const Tokens text = RandomTokens(50, &random);
  const auto cached_of = [](Server* server, const Tokens& prompt, const SamplingOptions& options) {
    const int64_t before = server->engine->Stats().cached_tokens;
    const int64_t id = server->Submit(prompt, options);
    server->Finish();
    if (options.window != 0) {
      ExpectEqual(server->answers[{id, 0}], Oracle(server->model, prompt, options), "");
    }
    return server->engine->Stats().cached_tokens - before;
  };
  Server server({.chunk = 64});
  cached_of(&server, text, {.max_tokens = 2});
  EXPECT_EQ(cached_of(&server, text, Endless(5, 30, 3)), 30);
  EXPECT_EQ(cached_of(&server, text, Endless(5, 60, 3)), 49);
  EXPECT_EQ(cached_of(&server, text, Endless(30, 49, 0)), 49);
  // The one that did not slide left its text, as any other, in place of the text's beginning.
  EXPECT_EQ(server.engine->Stats().retained_tokens, 54);
  const Tokens other = RandomTokens(20, &random);
  EXPECT_EQ(cached_of(&server, other, Endless(4, 30, 3)), 0);
  EXPECT_EQ(cached_of(&server, other, {.max_tokens = 2}), 19);
  EXPECT_EQ(cached_of(&server, other, Endless(60, 21, 3)), 19);
}

TEST(Endless, SamplesForkBehindAWindowThatHasSlid) {
  RandomSequence random(6);
  const Tokens prompt = RandomTokens(70, &random);
  SamplingOptions options = Endless(60, 20, 2);
  options.temperature = 1.5F;
  options.n = 4;
  options.logprobs = 1;
  Server server({.chunk = 16});
  server.Generate(prompt, options);
  // One prompt, and the samples forked from its end.
  EXPECT_LE(server.engine->Stats().steps, 70 / 16 + 1 + 60);
  for (const auto& [key, answer] : server.answers) {
    if (key.second > 0) continue;
    ExpectEqual(answer, Oracle(server.model, prompt, options), "the first sample");
  }
  // Sample i draws with stream i of the seed: the others are those of another schedule.
  Server other({.page_size = 3, .chunk = 64, .prefix_cache = false});
  other.Generate(prompt, options);
  for (const auto& [key, answer] : server.answers) {
    ExpectEqual(other.answers[key], answer, "sample " + std::to_string(key.second));
  }
  EXPECT_NE((server.answers[{0, 0}].tokens), (server.answers[{0, 1}].tokens));
}

// ---- Refusals.

TEST(Endless, RefusesWindowsThatCannotBe) {
  Server server({.pages = 10});
  server.model->mutable_info().max_position_embeddings = 100;
  const auto refusal = [&](int64_t max_tokens, int64_t window, int64_t sinks) {
    return server.engine->Submit(Tokens{1, 2, 3}, Endless(max_tokens, window, sinks)).status();
  };
  const auto expect = [&](const Status& status, StatusCode code, const std::string& part) {
    EXPECT_EQ(status.code(), code) << status.ToString();
    EXPECT_NE(status.ToString().find(part), std::string::npos) << status.ToString();
  };
  expect(refusal(9, -1, 0), StatusCode::kBadArgument, "window is -1");
  expect(refusal(9, 8, 8), StatusCode::kBadArgument, "sinks is 8");
  expect(refusal(9, 0, 1), StatusCode::kBadArgument, "sinks is 1");
  expect(refusal(9, 8, -1), StatusCode::kBadArgument, "sinks is -1");
  expect(refusal(9, 101, 0), StatusCode::kBadArgument, "100 positions");
  expect(refusal(int64_t{1} << 30, 16, 0), StatusCode::kTooLarge, "with a window");
  expect(refusal(200, 40, 0), StatusCode::kTooLarge, "pages");
  EXPECT_TRUE(refusal(200, 30, 0).ok());
  EXPECT_TRUE(refusal(int64_t{1} << 29, 30, 2).ok());
}

}  // namespace
}  // namespace quire
