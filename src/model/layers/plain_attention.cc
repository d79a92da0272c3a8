#include "model/layers/plain_attention.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

namespace quire {

Result<std::unique_ptr<Mixer>> PlainAttention::Load(WeightLoader& loader, const std::string& prefix,
                                                    const ModelConfig& config,
                                                    const Architecture& architecture,
                                                    int64_t layer) {
  auto mixer = std::make_unique<PlainAttention>();
  mixer->layer_ = layer;
  mixer->head_dim_ = config.head_dim;
  mixer->scale_ = 1.0 / std::sqrt(config.query_scalar);
  if (architecture.qk_norm) {
    QUIRE_ASSIGN_OR_RETURN(mixer->norms_, HeadNorms::Load(loader, prefix, config, architecture));
  }
  const int64_t q_width = config.num_attention_heads * config.head_dim;
  const int64_t kv_width = config.num_key_value_heads * config.head_dim;
  std::vector<LinearPart> parts = {
      {prefix + "q_proj", q_width}, {prefix + "k_proj", kv_width}, {prefix + "v_proj", kv_width}};
  if (architecture.fused) parts = {{prefix + "qkv_proj", q_width + 2 * kv_width}};
  QUIRE_ASSIGN_OR_RETURN(mixer->qkv_, loader.Linear(parts, config.hidden_size,
                                                    HasBias(architecture.qkv_bias, config)));
  QUIRE_ASSIGN_OR_RETURN(mixer->o_, loader.Linear({{prefix + "o_proj", config.hidden_size}},
                                                  q_width, HasBias(architecture.o_bias, config)));
  return std::unique_ptr<Mixer>(std::move(mixer));
}

size_t PlainAttention::ScratchBytes(const RowOps& ops, int64_t row_count) const {
  return std::max(ops.ScratchBytes(qkv_, row_count), ops.ScratchBytes(o_, row_count));
}

Status PlainAttention::Run(const ModelState& state, const MixerRun& run) const {
  const int64_t qkv_width = qkv_.packed().n;
  const int64_t o_width = o_.packed().k;
  RowBuffers buffers(run);
  float* const qkv = buffers.Take(qkv_width);
  float* const o = buffers.Take(o_width);
  run.ops.Multiply(qkv_, run.x, run.row_count, qkv, false, run.scratch);
  if (norms_) norms_->Run(run.ops, run.row_count, qkv);
  QUIRE_RETURN_IF_ERROR(state.attention->AttentionWithFusedQKV(
      layer_, TensorView(qkv, DType::kF32, {run.row_count, qkv_width / head_dim_, head_dim_}),
      TensorView(o, DType::kF32, {run.row_count, o_width / head_dim_, head_dim_}), scale_));
  QUIRE_ASSIGN_OR_RETURN(const int64_t n, run.rows->Follow(*state.attention, {{o, o_width}}));
  run.ops.Multiply(o_, o, n, run.y, run.accumulate, run.scratch);
  return Status();
}

}  // namespace quire
