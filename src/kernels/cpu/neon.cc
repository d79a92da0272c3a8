// NEON, which every CPU of aarch64 has: no target region.
#include "kernels/cpu/path_includes.h"

#define QUIRE_SIMD_NEON
#define QUIRE_PATH_NAME "neon"

namespace quire::neon {
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
}  // namespace quire::neon

namespace quire {

const Backend kNeonBackend = neon::kTable;

}  // namespace quire
