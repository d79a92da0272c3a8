// AVX-512 with bfloat16 dot products.
#include "kernels/cpu/path_includes.h"
#if QUIRE_EMULATE_AVX512
#include "kernels/cpu/avx512_emulation.h"
#endif

#define QUIRE_SIMD_AVX512
#define QUIRE_SIMD_BF16
#define QUIRE_SIMD_VNNI
#define QUIRE_PATH_NAME "avx512_bf16"

#if QUIRE_EMULATE_AVX512
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#elif defined(__clang__)
#pragma clang attribute push(                                                               \
    __attribute__((                                                                         \
        target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,avx512bf16,avx512vnni"))), \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,avx512bf16,avx512vnni")
#endif

namespace quire::avx512_bf16 {
#if QUIRE_EMULATE_AVX512
using namespace avx512_emulation;  // hides the compiler's intrinsics of these names
#endif
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
}  // namespace quire::avx512_bf16

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace quire {

const Backend kAvx512Bf16Backend = avx512_bf16::kTable;

}  // namespace quire
