// HiddenViews: the pages of a block that windows hide from all of its viewers, and the freeing of
// such pages. Nothing is spent on it before Track.
//
// A viewer hides page ranges [begin, end), or nothing; what all viewers of a block hide is from the
// most begin to the least end, if all hide something. Both are at the top of a heap of the block's
// viewers. A change goes on upwards as long as it changes what the block hides from its parent:
// that counts only up to the parent's end, so that a window that slides in a leaf concerns no other
// block.
//
// A page belongs to the block in which its first token lies. Blocks further down that have it see
// it on behalf of sequences that are viewers of that block too: so it is free when that block's
// viewers hide it, and PageSlice::next leads to the others that have it.
//
// Invariants, once tracked:
// - A node is in both heaps of a block, or in none: that of a sequence that ends in the block and
//   hides something of it, or that of a child that hides something from the block. Views::count is
//   their number.
// - Views::hidden is what HiddenFromAll says, and a block's view of its parent is what
//   HiddenFromParent makes of it.
// - PageSlice::done is hidden from all viewers, or was; all its pages are freed. A block of which
//   more is hidden is in may_free.
#ifndef QUIRE_KV_PAGES_HIDDEN_VIEWS_H_
#define QUIRE_KV_PAGES_HIDDEN_VIEWS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kv/pages/block_table.h"
#include "kv/pages/node_heaps.h"
#include "kv/pages/page_tables.h"

namespace quire {

class HiddenViews {
 public:
  // Both must outlive it.
  HiddenViews(BlockTable& blocks, PageTables& tables) : blocks_(blocks), tables_(tables) {}

  bool tracks() const { return tracks_; }
  // Room for sequences of indices below `sequence_count`. May throw std::bad_alloc.
  void Track(size_t sequence_count);
  void ReserveSequences(size_t sequence_count) {
    if (tracks_) Track(sequence_count);
  }
  void ReserveBlocks(size_t block_count) {
    if (tracks_) ReserveViews(block_count, hidden_in_.size());
  }

  // The sequence, which ends in `last`, does not see the pages of `hidden`. O(blocks of its path).
  // REQUIRES: tracks().
  void Set(int32_t sequence, BlockIndex last, int group, HiddenPages hidden) noexcept;
  // It hides nothing: before its end moves to another block.
  void Unhide(int32_t sequence) noexcept {
    if (tracks_) UnhideTracked(sequence);
  }
  // Frees the pages that have come to be hidden from all that have them. O(freed pages) and the
  // blocks of which more is hidden than before. REQUIRES: no page table is in use.
  void Free() noexcept {
    if (!may_free_.empty()) FreeListed();
  }

  // What is hidden from all viewers of the block; positions behind it do not count.
  // REQUIRES: tracks(), also of the next one.
  HiddenPages HiddenFrom(BlockIndex index, int group) const {
    return views_[tables_.SlotOf(index, group)].hidden;
  }
  // What the sequence hides as a viewer; nothing between Unhide and Set.
  HiddenPages HiddenBySequence(int32_t sequence, int group) const {
    return HiddenBy(NodeOfSequence(sequence, group));
  }
  // Steps of all of this since the tree was made: blocks and page entries that were looked at.
  int64_t blocks_visited() const { return blocks_visited_; }

  // ---- For BlockTree. Nothing is done before Track.
  // The viewers of the block have changed.
  void Refresh(BlockIndex index) noexcept {
    if (!tracks_) return;
    for (int g = 0; g < tables_.group_count(); ++g) Refresh(index, g);
  }
  // `upper` has been split off from above `lower`, and is seen by it alone.
  void MoveUp(BlockIndex upper, BlockIndex lower) noexcept {
    if (tracks_) MoveTrackedUp(upper, lower);
  }
  // `lower` has taken the place of `upper`, which it alone has seen.
  void MoveDown(BlockIndex upper, BlockIndex lower) noexcept {
    if (tracks_) MoveTrackedDown(upper, lower);
  }
  // A leaf goes; before its reference passes to the parent.
  void Drop(BlockIndex leaf) noexcept {
    if (tracks_) DropTracked(leaf);
  }
  void Clear() noexcept;
  int64_t memory_bytes() const;

 private:
  // What the viewers of a block hide of a group's pages.
  struct Views {
    int32_t begins = NodeHeaps::kNone;  // heap of the viewers that hide something: the most begin
    int32_t ends = NodeHeaps::kNone;    // and the least end
    int32_t count = 0;
    HiddenPages hidden = {};  // from all viewers
  };
  // A viewer in the heaps.
  int32_t NodeOfBlock(BlockIndex index, int group) const {
    return static_cast<int32_t>(2 * tables_.SlotOf(index, group));
  }
  int32_t NodeOfSequence(int32_t sequence, int group) const {
    return static_cast<int32_t>(2 * tables_.SlotOf(sequence, group) + 1);
  }
  HiddenPages HiddenBy(int32_t node) const {
    if (!begins_.Contains(node)) return {};
    return {.begin = -begins_.key(node), .end = ends_.key(node)};
  }
  const Block& block(BlockIndex index) const { return blocks_.block(index); }
  // What the calls with these names do once there is something to do.
  void UnhideTracked(int32_t sequence) noexcept;
  void MoveTrackedUp(BlockIndex upper, BlockIndex lower) noexcept;
  void MoveTrackedDown(BlockIndex upper, BlockIndex lower) noexcept;
  void DropTracked(BlockIndex leaf) noexcept;
  void FreeListed() noexcept;

  void ReserveViews(size_t block_count, size_t sequence_count);
  HiddenPages HiddenFromParent(BlockIndex child, HiddenPages hidden) const;
  HiddenPages HiddenFromAll(BlockIndex index, int group) const;
  void SetView(BlockIndex index, int group, int32_t node, HiddenPages hidden) noexcept;
  void Refresh(BlockIndex index, int group) noexcept;
  void MayFree(BlockIndex index) noexcept;
  void FreePages(BlockIndex index, int group) noexcept;
  void FreeEntries(BlockIndex index, int group, HiddenPages hidden) noexcept;

  BlockTable& blocks_;
  PageTables& tables_;
  bool tracks_ = false;
  std::vector<Views> views_;           // [block][group]
  NodeHeaps begins_, ends_;            // keys: -begin and end of what a viewer hides
  std::vector<BlockIndex> hidden_in_;  // [sequence]: where it is a viewer in a heap
  std::vector<BlockIndex> may_free_;   // each block once (Block::may_free)
  int64_t blocks_visited_ = 0;
};

}  // namespace quire

#endif  // QUIRE_KV_PAGES_HIDDEN_VIEWS_H_
