// A mixture of experts: a router chooses a few of many gated MLPs for each token; one more, behind
// a gate of its own, is for all tokens.
#ifndef QUIRE_MODEL_SPARSE_MLP_H_
#define QUIRE_MODEL_SPARSE_MLP_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "model/recurrent_config.h"
#include "model/row_ops.h"
#include "model/weights.h"
#include "quire/status.h"

namespace quire {

// Exact: what a token gets depends on its row alone. Its experts' outputs are added by ascending
// expert, whichever other tokens go to them.
class SparseMlp {
 public:
  // Tensors under `prefix`, as Qwen3-Next names them.
  static Result<SparseMlp> Load(WeightLoader& loader, const std::string& prefix,
                                int64_t hidden_size, const ExpertConfig& config);

  // Floats of scratch for a token, and bytes for the products of so many tokens.
  static int64_t RowFloats(int64_t hidden_size, const ExpertConfig& config);
  size_t ScratchBytes(const RowOps& ops, int64_t row_count) const;

  // hidden += the layer's output for `x`. `floats`: RowFloats for each row.
  void Add(const RowOps& ops, const float* x, int64_t row_count, float* floats, void* scratch,
           float* hidden) const;

 private:
  struct Expert {
    LinearWeights gate_up;
    LinearWeights down;
  };
  // The parts of `floats`.
  struct Buffers;

  static Result<Expert> LoadExpert(WeightLoader& loader, const std::string& prefix,
                                   int64_t hidden_size, int64_t intermediate_size);
  Buffers Divide(float* floats, int64_t row_count) const;
  void Route(const RowOps& ops, const float* x, int64_t row_count, const Buffers& b,
             void* scratch) const;
  void AddExpert(const RowOps& ops, int64_t expert, const float* x, int64_t row_count,
                 const Buffers& b, void* scratch) const;
  void AddShared(const RowOps& ops, const float* x, int64_t row_count, const Buffers& b,
                 void* scratch, float* hidden) const;
  void Run(const RowOps& ops, const Expert& expert, const float* x, int64_t row_count,
           const Buffers& b, void* scratch) const;

  int64_t hidden_size_ = 0;
  ExpertConfig config_;
  LinearWeights router_;
  std::vector<Expert> experts_;
  Expert shared_;
  LinearWeights shared_gate_;
};

}  // namespace quire

#endif  // QUIRE_MODEL_SPARSE_MLP_H_
