#include "model/testing/test_model.h"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <numeric>
#include <utility>

#include "base/random.h"

namespace quire {
namespace {

constexpr int64_t kMaxTestSequences = 80;
constexpr int64_t kTestChunk = 2048;

bool IsGemma(const TestModel& model) { return model.architecture.starts_with("Gemma"); }
bool IsMamba(const TestModel& model) { return model.architecture == "Mamba2ForCausalLM"; }
bool IsHybrid(const TestModel& model) { return model.architecture == "Qwen3NextForCausalLM"; }
bool IsPhi3(const TestModel& model) { return model.architecture == "Phi3ForCausalLM"; }
bool IsMixtral(const TestModel& model) { return model.architecture == "MixtralForCausalLM"; }
bool IsQwen2Moe(const TestModel& model) { return model.architecture == "Qwen2MoeForCausalLM"; }
bool IsQwen3Moe(const TestModel& model) { return model.architecture == "Qwen3MoeForCausalLM"; }
// The text part of a model that knows images.
bool IsTextPart(const TestModel& model) {
  return model.architecture == "Gemma3ForConditionalGeneration";
}
bool HasHeadNorms(const TestModel& model) {
  return model.architecture == "Qwen3ForCausalLM" || IsQwen3Moe(model) ||
         model.architecture.starts_with("Gemma3");
}
bool IsDeepseek(const TestModel& model) { return model.architecture.starts_with("Deepseek"); }

// Appends tensors with values from one random stream.
class TensorMaker {
 public:
  explicit TensorMaker(const TestModel& model)
      : dtype_(model.dtype), adds_to_one_(IsGemma(model) || IsHybrid(model)), random_(model.seed) {}

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
  // Some weights are what is added to one.
  void AddNorm(const std::string& name, int64_t size) {
    Add(name + ".weight", {size}, adds_to_one_ ? 0.0 : 1.0, 0.2);
  }
  // What recurrent layers keep of a token and how fast they forget it.
  void AddRates(const std::string& prefix, int64_t heads) {
    Add(prefix + "A_log", {heads}, -1.0, 0.7);
    Add(prefix + "dt_bias", {heads}, 0.0, 1.0);
  }
  void AddConvolution(const std::string& name, int64_t channels, int64_t width, bool bias) {
    Add(name + ".weight", {channels, 1, width}, 0.0, 1.0 / std::sqrt(static_cast<double>(width)));
    if (bias) Add(name + ".bias", {channels}, 0.0, 0.3);
  }
  void AddMlp(const std::string& prefix, int64_t hidden, int64_t intermediate, bool bias = false) {
    AddLinear(prefix + "gate_proj", intermediate, hidden, bias);
    AddLinear(prefix + "up_proj", intermediate, hidden, bias);
    AddLinear(prefix + "down_proj", hidden, intermediate, bias);
  }

