#include "kv/allocation_refusal.h"

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <new>

namespace {

// Allocations that may still succeed; negative: all.
std::atomic<int64_t> allocations_left{-1};
std::atomic<int64_t> allocations_made{0};
std::atomic<bool> allocation_refused{false};

void* AllocateOrThrow(size_t size, size_t alignment) {
  allocations_made.fetch_add(1);
  if (allocations_left.load() >= 0 && allocations_left.fetch_sub(1) == 0) {
    allocation_refused.store(true);
    throw std::bad_alloc();
  }
  const size_t rounded = (size + alignment - 1) / alignment * alignment;
  void* memory = std::aligned_alloc(alignment, rounded == 0 ? alignment : rounded);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

constexpr size_t kUsualAlignment = alignof(std::max_align_t);

}  // namespace

void* operator new(size_t size) { return AllocateOrThrow(size, kUsualAlignment); }
void* operator new[](size_t size) { return AllocateOrThrow(size, kUsualAlignment); }
void* operator new(size_t size, std::align_val_t alignment) {
  return AllocateOrThrow(size, static_cast<size_t>(alignment));
}
void* operator new[](size_t size, std::align_val_t alignment) {
  return AllocateOrThrow(size, static_cast<size_t>(alignment));
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, size_t, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, size_t, std::align_val_t) noexcept { std::free(memory); }

namespace quire {

int64_t AllocationsMade() { return allocations_made.load(); }

RefuseAllocation::RefuseAllocation(int64_t n) {
  allocation_refused.store(false);
  allocations_left.store(n);
}
RefuseAllocation::~RefuseAllocation() { allocations_left.store(-1); }
bool RefuseAllocation::refused() const { return allocation_refused.load(); }

}  // namespace quire
