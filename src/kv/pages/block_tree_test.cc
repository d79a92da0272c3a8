#include "kv/pages/block_tree.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "base/random.h"
#include "kv/testing/block_tree_driver.h"

namespace quire {
namespace {

using Slots = std::vector<int64_t>;

// The cache of the worked examples in section 6 of the KV specification: P = 4, capacity 64.
BlockTreeDriver ExampleTree() { return BlockTreeDriver({{.page_size = 4, .page_count = 17}}); }

// 6.1 and 6.2
TEST(BlockTree, ForkInsideAPageCopiesNothingAndTakesNoPage) {
  BlockTreeDriver tree = ExampleTree();
  tree.Add(0);
  EXPECT_EQ(tree.free_pages(), 17);
  tree.Append(0, 10);
  EXPECT_EQ(tree.free_pages(), 14);
  EXPECT_EQ(tree.Slots(0), (Slots{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}));
  tree.Fork(0, 1, 6);
  EXPECT_EQ(tree.free_pages(), 14);
  EXPECT_EQ(tree.Slots(1), (Slots{0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(tree.Check(), "");
  tree.Append(1, 3);
  EXPECT_EQ(tree.Slots(1), (Slots{0, 1, 2, 3, 4, 5, 14, 15, 16}));
  EXPECT_EQ(tree.Slots(0), (Slots{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}));
  EXPECT_EQ(tree.free_pages(), 12);
  ASSERT_TRUE(tree.Begin({{0, 1}, {1, 1}}));
  EXPECT_EQ(tree.Check(), "");
  EXPECT_EQ(tree.plan().positions()[0], 10);
  EXPECT_EQ(tree.plan().positions()[1], 9);
  tree.End();
  EXPECT_EQ(tree.Slots(0).back(), 10);
  EXPECT_EQ(tree.Slots(1).back(), 17);
  tree.Remove(0);
  EXPECT_EQ(tree.Slots(1), (Slots{0, 1, 2, 3, 4, 5, 14, 15, 16, 17}));
  EXPECT_EQ(tree.PathLength(1), 1);
  EXPECT_EQ(tree.Check(), "");
  tree.Remove(1);
  EXPECT_EQ(tree.free_pages(), 17);
  EXPECT_EQ(tree.tree().blocks().count(), 0);
}

// 6.3
TEST(BlockTree, AfterAForkAtAPageBorderBothOpenNewPages) {
  BlockTreeDriver tree = ExampleTree();
  tree.Add(0);
  tree.Append(0, 8);
  tree.Fork(0, 1, 8);
  EXPECT_EQ(tree.free_pages(), 15);
  tree.Append(0, 1);
  tree.Append(1, 1);
  EXPECT_EQ(tree.Slots(0).back(), 8);
  EXPECT_EQ(tree.Slots(1).back(), 12);
  EXPECT_EQ(tree.free_pages(), 13);
  EXPECT_EQ(tree.Check(), "");
}

// 6.4: the first to append takes the next slot of the page.
TEST(BlockTree, TheFirstToAppendAfterAForkGoesOnInPlace) {
  BlockTreeDriver tree = ExampleTree();
  tree.Add(0);
  tree.Append(0, 10);
  tree.Fork(0, 1, 10);
  EXPECT_EQ(tree.free_pages(), 14);
  tree.Append(1, 1);
  EXPECT_EQ(tree.Slots(1).back(), 10);
  EXPECT_EQ(tree.free_pages(), 14);
  tree.Append(0, 1);
  EXPECT_EQ(tree.Slots(0).back(), 14);
  EXPECT_EQ(tree.free_pages(), 13);
  EXPECT_EQ(tree.Check(), "");
}

// 6.5
TEST(BlockTree, NoForkTakesAPage) {
  for (const int64_t position : {0, 3, 4, 8, 10}) {
    BlockTreeDriver tree = ExampleTree();
    tree.Add(0);
    tree.Append(0, 10);
    tree.Fork(0, 1, position);
    EXPECT_EQ(tree.free_pages(), 14) << position;
    EXPECT_EQ(tree.Length(1), position);
    EXPECT_EQ(tree.Check(), "");
  }
}

// 6.6
TEST(BlockTree, ForkOfAForkSharesTheWholePath) {
  BlockTreeDriver tree = ExampleTree();
  tree.Add(0);
  tree.Append(0, 10);
  tree.Fork(0, 1, 6);
  tree.Append(1, 4);
  tree.Fork(1, 2, 9);
  EXPECT_EQ(tree.Slots(1), (Slots{0, 1, 2, 3, 4, 5, 14, 15, 16, 17}));
  EXPECT_EQ(tree.Slots(2), (Slots{0, 1, 2, 3, 4, 5, 14, 15, 16}));
  EXPECT_EQ(tree.free_pages(), 12);
  ASSERT_TRUE(tree.Begin({{0, 1}, {1, 1}, {2, 1}}));
  EXPECT_EQ(tree.Check(), "");
  tree.End();
  EXPECT_EQ(tree.Slots(0).back(), 10);
  EXPECT_EQ(tree.Slots(1).back(), 18);
  EXPECT_EQ(tree.Slots(2).back(), 5 * 4 + 1);
  EXPECT_EQ(tree.Check(), "");
}

// 6.7
TEST(BlockTree, PopInsideABlockFreesItsLastPages) {
  BlockTreeDriver tree = ExampleTree();
  tree.Add(0);
  tree.Append(0, 10);
  tree.Pop(0, 3);
  EXPECT_EQ(tree.free_pages(), 15);
  EXPECT_EQ(tree.Slots(0), (Slots{0, 1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(tree.Check(), "");
  tree.Pop(0, 7);
  EXPECT_EQ(tree.free_pages(), 17);
  EXPECT_EQ(tree.Length(0), 0);
  tree.Append(0, 5);
  EXPECT_EQ(tree.Slots(0), (Slots{0, 1, 2, 3, 4}));
  tree.Pop(0, 0);
  EXPECT_EQ(tree.Length(0), 5);
  EXPECT_EQ(tree.Check(), "");
}

// 6.8
TEST(BlockTree, PopIntoASharedPrefixLeavesItToTheOthers) {
  BlockTreeDriver tree = ExampleTree();
  tree.Add(0);
  tree.Append(0, 10);
  tree.Fork(0, 1, 9);
  tree.Append(1, 3);
  EXPECT_EQ(tree.Slots(1), (Slots{0, 1, 2, 3, 4, 5, 6, 7, 8, 13, 14, 15}));
  EXPECT_EQ(tree.free_pages(), 13);
  tree.Pop(1, 6);
  EXPECT_EQ(tree.Slots(1), (Slots{0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(tree.free_pages(), 14);
  EXPECT_EQ(tree.Slots(0), (Slots{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}));
  EXPECT_EQ(tree.Check(), "");
  tree.Pop(1, 6);
  EXPECT_EQ(tree.Length(0) + tree.Length(1), 10);
  EXPECT_EQ(tree.PathLength(0), 1);
  tree.Remove(0);
  tree.Remove(1);
  EXPECT_EQ(tree.free_pages(), 17);
  EXPECT_EQ(tree.tree().blocks().count(), 0);
}

// 6.14
TEST(BlockTree, ChainOfForksReadsEveryAncestorsPages) {
  BlockTreeDriver tree = ExampleTree();
  tree.Add(0);
  tree.Append(0, 4);
  for (int64_t i = 1; i < 4; ++i) {
    tree.Fork(i - 1, i, 4 * i);
    tree.Append(i, i < 3 ? 4 : 2);
  }
  ASSERT_TRUE(tree.Begin({{3, 1}}));
  EXPECT_EQ(tree.plan().positions()[0], 14);
  EXPECT_EQ(tree.plan().group(0).rows.targets[0].page, 3);
  EXPECT_EQ(tree.plan().group(0).rows.targets[0].slot, 2);
  EXPECT_EQ(tree.Check(), "");
  tree.End();
  EXPECT_EQ(tree.PathLength(3), 4);  // sequences end in each of the upper blocks
}

// A sequence that outlives the branches of its path has one block again, and one run of entries.
TEST(BlockTree, DepthCollapsesWhenBranchesDie) {
  BlockTreeDriver tree({{.page_size = 4, .page_count = 100}});
  tree.Add(0);
  tree.Append(0, 3);
  for (int64_t i = 1; i <= 8; ++i) {
    tree.Fork(i - 1, i, 3 * i - 1);
    tree.Append(i, 4);
  }
  EXPECT_GT(tree.PathLength(8), 4);
  for (int64_t i = 0; i < 8; ++i) {
    tree.Remove(i);
    ASSERT_EQ(tree.Check(), "") << i;
  }
  EXPECT_EQ(tree.PathLength(8), 1);
  EXPECT_EQ(tree.tree().blocks().count(), 1);
  ASSERT_TRUE(tree.Begin({{8, 1}}));
  EXPECT_EQ(tree.plan().group(0).sequences[0].run_count, 1);
  EXPECT_EQ(tree.Check(), "");
}

TEST(BlockTree, TheFillFallsToTheDeepestRemainingHolder) {
  BlockTreeDriver tree = ExampleTree();
  tree.Add(0);
  tree.Append(0, 3);
  tree.Fork(0, 1, 2);
  EXPECT_EQ(tree.tree().pool(0).fill(0), 3);
  tree.Remove(0);
  EXPECT_EQ(tree.tree().pool(0).fill(0), 2);
  tree.Append(1, 1);
  EXPECT_EQ(tree.Slots(1), (Slots{0, 1, 2}));  // in place: nobody else sees slot 2 now
  EXPECT_EQ(tree.Check(), "");
}

// Two sequences of one batch that end at the same fill: the first of the batch goes on in place.
TEST(BlockTree, OneOfABatchAppendsInPlace) {
  BlockTreeDriver tree = ExampleTree();
  tree.Add(0);
  tree.Append(0, 2);
  tree.Fork(0, 1, 2);
  tree.Fork(0, 2, 2);
  ASSERT_TRUE(tree.Begin({{2, 1}, {0, 1}, {1, 3}}));
  EXPECT_EQ(tree.Slots(2).back(), 2);
  EXPECT_EQ(tree.Slots(0).back(), 6);
  EXPECT_EQ(tree.Slots(1).back(), 12);
  EXPECT_EQ(tree.free_pages(), 13);
  EXPECT_EQ(tree.Check(), "");
  tree.Abort();
  EXPECT_EQ(tree.Check(), "");
  EXPECT_EQ(tree.free_pages(), 16);
  // A plan that came to nothing claims nothing.
  tree.Append(0, 1);
  EXPECT_EQ(tree.Slots(0).back(), 2);
}

// Page size 16, forks at ever later slots of the first page: the range would come to lie in five
// pages.
class TreeInFourPages : public BlockTreeDriver {
 public:
  TreeInFourPages() : BlockTreeDriver({{.page_size = 16, .page_count = 20}}) {
    Add(0);
    Append(0, 4);
    for (int64_t i = 1; i <= 3; ++i) {
      Fork(i - 1, i, 2 * i);
      Append(i, 4);
    }
    Fork(3, 4, 8);
  }
};

TEST(BlockTree, TheFifthPageOfARangeConsolidates) {
  TreeInFourPages tree;
  const Slots before = tree.Slots(3);
  const int64_t free_before = tree.free_pages();
  ASSERT_TRUE(tree.Begin({{4, 3}}));
  EXPECT_EQ(free_before - tree.free_pages(), 1);
  const GroupPlan& plan = tree.plan().group(0);
  EXPECT_EQ(plan.copy_from.size(), 8u);
  EXPECT_EQ(plan.sequences[0].run_count, 1);
  EXPECT_EQ(tree.Check(), "");
  tree.End();
  EXPECT_EQ(tree.Check(), "");
  EXPECT_EQ(tree.PathLength(4), 1);
  EXPECT_EQ(tree.Slots(3), before);
}

TEST(BlockTree, AbortOfAConsolidationBringsTheOldPathBack) {
  TreeInFourPages tree;
  const std::string before = tree.Snapshot();
  const Slots slots = tree.Slots(4);
  ASSERT_TRUE(tree.Begin({{4, 3}}));
  EXPECT_TRUE(tree.plan().members[0].append.copies());
  EXPECT_EQ(tree.Check(), "");
  tree.Abort();
  EXPECT_EQ(tree.Check(), "");
  EXPECT_EQ(tree.Snapshot(), before);
  // Now all others go meanwhile: the old path is held by the forward alone.
  ASSERT_TRUE(tree.Begin({{4, 3}}));
  for (int64_t id = 0; id < 4; ++id) tree.Remove(id);
  EXPECT_EQ(tree.Check(), "");
  tree.Abort();
  EXPECT_EQ(tree.Check(), "");
  EXPECT_EQ(tree.Slots(4), slots);
}

// A cut for one group is a cut for all: the other group's tokens move to own pages at the same
// slots.
TEST(BlockTree, GroupsAreCutAtOnePosition) {
  BlockTreeDriver tree({{.page_size = 16, .page_count = 40}, {.page_size = 12, .page_count = 40}});
  tree.Add(0);
  tree.Append(0, 20);
  for (int64_t i = 1; i <= 4; ++i) {
    tree.Fork(i - 1, i, 16 + 2 * i);
    tree.Append(i, 4);
    ASSERT_EQ(tree.Check(), "") << i;
  }
  EXPECT_EQ(tree.Check(), "");
  tree.Fork(4, 5, 25);
  ASSERT_TRUE(tree.Begin({{5, 1}}));
  EXPECT_EQ(tree.Check(), "");
  tree.Abort();
  EXPECT_EQ(tree.Check(), "");
}

TEST(BlockTree, MergesWaitForTheEndOfTheForward) {
  BlockTreeDriver tree = ExampleTree();
  tree.Add(0);
  tree.Append(0, 6);
  tree.Fork(0, 1, 5);
  tree.Append(1, 6);
  ASSERT_TRUE(tree.Begin({{1, 1}}));
  const PageRun run = tree.plan().group(0).runs[0];
  tree.Remove(0);
  EXPECT_EQ(tree.PathLength(1), 2);
  EXPECT_EQ(run.entries, tree.plan().group(0).runs[0].entries);
  EXPECT_EQ(tree.Check(), "");
  tree.End();
  EXPECT_EQ(tree.PathLength(1), 1);
  EXPECT_EQ(tree.Check(), "");
}

TEST(BlockTree, ClearStartsAnew) {
  TreeInFourPages tree;
  ASSERT_TRUE(tree.Begin({{4, 3}, {0, 2}}));
  tree.Clear();
  EXPECT_EQ(tree.Check(), "");
  EXPECT_EQ(tree.free_pages(), 20);
  EXPECT_EQ(tree.tree().distinct_token_count(), 0);
  tree.Add(0);
  tree.Append(0, 2);
  EXPECT_EQ(tree.Slots(0), (Slots{0, 1}));
}

// One random walk: the weights of the operations are drawn too, so that some walks never pop and
// some only fork.
class Walk {
 public:
  Walk(const std::vector<BlockTreeDriver::Pages>& groups, uint64_t seed)
      : tree_(groups), random_(seed) {
    for (int64_t& weight : weights_) weight = random_.Below(4);
    weights_[kForward] += 2;
    weights_[kAdd] += 1;
    if (random_.Below(3) == 0) weights_[kBranch] += 12;
  }

  int64_t consolidations() const { return consolidations_; }

  std::string Run(int steps) {
    for (int step = 0; step < steps; ++step) {
      Step();
      const std::string wrong = tree_.Check();
      if (!wrong.empty()) return "step " + std::to_string(step) + ": " + wrong;
    }
    Finish();
    return tree_.Check();
  }

 private:
  enum Operation { kAdd, kFork, kBranch, kPop, kRemove, kForward, kOperationCount };

  // Half of the time the newest: chains of forks go deep.
  int64_t AnyId() {
    if (random_.Below(2) == 0) return tree_.lists().rbegin()->first;
    auto it = tree_.lists().begin();
    std::advance(it, random_.Below(static_cast<int64_t>(tree_.lists().size())));
    return it->first;
  }

  // In [0, bound], half of the time near 0: forks and pops near the end crowd one page range.
  int64_t OftenSmall(int64_t bound) {
    return random_.Below(random_.Below(2) == 0 ? std::min<int64_t>(bound, 3) + 1 : bound + 1);
  }

  void Step() {
    int64_t total = 0;
    for (const int64_t weight : weights_) total += weight;
    int64_t draw = random_.Below(total);
    int operation = 0;
    while (draw >= weights_[operation]) draw -= weights_[operation++];
    if (operation == kAdd || tree_.lists().empty()) {
      if (tree_.lists().size() < 3) tree_.Add(next_id_++);  // the other places are for forks
    } else if (operation == kForward && tree_.in_forward()) {
      Finish();
    } else if (operation == kForward) {
      Begin();
    } else {
      Change(operation, AnyId());
    }
  }

  void Change(int operation, int64_t id) {
    if (tree_.InBatch(id)) return;
    const int64_t length = tree_.Length(id);
    if (operation == kFork && tree_.lists().size() < 12) {
      tree_.Fork(id, next_id_++, length - OftenSmall(length));
    } else if (operation == kBranch && tree_.lists().size() < 12 && !tree_.in_forward() &&
               length > 0) {
      // A rejected draft: the child goes another way from the token before. Many of these crowd one
      // page range.
      tree_.Fork(id, next_id_++, length - 1);
      BeginBatch({{next_id_ - 1, 2}});
    } else if (operation == kPop) {
      tree_.Pop(id, OftenSmall(length));
    } else if (operation == kRemove) {
      tree_.Remove(id);
    }
  }

  void Begin() {
    std::vector<BlockTreeDriver::Item> batch;
    for (const auto& [id, list] : tree_.lists()) {
      if (random_.Below(2) == 0) batch.push_back({id, 1 + OftenSmall(20)});
    }
    if (batch.empty()) return;
    const size_t middle = static_cast<size_t>(random_.Below(static_cast<int64_t>(batch.size())));
    std::rotate(batch.begin(), batch.begin() + static_cast<int64_t>(middle), batch.end());
    BeginBatch(batch);
  }

  void BeginBatch(const std::vector<BlockTreeDriver::Item>& batch) {
    if (!tree_.Begin(batch)) return;
    for (const ForwardMember& member : tree_.plan().members) {
      consolidations_ += member.append.copies();
    }
  }

  void Finish() {
    if (!tree_.in_forward()) return;
    if (random_.Below(3) == 0) {
      tree_.Abort();
    } else {
      tree_.End();
    }
  }

  BlockTreeDriver tree_;
  RandomSequence random_;
  int64_t weights_[kOperationCount];
  int64_t next_id_ = 0;
  int64_t consolidations_ = 0;
};

TEST(BlockTree, RandomWalksKeepTokensAndInvariants) {
  const std::vector<std::vector<BlockTreeDriver::Pages>> shapes = {{{1, 300}},
                                                                   {{3, 150}},
                                                                   {{4, 100}},
                                                                   {{16, 60}},
                                                                   {{32, 40}},
                                                                   {{4, 120}, {16, 60}},
                                                                   {{3, 160}, {5, 120}, {8, 80}}};
  int64_t consolidations = 0;
  for (uint64_t seed = 0; seed < 210; ++seed) {
    const size_t shape = seed % shapes.size();
    Walk walk(shapes[shape], seed);
    ASSERT_EQ(walk.Run(150), "") << "seed " << seed;
    consolidations += walk.consolidations();
  }
  EXPECT_GT(consolidations, 10);  // else the walks miss the rarest path
}

}  // namespace
}  // namespace quire
