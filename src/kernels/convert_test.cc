#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "kernels/backend.h"

namespace quire {
namespace {

TEST(ConvertElements, RoundsToNearestEvenAndWidensExactly) {
  const std::vector<float> values = {0.0F,        -0.0F,  1.0F,     -2.5F,   1.00390625F,
                                     1.01171875F, 1e-30F, 65504.0F, INFINITY};
  std::vector<uint16_t> bits(values.size());
  std::vector<float> wide(values.size());
  const int64_t count = static_cast<int64_t>(values.size());
  ConvertElements(values.data(), DType::kF32, bits.data(), DType::kBF16, count);
  EXPECT_EQ(bits[4], 0x3F80);  // half way between 1 and the next: to even
  EXPECT_EQ(bits[5], 0x3F82);
  ConvertElements(bits.data(), DType::kBF16, wide.data(), DType::kF32, count);
  EXPECT_EQ(wide[3], -2.5F);
  EXPECT_TRUE(std::signbit(wide[1]));
  ConvertElements(values.data(), DType::kF32, bits.data(), DType::kF16, count);
  ConvertElements(bits.data(), DType::kF16, wide.data(), DType::kF32, count);
  EXPECT_EQ(wide, (std::vector<float>{0.0F, -0.0F, 1.0F, -2.5F, 1.00390625F, 1.01171875F, 0.0F,
                                      65504.0F, INFINITY}));
}

TEST(ConvertElements, BetweenTheNarrowTypes) {
  const std::vector<uint16_t> bf16 = {0x3F80, 0xC020, 0x7F00};  // 1, -2.5, 2^127
  std::vector<uint16_t> f16(3);
  ConvertElements(bf16.data(), DType::kBF16, f16.data(), DType::kF16, 3);
  EXPECT_EQ(f16, (std::vector<uint16_t>{0x3C00, 0xC100, 0x7C00}));
  std::vector<uint16_t> back(3);
  ConvertElements(f16.data(), DType::kF16, back.data(), DType::kBF16, 2);
  EXPECT_EQ(back[0], bf16[0]);
  EXPECT_EQ(back[1], bf16[1]);
}

TEST(ConvertElements, TheSameTypeIsCopiedBitForBit) {
  const std::vector<uint16_t> signalling_nan = {0x7F81, 0x1234};
  std::vector<uint16_t> copy(2);
  ConvertElements(signalling_nan.data(), DType::kBF16, copy.data(), DType::kBF16, 2);
  EXPECT_EQ(copy, signalling_nan);
}

TEST(ConvertElements, OtherTypesStopTheProcess) {
  int32_t id = 0;
  float value = 0;
  EXPECT_DEATH(ConvertElements(&id, DType::kI32, &value, DType::kF32, 1), "from int32");
  EXPECT_DEATH(ConvertElements(&value, DType::kF32, &id, DType::kU8, 1), "to uint8");
}

}  // namespace
}  // namespace quire
