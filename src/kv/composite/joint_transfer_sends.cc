// Marks of a CompositeState, and what goes to the sink when a forward has ended.
#include <algorithm>
#include <limits>
#include <utility>

#include "kv/composite/joint_transfer.h"
#include "kv/control/sequence_control.h"

namespace quire {
namespace {

Status BadMark(StatusCode code, const std::string& why) {
  return Status(code, "DisaggMarkSend: " + why);
}

}  // namespace

Status JointTransfer::SetLayerSink(std::shared_ptr<LayerSink> sink) {
  const char* const call = "SetLayerSink";
  return gate_.Enter(call, [&]() -> Status {
    QUIRE_RETURN_IF_ERROR(RequireMappable(call));
    QUIRE_RETURN_IF_ERROR(RequireIdle(call));
    QUIRE_RETURN_IF_ERROR(marks_.RequireNoneActive());
    if (attention_ != nullptr) QUIRE_RETURN_IF_ERROR(attention_->SetLayerSink(sink));
    return marks_.SetSink(std::move(sink));
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
  bool fits =
      map.kv_heads.size() == static_cast<size_t>(attention_layers_) + states_.tensors.size();
  for (size_t l = 0; fits && l < map.kv_heads.size(); ++l) {
    const bool is_state = l >= static_cast<size_t>(attention_layers_);
    fits = map.kv_heads[l] == (is_state ? 1 : parts_.attention->options().layers[l].num_kv_heads);
  }
  if (!fits || (attention_ == nullptr && map.layout != states_.layout)) {
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
  if (map.count >= 1 && map.count <= kPositionsMax - begin) return Status();
  return BadMark(StatusCode::kBadArgument,
                 "a map of " + std::to_string(map.count) + " tokens from position " +
                     std::to_string(begin) + " on for sequence " + std::to_string(seq_id) +
                     "; it must have at least 1, and positions end at 2^31");
}

Status JointTransfer::DisaggMarkSend(int64_t seq_id, int64_t begin,
                                     std::span<const ReceiveMap> maps, int64_t peer, int64_t rank,
                                     int64_t first_row) {
  const char* const call = "DisaggMarkSend";
  return gate_.Enter(call, [&]() -> Status {
    QUIRE_RETURN_IF_ERROR(RequireIdle(call));
    QUIRE_RETURN_IF_ERROR(state_.GetSequenceLength(seq_id).status());
    QUIRE_RETURN_IF_ERROR(marks_.RequireSink());
    QUIRE_RETURN_IF_ERROR(CheckMap(seq_id, begin, maps, rank));
    const int64_t to = peer + rank;
    QUIRE_ASSIGN_OR_RETURN(auto mark,
                           MakeMark(seq_id, begin, maps, std::span(&to, 1), rank, first_row));
    const int32_t index = marks_.IndexOf(seq_id);
    int64_t bytes = 0;
    for (const Tensor& tensor : states_.tensors)
      bytes = std::max(bytes, tensor.elements() * DTypeBytes(tensor.dtype));
    marks_.Reserve(index, bytes);
    if (attention_ != nullptr) {
      ReceiveMap of_attention = maps[0];
      of_attention.layout ^= states_.layout;
      of_attention.kv_heads.resize(static_cast<size_t>(attention_layers_));
      QUIRE_RETURN_IF_ERROR(attention_->DisaggMarkSend(seq_id, begin, std::span(&of_attention, 1),
                                                       peer, rank, first_row));
    }
    marks_.Put(index, std::move(mark));
    return Status();
  });
}

Status JointTransfer::DisaggUnmarkSend(int64_t seq_id) {
  const char* const call = "DisaggUnmarkSend";
  return gate_.Enter(call, [&]() -> Status {
    QUIRE_RETURN_IF_ERROR(RequireIdle(call));
    QUIRE_RETURN_IF_ERROR(state_.GetSequenceLength(seq_id).status());
    QUIRE_RETURN_IF_ERROR(marks_.Unmark(call, seq_id, marks_.IndexOf(seq_id)));
    StopTokens(seq_id);
    return Status();
  });
}

Result<int64_t> JointTransfer::DisaggDetachSend(int64_t seq_id) {
  const char* const call = "DisaggDetachSend";
  return gate_.Enter(call, [&]() -> Result<int64_t> {
    QUIRE_RETURN_IF_ERROR(RequireIdle(call));
    QUIRE_RETURN_IF_ERROR(state_.GetSequenceLength(seq_id).status());
    const int32_t index = marks_.IndexOf(seq_id);
    QUIRE_RETURN_IF_ERROR(marks_.Require(call, seq_id, index));
    if (!marks_.Find(index)->failure.ok()) return marks_.Find(index)->failure;
    int64_t tokens = std::numeric_limits<int64_t>::max();
    if (attention_ != nullptr) {
      QUIRE_ASSIGN_OR_RETURN(tokens, attention_->DisaggDetachSend(seq_id));
    }
    QUIRE_ASSIGN_OR_RETURN(const int64_t states, marks_.Detach(call, seq_id, index));
    return std::min(states, tokens);
  });
}

Status JointTransfer::DisaggFlushSend(int64_t seq_id) {
  const char* const call = "DisaggFlushSend";
  return gate_.Enter(call, [&]() -> Status {
    QUIRE_RETURN_IF_ERROR(RequireIdle(call));
    QUIRE_RETURN_IF_ERROR(state_.GetSequenceLength(seq_id).status());
    const int32_t index = marks_.IndexOf(seq_id);
    QUIRE_RETURN_IF_ERROR(marks_.Require(call, seq_id, index));
    SendMark* const mark = marks_.Find(index);
    if (!mark->failure.ok()) return mark->failure;
    if (attention_ != nullptr) mark->failure = attention_->DisaggFlushSend(seq_id);
    SendStates(mark);
    return mark->failure;
  });
}

Result<SendProgress> JointTransfer::GetSendProgress(int64_t seq_id) const {
  const char* const call = "GetSendProgress";
  return gate_.Enter(call, [&]() -> Result<SendProgress> {
    QUIRE_RETURN_IF_ERROR(state_.GetSequenceLength(seq_id).status());
    QUIRE_ASSIGN_OR_RETURN(SendProgress progress,
                           marks_.Progress(call, seq_id, marks_.IndexOf(seq_id)));
    if (attention_ == nullptr || !progress.failure.ok()) return progress;
    QUIRE_ASSIGN_OR_RETURN(const SendProgress tokens, attention_->GetSendProgress(seq_id));
    progress.sent = std::min(progress.sent, tokens.sent);  // those stored before it go later
    progress.active &= tokens.failure.ok();
    progress.failure = tokens.failure;
    return progress;
  });
}

Status JointTransfer::SendStatesAt(SendMark* mark, int64_t position) {
  const int64_t row = position - 1 - mark->begin;
  const SendMark::Target& target = mark->targets.front();
  const std::span<int64_t> slot = std::span(mark->remote_slots).first(1);
  target.slots.Fill(row, slot);
  if (slot[0] < 0) return Status();  // the receiver does not store this token
  std::byte* const memory = marks_.rows_memory();
  for (size_t t = 0; t < states_.tensors.size(); ++t) {
    const Tensor& tensor = states_.tensors[t];
    const Status status = parts_.recurrent[tensor.part]->ExportState(
        tensor.index, mark->seq_id, position, tensor.StateIn(memory));
    if (status.code() == StatusCode::kNeedsReplay) {
      return Status(status.code(),
                    OfSequence("the mark", mark->seq_id) + "went past position " +
                        std::to_string(position) +
                        ", the map's end, within a forward, and holds no state there; end a "
                        "forward there");
    }
    QUIRE_RETURN_IF_ERROR(status);
    const SendRange range{.seq_id = mark->seq_id,
                          .epoch = target.map.epoch,
                          .first_position = position - 1,
                          .first_row = row,
                          .count = 1,
                          .local = tensor.RowIn(memory),
                          .local_head = 0,
                          .remote_head = 0,
                          .head_count = 1,
                          .remote_slots = slot,
                          .peer = target.peer};
    QUIRE_RETURN_IF_ERROR(marks_.sink().OnLayerAppended(attention_layers_ + static_cast<int64_t>(t),
                                                        std::span(&range, 1)));
  }
  return Status();
}

// Those at the sequence's end, or at the map's end if the sequence is longer.
void JointTransfer::SendStates(SendMark* mark) noexcept {
  if (!mark->active()) return;
  const int64_t seq_id = mark->seq_id;
  const Result<int64_t> nodes = state_.GetTreeSize(seq_id);
  const int64_t position = std::min(LengthOf(seq_id), mark->end);
  if (attention_ != nullptr) {  // the receiver was told by the attention part if it failed there
    const Result<SendProgress> tokens = attention_->GetSendProgress(seq_id);
    mark->failure = tokens.ok() ? tokens->failure : tokens.status();
  }
  if (!mark->failure.ok()) return;
  if (!nodes.ok() || *nodes > 0 || position <= mark->next) return;
  mark->given = position;
  mark->failure = GuardEntry([&] { return SendStatesAt(mark, position); });
  marks_.Finish(mark, SendMarks::Outcome::kEnded, position - 1 - mark->begin);
  if (!mark->failure.ok()) StopTokens(seq_id);
}

// The tokens of a mark are of no use to its receiver without their states.
void JointTransfer::StopTokens(int64_t seq_id) noexcept {
  if (attention_ == nullptr) return;
  const Status stopped = attention_->DisaggUnmarkSend(seq_id);
  static_cast<void>(stopped);  // NotFound: its mark has ended before
}

}  // namespace quire
