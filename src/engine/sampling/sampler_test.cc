// Draws are compared with a sampler written the slow, plain way, and their frequencies with the
// softmax.
#include "engine/sampling/sampler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>

#include "base/random.h"
#include "kernels/backend.h"

namespace quire {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
using Tokens = std::vector<int32_t>;

struct Text {
  Tokens prompt;
  Tokens answer;
};

Draw DrawOnce(const std::vector<float>& logits, const SamplingOptions& options,
              const Text& text = {}, int64_t stream = 0, const std::vector<uint32_t>& mask = {}) {
  static std::map<size_t, DrawScratch> scratches;  // one for many draws: nothing may stay in it
  const auto vocab_size = static_cast<int64_t>(logits.size());
  DrawScratch& scratch =
      scratches.try_emplace(logits.size(), vocab_size, *FindBackend("").value()).first->second;
  Draw draw;
  ReserveLogprobs(options, vocab_size, &draw);
  DrawToken({.logits = logits,
             .prompt = text.prompt,
             .answer = text.answer,
             .options = &options,
             .stream = stream,
             .mask = mask},
            &scratch, &draw);
  EXPECT_EQ(std::count(scratch.counts.begin(), scratch.counts.end(), 0), vocab_size);
  return draw;
}

// ---- The plain way.

std::vector<double> Adjusted(const std::vector<float>& logits, const SamplingOptions& options,
                             const Text& text) {
  std::vector<double> adjusted(logits.begin(), logits.end());
  for (int32_t token = 0; token < static_cast<int32_t>(logits.size()); ++token) {
    double& logit = adjusted[token];
    const auto in_prompt = std::count(text.prompt.begin(), text.prompt.end(), token);
    const auto in_answer = std::count(text.answer.begin(), text.answer.end(), token);
    const double penalty = options.repetition_penalty;
    if (in_prompt + in_answer > 0) logit = logit > 0 ? logit / penalty : logit * penalty;
    if (in_answer > 0) {
      logit -= static_cast<double>(options.presence_penalty);
      logit -= static_cast<double>(options.frequency_penalty) * static_cast<double>(in_answer);
    }
    for (const auto& [biased, bias] : options.logit_bias) logit += biased == token ? bias : 0;
  }
  return adjusted;
}

// Weights of the tokens that can be drawn, the others 0.
std::vector<double> PlainWeights(const std::vector<double>& logits,
                                 const SamplingOptions& options) {
  const auto size = static_cast<int64_t>(logits.size());
  Tokens order(size);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t a, int32_t b) { return logits[a] > logits[b]; });
  if (options.top_k > 0) order.resize(std::min<int64_t>(options.top_k, size));
  std::vector<double> weights(size);
  const double temperature = options.temperature;
  for (const int32_t token : order) {
    weights[token] = std::exp((logits[token] - logits[order[0]]) / temperature);
  }
  if (options.top_p < 1) {
    const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
    double sum = 0;
    for (const int32_t token : order) {
      const double weight = weights[token];
      if (sum >= static_cast<double>(options.top_p) * total) weights[token] = 0;
      sum += weight;
    }
  }
  for (double& weight : weights) {
    if (weight < static_cast<double>(options.min_p)) weight = 0;
  }
  return weights;
}

int32_t PlainDraw(const std::vector<float>& logits, const SamplingOptions& options,
                  const Text& text, int64_t stream) {
  const std::vector<double> adjusted = Adjusted(logits, options, text);
  if (options.temperature == 0) {
    return static_cast<int32_t>(std::max_element(adjusted.begin(), adjusted.end()) -
                                adjusted.begin());
  }
  const std::vector<double> weights = PlainWeights(adjusted, options);
  const double target = std::accumulate(weights.begin(), weights.end(), 0.0) *
                        RandomUniform(options.seed, stream, text.answer.size());
  double sum = 0;
  for (size_t token = 0; token < weights.size(); ++token) {
    sum += weights[token];
    if (sum > target) return static_cast<int32_t>(token);
  }
  ADD_FAILURE() << "nothing was drawn";
  return -1;
}

