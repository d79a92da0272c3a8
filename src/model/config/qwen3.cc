// Qwen3 (Yang et al. 2025): Llama with RMS norms over each query and key head.
#include "model/config/architecture.h"

namespace quire {

const Architecture kQwen3 = {
    .name = "Qwen3ForCausalLM",
    .qkv_bias = BiasRule::kAttentionBias,
    .o_bias = BiasRule::kAttentionBias,
    .qk_norm = true,
    .window = WindowRule::kSwitched,
};

}  // namespace quire
