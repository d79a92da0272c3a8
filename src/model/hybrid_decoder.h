// The decoder of models with recurrent layers: embedding; per layer a norm and a mixer (attention,
// state space or gated delta rule), and, where the architecture has them, a norm and an MLP or
// experts; final norm and head.
#ifndef QUIRE_MODEL_HYBRID_DECODER_H_
#define QUIRE_MODEL_HYBRID_DECODER_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "model/architecture.h"
#include "model/checkpoint.h"
#include "model/decoder.h"
#include "model/mixers.h"
#include "model/model_config.h"
#include "model/row_ops.h"
#include "model/sparse_mlp.h"
#include "model/weights.h"
#include "quire/model.h"
#include "tensor/host_memory.h"

namespace quire {

// The residual stream is float32 throughout, and so are recurrent states and what enters them.
// Every operation works row by row or token by token.
class HybridDecoder final : public Model {
 public:
  // As those of Decoder. REQUIRES: config.mixers has an entry for each layer.
  static Result<std::unique_ptr<HybridDecoder>> Create(const ModelConfig& config,
                                                       const Architecture& architecture,
                                                       Checkpoint checkpoint,
                                                       DecoderOptions options);
  static Result<ModelMeasure> Measure(const ModelConfig& config, const Architecture& architecture,
                                      Checkpoint checkpoint, DecoderOptions options,
                                      int64_t row_count, int64_t logit_row_count);

  const ModelInfo& info() const override { return info_; }
  // What is taken now, for tests.
  int64_t workspace_bytes() const { return static_cast<int64_t>(workspace_.size()); }
  Status Forward(const ModelState& state, std::span<const int32_t> token_ids,
                 std::span<const int64_t> logit_rows, float* logits) override;

 private:
  struct DenseMlp {
    LinearWeights gate_up;
    LinearWeights down;
  };
  using Mixer = std::variant<GatedAttention, StateSpaceMixer, GatedDeltaMixer>;
  using Mlp = std::variant<std::monostate, DenseMlp, SparseMlp>;  // monostate: none
  struct Layer {
    std::vector<float> mixer_norm;
    std::vector<float> mlp_norm;  // empty without an MLP
    Mixer mixer;
    Mlp mlp;
    int64_t state_layer = 0;  // the first of the mixer's layers in its cache
  };

  // Of one forward of n rows.
  struct Buffers {
    float* hidden;  // [n, hidden_size], the residual stream
    float* normed;  // [n, hidden_size]
    float* floats;  // of the mixer, or of the MLP
    void* scratch;  // of products
  };
  // Of the workspace, in bytes.
  struct BufferSizes {
    size_t hidden;  // of hidden, and of normed
    size_t floats;
    size_t scratch;
    size_t total() const { return 2 * hidden + floats + scratch; }
  };

  HybridDecoder(const ModelConfig& config, const Architecture& architecture, Checkpoint checkpoint,
                DecoderOptions options);

  Status LoadWeights(WeightUse use);
  Result<Layer> LoadLayer(WeightLoader& loader, int64_t index);
  Result<Mixer> LoadMixer(WeightLoader& loader, MixerKind kind, const std::string& prefix) const;
  Status LoadMlp(WeightLoader& loader, int64_t index, const std::string& prefix, Layer* layer);
  int64_t AddStateLayers(MixerKind kind);
  void FillInfo(const WeightLoader& loader);

  Status CheckForward(const ModelState& state, std::span<const int32_t> token_ids,
                      std::span<const int64_t> logit_rows, const float* logits) const;
  int64_t RowFloats() const;
  BufferSizes SizesOf(int64_t row_count, int64_t logit_row_count) const;
  Result<Buffers> PrepareBuffers(int64_t row_count, int64_t logit_row_count);
  void Norm(const std::vector<float>& weight, const float* x, int64_t row_count, float* y) const;
  Status RunMixer(const ModelState& state, const Layer& layer, const MixerRun& run) const;
  void RunMlp(const Layer& layer, int64_t row_count, const Buffers& b) const;
  void ComputeLogits(std::span<const int64_t> logit_rows, const Buffers& b, float* logits) const;

  const ModelConfig config_;
  const Architecture& architecture_;
  const Checkpoint checkpoint_;  // the embedding is read from its mapping
  const DecoderOptions options_;
  const RowOps ops_;
  ModelInfo info_;

  RowTable embedding_;
  std::vector<Layer> layers_;
  std::vector<float> final_norm_;
  LinearWeights head_;

  HostMemory workspace_;  // grows to the largest forward so far
};

}  // namespace quire

#endif  // QUIRE_MODEL_HYBRID_DECODER_H_
