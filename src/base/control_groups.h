// The control groups that hold this process: where a container's limits stand.
#ifndef QUIRE_BASE_CONTROL_GROUPS_H_
#define QUIRE_BASE_CONTROL_GROUPS_H_

#include <string>
#include <string_view>
#include <vector>

namespace quire {

// Where the kernel shows them; tests give others.
struct ControlGroupPaths {
  std::string proc = "/proc";
  std::string cgroup = "/sys/fs/cgroup";
};

struct ControlGroup {
  int version = 2;
  std::string folder = {};  // whose files may be missing: then it has no such limit
};

// The groups of a controller ("memory", "cpu"), of versions 2 and 1: the process's own, those that
// it lies in, and the root.
std::vector<ControlGroup> ControlGroupsOf(std::string_view controller,
                                          const ControlGroupPaths& paths = {});

// The CPUs that this process may run on, ascending; none if there are more than CPU_SETSIZE.
std::vector<int> UsableCpus();

// Cores that this process may use: those of its affinity mask, and no more than the CPU quotas of
// its control groups, rounded up. At least 1.
int UsableCores(const ControlGroupPaths& paths = {});

}  // namespace quire

#endif  // QUIRE_BASE_CONTROL_GROUPS_H_
