#include "kv/cache/stored_tokens.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "base/check.h"
#include "kv/cache/layer_kv.h"
#include "kv/pages/kv_export_rows.h"

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
    QUIRE_DCHECK(layer >= 0 && layer < tensor_.dim(0));
    QUIRE_DCHECK(token >= 0 && token < tensor_.dim(1));
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

}  // namespace

Status StoredTokens::CheckTensors(const char* call, int64_t count, const TensorView& k,
                                  const TensorView* v) const {
  const bool latent = v == nullptr;
  std::vector<const AttentionLayerSpec*> layers;
  for (size_t l = 0; l < kv_.options.layers.size(); ++l) {
    const AttentionLayerSpec& layer = kv_.options.layers[l];
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

void StoredTokens::FillSlots(int32_t index, int group, int64_t start,
                             std::span<AppendTarget> slots) const noexcept {
  const int64_t committed = kv_.CommittedLength(kv_.control[index]);
  const auto before_tree = static_cast<size_t>(
      std::clamp<int64_t>(committed - start, 0, static_cast<int64_t>(slots.size())));
  kv_.FillSlots(kv_.control[index].last, group, start, slots.first(before_tree));
  const TokenTree* const tree = kv_.trees.Find(index);
  QUIRE_DCHECK(before_tree == slots.size() || tree != nullptr);
  for (size_t i = before_tree; i < slots.size(); ++i) {
    const int64_t node = start + static_cast<int64_t>(i) - committed;
    slots[i] = tree->SlotOf(kv_.tree.pool(group), group, node);
  }
}

Status StoredTokens::RequireStored(const char* call, int32_t index, int64_t layer,
                                   int64_t end) const {
  if (!kv_.control.InBatch(index) || steps_.appended(layer)) return Status();
  const auto member = std::ranges::find(plan_.members, index, &ForwardMember::sequence);
  QUIRE_DCHECK(member != plan_.members.end()) << "a sequence of the batch is not planned";
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
Status StoredTokens::Get(const char* call, int64_t seq_id, int64_t start, int64_t end,
                         const TensorView& keys, const TensorView* v) {
  const TensorView k = v == nullptr ? WithHead(keys) : keys;
  QUIRE_ASSIGN_OR_RETURN(const int32_t index, kv_.control.Find(call, seq_id));
  const int64_t committed = kv_.CommittedLength(kv_.control[index]);
  const int64_t length = committed + kv_.trees.SizeOf(index);
  // Pending tokens, which no sequence with a tree has, are not there yet.
  if (start >= 0 && end > length) QUIRE_RETURN_IF_ERROR(kv_.RequireReceived(call, index));
  if (start < 0 || start >= end || end > length) {
    return Status(StatusCode::kBadArgument,
                  std::string(call) + ": [" + std::to_string(start) + ", " + std::to_string(end) +
                      ") is no range of positions of sequence " + std::to_string(seq_id) +
                      " of length " + std::to_string(length));
  }
  for (int g = 0; g < kv_.tree.group_count(); ++g) {
    if (kv_.groups[static_cast<size_t>(g)].layout.latent != (v == nullptr)) continue;
    QUIRE_RETURN_IF_ERROR(kv_.CheckHeld(call, kv_.control[index], g, std::min(start, committed),
                                        std::min(end, committed)));
  }
  QUIRE_RETURN_IF_ERROR(CheckTensors(call, end - start, k, v));
  QUIRE_RETURN_IF_ERROR(CheckOutputs({.name = call}, {{"k", &k}, {"v", v}}, {}, -1));
  for (size_t l = 0; l < kv_.options.layers.size(); ++l) {
    if (kv_.options.layers[l].latent != (v == nullptr)) continue;
    QUIRE_RETURN_IF_ERROR(RequireStored(call, index, static_cast<int64_t>(l), end));
  }
  DebugRows rows(k, v);
  std::vector<AppendTarget> slots(static_cast<size_t>(end - start));
  int64_t row = 0;  // of the tensors
  for (size_t l = 0; l < kv_.options.layers.size(); ++l) {
    if (kv_.options.layers[l].latent != (v == nullptr)) continue;
    FillSlots(index, kv_.layer_groups[l], start, slots);
    for (int64_t i = 0; i < end - start; ++i) {
      ReadSlot(kv_.storage->layer(static_cast<int64_t>(l)), slots[static_cast<size_t>(i)],
               k.dtype(), rows.k(), rows.v());
      rows.Store(row, i);
    }
    ++row;
  }
  QUIRE_DCHECK(row == k.dim(0));
  return Status();
}

// Moves the tokens from `start` on to pages of the sequence's own if others see one of them.
Status StoredTokens::PrivatizeFrom(const char* call, int32_t index, int64_t start) {
  Sequence& sequence = kv_.control[index];
  if (kv_.tree.IsExclusiveFrom(sequence.last, start)) return Status();
  ForwardPlan moves;  // of one sequence that gets no new token
  moves.StartBatch(1, kv_.groups.size());
  kv_.tree.BeginPlanning();
  AppendPlan append = kv_.tree.PlanAppend(sequence.last, 0, start, moves.group_appends);
  QUIRE_DCHECK(append.copies() && append.cut <= start);
  append.active = !sequence.retained;
  ForwardMember& member = moves.members.emplace_back();
  member.id = sequence.id;
  member.append = append;
  for (size_t g = 0; g < kv_.groups.size(); ++g)
    moves.page_counts[g] = moves.group_appends[g].page_count;
  QUIRE_RETURN_IF_ERROR(kv_.CheckPages(call, moves.page_counts));
  kv_.tree.Reserve(AppendPlans(append), moves.group_appends);
  moves.Reserve(kv_.tree);

  kv_.tree.hidden().Unhide(index);
  sequence.last = member.last = kv_.tree.Append(append, moves.group_appends);
  moves.Fill(kv_.tree);
  for (int g = 0; g < kv_.tree.group_count(); ++g) {
    const GroupPlan& plan = moves.group(g);
    kv_.storage->Copy(g, plan.copy_from, plan.copy_to, plan.copy_opens_tile.data());
  }
  kv_.tree.ReleaseOldPath(append, member.last);
  QUIRE_DCHECK(kv_.tree.IsExclusiveFrom(sequence.last, start));
  windows_.UpdateHidden(index);
  return Status();
}

Status StoredTokens::Set(const char* call, int64_t seq_id, int64_t start, const TensorView& keys,
                         const TensorView* v) {
  const TensorView k = v == nullptr ? WithHead(keys) : keys;
  QUIRE_ASSIGN_OR_RETURN(const int32_t index, kv_.control.FindOutsideBatch(call, seq_id));
  QUIRE_RETURN_IF_ERROR(kv_.RequireCommitted(call, index));
  Sequence& sequence = kv_.control[index];
  const int64_t length = kv_.tree.End(sequence.last);
  const int64_t count = k.rank() == 4 ? k.dim(1) : 0;
  if (start < 0 || count < 1 || count > length - start) {
    return Status(StatusCode::kBadArgument,
                  std::string(call) + ": " + std::to_string(count) + " tokens from " +
                      std::to_string(start) + " on are not in sequence " + std::to_string(seq_id) +
                      " of length " + std::to_string(length));
  }
  for (int g = 0; g < kv_.tree.group_count(); ++g)
    QUIRE_RETURN_IF_ERROR(kv_.CheckHeld(call, sequence, g, start, length));
  QUIRE_RETURN_IF_ERROR(CheckTensors(call, count, k, v));
  DebugRows rows(k, v);
  std::vector<AppendTarget> slots(static_cast<size_t>(count));
  QUIRE_RETURN_IF_ERROR(PrivatizeFrom(call, index, start));
  int64_t row = 0;  // of the tensors
  for (size_t l = 0; l < kv_.options.layers.size(); ++l) {
    if (kv_.options.layers[l].latent != (v == nullptr)) continue;
    kv_.FillSlots(sequence.last, kv_.layer_groups[l], start, slots);
    for (int64_t i = 0; i < count; ++i) {
      rows.Load(row, i);
      WriteSlot(kv_.storage->layer(static_cast<int64_t>(l)), slots[static_cast<size_t>(i)],
                k.dtype(), rows.k(), rows.v(), /*opens_tile=*/false);
    }
    ++row;
  }
  QUIRE_DCHECK(row == k.dim(0));
  // Not before: copies of positions that this sequence itself no longer sees go at once.
  windows_.FreeHidden();
  return Status();
}

Status StoredTokens::Export(const char* call, int64_t seq_id, int64_t layer, int64_t start,
                            const LayerKV& to) {
  QUIRE_ASSIGN_OR_RETURN(const int32_t index, kv_.control.Find(call, seq_id));
  if (layer < 0 || layer >= static_cast<int64_t>(kv_.options.layers.size())) {
    return Status(StatusCode::kBadArgument, std::string(call) + ": no layer " +
                                                std::to_string(layer) + "; this cache has " +
                                                std::to_string(kv_.options.layers.size()));
  }
  const BlockIndex last = kv_.control[index].last;
  const int64_t count = TokenCount(to);
  const int64_t length = kv_.CommittedLength(kv_.control[index]);
  if (start >= 0 && count > length - start)
    QUIRE_RETURN_IF_ERROR(kv_.RequireCommitted(call, index));
  if (start < 0 || count < 1 || count > length - start) {
    return Status(StatusCode::kBadArgument,
                  std::string(call) + ": " + std::to_string(count) + " tokens from " +
                      std::to_string(start) + " on are not in sequence " + std::to_string(seq_id) +
                      " of length " + std::to_string(length));
  }
  const int group = kv_.group_of(layer);
  const AttentionLayerSpec& spec = kv_.options.layers[static_cast<size_t>(layer)];
  QUIRE_RETURN_IF_ERROR(kv_.CheckHeld(call, kv_.control[index], group, start, start + count));
  QUIRE_RETURN_IF_ERROR(RequireStored(call, index, layer, start + count));
  QUIRE_RETURN_IF_ERROR(CheckLayerKV(call, layer, spec, to, count));
  QUIRE_RETURN_IF_ERROR(CheckOutputs(
      {.name = call, .layer = layer},
      {{"k", &to.k},
       {"v", spec.latent ? nullptr : &to.v},
       {"k_scale", IsQuantised(spec.dtype) ? &to.k_scale : nullptr},
       {"v_scale", !spec.latent && IsQuantised(spec.value_dtype()) ? &to.v_scale : nullptr}},
      {}, -1));
  std::vector<AppendTarget> slots(static_cast<size_t>(count));
  kv_.FillSlots(last, group, start, slots);
  ReadRows(kv_.storage->layer(layer), slots,
           {.k = to.k.data(),
            .v = to.v.data(),
            .k_scale = to.k_scale.data_as<float>(),
            .v_scale = to.v_scale.data_as<float>()},
           *kv_.options.runner);
  return Status();
}

}  // namespace quire
