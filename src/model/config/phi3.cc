// Phi-3 (Abdin et al. 2024), Phi-3.5 and Phi-4: Llama with its inputs fused, windows in all layers
// where there are any, and LongRoPE in the long models.
#include "model/config/architecture.h"

namespace quire {

const Architecture kPhi3 = {
    .name = "Phi3ForCausalLM",
    .fused = true,
    .window = WindowRule::kAlways,
};

}  // namespace quire
