// Models whose folders have float8 codes compute as those with the numbers stored: attention of
// both kinds, experts, biases, and what a folder is packed to.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "model/testing/raw_checkpoint.h"
#include "model/testing/test_model.h"
#include "tensor/float8.h"

namespace quire {
namespace {

constexpr int64_t kBlockOutputs = 16;
constexpr int64_t kBlockInputs = 24;

// A matrix as codes and scales into `codes`, and as their numbers into `plain`.
void AddTwice(const TestTensor& tensor, RawCheckpoint& codes, RawCheckpoint& plain) {
  const int64_t n = tensor.shape[0];
  const int64_t k = tensor.shape[1];
  const int64_t rows = (n + kBlockOutputs - 1) / kBlockOutputs;
  const int64_t columns = (k + kBlockInputs - 1) / kBlockInputs;
  const auto block_of = [&](int64_t i) {
    return static_cast<size_t>(i / k / kBlockOutputs * columns + i % k / kBlockInputs);
  };
  std::vector<float> scales(static_cast<size_t>(rows * columns));
  for (int64_t i = 0; i < n * k; ++i) {
    const float size = std::abs(tensor.values[static_cast<size_t>(i)]) / kF8E4M3Max;
    scales[block_of(i)] = std::max(scales[block_of(i)], size);
  }
  std::vector<uint8_t> bytes;
  std::vector<float> numbers;
  for (int64_t i = 0; i < n * k; ++i) {
    const float scale = scales[block_of(i)];
    bytes.push_back(F32ToF8E4M3(tensor.values[static_cast<size_t>(i)] / scale));
    numbers.push_back(F8E4M3ToF32(bytes.back()) * scale);
  }
  codes.Add(tensor.name, "F8_E4M3", tensor.shape, bytes);
  codes.Add(tensor.name + "_scale_inv", "F32", {rows, columns}, scales);
  plain.Add(tensor.name, "F32", tensor.shape, numbers);
}

// The folder of codes and that of numbers.
void WriteBoth(const TestModel& model, const TestFolder& codes_folder,
               const TestFolder& plain_folder) {
  RawCheckpoint codes;
  RawCheckpoint plain;
  for (const TestTensor& tensor : TestTensors(model)) {
    if (tensor.name.find("_proj") != std::string::npos && tensor.shape.size() == 2) {
      AddTwice(tensor, codes, plain);
      continue;
    }
    codes.Add(tensor.name, "F32", tensor.shape, tensor.values);
    plain.Add(tensor.name, "F32", tensor.shape, tensor.values);
  }
  codes.Write(codes_folder);
  plain.Write(plain_folder);
  plain_folder.Write("config.json", TestConfig(model).dump());
  TestModel quantised = model;
  quantised.extra["quantization_config"] = {{"quant_method", "fp8"},
                                            {"fmt", "e4m3"},
                                            {"activation_scheme", "dynamic"},
                                            {"weight_block_size", {kBlockOutputs, kBlockInputs}}};
  codes_folder.Write("config.json", TestConfig(quantised).dump());
}

// Logits of a prompt, and of a few tokens after it.
std::pair<std::vector<float>, std::vector<float>> Logits(const TestFolder& folder, DType dtype) {
  const auto model = LoadTestModel(folder, dtype);
  const auto cache = CreateTestCache(*model, {});
  const std::vector<int32_t> tokens = RandomTokens(60, 101, 3);
  const std::span<const int32_t> all(tokens);
  std::vector<float> prompt = RunForward(*model, *cache, 0, all.first(57));
  return {std::move(prompt), RunForward(*model, *cache, 0, all.subspan(57))};
}

int64_t Float8Bytes(const ModelInfo& info) {
  const auto found = std::ranges::find(info.weight_types, "float8_e4m3fn", &WeightType::name);
  return found == info.weight_types.end() ? 0 : found->bytes;
}

TEST(Float8Model, ComputesAsTheNumbersStored) {
  const TestModel models[] = {{.attention_bias = true, .mlp_bias = true},
                              {.architecture = "DeepseekV3ForCausalLM", .num_hidden_layers = 3},
                              {.architecture = "Qwen3ForCausalLM"}};
  for (const TestModel& model : models) {
    const TestFolder codes;
    const TestFolder plain;
    WriteBoth(model, codes, plain);
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      SCOPED_TRACE(model.architecture + " " + std::string(DTypeName(dtype)));
      const auto expected = Logits(plain, dtype);
      EXPECT_EQ(Logits(codes, dtype), expected);
      const TestFolder packed;
      PackTestModel(codes, dtype, packed);
      EXPECT_EQ(Logits(packed, dtype), expected);
      const int64_t bytes = Float8Bytes(LoadTestModel(codes, dtype)->info());
      EXPECT_GT(bytes, 0);
      EXPECT_EQ(bytes, Float8Bytes(LoadTestModel(packed, dtype)->info()));
    }
  }
}

}  // namespace
}  // namespace quire
