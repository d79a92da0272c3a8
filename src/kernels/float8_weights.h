// Weights as codes of 8-bit floating point (e4m3) with scales, as the kernels read them. They stay
// one byte each in memory: a kernel widens some of them at a time to the type that they stand for,
// and computes with these as with weights that are stored so.
#ifndef QUIRE_KERNELS_FLOAT8_WEIGHTS_H_
#define QUIRE_KERNELS_FLOAT8_WEIGHTS_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/linear_layout.h"
#include "quire/seams.h"
#include "quire/tensor.h"

namespace quire {

// w = code scale, in float32, rounded once to the weights' type. Packed codes, blocks of
// kOutputBlock outputs one after the other, outputs from n on zero: [k rounded up to even / 2]
// [32 outputs][2]; an odd k has a zero beside its last. Every code is a number.
struct Float8Scales {
  // [block of outputs][segment of inputs][1, or one of each of the 32 outputs]. Null: the weights
  // are no codes.
  const float* data = nullptr;
  int64_t segment_inputs = 0;  // the inputs that share a scale; the last segment may have fewer
  bool of_outputs = false;

  constexpr int64_t lanes() const { return of_outputs ? kOutputBlock : 1; }
};

// 0x7F and 0xFF are NaN.
constexpr bool IsFloat8Number(uint8_t code) { return (code & 0x7F) != 0x7F; }

// Scales are at most this in magnitude: the greatest code is a float32 number with each.
inline constexpr float kFloat8ScaleMax = 0x1p119F;

constexpr int64_t PackedFloat8BlockBytes(int64_t k) { return PackedBlockElements(DType::kBF16, k); }
constexpr size_t PackedFloat8Bytes(int64_t n, int64_t k) {
  return static_cast<size_t>(OutputBlocks(n) * PackedFloat8BlockBytes(k));
}
constexpr int64_t Float8Segments(const Float8Scales& scales, int64_t k) {
  return (k + scales.segment_inputs - 1) / scales.segment_inputs;
}
constexpr int64_t Float8ScaleCount(const Float8Scales& scales, int64_t n, int64_t k) {
  return OutputBlocks(n) * Float8Segments(scales, k) * scales.lanes();
}

// Packs the codes of n rows of k, wherever each lies, into memory that is zero before. Returns the
// first row with a code that is not a number (0x7F, 0xFF), or -1: there is none.
int64_t PackFloat8(std::span<const uint8_t* const> rows, int64_t k, uint8_t* packed,
                   ParallelRunner& runner);

}  // namespace quire

#endif  // QUIRE_KERNELS_FLOAT8_WEIGHTS_H_
