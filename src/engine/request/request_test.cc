#include "engine/request/request.h"

#include <gtest/gtest.h>

#include "base/random.h"

namespace quire {
namespace {

using Tokens = std::vector<int32_t>;

TEST(Request, LeaderIsTheFirstUnfinishedSample) {
  Request request(4, Tokens{1, 2}, {.n = 3});
  EXPECT_EQ(request.leader(), &request.samples[0]);
  EXPECT_EQ(request.unfinished_count(), 3);
  EXPECT_FALSE(request.answer_begun());
  request.samples[0].finish_reason = FinishReason::kStop;
  EXPECT_FALSE(request.answer_begun()) << "it may have been stopped before the prompt's end";
  EXPECT_EQ(request.leader(), &request.samples[1]);
  for (Sample& sample : request.samples) sample.tokens.push_back(3);
  EXPECT_TRUE(request.answer_begun());
  request.samples[1].finish_reason = request.samples[2].finish_reason = FinishReason::kLength;
  EXPECT_EQ(request.leader(), nullptr);
  EXPECT_EQ(request.unfinished_count(), 0);
}

TEST(Request, ReservesWhatItsAnswersNeed) {
  Request request(0, Tokens{1, 2, 3},
                  {.max_tokens = 50, .logprobs = 1, .stop = {{1}, {1, 2, 3, 4}}});
  request.ReserveAnswers();
  EXPECT_GE(request.samples[0].tokens.capacity(), 53U);
  EXPECT_GE(request.samples[0].held_logprobs.capacity(), 4U);
}

TEST(Request, TellsPromptFromAnswer) {
  Request request(0, Tokens{1, 2, 3}, {});
  Sample& sample = request.samples[0];
  sample.tokens.insert(sample.tokens.end(), {7, 8});
  EXPECT_EQ(request.prompt_of(sample).size(), 3U);
  EXPECT_EQ(request.answer_of(sample).front(), 7);
  EXPECT_TRUE(request.answer_begun());
}

TEST(StopSequences, TheLongestMatchAtTheEndCounts) {
  EXPECT_EQ(StopMatchLength(Tokens{1, 2, 3}, {{3}, {2, 3}, {1, 2}}), 2);
  EXPECT_EQ(StopMatchLength(Tokens{1, 2, 3}, {{1, 2, 3}, {0, 1, 2, 3}}), 3);
  EXPECT_EQ(StopMatchLength(Tokens{1, 2, 3}, {{2}}), 0);
  EXPECT_EQ(StopMatchLength(Tokens{}, {{2}}), 0);
  EXPECT_EQ(StopMatchLength(Tokens{1}, {}), 0);
}

TEST(StopSequences, WhatMayBeginAMatchIsHeldBack) {
  EXPECT_EQ(HeldBackLength(Tokens{5, 1, 2}, {{1, 2, 3}}), 2);
  EXPECT_EQ(HeldBackLength(Tokens{5, 1, 1}, {{1, 1, 1, 2}, {1, 3}}), 2);
  EXPECT_EQ(HeldBackLength(Tokens{1, 2, 1}, {{1, 2, 3}}), 1);
  EXPECT_EQ(HeldBackLength(Tokens{1, 2, 5}, {{1, 2, 3}}), 0);
  EXPECT_EQ(HeldBackLength(Tokens{1}, {{1}}), 0) << "it is a match, not a beginning";
  EXPECT_EQ(HeldBackLength(Tokens{}, {{1, 2}}), 0);
}

// Fed token by token, the answer that is given out is the text before the first stop sequence that
// is completed, and what was given out before never has to be taken back.
TEST(StopSequences, NothingThatWasGivenOutIsEverCut) {
  RandomSequence random(1);
  for (int round = 0; round < 3000; ++round) {
    std::vector<Tokens> stop(1 + random.Below(3));
    for (Tokens& sequence : stop) {
      sequence.resize(1 + random.Below(5));
      for (int32_t& token : sequence) token = static_cast<int32_t>(random.Below(2));
    }
    Tokens answer;
    int64_t given = 0;
    for (int step = 0; step < 30; ++step) {
      answer.push_back(static_cast<int32_t>(random.Below(2)));
      const auto length = static_cast<int64_t>(answer.size());
      if (const int64_t match = StopMatchLength(answer, stop); match > 0) {
        ASSERT_LE(given, length - match);
        break;
      }
      const int64_t now = length - HeldBackLength(answer, stop);
      ASSERT_GE(now, given);
      given = now;
    }
  }
}

TEST(SamplingOptions, SharesBeginAboveNothing) {
  SamplingOptions options;
  EXPECT_TRUE(CheckSamplingOptions(options, 10).ok());
  for (const float top_p : {0.0F, -0.5F, 1.5F}) {
    options.top_p = top_p;
    EXPECT_EQ(CheckSamplingOptions(options, 10).code(), StatusCode::kBadArgument) << top_p;
  }
}

TEST(LongRope, IsForWhatGoesBeyondTheOriginalLength) {
  ModelInfo model;
  model.rope.scaling = RopeScaling::kLongRope;
  model.rope.original_max_position_embeddings = 64;
  EXPECT_FALSE(NeedsLongRope(model, 64));
  EXPECT_TRUE(NeedsLongRope(model, 65));
  model.rope.scaling = RopeScaling::kNone;
  EXPECT_FALSE(NeedsLongRope(model, 65));
}

}  // namespace
}  // namespace quire
