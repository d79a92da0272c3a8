// RMS norms over the query and key heads of attention, before they are rotated (Qwen3, Gemma 3).
#ifndef QUIRE_MODEL_LAYERS_HEAD_NORMS_H_
#define QUIRE_MODEL_LAYERS_HEAD_NORMS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "model/config/architecture.h"
#include "model/config/model_config.h"
#include "model/layers/row_ops.h"
#include "model/weights/weights.h"
#include "quire/status.h"

namespace quire {

class HeadNorms {
 public:
  static Result<HeadNorms> Load(WeightLoader& loader, const std::string& prefix,
                                const ModelConfig& config, const Architecture& architecture);

  // In place; qkv: [n, Hq + 2 Hkv, D].
  void Run(const RowOps& ops, int64_t row_count, float* qkv) const;

 private:
  int64_t query_heads_ = 0;
  int64_t key_heads_ = 0;
  int64_t head_dim_ = 0;
  float offset_ = 0;  // of the weights
  float eps_ = 0;
  std::vector<float> q_;  // [head_dim]
  std::vector<float> k_;  // [head_dim]
};

}  // namespace quire

#endif  // QUIRE_MODEL_LAYERS_HEAD_NORMS_H_
