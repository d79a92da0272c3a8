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

ChunkFolders::ChunkFolders(std::string directory) : directory_(std::move(directory)) {}

Status ChunkFolders::Make(FileSession& io, const ChunkId& id) {
  const std::string leaf = layout::LeafFolder(directory_, id);
  {
    const std::lock_guard<std::mutex> guard(mutex_);
    if (made_.contains(leaf)) return Status();
  }
  if (const int error = MakePath(io, leaf); error != 0)
    return FileError(error, "cannot make the directory " + leaf);
  const std::lock_guard<std::mutex> guard(mutex_);
  made_.insert(leaf);
  return Status();
}

Status ChunkFolders::Sync(FileSession& io, const ChunkId& id) {
  const std::string leaf = layout::LeafFolder(directory_, id);
  std::vector<std::string> paths = {leaf};
  {
    const std::lock_guard<std::mutex> guard(mutex_);
    for (std::string path = leaf; path != directory_; path = ParentOf(path))
      if (!synced_.contains(path)) paths.push_back(ParentOf(path));
  }
  for (const std::string& path : paths) {
    if (const int error = io.SyncDirectory(path); error != 0)
      return FileError(error, "cannot sync " + path);
  }
  const std::lock_guard<std::mutex> guard(mutex_);
  for (std::string path = leaf; path != directory_; path = ParentOf(path)) synced_.insert(path);
  return Status();
}

void ChunkFolders::Forget() {
  const std::lock_guard<std::mutex> guard(mutex_);
  made_.clear();
  synced_.clear();
}

}  // namespace quire
