#include "kernels/reference/linear.h"

#include <cmath>

namespace quire::reference {

LinearResult Linear(const float* x, const float* w, const float* bias, int64_t row_count, int64_t n,
                    int64_t k) {
  LinearResult result;
  for (int64_t row = 0; row < row_count; ++row) {
    for (int64_t output = 0; output < n; ++output) {
      double sum = bias != nullptr ? bias[output] : 0.0;
      double magnitude = std::abs(sum);
      for (int64_t i = 0; i < k; ++i) {
        const double product = static_cast<double>(x[row * k + i]) * w[output * k + i];
        sum += product;
        magnitude += std::abs(product);
      }
      result.y.push_back(sum);
      result.magnitude.push_back(magnitude);
    }
  }
  return result;
}

}  // namespace quire::reference
