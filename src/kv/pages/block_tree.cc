#include "kv/pages/block_tree.h"

#include <algorithm>
#include <cstdlib>
#include <new>
#include <utility>

#include "base/check.h"
#include "kv/pages/reserve.h"

namespace quire {
namespace {

// Entries of an array that keeps its memory when it becomes free: of sequences of some thousand
// tokens.
constexpr size_t kEntriesKept = 256;

}  // namespace

BlockTree::BlockTree(std::vector<PagePool> pools)
    : pools_(std::move(pools)),
      group_count_(static_cast<int>(pools_.size())),
      any_freed_(pools_.size(), 0) {}

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
  if (any_freed_[static_cast<size_t>(group)] == 0) return true;
  for (BlockIndex b = last; b != kNoBlock && block(b).end > begin; b = block(b).parent) {
    if (FreedCount(b, group) == 0) continue;
    bool is_held = true;
    VisitPieces(b, group, std::max(begin, block(b).begin), end,
                [&](int64_t, int64_t, int32_t page) { is_held &= page != kNoPage; });
    if (!is_held) return false;
  }
  return true;
}

int64_t BlockTree::page_entry_count() const {
  int64_t count = 0;
  for (const PageArray& array : arrays_) count += static_cast<int64_t>(array.entries.size());
  return count;
}

bool BlockTree::HasRoomForEntry(BlockIndex index) const {
  for (int g = 0; g < group_count(); ++g) {
    const PageSlice& s = slice(index, g);
    const size_t size = static_cast<size_t>(s.first + s.count) + 1;
    if (arrays_[static_cast<size_t>(s.array)].entries.capacity() < size) return false;
  }
  return true;
}

// ---------------------------------------------------------------------- planning

