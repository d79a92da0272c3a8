// The folders that chunk files stand in, made and synced once per process. Threads may share it.
//
// Invariant: a folder that it holds to be made or synced was so when that was noted; Forget, when
// another process has removed some.
#ifndef QUIRE_STORE_DISK_CHUNK_FOLDERS_H_
#define QUIRE_STORE_DISK_CHUNK_FOLDERS_H_

#include <mutex>
#include <set>
#include <string>

#include "quire/status.h"
#include "store/disk/file_session.h"
#include "store/tier/chunk_tier.h"

namespace quire {

// The folder that a path is in.
std::string ParentOf(const std::string& path);
// Makes a folder with all that is missing above it; 0 or a negated error number.
int MakePath(FileSession& io, const std::string& path);

class ChunkFolders {
 public:
  explicit ChunkFolders(std::string directory);

  // The folder of the chunk's file, and those above it.
  Status Make(FileSession& io, const ChunkId& id);
  // The file's entry, and once per process those of the folders above: a process that made them may
  // have died before it synced them.
  Status Sync(FileSession& io, const ChunkId& id);
  void Forget();

 private:
  const std::string directory_;
  std::mutex mutex_;  // guards the members below
  std::set<std::string> made_, synced_;
};

}  // namespace quire

#endif  // QUIRE_STORE_DISK_CHUNK_FOLDERS_H_
