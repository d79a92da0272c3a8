// PagePool: which pages of one group of layers are free, how often the others are held and how far
// they are filled.
#ifndef QUIRE_KV_PAGES_PAGE_POOL_H_
#define QUIRE_KV_PAGES_PAGE_POOL_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/check.h"

namespace quire {

inline constexpr int32_t kNoPage = -1;

// Is told when a page becomes free (tests fill it with NaN).
class PageFreeListener {
 public:
  virtual void OnPageFreed(int group, int32_t page) noexcept = 0;

 protected:
  ~PageFreeListener() = default;
};

// Life of a page: free -> Take (one holder, fill 0) -> Hold and Release by further holders -> the
// last Release frees it.
//
// The fill is the end of the slots that hold tokens. It is set by the block tree, which knows the
// holders: it is the end of the deepest holder, so a slot at or behind the fill is seen by nobody.
//
// Order: pages that were never taken come out ascending from 0; freed pages come out again
// last-freed first.
class PagePool {
 public:
  // Allocates all memory that the pool ever needs. REQUIRES: page_size >= 1, 1 <= page_count <=
  // INT32_MAX.
  PagePool(int64_t page_size, int64_t page_count);

  int64_t page_size() const { return page_size_; }
  int64_t page_count() const { return static_cast<int64_t>(pages_.size()); }
  int64_t free_count() const { return static_cast<int64_t>(free_.size()); }
  int64_t used_count() const { return page_count() - free_count(); }
  int32_t holds(int32_t page) const { return PageAt(page).holds; }
  int32_t fill(int32_t page) const { return PageAt(page).fill; }
  bool FillIs(int32_t page, int64_t slot) const { return page != kNoPage && fill(page) == slot; }
  const std::vector<int32_t>& free_pages() const { return free_; }

  // The first position of the page-sized range around `position`, and the slot of `position` in its
  // page.
  int64_t RangeBegin(int64_t position) const { return position - Slot(position); }
  int64_t RangeEnd(int64_t position) const { return RangeBegin(position) + page_size_; }
  int64_t Slot(int64_t position) const {
    return page_shift_ >= 0 ? position & (page_size_ - 1) : position % page_size_;
  }
  // Page ranges that [begin, end) touches. REQUIRES: begin <= end.
  int64_t RangeCount(int64_t begin, int64_t end) const {
    QUIRE_DCHECK(begin <= end);
    return begin == end ? 0 : RangeIndex(end - 1) - RangeIndex(begin) + 1;
  }

  // REQUIRES: free_count() > 0.
  int32_t Take() noexcept { return TakeWithFill(0); }
  // The same, and SetFillTo.
  int32_t Take(int64_t end) noexcept { return TakeWithFill(FillTo(end)); }
  void Hold(int32_t page) noexcept { ++HeldPage(page).holds; }
  // Returns whether other holders remain.
  bool Release(int32_t page) noexcept {
    Page& held = HeldPage(page);
    if (--held.holds > 0) return true;
    held.fill = 0;
    QUIRE_DCHECK(free_count() < page_count()) << "a free page is freed";
    free_.push_back(page);
    if (listener_ != nullptr) listener_->OnPageFreed(group_, page);
    return false;
  }
  // The tokens of `page` end before `end`, a position in its range or the range's end, above 0.
  void SetFillTo(int32_t page, int64_t end) noexcept { HeldPage(page).fill = FillTo(end); }

  // Tells the processor that these are about to be used.
  void Prefetch(int32_t page) const {
    if (page >= 0) __builtin_prefetch(&pages_[static_cast<size_t>(page)], 1);
  }
  // The next `count` pages that Take will give.
  void PrefetchFree(int64_t count) const {
    QUIRE_DCHECK(count <= free_count());
    for (const int32_t page : std::span(free_).last(static_cast<size_t>(count))) Prefetch(page);
  }

  // All pages free, in the order of a new pool.
  void Reset() noexcept;
  void set_listener(PageFreeListener* listener, int group) {
    listener_ = listener;
    group_ = group;
  }

 private:
  struct Page {
    int32_t holds = 0;
    int32_t fill = 0;
  };
  const Page& PageAt(int32_t page) const {
    QUIRE_DCHECK(page >= 0 && page < page_count()) << "no page " << page;
    return pages_[static_cast<size_t>(page)];
  }
  int32_t FillTo(int64_t end) const {
    QUIRE_DCHECK(end > 0);
    return static_cast<int32_t>(Slot(end - 1) + 1);
  }
  int32_t TakeWithFill(int32_t fill) noexcept {
    if (free_.empty()) [[unlikely]]
      FailEmpty();
    const int32_t page = free_.back();
    free_.pop_back();
    pages_[static_cast<size_t>(page)] = {.holds = 1, .fill = fill};
    return page;
  }
  Page& HeldPage(int32_t page) {
    Page& entry = pages_[static_cast<size_t>(page)];
    if (entry.holds <= 0) [[unlikely]]
      FailFree(page);
    return entry;
  }
  [[noreturn]] static void FailFree(int32_t page);
  [[noreturn]] static void FailEmpty();
  int64_t RangeIndex(int64_t position) const {
    return page_shift_ >= 0 ? position >> page_shift_ : position / page_size_;
  }
  void FillFreeList() noexcept;

  int64_t page_size_;
  int page_shift_;  // log2 of a page size that is a power of two, else -1: a division takes longer
                    // than all else here
  std::vector<Page> pages_;
  std::vector<int32_t> free_;  // a stack; its capacity is page_count from the start
  PageFreeListener* listener_ = nullptr;
  int group_ = 0;
};

}  // namespace quire

#endif  // QUIRE_KV_PAGES_PAGE_POOL_H_
