// The forward of PagedKVCache: planning, attention, end.
#include <algorithm>

#include "base/float_environment.h"
#include "kv/cache/paged_kv_cache.h"

namespace quire {
namespace {

constexpr double kLog2E = 1.4426950408889634074;

}  // namespace

// ---------------------------------------------------------------------- planning

Result<int64_t> PagedKVCache::PagesNeeded(std::span<const int64_t> seq_ids,
                                          std::span<const int64_t> append_lengths) const {
  return gate_.Ask([&]() -> Result<int64_t> {
    QUIRE_RETURN_IF_ERROR(planner_.Plan("PagesNeeded", seq_ids, append_lengths, {}, query_));
    return std::ranges::max(query_.page_counts);
  });
}

Result<int64_t> PagedKVCache::PagesNeededForTree(
    std::span<const int64_t> seq_ids, std::span<const int64_t> append_lengths,
    std::span<const int64_t> token_tree_parents) const {
  const char* call = "PagesNeededForTree";
  return gate_.Ask([&]() -> Result<int64_t> {
    QUIRE_RETURN_IF_ERROR(trees_.Plan(call, seq_ids, append_lengths, token_tree_parents, query_));
    return std::ranges::max(query_.page_counts);
  });
}

void PagedKVCache::ReserveForward(int64_t sequences_max) {
  kv_.tree.Reserve(
      AppendPlans(std::span<const ForwardMember>(plan_.members), &ForwardMember::append),
      plan_.group_appends);
  plan_.Reserve(kv_.tree);
  ropes_.Reserve(plan_, false);
  scratch_.Reserve(plan_.totals().rows, sequences_max);
  blending_.ReserveRows(plan_.totals().rows);
}

// ---------------------------------------------------------------------- begin and end

Status PagedKVCache::BeginLoadingForward(std::span<const int64_t> seq_ids,
                                         std::span<const int64_t> append_lengths,
                                         std::span<const LayerLoad> loads) {
  return Run(
      {.kind = Kind::kBegin, .seq_ids = seq_ids, .append_lengths = append_lengths, .loads = loads});
}

Status PagedKVCache::PlanBegin(const ControlCall& call) {
  const char* const name = call.name();
  QUIRE_RETURN_IF_ERROR(kv_.control.RequireIdle(name));
  planned_.repeats =
      call.loads.empty() && plan_.CanRepeat(call.seq_ids, call.append_lengths, kv_.tree);
  if (planned_.repeats) {
    QUIRE_RETURN_IF_ERROR(kv_.CheckPages(name, plan_.page_counts));
    // For all else the last forward had as much as this one.
    ropes_.Reserve(plan_, true);
    scratch_.ReserveAgain();
    return Status();
  }
  QUIRE_RETURN_IF_ERROR(planner_.Plan(name, call.seq_ids, call.append_lengths, call.loads, plan_));
  QUIRE_RETURN_IF_ERROR(kv_.CheckPages(name, plan_.page_counts));
  kv_.tree.PrefetchPlanned(plan_.page_counts);
  ReserveForward(std::ssize(plan_.members));
  return Status();
}

Status PagedKVCache::BeginBlendingForward(std::span<const int64_t> seq_ids,
                                          std::span<const int64_t> append_lengths,
                                          std::span<const LayerLoad> loads,
                                          std::span<const BlendMember> blends) {
  const char* call = "BeginBlendingForward";
  return gate_.EnterAlone(call, [&]() -> Status {
    QUIRE_RETURN_IF_ERROR(planner_.Plan(call, seq_ids, append_lengths, loads, plan_));
    QUIRE_RETURN_IF_ERROR(blending_.Plan(call, blends, plan_));
    QUIRE_RETURN_IF_ERROR(kv_.CheckPages(call, plan_.page_counts));
    const auto members = std::ssize(plan_.members);
    ReserveForward(QueryPlan::SequenceCountMax(
        plan_.members.back().first_row + plan_.members.back().row_count(), members));
    blending_.Reserve(blends);
    CommitForward();
    blending_.Open();
    return Status();
  });
}

Status PagedKVCache::PlanBeginTree(const ControlCall& call) {
  const char* const name = call.name();
  QUIRE_RETURN_IF_ERROR(trees_.Plan(name, call.seq_ids, call.append_lengths, call.parents, plan_));
  QUIRE_RETURN_IF_ERROR(kv_.CheckPages(name, plan_.page_counts));
  trees_.Reserve(plan_, call.parents);
  ReserveForward(std::ssize(plan_.members));
  return Status();
}

void PagedKVCache::CommitForward() noexcept {
  plan_.ClearArrays();
  const size_t group_count = kv_.groups.size();
  const GroupAppend* appends = plan_.group_appends.data();
  for (ForwardMember& member : plan_.members) {
    const std::span<const GroupAppend> groups(appends, group_count);
    appends += group_count;
    if (member.appends() && !member.append.extends) kv_.tree.hidden().Unhide(member.sequence);
    member.last = member.appends() ? kv_.tree.Append(member.append, groups) : member.append.last;
    kv_.control[member.sequence].last = member.last;
    if (member.is_tree()) trees_.AddNodes(plan_, member, groups);
  }
  plan_.Fill(kv_.tree);
  kv_.tree.DeferMerges();
  for (int g = 0; g < kv_.tree.group_count(); ++g) {
    const GroupPlan& plan = plan_.group(g);
    kv_.storage->Copy(g, plan.copy_from, plan.copy_to, plan.copy_opens_tile.data());
  }
  OpenForward(false);
}

void PagedKVCache::CommitRepeatedForward() noexcept {
  if (!kv_.control.HasBatchOfLastForward()) {  // another batch has been asked about since
    kv_.control.StartPlanning();
    for (const ForwardMember& member : plan_.members) kv_.control.Name(member.sequence);
  }
  plan_.Repeat(kv_.tree);
  ++planned_.repeated_forward_count;
  kv_.tree.DeferMerges();
  OpenForward(true);
}

void PagedKVCache::OpenForward(bool repeats) noexcept {
  ropes_.Fill(plan_, repeats);
  steps_.Begin();
  kv_.control.OpenForward();
}

// Layers that have not stored their rows load what they import, as their Append would have.
Status PagedKVCache::LoadSkippedLayers(const ControlCall& call) {
  for (int64_t layer = 0; layer < steps_.count(); ++layer) {
    if (steps_.appended(layer)) continue;
    const Status loaded =
        importer_.LoadLayer({.name = call.name(),
                             .layer = layer,
                             .spec = kv_.options.layers[static_cast<size_t>(layer)],
                             .row_count = plan_.row_count()},
                            plan_);
    kv_.control.set_failed(!loaded.ok());
    QUIRE_RETURN_IF_ERROR(loaded);
  }
  return Status();
}

// The new tokens of these layers become zeros, without rotation: 0 * cos(a) may be -0.
void PagedKVCache::FillSkippedLayers() noexcept {
  // For all rows and heads.
  const HeadRows zeros{.data = constants_.zero_row.data(), .dtype = DType::kF32};
  for (int64_t layer = 0; layer < steps_.count(); ++layer) {
    if (!steps_.appended(layer)) StoreRows(layer, zeros, zeros, {});
  }
}

Status PagedKVCache::PlanEnd(const ControlCall& call) {
  QUIRE_RETURN_IF_ERROR(kv_.control.RequireForward(call.name()));
  return kv_.options.allow_skipped_layers ? LoadSkippedLayers(call) : steps_.RequireAll();
}

void PagedKVCache::CloseForward() noexcept {
  kv_.control.CloseForward();
  blending_.Close();
  if (plan_.totals().copying > 0) {
    for (const ForwardMember& member : plan_.members) {
      if (member.append.copies()) kv_.tree.ReleaseOldPath(member.append, member.last);
    }
  }
  kv_.tree.RunDeferredMerges();
  if (!kv_.tree.hidden().tracks()) return;
  for (const ForwardMember& member : plan_.members) {
    if (member.is_tree()) {  // what is rejected is seen from the committed end
      windows_.UpdateHidden(member.sequence);
    } else {
      windows_.SlideTo(member.sequence);
    }
  }
  windows_.FreeHidden();
}

// In the reverse order of the batch, so that pages come back to the free list as they left it.
void PagedKVCache::RollBackForward() noexcept {
  kv_.control.CloseForward();
  blending_.Close();
  for (size_t m = plan_.members.size(); m-- > 0;) {
    const ForwardMember& member = plan_.members[m];
    if (member.is_tree()) trees_.DropNodes(member.sequence, member.first_node());
    if (!member.appends()) continue;
    BlockIndex& last = kv_.control[member.sequence].last;
    kv_.tree.hidden().Unhide(member.sequence);
    last = kv_.tree.UndoAppend(member.append, last);
    windows_.UpdateHidden(member.sequence);
  }
  kv_.tree.RunDeferredMerges();
  windows_.FreeHidden();
}

Result<std::span<const int32_t>> PagedKVCache::GetQueryPositions() const {
  return gate_.Ask([&]() -> Result<std::span<const int32_t>> {
    if (!kv_.control.in_forward()) return kv_.control.RequireForward("GetQueryPositions");
    return blending_.is_open() ? blending_.queries().positions() : plan_.positions();
  });
}

Result<std::span<const int32_t>> PagedKVCache::GetQueryRows() const {
  return gate_.Ask([&]() -> Result<std::span<const int32_t>> {
    if (!kv_.control.in_forward()) return kv_.control.RequireForward("GetQueryRows");
    if (blending_.is_open()) return blending_.queries().rows();
    return blending_.queries().AllRows(plan_.row_count());
  });
}

// ---------------------------------------------------------------------- attention

Status PagedKVCache::AttentionWithFusedQKV(int64_t layer, const TensorView& qkv,
                                           const TensorView& o, double sm_scale,
                                           const TensorView* mask) {
  return RunAttention("AttentionWithFusedQKV", layer, [&](const AttentionCall& call) -> Status {
    QUIRE_RETURN_IF_ERROR(RequireLatent(call, false, "AttentionWithMLA"));
    QUIRE_ASSIGN_OR_RETURN(const QKVRows rows, ViewFusedQKV(call, qkv));
    QUIRE_ASSIGN_OR_RETURN(const MutableHeadRows o_rows, ViewOutput(call, o));
    QUIRE_RETURN_IF_ERROR(CheckScale(call, sm_scale));
    QUIRE_RETURN_IF_ERROR(CheckApart(call, {{"o", &o}}, {{"qkv", &qkv}}));
    if (mask != nullptr) QUIRE_RETURN_IF_ERROR(blending_.Refuse(call, "masks"));
    QUIRE_ASSIGN_OR_RETURN(const RowMask* const masks, mask_.RowsOf(call, mask, plan_));
    QUIRE_RETURN_IF_ERROR(steps_.RequireAppended(call, false));
    QUIRE_RETURN_IF_ERROR(AppendRows(call, rows.k, rows.v));
    RunAttend(layer, Sees::kUpToOwn, rows.q, ropes_.OfQueries(layer), o_rows, nullptr, sm_scale,
              masks);
    return Status();
  });
}

Status PagedKVCache::Append(int64_t layer, const TensorView& k, const TensorView& v) {
  return RunAttention("Append", layer, [&](const AttentionCall& call) -> Status {
    QUIRE_RETURN_IF_ERROR(RequireLatent(call, false, "AppendMLAKV"));
    const int64_t heads = call.spec.num_kv_heads;
    QUIRE_ASSIGN_OR_RETURN(const HeadRows k_rows,
                           ViewHeads(call, "k", k, heads, call.spec.qk_head_dim));
    QUIRE_ASSIGN_OR_RETURN(const HeadRows v_rows,
                           ViewHeads(call, "v", v, heads, call.spec.v_head_dim));
    QUIRE_RETURN_IF_ERROR(steps_.RequireAppended(call, false));
    return AppendRows(call, k_rows, v_rows);
  });
}

Status PagedKVCache::Attend(int64_t layer, const TensorView& q, const TensorView& o,
                            const TensorView* lse, double sm_scale, const TensorView* mask) {
  return RunAttention("Attend", layer, [&](const AttentionCall& call) -> Status {
    QUIRE_ASSIGN_OR_RETURN(const HeadRows q_rows,
                           ViewHeads(call, "q", q, call.spec.num_qo_heads, call.spec.qk_head_dim));
    QUIRE_ASSIGN_OR_RETURN(const MutableHeadRows o_rows, ViewOutput(call, o));
    if (lse != nullptr) QUIRE_RETURN_IF_ERROR(CheckLse(call, *lse));
    QUIRE_RETURN_IF_ERROR(CheckScale(call, sm_scale));
    QUIRE_RETURN_IF_ERROR(CheckApart(call, {{"o", &o}, {"lse", lse}}, {{"q", &q}}));
    if (mask != nullptr) QUIRE_RETURN_IF_ERROR(blending_.Refuse(call, "masks"));
    QUIRE_ASSIGN_OR_RETURN(const RowMask* const masks, mask_.RowsOf(call, mask, plan_));
    QUIRE_RETURN_IF_ERROR(steps_.RequireAppended(call, true));
    if (blending_.is_open()) QUIRE_RETURN_IF_ERROR(blending_.RequireLatest(call));
    const auto angles =
        call.spec.latent ? ropes_.OfRotatedQueries(layer, plan_) : ropes_.OfQueries(layer);
    RunAttend(layer, Sees::kUpToOwn, q_rows, angles, o_rows, lse, sm_scale, masks);
    return Status();
  });
}

Status PagedKVCache::AppendLatent(const AttentionCall& call, const TensorView& kv) {
  QUIRE_ASSIGN_OR_RETURN(const HeadRows rows, ViewLatent(call, kv));
  QUIRE_RETURN_IF_ERROR(steps_.RequireAppended(call, false));
  return AppendRows(call, rows, {});
}

Status PagedKVCache::AppendMLAKV(int64_t layer, const TensorView& kv) {
  return RunAttention("AppendMLAKV", layer, [&](const AttentionCall& call) -> Status {
    QUIRE_RETURN_IF_ERROR(RequireLatent(call, true, "Append"));
    return AppendLatent(call, kv);
  });
}

Status PagedKVCache::AttentionWithMLA(int64_t layer, const TensorView& q_absorbed,
                                      const TensorView& kv, const TensorView& o, double sm_scale,
                                      const TensorView* mask) {
  return RunAttention("AttentionWithMLA", layer, [&](const AttentionCall& call) -> Status {
    QUIRE_RETURN_IF_ERROR(RequireLatent(call, true, "AttentionWithFusedQKV"));
    QUIRE_ASSIGN_OR_RETURN(
        const HeadRows q_rows,
        ViewHeads(call, "q_absorbed", q_absorbed, call.spec.num_qo_heads, call.spec.qk_head_dim));
    QUIRE_ASSIGN_OR_RETURN(const MutableHeadRows o_rows, ViewOutput(call, o));
    QUIRE_RETURN_IF_ERROR(CheckScale(call, sm_scale));
    QUIRE_RETURN_IF_ERROR(
        CheckApart(call, {{"o", &o}}, {{"q_absorbed", &q_absorbed}, {"kv", &kv}}));
    if (mask != nullptr) QUIRE_RETURN_IF_ERROR(blending_.Refuse(call, "masks"));
    QUIRE_ASSIGN_OR_RETURN(const RowMask* const masks, mask_.RowsOf(call, mask, plan_));
    QUIRE_RETURN_IF_ERROR(AppendLatent(call, kv));
    RunAttend(layer, Sees::kUpToOwn, q_rows, ropes_.OfRotatedQueries(layer, plan_), o_rows, nullptr,
              sm_scale, masks);
    return Status();
  });
}

Status PagedKVCache::AttentionWithSharedKV(int64_t source_layer, const TensorView& q,
                                           const TensorView& o, const TensorView* lse,
                                           double sm_scale, const TensorView* mask) {
  const char* name = "AttentionWithSharedKV";
  return RunAttention(name, source_layer, [&](const AttentionCall& of_layer) -> Status {
    // Its rows are those that go on: it is a layer behind the last one that was appended to.
    AttentionCall call = of_layer;
    if (blending_.is_open()) {
      blending_.StartLayer();
      call.row_count = blending_.RowsOfCall(source_layer);
    }
    QUIRE_ASSIGN_OR_RETURN(const HeadRows q_rows,
                           ViewHeads(call, "q", q, call.spec.num_qo_heads, call.spec.qk_head_dim));
    QUIRE_ASSIGN_OR_RETURN(const MutableHeadRows o_rows, ViewOutput(call, o));
    if (lse != nullptr) QUIRE_RETURN_IF_ERROR(CheckLse(call, *lse));
    QUIRE_RETURN_IF_ERROR(CheckScale(call, sm_scale));
    QUIRE_RETURN_IF_ERROR(CheckApart(call, {{"o", &o}, {"lse", lse}}, {{"q", &q}}));
    if (mask != nullptr) QUIRE_RETURN_IF_ERROR(blending_.Refuse(call, "masks"));
    QUIRE_ASSIGN_OR_RETURN(const RowMask* const masks, mask_.RowsOf(call, mask, plan_));
    QUIRE_RETURN_IF_ERROR(steps_.RequireAppended(call, true));
    const bool attended = steps_.attended(source_layer);
    RunAttend(source_layer, Sees::kUpToOwn, q_rows, ropes_.OfRotatedQueries(source_layer, plan_),
              o_rows, lse, sm_scale, masks);
    steps_.SetAttended(source_layer, attended);  // this was another layer's
    return Status();
  });
}

Status PagedKVCache::AppendRows(const AttentionCall& call, const HeadRows& k, const HeadRows& v) {
  if (blending_.is_open()) QUIRE_RETURN_IF_ERROR(blending_.RequireNext(call));
  QUIRE_RETURN_IF_ERROR(importer_.LoadLayer(call, plan_));
  if (!blending_.is_open()) {
    StoreRows(call.layer, k, v, ropes_.OfNewKeys(call.layer));
    return Status();
  }
  QUIRE_RETURN_IF_ERROR(blending_.Store(call, k, v, *backend_));
  steps_.SetAppended(call.layer);
  sender_.SendLayer(call.layer, plan_);
  return blending_.Choose(call);
}

void PagedKVCache::StoreRows(int64_t index, const HeadRows& k, const HeadRows& v,
                             const RotaryRows& rotary) noexcept {
  const GroupPlan& plan = plan_.group(kv_.group_of(index));
  const AppendArgs args{.pages = kv_.storage->layer(index),
                        .row_count = plan_.row_count(),
                        .k = k,
                        .v = v,
                        .rotary = rotary,
                        .targets = plan.rows.targets.data(),
                        .opens_tile = plan.rows.opens_tile.data()};
  backend_->append_kv(args, *kv_.options.runner);
  steps_.SetAppended(index);
  sender_.SendLayer(index, plan_);
}

void PagedKVCache::RunAttend(int64_t index, Sees sees, const HeadRows& q,
                             const RopeAngles::QueryAngles& angles, const MutableHeadRows& o,
                             const TensorView* lse, double sm_scale,
                             const RowMask* masks) noexcept {
  const std::vector<float>& head_sinks = constants_.head_sinks_log2[static_cast<size_t>(index)];
  const AttentionLayerSpec& spec = kv_.options.layers[static_cast<size_t>(index)];
  const int group = kv_.group_of(index);
  const bool blends = blending_.is_open();
  RunKernel(
      index,
      {.pages = kv_.storage->layer(index),
       .num_qo_heads = static_cast<int>(spec.num_qo_heads),
       .q = q,
       .rotary = angles.rows,
       .sink_angles = angles.sinks,
       .head_sinks_log2 = head_sinks.empty() ? nullptr : head_sinks.data(),
       .o = o,
       .sequences = blends ? blending_.queries().sequences(group) : plan_.group(group).sequences,
       .shared = blends ? blending_.queries().shared() : plan_.shared(),
       .cached_only = sees == Sees::kCached,
       .masks = masks},
      lse, sm_scale);
}

void PagedKVCache::RunKernel(int64_t index, AttentionArgs args, const TensorView* lse,
                             double sm_scale) noexcept {
  const ScopedFloatEnvironment environment;  // scale_log2 is rounded here
  args.scale_log2 = static_cast<float>(sm_scale * kLog2E);
  args.layer_window = kv_.groups[static_cast<size_t>(kv_.group_of(index))].window;
  args.soft_cap = static_cast<float>(kv_.options.layers[static_cast<size_t>(index)].soft_cap);
  args.lse = lse == nullptr ? nullptr : lse->data_as<float>();
  args.lse_row_stride = lse == nullptr ? 0 : lse->stride(0);
  args.row_count = blending_.is_open() ? std::ssize(blending_.queries().rows()) : plan_.row_count();
  args.scratch = scratch_.Take();
  backend_->attention(args, *kv_.options.runner);
  steps_.SetAttended(index);
}

}  // namespace quire
