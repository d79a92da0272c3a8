// The promise of exactness on whole-model logits: the logits of a token are equal bit for bit,
// whatever else is computed with it and however its sequence came to be. The yardstick is each
// prompt alone, in one piece, in pages of 16, on one thread.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <map>
#include <ostream>

#include "base/random.h"
#include "model/testing/test_gguf.h"
#include "model/testing/test_model.h"

namespace quire {
namespace {

constexpr int64_t kPrompts = 64;

struct Variant {
  std::string name;
  DType dtype;
  std::string kernel_path;
  TestModel model;
  std::vector<WeightFormat> formats = {};  // not empty: of a GGUF file
  DType activations = DType::kI8;
};

std::vector<Variant> Variants() {
  std::vector<Variant> variants;
  for (const std::string& path : KernelPaths()) {
    variants.push_back({"Float32_" + path, DType::kF32, path, {}});
    variants.push_back({"Bfloat16_" + path, DType::kBF16, path, {.dtype = DType::kBF16}});
  }
  const TestModel qwen{.architecture = "Qwen3ForCausalLM",
                       .hidden_size = 56,
                       .intermediate_size = 1100,
                       .num_attention_heads = 3,
                       .num_key_value_heads = 1,
                       .head_dim = 12,
                       .tie_word_embeddings = true,
                       .dtype = DType::kF16};
  variants.push_back({"Float32_Qwen3Float16", DType::kF32, "", qwen});
  variants.push_back({"Bfloat16_Qwen3Float16", DType::kBF16, "", qwen});
  const TestModel quantised{
      .hidden_size = 256, .intermediate_size = 512, .head_dim = 64, .tie_word_embeddings = true};
  std::vector<WeightFormat> all;
  for (const WeightFormat format : kWeightFormats) {
    if (!IsOfGguf(format)) continue;
    all.push_back(format);
    const std::string name(WeightFormatName(format));
    variants.push_back({"Bfloat16_" + name, DType::kBF16, "", quantised, {format}});
  }
  // Parts of one matrix in different formats, on every path.
  TestModel mixed = quantised;
  mixed.tie_word_embeddings = false;
  for (const std::string& path : KernelPaths()) {
    variants.push_back({"Float32_Mixed_" + path, DType::kF32, path, mixed, all});
    variants.push_back(
        {"Bfloat16_MixedRowsBfloat16_" + path, DType::kBF16, path, mixed, all, DType::kBF16});
  }
  variants.push_back({"Bfloat16_MixedRowsFloat32", DType::kBF16, "", mixed, all, DType::kF32});
  const TestModel deepseek{.architecture = "DeepseekV3ForCausalLM"};
  variants.push_back({"Bfloat16_DeepseekV3", DType::kBF16, "", deepseek});
  return variants;
}

void PrintTo(const Variant& variant, std::ostream* out) { *out << variant.name; }

class ModelExactness : public testing::TestWithParam<Variant> {
 protected:
  void SetUp() override {
    if (GetParam().formats.empty()) {
      WriteTestModel(folder_, GetParam().model);
    } else {
      WriteGgufModel(folder_, GetParam().model, GetParam().formats);
    }
    one_thread_ = CreateThreadPool(1).value();
    two_threads_ = CreateThreadPool(2).value();
    model_ = Load(one_thread_);
    ASSERT_NE(model_, nullptr);
    vocab_ = static_cast<size_t>(model_->info().vocab_size);
    MakePrompts();
    for (const auto& prompt : prompts_) {
      const auto cache = Cache();
      alone_.push_back(RunForward(*model_, *cache, 0, prompt));
    }
  }

  // Lengths from 1 to 40; every fourth prompt begins like the first, so that batches have sharers
  // after forks and without.
  void MakePrompts() {
    RandomSequence random(3);
    for (int64_t i = 0; i < kPrompts; ++i) {
      const int64_t length = i == 0 ? 40 : 1 + random.Below(40);
      prompts_.push_back(RandomTokens(length, model_->info().vocab_size, 100 + i));
      if (i % 4 != 0) continue;
      const size_t shared = std::min<size_t>(prompts_.back().size(), 20);
      std::copy_n(prompts_.front().begin(), shared, prompts_.back().begin());
    }
  }

  std::unique_ptr<Model> Load(std::shared_ptr<ParallelRunner> runner) {
    return LoadTestModel(folder_, GetParam().dtype, GetParam().kernel_path, std::move(runner),
                         GetParam().activations);
  }
  std::unique_ptr<AttentionKVCache> Cache(int64_t page_size = 16,
                                          std::shared_ptr<ParallelRunner> runner = nullptr) {
    return CreateTestCache(*model_, {.page_size = page_size,
                                     .token_capacity = 8192,
                                     .kernel_path = GetParam().kernel_path,
                                     .runner = runner != nullptr ? runner : one_thread_});
  }

