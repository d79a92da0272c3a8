#include "kv/recurrent/recurrent_layout.h"

#include <algorithm>
#include <limits>
#include <string>

#include "base/guard.h"
#include "tensor/host_memory.h"

namespace quire {
namespace {

// Beyond this no machine has the memory, and products of two such numbers fit an int64.
constexpr int64_t kCountMax = std::numeric_limits<int32_t>::max();
constexpr double kStorageBytesMax = 0x1p46;

Status BadOption(const std::string& what) {
  return Status(StatusCode::kBadArgument, "RecurrentCacheOptions: " + what);
}

Status CheckRange(const std::string& name, int64_t value, int64_t least) {
  if (value >= least && value <= kCountMax) return Status();
  return BadOption(name + " is " + std::to_string(value) + "; it must be at least " +
                   std::to_string(least) + " and below 2^31");
}

Status CheckProduct(const std::string& name, std::initializer_list<int64_t> factors) {
  double product = 1;
  for (const int64_t factor : factors) product *= static_cast<double>(factor);
  if (product <= static_cast<double>(kCountMax)) return Status();
  return BadOption(name + " has more than 2^31 numbers in a state");
}

Status CheckMatrix(const RecurrentLayerSpec& spec, const std::string& name) {
  QUIRE_RETURN_IF_ERROR(CheckRange(name + ".num_heads", spec.num_heads, 1));
  QUIRE_RETURN_IF_ERROR(CheckRange(name + ".num_key_heads", spec.num_key_heads, 1));
  QUIRE_RETURN_IF_ERROR(CheckRange(name + ".key_dim", spec.key_dim, 1));
  QUIRE_RETURN_IF_ERROR(CheckRange(name + ".value_dim", spec.value_dim, 1));
  if (spec.num_heads % spec.num_key_heads != 0) {
    return BadOption(name + ".num_heads, " + std::to_string(spec.num_heads) +
                     ", is no multiple of num_key_heads, " + std::to_string(spec.num_key_heads));
  }
  return CheckProduct(name, {spec.num_heads, spec.key_dim, spec.value_dim});
}

Status CheckConvolution(const RecurrentLayerSpec& spec, const std::string& name) {
  QUIRE_RETURN_IF_ERROR(CheckRange(name + ".num_channels", spec.num_channels, 1));
  QUIRE_RETURN_IF_ERROR(CheckRange(name + ".width", spec.width, 2));
  return CheckProduct(name, {spec.num_channels, spec.width});
}

Status CheckCounts(const RecurrentCacheOptions& options) {
  QUIRE_RETURN_IF_ERROR(CheckRange("max_num_sequences", options.max_num_sequences, 1));
  QUIRE_RETURN_IF_ERROR(CheckRange("prefill_chunk_size", options.prefill_chunk_size, 1));
  QUIRE_RETURN_IF_ERROR(CheckRange("recent_checkpoints", options.recent_checkpoints, 1));
  QUIRE_RETURN_IF_ERROR(CheckRange("thinned_checkpoints", options.thinned_checkpoints, 0));
  QUIRE_RETURN_IF_ERROR(CheckRange("max_retained_slots", options.max_retained_slots, 0));
  QUIRE_RETURN_IF_ERROR(CheckRange("max_tree_size", options.max_tree_size, 1));
  QUIRE_RETURN_IF_ERROR(CheckRange("max_tree_slots", options.max_tree_slots, 0));
  QUIRE_RETURN_IF_ERROR(CheckRange("max_loads", options.max_loads, 0));
  QUIRE_RETURN_IF_ERROR(CheckRange("max_slots", options.max_slots, 0));
  if (options.layers.empty()) return BadOption("layers is empty; give at least one layer");
  return Status();
}

RecurrentLayerLayout LayoutOf(const RecurrentLayerSpec& spec) {
  RecurrentLayerLayout layer;
  layer.convolution = spec.kind == RecurrentLayerKind::kConvolution;
  if (layer.convolution) {
    layer.channels = {.channel_count = spec.num_channels, .width = spec.width};
  } else {
    layer.matrix = {.head_count = spec.num_heads,
                    .key_head_count = spec.num_key_heads,
                    .key_dim = spec.key_dim,
                    .value_dim = spec.value_dim,
                    .delta_rule = spec.kind == RecurrentLayerKind::kGatedDelta};
  }
  return layer;
}

// In double first: the exact numbers may not fit.
Status CheckStorage(const RecurrentCacheOptions& options, const RecurrentLayout& layout) {
  const double kept = static_cast<double>(options.recent_checkpoints) +
                      static_cast<double>(options.thinned_checkpoints) + 1;
  const double sequences = static_cast<double>(options.max_num_sequences);
  const double nodes = static_cast<double>(options.max_tree_slots);
  const double slots =
      nodes + (options.max_slots != 0
                   ? static_cast<double>(options.max_slots)
                   : 2 * sequences * kept + static_cast<double>(options.max_loads) +
                         static_cast<double>(options.max_retained_slots));
  const double blocks = 2 * sequences * kept + nodes;
  const double bytes = sizeof(float) * (slots * static_cast<double>(layout.slot_size) +
                                        blocks * static_cast<double>(layout.block_size));
  const double scratch = static_cast<double>(options.prefill_chunk_size) *
                         static_cast<double>(layout.row_scratch) * sizeof(float);
  if (slots <= static_cast<double>(kCountMax) && blocks <= static_cast<double>(kCountMax) &&
      bytes + scratch <= kStorageBytesMax)
    return Status();
  return BadOption(
      "layers, prefill_chunk_size, max_num_sequences, recent_checkpoints, "
      "thinned_checkpoints, max_retained_slots, max_tree_slots, max_loads and "
      "max_slots ask for " +
      std::to_string(bytes + scratch) + " bytes in " + std::to_string(slots) +
      " states; at most 2^46 bytes in fewer than 2^31");
}

}  // namespace

int64_t RecurrentLayout::storage_bytes() const {
  const int64_t floats =
      StateSlotCount(history) * slot_size + InputBlockCount(history) * block_size;
  return floats * static_cast<int64_t>(sizeof(float));
}

Result<RecurrentLayout> MakeRecurrentLayout(const RecurrentCacheOptions& options) {
  QUIRE_RETURN_IF_ERROR(CheckCounts(options));
  RecurrentLayout layout;
  for (size_t l = 0; l < options.layers.size(); ++l) {
    const RecurrentLayerSpec& spec = options.layers[l];
    const std::string name = "layers[" + std::to_string(l) + "]";
    RecurrentLayerLayout layer = LayoutOf(spec);
    QUIRE_RETURN_IF_ERROR(layer.convolution ? CheckConvolution(spec, name)
                                            : CheckMatrix(spec, name));
    layer.state_offset = layout.slot_size;
    layer.input_offset = layout.block_size;
    layout.slot_size += layer.state_size();
    layout.block_size += kRecurrentCheckpointInterval * layer.input_size();
    layout.row_scratch =
        std::max(layout.row_scratch, layer.input_size() + layer.side_size() + layer.output_size());
    layout.parameter_scratch = std::max(layout.parameter_scratch, layer.parameter_size());
    QUIRE_RETURN_IF_ERROR(CheckStorage(options, layout));
    layout.layers.push_back(layer);
  }
  layout.history = {.max_num_sequences = options.max_num_sequences,
                    .max_retained_slots = options.max_retained_slots,
                    .slot_count = options.max_slots,
                    .max_tree_size = options.max_tree_size,
                    .max_tree_slots = options.max_tree_slots,
                    .max_rows = options.prefill_chunk_size,
                    .max_loads = options.max_loads,
                    .keep = {.history = 1,
                             .interval = kRecurrentCheckpointInterval,
                             .recent = options.recent_checkpoints,
                             .thinned = options.thinned_checkpoints}};
  return layout;
}

Result<RecurrentMemory> MeasureRecurrentCache(const RecurrentCacheOptions& options) {
  return GuardEntry([&]() -> Result<RecurrentMemory> {
    QUIRE_ASSIGN_OR_RETURN(const RecurrentLayout layout, MakeRecurrentLayout(options));
    const auto bytes = static_cast<size_t>(layout.storage_bytes());
    return RecurrentMemory{.slot_bytes = layout.slot_size * static_cast<int64_t>(sizeof(float)),
                           .storage_bytes = static_cast<int64_t>(HostMemory::AllocatedBytes(bytes)),
                           .scratch_bytes = layout.scratch_floats(options.prefill_chunk_size) *
                                            static_cast<int64_t>(sizeof(float))};
  });
}

}  // namespace quire
