#include "model/weights/checkpoint.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>

#include "model/weights/gguf.h"

namespace quire {
namespace {

constexpr const char* kSingleFile = "/model.safetensors";
constexpr const char* kGgufFile = "/model.gguf";
constexpr const char* kIndexFile = "/model.safetensors.index.json";

bool IsMissing(const Result<MappedFile>& file) {
  return !file.ok() && file.status().code() == StatusCode::kNotFound;
}

// What a repository has in place of a large file until it is fetched.
Status CheckIsNotLfsPointer(const MappedFile& file, const std::string& path) {
  if (!file.text().starts_with("version https://git-lfs.github.com/spec/")) return Status();
  return Status(StatusCode::kCorrupt, path +
                                          ": is a Git LFS pointer, not the file itself; fetch it "
                                          "with: git lfs pull");
}

}  // namespace

std::string CheckpointTensor::Name() const {
  return std::string(file) + ": tensor " + QuotedName(stored->name);
}

Result<Checkpoint> Checkpoint::Open(const std::string& directory) {
  Checkpoint checkpoint;
  checkpoint.directory_ = directory;
  const std::string single_path = directory + kSingleFile;
  const std::string index_path = directory + kIndexFile;
  if (IsMissing(MappedFile::Open(single_path))) {
    if (IsMissing(MappedFile::Open(index_path))) {
      const std::string gguf_path = directory + kGgufFile;
      if (!IsMissing(MappedFile::Open(gguf_path))) {
        QUIRE_RETURN_IF_ERROR(checkpoint.AddFile(gguf_path));
        return checkpoint;
      }
      return Status(StatusCode::kNotFound,
                    directory +
                        ": there is neither model.safetensors nor model.safetensors.index.json, "
                        "and no model.gguf; "
                        "give a Hugging Face model folder with safetensors weights");
    }
    QUIRE_RETURN_IF_ERROR(checkpoint.AddShards(directory, index_path));
  } else {
    QUIRE_RETURN_IF_ERROR(checkpoint.AddFile(single_path));
  }
  return checkpoint;
}

Status Checkpoint::AddFile(std::string path) {
  QUIRE_ASSIGN_OR_RETURN(MappedFile mapping, MappedFile::Open(path));
  QUIRE_RETURN_IF_ERROR(CheckIsNotLfsPointer(mapping, path));
  QUIRE_ASSIGN_OR_RETURN(StoredTensors contents, path.ends_with(kGgufFile)
                                                     ? ParseGguf(mapping.bytes(), path)
                                                     : ParseSafetensors(mapping.bytes(), path));
  files_.push_back({std::move(path), std::make_shared<const MappedFile>(std::move(mapping)),
                    std::move(contents)});
  return Status();
}

Status Checkpoint::AddShards(const std::string& directory, const std::string& index_path) {
  QUIRE_ASSIGN_OR_RETURN(const MappedFile text, MappedFile::Open(index_path));
  QUIRE_RETURN_IF_ERROR(CheckIsNotLfsPointer(text, index_path));
  QUIRE_ASSIGN_OR_RETURN(SafetensorsIndex index, ParseSafetensorsIndex(text.text(), index_path));
  index_ = std::move(index.tensors);
  for (const std::string& file : index.files) {
    QUIRE_RETURN_IF_ERROR(AddFile(directory + "/" + file));
  }
  return CheckIndex(index_path);
}

// Every tensor is in the file that the index names, and in no other: two copies could differ.
Status Checkpoint::CheckIndex(const std::string& index_path) const {
  for (const auto& [name, file] : index_) {
    if (files_[file].contents.Find(name) == nullptr) {
      return Status(StatusCode::kCorrupt, index_path + ": tensor " + QuotedName(name) +
                                              " is not in " + files_[file].path +
                                              "; fetch the index and its files again");
    }
  }
  std::vector<std::pair<std::string_view, const File*>> names;
  for (const File& file : files_) {
    for (const StoredTensor& tensor : file.contents.tensors) names.emplace_back(tensor.name, &file);
  }
  std::ranges::sort(names);
  const auto twice =
      std::ranges::adjacent_find(names, {}, [](const auto& entry) { return entry.first; });
  if (twice == names.end()) return Status();
  return Status(StatusCode::kCorrupt, index_path + ": tensor " + QuotedName(twice->first) +
                                          " is in two files, " + twice->second->path + " and " +
                                          std::next(twice)->second->path);
}

const Checkpoint::File* Checkpoint::FileOf(std::string_view name) const {
  if (index_.empty()) return files_.empty() ? nullptr : &files_.front();
  const auto found =
      std::ranges::lower_bound(index_, name, {}, [](const auto& entry) { return entry.first; });
  return found == index_.end() || found->first != name ? nullptr : &files_[found->second];
}

bool Checkpoint::Has(std::string_view name) const {
  const File* const file = FileOf(name);
  return file != nullptr && file->contents.Find(name) != nullptr;
}

Result<CheckpointTensor> Checkpoint::Find(std::string_view name) const {
  if (!Has(name)) {
    return Status(StatusCode::kNotFound,
                  directory_ + ": tensor " + QuotedName(name) +
                      " is in none of the files with weights; the checkpoint does not fit its "
                      "config.json");
  }
  const File& file = *FileOf(name);
  const StoredTensor* const stored = file.contents.Find(name);
  const auto begin = static_cast<size_t>(file.contents.data_offset + stored->begin);
  const auto size = static_cast<size_t>(stored->end - stored->begin);
  return CheckpointTensor{stored, file.mapping->bytes().subspan(begin, size), file.path,
                          file.mapping};
}

void Checkpoint::Release(const CheckpointTensor& tensor) noexcept {
  if (tensor.bytes.empty()) return;
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<uintptr_t>(tensor.bytes.data()) / page * page;
  const auto end = reinterpret_cast<uintptr_t>(tensor.bytes.data()) + tensor.bytes.size();
  // Pages that a neighbour shares come back from the file when they are read: the mapping is
  // private and never written. A refusal costs memory, not correctness.
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
}

}  // namespace quire
