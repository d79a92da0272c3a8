#include "base/control_groups.h"

#include <sched.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <thread>

namespace quire {
namespace {

bool NamesController(std::string_view controllers, std::string_view wanted) {
  while (!controllers.empty()) {
    const size_t end = std::min(controllers.find(','), controllers.size());
    if (controllers.substr(0, end) == wanted) return true;
    controllers.remove_prefix(std::min(end + 1, controllers.size()));
  }
  return false;
}

// The group `path` below `root` and all that it lies in. A container often sees its own group at
// the root, under a path that is the host's: then only the root is there.
void AddGroups(int version, const std::string& root, std::string path,
               std::vector<ControlGroup>* groups) {
  if (path.find("/..") != std::string::npos) path.clear();
  while (!path.empty() && path != "/") {
    groups->push_back({version, root + path});
    path.resize(path.rfind('/'));
  }
  groups->push_back({version, root});
}

// Cores that the quota of a group amounts to; 0 = it has none.
int64_t QuotaCores(const ControlGroup& group) {
  int64_t quota = 0;
  int64_t period = 0;
  if (group.version == 2) {
    std::ifstream file(group.folder + "/cpu.max");  // "max 100000" without a quota
    if (!(file >> quota >> period)) return 0;
  } else {
    std::ifstream quota_file(group.folder + "/cpu.cfs_quota_us");  // -1 without a quota
    std::ifstream period_file(group.folder + "/cpu.cfs_period_us");
    if (!(quota_file >> quota) || !(period_file >> period)) return 0;
  }
  return quota > 0 && period > 0 ? (quota - 1) / period + 1 : 0;
}

}  // namespace

std::vector<ControlGroup> ControlGroupsOf(std::string_view controller,
                                          const ControlGroupPaths& paths) {
  // Lines of "hierarchy:controllers:path"; version 2 has no controllers there.
  std::string path2 = "/";
  std::string path1 = "/";
  std::ifstream lines(paths.proc + "/self/cgroup");
  for (std::string line; std::getline(lines, line);) {
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos || line.compare(second + 1, 1, "/") != 0) continue;
    const std::string_view controllers =
        std::string_view(line).substr(first + 1, second - first - 1);
    if (controllers.empty()) path2 = line.substr(second + 1);
    if (NamesController(controllers, controller)) path1 = line.substr(second + 1);
  }
  std::vector<ControlGroup> groups;
  AddGroups(2, paths.cgroup, path2, &groups);
  AddGroups(1, paths.cgroup + "/" + std::string(controller), path1, &groups);
  return groups;
}

std::vector<int> UsableCpus() {
  cpu_set_t mask;
  CPU_ZERO(&mask);
  std::vector<int> cpus;
  if (sched_getaffinity(0, sizeof(mask), &mask) != 0) return cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &mask)) cpus.push_back(cpu);
  }
  return cpus;
}

int UsableCores(const ControlGroupPaths& paths) {
  int cores = static_cast<int>(UsableCpus().size());
  if (cores == 0) cores = static_cast<int>(std::thread::hardware_concurrency());
  cores = std::max(cores, 1);
  for (const ControlGroup& group : ControlGroupsOf("cpu", paths)) {
    const int64_t quota = QuotaCores(group);
    if (quota > 0) cores = static_cast<int>(std::min<int64_t>(cores, quota));
  }
  return cores;
}

}  // namespace quire
