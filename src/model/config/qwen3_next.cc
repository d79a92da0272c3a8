// Qwen3-Next (Qwen team 2025): three layers of the gated delta rule to one of attention with a gate
// on its output, mixtures of experts, norms of weight 1 + w.
#include "model/config/architecture.h"

namespace quire {

const Architecture kQwen3Next = {
    .name = "Qwen3NextForCausalLM",
    .rope = {.part = 0.25},
    .mixers = MixerRule::kHybrid,
    .norm_offset = 1.0F,
    .experts = {.count = 512,
                .per_token = 10,
                .intermediate_size = 512,
                .shared_intermediate_size = 512,
                .normalises = true},
};

}  // namespace quire
