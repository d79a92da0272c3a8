#include "model/config/recurrent_config.h"

#include <optional>
#include <string>

#include "model/config/config_bounds.h"

namespace quire {
namespace {

// Bounds far above published models; products of three of them and four bytes stay within 63 bits.
constexpr int64_t kMaxStateDim = int64_t{1} << 14;  // largest known 256
constexpr int64_t kMaxConvWidth = 1024;             // 4

Status CheckDivides(const JsonValue& json, std::string_view field, int64_t part,
                    std::string_view whole_field, int64_t whole) {
  if (whole % part == 0) return Status();
  return BadField(json, field,
                  std::to_string(part) + " does not divide " + std::string(whole_field) + ", " +
                      std::to_string(whole));
}

// A number, or the object {"__float__": "Infinity"} that transformers 5 writes for what JSON has no
// number for.
Result<double> NumberOrInfinity(const JsonValue& value) {
  if (!value.json().is_object()) return value.Number();
  QUIRE_ASSIGN_OR_RETURN(const std::string name, value.GetString("__float__"));
  if (name == "Infinity") return std::numeric_limits<double>::infinity();
  return Status(StatusCode::kBadArgument,
                value.path() + ".__float__: \"" + name + "\" is no bound; known is Infinity");
}

Status ReadStepLimit(const JsonValue& json, StateSpaceConfig& config) {
  QUIRE_ASSIGN_OR_RETURN(const std::optional<JsonValue> limit, json.Find("time_step_limit"));
  if (!limit) return Status();
  QUIRE_ASSIGN_OR_RETURN(const size_t size, limit->ArraySize());
  if (size != 2) {
    return BadField(json, "time_step_limit",
                    std::to_string(size) + " entries; give the least and the largest step");
  }
  QUIRE_ASSIGN_OR_RETURN(const JsonValue least, limit->At(0));
  QUIRE_ASSIGN_OR_RETURN(const JsonValue most, limit->At(1));
  QUIRE_ASSIGN_OR_RETURN(config.step_min, NumberOrInfinity(least));
  QUIRE_ASSIGN_OR_RETURN(config.step_max, NumberOrInfinity(most));
  if (config.step_min >= 0 && config.step_min <= config.step_max) return Status();
  return BadField(json, "time_step_limit",
                  std::to_string(config.step_min) + " to " + std::to_string(config.step_max) +
                      " is no range of steps; it must ascend from 0 or more");
}

}  // namespace

Result<StateSpaceConfig> ReadStateSpaceConfig(const JsonValue& json, int64_t hidden_size) {
  StateSpaceConfig config;
  QUIRE_ASSIGN_OR_RETURN(config.num_heads, json.GetIntOr("num_heads", 128, 1, kMaxHeads));
  QUIRE_ASSIGN_OR_RETURN(config.head_dim, json.GetIntOr("head_dim", 64, 1, kMaxStateDim));
  QUIRE_ASSIGN_OR_RETURN(config.state_size, json.GetIntOr("state_size", 128, 1, kMaxStateDim));
  QUIRE_ASSIGN_OR_RETURN(config.num_groups, json.GetIntOr("n_groups", 8, 1, kMaxHeads));
  QUIRE_ASSIGN_OR_RETURN(config.conv_width, json.GetIntOr("conv_kernel", 4, 2, kMaxConvWidth));
  QUIRE_ASSIGN_OR_RETURN(config.has_bias, json.GetBoolOr("use_bias", false));
  QUIRE_ASSIGN_OR_RETURN(config.has_conv_bias, json.GetBoolOr("use_conv_bias", true));
  QUIRE_ASSIGN_OR_RETURN(const int64_t expand, json.GetIntOr("expand", 2, 1, kMaxStateDim));
  if (expand * hidden_size != config.inner_size()) {
    return BadField(json, "expand",
                    std::to_string(expand) + " times hidden_size " + std::to_string(hidden_size) +
                        " is not num_heads times head_dim, " + std::to_string(config.inner_size()));
  }
  QUIRE_RETURN_IF_ERROR(
      CheckDivides(json, "n_groups", config.num_groups, "num_heads", config.num_heads));
  QUIRE_RETURN_IF_ERROR(ReadStepLimit(json, config));
  return config;
}

Result<GatedDeltaConfig> ReadGatedDeltaConfig(const JsonValue& json) {
  GatedDeltaConfig config;
  QUIRE_ASSIGN_OR_RETURN(config.num_key_heads,
                         json.GetIntOr("linear_num_key_heads", 16, 1, kMaxHeads));
  QUIRE_ASSIGN_OR_RETURN(config.num_value_heads,
                         json.GetIntOr("linear_num_value_heads", 32, 1, kMaxHeads));
  QUIRE_ASSIGN_OR_RETURN(config.key_dim,
                         json.GetIntOr("linear_key_head_dim", 128, 1, kMaxStateDim));
  QUIRE_ASSIGN_OR_RETURN(config.value_dim,
                         json.GetIntOr("linear_value_head_dim", 128, 1, kMaxStateDim));
  QUIRE_ASSIGN_OR_RETURN(config.conv_width,
                         json.GetIntOr("linear_conv_kernel_dim", 4, 2, kMaxConvWidth));
  QUIRE_RETURN_IF_ERROR(CheckDivides(json, "linear_num_key_heads", config.num_key_heads,
                                     "linear_num_value_heads", config.num_value_heads));
  return config;
}

Result<std::vector<MixerKind>> ReadMixers(const JsonValue& json, int64_t layer_count) {
  std::vector<MixerKind> mixers;
  QUIRE_ASSIGN_OR_RETURN(const std::optional<JsonValue> types, json.Find("layer_types"));
  if (!types) {
    QUIRE_ASSIGN_OR_RETURN(const int64_t interval,
                           json.GetIntOr("full_attention_interval", 4, 1, kMaxInterval));
    for (int64_t i = 0; i < layer_count; ++i) {
      mixers.push_back((i + 1) % interval == 0 ? MixerKind::kGatedAttention
                                               : MixerKind::kGatedDelta);
    }
    return mixers;
  }
  QUIRE_ASSIGN_OR_RETURN(const size_t size, types->ArraySize());
  if (static_cast<int64_t>(size) != layer_count) {
    return Status(StatusCode::kBadArgument, types->path() + ": " + std::to_string(size) +
                                                " entries for num_hidden_layers " +
                                                std::to_string(layer_count));
  }
  for (size_t i = 0; i < size; ++i) {
    QUIRE_ASSIGN_OR_RETURN(const JsonValue entry, types->At(i));
    QUIRE_ASSIGN_OR_RETURN(const std::string type, entry.String());
    if (type != "full_attention" && type != "linear_attention") {
      return Status(StatusCode::kBadArgument,
                    entry.path() + ": \"" + type +
                        "\" is not known; known are full_attention and linear_attention");
    }
    mixers.push_back(type == "full_attention" ? MixerKind::kGatedAttention
                                              : MixerKind::kGatedDelta);
  }
  return mixers;
}

}  // namespace quire
