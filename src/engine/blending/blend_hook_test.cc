// Which rows of a piece go on: the same as SelectTokens chooses, with link tokens for each document
// that begins in the piece, the prompt's last token, and an account of what was left.
#include "engine/blending/blend_hook.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>

namespace quire {
namespace {

constexpr int64_t kDim = 4;
constexpr int64_t kRows = 40;

using Rows = std::vector<int32_t>;

// A piece of 40 rows at 100 whose rows are all moved, out of a sequence of zeros.
class BlendHookTest : public testing::Test {
 protected:
  void SetUp() override {
    AttentionKVCacheOptions options;
    options.layers.assign(4, {.num_qo_heads = 1,
                              .num_kv_heads = 1,
                              .qk_head_dim = kDim,
                              .v_head_dim = kDim,
                              .dtype = DType::kF32});
    options.max_num_sequences = 2;
    options.token_capacity = 128;
    options.prefill_chunk_size = 64;
    options.runner = CreateThreadPool(1).value();
    cache_ = AttentionKVCache::Create(options).value();
    std::vector<float> zeros(kRows * kDim);
    LayerKV kv{.k = TensorView(zeros.data(), DType::kF32, {kRows, int64_t{1}, kDim}),
               .v = TensorView(zeros.data(), DType::kF32, {kRows, int64_t{1}, kDim})};
    const KVBlock block(4, kv);
    ASSERT_TRUE(cache_->AddSequence(0).ok());
    ASSERT_TRUE(cache_->ImportKV(0, std::span(&block, 1)).ok());
    piece_ = std::make_unique<MovedPiece>(cache_->options(), 100, kRows, false);
  }
  void Take(int64_t begin, int64_t end) {
    ASSERT_TRUE(piece_->Take(*cache_, {.rows = {begin, end}, .seq_id = 0, .from = begin}).ok());
  }
  BlendHook Hook(const BlendOptions& options, std::vector<PromptDocument> documents,
                 bool ends_prompt = false) {
    options_ = options;
    documents_ = std::move(documents);
    return BlendHook({.piece = piece_.get(),
                      .options = &options_,
                      .documents = documents_,
                      .range = {100, 100 + kRows},
                      .ends_prompt = ends_prompt,
                      .clock = clock_.get()});
  }
  // Fresh values of the rows that came so far.
  Rows Ask(BlendHook* hook, int64_t layer, const std::vector<float>& values) {
    std::vector<float> v;
    for (const float value : values) v.insert(v.end(), kDim, value);
    const TensorView rows(v.data(), DType::kF32, {std::ssize(values), int64_t{1}, kDim});
    const Result<RowSelection> selection = hook->BeforeAttention(layer, {.k = rows, .v = rows});
    EXPECT_TRUE(selection.ok()) << selection.status().ToString();
    return selection->selects ? selection->rows : Rows{-1};
  }

