// Short runs of numbers between the formats that KV is stored in and float32. The bits are those of
// tensor/half.h; the loops have no branches, so that the compiler makes vectors of them.
#ifndef QUIRE_BLEND_HALF_BLOCKS_H_
#define QUIRE_BLEND_HALF_BLOCKS_H_

#include <cstddef>
#include <cstdint>

#include "quire/tensor.h"

namespace quire {

inline constexpr int64_t kBlendBlock = 64;  // numbers that fit the first cache many times over

// values[i] = from[i], for i < count <= kBlendBlock. REQUIRES: ScopedFloatEnvironment.
void WidenBlock(const std::byte* from, DType dtype, int64_t count, float* values);
// to[i] = values[i], rounded to nearest even.
void NarrowBlock(const float* values, int64_t count, DType dtype, std::byte* to);

}  // namespace quire

#endif  // QUIRE_BLEND_HALF_BLOCKS_H_
