#include "kv/cache/kv_invariants.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <set>
#include <vector>

#include "kv/cache/page_counts.h"
#include "kv/pages/sliding_window.h"
#include "kv/pages/text.h"

namespace quire {
namespace {

// Collects the message of a violation: return Violation() << "block " << b << ...;
class Violation {
 public:
  template <typename T>
  Violation& operator<<(const T& part) {
    text_ << part;
    return *this;
  }
  operator Status()
      const {  // NOLINT(google-explicit-constructor): it is only ever returned as a Status
    return Status(StatusCode::kInternal, "invariant violated: " + text_.str());
  }

 private:
  Text text_;
};

class Checker {
 public:
  // `trees`: null if there are none.
  Checker(const BlockTree& tree, const SequenceTable& sequences,
          std::span<const ForwardMember> batch, const TokenTrees* trees,
          std::span<const int64_t> layer_windows, int64_t max_pop)
      : tree_(tree),
        sequences_(sequences),
        batch_(batch),
        trees_(trees),
        layer_windows_(layer_windows),
        max_pop_(max_pop) {}

  Status Check() const {
    QUIRE_RETURN_IF_ERROR(CheckBlocks());
    QUIRE_RETURN_IF_ERROR(CheckReferences());
    for (int g = 0; g < tree_.group_count(); ++g) {
      QUIRE_RETURN_IF_ERROR(CheckSlices(g));
      QUIRE_RETURN_IF_ERROR(CheckPages(g));
      QUIRE_RETURN_IF_ERROR(CheckRanges(g));
      QUIRE_RETURN_IF_ERROR(CheckBorders(g));
      if (tree_.hidden().tracks()) QUIRE_RETURN_IF_ERROR(CheckHidden(g));
    }
    QUIRE_RETURN_IF_ERROR(CheckViewers());
    QUIRE_RETURN_IF_ERROR(CheckArrays());
    QUIRE_RETURN_IF_ERROR(CheckSequences());
    QUIRE_RETURN_IF_ERROR(CheckTrees());
    return CheckPageCounts();
  }

 private:
  bool IsLive(BlockIndex b) const {
    return b >= 0 && b < tree_.blocks().capacity() && tree_.block(b).refs > 0;
  }
  template <typename F>
  void ForEachLiveBlock(F&& f) const {
    for (BlockIndex b = 0; b < tree_.blocks().capacity(); ++b) {
      if (tree_.block(b).refs != 0) f(b, tree_.block(b));
    }
  }

  // Ranges are not empty and adjacent along paths; the count of distinct tokens and of blocks is
  // that of live blocks.
  Status CheckBlocks() const {
    int64_t tokens = 0;
    int64_t blocks = 0;
    Status status;
    ForEachLiveBlock([&](BlockIndex b, const Block& block) {
      ++blocks;
      tokens += block.end - block.begin;
      if (block.begin >= block.end) status = Violation() << "block " << b << " is empty";
      if (block.parent != kNoBlock && !IsLive(block.parent)) {
        status = Violation() << "block " << b << " has the dead parent " << block.parent;
      } else if (block.begin != tree_.End(block.parent)) {
        status = Violation() << "block " << b << " begins at " << block.begin
                             << ", its parent ends at " << tree_.End(block.parent);
      }
    });
    QUIRE_RETURN_IF_ERROR(status);
    if (tokens != tree_.distinct_token_count()) {
      return Violation() << tokens << " tokens in blocks, " << tree_.distinct_token_count()
                         << " counted";
    }
    if (blocks != tree_.blocks().count()) {
      return Violation() << blocks << " blocks are live, " << tree_.blocks().count()
                         << " are not free";
    }
    return Status();
  }

