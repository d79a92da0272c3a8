#include "kv/plan/rope_table.h"

#include <cmath>
#include <limits>

#include "base/check.h"
#include "base/float_environment.h"
#include "kv/pages/reserve.h"

namespace quire {
namespace {

constexpr int64_t kPositionsEnd = int64_t{1} << 31;

int64_t TilesBefore(int64_t position) {  // rounded up
  return (position + kTilePositions - 1) / kTilePositions;
}

}  // namespace

RopeTable::RopeTable(RopeFrequencies frequencies) : frequencies_(std::move(frequencies)) {
  view_.pair_count = static_cast<int64_t>(frequencies_.inv_freq.size());
}

RopeTable::~RopeTable() { Clear(); }

void RopeTable::ComputeTile(int64_t tile, float* to) const noexcept {
  const ScopedFloatEnvironment environment;
  const size_t pairs = frequencies_.inv_freq.size();
  float* cos = to;
  float* sin = to + kTilePositions * pairs;
  for (int64_t row = 0; row < kTilePositions; ++row, cos += pairs, sin += pairs) {
    const auto position = static_cast<double>(tile * kTilePositions + row);
    for (size_t i = 0; i < pairs; ++i) {
      const double angle = position * frequencies_.inv_freq[i];
      cos[i] = static_cast<float>(std::cos(angle) * frequencies_.amplitude);
      sin[i] = static_cast<float>(std::sin(angle) * frequencies_.amplitude);
    }
  }
}

// ---------------------------------------------------------------------- wanting

void RopeTable::ForgetWanted() noexcept {
  for (const int64_t tile : wanted_) {
    const auto leaf = leaves_.find(tile / kAngleLeafTiles);
    if (leaf != leaves_.end()) leaf->second->wanted.reset(tile % kAngleLeafTiles);
  }
  wanted_.clear();
}

RopeTable::Leaf& RopeTable::LeafFor(int64_t index) {
  const auto found = leaves_.find(index);
  if (found != leaves_.end()) return *found->second;
  if (absent_leaf_ == nullptr) {
    const size_t floats = static_cast<size_t>(2 * kTilePositions * pair_count());
    absent_tile_.reset(new float[floats]);
    std::fill_n(absent_tile_.get(), floats, std::numeric_limits<float>::quiet_NaN());
    absent_leaf_ = std::make_unique<AngleLeaf>();
    std::ranges::fill(absent_leaf_->tiles, absent_tile_.get());
  }
  const auto slot = static_cast<size_t>(index);
  if (slot >= leaf_view_.size()) {
    ReserveGrowing(leaf_view_, slot + 1);
    leaf_view_.resize(slot + 1, absent_leaf_.get());
    view_.leaves = leaf_view_.data();
  }
  auto leaf = std::make_unique<Leaf>();
  leaf->angles = *absent_leaf_;
  Leaf& made = *leaves_.emplace(index, std::move(leaf)).first->second;
  leaf_view_[slot] = &made.angles;
  return made;
}

bool RopeTable::HasTile(int64_t tile) const {
  const auto leaf = static_cast<size_t>(tile / kAngleLeafTiles);
  return leaf < leaf_view_.size() &&
         leaf_view_[leaf]->tiles[static_cast<size_t>(tile % kAngleLeafTiles)] != absent_tile_.get();
}

void RopeTable::WantTiles(int64_t begin, int64_t end) {
  QUIRE_DCHECK(begin >= 0 && end <= kPositionsEnd);
  int64_t tile = std::max(begin / kTilePositions, std::min(dense_tiles_, TilesBefore(end)));
  const int64_t tile_end = TilesBefore(end);
  while (tile < tile_end && HasTile(tile)) ++tile;
  while (tile < tile_end) {
    const int64_t index = tile / kAngleLeafTiles;
    const int64_t leaf_end = std::min(tile_end, (index + 1) * kAngleLeafTiles);
    Leaf& leaf = LeafFor(index);
    for (; tile < leaf_end; ++tile) {
      const auto slot = static_cast<size_t>(tile % kAngleLeafTiles);
      if (leaf.angles.tiles[slot] != absent_tile_.get() || leaf.wanted.test(slot)) continue;
      wanted_.push_back(tile);
      leaf.wanted.set(slot);
    }
  }
}

void RopeTable::AddWanted(ParallelRunner& runner) {
  if (wanted_.empty()) return;
  const size_t floats = static_cast<size_t>(2 * kTilePositions * pair_count());
  std::vector<std::unique_ptr<float[]>> made(wanted_.size());
  for (std::unique_ptr<float[]>& tile : made) tile.reset(new float[floats]);
  runner.ParallelFor(wanted_tile_count(), [&](int64_t i, int) {
    ComputeTile(wanted_[static_cast<size_t>(i)], made[static_cast<size_t>(i)].get());
  });
  for (size_t i = 0; i < made.size(); ++i) {
    const int64_t tile = wanted_[i];
    QUIRE_DCHECK(!HasTile(tile)) << "tile " << tile << " would be lost";
    Leaf& leaf = *leaves_.find(tile / kAngleLeafTiles)->second;
    leaf.angles.tiles[static_cast<size_t>(tile % kAngleLeafTiles)] = made[i].release();
    ++leaf.tile_count;
    ++tile_count_;
  }
  ForgetWanted();
  while (HasTile(dense_tiles_)) ++dense_tiles_;
}

void RopeTable::Provide(std::span<const int32_t> positions, int64_t tile_count_max,
                        ParallelRunner& runner) {
  ForgetWanted();
  for (const int64_t position : positions) Want(position, position + 1);
  if (wanted_.empty()) return;
  if (tile_count_ + wanted_tile_count() > tile_count_max) {
    StartSweep();
    for (const int64_t position : positions) Keep(position, position + 1);
    EndSweep();
  }
  AddWanted(runner);
}

// ---------------------------------------------------------------------- sweeps

void RopeTable::StartSweep() noexcept {
  for (const auto& [index, leaf] : leaves_) leaf->kept.reset();
  kept_tiles_ = 0;
}

int64_t RopeTable::Keep(int64_t begin, int64_t end) noexcept {
  if (begin >= end) return 0;
  int64_t tile = begin / kTilePositions;
  if (tile <= kept_tiles_) tile = kept_tiles_;
  const int64_t first = tile;
  const int64_t tile_end =
      std::min(TilesBefore(end), static_cast<int64_t>(leaf_view_.size()) * kAngleLeafTiles);
  if (tile == kept_tiles_) kept_tiles_ = std::max(kept_tiles_, tile_end);
  while (tile < tile_end) {
    const int64_t index = tile / kAngleLeafTiles;
    const int64_t leaf_end = std::min(tile_end, (index + 1) * kAngleLeafTiles);
    const auto leaf = leaves_.find(index);
    if (leaf == leaves_.end()) {
      tile = leaf_end;
      continue;
    }
    for (; tile < leaf_end; ++tile)
      leaf->second->kept.set(static_cast<size_t>(tile % kAngleLeafTiles));
  }
  return std::max<int64_t>(tile_end - first, 0);
}

void RopeTable::DropUnkept(Leaf& leaf, int64_t first_tile) noexcept {
  for (size_t slot = 0; slot < kAngleLeafTiles; ++slot) {
    const float*& tile = leaf.angles.tiles[slot];
    if (tile == absent_tile_.get() || leaf.kept.test(slot)) continue;
    QUIRE_DCHECK(leaf.tile_count > 0 && tile_count_ > 0);
    delete[] tile;
    tile = absent_tile_.get();
    --leaf.tile_count;
    --tile_count_;
    dense_tiles_ = std::min(dense_tiles_, first_tile + static_cast<int64_t>(slot));
  }
}

void RopeTable::EndSweep() noexcept {
  for (auto it = leaves_.begin(); it != leaves_.end();) {
    Leaf& leaf = *it->second;
    DropUnkept(leaf, it->first * kAngleLeafTiles);
    if (leaf.tile_count > 0 || leaf.wanted.any()) {
      ++it;
      continue;
    }
    leaf_view_[static_cast<size_t>(it->first)] = absent_leaf_.get();
    it = leaves_.erase(it);
  }
  TrimLeaves();
}

void RopeTable::TrimLeaves() noexcept {
  const size_t size = leaves_.empty() ? 0 : static_cast<size_t>(leaves_.rbegin()->first) + 1;
  leaf_view_.resize(size);
  ReleaseUnused(leaf_view_);
  view_.leaves = leaf_view_.data();
}

void RopeTable::Clear() noexcept {
  ForgetWanted();
  wanted_.shrink_to_fit();
  StartSweep();
  EndSweep();
  QUIRE_DCHECK(tile_count_ == 0 && leaves_.empty());
  FreeAll(leaf_view_);
  view_.leaves = nullptr;
}

int64_t RopeTable::memory_bytes() const {
  return tile_count_ * TileBytes(pair_count()) +
         static_cast<int64_t>(leaves_.size() * sizeof(Leaf) +
                              leaf_view_.capacity() * sizeof(leaf_view_[0]) +
                              wanted_.capacity() * sizeof(wanted_[0]));
}

int64_t RopeTable::BytesMax(int64_t tile_count, int64_t range_count, int64_t pair_count) {
  const int64_t leaves = tile_count / kAngleLeafTiles + 2 * range_count;
  // The view grows twofold.
  const int64_t view = 2 * kPositionsEnd / (kAngleLeafTiles * kTilePositions);
  return tile_count * (TileBytes(pair_count) + 2 * static_cast<int64_t>(sizeof(int64_t))) +
         leaves * static_cast<int64_t>(sizeof(Leaf)) + view * static_cast<int64_t>(sizeof(void*));
}

}  // namespace quire
