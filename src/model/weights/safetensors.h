// The safetensors format: eight bytes with the length of a header, the header (JSON: name -> dtype,
// shape, data_offsets), and the bytes of the tensors. What is read here comes from outside, so
// every number is checked before it sizes or indexes anything, and the file is taken as a whole or
// not at all.
#ifndef QUIRE_MODEL_WEIGHTS_SAFETENSORS_H_
#define QUIRE_MODEL_WEIGHTS_SAFETENSORS_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kernels/quantised_weights.h"
#include "quire/status.h"
#include "quire/tensor.h"

namespace quire {

// Limits of one file. Above them the answer is TooLarge.
inline constexpr int64_t kMaxSafetensorsHeaderBytes = 100'000'000;  // the format's own limit
inline constexpr int64_t kMaxSafetensorsTensors = 1'000'000;        // 1000 layers of 1000 experts
inline constexpr size_t kMaxTensorNameBytes = 1024;
inline constexpr size_t kMaxTensorRank = 64;  // what PyTorch can make
// One file of a sharded checkpoint is some 5 GB, so this is 20 TB; each shard is a mapping of the
// process.
inline constexpr size_t kMaxShards = 4096;

// One tensor as its file describes it.
struct StoredTensor {
  std::string name;
  std::string_view type_name;  // "F32", "BF16", ...; static storage
  std::optional<DType> dtype;  // null: an element type that Quire does not compute with
  std::vector<int64_t> shape;
  int64_t begin = 0;  // bytes [begin, end) of the file's data
  int64_t end = 0;
  // Only in GGUF files: rows in blocks of codes; dtype is null then.
  std::optional<WeightFormat> format = std::nullopt;
  // > 0: the rows of each head (of that size) are stored as rotary pairs
  // (kernels/quantised_weights.h).
  int64_t rotary_head_rows = 0;
  // Only in GGUF files: what is added to each value of a vector to get that of the checkpoint.
  float value_offset = 0;

  // "BF16 [32, 64]", for messages.
  std::string TypeAndShape() const;
};

// "[32, 64]", for messages.
std::string ShapeText(std::span<const int64_t> shape);

// What one file of weights holds.
struct StoredTensors {
  std::vector<StoredTensor> tensors;  // ascending by name, which are distinct
  int64_t data_offset = 0;            // of the file: where the data begins

  const StoredTensor* Find(std::string_view name) const;  // null: absent
};

// Checks a whole file. Corrupt, TooLarge: `file` (for messages), the tensor and what is wrong with
// it. After success the tensors tile the data from its first byte to its last, without holes or
// overlaps, and each has the size that its type and shape give.
Result<StoredTensors> ParseSafetensors(std::span<const std::byte> bytes, std::string_view file);

// The "weight_map" of a model.safetensors.index.json: tensor -> file, ascending by tensor. File
// names are plain: they end in
// ".safetensors", do not begin with a dot and hold no separator, so that they cannot name anything
// outside the folder.
struct SafetensorsIndex {
  std::vector<std::string> files;                       // distinct, ascending
  std::vector<std::pair<std::string, size_t>> tensors;  // name, index into files
};
Result<SafetensorsIndex> ParseSafetensorsIndex(std::string_view text, std::string_view file);

// A name from a file in double quotes, for messages: at most 120 bytes of it, control characters as
// \xNN.
std::string QuotedName(std::string_view name);

}  // namespace quire

#endif  // QUIRE_MODEL_WEIGHTS_SAFETENSORS_H_
