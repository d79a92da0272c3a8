// QuarantineFolder: damaged chunk files of a folder, kept so that the disk's failure can be looked
// into.
//
// Invariant: after Take and Trim there are at most 16 files with at most a sixteenth of the tier's
// bytes in it; the oldest go first. Only the holder of the folder's lock calls either.
#ifndef QUIRE_STORE_DISK_QUARANTINE_FOLDER_H_
#define QUIRE_STORE_DISK_QUARANTINE_FOLDER_H_

#include <cstdint>
#include <string>

#include "quire/chunk.h"
#include "quire/seams.h"
#include "store/disk/file_session.h"

namespace quire {

class QuarantineFolder {
 public:
  // `directory`: of the store. The clock must outlive it.
  QuarantineFolder(const std::string& directory, Clock& clock);

  // The damaged file of the chunk with this key is no longer at `path`: it was moved here, or
  // removed if it is too large to be kept or cannot be moved. 0 or a negated error number.
  // `tier_bytes_max`: what the tier may have.
  int Take(FileSession& io, const std::string& path, const ChunkKey& key, int64_t bytes,
           int64_t tier_bytes_max);
  // Removes what is too much; how many bytes that frees.
  int64_t Trim(FileSession& io, int64_t tier_bytes_max) const;

 private:
  static constexpr int64_t kFilesMax = 16;
  static constexpr int64_t kShare = 16;  // of the tier's bytes

  int64_t TrimTo(FileSession& io, int64_t files_max, int64_t bytes_max) const;

  const std::string folder_;
  Clock& clock_;
};

}  // namespace quire

#endif  // QUIRE_STORE_DISK_QUARANTINE_FOLDER_H_
