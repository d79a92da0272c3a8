// A matrix that the safetensors files of a Hugging Face folder hold as codes of 8-bit floating
// point (e4m3) with scales. No kernel computes with such codes: they are widened when the model is
// loaded.
#ifndef QUIRE_MODEL_WEIGHTS_FLOAT8_MATRIX_H_
#define QUIRE_MODEL_WEIGHTS_FLOAT8_MATRIX_H_

#include <cstdint>
#include <string>

#include "model/weights/checkpoint.h"
#include "model/weights/quantised_folder.h"
#include "quire/seams.h"
#include "quire/status.h"

namespace quire {

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
  // Rows [begin, begin + count) into `values`, [count, k]. Corrupt: one is not a number.
  Status Read(int64_t begin, int64_t count, float* values, ParallelRunner& runner) const;
  // Checkpoint::Release of both tensors.
  void Release() const noexcept;

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
