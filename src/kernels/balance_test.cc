// How equally the work of a call is divided among many threads, simulated from its tasks: each goes
// to the thread that is free first, as in the pool. Costs are those that the schedule knows
// (AttentionUnit::cost); folds, less than a hundredth, are left out.
//
// The longest thread may take a tenth longer than the mean of all. What is never divided is a
// segment of a block of rows of one kv head, and a block of outputs for a block of rows: where a
// thread has fewer than ten of these, the longest may have one more than the mean.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels/attention_schedule.h"
#include "kernels/linear_layout.h"

namespace quire {
namespace {

constexpr int kThreadCounts[] = {4, 16, 64};
constexpr int64_t kAtomsOfThread = 10;

// The end of the last of the tasks.
int64_t EndOf(const std::vector<int64_t>& tasks, int threads) {
  std::vector<int64_t> ends(static_cast<size_t>(threads), 0);
  for (const int64_t task : tasks) {
    std::pop_heap(ends.begin(), ends.end(), std::greater<>());
    ends.back() += task;
    std::push_heap(ends.begin(), ends.end(), std::greater<>());
  }
  return *std::ranges::max_element(ends);
}

struct Balance {
  int64_t longest = 0;  // the ends of all runs together
  int64_t total = 0;
  int64_t atoms = 0;
  int64_t largest_atom = 0;

  void AddRun(const std::vector<int64_t>& tasks, int threads) {
    longest += EndOf(tasks, threads);
    for (const int64_t task : tasks) total += task;
  }
  void Expect(int threads) const {
    const double mean = static_cast<double>(total) / threads;
    if (atoms >= kAtomsOfThread * threads) {
      EXPECT_LE(static_cast<double>(longest), 1.1 * mean) << longest / mean;
    } else {
      EXPECT_LE(static_cast<double>(longest),
                std::max(1.1 * mean, mean + static_cast<double>(largest_atom)))
          << longest / mean;
    }
  }
};

// A shape of bench/cases.py.
struct Shape {
  int kv_heads;
  int group;
  int64_t sequences;
  int64_t prefix;
  int64_t own;
  int64_t rows;
  int64_t max_depth = -1;  // of a tree of the new rows
  bool latent = false;

