#include "model/layers/gated_delta_mixer.h"

#include <cmath>
#include <utility>

namespace quire {
namespace {

// Under the root of the norm of queries and keys, as in transformers.
constexpr float kUnitNormEps = 1e-6F;

void ToUnitLength(int64_t size, float* x) {
  float sum = 0;
  for (int64_t i = 0; i < size; ++i) sum += x[i] * x[i];
  const float factor = 1.0F / std::sqrt(sum + kUnitNormEps);
  for (int64_t i = 0; i < size; ++i) x[i] *= factor;
}

}  // namespace

struct GatedDeltaMixer::Buffers {
  // [n, 2 key width + 2 value width + 2 value heads]: per key head query, key, values, gates; then
  // per key head betas, decays
  float* in;
  float* channels;  // [n, channels]
  float* mixed;     // [n, channels]: queries, keys, values
  float* decay;     // [n, value heads]
  float* beta;      // [n, value heads]
  float* o;         // [n, value width]
};

Result<std::unique_ptr<Mixer>> GatedDeltaMixer::Load(WeightLoader& loader,
                                                     const std::string& prefix,
                                                     const ModelConfig& config, int64_t layer) {
  auto mixer = std::make_unique<GatedDeltaMixer>();
  mixer->config_ = *config.gated_delta;
  const GatedDeltaConfig& c = mixer->config_;
  const Shape shape{.hidden_size = config.hidden_size,
                    .inner_size = c.value_width(),
                    .conv_channels = c.conv_channels(),
                    .conv_width = c.conv_width,
                    .num_heads = c.num_value_heads,
                    .norm_size = c.value_dim,
                    .norm_eps = static_cast<float>(config.rms_norm_eps),
                    .layer = layer};
  const LinearPart in[] = {{prefix + "in_proj_qkvz", 2 * c.key_width() + 2 * c.value_width()},
                           {prefix + "in_proj_ba", 2 * c.num_value_heads}};
  QUIRE_RETURN_IF_ERROR(mixer->LoadShared(loader, prefix, shape, in));
  return std::unique_ptr<Mixer>(std::move(mixer));
}

std::vector<RecurrentLayerSpec> GatedDeltaMixer::Layers(const GatedDeltaConfig& config) {
  return {{.kind = RecurrentLayerKind::kConvolution,
           .num_channels = config.conv_channels(),
           .width = config.conv_width},
          {.kind = RecurrentLayerKind::kGatedDelta,
           .num_heads = config.num_value_heads,
           .num_key_heads = config.num_key_heads,
           .key_dim = config.key_dim,
           .value_dim = config.value_dim}};
}

int64_t GatedDeltaMixer::row_floats() const {
  const GatedDeltaConfig& c = config_;
  return 2 * c.key_width() + 3 * c.value_width() + 2 * c.conv_channels() + 4 * c.num_value_heads;
}

GatedDeltaMixer::Buffers GatedDeltaMixer::Divide(const MixerRun& run) const {
  RowBuffers buffers(run);
  Buffers b;
  b.in = buffers.Take(in_width());
  b.channels = buffers.Take(config_.conv_channels());
  b.mixed = buffers.Take(config_.conv_channels());
  b.decay = buffers.Take(config_.num_value_heads);
  b.beta = buffers.Take(config_.num_value_heads);
  b.o = buffers.Take(config_.value_width());
  return b;
}

// The projections come key head by key head; the convolution wants queries, keys and values each in
// one piece.
void GatedDeltaMixer::Prepare(const MixerRun& run, const Buffers& b) const {
  const GatedDeltaConfig& c = config_;
  const int64_t sharers = c.num_value_heads / c.num_key_heads;
  const int64_t values = sharers * c.value_dim;
  const int64_t group = 2 * c.key_dim + 2 * values;
  run.ops.runner().ParallelFor(run.row_count, [&](int64_t row, int) {
    const float* const in = b.in + row * in_width();
    float* const to = b.channels + row * c.conv_channels();
    const float* const gates = in + c.num_key_heads * group;
    for (int64_t g = 0; g < c.num_key_heads; ++g) {
      const float* const from = in + g * group;
      CopyFloats(from, c.key_dim, to + g * c.key_dim);
      CopyFloats(from + c.key_dim, c.key_dim, to + c.key_width() + g * c.key_dim);
      CopyFloats(from + 2 * c.key_dim, values, to + 2 * c.key_width() + g * values);
      for (int64_t i = 0; i < sharers; ++i) {
        const int64_t head = g * sharers + i;
        const float* const pair = gates + 2 * g * sharers + i;
        b.beta[row * c.num_value_heads + head] = Sigmoid(pair[0]);
        b.decay[row * c.num_value_heads + head] =
            std::exp(decay_rate(head) * Softplus(pair[sharers] + step_bias(head)));
      }
    }
  });
}

Status GatedDeltaMixer::ComputeRule(const ModelState& state, const MixerRun& run,
                                    const Buffers& b) const {
  const GatedDeltaConfig& c = config_;
  const int64_t n = run.row_count;
  const int64_t channels = c.conv_channels();
  run.ops.runner().ParallelFor(n, [&](int64_t row, int) {
    float* const heads = b.mixed + row * channels;  // of queries, then of keys
    for (int64_t h = 0; h < 2 * c.num_key_heads; ++h) {
      ToUnitLength(c.key_dim, heads + h * c.key_dim);
    }
  });
  float* const k_data = b.mixed + c.key_width();
  QUIRE_ASSIGN_OR_RETURN(const TensorView q,
                         PartOfRows(b.mixed, n, channels, c.num_key_heads, c.key_dim));
  QUIRE_ASSIGN_OR_RETURN(const TensorView k,
                         PartOfRows(k_data, n, channels, c.num_key_heads, c.key_dim));
  QUIRE_ASSIGN_OR_RETURN(const TensorView v, PartOfRows(k_data + c.key_width(), n, channels,
                                                        c.num_value_heads, c.value_dim));
  const TensorView decay(b.decay, DType::kF32, {n, c.num_value_heads});
  const TensorView beta(b.beta, DType::kF32, {n, c.num_value_heads});
  return state.recurrent->GatedDelta(
      state_layer(), q, k, v, decay, beta,
      TensorView(b.o, DType::kF32, {n, c.num_value_heads, c.value_dim}),
      1.0 / std::sqrt(static_cast<double>(c.key_dim)));
}

void GatedDeltaMixer::NormAndGate(const MixerRun& run, const Buffers& b) const {
  const GatedDeltaConfig& c = config_;
  const int64_t sharers = c.num_value_heads / c.num_key_heads;
  const int64_t values = sharers * c.value_dim;
  const int64_t group = 2 * c.key_dim + 2 * values;
  NormPieces(run, c.num_value_heads, b.o);
  run.ops.runner().ParallelFor(run.row_count, [&](int64_t row, int) {
    for (int64_t g = 0; g < c.num_key_heads; ++g) {
      const float* const gate = b.in + row * in_width() + g * group + 2 * c.key_dim + values;
      float* const o = b.o + row * c.value_width() + g * values;
      for (int64_t i = 0; i < values; ++i) o[i] *= Silu(gate[i]);
    }
  });
}

Status GatedDeltaMixer::Run(const ModelState& state, const MixerRun& run) const {
  const Buffers b = Divide(run);
  ProjectIn(run, b.in);
  Prepare(run, b);
  QUIRE_RETURN_IF_ERROR(Convolve(state, run, b.channels, b.mixed));
  QUIRE_RETURN_IF_ERROR(ComputeRule(state, run, b));
  NormAndGate(run, b);
  ProjectOut(run, b.o);
  return Status();
}

}  // namespace quire
