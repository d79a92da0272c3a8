// Uncommitted token trees: the nodes of a sequence that no commit has accepted or dropped yet.
//
// A tree has pages of its own, one slot per node in the order of nodes, beside the sequence's path
// of blocks. The path reaches as many positions behind the committed tokens as the tree has levels:
// slots without bytes, which nobody else gets meanwhile. So a commit finds the slots of the deepest
// path where an append would have put them, copies the accepted nodes' bytes there and takes
// nothing that it could fail to get.
#ifndef QUIRE_KV_PAGES_TOKEN_TREE_H_
#define QUIRE_KV_PAGES_TOKEN_TREE_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/check.h"
#include "kernels/backend.h"
#include "kv/pages/block_tree.h"
#include "quire/status.h"

namespace quire {

struct TokenTree {
  std::vector<int32_t> parents;  // [node]; -1: a root
  std::vector<int32_t> depths;   // [node]
  int64_t levels = 0;            // the largest depth + 1
  struct Group {
    std::vector<int32_t> pages;  // node n lies in pages[n / page_size]
    // The path's slot at the first level is the first of its tile to get a token.
    bool opens_tile = false;
  };
  std::vector<Group> groups;

  int64_t size() const { return static_cast<int64_t>(parents.size()); }
  AppendTarget SlotOf(const PagePool& pool, int group, int64_t node) const {
    QUIRE_DCHECK(node >= 0 && node < size());
    const std::vector<int32_t>& pages = groups[static_cast<size_t>(group)].pages;
    return {.page = pages[static_cast<size_t>(node / pool.page_size())],
            .slot = static_cast<int32_t>(pool.Slot(node))};
  }
};

// Adds to `depths` those of new nodes with these parents behind the old ones. BadArgument if a
// parent is none of -1 and the nodes before its child; `call` and `seq_id` are for the message. May
// throw std::bad_alloc.
Status AddDepths(const char* call, int64_t seq_id, std::span<const int32_t> old_depths,
                 std::span<const int64_t> parents, std::vector<int32_t>& depths);

// Nodes of the path that ends in `leaf`, from the root on. `path` has room for them.
void FillPath(std::span<const int32_t> parents, int64_t leaf, std::vector<int32_t>& path) noexcept;

// The trees of all sequences, by their index in the sequence table.
class TokenTrees {
 public:
  // Null if the sequence has none.
  const TokenTree* Find(int32_t sequence) const {
    const size_t i = static_cast<size_t>(sequence);
    return i < trees_.size() && trees_[i].size() > 0 ? &trees_[i] : nullptr;
  }
  int64_t SizeOf(int32_t sequence) const {
    const TokenTree* const tree = Find(sequence);
    return tree == nullptr ? 0 : tree->size();
  }
  // The nodes of all trees.
  int64_t node_count() const { return node_count_; }
  int64_t level_count() const { return level_count_; }
  int64_t page_count() const { return page_count_; }

  // Pages that `count` more nodes take in a group.
  static int64_t PagesFor(const PagePool& pool, int64_t size, int64_t count) {
    QUIRE_DCHECK(size >= 0 && count >= 0);
    return pool.RangeCount(0, size + count) - pool.RangeCount(0, size);
  }
  // Memory for AddNodes of `count` nodes. Moves no tree but when the table grows. May throw
  // std::bad_alloc.
  void Reserve(const BlockTree& tree, int32_t sequence, int64_t count);
  // REQUIRES: Reserve; pages available.
  void AddNodes(BlockTree& tree, int32_t sequence, std::span<const int64_t> parents,
                std::span<const int32_t> depths) noexcept;
  void SetOpensTile(int32_t sequence, int group, bool opens) noexcept {
    QUIRE_DCHECK(Find(sequence) != nullptr) << "entry " << sequence << " has no tree";
    trees_[static_cast<size_t>(sequence)].groups[static_cast<size_t>(group)].opens_tile = opens;
  }
  // Drops the nodes from `size` on, and their pages. Returns the levels that are left.
  int64_t DropNodes(BlockTree& tree, int32_t sequence, int64_t size) noexcept;
  // Forgets all trees; their pages are free already.
  void Clear() noexcept;

  // All entries, those without a tree included. [sequence]
  const std::vector<TokenTree>& entries() const { return trees_; }

 private:
  std::vector<TokenTree> trees_;
  int64_t node_count_ = 0;
  int64_t level_count_ = 0;
  int64_t page_count_ = 0;
};

}  // namespace quire

#endif  // QUIRE_KV_PAGES_TOKEN_TREE_H_
