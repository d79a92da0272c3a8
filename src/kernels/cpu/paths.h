// The tables of the CPU paths. Which of them this CPU can run is dispatch.cc's business.
#ifndef QUIRE_KERNELS_CPU_PATHS_H_
#define QUIRE_KERNELS_CPU_PATHS_H_

#include "kernels/backend.h"

namespace quire {

extern const Backend kScalarBackend;
#if QUIRE_SIMD && defined(__aarch64__)
extern const Backend kNeonBackend;
#elif QUIRE_SIMD
extern const Backend kAvx2Backend;
extern const Backend kAvx512Backend;
extern const Backend kAvx512VnniBackend;  // the same path; not in builds that emulate AVX-512
extern const Backend kAvx512Bf16Backend;
extern const Backend kAvx512AmxBackend;    // not in builds that emulate AVX-512
extern const Backend kEmulatedAmxBackend;  // in builds with tests
#endif

}  // namespace quire

#endif  // QUIRE_KERNELS_CPU_PATHS_H_
