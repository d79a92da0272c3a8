#include "kv/pages/page_pool.h"

#include <gtest/gtest.h>

#include <vector>

namespace quire {
namespace {

struct FreedPages : PageFreeListener {
  void OnPageFreed(int group, int32_t page) noexcept override {
    groups.push_back(group);
    pages.push_back(page);
  }
  std::vector<int> groups;
  std::vector<int32_t> pages;
};

TEST(PagePool, HandsPagesOutAscendingAndFreedOnesLastFreedFirst) {
  PagePool pool(4, 3);
  EXPECT_EQ(pool.Take(), 0);
  EXPECT_EQ(pool.Take(), 1);
  EXPECT_EQ(pool.free_count(), 1);
  EXPECT_FALSE(pool.Release(0));
  EXPECT_FALSE(pool.Release(1));
  EXPECT_EQ(pool.Take(), 1);
  EXPECT_EQ(pool.Take(), 0);
  EXPECT_EQ(pool.Take(), 2);
  EXPECT_EQ(pool.used_count(), 3);
}

TEST(PagePool, APageIsFreeWhenItsLastHolderGoes) {
  PagePool pool(4, 2);
  FreedPages freed;
  pool.set_listener(&freed, 7);
  const int32_t page = pool.Take();
  pool.Hold(page);
  EXPECT_EQ(pool.holds(page), 2);
  EXPECT_TRUE(pool.Release(page));
  EXPECT_TRUE(freed.pages.empty());
  EXPECT_FALSE(pool.Release(page));
  EXPECT_EQ(freed.pages, std::vector<int32_t>{page});
  EXPECT_EQ(freed.groups, std::vector<int>{7});
}

TEST(PagePool, TheFillIsAnEndOfSlots) {
  PagePool pool(4, 2);
  const int32_t page = pool.Take();
  EXPECT_EQ(pool.fill(page), 0);
  pool.SetFillTo(page, 9);
  EXPECT_EQ(pool.fill(page), 1);
  pool.SetFillTo(page, 12);  // the end of a range is the end of the page, not its start
  EXPECT_EQ(pool.fill(page), 4);
  pool.Release(page);
  EXPECT_EQ(pool.fill(page), 0);
  EXPECT_EQ(pool.fill(pool.Take(11)), 3);
  EXPECT_EQ(pool.fill(pool.Take(12)), 4);
}

TEST(PagePool, CountsRanges) {
  const PagePool pool(4, 1);
  EXPECT_EQ(pool.RangeCount(5, 5), 0);
  EXPECT_EQ(pool.RangeCount(8, 8), 0);
  EXPECT_EQ(pool.RangeCount(3, 5), 2);
  EXPECT_EQ(pool.RangeCount(4, 8), 1);
  EXPECT_EQ(pool.RangeCount(0, 9), 3);
  EXPECT_EQ(pool.RangeBegin(7), 4);
  EXPECT_EQ(pool.RangeEnd(4), 8);
}

TEST(PagePool, ResetFreesAllAndStartsAtZeroAgain) {
  PagePool pool(4, 3);
  FreedPages freed;
  pool.set_listener(&freed, 0);
  pool.Take();
  const int32_t second = pool.Take();
  pool.Release(0);
  pool.Reset();
  EXPECT_EQ(freed.pages, (std::vector<int32_t>{0, second}));
  EXPECT_EQ(pool.free_count(), 3);
  EXPECT_EQ(pool.holds(second), 0);
  EXPECT_EQ(pool.Take(), 0);
}

}  // namespace
}  // namespace quire
