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
      {Gptq(), "/quant_method", "fp8",
       ".quant_method: \"fp8\" is not read; read are awq, compressed-tensors, gptq"},
      {Gptq(), "/bits", 3, ".bits: 3 is not read; read are 4 and 8"},
      {Gptq(), "/bits", nullptr, "\"bits\" is missing"},
      {Gptq(), "/group_size", 16, ".group_size: 16 is not read; read are multiples of 32, and -1"},
      {Gptq(), "/group_size", 0, ".group_size: 0 is not read"},
      {Gptq(), "/checkpoint_format", "marlin", ".checkpoint_format: \"marlin\" is not read"},
      {Gptq(), "/pack_dtype", "int16", ".pack_dtype: \"int16\" is not read"},
      {Gptq(), "/is_marlin_format", true, ".is_marlin_format: true is not read"},
      {Awq(), "/bits", 8, ".bits: 8 is not read; read is 4"},
      {Awq(), "/version", "gemv", ".version: \"gemv\" is not read; read are gemm"},
      {Awq(), "/zero_point", false, ".zero_point: false is not read; read is true"},
      {Compressed(), "/format", "float-quantized", ".format: \"float-quantized\" is not read"},
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
      {Compressed(), group + "/weights/type", "float",
       "group_0.weights.type: \"float\" is not read; read are int"},
      {Compressed(), group + "/weights/num_bits", 2, "group_0.weights.num_bits: 2 is not read"},
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
