// Token trees of PagedKVCache: their forwards, commits and pops.
#include <algorithm>
#include <limits>

#include "kv/paged_kv_cache.h"
#include "kv/reserve.h"

namespace quire {
namespace {

std::string OfSequence(const char* call, int64_t seq_id) {
  return std::string(call) + ": sequence " + std::to_string(seq_id) + " ";
}

}  // namespace

Status PagedKVCache::RequireCommitted(const char* call, int32_t index) const {
  const int64_t size = trees_.SizeOf(index);
  if (sequences_[index].pending > 0) {
    return Status(StatusCode::kBadState, OfSequence(call, sequences_[index].id) + "has " +
                                             std::to_string(sequences_[index].pending) +
                                             " pending tokens of epoch " +
                                             std::to_string(sequences_[index].receive) +
                                             "; call DisaggCommitRecv or DisaggCancelRecv first");
  }
  if (size == 0) return Status();
  return Status(StatusCode::kBadState,
                OfSequence(call, sequences_[index].id) + "has an uncommitted tree of " +
                    std::to_string(size) +
                    " nodes; call CommitAcceptedTokenTreeNodes first (leaf -1 drops all of them)");
}

Result<int64_t> PagedKVCache::GetTreeSize(int64_t seq_id) const {
  return GuardEntry([&]() -> Result<int64_t> {
    QUIRE_ASSIGN_OR_RETURN(const int32_t index, FindSequence("GetTreeSize", seq_id));
    return trees_.SizeOf(index);
  });
}

// ---------------------------------------------------------------------- forward

Status PagedKVCache::PlanTreeMember(const char* call, int64_t seq_id,
                                    std::span<const int64_t> parents, int64_t first_row,
                                    ForwardPlan& plan) {
  const int64_t count = static_cast<int64_t>(parents.size());
  const int32_t index = sequences_.Find(seq_id);
  if (!TakeMember(index, count, first_row)) return RefuseMember(call, seq_id, index, count);
  const Sequence& sequence = sequences_[index];
  if (sequence.pending > 0) QUIRE_RETURN_IF_ERROR(RequireCommitted(call, index));
  const int64_t size = trees_.SizeOf(index);
  if (count > options_.max_tree_size - size) {
    return Status(StatusCode::kTooLarge,
                  OfSequence(call, seq_id) + "would have an uncommitted tree of " +
                      std::to_string(size) + " + " + std::to_string(count) +
                      " nodes; max_tree_size is " + std::to_string(options_.max_tree_size));
  }
  const TokenTree* const old = trees_.Find(index);
  QUIRE_RETURN_IF_ERROR(AddDepths(call, seq_id,
                                  old == nullptr ? std::span<const int32_t>() : old->depths,
                                  parents, tree_depths_));
  const int64_t levels = std::max<int64_t>(
      sequence.reserved,
      *std::max_element(tree_depths_.begin() + first_row, tree_depths_.end()) + 1);
  const int64_t committed = CommittedLength(sequence);
  if (levels > std::numeric_limits<int32_t>::max() - committed) {
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
    page_counts_[g] +=
        groups[g].page_count + TokenTrees::PagesFor(tree_.pool(static_cast<int>(g)), size, count);
  }
  return Status();
}

// Leaves only marks that no call can see, the plan's members and tree_depths_, which AddNodes reads
// before another planning.
Status PagedKVCache::PlanTreeBatch(const char* call, std::span<const int64_t> seq_ids,
                                   std::span<const int64_t> append_lengths,
                                   std::span<const int64_t> token_tree_parents, ForwardPlan& plan) {
  QUIRE_RETURN_IF_ERROR(StartBatch(call, seq_ids, append_lengths, plan));
  tree_depths_.clear();
  size_t row_count = 0;
  for (size_t i = 0; i < seq_ids.size(); ++i) {
    const size_t left = token_tree_parents.size() - row_count;
    const size_t count = append_lengths[i] < 1 ? 0 : static_cast<size_t>(append_lengths[i]);
    if (count > left) {
      return Status(StatusCode::kBadArgument,
                    OfSequence(call, seq_ids[i]) + "is to get " + std::to_string(count) +
                        " nodes, but of " + std::to_string(token_tree_parents.size()) +
                        " parents " + std::to_string(left) + " are left for it");
    }
    QUIRE_RETURN_IF_ERROR(PlanTreeMember(call, seq_ids[i],
                                         token_tree_parents.subspan(row_count, count),
                                         static_cast<int64_t>(row_count), plan));
    row_count += count;
  }
  if (row_count == token_tree_parents.size()) return Status();
  return Status(StatusCode::kBadArgument,
                std::string(call) + ": " + std::to_string(token_tree_parents.size()) +
                    " parents for " + std::to_string(row_count) + " new nodes");
}

Result<int64_t> PagedKVCache::PagesNeededForTree(
    std::span<const int64_t> seq_ids, std::span<const int64_t> append_lengths,
    std::span<const int64_t> token_tree_parents) const {
  const char* call = "PagesNeededForTree";
  return Enter(call, [&]() -> Result<int64_t> {
    // As PagesNeeded.
    PagedKVCache* self = const_cast<PagedKVCache*>(this);
    QUIRE_RETURN_IF_ERROR(
        self->PlanTreeBatch(call, seq_ids, append_lengths, token_tree_parents, self->query_));
    return *std::max_element(page_counts_.begin(), page_counts_.end());
  });
}

Status PagedKVCache::BeginTreeForward(std::span<const int64_t> seq_ids,
                                      std::span<const int64_t> append_lengths,
                                      std::span<const int64_t> token_tree_parents) {
  const char* call = "BeginTreeForward";
  return Enter(call, [&]() -> Status {
    QUIRE_RETURN_IF_ERROR(PlanTreeBatch(call, seq_ids, append_lengths, token_tree_parents, plan_));
    QUIRE_RETURN_IF_ERROR(CheckPages(call, page_counts_));
    for (const ForwardMember& member : plan_.members) {
      trees_.Reserve(tree_, member.sequence, member.node_count);
    }
    QUIRE_RETURN_IF_ERROR(ReserveForward(call));
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
                  std::span<const int32_t>(tree_depths_).subspan(first_row, count));
  member.tree = trees_.Find(member.sequence);
  sequences_[member.sequence].reserved = member.levels;
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
  Sequence& sequence = sequences_[index];
  const int64_t committed = CommittedLength(sequence);
  const int64_t levels = trees_.DropNodes(tree_, index, size);
  if (levels < sequence.reserved) sequence.last = tree_.Pop(sequence.last, committed + levels);
  sequence.reserved = levels;
}

Status PagedKVCache::CheckLeaf(const char* call, int64_t seq_id, int64_t leaf) {
  QUIRE_ASSIGN_OR_RETURN(const int32_t index, FindSequence(call, seq_id));
  Sequence& sequence = sequences_[index];
  if (sequence.batch == planning_) {
    return Status(StatusCode::kBadArgument, OfSequence(call, seq_id) + "is named twice");
  }
  sequence.batch = planning_;
  const TokenTree* const tree = trees_.Find(index);
  if (tree == nullptr) {
    return Status(StatusCode::kBadState, OfSequence(call, seq_id) +
                                             "has no uncommitted tree; it was committed already, "
                                             "or never given one by BeginTreeForward");
  }
  if (leaf < -1 || leaf >= tree->size()) {
    return Status(StatusCode::kBadArgument,
                  OfSequence(call, seq_id) + "has a tree of " + std::to_string(tree->size()) +
                      " nodes; " + std::to_string(leaf) +
                      " is none of them, nor -1, which drops all of them");
  }
  const size_t levels = static_cast<size_t>(tree->levels);
  ReserveGrowing(tree_path_, levels);
  ReserveGrowing(tree_from_, levels);
  ReserveGrowing(tree_to_, levels);
  ReserveGrowing(tree_opens_, levels);
  return Status();
}

// The path's tokens move from their nodes' slots to those of their positions.
void PagedKVCache::CommitPath(int32_t index, int64_t leaf) noexcept {
  Sequence& sequence = sequences_[index];
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
      const int64_t node = tree_path_[i];
      tree_from_[i] = {.page = group.pages[static_cast<size_t>(node / pool.page_size())],
                       .slot = static_cast<int32_t>(pool.Slot(node))};
      tree_opens_[i] = tree_to_[i].slot % kTilePositions == 0;
    }
    tree_opens_[0] |= group.opens_tile;
    storage_->Copy(g, tree_from_, tree_to_, tree_opens_.data());
  }
  trees_.DropNodes(tree_, index, 0);
  if (static_cast<int64_t>(count) < sequence.reserved)
    sequence.last = tree_.Pop(sequence.last, committed + static_cast<int64_t>(count));
  sequence.reserved = 0;
  SlideTo(&sequence, committed);
}

Status PagedKVCache::CommitAcceptedTokenTreeNodes(std::span<const int64_t> seq_ids,
                                                  std::span<const int64_t> leaf_indices) {
  const char* call = "CommitAcceptedTokenTreeNodes";
  return Enter(call, [&]() -> Status {
    QUIRE_RETURN_IF_ERROR(RequireIdle(call));
    if (seq_ids.size() != leaf_indices.size()) {
      return Status(StatusCode::kBadArgument,
                    std::string(call) + ": " + std::to_string(seq_ids.size()) +
                        " sequence ids, but " + std::to_string(leaf_indices.size()) + " leaves");
    }
    ++planning_;
    for (size_t i = 0; i < seq_ids.size(); ++i) {
      QUIRE_RETURN_IF_ERROR(CheckLeaf(call, seq_ids[i], leaf_indices[i]));
    }
    for (size_t i = 0; i < seq_ids.size(); ++i) {
      CommitPath(sequences_.Find(seq_ids[i]), leaf_indices[i]);
    }
    hides_more_ = true;
    FreeHidden();
    return Status();
  });
}

}  // namespace quire
