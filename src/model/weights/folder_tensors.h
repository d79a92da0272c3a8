// Tensors of the forms in which Hugging Face folders hold quantised matrices: found by name, type
// and shape, and read a number at a time.
#ifndef QUIRE_MODEL_WEIGHTS_FOLDER_TENSORS_H_
#define QUIRE_MODEL_WEIGHTS_FOLDER_TENSORS_H_

#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>

#include "model/weights/checkpoint.h"
#include "quire/status.h"

namespace quire {

// NotFound; Corrupt: the tensor has another type or shape.
Result<CheckpointTensor> FindTyped(const Checkpoint& checkpoint, const std::string& name,
                                   std::string_view type, std::span<const int64_t> shape);
// Scales of any shape. NotFound; BadArgument: they are not float32, float16 or bfloat16.
Result<CheckpointTensor> FindScales(const Checkpoint& checkpoint, const std::string& name);
int64_t ScaleCount(const CheckpointTensor& scales);
// REQUIRES: scales as FindScales finds them.
float FloatAt(const CheckpointTensor& scales, int64_t index);

template <typename T>
T NumberAt(const CheckpointTensor& tensor, int64_t index) {
  T number;  // a file may begin its data anywhere
  std::memcpy(&number, tensor.bytes.data() + static_cast<size_t>(index) * sizeof(T), sizeof(T));
  return number;
}

}  // namespace quire

#endif  // QUIRE_MODEL_WEIGHTS_FOLDER_TENSORS_H_
