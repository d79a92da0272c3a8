// Blocks of numbers: the bits of tensor/half.h for every number of 16 bits, and rounding at every
// border between two of them.
#include "blend/half_blocks.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "base/float_environment.h"
#include "base/random.h"
#include "tensor/half.h"

namespace quire {
namespace {

float Widened(uint16_t bits, DType dtype) {
  return dtype == DType::kF16 ? F16ToF32(bits) : Bf16ToF32(bits);
}
uint16_t Narrowed(float value, DType dtype) {
  return dtype == DType::kF16 ? F32ToF16(value) : F32ToBf16(value);
}

void ExpectNarrowsAsOne(const std::vector<float>& values, DType dtype) {
  for (size_t begin = 0; begin < values.size(); begin += kBlendBlock) {
    const size_t count = std::min<size_t>(kBlendBlock, values.size() - begin);
    uint16_t bits[kBlendBlock];
    NarrowBlock(&values[begin], static_cast<int64_t>(count), dtype,
                reinterpret_cast<std::byte*>(bits));
    for (size_t i = 0; i < count; ++i) {
      const float value = values[begin + i];
      ASSERT_EQ(bits[i], Narrowed(value, dtype)) << value << " " << std::bit_cast<uint32_t>(value);
    }
  }
}

class HalfBlocks : public ::testing::TestWithParam<DType> {};

TEST_P(HalfBlocks, WidenEveryNumberAsOneAtATime) {
  const ScopedFloatEnvironment environment;
  for (uint32_t first = 0; first < 0x10000; first += kBlendBlock) {
    uint16_t bits[kBlendBlock];
    for (uint32_t i = 0; i < kBlendBlock; ++i) bits[i] = static_cast<uint16_t>(first + i);
    float values[kBlendBlock];
    WidenBlock(reinterpret_cast<const std::byte*>(bits), GetParam(), kBlendBlock, values);
    for (uint32_t i = 0; i < kBlendBlock; ++i) {
      const float expected = Widened(bits[i], GetParam());
      // A signalling half stays signalling until it is computed with.
      const uint32_t quiet = GetParam() == DType::kF16 && std::isnan(expected) ? 0x400000 : 0;
      ASSERT_EQ(std::bit_cast<uint32_t>(values[i]) | quiet, std::bit_cast<uint32_t>(expected))
          << bits[i];
    }
  }
}

TEST_P(HalfBlocks, NarrowAsOneAtATimeAtAndBesideEveryBorder) {
  const ScopedFloatEnvironment environment;
  std::vector<float> values;
  for (uint32_t bits = 0; bits < 0xFFFF; ++bits) {
    const float low = Widened(static_cast<uint16_t>(bits), GetParam());
    const auto next = static_cast<uint16_t>(bits + 1);
    const float middle = low / 2 + Widened(next, GetParam()) / 2;
    for (const uint32_t near : {std::bit_cast<uint32_t>(low), std::bit_cast<uint32_t>(middle)}) {
      for (const uint32_t step : {uint32_t{0}, uint32_t{1}, ~uint32_t{0}}) {
        values.push_back(std::bit_cast<float>(near + step));
      }
    }
  }
  ExpectNarrowsAsOne(values, GetParam());
}

TEST_P(HalfBlocks, NarrowAnyBitsAsOneAtATime) {
  const ScopedFloatEnvironment environment;
  RandomSequence random(5);
  std::vector<float> values(1 << 18);
  for (float& value : values) {
    value = std::bit_cast<float>(static_cast<uint32_t>(random.Below(int64_t{1} << 32)));
  }
  ExpectNarrowsAsOne(values, GetParam());
}

INSTANTIATE_TEST_SUITE_P(Formats, HalfBlocks, ::testing::Values(DType::kF16, DType::kBF16));

TEST(HalfBlocks, Float32IsCopied) {
  const float from[3] = {1.0F, -0.0F, 3e-42F};
  float values[3];
  WidenBlock(reinterpret_cast<const std::byte*>(from), DType::kF32, 3, values);
  EXPECT_EQ(std::memcmp(values, from, sizeof(from)), 0);
  float to[3];
  NarrowBlock(values, 3, DType::kF32, reinterpret_cast<std::byte*>(to));
  EXPECT_EQ(std::memcmp(to, from, sizeof(from)), 0);
}

}  // namespace
}  // namespace quire
