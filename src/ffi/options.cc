#include "ffi/options.h"

#include <array>
#include <utility>

namespace quire::ffi {
namespace {

// In the order of the enumerations in quire/rope.h.
constexpr std::array<std::string_view, 3> kRopeModes = {"none", "normal", "inline"};
constexpr std::array<std::string_view, 2> kRopePairings = {"half_split", "interleaved"};
constexpr std::array<std::string_view, 7> kRopeScalings = {
    "none", "linear", "dynamic", "llama3", "llama4", "longrope", "yarn"};
static_assert(kRopeModes.size() == static_cast<size_t>(RopeMode::kInline) + 1);
static_assert(kRopePairings.size() == static_cast<size_t>(RopePairing::kInterleaved) + 1);
static_assert(kRopeScalings.size() == static_cast<size_t>(RopeScaling::kYarn) + 1);

template <typename E>
tvm::ffi::String EnumName(std::span<const std::string_view> names, E value) {
  return tvm::ffi::String(std::string(names[static_cast<size_t>(value)]));
}

tvm::ffi::Array<double> ToArray(const std::vector<double>& values) {
  return tvm::ffi::Array<double>(values.begin(), values.end());
}

}  // namespace

std::optional<tvm::ffi::Any> OptionsReader::Find(const char* name) {
  read_.insert(name);
  const auto it = fields_.find(tvm::ffi::String(name));
  if (it == fields_.end()) return std::nullopt;
  return (*it).second;
}

std::shared_ptr<ParallelRunner> OptionsReader::ReadRunner() {
  int threads = 0;
  Read("threads", &threads);
  if (threads < 0 || threads > kThreadCountMax) {
    ThrowBadArgument(owner_ + ": option 'threads' = " + std::to_string(threads) +
                     " is not in [0, " + std::to_string(kThreadCountMax) +
                     "]; 0 stands for one per core");
  }
  return threads == 0 ? nullptr : ValueOrThrow(CreateThreadPool(threads));
}

void OptionsReader::Finish() const {
  for (const auto& [name, value] : fields_) {
    if (read_.count(std::string(name)) != 0) continue;
    std::string known;
    for (const std::string& field : read_) known += (known.empty() ? "" : ", ") + field;
    ThrowBadArgument(owner_ + ": there is no option '" + std::string(name) + "'; options are " +
                     known);
  }
}

void OptionsReader::ThrowWrongType(const char* name, const tvm::ffi::Any& value) const {
  std::string type = value.GetTypeKey();
  if (type == "ffi.SmallStr" || type == "ffi.String") type = "str";
  if (type == "ffi.BigInt") type = "int beyond 64 bits";
  if (type == "ffi.Array") type = "list";
  if (type == "ffi.Map") type = "dict";
  ThrowBadArgument(owner_ + ": option '" + name + "' cannot be a value of type " + type);
}

void OptionsReader::ThrowOutOfRange(const char* name, int64_t value) const {
  ThrowBadArgument(owner_ + ": option '" + name + "' = " + std::to_string(value) +
                   " is out of range");
}

int OptionsReader::IndexOf(const char* name, const std::string& value,
                           std::span<const std::string_view> names) const {
  std::string known;
  int index = 0;
  for (const std::string_view candidate : names) {
    if (candidate == value) return index;
    known += (index == 0 ? "'" : ", '") + std::string(candidate) + "'";
    ++index;
  }
  ThrowBadArgument(owner_ + ": option '" + name + "' = '" + value + "' is none of " + known);
}

void OptionsReader::Convert(const char* name, const tvm::ffi::Any& value, bool* out) const {
  *out = Cast<bool>(name, value);
}

void OptionsReader::Convert(const char* name, const tvm::ffi::Any& value, int* out) const {
  const int64_t wide = Cast<int64_t>(name, value);
  if (wide < std::numeric_limits<int>::min() || wide > std::numeric_limits<int>::max()) {
    ThrowOutOfRange(name, wide);
  }
  *out = static_cast<int>(wide);
}

void OptionsReader::Convert(const char* name, const tvm::ffi::Any& value, int64_t* out) const {
  *out = Cast<int64_t>(name, value);
}

void OptionsReader::Convert(const char* name, const tvm::ffi::Any& value, uint64_t* out) const {
  *out = static_cast<uint64_t>(Cast<int64_t>(name, value));
}

void OptionsReader::Convert(const char* name, const tvm::ffi::Any& value, float* out) const {
  *out = static_cast<float>(Cast<double>(name, value));
}

void OptionsReader::Convert(const char* name, const tvm::ffi::Any& value, double* out) const {
  *out = Cast<double>(name, value);
}

void OptionsReader::Convert(const char* name, const tvm::ffi::Any& value, std::string* out) const {
  *out = Cast<tvm::ffi::String>(name, value);
}

void OptionsReader::Convert(const char* name, const tvm::ffi::Any& value, DType* out) const {
  const Result<DType> dtype = ParseDType(std::string(Cast<tvm::ffi::String>(name, value)));
  if (!dtype.ok()) {
    ThrowBadArgument(owner_ + ": option '" + name + "': " + std::string(dtype.status().message()));
  }
  *out = *dtype;
}

void OptionsReader::Convert(const char* name, const tvm::ffi::Any& value,
                            std::optional<DType>* out) const {
  Convert(name, value, &out->emplace());
}

void OptionsReader::Convert(const char* name, const tvm::ffi::Any& value,
                            std::vector<double>* out) const {
  const auto array = Cast<tvm::ffi::Array<double>>(name, value);
  out->assign(array.begin(), array.end());
}

AttentionLayerSpec ReadLayerSpec(const OptionMap& fields) {
  AttentionLayerSpec layer;
  OptionsReader reader("layer", fields);
  reader.Read("num_qo_heads", &layer.num_qo_heads);
  reader.Read("num_kv_heads", &layer.num_kv_heads);
  reader.Read("qk_head_dim", &layer.qk_head_dim);
  reader.Read("v_head_dim", &layer.v_head_dim);
  reader.Read("dtype", &layer.dtype);
  DType v_dtype = layer.dtype;
  reader.Read("v_dtype", &v_dtype);
  if (v_dtype != layer.dtype) layer.v_dtype = v_dtype;
  reader.Read("window", &layer.window);
  reader.Read("soft_cap", &layer.soft_cap);
  std::vector<double> head_sinks;
  reader.Read("head_sinks", &head_sinks);
  for (const double logit : head_sinks) layer.head_sinks.push_back(static_cast<float>(logit));
  reader.Read("latent", &layer.latent);
  if (const auto rope = reader.Get<OptionMap>("rope")) layer.rope = ReadRopeOptions(*rope);
  reader.Finish();
  return layer;
}

OptionMap LayerSpecFields(const AttentionLayerSpec& layer) {
  const std::vector<double> head_sinks(layer.head_sinks.begin(), layer.head_sinks.end());
  OptionMap fields = {
      {"num_qo_heads", layer.num_qo_heads},
      {"num_kv_heads", layer.num_kv_heads},
      {"qk_head_dim", layer.qk_head_dim},
      {"v_head_dim", layer.v_head_dim},
      {"dtype", tvm::ffi::String(std::string(DTypeName(layer.dtype)))},
      {"v_dtype", tvm::ffi::String(std::string(DTypeName(layer.value_dtype())))},
      {"window", layer.window},
      {"soft_cap", layer.soft_cap},
      {"head_sinks", tvm::ffi::Array<double>(head_sinks.begin(), head_sinks.end())}};
  if (layer.latent) fields.Set("latent", true);
  if (layer.rope) fields.Set("rope", RopeFields(*layer.rope));
  return fields;
}

RopeOptions ReadRopeOptions(const OptionMap& fields) {
  RopeOptions rope;
  OptionsReader reader("rope", fields);
  reader.ReadEnum("mode", kRopeModes, &rope.mode);
  reader.ReadEnum("pairing", kRopePairings, &rope.pairing);
  reader.ReadEnum("scaling", kRopeScalings, &rope.scaling);
  reader.Read("theta", &rope.theta);
  reader.Read("position_scale", &rope.position_scale);
  reader.Read("rotary_dim", &rope.rotary_dim);
  reader.Read("factor", &rope.factor);
  reader.Read("low_freq_factor", &rope.low_freq_factor);
  reader.Read("high_freq_factor", &rope.high_freq_factor);
  reader.Read("beta_fast", &rope.beta_fast);
  reader.Read("beta_slow", &rope.beta_slow);
  reader.Read("mscale", &rope.mscale);
  reader.Read("mscale_all_dim", &rope.mscale_all_dim);
  reader.Read("truncate", &rope.truncate);
  reader.Read("attention_factor", &rope.attention_factor);
  reader.Read("original_max_position_embeddings", &rope.original_max_position_embeddings);
  reader.Read("short_factors", &rope.short_factors);
  reader.Read("long_factors", &rope.long_factors);
  reader.Read("use_long_factors", &rope.use_long_factors);
  reader.Finish();
  return rope;
}

OptionMap RopeFields(const RopeOptions& rope) {
  return {{"mode", EnumName(kRopeModes, rope.mode)},
          {"pairing", EnumName(kRopePairings, rope.pairing)},
          {"scaling", EnumName(kRopeScalings, rope.scaling)},
          {"theta", rope.theta},
          {"position_scale", rope.position_scale},
          {"rotary_dim", rope.rotary_dim},
          {"factor", rope.factor},
          {"low_freq_factor", rope.low_freq_factor},
          {"high_freq_factor", rope.high_freq_factor},
          {"beta_fast", rope.beta_fast},
          {"beta_slow", rope.beta_slow},
          {"mscale", rope.mscale},
          {"mscale_all_dim", rope.mscale_all_dim},
          {"truncate", rope.truncate},
          {"attention_factor", rope.attention_factor},
          {"original_max_position_embeddings", rope.original_max_position_embeddings},
          {"short_factors", ToArray(rope.short_factors)},
          {"long_factors", ToArray(rope.long_factors)},
          {"use_long_factors", rope.use_long_factors}};
}

}  // namespace quire::ffi
