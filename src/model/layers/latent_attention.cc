#include "model/layers/latent_attention.h"

#include <algorithm>
#include <span>
#include <utility>

namespace quire {
namespace {

// The epsilon of the norms of queries and latents, whatever rms_norm_eps says, as in transformers.
constexpr float kRankNormEps = 1e-6F;

// Angles of 65536 positions: 16 MiB with 32 pairs.
constexpr int64_t kAngleTilesMax = 4096;

}  // namespace

struct LatentAttention::Buffers {
  float* ranks;     // [n, q_rank]
  float* q;         // [n, Hq, q_dim]; then outputs, [n, Hq, v_dim]
  float* kv;        // [n, kv_rank + rope_dim]
  float* absorbed;  // [n, Hq, kv_rank + rope_dim]
  float* latents;   // [n, Hq, kv_rank]: what heads read
};

Result<std::unique_ptr<Mixer>> LatentAttention::Load(WeightLoader& loader,
                                                     const std::string& prefix,
                                                     const ModelConfig& config, int64_t layer,
                                                     std::shared_ptr<RopeTable> angles) {
  auto mixer = std::make_unique<LatentAttention>();
  mixer->config_ = *config.latent;
  mixer->layer_ = layer;
  mixer->heads_ = config.num_attention_heads;
  mixer->interleaved_ = config.rope.pairing == RopePairing::kInterleaved;
  mixer->angles_ = std::move(angles);
  QUIRE_RETURN_IF_ERROR(mixer->LoadQueries(loader, prefix, config));
  QUIRE_RETURN_IF_ERROR(mixer->LoadLatents(loader, prefix, config));
  QUIRE_ASSIGN_OR_RETURN(mixer->o_, loader.Linear({{prefix + "o_proj", config.hidden_size}},
                                                  mixer->v_width(), config.attention_bias));
  return std::unique_ptr<Mixer>(std::move(mixer));
}

Status LatentAttention::LoadQueries(WeightLoader& loader, const std::string& prefix,
                                    const ModelConfig& config) {
  const int64_t rank = config_.q_rank;
  if (rank == 0) {
    QUIRE_ASSIGN_OR_RETURN(
        q_, loader.Linear({{prefix + "q_proj", q_width()}}, config.hidden_size, false));
    return Status();
  }
  QUIRE_ASSIGN_OR_RETURN(q_in_, loader.Linear({{prefix + "q_a_proj", rank}}, config.hidden_size,
                                              config.attention_bias));
  QUIRE_ASSIGN_OR_RETURN(q_norm_, loader.Vector(prefix + "q_a_layernorm.weight", rank));
  QUIRE_ASSIGN_OR_RETURN(q_, loader.Linear({{prefix + "q_b_proj", q_width()}}, rank, false));
  return Status();
}

Status LatentAttention::LoadLatents(WeightLoader& loader, const std::string& prefix,
                                    const ModelConfig& config) {
  QUIRE_ASSIGN_OR_RETURN(kv_, loader.Linear({{prefix + "kv_a_proj_with_mqa", config_.key_dim()}},
                                            config.hidden_size, config.attention_bias));
  QUIRE_ASSIGN_OR_RETURN(kv_norm_,
                         loader.Vector(prefix + "kv_a_layernorm.weight", config_.kv_rank));
  // A head's key is K x, so q (K x) = (K^T q) x. GGUF files may have K^T and V apart.
  const std::string keys = prefix + "k_b_proj";
  if (loader.HasSlices(keys)) {
    const HeadSlice key[] = {{.rows = config_.kv_rank, .transposed = false}};
    const HeadSlice value[] = {{.rows = config_.v_dim, .transposed = false}};
    QUIRE_ASSIGN_OR_RETURN(HeadMatrices into,
                           loader.LinearSlices(keys, heads_, key, config_.nope_dim));
    QUIRE_ASSIGN_OR_RETURN(HeadMatrices out_of, loader.LinearSlices(prefix + "v_b_proj", heads_,
                                                                    value, config_.kv_rank));
    into_latent_ = std::move(into[0]);
    out_of_latent_ = std::move(out_of[0]);
    return Status();
  }
  const HeadSlice slices[] = {{.rows = config_.nope_dim, .transposed = true},
                              {.rows = config_.v_dim, .transposed = false}};
  QUIRE_ASSIGN_OR_RETURN(HeadMatrices parts, loader.LinearSlices(prefix + "kv_b_proj", heads_,
                                                                 slices, config_.kv_rank));
  into_latent_ = std::move(parts[0]);
  out_of_latent_ = std::move(parts[1]);
  return Status();
}

int64_t LatentAttention::row_floats() const {
  return config_.q_rank + std::max(q_width(), v_width()) + config_.key_dim() +
         heads_ * (config_.key_dim() + config_.kv_rank);
}

size_t LatentAttention::ScratchBytes(const RowOps& ops, int64_t row_count) const {
  size_t bytes =
      std::max({ops.ScratchBytes(q_, row_count), ops.ScratchBytes(kv_, row_count),
                ops.ScratchBytes(o_, row_count), ops.HeadsScratchBytes(into_latent_, row_count),
                ops.HeadsScratchBytes(out_of_latent_, row_count)});
  return config_.q_rank == 0 ? bytes : std::max(bytes, ops.ScratchBytes(q_in_, row_count));
}

LatentAttention::Buffers LatentAttention::Divide(const MixerRun& run) const {
  RowBuffers buffers(run);
  Buffers b;
  b.ranks = buffers.Take(config_.q_rank);
  b.q = buffers.Take(std::max(q_width(), v_width()));
  b.kv = buffers.Take(config_.key_dim());
  b.absorbed = buffers.Take(heads_ * config_.key_dim());
  b.latents = buffers.Take(heads_ * config_.kv_rank);
  return b;
}

void LatentAttention::ProjectQueries(const MixerRun& run, const Buffers& b) const {
  const float* x = run.x;
  if (config_.q_rank != 0) {
    run.ops.Multiply(q_in_, run.x, run.row_count, b.ranks, false, run.scratch);
    run.ops.Norm(q_norm_, 0.0F, kRankNormEps, b.ranks, run.row_count, b.ranks);
    x = b.ranks;
  }
  run.ops.Multiply(q_, x, run.row_count, b.q, false, run.scratch);
}

// `to` may be `from`.
void LatentAttention::Rotate(int32_t position, const float* from, float* to) const {
  const int64_t pairs = angles_->pair_count();
  const auto [cos, sin] = angles_->At(position);
  for (int64_t i = 0; i < pairs; ++i) {
    const int64_t first = interleaved_ ? 2 * i : i;
    const int64_t second = interleaved_ ? 2 * i + 1 : i + pairs;
    const float a = from[first];
    const float b = from[second];
    to[first] = a * cos[i] - b * sin[i];
    to[second] = b * cos[i] + a * sin[i];
  }
}

// The key's rotated part in place; those of the queries after what becomes of the rest.
void LatentAttention::RotateRows(const MixerRun& run, std::span<const int32_t> positions,
                                 const Buffers& b) const {
  const int64_t key_dim = config_.key_dim();
  run.ops.runner().ParallelFor(run.row_count, [&](int64_t row, int) {
    const int32_t position = positions[static_cast<size_t>(row)];
    float* const key = b.kv + row * key_dim + config_.kv_rank;
    Rotate(position, key, key);
    for (int64_t h = row * heads_; h < (row + 1) * heads_; ++h) {
      Rotate(position, b.q + h * config_.q_dim() + config_.nope_dim,
             b.absorbed + h * key_dim + config_.kv_rank);
    }
  });
}

Status LatentAttention::Run(const ModelState& state, const MixerRun& run) const {
  AttentionKVCache& cache = *state.attention;
  const int64_t n = run.row_count;
  const int64_t key_dim = config_.key_dim();
  QUIRE_ASSIGN_OR_RETURN(const std::span<const int32_t> positions, cache.GetQueryPositions());
  angles_->Provide(positions, kAngleTilesMax, run.ops.runner());
  const Buffers b = Divide(run);
  ProjectQueries(run, b);
  run.ops.Multiply(kv_, run.x, n, b.kv, false, run.scratch);
  run.ops.NormPieces(kv_norm_, 0.0F, kRankNormEps, n, key_dim, 1, config_.kv_rank, b.kv);
  RotateRows(run, positions, b);
  run.ops.MultiplyHeads(into_latent_, {.data = b.q, .row = q_width(), .head = config_.q_dim()}, n,
                        {.data = b.absorbed, .row = heads_ * key_dim, .head = key_dim},
                        run.scratch);
  QUIRE_RETURN_IF_ERROR(cache.AttentionWithMLA(
      layer_, TensorView(b.absorbed, DType::kF32, {n, heads_, key_dim}),
      TensorView(b.kv, DType::kF32, {n, key_dim}),
      TensorView(b.latents, DType::kF32, {n, heads_, config_.kv_rank}), config_.scale));
  QUIRE_ASSIGN_OR_RETURN(const int64_t left,
                         run.rows->Follow(cache, {{b.latents, heads_ * config_.kv_rank}}));
  run.ops.MultiplyHeads(
      out_of_latent_, {.data = b.latents, .row = heads_ * config_.kv_rank, .head = config_.kv_rank},
      left, {.data = b.q, .row = v_width(), .head = config_.v_dim}, run.scratch);
  run.ops.Multiply(o_, b.q, left, run.y, run.accumulate, run.scratch);
  return Status();
}

}  // namespace quire
