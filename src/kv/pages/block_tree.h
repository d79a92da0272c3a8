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
// Viewers. Whoever has a reference on a block sees it: a child, on behalf of those that see the
// child, or a sequence that ends there. Two things are kept up to date from the viewers upwards, as
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

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/check.h"
#include "kernels/kv_layout.h"
#include "kv/pages/node_heaps.h"
#include "kv/pages/page_pool.h"

namespace quire {

using BlockIndex = int32_t;
inline constexpr BlockIndex kNoBlock = -1;

// Pages that may hold one page range of one sequence. A line of descent with more forks than this
// inside one page is rare; every further entry shortens the pieces that attention reads, and a
// consolidation costs the copy of about one page.
inline constexpr int64_t kPagesPerRangeMax = 4;

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

// Positions [begin, end) that are hidden, in whole page ranges; empty is {0, 0}.
struct HiddenPages {
  int64_t begin = 0;
  int64_t end = 0;
  bool empty() const { return begin >= end; }
  bool operator==(const HiddenPages&) const = default;
};

struct alignas(64) PageSlice {
  int32_t array = -1;
  int32_t tail = kNoPage;  // page of the last entry: planning reads no array
  int64_t first = 0;
  int64_t count = 0;
  int64_t freed = 0;  // entries without a page, but for the first, which a neighbour may free
  // Positions of the block of which all pages are freed that begin in it.
  HiddenPages done = {};
  BlockIndex next = kNoBlock;  // the child that has the last entry's page too
  bool has_holes = false;      // an entry without a page may be of several page ranges
};

// Pages by who sees them; those that one sequence sees which is not retained are the rest.
struct PageKinds {
  int64_t shared = 0;         // by two or more, not all of which are retained
  int64_t retained_only = 0;  // by retained sequences alone
};

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
// New positions [begin, end) that get no page: nobody will ever look at them.
struct AbsentRange {
  int64_t begin = 0;
  int64_t end = 0;
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
  explicit BlockTree(std::vector<PagePool> pools);

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
    const int64_t length = plan.length;
    const int64_t end = length + plan.count;
    const Block* const last = plan.last == kNoBlock ? nullptr : &block(plan.last);
    const PageSlice* const slices = last == nullptr ? nullptr : &slice(plan.last, 0);
    const bool shared = last != nullptr && last->refs > 1;
    const bool may_write = !plan.own_page && !(shared && last->claim == planning_);
    bool any_in_place = false;
    for (int g = 0; g < group_count_; ++g) {
      const PagePool& pages = pool(g);
      GroupAppend& group = groups[static_cast<size_t>(g)];
      const NewPieces pieces = CountNewPieces(g, group.absent, length, end);
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
  void ReserveSplit() { EnsureFreeBlocks(1); }

  // ---- Commits.
  // Returns the sequence's new end. If the plan copies, the caller keeps the reference on plan.last
  // and the new block's tokens [cut, length) have slots without bytes; else plan.last's reference
  // has passed to the result.
  // REQUIRES: reserved, pages available.
  BlockIndex Append(const AppendPlan& plan, std::span<const GroupAppend> groups) noexcept;
  // Append of one token by a plan that extends, in place in all groups, but for the fills of the
  // pages: the caller, who knows them, sets these.
  void ExtendInPlace(BlockIndex last) noexcept {
    QUIRE_DCHECK(block(last).refs == 1) << "block " << last << " is shared";
    ++version_;
    ++distinct_token_count_;
    ++at(last).end;
  }
  // Of a plan that copies: gives back the reference on plan.last. `last`: what Append returned.
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
    ChangeViewers(last, {.active = active ? 1 : -1});
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
      __builtin_prefetch(&arrays_[static_cast<size_t>(slice(last, g).array)]);
      pool(g).Prefetch(slice(last, g).tail);
    }
  }

