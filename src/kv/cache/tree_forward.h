// TreeForward: uncommitted token trees: the forwards that add nodes, the commits that accept a path
// of them, and what drops them.
//
// Invariants, of a sequence with a tree:
// - Its path has as many positions after the committed ones as the tree has levels (`reserved`), in
//   slots that nobody else gets. So a commit takes no page and cannot fail once it is planned.
// - Nodes are added and dropped from behind only: a node's parent stands before it.
#ifndef QUIRE_KV_CACHE_TREE_FORWARD_H_
#define QUIRE_KV_CACHE_TREE_FORWARD_H_

#include <cstdint>
#include <span>
#include <vector>

#include "kv/cache/batch_planner.h"
#include "kv/cache/paged_sequences.h"
#include "kv/cache/window_book.h"
#include "kv/plan/forward_plan.h"
#include "quire/status.h"

namespace quire {

class TreeForward {
 public:
  // Both must outlive it.
  TreeForward(PagedSequences& kv, WindowBook& windows)
      : kv_(kv), planner_(kv, windows), windows_(windows) {}

  // ---- A forward. `parents`: those of all new nodes [row].
  // As BatchPlanner::Plan.
  Status Plan(const char* call, std::span<const int64_t> seq_ids,
              std::span<const int64_t> append_lengths, std::span<const int64_t> parents,
              ForwardPlan& plan) const;
  // Memory for the nodes of the planned forward. `parents` stay where they are until the nodes are
  // added. May throw std::bad_alloc.
  void Reserve(const ForwardPlan& plan, std::span<const int64_t> parents);
  // The member's append has been committed. REQUIRES: Reserve; pages available.
  void AddNodes(const ForwardPlan& plan, ForwardMember& member,
                std::span<const GroupAppend> groups) noexcept;

  // ---- Commit and drop.
  // Nodes from `size` on go, and of the path what is deeper than those that stay.
  void DropNodes(int32_t index, int64_t size) noexcept;
  // Checks one leaf of a commit and reserves what CommitPath needs for it.
  Status PlanLeaf(const char* call, int64_t seq_id, int64_t leaf);
  // The nodes from a root to `leaf` become committed tokens; -1: none. The other nodes go.
  // REQUIRES: PlanLeaf.
  void CommitPath(int32_t index, int64_t leaf) noexcept;
  // Gives the memory of commits back.
  void Clear() noexcept;

 private:
  Status PlanMember(const char* call, int64_t seq_id, std::span<const int64_t> parents,
                    int64_t first_row, ForwardPlan& plan) const;

  PagedSequences& kv_;
  const BatchPlanner planner_;
  WindowBook& windows_;
  std::span<const int64_t> parents_;  // of the forward that begins [row]
  // Scratch of a commit, [level].
  std::vector<int32_t> path_;
  std::vector<AppendTarget> from_, to_;
  std::vector<uint8_t> opens_;
};

}  // namespace quire

#endif  // QUIRE_KV_CACHE_TREE_FORWARD_H_
