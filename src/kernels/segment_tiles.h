// Where the tiles of one segment of one sequence lie: the bridge from page runs to attention.
#ifndef QUIRE_KERNELS_SEGMENT_TILES_H_
#define QUIRE_KERNELS_SEGMENT_TILES_H_

#include <cstdint>

#include "kernels/backend.h"
#include "kernels/kv_layout.h"

namespace quire {

// Positions lane .. lane + count - 1 of a tile lie in slots slot .. slot + count - 1 of a page.
struct TilePiece {
  int32_t page;
  int32_t slot;
  int32_t lane;
  int32_t count;
};

// A tile whose existing positions all lie in one page of the tiled layout is read in place: tile
// `tile` of pieces[0].page. Any other tile is assembled from its pieces, zeros elsewhere. Pieces
// are ascending and do not overlap. Positions whose page was freed have none; pieces[0].page is
// some page even if all were.
struct SegmentTile {
  bool in_place;
  bool patched;      // a copy of the tile where it lies, pieces[1] and up put over it
  bool v_nonfinite;  // a value in it, visible or not, may be NaN or infinite
  int32_t tile;
  int32_t piece_count;
  TilePiece pieces[kTilePositions];
};

struct SegmentTiles {
  int tile_count = 0;
  SegmentTile tiles[kTilesPerSegment];
};

// Tiles of the positions [256 * segment, min(256 * (segment + 1), end)).
// REQUIRES: the sequence's runs cover them.
void ResolveSegment(const KVPages& pages, const AttentionSequence& sequence, int64_t segment,
                    int64_t end, SegmentTiles* out) noexcept;

// A tile as node `node` of the sequence's tree sees it, or as all see it whose path has no node
// (-1): the committed positions as in `stored` (of ResolveSegment up to base; null: there are
// none), and the node's path. Lanes of later positions may hold anything, as in a tile that is read
// in place.
// REQUIRES: the tile ends after base.
void ResolveNodeTile(const KVPages& pages, const AttentionSequence& sequence, int64_t node,
                     int64_t segment, int tile, const SegmentTile* stored,
                     SegmentTile* out) noexcept;

}  // namespace quire

#endif  // QUIRE_KERNELS_SEGMENT_TILES_H_
