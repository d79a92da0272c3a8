#include "tensor/layer_runs.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace quire {
namespace {

// Where a run begins in the memory, and its length.
using Runs = std::vector<std::pair<int64_t, int64_t>>;

// Three rows of two heads: keys of four bytes from 0 on, values of three from 100 on, the keys'
// scales from 200 on.
class LayerRunsTest : public testing::Test {
 protected:
  Runs Of(const ReceivePart& part) const {
    Runs runs;
    ForEachRun(rows_, part, [&](std::span<const std::byte> run) {
      runs.emplace_back(run.data() - memory_.data(), std::ssize(run));
    });
    return runs;
  }

  std::vector<std::byte> memory_ = std::vector<std::byte>(300);
  const LayerKV rows_{.k = TensorView(memory_.data(), DType::kI8, {3, 2, 4}),
                      .v = TensorView(memory_.data() + 100, DType::kI8, {3, 2, 3}),
                      .k_scale = TensorView(memory_.data() + 200, DType::kF32, {3, 2})};
};

TEST_F(LayerRunsTest, AllHeadsMakeOneRunOfEachTensor) {
  EXPECT_EQ(Of({0, 3, 0, 2}), (Runs{{0, 24}, {100, 18}, {200, 24}}));
  EXPECT_EQ(Of({1, 2, 0, 2}), (Runs{{8, 16}, {106, 12}, {208, 16}}));
}

TEST_F(LayerRunsTest, SomeHeadsMakeARunOfEachRow) {
  EXPECT_EQ(Of({1, 2, 1, 1}), (Runs{{12, 4}, {20, 4}, {109, 3}, {115, 3}, {212, 4}, {220, 4}}));
}

}  // namespace
}  // namespace quire
