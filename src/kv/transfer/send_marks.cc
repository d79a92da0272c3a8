#include "kv/transfer/send_marks.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/check.h"
#include "base/guard.h"
#include "kv/control/sequence_control.h"
#include "kv/pages/reserve.h"

namespace quire {

// ---------------------------------------------------------------------- a mark

HeadsOfTarget HeadsFor(int64_t heads, int64_t remote_heads, int64_t rank, int64_t target,
                       int64_t targets) {
  QUIRE_DCHECK(heads >= 1 && rank >= 0);
  QUIRE_DCHECK(target >= 0 && target < targets);
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
  mark->next = mark->state_next = begin + first_row;
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

void SendMark::ShortenTo(int64_t length) noexcept {
  next = std::max(begin, std::min(next, length));
}

// ---------------------------------------------------------------------- calls

Status SendMarks::RequireNoneActive() const {
  const bool any_active =
      std::ranges::any_of(marks_, [](const auto& mark) { return mark->active(); });
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

Status SendMarks::Require(const char* call, int64_t seq_id) const {
  if (Find(seq_id) != nullptr) return Status();
  return Status(StatusCode::kNotFound,
                OfSequence(call, seq_id) + "has no mark; call DisaggMarkSend first");
}

Status SendMarks::Unmark(const char* call, int64_t seq_id) {
  QUIRE_RETURN_IF_ERROR(Require(call, seq_id));
  Stop(seq_id, "DisaggUnmarkSend was called");
  return Status();
}

Result<int64_t> SendMarks::Detach(const char* call, int64_t seq_id) {
  QUIRE_RETURN_IF_ERROR(Require(call, seq_id));
  const SendMark& mark = *Find(seq_id);
  QUIRE_DCHECK(mark.given == 0) << "a forward sends these tokens";
  if (!mark.failure.ok()) return mark.failure;
  const int64_t sent = mark.reached() - mark.begin;
  Drop(seq_id);
  return sent;
}

Result<SendProgress> SendMarks::Progress(const char* call, int64_t seq_id) const {
  QUIRE_RETURN_IF_ERROR(Require(call, seq_id));
  const SendMark& mark = *Find(seq_id);
  return SendProgress{.begin = mark.begin,
                      .count = mark.count(),
                      .sent = mark.reached() - mark.begin,
                      .active = mark.active(),
                      .failure = mark.failure};
}

// ---------------------------------------------------------------------- what the sink is told

void SendMarks::Reserve() {
  ReserveGrowing(marks_, marks_.size() + 1);
  slots_.resize(static_cast<size_t>(kRowsMax));
}

void SendMarks::Put(std::unique_ptr<SendMark> mark) noexcept {
  QUIRE_DCHECK(marks_.size() < marks_.capacity()) << "no room was reserved";
  QUIRE_DCHECK(mark != nullptr);
  QUIRE_DCHECK(mark->given == 0);
  const int64_t seq_id = mark->seq_id;
  if (SendMark* const old = Find(seq_id)) {
    // What goes to the same reservation goes on.
    std::erase_if(old->targets, [&](const SendMark::Target& target) {
      return std::ranges::any_of(mark->targets, [&](const SendMark::Target& next) {
        return next.map.epoch == target.map.epoch && next.peer == target.peer;
      });
    });
    if (old->targets.empty()) {
      Drop(seq_id);
    } else {
      Stop(seq_id, "another mark has replaced it");
    }
  }
  marks_.insert(marks_.begin() + static_cast<std::ptrdiff_t>(PlaceOf(seq_id)), std::move(mark));
}

void SendMarks::StopAll(const char* why) noexcept {
  while (!marks_.empty()) Stop(marks_.back()->seq_id, why);
}

void SendMarks::Stop(int64_t seq_id, const char* why) noexcept {
  SendMark* const mark = Find(seq_id);
  if (mark == nullptr) return;
  if (mark->active()) {
    QUIRE_DCHECK(sink_ != nullptr);
    const int64_t sent = mark->reached() - mark->begin;
    const Status told = GuardEntry([&] {
      return sink_->OnSendStopped(
          mark->RecordsOf(sent, mark->count() - sent),
          Status(StatusCode::kCancelled, "the sender of sequence " + std::to_string(mark->seq_id) +
                                             " has stopped: " + why));
    });
    static_cast<void>(told);  // the mark goes whether or not its receiver can be told
  }
  Drop(seq_id);
}

void SendMarks::Drop(int64_t seq_id) noexcept {
  QUIRE_DCHECK(Find(seq_id) != nullptr);
  marks_.erase(marks_.begin() + static_cast<std::ptrdiff_t>(PlaceOf(seq_id)));
}

// A sink that fails as it hears of an end makes that the mark's failure, unless it has one already.
void SendMarks::Finish(SendMark* mark, Outcome outcome, int64_t SendMark::*reached,
                       int64_t first_row) noexcept {
  const int64_t given = std::exchange(mark->given, 0);
  QUIRE_DCHECK(sink_ != nullptr) << "the sink went before its marks";
  QUIRE_DCHECK(given > mark->*reached);
  QUIRE_DCHECK(given <= mark->end);
  QUIRE_DCHECK(first_row >= mark->*reached - mark->begin);
  const auto records = mark->RecordsOf(first_row, given - mark->begin - first_row);
  const bool ends = outcome == Outcome::kEnded && mark->failure.ok();
  const Status status = GuardEntry(
      [&] { return ends ? sink_->OnForwardEnded(records) : sink_->OnForwardAborted(records); });
  if (ends && status.ok()) mark->*reached = given;
  if (mark->failure.ok()) mark->failure = status;
  if (mark->failure.ok()) return;
  const auto rest = mark->RecordsOf(0, mark->count());
  const Status told = GuardEntry([&] { return sink_->OnSendStopped(rest, mark->failure); });
  static_cast<void>(told);  // the mark's first failure is what is kept
}

}  // namespace quire
