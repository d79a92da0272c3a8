// Token trees of PagedKVCache: their forwards, commits and pops.
#include <algorithm>

#include "kv/cache/paged_kv_cache.h"
#include "kv/pages/reserve.h"

namespace quire {
Status PagedKVCache::RequireReceived(const char* call, int32_t index) const {
  const Sequence& sequence = control_[index];
  if (sequence.pending == 0) return Status();
  return Status(StatusCode::kBadState,
                OfSequence(call, sequence.id) + "has " + std::to_string(sequence.pending) +
                    " pending tokens of epoch " + std::to_string(sequence.receive) +
                    "; call DisaggCommitRecv or DisaggCancelRecv first");
}

Status PagedKVCache::RequireCommitted(const char* call, int32_t index) const {
  QUIRE_RETURN_IF_ERROR(RequireReceived(call, index));
  return RequireNoTree(call, control_[index].id, trees_.SizeOf(index));
}

Result<int64_t> PagedKVCache::GetTreeSize(int64_t seq_id) const {
  return gate_.Ask([&]() -> Result<int64_t> {
    QUIRE_ASSIGN_OR_RETURN(const int32_t index, control_.Find("GetTreeSize", seq_id));
    return trees_.SizeOf(index);
  });
}

// ---------------------------------------------------------------------- forward

Status PagedKVCache::PlanTreeMember(const char* call, int64_t seq_id,
                                    std::span<const int64_t> parents, int64_t first_row,
                                    ForwardPlan& plan) const {
  const int64_t count = static_cast<int64_t>(parents.size());
  const int32_t index = control_.table().Find(seq_id);
  if (!TakeMember(index, count, first_row)) return RefuseMember(call, seq_id, index, count);
  const Sequence& sequence = control_[index];
  if (sequence.pending > 0) QUIRE_RETURN_IF_ERROR(RequireCommitted(call, index));
  const int64_t size = trees_.SizeOf(index);
  QUIRE_RETURN_IF_ERROR(CheckTreeSize(call, seq_id, size, count, options_.max_tree_size));
  const TokenTree* const old = trees_.Find(index);
  QUIRE_RETURN_IF_ERROR(AddDepths(call, seq_id,
                                  old == nullptr ? std::span<const int32_t>() : old->depths,
                                  parents, plan.node_depths));
  const int64_t levels = std::max<int64_t>(
      sequence.reserved,
      *std::max_element(plan.node_depths.begin() + first_row, plan.node_depths.end()) + 1);
  const int64_t committed = CommittedLength(sequence);
  if (levels > kPositionsMax - committed) {
    return Status(StatusCode::kTooLarge, OfSequence(call, seq_id) + "of length " +
                                             std::to_string(committed) + " cannot get a tree of " +
                                             std::to_string(levels) +
                                             " levels: positions end at 2^31");
  }
  const size_t first_group = plan.members.size() * groups_.size();
  const std::span<GroupAppend> groups(plan.group_appends.data() + first_group, groups_.size());
  const int64_t end = tree_.End(sequence.last);
  ForwardMember& member = plan.members.emplace_back();
  member.id = seq_id;
  member.sequence = index;
  member.first_row = first_row;
  member.append = {.last = sequence.last, .length = end, .count = 0, .cut = end, .extends = true};
  if (levels > sequence.reserved)
    member.append = tree_.PlanAppend(sequence.last, levels - sequence.reserved, groups);
  member.long_factors = sequence.long_factors;
  member.window = sequence.window;
  member.node_count = count;
  member.committed = committed;
  member.levels = levels;
  for (size_t g = 0; g < groups_.size(); ++g) {
    plan.page_counts[g] +=
        groups[g].page_count + TokenTrees::PagesFor(tree_.pool(static_cast<int>(g)), size, count);
  }
  return Status();
}

// Leaves only marks that no call can see, and what planning fills of the plan.
Status PagedKVCache::PlanTreeBatch(const char* call, std::span<const int64_t> seq_ids,
                                   std::span<const int64_t> append_lengths,
                                   std::span<const int64_t> token_tree_parents,
                                   ForwardPlan& plan) const {
  QUIRE_RETURN_IF_ERROR(StartBatch(call, seq_ids, append_lengths, plan));
  NodeParents parents(call, token_tree_parents);
  int64_t row_count = 0;
  for (size_t i = 0; i < seq_ids.size(); ++i) {
    QUIRE_ASSIGN_OR_RETURN(const auto of_member, parents.Take(seq_ids[i], append_lengths[i]));
    QUIRE_RETURN_IF_ERROR(PlanTreeMember(call, seq_ids[i], of_member, row_count, plan));
    row_count += static_cast<int64_t>(of_member.size());
  }
  return parents.RequireNoneLeft();
}

Result<int64_t> PagedKVCache::PagesNeededForTree(
    std::span<const int64_t> seq_ids, std::span<const int64_t> append_lengths,
    std::span<const int64_t> token_tree_parents) const {
  const char* call = "PagesNeededForTree";
  return gate_.Ask([&]() -> Result<int64_t> {
    QUIRE_RETURN_IF_ERROR(PlanTreeBatch(call, seq_ids, append_lengths, token_tree_parents, query_));
    return std::ranges::max(query_.page_counts);
  });
}

Status PagedKVCache::BeginTreeForward(std::span<const int64_t> seq_ids,
                                      std::span<const int64_t> append_lengths,
                                      std::span<const int64_t> token_tree_parents) {
  const char* call = "BeginTreeForward";
  return gate_.EnterAlone(call, [&]() -> Status {
    QUIRE_RETURN_IF_ERROR(PlanTreeBatch(call, seq_ids, append_lengths, token_tree_parents, plan_));
    QUIRE_RETURN_IF_ERROR(CheckPages(call, plan_.page_counts));
    for (const ForwardMember& member : plan_.members) {
      trees_.Reserve(tree_, member.sequence, member.node_count);
    }
    ReserveForward();
    tree_parents_ = token_tree_parents;
    CommitForward();
    return Status();
  });
}

// Called when the member's append is committed.
void PagedKVCache::AddNodes(ForwardMember& member, std::span<const GroupAppend> groups) noexcept {
  const size_t first_row = static_cast<size_t>(member.first_row);
  const size_t count = static_cast<size_t>(member.node_count);
  const bool is_new = trees_.Find(member.sequence) == nullptr;
  trees_.AddNodes(tree_, member.sequence, tree_parents_.subspan(first_row, count),
                  std::span<const int32_t>(plan_.node_depths).subspan(first_row, count));
  member.tree = trees_.Find(member.sequence);
  control_[member.sequence].reserved = member.levels;
  if (!is_new) return;
  // As for the first token of a chain (ForwardPlan::FillSlots).
  for (int g = 0; g < tree_.group_count(); ++g) {
    const bool follows_copy = member.append.copies() &&
                              tree_.IsHeld(member.last, g, member.committed - 1, member.committed);
    trees_.SetOpensTile(member.sequence, g,
                        !groups[static_cast<size_t>(g)].in_place && !follows_copy);
  }
}

// ---------------------------------------------------------------------- commit and pop

// The levels' positions are the sequence's alone, so they go without a split.
void PagedKVCache::DropNodes(int32_t index, int64_t size) noexcept {
  Sequence& sequence = control_[index];
  const int64_t committed = CommittedLength(sequence);
  const int64_t levels = trees_.DropNodes(tree_, index, size);
  if (levels < sequence.reserved) {
    tree_.Unhide(index);
    sequence.last = tree_.Pop(sequence.last, committed + levels);
  }
  sequence.reserved = levels;
  UpdateHidden(index);
}

Status PagedKVCache::PlanLeaf(const char* call, int64_t seq_id, int64_t leaf) {
  QUIRE_ASSIGN_OR_RETURN(const int32_t index, control_.Find(call, seq_id));
  QUIRE_RETURN_IF_ERROR(control_.NameOnce(call, index));
  QUIRE_RETURN_IF_ERROR(CheckLeaf(call, seq_id, trees_.SizeOf(index), leaf));
  const size_t levels = static_cast<size_t>(trees_.Find(index)->levels);
  ReserveGrowing(tree_path_, levels);
  ReserveGrowing(tree_from_, levels);
  ReserveGrowing(tree_to_, levels);
  ReserveGrowing(tree_opens_, levels);
  return Status();
}

// The path's tokens move from their nodes' slots to those of their positions.
void PagedKVCache::CommitPath(int32_t index, int64_t leaf) noexcept {
  Sequence& sequence = control_[index];
  const TokenTree& tree = *trees_.Find(index);
  const int64_t committed = CommittedLength(sequence);
  FillPath(tree.parents, leaf, tree_path_);
  const size_t count = tree_path_.size();
  tree_from_.resize(count);
  tree_to_.resize(count);
  tree_opens_.resize(count);
  for (int g = 0; g < tree_.group_count() && count > 0; ++g) {
    const TokenTree::Group& group = tree.groups[static_cast<size_t>(g)];
    const PagePool& pool = tree_.pool(g);
    FillSlots(sequence.last, g, committed, tree_to_);
    for (size_t i = 0; i < count; ++i) {
      tree_from_[i] = tree.SlotOf(pool, g, tree_path_[i]);
      tree_opens_[i] = tree_to_[i].slot % kTilePositions == 0;
    }
    tree_opens_[0] |= group.opens_tile;
    storage_->Copy(g, tree_from_, tree_to_, tree_opens_.data());
  }
  trees_.DropNodes(tree_, index, 0);
  if (static_cast<int64_t>(count) < sequence.reserved) {
    tree_.Unhide(index);
    sequence.last = tree_.Pop(sequence.last, committed + static_cast<int64_t>(count));
  }
  sequence.reserved = 0;
  SlideTo(index);
}

Status PagedKVCache::CommitAcceptedTokenTreeNodes(std::span<const int64_t> seq_ids,
                                                  std::span<const int64_t> leaf_indices) {
  const char* call = "CommitAcceptedTokenTreeNodes";
  return gate_.EnterAlone(call, [&]() -> Status {
    QUIRE_RETURN_IF_ERROR(control_.RequireIdle(call));
    QUIRE_RETURN_IF_ERROR(CheckLeafCount(call, seq_ids, leaf_indices));
    control_.StartPlanning();
    for (size_t i = 0; i < seq_ids.size(); ++i)
      QUIRE_RETURN_IF_ERROR(PlanLeaf(call, seq_ids[i], leaf_indices[i]));
    for (size_t i = 0; i < seq_ids.size(); ++i) {
      CommitPath(control_.table().Find(seq_ids[i]), leaf_indices[i]);
    }
    FreeHidden();
    return Status();
  });
}

}  // namespace quire
