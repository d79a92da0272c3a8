#include "model/test_model.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <utility>

#include "base/random.h"

namespace quire {
namespace {

constexpr int64_t kMaxTestSequences = 80;
constexpr int64_t kTestChunk = 2048;

bool IsGemma(const TestModel& model) { return model.architecture.starts_with("Gemma"); }

// Appends tensors with values from one random stream.
class TensorMaker {
 public:
  explicit TensorMaker(const TestModel& model)
      : dtype_(model.dtype), is_gemma_(IsGemma(model)), random_(model.seed) {}

  std::vector<TestTensor> Take() { return std::move(tensors_); }

  void Add(const std::string& name, std::vector<int64_t> shape, double mean, double deviation) {
    const int64_t count =
        std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
    std::vector<float> values(static_cast<size_t>(count));
    for (float& value : values) value = static_cast<float>(mean + deviation * random_.Normal());
    tensors_.push_back({name, std::move(shape), RoundedTo(dtype_, values), dtype_});
  }
  void AddLinear(const std::string& name, int64_t n, int64_t k, bool bias) {
    Add(name + ".weight", {n, k}, 0.0, 1.0 / std::sqrt(static_cast<double>(k)));
    if (bias) Add(name + ".bias", {n}, 0.0, 0.3);
  }
  // Gemma's weights are what is added to one.
  void AddNorm(const std::string& name, int64_t size) {
    Add(name + ".weight", {size}, is_gemma_ ? 0.0 : 1.0, 0.2);
  }

