// What config.json says about multi-head latent attention: DeepSeek-V2 and V3.
#ifndef QUIRE_MODEL_CONFIG_LATENT_CONFIG_H_
#define QUIRE_MODEL_CONFIG_LATENT_CONFIG_H_

#include <cstdint>

#include "base/json.h"
#include "quire/rope.h"
#include "quire/status.h"

namespace quire {

struct LatentConfig {
  int64_t q_rank = 0;    // 0: queries are projected in one step
  int64_t kv_rank = 0;   // of what is kept of a token, beside the part that is rotated
  int64_t nope_dim = 0;  // of a query head, not rotated
  int64_t rope_dim = 0;  // of a query head, rotated
  int64_t v_dim = 0;     // of an output head
  double scale = 0;      // of scores

  int64_t q_dim() const { return nope_dim + rope_dim; }
  int64_t key_dim() const { return kv_rank + rope_dim; }
};

// Sizes; `scale` is left.
Result<LatentConfig> ReadLatentConfig(const JsonValue& json);

// 1 / sqrt(q_dim), times the square of YaRN's attention factor for all dimensions.
double LatentScale(const LatentConfig& config, const RopeOptions& rope);

}  // namespace quire

#endif  // QUIRE_MODEL_CONFIG_LATENT_CONFIG_H_
