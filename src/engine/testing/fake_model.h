// Test only: a model of two attention layers, and two recurrent ones before them if asked for, with
// weights made by a hash. Its logits depend on the last token and, through the caches, on every
// token before it, so KV that is lost, stale or of a neighbour changes the answer.
#ifndef QUIRE_ENGINE_TESTING_FAKE_MODEL_H_
#define QUIRE_ENGINE_TESTING_FAKE_MODEL_H_

#include <functional>
#include <utility>
#include <vector>

#include "base/random.h"
#include "quire/model.h"

namespace quire {

class FakeModel final : public Model {
 public:
  static constexpr int64_t kVocabSize = 61;
  static constexpr int64_t kLayers = 2;
  static constexpr int64_t kDim = 4;  // of the one head

  // Models with different seeds have nothing in common.
  explicit FakeModel(uint64_t seed = 0, int64_t vocab_size = kVocabSize) : seed_(seed) {
    info_.architecture = "FakeModel";
    info_.vocab_size = vocab_size;
    info_.hidden_size = kDim;
    info_.max_position_embeddings = 4096;
    info_.weight_bytes = 1;
    info_.layers.assign(kLayers, {.num_qo_heads = 1,
                                  .num_kv_heads = 1,
                                  .qk_head_dim = kDim,
                                  .v_head_dim = kDim,
                                  .dtype = DType::kF32});
  }

  // Asked at the beginning of each forward.
  std::function<Status(std::span<const int32_t> token_ids)> fault;
  // May change the logits of a row.
  std::function<void(int32_t token_id, int32_t position, std::span<float> logits)> edit;

  void AddRecurrentLayers() {
    info_.recurrent_layers = {
        {.num_heads = 1, .num_key_heads = 1, .key_dim = kDim, .value_dim = kDim},
        {.kind = RecurrentLayerKind::kConvolution, .num_channels = kDim, .width = 3}};
  }
  ModelInfo& mutable_info() { return info_; }
  const ModelInfo& info() const override { return info_; }

  Status Forward(const ModelState& state, std::span<const int32_t> token_ids,
                 std::span<const int64_t> logit_rows, float* logits) override {
    AttentionKVCache& cache = *state.attention;
    if (fault) QUIRE_RETURN_IF_ERROR(fault(token_ids));
    QUIRE_ASSIGN_OR_RETURN(const std::span<const int32_t> positions, cache.GetQueryPositions());
    const auto n = static_cast<int64_t>(token_ids.size());
    std::vector<float> hidden(n * kDim);
    std::vector<float> qkv(n * 3 * kDim);
    std::vector<float> o(n * kDim);
    for (int64_t i = 0; i < n * kDim; ++i) hidden[i] = Weight(0, token_ids[i / kDim], i % kDim);
    if (!info_.recurrent_layers.empty())
      QUIRE_RETURN_IF_ERROR(RunRecurrent(*state.recurrent, n, &hidden));
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      for (int64_t i = 0; i < n * 3 * kDim; ++i) {
        const int64_t row = i / (3 * kDim);
        qkv[i] = 2 * hidden[row * kDim + i % kDim] +
                 Weight(1 + layer, positions[row] % 64, i % (3 * kDim));
      }
      QUIRE_RETURN_IF_ERROR(
          cache.AttentionWithFusedQKV(layer, TensorView(qkv.data(), DType::kF32, {n, 3, kDim}),
                                      TensorView(o.data(), DType::kF32, {n, 1, kDim}), 1.0));
      for (int64_t i = 0; i < n * kDim; ++i) hidden[i] = hidden[i] + o[i];
    }
    const int64_t vocab_size = info_.vocab_size;
    for (const int64_t row : logit_rows) {
      for (int64_t token = 0; token < vocab_size; ++token) {
        float sum = 0;
        for (int64_t d = 0; d < kDim; ++d) sum += hidden[row * kDim + d] * Weight(9, token, d);
        logits[token] = sum;
      }
      if (edit) edit(token_ids[row], positions[row], {logits, static_cast<size_t>(vocab_size)});
      logits += vocab_size;
    }
    return {};
  }

 private:
  // Adds the outputs of both layers.
  Status RunRecurrent(RecurrentCache& cache, int64_t n, std::vector<float>* hidden) const {
    std::vector<float> o(hidden->size());
    const std::vector<float> half(static_cast<size_t>(n), 0.5F);
    std::vector<float> weight(3 * kDim);
    for (size_t i = 0; i < weight.size(); ++i) weight[i] = Weight(20, 0, static_cast<int64_t>(i));
    const TensorView x(hidden->data(), DType::kF32, {n, 1, kDim});
    const TensorView y(o.data(), DType::kF32, {n, 1, kDim});
    QUIRE_RETURN_IF_ERROR(cache.LinearAttention(
        0, x, x, x, TensorView(half.data(), DType::kF32, {n, int64_t{1}}), y, 1.0));
    for (size_t i = 0; i < o.size(); ++i) (*hidden)[i] += o[i];
    QUIRE_RETURN_IF_ERROR(cache.Convolution(1, TensorView(hidden->data(), DType::kF32, {n, kDim}),
                                            TensorView(weight.data(), DType::kF32, {kDim, 3}),
                                            nullptr, true,
                                            TensorView(o.data(), DType::kF32, {n, kDim})));
    for (size_t i = 0; i < o.size(); ++i) (*hidden)[i] += o[i];
    return {};
  }

  // In [-1, 1).
  float Weight(int64_t matrix, int64_t row, int64_t column) const {
    return static_cast<float>(2 * RandomUniform(7 + 100 * seed_ + matrix, row, column) - 1);
  }

  uint64_t seed_;
  ModelInfo info_;
};

}  // namespace quire

#endif  // QUIRE_ENGINE_TESTING_FAKE_MODEL_H_
