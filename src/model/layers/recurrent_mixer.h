// What Mamba-2's state space and the gated delta rule have in common: a projection, a convolution
// over the last tokens, a recurrence whose speed of forgetting comes with the token, a norm, a
// projection.
#ifndef QUIRE_MODEL_LAYERS_RECURRENT_MIXER_H_
#define QUIRE_MODEL_LAYERS_RECURRENT_MIXER_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "model/layers/mixer.h"
#include "model/weights/weights.h"
#include "quire/recurrent_cache.h"
#include "quire/status.h"
#include "quire/tensor.h"

namespace quire {

// A mixer takes two layers of the recurrent cache: its convolution, then its state.
class RecurrentMixer : public Mixer {
 public:
  size_t ScratchBytes(const RowOps& ops, int64_t row_count) const final;

 protected:
  struct Shape {
    int64_t hidden_size;
    int64_t inner_size;  // of what enters the last projection
    int64_t conv_channels;
    int64_t conv_width;
    int64_t num_heads;  // that forget each at a speed of its own
    int64_t norm_size;
    bool has_bias = false;  // of the projections
    bool has_conv_bias = false;
    float norm_eps;
    int64_t layer;  // the first of the two
  };

  // `in`: the parts of the first projection.
  Status LoadShared(WeightLoader& loader, const std::string& prefix, const Shape& shape,
                    std::span<const LinearPart> in);

  int64_t in_width() const { return in_.packed().n; }
  int64_t state_layer() const { return shape_.layer + 1; }
  float decay_rate(int64_t head) const { return decay_rates_[static_cast<size_t>(head)]; }
  // The bias of the head's step, before the softplus.
  float step_bias(int64_t head) const { return step_bias_[static_cast<size_t>(head)]; }
  TensorView decay_rates() const;

  // [n, in_width()]
  void ProjectIn(const MixerRun& run, float* in) const;
  // channels and mixed: [n, conv_channels]
  Status Convolve(const ModelState& state, const MixerRun& run, const float* channels,
                  float* mixed) const;
  // In place; o: [n, inner_size] in `piece_count` pieces.
  void NormPieces(const MixerRun& run, int64_t piece_count, float* o) const;
  void ProjectOut(const MixerRun& run, const float* o) const;

 private:
  Status LoadDecayRates(WeightLoader& loader, const std::string& prefix);

  Shape shape_ = {};
  LinearWeights in_;
  LinearWeights out_;
  std::vector<float> conv_;         // [channels, width]
  std::vector<float> conv_bias_;    // [channels], or empty
  std::vector<float> step_bias_;    // [heads]
  std::vector<float> decay_rates_;  // [heads], negative
  std::vector<float> norm_;         // [norm_size]
};

// A part of rows of `row_stride` floats, [n, heads, dim].
Result<TensorView> PartOfRows(float* data, int64_t row_count, int64_t row_stride, int64_t heads,
                              int64_t dim);

// Exact where e^x would leave float32's range.
float Softplus(float x);
float Silu(float x);

}  // namespace quire

#endif  // QUIRE_MODEL_LAYERS_RECURRENT_MIXER_H_
