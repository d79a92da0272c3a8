// The oracle by itself: lengths, contents and bounds of pages of situations that were worked out by
// hand, and attention against numbers computed on paper.
#include "kv/testing/kv_model.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numbers>
#include <utility>
#include <vector>

#include "kv/testing/kv_test_forward.h"

namespace quire {
namespace {

AttentionKVCacheOptions SmallOptions() {
  AttentionKVCacheOptions options;
  options.layers = {{.num_qo_heads = 2, .num_kv_heads = 1, .qk_head_dim = 2, .v_head_dim = 2}};
  options.max_num_sequences = 8;
  options.token_capacity = 64;
  options.prefill_chunk_size = 32;
  options.page_size = 4;
  return options;
}

class KVModelTest : public testing::Test {
 protected:
  // Appends `count` tokens, numbered from `first`.
  void Extend(int64_t id, int64_t count, uint64_t first = 0) {
    std::vector<uint64_t> tokens;
    for (int64_t i = 0; i < count; ++i) tokens.push_back(first + static_cast<uint64_t>(i));
    const std::vector<int64_t> ids = {id};
    const auto outputs = RunForward(model_, options_.layers, ids, {tokens});
    ASSERT_TRUE(outputs.ok()) << outputs.status().ToString();
  }
  // What a forward takes of the one layer group.
  std::pair<int64_t, int64_t> Taken(std::vector<int64_t> ids, std::vector<int64_t> lengths) {
    const auto bounds = model_.TakenByForward(ids, lengths).largest();
    return {bounds.least, bounds.most};
  }
  std::pair<int64_t, int64_t> InUse() {
    return {model_.PagesInUse().least, model_.PagesInUse().most};
  }
  std::vector<float> Values(int64_t id) {
    const int64_t n = model_.GetSequenceLength(id).value();
    TestTensor k(DType::kF32, {1, n, 1, 2});
    TestTensor v(DType::kF32, {1, n, 1, 2});
    EXPECT_TRUE(model_.DebugGetKV(id, 0, n, k.view(), v.view()).ok());
    std::vector<float> values;
    for (int64_t i = 0; i < v.count(); ++i) values.push_back(v.Get(i));
    return values;
  }

