#include "base/thread_pool.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <new>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "base/blocked_signals.h"
#include "base/control_groups.h"
#include "base/float_environment.h"
#include "base/guard.h"
#include "base/numa_nodes.h"
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

// Whether `value` is no longer `old` after a while.
template <typename T>
bool SpinUntilChange(const std::atomic<T>& value, T old) {
  for (int spin = 0; spin < kSpins; ++spin) {
    if (value.load(std::memory_order_acquire) != old) return true;
    Pause();
  }
  return false;
}

// Returns when `value` is no longer `old`.
template <typename T>
void AwaitChange(const std::atomic<T>& value, T old) {
  if (!SpinUntilChange(value, old)) value.wait(old, std::memory_order_acquire);
}

// A huge page, which lies on one node.
constexpr size_t kPlacedBytes = size_t{2} << 20;

// The nodes of a pool, at least two, each with threads.
struct PoolNodes {
  std::vector<NumaNode> nodes;
  NodeShares shares;
  std::shared_ptr<NumaCalls> calls;
  std::vector<int> ids = {};  // of the nodes

  // The first one for a CPU of none.
  size_t NodeOfCpu(int cpu) const {
    const auto has = [cpu](const NumaNode& node) {
      return std::ranges::binary_search(node.cpus, cpu);
    };
    const auto node = std::ranges::find_if(nodes, has);
    return node == nodes.end() ? 0 : static_cast<size_t>(node - nodes.begin());
  }
};

// What one kind of system call was refused with for the first time; 0: nothing.
class Refusal {
 public:
  void Note(int error) noexcept {
    int none = 0;
    if (error != 0) error_.compare_exchange_strong(none, error);
  }
  int error() const noexcept { return error_.load(); }

 private:
  std::atomic<int> error_{0};
};

