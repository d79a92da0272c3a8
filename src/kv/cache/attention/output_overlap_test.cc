// Outputs in the memory of other tensors: refused where a byte is shared, right where rows lie
// between each other.
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "kv/testing/kv_test_forward.h"
#include "kv/testing/recurrent_test_forward.h"
#include "quire/attention_kv_cache.h"
#include "quire/recurrent_cache.h"
#include "quire/rnn_state.h"

namespace quire {
namespace {

using Ids = std::vector<int64_t>;

constexpr int64_t kRows = 20;
constexpr double kScale = 0.5;

TensorView Strided(float* data, std::vector<int64_t> shape, std::vector<int64_t> strides) {
  const DLTensor tensor{.data = data,
                        .device = {kDLCPU, 0},
                        .ndim = static_cast<int>(shape.size()),
                        .dtype = ToDLDataType(DType::kF32),
                        .shape = shape.data(),
                        .strides = strides.data(),
                        .byte_offset = 0};
  return *TensorView::FromDLPack(tensor);
}

bool Names(const Status& status, const std::string& a, const std::string& b) {
  const std::string message(status.message());
  return status.code() == StatusCode::kBadArgument &&
         message.find(": " + a + " float32") != std::string::npos &&
         message.find("shares memory with " + b + " float32") != std::string::npos;
}

// One layer of 2 query heads of 4 in a forward of kRows tokens, whose tensors are parts of one
// buffer. A wide row is q (8), k (4), v (4), o (8), lse (2).
class Overlap : public testing::Test {
 protected:
  static constexpr int64_t kWidth = 26;
  static constexpr int64_t kK = 8, kV = 12, kO = 16, kLse = 24;

  Overlap() {
    cache_ = MakeTestCache(TestCacheOptions({Spec()}, {.prefill_chunk_size = kRows}));
    EXPECT_TRUE(cache_->AddSequence(0).ok());
    std::vector<uint64_t> tokens;
    for (uint64_t t = 0; t < kRows; ++t) tokens.push_back(t);
    inputs_ = MakeTokenInputs(Spec(), 0, DType::kF32, tokens);
    for (int64_t row = 0; row < kRows; ++row) {
      for (int64_t i = 0; i < kO; ++i)
        wide_[static_cast<size_t>(row * kWidth + i)] = inputs_.qkv.Get(row * kO + i);
    }
  }
  static AttentionLayerSpec Spec() { return {2, 1, 4, 4, DType::kF32}; }
  void Begin() { ASSERT_TRUE(cache_->BeginForward(Ids{0}, Ids{kRows}).ok()); }
  void BeginAppended() {
    Begin();
    ASSERT_TRUE(cache_->Append(0, inputs_.k.view(), inputs_.v.view()).ok());
  }
  // Part of the wide rows that begins at a column.
  TensorView Part(int64_t column, int64_t heads, int64_t dim) {
    return Strided(wide_.data() + column, {kRows, heads, dim}, {kWidth, dim, 1});
  }
  TensorView LsePart(int64_t column) {
    return Strided(wide_.data() + column, {kRows, 2}, {kWidth, 1});
  }
  void ExpectRefused(const Status& status, const std::string& a, const std::string& b) {
    EXPECT_TRUE(Names(status, a, b)) << status.ToString();
    EXPECT_TRUE(cache_->AbortForward().ok());
  }

