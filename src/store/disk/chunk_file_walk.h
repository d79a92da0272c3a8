// The chunk files of a folder, those of other processes too. Files and folders that others remove
// meanwhile are not there; what cannot be listed is an error.
#ifndef QUIRE_STORE_DISK_CHUNK_FILE_WALK_H_
#define QUIRE_STORE_DISK_CHUNK_FILE_WALK_H_

#include <functional>
#include <string>
#include <vector>

#include "quire/chunk.h"
#include "quire/status.h"
#include "store/disk/disk_catalog.h"
#include "store/disk/file_session.h"
#include "store/tier/chunk_tier.h"

namespace quire {

struct FoundChunkFile {
  ChunkId id{};
  FileStat stat{};
};

// Visits the folders of all roots until a visit fails or says false.
using RootVisitor = std::function<Result<bool>(const Digest& fingerprint, const ChunkKey& root)>;
Status VisitRoots(FileSession& io, const std::string& directory, const RootVisitor& visit);

// Adds the chunk files of one root, and the folders of it that are empty unless `empty` is null.
Status WalkRoot(FileSession& io, const std::string& directory, const DiskCatalog& catalog,
                const Digest& fingerprint, const ChunkKey& root, std::vector<FoundChunkFile>* found,
                std::vector<std::string>* empty = nullptr);

// All chunk files. The fingerprint is whole where the catalog knows the chunk, else as short as in
// the folder's name. `empty`: as with WalkRoot. Timeout: the work was given up.
Result<std::vector<FoundChunkFile>> WalkChunkFiles(FileSession& io, const std::string& directory,
                                                   const DiskCatalog& catalog,
                                                   std::vector<std::string>* empty = nullptr);

}  // namespace quire

#endif  // QUIRE_STORE_DISK_CHUNK_FILE_WALK_H_