  // Bits, so that equal NaNs are equal and 0 and -0 are not.
  static bool SameBits(std::span<const float> a, std::span<const float> b) {
    return std::ranges::equal(a, b, [](float x, float y) {
      return std::bit_cast<uint32_t>(x) == std::bit_cast<uint32_t>(y);
    });
  }
  // The rows of tokens [begin, begin + logits) of a prompt.
  void ExpectAsAlone(size_t prompt, size_t begin, std::span<const float> logits) {
    const std::span<const float> expected(alone_[prompt]);
    EXPECT_TRUE(SameBits(logits, expected.subspan(begin * vocab_, logits.size())))
        << "prompt " << prompt << " from token " << begin;
  }

  std::span<const int32_t> Part(size_t prompt, size_t begin, size_t end) const {
    return std::span<const int32_t>(prompts_[prompt]).subspan(begin, end - begin);
  }

  // Tokens [begin, end) of one prompt in one forward; checks their logits.
  void RunPart(Model& model, AttentionKVCache& cache, int64_t seq_id, size_t prompt, size_t begin,
               size_t end) {
    ExpectAsAlone(prompt, begin, RunForward(model, cache, seq_id, Part(prompt, begin, end)));
  }

  // Everything at once: a batch of the first `count` prompts from where each of them is.
  void RunBatch(Model& model, AttentionKVCache& cache, const std::map<size_t, size_t>& begins,
                const std::map<size_t, size_t>& ends) {
    std::vector<TestInput> inputs;
    for (const auto& [prompt, begin] : begins) {
      inputs.push_back({static_cast<int64_t>(prompt), Part(prompt, begin, ends.at(prompt))});
    }
    const auto logits = RunForward(model, cache, inputs);
    size_t row = 0;
    for (const TestInput& input : inputs) {
      const auto prompt = static_cast<size_t>(input.seq_id);
      const auto rows = std::span(logits).subspan(row * vocab_, input.tokens.size() * vocab_);
      ExpectAsAlone(prompt, begins.at(prompt), rows);
      row += input.tokens.size();
    }
  }

