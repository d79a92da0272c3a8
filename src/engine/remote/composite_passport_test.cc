// Which states of hybrid models two processes refuse to move between them (reliability goal R19):
// the passports of real caches, attention beside recurrent layers and a caller's states. A
// connection ends with what MatchPassports says.
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels/backend.h"
#include "kv/testing/kv_test_forward.h"
#include "kv/testing/recurrent_test_forward.h"
#include "quire/composite_state.h"
#include "quire/kv_export.h"
#include "quire/rnn_state.h"
#include "transfer/passport_match.h"

namespace quire {
namespace {

// What a state is made of, to be changed.
struct Hybrid {
  Hybrid() {
    recurrent.layers = AllRecurrentKinds();
    recurrent.max_num_sequences = 2;
    recurrent.prefill_chunk_size = 32;
    callers.num_layers = 2;
    callers.states = {{.shape = {3}}, {.shape = {1, 2}, .dtype = DType::kF16}};
    callers.max_num_sequences = 2;
  }
  AttentionKVCacheOptions attention = TestCacheOptions(
      {{4, 2, 8, 8, DType::kBF16}, {4, 2, 8, 8, DType::kBF16}, {4, 4, 8, 4, DType::kBF16}},
      {.max_num_sequences = 2, .token_capacity = 64, .prefill_chunk_size = 32, .page_size = 16});
  RecurrentCacheOptions recurrent;
  RNNStateOptions callers;
  bool has_recurrent = true;
  bool has_callers = true;
  Passport identity;

