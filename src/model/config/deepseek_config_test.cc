// config.json of DeepSeek-V2 and V3: latent attention and grouped experts.
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <string>

#include "model/config/model_config.h"
#include "model/testing/test_model.h"

namespace quire {
namespace {

using Json = nlohmann::json;

Json Form(int version, int64_t layers = 4) {
  return TestConfig(
      {.architecture = version == 2 ? "DeepseekV2ForCausalLM" : "DeepseekV3ForCausalLM",
       .num_hidden_layers = layers});
}

ModelConfig ParseOk(const Json& json) {
  const Result<ModelConfig> config = ParseModelConfig(json.dump(), "", "config.json");
  EXPECT_TRUE(config.ok()) << config.status().ToString();
  return config.ok() ? *config : ModelConfig();
}

void ExpectRefused(Json json, const std::string& field, const Json& value,
                   const std::string& part) {
  json[field] = value;
  const Result<ModelConfig> config = ParseModelConfig(json.dump(), "", "config.json");
  EXPECT_EQ(config.status().code(), StatusCode::kBadArgument) << field << " " << value;
  EXPECT_NE(config.status().ToString().find(part), std::string::npos) << config.status().ToString();
}

TEST(DeepseekConfig, ReadsLatentAttention) {
  Json json = Form(3);
  const ModelConfig config = ParseOk(json);
  ASSERT_TRUE(config.latent.has_value());
  EXPECT_EQ(config.latent->q_rank, 20);
  EXPECT_EQ(config.latent->key_dim(), 32);
  EXPECT_EQ(config.latent->q_dim(), 20);
  EXPECT_EQ(config.latent->v_dim, 10);
  EXPECT_EQ(config.latent->scale, 1 / std::sqrt(20.0));
  EXPECT_EQ(config.mixers, std::vector<MixerKind>(4, MixerKind::kLatentAttention));
  EXPECT_EQ(config.rope.pairing, RopePairing::kInterleaved);
  EXPECT_EQ(config.rope.rotary_dim, 8);
  json["q_lora_rank"] = nullptr;
  json["rope_interleave"] = false;
  EXPECT_EQ(ParseOk(json).latent->q_rank, 0);
  EXPECT_EQ(ParseOk(json).rope.pairing, RopePairing::kHalfSplit);
  json.erase("q_lora_rank");
  EXPECT_EQ(ParseOk(json).latent->q_rank, 1536);
}

TEST(DeepseekConfig, YarnScalesScores) {
  Json json = Form(2);
  json["rope_scaling"] = {{"type", "yarn"},
                          {"factor", 40.0},
                          {"original_max_position_embeddings", 4096},
                          {"mscale", 0.707},
                          {"mscale_all_dim", 0.707}};
  const double factor = 0.1 * 0.707 * std::log(40.0) + 1;
  EXPECT_DOUBLE_EQ(ParseOk(json).latent->scale, factor * factor / std::sqrt(20.0));
  json["rope_scaling"].erase("mscale_all_dim");
  EXPECT_DOUBLE_EQ(ParseOk(json).latent->scale, 1 / std::sqrt(20.0));
}

TEST(DeepseekConfig, ReadsGroupedExperts) {
  const ModelConfig v2 = ParseOk(Form(2));
  EXPECT_EQ(v2.experts.scores, ExpertScores::kSoftmax);
  EXPECT_FALSE(v2.experts.has_choice_bias);
  EXPECT_EQ(v2.experts.group_count, 4);
  EXPECT_EQ(v2.experts.groups_per_token, 2);
  EXPECT_EQ(v2.experts.group_scores, 1);
  EXPECT_EQ(v2.experts.scale, 1.5);
  EXPECT_EQ(v2.experts.shared_intermediate_size, 40);
  EXPECT_FALSE(v2.experts.has_shared_gate);
  EXPECT_EQ(v2.sparse_layers, (std::vector<uint8_t>{0, 1, 1, 1}));
  Json json = Form(2);
  json["topk_method"] = "greedy";
  json["moe_layer_freq"] = 2;
  EXPECT_EQ(ParseOk(json).experts.group_count, 1);
  EXPECT_EQ(ParseOk(json).sparse_layers, (std::vector<uint8_t>{0, 0, 1, 0}));

  const ModelConfig v3 = ParseOk(Form(3));
  EXPECT_EQ(v3.experts.scores, ExpertScores::kSigmoid);
  EXPECT_TRUE(v3.experts.has_choice_bias);
  EXPECT_TRUE(v3.experts.normalises);
  EXPECT_EQ(v3.experts.group_scores, 2);
}

TEST(DeepseekConfig, FillsInWhatIsAbsent) {
  for (const int version : {2, 3}) {
    Json json = Form(version);
    for (const char* const field :
         {"kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
          "first_k_dense_replace", "n_routed_experts", "moe_intermediate_size", "n_shared_experts",
          "n_group", "topk_group", "routed_scaling_factor", "norm_topk_prob", "scoring_func",
          "topk_method"}) {
      json.erase(field);
    }
    if (version == 3) json.erase("num_experts_per_tok");
    const ModelConfig config = ParseOk(json);
    EXPECT_EQ(config.latent->key_dim(), 512 + 64);
    EXPECT_EQ(config.latent->q_dim(), 192);
    EXPECT_EQ(config.experts.count, version == 2 ? 64 : 256);
    EXPECT_EQ(config.experts.per_token, version == 2 ? 3 : 8);
    EXPECT_EQ(config.experts.group_count, version == 2 ? 1 : 8);
    EXPECT_EQ(config.experts.groups_per_token, version == 2 ? 1 : 4);
    EXPECT_EQ(config.experts.scale, version == 2 ? 1.0 : 2.5);
    EXPECT_EQ(config.experts.shared_intermediate_size, version == 2 ? 2 * 1407 : 2048);
    EXPECT_EQ(config.sparse_layers[0], version == 2 ? 1 : 0);
  }
}

TEST(DeepseekConfig, NamesWhatIsWrong) {
  ExpectRefused(Form(3), "num_key_value_heads", 2, "num_key_value_heads: 2 is not");
  ExpectRefused(Form(3), "qk_rope_head_dim", 7, "7 is odd");
  ExpectRefused(Form(3), "n_group", 3, "n_group: 3 does not divide n_routed_experts, 8");
  ExpectRefused(Form(3), "n_group", 8, "judged by its two best");
  ExpectRefused(Form(3), "n_group", 65, "n_group");
  ExpectRefused(Form(3), "topk_group", 5, "topk_group");
  ExpectRefused(Form(3), "num_experts_per_tok", 5, "5 of the 4 experts in topk_group groups");
  ExpectRefused(Form(2), "num_experts_per_tok", nullptr, "num_experts_per_tok");
  ExpectRefused(Form(3), "topk_method", "greedy", "known is noaux_tc");
  ExpectRefused(Form(2), "topk_method", "noaux_tc", "known are greedy");
  ExpectRefused(Form(2), "scoring_func", "sigmoid", "known is softmax");
  ExpectRefused(Form(2), "norm_topk_prob", true, "norm_topk_prob: true");
  ExpectRefused(Form(2), "routed_scaling_factor", 0, "is not in (0,");
  ExpectRefused(Form(3), "quantization_config", {{"quant_method", "hqq"}},
                ".quantization_config.quant_method: \"hqq\" is not read");
  ExpectRefused(Form(3), "rope_scaling",
                {{"type", "longrope"},
                 {"short_factor", {1, 1, 1, 1}},
                 {"long_factor", {1, 1, 1, 1}},
                 {"original_max_position_embeddings", 64}},
                "longrope is not known for latent attention");
  ExpectRefused(Form(3), "rope_scaling", {{"type", "dynamic"}, {"factor", 2.0}},
                "dynamic is not known for latent attention");
}

}  // namespace
}  // namespace quire
