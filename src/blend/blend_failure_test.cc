// Every allocation of every call refused in turn: the answer is OutOfMemory, and nothing was
// written.
#include <gtest/gtest.h>

#include <vector>

#include "base/testing/refuse_each.h"
#include "quire/blend.h"

namespace quire {
namespace {

TEST(BlendFailures, ShiftWritesNothingUntilItHasAllMemory) {
  const std::vector<double> inv_freq = {1.0, 0.1};
  const std::vector<float> before(8, 1.0F);
  std::vector<float> keys = before;
  const std::vector<int64_t> olds = {0, 1};
  const std::vector<int64_t> news = {5, 6};
  const TensorView view(keys.data(), DType::kF32, {2, 1, 4});
  RefuseEach("shift", StatusCode::kOk, [&] {
    EXPECT_EQ(keys, before);
    return ShiftKeys(view, 0, {.old_positions = olds, .new_positions = news},
                     {.inv_freq = inv_freq}, view);
  });
  EXPECT_NE(keys, before);
  RefuseEach("a shift that is refused", StatusCode::kBadArgument, [&] {
    return ShiftKeys(view, 0, {.old_positions = olds, .new_positions = {}}, {.inv_freq = inv_freq},
                     view);
  });
}

TEST(BlendFailures, Selection) {
  const std::vector<int32_t> query_start_loc = {0, 4, 6};
  const std::vector<uint8_t> kinds = {1, 1, 0, 1, 1, 1};
  const std::vector<float> deviations = {1, 2, 3, 4, 5, 6};
  const std::vector<BlendDocument> documents = {{0, 2}, {2, 2, 0.5}};
  const BlendOptions options;
  const SelectionBatch batch{query_start_loc, kinds, deviations, documents};
  RefuseEach("selection", StatusCode::kOk,
             [&] { return SelectTokens(batch, options, 0).status(); });
  RefuseEach("a selection that is refused", StatusCode::kBadArgument,
             [&] { return SelectTokens(batch, options, 1).status(); });
}

TEST(BlendFailures, MessagesOfTheOthers) {
  std::vector<float> numbers(16, 1.0F);
  const TensorView view(numbers.data(), DType::kF32, {2, 4});
  const std::vector<int64_t> falling = {1, 0};
  RefuseEach("scatter", StatusCode::kBadArgument,
             [&] { return ScatterRows(view, 0, falling, view); });
  RefuseEach("gather", StatusCode::kBadArgument,
             [&] { return GatherRows(view, 0, falling, view); });
  const std::vector<uint8_t> kinds = {1, 1, 1};
  std::vector<float> deviations(3, 9.0F);
  RefuseEach("deviations", StatusCode::kBadArgument, [&] {
    return ComputeDeviations(DeviationMetric::kVL2, 0, {{}, view}, {{}, view}, std::nullopt, kinds,
                             deviations);
  });
  EXPECT_EQ(deviations, std::vector<float>(3, 9.0F));
  RefuseEach("metric", StatusCode::kBadArgument,
             [] { return ParseDeviationMetric("none").status(); });
  const std::vector<int32_t> no_starts;
  RefuseEach("positions", StatusCode::kBadArgument,
             [&] { return FillPositions(no_starts, {}, {}); });
  const BlendOptions options{.link_tokens = -1};
  RefuseEach("options", StatusCode::kBadArgument, [&] { return CheckBlendOptions(options, 2); });
}

}  // namespace
}  // namespace quire
