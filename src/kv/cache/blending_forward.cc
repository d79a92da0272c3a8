#include "kv/cache/blending_forward.h"

#include <algorithm>
#include <string>

#include "base/check.h"
#include "kv/cache/layer_kv.h"
#include "kv/pages/reserve.h"

namespace quire {
namespace {

// Rows per task that reads stored rows: the tokens of a tile lie in the same cache lines.
constexpr int64_t kFreshTaskRows = kTilePositions;

Status BadBlend(StatusCode code, const char* call, int64_t seq_id, const std::string& why) {
  return Status(code, OfSequence(call, seq_id) + why);
}

// `what` went wrong in a layer, of a member.
Status BadLayer(StatusCode code, const AttentionCall& call, int64_t seq_id,
                const std::string& what) {
  return Status(code, std::string(call.name) + ": layer " + std::to_string(call.layer) +
                          " of sequence " + std::to_string(seq_id) + ": " + what);
}

Status CheckBlend(const char* call, const BlendMember& blend, int64_t layer_count) {
  if (blend.hook == nullptr || blend.source == nullptr) {
    return BadBlend(StatusCode::kBadArgument, call, blend.seq_id,
                    std::string("blends without a ") + (blend.hook == nullptr ? "hook" : "source") +
                        "; give one");
  }
  if (blend.check_layers.empty()) {
    return BadBlend(StatusCode::kBadArgument, call, blend.seq_id,
                    "blends without a check layer; give one, or leave the sequence out of blends");
  }
  int64_t before = -1;
  for (const int64_t layer : blend.check_layers) {
    if (layer <= before || layer >= layer_count) {
      return BadBlend(StatusCode::kBadArgument, call, blend.seq_id,
                      "has check layer " + std::to_string(layer) + " after " +
                          std::to_string(before) + "; they must ascend within [0, " +
                          std::to_string(layer_count) + ")");
    }
    before = layer;
  }
  return Status();
}

}  // namespace

// ---------------------------------------------------------------------- begin

Status BlendingForward::Plan(const char* call, std::span<const BlendMember> blends,
                             ForwardPlan& plan) const {
  if (kv_.options.allow_skipped_layers) {
    return Status(StatusCode::kBadState,
                  std::string(call) +
                      ": this cache was created with allow_skipped_layers; a forward whose rows "
                      "grow fewer runs every layer, so create it without");
  }
  size_t next = 0;
  for (ForwardMember& member : plan.members) {
    if (next == blends.size() || blends[next].seq_id != member.id) continue;
    QUIRE_RETURN_IF_ERROR(CheckBlend(call, blends[next], std::ssize(kv_.options.layers)));
    if (sender_.Sends(member.id)) {
      return BadBlend(StatusCode::kBadState, call, member.id,
                      "is marked to be sent; its tokens would not be those that a whole forward "
                      "computes. Call DisaggUnmarkSend, or leave it out of blends");
    }
    member.blends = true;
    ++next;
  }
  if (next == blends.size()) return Status();
  return BadBlend(
      StatusCode::kBadArgument, call, blends[next].seq_id,
      "is to blend and not in the batch, or blends are in another order than the batch");
}

int64_t BlendingForward::FreshFloats(const AttentionLayerSpec& spec) {
  return spec.num_kv_heads * (spec.qk_head_dim + (spec.latent ? 0 : spec.v_head_dim));
}

void BlendingForward::Reserve(std::span<const BlendMember> blends) {
  queries_.Reserve(plan_);
  ropes_.ReserveSelection(plan_);
  members_.clear();
  check_layers_.clear();
  int64_t floats = 0;
  for (size_t i = 0; i < plan_.members.size(); ++i) {
    const ForwardMember& member = plan_.members[i];
    if (!member.blends) continue;
    const BlendMember& blend = blends[members_.size()];
    members_.push_back({.index = i,
                        .hook = blend.hook,
                        .source = blend.source,
                        .first_check = check_layers_.size(),
                        .check_count = blend.check_layers.size()});
    check_layers_.insert(check_layers_.end(), blend.check_layers.begin(), blend.check_layers.end());
    for (const int64_t layer : blend.check_layers) {
      const AttentionLayerSpec& spec = kv_.options.layers[static_cast<size_t>(layer)];
      floats = std::max(floats, member.row_count() * FreshFloats(spec));
    }
  }
  latest_layer_ = -1;
  if (static_cast<size_t>(floats) <= fresh_floats_) return;
  fresh_.reset();
  fresh_floats_ = 0;
  fresh_.reset(new float[static_cast<size_t>(floats)]);
  fresh_floats_ = static_cast<size_t>(floats);
}

void BlendingForward::Clear() noexcept {
  queries_.Clear();
  FreeAll(members_);
  FreeAll(check_layers_);
  fresh_.reset();
  fresh_floats_ = 0;
}

int64_t BlendingForward::Bytes(const AttentionKVCacheOptions& options, int64_t group_count,
                               int64_t sequences_max) {
  int64_t floats = 0;
  for (const AttentionLayerSpec& spec : options.layers)
    floats = std::max(floats, FreshFloats(spec));
  return options.prefill_chunk_size * floats * static_cast<int64_t>(sizeof(float)) +
         QueryPlan::Bytes(options.prefill_chunk_size, sequences_max, group_count);
}

// ---------------------------------------------------------------------- order of layers

Status BlendingForward::RequireNext(const AttentionCall& call) const {
  if (call.layer == latest_layer_ + 1) return Status();
  return Status(StatusCode::kBadState,
                std::string(call.name) + ": layer " + std::to_string(call.layer) + " after " +
                    std::to_string(latest_layer_) +
                    "; a forward that blends runs its layers in ascending order, each once");
}

Status BlendingForward::Refuse(const AttentionCall& call, const char* what) const {
  if (!is_open()) return Status();
  return Status(StatusCode::kBadState, std::string(call.name) + ": layer " +
                                           std::to_string(call.layer) +
                                           ": a forward that blends has no " + what +
                                           "; begin it with BeginForward or BeginLoadingForward");
}

Status BlendingForward::RequireLatest(const AttentionCall& call) const {
  if (call.layer == latest_layer_) return Status();
  return Status(StatusCode::kBadState,
                std::string(call.name) + ": layer " + std::to_string(call.layer) +
                    " was not the last one to be appended to, which is " +
                    std::to_string(latest_layer_) +
                    "; in a forward that blends attend to a layer before the next one");
}

void BlendingForward::StartLayer() noexcept {
  if (queries_.is_packed()) return;
  queries_.Pack(plan_);
  ropes_.Select(queries_.rows());
}

// ---------------------------------------------------------------------- moved rows

Status BlendingForward::Store(const AttentionCall& call, const HeadRows& k, const HeadRows& v,
                              const Backend& backend) {
  StartLayer();
  for (const Member& member : members_) QUIRE_RETURN_IF_ERROR(StoreMovedOf(call, member));
  const TokenSlots& slots = queries_.fresh(kv_.group_of(call.layer));
  backend.append_kv({.pages = kv_.storage->layer(call.layer),
                     .row_count = std::ssize(slots.targets),
                     .k = k,
                     .v = v,
                     .rotary = ropes_.OfNewKeys(call.layer),
                     .targets = slots.targets.data(),
                     .opens_tile = slots.opens_tile.data()},
                    *kv_.options.runner);
  latest_layer_ = call.layer;
  return Status();
}

Status BlendingForward::StoreMovedOf(const AttentionCall& call, const Member& member) {
  const ForwardMember& of = plan_.members[member.index];
  if (queries_.AllGoOn(of)) return Status();
  const Result<std::span<const MovedRows>> moved = member.source->Load(call.layer);
  if (!moved.ok()) {
    return BadLayer(moved.status().code(), call, of.id,
                    "moved rows were not loaded: " + std::string(moved.status().message()) +
                        "; call AbortForward");
  }
  QUIRE_RETURN_IF_ERROR(CheckMoved(call, of, *moved));
  const int group = kv_.group_of(call.layer);
  const std::vector<AppendTarget>& targets = plan_.group(group).rows.targets;
  for (const MovedRows& part : *moved) {
    for (int64_t begin = part.rows.begin; begin < part.rows.end;) {
      const bool goes_on = queries_.GoesOn(of.first_row + begin);
      int64_t end = begin + 1;
      while (end < part.rows.end && queries_.GoesOn(of.first_row + end) == goes_on) ++end;
      if (!goes_on) {
        importer_.FillSlots(targets, queries_.moved_opens_tile(group), call.layer,
                            of.first_row + begin, part.kv,
                            {begin - part.rows.begin, end - part.rows.begin}, *kv_.options.runner);
      }
      begin = end;
    }
  }
  return Status();
}

// The parts ascend and have all rows of the member that do not go on.
Status BlendingForward::CheckMoved(const AttentionCall& call, const ForwardMember& member,
                                   std::span<const MovedRows> moved) const {
  int64_t covered = 0;
  const auto check_gap = [&](int64_t end) -> Status {
    for (; covered < end; ++covered) {
      if (queries_.GoesOn(member.first_row + covered)) continue;
      return BadLayer(StatusCode::kBadArgument, call, member.id,
                      "the source has no keys and values for row " + std::to_string(covered) +
                          ", which the hook left out; call AbortForward");
    }
    return Status();
  };
  for (const MovedRows& part : moved) {
    if (part.rows.begin < covered || part.rows.end <= part.rows.begin ||
        part.rows.end > member.row_count()) {
      return BadLayer(StatusCode::kBadArgument, call, member.id,
                      "the source gave rows [" + std::to_string(part.rows.begin) + ", " +
                          std::to_string(part.rows.end) + ") after " + std::to_string(covered) +
                          "; parts must ascend within the " + std::to_string(member.row_count()) +
                          " rows, none of them empty");
    }
    QUIRE_RETURN_IF_ERROR(
        CheckMovedKV(call.name, call.layer, call.spec, part.kv, part.rows.count()));
    QUIRE_RETURN_IF_ERROR(check_gap(part.rows.begin));
    covered = part.rows.end;
  }
  return check_gap(member.row_count());
}

// ---------------------------------------------------------------------- check layers

Status BlendingForward::Choose(const AttentionCall& call) {
  for (const Member& member : members_) {
    const std::span<const int64_t> checks =
        std::span(check_layers_).subspan(member.first_check, member.check_count);
    if (!std::ranges::binary_search(checks, call.layer)) continue;
    const ForwardMember& of = plan_.members[member.index];
    const Result<RowSelection> selection =
        member.hook->BeforeAttention(call.layer, ReadFresh(call, of));
    if (!selection.ok()) {
      return BadLayer(selection.status().code(), call, of.id,
                      "the hook chose no rows: " + std::string(selection.status().message()) +
                          "; call AbortForward");
    }
    if (!selection->selects) continue;
    QUIRE_RETURN_IF_ERROR(CheckSelection(call, of, selection->rows));
    queries_.Select(of, selection->rows);
  }
  queries_.Apply(plan_);
  return Status();
}

FreshRows BlendingForward::ReadFresh(const AttentionCall& call,
                                     const ForwardMember& member) noexcept {
  const AttentionLayerSpec& spec = call.spec;
  const std::span<const int32_t> rows = queries_.RowsOf(member);
  const int64_t count = std::ssize(rows);
  const int64_t k_row = spec.num_kv_heads * spec.qk_head_dim;
  const int64_t v_row = spec.latent ? 0 : spec.num_kv_heads * spec.v_head_dim;
  QUIRE_DCHECK(static_cast<size_t>(count * (k_row + v_row)) <= fresh_floats_);
  float* const k = fresh_.get();
  float* const v = k + count * k_row;
  const std::vector<AppendTarget>& targets = plan_.group(kv_.group_of(call.layer)).rows.targets;
  const KVPages pages = kv_.storage->layer(call.layer);
  kv_.options.runner->ParallelFor(
      (count + kFreshTaskRows - 1) / kFreshTaskRows, [&](int64_t task, int) {
        const int64_t end = std::min(count, (task + 1) * kFreshTaskRows);
        for (int64_t i = task * kFreshTaskRows; i < end; ++i) {
          ReadSlot(pages, targets[static_cast<size_t>(rows[static_cast<size_t>(i)])], DType::kF32,
                   k + i * k_row, spec.latent ? nullptr : v + i * v_row);
        }
      });
  const auto first = static_cast<size_t>(rows.data() - queries_.rows().data());
  FreshRows fresh{.seq_id = member.id,
                  .k = TensorView(k, DType::kF32, {count, spec.num_kv_heads, spec.qk_head_dim}),
                  .positions = queries_.positions().subspan(first, static_cast<size_t>(count))};
  if (!spec.latent)
    fresh.v = TensorView(v, DType::kF32, {count, spec.num_kv_heads, spec.v_head_dim});
  return fresh;
}

Status BlendingForward::CheckSelection(const AttentionCall& call, const ForwardMember& member,
                                       std::span<const int32_t> rows) const {
  if (rows.empty()) {
    return BadLayer(StatusCode::kBadArgument, call, member.id,
                    "the hook left no row; at least one must go on, and what logits are wanted of "
                    "must");
  }
  int64_t before = -1;
  for (const int32_t row : rows) {
    const bool fits =
        row > before && row < member.row_count() && queries_.GoesOn(member.first_row + row);
    if (!fits) {
      return BadLayer(StatusCode::kBadArgument, call, member.id,
                      "the hook chose row " + std::to_string(row) + " after " +
                          std::to_string(before) +
                          "; rows must ascend and be among those that have come to the layer");
    }
    before = row;
  }
  return Status();
}

}  // namespace quire
