// What months of use leave behind: memory is counted, not timed. Streams without an end, sequences
// that were long once, caches that were cleared.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "kv/cache/kv_memory.h"
#include "kv/cache/paged_kv_cache.h"
#include "kv/pages/reserve.h"
#include "kv/testing/kv_test_forward.h"

namespace quire {
namespace {

using Ids = std::vector<int64_t>;
using Tokens = std::vector<uint64_t>;

Tokens MakeTokens(int64_t begin, int64_t end) {
  Tokens tokens(static_cast<size_t>(end - begin));
  std::iota(tokens.begin(), tokens.end(), static_cast<uint64_t>(begin) + 1000);
  return tokens;
}

class MemoryGrowth : public testing::Test {
 protected:
  MemoryGrowth() {
    options_ = TestCacheOptions({{2, 1, 8, 8, DType::kF32}}, {.max_num_sequences = 8,
                                                              .token_capacity = 4096,
                                                              .prefill_chunk_size = 512,
                                                              .page_size = 16});
  }
  PagedKVCache& Create(int64_t table_positions) {
    cache_ = MakeTestCache(options_);
    auto& cache = dynamic_cast<PagedKVCache&>(*cache_);
    cache.set_rope_limits({.table_positions = table_positions});
    return cache;
  }
  Result<std::vector<LayerOutputs>> Append(const Ids& ids, int64_t begin, int64_t end) {
    return RunForward(*cache_, options_.layers, ids,
                      std::vector<Tokens>(ids.size(), MakeTokens(begin, end)));
  }
  AttentionKVCacheOptions options_;
  std::unique_ptr<AttentionKVCache> cache_;
};

// A stream sees a window; the angles of all that it has seen would grow for ever.
TEST_F(MemoryGrowth, AnglesOfAnEndlessStreamAreThoseOfItsWindow) {
  for (const RopeMode mode : {RopeMode::kInline, RopeMode::kNormal}) {
    options_.rope.mode = mode;
    PagedKVCache& cache = Create(0);
    ASSERT_TRUE(cache.AddSequence(0).ok());
    ASSERT_TRUE(cache.EnableSlidingWindowForSeq(0, 100, 4).ok());
    int64_t most_early = 0;
    int64_t most_late = 0;
    for (int64_t step = 0; step < 6000; ++step) {
      ASSERT_TRUE(Append({0}, step, step + 1).ok());
      int64_t& most = step < 2000 ? most_early : most_late;
      most = std::max(most, cache.figures().angle_bytes);
    }
    EXPECT_LE(most_late, most_early + 3000) << "a leaf more, where it crosses from one to the next";
    EXPECT_LE(most_late, cache.figures().angle_bytes_max);
    // A window of 100 positions, half as much again, and 64 tiles of 16 positions.
    EXPECT_LT(most_late, 80 * RopeTable::TileBytes(4) + 40000);
  }
}

// Whichever tiles go and come again, no bit differs from a cache that keeps all.
TEST_F(MemoryGrowth, DroppedAnglesAreComputedToTheSameBits) {
  options_.rope.mode = RopeMode::kInline;
  options_.layers[0].window = 0;
  std::vector<std::unique_ptr<AttentionKVCache>> caches;
  for (const int64_t positions : {int64_t{0}, int64_t{65536}}) {
    Create(positions);
    for (const int64_t id : {0, 1, 2}) ASSERT_TRUE(cache_->AddSequence(id).ok());
    ASSERT_TRUE(cache_->EnableSlidingWindowForSeq(1, 60, 4).ok());
    ASSERT_TRUE(cache_->EnableSlidingWindowForSeq(2, 300, 20).ok());
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
  for (int64_t round = 0; round < 60; ++round) {
    const int64_t count = round % 7 == 0 ? 70 : 1 + round % 3;
    // Each of them alone, so that the others' tiles may go, then all together.
    for (const Ids& ids : {Ids{0}, Ids{1}, Ids{2}, Ids{0, 1, 2}}) {
      for (int64_t step = 0; step < 3; ++step) {
        expect_same([&](AttentionKVCache& cache) {
          return RunForward(cache, options_.layers, ids,
                            std::vector<Tokens>(ids.size(), MakeTokens(length, length + count)));
        });
        if (HasFatalFailure()) return;
        length += count;
      }
    }
    if (round % 10 != 9) continue;
    for (const auto& cache : caches) {
      ASSERT_TRUE(cache->RemoveSequence(0).ok());
      ASSERT_TRUE(cache->ForkSequence(2, 0, -1).ok());
      ASSERT_TRUE(cache->CheckInvariants().ok());
    }
  }
}

// Sequences that do not take part give way before the tables are larger than the plan says.
TEST_F(MemoryGrowth, AnglesStayWithinTheMemoryPlan) {
  options_.rope.mode = RopeMode::kInline;
  options_.token_capacity = 2048;
  options_.page_size = 1;
  PagedKVCache& cache = Create(64);
  for (int64_t id = 0; id < 8; ++id) {
    ASSERT_TRUE(cache.AddSequence(id).ok());
    ASSERT_TRUE(cache.EnableSlidingWindowForSeq(id, 30 + 10 * id, 3).ok());
  }
  for (int64_t step = 0; step < 400; ++step) {
    ASSERT_TRUE(Append({step % 8}, step, step + 1 + 37 * (step % 9)).ok());
    ASSERT_LE(cache.figures().angle_bytes, cache.figures().angle_bytes_max);
  }
}

TEST_F(MemoryGrowth, TheMemoryPlanCountsTheAngles) {
  for (const RopeMode mode : {RopeMode::kNone, RopeMode::kNormal, RopeMode::kInline}) {
    options_.rope.mode = mode;
    cache_ = MakeTestCache(options_);
    EXPECT_EQ(MeasureKVCache(cache_->options(), 8)->angle_bytes,
              dynamic_cast<PagedKVCache&>(*cache_).figures().angle_bytes_max);
  }
}

// With pages of one token, long sequences have long tables.
TEST_F(MemoryGrowth, WhatLongSequencesTookIsGivenBack) {
  options_.page_size = 1;
  options_.token_capacity = 40000;
  options_.rope.mode = RopeMode::kInline;
  PagedKVCache& cache = Create(0);
  ASSERT_TRUE(cache.AddSequence(7).ok());
  ASSERT_TRUE(Append({7}, 0, 10).ok());
  const int64_t tables = cache.figures().table_bytes;
  const int64_t angles = cache.figures().angle_bytes;
  for (int64_t id = 0; id < 4; ++id) {
    ASSERT_TRUE(cache.AddSequence(id).ok());
    for (int64_t at = 0; at < 8192; at += 512) ASSERT_TRUE(Append({id}, at, at + 512).ok());
  }
  EXPECT_GT(cache.figures().table_bytes, tables + 4 * 8192 * 16);
  EXPECT_GT(cache.figures().scratch_bytes, 0);
  for (int64_t id = 0; id < 4; ++id) ASSERT_TRUE(cache.RemoveSequence(id).ok());
  for (int64_t step = 0; step < 300; ++step) ASSERT_TRUE(Append({7}, 10, 11).ok());
  EXPECT_LT(cache.figures().table_bytes, tables + 64 * 1024);
  EXPECT_LT(cache.figures().angle_bytes, angles + 80 * RopeTable::TileBytes(4) + 20000);
}

TEST_F(MemoryGrowth, AShortenedSequenceGivesItsTableBackWhenItGoesOn) {
  options_.page_size = 1;
  options_.token_capacity = 10000;
  PagedKVCache& cache = Create(0);
  ASSERT_TRUE(cache.AddSequence(0).ok());
  for (int64_t at = 0; at < 8192; at += 512) ASSERT_TRUE(Append({0}, at, at + 512).ok());
  const int64_t bytes = cache.figures().table_bytes;
  ASSERT_TRUE(cache.PopN(0, 8190).ok());
  for (int64_t at = 2; at < 40; ++at) ASSERT_TRUE(Append({0}, at, at + 1).ok());
  EXPECT_LT(cache.figures().table_bytes, bytes - 8192 * 16 / 2);
  EXPECT_TRUE(cache.CheckInvariants().ok());
}

TEST_F(MemoryGrowth, ClearGivesAllBack) {
  for (const RopeMode mode : {RopeMode::kNormal, RopeMode::kInline}) {
    options_.rope.mode = mode;
    PagedKVCache& cache = Create(65536);
    const int64_t tables = cache.figures().table_bytes;
    for (int round = 0; round < 2; ++round) {
      ASSERT_TRUE(cache.AddSequence(0).ok());
      ASSERT_TRUE(cache.AddSequence(1).ok());
      ASSERT_TRUE(cache.EnableSlidingWindowForSeq(1, 50, 3).ok());
      ASSERT_TRUE(Append({0, 1}, 0, 200).ok());
      ASSERT_TRUE(cache.ForkSequence(0, 2, 100).ok());
      ASSERT_TRUE(Append({0, 1, 2}, 0, 1).ok());
      EXPECT_GT(cache.figures().angle_bytes, 0);
      ASSERT_TRUE(cache.Clear().ok());
      EXPECT_EQ(cache.figures().angle_bytes, 0);
      EXPECT_EQ(cache.figures().scratch_bytes, 0);
      EXPECT_EQ(cache.figures().table_bytes, tables);
      EXPECT_TRUE(cache.CheckInvariants().ok());
    }
  }
}

TEST_F(MemoryGrowth, ScratchOfOneLongForwardDoesNotStay) {
  options_.layers[0].num_qo_heads = 8;
  PagedKVCache& cache = Create(65536);
  ASSERT_TRUE(cache.AddSequence(0).ok());
  ASSERT_TRUE(Append({0}, 0, 1).ok());
  const int64_t small = cache.figures().scratch_bytes;
  ASSERT_TRUE(Append({0}, 1, 513).ok());
  const int64_t large = cache.figures().scratch_bytes;
  ASSERT_GT(large, small);
  for (int64_t at = 513; at < 530; ++at) ASSERT_TRUE(Append({0}, at, at + 1).ok());
  EXPECT_EQ(cache.figures().scratch_bytes, large) << "a few steps later it stands for the next one";
  for (int64_t at = 530; at < 700; ++at) ASSERT_TRUE(Append({0}, at, at + 1).ok());
  EXPECT_TRUE(cache.figures().scratch_bytes <= 4 * small || large <= 4 * small)
      << cache.figures().scratch_bytes;
}

TEST(RecentPeak, ForgetsWhatWasLongAgo) {
  RecentPeak peak;
  EXPECT_EQ(peak.Count(100), 100u);
  for (int i = 0; i < 63; ++i) EXPECT_EQ(peak.Count(1), 100u);
  for (int i = 0; i < 64; ++i) EXPECT_EQ(peak.Count(2), 100u);
  EXPECT_EQ(peak.Count(1), 2u);
}

}  // namespace
}  // namespace quire
