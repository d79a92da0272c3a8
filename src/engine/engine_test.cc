// The engine over the real cache and a small deterministic model (fake_model.h). The oracle of
// every answer is the same request alone, in an engine with room for all and nothing to reuse.
#include "quire/engine.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <set>
#include <thread>
#include <utility>

#include "engine/testing/test_server.h"

namespace quire {
namespace {

void ExpectSameAnswers(const std::vector<Job>& jobs, const Sizes& sizes, const Answers& want,
                       const std::string& what, EngineStats* stats = nullptr) {
  Server server(sizes);
  for (const Job& job : jobs) server.Submit(job.prompt, job.options);
  server.Finish();
  EXPECT_EQ(server.cache->out_of_pages, 0) << what << ": the scheduler counts pages otherwise";
  ASSERT_EQ(server.answers.size(), want.size()) << what;
  for (const auto& [key, answer] : want) {
    ExpectEqual(
        server.answers[key], answer,
        what + ", request " + std::to_string(key.first) + ", sample " + std::to_string(key.second));
  }
  if (stats != nullptr) *stats = server.engine->Stats();
}

// ---- Nothing that the scheduler does can be seen in an answer.

TEST(Engine, BatchedAnswersEqualThoseAlone) {
  const std::vector<Job> jobs = RandomJobs(24, 1);
  const Answers want = Alone(jobs);
  for (const int64_t chunk : {1, 3, 16, 200}) {
    for (const int64_t page_size : {1, 3, 16}) {
      for (const bool prefix_cache : {false, true}) {
        ExpectSameAnswers(
            jobs, {.page_size = page_size, .chunk = chunk, .prefix_cache = prefix_cache}, want,
            "chunk " + std::to_string(chunk) + ", page size " + std::to_string(page_size) +
                ", prefix cache " + std::to_string(prefix_cache));
      }
    }
  }
}

TEST(Engine, PreemptedRequestsGoOnAsIfNothingHadHappened) {
  const std::vector<Job> jobs = RandomJobs(24, 2);
  const Answers want = Alone(jobs);
  int64_t needed = 0;
  int64_t prompt_tokens = 0;
  for (const Job& job : jobs) {
    const auto length = static_cast<int64_t>(job.prompt.size());
    prompt_tokens += length;
    needed = std::max(needed, PagesForRequest(length, job.options.max_tokens, job.options.n, 4));
  }
  int64_t preemptions = 0;
  for (const bool prefix_cache : {false, true}) {
    for (const int64_t more : {0, 1, 3, 6, 10}) {
      EngineStats stats;
      ExpectSameAnswers(jobs, {.pages = needed + more, .prefix_cache = prefix_cache}, want,
                        "pages " + std::to_string(needed + more), &stats);
      preemptions += stats.preemptions;
      EXPECT_EQ(stats.prompt_tokens, prompt_tokens) << "each prompt counts once";
    }
  }
  EXPECT_GT(preemptions, 10);
}

TEST(Engine, AnswersSurviveCancelledNeighbours) {
  const std::vector<Job> jobs = RandomJobs(16, 3);
  const Answers want = Alone(jobs);
  for (const int64_t pages : {60, 2000}) {
    Server server({.pages = pages, .chunk = 16});
    RandomSequence random(4);
    for (int64_t i = 0; i < 16; ++i) {
      server.Submit(jobs[i].prompt, jobs[i].options);
      for (int64_t steps = random.Below(6); steps > 0; --steps) ASSERT_TRUE(server.Step().ok());
      if (i % 3 != 2) continue;
      const Status status = server.engine->Cancel(i - random.Below(3));
      server.engine->CheckInvariants();
      EXPECT_TRUE(status.ok() || status.code() == StatusCode::kUnknownSequence);
    }
    server.Finish();
    int64_t cancelled = 0;
    for (const auto& [key, answer] : want) {
      const Answer& got = server.answers[key];
      if (got.reason == FinishReason::kCancelled) {
        ++cancelled;
      } else {
        ExpectEqual(got, answer, "request " + std::to_string(key.first));
      }
    }
    EXPECT_GT(cancelled, 0);
  }
}

// ---- Pages.

TEST(Engine, HoldsNoPageWhenIdleWithoutPrefixCache) {
  Server server({.pages = 60, .prefix_cache = false});
  for (const Job& job : RandomJobs(12, 5)) server.Submit(job.prompt, job.options);
  server.Finish();
  const EngineStats stats = server.engine->Stats();
  EXPECT_EQ(stats.pages_free, stats.pages_total);
  EXPECT_EQ(stats.pages_in_use, 0);
  EXPECT_TRUE(server.cache->Empty());
  EXPECT_EQ(stats.cached_tokens, 0);
}

TEST(Engine, HoldsOnlyRetainedSequencesWhenIdle) {
  Server server;
  for (const Job& job : RandomJobs(12, 6)) server.Submit(job.prompt, job.options);
  server.Finish();
  const EngineStats stats = server.engine->Stats();
  EXPECT_GT(stats.retained_sequences, 0);
  EXPECT_EQ(server.cache->sequence_count(), stats.retained_sequences);
  EXPECT_EQ(stats.pages_free + stats.pages_in_use, stats.pages_total);
}

TEST(Engine, RetainsAsManyTextsAsThereArePages) {
  constexpr int64_t kTexts = 1500;
  Server server({.pages = 2 * kTexts + 100, .page_size = 16});
  RandomSequence random(11);
  for (int64_t i = 0; i < kTexts; ++i) {
    server.Submit(RandomTokens(8, &random), {.max_tokens = 1});
    server.Finish();
  }
  const EngineStats stats = server.engine->Stats();
  EXPECT_EQ(stats.retained_sequences, kTexts);
  EXPECT_EQ(stats.retained_pages, kTexts);
}

TEST(Engine, CancelFreesPagesAtOnce) {
  Server server({.prefix_cache = false});
  RandomSequence random(7);
  const int64_t id = server.Submit(RandomTokens(50, &random), {.max_tokens = 100});
  for (int i = 0; i < 4; ++i) ASSERT_TRUE(server.Step().ok());
  EXPECT_GT(server.engine->Stats().pages_in_use, 0);
  ASSERT_TRUE(server.engine->Cancel(id).ok());
  EXPECT_EQ(server.engine->Stats().pages_in_use, 0);
  EXPECT_FALSE(server.engine->Idle()) << "its end is still to be reported";
  server.Finish();
  const Answer& answer = server.answers[{id, 0}];
  EXPECT_EQ(answer.reason, FinishReason::kCancelled);
  EXPECT_EQ(answer.prompt_tokens, 50);
  EXPECT_EQ(answer.completion_tokens, static_cast<int64_t>(answer.tokens.size()));
  EXPECT_EQ(server.engine->Cancel(id).code(), StatusCode::kUnknownSequence);
}

// A fork in the middle of a page holds that page and one of its own; with as many pages as the
// request needs alone it can only end if it gives the shared one up.
TEST(Engine, GivesUpSharedPagesWhenTheyAreInTheWay) {
  RandomSequence random(8);
  Tokens prompt = RandomTokens(6, &random);
  Server server({.pages = 4, .page_size = 4});
  server.Generate(prompt, {.max_tokens = 1, .ignore_eos = true});
  prompt.push_back(60);
  const SamplingOptions options{.max_tokens = 9, .ignore_eos = true};
  const Answer got = server.Generate(prompt, options);
  EXPECT_EQ(got.reason, FinishReason::kLength);
  EXPECT_EQ(got.cached_tokens, 6);
  ExpectEqual(got, Alone({{prompt, options}}).at({0, 0}), "restarted");
}

// A request that was computed again takes no more pages than were counted: its samples fork from
// their leader, however much of their answers a newcomer has computed in pages of its own.
TEST(Engine, SamplesOfARestartedRequestForkFromTheirLeader) {
  RandomSequence random(25);
  const Tokens prompt = RandomTokens(16, &random);
  const SamplingOptions options{
      .max_tokens = 8, .temperature = 2.0F, .seed = 1, .n = 4, .ignore_eos = true};
  const SamplingOptions one{.max_tokens = 1, .ignore_eos = true};
  const Answers want = Alone({{prompt, options}});
  const Tokens& second = want.at({0, 1}).tokens;
  ASSERT_NE((want.at({0, 0}).tokens[0]), second[0]);
  Tokens newcomer = prompt;
  newcomer.insert(newcomer.end(), second.begin(), second.begin() + 5);
  Tokens in_the_way(prompt.begin(), prompt.begin() + 6);  // a page that is shared in part
  for (const int32_t token : {prompt[6], prompt[7]}) {
    in_the_way.push_back((token + 1) % FakeModel::kVocabSize);
  }

  Server server({.pages = PagesForRequest(16, 8, 4, 4), .page_size = 4, .chunk = 14});
  server.Generate(in_the_way, one);
  const int64_t id = server.Submit(prompt, options);
  for (int i = 0; i < 6; ++i) ASSERT_TRUE(server.Step().ok());
  EXPECT_EQ(server.engine->Stats().pages_in_use, 4) << "the leader's first 14 tokens";
  server.Submit(newcomer, one);
  ASSERT_TRUE(server.Step().ok());
  EXPECT_EQ(server.engine->Stats().retained_tokens, 21) << "the newcomer's, beside the leader's";
  server.Finish();
  for (int64_t sample = 0; sample < 4; ++sample) {
    ExpectEqual(server.answers[{id, sample}], want.at({0, sample}),
                "sample " + std::to_string(sample));
  }
}

// The scheduler had counted on pages that were not there. The younger request makes room for the
// older one and does not come back in the same step.
TEST(Engine, WhoMadeRoomForAForwardStaysOutOfIt) {
  RandomSequence random(26);
  Server server({.prefix_cache = false});
  const SamplingOptions options{.max_tokens = 6, .ignore_eos = true};
  for (int i = 0; i < 2; ++i) server.Submit(RandomTokens(9, &random), options);
  ASSERT_TRUE(server.Step().ok());
  bool fails = true;
  server.cache->fault = [&](std::string_view call) {
    return call == "BeginForward" && std::exchange(fails, false)
               ? Status(StatusCode::kOutOfPages, "injected")
               : Status();
  };
  ASSERT_TRUE(server.Step().ok());
  EXPECT_EQ(server.engine->Stats().preemptions, 1);
  EXPECT_EQ(server.engine->Stats().running, 1);
  EXPECT_EQ((server.answers[{0, 0}].tokens.size()), 2U);
  EXPECT_EQ((server.answers[{1, 0}].tokens.size()), 1U);
  server.Finish();
}

// Each retained sequence has its whole text, whatever it shares of its pages.
TEST(Engine, TextsOfRetainedSequencesAreBounded) {
  RandomSequence random(27);
  Server server({.pages = 200, .page_size = 4});
  Tokens prompt = RandomTokens(400, &random);
  const SamplingOptions options{.max_tokens = 1, .ignore_eos = true};
  server.Generate(prompt, options);
  for (int32_t i = 0; i < 60; ++i) {
    prompt.back() = i;
    const Answer answer = server.Generate(prompt, options);
    EXPECT_EQ(answer.cached_tokens, 399);
  }
  const EngineStats stats = server.engine->Stats();
  EXPECT_GT(stats.retained_tokens, 10'000);
  EXPECT_LE(stats.retained_tokens, 16 * 200 * 4);
}

// It had the engine's number of the request, which a caller of an EngineLoop does not know.
TEST(Engine, ARequestThatTheCacheCannotHoldIsToldWhatToDo) {
  Server server;
  const int64_t id = server.Submit({1, 2, 3}, {.max_tokens = 6, .ignore_eos = true});
  server.cache->fault = [](std::string_view call) {
    return call == "BeginForward" ? Status(StatusCode::kOutOfPages, "injected") : Status();
  };
  server.Finish();
  const Answer& answer = server.answers[{id, 0}];
  EXPECT_EQ(answer.reason, FinishReason::kError);
  EXPECT_EQ(answer.error,
            "OutOfPages: the request runs alone, and the cache has no page left for its next "
            "token; raise EngineOptions::kv_bytes or lower max_tokens or n");
}

// What steps write is taken when the engine is made, so that it is what the memory plan says:
// memory that grew with the steps would grow beyond them.
TEST(Engine, MemoryForLogitsIsTakenOnce) {
  Server server({.chunk = 16,
                 .sequences = 8,
                 .speculation = {.draft = DraftKind::kModel, .draft_tokens = 3, .branches = 1},
                 .tree_nodes = 12,
                 .draft_seed = 0});
  const auto taken = [&] {
    return server.engine->step_bytes() + server.engine->model_drafter()->logits_bytes();
  };
  const int64_t at_first = taken();
  for (int32_t i = 0; i < 8; ++i) {
    server.Submit({i}, {.max_tokens = 20, .ignore_eos = true});
    ASSERT_TRUE(server.Step().ok());
    EXPECT_EQ(taken(), at_first) << i;
  }
  const Tokens text(10, 1);
  const std::span<const int32_t> prompts[] = {text, text};
  std::vector<float> first(10 * FakeModel::kVocabSize), second(first);
  float* const buffers[] = {first.data(), second.data()};
  ASSERT_TRUE(server.engine->Logits(prompts, buffers).ok());
  EXPECT_EQ(taken(), at_first) << "what Logits needs beyond it is given back";
}

// ---- Prefix cache.

TEST(Engine, FindsTheLongestPrefixToTheToken) {
  RandomSequence random(9);
  const Tokens prompt = RandomTokens(37, &random);
  const SamplingOptions options{.max_tokens = 10, .ignore_eos = true};
  for (const int64_t page_size : {1, 4, 16}) {
    Server server({.page_size = page_size});
    const Answer first = server.Generate(prompt, options);
    EXPECT_EQ(first.cached_tokens, 0);
    const Answer again = server.Generate(prompt, options);
    EXPECT_EQ(again.cached_tokens, 36) << "the last token is computed for its logits";
    ExpectEqual(again, first, "again");

    Tokens next_turn = prompt;  // the KV of the answer's last token was never computed
    next_turn.insert(next_turn.end(), first.tokens.begin(), first.tokens.end());
    next_turn.insert(next_turn.end(), {1, 2, 3});
    const Answer second_turn = server.Generate(next_turn, options);
    EXPECT_EQ(second_turn.cached_tokens, 37 + 9);
    ExpectEqual(second_turn, Alone({{next_turn, options}}).at({0, 0}), "second turn");

    for (const int64_t common : {1, 5, 17, 31}) {
      Tokens other(prompt.begin(), prompt.begin() + common);
      other.push_back((prompt[common] + 1) % FakeModel::kVocabSize);
      other.push_back(5);
      const Answer branch = server.Generate(other, options);
      EXPECT_EQ(branch.cached_tokens, common);
      ExpectEqual(branch, Alone({{other, options}}).at({0, 0}), "branch");
    }
  }
}

TEST(Engine, RequestsThatArriveTogetherComputeTheirCommonBeginningOnce) {
  RandomSequence random(10);
  const Tokens system = RandomTokens(64, &random);
  // With 100 the second one could begin in the first one's step.
  for (const int64_t chunk : {16, 100}) {
    Server server({.chunk = chunk});
    for (int32_t i = 0; i < 6; ++i) {
      Tokens prompt = system;
      prompt.insert(prompt.end(), {i, 7, 8});
      server.Submit(prompt, {.max_tokens = 4, .ignore_eos = true});
    }
    server.Finish();
    EXPECT_GE(server.engine->Stats().cached_tokens, 5 * 64) << "chunk " << chunk;
    EXPECT_EQ(server.engine->Stats().prompt_tokens, 6 * 67);
  }
}

TEST(Engine, EvictsRetainedSequencesForNewRequests) {
  Server server({.pages = 40});
  const std::vector<Job> jobs = RandomJobs(40, 11);
  for (const Job& job : jobs) {
    SamplingOptions options = job.options;
    options.n = 1;
    server.Generate(job.prompt, options);
    EXPECT_EQ(server.engine->Stats().preemptions, 0);
  }
  EXPECT_GT(server.engine->Stats().cached_tokens, 0);
}

// ---- Samples, stops, ends.

TEST(Engine, SamplesShareThePromptAndDrawFromTheirOwnStreams) {
  RandomSequence random(12);
  const Tokens prompt = RandomTokens(21, &random);
  const SamplingOptions one{.max_tokens = 12, .temperature = 1.5F, .seed = 3, .ignore_eos = true};
  SamplingOptions four = one;
  four.n = 4;
  Server server({.prefix_cache = false});
  const int64_t id = server.Submit(prompt, four);
  ASSERT_TRUE(server.Step().ok());
  ASSERT_TRUE(server.Step().ok());
  EXPECT_EQ(server.cache->sequence_count(), 4);
  EXPECT_EQ(server.engine->Stats().pages_in_use, 5 + 4) << "five full pages are shared";
  server.Finish();
  Server alone;
  ExpectEqual(server.answers[{id, 0}], alone.Generate(prompt, one), "sample 0");
  for (int64_t i = 1; i < 4; ++i) {
    const Answer& answer = server.answers[{id, i}];
    EXPECT_NE(answer.tokens, (server.answers[{id, 0}].tokens));
    EXPECT_EQ(answer.tokens.size(), 12U);
  }
  int64_t completion_tokens = 0;
  for (int64_t i = 0; i < 4; ++i) {
    completion_tokens = std::max(completion_tokens, server.answers[{id, i}].completion_tokens);
  }
  EXPECT_EQ(completion_tokens, 48);
}

// Sample 0 may end with its first token, when the others still need its sequence.
TEST(Engine, SamplesOutliveALeaderThatEndsAtOnce) {
  RandomSequence random(13);
  const Tokens prompt = RandomTokens(9, &random);
  SamplingOptions options{.max_tokens = 6, .temperature = 3.0F, .n = 3, .ignore_eos = true};
  for (options.seed = 0; options.seed < 20; ++options.seed) {
    Server reference;
    reference.Generate(prompt, options);
    SamplingOptions stopped = options;
    stopped.stop = {{reference.answers[{0, 0}].tokens[0]}};
    const Answers want = Alone({{prompt, stopped}});
    EXPECT_TRUE(want.at({0, 0}).tokens.empty());
    EXPECT_EQ(want.at({0, 0}).reason, FinishReason::kStop);
    for (int64_t i = 1; i < 3; ++i) {
      Tokens expected = reference.answers[{0, i}].tokens;
      expected.erase(std::find(expected.begin(), expected.end(), stopped.stop[0][0]),
                     expected.end());
      EXPECT_EQ(want.at({0, i}).tokens, expected);
    }
  }
}

// It leaves them its KV of the prompt, also where nothing is kept between requests.
TEST(Engine, ThePromptIsComputedOnceForALeaderThatEndsAtOnce) {
  RandomSequence random(27);
  const Tokens prompt = RandomTokens(9, &random);
  SamplingOptions options{
      .max_tokens = 6, .temperature = 3.0F, .seed = 2, .n = 2, .ignore_eos = true};
  options.stop = {{Alone({{prompt, options}}).at({0, 0}).tokens[0]}};
  Server server({.prefix_cache = false});
  size_t computed = 0;
  server.model->fault = [&](std::span<const int32_t> tokens) {
    computed += tokens.size();
    return Status();
  };
  EXPECT_TRUE(server.Generate(prompt, options).tokens.empty());
  EXPECT_EQ((server.answers[{0, 1}].reason), FinishReason::kLength);
  EXPECT_EQ(computed, 9U + 5U) << "the prompt, and the second answer but its last token";
}

TEST(Engine, CutsTheAnswerBeforeAStopSequenceThatComesInPieces) {
  RandomSequence random(14);
  const Tokens prompt = RandomTokens(10, &random);
  const SamplingOptions plain{
      .max_tokens = 20, .temperature = 1.0F, .seed = 5, .logprobs = 1, .ignore_eos = true};
  Server reference;
  const Answer whole = reference.Generate(prompt, plain);
  ASSERT_EQ(whole.tokens.size(), 20U);
  for (int64_t length = 1; length <= 5; ++length) {
    SamplingOptions options = plain;
    const Tokens stop(whole.tokens.begin() + 9, whole.tokens.begin() + 9 + length);
    options.stop = {{59, 59, 59, 59}, stop};
    const auto found =
        std::search(whole.tokens.begin(), whole.tokens.end(), stop.begin(), stop.end());
    const Tokens expected(whole.tokens.begin(), found);
    Server server;
    const Answer answer = server.Generate(prompt, options);
    EXPECT_EQ(answer.tokens, expected);
    EXPECT_EQ(answer.logprobs.size(), expected.size());
    EXPECT_EQ(answer.reason, FinishReason::kStop);
    EXPECT_EQ(answer.completion_tokens, static_cast<int64_t>(expected.size()));
    EXPECT_EQ(server.engine->Stats().completion_tokens, answer.completion_tokens);
    // As if it had stopped at once: the KV of what was cut is gone.
    const int64_t kept = 10 + static_cast<int64_t>(expected.size());
    EXPECT_EQ(server.engine->Stats().retained_tokens, kept);
  }
}

TEST(Engine, GivesOutHeldBackTokensWhenTheStopSequenceDoesNotComeTrue) {
  RandomSequence random(15);
  const Tokens prompt = RandomTokens(10, &random);
  const SamplingOptions plain{
      .max_tokens = 12, .temperature = 1.0F, .seed = 6, .logprobs = 0, .ignore_eos = true};
  Server reference;
  const Answer whole = reference.Generate(prompt, plain);
  SamplingOptions options = plain;
  // Begins like the answer at two places and differs then; the second is cut short by max_tokens.
  const int32_t other = (whole.tokens[6] + 1) % FakeModel::kVocabSize;
  options.stop = {{whole.tokens[3], whole.tokens[4], whole.tokens[5], other},
                  {whole.tokens[10], whole.tokens[11], 1, 1, 1}};
  Server server;
  const int64_t id = server.Submit(prompt, options);
  for (int i = 0; i < 6; ++i) ASSERT_TRUE(server.Step().ok());
  EXPECT_EQ((server.answers[{id, 0}].tokens.size()), 3U) << "three of six may begin the stop";
  server.Finish();
  ExpectEqual(server.answers[{id, 0}], whole, "held back");
}

// Stop strings are found by the front end, when tokens behind them may have been given out.
TEST(Engine, StopPopsTheSurplusAsIfTheSampleHadStoppedAtOnce) {
  RandomSequence random(24);
  const Tokens prompt = RandomTokens(10, &random);
  const SamplingOptions options{
      .max_tokens = 20, .temperature = 1.0F, .seed = 3, .n = 2, .ignore_eos = true};
  const Answers want = Alone({{prompt, options}});
  for (const bool preempted : {false, true}) {
    Server server({.pages = preempted ? 14 : 100});
    const int64_t older =
        server.Submit(RandomTokens(2, &random), {.max_tokens = 40, .ignore_eos = true});
    const int64_t id = server.Submit(prompt, options);
    while (server.answers[{id, 0}].tokens.size() < 9) ASSERT_TRUE(server.Step().ok());
    while (preempted && server.engine->Stats().preemptions == 0) ASSERT_TRUE(server.Step().ok());
    const auto given = static_cast<int64_t>(server.answers[{id, 0}].tokens.size());
    const int64_t counted = server.engine->Stats().completion_tokens;
    EXPECT_EQ(server.engine->Stop(id, 0, given + 1).code(), StatusCode::kBadArgument);
    EXPECT_EQ(server.engine->Stop(id, 0, -1).code(), StatusCode::kBadArgument);
    EXPECT_EQ(server.engine->Stop(id, 2, 0).code(), StatusCode::kUnknownSequence);
    EXPECT_EQ(server.engine->Stop(id + 1, 0, 0).code(), StatusCode::kUnknownSequence);
    ASSERT_TRUE(server.engine->Stop(id, 0, 6).ok());
    server.engine->CheckInvariants();
    EXPECT_EQ(server.engine->Stats().completion_tokens, counted - (given - 6));
    EXPECT_EQ(server.engine->Stop(id, 0, 6).code(), StatusCode::kUnknownSequence);
    if (!preempted) {
      EXPECT_EQ(server.engine->Stats().retained_tokens, 16);
    }
    ASSERT_TRUE(server.Step().ok());
    EXPECT_EQ((server.answers[{id, 0}].reason), FinishReason::kStop);
    server.Finish();
    ExpectEqual(server.answers[{id, 1}], want.at({0, 1}), "the other sample");
    EXPECT_EQ((server.answers[{id, 1}].completion_tokens), 6 + 20);
    EXPECT_EQ((server.answers[{older, 0}].tokens.size()), 40U);
  }
}

// The others have no answer then either: all of them draw where the prompt ends.
TEST(Engine, ASampleThatIsStoppedBeforeThePromptIsComputedLeavesTheOthers) {
  RandomSequence random(28);
  const Tokens prompt = RandomTokens(40, &random);
  const SamplingOptions options{
      .max_tokens = 6, .temperature = 1.0F, .seed = 4, .n = 4, .ignore_eos = true};
  const Answers want = Alone({{prompt, options}});
  for (const int64_t stopped : {0, 2}) {
    Server server({.chunk = 16});
    const int64_t id = server.Submit(prompt, options);
    ASSERT_TRUE(server.Step().ok());
    ASSERT_TRUE(server.engine->Stop(id, stopped, 0).ok());
    server.Finish();
    for (int64_t sample = 0; sample < 4; ++sample) {
      const Answer& answer = server.answers[{id, sample}];
      if (sample == stopped) {
        EXPECT_EQ(answer.reason, FinishReason::kStop);
        EXPECT_TRUE(answer.tokens.empty());
      } else {
        ExpectEqual(answer, want.at({0, sample}), "sample " + std::to_string(sample));
      }
    }
  }
}

TEST(Engine, EndsAtEosUnlessToldToIgnoreIt) {
  RandomSequence random(16);
  const Tokens prompt = RandomTokens(10, &random);
  SamplingOptions options{.max_tokens = 15, .temperature = 1.0F, .seed = 8, .ignore_eos = true};
  Server reference;
  const Tokens whole = reference.Generate(prompt, options).tokens;
  Server server;
  server.model->mutable_info().eos_token_ids = {whole[7]};
  EXPECT_EQ(server.Generate(prompt, options).tokens, whole);
  options.ignore_eos = false;
  const Answer answer = server.Generate(prompt, options);
  EXPECT_EQ(answer.tokens, Tokens(whole.begin(), std::find(whole.begin(), whole.end(), whole[7])));
  EXPECT_EQ(answer.reason, FinishReason::kStop);
}

TEST(Engine, DecodesAreNotHeldUpByALongPrompt) {
  RandomSequence random(17);
  Server server({.chunk = 8});
  const int64_t id =
      server.Submit(RandomTokens(4, &random), {.max_tokens = 30, .ignore_eos = true});
  ASSERT_TRUE(server.Step().ok());
  server.Submit(RandomTokens(200, &random), {.max_tokens = 1});
  for (int i = 0; i < 10; ++i) ASSERT_TRUE(server.Step().ok());
  EXPECT_EQ((server.answers[{id, 0}].tokens.size()), 11U);
}

// ---- Logits.

TEST(Engine, LogitsAreTheSameInAnyBatchAndBesideRequests) {
  RandomSequence random(18);
  std::vector<Tokens> prompts;
  for (int i = 0; i < 11; ++i) prompts.push_back(RandomTokens(1 + random.Below(30), &random));
  const auto compute = [](Server* server, std::span<const Tokens> texts) {
    std::vector<std::span<const int32_t>> views(texts.begin(), texts.end());
    std::vector<std::vector<float>> logits;
    std::vector<float*> buffers;
    for (const Tokens& text : texts) logits.emplace_back(text.size() * FakeModel::kVocabSize);
    for (auto& buffer : logits) buffers.push_back(buffer.data());
    const Status status = server->engine->Logits(views, buffers);
    EXPECT_TRUE(status.ok()) << status.ToString();
    server->engine->CheckInvariants();
    return logits;
  };
  std::vector<std::vector<float>> want;
  for (const Tokens& prompt : prompts) {
    Server server;
    want.push_back(compute(&server, {&prompt, 1})[0]);
  }
  for (const int64_t chunk : {1, 7, 64}) {
    for (const int64_t pages : {24, 200}) {
      Server server({.pages = pages, .chunk = chunk});
      server.Submit(RandomTokens(20, &random), {.max_tokens = 30, .ignore_eos = true});
      ASSERT_TRUE(server.Step().ok());
      EXPECT_EQ(compute(&server, prompts), want);
      server.Finish();
      EXPECT_EQ(compute(&server, prompts), want) << "retained sequences are given up";
    }
  }
}

TEST(Engine, LogitsSaysWhatIsWrongWithItsArguments) {
  Server server({.pages = 8, .page_size = 4});
  std::vector<float> buffer(1000 * FakeModel::kVocabSize);
  float* const buffers[] = {buffer.data(), buffer.data()};
  const Tokens ok = {1, 2}, foreign = {1, 61}, too_long(33, 1);
  const auto call = [&](const Tokens& a, const Tokens& b, size_t count) {
    const std::span<const int32_t> prompts[] = {a, b};
    return server.engine->Logits(prompts, {buffers, count});
  };
  EXPECT_TRUE(call(ok, ok, 2).ok());
  EXPECT_EQ(call(ok, ok, 1).code(), StatusCode::kBadArgument);
  EXPECT_EQ(call(ok, {}, 2).code(), StatusCode::kBadArgument);
  EXPECT_EQ(call(ok, too_long, 2).code(), StatusCode::kTooLarge);
  const Status status = call(ok, foreign, 2);
  EXPECT_EQ(status.code(), StatusCode::kBadArgument);
  EXPECT_NE(status.message().find("prompts[1][1] is token 61"), std::string_view::npos)
      << status.ToString();
  server.Submit(Tokens(20, 1), {.max_tokens = 8, .ignore_eos = true});
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(server.Step().ok());
  EXPECT_EQ(call(ok, Tokens(30, 1), 2).code(), StatusCode::kOutOfPages);
  EXPECT_TRUE(server.engine->Logits({}, {}).ok());
  server.engine->CheckInvariants();
  server.Finish();
  EXPECT_LT(server.engine->Stats().pages_free, 2);
  EXPECT_TRUE(call(ok, Tokens(30, 2), 2).ok()) << "retained sequences are given up";
}

// ---- Errors.

TEST(Engine, AFailingRequestEndsAloneAndHurtsNoNeighbour) {
  std::vector<Job> jobs = RandomJobs(8, 19);
  for (Job& job : jobs) {
    std::replace(job.prompt.begin(), job.prompt.end(), 60, 59);
    job.options.logit_bias = {{60, -1000.0F}};
  }
  const Answers want = Alone(jobs);
  jobs[3].prompt.push_back(60);
  Server server;
  server.model->fault = [](std::span<const int32_t> tokens) {
    const bool bad = std::find(tokens.begin(), tokens.end(), 60) != tokens.end();
    return bad ? Status(StatusCode::kCorrupt, "weights of token 60") : Status();
  };
  for (const Job& job : jobs) server.Submit(job.prompt, job.options);
  server.Finish();
  for (const auto& [key, answer] : want) {
    if (key.first == 3) {
      EXPECT_EQ(server.answers[key].reason, FinishReason::kError);
      EXPECT_EQ(server.answers[key].error, "Corrupt: weights of token 60");
    } else {
      ExpectEqual(server.answers[key], answer, "request " + std::to_string(key.first));
    }
  }
}

TEST(Engine, LogitsThatAreNotNumbersEndTheSample) {
  for (const float bad : {std::nanf(""), std::numeric_limits<float>::infinity()}) {
    Server server;  // with a prefix cache, which must not keep what gave such logits
    server.model->edit = [&](int32_t, int32_t position, std::span<float> logits) {
      if (position == 12) logits[5] = bad;
    };
    const Answer answer = server.Generate(Tokens(10, 3), {.max_tokens = 10, .ignore_eos = true});
    EXPECT_EQ(answer.reason, FinishReason::kError);
    EXPECT_EQ(answer.tokens.size(), 3U);
    EXPECT_NE(answer.error.find("token 13 of sample 0"), std::string::npos) << answer.error;
    EXPECT_TRUE(server.cache->Empty());
  }
}

// Every call to the cache and the model fails once, in every way; then all answers are right or say
// that they failed, and nothing is leaked (CheckInvariants after every step).
TEST(Engine, RecoversFromAnErrorAtEveryCall) {
  const std::vector<Job> jobs = RandomJobs(6, 20);
  const Answers want = Alone(jobs);
  for (const StatusCode code : {StatusCode::kOutOfMemory, StatusCode::kOutOfPages}) {
    for (int64_t fail_at = 0;; fail_at += 1 + fail_at / 20) {
      Server server({.pages = 40, .chunk = 16});
      int64_t calls = 0;
      const auto fault = [&](std::string_view call) {
        if (call == "PopN" && code == StatusCode::kOutOfPages) return Status();
        return calls++ == fail_at ? Status(code, "injected") : Status();
      };
      server.cache->fault = fault;
      server.model->fault = [&](std::span<const int32_t>) { return fault("Forward"); };
      for (const Job& job : jobs) server.Submit(job.prompt, job.options);
      for (int step = 0; !server.engine->Idle() && step < 5000; ++step) {
        const Status status = server.Step();
        EXPECT_TRUE(status.ok() || status.code() == code) << status.ToString();
      }
      ASSERT_TRUE(server.engine->Idle()) << "call " << fail_at;
      std::set<int64_t> failed;
      for (const auto& [key, answer] : want) {
        const Answer& got = server.answers[key];
        if (got.reason == FinishReason::kError) {
          failed.insert(key.first);
          EXPECT_NE(got.error.find("injected"), std::string::npos) << got.error;
        } else {
          ExpectEqual(got, answer, "call " + std::to_string(fail_at));
        }
      }
      EXPECT_LE(failed.size(), 1U) << "call " << fail_at;  // a request that fails alone
      if (calls <= fail_at) break;
    }
  }
}

// The sequence that could not be given its factors must not stay behind.
TEST(Engine, RecoversFromAnErrorWhenLongFactorsAreChosen) {
  const Tokens prompt(20, 7);
  const SamplingOptions options{.max_tokens = 5, .ignore_eos = true};
  Server reference({.long_rope = true});
  const Answer want = reference.Generate(prompt, options);
  Server server({.long_rope = true});
  int64_t calls = 0;
  server.cache->fault = [&](std::string_view call) {
    const bool fails = call == "SelectLongRope" && calls++ == 0;
    return fails ? Status(StatusCode::kOutOfMemory, "injected") : Status();
  };
  server.Submit(prompt, options);
  EXPECT_EQ(server.Step().code(), StatusCode::kOutOfMemory);
  EXPECT_TRUE(server.cache->Empty());
  server.Finish();
  ExpectEqual(server.answers[{0, 0}], want, "after the error");
  EXPECT_EQ(calls, 2);
  server.cache->fault = [](std::string_view call) {
    return call == "SelectLongRope" ? Status(StatusCode::kOutOfMemory, "injected") : Status();
  };
  std::vector<float> logits(prompt.size() * FakeModel::kVocabSize);
  const std::span<const int32_t> prompts[] = {prompt};
  float* const buffers[] = {logits.data()};
  EXPECT_EQ(server.engine->Logits(prompts, buffers).code(), StatusCode::kOutOfMemory);
  server.engine->CheckInvariants();
}

// What cannot be retained is removed, and costs a later request its time only.
TEST(Engine, GoesOnWhenASequenceCannotBeRetained) {
  Server server;
  server.cache->fault = [](std::string_view call) {
    return call == "SetRetained" ? Status(StatusCode::kOutOfMemory, "injected") : Status();
  };
  const Answer first = server.Generate(Tokens(20, 7), {.max_tokens = 5, .ignore_eos = true});
  EXPECT_TRUE(server.cache->Empty());
  const Answer second = server.Generate(Tokens(20, 7), {.max_tokens = 5, .ignore_eos = true});
  ExpectEqual(second, first, "again");
  EXPECT_EQ(second.cached_tokens, 0);
}

TEST(Engine, SecondThreadGetsBadState) {
  Server server;
  Status submit, cancel, stop, step, logits;
  EngineStats stats;
  server.model->fault = [&](std::span<const int32_t>) {
    std::thread([&] {
      submit = server.engine->Submit(Tokens{1}, {}).status();
      cancel = server.engine->Cancel(0);
      stop = server.engine->Stop(0, 0, 0);
      step = server.engine->Step().status();
      logits = server.engine->Logits({}, {});
      stats = server.engine->Stats();
    }).join();
    return Status();
  };
  server.Generate({1, 2, 3}, {.max_tokens = 1});
  for (const Status& status : {submit, cancel, stop, step, logits}) {
    EXPECT_EQ(status.code(), StatusCode::kBadState);
  }
  EXPECT_EQ(stats.waiting, 1) << "as published by the last call that returned";
}

TEST(Engine, StepOfAnIdleEngineDoesNothing) {
  Server server;
  EXPECT_TRUE(server.engine->Idle());
  const Result<std::vector<StepOutput>> outputs = server.engine->Step();
  ASSERT_TRUE(outputs.ok());
  EXPECT_TRUE(outputs->empty());
  EXPECT_EQ(server.engine->Stats().steps, 0);
}

// ---- Admission.

struct BadOption {
  std::string_view in_message;
  SamplingOptions options;
};

TEST(Engine, EveryOptionOutOfRangeIsABadArgumentThatNamesIt) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const BadOption cases[] = {
      {"max_tokens is -1", {.max_tokens = -1}},
      {"max_tokens is -3", {.max_tokens = -3}},
      {"temperature is -0.5", {.temperature = -0.5F}},
      {"temperature is nan", {.temperature = kNan}},
      {"temperature is inf", {.temperature = kInfinity}},
      {"top_k is -1", {.top_k = -1}},
      {"top_p is 0", {.top_p = 0}},
      {"top_p is 1.5", {.top_p = 1.5F}},
      {"top_p is nan", {.top_p = kNan}},
      {"min_p is -0.1", {.min_p = -0.1F}},
      {"min_p is 2", {.min_p = 2}},
      {"min_p is nan", {.min_p = kNan}},
      {"repetition_penalty is 0", {.repetition_penalty = 0}},
      {"repetition_penalty is nan", {.repetition_penalty = kNan}},
      {"repetition_penalty is inf", {.repetition_penalty = kInfinity}},
      {"presence_penalty is nan", {.presence_penalty = kNan}},
      {"presence_penalty is -inf", {.presence_penalty = -kInfinity}},
      {"frequency_penalty is inf", {.frequency_penalty = kInfinity}},
      {"logit_bias token is 61", {.logit_bias = {{61, 1.0F}}}},
      {"logit_bias token is -1", {.logit_bias = {{-1, 1.0F}}}},
      {"logit_bias of token 4 is inf", {.logit_bias = {{4, kInfinity}}}},
      {"logit_bias token is 4", {.logit_bias = {{4, 1.0F}, {3, 1.0F}, {4, 2.0F}}}},
      {"n is 0", {.n = 0}},
      {"logprobs is -2", {.logprobs = -2}},
      {"logprobs is 257", {.logprobs = 257}},
      {"stop[1] is empty", {.stop = {{1}, {}}}},
      {"stop[0][1] is token 61", {.stop = {{1, 61}}}},
      {"stop[0] length is 257", {.stop = {Tokens(257, 1)}}},
      {"stop count is 65", {.stop = std::vector<Tokens>(65, Tokens{1})}},
  };
  Server server;
  for (const BadOption& bad : cases) {
    const Status status = server.engine->Submit(Tokens{1, 2}, bad.options).status();
    EXPECT_EQ(status.code(), StatusCode::kBadArgument) << bad.in_message;
    EXPECT_NE(status.message().find(bad.in_message), std::string_view::npos) << status.ToString();
  }
  const Status empty = server.engine->Submit(Tokens{}, {}).status();
  EXPECT_EQ(empty.code(), StatusCode::kBadArgument);
  const Status foreign = server.engine->Submit(Tokens{0, -7}, {}).status();
  EXPECT_EQ(foreign.code(), StatusCode::kBadArgument);
  EXPECT_NE(foreign.message().find("prompt[1] is token -7"), std::string_view::npos);
  EXPECT_TRUE(server.engine->Idle());
}

TEST(Engine, RefusesWhatCanNeverFit) {
  Server server({.pages = 10, .page_size = 4, .sequences = 3, .waiting = 2});
  const auto submit = [&](int64_t prompt, const SamplingOptions& options) {
    return server.engine->Submit(Tokens(prompt, 1), options).status().code();
  };
  EXPECT_EQ(submit(30, {.max_tokens = 11}), StatusCode::kTooLarge);
  EXPECT_EQ(submit(16, {.max_tokens = 13, .n = 2}), StatusCode::kTooLarge);
  EXPECT_EQ(submit(1, {.n = 4}), StatusCode::kTooLarge);
  EXPECT_EQ(submit(1, {.max_tokens = std::numeric_limits<int64_t>::max()}), StatusCode::kTooLarge);
  server.model->mutable_info().max_position_embeddings = 20;
  EXPECT_EQ(submit(10, {.max_tokens = 11}), StatusCode::kTooLarge);
  server.model->mutable_info().max_position_embeddings = 4096;
  EXPECT_EQ(submit(30, {.max_tokens = 10, .ignore_eos = true}), StatusCode::kOk);
  EXPECT_EQ(submit(16, {.max_tokens = 12, .n = 2, .ignore_eos = true}), StatusCode::kOk);
  EXPECT_EQ(submit(1, {.max_tokens = 1}), StatusCode::kFull);
  server.Finish();
  for (const auto& [key, answer] : server.answers) {
    EXPECT_EQ(answer.reason, FinishReason::kLength);
  }
}

}  // namespace
}  // namespace quire