TEST(Sampler, AgreesWithThePlainWay) {
  RandomSequence random(1);
  for (int round = 0; round < 4000; ++round) {
    SCOPED_TRACE("round " + std::to_string(round));
    std::vector<float> logits(1 + random.Below(80));
    const bool with_ties = random.Below(2) == 0;
    for (float& logit : logits) {
      logit = static_cast<float>(random.Uniform(-8, 8));
      if (with_ties) logit = std::round(logit);
      if (random.Below(20) == 0) logit = -kInfinity;
    }
    logits[random.Below(static_cast<int64_t>(logits.size()))] = 1;  // not all masked
    const auto any_token = [&] {
      return static_cast<int32_t>(random.Below(static_cast<int64_t>(logits.size())));
    };
    Text text;
    for (int64_t i = random.Below(20); i > 0; --i) text.prompt.push_back(any_token());
    for (int64_t i = random.Below(20); i > 0; --i) text.answer.push_back(any_token());
    SamplingOptions options;
    options.seed = random.Bits();
    if (random.Below(5) != 0) options.temperature = static_cast<float>(random.Uniform(0.1, 3));
    if (random.Below(2) == 0) options.top_k = 1 + random.Below(100);
    if (random.Below(2) == 0) options.top_p = static_cast<float>(random.Uniform(0.01, 1));
    if (random.Below(2) == 0) options.min_p = static_cast<float>(random.Uniform(0, 0.5));
    if (random.Below(2) == 0) {
      options.repetition_penalty = static_cast<float>(random.Uniform(0.5, 2));
    }
    if (random.Below(2) == 0) options.presence_penalty = static_cast<float>(random.Uniform(-2, 2));
    if (random.Below(2) == 0) options.frequency_penalty = static_cast<float>(random.Uniform(-1, 1));
    if (random.Below(2) == 0) options.logit_bias = {{any_token(), 2.5F}};
    const int64_t stream = random.Below(4);
    const Draw draw = DrawOnce(logits, options, text, stream);
    ASSERT_EQ(draw.error, DrawError::kNone);
    ASSERT_EQ(draw.token, PlainDraw(logits, options, text, stream));
  }
}

// ---- Big vocabularies: of many blocks, the last one not full.

constexpr int64_t kBigVocab = 32003;

std::vector<float> BigLogits(RandomSequence* random, bool with_ties) {
  std::vector<float> logits(kBigVocab);
  for (float& logit : logits) {
    logit = static_cast<float>(3 * random->Normal());
    if (with_ties) logit = std::round(logit);
    if (random->Below(20) == 0) logit = -kInfinity;
  }
  return logits;
}

TEST(Sampler, AgreesWithThePlainWayOfABigVocabulary) {
  RandomSequence random(2);
  for (int round = 0; round < 100; ++round) {
    SCOPED_TRACE("round " + std::to_string(round));
    const std::vector<float> logits = BigLogits(&random, random.Below(2) == 0);
    SamplingOptions options;
    options.seed = random.Bits();
    options.temperature = static_cast<float>(random.Uniform(0.5, 2));
    if (random.Below(3) == 0) options.top_k = int64_t{1} << random.Below(16);
    if (random.Below(3) == 0) options.top_p = static_cast<float>(random.Uniform(0.1, 1));
    if (random.Below(3) == 0) options.min_p = static_cast<float>(random.Uniform(0, 0.1));
    Text text;
    if (random.Below(3) == 0) {
      for (int i = 0; i < 10; ++i) {
        text.answer.push_back(static_cast<int32_t>(random.Below(kBigVocab)));
      }
      options.presence_penalty = 1;
      options.logit_bias = {{static_cast<int32_t>(random.Below(kBigVocab)), 4.0F}};
    }
    ASSERT_EQ(DrawOnce(logits, options, text).token, PlainDraw(logits, options, text, 0));
  }
}

TEST(Sampler, LogprobsOfABigVocabulary) {
  RandomSequence random(3);
  for (const int64_t count : {0, 1, 20, 256, 20000}) {
    for (const bool with_ties : {false, true}) {
      const std::vector<float> logits = BigLogits(&random, with_ties);
      const Draw draw = DrawOnce(logits, {.logprobs = count});
      ASSERT_EQ(std::ssize(draw.logprobs), 1 + count);
      Tokens order(kBigVocab);
      std::iota(order.begin(), order.end(), 0);
      std::stable_sort(order.begin(), order.end(),
                       [&](int32_t a, int32_t b) { return logits[a] > logits[b]; });
      EXPECT_EQ(draw.token, order[0]);
      double total = 0;
      for (const float logit : logits) total += std::exp(static_cast<double>(logit));
      for (int64_t i = 0; i <= count; ++i) {
        const int32_t token = order[i == 0 ? 0 : i - 1];
        ASSERT_EQ(draw.logprobs[i].token, token) << i;
        if (logits[token] == -kInfinity) continue;
        // Rounded to float32, beside the total's exponents.
        ASSERT_NEAR(draw.logprobs[i].logprob, static_cast<double>(logits[token]) - std::log(total),
                    2e-6);
      }
    }
  }
}

