#include "store/disk/chunk_folders.h"

#include <cerrno>
#include <utility>
#include <vector>

#include "store/disk/disk_layout.h"

namespace quire {

namespace layout = disk_layout;

std::string ParentOf(const std::string& path) {
  const size_t slash = path.find_last_of('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

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

ChunkFolders::ChunkFolders(std::string directory, Clock& clock)
    : directory_(std::move(directory)), clock_(clock) {}

bool ChunkFolders::IsNoted(const Notes& notes, const std::string& path) const {
  const auto at = notes.find(path);
  return at != notes.end() && clock_.SteadyNs() - at->second < kBelievedNs;
}

Status ChunkFolders::Make(FileSession& io, const ChunkId& id) {
  const std::string leaf = layout::LeafFolder(directory_, id);
  {
    const std::lock_guard<std::mutex> guard(mutex_);
    if (IsNoted(made_, leaf)) return Status();
  }
  if (const int error = MakePath(io, leaf); error != 0)
    return FileError(error, "cannot make the directory " + leaf);
  const std::lock_guard<std::mutex> guard(mutex_);
  made_[leaf] = clock_.SteadyNs();
  return Status();
}

Status ChunkFolders::Sync(FileSession& io, const ChunkId& id) {
  const std::string leaf = layout::LeafFolder(directory_, id);
  const int64_t now_ns = clock_.SteadyNs();
  std::vector<std::string> paths = {leaf};
  {
    const std::lock_guard<std::mutex> guard(mutex_);
    for (std::string path = leaf; path != directory_; path = ParentOf(path))
      if (!IsNoted(synced_, path)) paths.push_back(ParentOf(path));
  }
  for (const std::string& path : paths) {
    if (const int error = io.SyncDirectory(path); error != 0)
      return FileError(error, "cannot sync " + path);
  }
  const std::lock_guard<std::mutex> guard(mutex_);
  for (std::string path = leaf; path != directory_; path = ParentOf(path)) {
    if (!IsNoted(synced_, path)) synced_[path] = now_ns;  // what was not synced now keeps its note
  }
  return Status();
}

void ChunkFolders::Forget() {
  const std::lock_guard<std::mutex> guard(mutex_);
  made_.clear();
  synced_.clear();
}

void ChunkFolders::RemoveEmpty(FileSession& io, const std::vector<std::string>& folders) {
  for (const std::string& folder : folders) {
    FileStat stat;
    if (io.Stat(folder, &stat) != 0 || clock_.WallMs() - stat.modified_ms < kEmptyMsMin) continue;
    io.RemoveDirectory(folder);  // a process may have put something there: then it stays
  }
  const std::lock_guard<std::mutex> guard(mutex_);
  for (Notes* notes : {&made_, &synced_})
    std::erase_if(*notes, [&](const auto& note) { return !IsNoted(*notes, note.first); });
}

}  // namespace quire