  const AttentionKVCacheOptions options_ = SmallOptions();
  KVModel model_{options_};
};

using Pair = std::pair<int64_t, int64_t>;

TEST_F(KVModelTest, ForkInsideAPageTakesNoPage) {
  ASSERT_TRUE(model_.AddSequence(0).ok());
  EXPECT_EQ(InUse(), Pair(0, 0));
  Extend(0, 10);
  EXPECT_EQ(InUse(), Pair(3, 3));
  ASSERT_TRUE(model_.ForkSequence(0, 1, 6).ok());
  EXPECT_EQ(InUse(), Pair(3, 3));
  EXPECT_EQ(model_.GetTotalSequenceLength(), 16);
  EXPECT_EQ(model_.GetDistinctTokenCount(), 10);
  // The parent goes on in its page; the child's next slot may be the parent's.
  EXPECT_EQ(Taken({0}, {2}), Pair(0, 0));
  EXPECT_EQ(Taken({1}, {3}), Pair(1, 2));
  Extend(1, 3, 100);
  EXPECT_EQ(InUse(), Pair(5, 5));
  EXPECT_EQ(model_.GetDistinctTokenCount(), 13);
  ASSERT_TRUE(model_.RemoveSequence(0).ok());
  ASSERT_TRUE(model_.RemoveSequence(1).ok());
  EXPECT_TRUE(model_.Empty());
  EXPECT_EQ(InUse(), Pair(0, 0));
}

TEST_F(KVModelTest, TheFirstToAppendAfterAForkTakesTheSlot) {
  ASSERT_TRUE(model_.AddSequence(0).ok());
  Extend(0, 6);
  ASSERT_TRUE(model_.ForkSequence(0, 1).ok());
  EXPECT_EQ(Taken({0}, {1}), Pair(0, 0));
  EXPECT_EQ(Taken({0, 1}, {1, 1}), Pair(1, 1));
  Extend(1, 1, 50);
  EXPECT_EQ(Taken({0}, {1}), Pair(0, 1));
  Extend(0, 1, 60);
  EXPECT_NE(Values(0), Values(1));
}

TEST_F(KVModelTest, ARangeOfFourCallsMayBeGathered) {
  ASSERT_TRUE(model_.AddSequence(0).ok());
  Extend(0, 4);
  const std::vector<int64_t> ids = {0}, lengths = {1};
  for (int64_t call = 0; call < 3; ++call) Extend(0, 1);
  EXPECT_EQ(model_.TakenByForward(ids, lengths).copies_max, 0);
  EXPECT_EQ(Taken({0}, {1}), Pair(0, 0));
  AttentionKVCacheOptions options = SmallOptions();
  options.page_size = 8;
  KVModel wide(options);
  ASSERT_TRUE(wide.AddSequence(0).ok());
  for (uint64_t call = 0; call < 4; ++call)
    ASSERT_TRUE(RunForward(wide, options.layers, ids, {{call}}).ok());
  EXPECT_EQ(wide.TakenByForward(ids, lengths).copies_max, 4);
}

TEST_F(KVModelTest, APopOfTooManyTokensIsRefused) {
  ASSERT_TRUE(model_.AddSequence(0).ok());
  Extend(0, 10);
  ASSERT_TRUE(model_.PopN(0, 3).ok());
  EXPECT_EQ(InUse(), Pair(2, 2));
  ASSERT_TRUE(model_.PopN(0, 7).ok());
  EXPECT_EQ(InUse(), Pair(0, 0));
  EXPECT_FALSE(model_.Empty());
  EXPECT_EQ(model_.PopN(0, 1).code(), StatusCode::kBadArgument);
  EXPECT_EQ(model_.PopN(0, -1).code(), StatusCode::kBadArgument);
}

TEST_F(KVModelTest, PopIntoASharedPrefixLeavesTheParent) {
  ASSERT_TRUE(model_.AddSequence(0).ok());
  Extend(0, 10);
  const std::vector<float> parent = Values(0);
  ASSERT_TRUE(model_.ForkSequence(0, 1, 9).ok());
  Extend(1, 3, 100);
  ASSERT_TRUE(model_.PopN(1, 6).ok());
  Extend(1, 2, 200);
  EXPECT_EQ(Values(0), parent);
  EXPECT_EQ(model_.GetTotalSequenceLength(), 18);
}

TEST_F(KVModelTest, AFailedBeginChangesNothing) {
  ASSERT_TRUE(model_.AddSequence(0).ok());
  ASSERT_TRUE(model_.AddSequence(1).ok());
  Extend(0, 4);
  Extend(1, 4);
  const std::vector<int64_t> ids = {0, 7};
  const std::vector<int64_t> lengths = {3, 3};
  EXPECT_EQ(model_.BeginForward(ids, lengths).code(), StatusCode::kUnknownSequence);
  EXPECT_EQ(model_.GetSequenceLength(0).value(), 4);
  EXPECT_FALSE(model_.GetQueryRows().ok());
}

TEST_F(KVModelTest, AbortPutsTheBatchBack) {
  ASSERT_TRUE(model_.AddSequence(0).ok());
  Extend(0, 5);
  const std::vector<float> before = Values(0);
  const std::vector<int64_t> ids = {0};
  const std::vector<int64_t> lengths = {9};
  EXPECT_EQ(model_.PagesNeeded(ids, lengths).value(), 2);
  ASSERT_TRUE(model_.BeginForward(ids, lengths).ok());
  EXPECT_EQ(InUse(), Pair(4, 5));
  EXPECT_EQ(model_.GetSequenceLength(0).value(), 14);
  ASSERT_TRUE(model_.AddSequence(1).ok());
  ASSERT_TRUE(model_.AbortForward().ok());
  EXPECT_TRUE(model_.HasSequence(1));
  ASSERT_TRUE(model_.RemoveSequence(1).ok());
  EXPECT_EQ(Values(0), before);
}

TEST_F(KVModelTest, DebugSetKVIsSeenByNobodyElse) {
  ASSERT_TRUE(model_.AddSequence(0).ok());
  Extend(0, 6);
  const std::vector<float> parent = Values(0);
  ASSERT_TRUE(model_.ForkSequence(0, 1).ok());
  TestTensor k(DType::kF32, {1, 1, 1, 2});
  TestTensor v(DType::kF32, {1, 1, 1, 2});
  for (int64_t i = 0; i < 2; ++i) {
    k.Set(i, 5);
    v.Set(i, 7);
  }
  ASSERT_TRUE(model_.DebugSetKV(1, 3, k.view(), v.view()).ok());
  EXPECT_EQ(Values(0), parent);
  EXPECT_EQ(Values(1)[6], 7);
  EXPECT_EQ(Values(1)[8], parent[8]);
  EXPECT_EQ(InUse(), Pair(4, 4));
  EXPECT_EQ(model_.GetDistinctTokenCount(), 9);
}

// Two tokens; keys (1, 0) and (0, 1), values (2, 0) and (0, 4), query (ln 3, 0): weights 3 : 1.
TEST_F(KVModelTest, AttentionIsTheSoftmaxOfTheScores) {
  ASSERT_TRUE(model_.AddSequence(0).ok());
  const std::vector<int64_t> ids = {0};
  const std::vector<int64_t> lengths = {2};
  ASSERT_TRUE(model_.BeginForward(ids, lengths).ok());
  const float ln3 = std::log(3.0f);
  float q[] = {0, 0, 0, 0, ln3, 0, ln3, 0};
  float k[] = {1, 0, 0, 1};
  float v[] = {2, 0, 0, 4};
  float o[8];
  float lse[4];
  const TensorView lse_view(lse, DType::kF32, {2, 2});
  ASSERT_TRUE(
      model_.Append(0, TensorView(k, DType::kF32, {2, 1, 2}), TensorView(v, DType::kF32, {2, 1, 2}))
          .ok());
  ASSERT_TRUE(model_
                  .Attend(0, TensorView(q, DType::kF32, {2, 2, 2}),
                          TensorView(o, DType::kF32, {2, 2, 2}), &lse_view, 1.0)
                  .ok());
  ASSERT_TRUE(model_.EndForward().ok());
  const float expected[] = {2, 0, 2, 0, 1.5, 1, 1.5, 1};
  for (int i = 0; i < 8; ++i) EXPECT_NEAR(o[i], expected[i], 1e-6) << i;
  EXPECT_NEAR(lse[0], 0, 1e-6);
  EXPECT_NEAR(lse[3], 2, 1e-6);
}

TEST(RotateReference, TurnsPairsOfBothPairings) {
  RopeFrequencies frequencies;
  frequencies.inv_freq = {std::numbers::pi / 2, std::numbers::pi};
  frequencies.amplitude = 2;
  const std::vector<double> x = {1, 2, 3, 4, 5};
  const auto half = RotateReference(x, frequencies, RopePairing::kHalfSplit, 1);
  const auto interleaved = RotateReference(x, frequencies, RopePairing::kInterleaved, 1);
  const double expected_half[] = {-6, -4, 2, -8, 5};
  const double expected_interleaved[] = {-4, 2, -6, -8, 5};
  for (size_t i = 0; i < 5; ++i) {
    EXPECT_NEAR(half[i], expected_half[i], 1e-12) << i;
    EXPECT_NEAR(interleaved[i], expected_interleaved[i], 1e-12) << i;
  }
}

}  // namespace
}  // namespace quire
