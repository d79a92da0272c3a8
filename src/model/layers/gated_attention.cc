#include "model/layers/gated_attention.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace quire {

Result<std::unique_ptr<Mixer>> GatedAttention::Load(WeightLoader& loader, const std::string& prefix,
                                                    const ModelConfig& config,
                                                    const Architecture& architecture,
                                                    int64_t layer) {
  auto mixer = std::make_unique<GatedAttention>();
  mixer->layer_ = layer;
  mixer->query_heads_ = config.num_attention_heads;
  mixer->key_heads_ = config.num_key_value_heads;
  mixer->head_dim_ = config.head_dim;
  QUIRE_ASSIGN_OR_RETURN(mixer->in_, loader.Linear({{prefix + "q_proj", 2 * mixer->query_width()},
                                                    {prefix + "k_proj", mixer->key_width()},
                                                    {prefix + "v_proj", mixer->key_width()}},
                                                   config.hidden_size, config.attention_bias));
  QUIRE_ASSIGN_OR_RETURN(mixer->out_, loader.Linear({{prefix + "o_proj", config.hidden_size}},
                                                    mixer->query_width(), config.attention_bias));
  QUIRE_ASSIGN_OR_RETURN(mixer->norms_, HeadNorms::Load(loader, prefix, config, architecture));
  return std::unique_ptr<Mixer>(std::move(mixer));
}

size_t GatedAttention::ScratchBytes(const RowOps& ops, int64_t row_count) const {
  return std::max(ops.ScratchBytes(in_, row_count), ops.ScratchBytes(out_, row_count));
}

void GatedAttention::SplitGates(const MixerRun& run, const float* in, float* qkv) const {
  const int64_t dim = head_dim_;
  run.ops.runner().ParallelFor(run.row_count, [&](int64_t row, int) {
    const float* const from = in + row * in_width();
    float* const to = qkv + row * qkv_width();
    for (int64_t h = 0; h < query_heads_; ++h) CopyFloats(from + 2 * h * dim, dim, to + h * dim);
    CopyFloats(from + 2 * query_width(), 2 * key_width(), to + query_width());
  });
}

void GatedAttention::Gate(const MixerRun& run, int64_t row_count, const float* in, float* o) const {
  const int64_t dim = head_dim_;
  run.ops.runner().ParallelFor(row_count, [&](int64_t row, int) {
    for (int64_t h = 0; h < query_heads_; ++h) {
      const float* const gate = in + row * in_width() + (2 * h + 1) * dim;
      float* const head = o + row * query_width() + h * dim;
      for (int64_t i = 0; i < dim; ++i) head[i] *= Sigmoid(gate[i]);
    }
  });
}

Status GatedAttention::Run(const ModelState& state, const MixerRun& run) const {
  RowBuffers buffers(run);
  float* const in = buffers.Take(in_width());
  float* const qkv = buffers.Take(qkv_width());
  float* const o = buffers.Take(query_width());
  run.ops.Multiply(in_, run.x, run.row_count, in, false, run.scratch);
  SplitGates(run, in, qkv);
  norms_.Run(run.ops, run.row_count, qkv);
  QUIRE_RETURN_IF_ERROR(state.attention->AttentionWithFusedQKV(
      layer_,
      TensorView(qkv, DType::kF32, {run.row_count, query_heads_ + 2 * key_heads_, head_dim_}),
      TensorView(o, DType::kF32, {run.row_count, query_heads_, head_dim_}),
      1.0 / std::sqrt(static_cast<double>(head_dim_))));
  QUIRE_ASSIGN_OR_RETURN(
      const int64_t n, run.rows->Follow(*state.attention, {{in, in_width()}, {o, query_width()}}));
  Gate(run, n, in, o);
  run.ops.Multiply(out_, o, n, run.y, run.accumulate, run.scratch);
  return Status();
}

}  // namespace quire
