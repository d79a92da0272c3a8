#include "model/mixers.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

namespace quire {
namespace {

// Under the root of the norm of delta-rule queries and keys, as in transformers.
constexpr float kUnitNormEps = 1e-6F;

// Exact where e^x would leave float32's range.
float Softplus(float x) { return x > 20.0F ? x : std::log1p(std::exp(x)); }

float Silu(float x) { return x * Sigmoid(x); }

// -e^w of what is stored as logarithms.
std::vector<float> NegativeExp(std::vector<float> logs) {
  for (float& value : logs) value = -std::exp(value);
  return logs;
}

void CopyFloats(const float* from, int64_t count, float* to) {
  std::memcpy(to, from, static_cast<size_t>(count) * sizeof(float));
}

void ToUnitLength(int64_t size, float* x) {
  float sum = 0;
  for (int64_t i = 0; i < size; ++i) sum += x[i] * x[i];
  const float factor = 1.0F / std::sqrt(sum + kUnitNormEps);
  for (int64_t i = 0; i < size; ++i) x[i] *= factor;
}

// A part of rows of `row_stride` floats, [n, heads, dim].
Result<TensorView> PartOfRows(float* data, int64_t row_count, int64_t row_stride, int64_t heads,
                              int64_t dim) {
  int64_t shape[] = {row_count, heads, dim};
  int64_t strides[] = {row_stride, dim, 1};
  return TensorView::FromDLPack({.data = data,
                                 .device = {kDLCPU, 0},
                                 .ndim = 3,
                                 .dtype = ToDLDataType(DType::kF32),
                                 .shape = shape,
                                 .strides = strides,
                                 .byte_offset = 0});
}

// Hands out buffers of `row_count` rows one behind the other.
class Divider {
 public:
  explicit Divider(const MixerRun& run) : next_(run.floats), row_count_(run.row_count) {}
  float* Take(int64_t width) { return std::exchange(next_, next_ + width * row_count_); }

