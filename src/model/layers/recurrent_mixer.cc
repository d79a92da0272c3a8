#include "model/layers/recurrent_mixer.h"

#include <algorithm>
#include <cmath>

namespace quire {

float Softplus(float x) { return x > 20.0F ? x : std::log1p(std::exp(x)); }

float Silu(float x) { return x * Sigmoid(x); }

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

Status RecurrentMixer::LoadShared(WeightLoader& loader, const std::string& prefix,
                                  const Shape& shape, std::span<const LinearPart> in) {
  shape_ = shape;
  QUIRE_ASSIGN_OR_RETURN(in_, loader.Linear(in, shape.hidden_size, shape.has_bias));
  QUIRE_ASSIGN_OR_RETURN(out_, loader.Linear({{prefix + "out_proj", shape.hidden_size}},
                                             shape.inner_size, shape.has_bias));
  QUIRE_ASSIGN_OR_RETURN(
      conv_, loader.Vector(prefix + "conv1d.weight", {shape.conv_channels, 1, shape.conv_width}));
  if (shape.has_conv_bias) {
    QUIRE_ASSIGN_OR_RETURN(conv_bias_, loader.Vector(prefix + "conv1d.bias", shape.conv_channels));
  }
  QUIRE_ASSIGN_OR_RETURN(step_bias_, loader.Vector(prefix + "dt_bias", shape.num_heads));
  QUIRE_RETURN_IF_ERROR(LoadDecayRates(loader, prefix));
  QUIRE_ASSIGN_OR_RETURN(norm_, loader.Vector(prefix + "norm.weight", shape.norm_size));
  return Status();
}

Status RecurrentMixer::LoadDecayRates(WeightLoader& loader, const std::string& prefix) {
  if (!loader.Has(prefix + "A")) {
    // Stored are the logarithms of what is taken off.
    QUIRE_ASSIGN_OR_RETURN(decay_rates_, loader.Vector(prefix + "A_log", shape_.num_heads));
    for (float& rate : decay_rates_) rate = -std::exp(rate);
    return Status();
  }
  QUIRE_ASSIGN_OR_RETURN(decay_rates_, loader.Vector(prefix + "A", shape_.num_heads));
  for (const float rate : decay_rates_) {
    if (rate <= 0) continue;
    return Status(StatusCode::kCorrupt, "tensor " + prefix + "A has the rate " +
                                            std::to_string(rate) +
                                            "; a state is forgotten at rates below zero: the file "
                                            "is damaged, fetch it again");
  }
  return Status();
}

size_t RecurrentMixer::ScratchBytes(const RowOps& ops, int64_t row_count) const {
  return std::max(ops.ScratchBytes(in_, row_count), ops.ScratchBytes(out_, row_count));
}

TensorView RecurrentMixer::decay_rates() const {
  return TensorView(decay_rates_.data(), DType::kF32, {shape_.num_heads});
}

void RecurrentMixer::ProjectIn(const MixerRun& run, float* in) const {
  run.ops.Multiply(in_, run.x, run.row_count, in, false, run.scratch);
}

Status RecurrentMixer::Convolve(const ModelState& state, const MixerRun& run, const float* channels,
                                float* mixed) const {
  const TensorView bias(conv_bias_.data(), DType::kF32, {static_cast<int64_t>(conv_bias_.size())});
  return state.recurrent->Convolution(
      shape_.layer, TensorView(channels, DType::kF32, {run.row_count, shape_.conv_channels}),
      TensorView(conv_.data(), DType::kF32, {shape_.conv_channels, shape_.conv_width}),
      conv_bias_.empty() ? nullptr : &bias, true,
      TensorView(mixed, DType::kF32, {run.row_count, shape_.conv_channels}));
}

void RecurrentMixer::NormPieces(const MixerRun& run, int64_t piece_count, float* o) const {
  run.ops.NormPieces(norm_, 0.0F, shape_.norm_eps, run.row_count, shape_.inner_size, piece_count,
                     shape_.inner_size / piece_count, o);
}

void RecurrentMixer::ProjectOut(const MixerRun& run, const float* o) const {
  run.ops.Multiply(out_, o, run.row_count, run.y, run.accumulate, run.scratch);
}

}  // namespace quire
