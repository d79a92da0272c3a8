#include "engine/machine_memory.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>

namespace quire {

int64_t MachineMemoryBytes(const std::string& cgroup_root) {
  int64_t bytes = static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
  // Version 2, then version 1. A file that is not there or says "max" is no limit.
  for (const char* const name : {"/memory.max", "/memory/memory.limit_in_bytes"}) {
    std::ifstream file(cgroup_root + name);
    int64_t limit = 0;
    if (file >> limit && limit > 0) bytes = std::min(bytes, limit);
  }
  return bytes;
}

}  // namespace quire
