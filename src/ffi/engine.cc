// quire.Engine: the serving engine for tvm-ffi. A step's outputs cross as a few flat arrays, so
// that their cost does not grow with the number of requests.
#include "quire/engine.h"

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/reflection/registry.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ffi/errors.h"
#include "ffi/options.h"
#include "ffi/snapshot.h"
#include "ffi/store.h"
#include "ffi/tensors.h"

namespace quire::ffi {
namespace {

namespace tf = tvm::ffi;

constexpr std::string_view kDraftKinds[] = {"none", "ngram", "model"};  // by DraftKind

Speculation ReadSpeculation(OptionsReader* reader, Speculation speculation) {
  reader->ReadEnum("draft", kDraftKinds, &speculation.draft);
  reader->Read("draft_tokens", &speculation.draft_tokens);
  reader->Read("draft_branches", &speculation.branches);
  return speculation;
}

EngineOptions ReadEngineOptions(const OptionMap& fields) {
  EngineOptions options;
  OptionsReader reader("Engine", fields);
  reader.Read("model_directory", &options.model_directory);
  reader.Read("dtype", &options.dtype);
  reader.Read("k_dtype", &options.k_dtype);
  reader.Read("v_dtype", &options.v_dtype);
  reader.Read("threads", &options.threads);
  reader.Read("kernel_path", &options.kernel_path);
  reader.Read("page_size", &options.page_size);
  reader.Read("prefill_chunk", &options.prefill_chunk);
  reader.Read("max_num_sequences", &options.max_num_sequences);
  reader.Read("max_waiting", &options.max_waiting);
  reader.Read("prefix_cache", &options.prefix_cache);
  reader.Read("kv_bytes", &options.kv_bytes);
  reader.Read("state_bytes", &options.state_bytes);
  options.speculation = ReadSpeculation(&reader, options.speculation);
  reader.Read("draft_model_directory", &options.draft_model_directory);
  reader.Read("max_tree_nodes", &options.max_tree_nodes);
  reader.Finish();
  return options;
}

int32_t NarrowTokenId(const char* field, int64_t id) {
  if (id < 0 || id > std::numeric_limits<int32_t>::max()) {
    ThrowBadArgument(std::string("Submit: ") + field + ": " + std::to_string(id) +
                     " is not a token id");
  }
  return static_cast<int32_t>(id);
}

SamplingOptions ReadSamplingOptions(const OptionMap& fields) {
  SamplingOptions options;
  OptionsReader reader("Submit", fields);
  reader.Read("max_tokens", &options.max_tokens);
  reader.Read("temperature", &options.temperature);
  reader.Read("top_k", &options.top_k);
  reader.Read("top_p", &options.top_p);
  reader.Read("min_p", &options.min_p);
  reader.Read("repetition_penalty", &options.repetition_penalty);
  reader.Read("presence_penalty", &options.presence_penalty);
  reader.Read("frequency_penalty", &options.frequency_penalty);
  reader.Read("seed", &options.seed);
  reader.Read("n", &options.n);
  reader.Read("logprobs", &options.logprobs);
  reader.Read("ignore_eos", &options.ignore_eos);
  if (reader.Get<tf::String>("draft")) options.speculation = ReadSpeculation(&reader, {});
  reader.Read("window", &options.window);
  reader.Read("sinks", &options.sinks);
  if (const auto salt = reader.Get<tf::Bytes>("cache_salt")) {
    options.cache_salt.assign(salt->data(), salt->size());
  }
  for (const auto& [id, bias] :
       reader.Get<tf::Map<int64_t, double>>("logit_bias").value_or(tf::Map<int64_t, double>())) {
    options.logit_bias.emplace_back(NarrowTokenId("logit_bias", id), static_cast<float>(bias));
  }
  // The map's order is that of its hashes; the engine gets one that is the same everywhere.
  std::sort(options.logit_bias.begin(), options.logit_bias.end());
  for (const tf::Shape& stop :
       reader.Get<tf::Array<tf::Shape>>("stop").value_or(tf::Array<tf::Shape>())) {
    std::vector<int32_t>& ids = options.stop.emplace_back();
    for (const int64_t id : stop) ids.push_back(NarrowTokenId("stop", id));
  }
  reader.Finish();
  return options;
}

tf::Array<tf::Any> LayersOf(const ModelInfo& info) {
  tf::Array<tf::Any> layers;
  for (const AttentionLayerSpec& layer : info.layers) layers.push_back(LayerSpecFields(layer));
  return layers;
}

// The outputs of one step as structure of arrays:
//   requests  int64 [outputs, 17]: request id, sample, end of its tokens in `tokens`, finish
//             reason, prompt tokens, cached tokens, completion tokens, index in `errors` or -1,
//             cached tokens from ram, disk and redis, miss reason, nanoseconds of the load,
//             recomputed tokens, drafted tokens, accepted tokens, decode forwards
//   tokens    int32 [t], of all outputs, one after another
//   logprob_ends int64 [t]: end of each token's entries in the two arrays below
//   logprob_tokens int32, logprobs float32: the chosen token, then the best ones
//   errors    texts
class StepArrays {
 public:
  explicit StepArrays(const std::vector<StepOutput>& outputs) {
    for (const StepOutput& output : outputs) Add(output);
  }

