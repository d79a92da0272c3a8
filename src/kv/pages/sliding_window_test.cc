// Windows of layers and of sequences at the cache: what they hold, what is legal under them, and
// that rows keep their bits. The random walks (kv_walk_test.cc) cover their combinations.
#include "kv/pages/sliding_window.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "kv/cache/paged_kv_cache.h"
#include "kv/testing/kv_test_forward.h"

namespace quire {
namespace {

using Tokens = std::vector<uint64_t>;

Tokens MakeTokens(int64_t begin, int64_t end) {
  Tokens tokens(static_cast<size_t>(end - begin));
  std::iota(tokens.begin(), tokens.end(), static_cast<uint64_t>(begin) + 1000);
  return tokens;
}

class SlidingWindow : public testing::Test {
 protected:
  AttentionKVCacheOptions options_;
  std::unique_ptr<AttentionKVCache> cache_;

  SlidingWindow() {
    options_ = TestCacheOptions({{2, 1, 8, 8, DType::kF32}}, {.max_num_sequences = 16,
                                                              .token_capacity = 4096,
                                                              .prefill_chunk_size = 1024,
                                                              .page_size = 16});
  }
  void Create() {
    auto cache = AttentionKVCache::Create(options_);
    ASSERT_TRUE(cache.ok()) << cache.status().ToString();
    cache_ = *std::move(cache);
    ASSERT_TRUE(cache_->AddSequence(0).ok());
  }
  std::vector<LayerOutputs> Append(int64_t id, int64_t begin, int64_t end) {
    ForwardStyle style;
    style.calls = CallStyle::kHalves;
    auto outputs = RunForward(*cache_, options_.layers, std::vector<int64_t>{id},
                              {MakeTokens(begin, end)}, style);
    EXPECT_TRUE(outputs.ok()) << outputs.status().ToString();
    const Status invariants = cache_->CheckInvariants();
    EXPECT_TRUE(invariants.ok()) << invariants.ToString();
    return outputs.ok() ? *std::move(outputs) : std::vector<LayerOutputs>(options_.layers.size());
  }
};

// Five layers of window 1024 to one that sees all: of 32768 tokens the local group holds a window,
// in a forward a window and a chunk.
TEST_F(SlidingWindow, LocalLayersHoldAWindowAndAChunk) {
  constexpr int64_t kWindow = 1024;
  constexpr int64_t kChunk = 512;
  constexpr int64_t kLength = 32768;
  const AttentionLayerSpec global = {1, 1, 2, 2, DType::kF32};
  AttentionLayerSpec local = global;
  local.window = kWindow;
  options_.layers = {local, local, local, local, local, global};
  options_.token_capacity = kLength;
  options_.prefill_chunk_size = kChunk;
  options_.poison_freed_pages = false;
  Create();
  const int64_t page_size = options_.page_size;
  TestTensor rows(DType::kF32, {kChunk, 1, 2});
  for (int64_t i = 0; i < rows.count(); ++i) rows.Set(i, 1);
  const KVBlock block(options_.layers.size(), LayerKV{rows.view(), rows.view()});
  for (int64_t length = kChunk; length < kLength; length += kChunk) {
    ASSERT_TRUE(cache_->ImportKV(0, std::span(&block, 1)).ok());
    const int64_t local_pages = cache_->pages_in_use() - length / page_size;
    ASSERT_LE(local_pages, kWindow / page_size + 1);
    ASSERT_EQ(*cache_->HeldTokens(0), std::min(length, length < kWindow ? length : kWindow));
  }
  ASSERT_TRUE(cache_->BeginForward(std::vector<int64_t>{0}, std::vector<int64_t>{kChunk}).ok());
  EXPECT_EQ(cache_->pages_in_use(), kLength / page_size + (kWindow + kChunk) / page_size);
  LayerOutputs outputs;
  for (size_t l = 0; l < options_.layers.size(); ++l) {
    ASSERT_TRUE(RunLayer(*cache_, options_.layers[l], static_cast<int64_t>(l),
                         MakeTokens(0, kChunk), {}, &outputs)
                    .ok());
  }
  ASSERT_TRUE(cache_->EndForward().ok());
  EXPECT_EQ(cache_->pages_in_use(), kLength / page_size + kWindow / page_size);
  EXPECT_EQ(*cache_->GetSequenceLength(0), kLength);
}

TEST_F(SlidingWindow, WhatASequenceHoldsAndWhereItMayEnd) {
  Create();
  Append(0, 0, 200);
  ASSERT_TRUE(cache_->EnableSlidingWindowForSeq(0, 68, 4).ok());
  EXPECT_EQ(*cache_->HeldTokens(0), 200);  // it slides with the next forward
  Append(0, 200, 201);
  // A next query, at 201, sees [0, 4) and [138, 201): pages [16, 128) are gone.
  EXPECT_EQ(*cache_->HeldTokens(0), 201 - 112);
  EXPECT_EQ(cache_->pages_in_use(), 1 + 5);
  // A query at 191 sees from 128 on, one at 190 would see 127 too.
  EXPECT_EQ(cache_->ForkSequence(0, 1, 190).code(), StatusCode::kBadState);
  EXPECT_EQ(cache_->PopN(0, 11).code(), StatusCode::kBadState);
  EXPECT_TRUE(cache_->ForkSequence(0, 1, 191).ok());
  EXPECT_TRUE(cache_->ForkSequence(0, 2, 16).ok());  // before anything slid
  EXPECT_TRUE(cache_->ForkSequence(0, 4, 0).ok());
  EXPECT_TRUE(cache_->ForkSequence(0, 5, 2).ok());  // among the sinks
  ASSERT_TRUE(cache_->RemoveSequence(5).ok());
  const Status status = cache_->ForkSequence(0, 3, 100);
  EXPECT_EQ(status.code(), StatusCode::kBadState);
  EXPECT_NE(status.ToString().find("sequence 0 of length 201 cannot end at 100"), std::string::npos)
      << status.ToString();
  // Ranges that are not held.
  TestTensor k(DType::kF32, {30, 1, 8}), v(DType::kF32, {30, 1, 8});
  EXPECT_EQ(cache_->ExportKV(0, 0, 100, {k.view(), v.view()}).code(), StatusCode::kBadArgument);
  EXPECT_TRUE(cache_->ExportKV(0, 0, 130, {k.view(), v.view()}).ok());
  TestTensor debug(DType::kF32, {1, 30, 1, 8}), debug_v(DType::kF32, {1, 30, 1, 8});
  EXPECT_EQ(cache_->DebugGetKV(0, 10, 40, debug.view(), debug_v.view()).code(),
            StatusCode::kBadArgument);
  EXPECT_TRUE(cache_->DebugGetKV(0, 130, 160, debug.view(), debug_v.view()).ok());
  // Children keep what they see: when the parent is gone, the rest is freed.
  ASSERT_TRUE(cache_->RemoveSequence(0).ok());
  ASSERT_TRUE(cache_->RemoveSequence(1).ok());
  EXPECT_EQ(cache_->pages_in_use(), 1);
  EXPECT_EQ(*cache_->HeldTokens(2), 16);
}

// What is kept when a forward ends is what all rows of the next one see, beside the new tokens: the
// bits are those of an exact window that was switched off when as much had slid.
TEST_F(SlidingWindow, TvmSpanHidesWhatSlidInEarlierForwards) {
  options_.tvm_window_span = true;
  Create();
  Append(0, 0, 40);
  ASSERT_TRUE(cache_->EnableSlidingWindowForSeq(0, 32, 4).ok());
  EXPECT_EQ(*cache_->SlidRange(0), TokenRange());
  Append(0, 40, 41);
  EXPECT_EQ(*cache_->SlidRange(0), (TokenRange{4, 13}));
  const auto chunk = Append(0, 41, 91);
  EXPECT_EQ(*cache_->SlidRange(0), (TokenRange{4, 63}));
  EXPECT_EQ(*cache_->HeldTokens(0), 91 - 32);  // whole pages of 16 behind the sinks' one
  const auto decode = Append(0, 91, 92);
  ASSERT_TRUE(cache_->ForkSequence(0, 1).ok());  // without a window, and what has slid is gone
  Append(1, 92, 150);
  EXPECT_EQ(*cache_->SlidRange(1), (TokenRange{4, 64}));
  EXPECT_EQ(cache_->DisableSlidingWindowForSeq(1).code(), StatusCode::kBadState);
  EXPECT_EQ(cache_->EnableSlidingWindowForSeq(0, 32, 4).code(), StatusCode::kBadState);
  ASSERT_TRUE(cache_->PopN(0, 90).ok());  // into the sinks
  EXPECT_EQ(*cache_->SlidRange(0), TokenRange());
  Append(0, 2, 60);
  EXPECT_EQ(*cache_->SlidRange(0), (TokenRange{4, 32}));
  ASSERT_TRUE(cache_->DisableSlidingWindowForSeq(0).ok());
  Append(0, 60, 90);
  EXPECT_EQ(*cache_->SlidRange(0), (TokenRange{4, 32}));

  options_.tvm_window_span = false;
  const auto exact = [&](int64_t slid, int64_t begin, int64_t end) {
    Create();
    Append(0, 0, 4 + slid - 1);
    EXPECT_TRUE(cache_->EnableSlidingWindowForSeq(0, 5, 4).ok());
    Append(0, 4 + slid - 1, 4 + slid);
    EXPECT_TRUE(cache_->DisableSlidingWindowForSeq(0).ok());
    EXPECT_EQ(cache_->SlidRange(0)->count(), slid);
    Append(0, 4 + slid, begin);
    return Append(0, begin, end);
  };
  EXPECT_TRUE(std::ranges::equal(exact(9, 41, 91)[0].o.bytes(), chunk[0].o.bytes()));
  EXPECT_TRUE(std::ranges::equal(exact(59, 91, 92)[0].o.bytes(), decode[0].o.bytes()));
}

TEST_F(SlidingWindow, ASiblingKeepsThePagesThatItSees) {
  options_.layers[0].window = 32;
  Create();
  Append(0, 0, 70);
  ASSERT_TRUE(cache_->ForkSequence(0, 1, 70).ok());
  const int64_t pages = cache_->pages_in_use();
  EXPECT_EQ(pages, 3);
  Append(0, 70, 200);
  // The child still sees [39, 70), also in the page in which the parent went on.
  EXPECT_EQ(*cache_->HeldTokens(1), 70 - 32);
  EXPECT_EQ(cache_->pages_in_use(), pages + 3);
  ASSERT_TRUE(cache_->RemoveSequence(1).ok());
  EXPECT_EQ(cache_->pages_in_use(), 3);
}

TEST_F(SlidingWindow, SwitchedOffItKeepsWhatIsLeft) {
  Create();
  Append(0, 0, 150);
  EXPECT_EQ(cache_->DisableSlidingWindowForSeq(0).code(), StatusCode::kBadState);
  EXPECT_EQ(cache_->EnableSlidingWindowForSeq(0, 4, 4).code(), StatusCode::kBadArgument);
  EXPECT_EQ(cache_->EnableSlidingWindowForSeq(0, 4, -1).code(), StatusCode::kBadArgument);
  EXPECT_EQ(cache_->EnableSlidingWindowForSeq(9, 4, 1).code(), StatusCode::kUnknownSequence);
  ASSERT_TRUE(cache_->EnableSlidingWindowForSeq(0, 40, 8).ok());
  EXPECT_EQ(cache_->EnableSlidingWindowForSeq(0, 50, 8).code(), StatusCode::kBadState);
  // Nothing has slid yet, so nothing is lost.
  ASSERT_TRUE(cache_->DisableSlidingWindowForSeq(0).ok());
  Append(0, 150, 151);
  EXPECT_EQ(*cache_->HeldTokens(0), 151);
  ASSERT_TRUE(cache_->EnableSlidingWindowForSeq(0, 40, 8).ok());
  Append(0, 151, 160);
  ASSERT_TRUE(cache_->DisableSlidingWindowForSeq(0).ok());
  const int64_t held = *cache_->HeldTokens(0);
  Append(0, 160, 300);
  EXPECT_EQ(*cache_->HeldTokens(0), held + 140);
  EXPECT_EQ(cache_->EnableSlidingWindowForSeq(0, 40, 2).code(), StatusCode::kBadState);
  EXPECT_TRUE(cache_->EnableSlidingWindowForSeq(0, 400, 8).ok());
}

// However it was cut, forked, popped, batched and paged, a row is that of the same tokens alone.
TEST_F(SlidingWindow, RowsKeepTheirBits) {
  constexpr int64_t kLength = 330;
  for (const RopeMode mode : {RopeMode::kNone, RopeMode::kNormal, RopeMode::kInline}) {
    for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16, DType::kI8, DType::kF8E4M3}) {
      AttentionLayerSpec plain = {4, 2, 16, 16, dtype};
      AttentionLayerSpec local = plain;
      local.window = 50;
      local.soft_cap = 20;
      local.head_sinks = {0.5F, -1.0F, 2.0F, 0.0F};
      options_.layers = {plain, local};
      options_.rope.mode = mode;
      options_.page_size = 16;
      Create();
      ASSERT_TRUE(cache_->EnableSlidingWindowForSeq(0, 100, 21).ok());
      const std::vector<LayerOutputs> alone = Append(0, 0, kLength);
      const auto expect = [&](const std::vector<LayerOutputs>& got, int64_t first, int64_t position,
                              int64_t count, const std::string& what) {
        for (size_t l = 0; l < got.size(); ++l) {
          EXPECT_TRUE(
              std::ranges::equal(got[l].o.rows(first, count), alone[l].o.rows(position, count)))
              << what << ", layer " << l << ", from " << position;
          EXPECT_TRUE(
              std::ranges::equal(got[l].lse.rows(first, count), alone[l].lse.rows(position, count)))
              << what << ", lse of layer " << l << ", from " << position;
        }
      };
      for (const int64_t page_size : {7, 16, 64}) {
        options_.page_size = page_size;
        Create();
        ASSERT_TRUE(cache_->EnableSlidingWindowForSeq(0, 100, 21).ok());
        int64_t length = 0;
        for (int64_t step = 0; length < kLength; ++step) {
          const int64_t count = std::min<int64_t>(kLength - length, 1 + step * 37 % 90);
          expect(Append(0, length, length + count), 0, length, count, "cut");
          length += count;
          if (step % 3 != 2) continue;
          // A wrong turn of two tokens, on a fork and on the sequence itself.
          ASSERT_TRUE(cache_->ForkSequence(0, 1, -1).ok());
          Append(1, 5000, 5002);
          if (cache_->PopN(1, 2).ok() && length + 1 < kLength)
            expect(Append(1, length, length + 1), 0, length, 1, "pop");
          ASSERT_TRUE(cache_->RemoveSequence(1).ok());
        }
      }
      if (HasFailure()) return;
    }
  }
}

