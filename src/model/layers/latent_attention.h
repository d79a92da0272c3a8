// Multi-head latent attention (MLA; DeepSeek-V2, arXiv 2405.04434), absorbed: of a token a latent
// vector and one rotated key are kept for all heads. Queries are carried into the latent space, and
// outputs out of it, by each head's part of the matrix that would expand latents to keys and
// values.
#ifndef QUIRE_MODEL_LAYERS_LATENT_ATTENTION_H_
#define QUIRE_MODEL_LAYERS_LATENT_ATTENTION_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kv/plan/rope_table.h"
#include "model/config/latent_config.h"
#include "model/config/model_config.h"
#include "model/layers/mixer.h"
#include "model/weights/weights.h"

namespace quire {

class LatentAttention final : public Mixer {
 public:
  // `layer`: its layer in the attention cache. `angles`: of all the model's layers together; a run
  // provides those of its positions.
  static Result<std::unique_ptr<Mixer>> Load(WeightLoader& loader, const std::string& prefix,
                                             const ModelConfig& config, int64_t layer,
                                             std::shared_ptr<RopeTable> angles);

  int64_t row_floats() const override;
  size_t ScratchBytes(const RowOps& ops, int64_t row_count) const override;
  Status Run(const ModelState& state, const MixerRun& run) const override;

 private:
  struct Buffers;
  Status LoadQueries(WeightLoader& loader, const std::string& prefix, const ModelConfig& config);
  Status LoadLatents(WeightLoader& loader, const std::string& prefix, const ModelConfig& config);
  int64_t q_width() const { return heads_ * config_.q_dim(); }
  int64_t v_width() const { return heads_ * config_.v_dim; }
  Buffers Divide(const MixerRun& run) const;
  void ProjectQueries(const MixerRun& run, const Buffers& b) const;
  void Rotate(int32_t position, const float* from, float* to) const;
  void RotateRows(const MixerRun& run, std::span<const int32_t> positions, const Buffers& b) const;

  LatentConfig config_;
  int64_t layer_ = 0;
  int64_t heads_ = 0;
  bool interleaved_ = true;  // pairs of the rotated part
  std::shared_ptr<RopeTable> angles_;
  LinearWeights q_in_;                        // [q_rank, hidden_size]; without a rank there is none
  std::vector<float> q_norm_;                 // [q_rank], or empty
  LinearWeights q_;                           // [Hq q_dim, q_rank or hidden_size]
  LinearWeights kv_;                          // [kv_rank + rope_dim, hidden_size]
  std::vector<float> kv_norm_;                // [kv_rank]
  std::vector<LinearWeights> into_latent_;    // [Hq] of [kv_rank, nope_dim]
  std::vector<LinearWeights> out_of_latent_;  // [Hq] of [v_dim, kv_rank]
  LinearWeights o_;                           // [hidden_size, Hq v_dim]
};

}  // namespace quire

#endif  // QUIRE_MODEL_LAYERS_LATENT_ATTENTION_H_
