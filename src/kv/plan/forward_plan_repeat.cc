// The step after a decode step: the same batch in the same order, one token more for each member.
// Its plan is the last one with every number one higher, and here it is made so, which reads and
// writes a few cache lines per sequence; planning from the start walks every path.
//
// Invariant: while filled_at_ is the tree's version, nothing has changed in the tree since the
// arrays were filled, that is to say since the appends of that forward. So each member still ends
// in the block that it was given tokens in then:
//   - nobody else has a reference on that block (it would have taken a fork), so it is extended;
//   - its last page is filled to where the member ends, so the next slot of that page is free, and
//     only behind the last slot a page is opened;
//   - paths, their order and what members share are the same, since only blocks of one member grow.
//   - it has imported no tokens in between: a plan that has imports is never repeated.
// Everything else that could make the two plans differ is asked for in CanRepeat, among it that no
// page array has to move, to which runs of several members may point.
//
// DifferenceFromNew compares with a plan that is made the long way; CheckInvariants of the cache
// calls it in every forward.
#include <limits>
#include <string>

#include "base/check.h"
#include "kv/plan/forward_plan.h"

namespace quire {

bool ForwardPlan::CanRepeat(std::span<const int64_t> ids, std::span<const int64_t> lengths,
                            const BlockTree& tree) noexcept {
  const bool same_shape = filled_at_ == tree.tables().version() && ids.size() == members.size() &&
                          lengths.size() == members.size() && positions_.size() == members.size();
  if (!same_shape) return false;
  for (size_t m = 0; m < members.size(); ++m) {
    const bool one_more = ids[m] == members[m].id && lengths[m] == 1 &&
                          positions_[m] < std::numeric_limits<int32_t>::max() - 1;
    if (!one_more) return false;
    tree.PrefetchBlock(members[m].last);  // Repeat changes it; by then it has come from memory
  }
  for (int g = 0; g < tree.group_count(); ++g) {
    const PagePool& pool = tree.pool(g);
    const std::vector<AppendTarget>& targets = group(g).rows.targets;
    int64_t opened = 0;
    for (size_t m = 0; m < targets.size(); ++m) {
      pool.Prefetch(targets[m].page);
      if (targets[m].slot + 1 < pool.page_size()) continue;
      ++opened;
      if (!tree.tables().HasRoomForEntry(members[m].last)) return false;
    }
    page_counts[static_cast<size_t>(g)] = opened;
  }
  return true;
}

void ForwardPlan::RepeatSlots(PagePool& pool, int group_index) noexcept {
  const int64_t page_size = pool.page_size();
  const size_t member_count = members.size();
  const size_t group_count = groups_.size();
  // Apart, since to store a byte may be to change any of the pointers to them.
  AppendTarget* const targets = group(group_index).rows.targets.data();
  uint8_t* const opens_tile = group(group_index).rows.opens_tile.data();
  uint8_t* const opens_page = opens_page_.data();
  GroupAppend* append = group_appends.data() + group_index;
  for (size_t m = 0; m < member_count; ++m, append += group_count) {
    const int32_t slot = ++targets[m].slot;
    QUIRE_DCHECK(slot <= page_size);
    append->in_place = slot < page_size;
    append->page_count = append->in_place ? 0 : 1;
    opens_tile[m] = slot % kTilePositions == 0 || slot == page_size;
    opens_page[m] |= slot == page_size;
    if (slot < page_size) pool.SetFillTo(targets[m].page, slot + 1);
  }
}

// Repeats a member that opens a page in some group.
void ForwardPlan::RepeatWithPages(BlockTree& tree, size_t m) noexcept {
  const size_t group_count = groups_.size();
  const std::span<const GroupAppend> appends(group_appends.data() + m * group_count, group_count);
  tree.Append(members[m].append, appends);
  for (size_t g = 0; g < group_count; ++g) {
    if (appends[g].in_place) continue;
    groups_[g].rows.targets[m] = {.page = tree.slice(members[m].last, static_cast<int>(g)).tail,
                                  .slot = 0};
  }
}

// A member's last run ends with its last block, which has grown.
void ForwardPlan::RepeatSequences(int group_index) noexcept {
  GroupPlan& plan = group(group_index);
  const AppendTarget* const targets = plan.rows.targets.data();
  PageRun* run = plan.runs.data();
  for (size_t i = 0; i < order_.size(); ++i) {
    AttentionSequence& sequence = plan.sequences[i];
    ++sequence.base;
    run += sequence.run_count;
    ++run[-1].end;
    QUIRE_DCHECK(run[-1].end == sequence.base + 1) << "a sequence reads up to its own row";
    run[-1].entry_count += targets[order_[i]].slot == 0;  // a page's first
  }
}

void ForwardPlan::Repeat(BlockTree& tree) noexcept {
  QUIRE_DCHECK(filled_at_ == tree.tables().version()) << "the tree has changed since CanRepeat";
  QUIRE_DCHECK(totals_.imports + totals_.trees + totals_.blending == 0);
  opens_page_.assign(members.size(), 0);
  for (int g = 0; g < tree.group_count(); ++g) RepeatSlots(tree.pool(g), g);
  for (size_t m = 0; m < members.size(); ++m) {
    const BlockIndex last = members[m].last;
    const int64_t length = ++positions_[m];
    members[m].append = {
        .last = last, .length = length, .count = 1, .cut = length, .extends = true};
    if (opens_page_[m] != 0) {
      RepeatWithPages(tree, m);
    } else {
      tree.ExtendInPlace(last);
    }
  }
  for (int g = 0; g < tree.group_count(); ++g) RepeatSequences(g);
  totals_.copying = totals_.copied_tokens = 0;
  for (int64_t* const end : {&totals_.short_end, &totals_.long_end}) *end += *end > 0;
  filled_at_ = tree.tables().version();
}

// ---------------------------------------------------------------------- comparison

namespace {

// What the text of a plan leaves out, sequence by sequence.
bool SameSequences(const GroupPlan& a, const GroupPlan& b) {
  if (a.sequences.size() != b.sequences.size() || a.runs.size() != b.runs.size()) return false;
  for (size_t i = 0; i < a.runs.size(); ++i) {
    if (a.runs[i].entries != b.runs[i].entries) return false;
  }
  for (size_t i = 0; i < a.sequences.size(); ++i) {
    const AttentionSequence& x = a.sequences[i];
    const AttentionSequence& y = b.sequences[i];
    const bool same = x.first_row == y.first_row && x.row_count == y.row_count &&
                      x.base == y.base && x.window == y.window &&
                      x.runs - a.runs.data() == y.runs - b.runs.data();
    if (!same) return false;
  }
  return true;
}

}  // namespace

std::string ForwardPlan::DifferenceFromNew(const BlockTree& tree) const {
  ForwardPlan fresh;
  fresh.members = members;
  fresh.group_appends = group_appends;
  fresh.Reserve(tree);
  fresh.Fill(tree);
  const std::string text = ToString(tree);
  const std::string fresh_text = fresh.ToString(tree);
  if (text != fresh_text) return "is\n" + text + "and made from the start\n" + fresh_text;
  if (positions_ != fresh.positions_) return "has other positions than a new plan";
  for (int g = 0; g < tree.group_count(); ++g) {
    if (SameSequences(group(g), fresh.group(g))) continue;
    return "of group " + std::to_string(g) + " reads other runs than a new plan";
  }
  return "";
}

}  // namespace quire
