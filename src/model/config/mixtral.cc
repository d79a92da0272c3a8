// Mixtral (Jiang et al. 2024): Mistral with experts in all layers, under names of their own.
#include "model/config/architecture.h"

namespace quire {

const Architecture kMixtral = {
    .name = "MixtralForCausalLM",
    .window = WindowRule::kAlways,
    .rope = {.theta = 1e6},
    .names = {.mlp = {.block = "block_sparse_moe", .gate = "w1", .up = "w3", .down = "w2"}},
    .experts = {.count = 8, .per_token = 2, .normalises = true},
};

}  // namespace quire
