// What a commit of token trees behind TVM's names knows of them: which nodes came in which forward.
#ifndef QUIRE_FFI_TVM_TVM_TREES_H_
#define QUIRE_FFI_TVM_TVM_TREES_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "ffi/errors.h"

namespace quire::ffi {

class TvmTrees {
 public:
  struct Tree {
    std::vector<int64_t> parents;  // [node]
    std::vector<int64_t> rounds;   // first node of each forward
  };
  // The trees of a batch as they are with a forward's nodes.
  using Round = std::map<int64_t, Tree>;

  // May throw std::bad_alloc; whether the batch is a good one is for the cache to say.
  Round Plan(std::span<const int64_t> ids, std::span<const int64_t> lengths,
             std::span<const int64_t> parents) const {
    Round round;
    for (size_t i = 0; i < std::min(ids.size(), lengths.size()); ++i) {
      const auto found = trees_.find(ids[i]);
      Tree& tree = round[ids[i]];
      if (found != trees_.end()) tree = found->second;
      const size_t count =
          std::min(static_cast<size_t>(std::max<int64_t>(lengths[i], 0)), parents.size());
      tree.rounds.push_back(static_cast<int64_t>(tree.parents.size()));
      tree.parents.insert(tree.parents.end(), parents.begin(),
                          parents.begin() + static_cast<std::ptrdiff_t>(count));
      parents = parents.subspan(count);
    }
    return round;
  }
  void Add(Round round) noexcept {
    for (const auto& [id, tree] : round) trees_.erase(id);
    trees_.merge(round);
  }
  // Only the first `size` nodes are left.
  void Drop(int64_t id, int64_t size) noexcept {
    const auto found = trees_.find(id);
    if (found == trees_.end()) return;
    Tree& tree = found->second;
    tree.parents.resize(static_cast<size_t>(size));
    while (!tree.rounds.empty() && tree.rounds.back() >= size) tree.rounds.pop_back();
    if (size == 0) trees_.erase(found);
  }
  void Clear() noexcept { trees_.clear(); }
  bool empty() const { return trees_.empty(); }

  // tvm_tree_commit: to accept nothing (leaf -1) takes back what the last forward gave, and what
  // those before it gave stays. So TVM counts, and it is a sequence of tokens where those nodes
  // follow one another. Their last one; -1 if there is none.
  int64_t KeptLeaf(int64_t id) const {
    const auto found = trees_.find(id);
    if (found == trees_.end()) return -1;
    const Tree& tree = found->second;
    const int64_t kept = tree.rounds.back();
    for (int64_t node = 0; node < kept; ++node) {
      if (tree.parents[static_cast<size_t>(node)] != node - 1) return -1;
    }
    return kept - 1;
  }

  // tvm_tree_lengths: the nodes that TVM keeps, in the order in which they become tokens. These are
  // all nodes of the forwards before the last one and, of the last one, those whose number within
  // it is that of a node on the leaf's path. Empty for an id without a tree and for a leaf that is
  // no node, which the cache refuses. BadArgument where TVM reads behind the last forward.
  std::vector<int64_t> KeptByTvm(int64_t id, int64_t leaf) const {
    const auto found = trees_.find(id);
    if (found == trees_.end()) return {};
    const Tree& tree = found->second;
    const int64_t size = std::ssize(tree.parents);
    if (leaf < -1 || leaf >= size) return {};
    std::vector<int64_t> kept;
    const int64_t first = tree.rounds.back();
    for (int64_t node = leaf; node >= 0; node = tree.parents[static_cast<size_t>(node)])
      kept.push_back(first + node);
    if (!kept.empty() && kept.front() >= size) {
      ThrowBadArgument("attention_kv_cache_commit_accepted_token_tree_nodes: leaf " +
                       std::to_string(leaf) + " of sequence " + std::to_string(id) +
                       " is not among the " + std::to_string(size - first) +
                       " nodes of the last forward, where tvm_tree_lengths looks for it; install "
                       "without that option");
    }
    for (int64_t node = first; node-- > 0;) kept.push_back(node);
    std::ranges::reverse(kept);
    return kept;
  }
  // Whether the nodes are a path from a root, each the parent of the next.
  bool IsPath(int64_t id, std::span<const int64_t> nodes) const {
    int64_t parent = -1;
    for (const int64_t node : nodes) {
      if (trees_.at(id).parents[static_cast<size_t>(node)] != parent) return false;
      parent = node;
    }
    return true;
  }

 private:
  Round trees_;
};

}  // namespace quire::ffi

#endif  // QUIRE_FFI_TVM_TVM_TREES_H_
