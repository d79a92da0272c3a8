// The NUMA nodes of the machine that this process may use, and how they divide threads, tasks and
// memory. Pure but for ReadNumaTopology.
#ifndef QUIRE_BASE_NUMA_TOPOLOGY_H_
#define QUIRE_BASE_NUMA_TOPOLOGY_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/numa_nodes.h"

namespace quire {

// Where the kernel shows them; tests give others.
struct NumaPaths {
  std::string nodes = "/sys/devices/system/node";
  std::string status = "/proc/self/status";
};

struct NumaNode {
  int id = 0;
  std::vector<int> cpus = {};  // that this process may use, ascending

  bool operator==(const NumaNode&) const = default;
};

struct NumaTopology {
  // Those with memory and CPUs for this process, by ascending id. CPUs of a node without memory
  // count to the nearest node that has some.
  std::vector<NumaNode> nodes = {};
  std::string why_none = {};  // where there are none: the file, and what is wrong with it
};

// A list as the kernel writes them, "0-3,8": ascending. Nothing: it is none, or has a number over
// 1023.
std::optional<std::vector<int>> ParseIdList(std::string_view text);

NumaTopology ReadNumaTopology(std::span<const int> usable_cpus, const NumaPaths& paths = {});

// How many of the threads each node has: in proportion to its CPUs.
std::vector<int> ThreadsOfNodes(std::span<const NumaNode> nodes, int thread_count);

// Shares of the nodes in proportion to their threads. REQUIRES: each has some.
class NodeShares {
 public:
  explicit NodeShares(std::span<const int> threads);
  size_t node_count() const { return ends_.size(); }
  // Node `node` has the tasks [Begin(node), Begin(node + 1)) of `count`.
  int64_t Begin(size_t node, int64_t count) const;
  // The node of a worker: the first ones belong to the first node.
  size_t NodeOfWorker(int worker) const;

  struct Part {
    uintptr_t begin, end;
    size_t node;
    bool operator==(const Part&) const = default;
  };
  // The memory of the tasks `range`, which lie there side by side and are equally long, by nodes.
  // Borders are multiples of `unit`: memory that goes on where other memory ends has its last unit
  // with that one. Parts without a byte are left out.
  std::vector<Part> Divide(uintptr_t begin, size_t bytes, const TaskRange& range,
                           size_t unit) const;

 private:
  std::vector<int64_t> ends_;  // threads of a node and of those before it
};

}  // namespace quire

#endif  // QUIRE_BASE_NUMA_TOPOLOGY_H_
