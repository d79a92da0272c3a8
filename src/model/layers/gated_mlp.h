// down(activation(gate(x)) * up(x)): the MLP of a layer, and one expert of many.
#ifndef QUIRE_MODEL_LAYERS_GATED_MLP_H_
#define QUIRE_MODEL_LAYERS_GATED_MLP_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "kernels/activation.h"
#include "model/config/architecture.h"
#include "model/layers/mixer.h"
#include "model/weights/weights.h"
#include "quire/status.h"

namespace quire {

struct GatedMlpShape {
  int64_t hidden_size;
  int64_t intermediate_size;
  bool has_bias = false;
  bool fused = false;  // the checkpoint has gate and up as one matrix
  Activation activation = Activation::kSilu;
  MlpNames names = {};
};

class GatedMlp final : public Mlp {
 public:
  // The tensors of shape.names behind `prefix`, or gate_up_proj in place of gate and up.
  static Result<GatedMlp> Load(WeightLoader& loader, const std::string& prefix,
                               const GatedMlpShape& shape);

  int64_t row_floats() const override { return 3 * down_.packed().k; }
  size_t ScratchBytes(const RowOps& ops, int64_t row_count) const override;
  void Run(const MixerRun& run) const override;

 private:
  Activation activation_ = Activation::kSilu;
  LinearWeights gate_up_;  // [2 intermediate_size, hidden_size]
  LinearWeights down_;     // [hidden_size, intermediate_size]
};

}  // namespace quire

#endif  // QUIRE_MODEL_LAYERS_GATED_MLP_H_