  // The counts are those of children, sequences and an open forward.
  Status CheckReferences() const {
    const size_t capacity = static_cast<size_t>(tree_.blocks().capacity());
    std::vector<int64_t> refs(capacity), children(capacity);
    std::vector<BlockIndex> child_xor(capacity);
    ForEachLiveBlock([&](BlockIndex b, const Block& block) {
      if (block.parent == kNoBlock) return;
      const size_t parent = static_cast<size_t>(block.parent);
      ++refs[parent];
      ++children[parent];
      child_xor[parent] ^= b;
    });
    std::vector<BlockIndex> ends;
    for (const ForwardMember& member : batch_) {
      if (member.append.copies()) ends.push_back(member.append.last);
    }
    for (const Sequence& sequence : sequences_.entries()) ends.push_back(sequence.last);
    for (const BlockIndex end : ends) {
      if (end == kNoBlock) continue;
      if (!IsLive(end)) return Violation() << "a sequence ends in the dead block " << end;
      ++refs[static_cast<size_t>(end)];
    }
    Status status;
    ForEachLiveBlock([&](BlockIndex b, const Block& block) {
      const size_t i = static_cast<size_t>(b);
      if (refs[i] != block.refs) {
        status = Violation() << "block " << b << " counts " << block.refs << " references of "
                             << refs[i];
      }
      if (children[i] != block.child_count || child_xor[i] != block.child_xor) {
        status = Violation() << "block " << b << " counts " << block.child_count << " children of "
                             << children[i];
      }
    });
    return status;
  }

  // A slice covers its block, in order, each entry inside one page range.
  Status CheckSlices(int group) const {
    Status status;
    ForEachLiveBlock([&](BlockIndex b, const Block& block) {
      if (tree_.slice(b, group).count < 1) {
        status = Violation() << "block " << b << " has no pages in group " << group;
        return;
      }
      const std::span<const PageEntry> table = tree_.entries(b, group);
      const int64_t freed = std::count_if(
          table.begin(), table.end(), [](const PageEntry& entry) { return entry.page == kNoPage; });
      if (tree_.tables().FreedCount(b, group) != freed) {
        status = Violation() << "block " << b << " group " << group << " counts "
                             << tree_.tables().FreedCount(b, group) << " freed entries of "
                             << freed;
      }
      if (tree_.slice(b, group).tail != table.back().page) {
        status = Violation() << "block " << b << " group " << group << " ends in page "
                             << table.back().page << ", not in " << tree_.slice(b, group).tail;
      }
      for (size_t i = 0; i < table.size(); ++i) {
        const int64_t from = i == 0 ? block.begin : table[i].start;
        const int64_t to = i + 1 == table.size() ? block.end : table[i + 1].start;
        const bool is_hole = table[i].page == kNoPage && tree_.slice(b, group).has_holes;
        if (from >= to || table[i].start > from ||
            (to > tree_.pool(group).RangeEnd(table[i].start) && !is_hole)) {
          status = Violation() << "block " << b << " group " << group << " entry " << i
                               << " of start " << table[i].start << " covers [" << from << ", "
                               << to << ")";
        }
      }
    });
    return status;
  }

  struct Holder {
    int32_t page;
    int64_t from;
    int64_t to;
    BlockIndex block;
  };

  std::vector<Holder> HoldersByPage(int group) const {
    std::vector<Holder> holders;
    ForEachLiveBlock([&](BlockIndex b, const Block& block) {
      tree_.VisitPieces(b, group, block.begin, block.end,
                        [&](int64_t from, int64_t to, int32_t page) {
                          if (page != kNoPage) holders.push_back({page, from, to, b});
                        });
    });
    std::sort(holders.begin(), holders.end(), [](const Holder& a, const Holder& b) {
      return a.page != b.page ? a.page < b.page : a.from < b.from;
    });
    return holders;
  }

  // A page is free, or held as often as it says by consecutive blocks with contiguous slots, the
  // last of which ends at the fill. So at most one block can be appended to in the page.
  Status CheckPages(int group) const {
    const PagePool& pool = tree_.pool(group);
    std::vector<int32_t> holds(static_cast<size_t>(pool.page_count()));
    const std::vector<Holder> holders = HoldersByPage(group);
    for (size_t i = 0; i < holders.size(); ++i) {
      const Holder& holder = holders[i];
      ++holds[static_cast<size_t>(holder.page)];
      const bool is_last = i + 1 == holders.size() || holders[i + 1].page != holder.page;
      if (is_last) {
        const int64_t fill = pool.Slot(holder.to - 1) + 1;
        if (pool.fill(holder.page) == fill) continue;
        return Violation() << "page " << holder.page << " of group " << group << " is filled to "
                           << pool.fill(holder.page) << ", its holders end at " << fill;
      }
      const Holder& next = holders[i + 1];
      if (next.from != holder.to || tree_.block(next.block).parent != holder.block) {
        return Violation() << "page " << holder.page << " of group " << group
                           << " is held by block " << holder.block << " up to " << holder.to
                           << " and by block " << next.block << " from " << next.from;
      }
    }
    ForEachTreePage(group, [&](int32_t, int32_t page) { ++holds[static_cast<size_t>(page)]; });
    for (const int32_t page : pool.free_pages()) {
      if (holds[static_cast<size_t>(page)] != 0 || pool.holds(page) != 0) {
        return Violation() << "page " << page << " of group " << group
                           << " is free and held, or free twice";
      }
      holds[static_cast<size_t>(page)] = -1;
    }
    for (size_t page = 0; page < holds.size(); ++page) {
      if (std::max(holds[page], 0) != pool.holds(static_cast<int32_t>(page)) || holds[page] == 0) {
        return Violation() << "page " << page << " of group " << group << " counts "
                           << pool.holds(static_cast<int32_t>(page)) << " holders of "
                           << holds[page];
      }
    }
    return Status();
  }

