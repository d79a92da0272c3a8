// A mixture of experts: a router chooses a few of many gated MLPs for each token; one more may be
// for all tokens, with or without a gate of its own.
#ifndef QUIRE_MODEL_LAYERS_SPARSE_MLP_H_
#define QUIRE_MODEL_LAYERS_SPARSE_MLP_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "model/config/expert_config.h"
#include "model/layers/expert_router.h"
#include "model/layers/gated_mlp.h"
#include "model/layers/mixer.h"
#include "model/weights/weights.h"
#include "quire/status.h"

namespace quire {

// Exact: what a token gets depends on its row alone. Its experts' outputs are added by ascending
// expert, whichever other tokens go to them.
class SparseMlp final : public Mlp {
 public:
  // Tensors under `prefix`, as transformers names them. `expert`: the shape of one.
  static Result<std::unique_ptr<Mlp>> Load(WeightLoader& loader, const std::string& prefix,
                                           const GatedMlpShape& expert, const ExpertConfig& config);

  int64_t row_floats() const override;
  size_t ScratchBytes(const RowOps& ops, int64_t row_count) const override;
  void Run(const MixerRun& run) const override;

 private:
  // The parts of a run's floats.
  struct Buffers;

  int64_t expert_floats() const;
  Status LoadShared(WeightLoader& loader, const std::string& prefix, const GatedMlpShape& expert);
  Buffers Divide(const MixerRun& run) const;
  void AddExpert(int64_t expert, const MixerRun& run, const Buffers& b) const;
  void RunShared(const MixerRun& run, const Buffers& b) const;
  void Finish(const MixerRun& run, const Buffers& b) const;

  int64_t hidden_size_ = 0;
  ExpertConfig config_;
  ExpertRouter router_;
  std::vector<GatedMlp> experts_;
  std::optional<GatedMlp> shared_;
  std::optional<LinearWeights> shared_gate_;  // [1, hidden_size]
};

}  // namespace quire

#endif  // QUIRE_MODEL_LAYERS_SPARSE_MLP_H_
