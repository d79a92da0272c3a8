// FileTransfers: a queue with memory of its own, a buffer per transfer. A disk may write into that
// memory long after the caller of a read has left, so it is never the caller's.
#ifndef QUIRE_STORE_FILE_TRANSFERS_H_
#define QUIRE_STORE_FILE_TRANSFERS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "quire/chunk.h"
#include "store/file_system.h"
#include "store/io_lane.h"

namespace quire {

class FileTransfers {
 public:
  // Deep and large enough to keep one NVMe disk busy, and small enough to stay in the L2 cache
  // between arrival, copy and checksum.
  static constexpr size_t kDepth = 8;
  static constexpr int64_t kBytesMax = int64_t{1} << 20;

  // Memory: std::bad_alloc.
  explicit FileTransfers(FileSystem& files);
  // Waits for what is under way: it has the memory.
  ~FileTransfers();

  bool full() const { return free_.empty(); }
  bool idle() const { return free_.size() == slots_.size(); }

  // REQUIRES: !full(), size <= kBytesMax. Where the file ends earlier, fewer bytes arrive.
  void StartRead(int file, int64_t offset, int64_t size, size_t tag);
  // `fill` writes the bytes into the buffer.
  template <typename F>
  void StartWrite(int file, int64_t offset, int64_t size, size_t tag, F&& fill) {
    const size_t slot = Take();
    fill(std::span(Buffer(slot), static_cast<size_t>(size)));
    Begin(slot, {file, true, Buffer(slot), size, offset, tag});
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
    FileTransfer transfer;
    int64_t done = 0;
  };
  size_t Take();
  std::byte* Buffer(size_t slot) {
    return memory_.bytes().data() + slot * static_cast<size_t>(kBytesMax);
  }
  void Begin(size_t slot, const FileTransfer& transfer);
  void Resume(size_t slot);

  ChunkBuffer memory_;
  std::vector<Slot> slots_;
  std::vector<size_t> free_;
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

#endif  // QUIRE_STORE_FILE_TRANSFERS_H_
