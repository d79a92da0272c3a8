#include "model/config/expert_config.h"

#include <optional>
#include <string>

#include "model/config/config_bounds.h"

namespace quire {
namespace {

// Bounds far above published models.
constexpr int64_t kMaxExperts = int64_t{1} << 14;  // largest known 512
constexpr double kMaxScale = 1e6;                  // 16

}  // namespace

Result<ExpertConfig> ReadExpertConfig(const JsonValue& json, const ExpertDefaults& defaults) {
  ExpertConfig config;
  // Mixtral's name for it, and Qwen3-MoE's other one.
  const bool is_local = !json.json().contains("num_experts");
  QUIRE_ASSIGN_OR_RETURN(config.count, json.GetIntOr(is_local ? "num_local_experts" : "num_experts",
                                                     defaults.count, 0, kMaxExperts));
  if (config.count == 0) return config;
  QUIRE_ASSIGN_OR_RETURN(config.per_token,
                         json.GetIntOr("num_experts_per_tok", defaults.per_token, 1, config.count));
  const bool is_of_model = defaults.intermediate_size == 0;
  QUIRE_ASSIGN_OR_RETURN(config.intermediate_size,
                         json.GetIntOr(is_of_model ? "intermediate_size" : "moe_intermediate_size",
                                       defaults.intermediate_size, 1, kMaxIntermediate));
  QUIRE_ASSIGN_OR_RETURN(config.normalises, json.GetBoolOr("norm_topk_prob", defaults.normalises));
  if (defaults.shared_intermediate_size == 0) return config;
  QUIRE_ASSIGN_OR_RETURN(config.shared_intermediate_size,
                         json.GetIntOr("shared_expert_intermediate_size",
                                       defaults.shared_intermediate_size, 1, kMaxIntermediate));
  return config;
}

Result<std::vector<uint8_t>> ReadSparseLayers(const JsonValue& json, int64_t layer_count,
                                              const ExpertConfig& experts) {
  std::vector<uint8_t> sparse(static_cast<size_t>(layer_count), 0);
  QUIRE_ASSIGN_OR_RETURN(const int64_t step,
                         json.GetIntOr("decoder_sparse_step", 1, 1, kMaxInterval));
  for (int64_t i = 0; i < layer_count; ++i) {
    sparse[static_cast<size_t>(i)] = experts.count > 0 && (i + 1) % step == 0 ? 1 : 0;
  }
  QUIRE_ASSIGN_OR_RETURN(const std::optional<JsonValue> dense, json.Find("mlp_only_layers"));
  if (!dense) return sparse;
  QUIRE_ASSIGN_OR_RETURN(const size_t size, dense->ArraySize());
  for (size_t i = 0; i < size; ++i) {
    QUIRE_ASSIGN_OR_RETURN(const JsonValue entry, dense->At(i));
    QUIRE_ASSIGN_OR_RETURN(const int64_t layer, entry.Int(0, layer_count - 1));
    sparse[static_cast<size_t>(layer)] = 0;
  }
  return sparse;
}

// ---- DeepSeek-V2 and V3

namespace {

// What transformers takes for fields that are absent.
struct GroupedDefaults {
  int64_t count;
  int64_t per_token;  // 0: it must be there
  int64_t intermediate_size;
  int64_t shared_count;
  int64_t groups;
  int64_t groups_per_token;
  double scale;
  bool normalises;
  int64_t dense_layers;
  std::string_view scoring;
  std::string_view choice;  // topk_method
};
constexpr GroupedDefaults kSoftmaxDefaults = {64,  0,     1407, 2,         1,       1,
                                              1.0, false, 0,    "softmax", "greedy"};
constexpr GroupedDefaults kSigmoidDefaults = {256, 8,    2048, 1,         8,         4,
                                              2.5, true, 3,    "sigmoid", "noaux_tc"};

const GroupedDefaults& DefaultsOf(ExpertScores scores) {
  return scores == ExpertScores::kSigmoid ? kSigmoidDefaults : kSoftmaxDefaults;
}

// A field whose null means something.
Result<int64_t> ReadOrNull(const JsonValue& json, std::string_view field, int64_t absent,
                           int64_t null, int64_t min, int64_t max) {
  return json.GetIntOr(field, json.json().contains(field) ? null : absent, min, max);
}

Status CheckName(const JsonValue& json, std::string_view field, std::string_view known) {
  QUIRE_ASSIGN_OR_RETURN(const std::string name, json.GetStringOr(field, known));
  if (name == known) return Status();
  return BadField(
      json, field,
      "\"" + name + "\" is not known for this architecture; known is " + std::string(known));
}

// Whether the choice is one among groups.
Result<bool> ReadChoice(const JsonValue& json, ExpertScores scores) {
  if (scores == ExpertScores::kSigmoid) {
    QUIRE_RETURN_IF_ERROR(CheckName(json, "topk_method", kSigmoidDefaults.choice));
    return true;
  }
  QUIRE_ASSIGN_OR_RETURN(const std::string name,
                         json.GetStringOr("topk_method", kSoftmaxDefaults.choice));
  if (name == "group_limited_greedy") return true;
  if (name == kSoftmaxDefaults.choice) return false;
  return BadField(json, "topk_method",
                  "\"" + name + "\" is not known; known are greedy and group_limited_greedy");
}

Status ReadGroups(const JsonValue& json, const GroupedDefaults& defaults, ExpertConfig& config) {
  QUIRE_ASSIGN_OR_RETURN(config.group_count,
                         ReadOrNull(json, "n_group", defaults.groups, 1, 1, kMaxExpertGroups));
  QUIRE_ASSIGN_OR_RETURN(
      config.groups_per_token,
      ReadOrNull(json, "topk_group", defaults.groups_per_token, 1, 1, config.group_count));
  const std::string groups = std::to_string(config.group_count);
  if (config.count % config.group_count != 0) {
    return BadField(json, "n_group",
                    groups + " does not divide n_routed_experts, " + std::to_string(config.count));
  }
  if (config.group_size() < config.group_scores) {
    return BadField(json, "n_group",
                    groups + " groups of one expert; a group is judged by its two best");
  }
  const int64_t choice = config.groups_per_token * config.group_size();
  if (config.per_token <= choice) return Status();
  return BadField(json, "num_experts_per_tok",
                  std::to_string(config.per_token) + " of the " + std::to_string(choice) +
                      " experts in topk_group groups cannot be chosen");
}

// transformers ignores the field for softmax scores; DeepSeek's own code normalises in place of
// scaling. No published model has it.
Status ReadNormalises(const JsonValue& json, ExpertScores scores, ExpertConfig& config) {
  QUIRE_ASSIGN_OR_RETURN(config.normalises,
                         json.GetBoolOr("norm_topk_prob", DefaultsOf(scores).normalises));
  if (!config.normalises || scores == ExpertScores::kSigmoid) return Status();
  return BadField(
      json, "norm_topk_prob",
      "true; what it means with softmax scores is not agreed on: set it to false if the "
      "model was trained without");
}

}  // namespace

Result<ExpertConfig> ReadGroupedExpertConfig(const JsonValue& json, ExpertScores scores) {
  const GroupedDefaults& defaults = DefaultsOf(scores);
  ExpertConfig config;
  config.scores = scores;
  config.has_choice_bias = scores == ExpertScores::kSigmoid;
  config.group_scores = scores == ExpertScores::kSigmoid ? 2 : 1;
  config.has_shared_gate = false;
  config.shared_name = "shared_experts";
  QUIRE_ASSIGN_OR_RETURN(config.count,
                         ReadOrNull(json, "n_routed_experts", defaults.count, 0, 0, kMaxExperts));
  if (config.count == 0) return config;
  QUIRE_RETURN_IF_ERROR(CheckName(json, "scoring_func", defaults.scoring));
  if (defaults.per_token == 0) {
    QUIRE_ASSIGN_OR_RETURN(config.per_token, json.GetInt("num_experts_per_tok", 1, config.count));
  } else {
    QUIRE_ASSIGN_OR_RETURN(config.per_token, json.GetIntOr("num_experts_per_tok",
                                                           defaults.per_token, 1, config.count));
  }
  QUIRE_ASSIGN_OR_RETURN(
      config.intermediate_size,
      json.GetIntOr("moe_intermediate_size", defaults.intermediate_size, 1, kMaxIntermediate));
  QUIRE_ASSIGN_OR_RETURN(
      const int64_t shared,
      ReadOrNull(json, "n_shared_experts", defaults.shared_count, 0, 0, kMaxExperts));
  config.shared_intermediate_size = shared * config.intermediate_size;
  QUIRE_ASSIGN_OR_RETURN(config.scale, json.GetNumberOr("routed_scaling_factor", defaults.scale));
  if (!(config.scale > 0 && config.scale <= kMaxScale)) {
    return BadField(
        json, "routed_scaling_factor",
        std::to_string(config.scale) + " is not in (0, " + std::to_string(kMaxScale) + "]");
  }
  QUIRE_RETURN_IF_ERROR(ReadNormalises(json, scores, config));
  QUIRE_ASSIGN_OR_RETURN(const bool grouped, ReadChoice(json, scores));
  if (grouped) QUIRE_RETURN_IF_ERROR(ReadGroups(json, defaults, config));
  return config;
}

Result<std::vector<uint8_t>> ReadSparseLayersBehindDense(const JsonValue& json, int64_t layer_count,
                                                         const ExpertConfig& experts) {
  std::vector<uint8_t> sparse(static_cast<size_t>(layer_count), 0);
  QUIRE_ASSIGN_OR_RETURN(const int64_t dense,
                         json.GetIntOr("first_k_dense_replace",
                                       DefaultsOf(experts.scores).dense_layers, 0, kMaxInterval));
  QUIRE_ASSIGN_OR_RETURN(const int64_t step, json.GetIntOr("moe_layer_freq", 1, 1, kMaxInterval));
  for (int64_t i = dense; i < layer_count; ++i) {
    sparse[static_cast<size_t>(i)] = experts.count > 0 && i % step == 0 ? 1 : 0;
  }
  return sparse;
}

}  // namespace quire
