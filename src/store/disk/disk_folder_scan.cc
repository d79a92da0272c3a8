// How the catalog is brought in step with the files, those of other processes among them, and what
// dead ones left behind is cleared away.
#include <algorithm>
#include <cerrno>
#include <set>

#include "store/disk/disk_folder.h"

namespace quire {

Status DiskFolder::LearnHeader(FileSession& io, const FoundChunkFile& found,
                               std::vector<FoundChunkFile>* damaged) {
  Result<ChunkFile> file = OpenChunk(io, found.id);
  if (!file.ok()) return Status();
  const auto header = DecodeHeaderOf(io, found.id, *file);
  if (header.ok()) {
    const ChunkId id{header->fingerprint, found.id.root, found.id.key};
    NoteFound(io, id, *header, file->file.get());
  }
  if (header.status().code() == StatusCode::kCorrupt) {
    damaged->push_back(found);
    damaged->back().stat = file->stat;
  }
  return Status();
}

Result<DiskFolder::FolderContents> DiskFolder::ScanFiles(FileSession& io,
                                                         std::vector<std::string>* empty) {
  QUIRE_ASSIGN_OR_RETURN(std::vector<FoundChunkFile> found,
                         WalkChunkFiles(io, options_.directory, catalog_, empty));
  // The oldest first, so that they are the first to be evicted.
  std::ranges::stable_sort(found, {},
                           [](const FoundChunkFile& file) { return file.stat.modified_ms; });
  FolderContents contents;
  std::set<ChunkKey> present;
  for (const FoundChunkFile& file : found) {
    present.insert(file.id.key);
    contents.bytes += file.stat.size;
    if (const auto known = catalog_.FindKey(file.id.key)) {
      catalog_.SetBytes(*known, file.stat.size);  // another process has given it a new expiry
      continue;
    }
    QUIRE_RETURN_IF_ERROR(LearnHeader(io, file, &contents.damaged));
    if (io.work().abandoned()) return Status(StatusCode::kTimeout, "disk: the scan was given up");
  }
  for (const IndexedChunk& chunk : catalog_.All()) {
    FileStat stat;
    if (present.contains(chunk.id.key) || io.Stat(PathOf(chunk.id), &stat) != -ENOENT) continue;
    if (catalog_.Erase(chunk.id)) catalog_.Tell(ChunkEvent::Kind::kRemoved, chunk.id.key);
  }
  return contents;
}

Status DiskFolder::Scan(FileSession& io, std::vector<std::string>* empty) {
  QUIRE_ASSIGN_OR_RETURN(const FolderContents contents, ScanFiles(io, empty));
  if (options_.use == FolderUse::kLook) return Status();
  const FolderLock::Hold lock(lock_, io);
  QUIRE_RETURN_IF_ERROR(lock.status());
  for (const FoundChunkFile& file : contents.damaged) QuarantineFile(io, file.id, file.stat.inode);
  QUIRE_ASSIGN_OR_RETURN(const int64_t used, lock_.Sum(io));
  if (used != catalog_.bytes()) QUIRE_RETURN_IF_ERROR(lock_.Count(io).status());
  return Status();
}

Result<int64_t> DiskFolder::Verify(FileSession& io) {
  QUIRE_ASSIGN_OR_RETURN(const std::vector<FoundChunkFile> found,
                         WalkChunkFiles(io, options_.directory, catalog_));
  int64_t damaged = 0, unread = 0;
  Status why;
  for (const FoundChunkFile& file : found) {
    Status status = ReadWhole(io, file.id).status();
    damaged += status.code() == StatusCode::kCorrupt ? 1 : 0;
    if (status.code() == StatusCode::kIoError) {
      ++unread;
      why = std::move(status);
    }
    if (io.work().abandoned()) return Status(StatusCode::kTimeout, "disk: nobody waits any more");
  }
  if (unread == 0) return damaged;
  return Status(StatusCode::kIoError,
                "disk: " + std::to_string(unread) + " of " + std::to_string(found.size()) +
                    " chunk files cannot be read, and " + std::to_string(damaged) +
                    " of the others were damaged and removed. The last that cannot be read: " +
                    std::string(why.message()));
}

Result<int64_t> DiskFolder::CollectGarbage(FileSession& io) {
  int64_t freed = temporary_.RemoveLeftovers(io);
  std::vector<std::string> empty;
  QUIRE_RETURN_IF_ERROR(Scan(io, &empty));
  const int64_t before = catalog_.bytes();
  const FolderLock::Hold lock(lock_, io);
  QUIRE_RETURN_IF_ERROR(lock.status());
  QUIRE_RETURN_IF_ERROR(DropExpired(io));
  std::vector<ChunkKey> roots = {ChunkKey{}};  // for the limit of all together
  for (const ChunkKey& root : catalog_.OverQuota()) roots.push_back(root);
  for (const ChunkKey& root : roots) {
    QUIRE_ASSIGN_OR_RETURN(const int64_t used, lock_.Sum(io));
    if (const auto victims = catalog_.Victims(root, 0, used))
      QUIRE_RETURN_IF_ERROR(Evict(io, *victims).status());
  }
  folders_.RemoveEmpty(io, empty);
  freed += quarantine_.Trim(io, catalog_.bytes_max());
  return freed + before - catalog_.bytes();
}

}  // namespace quire
