#include "model/weights/float8_matrix.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <utility>
#include <vector>

#include "base/round_up.h"
#include "model/weights/folder_tensors.h"
#include "tensor/float8.h"

namespace quire {
namespace {

constexpr std::string_view kFloat8Type = "F8_E4M3";

}  // namespace

Status CheckFloat8Scales(const CheckpointTensor& scales) {
  for (int64_t i = 0; i < ScaleCount(scales); ++i) {
    const float scale = FloatAt(scales, i);
    if (std::abs(scale) <= kFloat8ScaleMax) continue;
    return Status(StatusCode::kCorrupt, scales.Name() + ": number " + std::to_string(i) + " is " +
                                            std::to_string(scale) +
                                            "; a scale is at most 2^119 in magnitude");
  }
  return Status();
}

bool Float8Matrix::IsStored(const Checkpoint& checkpoint, const std::string& name) {
  if (!checkpoint.Has(name + ".weight")) return false;
  const Result<CheckpointTensor> found = checkpoint.Find(name + ".weight");
  return found.ok() && found->stored->type_name == kFloat8Type;
}

Result<Float8Matrix> Float8Matrix::Open(const Checkpoint& checkpoint,
                                        const FolderQuantisation& quantisation,
                                        const std::string& name, int64_t n, int64_t k) {
  const int64_t shape[] = {n, k};
  QUIRE_ASSIGN_OR_RETURN(CheckpointTensor codes,
                         FindTyped(checkpoint, name + ".weight", kFloat8Type, shape));
  const bool is_inverse = checkpoint.Has(name + ".weight_scale_inv");
  QUIRE_ASSIGN_OR_RETURN(
      CheckpointTensor scales,
      FindScales(checkpoint, name + (is_inverse ? ".weight_scale_inv" : ".weight_scale")));
  Float8Matrix matrix(std::move(codes), std::move(scales), n, k);
  QUIRE_RETURN_IF_ERROR(matrix.SetBlocks(quantisation));
  return matrix;
}

Status Float8Matrix::SetBlocks(const FolderQuantisation& quantisation) {
  const std::vector<int64_t>& shape = scales_.stored->shape;
  const int64_t bn = quantisation.block_outputs;
  const int64_t bk = quantisation.block_inputs;
  const bool has_blocks = bn > 0;
  if (has_blocks && shape == std::vector{CeilDiv(n_, bn), CeilDiv(k_, bk)}) {
    block_outputs_ = bn;
    block_inputs_ = bk;
  } else if (!has_blocks && ScaleCount(scales_) == 1) {
    block_outputs_ = n_;
    block_inputs_ = k_;
  } else if (!has_blocks && (shape == std::vector{n_} || shape == std::vector{n_, int64_t{1}})) {
    block_inputs_ = k_;
  } else {
    return Status(StatusCode::kCorrupt,
                  scales_.Name() + " is " + scales_.stored->TypeAndShape() + ", its matrix is " +
                      ShapeText(codes_.stored->shape) + "; expected are " +
                      (has_blocks ? "scales of blocks of " + std::to_string(bn) + " outputs and " +
                                        std::to_string(bk) + " inputs"
                                  : std::string("one scale, or one of each output")));
  }
  return Status();
}

float Float8Matrix::ScaleAt(int64_t row, int64_t segment) const {
  return FloatAt(scales_, row / block_outputs_ * CeilDiv(k_, block_inputs_) + segment);
}

Status Float8Matrix::NotANumber(int64_t row) const {
  return Status(StatusCode::kCorrupt, codes_.Name() + ": row " + std::to_string(row) +
                                          " has a code that is not a number");
}

bool Float8Matrix::ReadRow(int64_t row, float* values) const {
  const uint8_t* const codes = Codes(row);
  for (int64_t begin = 0; begin < k_; begin += block_inputs_) {
    const float scale = ScaleAt(row, begin / block_inputs_);
    const int64_t end = std::min(begin + block_inputs_, k_);
    for (int64_t i = begin; i < end; ++i) {
      if (!IsFloat8Number(codes[i])) return false;
      values[i] = F8E4M3ToF32(codes[i]) * scale;
    }
  }
  return true;
}

Status Float8Matrix::Read(int64_t begin, int64_t count, float* values,
                          ParallelRunner& runner) const {
  QUIRE_RETURN_IF_ERROR(CheckScales());
  std::atomic<int64_t> not_read = -1;
  runner.ParallelFor(count, [&](int64_t i, int) {
    if (!ReadRow(begin + i, values + i * k_)) not_read.store(begin + i);
  });
  return not_read.load() < 0 ? Status() : NotANumber(not_read.load());
}

void Float8Matrix::Release() const noexcept {
  Checkpoint::Release(codes_);
  Checkpoint::Release(scales_);
}

Float8Scales Float8Matrix::ScalesOf(std::span<const Float8Matrix> matrices) {
  Float8Scales layout{.segment_inputs = matrices.front().block_inputs_};
  int64_t first = 0;
  for (const Float8Matrix& matrix : matrices) {
    const bool has_one = matrix.block_outputs_ >= matrix.n_;
    const bool fits = has_one || matrix.block_outputs_ % kOutputBlock == 0;
    if (!fits || first % kOutputBlock != 0) layout.of_outputs = true;
    first += matrix.n_;
  }
  return layout;
}

void Float8Matrix::WriteScales(std::span<const Float8Matrix> matrices, const Float8Scales& layout,
                               float* scales) {
  int64_t output = 0;
  for (const Float8Matrix& matrix : matrices) {
    const int64_t segments = Float8Segments(layout, matrix.k_);
    for (int64_t row = 0; row < matrix.n_; ++row, ++output) {
      const int64_t lane = output % kOutputBlock;
      if (lane >= layout.lanes()) continue;
      for (int64_t segment = 0; segment < segments; ++segment) {
        const int64_t at = (output / kOutputBlock * segments + segment) * layout.lanes() + lane;
        scales[at] = matrix.ScaleAt(row, segment);
      }
    }
  }
}

}  // namespace quire