  OptionMap ToMap() const {
    const int64_t rows = static_cast<int64_t>(requests_.size()) / kColumns;
    tf::Tensor requests = NewTensor(DLDataType{kDLInt, 64, 1}, {rows, kColumns});
    std::copy(requests_.begin(), requests_.end(), static_cast<int64_t*>(requests.data_ptr()));
    return {{"requests", requests},
            {"tokens", NewTensor(std::span(tokens_))},
            {"logprob_ends", NewTensor(std::span(logprob_ends_))},
            {"logprob_tokens", NewTensor(std::span(logprob_tokens_))},
            {"logprobs", NewTensor(std::span(logprobs_))},
            {"errors", errors_}};
  }

 private:
  static constexpr int64_t kColumns = 17;

  void Add(const StepOutput& output) {
    for (size_t i = 0; i < output.tokens.size(); ++i) {
      tokens_.push_back(output.tokens[i]);
      if (i < output.logprobs.size()) {
        for (const TokenLogprob& entry : output.logprobs[i]) {
          logprob_tokens_.push_back(entry.token);
          logprobs_.push_back(entry.logprob);
        }
      }
      logprob_ends_.push_back(static_cast<int64_t>(logprobs_.size()));
    }
    int64_t error_index = -1;
    if (output.finish_reason == FinishReason::kError) {
      error_index = static_cast<int64_t>(errors_.size());
      errors_.push_back(tf::String(output.error));
    }
    requests_.insert(requests_.end(),
                     {output.request_id, output.sample, static_cast<int64_t>(tokens_.size()),
                      static_cast<int64_t>(output.finish_reason), output.prompt_tokens,
                      output.cached_tokens, output.completion_tokens, error_index});
    requests_.insert(requests_.end(), output.cached.tiers.begin(), output.cached.tiers.end());
    requests_.push_back(static_cast<int64_t>(output.miss));
    requests_.push_back(static_cast<int64_t>(output.load_seconds * 1e9));
    requests_.insert(requests_.end(), {output.recomputed_tokens, output.drafted_tokens,
                                       output.accepted_tokens, output.decode_forwards});
  }

  std::vector<int64_t> requests_;
  std::vector<int32_t> tokens_;
  std::vector<int64_t> logprob_ends_;
  std::vector<int32_t> logprob_tokens_;
  std::vector<float> logprobs_;
  tf::Array<tf::String> errors_;
};

class EngineObj : public tf::Object {
 public:
  explicit EngineObj(const OptionMap& fields)
      : engine_(latch_.Run([&] { return Engine::Create(ReadEngineOptions(fields)); })) {}

  int64_t Submit(tf::TensorView prompt, const OptionMap& sampling) {
    const std::vector<int32_t> ids = TokenIds(prompt);
    const SamplingOptions options = ReadSamplingOptions(sampling);
    return latch_.Run([&] { return engine_->Submit(ids, options); });
  }
  void Cancel(int64_t request_id) {
    latch_.Run([&] { return engine_->Cancel(request_id); });
  }
  void Stop(int64_t request_id, int64_t sample, int64_t answer_tokens) {
    latch_.Run([&] { return engine_->Stop(request_id, sample, answer_tokens); });
  }
  OptionMap Step() {
    return StepArrays(latch_.Run([&] { return engine_->Step(); })).ToMap();
  }
  bool Idle() {
    return latch_.Run([&] { return engine_->Idle(); });
  }

