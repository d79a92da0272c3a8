// What a runner whose threads belong to several NUMA nodes does beside running tasks
// (ParallelRunner::numa_nodes). Where memory lies and which
// thread reads it changes no result.
#ifndef QUIRE_BASE_NUMA_NODES_H_
#define QUIRE_BASE_NUMA_NODES_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "quire/seams.h"

namespace quire {

// Tasks [begin, end) of `count`.
struct TaskRange {
  int64_t begin = 0;
  int64_t end = 1;
  int64_t count = 1;
};

class NumaNodes {
 public:
  virtual ~NumaNodes() = default;
  // The same threads for tasks that read memory in the order of their indices, such as the outputs
  // of a packed matrix: each node has a run of the indices, as long as its share of the threads.
  // Its threads take these first, and what is left of other nodes then.
  virtual ParallelRunner& along() noexcept = 0;
  // Says where memory shall lie that nobody has written yet: that of the tasks `range` of along()
  // where those lie that take them, to 2 MiB; or in turns on all nodes.
  virtual void Divide(std::byte* memory, size_t bytes, const TaskRange& range) noexcept = 0;
  virtual void Spread(std::byte* memory, size_t bytes) noexcept = 0;
  // The nodes, their threads, and what the system has refused: for people.
  virtual std::string Text() const = 0;
};

// The runner for tasks that read memory in the order of their indices.
inline ParallelRunner& Along(ParallelRunner& runner) noexcept {
  NumaNodes* const nodes = runner.numa_nodes();
  return nodes == nullptr ? runner : nodes->along();
}

}  // namespace quire

#endif  // QUIRE_BASE_NUMA_NODES_H_
