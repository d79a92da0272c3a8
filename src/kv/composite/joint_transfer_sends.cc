// Marks of a CompositeState, and what goes to the sink when a forward has ended.
#include <algorithm>
#include <utility>

#include "kv/composite/joint_transfer.h"
#include "kv/control/sequence_control.h"

namespace quire {
namespace {

Status NoMark(const char* call, int64_t seq_id) {
  return Status(StatusCode::kNotFound,
                OfSequence(call, seq_id) + "has no mark; call DisaggMarkSend first");
}

Status BadMark(StatusCode code, const std::string& why) {
  return Status(code, "DisaggMarkSend: " + why);
}

}  // namespace

Status JointTransfer::SetLayerSink(std::shared_ptr<LayerSink> sink) {
  const char* const call = "SetLayerSink";
  return gate_.Enter(call, [&]() -> Status {
    QUIRE_RETURN_IF_ERROR(RequireIdle(call));
    if (std::ranges::any_of(marks_, [](const auto& entry) { return entry.second.active(); })) {
      return Status(StatusCode::kBadState,
                    "SetLayerSink: there are marks that send to the present sink; call "
                    "DisaggUnmarkSend first");
    }
    if (attention_ != nullptr) QUIRE_RETURN_IF_ERROR(attention_->SetLayerSink(sink));
    sink_ = std::move(sink);
    return Status();
  });
}

Status JointTransfer::CheckMap(int64_t seq_id, int64_t begin, std::span<const ReceiveMap> maps,
                               int64_t rank) const {
  if (maps.size() != 1 || begin < 0 || rank < 0) {
    return BadMark(StatusCode::kBadArgument,
                   std::to_string(maps.size()) + " maps, from position " + std::to_string(begin) +
                       " on, by rank " + std::to_string(rank) +
                       "; of states with recurrent layers there is one map, as their heads are "
                       "not split, and neither number may be negative");
  }
  const ReceiveMap& map = maps[0];
  bool fits = map.kv_heads.size() == static_cast<size_t>(attention_layers_) + tensors_.size();
  for (size_t l = 0; fits && l < map.kv_heads.size(); ++l) {
    const bool is_state = l >= static_cast<size_t>(attention_layers_);
    fits = map.kv_heads[l] == (is_state ? 1 : parts_.attention->options().layers[l].num_kv_heads);
  }
  if (!fits || (attention_ == nullptr && map.layout != layout_)) {
    return BadMark(StatusCode::kIncompatible,
                   "the receiver has other layers, heads or kernels than sequence " +
                       std::to_string(seq_id) + " here; compute the tokens there");
  }
  if (map.first_position != begin) {
    return BadMark(StatusCode::kIncompatible,
                   "the receiver goes on at position " + std::to_string(map.first_position) +
                       ", and states from position " + std::to_string(begin) +
                       " on are of other tokens");
  }
  const int64_t stored = std::max<int64_t>(LengthOf(seq_id) - begin, 0);
  if (map.count > stored && map.count <= kPositionsMax - begin) return Status();
  return BadMark(StatusCode::kBadArgument,
                 "a map of " + std::to_string(map.count) + " tokens from position " +
                     std::to_string(begin) + " on for sequence " + std::to_string(seq_id) +
                     ", which has " + std::to_string(stored) +
                     " there; at least one must be left to compute, and positions end at 2^31");
}

Status JointTransfer::DisaggMarkSend(int64_t seq_id, int64_t begin,
                                     std::span<const ReceiveMap> maps, int64_t peer, int64_t rank) {
  const char* const call = "DisaggMarkSend";
  return gate_.Enter(call, [&]() -> Status {
    QUIRE_RETURN_IF_ERROR(RequireIdle(call));
    QUIRE_RETURN_IF_ERROR(first().GetSequenceLength(seq_id).status());
    if (sink_ == nullptr) {
      return BadMark(StatusCode::kBadState, "there is no sink to send to; call SetLayerSink first");
    }
    QUIRE_RETURN_IF_ERROR(CheckMap(seq_id, begin, maps, rank));
    std::map<int64_t, Mark> one;
    Mark& mark = one[seq_id];
    mark = {
        .begin = begin, .end = begin + maps[0].count, .epoch = maps[0].epoch, .peer = peer + rank};
    QUIRE_ASSIGN_OR_RETURN(mark.slots, SlotRuns::Decode(maps[0].slots, maps[0].count));
    if (mark.slots.count() != maps[0].count) {
      return BadMark(StatusCode::kBadArgument, "a map of " + std::to_string(maps[0].count) +
                                                   " tokens has " +
                                                   std::to_string(mark.slots.count()) + " slots");
    }
    if (sending_ == nullptr) sending_ = AllocateStates();
    if (attention_ != nullptr) {
      ReceiveMap of_attention = maps[0];
      of_attention.layout ^= layout_;
      of_attention.kv_heads.resize(static_cast<size_t>(attention_layers_));
      QUIRE_RETURN_IF_ERROR(
          attention_->DisaggMarkSend(seq_id, begin, std::span(&of_attention, 1), peer, rank));
    }
    DropMark(seq_id, "another mark has replaced it");
    marks_.merge(one);
    return Status();
  });
}

Status JointTransfer::DisaggUnmarkSend(int64_t seq_id) {
  const char* const call = "DisaggUnmarkSend";
  return gate_.Enter(call, [&]() -> Status {
    QUIRE_RETURN_IF_ERROR(RequireIdle(call));
    QUIRE_RETURN_IF_ERROR(first().GetSequenceLength(seq_id).status());
    if (marks_.count(seq_id) == 0) return NoMark(call, seq_id);
    DropMark(seq_id, "DisaggUnmarkSend was called");
    StopTokens(seq_id);
    return Status();
  });
}

Status JointTransfer::DisaggFlushSend(int64_t seq_id) {
  const char* const call = "DisaggFlushSend";
  return gate_.Enter(call, [&]() -> Status {
    QUIRE_RETURN_IF_ERROR(RequireIdle(call));
    QUIRE_RETURN_IF_ERROR(first().GetSequenceLength(seq_id).status());
    const auto mark = marks_.find(seq_id);
    if (mark == marks_.end()) return NoMark(call, seq_id);
    if (!mark->second.failure.ok()) return mark->second.failure;
    if (attention_ != nullptr) mark->second.failure = attention_->DisaggFlushSend(seq_id);
    SendStates(seq_id, mark->second);
    return mark->second.failure;
  });
}

Result<SendProgress> JointTransfer::GetSendProgress(int64_t seq_id) const {
  const char* const call = "GetSendProgress";
  return gate_.Enter(call, [&]() -> Result<SendProgress> {
    QUIRE_RETURN_IF_ERROR(first().GetSequenceLength(seq_id).status());
    const auto found = marks_.find(seq_id);
    if (found == marks_.end()) return NoMark(call, seq_id);
    const Mark& mark = found->second;
    SendProgress progress{.begin = mark.begin,
                          .count = mark.end - mark.begin,
                          .sent = std::max<int64_t>(mark.sent - mark.begin, 0),
                          .active = mark.active(),
                          .failure = mark.failure};
    if (attention_ == nullptr || !mark.failure.ok()) return progress;
    QUIRE_ASSIGN_OR_RETURN(const SendProgress tokens, attention_->GetSendProgress(seq_id));
    progress.sent = std::min(progress.sent, tokens.sent);  // those stored before it go later
    progress.active &= tokens.failure.ok();
    progress.failure = tokens.failure;
    return progress;
  });
}

SendRecord JointTransfer::RecordOf(int64_t seq_id, const Mark& mark, int64_t first,
                                   int64_t count) const {
  return {.seq_id = seq_id,
          .epoch = mark.epoch,
          .first_row = first - mark.begin,
          .count = count,
          .peer = mark.peer};
}

Status JointTransfer::SendStatesAt(int64_t seq_id, const Mark& mark, int64_t position) {
  const int64_t row = position - 1 - mark.begin;
  int64_t slot = -1;
  mark.slots.Fill(row, std::span(&slot, 1));
  if (slot < 0) return Status();  // the receiver does not store this token
  for (size_t t = 0; t < tensors_.size(); ++t) {
    const Tensor& tensor = tensors_[t];
    const Status status = parts_.recurrent[tensor.part]->ExportState(tensor.index, seq_id, position,
                                                                     StateIn(sending_.get(), t));
    if (status.code() == StatusCode::kNeedsReplay) {
      return Status(status.code(),
                    OfSequence("the mark", seq_id) + "went past position " +
                        std::to_string(position) +
                        ", the map's end, within a forward, and holds no state there; end a "
                        "forward there");
    }
    QUIRE_RETURN_IF_ERROR(status);
    const SendRange range{.seq_id = seq_id,
                          .epoch = mark.epoch,
                          .first_position = position - 1,
                          .first_row = row,
                          .count = 1,
                          .local = RowIn(sending_.get(), t),
                          .local_head = 0,
                          .remote_head = 0,
                          .head_count = 1,
                          .remote_slots = std::span(&slot, 1),
                          .peer = mark.peer};
    QUIRE_RETURN_IF_ERROR(
        sink_->OnLayerAppended(attention_layers_ + static_cast<int64_t>(t), std::span(&range, 1)));
  }
  const SendRecord record = RecordOf(seq_id, mark, position - 1, 1);
  return sink_->OnForwardEnded(std::span(&record, 1));
}

// Those at the sequence's end, or at the map's if it is behind that.
void JointTransfer::SendStates(int64_t seq_id, Mark& mark) noexcept {
  if (!mark.active()) return;
  const Result<int64_t> nodes = first().GetTreeSize(seq_id);
  const int64_t position = std::min(LengthOf(seq_id), mark.end);
  if (attention_ != nullptr) {  // what it could not send, its receiver has heard of
    const Result<SendProgress> tokens = attention_->GetSendProgress(seq_id);
    mark.failure = tokens.ok() ? tokens->failure : tokens.status();
  }
  if (!mark.failure.ok()) return;
  if (!nodes.ok() || *nodes > 0 || position <= mark.begin || position == mark.sent) return;
  mark.failure = GuardEntry([&] { return SendStatesAt(seq_id, mark, position); });
  if (mark.failure.ok()) {
    mark.sent = position;
    return;
  }
  const Status forgotten = GuardEntry([&] {
    const SendRecord given = RecordOf(seq_id, mark, position - 1, 1);
    return sink_->OnForwardAborted(std::span(&given, 1));
  });
  static_cast<void>(forgotten);  // the mark's first failure is what is told
  Tell(seq_id, mark, mark.failure);
  StopTokens(seq_id);
}

// Tokens without states would be of no use.
void JointTransfer::StopTokens(int64_t seq_id) noexcept {
  if (attention_ == nullptr) return;
  const Status stopped = attention_->DisaggUnmarkSend(seq_id);
  static_cast<void>(stopped);  // NotFound: its mark has ended before
}

// Nothing follows for what the mark has not sent. A receiver that cannot be told stays without it.
void JointTransfer::Tell(int64_t seq_id, const Mark& mark, const Status& why) noexcept {
  const int64_t next = std::max(mark.sent, mark.begin);
  const Status told = GuardEntry([&] {
    const SendRecord rest = RecordOf(seq_id, mark, next, mark.end - next);
    return sink_->OnSendStopped(std::span(&rest, 1), why);
  });
  static_cast<void>(told);
}

void JointTransfer::DropMark(int64_t seq_id, const char* why) noexcept {
  const auto found = marks_.find(seq_id);
  if (found == marks_.end()) return;
  if (found->second.active()) {
    const Status stopped = GuardEntry([&] {
      return Status(StatusCode::kCancelled,
                    "the sender of sequence " + std::to_string(seq_id) + " has stopped: " + why);
    });
    Tell(seq_id, found->second, stopped);
  }
  marks_.erase(found);
}

}  // namespace quire
