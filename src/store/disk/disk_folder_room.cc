// How files go: removed, evicted for room, expired, or set aside because they are damaged.
#include <algorithm>
#include <cerrno>

#include "base/clock.h"
#include "store/disk/disk_folder.h"

namespace quire {

Status DiskFolder::RemoveFile(FileSession& io, const ChunkId& id, ChunkEvent::Kind why,
                              bool* removed) {
  *removed = false;
  const std::string path = PathOf(id);
  FileStat stat;
  int error = io.Stat(path, &stat);
  if (error == 0) error = io.Unlink(path);
  if (error != 0 && error != -ENOENT) return FileError(error, "cannot remove " + path);
  *removed = error == 0;
  catalog_.Erase(id);
  if (!*removed) return Status();
  catalog_.Tell(why, id.key);
  return lock_.Add(io, -stat.size);
}

// Returns whether all of them were there.
Result<bool> DiskFolder::Evict(FileSession& io, std::span<const ChunkId> victims,
                               ChunkEvent::Kind why) {
  bool all_were_there = true;
  for (const ChunkId& id : victims) {
    bool removed = false;
    QUIRE_RETURN_IF_ERROR(RemoveFile(io, id, why, &removed));
    all_were_there &= removed;
  }
  return all_were_there;
}

Result<bool> DiskFolder::Remove(FileSession& io, const ChunkId& id, ChunkEvent::Kind why) {
  bool removed = false;
  {
    const FolderLock::Hold lock(lock_, io);
    QUIRE_RETURN_IF_ERROR(lock.status());
    QUIRE_RETURN_IF_ERROR(RemoveFile(io, id, why, &removed));
  }
  if (removed && syncs()) QUIRE_RETURN_IF_ERROR(folders_.Sync(io, id));
  return removed;
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
  bool removed = false;
  (void)RemoveFile(io, id, ChunkEvent::Kind::kExpired, &removed);  // else the next reader does
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
  (void)lock_.Add(io, -stat.size);  // on failure the next MakeRoom finds the sum wrong, and counts
}

Status DiskFolder::MakeRoom(FileSession& io, const ChunkKey& root, int64_t bytes) {
  bool is_fresh = false;  // the catalog is what the folder holds
  for (;;) {
    QUIRE_ASSIGN_OR_RETURN(const int64_t used, lock_.Sum(io));
    const int64_t bytes_max = catalog_.bytes_max();
    const bool is_tight = std::max(used, catalog_.bytes()) + bytes > bytes_max;
    // Files that this process does not know, or that are gone.
    if (is_tight && used != catalog_.bytes() && !is_fresh) {
      QUIRE_RETURN_IF_ERROR(LearnFolder(io));
      is_fresh = true;
    }
    if (is_tight) QUIRE_RETURN_IF_ERROR(DropExpired(io));
    const auto victims = catalog_.Victims(root, bytes);
    if (!victims) {
      return Status(StatusCode::kFull,
                    "disk: no room for " + std::to_string(bytes) + " bytes: " +
                        std::to_string(catalog_.bytes()) + " of " + std::to_string(bytes_max) +
                        " are used, by chunks that are pinned or guaranteed; raise bytes_max");
    }
    QUIRE_ASSIGN_OR_RETURN(const bool all_were_there,
                           Evict(io, *victims, ChunkEvent::Kind::kEvicted));
    if (all_were_there || is_fresh) return Status();
    // Another process has removed some and put as many bytes in their place.
    QUIRE_RETURN_IF_ERROR(LearnFolder(io));
    is_fresh = true;
  }
}

// The catalog and the sum become what the folder holds.
Status DiskFolder::LearnFolder(FileSession& io) {
  QUIRE_ASSIGN_OR_RETURN(const std::vector<FoundChunkFile> damaged, ScanFiles(io));
  for (const FoundChunkFile& file : damaged) QuarantineFile(io, file.id, file.stat.inode);
  return lock_.Count(io).status();
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
    bool removed = false;
    QUIRE_RETURN_IF_ERROR(RemoveFile(io, id, ChunkEvent::Kind::kExpired, &removed));
  }
  return Status();
}

Status DiskFolder::FreeDisk(FileSession& io, int64_t bytes) {
  const FolderLock::Hold lock(lock_, io);
  QUIRE_RETURN_IF_ERROR(lock.status());
  const auto victims = catalog_.VictimsToFree(bytes);
  if (!victims || victims->empty())
    return Status(StatusCode::kFull, "disk: it is full, and there is nothing to evict");
  return Evict(io, *victims, ChunkEvent::Kind::kEvicted).status();
}

}  // namespace quire
