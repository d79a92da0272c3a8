// The gated delta rule (Yang, Kautz and Hatamizadeh 2024) as in Qwen3-Next.
#ifndef QUIRE_MODEL_LAYERS_GATED_DELTA_MIXER_H_
#define QUIRE_MODEL_LAYERS_GATED_DELTA_MIXER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "model/config/model_config.h"
#include "model/config/recurrent_config.h"
#include "model/layers/recurrent_mixer.h"

namespace quire {

class GatedDeltaMixer final : public RecurrentMixer {
 public:
  // `layer`: the first of its layers in the recurrent cache.
  static Result<std::unique_ptr<Mixer>> Load(WeightLoader& loader, const std::string& prefix,
                                             const ModelConfig& config, int64_t layer);
  static std::vector<RecurrentLayerSpec> Layers(const GatedDeltaConfig& config);

  int64_t row_floats() const override;
  Status Run(const ModelState& state, const MixerRun& run) const override;

 private:
  struct Buffers;
  Buffers Divide(const MixerRun& run) const;
  void Prepare(const MixerRun& run, const Buffers& b) const;
  Status ComputeRule(const ModelState& state, const MixerRun& run, const Buffers& b) const;
  void NormAndGate(const MixerRun& run, const Buffers& b) const;

  GatedDeltaConfig config_;
};

}  // namespace quire

#endif  // QUIRE_MODEL_LAYERS_GATED_DELTA_MIXER_H_
