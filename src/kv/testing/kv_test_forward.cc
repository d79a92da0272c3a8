#include "kv/testing/kv_test_forward.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "base/float_environment.h"
#include "base/random.h"
#include "tensor/float8.h"
#include "tensor/half.h"

namespace quire {
namespace {

// Numbers are looked up in a table, as drawing each would cost more than the cache's own work. The
// size is prime, so that tokens that begin at different places differ everywhere.
constexpr size_t kTableSize = 8191;

const std::vector<float>& NumberTable() {
  static const std::vector<float> table = [] {
    std::vector<float> numbers(kTableSize);
    RandomSequence random(20240917);
    for (float& x : numbers) x = static_cast<float>(random.Uniform(-2, 2));
    return numbers;
  }();
  return table;
}

size_t TableStart(uint64_t token, int64_t layer) {
  return RandomBits(WholeToken(token), static_cast<uint64_t>(layer), 0) % kTableSize;
}

constexpr int kBadShift = 46;
constexpr int kHalvedLayersShift = 48;
constexpr int kHalfShift = 56;

bool IsHalved(uint64_t token, int64_t layer) {
  return layer < kHalfShift - kHalvedLayersShift &&
         (token >> (kHalvedLayersShift + layer) & 1) != 0;
}

// Where a bad token's number stands: head and dimension of the whole token's keys or values.
struct BadPlace {
  bool in_keys = false;
  int64_t head = 0;
  int64_t d = 0;
  float value = 0;
};

BadPlace PlaceOfBad(const AttentionLayerSpec& spec, int64_t whole_heads, uint64_t token,
                    int64_t layer) {
  RandomSequence random(WholeToken(token), static_cast<uint64_t>(layer));
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr float kValues[] = {std::numeric_limits<float>::quiet_NaN(), kInfinity, -kInfinity};
  BadPlace place;
  place.in_keys = spec.latent || random.Below(4) == 0;
  place.head = random.Below(whole_heads);
  place.d = random.Below(place.in_keys ? spec.qk_head_dim : spec.v_head_dim);
  place.value = kValues[random.Below(3)];
  return place;
}

// Puts it into row `row` of the inputs, if it is in their half of the heads.
void Spoil(const AttentionLayerSpec& spec, uint64_t token, int64_t layer, int64_t row,
           TokenInputs* inputs) {
  const bool halved = IsHalved(token, layer);
  const BadPlace place =
      PlaceOfBad(spec, halved ? 2 * spec.num_kv_heads : spec.num_kv_heads, token, layer);
  const auto half = static_cast<int64_t>(token >> kHalfShift & 1);
  const int64_t head = place.head - (halved ? half * spec.num_kv_heads : 0);
  if (head < 0 || head >= spec.num_kv_heads) return;
  TestTensor& part = place.in_keys ? inputs->k : inputs->v;
  const int64_t dim = place.in_keys ? spec.qk_head_dim : spec.v_head_dim;
  const int64_t column = head * dim + place.d;
  part.Set(row * spec.num_kv_heads * dim + column, place.value);
  const int64_t keys_at = spec.num_qo_heads * spec.qk_head_dim;
  const int64_t values_at = keys_at + spec.num_kv_heads * spec.qk_head_dim;
  inputs->qkv.Set(row * inputs->qkv.view().dim(1) + (place.in_keys ? keys_at : values_at) + column,
                  place.value);
}

}  // namespace

TestTensor::TestTensor(DType dtype, std::vector<int64_t> shape) {
  int64_t count = 1;
  for (const int64_t n : shape) count *= n;
  size_ = static_cast<size_t>(count * DTypeBytes(dtype));
  data_.reset(new std::byte[size_ == 0 ? 1 : size_]);
  std::memset(data_.get(), 0xFF, size_);
  view_ = TensorView(data_.get(), dtype, std::span<const int64_t>(shape));
}

float TestTensor::Get(int64_t i) const {
  if (view_.dtype() == DType::kF16) return F16ToF32(view_.data_as<uint16_t>()[i]);
  if (view_.dtype() == DType::kBF16) return Bf16ToF32(view_.data_as<uint16_t>()[i]);
  if (view_.dtype() == DType::kI8) return static_cast<float>(view_.data_as<int8_t>()[i]);
  if (view_.dtype() == DType::kF8E4M3) return F8E4M3ToF32(view_.data_as<uint8_t>()[i]);
  return view_.data_as<float>()[i];
}

void TestTensor::Set(int64_t i, float value) {
  if (view_.dtype() == DType::kF16) {
    view_.data_as<uint16_t>()[i] = F32ToF16(value);
  } else if (view_.dtype() == DType::kBF16) {
    view_.data_as<uint16_t>()[i] = F32ToBf16(value);
  } else {
    view_.data_as<float>()[i] = value;
  }
}

StoredRows::StoredRows(const AttentionLayerSpec& spec, int64_t count)
    : k(spec.dtype, {count, spec.num_kv_heads, spec.qk_head_dim}) {
  if (IsQuantised(spec.dtype)) k_scale = TestTensor(DType::kF32, {count, spec.num_kv_heads});
  if (spec.latent) return;
  v = TestTensor(spec.value_dtype(), {count, spec.num_kv_heads, spec.v_head_dim});
  if (IsQuantised(spec.value_dtype()))
    v_scale = TestTensor(DType::kF32, {count, spec.num_kv_heads});
}

float StoredRows::Key(int64_t i) const {
  return k_scale.count() == 0 ? k.Get(i) : k.Get(i) * k_scale.Get(i / k.view().dim(2));
}

bool StoredRows::operator==(const StoredRows& other) const {
  return std::ranges::equal(k.bytes(), other.k.bytes()) &&
         std::ranges::equal(v.bytes(), other.v.bytes()) &&
         std::ranges::equal(k_scale.bytes(), other.k_scale.bytes()) &&
         std::ranges::equal(v_scale.bytes(), other.v_scale.bytes());
}

std::span<const std::byte> TestTensor::rows(int64_t first, int64_t count) const {
  const size_t row_bytes = view_.dim(0) == 0 ? 0 : size_ / static_cast<size_t>(view_.dim(0));
  return bytes().subspan(static_cast<size_t>(first) * row_bytes,
                         static_cast<size_t>(count) * row_bytes);
}

uint64_t HalfToken(uint64_t number, uint32_t halved_layers, int64_t half) {
  return number | uint64_t{halved_layers} << kHalvedLayersShift |
         static_cast<uint64_t>(half) << kHalfShift;
}

uint64_t BadToken(uint64_t number) { return number | uint64_t{1} << kBadShift; }

uint64_t WholeToken(uint64_t number) { return number & ((uint64_t{1} << kHalvedLayersShift) - 1); }

TokenInputs MakeTokenInputs(const AttentionLayerSpec& spec, int64_t layer, DType dtype,
                            std::span<const uint64_t> tokens) {
  const int64_t n = static_cast<int64_t>(tokens.size());
  const int64_t q_size = spec.num_qo_heads * spec.qk_head_dim;
  const int64_t k_size = spec.num_kv_heads * spec.qk_head_dim;
  const int64_t v_size = spec.num_kv_heads * spec.v_head_dim;
  TokenInputs inputs;
  inputs.qkv = TestTensor(dtype, {n, q_size + k_size + v_size});
  inputs.q = TestTensor(dtype, {n, spec.num_qo_heads, spec.qk_head_dim});
  inputs.k = TestTensor(dtype, {n, spec.num_kv_heads, spec.qk_head_dim});
  inputs.v = TestTensor(dtype, {n, spec.num_kv_heads, spec.v_head_dim});
  const std::vector<float>& table = NumberTable();
  for (int64_t row = 0; row < n; ++row) {
    const uint64_t token = tokens[static_cast<size_t>(row)];
    const bool halved = IsHalved(token, layer);
    const size_t half = token >> kHalfShift & 1;
    size_t next = TableStart(token, layer);
    int64_t column = 0;
    const auto skip = [&](size_t count) { next = (next + count) % kTableSize; };
    const auto fill = [&](TestTensor& part, int64_t size) {
      if (halved) skip(half * static_cast<size_t>(size));
      for (int64_t i = 0; i < size; ++i, ++column) {
        const float value = table[next];
        next = next + 1 == kTableSize ? 0 : next + 1;
        part.Set(row * size + i, value);
        inputs.qkv.Set(row * (q_size + k_size + v_size) + column, value);
      }
      if (halved) skip((1 - half) * static_cast<size_t>(size));
    };
    fill(inputs.q, q_size);
    fill(inputs.k, k_size);
    fill(inputs.v, v_size);
    if ((token >> kBadShift & 1) != 0) Spoil(spec, token, layer, row, &inputs);
  }
  return inputs;
}

TensorView TokenInputs::kv() const {
  return TensorView(k.view().data(), k.view().dtype(), {k.view().dim(0), k.view().dim(2)});
}

Status AppendInputs(AttentionKVCache& cache, const AttentionLayerSpec& spec, int64_t layer,
                    const TokenInputs& inputs) {
  if (spec.latent) return cache.AppendMLAKV(layer, inputs.kv());
  return cache.Append(layer, inputs.k.view(), inputs.v.view());
}

BlockSource::BlockSource(std::span<const KVBlock> blocks) {
  layers_.resize(blocks.empty() ? 0 : blocks[0].size());
  for (const KVBlock& block : blocks) {
    for (size_t l = 0; l < block.size(); ++l) layers_[l].push_back(block[l]);
  }
}

Result<std::span<const LayerKV>> BlockSource::Load(int64_t layer) {
  if (arrive != nullptr) QUIRE_RETURN_IF_ERROR(arrive(layer));
  return std::span<const LayerKV>(layers_[static_cast<size_t>(layer)]);
}

double ScoreScale(const AttentionLayerSpec& spec) {
  const ScopedFloatEnvironment environment;  // a test may have set another
  return 1.0 / std::sqrt(static_cast<double>(spec.qk_head_dim));
}

Status RunLayer(AttentionKVCache& cache, const AttentionLayerSpec& spec, int64_t layer,
                std::span<const uint64_t> tokens, const ForwardStyle& style,
                LayerOutputs* outputs) {
  const int64_t n = static_cast<int64_t>(tokens.size());
  const TokenInputs inputs = MakeTokenInputs(spec, layer, style.input_dtype, tokens);
  outputs->o = TestTensor(style.output_dtype, {n, spec.num_qo_heads, spec.v_head_dim});
  outputs->lse = TestTensor();
  if (style.calls == CallStyle::kFused && spec.latent) {
    return cache.AttentionWithMLA(layer, inputs.q.view(), inputs.kv(), outputs->o.view(),
                                  ScoreScale(spec));
  }
  if (style.calls == CallStyle::kFused) {
    return cache.AttentionWithFusedQKV(layer, inputs.qkv.view(), outputs->o.view(),
                                       ScoreScale(spec));
  }
  outputs->lse = TestTensor(DType::kF32, {n, spec.num_qo_heads});
  QUIRE_RETURN_IF_ERROR(AppendInputs(cache, spec, layer, inputs));
  return cache.Attend(layer, inputs.q.view(), outputs->o.view(), &outputs->lse.view(),
                      ScoreScale(spec));
}

Result<std::vector<LayerOutputs>> FinishForward(AttentionKVCache& cache,
                                                std::span<const AttentionLayerSpec> layers,
                                                std::span<const uint64_t> rows,
                                                const ForwardStyle& style) {
  std::vector<LayerOutputs> outputs(layers.size());
  for (size_t l = 0; l < layers.size(); ++l) {
    QUIRE_RETURN_IF_ERROR(
        RunLayer(cache, layers[l], static_cast<int64_t>(l), rows, style, &outputs[l]));
  }
  QUIRE_RETURN_IF_ERROR(cache.EndForward());
  return outputs;
}

Result<std::vector<LayerOutputs>> RunForward(AttentionKVCache& cache,
                                             std::span<const AttentionLayerSpec> layers,
                                             std::span<const int64_t> ids,
                                             const std::vector<std::vector<uint64_t>>& tokens,
                                             const ForwardStyle& style) {
  std::vector<int64_t> lengths;
  std::vector<uint64_t> rows;
  for (const std::vector<uint64_t>& list : tokens) {
    lengths.push_back(static_cast<int64_t>(list.size()));
    rows.insert(rows.end(), list.begin(), list.end());
  }
  QUIRE_RETURN_IF_ERROR(cache.BeginForward(ids, lengths));
  return FinishForward(cache, layers, rows, style);
}

std::vector<uint64_t> NumberedTokens(int64_t start, int64_t count) {
  std::vector<uint64_t> tokens;
  for (int64_t i = start; i < start + count; ++i) tokens.push_back(5000 + static_cast<uint64_t>(i));
  return tokens;
}

std::vector<LayerOutputs> ExtendSequence(AttentionKVCache& cache, int64_t id,
                                         const std::vector<uint64_t>& tokens) {
  auto outputs = RunForward(cache, cache.options().layers, std::span(&id, 1), {tokens});
  EXPECT_TRUE(outputs.ok()) << outputs.status().ToString();
  return outputs.ok() ? *std::move(outputs) : std::vector<LayerOutputs>();
}

AttentionKVCacheOptions TestCacheOptions(std::vector<AttentionLayerSpec> layers,
                                         const TestCacheSizes& sizes) {
  AttentionKVCacheOptions options;
  options.layers = std::move(layers);
  options.max_num_sequences = sizes.max_num_sequences;
  options.token_capacity = sizes.token_capacity;
  options.prefill_chunk_size = sizes.prefill_chunk_size;
  options.page_size = sizes.page_size;
  options.rope.mode = sizes.rope;
  options.runner = std::make_shared<SerialRunner>();
  options.poison_freed_pages = true;
  options.max_pop = 0;  // what windows hide goes at once
  return options;
}

std::unique_ptr<AttentionKVCache> MakeTestCache(AttentionKVCacheOptions options) {
  Result<std::unique_ptr<AttentionKVCache>> cache = AttentionKVCache::Create(std::move(options));
  EXPECT_TRUE(cache.ok()) << cache.status().ToString();
  return *std::move(cache);
}

}  // namespace quire
