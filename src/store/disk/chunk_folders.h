// The folders that chunk files stand in, made and synced once in a while. Threads may share it.
//
// Invariants:
// - A folder that it holds to be made or synced was so when that was noted; Forget, when another
//   process has removed some.
// - A note is believed for half of the time for which a folder must be empty before anybody removes
//   it. So a folder that is removed and made again, by a process that syncs nothing, is synced by
//   one that does.
#ifndef QUIRE_STORE_DISK_CHUNK_FOLDERS_H_
#define QUIRE_STORE_DISK_CHUNK_FOLDERS_H_

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "quire/seams.h"
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
  // The clock must outlive it.
  ChunkFolders(std::string directory, Clock& clock);

  // The folder of the chunk's file, and those above it.
  Status Make(FileSession& io, const ChunkId& id);
  // The file's entry, and once in a while those of the folders above: a process that made them may
  // have died before it synced them.
  Status Sync(FileSession& io, const ChunkId& id);
  void Forget();
  // Removes those of these folders that have long been empty, and drops notes that nobody believes
  // any more. By the holder of the folder's lock, so that no chunk gets a name meanwhile.
  void RemoveEmpty(FileSession& io, const std::vector<std::string>& folders);

 private:
  using Notes = std::map<std::string, int64_t>;  // when, by path

  static constexpr int64_t kEmptyMsMin = 3'600'000;
  static constexpr int64_t kBelievedNs = kEmptyMsMin / 2 * 1'000'000;

  bool IsNoted(const Notes& notes, const std::string& path) const;

  const std::string directory_;
  Clock& clock_;
  std::mutex mutex_;  // guards the members below
  Notes made_, synced_;
};

}  // namespace quire

#endif  // QUIRE_STORE_DISK_CHUNK_FOLDERS_H_
