#include "kv/plan/forward_plan.h"

#include <algorithm>
#include <cstddef>
#include <numeric>

#include "base/check.h"
#include "kv/pages/reserve.h"
#include "kv/pages/text.h"

namespace quire {

void ForwardPlan::StartBatch(size_t member_count, size_t group_count) {
  filled_at_ = 0;
  totals_ = {};
  members.clear();
  group_appends.clear();
  node_depths.clear();
  ReserveGrowing(members, member_count);
  group_appends.resize(member_count * group_count);
  page_counts.assign(group_count, 0);
}

void ForwardPlan::ClearArrays() noexcept {
  filled_at_ = 0;
  row_count_ = 0;
  positions_.clear();
  old_levels_.clear();
  for (GroupPlan& plan : groups_) {
    for (TokenSlots* const slots : {&plan.rows, &plan.imports}) {
      slots->targets.clear();
      slots->opens_tile.clear();
    }
    plan.runs.clear();
    plan.sequences.clear();
    plan.trees.clear();
    plan.copy_from.clear();
    plan.copy_to.clear();
    plan.copy_opens_tile.clear();
  }
  shared_.clear();
  order_.clear();
  private_segments_.clear();
}

// Adds up the blocks of the path, and finds whether another member has one of them on its path too.
// Paths part behind the deepest block that they have in common, so that one has more than one
// reference: others are not looked at. The new path of a member that copies has less in common
// with others than the old one, which is looked at; to build nodes for no sharing changes nothing.
inline void ForwardPlan::AddPath(const BlockTree& tree, BlockIndex last, BatchTotals& totals) {
  for (BlockIndex b = last; b != kNoBlock; b = tree.block(b).parent) {
    ++totals.path_blocks;
    if (tree.block(b).refs < 2) continue;
    Mark& mark = marks_[static_cast<size_t>(b)];
    totals.shares_blocks |= mark.pass == pass_;
    mark.pass = pass_;
  }
}

namespace {

// Whether rows and imported tokens of each member come right after those of the one before.
bool FollowOneAnother(std::span<const ForwardMember> members) {
  int64_t rows = 0;
  int64_t imports = 0;
  for (const ForwardMember& member : members) {
    if (member.first_row != rows || member.first_import != imports) return false;
    rows += member.row_count();
    imports += member.imported;
  }
  return true;
}

}  // namespace

void ForwardPlan::Reserve(const BlockTree& tree) {
  QUIRE_DCHECK(!members.empty());
  QUIRE_DCHECK(group_appends.size() == members.size() * static_cast<size_t>(tree.group_count()));
  marks_.resize(static_cast<size_t>(tree.blocks().capacity()));
  ++pass_;
  QUIRE_DCHECK(FollowOneAnother(members)) << "rows are in the order of the batch";
  BatchTotals totals;  // apart, so that they stay in registers
  totals.rows = members.back().first_row + members.back().row_count();
  totals.imports = import_count();
  for (const ForwardMember& member : members) {
    AddPath(tree, member.append.last, totals);
    totals.copying += member.append.copies();
    totals.copied_tokens += member.old_length() - member.append.cut;
    totals.trees += member.is_tree();
    totals.blending += member.blends;
    int64_t& end = member.long_factors ? totals.long_end : totals.short_end;
    end = std::max(end, member.position_end());
    totals.has_sinks |= member.window.sinks > 0;
  }
  totals.members = static_cast<int64_t>(members.size());
  totals_ = totals;
  const size_t rows = static_cast<size_t>(totals_.rows);
  const size_t copies = static_cast<size_t>(totals_.copied_tokens);
  // A path gets at most one block of its own and one more for every block that a cut may split.
  const size_t blocks = 1 + static_cast<size_t>(totals_.path_blocks) +
                        members.size() * static_cast<size_t>(1 + totals_.copying);
  groups_.resize(static_cast<size_t>(tree.group_count()));
  for (GroupPlan& plan : groups_) {
    ReserveGrowing(plan.rows.targets, rows);
    ReserveGrowing(plan.rows.opens_tile, rows);
    ReserveGrowing(plan.imports.targets, static_cast<size_t>(totals_.imports));
    ReserveGrowing(plan.imports.opens_tile, static_cast<size_t>(totals_.imports));
    ReserveGrowing(plan.runs, blocks);
    ReserveGrowing(plan.sequences, members.size());
    ReserveGrowing(plan.trees, static_cast<size_t>(totals_.trees));
    ReserveGrowing(plan.copy_from, copies);
    ReserveGrowing(plan.copy_to, copies);
    ReserveGrowing(plan.copy_opens_tile, copies);
  }
  ReserveGrowing(positions_, rows);
  if (totals_.trees > 0) ReserveGrowing(old_levels_, rows);
  ReserveGrowing(shared_, blocks);
  ReserveGrowing(order_, members.size());
  ReserveGrowing(private_segments_, members.size());
  ReserveGrowing(opens_page_, members.size());
  ReserveGrowing(nodes_, blocks);
}

// The old levels of the member's row i; those of the rows before are there.
int32_t ForwardPlan::OldLevels(const ForwardMember& member, int64_t i) const noexcept {
  const int64_t first = member.first_node();
  const int64_t parent = member.tree->parents[static_cast<size_t>(first + i)];
  QUIRE_DCHECK(parent < first + i) << "a node comes before its parent";
  if (parent < 0) return 0;
  if (parent < first) return member.tree->depths[static_cast<size_t>(parent)] + 1;
  return old_levels_[static_cast<size_t>(member.first_row + parent - first)];
}

inline void ForwardPlan::FillPositions() noexcept {
  row_count_ = totals_.rows;
  QUIRE_DCHECK(std::ssize(members) == totals_.members) << "the totals are those of another batch";
  QUIRE_DCHECK(positions_.capacity() >= static_cast<size_t>(row_count_)) << "no room was reserved";
  positions_.resize(static_cast<size_t>(row_count_));
  if (totals_.rows_only()) {
    int32_t* position = positions_.data();
    for (const ForwardMember& member : members)
      *position++ = static_cast<int32_t>(member.append.length);
    return;
  }
  for (const ForwardMember& member : members) {
    int32_t* const positions = positions_.data() + member.first_row;
    const int64_t base = member.base();
    for (int64_t i = 0; i < member.row_count(); ++i) {
      const int64_t depth =
          member.is_tree() ? member.tree->depths[static_cast<size_t>(member.first_node() + i)] : i;
      positions[i] = static_cast<int32_t>(base + depth);
    }
  }
  if (totals_.trees == 0) return;
  for (const ForwardMember& member : members) {
    for (int64_t i = 0; i < member.row_count(); ++i)
      old_levels_.push_back(member.is_tree() ? OldLevels(member, i) : 0);
  }
}

void ForwardPlan::Fill(const BlockTree& tree) noexcept {
  QUIRE_DCHECK(order_.empty()) << "the arrays of the plan before are still there";
  QUIRE_DCHECK(std::ssize(groups_) == tree.group_count());
  FillPositions();
  if (totals_.shares_blocks) {
    BuildNodes(tree);
    OrderByTree(tree);
  } else {
    order_.resize(members.size());
    std::iota(order_.begin(), order_.end(), 0);
    private_segments_.resize(members.size(), 0);
  }
  const int group_count = tree.group_count();
  for (int g = 0; g < group_count; ++g) {
    group(g).rows.targets.resize(static_cast<size_t>(row_count_));
    group(g).rows.opens_tile.resize(static_cast<size_t>(row_count_));
    group(g).imports.targets.resize(static_cast<size_t>(totals_.imports));
    group(g).imports.opens_tile.resize(static_cast<size_t>(totals_.imports));
    const bool rows_only = totals_.rows_only();
    const GroupAppend* append = group_appends.data() + g;
    for (const ForwardMember& member : members) {
      if (rows_only || member.is_row()) {
        FillSlot(tree, g, member, append->in_place);
      } else if (member.is_tree()) {
        FillNodeSlots(tree, g, member);
      } else {
        FillSlots(tree, g, member, *append);
      }
      if (member.append.copies()) FillCopies(tree, g, member);
      append += group_count;
    }
    FillSequences(tree, g);
  }
  // A forward that follows one with imported tokens, or one that blends, gets a new plan: it has
  // neither. And what follows a forward of trees is no token more.
  if (totals_.imports + totals_.trees + totals_.blending == 0) filled_at_ = tree.tables().version();
}

// ---------------------------------------------------------------------- slots

// A row alone: its page is where the sequence ends, known without the table.
inline void ForwardPlan::FillSlot(const BlockTree& tree, int group_index,
                                  const ForwardMember& member, bool in_place) noexcept {
  QUIRE_DCHECK(member.is_row());
  TokenSlots& rows = group(group_index).rows;
  const int64_t slot = tree.pool(group_index).Slot(member.append.length);
  const size_t row = static_cast<size_t>(member.first_row);
  rows.targets[row] = {.page = tree.slice(member.last, group_index).tail,
                       .slot = static_cast<int32_t>(slot)};
  rows.opens_tile[row] = !in_place || slot % kTilePositions == 0;
}

void ForwardPlan::FillSlots(const BlockTree& tree, int group_index, const ForwardMember& member,
                            const GroupAppend& append) noexcept {
  const PagePool& pool = tree.pool(group_index);
  GroupPlan& plan = group(group_index);
  const bool in_place = append.in_place;
  const auto fill = [&](int64_t begin, int64_t count, int64_t first, TokenSlots& slots) {
    tree.VisitPieces(member.last, group_index, begin, begin + count,
                     [&](int64_t from, int64_t to, int32_t page) {
                       size_t i = static_cast<size_t>(first + from - begin);
                       int32_t slot = static_cast<int32_t>(pool.Slot(from));
                       for (int64_t p = from; p < to; ++p, ++i, ++slot) {
                         slots.targets[i] = {.page = page, .slot = slot};
                         slots.opens_tile[i] = slot % kTilePositions == 0;
                       }
                     });
  };
  fill(member.base(), member.row_count(), member.first_row, plan.rows);
  if (member.imported > 0) {
    fill(member.old_length(), member.imported, member.first_import, plan.imports);
  }
  // Behind what is left out a page begins, with an imported token or a row.
  const AbsentRange& absent = append.absent;
  if (absent.begin < absent.end && absent.end < member.base()) {
    plan.imports
        .opens_tile[static_cast<size_t>(member.first_import + absent.end - member.old_length())] =
        1;
  } else if (absent.begin < absent.end && member.row_count() > 0) {
    plan.rows.opens_tile[static_cast<size_t>(member.first_row)] = 1;
  }
  // A page that is opened in mid-tile opens that tile. (With copies the first copied token has done
  // it.)
  const bool continues_copy =
      member.append.copies() &&
      tree.IsHeld(member.last, group_index, member.old_length() - 1, member.old_length());
  if (in_place || continues_copy) return;
  if (member.imported > 0) {
    plan.imports.opens_tile[static_cast<size_t>(member.first_import)] = 1;
  } else {
    plan.rows.opens_tile[static_cast<size_t>(member.first_row)] = 1;
  }
}

// In the tree's own pages, which nobody else writes: their slots are taken in order.
void ForwardPlan::FillNodeSlots(const BlockTree& tree, int group_index,
                                const ForwardMember& member) noexcept {
  const PagePool& pool = tree.pool(group_index);
  TokenSlots& rows = group(group_index).rows;
  const std::vector<int32_t>& pages = member.tree->groups[static_cast<size_t>(group_index)].pages;
  QUIRE_DCHECK(member.tree->size() <= std::ssize(pages) * pool.page_size()) << "nodes have no page";
  for (int64_t i = 0; i < member.row_count(); ++i) {
    const int64_t node = member.first_node() + i;
    const int64_t slot = pool.Slot(node);
    const size_t row = static_cast<size_t>(member.first_row + i);
    rows.targets[row] = {.page = pages[static_cast<size_t>(node / pool.page_size())],
                         .slot = static_cast<int32_t>(slot)};
    rows.opens_tile[row] = slot % kTilePositions == 0;
  }
}

void ForwardPlan::FillCopies(const BlockTree& tree, int group_index,
                             const ForwardMember& member) noexcept {
  const PagePool& pool = tree.pool(group_index);
  GroupPlan& plan = group(group_index);
  const size_t first = plan.copy_from.size();
  const int64_t cut = member.append.cut;
  const size_t size = first + static_cast<size_t>(member.old_length() - cut);
  QUIRE_DCHECK(plan.copy_from.capacity() >= size && plan.copy_to.capacity() >= size)
      << "no room was reserved";
  const auto visit = [&](BlockIndex last, std::vector<AppendTarget>& slots) {
    slots.resize(size);
    tree.VisitPieces(last, group_index, cut, member.old_length(),
                     [&](int64_t from, int64_t to, int32_t page) {
                       for (int64_t p = from; p < to; ++p) {
                         slots[first + static_cast<size_t>(p - cut)] = {
                             .page = page, .slot = static_cast<int32_t>(pool.Slot(p))};
                       }
                     });
  };
  visit(member.append.last, plan.copy_from);
  visit(member.last, plan.copy_to);
  // Ranges that are no longer held have no bytes to copy and no page to copy them to.
  size_t kept = first;
  for (size_t i = first; i < size; ++i) {
    if (plan.copy_to[i].page == kNoPage) continue;
    plan.copy_from[kept] = plan.copy_from[i];
    plan.copy_to[kept] = plan.copy_to[i];
    const AppendTarget& to = plan.copy_to[kept];
    const bool opens =
        kept == first || to.slot % kTilePositions == 0 || to.page != plan.copy_to[kept - 1].page;
    plan.copy_opens_tile.push_back(opens);
    ++kept;
  }
  plan.copy_from.resize(kept);
  plan.copy_to.resize(kept);
  QUIRE_DCHECK(plan.copy_opens_tile.size() == kept);
}

// ---------------------------------------------------------------------- sharing

void ForwardPlan::AddChild(int32_t parent, int32_t child) noexcept {
  Node& up = nodes_[static_cast<size_t>(parent)];
  nodes_[static_cast<size_t>(child)].parent = parent;
  if (up.first_child < 0) {
    up.first_child = child;
  } else {
    nodes_[static_cast<size_t>(up.last_child)].next_sibling = child;
  }
  up.last_child = child;
}

// The part of the block tree on which members lie, children in the order in which the batch first
// touches them. A walk up a path ends at the first block that another member has touched.
void ForwardPlan::BuildNodes(const BlockTree& tree) noexcept {
  ++pass_;
  nodes_.clear();
  nodes_.push_back(Node{});
  for (size_t m = 0; m < members.size(); ++m) {
    int32_t child = -1;
    BlockIndex b = members[m].last;
    for (; b != kNoBlock && marks_[static_cast<size_t>(b)].pass != pass_;
         b = tree.block(b).parent) {
      QUIRE_DCHECK(nodes_.size() < nodes_.capacity()) << "no room was reserved";
      const int32_t node = static_cast<int32_t>(nodes_.size());
      nodes_.push_back(Node{.block = b});
      if (child >= 0) AddChild(node, child);
      if (child < 0) nodes_.back().member = static_cast<int32_t>(m);
      marks_[static_cast<size_t>(b)] = {.pass = pass_, .node = node};
      child = node;
    }
    // A member ends in a block of its own (it has just been given tokens), so at least one node is
    // new.
    QUIRE_CHECK(child >= 0) << "sequence " << members[m].id << " has no block of its own";
    AddChild(b == kNoBlock ? 0 : marks_[static_cast<size_t>(b)].node, child);
  }
  for (const ForwardMember& member : members) {
    int32_t node = marks_[static_cast<size_t>(member.last)].node;
    for (; node >= 0; node = nodes_[static_cast<size_t>(node)].parent) {
      ++nodes_[static_cast<size_t>(node)].member_count;
    }
  }
}

int32_t ForwardPlan::NextNode(int32_t index) const noexcept {
  const Node* node = &nodes_[static_cast<size_t>(index)];
  if (node->first_child >= 0) return node->first_child;
  while (node->next_sibling < 0 && node->parent >= 0)
    node = &nodes_[static_cast<size_t>(node->parent)];
  return node->next_sibling;
}

// A block of two or more members is read once for them, in whole segments: from where the sharing
// of its ancestors ended. All their rows see it, since new tokens lie in blocks of one member. The
// span of an ancestor with the same members grows instead.
void ForwardPlan::EnterNode(const BlockTree& tree, int32_t index) noexcept {
  Node& node = nodes_[static_cast<size_t>(index)];
  const Node& parent = nodes_[static_cast<size_t>(node.parent)];
  node.shared_end = parent.shared_end;
  node.span = parent.span;
  const int64_t segment_end = tree.block(node.block).end / kSegmentPositions;
  QUIRE_DCHECK(node.member_count >= 1 && node.member_count <= parent.member_count);
  QUIRE_DCHECK(segment_end >= parent.shared_end) << "a block ends before its parent";
  if (node.member_count >= 2 && segment_end > parent.shared_end) {
    if (node.span < 0 || shared_[static_cast<size_t>(node.span)].count != node.member_count) {
      node.span = static_cast<int32_t>(shared_.size());
      shared_.push_back({.first = static_cast<int64_t>(order_.size()),
                         .count = node.member_count,
                         .segment_begin = parent.shared_end,
                         .segment_end = segment_end});
    }
    shared_[static_cast<size_t>(node.span)].segment_end = segment_end;
    node.shared_end = segment_end;
  }
  if (node.member < 0) return;
  order_.push_back(node.member);
  private_segments_.push_back(node.shared_end);
}

void ForwardPlan::OrderByTree(const BlockTree& tree) noexcept {
  for (int32_t node = NextNode(0); node >= 0; node = NextNode(node)) EnterNode(tree, node);
  QUIRE_DCHECK(order_.size() == members.size()) << "a member ends in no block of the walk";
  std::sort(shared_.begin(), shared_.end(), [](const SharedSpan& a, const SharedSpan& b) {
    return a.segment_begin != b.segment_begin ? a.segment_begin < b.segment_begin
                                              : a.first < b.first;
  });
}

// ---------------------------------------------------------------------- runs

// One run for all blocks that follow one another in an array. The walk meets the last run first.
inline void ForwardPlan::FillRuns(const BlockTree& tree, int group_index, BlockIndex last,
                                  std::vector<PageRun>& runs) noexcept {
  const size_t first = runs.size();
  int32_t array = -1;
  for (BlockIndex b = last; b != kNoBlock; b = tree.block(b).parent) {
    const Block& block = tree.block(b);
    const PageSlice& slice = tree.slice(b, group_index);
    const PageEntry* const entries = tree.tables().array_data(slice.array) + slice.first;
    if (slice.array != array) {
      QUIRE_DCHECK(runs.size() < runs.capacity()) << "sequences point to the runs before";
      array = slice.array;
      runs.push_back(
          {.entries = entries, .entry_count = slice.count, .begin = block.begin, .end = block.end});
    } else {
      PageRun& run = runs.back();
      QUIRE_DCHECK(block.end == run.begin) << "blocks of a path follow one another";
      QUIRE_DCHECK(entries <= run.entries) << "their entries, too";
      run.entry_count += run.entries - entries;
      run.entries = entries;
      run.begin = block.begin;
    }
  }
  std::reverse(runs.begin() + static_cast<std::ptrdiff_t>(first), runs.end());
}

const TokenTreeView* ForwardPlan::AddTreeView(int group_index,
                                              const ForwardMember& member) noexcept {
  const TokenTree& tree = *member.tree;
  const auto first = tree.depths.begin() + member.first_node();
  const auto [least, most] = std::minmax_element(first, tree.depths.end());
  std::vector<TokenTreeView>& trees = group(group_index).trees;
  QUIRE_DCHECK(trees.size() < trees.capacity()) << "sequences point to the trees before";
  trees.push_back({.parents = tree.parents.data(),
                   .depths = tree.depths.data(),
                   .pages = tree.groups[static_cast<size_t>(group_index)].pages.data(),
                   .first_node = member.first_node(),
                   .min_depth = *least,
                   .max_depth = *most,
                   .old_levels = old_levels_.data() + member.first_row});
  return &trees.back();
}

inline void ForwardPlan::FillSequences(const BlockTree& tree, int group_index) noexcept {
  GroupPlan& plan = group(group_index);
  QUIRE_DCHECK(private_segments_.size() == order_.size());
  for (size_t i = 0; i < order_.size(); ++i) {
    const ForwardMember& member = members[static_cast<size_t>(order_[i])];
    const size_t first_run = plan.runs.size();
    FillRuns(tree, group_index, member.last, plan.runs);
    plan.sequences.push_back(
        {.first_row = member.first_row,
         .row_count = member.row_count(),
         .base = member.base(),
         .runs = plan.runs.data() + first_run,
         .run_count = static_cast<int64_t>(plan.runs.size() - first_run),
         .private_segment = private_segments_[i],
         .window = member.window,
         .tree = member.is_tree() ? AddTreeView(group_index, member) : nullptr});
  }
}

// ---------------------------------------------------------------------- text

namespace {

void PrintRun(Text& out, const PageRun& run) {
  out << " [" << run.begin << ", " << run.end << ")";
  for (int64_t i = 0; i < run.entry_count; ++i) {
    out << " " << run.entries[i].start << ":" << run.entries[i].page;
  }
}

void PrintSlot(Text& out, const AppendTarget& slot) { out << slot.page << "." << slot.slot; }

void PrintNodes(Text& out, const ForwardMember& member) {
  const int64_t first = member.first_node();
  out << "nodes [" << first << ", " << first + member.row_count() << ") behind " << member.base()
      << " tokens, parents";
  for (int64_t n = first; n < first + member.row_count(); ++n) {
    out << " " << member.tree->parents[static_cast<size_t>(n)];
  }
}

void PrintSlots(Text& out, const char* name, const TokenSlots& slots) {
  for (size_t i = 0; i < slots.targets.size(); ++i) {
    out << "  " << name << " " << i << " -> ";
    PrintSlot(out, slots.targets[i]);
    out << (slots.opens_tile[i] != 0 ? " opens\n" : "\n");
  }
}

void PrintGroup(Text& out, const GroupPlan& plan, std::span<const ForwardMember> members,
                std::span<const int32_t> order) {
  for (size_t i = 0; i < plan.copy_from.size(); ++i) {
    out << "  copy ";
    PrintSlot(out, plan.copy_from[i]);
    out << " -> ";
    PrintSlot(out, plan.copy_to[i]);
    out << (plan.copy_opens_tile[i] != 0 ? " opens\n" : "\n");
  }
  PrintSlots(out, "import", plan.imports);
  PrintSlots(out, "row", plan.rows);
  for (size_t i = 0; i < plan.sequences.size(); ++i) {
    const AttentionSequence& sequence = plan.sequences[i];
    out << "  sequence " << members[static_cast<size_t>(order[i])].id << " reads";
    for (int64_t r = 0; r < sequence.run_count; ++r) PrintRun(out, sequence.runs[r]);
    out << ", private from segment " << sequence.private_segment;
    if (sequence.window != SequenceWindow{}) {
      out << ", window " << sequence.window.window << " sinks " << sequence.window.sinks << " slid "
          << sequence.window.slid;
    }
    out << "\n";
  }
}

}  // namespace

// Slots are written page.slot, page tables start:page.
std::string ForwardPlan::ToString(const BlockTree& tree) const {
  Text out;
  out << "forward of " << members.size() << " sequences, " << row_count_ << " rows\n";
  for (const ForwardMember& member : members) {
    out << "sequence " << member.id << ": rows [" << member.first_row << ", "
        << member.first_row + member.row_count() << ") ";
    if (member.is_tree()) {
      PrintNodes(out, member);
    } else {
      out << "positions [" << member.base() << ", " << member.position_end() << ")";
    }
    if (member.append.copies()) {
      out << " after copies of [" << member.append.cut << ", " << member.old_length() << ")";
    }
    if (member.imported > 0) {
      out << " behind imports of [" << member.old_length() << ", " << member.base() << ")";
    }
    out << "\n";
  }
  for (int g = 0; g < tree.group_count(); ++g) {
    out << "group " << g << ", page size " << tree.pool(g).page_size() << "\n";
    PrintGroup(out, group(g), members, order_);
  }
  for (const SharedSpan& span : shared_) {
    out << "segments [" << span.segment_begin << ", " << span.segment_end << ") are shared by";
    for (int64_t i = 0; i < span.count; ++i) {
      out << " " << members[static_cast<size_t>(order_[static_cast<size_t>(span.first + i)])].id;
    }
    out << "\n";
  }
  return out.str();
}

}  // namespace quire