  // No range of a path is in more than kPagesPerRangeMax pages.
  Status CheckRanges(int group) const {
    const PagePool& pool = tree_.pool(group);
    for (const Sequence& sequence : sequences_.entries()) {
      const int64_t end = tree_.End(sequence.last);
      for (int64_t begin = 0; begin < end; begin += pool.page_size()) {
        const int64_t limit = std::min(end, begin + pool.page_size());
        const int64_t pages = tree_.PagesInRange(sequence.last, group, begin, limit);
        if (pages > kPagesPerRangeMax) {
          return Violation() << "sequence " << sequence.id << " has positions from " << begin
                             << " in " << pages << " pages of group " << group;
        }
      }
    }
    return Status();
  }

  struct SliceUser {
    int32_t array;
    int64_t first;
    int64_t count;
    BlockIndex block;
  };

  // Arrays count their slices; these follow one another along a path.
  Status CheckArrays() const {
    std::vector<SliceUser> users;
    ForEachLiveBlock([&](BlockIndex b, const Block&) {
      for (int g = 0; g < tree_.group_count(); ++g) {
        const PageSlice& s = tree_.slice(b, g);
        users.push_back({s.array, s.first, s.count, b});
      }
    });
    std::sort(users.begin(), users.end(), [this](const SliceUser& a, const SliceUser& b) {
      return a.array != b.array ? a.array < b.array
                                : tree_.block(a.block).begin < tree_.block(b.block).begin;
    });
    std::vector<int32_t> refs(static_cast<size_t>(tree_.tables().array_count()));
    for (size_t i = 0; i < users.size(); ++i) {
      ++refs[static_cast<size_t>(users[i].array)];
      if (i == 0 || users[i - 1].array != users[i].array) continue;
      const SliceUser& upper = users[i - 1];
      const int64_t overlap = upper.first + upper.count - users[i].first;
      if (overlap < 0 || overlap > 1 || tree_.block(users[i].block).parent != upper.block) {
        return Violation() << "blocks " << upper.block << " and " << users[i].block
                           << " share page array " << upper.array
                           << " but do not follow one another in it";
      }
    }
    for (size_t array = 0; array < refs.size(); ++array) {
      if (refs[array] != tree_.tables().array_refs(static_cast<int32_t>(array))) {
        return Violation() << "page array " << array << " counts "
                           << tree_.tables().array_refs(static_cast<int32_t>(array))
                           << " slices of " << refs[array];
      }
    }
    return Status();
  }

  // The viewers of a page: 0 and up, sequences by index.
  struct PageViewers {
    int32_t last_viewer = -1;
    int32_t all = 0;
    int32_t active = 0;
  };

  void SeePath(int32_t viewer, BlockIndex last, int group, std::vector<PageViewers>& pages) const {
    tree_.VisitPieces(last, group, 0, tree_.End(last), [&](int64_t, int64_t, int32_t page) {
      if (page == kNoPage) return;
      PageViewers& seen = pages[static_cast<size_t>(page)];
      if (seen.last_viewer == viewer) return;
      seen.last_viewer = viewer;
      ++seen.all;
      seen.active += !sequences_[viewer].retained;
    });
  }

