// Activations of gated MLPs.
#ifndef QUIRE_KERNELS_ACTIVATION_H_
#define QUIRE_KERNELS_ACTIVATION_H_

#include <cstdint>

namespace quire {

// Each is a function of one element, the same bits on every path (docs/exactness.md).
enum class Activation : uint8_t {
  kSilu,       // g / (1 + e^-g)
  kGelu,       // g / 2 (1 + erf(g / sqrt(2)))
  kGeluTanh,   // g / 2 (1 + tanh(sqrt(2 / pi) (g + 0.044715 g^3)))
  kQuickGelu,  // g / (1 + e^(-1.702 g))
  kRelu,       // max(g, 0)
  kRelu2,      // max(g, 0)^2
};

}  // namespace quire

#endif  // QUIRE_KERNELS_ACTIVATION_H_
