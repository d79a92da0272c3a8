// Queues of transfers by io_uring.
#include <liburing.h>

#include <cerrno>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "store/disk/file_system.h"

namespace quire {
namespace {

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
    return Take(entry);
  }

  std::optional<FileTransferDone> Poll() override {
    io_uring_cqe* entry = nullptr;
    if (io_uring_peek_cqe(&ring_, &entry) != 0) return std::nullopt;
    return Take(entry);
  }

 private:
  FileTransferDone Take(io_uring_cqe* entry) {
    const auto slot = static_cast<size_t>(io_uring_cqe_get_data64(entry));
    const int result = entry->res;
    io_uring_cqe_seen(&ring_, entry);
    free_.push_back(slot);
    // Old kernels, odd file systems.
    if (result == -EOPNOTSUPP || result == -EINVAL || result == -ENOSYS || result == -EAGAIN)
      return RunTransfer(files_, slots_[slot]);
    return {slots_[slot].tag, result};
  }

  FileSystem& files_;
  io_uring ring_;
  std::vector<FileTransfer> slots_;
  std::vector<size_t> free_;
};

}  // namespace

std::unique_ptr<FileQueue> CreateUringQueue(FileSystem& files, size_t depth) {
  io_uring ring = {};
  // Containers often forbid it.
  if (io_uring_queue_init(static_cast<unsigned>(depth), &ring, 0) != 0) return nullptr;
  return std::make_unique<UringQueue>(files, ring, depth);
}

}  // namespace quire
