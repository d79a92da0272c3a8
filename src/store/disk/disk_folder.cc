#include "store/disk/disk_folder.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "base/clock.h"
#include "store/disk/disk_layout.h"

namespace quire {
namespace {

namespace layout = disk_layout;

// NotFound unless the directory has what every store's folder has from its beginning on.
Status CheckIsStore(FileSession& io, const std::string& directory) {
  constexpr std::string_view kHint =
      "; an engine makes a folder a store when it is given the folder as kv_dir";
  FileStat stat;
  int error = io.Stat(directory, &stat);
  if (error == -ENOENT || (error == 0 && !stat.is_directory)) {
    return Status(StatusCode::kNotFound, "disk: " + directory + " is " +
                                             (error == 0 ? "not a folder" : "not there") +
                                             std::string(kHint));
  }
  for (const std::string_view name :
       {layout::kTemporaryName, layout::kQuarantineName, layout::kLockName}) {
    if (error == 0) error = io.Stat(directory + "/" + std::string(name), &stat);
    if (error == 0 && stat.is_directory == (name == layout::kLockName)) error = -ENOENT;
  }
  if (error == -ENOENT) {
    return Status(
        StatusCode::kNotFound,
        "disk: " + directory + " is not the folder of a chunk store" + std::string(kHint));
  }
  return error == 0 ? Status() : FileError(error, "cannot look into " + directory);
}

// Syncs the directory and those above it: the process that made them may have died before it
// synced them. Directories that this user may not read were not made by it.
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

bool ProbeDirect(FileSession& io, const std::string& path) {
  OpenFile file;
  return io.Open(path, OpenMode::kReadWrite, &file) == 0 && io.SetDirect(file.get()) == 0;
}

// The text of a passport file, cut at what one may have; or a negated error number.
int64_t ReadPassport(FileSession& io, const std::string& path, std::string* text) {
  OpenFile file;
  FileStat stat;
  if (const int error = io.Open(path, OpenMode::kRead, &file); error != 0) return error;
  if (const int error = io.StatFile(file.get(), &stat); error != 0) return error;
  text->assign(static_cast<size_t>(std::min(stat.size, layout::kManifestBytesMax)), '\0');
  const int64_t count =
      io.ReadFull(file.get(), std::as_writable_bytes(std::span(text->data(), text->size())), 0);
  return std::min<int64_t>(count, 0);
}

}  // namespace

DiskFolder::DiskFolder(std::shared_ptr<FileSystem> files, std::shared_ptr<Clock> clock,
                       DiskTierOptions options, EvictionKind eviction, std::string mac_key,
                       int64_t bytes_max, OpenFile lock_file, bool direct_works)
    : files_(std::move(files)),
      clock_(std::move(clock)),
      options_(std::move(options)),
      mac_key_(std::move(mac_key)),
      catalog_(eviction, bytes_max),
      transfers_(files_),
      lock_(options_.directory, std::move(lock_file), catalog_),
      temporary_(options_.directory, *clock_),
      quarantine_(options_.directory, *clock_),
      folders_(options_.directory, *clock_),
      direct_works_(direct_works) {}

Result<std::unique_ptr<DiskFolder>> DiskFolder::Open(FileSession& io,
                                                     std::shared_ptr<FileSystem> files,
                                                     std::shared_ptr<Clock> clock,
                                                     DiskTierOptions options, EvictionKind eviction,
                                                     std::string mac_key) {
  const std::string& directory = options.directory;
  if (options.use != FolderUse::kCreate) QUIRE_RETURN_IF_ERROR(CheckIsStore(io, directory));
  for (const std::string_view name :
       {std::string_view(), layout::kTemporaryName, layout::kQuarantineName}) {
    if (options.use == FolderUse::kLook) break;
    const std::string path = name.empty() ? directory : directory + "/" + std::string(name);
    if (const int error = MakePath(io, path); error != 0)
      return FileError(error, "cannot make the directory " + path);
  }
  const std::string lock_path = directory + "/" + std::string(layout::kLockName);
  OpenFile lock_file;
  if (const int error = io.Open(lock_path, OpenMode::kReadWrite, &lock_file); error != 0)
    return FileError(error, "cannot open " + lock_path);
  if (options.durability == Durability::kSync && options.use != FolderUse::kLook)
    QUIRE_RETURN_IF_ERROR(SyncPath(io, directory));
  int64_t bytes_max = options.bytes_max;
  if (bytes_max == 0) {
    const int64_t free = io.FreeBytes(directory);
    if (free < 0) return FileError(free, "cannot ask for the free space of " + directory);
    // A tenth stays free for others. What the folder has already is as good as free.
    bytes_max = (free + FolderLock::Peek(io, lock_file)) / 10 * 9;
  }
  const bool direct_works = ProbeDirect(io, lock_path);
  std::unique_ptr<DiskFolder> folder(new DiskFolder(
      std::move(files), std::move(clock), std::move(options), eviction, std::move(mac_key),
      std::max<int64_t>(bytes_max, 1), std::move(lock_file), direct_works));
  if (folder->options_.use != FolderUse::kLook) folder->temporary_.RemoveLeftovers(io);
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

// ---------------------------------------------------------------------- passports

Result<std::vector<std::string>> DiskFolder::Passports(FileSession& io) const {
  std::vector<std::string> names;
  if (const int error = io.List(options_.directory, &names); error != 0)
    return FileError(error, "cannot list " + options_.directory);
  std::vector<std::string> passports;
  for (const std::string& name : names) {
    std::string text;
    const std::string folder = options_.directory + "/" + name;
    if (!layout::ParseShortDigest(name) ||
        ReadPassport(io, folder + "/" + std::string(layout::kManifestName), &text) != 0)
      continue;
    const auto manifest = layout::ParseManifest(text);
    if (manifest.ok()) passports.emplace_back(manifest->passport_json);
  }
  return passports;
}

Status DiskFolder::AddPassport(FileSession& io, const Digest& fingerprint,
                               const std::string& passport_json) {
  const std::string folder = layout::PassportFolder(options_.directory, fingerprint);
  const std::string path = folder + "/" + std::string(layout::kManifestName);
  const FolderLock::Hold lock(lock_, io);
  QUIRE_RETURN_IF_ERROR(lock.status());
  if (const int error = MakePath(io, folder); error != 0)
    return FileError(error, "cannot make the directory " + folder);
  std::string text;
  const int64_t error = ReadPassport(io, path, &text);
  if (error != 0 && error != -ENOENT) return FileError(error, "cannot read " + path);
  if (error == 0) {
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
  return temporary_.WriteText(io, folder, path, layout::EncodeManifest(fingerprint, passport_json),
                              syncs());
}

}  // namespace quire