// A layer without keys of its own gives the bits of its source for the same query.
TEST_F(SlidingWindow, SharedKVIsTheSourceSeenAgain) {
  options_.rope.mode = RopeMode::kInline;  // q comes unrotated, as in Attend
  Create();
  ASSERT_TRUE(cache_->EnableSlidingWindowForSeq(0, 30, 3).ok());
  Append(0, 0, 60);
  const Tokens tokens = MakeTokens(60, 65);
  ASSERT_TRUE(cache_->BeginForward(std::vector<int64_t>{0}, std::vector<int64_t>{5}).ok());
  const TokenInputs inputs = MakeTokenInputs(options_.layers[0], 0, DType::kF32, tokens);
  TestTensor own(DType::kF32, {5, 2, 8});
  TestTensor shared(DType::kF32, {5, 2, 8});
  ASSERT_TRUE(cache_->Append(0, inputs.k.view(), inputs.v.view()).ok());
  ASSERT_TRUE(cache_->AttentionWithSharedKV(0, inputs.q.view(), shared.view(), nullptr, 0.5).ok());
  // It does not stand for the source's own attention.
  EXPECT_EQ(cache_->EndForward().code(), StatusCode::kBadState);
  ASSERT_TRUE(cache_->Attend(0, inputs.q.view(), own.view(), nullptr, 0.5).ok());
  EXPECT_TRUE(std::ranges::equal(own.bytes(), shared.bytes()));
  ASSERT_TRUE(cache_->EndForward().ok());
  ASSERT_TRUE(cache_->BeginForward(std::vector<int64_t>{0}, std::vector<int64_t>{5}).ok());
  EXPECT_EQ(cache_->AttentionWithSharedKV(0, inputs.q.view(), shared.view(), nullptr, 0.5).code(),
            StatusCode::kBadState);
}

