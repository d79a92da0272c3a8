#include "model/weights/weights.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <utility>

#include "base/round_up.h"
#include "kernels/linear_layout.h"
#include "model/weights/cache_lines.h"

namespace quire {
namespace {

// Addresses only: a mapping takes memory where it is written, so what is left of one costs nothing.
constexpr size_t kMappingBytes = size_t{256} << 20;
// What a task copies of a mapped matrix.
constexpr size_t kCopyBytes = size_t{1} << 20;

bool IsAligned(const void* data, DType dtype) {
  return reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(DTypeBytes(dtype)) == 0;
}

// The one type that holds all parts exactly.
DType CommonDType(std::span<const CheckpointTensor> tensors) {
  const DType first = *tensors.front().stored->dtype;
  const bool same = std::ranges::all_of(
      tensors, [first](const CheckpointTensor& tensor) { return tensor.stored->dtype == first; });
  return same ? first : DType::kF32;
}

int64_t ElementCount(const CheckpointTensor& tensor) {
  return static_cast<int64_t>(tensor.bytes.size()) / DTypeBytes(*tensor.stored->dtype);
}

// Puts the rows of a tensor that lie as rotary pairs into the order of the checkpoint.
void OrderRotaryRows(const CheckpointTensor& tensor, DType dtype, std::byte* data) {
  const int64_t head_rows = tensor.stored->rotary_head_rows;
  const int64_t rows = tensor.stored->shape.front();
  const auto row_bytes = static_cast<size_t>(ElementCount(tensor) / rows * DTypeBytes(dtype));
  std::vector<std::byte> head(static_cast<size_t>(head_rows) * row_bytes);
  for (int64_t first = 0; first < rows; first += head_rows) {
    std::byte* const at = data + static_cast<size_t>(first) * row_bytes;
    std::memcpy(head.data(), at, head.size());
    for (int64_t row = 0; row < head_rows; ++row) {
      const auto from = static_cast<size_t>(StoredRowOf(row, head_rows));
      std::memcpy(at + static_cast<size_t>(row) * row_bytes, head.data() + from * row_bytes,
                  row_bytes);
    }
  }
}

// As CopyElements, in the order of the file.
Status CopyStoredElements(const CheckpointTensor& tensor, DType dtype, std::byte* to) {
  const DType from = *tensor.stored->dtype;
  if (from == dtype) {
    std::memcpy(to, tensor.bytes.data(), tensor.bytes.size());
    return Status();
  }
  if (IsAligned(tensor.bytes.data(), from)) {
    ConvertElements(tensor.bytes.data(), from, to, dtype, ElementCount(tensor));
    return Status();
  }
  QUIRE_ASSIGN_OR_RETURN(const HostMemory aligned, HostMemory::Allocate(tensor.bytes.size()));
  std::memcpy(aligned.data(), tensor.bytes.data(), tensor.bytes.size());
  ConvertElements(aligned.data(), from, to, dtype, ElementCount(tensor));
  return Status();
}

// Copies a tensor to aligned memory as `dtype`: its own, or float32, which holds every type that is
// read.
Status CopyElements(const CheckpointTensor& tensor, DType dtype, std::byte* to) {
  QUIRE_RETURN_IF_ERROR(CopyStoredElements(tensor, dtype, to));
  if (tensor.stored->rotary_head_rows > 0) OrderRotaryRows(tensor, dtype, to);
  return Status();
}

// [columns][rows] of a matrix [rows][columns] of elements of `size` bytes.
std::vector<std::byte> Transposed(const std::byte* matrix, int64_t rows, int64_t columns,
                                  size_t size) {
  std::vector<std::byte> turned(static_cast<size_t>(rows * columns) * size);
  for (int64_t i = 0; i < columns; ++i) {
    for (int64_t j = 0; j < rows; ++j) {
      std::memcpy(turned.data() + static_cast<size_t>(i * rows + j) * size,
                  matrix + static_cast<size_t>(j * columns + i) * size, size);
    }
  }
  return turned;
}

// The name, in a packed checkpoint, of the matrix that the weights of all `parts` make.
std::string PackedName(std::span<const LinearPart> parts) {
  std::string name;
  for (const LinearPart& part : parts) name += (name.empty() ? "" : "+") + part.name;
  return name + ".packed";
}

std::string PackedSliceName(const std::string& name, size_t slice, int64_t head) {
  return name + "." + std::to_string(slice) + "." + std::to_string(head) + ".packed";
}

// Those of quantised matrices are held tensor by tensor; their formats' names follow.
std::string PackedPartName(const std::string& name) { return name + ".packed"; }
std::string PackedOrderName(const std::string& name) { return name + ".packed.order"; }
std::string WithFormat(const std::string& name, WeightFormat format) {
  return name + "." + std::string(WeightFormatName(format));
}

// The last part has the order of the one before, if both are equal.
void ShareOrder(std::vector<QuantisedPart>& parts) {
  if (parts.size() < 2) return;
  const auto& before = parts[parts.size() - 2].input_order;
  auto& last = parts.back().input_order;
  if (before != nullptr && last != nullptr && *before == *last) last = before;
}

// Codes, and their scales.
std::string Float8Name(const std::string& packed_name) { return packed_name + ".F8_E4M3"; }
std::string Float8ScalesName(const std::string& packed_name) {
  return Float8Name(packed_name) + ".scales";
}
size_t Float8ScaleBytes(const Float8Scales& layout, int64_t n, int64_t k) {
  return static_cast<size_t>(Float8ScaleCount(layout, n, k)) * sizeof(float);
}

// The outputs of part `index` among those of all parts, which are multiplied in one call.
TaskRange OutputsOf(std::span<const LinearPart> parts, size_t index) {
  TaskRange range{.begin = 0, .end = 0, .count = 0};
  for (size_t i = 0; i < parts.size(); ++i) {
    if (i < index) range.begin += parts[i].rows;
    if (i <= index) range.end += parts[i].rows;
    range.count += parts[i].rows;
  }
  return range;
}

Status CheckShape(const CheckpointTensor& tensor, std::span<const int64_t> shape) {
  if (std::ranges::equal(tensor.stored->shape, shape)) return Status();
  return Status(StatusCode::kCorrupt, tensor.Name() + " is " + tensor.stored->TypeAndShape() +
                                          ", config.json asks for " + ShapeText(shape) +
                                          "; the two do not belong together");
}

std::vector<int64_t> PackedShape(DType dtype, int64_t n, int64_t k) {
  return {OutputBlocks(n), PackedInputs(dtype, k), kOutputBlock};
}

}  // namespace

int64_t WeightMemory::BytesTaken(size_t bytes) {
  return static_cast<int64_t>(RoundUp(bytes, kCacheLine));
}

Result<std::shared_ptr<std::byte>> WeightMemory::Take(size_t bytes, const TaskRange& of) {
  const auto taken = static_cast<size_t>(BytesTaken(bytes));
  if (mapping_ == nullptr || mapping_->size() - used_ < taken) {
    QUIRE_ASSIGN_OR_RETURN(HostMemory mapping,
                           HostMemory::Allocate(std::max(taken, kMappingBytes)));
    mapping_ = std::make_shared<HostMemory>(std::move(mapping));
    used_ = 0;
  }
  std::byte* const data = mapping_->data() + used_;
  used_ += taken;
  if (nodes_ != nullptr) nodes_->Divide(data, taken, of);
  return std::shared_ptr<std::byte>(mapping_, data);
}

LinearWeights::LinearWeights(DType dtype, int64_t n, int64_t k,
                             std::shared_ptr<const std::byte> packed, std::vector<float> bias)
    : memory_(std::move(packed)), bias_(std::move(bias)) {
  packed_ = PackedLinear{.dtype = dtype,
                         .n = n,
                         .k = k,
                         .data = memory_.get(),
                         .bias = bias_.empty() ? nullptr : bias_.data()};
}

LinearWeights::LinearWeights(DType dtype, int64_t n, int64_t k, Float8Part part,
                             std::vector<float> bias)
    : LinearWeights(dtype, n, k, std::move(part.codes), std::move(bias)) {
  scales_ = std::move(part.scales);
  packed_.float8 = part.layout;
  packed_.float8.data = reinterpret_cast<const float*>(scales_.get());
}

LinearWeights::LinearWeights(std::vector<QuantisedPart> parts, int64_t k, std::vector<float> bias)
    : bias_(std::move(bias)), parts_(std::move(parts)) {
  int64_t n = 0;
  for (const QuantisedPart& part : parts_) {
    quantised_.push_back(
        {.format = part.format,
         .n = part.n,
         .k = k,
         .data = part.packed.get(),
         .bias = bias_.empty() ? nullptr : bias_.data() + n,
         .input_order = part.input_order == nullptr ? nullptr : part.input_order->data()});
    n += part.n;
  }
  packed_ = PackedLinear{.n = n, .k = k};
}

LinearWeights::LinearWeights(std::vector<LinearWeights> pieces, int64_t k)
    : pieces_(std::move(pieces)) {
  int64_t n = 0;
  for (const LinearWeights& piece : pieces_) n += piece.packed().n;
  packed_ = PackedLinear{.n = n, .k = k};
}

WeightLoader::WeightLoader(const Checkpoint& checkpoint, const Backend& backend,
                           ParallelRunner& runner, DType compute_dtype, WeightUse use)
    : checkpoint_(checkpoint),
      backend_(backend),
      runner_(runner),
      compute_dtype_(compute_dtype),
      use_(use),
      memory_(runner.numa_nodes()) {}

Result<CheckpointTensor> WeightLoader::FindFloat(const std::string& name,
                                                 std::span<const int64_t> shape) {
  QUIRE_ASSIGN_OR_RETURN(const CheckpointTensor tensor, checkpoint_.Find(name));
  const std::optional<DType> dtype = tensor.stored->dtype;
  if (dtype != DType::kF32 && dtype != DType::kF16 && dtype != DType::kBF16) {
    std::string quantised;
    for (const WeightFormat format : kWeightFormats) {
      if (IsOfGguf(format)) quantised += ", " + std::string(WeightFormatName(format));
    }
    const bool is_gguf = tensor.file.ends_with(".gguf");
    return Status(StatusCode::kBadArgument,
                  tensor.Name() + " is stored as " + std::string(tensor.stored->type_name) +
                      "; weights must be F32, F16 or BF16 (matrices of a GGUF file also" +
                      quantised.substr(1) + "): " +
                      (is_gguf ? "take the model in another quantisation, or widen this one with "
                                 "quire import"
                               : "save the model in one of these types"));
  }
  QUIRE_RETURN_IF_ERROR(CheckShape(tensor, shape));
  return tensor;
}

Result<CheckpointTensor> WeightLoader::FindMatrix(const std::string& name, int64_t rows,
                                                  int64_t k) {
  const int64_t shape[] = {rows, k};
  QUIRE_ASSIGN_OR_RETURN(CheckpointTensor tensor, checkpoint_.Find(name));
  if (!tensor.stored->format) return FindFloat(name, shape);
  QUIRE_RETURN_IF_ERROR(CheckShape(tensor, shape));
  return tensor;
}

void WeightLoader::Count(const std::string& name, int64_t elements) {
  if (std::ranges::find(tables_, name) == tables_.end()) parameter_count_ += elements;
}

Result<std::vector<float>> WeightLoader::Bias(std::span<const LinearPart> parts) {
  std::vector<float> bias;
  for (const LinearPart& part : parts) {
    QUIRE_ASSIGN_OR_RETURN(const std::vector<float> values, Vector(part.name + ".bias", part.rows));
    bias.insert(bias.end(), values.begin(), values.end());
  }
  return bias;
}

// Parts that end where a block of outputs does are packed one after the other, as they lie in the
// file. False, and nothing was done: some part does not, or is stored otherwise.
bool WeightLoader::PackInPlace(std::span<const CheckpointTensor> tensors, DType from, DType to,
                               int64_t k, std::byte* packed) {
  for (const CheckpointTensor& tensor : tensors) {
    const bool is_last = &tensor == &tensors.back();
    if (tensor.stored->rotary_head_rows > 0) return false;
    if (tensor.stored->dtype != from || !IsAligned(tensor.bytes.data(), from)) return false;
    if (!is_last && tensor.stored->shape.front() % kOutputBlock != 0) return false;
  }
  for (const CheckpointTensor& tensor : tensors) {
    const int64_t rows = tensor.stored->shape.front();
    backend_.pack_linear(tensor.bytes.data(), from, rows, k, to, packed, runner_);
    packed += backend_.packed_linear_bytes(to, rows, k);
  }
  return true;
}

Result<std::shared_ptr<std::byte>> WeightLoader::Pack(std::span<const CheckpointTensor> tensors,
                                                      DType from, DType to, int64_t n, int64_t k) {
  QUIRE_ASSIGN_OR_RETURN(std::shared_ptr<std::byte> packed,
                         memory_.Take(backend_.packed_linear_bytes(to, n, k)));
  if (PackInPlace(tensors, from, to, k, packed.get())) return packed;
  const int64_t row_bytes = k * DTypeBytes(from);
  QUIRE_ASSIGN_OR_RETURN(const HostMemory rows,
                         HostMemory::Allocate(static_cast<size_t>(n * row_bytes)));
  std::byte* next = rows.data();
  for (const CheckpointTensor& tensor : tensors) {
    QUIRE_RETURN_IF_ERROR(CopyElements(tensor, from, next));
    next += tensor.stored->shape.front() * row_bytes;
  }
  backend_.pack_linear(rows.data(), from, n, k, to, packed.get(), runner_);
  return packed;
}

Result<std::vector<CheckpointTensor>> WeightLoader::FindParts(std::span<const LinearPart> parts,
                                                              int64_t k) {
  std::vector<CheckpointTensor> tensors;
  for (const LinearPart& part : parts) {
    QUIRE_ASSIGN_OR_RETURN(CheckpointTensor tensor,
                           FindMatrix(part.name + ".weight", part.rows, k));
    tensors.push_back(std::move(tensor));
  }
  return tensors;
}

// How many parts, from the first on, a packed checkpoint holds as one matrix that is not quantised
// in blocks. 0: none.
size_t WeightLoader::PackedRun(std::span<const LinearPart> parts) const {
  for (size_t count = parts.size(); count > 0; --count) {
    const std::string name = PackedName(parts.first(count));
    if (checkpoint_.Has(name) || checkpoint_.Has(Float8Name(name))) return count;
  }
  return 0;
}

// Absent: nothing of the part is there. The reader of the part before it says so.
std::optional<WeightLoader::Form> WeightLoader::FormOf(const std::string& name) const {
  if (MappedFormat(PackedPartName(name))) return Form::kPacked;
  if (IsFloat8(name)) return Form::kFloat8;
  if (IsQuantised(name)) return Form::kFolder;
  if (!checkpoint_.Has(name + ".weight")) return std::nullopt;
  const Result<CheckpointTensor> found = checkpoint_.Find(name + ".weight");
  return found.ok() && found->stored->format ? Form::kGguf : Form::kPlain;
}

// How many parts, from the first on, are held in the same form.
size_t WeightLoader::RunOfOneForm(std::span<const LinearPart> parts) const {
  if (const size_t packed = PackedRun(parts); packed > 0) return packed;
  const std::optional<Form> form = FormOf(parts.front().name);
  size_t count = 1;
  for (; count < parts.size() && PackedRun(parts.subspan(count)) == 0; ++count) {
    const std::optional<Form> next = FormOf(parts[count].name);
    if (next && next != form) break;
  }
  return count;
}

Result<LinearWeights> WeightLoader::Linear(std::span<const LinearPart> parts, int64_t k,
                                           bool has_bias) {
  std::vector<LinearWeights> pieces;
  while (!parts.empty()) {
    const size_t count = RunOfOneForm(parts);
    QUIRE_ASSIGN_OR_RETURN(LinearWeights piece, LinearOfOneForm(parts.first(count), k, has_bias));
    pieces.push_back(std::move(piece));
    parts = parts.subspan(count);
  }
  if (pieces.size() == 1) return std::move(pieces.front());
  return LinearWeights(std::move(pieces), k);
}

Result<LinearWeights> WeightLoader::LinearOfOneForm(std::span<const LinearPart> parts, int64_t k,
                                                    bool has_bias) {
  int64_t n = 0;
  for (const LinearPart& part : parts) {
    Count(part.name + ".weight", part.rows * k);
    n += part.rows;
  }
  std::vector<float> bias;
  if (has_bias) {
    QUIRE_ASSIGN_OR_RETURN(bias, Bias(parts));
  }
  const std::string packed_name = PackedName(parts);
  if (checkpoint_.Has(packed_name)) return MappedMatrix(packed_name, n, k, std::move(bias));
  if (checkpoint_.Has(Float8Name(packed_name))) {
    return MappedFloat8(packed_name, n, k, std::move(bias));
  }
  if (MappedFormat(PackedPartName(parts.front().name))) {
    return MappedQuantised(parts, k, std::move(bias));
  }
  if (IsFloat8(parts.front().name)) return Float8(parts, k, std::move(bias));
  if (IsQuantised(parts.front().name)) return QuantisedFolder(parts, k, std::move(bias));
  QUIRE_ASSIGN_OR_RETURN(const std::vector<CheckpointTensor> tensors, FindParts(parts, k));
  if (tensors.front().stored->format) return Quantised(tensors, k, std::move(bias));
  const DType from = CommonDType(tensors);
  const DType to = PackedType(from);
  std::shared_ptr<const std::byte> packed;
  if (use_ == WeightUse::kLoad) {
    QUIRE_ASSIGN_OR_RETURN(packed, Pack(tensors, from, to, n, k));
    for (const CheckpointTensor& tensor : tensors) Checkpoint::Release(tensor);
  }
  return Matrix(packed_name, to, n, k, std::move(packed), std::move(bias));
}

Result<LinearWeights> WeightLoader::Quantised(std::span<const CheckpointTensor> tensors, int64_t k,
                                              std::vector<float> bias) {
  std::vector<QuantisedPart> parts;
  TaskRange of{.begin = 0, .end = 0, .count = 0};
  for (const CheckpointTensor& tensor : tensors) of.count += tensor.stored->shape.front();
  for (const CheckpointTensor& tensor : tensors) {
    const WeightFormat format = *tensor.stored->format;
    const int64_t rows = tensor.stored->shape.front();
    const size_t bytes = PackedQuantisedBytes(format, rows, k);
    QuantisedPart part{.format = format, .n = rows, .packed = nullptr};
    of.begin = std::exchange(of.end, of.end + rows);
    if (use_ == WeightUse::kLoad) {
      QUIRE_ASSIGN_OR_RETURN(std::shared_ptr<std::byte> packed, memory_.Take(bytes, of));
      PackQuantised(format, tensor.bytes.data(), rows, k, tensor.stored->rotary_head_rows,
                    packed.get(), runner_);
      part.packed = std::move(packed);
      Checkpoint::Release(tensor);
    }
    // "a.weight"
    const std::string_view name = std::string_view(tensor.stored->name);
    AddPart(std::string(name.substr(0, name.rfind('.'))), k, part);
    parts.push_back(std::move(part));
  }
  return LinearWeights(std::move(parts), k, std::move(bias));
}

bool WeightLoader::IsQuantised(const std::string& name) const {
  return quantisation_ && FolderMatrix::IsStored(checkpoint_, *quantisation_, name);
}

// Some quantisers write biases for every matrix. One that says something must not be left out.
Status WeightLoader::CheckNoBias(const LinearPart& part) {
  const std::string name = part.name + ".bias";
  if (!checkpoint_.Has(name) || use_ == WeightUse::kMeasure) return Status();
  const int64_t shape[] = {part.rows};
  QUIRE_ASSIGN_OR_RETURN(const CheckpointTensor tensor, FindFloat(name, shape));
  std::vector<float> values(static_cast<size_t>(part.rows));
  QUIRE_RETURN_IF_ERROR(
      CopyElements(tensor, DType::kF32, reinterpret_cast<std::byte*>(values.data())));
  if (std::ranges::all_of(values, [](float value) { return value == 0; })) return Status();
  return Status(StatusCode::kBadArgument,
                tensor.Name() +
                    " is not zero, and config.json has no bias there; the checkpoint "
                    "does not fit its config.json");
}

Result<LinearWeights> WeightLoader::QuantisedFolder(std::span<const LinearPart> parts, int64_t k,
                                                    std::vector<float> bias) {
  std::vector<QuantisedPart> quantised;
  for (size_t i = 0; i < parts.size(); ++i) {
    if (bias.empty()) QUIRE_RETURN_IF_ERROR(CheckNoBias(parts[i]));
    QUIRE_ASSIGN_OR_RETURN(QuantisedPart loaded, FolderPart(parts[i], k, OutputsOf(parts, i)));
    quantised.push_back(std::move(loaded));
    ShareOrder(quantised);
  }
  return LinearWeights(std::move(quantised), k, std::move(bias));
}

bool WeightLoader::IsFloat8(const std::string& name) const {
  return quantisation_ && Float8Matrix::IsStored(checkpoint_, name);
}

Result<LinearWeights> WeightLoader::Float8(std::span<const LinearPart> parts, int64_t k,
                                           std::vector<float> bias) {
  std::vector<Float8Matrix> matrices;
  int64_t n = 0;
  for (const LinearPart& part : parts) {
    if (bias.empty()) QUIRE_RETURN_IF_ERROR(CheckNoBias(part));
    QUIRE_ASSIGN_OR_RETURN(Float8Matrix matrix, Float8Matrix::Open(checkpoint_, *quantisation_,
                                                                   part.name, part.rows, k));
    matrices.push_back(std::move(matrix));
    n += part.rows;
  }
  Float8Part part{.codes = nullptr, .scales = nullptr, .layout = Float8Matrix::ScalesOf(matrices)};
  if (use_ == WeightUse::kLoad) QUIRE_RETURN_IF_ERROR(TakeFloat8(matrices, n, k, &part));
  return Float8Codes(PackedName(parts), n, k, std::move(part), std::move(bias));
}

// Codes and scales of a part that has its layout.
Status WeightLoader::TakeFloat8(std::span<const Float8Matrix> matrices, int64_t n, int64_t k,
                                Float8Part* part) {
  std::vector<const uint8_t*> rows;
  for (const Float8Matrix& matrix : matrices) {
    QUIRE_RETURN_IF_ERROR(matrix.CheckScales());
    for (int64_t row = 0; row < matrix.rows(); ++row) rows.push_back(matrix.Codes(row));
  }
  QUIRE_ASSIGN_OR_RETURN(std::shared_ptr<std::byte> codes, memory_.Take(PackedFloat8Bytes(n, k)));
  int64_t damaged = PackFloat8(rows, k, reinterpret_cast<uint8_t*>(codes.get()), runner_);
  if (damaged >= 0) {
    const Float8Matrix* matrix = matrices.data();
    for (; damaged >= matrix->rows(); ++matrix) damaged -= matrix->rows();
    return matrix->NotANumber(damaged);
  }
  QUIRE_ASSIGN_OR_RETURN(std::shared_ptr<std::byte> scales,
                         memory_.Take(Float8ScaleBytes(part->layout, n, k)));
  Float8Matrix::WriteScales(matrices, part->layout, reinterpret_cast<float*>(scales.get()));
  for (const Float8Matrix& matrix : matrices) matrix.Release();
  part->codes = std::move(codes);
  part->scales = std::move(scales);
  return Status();
}

LinearWeights WeightLoader::Float8Codes(const std::string& name, int64_t n, int64_t k,
                                        Float8Part part, std::vector<float> bias) {
  const size_t sizes[] = {PackedFloat8Bytes(n, k), Float8ScaleBytes(part.layout, n, k)};
  for (const size_t bytes : sizes) {
    AddBytes(DTypeName(DType::kF8E4M3), WeightMemory::BytesTaken(bytes));
  }
  if (record_ != nullptr) {
    record_->push_back({Float8Name(name),
                        DType::kU8,
                        {OutputBlocks(n), PackedInputs(DType::kBF16, k), kOutputBlock},
                        part.codes});
    record_->push_back({Float8ScalesName(name),
                        DType::kF32,
                        {OutputBlocks(n), Float8Segments(part.layout, k), part.layout.lanes()},
                        part.scales});
  }
  return LinearWeights(PackedType(DType::kF32), n, k, std::move(part), std::move(bias));
}

Result<QuantisedPart> WeightLoader::FolderPart(const LinearPart& part, int64_t k,
                                               const TaskRange& of) {
  QUIRE_ASSIGN_OR_RETURN(const FolderMatrix matrix,
                         FolderMatrix::Open(checkpoint_, *quantisation_, part.name, part.rows, k));
  const WeightFormat format = matrix.format();
  const size_t bytes = PackedQuantisedBytes(format, part.rows, k);
  QuantisedPart loaded{.format = format, .n = part.rows, .packed = nullptr};
  if (matrix.has_groups_of_inputs()) AddOrder(k);
  if (use_ == WeightUse::kMeasure) {
    AddPart(part.name, k, loaded);
    return loaded;
  }
  QUIRE_ASSIGN_OR_RETURN(std::vector<int32_t> order, matrix.InputOrder());
  QUIRE_ASSIGN_OR_RETURN(std::shared_ptr<std::byte> packed, memory_.Take(bytes, of));
  QUIRE_RETURN_IF_ERROR(matrix.Pack(order, packed.get(), runner_));
  matrix.Release();
  loaded.packed = std::move(packed);
  if (!order.empty()) {
    loaded.input_order = std::make_shared<const std::vector<int32_t>>(std::move(order));
  }
  AddPart(part.name, k, loaded);
  return loaded;
}

void WeightLoader::AddBytes(std::string_view type, int64_t bytes) {
  bytes_of_types_[std::string(type)] += bytes;
}

void WeightLoader::AddOrder(int64_t k) {
  AddBytes(DTypeName(DType::kI32), k * static_cast<int64_t>(sizeof(int32_t)));
}

int64_t WeightLoader::weight_bytes() const {
  int64_t sum = 0;
  for (const auto& [name, bytes] : bytes_of_types_) sum += bytes;
  return sum;
}

std::vector<WeightType> WeightLoader::weight_types() const {
  std::vector<WeightType> types;
  for (const auto& [name, bytes] : bytes_of_types_) types.push_back({name, bytes});
  std::ranges::stable_sort(types, std::ranges::greater(), &WeightType::bytes);
  return types;
}

void WeightLoader::AddPart(const std::string& name, int64_t k, const QuantisedPart& part) {
  AddBytes(WeightFormatName(part.format),
           WeightMemory::BytesTaken(PackedQuantisedBytes(part.format, part.n, k)));
  if (record_ == nullptr) return;
  record_->push_back({WithFormat(PackedPartName(name), part.format),
                      DType::kU8,
                      {Strips(part.n), StripBytes(part.format, k)},
                      part.packed});
  if (part.input_order == nullptr) return;
  const auto* const order = reinterpret_cast<const std::byte*>(part.input_order->data());
  record_->push_back({PackedOrderName(name),
                      DType::kI32,
                      {k},
                      std::shared_ptr<const std::byte>(part.input_order, order)});
}

std::optional<WeightFormat> WeightLoader::MappedFormat(const std::string& name) const {
  for (const WeightFormat format : kWeightFormats) {
    if (checkpoint_.Has(WithFormat(name, format))) return format;
  }
  return std::nullopt;
}

Result<CheckpointTensor> WeightLoader::FindMapped(const std::string& name, DType dtype,
                                                  std::span<const int64_t> shape) {
  QUIRE_ASSIGN_OR_RETURN(CheckpointTensor tensor, checkpoint_.Find(name));
  if (tensor.stored->dtype == dtype && std::ranges::equal(tensor.stored->shape, shape)) {
    return tensor;
  }
  return Status(StatusCode::kCorrupt, tensor.Name() + " is " + tensor.stored->TypeAndShape() +
                                          ", config.json asks for " +
                                          std::string(DTypeName(dtype)) + " " + ShapeText(shape) +
                                          "; the two do not belong together");
}

Result<LinearWeights> WeightLoader::MappedQuantised(std::span<const LinearPart> parts, int64_t k,
                                                    std::vector<float> bias) {
  std::vector<QuantisedPart> mapped;
  for (size_t i = 0; i < parts.size(); ++i) {
    QUIRE_ASSIGN_OR_RETURN(QuantisedPart one, MappedPart(parts[i], k, OutputsOf(parts, i)));
    mapped.push_back(std::move(one));
    ShareOrder(mapped);
  }
  return LinearWeights(std::move(mapped), k, std::move(bias));
}

Result<QuantisedPart> WeightLoader::MappedPart(const LinearPart& part, int64_t k,
                                               const TaskRange& of) {
  const std::string name = PackedPartName(part.name);
  const std::optional<WeightFormat> format = MappedFormat(name);
  if (!format) {
    return Status(StatusCode::kNotFound,
                  "matrix " + QuotedName(name) +
                      " is in no format there, though others of its kind are; pack the model "
                      "again");
  }
  if (k % BlockInputs(*format) != 0) {
    return Status(StatusCode::kCorrupt,
                  "matrix " + QuotedName(WithFormat(name, *format)) + " has " + std::to_string(k) +
                      " inputs, no whole blocks of " + std::to_string(BlockInputs(*format)));
  }
  const int64_t shape[] = {Strips(part.rows), StripBytes(*format, k)};
  QUIRE_ASSIGN_OR_RETURN(const CheckpointTensor tensor,
                         FindMapped(WithFormat(name, *format), DType::kU8, shape));
  QuantisedPart mapped{.format = *format, .n = part.rows, .packed = nullptr};
  QUIRE_ASSIGN_OR_RETURN(mapped.input_order, MappedOrder(PackedOrderName(part.name), k));
  if (use_ == WeightUse::kLoad) {
    QUIRE_ASSIGN_OR_RETURN(mapped.packed, ShareOutputs(tensor, kCacheLine, of));
  }
  AddPart(part.name, k, mapped);
  return mapped;
}

// Null: none is there. Read in every use: it is short.
Result<std::shared_ptr<const std::vector<int32_t>>> WeightLoader::MappedOrder(
    const std::string& name, int64_t k) {
  if (!checkpoint_.Has(name)) return std::shared_ptr<const std::vector<int32_t>>();
  const int64_t shape[] = {k};
  QUIRE_ASSIGN_OR_RETURN(const CheckpointTensor tensor, FindMapped(name, DType::kI32, shape));
  auto order = std::make_shared<std::vector<int32_t>>(static_cast<size_t>(k));
  std::memcpy(order->data(), tensor.bytes.data(), tensor.bytes.size());
  std::vector<bool> taken(static_cast<size_t>(k));
  for (const int32_t input : *order) {
    if (input < 0 || input >= k || taken[static_cast<size_t>(input)]) {
      return Status(StatusCode::kCorrupt, tensor.Name() + " has input " + std::to_string(input) +
                                              " twice or outside the " + std::to_string(k) +
                                              " that there are; pack the model again");
    }
    taken[static_cast<size_t>(input)] = true;
  }
  AddOrder(k);
  return std::shared_ptr<const std::vector<int32_t>>(std::move(order));
}

Result<RowTable> WeightLoader::MappedRows(const std::string& name, WeightFormat format,
                                          int64_t rows, int64_t dim) {
  const int64_t shape[] = {rows, StoredRowBytes(format, dim)};
  QUIRE_ASSIGN_OR_RETURN(const CheckpointTensor tensor,
                         FindMapped(WithFormat(name, format), DType::kU8, shape));
  if (dim % BlockInputs(format) != 0) {
    return Status(StatusCode::kCorrupt, tensor.Name() + ": rows of " + std::to_string(dim) +
                                            " are no whole blocks of " +
                                            std::to_string(BlockInputs(format)));
  }
  return RowTable{
      .format = format, .data = tensor.Share(), .bytes = static_cast<int64_t>(tensor.bytes.size())};
}

LinearWeights WeightLoader::Matrix(const std::string& name, DType dtype, int64_t n, int64_t k,
                                   std::shared_ptr<const std::byte> packed,
                                   std::vector<float> bias) {
  AddBytes(DTypeName(dtype), WeightMemory::BytesTaken(backend_.packed_linear_bytes(dtype, n, k)));
  if (record_ != nullptr) record_->push_back({name, dtype, PackedShape(dtype, n, k), packed});
  return LinearWeights(dtype, n, k, std::move(packed), std::move(bias));
}

// Where the tensor lies in the file if that is aligned so, else in a copy.
Result<std::shared_ptr<const std::byte>> WeightLoader::ShareAligned(const CheckpointTensor& tensor,
                                                                    size_t alignment) {
  if (reinterpret_cast<uintptr_t>(tensor.bytes.data()) % alignment == 0) return tensor.Share();
  QUIRE_ASSIGN_OR_RETURN(std::shared_ptr<std::byte> copy, memory_.Take(tensor.bytes.size()));
  std::memcpy(copy.get(), tensor.bytes.data(), tensor.bytes.size());
  Checkpoint::Release(tensor);
  return std::shared_ptr<const std::byte>(std::move(copy));
}

Result<std::shared_ptr<const std::byte>> WeightLoader::ShareOutputs(const CheckpointTensor& tensor,
                                                                    size_t alignment,
                                                                    const TaskRange& of) {
  if (runner_.numa_nodes() == nullptr) return ShareAligned(tensor, alignment);
  const size_t bytes = tensor.bytes.size();
  QUIRE_ASSIGN_OR_RETURN(std::shared_ptr<std::byte> copy, memory_.Take(bytes, of));
  Along(runner_).ParallelFor(static_cast<int64_t>(CeilDiv(bytes, kCopyBytes)),
                             [&](int64_t index, int) {
                               const size_t begin = static_cast<size_t>(index) * kCopyBytes;
                               std::memcpy(copy.get() + begin, tensor.bytes.data() + begin,
                                           std::min(kCopyBytes, bytes - begin));
                             });
  Checkpoint::Release(tensor);
  return std::shared_ptr<const std::byte>(std::move(copy));
}

Result<LinearWeights> WeightLoader::MappedMatrix(const std::string& name, int64_t n, int64_t k,
                                                 std::vector<float> bias) {
  QUIRE_ASSIGN_OR_RETURN(const CheckpointTensor found, checkpoint_.Find(name));
  const DType dtype = found.stored->dtype.value_or(DType::kF32);
  QUIRE_ASSIGN_OR_RETURN(const CheckpointTensor tensor, FindFloat(name, PackedShape(dtype, n, k)));
  if (PackedType(dtype) != dtype) {
    return Status(StatusCode::kBadArgument,
                  tensor.Name() +
                      " is packed as float32, and the model is to compute in bfloat16; "
                      "pack it for bfloat16, or compute in float32");
  }
  std::shared_ptr<const std::byte> packed;
  if (use_ == WeightUse::kLoad) {
    QUIRE_ASSIGN_OR_RETURN(packed, ShareOutputs(tensor, kCacheLine));
  }
  return Matrix(name, dtype, n, k, std::move(packed), std::move(bias));
}

Result<LinearWeights> WeightLoader::MappedFloat8(const std::string& name, int64_t n, int64_t k,
                                                 std::vector<float> bias) {
  const int64_t shape[] = {OutputBlocks(n), PackedInputs(DType::kBF16, k), kOutputBlock};
  QUIRE_ASSIGN_OR_RETURN(const CheckpointTensor codes,
                         FindMapped(Float8Name(name), DType::kU8, shape));
  QUIRE_ASSIGN_OR_RETURN(const CheckpointTensor scales, checkpoint_.Find(Float8ScalesName(name)));
  const bool has_blocks = quantisation_ && quantisation_->block_inputs > 0;
  Float8Part part{.codes = nullptr, .scales = nullptr, .layout = {}};
  part.layout.segment_inputs = has_blocks ? quantisation_->block_inputs : k;
  const std::vector<int64_t>& scale_sizes = scales.stored->shape;
  part.layout.of_outputs = !scale_sizes.empty() && scale_sizes.back() == kOutputBlock;
  const int64_t scale_shape[] = {OutputBlocks(n), Float8Segments(part.layout, k),
                                 part.layout.lanes()};
  QUIRE_RETURN_IF_ERROR(FindMapped(Float8ScalesName(name), DType::kF32, scale_shape).status());
  if (use_ == WeightUse::kLoad) {
    QUIRE_RETURN_IF_ERROR(CheckFloat8Scales(scales));
    QUIRE_ASSIGN_OR_RETURN(part.codes, ShareOutputs(codes, kCacheLine));
    QUIRE_ASSIGN_OR_RETURN(part.scales, ShareOutputs(scales, alignof(float)));
  }
  return Float8Codes(name, n, k, std::move(part), std::move(bias));
}

DType WeightLoader::PackedType(DType from) const {
  return compute_dtype_ == DType::kBF16 && from == DType::kF32 ? DType::kBF16 : from;
}

// `rows`: [slice.rows][k], aligned.
Result<std::shared_ptr<const std::byte>> WeightLoader::PackSlice(const std::byte* rows, DType from,
                                                                 const HeadSlice& slice,
                                                                 int64_t k) {
  const DType to = PackedType(from);
  const auto [n, inputs] = slice.MatrixSize(k);
  QUIRE_ASSIGN_OR_RETURN(std::shared_ptr<std::byte> packed,
                         memory_.Take(backend_.packed_linear_bytes(to, n, inputs)));
  std::vector<std::byte> turned;
  if (slice.transposed) {
    turned = Transposed(rows, inputs, n, static_cast<size_t>(DTypeBytes(from)));
    rows = turned.data();
  }
  backend_.pack_linear(rows, from, n, inputs, to, packed.get(), runner_);
  return std::shared_ptr<const std::byte>(std::move(packed));
}

Result<HeadMatrices> WeightLoader::LinearSlices(const std::string& name, int64_t heads,
                                                std::span<const HeadSlice> slices, int64_t k) {
  int64_t head_rows = 0;
  for (const HeadSlice& slice : slices) head_rows += slice.rows;
  Count(name + ".weight", heads * head_rows * k);
  if (checkpoint_.Has(PackedSliceName(name, 0, 0))) return MappedSlices(name, heads, slices, k);
  if (IsFloat8(name)) return Float8Slices(name, heads, slices, heads * head_rows, k);
  if (IsQuantised(name)) return QuantisedSlices(name, heads, slices, heads * head_rows, k);
  QUIRE_ASSIGN_OR_RETURN(const CheckpointTensor tensor,
                         FindMatrix(name + ".weight", heads * head_rows, k));
  if (tensor.stored->format) return GgufSlices(name, heads, slices, tensor);
  const DType from = *tensor.stored->dtype;
  const std::byte* rows = tensor.bytes.data();
  HostMemory aligned;
  if (use_ == WeightUse::kLoad && !IsAligned(rows, from)) {
    QUIRE_ASSIGN_OR_RETURN(aligned, HostMemory::Allocate(tensor.bytes.size()));
    QUIRE_RETURN_IF_ERROR(CopyElements(tensor, from, aligned.data()));
    rows = aligned.data();
  }
  QUIRE_ASSIGN_OR_RETURN(HeadMatrices matrices, CutSlices(name, rows, from, heads, slices, k));
  if (use_ == WeightUse::kLoad) Checkpoint::Release(tensor);
  return matrices;
}

bool WeightLoader::HasSlices(const std::string& name) const {
  return checkpoint_.Has(name + ".weight") || checkpoint_.Has(PackedSliceName(name, 0, 0));
}

Result<HeadMatrices> WeightLoader::GgufSlices(const std::string& name, int64_t heads,
                                              std::span<const HeadSlice> slices,
                                              const CheckpointTensor& tensor) {
  const WeightFormat format = *tensor.stored->format;
  const int64_t rows = tensor.stored->shape[0];
  const int64_t k = tensor.stored->shape[1];
  return WidenedSlices(name, heads, slices, rows, k, [&](float* values) -> Status {
    const int64_t row_bytes = StoredRowBytes(format, k);
    runner_.ParallelFor(rows, [&](int64_t row, int) {
      DequantiseRow(format, tensor.bytes.data() + row * row_bytes, k, values + row * k);
    });
    Checkpoint::Release(tensor);
    return Status();
  });
}

Result<HeadMatrices> WeightLoader::WidenedSlices(const std::string& name, int64_t heads,
                                                 std::span<const HeadSlice> slices, int64_t rows,
                                                 int64_t k,
                                                 const std::function<Status(float*)>& read) {
  HostMemory memory;
  if (use_ == WeightUse::kLoad) {
    QUIRE_ASSIGN_OR_RETURN(memory,
                           HostMemory::Allocate(static_cast<size_t>(rows * k) * sizeof(float)));
    QUIRE_RETURN_IF_ERROR(read(reinterpret_cast<float*>(memory.data())));
  }
  return CutSlices(name, memory.data(), DType::kF32, heads, slices, k);
}

Result<HeadMatrices> WeightLoader::Float8Slices(const std::string& name, int64_t heads,
                                                std::span<const HeadSlice> slices, int64_t rows,
                                                int64_t k) {
  QUIRE_ASSIGN_OR_RETURN(const Float8Matrix matrix,
                         Float8Matrix::Open(checkpoint_, *quantisation_, name, rows, k));
  return WidenedSlices(name, heads, slices, rows, k, [&](float* values) -> Status {
    QUIRE_RETURN_IF_ERROR(matrix.Read(0, rows, values, runner_));
    matrix.Release();
    return Status();
  });
}

Result<HeadMatrices> WeightLoader::QuantisedSlices(const std::string& name, int64_t heads,
                                                   std::span<const HeadSlice> slices, int64_t rows,
                                                   int64_t k) {
  QUIRE_ASSIGN_OR_RETURN(const FolderMatrix matrix,
                         FolderMatrix::Open(checkpoint_, *quantisation_, name, rows, k));
  return WidenedSlices(name, heads, slices, rows, k, [&](float* values) -> Status {
    QUIRE_ASSIGN_OR_RETURN(const std::vector<int32_t> order, matrix.InputOrder());
    QUIRE_RETURN_IF_ERROR(matrix.Read(order, values, runner_));
    matrix.Release();
    return Status();
  });
}

Result<HeadMatrices> WeightLoader::MappedSlices(const std::string& name, int64_t heads,
                                                std::span<const HeadSlice> slices, int64_t k) {
  HeadMatrices matrices(slices.size());
  for (size_t s = 0; s < slices.size(); ++s) {
    const auto [n, inputs] = slices[s].MatrixSize(k);
    for (int64_t h = 0; h < heads; ++h) {
      QUIRE_ASSIGN_OR_RETURN(LinearWeights matrix,
                             MappedMatrix(PackedSliceName(name, s, h), n, inputs, {}));
      matrices[s].push_back(std::move(matrix));
    }
  }
  return matrices;
}

Result<HeadMatrices> WeightLoader::CutSlices(const std::string& name, const std::byte* rows,
                                             DType from, int64_t heads,
                                             std::span<const HeadSlice> slices, int64_t k) {
  const bool loads = use_ == WeightUse::kLoad;
  HeadMatrices matrices(slices.size());
  for (int64_t h = 0; h < heads; ++h) {
    for (size_t s = 0; s < slices.size(); ++s) {
      std::shared_ptr<const std::byte> packed;
      if (loads) {
        QUIRE_ASSIGN_OR_RETURN(packed, PackSlice(rows, from, slices[s], k));
      }
      const auto [n, inputs] = slices[s].MatrixSize(k);
      matrices[s].push_back(
          Matrix(PackedSliceName(name, s, h), PackedType(from), n, inputs, std::move(packed), {}));
      if (loads) rows += slices[s].rows * k * DTypeBytes(from);
    }
  }
  return matrices;
}

void WeightLoader::Record(const CheckpointTensor& tensor) {
  if (record_ == nullptr) return;
  record_->push_back(
      {tensor.stored->name, *tensor.stored->dtype, tensor.stored->shape, tensor.Share()});
}

Result<std::vector<float>> WeightLoader::Vector(const std::string& name,
                                                std::initializer_list<int64_t> shape) {
  QUIRE_ASSIGN_OR_RETURN(const CheckpointTensor tensor, FindFloat(name, shape));
  const int64_t size = ElementCount(tensor);
  Count(name, size);
  AddBytes(DTypeName(DType::kF32), size * static_cast<int64_t>(sizeof(float)));
  if (use_ == WeightUse::kMeasure) return std::vector<float>();
  std::vector<float> values(static_cast<size_t>(size));
  QUIRE_RETURN_IF_ERROR(
      CopyElements(tensor, DType::kF32, reinterpret_cast<std::byte*>(values.data())));
  if (tensor.stored->value_offset == 0 && tensor.stored->rotary_head_rows == 0) {
    Record(tensor);
    return values;
  }
  // A packed file says nothing of offsets and rotary pairs: it has the values as they are used.
  if (tensor.stored->value_offset != 0) {
    for (float& value : values) value += tensor.stored->value_offset;
  }
  if (record_ != nullptr) {
    auto copy = std::make_shared<const std::vector<float>>(values);
    const auto* const bytes = reinterpret_cast<const std::byte*>(copy->data());
    record_->push_back({name, DType::kF32, tensor.stored->shape,
                        std::shared_ptr<const std::byte>(std::move(copy), bytes)});
  }
  return values;
}

Result<bool> WeightLoader::KeepsType(const std::string& name, int64_t rows, int64_t dim) {
  // Packed alone: it was kept when it was packed.
  const LinearPart part{name, rows};
  if (checkpoint_.Has(PackedName({&part, 1})) && !checkpoint_.Has(name + ".weight")) return true;
  if (MappedFormat(PackedPartName(name))) return true;
  QUIRE_ASSIGN_OR_RETURN(const CheckpointTensor tensor, FindMatrix(name + ".weight", rows, dim));
  if (tensor.stored->format) return true;
  return PackedType(*tensor.stored->dtype) == tensor.stored->dtype;
}

Result<RowTable> WeightLoader::Rows(const std::string& name, int64_t rows, int64_t dim) {
  RowTable table;
  if (const std::optional<WeightFormat> format = MappedFormat(name)) {
    QUIRE_ASSIGN_OR_RETURN(table, MappedRows(name, *format, rows, dim));
  } else {
    QUIRE_ASSIGN_OR_RETURN(table, StoredRows(name, rows, dim));
  }
  if (table.format && record_ != nullptr) {
    record_->push_back({WithFormat(name, *table.format),
                        DType::kU8,
                        {rows, StoredRowBytes(*table.format, dim)},
                        table.data});
  }
  Count(name, rows * dim);
  tables_.push_back(name);
  AddBytes(table.format ? WeightFormatName(*table.format) : DTypeName(table.dtype), table.bytes);
  return table;
}

Result<RowTable> WeightLoader::StoredRows(const std::string& name, int64_t rows, int64_t dim) {
  QUIRE_ASSIGN_OR_RETURN(const CheckpointTensor tensor, FindMatrix(name, rows, dim));
  RowTable table{.dtype = tensor.stored->dtype.value_or(DType::kF32),
                 .format = tensor.stored->format,
                 .data = tensor.Share(),
                 .bytes = static_cast<int64_t>(tensor.bytes.size())};
  if (table.format) return table;
  Record(tensor);
  if (use_ == WeightUse::kLoad) {
    QUIRE_ASSIGN_OR_RETURN(table.data,
                           ShareAligned(tensor, static_cast<size_t>(DTypeBytes(table.dtype))));
  }
  return table;
}

}  // namespace quire
