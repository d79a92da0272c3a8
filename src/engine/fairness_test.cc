// What requests owe each other: prompts leave time for samples that decode, salts take turns, and a
// prompt without an answer is there for those after it. No bit of an answer depends on it.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "engine/testing/test_server.h"

namespace quire {
namespace {

constexpr int64_t kMilli = 1'000'000;

Tokens Text(int64_t count, uint64_t seed) {
  RandomSequence random(seed);
  return RandomTokens(count, &random);
}
SamplingOptions Greedy(int64_t max_tokens) {
  return {.max_tokens = max_tokens, .logprobs = 0, .ignore_eos = true};
}
Answer Cold(const Tokens& prompt, const SamplingOptions& options) {
  return Server({.pages = 200, .prefix_cache = false}).Generate(prompt, options);
}

// A server on which each token takes `token_ms`; `sizes_of_steps` gets the tokens of each forward.
struct Timed {
  Timed(int64_t step_ms, int64_t token_ms)
      : server({.pages = 200, .chunk = 64, .step_ms = step_ms, .clock = clock}) {
    server.model->fault = [this, token_ms](std::span<const int32_t> tokens) {
      clock->Advance(std::ssize(tokens) * token_ms * kMilli);
      sizes_of_steps.push_back(std::ssize(tokens));
      return Status();
    };
  }
  std::shared_ptr<FakeClock> clock = std::make_shared<FakeClock>();
  std::vector<int64_t> sizes_of_steps;
  Server server;
};

TEST(Fairness, APromptIsCutToTheTimeOfAStepWhileOthersDecode) {
  for (const int64_t token_ms : {1, 2, 50}) {
    Timed timed(30, token_ms);
    const Tokens first = Text(40, 1), second = Text(150, 2);
    const int64_t a = timed.server.Submit(first, Greedy(40));
    ASSERT_TRUE(timed.server.Step().ok());
    EXPECT_EQ(timed.sizes_of_steps, std::vector<int64_t>{40}) << "nobody decoded";
    const int64_t b = timed.server.Submit(second, Greedy(5));
    timed.server.Finish();
    const int64_t most = std::max<int64_t>(30 / token_ms, 16 + 1);
    const std::vector<int64_t> rest(timed.sizes_of_steps.begin() + 1, timed.sizes_of_steps.end());
    EXPECT_EQ(*std::max_element(rest.begin(), rest.end()), most) << token_ms;
    ExpectEqual(timed.server.answers[{a, 0}], Cold(first, Greedy(40)), "that decoded");
    ExpectEqual(timed.server.answers[{b, 0}], Cold(second, Greedy(5)), "that was cut");
  }
}

// Each token takes a millisecond, and only one request is worked on.
TEST(RequestTimes, TellWhereTheTimeWent) {
  const auto clock = std::make_shared<FakeClock>();
  Server server({.pages = 200, .chunk = 8, .sequences = 1, .prefix_cache = false, .clock = clock});
  server.model->fault = [&](std::span<const int32_t> tokens) {
    clock->Advance(std::ssize(tokens) * kMilli);
    return Status();
  };
  const int64_t first = server.Submit(Text(20, 1), Greedy(5));
  const int64_t second = server.Submit(Text(3, 2), Greedy(2));
  const int64_t prompt_only = server.Submit(Text(4, 3), Greedy(0));
  const int64_t cancelled = server.Submit(Text(4, 4), Greedy(9));
  ASSERT_TRUE(server.Step().ok());
  clock->Advance(100 * kMilli);
  ASSERT_TRUE(server.engine->Cancel(cancelled).ok());
  server.Finish();
  const auto expect = [&](int64_t id, double queue, double prompt, double decode, int64_t steps) {
    const RequestTimes& times = server.answers[{id, 0}].times;
    EXPECT_NEAR(times.queue_seconds, queue, 1e-9) << id;
    EXPECT_NEAR(times.prompt_seconds, prompt, 1e-9) << id;
    EXPECT_NEAR(times.decode_seconds, decode, 1e-9) << id;
    EXPECT_EQ(times.steps, steps) << id;
  };
  expect(first, 0, 0.120, 0.004, 3 + 4);  // chunks of 8, 8 and 4, and 0.1 s between two of them
  expect(second, 0.124, 0.003, 0.001, 2);
  expect(prompt_only, 0.128, 0.004, 0, 1);
  expect(cancelled, 0.108, 0, 0, 0);
}

TEST(Fairness, SaltsTakeTurns) {
  Server server({.pages = 200, .sequences = 1, .waiting = 1000});
  std::vector<int64_t> ends;
  const auto submit = [&](const std::string& salt, uint64_t seed) {
    SamplingOptions options = Greedy(2);
    options.cache_salt = salt;
    return server.Submit(Text(5, seed), options);
  };
  std::vector<int64_t> many;
  for (uint64_t i = 0; i < 100; ++i) many.push_back(submit("many", i));
  ASSERT_TRUE(server.Step().ok());
  const int64_t one = submit("one", 500), two = submit("one", 501), other = submit("", 502);
  while (!server.engine->Idle()) {
    const size_t before = ends.size();
    ASSERT_TRUE(server.Step().ok());
    for (const auto& [key, answer] : server.answers) {
      const bool is_new = std::find(ends.begin(), ends.end(), key.first) == ends.end();
      if (answer.reason != FinishReason::kNone && is_new) ends.push_back(key.first);
    }
    ASSERT_LE(ends.size(), before + 1);
  }
  const std::vector<int64_t> beginning(ends.begin(), ends.begin() + 6);
  EXPECT_EQ(beginning, (std::vector<int64_t>{many[0], many[1], one, other, many[2], two}));
  const std::vector<int64_t> rest(ends.begin() + 6, ends.end());
  EXPECT_EQ(rest, std::vector<int64_t>(many.begin() + 3, many.end())) << "in their order";
}

// The groups of the requests in the order in which their answers end, one at a time.
std::string EndsByGroup(Server* server, const std::map<int64_t, std::string>& groups) {
  std::string ends;
  std::set<int64_t> known;
  while (!server->engine->Idle()) {
    EXPECT_TRUE(server->Step().ok());
    for (const auto& [key, answer] : server->answers) {
      if (answer.reason != FinishReason::kNone && known.insert(key.first).second)
        ends += groups.at(key.first);
    }
  }
  return ends;
}

// A group has its turns whatever number of salts its requests have.
TEST(Fairness, GroupsTakeTurnsAndSaltsDoNotMultiplyThem) {
  Server server({.pages = 200, .sequences = 1, .waiting = 1000});
  std::map<int64_t, std::string> groups;
  const auto submit = [&](const std::string& group, const std::string& salt, uint64_t seed) {
    SamplingOptions options = Greedy(2);
    options.turn_group = group;
    options.cache_salt = salt;
    groups[server.Submit(Text(5, seed), options)] = group.empty() ? "-" : group;
  };
  for (uint64_t i = 0; i < 8; ++i) submit("a", std::to_string(i), i);
  for (uint64_t i = 0; i < 4; ++i) submit("b", "", 50 + i);
  submit("", "a", 90);  // a salt is no group of that name
  EXPECT_EQ(EndsByGroup(&server, groups), "ab-abababaaaa");
}

TEST(Fairness, AGroupHasTurnsByItsWeight) {
  Server server({.pages = 200, .sequences = 1, .waiting = 1000});
  std::map<int64_t, std::string> groups;
  for (uint64_t i = 0; i < 16; ++i) {
    SamplingOptions options = Greedy(2);
    options.turn_group = i < 8 ? "a" : "b";
    options.turn_weight = i < 8 ? 1 : 3;
    groups[server.Submit(Text(5, i), options)] = options.turn_group;
  }
  const std::string ends = EndsByGroup(&server, groups);
  EXPECT_EQ(std::count(ends.begin(), ends.begin() + 8, 'b'), 6) << ends;
  EXPECT_EQ(std::count(ends.begin(), ends.begin() + 4, 'b'), 3) << ends;
}

// A group whose requests were cancelled waited as many turns as they would have had.
TEST(Fairness, RequestsThatWereCancelledOweNoTurns) {
  Server server({.pages = 200, .sequences = 1, .waiting = 1000});
  std::map<int64_t, std::string> groups;
  const auto submit = [&](const std::string& group, uint64_t seed) {
    SamplingOptions options = Greedy(2);
    options.turn_group = group;
    const int64_t id = server.Submit(Text(5, seed), options);
    groups[id] = group;
    return id;
  };
  submit("r", 1);
  ASSERT_TRUE(server.Step().ok());
  std::vector<int64_t> given_up;
  for (uint64_t i = 0; i < 50; ++i) given_up.push_back(submit("a", i));
  for (const int64_t id : given_up) ASSERT_TRUE(server.engine->Cancel(id).ok());
  for (const int64_t id : given_up) groups[id] = "";
  for (uint64_t i = 0; i < 3; ++i) submit("b", 60 + i);
  submit("a", 70);
  EXPECT_EQ(EndsByGroup(&server, groups), "rbabb");
}

// Where sixteen samples and more decoded, their steps counted as prompts that are slow.
TEST(StepTimes, OfStepsThatOnlyDecodeAreNotThoseOfPrompts) {
  const auto clock = std::make_shared<FakeClock>();
  Server server({.pages = 400, .chunk = 64, .sequences = 20, .clock = clock});
  server.model->fault = [&](std::span<const int32_t> tokens) {
    clock->Advance((10 + std::ssize(tokens)) * kMilli);  // ten for the weights
    return Status();
  };
  SamplingOptions options = Greedy(6);
  options.n = 20;
  server.Submit(Text(40, 1), options);
  ASSERT_TRUE(server.Step().ok());
  EXPECT_NEAR(server.engine->Stats().compute_seconds_per_token, 0.050 / 40, 1e-12);
  server.Finish();
  EXPECT_NEAR(server.engine->Stats().compute_seconds_per_token, 0.050 / 40, 1e-12);
}

TEST(StepTimes, AreCountedInClasses) {
  const auto clock = std::make_shared<FakeClock>();
  Server server({.pages = 200, .chunk = 64, .clock = clock});
  server.model->fault = [&](std::span<const int32_t> tokens) {
    clock->Advance(std::ssize(tokens) * kMilli);
    return Status();
  };
  server.Generate(Text(40, 1), Greedy(4));  // 40 ms, then three steps of 1 ms
  ASSERT_TRUE(server.Step().ok()) << "nothing is left to do";
  const EngineStats stats = server.engine->Stats();
  std::array<int64_t, kStepSecondsBounds.size() + 1> want = {};
  want[0] = 3;
  want[5] = 1;
  EXPECT_EQ(stats.step_counts, want);
  EXPECT_NEAR(stats.step_seconds, 0.043, 1e-9);
}

TEST(Fairness, AThousandSaltsLeaveNothingBehind) {
  Server server({.pages = 200, .waiting = 1000});
  for (int64_t i = 0; i < 1000; ++i) {
    SamplingOptions options = Greedy(1);
    options.cache_salt = std::to_string(i);
    server.Submit(Text(3, 1), options);
    server.Finish();
  }
  const int64_t last = server.Submit(Text(9, 2), Greedy(4));
  server.Finish();
  ExpectEqual(server.answers[{last, 0}], Cold(Text(9, 2), Greedy(4)), "after all of them");
}

TEST(Fairness, APromptWithoutAnAnswerIsKept) {
  for (const bool recurrent : {false, true}) {
    for (const int64_t n : {1, 3}) {
      Server server({.pages = 200, .recurrent = recurrent});
      const Tokens prompt = Text(40, 1);
      SamplingOptions options = Greedy(0);
      options.n = n;
      const int64_t id = server.Submit(prompt, options);
      server.Finish();
      for (int64_t sample = 0; sample < n; ++sample) {
        const Answer& answer = server.answers[{id, sample}];
        EXPECT_EQ(answer.reason, FinishReason::kLength);
        EXPECT_TRUE(answer.tokens.empty());
        EXPECT_EQ(answer.prompt_tokens, 40);
        EXPECT_EQ(answer.completion_tokens, 0);
      }
      EXPECT_EQ(server.engine->Stats().running, 0);
      Tokens longer = prompt;
      longer.push_back(7);
      const Answer next = server.Generate(longer, Greedy(6));
      EXPECT_EQ(next.cached_tokens, 40);
      Server cold({.pages = 200, .prefix_cache = false, .recurrent = recurrent});
      ExpectEqual(next, cold.Generate(longer, Greedy(6)), "after the prompt");
    }
  }
}

TEST(Fairness, APromptWithoutAnAnswerMaySpeculateAndBePreempted) {
  Server server({.pages = 24, .speculation = {.draft = DraftKind::kNGram}, .tree_nodes = 16});
  std::vector<int64_t> ids;
  for (uint64_t i = 0; i < 6; ++i) ids.push_back(server.Submit(Text(30, i), Greedy(i % 2 * 40)));
  server.Finish();
  for (uint64_t i = 0; i < 6; ++i) {
    Answer want;
    want.reason = FinishReason::kLength;
    want.prompt_tokens = 30;
    if (i % 2 == 1) want = Cold(Text(30, i), Greedy(40));
    ExpectEqual(server.answers[{ids[i], 0}], want, "request " + std::to_string(i));
  }
}

}  // namespace
}  // namespace quire
