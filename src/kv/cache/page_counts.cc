#include "kv/cache/page_counts.h"

#include "base/check.h"

namespace quire {
namespace {

int64_t TotalOf(const BlockTree& tree) {
  int64_t total = 0;
  for (int g = 0; g < tree.group_count(); ++g) total += tree.pool(g).page_count();
  return total;
}

// Exclusive pages are the others. Among them those of token trees: no retained sequence has one,
// and nobody shares one.
PageCounts Complete(int64_t total, int64_t free, const PageKinds& kinds) {
  const PageCounts counts = {.total = total,
                             .free = free,
                             .exclusive = total - free - kinds.shared - kinds.retained_only,
                             .shared = kinds.shared,
                             .retained_only = kinds.retained_only};
  QUIRE_DCHECK(counts.shared >= 0 && counts.retained_only >= 0 && counts.exclusive >= 0);
  return counts;
}

}  // namespace

PageCounts CountPages(const BlockTree& tree) noexcept {
  int64_t free = 0;
  for (int g = 0; g < tree.group_count(); ++g) free += tree.pool(g).free_count();
  return Complete(TotalOf(tree), free, tree.blocks().kinds());
}

PublishedCounts::PublishedCounts(const BlockTree& tree) noexcept
    : total_(TotalOf(tree)),
      stored_(tree),
      free_(stored_.free),
      shared_(stored_.kinds.shared),
      retained_only_(stored_.kinds.retained_only) {}

// Each store of a count releases the odd version and each load of one acquires it, so a reader that
// has seen a new count does not find the version unchanged.
void PublishedCounts::Replace(const Counts& counts) noexcept {
  const uint64_t version = version_.load(std::memory_order_relaxed);
  QUIRE_DCHECK(version % 2 == 0) << "two threads publish counts";
  stored_ = counts;
  version_.store(version + 1, std::memory_order_relaxed);
  free_.store(counts.free, std::memory_order_release);
  shared_.store(counts.kinds.shared, std::memory_order_release);
  retained_only_.store(counts.kinds.retained_only, std::memory_order_release);
  version_.store(version + 2, std::memory_order_release);
}

PageCounts PublishedCounts::Load() const noexcept {
  for (;;) {
    const uint64_t version = version_.load(std::memory_order_acquire);
    const int64_t free = free_.load(std::memory_order_acquire);
    const PageKinds kinds = {.shared = shared_.load(std::memory_order_acquire),
                             .retained_only = retained_only_.load(std::memory_order_acquire)};
    if (version % 2 == 0 && version_.load(std::memory_order_relaxed) == version)
      return Complete(total_, free, kinds);
  }
}

}  // namespace quire
