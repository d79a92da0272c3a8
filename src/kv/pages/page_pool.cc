#include "kv/pages/page_pool.h"

#include <bit>
#include <cstdlib>

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

void PagePool::FailFree(int32_t page) {
  QUIRE_CHECK(false) << "page " << page << " is free";
  std::abort();  // not reached
}

void PagePool::FailEmpty() {
  QUIRE_CHECK(false) << "a page is taken that was not reserved";
  std::abort();  // not reached
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
