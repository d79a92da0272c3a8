// Engine::Create, and whole engines over small random checkpoints: model, cache and engine as users
// have them.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "kernels/backend.h"
#include "model/testing/test_model.h"
#include "quire/engine.h"

namespace quire {
namespace {

using Tokens = std::vector<int32_t>;

// Two layers of 2 KV heads of 16 + 16 values.
constexpr int64_t kTokenBytesF32 = 2 * 2 * (16 + 16) * 4;

class EngineCreate : public testing::Test {
 protected:
  void SetUp() override {
    WriteTestModel(folder_, {});
    options_.model_directory = folder_.path();
    options_.dtype = DType::kF32;
    options_.threads = 1;
    options_.page_size = 4;
    options_.kv_bytes = 100 * 4 * kTokenBytesF32;
  }

  std::unique_ptr<Engine> Create() {
    Result<std::unique_ptr<Engine>> engine = Engine::Create(options_);
    EXPECT_TRUE(engine.ok()) << engine.status().ToString();
    return engine.ok() ? *std::move(engine) : nullptr;
  }

  TestFolder folder_;
  EngineOptions options_;
};

TEST_F(EngineCreate, KeysAndValuesHaveTheTypesOfTheOptionsInTheCacheAlone) {
  options_.k_dtype = DType::kI8;
  options_.v_dtype = DType::kBF16;
  const std::unique_ptr<Engine> engine = Create();
  ASSERT_NE(engine, nullptr);
  for (const AttentionLayerSpec& layer : engine->model_info().layers) {
    EXPECT_EQ(layer.dtype, DType::kI8);
    EXPECT_EQ(layer.v_dtype, DType::kBF16);
  }
}

TEST_F(EngineCreate, RefusesTwoTypesWhereKeysAreValues) {
  const TestFolder folder;
  WriteTestModel(folder, {.architecture = "DeepseekV2ForCausalLM"});
  options_.model_directory = folder.path();
  options_.k_dtype = DType::kI8;
  for (const Status& status :
       {Engine::Create(options_).status(), Engine::PlanMemory(options_).status()}) {
    EXPECT_EQ(status.code(), StatusCode::kBadArgument);
    EXPECT_NE(status.message().find(folder.path() + ": keys of DeepseekV2ForCausalLM are its "
                                                    "values"),
              std::string::npos);
    EXPECT_NE(status.message().find("k_dtype is int8, v_dtype is float32"), std::string::npos)
        << status.ToString();
  }
}

std::vector<Tokens> Generate(Engine* engine, const std::vector<Tokens>& prompts,
                             const SamplingOptions& options) {
  std::vector<int64_t> ids;
  for (const Tokens& prompt : prompts) ids.push_back(*engine->Submit(prompt, options));
  std::vector<Tokens> answers(prompts.size());
  while (!engine->Idle()) {
    const Result<std::vector<StepOutput>> outputs = engine->Step();
    EXPECT_TRUE(outputs.ok()) << outputs.status().ToString();
    if (!outputs.ok()) return answers;
    for (const StepOutput& output : *outputs) {
      EXPECT_EQ(output.error, "");
      Tokens& answer = answers[output.request_id - ids.front()];
      answer.insert(answer.end(), output.tokens.begin(), output.tokens.end());
    }
  }
  return answers;
}

std::vector<float> LogitsOf(Engine* engine, const Tokens& tokens) {
  std::vector<float> logits(tokens.size() * engine->model_info().vocab_size);
  const std::span<const int32_t> prompts[] = {tokens};
  float* const buffers[] = {logits.data()};
  const Status status = engine->Logits(prompts, buffers);
  EXPECT_TRUE(status.ok()) << status.ToString();
  return logits;
}

TEST_F(EngineCreate, NamesTheOptionThatIsOutOfRange) {
  const auto expect = [&](std::string_view in_message, const EngineOptions& options) {
    for (const Status& status :
         {Engine::Create(options).status(), Engine::PlanMemory(options).status()}) {
      EXPECT_EQ(status.code(), StatusCode::kBadArgument) << in_message;
      EXPECT_NE(status.message().find(in_message), std::string_view::npos) << status.ToString();
    }
  };
  const auto with = [&](auto change) {
    EngineOptions options = options_;
    change(options);
    return options;
  };
  expect("threads is -1", with([](auto& o) { o.threads = -1; }));
  expect("page_size is -4", with([](auto& o) { o.page_size = -4; }));
  expect("prefill_chunk is 0", with([](auto& o) { o.prefill_chunk = 0; }));
  expect("max_num_sequences is 0", with([](auto& o) { o.max_num_sequences = 0; }));
  expect("threads is 1025; it must be at least 0 and at most 1024",
         with([](auto& o) { o.threads = 1025; }));
  expect("prefill_chunk is 1048577", with([](auto& o) { o.prefill_chunk = (1 << 20) + 1; }));
  expect("max_num_sequences is 9223372036854775807",
         with([](auto& o) { o.max_num_sequences = std::numeric_limits<int64_t>::max(); }));
  expect("page_size is 1048577", with([](auto& o) { o.page_size = (1 << 20) + 1; }));
  expect("2147483647 are the most",
         with([](auto& o) { o.kv_bytes = std::numeric_limits<int64_t>::max(); }));
  expect("max_step_ms is 0", with([](auto& o) { o.max_step_ms = 0; }));
  expect("max_waiting is 0", with([](auto& o) { o.max_waiting = 0; }));
  expect("kv_bytes is -1", with([](auto& o) { o.kv_bytes = -1; }));
  expect("kv_bytes is 4095", with([](auto& o) { o.kv_bytes = 4095; }));
  expect("numa is \"on\"; it must be \"auto\" or \"off\"", with([](auto& o) { o.numa = "on"; }));
  expect("no-such-path", with([](auto& o) { o.kernel_path = "no-such-path"; }));
}

TEST_F(EngineCreate, AMissingModelIsNotFound) {
  options_.model_directory = folder_.File("nowhere");
  EXPECT_EQ(Engine::Create(options_).status().code(), StatusCode::kNotFound);
  EXPECT_EQ(Engine::PlanMemory(options_).status().code(), StatusCode::kNotFound);
}

TEST_F(EngineCreate, PagesAreWhatTheBytesHold) {
  options_.kv_bytes = 7 * 4 * kTokenBytesF32 + 100;
  const EngineStats stats = Create()->Stats();
  EXPECT_EQ(stats.pages_total, 7);
  EXPECT_EQ(stats.pages_free, 7);
  EXPECT_EQ(stats.page_size, 4);
  EXPECT_EQ(stats.kv_bytes_per_token, kTokenBytesF32);
  EXPECT_GE(stats.kv_bytes, 7 * 4 * kTokenBytesF32);
  EXPECT_GT(stats.weight_bytes, 0);
}

TEST_F(EngineCreate, ByDefaultOneSequenceOfAllPositionsFits) {
  options_.kv_bytes = 0;
  options_.page_size = 0;
  const std::unique_ptr<Engine> engine = Create();
  const EngineStats stats = engine->Stats();
  EXPECT_GE(stats.pages_total * stats.page_size, engine->model_info().max_position_embeddings);
  EXPECT_EQ(engine->kernel_path(), FindBackend("").value()->name);
}

TEST_F(EngineCreate, KernelPathIsTheOneThatWasAskedFor) {
  for (const std::string& path : KernelPaths()) {
    options_.kernel_path = path;
    EXPECT_EQ(Create()->kernel_path(), path);
  }
}

// A greedy answer, made token by token in a batch, is the argmax of the logits of the whole text in
// one piece.
TEST_F(EngineCreate, AnswersAreTheArgmaxOfTheirOwnLogits) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    options_.dtype = dtype;
    const std::unique_ptr<Engine> engine = Create();
    const int64_t vocab_size = engine->model_info().vocab_size;
    std::vector<Tokens> prompts;
    for (int64_t i = 0; i < 5; ++i) prompts.push_back(RandomTokens(3 + 4 * i, vocab_size, i));
    const std::vector<Tokens> answers =
        Generate(engine.get(), prompts, {.max_tokens = 12, .ignore_eos = true});
    for (size_t i = 0; i < prompts.size(); ++i) {
      Tokens text = prompts[i];
      text.insert(text.end(), answers[i].begin(), answers[i].end());
      const std::vector<float> logits = LogitsOf(engine.get(), text);
      for (size_t t = 0; t < answers[i].size(); ++t) {
        const auto row = logits.begin() + (prompts[i].size() - 1 + t) * vocab_size;
        EXPECT_EQ(std::max_element(row, row + vocab_size) - row, answers[i][t]);
      }
    }
  }
}

