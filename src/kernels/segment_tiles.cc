#include "kernels/segment_tiles.h"

#include <algorithm>

#include "kernels/kv_slot.h"

namespace quire {
namespace {

// Walks page entries in the order of positions.
class EntryCursor {
 public:
  // REQUIRES: a run covers `position`.
  EntryCursor(const AttentionSequence& sequence, int64_t position) {
    run_ = std::upper_bound(sequence.runs, sequence.runs + sequence.run_count, position,
                            [](int64_t p, const PageRun& run) { return p < run.begin; }) -
           1;
    const PageEntry* first = run_->entries;
    const PageEntry* found =
        std::upper_bound(first, first + run_->entry_count, position,
                         [](int64_t p, const PageEntry& entry) { return p < entry.start; });
    entry_ = std::max<int64_t>(found - first - 1, 0);
  }

  int32_t page() const { return run_->entries[entry_].page; }

  // The first position after the current entry.
  int64_t end() const {
    if (entry_ + 1 >= run_->entry_count) return run_->end;
    return std::min(run_->entries[entry_ + 1].start, run_->end);
  }

  void Next() {
    if (++entry_ < run_->entry_count && run_->entries[entry_].start < run_->end) return;
    ++run_;
    entry_ = 0;
  }

 private:
  const PageRun* run_;
  int64_t entry_;
};

void CloseTile(const KVPages& pages, SegmentTile* tile) {
  const KVLayout& layout = pages.layout;
  tile->in_place = layout.tiled() && tile->piece_count > 0;
  tile->patched = false;
  tile->v_nonfinite = false;
  if (tile->piece_count == 0) tile->pieces[0] = {};
  for (int i = 0; i < tile->piece_count; ++i) {
    const TilePiece& piece = tile->pieces[i];
    if (piece.page != tile->pieces[0].page) tile->in_place = false;
    // A run of slots of the row layout may touch two of the page's flags.
    const int last_slot = piece.slot + piece.count - 1;
    if (pages.v_nonfinite[TileFlag(layout, piece.page, piece.slot)] != 0 ||
        pages.v_nonfinite[TileFlag(layout, piece.page, last_slot)] != 0) {
      tile->v_nonfinite = true;
    }
  }
  tile->tile = tile->pieces[0].slot / kTilePositions;
}

}  // namespace

void ResolveSegment(const KVPages& pages, const AttentionSequence& sequence, int64_t segment,
                    int64_t end, SegmentTiles* out) noexcept {
  out->tile_count = 0;
  int64_t position = segment * kSegmentPositions;
  const int64_t stop = std::min(position + kSegmentPositions, end);
  if (position >= stop) return;
  EntryCursor cursor(sequence, position);
  while (position < stop) {
    SegmentTile* tile = &out->tiles[out->tile_count++];
    tile->piece_count = 0;
    const int64_t tile_end = std::min(position + kTilePositions, stop);
    while (position < tile_end) {
      const int64_t piece_end = std::min(cursor.end(), tile_end);
      if (piece_end > position) {
        if (cursor.page() >= 0) {
          tile->pieces[tile->piece_count++] = {
              cursor.page(), static_cast<int32_t>(position % pages.layout.page_size),
              static_cast<int32_t>(position % kTilePositions),
              static_cast<int32_t>(piece_end - position)};
        }
        position = piece_end;
      }
      if (position < stop && position >= cursor.end()) cursor.Next();
    }
    CloseTile(pages, tile);
  }
}

void ResolveNodeTile(const KVPages& pages, const AttentionSequence& sequence, int64_t node,
                     int64_t segment, int tile, const SegmentTile* stored,
                     SegmentTile* out) noexcept {
  const TokenTreeView& tree = *sequence.tree;
  const int64_t first = segment * kSegmentPositions + tile * kTilePositions;
  out->piece_count = 0;
  for (int i = 0; stored != nullptr && i < stored->piece_count; ++i) {
    out->pieces[out->piece_count++] = stored->pieces[i];
  }
  const int committed_pieces = out->piece_count;
  const auto lane_of = [&](int64_t n) { return tree.depths[n] + sequence.base - first; };
  while (node >= 0 && lane_of(node) >= kTilePositions) node = tree.parents[node];
  for (int64_t n = node; n >= 0 && lane_of(n) >= 0; n = tree.parents[n]) ++out->piece_count;
  // From the node up its path, so from the last piece down.
  for (int i = out->piece_count; i-- > committed_pieces; node = tree.parents[node]) {
    out->pieces[i] = {tree.pages[node / pages.layout.page_size],
                      static_cast<int32_t>(node % pages.layout.page_size),
                      static_cast<int32_t>(lane_of(node)), 1};
  }
  CloseTile(pages, out);
  out->in_place = false;
  out->patched = stored != nullptr && stored->in_place;
}

}  // namespace quire