  // The counts are those of each page, asked one by one, and make up the total.
  Status CheckPageCounts() const {
    const PageCounts counted = CountPages(tree_);
    PageCounts expected;
    for (int g = 0; g < tree_.group_count(); ++g) {
      std::vector<PageViewers> pages(static_cast<size_t>(tree_.pool(g).page_count()));
      for (size_t i = 0; i < sequences_.entries().size(); ++i) {
        const int32_t viewer = static_cast<int32_t>(i);
        SeePath(viewer, sequences_[viewer].last, g, pages);
        for (const ForwardMember& member : batch_) {
          if (member.sequence == viewer) SeePath(viewer, member.append.last, g, pages);
        }
      }
      ForEachTreePage(g, [&](int32_t sequence, int32_t page) {
        PageViewers& seen = pages[static_cast<size_t>(page)];
        ++seen.all;
        seen.active += !sequences_[sequence].retained;
      });
      expected.total += tree_.pool(g).page_count();
      for (const PageViewers& seen : pages) {
        expected.free += seen.all == 0;
        expected.retained_only += seen.all > 0 && seen.active == 0;
        expected.exclusive += seen.all == 1 && seen.active == 1;
        expected.shared += seen.all > 1 && seen.active > 0;
      }
    }
    const int64_t sum = counted.free + counted.exclusive + counted.shared + counted.retained_only;
    if (counted == expected && sum == counted.total) return Status();
    return Violation() << "page counts are " << counted.free << " free, " << counted.exclusive
                       << " exclusive, " << counted.shared << " shared, " << counted.retained_only
                       << " retained only of " << counted.total << " instead of " << expected.free
                       << ", " << expected.exclusive << ", " << expected.shared << ", "
                       << expected.retained_only << " of " << expected.total;
  }

  // f(sequence, page)
  template <typename F>
  void ForEachTreePage(int group, F&& f) const {
    if (trees_ == nullptr) return;
    for (size_t i = 0; i < trees_->entries().size(); ++i) {
      const TokenTree& tree = trees_->entries()[i];
      if (tree.groups.empty()) continue;
      for (const int32_t page : tree.groups[static_cast<size_t>(group)].pages)
        f(static_cast<int32_t>(i), page);
    }
  }

  // Depths follow from parents, pages hold exactly the nodes, and the path of a sequence reaches
  // behind its committed tokens by the levels of its tree, where it is alone.
  Status CheckTrees() const {
    int64_t nodes = 0;
    int64_t levels = 0;
    for (size_t i = 0; i < sequences_.entries().size(); ++i) {
      const Sequence& sequence = sequences_.entries()[i];
      const TokenTree* tree = nullptr;
      if (trees_ != nullptr) tree = trees_->Find(static_cast<int32_t>(i));
      if (tree == nullptr) {
        QUIRE_RETURN_IF_ERROR(CheckPending(sequence));
        continue;
      }
      QUIRE_RETURN_IF_ERROR(CheckTree(sequence, *tree));
      nodes += tree->size();
      levels += tree->levels;
    }
    if (trees_ == nullptr) return Status();
    if (nodes == trees_->node_count() && levels == trees_->level_count()) return Status();
    return Violation() << nodes << " nodes and " << levels << " levels in trees, "
                       << trees_->node_count() << " and " << trees_->level_count() << " counted";
  }

  // Without a tree, what is reserved is pending; there the sequence is alone, from a page of its
  // own on.
  Status CheckPending(const Sequence& sequence) const {
    if (sequence.reserved != sequence.pending) {
      return Violation() << "sequence " << sequence.id << " has " << sequence.reserved
                         << " reserved positions, " << sequence.pending
                         << " of them pending, and no tree";
    }
    if (sequence.pending == 0) return Status();
    const int64_t committed = tree_.End(sequence.last) - sequence.reserved;
    bool alone = !sequence.retained && tree_.IsExclusiveFrom(sequence.last, committed);
    for (int g = 0; g < tree_.group_count() && committed > 0; ++g) {
      int32_t before = kNoPage;
      tree_.VisitPieces(sequence.last, g, committed - 1, committed,
                        [&](int64_t, int64_t, int32_t page) { before = page; });
      tree_.VisitPieces(sequence.last, g, committed, committed + 1,
                        [&](int64_t, int64_t, int32_t page) { alone &= page != before; });
    }
    if (alone) return Status();
    return Violation() << "the pending tokens of sequence " << sequence.id
                       << " share a page or are seen by others";
  }

