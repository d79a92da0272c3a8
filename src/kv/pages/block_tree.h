// BlockTree: which tokens share which pages. Every sequence is a path from a root to the block in
// which it ends.
//
// A block is a range of token positions [begin, end), never empty. Along a path the ranges are
// adjacent and start at 0. A block counts its references: its children plus the sequences that end
// in it (of a forward that copied part of a path, also the end of the old path, until the forward
// ends). Only a block with one reference is ever shortened or extended, so nobody's tokens change
// but those of the sequence that asked.
//
// Every group of layers has a page pool of its own; per group a block has a slice (array, first,
// count) of a page array: a table of entries (start, page), ascending, each inside one page-sized
// range of positions. Entries never change, they are only added behind and dropped from behind; the
// block's range clips what its entries say. Slices of one array belong to consecutive blocks of one
// path and follow one another in it, two neighbours sharing at most the entry at their border. So a
// leaf may cut its array behind its own slice: only descendants could use what lies there.
//
// Pages. Position p lies in slot p mod page_size, always. A page is held once per slice with an
// entry of it; its holders are consecutive blocks of one path and their slots are contiguous; its
// fill is where the deepest of them ends. That gives the one rule of writing:
//
//   a sequence that ends in page p at slot s appends in place iff fill(p) == s; else its next token
//   opens a new page at the same slot.
//
// No slot that another holder can see is ever written, and nobody needs to own the right to write:
// of sequences that end at the same fill, the first to append takes the slot, and the fill then
// tells the others. When a leaf goes or shrinks, the fill falls to where the remaining tokens end.
//
// Forks and pops take no pages and copy nothing: they move references, and split at most one block.
// Many forks at many positions could leave one range of a path in many pages; an append that would
// make them more than kPagesPerRangeMax cuts the path instead: the sequence's tokens from the start
// of that range on are copied to pages of their own. With several groups all of them are cut at the
// same position.
//
// Viewers. What has a reference on a block sees it: a child, on behalf of those that see the child,
// or a sequence that ends there. Two things are kept up to date from the viewers upwards, as
// far as they change: whether a block is seen by more than one sequence and by one that is not
// retained, which gives the page counts; and, once windows are in use, which pages all viewers of a
// block hide (block_tree_hidden.cc).
//
// Freed pages. A page range that is hidden from every sequence (windows) loses its page, and its
// entries stay with kNoPage in place of it: an entry that nobody may look at, which is neither held
// nor filled. All entries of a page are freed together. What is imported may leave out positions
// that windows hide; these get such entries from the beginning, and they end where the range ends
// that was left out, not where a page does. When a table has more of them than of others, those
// that follow one another become one, a hole behind the sinks: so the table of an endless sequence
// is as long as what it sees.
//
// A block with one child and no sequence of its own is merged with the child, so that a path has no
// more blocks than there are branches on it. While a forward is open merges wait, because the plan
// points into page arrays.
//
// Calls are planned, then committed: Reserve may throw std::bad_alloc and changes nothing that can
// be observed; the commits are noexcept and allocate nothing (a merge tries to, and is left out if
// it cannot).
#ifndef QUIRE_KV_PAGES_BLOCK_TREE_H_
#define QUIRE_KV_PAGES_BLOCK_TREE_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "base/check.h"
#include "kv/pages/block_table.h"
#include "kv/pages/hidden_views.h"
#include "kv/pages/page_pool.h"
#include "kv/pages/page_tables.h"

namespace quire {

// Pages that may hold one page range of one sequence. A line of descent with more forks than this
// inside one page is rare; every further entry shortens the pieces that attention reads, and a
// consolidation costs the copy of about one page.
inline constexpr int64_t kPagesPerRangeMax = 4;

// What it takes to give the sequence that ends in `last` `count` more tokens.
struct AppendPlan {
  BlockIndex last = kNoBlock;
  int64_t length = 0;
  int64_t count = 0;
  int64_t cut = 0;        // [cut, length) is copied into own pages; cut == length: nothing is
  bool extends = false;   // `last` grows; else a new block is made
  bool own_page = false;  // the first new token opens a page, also behind copies
  bool active = true;     // the sequence is not retained
  bool copies() const { return cut < length; }
};
struct GroupAppend {
  bool in_place = false;   // the first new token goes into the page in which the sequence ends
  int64_t page_count = 0;  // pages taken
  AbsentRange absent{};    // set before planning; of the new positions, or empty
  int64_t absent_entries = 0;
};

// Plans that stand in a row, alone or each inside a T.
class AppendPlans {
 public:
  explicit AppendPlans(const AppendPlan& plan) : first_(&plan), count_(1) {}
  template <typename T>
  AppendPlans(std::span<const T> of, AppendPlan T::*plan)
      : first_(of.empty() ? nullptr : &(of.front().*plan)), count_(of.size()), stride_(sizeof(T)) {}

