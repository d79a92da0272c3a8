// FileTransfers: a queue with memory of its own, and transfers to memory that it shares. A disk may
// write there long after the caller of a read has left, so it is never the caller's alone.
#ifndef QUIRE_STORE_DISK_FILE_TRANSFERS_H_
#define QUIRE_STORE_DISK_FILE_TRANSFERS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "quire/chunk.h"
#include "store/disk/file_system.h"
#include "store/disk/io_lane.h"

namespace quire {

class FileTransfers {
  struct Slot;

 public:
  // Transfers that are under way, or done and not handed out.
  static constexpr size_t kDepth = 64;
  static constexpr int64_t kBytesMax = int64_t{1} << 20;
  // No more is started while this much is under way: enough to keep one NVMe disk busy while the
  // thread handles what came. The disk of a virtual machine often tells of all that it was asked
  // for at once, so more would delay the first bytes (docs/notes/speed.md).
  static constexpr int64_t kBytesUnderWay = 8 * kBytesMax;
  // At most this number of them has a buffer.
  static constexpr size_t kBuffers = 16;

  // Memory: std::bad_alloc.
  explicit FileTransfers(FileSystem& files);
  // Waits for what is under way: it has the memory.
  ~FileTransfers();

  bool full() const { return full_in_place() || free_buffers_.empty(); }
  // For those that need no buffer.
  bool full_in_place() const { return free_.empty() || bytes_under_way_ >= kBytesUnderWay; }
  bool idle() const { return free_.size() == slots_.size(); }

  // REQUIRES: !full(), or a Done with a buffer has just gone; size <= kBytesMax. Where the file
  // ends earlier, fewer bytes arrive.
  void StartRead(int file, int64_t offset, int64_t size, size_t tag);
  // The same to memory that `owner` keeps. REQUIRES: !full_in_place()
  void StartReadTo(std::span<std::byte> to, std::shared_ptr<const void> owner, int file,
                   int64_t offset, size_t tag);
  // `fill` writes the bytes into the buffer.
  template <typename F>
  void StartWrite(int file, int64_t offset, int64_t size, size_t tag, F&& fill) {
    std::byte* const buffer = TakeBuffer();
    fill(std::span(buffer, static_cast<size_t>(size)));
    Begin({.transfer = {file, true, buffer, size, offset, tag}, .has_buffer = true});
  }

  // One that is complete: interruptions and short transfers were gone on with. The buffer that it
  // has goes back with it.
  class Done {
   public:
    Done(const Done&) = delete;
    Done& operator=(const Done&) = delete;
    ~Done() {
      if (buffer_ != nullptr) transfers_.free_buffers_.push_back(buffer_);
    }

    const size_t tag;
    const int64_t error;               // negated error number
    const std::span<std::byte> bytes;  // what arrived

   private:
    friend class FileTransfers;
    Done(FileTransfers& transfers, const Slot& slot);

    FileTransfers& transfers_;
    std::byte* const buffer_;  // null: none
  };
  // The next one. All that are done by then are no longer under way, so that others can be started
  // before this one is handled. REQUIRES: !idle()
  Done Next(IoWork& work);
  // Waits until none is under way.
  void Drain(IoWork& work);

 private:
  struct Slot {
    FileTransfer transfer{};
    int64_t done = 0;
    int64_t error = 0;
    bool has_buffer = false;
    std::shared_ptr<const void> owner{};  // without a buffer: of the memory
  };

  std::byte* TakeBuffer();
  void Begin(Slot transfer);
  void Resume(size_t slot);
  void Take(const FileTransferDone& finished);

  ChunkBuffer memory_;
  std::vector<Slot> slots_;
  std::vector<size_t> free_;
  std::vector<size_t> ready_;  // done and not handed out, the first one first
  std::vector<std::byte*> free_buffers_;
  int64_t bytes_under_way_ = 0;
  std::unique_ptr<FileQueue> queue_;
};

// Those that are not in use, for the next work. All calls from any thread.
class FileTransfersPool {
 public:
  explicit FileTransfersPool(std::shared_ptr<FileSystem> files) : files_(std::move(files)) {}
  std::unique_ptr<FileTransfers> Take();
  void GiveBack(std::unique_ptr<FileTransfers> transfers);  // REQUIRES: idle

 private:
  const std::shared_ptr<FileSystem> files_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<FileTransfers>> free_;
};

}  // namespace quire

#endif  // QUIRE_STORE_DISK_FILE_TRANSFERS_H_
