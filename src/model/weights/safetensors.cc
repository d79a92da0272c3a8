#include "model/weights/safetensors.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>

namespace quire {
namespace {

constexpr size_t kLengthBytes = 8;  // little-endian, before the header
// "__metadata__" and the index's "metadata" hold a few strings; a limit keeps a hostile header from
// costing more than its size.
constexpr size_t kMaxMetadataEntries = 10'000;

struct ElementType {
  std::string_view name;
  int64_t bits;
  std::optional<DType> dtype;
};

// All types that the format has; those without a DType can be stored beside the weights that are
// read.
constexpr ElementType kElementTypes[] = {
    {"F32", 32, DType::kF32},
    {"F16", 16, DType::kF16},
    {"BF16", 16, DType::kBF16},
    {"BOOL", 8, std::nullopt},
    {"U8", 8, DType::kU8},
    {"I8", 8, std::nullopt},
    {"F8_E5M2", 8, std::nullopt},
    {"F8_E4M3", 8, std::nullopt},
    {"F8_E8M0", 8, std::nullopt},
    {"F8_E4M3FNUZ", 8, std::nullopt},
    {"F8_E5M2FNUZ", 8, std::nullopt},
    {"F4", 4, std::nullopt},
    {"F6_E2M3", 6, std::nullopt},
    {"F6_E3M2", 6, std::nullopt},
    {"I16", 16, std::nullopt},
    {"U16", 16, std::nullopt},
    {"I32", 32, DType::kI32},
    {"U32", 32, std::nullopt},
    {"I64", 64, DType::kI64},
    {"U64", 64, std::nullopt},
    {"F64", 64, std::nullopt},
    {"C64", 64, std::nullopt},
};

const ElementType* FindElementType(std::string_view name) {
  const auto* const found = std::ranges::find(kElementTypes, name, &ElementType::name);
  return found == std::end(kElementTypes) ? nullptr : found;
}

Status Corrupt(std::string_view file, std::string_view why) {
  return Status(StatusCode::kCorrupt,
                std::string(file) + ": " + std::string(why) +
                    "; the file is damaged or no safetensors file, fetch it again");
}

// Both parsers take JSON events instead of a document: memory is bounded by what is kept, and
// nothing recurses.
class EventHandler : public nlohmann::json_sax<nlohmann::json> {
 public:
  const std::string& error() const { return error_; }
  bool too_large() const { return too_large_; }

  bool null() override { return Unexpected("null"); }
  bool boolean(bool) override { return Unexpected("a boolean"); }
  bool number_integer(number_integer_t) override { return Unexpected("a negative number"); }
  bool number_unsigned(number_unsigned_t) override { return Unexpected("a number"); }
  bool number_float(number_float_t, const string_t&) override {
    return Unexpected("a number that is no integer below 2^64");
  }
  bool string(string_t&) override { return Unexpected("a string"); }
  bool binary(binary_t&) override { return Unexpected("binary data"); }
  bool start_object(size_t) override { return Unexpected("an object"); }
  bool start_array(size_t) override { return Unexpected("an array"); }
  bool parse_error(size_t position, const std::string&,
                   const nlohmann::detail::exception&) override {
    return Fail("it is not valid JSON at byte " + std::to_string(position));
  }

 protected:
  bool Fail(std::string why) {
    error_ = std::move(why);
    return false;
  }
  bool FailTooLarge(std::string why) {
    too_large_ = true;
    return Fail(std::move(why));
  }
  virtual std::string Where() const = 0;
  bool Unexpected(std::string_view what) {
    return Fail(Where() + ": " + std::string(what) + " has no place there");
  }

 private:
  std::string error_;
  bool too_large_ = false;
};

// {"__metadata__": {string: string}, name: {"dtype": string, "shape": [n...], "data_offsets":
// [begin, end]}, ...}
class HeaderHandler final : public EventHandler {
 public:
  explicit HeaderHandler(int64_t data_bytes) : data_bytes_(data_bytes) {}

  std::vector<StoredTensor> TakeTensors() { return std::move(tensors_); }