TEST(Sampler, TheOnlyTokenIsDrawnWhereverItStands) {
  for (const int32_t token : {0, 15, 127, 128, 16000, 31999, 32000, 32002}) {
    std::vector<float> logits(kBigVocab, -kInfinity);
    logits[token] = -7;
    for (uint64_t seed = 0; seed < 5; ++seed) {
      EXPECT_EQ(DrawOnce(logits, {.temperature = 1, .seed = seed}).token, token);
      EXPECT_EQ(DrawOnce(logits, {.temperature = 1, .top_p = 0.9F, .seed = seed}).token, token);
    }
    EXPECT_EQ(DrawOnce(logits, {}).token, token);
  }
}

// The run of best tokens ends where its weight is top_p of the whole, not behind that.
TEST(Sampler, TopPTakesNoTokenThatItDoesNotNeed) {
  for (uint64_t seed = 0; seed < 30; ++seed) {
    EXPECT_EQ(DrawOnce({0, 0}, {.temperature = 1, .top_p = 0.5F, .seed = seed}).token, 0);
    EXPECT_EQ(
        DrawOnce({0, 0, -1}, {.temperature = 1, .top_k = 2, .top_p = 0.5F, .seed = seed}).token, 0);
  }
}

TEST(Sampler, TheBestAreFoundInAnyOrder) {
  std::vector<float> logits(kBigVocab);
  const auto best_ids = [&](int64_t count) {
    const Draw draw = DrawOnce(logits, {.logprobs = count});
    Tokens ids;
    for (int64_t i = 1; i <= count; ++i) ids.push_back(draw.logprobs[i].token);
    return ids;
  };
  EXPECT_EQ(best_ids(3), (Tokens{0, 1, 2})) << "all are equal";
  std::iota(logits.begin(), logits.end(), 0.0F);  // each is better than all before
  EXPECT_EQ(best_ids(3), (Tokens{32002, 32001, 32000}));
  std::reverse(logits.begin(), logits.end());
  EXPECT_EQ(best_ids(3), (Tokens{0, 1, 2}));
}

TEST(Sampler, DrawsAreThoseOfTheScalarPath) {
  RandomSequence random(4);
  const std::vector<float> logits = BigLogits(&random, false);
  const auto draws = [&](const Backend& backend) {
    DrawScratch scratch(kBigVocab, backend);
    EXPECT_EQ(scratch.bytes(), DrawScratch::Bytes(kBigVocab));
    std::vector<std::pair<int32_t, float>> drawn;
    for (uint64_t seed = 0; seed < 20; ++seed) {
      const SamplingOptions options{.temperature = 1, .seed = seed, .logprobs = 0};
      Draw draw;
      ReserveLogprobs(options, kBigVocab, &draw);
      DrawToken({.logits = logits, .prompt = {}, .answer = {}, .options = &options}, &scratch,
                &draw);
      drawn.emplace_back(draw.token, draw.logprobs[0].logprob);
    }
    EXPECT_EQ(scratch.bytes(), DrawScratch::Bytes(kBigVocab));
    return drawn;
  };
  const auto scalar = draws(*FindBackend("scalar").value());
  for (const Backend* backend : Backends()) EXPECT_EQ(draws(*backend), scalar) << backend->name;
}

// ---- Frequencies.

// Chi-square of `count` draws, which differ in seed, stream and position, against `weights`.
void ExpectDistribution(const std::vector<float>& logits, SamplingOptions options,
                        std::vector<double> weights) {
  constexpr int kDraws = 20000;
  const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
  std::vector<int> drawn(logits.size());
  Text text;
  for (int i = 0; i < kDraws; ++i) {
    options.seed = i / 1000;
    text.answer.resize(i % 100);
    ++drawn[DrawOnce(logits, options, text, i / 100 % 10).token];
  }
  double chi_square = 0;
  int cells = 0;
  for (size_t token = 0; token < weights.size(); ++token) {
    const double expected = weights[token] / total * kDraws;
    if (expected == 0) {
      EXPECT_EQ(drawn[token], 0) << "token " << token;
      continue;
    }
    ++cells;
    chi_square += (drawn[token] - expected) * (drawn[token] - expected) / expected;
  }
  // Mean cells - 1, variance 2 (cells - 1): six deviations are exceeded once in 10^5 seeds, and the
  // seeds are fixed.
  EXPECT_LT(chi_square, (cells - 1) + 6 * std::sqrt(2.0 * cells));
}

