#include "store/disk/chunk_file_walk.h"

#include <cerrno>
#include <utility>

#include "store/disk/disk_layout.h"

namespace quire {
namespace {

namespace layout = disk_layout;

Status WalkLeaf(FileSession& io, const std::string& path, const DiskCatalog& catalog,
                const Digest& fingerprint, const ChunkKey& root, std::vector<FoundChunkFile>* found,
                std::vector<std::string>* empty) {
  std::vector<std::string> names;
  const int error = io.List(path, &names);
  if (error == -ENOENT || error == -ENOTDIR) return Status();
  if (error != 0) return FileError(error, "cannot list " + path);
  if (names.empty() && empty != nullptr) empty->push_back(path);
  for (const std::string& name : names) {
    const auto key = layout::ParseChunkName(name);
    FoundChunkFile file;
    if (!key || io.Stat(path + "/" + name, &file.stat) != 0) continue;
    file.id = {fingerprint, root, *key};
    // The catalog knows the whole fingerprint, the path its begin.
    if (const auto known = catalog.FindKey(*key)) file.id = *known;
    found->push_back(file);
  }
  return Status();
}

}  // namespace

Status WalkRoot(FileSession& io, const std::string& directory, const DiskCatalog& catalog,
                const Digest& fingerprint, const ChunkKey& root, std::vector<FoundChunkFile>* found,
                std::vector<std::string>* empty) {
  const std::string path = layout::RootFolder(directory, fingerprint, root);
  std::vector<std::string> leaves;
  const int error = io.List(path, &leaves);
  if (error == -ENOENT || error == -ENOTDIR) return Status();
  if (error != 0) return FileError(error, "cannot list " + path);
  if (leaves.empty() && empty != nullptr) empty->push_back(path);
  for (const std::string& leaf : leaves) {
    if (!layout::IsLeafName(leaf)) continue;
    QUIRE_RETURN_IF_ERROR(
        WalkLeaf(io, path + "/" + leaf, catalog, fingerprint, root, found, empty));
    if (io.work().abandoned()) return Status(StatusCode::kTimeout, "disk: nobody waits any more");
  }
  return Status();
}

Status VisitRoots(FileSession& io, const std::string& directory, const RootVisitor& visit) {
  std::vector<std::string> passports;
  if (const int error = io.List(directory, &passports); error != 0)
    return FileError(error, "cannot list " + directory);
  for (const std::string& passport : passports) {
    const auto fingerprint = layout::ParseShortDigest(passport);
    if (!fingerprint) continue;
    std::vector<std::string> roots;
    const std::string path = directory + "/" + passport;
    const int error = io.List(path, &roots);
    if (error == -ENOENT || error == -ENOTDIR) continue;
    if (error != 0) return FileError(error, "cannot list " + path);
    for (const std::string& name : roots) {
      const auto root = layout::ParseShortDigest(name);
      if (!root) continue;
      QUIRE_ASSIGN_OR_RETURN(const bool goes_on, visit(*fingerprint, ChunkKey{*root}));
      if (!goes_on) return Status();
    }
  }
  return Status();
}

Result<std::vector<FoundChunkFile>> WalkChunkFiles(FileSession& io, const std::string& directory,
                                                   const DiskCatalog& catalog,
                                                   std::vector<std::string>* empty) {
  std::vector<FoundChunkFile> found;
  const auto walk = [&](const Digest& fingerprint, const ChunkKey& root) -> Result<bool> {
    QUIRE_RETURN_IF_ERROR(WalkRoot(io, directory, catalog, fingerprint, root, &found, empty));
    return true;
  };
  QUIRE_RETURN_IF_ERROR(VisitRoots(io, directory, walk));
  return found;
}

}  // namespace quire