  bool start_object(size_t) override {
    switch (state_) {
      case State::kStart:
        return Enter(State::kNames);
      case State::kTensorValue:
        return Enter(State::kTensor);
      case State::kMetadataValue:
        return Enter(State::kMetadata);
      case State::kNames:
      case State::kTensor:
      case State::kType:
      case State::kShapeValue:
      case State::kShape:
      case State::kOffsetsValue:
      case State::kOffsets:
      case State::kMetadata:
      case State::kMetadataString:
      case State::kEnd:
        break;
    }
    return Unexpected("an object");
  }

  bool key(string_t& name) override {
    if (state_ == State::kNames) return TensorName(std::move(name));
    if (state_ == State::kMetadata) {
      metadata_keys_.push_back(std::move(name));
      if (metadata_keys_.size() > kMaxMetadataEntries) {
        return FailTooLarge("__metadata__ has more than " + std::to_string(kMaxMetadataEntries) +
                            " entries");
      }
      return Enter(State::kMetadataString);
    }
    return Field(name);
  }

  bool end_object() override {
    if (state_ == State::kTensor) return FinishTensor();
    if (state_ == State::kMetadata) {
      std::ranges::sort(metadata_keys_);
      const auto twice = std::ranges::adjacent_find(metadata_keys_);
      if (twice != metadata_keys_.end()) {
        return Fail("__metadata__ has the key " + QuotedName(*twice) + " twice");
      }
      return Enter(State::kNames);
    }
    return Enter(State::kEnd);
  }

  bool string(string_t& value) override {
    if (state_ == State::kMetadataString) return Enter(State::kMetadata);
    if (state_ != State::kType) return Unexpected("a string");
    type_ = FindElementType(value);
    if (type_ == nullptr) return Fail(Where() + ": unknown dtype " + QuotedName(value));
    return Enter(State::kTensor);
  }

  bool start_array(size_t) override {
    if (state_ == State::kShapeValue) return Enter(State::kShape);
    if (state_ == State::kOffsetsValue) return Enter(State::kOffsets);
    return Unexpected("an array");
  }

  bool number_unsigned(number_unsigned_t value) override {
    const bool in_shape = state_ == State::kShape;
    if (!in_shape && state_ != State::kOffsets) return Unexpected("a number");
    std::vector<int64_t>& list = in_shape ? tensor_.shape : offsets_;
    if (list.size() >= (in_shape ? kMaxTensorRank : 2)) {
      return Fail(Where() +
                  (in_shape ? ": more than 64 dimensions" : ": more than two data_offsets"));
    }
    if (value > uint64_t{std::numeric_limits<int64_t>::max()}) {
      return Fail(Where() + ": " + std::to_string(value) + " is beyond any file");
    }
    list.push_back(static_cast<int64_t>(value));
    return true;
  }

  bool end_array() override { return Enter(State::kTensor); }

 private:
  enum class State {
    kStart,
    kNames,
    kTensorValue,
    kTensor,
    kType,
    kShapeValue,
    kShape,
    kOffsetsValue,
    kOffsets,
    kMetadataValue,
    kMetadata,
    kMetadataString,
    kEnd,
  };

  bool Enter(State state) {
    state_ = state;
    return true;
  }

  std::string Where() const override {
    switch (state_) {
      case State::kStart:
      case State::kNames:
      case State::kEnd:
        return "the header";
      case State::kMetadataValue:
      case State::kMetadata:
      case State::kMetadataString:
        return "__metadata__";
      case State::kTensorValue:
      case State::kTensor:
      case State::kType:
      case State::kShapeValue:
      case State::kShape:
      case State::kOffsetsValue:
      case State::kOffsets:
        break;
    }
    return "tensor " + QuotedName(tensor_.name);
  }

  bool TensorName(std::string name) {
    if (name == "__metadata__") {
      if (has_metadata_) return Fail("__metadata__ stands twice");
      has_metadata_ = true;
      return Enter(State::kMetadataValue);
    }
    if (name.size() > kMaxTensorNameBytes) {
      return FailTooLarge("a tensor's name has " + std::to_string(name.size()) +
                          " bytes, the limit is " + std::to_string(kMaxTensorNameBytes) + ": " +
                          QuotedName(name));
    }
    if (tensors_.size() >= static_cast<size_t>(kMaxSafetensorsTensors)) {
      return FailTooLarge("more than " + std::to_string(kMaxSafetensorsTensors) + " tensors");
    }
    tensor_ = StoredTensor();
    tensor_.name = std::move(name);
    type_ = nullptr;
    offsets_.clear();
    has_type_ = has_shape_ = has_offsets_ = false;
    return Enter(State::kTensorValue);
  }

