#include "model/decoder.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "base/guard.h"
#include "model/forward_arguments.h"
#include "model/row_ops.h"

namespace quire {
namespace {

constexpr size_t kAlignment = 64;  // of the kernels' scratch, and a cache line for each buffer

size_t AlignUp(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

int64_t QkvWidth(const ModelConfig& config) {
  return (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim;
}

int64_t AttentionWidth(const ModelConfig& config) {
  return config.num_attention_heads * config.head_dim;
}

float RoundedToBF16(float value) {
  uint16_t narrow = 0;
  float rounded = 0;
  ConvertElements(&value, DType::kF32, &narrow, DType::kBF16, 1);
  ConvertElements(&narrow, DType::kBF16, &rounded, DType::kF32, 1);
  return rounded;
}

}  // namespace

Decoder::Decoder(const ModelConfig& config, const Architecture& architecture, Checkpoint checkpoint,
                 DecoderOptions options)
    : config_(config),
      architecture_(architecture),
      norm_offset_(architecture.is_gemma ? 1.0F : 0.0F),
      checkpoint_(std::move(checkpoint)),
      options_(std::move(options)),
      backend_(*options_.backend),
      runner_(*options_.runner) {}

Result<std::unique_ptr<Decoder>> Decoder::Create(const ModelConfig& config,
                                                 const Architecture& architecture,
                                                 Checkpoint checkpoint, DecoderOptions options) {
  std::unique_ptr<Decoder> decoder(
      new Decoder(config, architecture, std::move(checkpoint), std::move(options)));
  QUIRE_RETURN_IF_ERROR(decoder->LoadWeights(WeightUse::kLoad));
  return decoder;
}

// A decoder whose weights have sizes only, and which is never asked to compute.
Result<ModelMeasure> Decoder::Measure(const ModelConfig& config, const Architecture& architecture,
                                      Checkpoint checkpoint, DecoderOptions options,
                                      int64_t row_count, int64_t logit_row_count) {
  Decoder decoder(config, architecture, std::move(checkpoint), std::move(options));
  QUIRE_RETURN_IF_ERROR(decoder.LoadWeights(WeightUse::kMeasure));
  const size_t workspace_bytes = decoder.SizesOf(row_count, logit_row_count).total();
  return ModelMeasure{
      .info = std::move(decoder.info_),
      .workspace_bytes = static_cast<int64_t>(HostMemory::AllocatedBytes(workspace_bytes))};
}

Status Decoder::LoadWeights(WeightUse use) {
  WeightLoader loader(checkpoint_, backend_, runner_, options_.dtype, use);
  QUIRE_ASSIGN_OR_RETURN(embedding_, loader.Rows("model.embed_tokens.weight", config_.vocab_size,
                                                 config_.hidden_size));
  layers_.reserve(static_cast<size_t>(config_.num_hidden_layers));
  for (int64_t i = 0; i < config_.num_hidden_layers; ++i) {
    QUIRE_ASSIGN_OR_RETURN(Layer layer, LoadLayer(loader, i));
    layers_.push_back(std::move(layer));
  }
  QUIRE_ASSIGN_OR_RETURN(final_norm_, loader.Vector("model.norm.weight", config_.hidden_size));
  const std::string head = config_.tie_word_embeddings ? "model.embed_tokens" : "lm_head";
  QUIRE_ASSIGN_OR_RETURN(head_,
                         loader.Linear({{head, config_.vocab_size}}, config_.hidden_size, false));
  FillInfo(loader);
  return Status();
}

// In the Gemma family post_attention_layernorm stands behind attention, not before the MLP.
Status Decoder::LoadNorms(WeightLoader& loader, const std::string& prefix, Layer* layer) const {
  const int64_t hidden = config_.hidden_size;
  QUIRE_ASSIGN_OR_RETURN(layer->attention_norm,
                         loader.Vector(prefix + "input_layernorm.weight", hidden));
  const std::string behind_attention = prefix + "post_attention_layernorm.weight";
  if (!architecture_.is_gemma) {
    QUIRE_ASSIGN_OR_RETURN(layer->mlp_norm, loader.Vector(behind_attention, hidden));
    return Status();
  }
  QUIRE_ASSIGN_OR_RETURN(layer->attention_output_norm, loader.Vector(behind_attention, hidden));
  QUIRE_ASSIGN_OR_RETURN(layer->mlp_norm,
                         loader.Vector(prefix + "pre_feedforward_layernorm.weight", hidden));
  QUIRE_ASSIGN_OR_RETURN(layer->mlp_output_norm,
                         loader.Vector(prefix + "post_feedforward_layernorm.weight", hidden));
  return Status();
}

Result<Decoder::Layer> Decoder::LoadLayer(WeightLoader& loader, int64_t index) {
  const std::string prefix = "model.layers." + std::to_string(index) + ".";
  const std::string attention = prefix + "self_attn.";
  const std::string mlp = prefix + "mlp.";
  const int64_t hidden = config_.hidden_size;
  const int64_t q_width = AttentionWidth(config_);
  const int64_t kv_width = config_.num_key_value_heads * config_.head_dim;
  const bool mlp_bias = HasBias(architecture_.mlp_bias, config_);
  Layer layer;
  QUIRE_RETURN_IF_ERROR(LoadNorms(loader, prefix, &layer));
  if (architecture_.qk_norm) {
    QUIRE_ASSIGN_OR_RETURN(layer.q_norm,
                           loader.Vector(attention + "q_norm.weight", config_.head_dim));
    QUIRE_ASSIGN_OR_RETURN(layer.k_norm,
                           loader.Vector(attention + "k_norm.weight", config_.head_dim));
  }
  QUIRE_ASSIGN_OR_RETURN(layer.qkv,
                         loader.Linear({{attention + "q_proj", q_width},
                                        {attention + "k_proj", kv_width},
                                        {attention + "v_proj", kv_width}},
                                       hidden, HasBias(architecture_.qkv_bias, config_)));
  QUIRE_ASSIGN_OR_RETURN(layer.o, loader.Linear({{attention + "o_proj", hidden}}, q_width,
                                                HasBias(architecture_.o_bias, config_)));
  QUIRE_ASSIGN_OR_RETURN(layer.gate_up,
                         loader.Linear({{mlp + "gate_proj", config_.intermediate_size},
                                        {mlp + "up_proj", config_.intermediate_size}},
                                       hidden, mlp_bias));
  QUIRE_ASSIGN_OR_RETURN(layer.down, loader.Linear({{mlp + "down_proj", hidden}},
                                                   config_.intermediate_size, mlp_bias));
  return layer;
}

void Decoder::FillInfo(const WeightLoader& loader) {
  info_.architecture = config_.architecture;
  info_.vocab_size = config_.vocab_size;
  info_.hidden_size = config_.hidden_size;
  info_.max_position_embeddings = config_.max_position_embeddings;
  info_.eos_token_ids = config_.eos_token_ids;
  info_.bos_token_id = config_.bos_token_id;
  info_.parameter_count = loader.parameter_count();
  info_.weight_bytes = loader.weight_bytes();
  info_.layers.assign(layers_.size(), {.num_qo_heads = config_.num_attention_heads,
                                       .num_kv_heads = config_.num_key_value_heads,
                                       .qk_head_dim = config_.head_dim,
                                       .v_head_dim = config_.head_dim,
                                       .dtype = options_.dtype,
                                       .soft_cap = config_.attention_cap});
  for (size_t i = 0; i < layers_.size(); ++i) {
    AttentionLayerSpec& spec = info_.layers[i];
    // A layer is turned as one with a window also where that window hides nothing.
    spec.window = WindowOfLayer(architecture_, config_, static_cast<int64_t>(i));
    if (IsLocalLayer(architecture_, config_, static_cast<int64_t>(i))) {
      spec.rope = config_.local_rope;
    }
  }
  info_.rope = config_.rope;
}

Status Decoder::CheckForward(const ModelState& state, std::span<const int32_t> token_ids,
                             std::span<const int64_t> logit_rows, const float* logits) const {
  QUIRE_RETURN_IF_ERROR(CheckModelState(info_, state));
  QUIRE_RETURN_IF_ERROR(CheckTokenCount(*state.attention, token_ids));
  return CheckForwardArguments(config_.vocab_size, token_ids, logit_rows, logits);
}

Decoder::BufferSizes Decoder::SizesOf(int64_t row_count, int64_t logit_row_count) const {
  const auto row_bytes = [row_count](int64_t width) {
    return AlignUp(static_cast<size_t>(row_count * width) * sizeof(float));
  };
  const auto scratch_of = [this](const LinearWeights& weights, int64_t rows) {
    const PackedLinear& packed = weights.packed();
    return backend_.linear_scratch_bytes(rows, packed.n, packed.k, runner_.worker_count());
  };
  const Layer& layer = layers_.front();  // all layers have the same shapes
  return {
      .hidden = row_bytes(config_.hidden_size),
      .wide = row_bytes(std::max(QkvWidth(config_), 2 * config_.intermediate_size)),
      .narrow = row_bytes(std::max(AttentionWidth(config_), config_.intermediate_size)),
      .scratch = std::max({scratch_of(layer.qkv, row_count), scratch_of(layer.o, row_count),
                           scratch_of(layer.gate_up, row_count), scratch_of(layer.down, row_count),
                           logit_row_count == 0 ? 0 : scratch_of(head_, logit_row_count)})};
}

Result<Decoder::Buffers> Decoder::PrepareBuffers(int64_t row_count, int64_t logit_row_count) {
  const BufferSizes sizes = SizesOf(row_count, logit_row_count);
  if (sizes.total() > workspace_.size()) {
    workspace_ = HostMemory();  // gives the old one back first: only one is ever held
    QUIRE_ASSIGN_OR_RETURN(workspace_, HostMemory::Allocate(sizes.total()));
  }
  std::byte* const base = workspace_.data();
  std::byte* const wide = base + 2 * sizes.hidden;
  return Buffers{.hidden = reinterpret_cast<float*>(base),
                 .normed = reinterpret_cast<float*>(base + sizes.hidden),
                 .wide = reinterpret_cast<float*>(wide),
                 .narrow = reinterpret_cast<float*>(wide + sizes.wide),
                 .scratch = wide + sizes.wide + sizes.narrow};
}

void Decoder::Norm(const std::vector<float>& weight, const float* x, int64_t row_count, float* y) {
  backend_.rms_norm(x, weight.data(), norm_offset_, static_cast<float>(config_.rms_norm_eps),
                    row_count, static_cast<int64_t>(weight.size()), y, runner_);
}

void Decoder::Multiply(const LinearWeights& weights, const float* x, int64_t row_count, float* y,
                       bool accumulate, void* scratch) {
  const LinearArgs args{.w = weights.packed(),
                        .row_count = row_count,
                        .x = x,
                        .x_stride = weights.packed().k,
                        .x_rounding = options_.dtype,
                        .y = y,
                        .y_stride = weights.packed().n,
                        .accumulate = accumulate,
                        .scratch = scratch};
  backend_.linear(args, runner_);
}

// The heads of a row lie behind each other, so one row is Hq + Hkv rows of the norm; tokens are
// shared out to the workers.
void Decoder::NormHeads(const Layer& layer, int64_t row_count, float* qkv) {
  const auto eps = static_cast<float>(config_.rms_norm_eps);
  const int64_t dim = config_.head_dim;
  runner_.ParallelFor(row_count, [&](int64_t row, int) {
    SerialRunner serial;
    float* const q = qkv + row * QkvWidth(config_);
    float* const k = q + AttentionWidth(config_);
    backend_.rms_norm(q, layer.q_norm.data(), norm_offset_, eps, config_.num_attention_heads, dim,
                      q, serial);
    backend_.rms_norm(k, layer.k_norm.data(), norm_offset_, eps, config_.num_key_value_heads, dim,
                      k, serial);
  });
}

// Adds the product to the residual stream, normalised if there is a norm for it.
void Decoder::MultiplyIntoHidden(const LinearWeights& weights, const float* x,
                                 const std::vector<float>& output_norm, int64_t row_count,
                                 const Buffers& b) {
  if (output_norm.empty()) return Multiply(weights, x, row_count, b.hidden, true, b.scratch);
  Multiply(weights, x, row_count, b.normed, false, b.scratch);
  Norm(output_norm, b.normed, row_count, b.normed);
  const int64_t width = config_.hidden_size;
  runner_.ParallelFor(row_count, [&](int64_t row, int) {
    for (int64_t i = row * width; i < (row + 1) * width; ++i) b.hidden[i] += b.normed[i];
  });
}

void Decoder::Embed(std::span<const int32_t> token_ids, float* hidden) {
  const auto row_count = static_cast<int64_t>(token_ids.size());
  const int64_t width = config_.hidden_size;
  backend_.gather_rows(embedding_.data, embedding_.dtype, token_ids.data(), row_count, width,
                       hidden, runner_);
  if (!architecture_.is_gemma) return;
  // transformers holds the factor in float32 and rounds it to the model's type.
  auto scale = static_cast<float>(std::sqrt(static_cast<double>(width)));
  if (options_.dtype == DType::kBF16) scale = RoundedToBF16(scale);
  runner_.ParallelFor(row_count, [&](int64_t row, int) {
    for (int64_t i = row * width; i < (row + 1) * width; ++i) hidden[i] *= scale;
  });
}

Status Decoder::RunLayer(AttentionKVCache& cache, int64_t index, int64_t row_count,
                         const Buffers& b) {
  const Layer& layer = layers_[static_cast<size_t>(index)];
  const int64_t q_heads = config_.num_attention_heads;
  const int64_t dim = config_.head_dim;
  Norm(layer.attention_norm, b.hidden, row_count, b.normed);
  Multiply(layer.qkv, b.normed, row_count, b.wide, false, b.scratch);
  if (!layer.q_norm.empty()) NormHeads(layer, row_count, b.wide);
  const TensorView qkv(b.wide, DType::kF32,
                       {row_count, q_heads + 2 * config_.num_key_value_heads, dim});
  const TensorView o(b.narrow, DType::kF32, {row_count, q_heads, dim});
  QUIRE_RETURN_IF_ERROR(
      cache.AttentionWithFusedQKV(index, qkv, o, 1.0 / std::sqrt(config_.query_scalar)));
  MultiplyIntoHidden(layer.o, b.narrow, layer.attention_output_norm, row_count, b);

  Norm(layer.mlp_norm, b.hidden, row_count, b.normed);
  Multiply(layer.gate_up, b.normed, row_count, b.wide, false, b.scratch);
  const auto gate = architecture_.is_gemma ? backend_.gelu_tanh_mul : backend_.silu_mul;
  gate(b.wide, row_count, config_.intermediate_size, b.narrow, runner_);
  MultiplyIntoHidden(layer.down, b.narrow, layer.mlp_output_norm, row_count, b);
  return Status();
}

void Decoder::ComputeLogits(std::span<const int64_t> logit_rows, const Buffers& b, float* logits) {
  if (logit_rows.empty()) return;
  const int64_t hidden = config_.hidden_size;
  float* next = b.normed;
  for (const int64_t row : logit_rows) {
    std::memcpy(next, b.hidden + row * hidden, static_cast<size_t>(hidden) * sizeof(float));
    next += hidden;
  }
  const auto row_count = static_cast<int64_t>(logit_rows.size());
  Norm(final_norm_, b.normed, row_count, b.normed);
  Multiply(head_, b.normed, row_count, logits, false, b.scratch);
  if (config_.logit_cap == 0) return;
  backend_.soft_cap(logits, static_cast<float>(config_.logit_cap), row_count, config_.vocab_size,
                    logits, runner_);
}

Status Decoder::Forward(const ModelState& state, std::span<const int32_t> token_ids,
                        std::span<const int64_t> logit_rows, float* logits) {
  return GuardEntry([&]() -> Status {
    QUIRE_RETURN_IF_ERROR(CheckForward(state, token_ids, logit_rows, logits));
    const auto row_count = static_cast<int64_t>(token_ids.size());
    QUIRE_ASSIGN_OR_RETURN(const Buffers buffers,
                           PrepareBuffers(row_count, static_cast<int64_t>(logit_rows.size())));
    Embed(token_ids, buffers.hidden);
    for (int64_t layer = 0; layer < config_.num_hidden_layers; ++layer) {
      QUIRE_RETURN_IF_ERROR(RunLayer(*state.attention, layer, row_count, buffers));
    }
    ComputeLogits(logit_rows, buffers, logits);
    return Status();
  });
}

}  // namespace quire
