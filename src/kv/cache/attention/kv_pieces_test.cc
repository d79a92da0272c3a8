// SelfAttention, CrossAttention and their merge: exact per row, total on nothing, checked.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "kv/cache/paged_kv_cache.h"
#include "kv/testing/kv_test_forward.h"

namespace quire {
namespace {

constexpr int64_t kLength = 700;  // three segments

AttentionKVCacheOptions Options(int64_t page_size = 16) {
  return TestCacheOptions({{4, 2, 16, 16, DType::kF32}, {6, 1, 24, 40, DType::kBF16}},
                          {.max_num_sequences = 8,
                           .token_capacity = 4000,
                           .prefill_chunk_size = 1000,
                           .page_size = page_size,
                           .rope = RopeMode::kNone});
}

std::vector<uint64_t> Tokens(uint64_t sequence, int64_t begin, int64_t end) {
  std::vector<uint64_t> tokens;
  for (int64_t i = begin; i < end; ++i) {
    tokens.push_back(sequence * 100000 + static_cast<uint64_t>(i));
  }
  return tokens;
}

struct Pieces {
  std::vector<LayerOutputs> self, cross, whole;  // [layer]
};

// Begin, append, all pieces and the whole of every layer, End. Other heads for SelfAttention where
// `own_heads`.
Pieces RunPieces(AttentionKVCache& cache, const std::vector<int64_t>& ids,
                 const std::vector<std::vector<uint64_t>>& tokens, bool own_heads = false) {
  std::vector<int64_t> lengths;
  std::vector<uint64_t> rows;
  for (const auto& list : tokens) {
    lengths.push_back(static_cast<int64_t>(list.size()));
    rows.insert(rows.end(), list.begin(), list.end());
  }
  const int64_t n = static_cast<int64_t>(rows.size());
  const auto ok = [](const Status& status) { EXPECT_TRUE(status.ok()) << status.ToString(); };
  ok(cache.BeginForward(ids, lengths));
  Pieces pieces;
  for (size_t i = 0; i < cache.options().layers.size(); ++i) {
    const int64_t layer = static_cast<int64_t>(i);
    const AttentionLayerSpec& spec = cache.options().layers[i];
    const AttentionLayerSpec self = own_heads ? AttentionLayerSpec{9, 3, 20, 12, spec.dtype} : spec;
    const TokenInputs inputs = MakeTokenInputs(spec, layer, DType::kF32, rows);
    const TokenInputs own = MakeTokenInputs(self, layer, DType::kF32, rows);
    const auto outputs = [&](const AttentionLayerSpec& of) {
      return LayerOutputs{TestTensor(DType::kF32, {n, of.num_qo_heads, of.v_head_dim}),
                          TestTensor(DType::kF32, {n, of.num_qo_heads})};
    };
    pieces.self.push_back(outputs(self));
    pieces.cross.push_back(outputs(spec));
    pieces.whole.push_back(outputs(spec));
    // Before the append: the cached tokens alone must be read.
    ok(cache.CrossAttention(layer, inputs.q.view(), pieces.cross[i].o.view(),
                            pieces.cross[i].lse.view(), ScoreScale(spec)));
    ok(cache.Append(layer, inputs.k.view(), inputs.v.view()));
    ok(cache.SelfAttention(layer, own.q.view(), own.k.view(), own.v.view(), pieces.self[i].o.view(),
                           pieces.self[i].lse.view(), ScoreScale(self)));
    ok(cache.Attend(layer, inputs.q.view(), pieces.whole[i].o.view(), &pieces.whole[i].lse.view(),
                    ScoreScale(spec)));
  }
  ok(cache.EndForward());
  return pieces;
}

void ExpectSameRows(const std::vector<LayerOutputs>& a, int64_t a_row,
                    const std::vector<LayerOutputs>& b, int64_t b_row, int64_t count,
                    const std::string& what) {
  for (size_t l = 0; l < a.size(); ++l) {
    EXPECT_TRUE(std::ranges::equal(a[l].o.rows(a_row, count), b[l].o.rows(b_row, count)))
        << what << ": o of layer " << l;
    EXPECT_TRUE(std::ranges::equal(a[l].lse.rows(a_row, count), b[l].lse.rows(b_row, count)))
        << what << ": lse of layer " << l;
  }
}

TEST(Pieces, AreExactPerRowInAnyBatchPageSizeAndPool) {
  for (const bool own_heads : {false, true}) {
    Pieces expected;
    for (const int64_t page_size : {16, 7, 256}) {
      for (const int workers : {1, 3}) {
        AttentionKVCacheOptions options = Options(page_size);
        options.runner = CreateThreadPool(workers).value();
        const auto cache = MakeTestCache(options);
        for (int64_t id = 0; id < 3; ++id) ASSERT_TRUE(cache->AddSequence(id).ok());
        RunPieces(*cache, {0}, {Tokens(0, 0, kLength)});
        RunPieces(*cache, {1}, {Tokens(1, 0, 33)});
        const std::string what =
            "page size " + std::to_string(page_size) + ", workers " + std::to_string(workers);
        if (expected.self.empty()) {
          expected = RunPieces(*cache, {0}, {Tokens(0, kLength, kLength + 40)}, own_heads);
          continue;
        }
        const Pieces batch = RunPieces(
            *cache, {2, 1, 0},
            {Tokens(2, 0, 3), Tokens(1, 33, 50), Tokens(0, kLength, kLength + 40)}, own_heads);
        ExpectSameRows(batch.self, 20, expected.self, 0, 40, what + ", self");
        ExpectSameRows(batch.cross, 20, expected.cross, 0, 40, what + ", cross");
      }
    }
  }
}

// What a row sees across is what its predecessor saw of everything, so its bits are known.
TEST(Pieces, CrossAttentionSeesWhatWasThereAndNoMore) {
  const auto cache = MakeTestCache(Options());
  ASSERT_TRUE(cache->AddSequence(0).ok());
  RunPieces(*cache, {0}, {Tokens(0, 0, 301)});
  // A fork one token shorter whose next token has the same query.
  ASSERT_TRUE(cache->ForkSequence(0, 1, 300).ok());
  const Pieces across = RunPieces(*cache, {0}, {Tokens(0, 400, 401)});
  ASSERT_TRUE(cache->PopN(0, 1).ok());
  // The whole of a token that sees the 300 tokens and token 300 itself, with the query of 400.
  const AttentionLayerSpec& spec = cache->options().layers[0];
  const int64_t ids[] = {1};
  const int64_t lengths[] = {1};
  ASSERT_TRUE(cache->BeginForward(ids, lengths).ok());
  for (int64_t l = 0; l < 2; ++l) {
    const AttentionLayerSpec& layer = cache->options().layers[static_cast<size_t>(l)];
    const TokenInputs stored = MakeTokenInputs(layer, l, DType::kF32, Tokens(0, 300, 301));
    const TokenInputs asked = MakeTokenInputs(layer, l, DType::kF32, Tokens(0, 400, 401));
    const TestTensor o(DType::kF32, {1, layer.num_qo_heads, layer.v_head_dim});
    const TestTensor lse(DType::kF32, {1, layer.num_qo_heads});
    ASSERT_TRUE(cache->Append(l, stored.k.view(), stored.v.view()).ok());
    ASSERT_TRUE(cache->Attend(l, asked.q.view(), o.view(), &lse.view(), ScoreScale(layer)).ok());
    const LayerOutputs& cross = across.cross[static_cast<size_t>(l)];
    EXPECT_TRUE(std::ranges::equal(o.bytes(), cross.o.bytes())) << "o of layer " << l;
    EXPECT_TRUE(std::ranges::equal(lse.bytes(), cross.lse.bytes())) << "lse of layer " << l;
  }
  ASSERT_TRUE(cache->EndForward().ok());
  EXPECT_EQ(spec.num_qo_heads, 4);
}

// Merges into `self`.
void ExpectMergeIsTheWhole(AttentionKVCache& cache, const LayerOutputs& self,
                           const LayerOutputs& cross, const LayerOutputs& whole, double bound,
                           const std::string& what) {
  const Status status = cache.MergeAttnOutputInplace(self.o.view(), self.lse.view(), cross.o.view(),
                                                     cross.lse.view());
  ASSERT_TRUE(status.ok()) << status.ToString();
  for (int64_t i = 0; i < self.o.count(); ++i) {
    ASSERT_NEAR(self.o.Get(i), whole.o.Get(i), bound) << what << ", o at " << i;
  }
  for (int64_t i = 0; i < self.lse.count(); ++i) {
    ASSERT_NEAR(self.lse.Get(i), whole.lse.Get(i), bound) << what << ", lse at " << i;
  }
}

TEST(Pieces, AMergeOfBothIsTheWhole) {
  const auto cache = MakeTestCache(Options());
  for (int64_t id = 0; id < 2; ++id) ASSERT_TRUE(cache->AddSequence(id).ok());
  RunPieces(*cache, {0}, {Tokens(0, 0, 300)});
  const Pieces pieces = RunPieces(*cache, {1, 0}, {Tokens(1, 0, 9), Tokens(0, 300, 340)});
  for (size_t l = 0; l < 2; ++l) {
    const LayerOutputs& self = pieces.self[l];
    const LayerOutputs& cross = pieces.cross[l];
    const int64_t heads = cross.lse.view().dim(1);
    for (int64_t i = 0; i < 9 * heads; ++i) {  // sequence 1 had nothing
      ASSERT_EQ(cross.lse.Get(i), -std::numeric_limits<float>::infinity());
    }
    for (int64_t i = 0; i < 9 * heads * cross.o.view().dim(2); ++i) ASSERT_EQ(cross.o.Get(i), 0);
    const std::vector<std::byte> alone(self.o.rows(0, 9).begin(), self.o.rows(0, 9).end());
    const double bound = l == 0 ? 1e-5 : 3e-2;  // layer 1 stores bfloat16
    ExpectMergeIsTheWhole(*cache, self, cross, pieces.whole[l], bound,
                          "layer " + std::to_string(l));
    EXPECT_TRUE(std::ranges::equal(self.o.rows(0, 9), alone));
  }
}

// Windows of layers and sequences with sinks before, across and among the new tokens, soft caps and
// learned sinks: each is counted once.
TEST(Pieces, AMergeOfBothIsTheWholeUnderWindows) {
  for (const RopeMode mode : {RopeMode::kNone, RopeMode::kInline}) {
    AttentionKVCacheOptions options = Options(7);
    options.layers = {{4, 2, 16, 16, DType::kF32},
                      {4, 2, 16, 16, DType::kF32},
                      {4, 2, 16, 16, DType::kF32},
                      {6, 1, 24, 40, DType::kBF16}};
    options.layers[1].window = 37;
    options.layers[1].soft_cap = 0.5;
    options.layers[2].head_sinks = {2, -1, 0, 4};
    options.layers[3].window = 290;
    options.layers[3].soft_cap = 1;
    options.layers[3].head_sinks = {1, 2, 3, 4, 5, 6};
    options.rope.mode = mode;
    const auto cache = MakeTestCache(options);
    for (int64_t id = 0; id < 4; ++id) {
      ASSERT_TRUE(cache->AddSequence(id).ok());
      if (id < 3) {
        ASSERT_TRUE(cache->EnableSlidingWindowForSeq(id, 50, 20).ok());
      }
    }
    RunPieces(*cache, {0, 2}, {Tokens(0, 0, 600), Tokens(2, 0, 9)});
    RunPieces(*cache, {3}, {Tokens(3, 0, 300)});
    const Pieces pieces =
        RunPieces(*cache, {1, 0, 2, 3},
                  {Tokens(1, 0, 120), Tokens(0, 600, 640), Tokens(2, 9, 109), Tokens(3, 300, 340)});
    for (size_t l = 0; l < options.layers.size(); ++l) {
      const double bound = l < 3 ? 1e-5 : 3e-2;  // the last layer stores bfloat16
      ExpectMergeIsTheWhole(
          *cache, pieces.self[l], pieces.cross[l], pieces.whole[l], bound,
          "mode " + std::to_string(static_cast<int>(mode)) + ", layer " + std::to_string(l));
    }
  }
}

// Its row is that of a softmax over the sink alone.
TEST(Pieces, ALearnedSinkIsThereThoughNothingIsCached) {
  AttentionKVCacheOptions options = Options();
  options.layers[0].head_sinks = {2, -1, 0, 4};
  const auto cache = MakeTestCache(options);
  ASSERT_TRUE(cache->AddSequence(0).ok());
  const Pieces pieces = RunPieces(*cache, {0}, {Tokens(0, 0, 3)});
  for (int64_t i = 0; i < 12; ++i) {
    EXPECT_FLOAT_EQ(pieces.cross[0].lse.Get(i),
                    options.layers[0].head_sinks[static_cast<size_t>(i % 4)] * 1.442695041F);
  }
  for (int64_t i = 0; i < pieces.cross[0].o.count(); ++i) EXPECT_EQ(pieces.cross[0].o.Get(i), 0);
}

// A window that slides past sinks among the new tokens has their scores from a turned query.
TEST(Pieces, OtherDimensionsAreRefusedWhereSinksAreTurned) {
  AttentionKVCacheOptions options = Options();
  options.rope.mode = RopeMode::kNormal;
  const auto cache = MakeTestCache(options);
  ASSERT_TRUE(cache->AddSequence(0).ok());
  ASSERT_TRUE(cache->EnableSlidingWindowForSeq(0, 8, 4).ok());
  const auto self = [&](int64_t rows) {
    const int64_t ids[] = {0};
    const int64_t lengths[] = {rows};
    EXPECT_TRUE(cache->BeginForward(ids, lengths).ok());
    const TokenInputs own =
        MakeTokenInputs({9, 3, 20, 12, DType::kF32}, 0, DType::kF32, Tokens(0, 0, rows));
    const TestTensor o(DType::kF32, {rows, 9, 12});
    const TestTensor lse(DType::kF32, {rows, 9});
    const Status status = cache->SelfAttention(0, own.q.view(), own.k.view(), own.v.view(),
                                               o.view(), lse.view(), 0.25);
    EXPECT_TRUE(cache->AbortForward().ok());
    return status;
  };
  EXPECT_TRUE(self(8).ok());
  const Status status = self(9);
  EXPECT_EQ(status.code(), StatusCode::kBadArgument);
  EXPECT_NE(status.message().find("must be the layer's, 16"), std::string::npos)
      << status.ToString();
}

// What an infinite value may touch are the rows that see it.
TEST(Pieces, AnInfiniteValueStaysWithItsRows) {
  const auto cache = MakeTestCache(Options());
  ASSERT_TRUE(cache->AddSequence(0).ok());
  const int64_t ids[] = {0};
  const int64_t lengths[] = {20};
  ASSERT_TRUE(cache->BeginForward(ids, lengths).ok());
  const AttentionLayerSpec& spec = cache->options().layers[0];
  TokenInputs inputs = MakeTokenInputs(spec, 0, DType::kF32, Tokens(0, 0, 20));
  for (int64_t i = 0; i < 32; ++i) {
    inputs.v.Set(12 * 32 + i, std::numeric_limits<float>::infinity());
  }
  const TestTensor o(DType::kF32, {20, 4, 16});
  const TestTensor lse(DType::kF32, {20, 4});
  ASSERT_TRUE(cache
                  ->SelfAttention(0, inputs.q.view(), inputs.k.view(), inputs.v.view(), o.view(),
                                  lse.view(), 0.25)
                  .ok());
  for (int64_t row = 0; row < 20; ++row) {
    EXPECT_EQ(std::isfinite(o.Get(row * 64)), row < 12) << row;
  }
  ASSERT_TRUE(cache->AbortForward().ok());
}

class PiecesChecks : public ::testing::Test {
 protected:
  PiecesChecks() : cache_(MakeTestCache(Options())) {
    EXPECT_TRUE(cache_->AddSequence(0).ok());
    Begin();
  }
  void Begin() {
    const int64_t ids[] = {0};
    const int64_t lengths[] = {3};
    ASSERT_TRUE(cache_->BeginForward(ids, lengths).ok());
  }
  // After a failed call nothing but AbortForward is legal.
  void ExpectRefused(const Status& status, const std::string& text) {
    EXPECT_EQ(status.code(), StatusCode::kBadArgument) << status.ToString();
    EXPECT_NE(status.message().find(text), std::string::npos) << status.ToString();
    EXPECT_EQ(cache_->EndForward().code(), StatusCode::kBadState);
    ASSERT_TRUE(cache_->AbortForward().ok());
    Begin();
  }
  Status Self(const TestTensor& q, const TestTensor& k, const TestTensor& v, const TestTensor& o,
              const TestTensor& lse, double scale = 1) {
    return cache_->SelfAttention(0, q.view(), k.view(), v.view(), o.view(), lse.view(), scale);
  }
  static TestTensor Floats(std::vector<int64_t> shape) { return TestTensor(DType::kF32, shape); }

