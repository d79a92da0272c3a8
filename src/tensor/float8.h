// Conversions between float32 and float8 e4m3 (4 bits of exponent, bias 7, 3 of fraction, no
// infinities), one number at a time, on bits alone: they do not depend on the float environment.
#ifndef QUIRE_TENSOR_FLOAT8_H_
#define QUIRE_TENSOR_FLOAT8_H_

#include <bit>
#include <cstdint>

namespace quire {

inline constexpr float kF8E4M3Max = 448.0F;

// The codes 0x7F and 0xFF, NaN in the format, are read as what their bits would be, +-480: nothing
// here makes them, and so every code is finite.
constexpr float F8E4M3ToF32(uint8_t code) {
  const uint32_t sign = uint32_t{code & 0x80u} << 24;
  const uint32_t exponent = code >> 3 & 0xF;
  const uint32_t fraction = code & 7;
  if (exponent != 0) return std::bit_cast<float>(sign | (exponent + 120) << 23 | fraction << 20);
  if (fraction == 0) return std::bit_cast<float>(sign);
  // Subnormal: the fraction times 2^-9, whose leading bit becomes the implicit one.
  const int shift = std::countl_zero(fraction) - 28;
  return std::bit_cast<float>(sign | static_cast<uint32_t>(121 - shift) << 23 |
                              (fraction << shift & 7) << 20);
}

// Nearest, ties to even; beyond the largest number, the largest. REQUIRES: no NaN.
constexpr uint8_t F32ToF8E4M3(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = bits >> 24 & 0x80;
  const uint32_t magnitude = bits & 0x7FFFFFFF;
  if (magnitude >= 0x43E00000) return static_cast<uint8_t>(sign | 0x7E);  // at least 448
  if (magnitude >= 0x3C800000) {                                          // at least 2^-6
    const uint32_t rounded = magnitude + 0x7FFFF + (magnitude >> 20 & 1);
    return static_cast<uint8_t>(sign | ((rounded >> 20) - (uint32_t{120} << 3)));
  }
  if (magnitude <= 0x3A800000) return static_cast<uint8_t>(sign);  // at most 2^-10: a tie goes to 0
  // Subnormal result: units of 2^-9.
  const int shift = 141 - static_cast<int>(magnitude >> 23);
  const uint32_t significand = (magnitude & 0x7FFFFF) | 0x800000;
  const uint32_t kept = significand >> shift;
  const uint32_t rest = significand & ((uint32_t{1} << shift) - 1);
  const uint32_t half = uint32_t{1} << (shift - 1);
  const uint32_t up = rest > half || (rest == half && (kept & 1) != 0) ? 1 : 0;
  return static_cast<uint8_t>(sign | (kept + up));
}

}  // namespace quire

#endif  // QUIRE_TENSOR_FLOAT8_H_
