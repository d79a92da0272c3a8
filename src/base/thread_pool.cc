#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <new>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "base/blocked_signals.h"
#include "base/control_groups.h"
#include "base/float_environment.h"
#include "base/guard.h"
#include "quire/seams.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace quire {
namespace {

// How often a waiting thread looks before it parks: some 50 to 200 microseconds, longer than the
// gap between two kernels of one layer and far shorter than the gap between two steps of a quiet
// server.
constexpr int kSpins = 2000;

// Keeps what the threads write apart from what they read: two lines, because the prefetcher fetches
// pairs.
constexpr size_t kApart = 128;

void Pause() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

// Returns when `value` is no longer `old`.
template <typename T>
void AwaitChange(const std::atomic<T>& value, T old) {
  for (int spin = 0; spin < kSpins; ++spin) {
    if (value.load(std::memory_order_acquire) != old) return;
    Pause();
  }
  value.wait(old, std::memory_order_acquire);
}

// Indices are claimed one by one from an atomic counter. A job is open while its bit stands in
// `gate_`, whose other bits count the workers inside; a worker that comes after the bit was cleared
// leaves at once and has read nothing of the job. So Run waits only for workers that took part,
// never for one that is still waking up.
class ThreadPool final : public ParallelRunner {
 public:
  explicit ThreadPool(int thread_count) {
    const ScopedBlockedSignals blocked;
    workers_.reserve(static_cast<size_t>(thread_count - 1));
    for (int worker = 1; worker < thread_count; ++worker) {
      try {
        workers_.emplace_back([this, worker] { WorkerMain(worker); });
      } catch (const std::system_error&) {
        break;  // the host has no more threads to give; worker_count() tells how many there are
      } catch (const std::bad_alloc&) {
        Stop();
        throw;
      }
    }
  }

  ~ThreadPool() override { Stop(); }

  int worker_count() const noexcept override { return static_cast<int>(workers_.size()) + 1; }

  void Run(int64_t count, Task task, void* context) noexcept override {
    const ScopedFloatEnvironment environment;
    // While another Run has the workers, waiting for them could take as long as that one, and for
    // ever if this call comes from one of its tasks.
    if (count <= 1 || workers_.empty() || running_.exchange(true, std::memory_order_acquire)) {
      for (int64_t i = 0; i < count; ++i) task(context, i, 0);
      return;
    }
    count_ = count;
    task_ = task;
    context_ = context;
    next_.store(0, std::memory_order_relaxed);
    gate_.fetch_or(kOpen, std::memory_order_release);
    Announce();
    Work(0);
    Close();
    running_.store(false, std::memory_order_release);
  }

 private:
  static constexpr uint32_t kOpen = uint32_t{1} << 31;

  void Stop() {
    if (::getpid() != process_) {
      // The child of a fork has none of the threads, and to join them would read memory that is not
      // theirs any more. What stands for them is left as it is.
      static_cast<void>(new std::vector<std::thread>(std::move(workers_)));
      return;
    }
    stop_.store(true, std::memory_order_relaxed);
    Announce();
    for (std::thread& worker : workers_) worker.join();
  }

  void Announce() {
    announced_.fetch_add(1, std::memory_order_release);
    announced_.notify_all();
  }

  void Work(int worker) {
    for (;;) {
      const int64_t index = next_.fetch_add(1, std::memory_order_relaxed);
      if (index >= count_) return;
      task_(context_, index, worker);
    }
  }

  void Close() {
    uint32_t inside = gate_.fetch_and(~kOpen, std::memory_order_acq_rel) & ~kOpen;
    while (inside != 0) {
      AwaitChange(gate_, inside);
      inside = gate_.load(std::memory_order_acquire);
    }
  }

  void TakePart(int worker) {
    const bool open = (gate_.fetch_add(1, std::memory_order_acquire) & kOpen) != 0;
    if (open) Work(worker);
    // Only the caller waits for the gate, and only after it has closed it.
    const uint32_t before = gate_.fetch_sub(1, std::memory_order_release);
    if ((before & kOpen) == 0) gate_.notify_one();
  }

  void WorkerMain(int worker) {
    const ScopedFloatEnvironment environment;
    for (uint32_t seen = 0;;) {
      AwaitChange(announced_, seen);
      seen = announced_.load(std::memory_order_acquire);
      if (stop_.load(std::memory_order_relaxed)) return;
      TakePart(worker);
    }
  }

  const pid_t process_ = ::getpid();
  alignas(kApart) std::atomic<uint32_t> announced_{0};  // jobs so far
  std::atomic<bool> stop_{false};
  std::atomic<bool> running_{false};
  int64_t count_ = 0;
  Task task_ = nullptr;
  void* context_ = nullptr;
  alignas(kApart) std::atomic<uint32_t> gate_{0};
  alignas(kApart) std::atomic<int64_t> next_{0};
  std::vector<std::thread> workers_;
};

}  // namespace

Result<std::shared_ptr<ParallelRunner>> CreateThreadPool(int thread_count) {
  return GuardEntry([&]() -> Result<std::shared_ptr<ParallelRunner>> {
    if (thread_count < 0 || thread_count > kThreadCountMax) {
      return Status(StatusCode::kBadArgument, "CreateThreadPool: " + std::to_string(thread_count) +
                                                  " threads are not in [0, " +
                                                  std::to_string(kThreadCountMax) +
                                                  "]; 0 stands for one per core");
    }
    const int count = thread_count > 0 ? thread_count : std::min(UsableCores(), kThreadCountMax);
    return std::shared_ptr<ParallelRunner>(std::make_shared<ThreadPool>(count));
  });
}

}  // namespace quire
