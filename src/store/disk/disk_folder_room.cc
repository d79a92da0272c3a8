// How files go: removed, evicted for room, expired, or set aside because they are damaged.
#include <cerrno>
#include <cstdlib>
#include <optional>
#include <string>

#include "base/clock.h"
#include "store/disk/disk_folder.h"

namespace quire {
namespace {

Status NoRoom(int64_t bytes, int64_t used, int64_t bytes_max) {
  const std::string what = "disk: no room for " + std::to_string(bytes) + " bytes: ";
  if (used + bytes <= bytes_max) {
    return Status(StatusCode::kFull,
                  what +
                      "the quota of their model and cache salt is used up, by chunks that are "
                      "pinned, or is smaller than that; raise the quota");
  }
  return Status(StatusCode::kFull,
                what + std::to_string(used) + " of " + std::to_string(bytes_max) +
                    " are used, by chunks that are pinned or guaranteed; raise bytes_max");
}

}  // namespace

// Bytes of the file; nothing if it was gone.
Result<std::optional<int64_t>> DiskFolder::RemoveFile(FileSession& io, const ChunkId& id,
                                                      ChunkEvent::Kind why) {
  const std::string path = PathOf(id);
  FileStat stat;
  int error = io.Stat(path, &stat);
  if (error == 0) error = io.Unlink(path);
  if (error != 0 && error != -ENOENT) return FileError(error, "cannot remove " + path);
  const bool is_gone = error != 0;
  if (catalog_.Erase(id) && is_gone) catalog_.Tell(ChunkEvent::Kind::kRemoved, id.key);
  if (is_gone) return std::optional<int64_t>();
  catalog_.Tell(why, id.key);
  QUIRE_RETURN_IF_ERROR(lock_.Add(io, -stat.size));
  return std::optional<int64_t>(stat.size);
}

// Bytes freed. Those that another process has removed are forgotten.
Result<int64_t> DiskFolder::Evict(FileSession& io, std::span<const ChunkId> victims) {
  int64_t freed = 0;
  for (const ChunkId& id : victims) {
    QUIRE_ASSIGN_OR_RETURN(const auto bytes, RemoveFile(io, id, ChunkEvent::Kind::kEvicted));
    freed += bytes.value_or(0);
  }
  return freed;
}

Result<bool> DiskFolder::Remove(FileSession& io, const ChunkId& id, ChunkEvent::Kind why) {
  std::optional<int64_t> removed;
  {
    const FolderLock::Hold lock(lock_, io);
    QUIRE_RETURN_IF_ERROR(lock.status());
    QUIRE_ASSIGN_OR_RETURN(removed, RemoveFile(io, id, why));
  }
  if (removed && syncs()) QUIRE_RETURN_IF_ERROR(folders_.Sync(io, id));
  return removed.has_value();
}

Result<int64_t> DiskFolder::Clear(FileSession& io, const Digest& fingerprint,
                                  const ChunkKey& root) {
  std::vector<FoundChunkFile> found;
  QUIRE_RETURN_IF_ERROR(WalkRoot(io, options_.directory, catalog_, fingerprint, root, &found));
  int64_t count = 0;
  for (const FoundChunkFile& file : found) {
    QUIRE_ASSIGN_OR_RETURN(const bool removed, Remove(io, file.id, ChunkEvent::Kind::kRemoved));
    count += removed ? 1 : 0;
  }
  return count;
}

void DiskFolder::RemoveExpired(FileSession& io, const ChunkId& id, uint64_t inode) {
  const FolderLock::Hold lock(lock_, io);
  FileStat stat;
  if (!lock.status().ok() || io.Stat(PathOf(id), &stat) != 0 || stat.inode != inode) return;
  (void)RemoveFile(io, id, ChunkEvent::Kind::kExpired);  // else the next reader does
}

void DiskFolder::Quarantine(FileSession& io, const ChunkId& id, uint64_t inode) {
  const FolderLock::Hold lock(lock_, io);
  if (lock.status().ok()) QuarantineFile(io, id, inode);
}

void DiskFolder::QuarantineFile(FileSession& io, const ChunkId& id, uint64_t inode) {
  const std::string path = PathOf(id);
  FileStat stat;
  if (io.Stat(path, &stat) != 0 || stat.inode != inode) return;
  if (quarantine_.Take(io, path, id.key, stat.size, catalog_.bytes_max()) != 0) return;
  catalog_.Erase(id);
  catalog_.Tell(ChunkEvent::Kind::kCorrupt, id.key);
  (void)lock_.Add(io, -stat.size);  // on failure the sum is counted again
}

// Whether what others have come to have in the folder, or have removed, is worth looking through
// it. A small share of theirs is learnt when this process has put as much as the folder holds: else
// what others leave there for good would stay as long as this process runs.
bool DiskFolder::HasMuchToLearn(int64_t used) const {
  const int64_t unknown = used - catalog_.bytes() - unreadable_;
  if (unknown == 0) return false;
  return std::abs(unknown) >= used / kLearnShare || room_since_learnt_ >= used;
}

Status DiskFolder::MakeRoom(FileSession& io, const ChunkKey& root, int64_t bytes) {
  const int64_t bytes_max = catalog_.bytes_max();
  QUIRE_ASSIGN_OR_RETURN(int64_t used, lock_.Sum(io));
  const bool is_tight = used + bytes > bytes_max;
  if (is_tight) {
    if (HasMuchToLearn(used)) QUIRE_RETURN_IF_ERROR(LearnFolder(io));
    QUIRE_RETURN_IF_ERROR(DropExpired(io));
  }
  // Again, as long as victims turn out to be gone already: the sum has no bytes of theirs.
  for (;;) {
    QUIRE_ASSIGN_OR_RETURN(used, lock_.Sum(io));
    const auto victims = catalog_.Victims(root, bytes, used);
    if (victims && victims->empty()) break;
    if (victims) {
      QUIRE_RETURN_IF_ERROR(Evict(io, *victims).status());
    } else if (is_tight && used != catalog_.bytes() + unreadable_) {
      QUIRE_RETURN_IF_ERROR(LearnFolder(io));
    } else {
      return NoRoom(bytes, used, bytes_max);
    }
  }
  room_since_learnt_ += bytes;
  return Status();
}

// The catalog and the sum become what the folder holds.
Status DiskFolder::LearnFolder(FileSession& io) {
  QUIRE_ASSIGN_OR_RETURN(const FolderContents contents, ScanFiles(io));
  QUIRE_RETURN_IF_ERROR(lock_.Set(io, contents.bytes));
  for (const FoundChunkFile& file : contents.damaged) QuarantineFile(io, file.id, file.stat.inode);
  QUIRE_ASSIGN_OR_RETURN(const int64_t used, lock_.Sum(io));
  unreadable_ = used - catalog_.bytes();
  room_since_learnt_ = 0;
  return Status();
}

// Another process may have given a chunk more time: its header decides.
Status DiskFolder::DropExpired(FileSession& io) {
  const int64_t now_ms = clock_->WallMs();
  for (const ChunkId& id : catalog_.Expired(now_ms)) {
    Result<ChunkFile> file = OpenChunk(io, id);
    if (!file.ok()) continue;
    const auto header = DecodeHeaderOf(io, id, *file);
    if (header.ok()) NoteFound(io, id, *header, file->file.get());
    if (header.ok() && (header->expires_ms == 0 || header->expires_ms > now_ms)) continue;
    QUIRE_RETURN_IF_ERROR(RemoveFile(io, id, ChunkEvent::Kind::kExpired).status());
  }
  return Status();
}

Status DiskFolder::FreeDisk(FileSession& io, int64_t bytes) {
  const FolderLock::Hold lock(lock_, io);
  QUIRE_RETURN_IF_ERROR(lock.status());
  while (bytes > 0) {
    const auto victims = catalog_.VictimsToFree(bytes);
    if (!victims || victims->empty())
      return Status(StatusCode::kFull, "disk: it is full, and there is nothing to evict");
    QUIRE_ASSIGN_OR_RETURN(const int64_t freed, Evict(io, *victims));
    bytes -= freed;
  }
  return Status();
}

}  // namespace quire
