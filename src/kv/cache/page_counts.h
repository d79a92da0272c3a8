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
  // Those of the tree, whose pages are as many all its life.
  explicit PublishedCounts(const BlockTree& tree) noexcept;
  // In line: each call of a cache ends with it, and it is small.
  void Store(const BlockTree& tree) noexcept {
    const Counts counts(tree);
    if (counts == stored_) return;
    Replace(counts);
  }
  PageCounts Load() const noexcept;

 private:
  // What the rest follows from.
  struct Counts {
    explicit Counts(const BlockTree& tree) noexcept : kinds(tree.blocks().kinds()) {
      for (int g = 0; g < tree.group_count(); ++g) free += tree.pool(g).free_count();
    }
    bool operator==(const Counts&) const = default;

    int64_t free = 0;
    PageKinds kinds;
  };
  void Replace(const Counts& counts) noexcept;

  const int64_t total_;
  Counts stored_;                      // for the thread that stores
  std::atomic<uint64_t> version_ = 0;  // odd while a thread stores
  std::atomic<int64_t> free_, shared_, retained_only_;
};

}  // namespace quire

#endif  // QUIRE_KV_CACHE_PAGE_COUNTS_H_
