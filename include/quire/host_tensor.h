// HostTensor: a tensor that owns its bytes or shares them with others that own them. What buffers
// and stores keep and hand out.
#ifndef QUIRE_HOST_TENSOR_H_
#define QUIRE_HOST_TENSOR_H_

#include <dlpack/dlpack.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "quire/chunk.h"
#include "quire/status.h"

namespace quire {

inline constexpr uint8_t kDLPackBool = 6;  // kDLBool, which older headers of DLPack lack

// Contiguous, row-major, in memory of the host. The bytes never change once they are in a
// HostTensor, so copies share them and any number of threads may read them.
class HostTensor {
 public:
  HostTensor() = default;  // float32, shape [], no bytes: stands for no tensor
  // Shares `bytes`, which nobody writes to any more. BadArgument for a negative size, an element
  // type of no whole bytes, and elements without bytes; TooLarge over 2^62 bytes.
  // REQUIRES: `bytes` holds the elements of the shape.
  static Result<HostTensor> Share(ElementType dtype, std::vector<int64_t> shape,
                                  std::shared_ptr<const std::byte[]> bytes);

  // A copy with any strides made contiguous; NaN payloads and -0.0 are kept, any element type of
  // whole bytes. BadArgument for another device than the CPU, more than one lane, a negative
  // number of dimensions or size, elements of less than a byte, a null pointer to elements;
  // TooLarge over 2^62 bytes; OutOfMemory.
  static Result<HostTensor> CopyOf(const DLTensor& tensor);

  ElementType dtype() const { return dtype_; }
  std::span<const int64_t> shape() const { return shape_; }
  int64_t element_count() const { return element_count_; }
  int64_t bytes() const { return element_count_ * dtype_.bytes(); }
  const std::byte* data() const { return data_.get(); }
  const std::shared_ptr<const std::byte[]>& owner() const { return data_; }

 private:
  HostTensor(ElementType dtype, std::vector<int64_t> shape, int64_t element_count,
             std::shared_ptr<const std::byte[]> bytes);

  ElementType dtype_{};
  std::vector<int64_t> shape_{};
  int64_t element_count_ = 0;
  std::shared_ptr<const std::byte[]> data_{};
};

}  // namespace quire

#endif  // QUIRE_HOST_TENSOR_H_
