#include <cstring>

#include "base/check.h"
#include "kernels/backend.h"
#include "tensor/half.h"

namespace quire {
namespace {

// How numbers of one element type are read and written as float32.
struct F32 {
  using Element = float;
  static float Widen(float x) { return x; }
  static float Narrow(float x) { return x; }
};
struct F16 {
  using Element = uint16_t;
  static float Widen(uint16_t x) { return F16ToF32(x); }
  static uint16_t Narrow(float x) { return F32ToF16(x); }
};
struct BF16 {
  using Element = uint16_t;
  static float Widen(uint16_t x) { return Bf16ToF32(x); }
  static uint16_t Narrow(float x) { return F32ToBf16(x); }
};

template <class From, class To>
void ConvertLoop(const void* from, void* to, int64_t count) {
  const auto* source = static_cast<const typename From::Element*>(from);
  auto* target = static_cast<typename To::Element*>(to);
  for (int64_t i = 0; i < count; ++i) target[i] = To::Narrow(From::Widen(source[i]));
}

template <class From>
void ConvertFrom(const void* from, void* to, DType to_dtype, int64_t count) {
  if (to_dtype == DType::kF32) return ConvertLoop<From, F32>(from, to, count);
  if (to_dtype == DType::kF16) return ConvertLoop<From, F16>(from, to, count);
  QUIRE_CHECK(to_dtype == DType::kBF16) << "ConvertElements to " << DTypeName(to_dtype);
  ConvertLoop<From, BF16>(from, to, count);
}

}  // namespace

void ConvertElements(const void* from, DType from_dtype, void* to, DType to_dtype, int64_t count) {
  if (from_dtype == to_dtype) {
    if (count > 0) std::memcpy(to, from, static_cast<size_t>(count * DTypeBytes(to_dtype)));
    return;
  }
  if (from_dtype == DType::kF32) return ConvertFrom<F32>(from, to, to_dtype, count);
  if (from_dtype == DType::kF16) return ConvertFrom<F16>(from, to, to_dtype, count);
  QUIRE_CHECK(from_dtype == DType::kBF16) << "ConvertElements from " << DTypeName(from_dtype);
  ConvertFrom<BF16>(from, to, to_dtype, count);
}

}  // namespace quire
