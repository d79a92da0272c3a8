#include "kernels/segment_tiles.h"

#include <gtest/gtest.h>

#include <vector>

namespace quire {
namespace {

struct Fixture {
  KVPages pages;
  std::vector<uint8_t> flags = std::vector<uint8_t>(1000, 0);
  AttentionSequence sequence = {};
  std::vector<PageRun> runs;

  Fixture(int page_size, std::vector<PageRun> page_runs) : runs(std::move(page_runs)) {
    pages.layout = {DType::kF32, 1, 16, 16, page_size};
    pages.v_nonfinite = flags.data();
    sequence.runs = runs.data();
    sequence.run_count = static_cast<int64_t>(runs.size());
  }
  SegmentTiles Resolve(int64_t segment, int64_t end) const {
    SegmentTiles tiles;
    ResolveSegment(pages, sequence, segment, end, &tiles);
    return tiles;
  }
};

void ExpectPiece(const TilePiece& piece, int page, int slot, int lane, int count) {
  EXPECT_EQ(piece.page, page);
  EXPECT_EQ(piece.slot, slot);
  EXPECT_EQ(piece.lane, lane);
  EXPECT_EQ(piece.count, count);
}

TEST(SegmentTiles, ATileOfOnePageIsReadInPlace) {
  const std::vector<PageEntry> entries = {{0, 7}, {32, 3}};
  const Fixture fixture(32, {{entries.data(), 2, 0, 40}});
  const SegmentTiles tiles = fixture.Resolve(0, 40);
  ASSERT_EQ(tiles.tile_count, 3);
  for (int t = 0; t < 3; ++t) {
    EXPECT_TRUE(tiles.tiles[t].in_place);
    EXPECT_EQ(tiles.tiles[t].tile, t % 2);
    ASSERT_EQ(tiles.tiles[t].piece_count, 1);
    ExpectPiece(tiles.tiles[t].pieces[0], t < 2 ? 7 : 3, t % 2 * 16, 0, t < 2 ? 16 : 8);
  }
}

TEST(SegmentTiles, AForkInsideATileIsAssembledUnlessThePageIsTheSame) {
  const std::vector<PageEntry> entries = {{0, 7}, {5, 3}, {16, 4}, {20, 4}};
  const Fixture fixture(16, {{entries.data(), 4, 0, 32}});
  const SegmentTiles tiles = fixture.Resolve(0, 32);
  ASSERT_EQ(tiles.tile_count, 2);
  EXPECT_FALSE(tiles.tiles[0].in_place);
  ASSERT_EQ(tiles.tiles[0].piece_count, 2);
  ExpectPiece(tiles.tiles[0].pieces[0], 7, 0, 0, 5);
  ExpectPiece(tiles.tiles[0].pieces[1], 3, 5, 5, 11);
  EXPECT_TRUE(tiles.tiles[1].in_place);
}

TEST(SegmentTiles, RunsAreClipped) {
  // The second run begins inside its first entry; the first run ends before its last entry does.
  const std::vector<PageEntry> parent = {{0, 1}, {16, 2}, {20, 9}};
  const std::vector<PageEntry> child = {{16, 5}};
  const Fixture fixture(16, {{parent.data(), 3, 0, 18}, {child.data(), 1, 18, 30}});
  const SegmentTiles tiles = fixture.Resolve(0, 30);
  ASSERT_EQ(tiles.tile_count, 2);
  ASSERT_EQ(tiles.tiles[1].piece_count, 2);
  ExpectPiece(tiles.tiles[1].pieces[0], 2, 0, 0, 2);
  ExpectPiece(tiles.tiles[1].pieces[1], 5, 2, 2, 12);
}

TEST(SegmentTiles, ALaterSegmentIsFoundByItsPosition) {
  std::vector<PageEntry> entries;
  for (int i = 0; i < 200; ++i) entries.push_back({i * 16, 1000 - i});
  const Fixture fixture(16, {{entries.data(), 10, 0, 160}, {entries.data() + 10, 190, 160, 3200}});
  const SegmentTiles tiles = fixture.Resolve(7, 3200);
  ASSERT_EQ(tiles.tile_count, 16);
  for (int t = 0; t < 16; ++t) EXPECT_EQ(tiles.tiles[t].pieces[0].page, 1000 - 7 * 16 - t);
  EXPECT_EQ(fixture.Resolve(12, 3200).tile_count, 8);
  EXPECT_EQ(fixture.Resolve(13, 3200).tile_count, 0);
}

TEST(SegmentTiles, RowLayoutIsAlwaysAssembled) {
  const std::vector<PageEntry> entries = {{0, 4}, {20, 6}};
  Fixture fixture(20, {{entries.data(), 2, 0, 40}});
  SegmentTiles tiles = fixture.Resolve(0, 40);
  ASSERT_EQ(tiles.tile_count, 3);
  EXPECT_FALSE(tiles.tiles[0].in_place);
  ExpectPiece(tiles.tiles[1].pieces[0], 4, 16, 0, 4);
  ExpectPiece(tiles.tiles[1].pieces[1], 6, 0, 4, 12);
  // A page of 20 slots has two flags; slots 12 to 19 of page 6 (tile 2) touch both.
  EXPECT_FALSE(tiles.tiles[2].v_nonfinite);
  for (const size_t flag : {size_t{6 * 2}, size_t{6 * 2 + 1}}) {
    fixture.flags[flag] = 1;
    EXPECT_TRUE(fixture.Resolve(0, 40).tiles[2].v_nonfinite);
    EXPECT_FALSE(fixture.Resolve(0, 40).tiles[0].v_nonfinite);
    fixture.flags[flag] = 0;
  }
}

}  // namespace
}  // namespace quire
