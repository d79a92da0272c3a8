// Models of all mixers, and of experts and fused inputs beside plain attention: nothing of how a
// text came into the caches can be seen in the logits after it, and what a model takes is known
// beforehand. That the logits are the right ones is shown against transformers
// (tests/python/hf/test_hf_logits.py).
#include "model/layers/mixer.h"

#include <gtest/gtest.h>

#include <numeric>
#include <ostream>

#include "base/random.h"
#include "model/decoder.h"
#include "model/testing/test_model.h"
#include "quire/composite_state.h"

namespace quire {
namespace {

using Tokens = std::vector<int32_t>;
using Logits = std::vector<float>;

constexpr int64_t kChunk = 512;

struct Kind {
  std::string name;
  TestModel model;
  DType dtype;
};

void PrintTo(const Kind& kind, std::ostream* out) { *out << kind.name; }

std::vector<Kind> Kinds() {
  const TestModel mamba{.architecture = "Mamba2ForCausalLM"};
  TestModel biased = mamba;
  biased.tie_word_embeddings = true;
  biased.extra = {{"use_bias", true},
                  {"use_conv_bias", false},
                  {"n_groups", 1},
                  {"time_step_limit", {0.2, {{"__float__", "Infinity"}}}}};
  const TestModel hybrid{.architecture = "Qwen3NextForCausalLM", .num_hidden_layers = 4};
  TestModel linear = hybrid;
  linear.extra = {{"layer_types", std::vector<std::string>(4, "linear_attention")},
                  {"num_experts", 0},
                  {"decoder_sparse_step", 100}};
  TestModel attention = hybrid;
  attention.extra = {{"layer_types", std::vector<std::string>(4, "full_attention")}};
  const TestModel latent{.architecture = "DeepseekV3ForCausalLM"};
  TestModel plain_queries{.architecture = "DeepseekV2ForCausalLM",
                          .tie_word_embeddings = true,
                          .attention_bias = true,
                          .mlp_bias = true};
  plain_queries.extra = {{"q_lora_rank", nullptr},
                         {"rope_scaling",
                          {{"type", "yarn"},
                           {"factor", 4.0},
                           {"original_max_position_embeddings", 64},
                           {"mscale", 0.7},
                           {"mscale_all_dim", 1.2}}}};
  TestModel many_heads{
      .architecture = "DeepseekV3ForCausalLM", .num_attention_heads = 12, .dtype = DType::kBF16};
  many_heads.extra = {{"rope_interleave", false}, {"v_head_dim", 28}, {"n_shared_experts", 0}};
  return {{"DeepseekV3", latent, DType::kF32},
          {"DeepseekV3Bfloat16", latent, DType::kBF16},
          {"DeepseekV2PlainQueriesYarn", plain_queries, DType::kF32},
          {"DeepseekV3ManyHeads", many_heads, DType::kBF16},
          {"Mamba2", mamba, DType::kF32},
          {"Mamba2Bfloat16", mamba, DType::kBF16},
          {"Mamba2BiasedTied", biased, DType::kF32},
          {"Qwen3Next", hybrid, DType::kF32},
          {"Qwen3NextBfloat16", hybrid, DType::kBF16},
          {"Qwen3NextLinearOnly", linear, DType::kF32},
          {"Qwen3NextAttentionOnly", attention, DType::kF32},
          {"Mixtral", {.architecture = "MixtralForCausalLM"}, DType::kF32},
          {"Qwen2Moe", {.architecture = "Qwen2MoeForCausalLM"}, DType::kF32},
          {"Qwen3MoeBfloat16", {.architecture = "Qwen3MoeForCausalLM"}, DType::kBF16},
          {"Phi3", {.architecture = "Phi3ForCausalLM"}, DType::kF32},
          {"Gemma3OfImages",
           {.architecture = "Gemma3ForConditionalGeneration", .tie_word_embeddings = true},
           DType::kF32}};
}

// A model with caches of its own.
struct Machine {
  Machine(const TestFolder& folder, DType dtype, int threads = 1, int64_t page_size = 16,
          const std::string& kernel_path = "") {
    const std::shared_ptr<ParallelRunner> runner = CreateThreadPool(threads).value();
    model = LoadTestModel(folder, dtype, kernel_path, runner);
    const ModelInfo& info = model->info();
    if (!info.layers.empty()) {
      attention = CreateTestCache(
          *model, {.page_size = page_size, .kernel_path = kernel_path, .runner = runner});
    }
    if (info.recurrent_layers.empty()) return;
    Result<std::unique_ptr<RecurrentCache>> created =
        RecurrentCache::Create({.layers = info.recurrent_layers,
                                .max_num_sequences = 8,
                                .prefill_chunk_size = kChunk,
                                .recent_checkpoints = 2,
                                .thinned_checkpoints = 2,
                                .kernel_path = kernel_path,
                                .runner = runner,
                                .poison_freed_slots = true});
    EXPECT_TRUE(created.ok()) << created.status().ToString();
    recurrent = *std::move(created);
    Result<std::unique_ptr<CompositeState>> joint =
        CompositeState::Create({.attention = attention, .recurrent = {recurrent}});
    EXPECT_TRUE(joint.ok()) << joint.status().ToString();
    composite = *std::move(joint);
  }

