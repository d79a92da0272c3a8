// For the tests of the cache: token inputs that are a function of the token, and forwards made of
// them.
#ifndef QUIRE_KV_TESTING_KV_TEST_FORWARD_H_
#define QUIRE_KV_TESTING_KV_TEST_FORWARD_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "quire/attention_kv_cache.h"

namespace quire {

// A tensor that owns its memory, filled with bytes 0xFF (NaN in every float format) at first.
class TestTensor {
 public:
  TestTensor() = default;
  TestTensor(DType dtype, std::vector<int64_t> shape);

  const TensorView& view() const { return view_; }
  int64_t count() const { return data_ == nullptr ? 0 : view_.element_count(); }
  float Get(int64_t i) const;
  void Set(int64_t i, float value);
  std::span<const std::byte> bytes() const { return {data_.get(), size_}; }
  // The bytes of rows [first, first + count) of the first axis.
  std::span<const std::byte> rows(int64_t first, int64_t count) const;

 private:
  std::shared_ptr<std::byte[]> data_;
  size_t size_ = 0;
  TensorView view_;
};

// Stored tokens of a layer, as ExportKV gives them.
struct StoredRows {
  StoredRows() = default;
  StoredRows(const AttentionLayerSpec& spec, int64_t count);
  LayerKV view() const { return {k.view(), v.view(), k_scale.view(), v_scale.view()}; }
  // Element `i` of the keys as a number: codes times their scale.
  float Key(int64_t i) const;
  bool operator==(const StoredRows& other) const;  // bit for bit

  TestTensor k, v;
  TestTensor k_scale, v_scale;  // empty where there are none
};

// Runs everything on the calling thread.
class SerialRunner final : public ParallelRunner {
 public:
  int worker_count() const noexcept override { return 1; }
  void Run(int64_t count, Task task, void* context) noexcept override {
    for (int64_t i = 0; i < count; ++i) task(context, i, 0);
  }
};

struct TestCacheSizes {
  int64_t max_num_sequences = 8;
  int64_t token_capacity = 400;
  int64_t prefill_chunk_size = 64;
  int64_t page_size = 4;
  RopeMode rope = RopeMode::kNormal;
};
// Options of a cache on the calling thread, whose freed pages and fresh scratch are NaN.
AttentionKVCacheOptions TestCacheOptions(std::vector<AttentionLayerSpec> layers,
                                         const TestCacheSizes& sizes);

// Fails the test if the options are refused.
std::unique_ptr<AttentionKVCache> MakeTestCache(AttentionKVCacheOptions options);

// What a model would feed the cache: q, k and v of a token and layer are fixed by the token's
// number.
struct TokenInputs {
  TestTensor qkv;      // [n, (Hq + Hkv) D + Hkv Dv]
  TestTensor q, k, v;  // the same numbers, [n, heads, dim]
  // The keys as AppendMLAKV takes them, [n, D]; of latent layers, with one kv head.
  TensorView kv() const;
};
// The number of a token in a cache that has one half (0 or 1) of the heads of some layers (bit l:
// layer l, below 8): its inputs in these are the half's part of the whole token's.
// REQUIRES: number < 2^48.
uint64_t HalfToken(uint64_t number, uint32_t halved_layers, int64_t half);
// The whole token's.
uint64_t WholeToken(uint64_t number);
// The number of a token that holds one number that is not finite in a head of its values or, less
// often, of its keys, in every layer. REQUIRES: number < 2^46.
uint64_t BadToken(uint64_t number);
TokenInputs MakeTokenInputs(const AttentionLayerSpec& spec, int64_t layer, DType dtype,
                            std::span<const uint64_t> tokens);

// One forward's outputs of one layer, in the order of the batch's rows.
struct LayerOutputs {
  TestTensor o;    // [n, Hq, Dv]
  TestTensor lse;  // [n, Hq]; empty after a fused call
};

enum class CallStyle : uint8_t { kFused, kHalves };

// Gives blocks that the test holds, which are all there when it is made. Allocates nothing later.
class BlockSource final : public LayerSource {
 public:
  explicit BlockSource(std::span<const KVBlock> blocks);
  // Asked before a layer is given; its error is the answer. Null: nothing happens.
  std::function<Status(int64_t layer)> arrive;

  Result<std::span<const LayerKV>> Load(int64_t layer) override;

 private:
  std::vector<std::vector<LayerKV>> layers_;  // [layer][block]
};

struct ForwardStyle {
  CallStyle calls = CallStyle::kFused;
  DType input_dtype = DType::kF32;
  DType output_dtype = DType::kF32;
};

// 1 / sqrt(D), as models use it.
double ScoreScale(const AttentionLayerSpec& spec);

// Append, or AppendMLAKV where the layer is latent.
Status AppendInputs(AttentionKVCache& cache, const AttentionLayerSpec& spec, int64_t layer,
                    const TokenInputs& inputs);
// The attention call or calls of one layer.
Status RunLayer(AttentionKVCache& cache, const AttentionLayerSpec& spec, int64_t layer,
                std::span<const uint64_t> tokens, const ForwardStyle& style, LayerOutputs* outputs);

// Runs all layers of a forward that has begun, and End. `rows`: its new tokens.
Result<std::vector<LayerOutputs>> FinishForward(AttentionKVCache& cache,
                                                std::span<const AttentionLayerSpec> layers,
                                                std::span<const uint64_t> rows,
                                                const ForwardStyle& style = {});

// Begin, all layers and End. tokens[i] are appended to ids[i]. Outputs are per layer.
Result<std::vector<LayerOutputs>> RunForward(AttentionKVCache& cache,
                                             std::span<const AttentionLayerSpec> layers,
                                             std::span<const int64_t> ids,
                                             const std::vector<std::vector<uint64_t>>& tokens,
                                             const ForwardStyle& style = {});

// `count` tokens that follow each other; those of two calls meet where their ranges do.
std::vector<uint64_t> NumberedTokens(int64_t start, int64_t count);

// A forward that appends the tokens to one sequence. A forward that fails fails the test, and there
// are no outputs.
std::vector<LayerOutputs> ExtendSequence(AttentionKVCache& cache, int64_t id,
                                         const std::vector<uint64_t>& tokens);

}  // namespace quire

#endif  // QUIRE_KV_TESTING_KV_TEST_FORWARD_H_
