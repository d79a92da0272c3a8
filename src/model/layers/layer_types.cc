#include "model/layers/layer_types.h"

#include <utility>

#include "model/layers/gated_attention.h"
#include "model/layers/gated_delta_mixer.h"
#include "model/layers/gated_mlp.h"
#include "model/layers/latent_attention.h"
#include "model/layers/plain_attention.h"
#include "model/layers/sparse_mlp.h"
#include "model/layers/state_space_mixer.h"

namespace quire {
namespace {

// The new layer's number in the attention cache.
int64_t AddAttentionLayer(const LayerInputs& inputs, int64_t index, ModelInfo* info) {
  const ModelConfig& config = inputs.config;
  AttentionLayerSpec spec{.num_qo_heads = config.num_attention_heads,
                          .num_kv_heads = config.num_key_value_heads,
                          .qk_head_dim = config.head_dim,
                          .v_head_dim = config.head_dim,
                          .dtype = inputs.dtype,
                          .soft_cap = config.attention_cap};
  // A layer is turned as one with a window also where that window hides nothing.
  spec.window = WindowOfLayer(inputs.architecture, config, index);
  if (IsLocalLayer(inputs.architecture, config, index)) spec.rope = config.local_rope;
  info->layers.push_back(std::move(spec));
  return static_cast<int64_t>(info->layers.size()) - 1;
}

int64_t AddLatentLayer(const LayerInputs& inputs, ModelInfo* info) {
  const LatentConfig& config = *inputs.config.latent;
  info->layers.push_back({.num_qo_heads = inputs.config.num_attention_heads,
                          .num_kv_heads = 1,
                          .qk_head_dim = config.key_dim(),
                          .v_head_dim = config.kv_rank,
                          .dtype = inputs.dtype,
                          .latent = true});
  return static_cast<int64_t>(info->layers.size()) - 1;
}

// The first new layer's number in the recurrent cache.
int64_t AddRecurrentLayers(const std::vector<RecurrentLayerSpec>& added, ModelInfo* info) {
  std::vector<RecurrentLayerSpec>& layers = info->recurrent_layers;
  layers.insert(layers.end(), added.begin(), added.end());
  return static_cast<int64_t>(layers.size() - added.size());
}

bool IsSparse(const ModelConfig& config, int64_t index) {
  return !config.sparse_layers.empty() && config.sparse_layers[static_cast<size_t>(index)] != 0;
}

}  // namespace

Result<std::shared_ptr<RopeTable>> AnglesOfMixers(const ModelConfig& config) {
  if (!config.latent) return std::shared_ptr<RopeTable>();
  QUIRE_ASSIGN_OR_RETURN(RopeFrequencies frequencies,
                         ComputeRopeFrequencies(config.rope, config.latent->rope_dim, false));
  return std::make_shared<RopeTable>(std::move(frequencies));
}

std::string LayerPrefix(const LayerInputs& inputs, int64_t index) {
  return std::string(inputs.architecture.names.layers) + "." + std::to_string(index) + ".";
}

Result<std::unique_ptr<Mixer>> LoadMixer(const LayerInputs& inputs, int64_t index,
                                         ModelInfo* info) {
  const ModelConfig& config = inputs.config;
  const std::string prefix = LayerPrefix(inputs, index);
  switch (config.mixers[static_cast<size_t>(index)]) {
    case MixerKind::kPlainAttention:
      return PlainAttention::Load(inputs.loader, prefix + "self_attn.", config, inputs.architecture,
                                  AddAttentionLayer(inputs, index, info));
    case MixerKind::kGatedAttention:
      return GatedAttention::Load(inputs.loader, prefix + "self_attn.", config, inputs.architecture,
                                  AddAttentionLayer(inputs, index, info));
    case MixerKind::kLatentAttention:
      return LatentAttention::Load(inputs.loader, prefix + "self_attn.", config,
                                   AddLatentLayer(inputs, info), inputs.angles);
    case MixerKind::kStateSpace:
      return StateSpaceMixer::Load(
          inputs.loader, prefix + "mixer.", config,
          AddRecurrentLayers(StateSpaceMixer::Layers(*config.state_space), info));
    case MixerKind::kGatedDelta:
      break;
  }
  return GatedDeltaMixer::Load(
      inputs.loader, prefix + "linear_attn.", config,
      AddRecurrentLayers(GatedDeltaMixer::Layers(*config.gated_delta), info));
}

Result<std::unique_ptr<Mlp>> LoadMlp(const LayerInputs& inputs, int64_t index) {
  const ModelConfig& config = inputs.config;
  const MlpNames& names = inputs.architecture.names.mlp;
  const std::string prefix = LayerPrefix(inputs, index) + std::string(names.block) + ".";
  if (IsSparse(config, index)) {
    return SparseMlp::Load(inputs.loader, prefix,
                           {.hidden_size = config.hidden_size,
                            .intermediate_size = config.experts.intermediate_size,
                            .activation = config.activation,
                            .names = names},
                           config.experts);
  }
  QUIRE_ASSIGN_OR_RETURN(GatedMlp mlp,
                         GatedMlp::Load(inputs.loader, prefix,
                                        {.hidden_size = config.hidden_size,
                                         .intermediate_size = config.intermediate_size,
                                         .has_bias = HasBias(inputs.architecture.mlp_bias, config),
                                         .fused = inputs.architecture.fused,
                                         .activation = config.activation,
                                         .names = names}));
  return std::unique_ptr<Mlp>(std::make_unique<GatedMlp>(std::move(mlp)));
}

}  // namespace quire
