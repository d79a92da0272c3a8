#include "model/layers/gated_mlp.h"

#include <algorithm>
#include <string_view>
#include <vector>

namespace quire {

Result<GatedMlp> GatedMlp::Load(WeightLoader& loader, const std::string& prefix,
                                const GatedMlpShape& shape) {
  GatedMlp mlp;
  mlp.activation_ = shape.activation;
  const auto name = [&](std::string_view part) { return prefix + std::string(part); };
  std::vector<LinearPart> parts = {{name(shape.names.gate), shape.intermediate_size},
                                   {name(shape.names.up), shape.intermediate_size}};
  if (shape.fused) parts = {{prefix + "gate_up_proj", 2 * shape.intermediate_size}};
  QUIRE_ASSIGN_OR_RETURN(mlp.gate_up_, loader.Linear(parts, shape.hidden_size, shape.has_bias));
  QUIRE_ASSIGN_OR_RETURN(mlp.down_, loader.Linear({{name(shape.names.down), shape.hidden_size}},
                                                  shape.intermediate_size, shape.has_bias));
  return mlp;
}

size_t GatedMlp::ScratchBytes(const RowOps& ops, int64_t row_count) const {
  return std::max(ops.ScratchBytes(gate_up_, row_count), ops.ScratchBytes(down_, row_count));
}

void GatedMlp::Run(const MixerRun& run) const {
  const int64_t width = down_.packed().k;
  RowBuffers buffers(run);
  float* const gate_up = buffers.Take(2 * width);
  float* const activated = buffers.Take(width);
  run.ops.Multiply(gate_up_, run.x, run.row_count, gate_up, false, run.scratch);
  run.ops.backend().gated_mul(activation_, gate_up, run.row_count, width, activated,
                              run.ops.runner());
  run.ops.Multiply(down_, activated, run.row_count, run.y, run.accumulate, run.scratch);
}

}  // namespace quire
