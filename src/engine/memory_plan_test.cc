// The memory plan against what an engine really takes: weights, page storage, and the buffers of a
// step that is as large as steps can be. All by ==.
#include <gtest/gtest.h>
#include <sys/inotify.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <numeric>

#include "engine/engine_impl.h"
#include "engine/memory_fit.h"
#include "kv/cache/paged_kv_cache.h"
#include "kv/chunks/kv_sections.h"
#include "kv/recurrent/recurrent_cache.h"
#include "model/decoder.h"
#include "model/testing/test_model.h"
#include "tensor/machine_memory.h"

namespace quire {
namespace {

struct Taken {
  int64_t weights, storage, states, scratch;
};

int64_t WorkspaceBytes(const Model& model) {
  return static_cast<const Decoder&>(model).workspace_bytes();
}

int64_t BytesOf(const AttentionKVCache* cache) {
  const auto& paged = dynamic_cast<const PagedKVCache&>(*cache);
  return paged.figures().storage_bytes + paged.figures().scratch_bytes +
         paged.figures().angle_bytes_max;
}

int64_t BytesOf(const RecurrentCache* cache) {
  const auto& slotted = dynamic_cast<const SlottedRecurrentCache&>(*cache);
  return slotted.storage_bytes() + slotted.scratch_bytes();
}

Taken TakenBy(const Engine& engine) {
  const auto& impl = static_cast<const EngineImpl&>(engine);
  Taken taken{.weights = impl.model_info().weight_bytes,
              .storage = 0,
              .states = 0,
              .scratch = WorkspaceBytes(impl.model()) + impl.step_bytes()};
  if (impl.caches().state().attention() != nullptr) {
    const auto& cache = static_cast<const PagedKVCache&>(impl.cache());
    taken.storage = cache.figures().storage_bytes;
    taken.scratch += cache.figures().scratch_bytes + cache.figures().angle_bytes_max;
  }
  if (impl.caches().recurrent() != nullptr) {
    taken.states = impl.caches().recurrent()->storage_bytes();
    taken.scratch +=
        dynamic_cast<const SlottedRecurrentCache&>(*impl.caches().recurrent()).scratch_bytes();
  }
  return taken;
}

// Steps with as many samples and tokens as may be: each sample but the last has one token, which is
// another one for each, so that none waits for another's prefix.
void RunLargestStep(Engine* engine, const EngineOptions& options) {
  const int64_t samples = std::min(options.max_num_sequences, options.prefill_chunk);
  for (int64_t i = 0; i < samples; ++i) {
    const int64_t length = i + 1 < samples ? 1 : options.prefill_chunk - (samples - 1);
    std::vector<int32_t> prompt(length);
    std::iota(prompt.begin(), prompt.end(), static_cast<int32_t>(i));
    const Result<int64_t> id = engine->Submit(prompt, {.max_tokens = 2, .ignore_eos = true});
    ASSERT_TRUE(id.ok()) << id.status().ToString();
  }
  const Result<std::vector<StepOutput>> outputs = engine->Step();
  ASSERT_TRUE(outputs.ok()) << outputs.status().ToString();
  ASSERT_EQ(static_cast<int64_t>(outputs->size()), samples) << "not all in one step";
}

TEST(MemoryPlan, IsWhatTheEngineTakes) {
  const TestModel models[] = {
      {},
      {.architecture = "Qwen2ForCausalLM", .tie_word_embeddings = true, .dtype = DType::kBF16},
      {.architecture = "Qwen3ForCausalLM",
       .hidden_size = 1100,  // two input blocks, matrices above a huge page
       .intermediate_size = 1500,
       .num_attention_heads = 6,
       .num_key_value_heads = 1,
       .head_dim = 12,
       .dtype = DType::kF16},
      {.architecture = "MistralForCausalLM", .num_hidden_layers = 5, .attention_bias = false},
      {.attention_bias = true, .mlp_bias = true},
      {.architecture = "DeepseekV2ForCausalLM"},
      {.architecture = "DeepseekV3ForCausalLM", .num_attention_heads = 12, .dtype = DType::kBF16},
      {.architecture = "Mamba2ForCausalLM"},
      {.architecture = "Qwen3NextForCausalLM", .num_hidden_layers = 4},
      {.architecture = "Qwen2MoeForCausalLM"},
      {.architecture = "MixtralForCausalLM"},
      {.architecture = "Phi3ForCausalLM"},
      {.architecture = "Gemma3ForConditionalGeneration", .tie_word_embeddings = true}};
  int cases = 0;
  for (const TestModel& model : models) {
    const TestFolder folder;
    WriteTestModel(folder, model);
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (const auto& [page_size, chunk, sequences, threads] :
           {std::array<int64_t, 4>{0, 64, 8, 1}, {5, 7, 20, 2}, {32, 33, 1, 3}}) {
        SCOPED_TRACE(model.architecture + ", case " + std::to_string(cases++));
        const EngineOptions options{.model_directory = folder.path(),
                                    .dtype = dtype,
                                    .threads = static_cast<int>(threads),
                                    .page_size = page_size,
                                    .prefill_chunk = chunk,
                                    .max_num_sequences = sequences,
                                    .kv_bytes = 8 << 20};
        const Result<MemoryPlan> plan = Engine::PlanMemory(options);
        ASSERT_TRUE(plan.ok()) << plan.status().ToString();
        Result<std::unique_ptr<Engine>> engine = Engine::Create(options);
        ASSERT_TRUE(engine.ok()) << engine.status().ToString();
        RunLargestStep(engine->get(), options);
        const Taken taken = TakenBy(**engine);
        EXPECT_EQ(plan->weight_bytes, taken.weights);
        EXPECT_EQ(plan->kv_bytes, taken.storage);
        EXPECT_EQ(plan->scratch_bytes, taken.scratch);
        EXPECT_EQ(plan->state_bytes, taken.states);
        EXPECT_EQ(plan->total_bytes, taken.weights + taken.storage + taken.states + taken.scratch);
        const EngineStats stats = (*engine)->Stats();
        EXPECT_EQ(plan->page_count, stats.pages_total);
        EXPECT_EQ(plan->page_size, stats.page_size);
        EXPECT_EQ(plan->kv_bytes_per_token, stats.kv_bytes_per_token);
        EXPECT_EQ(plan->kv_bytes, stats.kv_bytes);
        EXPECT_EQ(plan->weight_bytes, stats.weight_bytes);
        EXPECT_EQ(plan->page_bytes, plan->kv_bytes_per_token * plan->page_size);
        EXPECT_EQ(plan->state_bytes, stats.state_bytes);
        if (plan->page_bytes != 0) {
          EXPECT_EQ(plan->page_count, options.kv_bytes / plan->page_bytes);
        }
        EXPECT_EQ(plan->machine_bytes, MachineMemoryBytes());
      }
    }
  }
}

// A step of trees that is as large as steps of trees can be, and the draft model's largest forward
// before it: four samples of eight tokens each.
TEST(MemoryPlan, CountsTokenTreesAndTheDraftModel) {
  const TestFolder target_folder, draft_folder;
  WriteTestModel(draft_folder, {.architecture = "Qwen3NextForCausalLM", .num_hidden_layers = 4});
  for (const char* const architecture :
       {"LlamaForCausalLM", "Mamba2ForCausalLM", "Qwen3NextForCausalLM"}) {
    SCOPED_TRACE(architecture);
    WriteTestModel(target_folder, {.architecture = architecture, .num_hidden_layers = 4});
    EngineOptions options{.model_directory = target_folder.path(),
                          .dtype = DType::kF32,
                          .threads = 2,
                          .prefill_chunk = 32,
                          .max_num_sequences = 4,
                          .kv_bytes = 8 << 20};
    const MemoryPlan plain = *Engine::PlanMemory(options);
    options.speculation = {.draft = DraftKind::kModel, .draft_tokens = 7, .branches = 1};
    options.draft_model_directory = draft_folder.path();
    options.max_tree_nodes = 32;
    const Result<MemoryPlan> plan = Engine::PlanMemory(options);
    ASSERT_TRUE(plan.ok()) << plan.status().ToString();
    Result<std::unique_ptr<Engine>> engine = Engine::Create(options);
    ASSERT_TRUE(engine.ok()) << engine.status().ToString();
    for (int32_t i = 0; i < 4; ++i) {
      const std::vector<int32_t> prompt = {i, 1, 2, 3, 4, 5, 6};
      const SamplingOptions sampling{.max_tokens = 20, .ignore_eos = true};
      ASSERT_TRUE((*engine)->Submit(prompt, sampling).ok());
    }
    for (int i = 0; i < 2; ++i) ASSERT_TRUE((*engine)->Step().ok());
    EXPECT_EQ((*engine)->Stats().drafted_tokens, 4 * 7);
    const auto& impl = static_cast<const EngineImpl&>(**engine);
    const Taken taken = TakenBy(**engine);
    EXPECT_EQ(plan->weight_bytes, taken.weights);
    EXPECT_EQ(plan->kv_bytes, taken.storage);
    EXPECT_EQ(plan->scratch_bytes, taken.scratch);
    EXPECT_EQ(plan->state_bytes, taken.states);
    EXPECT_EQ(plan->kv_bytes, plain.kv_bytes);
    EXPECT_GE(plan->state_bytes, plain.state_bytes);  // both in large pages of the machine
    if (impl.caches().recurrent() != nullptr) {
      EXPECT_EQ(impl.caches().recurrent()->options().max_tree_slots, 32);
    }
    const ModelDrafter& drafter = *impl.model_drafter();
    // One sequence for a sample, and a state for a guess.
    const RecurrentCacheOptions& states = drafter.recurrent()->options();
    EXPECT_EQ(states.max_num_sequences, options.max_num_sequences);
    EXPECT_EQ(states.thinned_checkpoints, 0);
    EXPECT_EQ(states.max_tree_slots, 32);
    EXPECT_EQ(plan->draft_bytes, drafter.model().info().weight_bytes +
                                     WorkspaceBytes(drafter.model()) + drafter.logits_bytes() +
                                     BytesOf(drafter.cache()) + BytesOf(drafter.recurrent()));
    EXPECT_EQ(plan->total_bytes, plan->weight_bytes + plan->kv_bytes + plan->state_bytes +
                                     plan->scratch_bytes + plan->draft_bytes);
  }
}

// Memory for what peers send is in the total where it is asked for: parts of rows, and a state of
// each prompt that may be on its way.
TEST(MemoryPlan, CountsTheStagingMemory) {
  for (const char* architecture : {"LlamaForCausalLM", "Mamba2ForCausalLM"}) {
    SCOPED_TRACE(architecture);
    TestFolder folder;
    WriteTestModel(folder, {.architecture = architecture});
    EngineOptions options{.model_directory = folder.path(),
                          .threads = 1,
                          .max_num_sequences = 5,
                          .kv_bytes = 1 << 20,
                          .state_bytes = 1 << 22};
    const MemoryPlan without = Engine::PlanMemory(options).value();
    EXPECT_EQ(without.staging_bytes, 0);
    options.staging_bytes = 12345;
    const MemoryPlan plan = Engine::PlanMemory(options).value();
    EXPECT_EQ(plan.total_bytes, without.total_bytes + plan.staging_bytes);
    const auto engine = Engine::Create(options).value();
    const auto* const recurrent = static_cast<const EngineImpl&>(*engine).caches().recurrent();
    int64_t state = 0;
    if (recurrent != nullptr) {
      const std::vector<StateTensor> tensors = StateTensorsOf(*recurrent).value();
      for (const StateTensor& tensor : tensors)
        state += TensorView(nullptr, tensor.dtype, tensor.shape).element_count() *
                 DTypeBytes(tensor.dtype);
    }
    EXPECT_EQ(state > 0, std::string(architecture) == "Mamba2ForCausalLM");
    EXPECT_GE(plan.staging_bytes, 12345 + options.max_num_sequences * state);
    EXPECT_LT(plan.staging_bytes, 12346 + options.max_num_sequences * 2 * state);
  }
}

TEST(MemoryPlan, CountsTheSendingMemory) {
  TestFolder folder;
  WriteTestModel(folder, {});
  EngineOptions options{.model_directory = folder.path(), .threads = 1, .kv_bytes = 1 << 20};
  const MemoryPlan without = Engine::PlanMemory(options).value();
  EXPECT_EQ(without.sending_bytes, 0);
  options.sending_bytes = 12345;
  const MemoryPlan plan = Engine::PlanMemory(options).value();
  EXPECT_EQ(plan.sending_bytes, 12345);
  EXPECT_EQ(plan.total_bytes, without.total_bytes + 12345);
}

// A state goes in one piece, however little memory is asked for.
TEST(MemoryPlan, SendingMemoryHoldsTheLargestState) {
  TestFolder folder;
  WriteTestModel(folder, {.architecture = "Mamba2ForCausalLM"});
  EngineOptions options{.model_directory = folder.path(), .threads = 1};
  const MemoryPlan without = Engine::PlanMemory(options).value();
  EXPECT_EQ(without.sending_bytes, 0);
  int64_t largest = 0;
  const auto engine = Engine::Create(options).value();
  const std::vector<StateTensor> tensors =
      StateTensorsOf(*static_cast<const EngineImpl&>(*engine).caches().recurrent()).value();
  for (const StateTensor& tensor : tensors) {
    largest = std::max(largest, TensorView(nullptr, tensor.dtype, tensor.shape).element_count() *
                                    DTypeBytes(tensor.dtype));
  }
  for (const int64_t asked : {int64_t{1}, largest, largest + 1}) {
    options.sending_bytes = asked;
    const MemoryPlan plan = Engine::PlanMemory(options).value();
    EXPECT_EQ(plan.sending_bytes, std::max(asked, largest));
    EXPECT_EQ(plan.total_bytes, without.total_bytes + plan.sending_bytes);
  }
}

TEST(MemoryPlan, RefusesADraftModelOfAnotherVocabulary) {
  const TestFolder target_folder, draft_folder;
  WriteTestModel(target_folder, {});
  WriteTestModel(draft_folder, {.vocab_size = 99});
  EngineOptions options{.model_directory = target_folder.path(), .threads = 1};
  options.draft_model_directory = draft_folder.path();
  const Status status = Engine::Create(options).status();
  EXPECT_EQ(status.code(), StatusCode::kBadArgument);
  for (const char* const part : {"draft_model_directory", " 99 ", " 101"}) {
    EXPECT_NE(status.message().find(part), std::string_view::npos) << status.ToString();
  }
  options.draft_model_directory.clear();
  options.speculation.draft = DraftKind::kModel;
  EXPECT_EQ(Engine::PlanMemory(options).status().code(), StatusCode::kBadArgument);
}

// What the plan calls the longest context is taken, and a token more is refused.
TEST(MemoryPlan, TheLongestContextFitsAndNoLongerOne) {
  const TestFolder folder;
  for (const int64_t positions : {50, 4096}) {
    WriteTestModel(folder, {.extra = {{"max_position_embeddings", positions}}});
    const EngineOptions options{.model_directory = folder.path(),
                                .dtype = DType::kF32,
                                .threads = 1,
                                .page_size = 16,
                                .kv_bytes = 100'000};
    const int64_t longest = Engine::PlanMemory(options)->longest_context;
    EXPECT_EQ(longest, positions == 50 ? 50 : 100'000 / (16 * 512) * 16);
    const auto engine = *Engine::Create(options);
    const std::vector<int32_t> prompt(10, 1);
    EXPECT_EQ(engine->Submit(prompt, {.max_tokens = longest - 9}).status().code(),
              StatusCode::kTooLarge);
    ASSERT_TRUE(engine->Submit(prompt, {.max_tokens = longest - 10, .ignore_eos = true}).ok());
    while (!engine->Idle()) ASSERT_TRUE(engine->Step().ok());
    EXPECT_EQ(engine->Stats().completion_tokens, longest - 10);
  }
}

// The number behind "at most" in a message.
int64_t NumberAfterAtMost(std::string_view message) {
  const size_t at = message.find("at most ");
  return at == std::string_view::npos ? -1 : std::stoll(std::string(message.substr(at + 8)));
}

// Also with a draft model, whose pages follow the other's.
TEST(MemoryPlan, HasFewerPagesWhereTheUsualNumberIsNotFree) {
  const TestFolder folder;
  WriteTestModel(folder, {});
  for (const std::string& draft : {std::string(), folder.path()}) {
    EngineOptions options{.model_directory = folder.path(),
                          .threads = 1,
                          .page_size = 8,
                          .prefill_chunk = 16,
                          .draft_model_directory = draft};
    constexpr int64_t kMachine = int64_t{1} << 40;
    const MemoryPlan usual = *PlanMemoryWithin(options, {kMachine, kMachine});
    EXPECT_FALSE(usual.kv_shrunk);
    EXPECT_EQ(usual.longest_context, 4096);
    const auto with_pages = [&](int64_t count) {
      EngineOptions other = options;
      other.kv_bytes = count * usual.page_bytes;
      return *PlanMemoryWithin(other, {kMachine, kMachine});
    };
    for (const int64_t pages : {int64_t{3}, int64_t{100}, usual.page_count - 3}) {
      // A sixteenth stays free.
      const int64_t free = (with_pages(pages).total_bytes + usual.page_bytes / 2) * 16 / 15;
      const MemoryPlan plan = *PlanMemoryWithin(options, {kMachine, free});
      // As many as fit: the system maps whole pages of its own, so it may be one or two more.
      EXPECT_GE(plan.page_count, pages);
      EXPECT_LE(plan.total_bytes, free - free / 16);
      EXPECT_GT(with_pages(plan.page_count + 1).total_bytes, free - free / 16);
      EXPECT_TRUE(plan.kv_shrunk);
      EXPECT_EQ(plan.available_bytes, free);
      EXPECT_EQ(plan.machine_bytes, kMachine);
      EXPECT_TRUE(CheckMemoryWithin(options, {kMachine, free}).ok());
    }
  }
}

// How often a file has been opened since the last look.
class FileOpens {
 public:
  explicit FileOpens(const std::string& path) : events_(inotify_init1(IN_NONBLOCK)) {
    // With IN_OPEN alone the system would report several in a row as one.
    EXPECT_GE(inotify_add_watch(events_, path.c_str(), IN_OPEN | IN_CLOSE), 0);
  }
  ~FileOpens() { close(events_); }
  FileOpens(const FileOpens&) = delete;
  FileOpens& operator=(const FileOpens&) = delete;
  int Count() const {
    int count = 0;
    inotify_event event;
    while (read(events_, &event, sizeof(event)) == sizeof(event))
      count += (event.mask & IN_OPEN) != 0;
    return count;
  }

 private:
  const int events_;
};

// The models are measured once, not for each number of pages that is tried.
TEST(MemoryPlan, ASearchForANumberOfPagesReadsTheModelsOnce) {
  const TestFolder folder, draft_folder;
  WriteTestModel(folder, {});
  WriteTestModel(draft_folder, {});
  EngineOptions options{.model_directory = folder.path(),
                        .threads = 1,
                        .page_size = 8,
                        .prefill_chunk = 16,
                        .draft_model_directory = draft_folder.path()};
  // What tells that both have the same tokens may be as large as some weights.
  const std::string tokenizer = R"({"model": {"vocab": {"a": 0, "b": 1}}})";
  std::ofstream(folder.File("tokenizer.json")) << tokenizer;
  std::ofstream(draft_folder.File("tokenizer.json")) << tokenizer << "\n";
  constexpr int64_t kMachine = int64_t{1} << 40;
  const FileOpens tokens(folder.path() + "/tokenizer.json");
  const FileOpens target(folder.path() + "/config.json");
  const FileOpens draft(draft_folder.path() + "/config.json");
  const MemoryPlan usual = *PlanMemoryWithin(options, {kMachine, kMachine});
  const int of_target = target.Count();
  const int of_draft = draft.Count();
  const int of_tokens = tokens.Count();
  EXPECT_GE(of_tokens, 1);
  EXPECT_GE(of_target, 1);
  EXPECT_GE(of_draft, 1);
  // A sixteenth stays free, so some pages are too many.
  const int64_t fewer_bytes = usual.total_bytes - 3 * usual.page_bytes;
  const MachineMemory tight{kMachine, fewer_bytes + fewer_bytes / 15};
  EXPECT_TRUE(PlanMemoryWithin(options, tight)->kv_shrunk);
  EXPECT_EQ(target.Count(), of_target);
  EXPECT_EQ(draft.Count(), of_draft);
  EXPECT_EQ(tokens.Count(), of_tokens);
  options.kv_bytes = usual.kv_bytes;  // what would fit is searched for the message
  const MachineMemory short_of_all{kMachine, usual.total_bytes - 1};
  EXPECT_EQ(CheckMemoryWithin(options, short_of_all).code(), StatusCode::kOutOfMemory);
  EXPECT_EQ(target.Count(), of_target);
  EXPECT_EQ(draft.Count(), of_draft);
  EXPECT_EQ(tokens.Count(), of_tokens);
}

TEST(MemoryPlan, WhatIsGivenAndDoesNotFitIsRefusedWithWhatWouldFit) {
  const TestFolder folder;
  WriteTestModel(folder, {});
  EngineOptions options{.model_directory = folder.path(), .threads = 1, .kv_bytes = 64 << 20};
  constexpr int64_t kMachine = int64_t{1} << 40;
  const MemoryPlan plan = *PlanMemoryWithin(options, {kMachine, kMachine});
  const MachineMemory tight{kMachine, plan.total_bytes - 1};
  EXPECT_TRUE(CheckMemoryWithin(options, {kMachine, plan.total_bytes}).ok());
  EXPECT_EQ(PlanMemoryWithin(options, tight)->page_count, plan.page_count);
  EXPECT_FALSE(PlanMemoryWithin(options, tight)->kv_shrunk);
  const Status refused = CheckMemoryWithin(options, tight);
  EXPECT_EQ(refused.code(), StatusCode::kOutOfMemory);
  EXPECT_NE(refused.message().find("1024.00 GiB that this machine"), std::string_view::npos);
  options.kv_bytes = NumberAfterAtMost(refused.message());
  EXPECT_TRUE(CheckMemoryWithin(options, tight).ok()) << refused.ToString();
  options.kv_bytes += plan.page_bytes;
  EXPECT_FALSE(CheckMemoryWithin(options, tight).ok());

  for (const int64_t kv_bytes : {int64_t{0}, int64_t{64} << 20}) {
    options.kv_bytes = kv_bytes;
    const Status none = CheckMemoryWithin(options, {kMachine, plan.weight_bytes});
    EXPECT_EQ(none.code(), StatusCode::kOutOfMemory);
    EXPECT_NE(none.message().find("no number of KV pages would fit"), std::string_view::npos);
  }
}

// Weights of more than the machine's memory in a file that is one hole: to read or to load it would
// take minutes and end in a killed process.
TEST(MemoryPlan, ReadsNoWeightsAndCreateRefusesWhatTheMachineCannotHold) {
  const TestFolder folder;
  const int64_t hidden = 1 << 15, rows = 1 << 20;
  const int64_t layer_bytes = 3 * rows * hidden * 2;
  TestModel model{.vocab_size = 8,
                  .hidden_size = hidden,
                  .intermediate_size = rows,
                  .num_hidden_layers = MachineMemoryBytes() / layer_bytes + 1,
                  .num_attention_heads = 1,
                  .num_key_value_heads = 1,
                  .head_dim = 16};
  folder.Write("config.json", TestConfig(model).dump());
  nlohmann::json header;
  int64_t end = 0;
  const auto add = [&](const std::string& name, std::vector<int64_t> shape) {
    const int64_t begin = end;
    end += 2 * std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
    header[name] = {{"dtype", "BF16"}, {"shape", shape}, {"data_offsets", {begin, end}}};
  };
  add("model.embed_tokens.weight", {8, hidden});
  add("model.norm.weight", {hidden});
  add("lm_head.weight", {8, hidden});
  for (int64_t i = 0; i < model.num_hidden_layers; ++i) {
    const std::string prefix = "model.layers." + std::to_string(i) + ".";
    add(prefix + "input_layernorm.weight", {hidden});
    add(prefix + "post_attention_layernorm.weight", {hidden});
    for (const char* const name : {"q_proj", "k_proj", "v_proj"}) {
      add(prefix + "self_attn." + name + ".weight", {16, hidden});
    }
    add(prefix + "self_attn.o_proj.weight", {hidden, 16});
    add(prefix + "mlp.gate_proj.weight", {rows, hidden});
    add(prefix + "mlp.up_proj.weight", {rows, hidden});
    add(prefix + "mlp.down_proj.weight", {hidden, rows});
  }
  const std::string front = SafetensorsBytes(header.dump(), "");
  folder.Write("model.safetensors", front);
  std::filesystem::resize_file(folder.File("model.safetensors"), front.size() + end);

  const EngineOptions options{
      .model_directory = folder.path(), .threads = 1, .prefill_chunk = 16, .kv_bytes = 1 << 20};
  const Result<MemoryPlan> plan = Engine::PlanMemory(options);
  ASSERT_TRUE(plan.ok()) << plan.status().ToString();
  EXPECT_GT(plan->weight_bytes, plan->machine_bytes);
  const Status created = Engine::Create(options).status();
  EXPECT_EQ(created.code(), StatusCode::kOutOfMemory);
  for (const int64_t number : {plan->weight_bytes, plan->machine_bytes}) {
    EXPECT_NE(created.message().find(GiBText(static_cast<double>(number))), std::string_view::npos)
        << created.ToString();
  }
}

TEST(MemoryPlan, SaysWhatIsWrongWithADamagedModel) {
  const TestFolder folder;
  EngineOptions options{.model_directory = folder.path(), .threads = 1, .kv_bytes = 1 << 20};
  const auto expect = [&](StatusCode code, std::string_view in_message) {
    const Status plan = Engine::PlanMemory(options).status();
    const Status created = Engine::Create(options).status();
    EXPECT_EQ(plan.code(), code) << plan.ToString();
    EXPECT_NE(plan.message().find(in_message), std::string_view::npos) << plan.ToString();
    EXPECT_EQ(created.ToString(), plan.ToString());
  };
  expect(StatusCode::kNotFound, "there is no config.json");
  folder.Write("config.json", TestConfig({}).dump());
  expect(StatusCode::kNotFound, "there is neither model.safetensors");
  folder.Write("config.json", "{\"architectures\":");
  expect(StatusCode::kCorrupt, "not acceptable JSON");
  folder.Write("config.json", std::string("{}\0{}", 5));
  expect(StatusCode::kCorrupt, "is a NUL");
  folder.Write("config.json", TestConfig({}).dump());
  const std::string whole = SafetensorsBytes(TestTensors({}));
  folder.Write("model.safetensors", std::string_view(whole).substr(0, whole.size() - 100));
  expect(StatusCode::kCorrupt, "model.safetensors");
  folder.Write("model.safetensors", SafetensorsBytes(TestTensors({.hidden_size = 50})));
  expect(StatusCode::kCorrupt, "config.json asks for");
  std::vector<TestTensor> tensors = TestTensors({});
  std::erase_if(tensors, [](const TestTensor& tensor) {
    return tensor.name == "model.layers.1.mlp.down_proj.weight";
  });
  folder.Write("model.safetensors", SafetensorsBytes(tensors));
  expect(StatusCode::kNotFound, "model.layers.1.mlp.down_proj.weight");
}

}  // namespace
}  // namespace quire
