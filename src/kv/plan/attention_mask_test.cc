// Masks among the new tokens: what they hide is hidden, and nothing else changes a bit.
#include "kv/plan/attention_mask.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "base/random.h"
#include "kv/testing/kv_test_forward.h"

namespace quire {
namespace {

using Ids = std::vector<int64_t>;
using Tokens = std::vector<uint64_t>;
using Outputs = std::vector<LayerOutputs>;  // [layer]

Tokens TokensFrom(uint64_t first, int64_t count) {
  Tokens tokens(static_cast<size_t>(count));
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

AttentionKVCacheOptions Options(int64_t page_size = 16) {
  AttentionKVCacheOptions options = TestCacheOptions({{4, 2, 16, 16, DType::kF32},
                                                      {6, 1, 24, 40, DType::kBF16},
                                                      {4, 2, 16, 16, DType::kI8, DType::kF8E4M3}},
                                                     {.max_num_sequences = 8,
                                                      .token_capacity = 4096,
                                                      .prefill_chunk_size = 1024,
                                                      .page_size = page_size,
                                                      .rope = RopeMode::kInline});
  options.layers[1].window = 90;
  options.layers[1].soft_cap = 3;
  options.layers[1].head_sinks = {1, 2, 3, 4, 5, 6};
  options.max_tree_size = 512;
  return options;
}

void ExpectOk(const Status& status) { EXPECT_TRUE(status.ok()) << status.ToString(); }

// Whether a row shows a new token.
using Shows = std::function<bool(int64_t row, int64_t token)>;

TestTensor MaskOf(const std::vector<std::pair<int64_t, Shows>>& members) {
  int64_t count = 0;
  for (const auto& [n, shows] : members) count += n * n;
  TestTensor mask(DType::kU8, {count});
  uint8_t* next = mask.view().data_as<uint8_t>();
  for (const auto& [n, shows] : members) {
    for (int64_t i = 0; i < n * n; ++i) *next++ = shows(i / n, i % n) ? 1 : 0;
  }
  return mask;
}

// About half of a square of bits that are a function of the seed.
Shows Half(uint64_t seed) {
  return [seed](int64_t row, int64_t token) {
    RandomSequence random(seed * 1000003 + static_cast<uint64_t>(row * 1009 + token));
    return random.Below(2) == 0;
  };
}
bool All(int64_t, int64_t) { return true; }

struct Calls {
  Outputs whole, self, shared;
};

// All calls that take a mask, in a forward that has begun. `values`: rows of v are set by it first.
Calls Finish(AttentionKVCache& cache, const Tokens& rows, const TensorView* mask,
             const std::function<void(TestTensor*)>& values = {}) {
  Calls calls;
  const int64_t n = std::ssize(rows);
  for (size_t l = 0; l < cache.options().layers.size(); ++l) {
    const AttentionLayerSpec& spec = cache.options().layers[l];
    const int64_t layer = static_cast<int64_t>(l);
    TokenInputs inputs = MakeTokenInputs(spec, layer, DType::kF32, rows);
    if (values) values(&inputs.v);
    for (Outputs* const to : {&calls.whole, &calls.self, &calls.shared}) {
      to->push_back({TestTensor(DType::kF32, {n, spec.num_qo_heads, spec.v_head_dim}),
                     TestTensor(DType::kF32, {n, spec.num_qo_heads})});
    }
    const double scale = ScoreScale(spec);
    ExpectOk(cache.Append(layer, inputs.k.view(), inputs.v.view()));
    ExpectOk(cache.Attend(layer, inputs.q.view(), calls.whole[l].o.view(),
                          &calls.whole[l].lse.view(), scale, mask));
    ExpectOk(cache.SelfAttention(layer, inputs.q.view(), inputs.k.view(), inputs.v.view(),
                                 calls.self[l].o.view(), calls.self[l].lse.view(), scale, mask));
    ExpectOk(cache.AttentionWithSharedKV(layer, inputs.q.view(), calls.shared[l].o.view(),
                                         &calls.shared[l].lse.view(), scale, mask));
  }
  ExpectOk(cache.EndForward());
  return calls;
}

Calls RunTokens(AttentionKVCache& cache, int64_t id, const Tokens& rows, const TensorView* mask,
                const std::function<void(TestTensor*)>& values = {}) {
  ExpectOk(cache.BeginForward(Ids{id}, Ids{std::ssize(rows)}));
  return Finish(cache, rows, mask, values);
}

void ExpectSameRows(const Outputs& a, int64_t a_row, const Outputs& b, int64_t b_row, int64_t count,
                    const std::string& what) {
  for (size_t l = 0; l < a.size(); ++l) {
    EXPECT_TRUE(std::ranges::equal(a[l].o.rows(a_row, count), b[l].o.rows(b_row, count)))
        << what << ": o of layer " << l;
    EXPECT_TRUE(std::ranges::equal(a[l].lse.rows(a_row, count), b[l].lse.rows(b_row, count)))
        << what << ": lse of layer " << l;
  }
}

void ExpectSame(const Calls& a, int64_t a_row, const Calls& b, int64_t b_row, int64_t count,
                const std::string& what) {
  ExpectSameRows(a.whole, a_row, b.whole, b_row, count, what + ", Attend");
  ExpectSameRows(a.self, a_row, b.self, b_row, count, what + ", SelfAttention");
  ExpectSameRows(a.shared, a_row, b.shared, b_row, count, what + ", AttentionWithSharedKV");
}

// `count` tokens behind `old` ones, with these options.
Calls Alone(const AttentionKVCacheOptions& options, uint64_t content, int64_t old, int64_t count,
            const TensorView* mask) {
  const auto cache = MakeTestCache(options);
  ExpectOk(cache->AddSequence(0));
  if (old > 0) RunTokens(*cache, 0, TokensFrom(content, old), nullptr);
  return RunTokens(*cache, 0, TokensFrom(content + static_cast<uint64_t>(old), count), mask);
}

TEST(AttentionMask, OneThatHidesNothingChangesNoBit) {
  for (const int64_t old : {0, 5, 300}) {
    const TestTensor mask = MaskOf({{330, All}});
    ExpectSame(Alone(Options(), 7, old, 330, &mask.view()), 0,
               Alone(Options(), 7, old, 330, nullptr), 0, 330, "behind " + std::to_string(old));
  }
}

// The mask that a window is gives the bits of that window.
TEST(AttentionMask, ABandIsAWindow) {
  AttentionKVCacheOptions windowed = Options();
  for (AttentionLayerSpec& layer : windowed.layers) layer.window = 21;
  AttentionKVCacheOptions plain = windowed;
  for (AttentionLayerSpec& layer : plain.layers) layer.window = 0;
  const TestTensor mask =
      MaskOf({{330, [](int64_t row, int64_t token) { return row - token < 21; }}});
  ExpectSame(Alone(plain, 7, 0, 330, &mask.view()), 0, Alone(windowed, 7, 0, 330, nullptr), 0, 330,
             "band");
}

TEST(AttentionMask, BitsDependOnNeitherBatchNorPagesNorWorkers) {
  const TestTensor mask = MaskOf({{40, Half(1)}});
  const Calls expected = Alone(Options(), 7, 300, 40, &mask.view());
  for (const int64_t page_size : {16, 7, 256}) {
    AttentionKVCacheOptions options = Options(page_size);
    options.runner = CreateThreadPool(3).value();
    const auto cache = MakeTestCache(options);
    for (int64_t id = 0; id < 3; ++id) ExpectOk(cache->AddSequence(id));
    RunTokens(*cache, 1, TokensFrom(7, 300), nullptr);
    RunTokens(*cache, 2, TokensFrom(2000, 33), nullptr);
    const TestTensor masks = MaskOf({{3, Half(2)}, {40, Half(1)}, {17, Half(3)}});
    ExpectOk(cache->BeginForward(Ids{0, 1, 2}, Ids{3, 40, 17}));
    Tokens rows = TokensFrom(4000, 3);
    for (const Tokens& more : {TokensFrom(307, 40), TokensFrom(2033, 17)})
      rows.insert(rows.end(), more.begin(), more.end());
    const Calls batch = Finish(*cache, rows, &masks.view());
    ExpectSame(batch, 3, expected, 0, 40, "page size " + std::to_string(page_size));
  }
}

// A hidden token may hold anything.
TEST(AttentionMask, WhatIsHiddenIsNotRead) {
  const auto hides_12 = [](int64_t, int64_t token) { return token != 12; };
  const TestTensor mask = MaskOf({{40, hides_12}});
  AttentionKVCacheOptions options = Options();
  options.layers.pop_back();  // a code holds no infinity
  const auto run = [&](float value) {
    const auto cache = MakeTestCache(options);
    ExpectOk(cache->AddSequence(0));
    return RunTokens(*cache, 0, TokensFrom(7, 40), &mask.view(), [value](TestTensor* v) {
      const int64_t width = v->count() / 40;
      for (int64_t i = 0; i < width; ++i) v->Set(12 * width + i, value);
    });
  };
  const Calls expected = run(1);
  for (const float value :
       {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    ExpectSame(run(value), 0, expected, 0, 40, "a value that is not finite");
  }
  EXPECT_TRUE(std::isfinite(expected.whole[0].o.Get(39 * 64)));
}

// Behind nothing a row of zeros is left; behind cached tokens, what they alone give.
TEST(AttentionMask, ThatHidesAllLeavesWhatWasCached) {
  AttentionKVCacheOptions options = Options();
  options.layers[1].head_sinks.clear();
  const TestTensor mask = MaskOf({{20, [](int64_t, int64_t) { return false; }}});
  const Calls calls = Alone(options, 7, 0, 20, &mask.view());
  for (const Outputs* outputs : {&calls.whole, &calls.self, &calls.shared}) {
    for (const LayerOutputs& layer : *outputs) {
      for (int64_t i = 0; i < layer.o.count(); ++i) ASSERT_EQ(layer.o.Get(i), 0);
      for (int64_t i = 0; i < layer.lse.count(); ++i)
        ASSERT_EQ(layer.lse.Get(i), -std::numeric_limits<float>::infinity());
    }
  }
  const auto cache = MakeTestCache(options);
  ExpectOk(cache->AddSequence(0));
  RunTokens(*cache, 0, TokensFrom(7, 37), nullptr);
  ExpectOk(cache->BeginForward(Ids{0}, Ids{20}));
  const Tokens rows = TokensFrom(44, 20);
  Outputs cross;
  for (size_t l = 0; l < options.layers.size(); ++l) {
    const AttentionLayerSpec& spec = options.layers[l];
    const TokenInputs inputs = MakeTokenInputs(spec, static_cast<int64_t>(l), DType::kF32, rows);
    cross.push_back({TestTensor(DType::kF32, {20, spec.num_qo_heads, spec.v_head_dim}),
                     TestTensor(DType::kF32, {20, spec.num_qo_heads})});
    ExpectOk(cache->CrossAttention(static_cast<int64_t>(l), inputs.q.view(), cross[l].o.view(),
                                   cross[l].lse.view(), ScoreScale(spec)));
  }
  ExpectSameRows(Finish(*cache, rows, &mask.view()).whole, 0, cross, 0, 20, "cached alone");
}

// The mask's elements at the ancestors of a tree's row and at itself count.
TEST(AttentionMask, MeetsAncestryInATree) {
  const Ids parents = {-1, 0, 1, 1, 0, 4, -1, 6, 6, 2, 9, 10};
  const auto is_on_path = [&](int64_t node, int64_t of) {
    for (; of >= 0; of = parents[static_cast<size_t>(of)]) {
      if (of == node) return true;
    }
    return false;
  };
  // Nodes 0 to 3 come in an earlier forward: they stay in sight.
  const auto run = [&](const Shows& shows, int64_t page_size) {
    const auto cache = MakeTestCache(Options(page_size));
    ExpectOk(cache->AddSequence(0));
    RunTokens(*cache, 0, TokensFrom(7, 45), nullptr);
    ExpectOk(cache->BeginTreeForward(Ids{0}, Ids{4}, Ids(parents.begin(), parents.begin() + 4)));
    Finish(*cache, TokensFrom(100, 4), nullptr);
    ExpectOk(cache->BeginTreeForward(Ids{0}, Ids{8}, Ids(parents.begin() + 4, parents.end())));
    const TestTensor mask = MaskOf({{8, shows}});
    return Finish(*cache, TokensFrom(104, 8), &mask.view());
  };
  const auto on_path = [&](int64_t row, int64_t token) { return is_on_path(token + 4, row + 4); };
  const Calls all = run(All, 16);
  ExpectSame(run(on_path, 7), 0, all, 0, 8, "ancestry");
  const Calls half = run(Half(5), 16);
  ExpectSame(
      run([&](int64_t row, int64_t token) { return on_path(row, token) && Half(5)(row, token); },
          64),
      0, half, 0, 8, "others do not count");
  // A row from which its own path is hidden differs, one that shows it does not.
  for (int64_t row = 0; row < 8; ++row) {
    bool shows_path = true;
    for (int64_t token = 0; token < 8; ++token)
      shows_path &= !on_path(row, token) || Half(5)(row, token);
    const bool same = std::ranges::equal(half.whole[0].o.rows(row, 1), all.whole[0].o.rows(row, 1));
    EXPECT_EQ(same, shows_path) << row;
  }
}

TEST(AttentionMask, MustFitTheForward) {
  AttentionKVCacheOptions options = Options();
  options.layers.resize(1);
  const auto cache = MakeTestCache(options);
  for (int64_t id = 0; id < 2; ++id) ExpectOk(cache->AddSequence(id));
  const AttentionLayerSpec& spec = options.layers[0];
  const TokenInputs inputs = MakeTokenInputs(spec, 0, DType::kF32, TokensFrom(1, 5));
  const TestTensor o(DType::kF32, {5, 4, 16});
  const auto refused = [&](const TensorView& mask, const std::string& part) {
    ExpectOk(cache->BeginForward(Ids{0, 1}, Ids{2, 3}));
    const Status status =
        cache->AttentionWithFusedQKV(0, inputs.qkv.view(), o.view(), ScoreScale(spec), &mask);
    EXPECT_EQ(status.code(), StatusCode::kBadArgument);
    EXPECT_NE(status.ToString().find(part), std::string::npos) << status.ToString();
    ExpectOk(cache->AbortForward());
  };
  refused(TestTensor(DType::kU8, {12}).view(), "it must be uint8 [13]");
  refused(TestTensor(DType::kI32, {13}).view(), "mask is int32 [13]");
  refused(TestTensor(DType::kU8, {13, 1}).view(), "it must be uint8 [13]");
  const TestTensor mask = MaskOf({{2, All}, {3, All}});
  ExpectOk(cache->BeginForward(Ids{0, 1}, Ids{2, 3}));
  ExpectOk(
      cache->AttentionWithFusedQKV(0, inputs.qkv.view(), o.view(), ScoreScale(spec), &mask.view()));
  ExpectOk(cache->EndForward());
}

}  // namespace
}  // namespace quire
