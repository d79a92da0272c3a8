#include "kernels/float8_weights.h"

#include <algorithm>
#include <atomic>

#include "base/numa_nodes.h"

namespace quire {
namespace {

// One row into its column of a block; whether all codes are numbers.
bool PackFloat8Row(const uint8_t* codes, int64_t k, uint8_t* column) {
  bool are_numbers = true;
  for (int64_t i = 0; i < k; ++i) {
    are_numbers &= IsFloat8Number(codes[i]);
    column[i / 2 * 2 * kOutputBlock + i % 2] = codes[i];
  }
  return are_numbers;
}

}  // namespace

int64_t PackFloat8(std::span<const uint8_t* const> rows, int64_t k, uint8_t* packed,
                   ParallelRunner& runner) {
  const auto n = static_cast<int64_t>(rows.size());
  std::atomic<int64_t> damaged = n;
  Along(runner).ParallelFor(OutputBlocks(n), [&](int64_t block, int) {
    const int64_t first = block * kOutputBlock;
    uint8_t* const to = packed + block * PackedFloat8BlockBytes(k);
    for (int64_t row = first; row < std::min(n, first + kOutputBlock); ++row) {
      const uint8_t* const codes = rows[static_cast<size_t>(row)];
      if (PackFloat8Row(codes, k, to + 2 * (row - first))) continue;
      int64_t before = damaged.load();
      while (row < before && !damaged.compare_exchange_weak(before, row)) {
      }
    }
  });
  return damaged.load() == n ? -1 : damaged.load();
}

}  // namespace quire
