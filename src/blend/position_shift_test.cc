// ShiftKeys against RotatedHead, its rounding, and the views that it refuses.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#include "base/random.h"
#include "blend/testing/blend_reference.h"
#include "quire/blend.h"
#include "tensor/half.h"

namespace quire {
namespace {

std::vector<double> Frequencies(int64_t rotary_dim, double theta) {
  std::vector<double> inv_freq;
  for (int64_t i = 0; i < rotary_dim / 2; ++i) {
    inv_freq.push_back(
        std::pow(theta, -2.0 * static_cast<double>(i) / static_cast<double>(rotary_dim)));
  }
  return inv_freq;
}

// Numbers of any format in memory, read and written one at a time.
class Numbers {
 public:
  Numbers(DType dtype, size_t count)
      : dtype_(dtype), bytes_(count * static_cast<size_t>(DTypeBytes(dtype))) {}

  void Set(size_t i, double value) {
    const auto number = static_cast<float>(value);
    if (dtype_ == DType::kF32) {
      std::memcpy(&bytes_[4 * i], &number, 4);
    } else {
      const uint16_t bits = dtype_ == DType::kF16 ? F32ToF16(number) : F32ToBf16(number);
      std::memcpy(&bytes_[2 * i], &bits, 2);
    }
  }
  double Get(size_t i) const {
    if (dtype_ == DType::kF32) {
      float value;
      std::memcpy(&value, &bytes_[4 * i], 4);
      return value;
    }
    uint16_t bits;
    std::memcpy(&bits, &bytes_[2 * i], 2);
    return dtype_ == DType::kF16 ? F16ToF32(bits) : Bf16ToF32(bits);
  }
  void* data() { return bytes_.data(); }
  const std::vector<std::byte>& bytes() const { return bytes_; }

