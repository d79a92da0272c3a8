// Stored rows of quantised weights with random codes, for tests and benchmarks.
#ifndef QUIRE_KERNELS_TESTING_QUANTISED_ROWS_H_
#define QUIRE_KERNELS_TESTING_QUANTISED_ROWS_H_

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "base/random.h"
#include "kernels/quantised_weights.h"
#include "tensor/half.h"

namespace quire {

// A float16 number of a block: where it stands, and the greatest factor that codes and scales give
// it in a weight.
struct StoredScale {
  size_t place;
  float factor;
};

inline std::vector<StoredScale> StoredScales(WeightFormat format) {
  switch (format) {
    case WeightFormat::kQ8_0:
      return {{0, 128}};
    case WeightFormat::kQ4_0:
      return {{0, 8}};
    case WeightFormat::kQ4_1:
      return {{0, 15}, {2, 1}};
    case WeightFormat::kQ5_0:
      return {{0, 16}};
    case WeightFormat::kQ5_1:
      return {{0, 31}, {2, 1}};
    case WeightFormat::kIQ4_NL:
      return {{0, 127}};
    case WeightFormat::kMXFP4:
      return {};
    case WeightFormat::kQ4_K:
      return {{0, 63 * 15}, {2, 63}};
    case WeightFormat::kQ5_K:
      return {{0, 63 * 31}, {2, 63}};
    case WeightFormat::kQ6_K:
      return {{208, 128 * 32}};
    case WeightFormat::kIQ4_XS:
      return {{0, 32 * 127}};
    case WeightFormat::kQ3_K:
      return {{108, 32 * 4}};
    case WeightFormat::kQ2_K:
      return {{80, 15 * 3}, {82, 15}};
    case WeightFormat::kI8G:
    case WeightFormat::kI8Z:
    case WeightFormat::kI4G:
    case WeightFormat::kI4Z:
    case WeightFormat::kI8GWide:
    case WeightFormat::kI8ZWide:
    case WeightFormat::kI4GWide:
    case WeightFormat::kI4ZWide:
      return {};  // words
  }
  return {};
}

// The word of a block: with `zero`, -1 to 1, that part of the greatest offset.
inline uint32_t RandomWord(WeightFormat format, float scale, float zero, float greatest) {
  const bool has_bytes = LayoutOf(format).codes == CodeBits::kEight;
  const float d = scale * greatest / (has_bytes ? 256 : 16);
  uint32_t word = 0;
  std::memcpy(&word, &d, sizeof(word));
  if (LayoutOf(format).scales == BlockScales::kWord) return word;
  const int z = has_bytes ? static_cast<int>(zero * 128) : static_cast<int>(zero * 8) + 8;
  return (word & ~kZeroBits) | static_cast<uint32_t>(z + kZeroRaised);
}

// Writes the scales of all blocks: `part()`, -1 to 1, is asked per scale and says how much of
// `greatest` the largest possible product with it has. Powers of two are the next smaller ones.
template <typename Part>
void SetScales(WeightFormat format, float greatest, std::span<std::byte> rows, Part part) {
  for (size_t block = 0; block < rows.size(); block += static_cast<size_t>(BlockBytes(format))) {
    if (format == WeightFormat::kMXFP4) {
      const float scale = std::max(std::abs(part()), 0x1p-10F) * greatest / 12;
      rows[block] = static_cast<std::byte>(std::ilogb(scale) + 128);
    }
    if (HasWords(format)) {
      const float scale = part();  // drawn before the other: compilers order arguments as they like
      const uint32_t word = RandomWord(format, scale, part(), greatest);
      std::memcpy(rows.data() + block, &word, sizeof(word));
    }
    for (const StoredScale& stored : StoredScales(format)) {
      const uint16_t scale = F32ToF16(part() * greatest / stored.factor);
      std::memcpy(rows.data() + block + stored.place, &scale, sizeof(scale));
    }
  }
}

// n rows of k inputs. Every bit is random but for the scales: weights are `greatest` at most, or
// twice that where they have a summand.
inline std::vector<std::byte> RandomQuantisedRows(WeightFormat format, int64_t n, int64_t k,
                                                  float greatest, uint64_t seed) {
  RandomSequence random(seed);
  std::vector<std::byte> rows(static_cast<size_t>(n * StoredRowBytes(format, k)));
  for (std::byte& byte : rows) byte = static_cast<std::byte>(random.Below(256));
  SetScales(format, greatest, rows, [&] { return static_cast<float>(random.Uniform(-1, 1)); });
  return rows;
}

}  // namespace quire

#endif  // QUIRE_KERNELS_TESTING_QUANTISED_ROWS_H_
