// Numbers in the options of engines and requests, each alone and in pairs: what is made of them is
// refused by the name of an option, or it works. Nothing wraps, hangs or takes memory without
// bound.
#include <gtest/gtest.h>

#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "base/testing/hostile_options.h"
#include "model/testing/test_model.h"
#include "quire/engine.h"

namespace quire {
namespace {

template <typename Options>
std::vector<Field<Options>> SpeculationFields(Speculation& (*speculation)(Options&)) {
  return {{"draft_tokens", [=](Options& o, int64_t v) { speculation(o).draft_tokens = v; }},
          {"branches", [=](Options& o, int64_t v) { speculation(o).branches = v; }}};
}

std::vector<Field<EngineOptions>> EngineFields() {
  using O = EngineOptions;
  std::vector<Field<O>> fields = {
      {"threads", [](O& o, int64_t v) { o.threads = static_cast<int>(v); }},
      {"page_size", [](O& o, int64_t v) { o.page_size = v; }},
      {"prefill_chunk", [](O& o, int64_t v) { o.prefill_chunk = v; }},
      {"max_step_ms", [](O& o, int64_t v) { o.max_step_ms = v; }},
      {"max_num_sequences", [](O& o, int64_t v) { o.max_num_sequences = v; }},
      {"max_waiting", [](O& o, int64_t v) { o.max_waiting = v; }},
      {"kv_bytes", [](O& o, int64_t v) { o.kv_bytes = v; }},
      {"state_bytes", [](O& o, int64_t v) { o.state_bytes = v; }},
      {"max_tree_nodes", [](O& o, int64_t v) { o.max_tree_nodes = v; }}};
  for (const auto& field :
       SpeculationFields<O>([](O& o) -> Speculation& { return o.speculation; })) {
    fields.push_back(field);
  }
  return fields;
}

std::vector<Field<SamplingOptions>> SamplingFields() {
  using O = SamplingOptions;
  std::vector<Field<O>> fields = {{"max_tokens", [](O& o, int64_t v) { o.max_tokens = v; }},
                                  {"top_k", [](O& o, int64_t v) { o.top_k = v; }},
                                  {"n is", [](O& o, int64_t v) { o.n = v; }},
                                  {"logprobs", [](O& o, int64_t v) { o.logprobs = v; }},
                                  {"window", [](O& o, int64_t v) { o.window = v; }},
                                  {"sinks", [](O& o, int64_t v) { o.sinks = v; }}};
  for (const auto& field :
       SpeculationFields<O>([](O& o) -> Speculation& { return *o.speculation; })) {
    fields.push_back(field);
  }
  return fields;
}

class HostileEngine : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    WriteTestModel(folder_, {.architecture = GetParam()});
    options_.model_directory = folder_.path();
    options_.dtype = DType::kF32;
    options_.threads = 1;
    options_.page_size = 4;
    options_.kv_bytes = 1 << 20;
    options_.max_num_sequences = 4;
    options_.prefill_chunk = 16;
    options_.speculation.draft = DraftKind::kNGram;
  }

  TestFolder folder_;
  EngineOptions options_;
};
INSTANTIATE_TEST_SUITE_P(, HostileEngine,
                         testing::Values("LlamaForCausalLM", "Qwen3NextForCausalLM"));

TEST_P(HostileEngine, CreateAndPlanMemoryRefuseTheSame) {
  TryAll(options_, EngineFields(), [](const EngineOptions& options) {
    const Status planned = Engine::PlanMemory(options).status();
    // A plan of more than the machine has is no error.
    if (planned.ok()) return Engine::Create(options).status();
    EXPECT_EQ(Engine::Create(options).status().code(), planned.code());
    return planned;
  });
}

TEST_P(HostileEngine, SubmitRefusesOrServes) {
  const std::unique_ptr<Engine> engine = Engine::Create(options_).value();
  const std::vector<int32_t> prompt = {1, 2, 3};
  SamplingOptions good;
  good.max_tokens = 2;
  good.speculation = Speculation{.draft = DraftKind::kNGram};
  TryAll(good, SamplingFields(), [&](const SamplingOptions& options) {
    const Result<int64_t> id = engine->Submit(prompt, options);
    EXPECT_EQ(engine->CheckSubmit(prompt, options).code(), id.status().code());
    EXPECT_TRUE(engine->Step().ok());
    if (id.ok() && !engine->Idle()) {  // its beginning is enough
      EXPECT_TRUE(engine->Cancel(*id).ok());
      EXPECT_TRUE(engine->Step().ok());
    }
    EXPECT_TRUE(engine->Idle());
    return id.status();
  });
}

}  // namespace
}  // namespace quire
