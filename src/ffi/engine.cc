// quire.Engine: the serving engine for tvm-ffi, on a thread of its own. What its steps give goes
// through step_queue.h.
#include "quire/engine.h"

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/reflection/registry.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "ffi/description.h"
#include "ffi/errors.h"
#include "ffi/grammar.h"
#include "ffi/options.h"
#include "ffi/prefill_peers.h"
#include "ffi/snapshot.h"
#include "ffi/step_queue.h"
#include "ffi/store.h"
#include "ffi/tensors.h"
#include "quire/engine_loop.h"

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

// As DeviationMetric.
constexpr std::string_view kBlendMetrics[] = {"v_l2", "k_l2", "kv_l2", "cosine", "random"};
// As DocumentLearning.
constexpr std::string_view kDocumentLearning[] = {"never", "first", "idle"};

// As DocumentSearch.
constexpr std::string_view kDocumentSearches[] = {"no", "anchored", "anywhere"};

// verdict: divergence and agreement; empty: none. documents: pairs [begin, end) of tokens;
// document_ratios: of each, below 0: that of the request.
BlendRequest ReadBlendRequest(const OptionMap& fields) {
  BlendRequest request;
  OptionsReader reader("Submit: blend", fields);
  for (const tf::Shape& range :
       reader.Get<tf::Array<tf::Shape>>("documents").value_or(tf::Array<tf::Shape>())) {
    if (range.size() != 2) ThrowBadArgument("Submit: blend: a document is a pair of positions");
    request.documents.push_back({.begin = range[0], .end = range[1]});
  }
  std::vector<double> own;
  reader.Read("document_ratios", &own);
  if (!own.empty() && own.size() != request.documents.size()) {
    ThrowBadArgument("Submit: blend: there are " + std::to_string(request.documents.size()) +
                     " documents and " + std::to_string(own.size()) + " document_ratios");
  }
  for (size_t i = 0; i < own.size(); ++i) {
    if (!(own[i] < 0)) request.documents[i].ratio = own[i];
  }
  BlendOptions& options = request.options;
  reader.ReadEnum("metric", kBlendMetrics, &options.metric);
  if (const auto layers = reader.Get<tf::Shape>("check_layers")) {
    options.check_layers.assign(layers->begin(), layers->end());
  }
  reader.Read("ratios", &options.ratios);
  std::vector<double> thresholds;
  reader.Read("thresholds", &thresholds);
  for (const double threshold : thresholds) {
    options.thresholds.push_back(static_cast<float>(threshold));
  }
  reader.Read("link_tokens", &options.link_tokens);
  reader.Read("min_tokens", &options.min_tokens);
  reader.ReadEnum("learn", kDocumentLearning, &request.learn);
  reader.ReadEnum("search", kDocumentSearches, &request.search);
  std::vector<double> verdict;
  reader.Read("verdict", &verdict);
  if (verdict.size() == 2) request.verdict = {.divergence = verdict[0], .agreement = verdict[1]};
  reader.Read("unverified", &request.unverified);
  reader.Finish();
  return request;
}

int32_t NarrowTokenId(const char* field, int64_t id) {
  if (id < 0 || id > std::numeric_limits<int32_t>::max()) {
    ThrowBadArgument(std::string("Submit: ") + field + ": " + std::to_string(id) +
                     " is not a token id");
  }
  return static_cast<int32_t>(id);
}

// Reads each option by the type of its member.
class OptionVisitor {
 public:
  explicit OptionVisitor(OptionsReader* reader) : reader_(reader) {}

