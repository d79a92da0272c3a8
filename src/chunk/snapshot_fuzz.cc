// A snapshot file from anywhere: as it is, and as a sound one with some bytes changed. What is
// accepted has the tokens of the chunks that it announces.
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "base/check.h"
#include "chunk/snapshot_file.h"
#include "chunk/testing/test_chunk.h"

namespace {

// A file in memory.
class FuzzFile {
 public:
  FuzzFile() : descriptor_(::memfd_create("snapshot", MFD_CLOEXEC)) {
    QUIRE_CHECK(descriptor_ >= 0);
    path_ = "/proc/self/fd/" + std::to_string(descriptor_);
  }
  const std::string& path() const { return path_; }
  void Write(std::span<const uint8_t> bytes) {
    QUIRE_CHECK(::ftruncate(descriptor_, 0) == 0);
    QUIRE_CHECK(::pwrite(descriptor_, bytes.data(), bytes.size(), 0) ==
                static_cast<ssize_t>(bytes.size()));
  }

 private:
  int descriptor_;
  std::string path_;
};

std::vector<uint8_t> SoundSnapshot(quire::Status (*write)(const std::string& path)) {
  const std::string path =
      std::filesystem::temp_directory_path() / ("snapshot_fuzz." + std::to_string(::getpid()));
  const quire::Status status = write(path);
  QUIRE_CHECK(status.ok()) << status.ToString();
  FILE* const file = std::fopen(path.c_str(), "rb");
  std::vector<uint8_t> bytes(std::filesystem::file_size(path));
  QUIRE_CHECK(std::fread(bytes.data(), 1, bytes.size(), file) == bytes.size());
  std::fclose(file);
  std::filesystem::remove(path);
  return bytes;
}

void Read(FuzzFile& file, std::span<const uint8_t> bytes) {
  file.Write(bytes);
  const auto info = quire::ReadSnapshotInfo(file.path());
  const auto verified = quire::VerifySnapshot(file.path());
  if (!verified.ok()) return;
  QUIRE_CHECK(info.ok());
  QUIRE_CHECK(info->tokens == verified->tokens);
  QUIRE_CHECK(info->file_bytes == static_cast<int64_t>(bytes.size()));
}

// Windows that a forger wrote, behind sound checksums: what is taken can be counted with.
void ReadWindows(std::span<const uint8_t> bytes) {
  if (bytes.size() < 64) return;
  const std::vector<std::byte> chunk = quire::HidingStateChunk(std::as_bytes(bytes.first(64)));
  const auto view = quire::ChunkView::Open(chunk, quire::ExpectHidingState(),
                                           quire::ChunkLimits::Of(quire::HidingPassport()));
  QUIRE_CHECK(view.ok()) << view.status().ToString();
  const auto read = quire::ReadSnapshotWindows(*view);
  if (!read.ok()) return;
  const quire::WindowSettings& windows = read->windows;
  for (const int64_t number : {read->length, windows.window, windows.sinks, windows.lost,
                               windows.slid, windows.span, windows.span_sinks}) {
    QUIRE_CHECK(number >= 0 && number < int64_t{1} << 31) << number;
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static FuzzFile file;
  static const std::vector<uint8_t> plain = SoundSnapshot(quire::WriteSampleSnapshot);
  static const std::vector<uint8_t> hiding = SoundSnapshot(quire::WriteHidingSnapshot);
  Read(file, std::span(data, size));
  ReadWindows(std::span(data, size));
  std::vector<uint8_t> bytes = size % 2 == 0 ? plain : hiding;
  for (size_t i = 0; i + 2 < size; i += 3)
    bytes[static_cast<size_t>(data[i] | data[i + 1] << 8) % bytes.size()] = data[i + 2];
  // The header's checksum as a forger would set it, behind which the tables are believed.
  quire::SealSnapshotAgain(std::as_writable_bytes(std::span(bytes)));
  Read(file, bytes);
  return 0;
}
