// Quantised keys and values: the numbers of one token and head share a float32 scale, value = code
// * scale, and the largest of them is the largest code. A scale has 16 significant bits, so that
// code * scale is exact in float32 and quantising such numbers again gives the same codes and
// scale. A head with an infinity or NaN has the scale NaN and codes 0: all that see it become NaN.
#ifndef QUIRE_KERNELS_KV_QUANTISE_H_
#define QUIRE_KERNELS_KV_QUANTISE_H_

#include <bit>
#include <cstdint>
#include <limits>

#include "quire/tensor.h"
#include "tensor/float8.h"

namespace quire {

inline constexpr float kI8Max = 127.0F;  // symmetric: -128 is not used

// The greatest magnitude of a head's numbers, and whether all are finite.
class HeadRange {
 public:
  void Add(float x) {
    const float magnitude = x < 0 ? -x : x;
    if (magnitude > greatest_) greatest_ = magnitude;
    sum_ += x * 0.0F;  // NaN if x is not finite
  }
  // REQUIRES: IsQuantised(dtype).
  float Scale(DType dtype) const {
    if (!(sum_ == 0.0F)) return std::numeric_limits<float>::quiet_NaN();
    const float scale = greatest_ / (dtype == DType::kI8 ? kI8Max : kF8E4M3Max);
    const uint32_t bits = std::bit_cast<uint32_t>(scale);
    return std::bit_cast<float>((bits + 0x7F + (bits >> 8 & 1)) & 0xFFFFFF00U);
  }

 private:
  float greatest_ = 0.0F;
  float sum_ = 0.0F;
};

// Nearest code, ties to even.
inline uint8_t QuantiseElement(DType dtype, float x, float scale) {
  if (!(scale > 0.0F)) return 0;  // NaN, or all numbers are 0 or next to it
  const float y = x / scale;
  if (dtype == DType::kF8E4M3) return F32ToF8E4M3(y);
  const float clamped = y > kI8Max ? kI8Max : y < -kI8Max ? -kI8Max : y;
  const float rounded = (clamped + 12582912.0F) - 12582912.0F;  // 1.5 * 2^23: to integer, even
  return static_cast<uint8_t>(static_cast<int8_t>(rounded));
}

inline float CodeToF32(DType dtype, uint8_t code) {
  return dtype == DType::kF8E4M3 ? F8E4M3ToF32(code)
                                 : static_cast<float>(static_cast<int8_t>(code));
}

}  // namespace quire

#endif  // QUIRE_KERNELS_KV_QUANTISE_H_
