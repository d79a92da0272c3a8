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
 public:
  // Deep and large enough to keep one NVMe disk busy, also while the thread waits for a core: of
  // 3.0 GB/s that a disk gives, requests to 64 files get 2.2 with 16 under way, 2.8 with 64.
  static constexpr size_t kDepth = 64;
  static constexpr int64_t kBytesMax = int64_t{1} << 20;
  // At most this number of them has a buffer.
  static constexpr size_t kBuffers = 16;

  // Memory: std::bad_alloc.
  explicit FileTransfers(FileSystem& files);
  // Waits for what is under way: it has the memory.
  ~FileTransfers();

  bool full() const { return free_.empty() || free_buffers_.empty(); }
  bool full_in_place() const { return free_.empty(); }  // for those that need no buffer
  bool idle() const { return free_.size() == slots_.size(); }

  // REQUIRES: !full(), size <= kBytesMax. Where the file ends earlier, fewer bytes arrive.
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

  struct Done {
    size_t tag = 0;
    int64_t error = 0;             // negated error number
    std::span<std::byte> bytes{};  // what arrived, until the next Start
  };
  // The next one that is complete: interruptions and short transfers were gone on with. REQUIRES:
  // !idle()
  Done Next(IoWork& work);
  // Waits until none is under way.
  void Drain(IoWork& work);

 private:
  struct Slot {
    FileTransfer transfer{};
    int64_t done = 0;
    bool has_buffer = false;
    std::shared_ptr<const void> owner{};  // without a buffer: of the memory
  };
  std::byte* TakeBuffer();
  void Begin(Slot transfer);
  void Resume(size_t slot);

  ChunkBuffer memory_;
  std::vector<Slot> slots_;
  std::vector<size_t> free_;
  std::vector<std::byte*> free_buffers_;
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
