// Which mixer and which MLP a layer has: the one place that knows all kinds.
#ifndef QUIRE_MODEL_LAYERS_LAYER_TYPES_H_
#define QUIRE_MODEL_LAYERS_LAYER_TYPES_H_

#include <cstdint>
#include <memory>
#include <string>

#include "kv/plan/rope_table.h"
#include "model/config/architecture.h"
#include "model/config/model_config.h"
#include "model/layers/mixer.h"
#include "model/weights/weights.h"
#include "quire/model.h"
#include "quire/status.h"
#include "quire/tensor.h"

namespace quire {

// What layers are made from.
struct LayerInputs {
  WeightLoader& loader;
  const ModelConfig& config;
  const Architecture& architecture;
  DType dtype;                        // of keys and values, see ModelInfo::layers
  std::shared_ptr<RopeTable> angles;  // for mixers that rotate by themselves; null: the caches do
};

// LayerInputs::angles of the model.
Result<std::shared_ptr<RopeTable>> AnglesOfMixers(const ModelConfig& config);

// "model.layers.3."
std::string LayerPrefix(const LayerInputs& inputs, int64_t index);

// What the mixer keeps in the caches goes after the layers that `info` already has.
Result<std::unique_ptr<Mixer>> LoadMixer(const LayerInputs& inputs, int64_t index, ModelInfo* info);

// REQUIRES: the architecture has MLPs.
Result<std::unique_ptr<Mlp>> LoadMlp(const LayerInputs& inputs, int64_t index);

}  // namespace quire

#endif  // QUIRE_MODEL_LAYERS_LAYER_TYPES_H_