  size_t size() const { return count_; }
  const AppendPlan& operator[](size_t i) const {
    QUIRE_DCHECK(i < count_);
    return *reinterpret_cast<const AppendPlan*>(reinterpret_cast<const std::byte*>(first_) +
                                                i * stride_);
  }

 private:
  const AppendPlan* first_;
  size_t count_;
  size_t stride_ = sizeof(AppendPlan);
};

class BlockTree {
 public:
  explicit BlockTree(std::vector<PagePool> pools)
      : tables_(std::move(pools)), blocks_(tables_), hidden_(blocks_, tables_) {}
  BlockTree(const BlockTree&) = delete;
  BlockTree& operator=(const BlockTree&) = delete;

  // ---- Planning. Plans of one planning may be committed together, in their order. It is const: it
  // changes only marks of its own, which say what this planning has given away already.
  void BeginPlanning() const noexcept {
    ++planning_;
    planned_blocks_ = planned_arrays_ = 0;
  }
  // `cut` below the length asks for own copies of at least [cut, length). Fills
  // groups[group_count()].
  // REQUIRES: count > 0 or cut < length.
  AppendPlan PlanAppend(BlockIndex last, int64_t count, int64_t cut,
                        std::span<GroupAppend> groups) const {
    AppendPlan plan{.last = last, .length = End(last), .count = count, .cut = cut};
    PlanAppend(plan, groups);
    return plan;
  }
  AppendPlan PlanAppend(BlockIndex last, int64_t count, std::span<GroupAppend> groups) const {
    return PlanAppend(last, count, End(last), groups);
  }
  // The same for tokens in pages that hold nothing else of before.
  AppendPlan PlanAppendToOwnPage(BlockIndex last, int64_t count,
                                 std::span<GroupAppend> groups) const {
    AppendPlan plan{
        .last = last, .length = End(last), .count = count, .cut = End(last), .own_page = true};
    PlanAppend(plan, groups);
    return plan;
  }
  // Decides the rest of a plan that says what is asked for: last, its length, count, cut, own_page.
  // Inline: it is small beside the call.
  void PlanAppend(AppendPlan& plan, std::span<GroupAppend> groups) const {
    if (plan.copies()) return PlanCopies(plan, groups);
    QUIRE_DCHECK(plan.count > 0 && plan.length == End(plan.last));
    QUIRE_DCHECK(std::ssize(groups) == group_count());
    const int64_t length = plan.length;
    const int64_t end = length + plan.count;
    const Block* const last = plan.last == kNoBlock ? nullptr : &block(plan.last);
    const PageSlice* const slices = last == nullptr ? nullptr : &slice(plan.last, 0);
    const bool shared = last != nullptr && last->refs > 1;
    const bool may_write = !plan.own_page && !(shared && last->claim == planning_);
    bool any_in_place = false;
    for (int g = 0; g < group_count(); ++g) {
      const PagePool& pages = pool(g);
      GroupAppend& group = groups[static_cast<size_t>(g)];
      const PageTables::NewPieces pieces = tables_.CountNewPieces(g, group.absent, length, end);
      const int64_t slot = pages.Slot(length);
      const bool in_place = slot != 0 && may_write && pages.FillIs(slices[g].tail, slot) &&
                            !(group.absent.begin <= length && length < group.absent.end);
      group.in_place = in_place;
      group.absent_entries = pieces.absent;
      group.page_count = pieces.held - in_place;
      any_in_place |= in_place;
      if (slot == 0 || in_place || !IsFragmented(plan.last, g, slot)) continue;
      plan.cut = length - slot;
      return PlanCopies(plan, groups);
    }
    if (shared && any_in_place) last->claim = planning_;
    plan.extends = last != nullptr && !shared;
    planned_blocks_ += !plan.extends;
    planned_arrays_ += !plan.extends;
  }
  // Tells the processor what the commits will take, [group] pages among it. For a caller that has
  // something to do between planning and Reserve, which reads part of it.
  void PrefetchPlanned(std::span<const int64_t> page_counts) const;
  // Memory for committing these plans, which are all that were made since BeginPlanning. groups:
  // [plan][group]. May throw std::bad_alloc.
  void Reserve(const AppendPlans& plans, std::span<const GroupAppend> groups);
  // Memory for one ForkAt or Pop. May throw std::bad_alloc.
  void ReserveSplit() {
    if (blocks_.free_blocks().empty()) EnsureFreeBlocks(1);
  }