// Indices are claimed one by one from an atomic counter. A job is open while its bit stands in
// `gate_`, whose other bits count the workers inside; a worker that comes after the bit was cleared
// leaves at once and has read nothing of the job. So Run waits only for workers that took part,
// never for one that is still waking up.
//
// With nodes, along() gives each node a counter of its own; a thread that finds it at its end goes
// on with the next node's.
class ThreadPool final : public ParallelRunner, private NumaNodes {
 public:
  explicit ThreadPool(int thread_count, std::optional<PoolNodes> nodes = std::nullopt)
      : nodes_(std::move(nodes)), counters_(nodes_ ? nodes_->nodes.size() : 1), along_(this) {
    const ScopedBlockedSignals blocked;
    workers_.reserve(static_cast<size_t>(thread_count - 1));
    for (int worker = 1; worker < thread_count; ++worker) {
      try {
        workers_.emplace_back([this, worker] { WorkerMain(worker); });
        if (nodes_) {
          const NumaNode& node = nodes_->nodes[nodes_->shares.NodeOfWorker(worker)];
          bind_refusal_.Note(nodes_->calls->BindThread(workers_.back(), node.cpus));
        }
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
    RunDivided(count, task, context, 1);
  }

  NumaNodes* numa_nodes() noexcept override { return nodes_ ? this : nullptr; }

 private:
  static constexpr uint32_t kOpen = uint32_t{1} << 31;

  // Indices [next, end) that nobody has claimed.
  struct alignas(kApart) Counter {
    std::atomic<int64_t> next{0};
    int64_t end = 0;
  };

  class AlongNodes final : public ParallelRunner {
   public:
    explicit AlongNodes(ThreadPool* pool) : pool_(pool) {}
    int worker_count() const noexcept override { return pool_->worker_count(); }
    NumaNodes* numa_nodes() noexcept override { return pool_; }
    void Run(int64_t count, Task task, void* context) noexcept override {
      pool_->RunDivided(count, task, context, pool_->counters_.size());
    }

   private:
    ThreadPool* const pool_;
  };

  ParallelRunner& along() noexcept override { return along_; }

  // Where the system refuses once it refuses always (its seccomp filter, a kernel without nodes):
  // memory then lies where it is written first.
  void Divide(std::byte* memory, size_t bytes, const TaskRange& range) noexcept override {
    const auto begin = reinterpret_cast<uintptr_t>(memory);
    for (const NodeShares::Part& part : nodes_->shares.Divide(begin, bytes, range, kPlacedBytes)) {
      if (place_refusal_.error() != 0) return;
      place_refusal_.Note(nodes_->calls->Prefer(
          memory + (part.begin - begin), part.end - part.begin, nodes_->nodes[part.node].id));
    }
  }

  void Spread(std::byte* memory, size_t bytes) noexcept override {
    if (bytes == 0 || place_refusal_.error() != 0) return;
    place_refusal_.Note(nodes_->calls->Interleave(memory, bytes, nodes_->ids));
  }

  std::string Text() const override {
    std::string text = std::to_string(nodes_->nodes.size()) + " nodes:";
    for (size_t i = 0; i < nodes_->nodes.size(); ++i) {
      const int64_t threads =
          nodes_->shares.Begin(i + 1, worker_count()) - nodes_->shares.Begin(i, worker_count());
      text += (i == 0 ? " node " : ", node ") + std::to_string(nodes_->nodes[i].id) + " with " +
              std::to_string(threads) + (threads == 1 ? " thread" : " threads");
    }
    if (const int error = bind_refusal_.error(); error != 0) {
      text += std::string("; threads are not bound to them, since the system refused: ") +
              std::strerror(error);
    }
    if (const int error = place_refusal_.error(); error != 0) {
      text += std::string("; memory lies where it is written first, since mbind was refused: ") +
              std::strerror(error);
    }
    return text;
  }

  // The first `counter_count` counters divide the indices.
  void RunDivided(int64_t count, Task task, void* context, size_t counter_count) noexcept {
    const ScopedFloatEnvironment environment;
    // While another Run has the workers, waiting for them could take as long as that one, and for
    // ever if this call comes from one of its tasks.
    if (count <= 1 || workers_.empty() || running_.exchange(true, std::memory_order_acquire)) {
      for (int64_t i = 0; i < count; ++i) task(context, i, 0);
      return;
    }
    task_ = task;
    context_ = context;
    counter_count_ = counter_count;
    for (size_t i = 0; i < counter_count; ++i) {
      const bool is_divided = counter_count > 1;
      counters_[i].next.store(is_divided ? nodes_->shares.Begin(i, count) : 0,
                              std::memory_order_relaxed);
      counters_[i].end = is_divided ? nodes_->shares.Begin(i + 1, count) : count;
    }
    gate_.fetch_or(kOpen, std::memory_order_release);
    Announce();
    Work(0, counter_count > 1 ? nodes_->NodeOfCpu(nodes_->calls->CurrentCpu()) : 0);
    Close();
    running_.store(false, std::memory_order_release);
  }

  void Stop() {
    if (IsForked()) {
      // The child of a fork has none of the threads, and to join them would read memory that is not
      // theirs any more. What stands for them is left as it is.
      static_cast<void>(new std::vector<std::thread>(std::move(workers_)));
      return;
    }
    stop_.store(true, std::memory_order_relaxed);
    Announce();
    for (std::thread& worker : workers_) worker.join();
  }

  bool IsForked() const { return ::getpid() != process_; }

  void Announce() {
    announced_.fetch_add(1, std::memory_order_release);
    announced_.notify_all();
  }

  // Begins with the counter of its node.
  void Work(int worker, size_t node) {
    for (size_t i = 0; i < counter_count_; ++i) {
      Counter& counter = counters_[(node + i) % counter_count_];
      for (;;) {
        const int64_t index = counter.next.fetch_add(1, std::memory_order_relaxed);
        if (index >= counter.end) break;
        task_(context_, index, worker);
      }
    }
  }

  void Close() {
    uint32_t inside = gate_.fetch_and(~kOpen, std::memory_order_acq_rel) & ~kOpen;
    while (inside != 0) {
      if (!SpinUntilChange(gate_, inside)) {
        // A worker that was inside at a fork never leaves in the child, which has no workers. It is
        // asked here, where to wait takes a system call anyway.
        if (IsForked()) return gate_.store(0, std::memory_order_relaxed);
        gate_.wait(inside, std::memory_order_acquire);
      }
      inside = gate_.load(std::memory_order_acquire);
    }
  }

  void TakePart(int worker, size_t node) {
    const bool open = (gate_.fetch_add(1, std::memory_order_acquire) & kOpen) != 0;
    if (open) Work(worker, node);
    // Only the caller waits for the gate, and only after it has closed it.
    const uint32_t before = gate_.fetch_sub(1, std::memory_order_release);
    if ((before & kOpen) == 0) gate_.notify_one();
  }

  void WorkerMain(int worker) {
    const ScopedFloatEnvironment environment;
    const size_t node = nodes_ ? nodes_->shares.NodeOfWorker(worker) : 0;
    for (uint32_t seen = 0;;) {
      AwaitChange(announced_, seen);
      seen = announced_.load(std::memory_order_acquire);
      if (stop_.load(std::memory_order_relaxed)) return;
      TakePart(worker, node);
    }
  }

  const pid_t process_ = ::getpid();
  const std::optional<PoolNodes> nodes_;
  Refusal bind_refusal_;
  Refusal place_refusal_;
  alignas(kApart) std::atomic<uint32_t> announced_{0};  // jobs so far
  std::atomic<bool> stop_{false};
  std::atomic<bool> running_{false};
  size_t counter_count_ = 1;
  Task task_ = nullptr;
  void* context_ = nullptr;
  alignas(kApart) std::atomic<uint32_t> gate_{0};
  std::vector<Counter> counters_;
  AlongNodes along_;
  std::vector<std::thread> workers_;
};

// Threads of the pool that is asked for.
Result<int> ThreadCountOf(int thread_count) {
  if (thread_count < 0 || thread_count > kThreadCountMax) {
    return Status(StatusCode::kBadArgument,
                  "CreateThreadPool: " + std::to_string(thread_count) + " threads are not in [0, " +
                      std::to_string(kThreadCountMax) + "]; 0 stands for one per core");
  }
  return thread_count > 0 ? thread_count : std::min(UsableCores(), kThreadCountMax);
}

// Nothing: fewer than two nodes have threads.
std::optional<PoolNodes> NodesWithThreads(const NumaTopology& topology, int thread_count,
                                          std::shared_ptr<NumaCalls> calls) {
  if (topology.nodes.empty()) return std::nullopt;
  const std::vector<int> all = ThreadsOfNodes(topology.nodes, thread_count);
  std::vector<NumaNode> nodes;
  std::vector<int> ids;
  std::vector<int> threads;
  for (size_t i = 0; i < all.size(); ++i) {
    if (all[i] == 0) continue;
    nodes.push_back(topology.nodes[i]);
    ids.push_back(topology.nodes[i].id);
    threads.push_back(all[i]);
  }
  if (nodes.size() < 2) return std::nullopt;
  return PoolNodes{.nodes = std::move(nodes),
                   .shares = NodeShares(threads),
                   .calls = std::move(calls),
                   .ids = std::move(ids)};
}

}  // namespace

Result<std::shared_ptr<ParallelRunner>> CreateThreadPool(int thread_count) {
  return GuardEntry([&]() -> Result<std::shared_ptr<ParallelRunner>> {
    QUIRE_ASSIGN_OR_RETURN(const int count, ThreadCountOf(thread_count));
    return std::shared_ptr<ParallelRunner>(std::make_shared<ThreadPool>(count));
  });
}

Result<std::shared_ptr<ParallelRunner>> CreateNumaThreadPool(int thread_count,
                                                             const NumaTopology& topology,
                                                             std::shared_ptr<NumaCalls> calls) {
  return GuardEntry([&]() -> Result<std::shared_ptr<ParallelRunner>> {
    QUIRE_ASSIGN_OR_RETURN(const int count, ThreadCountOf(thread_count));
    return std::shared_ptr<ParallelRunner>(
        std::make_shared<ThreadPool>(count, NodesWithThreads(topology, count, std::move(calls))));
  });
}

}  // namespace quire