 private:
  const DType dtype_;
  const bool adds_to_one_;
  RandomSequence random_;
  std::vector<TestTensor> tensors_;
};

// Sizes are read where a model finds them.
int64_t Size(const nlohmann::json& config, const char* field) {
  return config.at(field).get<int64_t>();
}

void AddExperts(const nlohmann::json& config, const std::string& prefix, TensorMaker& maker) {
  const int64_t hidden = Size(config, "hidden_size");
  maker.AddLinear(prefix + "gate", Size(config, "num_experts"), hidden, false);
  for (int64_t e = 0; e < Size(config, "num_experts"); ++e) {
    maker.AddMlp(prefix + "experts." + std::to_string(e) + ".", hidden,
                 Size(config, "moe_intermediate_size"));
  }
  if (!config.contains("shared_expert_intermediate_size")) return;
  maker.AddMlp(prefix + "shared_expert.", hidden, Size(config, "shared_expert_intermediate_size"));
  maker.AddLinear(prefix + "shared_expert_gate", 1, hidden, false);
}

void AddMixtralExperts(const nlohmann::json& config, const std::string& prefix,
                       TensorMaker& maker) {
  const int64_t hidden = Size(config, "hidden_size");
  const int64_t intermediate = Size(config, "intermediate_size");
  maker.AddLinear(prefix + "gate", Size(config, "num_local_experts"), hidden, false);
  for (int64_t e = 0; e < Size(config, "num_local_experts"); ++e) {
    const std::string expert = prefix + "experts." + std::to_string(e) + ".";
    maker.AddLinear(expert + "w1", intermediate, hidden, false);
    maker.AddLinear(expert + "w2", hidden, intermediate, false);
    maker.AddLinear(expert + "w3", intermediate, hidden, false);
  }
}

void AddPhi3Matrices(const TestModel& model, const std::string& prefix, TensorMaker& maker) {
  const int64_t q_width = model.num_attention_heads * model.head_dim;
  const int64_t kv_width = model.num_key_value_heads * model.head_dim;
  const int64_t hidden = model.hidden_size;
  maker.AddLinear(prefix + "self_attn.qkv_proj", q_width + 2 * kv_width, hidden, false);
  maker.AddLinear(prefix + "self_attn.o_proj", hidden, q_width, false);
  maker.AddLinear(prefix + "mlp.gate_up_proj", 2 * model.intermediate_size, hidden, false);
  maker.AddLinear(prefix + "mlp.down_proj", hidden, model.intermediate_size, false);
}

void AddPlainAttention(const TestModel& model, const std::string& attention, TensorMaker& maker) {
  const int64_t q_width = model.num_attention_heads * model.head_dim;
  const int64_t kv_width = model.num_key_value_heads * model.head_dim;
  const bool qkv_bias =
      model.attention_bias || model.architecture == "Qwen2ForCausalLM" || IsQwen2Moe(model);
  maker.AddLinear(attention + "q_proj", q_width, model.hidden_size, qkv_bias);
  maker.AddLinear(attention + "k_proj", kv_width, model.hidden_size, qkv_bias);
  maker.AddLinear(attention + "v_proj", kv_width, model.hidden_size, qkv_bias);
  maker.AddLinear(attention + "o_proj", model.hidden_size, q_width, model.attention_bias);
  if (!HasHeadNorms(model)) return;
  maker.AddNorm(attention + "q_norm", model.head_dim);
  maker.AddNorm(attention + "k_norm", model.head_dim);
}

void AddLayer(const TestModel& model, const nlohmann::json& config, const std::string& prefix,
              TensorMaker& maker) {
  maker.AddNorm(prefix + "input_layernorm", model.hidden_size);
  if (!IsPhi3(model)) AddPlainAttention(model, prefix + "self_attn.", maker);
  maker.AddNorm(prefix + "post_attention_layernorm", model.hidden_size);
  if (IsGemma(model)) {
    maker.AddNorm(prefix + "pre_feedforward_layernorm", model.hidden_size);
    maker.AddNorm(prefix + "post_feedforward_layernorm", model.hidden_size);
  }
  if (IsPhi3(model)) return AddPhi3Matrices(model, prefix, maker);
  if (IsQwen2Moe(model) || IsQwen3Moe(model)) return AddExperts(config, prefix + "mlp.", maker);
  if (IsMixtral(model)) return AddMixtralExperts(config, prefix + "block_sparse_moe.", maker);
  maker.AddMlp(prefix + "mlp.", model.hidden_size, model.intermediate_size, model.mlp_bias);
}

void AddStateSpaceLayer(const nlohmann::json& config, const std::string& prefix,
                        TensorMaker& maker) {
  const int64_t hidden = Size(config, "hidden_size");
  const int64_t heads = Size(config, "num_heads");
  const int64_t inner = heads * Size(config, "head_dim");
  const int64_t channels = inner + 2 * Size(config, "n_groups") * Size(config, "state_size");
  const bool bias = config.value("use_bias", false);
  const std::string mixer = prefix + "mixer.";
  maker.AddNorm(prefix + "norm", hidden);
  maker.AddLinear(mixer + "in_proj", inner + channels + heads, hidden, bias);
  maker.AddConvolution(mixer + "conv1d", channels, Size(config, "conv_kernel"),
                       config.value("use_conv_bias", true));
  maker.AddRates(mixer, heads);
  maker.Add(mixer + "D", {heads}, 1.0, 0.3);
  maker.AddNorm(mixer + "norm", inner);
  maker.AddLinear(mixer + "out_proj", hidden, inner, bias);
}

void AddGatedDelta(const nlohmann::json& config, const std::string& prefix, TensorMaker& maker) {
  const int64_t hidden = Size(config, "hidden_size");
  const int64_t value_heads = Size(config, "linear_num_value_heads");
  const int64_t keys = Size(config, "linear_num_key_heads") * Size(config, "linear_key_head_dim");
  const int64_t values = value_heads * Size(config, "linear_value_head_dim");
  maker.AddLinear(prefix + "in_proj_qkvz", 2 * keys + 2 * values, hidden, false);
  maker.AddLinear(prefix + "in_proj_ba", 2 * value_heads, hidden, false);
  maker.AddConvolution(prefix + "conv1d", 2 * keys + values, Size(config, "linear_conv_kernel_dim"),
                       false);
  maker.AddRates(prefix, value_heads);
  maker.Add(prefix + "norm.weight", {Size(config, "linear_value_head_dim")}, 1.0, 0.2);
  maker.AddLinear(prefix + "out_proj", hidden, values, false);
}

// Every second layer is one of attention, every first has experts.
void AddHybridLayer(const TestModel& model, int64_t index, const nlohmann::json& config,
                    const std::string& prefix, TensorMaker& maker) {
  const int64_t hidden = model.hidden_size;
  maker.AddNorm(prefix + "input_layernorm", hidden);
  if (config.at("layer_types").at(static_cast<size_t>(index)) == "full_attention") {
    const std::string attention = prefix + "self_attn.";
    const int64_t q_width = model.num_attention_heads * model.head_dim;
    const int64_t kv_width = model.num_key_value_heads * model.head_dim;
    maker.AddLinear(attention + "q_proj", 2 * q_width, hidden, false);
    maker.AddLinear(attention + "k_proj", kv_width, hidden, false);
    maker.AddLinear(attention + "v_proj", kv_width, hidden, false);
    maker.AddLinear(attention + "o_proj", hidden, q_width, false);
    maker.AddNorm(attention + "q_norm", model.head_dim);
    maker.AddNorm(attention + "k_norm", model.head_dim);
  } else {
    AddGatedDelta(config, prefix + "linear_attn.", maker);
  }
  maker.AddNorm(prefix + "post_attention_layernorm", hidden);
  if ((index + 1) % Size(config, "decoder_sparse_step") == 0) {
    AddExperts(config, prefix + "mlp.", maker);
  } else {
    maker.AddMlp(prefix + "mlp.", hidden, model.intermediate_size);
  }
}

void AddLatentAttention(const TestModel& model, const nlohmann::json& config,
                        const std::string& prefix, TensorMaker& maker) {
  const int64_t hidden = model.hidden_size;
  const int64_t heads = model.num_attention_heads;
  const int64_t nope = Size(config, "qk_nope_head_dim");
  const int64_t rope = Size(config, "qk_rope_head_dim");
  const int64_t value = Size(config, "v_head_dim");
  const int64_t kv_rank = Size(config, "kv_lora_rank");
  if (config.at("q_lora_rank").is_null()) {
    maker.AddLinear(prefix + "q_proj", heads * (nope + rope), hidden, false);
  } else {
    const int64_t q_rank = Size(config, "q_lora_rank");
    maker.AddLinear(prefix + "q_a_proj", q_rank, hidden, model.attention_bias);
    maker.AddNorm(prefix + "q_a_layernorm", q_rank);
    maker.AddLinear(prefix + "q_b_proj", heads * (nope + rope), q_rank, false);
  }
  maker.AddLinear(prefix + "kv_a_proj_with_mqa", kv_rank + rope, hidden, model.attention_bias);
  maker.AddNorm(prefix + "kv_a_layernorm", kv_rank);
  maker.AddLinear(prefix + "kv_b_proj", heads * (nope + value), kv_rank, false);
  maker.AddLinear(prefix + "o_proj", hidden, heads * value, model.attention_bias);
}

void AddGroupedExperts(const TestModel& model, const nlohmann::json& config,
                       const std::string& prefix, TensorMaker& maker) {
  const int64_t hidden = model.hidden_size;
  const int64_t count = Size(config, "n_routed_experts");
  const int64_t intermediate = Size(config, "moe_intermediate_size");
  maker.AddLinear(prefix + "gate", count, hidden, false);
  if (config.at("scoring_func") == "sigmoid") {
    maker.Add(prefix + "gate.e_score_correction_bias", {count}, 0.0, 0.3);
  }
  for (int64_t e = 0; e < count; ++e) {
    maker.AddMlp(prefix + "experts." + std::to_string(e) + ".", hidden, intermediate);
  }
  const int64_t shared = Size(config, "n_shared_experts");
  if (shared == 0) return;
  maker.AddMlp(prefix + "shared_experts.", hidden, shared * intermediate, model.mlp_bias);
}

void AddDeepseekLayer(const TestModel& model, int64_t index, const nlohmann::json& config,
                      const std::string& prefix, TensorMaker& maker) {
  maker.AddNorm(prefix + "input_layernorm", model.hidden_size);
  AddLatentAttention(model, config, prefix + "self_attn.", maker);
  maker.AddNorm(prefix + "post_attention_layernorm", model.hidden_size);
  if (index < Size(config, "first_k_dense_replace")) {
    maker.AddMlp(prefix + "mlp.", model.hidden_size, model.intermediate_size, model.mlp_bias);
  } else {
    AddGroupedExperts(model, config, prefix + "mlp.", maker);
  }
}

nlohmann::json DeepseekFields(const TestModel& model) {
  const bool has_bias = model.architecture == "DeepseekV3ForCausalLM";
  return {{"num_key_value_heads", model.num_attention_heads},
          {"q_lora_rank", 20},
          {"kv_lora_rank", 24},
          {"qk_nope_head_dim", 12},
          {"qk_rope_head_dim", 8},
          {"v_head_dim", 10},
          {"first_k_dense_replace", 1},
          {"n_routed_experts", 8},
          {"num_experts_per_tok", 3},
          {"moe_intermediate_size", 20},
          {"n_shared_experts", 2},
          {"n_group", 4},
          {"topk_group", 2},
          {"routed_scaling_factor", 1.5},
          {"norm_topk_prob", has_bias},
          {"scoring_func", has_bias ? "sigmoid" : "softmax"},
          {"topk_method", has_bias ? "noaux_tc" : "group_limited_greedy"}};
}

nlohmann::json StateSpaceFields() {
  return {{"num_heads", 6}, {"head_dim", 16},   {"state_size", 8},  {"n_groups", 2},
          {"expand", 2},    {"conv_kernel", 4}, {"use_bias", false}};
}

nlohmann::json ExpertFields(const TestModel& model) {
  nlohmann::json fields = {
      {"num_experts", 5}, {"num_experts_per_tok", 2}, {"moe_intermediate_size", 20}};
  if (IsQwen2Moe(model)) fields["shared_expert_intermediate_size"] = 28;
  return fields;
}

nlohmann::json HybridFields(int64_t layer_count) {
  nlohmann::json types = nlohmann::json::array();
  for (int64_t i = 0; i < layer_count; ++i) {
    types.push_back(i % 2 == 0 ? "linear_attention" : "full_attention");
  }
  return {{"layer_types", types},
          {"linear_num_key_heads", 2},
          {"linear_num_value_heads", 4},
          {"linear_key_head_dim", 8},
          {"linear_value_head_dim", 12},
          {"linear_conv_kernel_dim", 4},
          {"decoder_sparse_step", 2},
          {"num_experts", 5},
          {"num_experts_per_tok", 2},
          {"moe_intermediate_size", 20},
          {"shared_expert_intermediate_size", 28},
          {"partial_rotary_factor", 0.5}};
}

void AddAnyLayer(const TestModel& model, const nlohmann::json& config, int64_t index,
                 TensorMaker& maker) {
  const std::string number = std::to_string(index) + ".";
  if (IsMamba(model)) return AddStateSpaceLayer(config, "backbone.layers." + number, maker);
  const std::string prefix =
      (IsTextPart(model) ? "language_model." : "") + ("model.layers." + number);
  if (IsDeepseek(model)) return AddDeepseekLayer(model, index, config, prefix, maker);
  if (IsHybrid(model)) return AddHybridLayer(model, index, config, prefix, maker);
  AddLayer(model, config, prefix, maker);
}

}  // namespace

TestModel LongRopeModel(int64_t original_length) {
  TestModel model;
  std::vector<double> factors(static_cast<size_t>(model.head_dim / 2));
  std::iota(factors.begin(), factors.end(), 2.0);
  model.extra = {{"rope_scaling",
                  {{"type", "longrope"},
                   {"short_factor", std::vector<double>(factors.size(), 1.0)},
                   {"long_factor", factors},
                   {"original_max_position_embeddings", original_length}}}};
  return model;
}

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
  if (IsMamba(model)) config.update(StateSpaceFields());
  if (IsDeepseek(model)) config.update(DeepseekFields(model));
  if (IsHybrid(model)) config.update(HybridFields(model.num_hidden_layers));
  if (IsQwen2Moe(model) || IsQwen3Moe(model)) config.update(ExpertFields(model));
  if (IsMixtral(model)) config.update({{"num_local_experts", 5}, {"num_experts_per_tok", 2}});
  config.update(model.extra);
  if (!IsTextPart(model)) return config;
  config.erase("architectures");
  return {{"architectures", {model.architecture}},
          {"tie_word_embeddings", model.tie_word_embeddings},
          {"text_config", config}};
}

