// Whole models of every architecture against the reference in double; loading; the checks of
// Forward.
#include "model/decoder.h"

#include <gtest/gtest.h>

#include <cmath>
#include <ostream>

#include "model/testing/llama_reference.h"
#include "model/testing/test_model.h"

namespace quire {
namespace {

// Differences over the spread of the logits.
struct Deviation {
  double max = 0;
  double rms = 0;
};

Deviation Compare(std::span<const float> logits, std::span<const double> expected) {
  double squares = 0;
  double error_squares = 0;
  double max = 0;
  for (size_t i = 0; i < logits.size(); ++i) {
    const double error = double{logits[i]} - expected[i];
    max = std::max(max, std::abs(error));
    error_squares += error * error;
    squares += expected[i] * expected[i];
  }
  const double scale = std::sqrt(squares / static_cast<double>(logits.size()));
  return {max / scale, std::sqrt(error_squares / static_cast<double>(logits.size())) / scale};
}

struct Case {
  std::string name;
  TestModel model;
  int64_t token_count = 40;
};

void PrintTo(const Case& test, std::ostream* out) { *out << test.name; }

std::vector<Case> Architectures() {
  return {
      {"Llama", {}},
      {"LlamaTied", {.num_key_value_heads = 4, .tie_word_embeddings = true}},
      {"LlamaBiases", {.attention_bias = true, .mlp_bias = true}},
      {"LlamaFloat16", {.dtype = DType::kF16}},
      {"LlamaBfloat16", {.dtype = DType::kBF16}},
      {"LlamaOddSizes",
       {.vocab_size = 67,
        .hidden_size = 30,
        .intermediate_size = 1101,
        .num_hidden_layers = 1,
        .num_attention_heads = 6,
        .num_key_value_heads = 2,
        .head_dim = 10}},
      {"LlamaTheta", {.extra = {{"rope_theta", 500000.0}}}},
      {"LlamaManySegments", {.num_hidden_layers = 1}, 300},
      {"Mistral", {.architecture = "MistralForCausalLM", .num_key_value_heads = 1}},
      {"Qwen2", {.architecture = "Qwen2ForCausalLM", .tie_word_embeddings = true}},
      {"Qwen3", {.architecture = "Qwen3ForCausalLM", .head_dim = 24}},
      {"Qwen3Biases", {.architecture = "Qwen3ForCausalLM", .attention_bias = true}},
  };
}

ModelOptions Options(DType dtype, const std::string& kernel_path) {
  ModelOptions options;
  options.dtype = dtype;
  options.kernel_path = kernel_path;
  return options;
}

double Theta(const TestModel& model) { return model.extra.value("rope_theta", 10000.0); }

class DecoderTest : public testing::TestWithParam<Case> {};

TEST_P(DecoderTest, AgreesWithTheReferenceInFloat32) {
  const TestModel& test_model = GetParam().model;
  const TestFolder folder;
  WriteTestModel(folder, test_model);
  const auto tokens = RandomTokens(GetParam().token_count, test_model.vocab_size, 5);
  const auto expected = ReferenceLogits(test_model, TestTensors(test_model),
                                        PlainRope(test_model.head_dim, Theta(test_model)), tokens);
  for (const std::string& path : KernelPaths()) {
    SCOPED_TRACE(path);
    const auto model = LoadTestModel(folder, DType::kF32, path);
    ASSERT_NE(model, nullptr);
    const auto cache = CreateTestCache(*model, {.kernel_path = path});
    ASSERT_NE(cache, nullptr);
    const Deviation deviation = Compare(RunForward(*model, *cache, 0, tokens), expected);
    EXPECT_LT(deviation.max, 1e-5);  // a rounding is 6e-8; seen are 1e-6 to 5e-6
  }
}

TEST_P(DecoderTest, AgreesWithTheReferenceInBfloat16) {
  TestModel test_model = GetParam().model;
  const TestFolder folder;
  WriteTestModel(folder, test_model);
  const auto tokens = RandomTokens(GetParam().token_count, test_model.vocab_size, 5);
  const auto expected = ReferenceLogits(test_model, TestTensors(test_model),
                                        PlainRope(test_model.head_dim, Theta(test_model)), tokens);
  const auto model = LoadTestModel(folder, DType::kBF16);
  ASSERT_NE(model, nullptr);
  const auto cache = CreateTestCache(*model, {});
  ASSERT_NE(cache, nullptr);
  const Deviation deviation = Compare(RunForward(*model, *cache, 0, tokens), expected);
  EXPECT_LT(deviation.rms, 0.02);  // a rounding is 2e-3; seen are 0.004 to 0.013
  EXPECT_GT(deviation.rms, 1e-5);  // it does round
}

TEST_P(DecoderTest, GivesTheSameBitsWithPackedWeights) {
  const TestFolder folder;
  WriteTestModel(folder, GetParam().model);
  const auto tokens = RandomTokens(GetParam().token_count, GetParam().model.vocab_size, 5);
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    SCOPED_TRACE(DTypeName(dtype));
    const TestFolder packed;
    PackTestModel(folder, dtype, packed);
    for (const std::string& path : KernelPaths()) {
      SCOPED_TRACE(path);
      std::vector<std::vector<float>> logits;
      for (const TestFolder* source : {&folder, &packed}) {
        const auto model = LoadTestModel(*source, dtype, path);
        ASSERT_NE(model, nullptr);
        const auto cache = CreateTestCache(*model, {.kernel_path = path});
        logits.push_back(RunForward(*model, *cache, 0, tokens));
      }
      EXPECT_TRUE(logits[0] == logits[1]);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Architectures, DecoderTest, testing::ValuesIn(Architectures()),
                         [](const auto& test) { return test.param.name; });

TEST(Decoder, ReadsShardsLikeASingleFile) {
  const TestModel test_model;
  const TestFolder whole;
  WriteTestModel(whole, test_model);
  const TestFolder sharded;
  const std::vector<TestTensor> tensors = TestTensors(test_model);
  nlohmann::json map;
  std::vector<TestTensor> shards[3];
  for (size_t i = 0; i < tensors.size(); ++i) {
    shards[i % 3].push_back(tensors[i]);
    map[tensors[i].name] = "shard-" + std::to_string(i % 3) + ".safetensors";
  }
  for (size_t i = 0; i < 3; ++i) {
    sharded.Write("shard-" + std::to_string(i) + ".safetensors", SafetensorsBytes(shards[i], i));
  }
  sharded.Write("model.safetensors.index.json", nlohmann::json({{"weight_map", map}}).dump());
  sharded.Write("config.json", TestConfig(test_model).dump());

  const auto tokens = RandomTokens(20, test_model.vocab_size, 5);
  std::vector<std::vector<float>> logits;
  for (const TestFolder* folder : {&whole, &sharded}) {
    const auto model = LoadTestModel(*folder, DType::kF32);
    ASSERT_NE(model, nullptr);
    const auto cache = CreateTestCache(*model, {});
    logits.push_back(RunForward(*model, *cache, 0, tokens));
  }
  EXPECT_EQ(logits[0], logits[1]);
}

TEST(Decoder, UsesTheScalingOfTheConfiguration) {
  const nlohmann::json scaling = {{"rope_type", "llama3"},
                                  {"factor", 8.0},
                                  {"low_freq_factor", 1.0},
                                  {"high_freq_factor", 4.0},
                                  {"original_max_position_embeddings", 32}};
  const TestModel test_model{.extra = {{"rope_scaling", scaling}}};
  const TestFolder folder;
  WriteTestModel(folder, test_model);
  RopeOptions options;
  options.mode = RopeMode::kNormal;
  options.scaling = RopeScaling::kLlama3;
  options.factor = 8.0;
  options.low_freq_factor = 1.0;
  options.high_freq_factor = 4.0;
  options.original_max_position_embeddings = 32;
  const auto frequencies = ComputeRopeFrequencies(options, test_model.head_dim, false);
  ASSERT_TRUE(frequencies.ok());
  const auto tokens = RandomTokens(60, test_model.vocab_size, 5);
  const auto expected = ReferenceLogits(test_model, TestTensors(test_model),
                                        {frequencies->inv_freq, frequencies->amplitude}, tokens);
  const auto model = LoadTestModel(folder, DType::kF32);
  ASSERT_NE(model, nullptr);
  const auto cache = CreateTestCache(*model, {});
  EXPECT_LT(Compare(RunForward(*model, *cache, 0, tokens), expected).max, 2e-5);
}

// With the identity as head, logits are the activations that enter it.
TEST(Decoder, RoundsActivationsThatEnterAProductInBfloat16Only) {
  const TestModel test_model{.vocab_size = 48, .hidden_size = 48};
  const TestFolder folder;
  WriteTestModel(folder, test_model);
  std::vector<TestTensor> tensors = TestTensors(test_model);
  ASSERT_EQ(tensors.back().name, "lm_head.weight");
  for (size_t i = 0; i < tensors.back().values.size(); ++i) {
    tensors.back().values[i] = i / 48 == i % 48 ? 1.0F : 0.0F;
  }
  folder.Write("model.safetensors", SafetensorsBytes(tensors));
  const auto tokens = RandomTokens(20, test_model.vocab_size, 5);
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const auto model = LoadTestModel(folder, dtype);
    ASSERT_NE(model, nullptr);
    const auto cache = CreateTestCache(*model, {});
    const auto logits = RunForward(*model, *cache, 0, tokens);
    EXPECT_EQ(logits == RoundedTo(DType::kBF16, logits), dtype == DType::kBF16);
  }
}

TEST(Decoder, DescribesTheModel) {
  const TestModel test_model{.tie_word_embeddings = true,
                             .dtype = DType::kBF16,
                             .extra = {{"eos_token_id", {3, 4}}, {"bos_token_id", 1}}};
  const TestFolder folder;
  WriteTestModel(folder, test_model);
  const auto model = LoadTestModel(folder, DType::kBF16);
  ASSERT_NE(model, nullptr);
  const ModelInfo& info = model->info();
  EXPECT_EQ(info.architecture, "LlamaForCausalLM");
  EXPECT_EQ(info.vocab_size, 101);
  EXPECT_EQ(info.hidden_size, 48);
  EXPECT_EQ(info.max_position_embeddings, 4096);
  EXPECT_EQ(info.eos_token_ids, (std::vector<int64_t>{3, 4}));
  EXPECT_EQ(info.bos_token_id, 1);
  const AttentionLayerSpec layer{4, 2, 16, 16, DType::kBF16};
  EXPECT_EQ(info.layers, (std::vector<AttentionLayerSpec>{layer, layer}));
  EXPECT_EQ(info.rope.mode, RopeMode::kNormal);
  int64_t parameters = 0;
  for (const TestTensor& tensor : TestTensors(test_model)) {
    parameters += static_cast<int64_t>(tensor.values.size());
  }
  EXPECT_EQ(info.parameter_count, parameters);
  EXPECT_GE(info.weight_bytes, 2 * parameters);
}

TEST(Decoder, NamesTheTensorThatIsMissing) {
  TestModel test_model;
  const TestFolder folder;
  WriteTestModel(folder, test_model);
  test_model.num_hidden_layers = 3;
  folder.Write("config.json", TestConfig(test_model).dump());
  const auto model = Model::Load(folder.path(), Options(DType::kF32, ""));
  ASSERT_FALSE(model.ok());
  EXPECT_EQ(model.status().code(), StatusCode::kNotFound);
  EXPECT_NE(model.status().message().find("\"model.layers.2.input_layernorm.weight\""),
            std::string::npos)
      << model.status().ToString();
}

TEST(Decoder, RefusesToLoadWhatItCannotCompute) {
  const TestFolder folder;
  WriteTestModel(folder, {.architecture = "GemmaForCausalLM"});  // the first, of other parts
  EXPECT_EQ(Model::Load(folder.path(), {}).status().code(), StatusCode::kBadArgument);
  WriteTestModel(folder, {});
  EXPECT_EQ(Model::Load(folder.path(), Options(DType::kF16, "")).status().code(),
            StatusCode::kBadArgument);
  EXPECT_EQ(Model::Load(folder.path(), Options(DType::kF32, "abacus")).status().code(),
            StatusCode::kBadArgument);
  EXPECT_EQ(Model::Load(folder.File("none"), {}).status().code(), StatusCode::kNotFound);
}

class ForwardChecks : public testing::Test {
 protected:
  void SetUp() override {
    WriteTestModel(folder_, test_model_);
    model_ = LoadTestModel(folder_, DType::kF32);
    ASSERT_NE(model_, nullptr);
    cache_ = CreateTestCache(*model_, {});
    ASSERT_NE(cache_, nullptr);
    ASSERT_TRUE(cache_->AddSequence(0).ok());
    logits_.resize(static_cast<size_t>(3 * test_model_.vocab_size));
  }

