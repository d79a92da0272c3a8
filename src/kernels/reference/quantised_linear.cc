#include "kernels/reference/quantised_linear.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "tensor/half.h"

namespace quire::reference {
namespace {

int ByteAt(const std::byte* bytes, int64_t at) { return static_cast<int>(bytes[at]); }
int SignedByteAt(const std::byte* bytes, int64_t at) {
  return static_cast<int8_t>(ByteAt(bytes, at));
}
float F16At(const std::byte* bytes, int64_t at) {
  uint16_t half;
  std::memcpy(&half, bytes + at, sizeof(half));
  return F16ToF32(half);
}

float F32At(const std::byte* bytes, int64_t at) {
  float number;
  std::memcpy(&number, bytes + at, sizeof(number));
  return number;
}

// weight = scale * factor * (code - offset) + summand.
struct Weight {
  int code = 0;
  int offset = 0;
  int factor = 1;  // kQ6_K, kQ3_K, kQ2_K: multiplies the integers
  float scale = 0;
  float summand = 0;
  int least_factor = 0;  // kQ2_K: summand is - least * least_factor
  float least = 0;
};

// The scale (or, 4 later, the least) of 32 inputs, 6 bits.
int SixBits(const std::byte* scales, int64_t group, int64_t which) {
  if (group < 4) return ByteAt(scales, group + 4 * which) & 63;
  const int low = ByteAt(scales, group + 4) >> (4 * which) & 15;
  const int high = ByteAt(scales, group - 4 + 4 * which) >> 6;
  return low | high << 4;
}

Weight Q4K(const std::byte* block, int64_t i) {
  const int64_t group = i / 32;
  const int both = ByteAt(block, 16 + group / 2 * 32 + i % 32);
  const auto scale = static_cast<float>(SixBits(block + 4, group, 0));
  const auto least = static_cast<float>(SixBits(block + 4, group, 1));
  return {.code = group % 2 == 0 ? both & 15 : both >> 4,
          .scale = F16At(block, 0) * scale,
          .summand = 0 - F16At(block, 2) * least};
}

Weight Q5K(const std::byte* block, int64_t i) {
  Weight w = Q4K(block, i);  // but for where codes lie
  const int both = ByteAt(block, 48 + i / 64 * 32 + i % 32);
  const int fifth = ByteAt(block, 16 + i % 32) >> (i / 32) & 1;
  w.code = (i / 32 % 2 == 0 ? both & 15 : both >> 4) | fifth << 4;
  return w;
}

Weight Q6K(const std::byte* block, int64_t i) {
  const int64_t half = i / 128;
  const int64_t quarter = i / 32 % 4;
  const int both = ByteAt(block, half * 64 + quarter % 2 * 32 + i % 32);
  const int low = quarter < 2 ? both & 15 : both >> 4;
  const int high = ByteAt(block, 128 + half * 32 + i % 32) >> (2 * quarter) & 3;
  return {.code = low | high << 4,
          .offset = 32,
          .factor = SignedByteAt(block, 192 + i / 16),
          .scale = F16At(block, 208)};
}

// Two bits of input i, whose bytes begin at `begin`.
int TwoBits(const std::byte* block, int64_t begin, int64_t i) {
  return ByteAt(block, begin + i / 128 * 32 + i % 32) >> (i / 32 % 4 * 2) & 3;
}

Weight Q3K(const std::byte* block, int64_t i) {
  const int third = ByteAt(block, i % 32) >> (i / 32) & 1;
  const int64_t scale = i / 16;
  const int low = ByteAt(block, 96 + scale % 8) >> (scale / 8 * 4) & 15;
  const int high = ByteAt(block, 104 + scale % 4) >> (scale / 4 * 2) & 3;
  return {.code = TwoBits(block, 32, i) | third << 2,
          .offset = 4,
          .factor = (low | high << 4) - 32,
          .scale = F16At(block, 108)};
}

Weight Q2K(const std::byte* block, int64_t i) {
  const int both = ByteAt(block, i / 16);
  const float least = F16At(block, 82);
  return {.code = TwoBits(block, 16, i),
          .factor = both & 15,
          .scale = F16At(block, 80),
          .summand = 0 - least * static_cast<float>(both >> 4),
          .least_factor = both >> 4,
          .least = least};
}

// Sixteen numbers that lie nearly as normal ones do.
int NearlyNormal(int code) {
  constexpr int kNegative[] = {127, 104, 83, 65, 49, 35, 22, 10};
  constexpr int kPositive[] = {1, 13, 25, 38, 53, 69, 89, 113};
  return code < 8 ? -kNegative[code] : kPositive[code - 8];
}

// Twice a number of a sign, two bits of exponent (bias 1) and one of mantissa.
int TwiceTinyFloat(int code) {
  const int exponent = code >> 1 & 3;
  const int mantissa = code & 1;
  const int magnitude = exponent == 0 ? mantissa : (2 + mantissa) << (exponent - 1);
  return code < 8 ? magnitude : -magnitude;
}

Weight IQ4XS(const std::byte* block, int64_t i) {
  const int64_t group = i / 32;
  const int low = ByteAt(block, 4 + group / 2) >> (group % 2 * 4) & 15;
  const int high = ByteAt(block, 2 + group / 4) >> (group % 4 * 2) & 3;
  const int both = ByteAt(block, 8 + group * 16 + i % 16);
  return {.code = NearlyNormal(i % 32 < 16 ? both & 15 : both >> 4),
          .scale = F16At(block, 0) * static_cast<float>((low | high << 4) - 32)};
}

float PowerOfTwo(int exponent) {
  if (exponent == 255) return std::numeric_limits<float>::quiet_NaN();
  return std::ldexp(1.0F, exponent - 128);
}

// Four bits of input i (of 32) whose bytes begin at `begin`, and the bit of five-bit codes at
// `fifths`.
int Nibble(const std::byte* block, int64_t begin, int64_t i) {
  return ByteAt(block, begin + i % 16) >> (i / 16 * 4) & 15;
}
int FiveBits(const std::byte* block, int64_t fifths, int64_t i) {
  return Nibble(block, fifths + 4, i) | (ByteAt(block, fifths + i / 8) >> (i % 8) & 1) << 4;
}

// The block's first four bytes: a scale of 19 bits and, below it, the offset plus 128.
Weight WithZero(const std::byte* block, int code) {
  const int low = ByteAt(block, 0) | (ByteAt(block, 1) & 31) << 8;
  std::byte scale[4];
  std::memcpy(scale, block, sizeof(scale));
  scale[0] = std::byte{0};
  scale[1] &= std::byte{0xE0};
  return {.code = code, .offset = low - 128, .scale = F32At(scale, 0)};
}

Weight WeightAt(WeightFormat format, const std::byte* row, int64_t input) {
  const std::byte* const block = row + input / BlockInputs(format) * BlockBytes(format);
  const int64_t i = input % BlockInputs(format);
  const float d = F16At(block, 0);
  switch (format) {
    case WeightFormat::kQ8_0:
      return {.code = SignedByteAt(block, 2 + i), .scale = d};
    case WeightFormat::kQ4_0:
      return {.code = Nibble(block, 2, i), .offset = 8, .scale = d};
    case WeightFormat::kQ4_1:
      return {.code = Nibble(block, 4, i), .scale = d, .summand = F16At(block, 2)};
    case WeightFormat::kQ5_0:
      return {.code = FiveBits(block, 2, i), .offset = 16, .scale = d};
    case WeightFormat::kQ5_1:
      return {.code = FiveBits(block, 4, i), .scale = d, .summand = F16At(block, 2)};
    case WeightFormat::kIQ4_NL:
      return {.code = NearlyNormal(Nibble(block, 2, i)), .scale = d};
    case WeightFormat::kMXFP4:
      return {.code = TwiceTinyFloat(Nibble(block, 1, i)), .scale = PowerOfTwo(ByteAt(block, 0))};
    case WeightFormat::kQ4_K:
      return Q4K(block, i);
    case WeightFormat::kQ5_K:
      return Q5K(block, i);
    case WeightFormat::kQ6_K:
      return Q6K(block, i);
    case WeightFormat::kIQ4_XS:
      return IQ4XS(block, i);
    case WeightFormat::kQ3_K:
      return Q3K(block, i);
    case WeightFormat::kQ2_K:
      return Q2K(block, i);
    case WeightFormat::kI8G:
    case WeightFormat::kI8GWide:
      return {.code = SignedByteAt(block, 4 + i), .scale = F32At(block, 0)};
    case WeightFormat::kI8Z:
    case WeightFormat::kI8ZWide:
      return WithZero(block, SignedByteAt(block, 4 + i));
    case WeightFormat::kI4G:
    case WeightFormat::kI4GWide:
      return {
          .code = Nibble(block, 4 + i / 32 * 16, i % 32), .offset = 8, .scale = F32At(block, 0)};
    case WeightFormat::kI4Z:
    case WeightFormat::kI4ZWide:
      return WithZero(block, Nibble(block, 4 + i / 32 * 16, i % 32));
  }
  return {};
}

// 32 inputs of a row.
struct Group {
  int codes[kQuantGroup] = {};
  float scale = 0;
  int sum = 0;
};

Group Quantise(const float* x) {
  Group group;
  float greatest = 0;
  for (int64_t i = 0; i < kQuantGroup; ++i) {
    if (!std::isfinite(x[i])) {
      group.scale = std::numeric_limits<float>::quiet_NaN();
      return group;
    }
    greatest = std::max(greatest, std::abs(x[i]));
  }
  if (greatest < 0x1p-100F) return group;
  const float inverse = 127.0F / greatest;
  for (int64_t i = 0; i < kQuantGroup; ++i) {
    group.codes[i] = static_cast<int>(std::nearbyint(x[i] * inverse));
    group.sum += group.codes[i];
  }
  group.scale = greatest / 127.0F;
  return group;
}

// The chain of one output after the group that begins at input `begin`.
float AddGroup(WeightFormat format, const std::byte* row, const Group& group, int64_t begin,
               float chain) {
  int sum = 0;
  int leasts = 0;
  for (int64_t i = 0; i < kQuantGroup; ++i) {
    const Weight w = WeightAt(format, row, begin + i);
    sum += w.factor * (w.code - w.offset) * group.codes[i];
    leasts -= w.least_factor * group.codes[i];
  }
  const Weight shared = WeightAt(format, row, begin);
  chain = std::fma(static_cast<float>(sum), group.scale * shared.scale, chain);
  if (!HasSummand(format)) return chain;
  if (LayoutOf(format).scales == BlockScales::kHalfPairs) {
    return std::fma(static_cast<float>(leasts), group.scale * shared.least, chain);
  }
  return std::fma(group.scale * static_cast<float>(group.sum), shared.summand, chain);
}

}  // namespace

double StoredWeight(WeightFormat format, const std::byte* row, int64_t i) {
  const Weight w = WeightAt(format, row, i);
  return static_cast<double>(w.scale) * w.factor * (w.code - w.offset) + w.summand;
}

std::vector<float> QuantisedLinear(WeightFormat format, const float* x, const std::byte* rows,
                                   const float* bias, int64_t row_count, int64_t n, int64_t k) {
  std::vector<float> y;
  for (int64_t r = 0; r < row_count; ++r) {
    std::vector<Group> groups;
    for (int64_t i = 0; i < k; i += kQuantGroup) groups.push_back(Quantise(x + r * k + i));
    for (int64_t output = 0; output < n; ++output) {
      const std::byte* const row = rows + output * StoredRowBytes(format, k);
      float chain = 0;
      for (int64_t i = 0; i < k; i += kQuantGroup) {
        chain = AddGroup(format, row, groups[static_cast<size_t>(i / kQuantGroup)], i, chain);
      }
      y.push_back(bias != nullptr ? chain + bias[output] : chain);
    }
  }
  return y;
}

}  // namespace quire::reference
