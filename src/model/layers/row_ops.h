// What decoders compute row by row, with one set of kernels in one precision. A row's result does
// not depend on the rows beside it.
#ifndef QUIRE_MODEL_LAYERS_ROW_OPS_H_
#define QUIRE_MODEL_LAYERS_ROW_OPS_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/backend.h"
#include "model/weights/weights.h"
#include "quire/seams.h"
#include "quire/tensor.h"

namespace quire {

// For kernels that are called from inside a task.
class SerialRunner final : public ParallelRunner {
 public:
  int worker_count() const noexcept override { return 1; }
  void Run(int64_t count, Task task, void* context) noexcept override {
    for (int64_t i = 0; i < count; ++i) task(context, i, 0);
  }
};

float Sigmoid(float x);
void CopyFloats(const float* from, int64_t count, float* to);

// Heads in rows: that of head h in row r is at data + r * row + h * head.
struct HeadsView {
  float* data;
  int64_t row;
  int64_t head;
};

class RowOps {
 public:
  // `dtype`: kBF16 rounds what enters a product. `activations`: as ModelOptions has them. The
  // references outlive this.
  RowOps(const Backend& backend, ParallelRunner& runner, DType dtype, DType activations)
      : backend_(backend), runner_(runner), dtype_(dtype), activations_(activations) {}

  const Backend& backend() const { return backend_; }
  ParallelRunner& runner() const { return runner_; }
  DType dtype() const { return dtype_; }

  // RMS norm with weights `weight` + offset; y may be x.
  void Norm(const std::vector<float>& weight, float offset, float eps, const float* x,
            int64_t row_count, float* y) const;
  // Normalises each of `piece_count` pieces of each row (stride `row_stride`) by itself, in place.
  // `weight`: that of one piece, used for all, or those of all pieces.
  void NormPieces(const std::vector<float>& weight, float offset, float eps, int64_t row_count,
                  int64_t row_stride, int64_t piece_count, int64_t piece_size, float* x) const;
  // Rows of x and y lie after each other. `accumulate` adds the product to y.
  void Multiply(const LinearWeights& weights, const float* x, int64_t row_count, float* y,
                bool accumulate, void* scratch) const;
  size_t ScratchBytes(const LinearWeights& weights, int64_t row_count) const;
  // Rows `ids` of the matrix itself, [ids.size(), k] in float32. REQUIRES: 0 <= ids < n; the matrix
  // is in one.
  void GatherRows(const LinearWeights& weights, std::span<const int32_t> ids, float* rows) const;
  // As above, of a table of rows of `width`.
  void GatherRows(const RowTable& table, int64_t width, std::span<const int32_t> ids,
                  float* rows) const;
  // Each head by a matrix of its own; all have the same shape.
  void MultiplyHeads(std::span<const LinearWeights> weights, const HeadsView& x, int64_t row_count,
                     const HeadsView& y, void* scratch) const;
  size_t HeadsScratchBytes(std::span<const LinearWeights> weights, int64_t row_count) const;

 private:
  // Rows of x lie after each other, those of y `y_stride` apart.
  struct Product {
    const float* x;
    int64_t row_count;
    float* y;
    int64_t y_stride;
    bool accumulate;
    void* scratch;
  };

  void Multiply(const LinearWeights& weights, Product product) const;
  // By one matrix, the rows rounded to `rounding`.
  void MultiplyPacked(const PackedLinear& w, DType rounding, const Product& product) const;
  void MultiplyQuantised(const LinearWeights& weights, Product product) const;
  // The same where rows stay numbers.
  void MultiplyWidened(const LinearWeights& weights, Product product) const;
  // The scratch memory for a product on one worker.
  size_t SerialScratchBytes(const LinearWeights& weights, int64_t row_count) const;

  const Backend& backend_;
  ParallelRunner& runner_;
  const DType dtype_;
  const DType activations_;
};

}  // namespace quire

#endif  // QUIRE_MODEL_LAYERS_ROW_OPS_H_
