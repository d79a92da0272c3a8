// Caches whose keys or values are codes: what is stored, how far it is from what was given, and
// that it depends on nothing but the token.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "kv/cache/kv_memory.h"
#include "kv/testing/kv_test_forward.h"
#include "tensor/float8.h"

namespace quire {
namespace {

using Ids = std::vector<int64_t>;
using Tokens = std::vector<uint64_t>;

struct TypePair {
  DType keys, values;
};
constexpr TypePair kPairs[] = {{DType::kI8, DType::kI8},       {DType::kF8E4M3, DType::kF8E4M3},
                               {DType::kBF16, DType::kI8},     {DType::kI8, DType::kF8E4M3},
                               {DType::kF8E4M3, DType::kBF16}, {DType::kF32, DType::kI8},
                               {DType::kI8, DType::kF16}};

std::string NameOf(const TypePair& pair) {
  return std::string(DTypeName(pair.keys)) + " keys, " + std::string(DTypeName(pair.values)) +
         " values";
}

AttentionKVCacheOptions Options(const TypePair& pair, int64_t page_size = 16) {
  return TestCacheOptions({{4, 2, 24, 20, pair.keys, pair.values}}, {.max_num_sequences = 8,
                                                                     .token_capacity = 4000,
                                                                     .prefill_chunk_size = 1000,
                                                                     .page_size = page_size,
                                                                     .rope = RopeMode::kNone});
}

Tokens Range(uint64_t first, int64_t count) {
  Tokens tokens(static_cast<size_t>(count));
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

LayerOutputs Append(AttentionKVCache& cache, const Ids& ids, const std::vector<Tokens>& tokens) {
  ForwardStyle style;
  style.calls = CallStyle::kHalves;
  auto outputs = RunForward(cache, cache.options().layers, ids, tokens, style);
  EXPECT_TRUE(outputs.ok()) << outputs.status().ToString();
  return outputs.ok() ? (*outputs)[0] : LayerOutputs();
}

// How far a number may lie from what is stored for it, in a head whose largest one is `largest`.
double HalfStep(DType dtype, double largest) {
  if (dtype == DType::kI8) return largest / 127 * 0.501;
  if (dtype == DType::kF8E4M3) return largest * 0x1.01p-4;
  if (dtype == DType::kF32) return 0;
  return largest * (dtype == DType::kF16 ? 0x1p-11 : 0x1p-8);
}

double LargestOf(const TestTensor& rows, int64_t row, int64_t head) {
  const int64_t dim = rows.view().dim(2);
  double largest = 0;
  for (int64_t d = 0; d < dim; ++d) {
    const float x = rows.Get((row * rows.view().dim(1) + head) * dim + d);
    largest = std::max(largest, std::abs(static_cast<double>(x)));
  }
  return largest;
}

TEST(KVQuantised, StoredNumbersAreWithinHalfAStepOfWhatWasGiven) {
  for (const TypePair& pair : kPairs) {
    const auto cache = MakeTestCache(Options(pair));
    ASSERT_TRUE(cache->AddSequence(0).ok());
    const Tokens tokens = Range(0, 40);
    Append(*cache, {0}, {tokens});
    const AttentionLayerSpec& spec = cache->options().layers[0];
    const TokenInputs inputs = MakeTokenInputs(spec, 0, DType::kF32, tokens);
    const TestTensor k(DType::kF32, {1, 40, spec.num_kv_heads, spec.qk_head_dim});
    const TestTensor v(DType::kF32, {1, 40, spec.num_kv_heads, spec.v_head_dim});
    ASSERT_TRUE(cache->DebugGetKV(0, 0, 40, k.view(), v.view()).ok());
    const auto expect_near = [&](const TestTensor& got, const TestTensor& given, DType dtype) {
      const int64_t dim = given.view().dim(2);
      for (int64_t i = 0; i < given.count(); ++i) {
        const int64_t head = i / dim % spec.num_kv_heads;
        const double largest = LargestOf(given, i / dim / spec.num_kv_heads, head);
        ASSERT_NEAR(got.Get(i), given.Get(i), HalfStep(dtype, largest)) << NameOf(pair);
      }
    };
    expect_near(k, inputs.k, pair.keys);
    expect_near(v, inputs.v, pair.values);
  }
}

// One token with all the numbers that codes stand for (a scale of 1), read by heads whose query is
// 1 in one dimension: a single product each, the same on all paths (dot products of bfloat16 too).
TEST(KVQuantised, EachCodeIsReadAsItsNumberOnEveryPath) {
  constexpr int64_t kDim = 256;
  constexpr int64_t kHeads = 64;
  constexpr int64_t kSequences = kDim / kHeads;
  for (const DType dtype : {DType::kI8, DType::kF8E4M3}) {
    TestTensor kv(DType::kF32, {kSequences, 1, kDim});
    TestTensor q(DType::kF32, {kSequences, kHeads, kDim});
    const auto number = [dtype](int64_t code) {
      if (dtype == DType::kI8) return static_cast<float>(std::max<int64_t>(code - 128, -127));
      if (code % 128 == 127) return 0.0F;  // the code of NaN, which is never stored
      return F8E4M3ToF32(static_cast<uint8_t>(code));
    };
    for (int64_t s = 0; s < kSequences; ++s) {
      for (int64_t d = 0; d < kDim; ++d) kv.Set(s * kDim + d, number(d));
      for (int64_t h = 0; h < kHeads; ++h) {
        for (int64_t d = 0; d < kDim; ++d) {
          q.Set((s * kHeads + h) * kDim + d, d == s * kHeads + h ? 1.0F : 0.0F);
        }
      }
    }
    TestTensor first_o;
    TestTensor first_lse;
    for (const std::string& path : KernelPaths()) {
      AttentionKVCacheOptions options = Options({dtype, dtype});
      options.layers = {{kHeads, 1, kDim, kDim, dtype, dtype}};
      options.kernel_path = path;
      const auto cache = MakeTestCache(options);
      const Ids ids = {0, 1, 2, 3};
      const Ids lengths = {1, 1, 1, 1};
      for (const int64_t id : ids) ASSERT_TRUE(cache->AddSequence(id).ok());
      const TestTensor o(DType::kF32, {kSequences, kHeads, kDim});
      const TestTensor lse(DType::kF32, {kSequences, kHeads});
      ASSERT_TRUE(cache->BeginForward(ids, lengths).ok());
      ASSERT_TRUE(cache->Append(0, kv.view(), kv.view()).ok());
      ASSERT_TRUE(cache->Attend(0, q.view(), o.view(), &lse.view(), 1.0).ok());
      ASSERT_TRUE(cache->EndForward().ok());
      for (int64_t i = 0; i < kDim; ++i) {
        EXPECT_FLOAT_EQ(lse.Get(i), number(i) * 1.44269504F) << path << ", key " << number(i);
        for (int64_t d = 0; d < kDim; ++d) {
          ASSERT_FLOAT_EQ(o.Get(i * kDim + d), number(d)) << path << ", value " << number(d);
        }
      }
      if (first_o.count() == 0) {
        first_o = o;
        first_lse = lse;
      }
      EXPECT_TRUE(std::ranges::equal(o.bytes(), first_o.bytes())) << path;
      EXPECT_TRUE(std::ranges::equal(lse.bytes(), first_lse.bytes())) << path;
    }
  }
}

// What the steps of keys may do to the softmax and those of values to the sum, and no more.
TEST(KVQuantised, AttentionIsThatOfFloat32WithinTheBoundOfTheSteps) {
  constexpr int64_t kCount = 300;
  const Tokens tokens = Range(0, kCount);
  for (const std::string& path : KernelPaths()) {
    AttentionKVCacheOptions exact = Options({DType::kF32, DType::kF32});
    exact.kernel_path = path;
    const auto reference = MakeTestCache(exact);
    ASSERT_TRUE(reference->AddSequence(0).ok());
    const LayerOutputs expected = Append(*reference, {0}, {tokens});
    for (const TypePair& pair : kPairs) {
      AttentionKVCacheOptions options = Options(pair);
      options.kernel_path = path;
      const auto cache = MakeTestCache(options);
      ASSERT_TRUE(cache->AddSequence(0).ok());
      const LayerOutputs got = Append(*cache, {0}, {tokens});
      const AttentionLayerSpec& spec = options.layers[0];
      const TokenInputs inputs = MakeTokenInputs(spec, 0, DType::kF32, tokens);
      double largest_key = 0;
      double largest_value = 0;
      for (int64_t row = 0; row < kCount; ++row) {
        for (int64_t h = 0; h < spec.num_kv_heads; ++h) {
          largest_key = std::max(largest_key, LargestOf(inputs.k, row, h));
          largest_value = std::max(largest_value, LargestOf(inputs.v, row, h));
        }
      }
      const int64_t group = spec.num_qo_heads / spec.num_kv_heads;
      double worst = 0;
      for (int64_t row = 0; row < kCount; ++row) {
        for (int64_t h = 0; h < spec.num_qo_heads; ++h) {
          double size = 0;  // of q
          for (int64_t d = 0; d < spec.qk_head_dim; ++d)
            size += std::abs(inputs.q.Get((row * spec.num_qo_heads + h) * spec.qk_head_dim + d));
          // q and weights are rounded to bfloat16 where keys (values) are codes or bfloat16.
          const double score =
              ScoreScale(spec) * size * (HalfStep(pair.keys, largest_key) + 0x1p-8 * largest_key);
          const double bound = (std::expm1(2 * score) + 0x1p-8) * largest_value +
                               HalfStep(pair.values, largest_value) + 1e-5;
          for (int64_t d = 0; d < spec.v_head_dim; ++d) {
            const int64_t i = (row * spec.num_qo_heads + h) * spec.v_head_dim + d;
            ASSERT_NEAR(got.o.Get(i), expected.o.Get(i), bound)
                << path << ", " << NameOf(pair) << ", row " << row << ", group " << group;
            worst =
                std::max(worst, std::abs(static_cast<double>(got.o.Get(i) - expected.o.Get(i))));
          }
        }
      }
      EXPECT_GT(worst, 0) << NameOf(pair) << " left no trace";
    }
  }
}

// A token's codes and scales do not depend on what ran beside it.
TEST(KVQuantised, SameTokenSameBytes) {
  for (const TypePair& pair : kPairs) {
    const AttentionLayerSpec spec = Options(pair).layers[0];
    const auto alone = MakeTestCache(Options(pair));
    ASSERT_TRUE(alone->AddSequence(0).ok());
    Append(*alone, {0}, {Range(0, 90)});
    StoredRows expected(spec, 90);
    ASSERT_TRUE(alone->ExportKV(0, 0, 0, expected.view()).ok());
    for (const std::string& path : KernelPaths()) {
      for (const int64_t page_size : {16, 7, 256}) {
        AttentionKVCacheOptions options = Options(pair, page_size);
        options.runner = CreateThreadPool(3).value();
        options.kernel_path = path;
        const auto cache = MakeTestCache(options);
        for (const int64_t id : {0, 1, 2}) ASSERT_TRUE(cache->AddSequence(id).ok());
        Append(*cache, {1, 0}, {Range(5000, 3), Range(0, 20)});
        ASSERT_TRUE(cache->ForkSequence(0, 5, 11).ok());
        Append(*cache, {5, 2}, {Range(11, 30), Range(6000, 40)});
        Append(*cache, {5}, {Range(7000, 4)});
        ASSERT_TRUE(cache->PopN(5, 4).ok());
        Append(*cache, {0, 5}, {Range(8000, 1), Range(41, 49)});
        StoredRows got(spec, 90);
        ASSERT_TRUE(cache->ExportKV(5, 0, 0, got.view()).ok());
        EXPECT_TRUE(got == expected) << NameOf(pair) << ", " << path << ", pages of " << page_size;
      }
    }
  }
}

// What is read can be set again and is the same, codes and scales; a shared token stays for others.
TEST(KVQuantised, WhatIsReadAndSetAgainIsTheSame) {
  for (const TypePair& pair : kPairs) {
    const auto cache = MakeTestCache(Options(pair));
    const AttentionLayerSpec& spec = cache->options().layers[0];
    ASSERT_TRUE(cache->AddSequence(0).ok());
    Append(*cache, {0}, {Range(0, 37)});
    ASSERT_TRUE(cache->ForkSequence(0, 1).ok());
    const TestTensor k(DType::kF32, {1, 10, spec.num_kv_heads, spec.qk_head_dim});
    const TestTensor v(DType::kF32, {1, 10, spec.num_kv_heads, spec.v_head_dim});
    StoredRows before(spec, 37);
    ASSERT_TRUE(cache->ExportKV(0, 0, 0, before.view()).ok());
    ASSERT_TRUE(cache->DebugGetKV(0, 20, 30, k.view(), v.view()).ok());
    ASSERT_TRUE(cache->DebugSetKV(1, 20, k.view(), v.view()).ok());
    for (const int64_t id : {0, 1}) {
      StoredRows after(spec, 37);
      ASSERT_TRUE(cache->ExportKV(id, 0, 0, after.view()).ok());
      EXPECT_TRUE(after == before) << NameOf(pair) << ", sequence " << id;
    }
    ASSERT_TRUE(cache->DebugSetKV(1, 0, k.view(), v.view()).ok());
    StoredRows other(spec, 37);
    ASSERT_TRUE(cache->ExportKV(0, 0, 0, other.view()).ok());
    EXPECT_TRUE(other == before) << NameOf(pair) << ": the fork's write is seen";
    ASSERT_TRUE(cache->ExportKV(1, 0, 0, other.view()).ok());
    EXPECT_FALSE(other == before) << NameOf(pair);
  }
}

// A token that is not finite makes NaN of what sees it and leaves the rows before it alone.
TEST(KVQuantised, InfinitiesAreSeenByTheRowsBehindThemOnly) {
  for (const std::string& path : KernelPaths()) {
    for (const TypePair& pair : {kPairs[0], kPairs[1]}) {
      AttentionKVCacheOptions options = Options(pair);
      options.kernel_path = path;
      const AttentionLayerSpec spec = options.layers[0];
      const TokenInputs inputs = MakeTokenInputs(spec, 0, DType::kF32, Range(0, 12));
      const int64_t ids[] = {0};
      const int64_t lengths[] = {12};
      const auto run = [&](AttentionKVCache& cache) {
        EXPECT_TRUE(cache.AddSequence(0).ok());
        EXPECT_TRUE(cache.BeginForward(ids, lengths).ok());
        const TestTensor o(DType::kF32, {12, spec.num_qo_heads, spec.v_head_dim});
        EXPECT_TRUE(cache.Append(0, inputs.k.view(), inputs.v.view()).ok());
        EXPECT_TRUE(cache.Attend(0, inputs.q.view(), o.view(), nullptr, 0.2).ok());
        EXPECT_TRUE(cache.EndForward().ok());
        return o;
      };
      const TestTensor sound = run(*MakeTestCache(options));
      TestTensor v = inputs.v;  // the same memory
      v.Set((5 * spec.num_kv_heads + 1) * spec.v_head_dim + 3,
            std::numeric_limits<float>::infinity());
      const TestTensor o = run(*MakeTestCache(options));
      for (int64_t i = 0; i < o.count(); ++i) {
        const int64_t row = i / (spec.num_qo_heads * spec.v_head_dim);
        const int64_t head = i / spec.v_head_dim % spec.num_qo_heads;
        if (row >= 5 && head >= 2) {
          ASSERT_TRUE(std::isnan(o.Get(i))) << path << ", row " << row;
        } else {
          ASSERT_EQ(o.Get(i), sound.Get(i)) << path << ", row " << row;
        }
      }
    }
  }
}

TEST(KVQuantised, PagesTakeAByteANumberAndAScaleAHead) {
  const auto page_bytes = [](DType keys, DType values) {
    AttentionKVCacheOptions options = Options({keys, values}, 64);
    options.layers[0].qk_head_dim = options.layers[0].v_head_dim = 128;
    const Result<KVMemory> memory = MeasureKVCache(options, 1);
    EXPECT_TRUE(memory.ok());
    return memory->page_bytes;
  };
  constexpr int64_t kRows = 64 * 2;  // tokens and heads
  EXPECT_EQ(page_bytes(DType::kBF16, DType::kBF16), kRows * 512);
  EXPECT_EQ(page_bytes(DType::kI8, DType::kI8), kRows * (256 + 8));
  EXPECT_EQ(page_bytes(DType::kF8E4M3, DType::kF8E4M3), kRows * (256 + 8));
  EXPECT_EQ(page_bytes(DType::kBF16, DType::kI8), kRows * (256 + 128 + 4));
}

TEST(KVQuantised, TensorsAreRefusedThatDoNotFit) {
  const auto cache = MakeTestCache(Options({DType::kI8, DType::kBF16}));
  const AttentionLayerSpec spec = cache->options().layers[0];
  ASSERT_TRUE(cache->AddSequence(0).ok());
  Append(*cache, {0}, {Range(0, 6)});
  const StoredRows rows(spec, 6);
  LayerKV no_scale = rows.view();
  no_scale.k_scale = TensorView();
  LayerKV short_scale = rows.view();
  const TestTensor five(DType::kF32, {5, spec.num_kv_heads});
  short_scale.k_scale = five.view();
  LayerKV floats = rows.view();
  const TestTensor keys(DType::kF32, {6, spec.num_kv_heads, spec.qk_head_dim});
  floats.k = keys.view();
  for (const LayerKV& wrong : {no_scale, short_scale, floats}) {
    EXPECT_EQ(cache->ExportKV(0, 0, 0, wrong).code(), StatusCode::kBadArgument);
    const KVBlock block = {wrong};
    EXPECT_EQ(cache->ImportKV(0, std::span(&block, 1)).code(), StatusCode::kBadArgument);
  }
  // Codes are no numbers.
  const TestTensor codes(DType::kI8, {1, 6, spec.num_kv_heads, spec.qk_head_dim});
  const TestTensor v(DType::kI8, {1, 6, spec.num_kv_heads, spec.v_head_dim});
  EXPECT_EQ(cache->DebugGetKV(0, 0, 6, codes.view(), v.view()).code(), StatusCode::kBadArgument);
  EXPECT_EQ(cache->DebugSetKV(0, 0, codes.view(), v.view()).code(), StatusCode::kBadArgument);
  AttentionKVCacheOptions bad = Options({DType::kI8, DType::kI32});
  EXPECT_EQ(AttentionKVCache::Create(bad).status().code(), StatusCode::kBadArgument);
}

}  // namespace
}  // namespace quire