 private:
  DType dtype_;
  std::vector<std::byte> bytes_;
};

// Half of the distance between numbers of about this size, and what float32 adds.
double RoundingOf(DType dtype, double value) {
  const int digits = dtype == DType::kF32 ? 24 : dtype == DType::kF16 ? 11 : 8;
  const double smallest = dtype == DType::kF16 ? std::ldexp(1.0, -25) : 0;
  return std::max(std::ldexp(std::abs(value), -digits), smallest);
}

struct ShiftCase {
  DType dtype;
  RopePairing pairing;
  int64_t head_dim;
  int64_t first_dim;
  int64_t rotary_dim;
};

class ShiftFormats : public ::testing::TestWithParam<ShiftCase> {};

TEST_P(ShiftFormats, EachRowIsRotatedByItsOwnDifferenceAndRoundedOnce) {
  const ShiftCase& c = GetParam();
  constexpr int64_t kTokens = 7;
  constexpr int64_t kHeads = 3;
  const std::vector<double> inv_freq = Frequencies(c.rotary_dim, 10000);
  const KeyRotation rotation{.inv_freq = inv_freq, .pairing = c.pairing, .first_dim = c.first_dim};
  const std::vector<int64_t> olds = {0, 5, 5, 1000, 77, 3, 131071};
  const std::vector<int64_t> news = {9, 14, 5, 0, 131000, 3, 2};
  for (const int axis : {0, 1}) {
    const auto count = static_cast<size_t>(kTokens * kHeads * c.head_dim);
    Numbers keys(c.dtype, count);
    RandomSequence random(11);
    for (size_t i = 0; i < count; ++i) keys.Set(i, random.Normal());
    Numbers moved(c.dtype, count);
    const int64_t outer = axis == 0 ? kTokens : kHeads;
    const int64_t inner = axis == 0 ? kHeads : kTokens;
    ASSERT_TRUE(ShiftKeys(TensorView(keys.data(), c.dtype, {outer, inner, c.head_dim}), axis,
                          {.old_positions = olds, .new_positions = news}, rotation,
                          TensorView(moved.data(), c.dtype, {outer, inner, c.head_dim}))
                    .ok());
    for (int64_t t = 0; t < kTokens; ++t) {
      for (int64_t head = 0; head < kHeads; ++head) {
        const int64_t row = axis == 0 ? t * kHeads + head : head * kTokens + t;
        std::vector<double> numbers;
        for (int64_t i = 0; i < c.head_dim; ++i) {
          numbers.push_back(keys.Get(static_cast<size_t>(row * c.head_dim + i)));
        }
        const auto at = static_cast<size_t>(t);
        const auto expected = RotatedHead(numbers, olds[at], news[at], rotation);
        for (int64_t i = 0; i < c.head_dim; ++i) {
          const double got = moved.Get(static_cast<size_t>(row * c.head_dim + i));
          const double want = expected[static_cast<size_t>(i)];
          const bool rotated = i >= c.first_dim && i < c.first_dim + c.rotary_dim;
          if (!rotated || olds[at] == news[at]) {
            ASSERT_EQ(got, numbers[static_cast<size_t>(i)]) << "token " << t << " number " << i;
          } else {
            ASSERT_NEAR(got, want, RoundingOf(c.dtype, want) * 1.01 + 1e-6)
                << "token " << t << " number " << i;
          }
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, ShiftFormats,
    ::testing::Values(ShiftCase{DType::kF32, RopePairing::kHalfSplit, 64, 0, 64},
                      ShiftCase{DType::kF16, RopePairing::kHalfSplit, 128, 0, 128},
                      ShiftCase{DType::kBF16, RopePairing::kHalfSplit, 256, 0, 256},
                      ShiftCase{DType::kBF16, RopePairing::kHalfSplit, 80, 0, 20},
                      ShiftCase{DType::kF32, RopePairing::kInterleaved, 128, 0, 128},
                      ShiftCase{DType::kF16, RopePairing::kInterleaved, 96, 0, 64},
                      ShiftCase{DType::kBF16, RopePairing::kInterleaved, 6, 0, 2},
                      ShiftCase{DType::kBF16, RopePairing::kInterleaved, 576, 512, 64},
                      ShiftCase{DType::kF32, RopePairing::kHalfSplit, 13, 3, 10}));

std::vector<float> Shifted(std::vector<float> keys, int64_t from, int64_t to,
                           const KeyRotation& rotation) {
  const TensorView view(keys.data(), DType::kF32, {1, 1, static_cast<int64_t>(keys.size())});
  EXPECT_TRUE(ShiftKeys(view, 0,
                        {.old_positions = std::vector<int64_t>{from},
                         .new_positions = std::vector<int64_t>{to}},
                        rotation, view)
                  .ok());
  return keys;
}

void ExpectNear(const std::vector<float>& got, const std::vector<double>& want) {
  for (size_t i = 0; i < want.size(); ++i) EXPECT_NEAR(got[i], want[i], 1e-6) << i;
}

// blend.md, example 4.
TEST(ShiftKeys, AmplitudeOfTheKeysIsKept) {
  const std::vector<double> inv_freq = {1.0, 0.01};
  const KeyRotation rotation{.inv_freq = inv_freq};
  const std::vector<double> at3 = {-1.413352520780047, 1.8791180666879925, -2.828857481741469,
                                   4.058191135400942};
  const std::vector<double> at10 = {0.7929918035916569, 1.590674663968739, -3.061235698118727,
                                    4.17968349440576};
  ExpectNear(Shifted({1, 2, 3, 4}, 0, 3, rotation), at3);
  ExpectNear(Shifted({1, 2, 3, 4}, 0, 10, rotation), at10);
  const auto by_seven = RotatedHead(at3, 3, 10, rotation);
  for (size_t i = 0; i < 4; ++i) EXPECT_NEAR(by_seven[i], at10[i], 1e-12);
  std::vector<float> scaled;
  std::vector<double> scaled_at10;
  for (size_t i = 0; i < 4; ++i) {
    scaled.push_back(static_cast<float>(1.2 * at3[i]));
    scaled_at10.push_back(1.2 * at10[i]);
  }
  ExpectNear(Shifted(scaled, 3, 10, rotation), scaled_at10);
  const KeyRotation interleaved{.inv_freq = inv_freq, .pairing = RopePairing::kInterleaved};
  ExpectNear(Shifted({1, 2, 3, 4}, 0, 3, interleaved),
             {-1.27223251272018, -1.8388649851410237, 2.87866810043698, 4.088186635603437});
}

// blend.md, example 5.
TEST(ShiftKeys, MovesForwardByAPositiveAngle) {
  const std::vector<double> inv_freq = {1.0};
  const KeyRotation rotation{.inv_freq = inv_freq};
  const auto at3 = Shifted({1, 0}, 0, 3, rotation);
  ExpectNear(Shifted(at3, 3, 5, rotation), {0.2836621855, -0.9589242747});
  EXPECT_EQ(Shifted(at3, 3, 3, rotation), at3);
}

TEST(ShiftKeys, FrequenciesThatDependOnTheLengthAreUndoneByTheirOwn) {
  const std::vector<double> old_freq = {1.0, 0.1};
  const std::vector<double> new_freq = {0.5, 0.02};
  const KeyRotation rotation{.inv_freq = new_freq, .old_inv_freq = old_freq};
  const std::vector<double> k = {1, 2, 3, 4};
  const auto before = RotatedHead(k, 0, 6, {.inv_freq = old_freq});
  const auto after = RotatedHead(k, 0, 6, {.inv_freq = new_freq});
  ExpectNear(Shifted({before.begin(), before.end()}, 6, 6, rotation), after);
  const KeyRotation equal{.inv_freq = new_freq, .old_inv_freq = new_freq};
  EXPECT_EQ(Shifted({1, 2, 3, 4}, 6, 6, equal), (std::vector<float>{1, 2, 3, 4}));
}

TEST(ShiftKeys, ThereAndBackRestoresWithinTwoRoundings) {
  const std::vector<double> inv_freq = Frequencies(64, 500000);
  const KeyRotation rotation{.inv_freq = inv_freq};
  std::vector<float> keys(64);
  RandomSequence random(3);
  for (float& key : keys) key = static_cast<float>(random.Normal());
  const auto there = Shifted(keys, 11, 9001, rotation);
  const auto back = Shifted(there, 9001, 11, rotation);
  for (size_t i = 0; i < 32; ++i) {
    const auto norm = [i](const std::vector<float>& x) { return std::hypot(x[i], x[i + 32]); };
    EXPECT_NEAR(norm(there), norm(keys), 2e-7 * norm(keys));
    EXPECT_NEAR(back[i], keys[i], 4e-7 * norm(keys));
  }
}

// P9: two moves are one by their sum, but for the rounding between them.
TEST(ShiftKeys, TwoMovesAreOneByTheirSum) {
  const std::vector<double> inv_freq = Frequencies(64, 500000);
  std::vector<float> keys(64);
  RandomSequence random(4);
  for (float& key : keys) key = static_cast<float>(random.Normal());
  for (const RopePairing pairing : {RopePairing::kHalfSplit, RopePairing::kInterleaved}) {
    const KeyRotation rotation{.inv_freq = inv_freq, .pairing = pairing};
    const auto two = Shifted(Shifted(keys, 40, 7, rotation), 7, 2900, rotation);
    const auto one = Shifted(keys, 40, 2900, rotation);
    double norm = 0;
    for (const float key : keys) norm = std::hypot(norm, key);
    for (size_t i = 0; i < keys.size(); ++i) EXPECT_NEAR(two[i], one[i], 2e-7 * norm) << i;
  }
}

// A row's bits depend on nothing around it: rows one at a time, in one call, as channels, in a
// larger buffer, and in place.
TEST(ShiftKeys, EveryFormOfViewGivesTheSameBits) {
  constexpr int64_t kTokens = 5;
  constexpr int64_t kHeads = 2;
  constexpr int64_t kDim = 12;
  const std::vector<double> inv_freq = Frequencies(8, 10000);
  const KeyRotation rotation{.inv_freq = inv_freq, .head_dim = kDim};
  const std::vector<int64_t> olds = {0, 1, 2, 9, 4};
  const std::vector<int64_t> news = {7, 8, 9, 1, 4};
  const KeyMoves moves{.old_positions = olds, .new_positions = news};
  std::vector<float> keys(kTokens * kHeads * kDim);
  RandomSequence random(8);
  for (float& key : keys) key = static_cast<float>(random.Normal());
  std::vector<float> moved(keys.size());
  const TensorView from(keys.data(), DType::kF32, {kTokens, kHeads, kDim});
  ASSERT_TRUE(ShiftKeys(from, 0, moves, rotation,
                        TensorView(moved.data(), DType::kF32, {kTokens, kHeads, kDim}))
                  .ok());
  std::vector<float> flat(keys.size());
  ASSERT_TRUE(ShiftKeys(TensorView(keys.data(), DType::kF32, {kTokens, kHeads * kDim}), 0, moves,
                        rotation, TensorView(flat.data(), DType::kF32, {kTokens, kHeads * kDim}))
                  .ok());
  EXPECT_EQ(flat, moved);
  for (size_t t = 0; t < kTokens; ++t) {
    std::vector<float> one(keys.begin() + static_cast<std::ptrdiff_t>(t * kHeads * kDim),
                           keys.begin() + static_cast<std::ptrdiff_t>((t + 1) * kHeads * kDim));
    const TensorView view(one.data(), DType::kF32, {1, kHeads, kDim});
    ASSERT_TRUE(ShiftKeys(view, 0,
                          {.old_positions = std::span(olds).subspan(t, 1),
                           .new_positions = std::span(news).subspan(t, 1)},
                          rotation, view)
                    .ok());
    EXPECT_TRUE(std::equal(one.begin(), one.end(),
                           moved.begin() + static_cast<std::ptrdiff_t>(t * kHeads * kDim)));
  }
  ASSERT_TRUE(ShiftKeys(from, 0, moves, rotation, from).ok());
  EXPECT_EQ(keys, moved);
}

TEST(ShiftKeys, InvalidRowsAreNeitherReadNorWritten) {
  const std::vector<double> inv_freq = {1.0};
  const std::vector<int64_t> olds = {0, -7, 1};  // a row that is undefined has no position either
  const std::vector<int64_t> news = {3, 3, 3};
  const std::vector<uint8_t> valid = {1, 0, 1};
  std::vector<float> keys = {1, 0, NAN, NAN, 1, 0};
  std::vector<float> moved = {9, 9, 9, 9, 9, 9};
  ASSERT_TRUE(ShiftKeys(TensorView(keys.data(), DType::kF32, {3, 1, 2}), 0,
                        {.old_positions = olds, .new_positions = news, .valid = valid},
                        {.inv_freq = inv_freq}, TensorView(moved.data(), DType::kF32, {3, 1, 2}))
                  .ok());
  EXPECT_NEAR(moved[0], std::cos(3.0), 1e-6);
  EXPECT_EQ(moved[2], 9);
  EXPECT_EQ(moved[3], 9);
  EXPECT_NEAR(moved[5], std::sin(2.0), 1e-6);
}

DLTensor Strided(void* data, std::vector<int64_t>& shape, std::vector<int64_t>& strides,
                 DType dtype) {
  DLTensor dl{};
  dl.data = data;
  dl.device = {kDLCPU, 0};
  dl.ndim = static_cast<int32_t>(shape.size());
  dl.dtype = ToDLDataType(dtype);
  dl.shape = shape.data();
  dl.strides = strides.data();
  return dl;
}

TEST(ShiftKeys, RowsOfALargerBufferAreMovedInPlace) {
  // [token][k or v][head][dim]: keys and values of a token side by side, as engines have them.
  constexpr int64_t kTokens = 3;
  std::vector<float> kv(kTokens * 2 * 2 * 4);
  std::iota(kv.begin(), kv.end(), 1.0F);
  const std::vector<float> before = kv;
  const std::vector<double> inv_freq = {1.0, 0.1};
  std::vector<int64_t> shape = {kTokens, 2, 4};
  std::vector<int64_t> strides = {16, 4, 1};
  const TensorView keys =
      TensorView::FromDLPack(Strided(kv.data(), shape, strides, DType::kF32)).value();
  const std::vector<int64_t> olds = {0, 1, 2};
  const std::vector<int64_t> news = {5, 6, 7};
  ASSERT_TRUE(ShiftKeys(keys, 0, {.old_positions = olds, .new_positions = news},
                        {.inv_freq = inv_freq}, keys)
                  .ok());
  for (size_t t = 0; t < kTokens; ++t) {
    for (size_t i = 0; i < 16; ++i) {
      const size_t at = t * 16 + i;
      if (i < 8) {
        EXPECT_NE(kv[at], before[at]);
      } else {
        EXPECT_EQ(kv[at], before[at]);
      }
    }
  }
}

struct RefusedShift {
  const char* part;  // of the message
  std::vector<int64_t> shape = {2, 2, 4};
  std::vector<int64_t> strides = {8, 4, 1};
  std::vector<int64_t> moved_strides = {8, 4, 1};
  int axis = 0;
  DType dtype = DType::kF32;
  std::vector<int64_t> olds = {0, 1};
  std::vector<double> inv_freq = {1.0, 0.1};
  std::vector<double> old_inv_freq = {};
  int64_t first_dim = 0;
  int64_t head_dim = 0;
  int64_t offset = 64;  // of moved, in numbers
};

TEST(ShiftKeys, WhatIsNotAsDescribedIsRefusedAndNothingIsWritten) {
  const std::vector<RefusedShift> cases = {
      {.part = "token_axis is 2", .axis = 2},
      {.part = "token_axis is -1", .axis = -1},
      {.part = "[tokens, heads, dim]",
       .shape = {4, 4},
       .strides = {4, 1},
       .moved_strides = {4, 1},
       .axis = 1},
      {.part = "[tokens, heads, dim]", .shape = {4}, .strides = {1}, .moved_strides = {1}},
      {.part = "not adjacent", .strides = {8, 4, 2}},
      {.part = "a stride is negative", .strides = {8, -4, 1}},
      {.part = "dequantised first", .dtype = DType::kI8},
      {.part = "rows overlap", .moved_strides = {4, 4, 1}},
      {.part = "rows overlap", .moved_strides = {8, 3, 1}},
      {.part = "rows overlap", .moved_strides = {0, 4, 1}},
      {.part = "3 old positions", .olds = {0, 1, 2}},
      {.part = "key 1 is at position -1", .olds = {0, -1}},
      {.part = "key 0 is at position 2147483648", .olds = {int64_t{1} << 31, 0}},
      {.part = "no 6 rotated ones", .inv_freq = {1, 1, 1}},
      {.part = "from number 1 on", .first_dim = 1},
      {.part = "from number -1 on", .first_dim = -1},
      {.part = "not finite", .inv_freq = {1, INFINITY}},
      {.part = "not finite", .old_inv_freq = {NAN, 1}},
      {.part = "old_inv_freq has 1", .old_inv_freq = {1}},
      {.part = "heads of 3", .head_dim = 3},
      {.part = "heads of -4", .head_dim = -4},
      {.part = "shares memory", .offset = 1},
      {.part = "shares memory", .offset = 15},
  };
  for (const RefusedShift& c : cases) {
    SCOPED_TRACE(c.part);
    std::vector<float> memory(128, 3.0F);
    std::vector<int64_t> shape = c.shape;
    std::vector<int64_t> strides = c.strides;
    std::vector<int64_t> moved_strides = c.moved_strides;
    const auto keys = TensorView::FromDLPack(Strided(memory.data(), shape, strides, c.dtype));
    const auto moved =
        TensorView::FromDLPack(Strided(memory.data() + c.offset, shape, moved_strides, c.dtype));
    ASSERT_TRUE(keys.ok());
    ASSERT_TRUE(moved.ok());
    const std::vector<int64_t> news = {4, 5};
    const KeyRotation rotation{.inv_freq = c.inv_freq,
                               .old_inv_freq = c.old_inv_freq,
                               .first_dim = c.first_dim,
                               .head_dim = c.head_dim};
    const Status status = ShiftKeys(*keys, c.axis, {.old_positions = c.olds, .new_positions = news},
                                    rotation, *moved);
    EXPECT_EQ(status.code(), StatusCode::kBadArgument);
    EXPECT_NE(status.message().find(c.part), std::string_view::npos) << status.message();
    EXPECT_EQ(memory, std::vector<float>(128, 3.0F));
  }
}

TEST(ShiftKeys, EmptyAndNullViews) {
  const KeyRotation rotation{};
  const TensorView empty(static_cast<void*>(nullptr), DType::kF32, {0, 2, 4});
  EXPECT_TRUE(ShiftKeys(empty, 0, {}, rotation, empty).ok());
  const TensorView null(static_cast<void*>(nullptr), DType::kF32, {1, 2, 4});
  const std::vector<int64_t> one = {0};
  const Status status =
      ShiftKeys(null, 0, {.old_positions = one, .new_positions = one}, rotation, null);
  EXPECT_EQ(status.code(), StatusCode::kBadArgument);
  EXPECT_NE(status.message().find("null"), std::string_view::npos);
}

}  // namespace
}  // namespace quire
