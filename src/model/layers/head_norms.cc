#include "model/layers/head_norms.h"

namespace quire {

Result<HeadNorms> HeadNorms::Load(WeightLoader& loader, const std::string& prefix,
                                  const ModelConfig& config, const Architecture& architecture) {
  HeadNorms norms;
  norms.query_heads_ = config.num_attention_heads;
  norms.key_heads_ = config.num_key_value_heads;
  norms.head_dim_ = config.head_dim;
  norms.offset_ = architecture.norm_offset;
  norms.eps_ = static_cast<float>(config.rms_norm_eps);
  QUIRE_ASSIGN_OR_RETURN(norms.q_, loader.Vector(prefix + "q_norm.weight", config.head_dim));
  QUIRE_ASSIGN_OR_RETURN(norms.k_, loader.Vector(prefix + "k_norm.weight", config.head_dim));
  return norms;
}

// The heads of a row lie after each other, so one row is Hq + Hkv rows of the norm; tokens are
// shared out to the workers.
void HeadNorms::Run(const RowOps& ops, int64_t row_count, float* qkv) const {
  const auto norm = ops.backend().rms_norm;
  ops.runner().ParallelFor(row_count, [&](int64_t row, int) {
    SerialRunner serial;
    float* const q = qkv + row * (query_heads_ + 2 * key_heads_) * head_dim_;
    float* const k = q + query_heads_ * head_dim_;
    norm(q, q_.data(), offset_, eps_, query_heads_, head_dim_, q, serial);
    norm(k, k_.data(), offset_, eps_, key_heads_, head_dim_, k, serial);
  });
}

}  // namespace quire
