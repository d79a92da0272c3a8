// Tensors between tvm-ffi and Quire: borrowed views inwards, owned arrays outwards.
#ifndef QUIRE_FFI_TENSORS_H_
#define QUIRE_FFI_TENSORS_H_

#include <tvm/ffi/container/tensor.h>

#include <cstdint>
#include <initializer_list>
#include <span>
#include <vector>

#include "quire/host_tensor.h"
#include "quire/tensor.h"

namespace quire::ffi {

// The plain struct of the same memory; it points into `tensor`.
DLTensor DLTensorOf(const tvm::ffi::TensorView& tensor);

// View of the same memory. BadArgument as TensorView::FromDLPack.
TensorView ViewOf(const tvm::ffi::TensorView& tensor);

// Token ids, int32 or int64 [n], contiguous. BadArgument for other tensors and for ids that int32
// cannot hold.
std::vector<int32_t> TokenIds(const tvm::ffi::TensorView& tensor);

// New arrays, aligned to 64 bytes as the widest vector registers like it; DLPack hands them on
// without a copy. OutOfMemory.
tvm::ffi::Tensor NewTensor(DLDataType dtype, std::span<const int64_t> shape);
tvm::ffi::Tensor NewTensor(DLDataType dtype, std::initializer_list<int64_t> shape);
tvm::ffi::Tensor NewTensor(std::span<const int32_t> values);
tvm::ffi::Tensor NewTensor(std::span<const int64_t> values);
tvm::ffi::Tensor NewTensor(std::span<const float> values);
tvm::ffi::Tensor NewTensor(std::span<const double> values);

// The same bytes, which the result keeps alive. The caller may write to them, so nobody else may
// use them.
tvm::ffi::Tensor TensorSharing(const HostTensor& tensor);
tvm::ffi::Tensor TensorCopyOf(const HostTensor& tensor);

}  // namespace quire::ffi

#endif  // QUIRE_FFI_TENSORS_H_
