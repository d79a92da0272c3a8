// Small tensors for the tests of this folder.
#ifndef QUIRE_WIRE_TESTING_TEST_TENSOR_H_
#define QUIRE_WIRE_TESTING_TEST_TENSOR_H_

#include <cstring>
#include <memory>
#include <span>
#include <vector>

#include "quire/host_tensor.h"

namespace quire {

template <typename T>
HostTensor TensorOf(ElementType dtype, std::vector<int64_t> shape, const std::vector<T>& values) {
  const size_t bytes = values.size() * sizeof(T);
  const auto data = std::make_shared<std::byte[]>(bytes);
  if (bytes > 0) std::memcpy(data.get(), values.data(), bytes);
  return HostTensor::Share(dtype, std::move(shape), data).value();
}

inline HostTensor Ids(const std::vector<int64_t>& ids) {
  return TensorOf(ElementType(kDLInt, 64), {static_cast<int64_t>(ids.size())}, ids);
}

inline HostTensor Mask(const std::vector<uint8_t>& bits) {
  return TensorOf(ElementType(kDLPackBool, 8), {static_cast<int64_t>(bits.size())}, bits);
}

inline HostTensor Ones(size_t count) { return Mask(std::vector<uint8_t>(count, 1)); }

inline HostTensor Floats(std::vector<int64_t> shape, float value) {
  int64_t count = 1;
  for (const int64_t size : shape) count *= size;
  return TensorOf(ElementType(kDLFloat, 32), std::move(shape),
                  std::vector<float>(static_cast<size_t>(count), value));
}

template <typename T>
std::vector<T> ValuesOf(const HostTensor& tensor) {
  std::vector<T> values(static_cast<size_t>(tensor.bytes()) / sizeof(T));
  if (!values.empty()) std::memcpy(values.data(), tensor.data(), values.size() * sizeof(T));
  return values;
}

}  // namespace quire

#endif  // QUIRE_WIRE_TESTING_TEST_TENSOR_H_
