// Mamba-2's mixer (Dao and Gu 2024).
#ifndef QUIRE_MODEL_LAYERS_STATE_SPACE_MIXER_H_
#define QUIRE_MODEL_LAYERS_STATE_SPACE_MIXER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "model/config/model_config.h"
#include "model/config/recurrent_config.h"
#include "model/layers/recurrent_mixer.h"

namespace quire {

class StateSpaceMixer final : public RecurrentMixer {
 public:
  // `layer`: the first of its layers in the recurrent cache.
  static Result<std::unique_ptr<Mixer>> Load(WeightLoader& loader, const std::string& prefix,
                                             const ModelConfig& config, int64_t layer);
  static std::vector<RecurrentLayerSpec> Layers(const StateSpaceConfig& config);

  int64_t row_floats() const override;
  Status Run(const ModelState& state, const MixerRun& run) const override;

 private:
  struct Buffers;
  Buffers Divide(const MixerRun& run) const;
  void Prepare(const MixerRun& run, const Buffers& b) const;
  void GateAndNorm(const MixerRun& run, const Buffers& b) const;

  StateSpaceConfig config_;
  std::vector<float> skip_;  // [heads]
};

}  // namespace quire

#endif  // QUIRE_MODEL_LAYERS_STATE_SPACE_MIXER_H_
