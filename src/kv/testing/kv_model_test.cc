// The oracle by itself: lengths, pages and contents of situations that were worked out by hand
// (kv-state.md section 6, with Quire's page rule), and attention against numbers computed on paper.
#include "kv/testing/kv_model.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numbers>

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
    ASSERT_TRUE(model_.CheckInvariants().ok());
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

TEST_F(KVModelTest, ForkInsideAPageTakesNoPage) {
  EXPECT_EQ(model_.GetNumAvailablePages(), 17);
  ASSERT_TRUE(model_.AddSequence(0).ok());
  EXPECT_EQ(model_.GetNumAvailablePages(), 17);
  Extend(0, 10);
  EXPECT_EQ(model_.GetNumAvailablePages(), 14);
  ASSERT_TRUE(model_.ForkSequence(0, 1, 6).ok());
  EXPECT_EQ(model_.GetNumAvailablePages(), 14);
  EXPECT_EQ(model_.GetTotalSequenceLength(), 16);
  EXPECT_EQ(model_.GetDistinctTokenCount(), 10);
  Extend(1, 3, 100);
  EXPECT_EQ(model_.GetNumAvailablePages(), 12);
  EXPECT_EQ(model_.GetDistinctTokenCount(), 13);
  ASSERT_TRUE(model_.RemoveSequence(0).ok());
  ASSERT_TRUE(model_.RemoveSequence(1).ok());
  EXPECT_TRUE(model_.Empty());
  EXPECT_EQ(model_.GetNumAvailablePages(), 17);
}

TEST_F(KVModelTest, TheFirstToAppendAfterAForkTakesTheSlot) {
  ASSERT_TRUE(model_.AddSequence(0).ok());
  Extend(0, 6);
  ASSERT_TRUE(model_.ForkSequence(0, 1).ok());
  Extend(1, 1, 50);
  EXPECT_EQ(model_.GetNumAvailablePages(), 15);
  Extend(0, 1, 60);
  EXPECT_EQ(model_.GetNumAvailablePages(), 14);
  EXPECT_NE(Values(0), Values(1));
}

TEST(KVModelPages, AFifthPageOfARangeGathersTheRange) {
  AttentionKVCacheOptions options = SmallOptions();
  options.page_size = 16;
  options.token_capacity = 160;
  KVModel model(options);
  ASSERT_TRUE(model.AddSequence(0).ok());
  const auto extend = [&](int64_t id, int64_t count) {
    const std::vector<int64_t> ids = {id};
    const std::vector<uint64_t> tokens(static_cast<size_t>(count), static_cast<uint64_t>(id));
    ASSERT_TRUE(RunForward(model, options.layers, ids, {tokens}).ok());
    ASSERT_TRUE(model.CheckInvariants().ok());
  };
  extend(0, 16);
  for (int64_t child = 1; child <= 3;
       ++child) {  // a child's tokens lie in a page more than its parent's
    ASSERT_TRUE(model.ForkSequence(child - 1, child, child).ok());
    extend(child, 16 - child);
    EXPECT_EQ(model.pages_in_use(), child + 1);
  }
  EXPECT_EQ(model.GetDistinctTokenCount(), 16 + 15 + 14 + 13);
  ASSERT_TRUE(model.ForkSequence(3, 4, 4).ok());
  extend(4, 2);
  EXPECT_EQ(model.pages_in_use(), 5);
  EXPECT_EQ(model.GetDistinctTokenCount(), 16 + 15 + 14 + 13 + 6);  // four copied, two new
  for (int64_t id = 0; id < 4; ++id) ASSERT_TRUE(model.RemoveSequence(id).ok());
  EXPECT_EQ(model.pages_in_use(), 1);
  EXPECT_EQ(model.GetDistinctTokenCount(), 6);
}

TEST_F(KVModelTest, PopFreesWholePagesAndKeepsTheRest) {
  ASSERT_TRUE(model_.AddSequence(0).ok());
  Extend(0, 10);
  ASSERT_TRUE(model_.PopN(0, 3).ok());
  EXPECT_EQ(model_.GetNumAvailablePages(), 15);
  ASSERT_TRUE(model_.PopN(0, 7).ok());
  EXPECT_EQ(model_.GetNumAvailablePages(), 17);
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
  const uint64_t digest = model_.StateDigest();
  const std::vector<int64_t> ids = {0, 7};
  const std::vector<int64_t> lengths = {3, 3};
  EXPECT_EQ(model_.BeginForward(ids, lengths).code(), StatusCode::kUnknownSequence);
  EXPECT_EQ(model_.StateDigest(), digest);
  EXPECT_EQ(model_.GetSequenceLength(0).value(), 4);
}

TEST_F(KVModelTest, AbortPutsTheBatchBack) {
  ASSERT_TRUE(model_.AddSequence(0).ok());
  Extend(0, 5);
  const uint64_t digest = model_.StateDigest();
  const std::vector<int64_t> ids = {0};
  const std::vector<int64_t> lengths = {9};
  EXPECT_EQ(model_.PagesNeeded(ids, lengths).value(), 2);
  ASSERT_TRUE(model_.BeginForward(ids, lengths).ok());
  EXPECT_EQ(model_.GetNumAvailablePages(), 13);
  EXPECT_EQ(model_.GetSequenceLength(0).value(), 14);
  ASSERT_TRUE(model_.AddSequence(1).ok());
  ASSERT_TRUE(model_.AbortForward().ok());
  EXPECT_TRUE(model_.HasSequence(1));
  ASSERT_TRUE(model_.RemoveSequence(1).ok());
  EXPECT_EQ(model_.StateDigest(), digest);
  EXPECT_TRUE(model_.CheckInvariants().ok());
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
  EXPECT_EQ(model_.pages_in_use(), 4);
  EXPECT_EQ(model_.GetDistinctTokenCount(), 9);
  EXPECT_TRUE(model_.CheckInvariants().ok());
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
