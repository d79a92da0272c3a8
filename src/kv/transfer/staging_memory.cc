#include "kv/transfer/staging_memory.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/check.h"

namespace quire {

Result<std::unique_ptr<std::byte[]>> StagingMemory::TakeLocked(int64_t bytes) {
  if (bytes > use_.limit) {
    return Status(StatusCode::kTooLarge,
                  "View: the part has " + std::to_string(bytes) +
                      " bytes, and the staging memory of its receiver " +
                      std::to_string(use_.limit) +
                      "; raise staging_bytes there, or send fewer rows at a time");
  }
  if (bytes > use_.limit - use_.held) {
    return Status(StatusCode::kFull, "View: the part has " + std::to_string(bytes) +
                                         " bytes; other parts hold " + std::to_string(use_.held) +
                                         " of " + std::to_string(use_.limit) +
                                         " bytes of staging memory; ask again when one is stored");
  }
  std::unique_ptr<std::byte[]> spare = spare_.Take(bytes);
  use_.held += bytes;
  use_.largest = std::max(use_.largest, use_.held);
  ShrinkSpareLocked();
  return spare;
}

Result<std::shared_ptr<std::byte[]>> StagingMemory::Take(const std::shared_ptr<StagingMemory>& from,
                                                         int64_t bytes) {
  QUIRE_DCHECK(bytes > 0);
  std::unique_ptr<std::byte[]> memory;
  {
    const std::lock_guard lock(from->mutex_);
    QUIRE_ASSIGN_OR_RETURN(memory, from->TakeLocked(bytes));
  }
  if (memory == nullptr) {
    try {
      memory = std::make_unique_for_overwrite<std::byte[]>(static_cast<size_t>(bytes));
    } catch (...) {
      from->GiveBack(nullptr, bytes);
      throw;
    }
  }
  // Without memory for the count of its holders, shared_ptr calls this at once.
  return std::shared_ptr<std::byte[]>(memory.release(), [from, bytes](std::byte* held) {
    from->GiveBack(std::unique_ptr<std::byte[]>(held), bytes);
  });
}

void StagingMemory::GiveBack(std::unique_ptr<std::byte[]> memory, int64_t bytes) noexcept {
  const std::lock_guard lock(mutex_);
  use_.held -= bytes;
  QUIRE_DCHECK(use_.held >= 0) << "memory came back twice";
  if (memory != nullptr) spare_.Give(std::move(memory), bytes);
  ShrinkSpareLocked();
}

void StagingMemory::SetLimit(int64_t bytes) {
  QUIRE_DCHECK(bytes > 0);
  const std::lock_guard lock(mutex_);
  use_.limit = bytes;
  ShrinkSpareLocked();
}

// After a lower limit parts may hold more than it.
void StagingMemory::ShrinkSpareLocked() noexcept {
  spare_.ShrinkTo(std::max<int64_t>(0, use_.limit - use_.held));
}

StagingUse StagingMemory::use() const {
  const std::lock_guard lock(mutex_);
  return use_;
}

}  // namespace quire
