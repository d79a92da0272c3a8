// config.json and generation_config.json of a Hugging Face model folder, in the forms of
// transformers 4 and 5, as one value whose fields have been checked.
#ifndef QUIRE_MODEL_CONFIG_MODEL_CONFIG_H_
#define QUIRE_MODEL_CONFIG_MODEL_CONFIG_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/activation.h"
#include "model/config/expert_config.h"
#include "model/config/latent_config.h"
#include "model/config/recurrent_config.h"
#include "model/weights/quantised_folder.h"
#include "quire/rope.h"
#include "quire/status.h"

namespace quire {

// What the configuration says about sliding windows; whether one is in effect is the architecture's
// to say.
struct WindowConfig {
  std::optional<int64_t> size;     // sliding_window
  bool enabled = false;            // use_sliding_window
  int64_t first_layer = 0;         // max_window_layers: layers before it see everything
  std::optional<int64_t> pattern;  // sliding_window_pattern
  std::vector<bool> layer_types;   // [layer], true for "sliding_attention"; or empty
};

struct ModelConfig {
  std::string path;          // of config.json, for messages
  std::string architecture;  // the first of "architectures"
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  int64_t num_hidden_layers = 0;
  int64_t num_attention_heads = 0;
  int64_t num_key_value_heads = 0;
  int64_t head_dim = 0;
  int64_t max_position_embeddings = 0;
  double rms_norm_eps = 1e-6;
  bool tie_word_embeddings = false;
  bool attention_bias = false;
  bool mlp_bias = false;
  WindowConfig window;
  // Mode kNormal, rotary_dim set, half-split pairs but for some latent attention; passes
  // ComputeRopeFrequencies.
  Activation activation = Activation::kSilu;  // of the MLPs and experts
  RopeOptions rope;
  std::optional<RopeOptions> local_rope;  // of layers with a window, where it is another one
  double query_scalar = 0;                // scores are divided by its root: head_dim as a rule
  double attention_cap = 0;               // AttentionLayerSpec::soft_cap
  double logit_cap = 0;                   // the same of the logits
  std::vector<MixerKind> mixers;          // [layer]
  std::vector<uint8_t> sparse_layers;     // [layer], 1: experts in place of an MLP; or empty: none
  std::optional<StateSpaceConfig> state_space;
  std::optional<GatedDeltaConfig> gated_delta;
  std::optional<LatentConfig> latent;  // rope is that of its rotated part
  ExpertConfig experts;
  std::optional<FolderQuantisation> quantisation;  // of matrices that the folder holds so
  std::vector<int64_t> eos_token_ids;
  int64_t bos_token_id = -1;  // -1: none
};

// The texts of the two files; `generation_config` may be empty (no such file). `path` names
// config.json in messages; REQUIRES: it ends in "config.json". Corrupt for text that is no JSON;
// BadArgument for a field that is missing, of the wrong type, out of range, or that asks for
// something Quire does not compute, with the field and its value.
Result<ModelConfig> ParseModelConfig(std::string_view config, std::string_view generation_config,
                                     const std::string& path);

// Reads both files of the folder. NotFound for a folder without config.json.
Result<ModelConfig> ReadModelConfig(const std::string& directory);

}  // namespace quire

#endif  // QUIRE_MODEL_CONFIG_MODEL_CONFIG_H_