  // outputs[i]: float32 [length of prompts[i], vocab_size], contiguous; written in place.
  void Logits(const tf::Array<tf::Tensor>& prompts, const tf::Array<tf::Tensor>& outputs) {
    if (prompts.size() != outputs.size()) {
      ThrowBadArgument("Logits: " + std::to_string(prompts.size()) + " prompts, but " +
                       std::to_string(outputs.size()) + " output tensors");
    }
    std::vector<std::vector<int32_t>> ids;
    std::vector<std::span<const int32_t>> spans;
    std::vector<float*> pointers;
    ids.reserve(prompts.size());
    for (size_t i = 0; i < prompts.size(); ++i) {
      ids.push_back(TokenIds(tf::TensorView(prompts[i])));
      spans.emplace_back(ids.back());
      pointers.push_back(OutputPointer(tf::TensorView(outputs[i]), ids.back().size()));
    }
    latch_.Run([&] { return engine_->Logits(spans, pointers); });
  }

  int64_t SaveSnapshot(const OptionMap& fields, const tf::String& path) {
    const SnapshotContents contents = ReadSnapshotContents(fields);
    return latch_.Run([&] { return engine_->SaveSnapshot(contents, std::string(path)); });
  }
  OptionMap LoadSnapshot(const OptionMap& identity, const tf::String& path, bool any_numerics) {
    const Passport passport = ReadIdentity(identity);
    return SnapshotFields(latch_.Run([&] {
      return engine_->LoadSnapshot(passport, std::string(path), {.any_numerics = any_numerics});
    }));
  }

  void AttachStore(const ChunkStoreRef& store, const OptionMap& identity, const OptionMap& use) {
    const Passport passport = ReadIdentity(identity);
    const StoreUseOptions options = ReadStoreUseOptions(use);
    latch_.Run([&] { return engine_->AttachStore(store->store(), passport, options); });
  }
  void FlushStore(int64_t timeout_ms) {
    latch_.Run([&] { return engine_->FlushStore(timeout_ms); });
  }

  tf::Map<tf::String, int64_t> Stats() {
    const EngineStats stats = latch_.Run([&] { return engine_->Stats(); });
    return {{"pages_total", stats.pages_total},
            {"pages_free", stats.pages_free},
            {"pages_in_use", stats.pages_in_use},
            {"retained_sequences", stats.retained_sequences},
            {"retained_tokens", stats.retained_tokens},
            {"retained_pages", stats.retained_pages},
            {"waiting", stats.waiting},
            {"running", stats.running},
            {"steps", stats.steps},
            {"prompt_tokens", stats.prompt_tokens},
            {"cached_tokens", stats.cached_tokens},
            {"completion_tokens", stats.completion_tokens},
            {"preemptions", stats.preemptions},
            {"kv_bytes", stats.kv_bytes},
            {"kv_bytes_per_token", stats.kv_bytes_per_token},
            {"weight_bytes", stats.weight_bytes},
            {"page_size", stats.page_size},
            {"states_total", stats.states_total},
            {"states_free", stats.states_free},
            {"retained_states", stats.retained_states},
            {"state_bytes", stats.state_bytes},
            {"recomputed_tokens", stats.recomputed_tokens},
            {"loading", stats.loading},
            {"loads", stats.loads},
            {"loaded_ram_tokens", stats.loaded_tokens[0]},
            {"loaded_disk_tokens", stats.loaded_tokens[1]},
            {"loaded_redis_tokens", stats.loaded_tokens[2]},
            {"load_ns", static_cast<int64_t>(stats.load_seconds * 1e9)},
            {"layer_loads", stats.layer_loads},
            {"overlap_ns", static_cast<int64_t>(stats.overlap_seconds * 1e9)},
            {"stored_chunks", stats.stored_chunks},
            {"stored_bytes", stats.stored_bytes},
            {"refused_chunks", stats.refused_chunks},
            {"drafted_tokens", stats.drafted_tokens},
            {"accepted_tokens", stats.accepted_tokens},
            {"decode_forwards", stats.decode_forwards},
            {"draft_ns", static_cast<int64_t>(stats.draft_seconds * 1e9)},
            {"compute_ns_per_token", static_cast<int64_t>(stats.compute_seconds_per_token * 1e9)}};
  }

