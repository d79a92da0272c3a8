// TemporaryFiles: the files of a folder that are being written. Nobody reads one before it gets the
// name of what it holds. Threads may share it.
//
// Invariants:
// - A file with a name in the temporary folder is locked while its writer lives. One that is not
//   locked is a dead process's, and RemoveLeftovers takes it away.
// - No name is given twice, by any process: what is done to a name is done to the file that was
//   made with it.
#ifndef QUIRE_STORE_DISK_TEMPORARY_FILES_H_
#define QUIRE_STORE_DISK_TEMPORARY_FILES_H_

#include <atomic>
#include <cstdint>
#include <string>
#include <string_view>

#include "quire/seams.h"
#include "quire/status.h"
#include "store/disk/file_session.h"

namespace quire {

// A file being written: nameless, or with a name in the temporary folder.
struct NewFile {
  OpenFile file{};
  std::string path{};  // empty: nameless
};

class TemporaryFiles {
 public:
  // `directory`: of the store. The clock must outlive it.
  TemporaryFiles(const std::string& directory, Clock& clock);

  // A nameless file, where the file system has such, unless it has to have a name.
  Status Create(FileSession& io, bool named, NewFile* to);
  // Closes the file, and removes the name if it still has that one.
  static void Drop(FileSession& io, NewFile& file);
  // Makes a file of this text and gives it the place of `path`, in `folder`, at once. `syncs`: both
  // survive a loss of power.
  Status WriteText(FileSession& io, const std::string& folder, const std::string& path,
                   std::string_view text, bool syncs);
  // Removes the files of dead processes; how many bytes that frees.
  int64_t RemoveLeftovers(FileSession& io) const;

 private:
  std::string NewPath();

  const std::string folder_;
  Clock& clock_;
  const uint64_t instance_;  // random: processes share the folder
  std::atomic<int64_t> next_number_ = 0;
  std::atomic<bool> nameless_works_ = true;
};

}  // namespace quire

#endif  // QUIRE_STORE_DISK_TEMPORARY_FILES_H_
