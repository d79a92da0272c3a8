#include "store/file_transfers.h"

#include <cerrno>
#include <utility>

#include "store/file_session.h"

namespace quire {

FileTransfers::FileTransfers(FileSystem& files)
    : memory_(static_cast<int64_t>(kDepth) * kBytesMax), slots_(kDepth) {
  for (size_t slot = 0; slot < kDepth; ++slot) free_.push_back(slot);
  queue_ = files.CreateQueue(kDepth);
}

FileTransfers::~FileTransfers() {
  for (size_t left = slots_.size() - free_.size(); left > 0; --left) queue_->Next();
}

size_t FileTransfers::Take() {
  const size_t slot = free_.back();
  free_.pop_back();
  return slot;
}

void FileTransfers::Begin(size_t slot, const FileTransfer& transfer) {
  slots_[slot] = {transfer, 0};
  Resume(slot);
}

void FileTransfers::Resume(size_t slot) {
  const auto& [whole, done] = slots_[slot];
  FileTransfer rest = whole;
  rest.data += done;
  rest.offset += done;
  rest.size -= done;
  rest.tag = slot;
  queue_->Start(rest);
}

void FileTransfers::StartRead(int file, int64_t offset, int64_t size, size_t tag) {
  const size_t slot = Take();
  Begin(slot, {file, false, Buffer(slot), size, offset, tag});
}

FileTransfers::Done FileTransfers::Next(IoWork& work) {
  for (;;) {
    const FileTransferDone finished = queue_->Next();
    work.Beat();
    Slot& slot = slots_[finished.tag];
    const int64_t wanted = slot.transfer.size - slot.done;
    int64_t error = finished.result < 0 ? finished.result : 0;
    if (error == -EINTR) {
      Resume(finished.tag);
      continue;
    }
    if (error == 0 && finished.result == 0 && slot.transfer.is_write) error = -EIO;
    if (finished.result > 0)
      slot.done += static_cast<int64_t>(ResumeAfter(finished.result, static_cast<size_t>(wanted)));
    const bool ended = finished.result == 0 || slot.done == slot.transfer.size;
    if (error == 0 && !ended) {
      Resume(finished.tag);
      continue;
    }
    free_.push_back(finished.tag);
    return {slot.transfer.tag, error,
            std::span(Buffer(finished.tag), static_cast<size_t>(slot.done))};
  }
}

void FileTransfers::Drain(IoWork& work) {
  while (!idle()) Next(work);
}

std::unique_ptr<FileTransfers> FileTransfersPool::Take() {
  {
    const std::lock_guard<std::mutex> guard(mutex_);
    if (!free_.empty()) {
      auto transfers = std::move(free_.back());
      free_.pop_back();
      return transfers;
    }
  }
  return std::make_unique<FileTransfers>(*files_);
}

void FileTransfersPool::GiveBack(std::unique_ptr<FileTransfers> transfers) {
  const std::lock_guard<std::mutex> guard(mutex_);
  free_.push_back(std::move(transfers));
}

}  // namespace quire