  void Begin(int64_t length) {
    const int64_t id = 0;
    ASSERT_TRUE(cache_->BeginForward(std::span(&id, 1), std::span(&length, 1)).ok());
  }
  Status Forward(const std::vector<int32_t>& tokens, const std::vector<int64_t>& rows) {
    return model_->Forward(*cache_, tokens, rows, logits_.data());
  }
  void ExpectBadArgument(const Status& status, std::string_view part) {
    EXPECT_EQ(status.code(), StatusCode::kBadArgument) << status.ToString();
    EXPECT_NE(status.message().find(part), std::string::npos) << status.ToString();
  }

  const TestModel test_model_ = {};
  TestFolder folder_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<AttentionKVCache> cache_;
  std::vector<float> logits_;
};

TEST_F(ForwardChecks, RefusesTokensOutsideTheVocabulary) {
  Begin(3);
  ExpectBadArgument(Forward({5, 101, 0}, {2}), "token_ids[1] is 101; the vocabulary has 101");
  ExpectBadArgument(Forward({5, 0, -1}, {2}), "token_ids[2] is -1");
}

TEST_F(ForwardChecks, RefusesAnotherNumberOfTokensThanWasBegun) {
  EXPECT_EQ(Forward({1, 2, 3}, {2}).code(), StatusCode::kBadState);
  Begin(3);
  ExpectBadArgument(Forward({1, 2}, {1}), "2 token ids for a forward of 3");
  ExpectBadArgument(Forward({1, 2, 3, 4}, {1}), "4 token ids for a forward of 3");
}

TEST_F(ForwardChecks, RefusesRowsThatDoNotAscend) {
  Begin(3);
  ExpectBadArgument(Forward({1, 2, 3}, {1, 1}), "logit_rows has 1 after 1");
  ExpectBadArgument(Forward({1, 2, 3}, {2, 1}), "logit_rows has 1 after 2");
  ExpectBadArgument(Forward({1, 2, 3}, {0, 3}), "logit_rows has 3 after 0");
  ExpectBadArgument(Forward({1, 2, 3}, {-1}), "logit_rows has -1");
  const int64_t row = 0;
  ExpectBadArgument(
      model_->Forward(*cache_, std::vector<int32_t>{1, 2, 3}, std::span(&row, 1), nullptr),
      "logits is null");
}

TEST_F(ForwardChecks, ARefusedForwardCanBeAbortedAndDoneAgain) {
  const uint64_t before = cache_->StateDigest();
  Begin(3);
  ASSERT_FALSE(Forward({5, 101, 0}, {2}).ok());
  ASSERT_TRUE(cache_->AbortForward().ok());
  EXPECT_EQ(cache_->StateDigest(), before);
  Begin(3);
  EXPECT_TRUE(Forward({5, 100, 0}, {}).ok());
  EXPECT_TRUE(cache_->EndForward().ok());
}

TEST_F(ForwardChecks, GivesTheRowsThatAreAskedFor) {
  const std::vector<int32_t> tokens = {7, 8, 9};
  const auto all = RunForward(*model_, *cache_, 1, tokens);
  Begin(3);
  ASSERT_TRUE(Forward(tokens, {0, 2}).ok());
  const auto vocab = static_cast<size_t>(test_model_.vocab_size);
  EXPECT_TRUE(std::equal(logits_.begin(), logits_.begin() + 101, all.begin()));
  EXPECT_TRUE(std::equal(logits_.begin() + 101, logits_.begin() + 202, all.begin() + 202));
  EXPECT_EQ(vocab, 101u);
}

}  // namespace
}  // namespace quire
