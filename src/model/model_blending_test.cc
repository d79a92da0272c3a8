// Forwards of whole models whose rows grow fewer. The oracle computes token by token with ordinary
// calls: each token is run behind the keys and values of the blend, then those of the layers behind
// the one in which it was left out are replaced by the moved ones.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>
#include <ostream>
#include <string>
#include <vector>

#include "model/testing/test_model.h"

namespace quire {
namespace {

using Ids = std::vector<int64_t>;
using Rows = std::vector<int32_t>;

constexpr int64_t kHeld = 11;  // tokens before the forward
constexpr int64_t kRows = 70;
constexpr int64_t kBlended = 0;  // sequences
constexpr int64_t kOther = 1;

struct Variant {
  std::string name;
  TestModel model;
  DType dtype = DType::kF32;
};
void PrintTo(const Variant& variant, std::ostream* out) { *out << variant.name; }

std::vector<Variant> Variants() {
  const TestModel llama{.num_hidden_layers = 4};
  const TestModel qwen{.architecture = "Qwen3ForCausalLM",
                       .hidden_size = 56,
                       .num_hidden_layers = 4,
                       .num_attention_heads = 3,
                       .num_key_value_heads = 1,
                       .head_dim = 12,
                       .tie_word_embeddings = true};
  const TestModel gemma2{.architecture = "Gemma2ForCausalLM",
                         .num_hidden_layers = 4,
                         .tie_word_embeddings = true,
                         .extra = {{"sliding_window", 20}, {"query_pre_attn_scalar", 24}}};
  const TestModel gemma3{
      .architecture = "Gemma3ForCausalLM",
      .num_hidden_layers = 4,
      .tie_word_embeddings = true,
      .extra = {
          {"sliding_window", 20}, {"sliding_window_pattern", 3}, {"query_pre_attn_scalar", 24}}};
  const TestModel deepseek{.architecture = "DeepseekV3ForCausalLM", .num_hidden_layers = 4};
  return {{"Llama", llama},
          {"LlamaBfloat16", llama, DType::kBF16},
          {"Qwen3", qwen},
          {"Gemma2", gemma2},
          {"Gemma3", gemma3},
          {"DeepseekV3", deepseek},
          {"DeepseekV3Bfloat16", deepseek, DType::kBF16}};
}

// Keys and values of some tokens in one layer.
struct Stored {
  Stored(const AttentionLayerSpec& of, int64_t tokens)
      : k_dim(of.num_kv_heads * of.qk_head_dim),
        v_dim(of.latent ? 0 : of.num_kv_heads * of.v_head_dim),
        spec(of),
        bytes(static_cast<size_t>(tokens * (k_dim + v_dim) * DTypeBytes(of.dtype))),
        count(tokens) {}
  LayerKV view(int64_t first, int64_t n) {
    const int64_t size = DTypeBytes(spec.dtype);
    LayerKV kv{.k = TensorView(bytes.data() + first * k_dim * size, spec.dtype,
                               {n, spec.num_kv_heads, spec.qk_head_dim})};
    if (!spec.latent)
      kv.v = TensorView(bytes.data() + (count * k_dim + first * v_dim) * size, spec.dtype,
                        {n, spec.num_kv_heads, spec.v_head_dim});
    return kv;
  }
  int64_t k_dim, v_dim;
  AttentionLayerSpec spec;
  std::vector<std::byte> bytes;
  int64_t count;
};

std::vector<Stored> Export(AttentionKVCache& cache, int64_t id, int64_t start, int64_t count) {
  std::vector<Stored> layers;
  for (size_t l = 0; l < cache.options().layers.size(); ++l) {
    Stored& stored = layers.emplace_back(cache.options().layers[l], count);
    const Status status = cache.ExportKV(id, static_cast<int64_t>(l), start, stored.view(0, count));
    EXPECT_TRUE(status.ok()) << status.ToString();
  }
  return layers;
}

class OneSource final : public MovedSource {
 public:
  explicit OneSource(std::vector<Stored>& layers) : layers_(layers) {}
  Result<std::span<const MovedRows>> Load(int64_t layer) override {
    rows_ = {.rows = {0, kRows}, .kv = layers_[static_cast<size_t>(layer)].view(0, kRows)};
    return std::span<const MovedRows>(&rows_, 1);
  }