 private:
  const DType dtype_;
  const bool is_gemma_;
  RandomSequence random_;
  std::vector<TestTensor> tensors_;
};

void AddLayer(const TestModel& model, const std::string& prefix, TensorMaker& maker) {
  const std::string attention = prefix + "self_attn.";
  const std::string mlp = prefix + "mlp.";
  const int64_t q_width = model.num_attention_heads * model.head_dim;
  const int64_t kv_width = model.num_key_value_heads * model.head_dim;
  const bool qkv_bias = model.attention_bias || model.architecture == "Qwen2ForCausalLM";
  maker.AddNorm(prefix + "input_layernorm", model.hidden_size);
  maker.AddLinear(attention + "q_proj", q_width, model.hidden_size, qkv_bias);
  maker.AddLinear(attention + "k_proj", kv_width, model.hidden_size, qkv_bias);
  maker.AddLinear(attention + "v_proj", kv_width, model.hidden_size, qkv_bias);
  maker.AddLinear(attention + "o_proj", model.hidden_size, q_width, model.attention_bias);
  if (model.architecture == "Qwen3ForCausalLM" || model.architecture == "Gemma3ForCausalLM") {
    maker.AddNorm(attention + "q_norm", model.head_dim);
    maker.AddNorm(attention + "k_norm", model.head_dim);
  }
  maker.AddNorm(prefix + "post_attention_layernorm", model.hidden_size);
  if (IsGemma(model)) {
    maker.AddNorm(prefix + "pre_feedforward_layernorm", model.hidden_size);
    maker.AddNorm(prefix + "post_feedforward_layernorm", model.hidden_size);
  }
  maker.AddLinear(mlp + "gate_proj", model.intermediate_size, model.hidden_size, model.mlp_bias);
  maker.AddLinear(mlp + "up_proj", model.intermediate_size, model.hidden_size, model.mlp_bias);
  maker.AddLinear(mlp + "down_proj", model.hidden_size, model.intermediate_size, model.mlp_bias);
}

}  // namespace

nlohmann::json TestConfig(const TestModel& model) {
  nlohmann::json config = {{"architectures", {model.architecture}},
                           {"vocab_size", model.vocab_size},
                           {"hidden_size", model.hidden_size},
                           {"intermediate_size", model.intermediate_size},
                           {"num_hidden_layers", model.num_hidden_layers},
                           {"num_attention_heads", model.num_attention_heads},
                           {"num_key_value_heads", model.num_key_value_heads},
                           {"head_dim", model.head_dim},
                           {"max_position_embeddings", 4096},
                           {"rms_norm_eps", 1e-5},
                           {"tie_word_embeddings", model.tie_word_embeddings},
                           {"attention_bias", model.attention_bias},
                           {"mlp_bias", model.mlp_bias}};
  config.update(model.extra);
  return config;
}

std::vector<TestTensor> TestTensors(const TestModel& model) {
  TensorMaker maker(model);
  // Tied heads give logits of the size of an embedding row, so rows must not be long.
  const double embedding_deviation =
      model.tie_word_embeddings ? 1.0 / std::sqrt(static_cast<double>(model.hidden_size)) : 1.0;
  maker.Add("model.embed_tokens.weight", {model.vocab_size, model.hidden_size}, 0.0,
            embedding_deviation);
  for (int64_t i = 0; i < model.num_hidden_layers; ++i) {
    AddLayer(model, "model.layers." + std::to_string(i) + ".", maker);
  }
  maker.AddNorm("model.norm", model.hidden_size);
  if (!model.tie_word_embeddings) {
    maker.AddLinear("lm_head", model.vocab_size, model.hidden_size, false);
  }
  return maker.Take();
}

void WriteTestModel(const TestFolder& folder, const TestModel& model) {
  folder.Write("config.json", TestConfig(model).dump());
  folder.Write("model.safetensors", SafetensorsBytes(TestTensors(model)));
}

std::unique_ptr<Model> LoadTestModel(const TestFolder& folder, DType dtype,
                                     const std::string& kernel_path,
                                     std::shared_ptr<ParallelRunner> runner) {
  auto model = Model::Load(
      folder.path(), {.dtype = dtype, .kernel_path = kernel_path, .runner = std::move(runner)});
  EXPECT_TRUE(model.ok()) << model.status().ToString();
  return model.ok() ? *std::move(model) : nullptr;
}

std::unique_ptr<AttentionKVCache> CreateTestCache(const Model& model,
                                                  const TestCacheOptions& options) {
  AttentionKVCacheOptions cache_options;
  cache_options.layers = model.info().layers;
  cache_options.max_num_sequences = kMaxTestSequences;
  cache_options.token_capacity = options.token_capacity;
  cache_options.prefill_chunk_size = kTestChunk;
  cache_options.page_size = options.page_size;
  cache_options.rope = model.info().rope;
  cache_options.kernel_path = options.kernel_path;
  cache_options.runner = options.runner;
  cache_options.poison_freed_pages = true;
  auto cache = AttentionKVCache::Create(std::move(cache_options));
  EXPECT_TRUE(cache.ok()) << cache.status().ToString();
  return cache.ok() ? *std::move(cache) : nullptr;
}

std::vector<float> RunForward(Model& model, AttentionKVCache& cache,
                              std::span<const TestInput> inputs) {
  std::vector<int64_t> ids;
  std::vector<int64_t> lengths;
  std::vector<int32_t> tokens;
  for (const TestInput& input : inputs) {
    if (!cache.HasSequence(input.seq_id)) {
      EXPECT_TRUE(cache.AddSequence(input.seq_id).ok());
    }
    ids.push_back(input.seq_id);
    lengths.push_back(static_cast<int64_t>(input.tokens.size()));
    tokens.insert(tokens.end(), input.tokens.begin(), input.tokens.end());
  }
  std::vector<int64_t> rows(tokens.size());
  std::iota(rows.begin(), rows.end(), 0);
  std::vector<float> logits(tokens.size() * static_cast<size_t>(model.info().vocab_size));
  const Status begun = cache.BeginForward(ids, lengths);
  EXPECT_TRUE(begun.ok()) << begun.ToString();
  const Status computed = model.Forward(cache, tokens, rows, logits.data());
  EXPECT_TRUE(computed.ok()) << computed.ToString();
  const Status ended = cache.EndForward();
  EXPECT_TRUE(ended.ok()) << ended.ToString();
  return logits;
}

std::vector<float> RunForward(Model& model, AttentionKVCache& cache, int64_t seq_id,
                              std::span<const int32_t> tokens) {
  const TestInput input{seq_id, tokens};
  return RunForward(model, cache, std::span(&input, 1));
}

std::vector<int32_t> RandomTokens(int64_t count, int64_t vocab_size, uint64_t seed) {
  RandomSequence random(seed, 7);
  std::vector<int32_t> tokens(static_cast<size_t>(count));
  for (int32_t& token : tokens) token = static_cast<int32_t>(random.Below(vocab_size));
  return tokens;
}

}  // namespace quire
