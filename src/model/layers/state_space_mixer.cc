#include "model/layers/state_space_mixer.h"

#include <algorithm>
#include <utility>

namespace quire {

struct StateSpaceMixer::Buffers {
  float* in;        // [n, inner + channels + heads]: gate, channels, steps
  float* channels;  // [n, channels]
  float* mixed;     // [n, channels]: x, b, c
  float* steps;     // [n, heads]
  float* o;         // [n, inner]
};

Result<std::unique_ptr<Mixer>> StateSpaceMixer::Load(WeightLoader& loader,
                                                     const std::string& prefix,
                                                     const ModelConfig& config, int64_t layer) {
  auto mixer = std::make_unique<StateSpaceMixer>();
  mixer->config_ = *config.state_space;
  const StateSpaceConfig& c = mixer->config_;
  const Shape shape{.hidden_size = config.hidden_size,
                    .inner_size = c.inner_size(),
                    .conv_channels = c.conv_channels(),
                    .conv_width = c.conv_width,
                    .num_heads = c.num_heads,
                    .norm_size = c.inner_size(),
                    .has_bias = c.has_bias,
                    .has_conv_bias = c.has_conv_bias,
                    .norm_eps = static_cast<float>(config.rms_norm_eps),
                    .layer = layer};
  const LinearPart in[] = {{prefix + "in_proj", c.inner_size() + c.conv_channels() + c.num_heads}};
  QUIRE_RETURN_IF_ERROR(mixer->LoadShared(loader, prefix, shape, in));
  QUIRE_ASSIGN_OR_RETURN(mixer->skip_, loader.Vector(prefix + "D", c.num_heads));
  return std::unique_ptr<Mixer>(std::move(mixer));
}

std::vector<RecurrentLayerSpec> StateSpaceMixer::Layers(const StateSpaceConfig& config) {
  return {{.kind = RecurrentLayerKind::kConvolution,
           .num_channels = config.conv_channels(),
           .width = config.conv_width},
          {.kind = RecurrentLayerKind::kStateSpace,
           .num_heads = config.num_heads,
           .num_key_heads = config.num_groups,
           .key_dim = config.state_size,
           .value_dim = config.head_dim}};
}

int64_t StateSpaceMixer::row_floats() const {
  return 2 * config_.inner_size() + 3 * config_.conv_channels() + 2 * config_.num_heads;
}

StateSpaceMixer::Buffers StateSpaceMixer::Divide(const MixerRun& run) const {
  RowBuffers buffers(run);
  Buffers b;
  b.in = buffers.Take(in_width());
  b.channels = buffers.Take(config_.conv_channels());
  b.mixed = buffers.Take(config_.conv_channels());
  b.steps = buffers.Take(config_.num_heads);
  b.o = buffers.Take(config_.inner_size());
  return b;
}

// Channels of the convolution and steps out of what was projected.
void StateSpaceMixer::Prepare(const MixerRun& run, const Buffers& b) const {
  const int64_t inner = config_.inner_size();
  const int64_t channels = config_.conv_channels();
  const int64_t heads = config_.num_heads;
  const auto least = static_cast<float>(config_.step_min);
  const auto most = static_cast<float>(config_.step_max);
  run.ops.runner().ParallelFor(run.row_count, [&](int64_t row, int) {
    const float* const in = b.in + row * in_width();
    CopyFloats(in + inner, channels, b.channels + row * channels);
    const float* const raw = in + inner + channels;
    float* const steps = b.steps + row * heads;
    for (int64_t h = 0; h < heads; ++h) {
      steps[h] = std::clamp(Softplus(raw[h] + step_bias(h)), least, most);
    }
  });
}

// The output passes the gate first; each group of heads is normalised by itself.
void StateSpaceMixer::GateAndNorm(const MixerRun& run, const Buffers& b) const {
  const int64_t inner = config_.inner_size();
  run.ops.runner().ParallelFor(run.row_count, [&](int64_t row, int) {
    const float* const gate = b.in + row * in_width();
    float* const o = b.o + row * inner;
    for (int64_t i = 0; i < inner; ++i) o[i] *= Silu(gate[i]);
  });
  NormPieces(run, config_.num_groups, b.o);
}

Status StateSpaceMixer::Run(const ModelState& state, const MixerRun& run) const {
  const StateSpaceConfig& c = config_;
  const int64_t n = run.row_count;
  const int64_t channels = c.conv_channels();
  const Buffers b = Divide(run);
  ProjectIn(run, b.in);
  Prepare(run, b);
  QUIRE_RETURN_IF_ERROR(Convolve(state, run, b.channels, b.mixed));
  QUIRE_ASSIGN_OR_RETURN(const TensorView x,
                         PartOfRows(b.mixed, n, channels, c.num_heads, c.head_dim));
  float* const behind_x = b.mixed + c.inner_size();
  QUIRE_ASSIGN_OR_RETURN(const TensorView inputs,
                         PartOfRows(behind_x, n, channels, c.num_groups, c.state_size));
  QUIRE_ASSIGN_OR_RETURN(
      const TensorView outputs,
      PartOfRows(behind_x + c.group_width(), n, channels, c.num_groups, c.state_size));
  const TensorView skip(skip_.data(), DType::kF32, {c.num_heads});
  QUIRE_RETURN_IF_ERROR(state.recurrent->StateSpace(
      state_layer(), x, TensorView(b.steps, DType::kF32, {n, c.num_heads}), decay_rates(), inputs,
      outputs, &skip, TensorView(b.o, DType::kF32, {n, c.num_heads, c.head_dim})));
  GateAndNorm(run, b);
  ProjectOut(run, b.o);
  return Status();
}

}  // namespace quire
