// What all paths share about linear layers: the cut of the inputs, which is part of the arithmetic,
// and where a packed weight lies.
#ifndef QUIRE_KERNELS_LINEAR_LAYOUT_H_
#define QUIRE_KERNELS_LINEAR_LAYOUT_H_

#include <cstddef>
#include <cstdint>

#include "quire/tensor.h"

namespace quire {

// Inputs that share one float32 accumulator. Changing it changes bits (docs/exactness.md).
inline constexpr int64_t kMaxInputBlock = 1024;
inline constexpr int64_t kSmallInputBlock = 512;
constexpr int64_t InputBlockSize(int64_t k) {
  return k > kMaxInputBlock ? kMaxInputBlock : kSmallInputBlock;
}

// Outputs that lie side by side: two AVX-512 registers, so that one row alone keeps two chains of
// fma going and a block of rows needs few loads of weights per product.
inline constexpr int64_t kOutputBlock = 32;

// Packed weights, blocks of kOutputBlock outputs one after the other; outputs from n on are zero.
//   bfloat16: [k rounded up to even / 2][32 outputs][2], the shape of bf16 dot products; an odd k
//   has a zero beside its last float32, float16: [k][32 outputs]
constexpr int64_t PackedInputs(DType dtype, int64_t k) {
  return dtype == DType::kBF16 ? (k + 1) / 2 * 2 : k;
}
constexpr int64_t OutputBlocks(int64_t n) { return (n + kOutputBlock - 1) / kOutputBlock; }
constexpr int64_t PackedBlockElements(DType dtype, int64_t k) {
  return PackedInputs(dtype, k) * kOutputBlock;
}
// The offset of the weight of output n and input k, from the start of the output's block.
constexpr int64_t PackedOffset(DType dtype, int64_t n, int64_t k) {
  if (dtype != DType::kBF16) return k * kOutputBlock + n % kOutputBlock;
  return k / 2 * 2 * kOutputBlock + n % kOutputBlock * 2 + k % 2;
}

// Blocks of outputs of one task, at most `most`, where `row_blocks` tasks share them: enough tasks
// to even out threads of different speed, each still a long run of memory. Fewer blocks where the
// longest worker would take over a tenth longer than the mean of all.
constexpr int64_t BlocksOfTask(int64_t output_blocks, int64_t row_blocks, int64_t worker_count,
                               int64_t most) {
  constexpr int64_t kTasksPerWorker = 8;
  const int64_t total = output_blocks * row_blocks;
  const int64_t wanted = kTasksPerWorker * worker_count;
  int64_t blocks = (total + wanted - 1) / wanted;
  if (blocks > most) blocks = most;
  if (blocks > output_blocks) blocks = output_blocks;
  for (; blocks > 1; --blocks) {
    const int64_t tasks = (output_blocks + blocks - 1) / blocks * row_blocks;
    const int64_t rounds = (tasks + worker_count - 1) / worker_count;
    if (10 * rounds * blocks * worker_count <= 11 * total) break;
  }
  return blocks;
}

// Task `index` of all row tasks times all output tasks. Rows go first, whose inputs stay in the
// cache, unless NUMA nodes divide the outputs: then all tasks of an output belong to one node.
struct LinearTaskPlace {
  int64_t rows;
  int64_t outputs;
};
constexpr LinearTaskPlace LinearTaskAt(int64_t index, int64_t row_tasks, int64_t output_tasks,
                                       bool along_outputs) {
  if (along_outputs) return {index % row_tasks, index / row_tasks};
  return {index / output_tasks, index % output_tasks};
}

}  // namespace quire

#endif  // QUIRE_KERNELS_LINEAR_LAYOUT_H_
