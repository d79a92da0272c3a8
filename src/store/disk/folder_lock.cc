#include "store/disk/folder_lock.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

#include "store/disk/chunk_file_walk.h"
#include "store/disk/disk_layout.h"

namespace quire {

namespace layout = disk_layout;

FolderLock::FolderLock(std::string directory, OpenFile file, const DiskCatalog& catalog)
    : directory_(std::move(directory)), file_(std::move(file)), catalog_(catalog) {}

FolderLock::Hold::Hold(FolderLock& lock, FileSession& io)
    : threads_(lock.threads_), files_(io.files()), file_(lock.file_.get()) {
  if (const int error = io.Lock(file_, true); error != 0)
    status_ = FileError(error, "cannot lock " + lock.directory_);
}

FolderLock::Hold::~Hold() {
  if (status_.ok()) files_.Unlock(file_);
}

Status FolderLock::Set(FileSession& io, int64_t bytes) {
  const int error = io.WriteFull(file_.get(), layout::EncodeUsage(bytes), 0);
  is_wrong_ = error != 0;
  return error == 0 ? Status() : FileError(error, "cannot write the sum of sizes");
}

Result<int64_t> FolderLock::Count(FileSession& io) {
  QUIRE_ASSIGN_OR_RETURN(const std::vector<FoundChunkFile> found,
                         WalkChunkFiles(io, directory_, catalog_));
  int64_t bytes = 0;
  for (const FoundChunkFile& file : found) bytes += file.stat.size;
  QUIRE_RETURN_IF_ERROR(Set(io, bytes));
  return bytes;
}

Result<std::optional<int64_t>> FolderLock::Read(FileSession& io) {
  if (is_wrong_) return std::optional<int64_t>();
  std::array<std::byte, layout::kUsageBytes> record{};
  const int64_t count = io.ReadFull(file_.get(), record, 0);
  if (count < 0) return FileError(count, "cannot read the sum of sizes");
  return layout::ParseUsage(record);
}

Result<int64_t> FolderLock::Sum(FileSession& io) {
  QUIRE_ASSIGN_OR_RETURN(const std::optional<int64_t> bytes, Read(io));
  if (bytes) return *bytes;
  return Count(io);
}

Status FolderLock::Add(FileSession& io, int64_t bytes) {
  QUIRE_ASSIGN_OR_RETURN(const std::optional<int64_t> before, Read(io));
  if (!before) return Count(io).status();
  return Set(io, std::max<int64_t>(*before + bytes, 0));
}

int64_t FolderLock::Peek(FileSession& io, const OpenFile& file) {
  std::array<std::byte, layout::kUsageBytes> record{};
  io.ReadFull(file.get(), record, 0);
  return layout::ParseUsage(record).value_or(0);
}

}  // namespace quire