const std::vector<float> kLogits = {0.5F, 2.0F, -1.0F, 2.0F, 0.0F, 1.25F, -0.5F, 1.0F};

std::vector<double> Softmax(double temperature, const Tokens& kept) {
  std::vector<double> weights(kLogits.size());
  for (const int32_t token : kept) weights[token] = std::exp(kLogits[token] / temperature);
  return weights;
}

TEST(Sampler, DrawsFromTheSoftmax) {
  const Tokens all = {0, 1, 2, 3, 4, 5, 6, 7};
  ExpectDistribution(kLogits, {.temperature = 1.0F}, Softmax(1.0, all));
  ExpectDistribution(kLogits, {.temperature = 0.5F}, Softmax(0.5, all));
  ExpectDistribution(kLogits, {.temperature = 4.0F}, Softmax(4.0, all));
}

TEST(Sampler, DrawsFromWhatTruncationLeaves) {
  ExpectDistribution(kLogits, {.temperature = 1.0F, .top_k = 3}, Softmax(1.0, {1, 3, 5}));
  // exp(2), exp(2), exp(1.25) = 7.39, 7.39, 3.49 of 24.6: 0.30, 0.60, 0.74, then 0.85.
  ExpectDistribution(kLogits, {.temperature = 1.0F, .top_p = 0.7F}, Softmax(1.0, {1, 3, 5}));
  ExpectDistribution(kLogits, {.temperature = 1.0F, .top_p = 0.75F}, Softmax(1.0, {1, 3, 5, 7}));
  // exp(1 - 2) = 0.37, exp(0.5 - 2) = 0.22.
  ExpectDistribution(kLogits, {.temperature = 1.0F, .min_p = 0.3F}, Softmax(1.0, {1, 3, 5, 7}));
  ExpectDistribution(kLogits, {.temperature = 1.0F, .top_k = 4, .top_p = 0.9F, .min_p = 0.4F},
                     Softmax(1.0, {1, 3, 5}));
}

TEST(Sampler, PenaltiesAndBiasMoveTheDistribution) {
  std::vector<double> weights = Softmax(1.0, {0, 1, 2, 3, 4, 5, 6, 7});
  weights[2] *= std::exp(3.0);
  ExpectDistribution(kLogits, {.temperature = 1.0F, .logit_bias = {{2, 3.0F}}}, weights);
}

// ---- Single draws.

int32_t Greedy(const std::vector<float>& logits, SamplingOptions options, const Text& text = {}) {
  options.temperature = 0;
  return DrawOnce(logits, options, text).token;
}

TEST(Sampler, TiesGoToTheLowerId) {
  EXPECT_EQ(Greedy({1, 3, 3, 2}, {}), 1);
  EXPECT_EQ(Greedy({-kInfinity, -kInfinity, -5}, {}), 2);
  EXPECT_EQ(Greedy({0.0F, -0.0F}, {}), 0);
  EXPECT_EQ(Greedy({-0.0F, 0.0F}, {}), 0);
  for (uint64_t seed = 0; seed < 50; ++seed) {
    EXPECT_EQ(DrawOnce({1, 3, 3, 2}, {.temperature = 1, .top_k = 1, .seed = seed}).token, 1);
    EXPECT_EQ(DrawOnce({1, 3, 3, 2}, {.temperature = 1, .top_p = 0.01F, .seed = seed}).token, 1);
    EXPECT_NE(DrawOnce({3, 3, 3, 3}, {.temperature = 1, .top_k = 3, .seed = seed}).token, 3);
  }
}

TEST(Sampler, TopPStopsAtTheBorder) {
  // Probabilities 1/2, 1/4, 1/4, exactly.
  const std::vector<float> logits = {std::log(2.0F), 0, 0};
  std::vector<bool> half(3), more(3);
  for (uint64_t seed = 0; seed < 200; ++seed) {
    half[DrawOnce(logits, {.temperature = 1, .top_p = 0.49F, .seed = seed}).token] = true;
    more[DrawOnce(logits, {.temperature = 1, .top_p = 0.51F, .seed = seed}).token] = true;
  }
  EXPECT_EQ(half, (std::vector<bool>{true, false, false}));
  EXPECT_EQ(more, (std::vector<bool>{true, true, false})) << "of two equal ones the lower id";
  EXPECT_EQ(DrawOnce({0, 1, 0}, {.temperature = 1, .top_p = 1e-38F}).token, 1) << "never nothing";
}

