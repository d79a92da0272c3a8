#include "model/weights/safetensors_writer.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>

#include "base/check.h"
#include "base/round_up.h"
#include "model/weights/cache_lines.h"

namespace quire {
namespace {

constexpr size_t kHeaderLengthBytes = 8;
// Written at a time, so that the pages in which the operating system keeps the file are huge ones,
// and so are those of its mappings.
constexpr size_t kHugePage = size_t{2} << 20;

using TensorList = std::span<const TensorToWrite* const>;

Status WriteError(const std::string& path, const char* what) {
  return Status(StatusCode::kIoError,
                "WriteSafetensors: " + path + ": " + what + ": " + std::strerror(errno));
}

const char* TypeName(DType dtype) {
  if (dtype == DType::kF32) return "F32";
  if (dtype == DType::kF16) return "F16";
  if (dtype == DType::kU8) return "U8";
  if (dtype == DType::kI32) return "I32";
  QUIRE_CHECK(dtype == DType::kBF16) << DTypeName(dtype);
  return "BF16";
}

// Length and header, padded so that the data begins on a cache line.
std::string Header(std::string_view format, TensorList tensors) {
  std::string text = R"({"__metadata__":)" + nlohmann::json({{"format", format}}).dump();
  size_t end = 0;
  for (const TensorToWrite* const tensor : tensors) {
    const size_t begin = end;
    end += tensor->bytes();
    const nlohmann::json entry = {{"dtype", TypeName(tensor->dtype)},
                                  {"shape", tensor->shape},
                                  {"data_offsets", {begin, end}}};
    text += "," + nlohmann::json(tensor->name).dump() + ":" + entry.dump();
  }
  text += "}";
  const size_t whole = RoundUp(kHeaderLengthBytes + text.size(), kCacheLine);
  text.resize(whole - kHeaderLengthBytes, ' ');
  std::string length;
  for (size_t i = 0; i < kHeaderLengthBytes; ++i)
    length += static_cast<char>(text.size() >> (8 * i));
  return length + text;
}

// A file that is written from its beginning to its end, and goes again unless that was reached.
class NewFile {
 public:
  explicit NewFile(const std::string& path)
      : path_(path), file_(open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666)) {
    buffer_.reserve(kHugePage);
  }
  ~NewFile() {
    if (file_ < 0) return;
    close(file_);
    if (!is_whole_) unlink(path_.c_str());
  }
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;

  Status Check() const { return file_ < 0 ? WriteError(path_, "cannot be made") : Status(); }
  Status Write(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      const size_t count = std::min(bytes.size(), kHugePage - buffer_.size());
      buffer_.insert(buffer_.end(), bytes.begin(), bytes.begin() + count);
      bytes = bytes.subspan(count);
      if (buffer_.size() == kHugePage) QUIRE_RETURN_IF_ERROR(Flush());
    }
    return Status();
  }
  Status Finish() {
    QUIRE_RETURN_IF_ERROR(Flush());
    if (fsync(file_) != 0) return WriteError(path_, "cannot be synced");
    is_whole_ = true;
    return Status();
  }

 private:
  Status Flush() {
    for (std::span<const std::byte> left = buffer_; !left.empty();) {
      const ssize_t count = write(file_, left.data(), left.size());
      if (count < 0 && errno == EINTR) continue;
      if (count < 0) return WriteError(path_, "cannot be written");
      left = left.subspan(static_cast<size_t>(count));
    }
    buffer_.clear();
    return Status();
  }

  const std::string path_;
  const int file_;
  bool is_whole_ = false;
  std::vector<std::byte> buffer_;
};

}  // namespace

size_t TensorToWrite::bytes() const {
  auto size = static_cast<size_t>(DTypeBytes(dtype));
  for (const int64_t extent : shape) size *= static_cast<size_t>(extent);
  return size;
}

Status WriteSafetensors(const std::string& path, std::string_view format,
                        std::span<const TensorToWrite> tensors) {
  std::vector<const TensorToWrite*> order;
  order.reserve(tensors.size());
  for (const TensorToWrite& tensor : tensors) order.push_back(&tensor);
  std::stable_partition(order.begin(), order.end(), [](const TensorToWrite* tensor) {
    return tensor->bytes() % kCacheLine == 0;
  });
  const std::string header = Header(format, order);
  NewFile file(path);
  QUIRE_RETURN_IF_ERROR(file.Check());
  QUIRE_RETURN_IF_ERROR(file.Write(std::as_bytes(std::span(header))));
  for (const TensorToWrite* const tensor : order) {
    QUIRE_RETURN_IF_ERROR(file.Write({tensor->data.get(), tensor->bytes()}));
  }
  return file.Finish();
}

}  // namespace quire