// Angles behind the table's end are computed: no bit differs from those of a table that has them
// all, with windows and sinks, with both sets of LongRoPE's factors, in chains, repeated steps and
// trees.
TEST_F(SlidingWindow, PositionsBehindTheTableOfAnglesHaveTheSameBits) {
  options_.rope.scaling = RopeScaling::kLongRope;
  options_.rope.factor = 4;
  options_.rope.original_max_position_embeddings = 64;
  options_.rope.short_factors = {1, 1, 1, 1};
  options_.rope.long_factors = {2, 3, 4, 5};
  const std::vector<int64_t> ids = {0, 1, 2};
  std::vector<std::unique_ptr<AttentionKVCache>> caches;
  for (const int64_t positions : {int64_t{256}, int64_t{4096}}) {
    Create();
    dynamic_cast<PagedKVCache&>(*cache_).set_rope_limits({.table_positions = positions});
    for (const int64_t id : {1, 2}) ASSERT_TRUE(cache_->AddSequence(id).ok());
    ASSERT_TRUE(cache_->SelectLongRope(1, true).ok());
    // Sinks are at positions behind the table, too: the window is larger than it.
    ASSERT_TRUE(cache_->EnableSlidingWindowForSeq(1, 40, 3).ok());
    ASSERT_TRUE(cache_->EnableSlidingWindowForSeq(2, 400, 20).ok());
    caches.push_back(std::move(cache_));
  }
  const auto expect_same = [&](auto&& run) {
    const auto a = run(*caches[0]);
    const auto b = run(*caches[1]);
    ASSERT_TRUE(a.ok()) << a.status().ToString();
    ASSERT_TRUE(b.ok()) << b.status().ToString();
    for (size_t l = 0; l < a->size(); ++l)
      ASSERT_TRUE(std::ranges::equal((*a)[l].o.bytes(), (*b)[l].o.bytes()));
  };
  int64_t length = 0;
  for (const int64_t count : {200, 100, 1, 1, 1, 1, 230, 1, 1, 2, 1}) {
    expect_same([&](AttentionKVCache& cache) {
      const Tokens tokens = MakeTokens(length, length + count);
      return RunForward(cache, options_.layers, ids, {tokens, tokens, tokens});
    });
    length += count;
  }
  expect_same([&](AttentionKVCache& cache) -> Result<std::vector<LayerOutputs>> {
    QUIRE_RETURN_IF_ERROR(cache.BeginTreeForward(
        ids, std::vector<int64_t>{3, 3, 3}, std::vector<int64_t>{-1, 0, 0, -1, 0, 1, -1, 0, 1}));
    return FinishForward(cache, options_.layers, MakeTokens(0, 9));
  });
  for (const auto& cache : caches) {
    const Status committed =
        cache->CommitAcceptedTokenTreeNodes(ids, std::vector<int64_t>{2, 2, 1});
    ASSERT_TRUE(committed.ok()) << committed.ToString();
  }
  expect_same([&](AttentionKVCache& cache) {
    return RunForward(cache, options_.layers, ids,
                      {MakeTokens(0, 1), MakeTokens(1, 2), MakeTokens(2, 3)});
  });
}

}  // namespace
}  // namespace quire
