// Writes one safetensors file (safetensors.h has the format).
#ifndef QUIRE_MODEL_WEIGHTS_SAFETENSORS_WRITER_H_
#define QUIRE_MODEL_WEIGHTS_SAFETENSORS_WRITER_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "quire/status.h"
#include "quire/tensor.h"

namespace quire {

struct TensorToWrite {
  std::string name;
  DType dtype = DType::kF32;  // kF32, kF16, kBF16, kU8 or kI32
  std::vector<int64_t> shape;
  std::shared_ptr<const std::byte> data;

  size_t bytes() const;
};

// A new file, whole or not at all. Tensors that fill whole cache lines begin on one. `format` goes
// into __metadata__. IoError: `path` is there already, or what the operating system says.
// REQUIRES: distinct names.
Status WriteSafetensors(const std::string& path, std::string_view format,
                        std::span<const TensorToWrite> tensors);

}  // namespace quire

#endif  // QUIRE_MODEL_WEIGHTS_SAFETENSORS_WRITER_H_
