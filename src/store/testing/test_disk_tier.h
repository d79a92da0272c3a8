// Test only: disk tiers in a folder of the test's own, in fake time.
#ifndef QUIRE_STORE_TESTING_TEST_DISK_TIER_H_
#define QUIRE_STORE_TESTING_TEST_DISK_TIER_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/testing/fake_clock.h"
#include "store/disk/disk_layout.h"
#include "store/disk/disk_tier.h"
#include "store/testing/test_disk.h"

namespace quire {

class DiskTierTest : public ::testing::Test {
 protected:
  DiskTierSetup MakeSetup(int64_t bytes_max = int64_t{1} << 30) {
    DiskTierSetup setup;
    setup.disk.directory = directory.path();
    setup.disk.bytes_max = bytes_max;
    setup.clock = clock;
    return setup;
  }
  std::unique_ptr<DiskTier> Open(DiskTierSetup setup) {
    auto tier = DiskTier::Open(std::move(setup));
    EXPECT_TRUE(tier.ok()) << tier.status().ToString();
    EXPECT_TRUE((*tier)->AwaitScan(kNever).ok());
    return std::move(*tier);
  }
  std::unique_ptr<DiskTier> Open() { return Open(MakeSetup()); }
  std::string PathOf(const TestChunk& chunk) {
    return disk_layout::ChunkPath(directory.path(), chunk.id);
  }
  static std::vector<ChunkId> Ids(std::span<const TestChunk> chunks) {
    std::vector<ChunkId> ids;
    for (const TestChunk& chunk : chunks) ids.push_back(chunk.id);
    return ids;
  }

  TestDirectory directory;
  std::shared_ptr<FakeClock> clock = std::make_shared<FakeClock>();
};

}  // namespace quire

#endif  // QUIRE_STORE_TESTING_TEST_DISK_TIER_H_