  std::unique_ptr<AttentionKVCache> cache_;
};

TEST_F(PiecesChecks, NameWhatIsWrong) {
  const TestTensor q = Floats({3, 4, 8});
  const TestTensor k = Floats({3, 2, 8});
  const TestTensor v = Floats({3, 2, 6});
  const TestTensor o = Floats({3, 4, 6});
  const TestTensor lse = Floats({3, 4});
  ExpectRefused(Self(Floats({2, 4, 8}), k, v, o, lse), "q is float32 [2, 4, 8]");
  ExpectRefused(Self(Floats({3, 3, 8}), k, v, o, lse), "multiple of the 2 heads of k");
  ExpectRefused(Self(q, Floats({3, 2, 7}), v, o, lse), "k is float32 [3, 2, 7]");
  ExpectRefused(Self(q, k, Floats({3, 1, 6}), o, lse), "v is float32 [3, 1, 6]");
  ExpectRefused(Self(q, k, v, Floats({3, 4, 8}), lse), "o is float32 [3, 4, 8]");
  ExpectRefused(Self(q, k, v, o, Floats({3, 2})), "lse is float32 [3, 2]");
  ExpectRefused(Self(q, k, v, o, lse, std::nan("")), "sm_scale");
  ExpectRefused(Self(Floats({3, 4}), k, v, o, lse), "q is float32 [3, 4]");
  ExpectRefused(cache_->CrossAttention(0, q.view(), o.view(), lse.view(), 1),
                "q is float32 [3, 4, 8]");
  ExpectRefused(cache_->CrossAttention(2, q.view(), o.view(), lse.view(), 1), "no layer 2");
}

TEST_F(PiecesChecks, AMergeNeedsEqualShapesAndFailsNoForward) {
  const TestTensor o = Floats({3, 4, 6});
  const TestTensor lse = Floats({3, 4});
  const auto merge = [&](const TestTensor& o1, const TestTensor& lse1, const TestTensor& o2,
                         const TestTensor& lse2) {
    return cache_->MergeAttnOutputInplace(o1.view(), lse1.view(), o2.view(), lse2.view());
  };
  EXPECT_EQ(merge(o, lse, Floats({3, 4, 5}), lse).code(), StatusCode::kBadArgument);
  EXPECT_EQ(merge(o, Floats({3, 3}), o, lse).code(), StatusCode::kBadArgument);
  EXPECT_EQ(merge(o, lse, o, TestTensor(DType::kF16, {3, 4})).code(), StatusCode::kBadArgument);
  EXPECT_EQ(merge(TestTensor(DType::kI32, {3, 4, 6}), lse, o, lse).code(),
            StatusCode::kBadArgument);
  EXPECT_EQ(merge(Floats({3, 4}), lse, o, lse).code(), StatusCode::kBadArgument);
  const auto tokens = Tokens(0, 0, 3);
  for (int64_t l = 0; l < 2; ++l) {
    LayerOutputs outputs;
    EXPECT_TRUE(
        RunLayer(*cache_, cache_->options().layers[static_cast<size_t>(l)], l, tokens, {}, &outputs)
            .ok());
  }
  EXPECT_TRUE(cache_->EndForward().ok());
}

}  // namespace
}  // namespace quire
