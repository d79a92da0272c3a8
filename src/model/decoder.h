// The decoder of all models: embedding; per layer a norm and a mixer, a norm and an MLP; final norm
// and head. What mixers and MLPs compute is theirs (mixer.h); which a layer has, layer_types.h
// says.
#ifndef QUIRE_MODEL_DECODER_H_
#define QUIRE_MODEL_DECODER_H_

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kernels/backend.h"
#include "model/config/architecture.h"
#include "model/config/model_config.h"
#include "model/layers/layer_types.h"
#include "model/layers/mixer.h"
#include "model/layers/query_rows.h"
#include "model/layers/row_ops.h"
#include "model/weights/checkpoint.h"
#include "model/weights/weights.h"
#include "quire/model.h"
#include "tensor/host_memory.h"

namespace quire {

struct DecoderOptions {
  DType dtype = DType::kBF16;      // kF32 or kBF16, see ModelOptions
  DType activations = DType::kI8;  // see there
  const Backend* backend = nullptr;
  std::shared_ptr<ParallelRunner> runner;
};

// The residual stream is float32 throughout. Every operation works row by row or token by token, so
// a row's values do not depend on which other rows stand in the batch.
class Decoder final : public Model {
 public:
  // Loads all weights, and notes them in `record` unless it is null. Errors are those of
  // WeightLoader and Checkpoint.
  static Result<std::unique_ptr<Decoder>> Create(const ModelConfig& config,
                                                 const Architecture& architecture,
                                                 const Checkpoint& checkpoint,
                                                 DecoderOptions options,
                                                 std::vector<TensorToWrite>* record = nullptr);

  // See Model::Measure.
  static Result<ModelMeasure> Measure(const ModelConfig& config, const Architecture& architecture,
                                      const Checkpoint& checkpoint, DecoderOptions options,
                                      int64_t row_count, int64_t logit_row_count);

  const ModelInfo& info() const override { return info_; }
  // What is taken now, for tests.
  int64_t workspace_bytes() const { return static_cast<int64_t>(workspace_.size()); }
  Status Forward(const ModelState& state, std::span<const int32_t> token_ids,
                 std::span<const int64_t> logit_rows, float* logits) override;

 private:
  // Norms: [hidden_size], or empty where there is none.
  struct Layer {
    std::vector<float> mixer_norm;
    std::unique_ptr<Mixer> mixer;
    std::vector<float> mixer_output_norm;
    std::vector<float> mlp_norm;
    std::unique_ptr<Mlp> mlp;  // null: none
    std::vector<float> mlp_output_norm;
  };

  // Memory of one forward of n rows. Mixer and MLP share theirs: they are never alive together.
  struct Buffers {
    float* hidden;  // [n, hidden_size], the residual stream
    float* normed;  // [n, hidden_size]
    float* floats;  // of the mixer, or of the MLP
    void* scratch;  // of products
  };
  // The parts of the workspace, in bytes.
  struct BufferSizes {
    size_t hidden;  // of hidden, and of normed
    size_t floats;
    size_t scratch;
    size_t total() const { return 2 * hidden + floats + scratch; }
  };

  Decoder(const ModelConfig& config, const Architecture& architecture, DecoderOptions options);

  Status LoadWeights(const Checkpoint& checkpoint, WeightUse use,
                     std::vector<TensorToWrite>* record);
  Result<Layer> LoadLayer(const LayerInputs& inputs, int64_t index);
  void FillInfo(const WeightLoader& loader);

  Status CheckForward(const ModelState& state, std::span<const int32_t> token_ids,
                      std::span<const int64_t> logit_rows, const float* logits) const;
  int64_t RowFloats() const;
  BufferSizes SizesOf(int64_t row_count, int64_t logit_row_count) const;
  Result<Buffers> PrepareBuffers(int64_t row_count, int64_t logit_row_count);
  void Norm(const std::vector<float>& weight, const float* x, int64_t row_count, float* y) const;
  MixerRun PartOfLayer(const std::vector<float>& norm, const std::vector<float>& output_norm,
                       QueryRows& rows, const Buffers& b) const;
  void AddNormed(const std::vector<float>& output_norm, int64_t row_count, const Buffers& b) const;
  // `rows`: those that come to the layer, then those that go on.
  Status RunLayer(const ModelState& state, const Layer& layer, QueryRows& rows,
                  const Buffers& b) const;
  void Embed(std::span<const int32_t> token_ids, float* hidden) const;
  Status ComputeLogits(std::span<const int64_t> logit_rows, const QueryRows& rows, const Buffers& b,
                       float* logits) const;

  const ModelConfig config_;
  const Architecture& architecture_;
  const DecoderOptions options_;
  const RowOps ops_;
  ModelInfo info_;

  RowTable embedding_;  // empty where it is tied to the head, which then holds the same numbers
  std::vector<Layer> layers_;
  std::vector<float> final_norm_;
  LinearWeights head_;

  HostMemory workspace_;  // grows to the largest forward so far
};

}  // namespace quire

#endif  // QUIRE_MODEL_DECODER_H_
