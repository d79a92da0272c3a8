// DeepSeek-V2 (arXiv 2405.04434) and V3 (arXiv 2412.19437): latent attention, and experts behind
// the first layers. V3 scores experts by sigmoids, and a bias takes part in their choice.
#include "model/config/architecture.h"

namespace quire {

const Architecture kDeepseekV2 = {
    .name = "DeepseekV2ForCausalLM",
    .mlp_bias = BiasRule::kMlpBias,
    .mixers = MixerRule::kLatent,
};

const Architecture kDeepseekV3 = {
    .name = "DeepseekV3ForCausalLM",
    .mixers = MixerRule::kLatent,
    .expert_scores = ExpertScores::kSigmoid,
};

}  // namespace quire