  OptionMap Info() {
    return latch_.Run([&] {
      const ModelInfo& info = engine_->model_info();
      return OptionMap{{"architecture", tf::String(info.architecture)},
                       {"vocab_size", info.vocab_size},
                       {"hidden_size", info.hidden_size},
                       {"max_position_embeddings", info.max_position_embeddings},
                       {"eos_token_ids",
                        tf::Array<int64_t>(info.eos_token_ids.begin(), info.eos_token_ids.end())},
                       {"bos_token_id", info.bos_token_id},
                       {"parameter_count", info.parameter_count},
                       {"weight_bytes", info.weight_bytes},
                       {"layers", LayersOf(info)},
                       {"rope", RopeFields(info.rope)},
                       {"kernel_path", tf::String(engine_->kernel_path())}};
    });
  }

  [[maybe_unused]] static constexpr bool _type_mutable = true;
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("quire.Engine", EngineObj, tf::Object);

 private:
  float* OutputPointer(const tf::TensorView& tensor, size_t rows) const {
    const TensorView view = ViewOf(tensor);
    const int64_t vocab_size = engine_->model_info().vocab_size;
    const bool fits = view.dtype() == DType::kF32 && view.rank() == 2 && view.is_contiguous() &&
                      view.dim(0) == static_cast<int64_t>(rows) && view.dim(1) == vocab_size;
    if (!fits) {
      ThrowBadArgument("Logits: the output must be a contiguous float32 [" + std::to_string(rows) +
                       ", " + std::to_string(vocab_size) + "], not " + view.ToString());
    }
    return view.data_as<float>();
  }

  FaultLatch latch_;
  std::unique_ptr<Engine> engine_;
};

tf::Map<tf::String, int64_t> PlanMemory(const OptionMap& fields) {
  const MemoryPlan plan = ValueOrThrow(Engine::PlanMemory(ReadEngineOptions(fields)));
  return {{"weight_bytes", plan.weight_bytes},   {"kv_bytes_per_token", plan.kv_bytes_per_token},
          {"page_size", plan.page_size},         {"page_bytes", plan.page_bytes},
          {"page_count", plan.page_count},       {"kv_bytes", plan.kv_bytes},
          {"state_bytes", plan.state_bytes},     {"scratch_bytes", plan.scratch_bytes},
          {"draft_bytes", plan.draft_bytes},     {"total_bytes", plan.total_bytes},
          {"machine_bytes", plan.machine_bytes}, {"longest_context", plan.longest_context}};
}

TVM_FFI_STATIC_INIT_BLOCK() {
  // A function and no constructor: calls of functions let other Python threads run meanwhile.
  tf::reflection::GlobalDef()
      .def("quire.Engine.plan_memory", PlanMemory)
      .def("quire.Engine.create", [](const OptionMap& options) {
        return tf::ObjectRef(tf::make_object<EngineObj>(options));
      });
  tf::reflection::ObjectDef<EngineObj>()
      .def("submit", &EngineObj::Submit)
      .def("cancel", &EngineObj::Cancel)
      .def("stop", &EngineObj::Stop)
      .def("step", &EngineObj::Step)
      .def("idle", &EngineObj::Idle)
      .def("logits", &EngineObj::Logits)
      .def("save_snapshot", &EngineObj::SaveSnapshot)
      .def("load_snapshot", &EngineObj::LoadSnapshot)
      .def("attach_store", &EngineObj::AttachStore)
      .def("flush_store", &EngineObj::FlushStore)
      .def("stats", &EngineObj::Stats)
      .def("info", &EngineObj::Info);
}

}  // namespace
}  // namespace quire::ffi
