// The weights of a model folder: model.safetensors, the shards that model.safetensors.index.json
// names, or model.gguf.
#ifndef QUIRE_MODEL_WEIGHTS_CHECKPOINT_H_
#define QUIRE_MODEL_WEIGHTS_CHECKPOINT_H_

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "model/weights/safetensors.h"
#include "quire/status.h"
#include "tensor/host_memory.h"

namespace quire {

// One tensor with its bytes in the mapped file.
struct CheckpointTensor {
  const StoredTensor* stored;        // of the checkpoint
  std::span<const std::byte> bytes;  // aligned to nothing: a file may begin its data anywhere
  std::string_view file;             // path, of the checkpoint
  std::shared_ptr<const MappedFile> mapping;  // whose bytes they are

  // The bytes, which stay as long as somebody holds them.
  std::shared_ptr<const std::byte> Share() const { return {mapping, bytes.data()}; }

  // "dir/model.safetensors: tensor "x"", for messages.
  std::string Name() const;
};

// The files stay mapped as long as the checkpoint or a share of a tensor lives; they must not be
// changed meanwhile.
//
// A file of the folder may be a symbolic link (the cache of the Hugging Face hub links every file
// into ../../blobs), but what it leads to must be a regular file. Names that come from inside a
// file (the index) are plain names in this folder.
class Checkpoint {
 public:
  // NotFound: no form is there, or a shard is missing. Corrupt, TooLarge: see
  // ParseSafetensors and ParseGguf.
  static Result<Checkpoint> Open(const std::string& directory);

  Checkpoint(Checkpoint&&) = default;
  Checkpoint& operator=(Checkpoint&&) = default;

  // NotFound names the folder and the tensor.
  Result<CheckpointTensor> Find(std::string_view name) const;
  bool Has(std::string_view name) const;

  // Lets the operating system take back the memory after a tensor. Its bytes stay readable: they
  // come from the file again.
  static void Release(const CheckpointTensor& tensor) noexcept;

 private:
  struct File {
    std::string path;
    std::shared_ptr<const MappedFile> mapping;
    StoredTensors contents;
  };

  Checkpoint() = default;
  Status AddFile(std::string path);
  Status AddShards(const std::string& directory, const std::string& index_path);
  Status CheckIndex(const std::string& index_path) const;
  const File* FileOf(std::string_view name) const;

  std::string directory_;
  std::vector<File> files_;
  // Sharded: which file holds a tensor, ascending by name. Empty for a single file.
  std::vector<std::pair<std::string, size_t>> index_;
};

}  // namespace quire

#endif  // QUIRE_MODEL_WEIGHTS_CHECKPOINT_H_