  template <typename T>
  void operator()(const char* name, T& value, IntegerRange = {}) {
    reader_->Read(name, &value);
  }
  // Salts and groups are any bytes; other texts are Unicode.
  void operator()(const char* name, std::string& value) {
    const std::string_view option = name;
    if (option != "cache_salt" && option != "turn_group") return reader_->Read(name, &value);
    if (const auto bytes = reader_->Get<tf::Bytes>(name))
      value.assign(bytes->data(), bytes->size());
  }
  void operator()(const char*, Speculation& value) { value = ReadSpeculation(reader_, value); }
  void operator()(const char*, std::optional<Speculation>& value) {
    if (reader_->Get<tf::String>("draft")) value = ReadSpeculation(reader_, {});
  }
  void operator()(const char* name, std::vector<std::pair<int32_t, float>>& value) {
    for (const auto& [id, bias] :
         reader_->Get<tf::Map<int64_t, double>>(name).value_or(tf::Map<int64_t, double>())) {
      value.emplace_back(NarrowTokenId(name, id), static_cast<float>(bias));
    }
    // The map's order is that of its hashes; the engine gets one that is the same everywhere.
    std::sort(value.begin(), value.end());
  }
  void operator()(const char* name, std::vector<std::vector<int32_t>>& value) {
    for (const tf::Shape& tokens :
         reader_->Get<tf::Array<tf::Shape>>(name).value_or(tf::Array<tf::Shape>())) {
      std::vector<int32_t>& ids = value.emplace_back();
      for (const int64_t id : tokens) ids.push_back(NarrowTokenId(name, id));
    }
  }
  void operator()(const char* name, std::vector<int32_t>& value) {
    for (const int64_t id : reader_->Get<tf::Shape>(name).value_or(tf::Shape()))
      value.push_back(NarrowTokenId(name, id));
  }
  void operator()(const char*, std::shared_ptr<const TokenFilter>& value) {
    if (const auto grammar = reader_->Get<GrammarRef>("grammar")) value = (*grammar)->filter();
  }
  void operator()(const char* name, std::optional<BlendRequest>& value) {
    if (const auto fields = reader_->Get<OptionMap>(name)) value = ReadBlendRequest(*fields);
  }

 private:
  OptionsReader* const reader_;
};

EngineOptions ReadEngineOptions(const OptionMap& fields) {
  EngineOptions options;
  OptionsReader reader("Engine", fields);
  ForEachOption(options, OptionVisitor(&reader));
  reader.Finish();
  return options;
}

SamplingOptions ReadSamplingOptions(const OptionMap& fields) {
  SamplingOptions options;
  OptionsReader reader("Submit", fields);
  ForEachOption(options, OptionVisitor(&reader));
  reader.Finish();
  return options;
}

tf::Array<tf::Any> LayersOf(const ModelInfo& info) {
  tf::Array<tf::Any> layers;
  for (const AttentionLayerSpec& layer : info.layers) layers.push_back(LayerSpecFields(layer));
  return layers;
}

// Pairs of a name and its bytes: a map would have no order.
tf::Array<tf::Any> WeightTypesOf(const ModelInfo& info) {
  tf::Array<tf::Any> types;
  for (const WeightType& type : info.weight_types) {
    types.push_back(tf::Array<tf::Any>{tf::String(type.name), type.bytes});
  }
  return types;
}

class EngineObj : public tf::Object {
  // f returns Status or Result<T>; what comes back is nothing or T.
  template <typename F>
  auto BetweenSteps(F&& f) {
    using R = std::invoke_result_t<F, Engine&>;
    return latch_.Run([&]() -> R {
      if constexpr (std::is_same_v<R, Status>) {
        return loop_->Run(f);
      } else {
        std::optional<R> result;
        QUIRE_RETURN_IF_ERROR(loop_->Run([&](Engine& engine) {
          result.emplace(f(engine));
          return result->status();
        }));
        return *std::move(result);
      }
    });
  }

 public:
  explicit EngineObj(const OptionMap& fields) : loop_(latch_.Run([&] { return Create(fields); })) {}

