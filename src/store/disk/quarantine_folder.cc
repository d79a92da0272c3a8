#include "store/disk/quarantine_folder.h"

#include <algorithm>
#include <cerrno>
#include <functional>
#include <vector>

#include "store/disk/disk_layout.h"

namespace quire {

QuarantineFolder::QuarantineFolder(const std::string& directory, Clock& clock)
    : folder_(directory + "/" + std::string(disk_layout::kQuarantineName) + "/"), clock_(clock) {}

int QuarantineFolder::Take(FileSession& io, const std::string& path, const ChunkKey& key,
                           int64_t bytes, int64_t tier_bytes_max) {
  const int64_t bytes_max = tier_bytes_max / kShare;
  int error = -EFBIG;
  if (bytes <= bytes_max) {
    TrimTo(io, kFilesMax - 1, bytes_max - bytes);
    error = io.Rename(
        path, folder_ + std::to_string(clock_.WallMs()) + "-" + disk_layout::ChunkName(key));
  }
  return error == 0 ? 0 : io.Unlink(path);
}

int64_t QuarantineFolder::Trim(FileSession& io, int64_t tier_bytes_max) const {
  return TrimTo(io, kFilesMax, tier_bytes_max / kShare);
}

// Names begin with the time, so the first ones are the oldest.
int64_t QuarantineFolder::TrimTo(FileSession& io, int64_t files_max, int64_t bytes_max) const {
  std::vector<std::string> names;
  if (io.List(folder_, &names) != 0) return 0;
  std::ranges::sort(names, std::ranges::greater());
  int64_t files = 0, bytes = 0, freed = 0;
  for (const std::string& name : names) {
    FileStat stat;
    if (io.Stat(folder_ + name, &stat) != 0 || stat.is_directory) continue;
    ++files;
    bytes += stat.size;
    if (files <= files_max && bytes <= bytes_max) continue;
    if (io.Unlink(folder_ + name) == 0) freed += stat.size;
  }
  return freed;
}

}  // namespace quire
