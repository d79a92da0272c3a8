// What a machine keeps from the kernels. The paths themselves: KernelPaths() in
// quire/attention_kv_cache.h.
#ifndef QUIRE_KERNEL_PATHS_H_
#define QUIRE_KERNEL_PATHS_H_

#include <string>

namespace quire {

// The kernel path that this build has and the CPU could run, but the process may not, and why:
// "avx512_amx: ...", where the operating system refuses the tile registers. "" if there is none.
// Any thread may call it.
std::string RefusedKernelPath();

}  // namespace quire

#endif  // QUIRE_KERNEL_PATHS_H_
