// Queues of transfers: one by one, by threads. uring_queue.cc has those by io_uring.
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "store/disk/file_system.h"

namespace quire {
namespace {

class SerialQueue final : public FileQueue {
 public:
  SerialQueue(FileSystem& files, size_t depth) : files_(files), depth_(depth) {}
  size_t depth() const override { return depth_; }
  void Start(const FileTransfer& transfer) override { waiting_.push_back(transfer); }
  FileTransferDone Next() override {
    const FileTransfer transfer = waiting_.front();
    waiting_.pop_front();
    return RunTransfer(files_, transfer);
  }

 private:
  FileSystem& files_;
  const size_t depth_;
  std::deque<FileTransfer> waiting_;
};

class ThreadQueue final : public FileQueue {
 public:
  ThreadQueue(FileSystem& files, size_t depth, int thread_count) : files_(files), depth_(depth) {
    for (int i = 0; i < thread_count; ++i) threads_.emplace_back([this] { Work(); });
  }
  ~ThreadQueue() override {
    {
      const std::lock_guard<std::mutex> guard(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }
  size_t depth() const override { return depth_; }
  void Start(const FileTransfer& transfer) override {
    {
      const std::lock_guard<std::mutex> guard(mutex_);
      waiting_.push_back(transfer);
    }
    changed_.notify_one();
  }
  FileTransferDone Next() override {
    std::unique_lock<std::mutex> lock(mutex_);
    finished_.wait(lock, [&] { return !done_.empty(); });
    const FileTransferDone done = done_.front();
    done_.pop_front();
    return done;
  }

 private:
  void Work() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return stopping_ || !waiting_.empty(); });
      if (waiting_.empty()) return;
      const FileTransfer transfer = waiting_.front();
      waiting_.pop_front();
      lock.unlock();
      const FileTransferDone done = RunTransfer(files_, transfer);
      lock.lock();
      done_.push_back(done);
      finished_.notify_one();
    }
  }

  FileSystem& files_;
  const size_t depth_;
  std::mutex mutex_;
  std::condition_variable changed_, finished_;
  std::deque<FileTransfer> waiting_;
  std::deque<FileTransferDone> done_;
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
  return std::make_unique<ThreadQueue>(files, depth, thread_count);
}

}  // namespace quire
