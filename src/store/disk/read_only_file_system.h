// A FileSystem that changes nothing: for a store that somebody only looks into.
#ifndef QUIRE_STORE_DISK_READ_ONLY_FILE_SYSTEM_H_
#define QUIRE_STORE_DISK_READ_ONLY_FILE_SYSTEM_H_

#include <memory>

#include "store/disk/file_system.h"

namespace quire {

// Reads through `files`. Every call that would change a file, a folder or a name returns -EROFS;
// kReadWrite opens for reading, and a lock is granted without asking for it: a reader is in no
// writer's way.
std::shared_ptr<FileSystem> CreateReadOnlyFileSystem(std::shared_ptr<FileSystem> files);

}  // namespace quire

#endif  // QUIRE_STORE_DISK_READ_ONLY_FILE_SYSTEM_H_
