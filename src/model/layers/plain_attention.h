// Attention of the llama family: grouped heads, rotated by the cache, with biases and with norms of
// query and key heads where the architecture has them.
#ifndef QUIRE_MODEL_LAYERS_PLAIN_ATTENTION_H_
#define QUIRE_MODEL_LAYERS_PLAIN_ATTENTION_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "model/config/architecture.h"
#include "model/config/model_config.h"
#include "model/layers/head_norms.h"
#include "model/layers/mixer.h"
#include "model/weights/weights.h"

namespace quire {

class PlainAttention final : public Mixer {
 public:
  // `layer`: its layer in the attention cache.
  static Result<std::unique_ptr<Mixer>> Load(WeightLoader& loader, const std::string& prefix,
                                             const ModelConfig& config,
                                             const Architecture& architecture, int64_t layer);

  int64_t row_floats() const override { return qkv_.packed().n + o_.packed().k; }
  size_t ScratchBytes(const RowOps& ops, int64_t row_count) const override;
  Status Run(const ModelState& state, const MixerRun& run) const override;

 private:
  int64_t layer_ = 0;
  int64_t head_dim_ = 0;
  double scale_ = 0;  // of scores
  std::optional<HeadNorms> norms_;
  LinearWeights qkv_;  // [(Hq + 2 Hkv) D, hidden_size]
  LinearWeights o_;    // [hidden_size, Hq D]
};

}  // namespace quire

#endif  // QUIRE_MODEL_LAYERS_PLAIN_ATTENTION_H_
