// FolderLock: the lock file of a chunk store's folder: the right to change which chunk files there
// are, and the sum of their bytes, which is written in it.
//
// Invariants:
// - At most one thread of all processes holds the lock.
// - The sum is written by its holder alone, with each change. A process that dies in between leaves
//   a sum that is wrong by one file: a caller that looks through the files writes it again. One
//   whose write fails counts before it takes the sum for true.
#ifndef QUIRE_STORE_DISK_FOLDER_LOCK_H_
#define QUIRE_STORE_DISK_FOLDER_LOCK_H_

#include <cstdint>
#include <mutex>
#include <optional>
#include <string>

#include "quire/status.h"
#include "store/disk/disk_catalog.h"
#include "store/disk/file_session.h"

namespace quire {

class FolderLock {
 public:
  // `file`: the lock file of this directory. The catalog must outlive it.
  FolderLock(std::string directory, OpenFile file, const DiskCatalog& catalog);

  // Waits for the lock and holds it, unless `status` is an error.
  class Hold {
   public:
    Hold(FolderLock& lock, FileSession& io);
    ~Hold();
    Hold(const Hold&) = delete;
    Hold& operator=(const Hold&) = delete;
    const Status& status() const { return status_; }

   private:
    std::unique_lock<std::mutex> threads_;  // flock() does not separate those of one process
    FileSystem& files_;
    const int file_;
    Status status_;
  };

  // ---- The sum in bytes. REQUIRES: a Hold.
  // As it is written; counted if nothing valid is.
  Result<int64_t> Sum(FileSession& io);
  // Reads the size of every chunk file, and writes that down.
  Result<int64_t> Count(FileSession& io);
  // What the caller has counted.
  Status Set(FileSession& io, int64_t bytes);
  // Files of this number of bytes have come, or gone if it is negative. They are counted themselves
  // where the sum is not valid.
  Status Add(FileSession& io, int64_t bytes);

  // What a lock file that is open says, with or without a Hold; 0 if nothing valid.
  static int64_t Peek(FileSession& io, const OpenFile& file);

 private:
  // Nothing if the sum is not valid, or known to be wrong.
  Result<std::optional<int64_t>> Read(FileSession& io);

  const std::string directory_;
  const OpenFile file_;
  const DiskCatalog& catalog_;
  std::mutex threads_;
  bool is_wrong_ = false;  // a write has failed
};

}  // namespace quire

#endif  // QUIRE_STORE_DISK_FOLDER_LOCK_H_
