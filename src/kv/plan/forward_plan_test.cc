#include "kv/plan/forward_plan.h"

#include <gtest/gtest.h>

#include <vector>

#include "kv/testing/block_tree_driver.h"

namespace quire {
namespace {

std::vector<int64_t> PlanOrderIds(const BlockTreeDriver& tree) {
  std::vector<int64_t> ids;
  for (const int32_t member : tree.plan().order()) {
    ids.push_back(tree.plan().members[static_cast<size_t>(member)].id);
  }
  return ids;
}

TEST(ForwardPlan, WithoutSharingThePlanIsInTheOrderOfTheBatch) {
  BlockTreeDriver tree({{.page_size = 16, .page_count = 100}});
  for (const int64_t id : {0, 1, 2}) tree.Add(id);
  ASSERT_TRUE(tree.Begin({{2, 300}, {0, 1}, {1, 20}}));
  EXPECT_EQ(PlanOrderIds(tree), (std::vector<int64_t>{2, 0, 1}));
  EXPECT_TRUE(tree.plan().shared().empty());
  EXPECT_EQ(tree.plan().row_count(), 321);
  EXPECT_EQ(tree.plan().positions()[299], 299);
  EXPECT_EQ(tree.plan().positions()[300], 0);
  EXPECT_EQ(tree.Check(), "");
}

// Sharers are adjacent in the plan wherever they stand in the batch; rows keep the batch's order.
TEST(ForwardPlan, InterleavedSharersAreAdjacent) {
  BlockTreeDriver tree({{.page_size = 16, .page_count = 400}});
  tree.Add(0);
  tree.Append(0, 600);
  tree.Add(10);
  tree.Append(10, 300);
  for (const int64_t id : {1, 2}) tree.Fork(0, id, 600);
  for (const int64_t id : {11, 12}) tree.Fork(10, id, 300);
  ASSERT_TRUE(tree.Begin({{0, 1}, {10, 1}, {1, 2}, {11, 1}, {2, 1}, {12, 1}}));
  EXPECT_EQ(tree.Check(), "");
  EXPECT_EQ(PlanOrderIds(tree), (std::vector<int64_t>{0, 1, 2, 10, 11, 12}));
  ASSERT_EQ(tree.plan().shared().size(), 2u);
  const SharedSpan& first = tree.plan().shared()[0];
  EXPECT_EQ(first.first, 0);
  EXPECT_EQ(first.count, 3);
  EXPECT_EQ(first.segment_begin, 0);
  EXPECT_EQ(first.segment_end, 2);  // 600 tokens have two whole segments
  EXPECT_EQ(tree.plan().shared()[1].first, 3);
  EXPECT_EQ(tree.plan().shared()[1].segment_end, 1);
  const AttentionSequence& second = tree.plan().group(0).sequences[1];
  EXPECT_EQ(second.first_row, 2);
  EXPECT_EQ(second.row_count, 2);
  EXPECT_EQ(second.base, 600);
  EXPECT_EQ(second.private_segment, 2);
}

// What earlier plans have left at blocks is of no matter.
TEST(ForwardPlan, SharersAreFoundBehindOtherBatches) {
  BlockTreeDriver tree({{.page_size = 16, .page_count = 400}});
  for (const int64_t id : {0, 9}) {
    tree.Add(id);
    tree.Append(id, 600);
  }
  for (int i = 0; i < 3; ++i) tree.Append(9, 1);
  tree.Fork(0, 1, 600);
  ASSERT_TRUE(tree.Begin({{0, 1}, {1, 1}}));
  ASSERT_EQ(tree.plan().shared().size(), 1u);
  EXPECT_EQ(tree.plan().shared()[0].count, 2);
  EXPECT_EQ(tree.Check(), "");
}

TEST(ForwardPlan, SpansNestAtEveryDepth) {
  BlockTreeDriver tree({{.page_size = 32, .page_count = 400}});
  tree.Add(0);
  tree.Append(0, 400);
  tree.Fork(0, 1, 400);
  tree.Append(1, 400);  // ends at 800
  tree.Fork(1, 2, 800);
  tree.Append(2, 300);  // ends at 1100
  tree.Fork(2, 3, 1100);
  ASSERT_TRUE(tree.Begin({{3, 1}, {0, 1}, {2, 1}, {1, 1}}));
  EXPECT_EQ(tree.Check(), "");
  // [0, 256) by all, [256, 768) by 1, 2, 3, [768, 1024) by 2 and 3.
  ASSERT_EQ(tree.plan().shared().size(), 3u);
  EXPECT_EQ(tree.plan().shared()[0].count, 4);
  EXPECT_EQ(tree.plan().shared()[0].segment_end, 1);
  EXPECT_EQ(tree.plan().shared()[1].count, 3);
  EXPECT_EQ(tree.plan().shared()[1].segment_begin, 1);
  EXPECT_EQ(tree.plan().shared()[1].segment_end, 3);
  EXPECT_EQ(tree.plan().shared()[2].count, 2);
  EXPECT_EQ(tree.plan().shared()[2].segment_begin, 3);
  EXPECT_EQ(tree.plan().shared()[2].segment_end, 4);
}

// A sharer outside the batch splits blocks but is not read for: one span, as if it were not there.
TEST(ForwardPlan, BlocksOfTheSameSharersAreOneSpan) {
  BlockTreeDriver tree({{.page_size = 16, .page_count = 400}});
  tree.Add(0);
  tree.Append(0, 700);
  tree.Fork(0, 1, 700);
  tree.Fork(0, 2, 300);
  ASSERT_TRUE(tree.Begin({{0, 1}, {1, 1}}));
  EXPECT_EQ(tree.Check(), "");
  ASSERT_EQ(tree.plan().shared().size(), 1u);
  EXPECT_EQ(tree.plan().shared()[0].segment_begin, 0);
  EXPECT_EQ(tree.plan().shared()[0].segment_end, 2);
}

TEST(ForwardPlan, PrefixesUnderASegmentAreNotShared) {
  BlockTreeDriver tree({{.page_size = 16, .page_count = 100}});
  tree.Add(0);
  tree.Append(0, 255);
  tree.Fork(0, 1, 255);
  ASSERT_TRUE(tree.Begin({{0, 4}, {1, 4}}));
  EXPECT_TRUE(tree.plan().shared().empty());
  EXPECT_EQ(tree.Check(), "");
}

// A tile is opened by its first slot, and by the first token of a page that starts inside it.
TEST(ForwardPlan, TilesAreOpenedOnce) {
  BlockTreeDriver tree({{.page_size = 32, .page_count = 10}, {.page_size = 5, .page_count = 40}});
  tree.Add(0);
  ASSERT_TRUE(tree.Begin({{0, 18}}));
  const std::vector<uint8_t>& opens = tree.plan().group(0).rows.opens_tile;
  for (size_t row = 0; row < 18; ++row) EXPECT_EQ(opens[row], row % 16 == 0) << row;
  const std::vector<uint8_t>& small = tree.plan().group(1).rows.opens_tile;
  for (size_t row = 0; row < 18; ++row) EXPECT_EQ(small[row], row % 5 == 0) << row;
  tree.End();
  tree.Fork(0, 1, 7);
  ASSERT_TRUE(tree.Begin({{1, 2}, {0, 1}}));
  EXPECT_EQ(tree.plan().group(0).rows.opens_tile, (std::vector<uint8_t>{1, 0, 0}));
  EXPECT_EQ(tree.plan().group(1).rows.opens_tile, (std::vector<uint8_t>{1, 0, 0}));
  EXPECT_EQ(tree.Check(), "");
  tree.Abort();
  ASSERT_TRUE(tree.Begin({{1, 1}, {0, 1}}));  // rows alone
  EXPECT_EQ(tree.plan().group(0).rows.opens_tile, (std::vector<uint8_t>{1, 0}));
  EXPECT_EQ(tree.plan().group(1).rows.opens_tile, (std::vector<uint8_t>{1, 0}));
  EXPECT_EQ(tree.Check(), "");
}

}  // namespace
}  // namespace quire
