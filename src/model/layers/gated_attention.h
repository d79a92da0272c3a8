// Attention whose output passes a gate that comes with the queries; query and key heads are
// normalised. As in Qwen3-Next.
#ifndef QUIRE_MODEL_LAYERS_GATED_ATTENTION_H_
#define QUIRE_MODEL_LAYERS_GATED_ATTENTION_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "model/config/architecture.h"
#include "model/config/model_config.h"
#include "model/layers/head_norms.h"
#include "model/layers/mixer.h"
#include "model/weights/weights.h"

namespace quire {

class GatedAttention final : public Mixer {
 public:
  // `layer`: its layer in the attention cache.
  static Result<std::unique_ptr<Mixer>> Load(WeightLoader& loader, const std::string& prefix,
                                             const ModelConfig& config,
                                             const Architecture& architecture, int64_t layer);

  int64_t row_floats() const override { return in_width() + qkv_width() + query_width(); }
  size_t ScratchBytes(const RowOps& ops, int64_t row_count) const override;
  Status Run(const ModelState& state, const MixerRun& run) const override;

 private:
  int64_t query_width() const { return query_heads_ * head_dim_; }
  int64_t key_width() const { return key_heads_ * head_dim_; }
  int64_t qkv_width() const { return query_width() + 2 * key_width(); }
  int64_t in_width() const { return query_width() + qkv_width(); }
  void SplitGates(const MixerRun& run, const float* in, float* qkv) const;
  void Gate(const MixerRun& run, int64_t row_count, const float* in, float* o) const;

  int64_t layer_ = 0;
  int64_t query_heads_ = 0;
  int64_t key_heads_ = 0;
  int64_t head_dim_ = 0;
  HeadNorms norms_;
  LinearWeights in_;  // per query head its query and its gate; keys; values
  LinearWeights out_;
};

}  // namespace quire

#endif  // QUIRE_MODEL_LAYERS_GATED_ATTENTION_H_
