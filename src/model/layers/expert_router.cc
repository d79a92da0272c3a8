#include "model/layers/expert_router.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>

namespace quire {
namespace {

// Added to the sum that weights are divided by, as in transformers: sigmoids may all be zero.
constexpr float kLeastSum = 1e-20F;

}  // namespace

Result<ExpertRouter> ExpertRouter::Load(WeightLoader& loader, const std::string& prefix,
                                        int64_t hidden_size, const ExpertConfig& config) {
  ExpertRouter router;
  router.config_ = config;
  QUIRE_ASSIGN_OR_RETURN(router.gate_,
                         loader.Linear({{prefix + "gate", config.count}}, hidden_size, false));
  if (config.has_choice_bias) {
    QUIRE_ASSIGN_OR_RETURN(router.choice_bias_,
                           loader.Vector(prefix + "gate.e_score_correction_bias", config.count));
  }
  return router;
}

// The logits of one token become scores, none below zero.
void ExpertRouter::ToScores(float* row) const {
  if (config_.scores == ExpertScores::kSigmoid) {
    for (int64_t e = 0; e < config_.count; ++e) row[e] = Sigmoid(row[e]);
    return;
  }
  const float largest = *std::max_element(row, row + config_.count);
  float total = 0;
  for (int64_t e = 0; e < config_.count; ++e) {
    row[e] = std::exp(row[e] - largest);
    total += row[e];
  }
  for (int64_t e = 0; e < config_.count; ++e) row[e] /= total;
}

float ExpertRouter::ForChoice(const float* row, int64_t expert) const {
  return choice_bias_.empty() ? row[expert]
                              : row[expert] + choice_bias_[static_cast<size_t>(expert)];
}

float ExpertRouter::GroupScore(const float* row, int64_t group) const {
  constexpr float kLowest = -std::numeric_limits<float>::infinity();
  float best = kLowest;
  float second = kLowest;
  const int64_t begin = group * config_.group_size();
  for (int64_t e = begin; e < begin + config_.group_size(); ++e) {
    const float score = ForChoice(row, e);
    if (score > best) {
      second = best;
      best = score;
    } else if (score > second) {
      second = score;
    }
  }
  return config_.group_scores == 1 ? best : best + second;
}

// A bit for each group; of equal ones the first.
uint64_t ExpertRouter::ChooseGroups(const float* row) const {
  if (config_.groups_per_token == config_.group_count) return ~uint64_t{0};
  std::array<float, kMaxExpertGroups> scores;
  for (int64_t g = 0; g < config_.group_count; ++g) {
    scores[static_cast<size_t>(g)] = GroupScore(row, g);
  }
  uint64_t chosen = 0;
  for (int64_t i = 0; i < config_.groups_per_token; ++i) {
    int best = std::countr_one(chosen);
    for (int g = best + 1; g < config_.group_count; ++g) {
      if ((chosen >> g & 1) != 0) continue;
      if (scores[static_cast<size_t>(g)] > scores[static_cast<size_t>(best)]) best = g;
    }
    chosen |= uint64_t{1} << best;
  }
  return chosen;
}

// The first of equal ones; -1 if none is left, as for scores that are not numbers.
int64_t ExpertRouter::BestExpert(const float* row, uint64_t groups) const {
  int64_t best = -1;
  float score = 0;
  for (int64_t e = 0; e < config_.count; ++e) {
    if (std::signbit(row[e]) || (groups >> (e / config_.group_size()) & 1) == 0) continue;
    const float other = ForChoice(row, e);
    if (best >= 0 && !(other > score)) continue;
    best = e;
    score = other;
  }
  return best;
}

// Scores of one token become the weights of its experts. What is chosen is marked by its sign.
void ExpertRouter::Choose(float* row) const {
  const uint64_t groups = ChooseGroups(row);
  float sum = kLeastSum;
  for (int64_t i = 0; i < config_.per_token; ++i) {
    const int64_t best = BestExpert(row, groups);
    if (best < 0) break;
    sum += row[best];
    row[best] = -row[best];
  }
  const float divisor = config_.normalises ? sum : 1.0F;
  const auto scale = static_cast<float>(config_.scale);
  for (int64_t e = 0; e < config_.count; ++e) {
    row[e] = std::signbit(row[e]) ? -row[e] / divisor * scale : 0.0F;
  }
}

void ExpertRouter::Route(const RowOps& ops, const float* x, int64_t row_count, float* weights,
                         void* scratch) const {
  ops.Multiply(gate_, x, row_count, weights, false, scratch);
  ops.runner().ParallelFor(row_count, [&](int64_t row, int) {
    float* const scores = weights + row * config_.count;
    ToScores(scores);
    Choose(scores);
  });
}

}  // namespace quire
