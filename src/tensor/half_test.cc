#include "tensor/half.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>

namespace quire {
namespace {

uint32_t Bits(float value) { return std::bit_cast<uint32_t>(value); }

// The value that sign, exponent and fraction of an IEEE format stand for, from its definition.
double Value(uint32_t bits, int exponent_bits, int fraction_bits) {
  const int exponent = static_cast<int>(bits >> fraction_bits & ((1u << exponent_bits) - 1));
  const double fraction = bits & ((1u << fraction_bits) - 1);
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const double sign = bits >> (exponent_bits + fraction_bits) != 0 ? -1 : 1;
  if (exponent == 0) return sign * std::ldexp(fraction, 1 - bias - fraction_bits);
  return sign * std::ldexp(fraction + (1 << fraction_bits), exponent - bias - fraction_bits);
}

TEST(F16, WideningIsExactForEveryNumber) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float wide = F16ToF32(static_cast<uint16_t>(bits));
    if ((bits & 0x7C00) != 0x7C00) {
      ASSERT_EQ(wide, Value(bits, 5, 10)) << bits;
      ASSERT_EQ(std::signbit(wide), bits >> 15 != 0);
    } else if ((bits & 0x3FF) == 0) {
      ASSERT_EQ(wide, bits >> 15 ? -INFINITY : INFINITY);
    } else {
      ASSERT_TRUE(std::isnan(wide));
    }
  }
}

// For each pair of neighbours: the middle goes to the even one, the floats beside the middle to the
// nearer one.
template <typename Narrow, typename Widen>
void CheckRounding(uint32_t infinity, Narrow narrow, Widen widen, double beyond_largest) {
  for (uint32_t low = 0; low < infinity; ++low) {
    const double above =
        low + 1 == infinity ? beyond_largest : widen(static_cast<uint16_t>(low + 1));
    const double middle = (static_cast<double>(widen(static_cast<uint16_t>(low))) + above) / 2;
    const float mid = static_cast<float>(middle);
    ASSERT_EQ(mid, middle);
    const uint32_t even = low % 2 == 0 ? low : low + 1;
    ASSERT_EQ(narrow(widen(static_cast<uint16_t>(low))), low);
    ASSERT_EQ(narrow(mid), even) << low;
    ASSERT_EQ(narrow(std::nextafter(mid, 0.0f)), low) << low;
    ASSERT_EQ(narrow(std::nextafter(mid, INFINITY)), low + 1) << low;
    ASSERT_EQ(narrow(-mid), even | 0x8000) << low;
  }
}

TEST(F16, NarrowingRoundsToNearestEvenForEveryNumber) {
  CheckRounding(0x7C00, F32ToF16, F16ToF32, 65536.0);
  EXPECT_EQ(F32ToF16(std::numeric_limits<float>::max()), 0x7C00);
  EXPECT_EQ(F32ToF16(std::numeric_limits<float>::denorm_min()), 0);
}

TEST(Bf16, NarrowingRoundsToNearestEvenForEveryNumber) {
  for (uint32_t bits = 0; bits < 0x7F80; ++bits) {
    const uint32_t wide = bits << 16;
    const uint32_t even = bits % 2 == 0 ? bits : bits + 1;
    ASSERT_EQ(Bits(Bf16ToF32(static_cast<uint16_t>(bits))), wide);
    ASSERT_EQ(F32ToBf16(std::bit_cast<float>(wide)), bits);
    ASSERT_EQ(F32ToBf16(std::bit_cast<float>(wide | 0x7FFF)), bits);
    ASSERT_EQ(F32ToBf16(std::bit_cast<float>(wide | 0x8000)), even);
    ASSERT_EQ(F32ToBf16(std::bit_cast<float>(wide | 0x8001)), bits + 1);
    ASSERT_EQ(F32ToBf16(std::bit_cast<float>(wide | 0x80008000)), even | 0x8000);
  }
}

TEST(Half, NanStaysNanAndInfinityInfinity) {
  // The second has its only fraction bits where narrowing drops them.
  for (const uint32_t bits : {0x7FC00000u, 0x7F800001u, 0xFFFFFFFFu}) {
    const float nan = std::bit_cast<float>(bits);
    EXPECT_TRUE(std::isnan(F16ToF32(F32ToF16(nan))));
    EXPECT_TRUE(std::isnan(Bf16ToF32(F32ToBf16(nan))));
  }
  EXPECT_EQ(F16ToF32(F32ToF16(-INFINITY)), -INFINITY);
  EXPECT_EQ(Bf16ToF32(F32ToBf16(-INFINITY)), -INFINITY);
}

}  // namespace
}  // namespace quire
