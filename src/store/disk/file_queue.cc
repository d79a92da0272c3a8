// Queues of transfers: one by one, by threads. uring_queue.cc has those by io_uring.
#include <condition_variable>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>
#include <vector>

#include "base/check.h"
#include "store/disk/file_system.h"

namespace quire {
namespace {

// First in, first out, in memory that is taken once: what is under way must not fail for want of
// some.
template <typename T>
class Ring {
 public:
  explicit Ring(size_t size) : items_(size) {}
  bool empty() const { return count_ == 0; }
  void Push(const T& item) noexcept {
    QUIRE_CHECK(count_ < items_.size()) << "more transfers are under way than the queue is deep";
    items_[(first_ + count_++) % items_.size()] = item;
  }
  T Pop() noexcept {
    QUIRE_CHECK(count_ > 0) << "no transfer is under way";
    const T item = items_[first_];
    first_ = (first_ + 1) % items_.size();
    --count_;
    return item;
  }

 private:
  std::vector<T> items_;
  size_t first_ = 0, count_ = 0;
};

class SerialQueue final : public FileQueue {
 public:
  SerialQueue(FileSystem& files, size_t depth) : files_(files), depth_(depth), waiting_(depth) {}
  size_t depth() const override { return depth_; }
  void Start(const FileTransfer& transfer) override { waiting_.Push(transfer); }
  FileTransferDone Next() override { return RunTransfer(files_, waiting_.Pop()); }

 private:
  FileSystem& files_;
  const size_t depth_;
  Ring<FileTransfer> waiting_;
};

class ThreadQueue final : public FileQueue {
 public:
  ThreadQueue(FileSystem& files, size_t depth, int thread_count)
      : files_(files), depth_(depth), waiting_(depth), done_(depth) {
    threads_.reserve(static_cast<size_t>(thread_count));
    try {
      for (int i = 0; i < thread_count; ++i) threads_.emplace_back([this] { Work(); });
    } catch (const std::system_error&) {
      // Those that there are do all of it; thread_count() tells how many.
    } catch (...) {
      Stop();
      throw;
    }
  }
  size_t thread_count() const { return threads_.size(); }
  ~ThreadQueue() override { Stop(); }
  size_t depth() const override { return depth_; }
  void Start(const FileTransfer& transfer) override {
    {
      const std::lock_guard<std::mutex> guard(mutex_);
      waiting_.Push(transfer);
    }
    changed_.notify_one();
  }
  FileTransferDone Next() override {
    std::unique_lock<std::mutex> lock(mutex_);
    finished_.wait(lock, [&] { return !done_.empty(); });
    return done_.Pop();
  }
  std::optional<FileTransferDone> Poll() override {
    const std::lock_guard<std::mutex> guard(mutex_);
    if (done_.empty()) return std::nullopt;
    return done_.Pop();
  }

 private:
  void Stop() noexcept {
    {
      const std::lock_guard<std::mutex> guard(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }
  void Work() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return stopping_ || !waiting_.empty(); });
      if (waiting_.empty()) return;
      const FileTransfer transfer = waiting_.Pop();
      lock.unlock();
      const FileTransferDone done = RunTransfer(files_, transfer);
      lock.lock();
      done_.Push(done);
      finished_.notify_one();
    }
  }

  FileSystem& files_;
  const size_t depth_;
  std::mutex mutex_;
  std::condition_variable changed_, finished_;
  Ring<FileTransfer> waiting_;
  Ring<FileTransferDone> done_;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace

FileTransferDone RunTransfer(FileSystem& files, const FileTransfer& transfer) {
  const std::span<std::byte> bytes(transfer.data, static_cast<size_t>(transfer.size));
  return {transfer.tag, transfer.is_write ? files.Write(transfer.file, bytes, transfer.offset)
                                          : files.Read(transfer.file, bytes, transfer.offset)};
}

std::unique_ptr<FileQueue> FileSystem::CreateQueue(size_t depth) {
  return std::make_unique<SerialQueue>(*this, depth);
}

std::unique_ptr<FileQueue> CreateThreadQueue(FileSystem& files, size_t depth, int thread_count) {
  auto queue = std::make_unique<ThreadQueue>(files, depth, thread_count);
  if (queue->thread_count() > 0) return queue;
  return std::make_unique<SerialQueue>(files, depth);
}

}  // namespace quire
