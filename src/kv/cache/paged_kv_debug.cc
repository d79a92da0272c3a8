// Debug* of PagedKVCache, its digest and its invariants.
#include <algorithm>
#include <cstring>
#include <optional>

#include "base/checksum.h"
#include "kv/cache/kv_invariants.h"
#include "kv/cache/paged_kv_cache.h"
#include "kv/pages/reserve.h"

namespace quire {
namespace {

Status BadTensor(const char* call, const char* name, const TensorView& tensor,
                 const std::string& why) {
  return Status(StatusCode::kBadArgument,
                std::string(call) + ": " + name + " is " + tensor.ToString() + "; " + why);
}

// [layers, count, heads, dim]
Status CheckShape(const char* call, const char* name, const TensorView& tensor,
                  std::span<const AttentionLayerSpec* const> layers, int64_t count, int64_t dim,
                  bool values) {
  const int64_t layer_count = static_cast<int64_t>(layers.size());
  const int64_t heads = layers[0]->num_kv_heads;
  const bool fits = tensor.rank() == 4 && tensor.dim(0) == layer_count && tensor.dim(1) == count &&
                    tensor.dim(2) == heads && tensor.dim(3) == dim;
  if (!fits) {
    return BadTensor(call, name, tensor,
                     "it must be [" + std::to_string(layer_count) + ", " + std::to_string(count) +
                         ", " + (layers[0]->latent ? "" : std::to_string(heads) + ", ") +
                         std::to_string(dim) + "]");
  }
  if (tensor.stride(3) != 1 && dim > 1)
    return BadTensor(call, name, tensor, "its last dimension must be contiguous");
  for (const AttentionLayerSpec* const layer : layers) {
    const DType stored = values ? layer->value_dtype() : layer->dtype;
    if (tensor.dtype() == DType::kF32 || (tensor.dtype() == stored && !IsQuantised(stored)))
      continue;
    return BadTensor(call, name, tensor,
                     "it must be float32 or the layers' dtype, float32 if that is quantised");
  }
  return tensor.data() != nullptr ? Status() : BadTensor(call, name, tensor, "its pointer is null");
}

// One token of one layer in a tensor [layers, count, heads, dim], whose heads may be strided.
class TokenRows {
 public:
  explicit TokenRows(const TensorView& tensor)
      : tensor_(tensor),
        row_bytes_(static_cast<size_t>(tensor.dim(3) * DTypeBytes(tensor.dtype()))),
        rows_(row_bytes_ * static_cast<size_t>(tensor.dim(2))) {}

  void* data() { return rows_.data(); }  // [head][dim]
  void Load(int64_t layer, int64_t token) {
    for (int64_t h = 0; h < tensor_.dim(2); ++h)
      std::memcpy(Row(h), Element(layer, token, h), row_bytes_);
  }
  void Store(int64_t layer, int64_t token) {
    for (int64_t h = 0; h < tensor_.dim(2); ++h)
      std::memcpy(Element(layer, token, h), Row(h), row_bytes_);
  }

 private:
  std::byte* Row(int64_t head) { return rows_.data() + static_cast<size_t>(head) * row_bytes_; }
  std::byte* Element(int64_t layer, int64_t token, int64_t head) const {
    const int64_t offset =
        layer * tensor_.stride(0) + token * tensor_.stride(1) + head * tensor_.stride(2);
    return tensor_.data_as<std::byte>() + offset * DTypeBytes(tensor_.dtype());
  }

  const TensorView tensor_;
  size_t row_bytes_;
  std::vector<std::byte> rows_;
};

// The same of keys and values; latent layers have no values.
class DebugRows {
 public:
  DebugRows(const TensorView& k, const TensorView* v) : k_(k) {
    if (v != nullptr) v_.emplace(*v);
  }
  void* k() { return k_.data(); }
  void* v() { return v_ ? v_->data() : nullptr; }
  void Load(int64_t layer, int64_t token) {
    k_.Load(layer, token);
    if (v_) v_->Load(layer, token);
  }
  void Store(int64_t layer, int64_t token) {
    k_.Store(layer, token);
    if (v_) v_->Store(layer, token);
  }