  Status CheckTree(const Sequence& sequence, const TokenTree& tree) const {
    int64_t levels = 0;
    for (size_t n = 0; n < tree.parents.size(); ++n) {
      const int32_t parent = tree.parents[n];
      const int32_t above = parent < 0 ? -1 : tree.depths[static_cast<size_t>(parent)];
      levels = std::max<int64_t>(levels, tree.depths[n] + 1);
      if (parent < static_cast<int32_t>(n) && tree.depths[n] == above + 1) continue;
      return Violation() << "node " << n << " of sequence " << sequence.id << " has depth "
                         << tree.depths[n] << " and parent " << parent;
    }
    const int64_t committed = tree_.End(sequence.last) - sequence.reserved;
    if (sequence.id < 0 || sequence.retained || sequence.pending > 0 || levels != tree.levels ||
        levels != sequence.reserved || !tree_.IsExclusiveFrom(sequence.last, committed)) {
      return Violation() << "the tree of sequence " << sequence.id << " has " << levels
                         << " levels, " << sequence.reserved << " positions are reserved";
    }
    for (int g = 0; g < tree_.group_count(); ++g) {
      const size_t pages = tree.groups[static_cast<size_t>(g)].pages.size();
      if (static_cast<int64_t>(pages) == tree_.pool(g).RangeCount(0, tree.size())) continue;
      return Violation() << "the " << tree.size() << " nodes of sequence " << sequence.id
                         << " have " << pages << " pages of group " << g;
    }
    return Status();
  }

  // Every sequence is found under its id, and the counts are theirs.
  Status CheckSequences() const {
    int64_t count = 0;
    int64_t retained = 0;
    for (const Sequence& sequence : sequences_.entries()) {
      if (sequence.id < 0) continue;
      ++count;
      retained += sequence.retained;
      const int32_t found = sequences_.Find(sequence.id);
      if (found == SequenceTable::kAbsent || &sequences_[found] != &sequence) {
        return Violation() << "sequence " << sequence.id << " is not found under its id";
      }
    }
    if (count == sequences_.count() && retained == sequences_.retained_count()) return Status();
    return Violation() << count << " sequences are in the table, " << retained << " retained, "
                       << sequences_.count() << " and " << sequences_.retained_count()
                       << " counted";
  }

  // Numbers of viewers are those of the sequences behind them.
  Status CheckViewers() const {
    std::vector<std::set<int32_t>> viewers(static_cast<size_t>(tree_.blocks().capacity()));
    const auto see = [&](BlockIndex last, int32_t viewer) {
      for (BlockIndex b = last; b != kNoBlock; b = tree_.block(b).parent)
        viewers[static_cast<size_t>(b)].insert(viewer);
    };
    for (size_t i = 0; i < sequences_.entries().size(); ++i)
      see(sequences_.entries()[i].last, static_cast<int32_t>(i));
    for (const ForwardMember& member : batch_) {
      if (member.append.copies()) see(member.append.last, member.sequence);
    }
    Status status;
    ForEachLiveBlock([&](BlockIndex b, const Block& block) {
      const std::set<int32_t>& seen_by = viewers[static_cast<size_t>(b)];
      const bool is_active = std::any_of(seen_by.begin(), seen_by.end(),
                                         [&](int32_t v) { return !sequences_[v].retained; });
      if (block.is_seen_by_many() != (seen_by.size() > 1) || block.is_active() != is_active) {
        status = Violation() << "block " << b << " is seen by " << seen_by.size()
                             << " sequences, which it does not know";
      }
    });
    return status;
  }

  // A child is known to have the last page of its parent iff it has.
  Status CheckBorders(int group) const {
    Status status;
    std::vector<BlockIndex> next(static_cast<size_t>(tree_.blocks().capacity()), kNoBlock);
    ForEachLiveBlock([&](BlockIndex b, const Block& block) {
      if (block.parent == kNoBlock) return;
      const int32_t page = tree_.entries(b, group).front().page;
      if (page != kNoPage && page == tree_.entries(block.parent, group).back().page)
        next[static_cast<size_t>(block.parent)] = b;
    });
    ForEachLiveBlock([&](BlockIndex b, const Block&) {
      if (tree_.slice(b, group).next == next[static_cast<size_t>(b)]) return;
      status = Violation() << "the last page of block " << b << " in group " << group
                           << " goes on in block " << next[static_cast<size_t>(b)] << ", not in "
                           << tree_.slice(b, group).next;
    });
    return status;
  }

