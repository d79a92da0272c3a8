// Tables without a name in the place of the paths that this build leaves out (QUIRE_KERNEL_PATHS).
// dispatch.cc takes no such table.
#include "kernels/cpu/paths.h"

namespace quire {

#if QUIRE_WITHOUT_NEON
const Backend kNeonBackend = {};
#endif
#if QUIRE_WITHOUT_AVX2
const Backend kAvx2Backend = {};
#endif
#if QUIRE_WITHOUT_AVX512
const Backend kAvx512Backend = {};
#endif
#if QUIRE_WITHOUT_AVX512_VNNI
const Backend kAvx512VnniBackend = {};
#endif
#if QUIRE_WITHOUT_AVX512_BF16
const Backend kAvx512Bf16Backend = {};
#endif
#if QUIRE_WITHOUT_AVX512_AMX
const Backend kAvx512AmxBackend = {};
#endif

}  // namespace quire
