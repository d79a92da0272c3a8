#include "kv/pages/layer_groups.h"

#include <limits>
#include <optional>
#include <string>

#include "base/check.h"
#include "tensor/checked_size.h"

namespace quire {
namespace {

// Runs of memory shorter than this are read at less than full speed (specs: performance); longer
// pages only waste more of the last page of each sequence, so the size also has an upper limit, in
// tokens.
constexpr int64_t kPageBytesGood = 48 * 1024;
constexpr int64_t kDefaultPageSizeMin = 16;
constexpr int64_t kDefaultPageSizeMax = 256;

// A cap at which no score is near it; well inside float32.
constexpr double kSoftCapMax = 1e6;

Status OutOfRange(const std::string& field, int64_t value, const std::string& range) {
  return Status(StatusCode::kBadArgument, "AttentionKVCacheOptions: " + field + " is " +
                                              std::to_string(value) + "; it must be " + range);
}

Status CheckExtent(const std::string& field, int64_t value) {
  if (value >= 1 && value <= kExtentMax) return Status();
  return OutOfRange(field, value, "in [1, " + std::to_string(kExtentMax) + "]");
}

Status CheckCount(const std::string& field, int64_t value) {
  if (value >= 1 && value <= std::numeric_limits<int32_t>::max()) return Status();
  return OutOfRange(field, value, "at least 1 and below 2^31");
}

Status CheckDType(const std::string& field, DType dtype) {
  const bool is_float = dtype == DType::kF32 || dtype == DType::kF16 || dtype == DType::kBF16;
  if (is_float || IsQuantised(dtype)) return Status();
  return Status(StatusCode::kBadArgument,
                "AttentionKVCacheOptions: " + field + " is " + std::string(DTypeName(dtype)) +
                    "; it must be float32, float16, bfloat16, int8 or float8_e4m3fn");
}

Status CheckLatent(const std::string& name, const AttentionLayerSpec& layer) {
  if (layer.num_kv_heads != 1)
    return OutOfRange(name + "num_kv_heads", layer.num_kv_heads, "1, as the layer is latent");
  if (layer.v_head_dim > layer.qk_head_dim) {
    return OutOfRange(name + "v_head_dim", layer.v_head_dim,
                      "at most qk_head_dim, " + std::to_string(layer.qk_head_dim) +
                          ": the values of a latent layer are the first elements of its keys");
  }
  if (layer.value_dtype() == layer.dtype) return Status();
  return Status(StatusCode::kBadArgument,
                "AttentionKVCacheOptions: " + name + "v_dtype is " +
                    std::string(DTypeName(layer.value_dtype())) +
                    "; a latent layer's values are its keys, so it must be absent");
}

Status CheckLayer(const AttentionLayerSpec& layer, size_t index) {
  const std::string name = "layers[" + std::to_string(index) + "].";
  QUIRE_RETURN_IF_ERROR(CheckExtent(name + "num_qo_heads", layer.num_qo_heads));
  QUIRE_RETURN_IF_ERROR(CheckExtent(name + "num_kv_heads", layer.num_kv_heads));
  QUIRE_RETURN_IF_ERROR(CheckExtent(name + "qk_head_dim", layer.qk_head_dim));
  QUIRE_RETURN_IF_ERROR(CheckExtent(name + "v_head_dim", layer.v_head_dim));
  if (layer.num_qo_heads % layer.num_kv_heads != 0) {
    return OutOfRange(name + "num_qo_heads", layer.num_qo_heads,
                      "a multiple of num_kv_heads, " + std::to_string(layer.num_kv_heads));
  }
  if (layer.window < 0) return OutOfRange(name + "window", layer.window, "0 (none) or above");
  if (!(layer.soft_cap >= 0) || !(layer.soft_cap <= kSoftCapMax)) {
    return Status(StatusCode::kBadArgument, "AttentionKVCacheOptions: " + name + "soft_cap is " +
                                                std::to_string(layer.soft_cap) +
                                                "; it must be 0 (none) or positive, up to " +
                                                std::to_string(kSoftCapMax));
  }
  const int64_t sink_count = static_cast<int64_t>(layer.head_sinks.size());
  if (sink_count != 0 && sink_count != layer.num_qo_heads) {
    return OutOfRange(name + "head_sinks.size()", sink_count,
                      "0 or num_qo_heads, " + std::to_string(layer.num_qo_heads));
  }
  if (layer.latent) QUIRE_RETURN_IF_ERROR(CheckLatent(name, layer));
  QUIRE_RETURN_IF_ERROR(CheckDType(name + "dtype", layer.dtype));
  return CheckDType(name + "v_dtype", layer.value_dtype());
}

// One cache has one mode and one pairing, which say when and how keys are turned; by how much may
// differ between layers. Long and short sets are chosen per sequence, for the options of the cache.
Status CheckLayerRope(const AttentionKVCacheOptions& options, size_t index) {
  const std::optional<RopeOptions>& rope = options.layers[index].rope;
  if (!rope) return Status();
  std::string why;
  const bool latent = options.layers[index].latent;  // its caller rotates
  if (!latent && rope->mode != options.rope.mode)
    why = "mode is not that of AttentionKVCacheOptions::rope";
  if (!latent && rope->pairing != options.rope.pairing)
    why = "pairing is not that of AttentionKVCacheOptions::rope";
  if (HasLongSet(rope->scaling))
    why = "scaling is kLongRope or kDynamic, which are for AttentionKVCacheOptions::rope only";
  if (why.empty()) return Status();
  return Status(StatusCode::kBadArgument,
                "AttentionKVCacheOptions: layers[" + std::to_string(index) + "].rope: its " + why);
}

Status CheckOptions(const AttentionKVCacheOptions& options) {
  if (options.layers.empty()) {
    return Status(StatusCode::kBadArgument, "AttentionKVCacheOptions: layers is empty");
  }
  for (size_t i = 0; i < options.layers.size(); ++i) {
    QUIRE_RETURN_IF_ERROR(CheckLayer(options.layers[i], i));
    QUIRE_RETURN_IF_ERROR(CheckLayerRope(options, i));
  }
  QUIRE_RETURN_IF_ERROR(CheckCount("max_num_sequences", options.max_num_sequences));
  if (options.token_capacity < 1)
    return OutOfRange("token_capacity", options.token_capacity, "at least 1");
  QUIRE_RETURN_IF_ERROR(CheckCount("max_tree_size", options.max_tree_size));
  if (options.max_pop < 0 || options.max_pop > std::numeric_limits<int32_t>::max())
    return OutOfRange("max_pop", options.max_pop, "at least 0 and below 2^31");
  QUIRE_RETURN_IF_ERROR(CheckCount("prefill_chunk_size", options.prefill_chunk_size));
  return options.page_size == 0 ? Status() : CheckExtent("page_size", options.page_size);
}

KVLayout LayoutOf(const AttentionLayerSpec& layer, int64_t page_size) {
  return {.dtype = layer.dtype,
          .num_kv_heads = static_cast<int>(layer.num_kv_heads),
          .qk_head_dim = static_cast<int>(layer.qk_head_dim),
          .v_head_dim = static_cast<int>(layer.v_head_dim),
          .page_size = static_cast<int>(page_size),
          // One spelling of each layout, so that equal ones compare equal.
          .value_dtype = layer.value_dtype() == layer.dtype ? std::nullopt : layer.v_dtype,
          .latent = layer.latent};
}

// Page ids are int32.
Result<int64_t> PageCount(const AttentionKVCacheOptions& options, const KVLayout& layout) {
  const int64_t page_size = layout.page_size;
  QUIRE_DCHECK(page_size > 0 && options.token_capacity > 0);
  const int64_t count = (options.token_capacity - 1) / page_size + 2;
  if (count > std::numeric_limits<int32_t>::max()) {
    return OutOfRange("token_capacity", options.token_capacity,
                      "below 2^31 pages of " + std::to_string(page_size) + " tokens");
  }
  return count;
}

// The pages of all layers together must have a size.
Status CheckBytes(const AttentionKVCacheOptions& options, const std::vector<LayerGroup>& groups) {
  int64_t left = kSizeMax;
  for (const LayerGroup& group : groups) {
    const size_t page_bytes = group.layout.page_bytes();  // below 2^64, as extents are
    const std::optional<int64_t> bytes =
        page_bytes > static_cast<size_t>(kSizeMax)
            ? std::nullopt
            : CheckedProduct({group.page_count, static_cast<int64_t>(group.layers.size()),
                              static_cast<int64_t>(page_bytes)});
    if (!bytes || *bytes > left) {
      return OutOfRange("token_capacity", options.token_capacity,
                        "small enough for 2^60 bytes of pages in all layers");
    }
    left -= *bytes;
  }
  return Status();
}

}  // namespace

int64_t DefaultPageSize(const AttentionLayerSpec& layer) {
  int64_t size = kDefaultPageSizeMin;
  while (size < kDefaultPageSizeMax &&
         LayoutOf(layer, size).page_bytes() < static_cast<size_t>(kPageBytesGood)) {
    size *= 2;
  }
  return size;
}

Result<std::vector<LayerGroup>> MakeLayerGroups(const AttentionKVCacheOptions& options) {
  QUIRE_RETURN_IF_ERROR(CheckOptions(options));
  std::vector<LayerGroup> groups;
  for (size_t l = 0; l < options.layers.size(); ++l) {
    const AttentionLayerSpec& layer = options.layers[l];
    const int64_t page_size = options.page_size != 0 ? options.page_size : DefaultPageSize(layer);
    const KVLayout layout = LayoutOf(layer, page_size);
    const int64_t window = layer.window == 0 ? kNoWindow : layer.window;
    size_t g = 0;
    const auto is_of = [&](const LayerGroup& group) {
      const AttentionLayerSpec& first = options.layers[static_cast<size_t>(group.layers[0])];
      return group.layout == layout && group.window == window && first.rope == layer.rope;
    };
    while (g < groups.size() && !is_of(groups[g])) ++g;
    if (g == groups.size()) {
      QUIRE_ASSIGN_OR_RETURN(const int64_t page_count, PageCount(options, layout));
      groups.push_back(
          {.layout = layout, .window = window, .page_count = page_count, .layers = {}});
    }
    groups[g].layers.push_back(static_cast<int64_t>(l));
  }
  QUIRE_RETURN_IF_ERROR(CheckBytes(options, groups));
  return groups;
}

}  // namespace quire
