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

// weight = scale * factor * (code - offset) + summand.
struct Weight {
  int code = 0;
  int offset = 0;
  int factor = 1;  // kQ6_K: multiplies the integers
  float scale = 0;
  float summand = 0;
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

Weight WeightAt(WeightFormat format, const std::byte* row, int64_t input) {
  const std::byte* const block = row + input / BlockInputs(format) * BlockBytes(format);
  const int64_t i = input % BlockInputs(format);
  switch (format) {
    case WeightFormat::kQ8_0:
      return {.code = SignedByteAt(block, 2 + i), .scale = F16At(block, 0)};
    case WeightFormat::kQ4_0:
      return {.code = ByteAt(block, 2 + i % 16) >> (i / 16 * 4) & 15,
              .offset = 8,
              .scale = F16At(block, 0)};
    case WeightFormat::kQ4_1:
      return {.code = ByteAt(block, 4 + i % 16) >> (i / 16 * 4) & 15,
              .scale = F16At(block, 0),
              .summand = F16At(block, 2)};
    case WeightFormat::kQ4_K:
      return Q4K(block, i);
    case WeightFormat::kQ6_K:
      return Q6K(block, i);
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
  for (int64_t i = 0; i < kQuantGroup; ++i) {
    const Weight w = WeightAt(format, row, begin + i);
    sum += w.factor * (w.code - w.offset) * group.codes[i];
  }
  const Weight shared = WeightAt(format, row, begin);
  chain = std::fma(static_cast<float>(sum), group.scale * shared.scale, chain);
  if (format != WeightFormat::kQ4_K && format != WeightFormat::kQ4_1) return chain;
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
