#include "store/disk/file_system.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <cerrno>
#include <string_view>

namespace quire {
namespace {

constexpr mode_t kFileMode = 0640;  // KV tells the text that it was computed from: not for all
constexpr mode_t kDirectoryMode = 0750;
constexpr const char* kRecordName = "user.quire.worth";

int64_t OrError(int64_t result) { return result < 0 ? -errno : result; }
int OrErrorInt(int result) { return result < 0 ? -errno : result; }

int FlagsOf(OpenMode mode) {
  switch (mode) {
    case OpenMode::kRead:
      return O_RDONLY;
    case OpenMode::kNameless:
      return O_TMPFILE | O_RDWR;
    case OpenMode::kNew:
      return O_CREAT | O_EXCL | O_RDWR;
    case OpenMode::kReadWrite:
      return O_CREAT | O_RDWR;
    case OpenMode::kDirectory:
      return O_RDONLY | O_DIRECTORY;
  }
  return O_RDONLY;
}

FileStat StatOf(const struct stat& from) {
  FileStat to;
  to.size = from.st_size;
  to.inode = from.st_ino;
  to.modified_ms = int64_t{from.st_mtim.tv_sec} * 1000 + from.st_mtim.tv_nsec / 1'000'000;
  to.is_directory = S_ISDIR(from.st_mode);
  return to;
}

class MachineFileSystem final : public FileSystem {
 public:
  explicit MachineFileSystem(bool use_uring) : use_uring_(use_uring) {}

  int Open(const std::string& path, OpenMode mode) override {
    const int file = OrErrorInt(::open(path.c_str(), FlagsOf(mode) | O_CLOEXEC, kFileMode));
    // What a kernel or a file system without nameless files says.
    if (mode == OpenMode::kNameless && (file == -EISDIR || file == -EINVAL)) return -EOPNOTSUPP;
    return file;
  }
  // close() is not repeated: after EINTR the descriptor is gone all the same.
  void Close(int file) noexcept override { ::close(file); }
  int SetDirect(int file) override {
    const int flags = ::fcntl(file, F_GETFL);
    return OrErrorInt(flags < 0 ? flags : ::fcntl(file, F_SETFL, flags | O_DIRECT));
  }
  int64_t Read(int file, std::span<std::byte> to, int64_t offset) override {
    return OrError(::pread(file, to.data(), to.size(), offset));
  }
  int64_t Write(int file, std::span<const std::byte> from, int64_t offset) override {
    return OrError(::pwrite(file, from.data(), from.size(), offset));
  }
  int Allocate(int file, int64_t size) override {
    return OrErrorInt(::fallocate(file, 0, 0, size));
  }
  int Stat(const std::string& path, FileStat* to) override {
    struct stat found = {};
    if (::stat(path.c_str(), &found) < 0) return -errno;
    *to = StatOf(found);
    return 0;
  }
  int StatFile(int file, FileStat* to) override {
    struct stat found = {};
    if (::fstat(file, &found) < 0) return -errno;
    *to = StatOf(found);
    return 0;
  }
  int SetRecord(int file, std::span<const std::byte> record) override {
    return OrErrorInt(::fsetxattr(file, kRecordName, record.data(), record.size(), 0));
  }
  int64_t GetRecord(int file, std::span<std::byte> to) override {
    return OrError(::fgetxattr(file, kRecordName, to.data(), to.size()));
  }
  // A directory has no data of its own: fdatasync would be allowed to skip its entries.
  int Sync(int file) override {
    struct stat found = {};
    if (::fstat(file, &found) < 0) return -errno;
    return OrErrorInt(S_ISDIR(found.st_mode) ? ::fsync(file) : ::fdatasync(file));
  }
  int Link(int file, const std::string& path, const std::string& to) override {
    if (!path.empty()) return OrErrorInt(::link(path.c_str(), to.c_str()));
    const std::string nameless = "/proc/self/fd/" + std::to_string(file);
    return OrErrorInt(
        ::linkat(AT_FDCWD, nameless.c_str(), AT_FDCWD, to.c_str(), AT_SYMLINK_FOLLOW));
  }
  int Rename(const std::string& from, const std::string& to) override {
    return OrErrorInt(::rename(from.c_str(), to.c_str()));
  }
  int Unlink(const std::string& path) override { return OrErrorInt(::unlink(path.c_str())); }
  int MakeDirectory(const std::string& path) override {
    return OrErrorInt(::mkdir(path.c_str(), kDirectoryMode));
  }
  int RemoveDirectory(const std::string& path) override {
    return OrErrorInt(::rmdir(path.c_str()));
  }
  int List(const std::string& path, std::vector<std::string>* names) override {
    const auto close = [](DIR* directory) { ::closedir(directory); };
    const std::unique_ptr<DIR, decltype(close)> directory(::opendir(path.c_str()), close);
    if (directory == nullptr) return -errno;
    for (;;) {
      errno = 0;
      const dirent* const entry = ::readdir(directory.get());
      if (entry == nullptr) return -errno;
      const std::string_view name = entry->d_name;
      if (name != "." && name != "..") names->emplace_back(name);
    }
  }
  int Lock(int file, bool wait) override {
    return OrErrorInt(::flock(file, LOCK_EX | (wait ? 0 : LOCK_NB)));
  }
  void Unlock(int file) noexcept override { ::flock(file, LOCK_UN); }
  int64_t FreeBytes(const std::string& path) override {
    struct statvfs found = {};
    if (::statvfs(path.c_str(), &found) < 0) return -errno;
    return static_cast<int64_t>(found.f_bavail) * static_cast<int64_t>(found.f_frsize);
  }
  std::unique_ptr<FileQueue> CreateQueue(size_t depth) override {
    // As many as keep one disk busy with requests of a MiB.
    constexpr int kThreads = 4;
    if (use_uring_) {
      if (auto queue = CreateUringQueue(*this, depth)) return queue;
    }
    return CreateThreadQueue(*this, depth, kThreads);
  }

 private:
  const bool use_uring_;
};

}  // namespace

int FileSystem::SetRecord(int, std::span<const std::byte>) { return -EOPNOTSUPP; }
int64_t FileSystem::GetRecord(int, std::span<std::byte>) { return -EOPNOTSUPP; }

std::shared_ptr<FileSystem> CreateMachineFileSystem(bool use_uring) {
  return std::make_shared<MachineFileSystem>(use_uring);
}

}  // namespace quire
