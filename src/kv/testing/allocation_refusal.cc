#include "kv/testing/allocation_refusal.h"

#include <atomic>

#include "base/testing/replaced_new.h"

namespace {

// Allocations that may still succeed; negative: all.
std::atomic<int64_t> allocations_left{-1};
std::atomic<int64_t> allocations_made{0};
std::atomic<int64_t> bytes_allocated{0};
std::atomic<bool> allocation_refused{false};

}  // namespace

namespace quire {

bool RefusesAllocation(size_t bytes) noexcept {
  allocations_made.fetch_add(1);
  bytes_allocated.fetch_add(static_cast<int64_t>(bytes));
  if (allocations_left.load() < 0 || allocations_left.fetch_sub(1) != 0) return false;
  allocation_refused.store(true);
  return true;
}

int64_t AllocationsMade() { return allocations_made.load(); }
int64_t BytesAllocated() { return bytes_allocated.load(); }

RefuseAllocation::RefuseAllocation(int64_t n) {
  allocation_refused.store(false);
  allocations_left.store(n);
}
RefuseAllocation::~RefuseAllocation() { allocations_left.store(-1); }
bool RefuseAllocation::refused() const { return allocation_refused.load(); }

}  // namespace quire
