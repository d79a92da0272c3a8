#include "kv/pages/page_tables.h"

#include <cstdlib>
#include <new>

#include "kv/pages/reserve.h"

namespace quire {
namespace {

// Entries without a page that a slice may have beyond as many as it has of others.
constexpr int64_t kFreedEntriesMax = 4;

}  // namespace

// ---------------------------------------------------------------------- queries

int64_t PageTables::entry_count() const {
  int64_t count = 0;
  for (const PageArray& array : arrays_) count += static_cast<int64_t>(array.entries.size());
  return count;
}

PageTables::NewPieces PageTables::CountPiecesAround(int group, const AbsentRange& absent,
                                                    int64_t from, int64_t end) const {
  NewPieces pieces;
  ForEachNewPiece(group, absent, from, end, [&](int64_t, int64_t, bool is_absent) {
    ++(is_absent ? pieces.absent : pieces.held);
  });
  return pieces;
}

// ---------------------------------------------------------------------- memory

void PageTables::EnsureFreeArrays(size_t count) {
  if (free_arrays_.size() >= count) return;
  const size_t old_size = arrays_.size();
  const size_t size = std::max(old_size + count - free_arrays_.size(), 2 * old_size);
  free_arrays_.reserve(size);
  arrays_.resize(size);
  for (size_t i = size; i-- > old_size;) free_arrays_.push_back(static_cast<int32_t>(i));
}

void PageTables::PrefetchFreeArrays(size_t count) const {
  for (const int32_t array : std::span(free_arrays_).last(std::min(count, free_arrays_.size())))
    __builtin_prefetch(&arrays_[static_cast<size_t>(array)], 1);
}

bool PageTables::ReserveMerge(BlockIndex upper, BlockIndex lower) noexcept {
  try {
    for (int g = 0; g < group_count_; ++g) {
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

// ---------------------------------------------------------------------- commits

void PageTables::DropArray(int32_t array) noexcept {
  QUIRE_DCHECK(array_at(array).refs > 0) << "page array " << array << " is free";
  if (--array_at(array).refs > 0) return;
  std::vector<PageEntry>& entries = array_at(array).entries;
  entries.clear();  // keeps its memory for the next user, unless that is much
  if (entries.capacity() > kEntriesKept) FreeAll(entries);
  free_arrays_.push_back(array);
}

void PageTables::FailUnreserved(int32_t array) {
  QUIRE_CHECK(false) << "page array " << array << " was not reserved";
  std::abort();  // not reached
}

std::span<PageEntry> PageTables::StartEntries(PageSlice& s, size_t count) noexcept {
  QUIRE_DCHECK(s.count == 0);
  std::vector<PageEntry>& table = array_at(s.array).entries;
  if (count > table.capacity()) FailUnreserved(s.array);
  table.resize(count);
  s.count = static_cast<int64_t>(count);
  return table;
}

void PageTables::TakePages(PageSlice& s, int group, int64_t end) noexcept {
  std::vector<PageEntry>& table = array_at(s.array).entries;
  QUIRE_DCHECK(!table.empty());
  QUIRE_DCHECK(s.first == 0 && std::ssize(table) == s.count)
      << "the array is not the slice's alone";
  for (size_t i = 0; i < table.size(); ++i) {
    QUIRE_DCHECK(table[i].start < (i + 1 < table.size() ? table[i + 1].start : end));
    if (table[i].page == kNoPage) {
      s.has_holes = true;
      continue;
    }
    table[i].page = pool(group).Take(i + 1 < table.size() ? table[i + 1].start : end);
  }
  s.tail = table.back().page;
  RecountFreed(s, group);
}

void PageTables::RecountFreed(PageSlice& s, int group) noexcept {
  s.freed = 0;
  if (any_freed_[static_cast<size_t>(group)] == 0) return;
  for (const PageEntry& entry : entries(s).subspan(1)) s.freed += entry.page == kNoPage;
}

void PageTables::Split(BlockIndex upper, BlockIndex lower, BlockIndex above, int group,
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
  if (above != kNoBlock && slice(above, group).next == lower) slice_at(above, group).next = upper;
  const int64_t skipped = upper_count - straddles;
  ++array_at(low.array).refs;
  low.first += skipped;
  low.count -= skipped;
  QUIRE_DCHECK(low.count > 0) << "block " << lower << " has no entry";
  RecountFreed(slice_at(upper, group), group);
  RecountFreed(low, group);
}

void PageTables::Merge(BlockIndex upper, BlockIndex lower, BlockIndex above, int group,
                       int64_t border) noexcept {
  PageSlice& up = slice_at(upper, group);
  PageSlice& low = slice_at(lower, group);
  const std::span<const PageEntry> table = entries(lower, group);
  const int32_t page = table.front().page;
  // A freed page is known by an entry that begins above the block.
  const bool is_known = page != kNoPage || table.front().start < border;
  const bool one_page = is_known && entries(upper, group).back().page == page;
  if (one_page && page != kNoPage)
    pool(group).Release(page);  // the merged block has one entry of it
  if (up.array != low.array) {
    std::vector<PageEntry>& target = array_at(up.array).entries;
    target.resize(static_cast<size_t>(up.first + up.count));
    QUIRE_DCHECK(target.capacity() >= target.size() + table.size()) << "no room was reserved";
    target.insert(target.end(), table.begin() + one_page, table.end());
  }
  DropArray(low.array);
  const bool one_done =
      !up.done.empty() && !low.done.empty() && up.done.end == border && low.done.begin == border;
  const HiddenPages done = one_done           ? HiddenPages{up.done.begin, low.done.end}
                           : low.done.empty() ? up.done
                                              : low.done;
  if (above != kNoBlock && slice(above, group).next == upper) slice_at(above, group).next = lower;
  QUIRE_DCHECK(up.count + low.count > one_page);
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

void PageTables::Drop(BlockIndex leaf, BlockIndex parent, int group, int64_t begin) noexcept {
  const std::span<const PageEntry> table = entries(leaf, group);
  for (size_t i = table.size(); i-- > 0;) {
    if (table[i].page == kNoPage) continue;
    // A page that is still held is that of entry 0, which is also the parent's last.
    if (pool(group).Release(table[i].page)) pool(group).SetFillTo(table[i].page, begin);
  }
  DropArray(slice(leaf, group).array);
  slice_at(leaf, group) = {};
  if (parent != kNoBlock && slice(parent, group).next == leaf)
    slice_at(parent, group).next = kNoBlock;
}

// ---------------------------------------------------------------------- freed pages

int64_t PageTables::FreePage(BlockIndex index, int group, int64_t entry) noexcept {
  PageSlice* s = &slice_at(index, group);
  PageEntry* table = array_at(s->array).entries.data() + s->first;
  const int32_t page = table[entry].page;
  QUIRE_DCHECK(page != kNoPage) << "entry " << entry << " of block " << index << " has no page";
  table[entry].page = kNoPage;
  s->freed += entry > 0;
  any_freed_[static_cast<size_t>(group)] = 1;
  // The others have it in their first entries.
  int64_t others = 0;
  bool is_last = entry == s->count - 1;
  while (is_last) {
    s->tail = kNoPage;
    const BlockIndex next = s->next;
    s->next = kNoBlock;
    if (next == kNoBlock) break;
    ++others;
    s = &slice_at(next, group);
    array_at(s->array).entries[static_cast<size_t>(s->first)].page = kNoPage;
    is_last = s->count == 1;
  }
  QUIRE_DCHECK(pool(group).holds(page) == others + 1) << "page " << page << " is in other slices";
  while (pool(group).holds(page) > 0) pool(group).Release(page);
  return others;
}

// Not before there are more of them than of others: so the time for it is in the order of the pages
// that were freed. And only where no other slice lies behind in the array.
int64_t PageTables::JoinFreed(BlockIndex index, int group, bool is_leaf) noexcept {
  PageSlice& s = slice_at(index, group);
  if (s.freed <= kFreedEntriesMax + s.count - s.freed) return 0;
  PageArray& array = array_at(s.array);
  if (array.refs > 1 && !is_leaf) return 0;
  ++version_;  // a plan must not go on with these entries
  std::vector<PageEntry>& table = array.entries;
  const size_t first = static_cast<size_t>(s.first);
  const size_t end = first + static_cast<size_t>(s.count);
  size_t kept = first;
  for (size_t i = first + 1; i < end; ++i) {
    if (table[i].page == kNoPage && table[kept].page == kNoPage) continue;
    table[++kept] = table[i];
  }
  table.resize(kept + 1);
  s.count = static_cast<int64_t>(kept + 1 - first);
  s.has_holes = true;
  RecountFreed(s, group);
  return static_cast<int64_t>(end - first - 1);
}

// ---------------------------------------------------------------------- all of it

void PageTables::Clear() noexcept {
  ++version_;
  for (PagePool& pages : pools_) pages.Reset();
  FreeAll(slices_);
  FreeAll(arrays_);
  FreeAll(free_arrays_);
  std::fill(any_freed_.begin(), any_freed_.end(), uint8_t{0});
}

int64_t PageTables::memory_bytes() const {
  const auto bytes_of = [](const auto& table) {
    return static_cast<int64_t>(table.capacity() * sizeof(table[0]));
  };
  int64_t bytes = bytes_of(slices_) + bytes_of(arrays_) + bytes_of(free_arrays_);
  for (const PageArray& array : arrays_) bytes += bytes_of(array.entries);
  return bytes;
}

}  // namespace quire