  const std::shared_ptr<Clock> clock_ = MachineTime();
  std::unique_ptr<AttentionKVCache> cache_;
  std::unique_ptr<MovedPiece> piece_;
  BlendOptions options_;
  std::vector<PromptDocument> documents_;
};

TEST_F(BlendHookTest, TheRowsThatDeviateMostGoOn) {
  Take(0, 40);
  BlendHook hook = Hook({.ratios = {0.1}}, {{50, 100}, {100, 140}});
  std::vector<float> values(kRows, 0.5F);
  values[7] = 3, values[20] = -2, values[33] = 4, values[39] = 1;
  EXPECT_EQ(Ask(&hook, 0, values), Rows{-1}) << "no check layer";
  EXPECT_EQ(Ask(&hook, 1, values), (Rows{7, 20, 33, 39}));
  EXPECT_EQ(hook.counts().moved, 40);
  EXPECT_EQ(hook.counts().recomputed, 4);
  EXPECT_FLOAT_EQ(hook.counts().deviation_max, 0.25F);
  EXPECT_FLOAT_EQ(hook.counts().deviation_sum, 36 * 0.25F);
}

TEST_F(BlendHookTest, ARowThatIsNotANumberGoesOnFirst) {
  Take(0, 40);
  BlendHook hook = Hook({.ratios = {0.05}}, {{50, 100}, {100, 140}});
  std::vector<float> values(kRows, 0.5F);
  values[7] = 3, values[20] = NAN, values[33] = 4;
  EXPECT_EQ(Ask(&hook, 1, values), (Rows{20, 33}));
  EXPECT_FLOAT_EQ(hook.counts().deviation_max, 9) << "the others are compared as they are";
}

// The usage is printed as JSON, where "Infinity" is no number.
TEST_F(BlendHookTest, WhatIsToldOfRowsThatAreNoNumbersIsFinite) {
  Take(0, 40);
  BlendHook hook = Hook({.ratios = {0.0}}, {{50, 100}, {100, 140}});
  std::vector<float> values(kRows, 0.5F);
  values[7] = NAN, values[20] = INFINITY;
  EXPECT_EQ(Ask(&hook, 1, values), Rows{39});
  EXPECT_EQ(hook.counts().deviation_max, std::numeric_limits<float>::max());
  EXPECT_TRUE(std::isfinite(hook.counts().deviation_sum));
}

TEST_F(BlendHookTest, InvalidRowsAndThePromptsLastOneGoOn) {
  Take(0, 10);
  Take(12, 40);
  BlendHook hook = Hook({.ratios = {0.0}}, {{50, 100}, {100, 140}}, /*ends_prompt=*/true);
  EXPECT_EQ(Ask(&hook, 1, std::vector<float>(kRows, 1.0F)), (Rows{10, 11, 39}));
  EXPECT_EQ(hook.counts().moved, 38);
  EXPECT_EQ(hook.counts().recomputed, 1);
}

TEST_F(BlendHookTest, ARowGoesOnWhereNoneIsAskedFor) {
  Take(0, 40);
  BlendHook hook = Hook({.check_layers = {1, 3}, .ratios = {0.0, 0.0}}, {{50, 100}, {100, 140}});
  EXPECT_EQ(Ask(&hook, 1, std::vector<float>(kRows, 1.0F)), Rows{39});
  EXPECT_EQ(Ask(&hook, 3, {1.0F}), Rows{39});
  EXPECT_EQ(hook.counts().recomputed, 1);
}

TEST_F(BlendHookTest, EachDocumentThatBeginsInThePieceHasLinkTokens) {
  Take(0, 40);
  for (const PromptDocument& before : {PromptDocument{50, 100}, PromptDocument{20, 50}}) {
    BlendHook hook = Hook({.ratios = {0.0}, .link_tokens = 2}, {before, {100, 120}, {120, 140}});
    EXPECT_EQ(Ask(&hook, 1, std::vector<float>(kRows, 1.0F)), (Rows{0, 1, 20, 21}));
  }
}

TEST_F(BlendHookTest, ADocumentThatGoesOnHasNone) {
  Take(0, 40);
  BlendHook hook = Hook({.ratios = {0.0}, .link_tokens = 2}, {{20, 50}, {50, 120}, {120, 140}});
  EXPECT_EQ(Ask(&hook, 1, std::vector<float>(kRows, 1.0F)), (Rows{20, 21}));
}

TEST_F(BlendHookTest, SeveralCheckLayersDropRowsOneAfterTheOther) {
  Take(0, 40);
  BlendHook hook = Hook({.check_layers = {1, 3}, .ratios = {0.2, 0.05}}, {{50, 100}, {100, 140}});
  std::vector<float> values(kRows);
  for (int64_t row = 30; row < 38; ++row) values[row] = static_cast<float>(row);
  EXPECT_EQ(Ask(&hook, 1, values), (Rows{30, 31, 32, 33, 34, 35, 36, 37}));
  EXPECT_EQ(Ask(&hook, 2, {}), Rows{-1});
  EXPECT_EQ(Ask(&hook, 3, {9, 1, 1, 1, 8, 1, 1, 1}), (Rows{30, 34}));
  EXPECT_EQ(hook.counts().recomputed, 2);
  EXPECT_FLOAT_EQ(hook.counts().deviation_max, 1) << "dropped at the second one";
}

TEST_F(BlendHookTest, AtRatioOneNothingIsLeft) {
  Take(0, 40);
  BlendHook hook = Hook({.ratios = {1.0}}, {{50, 100}, {100, 140}});
  Rows all(kRows);
  std::iota(all.begin(), all.end(), 0);
  EXPECT_EQ(Ask(&hook, 1, std::vector<float>(kRows, 0.0F)), all);
  EXPECT_EQ(hook.counts().recomputed, 40);
  EXPECT_FALSE(hook.counts().any_left());
}

TEST_F(BlendHookTest, ADocumentMayHaveABudgetOfItsOwn) {
  Take(0, 40);
  BlendHook hook = Hook({.ratios = {0.0}}, {{50, 100}, {100, 120}, {120, 140, 0.1}});
  std::vector<float> values(kRows, 9.0F);
  values[25] = 10, values[31] = 11;
  EXPECT_EQ(Ask(&hook, 1, values), (Rows{25, 31}));
}

}  // namespace
}  // namespace quire