  std::unique_ptr<AttentionKVCache> cache_;
  TokenInputs inputs_;
  TestTensor o_{DType::kF32, {kRows, 2, 4}};
  TestTensor lse_{DType::kF32, {kRows, 2}};
  std::vector<float> wide_ = std::vector<float>(kRows * kWidth);
};

TEST_F(Overlap, AnOutputInAnInputIsRefused) {
  const TensorView& q = inputs_.q.view();
  const TensorView q_as_lse(q.data(), DType::kF32, {kRows, 2});
  Begin();
  const TensorView qkv(inputs_.qkv.view().data(), DType::kF32, {kRows, 16});
  ExpectRefused(cache_->AttentionWithFusedQKV(
                    0, qkv, Strided(qkv.data_as<float>() + 12, {kRows, 2, 4}, {16, 4, 1}), kScale),
                "o", "qkv");
  BeginAppended();
  ExpectRefused(cache_->Attend(0, q, q, nullptr, kScale), "o", "q");
  BeginAppended();
  ExpectRefused(cache_->Attend(0, q, o_.view(), &q_as_lse, kScale), "lse", "q");
  BeginAppended();
  const TensorView o_as_lse(o_.view().data(), DType::kF32, {kRows, 2});
  ExpectRefused(cache_->Attend(0, q, o_.view(), &o_as_lse, kScale), "o", "lse");
  BeginAppended();
  ExpectRefused(cache_->AttentionWithSharedKV(0, q, q, nullptr, kScale), "o", "q");
  Begin();
  ExpectRefused(cache_->CrossAttention(0, q, q, lse_.view(), kScale), "o", "q");
  const TensorView& k = inputs_.k.view();
  const TensorView& v = inputs_.v.view();
  const TensorView v_as_lse(v.data(), DType::kF32, {kRows, 2});
  Begin();
  ExpectRefused(cache_->SelfAttention(0, q, k, v, o_.view(), v_as_lse, kScale), "lse", "v");
}

// As well as rows that are nowhere else: a stride of 0.
TEST_F(Overlap, RowsOfAnOutputInEachOtherAreRefused) {
  for (const int64_t stride : {0, 7}) {
    BeginAppended();
    const TensorView o = Strided(wide_.data(), {kRows, 2, 4}, {stride, 4, 1});
    const Status status = cache_->Attend(0, inputs_.q.view(), o, nullptr, kScale);
    EXPECT_EQ(status.code(), StatusCode::kBadArgument);
    EXPECT_NE(status.message().find("rows of o"), std::string::npos) << status.ToString();
    EXPECT_TRUE(cache_->AbortForward().ok());
  }
  BeginAppended();
  const TensorView lse = Strided(wide_.data(), {kRows, 2}, {0, 1});
  EXPECT_EQ(cache_->Attend(0, inputs_.q.view(), o_.view(), &lse, kScale).code(),
            StatusCode::kBadArgument);
}

TEST_F(Overlap, PartsOfWideRowsAreApart) {
  BeginAppended();
  ASSERT_TRUE(cache_->Attend(0, inputs_.q.view(), o_.view(), &lse_.view(), kScale).ok());
  ASSERT_TRUE(cache_->AbortForward().ok());
  Begin();
  ASSERT_TRUE(cache_->Append(0, Part(kK, 1, 4), Part(kV, 1, 4)).ok());
  const TensorView lse = LsePart(kLse);
  const Status status = cache_->Attend(0, Part(0, 2, 4), Part(kO, 2, 4), &lse, kScale);
  ASSERT_TRUE(status.ok()) << status.ToString();
  for (int64_t row = 0; row < kRows; ++row) {
    const float* const at = wide_.data() + row * kWidth;
    EXPECT_EQ(std::memcmp(at + kO, o_.rows(row, 1).data(), 8 * sizeof(float)), 0) << row;
    EXPECT_EQ(std::memcmp(at + kLse, lse_.rows(row, 1).data(), 2 * sizeof(float)), 0) << row;
  }
  // One column more to the left, and it lies in v.
  ASSERT_TRUE(cache_->AbortForward().ok());
  Begin();
  const TensorView qkv = Strided(wide_.data(), {kRows, 16}, {kWidth, 1});
  ExpectRefused(cache_->AttentionWithFusedQKV(0, qkv, Part(kO - 1, 2, 4), kScale), "o", "qkv");
  Begin();
  EXPECT_TRUE(cache_->AttentionWithFusedQKV(0, qkv, Part(kO, 2, 4), kScale).ok());
}

// Whose output heads are those of other rows' inputs: [head][row][dim] in memory.
TEST_F(Overlap, HeadsMayBeOutermost) {
  std::vector<float> memory(kRows * 16);
  const auto by_head = [&](int64_t first) {
    return Strided(memory.data() + first, {kRows, 2, 4}, {4, kRows * 8, 1});
  };
  BeginAppended();
  EXPECT_TRUE(cache_->Attend(0, by_head(0), by_head(kRows * 4), nullptr, kScale).ok());
  EXPECT_TRUE(
      Names(cache_->Attend(0, by_head(0), by_head(kRows * 4 - 4), nullptr, kScale), "o", "q"));
}

TEST_F(Overlap, LatentLayers) {
  AttentionLayerSpec spec{2, 1, 6, 4, DType::kF32};
  spec.latent = true;
  cache_ = MakeTestCache(TestCacheOptions({spec}, {.prefill_chunk_size = kRows}));
  ASSERT_TRUE(cache_->AddSequence(0).ok());
  TestTensor q(DType::kF32, {kRows, 2, 6}), kv(DType::kF32, {kRows, 8});
  const TensorView narrow = Strided(kv.view().data_as<float>(), {kRows, 6}, {8, 1});
  Begin();
  const TensorView in_kv(kv.view().data(), DType::kF32, {kRows, 2, 4});
  ExpectRefused(cache_->AttentionWithMLA(0, q.view(), narrow, in_kv, kScale), "o", "kv");
  Begin();
  const TensorView in_q = Strided(q.view().data_as<float>(), {kRows, 2, 4}, {12, 6, 1});
  ExpectRefused(cache_->AttentionWithMLA(0, q.view(), narrow, in_q, kScale), "o", "q_absorbed");
}

TEST_F(Overlap, Merges) {
  TestTensor other_o(DType::kF32, {kRows, 2, 4}), other_lse(DType::kF32, {kRows, 2});
  const auto merge = [&](const TensorView& o1, const TensorView& lse1, const TensorView& o2,
                         const TensorView& lse2) {
    return cache_->MergeAttnOutputInplace(o1, lse1, o2, lse2);
  };
  const TensorView& o = o_.view();
  const TensorView& lse = lse_.view();
  EXPECT_TRUE(merge(o, lse, other_o.view(), other_lse.view()).ok());
  EXPECT_TRUE(Names(merge(o, lse, o, other_lse.view()), "o1", "o2"));
  EXPECT_TRUE(Names(merge(o, lse, other_o.view(), lse), "lse1", "lse2"));
  const TensorView in_o(o.data(), DType::kF32, {kRows, 2});
  EXPECT_TRUE(Names(merge(o, in_o, other_o.view(), other_lse.view()), "o1", "lse1"));
}

TEST_F(Overlap, WhatIsExported) {
  BeginAppended();
  ASSERT_TRUE(cache_->Attend(0, inputs_.q.view(), o_.view(), nullptr, kScale).ok());
  ASSERT_TRUE(cache_->EndForward().ok());
  TestTensor k(DType::kF32, {kRows, 1, 4}), v(DType::kF32, {kRows, 1, 4});
  EXPECT_TRUE(cache_->ExportKV(0, 0, 0, {.k = k.view(), .v = v.view()}).ok());
  EXPECT_TRUE(Names(cache_->ExportKV(0, 0, 0, {.k = k.view(), .v = k.view()}), "k", "v"));
  TestTensor all(DType::kF32, {1, kRows, 1, 4});
  EXPECT_TRUE(Names(cache_->DebugGetKV(0, 0, kRows, all.view(), all.view()), "k", "v"));
}

// ---------------------------------------------------------------------- recurrent layers

TEST(RecurrentOverlap, StatesInEachOtherAreRefused) {
  RNNStateOptions options;
  options.num_layers = 1;
  options.states = {{.shape = {2}}};
  options.max_num_sequences = 2;
  const auto state = *RNNState::Create(options);
  for (const int64_t id : {0, 1}) ASSERT_TRUE(state->AddSequence(id).ok());
  float memory[4] = {};
  ASSERT_TRUE(state->BeginForward(Ids{0, 1}, Ids{1, 1}).ok());
  const TensorView same = Strided(memory, {2, 2}, {0, 1});
  EXPECT_EQ(state->Get(0, 0, same).code(), StatusCode::kBadArgument);
  EXPECT_EQ(state->GetBefore(0, 0, Ids{0, 1}, same).code(), StatusCode::kBadArgument);
  EXPECT_EQ(state->Get(0, 0, Strided(memory, {2, 2}, {1, 1})).code(), StatusCode::kBadArgument);
  EXPECT_TRUE(state->Get(0, 0, Strided(memory, {2, 2}, {2, 1})).ok());
  ASSERT_TRUE(state->Set(0, 0, same).ok()) << "what is only read may be the same for all";
  EXPECT_EQ(state->GetAt(0, 0, Ids{0, 1}, same).code(), StatusCode::kBadArgument);
}

// A layer reads all of its inputs before it writes.
TEST(RecurrentOverlap, OutputsMayReplaceInputs) {
  RecurrentCacheOptions options;
  options.layers = {{.kind = RecurrentLayerKind::kLinearAttention,
                     .num_heads = 2,
                     .num_key_heads = 2,
                     .key_dim = 4,
                     .value_dim = 4}};
  options.max_num_sequences = 1;
  options.prefill_chunk_size = kRows;
  options.runner = std::make_shared<SerialRunner>();
  const auto cache = *RecurrentCache::Create(options);
  ASSERT_TRUE(cache->AddSequence(0).ok());
  const auto filled = [](int64_t phase) {
    TestTensor tensor(DType::kF32, {kRows, 2, 4});
    for (int64_t i = 0; i < tensor.count(); ++i)
      tensor.Set(i, static_cast<float>((i * 7 + phase) % 11) * 0.1F);
    return tensor;
  };
  const TestTensor q = filled(0), k = filled(3), v = filled(5);
  TestTensor o(DType::kF32, {kRows, 2, 4}), decay(DType::kF32, {2});
  decay.Set(0, 0.9F);
  decay.Set(1, 0.8F);
  ASSERT_TRUE(cache->BeginForward(Ids{0}, Ids{kRows}).ok());
  const auto run = [&](const TestTensor& out) {
    return cache->LinearAttention(0, q.view(), k.view(), v.view(), decay.view(), out.view(), 1);
  };
  ASSERT_TRUE(run(o).ok());
  ASSERT_TRUE(run(v).ok());
  EXPECT_EQ(std::memcmp(o.bytes().data(), v.bytes().data(), o.bytes().size()), 0);
  const TensorView same = Strided(o.view().data_as<float>(), {kRows, 2, 4}, {0, 4, 1});
  EXPECT_EQ(cache->LinearAttention(0, q.view(), k.view(), v.view(), decay.view(), same, 1).code(),
            StatusCode::kBadArgument);
}

}  // namespace
}  // namespace quire
