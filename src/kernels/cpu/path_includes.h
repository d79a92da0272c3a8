// All that the *-inl.h files use from outside. The file of a path includes this before its target
// region begins, so that inline functions of shared headers are never compiled with wide
// instructions: the linker may keep any of their copies.
#ifndef QUIRE_KERNELS_CPU_PATH_INCLUDES_H_
#define QUIRE_KERNELS_CPU_PATH_INCLUDES_H_

#if defined(__x86_64__)
#if !defined(__clang__)
// GCC 12 warns of its own deliberately uninitialized registers (its bug 105593).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#if !defined(__clang__)
#pragma GCC diagnostic pop
#endif
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "base/float_environment.h"
#include "base/numa_nodes.h"
#include "kernels/attention_schedule.h"
#include "kernels/backend.h"
#include "kernels/cpu/paths.h"
#include "kernels/cpu/stream_prefetch.h"
#include "kernels/float8_weights.h"
#include "kernels/kv_layout.h"
#include "kernels/kv_quantise.h"
#include "kernels/kv_slot.h"
#include "kernels/linear_layout.h"
#include "kernels/quantised_weights.h"
#include "kernels/recurrence.h"
#include "kernels/row_view.h"
#include "kernels/segment_tiles.h"
#include "tensor/half.h"

// Fully unrolls the next loop, whose count is a constant: an array of vectors that it indexes then
// lives in registers. The scalar path has no vectors: there it would only make the code larger.
#if defined(QUIRE_SIMD_SCALAR)
#define QUIRE_UNROLL
#elif defined(__clang__)
#define QUIRE_UNROLL _Pragma("clang loop unroll(full)")
#else
#define QUIRE_UNROLL _Pragma("GCC unroll 16")
#endif

#endif  // QUIRE_KERNELS_CPU_PATH_INCLUDES_H_
