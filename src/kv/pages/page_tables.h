// PageTables: which pages hold a block's tokens. It owns the page pools of all groups, the page
// arrays, and the slices of arrays that blocks have (block_tree.h has the rules).
//
// Invariants, for each group:
// - Slices of one array belong to consecutive blocks of one path and follow one another in it; two
//   neighbours share at most the entry at their border. PageArray::refs counts them.
// - A page is held once for each slice that has an entry of it. PageSlice::tail is the page of the
//   last entry. PageSlice::freed counts the entries without a page, the first aside.
// - PageSlice::next of a block is its child that has the last entry's page too, if there is one.
// - Entries without a page exist only in groups whose any_freed is set.
#ifndef QUIRE_KV_PAGES_PAGE_TABLES_H_
#define QUIRE_KV_PAGES_PAGE_TABLES_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "base/check.h"
#include "kernels/kv_layout.h"
#include "kv/pages/page_pool.h"
#include "kv/pages/reserve.h"

namespace quire {

using BlockIndex = int32_t;
inline constexpr BlockIndex kNoBlock = -1;

// Positions [begin, end) that are hidden, in whole page ranges; empty is {0, 0}.
struct HiddenPages {
  int64_t begin = 0;
  int64_t end = 0;
  bool empty() const { return begin >= end; }
  bool operator==(const HiddenPages&) const = default;
};

// New positions [begin, end) that get no page: nothing will ever look at them.
struct AbsentRange {
  int64_t begin = 0;
  int64_t end = 0;
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

class PageTables {
 public:
  explicit PageTables(std::vector<PagePool> pools)
      : pools_(std::move(pools)),
        group_count_(static_cast<int>(pools_.size())),
        any_freed_(pools_.size(), 0) {}

  int group_count() const { return group_count_; }
  const PagePool& pool(int group) const { return pools_[static_cast<size_t>(group)]; }
  PagePool& pool(int group) { return pools_[static_cast<size_t>(group)]; }

  // ---- Slices and their entries.
  size_t SlotOf(BlockIndex index, int group) const {
    QUIRE_DCHECK(index >= 0 && group >= 0 && group < group_count_);
    return static_cast<size_t>(index) * static_cast<size_t>(group_count_) +
           static_cast<size_t>(group);
  }
  const PageSlice& slice(BlockIndex index, int group) const {
    return slices_[SlotOf(index, group)];
  }
  PageSlice& slice_at(BlockIndex index, int group) { return slices_[SlotOf(index, group)]; }
  const PageEntry* array_data(int32_t array) const {
    return arrays_[static_cast<size_t>(array)].entries.data();
  }
  std::span<const PageEntry> entries(const PageSlice& s) const {
    return {array_data(s.array) + s.first, static_cast<size_t>(s.count)};
  }
  std::span<const PageEntry> entries(BlockIndex index, int group) const {
    return entries(slice(index, group));
  }
  // The first entry behind the table's first that starts at or behind `position`.
  static size_t FirstEntryFrom(std::span<const PageEntry> table, int64_t position) {
    QUIRE_DCHECK(!table.empty()) << "a slice has an entry";
    const auto starts_before = [](const PageEntry& entry, int64_t p) { return entry.start < p; };
    return static_cast<size_t>(
        std::lower_bound(table.begin() + 1, table.end(), position, starts_before) - table.begin());
  }
  int32_t array_refs(int32_t array) const { return arrays_[static_cast<size_t>(array)].refs; }
  int64_t array_count() const { return static_cast<int64_t>(arrays_.size()); }
  // Entries of all arrays, those without a page included.
  int64_t entry_count() const;
  // Entries of the slice that have no page.
  int64_t FreedCount(BlockIndex index, int group) const {
    if (!any_freed(group)) return 0;
    return slice(index, group).freed + (entries(index, group).front().page < 0);
  }
  // Whether an entry of the group has lost its page since the last Clear.
  bool any_freed(int group) const { return any_freed_[static_cast<size_t>(group)] != 0; }
  // Whether the block's array in each group takes one more entry where it is.
  bool HasRoomForEntry(BlockIndex index) const {
    for (int g = 0; g < group_count_; ++g) {
      const PageSlice& s = slice(index, g);
      const size_t size = static_cast<size_t>(s.first + s.count) + 1;
      if (arrays_[static_cast<size_t>(s.array)].entries.capacity() < size) return false;
    }
    return true;
  }
  // Another number after every call that may have changed a block or a slice, or changed or moved
  // an array.
  uint64_t version() const { return version_; }
  void Change() noexcept { ++version_; }

