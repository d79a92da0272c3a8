// Mamba-2 (Dao and Gu 2024): state space layers and nothing else. There are no positions, so none
// is too far.
#include "model/config/architecture.h"

namespace quire {

const Architecture kMamba2 = {
    .name = "Mamba2ForCausalLM",
    .mixers = MixerRule::kStateSpace,
    .names = {.embedding = "backbone.embeddings",
              .layers = "backbone.layers",
              .mixer_norm = "norm",
              .mlp_norm = "",
              .final_norm = "backbone.norm_f"},
};

}  // namespace quire
