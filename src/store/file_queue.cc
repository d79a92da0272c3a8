// Queues of transfers: one by one, by threads, by io_uring.
#include <liburing.h>

#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

#include "store/file_system.h"

namespace quire {
namespace {

FileTransferDone Transfer(FileSystem& files, const FileTransfer& transfer) {
  const std::span<std::byte> bytes(transfer.data, static_cast<size_t>(transfer.size));
  return {transfer.tag, transfer.is_write ? files.Write(transfer.file, bytes, transfer.offset)
                                          : files.Read(transfer.file, bytes, transfer.offset)};
}

class SerialQueue final : public FileQueue {
 public:
  SerialQueue(FileSystem& files, size_t depth) : files_(files), depth_(depth) {}
  size_t depth() const override { return depth_; }
  void Start(const FileTransfer& transfer) override { waiting_.push_back(transfer); }
  FileTransferDone Next() override {
    const FileTransfer transfer = waiting_.front();
    waiting_.pop_front();
    return Transfer(files_, transfer);
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
      const FileTransferDone done = Transfer(files_, transfer);
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

class UringQueue final : public FileQueue {
 public:
  UringQueue(FileSystem& files, io_uring ring, size_t depth)
      : files_(files), ring_(ring), slots_(depth) {
    for (size_t i = 0; i < depth; ++i) free_.push_back(i);
  }
  ~UringQueue() override { io_uring_queue_exit(&ring_); }
  size_t depth() const override { return slots_.size(); }

  void Start(const FileTransfer& transfer) override {
    io_uring_sqe* const entry = io_uring_get_sqe(&ring_);
    const size_t slot = free_.back();
    slots_[slot] = transfer;
    free_.pop_back();
    // The ring has as many entries as slots, and all that were filled have been submitted.
    const auto size = static_cast<unsigned>(transfer.size);
    const auto offset = static_cast<uint64_t>(transfer.offset);
    if (transfer.is_write) {
      io_uring_prep_write(entry, transfer.file, transfer.data, size, offset);
    } else {
      io_uring_prep_read(entry, transfer.file, transfer.data, size, offset);
    }
    io_uring_sqe_set_data64(entry, slot);
    // A kernel that is short of memory for it takes the entry with the next submission, or in Next.
    io_uring_submit(&ring_);
  }

  FileTransferDone Next() override {
    io_uring_cqe* entry = nullptr;
    while (io_uring_peek_cqe(&ring_, &entry) != 0) io_uring_submit_and_wait(&ring_, 1);
    const auto slot = static_cast<size_t>(io_uring_cqe_get_data64(entry));
    const int result = entry->res;
    io_uring_cqe_seen(&ring_, entry);
    free_.push_back(slot);
    // Old kernels, odd file systems.
    if (result == -EOPNOTSUPP || result == -EINVAL || result == -ENOSYS || result == -EAGAIN)
      return Transfer(files_, slots_[slot]);
    return {slots_[slot].tag, result};
  }

 private:
  FileSystem& files_;
  io_uring ring_;
  std::vector<FileTransfer> slots_;
  std::vector<size_t> free_;
};

}  // namespace

std::unique_ptr<FileQueue> FileSystem::CreateQueue(size_t depth) {
  return std::make_unique<SerialQueue>(*this, depth);
}

std::unique_ptr<FileQueue> CreateThreadQueue(FileSystem& files, size_t depth, int thread_count) {
  return std::make_unique<ThreadQueue>(files, depth, thread_count);
}

std::unique_ptr<FileQueue> CreateUringQueue(FileSystem& files, size_t depth) {
  io_uring ring = {};
  // Containers often forbid it.
  if (io_uring_queue_init(static_cast<unsigned>(depth), &ring, 0) != 0) return nullptr;
  return std::make_unique<UringQueue>(files, ring, depth);
}

}  // namespace quire
