#include "kv/pages/slot_pool.h"

#include "base/check.h"

namespace quire {

SlotPool::SlotPool(int64_t slot_count) : holders_(static_cast<size_t>(slot_count), 0) {
  free_.reserve(holders_.size());
  for (int64_t slot = slot_count; slot-- > 0;) free_.push_back(static_cast<int32_t>(slot));
}

int32_t SlotPool::Take() noexcept {
  QUIRE_CHECK(!free_.empty()) << "no slot was reserved";
  const int32_t slot = free_.back();
  free_.pop_back();
  holders_[static_cast<size_t>(slot)] = 1;
  return slot;
}

void SlotPool::Release(int32_t slot) noexcept {
  int32_t& holders = holders_[static_cast<size_t>(slot)];
  QUIRE_CHECK(holders > 0) << "slot " << slot << " has no holder";
  if (--holders != 0) return;
  free_.push_back(slot);
  if (listener_ != nullptr) listener_->OnSlotFreed(slot);
}

}  // namespace quire
