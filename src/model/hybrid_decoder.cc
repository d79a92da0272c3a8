#include "model/hybrid_decoder.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/guard.h"
#include "model/forward_arguments.h"

namespace quire {
namespace {

constexpr size_t kAlignment = 64;  // of the kernels' scratch, and a cache line for each buffer

size_t AlignUp(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

HybridDecoder::HybridDecoder(const ModelConfig& config, const Architecture& architecture,
                             Checkpoint checkpoint, DecoderOptions options)
    : config_(config),
      architecture_(architecture),
      checkpoint_(std::move(checkpoint)),
      options_(std::move(options)),
      ops_(*options_.backend, *options_.runner, options_.dtype) {}

Result<std::unique_ptr<HybridDecoder>> HybridDecoder::Create(const ModelConfig& config,
                                                             const Architecture& architecture,
                                                             Checkpoint checkpoint,
                                                             DecoderOptions options) {
  std::unique_ptr<HybridDecoder> decoder(
      new HybridDecoder(config, architecture, std::move(checkpoint), std::move(options)));
  QUIRE_RETURN_IF_ERROR(decoder->LoadWeights(WeightUse::kLoad));
  return decoder;
}

// A decoder whose weights have sizes only, and which is never asked to compute.
Result<ModelMeasure> HybridDecoder::Measure(const ModelConfig& config,
                                            const Architecture& architecture, Checkpoint checkpoint,
                                            DecoderOptions options, int64_t row_count,
                                            int64_t logit_row_count) {
  HybridDecoder decoder(config, architecture, std::move(checkpoint), std::move(options));
  QUIRE_RETURN_IF_ERROR(decoder.LoadWeights(WeightUse::kMeasure));
  const size_t workspace_bytes = decoder.SizesOf(row_count, logit_row_count).total();
  return ModelMeasure{
      .info = std::move(decoder.info_),
      .workspace_bytes = static_cast<int64_t>(HostMemory::AllocatedBytes(workspace_bytes))};
}

// ---- Weights

Status HybridDecoder::LoadWeights(WeightUse use) {
  const DecoderNames& names = architecture_.names;
  WeightLoader loader(checkpoint_, ops_.backend(), ops_.runner(), options_.dtype, use);
  QUIRE_ASSIGN_OR_RETURN(embedding_, loader.Rows(std::string(names.embedding) + ".weight",
                                                 config_.vocab_size, config_.hidden_size));
  layers_.reserve(static_cast<size_t>(config_.num_hidden_layers));
  for (int64_t i = 0; i < config_.num_hidden_layers; ++i) {
    QUIRE_ASSIGN_OR_RETURN(Layer layer, LoadLayer(loader, i));
    layers_.push_back(std::move(layer));
  }
  QUIRE_ASSIGN_OR_RETURN(
      final_norm_, loader.Vector(std::string(names.final_norm) + ".weight", config_.hidden_size));
  const std::string head(config_.tie_word_embeddings ? names.embedding : "lm_head");
  QUIRE_ASSIGN_OR_RETURN(head_,
                         loader.Linear({{head, config_.vocab_size}}, config_.hidden_size, false));
  FillInfo(loader);
  return Status();
}

Result<HybridDecoder::Layer> HybridDecoder::LoadLayer(WeightLoader& loader, int64_t index) {
  const DecoderNames& names = architecture_.names;
  const std::string prefix = std::string(names.layers) + "." + std::to_string(index) + ".";
  const MixerKind kind = config_.mixers[static_cast<size_t>(index)];
  Layer layer;
  QUIRE_ASSIGN_OR_RETURN(
      layer.mixer_norm,
      loader.Vector(prefix + std::string(names.mixer_norm) + ".weight", config_.hidden_size));
  QUIRE_ASSIGN_OR_RETURN(layer.mixer, LoadMixer(loader, kind, prefix));
  layer.state_layer = AddStateLayers(kind);
  QUIRE_RETURN_IF_ERROR(LoadMlp(loader, index, prefix, &layer));
  return layer;
}

Result<HybridDecoder::Mixer> HybridDecoder::LoadMixer(WeightLoader& loader, MixerKind kind,
                                                      const std::string& prefix) const {
  switch (kind) {
    case MixerKind::kAttention: {
      QUIRE_ASSIGN_OR_RETURN(GatedAttention mixer,
                             GatedAttention::Load(loader, prefix + "self_attn.", config_));
      return Mixer(std::move(mixer));
    }
    case MixerKind::kStateSpace: {
      QUIRE_ASSIGN_OR_RETURN(StateSpaceMixer mixer,
                             StateSpaceMixer::Load(loader, prefix + "mixer.", config_));
      return Mixer(std::move(mixer));
    }
    case MixerKind::kGatedDelta:
      break;
  }
  QUIRE_ASSIGN_OR_RETURN(GatedDeltaMixer mixer,
                         GatedDeltaMixer::Load(loader, prefix + "linear_attn.", config_));
  return Mixer(std::move(mixer));
}

Status HybridDecoder::LoadMlp(WeightLoader& loader, int64_t index, const std::string& prefix,
                              Layer* layer) {
  if (architecture_.names.mlp_norm.empty()) return Status();
  const int64_t hidden = config_.hidden_size;
  QUIRE_ASSIGN_OR_RETURN(
      layer->mlp_norm,
      loader.Vector(prefix + std::string(architecture_.names.mlp_norm) + ".weight", hidden));
  if (config_.sparse_layers[static_cast<size_t>(index)] != 0) {
    QUIRE_ASSIGN_OR_RETURN(SparseMlp sparse,
                           SparseMlp::Load(loader, prefix + "mlp.", hidden, config_.experts));
    layer->mlp = std::move(sparse);
    return Status();
  }
  DenseMlp dense;
  QUIRE_ASSIGN_OR_RETURN(dense.gate_up,
                         loader.Linear({{prefix + "mlp.gate_proj", config_.intermediate_size},
                                        {prefix + "mlp.up_proj", config_.intermediate_size}},
                                       hidden, false));
  QUIRE_ASSIGN_OR_RETURN(dense.down, loader.Linear({{prefix + "mlp.down_proj", hidden}},
                                                   config_.intermediate_size, false));
  layer->mlp = std::move(dense);
  return Status();
}

// Layers of the caches are numbered in the order of the model's; the first one's number.
int64_t HybridDecoder::AddStateLayers(MixerKind kind) {
  if (kind == MixerKind::kAttention) {
    info_.layers.push_back({.num_qo_heads = config_.num_attention_heads,
                            .num_kv_heads = config_.num_key_value_heads,
                            .qk_head_dim = config_.head_dim,
                            .v_head_dim = config_.head_dim,
                            .dtype = options_.dtype});
    return static_cast<int64_t>(info_.layers.size()) - 1;
  }
  const std::vector<RecurrentLayerSpec> added = kind == MixerKind::kStateSpace
                                                    ? StateSpaceMixer::Layers(*config_.state_space)
                                                    : GatedDeltaMixer::Layers(*config_.gated_delta);
  info_.recurrent_layers.insert(info_.recurrent_layers.end(), added.begin(), added.end());
  return static_cast<int64_t>(info_.recurrent_layers.size() - added.size());
}

void HybridDecoder::FillInfo(const WeightLoader& loader) {
  info_.architecture = config_.architecture;
  info_.vocab_size = config_.vocab_size;
  info_.hidden_size = config_.hidden_size;
  info_.max_position_embeddings = config_.max_position_embeddings;
  info_.eos_token_ids = config_.eos_token_ids;
  info_.bos_token_id = config_.bos_token_id;
  info_.parameter_count = loader.parameter_count();
  info_.weight_bytes = loader.weight_bytes();
  info_.rope = config_.rope;
}

// ---- A forward

Status HybridDecoder::CheckForward(const ModelState& state, std::span<const int32_t> token_ids,
                                   std::span<const int64_t> logit_rows, const float* logits) const {
  QUIRE_RETURN_IF_ERROR(CheckModelState(info_, state));
  if (state.attention != nullptr) {
    QUIRE_RETURN_IF_ERROR(CheckTokenCount(*state.attention, token_ids));
  }
  return CheckForwardArguments(config_.vocab_size, token_ids, logit_rows, logits);
}

int64_t HybridDecoder::RowFloats() const {
  int64_t floats = 0;
  for (const Layer& layer : layers_) {
    floats =
        std::max(floats, std::visit([](const auto& m) { return m.row_floats(); }, layer.mixer));
    if (std::holds_alternative<DenseMlp>(layer.mlp)) {
      floats = std::max(floats, 3 * config_.intermediate_size);
    } else if (std::holds_alternative<SparseMlp>(layer.mlp)) {
      floats = std::max(floats, SparseMlp::RowFloats(config_.hidden_size, config_.experts));
    }
  }
  return floats;
}

HybridDecoder::BufferSizes HybridDecoder::SizesOf(int64_t row_count,
                                                  int64_t logit_row_count) const {
  const auto row_bytes = [row_count](int64_t width) {
    return AlignUp(static_cast<size_t>(row_count * width) * sizeof(float));
  };
  size_t scratch = logit_row_count == 0 ? 0 : ops_.ScratchBytes(head_, logit_row_count);
  for (const Layer& layer : layers_) {
    const auto of_mixer = [&](const auto& mixer) { return mixer.ScratchBytes(ops_, row_count); };
    scratch = std::max(scratch, std::visit(of_mixer, layer.mixer));
    if (const auto* const dense = std::get_if<DenseMlp>(&layer.mlp)) {
      scratch = std::max({scratch, ops_.ScratchBytes(dense->gate_up, row_count),
                          ops_.ScratchBytes(dense->down, row_count)});
    } else if (const auto* const sparse = std::get_if<SparseMlp>(&layer.mlp)) {
      scratch = std::max(scratch, sparse->ScratchBytes(ops_, row_count));
    }
  }
  return {.hidden = row_bytes(config_.hidden_size),
          .floats = row_bytes(RowFloats()),
          .scratch = scratch};
}

Result<HybridDecoder::Buffers> HybridDecoder::PrepareBuffers(int64_t row_count,
                                                             int64_t logit_row_count) {
  const BufferSizes sizes = SizesOf(row_count, logit_row_count);
  if (sizes.total() > workspace_.size()) {
    workspace_ = HostMemory();  // gives the old one back first: only one is ever held
    QUIRE_ASSIGN_OR_RETURN(workspace_, HostMemory::Allocate(sizes.total()));
  }
  std::byte* const base = workspace_.data();
  return Buffers{.hidden = reinterpret_cast<float*>(base),
                 .normed = reinterpret_cast<float*>(base + sizes.hidden),
                 .floats = reinterpret_cast<float*>(base + 2 * sizes.hidden),
                 .scratch = base + 2 * sizes.hidden + sizes.floats};
}

void HybridDecoder::Norm(const std::vector<float>& weight, const float* x, int64_t row_count,
                         float* y) const {
  ops_.Norm(weight, architecture_.norm_offset, static_cast<float>(config_.rms_norm_eps), x,
            row_count, y);
}

Status HybridDecoder::RunMixer(const ModelState& state, const Layer& layer,
                               const MixerRun& run) const {
  if (const auto* const attention = std::get_if<GatedAttention>(&layer.mixer)) {
    return attention->Run(*state.attention, layer.state_layer, run);
  }
  if (const auto* const delta = std::get_if<GatedDeltaMixer>(&layer.mixer)) {
    return delta->Run(*state.recurrent, layer.state_layer, run);
  }
  return std::get<StateSpaceMixer>(layer.mixer).Run(*state.recurrent, layer.state_layer, run);
}

void HybridDecoder::RunMlp(const Layer& layer, int64_t row_count, const Buffers& b) const {
  if (std::holds_alternative<std::monostate>(layer.mlp)) return;
  Norm(layer.mlp_norm, b.hidden, row_count, b.normed);
  if (const auto* const sparse = std::get_if<SparseMlp>(&layer.mlp)) {
    return sparse->Add(ops_, b.normed, row_count, b.floats, b.scratch, b.hidden);
  }
  const DenseMlp& dense = std::get<DenseMlp>(layer.mlp);
  const int64_t width = config_.intermediate_size;
  float* const narrow = b.floats + 2 * width * row_count;
  ops_.Multiply(dense.gate_up, b.normed, row_count, b.floats, false, b.scratch);
  ops_.GatedActivation(b.floats, row_count, width, narrow);
  ops_.Multiply(dense.down, narrow, row_count, b.hidden, true, b.scratch);
}

void HybridDecoder::ComputeLogits(std::span<const int64_t> logit_rows, const Buffers& b,
                                  float* logits) const {
  if (logit_rows.empty()) return;
  const int64_t hidden = config_.hidden_size;
  float* next = b.normed;
  for (const int64_t row : logit_rows) {
    std::memcpy(next, b.hidden + row * hidden, static_cast<size_t>(hidden) * sizeof(float));
    next += hidden;
  }
  const auto row_count = static_cast<int64_t>(logit_rows.size());
  Norm(final_norm_, b.normed, row_count, b.normed);
  ops_.Multiply(head_, b.normed, row_count, logits, false, b.scratch);
}

Status HybridDecoder::Forward(const ModelState& state, std::span<const int32_t> token_ids,
                              std::span<const int64_t> logit_rows, float* logits) {
  return GuardEntry([&]() -> Status {
    QUIRE_RETURN_IF_ERROR(CheckForward(state, token_ids, logit_rows, logits));
    const auto row_count = static_cast<int64_t>(token_ids.size());
    QUIRE_ASSIGN_OR_RETURN(const Buffers b,
                           PrepareBuffers(row_count, static_cast<int64_t>(logit_rows.size())));
    ops_.backend().gather_rows(embedding_.data, embedding_.dtype, token_ids.data(), row_count,
                               config_.hidden_size, b.hidden, ops_.runner());
    for (const Layer& layer : layers_) {
      Norm(layer.mixer_norm, b.hidden, row_count, b.normed);
      QUIRE_RETURN_IF_ERROR(RunMixer(state, layer,
                                     {.ops = ops_,
                                      .row_count = row_count,
                                      .x = b.normed,
                                      .floats = b.floats,
                                      .scratch = b.scratch,
                                      .hidden = b.hidden}));
      RunMlp(layer, row_count, b);
    }
    ComputeLogits(logit_rows, b, logits);
    return Status();
  });
}

}  // namespace quire