  // receipt: int64 [1], where the request's id is written. A result would be lost where Python
  // raises an interrupt as the call returns, and with it the way to cancel the request.
  void Submit(tf::TensorView prompt, const OptionMap& sampling, tf::TensorView receipt) {
    const std::vector<int32_t> ids = TokenIds(prompt);
    const SamplingOptions options = ReadSamplingOptions(sampling);
    const TensorView view = ViewOf(receipt);
    if (view.rank() != 1 || view.dim(0) != 1 || view.dtype() != DType::kI64) {
      ThrowBadArgument("Submit: the receipt must be int64 [1], not " + view.ToString());
    }
    *view.data_as<int64_t>() = latch_.Run([&] { return loop_->Submit(ids, options); });
  }
  void Check(tf::TensorView prompt, const OptionMap& sampling) {
    const std::vector<int32_t> ids = TokenIds(prompt);
    const SamplingOptions options = ReadSamplingOptions(sampling);
    latch_.Run([&] { return loop_->CheckSubmit(ids, options); });
  }
  void Cancel(int64_t request_id) {
    latch_.Run([&] { return loop_->Cancel(request_id); });
  }
  void Stop(int64_t request_id, int64_t sample, int64_t answer_tokens) {
    latch_.Run([&] { return loop_->Stop(request_id, sample, answer_tokens); });
  }
  // Also after a defect, so not by the latch.
  void Close() {
    CallChecked([&] { ThrowIfError(loop_->Close()); });
  }
  tf::ObjectRef Steps() { return tf::ObjectRef(tf::make_object<StepQueueObj>(queue_)); }

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
    BetweenSteps([&](Engine& engine) { return engine.Logits(spans, pointers); });
  }

  int64_t SaveSnapshot(const OptionMap& fields, const tf::String& path) {
    const SnapshotContents contents = ReadSnapshotContents(fields);
    return BetweenSteps(
        [&](Engine& engine) { return engine.SaveSnapshot(contents, std::string(path)); });
  }
  OptionMap LoadSnapshot(const OptionMap& identity, const tf::String& path, bool any_numerics,
                         const tf::Bytes& cache_salt) {
    const Passport passport = ReadIdentity(identity);
    const SnapshotLoadOptions options{
        .any_numerics = any_numerics,
        .cache_salt = std::string(cache_salt.data(), cache_salt.size())};
    return SnapshotFields(BetweenSteps(
        [&](Engine& engine) { return engine.LoadSnapshot(passport, std::string(path), options); }));
  }

  void AttachStore(const ChunkStoreRef& store, const OptionMap& identity, const OptionMap& use) {
    const Passport passport = ReadIdentity(identity);
    const StoreUseOptions options = ReadStoreUseOptions(use);
    BetweenSteps(
        [&](Engine& engine) { return engine.AttachStore(store->store(), passport, options); });
  }
  void FlushStore(int64_t timeout_ms) {
    BetweenSteps([&](Engine& engine) { return engine.FlushStore(timeout_ms); });
  }

  void AttachPrefillPeers(const OptionMap& identity, const OptionMap& fields) {
    const Passport passport = ReadIdentity(identity);
    const PrefillPeerOptions options = ReadPrefillPeerOptions(fields);
    BetweenSteps([&](Engine& engine) { return engine.AttachPrefillPeers(passport, options); });
  }
  tf::Array<OptionMap> PrefillPeers() {
    return PrefillPeerFields(latch_.Run(
        [&]() -> Result<std::vector<PrefillPeerInfo>> { return loop_->PrefillPeers(); }));
  }
  // Where peers connect to.
  tf::String ServePrefill(const OptionMap& identity, const OptionMap& fields,
                          const RefusalQueueRef& refusals) {
    const Passport passport = ReadIdentity(identity);
    const TransferListenerOptions options = ReadPrefillServeOptions(fields, refusals->queue());
    return tf::String(
        BetweenSteps([&](Engine& engine) { return engine.ServePrefill(passport, options); }));
  }

  void EndPrefill() {
    BetweenSteps([](Engine& engine) {
      engine.EndPrefill(/*at_once=*/false);
      return Status();
    });
  }

  void SetKeptPart(const tf::Bytes& cache_salt, int64_t pages) {
    const std::string salt(cache_salt.data(), cache_salt.size());
    BetweenSteps([&](Engine& engine) { return engine.SetKeptPart(salt, pages); });
  }

  // wait: until all that was asked for before is carried out.
  tf::Map<tf::String, int64_t> Stats(bool wait) {
    if (wait) latch_.Run([&] { return loop_->Settle(); });
    const EngineStats stats = latch_.Run([&] { return loop_->Stats(); });
    return StatsFields(stats);
  }

  // The last one that was made. wait: one that is asked for by now is made first.
  OptionMap Describe(bool wait) {
    const auto last = [&]() -> Result<std::shared_ptr<const EngineDescription>> {
      return loop_->Describe();
    };
    if (wait) {
      latch_.Run(last);
      latch_.Run([&] { return loop_->Settle(); });
    }
    return DescriptionFields(*latch_.Run(last));
  }

  // Upper bounds of the classes in seconds, the counts of all classes, and the sum in seconds.
  OptionMap StepTimes() {
    const EngineStats stats = latch_.Run([&] { return loop_->Stats(); });
    return {{"bounds", tf::Array<double>(kStepSecondsBounds.begin(), kStepSecondsBounds.end())},
            {"counts", tf::Array<int64_t>(stats.step_counts.begin(), stats.step_counts.end())},
            {"seconds", stats.step_seconds}};
  }

  OptionMap Info() {
    return latch_.Run([&] {
      const ModelInfo& info = loop_->model_info();
      return OptionMap{{"architecture", tf::String(info.architecture)},
                       {"vocab_size", info.vocab_size},
                       {"hidden_size", info.hidden_size},
                       {"max_position_embeddings", info.max_position_embeddings},
                       {"eos_token_ids",
                        tf::Array<int64_t>(info.eos_token_ids.begin(), info.eos_token_ids.end())},
                       {"bos_token_id", info.bos_token_id},
                       {"parameter_count", info.parameter_count},
                       {"weight_bytes", info.weight_bytes},
                       {"weight_types", WeightTypesOf(info)},
                       {"layers", LayersOf(info)},
                       {"rope", RopeFields(info.rope)},
                       {"kernel_path", tf::String(loop_->kernel_path())},
                       {"numa", tf::String(loop_->numa())}};
    });
  }

  [[maybe_unused]] static constexpr bool _type_mutable = true;
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("quire.Engine", EngineObj, tf::Object);

 private:
  Result<std::unique_ptr<EngineLoop>> Create(const OptionMap& fields) {
    QUIRE_ASSIGN_OR_RETURN(std::unique_ptr<Engine> engine,
                           Engine::Create(ReadEngineOptions(fields)));
    // On the engine's thread a failed check is an exception as well; the loop hands it on.
    const auto around = [](const std::function<void()>& body) {
      const CheckScope scope;
      body();
    };
    return EngineLoop::Create(std::move(engine), queue_, {.around = around});
  }

  float* OutputPointer(const tf::TensorView& tensor, size_t rows) const {
    const TensorView view = ViewOf(tensor);
    const int64_t vocab_size = loop_->model_info().vocab_size;
    const bool fits = view.dtype() == DType::kF32 && view.rank() == 2 && view.is_contiguous() &&
                      view.dim(0) == static_cast<int64_t>(rows) && view.dim(1) == vocab_size;
    if (!fits) {
      ThrowBadArgument("Logits: the output must be a contiguous float32 [" + std::to_string(rows) +
                       ", " + std::to_string(vocab_size) + "], not " + view.ToString());
    }
    return view.data_as<float>();
  }

  FaultLatch latch_;
  const std::shared_ptr<StepQueue> queue_ = std::make_shared<StepQueue>();
  const std::unique_ptr<EngineLoop> loop_;
};

