#include "tensor/host_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>

#include "base/huge_pages.h"
#include "tensor/machine_memory.h"

namespace quire {
namespace {

std::string ErrorText(int error) { return std::strerror(error); }

Status OutOfMemoryFor(size_t bytes, int error) {
  return Status(StatusCode::kOutOfMemory, "HostMemory: mapping " + std::to_string(bytes) +
                                              " bytes failed: " + ErrorText(error) +
                                              "; lower the size or the other uses of memory");
}

// The system gives out addresses freely and ends the process when their memory is used up.
Status CheckMachineHolds(size_t bytes) {
  const int64_t machine_bytes = MachineMemoryBytes();
  if (bytes <= static_cast<size_t>(machine_bytes)) return {};
  return Status(StatusCode::kOutOfMemory,
                "HostMemory: " + std::to_string(bytes) + " bytes (" +
                    GiBText(static_cast<double>(bytes)) + ") are more than the " +
                    GiBText(static_cast<double>(machine_bytes)) +
                    " of memory that this machine or its control group has; lower the size");
}

Status FileError(const std::string& path, const char* what, int error) {
  const StatusCode code = error == ENOENT ? StatusCode::kNotFound : StatusCode::kIoError;
  return Status(code, "MappedFile: " + path + ": " + what + " failed: " + ErrorText(error));
}

// Maps `bytes` such that the first huge page begins at the start: maps one more, then gives back
// both ends.
std::byte* MapAligned(size_t bytes) {
  const size_t padded = bytes + kHugePageBytes;
  void* mapped = mmap(nullptr, padded, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  auto* const begin = static_cast<std::byte*>(mapped);
  const size_t head = (0 - reinterpret_cast<uintptr_t>(begin)) % kHugePageBytes;
  const size_t tail = kHugePageBytes - head;
  if (head > 0) munmap(begin, head);
  if (tail > 0) munmap(begin + head + bytes, tail);
  // Advice only: where the kernel has no huge pages the memory is as good, and slower.
  madvise(begin + head, bytes, MADV_HUGEPAGE);
  return begin + head;
}

class FileDescriptor {
 public:
  explicit FileDescriptor(int fd) : fd_(fd) {}
  ~FileDescriptor() {
    if (fd_ >= 0) close(fd_);
  }
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;
  int get() const { return fd_; }

 private:
  const int fd_;
};

}  // namespace

size_t HostMemory::AllocatedBytes(size_t bytes) {
  const size_t unit =
      bytes >= kHugePageBytes ? kHugePageBytes : static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return (bytes + unit - 1) / unit * unit;
}

Result<HostMemory> HostMemory::Allocate(size_t bytes) {
  if (bytes == 0) return HostMemory();
  if (bytes > SIZE_MAX / 2) return CheckMachineHolds(bytes);
  const size_t rounded = AllocatedBytes(bytes);
  if (rounded >= kHugePageBytes) QUIRE_RETURN_IF_ERROR(CheckMachineHolds(rounded));
  std::byte* data = nullptr;
  if (rounded >= kHugePageBytes) {
    data = MapAligned(rounded);
  } else {
    void* mapped = mmap(nullptr, rounded, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped != MAP_FAILED) data = static_cast<std::byte*>(mapped);
  }
  if (data == nullptr) return OutOfMemoryFor(bytes, errno);
  return HostMemory(data, rounded);
}

HostMemory::~HostMemory() {
  if (data_ != nullptr) munmap(data_, size_);
}

Result<MappedFile> MappedFile::Open(const std::string& path) {
  // O_NONBLOCK: opening a pipe would wait for a writer; it is refused below instead.
  const FileDescriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (file.get() < 0) return FileError(path, "open", errno);
  struct stat info;
  if (fstat(file.get(), &info) != 0) return FileError(path, "fstat", errno);
  if (!S_ISREG(info.st_mode)) {
    return Status(StatusCode::kIoError, "MappedFile: " + path + " is not a regular file");
  }
  if (info.st_size == 0) return MappedFile();
  const size_t size = static_cast<size_t>(info.st_size);
  void* mapped = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.get(), 0);
  if (mapped == MAP_FAILED) return FileError(path, "mmap", errno);
  // Advice only: what is read from the disk from now on comes in huge pages where it can.
  if (size >= kHugePageBytes) madvise(mapped, size, MADV_HUGEPAGE);
  return MappedFile(static_cast<const std::byte*>(mapped), size);
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) munmap(const_cast<std::byte*>(data_), size_);
}

}  // namespace quire
