// What sets architectures apart. Each has a file of its own with a value of this type; the decoder
// is one for all and knows no names.
#ifndef QUIRE_MODEL_CONFIG_ARCHITECTURE_H_
#define QUIRE_MODEL_CONFIG_ARCHITECTURE_H_

#include <cstdint>
#include <string_view>

#include "model/config/expert_config.h"
#include "model/config/model_config.h"
#include "model/config/rope_config.h"
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
  kPattern,   // all layers but each n-th, or by layer_types
};

enum class MixerRule : uint8_t {
  kPlainAttention,  // in all layers
  kStateSpace,      // in all layers
  kHybrid,          // gated delta rule or gated attention, by layer_types
  kLatent,          // latent attention in all layers
};

// Names of an MLP's tensors, and of an expert's.
struct MlpNames {
  std::string_view block = "mlp";
  std::string_view gate = "gate_proj";
  std::string_view up = "up_proj";
  std::string_view down = "down_proj";
};

// Names of tensors.
struct DecoderNames {
  std::string_view head = "lm_head";
  std::string_view embedding = "model.embed_tokens";
  std::string_view layers = "model.layers";
  std::string_view mixer_norm = "input_layernorm";
  std::string_view mixer_output_norm = "";                 // empty: there is none
  std::string_view mlp_norm = "post_attention_layernorm";  // empty: layers have no MLP
  std::string_view mlp_output_norm = "";                   // empty: there is none
  std::string_view final_norm = "model.norm";
  MlpNames mlp = {};
};

// In the Gemma family post_attention_layernorm stands after attention, not before the MLP.
inline constexpr DecoderNames kGemmaNames = {.mixer_output_norm = "post_attention_layernorm",
                                             .mlp_norm = "pre_feedforward_layernorm",
                                             .mlp_output_norm = "post_feedforward_layernorm"};

struct Architecture {
  std::string_view name;  // as in "architectures" of config.json
  // The object of config.json with the fields of the text model, where images have others beside
  // it.
  std::string_view text_config = "";
  BiasRule qkv_bias = BiasRule::kNever;
  BiasRule o_bias = BiasRule::kNever;
  BiasRule mlp_bias = BiasRule::kNever;
  bool qk_norm = false;  // query and key heads are normalised before they are rotated
  bool fused = false;    // q, k and v are one matrix of the checkpoint; so are gate and up
  WindowRule window = WindowRule::kNone;

  // The Gemma family.
  bool is_gemma = false;       // its fields (query_pre_attn_scalar, ...) and its defaults
  bool attention_cap = false;  // attn_logit_softcapping is computed
  int64_t window_pattern = 0;  // kPattern: which n, if sliding_window_pattern does not say
  bool local_rope = false;     // layers with a window have rotary parameters of their own

  RopeDefaults rope = {};
  MixerRule mixers = MixerRule::kPlainAttention;
  DecoderNames names = {};
  float norm_offset = 0.0F;                             // of norm weights
  ExpertDefaults experts = {};                          // of kPlainAttention and kHybrid
  ExpertScores expert_scores = ExpertScores::kSoftmax;  // of kLatent
  bool scales_embeddings = false;                       // they are taken times sqrt(hidden_size)
};

extern const Architecture kLlama;       // llama.cc: Llama 1 to 3, SmolLM2, TinyLlama, Yi
extern const Architecture kMistral;     // mistral.cc
extern const Architecture kQwen2;       // qwen2.cc: Qwen2, Qwen2.5
extern const Architecture kQwen3;       // qwen3.cc
extern const Architecture kPhi3;        // phi3.cc: Phi-3 to Phi-4
extern const Architecture kMixtral;     // mixtral.cc
extern const Architecture kQwen2Moe;    // qwen_moe.cc
extern const Architecture kQwen3Moe;    // qwen_moe.cc
extern const Architecture kGemma2;      // gemma2.cc
extern const Architecture kGemma3;      // gemma3.cc: the text models
extern const Architecture kGemma3Text;  // gemma3.cc: the text part of models that know images
extern const Architecture kMamba2;      // mamba2.cc
extern const Architecture kQwen3Next;   // qwen3_next.cc
extern const Architecture kDeepseekV2;  // deepseek.cc
extern const Architecture kDeepseekV3;  // deepseek.cc

// By its name in config.json. BadArgument lists the known ones.
Result<const Architecture*> FindArchitecture(const ModelConfig& config);
// Null if it is not known.
const Architecture* FindArchitecture(std::string_view name);

bool HasBias(BiasRule rule, const ModelConfig& config);

// Whether the layer is one of those with a window.
bool IsLocalLayer(const Architecture& architecture, const ModelConfig& config, int64_t layer);
// AttentionLayerSpec::window of the layer: 0 also for one that hides nothing within
// max_position_embeddings.
int64_t WindowOfLayer(const Architecture& architecture, const ModelConfig& config, int64_t layer);

}  // namespace quire

#endif  // QUIRE_MODEL_CONFIG_ARCHITECTURE_H_
