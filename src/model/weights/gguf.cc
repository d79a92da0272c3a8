#include "model/weights/gguf.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/round_up.h"

namespace quire {
namespace {

// Limits, far above real files; those of the importer (python/quire/importer/gguf_reader.py).
constexpr uint64_t kMaxMetadata = 65'536;
constexpr uint64_t kMaxTensors = 1'000'000;
constexpr uint64_t kMaxStringBytes = uint64_t{16} << 20;
constexpr uint64_t kMaxArrayValues = 4'000'000;
constexpr int kMaxArrayDepth = 4;
constexpr uint32_t kMaxDimensions = 4;
constexpr int64_t kMaxAlignment = int64_t{1} << 20;
constexpr int64_t kDefaultAlignment = 32;

enum ValueType : uint32_t {
  kUint8 = 0,
  kInt8 = 1,
  kUint16 = 2,
  kInt16 = 3,
  kUint32 = 4,
  kInt32 = 5,
  kFloat32 = 6,
  kBool = 7,
  kString = 8,
  kArray = 9,
  kUint64 = 10,
  kInt64 = 11,
  kFloat64 = 12,
};
constexpr uint64_t kValueBytes[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
constexpr uint32_t kUnsignedTypes[] = {kUint8, kUint16, kUint32, kUint64};
constexpr uint32_t kSignedTypes[] = {kInt8, kInt16, kInt32, kInt64};

struct GgufType {
  uint32_t number;
  std::string_view name;
  std::optional<DType> dtype;
};
// Beside those of WeightFormat.
constexpr GgufType kGgufTypes[] = {
    {0, "F32", DType::kF32},      {1, "F16", DType::kF16},       {30, "BF16", DType::kBF16},
    {9, "Q8_1", std::nullopt},    {15, "Q8_K", std::nullopt},    {16, "IQ2_XXS", std::nullopt},
    {17, "IQ2_XS", std::nullopt}, {18, "IQ3_XXS", std::nullopt}, {19, "IQ1_S", std::nullopt},
    {21, "IQ3_S", std::nullopt},  {22, "IQ2_S", std::nullopt},   {29, "IQ1_M", std::nullopt},
    {34, "TQ1_0", std::nullopt},  {35, "TQ2_0", std::nullopt},
};
constexpr GgufType kOtherType = {0, "a type that is not read", std::nullopt};

const GgufType& TypeOf(uint32_t number) {
  const auto* const found = std::ranges::find(kGgufTypes, number, &GgufType::number);
  return found == std::end(kGgufTypes) ? kOtherType : *found;
}

// -------------------------------------------------------------------------------------------------
// names

struct NamePair {
  std::string_view stored;
  std::string_view name;
};
constexpr NamePair kModelNames[] = {
    {"token_embd", "model.embed_tokens"}, {"output_norm", "model.norm"}, {"output", "lm_head"}};
constexpr NamePair kLayerNames[] = {{"attn_norm", "input_layernorm"},
                                    {"attn_q", "self_attn.q_proj"},
                                    {"attn_k", "self_attn.k_proj"},
                                    {"attn_v", "self_attn.v_proj"},
                                    {"attn_output", "self_attn.o_proj"},
                                    {"attn_q_norm", "self_attn.q_norm"},
                                    {"attn_k_norm", "self_attn.k_norm"},
                                    {"ffn_norm", "post_attention_layernorm"},
                                    {"ffn_gate", "mlp.gate_proj"},
                                    {"ffn_up", "mlp.up_proj"},
                                    {"ffn_down", "mlp.down_proj"},
                                    {"ffn_gate_inp", "mlp.gate"},
                                    {"ffn_gate_inp_shexp", "mlp.shared_expert_gate"},
                                    {"ffn_gate_shexp", "mlp.shared_expert.gate_proj"},
                                    {"ffn_up_shexp", "mlp.shared_expert.up_proj"},
                                    {"ffn_down_shexp", "mlp.shared_expert.down_proj"}};
// A tensor of all experts of a layer: what each has, and with a second name what it has behind it,
// as many rows.
struct ExpertNames {
  std::string_view stored;
  std::string_view first;
  std::string_view second = "";
};
constexpr ExpertNames kExpertNames[] = {{"ffn_gate_exps", "gate_proj"},
                                        {"ffn_up_exps", "up_proj"},
                                        {"ffn_down_exps", "down_proj"},
                                        {"ffn_gate_up_exps", "gate_proj", "up_proj"}};
// Names for the llama architecture, whose models with experts are Mixtral's.
constexpr ExpertNames kMixtralExpertNames[] = {{"ffn_gate_exps", "w1"},
                                               {"ffn_up_exps", "w3"},
                                               {"ffn_down_exps", "w2"},
                                               {"ffn_gate_up_exps", "w1", "w3"}};
constexpr NamePair kMixtralNames[] = {{"ffn_gate_inp", "block_sparse_moe.gate"}};
// One tensor where others have two or three.
constexpr NamePair kPhi3Names[] = {{"attn_qkv", "self_attn.qkv_proj"},
                                   {"ffn_up", "mlp.gate_up_proj"}};
constexpr NamePair kDeepseekNames[] = {{"attn_q_a", "self_attn.q_a_proj"},
                                       {"attn_q_a_norm", "self_attn.q_a_layernorm"},
                                       {"attn_q_b", "self_attn.q_b_proj"},
                                       {"attn_kv_a_mqa", "self_attn.kv_a_proj_with_mqa"},
                                       {"attn_kv_a_norm", "self_attn.kv_a_layernorm"},
                                       {"attn_kv_b", "self_attn.kv_b_proj"},
                                       {"attn_k_b", "self_attn.k_b_proj"},
                                       {"attn_v_b", "self_attn.v_b_proj"},
                                       {"ffn_gate_shexp", "mlp.shared_experts.gate_proj"},
                                       {"ffn_up_shexp", "mlp.shared_experts.up_proj"},
                                       {"ffn_down_shexp", "mlp.shared_experts.down_proj"}};
constexpr NamePair kMamba2ModelNames[] = {{"token_embd", "backbone.embeddings"},
                                          {"output_norm", "backbone.norm_f"},
                                          {"output", "lm_head"}};
constexpr NamePair kMamba2Names[] = {{"attn_norm", "norm"},
                                     {"ssm_in", "mixer.in_proj"},
                                     {"ssm_conv1d", "mixer.conv1d"},
                                     {"ssm_norm", "mixer.norm"},
                                     {"ssm_out", "mixer.out_proj"}};
constexpr NamePair kQwen3NextNames[] = {{"post_attention_norm", "post_attention_layernorm"},
                                        {"ssm_in", "linear_attn.in_proj_qkvz"},
                                        {"ssm_ba", "linear_attn.in_proj_ba"},
                                        {"ssm_conv1d", "linear_attn.conv1d"},
                                        {"ssm_norm", "linear_attn.norm"},
                                        {"ssm_out", "linear_attn.out_proj"}};
// Names, each with all that stands behind the layer, that become whole names.
constexpr NamePair kWholeNames[] = {{"exp_probs_b.bias", "mlp.gate.e_score_correction_bias"},
                                    {"ssm_dt.bias", "mixer.dt_bias"},
                                    {"ssm_a", "mixer.A"},
                                    {"ssm_d", "mixer.D"}};
constexpr NamePair kQwen3NextWholeNames[] = {{"ssm_dt.bias", "linear_attn.dt_bias"},
                                             {"ssm_a", "linear_attn.A"}};
// Norms around attention and MLP.
constexpr NamePair kGemmaNames[] = {{"post_attention_norm", "post_attention_layernorm"},
                                    {"ffn_norm", "pre_feedforward_layernorm"},
                                    {"post_ffw_norm", "post_feedforward_layernorm"}};
constexpr std::string_view kArchitectures[] = {"llama",     "qwen2",  "qwen3",    "gemma2",
                                               "gemma3",    "phi3",   "qwen2moe", "qwen3moe",
                                               "deepseek2", "mamba2", "qwen3next"};

bool IsGemma(std::string_view architecture) { return architecture.starts_with("gemma"); }

// Converters add the 1 that these models add to the weights of norms.
bool HasShiftedNorm(std::string_view architecture, std::string_view tensor) {
  if (!tensor.ends_with("norm.weight")) return false;
  // The norm of what recurrent layers give has no 1.
  return IsGemma(architecture) ||
         (architecture == "qwen3next" && !tensor.ends_with("ssm_norm.weight"));
}

// A tensor's name cut at dots: [blk.LAYER.]part[.(weight|bias)].
struct GgufName {
  std::string_view layer;  // empty: of the whole model
  std::string_view whole;  // what stands behind the layer
  std::string_view part;
  std::string_view kind;  // empty: there is none
};

std::optional<GgufName> Split(std::string_view stored) {
  GgufName name;
  if (stored.starts_with("blk.")) {
    stored.remove_prefix(4);
    const size_t dot = stored.find('.');
    if (dot == 0 || dot == stored.npos) return std::nullopt;
    name.layer = stored.substr(0, dot);
    stored.remove_prefix(dot + 1);
  }
  const size_t dot = stored.find('.');
  name.whole = stored;
  name.part = stored.substr(0, dot);
  if (dot != stored.npos) name.kind = stored.substr(dot + 1);
  return name;
}

// Null: it is none of these.
const NamePair* FindAmong(std::span<const NamePair> known, std::string_view part) {
  const auto found = std::ranges::find(known, part, &NamePair::stored);
  return found == known.end() ? nullptr : &*found;
}

// Null: it is not known.
const NamePair* FindPart(std::string_view architecture, const GgufName& name) {
  const bool is_mamba2 = architecture == "mamba2";
  if (name.layer.empty()) {
    std::span<const NamePair> of_model = kModelNames;
    if (is_mamba2) of_model = kMamba2ModelNames;
    return FindAmong(of_model, name.part);
  }
  std::span<const NamePair> own;
  if (is_mamba2) own = kMamba2Names;
  if (IsGemma(architecture)) own = kGemmaNames;
  if (architecture == "llama") own = kMixtralNames;
  if (architecture == "phi3") own = kPhi3Names;
  if (architecture == "deepseek2") own = kDeepseekNames;
  if (architecture == "qwen3next") own = kQwen3NextNames;
  const NamePair* const found = FindAmong(own, name.part);
  return found != nullptr ? found : FindAmong(kLayerNames, name.part);
}

std::string LayerName(std::string_view architecture, const GgufName& name) {
  const std::string layers = architecture == "mamba2" ? "backbone.layers." : "model.layers.";
  return layers + std::string(name.layer) + ".";
}

// Null: it is no tensor of all experts.
const ExpertNames* FindExperts(std::string_view architecture, const GgufName& name) {
  std::span<const ExpertNames> known = kExpertNames;
  if (architecture == "llama") known = kMixtralExpertNames;
  const auto found = std::ranges::find(known, name.part, &ExpertNames::stored);
  return found == known.end() ? nullptr : &*found;
}

std::string ExpertsName(std::string_view architecture, const GgufName& name) {
  const char* const block = architecture == "llama" ? "block_sparse_moe" : "mlp";
  return LayerName(architecture, name) + block + ".experts.";
}

// A name that is not known stays: nothing asks for it.
std::string NameInCheckpoint(std::string_view architecture, std::string_view stored) {
  const std::optional<GgufName> name = Split(stored);
  if (!name) return std::string(stored);
  const std::string prefix = name->layer.empty() ? "" : LayerName(architecture, *name);
  std::span<const NamePair> whole_names = kWholeNames;
  if (architecture == "qwen3next") whole_names = kQwen3NextWholeNames;
  const NamePair* const whole = FindAmong(whole_names, name->whole);
  if (whole != nullptr && !prefix.empty()) return prefix + std::string(whole->name);
  const NamePair* const found = FindPart(architecture, *name);
  if (found == nullptr || name->kind.empty()) return std::string(stored);
  return prefix + std::string(found->name) + "." + std::string(name->kind);
}

// -------------------------------------------------------------------------------------------------
// the header

// Where a value of the metadata begins.
struct MetadataValue {
  uint32_t type;
  size_t begin;
};

// What weights need of the metadata.
struct GgufMetadata {
  std::string architecture;
  uint64_t alignment = 1;
  int64_t head_count = 0;  // 0: not given
  int64_t kv_head_count = 0;
  int64_t expert_count = 0;
};

class GgufParser {
 public:
  GgufParser(std::span<const std::byte> bytes, std::string_view file)
      : bytes_(bytes), file_(file) {}

  Result<StoredTensors> Parse() {
    QUIRE_RETURN_IF_ERROR(ReadVersion());
    uint64_t tensor_count = 0;
    uint64_t metadata_count = 0;
    QUIRE_RETURN_IF_ERROR(Read(&tensor_count, "the tensor count"));
    QUIRE_RETURN_IF_ERROR(Read(&metadata_count, "the metadata count"));
    if (tensor_count > kMaxTensors || metadata_count > kMaxMetadata) {
      return Status(StatusCode::kTooLarge,
                    std::string(file_) + ": declares " + std::to_string(tensor_count) +
                        " tensors and " + std::to_string(metadata_count) +
                        " metadata entries; the limits are " + std::to_string(kMaxTensors) +
                        " and " + std::to_string(kMaxMetadata));
    }
    for (uint64_t i = 0; i < metadata_count; ++i) QUIRE_RETURN_IF_ERROR(ReadMetadata());
    QUIRE_RETURN_IF_ERROR(CheckMetadata());
    StoredTensors stored;
    for (uint64_t i = 0; i < tensor_count; ++i) {
      QUIRE_RETURN_IF_ERROR(ReadTensor(&stored.tensors));
    }
    stored.data_offset = static_cast<int64_t>(RoundUp(position_, metadata_.alignment));
    QUIRE_RETURN_IF_ERROR(CheckPlaces(stored));
    QUIRE_RETURN_IF_ERROR(CheckNames(stored));
    return stored;
  }

 private:
  Status Corrupt(std::string_view why) const {
    return Status(StatusCode::kCorrupt, std::string(file_) + ": " + std::string(why) +
                                            "; the file is damaged, fetch it again");
  }

  Status CheckLeft(uint64_t count, std::string_view what) const {
    if (count <= bytes_.size() - position_) return Status();
    return Corrupt(std::string(what) + " needs " + std::to_string(count) + " bytes at offset " +
                   std::to_string(position_) + ", the file has " + std::to_string(bytes_.size()));
  }

  template <typename T>
  Status Read(T* value, std::string_view what) {
    QUIRE_RETURN_IF_ERROR(CheckLeft(sizeof(T), what));
    std::memcpy(value, bytes_.data() + position_, sizeof(T));
    position_ += sizeof(T);
    return Status();
  }

  Result<std::string_view> ReadString(uint64_t limit, std::string_view what) {
    uint64_t length = 0;
    QUIRE_RETURN_IF_ERROR(Read(&length, what));
    if (length > limit) {
      return Corrupt(std::string(what) + " has " + std::to_string(length) +
                     " bytes, the limit is " + std::to_string(limit));
    }
    QUIRE_RETURN_IF_ERROR(CheckLeft(length, what));
    const auto* const text = reinterpret_cast<const char*>(bytes_.data() + position_);
    position_ += length;
    return std::string_view(text, length);
  }

  Status ReadVersion() {
    constexpr std::string_view kMagic = "GGUF";
    uint32_t version = 0;
    QUIRE_RETURN_IF_ERROR(CheckLeft(kMagic.size(), "the header"));
    if (std::memcmp(bytes_.data(), kMagic.data(), kMagic.size()) != 0) {
      return Corrupt("it does not begin with GGUF");
    }
    position_ = kMagic.size();
    QUIRE_RETURN_IF_ERROR(Read(&version, "the version"));
    if (version == 2 || version == 3) return Status();
    return Status(StatusCode::kBadArgument,
                  std::string(file_) + ": has GGUF version " + std::to_string(version) +
                      "; little-endian files of the versions 2 and 3 are read");
  }

  Status SkipValue(uint32_t type, int depth, std::string_view what) {
    if (type > kFloat64) {
      return Corrupt(std::string(what) + " has the unknown value type " + std::to_string(type));
    }
    if (type == kString) return ReadString(kMaxStringBytes, what).status();
    if (type == kArray) return SkipArray(depth, what);
    QUIRE_RETURN_IF_ERROR(CheckLeft(kValueBytes[type], what));
    position_ += kValueBytes[type];
    return Status();
  }

  Status SkipArray(int depth, std::string_view what) {
    if (depth == kMaxArrayDepth) {
      return Corrupt(std::string(what) + " nests arrays more than " +
                     std::to_string(kMaxArrayDepth) + " deep");
    }
    uint32_t type = 0;
    uint64_t count = 0;
    QUIRE_RETURN_IF_ERROR(Read(&type, what));
    QUIRE_RETURN_IF_ERROR(Read(&count, what));
    QUIRE_RETURN_IF_ERROR(CheckLeft(count, what));  // each takes a byte at least
    if (type != kString && type != kArray) {
      if (type > kFloat64) return SkipValue(type, depth, what);
      QUIRE_RETURN_IF_ERROR(CheckLeft(count * kValueBytes[type], what));
      position_ += count * kValueBytes[type];
      return Status();
    }
    array_values_ += count;
    if (array_values_ > kMaxArrayValues) {
      return Corrupt(std::string(what) + ": arrays hold more than " +
                     std::to_string(kMaxArrayValues) + " strings");
    }
    for (uint64_t i = 0; i < count; ++i) {
      QUIRE_RETURN_IF_ERROR(SkipValue(type, depth + 1, what));
    }
    return Status();
  }

  Status ReadMetadata() {
    QUIRE_ASSIGN_OR_RETURN(const std::string_view key,
                           ReadString(kMaxTensorNameBytes, "a metadata key"));
    const std::string what = "metadata " + QuotedName(key);
    uint32_t type = 0;
    QUIRE_RETURN_IF_ERROR(Read(&type, what));
    if (!values_.emplace(key, MetadataValue{type, position_}).second) {
      return Corrupt(what + " stands twice");
    }
    if (key != "general.architecture" || type != kString) return SkipValue(type, 0, what);
    QUIRE_ASSIGN_OR_RETURN(metadata_.architecture, ReadString(kMaxTensorNameBytes, what));
    return Status();
  }

  // An integer of any type that is not below 0; `fallback` where the key is absent.
  Result<int64_t> CountOr(const std::string& key, int64_t fallback) const {
    const auto found = values_.find(key);
    if (found == values_.end()) return fallback;
    const auto [type, begin] = found->second;
    const std::string what = "metadata " + QuotedName(key);
    const bool is_signed = std::ranges::find(kSignedTypes, type) != std::end(kSignedTypes);
    if (!is_signed && std::ranges::find(kUnsignedTypes, type) == std::end(kUnsignedTypes)) {
      return Corrupt(what + " is no integer");
    }
    const uint64_t size = kValueBytes[type];
    uint64_t value = 0;
    std::memcpy(&value, bytes_.data() + begin, size);
    const bool has_top_bit = (value >> (8 * size - 1)) != 0;
    if (has_top_bit && (is_signed || size == sizeof(value))) {
      return Corrupt(what + " is negative or over 2^63");
    }
    return static_cast<int64_t>(value);
  }

  Status CheckMetadata() {
    QUIRE_ASSIGN_OR_RETURN(const int64_t alignment,
                           CountOr("general.alignment", kDefaultAlignment));
    if (alignment == 0 || alignment > kMaxAlignment || (alignment & (alignment - 1)) != 0) {
      return Corrupt("metadata \"general.alignment\" is " + std::to_string(alignment) +
                     ", not a power of two up to " + std::to_string(kMaxAlignment));
    }
    metadata_.alignment = static_cast<uint64_t>(alignment);
    if (std::ranges::find(kArchitectures, metadata_.architecture) == std::end(kArchitectures)) {
      std::string known;
      for (const std::string_view name : kArchitectures) {
        known += (known.empty() ? "" : ", ") + std::string(name);
      }
      return Status(StatusCode::kBadArgument, std::string(file_) + ": its architecture is " +
                                                  QuotedName(metadata_.architecture) +
                                                  "; GGUF files are read of: " + known);
    }
    return FindCounts();
  }

  Status FindCounts() {
    QUIRE_ASSIGN_OR_RETURN(metadata_.expert_count,
                           CountOr(metadata_.architecture + ".expert_count", 0));
    if (metadata_.architecture != "llama") return Status();  // no rows lie as rotary pairs
    QUIRE_ASSIGN_OR_RETURN(metadata_.head_count, CountOr("llama.attention.head_count", 0));
    QUIRE_ASSIGN_OR_RETURN(metadata_.kv_head_count, CountOr("llama.attention.head_count_kv", 0));
    if (metadata_.kv_head_count == 0) metadata_.kv_head_count = metadata_.head_count;
    return Status();
  }

  // Adds what the checkpoint has for the next tensor: one, or one for each expert.
  Status ReadTensor(std::vector<StoredTensor>* tensors) {
    QUIRE_ASSIGN_OR_RETURN(const std::string_view name,
                           ReadString(kMaxTensorNameBytes, "the name of a tensor"));
    const std::string what = "tensor " + QuotedName(name);
    uint32_t dimensions = 0;
    QUIRE_RETURN_IF_ERROR(Read(&dimensions, what));
    if (dimensions == 0 || dimensions > kMaxDimensions) {
      return Corrupt(what + " has " + std::to_string(dimensions) + " dimensions; 1 to " +
                     std::to_string(kMaxDimensions) + " are possible");
    }
    StoredTensor tensor;
    for (uint32_t i = 0; i < dimensions; ++i) {
      int64_t size = 0;
      QUIRE_RETURN_IF_ERROR(Read(&size, what));
      if (size <= 0) return Corrupt(what + " has a dimension that is 0 or over 2^63");
      tensor.shape.insert(tensor.shape.begin(), size);
    }
    uint32_t type = 0;
    uint64_t offset = 0;
    QUIRE_RETURN_IF_ERROR(Read(&type, what));
    QUIRE_RETURN_IF_ERROR(Read(&offset, what));
    tensor.name = NameInCheckpoint(metadata_.architecture, name);
    if (HasShiftedNorm(metadata_.architecture, name)) tensor.value_offset = -1;
    tensor.format = WeightFormatOfGguf(type);
    tensor.type_name = tensor.format ? WeightFormatName(*tensor.format) : TypeOf(type).name;
    tensor.dtype = TypeOf(type).dtype;
    QUIRE_RETURN_IF_ERROR(Place(&tensor, offset, what));
    QUIRE_RETURN_IF_ERROR(NoteRotaryHeads(name, what, &tensor));
    if (const std::optional<GgufName> parts = Split(name); parts && !parts->layer.empty()) {
      const ExpertNames* const experts = FindExperts(metadata_.architecture, *parts);
      if (experts != nullptr) return AddExperts(tensor, *parts, *experts, what, tensors);
      ShapeAsInCheckpoint(parts->part, &tensor);
    }
    tensors->push_back(std::move(tensor));
    return Status();
  }

  // The file has some tensors in other shapes.
  static void ShapeAsInCheckpoint(std::string_view part, StoredTensor* tensor) {
    std::vector<int64_t>& shape = tensor->shape;
    // A gate with one output.
    if (part == "ffn_gate_inp_shexp" && shape.size() == 1) shape.insert(shape.begin(), 1);
    // A matrix for each head. Sizes of types that are not read may be too large to be multiplied.
    const bool is_of_heads = part == "attn_k_b" || part == "attn_v_b";
    if (is_of_heads && shape.size() == 3 && (tensor->dtype || tensor->format)) {
      shape = {shape[0] * shape[1], shape[2]};
    }
    if (shape.size() != 2 || !tensor->dtype) return;
    // A width of taps for each channel; a number for each head; norms of groups.
    if (part == "ssm_conv1d") shape.insert(shape.begin() + 1, 1);
    if (part == "ssm_a" || part == "ssm_d" || part == "ssm_norm") shape = {shape[0] * shape[1]};
  }

  // Experts lie one after the other, each as a matrix of its own does.
  Status AddExperts(const StoredTensor& all, const GgufName& name, const ExpertNames& names,
                    const std::string& what, std::vector<StoredTensor>* tensors) const {
    const int64_t count = all.shape.front();
    const int64_t matrices = names.second.empty() ? 1 : 2;  // of an expert
    if (all.shape.size() != 3 || count != metadata_.expert_count || all.shape[1] % matrices != 0) {
      return Corrupt(what + " is " + all.TypeAndShape() + "; " +
                     (matrices == 1 ? "a matrix" : "two matrices on top of each other") +
                     " for each of the " + std::to_string(metadata_.expert_count) +
                     " experts that the metadata \"expert_count\" has is expected");
    }
    // One of a type that is not read is enough to say so.
    const int64_t present = (all.dtype || all.format ? count : 1) * matrices;
    if (tensors->size() + static_cast<uint64_t>(present) > kMaxTensors) {
      return Status(StatusCode::kTooLarge, std::string(file_) + ": " + what +
                                               ": with its experts there are more than " +
                                               std::to_string(kMaxTensors) + " tensors");
    }
    const int64_t bytes = (all.end - all.begin) / present;
    const std::string prefix = ExpertsName(metadata_.architecture, name);
    for (int64_t i = 0; i < present; ++i) {
      StoredTensor matrix = all;
      const std::string_view projection = i % matrices == 0 ? names.first : names.second;
      matrix.name = prefix + std::to_string(i / matrices) + "." + std::string(projection) + "." +
                    std::string(name.kind);
      matrix.shape = {all.shape[1] / matrices, all.shape[2]};
      matrix.begin = all.begin + i * bytes;
      matrix.end = matrix.begin + bytes;
      tensors->push_back(std::move(matrix));
    }
    return Status();
  }

  // Where the tensor's bytes lie after the header.
  Status Place(StoredTensor* tensor, uint64_t offset, const std::string& what) const {
    if (offset > bytes_.size() || offset % metadata_.alignment != 0) {
      return Corrupt(what + " lies at " + std::to_string(offset) + "; the file has " +
                     std::to_string(bytes_.size()) + " bytes and the alignment " +
                     std::to_string(metadata_.alignment));
    }
    tensor->begin = tensor->end = static_cast<int64_t>(offset);
    if (!tensor->dtype && !tensor->format) return Status();
    const int64_t unit = tensor->format ? BlockInputs(*tensor->format) : 1;
    const int64_t unit_bytes =
        tensor->format ? BlockBytes(*tensor->format) : DTypeBytes(*tensor->dtype);
    if (tensor->shape.back() % unit != 0) {
      return Corrupt(what + " is " + tensor->TypeAndShape() + ": its rows are no whole blocks of " +
                     std::to_string(unit));
    }
    int64_t size = tensor->shape.back() / unit;
    bool is_over = __builtin_mul_overflow(size, unit_bytes, &size);
    for (size_t i = 0; i + 1 < tensor->shape.size(); ++i) {
      is_over = is_over || __builtin_mul_overflow(size, tensor->shape[i], &size);
    }
    if (is_over || static_cast<uint64_t>(size) > bytes_.size()) {
      return Corrupt(what + " is " + tensor->TypeAndShape() + ", more than the file's " +
                     std::to_string(bytes_.size()) + " bytes");
    }
    tensor->end += size;
    return Status();
  }

  // Converters for the llama architecture store the rows of q and k as rotary pairs.
  Status NoteRotaryHeads(std::string_view stored, const std::string& what,
                         StoredTensor* tensor) const {
    if (metadata_.architecture != "llama") return Status();
    const std::optional<GgufName> name = Split(stored);
    if (!name || (name->part != "attn_q" && name->part != "attn_k")) return Status();
    const int64_t heads = name->part == "attn_q" ? metadata_.head_count : metadata_.kv_head_count;
    const int64_t rows = tensor->shape.front();
    if (heads <= 0 || rows % heads != 0 || rows / heads % 2 != 0) {
      return Corrupt(what + " has " + std::to_string(rows) + " rows for " + std::to_string(heads) +
                     " heads; a head needs an even number of them");
    }
    tensor->rotary_head_rows = rows / heads;
    return Status();
  }

  Status CheckPlaces(StoredTensors& stored) const {
    std::ranges::sort(stored.tensors, {}, &StoredTensor::begin);
    int64_t end = 0;
    for (const StoredTensor& tensor : stored.tensors) {
      const std::string what = "tensor " + QuotedName(tensor.name);
      if (tensor.begin < end) return Corrupt(what + " overlaps with another one");
      end = tensor.end;
      if (stored.data_offset + end > static_cast<int64_t>(bytes_.size())) {
        return Corrupt(what + " ends at byte " + std::to_string(stored.data_offset + end) +
                       ", the file has " + std::to_string(bytes_.size()));
      }
    }
    return Status();
  }

  Status CheckNames(StoredTensors& stored) const {
    std::ranges::sort(stored.tensors, {}, &StoredTensor::name);
    const auto twice = std::ranges::adjacent_find(stored.tensors, {}, &StoredTensor::name);
    if (twice == stored.tensors.end()) return Status();
    return Corrupt("tensor " + QuotedName(twice->name) + " stands twice");
  }

  const std::span<const std::byte> bytes_;
  const std::string_view file_;
  size_t position_ = 0;  // never after the end of bytes_
  uint64_t array_values_ = 0;
  std::map<std::string_view, MetadataValue> values_;  // names in bytes_
  GgufMetadata metadata_;
};

}  // namespace

Result<StoredTensors> ParseGguf(std::span<const std::byte> bytes, std::string_view file) {
  return GgufParser(bytes, file).Parse();
}

}  // namespace quire