  // ---- What windows hide. Nothing is spent on it before TrackHidden.
  // Room for sequences of indices below `sequence_count`. May throw std::bad_alloc.
  void TrackHidden(size_t sequence_count);
  void ReserveSequences(size_t sequence_count) {
    if (tracks_hidden_) TrackHidden(sequence_count);
  }
  bool tracks_hidden() const { return tracks_hidden_; }
  // The sequence, which ends in `last`, does not see the pages of `hidden`. O(blocks of its path).
  // REQUIRES: tracks_hidden().
  void SetHidden(int32_t sequence, BlockIndex last, int group, HiddenPages hidden) noexcept;
  // It hides nothing: before its end moves to another block.
  void Unhide(int32_t sequence) noexcept;
  // Frees the pages that have come to be hidden from all who have them. O(freed pages) and the
  // blocks of which more is hidden than before. REQUIRES: no page table is in use.
  void FreeHidden() noexcept;
  // What is hidden from all viewers of the block; positions behind it do not count.
  // REQUIRES: tracks_hidden(), also of the next one.
  HiddenPages HiddenFrom(BlockIndex index, int group) const {
    return views_[SlotOf(index, group)].hidden;
  }
  // What the sequence hides as a viewer; nothing between Unhide and SetHidden.
  HiddenPages HiddenBySequence(int32_t sequence, int group) const {
    return HiddenBy(NodeOfSequence(sequence, group));
  }
  // Steps of all of this since the tree was made: blocks and page entries that were looked at.
  int64_t blocks_visited() const { return blocks_visited_; }

  void DeferMerges() noexcept { merges_deferred_ = true; }
  void RunDeferredMerges() noexcept;
  // Gives all memory back but that of the pools.
  void Clear() noexcept;
  // Taken for blocks, page arrays and what windows need of them. For tests.
  int64_t memory_bytes() const;

  // ---- Queries.
  int group_count() const { return group_count_; }
  const PagePool& pool(int group) const { return pools_[static_cast<size_t>(group)]; }
  PagePool& pool(int group) { return pools_[static_cast<size_t>(group)]; }
  const Block& block(BlockIndex index) const { return blocks_[static_cast<size_t>(index)]; }
  int64_t End(BlockIndex last) const { return last == kNoBlock ? 0 : block(last).end; }
  const PageSlice& slice(BlockIndex index, int group) const {
    return slices_[SlotOf(index, group)];
  }
  const PageEntry* array_data(int32_t array) const {
    return arrays_[static_cast<size_t>(array)].entries.data();
  }
  std::span<const PageEntry> entries(const PageSlice& s) const {
    return {array_data(s.array) + s.first, static_cast<size_t>(s.count)};
  }
  std::span<const PageEntry> entries(BlockIndex index, int group) const {
    return entries(slice(index, group));
  }
  int32_t array_refs(int32_t array) const { return arrays_[static_cast<size_t>(array)].refs; }
  int64_t array_count() const { return static_cast<int64_t>(arrays_.size()); }
  int64_t block_capacity() const { return static_cast<int64_t>(blocks_.size()); }
  int64_t block_count() const {
    return static_cast<int64_t>(blocks_.size()) - static_cast<int64_t>(free_blocks_.size());
  }
  int64_t distinct_token_count() const { return distinct_token_count_; }
  // Another number after every call that may have changed a block or a slice, or changed or moved
  // an array.
  uint64_t version() const { return version_; }
  // Whether the block's array in each group takes one more entry where it is.
  bool HasRoomForEntry(BlockIndex index) const;
  const PageKinds& page_kinds() const { return kinds_; }
  // Pages of all groups whose first token lies in the block: they are of its kind.
  int64_t PagesThatBeginIn(BlockIndex index) const;
  // Entries of all page tables, those without a page included.
  int64_t page_entry_count() const;
  int64_t PathLength(BlockIndex last) const {  // in blocks
    int64_t length = 0;
    for (BlockIndex b = last; b != kNoBlock; b = block(b).parent) ++length;
    return length;
  }
  // Whether no other sequence sees a token of the path at or behind `position`.
  bool IsExclusiveFrom(BlockIndex last, int64_t position) const;
  // Whether all pages of [begin, end) on the path are held.
  bool IsHeld(BlockIndex last, int group, int64_t begin, int64_t end) const;
  // Entries of the slice that have no page.
  int64_t FreedCount(BlockIndex index, int group) const {
    return slice(index, group).freed + (entries(index, group).front().page < 0);
  }
  // Distinct pages that hold tokens of [range_begin, limit) on the path.
  // REQUIRES: both in one page range.
  int64_t PagesInRange(BlockIndex last, int group, int64_t range_begin, int64_t limit) const;

