// The threads of a test's process: how many it may have, and which of them take signals.
#ifndef QUIRE_BASE_TESTING_THREADS_OF_PROCESS_H_
#define QUIRE_BASE_TESTING_THREADS_OF_PROCESS_H_

#include <gtest/gtest.h>
#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

namespace quire {

// From now on the process gets no more memory than the stacks of `count` threads need, and so no
// more threads. For a child of a death test of the style "threadsafe": another process may have
// stacks left of threads that have ended.
inline void LeaveRoomForThreads(int count) {
  int64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  pthread_attr_t attributes;
  size_t stack_bytes = 0;
  if (pages == 0 || pthread_attr_init(&attributes) != 0 ||
      pthread_attr_getstacksize(&attributes, &stack_bytes) != 0)
    std::exit(100);
  rlimit limit = {};
  getrlimit(RLIMIT_AS, &limit);
  const auto stacks = static_cast<rlim_t>(stack_bytes) * static_cast<rlim_t>(2 * count + 1) / 2;
  limit.rlim_cur = static_cast<rlim_t>(pages * sysconf(_SC_PAGESIZE)) + stacks;
  if (setrlimit(RLIMIT_AS, &limit) != 0) std::exit(101);
}

// While it lives, new threads want a stack that no address space has, so there are none.
class ScopedNoThreads {
 public:
  ScopedNoThreads() {
    EXPECT_EQ(::pthread_getattr_default_np(&usual_), 0);
    pthread_attr_t huge;
    EXPECT_EQ(::pthread_attr_init(&huge), 0);
    EXPECT_EQ(::pthread_attr_setstacksize(&huge, size_t{1} << 48), 0);
    EXPECT_EQ(::pthread_setattr_default_np(&huge), 0);
    EXPECT_EQ(::pthread_attr_destroy(&huge), 0);
  }
  ~ScopedNoThreads() {
    EXPECT_EQ(::pthread_setattr_default_np(&usual_), 0);
    EXPECT_EQ(::pthread_attr_destroy(&usual_), 0);
  }
  ScopedNoThreads(const ScopedNoThreads&) = delete;
  ScopedNoThreads& operator=(const ScopedNoThreads&) = delete;

 private:
  pthread_attr_t usual_;
};

// Threads but the caller's own that do not block SIGTERM.
inline int64_t ThreadsThatTakeSignals() {
  int64_t count = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    if (task.path().filename() == std::to_string(gettid())) continue;
    std::ifstream status(task.path() / "status");
    std::string name, mask;
    while (status >> name && name != "SigBlk:") std::getline(status, mask);
    // A thread that has ended meanwhile has no line.
    if (!(status >> mask)) continue;
    const uint64_t blocked = std::strtoull(mask.c_str(), nullptr, 16);
    count += (blocked >> (SIGTERM - 1) & 1) == 0 ? 1 : 0;
  }
  return count;
}

}  // namespace quire

#endif  // QUIRE_BASE_TESTING_THREADS_OF_PROCESS_H_
