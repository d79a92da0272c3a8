#include "model/decoder.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "base/guard.h"

namespace quire {
namespace {

constexpr size_t kAlignment = 64;  // of the kernels' scratch, and a cache line for each buffer

// For kernels called from inside a task.
class SerialRunner final : public ParallelRunner {
 public:
  int worker_count() const noexcept override { return 1; }
  void Run(int64_t count, Task task, void* context) noexcept override {
    for (int64_t i = 0; i < count; ++i) task(context, i, 0);
  }
};

size_t AlignUp(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

int64_t QkvWidth(const ModelConfig& config) {
  return (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim;
}

int64_t AttentionWidth(const ModelConfig& config) {
  return config.num_attention_heads * config.head_dim;
}

}  // namespace

Decoder::Decoder(const ModelConfig& config, Checkpoint checkpoint, DecoderOptions options)
    : config_(config),
      checkpoint_(std::move(checkpoint)),
      options_(std::move(options)),
      backend_(*options_.backend),
      runner_(*options_.runner) {}

Result<std::unique_ptr<Decoder>> Decoder::Create(const ModelConfig& config,
                                                 const Architecture& architecture,
                                                 Checkpoint checkpoint, DecoderOptions options) {
  std::unique_ptr<Decoder> decoder(new Decoder(config, std::move(checkpoint), std::move(options)));
  QUIRE_RETURN_IF_ERROR(decoder->LoadWeights(architecture, WeightUse::kLoad));
  return decoder;
}

// A decoder whose weights have sizes only, and which is never asked to compute.
Result<ModelMeasure> Decoder::Measure(const ModelConfig& config, const Architecture& architecture,
                                      Checkpoint checkpoint, DecoderOptions options,
                                      int64_t row_count, int64_t logit_row_count) {
  Decoder decoder(config, std::move(checkpoint), std::move(options));
  QUIRE_RETURN_IF_ERROR(decoder.LoadWeights(architecture, WeightUse::kMeasure));
  const size_t workspace_bytes = decoder.SizesOf(row_count, logit_row_count).total();
  return ModelMeasure{
      .info = std::move(decoder.info_),
      .workspace_bytes = static_cast<int64_t>(HostMemory::AllocatedBytes(workspace_bytes))};
}

Status Decoder::LoadWeights(const Architecture& architecture, WeightUse use) {
  WeightLoader loader(checkpoint_, backend_, runner_, options_.dtype, use);
  QUIRE_ASSIGN_OR_RETURN(embedding_, loader.Rows("model.embed_tokens.weight", config_.vocab_size,
                                                 config_.hidden_size));
  layers_.reserve(static_cast<size_t>(config_.num_hidden_layers));
  for (int64_t i = 0; i < config_.num_hidden_layers; ++i) {
    QUIRE_ASSIGN_OR_RETURN(Layer layer, LoadLayer(loader, architecture, i));
    layers_.push_back(std::move(layer));
  }
  QUIRE_ASSIGN_OR_RETURN(final_norm_, loader.Vector("model.norm.weight", config_.hidden_size));
  const std::string head = config_.tie_word_embeddings ? "model.embed_tokens" : "lm_head";
  QUIRE_ASSIGN_OR_RETURN(head_,
                         loader.Linear({{head, config_.vocab_size}}, config_.hidden_size, false));
  FillInfo(loader);
  return Status();
}

Result<Decoder::Layer> Decoder::LoadLayer(WeightLoader& loader, const Architecture& architecture,
                                          int64_t index) {
  const std::string prefix = "model.layers." + std::to_string(index) + ".";
  const std::string attention = prefix + "self_attn.";
  const std::string mlp = prefix + "mlp.";
  const int64_t hidden = config_.hidden_size;
  const int64_t q_width = AttentionWidth(config_);
  const int64_t kv_width = config_.num_key_value_heads * config_.head_dim;
  const bool mlp_bias = HasBias(architecture.mlp_bias, config_);
  Layer layer;
  QUIRE_ASSIGN_OR_RETURN(layer.attention_norm,
                         loader.Vector(prefix + "input_layernorm.weight", hidden));
  QUIRE_ASSIGN_OR_RETURN(layer.mlp_norm,
                         loader.Vector(prefix + "post_attention_layernorm.weight", hidden));
  if (architecture.qk_norm) {
    QUIRE_ASSIGN_OR_RETURN(layer.q_norm,
                           loader.Vector(attention + "q_norm.weight", config_.head_dim));
    QUIRE_ASSIGN_OR_RETURN(layer.k_norm,
                           loader.Vector(attention + "k_norm.weight", config_.head_dim));
  }
  QUIRE_ASSIGN_OR_RETURN(layer.qkv, loader.Linear({{attention + "q_proj", q_width},
                                                   {attention + "k_proj", kv_width},
                                                   {attention + "v_proj", kv_width}},
                                                  hidden, HasBias(architecture.qkv_bias, config_)));
  QUIRE_ASSIGN_OR_RETURN(layer.o, loader.Linear({{attention + "o_proj", hidden}}, q_width,
                                                HasBias(architecture.o_bias, config_)));
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
                                       .dtype = options_.k_dtype});
  if (options_.v_dtype != options_.k_dtype) {
    for (AttentionLayerSpec& layer : info_.layers) layer.v_dtype = options_.v_dtype;
  }
  info_.rope = config_.rope;
}

Status Decoder::CheckForward(const AttentionKVCache& cache, std::span<const int32_t> token_ids,
                             std::span<const int64_t> logit_rows, const float* logits) const {
  const auto bad = [](const std::string& why) {
    return Status(StatusCode::kBadArgument, "Model::Forward: " + why);
  };
  QUIRE_ASSIGN_OR_RETURN(const std::span<const int32_t> positions, cache.GetQueryPositions());
  if (token_ids.size() != positions.size()) {
    return bad(std::to_string(token_ids.size()) + " token ids for a forward of " +
               std::to_string(positions.size()) + " tokens");
  }
  for (size_t i = 0; i < token_ids.size(); ++i) {
    if (token_ids[i] < 0 || token_ids[i] >= config_.vocab_size) {
      return bad("token_ids[" + std::to_string(i) + "] is " + std::to_string(token_ids[i]) +
                 "; the vocabulary has " + std::to_string(config_.vocab_size) + " tokens");
    }
  }
  int64_t previous = -1;
  for (const int64_t row : logit_rows) {
    if (row <= previous || row >= static_cast<int64_t>(token_ids.size())) {
      return bad("logit_rows has " + std::to_string(row) + " after " + std::to_string(previous) +
                 "; it must ascend within [0, " + std::to_string(token_ids.size()) + ")");
    }
    previous = row;
  }
  if (!logit_rows.empty() && logits == nullptr) return bad("logits is null");
  return Status();
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
  backend_.rms_norm(x, weight.data(), 0.0F, static_cast<float>(config_.rms_norm_eps), row_count,
                    static_cast<int64_t>(weight.size()), y, runner_);
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
    backend_.rms_norm(q, layer.q_norm.data(), 0.0F, eps, config_.num_attention_heads, dim, q,
                      serial);
    backend_.rms_norm(k, layer.k_norm.data(), 0.0F, eps, config_.num_key_value_heads, dim, k,
                      serial);
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
      cache.AttentionWithFusedQKV(index, qkv, o, 1.0 / std::sqrt(static_cast<double>(dim))));
  Multiply(layer.o, b.narrow, row_count, b.hidden, true, b.scratch);

