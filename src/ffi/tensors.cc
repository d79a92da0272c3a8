#include "ffi/tensors.h"

#include <cstring>
#include <limits>
#include <new>
#include <string>

#include "ffi/errors.h"

namespace quire::ffi {
namespace {

constexpr std::align_val_t kAlignment{64};

struct AlignedAllocator {
  void AllocData(DLTensor* tensor) {
    tensor->data = ::operator new(tvm::ffi::GetDataSize(*tensor), kAlignment);
  }
  void FreeData(DLTensor* tensor) { ::operator delete(tensor->data, kAlignment); }
};

template <typename T>
tvm::ffi::Tensor Copy(DLDataType dtype, std::span<const T> values) {
  tvm::ffi::Tensor tensor = NewTensor(dtype, {static_cast<int64_t>(values.size())});
  if (!values.empty()) std::memcpy(tensor.data_ptr(), values.data(), values.size_bytes());
  return tensor;
}

template <typename T>
std::vector<int32_t> Narrow(const T* values, int64_t count) {
  std::vector<int32_t> ids(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    const int64_t id = values[i];
    if (id < std::numeric_limits<int32_t>::min() || id > std::numeric_limits<int32_t>::max()) {
      ThrowBadArgument("token id " + std::to_string(id) + " at index " + std::to_string(i) +
                       " is not a token id: it does not fit in 32 bits");
    }
    ids[static_cast<size_t>(i)] = static_cast<int32_t>(id);
  }
  return ids;
}

}  // namespace

DLTensor DLTensorOf(const tvm::ffi::TensorView& tensor) {
  DLTensor dl{};
  dl.data = tensor.data_ptr();
  dl.device = tensor.device();
  dl.ndim = tensor.ndim();
  dl.dtype = tensor.dtype();
  dl.shape = const_cast<int64_t*>(tensor.shape().data());
  dl.strides = const_cast<int64_t*>(tensor.strides().data());
  dl.byte_offset = tensor.byte_offset();
  return dl;
}

TensorView ViewOf(const tvm::ffi::TensorView& tensor) {
  return ValueOrThrow(TensorView::FromDLPack(DLTensorOf(tensor)));
}

std::vector<int32_t> TokenIds(const tvm::ffi::TensorView& tensor) {
  const TensorView view = ViewOf(tensor);
  if (view.rank() != 1 || !view.is_contiguous()) {
    ThrowBadArgument("token ids must be a contiguous tensor of one dimension, not " +
                     view.ToString());
  }
  if (view.dtype() == DType::kI32) return Narrow(view.data_as<int32_t>(), view.dim(0));
  if (view.dtype() == DType::kI64) return Narrow(view.data_as<int64_t>(), view.dim(0));
  ThrowBadArgument("token ids must be int32 or int64, not " + view.ToString());
}

tvm::ffi::Tensor NewTensor(DLDataType dtype, std::span<const int64_t> shape) {
  try {
    return tvm::ffi::Tensor::FromNDAlloc(AlignedAllocator{},
                                         tvm::ffi::ShapeView(shape.data(), shape.size()), dtype,
                                         DLDevice{kDLCPU, 0});
  } catch (const std::bad_alloc&) {
    Throw(Status::OutOfMemory());
  }
}
tvm::ffi::Tensor NewTensor(DLDataType dtype, std::initializer_list<int64_t> shape) {
  return NewTensor(dtype, std::span<const int64_t>(shape.begin(), shape.size()));
}

tvm::ffi::Tensor NewTensor(std::span<const int32_t> values) {
  return Copy(DLDataType{kDLInt, 32, 1}, values);
}
tvm::ffi::Tensor NewTensor(std::span<const int64_t> values) {
  return Copy(DLDataType{kDLInt, 64, 1}, values);
}
tvm::ffi::Tensor NewTensor(std::span<const float> values) {
  return Copy(DLDataType{kDLFloat, 32, 1}, values);
}
tvm::ffi::Tensor NewTensor(std::span<const double> values) {
  return Copy(DLDataType{kDLFloat, 64, 1}, values);
}

namespace {

DLDataType DLTypeOf(const HostTensor& tensor) {
  return DLDataType{tensor.dtype().code, tensor.dtype().bits, 1};
}

tvm::ffi::ShapeView ShapeOf(const HostTensor& tensor) {
  return {tensor.shape().data(), tensor.shape().size()};
}

// "Allocates" the bytes of a HostTensor.
struct SharedAllocator {
  HostTensor tensor;
  void AllocData(DLTensor* dl) { dl->data = const_cast<std::byte*>(tensor.data()); }
  void FreeData(DLTensor*) { tensor = HostTensor(); }
};

}  // namespace

tvm::ffi::Tensor TensorSharing(const HostTensor& tensor) {
  return tvm::ffi::Tensor::FromNDAlloc(SharedAllocator{tensor}, ShapeOf(tensor), DLTypeOf(tensor),
                                       DLDevice{kDLCPU, 0});
}

tvm::ffi::Tensor TensorCopyOf(const HostTensor& tensor) {
  tvm::ffi::Tensor copy = tvm::ffi::Tensor::FromNDAlloc(AlignedAllocator{}, ShapeOf(tensor),
                                                        DLTypeOf(tensor), DLDevice{kDLCPU, 0});
  if (tensor.bytes() > 0) {
    std::memcpy(copy.data_ptr(), tensor.data(), static_cast<size_t>(tensor.bytes()));
  }
  return copy;
}

}  // namespace quire::ffi