  bool Field(const std::string& name) {
    if (name == "dtype") return FieldOnce(has_type_, name, State::kType);
    if (name == "shape") return FieldOnce(has_shape_, name, State::kShapeValue);
    if (name == "data_offsets") return FieldOnce(has_offsets_, name, State::kOffsetsValue);
    return Fail(Where() + ": unknown field " + QuotedName(name));
  }

  bool FieldOnce(bool& seen, const std::string& name, State next) {
    if (seen) return Fail(Where() + ": the field " + name + " stands twice");
    seen = true;
    return Enter(next);
  }

  bool FinishTensor() {
    if (!has_type_ || !has_shape_ || !has_offsets_) {
      return Fail(Where() + ": dtype, shape and data_offsets are not all there");
    }
    if (offsets_.size() != 2) return Fail(Where() + ": data_offsets are not two numbers");
    tensor_.type_name = type_->name;
    tensor_.dtype = type_->dtype;
    tensor_.begin = offsets_[0];
    tensor_.end = offsets_[1];
    if (!CheckBytes()) return false;
    tensors_.push_back(std::move(tensor_));
    return Enter(State::kNames);
  }

  bool CheckBytes() {
    if (tensor_.begin > tensor_.end || tensor_.end > data_bytes_) {
      return Fail(Where() + ": data_offsets [" + std::to_string(tensor_.begin) + ", " +
                  std::to_string(tensor_.end) + "] are not within the file's " +
                  std::to_string(data_bytes_) + " bytes of data");
    }
    int64_t bits = type_->bits;
    for (const int64_t size : tensor_.shape) {
      if (__builtin_mul_overflow(bits, size, &bits)) {
        return Fail(Where() + ": the size of " + tensor_.TypeAndShape() + " overflows");
      }
    }
    const int64_t bytes = tensor_.end - tensor_.begin;
    if (bits % 8 != 0 || bits / 8 != bytes) {
      return Fail(Where() + ": " + tensor_.TypeAndShape() + " needs " + std::to_string(bits) +
                  " bits, its data_offsets hold " + std::to_string(bytes) + " bytes");
    }
    return true;
  }

  const int64_t data_bytes_;
  State state_ = State::kStart;
  std::vector<StoredTensor> tensors_;
  std::vector<std::string> metadata_keys_;
  bool has_metadata_ = false;
  // The tensor that is being read.
  StoredTensor tensor_;
  const ElementType* type_ = nullptr;
  std::vector<int64_t> offsets_;
  bool has_type_ = false;
  bool has_shape_ = false;
  bool has_offsets_ = false;
};

// {"weight_map": {name: file}, ...}; what else stands beside it is skipped.
class IndexHandler final : public EventHandler {
 public:
  std::vector<std::pair<std::string, std::string>> TakeEntries() { return std::move(entries_); }
  bool has_map() const { return has_map_; }

  bool null() override { return Skip(); }
  bool boolean(bool) override { return Skip(); }
  bool number_integer(number_integer_t) override { return Skip(); }
  bool number_unsigned(number_unsigned_t) override { return Skip(); }
  bool number_float(number_float_t, const string_t&) override { return Skip(); }

  bool key(string_t& name) override {
    if (in_map_) {
      if (name.size() > kMaxTensorNameBytes) {
        return FailTooLarge("a tensor's name has " + std::to_string(name.size()) +
                            " bytes, the limit is " + std::to_string(kMaxTensorNameBytes));
      }
      entries_.emplace_back(std::move(name), std::string());
      if (entries_.size() > static_cast<size_t>(kMaxSafetensorsTensors)) {
        return FailTooLarge("more than " + std::to_string(kMaxSafetensorsTensors) + " tensors");
      }
      return true;
    }
    if (depth_ != 1) return true;
    map_is_next_ = name == "weight_map";
    if (map_is_next_ && has_map_) return Fail("weight_map stands twice");
    return true;
  }

  bool string(string_t& value) override {
    if (!in_map_) return Skip();
    entries_.back().second = std::move(value);
    return true;
  }

  bool start_object(size_t) override {
    if (in_map_) return Unexpected("an object");
    if (map_is_next_) {
      has_map_ = in_map_ = true;
      map_is_next_ = false;
    }
    return Open();
  }

