#include "kv/cache/tree_forward.h"

#include <algorithm>
#include <string>

#include "base/check.h"
#include "kv/pages/reserve.h"

namespace quire {

// ---------------------------------------------------------------------- forward

Status TreeForward::PlanMember(const char* call, int64_t seq_id, std::span<const int64_t> parents,
                               int64_t first_row, ForwardPlan& plan) const {
  const int64_t count = static_cast<int64_t>(parents.size());
  const int32_t index = kv_.control.table().Find(seq_id);
  if (!planner_.Take(index, count, first_row)) return planner_.Refuse(call, seq_id, index, count);
  const Sequence& sequence = kv_.control[index];
  if (sequence.pending > 0) QUIRE_RETURN_IF_ERROR(kv_.RequireCommitted(call, index));
  const int64_t size = kv_.trees.SizeOf(index);
  QUIRE_RETURN_IF_ERROR(CheckTreeSize(call, seq_id, size, count, kv_.options.max_tree_size));
  const TokenTree* const old = kv_.trees.Find(index);
  QUIRE_RETURN_IF_ERROR(AddDepths(call, seq_id,
                                  old == nullptr ? std::span<const int32_t>() : old->depths,
                                  parents, plan.node_depths));
  const int64_t levels = std::max<int64_t>(
      sequence.reserved,
      *std::max_element(plan.node_depths.begin() + first_row, plan.node_depths.end()) + 1);
  QUIRE_DCHECK(count > 0 && levels > 0 && levels >= sequence.reserved);
  const int64_t committed = kv_.CommittedLength(sequence);
  if (levels > kPositionsMax - committed) {
    return Status(StatusCode::kTooLarge, OfSequence(call, seq_id) + "of length " +
                                             std::to_string(committed) + " cannot get a tree of " +
                                             std::to_string(levels) +
                                             " levels: positions end at 2^31");
  }
  const size_t first_group = plan.members.size() * kv_.groups.size();
  const std::span<GroupAppend> groups(plan.group_appends.data() + first_group, kv_.groups.size());
  const int64_t end = kv_.tree.End(sequence.last);
  ForwardMember& member = plan.members.emplace_back();
  member.id = seq_id;
  member.sequence = index;
  member.first_row = first_row;
  member.append = {.last = sequence.last, .length = end, .count = 0, .cut = end, .extends = true};
  if (levels > sequence.reserved)
    member.append = kv_.tree.PlanAppend(sequence.last, levels - sequence.reserved, groups);
  member.long_factors = sequence.long_factors;
  member.window = sequence.window;
  member.node_count = count;
  member.committed = committed;
  member.levels = levels;
  for (size_t g = 0; g < kv_.groups.size(); ++g) {
    plan.page_counts[g] += groups[g].page_count +
                           TokenTrees::PagesFor(kv_.tree.pool(static_cast<int>(g)), size, count);
  }
  return Status();
}

// Leaves only marks that no call can see, and what planning fills of the plan.
Status TreeForward::Plan(const char* call, std::span<const int64_t> seq_ids,
                         std::span<const int64_t> append_lengths, std::span<const int64_t> parents,
                         ForwardPlan& plan) const {
  QUIRE_RETURN_IF_ERROR(planner_.Start(call, seq_ids, append_lengths, plan));
  NodeParents of_members(call, parents);
  int64_t row_count = 0;
  for (size_t i = 0; i < seq_ids.size(); ++i) {
    QUIRE_ASSIGN_OR_RETURN(const auto of_member, of_members.Take(seq_ids[i], append_lengths[i]));
    QUIRE_RETURN_IF_ERROR(PlanMember(call, seq_ids[i], of_member, row_count, plan));
    row_count += static_cast<int64_t>(of_member.size());
  }
  return of_members.RequireNoneLeft();
}

void TreeForward::Reserve(const ForwardPlan& plan, std::span<const int64_t> parents) {
  QUIRE_DCHECK(parents.size() == plan.node_depths.size());
  for (const ForwardMember& member : plan.members)
    kv_.trees.Reserve(kv_.tree, member.sequence, member.node_count);
  parents_ = parents;
}

void TreeForward::AddNodes(const ForwardPlan& plan, ForwardMember& member,
                           std::span<const GroupAppend> groups) noexcept {
  const size_t first_row = static_cast<size_t>(member.first_row);
  const size_t count = static_cast<size_t>(member.node_count);
  QUIRE_DCHECK(first_row + count <= parents_.size());
  const bool is_new = kv_.trees.Find(member.sequence) == nullptr;
  kv_.trees.AddNodes(kv_.tree, member.sequence, parents_.subspan(first_row, count),
                     std::span<const int32_t>(plan.node_depths).subspan(first_row, count));
  member.tree = kv_.trees.Find(member.sequence);
  QUIRE_DCHECK(member.tree->levels == member.levels);
  kv_.control[member.sequence].reserved = member.levels;
  if (!is_new) return;
  // As for the first token of a chain (ForwardPlan::FillSlots).
  for (int g = 0; g < kv_.tree.group_count(); ++g) {
    const bool follows_copy =
        member.append.copies() &&
        kv_.tree.IsHeld(member.last, g, member.committed - 1, member.committed);
    kv_.trees.SetOpensTile(member.sequence, g,
                           !groups[static_cast<size_t>(g)].in_place && !follows_copy);
  }
}

// ---------------------------------------------------------------------- commit and pop

// The levels' positions are the sequence's alone, so they go without a split.
void TreeForward::DropNodes(int32_t index, int64_t size) noexcept {
  Sequence& sequence = kv_.control[index];
  const int64_t committed = kv_.CommittedLength(sequence);
  QUIRE_DCHECK(sequence.pending == 0);
  const int64_t levels = kv_.trees.DropNodes(kv_.tree, index, size);
  QUIRE_DCHECK(levels <= sequence.reserved);
  if (levels < sequence.reserved) {
    kv_.tree.hidden().Unhide(index);
    sequence.last = kv_.tree.Pop(sequence.last, committed + levels);
  }
  sequence.reserved = levels;
  windows_.UpdateHidden(index);
}

Status TreeForward::PlanLeaf(const char* call, int64_t seq_id, int64_t leaf) {
  QUIRE_ASSIGN_OR_RETURN(const int32_t index, kv_.control.Find(call, seq_id));
  QUIRE_RETURN_IF_ERROR(kv_.control.NameOnce(call, index));
  QUIRE_RETURN_IF_ERROR(CheckLeaf(call, seq_id, kv_.trees.SizeOf(index), leaf));
  QUIRE_DCHECK(kv_.trees.Find(index) != nullptr) << "a leaf of no tree";
  const size_t levels = static_cast<size_t>(kv_.trees.Find(index)->levels);
  ReserveGrowing(path_, levels);
  ReserveGrowing(from_, levels);
  ReserveGrowing(to_, levels);
  ReserveGrowing(opens_, levels);
  return Status();
}

// The path's tokens move from their nodes' slots to those of their positions.
void TreeForward::CommitPath(int32_t index, int64_t leaf) noexcept {
  Sequence& sequence = kv_.control[index];
  const TokenTree& tree = *kv_.trees.Find(index);
  const int64_t committed = kv_.CommittedLength(sequence);
  QUIRE_DCHECK(sequence.pending == 0);
  QUIRE_DCHECK(leaf >= -1 && leaf < tree.size());
  FillPath(tree.parents, leaf, path_);
  const size_t count = path_.size();
  QUIRE_DCHECK(tree.levels == sequence.reserved);
  QUIRE_DCHECK(static_cast<int64_t>(count) <= tree.levels);
  from_.resize(count);
  to_.resize(count);
  opens_.resize(count);
  for (int g = 0; g < kv_.tree.group_count() && count > 0; ++g) {
    const TokenTree::Group& group = tree.groups[static_cast<size_t>(g)];
    const PagePool& pool = kv_.tree.pool(g);
    kv_.FillSlots(sequence.last, g, committed, to_);
    for (size_t i = 0; i < count; ++i) {
      from_[i] = tree.SlotOf(pool, g, path_[i]);
      opens_[i] = to_[i].slot % kTilePositions == 0;
    }
    opens_[0] |= group.opens_tile;
    kv_.storage->Copy(g, from_, to_, opens_.data());
  }
  kv_.trees.DropNodes(kv_.tree, index, 0);
  if (static_cast<int64_t>(count) < sequence.reserved) {
    kv_.tree.hidden().Unhide(index);
    sequence.last = kv_.tree.Pop(sequence.last, committed + static_cast<int64_t>(count));
  }
  sequence.reserved = 0;
  windows_.SlideTo(index);
}

void TreeForward::Clear() noexcept {
  FreeAll(path_);
  FreeAll(from_);
  FreeAll(to_);
  FreeAll(opens_);
}

}  // namespace quire
