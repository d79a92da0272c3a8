// Each instruction set's loops against a pair at a time, for every number of pairs, apart and in
// place.
#include "blend/rotation_loops.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <tuple>
#include <vector>

#include "base/float_environment.h"
#include "base/random.h"
#include "blend/half_blocks.h"

namespace quire {
namespace {

using Bytes = std::vector<std::byte>;

float Widened(const Bytes& head, DType dtype, int64_t i) {
  float value = 0;
  WidenBlock(head.data() + i * DTypeBytes(dtype), dtype, 1, &value);
  return value;
}

// As the header says, one pair after the other.
Bytes Rotated(const Bytes& head, DType dtype, int64_t pair_count, const std::vector<float>& cos,
              const std::vector<float>& sin, bool is_split) {
  Bytes rotated(head.size());
  for (int64_t i = 0; i < pair_count; ++i) {
    const int64_t x = is_split ? i : 2 * i;
    const int64_t y = is_split ? i + pair_count : 2 * i + 1;
    const float x0 = Widened(head, dtype, x);
    const float y0 = Widened(head, dtype, y);
    const auto at = static_cast<size_t>(i);
    const float x1 = x0 * cos[at] - y0 * sin[at];
    const float y1 = y0 * cos[at] + x0 * sin[at];
    NarrowBlock(&x1, 1, dtype, rotated.data() + x * DTypeBytes(dtype));
    NarrowBlock(&y1, 1, dtype, rotated.data() + y * DTypeBytes(dtype));
  }
  return rotated;
}

std::vector<const RotationLoops*> Loops() {
  return {AllRotationLoops().begin(), AllRotationLoops().end()};
}

class RotationLoopsOf
    : public ::testing::TestWithParam<std::tuple<const RotationLoops*, DType, bool>> {};

TEST_P(RotationLoopsOf, APairAtATimeGivesTheSameBits) {
  const auto [loops, dtype, is_split] = GetParam();
  const RotationLoop rotate = is_split ? loops->halves : loops->neighbours;
  const ScopedFloatEnvironment environment;
  RandomSequence random(3);
  for (int64_t pair_count = 0; pair_count <= 100; ++pair_count) {
    Bytes head(static_cast<size_t>(2 * pair_count * DTypeBytes(dtype)));
    // Any bits, but no NaN: which of two NaNs a sum keeps is the compiler's choice.
    for (std::byte& byte : head) byte = static_cast<std::byte>(random.Below(256));
    for (int64_t i = 0; i < 2 * pair_count; ++i) {
      if (!std::isnan(Widened(head, dtype, i))) continue;
      const float number = 1;
      NarrowBlock(&number, 1, dtype, head.data() + i * DTypeBytes(dtype));
    }
    std::vector<float> cos;
    std::vector<float> sin;
    for (int64_t i = 0; i < pair_count; ++i) {
      cos.push_back(static_cast<float>(random.Below(1 << 20)) * 0x1p-19F - 1);
      sin.push_back(static_cast<float>(random.Below(1 << 20)) * 0x1p-19F - 1);
    }
    const Bytes expected = Rotated(head, dtype, pair_count, cos, sin, is_split);
    Bytes apart(head.size());
    rotate(head.data(), dtype, pair_count, cos.data(), sin.data(), apart.data());
    ASSERT_EQ(apart, expected) << pair_count << " pairs";
    rotate(head.data(), dtype, pair_count, cos.data(), sin.data(), head.data());
    ASSERT_EQ(head, expected) << pair_count << " pairs in place";
  }
}

std::string NameOf(const ::testing::TestParamInfo<RotationLoopsOf::ParamType>& test) {
  const auto& [loops, dtype, is_split] = test.param;
  return std::string(loops->name) + "_" + std::string(DTypeName(dtype)) +
         (is_split ? "_halves" : "_neighbours");
}

INSTANTIATE_TEST_SUITE_P(Formats, RotationLoopsOf,
                         ::testing::Combine(::testing::ValuesIn(Loops()),
                                            ::testing::Values(DType::kF16, DType::kBF16,
                                                              DType::kF32),
                                            ::testing::Bool()),
                         NameOf);

}  // namespace
}  // namespace quire