  TestFolder folder_;
  std::shared_ptr<ParallelRunner> one_thread_;
  std::shared_ptr<ParallelRunner> two_threads_;
  std::unique_ptr<Model> model_;
  size_t vocab_ = 0;
  std::vector<std::vector<int32_t>> prompts_;
  std::vector<std::vector<float>> alone_;  // [prompt][token][vocab]
};

TEST_P(ModelExactness, AloneOrInABatchOf2To64) {
  for (const size_t size : {2, 3, 4, 7, 8, 15, 16, 17, 31, 33, 63, 64}) {
    SCOPED_TRACE(size);
    std::map<size_t, size_t> begins;
    std::map<size_t, size_t> ends;
    for (size_t i = 0; i < size; ++i) {
      begins[i] = 0;
      ends[i] = prompts_[i].size();
    }
    RunBatch(*model_, *Cache(), begins, ends);
  }
}

TEST_P(ModelExactness, InOnePieceOrCutAnywhere) {
  const size_t length = prompts_[0].size();
  for (size_t cut = 1; cut < length; ++cut) {
    const auto cache = Cache();
    RunPart(*model_, *cache, 0, 0, 0, cut);
    RunPart(*model_, *cache, 0, 0, cut, length);
  }
  const auto cache = Cache();
  for (size_t i = 0; i < length; ++i) RunPart(*model_, *cache, 0, 0, i, i + 1);
}

// Chunks, decodes and fresh prompts mixed in each batch, as a server does it, on every page size
// and on one and two threads.
TEST_P(ModelExactness, InMixedBatchesOnAnyPageSizeAndThreads) {
  const auto two_thread_model = Load(two_threads_);
  ASSERT_NE(two_thread_model, nullptr);
  for (const int64_t page_size : {1, 3, 16, 64}) {
    for (const bool two : {false, true}) {
      SCOPED_TRACE("page size " + std::to_string(page_size) + (two ? ", two threads" : ""));
      const auto cache = Cache(page_size, two ? two_threads_ : one_thread_);
      RandomSequence random(static_cast<uint64_t>(page_size));
      std::vector<size_t> done(24, 0);
      for (;;) {
        std::map<size_t, size_t> begins;
        std::map<size_t, size_t> ends;
        for (size_t i = 0; i < done.size(); ++i) {
          const auto left = static_cast<int64_t>(prompts_[i].size() - done[i]);
          if (left == 0 || random.Below(3) == 0) continue;
          const int64_t step = random.Below(2) == 0 ? 1 : 1 + random.Below(left);
          begins[i] = done[i];
          ends[i] = done[i] + static_cast<size_t>(step);
        }
        for (const auto& [prompt, end] : ends) done[prompt] = end;
        if (!begins.empty()) RunBatch(two ? *two_thread_model : *model_, *cache, begins, ends);
        const auto finished = [&](size_t i) { return done[i] == prompts_[i].size(); };
        size_t left = 0;
        for (size_t i = 0; i < done.size(); ++i) left += finished(i) ? 0 : 1;
        if (left == 0) break;
      }
    }
  }
}

TEST_P(ModelExactness, FreshOrForkedAtAnyToken) {
  const size_t shared = 20;  // prompts 0 and 4 agree that far, or as far as 4 goes
  for (const size_t other : {size_t{4}, size_t{8}, size_t{12}}) {
    const size_t common = std::min(shared, prompts_[other].size());
    for (size_t fork = 1; fork < common; ++fork) {
      const auto cache = Cache();
      RunPart(*model_, *cache, 0, 0, 0, 30);
      ASSERT_TRUE(cache->ForkSequence(0, 1, static_cast<int64_t>(fork)).ok());
      RunPart(*model_, *cache, 1, other, fork, prompts_[other].size());
      RunPart(*model_, *cache, 0, 0, 30, prompts_[0].size());
      ASSERT_TRUE(cache->CheckInvariants().ok());
    }
  }
}

TEST_P(ModelExactness, SharersOfAPrefixInOneBatch) {
  const auto long_prompt = RandomTokens(600, model_->info().vocab_size, 9);
  const auto yardstick = RunForward(*model_, *Cache(), 0, long_prompt);
  const auto cache = Cache();
  const auto begun = RunForward(*model_, *cache, 0, std::span(long_prompt).first(530));
  EXPECT_TRUE(SameBits(begun, std::span(yardstick).first(530 * vocab_)));
  for (int64_t child = 1; child < 6; ++child) {
    ASSERT_TRUE(cache->ForkSequence(0, child, 500 + 6 * child).ok());
  }
  std::vector<TestInput> inputs;
  for (int64_t id = 0; id < 6; ++id) {
    const int64_t from = id == 0 ? 530 : 500 + 6 * id;
    inputs.push_back({id, std::span<const int32_t>(long_prompt).subspan(from, 40)});
  }
  const auto logits = RunForward(*model_, *cache, inputs);
  for (int64_t id = 0; id < 6; ++id) {
    const size_t from = static_cast<size_t>(id == 0 ? 530 : 500 + 6 * id);
    EXPECT_TRUE(
        SameBits(std::span(logits).subspan(static_cast<size_t>(id) * 40 * vocab_, 40 * vocab_),
                 std::span(yardstick).subspan(from * vocab_, 40 * vocab_)))
        << id;
  }
}

TEST_P(ModelExactness, FreshOrPoppedAndReplaced) {
  for (size_t pop = 1; pop <= 30; pop += 3) {
    const auto cache = Cache();
    const auto wrong = RandomTokens(static_cast<int64_t>(pop), model_->info().vocab_size, 77);
    RunPart(*model_, *cache, 0, 0, 0, 30 - pop + 1);
    RunForward(*model_, *cache, 0, wrong);
    ASSERT_TRUE(cache->PopN(0, static_cast<int64_t>(pop)).ok());
    RunPart(*model_, *cache, 0, 0, 30 - pop + 1, prompts_[0].size());
  }
}

TEST_P(ModelExactness, FreshOrRemovedAndAddedAgain) {
  const auto cache = Cache();
  for (int64_t round = 0; round < 3; ++round) {
    RunPart(*model_, *cache, 0, 0, 0, prompts_[0].size());
    RunPart(*model_, *cache, 1 + round, 1, 0, prompts_[1].size());
    ASSERT_TRUE(cache->RemoveSequence(0).ok());
  }
  ASSERT_TRUE(cache->Clear().ok());
  RunPart(*model_, *cache, 0, 2, 0, prompts_[2].size());
}

TEST_P(ModelExactness, StraightOrAbortedAndDoneAgain) {
  const auto cache = Cache();
  RunPart(*model_, *cache, 0, 0, 0, 20);
  const auto wrong = RandomTokens(15, model_->info().vocab_size, 78);
  const int64_t id = 0;
  const int64_t length = 15;
  const uint64_t before = cache->StateDigest();
  ASSERT_TRUE(cache->BeginForward(std::span(&id, 1), std::span(&length, 1)).ok());
  ASSERT_TRUE(model_->Forward(*cache, wrong, {}, nullptr).ok());
  ASSERT_TRUE(cache->AbortForward().ok());
  EXPECT_EQ(cache->StateDigest(), before);
  RunPart(*model_, *cache, 0, 0, 20, prompts_[0].size());
}

INSTANTIATE_TEST_SUITE_P(Variants, ModelExactness, testing::ValuesIn(Variants()),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace quire
