#include "kv/testing/block_tree_driver.h"

#include <algorithm>

#include "base/check.h"
#include "kv/cache/kv_invariants.h"
#include "kv/pages/text.h"

namespace quire {
namespace {

constexpr int64_t kEmptySlot = -1;  // was never written since its page was taken, or is stale

std::vector<PagePool> MakePools(const std::vector<BlockTreeDriver::Pages>& groups) {
  std::vector<PagePool> pools;
  for (const auto& group : groups) pools.emplace_back(group.page_size, group.page_count);
  return pools;
}

int64_t TilesPerPage(const PagePool& pool) {
  return (pool.page_size() + kTilePositions - 1) / kTilePositions;
}

}  // namespace

BlockTreeDriver::BlockTreeDriver(const std::vector<Pages>& groups) : tree_(MakePools(groups)) {
  for (const Pages& group : groups) {
    slots_.emplace_back(static_cast<size_t>(group.page_size * group.page_count), kEmptySlot);
    tiles_.emplace_back(static_cast<size_t>(
        TilesPerPage(tree_.pool(static_cast<int>(tiles_.size()))) * group.page_count));
  }
}

bool BlockTreeDriver::InBatch(int64_t id) const {
  return in_forward_ && std::any_of(plan_.members.begin(), plan_.members.end(),
                                    [&](const ForwardMember& member) { return member.id == id; });
}

void BlockTreeDriver::Add(int64_t id) {
  table_.ReserveOne();
  table_.Insert(id);
  lists_[id] = {};
}

void BlockTreeDriver::Fork(int64_t parent, int64_t child, int64_t position) {
  table_.ReserveOne();
  tree_.ReserveSplit();
  const BlockIndex last = tree_.ForkAt(sequence(parent).last, position);
  table_[table_.Insert(child)].last = last;
  lists_[child].assign(lists_[parent].begin(), lists_[parent].begin() + position);
}

void BlockTreeDriver::Pop(int64_t id, int64_t n) {
  tree_.ReserveSplit();
  Sequence& popped = sequence(id);
  popped.last = tree_.Pop(popped.last, tree_.End(popped.last) - n);
  lists_[id].resize(lists_[id].size() - static_cast<size_t>(n));
}

void BlockTreeDriver::Remove(int64_t id) {
  tree_.Release(sequence(id).last);
  table_.Erase(table_.Find(id));
  lists_.erase(id);
}

bool BlockTreeDriver::Begin(const std::vector<Item>& batch) {
  const size_t group_count = static_cast<size_t>(tree_.group_count());
  plan_.Clear();
  tree_.BeginPlanning();
  std::vector<int64_t> pages(group_count);
  int64_t row = 0;
  for (const Item& item : batch) {
    ForwardMember& member = plan_.members.emplace_back();
    member.id = item.id;
    member.sequence = table_.Find(item.id);
    member.first_row = row;
    std::vector<GroupAppend> groups(group_count);
    member.append = tree_.PlanAppend(sequence(item.id).last, item.count, groups);
    for (size_t g = 0; g < group_count; ++g) {
      pages[g] += groups[g].page_count;
      plan_.group_appends.push_back(groups[g]);
    }
    row += item.count;
  }
  for (size_t g = 0; g < group_count; ++g) {
    if (pages[g] > tree_.pool(static_cast<int>(g)).free_count()) return false;
  }
  tree_.Reserve(AppendPlans(std::span<const ForwardMember>(plan_.members), &ForwardMember::append),
                plan_.group_appends);
  plan_.Reserve(tree_);

  std::vector<int64_t> free_before;
  for (size_t g = 0; g < group_count; ++g) free_before.push_back(free_pages(static_cast<int>(g)));
  for (size_t m = 0; m < plan_.members.size(); ++m) {
    ForwardMember& member = plan_.members[m];
    member.last = tree_.Append(
        member.append, std::span(plan_.group_appends).subspan(m * group_count, group_count));
    sequence(member.id).last = member.last;
    for (int64_t i = 0; i < member.row_count(); ++i) lists_[member.id].push_back(next_token_++);
  }
  for (size_t g = 0; g < group_count; ++g) {
    QUIRE_CHECK(free_before[g] - free_pages(static_cast<int>(g)) == pages[g]) << "group " << g;
  }
  plan_.Fill(tree_);
  tree_.DeferMerges();
  in_forward_ = true;
  MoveBytes();
  return true;
}

// What kernels do with the plan: the copies, then the new tokens. Opening a tile empties it.
void BlockTreeDriver::MoveBytes() {
  for (int g = 0; g < tree_.group_count(); ++g) {
    const GroupPlan& plan = plan_.group(g);
    const int64_t page_size = tree_.pool(g).page_size();
    std::vector<int64_t>& slots = slots_[static_cast<size_t>(g)];
    const auto at = [&](AppendTarget target) -> int64_t& {
      return slots[static_cast<size_t>(target.page * page_size + target.slot)];
    };
    const auto open = [&](AppendTarget target) {
      const int64_t begin = target.slot / kTilePositions * kTilePositions;
      const int64_t end = std::min(page_size, begin + kTilePositions);
      for (int64_t s = begin; s < end; ++s) {
        at({.page = target.page, .slot = static_cast<int32_t>(s)}) = kEmptySlot;
      }
      tiles_[static_cast<size_t>(g)][static_cast<size_t>(target.page * TilesPerPage(tree_.pool(g)) +
                                                         target.slot / kTilePositions)] = true;
    };
    for (size_t i = 0; i < plan.copy_from.size(); ++i) {
      if (plan.copy_opens_tile[i] != 0) open(plan.copy_to[i]);
      at(plan.copy_to[i]) = at(plan.copy_from[i]);
    }
    for (const ForwardMember& member : plan_.members) {
      for (int64_t i = 0; i < member.row_count(); ++i) {
        const size_t row = static_cast<size_t>(member.first_row + i);
        if (plan.rows.opens_tile[row] != 0) open(plan.rows.targets[row]);
        at(plan.rows.targets[row]) = lists_[member.id][static_cast<size_t>(member.base() + i)];
      }
    }
  }
}

void BlockTreeDriver::End() {
  in_forward_ = false;
  for (const ForwardMember& member : plan_.members) {
    if (member.append.copies()) tree_.ReleaseOldPath(member.append, member.last);
  }
  tree_.RunDeferredMerges();
}

void BlockTreeDriver::Abort() {
  in_forward_ = false;
  for (size_t m = plan_.members.size(); m-- > 0;) {
    const ForwardMember& member = plan_.members[m];
    BlockIndex& last = sequence(member.id).last;
    last = tree_.UndoAppend(member.append, last);
    lists_[member.id].resize(static_cast<size_t>(member.append.length));
  }
  tree_.RunDeferredMerges();
}

void BlockTreeDriver::Append(int64_t id, int64_t count) {
  QUIRE_CHECK(Begin({{id, count}})) << "no pages";
  End();
}

void BlockTreeDriver::Clear() {
  tree_.Clear();
  table_.Clear();
  lists_.clear();
  plan_.Clear();
  in_forward_ = false;
}

// ---------------------------------------------------------------------- looking

std::vector<int64_t> BlockTreeDriver::Slots(int64_t id, int group) const {
  const PagePool& pool = tree_.pool(group);
  const BlockIndex last = sequence(id).last;
  std::vector<int64_t> slots(static_cast<size_t>(tree_.End(last)));
  tree_.VisitPieces(last, group, 0, tree_.End(last), [&](int64_t from, int64_t to, int32_t page) {
    for (int64_t p = from; p < to; ++p) {
      slots[static_cast<size_t>(p)] = page * pool.page_size() + pool.Slot(p);
    }
  });
  return slots;
}

int64_t BlockTreeDriver::Length(int64_t id) const { return tree_.End(sequence(id).last); }
int64_t BlockTreeDriver::PathLength(int64_t id) const {
  return tree_.PathLength(sequence(id).last);
}

std::string BlockTreeDriver::Snapshot() const {
  Text out;
  for (const auto& [id, list] : lists_) {
    out << id << ":";
    for (int g = 0; g < tree_.group_count(); ++g) {
      for (const int64_t slot : Slots(id, g)) out << " " << slot;
      out << ";";
    }
  }
  for (int g = 0; g < tree_.group_count(); ++g) {
    std::vector<int32_t> free = tree_.pool(g).free_pages();
    std::sort(free.begin(), free.end());
    for (const int32_t page : free) out << " " << page;
    out << "; fills";
    for (int32_t p = 0; p < tree_.pool(g).page_count(); ++p) out << " " << tree_.pool(g).fill(p);
  }
  out << " distinct " << tree_.distinct_token_count();
  return out.str();
}

std::string BlockTreeDriver::Check() const {
  const std::span<const ForwardMember> batch = in_forward_
                                                   ? std::span<const ForwardMember>(plan_.members)
                                                   : std::span<const ForwardMember>();
  const Status status = CheckKVInvariants(tree_, table_, batch);
  if (!status.ok()) return status.ToString();
  const std::string tokens = CheckTokens();
  return tokens.empty() && in_forward_ ? CheckPlan() : tokens;
}

std::string BlockTreeDriver::CheckTokens() const {
  for (const auto& [id, list] : lists_) {
    for (int g = 0; g < tree_.group_count(); ++g) {
      std::vector<int64_t> tokens;
      for (const int64_t slot : Slots(id, g)) {
        tokens.push_back(slots_[static_cast<size_t>(g)][static_cast<size_t>(slot)]);
      }
      if (tokens != list)
        return "sequence " + std::to_string(id) + " has other tokens than it was given";
    }
  }
  return "";
}

// The plan's views read the tokens of the lists, and shared segments are the same pages for all
// that share them.
std::string BlockTreeDriver::CheckPlan() const {
  std::vector<int64_t> shared_to(plan_.members.size());
  for (const SharedSpan& span : plan_.shared()) {
    for (int64_t i = span.first; i < span.first + span.count; ++i) {
      int64_t& end = shared_to[static_cast<size_t>(i)];
      if (end != span.segment_begin || span.segment_end <= span.segment_begin || span.count < 2) {
        return "shared spans are not adjacent";
      }
      end = span.segment_end;
    }
  }
  for (int g = 0; g < tree_.group_count(); ++g) {
    const GroupPlan& plan = plan_.group(g);
    for (size_t i = 0; i < plan.sequences.size(); ++i) {
      const ForwardMember& member = plan_.members[static_cast<size_t>(plan_.order()[i])];
      if (plan.sequences[i].private_segment != shared_to[i])
        return "private_segment is not the end of the spans";
      if (shared_to[i] * kSegmentPositions > member.base())
        return "a shared span covers new tokens";
      const std::string wrong = CheckRows(g, member, plan.sequences[i]);
      if (!wrong.empty()) return wrong;
    }
    for (const SharedSpan& span : plan_.shared()) {
      const std::string wrong = CheckShared(g, span);
      if (!wrong.empty()) return wrong;
    }
  }
  return "";
}

std::string BlockTreeDriver::CheckRows(int group, const ForwardMember& member,
                                       const AttentionSequence& view) const {
  const std::vector<int64_t>& list = lists_.at(member.id);
  const int64_t page_size = tree_.pool(group).page_size();
  int64_t position = 0;
  for (int64_t r = 0; r < view.run_count; ++r) {
    const PageRun& run = view.runs[r];
    if (run.begin != position || run.entry_count < 1 || run.end <= run.begin)
      return "runs are not adjacent";
    for (int64_t e = 0; e < run.entry_count; ++e) {
      const int64_t to = e + 1 < run.entry_count ? run.entries[e + 1].start : run.end;
      if (run.entries[e].start > position || to <= position)
        return "run entries do not cover the run";
      for (; position < to; ++position) {
        const size_t slot =
            static_cast<size_t>(run.entries[e].page * page_size + position % page_size);
        if (slots_[static_cast<size_t>(group)][slot] != list[static_cast<size_t>(position)]) {
          return "sequence " + std::to_string(member.id) + " reads a wrong token at " +
                 std::to_string(position);
        }
      }
    }
  }
  if (position != member.base() + member.row_count()) return "runs end early";
  for (int64_t i = 0; i < member.row_count(); ++i) {
    const size_t row = static_cast<size_t>(member.first_row + i);
    if (plan_.positions()[row] != member.base() + i) return "wrong position";
  }
  return "";
}

std::string BlockTreeDriver::CheckShared(int group, const SharedSpan& span) const {
  const size_t begin = static_cast<size_t>(span.segment_begin * kSegmentPositions);
  const size_t end = static_cast<size_t>(span.segment_end * kSegmentPositions);
  const auto slots_of = [&](int64_t i) {
    const size_t member = static_cast<size_t>(plan_.order()[static_cast<size_t>(span.first + i)]);
    return Slots(plan_.members[member].id, group);
  };
  const std::vector<int64_t> expected = slots_of(0);
  for (int64_t i = 1; i < span.count; ++i) {
    const std::vector<int64_t> slots = slots_of(i);
    if (!std::equal(slots.begin() + static_cast<int64_t>(begin),
                    slots.begin() + static_cast<int64_t>(end),
                    expected.begin() + static_cast<int64_t>(begin))) {
      return "a shared span is not shared";
    }
  }
  return "";
}

}  // namespace quire
