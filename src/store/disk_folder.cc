#include "store/disk_folder.h"

#include <algorithm>
#include <cerrno>
#include <new>
#include <utility>

#include "base/clock.h"
#include "chunk/chunk_layout.h"
#include "store/disk_layout.h"

namespace quire {
namespace {

using chunk_layout::RoundUp;
namespace layout = disk_layout;

// Files from here on are read and written past the page cache: a second copy of them in memory
// serves nobody, as the RAM tier is in front. Smaller ones gain more from the kernel's read-ahead
// than from it.
constexpr int64_t kDirectBytesMin = 128 << 10;

// Damaged files are kept for whoever wants to know what happened to the disk: some, not all.
constexpr int64_t kQuarantineFilesMax = 16;
constexpr int64_t kQuarantineShare = 16;  // of bytes_max

// How often a put starts again because somebody else changed the folder under it.
constexpr int kStoreAttempts = 4;

constexpr auto kAlignment = static_cast<int64_t>(kDirectAlignment);

std::string ParentOf(const std::string& path) {
  const size_t slash = path.find_last_of('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

// With all that is missing above it.
int MakePath(FileSession& io, const std::string& path) {
  const int error = io.MakeDirectory(path);
  if (error == -EEXIST) return 0;
  if (error != -ENOENT) return error;
  const std::string parent = ParentOf(path);
  if (parent == path || parent == ".") return error;
  if (const int above = MakePath(io, parent); above != 0) return above;
  const int again = io.MakeDirectory(path);
  return again == -EEXIST ? 0 : again;
}

// The directory and those above it: whoever made them may have died before it synced them. Those
// that this user may not read, it did not make.
Status SyncPath(FileSession& io, std::string path) {
  for (;;) {
    const int error = io.SyncDirectory(path);
    if (error == -EACCES) return Status();
    if (error != 0) return FileError(error, "cannot sync " + path);
    const std::string parent = ParentOf(path);
    if (parent == path || path == ".") return Status();
    path = parent;
  }
}

Status Corrupt(const std::string& path, const std::string& why) {
  return Status(StatusCode::kCorrupt, "disk: " + path + ": " + why);
}

bool ProbeDirect(FileSession& io, const std::string& path) {
  OpenFile file;
  return io.Open(path, OpenMode::kReadWrite, &file) == 0 && io.SetDirect(file.get()) == 0;
}

}  // namespace

DiskFolder::DiskFolder(std::shared_ptr<FileSystem> files, std::shared_ptr<Clock> clock,
                       DiskTierOptions options, EvictionKind eviction, std::string mac_key,
                       int64_t bytes_max)
    : files_(std::move(files)),
      clock_(std::move(clock)),
      options_(std::move(options)),
      mac_key_(std::move(mac_key)),
      catalog_(eviction, bytes_max),
      transfers_(files_) {}

Result<std::unique_ptr<DiskFolder>> DiskFolder::Open(FileSession& io,
                                                     std::shared_ptr<FileSystem> files,
                                                     std::shared_ptr<Clock> clock,
                                                     DiskTierOptions options, EvictionKind eviction,
                                                     std::string mac_key) {
  const std::string& directory = options.directory;
  for (const std::string_view name :
       {std::string_view(), layout::kTemporaryName, layout::kQuarantineName}) {
    const std::string path = name.empty() ? directory : directory + "/" + std::string(name);
    if (const int error = MakePath(io, path); error != 0)
      return FileError(error, "cannot make the directory " + path);
  }
  const std::string lock_path = directory + "/" + std::string(layout::kLockName);
  OpenFile lock_file;
  if (const int error = io.Open(lock_path, OpenMode::kReadWrite, &lock_file); error != 0)
    return FileError(error, "cannot open " + lock_path);
  if (options.durability == Durability::kSync) QUIRE_RETURN_IF_ERROR(SyncPath(io, directory));
  int64_t bytes_max = options.bytes_max;
  if (bytes_max == 0) {
    const int64_t free = io.FreeBytes(directory);
    if (free < 0) return FileError(free, "cannot ask for the free space of " + directory);
    std::array<std::byte, layout::kUsageBytes> record{};
    io.ReadFull(lock_file.get(), record, 0);
    // A tenth stays free for others. What the folder has already is as good as free.
    bytes_max = (free + layout::ParseUsage(record).value_or(0)) / 10 * 9;
  }
  std::unique_ptr<DiskFolder> folder(
      new DiskFolder(std::move(files), std::move(clock), std::move(options), eviction,
                     std::move(mac_key), std::max<int64_t>(bytes_max, 1)));
  folder->lock_file_ = std::move(lock_file);
  folder->direct_works_ = ProbeDirect(io, lock_path);
  folder->RemoveLeftovers(io);
  return folder;
}

std::string DiskFolder::PathOf(const ChunkId& id) const {
  return layout::ChunkPath(options_.directory, id);
}

ChunkExpectation DiskFolder::Expect(const ChunkHeader& header) const {
  ChunkExpectation expected;
  expected.key = header.key;
  expected.fingerprint = header.fingerprint;
  expected.now_ms = clock_->WallMs();
  expected.approximate = header.approximate;
  expected.mac_key = mac_key_;
  return expected;
}

// ---------------------------------------------------------------------- the lock and the sum

DiskFolder::Lock::Lock(DiskFolder& folder, FileSession& io)
    : threads_(folder.change_mutex_), files_(io.files()), file_(folder.lock_file_.get()) {
  if (const int error = io.Lock(file_, true); error != 0)
    status_ = FileError(error, "cannot lock " + folder.options_.directory);
}

DiskFolder::Lock::~Lock() {
  if (status_.ok()) files_.Unlock(file_);
}

Result<int64_t> DiskFolder::CountUsage(FileSession& io) {
  QUIRE_ASSIGN_OR_RETURN(const std::vector<Found> found, Walk(io));
  int64_t bytes = 0;
  for (const Found& file : found) bytes += file.stat.size;
  const auto record = layout::EncodeUsage(bytes);
  if (const int error = io.WriteFull(lock_file_.get(), record, 0); error != 0)
    return FileError(error, "cannot write the sum of sizes");
  return bytes;
}

Result<int64_t> DiskFolder::Usage(FileSession& io) {
  std::array<std::byte, layout::kUsageBytes> record{};
  const int64_t count = io.ReadFull(lock_file_.get(), record, 0);
  if (count < 0) return FileError(count, "cannot read the sum of sizes");
  if (const auto bytes = layout::ParseUsage(record)) return *bytes;
  return CountUsage(io);
}

// A record that cannot be written is counted anew by whoever next finds it in disagreement.
Status DiskFolder::AddUsage(FileSession& io, int64_t bytes) {
  QUIRE_ASSIGN_OR_RETURN(const int64_t before, Usage(io));
  const auto record = layout::EncodeUsage(std::max<int64_t>(before + bytes, 0));
  if (const int error = io.WriteFull(lock_file_.get(), record, 0); error != 0)
    return FileError(error, "cannot write the sum of sizes");
  return Status();
}

// ---------------------------------------------------------------------- passports

Status DiskFolder::WriteSmallFile(FileSession& io, std::string_view folder, const std::string& path,
                                  std::string_view text) {
  Draft draft;
  QUIRE_RETURN_IF_ERROR(CreateDraft(io, true, &draft));
  int error = io.WriteFull(draft.file.get(), std::as_bytes(std::span(text.data(), text.size())), 0);
  if (error == 0 && syncs()) error = io.Sync(draft.file.get());
  if (error == 0) error = io.Rename(draft.path, path);
  if (error != 0) {
    DropDraft(io, draft);
    return FileError(error, "cannot write " + path);
  }
  if (syncs()) error = io.SyncDirectory(std::string(folder));
  return error == 0 ? Status() : FileError(error, "cannot sync " + std::string(folder));
}

Status DiskFolder::AddPassport(FileSession& io, const Digest& fingerprint,
                               const std::string& passport_json) {
  const std::string folder = layout::PassportFolder(options_.directory, fingerprint);
  const std::string path = folder + "/" + std::string(layout::kManifestName);
  const Lock lock(*this, io);
  QUIRE_RETURN_IF_ERROR(lock.status());
  if (const int error = MakePath(io, folder); error != 0)
    return FileError(error, "cannot make the directory " + folder);
  OpenFile file;
  FileStat stat;
  int error = io.Open(path, OpenMode::kRead, &file);
  if (error == 0) error = io.StatFile(file.get(), &stat);
  if (error != 0 && error != -ENOENT) return FileError(error, "cannot open " + path);
  if (error == 0) {
    std::string text(static_cast<size_t>(std::min(stat.size, layout::kManifestBytesMax)), '\0');
    const int64_t count =
        io.ReadFull(file.get(), std::as_writable_bytes(std::span(text.data(), text.size())), 0);
    if (count < 0) return FileError(count, "cannot read " + path);
    const auto manifest = layout::ParseManifest(text);
    if (manifest.ok() && manifest->fingerprint == fingerprint) return Status();
    if (manifest.ok()) {
      return Status(StatusCode::kIncompatible,
                    "disk: " + path + " is of another passport: " +
                        PassportDifference(passport_json, manifest->passport_json) +
                        "; use another directory");
    }
    if (manifest.status().code() != StatusCode::kCorrupt) return manifest.status();
    // Every chunk says its fingerprint in full, so a damaged passport costs none of them.
    catalog_.Tell(ChunkEvent::Kind::kCorrupt, ChunkKey{fingerprint});
  }
  return WriteSmallFile(io, folder, path, layout::EncodeManifest(fingerprint, passport_json));
}

// ---------------------------------------------------------------------- reading

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
  // Without a record it is worth what any chunk is: that says what goes first, and nothing else.
  ChunkWorth worth;
  std::array<std::byte, layout::kWorthBytes> record{};
  if (!catalog_.Find(id) && io.GetRecord(file, record) == static_cast<int64_t>(record.size()))
    worth = layout::ParseWorth(record).value_or(worth);
  Note(id, header, worth);
}

// `worth`: if it is not known yet.
void DiskFolder::Note(const ChunkId& id, const ChunkHeader& header, const ChunkWorth& worth) {
  if (const auto known = catalog_.Find(id)) {
    if (known->expires_ms != header.expires_ms) catalog_.SetExpiry(id, header.expires_ms);
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

Result<ChunkId> DiskFolder::FindKey(FileSession& io, const ChunkKey& key) {
  if (const auto known = catalog_.FindKey(key)) return *known;
  std::vector<std::string> passports;
  if (const int error = io.List(options_.directory, &passports); error != 0)
    return FileError(error, "cannot list " + options_.directory);
  for (const std::string& passport : passports) {
    const auto fingerprint = layout::ParseShortDigest(passport);
    if (!fingerprint) continue;
    std::vector<std::string> roots;
    if (io.List(options_.directory + "/" + passport, &roots) != 0) continue;
    for (const std::string& name : roots) {
      const auto root = layout::ParseShortDigest(name);
      if (!root) continue;
      const ChunkId id{*fingerprint, ChunkKey{*root}, key};
      FileStat stat;
      if (io.Stat(PathOf(id), &stat) != 0) continue;
      QUIRE_ASSIGN_OR_RETURN(ChunkFile file, OpenChunk(io, id));
      QUIRE_ASSIGN_OR_RETURN(const ChunkHeader header, ReadHeader(io, id, file));
      return ChunkId{header.fingerprint, id.root, key};
    }
  }
  return Status(StatusCode::kNotFound, "disk: there is no chunk " + key.digest.ToHex());
}

// ---------------------------------------------------------------------- writing

Status DiskFolder::MakeFolders(FileSession& io, const ChunkId& id) {
  const std::string leaf = layout::LeafFolder(options_.directory, id);
  {
    const std::lock_guard<std::mutex> guard(names_mutex_);
    if (made_folders_.contains(leaf)) return Status();
  }
  if (const int error = MakePath(io, leaf); error != 0)
    return FileError(error, "cannot make the directory " + leaf);
  const std::lock_guard<std::mutex> guard(names_mutex_);
  made_folders_.insert(leaf);
  return Status();
}

// The file's entry, and once per process those of the folders above: whoever made them may have
// died before it synced them.
Status DiskFolder::SyncFolders(FileSession& io, const ChunkId& id) {
  const std::string leaf = layout::LeafFolder(options_.directory, id);
  std::vector<std::string> paths = {leaf};
  {
    const std::lock_guard<std::mutex> guard(names_mutex_);
    for (std::string path = leaf; path != options_.directory; path = ParentOf(path))
      if (!synced_folders_.contains(path)) paths.push_back(ParentOf(path));
  }
  for (const std::string& path : paths) {
    if (const int error = io.SyncDirectory(path); error != 0)
      return FileError(error, "cannot sync " + path);
  }
  const std::lock_guard<std::mutex> guard(names_mutex_);
  for (std::string path = leaf; path != options_.directory; path = ParentOf(path))
    synced_folders_.insert(path);
  return Status();
}

Status DiskFolder::CreateDraft(FileSession& io, bool named, Draft* draft) {
  const std::string folder = options_.directory + "/" + std::string(layout::kTemporaryName);
  if (!named && nameless_works_) {
    const int error = io.Open(folder, OpenMode::kNameless, &draft->file);
    if (error == 0) return Status();
    if (error != -EOPNOTSUPP) return FileError(error, "cannot make a file in " + folder);
    nameless_works_ = false;
  }
  for (;;) {
    int64_t number = 0;
    {
      const std::lock_guard<std::mutex> guard(names_mutex_);
      number = next_name_++;
    }
    draft->path = folder + "/" + std::to_string(clock_->WallMs()) + "-" + std::to_string(number);
    const int error = io.Open(draft->path, OpenMode::kNew, &draft->file);
    if (error == -EEXIST) continue;
    if (error != 0) return FileError(error, "cannot make " + draft->path);
    // Somebody who cleans up may have come first, and takes the file for a dead process's.
    if (io.Lock(draft->file.get(), false) == 0) return Status();
    DropDraft(io, *draft);
  }
}

void DiskFolder::DropDraft(FileSession& io, Draft& draft) {
  if (!draft.path.empty()) io.Unlink(draft.path);
  draft.path.clear();
  draft.file.Reset();
}

Status DiskFolder::WritePieces(FileSession& io, const NewChunk& chunk, Draft& draft,
                               FileTransfers& transfers) {
  int64_t next = 0;
  bool has_left = false;
  while (next < chunk.header.total_bytes || !transfers.idle()) {
    while (next < chunk.header.total_bytes && !transfers.full()) {
      const int64_t size = std::min(FileTransfers::kBytesMax, chunk.header.total_bytes - next);
      transfers.StartWrite(draft.file.get(), next, size, 0, [&](std::span<std::byte> to) {
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

Status DiskFolder::WriteDraft(FileSession& io, const NewChunk& chunk, Draft& draft) {
  const int64_t bytes = chunk.header.total_bytes;
  // Asks for the room at once, and lets writes behind one another go on side by side.
  const int error = io.Allocate(draft.file.get(), bytes);
  if (error != 0 && error != -EOPNOTSUPP)
    return FileError(error, "no room for chunk " + PathOf(chunk.id));
  // It decides about eviction alone, so a file system without such records costs no chunk.
  (void)io.SetRecord(draft.file.get(), layout::EncodeWorth(chunk.worth));
  if (direct_works_ && bytes >= kDirectBytesMin && bytes % kAlignment == 0)
    io.SetDirect(draft.file.get());
  std::unique_ptr<FileTransfers> transfers = transfers_.Take();
  const Status status = WritePieces(io, chunk, draft, *transfers);
  transfers->Drain(io.work());
  transfers_.GiveBack(std::move(transfers));
  QUIRE_RETURN_IF_ERROR(status);
  if (!syncs()) return Status();
  const int sync_error = io.Sync(draft.file.get());
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
    QUIRE_RETURN_IF_ERROR(SyncFolders(io, id));
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

Status DiskFolder::Publish(FileSession& io, const NewChunk& chunk, Draft& draft, bool* is_there) {
  const Lock lock(*this, io);
  QUIRE_RETURN_IF_ERROR(lock.status());
  const int64_t bytes = chunk.header.total_bytes;
  QUIRE_RETURN_IF_ERROR(MakeRoom(io, chunk.id.root, bytes));
  const std::string path = PathOf(chunk.id);
  const int error = io.Link(draft.file.get(), draft.path, path);
  *is_there = error == -EEXIST;
  if (*is_there) return Status();
  if (error != 0) return FileError(error, "cannot name " + path);
  const Status counted = AddUsage(io, bytes);
  Note(chunk.id, chunk.header, chunk.worth);
  catalog_.SetSeen(chunk.id, {.verified = true});
  catalog_.Tell(ChunkEvent::Kind::kStored, chunk.id.key);
  (void)counted;  // the file is there all the same
  return Status();
}

Status DiskFolder::StoreOnce(FileSession& io, const NewChunk& chunk, bool* stored) {
  bool is_there = false;
  QUIRE_RETURN_IF_ERROR(CheckPresent(io, chunk.id, &is_there));
  if (is_there) {
    catalog_.CountDuplicate();
    *stored = true;
    return Status();
  }
  QUIRE_RETURN_IF_ERROR(MakeFolders(io, chunk.id));
  Draft draft;
  QUIRE_RETURN_IF_ERROR(CreateDraft(io, false, &draft));
  Status status = WriteDraft(io, chunk, draft);
  bool appeared = false;
  if (status.ok()) status = Publish(io, chunk, draft, &appeared);
  DropDraft(io, draft);
  QUIRE_RETURN_IF_ERROR(status);
  *stored = !appeared;  // otherwise it is looked at once more: is it sound?
  if (*stored && syncs()) {
    QUIRE_RETURN_IF_ERROR(SyncFolders(io, chunk.id));
    catalog_.SetSeen(chunk.id, {.verified = true, .synced = true});
  }
  return Status();
}

Status DiskFolder::Store(FileSession& io, const NewChunk& chunk) {
  bool has_freed = false;
  for (int attempt = 0; attempt < kStoreAttempts; ++attempt) {
    bool stored = false;
    const Status status = StoreOnce(io, chunk, &stored);
    if (stored || io.work().abandoned()) return status;
    if (status.code() == StatusCode::kFull) {
      if (has_freed || !FreeDisk(io, chunk.header.total_bytes).ok()) return status;
      has_freed = true;
    } else if (status.code() == StatusCode::kNotFound) {
      // Somebody removed folders, or all of it.
      const std::lock_guard<std::mutex> guard(names_mutex_);
      made_folders_.clear();
      synced_folders_.clear();
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
    std::ranges::copy(chunk->bytes().subspan(static_cast<size_t>(section.offset),
                                             static_cast<size_t>(section.length)),
                      writer.section(static_cast<int64_t>(s)).begin());
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
  Draft draft;
  QUIRE_RETURN_IF_ERROR(CreateDraft(io, true, &draft));
  Status status = WriteDraft(io, changed, draft);
  if (status.ok()) status = Replace(io, changed, old.stat.inode, draft);
  DropDraft(io, draft);
  QUIRE_RETURN_IF_ERROR(status);
  return syncs() ? SyncFolders(io, id) : Status();
}

Status DiskFolder::Replace(FileSession& io, const NewChunk& chunk, uint64_t inode, Draft& draft) {
  const Lock lock(*this, io);
  QUIRE_RETURN_IF_ERROR(lock.status());
  FileStat stat;
  const std::string path = PathOf(chunk.id);
  if (const int error = io.Stat(path, &stat); error != 0) return FileError(error, path);
  if (stat.inode != inode)
    return Status(StatusCode::kNotFound, "disk: " + path + " was changed by another process");
  if (const int error = io.Rename(draft.path, path); error != 0)
    return FileError(error, "cannot replace " + path);
  draft.path.clear();
  if (stat.size != chunk.header.total_bytes)
    QUIRE_RETURN_IF_ERROR(AddUsage(io, chunk.header.total_bytes - stat.size));
  catalog_.SetExpiry(chunk.id, chunk.header.expires_ms);
  return Status();
}

// ---------------------------------------------------------------------- removing

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
  return AddUsage(io, -stat.size);
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
    const Lock lock(*this, io);
    QUIRE_RETURN_IF_ERROR(lock.status());
    QUIRE_RETURN_IF_ERROR(RemoveFile(io, id, why, &removed));
  }
  if (removed && syncs()) QUIRE_RETURN_IF_ERROR(SyncFolders(io, id));
  return removed;
}

Result<int64_t> DiskFolder::Clear(FileSession& io, const Digest& fingerprint,
                                  const ChunkKey& root) {
  std::vector<Found> found;
  QUIRE_RETURN_IF_ERROR(WalkRoot(io, fingerprint, root, &found));
  int64_t count = 0;
  for (const Found& file : found) {
    QUIRE_ASSIGN_OR_RETURN(const bool removed, Remove(io, file.id, ChunkEvent::Kind::kRemoved));
    count += removed ? 1 : 0;
  }
  return count;
}

void DiskFolder::RemoveExpired(FileSession& io, const ChunkId& id, uint64_t inode) {
  const Lock lock(*this, io);
  FileStat stat;
  if (!lock.status().ok() || io.Stat(PathOf(id), &stat) != 0 || stat.inode != inode) return;
  bool removed = false;
  (void)RemoveFile(io, id, ChunkEvent::Kind::kExpired, &removed);  // else the next reader does
}

void DiskFolder::Quarantine(FileSession& io, const ChunkId& id, uint64_t inode) {
  const Lock lock(*this, io);
  if (lock.status().ok()) QuarantineFile(io, id, inode);
}

void DiskFolder::QuarantineFile(FileSession& io, const ChunkId& id, uint64_t inode) {
  const std::string path = PathOf(id);
  FileStat stat;
  if (io.Stat(path, &stat) != 0 || stat.inode != inode) return;
  const int64_t bytes_max = catalog_.bytes_max() / kQuarantineShare;
  int error = -EFBIG;
  if (stat.size <= bytes_max) {
    TrimQuarantine(io, kQuarantineFilesMax - 1, bytes_max - stat.size);
    const std::string name =
        std::to_string(clock_->WallMs()) + "-" + std::string(layout::ChunkName(id.key));
    error = io.Rename(path,
                      options_.directory + "/" + std::string(layout::kQuarantineName) + "/" + name);
  }
  if (error != 0) error = io.Unlink(path);
  if (error != 0) return;
  catalog_.Erase(id);
  catalog_.Tell(ChunkEvent::Kind::kCorrupt, id.key);
  (void)AddUsage(io, -stat.size);  // who next finds the sum in disagreement counts anew
}

// Names begin with the time, so the first ones are the oldest.
int64_t DiskFolder::TrimQuarantine(FileSession& io, int64_t files_max, int64_t bytes_max) {
  const std::string folder = options_.directory + "/" + std::string(layout::kQuarantineName) + "/";
  std::vector<std::string> names;
  if (io.List(folder, &names) != 0) return 0;
  std::ranges::sort(names, std::ranges::greater());
  int64_t files = 0, bytes = 0, freed = 0;
  for (const std::string& name : names) {
    FileStat stat;
    if (io.Stat(folder + name, &stat) != 0 || stat.is_directory) continue;
    ++files;
    bytes += stat.size;
    if (files <= files_max && bytes <= bytes_max) continue;
    if (io.Unlink(folder + name) == 0) freed += stat.size;
  }
  return freed;
}

// ---------------------------------------------------------------------- room

Status DiskFolder::MakeRoom(FileSession& io, const ChunkKey& root, int64_t bytes) {
  bool is_fresh = false;  // the catalog is what the folder holds
  for (;;) {
    QUIRE_ASSIGN_OR_RETURN(const int64_t used, Usage(io));
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
  QUIRE_ASSIGN_OR_RETURN(const std::vector<Found> damaged, ScanFiles(io));
  for (const Found& file : damaged) QuarantineFile(io, file.id, file.stat.inode);
  return CountUsage(io).status();
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
  const Lock lock(*this, io);
  QUIRE_RETURN_IF_ERROR(lock.status());
  const auto victims = catalog_.VictimsToFree(bytes);
  if (!victims || victims->empty())
    return Status(StatusCode::kFull, "disk: it is full, and there is nothing to evict");
  return Evict(io, *victims, ChunkEvent::Kind::kEvicted).status();
}

// ---------------------------------------------------------------------- upkeep

Status DiskFolder::WalkLeaf(FileSession& io, const std::string& path, const Digest& fingerprint,
                            const ChunkKey& root, std::vector<Found>* found) const {
  std::vector<std::string> names;
  const int error = io.List(path, &names);
  if (error == -ENOENT || error == -ENOTDIR) return Status();
  if (error != 0) return FileError(error, "cannot list " + path);
  for (const std::string& name : names) {
    const auto key = layout::ParseChunkName(name);
    Found file;
    if (!key || io.Stat(path + "/" + name, &file.stat) != 0) continue;
    file.id = {fingerprint, root, *key};
    // The catalog knows the whole fingerprint, the path its begin.
    if (const auto known = catalog_.FindKey(*key)) file.id = *known;
    found->push_back(file);
  }
  return Status();
}

Status DiskFolder::WalkRoot(FileSession& io, const Digest& fingerprint, const ChunkKey& root,
                            std::vector<Found>* found) const {
  const std::string path = layout::RootFolder(options_.directory, fingerprint, root);
  std::vector<std::string> leaves;
  const int error = io.List(path, &leaves);
  if (error == -ENOENT || error == -ENOTDIR) return Status();
  if (error != 0) return FileError(error, "cannot list " + path);
  for (const std::string& leaf : leaves) {
    if (!layout::IsLeafName(leaf)) continue;
    QUIRE_RETURN_IF_ERROR(WalkLeaf(io, path + "/" + leaf, fingerprint, root, found));
    if (io.work().abandoned()) return Status(StatusCode::kTimeout, "disk: nobody waits any more");
  }
  return Status();
}

Result<std::vector<DiskFolder::Found>> DiskFolder::Walk(FileSession& io) const {
  std::vector<Found> found;
  std::vector<std::string> passports;
  if (const int error = io.List(options_.directory, &passports); error != 0)
    return FileError(error, "cannot list " + options_.directory);
  for (const std::string& passport : passports) {
    const auto fingerprint = layout::ParseShortDigest(passport);
    if (!fingerprint) continue;
    std::vector<std::string> roots;
    const std::string path = options_.directory + "/" + passport;
    const int error = io.List(path, &roots);
    if (error == -ENOENT || error == -ENOTDIR) continue;
    if (error != 0) return FileError(error, "cannot list " + path);
    for (const std::string& name : roots) {
      const auto root = layout::ParseShortDigest(name);
      if (root) QUIRE_RETURN_IF_ERROR(WalkRoot(io, *fingerprint, ChunkKey{*root}, &found));
    }
  }
  return found;
}

Status DiskFolder::LearnHeader(FileSession& io, const Found& found, std::vector<Found>* damaged) {
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

Result<std::vector<DiskFolder::Found>> DiskFolder::ScanFiles(FileSession& io) {
  QUIRE_ASSIGN_OR_RETURN(std::vector<Found> found, Walk(io));
  // The oldest first, so that they are the first to be evicted.
  std::ranges::stable_sort(found, {}, [](const Found& file) { return file.stat.modified_ms; });
  std::vector<Found> damaged;
  std::set<ChunkKey> present;
  for (const Found& file : found) {
    present.insert(file.id.key);
    if (catalog_.FindKey(file.id.key)) continue;
    QUIRE_RETURN_IF_ERROR(LearnHeader(io, file, &damaged));
    if (io.work().abandoned()) return Status(StatusCode::kTimeout, "disk: the scan was given up");
  }
  for (const IndexedChunk& chunk : catalog_.All()) {
    FileStat stat;
    if (present.contains(chunk.id.key) || io.Stat(PathOf(chunk.id), &stat) != -ENOENT) continue;
    if (catalog_.Erase(chunk.id)) catalog_.Tell(ChunkEvent::Kind::kRemoved, chunk.id.key);
  }
  return damaged;
}

Status DiskFolder::Scan(FileSession& io) {
  QUIRE_ASSIGN_OR_RETURN(const std::vector<Found> damaged, ScanFiles(io));
  const Lock lock(*this, io);
  QUIRE_RETURN_IF_ERROR(lock.status());
  for (const Found& file : damaged) QuarantineFile(io, file.id, file.stat.inode);
  QUIRE_ASSIGN_OR_RETURN(const int64_t used, Usage(io));
  if (used != catalog_.bytes()) QUIRE_RETURN_IF_ERROR(CountUsage(io).status());
  return Status();
}

Result<int64_t> DiskFolder::Verify(FileSession& io) {
  QUIRE_ASSIGN_OR_RETURN(const std::vector<Found> found, Walk(io));
  int64_t damaged = 0;
  for (const Found& file : found) {
    damaged += ReadWhole(io, file.id).status().code() == StatusCode::kCorrupt ? 1 : 0;
    if (io.work().abandoned()) return Status(StatusCode::kTimeout, "disk: nobody waits any more");
  }
  return damaged;
}

int64_t DiskFolder::RemoveLeftovers(FileSession& io) {
  const std::string folder = options_.directory + "/" + std::string(layout::kTemporaryName) + "/";
  std::vector<std::string> names;
  if (io.List(folder, &names) != 0) return 0;
  int64_t freed = 0;
  for (const std::string& name : names) {
    OpenFile file;
    FileStat stat;
    if (io.Open(folder + name, OpenMode::kReadWrite, &file) != 0) continue;
    const bool is_dead = io.StatFile(file.get(), &stat) == 0 && io.Lock(file.get(), false) == 0;
    if (is_dead && io.Unlink(folder + name) == 0) freed += stat.size;
  }
  return freed;
}

Result<int64_t> DiskFolder::CollectGarbage(FileSession& io) {
  int64_t freed = RemoveLeftovers(io);
  QUIRE_RETURN_IF_ERROR(Scan(io));
  const int64_t before = catalog_.bytes();
  std::set<ChunkKey> roots = {ChunkKey{}};
  for (const IndexedChunk& chunk : catalog_.All()) roots.insert(chunk.id.root);
  const Lock lock(*this, io);
  QUIRE_RETURN_IF_ERROR(lock.status());
  QUIRE_RETURN_IF_ERROR(DropExpired(io));
  for (const ChunkKey& root : roots) {
    if (const auto victims = catalog_.Victims(root, 0))
      QUIRE_RETURN_IF_ERROR(Evict(io, *victims, ChunkEvent::Kind::kEvicted).status());
  }
  QUIRE_RETURN_IF_ERROR(CountUsage(io).status());
  freed += TrimQuarantine(io, kQuarantineFilesMax, catalog_.bytes_max() / kQuarantineShare);
  return freed + before - catalog_.bytes();
}

}  // namespace quire
