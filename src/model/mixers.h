// The parts of a layer that look at other tokens: gated attention, Mamba-2's state space, the gated
// delta rule. Each holds its weights; what lasts between tokens is in the caches.
#ifndef QUIRE_MODEL_MIXERS_H_
#define QUIRE_MODEL_MIXERS_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "model/model_config.h"
#include "model/recurrent_config.h"
#include "model/row_ops.h"
#include "model/weights.h"
#include "quire/attention_kv_cache.h"
#include "quire/recurrent_cache.h"
#include "quire/status.h"

namespace quire {

// One run of a mixer over the rows of a forward.
struct MixerRun {
  const RowOps& ops;
  int64_t row_count;
  const float* x;  // [n, hidden_size], normalised
  float* floats;   // row_floats() for each row
  void* scratch;   // scratch_bytes(n)
  float* hidden;   // [n, hidden_size]: the output is added
};

// Attention whose output passes a gate that comes with the queries; query and key heads are
// normalised. As in Qwen3-Next.
class GatedAttention {
 public:
  static Result<GatedAttention> Load(WeightLoader& loader, const std::string& prefix,
                                     const ModelConfig& config);

  int64_t row_floats() const;
  size_t ScratchBytes(const RowOps& ops, int64_t row_count) const;
  Status Run(AttentionKVCache& cache, int64_t layer, const MixerRun& run) const;

 private:
  int64_t query_width() const { return query_heads_ * head_dim_; }
  int64_t key_width() const { return key_heads_ * head_dim_; }

  int64_t query_heads_ = 0;
  int64_t key_heads_ = 0;
  int64_t head_dim_ = 0;
  float eps_ = 0;
  LinearWeights in_;  // per query head its query and its gate; keys; values
  LinearWeights out_;
  std::vector<float> q_norm_;  // [head_dim], what is added to one
  std::vector<float> k_norm_;
};

// Layers of the recurrent cache that one mixer takes: its convolution, then its state.
inline constexpr int64_t kRecurrentLayersPerMixer = 2;

// Mamba-2.
class StateSpaceMixer {
 public:
  static Result<StateSpaceMixer> Load(WeightLoader& loader, const std::string& prefix,
                                      const ModelConfig& config);
  static std::vector<RecurrentLayerSpec> Layers(const StateSpaceConfig& config);

  int64_t row_floats() const;
  size_t ScratchBytes(const RowOps& ops, int64_t row_count) const;
  // `layer`: the first of its layers.
  Status Run(RecurrentCache& cache, int64_t layer, const MixerRun& run) const;

 private:
  struct Buffers;
  Buffers Divide(const MixerRun& run) const;
  void Prepare(const MixerRun& run, const Buffers& b) const;
  void GateAndNorm(const MixerRun& run, const Buffers& b) const;

  StateSpaceConfig config_;
  float eps_ = 0;
  LinearWeights in_;  // gate, channels of the convolution, steps
  LinearWeights out_;
  std::vector<float> conv_;         // [channels, width]
  std::vector<float> conv_bias_;    // [channels], or empty
  std::vector<float> step_bias_;    // [heads]
  std::vector<float> decay_rates_;  // [heads], negative
  std::vector<float> skip_;         // [heads]
  std::vector<float> norm_;         // [inner size]
};

// The gated delta rule as in Qwen3-Next.
class GatedDeltaMixer {
 public:
  static Result<GatedDeltaMixer> Load(WeightLoader& loader, const std::string& prefix,
                                      const ModelConfig& config);
  static std::vector<RecurrentLayerSpec> Layers(const GatedDeltaConfig& config);

  int64_t row_floats() const;
  size_t ScratchBytes(const RowOps& ops, int64_t row_count) const;
  // `layer`: the first of its layers.
  Status Run(RecurrentCache& cache, int64_t layer, const MixerRun& run) const;

 private:
  struct Buffers;
  Buffers Divide(const MixerRun& run) const;
  void Prepare(const MixerRun& run, const Buffers& b) const;
  void NormAndGate(const MixerRun& run, const Buffers& b) const;

  GatedDeltaConfig config_;
  float eps_ = 0;
  LinearWeights in_;  // per key head: query, key, values, gates; then per key head: betas, decays
  LinearWeights out_;
  std::vector<float> conv_;         // [channels, width]
  std::vector<float> step_bias_;    // [value heads]
  std::vector<float> decay_rates_;  // [value heads], negative
  std::vector<float> norm_;         // [value_dim]
};

}  // namespace quire

#endif  // QUIRE_MODEL_MIXERS_H_
