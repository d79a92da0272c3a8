// Matrices that the safetensors files of a Hugging Face folder hold quantised, in the forms of
// compressed-tensors, GPTQ and AWQ: several tensors per matrix, which become one in a format of the
// kernels. Codes, scales and offsets move and keep their values. Codes of floating point:
// float8_matrix.h.
#ifndef QUIRE_MODEL_WEIGHTS_QUANTISED_FOLDER_H_
#define QUIRE_MODEL_WEIGHTS_QUANTISED_FOLDER_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kernels/quantised_weights.h"
#include "model/weights/checkpoint.h"
#include "quire/seams.h"
#include "quire/status.h"

namespace quire {

enum class FolderScheme : uint8_t { kCompressed, kGptq, kAwq, kFloat8 };

// What the folder's configuration says of all its quantised matrices.
struct FolderQuantisation {
  FolderScheme scheme = FolderScheme::kCompressed;
  int64_t bits = 4;        // kGptq, kAwq: 4 or 8; matrices of kCompressed tell it by their tensors
  int64_t group_size = 0;  // kGptq, kAwq: inputs with one scale; 0: all of a matrix
  int zero_raise = 0;      // kGptq: what is added to the offsets as they are stored
  bool is_strewn = false;  // kGptq: groups are strewn over the inputs, whose groups are stored
  // kCompressed: all packed codes of integers have offsets. False: some may have none.
  bool has_offsets = false;
  // kFloat8, kCompressed: outputs and inputs with one scale, where scales of float8 codes are those
  // of blocks; 0: they are not.
  int64_t block_outputs = 0;
  int64_t block_inputs = 0;
};

// The tensors of one matrix `name` [n, k], whose types and shapes are checked. With q the stored
// code of an output and input, g the input's group:
//   kCompressed: name.weight int8 [n, k], or name.weight_packed int32 [n, k / per], `per` codes of
//   4
//     or 8 bits in a word, raised by half their range; name.weight_scale [n, groups], [n] or [1];
//     name.weight_zero_point, int8 [n, groups] or int32 [n / per, groups]; name.weight_g_idx [k].
//     Or name.weight_packed uint8 [n, k / 2], codes of MXFP4, the first of two in the low half of a
//     byte; name.weight_scale uint8 [n, k / 32], s: w = 2^(s - 127) times the code's number.
//   kGptq: name.qweight int32 [k / per, n]; name.qzeros int32 [groups, n / per]; name.scales
//     [groups, n]; name.g_idx int32 [k].
//   kAwq: name.qweight int32 [k, n / 8]; name.qzeros int32 [groups, n / 8]; name.scales
//     [groups, n]; outputs in a word in the order 0, 2, 4, 6, 1, 3, 5, 7.
//   w = scale[g] (q - zero[g])
class FolderMatrix {
 public:
  // Whether the checkpoint has the codes of the matrix in that form.
  static bool IsStored(const Checkpoint& checkpoint, const FolderQuantisation& quantisation,
                       const std::string& name);

  // NotFound, Corrupt: a tensor is missing, or has not the shape that n and k ask for. BadArgument:
  // a type or group size that no format of the kernels takes. No tensor is read.
  static Result<FolderMatrix> Open(const Checkpoint& checkpoint,
                                   const FolderQuantisation& quantisation, const std::string& name,
                                   int64_t n, int64_t k);

  WeightFormat format() const;
  bool has_groups_of_inputs() const { return groups_.has_value(); }

  // Which input each input of the packed matrix is: groups side by side. Empty: as they are.
  // Corrupt: a group that is no group, or has not group_size inputs.
  Result<std::vector<int32_t>> InputOrder() const;
  // PackedQuantisedBytes of it, zero before. Takes memory for 16 rows per worker. Corrupt: an
  // offset outside the range of the codes. BadArgument: scales beside offsets that are more precise
  // than float16 and bfloat16.
  Status Pack(std::span<const int32_t> order, std::byte* packed, ParallelRunner& runner) const;
  // The numbers as float32, [n, k], inputs as they are; `order` is InputOrder(). Takes memory and
  // fails as Pack.
  Status Read(std::span<const int32_t> order, float* values, ParallelRunner& runner) const;
  // Checkpoint::Release of all tensors.
  void Release() const noexcept;

 private:
  enum class Codes : uint8_t { kBytes, kRowBytes, kRowWords, kInputWords, kOutputWords };
  enum class Zeros : uint8_t { kNone, kBytes, kRowWords, kColumnWords };

  FolderMatrix(const Checkpoint& checkpoint, std::string name, int64_t n, int64_t k)
      : checkpoint_(&checkpoint), name_(std::move(name)), n_(n), k_(k) {}

  Status FindCompressed(const FolderQuantisation& quantisation);
  Status FindPowers();
  Status FindWords(const FolderQuantisation& quantisation);
  Status FindZeros();
  Status FindGroups(const std::string& suffix);
  Status CheckGroupSize() const;
  Result<CheckpointTensor> Find(const std::string& suffix, std::string_view type,
                                std::span<const int64_t> shape) const;
  bool Has(const std::string& suffix) const { return checkpoint_->Has(name_ + suffix); }

  int64_t per_word() const { return 32 / bits_; }
  bool is_wide() const;
  Status CheckNumbers() const;
  float ScaleAt(int64_t output, int64_t group) const;
  int ZeroAt(int64_t output, int64_t group) const;
  uint32_t WordAt(int64_t output, int64_t group) const;
  void ReadCodes(int64_t output, std::span<const int32_t> order, int8_t* codes) const;
  void WriteRow(int64_t output, std::span<const int32_t> order, int8_t* codes,
                std::byte* row) const;

  const Checkpoint* checkpoint_;
  std::string name_;
  int64_t n_, k_;
  int64_t bits_ = 8;
  int64_t group_inputs_ = 0;
  int64_t group_count_ = 0;
  int zero_raise_ = 0;
  Codes code_order_ = Codes::kBytes;
  Zeros zero_order_ = Zeros::kNone;
  bool interleaves_ = false;      // outputs in a word: 0, 2, 4, 6, 1, 3, 5, 7
  bool scales_by_group_ = false;  // [groups, n], not [n, groups]
  bool has_one_scale_ = false;    // of the whole matrix
  bool has_powers_ = false;       // scales are exponents of two
  std::optional<CheckpointTensor> codes_, scales_, zeros_, groups_;
};

}  // namespace quire

#endif  // QUIRE_MODEL_WEIGHTS_QUANTISED_FOLDER_H_
