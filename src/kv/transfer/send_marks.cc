#include "kv/transfer/send_marks.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/check.h"
#include "base/guard.h"
#include "kv/control/sequence_control.h"

namespace quire {

// ---------------------------------------------------------------------- a mark

HeadsOfTarget HeadsFor(int64_t heads, int64_t remote_heads, int64_t rank, int64_t target,
                       int64_t targets) {
  if (heads == remote_heads) return {.head_count = heads};
  if (heads < remote_heads) {
    if (remote_heads % heads != 0 || targets != 1) return {};
    return {.remote_head = rank % (remote_heads / heads) * heads, .head_count = heads};
  }
  if (remote_heads < 1 || heads != remote_heads * targets) return {};
  return {.local_head = target * remote_heads, .head_count = remote_heads};
}

Result<std::unique_ptr<SendMark>> MakeMark(int64_t seq_id, int64_t begin,
                                           std::span<const ReceiveMap> maps,
                                           std::span<const int64_t> peers, int64_t rank,
                                           int64_t first_row) {
  QUIRE_DCHECK(!maps.empty());
  QUIRE_DCHECK(maps.size() == peers.size());
  if (first_row < 0 || first_row >= maps[0].count) {
    return Status(StatusCode::kBadArgument, "DisaggMarkSend: sending from row " +
                                                std::to_string(first_row) + " on of a map of " +
                                                std::to_string(maps[0].count) + " tokens");
  }
  auto mark = std::make_unique<SendMark>();
  mark->seq_id = seq_id;
  mark->begin = begin;
  mark->next = begin + first_row;
  mark->end = begin + maps[0].count;
  mark->rank = rank;
  for (size_t t = 0; t < maps.size(); ++t) {
    QUIRE_ASSIGN_OR_RETURN(SlotRuns slots, SlotRuns::Decode(maps[t].slots, maps[t].count));
    if (slots.count() != maps[t].count) {
      return Status(StatusCode::kBadArgument, "DisaggMarkSend: a map of " +
                                                  std::to_string(maps[t].count) + " tokens has " +
                                                  std::to_string(slots.count()) + " slots");
    }
    mark->targets.push_back({.map = maps[t], .slots = std::move(slots), .peer = peers[t]});
  }
  // Runs of stored slots: at most every other row begins one.
  mark->ranges.reserve(maps.size() * (SendMarks::kRowsMax / 2 + 1));
  mark->records.reserve(maps.size());
  mark->remote_slots.resize(maps.size() * SendMarks::kRowsMax);
  return mark;
}

std::span<const SendRecord> SendMark::RecordsOf(int64_t first, int64_t count) noexcept {
  QUIRE_DCHECK(records.capacity() >= targets.size()) << "no room was reserved";
  records.clear();
  for (const Target& target : targets) {
    records.push_back({.seq_id = seq_id,
                       .epoch = target.map.epoch,
                       .first_row = first,
                       .count = count,
                       .peer = target.peer});
  }
  return records;
}

// ---------------------------------------------------------------------- calls

int32_t SendMarks::IndexOf(int64_t seq_id) const {
  size_t free = marks_.size();
  for (size_t i = 0; i < marks_.size(); ++i) {
    if (marks_[i] == nullptr) {
      free = std::min(free, i);
    } else if (marks_[i]->seq_id == seq_id) {
      return static_cast<int32_t>(i);
    }
  }
  return static_cast<int32_t>(free);
}

Status SendMarks::RequireNoneActive() const {
  const bool any_active = std::ranges::any_of(
      marks_, [](const auto& mark) { return mark != nullptr && mark->active(); });
  if (!any_active) return Status();
  return Status(StatusCode::kBadState,
                "SetLayerSink: there are marks that send to the present sink; call "
                "DisaggUnmarkSend first");
}

Status SendMarks::SetSink(std::shared_ptr<LayerSink> sink) {
  QUIRE_RETURN_IF_ERROR(RequireNoneActive());
  sink_ = std::move(sink);
  return Status();
}

Status SendMarks::RequireSink() const {
  if (sink_ != nullptr) return Status();
  return Status(StatusCode::kBadState,
                "DisaggMarkSend: there is no sink to send to; call SetLayerSink first");
}

Status SendMarks::Require(const char* call, int64_t seq_id, int32_t index) const {
  if (Find(index) != nullptr) return Status();
  return Status(StatusCode::kNotFound,
                OfSequence(call, seq_id) + "has no mark; call DisaggMarkSend first");
}

Status SendMarks::Unmark(const char* call, int64_t seq_id, int32_t index) {
  QUIRE_RETURN_IF_ERROR(Require(call, seq_id, index));
  Stop(index, "DisaggUnmarkSend was called");
  return Status();
}

Result<int64_t> SendMarks::Detach(const char* call, int64_t seq_id, int32_t index) {
  QUIRE_RETURN_IF_ERROR(Require(call, seq_id, index));
  const SendMark& mark = *Find(index);
  QUIRE_DCHECK(mark.given == 0) << "a forward sends these tokens";
  if (!mark.failure.ok()) return mark.failure;
  const int64_t sent = mark.next - mark.begin;
  Drop(index);
  return sent;
}

Result<SendProgress> SendMarks::Progress(const char* call, int64_t seq_id, int32_t index) const {
  QUIRE_RETURN_IF_ERROR(Require(call, seq_id, index));
  const SendMark& mark = *Find(index);
  return SendProgress{.begin = mark.begin,
                      .count = mark.count(),
                      .sent = mark.next - mark.begin,
                      .active = mark.active(),
                      .failure = mark.failure};
}

// ---------------------------------------------------------------------- what the sink is told

void SendMarks::Reserve(int32_t sequence, int64_t rows_bytes) {
  if (marks_.size() <= static_cast<size_t>(sequence))
    marks_.resize(static_cast<size_t>(sequence) + 1);
  slots_.resize(static_cast<size_t>(kRowsMax));
  if (memory_bytes_ >= rows_bytes) return;
  memory_.reset(new std::byte[static_cast<size_t>(rows_bytes)]);
  memory_bytes_ = rows_bytes;
}

void SendMarks::Put(int32_t sequence, std::unique_ptr<SendMark> mark) noexcept {
  QUIRE_DCHECK(static_cast<size_t>(sequence) < marks_.size()) << "no room was reserved";
  QUIRE_DCHECK(mark != nullptr);
  QUIRE_DCHECK(mark->given == 0);
  if (SendMark* const old = Find(sequence)) {
    // What goes to the same reservation goes on.
    std::erase_if(old->targets, [&](const SendMark::Target& target) {
      return std::ranges::any_of(mark->targets, [&](const SendMark::Target& next) {
        return next.map.epoch == target.map.epoch && next.peer == target.peer;
      });
    });
    if (old->targets.empty()) {
      Drop(sequence);
    } else {
      Stop(sequence, "another mark has replaced it");
    }
  }
  marks_[static_cast<size_t>(sequence)] = std::move(mark);
  ++count_;
}

void SendMarks::Stop(int32_t sequence, const char* why) noexcept {
  SendMark* const mark = Find(sequence);
  if (mark == nullptr) return;
  if (mark->active()) {
    QUIRE_DCHECK(sink_ != nullptr);
    const int64_t sent = mark->next - mark->begin;
    const Status told = GuardEntry([&] {
      return sink_->OnSendStopped(
          mark->RecordsOf(sent, mark->count() - sent),
          Status(StatusCode::kCancelled, "the sender of sequence " + std::to_string(mark->seq_id) +
                                             " has stopped: " + why));
    });
    static_cast<void>(told);  // the mark goes whether or not its receiver can be told
  }
  Drop(sequence);
}

void SendMarks::Drop(int32_t sequence) noexcept {
  QUIRE_DCHECK(Find(sequence) != nullptr);
  marks_[static_cast<size_t>(sequence)].reset();
  --count_;
  QUIRE_DCHECK(count_ >= 0);
}

// A sink that fails as it hears of an end makes that the mark's failure, unless it has one already.
void SendMarks::Finish(SendMark* mark, Outcome outcome, int64_t first_row) noexcept {
  const int64_t given = std::exchange(mark->given, 0);
  QUIRE_DCHECK(given > mark->next);
  QUIRE_DCHECK(given <= mark->end);
  QUIRE_DCHECK(first_row >= mark->next - mark->begin);
  const auto records = mark->RecordsOf(first_row, given - mark->begin - first_row);
  const bool ends = outcome == Outcome::kEnded && mark->failure.ok();
  const Status status = GuardEntry(
      [&] { return ends ? sink_->OnForwardEnded(records) : sink_->OnForwardAborted(records); });
  if (ends && status.ok()) mark->next = given;
  if (mark->failure.ok()) mark->failure = status;
  if (mark->failure.ok()) return;
  const auto rest = mark->RecordsOf(0, mark->count());
  const Status told = GuardEntry([&] { return sink_->OnSendStopped(rest, mark->failure); });
  static_cast<void>(told);  // the mark's first failure is what is kept
}

void SendMarks::ShortenTo(int32_t sequence, int64_t length) noexcept {
  SendMark* const mark = Find(sequence);
  QUIRE_DCHECK(mark == nullptr || mark->given == 0) << "a forward sends these tokens";
  if (mark != nullptr) mark->next = std::max(mark->begin, std::min(mark->next, length));
}

}  // namespace quire
