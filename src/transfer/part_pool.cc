#include "transfer/part_pool.h"

#include <utility>

#include "base/check.h"

namespace quire {
namespace {

constexpr size_t kSpareMax = 16;

}  // namespace

std::shared_ptr<OutgoingPart> PartPool::Take(const std::shared_ptr<PartPool>& pool, int64_t bytes) {
  QUIRE_DCHECK(bytes > 0 && bytes <= wire::kPartBytesMax) << bytes << " bytes make no part";
  auto part = std::make_unique<OutgoingPart>();
  part->head.bytes = bytes;
  const bool is_pooled = bytes <= kPartBytes;
  if (is_pooled) {
    const std::lock_guard lock(pool->mutex_);
    pool->spare_.reserve(kSpareMax);
    if (!pool->spare_.empty()) {
      part->bytes = std::move(pool->spare_.back());
      pool->spare_.pop_back();
    }
  }
  if (part->bytes == nullptr) {
    const auto size = static_cast<size_t>(is_pooled ? kPartBytes : bytes);
    part->bytes = std::make_unique_for_overwrite<std::byte[]>(size);
  }
  if (!is_pooled) return part;
  return std::shared_ptr<OutgoingPart>(part.release(), [pool](OutgoingPart* done) {
    const std::unique_ptr<OutgoingPart> owned(done);
    pool->GiveBack(std::move(owned->bytes));
  });
}

void PartPool::GiveBack(std::unique_ptr<std::byte[]> memory) noexcept {
  QUIRE_DCHECK(memory != nullptr);
  const std::lock_guard lock(mutex_);
  QUIRE_DCHECK(spare_.capacity() >= kSpareMax) << "Take has made room, nothing is allocated here";
  if (spare_.size() < kSpareMax) spare_.push_back(std::move(memory));
}

}  // namespace quire
