// Gemma 2 (Gemma team 2024): norms on both sides of attention and MLP, windows in every other
// layer, soft caps on scores and logits.
#include "model/config/architecture.h"

namespace quire {

const Architecture kGemma2 = {
    .name = "Gemma2ForCausalLM",
    .qkv_bias = BiasRule::kAttentionBias,
    .o_bias = BiasRule::kAttentionBias,
    .window = WindowRule::kPattern,
    .is_gemma = true,
    .attention_cap = true,
    .window_pattern = 2,
    .names = kGemmaNames,
    .norm_offset = 1.0F,
    .scales_embeddings = true,
};

}  // namespace quire
