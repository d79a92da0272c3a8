#include "kv/cache/batch_planner.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <string>

#include "base/check.h"

namespace quire {
namespace {

// Members from one look at what planning needs of one to the next: planning that many takes about
// as long as memory does.
constexpr size_t kLookAhead = 16;

}  // namespace

// Why the sequence may not get new rows.
Status BatchPlanner::Refuse(const char* call, int64_t seq_id, int32_t index,
                            int64_t append_length) const {
  QUIRE_RETURN_IF_ERROR(kv_.control.CheckMember(call, seq_id, index));
  QUIRE_RETURN_IF_ERROR(CheckRowCount(call, seq_id, append_length));
  return Status(
      StatusCode::kTooLarge,
      std::string(call) + ": with the " + std::to_string(append_length) + " tokens of sequence " +
          std::to_string(seq_id) + " the batch has more than prefill_chunk_size, " +
          std::to_string(kv_.options.prefill_chunk_size) + "; append them in several forwards");
}

Status BatchPlanner::CheckSpecial(const char* call, int64_t seq_id, int32_t index,
                                  int64_t append_length, const LayerLoad* load,
                                  std::span<GroupAppend> groups) const {
  const Sequence& sequence = kv_.control[index];
  if (sequence.reserved > 0) QUIRE_RETURN_IF_ERROR(kv_.RequireCommitted(call, index));
  if (load != nullptr) QUIRE_RETURN_IF_ERROR(CheckLoad(call, *load));
  const int64_t imported = load == nullptr ? 0 : load->tokens;
  const int64_t length = kv_.tree.End(sequence.last);
  QUIRE_RETURN_IF_ERROR(CheckPositions(call, seq_id, length, append_length, imported));
  if (load != nullptr && load->only_visible) {
    const int64_t end = length + imported;
    QUIRE_RETURN_IF_ERROR(windows_.CheckImport(call, sequence, WindowSettings(), end));
    windows_.LeaveOutHidden({}, length, end, groups);
  }
  return Status();
}

Status BatchPlanner::Start(const char* call, std::span<const int64_t> seq_ids,
                           std::span<const int64_t> append_lengths, ForwardPlan& plan) const {
  QUIRE_RETURN_IF_ERROR(kv_.control.CheckBatch(call, seq_ids, append_lengths));
  kv_.control.StartPlanning();
  kv_.tree.BeginPlanning();
  plan.StartBatch(seq_ids.size(), kv_.groups.size());
  return Status();
}

// Every look leads to the next address, and one member after the other would wait for memory at
// each. So while some members are planned, the pages of as many behind them, the ends of the next
// ones and the sequences of those behind these are on their way.
class BatchPlanner::LookAhead {
 public:
  LookAhead(const PagedSequences& kv, std::span<const int64_t> seq_ids)
      : kv_(kv), seq_ids_(seq_ids) {
    for (size_t at = 0; at < 3 * kLookAhead; at += kLookAhead) LookForSequences(at);
    for (size_t at = 0; at < 2 * kLookAhead; at += kLookAhead) LookForEnds(at);
    LookForPages(0);
  }
  // The index of member i. For each i once, ascending.
  int32_t IndexOf(size_t i) {
    QUIRE_DCHECK(i < seq_ids_.size());
    if (i % kLookAhead == 0) {
      LookForSequences(i + 3 * kLookAhead);
      LookForEnds(i + 2 * kLookAhead);
      LookForPages(i + kLookAhead);
    }
    return looks_[i % kSlots].index;
  }

 private:
  static constexpr size_t kSlots = 4 * kLookAhead;
  struct Look {
    int32_t index;
    BlockIndex last;
  };

  // These are about members [at, at + kLookAhead), as far as there are any.
  size_t EndOf(size_t at) const { return std::min(at + kLookAhead, seq_ids_.size()); }
  void LookForSequences(size_t at) {
    for (size_t i = at; i < EndOf(at); ++i) {
      const int32_t index = looks_[i % kSlots].index = kv_.control.table().Find(seq_ids_[i]);
      if (index != SequenceTable::kAbsent) kv_.control.table().Prefetch(index);
    }
  }
  void LookForEnds(size_t at) {
    for (size_t i = at; i < EndOf(at); ++i) {
      Look& look = looks_[i % kSlots];
      const bool is_known = look.index != SequenceTable::kAbsent;
      look.last = is_known ? kv_.control[look.index].last : kNoBlock;
      kv_.tree.PrefetchEnd(look.last);
    }
  }
  void LookForPages(size_t at) const {
    for (size_t i = at; i < EndOf(at); ++i) kv_.tree.PrefetchPages(looks_[i % kSlots].last);
  }

  const PagedSequences& kv_;
  const std::span<const int64_t> seq_ids_;
  std::array<Look, kSlots> looks_;
};

// Leaves only marks that no call can see (the numbers of this planning), and the plan's members,
// which are read in FORWARD only.
Status BatchPlanner::Plan(const char* call, std::span<const int64_t> seq_ids,
                          std::span<const int64_t> append_lengths, std::span<const LayerLoad> loads,
                          ForwardPlan& plan) const {
  QUIRE_RETURN_IF_ERROR(Start(call, seq_ids, append_lengths, plan));
  const size_t group_count = kv_.groups.size();
  GroupAppend* groups = plan.group_appends.data();
  int64_t* const page_counts = plan.page_counts.data();
  LookAhead ahead(kv_, seq_ids);
  int64_t row_count = 0;
  int64_t import_count = 0;
  for (size_t i = 0; i < seq_ids.size(); ++i) {
    const int32_t index = ahead.IndexOf(i);
    const int64_t append_length = append_lengths[i];
    if (!Take(index, append_length, row_count))
      return Refuse(call, seq_ids[i], index, append_length);
    const Sequence& sequence = kv_.control[index];
    const int64_t length = kv_.tree.End(sequence.last);
    const LayerLoad* const load = TakeLoad(seq_ids[i], loads);
    const std::span<GroupAppend> of_groups(groups, group_count);
    if (load != nullptr || sequence.reserved > 0 || append_length > kPositionsMax - length) {
      QUIRE_RETURN_IF_ERROR(CheckSpecial(call, seq_ids[i], index, append_length, load, of_groups));
    }
    const int64_t imported = load == nullptr ? 0 : load->tokens;
    // Built in place: building a local and copying it stalls on store forwarding.
    ForwardMember& member = plan.members.emplace_back();
    member.id = seq_ids[i];
    member.sequence = index;
    member.first_row = row_count;
    member.append.last = sequence.last;
    member.append.length = member.append.cut = length;
    member.append.count = imported + append_length;
    member.long_factors = sequence.long_factors;
    member.window = sequence.window;
    member.imported = imported;
    member.first_import = import_count;
    member.source = load == nullptr ? nullptr : load->source;
    kv_.tree.PlanAppend(member.append, of_groups);
    QUIRE_DCHECK(member.append.cut <= length) << "what is copied lies before the new tokens";
    for (size_t g = 0; g < group_count; ++g) page_counts[g] += groups[g].page_count;
    row_count += append_length;
    import_count += imported;
    groups += group_count;
  }
  QUIRE_DCHECK(plan.members.size() == seq_ids.size());
  QUIRE_DCHECK(row_count <= kv_.options.prefill_chunk_size);
  return RequireNoLoadLeft(call, loads);
}

}  // namespace quire
