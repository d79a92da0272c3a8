// AttentionScratch: the memory that the attention kernels of a cache's forwards work in.
//
// Invariants:
// - While a forward is open, there is as much as its largest layer needs: Reserve takes it before
//   the commit, so that no layer's call can fail for lack of memory.
// - Between forwards there is as much as recent ones have needed (RecentPeak), and at most four
//   times that.
#ifndef QUIRE_KV_CACHE_ATTENTION_SCRATCH_H_
#define QUIRE_KV_CACHE_ATTENTION_SCRATCH_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/backend.h"
#include "kv/pages/layer_groups.h"
#include "kv/pages/reserve.h"
#include "quire/attention_kv_cache.h"

namespace quire {

class AttentionScratch {
 public:
  // All must outlive it.
  AttentionScratch(const AttentionKVCacheOptions& options, const std::vector<LayerGroup>& groups,
                   const Backend& backend)
      : options_(options), groups_(groups), backend_(backend) {}

  // For a forward of `row_count` tokens of `sequence_count` sequences. May throw std::bad_alloc.
  void Reserve(int64_t row_count, int64_t sequence_count);
  // For a forward that needs what the one before it did.
  void ReserveAgain();
  // At least this much until the forward ends. May throw std::bad_alloc.
  void Grow(size_t bytes);
  // As attention_scratch_bytes wants it: aligned to 64 bytes; filled with NaN if
  // poison_freed_pages is set. Null if there is none.
  void* Take() noexcept;
  // Gives all memory back.
  void Clear() noexcept;

  size_t bytes() const { return bytes_; }

 private:
  const AttentionKVCacheOptions& options_;
  const std::vector<LayerGroup>& groups_;
  const Backend& backend_;
  std::unique_ptr<std::byte[]> memory_;
  size_t bytes_ = 0;
  size_t needed_ = 0;  // by the forward that was reserved last
  RecentPeak peak_;
};

}  // namespace quire

#endif  // QUIRE_KV_CACHE_ATTENTION_SCRATCH_H_