  bool end_object() override {
    in_map_ = false;
    --depth_;
    return true;
  }

  bool start_array(size_t) override {
    if (in_map_ || map_is_next_ || depth_ == 0) return Unexpected("an array");
    return Open();
  }

  bool end_array() override {
    --depth_;
    return true;
  }

 private:
  static constexpr int kMaxDepth = 64;

  std::string Where() const override {
    return in_map_ || map_is_next_ ? "weight_map" : "the index";
  }

  bool Open() {
    if (++depth_ > kMaxDepth) return Fail("it is nested deeper than 64 levels");
    return true;
  }

  bool Skip() {
    if (in_map_ || map_is_next_ || depth_ == 0) return Unexpected("this value");
    return true;
  }

  std::vector<std::pair<std::string, std::string>> entries_;
  int depth_ = 0;
  bool map_is_next_ = false;
  bool in_map_ = false;
  bool has_map_ = false;
};

Status Read(std::string_view text, std::string_view file, EventHandler& handler) {
  // As in ParseJson, which keeps a document and is not used here: the library takes a zero byte for
  // the end of its input, and what stands after it would go unseen.
  const size_t zero = text.find('\0');
  if (zero != text.npos) {
    return Corrupt(file, "it is not valid JSON at byte " + std::to_string(zero + 1));
  }
  if (nlohmann::json::sax_parse(text.begin(), text.end(), &handler)) return Status();
  if (handler.too_large()) {
    return Status(StatusCode::kTooLarge, std::string(file) + ": " + handler.error());
  }
  return Corrupt(file, handler.error());
}

// Offsets in order must go from 0 to the end of the data, each tensor where the one before ended.
Status CheckTiling(std::vector<StoredTensor>& tensors, int64_t data_bytes, std::string_view file) {
  std::ranges::sort(tensors, [](const StoredTensor& a, const StoredTensor& b) {
    return a.begin != b.begin ? a.begin < b.begin : a.end < b.end;
  });
  int64_t covered = 0;
  for (const StoredTensor& tensor : tensors) {
    if (tensor.begin != covered) {
      const char* what = tensor.begin < covered ? "offsets overlap those of another tensor"
                                                : "unused bytes before it";
      return Corrupt(file, "tensor " + QuotedName(tensor.name) + ": " + what + " (begins at " +
                               std::to_string(tensor.begin) + ", the data so far ends at " +
                               std::to_string(covered) + ")");
    }
    covered = tensor.end;
  }
  if (covered != data_bytes) {
    return Corrupt(file, "the tensors end at byte " + std::to_string(covered) + " of " +
                             std::to_string(data_bytes) + " bytes of data");
  }
  return Status();
}

Status CheckNamesDistinct(std::vector<StoredTensor>& tensors, std::string_view file) {
  std::ranges::sort(tensors, {}, &StoredTensor::name);
  const auto twice = std::ranges::adjacent_find(tensors, {}, &StoredTensor::name);
  if (twice == tensors.end()) return Status();
  return Corrupt(file, "tensor " + QuotedName(twice->name) + " stands twice");
}

// The header's text, within its limits and within the file.
Result<std::string_view> FindHeader(std::span<const std::byte> bytes, std::string_view file) {
  if (bytes.size() < kLengthBytes) {
    return Corrupt(file, "it has " + std::to_string(bytes.size()) + " bytes, too few for a header");
  }
  uint64_t length = 0;
  for (size_t i = 0; i < kLengthBytes; ++i) {
    length |= uint64_t{std::to_integer<uint8_t>(bytes[i])} << (8 * i);
  }
  if (length > uint64_t{kMaxSafetensorsHeaderBytes}) {
    return Status(StatusCode::kTooLarge,
                  std::string(file) + ": a header of " + std::to_string(length) +
                      " bytes is over the format's limit of " +
                      std::to_string(kMaxSafetensorsHeaderBytes) + "; this is no safetensors file");
  }
  if (length > bytes.size() - kLengthBytes) {
    return Corrupt(file, "the header has " + std::to_string(length) + " bytes, the file only " +
                             std::to_string(bytes.size()));
  }
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()) + kLengthBytes, length);
  // The format says so: it tells safetensors from other files and leaves no room for a byte order
  // mark.
  if (text.empty() || text.front() != '{') return Corrupt(file, "the header does not begin with {");
  return text;
}

