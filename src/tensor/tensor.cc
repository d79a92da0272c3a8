#include "quire/tensor.h"

#include <algorithm>
#include <cstdint>

#include "base/guard.h"

namespace quire {
namespace {

Status BadTensor(const std::string& why) {
  return Status(StatusCode::kBadArgument, "tensor: " + why);
}

// The bytes that the elements span must be addressable, or index arithmetic would overflow.
Status CheckExtent(const DLTensor& tensor, int64_t element_bytes) {
  int64_t bytes = element_bytes;
  for (int i = 0; i < tensor.ndim; ++i) {
    if (tensor.shape[i] < 0) {
      return BadTensor("dimension " + std::to_string(i) + " is " + std::to_string(tensor.shape[i]));
    }
    if (__builtin_mul_overflow(bytes, std::max<int64_t>(tensor.shape[i], 1), &bytes)) {
      return BadTensor("its shape has more than 2^63 bytes");
    }
  }
  return Status();
}

}  // namespace

TensorView::TensorView(void* data, DType dtype, std::span<const int64_t> shape)
    : data_(data),
      dtype_(dtype),
      rank_(static_cast<int>(std::min<size_t>(shape.size(), kMaxRank))),
      given_rank_(static_cast<int>(shape.size())) {
  if (given_rank_ > kMaxRank) {
    data_ = nullptr;
    return;
  }
  int64_t stride = 1;
  for (int i = rank_ - 1; i >= 0; --i) {
    shape_[i] = shape[static_cast<size_t>(i)];
    strides_[i] = stride;
    stride *= shape_[i];
  }
}

Result<TensorView> TensorView::FromDLPack(const DLTensor& tensor) {
  return GuardEntry([&]() -> Result<TensorView> {
    if (tensor.device.device_type != kDLCPU) {
      return BadTensor("it is on a device of DLPack type " +
                       std::to_string(static_cast<int>(tensor.device.device_type)) +
                       "; copy it to the CPU first");
    }
    if (tensor.ndim < 0 || tensor.ndim > kMaxRank) {
      return BadTensor("it has " + std::to_string(tensor.ndim) + " dimensions; the most is " +
                       std::to_string(kMaxRank));
    }
    QUIRE_ASSIGN_OR_RETURN(const DType dtype, FromDLDataType(tensor.dtype));
    QUIRE_RETURN_IF_ERROR(CheckExtent(tensor, DTypeBytes(dtype)));
    const std::span<const int64_t> shape(tensor.shape, static_cast<size_t>(tensor.ndim));
    TensorView view(tensor.data, dtype, shape);
    if (tensor.strides != nullptr) std::copy_n(tensor.strides, tensor.ndim, view.strides_);
    if (view.element_count() == 0) return view;
    if (tensor.data == nullptr) {
      return BadTensor("its data pointer is null, its shape is " + view.ToString());
    }
    view.data_ = static_cast<std::byte*>(tensor.data) + tensor.byte_offset;
    if (reinterpret_cast<uintptr_t>(view.data_) % static_cast<uintptr_t>(DTypeBytes(dtype)) != 0) {
      return BadTensor("its data is not aligned to its element type, its shape is " +
                       view.ToString());
    }
    return view;
  });
}

int64_t TensorView::element_count() const {
  int64_t count = 1;
  for (const int64_t extent : shape()) count *= extent;
  return count;
}

bool TensorView::is_contiguous() const {
  if (element_count() == 0) return true;
  int64_t expected = 1;
  for (int i = rank_ - 1; i >= 0; --i) {
    if (shape_[i] != 1 && strides_[i] != expected) return false;
    expected *= shape_[i];
  }
  return true;
}

std::string TensorView::ToString() const {
  std::string text(DTypeName(dtype_));
  if (given_rank_ > kMaxRank) {
    return text + " of " + std::to_string(given_rank_) + " dimensions, of which " +
           std::to_string(kMaxRank) + " are the most";
  }
  text += " [";
  for (int i = 0; i < rank_; ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(shape_[i]);
  }
  return text + "]";
}

}  // namespace quire
