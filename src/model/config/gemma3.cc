// Gemma 3 (Gemma team 2025), text: Gemma 2 with norms over query and key heads instead of caps on
// scores, windows in five of six layers, and rotary parameters of their own there.
#include "model/config/architecture.h"

namespace quire {

const Architecture kGemma3 = {
    .name = "Gemma3ForCausalLM",
    .qkv_bias = BiasRule::kAttentionBias,
    .o_bias = BiasRule::kAttentionBias,
    .qk_norm = true,
    .window = WindowRule::kPattern,
    .is_gemma = true,
    .window_pattern = 6,
    .local_rope = true,
    .names = kGemmaNames,
    .norm_offset = 1.0F,
    .scales_embeddings = true,
};

const Architecture kGemma3Text = {
    .name = "Gemma3ForConditionalGeneration",
    .text_config = "text_config",
    .qkv_bias = BiasRule::kAttentionBias,
    .o_bias = BiasRule::kAttentionBias,
    .qk_norm = true,
    .window = WindowRule::kPattern,
    .is_gemma = true,
    .window_pattern = 6,
    .local_rope = true,
    .names = {.head = "language_model.lm_head",
              .embedding = "language_model.model.embed_tokens",
              .layers = "language_model.model.layers",
              .mixer_output_norm = "post_attention_layernorm",
              .mlp_norm = "pre_feedforward_layernorm",
              .mlp_output_norm = "post_feedforward_layernorm",
              .final_norm = "language_model.model.norm"},
    .norm_offset = 1.0F,
    .scales_embeddings = true,
};

}  // namespace quire