Status CheckShardName(const std::string& name, std::string_view file) {
  constexpr std::string_view kSuffix = ".safetensors";
  constexpr size_t kMaxFileName = 255;  // of the file systems in use
  const bool plain = name.find_first_of(std::string_view("/\\\0", 3)) == name.npos &&
                     name.size() > kSuffix.size() && name.size() <= kMaxFileName &&
                     name.ends_with(kSuffix) && name.front() != '.';
  if (plain) return Status();
  return Corrupt(file, "weight_map names the file " + QuotedName(name) +
                           ", which is no plain *.safetensors name in this folder");
}

}  // namespace

std::string ShapeText(std::span<const int64_t> shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  }
  return text + "]";
}

std::string StoredTensor::TypeAndShape() const {
  return std::string(type_name) + " " + ShapeText(shape);
}

const StoredTensor* StoredTensors::Find(std::string_view name) const {
  const auto found = std::ranges::lower_bound(tensors, name, {}, &StoredTensor::name);
  return found == tensors.end() || found->name != name ? nullptr : &*found;
}

Result<StoredTensors> ParseSafetensors(std::span<const std::byte> bytes, std::string_view file) {
  QUIRE_ASSIGN_OR_RETURN(const std::string_view header, FindHeader(bytes, file));
  const int64_t data_offset = static_cast<int64_t>(kLengthBytes + header.size());
  const int64_t data_bytes = static_cast<int64_t>(bytes.size()) - data_offset;
  HeaderHandler handler(data_bytes);
  QUIRE_RETURN_IF_ERROR(Read(header, file, handler));
  StoredTensors contents{.tensors = handler.TakeTensors(), .data_offset = data_offset};
  QUIRE_RETURN_IF_ERROR(CheckTiling(contents.tensors, data_bytes, file));
  QUIRE_RETURN_IF_ERROR(CheckNamesDistinct(contents.tensors, file));
  return contents;
}

Result<SafetensorsIndex> ParseSafetensorsIndex(std::string_view text, std::string_view file) {
  if (text.size() > static_cast<size_t>(kMaxSafetensorsHeaderBytes)) {
    return Status(StatusCode::kTooLarge,
                  std::string(file) + ": an index of " + std::to_string(text.size()) +
                      " bytes is over the limit of " + std::to_string(kMaxSafetensorsHeaderBytes));
  }
  IndexHandler handler;
  QUIRE_RETURN_IF_ERROR(Read(text, file, handler));
  if (!handler.has_map()) return Corrupt(file, "it has no weight_map");
  std::vector<std::pair<std::string, std::string>> entries = handler.TakeEntries();
  std::ranges::sort(entries);
  SafetensorsIndex index;
  for (const auto& [tensor, shard] : entries) index.files.push_back(shard);
  std::ranges::sort(index.files);
  index.files.erase(std::unique(index.files.begin(), index.files.end()), index.files.end());
  if (index.files.size() > kMaxShards) {
    return Status(StatusCode::kTooLarge, std::string(file) + ": " +
                                             std::to_string(index.files.size()) +
                                             " files, the limit is " + std::to_string(kMaxShards));
  }
  for (const std::string& shard : index.files) QUIRE_RETURN_IF_ERROR(CheckShardName(shard, file));
  for (auto& [tensor, shard] : entries) {
    if (!index.tensors.empty() && index.tensors.back().first == tensor) {
      return Corrupt(file, "weight_map has the tensor " + QuotedName(tensor) + " twice");
    }
    const auto place = std::ranges::lower_bound(index.files, shard);
    index.tensors.emplace_back(std::move(tensor), place - index.files.begin());
  }
  return index;
}

std::string QuotedName(std::string_view name) {
  constexpr size_t kMaxShown = 120;
  constexpr char kHex[] = "0123456789abcdef";
  std::string text = "\"";
  for (const char c : name.substr(0, kMaxShown)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x20 && byte != 0x7F) {
      text += c;
    } else {
      text += {'\\', 'x', kHex[byte >> 4], kHex[byte & 15]};
    }
  }
  if (name.size() > kMaxShown) text += "...";
  return text + "\"";
}

}  // namespace quire