  Norm(layer.mlp_norm, b.hidden, row_count, b.normed);
  Multiply(layer.gate_up, b.normed, row_count, b.wide, false, b.scratch);
  backend_.silu_mul(b.wide, row_count, config_.intermediate_size, b.narrow, runner_);
  Multiply(layer.down, b.narrow, row_count, b.hidden, true, b.scratch);
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
}

Status Decoder::Forward(AttentionKVCache& cache, std::span<const int32_t> token_ids,
                        std::span<const int64_t> logit_rows, float* logits) {
  return GuardEntry([&]() -> Status {
    QUIRE_RETURN_IF_ERROR(CheckForward(cache, token_ids, logit_rows, logits));
    const auto row_count = static_cast<int64_t>(token_ids.size());
    QUIRE_ASSIGN_OR_RETURN(const Buffers buffers,
                           PrepareBuffers(row_count, static_cast<int64_t>(logit_rows.size())));
    backend_.gather_rows(embedding_.data, embedding_.dtype, token_ids.data(), row_count,
                         config_.hidden_size, buffers.hidden, runner_);
    for (int64_t layer = 0; layer < config_.num_hidden_layers; ++layer) {
      QUIRE_RETURN_IF_ERROR(RunLayer(cache, layer, row_count, buffers));
    }
    ComputeLogits(logit_rows, buffers, logits);
    return Status();
  });
}

}  // namespace quire
