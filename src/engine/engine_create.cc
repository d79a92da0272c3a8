// Engine::Create: sizes of everything, then model and cache.
#include <unistd.h>

#include <algorithm>
#include <sstream>
#include <utility>

#include "base/guard.h"
#include "engine/engine_impl.h"

namespace quire {
namespace {

// Of the machine's memory, when EngineOptions::kv_bytes is 0: weights, scratch and the other
// programs need the rest.
constexpr int64_t kMemoryPartForKV = 4;

Status CheckAtLeast(std::string_view field, int64_t value, int64_t least) {
  if (value >= least) return {};
  std::ostringstream message;
  message << "EngineOptions::" << field << " is " << value << "; it must be at least " << least;
  return Status(StatusCode::kBadArgument, message.str());
}

Status CheckOptions(const EngineOptions& options) {
  QUIRE_RETURN_IF_ERROR(CheckAtLeast("threads", options.threads, 0));
  QUIRE_RETURN_IF_ERROR(CheckAtLeast("page_size", options.page_size, 0));
  QUIRE_RETURN_IF_ERROR(CheckAtLeast("prefill_chunk", options.prefill_chunk, 1));
  QUIRE_RETURN_IF_ERROR(CheckAtLeast("max_num_sequences", options.max_num_sequences, 1));
  QUIRE_RETURN_IF_ERROR(CheckAtLeast("max_waiting", options.max_waiting, 1));
  return CheckAtLeast("kv_bytes", options.kv_bytes, 0);
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

int64_t PageBytes(const ModelInfo& info, int64_t page_size) {
  int64_t bytes = 0;
  for (const AttentionLayerSpec& layer : info.layers) {
    bytes += page_size * layer.num_kv_heads * (layer.qk_head_dim + layer.v_head_dim) *
             DTypeBytes(layer.dtype);
  }
  return bytes;
}

int64_t MachineMemoryBytes() {
  return static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
}

// Pages that kv_bytes hold. The cache adds one page to those of its token capacity, so fewer than
// two are none.
Result<int64_t> PageCountFor(const ModelInfo& info, int64_t kv_bytes, int64_t page_size) {
  const int64_t page_bytes = PageBytes(info, page_size);
  int64_t count = kv_bytes / page_bytes;
  if (kv_bytes == 0) {
    const int64_t one_sequence = (info.max_position_embeddings + page_size - 1) / page_size + 1;
    count = std::min(one_sequence, MachineMemoryBytes() / kMemoryPartForKV / page_bytes);
  }
  if (count >= 2) return count;
  std::ostringstream message;
  message << "EngineOptions::kv_bytes is " << kv_bytes << (kv_bytes == 0 ? " (by itself)" : "")
          << "; a page of " << page_size << " tokens takes " << page_bytes
          << " bytes and two are the least: give at least " << 2 * page_bytes
          << " or a smaller page_size";
  return Status(StatusCode::kBadArgument, message.str());
}

}  // namespace

Result<std::unique_ptr<Engine>> Engine::Create(const EngineOptions& options) {
  return GuardEntry([&]() -> Result<std::unique_ptr<Engine>> {
    QUIRE_RETURN_IF_ERROR(CheckOptions(options));
    EngineImpl::Parts parts;
    parts.runner = options.runner ? options.runner : CreateThreadPool(options.threads);
    QUIRE_ASSIGN_OR_RETURN(parts.model,
                           Model::Load(options.model_directory, {.dtype = options.dtype,
                                                                 .kernel_path = options.kernel_path,
                                                                 .runner = parts.runner}));
    const ModelInfo& info = parts.model->info();
    parts.page_size = PageSizeFor(info, options.page_size);
    QUIRE_ASSIGN_OR_RETURN(const int64_t page_count,
                           PageCountFor(info, options.kv_bytes, parts.page_size));
    parts.kv_bytes = page_count * PageBytes(info, parts.page_size);
    AttentionKVCacheOptions cache_options;
    cache_options.layers = info.layers;
    cache_options.max_num_sequences = CacheSequencesMax(options.max_num_sequences);
    cache_options.token_capacity = (page_count - 1) * parts.page_size;
    cache_options.prefill_chunk_size = options.prefill_chunk;
    cache_options.page_size = parts.page_size;
    cache_options.rope = info.rope;
    cache_options.kernel_path = options.kernel_path;
    cache_options.runner = parts.runner;
    QUIRE_ASSIGN_OR_RETURN(parts.cache, AttentionKVCache::Create(std::move(cache_options)));
    parts.kernel_path = options.kernel_path.empty() ? KernelPaths().front() : options.kernel_path;
    parts.prefill_chunk = options.prefill_chunk;
    parts.max_num_sequences = options.max_num_sequences;
    parts.max_waiting = options.max_waiting;
    parts.prefix_cache = options.prefix_cache;
    return std::unique_ptr<Engine>(std::make_unique<EngineImpl>(std::move(parts)));
  });
}

}  // namespace quire
