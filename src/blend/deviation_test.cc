// ComputeDeviations against naive sums in double, and what it must not read.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "base/random.h"
#include "blend/testing/blend_reference.h"
#include "quire/blend.h"
#include "tensor/half.h"

namespace quire {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

std::vector<float> RandomNumbers(int64_t count, uint64_t seed) {
  RandomSequence random(seed);
  std::vector<float> numbers(static_cast<size_t>(count));
  for (float& number : numbers) number = static_cast<float>(random.Normal());
  return numbers;
}

std::vector<double> RowOf(const std::vector<float>& numbers, int64_t row, int64_t channels) {
  const auto begin = numbers.begin() + row * channels;
  return {begin, begin + channels};
}

struct MetricCase {
  DeviationMetric metric;
  int64_t heads;
  int64_t dim;
};

class Metrics : public ::testing::TestWithParam<MetricCase> {};

TEST_P(Metrics, AreThoseOfTheNaiveLoops) {
  const MetricCase& c = GetParam();
  constexpr int64_t kRows = 6;
  const int64_t channels = c.heads * c.dim;
  std::vector<float> numbers[4];
  for (size_t i = 0; i < 4; ++i) numbers[i] = RandomNumbers(kRows * channels, 20 + i);
  const auto view = [&](std::vector<float>& x) {
    return TensorView(x.data(), DType::kF32, {kRows, c.heads, c.dim});
  };
  const KVRows fresh{view(numbers[0]), view(numbers[1])};
  const KVRows cached{view(numbers[2]), view(numbers[3])};
  const std::vector<uint8_t> kinds = {1, 1, 0, 1, 2, 1};
  std::vector<float> deviations(kRows, 77.0F);
  ASSERT_TRUE(ComputeDeviations(c.metric, 0, fresh, cached, std::nullopt, kinds, deviations).ok());
  for (int64_t row = 0; row < kRows; ++row) {
    const auto at = static_cast<size_t>(row);
    if (kinds[at] != kRowMoved) {
      EXPECT_EQ(deviations[at], -kInfinity);
      continue;
    }
    const bool keys = c.metric == DeviationMetric::kKL2 || c.metric == DeviationMetric::kKVL2;
    std::vector<double> a = RowOf(numbers[keys ? 0 : 1], row, channels);
    std::vector<double> b = RowOf(numbers[keys ? 2 : 3], row, channels);
    if (c.metric == DeviationMetric::kKVL2) {
      for (const double x : RowOf(numbers[1], row, channels)) a.push_back(x);
      for (const double x : RowOf(numbers[3], row, channels)) b.push_back(x);
    }
    const double want = RowDeviationReference(c.metric, c.heads, a, b);
    EXPECT_NEAR(deviations[at], want, 1e-6 * std::max(1.0, want)) << row;
  }
}

INSTANTIATE_TEST_SUITE_P(All, Metrics,
                         ::testing::Values(MetricCase{DeviationMetric::kVL2, 2, 128},
                                           MetricCase{DeviationMetric::kVL2, 3, 1},
                                           MetricCase{DeviationMetric::kVL2, 1, 67},
                                           MetricCase{DeviationMetric::kKL2, 2, 16},
                                           MetricCase{DeviationMetric::kKVL2, 4, 80},
                                           MetricCase{DeviationMetric::kCosine, 2, 128},
                                           MetricCase{DeviationMetric::kCosine, 5, 7}));

TEST(Deviations, SumsAreTakenInTheLanesThatTheHeaderNames) {
  // 2^24 + 1 is no float32: whether the ones are added to each other first can be seen.
  std::vector<float> fresh(32, 0.0F);
  fresh[0] = 4096.0F;  // lane 0; its square is 2^24
  fresh[8] = 1.0F;     // lane 8, added to lane 0 first: lost
  fresh[4] = 1.0F;     // lane 4 ...
  fresh[28] = 1.0F;    // ... and lane 12, which is added to lane 4: 2, kept
  std::vector<float> cached(32, 0.0F);
  const KVRows a{{}, TensorView(fresh.data(), DType::kF32, {1, 1, 32})};
  const KVRows b{{}, TensorView(cached.data(), DType::kF32, {1, 1, 32})};
  const std::vector<uint8_t> kinds = {1};
  std::vector<float> deviations(1);
  ASSERT_TRUE(
      ComputeDeviations(DeviationMetric::kVL2, 0, a, b, std::nullopt, kinds, deviations).ok());
  EXPECT_EQ(deviations[0], (16777216.0F + 2.0F) / 32.0F);
}

TEST(Deviations, ZerosAgreeAndAZeroBesideANumberDoesNot) {
  std::vector<float> fresh = {0, 0, 0, 0, 1, 0, -1, 0};
  std::vector<float> cached = {0, 0, 1, 0, 1, 0, 1, 0};
  const KVRows a{{}, TensorView(fresh.data(), DType::kF32, {4, 1, 2})};
  const KVRows b{{}, TensorView(cached.data(), DType::kF32, {4, 1, 2})};
  const std::vector<uint8_t> kinds = {1, 1, 1, 1};
  std::vector<float> deviations(4);
  ASSERT_TRUE(
      ComputeDeviations(DeviationMetric::kCosine, 0, a, b, std::nullopt, kinds, deviations).ok());
  EXPECT_EQ(deviations, (std::vector<float>{0, 1, 0, 2}));
}

TEST(Deviations, RowsWithoutUsableKVAreNotReadAndNaNOfAMovedRowIsInfinite) {
  std::vector<float> fresh = {1, 1, NAN, 1, 1};
  std::vector<float> cached = {NAN, 3, 1, INFINITY, NAN};
  const KVRows a{{}, TensorView(fresh.data(), DType::kF32, {5, 1, 1})};
  const KVRows b{{}, TensorView(cached.data(), DType::kF32, {5, 1, 1})};
  const std::vector<uint8_t> kinds = {0, 1, 1, 1, 2};
  std::vector<float> deviations(5);
  ASSERT_TRUE(
      ComputeDeviations(DeviationMetric::kVL2, 0, a, b, std::nullopt, kinds, deviations).ok());
  EXPECT_EQ(deviations, (std::vector<float>{-kInfinity, 4, kInfinity, kInfinity, -kInfinity}));
}

TEST(Deviations, FreshRowsOfALaterLayerAreThoseOfTheSelection) {
  // Rows 1 and 3; fresh in float32, cached in bfloat16 with the tokens in the second axis.
  std::vector<float> fresh = {5, 7};
  std::vector<uint16_t> cached;
  for (const float x : {0.0F, 1.0F, 2.0F, 3.0F}) cached.push_back(F32ToBf16(x));
  const KVRows a{{}, TensorView(fresh.data(), DType::kF32, {1, 2, 1})};
  const KVRows b{{}, TensorView(cached.data(), DType::kBF16, {1, 4, 1})};
  const std::vector<uint8_t> kinds = {1, 1, 1, 1};
  const std::vector<int64_t> rows = {1, 3};
  std::vector<float> deviations(4);
  ASSERT_TRUE(ComputeDeviations(DeviationMetric::kVL2, 1, a, b, rows, kinds, deviations).ok());
  EXPECT_EQ(deviations, (std::vector<float>{-kInfinity, 16, -kInfinity, 16}));
  const KVRows nothing{{}, TensorView(fresh.data(), DType::kF32, {1, 0, 1})};
  const std::span<const int64_t> no_rows;
  ASSERT_TRUE(
      ComputeDeviations(DeviationMetric::kVL2, 1, nothing, b, no_rows, kinds, deviations).ok());
  EXPECT_EQ(deviations, std::vector<float>(4, -kInfinity));
}

void ExpectRefused(const Status& status, std::string_view part) {
  EXPECT_EQ(status.code(), StatusCode::kBadArgument);
  EXPECT_NE(status.message().find(part), std::string_view::npos) << status.message();
}

TEST(Deviations, ViewsThatDoNotFitAreRefusedAndNothingIsWritten) {
  std::vector<float> numbers(24);
  const auto view = [&](std::initializer_list<int64_t> shape) {
    return TensorView(numbers.data(), DType::kF32, shape);
  };
  const std::vector<uint8_t> kinds = {1, 1};
  std::vector<float> deviations(2, 5.0F);
  const auto call = [&](DeviationMetric metric, const TensorView& k, const TensorView& fresh_v,
                        std::optional<std::span<const int64_t>> rows = std::nullopt) {
    return ComputeDeviations(metric, 0, {k, fresh_v}, {view({2, 2, 4}), view({2, 2, 4})}, rows,
                             kinds, deviations);
  };
  ExpectRefused(call(DeviationMetric::kVL2, {}, view({2, 4, 2})), "fresh v is float32 [2, 4, 2]");
  ExpectRefused(call(DeviationMetric::kVL2, {}, view({3, 2, 4})), "2 fresh and 2 cached tokens");
  ExpectRefused(call(DeviationMetric::kKL2, {}, view({2, 2, 4})), "fresh k");
  const std::vector<int64_t> falling = {1, 0};
  ExpectRefused(call(DeviationMetric::kVL2, {}, view({2, 2, 4}), falling), "rows[1] is 0");
  const std::vector<int64_t> beyond = {2};
  ExpectRefused(call(DeviationMetric::kVL2, {}, view({1, 2, 4}), beyond), "below 2");
  std::vector<float> three(3, 5.0F);
  ExpectRefused(ComputeDeviations(DeviationMetric::kVL2, 0, {{}, view({2, 2, 4})},
                                  {{}, view({2, 2, 4})}, std::nullopt, kinds, three),
                "3 deviations");
  ExpectRefused(ComputeDeviations(DeviationMetric::kVL2, 0, {{}, view({2, 0, 4})},
                                  {{}, view({2, 0, 4})}, std::nullopt, kinds, deviations),
                "no numbers");
  EXPECT_EQ(deviations, (std::vector<float>{5, 5}));
  EXPECT_EQ(three, (std::vector<float>{5, 5, 5}));
}

TEST(Deviations, MetricsHaveNames) {
  EXPECT_EQ(ParseDeviationMetric("v_l2").value(), DeviationMetric::kVL2);
  EXPECT_EQ(ParseDeviationMetric("k_l2").value(), DeviationMetric::kKL2);
  EXPECT_EQ(ParseDeviationMetric("kv_l2").value(), DeviationMetric::kKVL2);
  EXPECT_EQ(ParseDeviationMetric("cosine").value(), DeviationMetric::kCosine);
  ExpectRefused(ParseDeviationMetric("l2").status(), "\"l2\"");
}

}  // namespace
}  // namespace quire
