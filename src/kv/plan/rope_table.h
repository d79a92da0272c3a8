// RopeTable: cos and sin of positions for one set of frequencies, in tiles that come and go.
// SweepPace: when to look for tiles that nobody needs.
#ifndef QUIRE_KV_PLAN_ROPE_TABLE_H_
#define QUIRE_KV_PLAN_ROPE_TABLE_H_

#include <algorithm>
#include <bitset>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "kernels/backend.h"
#include "quire/rope.h"
#include "quire/seams.h"

namespace quire {

// Row p is a function of p alone: the angle is computed in double from the integer position, its
// cos and sin in double times the amplitude, rounded once to float32. So it does not matter when a
// tile is computed and how often. A table, because attention in RopeMode::kInline reads the angles
// of all keys, and because sines of a batch of decodes would take longer than the rest of its plan.
//
// A tile holds kTilePositions positions. It stays where it is until a sweep drops it; a tile that
// is not there is NaN. A row takes about 2 microseconds.
class RopeTable {
 public:
  explicit RopeTable(RopeFrequencies frequencies);
  RopeTable(RopeTable&&) = default;
  RopeTable& operator=(RopeTable&&) = delete;
  ~RopeTable();

  // ---- Tiles of positions that are needed: first noted, then computed together.
  void ForgetWanted() noexcept;
  // Notes the tiles of [begin, end) that are missing. May throw std::bad_alloc.
  void Want(int64_t begin, int64_t end) {
    if (begin >= end || end <= dense_end()) return;
    WantTiles(begin, end);
  }
  int64_t wanted_tile_count() const { return static_cast<int64_t>(wanted_.size()); }
  // May throw std::bad_alloc; then nothing has changed.
  void AddWanted(ParallelRunner& runner);
  // All three for single positions, with what is elsewhere dropped when that would make more than
  // `tile_count_max` tiles.
  void Provide(std::span<const int32_t> positions, int64_t tile_count_max, ParallelRunner& runner);

  // ---- A sweep drops all tiles but those that were kept since it began.
  void StartSweep() noexcept;
  // Returns the number of tiles looked at.
  int64_t Keep(int64_t begin, int64_t end) noexcept;
  void EndSweep() noexcept;
  void Clear() noexcept;

  const RopeFrequencies& frequencies() const { return frequencies_; }
  int64_t pair_count() const { return view_.pair_count; }
  // Positions before it are all there.
  int64_t dense_end() const { return dense_tiles_ * kTilePositions; }
  // For kernels. It stays where it is, and is valid for positions that have been wanted.
  const AngleTable& view() const { return view_; }
  // REQUIRES: the position has been wanted and not been dropped.
  RotaryAngles At(int64_t position) const { return view_.At(position); }

  int64_t tile_count() const { return tile_count_; }
  int64_t memory_bytes() const;
  static int64_t TileBytes(int64_t pair_count) {
    return 2 * kTilePositions * pair_count * static_cast<int64_t>(sizeof(float));
  }
  // memory_bytes() at most, of tables with `tile_count` tiles in `range_count` ranges of positions.
  static int64_t BytesMax(int64_t tile_count, int64_t range_count, int64_t pair_count);

 private:
  struct Leaf {
    AngleLeaf angles;  // what kernels see
    std::bitset<kAngleLeafTiles> wanted;
    std::bitset<kAngleLeafTiles> kept;
    int64_t tile_count = 0;
  };

  void WantTiles(int64_t begin, int64_t end);
  Leaf& LeafFor(int64_t index);
  bool HasTile(int64_t tile) const;
  void ComputeTile(int64_t tile, float* to) const noexcept;
  void DropUnkept(Leaf& leaf, int64_t first_tile) noexcept;
  void TrimLeaves() noexcept;

  RopeFrequencies frequencies_;
  std::map<int64_t, std::unique_ptr<Leaf>> leaves_;  // those with tiles, by their number
  std::vector<const AngleLeaf*> leaf_view_;          // [leaf]; absent_leaf_ where there is none
  AngleTable view_;
  std::unique_ptr<float[]> absent_tile_;  // NaN
  std::unique_ptr<AngleLeaf> absent_leaf_;
  std::vector<int64_t> wanted_;
  int64_t tile_count_ = 0;
  int64_t dense_tiles_ = 0;
  int64_t kept_tiles_ = 0;  // of the dense ones, kept from the first one on
};

// A sweep is due so seldom that it costs a constant per call and per tile that was made, and so
// often that at most half as many tiles again as are needed stand for nothing.
class SweepPace {
 public:
  void CountCall() noexcept { ++calls_; }
  // `tile_count`: those that there are and those that are wanted.
  bool IsDue(int64_t tile_count) const {
    return calls_ > visits_ + kCallsLeast || tile_count > kept_ + kept_ / 2 + kTilesLeast;
  }
  // It has looked at `visits` sequences and tiles.
  void Swept(int64_t visits, int64_t tile_count) noexcept {
    calls_ = 0;
    visits_ = visits;
    kept_ = tile_count;
  }

 private:
  static constexpr int64_t kCallsLeast = 64;
  static constexpr int64_t kTilesLeast = 64;

  int64_t calls_ = 0;
  int64_t visits_ = 0;
  int64_t kept_ = 0;
};

}  // namespace quire

#endif  // QUIRE_KV_PLAN_ROPE_TABLE_H_