 private:
  float* next_;
  int64_t row_count_;
};

Result<std::vector<float>> LoadConvolution(WeightLoader& loader, const std::string& name,
                                           int64_t channels, int64_t width) {
  return loader.Vector(name, {channels, 1, width});
}

}  // namespace

// ---- Gated attention

Result<GatedAttention> GatedAttention::Load(WeightLoader& loader, const std::string& prefix,
                                            const ModelConfig& config) {
  GatedAttention mixer;
  mixer.query_heads_ = config.num_attention_heads;
  mixer.key_heads_ = config.num_key_value_heads;
  mixer.head_dim_ = config.head_dim;
  mixer.eps_ = static_cast<float>(config.rms_norm_eps);
  QUIRE_ASSIGN_OR_RETURN(mixer.in_, loader.Linear({{prefix + "q_proj", 2 * mixer.query_width()},
                                                   {prefix + "k_proj", mixer.key_width()},
                                                   {prefix + "v_proj", mixer.key_width()}},
                                                  config.hidden_size, config.attention_bias));
  QUIRE_ASSIGN_OR_RETURN(mixer.out_, loader.Linear({{prefix + "o_proj", config.hidden_size}},
                                                   mixer.query_width(), config.attention_bias));
  QUIRE_ASSIGN_OR_RETURN(mixer.q_norm_, loader.Vector(prefix + "q_norm.weight", config.head_dim));
  QUIRE_ASSIGN_OR_RETURN(mixer.k_norm_, loader.Vector(prefix + "k_norm.weight", config.head_dim));
  return mixer;
}

int64_t GatedAttention::row_floats() const {
  const int64_t in = 2 * query_width() + 2 * key_width();
  const int64_t qkv = query_width() + 2 * key_width();
  return in + qkv + query_width();
}

size_t GatedAttention::ScratchBytes(const RowOps& ops, int64_t row_count) const {
  return std::max(ops.ScratchBytes(in_, row_count), ops.ScratchBytes(out_, row_count));
}

Status GatedAttention::Run(AttentionKVCache& cache, int64_t layer, const MixerRun& run) const {
  const int64_t in_width = 2 * query_width() + 2 * key_width();
  const int64_t qkv_width = query_width() + 2 * key_width();
  const int64_t dim = head_dim_;
  Divider divider(run);
  float* const in = divider.Take(in_width);
  float* const qkv = divider.Take(qkv_width);
  float* const o = divider.Take(query_width());
  run.ops.Multiply(in_, run.x, run.row_count, in, false, run.scratch);
  run.ops.runner().ParallelFor(run.row_count, [&](int64_t row, int) {
    const float* const from = in + row * in_width;
    float* const to = qkv + row * qkv_width;
    for (int64_t h = 0; h < query_heads_; ++h) CopyFloats(from + 2 * h * dim, dim, to + h * dim);
    CopyFloats(from + 2 * query_width(), 2 * key_width(), to + query_width());
  });
  run.ops.NormPieces(q_norm_, 1.0F, eps_, run.row_count, qkv_width, query_heads_, dim, qkv);
  run.ops.NormPieces(k_norm_, 1.0F, eps_, run.row_count, qkv_width, key_heads_, dim,
                     qkv + query_width());
  QUIRE_RETURN_IF_ERROR(cache.AttentionWithFusedQKV(
      layer, TensorView(qkv, DType::kF32, {run.row_count, query_heads_ + 2 * key_heads_, dim}),
      TensorView(o, DType::kF32, {run.row_count, query_heads_, dim}),
      1.0 / std::sqrt(static_cast<double>(dim))));
  run.ops.runner().ParallelFor(run.row_count, [&](int64_t row, int) {
    for (int64_t h = 0; h < query_heads_; ++h) {
      const float* const gate = in + row * in_width + (2 * h + 1) * dim;
      float* const head = o + row * query_width() + h * dim;
      for (int64_t i = 0; i < dim; ++i) head[i] *= Sigmoid(gate[i]);
    }
  });
  run.ops.Multiply(out_, o, run.row_count, run.hidden, true, run.scratch);
  return Status();
}

// ---- Mamba-2

struct StateSpaceMixer::Buffers {
  float* in;        // [n, inner + channels + heads]: gate, channels, steps
  float* channels;  // [n, channels]
  float* mixed;     // [n, channels]: x, b, c
  float* steps;     // [n, heads]
  float* o;         // [n, inner]
};

Result<StateSpaceMixer> StateSpaceMixer::Load(WeightLoader& loader, const std::string& prefix,
                                              const ModelConfig& config) {
  StateSpaceMixer mixer;
  mixer.config_ = *config.state_space;
  mixer.eps_ = static_cast<float>(config.rms_norm_eps);
  const StateSpaceConfig& c = mixer.config_;
  const int64_t in_width = c.inner_size() + c.conv_channels() + c.num_heads;
  QUIRE_ASSIGN_OR_RETURN(
      mixer.in_, loader.Linear({{prefix + "in_proj", in_width}}, config.hidden_size, c.has_bias));
  QUIRE_ASSIGN_OR_RETURN(mixer.out_, loader.Linear({{prefix + "out_proj", config.hidden_size}},
                                                   c.inner_size(), c.has_bias));
  QUIRE_ASSIGN_OR_RETURN(mixer.conv_, LoadConvolution(loader, prefix + "conv1d.weight",
                                                      c.conv_channels(), c.conv_width));
  if (c.has_conv_bias) {
    QUIRE_ASSIGN_OR_RETURN(mixer.conv_bias_,
                           loader.Vector(prefix + "conv1d.bias", c.conv_channels()));
  }
  QUIRE_ASSIGN_OR_RETURN(mixer.step_bias_, loader.Vector(prefix + "dt_bias", c.num_heads));
  QUIRE_ASSIGN_OR_RETURN(std::vector<float> logs, loader.Vector(prefix + "A_log", c.num_heads));
  mixer.decay_rates_ = NegativeExp(std::move(logs));
  QUIRE_ASSIGN_OR_RETURN(mixer.skip_, loader.Vector(prefix + "D", c.num_heads));
  QUIRE_ASSIGN_OR_RETURN(mixer.norm_, loader.Vector(prefix + "norm.weight", c.inner_size()));
  return mixer;
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

size_t StateSpaceMixer::ScratchBytes(const RowOps& ops, int64_t row_count) const {
  return std::max(ops.ScratchBytes(in_, row_count), ops.ScratchBytes(out_, row_count));
}

StateSpaceMixer::Buffers StateSpaceMixer::Divide(const MixerRun& run) const {
  Divider divider(run);
  Buffers b;
  b.in = divider.Take(config_.inner_size() + config_.conv_channels() + config_.num_heads);
  b.channels = divider.Take(config_.conv_channels());
  b.mixed = divider.Take(config_.conv_channels());
  b.steps = divider.Take(config_.num_heads);
  b.o = divider.Take(config_.inner_size());
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
    const float* const in = b.in + row * (inner + channels + heads);
    CopyFloats(in + inner, channels, b.channels + row * channels);
    const float* const raw = in + inner + channels;
    float* const steps = b.steps + row * heads;
    for (int64_t h = 0; h < heads; ++h) {
      steps[h] = std::clamp(Softplus(raw[h] + step_bias_[static_cast<size_t>(h)]), least, most);
    }
  });
}

