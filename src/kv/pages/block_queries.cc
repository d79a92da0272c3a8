#include "kv/pages/block_queries.h"

#include <unordered_map>
#include <utility>

#include "base/check.h"

namespace quire {
namespace {

class BlockDescriber {
 public:
  BlockDescriber(const BlockTree& tree, std::span<const LayerGroup> groups, int64_t blocks_max)
      : tree_(tree), groups_(groups), blocks_max_(blocks_max) {}

  // The index of the block, which is described if there is room.
  int64_t Add(BlockIndex last) {
    path_.clear();
    int64_t index = -1;
    for (BlockIndex block = last; block != kNoBlock; block = tree_.block(block).parent) {
      index = Find(block);
      if (index >= 0) break;
      if (std::ssize(seen_.blocks) + std::ssize(path_) == blocks_max_) {
        seen_.cut = true;
        break;
      }
      path_.push_back(block);
    }
    for (size_t i = path_.size(); i-- > 0;) index = Put(path_[i], index);
    return index;
  }
  SeenBlocks& seen() { return seen_; }

 private:
  int64_t Find(BlockIndex block) {
    ++seen_.visited;
    const auto found = indices_.find(block);
    return found == indices_.end() ? -1 : found->second;
  }
  // BlockTable::PagesThatBeginIn of one group.
  int64_t PagesThatBeginIn(BlockIndex index, int group) const {
    const PageTables& tables = tree_.tables();
    const BlockIndex parent = tree_.block(index).parent;
    const bool goes_on = parent != kNoBlock && tables.slice(parent, group).next == index;
    return tables.slice(index, group).count - tables.FreedCount(index, group) - goes_on;
  }
  int64_t Put(BlockIndex index, int64_t parent) {
    QUIRE_DCHECK(std::ssize(seen_.blocks) < blocks_max_);
    const Block& block = tree_.block(index);
    SeenBlock seen{.parent = parent, .tokens = {block.begin, block.end}};
    for (int g = 0; g < tree_.group_count(); ++g) {
      const LayerGroup& group = groups_[static_cast<size_t>(g)];
      const int64_t pages = PagesThatBeginIn(index, g);
      seen.pages += pages;
      seen.bytes += pages * static_cast<int64_t>(group.layers.size() * group.layout.page_bytes());
    }
    const auto number = std::ssize(seen_.blocks);
    seen_.blocks.push_back(seen);
    indices_.emplace(index, number);
    return number;
  }

  const BlockTree& tree_;
  const std::span<const LayerGroup> groups_;
  const int64_t blocks_max_;
  SeenBlocks seen_;
  std::unordered_map<BlockIndex, int64_t> indices_;
  std::vector<BlockIndex> path_;
};

}  // namespace

SeenBlocks DescribeBlocksOf(const BlockTree& tree, const SequenceTable& sequences,
                            std::span<const LayerGroup> groups, std::span<const int64_t> seq_ids,
                            int64_t blocks_max) {
  BlockDescriber describer(tree, groups, blocks_max);
  for (const int64_t id : seq_ids) {
    const int32_t index = sequences.Find(id);
    const BlockIndex last = index == SequenceTable::kAbsent ? kNoBlock : sequences[index].last;
    describer.seen().ends.push_back(last == kNoBlock ? -1 : describer.Add(last));
  }
  return std::move(describer.seen());
}

}  // namespace quire
