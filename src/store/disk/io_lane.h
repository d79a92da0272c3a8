// IoLane: threads that make blocking calls for callers that must not hang with them.
//
// A disk can keep a call for ever, and no signal ends it. So the caller only waits for the lane's
// thread, and leaves when its deadline has passed or the work made no progress for one I/O
// time-out: the work is abandoned then. What the work uses it owns or shares; memory of the caller
// it touches only within WithCaller, which an abandoned work may not enter. A thread that hangs is
// lost for its lane until the call returns, and work behind it gives up in the same way.
#ifndef QUIRE_STORE_DISK_IO_LANE_H_
#define QUIRE_STORE_DISK_IO_LANE_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "quire/seams.h"
#include "quire/status.h"

namespace quire {

// One piece of work, shared by the caller and the lane.
class IoWork {
 public:
  IoWork(std::shared_ptr<Clock> clock, std::shared_ptr<std::atomic<int64_t>> lane_beat_ns);

  // Called after each system call: the disk lives.
  void Beat();
  // Whether anybody still waits.
  bool abandoned() const;
  // Runs `f` while the caller is held in its call; false if it has left.
  template <typename F>
  bool WithCaller(F&& f) {
    const std::lock_guard<std::mutex> guard(mutex_);
    if (abandoned_) return false;
    f();
    return true;
  }

 private:
  friend class IoLane;

  const std::shared_ptr<Clock> clock_;
  const std::shared_ptr<std::atomic<int64_t>> lane_beat_ns_;  // of all work of the lane
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::function<void(IoWork&)> run_;
  Status status_;
  int64_t beat_ns_;
  bool started_ = false, done_ = false, abandoned_ = false;
  bool closed_ = false;  // abandoned since the lane has ended
};

class IoLane {
 public:
  // std::system_error without threads.
  IoLane(std::shared_ptr<Clock> clock, int thread_count, int64_t io_timeout_ns);
  ~IoLane() { Stop(); }

  // Ends the threads; all work that is under way or comes later is Closed. Those that hang are left
  // behind after an I/O time-out; their work keeps alive what it uses. Twice, but not from two
  // threads at once.
  void Stop() noexcept;

  // Runs `work` on a thread of the lane; ok when it is done. Timeout: the deadline passed, or no
  // progress for an I/O time-out. Closed. OutOfMemory if that is what left `work`.
  Status Run(std::function<void(IoWork&)> work, int64_t deadline_ns);
  // The same without waiting.
  std::shared_ptr<IoWork> Start(std::function<void(IoWork&)> work);
  Status Await(IoWork& work, int64_t deadline_ns);

  // False after work was given up without progress, until some work is done again.
  bool responds() const;

 private:
  struct Shared;
  static void Serve(const std::shared_ptr<Shared>& shared);
  // Its caller leaves now.
  static void Abandon(IoWork& work) noexcept;
  // Its caller has left: it does not wait for its turn any more.
  void Leave(IoWork& work) noexcept;

  const std::shared_ptr<Clock> clock_;
  const int64_t io_timeout_ns_;
  std::shared_ptr<std::atomic<int64_t>> beat_ns_;
  std::shared_ptr<Shared> shared_;
  std::vector<std::thread> threads_;
};

}  // namespace quire

#endif  // QUIRE_STORE_DISK_IO_LANE_H_
