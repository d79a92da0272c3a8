// Memory for tests of kernels.
#ifndef QUIRE_KERNELS_TESTING_NAN_MEMORY_H_
#define QUIRE_KERNELS_TESTING_NAN_MEMORY_H_

#include <cstddef>
#include <cstring>

#include "tensor/host_memory.h"

namespace quire {

// Every byte before use is 0xFF, so that what is read without having been written is a NaN.
inline HostMemory NaNMemory(size_t bytes) {
  HostMemory memory = HostMemory::Allocate(bytes).value();
  if (bytes > 0) std::memset(memory.data(), 0xFF, memory.size());
  return memory;
}

}  // namespace quire

#endif  // QUIRE_KERNELS_TESTING_NAN_MEMORY_H_
