#include "store/disk/file_transfers.h"

#include <cerrno>
#include <utility>

#include "base/huge_pages.h"
#include "store/disk/file_session.h"

namespace quire {
namespace {

// The buffers lie in huge pages (disk_reader.h).
constexpr auto kBufferBytes = static_cast<size_t>(FileTransfers::kBytesMax);
static_assert(FileTransfers::kBuffers * kBufferBytes % kHugePageBytes == 0);

}  // namespace

FileTransfers::FileTransfers(FileSystem& files)
    : memory_(static_cast<int64_t>(kBuffers * kBufferBytes + kHugePageBytes)), slots_(kDepth) {
  for (size_t slot = 0; slot < kDepth; ++slot) free_.push_back(slot);
  ready_.reserve(kDepth);  // what has come is not lost for want of memory
  const std::span<std::byte> huge = HugePagesOf(memory_.bytes());
  for (size_t buffer = 0; buffer < kBuffers; ++buffer)
    free_buffers_.push_back(huge.data() + buffer * kBufferBytes);
  queue_ = files.CreateQueue(kDepth);
}

FileTransfers::~FileTransfers() {
  for (size_t left = slots_.size() - free_.size() - ready_.size(); left > 0; --left) queue_->Next();
}

std::byte* FileTransfers::TakeBuffer() {
  std::byte* const buffer = free_buffers_.back();
  free_buffers_.pop_back();
  return buffer;
}

void FileTransfers::Begin(Slot transfer) {
  const size_t slot = free_.back();
  free_.pop_back();
  slots_[slot] = std::move(transfer);
  bytes_under_way_ += slots_[slot].transfer.size;
  Resume(slot);
}

void FileTransfers::Resume(size_t slot) {
  const int64_t done = slots_[slot].done;
  FileTransfer rest = slots_[slot].transfer;
  rest.data += done;
  rest.offset += done;
  rest.size -= done;
  rest.tag = slot;
  queue_->Start(rest);
}

void FileTransfers::StartRead(int file, int64_t offset, int64_t size, size_t tag) {
  Begin({.transfer = {file, false, TakeBuffer(), size, offset, tag}, .has_buffer = true});
}

void FileTransfers::StartReadTo(std::span<std::byte> to, std::shared_ptr<const void> owner,
                                int file, int64_t offset, size_t tag) {
  Begin({.transfer = {file, false, to.data(), static_cast<int64_t>(to.size()), offset, tag},
         .owner = std::move(owner)});
}

void FileTransfers::Take(const FileTransferDone& finished) {
  Slot& slot = slots_[finished.tag];
  const int64_t wanted = slot.transfer.size - slot.done;
  if (finished.result == -EINTR) return Resume(finished.tag);
  if (finished.result < 0) slot.error = finished.result;
  if (finished.result == 0 && slot.transfer.is_write) slot.error = -EIO;
  if (finished.result > 0)
    slot.done += static_cast<int64_t>(ResumeAfter(finished.result, static_cast<size_t>(wanted)));
  const bool ended = finished.result <= 0 || slot.done == slot.transfer.size;
  if (!ended) return Resume(finished.tag);
  bytes_under_way_ -= slot.transfer.size;
  ready_.push_back(finished.tag);
}

FileTransfers::Done FileTransfers::Next(IoWork& work) {
  while (ready_.empty()) {
    const FileTransferDone finished = queue_->Next();
    work.Beat();
    Take(finished);
  }
  while (const auto finished = queue_->Poll()) Take(*finished);
  work.Beat();
  const size_t number = ready_.front();
  ready_.erase(ready_.begin());
  free_.push_back(number);
  const Slot slot = std::exchange(slots_[number], {});
  return Done(*this, slot);
}

FileTransfers::Done::Done(FileTransfers& transfers, const Slot& slot)
    : tag(slot.transfer.tag),
      error(slot.error),
      bytes(slot.transfer.data, static_cast<size_t>(slot.done)),
      transfers_(transfers),
      buffer_(slot.has_buffer ? slot.transfer.data : nullptr) {}

void FileTransfers::Drain(IoWork& work) {
  while (!idle()) static_cast<void>(Next(work));
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
