#include "blend/rotation_loops.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <iterator>

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

#if defined(__x86_64__)
constexpr const RotationLoops* kAllLoops[] = {&avx512_loops::kLoops, &avx2_loops::kLoops,
                                              &plain_loops::kLoops};
#else
constexpr const RotationLoops* kAllLoops[] = {&plain_loops::kLoops};
#endif

// How many of these this CPU cannot run.
size_t CountLacking() {
#if defined(__x86_64__)
  const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (has_avx512) return 0;
  if (__builtin_cpu_supports("avx2")) return 1;
#endif
  return std::size(kAllLoops) - 1;
}

}  // namespace

std::span<const RotationLoops* const> AllRotationLoops() {
  return std::span(kAllLoops).subspan(CountLacking());
}

}  // namespace quire
