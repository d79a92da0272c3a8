// The small interfaces through which a host gives parts of its own to Quire.
#ifndef QUIRE_SEAMS_H_
#define QUIRE_SEAMS_H_

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <type_traits>

#include "quire/status.h"

namespace quire {

class NumaNodes;    // Quire's own
struct SendRange;   // quire/kv_transfer.h
struct SendRecord;  // quire/kv_transfer.h

// Runs tasks on a set of threads. Kernels depend on it and on nothing else for parallelism; their
// results do not depend on the number of threads or on which thread runs which task.
class ParallelRunner {
 public:
  // A task: called once for each index in [0, count), on any thread; `worker` in [0,
  // worker_count()) is that of the calling thread, for scratch memory of its own. Must not throw.
  using Task = void (*)(void* context, int64_t index, int worker);

  virtual ~ParallelRunner() = default;
  virtual int worker_count() const noexcept = 0;
  // Returns when all tasks are done. Each task of one Run is called once, and no two at the same
  // time with the same `worker`. Objects that share a runner call it from several threads at a
  // time, and a task may call it: Run must not fail then.
  virtual void Run(int64_t count, Task task, void* context) noexcept = 0;
  virtual NumaNodes* numa_nodes() noexcept { return nullptr; }  // of a pool of EngineOptions::numa

  // Run with a callable `f(int64_t index, int worker)`.
  template <typename F>
  void ParallelFor(int64_t count, F&& f) noexcept {
    Run(
        count,
        [](void* context, int64_t index, int worker) {
          (*static_cast<std::remove_reference_t<F>*>(context))(index, worker);
        },
        const_cast<void*>(static_cast<const void*>(std::addressof(f))));
  }
};

// More than the cores of any machine: a larger number of threads is a mistake.
inline constexpr int kThreadCountMax = 1024;

// Quire's own pool of `thread_count` threads, the caller of Run among them; 0 = one per core that
// this process may use: affinity, CPU quota. Workers spin briefly for the next Run, then park. A
// host that gives fewer threads is no error (worker_count()). A Run while another one goes on, or
// from a task, does all its tasks on the calling thread, as worker 0. BadArgument for a number out
// of [0, kThreadCountMax], OutOfMemory. Do not destroy it on one of its own threads.
Result<std::shared_ptr<ParallelRunner>> CreateThreadPool(int thread_count);

// Moves keys and values of marked sequences out of a cache (quire/kv_transfer.h), layer by layer.
// It is called on the thread of the cache's own call, in which it must make no call on that cache.
// What it returns never fails the forward: an error ends the marks that it concerns.
class LayerSink {
 public:
  virtual ~LayerSink() = default;
  // The ranges' tokens are stored in the layer. Views end with the call, or with their memory.
  virtual Status OnLayerAppended(int64_t layer, std::span<const SendRange> ranges) = 0;
  // All layers of these tokens were given: they count from now on.
  virtual Status OnForwardEnded(std::span<const SendRecord> records) = 0;
  // What was given of these tokens since the last OnForwardEnded never counts.
  virtual Status OnForwardAborted(std::span<const SendRecord> records) = 0;
  // Nothing follows for these tokens, for this reason.
  virtual Status OnSendStopped(std::span<const SendRecord> records, const Status& why) = 0;
};

// Which tokens may come next in an answer: a grammar's matcher, for example. It stands behind the
// tokens that it has accepted. A host gives a request one that has accepted none; each sample is
// drawn with a fork of its own, which the engine owns. One thread at a time calls a fork, any of
// the runner's; Fork of what the host gave may be called by several at a time. No call may throw.
class TokenFilter {
 public:
  virtual ~TokenFilter() = default;
  // The size of the vocabulary for which it was made: the model's.
  virtual int64_t vocab_size() const noexcept = 0;
  // A filter at the same place that goes its own way.
  virtual Result<std::unique_ptr<TokenFilter>> Fork() const = 0;
  // `mask`: [(vocab_size + 31) / 32], the caller's. Sets bit token % 32 of word token / 32 for each
  // token that may come next, and clears it for all others; bits behind the vocabulary do not
  // count. The model's end-of-answer tokens are among them where the answer may end; where it must
  // end, there are no others.
  virtual Status FillMask(std::span<uint32_t> mask) = 0;
  // Goes on behind the token, which is drawn or a guess, and may be one that ends the answer: then
  // nothing may come next. False: it may not come next, and nothing has changed.
  virtual Result<bool> Accept(int32_t token) = 0;
  // Takes back the last `count` tokens that this filter, not what it was forked from, accepted.
  virtual Status Rollback(int64_t count) = 0;
};

// Time. All calls from any thread.
class Clock {
 public:
  virtual ~Clock() = default;
  // Milliseconds since 1970.
  virtual int64_t WallMs() const noexcept = 0;
  // Nanoseconds since some moment; never goes back.
  virtual int64_t SteadyNs() const noexcept = 0;
  // Waits until `changed` is notified or SteadyNs() is until_ns; may return earlier.
  virtual void Wait(std::condition_variable& changed, std::unique_lock<std::mutex>& lock,
                    int64_t until_ns) = 0;
};

// The machine's.
std::shared_ptr<Clock> MachineTime();

}  // namespace quire

#endif  // QUIRE_SEAMS_H_