  // ---- New positions fall into pieces: each in one page range, left out or not as a whole.
  struct NewPiece {
    int64_t end = 0;
    bool is_absent = false;
  };
  // The first piece of [from, end).
  NewPiece FirstNewPiece(int group, const AbsentRange& absent, int64_t from, int64_t end) const {
    QUIRE_DCHECK(from < end);
    const bool is_absent = absent.begin <= from && from < absent.end;
    if (end - from == 1) return {end, is_absent};
    int64_t to = std::min(end, pool(group).RangeEnd(from));
    if (is_absent) to = std::min(to, absent.end);
    if (from < absent.begin) to = std::min(to, absent.begin);
    return {to, is_absent};
  }
  // f(from, to, is_absent) for all pieces, the lowest first.
  template <typename F>
  void ForEachNewPiece(int group, const AbsentRange& absent, int64_t from, int64_t end,
                       F&& f) const {
    while (from < end) {
      const NewPiece piece = FirstNewPiece(group, absent, from, end);
      f(from, piece.end, piece.is_absent);
      from = piece.end;
    }
  }
  struct NewPieces {
    int64_t held = 0;
    int64_t absent = 0;
  };
  NewPieces CountNewPieces(int group, const AbsentRange& absent, int64_t from, int64_t end) const {
    if (absent.begin < absent.end) return CountPiecesAround(group, absent, from, end);
    if (end - from == 1) return {.held = 1};
    return {.held = pool(group).RangeCount(from, end)};
  }

  // ---- Memory, before commits. May throw std::bad_alloc.
  // Room for the slices of `count` blocks; GrowSlices makes them.
  void ReserveSlices(size_t count) { slices_.reserve(count * pools_.size()); }
  void GrowSlices(size_t count) noexcept { slices_.resize(count * pools_.size()); }
  void EnsureFreeArrays(size_t count);
  // The n-th array that TakeArray will return, n = 0 the next one.
  int32_t FreeArray(size_t n) const {
    QUIRE_DCHECK(n < free_arrays_.size());
    return free_arrays_[free_arrays_.size() - 1 - n];
  }
  void PrefetchFreeArrays(size_t count) const;
  void PrefetchArray(int32_t array) const {
    __builtin_prefetch(&arrays_[static_cast<size_t>(array)]);
  }
  // Room for `added` entries after the first ones. `trims`: the array's memory is given back if it
  // is much more.
  void ReserveEntries(int32_t array, size_t first, size_t added, bool trims) {
    std::vector<PageEntry>& table = array_at(array).entries;
    if (trims && table.capacity() / 4 > first + added + kEntriesKept) {
      table.resize(first);  // what lies behind is of descendants that are gone
      ReleaseUnused(table);
    }
    ReserveGrowing(table, first + added);
    __builtin_prefetch(table.data() + first, 1);
  }
  // Room for Merge in all groups. False: there is no memory.
  bool ReserveMerge(BlockIndex upper, BlockIndex lower) noexcept;

