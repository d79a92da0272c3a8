// Mixtures of experts of the Qwen family (Yang et al. 2024, 2025): Qwen2 with a shared expert
// behind a gate, Qwen3 without one.
#include "model/config/architecture.h"

namespace quire {

const Architecture kQwen2Moe = {
    .name = "Qwen2MoeForCausalLM",
    .qkv_bias = BiasRule::kAlways,
    .experts = {.count = 60,
                .per_token = 4,
                .intermediate_size = 1408,
                .shared_intermediate_size = 5632},
};

const Architecture kQwen3Moe = {
    .name = "Qwen3MoeForCausalLM",
    .qkv_bias = BiasRule::kAttentionBias,
    .o_bias = BiasRule::kAttentionBias,
    .qk_norm = true,
    .experts = {.count = 128, .per_token = 8, .intermediate_size = 768},
};

}  // namespace quire
