// Which experts are chosen and how much they weigh, against the definition written down naively.
#include "model/layers/expert_router.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>

#include "base/random.h"
#include "model/testing/test_checkpoint.h"
#include "quire/attention_kv_cache.h"

namespace quire {
namespace {

using Values = std::vector<double>;

// Indices of the `count` largest, of equal ones the first.
std::vector<size_t> Largest(const Values& values, int64_t count) {
  std::vector<size_t> order(values.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return values[a] > values[b]; });
  order.resize(static_cast<size_t>(count));
  return order;
}

Values Scores(const ExpertConfig& config, const Values& logits) {
  Values scores;
  double sum = 0;
  for (const double logit : logits) {
    const bool is_softmax = config.scores == ExpertScores::kSoftmax;
    scores.push_back(is_softmax ? std::exp(logit) : 1 / (1 + std::exp(-logit)));
    sum += scores.back();
  }
  if (config.scores == ExpertScores::kSoftmax) {
    for (double& score : scores) score /= sum;
  }
  return scores;
}

Values ExpectedWeights(const ExpertConfig& config, const Values& logits, const Values& bias) {
  const Values scores = Scores(config, logits);
  Values for_choice = scores;
  for (size_t e = 0; e < bias.size(); ++e) for_choice[e] += bias[e];
  const auto size = static_cast<size_t>(config.group_size());
  Values groups;
  for (size_t begin = 0; begin < scores.size(); begin += size) {
    Values members(for_choice.begin() + static_cast<std::ptrdiff_t>(begin),
                   for_choice.begin() + static_cast<std::ptrdiff_t>(begin + size));
    std::sort(members.rbegin(), members.rend());
    groups.push_back(std::accumulate(members.begin(), members.begin() + config.group_scores, 0.0));
  }
  const std::vector<size_t> best_groups = Largest(groups, config.groups_per_token);
  for (size_t e = 0; e < for_choice.size(); ++e) {
    if (std::ranges::find(best_groups, e / size) == best_groups.end()) for_choice[e] = -1e9;
  }
  Values weights(scores.size(), 0.0);
  double sum = 0;
  for (const size_t e : Largest(for_choice, config.per_token)) {
    weights[e] = scores[e];
    sum += scores[e];
  }
  for (double& weight : weights) weight *= config.scale / (config.normalises ? sum : 1.0);
  return weights;
}

constexpr int64_t kExperts = 12;
constexpr int64_t kHidden = 16;
constexpr int64_t kRows = 50;

// A router over random rows, by one kernel path.
class Routing {
 public:
  Routing(const ExpertConfig& config, const std::string& path) : config_(config) {
    RandomSequence random(5);
    const auto draw = [&](int64_t count, double deviation) {
      std::vector<float> values(static_cast<size_t>(count));
      for (float& value : values) value = static_cast<float>(deviation * random.Normal());
      return values;
    };
    weight_ = draw(kExperts * kHidden, 0.5);
    if (config.has_choice_bias) bias_ = draw(kExperts, 0.4);
    x_ = draw(kRows * kHidden, 1.0);
    std::vector<TestTensor> tensors = {{"gate.weight", {kExperts, kHidden}, weight_, DType::kF32}};
    if (config.has_choice_bias) {
      tensors.push_back({"gate.e_score_correction_bias", {kExperts}, bias_, DType::kF32});
    }
    folder_.Write("model.safetensors", SafetensorsBytes(tensors));
    const Result<Checkpoint> checkpoint = Checkpoint::Open(folder_.path());
    EXPECT_TRUE(checkpoint.ok()) << checkpoint.status().ToString();
    runner_ = CreateThreadPool(2).value();
    const Backend* const backend = *FindBackend(path);
    ops_.emplace(*backend, *runner_, DType::kF32, DType::kI8);
    WeightLoader loader(*checkpoint, *backend, *runner_, DType::kF32);
    Result<ExpertRouter> router = ExpertRouter::Load(loader, "", kHidden, config);
    EXPECT_TRUE(router.ok()) << router.status().ToString();
    router_ = *std::move(router);
  }

  // The weights of rows [begin, begin + count): [count, experts].
  std::vector<float> Weights(int64_t begin, int64_t count) const {
    Result<HostMemory> scratch = HostMemory::Allocate(router_.ScratchBytes(*ops_, count));
    EXPECT_TRUE(scratch.ok());
    std::vector<float> weights(static_cast<size_t>(count * kExperts), NAN);
    router_.Route(*ops_, x_.data() + begin * kHidden, count, weights.data(), scratch->data());
    return weights;
  }
  Values Expected(int64_t row) const {
    Values logits;
    for (int64_t e = 0; e < kExperts; ++e) {
      logits.push_back(std::inner_product(x_.begin() + row * kHidden,
                                          x_.begin() + (row + 1) * kHidden,
                                          weight_.begin() + e * kHidden, 0.0));
    }
    return ExpectedWeights(config_, logits, Values(bias_.begin(), bias_.end()));
  }

 private:
  const ExpertConfig config_;
  TestFolder folder_;
  std::vector<float> weight_;
  std::vector<float> bias_;
  std::vector<float> x_;
  std::shared_ptr<ParallelRunner> runner_;
  std::optional<RowOps> ops_;
  ExpertRouter router_;
};

std::vector<ExpertConfig> Configs() {
  const ExpertConfig plain{.count = kExperts, .per_token = 3};
  ExpertConfig scaled = plain;
  scaled.normalises = false;
  scaled.scale = 2.5;
  ExpertConfig grouped = scaled;
  grouped.group_count = 4;
  grouped.groups_per_token = 2;
  grouped.per_token = 5;
  ExpertConfig sigmoid = grouped;
  sigmoid.scores = ExpertScores::kSigmoid;
  sigmoid.has_choice_bias = true;
  sigmoid.normalises = true;
  sigmoid.group_scores = 2;
  ExpertConfig all_of_the_groups = sigmoid;
  all_of_the_groups.per_token = 6;
  return {plain, scaled, grouped, sigmoid, all_of_the_groups};
}

TEST(ExpertRouterTest, ChoosesByTheDefinitionOnEveryPath) {
  for (const ExpertConfig& config : Configs()) {
    for (const std::string& path : KernelPaths()) {
      const Routing routing(config, path);
      const std::vector<float> weights = routing.Weights(0, kRows);
      for (int64_t row = 0; row < kRows; ++row) {
        const Values expected = routing.Expected(row);
        for (size_t e = 0; e < expected.size(); ++e) {
          const float weight = weights[static_cast<size_t>(row * kExperts) + e];
          EXPECT_EQ(weight == 0, expected[e] == 0) << path << ", row " << row << ", expert " << e;
          EXPECT_NEAR(weight, expected[e], 1e-5 * config.scale);
        }
      }
    }
  }
}

TEST(ExpertRouterTest, RowsBesideATokenCannotBeSeen) {
  for (const ExpertConfig& config : Configs()) {
    const Routing routing(config, "");
    const std::vector<float> all = routing.Weights(0, kRows);
    for (int64_t row = 0; row < kRows; ++row) {
      const std::vector<float> alone = routing.Weights(row, 1);
      EXPECT_TRUE(std::equal(alone.begin(), alone.end(), all.begin() + row * kExperts)) << row;
    }
  }
}

}  // namespace
}  // namespace quire
