#include "quire/chunk_blocks.h"

#include <gtest/gtest.h>

#include <array>
#include <numeric>
#include <vector>

namespace quire {
namespace {

std::vector<std::byte> Counted(int64_t bytes) {
  std::vector<std::byte> values(static_cast<size_t>(bytes));
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<std::byte>(i * 7 + 1);
  return values;
}

// Memory of 5 blocks: rows of 3 bytes, 2 a block.
struct Pool {
  explicit Pool(bool planes) : store(Counted(64)) {
    memory = {.data = store.data(),
              .bytes = 64,
              .block_count = 5,
              .block_stride = planes ? 4 : 11,
              .rows = 2,
              .row_stride = planes ? 32 : 5,
              .row_bytes = 3};
  }
  std::byte At(int64_t block, int64_t row, int64_t i) const {
    return store[static_cast<size_t>(block * memory.block_stride + row * memory.row_stride + i)];
  }
  std::vector<std::byte> store;
  BlockMemory memory;
};

class BlockCopies : public testing::TestWithParam<bool> {};

TEST_P(BlockCopies, GatherTakesTheBlocksInTheirOrder) {
  const Pool pool(GetParam());
  const std::array<int64_t, 3> blocks = {4, 0, 2};
  std::vector<std::byte> section(3 * 6);
  ASSERT_TRUE(GatherBlocks(pool.memory, blocks, section).ok());
  size_t at = 0;
  for (const int64_t block : blocks)
    for (int64_t row = 0; row < 2; ++row)
      for (int64_t i = 0; i < 3; ++i) EXPECT_EQ(section[at++], pool.At(block, row, i));
}

TEST_P(BlockCopies, ScatterWritesTheseRowsAndNothingElse) {
  Pool pool(GetParam());
  const std::array<int64_t, 2> blocks = {3, 1};
  const Pool before = pool;
  const std::vector<std::byte> section(2 * 6, std::byte{0xEE});
  ASSERT_TRUE(ScatterBlocks(section, pool.memory, blocks).ok());
  int64_t changed = 0;
  for (size_t i = 0; i < pool.store.size(); ++i)
    if (pool.store[i] != before.store[i]) {
      ++changed;
      EXPECT_EQ(pool.store[i], std::byte{0xEE}) << i;
    }
  EXPECT_EQ(changed, 2 * 6);
  std::vector<std::byte> back(section.size());
  ASSERT_TRUE(GatherBlocks(pool.memory, blocks, back).ok());
  EXPECT_EQ(back, section);
}

INSTANTIATE_TEST_SUITE_P(Layouts, BlockCopies, testing::Bool());

TEST(BlockCopies, WhatDoesNotFitIsRefusedAndNothingMoves) {
  Pool pool(false);
  const std::vector<std::byte> before = pool.store;
  std::vector<std::byte> section(12, std::byte{0xEE});
  for (const std::vector<int64_t>& blocks : std::vector<std::vector<int64_t>>{
           {0, 5}, {0, -1}, {0}, {0, 1, 2}, {}, {2, 2}, {int64_t{1} << 62, 0}}) {
    EXPECT_EQ(ScatterBlocks(section, pool.memory, blocks).code(), StatusCode::kBadArgument);
  }
  EXPECT_EQ(pool.store, before);
  EXPECT_EQ(GatherBlocks(pool.memory, std::array<int64_t, 2>{0, 5}, section).code(),
            StatusCode::kBadArgument);
  EXPECT_EQ(section, std::vector<std::byte>(12, std::byte{0xEE}));
}

TEST(BlockMemory, EveryBlockLiesInsideAndNoTwoOverlap) {
  const Pool pool(false);
  ASSERT_TRUE(CheckBlockMemory(pool.memory).ok());
  const auto refused = [&](auto change) {
    BlockMemory memory = pool.memory;
    change(memory);
    return CheckBlockMemory(memory).code() == StatusCode::kBadArgument;
  };
  constexpr int64_t kHuge = int64_t{1} << 62;
  EXPECT_TRUE(refused([](BlockMemory& m) { m.data = nullptr; }));
  EXPECT_TRUE(refused([](BlockMemory& m) { m.bytes = 51; })) << "the last byte is 4 * 11 + 5 + 3";
  EXPECT_FALSE(refused([](BlockMemory& m) { m.bytes = 52; }));
  EXPECT_TRUE(refused([](BlockMemory& m) { m.block_count = 0; }));
  EXPECT_TRUE(refused([](BlockMemory& m) { m.block_count = kHuge; }));
  EXPECT_TRUE(refused([](BlockMemory& m) { m.rows = 0; }));
  EXPECT_TRUE(refused([](BlockMemory& m) { m.rows = kHuge; }));
  EXPECT_TRUE(refused([](BlockMemory& m) { m.row_bytes = -1; }));
  EXPECT_TRUE(refused([](BlockMemory& m) { m.row_stride = 2; }));
  EXPECT_TRUE(refused([](BlockMemory& m) { m.row_stride = kHuge; }));
  EXPECT_TRUE(refused([](BlockMemory& m) { m.block_stride = 7; }));
  EXPECT_TRUE(refused([](BlockMemory& m) { m.block_stride = -11; }));
  const Pool planes(true);
  ASSERT_TRUE(CheckBlockMemory(planes.memory).ok());
  BlockMemory one_more = planes.memory;
  one_more.row_stride = 19;  // the fifth block of the first plane is in the second one
  EXPECT_EQ(CheckBlockMemory(one_more).code(), StatusCode::kBadArgument);
}

// Blocks of 24 bytes, of which a section has runs of `run_bytes`, the last one first; the rest of a
// block is not in it.
class OrderedCopies : public testing::TestWithParam<int64_t> {
 protected:
  OrderedCopies() {
    const int64_t run_bytes = GetParam();
    for (int64_t at = 24 - run_bytes; at >= 0; at -= run_bytes + 1)
      order_.push_back(static_cast<uint32_t>(at));
    memory_ = {.data = store_.data(),
               .bytes = 4 * 25 - 1,
               .block_count = 4,
               .block_stride = 25,
               .row_bytes = 24,
               .order = order_,
               .run_bytes = run_bytes};
  }
  std::vector<std::byte> store_ = Counted(4 * 25 - 1);
  std::vector<uint32_t> order_;
  BlockMemory memory_;
};

TEST_P(OrderedCopies, TakeTheRunsInTheirOrderAndNothingElse) {
  ASSERT_TRUE(CheckBlockMemory(memory_).ok()) << CheckBlockMemory(memory_).ToString();
  const std::array<int64_t, 2> blocks = {3, 1};
  std::vector<std::byte> section(2 * static_cast<size_t>(memory_.block_bytes()));
  ASSERT_TRUE(GatherBlocks(memory_, blocks, section).ok());
  size_t at = 0;
  for (const int64_t block : blocks)
    for (const uint32_t offset : order_)
      for (int64_t i = 0; i < GetParam(); ++i)
        EXPECT_EQ(section[at++], store_[static_cast<size_t>(block * 25 + offset + i)]);
  ASSERT_EQ(at, section.size());

  std::vector<std::byte> expected = store_;
  const std::array<int64_t, 2> others = {0, 2};
  at = 0;
  for (const int64_t block : others)
    for (const uint32_t offset : order_)
      for (int64_t i = 0; i < GetParam(); ++i)
        expected[static_cast<size_t>(block * 25 + offset + i)] = section[at++];
  ASSERT_TRUE(ScatterBlocks(section, memory_, others).ok());
  EXPECT_EQ(store_, expected);
}

INSTANTIATE_TEST_SUITE_P(RunBytes, OrderedCopies, testing::Values(1, 2, 3, 4, 8, 11, 24));

TEST(BlockMemory, RunsOfAnOrderLieWithinTheBlockAndNoTwoOverlap) {
  std::vector<std::byte> store = Counted(3 * 8);
  const auto code = [&](std::vector<uint32_t> order, int64_t run_bytes, int64_t rows = 1) {
    const BlockMemory memory{.data = store.data(),
                             .bytes = 3 * 8,
                             .block_count = 3 / rows,
                             .block_stride = 8 * rows,
                             .rows = rows,
                             .row_stride = 8,
                             .row_bytes = 8,
                             .order = order,
                             .run_bytes = run_bytes};
    return CheckBlockMemory(memory).code();
  };
  EXPECT_EQ(code({6, 0, 3}, 2), StatusCode::kOk);
  EXPECT_EQ(code({7, 0, 3}, 2), StatusCode::kBadArgument) << "the block has 8 bytes";
  EXPECT_EQ(code({6, 0, 5}, 2), StatusCode::kBadArgument) << "byte 6 stands twice";
  EXPECT_EQ(code({4, 4}, 1), StatusCode::kBadArgument);
  EXPECT_EQ(code({0xFFFFFFFF}, 1), StatusCode::kBadArgument);
  EXPECT_EQ(code({0}, 9), StatusCode::kBadArgument);
  EXPECT_EQ(code({0}, 0), StatusCode::kBadArgument);
  EXPECT_EQ(code({0}, -1), StatusCode::kBadArgument);
  EXPECT_EQ(code({0}, 1, 2), StatusCode::kBadArgument) << "a block of two rows";
}

TEST(TokenSections, AreThoseOfTheLayers) {
  Passport passport;
  passport.first_layer = 2;
  passport.layers = {{.dtype = DType::kBF16, .kv_heads = 2, .head_dim = 8, .v_head_dim = 4},
                     {.kind = StateKind::kLatent,
                      .dtype = DType::kF32,
                      .kv_heads = 1,
                      .head_dim = 6,
                      .v_head_dim = 6}};
  const auto sections = TokenSections(passport, 5);
  ASSERT_TRUE(sections.ok());
  const std::vector<SectionSpec> expected = {{SectionKind::kKey, 2, 2, DType::kBF16, {5, 2, 8}},
                                             {SectionKind::kValue, 2, 2, DType::kBF16, {5, 2, 4}},
                                             {SectionKind::kLatent, 3, 3, DType::kF32, {5, 6}}};
  EXPECT_EQ(*sections, expected);
  EXPECT_EQ(TokenSections(passport, 0).status().code(), StatusCode::kBadArgument);
  passport.layers[1].kind = StateKind::kRecurrent;
  EXPECT_EQ(TokenSections(passport, 5).status().code(), StatusCode::kBadArgument);
}

}  // namespace
}  // namespace quire
