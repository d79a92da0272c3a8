// PageCounts of a block tree, which counts pages as blocks come to be seen by others.
//
// A page is held by consecutive blocks of one path, so all that see it go through the uppermost
// of them. Hence a page belongs to the kind of the block in which its first token lies, and all
// pages that begin in one block are of one kind: nothing has to look at pages.
#ifndef QUIRE_KV_CACHE_PAGE_COUNTS_H_
#define QUIRE_KV_CACHE_PAGE_COUNTS_H_

#include <atomic>
#include <cstdint>

#include "kv/pages/block_tree.h"
#include "quire/attention_kv_cache.h"

namespace quire {

// Pages of uncommitted token trees included. O(groups).
PageCounts CountPages(const BlockTree& tree) noexcept;

// The counts as of the last call that changed the cache, for any thread. One thread stores at a
// time; readers never wait for it, they look again.
class PublishedCounts {
 public:
  void Store(const PageCounts& counts) noexcept;
  PageCounts Load() const noexcept;

 private:
  std::atomic<uint64_t> version_ = 0;  // odd while a thread stores
  std::atomic<int64_t> total_ = 0, free_ = 0, exclusive_ = 0, shared_ = 0, retained_only_ = 0;
};

}  // namespace quire

#endif  // QUIRE_KV_CACHE_PAGE_COUNTS_H_
