#include "model/sparse_mlp.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

namespace quire {

struct SparseMlp::Buffers {
  float* weights;   // [n, count]: of the expert for the token, 0: not chosen
  float* sum;       // [n, hidden_size]
  float* gathered;  // [n, hidden_size]: the tokens of one expert
  float* output;    // [n, hidden_size]: what it makes of them
  float* wide;      // [n, 2 * the larger intermediate size]
  float* narrow;    // [n, the larger intermediate size]
};

namespace {

int64_t IntermediateMax(const ExpertConfig& config) {
  return std::max(config.intermediate_size, config.shared_intermediate_size);
}

// Logits of one token become the weights of its experts: the softmax over all, kept where it is
// largest (the lower index where equal).
void ChooseExperts(const ExpertConfig& config, float* row) {
  const float largest = *std::max_element(row, row + config.count);
  float total = 0;
  for (int64_t e = 0; e < config.count; ++e) {
    row[e] = std::exp(row[e] - largest);
    total += row[e];
  }
  for (int64_t e = 0; e < config.count; ++e) row[e] /= total;
  // What is chosen is marked by its sign: a weight is never below zero.
  float chosen = 0;
  for (int64_t i = 0; i < config.per_token; ++i) {
    float* const best = std::max_element(row, row + config.count);
    chosen += *best;
    *best = -*best;
  }
  const float divisor = config.normalises ? chosen : 1.0F;
  for (int64_t e = 0; e < config.count; ++e) row[e] = row[e] < 0 ? -row[e] / divisor : 0.0F;
}

}  // namespace

Result<SparseMlp::Expert> SparseMlp::LoadExpert(WeightLoader& loader, const std::string& prefix,
                                                int64_t hidden_size, int64_t intermediate_size) {
  Expert expert;
  QUIRE_ASSIGN_OR_RETURN(expert.gate_up, loader.Linear({{prefix + "gate_proj", intermediate_size},
                                                        {prefix + "up_proj", intermediate_size}},
                                                       hidden_size, false));
  QUIRE_ASSIGN_OR_RETURN(
      expert.down, loader.Linear({{prefix + "down_proj", hidden_size}}, intermediate_size, false));
  return expert;
}

Result<SparseMlp> SparseMlp::Load(WeightLoader& loader, const std::string& prefix,
                                  int64_t hidden_size, const ExpertConfig& config) {
  SparseMlp mlp;
  mlp.hidden_size_ = hidden_size;
  mlp.config_ = config;
  QUIRE_ASSIGN_OR_RETURN(mlp.router_,
                         loader.Linear({{prefix + "gate", config.count}}, hidden_size, false));
  for (int64_t e = 0; e < config.count; ++e) {
    QUIRE_ASSIGN_OR_RETURN(Expert expert,
                           LoadExpert(loader, prefix + "experts." + std::to_string(e) + ".",
                                      hidden_size, config.intermediate_size));
    mlp.experts_.push_back(std::move(expert));
  }
  QUIRE_ASSIGN_OR_RETURN(mlp.shared_, LoadExpert(loader, prefix + "shared_expert.", hidden_size,
                                                 config.shared_intermediate_size));
  QUIRE_ASSIGN_OR_RETURN(mlp.shared_gate_,
                         loader.Linear({{prefix + "shared_expert_gate", 1}}, hidden_size, false));
  return mlp;
}

int64_t SparseMlp::RowFloats(int64_t hidden_size, const ExpertConfig& config) {
  return config.count + 3 * hidden_size + 3 * IntermediateMax(config);
}

size_t SparseMlp::ScratchBytes(const RowOps& ops, int64_t row_count) const {
  size_t bytes = std::max(
      {ops.ScratchBytes(router_, row_count), ops.ScratchBytes(shared_.gate_up, row_count),
       ops.ScratchBytes(shared_.down, row_count), ops.ScratchBytes(shared_gate_, row_count)});
  const Expert& expert = experts_.front();  // all have the same shapes
  // An expert gets any number of the rows.
  return std::max({bytes, ops.ScratchBytes(expert.gate_up, row_count),
                   ops.ScratchBytes(expert.down, row_count)});
}

SparseMlp::Buffers SparseMlp::Divide(float* floats, int64_t row_count) const {
  Buffers b;
  const auto take = [&](int64_t width) {
    return std::exchange(floats, floats + row_count * width);
  };
  b.sum = take(hidden_size_);
  b.gathered = take(hidden_size_);
  b.output = take(hidden_size_);
  b.wide = take(2 * IntermediateMax(config_));
  b.narrow = take(IntermediateMax(config_));
  b.weights = take(config_.count);
  return b;
}

void SparseMlp::Route(const RowOps& ops, const float* x, int64_t row_count, const Buffers& b,
                      void* scratch) const {
  ops.Multiply(router_, x, row_count, b.weights, false, scratch);
  ops.runner().ParallelFor(row_count, [&](int64_t row, int) {
    ChooseExperts(config_, b.weights + row * config_.count);
  });
}

void SparseMlp::Run(const RowOps& ops, const Expert& expert, const float* x, int64_t row_count,
                    const Buffers& b, void* scratch) const {
  ops.Multiply(expert.gate_up, x, row_count, b.wide, false, scratch);
  ops.GatedActivation(b.wide, row_count, expert.down.packed().k, b.narrow);
  ops.Multiply(expert.down, b.narrow, row_count, b.output, false, scratch);
}

void SparseMlp::AddExpert(const RowOps& ops, int64_t expert, const float* x, int64_t row_count,
                          const Buffers& b, void* scratch) const {
  const auto weight_of = [&](int64_t row) { return b.weights[row * config_.count + expert]; };
  int64_t count = 0;
  for (int64_t row = 0; row < row_count; ++row) {
    if (weight_of(row) == 0) continue;
    std::memcpy(b.gathered + count++ * hidden_size_, x + row * hidden_size_,
                static_cast<size_t>(hidden_size_) * sizeof(float));
  }
  if (count == 0) return;
  Run(ops, experts_[static_cast<size_t>(expert)], b.gathered, count, b, scratch);
  const float* from = b.output;
  for (int64_t row = 0; row < row_count; ++row) {
    const float weight = weight_of(row);
    if (weight == 0) continue;
    float* const to = b.sum + row * hidden_size_;
    for (int64_t i = 0; i < hidden_size_; ++i) to[i] += weight * from[i];
    from += hidden_size_;
  }
}

void SparseMlp::AddShared(const RowOps& ops, const float* x, int64_t row_count, const Buffers& b,
                          void* scratch, float* hidden) const {
  float* const gate = b.gathered;
  ops.Multiply(shared_gate_, x, row_count, gate, false, scratch);
  Run(ops, shared_, x, row_count, b, scratch);
  ops.runner().ParallelFor(row_count, [&](int64_t row, int) {
    const float factor = Sigmoid(gate[row]);
    for (int64_t i = row * hidden_size_; i < (row + 1) * hidden_size_; ++i) {
      hidden[i] += b.sum[i] + factor * b.output[i];
    }
  });
}

void SparseMlp::Add(const RowOps& ops, const float* x, int64_t row_count, float* floats,
                    void* scratch, float* hidden) const {
  const Buffers b = Divide(floats, row_count);
  Route(ops, x, row_count, b, scratch);
  std::fill_n(b.sum, row_count * hidden_size_, 0.0F);
  for (int64_t e = 0; e < config_.count; ++e) AddExpert(ops, e, x, row_count, b, scratch);
  AddShared(ops, x, row_count, b, scratch, hidden);
}

}  // namespace quire
