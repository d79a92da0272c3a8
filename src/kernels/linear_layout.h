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

}  // namespace quire

#endif  // QUIRE_KERNELS_LINEAR_LAYOUT_H_
