#include "base/spare_memory.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace quire {

std::unique_ptr<std::byte[]> SpareMemory::Take(int64_t bytes) noexcept {
  const auto found = std::find_if(pieces_.rbegin(), pieces_.rend(),
                                  [&](const Piece& piece) { return piece.bytes == bytes; });
  if (found == pieces_.rend()) return nullptr;
  std::unique_ptr<std::byte[]> memory = std::move(found->memory);
  pieces_.erase(std::next(found).base());
  held_ -= bytes;
  return memory;
}

void SpareMemory::Give(std::unique_ptr<std::byte[]> memory, int64_t bytes) noexcept {
  QUIRE_DCHECK(memory != nullptr && bytes > 0);
  if (bytes > limit_) return;
  ShrinkTo(limit_ - bytes);
  if (pieces_.size() == kPiecesMax) ShrinkTo(held_ - 1);
  QUIRE_DCHECK(pieces_.size() < pieces_.capacity()) << "nothing is allocated here";
  pieces_.push_back({.memory = std::move(memory), .bytes = bytes});
  held_ += bytes;
}

void SpareMemory::ShrinkTo(int64_t bytes) noexcept {
  auto end = pieces_.begin();
  for (; held_ > bytes; ++end) {
    QUIRE_DCHECK(end != pieces_.end()) << held_ << " bytes are held in no piece";
    held_ -= end->bytes;
  }
  pieces_.erase(pieces_.begin(), end);
}

std::shared_ptr<std::byte[]> SharedSpareMemory::Take(const std::shared_ptr<SharedSpareMemory>& from,
                                                     int64_t bytes) {
  std::unique_ptr<std::byte[]> memory;
  {
    const std::lock_guard lock(from->mutex_);
    memory = from->spare_.Take(bytes);
    from->Hold(bytes);
  }
  // Where there is no memory, nothing is held.
  struct Count {
    SharedSpareMemory* of;
    int64_t bytes;
    ~Count() {
      if (of == nullptr) return;
      const std::lock_guard lock(of->mutex_);
      of->Hold(-bytes);
    }
  } count{from.get(), bytes};
  if (memory == nullptr)
    memory = std::make_unique_for_overwrite<std::byte[]>(static_cast<size_t>(bytes));
  count.of = nullptr;
  // Without memory for the count of its holders, shared_ptr calls this at once.
  return std::shared_ptr<std::byte[]>(memory.release(), [from, bytes](std::byte* held) {
    from->Give(std::unique_ptr<std::byte[]>(held), bytes);
  });
}

void SharedSpareMemory::Give(std::unique_ptr<std::byte[]> memory, int64_t bytes) noexcept {
  const std::lock_guard lock(mutex_);
  spare_.Give(std::move(memory), bytes);
  Hold(-bytes);
}

void SharedSpareMemory::Hold(int64_t bytes) noexcept {
  held_ += bytes;
  QUIRE_DCHECK(held_ >= 0) << "a piece comes back twice";
  spare_.ShrinkTo(std::max<int64_t>(0, limit_ - held_));
}

int64_t SharedSpareMemory::spare_bytes() const {
  const std::lock_guard lock(mutex_);
  return spare_.held();
}

}  // namespace quire