  KVState& state() { return composite != nullptr ? static_cast<KVState&>(*composite) : *attention; }
  // The logits of all tokens.
  Logits Run(std::span<const int64_t> ids, std::span<const Tokens> inputs) {
    std::vector<int64_t> lengths;
    Tokens tokens;
    for (const Tokens& input : inputs) {
      lengths.push_back(static_cast<int64_t>(input.size()));
      tokens.insert(tokens.end(), input.begin(), input.end());
    }
    std::vector<int64_t> rows(tokens.size());
    std::iota(rows.begin(), rows.end(), int64_t{0});
    Logits logits(tokens.size() * static_cast<size_t>(model->info().vocab_size), 7.0F);
    Status status = state().BeginForward(ids, lengths);
    EXPECT_TRUE(status.ok()) << status.ToString();
    status = model->Forward({attention.get(), recurrent.get()}, tokens, rows, logits.data());
    EXPECT_TRUE(status.ok()) << status.ToString();
    status = state().EndForward();
    EXPECT_TRUE(status.ok()) << status.ToString();
    return logits;
  }
  Logits Run(int64_t id, const Tokens& tokens) { return Run({&id, 1}, {&tokens, 1}); }
  // `tokens` of sequence `id` in pieces of at most `cut`.
  Logits RunInPieces(int64_t id, const Tokens& tokens, size_t cut) {
    Logits all;
    for (size_t at = 0; at < tokens.size(); at += cut) {
      const size_t end = std::min(tokens.size(), at + cut);
      const Logits piece = Run(id, Tokens(tokens.begin() + static_cast<std::ptrdiff_t>(at),
                                          tokens.begin() + static_cast<std::ptrdiff_t>(end)));
      all.insert(all.end(), piece.begin(), piece.end());
    }
    return all;
  }

  std::unique_ptr<Model> model;
  std::shared_ptr<AttentionKVCache> attention;
  std::shared_ptr<RecurrentCache> recurrent;
  std::unique_ptr<CompositeState> composite;
};

class MixerTest : public testing::TestWithParam<Kind> {
 protected:
  void SetUp() override {
    WriteTestModel(folder_, GetParam().model);
    tokens_ = RandomTokens(200, GetParam().model.vocab_size, 3);
    Machine machine = Make();
    EXPECT_TRUE(machine.state().AddSequence(0).ok());
    whole_ = machine.Run(0, tokens_);
  }
  Machine Make(int threads = 1, int64_t page_size = 16) {
    return Machine(folder_, GetParam().dtype, threads, page_size);
  }
  // The logits of tokens [begin, end) in one piece.
  Logits Whole(size_t begin, size_t end) const {
    const auto width = GetParam().model.vocab_size;
    return Logits(whole_.begin() + static_cast<std::ptrdiff_t>(begin) * width,
                  whole_.begin() + static_cast<std::ptrdiff_t>(end) * width);
  }
  Tokens Part(size_t begin, size_t end) const {
    return Tokens(tokens_.begin() + static_cast<std::ptrdiff_t>(begin),
                  tokens_.begin() + static_cast<std::ptrdiff_t>(end));
  }

