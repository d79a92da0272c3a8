#include "kv/plan/attention_mask.h"

#include <cstddef>
#include <string>

#include "base/check.h"

namespace quire {
namespace {

constexpr uint16_t kAllVisible = 0xFFFF;

// Tiles with positions of the member's new tokens, its first at `base`.
int64_t TileCount(const ForwardMember& member, int64_t base) {
  const int64_t end = base + member.position_end() - member.base();
  return (end + kTilePositions - 1) / kTilePositions - base / kTilePositions;
}

Status BadMask(const AttentionCall& call, const TensorView& mask, const std::string& why) {
  return Status(StatusCode::kBadArgument, std::string(call.name) + ": layer " +
                                              std::to_string(call.layer) + ": mask is " +
                                              mask.ToString() + "; it must be " + why);
}

Status CheckMask(const AttentionCall& call, const TensorView& mask, int64_t count) {
  if (mask.dtype() != DType::kU8 || mask.rank() != 1 || mask.dim(0) != count) {
    return BadMask(call, mask,
                   "uint8 [" + std::to_string(count) +
                       "]: for each sequence of the batch a square of its new tokens");
  }
  if (!mask.is_contiguous() || mask.data() == nullptr)
    return BadMask(call, mask, "contiguous and in memory");
  return Status();
}

}  // namespace

Result<const RowMask*> AttentionMask::RowsOf(const AttentionCall& call, const TensorView* mask,
                                             const ForwardPlan& plan, MaskFrom from) {
  if (mask == nullptr) return static_cast<const RowMask*>(nullptr);
  const auto base_of = [from](const ForwardMember& member) {
    return from == MaskFrom::kBase ? int64_t{0} : member.base();
  };
  int64_t count = 0;
  size_t tile_count = 0;
  for (const ForwardMember& member : plan.members) {
    const int64_t rows = member.row_count();
    count += rows * rows;
    tile_count += static_cast<size_t>(rows * TileCount(member, base_of(member)));
  }
  QUIRE_RETURN_IF_ERROR(CheckMask(call, *mask, count));
  tiles_.clear();
  rows_.clear();
  tiles_.reserve(tile_count);  // rows_ points into it
  rows_.reserve(static_cast<size_t>(plan.row_count()));
  const uint8_t* of_member = mask->data_as<uint8_t>();
  for (const ForwardMember& member : plan.members) {
    AddMember(member, of_member, base_of(member));
    of_member += member.row_count() * member.row_count();
  }
  QUIRE_DCHECK(std::ssize(rows_) == plan.row_count());
  QUIRE_DCHECK(tiles_.size() == tile_count) << "rows point to tiles that have moved";
  return rows_.data();
}

// In a tree a bit stands for the node of the row's path at that position.
void AttentionMask::AddMember(const ForwardMember& member, const uint8_t* mask, int64_t base) {
  const int64_t rows = member.row_count();
  const int64_t first_tile = base / kTilePositions;
  const size_t tile_count = static_cast<size_t>(TileCount(member, base));
  for (int64_t row = 0; row < rows; ++row, mask += rows) {
    const size_t first = tiles_.size();
    tiles_.resize(first + tile_count, kAllVisible);
    rows_.push_back({.tiles = tiles_.data() + first, .first_tile = first_tile});
    const auto hide = [&](int64_t position) {
      const int64_t offset = position - first_tile * kTilePositions;
      QUIRE_DCHECK(offset >= 0 && offset < static_cast<int64_t>(tile_count) * kTilePositions);
      uint16_t& tile = tiles_[first + static_cast<size_t>(offset / kTilePositions)];
      tile = static_cast<uint16_t>(tile & ~(1U << offset % kTilePositions));
    };
    if (!member.is_tree()) {
      for (int64_t i = 0; i <= row; ++i) {
        if (mask[i] == 0) hide(base + i);
      }
      continue;
    }
    const int64_t first_node = member.first_node();
    for (int64_t node = first_node + row; node >= first_node;
         node = member.tree->parents[static_cast<size_t>(node)]) {
      if (mask[node - first_node] == 0) hide(base + member.tree->depths[static_cast<size_t>(node)]);
    }
  }
}

}  // namespace quire
