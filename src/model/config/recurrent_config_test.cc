// config.json of models with recurrent layers.
#include "model/config/recurrent_config.h"

#include <gtest/gtest.h>

#include <limits>
#include <nlohmann/json.hpp>
#include <string>

#include "model/config/model_config.h"
#include "model/testing/test_model.h"

namespace quire {
namespace {

using Json = nlohmann::json;

Json MambaForm() { return TestConfig({.architecture = "Mamba2ForCausalLM"}); }
Json HybridForm() {
  return TestConfig({.architecture = "Qwen3NextForCausalLM", .num_hidden_layers = 4});
}

ModelConfig ParseOk(const std::string& text) {
  const Result<ModelConfig> config = ParseModelConfig(text, "", "config.json");
  EXPECT_TRUE(config.ok()) << config.status().ToString();
  return config.ok() ? *config : ModelConfig();
}

std::string Refusal(Json json, const std::string& field, const Json& value) {
  json[field] = value;
  const Result<ModelConfig> config = ParseModelConfig(json.dump(), "", "config.json");
  EXPECT_EQ(config.status().code(), StatusCode::kBadArgument) << field << " " << value;
  return config.status().ToString();
}

TEST(RecurrentConfig, ReadsMamba2) {
  const ModelConfig config = ParseOk(MambaForm().dump());
  ASSERT_TRUE(config.state_space.has_value());
  const StateSpaceConfig& c = *config.state_space;
  EXPECT_EQ(c.inner_size(), 96);
  EXPECT_EQ(c.conv_channels(), 96 + 2 * 2 * 8);
  EXPECT_EQ(c.step_min, 0);
  EXPECT_EQ(c.step_max, std::numeric_limits<double>::infinity());
  EXPECT_EQ(config.rms_norm_eps, 1e-5);
  EXPECT_EQ(config.mixers, std::vector<MixerKind>(2, MixerKind::kStateSpace));
  EXPECT_EQ(config.max_position_embeddings, std::numeric_limits<int32_t>::max());
}

TEST(RecurrentConfig, InfinityIsReadInBothForms) {
  Json json = MambaForm();
  json["note"] = "a text may say \"Infinity\" or \\ and stays";
  std::string text = json.dump();
  text.insert(1, R"("time_step_limit": [0.5, Infinity], )");
  const ModelConfig python = ParseOk(text);
  EXPECT_EQ(python.state_space->step_min, 0.5);
  EXPECT_EQ(python.state_space->step_max, std::numeric_limits<double>::infinity());
  json["time_step_limit"] = {0.25, {{"__float__", "Infinity"}}};
  EXPECT_EQ(ParseOk(json.dump()).state_space->step_min, 0.25);
  text = MambaForm().dump().insert(1, R"("time_step_limit": [-Infinity, 1], )");
  EXPECT_EQ(ParseModelConfig(text, "", "config.json").status().code(), StatusCode::kCorrupt);
}

TEST(RecurrentConfig, ReadsQwen3Next) {
  Json json = HybridForm();
  const ModelConfig config = ParseOk(json.dump());
  ASSERT_TRUE(config.gated_delta.has_value());
  EXPECT_EQ(config.gated_delta->conv_channels(), 2 * 16 + 48);
  EXPECT_EQ(config.mixers[0], MixerKind::kGatedDelta);
  EXPECT_EQ(config.mixers[1], MixerKind::kGatedAttention);
  EXPECT_EQ(config.sparse_layers, (std::vector<uint8_t>{0, 1, 0, 1}));
  EXPECT_EQ(config.rope.rotary_dim, 8);
  for (const char* const field : {"layer_types", "partial_rotary_factor", "head_dim"}) {
    json.erase(field);
  }
  json["mlp_only_layers"] = {3};
  const ModelConfig filled = ParseOk(json.dump());
  EXPECT_EQ(filled.mixers,
            (std::vector<MixerKind>{MixerKind::kGatedDelta, MixerKind::kGatedDelta,
                                    MixerKind::kGatedDelta, MixerKind::kGatedAttention}));
  EXPECT_EQ(filled.sparse_layers, (std::vector<uint8_t>{0, 1, 0, 0}));
  EXPECT_EQ(filled.head_dim, 256);
  EXPECT_EQ(filled.rope.rotary_dim, 64);
}

TEST(RecurrentConfig, NamesWhatIsWrong) {
  const auto names = [](const std::string& refusal, const std::string& part) {
    EXPECT_NE(refusal.find(part), std::string::npos) << refusal;
  };
  names(Refusal(MambaForm(), "expand", 3), "expand: 3 times hidden_size 48");
  names(Refusal(MambaForm(), "n_groups", 4), "n_groups: 4 does not divide num_heads, 6");
  names(Refusal(MambaForm(), "time_step_limit", {2, 1}), "must ascend from 0");
  names(Refusal(MambaForm(), "time_step_limit", {1}), "1 entries");
  names(Refusal(MambaForm(), "time_step_limit", {0, {{"__float__", "NaN"}}}), "NaN");
  names(Refusal(MambaForm(), "conv_kernel", 1), "conv_kernel");
  names(Refusal(HybridForm(), "layer_types", {"linear_attention"}), "1 entries");
  names(Refusal(HybridForm(), "layer_types", Json::array({"a", "b", "c", "d"})), "\"a\"");
  names(Refusal(HybridForm(), "linear_num_key_heads", 3), "does not divide");
  names(Refusal(HybridForm(), "num_experts_per_tok", 6), "num_experts_per_tok");
  names(Refusal(HybridForm(), "mlp_only_layers", {4}), "mlp_only_layers");
}

}  // namespace
}  // namespace quire