 private:
  TokenRows k_;
  std::optional<TokenRows> v_;
};

// [layers, count, dim] as [layers, count, 1, dim]; others stay as they are, and are refused.
TensorView WithHead(const TensorView& kv) {
  if (kv.rank() != 3) return kv;
  int64_t shape[] = {kv.dim(0), kv.dim(1), 1, kv.dim(2)};
  int64_t strides[] = {kv.stride(0), kv.stride(1), kv.dim(2), kv.stride(2)};
  const Result<TensorView> view = TensorView::FromDLPack({.data = kv.data(),
                                                          .device = {kDLCPU, 0},
                                                          .ndim = 4,
                                                          .dtype = ToDLDataType(kv.dtype()),
                                                          .shape = shape,
                                                          .strides = strides,
                                                          .byte_offset = 0});
  return view.ok() ? *view : kv;
}

}  // namespace

Status PagedKVCache::CheckDebugTensors(const char* call, int64_t count, const TensorView& k,
                                       const TensorView* v) const {
  const bool latent = v == nullptr;
  std::vector<const AttentionLayerSpec*> layers;
  for (size_t l = 0; l < options_.layers.size(); ++l) {
    const AttentionLayerSpec& layer = options_.layers[l];
    if (layer.latent != latent) continue;
    layers.push_back(&layer);
    const AttentionLayerSpec& first = *layers[0];
    if (layer.num_kv_heads == first.num_kv_heads && layer.qk_head_dim == first.qk_head_dim &&
        layer.v_head_dim == first.v_head_dim) {
      continue;
    }
    return Status(StatusCode::kBadArgument,
                  std::string(call) + ": layer " + std::to_string(l) +
                      " has other heads or dimensions than the first; one tensor cannot hold both");
  }
  if (layers.empty()) {
    return Status(StatusCode::kBadArgument,
                  std::string(call) + ": this cache has " +
                      (latent ? "no latent layers; call the method without MLA"
                              : "latent layers only; call the method with MLA"));
  }
  const AttentionLayerSpec& first = *layers[0];
  QUIRE_RETURN_IF_ERROR(
      CheckShape(call, latent ? "kv" : "k", k, layers, count, first.qk_head_dim, false));
  if (latent) return Status();
  QUIRE_RETURN_IF_ERROR(CheckShape(call, "v", *v, layers, count, first.v_head_dim, true));
  if (k.dtype() == v->dtype()) return Status();
  return BadTensor(call, "v", *v,
                   "it must be of the dtype of k, " + std::string(DTypeName(k.dtype())));
}

void PagedKVCache::FillSlots(BlockIndex last, int group, int64_t start,
                             std::span<AppendTarget> slots) const noexcept {
  const PagePool& pool = tree_.pool(group);
  const int64_t end = start + static_cast<int64_t>(slots.size());
  tree_.VisitPieces(last, group, start, end, [&](int64_t from, int64_t to, int32_t page) {
    for (int64_t p = from; p < to; ++p) {
      slots[static_cast<size_t>(p - start)] = {.page = page,
                                               .slot = static_cast<int32_t>(pool.Slot(p))};
    }
  });
}

void PagedKVCache::FillDebugSlots(int32_t index, int group, int64_t start,
                                  std::span<AppendTarget> slots) const noexcept {
  const int64_t committed = CommittedLength(control_[index]);
  const auto before_tree = static_cast<size_t>(
      std::clamp<int64_t>(committed - start, 0, static_cast<int64_t>(slots.size())));
  FillSlots(control_[index].last, group, start, slots.first(before_tree));
  const TokenTree* const tree = trees_.Find(index);
  for (size_t i = before_tree; i < slots.size(); ++i) {
    const int64_t node = start + static_cast<int64_t>(i) - committed;
    slots[i] = tree->SlotOf(tree_.pool(group), group, node);
  }
}

Status PagedKVCache::RequireStored(const char* call, int32_t index, size_t layer,
                                   int64_t end) const {
  if (!control_.InBatch(index) || layers_[layer].appended) return Status();
  const auto member = std::ranges::find(plan_.members, index, &ForwardMember::sequence);
  const int64_t stored =
      member->is_tree() ? member->committed + member->first_node() : member->old_length();
  if (end <= stored) return Status();
  return Status(StatusCode::kBadState,
                std::string(call) + ": sequence " + std::to_string(member->id) +
                    " gets the tokens from " + std::to_string(stored) +
                    " on in the open forward, which layer " + std::to_string(layer) +
                    " has not been given yet; call Append for it first");
}

// Positions behind the committed tokens stand for the nodes of the sequence's tree, in node order.
Status PagedKVCache::GetDebug(const char* call, int64_t seq_id, int64_t start, int64_t end,
                              const TensorView& k, const TensorView* v) {
  QUIRE_ASSIGN_OR_RETURN(const int32_t index, control_.Find(call, seq_id));
  const int64_t committed = CommittedLength(control_[index]);
  const int64_t length = committed + trees_.SizeOf(index);
  // Pending tokens, which no sequence with a tree has, are not there yet.
  if (start >= 0 && end > length) QUIRE_RETURN_IF_ERROR(RequireReceived(call, index));
  if (start < 0 || start >= end || end > length) {
    return Status(StatusCode::kBadArgument,
                  std::string(call) + ": [" + std::to_string(start) + ", " + std::to_string(end) +
                      ") is no range of positions of sequence " + std::to_string(seq_id) +
                      " of length " + std::to_string(length));
  }
  for (int g = 0; g < tree_.group_count(); ++g) {
    if (groups_[static_cast<size_t>(g)].layout.latent != (v == nullptr)) continue;
    QUIRE_RETURN_IF_ERROR(
        CheckHeld(call, control_[index], g, std::min(start, committed), std::min(end, committed)));
  }
  QUIRE_RETURN_IF_ERROR(CheckDebugTensors(call, end - start, k, v));
  QUIRE_RETURN_IF_ERROR(CheckOutputs({.name = call}, {{"k", &k}, {"v", v}}, {}, -1));
  for (size_t l = 0; l < layers_.size(); ++l) {
    if (options_.layers[l].latent != (v == nullptr)) continue;
    QUIRE_RETURN_IF_ERROR(RequireStored(call, index, l, end));
  }
  DebugRows rows(k, v);
  std::vector<AppendTarget> slots(static_cast<size_t>(end - start));
  int64_t row = 0;  // of the tensors
  for (size_t l = 0; l < layers_.size(); ++l) {
    if (options_.layers[l].latent != (v == nullptr)) continue;
    FillDebugSlots(index, layers_[l].group, start, slots);
    for (int64_t i = 0; i < end - start; ++i) {
      ReadSlot(storage_->layer(static_cast<int64_t>(l)), slots[static_cast<size_t>(i)], k.dtype(),
               rows.k(), rows.v());
      rows.Store(row, i);
    }
    ++row;
  }
  return Status();
}

Status PagedKVCache::DebugGetKV(int64_t seq_id, int64_t start, int64_t end, const TensorView& k,
                                const TensorView& v) {
  return gate_.Enter("DebugGetKV",
                     [&] { return GetDebug("DebugGetKV", seq_id, start, end, k, &v); });
}

Status PagedKVCache::DebugGetKVMLA(int64_t seq_id, int64_t start, int64_t end,
                                   const TensorView& kv) {
  return gate_.Enter("DebugGetKVMLA", [&] {
    return GetDebug("DebugGetKVMLA", seq_id, start, end, WithHead(kv), nullptr);
  });
}

// Moves the tokens from `start` on to pages of the sequence's own if others see one of them.
Status PagedKVCache::PrivatizeFrom(const char* call, int32_t index, int64_t start) {
  Sequence& sequence = control_[index];
  if (tree_.IsExclusiveFrom(sequence.last, start)) return Status();
  ForwardPlan moves;  // of one sequence that gets no new token
  moves.StartBatch(1, groups_.size());
  tree_.BeginPlanning();
  AppendPlan append = tree_.PlanAppend(sequence.last, 0, start, moves.group_appends);
  append.active = !sequence.retained;
  ForwardMember& member = moves.members.emplace_back();
  member.id = sequence.id;
  member.append = append;
  for (size_t g = 0; g < groups_.size(); ++g)
    moves.page_counts[g] = moves.group_appends[g].page_count;
  QUIRE_RETURN_IF_ERROR(CheckPages(call, moves.page_counts));
  tree_.Reserve(AppendPlans(append), moves.group_appends);
  moves.Reserve(tree_);

  tree_.Unhide(index);
  sequence.last = member.last = tree_.Append(append, moves.group_appends);
  moves.Fill(tree_);
  for (int g = 0; g < tree_.group_count(); ++g) {
    const GroupPlan& plan = moves.group(g);
    storage_->Copy(g, plan.copy_from, plan.copy_to, plan.copy_opens_tile.data());
  }
  tree_.ReleaseOldPath(append, member.last);
  UpdateHidden(index);
  return Status();
}

Status PagedKVCache::SetDebug(const char* call, int64_t seq_id, int64_t start, const TensorView& k,
                              const TensorView* v) {
  QUIRE_ASSIGN_OR_RETURN(const int32_t index, control_.FindOutsideBatch(call, seq_id));
  QUIRE_RETURN_IF_ERROR(RequireCommitted(call, index));
  Sequence& sequence = control_[index];
  const int64_t length = tree_.End(sequence.last);
  const int64_t count = k.rank() == 4 ? k.dim(1) : 0;
  if (start < 0 || count < 1 || count > length - start) {
    return Status(StatusCode::kBadArgument,
                  std::string(call) + ": " + std::to_string(count) + " tokens from " +
                      std::to_string(start) + " on are not in sequence " + std::to_string(seq_id) +
                      " of length " + std::to_string(length));
  }
  for (int g = 0; g < tree_.group_count(); ++g)
    QUIRE_RETURN_IF_ERROR(CheckHeld(call, sequence, g, start, length));
  QUIRE_RETURN_IF_ERROR(CheckDebugTensors(call, count, k, v));
  DebugRows rows(k, v);
  std::vector<AppendTarget> slots(static_cast<size_t>(count));
  QUIRE_RETURN_IF_ERROR(PrivatizeFrom(call, index, start));
  int64_t row = 0;  // of the tensors
  for (size_t l = 0; l < layers_.size(); ++l) {
    if (options_.layers[l].latent != (v == nullptr)) continue;
    FillSlots(sequence.last, layers_[l].group, start, slots);
    for (int64_t i = 0; i < count; ++i) {
      rows.Load(row, i);
      WriteSlot(storage_->layer(static_cast<int64_t>(l)), slots[static_cast<size_t>(i)], k.dtype(),
                rows.k(), rows.v(), /*opens_tile=*/false);
    }
    ++row;
  }
  // Not before: copies of positions that this sequence itself no longer sees go at once.
  FreeHidden();
  return Status();
}

Status PagedKVCache::DebugSetKV(int64_t seq_id, int64_t start, const TensorView& k,
                                const TensorView& v) {
  return gate_.EnterAlone("DebugSetKV",
                          [&] { return SetDebug("DebugSetKV", seq_id, start, k, &v); });
}

Status PagedKVCache::DebugSetKVMLA(int64_t seq_id, int64_t start, const TensorView& kv) {
  return gate_.EnterAlone("DebugSetKVMLA", [&] {
    return SetDebug("DebugSetKVMLA", seq_id, start, WithHead(kv), nullptr);
  });
}

Result<std::string> PagedKVCache::DebugPlan() const {
  return gate_.Ask([&]() -> Result<std::string> {
    if (!control_.in_forward()) return control_.RequireForward("DebugPlan");
    return plan_.ToString(tree_);
  });
}

// ---------------------------------------------------------------------- digest

// Independent of what cannot be observed: how tokens are cut into blocks, the order of free pages,
// whether an attention call has failed.
uint64_t PagedKVCache::StateDigest() const {
  const auto lock = gate_.Lock();
  std::vector<int64_t> facts{control_.in_forward(), control_.table().count(),
                             tree_.distinct_token_count()};
  for (const int32_t index : control_.table().SortedById()) {
    const Sequence& sequence = control_[index];
    facts.insert(facts.end(),
                 {sequence.id, tree_.End(sequence.last), sequence.long_factors, sequence.retained,
                  control_.InBatch(index), sequence.window.window, sequence.window.sinks,
                  sequence.window.slid, sequence.slid, sequence.span.tokens, sequence.span.sinks,
                  sequence.reserved, trees_.SizeOf(index), sequence.pending,
                  static_cast<int64_t>(sequence.receive)});
    AppendMarkFacts(index, &facts);
    if (const TokenTree* tree = trees_.Find(index)) {
      facts.insert(facts.end(), tree->parents.begin(), tree->parents.end());
      for (const TokenTree::Group& group : tree->groups) {
        facts.insert(facts.end(), group.pages.begin(), group.pages.end());
      }
    }
    for (int g = 0; g < tree_.group_count(); ++g) {
      int32_t below = kNoPage;
      tree_.VisitPieces(sequence.last, g, 0, tree_.End(sequence.last),
                        [&](int64_t from, int64_t, int32_t page) {
                          if (page == below) {
                            facts.back() = from;  // another piece of the same page
                          } else {
                            facts.insert(facts.end(), {page, from});
                          }
                          below = page;
                        });
    }
  }
  for (int g = 0; g < tree_.group_count(); ++g) {
    std::vector<int32_t> free = tree_.pool(g).free_pages();
    std::sort(free.begin(), free.end());
    facts.insert(facts.end(), free.begin(), free.end());
    facts.push_back(kNoPage);
  }
  for (const Layer& layer : layers_) {
    facts.push_back(control_.in_forward() && layer.appended);
    facts.push_back(control_.in_forward() && layer.attended);
  }
  return Hash64(facts.data(), facts.size() * sizeof(facts[0]));
}

Status PagedKVCache::CheckInvariants() const {
  return gate_.Ask([&]() -> Status {
    std::vector<int64_t> windows;
    for (const LayerGroup& group : groups_) windows.push_back(group.window);
    QUIRE_RETURN_IF_ERROR(
        CheckKVInvariants(tree_, control_.table(), Batch(), &trees_, windows, options_.max_pop));
    QUIRE_RETURN_IF_ERROR(CheckReceives());
    const std::string difference = control_.in_forward() ? plan_.DifferenceFromNew(tree_) : "";
    if (difference.empty()) return Status();
    return Status(StatusCode::kInternal, "invariant violated: the plan " + difference);
  });
}

}  // namespace quire
