#include "kv/pages/node_heaps.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <vector>

#include "base/random.h"

namespace quire {
namespace {

TEST(NodeHeaps, TheRootHasTheLeastKeyHoweverNodesComeAndGo) {
  constexpr int32_t kNodes = 300;
  constexpr size_t kHeaps = 3;
  NodeHeaps heaps;
  heaps.Reserve(kNodes);
  std::vector<int32_t> roots(kHeaps, NodeHeaps::kNone);
  std::vector<std::map<int32_t, int64_t>> model(kHeaps);  // [heap]: node to key
  RandomSequence random(7, 0);
  for (int step = 0; step < 20000; ++step) {
    const int32_t node = static_cast<int32_t>(random.Below(kNodes));
    size_t in = kHeaps;
    for (size_t h = 0; h < kHeaps; ++h) {
      if (model[h].count(node) != 0) in = h;
    }
    ASSERT_EQ(heaps.Contains(node), in < kHeaps);
    if (in < kHeaps) {
      ASSERT_EQ(heaps.key(node), model[in][node]);
      heaps.Remove(&roots[in], node);
      model[in].erase(node);
    } else {
      in = static_cast<size_t>(random.Below(kHeaps));
      const int64_t key = static_cast<int64_t>(random.Below(40)) - 20;
      heaps.Insert(&roots[in], node, key);
      model[in][node] = key;
    }
    for (size_t h = 0; h < kHeaps; ++h) {
      ASSERT_EQ(roots[h] == NodeHeaps::kNone, model[h].empty());
      if (model[h].empty()) continue;
      const auto least =
          std::min_element(model[h].begin(), model[h].end(),
                           [](const auto& a, const auto& b) { return a.second < b.second; });
      ASSERT_EQ(heaps.key(roots[h]), least->second);
      ASSERT_EQ(model[h].count(roots[h]), 1U);
    }
  }
  heaps.Clear();  // gives the memory back, too
  heaps.Reserve(kNodes);
  for (int32_t node = 0; node < kNodes; ++node) ASSERT_FALSE(heaps.Contains(node));
}

// In whatever order nodes come and go, none of them costs more than the height of the heap's right
// path, twice.
TEST(NodeHeaps, EveryStepIsLogarithmic) {
  constexpr int32_t kNodes = 1 << 16;
  constexpr int64_t kStepsMax = 2 * 16 + 4;
  for (const int32_t stride : {1, kNodes - 1, 40503}) {  // odd: all nodes come
    NodeHeaps heaps;
    heaps.Reserve(kNodes);
    int32_t root = NodeHeaps::kNone;
    const auto expect_few = [&](auto&& change) {
      const int64_t before = heaps.steps();
      change();
      ASSERT_LE(heaps.steps() - before, kStepsMax);
    };
    for (int32_t i = 0; i < kNodes; ++i)
      expect_few([&] { heaps.Insert(&root, i, i % 3 == 0 ? i : -i); });
    for (int64_t i = 0; i < kNodes; ++i) {
      const auto node = static_cast<int32_t>(i * stride % kNodes);
      expect_few([&] { heaps.Remove(&root, node); });
    }
    ASSERT_EQ(root, NodeHeaps::kNone);
  }
}

}  // namespace
}  // namespace quire
