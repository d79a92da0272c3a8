#include "model/weights/folder_tensors.h"

#include <algorithm>
#include <iterator>

#include "tensor/half.h"

namespace quire {
namespace {

constexpr std::string_view kFloatTypes[] = {"F16", "BF16", "F32"};

}  // namespace

Result<CheckpointTensor> FindTyped(const Checkpoint& checkpoint, const std::string& name,
                                   std::string_view type, std::span<const int64_t> shape) {
  QUIRE_ASSIGN_OR_RETURN(CheckpointTensor tensor, checkpoint.Find(name));
  if (tensor.stored->type_name == type && std::ranges::equal(tensor.stored->shape, shape)) {
    return tensor;
  }
  return Status(StatusCode::kCorrupt, tensor.Name() + " is " + tensor.stored->TypeAndShape() +
                                          ", config.json asks for " + std::string(type) + " " +
                                          ShapeText(shape) + "; the two do not belong together");
}

Result<CheckpointTensor> FindScales(const Checkpoint& checkpoint, const std::string& name) {
  QUIRE_ASSIGN_OR_RETURN(CheckpointTensor tensor, checkpoint.Find(name));
  if (std::ranges::find(kFloatTypes, tensor.stored->type_name) != std::end(kFloatTypes)) {
    return tensor;
  }
  return Status(StatusCode::kBadArgument,
                tensor.Name() + " is stored as " + std::string(tensor.stored->type_name) +
                    "; scales must be F16, BF16 or F32: save the model so");
}

int64_t ScaleCount(const CheckpointTensor& scales) {
  return static_cast<int64_t>(scales.bytes.size()) / (scales.stored->type_name == "F32" ? 4 : 2);
}

float FloatAt(const CheckpointTensor& scales, int64_t index) {
  if (scales.stored->type_name == "F32") return NumberAt<float>(scales, index);
  const auto bits = NumberAt<uint16_t>(scales, index);
  return scales.stored->type_name == "F16" ? F16ToF32(bits) : Bf16ToF32(bits);
}

}  // namespace quire
