#include "blend/half_blocks.h"

#include <bit>
#include <cstring>

namespace quire {
namespace {

#include "blend/half_numbers-inl.h"

template <DType kType>
void WidenAll(const uint16_t* from, int64_t count, float* values) {
  for (int64_t i = 0; i < count; ++i) values[i] = WidenOne<kType>(from[i]);
}

template <DType kType>
void NarrowAll(const float* values, int64_t count, uint16_t* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = NarrowOne<kType>(values[i]);
}

}  // namespace

void WidenBlock(const std::byte* from, DType dtype, int64_t count, float* values) {
  if (dtype == DType::kBF16) {
    WidenAll<DType::kBF16>(reinterpret_cast<const uint16_t*>(from), count, values);
  } else if (dtype == DType::kF16) {
    WidenAll<DType::kF16>(reinterpret_cast<const uint16_t*>(from), count, values);
  } else {
    std::memcpy(values, from, static_cast<size_t>(count) * sizeof(float));
  }
}

void NarrowBlock(const float* values, int64_t count, DType dtype, std::byte* to) {
  if (dtype == DType::kBF16) {
    NarrowAll<DType::kBF16>(values, count, reinterpret_cast<uint16_t*>(to));
  } else if (dtype == DType::kF16) {
    NarrowAll<DType::kF16>(values, count, reinterpret_cast<uint16_t*>(to));
  } else {
    std::memcpy(to, values, static_cast<size_t>(count) * sizeof(float));
  }
}

}  // namespace quire
