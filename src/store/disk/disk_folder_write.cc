// How a chunk gets its file: a new file that nobody sees, written whole, then given its name at
// once.
#include <algorithm>
#include <cerrno>
#include <utility>

#include "store/disk/disk_folder.h"
#include "store/disk/disk_layout.h"

namespace quire {
namespace {

namespace layout = disk_layout;

// How often a put starts again because somebody else changed the folder under it.
constexpr int kStoreAttempts = 4;

}  // namespace

Status DiskFolder::WritePieces(FileSession& io, const NewChunk& chunk, NewFile& new_file,
                               FileTransfers& transfers) {
  int64_t next = 0;
  bool has_left = false;
  while (next < chunk.header.total_bytes || !transfers.idle()) {
    while (next < chunk.header.total_bytes && !transfers.full()) {
      const int64_t size = std::min(FileTransfers::kBytesMax, chunk.header.total_bytes - next);
      transfers.StartWrite(new_file.file.get(), next, size, 0, [&](std::span<std::byte> to) {
        has_left = has_left || !chunk.copy(next, to);
      });
      next += size;
    }
    const auto done = transfers.Next(io.work());
    if (done.error != 0) return FileError(done.error, "cannot write chunk " + PathOf(chunk.id));
    if (has_left) return Status(StatusCode::kTimeout, "disk: nobody waits for the put any more");
  }
  return Status();
}

Status DiskFolder::WriteNewFile(FileSession& io, const NewChunk& chunk, NewFile& new_file) {
  const int64_t bytes = chunk.header.total_bytes;
  // Asks for the room at once, and lets writes behind one another go on side by side.
  const int error = io.Allocate(new_file.file.get(), bytes);
  if (error != 0 && error != -EOPNOTSUPP)
    return FileError(error, "no room for chunk " + PathOf(chunk.id));
  // It decides about eviction alone, so a file system without such records costs no chunk.
  (void)io.SetRecord(new_file.file.get(), layout::EncodeWorth(chunk.worth));
  if (direct_works_ && bytes >= kDirectBytesMin && bytes % kAlignment == 0)
    io.SetDirect(new_file.file.get());
  std::unique_ptr<FileTransfers> transfers = transfers_.Take();
  const Status status = WritePieces(io, chunk, new_file, *transfers);
  transfers->Drain(io.work());
  transfers_.GiveBack(std::move(transfers));
  QUIRE_RETURN_IF_ERROR(status);
  if (!syncs()) return Status();
  const int sync_error = io.Sync(new_file.file.get());
  return sync_error == 0 ? Status() : FileError(sync_error, "cannot sync a new chunk");
}

Status DiskFolder::CheckPresent(FileSession& io, const ChunkId& id, bool* is_there) {
  *is_there = false;
  const auto known = catalog_.Find(id);
  DiskCatalog::Seen seen = catalog_.seen(id);
  Result<ChunkFile> file = OpenChunk(io, id);
  if (!file.ok()) return file.status().code() == StatusCode::kNotFound ? Status() : file.status();
  const bool is_over = known && known->expires_ms != 0 && known->expires_ms <= clock_->WallMs();
  if (!known || !seen.verified || is_over || known->bytes != file->stat.size) {
    file->file.Reset();
    const auto chunk = ReadWhole(io, id);
    if (chunk.status().code() == StatusCode::kNotFound ||
        chunk.status().code() == StatusCode::kCorrupt)
      return Status();
    if (chunk.status().code() == StatusCode::kIncompatible) return RemoveUnsigned(io, id);
    QUIRE_RETURN_IF_ERROR(chunk.status());
    seen = {.verified = true, .synced = false};
    if (!(file = OpenChunk(io, id)).ok()) return Status();
  }
  if (syncs() && !seen.synced) {
    if (const int error = io.Sync(file->file.get()); error != 0)
      return FileError(error, "cannot sync " + PathOf(id));
    QUIRE_RETURN_IF_ERROR(folders_.Sync(io, id));
    catalog_.SetSeen(id, {.verified = true, .synced = true});
  }
  *is_there = true;
  return Status();
}

Status DiskFolder::RemoveUnsigned(FileSession& io, const ChunkId& id) {
  QUIRE_ASSIGN_OR_RETURN(ChunkFile file, OpenChunk(io, id));
  QUIRE_ASSIGN_OR_RETURN(const ChunkHeader header, DecodeHeaderOf(io, id, file));
  if (mac_key_.empty() || header.has_mac)
    return Status(StatusCode::kIncompatible, "disk: " + PathOf(id) + " is not for this store");
  return Remove(io, id, ChunkEvent::Kind::kRemoved).status();
}

Status DiskFolder::Publish(FileSession& io, const NewChunk& chunk, NewFile& new_file,
                           Attempt* attempt) {
  const FolderLock::Hold lock(lock_, io);
  QUIRE_RETURN_IF_ERROR(lock.status());
  const int64_t bytes = chunk.header.total_bytes;
  const Status room = MakeRoom(io, chunk.id.root, bytes);
  attempt->refused = room.code() == StatusCode::kFull;
  QUIRE_RETURN_IF_ERROR(room);
  const std::string path = PathOf(chunk.id);
  const int error = io.Link(new_file.file.get(), new_file.path, path);
  // Another process has put it meanwhile. It is looked at once more: is it sound?
  if (error == -EEXIST) return Status();
  if (error != 0) return FileError(error, "cannot name " + path);
  attempt->stored = true;
  const Status counted = lock_.Add(io, bytes);
  Note(chunk.id, chunk.header, chunk.worth);
  catalog_.SetSeen(chunk.id, {.verified = true});
  catalog_.Tell(ChunkEvent::Kind::kStored, chunk.id.key);
  (void)counted;  // the file is there all the same, and the sum is counted again
  return Status();
}

Status DiskFolder::StoreOnce(FileSession& io, const NewChunk& chunk, Attempt* attempt) {
  QUIRE_RETURN_IF_ERROR(CheckPresent(io, chunk.id, &attempt->stored));
  if (attempt->stored) {
    catalog_.CountDuplicate();
    return Status();
  }
  QUIRE_RETURN_IF_ERROR(folders_.Make(io, chunk.id));
  NewFile new_file;
  QUIRE_RETURN_IF_ERROR(temporary_.Create(io, false, &new_file));
  Status status = WriteNewFile(io, chunk, new_file);
  if (status.ok()) status = Publish(io, chunk, new_file, attempt);
  TemporaryFiles::Drop(io, new_file);
  QUIRE_RETURN_IF_ERROR(status);
  if (attempt->stored && syncs()) {
    QUIRE_RETURN_IF_ERROR(folders_.Sync(io, chunk.id));
    catalog_.SetSeen(chunk.id, {.verified = true, .synced = true});
  }
  return Status();
}

Status DiskFolder::Store(FileSession& io, const NewChunk& chunk) {
  bool has_freed = false;
  for (int i = 0; i < kStoreAttempts; ++i) {
    Attempt attempt;
    const Status status = StoreOnce(io, chunk, &attempt);
    if (attempt.stored || attempt.refused || io.work().abandoned()) return status;
    if (status.code() == StatusCode::kFull) {
      if (has_freed || !FreeDisk(io, chunk.header.total_bytes).ok()) return status;
      has_freed = true;
    } else if (status.code() == StatusCode::kNotFound) {
      folders_.Forget();  // another process removed some, or all
    } else if (!status.ok()) {
      return status;
    }
  }
  return Status(StatusCode::kIoError,
                "disk: " + PathOf(chunk.id) + " is changed by others faster than it can be put");
}

// The header is covered by a checksum and maybe a MAC, so a new expiry makes a new file, which
// takes the old one's name at once: readers see the one or the other.
Status DiskFolder::SetExpiry(FileSession& io, const ChunkId& id, int64_t expires_ms) {
  QUIRE_ASSIGN_OR_RETURN(const ChunkFile old, OpenChunk(io, id));
  QUIRE_ASSIGN_OR_RETURN(const auto chunk, ReadWhole(io, id));
  const ChunkHeader& header = chunk->header();
  if (header.expires_ms == expires_ms) return Status();
  if (header.has_mac && mac_key_.empty()) {
    return Status(StatusCode::kBadState, "disk: " + PathOf(id) +
                                             " is signed, and its expiry with it; open the "
                                             "store with its key to change it");
  }
  ChunkFields fields = header;
  fields.expires_ms = expires_ms;
  ChunkWriteOptions options;
  const bool is_aligned = header.header_bytes % kAlignment == 0 &&
                          std::ranges::all_of(header.sections, [](const Section& section) {
                            return section.offset % kAlignment == 0;
                          });
  if (is_aligned) options.alignment = kAlignment;
  if (header.has_mac) options.mac_key = mac_key_;
  std::vector<SectionSpec> sections(header.sections.begin(), header.sections.end());
  QUIRE_ASSIGN_OR_RETURN(ChunkWriter writer,
                         ChunkWriter::Create(std::move(fields), sections, options));
  for (size_t s = 0; s < sections.size(); ++s) {
    const Section& section = header.sections[s];
    QUIRE_ASSIGN_OR_RETURN(const std::span<std::byte> to, writer.section(static_cast<int64_t>(s)));
    std::ranges::copy(chunk->bytes().subspan(static_cast<size_t>(section.offset),
                                             static_cast<size_t>(section.length)),
                      to.begin());
  }
  NewChunk changed;
  changed.id = id;
  changed.header = writer.header();
  if (const auto known = catalog_.Find(id))
    changed.worth = {known->recompute_seconds, known->priority};
  QUIRE_ASSIGN_OR_RETURN(const ChunkBuffer sealed, std::move(writer).Seal());
  changed.copy = [&](int64_t offset, std::span<std::byte> to) {
    std::ranges::copy(sealed.bytes().subspan(static_cast<size_t>(offset), to.size()), to.begin());
    return true;
  };
  NewFile new_file;
  QUIRE_RETURN_IF_ERROR(temporary_.Create(io, true, &new_file));
  Status status = WriteNewFile(io, changed, new_file);
  if (status.ok()) status = Replace(io, changed, old.stat.inode, new_file);
  TemporaryFiles::Drop(io, new_file);
  QUIRE_RETURN_IF_ERROR(status);
  return syncs() ? folders_.Sync(io, id) : Status();
}

Status DiskFolder::SetPriority(FileSession& io, const ChunkId& id, int priority) {
  QUIRE_ASSIGN_OR_RETURN(const ChunkFile file, OpenChunk(io, id));
  ChunkWorth worth = WorthOf(io, file.file.get());
  worth.priority = priority;
  int error = io.SetRecord(file.file.get(), layout::EncodeWorth(worth));
  if (error == 0 && syncs()) error = io.Sync(file.file.get());
  if (error != 0) return FileError(error, "cannot write the priority of " + PathOf(id));
  catalog_.SetPriority(id, priority);
  return Status();
}

Status DiskFolder::Replace(FileSession& io, const NewChunk& chunk, uint64_t inode,
                           NewFile& new_file) {
  const FolderLock::Hold lock(lock_, io);
  QUIRE_RETURN_IF_ERROR(lock.status());
  FileStat stat;
  const std::string path = PathOf(chunk.id);
  if (const int error = io.Stat(path, &stat); error != 0) return FileError(error, path);
  if (stat.inode != inode)
    return Status(StatusCode::kNotFound, "disk: " + path + " was changed by another process");
  if (const int error = io.Rename(new_file.path, path); error != 0)
    return FileError(error, "cannot replace " + path);
  new_file.path.clear();
  catalog_.SetExpiry(chunk.id, chunk.header.expires_ms);
  catalog_.SetBytes(chunk.id, chunk.header.total_bytes);
  // On failure the new file is there all the same, and the sum is counted again.
  if (stat.size != chunk.header.total_bytes)
    (void)lock_.Add(io, chunk.header.total_bytes - stat.size);
  return Status();
}

}  // namespace quire
