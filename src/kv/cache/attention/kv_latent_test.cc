// Latent layers (MLA) of the cache: what the walks (kv_walk_test.cc) do not say by name.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>

#include "kv/pages/layer_groups.h"
#include "kv/testing/kv_test_forward.h"
#include "quire/kv_export.h"

namespace quire {
namespace {

using Tokens = std::vector<uint64_t>;

AttentionLayerSpec LatentLayer(DType dtype = DType::kF32, int64_t heads = 4) {
  AttentionLayerSpec spec{.num_qo_heads = heads,
                          .num_kv_heads = 1,
                          .qk_head_dim = 20,
                          .v_head_dim = 16,
                          .dtype = dtype};
  spec.latent = true;
  return spec;
}

AttentionKVCacheOptions OptionsOf(std::vector<AttentionLayerSpec> layers, int64_t page_size = 16) {
  return TestCacheOptions(std::move(layers), {.max_num_sequences = 64,
                                              .token_capacity = 4000,
                                              .prefill_chunk_size = 256,
                                              .page_size = page_size,
                                              .rope = RopeMode::kNone});
}

std::unique_ptr<AttentionKVCache> MakeCache(std::vector<AttentionLayerSpec> layers,
                                            int64_t page_size = 16) {
  return MakeTestCache(OptionsOf(std::move(layers), page_size));
}

Tokens Sequence(uint64_t first, size_t count) {
  Tokens tokens(count);
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

// The outputs of each layer, or nothing and a failure.
std::vector<LayerOutputs> Forward(AttentionKVCache& cache, const std::vector<int64_t>& ids,
                                  const std::vector<Tokens>& tokens) {
  auto outputs = RunForward(cache, cache.options().layers, ids, tokens);
  EXPECT_TRUE(outputs.ok()) << outputs.status().ToString();
  return outputs.ok() ? *std::move(outputs)
                      : std::vector<LayerOutputs>(cache.options().layers.size());
}

// Specification, defect B10: in TVM 32 sequences and more below the middle one of three blocks
// missed their own new token.
TEST(KVLatent, AnyNumberOfSequencesShareABlockInDecode) {
  for (const int64_t sharers : {31, 32, 40}) {
    auto cache = MakeCache({LatentLayer()});
    ASSERT_TRUE(cache->AddSequence(0).ok());
    Forward(*cache, {0}, {Sequence(1, 9)});
    std::vector<int64_t> ids;
    std::vector<Tokens> tokens;
    for (int64_t id = 1; id <= sharers; ++id) {
      ASSERT_TRUE(cache->ForkSequence(0, id, id % 2 == 0 ? 9 : 5).ok());
      ids.push_back(id);
      tokens.push_back({static_cast<uint64_t>(1000 + id)});
    }
    Forward(*cache, ids, tokens);  // blocks of their own below the shared ones
    for (Tokens& token : tokens) token[0] += 1000;
    const std::vector<LayerOutputs> together = Forward(*cache, ids, tokens);
    auto fresh = MakeCache({LatentLayer()}, 64);
    for (int64_t id = 1; id <= sharers; ++id) {
      ASSERT_TRUE(fresh->Clear().ok());
      ASSERT_TRUE(fresh->AddSequence(0).ok());
      Tokens all = Sequence(1, id % 2 == 0 ? 9 : 5);
      all.push_back(static_cast<uint64_t>(1000 + id));
      Forward(*fresh, {0}, {all});
      const auto alone = Forward(*fresh, {0}, {{static_cast<uint64_t>(2000 + id)}});
      ASSERT_TRUE(std::ranges::equal(together[0].o.rows(id - 1, 1), alone[0].o.bytes()))
          << "sequence " << id << " of " << sharers;
    }
  }
}

TEST(KVLatent, ALatentIsStoredOnce) {
  for (const DType dtype : {DType::kBF16, DType::kI8}) {
    const auto groups = MakeLayerGroups(OptionsOf({LatentLayer(dtype)}));
    ASSERT_TRUE(groups.ok());
    const KVLayout& layout = (*groups)[0].layout;
    const size_t elements = 16 * 32 * layout.k_element_bytes();  // 20 dimensions, rounded up
    const size_t scales = dtype == DType::kI8 ? 16 * sizeof(float) : 0;
    EXPECT_EQ(layout.page_bytes(), elements + scales);
  }
}

TEST(KVLatent, NothingCachedIsAnEmptySetForMerge) {
  const AttentionLayerSpec spec = LatentLayer();
  auto cache = MakeCache({spec});
  ASSERT_TRUE(cache->AddSequence(0).ok());
  ASSERT_TRUE(cache->BeginForward(std::vector<int64_t>{0}, std::vector<int64_t>{2}).ok());
  const TokenInputs inputs = MakeTokenInputs(spec, 0, DType::kF32, Sequence(1, 2));
  LayerOutputs self{TestTensor(DType::kF32, {2, 4, 16}), TestTensor(DType::kF32, {2, 4})};
  LayerOutputs cross{TestTensor(DType::kF32, {2, 4, 16}), TestTensor(DType::kF32, {2, 4})};
  LayerOutputs fused{TestTensor(DType::kF32, {2, 4, 16}), {}};
  const double scale = ScoreScale(spec);
  ASSERT_TRUE(
      cache->CrossAttention(0, inputs.q.view(), cross.o.view(), cross.lse.view(), scale).ok());
  for (int64_t i = 0; i < cross.o.count(); ++i) ASSERT_EQ(cross.o.Get(i), 0.0F);
  for (int64_t i = 0; i < cross.lse.count(); ++i) {
    ASSERT_EQ(cross.lse.Get(i), -std::numeric_limits<float>::infinity());
  }
  // The latent as key and value of one head: here the absorbed form is the plain one.
  TestTensor v(DType::kF32, {2, 1, 16});
  for (int64_t i = 0; i < v.count(); ++i) v.Set(i, inputs.k.Get(i / 16 * 20 + i % 16));
  ASSERT_TRUE(cache
                  ->SelfAttention(0, inputs.q.view(), inputs.k.view(), v.view(), self.o.view(),
                                  self.lse.view(), scale)
                  .ok());
  ASSERT_TRUE(
      cache
          ->MergeAttnOutputInplace(self.o.view(), self.lse.view(), cross.o.view(), cross.lse.view())
          .ok());
  ASSERT_TRUE(cache->AttentionWithMLA(0, inputs.q.view(), inputs.kv(), fused.o.view(), scale).ok());
  EXPECT_TRUE(std::ranges::equal(self.o.bytes(), fused.o.bytes()));
  EXPECT_TRUE(cache->EndForward().ok());
}

TEST(KVLatent, CallsOfTheOtherKindNameTheRightOne) {
  const AttentionLayerSpec plain{
      .num_qo_heads = 2, .num_kv_heads = 1, .qk_head_dim = 20, .v_head_dim = 20};
  auto cache = MakeCache({LatentLayer(), plain});
  ASSERT_TRUE(cache->AddSequence(0).ok());
  const TokenInputs inputs = MakeTokenInputs(LatentLayer(), 0, DType::kF32, Sequence(1, 1));
  const auto expect = [&](const Status& status, const char* name) {
    EXPECT_EQ(status.code(), StatusCode::kBadArgument);
    EXPECT_NE(status.message().find(name), std::string::npos) << status.ToString();
    EXPECT_TRUE(cache->AbortForward().ok());
  };
  const auto begin = [&] {
    ASSERT_TRUE(cache->BeginForward(std::vector<int64_t>{0}, std::vector<int64_t>{1}).ok());
  };
  begin();
  expect(cache->Append(0, inputs.k.view(), inputs.v.view()), "AppendMLAKV");
  begin();
  expect(cache->AppendMLAKV(1, inputs.kv()), "call Append");
  begin();
  expect(cache->AttentionWithFusedQKV(0, inputs.qkv.view(), inputs.q.view(), 1),
         "AttentionWithMLA");
  begin();
  expect(cache->AttentionWithMLA(1, inputs.q.view(), inputs.kv(), inputs.q.view(), 1),
         "AttentionWithFusedQKV");
}

TEST(KVLatent, ChunksHoldLatentsAndComeBackBitForBit) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kI8, DType::kF8E4M3}) {
    const AttentionLayerSpec plain{
        .num_qo_heads = 2, .num_kv_heads = 2, .qk_head_dim = 8, .v_head_dim = 8, .dtype = dtype};
    const std::vector<AttentionLayerSpec> layers = {LatentLayer(dtype), plain, LatentLayer(dtype)};
    auto from = MakeCache(layers, 16);
    ASSERT_TRUE(from->AddSequence(0).ok());
    const Tokens tokens = Sequence(1, 37);
    Forward(*from, {0}, {tokens});
    Passport identity;
    identity.model = "test";
    identity.block_tokens = 16;
    const Result<Passport> passport = CachePassport(*from, identity, false);
    ASSERT_TRUE(passport.ok()) << passport.status().ToString();
    const auto again = Passport::FromJson(*passport->ToJson());
    ASSERT_TRUE(again.ok()) << again.status().ToString();
    EXPECT_EQ(again->layers[0].kind, StateKind::kLatent);
    EXPECT_EQ(again->layers[1].kind, StateKind::kAttention);
    const KeySpace keys(*passport->Fingerprint(), "");
    std::vector<ChunkBuffer> chunks;
    int64_t start = 0;
    const std::vector<int32_t> ids(tokens.begin(), tokens.end());
    std::vector<ChunkFields> chain = ChainFields(*passport, keys, ids, /*tail=*/true).value();
    for (ChunkFields& fields : chain) {
      EXPECT_EQ(fields.first_position, static_cast<uint32_t>(start));  // latents come rotated
      const auto count = static_cast<int64_t>(fields.tokens.size());
      auto chunk = ExportChunk(*from, 0, start, std::move(fields));
      ASSERT_TRUE(chunk.ok()) << chunk.status().ToString();
      chunks.push_back(*std::move(chunk));
      start += count;
    }
    std::vector<ChunkView> views;
    for (const ChunkBuffer& chunk : chunks) {
      const auto header = DecodeChunkHeader(chunk.bytes(), {});
      ASSERT_TRUE(header.ok()) << header.status().ToString();
      EXPECT_GE(header->Find(SectionKind::kLatent, 0), 0);
      EXPECT_LT(header->Find(SectionKind::kValue, 0), 0);
      const auto view = ChunkView::Open(
          chunk.bytes(), {.key = header->key, .fingerprint = header->fingerprint}, {});
      ASSERT_TRUE(view.ok()) << view.status().ToString();
      views.push_back(*view);
    }
    const auto expected = Forward(*from, {0}, {{99}});
    for (const int64_t page_size : {7, 16, 64}) {
      auto to = MakeCache(layers, page_size);
      ASSERT_TRUE(ImportChunks(*to, 5, views).ok());
      const auto got = Forward(*to, {5}, {{99}});
      for (size_t l = 0; l < layers.size(); ++l)
        EXPECT_TRUE(std::ranges::equal(got[l].o.bytes(), expected[l].o.bytes())) << "layer " << l;
      EXPECT_EQ(ImportChunks(*to, 6, std::span(views).subspan(1)).code(),
                StatusCode::kIncompatible);
    }
  }
}

}  // namespace
}  // namespace quire
