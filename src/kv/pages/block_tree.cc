#include "kv/pages/block_tree.h"

#include <algorithm>

#include "base/check.h"
#include "kv/pages/reserve.h"

namespace quire {
namespace {

// What an append copies: the part [cut, length) of its path.
class CopiedPath {
 public:
  CopiedPath(const BlockTree& tree, const AppendPlan& plan) : tree_(tree), plan_(plan) {}

  int64_t LowerCut() const;
  template <typename F>
  void ForEachRun(int group, F&& f) const;
  size_t RunCount(int group) const;
  int64_t PageCount(int group, const AbsentRange& absent) const;

 private:
  const BlockTree& tree_;
  const AppendPlan& plan_;
};

}  // namespace

// ---------------------------------------------------------------------- queries

bool BlockTree::IsExclusiveFrom(BlockIndex last, int64_t position) const {
  for (BlockIndex b = last; b != kNoBlock && block(b).end > position; b = block(b).parent) {
    if (block(b).refs > 1) return false;
  }
  return true;
}

int64_t BlockTree::PagesInRange(BlockIndex last, int group, int64_t range_begin,
                                int64_t limit) const {
  int64_t count = 0;
  int32_t below = kNoPage;
  VisitPieces(last, group, range_begin, limit, [&](int64_t, int64_t, int32_t page) {
    count += page != below && page != kNoPage;
    below = page;
  });
  return count;
}

bool BlockTree::IsHeld(BlockIndex last, int group, int64_t begin, int64_t end) const {
  if (!tables_.any_freed(group)) return true;
  for (BlockIndex b = last; b != kNoBlock && block(b).end > begin; b = block(b).parent) {
    if (tables_.FreedCount(b, group) == 0) continue;
    bool is_held = true;
    VisitPieces(b, group, std::max(begin, block(b).begin), end,
                [&](int64_t, int64_t, int32_t page) { is_held &= page != kNoPage; });
    if (!is_held) return false;
  }
  return true;
}

// ---------------------------------------------------------------------- planning

namespace {

// The highest position at or below the plan's cut at which new pages may start without leaving more
// than kPagesPerRangeMax pages in a range of any group. Ends, because it only falls and the start
// of a range always fits.
int64_t CopiedPath::LowerCut() const {
  int64_t cut = plan_.cut;
  const int64_t added = plan_.own_page ? 2 : 1;  // pages that the cut's range gets at most
  for (int g = 0; g < tree_.group_count();) {
    const int64_t range_begin = tree_.pool(g).RangeBegin(cut);
    if (tree_.PagesInRange(plan_.last, g, range_begin, cut) + added <= kPagesPerRangeMax) {
      ++g;
    } else {
      cut = range_begin;
      g = 0;
    }
  }
  return cut;
}

// The runs of [cut, length) that a copy consists of, the highest first: each within one page range,
// and held or not as a whole. Those that are not held get no page and no copy.
template <typename F>
void CopiedPath::ForEachRun(int group, F&& f) const {
  int64_t begin = -1;
  bool is_held = false;
  const PagePool& pages = tree_.pool(group);
  tree_.VisitPieces(
      plan_.last, group, plan_.cut, plan_.length, [&](int64_t from, int64_t to, int32_t page) {
        const bool goes_on = begin == to && pages.Slot(to) != 0 && is_held == (page != kNoPage);
        if (begin >= 0 && !goes_on) f(begin, is_held);
        begin = from;
        is_held = page != kNoPage;
      });
  if (begin >= 0) f(begin, is_held);
}

int64_t CopiedPath::PageCount(int group, const AbsentRange& absent) const {
  int64_t copied = 0;
  bool last_is_held = false;
  bool is_last = true;
  ForEachRun(group, [&](int64_t, bool is_held) {
    copied += is_held;
    last_is_held |= is_last && is_held;
    is_last = false;
  });
  int64_t added = 0;
  bool first_is_held = false;
  tree_.tables().ForEachNewPiece(group, absent, plan_.length, plan_.length + plan_.count,
                                 [&](int64_t from, int64_t, bool is_absent) {
                                   first_is_held |= from == plan_.length && !is_absent;
                                   added += !is_absent;
                                 });
  const bool goes_on =
      first_is_held && tree_.pool(group).Slot(plan_.length) != 0 && last_is_held && !plan_.own_page;
  return copied + added - goes_on;
}

size_t CopiedPath::RunCount(int group) const {
  size_t count = 0;
  ForEachRun(group, [&](int64_t, bool) { ++count; });
  return count;
}

}  // namespace

// REQUIRES: a plan that copies: its cut is at most where it is now.
void BlockTree::PlanCopies(AppendPlan& plan, std::span<GroupAppend> groups) const {
  const CopiedPath copied(*this, plan);
  plan.cut = copied.LowerCut();
  QUIRE_DCHECK(plan.cut < plan.length);
  plan.extends = false;
  planned_blocks_ += 2;  // the cut may split a block
  ++planned_arrays_;
  for (int g = 0; g < group_count(); ++g) {
    GroupAppend& group = groups[static_cast<size_t>(g)];
    group.in_place = false;
    group.absent_entries =
        tables_.CountNewPieces(g, group.absent, plan.length, plan.length + plan.count).absent;
    group.page_count = copied.PageCount(g, group.absent);
  }
}

// Blocks are added at double the size: growth by one each time would move all of them each time.
void BlockTree::EnsureFreeBlocks(size_t count) {
  const size_t free = blocks_.free_blocks().size();
  if (free >= count) return;
  const size_t old_size = static_cast<size_t>(blocks_.capacity());
  const size_t size = std::max(old_size + count - free, 2 * old_size);
  blocks_.Reserve(size);
  tables_.ReserveSlices(size);
  deferred_merges_.reserve(size);
  hidden_.ReserveBlocks(size);
  blocks_.Grow(size);
  tables_.GrowSlices(size);
}

void BlockTree::PrefetchPlanned(std::span<const int64_t> page_counts) const {
  const std::span<const BlockIndex> free = blocks_.free_blocks();
  for (const BlockIndex block : free.last(std::min(planned_blocks_, free.size())))
    PrefetchEnd(block);
  const int groups = group_count();
  tables_.PrefetchFreeArrays(planned_arrays_ * static_cast<size_t>(groups));
  for (int g = 0; g < groups; ++g) pool(g).PrefetchFree(page_counts[static_cast<size_t>(g)]);
}

// TakeArray pops the free arrays from the top, and nothing is freed between the commits of one
// planning: so the n-th new slice of the plans gets the n-th array from the top, whose entries are
// reserved here.
void BlockTree::Reserve(const AppendPlans& plans, std::span<const GroupAppend> groups) {
  tables_.Change();
  const int group_count = tables_.group_count();
  QUIRE_DCHECK(groups.size() == plans.size() * static_cast<size_t>(group_count));
  EnsureFreeBlocks(planned_blocks_);
  tables_.EnsureFreeArrays(planned_arrays_ * static_cast<size_t>(group_count));
  size_t next_array = 0;
  const GroupAppend* next_group = groups.data();
  for (size_t i = 0; i < plans.size(); ++i) {
    const AppendPlan& plan = plans[i];
    for (int g = 0; g < group_count; ++g) {
      const GroupAppend& group = *next_group++;
      const size_t added = static_cast<size_t>(group.page_count + group.absent_entries);
      int32_t array = 0;
      size_t first = 0;  // entries before the added ones
      if (plan.extends) {
        if (added == 0) continue;
        const PageSlice& s = slice(plan.last, g);
        array = s.array;
        first = static_cast<size_t>(s.first + s.count);
      } else {
        array = tables_.FreeArray(next_array++);
        first = plan.copies() ? CopiedPath(*this, plan).RunCount(g) : group.in_place;
      }
      tables_.ReserveEntries(array, first, added, plan.extends);
    }
  }
}

// ---------------------------------------------------------------------- commits

// The slice of a new block: what its plan has besides new pages. Returns where these begin.
inline int64_t BlockTree::StartSlice(BlockIndex index, int group, const AppendPlan& plan,
                                     const GroupAppend& append) noexcept {
  PageSlice& s = tables_.slice_at(index, group);
  s = {.array = tables_.TakeArray()};
  int32_t page = kNoPage;
  if (append.in_place) {
    PageSlice& above = tables_.slice_at(plan.last, group);
    page = above.tail;
    above.next = index;
    tables_.StartInPage(s, group, plan.length, page);
  } else if (plan.copies()) {
    page = AddCopiedEntries(s, group, plan);
    if (plan.own_page) return plan.length;
  }
  return tables_.GoOnInPage(page, group, plan.length, plan.length + plan.count, append.absent);
}

// Entries for [cut, length) of a plan that copies. Returns the page in which the new tokens go on,
// kNoPage if they open one.
int32_t BlockTree::AddCopiedEntries(PageSlice& s, int group, const AppendPlan& plan) noexcept {
  const CopiedPath copied(*this, plan);
  size_t left = copied.RunCount(group);
  const std::span<PageEntry> table = tables_.StartEntries(s, left);
  copied.ForEachRun(group, [&](int64_t begin, bool is_held) {
    table[--left] = {.start = begin, .page = is_held ? 0 : kNoPage};
  });
  tables_.TakePages(s, group, plan.length);
  return pool(group).Slot(plan.length) == 0 ? kNoPage : s.tail;
}

BlockIndex BlockTree::Append(const AppendPlan& plan, std::span<const GroupAppend> groups) noexcept {
  tables_.Change();
  const int group_count = tables_.group_count();
  const int64_t end = plan.length + plan.count;
  QUIRE_DCHECK(std::ssize(groups) == group_count);
  QUIRE_DCHECK(plan.length == End(plan.last)) << "the plan is of another end";
  QUIRE_DCHECK(!plan.extends || (!plan.copies() && block(plan.last).refs == 1))
      << "others would see the new tokens";
  distinct_token_count_ += end - plan.cut;
  if (plan.extends) {
    blocks_.at(plan.last).end = end;
    for (int g = 0; g < group_count; ++g) {
      const GroupAppend& group = groups[static_cast<size_t>(g)];
      PageSlice& s = tables_.slice_at(plan.last, g);
      const int32_t page = group.in_place ? s.tail : kNoPage;
      const int64_t from = tables_.GoOnInPage(page, g, plan.length, end, group.absent);
      tables_.AddEntries(s, g, from, end, group.absent);
      if (!plan.active) blocks_.CountPages(plan.last, group.page_count);
    }
    return plan.last;
  }
  const BlockIndex parent = plan.copies() ? ForkAt(plan.last, plan.cut, plan.active) : plan.last;
  const BlockIndex index = blocks_.Add(parent, plan.cut, end);
  blocks_.at(index).active_refs = plan.active;
  if (plan.copies()) blocks_.ChangeViewers(parent, {.twins = 1});
  for (int g = 0; g < group_count; ++g) {
    const GroupAppend& group = groups[static_cast<size_t>(g)];
    PageSlice& s = tables_.slice_at(index, g);
    tables_.AddEntries(s, g, StartSlice(index, g, plan, group), end, group.absent);
    if (!plan.active) blocks_.CountPages(index, group.page_count);
  }
  return index;
}

void BlockTree::ReleaseOldPath(const AppendPlan& plan, BlockIndex last) noexcept {
  blocks_.ChangeViewers(block(last).parent, {.twins = -1});
  Release(plan.last, plan.active);
}

BlockIndex BlockTree::UndoAppend(const AppendPlan& plan, BlockIndex last) noexcept {
  if (!plan.copies()) return Pop(last, plan.length, plan.active);
  blocks_.ChangeViewers(block(last).parent, {.twins = -1});
  Release(Pop(last, plan.cut, plan.active), plan.active);
  return plan.last;
}

// A new block takes the part of `index` above `position`; `index` keeps the rest, and with it its
// children and its sequences.
// REQUIRES: begin < position < end.
BlockIndex BlockTree::Split(BlockIndex index, int64_t position) noexcept {
  const BlockIndex upper = blocks_.AddAbove(index, position);
  const BlockIndex above = block(upper).parent;
  for (int g = 0; g < group_count(); ++g) tables_.Split(upper, index, above, g, position);
  hidden_.MoveUp(upper, index);
  return upper;
}

BlockIndex BlockTree::ForkAt(BlockIndex last, int64_t position, bool active) noexcept {
  tables_.Change();
  if (position == 0) return kNoBlock;
  BlockIndex index = last;
  QUIRE_DCHECK(position > 0 && last != kNoBlock);
  while (block(index).begin >= position) index = block(index).parent;
  QUIRE_CHECK(position <= block(index).end) << "fork at " << position << " of " << End(last);
  if (position < block(index).end) index = Split(index, position);
  blocks_.ChangeViewers(index, {.refs = 1, .active = active});
  hidden_.Refresh(index);
  return index;
}

// REQUIRES: a leaf with one reference; begin < end < its end.
void BlockTree::Trim(BlockIndex index, int64_t end) noexcept {
  Block& leaf = blocks_.at(index);
  QUIRE_DCHECK(leaf.refs == 1);
  QUIRE_DCHECK(leaf.begin < end && end < leaf.end);
  distinct_token_count_ -= leaf.end - end;
  leaf.end = end;
  int64_t released = 0;
  for (int g = 0; g < group_count(); ++g) released += tables_.Trim(index, g, end);
  blocks_.CountPages(index, -released);
}

// Frees a leaf with one reference and returns its parent, to which the reference on the leaf has
// passed.
BlockIndex BlockTree::FreeLeaf(BlockIndex index) noexcept {
  const Block& leaf = block(index);
  QUIRE_DCHECK(leaf.refs == 1 && leaf.child_count == 0);
  const BlockIndex parent = leaf.parent;
  distinct_token_count_ -= leaf.end - leaf.begin;
  QUIRE_DCHECK(distinct_token_count_ >= 0);
  blocks_.UncountPages(index);
  hidden_.Drop(index);
  for (int g = 0; g < group_count(); ++g) tables_.Drop(index, parent, g, leaf.begin);
  blocks_.FreeLeaf(index);
  return parent;
}

BlockIndex BlockTree::Pop(BlockIndex last, int64_t length, bool active) noexcept {
  tables_.Change();
  QUIRE_CHECK(length <= End(last)) << "pop to " << length << " of " << End(last);
  while (End(last) > length) {
    if (block(last).refs > 1) {
      const BlockIndex shorter = ForkAt(last, length, active);
      DropReference(last, active);
      return shorter;
    }
    if (block(last).begin < length) {
      Trim(last, length);
      return last;
    }
    last = FreeLeaf(last);
  }
  return last;
}

// ---------------------------------------------------------------------- merging

// REQUIRES: more than one reference.
void BlockTree::DropReference(BlockIndex index, bool active) noexcept {
  QUIRE_CHECK(block(index).refs > 1) << "block " << index << " would be lost";
  blocks_.ChangeViewers(index, {.refs = -1, .active = -static_cast<int32_t>(active)});
  hidden_.Refresh(index);
  MergeIfLone(index);
}

// Joins `index` and its child if that is the only one and no sequence ends between them. The
// child's index stays, as sequences and blocks refer to it.
void BlockTree::MergeIfLone(BlockIndex index) noexcept {
  Block& upper = blocks_.at(index);
  if (upper.refs != 1 || upper.child_count != 1) return;
  if (merges_deferred_) {
    if (!upper.merge_deferred) deferred_merges_.push_back(index);
    upper.merge_deferred = true;
    return;
  }
  const BlockIndex child = upper.child_xor;
  QUIRE_DCHECK(block(child).parent == index);
  tables_.Change();  // arrays may move, even if memory is short in the end
  if (!tables_.ReserveMerge(index, child)) return;
  for (int g = 0; g < group_count(); ++g) tables_.Merge(index, child, upper.parent, g, upper.end);
  blocks_.JoinToChild(index, child);
  hidden_.MoveDown(index, child);
}

void BlockTree::RunDeferredMerges() noexcept {
  merges_deferred_ = false;
  for (const BlockIndex index : deferred_merges_) {
    blocks_.at(index).merge_deferred = false;
    MergeIfLone(index);
  }
  deferred_merges_.clear();
}

int64_t BlockTree::memory_bytes() const {
  return tables_.memory_bytes() + blocks_.memory_bytes() + hidden_.memory_bytes() +
         static_cast<int64_t>(deferred_merges_.capacity() * sizeof(BlockIndex));
}

void BlockTree::Clear() noexcept {
  tables_.Clear();
  blocks_.Clear();
  hidden_.Clear();
  FreeAll(deferred_merges_);
  merges_deferred_ = false;
  distinct_token_count_ = 0;
}

}  // namespace quire
