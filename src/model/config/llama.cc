// Llama (Touvron et al. 2023, Dubey et al. 2024). Biases are optional by configuration, as in
// transformers.
#include "model/config/architecture.h"

namespace quire {

const Architecture kLlama = {
    .name = "LlamaForCausalLM",
    .qkv_bias = BiasRule::kAttentionBias,
    .o_bias = BiasRule::kAttentionBias,
    .mlp_bias = BiasRule::kMlpBias,
};

}  // namespace quire
