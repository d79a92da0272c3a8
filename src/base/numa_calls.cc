#include "base/numa_calls.h"

#include <linux/mempolicy.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <limits>

namespace quire {
namespace {

// By system calls: libnuma is one more library for three of them.
class SystemCalls final : public NumaCalls {
 public:
  int BindThread(std::thread& thread, std::span<const int> cpus) noexcept override {
    cpu_set_t mask;
    CPU_ZERO(&mask);
    for (const int cpu : cpus) CPU_SET(cpu, &mask);
    return pthread_setaffinity_np(thread.native_handle(), sizeof(mask), &mask);
  }

  int Prefer(std::byte* memory, size_t bytes, int node) noexcept override {
    return SetPolicy(memory, bytes, MPOL_PREFERRED, std::span(&node, 1));
  }

  int Interleave(std::byte* memory, size_t bytes, std::span<const int> nodes) noexcept override {
    return SetPolicy(memory, bytes, MPOL_INTERLEAVE, nodes);
  }

  int CurrentCpu() noexcept override { return sched_getcpu(); }

 private:
  static int SetPolicy(std::byte* memory, size_t bytes, int mode,
                       std::span<const int> nodes) noexcept {
    using Word = unsigned long;  // of the kernel's interface
    constexpr int kWordBits = std::numeric_limits<Word>::digits;
    constexpr int kNodes = 1024;
    std::array<Word, kNodes / kWordBits> mask = {};
    for (const int node : nodes) {
      mask[static_cast<size_t>(node / kWordBits)] |= Word{1} << node % kWordBits;
    }
    // The kernel reads one bit fewer than it is told.
    const long result = syscall(SYS_mbind, memory, bytes, mode, mask.data(), Word{kNodes + 1}, 0U);
    return result == 0 ? 0 : errno;
  }
};

}  // namespace

std::shared_ptr<NumaCalls> SystemNumaCalls() { return std::make_shared<SystemCalls>(); }

}  // namespace quire
