// Printed plans of named situations, compared with testdata/<name>.txt. After a change of the plan
// that is meant, run this program with QUIRE_REWRITE_GOLDENS=1, read the difference, and explain it
// in the commit.
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "kv/testing/block_tree_driver.h"

namespace quire {
namespace {

using Batch = std::vector<BlockTreeDriver::Item>;

// The text of a plan, the forward left open.
std::string Plan(BlockTreeDriver& tree, const Batch& batch) {
  EXPECT_TRUE(tree.Begin(batch));
  EXPECT_EQ(tree.Check(), "");
  return tree.PlanText();
}

std::string PrefillAndDecode() {
  BlockTreeDriver tree({{.page_size = 16, .page_count = 20}});
  for (const int64_t id : {0, 1}) tree.Add(id);
  std::string text = Plan(tree, {{1, 18}, {0, 3}});
  tree.End();
  return text + Plan(tree, {{0, 1}, {1, 1}});
}

std::string ForkInMidPage() {
  BlockTreeDriver tree({{.page_size = 4, .page_count = 17}});
  tree.Add(0);
  tree.Append(0, 10);
  tree.Fork(0, 1, 6);
  std::string text = Plan(tree, {{1, 3}});
  tree.End();
  return text + Plan(tree, {{0, 1}, {1, 1}});
}

std::string ForkOfAFork() {
  BlockTreeDriver tree({{.page_size = 4, .page_count = 17}});
  tree.Add(0);
  tree.Append(0, 10);
  tree.Fork(0, 1, 6);
  tree.Append(1, 4);
  tree.Fork(1, 2, 9);
  return Plan(tree, {{0, 1}, {1, 1}, {2, 1}});
}

// Sharers of three prefixes at two depths, interleaved in the batch.
std::string InterleavedSharers() {
  BlockTreeDriver tree({{.page_size = 256, .page_count = 100}});
  tree.Add(0);
  tree.Append(0, 520);
  tree.Add(10);
  tree.Append(10, 300);
  tree.Fork(0, 1, 520);
  tree.Append(1, 280);
  for (const int64_t id : {2, 3}) tree.Fork(1, id, 800);
  tree.Fork(10, 11, 300);
  return Plan(tree, {{0, 1}, {10, 1}, {2, 1}, {1, 2}, {11, 1}, {3, 1}});
}

std::string FirstOfABatchGoesOnInPlace() {
  BlockTreeDriver tree({{.page_size = 16, .page_count = 20}});
  tree.Add(0);
  tree.Append(0, 5);
  for (const int64_t id : {1, 2}) tree.Fork(0, id, 5);
  return Plan(tree, {{2, 2}, {0, 1}, {1, 1}});
}

std::string Consolidation() {
  BlockTreeDriver tree({{.page_size = 16, .page_count = 20}});
  tree.Add(0);
  tree.Append(0, 4);
  for (int64_t i = 1; i <= 3; ++i) {
    tree.Fork(i - 1, i, 2 * i);
    tree.Append(i, 4);
  }
  tree.Fork(3, 4, 8);
  return Plan(tree, {{4, 3}, {3, 1}});
}

std::string TwoGroups() {
  BlockTreeDriver tree({{.page_size = 16, .page_count = 20}, {.page_size = 32, .page_count = 20}});
  tree.Add(0);
  tree.Append(0, 20);
  tree.Fork(0, 1, 18);
  return Plan(tree, {{1, 1}, {0, 15}});
}

std::string SmallPages() {
  std::string text;
  for (const int64_t page_size : {1, 3}) {
    BlockTreeDriver tree({{.page_size = page_size, .page_count = 40}});
    tree.Add(0);
    tree.Append(0, 5);
    tree.Fork(0, 1, 4);
    text += Plan(tree, {{1, 2}, {0, 2}});
  }
  return text;
}

struct Golden {
  const char* name;
  std::string (*plan)();
};

class PlanGolden : public testing::TestWithParam<Golden> {};

TEST_P(PlanGolden, IsAsPrinted) {
  const std::string path = std::string(QUIRE_KV_TESTDATA "/") + GetParam().name + ".txt";
  const std::string text = GetParam().plan();
  if (std::getenv("QUIRE_REWRITE_GOLDENS") != nullptr) {
    std::ofstream(path) << text;
    return;
  }
  std::stringstream golden;
  golden << std::ifstream(path).rdbuf();
  EXPECT_EQ(text, golden.str()) << path;
}

INSTANTIATE_TEST_SUITE_P(
    Plans, PlanGolden,
    testing::Values(Golden{"prefill_and_decode", PrefillAndDecode},
                    Golden{"fork_in_mid_page", ForkInMidPage},
                    Golden{"fork_of_a_fork", ForkOfAFork},
                    Golden{"interleaved_sharers", InterleavedSharers},
                    Golden{"first_of_a_batch_in_place", FirstOfABatchGoesOnInPlace},
                    Golden{"consolidation", Consolidation}, Golden{"two_groups", TwoGroups},
                    Golden{"small_pages", SmallPages}),
    [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace quire