 private:
  std::vector<Stored>& layers_;
  MovedRows rows_;
};

class MapHook final : public LayerHook {
 public:
  explicit MapHook(std::map<int64_t, Rows> chosen) : chosen_(std::move(chosen)) {}
  Result<RowSelection> BeforeAttention(int64_t layer, const FreshRows& fresh) override {
    EXPECT_EQ(fresh.seq_id, kBlended);
    return RowSelection{.selects = true, .rows = chosen_.at(layer)};
  }

 private:
  std::map<int64_t, Rows> chosen_;
};

class ModelBlending : public testing::TestWithParam<Variant> {
 protected:
  void SetUp() override {
    WriteTestModel(folder_, GetParam().model);
    runner_ = CreateThreadPool(2).value();
    model_ = LoadTestModel(folder_, GetParam().dtype, "", runner_);
    ASSERT_NE(model_, nullptr);
    vocab_ = model_->info().vocab_size;
    tokens_ = RandomTokens(kHeld + kRows, vocab_, 3);
    other_ = RandomTokens(30, vocab_, 4);
    // Other tokens at the same places, all of them held.
    const auto writer = CreateTestCache(*model_, {.page_size = 256, .runner = runner_});
    Build(*writer);
    std::vector<int32_t> moved = RandomTokens(kRows, vocab_, 5);
    moved_ = Run(*writer, moved);
  }
  std::unique_ptr<AttentionKVCache> MakeCache() {
    auto cache = CreateTestCache(*model_, {.page_size = 16, .runner = runner_});
    Build(*cache);
    return cache;
  }
  std::span<const int32_t> TokensAt(int64_t first, int64_t count) const {
    return std::span(tokens_).subspan(static_cast<size_t>(first), static_cast<size_t>(count));
  }
  // Logits of these rows of the blended sequence, then of the other's one. Check layers choose.
  Result<std::vector<float>> Blend(AttentionKVCache& cache, std::map<int64_t, Rows> chosen,
                                   const Rows& wanted) {
    Ids checks;
    for (const auto& [layer, rows] : chosen) checks.push_back(layer);
    MapHook hook(std::move(chosen));
    OneSource source(moved_);
    const BlendMember blend{kBlended, &hook, &source, checks};
    QUIRE_RETURN_IF_ERROR(
        cache.BeginBlendingForward(Ids{kOther, kBlended}, Ids{1, kRows}, {}, {&blend, 1}));
    std::vector<int32_t> tokens{other_.back()};
    tokens.insert(tokens.end(), tokens_.begin() + kHeld, tokens_.end());
    Ids rows{0};
    for (const int32_t row : wanted) rows.push_back(1 + row);
    std::vector<float> logits(rows.size() * static_cast<size_t>(vocab_));
    QUIRE_RETURN_IF_ERROR(model_->Forward(cache, tokens, rows, logits.data()));
    QUIRE_RETURN_IF_ERROR(cache.EndForward());
    return logits;
  }
  std::vector<float> OtherAlone() {
    const auto cache = MakeCache();
    return RunForward(*model_, *cache, kOther, std::span(&other_.back(), 1));
  }
  // Logits of the rows that go on to the end, row by row.
  std::vector<float> ComputeNaively(AttentionKVCache& cache,
                                    const std::map<int64_t, Rows>& chosen) {
    std::vector<float> all;
    for (int32_t row = 0; row < kRows; ++row) {
      const std::vector<float> logits =
          RunForward(*model_, cache, kBlended, TokensAt(kHeld + row, 1));
      int64_t last_fresh = -1;  // -1: all layers are
      for (const auto& [layer, rows] : chosen) {
        if (std::ranges::binary_search(rows, row)) continue;
        last_fresh = layer;
        break;
      }
      if (last_fresh < 0) {
        all.insert(all.end(), logits.begin(), logits.end());
        continue;
      }
      std::vector<Stored> fresh = Export(cache, kBlended, kHeld + row, 1);
      EXPECT_TRUE(cache.PopN(kBlended, 1).ok());
      KVBlock block;
      for (size_t l = 0; l < fresh.size(); ++l) {
        block.push_back(static_cast<int64_t>(l) <= last_fresh ? fresh[l].view(0, 1)
                                                              : moved_[l].view(row, 1));
      }
      EXPECT_TRUE(cache.ImportKV(kBlended, {&block, 1}).ok());
    }
    return all;
  }

