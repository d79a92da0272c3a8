#include "kv/pages/hidden_views.h"

#include <algorithm>

#include "base/check.h"
#include "kv/pages/reserve.h"

namespace quire {

// ---------------------------------------------------------------------- viewers

void HiddenViews::ReserveViews(size_t block_count, size_t sequence_count) {
  const size_t groups = static_cast<size_t>(tables_.group_count());
  const size_t nodes = 2 * std::max(block_count, sequence_count) * groups;
  begins_.Reserve(nodes);
  ends_.Reserve(nodes);
  may_free_.reserve(block_count);
  if (views_.size() < block_count * groups) views_.resize(block_count * groups);
  if (hidden_in_.size() < sequence_count) hidden_in_.resize(sequence_count, kNoBlock);
}

void HiddenViews::Track(size_t sequence_count) {
  ReserveViews(static_cast<size_t>(blocks_.capacity()), sequence_count);
  tracks_ = true;
}

// What a block's viewers hide, as its parent is concerned: all from `begin` on, or up to `end`.
HiddenPages HiddenViews::HiddenFromParent(BlockIndex child, HiddenPages hidden) const {
  const int64_t border = block(child).begin;
  if (hidden.begin >= border) return {};
  if (hidden.end >= border) hidden.end = INT64_MAX;
  return hidden;
}

HiddenPages HiddenViews::HiddenFromAll(BlockIndex index, int group) const {
  const Views& views = views_[tables_.SlotOf(index, group)];
  QUIRE_DCHECK(views.count <= block(index).refs) << "more viewers hide pages than there are";
  if (views.count == 0 || views.count < block(index).refs) return {};
  const HiddenPages hidden = {.begin = -begins_.key(views.begins), .end = ends_.key(views.ends)};
  return hidden.empty() ? HiddenPages{} : hidden;
}

// The viewer `node` of the block hides `hidden` from now on.
void HiddenViews::SetView(BlockIndex index, int group, int32_t node, HiddenPages hidden) noexcept {
  Views& views = views_[tables_.SlotOf(index, group)];
  if (begins_.Contains(node)) {
    QUIRE_DCHECK(ends_.Contains(node)) << "a viewer is in one of the heaps alone";
    QUIRE_DCHECK(views.count > 0);
    begins_.Remove(&views.begins, node);
    ends_.Remove(&views.ends, node);
    --views.count;
  }
  if (hidden.empty()) return;
  begins_.Insert(&views.begins, node, -hidden.begin);
  ends_.Insert(&views.ends, node, hidden.end);
  ++views.count;
}

// The viewers of the block, or what they hide, have changed.
void HiddenViews::Refresh(BlockIndex index, int group) noexcept {
  for (BlockIndex b = index; b != kNoBlock; b = block(b).parent) {
    ++blocks_visited_;
    HiddenPages& hidden = views_[tables_.SlotOf(b, group)].hidden;
    const HiddenPages now = HiddenFromAll(b, group);
    if (now == hidden) return;
    hidden = now;
    if (!now.empty()) MayFree(b);
    const BlockIndex parent = block(b).parent;
    if (parent == kNoBlock) return;
    const HiddenPages above = HiddenFromParent(b, now);
    if (above == HiddenBy(NodeOfBlock(b, group))) return;
    SetView(parent, group, NodeOfBlock(b, group), above);
  }
}

void HiddenViews::Set(int32_t sequence, BlockIndex last, int group, HiddenPages hidden) noexcept {
  QUIRE_DCHECK(tracks_);
  ++blocks_visited_;
  const int32_t node = NodeOfSequence(sequence, group);
  if (hidden.empty()) hidden = {};
  if (last == kNoBlock || hidden == HiddenBy(node)) return;
  BlockIndex& in = hidden_in_[static_cast<size_t>(sequence)];
  QUIRE_CHECK(in == kNoBlock || in == last) << "a sequence hides pages of block " << in;
  in = last;
  SetView(last, group, node, hidden);
  Refresh(last, group);
}

void HiddenViews::UnhideTracked(int32_t sequence) noexcept {
  BlockIndex& in = hidden_in_[static_cast<size_t>(sequence)];
  if (in == kNoBlock) return;
  for (int g = 0; g < tables_.group_count(); ++g) {
    SetView(in, g, NodeOfSequence(sequence, g), {});
    Refresh(in, g);
  }
  in = kNoBlock;
}

void HiddenViews::MoveTrackedUp(BlockIndex upper, BlockIndex lower) noexcept {
  const BlockIndex parent = block(upper).parent;
  for (int g = 0; g < tables_.group_count(); ++g) {
    const HiddenPages of_lower = views_[tables_.SlotOf(lower, g)].hidden;
    const HiddenPages above = HiddenBy(NodeOfBlock(lower, g));
    if (parent != kNoBlock) SetView(parent, g, NodeOfBlock(lower, g), {});
    SetView(upper, g, NodeOfBlock(lower, g), HiddenFromParent(lower, of_lower));
    views_[tables_.SlotOf(upper, g)].hidden = HiddenFromAll(upper, g);
    if (parent != kNoBlock) SetView(parent, g, NodeOfBlock(upper, g), above);
  }
  if (block(lower).may_free) MayFree(upper);
}

void HiddenViews::MoveTrackedDown(BlockIndex upper, BlockIndex lower) noexcept {
  const BlockIndex parent = block(lower).parent;
  for (int g = 0; g < tables_.group_count(); ++g) {
    const HiddenPages above = HiddenBy(NodeOfBlock(upper, g));
    SetView(upper, g, NodeOfBlock(lower, g), {});
    views_[tables_.SlotOf(upper, g)] = {};
    if (parent == kNoBlock) continue;
    SetView(parent, g, NodeOfBlock(upper, g), {});
    SetView(parent, g, NodeOfBlock(lower, g), above);
  }
  if (block(upper).may_free) MayFree(lower);
}

void HiddenViews::DropTracked(BlockIndex leaf) noexcept {
  const BlockIndex parent = block(leaf).parent;
  for (int g = 0; g < tables_.group_count(); ++g) {
    QUIRE_CHECK(views_[tables_.SlotOf(leaf, g)].count == 0) << "block " << leaf << " is seen";
    views_[tables_.SlotOf(leaf, g)] = {};
    if (parent == kNoBlock) continue;
    SetView(parent, g, NodeOfBlock(leaf, g), {});
    Refresh(parent, g);
  }
}

// ---------------------------------------------------------------------- freeing

void HiddenViews::MayFree(BlockIndex index) noexcept {
  Block& block = blocks_.at(index);
  QUIRE_DCHECK(block.may_free || may_free_.size() < may_free_.capacity()) << "no room was reserved";
  if (!block.may_free) may_free_.push_back(index);
  block.may_free = true;
}

void HiddenViews::FreeListed() noexcept {
  for (const BlockIndex index : may_free_) {
    blocks_.at(index).may_free = false;
    if (block(index).refs == 0) continue;
    QUIRE_DCHECK(tracks_);
    for (int g = 0; g < tables_.group_count(); ++g) FreePages(index, g);
  }
  may_free_.clear();
}

void HiddenViews::FreePages(BlockIndex index, int group) noexcept {
  ++blocks_visited_;
  const HiddenPages hidden = views_[tables_.SlotOf(index, group)].hidden;
  const int64_t begin = std::max(hidden.begin, block(index).begin);
  const int64_t end = std::min(hidden.end, block(index).end);
  if (begin >= end) return;
  HiddenPages& done = tables_.slice_at(index, group).done;
  if (done.empty() || end < done.begin || done.end < begin) {
    done = {begin, end};
    FreeEntries(index, group, done);
  } else {
    if (begin < done.begin) FreeEntries(index, group, {begin, done.begin});
    if (done.end < end) FreeEntries(index, group, {done.end, end});
    done = {std::min(begin, done.begin), std::max(end, done.end)};
  }
  blocks_visited_ += tables_.JoinFreed(index, group, block(index).child_count == 0);
}

// Those that begin in the block at positions of `hidden`.
void HiddenViews::FreeEntries(BlockIndex index, int group, HiddenPages hidden) noexcept {
  const BlockIndex parent = block(index).parent;
  const bool has_first = parent == kNoBlock || tables_.slice(parent, group).next != index;
  const std::span<const PageEntry> table = tables_.entries(index, group);
  size_t entry =
      table.front().start >= hidden.begin ? 0 : PageTables::FirstEntryFrom(table, hidden.begin);
  for (; entry < table.size() && table[entry].start < hidden.end; ++entry) {
    ++blocks_visited_;
    if (table[entry].page == kNoPage || (entry == 0 && !has_first)) continue;
    blocks_visited_ += tables_.FreePage(index, group, static_cast<int64_t>(entry));
    blocks_.CountPages(index, -1);
  }
}

// ---------------------------------------------------------------------- all of it

void HiddenViews::Clear() noexcept {
  tracks_ = false;
  FreeAll(views_);
  FreeAll(hidden_in_);
  begins_.Clear();
  ends_.Clear();
  FreeAll(may_free_);
}

int64_t HiddenViews::memory_bytes() const {
  return static_cast<int64_t>(views_.capacity() * sizeof(Views) +
                              hidden_in_.capacity() * sizeof(BlockIndex) +
                              may_free_.capacity() * sizeof(BlockIndex));
}

}  // namespace quire
