#include "kv/pages/token_tree.h"

#include <algorithm>
#include <string>

#include "base/check.h"
#include "kv/pages/reserve.h"

namespace quire {

Status AddDepths(const char* call, int64_t seq_id, std::span<const int32_t> old_depths,
                 std::span<const int64_t> parents, std::vector<int32_t>& depths) {
  const size_t first = depths.size();
  const int64_t old_count = static_cast<int64_t>(old_depths.size());
  for (size_t i = 0; i < parents.size(); ++i) {
    const int64_t node = old_count + static_cast<int64_t>(i);
    const int64_t parent = parents[i];
    if (parent < -1 || parent >= node) {
      return Status(StatusCode::kBadArgument, std::string(call) + ": node " + std::to_string(node) +
                                                  " of sequence " + std::to_string(seq_id) +
                                                  " has the parent " + std::to_string(parent) +
                                                  "; a parent is a node before its child, or -1");
    }
    const int32_t above = parent < 0 ? -1
                          : parent < old_count
                              ? old_depths[static_cast<size_t>(parent)]
                              : depths[first + static_cast<size_t>(parent - old_count)];
    depths.push_back(above + 1);
  }
  return Status();
}

void FillPath(std::span<const int32_t> parents, int64_t leaf, std::vector<int32_t>& path) noexcept {
  QUIRE_DCHECK(leaf < static_cast<int64_t>(parents.size()));
  path.clear();
  for (int32_t node = static_cast<int32_t>(leaf); node >= 0;
       node = parents[static_cast<size_t>(node)]) {
    path.push_back(node);
  }
  std::reverse(path.begin(), path.end());
}

void TokenTrees::Reserve(const BlockTree& tree, int32_t sequence, int64_t count) {
  const size_t index = static_cast<size_t>(sequence);
  if (trees_.size() <= index) {
    ReserveGrowing(trees_, index + 1);
    trees_.resize(index + 1);
  }
  TokenTree& of = trees_[index];
  const size_t size = static_cast<size_t>(of.size() + count);
  ReserveGrowing(of.parents, size);
  ReserveGrowing(of.depths, size);
  of.groups.resize(static_cast<size_t>(tree.group_count()));
  for (int g = 0; g < tree.group_count(); ++g) {
    ReserveGrowing(of.groups[static_cast<size_t>(g)].pages,
                   static_cast<size_t>(tree.pool(g).RangeCount(0, static_cast<int64_t>(size))));
  }
}

void TokenTrees::AddNodes(BlockTree& tree, int32_t sequence, std::span<const int64_t> parents,
                          std::span<const int32_t> depths) noexcept {
  TokenTree& of = trees_[static_cast<size_t>(sequence)];
  QUIRE_DCHECK(parents.size() == depths.size());
  QUIRE_DCHECK(of.parents.size() + parents.size() <= of.parents.capacity());
  level_count_ -= of.levels;
  for (size_t i = 0; i < parents.size(); ++i) {
    of.parents.push_back(static_cast<int32_t>(parents[i]));
    of.depths.push_back(depths[i]);
    of.levels = std::max<int64_t>(of.levels, depths[i] + 1);
  }
  level_count_ += of.levels;
  node_count_ += static_cast<int64_t>(parents.size());
  for (int g = 0; g < tree.group_count(); ++g) {
    std::vector<int32_t>& pages = of.groups[static_cast<size_t>(g)].pages;
    const size_t needed = static_cast<size_t>(tree.pool(g).RangeCount(0, of.size()));
    QUIRE_DCHECK(needed <= pages.capacity()) << "no room was reserved";
    for (; pages.size() < needed; ++page_count_) pages.push_back(tree.pool(g).Take());
  }
}

int64_t TokenTrees::DropNodes(BlockTree& tree, int32_t sequence, int64_t size) noexcept {
  TokenTree& of = trees_[static_cast<size_t>(sequence)];
  QUIRE_DCHECK(size >= 0);
  QUIRE_DCHECK(size <= of.size());
  level_count_ -= of.levels;
  node_count_ -= of.size() - size;
  of.parents.resize(static_cast<size_t>(size));
  of.depths.resize(static_cast<size_t>(size));
  of.levels = 0;
  for (const int32_t depth : of.depths) of.levels = std::max<int64_t>(of.levels, depth + 1);
  level_count_ += of.levels;
  // The last taken first, so that they come back to the free list as they left it.
  for (int g = tree.group_count(); g-- > 0;) {
    std::vector<int32_t>& pages = of.groups[static_cast<size_t>(g)].pages;
    const size_t needed = static_cast<size_t>(tree.pool(g).RangeCount(0, size));
    for (; pages.size() > needed; --page_count_) {
      tree.pool(g).Release(pages.back());
      pages.pop_back();
    }
  }
  QUIRE_DCHECK(node_count_ >= level_count_) << "a level has no node";
  QUIRE_DCHECK(page_count_ >= 0);
  return of.levels;
}

void TokenTrees::Clear() noexcept {
  FreeAll(trees_);
  node_count_ = level_count_ = page_count_ = 0;
}

}  // namespace quire
