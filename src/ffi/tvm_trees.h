// What a commit of token trees behind TVM's names knows of them: which nodes came in which forward.
#ifndef QUIRE_FFI_TVM_TREES_H_
#define QUIRE_FFI_TVM_TREES_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <vector>

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

 private:
  Round trees_;
};

}  // namespace quire::ffi

#endif  // QUIRE_FFI_TVM_TREES_H_
