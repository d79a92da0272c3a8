#include "store/disk/temporary_files.h"

#include <cerrno>
#include <span>
#include <vector>

#include "base/random.h"
#include "store/disk/disk_layout.h"

namespace quire {
namespace {

uint64_t RandomNumber() {
  uint64_t number = 0;
  FillRandom(std::as_writable_bytes(std::span(&number, 1)));
  return number;
}

}  // namespace

TemporaryFiles::TemporaryFiles(const std::string& directory, Clock& clock)
    : folder_(directory + "/" + std::string(disk_layout::kTemporaryName)),
      clock_(clock),
      instance_(RandomNumber()) {}

std::string TemporaryFiles::NewPath() {
  return folder_ + "/" + std::to_string(clock_.WallMs()) + "-" + std::to_string(instance_) + "-" +
         std::to_string(next_number_++);
}

Status TemporaryFiles::Create(FileSession& io, bool named, NewFile* to) {
  if (!named && nameless_works_) {
    const int error = io.Open(folder_, OpenMode::kNameless, &to->file);
    if (error == 0) return Status();
    if (error != -EOPNOTSUPP) return FileError(error, "cannot make a file in " + folder_);
    nameless_works_ = false;
  }
  for (;;) {
    to->path = NewPath();
    const int error = io.Open(to->path, OpenMode::kNew, &to->file);
    if (error != 0) return FileError(error, "cannot make " + to->path);
    // A clean-up that comes before the lock takes the file for that of a dead process: it holds the
    // lock now, or has removed the name already.
    const int locked = io.Lock(to->file.get(), false);
    FileStat stat;
    if (locked == 0 && io.Stat(to->path, &stat) == 0) return Status();
    Drop(io, *to);
    if (locked != 0 && locked != -EWOULDBLOCK)
      return FileError(locked, "cannot lock a new file in " + folder_);
  }
}

void TemporaryFiles::Drop(FileSession& io, NewFile& file) {
  if (!file.path.empty()) io.Unlink(file.path);
  file.path.clear();
  file.file.Reset();
}

Status TemporaryFiles::WriteText(FileSession& io, const std::string& folder,
                                 const std::string& path, std::string_view text, bool syncs) {
  NewFile written;
  QUIRE_RETURN_IF_ERROR(Create(io, true, &written));
  int error =
      io.WriteFull(written.file.get(), std::as_bytes(std::span(text.data(), text.size())), 0);
  if (error == 0 && syncs) error = io.Sync(written.file.get());
  if (error == 0) error = io.Rename(written.path, path);
  if (error != 0) {
    Drop(io, written);
    return FileError(error, "cannot write " + path);
  }
  if (syncs) error = io.SyncDirectory(folder);
  return error == 0 ? Status() : FileError(error, "cannot sync " + folder);
}

int64_t TemporaryFiles::RemoveLeftovers(FileSession& io) const {
  std::vector<std::string> names;
  if (io.List(folder_ + "/", &names) != 0) return 0;
  int64_t freed = 0;
  for (const std::string& name : names) {
    const std::string path = folder_ + "/" + name;
    OpenFile file;
    FileStat stat;
    if (io.Open(path, OpenMode::kRead, &file) != 0) continue;
    const bool is_dead = io.StatFile(file.get(), &stat) == 0 && io.Lock(file.get(), false) == 0;
    if (is_dead && io.Unlink(path) == 0) freed += stat.size;
  }
  return freed;
}

}  // namespace quire
