// What a cache costs after long use: as much as at the beginning. By counters,
// not by time.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kv/cache/paged_kv_cache.h"
#include "kv/testing/kv_test_forward.h"

namespace quire {
namespace {

constexpr AttentionLayerSpec kTiny = {1, 1, 2, 2, DType::kF32};

class Growth : public testing::Test {
 protected:
  std::unique_ptr<AttentionKVCache> cache_;
  AttentionKVCacheOptions options_;
  TestTensor qkv_, o_;

  void Create(AttentionLayerSpec layer, const TestCacheSizes& sizes) {
    options_ = TestCacheOptions({layer}, sizes);
    options_.poison_freed_pages = false;
    cache_ = MakeTestCache(options_);
    qkv_ = TestTensor(DType::kF32, {sizes.prefill_chunk_size, 3, 2});
    o_ = TestTensor(DType::kF32, {sizes.prefill_chunk_size, 1, 2});
    for (int64_t i = 0; i < qkv_.count(); ++i) qkv_.Set(i, 0.25F * static_cast<float>(i % 7));
  }
  PagedKVCache& paged() { return dynamic_cast<PagedKVCache&>(*cache_); }
  void Append(int64_t id, int64_t count) {
    ASSERT_TRUE(cache_->BeginForward(std::vector<int64_t>{id}, std::vector<int64_t>{count}).ok());
    ASSERT_TRUE(cache_->AttentionWithFusedQKV(0, qkv_.view(), o_.view(), 1.0).ok());
    ASSERT_TRUE(cache_->EndForward().ok());
  }
  void ExpectSound() {
    const Status status = cache_->CheckInvariants();
    ASSERT_TRUE(status.ok()) << status.ToString();
  }
};

// The costs of a span of steps: the sum of what was visited, the most of the others.
struct Costs {
  int64_t visited = 0;
  int64_t entries = 0;
  int64_t pages = 0;
};

TEST_F(Growth, AnEndlessStreamCostsWhatItSees) {
  constexpr int64_t kSpan = 4096;  // steps: some times until a table is joined
  constexpr int64_t kSpans = 4;
  for (const RopeMode rope : {RopeMode::kInline, RopeMode::kNormal}) {
    for (const int64_t page_size : {1, 16, 256}) {
      SCOPED_TRACE("page " + std::to_string(page_size));
      Create(
          kTiny,
          {.token_capacity = 1024, .prefill_chunk_size = 1, .page_size = page_size, .rope = rope});
      ASSERT_TRUE(cache_->AddSequence(0).ok());
      ASSERT_TRUE(cache_->EnableSlidingWindowForSeq(0, 68, 4).ok());
      std::vector<Costs> spans(kSpans);
      for (Costs& span : spans) {
        const int64_t visited = paged().figures().blocks_visited;
        for (int64_t step = 0; step < kSpan; ++step) {
          Append(0, 1);
          span.entries = std::max(span.entries, paged().figures().page_entries);
          span.pages = std::max(span.pages, cache_->pages_in_use());
        }
        span.visited = paged().figures().blocks_visited - visited;
        ExpectSound();
      }
      const Costs& early = spans[1];
      const Costs& late = spans.back();
      EXPECT_EQ(late.pages, early.pages);
      EXPECT_LE(late.entries, early.entries + 1);
      EXPECT_LE(early.entries, 3 * early.pages + 32);
      // A table is joined once more or less often in a span.
      EXPECT_LE(late.visited, early.visited + early.entries);
      EXPECT_LE(late.visited, 6 * kSpan);
      // Where it may end is known without a look at what is gone.
      EXPECT_TRUE(cache_->CanFork(0, 4));
      EXPECT_FALSE(cache_->CanFork(0, 2000));
      ASSERT_TRUE(cache_->PopN(0, kSpan * kSpans - 4).ok());
      ExpectSound();
    }
  }
}

// Retained sequences, windowed layers or not, cost a step of others nothing.
TEST_F(Growth, RetainedSequencesCostOthersNothing) {
  AttentionLayerSpec layer = kTiny;
  for (const int64_t window : {0, 64}) {
    layer.window = window;
    std::vector<int64_t> visited;
    for (const int64_t retained : {100, 20000}) {
      Create(layer, {.token_capacity = 1000000, .prefill_chunk_size = 128, .page_size = 16});
      ASSERT_TRUE(cache_->AddSequence(0).ok());
      Append(0, 128);
      for (int64_t id = 2; id < retained + 2; ++id) {
        ASSERT_TRUE(cache_->ForkSequence(0, id, -1).ok());
        Append(id, 1 + id % 3 * 16);
        ASSERT_TRUE(cache_->SetRetained(id, true).ok());
      }
      ASSERT_TRUE(cache_->ForkSequence(0, 1, -1).ok());
      ASSERT_TRUE(cache_->EnableSlidingWindowForSeq(1, 32, 2).ok());
      const int64_t before = paged().figures().blocks_visited;
      for (int64_t step = 0; step < 256; ++step) Append(1, 1);
      visited.push_back(paged().figures().blocks_visited - before);
      const PageCounts counts = cache_->page_counts();
      EXPECT_EQ(counts.free + counts.exclusive + counts.shared + counts.retained_only,
                counts.total);
      EXPECT_GE(counts.retained_only, retained);
      if (retained == 100) ExpectSound();
    }
    EXPECT_EQ(visited[0], visited[1]) << "window " << window;
  }
}

// Sequences that see less and less of a common beginning go one by one: each
// costs the blocks of its path and the pages that it frees.
TEST_F(Growth, RemovalsCostWhatTheyFree) {
  constexpr int64_t kSequences = 10000;
  AttentionLayerSpec layer = kTiny;
  layer.window = 64;
  Create(layer, {.token_capacity = 600000, .prefill_chunk_size = 2048, .page_size = 16});
  ASSERT_TRUE(cache_->AddSequence(0).ok());
  Append(0, 128);
  for (int64_t id = 1; id <= kSequences; ++id) {
    ASSERT_TRUE(cache_->ForkSequence(0, id, -1).ok());
    Append(id, 1 + (id * 7919) % 60);
    ASSERT_TRUE(cache_->SetRetained(id, true).ok());
  }
  ASSERT_TRUE(cache_->RemoveSequence(0).ok());
  const int64_t before = paged().figures().blocks_visited;
  for (int64_t id = 1; id <= kSequences; ++id) {
    const int64_t visited = paged().figures().blocks_visited;
    ASSERT_TRUE(cache_->RemoveSequence(id).ok());
    ASSERT_LE(paged().figures().blocks_visited - visited, 40);
  }
  EXPECT_LE(paged().figures().blocks_visited - before, 12 * kSequences);
  EXPECT_EQ(cache_->pages_in_use(), 0);
  EXPECT_EQ(paged().figures().page_entries, 0);
  ExpectSound();
}

// What a window hides of the blocks before its leaf does not change while it slides in the leaf.
TEST_F(Growth, AWindowThatSlidesInALeafVisitsNoAncestorBlock) {
  constexpr int64_t kSteps = 64;
  std::vector<int64_t> visited;
  for (const bool has_ancestors : {false, true}) {
    Create(kTiny, {.token_capacity = 4000, .prefill_chunk_size = 128, .page_size = 1});
    ASSERT_TRUE(cache_->AddSequence(0).ok());
    ASSERT_TRUE(cache_->EnableSlidingWindowForSeq(0, 32, 2).ok());
    for (int64_t id = 1; id <= 8; ++id) {
      Append(0, 16);
      if (!has_ancestors) continue;
      ASSERT_TRUE(cache_->ForkSequence(0, id, -1).ok());
      ASSERT_TRUE(cache_->SetRetained(id, true).ok());
    }
    Append(0, 128);  // all that the window shows is in the last block
    const int64_t before = paged().figures().blocks_visited;
    for (int64_t step = 0; step < kSteps; ++step) Append(0, 1);
    visited.push_back(paged().figures().blocks_visited - before);
    ExpectSound();
  }
  EXPECT_LE(visited[1], visited[0]) << "without and with ancestors";
}

// Once windows are gone, nothing is left of them.
TEST_F(Growth, AfterWindowsNothingIsLookedAt) {
  Create(kTiny, {.token_capacity = 4000, .prefill_chunk_size = 128, .page_size = 16});
  ASSERT_TRUE(cache_->AddSequence(0).ok());
  ASSERT_TRUE(cache_->EnableSlidingWindowForSeq(0, 32, 2).ok());
  Append(0, 128);
  EXPECT_GT(paged().figures().blocks_visited, 0);
  ASSERT_TRUE(cache_->Clear().ok());
  const int64_t before = paged().figures().blocks_visited;
  ASSERT_TRUE(cache_->AddSequence(0).ok());
  Append(0, 128);
  ASSERT_TRUE(cache_->ForkSequence(0, 1, 50).ok());
  ASSERT_TRUE(cache_->RemoveSequence(0).ok());
  EXPECT_EQ(paged().figures().blocks_visited, before);
}

}  // namespace
}  // namespace quire
