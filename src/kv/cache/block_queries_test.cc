// Which blocks there are, against the lengths and page counts that the cache tells, and what asking
// costs.
#include "kv/pages/block_queries.h"

#include <gtest/gtest.h>

#include <memory>
#include <numeric>
#include <set>
#include <vector>

#include "base/random.h"
#include "kv/testing/kv_test_forward.h"

namespace quire {
namespace {

using Ids = std::vector<int64_t>;

class Blocks : public testing::Test {
 protected:
  Blocks() {
    EXPECT_TRUE(cache_->AddSequence(0).ok());
    Append(0, 10);
  }
  void Append(int64_t id, int64_t count) {
    std::vector<uint64_t> tokens(static_cast<size_t>(count));
    std::iota(tokens.begin(), tokens.end(), next_token_);
    next_token_ += tokens.size();
    const auto outputs = RunForward(*cache_, options_.layers, Ids{id}, {tokens});
    ASSERT_TRUE(outputs.ok()) << outputs.status().ToString();
  }
  void Fork(int64_t parent, int64_t child, int64_t position) {
    ASSERT_TRUE(cache_->ForkSequence(parent, child, position).ok());
  }
  SeenBlocks Ask(const Ids& ids, int64_t blocks_max = 1000) const {
    const auto& queries = dynamic_cast<const BlockQueries&>(*cache_);
    Result<SeenBlocks> seen = queries.DescribeBlocks(ids, blocks_max);
    EXPECT_TRUE(seen.ok()) << seen.status().ToString();
    EXPECT_LE(std::ssize(seen->blocks), blocks_max);
    EXPECT_LE(seen->visited, blocks_max + std::ssize(ids));
    return *std::move(seen);
  }
  // Keys and values of a page of each group; rows may be padded.
  static constexpr int64_t kPageBytes = 4 * 2 * 4 * 4;