// The output passes the gate first; each group of heads is normalised by itself.
void StateSpaceMixer::GateAndNorm(const MixerRun& run, const Buffers& b) const {
  const int64_t inner = config_.inner_size();
  const int64_t in_width = inner + config_.conv_channels() + config_.num_heads;
  run.ops.runner().ParallelFor(run.row_count, [&](int64_t row, int) {
    const float* const gate = b.in + row * in_width;
    float* const o = b.o + row * inner;
    for (int64_t i = 0; i < inner; ++i) o[i] *= Silu(gate[i]);
  });
  run.ops.NormPieces(norm_, 0.0F, eps_, run.row_count, inner, config_.num_groups,
                     inner / config_.num_groups, b.o);
}

Status StateSpaceMixer::Run(RecurrentCache& cache, int64_t layer, const MixerRun& run) const {
  const StateSpaceConfig& c = config_;
  const int64_t n = run.row_count;
  const int64_t channels = c.conv_channels();
  const Buffers b = Divide(run);
  run.ops.Multiply(in_, run.x, n, b.in, false, run.scratch);
  Prepare(run, b);
  const TensorView bias(conv_bias_.data(), DType::kF32, {static_cast<int64_t>(conv_bias_.size())});
  QUIRE_RETURN_IF_ERROR(cache.Convolution(
      layer, TensorView(b.channels, DType::kF32, {n, channels}),
      TensorView(conv_.data(), DType::kF32, {channels, c.conv_width}),
      conv_bias_.empty() ? nullptr : &bias, true, TensorView(b.mixed, DType::kF32, {n, channels})));
  QUIRE_ASSIGN_OR_RETURN(const TensorView x,
                         PartOfRows(b.mixed, n, channels, c.num_heads, c.head_dim));
  float* const behind_x = b.mixed + c.inner_size();
  QUIRE_ASSIGN_OR_RETURN(const TensorView inputs,
                         PartOfRows(behind_x, n, channels, c.num_groups, c.state_size));
  QUIRE_ASSIGN_OR_RETURN(
      const TensorView outputs,
      PartOfRows(behind_x + c.group_width(), n, channels, c.num_groups, c.state_size));
  const TensorView skip(skip_.data(), DType::kF32, {c.num_heads});
  QUIRE_RETURN_IF_ERROR(
      cache.StateSpace(layer + 1, x, TensorView(b.steps, DType::kF32, {n, c.num_heads}),
                       TensorView(decay_rates_.data(), DType::kF32, {c.num_heads}), inputs, outputs,
                       &skip, TensorView(b.o, DType::kF32, {n, c.num_heads, c.head_dim})));
  GateAndNorm(run, b);
  run.ops.Multiply(out_, b.o, n, run.hidden, true, run.scratch);
  return Status();
}

// ---- The gated delta rule

struct GatedDeltaMixer::Buffers {
  float* in;        // [n, 2 key width + 2 value width + 2 value heads]
  float* channels;  // [n, channels]
  float* mixed;     // [n, channels]: queries, keys, values
  float* decay;     // [n, value heads]
  float* beta;      // [n, value heads]
  float* o;         // [n, value width]
};