TEST(Sampler, ExtremeOptionsKeepTheBestToken) {
  const float tiny = std::numeric_limits<float>::denorm_min();
  EXPECT_EQ(DrawOnce({0, 1, 0.5F}, {.temperature = tiny}).token, 1);
  EXPECT_EQ(DrawOnce({0, 1, 0.5F}, {.temperature = tiny, .top_p = 0.5F}).token, 1);
  EXPECT_EQ(DrawOnce({0, 1, 0.5F}, {.temperature = tiny, .top_k = 2, .top_p = 0.5F}).token, 1);
  EXPECT_EQ(DrawOnce({0, 1, 0.5F}, {.temperature = 1, .min_p = 1}).token, 1);
  EXPECT_EQ(DrawOnce({-kInfinity, -1e30F}, {.temperature = 1e30F}).token, 1);
  EXPECT_EQ(DrawOnce({3.0F}, {.temperature = 2, .top_k = 5, .top_p = 0.5F}).token, 0);
  EXPECT_EQ(Greedy({3e38F, -3e38F}, {.repetition_penalty = 1e38F}, {{0, 1}, {}}), 0);
}

TEST(Sampler, RepetitionPenaltyCountsPromptAndAnswerOnce) {
  const SamplingOptions options{.repetition_penalty = 2};
  EXPECT_EQ(Greedy({4, 3}, options, {{0, 0, 0}, {0}}), 1) << "4 / 2 < 3";
  EXPECT_EQ(Greedy({8, 3}, options, {{0, 0, 0}, {0, 0}}), 0) << "8 / 2 > 3, once only";
  EXPECT_EQ(Greedy({-2, -3}, options, {{0}, {}}), 1) << "-2 * 2 < -3";
  EXPECT_EQ(Greedy({4, 3}, options, {{}, {0}}), 1);
}

TEST(Sampler, PresenceAndFrequencyPenaltiesCountTheAnswerOnly) {
  EXPECT_EQ(Greedy({4, 3}, {.presence_penalty = 2}, {{0}, {}}), 0);
  EXPECT_EQ(Greedy({4, 3}, {.presence_penalty = 2}, {{}, {0}}), 1);
  EXPECT_EQ(Greedy({4, 3}, {.presence_penalty = 0.75F}, {{}, {0, 0, 0}}), 0) << "once";
  EXPECT_EQ(Greedy({4, 3}, {.frequency_penalty = 0.75F}, {{}, {0}}), 0);
  EXPECT_EQ(Greedy({4, 3}, {.frequency_penalty = 0.75F}, {{}, {0, 0}}), 1) << "for each time";
}

TEST(Sampler, ADrawIsFixedBySeedStreamAndPosition) {
  const SamplingOptions options{.temperature = 1, .seed = 7};
  std::vector<float> logits(1000);
  EXPECT_EQ(DrawOnce(logits, options).token, DrawOnce(logits, options).token);
  Text later;
  later.answer = {1};
  SamplingOptions other = options;
  other.seed = 8;
  EXPECT_NE(DrawOnce(logits, options).token, DrawOnce(logits, options, later).token);
  EXPECT_NE(DrawOnce(logits, options).token, DrawOnce(logits, options, {}, 1).token);
  EXPECT_NE(DrawOnce(logits, options).token, DrawOnce(logits, other).token);
}

TEST(Sampler, LogprobsAreOfTheModelAndNotOfTheOptions) {
  const std::vector<float> logits = {1, 3, 3, 2, -kInfinity};
  const Draw draw = DrawOnce(logits, {.temperature = 0.3F,
                                      .repetition_penalty = 1.7F,
                                      .logit_bias = {{0, 100.0F}},
                                      .logprobs = 3});
  EXPECT_EQ(draw.token, 0);
  ASSERT_EQ(draw.logprobs.size(), 4U);
  const double log_total = std::log(std::exp(1.0) + 2 * std::exp(3.0) + std::exp(2.0));
  const int32_t tokens[] = {0, 1, 2, 3};
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(draw.logprobs[i].token, tokens[i]);
    EXPECT_NEAR(draw.logprobs[i].logprob, logits[tokens[i]] - log_total, 1e-6);
  }
  EXPECT_TRUE(DrawOnce(logits, {.logprobs = -1}).logprobs.empty());
  EXPECT_EQ(DrawOnce(logits, {.logprobs = 0}).logprobs.size(), 1U);
  const Draw all = DrawOnce(logits, {.logprobs = 200});
  ASSERT_EQ(all.logprobs.size(), 6U) << "the vocabulary has five";
  EXPECT_EQ(all.logprobs[5].token, 4);
  EXPECT_EQ(all.logprobs[5].logprob, -kInfinity);
}

