#include "kv/testing/kv_model_codes.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/check.h"
#include "base/float_environment.h"
#include "tensor/float8.h"
#include "tensor/half.h"

namespace quire {
namespace {

constexpr double kLargestI8 = 127;
constexpr double kLargestF8 = 448;

// The nearest value of `dtype` (kF32, kF16, kBF16), ties to even.
float RoundToDType(float value, DType dtype) {
  if (dtype == DType::kF16) return F16ToF32(F32ToF16(value));
  if (dtype == DType::kBF16) return Bf16ToF32(F32ToBf16(value));
  return value;
}

// The nearest number that is a code times the scale, ties to even codes.
float Quantise(float value, float scale, DType dtype) {
  if (scale == 0 || std::isnan(scale)) return scale;
  const double x = static_cast<double>(value / scale);  // in float32
  if (dtype == DType::kI8) {
    // A code knows no -0.
    const double code = std::nearbyint(std::clamp(x, -kLargestI8, kLargestI8)) + 0.0;
    return static_cast<float>(code) * scale;
  }
  // 4 significant bits, fewer below 2^-6.
  const int exponent = x == 0 ? -6 : std::max(std::ilogb(x), -6);
  const double code = std::ldexp(std::nearbyint(std::ldexp(x, 3 - exponent)), exponent - 3);
  return static_cast<float>(std::clamp(code, -kLargestF8, kLargestF8)) * scale;
}

}  // namespace

float CodeScale(std::span<const float> head, DType dtype) {
  const ScopedFloatEnvironment environment;  // a test may have set another
  if (!std::ranges::all_of(head, [](float x) { return std::isfinite(x); }))
    return std::numeric_limits<float>::quiet_NaN();
  double largest = 0;
  for (const float x : head) largest = std::max(largest, std::abs(static_cast<double>(x)));
  const auto scale = static_cast<float>(largest / (dtype == DType::kI8 ? kLargestI8 : kLargestF8));
  if (scale == 0) return 0;
  int exponent = 0;
  const double fraction = std::frexp(static_cast<double>(scale), &exponent);
  return static_cast<float>(std::ldexp(std::nearbyint(std::ldexp(fraction, 16)), exponent - 16));
}

void AppendStored(const std::vector<float>& head, DType dtype, std::vector<float>* to) {
  const ScopedFloatEnvironment environment;
  const float scale = IsQuantised(dtype) ? CodeScale(head, dtype) : 0;
  for (const float x : head)
    to->push_back(IsQuantised(dtype) ? Quantise(x, scale, dtype) : RoundToDType(x, dtype));
}

float LoadElement(const TensorView& view, int64_t offset) {
  switch (view.dtype()) {
    case DType::kF32:
      return view.data_as<float>()[offset];
    case DType::kF16:
      return F16ToF32(view.data_as<uint16_t>()[offset]);
    case DType::kBF16:
      return Bf16ToF32(view.data_as<uint16_t>()[offset]);
    case DType::kI32:
    case DType::kI64:
    case DType::kU8:
      break;
    case DType::kI8:
      return static_cast<float>(view.data_as<int8_t>()[offset]);
    case DType::kF8E4M3:
      return F8E4M3ToF32(view.data_as<uint8_t>()[offset]);
  }
  QUIRE_CHECK(false) << "dtype " << DTypeName(view.dtype());
  return 0;
}

void LoadRow(const TensorView& rows, const TensorView& scales, int64_t row,
             std::vector<float>* to) {
  for (int64_t h = 0; h < rows.dim(1); ++h) {
    const float scale =
        IsQuantised(rows.dtype()) ? LoadElement(scales, row * scales.stride(0) + h) : 1;
    for (int64_t d = 0; d < rows.dim(2); ++d)
      to->push_back(LoadElement(rows, row * rows.stride(0) + h * rows.stride(1) + d) * scale);
  }
}

}  // namespace quire
