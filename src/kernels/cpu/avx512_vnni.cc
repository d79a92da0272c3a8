// The path avx512 on CPUs with VNNI: the same bits, sums of integers take fewer instructions.
#include "kernels/cpu/path_includes.h"

#define QUIRE_SIMD_AVX512
#define QUIRE_SIMD_VNNI
#define QUIRE_PATH_NAME "avx512"

#if defined(__clang__)
#pragma clang attribute push(                                                               \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c"))), \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")
#endif

namespace quire::avx512_vnni {
namespace {

// Each uses those above it.
// clang-format off
#include "kernels/cpu/simd-inl.h"
#include "kernels/cpu/append-inl.h"
#include "kernels/cpu/attention-inl.h"
#include "kernels/cpu/merge-inl.h"
#include "kernels/cpu/linear-inl.h"
#include "kernels/cpu/quantised_linear-inl.h"
#include "kernels/cpu/elementwise-inl.h"
#include "kernels/cpu/recurrence-inl.h"
#include "kernels/cpu/backend-inl.h"
// clang-format on

}  // namespace
}  // namespace quire::avx512_vnni

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace quire {

const Backend kAvx512VnniBackend = avx512_vnni::kTable;

}  // namespace quire
