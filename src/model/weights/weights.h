// From the tensors of a checkpoint to what the decoder computes with: packed matrices, float32
// vectors, tables of rows.
#ifndef QUIRE_MODEL_WEIGHTS_WEIGHTS_H_
#define QUIRE_MODEL_WEIGHTS_WEIGHTS_H_

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/numa_nodes.h"
#include "kernels/backend.h"
#include "kernels/float8_weights.h"
#include "kernels/quantised_weights.h"
#include "model/weights/checkpoint.h"
#include "model/weights/float8_matrix.h"
#include "model/weights/quantised_folder.h"
#include "model/weights/safetensors_writer.h"
#include "quire/model.h"
#include "quire/seams.h"
#include "quire/status.h"
#include "quire/tensor.h"
#include "tensor/host_memory.h"

namespace quire {

// Memory for matrices side by side in mappings of many: each takes the bytes that it has and no
// whole huge page, and small ones lie in huge pages too. What it gave out stays while somebody
// holds it.
class WeightMemory {
 public:
  // Null: memory lies where it is written first.
  explicit WeightMemory(NumaNodes* nodes = nullptr) : nodes_(nodes) {}

  // Aligned to a cache line; the bytes are zero. They hold the outputs `of` that a linear layer
  // multiplies in one call, and lie on the nodes that take these. OutOfMemory: as HostMemory.
  Result<std::shared_ptr<std::byte>> Take(size_t bytes, const TaskRange& of = {});
  // What Take(bytes) uses up.
  static int64_t BytesTaken(size_t bytes);

 private:
  NumaNodes* nodes_;
  std::shared_ptr<HostMemory> mapping_;
  size_t used_ = 0;  // of mapping_
};

// Some outputs of a quantised matrix: those of one tensor.
struct QuantisedPart {
  WeightFormat format;
  int64_t n;
  std::shared_ptr<const std::byte> packed;
  // Null: inputs are as the row has them. Parts with the same order share it.
  std::shared_ptr<const std::vector<int32_t>> input_order = nullptr;
};

// A matrix of float8 codes. Null: it was only measured.
struct Float8Part {
  std::shared_ptr<const std::byte> codes;
  std::shared_ptr<const std::byte> scales;  // float32
  Float8Scales layout;                      // data is not set
};

// One weight matrix in the kernels' order, with its bias. The view's pointers follow moves. One
// whose outputs are held in several ways is a list of pieces.
class LinearWeights {
 public:
  LinearWeights() = default;
  LinearWeights(DType dtype, int64_t n, int64_t k, std::shared_ptr<const std::byte> packed,
                std::vector<float> bias);
  // Codes that stand for weights of `dtype`.
  LinearWeights(DType dtype, int64_t n, int64_t k, Float8Part part, std::vector<float> bias);
  // Parts on top of each other, [n of all parts, k].
  LinearWeights(std::vector<QuantisedPart> parts, int64_t k, std::vector<float> bias);
  // Pieces on top of each other, which have no pieces of their own, [n of all pieces, k].
  LinearWeights(std::vector<LinearWeights> pieces, int64_t k);

  // The size alone, without data, where the matrix is quantised or in pieces.
  const PackedLinear& packed() const { return packed_; }
  // Empty: the matrix is not quantised, or in pieces.
  std::span<const QuantisedLinear> quantised() const { return quantised_; }
  // Empty: the matrix is in one.
  std::span<const LinearWeights> pieces() const { return pieces_; }

 private:
  PackedLinear packed_;
  std::shared_ptr<const std::byte> memory_;
  std::shared_ptr<const std::byte> scales_;  // of float8 codes
  std::vector<float> bias_;
  std::vector<QuantisedLinear> quantised_;
  std::vector<QuantisedPart> parts_;
  std::vector<LinearWeights> pieces_;
};

// Rows that are looked up by index: a token embedding that is not the head too. Reads the mapped
// file where its alignment allows.
struct RowTable {
  DType dtype = DType::kF32;
  std::optional<WeightFormat> format = std::nullopt;  // rows in blocks of codes, without a dtype
  std::shared_ptr<const std::byte> data;              // [rows][dim]
  int64_t bytes = 0;
};

// A part of a fused matrix: the tensors `name`.weight [rows, k] and, if there is a bias,
// `name`.bias [rows].
struct LinearPart {
  std::string name;
  int64_t rows;
};

// Rows of each head in a matrix that has them head by head.
struct HeadSlice {
  int64_t rows;
  bool transposed;  // the matrix that comes out is [k, rows]