// The highest position at or below the plan's cut at which new pages may start without leaving more
// than kPagesPerRangeMax pages in a range of any group. Ends, because it only falls and the start
// of a range always fits.
int64_t BlockTree::LowerCut(const AppendPlan& plan) const {
  int64_t cut = plan.cut;
  const int64_t added = plan.own_page ? 2 : 1;  // pages that the cut's range gets at most
  for (int g = 0; g < group_count();) {
    const int64_t range_begin = pool(g).RangeBegin(cut);
    if (PagesInRange(plan.last, g, range_begin, cut) + added <= kPagesPerRangeMax) {
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
void BlockTree::ForEachCopyRun(const AppendPlan& plan, int group, F&& f) const {
  int64_t begin = -1;
  bool is_held = false;
  VisitPieces(plan.last, group, plan.cut, plan.length, [&](int64_t from, int64_t to, int32_t page) {
    const bool goes_on = begin == to && pool(group).Slot(to) != 0 && is_held == (page != kNoPage);
    if (begin >= 0 && !goes_on) f(begin, is_held);
    begin = from;
    is_held = page != kNoPage;
  });
  if (begin >= 0) f(begin, is_held);
}

int64_t BlockTree::CopyPageCount(const AppendPlan& plan, int group,
                                 const AbsentRange& absent) const {
  const PagePool& pages = pool(group);
  int64_t copied = 0;
  bool last_is_held = false;
  bool is_last = true;
  ForEachCopyRun(plan, group, [&](int64_t, bool is_held) {
    copied += is_held;
    last_is_held |= is_last && is_held;
    is_last = false;
  });
  int64_t added = 0;
  bool first_is_held = false;
  ForEachNewPiece(group, absent, plan.length, plan.length + plan.count,
                  [&](int64_t from, int64_t, bool is_absent) {
                    first_is_held |= from == plan.length && !is_absent;
                    added += !is_absent;
                  });
  const bool goes_on =
      first_is_held && pages.Slot(plan.length) != 0 && last_is_held && !plan.own_page;
  return copied + added - goes_on;
}

size_t BlockTree::CopyRunCount(const AppendPlan& plan, int group) const {
  size_t count = 0;
  ForEachCopyRun(plan, group, [&](int64_t, bool) { ++count; });
  return count;
}

// Of a plan that copies: its cut is at most where it is now.
void BlockTree::PlanCopies(AppendPlan& plan, std::span<GroupAppend> groups) const {
  plan.cut = LowerCut(plan);
  plan.extends = false;
  planned_blocks_ += 2;  // the cut may split a block
  ++planned_arrays_;
  for (int g = 0; g < group_count(); ++g) {
    GroupAppend& group = groups[static_cast<size_t>(g)];
    group.in_place = false;
    group.absent_entries =
        CountNewPieces(g, group.absent, plan.length, plan.length + plan.count).absent;
    group.page_count = CopyPageCount(plan, g, group.absent);
  }
}

// Blocks are added at double the size: growth by one each time would move all of them each time.
void BlockTree::EnsureFreeBlocks(size_t count) {
  if (free_blocks_.size() >= count) return;
  const size_t old_size = blocks_.size();
  const size_t size = std::max(old_size + count - free_blocks_.size(), 2 * old_size);
  blocks_.reserve(size);
  slices_.reserve(size * pools_.size());
  free_blocks_.reserve(size);
  deferred_merges_.reserve(size);
  if (tracks_hidden_) ReserveViews(size, hidden_in_.size());
  blocks_.resize(size);
  slices_.resize(size * pools_.size());
  for (size_t i = size; i-- > old_size;) free_blocks_.push_back(static_cast<BlockIndex>(i));
}

void BlockTree::EnsureFreeArrays(size_t count) {
  if (free_arrays_.size() >= count) return;
  const size_t old_size = arrays_.size();
  const size_t size = std::max(old_size + count - free_arrays_.size(), 2 * old_size);
  free_arrays_.reserve(size);
  arrays_.resize(size);
  for (size_t i = size; i-- > old_size;) free_arrays_.push_back(static_cast<int32_t>(i));
}

inline BlockTree::NewPiece BlockTree::FirstNewPiece(int group, const AbsentRange& absent,
                                                    int64_t from, int64_t end) const {
  const bool is_absent = absent.begin <= from && from < absent.end;
  if (end - from == 1) return {end, is_absent};
  int64_t to = std::min(end, pool(group).RangeEnd(from));
  if (is_absent) to = std::min(to, absent.end);
  if (from < absent.begin) to = std::min(to, absent.begin);
  return {to, is_absent};
}

// f(from, to, is_absent) for all of them, the lowest first.
template <typename F>
void BlockTree::ForEachNewPiece(int group, const AbsentRange& absent, int64_t from, int64_t end,
                                F&& f) const {
  while (from < end) {
    const NewPiece piece = FirstNewPiece(group, absent, from, end);
    f(from, piece.end, piece.is_absent);
    from = piece.end;
  }
}

BlockTree::NewPieces BlockTree::CountPiecesAround(int group, const AbsentRange& absent,
                                                  int64_t from, int64_t end) const {
  NewPieces pieces;
  ForEachNewPiece(group, absent, from, end, [&](int64_t, int64_t, bool is_absent) {
    ++(is_absent ? pieces.absent : pieces.held);
  });
  return pieces;
}

void BlockTree::PrefetchPlanned(std::span<const int64_t> page_counts) const {
  const size_t blocks = std::min(planned_blocks_, free_blocks_.size());
  for (const BlockIndex block : std::span(free_blocks_).last(blocks)) PrefetchEnd(block);
  const size_t arrays = std::min(planned_arrays_ * pools_.size(), free_arrays_.size());
  for (const int32_t array : std::span(free_arrays_).last(arrays))
    __builtin_prefetch(&arrays_[static_cast<size_t>(array)], 1);
  for (int g = 0; g < group_count_; ++g) pool(g).PrefetchFree(page_counts[static_cast<size_t>(g)]);
}

// TakeArray pops the free arrays from the top, and nothing is freed between the commits of one
// planning: so the n-th new slice of the plans gets the n-th array from the top, whose entries are
// reserved here.
void BlockTree::Reserve(const AppendPlans& plans, std::span<const GroupAppend> groups) {
  ++version_;
  EnsureFreeBlocks(planned_blocks_);
  EnsureFreeArrays(planned_arrays_ * pools_.size());
  const int32_t* next_array = free_arrays_.data() + free_arrays_.size();
  const GroupAppend* next_group = groups.data();
  for (size_t i = 0; i < plans.size(); ++i) {
    const AppendPlan& plan = plans[i];
    for (int g = 0; g < group_count_; ++g) {
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
        array = *--next_array;
        first = plan.copies() ? CopyRunCount(plan, g) : group.in_place;
      }
      std::vector<PageEntry>& table = array_at(array).entries;
      if (plan.extends && table.capacity() / 4 > first + added + kEntriesKept) {
        table.resize(first);  // what lies behind is of descendants that are gone
        ReleaseUnused(table);
      }
      ReserveGrowing(table, first + added);
      __builtin_prefetch(table.data() + first, 1);
    }
  }
}

// ---------------------------------------------------------------------- commits

inline BlockIndex BlockTree::TakeBlock() noexcept {
  QUIRE_CHECK(!free_blocks_.empty()) << "a block is taken that was not reserved";
  const BlockIndex index = free_blocks_.back();
  free_blocks_.pop_back();
  Block& block = at(index);
  // A freed block stays in deferred_merges_ and may_free_ until these are run.
  block = {.merge_deferred = block.merge_deferred, .may_free = block.may_free};
  return index;
}

inline int32_t BlockTree::TakeArray() noexcept {
  QUIRE_CHECK(!free_arrays_.empty()) << "a page array is taken that was not reserved";
  const int32_t array = free_arrays_.back();
  free_arrays_.pop_back();
  array_at(array).refs = 1;
  return array;
}

void BlockTree::DropArray(int32_t array) noexcept {
  if (--array_at(array).refs > 0) return;
  std::vector<PageEntry>& entries = array_at(array).entries;
  entries.clear();  // keeps its memory for the next user, unless that is much
  if (entries.capacity() > kEntriesKept) FreeAll(entries);
  free_arrays_.push_back(array);
}

// A new block with one reference, for a sequence. Its parent's count is that of one child more and
// is not raised: the reference comes from the caller.
inline BlockIndex BlockTree::AddBlock(BlockIndex parent, int64_t begin, int64_t end) noexcept {
  const BlockIndex index = TakeBlock();
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

// New tokens [from, end) go on in `page`, of which the slice has an entry already; kNoPage: they do
// not. Returns where they go on behind it.
inline int64_t BlockTree::GoOnInPage(int32_t page, int group, int64_t from, int64_t end,
                                     const AbsentRange& absent) noexcept {
  if (page == kNoPage || from == end) return from;
  const NewPiece piece = FirstNewPiece(group, absent, from, end);
  if (piece.is_absent) return from;
  pool(group).SetFillTo(page, piece.end);
  return piece.end;
}

// Entries for [from, end), which open pages, behind those of the slice of a leaf that ends there.
inline void BlockTree::AddEntries(PageSlice& s, int group, int64_t from, int64_t end,
                                  const AbsentRange& absent) noexcept {
  if (from < end) {
    PagePool& pages = pool(group);
    std::vector<PageEntry>& table = array_at(s.array).entries;
    // Cut off what descendants that are gone have left behind.
    if (table.size() > static_cast<size_t>(s.first + s.count))
      table.resize(static_cast<size_t>(s.first + s.count));
    do {
      const NewPiece piece = FirstNewPiece(group, absent, from, end);
      if (table.size() == table.capacity()) [[unlikely]]
        FailUnreserved(s.array);
      s.tail = piece.is_absent ? kNoPage : pages.Take(piece.end);
      table.push_back({.start = from, .page = s.tail});
      ++s.count;
      from = piece.end;
    } while (from < end);
  }
  if (absent.begin >= absent.end) return;
  any_freed_[static_cast<size_t>(group)] = 1;
  RecountFreed(s, group);
}

// The slice of a new block: what its plan has besides new pages. Returns where these begin.
inline int64_t BlockTree::StartSlice(BlockIndex index, int group, const AppendPlan& plan,
                                     const GroupAppend& append) noexcept {
  PageSlice& s = slice_at(index, group);
  s = {.array = TakeArray()};
  int32_t page = kNoPage;
  if (append.in_place) {
    page = slice(plan.last, group).tail;
    slice_at(plan.last, group).next = index;
    pool(group).Hold(page);
    array_at(s.array).entries.push_back({.start = plan.length, .page = page});
    s.tail = page;
    s.count = 1;
  } else if (plan.copies()) {
    page = AddCopiedEntries(s, group, plan);
    if (plan.own_page) return plan.length;
  }
  return GoOnInPage(page, group, plan.length, plan.length + plan.count, append.absent);
}

void BlockTree::FailUnreserved(int32_t array) {
  QUIRE_CHECK(false) << "page array " << array << " was not reserved";
  std::abort();  // not reached
}

// Entries for [cut, length) of a plan that copies. Returns the page in which the new tokens go on,
// kNoPage if they open one.
int32_t BlockTree::AddCopiedEntries(PageSlice& s, int group, const AppendPlan& plan) noexcept {
  PagePool& pages = pool(group);
  std::vector<PageEntry>& table = array_at(s.array).entries;
  size_t left = CopyRunCount(plan, group);
  if (left > table.capacity()) FailUnreserved(s.array);
  table.resize(left);
  s.count = static_cast<int64_t>(left);
  ForEachCopyRun(plan, group, [&](int64_t begin, bool is_held) {
    table[--left] = {.start = begin, .page = is_held ? 0 : kNoPage};
  });
  for (size_t i = 0; i < table.size(); ++i) {
    if (table[i].page == kNoPage) {
      s.has_holes = true;
      continue;
    }
    table[i].page = pages.Take(i + 1 < table.size() ? table[i + 1].start : plan.length);
  }
  s.tail = table.back().page;
  RecountFreed(s, group);
  return pages.Slot(plan.length) == 0 ? kNoPage : table.back().page;
}

void BlockTree::RecountFreed(PageSlice& s, int group) noexcept {
  s.freed = 0;
  if (any_freed_[static_cast<size_t>(group)] == 0) return;
  for (const PageEntry& entry : entries(s).subspan(1)) s.freed += entry.page == kNoPage;
}

BlockIndex BlockTree::Append(const AppendPlan& plan, std::span<const GroupAppend> groups) noexcept {
  ++version_;
  const int64_t end = plan.length + plan.count;
  distinct_token_count_ += end - plan.cut;
  if (plan.extends) {
    at(plan.last).end = end;
    for (int g = 0; g < group_count_; ++g) {
      const GroupAppend& group = groups[static_cast<size_t>(g)];
      PageSlice& s = slice_at(plan.last, g);
      const int32_t page = group.in_place ? s.tail : kNoPage;
      AddEntries(s, g, GoOnInPage(page, g, plan.length, end, group.absent), end, group.absent);
      if (!plan.active) kinds_.retained_only += group.page_count;
    }
    return plan.last;
  }
  const BlockIndex parent = plan.copies() ? ForkAt(plan.last, plan.cut, plan.active) : plan.last;
  const BlockIndex index = AddBlock(parent, plan.cut, end);
  at(index).active_refs = plan.active;
  if (plan.copies()) ChangeViewers(parent, {.twins = 1});
  for (int g = 0; g < group_count_; ++g) {
    const GroupAppend& group = groups[static_cast<size_t>(g)];
    PageSlice& s = slice_at(index, g);
    AddEntries(s, g, StartSlice(index, g, plan, group), end, group.absent);
    if (!plan.active) kinds_.retained_only += group.page_count;
  }
  return index;
}

void BlockTree::ReleaseOldPath(const AppendPlan& plan, BlockIndex last) noexcept {
  ChangeViewers(block(last).parent, {.twins = -1});
  Release(plan.last, plan.active);
}

BlockIndex BlockTree::UndoAppend(const AppendPlan& plan, BlockIndex last) noexcept {
  if (!plan.copies()) return Pop(last, plan.length, plan.active);
  ChangeViewers(block(last).parent, {.twins = -1});
  Release(Pop(last, plan.cut, plan.active), plan.active);
  return plan.last;
}

// ---------------------------------------------------------------------- viewers

void BlockTree::ChangeViewers(BlockIndex index, ViewerChange change) noexcept {
  for (BlockIndex b = index; b != kNoBlock; b = block(b).parent) {
    Block& changed = at(b);
    const bool was_active = changed.is_active();
    const bool was_many = changed.is_seen_by_many();
    int64_t* const old_kind = KindOf(changed);
    changed.refs += change.refs;
    changed.active_refs += change.active;
    changed.many_children += change.many;
    changed.twins += change.twins;
    int64_t* const kind = KindOf(changed);
    if (kind != old_kind) {
      const int64_t pages = PagesThatBeginIn(b);
      if (old_kind != nullptr) *old_kind -= pages;
      if (kind != nullptr) *kind += pages;
    }
    change = {.active = changed.is_active() - was_active,
              .many = changed.is_seen_by_many() - was_many};
    if (change.active == 0 && change.many == 0) return;
  }
}

int64_t BlockTree::PagesThatBeginIn(BlockIndex index) const {
  int64_t count = 0;
  const BlockIndex parent = block(index).parent;
  for (int g = 0; g < group_count_; ++g) {
    count += slice(index, g).count - FreedCount(index, g);
    count -= parent != kNoBlock && slice(parent, g).next == index;
  }
  return count;
}

void BlockTree::SplitSlice(BlockIndex upper, BlockIndex lower, int group,
                           int64_t position) noexcept {
  PageSlice& low = slice_at(lower, group);
  const std::span<const PageEntry> table = entries(lower, group);
  const auto behind =
      std::lower_bound(table.begin() + 1, table.end(), position,
                       [](const PageEntry& entry, int64_t p) { return entry.start < p; });
  const int64_t upper_count = behind - table.begin();
  // The entry in which `position` lies belongs to both, unless it starts there.
  const bool straddles = behind == table.end() || behind->start > position;
  const int32_t border = table[static_cast<size_t>(upper_count) - 1].page;
  const bool goes_on = straddles && border != kNoPage;
  slice_at(upper, group) = {.array = low.array,
                            .tail = border,
                            .first = low.first,
                            .count = upper_count,
                            .done = {low.done.begin, std::min(low.done.end, position)},
                            .next = goes_on ? lower : kNoBlock,
                            .has_holes = low.has_holes};
  if (goes_on) pool(group).Hold(border);
  low.done.begin = std::max(low.done.begin, position);
  const BlockIndex above = block(upper).parent;
  if (above != kNoBlock && slice(above, group).next == lower) slice_at(above, group).next = upper;
  const int64_t skipped = upper_count - straddles;
  ++array_at(low.array).refs;
  low.first += skipped;
  low.count -= skipped;
  RecountFreed(slice_at(upper, group), group);
  RecountFreed(low, group);
}

// A new block takes the part of `index` above `position`; `index` keeps the rest, and with it its
// children and its sequences.
// REQUIRES: begin < position < end.
BlockIndex BlockTree::Split(BlockIndex index, int64_t position) noexcept {
  const BlockIndex upper = TakeBlock();
  Block& low = at(index);
  Block& up = at(upper);
  up.parent = low.parent;
  up.refs = 1;
  up.child_count = 1;
  up.child_xor = index;
  up.active_refs = low.is_active();
  up.many_children = low.is_seen_by_many();
  up.begin = low.begin;
  up.end = position;
  for (int g = 0; g < group_count(); ++g) SplitSlice(upper, index, g, position);
  if (up.parent != kNoBlock) at(up.parent).child_xor ^= index ^ upper;
  low.parent = upper;
  low.begin = position;
  if (tracks_hidden_) MoveViewsUp(upper, index);
  return upper;
}

BlockIndex BlockTree::ForkAt(BlockIndex last, int64_t position, bool active) noexcept {
  ++version_;
  if (position == 0) return kNoBlock;
  BlockIndex index = last;
  while (at(index).begin >= position) index = at(index).parent;
  QUIRE_CHECK(position <= at(index).end) << "fork at " << position << " of " << End(last);
  if (position < at(index).end) index = Split(index, position);
  ChangeViewers(index, {.refs = 1, .active = active});
  RefreshHidden(index);
  return index;
}

// REQUIRES: a leaf with one reference; begin < end < its end.
void BlockTree::Trim(BlockIndex index, int64_t end) noexcept {
  Block& leaf = at(index);
  distinct_token_count_ -= leaf.end - end;
  leaf.end = end;
  for (int g = 0; g < group_count(); ++g) {
    PageSlice& s = slice_at(index, g);
    const PageEntry* table = array_data(s.array) + s.first;
    for (; s.count > 1 && table[s.count - 1].start >= end; --s.count) {
      const int32_t page = table[s.count - 1].page;
      if (page != kNoPage) {
        pool(g).Release(page);
        CountPages(index, -1);
      } else {
        --s.freed;
      }
    }
    s.done.end = std::min(s.done.end, end);
    s.tail = table[s.count - 1].page;
    if (s.tail != kNoPage) pool(g).SetFillTo(s.tail, end);
  }
}

// Frees a leaf with one reference and returns its parent, to which the reference on the leaf has
// passed.
BlockIndex BlockTree::FreeLeaf(BlockIndex index) noexcept {
  Block& leaf = at(index);
  const BlockIndex parent = leaf.parent;
  distinct_token_count_ -= leaf.end - leaf.begin;
  CountPages(index, -PagesThatBeginIn(index));
  if (tracks_hidden_) DropViews(index);
  for (int g = 0; g < group_count(); ++g) {
    const std::span<const PageEntry> table = entries(index, g);
    for (size_t i = table.size(); i-- > 0;) {
      if (table[i].page == kNoPage) continue;
      const bool held = pool(g).Release(table[i].page);
      if (held)
        pool(g).SetFillTo(table[i].page,
                          leaf.begin);  // entry 0: its page is also the parent's last
    }
    DropArray(slice(index, g).array);
    slice_at(index, g) = {};
    if (parent != kNoBlock && slice(parent, g).next == index) slice_at(parent, g).next = kNoBlock;
  }
  if (parent != kNoBlock) {
    --at(parent).child_count;
    at(parent).child_xor ^= index;
  }
  leaf.refs = 0;
  free_blocks_.push_back(index);
  return parent;
}

BlockIndex BlockTree::Pop(BlockIndex last, int64_t length, bool active) noexcept {
  ++version_;
  QUIRE_CHECK(length <= End(last)) << "pop to " << length << " of " << End(last);
  while (End(last) > length) {
    if (at(last).refs > 1) {
      const BlockIndex shorter = ForkAt(last, length, active);
      DropReference(last, active);
      return shorter;
    }
    if (at(last).begin < length) {
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
  QUIRE_CHECK(at(index).refs > 1) << "block " << index << " would be lost";
  ChangeViewers(index, {.refs = -1, .active = -static_cast<int32_t>(active)});
  RefreshHidden(index);
  MergeIfLone(index);
}

bool BlockTree::ReserveMerge(BlockIndex upper, BlockIndex lower) noexcept {
  try {
    for (int g = 0; g < group_count(); ++g) {
      const PageSlice& up = slice(upper, g);
      const PageSlice& low = slice(lower, g);
      if (up.array == low.array) continue;
      ReserveGrowing(array_at(up.array).entries,
                     static_cast<size_t>(up.first + up.count + low.count));
    }
    return true;
  } catch (const std::bad_alloc&) {
    return false;
  }
}

void BlockTree::MergeSlices(BlockIndex upper, BlockIndex lower, int group) noexcept {
  PageSlice& up = slice_at(upper, group);
  PageSlice& low = slice_at(lower, group);
  const std::span<const PageEntry> table = entries(lower, group);
  const int32_t border = table.front().page;
  // A freed page is known by an entry that begins above the block.
  const bool is_known = border != kNoPage || table.front().start < block(lower).begin;
  const bool one_page = is_known && entries(upper, group).back().page == border;
  if (one_page && border != kNoPage)
    pool(group).Release(border);  // the merged block has one entry of it
  if (up.array != low.array) {
    std::vector<PageEntry>& target = array_at(up.array).entries;
    target.resize(static_cast<size_t>(up.first + up.count));
    target.insert(target.end(), table.begin() + one_page, table.end());
  }
  DropArray(low.array);
  const bool one_done = !up.done.empty() && !low.done.empty() && up.done.end == block(upper).end &&
                        low.done.begin == block(lower).begin;
  const HiddenPages done = one_done           ? HiddenPages{up.done.begin, low.done.end}
                           : low.done.empty() ? up.done
                                              : low.done;
  const BlockIndex above = block(upper).parent;
  if (above != kNoBlock && slice(above, group).next == upper) slice_at(above, group).next = lower;
  low = {.array = up.array,
         .tail = low.tail,
         .first = up.first,
         .count = up.count + low.count - one_page,
         .done = done,
         .next = low.next,
         .has_holes = up.has_holes || low.has_holes};
  up = {};
  RecountFreed(low, group);
}

// ---------------------------------------------------------------------- joining

// Joins `index` and its child if that is the only one and no sequence ends between them. The
// child's index stays, as sequences and blocks refer to it.
void BlockTree::MergeIfLone(BlockIndex index) noexcept {
  Block& upper = at(index);
  if (upper.refs != 1 || upper.child_count != 1) return;
  if (merges_deferred_) {
    if (!upper.merge_deferred) deferred_merges_.push_back(index);
    upper.merge_deferred = true;
    return;
  }
  const BlockIndex child = upper.child_xor;
  ++version_;  // arrays may move, even if memory is short in the end
  if (!ReserveMerge(index, child)) return;
  for (int g = 0; g < group_count(); ++g) MergeSlices(index, child, g);
  at(child).begin = upper.begin;
  at(child).parent = upper.parent;
  if (tracks_hidden_) MoveViewsDown(index, child);
  if (upper.parent != kNoBlock) at(upper.parent).child_xor ^= index ^ child;
  upper.refs = 0;
  free_blocks_.push_back(index);
}

void BlockTree::RunDeferredMerges() noexcept {
  merges_deferred_ = false;
  for (const BlockIndex index : deferred_merges_) {
    at(index).merge_deferred = false;
    MergeIfLone(index);
  }
  deferred_merges_.clear();
}

int64_t BlockTree::memory_bytes() const {
  const auto bytes_of = [](const auto& table) {
    return static_cast<int64_t>(table.capacity() * sizeof(table[0]));
  };
  int64_t bytes = bytes_of(blocks_) + bytes_of(slices_) + bytes_of(free_blocks_) +
                  bytes_of(arrays_) + bytes_of(free_arrays_) + bytes_of(deferred_merges_) +
                  bytes_of(views_) + bytes_of(hidden_in_) + bytes_of(may_free_);
  for (const PageArray& array : arrays_) bytes += bytes_of(array.entries);
  return bytes;
}

void BlockTree::Clear() noexcept {
  ++version_;
  for (PagePool& pages : pools_) pages.Reset();
  FreeAll(blocks_);
  FreeAll(slices_);
  FreeAll(free_blocks_);
  FreeAll(arrays_);
  FreeAll(free_arrays_);
  FreeAll(deferred_merges_);
  merges_deferred_ = false;
  std::fill(any_freed_.begin(), any_freed_.end(), uint8_t{0});
  distinct_token_count_ = 0;
  kinds_ = {};
  tracks_hidden_ = false;
  FreeAll(views_);
  FreeAll(hidden_in_);
  begins_.Clear();
  ends_.Clear();
  FreeAll(may_free_);
}

}  // namespace quire
