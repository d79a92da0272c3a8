// The rotary embedding of a config.json: rope_theta and rope_scaling of transformers 4,
// rope_parameters of transformers 5.
#ifndef QUIRE_MODEL_CONFIG_ROPE_CONFIG_H_
#define QUIRE_MODEL_CONFIG_ROPE_CONFIG_H_

#include <cstdint>

#include "base/json.h"
#include "quire/rope.h"
#include "quire/status.h"

namespace quire {

// What transformers takes for fields that are absent.
struct RopeDefaults {
  double theta = 10000.0;  // rope_theta
  double part = 1.0;       // partial_rotary_factor
};

// BadArgument names the field. The result has passed ComputeRopeFrequencies.
Result<RopeOptions> ReadRopeOptions(const JsonValue& config, int64_t head_dim,
                                    int64_t max_position_embeddings,
                                    const RopeDefaults& defaults = {});

// Where layers with and without a window have parameters of their own (Gemma 3): rope_parameters
// with an object per kind, or rope_theta and rope_scaling for full attention and
// rope_local_base_freq for windows. Neither is kLongRope, `sliding` is not kDynamic.
struct LayerRopes {
  RopeOptions full;
  RopeOptions sliding;
};
Result<LayerRopes> ReadLayerRopes(const JsonValue& config, int64_t head_dim,
                                  int64_t max_position_embeddings);

}  // namespace quire

#endif  // QUIRE_MODEL_CONFIG_ROPE_CONFIG_H_
