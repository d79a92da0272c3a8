// What windows hide, for BlockTree: which pages of a block none of its viewers sees.
//
// A viewer hides page ranges [begin, end), or nothing; what all viewers of a block hide is from the
// most begin to the least end, if all hide something. Both are at the top of a heap of the block's
// viewers. A change goes on upwards as long as it changes what the block hides from its parent:
// that counts only up to the parent's end, so that a window that slides in a leaf concerns no other
// block.
//
// A page belongs to the block in which its first token lies. Who has it further down sees it on
// behalf of sequences that are viewers of that block too: so it is free when that block's viewers
// hide it, and PageSlice::next leads to the others who have it.
#include <algorithm>

#include "base/check.h"
#include "kv/pages/block_tree.h"

namespace quire {
namespace {

// Entries without a page that a slice may have beyond as many as it has of others.
constexpr int64_t kFreedEntriesMax = 4;

}  // namespace

// ---------------------------------------------------------------------- viewers

void BlockTree::ReserveViews(size_t block_count, size_t sequence_count) {
  const size_t groups = pools_.size();
  const size_t nodes = 2 * std::max(block_count, sequence_count) * groups;
  begins_.Reserve(nodes);
  ends_.Reserve(nodes);
  may_free_.reserve(block_count);
  if (views_.size() < block_count * groups) views_.resize(block_count * groups);
  if (hidden_in_.size() < sequence_count) hidden_in_.resize(sequence_count, kNoBlock);
}

void BlockTree::TrackHidden(size_t sequence_count) {
  ReserveViews(blocks_.size(), sequence_count);
  tracks_hidden_ = true;
}

// What a block's viewers hide, as its parent is concerned: all from `begin` on, or up to `end`.
HiddenPages BlockTree::HiddenFromParent(BlockIndex child, HiddenPages hidden) const {
  const int64_t border = block(child).begin;
  if (hidden.begin >= border) return {};
  if (hidden.end >= border) hidden.end = INT64_MAX;
  return hidden;
}

HiddenPages BlockTree::HiddenFromAll(BlockIndex index, int group) const {
  const Views& views = views_[SlotOf(index, group)];
  if (views.count == 0 || views.count < block(index).refs) return {};
  const HiddenPages hidden = {.begin = -begins_.key(views.begins), .end = ends_.key(views.ends)};
  return hidden.empty() ? HiddenPages{} : hidden;
}

// The viewer `node` of the block hides `hidden` from now on.
void BlockTree::SetView(BlockIndex index, int group, int32_t node, HiddenPages hidden) noexcept {
  Views& views = views_[SlotOf(index, group)];
  if (begins_.Contains(node)) {
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
void BlockTree::RefreshHidden(BlockIndex index, int group) noexcept {
  for (BlockIndex b = index; b != kNoBlock; b = block(b).parent) {
    ++blocks_visited_;
    HiddenPages& hidden = views_[SlotOf(b, group)].hidden;
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

void BlockTree::SetHidden(int32_t sequence, BlockIndex last, int group,
                          HiddenPages hidden) noexcept {
  ++blocks_visited_;
  const int32_t node = NodeOfSequence(sequence, group);
  if (hidden.empty()) hidden = {};
  if (last == kNoBlock || hidden == HiddenBy(node)) return;
  BlockIndex& in = hidden_in_[static_cast<size_t>(sequence)];
  QUIRE_CHECK(in == kNoBlock || in == last) << "a sequence hides pages of block " << in;
  in = last;
  SetView(last, group, node, hidden);
  RefreshHidden(last, group);
}

void BlockTree::Unhide(int32_t sequence) noexcept {
  if (!tracks_hidden_) return;
  BlockIndex& in = hidden_in_[static_cast<size_t>(sequence)];
  if (in == kNoBlock) return;
  for (int g = 0; g < group_count_; ++g) {
    SetView(in, g, NodeOfSequence(sequence, g), {});
    RefreshHidden(in, g);
  }
  in = kNoBlock;
}

// `upper` has been split off from above `lower`, and is seen by it alone.
void BlockTree::MoveViewsUp(BlockIndex upper, BlockIndex lower) noexcept {
  const BlockIndex parent = block(upper).parent;
  for (int g = 0; g < group_count_; ++g) {
    const HiddenPages of_lower = views_[SlotOf(lower, g)].hidden;
    const HiddenPages above = HiddenBy(NodeOfBlock(lower, g));
    if (parent != kNoBlock) SetView(parent, g, NodeOfBlock(lower, g), {});
    SetView(upper, g, NodeOfBlock(lower, g), HiddenFromParent(lower, of_lower));
    views_[SlotOf(upper, g)].hidden = HiddenFromAll(upper, g);
    if (parent != kNoBlock) SetView(parent, g, NodeOfBlock(upper, g), above);
  }
  if (block(lower).may_free) MayFree(upper);
}

// `lower` has taken the place of `upper`, which it alone has seen.
void BlockTree::MoveViewsDown(BlockIndex upper, BlockIndex lower) noexcept {
  const BlockIndex parent = block(lower).parent;
  for (int g = 0; g < group_count_; ++g) {
    const HiddenPages above = HiddenBy(NodeOfBlock(upper, g));
    SetView(upper, g, NodeOfBlock(lower, g), {});
    views_[SlotOf(upper, g)] = {};
    if (parent == kNoBlock) continue;
    SetView(parent, g, NodeOfBlock(upper, g), {});
    SetView(parent, g, NodeOfBlock(lower, g), above);
  }
  if (block(upper).may_free) MayFree(lower);
}

// Before its reference passes to the parent.
void BlockTree::DropViews(BlockIndex leaf) noexcept {
  const BlockIndex parent = block(leaf).parent;
  for (int g = 0; g < group_count_; ++g) {
    QUIRE_CHECK(views_[SlotOf(leaf, g)].count == 0) << "block " << leaf << " is seen";
    views_[SlotOf(leaf, g)] = {};
    if (parent == kNoBlock) continue;
    SetView(parent, g, NodeOfBlock(leaf, g), {});
    RefreshHidden(parent, g);
  }
}

// ---------------------------------------------------------------------- freeing

void BlockTree::MayFree(BlockIndex index) noexcept {
  if (!at(index).may_free) may_free_.push_back(index);
  at(index).may_free = true;
}

void BlockTree::FreeHidden() noexcept {
  for (const BlockIndex index : may_free_) {
    at(index).may_free = false;
    if (block(index).refs == 0) continue;
    for (int g = 0; g < group_count_; ++g) FreeHidden(index, g);
  }
  may_free_.clear();
}

void BlockTree::FreeHidden(BlockIndex index, int group) noexcept {
  ++blocks_visited_;
  const HiddenPages hidden = views_[SlotOf(index, group)].hidden;
  const int64_t begin = std::max(hidden.begin, block(index).begin);
  const int64_t end = std::min(hidden.end, block(index).end);
  if (begin >= end) return;
  HiddenPages& done = slice_at(index, group).done;
  if (done.empty() || end < done.begin || done.end < begin) {
    done = {begin, end};
    FreeEntries(index, group, done);
  } else {
    if (begin < done.begin) FreeEntries(index, group, {begin, done.begin});
    if (done.end < end) FreeEntries(index, group, {done.end, end});
    done = {std::min(begin, done.begin), std::max(end, done.end)};
  }
  JoinFreedEntries(index, group);
}

// Those that begin in the block at positions of `hidden`.
void BlockTree::FreeEntries(BlockIndex index, int group, HiddenPages hidden) noexcept {
  const BlockIndex parent = block(index).parent;
  const bool has_first = parent == kNoBlock || slice(parent, group).next != index;
  const std::span<const PageEntry> table = entries(index, group);
  size_t entry = table.front().start >= hidden.begin ? 0 : FirstEntryFrom(table, hidden.begin);
  for (; entry < table.size() && table[entry].start < hidden.end; ++entry) {
    ++blocks_visited_;
    if (table[entry].page == kNoPage || (entry == 0 && !has_first)) continue;
    FreeEntry(index, group, static_cast<int64_t>(entry));
  }
}

void BlockTree::FreeEntry(BlockIndex index, int group, int64_t entry) noexcept {
  PageSlice* s = &slice_at(index, group);
  PageEntry* table = array_at(s->array).entries.data() + s->first;
  const int32_t page = table[entry].page;
  table[entry].page = kNoPage;
  s->freed += entry > 0;
  any_freed_[static_cast<size_t>(group)] = 1;
  // The others have it in their first entries.
  bool is_last = entry == s->count - 1;
  while (is_last) {
    s->tail = kNoPage;
    const BlockIndex next = s->next;
    s->next = kNoBlock;
    if (next == kNoBlock) break;
    ++blocks_visited_;
    s = &slice_at(next, group);
    array_at(s->array).entries[static_cast<size_t>(s->first)].page = kNoPage;
    is_last = s->count == 1;
  }
  while (pool(group).holds(page) > 0) pool(group).Release(page);
  CountPages(index, -1);
}

// Not before there are more of them than of others: so the time for it is in the order of the pages
// that were freed. And only where no other slice lies behind in the array.
void BlockTree::JoinFreedEntries(BlockIndex index, int group) noexcept {
  PageSlice& s = slice_at(index, group);
  if (s.freed <= kFreedEntriesMax + s.count - s.freed) return;
  PageArray& array = array_at(s.array);
  if (array.refs > 1 && block(index).child_count > 0) return;
  ++version_;  // a plan must not go on with these entries
  std::vector<PageEntry>& table = array.entries;
  const size_t first = static_cast<size_t>(s.first);
  const size_t end = first + static_cast<size_t>(s.count);
  size_t kept = first;
  for (size_t i = first + 1; i < end; ++i) {
    ++blocks_visited_;
    if (table[i].page == kNoPage && table[kept].page == kNoPage) continue;
    table[++kept] = table[i];
  }
  table.resize(kept + 1);
  s.count = static_cast<int64_t>(kept + 1 - first);
  s.has_holes = true;
  RecountFreed(s, group);
}

}  // namespace quire