  // ---- Commits. A slice of a leaf ends where the leaf does.
  int32_t TakeArray() noexcept {
    QUIRE_CHECK(!free_arrays_.empty()) << "a page array is taken that was not reserved";
    const int32_t array = free_arrays_.back();
    free_arrays_.pop_back();
    array_at(array).refs = 1;
    return array;
  }
  // The first entry of a new slice: `page`, which another slice has too.
  void StartInPage(PageSlice& s, int group, int64_t start, int32_t page) noexcept {
    QUIRE_DCHECK(s.count == 0 && page != kNoPage);
    pool(group).Hold(page);
    array_at(s.array).entries.push_back({.start = start, .page = page});
    s.tail = page;
    s.count = 1;
  }
  // The first `count` entries of a new slice, for the caller to fill in, with any page where one is
  // to be taken; then TakePages takes these. The last entry's tokens end at `end`.
  std::span<PageEntry> StartEntries(PageSlice& s, size_t count) noexcept;
  void TakePages(PageSlice& s, int group, int64_t end) noexcept;
  // New tokens [from, end) go on in `page`, of which the slice has an entry already; kNoPage: they
  // do not. Returns where they go on behind it.
  int64_t GoOnInPage(int32_t page, int group, int64_t from, int64_t end,
                     const AbsentRange& absent) noexcept {
    if (page == kNoPage || from == end) return from;
    const NewPiece piece = FirstNewPiece(group, absent, from, end);
    if (piece.is_absent) return from;
    pool(group).SetFillTo(page, piece.end);
    return piece.end;
  }
  // Entries for [from, end), which open pages, behind those of the slice of a leaf that ends there.
  // Inline: it is small beside the call, as are the others that Append calls.
  void AddEntries(PageSlice& s, int group, int64_t from, int64_t end,
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
  // `upper` gets what `lower` has above `position`. `above`: their parent, or kNoBlock.
  void Split(BlockIndex upper, BlockIndex lower, BlockIndex above, int group,
             int64_t position) noexcept;
  // `lower`, which follows `upper` at `border`, gets what both have. REQUIRES: ReserveMerge.
  void Merge(BlockIndex upper, BlockIndex lower, BlockIndex above, int group,
             int64_t border) noexcept;
  // The slice of a leaf ends at `end` from now on. Returns the number of pages given back.
  int64_t Trim(BlockIndex leaf, int group, int64_t end) noexcept {
    PageSlice& s = slice_at(leaf, group);
    QUIRE_DCHECK(s.count >= 1) << "a slice has an entry";
    const PageEntry* const table = array_data(s.array) + s.first;
    int64_t released = 0;
    for (; s.count > 1 && table[s.count - 1].start >= end; --s.count) {
      const int32_t page = table[s.count - 1].page;
      if (page != kNoPage) {
        pool(group).Release(page);
        ++released;
      } else {
        --s.freed;
      }
    }
    QUIRE_DCHECK(s.freed >= 0);
    s.done.end = std::min(s.done.end, end);
    s.tail = table[s.count - 1].page;
    if (s.tail != kNoPage) pool(group).SetFillTo(s.tail, end);
    return released;
  }
  // The slice of a leaf goes; the page that it shares with its parent is filled to `begin`.
  void Drop(BlockIndex leaf, BlockIndex parent, int group, int64_t begin) noexcept;

  // ---- Freed pages.
  // The entry's page is freed, here and in the slices below that have it. Returns the number of
  // those. REQUIRES: it has one, which no slice above has.
  int64_t FreePage(BlockIndex index, int group, int64_t entry) noexcept;
  // Joins entries without a page that follow one another, where there are more of them than of
  // others. `is_leaf`: the block has no children. Returns the number of entries looked at.
  int64_t JoinFreed(BlockIndex index, int group, bool is_leaf) noexcept;

  // Gives all memory back but that of the pools.
  void Clear() noexcept;
  int64_t memory_bytes() const;

 private:
  // Entries of an array that keeps its memory when it becomes free: of sequences of some thousand
  // tokens.
  static constexpr size_t kEntriesKept = 256;
  struct PageArray {
    std::vector<PageEntry> entries;
    int32_t refs = 0;  // slices of it
  };

  PageArray& array_at(int32_t array) { return arrays_[static_cast<size_t>(array)]; }
  NewPieces CountPiecesAround(int group, const AbsentRange& absent, int64_t from,
                              int64_t end) const;
  void DropArray(int32_t array) noexcept;
  void RecountFreed(PageSlice& s, int group) noexcept;
  [[noreturn]] static void FailUnreserved(int32_t array);

  std::vector<PagePool> pools_;
  int group_count_;                // their number
  std::vector<PageSlice> slices_;  // [block][group]
  std::vector<PageArray> arrays_;
  std::vector<int32_t> free_arrays_;  // a stack; capacity arrays_.size()
  std::vector<uint8_t> any_freed_;    // [group]
  uint64_t version_ = 1;
};

}  // namespace quire

#endif  // QUIRE_KV_PAGES_PAGE_TABLES_H_
