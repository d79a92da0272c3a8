// Conversions between float32 and the 16-bit formats, one number at a time, on bits alone: they do
// not depend on the float environment. Narrowing rounds to nearest even; NaN stays NaN (quieted).
#ifndef QUIRE_TENSOR_HALF_H_
#define QUIRE_TENSOR_HALF_H_

#include <bit>
#include <cstdint>

namespace quire {

constexpr float Bf16ToF32(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

constexpr uint16_t F32ToBf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const bool is_nan = (bits & 0x7FFFFFFF) > 0x7F800000;
  if (is_nan) return static_cast<uint16_t>(bits >> 16 | 0x40);
  // Adding half a unit less one, plus the last kept bit, carries exactly when nearest-even rounds
  // up.
  return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

constexpr float F16ToF32(uint16_t bits) {
  const uint32_t sign = uint32_t{bits & 0x8000u} << 16;
  const uint32_t exponent = bits >> 10 & 0x1F;
  const uint32_t fraction = bits & 0x3FF;
  if (exponent == 0x1F) {  // infinite or NaN
    const uint32_t quiet = fraction != 0 ? 0x400000 : 0;
    return std::bit_cast<float>(sign | 0x7F800000 | fraction << 13 | quiet);
  }
  if (exponent != 0) return std::bit_cast<float>(sign | (exponent + 112) << 23 | fraction << 13);
  if (fraction == 0) return std::bit_cast<float>(sign);
  // Subnormal: the fraction times 2^-24, whose leading bit becomes the implicit one.
  const int shift = std::countl_zero(fraction) - 21;
  return std::bit_cast<float>(sign | static_cast<uint32_t>(113 - shift) << 23 |
                              (fraction << shift & 0x3FF) << 13);
}

constexpr uint16_t F32ToF16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = bits >> 16 & 0x8000;
  const uint32_t magnitude = bits & 0x7FFFFFFF;
  if (magnitude > 0x7F800000) {
    return static_cast<uint16_t>(sign | 0x7E00 | (magnitude >> 13 & 0x3FF));
  }
  if (magnitude >= 0x47800000) return static_cast<uint16_t>(sign | 0x7C00);  // at least 2^16
  if (magnitude >= 0x38800000) {                                             // at least 2^-14
    const uint32_t rounded = magnitude + 0xFFF + (magnitude >> 13 & 1);
    return static_cast<uint16_t>(sign | ((rounded >> 13) - (uint32_t{112} << 10)));
  }
  if (magnitude <= 0x33000000)
    return static_cast<uint16_t>(sign);  // at most 2^-25: a tie goes to 0
  // Subnormal result: units of 2^-24.
  const int shift = 126 - static_cast<int>(magnitude >> 23);
  const uint32_t significand = (magnitude & 0x7FFFFF) | 0x800000;
  const uint32_t kept = significand >> shift;
  const uint32_t rest = significand & ((uint32_t{1} << shift) - 1);
  const uint32_t half = uint32_t{1} << (shift - 1);
  const uint32_t up = rest > half || (rest == half && (kept & 1) != 0) ? 1 : 0;
  return static_cast<uint16_t>(sign | (kept + up));
}

}  // namespace quire

#endif  // QUIRE_TENSOR_HALF_H_
