// The path that every CPU can run: plain loops, and the same bits as the vector paths.
#define QUIRE_SIMD_SCALAR

#include "kernels/cpu/path_includes.h"

#define QUIRE_PATH_NAME "scalar"

namespace quire::scalar {
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
}  // namespace quire::scalar

namespace quire {

const Backend kScalarBackend = scalar::kTable;

}  // namespace quire
