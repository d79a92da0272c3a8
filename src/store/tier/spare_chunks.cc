#include "store/tier/spare_chunks.h"

#include <sanitizer/asan_interface.h>

#include <algorithm>
#include <new>

namespace quire {

SpareChunks::Spare::Spare(ChunkBuffer buffer) : buffer_(std::move(buffer)) {
  ASAN_POISON_MEMORY_REGION(buffer_.bytes().data(), buffer_.bytes().size());
}

void SpareChunks::Spare::Open() noexcept {
  if (buffer_.bytes().data() != nullptr)
    ASAN_UNPOISON_MEMORY_REGION(buffer_.bytes().data(), buffer_.bytes().size());
}

int64_t SpareChunks::bytes() const {
  const std::lock_guard lock(mutex_);
  return bytes_;
}

std::shared_ptr<StoredChunk> SpareChunks::Make(const std::shared_ptr<SpareChunks>& spares,
                                               ChunkHeader header, std::span<std::byte>* bytes) {
  ChunkBuffer buffer = spares->Take(header.total_bytes);
  *bytes = buffer.bytes();
  auto chunk = std::make_unique<StoredChunk>(std::move(header), std::move(buffer));
  return {chunk.release(), [spares](StoredChunk* gone) {
            spares->Give(std::move(gone->buffer_));
            delete gone;
          }};
}

ChunkBuffer SpareChunks::Take(int64_t size) {
  Spares freed;  // ends after the lock
  {
    const std::lock_guard lock(mutex_);
    // The youngest one: its bytes may still be in a cache.
    const auto at = std::find_if(spares_.rbegin(), spares_.rend(),
                                 [&](const Spare& spare) { return spare.bytes() == size; });
    if (at != spares_.rend()) {
      ChunkBuffer buffer = std::move(*at).Release();
      spares_.erase(std::prev(at.base()));
      bytes_ -= size;
      return buffer;
    }
    // The new one is in the budget already.
    while (bytes_ > 0 && bytes_ > budget_->left()) MoveOldestLocked(&freed);
  }
  return ChunkBuffer(size);
}

void SpareChunks::Give(ChunkBuffer buffer) noexcept {
  const int64_t size = std::ssize(buffer.bytes());
  Spares given, freed;  // end after the lock
  try {
    given.emplace_back(std::move(buffer));
  } catch (const std::bad_alloc&) {
    return;  // then it is freed
  }
  const std::lock_guard lock(mutex_);
  const int64_t left = budget_->left();
  if (size > left) return;
  while (size > left - bytes_) MoveOldestLocked(&freed);
  given.front().round = round_;
  spares_.splice(spares_.end(), given);
  bytes_ += size;
}

void SpareChunks::MoveOldestLocked(Spares* to) noexcept {
  bytes_ -= spares_.front().bytes();
  to->splice(to->end(), spares_, spares_.begin());
}

void SpareChunks::Age(int rounds) noexcept {
  Spares freed;  // ends after the lock
  const std::lock_guard lock(mutex_);
  ++round_;
  while (!spares_.empty() && round_ - spares_.front().round > rounds) MoveOldestLocked(&freed);
}

}  // namespace quire
