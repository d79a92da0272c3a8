#include "model/weights/float8_matrix.h"

#include <algorithm>
#include <atomic>
#include <utility>
#include <vector>

#include "base/round_up.h"
#include "model/weights/folder_tensors.h"
#include "tensor/float8.h"

namespace quire {
namespace {

constexpr std::string_view kFloat8Type = "F8_E4M3";
constexpr uint8_t kNotANumber = 0x7F;

}  // namespace

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

bool Float8Matrix::ReadRow(int64_t row, float* values) const {
  const auto* const codes = reinterpret_cast<const uint8_t*>(codes_.bytes.data()) + row * k_;
  const int64_t first_scale = row / block_outputs_ * CeilDiv(k_, block_inputs_);
  for (int64_t begin = 0; begin < k_; begin += block_inputs_) {
    const float scale = FloatAt(scales_, first_scale + begin / block_inputs_);
    const int64_t end = std::min(begin + block_inputs_, k_);
    for (int64_t i = begin; i < end; ++i) {
      if ((codes[i] & kNotANumber) == kNotANumber) return false;
      values[i] = F8E4M3ToF32(codes[i]) * scale;
    }
  }
  return true;
}

Status Float8Matrix::Read(int64_t begin, int64_t count, float* values,
                          ParallelRunner& runner) const {
  std::atomic<int64_t> not_read = -1;
  runner.ParallelFor(count, [&](int64_t i, int) {
    if (!ReadRow(begin + i, values + i * k_)) not_read.store(begin + i);
  });
  if (not_read.load() < 0) return Status();
  return Status(StatusCode::kCorrupt, codes_.Name() + ": row " + std::to_string(not_read.load()) +
                                          " has a code that is not a number");
}

void Float8Matrix::Release() const noexcept {
  Checkpoint::Release(codes_);
  Checkpoint::Release(scales_);
}

}  // namespace quire