  // Calls visit(from, to, page) for every piece of [begin, end) that lies in one entry, the highest
  // positions first.
  template <typename F>
  void VisitPieces(BlockIndex last, int group, int64_t begin, int64_t end, F&& visit) const {
    for (BlockIndex b = last; b != kNoBlock && block(b).end > begin; b = block(b).parent) {
      if (block(b).begin >= end) continue;
      const std::span<const PageEntry> table = entries(b, group);
      size_t i = table.size();
      int64_t to = block(b).end;
      if (end < to) {
        i = FirstEntryFrom(table, end);
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
  // The first entry behind the table's first that starts at or behind `position`.
  static size_t FirstEntryFrom(std::span<const PageEntry> table, int64_t position) {
    const auto starts_before = [](const PageEntry& entry, int64_t p) { return entry.start < p; };
    return static_cast<size_t>(
        std::lower_bound(table.begin() + 1, table.end(), position, starts_before) - table.begin());
  }
  struct PageArray {
    std::vector<PageEntry> entries;
    int32_t refs = 0;  // slices of it
  };

  Block& at(BlockIndex index) { return blocks_[static_cast<size_t>(index)]; }
  size_t SlotOf(BlockIndex index, int group) const {
    return static_cast<size_t>(index) * static_cast<size_t>(group_count_) +
           static_cast<size_t>(group);
  }
  PageSlice& slice_at(BlockIndex index, int group) { return slices_[SlotOf(index, group)]; }
  PageArray& array_at(int32_t array) { return arrays_[static_cast<size_t>(array)]; }

  // Of the new positions [from, end), which fall into pieces (ForEachNewPiece).
  struct NewPieces {
    int64_t held = 0;
    int64_t absent = 0;
  };
  NewPieces CountNewPieces(int group, const AbsentRange& absent, int64_t from, int64_t end) const {
    if (absent.begin < absent.end) return CountPiecesAround(group, absent, from, end);
    if (end - from == 1) return {.held = 1};
    return {.held = pool(group).RangeCount(from, end)};
  }
  NewPieces CountPiecesAround(int group, const AbsentRange& absent, int64_t from,
                              int64_t end) const;
  template <typename F>
  void ForEachCopyRun(const AppendPlan& plan, int group, F&& f) const;
  int64_t CopyPageCount(const AppendPlan& plan, int group, const AbsentRange& absent) const;
  size_t CopyRunCount(const AppendPlan& plan, int group) const;
  int32_t AddCopiedEntries(PageSlice& s, int group, const AppendPlan& plan) noexcept;
  // Whether the page range in which a path ends, behind `slot` of its positions, can get no page
  // more. Of a block that has one entry for each range it has none for a second page; that is
  // mostly so, and is known without the page table. (A hole may make up for a second page.)
  bool IsFragmented(BlockIndex last, int group, int64_t slot) const {
    const Block& end = block(last);
    const int64_t range_begin = end.end - slot;
    if (end.begin <= range_begin && !slice(last, group).has_holes &&
        slice(last, group).count == pool(group).RangeCount(end.begin, end.end)) {
      return false;
    }
    return PagesInRange(last, group, range_begin, end.end) >= kPagesPerRangeMax;
  }
  int64_t LowerCut(const AppendPlan& plan) const;
  void PlanCopies(AppendPlan& plan, std::span<GroupAppend> groups) const;
  void EnsureFreeBlocks(size_t count);
  void EnsureFreeArrays(size_t count);

  BlockIndex TakeBlock() noexcept;
  BlockIndex AddBlock(BlockIndex parent, int64_t begin, int64_t end) noexcept;
  int32_t TakeArray() noexcept;
  void DropArray(int32_t array) noexcept;
  // New positions [from, end) in one page range, left out or not as a whole.
  struct NewPiece {
    int64_t end = 0;
    bool is_absent = false;
  };
  // The first one of [from, end).
  NewPiece FirstNewPiece(int group, const AbsentRange& absent, int64_t from, int64_t end) const;
  template <typename F>
  void ForEachNewPiece(int group, const AbsentRange& absent, int64_t from, int64_t end,
                       F&& f) const;
  int64_t GoOnInPage(int32_t page, int group, int64_t from, int64_t end,
                     const AbsentRange& absent) noexcept;
  void AddEntries(PageSlice& s, int group, int64_t from, int64_t end,
                  const AbsentRange& absent) noexcept;
  int64_t StartSlice(BlockIndex index, int group, const AppendPlan& plan,
                     const GroupAppend& append) noexcept;
  [[noreturn]] static void FailUnreserved(int32_t array);
  void RecountFreed(PageSlice& s, int group) noexcept;

  // Differences of the numbers in a Block.
  struct ViewerChange {
    int32_t refs = 0;
    int32_t active = 0;
    int32_t many = 0;
    int32_t twins = 0;
  };
  void ChangeViewers(BlockIndex index, ViewerChange change) noexcept;
  // The count of which pages of the block are part, or null.
  int64_t* KindOf(const Block& block) {
    if (block.refs == 0) return nullptr;
    if (!block.is_active()) return &kinds_.retained_only;
    return block.is_seen_by_many() ? &kinds_.shared : nullptr;
  }
  void CountPages(BlockIndex index, int64_t more) noexcept {
    int64_t* const kind = KindOf(block(index));
    if (kind != nullptr) *kind += more;
  }

  // What the viewers of a block hide of a group's pages.
  struct Views {
    int32_t begins = NodeHeaps::kNone;  // heap of the viewers that hide something: the most begin
    int32_t ends = NodeHeaps::kNone;    // and the least end
    int32_t count = 0;
    HiddenPages hidden = {};  // from all viewers
  };
  // A viewer in the heaps.
  int32_t NodeOfBlock(BlockIndex index, int group) const {
    return static_cast<int32_t>(2 * SlotOf(index, group));
  }
  int32_t NodeOfSequence(int32_t sequence, int group) const {
    return static_cast<int32_t>(2 * SlotOf(sequence, group) + 1);
  }
  void ReserveViews(size_t block_count, size_t sequence_count);
  HiddenPages HiddenFromParent(BlockIndex child, HiddenPages hidden) const;
  HiddenPages HiddenFromAll(BlockIndex index, int group) const;
  HiddenPages HiddenBy(int32_t node) const {
    if (!begins_.Contains(node)) return {};
    return {.begin = -begins_.key(node), .end = ends_.key(node)};
  }
  void SetView(BlockIndex index, int group, int32_t node, HiddenPages hidden) noexcept;
  void RefreshHidden(BlockIndex index, int group) noexcept;
  void RefreshHidden(BlockIndex index) noexcept {
    if (!tracks_hidden_) return;
    for (int g = 0; g < group_count_; ++g) RefreshHidden(index, g);
  }
  void MoveViewsUp(BlockIndex upper, BlockIndex lower) noexcept;
  void MoveViewsDown(BlockIndex upper, BlockIndex lower) noexcept;
  void DropViews(BlockIndex leaf) noexcept;
  void MayFree(BlockIndex index) noexcept;
  void FreeHidden(BlockIndex index, int group) noexcept;
  void FreeEntries(BlockIndex index, int group, HiddenPages hidden) noexcept;
  void FreeEntry(BlockIndex index, int group, int64_t entry) noexcept;
  void JoinFreedEntries(BlockIndex index, int group) noexcept;
  BlockIndex Split(BlockIndex index, int64_t position) noexcept;
  void SplitSlice(BlockIndex upper, BlockIndex lower, int group, int64_t position) noexcept;
  void Trim(BlockIndex index, int64_t end) noexcept;
  BlockIndex FreeLeaf(BlockIndex index) noexcept;
  void DropReference(BlockIndex index, bool active) noexcept;
  void MergeIfLone(BlockIndex index) noexcept;
  bool ReserveMerge(BlockIndex upper, BlockIndex lower) noexcept;
  void MergeSlices(BlockIndex upper, BlockIndex lower, int group) noexcept;

  std::vector<PagePool> pools_;
  int group_count_;  // their number
  std::vector<Block> blocks_;
  std::vector<PageSlice> slices_;        // [block][group]
  std::vector<BlockIndex> free_blocks_;  // a stack; capacity blocks_.size()
  std::vector<PageArray> arrays_;
  std::vector<int32_t> free_arrays_;  // a stack; capacity arrays_.size()
  std::vector<BlockIndex>
      deferred_merges_;  // each block once (Block::merge_deferred); capacity blocks_.size()
  bool merges_deferred_ = false;
  std::vector<uint8_t> any_freed_;  // [group], since the last Clear
  mutable uint64_t planning_ = 0;
  // Taken by the plans of this planning at most; arrays of each group.
  mutable size_t planned_blocks_ = 0;
  mutable size_t planned_arrays_ = 0;
  uint64_t version_ = 1;
  int64_t distinct_token_count_ = 0;
  PageKinds kinds_;

  bool tracks_hidden_ = false;
  std::vector<Views> views_;           // [block][group]
  NodeHeaps begins_, ends_;            // keys: -begin and end of what a viewer hides
  std::vector<BlockIndex> hidden_in_;  // [sequence]: where it is a viewer in a heap
  std::vector<BlockIndex> may_free_;   // each block once (Block::may_free)
  int64_t blocks_visited_ = 0;
};

}  // namespace quire

#endif  // QUIRE_KV_PAGES_BLOCK_TREE_H_