std::vector<TestTensor> TestTensors(const TestModel& model) {
  TensorMaker maker(model);
  // Tied heads give logits of the size of an embedding row, so rows must not be long.
  const double embedding_deviation =
      model.tie_word_embeddings ? 1.0 / std::sqrt(static_cast<double>(model.hidden_size)) : 1.0;
  const nlohmann::json config = TestConfig(model);
  const bool is_mamba = IsMamba(model);
  const std::string outer = IsTextPart(model) ? "language_model." : "";
  maker.Add(is_mamba ? "backbone.embeddings.weight" : outer + "model.embed_tokens.weight",
            {model.vocab_size, model.hidden_size}, 0.0, embedding_deviation);
  for (int64_t i = 0; i < model.num_hidden_layers; ++i) AddAnyLayer(model, config, i, maker);
  maker.AddNorm(is_mamba ? "backbone.norm_f" : outer + "model.norm", model.hidden_size);
  if (!model.tie_word_embeddings) {
    maker.AddLinear(outer + "lm_head", model.vocab_size, model.hidden_size, false);
  }
  return maker.Take();
}

void WriteTestModel(const TestFolder& folder, const TestModel& model) {
  folder.Write("config.json", TestConfig(model).dump());
  folder.Write("model.safetensors", SafetensorsBytes(TestTensors(model)));
}

void PackTestModel(const TestFolder& folder, DType dtype, const TestFolder& packed) {
  const Status status = Model::Pack(
      folder.path(), {.dtype = dtype, .kernel_path = "", .runner = CreateThreadPool(2).value()},
      packed.File("model.safetensors"));
  EXPECT_TRUE(status.ok()) << status.ToString();
  std::filesystem::copy_file(folder.File("config.json"), packed.File("config.json"));
}

std::unique_ptr<Model> LoadTestModel(const TestFolder& folder, DType dtype,
                                     const std::string& kernel_path,
                                     std::shared_ptr<ParallelRunner> runner, DType activations) {
  auto model = Model::Load(folder.path(), {.dtype = dtype,
                                           .activations = activations,
                                           .kernel_path = kernel_path,
                                           .runner = std::move(runner)});
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
