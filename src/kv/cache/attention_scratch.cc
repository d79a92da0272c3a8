#include "kv/cache/attention_scratch.h"

#include <cstring>

#include "base/check.h"
#include "kv/cache/kv_memory.h"
#include "kv/pages/page_storage.h"

namespace quire {
namespace {

constexpr size_t kAlignment = 64;  // a cache line; backend.h asks for it

}  // namespace

void AttentionScratch::Reserve(int64_t row_count, int64_t sequence_count) {
  needed_ = AttentionScratchBytes(backend_, groups_, options_.layers, row_count, sequence_count,
                                  options_.runner->worker_count());
  ReserveAgain();
}

// As much as this forward needs and recent ones did; what is four times that is given back.
void AttentionScratch::ReserveAgain() {
  const size_t peak = peak_.Count(needed_);
  if (bytes_ / 4 > peak) {
    memory_.reset();
    bytes_ = 0;
  }
  Grow(peak);
  QUIRE_DCHECK(bytes_ >= needed_);
}

void AttentionScratch::Grow(size_t bytes) {
  if (bytes <= bytes_) return;
  bytes_ = 0;
  memory_.reset();
  memory_.reset(new std::byte[bytes + kAlignment]);
  bytes_ = bytes;
}

void* AttentionScratch::Take() noexcept {
  QUIRE_DCHECK(bytes_ >= needed_);
  void* memory = memory_.get();
  size_t space = bytes_ + kAlignment;
  if (memory == nullptr) return nullptr;
  memory = std::align(kAlignment, bytes_, memory, space);
  if (options_.poison_freed_pages) std::memset(memory, kPoisonByte, bytes_);
  return memory;
}

void AttentionScratch::Clear() noexcept {
  memory_.reset();
  bytes_ = needed_ = 0;
  peak_ = {};
}

}  // namespace quire
