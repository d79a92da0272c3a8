// Models whose threads belong to NUMA nodes that this machine need not have: what is placed where,
// and that logits have the bits of one node. src/engine/numa_engine_test.cc has real nodes.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <memory>
#include <vector>

#include "base/testing/fake_numa_calls.h"
#include "base/thread_pool.h"
#include "kernels/backend.h"
#include "model/testing/test_gguf.h"
#include "model/testing/test_model.h"
#include "model/weights/weights.h"

namespace quire {
namespace {

class NumaModel : public ::testing::Test {
 protected:
  // A prompt of several blocks of rows, then a token alone.
  std::vector<std::vector<float>> LogitsOf(const TestFolder& folder, DType dtype,
                                           const std::string& path,
                                           const std::shared_ptr<ParallelRunner>& runner) {
    const auto model = LoadTestModel(folder, dtype, path, runner);
    const auto cache = CreateTestCache(*model, {.kernel_path = path, .runner = runner});
    weight_bytes_.push_back(model->info().weight_bytes);
    const auto tokens = RandomTokens(300, model->info().vocab_size, 5);
    std::vector<std::vector<float>> logits;
    logits.push_back(RunForward(*model, *cache, 0, tokens));
    logits.push_back(RunForward(*model, *cache, 0, std::span(tokens).first(1)));
    return logits;
  }

  void ExpectSameBits(const TestFolder& folder, DType dtype) {
    for (const std::string& path : KernelPaths()) {
      SCOPED_TRACE(path);
      const auto one = LogitsOf(folder, dtype, path, CreateThreadPool(2).value());
      for (const int nodes : {2, 3}) {
        calls_ = std::make_shared<FakeNumaCalls>();
        const auto runner = CreateNumaThreadPool(4, NodesOfEqualSize(nodes, 2), calls_).value();
        EXPECT_TRUE(LogitsOf(folder, dtype, path, runner) == one) << nodes << " nodes";
        EXPECT_TRUE(Placed(1)) << "weights";
        EXPECT_TRUE(Placed(static_cast<size_t>(nodes))) << "KV pages";
      }
    }
    EXPECT_EQ(*std::ranges::max_element(weight_bytes_), *std::ranges::min_element(weight_bytes_));
  }

  // Whether some memory was placed on `nodes` nodes.
  bool Placed(size_t nodes) const {
    return std::ranges::any_of(calls_->placed(), [&](const FakeNumaCalls::Placed& placed) {
      return placed.nodes.size() == nodes;
    });
  }

  std::shared_ptr<FakeNumaCalls> calls_;
  std::vector<int64_t> weight_bytes_;
};

TEST_F(NumaModel, GivesTheBitsOfOneNode) {
  const TestFolder folder;
  WriteTestModel(folder, {.dtype = DType::kBF16});
  for (const DType dtype : {DType::kF32, DType::kBF16}) ExpectSameBits(folder, dtype);
}

// What a file maps lies where it was read first: the nodes get a copy, as large as the mapped one.
TEST_F(NumaModel, CopiesPackedWeightsToTheirNodes) {
  const TestFolder folder;
  WriteTestModel(folder, {.dtype = DType::kBF16});
  const TestFolder packed;
  PackTestModel(folder, DType::kBF16, packed);
  ExpectSameBits(packed, DType::kBF16);
}

TEST_F(NumaModel, GivesTheBitsOfOneNodeWithQuantisedWeights) {
  const TestFolder folder;
  WriteGgufModel(folder,
                 {.hidden_size = 256,
                  .intermediate_size = 512,
                  .num_hidden_layers = 1,
                  .num_attention_heads = 4,
                  .num_key_value_heads = 2,
                  .head_dim = 64},
                 std::array{WeightFormat::kQ4_K, WeightFormat::kQ8_0, WeightFormat::kQ6_K});
  ExpectSameBits(folder, DType::kBF16);
  const TestFolder packed;
  PackTestModel(folder, DType::kBF16, packed);
  ExpectSameBits(packed, DType::kBF16);
}

// Parts of a fused matrix are multiplied in one call, whose outputs the nodes divide.
TEST_F(NumaModel, PartsOfAMatrixLieWhereTheirOutputsAreTaken) {
  constexpr size_t kMiB = size_t{1} << 20;
  calls_ = std::make_shared<FakeNumaCalls>();
  const auto runner = CreateNumaThreadPool(4, NodesOfEqualSize(2, 2), calls_).value();
  WeightMemory memory(runner->numa_nodes());
  const auto whole = memory.Take(16 * kMiB).value();
  const auto first = memory.Take(24 * kMiB, {.begin = 0, .end = 6, .count = 8}).value();
  const auto second = memory.Take(8 * kMiB, {.begin = 6, .end = 8, .count = 8}).value();
  const auto placed = calls_->placed();
  ASSERT_EQ(placed.size(), 5);
  const auto expect = [&](size_t index, const std::byte* begin, size_t bytes, int node) {
    EXPECT_EQ(placed[index].memory, begin) << index;
    EXPECT_EQ(placed[index].bytes, bytes) << index;
    EXPECT_EQ(placed[index].nodes, std::vector<int>{node}) << index;
  };
  expect(0, whole.get(), 8 * kMiB, 0);
  expect(1, whole.get() + 8 * kMiB, 8 * kMiB, 1);
  expect(2, first.get(), 16 * kMiB, 0);
  expect(3, first.get() + 16 * kMiB, 8 * kMiB, 1);
  expect(4, second.get(), 8 * kMiB, 1);
}

TEST_F(NumaModel, WhereTheSystemRefusesItComputesTheSame) {
  const TestFolder folder;
  WriteTestModel(folder, {});
  const auto one = LogitsOf(folder, DType::kF32, "", CreateThreadPool(2).value());
  calls_ = std::make_shared<FakeNumaCalls>();
  calls_->place_error = 1;
  const auto runner = CreateNumaThreadPool(4, NodesOfEqualSize(2, 2), calls_).value();
  EXPECT_TRUE(LogitsOf(folder, DType::kF32, "", runner) == one);
  EXPECT_EQ(calls_->placed().size(), 1);
}

}  // namespace
}  // namespace quire
