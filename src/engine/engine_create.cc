// Engine::PlanMemory and Engine::Create: sizes of everything, then model and cache.
#include <algorithm>
#include <limits>
#include <optional>
#include <sstream>
#include <string>
#include <type_traits>
#include <utility>

#include "base/check.h"
#include "base/control_groups.h"
#include "base/guard.h"
#include "base/numa_nodes.h"
#include "base/thread_pool.h"
#include "engine/blending/moved_rows.h"
#include "engine/drafts/draft_vocabulary.h"
#include "engine/engine_impl.h"
#include "engine/memory_fit.h"
#include "kernels/backend.h"
#include "kv/cache/kv_memory.h"
#include "tensor/machine_memory.h"

namespace quire {
namespace {

// The part of the machine's memory for KV when EngineOptions::kv_bytes is 0: weights, scratch and
// the other programs need the rest.
constexpr int64_t kMemoryPartForKV = 4;

// The part of the free memory for retained states when EngineOptions::state_bytes is 0; and the
// most of them: some thirty conversations with their checkpoints.
constexpr int64_t kMemoryPartForStates = 8;
constexpr int64_t kRetainedStatesDefault = 128;

// Where the number of pages is not given, one in this number of parts of the free memory stays
// free, for what is not counted and for the next program.
constexpr int64_t kMemoryPartLeftFree = 16;

// Checkpoints of a sequence. Two recent ones: an answer that is cut back by up to 64 tokens (a stop
// text that was held back) is still reached; two older ones for texts that part further back.
constexpr int64_t kRecentCheckpoints = 2;
constexpr int64_t kThinnedCheckpoints = 2;

// Nodes of token trees where samples speculate: eight samples with seven guesses each, or one
// with sixty. More rows than some tens cost more to compute than they save.
constexpr int64_t kTreeNodesDefault = 64;

Status CheckInRange(std::string_view field, int64_t value, const IntegerRange& range) {
  if (value >= range.least && value <= range.most) return {};
  std::ostringstream message;
  message << "EngineOptions::" << field << " is " << value << "; it must be at least "
          << range.least;
  if (range.most != IntegerRange{}.most) message << " and at most " << range.most;
  return Status(StatusCode::kBadArgument, message.str());
}

Status CheckRanges(EngineOptions options) {
  Status first;
  ForEachOption(options, [&](const char* name, const auto& value, IntegerRange range = {}) {
    using Value = std::decay_t<decltype(value)>;
    if constexpr (std::is_integral_v<Value> && !std::is_same_v<Value, bool>) {
      if (first.ok()) first = CheckInRange(name, value, range);
    }
  });
  return first;
}

Status CheckOptions(const EngineOptions& options) {
  QUIRE_RETURN_IF_ERROR(CheckRanges(options));
  QUIRE_RETURN_IF_ERROR(CheckSpeculation("EngineOptions", options.speculation));
  if (options.speculation.draft == DraftKind::kModel && options.draft_model_directory.empty()) {
    return Status(StatusCode::kBadArgument,
                  "EngineOptions::speculation: draft is kModel and draft_model_directory is empty; "
                  "give a draft model, or take kNGram");
  }
  if (options.numa != "auto" && options.numa != "off") {
    return Status(StatusCode::kBadArgument, "EngineOptions::numa is \"" + options.numa +
                                                "\"; it must be \"auto\" or \"off\"");
  }
  return {};
}

Result<std::shared_ptr<ParallelRunner>> RunnerFor(const EngineOptions& options) {
  if (options.runner != nullptr) return options.runner;
  if (options.numa == "off") return CreateThreadPool(options.threads);
  return CreateNumaThreadPool(options.threads, ReadNumaTopology(UsableCpus()), SystemNumaCalls());
}

// After all memory is placed: what the system has refused is known then.
std::string NumaText(const EngineOptions& options, ParallelRunner& runner) {
  if (NumaNodes* const nodes = runner.numa_nodes(); nodes != nullptr) return nodes->Text();
  if (options.numa == "off" || options.runner != nullptr) return "off";
  const NumaTopology topology = ReadNumaTopology(UsableCpus());
  if (topology.nodes.size() > 1) return "off: too few threads for two nodes";
  return "off: " + (topology.nodes.empty() ? topology.why_none
                                           : std::string("one node is all that there is to use"));
}

int64_t TreeNodesFor(const EngineOptions& options) {
  if (options.max_tree_nodes != 0) return options.max_tree_nodes;
  const bool speculates =
      options.speculation.draft != DraftKind::kNone || !options.draft_model_directory.empty();
  return speculates ? kTreeNodesDefault : 0;
}

// New tokens of one forward, at most.
int64_t StepTokensMax(const EngineOptions& options) {
  return options.prefill_chunk + options.blend_piece;
}

// One page size for all layers: then all groups of the cache hold the same pages, and one count of
// pages is that of all.
int64_t PageSizeFor(const ModelInfo& info, int64_t wanted) {
  if (info.layers.empty()) return kRecurrentCheckpointInterval;
  if (wanted != 0) return wanted;
  int64_t page_size = 1;
  for (const AttentionLayerSpec& layer : info.layers) {
    page_size = std::max(page_size, DefaultPageSize(layer));
  }
  return page_size;
}

// Pages that kv_bytes hold. The cache adds one page to those of its token capacity, so fewer than
// two are none.
Result<int64_t> PageCountFor(const ModelInfo& info, int64_t kv_bytes, int64_t page_size,
                             int64_t page_bytes, int64_t machine_bytes) {
  int64_t count = kv_bytes / page_bytes;
  if (kv_bytes == 0) {
    const int64_t one_sequence = (info.max_position_embeddings + page_size - 1) / page_size + 1;
    count = std::min(one_sequence, machine_bytes / kMemoryPartForKV / page_bytes);
  }
  std::ostringstream message;
  message << "EngineOptions::kv_bytes is " << kv_bytes << (kv_bytes == 0 ? " (by itself)" : "")
          << "; a page of " << page_size << " tokens takes " << page_bytes << " bytes and ";
  if (count < 2) {
    message << "two are the least: give at least " << 2 * page_bytes << " or a smaller page_size";
    return Status(StatusCode::kBadArgument, message.str());
  }
  constexpr int64_t kPagesMax = std::numeric_limits<int32_t>::max();  // page ids are int32
  if (count > kPagesMax) {
    message << kPagesMax << " are the most: give less or a larger page_size";
    return Status(StatusCode::kBadArgument, message.str());
  }
  return count;
}

// What a model's caches are for. A draft model follows the samples and nothing else: its sequences
// are never retained, and go back to a text's fork or by a token.
enum class Role : uint8_t { kTarget, kDraft };

int64_t SequencesOf(const EngineOptions& options, Role role) {
  return role == Role::kDraft ? options.max_num_sequences
                              : CacheSequencesMax(options.max_num_sequences);
}

AttentionKVCacheOptions CacheOptions(const EngineOptions& options, const ModelInfo& info, Role role,
                                     const std::shared_ptr<ParallelRunner>& runner,
                                     int64_t page_size, int64_t page_count) {
  AttentionKVCacheOptions cache_options;
  cache_options.layers = info.layers;
  cache_options.max_num_sequences = SequencesOf(options, role);
  cache_options.token_capacity = (page_count - 1) * page_size;
  cache_options.prefill_chunk_size =
      role == Role::kDraft ? options.prefill_chunk : StepTokensMax(options);
  cache_options.page_size = page_size;
  cache_options.rope = info.rope;
  cache_options.kernel_path = options.kernel_path;
  cache_options.runner = runner;
  return cache_options;
}

RecurrentCacheOptions StateOptions(const EngineOptions& options, const ModelInfo& info, Role role,
                                   const std::shared_ptr<ParallelRunner>& runner,
                                   int64_t retained_states) {
  return {.layers = info.recurrent_layers,
          .max_num_sequences = SequencesOf(options, role),
          .prefill_chunk_size = options.prefill_chunk,
          .recent_checkpoints = kRecentCheckpoints,
          .thinned_checkpoints = role == Role::kDraft ? 0 : kThinnedCheckpoints,
          .max_tree_slots = TreeNodesFor(options),
          .max_retained_slots = retained_states,
          .max_loads = role == Role::kDraft ? 0 : kLoadsMax,
          .kernel_path = options.kernel_path,
          .runner = runner};
}

Result<int64_t> RetainedStatesFor(const EngineOptions& options, int64_t slot_bytes,
                                  int64_t available_bytes) {
  if (!options.prefix_cache) return 0;
  if (options.state_bytes == 0) {
    return std::min(kRetainedStatesDefault, available_bytes / kMemoryPartForStates / slot_bytes);
  }
  constexpr int64_t kStatesMax = int64_t{1} << 30;  // slots are int32, some of them of sequences
  const int64_t count = options.state_bytes / slot_bytes;
  if (count <= kStatesMax) return count;
  std::ostringstream message;
  message << "EngineOptions::state_bytes is " << options.state_bytes << "; a state takes "
          << slot_bytes << " bytes and " << kStatesMax << " are the most: give less";
  return Status(StatusCode::kBadArgument, message.str());
}

// The layers of the cache, with the types in which the options want keys and values.
Status SetKVTypes(const EngineOptions& options, ModelInfo* info) {
  const DType k_dtype = options.k_dtype.value_or(options.dtype);
  const DType v_dtype = options.v_dtype.value_or(options.dtype);
  for (AttentionLayerSpec& layer : info->layers) {
    if (layer.latent && k_dtype != v_dtype) {
      return Status(StatusCode::kBadArgument,
                    options.model_directory + ": keys of " + info->architecture +
                        " are its values, so they are stored once; k_dtype is " +
                        std::string(DTypeName(k_dtype)) + ", v_dtype is " +
                        std::string(DTypeName(v_dtype)) + ": give the same for both");
    }
    layer.dtype = k_dtype;
    if (v_dtype != k_dtype) layer.v_dtype = v_dtype;
  }
  return {};
}

// A plan and what it was made from.
struct Blueprint {
  MemoryPlan plan;
  int64_t retained_states = 0;
  ModelOptions model_options;
  // Options of the draft model, if there is one. Its nodes are guesses that it goes on from.
  EngineOptions draft_options = {};
  MemoryPlan draft = {};
};

// What the models take, each measured when it is first asked for: none of it depends on the number
// of pages, so a search for one reads each model's files once.
struct ModelMeasures {
  std::optional<ModelMeasure> target;
  std::optional<ModelMeasure> draft;
};

// Pages of attention layers, and what a step takes beside them.
Status PlanPages(const EngineOptions& options, const ModelInfo& info, Role role,
                 const std::shared_ptr<ParallelRunner>& runner, int64_t samples_max,
                 MemoryPlan* plan) {
  plan->page_size = PageSizeFor(info, options.page_size);
  plan->longest_context = info.max_position_embeddings;
  if (info.layers.empty()) return {};
  QUIRE_ASSIGN_OR_RETURN(
      const KVMemory two_pages,
      MeasureKVCache(CacheOptions(options, info, role, runner, plan->page_size, 2), samples_max));
  plan->page_bytes = two_pages.page_bytes;
  plan->kv_bytes_per_token = plan->page_bytes / plan->page_size;
  QUIRE_ASSIGN_OR_RETURN(plan->page_count, PageCountFor(info, options.kv_bytes, plan->page_size,
                                                        plan->page_bytes, plan->machine_bytes));
  QUIRE_ASSIGN_OR_RETURN(
      const KVMemory kv,
      MeasureKVCache(CacheOptions(options, info, role, runner, plan->page_size, plan->page_count),
                     samples_max));
  plan->kv_bytes = kv.storage_bytes;
  plan->scratch_bytes += kv.scratch_bytes + kv.angle_bytes;
  // As in the step with the largest pieces: their moved rows.
  if (role == Role::kTarget && options.blend_piece > 0) {
    plan->scratch_bytes += MovedRowsBytes(info.layers, options.blend_piece);
  }
  plan->longest_context = std::min(plan->longest_context, plan->page_count * plan->page_size);
  return {};
}

// States of recurrent layers; how many of them may be retained.
Result<int64_t> PlanStates(const EngineOptions& options, const ModelInfo& info, Role role,
                           const std::shared_ptr<ParallelRunner>& runner, MemoryPlan* plan) {
  if (info.recurrent_layers.empty()) return 0;
  QUIRE_ASSIGN_OR_RETURN(const RecurrentMemory active,
                         MeasureRecurrentCache(StateOptions(options, info, role, runner, 0)));
  QUIRE_ASSIGN_OR_RETURN(const int64_t retained,
                         RetainedStatesFor(options, active.slot_bytes, plan->available_bytes));
  QUIRE_ASSIGN_OR_RETURN(const RecurrentMemory all, MeasureRecurrentCache(StateOptions(
                                                        options, info, role, runner, retained)));
  plan->state_bytes = all.storage_bytes;
  plan->scratch_bytes += all.scratch_bytes;
  // A prompt that comes has its state with it, until its rows are all there.
  if (role == Role::kTarget && options.staging_bytes > 0)
    plan->staging_bytes += options.max_num_sequences * active.slot_bytes;
  return retained;
}

// The draft model is computed like the other one, with KV for as many tokens and states for as many
// samples. It has the scratch of the other's draws.
Status PlanDraftModel(const EngineOptions& options, ModelMeasures* models, Blueprint* blueprint) {
  if (options.draft_model_directory.empty()) return {};
  const std::shared_ptr<ParallelRunner>& runner = blueprint->model_options.runner;
  EngineOptions& draft_options = blueprint->draft_options;
  draft_options = options;
  draft_options.model_directory = options.draft_model_directory;
  draft_options.draft_model_directory.clear();
  draft_options.speculation = {};
  draft_options.max_tree_nodes = TreeNodesFor(options);
  draft_options.prefix_cache = false;
  draft_options.page_size = 0;
  draft_options.kv_bytes = 0;
  const int64_t samples_max = StepSamplesMax(options.max_num_sequences, options.prefill_chunk);
  if (!models->draft) {
    QUIRE_ASSIGN_OR_RETURN(models->draft,
                           Model::Measure(draft_options.model_directory, blueprint->model_options,
                                          options.prefill_chunk, samples_max));
    QUIRE_RETURN_IF_ERROR(SetKVTypes(draft_options, &models->draft->info));
    QUIRE_RETURN_IF_ERROR(
        CheckDraftVocabulary({options.model_directory, models->target->info.vocab_size},
                             {options.draft_model_directory, models->draft->info.vocab_size}));
  }
  const ModelInfo& target = models->target->info;
  const ModelMeasure& model = *models->draft;
  MemoryPlan& draft = blueprint->draft;
  draft.machine_bytes = blueprint->plan.machine_bytes;
  draft.available_bytes = blueprint->plan.available_bytes;
  if (!model.info.layers.empty() && !target.layers.empty()) {
    const int64_t page_size = PageSizeFor(model.info, 0);
    QUIRE_ASSIGN_OR_RETURN(
        const KVMemory two_pages,
        MeasureKVCache(CacheOptions(draft_options, model.info, Role::kDraft, runner, page_size, 2),
                       samples_max));
    const int64_t tokens =
        blueprint->plan.page_count * blueprint->plan.page_size + draft_options.max_tree_nodes;
    // A page of tokens and one of nodes of each sample are not full.
    draft_options.kv_bytes =
        ((tokens + page_size - 1) / page_size + 2 * samples_max + 1) * two_pages.page_bytes;
  }
  draft.scratch_bytes = model.workspace_bytes +
                        samples_max * model.info.vocab_size * static_cast<int64_t>(sizeof(float));
  QUIRE_RETURN_IF_ERROR(
      PlanPages(draft_options, model.info, Role::kDraft, runner, samples_max, &draft));
  QUIRE_ASSIGN_OR_RETURN(const int64_t retained,
                         PlanStates(draft_options, model.info, Role::kDraft, runner, &draft));
  QUIRE_CHECK(retained == 0);
  blueprint->plan.draft_bytes =
      model.info.weight_bytes + draft.kv_bytes + draft.state_bytes + draft.scratch_bytes;
  return {};
}

// `models`: what has been measured for options that differ in kv_bytes only; the rest is measured
// and added.
Result<Blueprint> MakeBlueprint(const EngineOptions& options, const MachineMemory& memory,
                                ModelMeasures* models) {
  QUIRE_RETURN_IF_ERROR(CheckOptions(options));
  const int64_t rows_max =
      StepLogitRowsMax(options.max_num_sequences, options.prefill_chunk, TreeNodesFor(options));
  QUIRE_ASSIGN_OR_RETURN(std::shared_ptr<ParallelRunner> shared_runner, RunnerFor(options));
  const ModelOptions model_options{.dtype = options.dtype,
                                   .activations = options.activations,
                                   .kernel_path = options.kernel_path,
                                   .runner = std::move(shared_runner)};
  const std::shared_ptr<ParallelRunner>& runner = model_options.runner;
  const int64_t samples_max = StepSamplesMax(options.max_num_sequences, options.prefill_chunk);
  if (!models->target) {
    QUIRE_ASSIGN_OR_RETURN(models->target, Model::Measure(options.model_directory, model_options,
                                                          StepTokensMax(options), rows_max));
    QUIRE_RETURN_IF_ERROR(SetKVTypes(options, &models->target->info));
  }
  const ModelMeasure& model = *models->target;
  const ModelInfo& info = model.info;
  MemoryPlan plan;
  plan.machine_bytes = memory.total_bytes;
  plan.available_bytes = memory.available_bytes;
  plan.weight_bytes = info.weight_bytes;
  plan.staging_bytes = options.staging_bytes;
  if (options.sending_bytes > 0) {
    plan.sending_bytes =
        PrefillTraffic::SendingBytesOf(options.sending_bytes, StateSizesOf(info.recurrent_layers));
  }
  plan.scratch_bytes = model.workspace_bytes +
                       rows_max * info.vocab_size * static_cast<int64_t>(sizeof(float)) +
                       runner->worker_count() * DrawScratch::Bytes(info.vocab_size);
  QUIRE_RETURN_IF_ERROR(PlanPages(options, info, Role::kTarget, runner, samples_max, &plan));
  QUIRE_ASSIGN_OR_RETURN(const int64_t retained_states,
                         PlanStates(options, info, Role::kTarget, runner, &plan));
  Blueprint blueprint{
      .plan = plan, .retained_states = retained_states, .model_options = model_options};
  QUIRE_RETURN_IF_ERROR(PlanDraftModel(options, models, &blueprint));
  MemoryPlan& whole = blueprint.plan;
  whole.total_bytes = whole.weight_bytes + whole.kv_bytes + whole.state_bytes +
                      whole.scratch_bytes + whole.draft_bytes + whole.staging_bytes +
                      whole.sending_bytes;
  return blueprint;
}

// The blueprint with as many pages as fit in `bytes_max`; none if two are too many, or if there are
// no pages.
Result<std::optional<Blueprint>> FitPages(const EngineOptions& options, const Blueprint& whole,
                                          const MachineMemory& memory, int64_t bytes_max,
                                          ModelMeasures* models) {
  const MemoryPlan& plan = whole.plan;
  if (plan.page_count <= 2) return std::optional<Blueprint>();
  EngineOptions fewer = options;
  fewer.runner = whole.model_options.runner;
  const auto with_pages = [&](int64_t count) {
    fewer.kv_bytes = count * plan.page_bytes;
    return MakeBlueprint(fewer, memory, models);
  };
  QUIRE_ASSIGN_OR_RETURN(Blueprint found, with_pages(2));
  if (found.plan.total_bytes > bytes_max) return std::optional<Blueprint>();
  // Nearly a straight line, so the first guess is off by a few pages at most.
  const double bytes_per_page =
      static_cast<double>(plan.total_bytes - found.plan.total_bytes) / (plan.page_count - 2);
  const double room = static_cast<double>(bytes_max - found.plan.total_bytes);
  int64_t count = std::min(2 + static_cast<int64_t>(room / bytes_per_page), plan.page_count);
  bool is_fitting = false;
  while (count > 2 && !is_fitting) {
    QUIRE_ASSIGN_OR_RETURN(Blueprint fewer_pages, with_pages(count));
    is_fitting = fewer_pages.plan.total_bytes <= bytes_max;
    if (is_fitting) found = std::move(fewer_pages);
    if (!is_fitting) --count;
  }
  while (count < plan.page_count) {
    QUIRE_ASSIGN_OR_RETURN(Blueprint more_pages, with_pages(++count));
    if (more_pages.plan.total_bytes > bytes_max) break;
    found = std::move(more_pages);
  }
  return std::optional<Blueprint>(std::move(found));
}

// Has fewer pages than usual where those do not fit and nobody has said how many there are.
Result<Blueprint> MakeFittingBlueprint(const EngineOptions& options, const MachineMemory& memory,
                                       ModelMeasures* models) {
  QUIRE_ASSIGN_OR_RETURN(Blueprint blueprint, MakeBlueprint(options, memory, models));
  const int64_t bytes_max = memory.available_bytes - memory.available_bytes / kMemoryPartLeftFree;
  if (options.kv_bytes != 0 || blueprint.plan.total_bytes <= bytes_max) return blueprint;
  QUIRE_ASSIGN_OR_RETURN(std::optional<Blueprint> fitting,
                         FitPages(options, blueprint, memory, bytes_max, models));
  if (!fitting) return blueprint;
  fitting->plan.kv_shrunk = true;
  return std::move(*fitting);
}

std::string SizeText(int64_t bytes) {
  constexpr int64_t kExactMax = int64_t{10} << 20;  // in GiB it would be 0.00 or 0.01
  if (bytes < kExactMax) return std::to_string(bytes) + " bytes";
  return GiBText(static_cast<double>(bytes));
}

// The system gives out addresses freely and ends the process when their memory is used up, so what
// cannot fit is refused before anything is taken.
Status CheckMemoryHolds(const EngineOptions& options, const Blueprint& blueprint,
                        const MachineMemory& memory, ModelMeasures* models) {
  const MemoryPlan& plan = blueprint.plan;
  if (plan.total_bytes <= memory.available_bytes) return {};
  std::ostringstream message;
  message << "Engine::Create: this takes " << SizeText(plan.total_bytes) << " of memory ("
          << SizeText(plan.weight_bytes) << " of weights, " << SizeText(plan.kv_bytes)
          << " of KV pages, " << SizeText(plan.state_bytes) << " of states, "
          << SizeText(plan.scratch_bytes) << " of scratch, " << SizeText(plan.draft_bytes)
          << " of a draft model, " << SizeText(plan.staging_bytes)
          << " of staging for prompts from elsewhere, " << SizeText(plan.sending_bytes)
          << " for what is sent to peers), and " << SizeText(memory.available_bytes)
          << " are free of the " << SizeText(memory.total_bytes)
          << " that this machine or its control group has; ";
  QUIRE_ASSIGN_OR_RETURN(const std::optional<Blueprint> fitting,
                         FitPages(options, blueprint, memory, memory.available_bytes, models));
  if (fitting) {
    const int64_t kv_bytes = fitting->plan.page_count * fitting->plan.page_bytes;
    message << "at most " << kv_bytes << " (" << SizeText(kv_bytes)
            << ") of EngineOptions::kv_bytes would fit";
  } else {
    message << "no number of KV pages would fit: lower EngineOptions::state_bytes, "
               "max_tree_nodes, prefill_chunk or max_num_sequences, or take a smaller model";
  }
  return Status(StatusCode::kOutOfMemory, message.str());
}

// A model and caches for its layers.
struct ModelParts {
  std::unique_ptr<Model> model;
  std::shared_ptr<AttentionKVCache> cache;
  std::shared_ptr<RecurrentCache> recurrent;
};

Result<ModelParts> LoadParts(const EngineOptions& options, Role role,
                             const ModelOptions& model_options, const MemoryPlan& plan,
                             int64_t retained_states) {
  ModelParts parts;
  QUIRE_ASSIGN_OR_RETURN(parts.model, Model::Load(options.model_directory, model_options));
  ModelInfo info = parts.model->info();
  QUIRE_RETURN_IF_ERROR(SetKVTypes(options, &info));
  const std::shared_ptr<ParallelRunner>& runner = model_options.runner;
  if (!info.layers.empty()) {
    QUIRE_ASSIGN_OR_RETURN(parts.cache,
                           AttentionKVCache::Create(CacheOptions(options, info, role, runner,
                                                                 plan.page_size, plan.page_count)));
  }
  if (!info.recurrent_layers.empty()) {
    QUIRE_ASSIGN_OR_RETURN(parts.recurrent, RecurrentCache::Create(StateOptions(
                                                options, info, role, runner, retained_states)));
  }
  return parts;
}

}  // namespace

Result<MemoryPlan> PlanMemoryWithin(const EngineOptions& options, const MachineMemory& memory) {
  ModelMeasures models;
  QUIRE_ASSIGN_OR_RETURN(const Blueprint blueprint, MakeFittingBlueprint(options, memory, &models));
  return blueprint.plan;
}

Status CheckMemoryWithin(const EngineOptions& options, const MachineMemory& memory) {
  ModelMeasures models;
  QUIRE_ASSIGN_OR_RETURN(const Blueprint blueprint, MakeFittingBlueprint(options, memory, &models));
  return CheckMemoryHolds(options, blueprint, memory, &models);
}

Result<MemoryPlan> Engine::PlanMemory(const EngineOptions& options) {
  return GuardEntry([&] { return PlanMemoryWithin(options, ReadMachineMemory()); });
}

Result<std::unique_ptr<Engine>> Engine::Create(const EngineOptions& options) {
  return GuardEntry([&]() -> Result<std::unique_ptr<Engine>> {
    const MachineMemory memory = ReadMachineMemory();
    ModelMeasures models;
    QUIRE_ASSIGN_OR_RETURN(Blueprint blueprint, MakeFittingBlueprint(options, memory, &models));
    const MemoryPlan& plan = blueprint.plan;
    QUIRE_RETURN_IF_ERROR(CheckMemoryHolds(options, blueprint, memory, &models));
    EngineImpl::Parts parts;
    parts.runner = blueprint.model_options.runner;
    QUIRE_ASSIGN_OR_RETURN(ModelParts own,
                           LoadParts(options, Role::kTarget, blueprint.model_options, plan,
                                     blueprint.retained_states));
    parts.model = std::move(own.model);
    parts.cache = std::move(own.cache);
    parts.recurrent = std::move(own.recurrent);
    if (!options.draft_model_directory.empty()) {
      QUIRE_ASSIGN_OR_RETURN(ModelParts draft,
                             LoadParts(blueprint.draft_options, Role::kDraft,
                                       blueprint.model_options, blueprint.draft, 0));
      parts.model_drafter = std::make_unique<ModelDrafter>(ModelDrafter::Parts{
          .model = std::move(draft.model),
          .cache = std::move(draft.cache),
          .recurrent = std::move(draft.recurrent),
          .prefill_chunk = options.prefill_chunk,
          .rows_max = StepSamplesMax(options.max_num_sequences, options.prefill_chunk),
          .vocab_size = parts.model->info().vocab_size});
    }
    parts.options = options;
    parts.options.page_size = plan.page_size;
    parts.options.max_tree_nodes = TreeNodesFor(options);
    parts.state_bytes = plan.state_bytes;
    parts.kv_bytes = plan.kv_bytes;
    parts.kv_bytes_per_token = plan.kv_bytes_per_token;
    QUIRE_ASSIGN_OR_RETURN(parts.backend, FindBackend(options.kernel_path));
    parts.numa = NumaText(options, *parts.runner);
    return std::unique_ptr<Engine>(std::make_unique<EngineImpl>(std::move(parts)));
  });
}

}  // namespace quire