  RecurrentLayerSpec& convolution() { return recurrent.layers[0]; }
  RecurrentLayerSpec& linear() { return recurrent.layers[1]; }
  RecurrentLayerSpec& delta() { return recurrent.layers[2]; }
};

std::string PassportOf(Hybrid hybrid) {
  const auto runner = std::make_shared<SerialRunner>();
  hybrid.attention.runner = hybrid.recurrent.runner = runner;
  CompositeState::Parts parts;
  parts.attention = AttentionKVCache::Create(hybrid.attention).value();
  if (hybrid.has_recurrent)
    parts.recurrent.push_back(RecurrentCache::Create(hybrid.recurrent).value());
  if (hybrid.has_callers) parts.recurrent.push_back(RNNState::Create(hybrid.callers).value());
  const auto state = CompositeState::Create(parts).value();
  return CachePassport(*state, hybrid.identity, false).value().ToJson().value();
}

Status Match(const std::function<void(Hybrid&)>& change) {
  Hybrid theirs;
  theirs.identity.model = "hybrid";
  const std::string ours = PassportOf(theirs);
  change(theirs);
  return MatchPassports(ours, PassportOf(theirs));
}

TEST(CompositePassport, MismatchesOfHybridStatesAreRefusedWithFieldAndBothValues) {
  struct Mismatch {
    std::string told;  // field and values
    std::function<void(Hybrid&)> change;
  };
  const std::vector<Mismatch> mismatches = {
      {R"(model: "hybrid" here, "other" there)", [](Hybrid& h) { h.identity.model = "other"; }},
      {R"(revision: "" here, "r2" there)", [](Hybrid& h) { h.identity.revision = "r2"; }},
      {"tokenizer: null here", [](Hybrid& h) { h.identity.tokenizer = "t2"; }},
      {"adapter: null here", [](Hybrid& h) { h.identity.adapter = "lora"; }},
      // Attention layers are 0 to 2.
      {R"(dtype: "bf16" here, "f16" there, of layer 1)",
       [](Hybrid& h) { h.attention.layers[1].dtype = DType::kF16; }},
      {R"(dtype: "bf16" here, "i8" there, of layer 0)",
       [](Hybrid& h) { h.attention.layers[0].dtype = DType::kI8; }},
      {R"(quant: "none" here, "token-head-f32" there)",
       [](Hybrid& h) { h.attention.layers[2].v_dtype = DType::kF8E4M3; }},
      {"head_dim: 8 here, 16 there, of layer 0",
       [](Hybrid& h) { h.attention.layers[0].qk_head_dim = 16; }},
      {"v_head_dim: 4 here, 6 there, of layer 2",
       [](Hybrid& h) { h.attention.layers[2].v_head_dim = 6; }},
      {"kv_heads: 4 here, 3 there, of layer 2",
       [](Hybrid& h) {
         h.attention.layers[2].num_qo_heads = h.attention.layers[2].num_kv_heads = 3;
       }},
      {"rope: ", [](Hybrid& h) { h.attention.rope.theta = 5e5; }},
      {"layers: [0,11] here, [0,10] there", [](Hybrid& h) { h.attention.layers.pop_back(); }},
      // Recurrent layers are 3 to 6. Heads of states are not split, whatever the factor.
      {"head_dim: 3 here, 4 there, of layer 3", [](Hybrid& h) { h.convolution().width = 5; }},
      {"v_head_dim: 19 here, 20 there, of layer 3",
       [](Hybrid& h) { h.convolution().num_channels = 20; }},
      {"kv_heads: 2 here, 4 there, of layer 4",
       [](Hybrid& h) { h.linear().num_heads = h.linear().num_key_heads = 4; }},
      {"kv_heads: 2 here, 1 there, of layer 5",
       [](Hybrid& h) { h.delta().num_heads = h.delta().num_key_heads = 1; }},
      {"head_dim: 4 here, 6 there, of layer 4", [](Hybrid& h) { h.linear().key_dim = 6; }},
      {"v_head_dim: 5 here, 7 there, of layer 4", [](Hybrid& h) { h.linear().value_dim = 7; }},
      {"head_dim: 3 here, 4 there, of layer 3",
       [](Hybrid& h) { std::swap(h.convolution(), h.linear()); }},
      {"layers: [0,11] here, [0,10] there", [](Hybrid& h) { h.recurrent.layers.pop_back(); }},
      {"layers: [0,11] here, [0,7] there", [](Hybrid& h) { h.has_recurrent = false; }},
      // A caller's states are 7 to 10.
      {R"(state: "3" here, "4" there, of layer 7)",
       [](Hybrid& h) { h.callers.states[0].shape = {4}; }},
      {R"(state: "1x2" here, "2x1" there, of layer 8)",
       [](Hybrid& h) {
         h.callers.states[1].shape = {2, 1};
       }},
      {R"(dtype: "f16" here, "bf16" there, of layer 8)",
       [](Hybrid& h) { h.callers.states[1].dtype = DType::kBF16; }},
      {"layers: [0,11] here, [0,9] there", [](Hybrid& h) { h.callers.num_layers = 1; }},
      {"layers: [0,11] here, [0,7] there", [](Hybrid& h) { h.has_callers = false; }},
  };
  EXPECT_GE(mismatches.size(), 20U);
  for (const auto& [told, change] : mismatches) {
    const Status status = Match(change);
    SCOPED_TRACE(told + "\n" + status.ToString());
    EXPECT_EQ(status.code(), StatusCode::kIncompatible);
    const std::string message(status.message());
    EXPECT_NE(message.find(": " + told), std::string::npos);
    EXPECT_NE(message.find(" there"), std::string::npos);
    EXPECT_EQ(message.find('\n'), std::string::npos);
    EXPECT_LT(message.size(), 600U);
  }
}

TEST(CompositePassport, KernelsOfRecurrentLayersCount) {
  if (Backends().size() < 2) GTEST_SKIP() << "one kernel path alone";
  const Status status = Match([](Hybrid& h) { h.recurrent.kernel_path = "scalar"; });
  EXPECT_EQ(status.code(), StatusCode::kIncompatible);
  EXPECT_NE(status.message().find(": numerics: "), std::string::npos) << status.ToString();
}

TEST(CompositePassport, WhatTransfersAdaptIsNoMismatch) {
  const std::function<void(Hybrid&)> adapted[] = {
      [](Hybrid&) {},
      [](Hybrid& h) { h.attention.page_size = 4; },
      [](Hybrid& h) { h.attention.token_capacity = 128; },
      [](Hybrid& h) { h.attention.layers[0].num_kv_heads = 4; },
      [](Hybrid& h) { h.attention.layers[1].num_kv_heads = 1; },
      [](Hybrid& h) { h.recurrent.max_num_sequences = 7; },
      [](Hybrid& h) { h.identity.block_tokens = 64; },
  };
  for (const auto& change : adapted) EXPECT_EQ(Match(change).ToString(), "Ok");
}

}  // namespace
}  // namespace quire
