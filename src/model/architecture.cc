#include "model/architecture.h"

#include <string>

#include "model/safetensors.h"

namespace quire {
namespace {

constexpr const Architecture* kArchitectures[] = {&kLlama, &kMistral, &kQwen2, &kQwen3};

bool WindowInEffect(const Architecture& architecture, const WindowConfig& window,
                    const ModelConfig& config) {
  if (!window.size || *window.size >= config.max_position_embeddings) return false;
  switch (architecture.window) {
    case WindowRule::kNone:
      return false;
    case WindowRule::kAlways:
      return true;
    case WindowRule::kSwitched:
      if (!window.enabled) return false;
      if (window.has_layer_types) return window.has_sliding_layer_type;
      return window.first_layer < config.num_hidden_layers;
  }
  return false;
}

}  // namespace

Result<const Architecture*> FindArchitecture(const ModelConfig& config) {
  std::string known;
  for (const Architecture* const architecture : kArchitectures) {
    if (architecture->name == config.architecture) return architecture;
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

Status CheckNoWindow(const Architecture& architecture, const ModelConfig& config) {
  if (!WindowInEffect(architecture, config.window, config)) return Status();
  const std::string size = std::to_string(*config.window.size);
  const bool switched = architecture.window == WindowRule::kSwitched;
  return Status(StatusCode::kBadArgument,
                config.path + ".sliding_window: a window of " + size +
                    " is shorter than max_position_embeddings, " +
                    std::to_string(config.max_position_embeddings) +
                    ", and sliding windows are not computed; lower max_position_embeddings to " +
                    size + " (exact up to that length), or set " +
                    (switched ? "use_sliding_window to false" : "sliding_window to null") +
                    " (answers differ from the trained model's beyond it)");
}

}  // namespace quire
