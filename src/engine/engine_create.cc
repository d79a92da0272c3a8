// Engine::PlanMemory and Engine::Create: sizes of everything, then model and cache.
#include <algorithm>
#include <limits>
#include <sstream>
#include <utility>

#include "base/guard.h"
#include "engine/engine_impl.h"
#include "engine/machine_memory.h"
#include "kv/kv_memory.h"

namespace quire {
namespace {

// Of the machine's memory, when EngineOptions::kv_bytes is 0: weights, scratch and the other
// programs need the rest.
constexpr int64_t kMemoryPartForKV = 4;

// Limits that keep every size of a plan within 63 bits. Steps of a million tokens take seconds on
// any machine, and none has a thousand cores.
constexpr int64_t kPrefillChunkMax = int64_t{1} << 20;
constexpr int64_t kNumSequencesMax = int64_t{1} << 20;
constexpr int64_t kThreadsMax = 1024;
constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();

Status CheckInRange(std::string_view field, int64_t value, int64_t least, int64_t most) {
  if (value >= least && value <= most) return {};
  std::ostringstream message;
  message << "EngineOptions::" << field << " is " << value << "; it must be at "
          << (value < least ? "least " : "most ") << (value < least ? least : most);
  return Status(StatusCode::kBadArgument, message.str());
}

Status CheckOptions(const EngineOptions& options) {
  QUIRE_RETURN_IF_ERROR(CheckInRange("threads", options.threads, 0, kThreadsMax));
  QUIRE_RETURN_IF_ERROR(CheckInRange("page_size", options.page_size, 0, kUnlimited));
  QUIRE_RETURN_IF_ERROR(CheckInRange("prefill_chunk", options.prefill_chunk, 1, kPrefillChunkMax));
  QUIRE_RETURN_IF_ERROR(
      CheckInRange("max_num_sequences", options.max_num_sequences, 1, kNumSequencesMax));
  QUIRE_RETURN_IF_ERROR(CheckInRange("max_waiting", options.max_waiting, 1, kUnlimited));
  return CheckInRange("kv_bytes", options.kv_bytes, 0, kUnlimited);
}

// One page size for all layers: then all groups of the cache hold the same pages, and one count of
// pages is that of all.
int64_t PageSizeFor(const ModelInfo& info, int64_t wanted) {
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
                             int64_t page_bytes) {
  int64_t count = kv_bytes / page_bytes;
  if (kv_bytes == 0) {
    const int64_t one_sequence = (info.max_position_embeddings + page_size - 1) / page_size + 1;
    count = std::min(one_sequence, MachineMemoryBytes() / kMemoryPartForKV / page_bytes);
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

AttentionKVCacheOptions CacheOptions(const EngineOptions& options, const ModelInfo& info,
                                     const std::shared_ptr<ParallelRunner>& runner,
                                     int64_t page_size, int64_t page_count) {
  AttentionKVCacheOptions cache_options;
  cache_options.layers = info.layers;
  cache_options.max_num_sequences = CacheSequencesMax(options.max_num_sequences);
  cache_options.token_capacity = (page_count - 1) * page_size;
  cache_options.prefill_chunk_size = options.prefill_chunk;
  cache_options.page_size = page_size;
  cache_options.rope = info.rope;
  cache_options.kernel_path = options.kernel_path;
  cache_options.runner = runner;
  return cache_options;
}

// A plan and what it was made from.
struct Blueprint {
  MemoryPlan plan;
  ModelOptions model_options;
};

Result<Blueprint> MakeBlueprint(const EngineOptions& options) {
  QUIRE_RETURN_IF_ERROR(CheckOptions(options));
  const ModelOptions model_options{
      .dtype = options.dtype,
      .k_dtype = options.k_dtype,
      .v_dtype = options.v_dtype,
      .kernel_path = options.kernel_path,
      .runner = options.runner ? options.runner : CreateThreadPool(options.threads)};
  const std::shared_ptr<ParallelRunner>& runner = model_options.runner;
  const int64_t samples_max = StepSamplesMax(options.max_num_sequences, options.prefill_chunk);
  QUIRE_ASSIGN_OR_RETURN(
      const ModelMeasure model,
      Model::Measure(options.model_directory, model_options, options.prefill_chunk, samples_max));
  const ModelInfo& info = model.info;
  MemoryPlan plan;
  plan.weight_bytes = info.weight_bytes;
  plan.page_size = PageSizeFor(info, options.page_size);
  QUIRE_ASSIGN_OR_RETURN(
      const KVMemory two_pages,
      MeasureKVCache(CacheOptions(options, info, runner, plan.page_size, 2), samples_max));
  plan.page_bytes = two_pages.page_bytes;
  plan.kv_bytes_per_token = plan.page_bytes / plan.page_size;
  QUIRE_ASSIGN_OR_RETURN(plan.page_count,
                         PageCountFor(info, options.kv_bytes, plan.page_size, plan.page_bytes));
  QUIRE_ASSIGN_OR_RETURN(
      const KVMemory kv,
      MeasureKVCache(CacheOptions(options, info, runner, plan.page_size, plan.page_count),
                     samples_max));
  plan.kv_bytes = kv.storage_bytes;
  plan.scratch_bytes = model.workspace_bytes + kv.scratch_bytes +
                       samples_max * info.vocab_size * static_cast<int64_t>(sizeof(float)) +
                       runner->worker_count() * DrawScratch::Bytes(info.vocab_size);
  plan.total_bytes = plan.weight_bytes + plan.kv_bytes + plan.scratch_bytes;
  plan.machine_bytes = MachineMemoryBytes();
  plan.longest_context = std::min(info.max_position_embeddings, plan.page_count * plan.page_size);
  return Blueprint{.plan = plan, .model_options = model_options};
}

// The system gives out addresses freely and ends the process when their memory is used up, so what
// cannot fit is refused before anything is taken.
Status CheckMachineHolds(const MemoryPlan& plan) {
  if (plan.total_bytes <= plan.machine_bytes) return {};
  std::ostringstream message;
  message << "Engine::Create: " << plan.weight_bytes << " bytes of weights, " << plan.kv_bytes
          << " of KV pages and " << plan.scratch_bytes << " of scratch are more than the "
          << plan.machine_bytes
          << " bytes of memory that this machine has; lower EngineOptions::kv_bytes, "
             "prefill_chunk or max_num_sequences, or take a smaller model";
  return Status(StatusCode::kOutOfMemory, message.str());
}

}  // namespace

Result<MemoryPlan> Engine::PlanMemory(const EngineOptions& options) {
  return GuardEntry([&]() -> Result<MemoryPlan> {
    QUIRE_ASSIGN_OR_RETURN(const Blueprint blueprint, MakeBlueprint(options));
    return blueprint.plan;
  });
}

Result<std::unique_ptr<Engine>> Engine::Create(const EngineOptions& options) {
  return GuardEntry([&]() -> Result<std::unique_ptr<Engine>> {
    QUIRE_ASSIGN_OR_RETURN(Blueprint blueprint, MakeBlueprint(options));
    const MemoryPlan& plan = blueprint.plan;
    QUIRE_RETURN_IF_ERROR(CheckMachineHolds(plan));
    EngineImpl::Parts parts;
    parts.runner = blueprint.model_options.runner;
    QUIRE_ASSIGN_OR_RETURN(parts.model,
                           Model::Load(options.model_directory, blueprint.model_options));
    QUIRE_ASSIGN_OR_RETURN(parts.cache, AttentionKVCache::Create(
                                            CacheOptions(options, parts.model->info(), parts.runner,
                                                         plan.page_size, plan.page_count)));
    parts.page_size = plan.page_size;
    parts.kv_bytes = plan.kv_bytes;
    parts.kv_bytes_per_token = plan.kv_bytes_per_token;
    parts.kernel_path = options.kernel_path.empty() ? KernelPaths().front() : options.kernel_path;
    parts.prefill_chunk = options.prefill_chunk;
    parts.max_num_sequences = options.max_num_sequences;
    parts.max_waiting = options.max_waiting;
    parts.prefix_cache = options.prefix_cache;
    return std::unique_ptr<Engine>(std::make_unique<EngineImpl>(std::move(parts)));
  });
}

}  // namespace quire
