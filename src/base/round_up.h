// Division and multiples, rounded up.
#ifndef QUIRE_BASE_ROUND_UP_H_
#define QUIRE_BASE_ROUND_UP_H_

#include <concepts>
#include <type_traits>

namespace quire {

// The least whole number that is not below a / b. REQUIRES: a >= 0, b > 0, a + b - 1 fits T.
template <std::integral T>
constexpr T CeilDiv(T a, std::type_identity_t<T> b) {
  return (a + b - 1) / b;
}

// The least multiple of `unit` that is not below `size`. REQUIRES: as CeilDiv.
template <std::integral T>
constexpr T RoundUp(T size, std::type_identity_t<T> unit) {
  return CeilDiv(size, unit) * unit;
}

}  // namespace quire

#endif  // QUIRE_BASE_ROUND_UP_H_
