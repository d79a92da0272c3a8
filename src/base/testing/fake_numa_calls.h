// FakeNumaCalls: notes what the kernel is asked, and refuses on demand. Tests of nodes that this
// machine does not have.
#ifndef QUIRE_BASE_TESTING_FAKE_NUMA_CALLS_H_
#define QUIRE_BASE_TESTING_FAKE_NUMA_CALLS_H_

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "base/numa_calls.h"
#include "base/numa_topology.h"

namespace quire {

class FakeNumaCalls final : public NumaCalls {
 public:
  struct Placed {
    std::byte* memory;
    size_t bytes;
    std::vector<int> nodes;  // several: in turn
  };

  int bind_error = 0;
  int place_error = 0;
  int current_cpu = 0;  // of the caller, whatever thread that is

  int BindThread(std::thread&, std::span<const int> cpus) noexcept override {
    const std::lock_guard lock(mutex_);
    bound_.emplace_back(cpus.begin(), cpus.end());
    return bind_error;
  }
  int Prefer(std::byte* memory, size_t bytes, int node) noexcept override {
    return Note({memory, bytes, {node}});
  }
  int Interleave(std::byte* memory, size_t bytes, std::span<const int> nodes) noexcept override {
    return Note({memory, bytes, {nodes.begin(), nodes.end()}});
  }
  int CurrentCpu() noexcept override { return current_cpu; }

  // CPUs of the threads, in the order in which they were bound.
  std::vector<std::vector<int>> bound() const {
    const std::lock_guard lock(mutex_);
    return bound_;
  }
  std::vector<Placed> placed() const {
    const std::lock_guard lock(mutex_);
    return placed_;
  }

 private:
  int Note(Placed placed) {
    const std::lock_guard lock(mutex_);
    placed_.push_back(std::move(placed));
    return place_error;
  }

  mutable std::mutex mutex_;
  std::vector<std::vector<int>> bound_;
  std::vector<Placed> placed_;
};

// Nodes 0, 1, ... with `cpus` CPUs each.
inline NumaTopology NodesOfEqualSize(int nodes, int cpus) {
  NumaTopology topology;
  for (int id = 0; id < nodes; ++id) {
    topology.nodes.push_back({.id = id, .cpus = {}});
    for (int cpu = 0; cpu < cpus; ++cpu) topology.nodes.back().cpus.push_back(id * cpus + cpu);
  }
  return topology;
}

}  // namespace quire

#endif  // QUIRE_BASE_TESTING_FAKE_NUMA_CALLS_H_
