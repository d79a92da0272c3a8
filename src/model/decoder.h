// The decoder of the llama family: embedding; per layer RMS norm, fused QKV projection, attention
// over the cache, output projection, RMS norm, gated MLP; final norm and head. Driven by
// configuration and architecture.
#ifndef QUIRE_MODEL_DECODER_H_
#define QUIRE_MODEL_DECODER_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kernels/backend.h"
#include "model/architecture.h"
#include "model/checkpoint.h"
#include "model/model_config.h"
#include "model/weights.h"
#include "quire/model.h"
#include "tensor/host_memory.h"

namespace quire {

struct DecoderOptions {
  DType dtype = DType::kBF16;                   // kF32 or kBF16, see ModelOptions
  std::optional<DType> k_dtype = std::nullopt;  // of KV, see ModelOptions
  std::optional<DType> v_dtype = std::nullopt;
  const Backend* backend = nullptr;
  std::shared_ptr<ParallelRunner> runner;
};

// The residual stream is float32 throughout. Every operation works row by row, so a row's values do
// not depend on which other rows stand in the batch.
class Decoder final : public Model {
 public:
  // Loads all weights. Errors are those of WeightLoader and Checkpoint.
  static Result<std::unique_ptr<Decoder>> Create(const ModelConfig& config,
                                                 const Architecture& architecture,
                                                 Checkpoint checkpoint, DecoderOptions options);

  // See Model::Measure.
  static Result<ModelMeasure> Measure(const ModelConfig& config, const Architecture& architecture,
                                      Checkpoint checkpoint, DecoderOptions options,
                                      int64_t row_count, int64_t logit_row_count);

  const ModelInfo& info() const override { return info_; }
  // What is taken now, for tests.
  int64_t workspace_bytes() const { return static_cast<int64_t>(workspace_.size()); }
  Status Forward(const ModelState& state, std::span<const int32_t> token_ids,
                 std::span<const int64_t> logit_rows, float* logits) override;

 private:
  struct Layer {
    std::vector<float> attention_norm;         // [hidden_size]
    std::vector<float> mlp_norm;               // [hidden_size]
    std::vector<float> attention_output_norm;  // [hidden_size], or empty
    std::vector<float> mlp_output_norm;        // [hidden_size], or empty
    std::vector<float> q_norm;                 // [head_dim], or empty
    std::vector<float> k_norm;                 // [head_dim], or empty
    LinearWeights qkv;                         // [(Hq + 2 Hkv) D, hidden_size]
    LinearWeights o;                           // [hidden_size, Hq D]
    LinearWeights gate_up;                     // [2 intermediate_size, hidden_size]
    LinearWeights down;                        // [hidden_size, intermediate_size]
  };

  // Buffers of one forward of n rows. Those of attention and MLP share: they are never alive
  // together.
  struct Buffers {
    float* hidden;  // [n, hidden_size], the residual stream
    float* normed;  // [n, hidden_size]
    float* wide;    // qkv, or gate_up
    float* narrow;  // attention output, or the gated activation
    void* scratch;  // of the linear kernels
  };
  // Of the workspace, in bytes.
  struct BufferSizes {
    size_t hidden;  // of hidden, and of normed
    size_t wide;
    size_t narrow;
    size_t scratch;
    size_t total() const { return 2 * hidden + wide + narrow + scratch; }
  };

  Decoder(const ModelConfig& config, const Architecture& architecture, Checkpoint checkpoint,
          DecoderOptions options);

  Status LoadWeights(WeightUse use);
  Result<Layer> LoadLayer(WeightLoader& loader, int64_t layer);
  Status LoadNorms(WeightLoader& loader, const std::string& prefix, Layer* layer) const;
  void FillInfo(const WeightLoader& loader);

  Status CheckForward(const ModelState& state, std::span<const int32_t> token_ids,
                      std::span<const int64_t> logit_rows, const float* logits) const;
  BufferSizes SizesOf(int64_t row_count, int64_t logit_row_count) const;
  Result<Buffers> PrepareBuffers(int64_t row_count, int64_t logit_row_count);
  Status RunLayer(AttentionKVCache& cache, int64_t layer, int64_t row_count, const Buffers& b);
  void NormHeads(const Layer& layer, int64_t row_count, float* qkv);
  void Norm(const std::vector<float>& weight, const float* x, int64_t row_count, float* y);
  void Multiply(const LinearWeights& weights, const float* x, int64_t row_count, float* y,
                bool accumulate, void* scratch);
  void MultiplyIntoHidden(const LinearWeights& weights, const float* x,
                          const std::vector<float>& output_norm, int64_t row_count,
                          const Buffers& b);
  void Embed(std::span<const int32_t> token_ids, float* hidden);
  void ComputeLogits(std::span<const int64_t> logit_rows, const Buffers& b, float* logits);

  const ModelConfig config_;
  const Architecture& architecture_;
  const float norm_offset_;      // of norm weights
  const Checkpoint checkpoint_;  // the embedding is read from its mapping
  const DecoderOptions options_;
  const Backend& backend_;
  ParallelRunner& runner_;
  ModelInfo info_;

  RowTable embedding_;
  std::vector<Layer> layers_;
  std::vector<float> final_norm_;
  LinearWeights head_;  // packed also when it is tied to the embedding

  HostMemory workspace_;  // grows to the largest forward so far
};

}  // namespace quire

#endif  // QUIRE_MODEL_DECODER_H_
