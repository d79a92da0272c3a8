#include "model/row_ops.h"

#include <cmath>

namespace quire {

float Sigmoid(float x) { return 1.0F / (1.0F + std::exp(-x)); }

void RowOps::Norm(const std::vector<float>& weight, float offset, float eps, const float* x,
                  int64_t row_count, float* y) const {
  backend_.rms_norm(x, weight.data(), offset, eps, row_count, static_cast<int64_t>(weight.size()),
                    y, runner_);
}

void RowOps::NormPieces(const std::vector<float>& weight, float offset, float eps,
                        int64_t row_count, int64_t row_stride, int64_t piece_count,
                        int64_t piece_size, float* x) const {
  const bool is_shared = static_cast<int64_t>(weight.size()) == piece_size;
  runner_.ParallelFor(row_count, [&](int64_t row, int) {
    SerialRunner serial;
    float* const pieces = x + row * row_stride;
    if (is_shared) {
      backend_.rms_norm(pieces, weight.data(), offset, eps, piece_count, piece_size, pieces,
                        serial);
      return;
    }
    for (int64_t piece = 0; piece < piece_count; ++piece) {
      float* const values = pieces + piece * piece_size;
      backend_.rms_norm(values, weight.data() + piece * piece_size, offset, eps, 1, piece_size,
                        values, serial);
    }
  });
}

void RowOps::Multiply(const LinearWeights& weights, const float* x, int64_t row_count, float* y,
                      bool accumulate, void* scratch) const {
  const LinearArgs args{.w = weights.packed(),
                        .row_count = row_count,
                        .x = x,
                        .x_stride = weights.packed().k,
                        .x_rounding = dtype_,
                        .y = y,
                        .y_stride = weights.packed().n,
                        .accumulate = accumulate,
                        .scratch = scratch};
  backend_.linear(args, runner_);
}

size_t RowOps::ScratchBytes(const LinearWeights& weights, int64_t row_count) const {
  const PackedLinear& packed = weights.packed();
  return backend_.linear_scratch_bytes(row_count, packed.n, packed.k, runner_.worker_count());
}

void RowOps::GatedActivation(const float* gate_up, int64_t row_count, int64_t dim, float* y) const {
  backend_.silu_mul(gate_up, row_count, dim, y, runner_);
}

}  // namespace quire
