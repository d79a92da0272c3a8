// A matrix that the safetensors files of a Hugging Face folder hold as codes of 8-bit floating
// point (e4m3) with scales. Kernels compute with the codes (kernels/float8_weights.h); what is cut
// head by head is widened when the model is loaded.
#ifndef QUIRE_MODEL_WEIGHTS_FLOAT8_MATRIX_H_
#define QUIRE_MODEL_WEIGHTS_FLOAT8_MATRIX_H_

#include <cstdint>
#include <span>
#include <string>
#include <utility>

#include "kernels/float8_weights.h"
#include "model/weights/checkpoint.h"
#include "model/weights/quantised_folder.h"
#include "quire/seams.h"
#include "quire/status.h"

namespace quire {

// Corrupt: a scale is not a number, or too large for the greatest code. Reads all of them.
Status CheckFloat8Scales(const CheckpointTensor& scales);

// name.weight F8_E4M3 [n, k], and name.weight_scale_inv or name.weight_scale: one number, or [n],
// [n, 1], or, with blocks of `bn` outputs and `bk` inputs, [ceil(n / bn), ceil(k / bk)].
//   w = q scale, in float32, rounded once
class Float8Matrix {
 public:
  static bool IsStored(const Checkpoint& checkpoint, const std::string& name);
  // NotFound: there are no scales. Corrupt: a shape does not fit. BadArgument: the scales' type.
  // No number is read.
  static Result<Float8Matrix> Open(const Checkpoint& checkpoint,
                                   const FolderQuantisation& quantisation, const std::string& name,
                                   int64_t n, int64_t k);

  int64_t rows() const { return n_; }
  const uint8_t* Codes(int64_t row) const {
    return reinterpret_cast<const uint8_t*>(codes_.bytes.data()) + row * k_;
  }
  // The scale of the row's block `segment` of inputs.
  float ScaleAt(int64_t row, int64_t segment) const;
  Status CheckScales() const { return CheckFloat8Scales(scales_); }
  // Corrupt, of a row with a code that is not a number.
  Status NotANumber(int64_t row) const;

  // Rows [begin, begin + count) into `values`, [count, k]. Corrupt: one is not a number.
  Status Read(int64_t begin, int64_t count, float* values, ParallelRunner& runner) const;
  // Checkpoint::Release of both tensors.
  void Release() const noexcept;

  // How the scales of matrices on top of each other lie for the kernels; data is null.
  static Float8Scales ScalesOf(std::span<const Float8Matrix> matrices);
  // Float8ScaleCount of them.
  static void WriteScales(std::span<const Float8Matrix> matrices, const Float8Scales& layout,
                          float* scales);

 private:
  Float8Matrix(CheckpointTensor codes, CheckpointTensor scales, int64_t n, int64_t k)
      : codes_(std::move(codes)), scales_(std::move(scales)), n_(n), k_(k) {}
  // How many outputs and inputs have the same scale.
  Status SetBlocks(const FolderQuantisation& quantisation);
  bool ReadRow(int64_t row, float* values) const;

  CheckpointTensor codes_, scales_;
  int64_t n_, k_;
  int64_t block_outputs_ = 1;
  int64_t block_inputs_ = 1;
};

}  // namespace quire

#endif  // QUIRE_MODEL_WEIGHTS_FLOAT8_MATRIX_H_
