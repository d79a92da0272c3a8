// FileSession: the calls of one piece of work on a FileSystem. Repeats what a signal interrupted,
// completes short reads and writes, and gives a beat after each call.
#ifndef QUIRE_STORE_DISK_FILE_SESSION_H_
#define QUIRE_STORE_DISK_FILE_SESSION_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "quire/status.h"
#include "store/disk/file_system.h"
#include "store/disk/io_lane.h"

namespace quire {

// What O_DIRECT asks for on any device.
inline constexpr size_t kDirectAlignment = 4096;

// Where to go on after a short read or write, so that a direct one stays aligned.
size_t ResumeAfter(int64_t count, size_t wanted);

// The Status of a negated error number: NotFound, Full, IoError. `what`: the call and its object.
Status FileError(int64_t error, const std::string& what);

// An open file that closes itself.
class OpenFile {
 public:
  OpenFile() = default;
  OpenFile(FileSystem& files, int file) : files_(&files), file_(file) {}
  OpenFile(OpenFile&& other) noexcept
      : files_(other.files_), file_(std::exchange(other.file_, -1)) {}
  OpenFile& operator=(OpenFile&& other) noexcept {
    std::swap(files_, other.files_);
    std::swap(file_, other.file_);
    return *this;
  }
  ~OpenFile() { Reset(); }
  int get() const { return file_; }
  void Reset() noexcept {
    if (file_ >= 0) files_->Close(std::exchange(file_, -1));
  }

 private:
  FileSystem* files_ = nullptr;
  int file_ = -1;
};

class FileSession {
 private:
  template <typename F>
  auto Repeat(F&& call) {
    for (;;) {
      const auto result = call();
      work_.Beat();
      if (result != kInterrupted) return result;
    }
  }
  static constexpr int kInterrupted = -4;  // EINTR

 public:
  FileSession(FileSystem& files, IoWork& work) : files_(files), work_(work) {}
  FileSystem& files() { return files_; }
  IoWork& work() { return work_; }

  // Negated error numbers as in FileSystem, never -EINTR.
  int Open(const std::string& path, OpenMode mode, OpenFile* to);
  int SetDirect(int file) {
    return Repeat([&] { return files_.SetDirect(file); });
  }
  int Stat(const std::string& path, FileStat* to) {
    return Repeat([&] { return files_.Stat(path, to); });
  }
  int StatFile(int file, FileStat* to) {
    return Repeat([&] { return files_.StatFile(file, to); });
  }
  int Allocate(int file, int64_t size) {
    return Repeat([&] { return files_.Allocate(file, size); });
  }
  int SetRecord(int file, std::span<const std::byte> record) {
    return Repeat([&] { return files_.SetRecord(file, record); });
  }
  int64_t GetRecord(int file, std::span<std::byte> to) {
    return Repeat([&] { return files_.GetRecord(file, to); });
  }
  int Sync(int file) {
    return Repeat([&] { return files_.Sync(file); });
  }
  int Link(int file, const std::string& path, const std::string& to) {
    return Repeat([&] { return files_.Link(file, path, to); });
  }
  int Rename(const std::string& from, const std::string& to) {
    return Repeat([&] { return files_.Rename(from, to); });
  }
  int Unlink(const std::string& path) {
    return Repeat([&] { return files_.Unlink(path); });
  }
  int MakeDirectory(const std::string& path) {
    return Repeat([&] { return files_.MakeDirectory(path); });
  }
  int RemoveDirectory(const std::string& path) {
    return Repeat([&] { return files_.RemoveDirectory(path); });
  }
  int List(const std::string& path, std::vector<std::string>* names);
  int Lock(int file, bool wait) {
    return Repeat([&] { return files_.Lock(file, wait); });
  }
  int64_t FreeBytes(const std::string& path) {
    return Repeat([&] { return files_.FreeBytes(path); });
  }
  int SyncDirectory(const std::string& path);

  // Until `to` is full or the file ends; how many bytes.
  int64_t ReadFull(int file, std::span<std::byte> to, int64_t offset);
  // All of it, or an error.
  int WriteFull(int file, std::span<const std::byte> from, int64_t offset);

 private:
  FileSystem& files_;
  IoWork& work_;
};

}  // namespace quire

#endif  // QUIRE_STORE_DISK_FILE_SESSION_H_
