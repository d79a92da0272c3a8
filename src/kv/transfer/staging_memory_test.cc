#include "kv/transfer/staging_memory.h"

#include <gtest/gtest.h>

#include <memory>

namespace quire {
namespace {

TEST(StagingMemory, APartGetsTheMemoryOfOneBeforeIt) {
  const auto staging = std::make_shared<StagingMemory>();
  auto first = StagingMemory::Take(staging, 4096);
  ASSERT_TRUE(first.ok());
  const std::byte* const place = first->get();
  EXPECT_EQ(staging->use().held, 4096);
  *first = nullptr;
  EXPECT_EQ(staging->use().held, 0);
  const auto smaller = StagingMemory::Take(staging, 4000);
  const auto second = StagingMemory::Take(staging, 4096);
  EXPECT_EQ(second->get(), place);
  EXPECT_NE(smaller->get(), place);
  EXPECT_EQ(staging->use().held, 8096);
}

// What is kept for the next part is freed as soon as the limit leaves no room for it.
TEST(StagingMemory, WhatIsKeptTakesNoRoom) {
  const auto staging = std::make_shared<StagingMemory>();
  staging->SetLimit(1000);
  for (const int64_t bytes : {600, 300, 100}) EXPECT_TRUE(StagingMemory::Take(staging, bytes).ok());
  const auto all = StagingMemory::Take(staging, 1000);
  ASSERT_TRUE(all.ok());
  EXPECT_EQ(StagingMemory::Take(staging, 1).status().code(), StatusCode::kFull);
  EXPECT_EQ(StagingMemory::Take(staging, 1001).status().code(), StatusCode::kTooLarge);
  EXPECT_EQ(staging->use().largest, 1000);
}

// A part keeps its memory where the limit has become lower, and outlives the state.
TEST(StagingMemory, MemoryComesBackWithTheLastHolder) {
  auto staging = std::make_shared<StagingMemory>();
  auto part = StagingMemory::Take(staging, 512);
  staging->SetLimit(100);
  EXPECT_EQ(staging->use().held, 512);
  const std::weak_ptr<StagingMemory> seen = staging;
  staging.reset();
  EXPECT_FALSE(seen.expired());
  *part = nullptr;
  EXPECT_TRUE(seen.expired());
}

}  // namespace
}  // namespace quire
