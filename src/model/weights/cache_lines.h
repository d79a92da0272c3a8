// Kernels read and write whole cache lines: weights, scratch and packed files are cut at them.
#ifndef QUIRE_MODEL_WEIGHTS_CACHE_LINES_H_
#define QUIRE_MODEL_WEIGHTS_CACHE_LINES_H_

#include <cstddef>

namespace quire {

inline constexpr size_t kCacheLine = 64;  // bytes

}  // namespace quire

#endif  // QUIRE_MODEL_WEIGHTS_CACHE_LINES_H_
