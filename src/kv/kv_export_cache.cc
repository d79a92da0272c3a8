// ExportKV and ImportKV of PagedKVCache, and what a forward loads.
#include <algorithm>
#include <initializer_list>
#include <limits>

#include "kv/kv_export_rows.h"
#include "kv/paged_kv_cache.h"

namespace quire {
namespace {

Status BadTensor(const char* call, int64_t layer, const char* name, const TensorView& tensor,
                 const std::string& wanted) {
  return Status(StatusCode::kBadArgument, std::string(call) + ": layer " + std::to_string(layer) +
                                              ": " + name + " is " + tensor.ToString() +
                                              "; it must be " + wanted);
}

Status CheckRows(const char* call, int64_t layer, const char* name, const TensorView& tensor,
                 DType dtype, std::initializer_list<int64_t> shape) {
  const bool fits = std::ranges::equal(tensor.shape(), shape) && tensor.dtype() == dtype &&
                    tensor.is_contiguous();
  if (!fits) {
    std::string wanted;
    for (const int64_t dim : shape) wanted += (wanted.empty() ? "[" : ", ") + std::to_string(dim);
    return BadTensor(call, layer, name, tensor,
                     "contiguous " + std::string(DTypeName(dtype)) + " " + wanted + "]");
  }
  if (tensor.data() != nullptr) return Status();
  return BadTensor(call, layer, name, tensor, "in memory: its pointer is null");
}

// All tensors are of `count` tokens of the layer.
Status CheckLayer(const char* call, int64_t layer, const AttentionLayerSpec& spec,
                  const LayerKV& kv, int64_t count) {
  const int64_t heads = spec.num_kv_heads;
  QUIRE_RETURN_IF_ERROR(
      CheckRows(call, layer, "k", kv.k, spec.dtype, {count, heads, spec.qk_head_dim}));
  if (!spec.latent) {
    QUIRE_RETURN_IF_ERROR(
        CheckRows(call, layer, "v", kv.v, spec.value_dtype(), {count, heads, spec.v_head_dim}));
  }
  if (IsQuantised(spec.dtype)) {
    QUIRE_RETURN_IF_ERROR(
        CheckRows(call, layer, "k_scale", kv.k_scale, DType::kF32, {count, heads}));
  }
  if (spec.latent || !IsQuantised(spec.value_dtype())) return Status();
  return CheckRows(call, layer, "v_scale", kv.v_scale, DType::kF32, {count, heads});
}

// Empty for the values of a latent layer.
HeadRows RowsOf(const TensorView& tensor) {
  if (tensor.rank() != 3) return {};
  return {.data = tensor.data(),
          .dtype = tensor.dtype(),
          .row_stride = tensor.stride(0),
          .head_stride = tensor.stride(1)};
}

const void* RowAt(const HeadRows& rows, int64_t row) {
  if (rows.data == nullptr) return nullptr;
  return static_cast<const std::byte*>(rows.data) + row * rows.row_stride * DTypeBytes(rows.dtype);
}

// Null where there are none.
const float* ScalesFrom(const TensorView& scales, int64_t row) {
  if (scales.rank() == 0) return nullptr;
  return scales.data_as<float>() + row * scales.stride(0);
}

int64_t TokenCount(const LayerKV& kv) { return kv.k.rank() == 3 ? kv.k.dim(0) : 0; }

}  // namespace

Status PagedKVCache::ExportKV(int64_t seq_id, int64_t layer, int64_t start, const LayerKV& to) {
  return Enter("ExportKV", [&]() -> Status {
    QUIRE_ASSIGN_OR_RETURN(const int32_t index, FindSequence("ExportKV", seq_id));
    if (layer < 0 || layer >= static_cast<int64_t>(layers_.size())) {
      return Status(StatusCode::kBadArgument, "ExportKV: no layer " + std::to_string(layer) +
                                                  "; this cache has " +
                                                  std::to_string(layers_.size()));
    }
    const BlockIndex last = sequences_[index].last;
    const int64_t count = TokenCount(to);
    const int64_t length = CommittedLength(sequences_[index]);
    if (start >= 0 && count > length - start)
      QUIRE_RETURN_IF_ERROR(RequireCommitted("ExportKV", index));
    if (start < 0 || count < 1 || count > length - start) {
      return Status(StatusCode::kBadArgument,
                    "ExportKV: " + std::to_string(count) + " tokens from " + std::to_string(start) +
                        " on are not in sequence " + std::to_string(seq_id) + " of length " +
                        std::to_string(length));
    }
    const size_t l = static_cast<size_t>(layer);
    QUIRE_RETURN_IF_ERROR(
        CheckHeld("ExportKV", sequences_[index], layers_[l].group, start, start + count));
    QUIRE_RETURN_IF_ERROR(CheckLayer("ExportKV", layer, options_.layers[l], to, count));
    std::vector<AppendTarget> slots(static_cast<size_t>(count));
    FillSlots(last, layers_[l].group, start, slots);
    ReadRows(storage_->layer(layer), slots,
             {.k = to.k.data(),
              .v = to.v.data(),
              .k_scale = to.k_scale.data_as<float>(),
              .v_scale = to.v_scale.data_as<float>()},
             *options_.runner);
    return Status();
  });
}

// The number of tokens in all blocks.
Result<int64_t> PagedKVCache::CheckImport(const Sequence& sequence,
                                          std::span<const KVBlock> blocks) const {
  int64_t total = 0;
  for (const KVBlock& block : blocks) {
    if (block.size() != layers_.size()) {
      return Status(StatusCode::kBadArgument,
                    "ImportKV: a block has " + std::to_string(block.size()) +
                        " layers; this cache has " + std::to_string(layers_.size()));
    }
    const int64_t count = TokenCount(block[0]);
    for (size_t l = 0; l < block.size(); ++l) {
      QUIRE_RETURN_IF_ERROR(
          CheckLayer("ImportKV", static_cast<int64_t>(l), options_.layers[l], block[l], count));
    }
    const int64_t room = std::numeric_limits<int32_t>::max() - tree_.End(sequence.last) - total;
    if (count < 1 || count > room) {
      return Status(count < 1 ? StatusCode::kBadArgument : StatusCode::kTooLarge,
                    "ImportKV: a block of " + std::to_string(count) + " tokens behind " +
                        std::to_string(tree_.End(sequence.last) + total) +
                        "; the least is 1, and positions end at 2^31");
    }
    total += count;
  }
  if (total > 0) return total;
  return Status(StatusCode::kBadArgument, "ImportKV: there are no blocks");
}

Status PagedKVCache::ImportKV(int64_t seq_id, std::span<const KVBlock> blocks) {
  return Enter("ImportKV", [&]() -> Status {
    QUIRE_RETURN_IF_ERROR(RequireIdle("ImportKV"));
    QUIRE_ASSIGN_OR_RETURN(const int32_t index, FindSequence("ImportKV", seq_id));
    QUIRE_RETURN_IF_ERROR(RequireCommitted("ImportKV", index));
    Sequence& sequence = sequences_[index];
    QUIRE_ASSIGN_OR_RETURN(const int64_t count, CheckImport(sequence, blocks));
    ForwardPlan plan;
    QUIRE_RETURN_IF_ERROR(PlanImport("ImportKV", sequence, count, FirstPage::kShared, &plan));
    CommitImport(&sequence, &plan);
    StoreImport(plan, blocks);
    SlideTo(&sequence, plan.members[0].old_length());
    FreeHidden();
    return Status();
  });
}

Status PagedKVCache::PlanImport(const char* call, const Sequence& sequence, int64_t count,
                                FirstPage first, ForwardPlan* plan) {
  plan->group_appends.resize(groups_.size());
  tree_.BeginPlanning();
  const AppendPlan append =
      first == FirstPage::kOwn
          ? tree_.PlanAppendToOwnPage(sequence.last, count, plan->group_appends)
          : tree_.PlanAppend(sequence.last, count, plan->group_appends);
  plan->members.push_back({.id = sequence.id, .append = append, .imported = count});
  std::vector<int64_t> page_counts;
  for (const GroupAppend& group : plan->group_appends) page_counts.push_back(group.page_count);
  QUIRE_RETURN_IF_ERROR(CheckPages(call, page_counts));
  tree_.Reserve(std::span(&append, 1), plan->group_appends);
  plan->Reserve(tree_);
  return Status();
}

void PagedKVCache::CommitImport(Sequence* sequence, ForwardPlan* plan) noexcept {
  const AppendPlan& append = plan->members[0].append;
  sequence->last = plan->members[0].last = tree_.Append(append, plan->group_appends);
  plan->Fill(tree_);
  for (int g = 0; g < tree_.group_count(); ++g) {
    const GroupPlan& group = plan->group(g);
    storage_->Copy(g, group.copy_from, group.copy_to, group.copy_opens_tile.data());
  }
  if (append.copies()) tree_.Release(append.last);
  hides_more_ |= append.copies();
}

void PagedKVCache::StoreImport(const ForwardPlan& plan, std::span<const KVBlock> blocks) noexcept {
  for (int g = 0; g < tree_.group_count(); ++g) {
    const GroupPlan& group = plan.group(g);
    for (const int64_t layer : groups_[static_cast<size_t>(g)].layers) {
      int64_t row = 0;
      for (const KVBlock& block : blocks) {
        const LayerKV& kv = block[static_cast<size_t>(layer)];
        StoreImport(group.imports, layer, row, kv, *options_.runner);
        row += kv.k.dim(0);
      }
    }
  }
}

// Tokens [first, first + count) of the imports. What fills whole tiles is moved so; the rows before
// and behind them one by one.
void PagedKVCache::StoreImport(const TokenSlots& imports, int64_t layer, int64_t first,
                               const LayerKV& kv, ParallelRunner& runner) noexcept {
  const KVPages pages = storage_->layer(layer);
  const std::span<const AppendTarget> targets(imports.targets.data() + first,
                                              static_cast<size_t>(kv.k.dim(0)));
  for (int64_t row = 0; row < kv.k.dim(0);) {
    const auto rest = targets.subspan(static_cast<size_t>(row));
    const uint8_t* const opens_tile = imports.opens_tile.data() + first + row;
    const RowRun run = FirstRun(pages.layout, rest, opens_tile);
    HeadRows k = RowsOf(kv.k);
    HeadRows v = pages.layout.latent ? HeadRows{} : RowsOf(kv.v);
    k.data = RowAt(k, row);
    v.data = RowAt(v, row);
    const float* const k_scale = ScalesFrom(kv.k_scale, row);
    const float* const v_scale = ScalesFrom(kv.v_scale, row);
    if (run.whole_tiles) {
      WriteTiles(pages, rest.first(static_cast<size_t>(run.rows)),
                 {.k = k.data, .v = v.data, .k_scale = k_scale, .v_scale = v_scale}, runner);
    } else {
      backend_->append_kv({.pages = pages,
                           .row_count = run.rows,
                           .k = k,
                           .v = v,
                           .k_scale = k_scale,
                           .v_scale = v_scale,
                           .rotary = {},
                           .targets = rest.data(),
                           .opens_tile = opens_tile},
                          runner);
    }
    row += run.rows;
  }
}

// ---------------------------------------------------------------------- loads

Status PagedKVCache::CheckLoaded(const AttentionCall& call, const ForwardMember& member,
                                 std::span<const LayerKV> blocks) const {
  int64_t total = 0;
  for (const LayerKV& block : blocks) {
    const int64_t count = TokenCount(block);
    QUIRE_RETURN_IF_ERROR(CheckLayer(call.name, call.layer, call.spec, block, count));
    total += count;
  }
  if (total == member.imported) return Status();
  return Status(StatusCode::kBadArgument,
                std::string(call.name) + ": layer " + std::to_string(call.layer) +
                    ": the source of sequence " + std::to_string(member.id) + " gave " +
                    std::to_string(total) + " tokens; " + std::to_string(member.imported) +
                    " were planned");
}

Status PagedKVCache::LoadLayer(const AttentionCall& call) {
  Layer& layer = layers_[static_cast<size_t>(call.layer)];
  if (layer.loaded || plan_.import_count() == 0) return Status();
  for (const ForwardMember& member : plan_.members) {
    if (member.imported == 0) continue;
    const Result<std::span<const LayerKV>> blocks = member.source->Load(call.layer);
    if (!blocks.ok()) {
      return Status(blocks.status().code(),
                    std::string(call.name) + ": layer " + std::to_string(call.layer) +
                        " of sequence " + std::to_string(member.id) + " was not loaded: " +
                        std::string(blocks.status().message()) + "; call AbortForward");
    }
    QUIRE_RETURN_IF_ERROR(CheckLoaded(call, member, *blocks));
    int64_t first = member.first_import;
    for (const LayerKV& block : *blocks) {
      StoreImport(plan_.group(layer.group).imports, call.layer, first, block, *options_.runner);
      first += TokenCount(block);
    }
  }
  layer.loaded = true;
  return Status();
}

}  // namespace quire
