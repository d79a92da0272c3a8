// How much memory this process may use.
#ifndef QUIRE_ENGINE_MACHINE_MEMORY_H_
#define QUIRE_ENGINE_MACHINE_MEMORY_H_

#include <cstdint>
#include <string>

namespace quire {

// The machine's physical memory, or the limit of the control group where a container has a lower
// one. `cgroup_root` is where the kernel shows a container its own group, of version 1 or 2.
int64_t MachineMemoryBytes(const std::string& cgroup_root = "/sys/fs/cgroup");

}  // namespace quire

#endif  // QUIRE_ENGINE_MACHINE_MEMORY_H_
