// Qwen2 and Qwen2.5 (Yang et al. 2024): Llama with biases on queries, keys and values.
#include "model/config/architecture.h"

namespace quire {

const Architecture kQwen2 = {
    .name = "Qwen2ForCausalLM",
    .qkv_bias = BiasRule::kAlways,
    .window = WindowRule::kSwitched,
};

}  // namespace quire