  // Outputs and inputs of the matrix that comes out.
  std::pair<int64_t, int64_t> MatrixSize(int64_t k) const {
    return transposed ? std::pair(k, rows) : std::pair(rows, k);
  }
};
using HeadMatrices = std::vector<std::vector<LinearWeights>>;  // [slice][head]

enum class WeightUse : uint8_t {
  kLoad,
  kMeasure,  // only checks and counts: no tensor is read, results have sizes and no data
};

// Loads tensors one after the other, and lets go of the file's memory after each that was copied,
// so that the weights are in memory about once. Errors name the file, the tensor, and what was
// expected: NotFound for a missing tensor, Corrupt for another shape, BadArgument for an element
// type other than float32, float16 and bfloat16.
//
// A checkpoint may hold matrices packed already (docs/formats/packed.md): those are read where they
// are mapped. Quantised matrices (of GGUF files and of quantised folders) stay quantised, whatever
// the model computes in; float8 codes stay codes.
class WeightLoader {
 public:
  // kBF16: float32 matrices are rounded to bfloat16; kF32: all types are kept. The arguments must
  // outlive the loader.
  WeightLoader(const Checkpoint& checkpoint, const Backend& backend, ParallelRunner& runner,
               DType compute_dtype, WeightUse use = WeightUse::kLoad);

  // Matrices that the checkpoint holds in this form are read so.
  void ReadQuantised(const std::optional<FolderQuantisation>& quantisation) {
    quantisation_ = quantisation;
  }
  // Notes from now on all that is loaded as a packed checkpoint holds it.
  void RecordTo(std::vector<TensorToWrite>* tensors) { record_ = tensors; }

  // The parts on top of each other as one matrix, in pieces where they are stored in several ways:
  // quantised in a file's form, and not.
  Result<LinearWeights> Linear(std::span<const LinearPart> parts, int64_t k, bool has_bias);
  Result<LinearWeights> Linear(std::initializer_list<LinearPart> parts, int64_t k, bool has_bias) {
    return Linear(std::span<const LinearPart>(parts.begin(), parts.size()), k, has_bias);
  }
  // The tensor `name`.weight [heads * (rows of all slices), k] cut into a matrix for each slice and
  // head.
  Result<HeadMatrices> LinearSlices(const std::string& name, int64_t heads,
                                    std::span<const HeadSlice> slices, int64_t k);
  Result<std::vector<float>> Vector(const std::string& name, int64_t size) {
    return Vector(name, {size});
  }
  // The elements of a tensor of any shape, row-major.
  Result<std::vector<float>> Vector(const std::string& name, std::initializer_list<int64_t> shape);
  bool Has(const std::string& name) const { return checkpoint_.Has(name); }
  // Whether LinearSlices finds the tensor `name`.weight, or what was packed of it.
  bool HasSlices(const std::string& name) const;
  Result<RowTable> Rows(const std::string& name, int64_t rows, int64_t dim);
  // Whether Linear keeps the elements of `name`.weight [rows, dim] as they are stored.
  Result<bool> KeepsType(const std::string& name, int64_t rows, int64_t dim);

  // Totals of everything loaded so far. A tensor that is used twice (tied embeddings) counts once
  // as parameters.
  int64_t parameter_count() const { return parameter_count_; }
  int64_t weight_bytes() const;
  // In memory, by the types that weights have there; most bytes first.
  std::vector<WeightType> weight_types() const;

 private:
  // How a part is held that is not packed as one matrix with others.
  enum class Form : uint8_t { kPlain, kGguf, kFolder, kFloat8, kPacked };

