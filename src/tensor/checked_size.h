// Products of sizes that a caller gives, which must not wrap.
#ifndef QUIRE_TENSOR_CHECKED_SIZE_H_
#define QUIRE_TENSOR_CHECKED_SIZE_H_

#include <cstdint>
#include <initializer_list>
#include <optional>

namespace quire {

// No size of this library is larger, so that sums of a few stay in 63 bits. No machine has as much.
inline constexpr int64_t kSizeMax = int64_t{1} << 60;

// The product, or nothing where it is above kSizeMax. REQUIRES: no factor is negative.
inline std::optional<int64_t> CheckedProduct(std::initializer_list<int64_t> factors) {
  int64_t product = 1;
  bool fits = true;
  for (const int64_t factor : factors) {
    if (factor == 0) return 0;
    if (fits) fits = !__builtin_mul_overflow(product, factor, &product);
  }
  if (!fits || product > kSizeMax) return std::nullopt;
  return product;
}

}  // namespace quire

#endif  // QUIRE_TENSOR_CHECKED_SIZE_H_
