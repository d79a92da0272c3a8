#include "base/spare_memory.h"

#include <gtest/gtest.h>

#include <utility>

namespace quire {
namespace {

// Gives a new piece; returns where it is.
const std::byte* GiveNew(SpareMemory* spare, int64_t bytes) {
  auto memory = std::make_unique<std::byte[]>(static_cast<size_t>(bytes));
  const std::byte* const place = memory.get();
  spare->Give(std::move(memory), bytes);
  return place;
}

TEST(SpareMemory, TheNewestPieceOfTheSizeComesBack) {
  SpareMemory spare(100);
  EXPECT_EQ(spare.Take(10), nullptr);
  const std::byte* const first = GiveNew(&spare, 10);
  const std::byte* const other = GiveNew(&spare, 20);
  const std::byte* const second = GiveNew(&spare, 10);
  EXPECT_EQ(spare.held(), 40);
  EXPECT_EQ(spare.Take(15), nullptr);  // a larger one would hold more than was asked for
  EXPECT_EQ(spare.Take(10).get(), second);
  EXPECT_EQ(spare.Take(10).get(), first);
  EXPECT_EQ(spare.Take(10), nullptr);
  EXPECT_EQ(spare.Take(20).get(), other);
  EXPECT_EQ(spare.held(), 0);
}

TEST(SpareMemory, TheOldestMakeRoom) {
  SpareMemory spare(100);
  GiveNew(&spare, 40);
  GiveNew(&spare, 30);
  GiveNew(&spare, 30);
  EXPECT_EQ(spare.held(), 100);
  GiveNew(&spare, 35);
  EXPECT_EQ(spare.held(), 95);
  EXPECT_EQ(spare.Take(40), nullptr);
  GiveNew(&spare, 101);  // too large: nothing goes for it
  EXPECT_EQ(spare.held(), 95);
  spare.ShrinkTo(40);
  EXPECT_EQ(spare.held(), 35);
  spare.ShrinkTo(0);
  EXPECT_EQ(spare.held(), 0);
  EXPECT_EQ(spare.Take(35), nullptr);
}

TEST(SpareMemory, HasAtMostSoManyPieces) {
  SpareMemory spare(1 << 20);
  constexpr int64_t kMost = SpareMemory::kPiecesMax;
  for (int64_t bytes = 1; bytes <= kMost + 40; ++bytes) GiveNew(&spare, bytes);
  EXPECT_EQ(spare.Take(40), nullptr);
  for (int64_t bytes = 41; bytes <= kMost + 40; ++bytes) EXPECT_NE(spare.Take(bytes), nullptr);
  EXPECT_EQ(spare.held(), 0);
}

TEST(SharedSpareMemory, WhatIsHeldCountsAsWell) {
  const auto spare = std::make_shared<SharedSpareMemory>(100);
  SharedSpareMemory::Take(spare, 60);
  EXPECT_EQ(spare->spare_bytes(), 60);
  std::shared_ptr<std::byte[]> held = SharedSpareMemory::Take(spare, 40);
  EXPECT_EQ(spare->spare_bytes(), 60);
  const std::shared_ptr<std::byte[]> more = SharedSpareMemory::Take(spare, 50);
  EXPECT_EQ(spare->spare_bytes(), 0) << "90 of 100 bytes are held";
  held.reset();
  EXPECT_EQ(spare->spare_bytes(), 40);
  const std::shared_ptr<std::byte[]> large = SharedSpareMemory::Take(spare, 70);
  EXPECT_EQ(spare->spare_bytes(), 0);
}

TEST(SharedSpareMemory, APieceComesBackWhenNobodyHoldsIt) {
  const auto spare = std::make_shared<SharedSpareMemory>(200);
  std::shared_ptr<std::byte[]> piece = SharedSpareMemory::Take(spare, 60);
  const std::shared_ptr<const void> holder = piece;
  std::byte* const at = piece.get();
  piece.reset();
  piece = SharedSpareMemory::Take(spare, 60);
  EXPECT_NE(piece.get(), at) << "it is held";
  piece.reset();
  std::byte* const next = SharedSpareMemory::Take(spare, 60).get();
  EXPECT_EQ(SharedSpareMemory::Take(spare, 60).get(), next);
}

TEST(SharedSpareMemory, APieceMayOutliveIt) {
  auto spare = std::make_shared<SharedSpareMemory>(100);
  const auto piece = SharedSpareMemory::Take(spare, 10);
  spare.reset();
  piece[9] = std::byte{1};
}

}  // namespace
}  // namespace quire
