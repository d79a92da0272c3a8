#include "kv/cache/page_counts.h"

#include "base/check.h"

namespace quire {

PageCounts CountPages(const BlockTree& tree) noexcept {
  PageCounts counts;
  for (int g = 0; g < tree.group_count(); ++g) {
    counts.total += tree.pool(g).page_count();
    counts.free += tree.pool(g).free_count();
  }
  counts.shared = tree.blocks().kinds().shared;
  counts.retained_only = tree.blocks().kinds().retained_only;
  // Among them those of token trees: no retained sequence has one, and nobody shares one.
  counts.exclusive = counts.total - counts.free - counts.shared - counts.retained_only;
  QUIRE_DCHECK(counts.shared >= 0 && counts.retained_only >= 0 && counts.exclusive >= 0);
  return counts;
}

// Each store of a count releases the odd version and each load of one acquires it, so a reader that
// has seen a new count does not find the version unchanged.
void PublishedCounts::Store(const PageCounts& counts) noexcept {
  const uint64_t version = version_.load(std::memory_order_relaxed);
  QUIRE_DCHECK(version % 2 == 0) << "two threads publish counts";
  version_.store(version + 1, std::memory_order_relaxed);
  total_.store(counts.total, std::memory_order_release);
  free_.store(counts.free, std::memory_order_release);
  exclusive_.store(counts.exclusive, std::memory_order_release);
  shared_.store(counts.shared, std::memory_order_release);
  retained_only_.store(counts.retained_only, std::memory_order_release);
  version_.store(version + 2, std::memory_order_release);
}

PageCounts PublishedCounts::Load() const noexcept {
  for (;;) {
    const uint64_t version = version_.load(std::memory_order_acquire);
    const PageCounts counts = {.total = total_.load(std::memory_order_acquire),
                               .free = free_.load(std::memory_order_acquire),
                               .exclusive = exclusive_.load(std::memory_order_acquire),
                               .shared = shared_.load(std::memory_order_acquire),
                               .retained_only = retained_only_.load(std::memory_order_acquire)};
    if (version % 2 == 0 && version_.load(std::memory_order_relaxed) == version) return counts;
  }
}

}  // namespace quire