  const AttentionKVCacheOptions options_ = TestCacheOptions(
      {{2, 1, 4, 4, DType::kF32}, {2, 1, 4, 4, DType::kF32, {}, 8}}, {.max_num_sequences = 2000,
                                                                      .token_capacity = 40'000,
                                                                      .prefill_chunk_size = 64,
                                                                      .page_size = 4});
  const std::unique_ptr<AttentionKVCache> cache_ = MakeTestCache(options_);
  uint64_t next_token_ = 0;
};

TEST_F(Blocks, OfAForkAreTheSharedPartAndEachOwnOne) {
  Fork(0, 1, 6);
  Append(1, 3);
  const SeenBlocks seen = Ask({0, 1});
  ASSERT_EQ(seen.blocks.size(), 3u);
  EXPECT_EQ(seen.ends, (Ids{1, 2}));
  EXPECT_EQ(seen.blocks[0].parent, -1);
  EXPECT_EQ(seen.blocks[0].tokens, (TokenRange{0, 6}));
  EXPECT_EQ(seen.blocks[1].parent, 0);
  EXPECT_EQ(seen.blocks[1].tokens, (TokenRange{6, 10}));
  EXPECT_EQ(seen.blocks[2].parent, 0);
  EXPECT_EQ(seen.blocks[2].tokens, (TokenRange{6, 9}));
  // Two pages begin in the first 6 tokens; of the rest, one page more, or two of its own.
  EXPECT_EQ(seen.blocks[0].pages, 2 * 2);
  EXPECT_EQ(seen.blocks[1].pages, 1 * 2);
  EXPECT_EQ(seen.blocks[2].pages, 2 * 2);
  for (const SeenBlock& block : seen.blocks) {
    EXPECT_EQ(block.bytes % block.pages, 0) << "pages of both groups are equal";
    EXPECT_EQ(block.bytes / block.pages, seen.blocks[0].bytes / seen.blocks[0].pages);
    EXPECT_GE(block.bytes / block.pages, kPageBytes);
  }
  EXPECT_FALSE(seen.cut);
}

TEST_F(Blocks, OfASequenceThatIsNotThereOrHasNoTokensAreNone) {
  ASSERT_TRUE(cache_->AddSequence(5).ok());
  const SeenBlocks seen = Ask({77, 5, 0});
  EXPECT_EQ(seen.ends, (Ids{-1, -1, 0}));
  EXPECT_EQ(seen.blocks.size(), 1u);
}

// Whatever was forked where: paths are gapless, and the pages of all blocks are those in use.
TEST_F(Blocks, TogetherHaveAllTokensAndAllPages) {
  RandomSequence random(3);
  Ids ids{0};
  for (int64_t id = 1; id < 60; ++id) {
    const int64_t parent = ids[static_cast<size_t>(random.Below(std::ssize(ids)))];
    const int64_t length = cache_->GetSequenceLength(parent).value();
    const int64_t position = length - random.Below(std::min<int64_t>(length, 4));
    if (!cache_->CanFork(parent, position)) continue;
    Fork(parent, id, position);
    ids.push_back(id);
    Append(id, 1 + random.Below(12));
    if (random.Below(4) == 0) {
      const size_t i = static_cast<size_t>(random.Below(std::ssize(ids)));
      ASSERT_TRUE(cache_->RemoveSequence(ids[i]).ok());
      ids.erase(ids.begin() + static_cast<std::ptrdiff_t>(i));
    }
    const SeenBlocks seen = Ask(ids);
    int64_t tokens = 0, pages = 0;
    for (size_t b = 0; b < seen.blocks.size(); ++b) {
      const SeenBlock& block = seen.blocks[b];
      ASSERT_LT(block.parent, static_cast<int64_t>(b));
      const int64_t before =
          block.parent < 0 ? 0 : seen.blocks[static_cast<size_t>(block.parent)].tokens.end;
      ASSERT_EQ(block.tokens.begin, before);
      ASSERT_LT(block.tokens.begin, block.tokens.end);
      tokens += block.tokens.count();
      pages += block.pages;
    }
    EXPECT_EQ(tokens, cache_->GetDistinctTokenCount());
    EXPECT_EQ(pages, cache_->pages_in_use());
    for (size_t i = 0; i < ids.size(); ++i) {
      ASSERT_GE(seen.ends[i], 0);
      EXPECT_EQ(seen.blocks[static_cast<size_t>(seen.ends[i])].tokens.end,
                cache_->GetSequenceLength(ids[i]).value());
    }
  }
}

// 1500 branches of one prompt are 1501 blocks.
TEST_F(Blocks, OfMoreSequencesThanThereIsRoomForAreTheFirst) {
  Ids ids;
  for (int64_t id = 1; id <= 1500; ++id) {
    Fork(0, id, 10);
    Append(id, 1);
    ids.push_back(id);
  }
  const SeenBlocks seen = Ask(ids);
  EXPECT_TRUE(seen.cut);
  ASSERT_EQ(seen.blocks.size(), 1000u);
  EXPECT_EQ(seen.visited, 1000 + 1499);  // each sequence but the first one look more
  for (int64_t i = 0; i < 1500; ++i) EXPECT_EQ(seen.ends[static_cast<size_t>(i)] >= 0, i < 999);
  EXPECT_FALSE(Ask({1, 2, 3}).cut);
}

// Each token of the path is a block of its own, as a sequence ends there.
TEST_F(Blocks, OfAPathThatIsTooLongAreTheLast) {
  for (int64_t id = 1; id <= 10; ++id) Fork(0, id, id);
  const SeenBlocks seen = Ask({0, 1, 9}, 4);
  EXPECT_TRUE(seen.cut);
  ASSERT_EQ(seen.blocks.size(), 4u);
  EXPECT_EQ(seen.blocks[0].parent, -1);
  EXPECT_EQ(seen.blocks[0].tokens, (TokenRange{6, 7}));
  EXPECT_EQ(seen.ends, (Ids{3, -1, 2}));
  EXPECT_FALSE(Ask({0}, 10).cut);
  EXPECT_TRUE(Ask({0}, 0).cut);
}

}  // namespace
}  // namespace quire
