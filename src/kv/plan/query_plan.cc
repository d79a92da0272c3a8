#include "kv/plan/query_plan.h"

#include <algorithm>
#include <numeric>

#include "base/check.h"
#include "kv/pages/reserve.h"
#include "kv/pages/text.h"

namespace quire {
namespace {

// Whether two consecutive append rows are stored in one tile.
bool InSameTile(const AppendTarget& a, const AppendTarget& b) {
  return a.page == b.page && a.slot / kTilePositions == b.slot / kTilePositions;
}

}  // namespace

void QueryPlan::ReserveRows(int64_t row_count) {
  const size_t held = all_rows_.size();
  const auto wanted = static_cast<size_t>(row_count);
  if (held >= wanted) return;
  ReserveGrowing(all_rows_, wanted);
  all_rows_.resize(wanted);
  std::iota(all_rows_.begin() + static_cast<std::ptrdiff_t>(held), all_rows_.end(),
            static_cast<int32_t>(held));
}

void QueryPlan::Reserve(const ForwardPlan& plan) {
  const BatchTotals& totals = plan.totals();
  const auto rows = static_cast<size_t>(totals.rows);
  const auto runs = static_cast<size_t>(SequenceCountMax(totals.rows, totals.members));
  ReserveRows(totals.rows);
  ReserveGrowing(rows_, rows);
  ReserveGrowing(inputs_, rows);
  ReserveGrowing(positions_, rows);
  ReserveGrowing(goes_on_, rows);
  ReserveGrowing(runs_, runs);
  ReserveGrowing(run_begin_, static_cast<size_t>(totals.members) + 1);
  // One for each of the plan, and fewer than runs for those of a member.
  ReserveGrowing(shared_, plan.shared_capacity() + runs);
  QUIRE_DCHECK(!plan.members.empty());
  groups_.resize(plan.group_appends.size() / plan.members.size());
  for (Group& group : groups_) {
    ReserveGrowing(group.sequences, runs);
    ReserveGrowing(group.fresh.targets, rows);
    ReserveGrowing(group.fresh.opens_tile, rows);
    ReserveGrowing(group.moved_opens_tile, rows);
  }
}

int64_t QueryPlan::Bytes(int64_t row_count, int64_t member_count, int64_t group_count) {
  const int64_t runs = SequenceCountMax(row_count, member_count);
  const auto of_group = static_cast<int64_t>(sizeof(AppendTarget) + 2 * sizeof(uint8_t));
  // Vectors may hold twice what was asked for.
  return 2 * (row_count * static_cast<int64_t>(4 * sizeof(int32_t) + sizeof(uint8_t)) +
              (member_count + 1) * static_cast<int64_t>(sizeof(size_t)) +
              runs * static_cast<int64_t>(sizeof(Run) + 3 * sizeof(SharedSpan)) +
              group_count *
                  (row_count * of_group + runs * static_cast<int64_t>(sizeof(AttentionSequence))));
}

int64_t QueryPlan::bytes() const {
  const auto of = [](const auto& table) { return table.capacity() * sizeof(table[0]); };
  size_t bytes = of(all_rows_) + of(rows_) + of(inputs_) + of(positions_) + of(goes_on_) +
                 of(runs_) + of(run_begin_) + of(shared_);
  for (const Group& group : groups_) {
    bytes += of(group.sequences) + of(group.fresh.targets) + of(group.fresh.opens_tile) +
             of(group.moved_opens_tile);
  }
  return static_cast<int64_t>(bytes);
}

void QueryPlan::Open(const ForwardPlan& plan) noexcept {
  const auto count = static_cast<size_t>(plan.row_count());
  QUIRE_DCHECK(rows_.capacity() >= count);
  rows_.resize(count);
  std::iota(rows_.begin(), rows_.end(), 0);
  inputs_ = rows_;
  positions_.assign(plan.positions().begin(), plan.positions().end());
  goes_on_.assign(count, 1);
  is_open_ = true;
  is_packed_ = false;
  Pack(plan);
}

// Rows of members follow one another in the order of the batch.
std::span<const int32_t> QueryPlan::RowsOf(const ForwardMember& member) const noexcept {
  const auto first = std::lower_bound(rows_.begin(), rows_.end(), member.first_row);
  const auto end = std::lower_bound(first, rows_.end(), member.first_row + member.row_count());
  return {first, end};
}

void QueryPlan::Select(const ForwardMember& member, std::span<const int32_t> rows) noexcept {
  QUIRE_DCHECK(is_open_);
  QUIRE_DCHECK(!rows.empty());
  uint8_t* const goes_on = goes_on_.data() + member.first_row;
  QUIRE_DCHECK(std::ranges::is_sorted(rows));
  QUIRE_DCHECK(rows.front() >= 0 && rows.back() < member.row_count());
  QUIRE_DCHECK(std::ranges::all_of(rows, [&](int32_t row) { return goes_on[row] != 0; }))
      << "a row goes on again";
  std::fill(goes_on, goes_on + member.row_count(), uint8_t{0});
  for (const int32_t row : rows) goes_on[row] = 1;
}

void QueryPlan::Apply(const ForwardPlan& plan) noexcept {
  QUIRE_DCHECK(is_open_);
  size_t kept = 0;
  for (size_t i = 0; i < rows_.size(); ++i) {
    if (!GoesOn(rows_[i])) continue;
    rows_[kept] = rows_[i];
    inputs_[kept] = inputs_[i];
    positions_[kept] = positions_[i];
    ++kept;
  }
  if (kept == rows_.size()) return;
  is_packed_ = false;
  rows_.resize(kept);
  inputs_.resize(kept);
  positions_.resize(kept);
  FindRuns(plan);
  ShareSegments(plan);
  FillSequences(plan);
}

void QueryPlan::Pack(const ForwardPlan& plan) noexcept {
  if (is_packed_) return;
  is_packed_ = true;
  input_count_ = std::ssize(rows_);
  std::iota(inputs_.begin(), inputs_.end(), 0);
  FindRuns(plan);
  ShareSegments(plan);
  FillSequences(plan);
  FillSlots(plan);
}

// ---------------------------------------------------------------------- runs

void QueryPlan::FindRuns(const ForwardPlan& plan) noexcept {
  runs_.clear();
  run_begin_.clear();
  for (size_t order = 0; order < plan.order().size(); ++order) {
    const ForwardMember& member = plan.members[static_cast<size_t>(plan.order()[order])];
    run_begin_.push_back(runs_.size());
    const std::span<const int32_t> rows = RowsOf(member);
    const auto first = static_cast<size_t>(rows.data() - rows_.data());
    for (size_t i = 0; i < rows.size(); ++i) {
      if (i > 0 && rows[i] == rows[i - 1] + 1) {
        ++runs_.back().count;
        continue;
      }
      QUIRE_DCHECK(runs_.size() < runs_.capacity()) << "more runs than SequenceCountMax says";
      runs_.push_back({.order = static_cast<int32_t>(order),
                       .first = rows[i],
                       .input = inputs_[first + i],
                       .count = 1});
    }
  }
  run_begin_.push_back(runs_.size());
}

void QueryPlan::ShareSegments(const ForwardPlan& plan) noexcept {
  shared_.clear();
  for (const SharedSpan& span : plan.shared()) {
    const size_t begin = run_begin_[static_cast<size_t>(span.first)];
    const size_t end = run_begin_[static_cast<size_t>(span.first + span.count)];
    shared_.push_back({.first = static_cast<int64_t>(begin),
                       .count = static_cast<int64_t>(end - begin),
                       .segment_begin = span.segment_begin,
                       .segment_end = span.segment_end});
  }
  for (size_t order = 0; order + 1 < run_begin_.size(); ++order)
    ShareOwnSegments(plan, run_begin_[order], run_begin_[order + 1]);
  std::sort(shared_.begin(), shared_.end(), [](const SharedSpan& a, const SharedSpan& b) {
    return a.segment_begin != b.segment_begin ? a.segment_begin < b.segment_begin
                                              : a.first < b.first;
  });
}

// The runs of one member ascend, so those behind a segment are a suffix of them: each goes on with
// the others as far as it lies behind.
void QueryPlan::ShareOwnSegments(const ForwardPlan& plan, size_t begin, size_t end) noexcept {
  QUIRE_DCHECK(begin < end) << "a member keeps no row";
  const size_t order = static_cast<size_t>(runs_[begin].order);
  const AttentionSequence& whole = plan.group(0).sequences[order];
  int64_t segment = whole.private_segment;
  for (size_t r = begin; r < end; ++r) {
    const int64_t base = plan.positions()[static_cast<size_t>(runs_[r].first)];
    const int64_t behind = base / kSegmentPositions;
    if (r + 1 < end && behind > segment) {
      QUIRE_DCHECK(shared_.size() < shared_.capacity()) << "no room was reserved";
      shared_.push_back({.first = static_cast<int64_t>(r),
                         .count = static_cast<int64_t>(end - r),
                         .segment_begin = segment,
                         .segment_end = behind});
      segment = behind;
    }
    runs_[r].private_segment = segment;
  }
}

void QueryPlan::FillSequences(const ForwardPlan& plan) noexcept {
  for (size_t g = 0; g < groups_.size(); ++g) {
    const std::vector<AttentionSequence>& whole = plan.group(static_cast<int>(g)).sequences;
    std::vector<AttentionSequence>& sequences = groups_[g].sequences;
    sequences.clear();
    for (const Run& run : runs_) {
      AttentionSequence& sequence = sequences.emplace_back(whole[static_cast<size_t>(run.order)]);
      sequence.first_row = run.input;
      sequence.row_count = run.count;
      sequence.base = plan.positions()[static_cast<size_t>(run.first)];
      sequence.private_segment = run.private_segment;
    }
  }
}

// ---------------------------------------------------------------------- slots

// Rows of a tile that the forward opens follow one another, and the plan marks the first of them.
void QueryPlan::FillSlots(const ForwardPlan& plan) noexcept {
  const auto count = static_cast<size_t>(plan.row_count());
  for (size_t g = 0; g < groups_.size(); ++g) {
    const TokenSlots& all = plan.group(static_cast<int>(g)).rows;
    Group& group = groups_[g];
    group.fresh.targets.clear();
    group.fresh.opens_tile.clear();
    group.moved_opens_tile.assign(count, 0);
    for (size_t i = 0; i < count;) {
      size_t end = i + 1;
      while (end < count && InSameTile(all.targets[i], all.targets[end])) ++end;
      size_t moved = end;  // the first one that does not go on
      for (size_t r = i; r < end && moved == end; ++r) {
        if (!GoesOn(static_cast<int64_t>(r))) moved = r;
      }
      const bool opens = all.opens_tile[i] != 0;
      if (moved < end) group.moved_opens_tile[moved] = opens;
      for (size_t r = i; r < end; ++r) {
        if (!GoesOn(static_cast<int64_t>(r))) continue;
        group.fresh.targets.push_back(all.targets[r]);
        group.fresh.opens_tile.push_back(opens && moved == end && r == i);
      }
      i = end;
    }
    QUIRE_DCHECK(group.fresh.targets.size() == rows_.size()) << "a row is stored nowhere, or twice";
  }
}

// ---------------------------------------------------------------------- text

std::string QueryPlan::ToString(const ForwardPlan& plan) const {
  Text out;
  out << rows_.size() << " of " << plan.row_count() << " rows go on\n";
  for (const Run& run : runs_) {
    const ForwardMember& member =
        plan.members[static_cast<size_t>(plan.order()[static_cast<size_t>(run.order)])];
    out << "sequence " << member.id << ": rows [" << run.first << ", " << run.first + run.count
        << ") read as [" << run.input << ", " << run.input + run.count << "), private from segment "
        << run.private_segment << "\n";
  }
  for (const SharedSpan& span : shared_) {
    out << "segments [" << span.segment_begin << ", " << span.segment_end
        << ") are shared by runs [" << span.first << ", " << span.first + span.count << ")\n";
  }
  return out.str();
}

}  // namespace quire
