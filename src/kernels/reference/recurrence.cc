#include "kernels/reference/recurrence.h"

#include <cmath>

namespace quire::reference {
namespace {

// One head of one token. `s` is the head's part of the state.
void AdvanceHead(const MatrixStateShape& shape, const float* input, int64_t head, double* s,
                 double* magnitude) {
  const int64_t key_head = head / (shape.head_count / shape.key_head_count);
  const float* const k = input + key_head * shape.key_dim;
  const float* const v = input + shape.value_offset() + head * shape.value_dim;
  const double a = input[shape.decay_offset() + head];
  for (int64_t c = 0; c < shape.value_dim; ++c) {
    double add = v[c];
    double add_magnitude = std::abs(add);
    for (int64_t i = 0; i < shape.key_dim; ++i) {
      s[i * shape.value_dim + c] *= a;
      magnitude[i * shape.value_dim + c] *= std::abs(a);
    }
    if (shape.delta_rule) {
      const double beta = input[shape.beta_offset() + head];
      for (int64_t i = 0; i < shape.key_dim; ++i) {
        add -= k[i] * s[i * shape.value_dim + c];
        add_magnitude += std::abs(k[i]) * magnitude[i * shape.value_dim + c];
      }
      add *= beta;
      add_magnitude *= std::abs(beta);
    }
    for (int64_t i = 0; i < shape.key_dim; ++i) {
      s[i * shape.value_dim + c] += k[i] * add;
      magnitude[i * shape.value_dim + c] += std::abs(k[i]) * add_magnitude;
    }
  }
}

}  // namespace

MatrixResult AdvanceMatrix(const MatrixStateShape& shape, const Bounded& state, const float* inputs,
                           const float* q, double scale, int64_t row_count) {
  MatrixResult result{.state = state, .o = {}};
  const int64_t head_size = shape.key_dim * shape.value_dim;
  for (int64_t row = 0; row < row_count; ++row) {
    for (int64_t h = 0; h < shape.head_count; ++h) {
      double* const s = result.state.values.data() + h * head_size;
      double* const magnitude = result.state.magnitudes.data() + h * head_size;
      AdvanceHead(shape, inputs + row * shape.input_size(), h, s, magnitude);
      if (q == nullptr) continue;
      const int64_t key_head = h / (shape.head_count / shape.key_head_count);
      const float* const query = q + (row * shape.key_head_count + key_head) * shape.key_dim;
      for (int64_t c = 0; c < shape.value_dim; ++c) {
        double sum = 0;
        double sum_magnitude = 0;
        for (int64_t i = 0; i < shape.key_dim; ++i) {
          sum += query[i] * s[i * shape.value_dim + c];
          sum_magnitude += std::abs(query[i]) * magnitude[i * shape.value_dim + c];
        }
        result.o.values.push_back(scale * sum);
        result.o.magnitudes.push_back(std::abs(scale) * sum_magnitude);
      }
    }
  }
  return result;
}

Bounded Convolve(const ConvolutionShape& shape, const float* before, const float* x,
                 const float* weight, const float* bias, bool silu, int64_t row_count) {
  Bounded y;
  for (int64_t row = 0; row < row_count; ++row) {
    for (int64_t c = 0; c < shape.channel_count; ++c) {
      double sum = bias == nullptr ? 0 : bias[c];
      double magnitude = std::abs(sum);
      for (int64_t j = 0; j < shape.width; ++j) {
        const int64_t at = row - shape.width + 1 + j;
        const float* const from = at >= 0 ? x + at * shape.channel_count
                                          : before + (at + shape.width - 1) * shape.channel_count;
        const double product = static_cast<double>(weight[c * shape.width + j]) * from[c];
        sum += product;
        magnitude += std::abs(product);
      }
      // The slope of silu is at most 1.1, and its own error is below four roundings of the result.
      y.values.push_back(silu ? sum / (1 + std::exp(-sum)) : sum);
      y.magnitudes.push_back(silu ? 1.1 * magnitude : magnitude);
    }
  }
  return y;
}

}  // namespace quire::reference
