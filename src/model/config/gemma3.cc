// Gemma 3 (Gemma team 2025), text: Gemma 2 with norms over query and key heads instead of caps on
// scores, windows in five of six layers, and rotary parameters of their own there.
#include <string_view>

#include "model/config/architecture.h"

namespace quire {

namespace {

constexpr Architecture TextModel(std::string_view name, std::string_view text_config,
                                 const DecoderNames& names) {
  return {
      .name = name,
      .text_config = text_config,
      .qkv_bias = BiasRule::kAttentionBias,
      .o_bias = BiasRule::kAttentionBias,
      .qk_norm = true,
      .window = WindowRule::kPattern,
      .is_gemma = true,
      .window_pattern = 6,
      .local_rope = true,
      .names = names,
      .norm_offset = 1.0F,
      .scales_embeddings = true,
  };
}

// Names of the text model in a checkpoint that has a model of images beside it.
constexpr DecoderNames NamesBesideImages() {
  DecoderNames names = kGemmaNames;
  names.head = "language_model.lm_head";
  names.embedding = "language_model.model.embed_tokens";
  names.layers = "language_model.model.layers";
  names.final_norm = "language_model.model.norm";
  return names;
}

}  // namespace

constinit const Architecture kGemma3 = TextModel("Gemma3ForCausalLM", "", kGemmaNames);

constinit const Architecture kGemma3Text =
    TextModel("Gemma3ForConditionalGeneration", "text_config", NamesBesideImages());

}  // namespace quire
