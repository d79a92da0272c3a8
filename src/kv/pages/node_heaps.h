// NodeHeaps: many small heaps whose nodes are numbered and can be taken out anywhere.
//
// Leftist heaps (C. A. Crane, Stanford STAN-CS-72-259, 1972) with links to parents: the path to the
// right is never longer than log2 of the node count, so that every operation takes O(log n) steps
// in the worst case. No operation allocates.
#ifndef QUIRE_KV_PAGES_NODE_HEAPS_H_
#define QUIRE_KV_PAGES_NODE_HEAPS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/check.h"

namespace quire {

class NodeHeaps {
 public:
  static constexpr int32_t kNone = -1;

  // Room for the nodes [0, count). May throw std::bad_alloc; then nothing has changed.
  void Reserve(size_t count) {
    if (count > nodes_.size()) nodes_.resize(count);
  }
  // Empties all heaps.
  void Clear() noexcept;

  // Nodes that were looked at so far, for tests.
  int64_t steps() const { return steps_; }

  bool Contains(int32_t node) const { return At(node).rank > 0; }
  int64_t key(int32_t node) const {
    QUIRE_DCHECK(Contains(node));
    return At(node).key;
  }
  // `root`: the node of the least key, or kNone; it is updated. REQUIRES: the node is in no heap.
  void Insert(int32_t* root, int32_t node, int64_t key) noexcept;
  // REQUIRES: the node is in the heap of `root`.
  void Remove(int32_t* root, int32_t node) noexcept;

 private:
  struct Node {
    int64_t key = 0;
    int32_t parent = kNone;
    int32_t left = kNone;
    int32_t right = kNone;
    int32_t rank = 0;  // length of the path to the right; 0: in no heap
  };
  Node& At(int32_t node) {
    QUIRE_DCHECK(node >= 0 && node < std::ssize(nodes_)) << "node " << node << " was not reserved";
    return nodes_[static_cast<size_t>(node)];
  }
  const Node& At(int32_t node) const {
    QUIRE_DCHECK(node >= 0 && node < std::ssize(nodes_)) << "node " << node << " was not reserved";
    return nodes_[static_cast<size_t>(node)];
  }
  int32_t RankOf(int32_t node) const { return node == kNone ? 0 : At(node).rank; }
  bool FixRank(int32_t node) noexcept;
  int32_t Meld(int32_t a, int32_t b) noexcept;

  std::vector<Node> nodes_;
  int64_t steps_ = 0;
};

}  // namespace quire

#endif  // QUIRE_KV_PAGES_NODE_HEAPS_H_
