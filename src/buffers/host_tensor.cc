#include "quire/host_tensor.h"

#include <cstring>
#include <limits>
#include <string>

#include "base/guard.h"

namespace quire {
namespace {

constexpr int64_t kBytesMax = int64_t{1} << 62;

Status Refuse(const std::string& call, const std::string& what) {
  return Status(StatusCode::kBadArgument, "HostTensor::" + call + ": " + what);
}

// Elements of a shape, or TooLarge; a dimension of 0 makes 0 whatever the others are.
Result<int64_t> CountElements(const std::string& call, std::span<const int64_t> shape,
                              int64_t element_bytes) {
  int64_t count = 1;
  bool is_empty = false;
  for (const int64_t size : shape) {
    if (size < 0) return Refuse(call, "a dimension is " + std::to_string(size));
    is_empty = is_empty || size == 0;
  }
  if (is_empty) return int64_t{0};
  for (const int64_t size : shape) {
    if (size > kBytesMax / element_bytes / count) {
      return Status(StatusCode::kTooLarge,
                    "HostTensor::" + call + ": the tensor has more than 2^62 bytes");
    }
    count *= size;
  }
  return count;
}

// Copies the elements of dimensions [axis, ndim) to `to`; returns the end of what it wrote.
std::byte* CopyStrided(const DLTensor& tensor, int axis, const std::byte* from, size_t element,
                       std::byte* to) {
  if (axis == tensor.ndim) {
    std::memcpy(to, from, element);
    return to + element;
  }
  const int64_t step = tensor.strides[axis] * static_cast<int64_t>(element);
  if (axis + 1 == tensor.ndim && tensor.strides[axis] == 1) {
    const size_t bytes = static_cast<size_t>(tensor.shape[axis]) * element;
    std::memcpy(to, from, bytes);
    return to + bytes;
  }
  for (int64_t i = 0; i < tensor.shape[axis]; ++i) {
    to = CopyStrided(tensor, axis + 1, from + i * step, element, to);
  }
  return to;
}

}  // namespace

HostTensor::HostTensor(ElementType dtype, std::vector<int64_t> shape, int64_t element_count,
                       std::shared_ptr<const std::byte[]> bytes)
    : dtype_(dtype),
      shape_(std::move(shape)),
      element_count_(element_count),
      data_(std::move(bytes)) {}

Result<HostTensor> HostTensor::Share(ElementType dtype, std::vector<int64_t> shape,
                                     std::shared_ptr<const std::byte[]> bytes) {
  return GuardEntry([&]() -> Result<HostTensor> {
    if (dtype.bytes() < 1)
      return Refuse("Share", "elements of " + std::to_string(dtype.bits) + " bits");
    QUIRE_ASSIGN_OR_RETURN(const int64_t count, CountElements("Share", shape, dtype.bytes()));
    if (count > 0 && bytes == nullptr)
      return Refuse("Share", std::to_string(count) + " elements and no bytes");
    return HostTensor(dtype, std::move(shape), count, std::move(bytes));
  });
}

Result<HostTensor> HostTensor::CopyOf(const DLTensor& tensor) {
  return GuardEntry([&]() -> Result<HostTensor> {
    if (tensor.device.device_type != kDLCPU) {
      return Refuse("CopyOf", "the tensor lies on device type " +
                                  std::to_string(tensor.device.device_type) +
                                  "; copy it to the CPU first");
    }
    if (tensor.dtype.lanes != 1 || tensor.dtype.bits == 0 || tensor.dtype.bits % 8 != 0) {
      return Refuse("CopyOf", "elements of " + std::to_string(tensor.dtype.bits) + " bits and " +
                                  std::to_string(tensor.dtype.lanes) +
                                  " lanes; whole bytes and one lane are taken");
    }
    if (tensor.ndim < 0) return Refuse("CopyOf", std::to_string(tensor.ndim) + " dimensions");
    const ElementType dtype(tensor.dtype.code, tensor.dtype.bits);
    const std::span<const int64_t> shape(tensor.shape, static_cast<size_t>(tensor.ndim));
    QUIRE_ASSIGN_OR_RETURN(const int64_t count, CountElements("CopyOf", shape, dtype.bytes()));
    if (count > 0 && tensor.data == nullptr)
      return Refuse("CopyOf", "the data pointer is null, and there are " + std::to_string(count) +
                                  " elements");
    const auto bytes = static_cast<size_t>(count * dtype.bytes());
    const auto copy = std::make_shared_for_overwrite<std::byte[]>(bytes);
    const auto* from = static_cast<const std::byte*>(tensor.data) + tensor.byte_offset;
    if (count > 0 && tensor.strides == nullptr) {
      std::memcpy(copy.get(), from, bytes);
    } else if (count > 0) {
      CopyStrided(tensor, 0, from, static_cast<size_t>(dtype.bytes()), copy.get());
    }
    return HostTensor(dtype, {shape.begin(), shape.end()}, count, copy);
  });
}

}  // namespace quire
