// The forward of PagedKVCache: planning, begin, end.
#include <algorithm>

#include "kv/cache/paged_kv_cache.h"

namespace quire {

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
  attention_.Reserve(sequences_max);
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
    attention_.ReserveAgain();
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

void PagedKVCache::FillSkippedLayers() noexcept {
  for (int64_t layer = 0; layer < steps_.count(); ++layer) {
    if (!steps_.appended(layer)) attention_.StoreZeros(layer);
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

}  // namespace quire