  // ---- Commits.
  // Returns the sequence's new end. If the plan copies, the caller keeps the reference on plan.last
  // and the new block's tokens [cut, length) have slots without bytes; else plan.last's reference
  // has passed to the result.
  // REQUIRES: reserved, pages available.
  BlockIndex Append(const AppendPlan& plan, std::span<const GroupAppend> groups) noexcept;
  // Append of one token by a plan that extends, in place in all groups, but for the fills of the
  // pages: the caller, which knows them, sets these.
  void ExtendInPlace(BlockIndex last) noexcept {
    QUIRE_DCHECK(block(last).refs == 1) << "block " << last << " is shared";
    tables_.Change();
    ++distinct_token_count_;
    ++blocks_.at(last).end;
  }
  // For a plan that copies: gives back the reference on plan.last. `last`: what Append returned.
  void ReleaseOldPath(const AppendPlan& plan, BlockIndex last) noexcept;
  // Takes the append back; returns the sequence's end of before. `last`: what Append returned.
  BlockIndex UndoAppend(const AppendPlan& plan, BlockIndex last) noexcept;
  // A new reference on a block that ends at `position` on the path to `last`; kNoBlock for 0.
  // `active`: it is of a sequence that is not retained.
  // REQUIRES: position <= End(last); ReserveSplit().
  BlockIndex ForkAt(BlockIndex last, int64_t position, bool active = true) noexcept;
  // Moves a reference from `last` to the block of its path that ends at `length`, and frees what
  // nobody else holds.
  // REQUIRES: length <= End(last); ReserveSplit() if length > 0.
  BlockIndex Pop(BlockIndex last, int64_t length, bool active = true) noexcept;
  void Release(BlockIndex last, bool active = true) noexcept { Pop(last, 0, active); }
  // The sequence that ends in `last` (kNoBlock: an empty one) becomes retained, or active again.
  void SetActive(BlockIndex last, bool active) noexcept {
    blocks_.ChangeViewers(last, {.active = active ? 1 : -1});
  }

  // For planning many appends after one another, each of which would wait for memory: tell the
  // processor what PlanAppend reads first, and then, when that has come, what that leads to.
  void PrefetchBlock(BlockIndex index) const { __builtin_prefetch(&block(index).end, 1); }
  void PrefetchEnd(BlockIndex last) const {
    if (last == kNoBlock) return;
    __builtin_prefetch(&block(last), 1);
    for (int g = 0; g < group_count(); ++g) __builtin_prefetch(&slice(last, g), 1);
  }
  void PrefetchPages(BlockIndex last) const {
    if (last == kNoBlock) return;
    for (int g = 0; g < group_count(); ++g) {
      tables_.PrefetchArray(slice(last, g).array);
      pool(g).Prefetch(slice(last, g).tail);
    }
  }

  // What windows hide.
  const HiddenViews& hidden() const { return hidden_; }
  HiddenViews& hidden() { return hidden_; }

  void DeferMerges() noexcept {
    QUIRE_DCHECK(!merges_deferred_) << "two forwards are open";
    merges_deferred_ = true;
  }
  void RunDeferredMerges() noexcept;
  // Gives all memory back but that of the pools.
  void Clear() noexcept;
  // Taken for blocks, page arrays and what windows need of them. For tests.
  int64_t memory_bytes() const;