// A mask comes before all else: a draw is the one from logits in which what it forbids is
// -infinity.
TEST(Sampler, AMaskIsAppliedToTheLogits) {
  RandomSequence random(3);
  for (int round = 0; round < 400; ++round) {
    const int64_t vocab_size = 1 + random.Below(100);
    std::vector<float> logits(vocab_size);
    for (float& logit : logits) logit = static_cast<float>(random.Uniform(-4, 4));
    std::vector<uint32_t> mask((vocab_size + 31) / 32, 0x80000000U);
    mask.back() = vocab_size % 32 == 0 ? 0 : ~uint32_t{0} << (vocab_size % 32);
    for (int64_t token = 0; token < vocab_size; ++token) {
      mask[token / 32] &= ~(uint32_t{1} << (token % 32));
      if (random.Below(3) == 0) mask[token / 32] |= uint32_t{1} << (token % 32);
    }
    const auto allowed = static_cast<int32_t>(random.Below(vocab_size));
    mask[allowed / 32] |= uint32_t{1} << (allowed % 32);
    std::vector<float> masked = logits;
    int64_t count = 0;
    for (int64_t token = 0; token < vocab_size; ++token) {
      const bool is_allowed = ((mask[token / 32] >> (token % 32)) & 1U) != 0;
      if (!is_allowed) masked[token] = -kInfinity;
      count += is_allowed ? 1 : 0;
    }
    SamplingOptions options{.seed = random.Bits(), .logprobs = 12};
    if (random.Below(2) == 0) options.temperature = 1.5F;
    if (random.Below(2) == 0) options.top_k = 1 + random.Below(9);
    if (random.Below(2) == 0) options.top_p = 0.8F;
    if (random.Below(2) == 0) options.min_p = 0.1F;
    if (random.Below(2) == 0) options.repetition_penalty = 1.3F;
    if (random.Below(2) == 0) options.logit_bias = {{0, 30.0F}};
    const Text text{{0, allowed}, {allowed}};
    const Draw want = DrawOnce(masked, options, text);
    const Draw got = DrawOnce(logits, options, text, 0, mask);
    ASSERT_EQ(got.error, DrawError::kNone);
    ASSERT_EQ(got.token, want.token) << "round " << round;
    ASSERT_EQ(std::ssize(got.logprobs), 1 + std::min<int64_t>(12, count)) << "the allowed ones";
    for (size_t i = 0; i < got.logprobs.size(); ++i) {
      ASSERT_EQ(got.logprobs[i].token, want.logprobs[i].token);
      ASSERT_EQ(got.logprobs[i].logprob, want.logprobs[i].logprob);
    }
  }
}

TEST(Sampler, AMaskMayAllowNothing) {
  for (const size_t vocab_size : {1, 31, 32, 33, 64}) {
    std::vector<uint32_t> mask((vocab_size + 31) / 32);
    const std::vector<float> logits(vocab_size, 1.0F);
    EXPECT_EQ(DrawOnce(logits, {}, {}, 0, mask).error, DrawError::kNoneAllowed);
    if (vocab_size % 32 != 0) mask.back() = ~uint32_t{0} << (vocab_size % 32);  // behind it
    EXPECT_EQ(DrawOnce(logits, {}, {}, 0, mask).error, DrawError::kNoneAllowed);
    mask[(vocab_size - 1) / 32] = uint32_t{1} << ((vocab_size - 1) % 32);
    EXPECT_EQ(DrawOnce(logits, {}, {}, 0, mask).token, static_cast<int32_t>(vocab_size - 1));
  }
  EXPECT_EQ(DrawOnce({-kInfinity, 2}, {}, {}, 0, {1}).error, DrawError::kAllMasked);
}

TEST(Sampler, TellsLogitsThatCannotBeDrawnFrom) {
  EXPECT_EQ(DrawOnce({1, std::nanf(""), 2}, {}).error, DrawError::kNotANumber);
  EXPECT_EQ(DrawOnce({1, kInfinity}, {}).error, DrawError::kNotANumber);
  EXPECT_EQ(DrawOnce({-kInfinity, -kInfinity}, {}).error, DrawError::kAllMasked);
}

}  // namespace
}  // namespace quire
