// Heads of keys turn by angles, in the format that they are stored in. The loops are compiled for
// several instruction sets and give the same bits on all of them: each pair is computed by itself.
#ifndef QUIRE_BLEND_ROTATION_LOOPS_H_
#define QUIRE_BLEND_ROTATION_LOOPS_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "quire/tensor.h"

namespace quire {

// The pairs (x, y) of a head become (x cos[i] - y sin[i], y cos[i] + x sin[i]), in float32 and
// rounded once. `to` is `from` or apart from it. REQUIRES: ScopedFloatEnvironment.
using RotationLoop = void (*)(const std::byte* from, DType dtype, int64_t pair_count,
                              const float* cos, const float* sin, std::byte* to);

struct RotationLoops {
  std::string_view name;
  RotationLoop halves;      // pairs (i, i + pair_count)
  RotationLoop neighbours;  // pairs (2i, 2i + 1)
};

// What this CPU can run, the fastest first.
std::span<const RotationLoops* const> AllRotationLoops();

}  // namespace quire

#endif  // QUIRE_BLEND_ROTATION_LOOPS_H_
