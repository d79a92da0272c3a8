#include "model/config/quantisation_config.h"

#include <gtest/gtest.h>

#include <string>

namespace quire {
namespace {

using nlohmann::json;

Result<FolderQuantisation> Read(const json& config) {
  return ReadQuantisation(JsonValue(config, "config.json.quantization_config"));
}

json Gptq() { return {{"quant_method", "gptq"}, {"bits", 4}, {"group_size", 128}}; }
json Awq() {
  return {{"quant_method", "awq"}, {"bits", 4}, {"group_size", 64}, {"version", "gemm"}};
}
json Compressed() {
  const json weights{{"num_bits", 4}, {"type", "int"}, {"strategy", "group"}, {"group_size", 128}};
  return {{"quant_method", "compressed-tensors"},
          {"format", "pack-quantized"},
          {"config_groups", {{"group_0", {{"targets", {"Linear"}}, {"weights", weights}}}}}};
}

json Float8() {
  return {{"quant_method", "fp8"},
          {"fmt", "e4m3"},
          {"activation_scheme", "dynamic"},
          {"weight_block_size", {128, 64}}};
}
json CompressedFloat8() {
  json config = Compressed();
  config["format"] = "float-quantized";
  config["config_groups"]["group_0"]["weights"] = {
      {"num_bits", 8}, {"type", "float"}, {"strategy", "block"}, {"block_structure", {128, 64}}};
  return config;
}

json Mxfp4() {
  json config = Compressed();
  config["format"] = "mxfp4-pack-quantized";
  config["config_groups"]["group_0"]["format"] = "mxfp4-pack-quantized";
  config["config_groups"]["group_0"]["weights"] = {
      {"num_bits", 4}, {"type", "float"}, {"strategy", "group"}, {"group_size", 32}};
  return config;
}

TEST(Quantisation, FormsAreRead) {
  const FolderQuantisation gptq = Read(Gptq()).value();
  EXPECT_EQ(gptq.scheme, FolderScheme::kGptq);
  EXPECT_EQ(gptq.bits, 4);
  EXPECT_EQ(gptq.group_size, 128);
  EXPECT_EQ(gptq.zero_raise, 1);
  json second = Gptq();
  second.update({{"bits", 8}, {"group_size", -1}, {"checkpoint_format", "gptq_v2"}});
  EXPECT_EQ(Read(second)->bits, 8);
  EXPECT_EQ(Read(second)->group_size, 0);
  EXPECT_EQ(Read(second)->zero_raise, 0);
  EXPECT_EQ(Read(Awq())->scheme, FolderScheme::kAwq);
  EXPECT_EQ(Read(Awq())->group_size, 64);
  const json own{{"quant_method", "awq"}, {"w_bit", 4}, {"q_group_size", 128}, {"version", "GEMM"}};
  EXPECT_EQ(Read(own)->group_size, 128);
  EXPECT_EQ(Read(Compressed())->scheme, FolderScheme::kCompressed);
  const auto mxfp4 = Read(Mxfp4());
  ASSERT_TRUE(mxfp4.ok()) << mxfp4.status().ToString();
  EXPECT_EQ(mxfp4->scheme, FolderScheme::kCompressed);
  EXPECT_EQ(mxfp4->block_outputs, 0);
}

TEST(Quantisation, GroupsAreStrewnWhereTheOrderOfActivationsCutsThem) {
  json config = Gptq();
  EXPECT_FALSE(Read(config)->is_strewn);
  config["desc_act"] = false;
  EXPECT_FALSE(Read(config)->is_strewn);
  config["desc_act"] = true;
  EXPECT_TRUE(Read(config)->is_strewn);
  config["static_groups"] = true;  // cut before the inputs are ordered
  EXPECT_FALSE(Read(config)->is_strewn);
  config["static_groups"] = false;
  EXPECT_TRUE(Read(config)->is_strewn);
}

TEST(Quantisation, OffsetsAreThereWhereNoGroupIsSymmetric) {
  json config = Compressed();
  json& groups = config["config_groups"];
  json& weights = groups["group_0"]["weights"];
  EXPECT_FALSE(Read(config)->has_offsets);
  weights["symmetric"] = true;
  EXPECT_FALSE(Read(config)->has_offsets);
  weights["symmetric"] = false;
  EXPECT_TRUE(Read(config)->has_offsets);
  weights["strategy"] = "channel";
  EXPECT_TRUE(Read(config)->has_offsets);
  weights["strategy"] = "tensor";  // may be left out
  EXPECT_FALSE(Read(config)->has_offsets);
  weights["strategy"] = "group";
  for (const json& other : {Compressed(), Mxfp4()}) {
    groups["group_1"] = other["config_groups"]["group_0"];
    EXPECT_FALSE(Read(config)->has_offsets);
  }
  groups = json::object();
  EXPECT_FALSE(Read(config)->has_offsets);
}

TEST(Quantisation, Float8IsReadWithItsBlocks) {
  const auto found = Read(Float8());
  ASSERT_TRUE(found.ok()) << found.status().ToString();
  EXPECT_EQ(found->scheme, FolderScheme::kFloat8);
  EXPECT_EQ(found->block_outputs, 128);
  EXPECT_EQ(found->block_inputs, 64);
  json one_scale = Float8();
  one_scale["weight_block_size"] = nullptr;
  EXPECT_EQ(Read(one_scale)->block_outputs, 0);

  EXPECT_EQ(Read({{"quant_method", "fbgemm_fp8"}, {"activation_scale_ub", 1200.0}})->scheme,
            FolderScheme::kFloat8);

  json compressed = CompressedFloat8();
  EXPECT_EQ(Read(compressed)->scheme, FolderScheme::kCompressed);
  EXPECT_EQ(Read(compressed)->block_inputs, 64);
  json& groups = compressed["config_groups"];
  groups["group_1"] = groups["group_0"];
  EXPECT_TRUE(Read(compressed).ok());
  groups["group_1"]["weights"]["block_structure"] = {128, 128};
  EXPECT_NE(Read(compressed).status().message().find("[128,128] is not read; read is one size"),
            std::string::npos);
  groups.erase("group_1");
  groups["group_0"]["weights"]["strategy"] = "channel";
  EXPECT_EQ(Read(compressed)->block_inputs, 0);
}

struct Refused {
  json config;
  std::string at;  // a JSON pointer
  json value;
  std::string message;
};

TEST(Quantisation, WhatIsNotReadIsRefusedByFieldAndValue) {
  const std::string group = "/config_groups/group_0";
  const Refused cases[] = {
      {Gptq(), "/quant_method", "hqq",
       ".quant_method: \"hqq\" is not read; read are awq, compressed-tensors, fbgemm_fp8, fp8, "
       "gptq"},
      {Gptq(), "/bits", 3, ".bits: 3 is not read; read are 4 and 8"},
      {Gptq(), "/bits", nullptr, "\"bits\" is missing"},
      {Gptq(), "/group_size", 16, ".group_size: 16 is not read; read are multiples of 32, and -1"},
      {Gptq(), "/group_size", 0, ".group_size: 0 is not read"},
      {Gptq(), "/checkpoint_format", "marlin", ".checkpoint_format: \"marlin\" is not read"},
      {Gptq(), "/pack_dtype", "int16", ".pack_dtype: \"int16\" is not read"},
      {Gptq(), "/is_marlin_format", true, ".is_marlin_format: true is not read"},
      {Gptq(), "/desc_act", "yes", ".desc_act: expected"},
      {Awq(), "/bits", 8, ".bits: 8 is not read; read is 4"},
      {Awq(), "/version", "gemv", ".version: \"gemv\" is not read; read are gemm"},
      {Awq(), "/zero_point", false, ".zero_point: false is not read; read is true"},
      {Compressed(), "/format", "marlin-24", ".format: \"marlin-24\" is not read"},
      {Float8(), "/fmt", "e5m2", ".fmt: \"e5m2\" is not read; read are e4m3"},
      {Float8(), "/weight_block_size", {128}, ".weight_block_size: expected two sizes"},
      {Float8(), "/weight_block_size", 128, ".weight_block_size: expected an array"},
      {Float8(), "/weight_block_size/1", 0, ".weight_block_size[1]: 0 is not in [1, "},
      {CompressedFloat8(), group + "/weights/num_bits", 6, ".weights.num_bits: 6 is not read"},
      {CompressedFloat8(), group + "/weights/num_bits", 4,
       ".weights.strategy: \"block\" is not read; read are group"},
      {Mxfp4(), group + "/weights/group_size", 16,
       ".weights.group_size: 16 is not read; with float weights of 4 bits read is 32"},
      {Mxfp4(), group + "/weights/group_size", nullptr, "\"group_size\" is missing"},
      {CompressedFloat8(), group + "/weights/strategy", "group",
       ".weights.strategy: \"group\" is not read; read are block, channel, tensor"},
      {CompressedFloat8(), group + "/weights/block_structure", nullptr,
       "\"block_structure\" is missing"},
      {Compressed(),
       "/sparsity_config",
       {{"format", "sparse-24-bitmask"}},
       ".sparsity_config.format: \"sparse-24-bitmask\" is not read"},
      {Compressed(),
       "/transform_config",
       {{"config_groups", {{"R1", 1}}}},
       ".transform_config.config_groups: {\"R1\":1} is not read"},
      {Compressed(), "/config_groups", 7, ".config_groups: expected an object"},
      {Compressed(), group + "/weights", nullptr, "\"weights\" is missing"},
      {Compressed(), group + "/format", "nvfp4-pack-quantized",
       "group_0.format: \"nvfp4-pack-quantized\" is not read"},
      {Compressed(), group + "/weights/type", "fp",
       "group_0.weights.type: \"fp\" is not read; read are float, int"},
      {Compressed(), group + "/weights/num_bits", 2, "group_0.weights.num_bits: 2 is not read"},
      {Compressed(), group + "/weights/symmetric", "no", "group_0.weights.symmetric: expected"},
      {Compressed(), group + "/weights/strategy", "block",
       "group_0.weights.strategy: \"block\" is not read; read are channel, group, tensor"},
      {Compressed(), group + "/weights/group_size", 48,
       "group_0.weights.group_size: 48 is not read"},
  };
  for (const Refused& refused : cases) {
    json config = refused.config;
    config[json::json_pointer(refused.at)] = refused.value;
    const auto result = Read(config);
    ASSERT_FALSE(result.ok()) << refused.at;
    EXPECT_EQ(result.status().code(), StatusCode::kBadArgument);
    EXPECT_NE(result.status().message().find(refused.message), std::string::npos)
        << result.status().message();
  }
}

// What says nothing about weights, or what weights without the feature have.
TEST(Quantisation, HarmlessMembersAreTaken) {
  json config = Compressed();
  config.update({{"sparsity_config", {{"format", "dense"}}},
                 {"transform_config", json::object()},
                 {"kv_cache_scheme", nullptr},
                 {"ignore", {"lm_head"}}});
  EXPECT_TRUE(Read(config).ok()) << Read(config).status().ToString();
}

}  // namespace
}  // namespace quire