TEST_F(EngineCreate, AnswersDoNotDependOnSizesOrThreads) {
  const int64_t vocab_size = Create()->model_info().vocab_size;
  const Tokens shared = RandomTokens(40, vocab_size, 50);
  std::vector<Tokens> prompts;
  for (int64_t i = 0; i < 9; ++i) {
    prompts.push_back(Tokens(shared.begin(), shared.begin() + 5 * (i % 5) * (i % 2)));
    for (const int32_t token : RandomTokens(1 + 3 * i, vocab_size, i)) {
      prompts.back().push_back(token);
    }
  }
  const SamplingOptions sampling{
      .max_tokens = 10, .temperature = 0.8F, .seed = 5, .ignore_eos = true};
  std::vector<Tokens> want;
  for (const Tokens& prompt : prompts) {
    options_.prefix_cache = false;
    want.push_back(Generate(Create().get(), {prompt}, sampling)[0]);
  }
  int64_t preemptions_when_short = 0;
  int64_t preemptions_else = 0;
  for (const int64_t page_size : {1, 3, 16}) {
    for (const int64_t chunk : {5, 64}) {
      for (const int64_t pages_in_tokens : {80, 1000}) {
        options_.prefix_cache = true;
        options_.threads = chunk == 5 ? 2 : 1;
        options_.page_size = page_size;
        options_.prefill_chunk = chunk;
        options_.kv_bytes = pages_in_tokens * kTokenBytesF32;
        const std::unique_ptr<Engine> engine = Create();
        EXPECT_EQ(Generate(engine.get(), prompts, sampling), want)
            << "page size " << page_size << ", chunk " << chunk;
        EXPECT_EQ(Generate(engine.get(), prompts, sampling), want) << "again";
        EXPECT_GT(engine->Stats().cached_tokens, 0);
        (pages_in_tokens == 80 ? preemptions_when_short : preemptions_else) +=
            engine->Stats().preemptions;
      }
    }
  }
  EXPECT_GT(preemptions_when_short, 0);
  EXPECT_EQ(preemptions_else, 0);
}

}  // namespace
}  // namespace quire
