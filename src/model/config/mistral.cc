// Mistral (Jiang et al. 2023): Llama with a sliding window in its first version, without one since
// 0.2.
#include "model/config/architecture.h"

namespace quire {

const Architecture kMistral = {
    .name = "MistralForCausalLM",
    .window = WindowRule::kAlways,
};

}  // namespace quire
