#include "kv/pages/block_table.h"

#include "kv/pages/reserve.h"

namespace quire {

void BlockTable::Grow(size_t size) noexcept {
  QUIRE_DCHECK(size <= blocks_.capacity() && size <= free_.capacity()) << "no room was reserved";
  const size_t old_size = blocks_.size();
  blocks_.resize(size);
  for (size_t i = size; i-- > old_size;) free_.push_back(static_cast<BlockIndex>(i));
}

BlockIndex BlockTable::AddAbove(BlockIndex index, int64_t position) noexcept {
  const BlockIndex upper = Take();
  Block& low = at(index);
  Block& up = at(upper);
  QUIRE_DCHECK(low.begin < position);
  QUIRE_DCHECK(position < low.end);
  up.parent = low.parent;
  up.refs = 1;
  up.child_count = 1;
  up.child_xor = index;
  up.active_refs = low.is_active();
  up.many_children = low.is_seen_by_many();
  up.begin = low.begin;
  up.end = position;
  if (up.parent != kNoBlock) at(up.parent).child_xor ^= index ^ upper;
  low.parent = upper;
  low.begin = position;
  return upper;
}

void BlockTable::FreeLeaf(BlockIndex index) noexcept {
  Block& leaf = at(index);
  QUIRE_DCHECK(leaf.refs == 1);
  QUIRE_DCHECK(leaf.child_count == 0);
  if (leaf.parent != kNoBlock) {
    QUIRE_DCHECK(at(leaf.parent).child_count > 0);
    --at(leaf.parent).child_count;
    at(leaf.parent).child_xor ^= index;
  }
  leaf.refs = 0;
  free_.push_back(index);
}

void BlockTable::JoinToChild(BlockIndex index, BlockIndex child) noexcept {
  Block& upper = at(index);
  QUIRE_DCHECK(upper.refs == 1);
  QUIRE_DCHECK(block(child).parent == index);
  QUIRE_DCHECK(upper.end == block(child).begin);
  at(child).begin = upper.begin;
  at(child).parent = upper.parent;
  if (upper.parent != kNoBlock) at(upper.parent).child_xor ^= index ^ child;
  upper.refs = 0;
  free_.push_back(index);
}

void BlockTable::ChangeViewers(BlockIndex index, ViewerChange change) noexcept {
  for (BlockIndex b = index; b != kNoBlock; b = block(b).parent) {
    Block& changed = at(b);
    const bool was_active = changed.is_active();
    const bool was_many = changed.is_seen_by_many();
    int64_t* const old_kind = KindOf(changed);
    changed.refs += change.refs;
    changed.active_refs += change.active;
    changed.many_children += change.many;
    changed.twins += change.twins;
    QUIRE_DCHECK(changed.refs >= 0 && changed.twins >= 0);
    QUIRE_DCHECK(changed.active_refs >= 0 && changed.active_refs <= changed.refs);
    QUIRE_DCHECK(changed.many_children >= 0 && changed.many_children <= changed.child_count);
    int64_t* const kind = KindOf(changed);
    if (kind != old_kind) {
      const int64_t pages = PagesThatBeginIn(b);
      if (old_kind != nullptr) *old_kind -= pages;
      QUIRE_DCHECK(old_kind == nullptr || *old_kind >= 0) << "pages of a kind are miscounted";
      if (kind != nullptr) *kind += pages;
    }
    change = {.active = changed.is_active() - was_active,
              .many = changed.is_seen_by_many() - was_many};
    if (change.active == 0 && change.many == 0) return;
  }
}

int64_t BlockTable::PagesThatBeginIn(BlockIndex index) const {
  int64_t count = 0;
  const BlockIndex parent = block(index).parent;
  for (int g = 0; g < tables_.group_count(); ++g) {
    count += tables_.slice(index, g).count - tables_.FreedCount(index, g);
    count -= parent != kNoBlock && tables_.slice(parent, g).next == index;
  }
  return count;
}

void BlockTable::Clear() noexcept {
  FreeAll(blocks_);
  FreeAll(free_);
  kinds_ = {};
}

int64_t BlockTable::memory_bytes() const {
  return static_cast<int64_t>(blocks_.capacity() * sizeof(Block) +
                              free_.capacity() * sizeof(BlockIndex));
}

}  // namespace quire
