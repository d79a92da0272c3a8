// ReadQueue: the threads that ask one slow tier and read from it, and what waits for them.
#ifndef QUIRE_STORE_TIERED_READ_QUEUE_H_
#define QUIRE_STORE_TIERED_READ_QUEUE_H_

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace quire {

class ReadQueue {
 public:
  using Task = std::function<void()>;

  // Threads start here: std::system_error when there is none.
  ReadQueue();
  ~ReadQueue() { Close(); }

  // Higher priorities first, else in their order. False if too many wait or it is closed. The task
  // throws nothing. std::bad_alloc changes nothing.
  bool Push(int priority, Task task);
  // Ends the threads after the tasks that run; drops the others.
  void Close() noexcept;

 private:
  // The second one serves while a call of the first one hangs.
  static constexpr int kThreads = 2;
  // Each is some kilobytes of ids; a tier with a longer queue is too slow to be waited for.
  static constexpr size_t kTasksMax = 4096;

  void Run() noexcept;

  std::mutex mutex_;
  std::condition_variable changed_;
  bool closing_ = false;
  uint64_t last_ = 0;
  std::map<std::pair<int64_t, uint64_t>, Task> tasks_;  // by -priority, then in their order
  std::vector<std::thread> threads_;
};

}  // namespace quire

#endif  // QUIRE_STORE_TIERED_READ_QUEUE_H_
