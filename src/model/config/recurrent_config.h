// What config.json says about recurrent layers: Mamba-2, Qwen3-Next.
#ifndef QUIRE_MODEL_CONFIG_RECURRENT_CONFIG_H_
#define QUIRE_MODEL_CONFIG_RECURRENT_CONFIG_H_

#include <cstdint>
#include <limits>
#include <vector>

#include "base/json.h"
#include "quire/status.h"

namespace quire {

enum class MixerKind : uint8_t {
  kPlainAttention,
  kGatedAttention,
  kLatentAttention,
  kStateSpace,
  kGatedDelta,
};

// Mamba-2 (Dao and Gu 2024).
struct StateSpaceConfig {
  int64_t num_heads = 0;
  int64_t head_dim = 0;
  int64_t state_size = 0;
  int64_t num_groups = 0;  // divides num_heads
  int64_t conv_width = 0;
  bool has_bias = false;  // of the projections
  bool has_conv_bias = true;
  double step_min = 0;  // the step is clamped to [step_min, step_max]
  double step_max = std::numeric_limits<double>::infinity();

  int64_t inner_size() const { return num_heads * head_dim; }
  int64_t group_width() const { return num_groups * state_size; }
  int64_t conv_channels() const { return inner_size() + 2 * group_width(); }
};

// The gated delta rule (Yang, Kautz and Hatamizadeh 2024) as in Qwen3-Next.
struct GatedDeltaConfig {
  int64_t num_key_heads = 0;
  int64_t num_value_heads = 0;  // a multiple of num_key_heads
  int64_t key_dim = 0;
  int64_t value_dim = 0;
  int64_t conv_width = 0;

  int64_t key_width() const { return num_key_heads * key_dim; }
  int64_t value_width() const { return num_value_heads * value_dim; }
  int64_t conv_channels() const { return 2 * key_width() + value_width(); }
};

// Mamba-2's fields, under their names in transformers.
Result<StateSpaceConfig> ReadStateSpaceConfig(const JsonValue& json, int64_t hidden_size);

// The fields of Qwen3-Next.
Result<GatedDeltaConfig> ReadGatedDeltaConfig(const JsonValue& json);
// layer_types, else each full_attention_interval-th layer is one of attention.
Result<std::vector<MixerKind>> ReadMixers(const JsonValue& json, int64_t layer_count);

}  // namespace quire

#endif  // QUIRE_MODEL_CONFIG_RECURRENT_CONFIG_H_
