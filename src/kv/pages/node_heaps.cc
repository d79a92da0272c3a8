#include "kv/pages/node_heaps.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "kv/pages/reserve.h"

namespace quire {

void NodeHeaps::Clear() noexcept { FreeAll(nodes_); }

// Puts the child of the higher rank to the left. Returns whether the node's rank has changed.
bool NodeHeaps::FixRank(int32_t node) noexcept {
  ++steps_;
  Node& n = At(node);
  if (RankOf(n.left) < RankOf(n.right)) std::swap(n.left, n.right);
  const int32_t rank = RankOf(n.right) + 1;
  return std::exchange(n.rank, rank) != rank;
}

// The heap of both; its root's parent is left to the caller.
int32_t NodeHeaps::Meld(int32_t a, int32_t b) noexcept {
  if (a == kNone) return b;
  if (b == kNone) return a;
  if (At(b).key < At(a).key) std::swap(a, b);
  const int32_t root = a;
  while (b != kNone) {  // b goes into the right subtree of a
    const int32_t right = At(a).right;
    if (right == kNone || At(b).key < At(right).key) {
      At(a).right = b;
      At(b).parent = a;
      a = b;
      b = right;
    } else {
      a = right;
    }
  }
  for (; a != root; a = At(a).parent) FixRank(a);
  FixRank(root);
  return root;
}

void NodeHeaps::Insert(int32_t* root, int32_t node, int64_t key) noexcept {
  QUIRE_DCHECK(!Contains(node)) << "node " << node << " is in a heap";
  At(node) = {.key = key, .rank = 1};
  *root = Meld(*root, node);
  At(*root).parent = kNone;
  QUIRE_DCHECK(At(*root).key <= key);
}

void NodeHeaps::Remove(int32_t* root, int32_t node) noexcept {
  QUIRE_DCHECK(Contains(node)) << "node " << node << " is in no heap";
  QUIRE_DCHECK((At(node).parent == kNone) == (*root == node)) << "it is in another heap";
  const Node removed = At(node);
  At(node) = {};
  const int32_t rest = Meld(removed.left, removed.right);
  if (rest != kNone) At(rest).parent = removed.parent;
  if (removed.parent == kNone) {
    *root = rest;
    return;
  }
  Node& parent = At(removed.parent);
  QUIRE_DCHECK(parent.left == node || parent.right == node);
  (parent.left == node ? parent.left : parent.right) = rest;
  int32_t above = removed.parent;
  while (above != kNone && FixRank(above)) above = At(above).parent;
}

}  // namespace quire
