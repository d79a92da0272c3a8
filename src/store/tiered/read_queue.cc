#include "store/tiered/read_queue.h"

namespace quire {

ReadQueue::ReadQueue() {
  threads_.reserve(kThreads);
  try {
    for (int i = 0; i < kThreads; ++i) threads_.emplace_back([this] { Run(); });
  } catch (...) {
    Close();
    throw;
  }
}

bool ReadQueue::Push(int priority, Task task) {
  const std::lock_guard lock(mutex_);
  if (closing_ || tasks_.size() >= kTasksMax) return false;
  tasks_.emplace(std::pair(-int64_t{priority}, ++last_), std::move(task));
  changed_.notify_one();
  return true;
}

void ReadQueue::Close() noexcept {
  decltype(tasks_) dropped;  // ends after the lock: tasks own fetches
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
    dropped.swap(tasks_);
    changed_.notify_all();
  }
  for (std::thread& thread : threads_)
    if (thread.joinable()) thread.join();
}

void ReadQueue::Run() noexcept {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return closing_ || !tasks_.empty(); });
    if (closing_) return;
    auto task = tasks_.extract(tasks_.begin());
    lock.unlock();
    task.mapped()();
    task = {};  // what it owned goes without the lock
    lock.lock();
  }
}

}  // namespace quire
