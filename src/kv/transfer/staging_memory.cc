#include "kv/transfer/staging_memory.h"

#include <algorithm>
#include <string>

#include "base/check.h"

namespace quire {

Result<std::shared_ptr<std::byte[]>> StagingMemory::Take(const std::shared_ptr<StagingMemory>& from,
                                                         int64_t bytes) {
  QUIRE_DCHECK(bytes > 0);
  {
    const std::lock_guard lock(from->mutex_);
    StagingUse& use = from->use_;
    if (bytes > use.limit) {
      return Status(StatusCode::kTooLarge,
                    "View: the part has " + std::to_string(bytes) +
                        " bytes, and the staging memory of its receiver " +
                        std::to_string(use.limit) +
                        "; raise staging_bytes there, or send fewer rows at a time");
    }
    if (bytes > use.limit - use.held) {
      return Status(StatusCode::kFull,
                    "View: the part has " + std::to_string(bytes) + " bytes; other parts hold " +
                        std::to_string(use.held) + " of " + std::to_string(use.limit) +
                        " bytes of staging memory; ask again when one is stored");
    }
    use.held += bytes;
    use.largest = std::max(use.largest, use.held);
  }
  std::byte* memory = nullptr;
  try {
    memory = new std::byte[static_cast<size_t>(bytes)];
  } catch (...) {
    from->GiveBack(bytes);
    throw;
  }
  // Without memory for the count of its holders, shared_ptr calls this at once.
  return std::shared_ptr<std::byte[]>(memory, [from, bytes](std::byte* held) {
    delete[] held;
    from->GiveBack(bytes);
  });
}

void StagingMemory::GiveBack(int64_t bytes) noexcept {
  const std::lock_guard lock(mutex_);
  use_.held -= bytes;
  QUIRE_DCHECK(use_.held >= 0) << "memory came back twice";
}

void StagingMemory::SetLimit(int64_t bytes) {
  QUIRE_DCHECK(bytes > 0);
  const std::lock_guard lock(mutex_);
  use_.limit = bytes;
}

StagingUse StagingMemory::use() const {
  const std::lock_guard lock(mutex_);
  return use_;
}

}  // namespace quire
