#include "model/decoder.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/guard.h"
#include "base/round_up.h"
#include "model/forward_arguments.h"
#include "model/weights/cache_lines.h"

namespace quire {
namespace {

float RoundedToBF16(float value) {
  uint16_t narrow = 0;
  float rounded = 0;
  ConvertElements(&value, DType::kF32, &narrow, DType::kBF16, 1);
  ConvertElements(&narrow, DType::kBF16, &rounded, DType::kF32, 1);
  return rounded;
}

}  // namespace

Decoder::Decoder(const ModelConfig& config, const Architecture& architecture,
                 DecoderOptions options)
    : config_(config),
      architecture_(architecture),
      options_(std::move(options)),
      ops_(*options_.backend, *options_.runner, options_.dtype, options_.activations) {}

Result<std::unique_ptr<Decoder>> Decoder::Create(const ModelConfig& config,
                                                 const Architecture& architecture,
                                                 const Checkpoint& checkpoint,
                                                 DecoderOptions options,
                                                 std::vector<TensorToWrite>* record) {
  std::unique_ptr<Decoder> decoder(new Decoder(config, architecture, std::move(options)));
  QUIRE_RETURN_IF_ERROR(decoder->LoadWeights(checkpoint, WeightUse::kLoad, record));
  return decoder;
}

// A decoder whose weights have sizes only, and which is never asked to compute.
Result<ModelMeasure> Decoder::Measure(const ModelConfig& config, const Architecture& architecture,
                                      const Checkpoint& checkpoint, DecoderOptions options,
                                      int64_t row_count, int64_t logit_row_count) {
  Decoder decoder(config, architecture, std::move(options));
  QUIRE_RETURN_IF_ERROR(decoder.LoadWeights(checkpoint, WeightUse::kMeasure, nullptr));
  const size_t workspace_bytes = decoder.SizesOf(row_count, logit_row_count).total();
  return ModelMeasure{
      .info = std::move(decoder.info_),
      .workspace_bytes = static_cast<int64_t>(HostMemory::AllocatedBytes(workspace_bytes))};
}

// ---- Weights

Status Decoder::LoadWeights(const Checkpoint& checkpoint, WeightUse use,
                            std::vector<TensorToWrite>* record) {
  const DecoderNames& names = architecture_.names;
  WeightLoader loader(checkpoint, ops_.backend(), ops_.runner(), options_.dtype, use);
  loader.ReadQuantised(config_.quantisation);
  loader.RecordTo(record);
  const std::string embedding(names.embedding);
  bool is_in_head = false;
  if (config_.tie_word_embeddings) {
    QUIRE_ASSIGN_OR_RETURN(is_in_head,
                           loader.KeepsType(embedding, config_.vocab_size, config_.hidden_size));
  }
  if (!is_in_head) {
    QUIRE_ASSIGN_OR_RETURN(
        embedding_, loader.Rows(embedding + ".weight", config_.vocab_size, config_.hidden_size));
  }
  QUIRE_ASSIGN_OR_RETURN(std::shared_ptr<RopeTable> angles, AnglesOfMixers(config_));
  const LayerInputs inputs{.loader = loader,
                           .config = config_,
                           .architecture = architecture_,
                           .dtype = options_.dtype,
                           .angles = std::move(angles)};
  layers_.reserve(static_cast<size_t>(config_.num_hidden_layers));
  for (int64_t i = 0; i < config_.num_hidden_layers; ++i) {
    QUIRE_ASSIGN_OR_RETURN(Layer layer, LoadLayer(inputs, i));
    layers_.push_back(std::move(layer));
  }
  QUIRE_ASSIGN_OR_RETURN(
      final_norm_, loader.Vector(std::string(names.final_norm) + ".weight", config_.hidden_size));
  const std::string head = config_.tie_word_embeddings ? embedding : std::string(names.head);
  QUIRE_ASSIGN_OR_RETURN(head_,
                         loader.Linear({{head, config_.vocab_size}}, config_.hidden_size, false));
  FillInfo(loader);
  return Status();
}

Result<Decoder::Layer> Decoder::LoadLayer(const LayerInputs& inputs, int64_t index) {
  const DecoderNames& names = architecture_.names;
  const auto load_norm = [&](std::string_view name, std::vector<float>* norm) -> Status {
    if (name.empty()) return Status();
    QUIRE_ASSIGN_OR_RETURN(
        *norm, inputs.loader.Vector(LayerPrefix(inputs, index) + std::string(name) + ".weight",
                                    config_.hidden_size));
    return Status();
  };
  Layer layer;
  QUIRE_RETURN_IF_ERROR(load_norm(names.mixer_norm, &layer.mixer_norm));
  QUIRE_RETURN_IF_ERROR(load_norm(names.mixer_output_norm, &layer.mixer_output_norm));
  QUIRE_RETURN_IF_ERROR(load_norm(names.mlp_norm, &layer.mlp_norm));
  QUIRE_RETURN_IF_ERROR(load_norm(names.mlp_output_norm, &layer.mlp_output_norm));
  QUIRE_ASSIGN_OR_RETURN(layer.mixer, LoadMixer(inputs, index, &info_));
  if (names.mlp_norm.empty()) return layer;
  QUIRE_ASSIGN_OR_RETURN(layer.mlp, LoadMlp(inputs, index));
  return layer;
}

// Layers of the caches are there already.
void Decoder::FillInfo(const WeightLoader& loader) {
  info_.architecture = config_.architecture;
  info_.vocab_size = config_.vocab_size;
  info_.hidden_size = config_.hidden_size;
  info_.max_position_embeddings = config_.max_position_embeddings;
  info_.eos_token_ids = config_.eos_token_ids;
  info_.bos_token_id = config_.bos_token_id;
  info_.parameter_count = loader.parameter_count();
  info_.weight_bytes = loader.weight_bytes();
  info_.weight_types = loader.weight_types();
  info_.rope = config_.rope;
}

// ---- A forward

Status Decoder::CheckForward(const ModelState& state, std::span<const int32_t> token_ids,
                             std::span<const int64_t> logit_rows, const float* logits) const {
  QUIRE_RETURN_IF_ERROR(CheckModelState(info_, state));
  if (state.attention != nullptr) {
    QUIRE_RETURN_IF_ERROR(CheckTokenCount(*state.attention, token_ids));
  }
  return CheckForwardArguments(config_.vocab_size, token_ids, logit_rows, logits);
}

int64_t Decoder::RowFloats() const {
  int64_t floats = 0;
  for (const Layer& layer : layers_) {
    floats = std::max(floats, layer.mixer->row_floats());
    if (layer.mlp != nullptr) floats = std::max(floats, layer.mlp->row_floats());
  }
  return floats;
}

Decoder::BufferSizes Decoder::SizesOf(int64_t row_count, int64_t logit_row_count) const {
  const auto row_bytes = [row_count](int64_t width) {
    return RoundUp(static_cast<size_t>(row_count * width) * sizeof(float), kCacheLine);
  };
  size_t scratch = logit_row_count == 0 ? 0 : ops_.ScratchBytes(head_, logit_row_count);
  for (const Layer& layer : layers_) {
    scratch = std::max(scratch, layer.mixer->ScratchBytes(ops_, row_count));
    if (layer.mlp != nullptr) scratch = std::max(scratch, layer.mlp->ScratchBytes(ops_, row_count));
  }
  return {.hidden = row_bytes(config_.hidden_size),
          .floats = row_bytes(RowFloats()),
          .scratch = scratch};
}

Result<Decoder::Buffers> Decoder::PrepareBuffers(int64_t row_count, int64_t logit_row_count) {
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

void Decoder::Norm(const std::vector<float>& weight, const float* x, int64_t row_count,
                   float* y) const {
  ops_.Norm(weight, architecture_.norm_offset, static_cast<float>(config_.rms_norm_eps), x,
            row_count, y);
}

void Decoder::Embed(std::span<const int32_t> token_ids, float* hidden) const {
  const auto row_count = static_cast<int64_t>(token_ids.size());
  const int64_t width = config_.hidden_size;
  if (embedding_.data != nullptr) {
    ops_.GatherRows(embedding_, width, token_ids, hidden);
  } else {
    ops_.GatherRows(head_, token_ids, hidden);
  }
  if (!architecture_.scales_embeddings) return;
  // transformers holds the factor in float32 and rounds it to the model's type.
  auto scale = static_cast<float>(std::sqrt(static_cast<double>(width)));
  if (options_.dtype == DType::kBF16) scale = RoundedToBF16(scale);
  ops_.runner().ParallelFor(row_count, [&](int64_t row, int) {
    for (int64_t i = row * width; i < (row + 1) * width; ++i) hidden[i] *= scale;
  });
}

// The output goes straight into the residual stream, unless it is normalised first.
MixerRun Decoder::PartOfLayer(const std::vector<float>& norm, const std::vector<float>& output_norm,
                              QueryRows& rows, const Buffers& b) const {
  Norm(norm, b.hidden, rows.count(), b.normed);
  return {.ops = ops_,
          .row_count = rows.count(),
          .x = b.normed,
          .floats = b.floats,
          .scratch = b.scratch,
          .y = output_norm.empty() ? b.hidden : b.normed,
          .accumulate = output_norm.empty(),
          .rows = &rows};
}

void Decoder::AddNormed(const std::vector<float>& output_norm, int64_t row_count,
                        const Buffers& b) const {
  if (output_norm.empty()) return;
  Norm(output_norm, b.normed, row_count, b.normed);
  const int64_t width = config_.hidden_size;
  ops_.runner().ParallelFor(row_count, [&](int64_t row, int) {
    for (int64_t i = row * width; i < (row + 1) * width; ++i) b.hidden[i] += b.normed[i];
  });
}

Status Decoder::RunLayer(const ModelState& state, const Layer& layer, QueryRows& rows,
                         const Buffers& b) const {
  QUIRE_RETURN_IF_ERROR(
      layer.mixer->Run(state, PartOfLayer(layer.mixer_norm, layer.mixer_output_norm, rows, b)));
  AddNormed(layer.mixer_output_norm, rows.count(), b);
  if (layer.mlp == nullptr) return Status();
  layer.mlp->Run(PartOfLayer(layer.mlp_norm, layer.mlp_output_norm, rows, b));
  AddNormed(layer.mlp_output_norm, rows.count(), b);
  return Status();
}

Status Decoder::ComputeLogits(std::span<const int64_t> logit_rows, const QueryRows& rows,
                              const Buffers& b, float* logits) const {
  if (logit_rows.empty()) return Status();
  const int64_t hidden = config_.hidden_size;
  float* next = b.normed;
  for (const int64_t row : logit_rows) {
    const int64_t at = rows.Find(row);
    if (at < 0) {
      return Status(StatusCode::kBadArgument,
                    "Model::Forward: logit_rows has " + std::to_string(row) +
                        ", a row that a LayerHook has left out; it must choose the rows whose "
                        "logits are wanted");
    }
    CopyFloats(b.hidden + at * hidden, hidden, next);
    next += hidden;
  }
  const auto row_count = static_cast<int64_t>(logit_rows.size());
  Norm(final_norm_, b.normed, row_count, b.normed);
  ops_.Multiply(head_, b.normed, row_count, logits, false, b.scratch);
  if (config_.logit_cap == 0) return Status();
  ops_.backend().soft_cap(logits, static_cast<float>(config_.logit_cap), row_count,
                          config_.vocab_size, logits, ops_.runner());
  return Status();
}

Status Decoder::Forward(const ModelState& state, std::span<const int32_t> token_ids,
                        std::span<const int64_t> logit_rows, float* logits) {
  return GuardEntry([&]() -> Status {
    QUIRE_RETURN_IF_ERROR(CheckForward(state, token_ids, logit_rows, logits));
    const auto row_count = static_cast<int64_t>(token_ids.size());
    QUIRE_ASSIGN_OR_RETURN(const Buffers buffers,
                           PrepareBuffers(row_count, static_cast<int64_t>(logit_rows.size())));
    QueryRows rows(row_count, {buffers.hidden, config_.hidden_size});
    Embed(token_ids, buffers.hidden);
    for (const Layer& layer : layers_) {
      QUIRE_RETURN_IF_ERROR(RunLayer(state, layer, rows, buffers));
    }
    return ComputeLogits(logit_rows, rows, buffers, logits);
  });
}

}  // namespace quire
