// What Quire asks of the kernel to place threads and memory on NUMA nodes. Tests give a fake.
#ifndef QUIRE_BASE_NUMA_CALLS_H_
#define QUIRE_BASE_NUMA_CALLS_H_

#include <cstddef>
#include <memory>
#include <span>
#include <thread>

namespace quire {

// Calls return 0 or an errno. From any thread.
class NumaCalls {
 public:
  virtual ~NumaCalls() = default;
  virtual int BindThread(std::thread& thread, std::span<const int> cpus) noexcept = 0;
  // Pages of this memory that are written for the first time come from `node` while it has some,
  // or from all of `nodes` in turn. REQUIRES: `memory` begins with a page of the machine.
  virtual int Prefer(std::byte* memory, size_t bytes, int node) noexcept = 0;
  virtual int Interleave(std::byte* memory, size_t bytes, std::span<const int> nodes) noexcept = 0;
  // The CPU of the calling thread; -1: not known.
  virtual int CurrentCpu() noexcept = 0;
};

// The machine's.
std::shared_ptr<NumaCalls> SystemNumaCalls();

}  // namespace quire

#endif  // QUIRE_BASE_NUMA_CALLS_H_