Result<GatedDeltaMixer> GatedDeltaMixer::Load(WeightLoader& loader, const std::string& prefix,
                                              const ModelConfig& config) {
  GatedDeltaMixer mixer;
  mixer.config_ = *config.gated_delta;
  mixer.eps_ = static_cast<float>(config.rms_norm_eps);
  const GatedDeltaConfig& c = mixer.config_;
  QUIRE_ASSIGN_OR_RETURN(
      mixer.in_, loader.Linear({{prefix + "in_proj_qkvz", 2 * c.key_width() + 2 * c.value_width()},
                                {prefix + "in_proj_ba", 2 * c.num_value_heads}},
                               config.hidden_size, false));
  QUIRE_ASSIGN_OR_RETURN(mixer.out_, loader.Linear({{prefix + "out_proj", config.hidden_size}},
                                                   c.value_width(), false));
  QUIRE_ASSIGN_OR_RETURN(mixer.conv_, LoadConvolution(loader, prefix + "conv1d.weight",
                                                      c.conv_channels(), c.conv_width));
  QUIRE_ASSIGN_OR_RETURN(mixer.step_bias_, loader.Vector(prefix + "dt_bias", c.num_value_heads));
  QUIRE_ASSIGN_OR_RETURN(std::vector<float> logs,
                         loader.Vector(prefix + "A_log", c.num_value_heads));
  mixer.decay_rates_ = NegativeExp(std::move(logs));
  QUIRE_ASSIGN_OR_RETURN(mixer.norm_, loader.Vector(prefix + "norm.weight", c.value_dim));
  return mixer;
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

size_t GatedDeltaMixer::ScratchBytes(const RowOps& ops, int64_t row_count) const {
  return std::max(ops.ScratchBytes(in_, row_count), ops.ScratchBytes(out_, row_count));
}

GatedDeltaMixer::Buffers GatedDeltaMixer::Divide(const MixerRun& run) const {
  const GatedDeltaConfig& c = config_;
  Divider divider(run);
  Buffers b;
  b.in = divider.Take(2 * c.key_width() + 2 * c.value_width() + 2 * c.num_value_heads);
  b.channels = divider.Take(c.conv_channels());
  b.mixed = divider.Take(c.conv_channels());
  b.decay = divider.Take(c.num_value_heads);
  b.beta = divider.Take(c.num_value_heads);
  b.o = divider.Take(c.value_width());
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
    const float* const in = b.in + row * in_.packed().n;
    float* const to = b.channels + row * c.conv_channels();
    const float* const gates = in + c.num_key_heads * group;
    for (int64_t g = 0; g < c.num_key_heads; ++g) {
      const float* const from = in + g * group;
      CopyFloats(from, c.key_dim, to + g * c.key_dim);
      CopyFloats(from + c.key_dim, c.key_dim, to + c.key_width() + g * c.key_dim);
      CopyFloats(from + 2 * c.key_dim, values, to + 2 * c.key_width() + g * values);
      for (int64_t i = 0; i < sharers; ++i) {
        const int64_t head = g * sharers + i;
        const auto index = static_cast<size_t>(head);
        const float* const pair = gates + 2 * g * sharers + i;
        b.beta[row * c.num_value_heads + head] = Sigmoid(pair[0]);
        b.decay[row * c.num_value_heads + head] =
            std::exp(decay_rates_[index] * Softplus(pair[sharers] + step_bias_[index]));
      }
    }
  });
}

void GatedDeltaMixer::NormAndGate(const MixerRun& run, const Buffers& b) const {
  const GatedDeltaConfig& c = config_;
  const int64_t sharers = c.num_value_heads / c.num_key_heads;
  const int64_t values = sharers * c.value_dim;
  const int64_t group = 2 * c.key_dim + 2 * values;
  run.ops.NormPieces(norm_, 0.0F, eps_, run.row_count, c.value_width(), c.num_value_heads,
                     c.value_dim, b.o);
  run.ops.runner().ParallelFor(run.row_count, [&](int64_t row, int) {
    for (int64_t g = 0; g < c.num_key_heads; ++g) {
      const float* const gate = b.in + row * in_.packed().n + g * group + 2 * c.key_dim + values;
      float* const o = b.o + row * c.value_width() + g * values;
      for (int64_t i = 0; i < values; ++i) o[i] *= Silu(gate[i]);
    }
  });
}

Status GatedDeltaMixer::Run(RecurrentCache& cache, int64_t layer, const MixerRun& run) const {
  const GatedDeltaConfig& c = config_;
  const int64_t n = run.row_count;
  const int64_t channels = c.conv_channels();
  const Buffers b = Divide(run);
  run.ops.Multiply(in_, run.x, n, b.in, false, run.scratch);
  Prepare(run, b);
  QUIRE_RETURN_IF_ERROR(
      cache.Convolution(layer, TensorView(b.channels, DType::kF32, {n, channels}),
                        TensorView(conv_.data(), DType::kF32, {channels, c.conv_width}), nullptr,
                        true, TensorView(b.mixed, DType::kF32, {n, channels})));
  run.ops.runner().ParallelFor(n, [&](int64_t row, int) {
    float* const heads = b.mixed + row * channels;  // of queries, then of keys
    for (int64_t h = 0; h < 2 * c.num_key_heads; ++h)
      ToUnitLength(c.key_dim, heads + h * c.key_dim);
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
  QUIRE_RETURN_IF_ERROR(
      cache.GatedDelta(layer + 1, q, k, v, decay, beta,
                       TensorView(b.o, DType::kF32, {n, c.num_value_heads, c.value_dim}),
                       1.0 / std::sqrt(static_cast<double>(c.key_dim))));
  NormAndGate(run, b);
  run.ops.Multiply(out_, b.o, n, run.hidden, true, run.scratch);
  return Status();
}

}  // namespace quire