  std::optional<Form> FormOf(const std::string& name) const;
  Result<CheckpointTensor> FindFloat(const std::string& name, std::span<const int64_t> shape);
  // A tensor that FindFloat finds, or a quantised one.
  Result<CheckpointTensor> FindMatrix(const std::string& name, int64_t rows, int64_t k);
  size_t PackedRun(std::span<const LinearPart> parts) const;
  size_t RunOfOneForm(std::span<const LinearPart> parts) const;
  Result<LinearWeights> LinearOfOneForm(std::span<const LinearPart> parts, int64_t k,
                                        bool has_bias);
  Result<LinearWeights> Quantised(std::span<const CheckpointTensor> tensors, int64_t k,
                                  std::vector<float> bias);
  bool IsQuantised(const std::string& name) const;
  // The format in which a packed checkpoint holds the tensor `name` + "." + the format's name.
  std::optional<WeightFormat> MappedFormat(const std::string& name) const;
  Result<CheckpointTensor> FindMapped(const std::string& name, DType dtype,
                                      std::span<const int64_t> shape);
  Result<LinearWeights> MappedQuantised(std::span<const LinearPart> parts, int64_t k,
                                        std::vector<float> bias);
  Result<QuantisedPart> MappedPart(const LinearPart& part, int64_t k, const TaskRange& of);
  Result<std::shared_ptr<const std::vector<int32_t>>> MappedOrder(const std::string& name,
                                                                  int64_t k);
  Result<RowTable> MappedRows(const std::string& name, WeightFormat format, int64_t rows,
                              int64_t dim);
  Result<RowTable> StoredRows(const std::string& name, int64_t rows, int64_t dim);
  void AddBytes(std::string_view type, int64_t bytes);
  // The order of k inputs.
  void AddOrder(int64_t k);
  // Counts and notes a part.
  void AddPart(const std::string& name, int64_t k, const QuantisedPart& part);
  Result<LinearWeights> QuantisedFolder(std::span<const LinearPart> parts, int64_t k,
                                        std::vector<float> bias);
  Result<QuantisedPart> FolderPart(const LinearPart& part, int64_t k, const TaskRange& of);
  bool IsFloat8(const std::string& name) const;
  Result<LinearWeights> Float8(std::span<const LinearPart> parts, int64_t k,
                               std::vector<float> bias);
  Status TakeFloat8(std::span<const Float8Matrix> matrices, int64_t n, int64_t k, Float8Part* part);
  Result<LinearWeights> MappedFloat8(const std::string& name, int64_t n, int64_t k,
                                     std::vector<float> bias);
  LinearWeights Float8Codes(const std::string& name, int64_t n, int64_t k, Float8Part part,
                            std::vector<float> bias);
  // Slices of a matrix that is held widened. `read` fills float32 [rows, k], and lets the stored
  // matrix go.
  Result<HeadMatrices> WidenedSlices(const std::string& name, int64_t heads,
                                     std::span<const HeadSlice> slices, int64_t rows, int64_t k,
                                     const std::function<Status(float*)>& read);
  Result<HeadMatrices> GgufSlices(const std::string& name, int64_t heads,
                                  std::span<const HeadSlice> slices,
                                  const CheckpointTensor& tensor);
  Result<HeadMatrices> Float8Slices(const std::string& name, int64_t heads,
                                    std::span<const HeadSlice> slices, int64_t rows, int64_t k);
  Result<HeadMatrices> QuantisedSlices(const std::string& name, int64_t heads,
                                       std::span<const HeadSlice> slices, int64_t rows, int64_t k);
  Status CheckNoBias(const LinearPart& part);
  Result<std::vector<float>> Bias(std::span<const LinearPart> parts);
  DType PackedType(DType from) const;
  Result<std::shared_ptr<const std::byte>> ShareAligned(const CheckpointTensor& tensor,
                                                        size_t alignment);
  // Outputs `of` of a packed matrix. Pages of a file lie where anyone has read them first, so NUMA
  // nodes get a copy.
  Result<std::shared_ptr<const std::byte>> ShareOutputs(const CheckpointTensor& tensor,
                                                        size_t alignment, const TaskRange& of = {});
  Result<LinearWeights> MappedMatrix(const std::string& name, int64_t n, int64_t k,
                                     std::vector<float> bias);
  LinearWeights Matrix(const std::string& name, DType dtype, int64_t n, int64_t k,
                       std::shared_ptr<const std::byte> packed, std::vector<float> bias);
  Result<std::vector<CheckpointTensor>> FindParts(std::span<const LinearPart> parts, int64_t k);
  Result<HeadMatrices> MappedSlices(const std::string& name, int64_t heads,
                                    std::span<const HeadSlice> slices, int64_t k);
  // `rows`: of all heads, aligned; not read in order to measure.
  Result<HeadMatrices> CutSlices(const std::string& name, const std::byte* rows, DType from,
                                 int64_t heads, std::span<const HeadSlice> slices, int64_t k);
  Result<std::shared_ptr<const std::byte>> PackSlice(const std::byte* rows, DType from,
                                                     const HeadSlice& slice, int64_t k);
  Result<std::shared_ptr<std::byte>> Pack(std::span<const CheckpointTensor> tensors, DType from,
                                          DType to, int64_t n, int64_t k);
  bool PackInPlace(std::span<const CheckpointTensor> tensors, DType from, DType to, int64_t k,
                   std::byte* packed);
  void Count(const std::string& name, int64_t elements);
  void Record(const CheckpointTensor& tensor);

  const Checkpoint& checkpoint_;
  const Backend& backend_;
  ParallelRunner& runner_;
  const DType compute_dtype_;
  const WeightUse use_;
  std::optional<FolderQuantisation> quantisation_;
  WeightMemory memory_;
  int64_t parameter_count_ = 0;
  std::map<std::string, int64_t> bytes_of_types_;
  std::vector<std::string> tables_;  // names that Rows has counted
  std::vector<TensorToWrite>* record_ = nullptr;
};

}  // namespace quire

#endif  // QUIRE_MODEL_WEIGHTS_WEIGHTS_H_
