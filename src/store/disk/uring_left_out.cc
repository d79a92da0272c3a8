// Queues in a build without io_uring: as where the kernel refuses it.
#include "store/disk/file_system.h"

namespace quire {

std::unique_ptr<FileQueue> CreateUringQueue(FileSystem&, size_t) { return nullptr; }

}  // namespace quire
