#include "model/safetensors_writer.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <nlohmann/json.hpp>

#include "base/check.h"

namespace quire {
namespace {

constexpr size_t kCacheLine = 64;
constexpr size_t kLengthBytes = 8;
// Written at a time, so that the pages in which the operating system keeps the file are huge ones,
// and so are those of its mappings.
constexpr size_t kHugePage = size_t{2} << 20;

using TensorList = std::span<const TensorToWrite* const>;

struct FileCloser {
  void operator()(std::FILE* file) const { std::fclose(file); }
};

Status WriteError(const std::string& path, const char* what) {
  return Status(StatusCode::kIoError,
                "WriteSafetensors: " + path + ": " + what + ": " + std::strerror(errno));
}

const char* TypeName(DType dtype) {
  if (dtype == DType::kF32) return "F32";
  if (dtype == DType::kF16) return "F16";
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
  const size_t whole = (kLengthBytes + text.size() + kCacheLine - 1) / kCacheLine * kCacheLine;
  text.resize(whole - kLengthBytes, ' ');
  std::string length;
  for (size_t i = 0; i < kLengthBytes; ++i) length += static_cast<char>(text.size() >> (8 * i));
  return length + text;
}

Status WriteAll(const std::string& path, std::string_view header, TensorList tensors,
                std::FILE* file) {
  bool good = std::fwrite(header.data(), 1, header.size(), file) == header.size();
  for (const TensorToWrite* const tensor : tensors) {
    good = good && std::fwrite(tensor->data.get(), 1, tensor->bytes(), file) == tensor->bytes();
  }
  if (!good || std::fflush(file) != 0) return WriteError(path, "cannot be written");
  if (fsync(fileno(file)) != 0) return WriteError(path, "cannot be synced");
  return Status();
}

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
  std::ranges::stable_partition(
      order, [](const TensorToWrite* tensor) { return tensor->bytes() % kCacheLine == 0; });
  const std::string header = Header(format, order);
  std::vector<char> buffer(kHugePage);
  const std::unique_ptr<std::FILE, FileCloser> file(std::fopen(path.c_str(), "wbxe"));
  if (file == nullptr) return WriteError(path, "cannot be made");
  // Without a buffer of ours the C library would take a size of its own.
  QUIRE_CHECK(std::setvbuf(file.get(), buffer.data(), _IOFBF, buffer.size()) == 0);
  const Status status = WriteAll(path, header, order, file.get());
  if (!status.ok()) unlink(path.c_str());
  return status;
}

}  // namespace quire
