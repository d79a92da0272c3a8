// The paths of which docs/exactness.md says that they give the same bits.
#ifndef QUIRE_KERNELS_TESTING_EQUAL_PATHS_H_
#define QUIRE_KERNELS_TESTING_EQUAL_PATHS_H_

#include <vector>

#include "kernels/backend.h"

namespace quire {

// Those of this build that this CPU can run.
inline std::vector<const Backend*> EqualPaths() {
  std::vector<const Backend*> paths;
  for (const Backend* const backend : Backends()) {
    const bool differs = backend->name == "avx512_bf16" || backend->name == "avx512_amx";
    if (!differs) paths.push_back(backend);
  }
  return paths;
}

}  // namespace quire

#endif  // QUIRE_KERNELS_TESTING_EQUAL_PATHS_H_
