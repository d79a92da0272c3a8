#include "kv/plan/query_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "base/random.h"
#include "kv/testing/block_tree_driver.h"

namespace quire {
namespace {

using Rows = std::vector<int32_t>;

QueryPlan OpenPlan(const BlockTreeDriver& tree) {
  QueryPlan queries;
  queries.Reserve(tree.plan());
  queries.Open(tree.plan());
  return queries;
}

TEST(QueryPlan, AtFirstItIsThePlan) {
  BlockTreeDriver tree({{.page_size = 16, .page_count = 200}});
  tree.Add(0);
  tree.Append(0, 600);
  for (const int64_t id : {1, 2}) tree.Fork(0, id, 600);
  ASSERT_TRUE(tree.Begin({{0, 1}, {1, 20}, {2, 1}}));
  const QueryPlan queries = OpenPlan(tree);
  EXPECT_EQ(queries.rows().size(), 22u);
  EXPECT_TRUE(std::ranges::equal(queries.positions(), tree.plan().positions()));
  const auto& whole = tree.plan().group(0);
  ASSERT_EQ(queries.sequences(0).size(), whole.sequences.size());
  for (size_t i = 0; i < whole.sequences.size(); ++i) {
    EXPECT_EQ(queries.sequences(0)[i].first_row, whole.sequences[i].first_row);
    EXPECT_EQ(queries.sequences(0)[i].base, whole.sequences[i].base);
    EXPECT_EQ(queries.sequences(0)[i].private_segment, whole.sequences[i].private_segment);
  }
  ASSERT_EQ(queries.shared().size(), tree.plan().shared().size());
  EXPECT_EQ(queries.fresh(0).opens_tile, whole.rows.opens_tile);
}

TEST(QueryPlan, RunsBehindASegmentShareIt) {
  BlockTreeDriver tree({{.page_size = 16, .page_count = 100}});
  tree.Add(0);
  ASSERT_TRUE(tree.Begin({{0, 900}}));
  QueryPlan queries = OpenPlan(tree);
  queries.Select(tree.plan().members[0], Rows{10, 300, 301, 599, 899});
  queries.Apply(tree.plan());
  const auto sequences = queries.sequences(0);
  ASSERT_EQ(sequences.size(), 4u);
  EXPECT_EQ(sequences[1].base, 300);
  EXPECT_EQ(sequences[1].row_count, 2);
  EXPECT_EQ(sequences[1].first_row, 300);  // tensors have all rows
  const int64_t own[] = {0, 1, 2, 2};      // the last one has nobody to share segment 2 with
  for (size_t i = 0; i < 4; ++i) EXPECT_EQ(sequences[i].private_segment, own[i]) << i;
  ASSERT_EQ(queries.shared().size(), 2u);
  EXPECT_EQ(queries.shared()[0].first, 1);
  EXPECT_EQ(queries.shared()[0].count, 3);
  EXPECT_EQ(queries.shared()[0].segment_end, 1);
  EXPECT_EQ(queries.shared()[1].first, 2);
  EXPECT_EQ(queries.shared()[1].segment_begin, 1);
  EXPECT_EQ(queries.shared()[1].segment_end, 2);
  EXPECT_EQ(queries.input_count(), 900);
  queries.Pack(tree.plan());
  EXPECT_EQ(queries.input_count(), 5);
  EXPECT_EQ(queries.sequences(0)[1].first_row, 1);
  EXPECT_EQ(queries.sequences(0)[3].first_row, 4);
}

// Rows of tokens 5, 6, ... of a page of 16 that holds 5 already.
TEST(QueryPlan, AMovedRowOpensItsTileBeforeAFreshOneDoes) {
  BlockTreeDriver tree({{.page_size = 16, .page_count = 100}});
  tree.Add(0);
  tree.Append(0, 5);
  ASSERT_TRUE(tree.Begin({{0, 60}}));
  QueryPlan queries = OpenPlan(tree);
  // Tiles begin at rows 11, 27, 43 and 59.
  queries.Select(tree.plan().members[0], Rows{0, 11, 12, 27, 28, 59});
  queries.Apply(tree.plan());
  queries.Pack(tree.plan());
  const auto moved = queries.moved_opens_tile(0);
  for (int32_t row = 0; row < 60; ++row)
    EXPECT_EQ(moved[static_cast<size_t>(row)], row == 13 || row == 29 || row == 43) << row;
  EXPECT_EQ(queries.fresh(0).opens_tile, (std::vector<uint8_t>{0, 0, 0, 0, 0, 1}));
}

// What kernels require of spans, and what stored rows require of tiles, for any choice.
void ExpectSound(const BlockTreeDriver& tree, const QueryPlan& queries) {
  const ForwardPlan& plan = tree.plan();
  std::vector<int64_t> covered(queries.sequences(0).size(), 0);
  int64_t last_begin = 0;
  for (const SharedSpan& span : queries.shared()) {
    EXPECT_GE(span.segment_begin, last_begin);
    last_begin = span.segment_begin;
    EXPECT_GE(span.count, 2);
    EXPECT_LT(span.segment_begin, span.segment_end);
    for (int64_t i = span.first; i < span.first + span.count; ++i) {
      int64_t& end = covered[static_cast<size_t>(i)];
      EXPECT_EQ(end, span.segment_begin);
      end = span.segment_end;
      EXPECT_GE(queries.sequences(0)[static_cast<size_t>(i)].base, 256 * end);
    }
  }
  std::vector<int32_t> read(queries.rows().size(), 0);
  for (int g = 0; g < tree.tree().group_count(); ++g) {
    for (size_t i = 0; i < covered.size(); ++i) {
      const AttentionSequence& run = queries.sequences(g)[i];
      EXPECT_EQ(run.private_segment, covered[i]);
      for (int64_t r = 0; r < run.row_count && g == 0; ++r) {
        const auto row = static_cast<size_t>(run.first_row + r);
        ++read[row];
        EXPECT_EQ(queries.positions()[row], run.base + r);
      }
    }
    std::map<std::pair<int32_t, int32_t>, std::vector<uint8_t>> opens;  // by tile, as stored
    const std::vector<AppendTarget>& targets = plan.group(g).rows.targets;
    const auto store = [&](const AppendTarget& at, uint8_t open) {
      opens[{at.page, at.slot / kTilePositions}].push_back(open);
    };
    for (size_t r = 0; r < targets.size(); ++r) {
      if (!queries.GoesOn(static_cast<int64_t>(r)))
        store(targets[r], queries.moved_opens_tile(g)[r]);
    }
    const TokenSlots& fresh = queries.fresh(g);
    ASSERT_EQ(fresh.targets.size(), queries.rows().size());
    for (size_t i = 0; i < fresh.targets.size(); ++i) {
      const AppendTarget& at = targets[static_cast<size_t>(queries.rows()[i])];
      EXPECT_EQ(fresh.targets[i].page, at.page);
      EXPECT_EQ(fresh.targets[i].slot, at.slot);
      store(at, fresh.opens_tile[i]);
    }
    for (size_t r = 0; r < targets.size(); ++r) {
      const auto& stored = opens[{targets[r].page, targets[r].slot / kTilePositions}];
      if (plan.group(g).rows.opens_tile[r] != 0) {
        EXPECT_EQ(stored[0], 1);
      }
      EXPECT_EQ(std::count(stored.begin() + 1, stored.end(), 1), 0);
    }
  }
  EXPECT_EQ(std::ranges::count(read, 1), std::ssize(read));
}

TEST(QueryPlan, AnyChoiceIsSound) {
  for (uint64_t seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE(seed);
    RandomSequence random(seed);
    BlockTreeDriver tree(
        {{.page_size = 16, .page_count = 900}, {.page_size = 3, .page_count = 4000}});
    tree.Add(0);
    tree.Append(0, 1 + random.Below(900));
    std::vector<BlockTreeDriver::Item> batch{{0, 1 + random.Below(700)}};
    for (int64_t id = 1; id < 5; ++id) {
      const int64_t parent = random.Below(id);
      tree.Fork(parent, id, random.Below(tree.Length(parent) + 1));
      if (random.Below(2) == 0) tree.Append(id, 1 + random.Below(300));
      batch.push_back({id, 1 + random.Below(700)});
    }
    ASSERT_TRUE(tree.Begin(batch));
    QueryPlan queries = OpenPlan(tree);
    ExpectSound(tree, queries);
    for (int round = 0; round < 3; ++round) {
      for (const ForwardMember& member : tree.plan().members) {
        if (random.Below(3) == 0) continue;
        Rows rows;
        for (const int32_t row : queries.RowsOf(member)) {
          if (random.Below(4) == 0) rows.push_back(row - static_cast<int32_t>(member.first_row));
        }
        if (!rows.empty()) queries.Select(member, rows);
      }
      queries.Apply(tree.plan());
      queries.Pack(tree.plan());
      ExpectSound(tree, queries);
    }
  }
}

}  // namespace
}  // namespace quire
