#include "ffi/tvm/tvm_create.h"

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ffi/tensors.h"
#include "ffi/tvm/tvm_arguments.h"
#include "ffi/tvm/tvm_kv_cache.h"
#include "ffi/tvm/tvm_rope.h"

namespace quire::ffi {
namespace {

namespace tf = tvm::ffi;

constexpr int32_t kArgumentCount = 28;

// Numbers of the arguments that are read by name below.
enum Argument : int32_t {
  kConfig = 0,
  kPartition = 1,
  kQoHeads = 2,
  kKvHeads = 3,
  kQkDim = 4,
  kVDim = 5,
  kKinds = 6,
  kTransfer = 7,
  kRopeMode = 8,
  kRopeScale = 9,
  kRopeTheta = 10,
  kExtFactors = 11,
  kInit = 12,
  kAppendMha = 13,
  kAppendMla = 14,
  kFirstAttention = 15,  // up to kLastAttention: arrays of a backend's name and its functions
  kLastAttention = 22,
  kMerge = 23,
  kRotate = 24,  // from here on functions
};

enum AttentionKind : int64_t { kMha = 0, kMla = 1, kLinear = 2, kMhaSliding = 3 };

void CheckFunctionOrNone(const TvmArguments& arguments, int32_t index, const char* name) {
  if (!arguments.IsNone(index)) arguments.Get<tf::Function>(index, name);
}

// [] or [backend, function, ...]: nothing of it is called.
void CheckAttentionKernel(const TvmArguments& arguments, int32_t index) {
  const auto entries = arguments.Get<tf::Array<tf::Any>>(index, "attention kernel");
  if (entries.empty()) return;
  const auto backend = entries[0].try_cast<tf::String>();
  const bool has_function = entries.size() > 1 && entries[1].try_cast<tf::Function>().has_value();
  if (backend && has_function && (*backend == "tirx" || *backend == "flashinfer")) return;
  arguments.Throw(index,
                  "(attention kernel) must be empty or begin with \"tirx\" or \"flashinfer\" and a "
                  "function");
}

void CheckKernels(const TvmArguments& arguments) {
  CheckFunctionOrNone(arguments, kAppendMha, "append kernel");
  CheckFunctionOrNone(arguments, kAppendMla, "MLA append kernel");
  for (int32_t i = kFirstAttention; i <= kLastAttention; ++i) CheckAttentionKernel(arguments, i);
  const auto merges = arguments.Get<tf::Array<tf::Any>>(kMerge, "merge kernels");
  if (merges.empty()) arguments.Throw(kMerge, "(merge kernels) must have at least one function");
  for (const tf::Any& merge : merges) {
    if (merge.try_cast<tf::Function>()) continue;
    arguments.Throw(kMerge, "(merge kernels) has an entry of type " + merge.GetTypeKey() +
                                "; it must be a function");
  }
  for (int32_t i = kRotate; i < kArgumentCount; ++i) CheckFunctionOrNone(arguments, i, "kernel");
}

DType ReadDType(const TvmArguments& arguments) {
  const auto init = arguments.Get<tf::Tensor>(kInit, "tensor of the cache's dtype and device");
  if (init.device().device_type != kDLCPU) {
    arguments.Throw(kInit,
                    "is a tensor of another device than the CPU, where Quire's caches are; "
                    "call quire.tvm.uninstall() to create one of TVM's");
  }
  const DLDataType dtype = init.dtype();
  const Result<DType> known = FromDLDataType(dtype);
  if (known.ok() && (*known == DType::kF32 || *known == DType::kF16 || *known == DType::kBF16))
    return *known;
  arguments.Throw(kInit, "has dtype " + std::string(tf::DLDataTypeToString(dtype)) +
                             "; keys and values are float32, float16 or bfloat16");
}

struct CacheShape {
  int64_t max_num_sequences, token_capacity, prefill_chunk_size, page_size;
  bool windows;
  int64_t layer_window;
};

CacheShape ReadCacheShape(const TvmArguments& arguments) {
  const auto entries = arguments.Get<tf::Shape>(kConfig, "sizes");
  if (entries.size() != 5 && entries.size() != 6) {
    arguments.Throw(kConfig, "has " + std::to_string(entries.size()) +
                                 " entries; they are max_num_sequences, token_capacity, "
                                 "prefill_chunk_size, page_size, support_sliding_window and, if "
                                 "given, layer_sliding_window_size");
  }
  constexpr const char* kNames[] = {"max_num_sequences", "token_capacity", "prefill_chunk_size",
                                    "page_size"};
  for (size_t i = 0; i < 4; ++i) arguments.CheckRange(kConfig, kNames[i], entries[i], 1, INT32_MAX);
  arguments.CheckRange(kConfig, "support_sliding_window", entries[4], 0, 1);
  constexpr int64_t kDefaultLayerWindow = 1024;  // TVM's
  const int64_t layer_window = entries.size() == 6 ? entries[5] : kDefaultLayerWindow;
  arguments.CheckRange(kConfig, "layer_sliding_window_size", layer_window, 1, INT32_MAX);
  return {entries[0], entries[1], entries[2], entries[3], entries[4] == 1, layer_window};
}

// What TVM's function answers on a Disco worker's thread; on any other one it throws.
std::optional<int64_t> AskDisco(const char* name) {
  const auto function = tf::Function::GetGlobal(name);
  if (!function) return std::nullopt;
  try {
    return (*function)().cast<int64_t>();
  } catch (const tf::Error&) {
    return std::nullopt;
  }
}

// The pipeline stage, one of `stages`, whose cache is made: what quire.tvm.install() was told,
// else, as in TVM, that of the Disco worker on this thread.
int64_t ReadStage(const TvmArguments& arguments, const TvmOptions& options, int64_t stages) {
  const std::string has =
      "(layer partition) has " + std::to_string(stages) + " pipeline stages, and ";
  if (options.pipeline_stage) {
    if (*options.pipeline_stage < stages) return *options.pipeline_stage;
    arguments.Throw(kPartition, has + "quire.tvm.install() was told that this is stage " +
                                    std::to_string(*options.pipeline_stage) +
                                    "; stages count from 0");
  }
  if (stages == 1) return 0;
  const auto rank = AskDisco("runtime.disco.worker_rank");
  const auto workers = AskDisco("runtime.disco.world_size");
  if (!rank || !workers) {
    arguments.Throw(kPartition, has +
                                    "this thread is no Disco worker's; give the stage to "
                                    "quire.tvm.install(pipeline_stage=...)");
  }
  if (*workers % stages == 0) return *rank / (*workers / stages);
  arguments.Throw(kPartition, has + "there are " + std::to_string(*workers) +
                                  " Disco workers; each stage must have as many");
}

struct Stage {
  int64_t first_layer, layer_count, total_layers;
};

Stage ReadPartition(const TvmArguments& arguments, const TvmOptions& options) {
  const auto partition = arguments.Get<tf::Shape>(kPartition, "layer partition");
  const bool increases = std::ranges::adjacent_find(partition, std::ranges::greater_equal()) ==
                         std::ranges::end(partition);
  if (partition.size() < 2 || partition[0] != 0 || !increases) {
    arguments.Throw(kPartition,
                    "(layer partition) must be [0, ..., layers], the first layer of each pipeline "
                    "stage and the number of layers, increasing");
  }
  const auto stage = static_cast<size_t>(
      ReadStage(arguments, options, static_cast<int64_t>(partition.size()) - 1));
  return {partition[stage], partition[stage + 1] - partition[stage], partition.back()};
}

// The attention kinds of all layers of the model.
tf::Shape ReadKinds(const TvmArguments& arguments, const Stage& stage) {
  const auto kinds = arguments.Get<tf::Shape>(kKinds, "attention kinds");
  if (static_cast<int64_t>(kinds.size()) != stage.total_layers) {
    arguments.Throw(kKinds, "(attention kinds) has " + std::to_string(kinds.size()) +
                                " entries; the model has " + std::to_string(stage.total_layers) +
                                " layers");
  }
  for (const int64_t kind : kinds) {
    if (kind == kMha || kind == kMla || kind == kMhaSliding) continue;
    arguments.Throw(
        kKinds, "(attention kinds) has kind " + std::to_string(kind) +
                    (kind == kLinear ? ", LinearAttn, for which TVM registers no function; such "
                                       "layers keep their state in an rnn_state_create"
                                     : "; kinds are MHA (0), MLA (1) and MHA_SLIDING (3)"));
  }
  return kinds;
}

// As in TVM, one set of numbers is for all layers: MHA layers have values of qk_head_dim whatever
// v_head_dim says, which is kv_lora_rank, and MLA layers one key head whatever num_kv_heads says.
std::vector<AttentionLayerSpec> ReadLayers(const TvmArguments& arguments, const CacheShape& sizes,
                                           const Stage& stage) {
  const tf::Shape kinds = ReadKinds(arguments, stage);
  AttentionLayerSpec plain;
  plain.num_qo_heads = arguments.GetInt(kQoHeads, "num_qo_heads", 1);
  plain.num_kv_heads = arguments.GetInt(kKvHeads, "num_kv_heads", 1);
  plain.qk_head_dim = plain.v_head_dim = arguments.GetInt(kQkDim, "qk_head_dim", 1);
  plain.dtype = ReadDType(arguments);
  AttentionLayerSpec latent = plain;
  latent.latent = true;
  latent.num_kv_heads = 1;
  latent.v_head_dim = arguments.GetInt(kVDim, "v_head_dim", 1);
  latent.rope = RopeOptions();  // the model rotates
  const bool has_latent = std::ranges::count(kinds, kMla) > 0;
  if (has_latent ? latent.v_head_dim > plain.qk_head_dim : latent.v_head_dim != plain.qk_head_dim) {
    arguments.Throw(kVDim, "(v_head_dim) is " + std::to_string(latent.v_head_dim) +
                               (has_latent ? "; with MLA layers it must be at most qk_head_dim, "
                                           : "; without MLA layers it must be qk_head_dim, ") +
                               std::to_string(plain.qk_head_dim));
  }
  std::vector<AttentionLayerSpec> layers;
  for (int64_t l = stage.first_layer; l < stage.first_layer + stage.layer_count; ++l) {
    const int64_t kind = kinds[static_cast<size_t>(l)];
    layers.push_back(kind == kMla ? latent : plain);
    if (kind == kMhaSliding) layers.back().window = sizes.layer_window;
  }
  return layers;
}

// The rotation of `layer`, whose keys the cache rotates; null if there is none. Also for
// RopeMode::kInline, whose attention kernels in TVM ignore all but theta and scale.
RopeOptions ReadRope(const TvmArguments& arguments, const TvmOptions& options,
                     const AttentionLayerSpec* layer, bool windows) {
  const int64_t mode = arguments.GetInt(kRopeMode, "rope mode", 0, 2);
  RopeOptions rope;
  rope.position_scale = arguments.Get<double>(kRopeScale, "rotary scale");
  rope.theta = arguments.Get<double>(kRopeTheta, "rotary theta");
  if (!(rope.position_scale > 0) || !std::isfinite(rope.position_scale))
    arguments.Throw(kRopeScale, "(rotary scale) must be above 0");
  if (!(rope.theta > 0) || !std::isfinite(rope.theta))
    arguments.Throw(kRopeTheta, "(rotary theta) must be above 0");
  if (mode == 0 || layer == nullptr) return rope;
  const bool has_kernel = arguments.Is<tf::Function>(kRotate) && !arguments.IsNone(kRotate);
  if (options.rope) {
    rope = *options.rope;
  } else if (arguments.Is<tf::Tensor>(kExtFactors) && !arguments.IsNone(kExtFactors)) {
    arguments.Throw(kExtFactors,
                    "(rope extension factors) lacks the length at which they change; give the "
                    "model's rotation to quire.tvm.install(rope=quire.RopeOptions(...))");
  } else if (has_kernel) {
    rope = ReadRotationKernel(arguments.Get<tf::Function>(kRotate, "split and rotation kernel"),
                              {.scale = rope.position_scale,
                               .theta = rope.theta,
                               .num_qo_heads = layer->num_qo_heads,
                               .num_kv_heads = layer->num_kv_heads,
                               .head_dim = layer->qk_head_dim,
                               .dtype = layer->dtype});
  }
  // As in TVM: what slides keeps its keys unrotated.
  rope.mode = mode == 1 && !windows ? RopeMode::kNormal : RopeMode::kInline;
  return rope;
}

}  // namespace

tf::Any CreateTvmKVCache(const TvmOptions& options, const tf::AnyView* views, int32_t count) {
  const TvmArguments arguments("paged_attention_kv_cache_create", views, count);
  if (count != kArgumentCount && count != kArgumentCount + 1) {
    ThrowBadArgument("paged_attention_kv_cache_create: " + std::to_string(count) +
                     " arguments; there are 28, and a 29th is ignored");
  }
  const CacheShape sizes = ReadCacheShape(arguments);
  TvmKVCacheObj::Config config;
  AttentionKVCacheOptions& cache = config.cache;
  const Stage stage = ReadPartition(arguments, options);
  config.first_layer = stage.first_layer;
  cache.layers = ReadLayers(arguments, sizes, stage);
  CheckKernels(arguments);
  if (arguments.Get<bool>(kTransfer, "enable transfer")) config.transfer = options.transfer;
  const AttentionLayerSpec* plain = nullptr;
  for (const AttentionLayerSpec& layer : cache.layers) {
    config.has_layer_windows |= layer.window > 0;
    if (!layer.latent && plain == nullptr) plain = &layer;
  }
  config.has_sequence_windows = sizes.windows && !config.has_layer_windows;
  cache.rope = ReadRope(arguments, options, plain, sizes.windows);
  // Where sinks are scored from right before the window, it matters how the model rotates.
  for (AttentionLayerSpec& layer : cache.layers) {
    if (!layer.latent || !options.rope || !config.has_sequence_windows) continue;
    layer.rope = options.rope;
    layer.rope->mode = RopeMode::kNormal;
  }
  cache.max_num_sequences = sizes.max_num_sequences;
  cache.token_capacity = sizes.token_capacity;
  // TVM's own addition: a window may end and begin inside a page, beside the sinks' page.
  if (sizes.windows) cache.token_capacity += 2 * sizes.max_num_sequences * sizes.page_size;
  cache.prefill_chunk_size = sizes.prefill_chunk_size;
  cache.page_size = sizes.page_size;
  cache.tvm_window_span = options.window_span;
  cache.max_pop = 0;  // as in TVM, what is outside of the windows is free when a forward ends
  cache.allow_skipped_layers = true;  // as in TVM
  config.tree_commit = options.tree_commit;
  config.tree_lengths = options.tree_lengths;
  return tf::ObjectRef(tf::make_object<TvmKVCacheObj>(std::move(config)));
}

}  // namespace quire::ffi
