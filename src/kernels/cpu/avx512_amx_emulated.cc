// The sources of avx512_amx.cc with the tile unit emulated (tile_unit-inl.h): the same bits on a
// CPU without one. Only builds with tests have it.
#include "kernels/cpu/path_includes.h"
#if QUIRE_EMULATE_AVX512
#include "kernels/cpu/avx512_emulation.h"
#endif

#define QUIRE_SIMD_AVX512
#define QUIRE_SIMD_TILES
#define QUIRE_EMULATE_TILES 1
#define QUIRE_PATH_NAME "avx512_amx"

#if QUIRE_EMULATE_AVX512
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#elif defined(__clang__)
#pragma clang attribute push(                                                    \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#endif

namespace quire::avx512_amx_emulated {
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
}  // namespace quire::avx512_amx_emulated

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace quire {

const Backend kEmulatedAmxBackend = avx512_amx_emulated::kTable;

}  // namespace quire
