// The system calls of the disk tier, behind an interface: tests count them, let them fail at any
// place, and take the power away between them.
//
// Calls return 0 or a result, or the negated error number (-ENOENT). They block, for ever if the
// disk does: only threads of an IoLane make them.
#ifndef QUIRE_STORE_DISK_FILE_SYSTEM_H_
#define QUIRE_STORE_DISK_FILE_SYSTEM_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace quire {

struct FileStat {
  int64_t size = 0;
  uint64_t inode = 0;
  int64_t modified_ms = 0;
  bool is_directory = false;
};

// One read or write of a FileQueue.
struct FileTransfer {
  int file = -1;
  bool is_write = false;
  std::byte* data = nullptr;
  int64_t size = 0;
  int64_t offset = 0;
  size_t tag = 0;
};

struct FileTransferDone {
  size_t tag = 0;
  int64_t result = 0;  // bytes moved, or the negated error number
};

// Several transfers under way at once. One thread uses it.
class FileQueue {
 public:
  virtual ~FileQueue() = default;
  virtual size_t depth() const = 0;
  // REQUIRES: fewer than depth() are under way. The memory stays until its Next().
  virtual void Start(const FileTransfer& transfer) = 0;
  // Waits for one that is under way. REQUIRES: there is one.
  virtual FileTransferDone Next() = 0;
  // One that is done already, if the queue knows of one.
  virtual std::optional<FileTransferDone> Poll() { return std::nullopt; }
};

enum class OpenMode : uint8_t {
  kRead,
  kNameless,   // a new file without a name, to be linked later. -EOPNOTSUPP where there are none
  kNew,        // a new file; -EEXIST
  kReadWrite,  // made if absent
  kDirectory,
};

class FileSystem {
 public:
  virtual ~FileSystem() = default;

  // A file, >= 0. For kNameless `path` is the directory.
  virtual int Open(const std::string& path, OpenMode mode) = 0;
  virtual void Close(int file) noexcept = 0;
  // Past the page cache from now on; offsets, sizes and memory are multiples of 4096 then.
  virtual int SetDirect(int file) = 0;
  virtual int64_t Read(int file, std::span<std::byte> to, int64_t offset) = 0;
  virtual int64_t Write(int file, std::span<const std::byte> from, int64_t offset) = 0;
  virtual int Allocate(int file, int64_t size) = 0;
  virtual int Stat(const std::string& path, FileStat* to) = 0;
  virtual int StatFile(int file, FileStat* to) = 0;
  // A small record that goes with the file but not in the contents: may be lost in a copy.
  // -EOPNOTSUPP where there are none, which is what these do. How many bytes.
  virtual int SetRecord(int file, std::span<const std::byte> record);
  virtual int64_t GetRecord(int file, std::span<std::byte> to);
  virtual int Sync(int file) = 0;  // fdatasync; of a directory its entries
  // Gives an open file a name: -EEXIST. `path`: the name that it has; "" = none yet.
  virtual int Link(int file, const std::string& path, const std::string& to) = 0;
  virtual int Rename(const std::string& from, const std::string& to) = 0;
  virtual int Unlink(const std::string& path) = 0;
  virtual int MakeDirectory(const std::string& path) = 0;    // -EEXIST
  virtual int RemoveDirectory(const std::string& path) = 0;  // -ENOTEMPTY
  virtual int List(const std::string& path, std::vector<std::string>* names) = 0;
  // Advisory, exclusive, of this open file; gone when it is closed or the process dies. `wait`
  // false: -EAGAIN when another has it.
  virtual int Lock(int file, bool wait) = 0;
  virtual void Unlock(int file) noexcept = 0;
  virtual int64_t FreeBytes(const std::string& path) = 0;
  // Transfers one by one through Read and Write, unless the system has something better.
  virtual std::unique_ptr<FileQueue> CreateQueue(size_t depth);
};

// One transfer through Read or Write.
FileTransferDone RunTransfer(FileSystem& files, const FileTransfer& transfer);

// The machine's. `use_uring`: queues are io_uring's where the kernel allows it, else threads.
std::shared_ptr<FileSystem> CreateMachineFileSystem(bool use_uring);

// Transfers by up to `thread_count` threads that call Read and Write: as many as the system gives;
// one by one if it gives none.
std::unique_ptr<FileQueue> CreateThreadQueue(FileSystem& files, size_t depth, int thread_count);
// nullptr where the kernel refuses, and in a build without QUIRE_IO_URING. A transfer that its
// io_uring cannot do goes through Read and Write.
std::unique_ptr<FileQueue> CreateUringQueue(FileSystem& files, size_t depth);

}  // namespace quire

#endif  // QUIRE_STORE_DISK_FILE_SYSTEM_H_
