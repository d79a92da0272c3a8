// What sets the architectures of the llama family apart. Each has a file of its own with a value of
// this type; the decoder is one for all and knows no names.
#ifndef QUIRE_MODEL_ARCHITECTURE_H_
#define QUIRE_MODEL_ARCHITECTURE_H_

#include <cstdint>
#include <string_view>

#include "model/model_config.h"
#include "quire/status.h"

namespace quire {

enum class BiasRule : uint8_t {
  kNever,
  kAlways,
  kAttentionBias,  // the field attention_bias says
  kMlpBias,        // the field mlp_bias says
};

enum class WindowRule : uint8_t {
  kNone,      // the fields about windows mean nothing to this architecture
  kAlways,    // sliding_window, if it is there, holds in all layers
  kSwitched,  // use_sliding_window switches it on, in layers from max_window_layers or by
              // layer_types
};

struct Architecture {
  std::string_view name;  // as in "architectures" of config.json
  BiasRule qkv_bias = BiasRule::kNever;
  BiasRule o_bias = BiasRule::kNever;
  BiasRule mlp_bias = BiasRule::kNever;
  bool qk_norm = false;  // query and key heads are normalised before they are rotated
  WindowRule window = WindowRule::kNone;
};

extern const Architecture kLlama;    // llama.cc: Llama 1 to 3, SmolLM2, TinyLlama, Yi
extern const Architecture kMistral;  // mistral.cc
extern const Architecture kQwen2;    // qwen2.cc: Qwen2, Qwen2.5
extern const Architecture kQwen3;    // qwen3.cc

// By its name in config.json. BadArgument lists the known ones.
Result<const Architecture*> FindArchitecture(const ModelConfig& config);

bool HasBias(BiasRule rule, const ModelConfig& config);

// BadArgument if the configuration's window would hide tokens within max_position_embeddings; it
// says which field to change.
Status CheckNoWindow(const Architecture& architecture, const ModelConfig& config);

}  // namespace quire

#endif  // QUIRE_MODEL_ARCHITECTURE_H_
