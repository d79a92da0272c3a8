// BlockTable: the blocks of a tree (block_tree.h): their parents, children and ranges, and what
// sees them. A reference on a block is a viewer: a child, on behalf of those that see the child, or
// a sequence that ends there.
//
// Invariants:
// - A free block has no references and is on the stack of free ones; every other block has some.
// - Block::child_count and child_xor are those of the blocks whose parent it is.
// - Block::active_refs, many_children and twins agree with what the block's viewers say of
//   themselves, and `kinds` with the pages that begin in blocks: ChangeViewers carries a change
//   upwards as far as it changes anything.
#ifndef QUIRE_KV_PAGES_BLOCK_TABLE_H_
#define QUIRE_KV_PAGES_BLOCK_TABLE_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/check.h"
#include "kv/pages/page_tables.h"

namespace quire {

// A line of the processor's cache, as planning meets blocks in any order.
struct alignas(64) Block {
  BlockIndex parent = kNoBlock;
  int32_t refs = 0;  // 0: the block is free
  int32_t child_count = 0;
  BlockIndex child_xor = 0;  // exclusive or of the children: of an only child, its index
  int64_t begin = 0;
  int64_t end = 0;
  mutable uint64_t claim = 0;  // number of the planning in which a sequence of this shared block
                               // was given the slot at its end
  int32_t active_refs = 0;     // references through which a sequence sees it that is not retained
  int32_t many_children = 0;   // children that are seen by two or more sequences
  int32_t twins = 0;  // references of sequences that have another one here: of members that copy
  bool merge_deferred = false;
  bool may_free = false;  // is among those that the next FreeHidden looks at

  bool is_active() const { return active_refs > 0; }
  bool is_seen_by_many() const { return refs - twins >= 2 || many_children > 0; }
};

// Pages by what sees them; those that one sequence sees which is not retained are the rest.
struct PageKinds {
  int64_t shared = 0;         // by two or more, not all of which are retained
  int64_t retained_only = 0;  // by retained sequences alone
  bool operator==(const PageKinds&) const = default;
};

class BlockTable {
 public:
  // Must outlive it.
  explicit BlockTable(const PageTables& tables) : tables_(tables) {}

  const Block& block(BlockIndex index) const { return blocks_[static_cast<size_t>(index)]; }
  Block& at(BlockIndex index) { return blocks_[static_cast<size_t>(index)]; }
  int64_t capacity() const { return static_cast<int64_t>(blocks_.size()); }
  int64_t count() const { return capacity() - static_cast<int64_t>(free_.size()); }
  // The next blocks that Take returns are at the end.
  std::span<const BlockIndex> free_blocks() const { return free_; }

  // Room for `size` blocks; Grow makes them. May throw std::bad_alloc.
  void Reserve(size_t size) {
    blocks_.reserve(size);
    free_.reserve(size);
  }
  void Grow(size_t size) noexcept;

  BlockIndex Take() noexcept {
    QUIRE_CHECK(!free_.empty()) << "a block is taken that was not reserved";
    const BlockIndex index = free_.back();
    free_.pop_back();
    Block& block = at(index);
    QUIRE_DCHECK(block.refs == 0) << "block " << index << " is in use";
    // A freed block stays in lists of blocks to merge and to free pages of until these are run.
    block = {.merge_deferred = block.merge_deferred, .may_free = block.may_free};
    return index;
  }
  // A new block with one reference, for a sequence. Its parent's count is that of one child more
  // and is not raised: the reference comes from the caller.
  BlockIndex Add(BlockIndex parent, int64_t begin, int64_t end) noexcept {
    const BlockIndex index = Take();
    Block& block = at(index);
    block.parent = parent;
    block.refs = 1;
    block.begin = begin;
    block.end = end;
    if (parent != kNoBlock) {
      ++at(parent).child_count;
      at(parent).child_xor ^= index;
    }
    return index;
  }
  // A new block above `index`, with the range up to `position` and the viewers of that one; it is
  // seen by `index` alone. REQUIRES: begin < position < end.
  BlockIndex AddAbove(BlockIndex index, int64_t position) noexcept;
  // Takes a leaf away; its reference passes to the parent.
  void FreeLeaf(BlockIndex index) noexcept;
  // `child`, the only viewer of `index`, takes its place and its range.
  void JoinToChild(BlockIndex index, BlockIndex child) noexcept;

  // Differences of the numbers in a Block.
  struct ViewerChange {
    int32_t refs = 0;
    int32_t active = 0;
    int32_t many = 0;
    int32_t twins = 0;
  };
  void ChangeViewers(BlockIndex index, ViewerChange change) noexcept;
  // `more` pages begin in the block.
  void CountPages(BlockIndex index, int64_t more) noexcept {
    int64_t* const kind = KindOf(block(index));
    if (kind != nullptr) *kind += more;
  }
  // The block goes, and with it the pages that begin in it.
  void UncountPages(BlockIndex index) noexcept {
    int64_t* const kind = KindOf(block(index));
    if (kind == nullptr) return;
    *kind -= PagesThatBeginIn(index);
    QUIRE_DCHECK(*kind >= 0) << "pages of a kind are miscounted";
  }
  // Pages of all groups whose first token lies in the block: they are of its kind.
  int64_t PagesThatBeginIn(BlockIndex index) const;
  const PageKinds& kinds() const { return kinds_; }

  void Clear() noexcept;
  int64_t memory_bytes() const;

 private:
  // The count of which pages of the block are part, or null.
  int64_t* KindOf(const Block& block) {
    if (block.refs == 0) return nullptr;
    if (!block.is_active()) return &kinds_.retained_only;
    return block.is_seen_by_many() ? &kinds_.shared : nullptr;
  }

  const PageTables& tables_;
  std::vector<Block> blocks_;
  std::vector<BlockIndex> free_;  // a stack; capacity blocks_.size()
  PageKinds kinds_;
};

}  // namespace quire

#endif  // QUIRE_KV_PAGES_BLOCK_TABLE_H_
