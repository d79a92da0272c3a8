// For tests: small random models of every architecture, and forwards over them.
#ifndef QUIRE_MODEL_TESTING_TEST_MODEL_H_
#define QUIRE_MODEL_TESTING_TEST_MODEL_H_

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "model/testing/test_checkpoint.h"
#include "quire/attention_kv_cache.h"
#include "quire/model.h"

namespace quire {

struct TestModel {
  std::string architecture = "LlamaForCausalLM";
  int64_t vocab_size = 101;
  int64_t hidden_size = 48;
  int64_t intermediate_size = 72;
  int64_t num_hidden_layers = 2;
  int64_t num_attention_heads = 4;
  int64_t num_key_value_heads = 2;
  int64_t head_dim = 16;
  bool tie_word_embeddings = false;
  bool attention_bias = false;
  bool mlp_bias = false;
  DType dtype = DType::kF32;                        // of the tensors
  nlohmann::json extra = nlohmann::json::object();  // more fields of config.json
  uint64_t seed = 1;
};

// With LongRoPE: other factors where a prompt has more than `original_length` tokens.
TestModel LongRopeModel(int64_t original_length);

nlohmann::json TestConfig(const TestModel& model);
// Random weights such that activations stay near 1; values are exact in the model's dtype.
std::vector<TestTensor> TestTensors(const TestModel& model);
// config.json and model.safetensors.
void WriteTestModel(const TestFolder& folder, const TestModel& model);

// The folder of the same model packed for `dtype`: `packed` gets config.json and model.safetensors.
void PackTestModel(const TestFolder& folder, DType dtype, const TestFolder& packed);

std::unique_ptr<Model> LoadTestModel(const TestFolder& folder, DType dtype,
                                     const std::string& kernel_path = "",
                                     std::shared_ptr<ParallelRunner> runner = nullptr,
                                     DType activations = DType::kI8);

struct TestCacheOptions {
  int64_t page_size = 16;
  int64_t token_capacity = 4096;
  std::string kernel_path = "";
  std::shared_ptr<ParallelRunner> runner = nullptr;
};
std::unique_ptr<AttentionKVCache> CreateTestCache(const Model& model,
                                                  const TestCacheOptions& options);

// New tokens of one sequence.
struct TestInput {
  int64_t seq_id;
  std::span<const int32_t> tokens;
};
// One forward; the logits of all rows, [rows, vocab_size]. Sequences that are not there are added.
std::vector<float> RunForward(Model& model, AttentionKVCache& cache,
                              std::span<const TestInput> inputs);
std::vector<float> RunForward(Model& model, AttentionKVCache& cache, int64_t seq_id,
                              std::span<const int32_t> tokens);

std::vector<int32_t> RandomTokens(int64_t count, int64_t vocab_size, uint64_t seed);

}  // namespace quire

#endif  // QUIRE_MODEL_TESTING_TEST_MODEL_H_
