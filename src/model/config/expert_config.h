// What config.json says about mixtures of experts: Mixtral, Qwen2-MoE, Qwen3-MoE, Qwen3-Next,
// DeepSeek-V2 and V3.
#ifndef QUIRE_MODEL_CONFIG_EXPERT_CONFIG_H_
#define QUIRE_MODEL_CONFIG_EXPERT_CONFIG_H_

#include <cstdint>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "quire/status.h"

namespace quire {

enum class ExpertScores : uint8_t { kSoftmax, kSigmoid };

// A router that sends a token to some of many experts, and a shared expert for all tokens.
struct ExpertConfig {
  int64_t count = 0;  // 0: no layer has experts
  int64_t per_token = 0;
  int64_t intermediate_size = 0;
  int64_t shared_intermediate_size = 0;  // 0: there is no shared expert
  bool normalises = true;                // weights of the chosen experts sum to one
  double scale = 1.0;                    // of the weights, after that
  ExpertScores scores = ExpertScores::kSoftmax;
  bool has_choice_bias = false;  // a tensor is added to the scores for the choice, not the weights
  bool has_shared_gate = true;   // the shared expert's output passes a gate
  bool has_shared_bias = false;
  std::string_view shared_name = "shared_expert";  // of its tensors
  // Experts come in groups of neighbours, equal in size; only those in the best groups may be
  // chosen. A group is as good as the sum of its best `group_scores`.
  int64_t group_count = 1;  // at most kMaxExpertGroups
  int64_t groups_per_token = 1;
  int64_t group_scores = 1;  // 1 or 2

  int64_t group_size() const { return count / group_count; }
};

inline constexpr int64_t kMaxExpertGroups = 64;  // bits of a mask; largest known 8

// What transformers takes for fields of Mixtral and the Qwen family that are absent.
struct ExpertDefaults {
  int64_t count = 0;  // 0: the architecture has no experts
  int64_t per_token = 0;
  int64_t intermediate_size = 0;         // 0: that of the model, which has no other MLPs
  int64_t shared_intermediate_size = 0;  // 0: there is no shared expert, whatever the field says
  bool normalises = false;
};

// The fields of Mixtral and the Qwen family.
Result<ExpertConfig> ReadExpertConfig(const JsonValue& json, const ExpertDefaults& defaults);
// [layer], 1 for experts: each decoder_sparse_step-th layer that is not in mlp_only_layers.
Result<std::vector<uint8_t>> ReadSparseLayers(const JsonValue& json, int64_t layer_count,
                                              const ExpertConfig& experts);

// The fields of DeepSeek-V2 (scores by softmax) and V3 (by sigmoids, with a choice bias).
Result<ExpertConfig> ReadGroupedExpertConfig(const JsonValue& json, ExpertScores scores);
// [layer], 1 for experts: each moe_layer_freq-th layer from first_k_dense_replace on.
Result<std::vector<uint8_t>> ReadSparseLayersBehindDense(const JsonValue& json, int64_t layer_count,
                                                         const ExpertConfig& experts);

}  // namespace quire

#endif  // QUIRE_MODEL_CONFIG_EXPERT_CONFIG_H_
