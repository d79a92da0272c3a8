#include "kv/page_counts.h"

namespace quire {
namespace {

void Add(BlockViewers& to, const BlockViewers& more, int32_t sign) {
  to.all += sign * more.all;
  to.active += sign * more.active;
}

constexpr BlockViewers kOneActive = {.all = 1, .active = 1, .children_left = 0};

// The sequences that end in each block.
void CountEnds(const BlockTree& tree, const SequenceTable& sequences,
               std::span<const ForwardMember> batch, std::span<BlockViewers> viewers) {
  for (BlockIndex b = 0; b < tree.block_capacity(); ++b) {
    viewers[static_cast<size_t>(b)] = {
        .all = 0, .active = 0, .children_left = tree.block(b).child_count};
  }
  for (const Sequence& sequence : sequences.entries()) {
    if (sequence.last == kNoBlock) continue;
    BlockViewers& end = viewers[static_cast<size_t>(sequence.last)];
    ++end.all;
    end.active += !sequence.retained;
  }
  // A member that was given copies sees its old path beside the new one. Above the cut these are
  // the same blocks, where it is one sequence all the same.
  for (const ForwardMember& member : batch) {
    if (!member.append.copies()) continue;
    Add(viewers[static_cast<size_t>(member.append.last)], kOneActive, 1);
    const BlockIndex common = tree.block(member.last).parent;
    if (common != kNoBlock) Add(viewers[static_cast<size_t>(common)], kOneActive, -1);
  }
}

// From the ends up: a block's viewers are complete when those of its last child have been added.
void AddUpwards(const BlockTree& tree, std::span<BlockViewers> viewers) {
  for (BlockIndex leaf = 0; leaf < tree.block_capacity(); ++leaf) {
    if (tree.block(leaf).refs == 0 || tree.block(leaf).child_count > 0) continue;
    for (BlockIndex b = leaf; tree.block(b).parent != kNoBlock; b = tree.block(b).parent) {
      BlockViewers& parent = viewers[static_cast<size_t>(tree.block(b).parent)];
      Add(parent, viewers[static_cast<size_t>(b)], 1);
      if (--parent.children_left > 0) break;
    }
  }
}

int64_t PagesThatBeginIn(const BlockTree& tree, BlockIndex b) {
  int64_t count = 0;
  const BlockIndex parent = tree.block(b).parent;
  for (int g = 0; g < tree.group_count(); ++g) {
    const std::span<const PageEntry> table = tree.entries(b, g);
    count += static_cast<int64_t>(table.size()) - tree.FreedCount(b, g);
    const int32_t first = table.front().page;
    if (parent != kNoBlock && first != kNoPage)
      count -= tree.entries(parent, g).back().page == first;
  }
  return count;
}

}  // namespace

PageCounts CountPages(const BlockTree& tree, const SequenceTable& sequences,
                      std::span<const ForwardMember> batch) noexcept {
  const std::span<BlockViewers> viewers = tree.viewers();
  CountEnds(tree, sequences, batch, viewers);
  AddUpwards(tree, viewers);
  PageCounts counts;
  for (int g = 0; g < tree.group_count(); ++g) {
    counts.total += tree.pool(g).page_count();
    counts.free += tree.pool(g).free_count();
  }
  for (BlockIndex b = 0; b < tree.block_capacity(); ++b) {
    if (tree.block(b).refs == 0) continue;
    const BlockViewers& seen = viewers[static_cast<size_t>(b)];
    int64_t& kind = seen.active == 0 ? counts.retained_only
                    : seen.all == 1  ? counts.exclusive
                                     : counts.shared;
    kind += PagesThatBeginIn(tree, b);
  }
  return counts;
}

}  // namespace quire
