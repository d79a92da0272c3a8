#include "model/config/model_config.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "model/config/architecture.h"

namespace quire {
namespace {

using Json = nlohmann::json;

// What transformers 4 writes for a small Llama.
Json OldForm() {
  return Json::parse(R"({
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
    "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "silu",
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-05, "rope_theta": 500000.0,
    "rope_scaling": null, "tie_word_embeddings": true, "attention_bias": false,
    "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.02, "use_cache": true,
    "transformers_version": "4.40.0"})");
}

// The same by transformers 5.
Json NewForm() {
  Json json = OldForm();
  json.erase("torch_dtype");
  json.erase("rope_theta");
  json.erase("rope_scaling");
  json["dtype"] = "bfloat16";
  json["head_dim"] = 16;
  json["rope_parameters"] = {{"rope_theta", 500000.0}, {"rope_type", "default"}};
  return json;
}

Result<ModelConfig> Parse(const Json& json, std::string_view generation = "") {
  return ParseModelConfig(json.dump(), generation, "m/config.json");
}

ModelConfig ParseOk(const Json& json, std::string_view generation = "") {
  const auto config = Parse(json, generation);
  EXPECT_TRUE(config.ok()) << config.status().ToString();
  return config.ok() ? *config : ModelConfig();
}

Json With(Json json, const std::string& key, const Json& value) {
  json[key] = value;
  return json;
}

TEST(ModelConfig, ReadsTheOldAndTheNewFormAlike) {
  for (const Json& json : {OldForm(), NewForm()}) {
    const ModelConfig config = ParseOk(json);
    EXPECT_EQ(config.architecture, "LlamaForCausalLM");
    EXPECT_EQ(config.vocab_size, 1000);
    EXPECT_EQ(config.hidden_size, 64);
    EXPECT_EQ(config.intermediate_size, 128);
    EXPECT_EQ(config.num_hidden_layers, 2);
    EXPECT_EQ(config.num_attention_heads, 4);
    EXPECT_EQ(config.num_key_value_heads, 2);
    EXPECT_EQ(config.head_dim, 16);
    EXPECT_EQ(config.max_position_embeddings, 2048);
    EXPECT_EQ(config.rms_norm_eps, 1e-5);
    EXPECT_TRUE(config.tie_word_embeddings);
    EXPECT_FALSE(config.attention_bias);
    EXPECT_EQ(config.rope.mode, RopeMode::kNormal);
    EXPECT_EQ(config.rope.scaling, RopeScaling::kNone);
    EXPECT_EQ(config.rope.theta, 500000.0);
    EXPECT_EQ(config.rope.rotary_dim, 16);
    EXPECT_EQ(config.eos_token_ids, std::vector<int64_t>{2});
    EXPECT_EQ(config.bos_token_id, 1);
  }
}

TEST(ModelConfig, FillsWhatMayBeAbsentAsTransformersDoes) {
  Json json = OldForm();
  for (const char* key :
       {"num_key_value_heads", "hidden_act", "rms_norm_eps", "rope_theta", "rope_scaling",
        "tie_word_embeddings", "attention_bias", "bos_token_id", "eos_token_id"}) {
    json.erase(key);
  }
  const ModelConfig config = ParseOk(json);
  EXPECT_EQ(config.num_key_value_heads, 4);
  EXPECT_EQ(config.rms_norm_eps, 1e-6);
  EXPECT_EQ(config.rope.theta, 10000.0);
  EXPECT_FALSE(config.tie_word_embeddings);
  EXPECT_TRUE(config.eos_token_ids.empty());
  EXPECT_EQ(config.bos_token_id, -1);
  EXPECT_EQ(ParseOk(With(OldForm(), "num_key_value_heads", nullptr)).num_key_value_heads, 4);
}

TEST(ModelConfig, TakesEndTokensFromTheGenerationConfigFirst) {
  EXPECT_EQ(ParseOk(With(OldForm(), "eos_token_id", {2, 7})).eos_token_ids,
            (std::vector<int64_t>{2, 7}));
  EXPECT_EQ(ParseOk(OldForm(), R"({"eos_token_id": [5, 6], "bos_token_id": 9})").eos_token_ids,
            (std::vector<int64_t>{5, 6}));
  EXPECT_EQ(ParseOk(OldForm(), R"({"eos_token_id": 8})").eos_token_ids, std::vector<int64_t>{8});
  EXPECT_EQ(ParseOk(OldForm(), R"({"bos_token_id": 9})").bos_token_id, 9);
  EXPECT_EQ(ParseOk(OldForm(), R"({"do_sample": true})").eos_token_ids, std::vector<int64_t>{2});
}

TEST(ModelConfig, ReadsLlama3Rope) {
  const Json scaling = {{"rope_type", "llama3"},
                        {"factor", 8.0},
                        {"low_freq_factor", 1.0},
                        {"high_freq_factor", 4.0},
                        {"original_max_position_embeddings", 512}};
  Json in_parameters = scaling;
  in_parameters["rope_theta"] = 500000.0;
  for (const Json& json : {With(OldForm(), "rope_scaling", scaling),
                           With(NewForm(), "rope_parameters", in_parameters)}) {
    const RopeOptions rope = ParseOk(json).rope;
    EXPECT_EQ(rope.scaling, RopeScaling::kLlama3);
    EXPECT_EQ(rope.theta, 500000.0);
    EXPECT_EQ(rope.factor, 8.0);
    EXPECT_EQ(rope.low_freq_factor, 1.0);
    EXPECT_EQ(rope.high_freq_factor, 4.0);
    EXPECT_EQ(rope.original_max_position_embeddings, 512);
  }
}

TEST(ModelConfig, ReadsLinearAndDynamicRopeUnderTheOldKeyToo) {
  const RopeOptions linear =
      ParseOk(With(OldForm(), "rope_scaling", {{"type", "linear"}, {"factor", 4}})).rope;
  EXPECT_EQ(linear.scaling, RopeScaling::kLinear);
  EXPECT_EQ(linear.factor, 4.0);
  const RopeOptions dynamic =
      ParseOk(With(OldForm(), "rope_scaling", {{"type", "dynamic"}, {"factor", 2.0}})).rope;
  EXPECT_EQ(dynamic.scaling, RopeScaling::kDynamic);
  EXPECT_EQ(dynamic.factor, 2.0);
  EXPECT_EQ(dynamic.original_max_position_embeddings, 2048);
  EXPECT_EQ(ParseOk(With(OldForm(), "rope_scaling", {{"type", "dynamic"}, {"factor", 2.5}}))
                .max_position_embeddings,
            5120);
}

TEST(ModelConfig, ReadsYarnRope) {
  const RopeOptions full = ParseOk(With(OldForm(), "rope_scaling",
                                        {{"rope_type", "yarn"},
                                         {"factor", 4.0},
                                         {"beta_fast", 16},
                                         {"beta_slow", 2},
                                         {"mscale", 0.7},
                                         {"mscale_all_dim", 0.8},
                                         {"attention_factor", 1.5},
                                         {"truncate", false},
                                         {"original_max_position_embeddings", 512}}))
                               .rope;
  EXPECT_EQ(full.scaling, RopeScaling::kYarn);
  EXPECT_EQ(full.factor, 4.0);
  EXPECT_EQ(full.beta_fast, 16.0);
  EXPECT_EQ(full.beta_slow, 2.0);
  EXPECT_EQ(full.mscale, 0.7);
  EXPECT_EQ(full.mscale_all_dim, 0.8);
  EXPECT_EQ(full.attention_factor, 1.5);
  EXPECT_FALSE(full.truncate);
  EXPECT_EQ(full.original_max_position_embeddings, 512);

  const RopeOptions ratio =
      ParseOk(With(OldForm(), "rope_scaling",
                   {{"rope_type", "yarn"}, {"original_max_position_embeddings", 512}}))
          .rope;
  EXPECT_EQ(ratio.factor, 4.0);
  EXPECT_EQ(ratio.beta_fast, 32.0);
  EXPECT_EQ(ratio.attention_factor, 0.0);
  EXPECT_TRUE(ratio.truncate);
}

// As published instructions have it: the object alone is added, so that the field stays behind.
TEST(ModelConfig, YarnReachesAsFarAsItsFactorSays) {
  const auto positions = [](const Json& scaling) {
    return ParseOk(With(OldForm(), "rope_scaling", scaling)).max_position_embeddings;
  };
  Json yarn{{"type", "yarn"}, {"factor", 4.0}, {"original_max_position_embeddings", 2048}};
  EXPECT_EQ(positions(yarn), 8192);
  yarn.erase("original_max_position_embeddings");
  EXPECT_EQ(positions(yarn), 8192);
  yarn["original_max_position_embeddings"] = 512;
  EXPECT_EQ(positions(yarn), 2048);
  yarn["original_max_position_embeddings"] = 100;
  EXPECT_EQ(positions(yarn), 2048);
}

TEST(ModelConfig, ReadsLongRope) {
  Json json = With(OldForm(), "rope_scaling",
                   {{"type", "longrope"},
                    {"short_factor", {1, 1, 1, 1, 1, 1, 1, 1.5}},
                    {"long_factor", {1, 2, 3, 4, 5, 6, 7, 8.5}}});
  json["original_max_position_embeddings"] = 1024;
  const RopeOptions rope = ParseOk(json).rope;
  EXPECT_EQ(rope.scaling, RopeScaling::kLongRope);
  EXPECT_EQ(rope.factor, 2.0);
  EXPECT_EQ(rope.original_max_position_embeddings, 1024);
  EXPECT_EQ(rope.short_factors, (std::vector<double>{1, 1, 1, 1, 1, 1, 1, 1.5}));
  EXPECT_EQ(rope.long_factors, (std::vector<double>{1, 2, 3, 4, 5, 6, 7, 8.5}));
}

TEST(ModelConfig, ReadsPartialRotaryFactorFromEitherPlace) {
  EXPECT_EQ(ParseOk(With(OldForm(), "partial_rotary_factor", 0.5)).rope.rotary_dim, 8);
  Json json = NewForm();
  json["rope_parameters"]["partial_rotary_factor"] = 0.25;
  EXPECT_EQ(ParseOk(json).rope.rotary_dim, 4);
}

// transformers 5 replaces rope_parameters by a rope_scaling that is there, and takes theta from
// where it stands.
TEST(ModelConfig, PrefersRopeScalingAsTransformersDoes) {
  Json json = NewForm();
  json["rope_scaling"] = {{"rope_type", "linear"}, {"factor", 3.0}};
  json["rope_theta"] = 70000.0;
  const RopeOptions rope = ParseOk(json).rope;
  EXPECT_EQ(rope.scaling, RopeScaling::kLinear);
  EXPECT_EQ(rope.theta, 70000.0);
}

struct BadField {
  const char* key;
  Json value;  // discarded: the field is removed
  const char* message;
};

TEST(ModelConfig, NamesFieldAndValueOfWhatIsOutOfRange) {
  const Json removed = Json(Json::value_t::discarded);
  const BadField cases[] = {
      {"architectures", removed, "\"architectures\" is missing"},
      {"architectures", Json::array(), ".architectures: the list is empty"},
      {"architectures", {3}, ".architectures[0]: expected a string, found 3"},
      {"vocab_size", removed, "\"vocab_size\" is missing"},
      {"vocab_size", 0, ".vocab_size: 0 is not in [1,"},
      {"vocab_size", "7", ".vocab_size: expected an integer"},
      {"vocab_size", 1e9, ".vocab_size: expected an integer"},
      {"hidden_size", -64, ".hidden_size: -64 is not in"},
      {"hidden_size", uint64_t{1} << 63, ".hidden_size: 9223372036854775808 is not in"},
      {"hidden_size", 66, ".head_dim: it is missing, and hidden_size 66"},
      {"intermediate_size", int64_t{1} << 40, ".intermediate_size: 1099511627776 is not in"},
      {"num_hidden_layers", 10001, ".num_hidden_layers: 10001 is not in [1, 10000]"},
      {"num_attention_heads", 0, ".num_attention_heads: 0 is not in"},
      {"num_key_value_heads", 3, ".num_key_value_heads: 3 does not divide"},
      {"num_key_value_heads", 8, ".num_key_value_heads: 8 does not divide"},
      {"head_dim", 15, "head_dim 15 with partial_rotary_factor"},
      {"head_dim", true, ".head_dim: expected an integer, found true"},
      {"max_position_embeddings", 0, ".max_position_embeddings: 0 is not in"},
      {"rms_norm_eps", -1e-6, ".rms_norm_eps: "},
      {"rms_norm_eps", 1, ".rms_norm_eps: "},
      {"hidden_act", "mish",
       ".hidden_act: \"mish\" is not known; known are silu, swish, gelu, gelu_new, "
       "gelu_pytorch_tanh, relu, relu2, quick_gelu"},
      {"quantization_config", "int8", ".quantization_config: expected an object"},
      {"quantization_config",
       {{"quant_method", "gptq"}},
       ".quantization_config: the field \"bits\" is missing"},
      {"tie_word_embeddings", "yes", ".tie_word_embeddings: expected true or false"},
      {"eos_token_id", 1000, ".eos_token_id: 1000 is not in [0, 999]"},
      {"eos_token_id", {1, "2"}, ".eos_token_id[1]: expected an integer"},
      {"bos_token_id", -2, ".bos_token_id: -2 is not in"},
      {"layer_types",
       {"full_attention", "linear_attention"},
       ".layer_types[1]: \"linear_attention\" is not known"},
      {"sliding_window", 0, ".sliding_window: 0 is not in"},
      {"rope_theta", -1.0, ".rope_theta: -1.0"},
      {"rope_theta", 0.5, ".rope_theta: 0.5"},
      {"partial_rotary_factor", 1.5, ".partial_rotary_factor: 1.5"},
      {"partial_rotary_factor", 0.01, "rotates 0 dimensions"},
      {"rope_scaling", "linear", ".rope_scaling: expected an object"},
      {"rope_scaling", {{"type", "ntk"}}, "\"ntk\" is no known scaling; known are default, linear"},
      {"rope_scaling", {{"type", "linear"}}, "\"factor\" is missing"},
      {"rope_scaling", {{"type", "linear"}, {"factor", 0}}, "factor"},
      {"rope_scaling", {{"type", "llama3"}, {"factor", 2}}, "\"low_freq_factor\" is missing"},
      {"rope_scaling",
       {{"type", "longrope"}, {"short_factor", {1}}, {"long_factor", {1}}},
       "short_factors is 1 entries long"},
      {"rope_parameters",
       {{"full_attention", {{"rope_type", "default"}}}},
       "rotary parameters per kind of layer"},
  };
  for (const BadField& bad : cases) {
    SCOPED_TRACE(std::string(bad.key) + " = " + (bad.value.is_discarded() ? "" : bad.value.dump()));
    Json json = OldForm();
    if (bad.value.is_discarded()) {
      json.erase(bad.key);
    } else {
      json[bad.key] = bad.value;
    }
    const auto config = Parse(json);
    ASSERT_FALSE(config.ok());
    EXPECT_EQ(config.status().code(), StatusCode::kBadArgument);
    const std::string message(config.status().message());
    EXPECT_NE(message.find("m/config.json"), std::string::npos) << message;
    EXPECT_NE(message.find(bad.message), std::string::npos) << message;
  }
}

TEST(ModelConfig, NamesTheGenerationConfig) {
  const auto config = Parse(OldForm(), R"({"eos_token_id": -7})");
  ASSERT_FALSE(config.ok());
  EXPECT_NE(config.status().message().find("m/generation_config.json.eos_token_id: -7"),
            std::string::npos)
      << config.status().ToString();
}

TEST(ModelConfig, RefusesTextThatIsNoJsonObject) {
  for (const std::string& text :
       {std::string(), std::string("{"), OldForm().dump() + "x",
        std::string(R"({"vocab_size":1,"vocab_size":2})"), std::string(100'000, '[')}) {
    const auto config = ParseModelConfig(text, "", "m/config.json");
    ASSERT_FALSE(config.ok()) << text.substr(0, 40);
    EXPECT_EQ(config.status().code(), StatusCode::kCorrupt) << config.status().ToString();
  }
  EXPECT_EQ(ParseModelConfig("[]", "", "m/config.json").status().code(), StatusCode::kBadArgument);
}

TEST(ModelConfig, ReadsNoFolderWithoutAConfig) {
  const auto config = ReadModelConfig("/nowhere/at all");
  ASSERT_FALSE(config.ok());
  EXPECT_EQ(config.status().code(), StatusCode::kNotFound);
  EXPECT_NE(config.status().message().find("/nowhere/at all: there is no config.json"),
            std::string::npos);
}

TEST(Architecture, IsFoundByNameOrListsTheKnownOnes) {
  for (const char* name :
       {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}) {
    const auto found = FindArchitecture(ParseOk(With(OldForm(), "architectures", {name})));
    ASSERT_TRUE(found.ok());
    EXPECT_EQ((*found)->name, name);
  }
  const auto unknown = FindArchitecture(ParseOk(With(OldForm(), "architectures", {"GPT2LMHead"})));
  ASSERT_FALSE(unknown.ok());
  EXPECT_EQ(unknown.status().code(), StatusCode::kBadArgument);
  EXPECT_EQ(unknown.status().message(),
            "m/config.json.architectures: \"GPT2LMHead\" is not known; known are LlamaForCausalLM, "
            "MistralForCausalLM, MixtralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, "
            "Qwen2MoeForCausalLM, Qwen3MoeForCausalLM, Phi3ForCausalLM, Gemma2ForCausalLM, "
            "Gemma3ForCausalLM, Gemma3ForConditionalGeneration, Mamba2ForCausalLM, "
            "Qwen3NextForCausalLM, DeepseekV2ForCausalLM, DeepseekV3ForCausalLM");
}

struct WindowCase {
  const Architecture& architecture;
  Json fields;
  std::vector<int64_t> windows;  // [layer]
};

TEST(Architecture, SaysWhichLayersHaveAWindow) {
  const Json types = {"full_attention", "sliding_attention"};
  const WindowCase cases[] = {
      {kLlama, {{"sliding_window", 100}}, {0, 0}},
      {kMistral, {{"sliding_window", nullptr}}, {0, 0}},
      {kMistral, {{"sliding_window", 2047}}, {2047, 2047}},
      {kMistral, {{"sliding_window", 2048}}, {0, 0}},  // all positions that there are
      {kMixtral, {{"sliding_window", 100}}, {100, 100}},
      {kPhi3, {{"sliding_window", 100}}, {100, 100}},
      {kQwen3Moe, {{"sliding_window", 100}}, {0, 0}},
      {kQwen2Moe, {{"sliding_window", 0}}, {0, 0}},  // as transformers 5 writes it
      {kQwen2, {{"sliding_window", 100}}, {0, 0}},
      {kQwen2, {{"sliding_window", 100}, {"use_sliding_window", true}}, {0, 0}},
      {kQwen2,
       {{"sliding_window", 100}, {"use_sliding_window", true}, {"max_window_layers", 0}},
       {100, 100}},
      {kQwen2,
       {{"sliding_window", 100}, {"use_sliding_window", true}, {"max_window_layers", 1}},
       {0, 100}},
      {kQwen3,
       {{"sliding_window", 100},
        {"use_sliding_window", true},
        {"max_window_layers", 0},
        {"layer_types", types}},
       {0, 100}},
      {kGemma2, {{"sliding_window", 100}}, {100, 0}},
      {kGemma2, {{"sliding_window", 100}, {"layer_types", types}}, {0, 100}},
      {kGemma3, {{"sliding_window", 100}}, {100, 100, 100, 100, 100, 0, 100}},
      {kGemma3, {{"sliding_window", 100}, {"sliding_window_pattern", 3}}, {100, 100, 0, 100}},
  };
  for (const WindowCase& window : cases) {
    SCOPED_TRACE(std::string(window.architecture.name) + " " + window.fields.dump());
    Json json = With(OldForm(), "architectures", {window.architecture.name});
    json["num_hidden_layers"] = window.windows.size();
    json.update(window.fields);
    if (window.architecture.is_gemma) json.erase("hidden_act");
    if (window.architecture.local_rope) json.erase("rope_scaling");
    const ModelConfig config = ParseOk(json);
    for (size_t layer = 0; layer < window.windows.size(); ++layer) {
      EXPECT_EQ(WindowOfLayer(window.architecture, config, static_cast<int64_t>(layer)),
                window.windows[layer])
          << layer;
    }
  }
}

Json GemmaForm(const std::string& name) {
  Json json = With(OldForm(), "architectures", {name});
  for (const char* const field :
       {"hidden_act", "rope_scaling", "rope_theta", "head_dim", "tie_word_embeddings"}) {
    json.erase(field);
  }
  return json;
}

TEST(ModelConfig, FillsWhatGemmaLeavesOut) {
  const ModelConfig config = ParseOk(GemmaForm("Gemma2ForCausalLM"));
  EXPECT_EQ(config.head_dim, 256);
  EXPECT_EQ(config.query_scalar, 256);
  EXPECT_EQ(config.window.size, 4096);
  EXPECT_EQ(config.attention_cap, 50);
  EXPECT_EQ(config.logit_cap, 30);
  EXPECT_TRUE(config.tie_word_embeddings);
  EXPECT_FALSE(config.local_rope.has_value());
  const ModelConfig third = ParseOk(GemmaForm("Gemma3ForCausalLM"));
  EXPECT_EQ(third.attention_cap, 0);
  EXPECT_EQ(third.logit_cap, 0);
  EXPECT_EQ(third.rope.theta, 1e6);
  ASSERT_TRUE(third.local_rope.has_value());
  EXPECT_EQ(third.local_rope->theta, 1e4);
}

TEST(ModelConfig, NullIsNoWindowForGemma) {
  for (const char* const name : {"Gemma2ForCausalLM", "Gemma3ForCausalLM"}) {
    const ModelConfig config = ParseOk(With(GemmaForm(name), "sliding_window", nullptr));
    EXPECT_FALSE(config.window.size.has_value()) << name;
    EXPECT_EQ(WindowOfLayer(*FindArchitecture(name), config, 0), 0) << name;
  }
}

TEST(ModelConfig, ReadsTheTwoRopesOfGemma3InBothForms) {
  Json old_form = GemmaForm("Gemma3ForCausalLM");
  old_form["rope_theta"] = 5e5;
  old_form["rope_local_base_freq"] = 2e4;
  old_form["rope_scaling"] = {{"rope_type", "linear"}, {"factor", 8.0}};
  Json new_form = GemmaForm("Gemma3ForCausalLM");
  new_form["rope_parameters"] = {
      {"full_attention", {{"rope_type", "linear"}, {"factor", 8.0}, {"rope_theta", 5e5}}},
      {"sliding_attention", {{"rope_type", "default"}, {"rope_theta", 2e4}}}};
  for (const Json& form : {old_form, new_form}) {
    const ModelConfig config = ParseOk(form);
    EXPECT_EQ(config.rope.theta, 5e5);
    EXPECT_EQ(config.rope.scaling, RopeScaling::kLinear);
    EXPECT_EQ(config.rope.factor, 8);
    EXPECT_EQ(config.local_rope->theta, 2e4);
    EXPECT_EQ(config.local_rope->scaling, RopeScaling::kNone);
  }
}

TEST(ModelConfig, NamesWhatGemmaMayNotSay) {
  const std::tuple<const char*, Json, const char*> cases[] = {
      {"hidden_activation", "mish", ".hidden_activation: \"mish\" is not known"},
      {"query_pre_attn_scalar", 0, ".query_pre_attn_scalar: 0.0"},
      {"attn_logit_softcapping", 50.0, "scores of this architecture have no cap"},
      {"final_logit_softcapping", -1.0, ".final_logit_softcapping: -1.0"},
      {"use_bidirectional_attention", true, ".use_bidirectional_attention: true"},
      {"layer_types", {"full_attention"}, ".layer_types: 1 entries for num_hidden_layers 2"},
  };
  for (const auto& [field, value, message] : cases) {
    const Json json = With(GemmaForm("Gemma3ForCausalLM"), field, value);
    const Result<ModelConfig> config = ParseModelConfig(json.dump(), "", "m/config.json");
    ASSERT_FALSE(config.ok()) << field;
    EXPECT_EQ(config.status().code(), StatusCode::kBadArgument);
    EXPECT_NE(config.status().message().find(message), std::string::npos)
        << config.status().ToString();
  }
}

// As the 4B model is published, whose object of the text model leaves out most fields.
Json TextPartForm() {
  return Json::parse(R"({
    "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
    "eos_token_id": [1, 106], "mm_tokens_per_image": 256, "image_token_index": 262144,
    "text_config": {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
                    "num_hidden_layers": 34, "sliding_window": 1024,
                    "rope_scaling": {"factor": 8.0, "rope_type": "linear"}},
    "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27}})");
}

TEST(ModelConfig, ReadsTheTextPartOfAModelThatKnowsImages) {
  const ModelConfig config = ParseOk(TextPartForm());
  EXPECT_EQ(config.vocab_size, 262'208);
  EXPECT_EQ(config.hidden_size, 2560);
  EXPECT_EQ(config.num_hidden_layers, 34);
  EXPECT_EQ(config.num_attention_heads, 8);
  EXPECT_EQ(config.num_key_value_heads, 4);
  EXPECT_EQ(config.head_dim, 256);
  EXPECT_EQ(config.max_position_embeddings, 131'072);
  EXPECT_EQ(config.rope.factor, 8);
  EXPECT_EQ(config.window.size, 1024);
  EXPECT_TRUE(config.tie_word_embeddings);
  EXPECT_EQ(config.eos_token_ids, (std::vector<int64_t>{1, 106}));
  EXPECT_EQ(config.bos_token_id, 2);
  EXPECT_FALSE(ParseOk(With(TextPartForm(), "tie_word_embeddings", false)).tie_word_embeddings);
  EXPECT_TRUE(ParseOk(With(TextPartForm(), "quantization_config",
                           {{"quant_method", "fp8"}, {"weight_block_size", {128, 128}}}))
                  .quantisation.has_value());
}

TEST(ModelConfig, NamesWhatTheTextPartMayNotSay) {
  const auto refusal = [](const Json& json) { return Parse(json).status().ToString(); };
  Json json = TextPartForm();
  json["text_config"]["num_attention_heads"] = 0;
  EXPECT_NE(refusal(json).find("m/config.json.text_config.num_attention_heads: 0 is not in"),
            std::string::npos)
      << refusal(json);
  for (const Json& text : {Json(3), Json::array(), Json("text")}) {
    json = With(TextPartForm(), "text_config", text);
    EXPECT_NE(refusal(json).find("m/config.json.text_config: expected an object"),
              std::string::npos)
        << refusal(json);
  }
  json.erase("text_config");
  EXPECT_NE(refusal(json).find("\"text_config\" is missing"), std::string::npos) << refusal(json);
}

TEST(ModelConfig, ReadsTheExpertsOfTheQwenFamily) {
  const Json second = With(OldForm(), "architectures", {"Qwen2MoeForCausalLM"});
  const ModelConfig filled = ParseOk(second);
  EXPECT_EQ(filled.experts.count, 60);
  EXPECT_EQ(filled.experts.per_token, 4);
  EXPECT_EQ(filled.experts.intermediate_size, 1408);
  EXPECT_EQ(filled.experts.shared_intermediate_size, 5632);
  EXPECT_TRUE(filled.experts.has_shared_gate);
  EXPECT_FALSE(filled.experts.normalises);
  EXPECT_EQ(filled.sparse_layers, (std::vector<uint8_t>{1, 1}));
  Json third = With(OldForm(), "architectures", {"Qwen3MoeForCausalLM"});
  third["shared_expert_intermediate_size"] = 64;
  EXPECT_EQ(ParseOk(third).experts.count, 128);
  EXPECT_EQ(ParseOk(third).experts.shared_intermediate_size, 0);
  third.update({{"num_local_experts", 6},
                {"norm_topk_prob", true},
                {"mlp_only_layers", {1}},
                {"num_experts_per_tok", 3}});
  const ModelConfig config = ParseOk(third);
  EXPECT_EQ(config.experts.count, 6);
  EXPECT_EQ(config.experts.per_token, 3);
  EXPECT_TRUE(config.experts.normalises);
  EXPECT_EQ(config.sparse_layers, (std::vector<uint8_t>{1, 0}));
}

TEST(ModelConfig, ReadsTheExpertsOfMixtral) {
  Json json = With(OldForm(), "architectures", {"MixtralForCausalLM"});
  for (const char* const field : {"rope_theta", "rope_scaling"}) json.erase(field);
  const ModelConfig filled = ParseOk(json);
  EXPECT_EQ(filled.experts.count, 8);
  EXPECT_EQ(filled.experts.per_token, 2);
  EXPECT_EQ(filled.experts.intermediate_size, filled.intermediate_size);
  EXPECT_EQ(filled.experts.shared_intermediate_size, 0);
  EXPECT_TRUE(filled.experts.normalises);
  EXPECT_EQ(filled.sparse_layers, (std::vector<uint8_t>{1, 1}));
  EXPECT_EQ(filled.rope.theta, 1e6);
  json.update({{"num_local_experts", 6}, {"num_experts_per_tok", 3}, {"rope_theta", 500.0}});
  const ModelConfig config = ParseOk(json);
  EXPECT_EQ(config.experts.count, 6);
  EXPECT_EQ(config.experts.per_token, 3);
  EXPECT_EQ(config.rope.theta, 500);
}

TEST(ModelConfig, NamesWhatExpertsAndPhi3MayNotSay) {
  const std::tuple<const char*, const char*, Json, const char*> cases[] = {
      {"MixtralForCausalLM", "num_experts_per_tok", 9, ".num_experts_per_tok: 9 is not in"},
      {"MixtralForCausalLM", "num_local_experts", -1, ".num_local_experts: -1 is not in"},
      {"Qwen3MoeForCausalLM", "num_experts", 1 << 20, ".num_experts: 1048576 is not in"},
      {"Qwen3MoeForCausalLM", "num_experts_per_tok", 129, ".num_experts_per_tok: 129 is not in"},
      {"Qwen2MoeForCausalLM", "moe_intermediate_size", 0, ".moe_intermediate_size: 0 is not in"},
      {"Qwen3MoeForCausalLM", "use_sliding_window", true, ".use_sliding_window: true; windows"},
      {"Phi3ForCausalLM",
       "rope_scaling",
       {{"type", "linear"}, {"factor", 2.0}},
       ".rope_scaling: it must be default or longrope"},
      {"Phi3ForCausalLM", "hidden_act", "mish", ".hidden_act: \"mish\" is not known"},
  };
  for (const auto& [name, field, value, message] : cases) {
    const Result<ModelConfig> config =
        Parse(With(With(OldForm(), "architectures", {name}), field, value));
    ASSERT_FALSE(config.ok()) << field;
    EXPECT_EQ(config.status().code(), StatusCode::kBadArgument);
    EXPECT_NE(config.status().message().find(message), std::string::npos)
        << config.status().ToString();
  }
}

}  // namespace
}  // namespace quire