  // What blocks hide is what all sequences hide that see them, and nothing of it has a page unless
  // a forward is open.
  Status CheckHidden(int group) const {
    const size_t capacity = static_cast<size_t>(tree_.blocks().capacity());
    std::vector<HiddenPages> hidden(capacity, {.begin = 0, .end = INT64_MAX});
    const auto see = [&](BlockIndex last, HiddenPages by) {
      for (BlockIndex b = last; b != kNoBlock; b = tree_.block(b).parent) {
        HiddenPages& all = hidden[static_cast<size_t>(b)];
        all = {std::max(all.begin, by.begin), std::min(all.end, by.end)};
      }
    };
    for (size_t i = 0; i < sequences_.entries().size(); ++i) {
      const Sequence& sequence = sequences_.entries()[i];
      if (sequence.last == kNoBlock) continue;
      const HiddenPages by = tree_.hidden().HiddenBySequence(static_cast<int32_t>(i), group);
      see(sequence.last, by);
      const bool in_batch = std::any_of(batch_.begin(), batch_.end(), [&](const auto& member) {
        return member.sequence == static_cast<int32_t>(i);
      });
      const int64_t length = tree_.End(sequence.last) - sequence.reserved;
      const HiddenPages expected = HiddenPagesOf(sequence, length, max_pop_, tree_.pool(group),
                                                 layer_windows_[static_cast<size_t>(group)]);
      if (in_batch || by == expected) continue;
      return Violation() << "sequence " << sequence.id << " hides [" << by.begin << ", " << by.end
                         << ") in group " << group << " instead of [" << expected.begin << ", "
                         << expected.end << ")";
    }
    for (const ForwardMember& member : batch_) {
      if (member.append.copies()) see(member.append.last, {});
    }
    Status status;
    ForEachLiveBlock([&](BlockIndex b, const Block& block) {
      const auto of_block = [&](HiddenPages pages) {
        const HiddenPages clipped = {std::max(pages.begin, block.begin),
                                     std::min(pages.end, block.end)};
        return clipped.empty() ? HiddenPages{} : clipped;
      };
      const HiddenPages expected = of_block(hidden[static_cast<size_t>(b)]);
      const HiddenPages found = of_block(tree_.hidden().HiddenFrom(b, group));
      if (found != expected) {
        status = Violation() << "block " << b << " hides [" << found.begin << ", " << found.end
                             << ") in group " << group << " instead of [" << expected.begin << ", "
                             << expected.end << ")";
      }
      const Status freed = CheckFreed(b, group, batch_.empty() ? expected : HiddenPages{});
      if (!freed.ok()) status = freed;
    });
    return status;
  }

  // No page that begins in the block at a position of `hidden`, or of its `done`, is held.
  Status CheckFreed(BlockIndex b, int group, HiddenPages hidden) const {
    const std::span<const PageEntry> table = tree_.entries(b, group);
    const BlockIndex parent = tree_.block(b).parent;
    for (size_t i = 0; i < table.size(); ++i) {
      const bool is_parents = i == 0 && parent != kNoBlock && tree_.slice(parent, group).next == b;
      if (table[i].page == kNoPage || is_parents) continue;
      for (const HiddenPages& range : {hidden, tree_.slice(b, group).done}) {
        if (table[i].start < range.begin || table[i].start >= range.end) continue;
        return Violation() << "block " << b << " has page " << table[i].page << " of group "
                           << group << " at " << table[i].start << ", which nobody sees";
      }
    }
    return Status();
  }

  const BlockTree& tree_;
  const SequenceTable& sequences_;
  std::span<const ForwardMember> batch_;
  const TokenTrees* trees_;
  std::span<const int64_t> layer_windows_;  // [group]
  int64_t max_pop_;
};

}  // namespace

Status CheckKVInvariants(const BlockTree& tree, const SequenceTable& sequences,
                         std::span<const ForwardMember> batch, const TokenTrees* trees,
                         std::span<const int64_t> layer_windows, int64_t max_pop) {
  return Checker(tree, sequences, batch, trees, layer_windows, max_pop).Check();
}

}  // namespace quire
