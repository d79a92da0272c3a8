// How a chunk is found in the folder, opened, and verified before anybody has a byte of it.
#include <algorithm>
#include <cerrno>
#include <new>
#include <optional>
#include <utility>

#include "base/clock.h"
#include "chunk/chunk_layout.h"
#include "store/disk/disk_folder.h"
#include "store/disk/disk_layout.h"

namespace quire {
namespace {

using chunk_layout::RoundUp;
namespace layout = disk_layout;

Status Corrupt(const std::string& path, const std::string& why) {
  return Status(StatusCode::kCorrupt, "disk: " + path + ": " + why);
}

}  // namespace

Result<DiskFolder::ChunkFile> DiskFolder::OpenChunk(FileSession& io, const ChunkId& id) {
  ChunkFile file;
  const std::string path = PathOf(id);
  int error = io.Open(path, OpenMode::kRead, &file.file);
  if (error == -ENOENT && catalog_.Erase(id)) catalog_.Tell(ChunkEvent::Kind::kRemoved, id.key);
  if (error == 0) error = io.StatFile(file.file.get(), &file.stat);
  if (error != 0) return FileError(error, path);
  file.direct = direct_works_ && file.stat.size >= kDirectBytesMin &&
                file.stat.size % kAlignment == 0 && io.SetDirect(file.file.get()) == 0;
  return file;
}

Result<ChunkHeader> DiskFolder::CheckHeader(const ChunkId& id, const FileStat& stat,
                                            std::span<const std::byte> begin) const {
  const std::string path = PathOf(id);
  Result<ChunkHeader> header = DecodeChunkHeader(begin, {});
  // Beyond the limits of any chunk: damage, of a field that says where the checksum is.
  if (header.status().code() == StatusCode::kTooLarge)
    return Corrupt(path, std::string(header.status().message()));
  if (!header.ok()) return header;
  if (header->key != id.key) return Corrupt(path, "it is the file of another chunk");
  if (layout::PassportFolder("", header->fingerprint) != layout::PassportFolder("", id.fingerprint))
    return Corrupt(path, "it is of another passport");
  if (header->total_bytes != stat.size) {
    return Corrupt(path, "it has " + std::to_string(stat.size) + " bytes; its header says " +
                             std::to_string(header->total_bytes));
  }
  return header;
}

Result<ChunkHeader> DiskFolder::DecodeHeaderOf(FileSession& io, const ChunkId& id,
                                               ChunkFile& file) {
  ChunkBuffer buffer(kAlignment);
  int64_t count = io.ReadFull(file.file.get(), buffer.bytes(), 0);
  if (count < 0) return FileError(count, "cannot read " + PathOf(id));
  const auto begin = buffer.bytes().first(static_cast<size_t>(count));
  const auto header_bytes = ChunkHeaderBytes(begin, {});
  if (!header_bytes.ok() || *header_bytes <= count || *header_bytes > file.stat.size)
    return CheckHeader(id, file.stat, begin);
  buffer = ChunkBuffer(RoundUp(*header_bytes, kAlignment));
  count = io.ReadFull(file.file.get(), buffer.bytes(), 0);
  if (count < 0) return FileError(count, "cannot read " + PathOf(id));
  return CheckHeader(id, file.stat, buffer.bytes().first(static_cast<size_t>(count)));
}

Result<ChunkHeader> DiskFolder::ReadHeader(FileSession& io, const ChunkId& id, ChunkFile& file) {
  Result<ChunkHeader> header = DecodeHeaderOf(io, id, file);
  if (!header.ok() && header.status().code() == StatusCode::kCorrupt)
    Quarantine(io, id, file.stat.inode);
  return header;
}

void DiskFolder::NoteFound(FileSession& io, const ChunkId& id, const ChunkHeader& header,
                           int file) {
  Note(id, header, catalog_.Find(id) ? ChunkWorth() : WorthOf(io, file));
}

// Without a record it is worth what any chunk is: that says what goes first, and nothing else.
ChunkWorth DiskFolder::WorthOf(FileSession& io, int file) {
  std::array<std::byte, layout::kWorthBytes> record{};
  if (io.GetRecord(file, record) != static_cast<int64_t>(record.size())) return {};
  return layout::ParseWorth(record).value_or(ChunkWorth());
}

// `worth`: if it is not known yet.
void DiskFolder::Note(const ChunkId& id, const ChunkHeader& header, const ChunkWorth& worth) {
  if (const auto known = catalog_.Find(id)) {
    if (known->expires_ms != header.expires_ms) catalog_.SetExpiry(id, header.expires_ms);
    if (known->bytes != header.total_bytes) catalog_.SetBytes(id, header.total_bytes);
    return;
  }
  IndexedChunk chunk;
  chunk.id = id;
  // What is keyed by its own tokens hangs on no other chunk.
  chunk.context = header.contextual ? id.root : ChunkKey{header.context};
  chunk.bytes = header.total_bytes;
  chunk.tokens = static_cast<int64_t>(header.tokens.size());
  if (header.first_position != kNotRotated) chunk.first_token = header.first_position;
  chunk.created_ms = header.created_ms;
  chunk.expires_ms = header.expires_ms;
  chunk.recompute_seconds = worth.recompute_seconds;
  chunk.priority = worth.priority;
  catalog_.Insert(chunk);
}

Result<std::shared_ptr<const StoredChunk>> DiskFolder::LoadWhole(FileSession& io, const ChunkId& id,
                                                                 ChunkFile& file) {
  QUIRE_ASSIGN_OR_RETURN(ChunkHeader header, DecodeHeaderOf(io, id, file));
  ChunkBuffer buffer(header.total_bytes);
  const int64_t count = io.ReadFull(file.file.get(), buffer.bytes(), 0);
  if (count < 0) return FileError(count, "cannot read " + PathOf(id));
  if (count < header.total_bytes) return Corrupt(PathOf(id), "it was cut");
  QUIRE_ASSIGN_OR_RETURN(const ChunkView view, ChunkView::Open(buffer.bytes(), Expect(header), {}));
  QUIRE_RETURN_IF_ERROR(view.CheckAll());
  return std::make_shared<const StoredChunk>(std::move(header), std::move(buffer));
}

Result<std::shared_ptr<const StoredChunk>> DiskFolder::ReadWhole(FileSession& io,
                                                                 const ChunkId& id) {
  QUIRE_ASSIGN_OR_RETURN(ChunkFile file, OpenChunk(io, id));
  auto chunk = LoadWhole(io, id, file);
  if (chunk.ok()) {
    NoteFound(io, {(*chunk)->header().fingerprint, id.root, id.key}, (*chunk)->header(),
              file.file.get());
    catalog_.SetSeen(id, {.verified = true});
  } else if (chunk.status().code() == StatusCode::kCorrupt) {
    Quarantine(io, id, file.stat.inode);
  } else if (chunk.status().code() == StatusCode::kNotFound) {
    RemoveExpired(io, id, file.stat.inode);
  }
  return chunk;
}

Result<bool> DiskFolder::Find(FileSession& io, const ChunkId& id) {
  const int64_t now_ms = clock_->WallMs();
  const auto known = catalog_.Find(id);
  if (known && (known->expires_ms == 0 || known->expires_ms > now_ms)) {
    FileStat stat;
    const int error = io.Stat(PathOf(id), &stat);
    if (error == 0) return true;
    if (error != -ENOENT) return FileError(error, PathOf(id));
    if (catalog_.Erase(id)) catalog_.Tell(ChunkEvent::Kind::kRemoved, id.key);
    return false;
  }
  const auto absent = [](const Status& status) -> Result<bool> {
    if (status.code() == StatusCode::kIoError) return status;
    return false;
  };
  auto file = OpenChunk(io, id);
  if (!file.ok()) return absent(file.status());
  const auto header = ReadHeader(io, id, *file);
  if (!header.ok()) return absent(header.status());
  const Status fits = CheckChunk(*header, Expect(*header));
  if (fits.code() == StatusCode::kNotFound) RemoveExpired(io, id, file->stat.inode);
  if (!fits.ok() || header->fingerprint != id.fingerprint) return false;
  NoteFound(io, id, *header, file->file.get());
  return true;
}

Result<ChunkId> DiskFolder::Locate(FileSession& io, const ChunkKey& key) const {
  if (const auto known = catalog_.FindKey(key)) return *known;
  std::optional<ChunkId> found;
  const auto look = [&](const Digest& fingerprint, const ChunkKey& root) -> Result<bool> {
    const ChunkId id{fingerprint, root, key};
    FileStat stat;
    const int error = io.Stat(PathOf(id), &stat);
    if (error == -ENOENT || error == -ENOTDIR) return true;
    if (error != 0) return FileError(error, PathOf(id));
    found = id;
    return false;
  };
  QUIRE_RETURN_IF_ERROR(VisitRoots(io, options_.directory, look));
  if (found) return *found;
  return Status(StatusCode::kNotFound,
                "disk: " + options_.directory + " has no chunk " + key.digest.ToHex());
}

Result<ChunkId> DiskFolder::FindKey(FileSession& io, const ChunkKey& key) {
  if (const auto known = catalog_.FindKey(key)) return *known;
  QUIRE_ASSIGN_OR_RETURN(ChunkId id, Locate(io, key));
  QUIRE_ASSIGN_OR_RETURN(ChunkFile file, OpenChunk(io, id));
  QUIRE_ASSIGN_OR_RETURN(const ChunkHeader header, ReadHeader(io, id, file));
  id.fingerprint = header.fingerprint;
  return id;
}

}  // namespace quire
