#include "model/layers/sparse_mlp.h"

#include <algorithm>
#include <utility>

namespace quire {

struct SparseMlp::Buffers {
  float* sum;       // [n, hidden_size]: of the chosen experts
  float* gathered;  // [n, hidden_size]: the tokens of one expert; then [n], the shared one's gate
  float* output;    // [n, hidden_size]: what an expert makes of them
  float* floats;    // of an expert
  float* weights;   // [n, count]: of the expert for the token, 0: not chosen
};

Result<std::unique_ptr<Mlp>> SparseMlp::Load(WeightLoader& loader, const std::string& prefix,
                                             const GatedMlpShape& expert,
                                             const ExpertConfig& config) {
  auto mlp = std::make_unique<SparseMlp>();
  mlp->hidden_size_ = expert.hidden_size;
  mlp->config_ = config;
  QUIRE_ASSIGN_OR_RETURN(mlp->router_,
                         ExpertRouter::Load(loader, prefix, expert.hidden_size, config));
  for (int64_t e = 0; e < config.count; ++e) {
    const std::string name = prefix + "experts." + std::to_string(e) + ".";
    QUIRE_ASSIGN_OR_RETURN(GatedMlp loaded, GatedMlp::Load(loader, name, expert));
    mlp->experts_.push_back(std::move(loaded));
  }
  QUIRE_RETURN_IF_ERROR(mlp->LoadShared(loader, prefix, expert));
  return std::unique_ptr<Mlp>(std::move(mlp));
}

Status SparseMlp::LoadShared(WeightLoader& loader, const std::string& prefix,
                             const GatedMlpShape& expert) {
  if (config_.shared_intermediate_size == 0) return Status();
  const std::string name = prefix + std::string(config_.shared_name);
  GatedMlpShape shape = expert;
  shape.intermediate_size = config_.shared_intermediate_size;
  shape.has_bias = config_.has_shared_bias;
  QUIRE_ASSIGN_OR_RETURN(shared_, GatedMlp::Load(loader, name + ".", shape));
  if (!config_.has_shared_gate) return Status();
  QUIRE_ASSIGN_OR_RETURN(shared_gate_, loader.Linear({{name + "_gate", 1}}, hidden_size_, false));
  return Status();
}

int64_t SparseMlp::expert_floats() const {
  const int64_t expert = experts_.front().row_floats();  // all have the same shape
  return shared_ ? std::max(expert, shared_->row_floats()) : expert;
}

int64_t SparseMlp::row_floats() const { return config_.count + 3 * hidden_size_ + expert_floats(); }

size_t SparseMlp::ScratchBytes(const RowOps& ops, int64_t row_count) const {
  // An expert gets any number of the rows.
  size_t bytes =
      std::max(router_.ScratchBytes(ops, row_count), experts_.front().ScratchBytes(ops, row_count));
  if (shared_) bytes = std::max(bytes, shared_->ScratchBytes(ops, row_count));
  if (shared_gate_) bytes = std::max(bytes, ops.ScratchBytes(*shared_gate_, row_count));
  return bytes;
}

SparseMlp::Buffers SparseMlp::Divide(const MixerRun& run) const {
  RowBuffers buffers(run);
  Buffers b;
  b.sum = buffers.Take(hidden_size_);
  b.gathered = buffers.Take(hidden_size_);
  b.output = buffers.Take(hidden_size_);
  b.floats = buffers.Take(expert_floats());
  b.weights = buffers.Take(config_.count);
  return b;
}

void SparseMlp::AddExpert(int64_t expert, const MixerRun& run, const Buffers& b) const {
  const auto weight_of = [&](int64_t row) { return b.weights[row * config_.count + expert]; };
  int64_t count = 0;
  for (int64_t row = 0; row < run.row_count; ++row) {
    if (weight_of(row) == 0) continue;
    CopyFloats(run.x + row * hidden_size_, hidden_size_, b.gathered + count++ * hidden_size_);
  }
  if (count == 0) return;
  experts_[static_cast<size_t>(expert)].Run({.ops = run.ops,
                                             .row_count = count,
                                             .x = b.gathered,
                                             .floats = b.floats,
                                             .scratch = run.scratch,
                                             .y = b.output,
                                             .accumulate = false});
  const float* from = b.output;
  for (int64_t row = 0; row < run.row_count; ++row) {
    const float weight = weight_of(row);
    if (weight == 0) continue;
    float* const to = b.sum + row * hidden_size_;
    for (int64_t i = 0; i < hidden_size_; ++i) to[i] += weight * from[i];
    from += hidden_size_;
  }
}

void SparseMlp::RunShared(const MixerRun& run, const Buffers& b) const {
  if (shared_gate_) {
    run.ops.Multiply(*shared_gate_, run.x, run.row_count, b.gathered, false, run.scratch);
  }
  shared_->Run({.ops = run.ops,
                .row_count = run.row_count,
                .x = run.x,
                .floats = b.floats,
                .scratch = run.scratch,
                .y = b.output,
                .accumulate = false});
}

// Experts and the shared one together.
void SparseMlp::Finish(const MixerRun& run, const Buffers& b) const {
  run.ops.runner().ParallelFor(run.row_count, [&](int64_t row, int) {
    const float factor = shared_gate_ ? Sigmoid(b.gathered[row]) : 1.0F;
    for (int64_t i = row * hidden_size_; i < (row + 1) * hidden_size_; ++i) {
      const float value = shared_ ? b.sum[i] + factor * b.output[i] : b.sum[i];
      run.y[i] = run.accumulate ? run.y[i] + value : value;
    }
  });
}

void SparseMlp::Run(const MixerRun& run) const {
  const Buffers b = Divide(run);
  router_.Route(run.ops, run.x, run.row_count, b.weights, run.scratch);
  std::fill_n(b.sum, run.row_count * hidden_size_, 0.0F);
  for (int64_t e = 0; e < config_.count; ++e) AddExpert(e, run, b);
  if (shared_) RunShared(run, b);
  Finish(run, b);
}

}  // namespace quire
