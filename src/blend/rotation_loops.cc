#include "blend/rotation_loops.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#include "base/check.h"

namespace quire {
namespace {

constexpr int64_t kPairBlock = 32;  // those of a head of 64 numbers

}  // namespace

namespace plain_loops {
namespace {
#define QUIRE_LOOPS_NAME "plain"
#include "blend/rotation_loops-inl.h"
#undef QUIRE_LOOPS_NAME
}  // namespace
}  // namespace plain_loops

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2")
#endif
namespace avx2_loops {
namespace {
#define QUIRE_LOOPS_NAME "avx2"
#include "blend/rotation_loops-inl.h"
#undef QUIRE_LOOPS_NAME
}  // namespace
}  // namespace avx2_loops
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))), \
                             apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl")
#endif
namespace avx512_loops {
namespace {
#define QUIRE_LOOPS_NAME "avx512"
#include "blend/rotation_loops-inl.h"
#undef QUIRE_LOOPS_NAME
}  // namespace
}  // namespace avx512_loops
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

namespace {

struct LoopsFound {
  std::array<const RotationLoops*, 3> loops{};
  size_t count = 0;
};

LoopsFound FindLoops() {
  LoopsFound found;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    found.loops[found.count++] = &avx512_loops::kLoops;
  }
  if (__builtin_cpu_supports("avx2")) found.loops[found.count++] = &avx2_loops::kLoops;
#endif
  found.loops[found.count++] = &plain_loops::kLoops;
  return found;
}

}  // namespace

std::span<const RotationLoops* const> AllRotationLoops() {
  static const LoopsFound found = FindLoops();
  QUIRE_DCHECK(found.count > 0);
  return std::span(found.loops).first(found.count);
}

}  // namespace quire
