// Element types and non-owning views of tensors. DLPack's structs are the form in which memory is
// passed in and out.
#ifndef QUIRE_TENSOR_H_
#define QUIRE_TENSOR_H_

#include <dlpack/dlpack.h>

#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>

#include "quire/status.h"

namespace quire {

// Element types that Quire computes with or stores.
enum class DType : uint8_t { kF32, kF16, kBF16, kI32, kI64, kU8, kI8, kF8E4M3 };

// Stored with a scale: value = code * scale.
constexpr bool IsQuantised(DType dtype) { return dtype == DType::kI8 || dtype == DType::kF8E4M3; }

int64_t DTypeBytes(DType dtype);
std::string_view DTypeName(DType dtype);  // "float32", "float16", "bfloat16", "int32", "int64",
                                          // "uint8", "int8", "float8_e4m3fn"
Result<DType> ParseDType(
    std::string_view name);  // also "f32", "f16", "bf16", "F32", "BF16" (safetensors)
DLDataType ToDLDataType(DType dtype);
Result<DType> FromDLDataType(DLDataType dtype);

// A view of host memory: pointer, dtype, shape and strides in elements. It owns nothing; it is
// valid as long as the memory is. Copyable.
class TensorView {
 public:
  static constexpr int kMaxRank = 6;  // the largest rank in any interface is 5; one to spare

  TensorView() = default;
  // Contiguous, row-major. REQUIRES: data holds the product of shape. A shape of more than kMaxRank
  // dimensions gives a view of no elements that every call refuses as BadArgument: its data is
  // null, its rank kMaxRank, and its dimensions are 0.
  TensorView(void* data, DType dtype, std::span<const int64_t> shape);
  TensorView(void* data, DType dtype, std::initializer_list<int64_t> shape)
      : TensorView(data, dtype, std::span<const int64_t>(shape.begin(), shape.size())) {}
  // Const data is for arguments that are only read.
  TensorView(const void* data, DType dtype, std::initializer_list<int64_t> shape)
      : TensorView(const_cast<void*>(data), dtype, shape) {}  // NOLINT: the callee only reads

  // BadArgument for another device than the CPU, more than kMaxRank dimensions or an element type
  // that Quire lacks.
  static Result<TensorView> FromDLPack(const DLTensor& tensor);

  void* data() const { return data_; }
  template <typename T>
  T* data_as() const {
    return static_cast<T*>(data_);
  }
  DType dtype() const { return dtype_; }
  int rank() const { return rank_; }
  int64_t dim(int axis) const { return shape_[axis]; }
  int64_t stride(int axis) const { return strides_[axis]; }
  std::span<const int64_t> shape() const { return {shape_, static_cast<size_t>(rank_)}; }
  int64_t element_count() const;
  bool is_contiguous() const;
  // "float32 [3, 4, 64]", for messages.
  std::string ToString() const;

 private:
  void* data_ = nullptr;
  DType dtype_ = DType::kF32;
  int rank_ = 0;
  int given_rank_ = 0;  // of the shape that was given, for messages
  int64_t shape_[kMaxRank] = {};
  int64_t strides_[kMaxRank] = {};
};

}  // namespace quire

#endif  // QUIRE_TENSOR_H_
