#include "kv/page_pool.h"

#include <bit>

#include "base/check.h"

namespace quire {

PagePool::PagePool(int64_t page_size, int64_t page_count)
    : page_size_(page_size),
      page_shift_(std::has_single_bit(static_cast<uint64_t>(page_size))
                      ? std::countr_zero(static_cast<uint64_t>(page_size))
                      : -1),
      pages_(static_cast<size_t>(page_count)) {
  free_.reserve(pages_.size());
  FillFreeList();
}

void PagePool::FillFreeList() noexcept {
  free_.clear();
  for (size_t i = pages_.size(); i-- > 0;) free_.push_back(static_cast<int32_t>(i));
}

int32_t PagePool::Take() noexcept {
  QUIRE_CHECK(!free_.empty()) << "a page is taken that was not reserved";
  const int32_t page = free_.back();
  free_.pop_back();
  pages_[static_cast<size_t>(page)] = {.holds = 1, .fill = 0, .mark = 0};
  return page;
}

void PagePool::Hold(int32_t page) noexcept {
  QUIRE_CHECK(holds(page) > 0) << "page " << page << " is free";
  ++pages_[static_cast<size_t>(page)].holds;
}

bool PagePool::Release(int32_t page) noexcept {
  QUIRE_CHECK(holds(page) > 0) << "page " << page << " is free";
  Page& entry = pages_[static_cast<size_t>(page)];
  if (--entry.holds > 0) return true;
  entry.fill = 0;
  entry.mark = 0;
  free_.push_back(page);
  if (listener_ != nullptr) listener_->OnPageFreed(group_, page);
  return false;
}

void PagePool::SetFillTo(int32_t page, int64_t end) noexcept {
  QUIRE_CHECK(holds(page) > 0) << "page " << page << " is free";
  QUIRE_CHECK(end > 0) << "page " << page;
  pages_[static_cast<size_t>(page)].fill = static_cast<int32_t>(Slot(end - 1) + 1);
}

void PagePool::Reset() noexcept {
  for (size_t i = 0; i < pages_.size(); ++i) {
    if (pages_[i].holds == 0) continue;
    pages_[i] = {};
    if (listener_ != nullptr) listener_->OnPageFreed(group_, static_cast<int32_t>(i));
  }
  FillFreeList();
}

}  // namespace quire