  TestFolder folder_;
  Tokens tokens_;
  Logits whole_;
};

TEST_P(MixerTest, CutsOfThePromptCannotBeSeen) {
  for (const size_t cut : {1, 7, 64, 100}) {
    Machine machine = Make(cut % 2 == 0 ? 2 : 1, cut == 7 ? 3 : 16);
    ASSERT_TRUE(machine.state().AddSequence(5).ok());
    EXPECT_TRUE(machine.RunInPieces(5, tokens_, cut) == whole_) << "pieces of " << cut;
  }
}

TEST_P(MixerTest, NeighboursInTheBatchCannotBeSeen) {
  Machine machine = Make(2);
  const int64_t ids[] = {4, 0, 9};
  for (const int64_t id : ids) ASSERT_TRUE(machine.state().AddSequence(id).ok());
  const int64_t vocab_size = GetParam().model.vocab_size;
  const Tokens inputs[] = {RandomTokens(31, vocab_size, 8), Part(0, 120),
                           RandomTokens(70, vocab_size, 9)};
  const Logits logits = machine.Run(ids, inputs);
  const auto first = logits.begin() + 31 * vocab_size;
  EXPECT_TRUE(Logits(first, first + 120 * vocab_size) == Whole(0, 120));
  const Tokens next[] = {RandomTokens(1, vocab_size, 10), Part(120, 121), {3, 4}};
  const Logits decoded = machine.Run(ids, next);
  EXPECT_TRUE(Logits(decoded.begin() + vocab_size, decoded.begin() + 2 * vocab_size) ==
              Whole(120, 121));
}

TEST_P(MixerTest, PopsCannotBeSeen) {
  Machine machine = Make();
  ASSERT_TRUE(machine.state().AddSequence(0).ok());
  machine.Run(0, Part(0, 150));
  const Tokens other = RandomTokens(40, GetParam().model.vocab_size, 77);
  machine.Run(0, other);
  for (const int64_t n : {40, 1, 20}) {  // to 150, 149 and 130: after and between checkpoints
    ASSERT_TRUE(machine.state().PopN(0, n).ok()) << n;
  }
  EXPECT_TRUE(machine.RunInPieces(0, Part(129, 200), 30) == Whole(129, 200));
}

TEST_P(MixerTest, ForksCannotBeSeen) {
  Machine machine = Make();
  ASSERT_TRUE(machine.state().AddSequence(0).ok());
  machine.RunInPieces(0, Part(0, 180), 50);
  ASSERT_TRUE(machine.state().ForkSequence(0, 1).ok());
  ASSERT_TRUE(machine.state().ForkSequence(0, 2, 128).ok());
  ASSERT_TRUE(machine.state().ForkSequence(0, 3, 171).ok());
  machine.Run(2, RandomTokens(9, GetParam().model.vocab_size, 5));  // goes another way
  EXPECT_TRUE(machine.Run(3, Part(171, 200)) == Whole(171, 200));
  EXPECT_TRUE(machine.RunInPieces(1, Part(180, 200), 1) == Whole(180, 200));
  ASSERT_TRUE(machine.state().PopN(2, 9).ok());
  EXPECT_TRUE(machine.Run(2, Part(128, 200)) == Whole(128, 200));
  EXPECT_TRUE(machine.Run(0, Part(180, 200)) == Whole(180, 200));
}

TEST_P(MixerTest, PackedWeightsCannotBeSeen) {
  const TestFolder packed;
  PackTestModel(folder_, GetParam().dtype, packed);
  Machine machine(packed, GetParam().dtype);
  EXPECT_EQ(machine.model->info().weight_bytes, Make().model->info().weight_bytes);
  EXPECT_EQ(machine.model->info().parameter_count, Make().model->info().parameter_count);
  ASSERT_TRUE(machine.state().AddSequence(0).ok());
  EXPECT_TRUE(machine.Run(0, tokens_) == whole_);
}

TEST_P(MixerTest, MeasureTellsWhatLoadTakes) {
  Result<ModelMeasure> measure = Model::Measure(
      folder_.path(),
      {.dtype = GetParam().dtype, .kernel_path = "", .runner = CreateThreadPool(1).value()}, 200,
      200);
  ASSERT_TRUE(measure.ok()) << measure.status().ToString();
  Machine machine = Make();
  const ModelInfo& info = machine.model->info();
  EXPECT_EQ(measure->info.weight_bytes, info.weight_bytes);
  EXPECT_EQ(measure->info.parameter_count, info.parameter_count);
  EXPECT_TRUE(measure->info.layers == info.layers);
  EXPECT_TRUE(measure->info.recurrent_layers == info.recurrent_layers);
  ASSERT_TRUE(machine.state().AddSequence(0).ok());
  machine.Run(0, tokens_);
  EXPECT_EQ(dynamic_cast<Decoder&>(*machine.model).workspace_bytes(), measure->workspace_bytes);
}

TEST_P(MixerTest, RefusesWhatDoesNotFitTheForward) {
  Machine machine = Make();
  ASSERT_TRUE(machine.state().AddSequence(0).ok());
  const int64_t id = 0;
  const int64_t length = 2;
  ASSERT_TRUE(machine.state().BeginForward({&id, 1}, {&length, 1}).ok());
  const ModelState state{machine.attention.get(), machine.recurrent.get()};
  const auto refusal = [&](const ModelState& given, Tokens tokens, std::vector<int64_t> rows) {
    Logits logits(static_cast<size_t>(3 * GetParam().model.vocab_size));
    const Status status = machine.model->Forward(given, tokens, rows, logits.data());
    EXPECT_EQ(status.code(), StatusCode::kBadArgument) << status.ToString();
    return status.ToString();
  };
  EXPECT_NE(refusal(state, {1, 101}, {1}).find("token_ids[1] is 101"), std::string::npos);
  EXPECT_NE(refusal(state, {1, 2}, {2}).find("logit_rows has 2"), std::string::npos);
  const ModelState none(nullptr, nullptr);
  EXPECT_NE(refusal(none, {1, 2}, {1}).find("layers; give a"), std::string::npos);
}

INSTANTIATE_TEST_SUITE_P(Kinds, MixerTest, testing::ValuesIn(Kinds()),
                         [](const auto& test) { return test.param.name; });

// ---- Experts

TEST(SparseMlpTest, EveryKernelPathAndCutGivesTheSameBits) {
  TestModel qwen{.architecture = "Qwen3NextForCausalLM", .num_hidden_layers = 2};
  qwen.extra = {{"decoder_sparse_step", 1}, {"norm_topk_prob", false}};
  TestModel deepseek{.architecture = "DeepseekV3ForCausalLM", .num_hidden_layers = 2};
  deepseek.extra = {{"first_k_dense_replace", 0}};
  for (const TestModel& model : {qwen, deepseek}) {
    TestFolder folder;
    WriteTestModel(folder, model);
    const Tokens tokens = RandomTokens(40, model.vocab_size, 2);
    for (const std::string& path : KernelPaths()) {
      Machine whole(folder, DType::kF32, 1, 16, path);
      Machine pieces(folder, DType::kF32, 1, 16, path);
      ASSERT_TRUE(whole.state().AddSequence(0).ok());
      ASSERT_TRUE(pieces.state().AddSequence(0).ok());
      EXPECT_TRUE(whole.Run(0, tokens) == pieces.RunInPieces(0, tokens, 3)) << path;
    }
  }
}

// ---- Latent attention

TEST(LatentAttentionTest, KeepsOneVectorOfAToken) {
  TestFolder folder;
  WriteTestModel(folder, {.architecture = "DeepseekV3ForCausalLM"});
  const auto model = LoadTestModel(folder, DType::kBF16);
  ASSERT_NE(model, nullptr);
  const AttentionLayerSpec layer{.num_qo_heads = 4,
                                 .num_kv_heads = 1,
                                 .qk_head_dim = 32,
                                 .v_head_dim = 24,
                                 .dtype = DType::kBF16,
                                 .latent = true};
  EXPECT_EQ(model->info().layers, (std::vector<AttentionLayerSpec>{layer, layer}));
  EXPECT_EQ(model->info().rope.pairing, RopePairing::kInterleaved);
  EXPECT_EQ(model->info().rope.rotary_dim, 8);
}

}  // namespace
}  // namespace quire
