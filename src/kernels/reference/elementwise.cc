#include "kernels/reference/elementwise.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

namespace quire::reference {

std::vector<double> RmsNorm(const float* x, const float* w, double weight_offset, double eps,
                            int64_t row_count, int64_t dim) {
  std::vector<double> y;
  for (int64_t row = 0; row < row_count; ++row) {
    const float* const from = x + row * dim;
    double squares = 0;
    for (int64_t i = 0; i < dim; ++i) squares += static_cast<double>(from[i]) * from[i];
    const double root = std::sqrt(squares / static_cast<double>(dim) + eps);
    for (int64_t i = 0; i < dim; ++i) y.push_back(from[i] / root * (w[i] + weight_offset));
  }
  return y;
}

std::vector<double> SiluMul(const float* gate_up, int64_t row_count, int64_t dim) {
  std::vector<double> y;
  for (int64_t row = 0; row < row_count; ++row) {
    for (int64_t i = 0; i < dim; ++i) {
      const double gate = gate_up[row * 2 * dim + i];
      const double up = gate_up[row * 2 * dim + dim + i];
      y.push_back(gate / (1 + std::exp(-gate)) * up);
    }
  }
  return y;
}

std::vector<double> GeluTanhMul(const float* gate_up, int64_t row_count, int64_t dim) {
  std::vector<double> y;
  for (int64_t row = 0; row < row_count; ++row) {
    for (int64_t i = 0; i < dim; ++i) {
      const double gate = gate_up[row * 2 * dim + i];
      const double up = gate_up[row * 2 * dim + dim + i];
      const double z = std::sqrt(2 / std::numbers::pi) * (gate + 0.044715 * gate * gate * gate);
      // 1 + tanh(z), without its cancellation.
      y.push_back(gate / 2 * (2 / (1 + std::exp(-2 * z))) * up);
    }
  }
  return y;
}

std::vector<double> SoftCap(const float* x, double cap, int64_t count) {
  std::vector<double> y;
  for (int64_t i = 0; i < count; ++i) y.push_back(cap * std::tanh(x[i] / cap));
  return y;
}

int64_t ArgMax(const float* x, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    if (!(x[i] < std::numeric_limits<float>::infinity())) return -1;
  }
  return std::max_element(x, x + count) - x;
}

std::vector<double> Exp2Scaled(const float* x, int64_t count, double greatest, double scale_log2) {
  std::vector<double> y;
  for (int64_t i = 0; i < count; ++i) y.push_back(std::exp2((x[i] - greatest) * scale_log2));
  return y;
}

}  // namespace quire::reference
