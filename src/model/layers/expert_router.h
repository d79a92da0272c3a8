// Which experts a token goes to, and with which weights.
#ifndef QUIRE_MODEL_LAYERS_EXPERT_ROUTER_H_
#define QUIRE_MODEL_LAYERS_EXPERT_ROUTER_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "model/config/expert_config.h"
#include "model/layers/row_ops.h"
#include "model/weights/weights.h"
#include "quire/status.h"

namespace quire {

class ExpertRouter {
 public:
  // The tensors `prefix`gate.weight and, with a choice bias, `prefix`gate.e_score_correction_bias.
  static Result<ExpertRouter> Load(WeightLoader& loader, const std::string& prefix,
                                   int64_t hidden_size, const ExpertConfig& config);

  size_t ScratchBytes(const RowOps& ops, int64_t row_count) const {
    return ops.ScratchBytes(gate_, row_count);
  }
  // weights: [n, count], 0 for experts that are not chosen.
  void Route(const RowOps& ops, const float* x, int64_t row_count, float* weights,
             void* scratch) const;

 private:
  float ForChoice(const float* row, int64_t expert) const;
  void ToScores(float* row) const;
  float GroupScore(const float* row, int64_t group) const;
  uint64_t ChooseGroups(const float* row) const;
  int64_t BestExpert(const float* row, uint64_t groups) const;
  void Choose(float* row) const;

  ExpertConfig config_;
  LinearWeights gate_;
  std::vector<float> choice_bias_;  // [count], or empty
};

}  // namespace quire

#endif  // QUIRE_MODEL_LAYERS_EXPERT_ROUTER_H_
