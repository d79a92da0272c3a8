#include "model/config/architecture.h"

#include <string>

#include "model/weights/safetensors.h"

namespace quire {
namespace {

constexpr const Architecture* kArchitectures[] = {
    &kLlama,  &kMistral, &kMixtral,    &kQwen2,  &kQwen3,     &kQwen2Moe,   &kQwen3Moe,  &kPhi3,
    &kGemma2, &kGemma3,  &kGemma3Text, &kMamba2, &kQwen3Next, &kDeepseekV2, &kDeepseekV3};

}  // namespace

const Architecture* FindArchitecture(std::string_view name) {
  for (const Architecture* const architecture : kArchitectures) {
    if (architecture->name == name) return architecture;
  }
  return nullptr;
}

Result<const Architecture*> FindArchitecture(const ModelConfig& config) {
  const Architecture* const found = FindArchitecture(config.architecture);
  if (found != nullptr) return found;
  std::string known;
  for (const Architecture* const architecture : kArchitectures) {
    known += (known.empty() ? "" : ", ") + std::string(architecture->name);
  }
  return Status(StatusCode::kBadArgument, config.path +
                                              ".architectures: " + QuotedName(config.architecture) +
                                              " is not known; known are " + known);
}

bool HasBias(BiasRule rule, const ModelConfig& config) {
  switch (rule) {
    case BiasRule::kNever:
      return false;
    case BiasRule::kAlways:
      return true;
    case BiasRule::kAttentionBias:
      return config.attention_bias;
    case BiasRule::kMlpBias:
      return config.mlp_bias;
  }
  return false;
}

bool IsLocalLayer(const Architecture& architecture, const ModelConfig& config, int64_t layer) {
  const WindowConfig& window = config.window;
  const auto index = static_cast<size_t>(layer);
  switch (architecture.window) {
    case WindowRule::kNone:
      return false;
    case WindowRule::kAlways:
      return true;
    case WindowRule::kSwitched:
      if (!window.enabled) return false;
      return window.layer_types.empty() ? layer >= window.first_layer : window.layer_types[index];
    case WindowRule::kPattern:
      if (!window.layer_types.empty()) return window.layer_types[index];
      return (layer + 1) % window.pattern.value_or(architecture.window_pattern) != 0;
  }
  return false;
}

int64_t WindowOfLayer(const Architecture& architecture, const ModelConfig& config, int64_t layer) {
  if (!config.window.size || *config.window.size >= config.max_position_embeddings) return 0;
  return IsLocalLayer(architecture, config, layer) ? *config.window.size : 0;
}

}  // namespace quire
