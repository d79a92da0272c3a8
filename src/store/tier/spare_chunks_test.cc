#include "store/tier/spare_chunks.h"

#include <gtest/gtest.h>

#include <vector>

namespace quire {
namespace {

constexpr int64_t kBytes = 4096;

class SpareChunksTest : public testing::Test {
 protected:
  std::shared_ptr<StoredChunk> Make(int64_t size) {
    ChunkHeader header;
    header.total_bytes = size;
    std::span<std::byte> bytes;
    auto chunk = SpareChunks::Make(spares_, std::move(header), &bytes);
    EXPECT_EQ(bytes.data(), chunk->bytes().data());
    EXPECT_EQ(std::ssize(bytes), size);
    std::ranges::fill(bytes, std::byte{1});
    return chunk;
  }

  std::shared_ptr<ByteBudget> budget_ = std::make_shared<ByteBudget>(4 * kBytes);
  std::shared_ptr<SpareChunks> spares_ = std::make_shared<SpareChunks>(budget_);
};

TEST_F(SpareChunksTest, MemoryOfAChunkThatHasGoneServesTheNextOneOfItsSize) {
  auto chunk = Make(kBytes);
  const std::byte* const memory = chunk->bytes().data();
  chunk.reset();
  EXPECT_EQ(spares_->bytes(), kBytes);
  const auto other = Make(2 * kBytes);
  EXPECT_EQ(spares_->bytes(), kBytes);
  const auto next = Make(kBytes);
  EXPECT_EQ(next->bytes().data(), memory);
  EXPECT_EQ(spares_->bytes(), 0);
}

TEST_F(SpareChunksTest, SpareAndTakenBytesAreNoMoreThanTheBudget) {
  std::vector<std::shared_ptr<StoredChunk>> chunks;
  for (int i = 0; i < 6; ++i) chunks.push_back(Make(kBytes));
  chunks.clear();
  EXPECT_EQ(spares_->bytes(), 4 * kBytes);
  ASSERT_TRUE(budget_->Take(3 * kBytes));
  const auto other = Make(2 * kBytes);  // not of their size
  EXPECT_EQ(spares_->bytes(), kBytes);
  ASSERT_TRUE(budget_->Take(kBytes));
  Make(3 * kBytes).reset();
  EXPECT_EQ(spares_->bytes(), 0);
}

TEST_F(SpareChunksTest, TheOldestOneGoesForANewOne) {
  Make(2 * kBytes).reset();
  Make(kBytes).reset();
  const std::byte* const memory = Make(3 * kBytes)->bytes().data();
  EXPECT_EQ(spares_->bytes(), 4 * kBytes);
  EXPECT_EQ(Make(3 * kBytes)->bytes().data(), memory);
}

TEST_F(SpareChunksTest, WhatNobodyTookForAWhileIsFreed) {
  Make(kBytes).reset();
  spares_->Age(2);
  Make(2 * kBytes).reset();
  spares_->Age(2);
  EXPECT_EQ(spares_->bytes(), 3 * kBytes);
  spares_->Age(2);
  EXPECT_EQ(spares_->bytes(), 2 * kBytes);
  spares_->Age(2);
  EXPECT_EQ(spares_->bytes(), 0);
}

TEST_F(SpareChunksTest, AChunkMayOutliveTheStore) {
  auto chunk = Make(kBytes);
  spares_.reset();
  EXPECT_EQ(chunk->bytes().back(), std::byte{1});
  chunk.reset();
}

}  // namespace
}  // namespace quire