  // ---- Queries.
  const BlockTable& blocks() const { return blocks_; }
  const PageTables& tables() const { return tables_; }
  int group_count() const { return tables_.group_count(); }
  const PagePool& pool(int group) const { return tables_.pool(group); }
  PagePool& pool(int group) { return tables_.pool(group); }
  const Block& block(BlockIndex index) const { return blocks_.block(index); }
  int64_t End(BlockIndex last) const { return last == kNoBlock ? 0 : block(last).end; }
  const PageSlice& slice(BlockIndex index, int group) const { return tables_.slice(index, group); }
  std::span<const PageEntry> entries(BlockIndex index, int group) const {
    return tables_.entries(index, group);
  }
  int64_t distinct_token_count() const { return distinct_token_count_; }
  int64_t PathLength(BlockIndex last) const {  // in blocks
    int64_t length = 0;
    for (BlockIndex b = last; b != kNoBlock; b = block(b).parent) ++length;
    return length;
  }
  // Whether no other sequence sees a token of the path at or behind `position`.
  bool IsExclusiveFrom(BlockIndex last, int64_t position) const;
  // Whether all pages of [begin, end) on the path are held.
  bool IsHeld(BlockIndex last, int group, int64_t begin, int64_t end) const;
  // Distinct pages that hold tokens of [range_begin, limit) on the path.
  // REQUIRES: both in one page range.
  int64_t PagesInRange(BlockIndex last, int group, int64_t range_begin, int64_t limit) const;

  // Calls visit(from, to, page) for every piece of [begin, end) that lies in one entry, the highest
  // positions first.
  template <typename F>
  void VisitPieces(BlockIndex last, int group, int64_t begin, int64_t end, F&& visit) const {
    QUIRE_DCHECK(group >= 0 && group < group_count());
    for (BlockIndex b = last; b != kNoBlock && block(b).end > begin; b = block(b).parent) {
      if (block(b).begin >= end) continue;
      const std::span<const PageEntry> table = entries(b, group);
      size_t i = table.size();
      int64_t to = block(b).end;
      if (end < to) {
        i = PageTables::FirstEntryFrom(table, end);
        if (i < table.size()) to = table[i].start;
      }
      for (; i-- > 0 && to > begin;) {
        const int64_t from = i == 0 ? block(b).begin : table[i].start;
        const int64_t low = from < begin ? begin : from;
        const int64_t high = to > end ? end : to;
        if (low < high) visit(low, high, table[i].page);
        to = from;
      }
    }
  }

 private:
  // Whether the page range in which a path ends, behind `slot` of its positions, can get no page
  // more. A block that has one entry for each range has none for a second page; that is mostly so,
  // and is known without the page table. (A hole may make up for a second page.)
  bool IsFragmented(BlockIndex last, int group, int64_t slot) const {
    const Block& end = block(last);
    QUIRE_DCHECK(slot > 0 && slot <= end.end);
    const int64_t range_begin = end.end - slot;
    if (end.begin <= range_begin && !slice(last, group).has_holes &&
        slice(last, group).count == pool(group).RangeCount(end.begin, end.end)) {
      return false;
    }
    return PagesInRange(last, group, range_begin, end.end) >= kPagesPerRangeMax;
  }
  void PlanCopies(AppendPlan& plan, std::span<GroupAppend> groups) const;
  void EnsureFreeBlocks(size_t count);
  int64_t StartSlice(BlockIndex index, int group, const AppendPlan& plan,
                     const GroupAppend& append) noexcept;
  int32_t AddCopiedEntries(PageSlice& s, int group, const AppendPlan& plan) noexcept;
  BlockIndex Split(BlockIndex index, int64_t position) noexcept;
  void Trim(BlockIndex index, int64_t end) noexcept;
  BlockIndex FreeLeaf(BlockIndex index) noexcept;
  void DropReference(BlockIndex index, bool active) noexcept;
  void MergeIfLone(BlockIndex index) noexcept;

  PageTables tables_;
  BlockTable blocks_;
  std::vector<BlockIndex>
      deferred_merges_;  // each block once (Block::merge_deferred); capacity blocks().capacity()
  bool merges_deferred_ = false;
  mutable uint64_t planning_ = 0;
  // Taken by the plans of this planning at most; arrays of each group.
  mutable size_t planned_blocks_ = 0;
  mutable size_t planned_arrays_ = 0;
  int64_t distinct_token_count_ = 0;
  HiddenViews hidden_;  // last: what every step reads stands together before it
};

}  // namespace quire

#endif  // QUIRE_KV_PAGES_BLOCK_TREE_H_