  TestFolder folder_;
  std::shared_ptr<ParallelRunner> runner_;
  std::unique_ptr<Model> model_;
  int64_t vocab_ = 0;
  std::vector<int32_t> tokens_, other_;
  std::vector<Stored> moved_;  // [layer]

 private:
  void Build(AttentionKVCache& cache) {
    RunForward(*model_, cache, kBlended, TokensAt(0, kHeld));
    RunForward(*model_, cache, kOther, std::span(other_).first(other_.size() - 1));
  }
  // Appends the tokens in pieces that windows hold, and gives their keys and values.
  std::vector<Stored> Run(AttentionKVCache& cache, const std::vector<int32_t>& tokens) {
    std::vector<Stored> all;
    for (const AttentionLayerSpec& spec : cache.options().layers) all.emplace_back(spec, kRows);
    constexpr int64_t kPiece = 10;
    for (int64_t at = 0; at < kRows; at += kPiece) {
      RunForward(*model_, cache, kBlended,
                 std::span(tokens).subspan(static_cast<size_t>(at), kPiece));
      std::vector<Stored> piece = Export(cache, kBlended, kHeld + at, kPiece);
      for (size_t l = 0; l < all.size(); ++l) {
        const LayerKV from = piece[l].view(0, kPiece);
        const LayerKV to = all[l].view(at, kPiece);
        const auto size = static_cast<size_t>(DTypeBytes(all[l].spec.dtype));
        std::memcpy(to.k.data(), from.k.data(), static_cast<size_t>(kPiece * all[l].k_dim) * size);
        if (all[l].v_dim == 0) continue;
        std::memcpy(to.v.data(), from.v.data(), static_cast<size_t>(kPiece * all[l].v_dim) * size);
      }
    }
    return all;
  }
};

TEST_P(ModelBlending, WithAllRowsItIsAnOrdinaryForward) {
  Rows all(kRows);
  std::iota(all.begin(), all.end(), 0);
  const auto cache = MakeCache();
  const auto blended = Blend(*cache, {{1, all}, {2, all}}, all);
  ASSERT_TRUE(blended.ok()) << blended.status().ToString();
  const auto whole_cache = MakeCache();
  std::vector<float> whole = OtherAlone();
  const std::vector<float> rows =
      RunForward(*model_, *whole_cache, kBlended, TokensAt(kHeld, kRows));
  whole.insert(whole.end(), rows.begin(), rows.end());
  EXPECT_EQ(*blended, whole);
}

TEST_P(ModelBlending, RowsThatGoOnAreThoseOfTheNaiveOrder) {
  const std::vector<std::map<int64_t, Rows>> choices = {
      {{1, {2, 3, 4, 17, 40, 41, 69}}},
      {{0, {0, 69}}},
      {{1, {5, 6, 20, 33, 34, 35, 60, 69}}, {2, {6, 34, 35, 69}}},
      {{3, {1, 69}}}};
  for (const auto& chosen : choices) {
    SCOPED_TRACE(chosen.begin()->first);
    const Rows& left = chosen.rbegin()->second;
    const auto cache = MakeCache();
    const auto blended = Blend(*cache, chosen, left);
    ASSERT_TRUE(blended.ok()) << blended.status().ToString();
    const auto naive_cache = MakeCache();
    std::vector<float> wanted = OtherAlone();
    const std::vector<float> rows = ComputeNaively(*naive_cache, chosen);
    wanted.insert(wanted.end(), rows.begin(), rows.end());
    EXPECT_EQ(*blended, wanted);
    // And what follows them.
    EXPECT_EQ(RunForward(*model_, *cache, kBlended, std::span(other_).first(3)),
              RunForward(*model_, *naive_cache, kBlended, std::span(other_).first(3)));
  }
}

TEST_P(ModelBlending, LogitsOfARowThatWasLeftOutAreRefused) {
  const auto cache = MakeCache();
  const auto blended = Blend(*cache, {{1, {3, 69}}}, {4, 69});
  EXPECT_EQ(blended.status().code(), StatusCode::kBadArgument);
  EXPECT_NE(blended.status().message().find("logit_rows has 5"), std::string::npos)
      << blended.status().ToString();
  ASSERT_TRUE(cache->AbortForward().ok());
  EXPECT_TRUE(Blend(*cache, {{1, {3, 69}}}, {3, 69}).ok());
}

INSTANTIATE_TEST_SUITE_P(All, ModelBlending, testing::ValuesIn(Variants()),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace quire
