// Options of which sizes are made: whatever the numbers, a cache is created, or a Status names what
// is wrong. A product that wraps would give a cache with less memory than it writes to.
#include "base/testing/hostile_options.h"

#include <gtest/gtest.h>

#include <vector>

#include "quire/attention_kv_cache.h"
#include "quire/recurrent_cache.h"
#include "quire/rnn_state.h"
#include "quire/seams.h"
#include "tensor/checked_size.h"
#include "tensor/host_memory.h"

namespace quire {
namespace {

AttentionKVCacheOptions SmallAttention() {
  AttentionKVCacheOptions options;
  options.layers = {{2, 1, 8, 8, DType::kF32}, {2, 1, 8, 8, DType::kF32}};
  options.max_num_sequences = 2;
  options.token_capacity = 64;
  options.prefill_chunk_size = 16;
  options.page_size = 16;
  options.runner = CreateThreadPool(1).value();
  return options;
}

TEST(HostileOptions, OfAttentionKVCache) {
  using O = AttentionKVCacheOptions;
  const std::vector<Field<O>> fields = {
      {"max_num_sequences", [](O& o, int64_t v) { o.max_num_sequences = v; }},
      {"token_capacity", [](O& o, int64_t v) { o.token_capacity = v; }},
      {"prefill_chunk_size", [](O& o, int64_t v) { o.prefill_chunk_size = v; }},
      {"page_size", [](O& o, int64_t v) { o.page_size = v; }},
      {"max_tree_size", [](O& o, int64_t v) { o.max_tree_size = v; }},
      {"num_qo_heads", [](O& o, int64_t v) { o.layers[0].num_qo_heads = v; }},
      {"num_kv_heads", [](O& o, int64_t v) { o.layers[0].num_kv_heads = v; }},
      {"qk_head_dim", [](O& o, int64_t v) { o.layers[0].qk_head_dim = v; }},
      {"v_head_dim", [](O& o, int64_t v) { o.layers[0].v_head_dim = v; }},
      {"window", [](O& o, int64_t v) { o.layers[0].window = v; }}};
  for (const RopeMode mode : {RopeMode::kNone, RopeMode::kInline}) {
    O good = SmallAttention();
    good.rope.mode = mode;
    TryAll(good, fields, [](const O& o) { return AttentionKVCache::Create(o).status(); });
  }
}

// Each layer's pages fit, their sum over the layers wraps to a few bytes.
TEST(HostileOptions, LayersWhosePagesWrapTogether) {
  AttentionKVCacheOptions options = SmallAttention();
  AttentionLayerSpec large = {1, 1, 1 << 20, 1 << 20, DType::kF32};
  options.page_size = 1 << 19;
  options.token_capacity = int64_t{1} << 38;  // 2^61 bytes a layer
  for (const size_t layer_count : {1, 4, 8, 16}) {
    options.layers.assign(layer_count, large);
    ExpectRefusal(AttentionKVCache::Create(options).status(), {"token_capacity"});
    for (size_t l = 0; l < layer_count; ++l) options.layers[l].window = static_cast<int64_t>(l);
    ExpectRefusal(AttentionKVCache::Create(options).status(), {"token_capacity"});
  }
}

TEST(HostileOptions, OfRNNState) {
  using O = RNNStateOptions;
  O good;
  good.num_layers = 2;
  good.max_history = 1;
  good.states = {{.shape = {4}}};
  good.max_num_sequences = 64;
  const std::vector<Field<O>> fields = {
      {"num_layers", [](O& o, int64_t v) { o.num_layers = v; }},
      {"max_num_sequences", [](O& o, int64_t v) { o.max_num_sequences = v; }},
      {"max_history", [](O& o, int64_t v) { o.max_history = v; }},
      {"max_checkpoints", [](O& o, int64_t v) { o.max_checkpoints = v; }},
      {"max_retained_slots", [](O& o, int64_t v) { o.max_retained_slots = v; }},
      {"max_tree_size", [](O& o, int64_t v) { o.max_tree_size = v; }},
      {"max_tree_slots", [](O& o, int64_t v) { o.max_tree_slots = v; }},
      {"states[0]", [](O& o, int64_t v) { o.states[0].shape = {v}; }},
      {"states[0]", [](O& o, int64_t v) {
         o.states[0].shape = {2, v};
       }}};
  TryAll(good, fields, [](const O& o) { return RNNState::Create(o).status(); });
}

// 2^33 numbers of 4 bytes in 2^29 layers: 2^64.
TEST(HostileOptions, StatesThatWrapOverTheLayers) {
  RNNStateOptions options;
  options.states = {{.shape = {int64_t{1} << 33}}};
  options.num_layers = int64_t{1} << 29;
  options.max_num_sequences = 1;
  ExpectRefusal(RNNState::Create(options).status(), {"num_layers"});
}

TEST(HostileOptions, OfRecurrentCache) {
  using O = RecurrentCacheOptions;
  O good;
  good.layers = {{.num_heads = 2, .num_key_heads = 1, .key_dim = 16, .value_dim = 16}};
  good.max_num_sequences = 2;
  good.prefill_chunk_size = 64;
  good.runner = CreateThreadPool(1).value();
  const std::vector<Field<O>> fields = {
      {"max_num_sequences", [](O& o, int64_t v) { o.max_num_sequences = v; }},
      {"prefill_chunk_size", [](O& o, int64_t v) { o.prefill_chunk_size = v; }},
      {"recent_checkpoints", [](O& o, int64_t v) { o.recent_checkpoints = v; }},
      {"thinned_checkpoints", [](O& o, int64_t v) { o.thinned_checkpoints = v; }},
      {"max_retained_slots", [](O& o, int64_t v) { o.max_retained_slots = v; }},
      {"max_tree_size", [](O& o, int64_t v) { o.max_tree_size = v; }},
      {"max_tree_slots", [](O& o, int64_t v) { o.max_tree_slots = v; }},
      {"max_loads", [](O& o, int64_t v) { o.max_loads = v; }},
      {"max_slots", [](O& o, int64_t v) { o.max_slots = v; }},
      {"layers[0]", [](O& o, int64_t v) { o.layers[0].num_heads = v; }},
      {"layers[0]", [](O& o, int64_t v) { o.layers[0].num_key_heads = v; }},
      {"layers[0]", [](O& o, int64_t v) { o.layers[0].key_dim = v; }},
      {"layers[0]", [](O& o, int64_t v) { o.layers[0].value_dim = v; }}};
  TryAll(good, fields, [](const O& o) { return RecurrentCache::Create(o).status(); });
}

TEST(HostileOptions, OfHostMemory) {
  for (const size_t bytes :
       {size_t{1} << 61, size_t{1} << 62, size_t{1} << 63, SIZE_MAX - 5, SIZE_MAX}) {
    EXPECT_EQ(HostMemory::Allocate(bytes).status().code(), StatusCode::kOutOfMemory) << bytes;
  }
}

TEST(CheckedProduct, IsExactOrNothing) {
  EXPECT_EQ(CheckedProduct({3, 4, 5}), 60);
  EXPECT_EQ(CheckedProduct({}), 1);
  EXPECT_EQ(CheckedProduct({kSizeMax, 1}), kSizeMax);
  EXPECT_EQ(CheckedProduct({kSizeMax, 2}), std::nullopt);
  EXPECT_EQ(CheckedProduct({int64_t{1} << 32, int64_t{1} << 32}), std::nullopt) << "2^64";
  EXPECT_EQ(CheckedProduct({int64_t{1} << 32, int64_t{1} << 32, 0}), 0);
}

}  // namespace
}  // namespace quire
