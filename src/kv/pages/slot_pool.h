// SlotPool: which slots of equal size are held, and how often.
#ifndef QUIRE_KV_PAGES_SLOT_POOL_H_
#define QUIRE_KV_PAGES_SLOT_POOL_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/check.h"

namespace quire {

// Hears of slots that became free, to poison them.
class SlotFreeListener {
 public:
  virtual ~SlotFreeListener() = default;
  virtual void OnSlotFreed(int32_t slot) noexcept = 0;
};

// A holder is a place in a sequence. Nothing allocates after creation.
class SlotPool {
 public:
  explicit SlotPool(int64_t slot_count);

  void set_listener(SlotFreeListener* listener) { listener_ = listener; }

  int64_t slot_count() const { return static_cast<int64_t>(holders_.size()); }
  int64_t free_count() const { return static_cast<int64_t>(free_.size()); }
  int32_t holder_count(int32_t slot) const {
    QUIRE_DCHECK(slot >= 0 && slot < slot_count()) << "no slot " << slot;
    return holders_[static_cast<size_t>(slot)];
  }

  // The slot freed last, with one holder. REQUIRES: free_count() > 0.
  int32_t Take() noexcept;
  void Hold(int32_t slot) noexcept {
    QUIRE_DCHECK(holder_count(slot) > 0) << "slot " << slot << " is free";
    ++holders_[static_cast<size_t>(slot)];
  }
  void Release(int32_t slot) noexcept;

  const std::vector<int32_t>& free_slots() const { return free_; }

 private:
  std::vector<int32_t> holders_;  // [slot]
  std::vector<int32_t> free_;     // capacity is slot_count
  SlotFreeListener* listener_ = nullptr;
};

}  // namespace quire

#endif  // QUIRE_KV_PAGES_SLOT_POOL_H_
