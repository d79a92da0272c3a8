// Memory of the host that is taken from and given back to the operating system directly.
#ifndef QUIRE_TENSOR_HOST_MEMORY_H_
#define QUIRE_TENSOR_HOST_MEMORY_H_

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "quire/status.h"

namespace quire {

// Zeroed anonymous memory, aligned to a page of the machine (to a huge page from that size on), for
// page pools, packed weights and scratch. Physical memory is taken when a part is first written, so
// a generous size costs nothing. Large areas ask for huge pages: streaming from them is up to a
// third faster (specs: performance).
class HostMemory {
 public:
  HostMemory() = default;
  // OutOfMemory with the size in its message, at once where the machine or its control group has
  // less memory in all. Zero bytes give an empty object.
  static Result<HostMemory> Allocate(size_t bytes);
  // size() of what Allocate(bytes) gives, without taking it. REQUIRES: bytes <= SIZE_MAX / 2.
  static size_t AllocatedBytes(size_t bytes);

  HostMemory(HostMemory&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  HostMemory& operator=(HostMemory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~HostMemory();

  std::byte* data() const { return data_; }
  size_t size() const { return size_; }  // what was asked for, rounded up to whole pages
  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }

 private:
  HostMemory(std::byte* data, size_t size) : data_(data), size_(size) {}

  std::byte* data_ = nullptr;
  size_t size_ = 0;
};

// A whole file, read-only. The file must not be truncated while it is mapped: reading what is gone
// ends the process.
class MappedFile {
 public:
  MappedFile() = default;
  // NotFound or IoError, with the path in the message.
  static Result<MappedFile> Open(const std::string& path);

  MappedFile(MappedFile&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  MappedFile& operator=(MappedFile&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~MappedFile();

  std::span<const std::byte> bytes() const { return {data_, size_}; }
  std::string_view text() const { return {reinterpret_cast<const char*>(data_), size_}; }

 private:
  MappedFile(const std::byte* data, size_t size) : data_(data), size_(size) {}

  const std::byte* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace quire

#endif  // QUIRE_TENSOR_HOST_MEMORY_H_