  std::string Name() const {
    return std::to_string(kv_heads) + " kv heads of " + std::to_string(group) + ", " +
           std::to_string(sequences) + "x(" + std::to_string(prefix) + "+" + std::to_string(own) +
           "), " + std::to_string(rows) + " rows";
  }
};

std::vector<Shape> Shapes() {
  constexpr int kHeads = 32;
  std::vector<Shape> shapes;
  // (a) decode: bfloat16, float32, int8 and fp8 are cut alike.
  for (const int64_t sequences : {1, 8, 32}) {
    for (const int64_t own : {512, 4096, 32768}) shapes.push_back({8, 4, sequences, 0, own, 1});
  }
  for (const int group : {1, 8}) {
    shapes.push_back({kHeads / group, group, 1, 0, 32768, 1});
    shapes.push_back({kHeads / group, group, 8, 0, 4096, 1});
    shapes.push_back({kHeads / group, group, 32, 0, 512, 1});
    shapes.push_back({kHeads / group, group, 32, 0, 4096, 1});
  }
  for (const int group : {1, 4, 8}) {
    for (const int64_t sequences : {8, 32}) {
      shapes.push_back({kHeads / group, group, sequences, 4096, 256, 1});
      shapes.push_back({kHeads / group, group, sequences, 0, 4352, 1});  // own copies
    }
  }
  // (b) prefill
  for (const int64_t rows : {512, 2048}) {
    for (const int64_t cached : {0, 4096}) shapes.push_back({8, 4, 1, 0, rows + cached, rows});
  }
  // (h) token trees, binary ones, and chains of as many rows
  for (const bool tree : {true, false}) {
    shapes.push_back({8, 4, 8, 0, 4096 + 64, 64, tree ? 6 : -1});
    for (const int64_t sequences : {1, 8, 32}) {
      shapes.push_back({8, 4, sequences, 0, 4096 + 4, 4, tree ? 2 : -1});
    }
  }
  // (i) latent
  for (const int heads : {16, 128}) {
    for (const int64_t sequences : {1, 8, 32}) {
      for (const int64_t own : {512, 4096, 32768}) {
        shapes.push_back({1, heads, sequences, 0, own, 1, -1, true});
      }
    }
  }
  return shapes;
}

int64_t AtomOf(const AttentionUnit& unit) {
  return unit.cost / (unit.segment_count() * unit.head_count());
}

Balance Simulate(const Shape& shape, int threads) {
  AttentionArgs args;
  args.pages.layout = {.dtype = DType::kBF16,
                       .num_kv_heads = shape.kv_heads,
                       .qk_head_dim = shape.latent ? 576 : 128,
                       .v_head_dim = shape.latent ? 512 : 128,
                       .page_size = 64,
                       .latent = shape.latent};
  args.num_qo_heads = shape.kv_heads * shape.group;
  const TokenTreeView tree{.max_depth = shape.max_depth};
  std::vector<AttentionSequence> sequences;
  std::vector<SharedSpan> shared;
  const int64_t shared_segments = shape.prefix / kSegmentPositions;
  for (int64_t s = 0; s < shape.sequences; ++s) {
    sequences.push_back({.first_row = args.row_count,
                         .row_count = shape.rows,
                         .base = shape.prefix + shape.own - shape.rows,
                         .runs = nullptr,
                         .run_count = 0,
                         .private_segment = shared_segments});
    if (shape.max_depth >= 0) sequences.back().tree = &tree;
    args.row_count += shape.rows;
  }
  if (shared_segments > 0) shared.push_back({0, shape.sequences, 0, shared_segments});
  args.sequences = sequences;
  args.shared = shared;
  const size_t bytes = AttentionSchedule::ScratchBytes(args.pages.layout, args.num_qo_heads,
                                                       args.row_count, shape.sequences, threads);
  const auto memory = std::make_unique_for_overwrite<std::byte[]>(bytes + 64);
  const auto address = reinterpret_cast<uintptr_t>(memory.get());
  AttentionSchedule schedule(args, threads, memory.get() + (64 - address % 64) % 64);
  Balance balance;
  const auto count = [&](const AttentionUnit& unit, int64_t segments) {
    balance.atoms += segments * unit.head_count();
    balance.largest_atom = std::max(balance.largest_atom, AtomOf(unit));
  };
  while (schedule.NextGroup()) {
    std::vector<int64_t> whole;
    for (const AttentionUnit& unit : schedule.whole_units()) {
      if (unit.segment_count() == 0) continue;
      whole.push_back(unit.cost);
      count(unit, unit.segment_count());
    }
    while (schedule.NextWave()) {
      std::vector<int64_t> tasks = std::exchange(whole, {});
      for (const AttentionPiece& piece : schedule.pieces()) {
        const AttentionUnit& unit =
            schedule.unit(schedule.parts()[static_cast<size_t>(piece.part)].unit);
        const int64_t segments = piece.segment_end - piece.segment_begin;
        tasks.push_back(unit.cost / unit.segment_count() * segments);
        count(unit, segments);
      }
      balance.AddRun(tasks, threads);
    }
    balance.AddRun(whole, threads);
  }
  return balance;
}

TEST(Balance, OfAttentionOverTheShapesOfTheBench) {
  for (const Shape& shape : Shapes()) {
    for (const int threads : kThreadCounts) {
      SCOPED_TRACE(shape.Name() + ", " + std::to_string(threads) + " threads");
      Simulate(shape, threads).Expect(threads);
    }
  }
}

// Where segments are enough, heads of a unit stay together: it reads them as they lie in memory.
TEST(Balance, TwoThreadsHaveUnitsOfAllHeads) {
  const Balance balance = Simulate({8, 4, 1, 0, 4096, 1}, 2);
  EXPECT_EQ(2 * balance.longest, balance.total);
}

TEST(Balance, OfLinearLayersOverTheModelsOfTheBench) {
  // Outputs of the fused matrices of models of 0.5B to 8B parameters, and of their heads.
  for (const int64_t outputs :
       {896, 1152, 2048, 2560, 4096, 6144, 9728, 11264, 28672, 32000, 128256, 151936}) {
    for (const int64_t row_blocks : {1, 5, 18}) {
      for (const int threads : kThreadCounts) {
        SCOPED_TRACE(std::to_string(outputs) + " outputs, " + std::to_string(row_blocks) +
                     " blocks of rows, " + std::to_string(threads) + " threads");
        const int64_t blocks = OutputBlocks(outputs);
        const int64_t most = row_blocks > 1 ? 8 : blocks;
        const int64_t of_task = BlocksOfTask(blocks, row_blocks, threads, most);
        ASSERT_GE(of_task, 1);
        ASSERT_LE(of_task, most);
        std::vector<int64_t> tasks;
        for (int64_t r = 0; r < row_blocks; ++r) {
          for (int64_t begin = 0; begin < blocks; begin += of_task) {
            tasks.push_back(std::min(of_task, blocks - begin));
          }
        }
        Balance balance{.atoms = blocks * row_blocks, .largest_atom = 1};
        balance.AddRun(tasks, threads);
        balance.Expect(threads);
      }
    }
  }
}

TEST(Balance, EachTaskOfALinearLayerIsDoneOnceInBothOrders) {
  for (const bool along_outputs : {false, true}) {
    std::vector<int> done(3 * 7);
    int64_t last_outputs = 0;
    for (int64_t index = 0; index < 21; ++index) {
      const LinearTaskPlace place = LinearTaskAt(index, 3, 7, along_outputs);
      ++done[static_cast<size_t>(place.rows * 7 + place.outputs)];
      EXPECT_TRUE(!along_outputs || place.outputs >= last_outputs);
      last_outputs = place.outputs;
    }
    EXPECT_EQ(done, std::vector<int>(21, 1));
  }
}

}  // namespace
}  // namespace quire
