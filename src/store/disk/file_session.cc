#include "store/disk/file_session.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace quire {

static_assert(EINTR == 4, "FileSession::kInterrupted");

Status FileError(int64_t error, const std::string& what) {
  const int number = static_cast<int>(-error);
  StatusCode code = StatusCode::kIoError;
  if (number == ENOENT || number == ENOTDIR) code = StatusCode::kNotFound;
  if (number == ENOSPC || number == EDQUOT) code = StatusCode::kFull;
  if (number == EFBIG) code = StatusCode::kTooLarge;  // a limit on one file: no room helps
  return Status(code,
                "disk: " + what + ": error " + std::to_string(number) + ", " +
                    std::string(strerrordesc_np(number) ? strerrordesc_np(number) : "not known"));
}

int FileSession::Open(const std::string& path, OpenMode mode, OpenFile* to) {
  const int file = Repeat([&] { return files_.Open(path, mode); });
  if (file < 0) return file;
  *to = OpenFile(files_, file);
  return 0;
}

int FileSession::List(const std::string& path, std::vector<std::string>* names) {
  return Repeat([&] {
    names->clear();
    return files_.List(path, names);
  });
}

int FileSession::SyncDirectory(const std::string& path) {
  OpenFile directory;
  if (const int error = Open(path, OpenMode::kDirectory, &directory); error != 0) return error;
  return Sync(directory.get());
}

// Steps of a MiB, so that a slow disk still gives beats.
constexpr size_t kStepBytes = size_t{1} << 20;

size_t ResumeAfter(int64_t count, size_t wanted) {
  const auto done = static_cast<size_t>(count);
  const size_t whole = done - done % kDirectAlignment;
  return done < wanted && whole > 0 ? whole : done;
}

int64_t FileSession::ReadFull(int file, std::span<std::byte> to, int64_t offset) {
  size_t done = 0;
  while (done < to.size()) {
    const auto rest = to.subspan(done, std::min(kStepBytes, to.size() - done));
    const int64_t count =
        Repeat([&] { return files_.Read(file, rest, offset + static_cast<int64_t>(done)); });
    if (count < 0) return count;
    if (count == 0) break;
    done += ResumeAfter(count, rest.size());
  }
  return static_cast<int64_t>(done);
}

int FileSession::WriteFull(int file, std::span<const std::byte> from, int64_t offset) {
  size_t done = 0;
  while (done < from.size()) {
    const auto rest = from.subspan(done, std::min(kStepBytes, from.size() - done));
    const int64_t count =
        Repeat([&] { return files_.Write(file, rest, offset + static_cast<int64_t>(done)); });
    if (count < 0) return static_cast<int>(count);
    if (count == 0) return -EIO;  // no disk does that; no endless loop if one did
    done += ResumeAfter(count, rest.size());
  }
  return 0;
}

}  // namespace quire