tf::Map<tf::String, int64_t> PlanMemory(const OptionMap& fields) {
  const MemoryPlan plan =
      ValueOrThrow(CallChecked([&] { return Engine::PlanMemory(ReadEngineOptions(fields)); }));
  return {{"weight_bytes", plan.weight_bytes},   {"kv_bytes_per_token", plan.kv_bytes_per_token},
          {"page_size", plan.page_size},         {"page_bytes", plan.page_bytes},
          {"page_count", plan.page_count},       {"kv_bytes", plan.kv_bytes},
          {"state_bytes", plan.state_bytes},     {"scratch_bytes", plan.scratch_bytes},
          {"draft_bytes", plan.draft_bytes},     {"staging_bytes", plan.staging_bytes},
          {"sending_bytes", plan.sending_bytes}, {"total_bytes", plan.total_bytes},
          {"machine_bytes", plan.machine_bytes}, {"available_bytes", plan.available_bytes},
          {"kv_shrunk", plan.kv_shrunk ? 1 : 0}, {"longest_context", plan.longest_context}};
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
      .def("check", &EngineObj::Check)
      .def("cancel", &EngineObj::Cancel)
      .def("stop", &EngineObj::Stop)
      .def("close", &EngineObj::Close)
      .def("steps", &EngineObj::Steps)
      .def("logits", &EngineObj::Logits)
      .def("save_snapshot", &EngineObj::SaveSnapshot)
      .def("load_snapshot", &EngineObj::LoadSnapshot)
      .def("attach_store", &EngineObj::AttachStore)
      .def("flush_store", &EngineObj::FlushStore)
      .def("attach_prefill_peers", &EngineObj::AttachPrefillPeers)
      .def("prefill_peers", &EngineObj::PrefillPeers)
      .def("serve_prefill", &EngineObj::ServePrefill)
      .def("end_prefill", &EngineObj::EndPrefill)
      .def("set_kept_part", &EngineObj::SetKeptPart)
      .def("stats", &EngineObj::Stats)
      .def("describe", &EngineObj::Describe)
      .def("step_times", &EngineObj::StepTimes)
      .def("info", &EngineObj::Info);
}

}  // namespace
}  // namespace quire::ffi
