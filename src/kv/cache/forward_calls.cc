#include "kv/cache/forward_calls.h"

#include <algorithm>

#include "base/check.h"

namespace quire {

ForwardCalls::ForwardCalls(const Owners& owners)
    : kv_(owners.kv), owners_(owners), planner_(owners.kv, owners.windows) {}

void ForwardCalls::Clear() noexcept {
  owners_.plan.Clear();
  query_.Clear();
}

// ---------------------------------------------------------------------- both halves

Status ForwardCalls::Plan(const ControlCall& call) {
  switch (call.kind) {
    case ControlCall::Kind::kBegin:
      return PlanBegin(call);
    case ControlCall::Kind::kBeginTree:
      return PlanBeginTree(call);
    case ControlCall::Kind::kEnd:
      return PlanEnd(call);
    case ControlCall::Kind::kAbort:
      return kv_.control.in_forward() ? Status() : kv_.control.RequireForward(call.name());
    case ControlCall::Kind::kClear:
    case ControlCall::Kind::kAdd:
    case ControlCall::Kind::kRemove:
    case ControlCall::Kind::kFork:
    case ControlCall::Kind::kPop:
    case ControlCall::Kind::kRetain:
    case ControlCall::Kind::kCommitTree:
    case ControlCall::Kind::kImport:
      break;
  }
  QUIRE_CHECK(false) << call.name() << " is no call of forwards";
  return Status();
}

void ForwardCalls::Commit(const ControlCall& call) noexcept {
  switch (call.kind) {
    case ControlCall::Kind::kBegin:
      return repeats_ ? CommitRepeated() : CommitBegin();
    case ControlCall::Kind::kBeginTree:
      return CommitBegin();
    case ControlCall::Kind::kEnd:
      if (kv_.options.allow_skipped_layers) FillSkippedLayers();
      Close();
      return owners_.sender.FinishForward(SendMarks::Outcome::kEnded);
    case ControlCall::Kind::kAbort:
      RollBack();
      return owners_.sender.FinishForward(SendMarks::Outcome::kAborted);
    case ControlCall::Kind::kClear:
    case ControlCall::Kind::kAdd:
    case ControlCall::Kind::kRemove:
    case ControlCall::Kind::kFork:
    case ControlCall::Kind::kPop:
    case ControlCall::Kind::kRetain:
    case ControlCall::Kind::kCommitTree:
    case ControlCall::Kind::kImport:
      break;
  }
  QUIRE_DCHECK(false) << "no forward call is planned";
}

// ---------------------------------------------------------------------- begin

Status ForwardCalls::PlanBegin(const ControlCall& call) {
  ForwardPlan& plan = owners_.plan;
  const char* const name = call.name();
  QUIRE_RETURN_IF_ERROR(kv_.control.RequireIdle(name));
  repeats_ = call.loads.empty() && plan.CanRepeat(call.seq_ids, call.append_lengths, kv_.tree);
  if (repeats_) {
    QUIRE_DCHECK(plan.members.size() == call.seq_ids.size());
    QUIRE_RETURN_IF_ERROR(kv_.CheckPages(name, plan.page_counts));
    // For all else the last forward had as much as this one.
    owners_.ropes.Reserve(plan, true);
    owners_.attention.ReserveAgain();
    return Status();
  }
  QUIRE_RETURN_IF_ERROR(planner_.Plan(name, call.seq_ids, call.append_lengths, call.loads, plan));
  QUIRE_RETURN_IF_ERROR(kv_.CheckPages(name, plan.page_counts));
  kv_.tree.PrefetchPlanned(plan.page_counts);
  Reserve(std::ssize(plan.members));
  return Status();
}

Status ForwardCalls::PlanBeginTree(const ControlCall& call) {
  ForwardPlan& plan = owners_.plan;
  const char* const name = call.name();
  QUIRE_RETURN_IF_ERROR(
      owners_.trees.Plan(name, call.seq_ids, call.append_lengths, call.parents, plan));
  QUIRE_RETURN_IF_ERROR(kv_.CheckPages(name, plan.page_counts));
  owners_.trees.Reserve(plan, call.parents);
  Reserve(std::ssize(plan.members));
  return Status();
}

Status ForwardCalls::BeginBlending(std::span<const int64_t> seq_ids,
                                   std::span<const int64_t> append_lengths,
                                   std::span<const LayerLoad> loads,
                                   std::span<const BlendMember> blends) {
  ForwardPlan& plan = owners_.plan;
  const char* const call = "BeginBlendingForward";
  QUIRE_RETURN_IF_ERROR(planner_.Plan(call, seq_ids, append_lengths, loads, plan));
  QUIRE_RETURN_IF_ERROR(owners_.blending.Plan(call, blends, plan));
  QUIRE_RETURN_IF_ERROR(kv_.CheckPages(call, plan.page_counts));
  QUIRE_DCHECK(!plan.members.empty()) << "a batch without members was planned";
  const ForwardMember& last = plan.members.back();
  Reserve(QueryPlan::SequenceCountMax(last.first_row + last.row_count(), std::ssize(plan.members)));
  owners_.blending.Reserve(blends);
  CommitBegin();
  owners_.blending.Open();
  return Status();
}

void ForwardCalls::Reserve(int64_t sequences_max) {
  ForwardPlan& plan = owners_.plan;
  QUIRE_DCHECK(sequences_max >= std::ssize(plan.members));
  kv_.tree.Reserve(
      AppendPlans(std::span<const ForwardMember>(plan.members), &ForwardMember::append),
      plan.group_appends);
  plan.Reserve(kv_.tree);
  owners_.ropes.Reserve(plan, false);
  owners_.attention.Reserve(sequences_max);
  owners_.blending.ReserveRows(plan.totals().rows);
}

void ForwardCalls::CommitBegin() noexcept {
  ForwardPlan& plan = owners_.plan;
  plan.ClearArrays();
  const size_t group_count = kv_.groups.size();
  QUIRE_DCHECK(plan.group_appends.size() == plan.members.size() * group_count);
  const GroupAppend* appends = plan.group_appends.data();
  for (ForwardMember& member : plan.members) {
    const std::span<const GroupAppend> groups(appends, group_count);
    appends += group_count;
    if (member.appends() && !member.append.extends) kv_.tree.hidden().Unhide(member.sequence);
    member.last = member.appends() ? kv_.tree.Append(member.append, groups) : member.append.last;
    QUIRE_DCHECK(kv_.tree.End(member.last) == member.append.length + member.append.count)
        << "sequence " << member.id;
    kv_.control[member.sequence].last = member.last;
    if (member.is_tree()) owners_.trees.AddNodes(plan, member, groups);
  }
  plan.Fill(kv_.tree);
  kv_.tree.DeferMerges();
  for (int g = 0; g < kv_.tree.group_count(); ++g) {
    const GroupPlan& group = plan.group(g);
    kv_.storage->Copy(g, group.copy_from, group.copy_to, group.copy_opens_tile.data());
  }
  Open(false);
}

void ForwardCalls::CommitRepeated() noexcept {
  if (!kv_.control.HasBatchOfLastForward()) {  // another batch has been asked about since
    kv_.control.StartPlanning();
    for (const ForwardMember& member : owners_.plan.members) kv_.control.Name(member.sequence);
  }
  QUIRE_DCHECK(!owners_.plan.members.empty()) << "there is no forward to repeat";
  owners_.plan.Repeat(kv_.tree);
  ++repeated_count_;
  kv_.tree.DeferMerges();
  Open(true);
}

void ForwardCalls::Open(bool repeats) noexcept {
  QUIRE_DCHECK(!kv_.control.in_forward()) << "a forward is open already";
  owners_.ropes.Fill(owners_.plan, repeats);
  owners_.steps.Begin();
  kv_.control.OpenForward();
}

// ---------------------------------------------------------------------- end and abort

Status ForwardCalls::PlanEnd(const ControlCall& call) {
  QUIRE_RETURN_IF_ERROR(kv_.control.RequireForward(call.name()));
  return kv_.options.allow_skipped_layers ? LoadSkippedLayers(call) : owners_.steps.RequireAll();
}

// Layers that have not stored their rows load what they import, as their Append would have.
Status ForwardCalls::LoadSkippedLayers(const ControlCall& call) {
  for (int64_t layer = 0; layer < owners_.steps.count(); ++layer) {
    if (owners_.steps.appended(layer)) continue;
    const Status loaded =
        owners_.importer.LoadLayer({.name = call.name(),
                                    .layer = layer,
                                    .spec = kv_.options.layers[static_cast<size_t>(layer)],
                                    .row_count = owners_.plan.row_count()},
                                   owners_.plan);
    kv_.control.set_failed(!loaded.ok());
    QUIRE_RETURN_IF_ERROR(loaded);
  }
  return Status();
}

void ForwardCalls::FillSkippedLayers() noexcept {
  for (int64_t layer = 0; layer < owners_.steps.count(); ++layer) {
    if (!owners_.steps.appended(layer)) owners_.attention.StoreZeros(layer);
    QUIRE_DCHECK(owners_.steps.appended(layer)) << "layer " << layer;
  }
}

void ForwardCalls::Close() noexcept {
  QUIRE_DCHECK(kv_.control.in_forward()) << "no forward is open";
  kv_.control.CloseForward();
  owners_.blending.Close();
  if (owners_.plan.totals().copying > 0) {
    for (const ForwardMember& member : owners_.plan.members) {
      if (member.append.copies()) kv_.tree.ReleaseOldPath(member.append, member.last);
    }
  }
  kv_.tree.RunDeferredMerges();
  if (!kv_.tree.hidden().tracks()) return;
  for (const ForwardMember& member : owners_.plan.members) {
    if (member.is_tree()) {  // what is rejected is seen from the committed end
      owners_.windows.UpdateHidden(member.sequence);
    } else {
      owners_.windows.SlideTo(member.sequence);
    }
  }
  owners_.windows.FreeHidden();
}

// In the reverse order of the batch, so that pages come back to the free list as they left it.
void ForwardCalls::RollBack() noexcept {
  QUIRE_DCHECK(kv_.control.in_forward()) << "no forward is open";
  kv_.control.CloseForward();
  owners_.blending.Close();
  for (size_t m = owners_.plan.members.size(); m-- > 0;) {
    const ForwardMember& member = owners_.plan.members[m];
    if (member.is_tree()) owners_.trees.DropNodes(member.sequence, member.first_node());
    if (!member.appends()) continue;
    BlockIndex& last = kv_.control[member.sequence].last;
    kv_.tree.hidden().Unhide(member.sequence);
    last = kv_.tree.UndoAppend(member.append, last);
    QUIRE_DCHECK(kv_.tree.End(last) == member.append.length) << "sequence " << member.id;
    owners_.windows.UpdateHidden(member.sequence);
  }
  kv_.tree.RunDeferredMerges();
  owners_.windows.FreeHidden();
}

// ---------------------------------------------------------------------- queries

Result<int64_t> ForwardCalls::PagesNeeded(const char* call, std::span<const int64_t> seq_ids,
                                          std::span<const int64_t> append_lengths) const {
  QUIRE_RETURN_IF_ERROR(planner_.Plan(call, seq_ids, append_lengths, {}, query_));
  return std::ranges::max(query_.page_counts);
}

Result<int64_t> ForwardCalls::PagesNeededForTree(const char* call, std::span<const int64_t> seq_ids,
                                                 std::span<const int64_t> append_lengths,
                                                 std::span<const int64_t> parents) const {
  QUIRE_RETURN_IF_ERROR(owners_.trees.Plan(call, seq_ids, append_lengths, parents, query_));
  return std::ranges::max(query_.page_counts);
}

Result<std::span<const int32_t>> ForwardCalls::QueryRows(const char* call) const {
  if (!kv_.control.in_forward()) return kv_.control.RequireForward(call);
  if (owners_.blending.is_open()) return owners_.blending.queries().rows();
  return owners_.blending.queries().AllRows(owners_.plan.row_count());
}

Result<std::span<const int32_t>> ForwardCalls::QueryPositions(const char* call) const {
  if (!kv_.control.in_forward()) return kv_.control.RequireForward(call);
  return owners_.blending.is_open() ? owners_.blending.queries().positions()
                                    : owners_.plan.positions();
}

}  // namespace quire
