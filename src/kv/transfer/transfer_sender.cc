#include "kv/transfer/transfer_sender.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/check.h"
#include "base/guard.h"
#include "kv/control/sequence_control.h"

namespace quire {
namespace {

constexpr const char* kMark = "DisaggMarkSend";

Status BadMaps(StatusCode code, const std::string& why) {
  return Status(code, std::string(kMark) + ": " + why);
}

}  // namespace

TransferSender::TransferSender(std::span<SendingPart* const> parts) {
  for (SendingPart* const part : parts) {
    const std::vector<TransferLayer> layers = part->send_layers();
    if (layers.empty()) continue;
    const bool has_states = layers.front().is_state();
    QUIRE_DCHECK(!has_states_ || has_states) << "rows come before states";
    (has_states ? has_states_ : has_rows_) = true;
    parts_.push_back({.part = part, .has_states = has_states});
    layers_.insert(layers_.end(), layers.begin(), layers.end());
  }
}

// ---------------------------------------------------------------------- marks

Status TransferSender::CheckMaps(int64_t seq_id, std::span<const ReceiveMap> maps, int64_t begin,
                                 int64_t rank) const {
  if (maps.empty() || begin < 0 || rank < 0 || (has_states_ && maps.size() != 1)) {
    return BadMaps(StatusCode::kBadArgument,
                   std::to_string(maps.size()) + " maps, from position " + std::to_string(begin) +
                       " on, by rank " + std::to_string(rank) +
                       "; there must be a map, one only with recurrent layers, whose heads are not "
                       "split, and neither number may be negative");
  }
  uint64_t layout = 0;
  bool binds_positions = false;
  for (const Sending& of : parts_) {
    layout = JoinLayouts(layout, of.part->SendLayout(seq_id));
    binds_positions |= of.part->binds_positions();
  }
  for (const ReceiveMap& map : maps) {
    if (map.kv_heads.size() != layers_.size() || map.layout != layout) {
      return BadMaps(StatusCode::kIncompatible,
                     "the receiver stores other bytes than sequence " + std::to_string(seq_id) +
                         " here: its layers, RoPE or kernel path differ; compute the tokens there");
    }
    if (map.count < 1 || map.count != maps[0].count || map.count > kPositionsMax - begin) {
      return BadMaps(StatusCode::kBadArgument,
                     "a map of " + std::to_string(map.count) + " tokens beside one of " +
                         std::to_string(maps[0].count) + ", from position " +
                         std::to_string(begin) +
                         " on; all must have as many, at least 1, and positions end at 2^31");
    }
    if (binds_positions && map.first_position != begin) {
      return BadMaps(StatusCode::kIncompatible,
                     "keys of position " + std::to_string(begin) +
                         " are rotated for it, and states are those of the tokens before it; they "
                         "would come to stand at " +
                         std::to_string(map.first_position));
    }
    QUIRE_RETURN_IF_ERROR(CheckHeads(map, rank, static_cast<int64_t>(maps.size())));
  }
  return Status();
}

Status TransferSender::CheckHeads(const ReceiveMap& map, int64_t rank, int64_t targets) const {
  const auto senders_of = [&](size_t l) { return map.kv_heads[l] / layers_[l].heads(); };
  size_t divided = layers_.size();  // the first layer of which a receiver has more heads
  for (size_t l = 0; l < layers_.size(); ++l) {
    const int64_t heads = layers_[l].heads();
    const bool fits = has_states_
                          ? map.kv_heads[l] == heads
                          : HeadsFor(heads, map.kv_heads[l], rank, 0, targets).head_count > 0;
    if (!fits) {
      return BadMaps(StatusCode::kIncompatible,
                     "layer " + std::to_string(l) + " has " + std::to_string(heads) +
                         " kv heads here and " + std::to_string(map.kv_heads[l]) + " there, with " +
                         std::to_string(targets) +
                         " maps; with recurrent layers both must be equal; else one must be a "
                         "multiple of the other, and a sender with more heads gives a map for each "
                         "receiver that shares them");
    }
    if (heads >= map.kv_heads[l]) continue;
    divided = std::min(divided, l);
    if (senders_of(l) == senders_of(divided)) continue;
    return BadMaps(StatusCode::kIncompatible,
                   std::to_string(senders_of(divided)) + " senders fill layer " +
                       std::to_string(divided) + " of the receiver and " +
                       std::to_string(senders_of(l)) + " fill layer " + std::to_string(l) +
                       "; all layers whose heads are divided must be divided among as many");
  }
  return Status();
}

// Which of the peers that share the receiver's heads gets what this rank has. BadArgument for a
// number beyond 64 bits, since both are the caller's.
Result<int64_t> TransferSender::PeerOf(const ReceiveMap& map, int64_t peer, int64_t rank,
                                       int64_t target, int64_t targets) const {
  int64_t senders = 1;  // that fill one peer's heads together
  for (size_t l = 0; l < layers_.size(); ++l)
    senders = std::max(senders, map.kv_heads[l] / layers_[l].heads());
  int64_t place = 0;
  int64_t found = 0;
  if (__builtin_mul_overflow(rank / senders, targets, &place) ||
      __builtin_add_overflow(place, target, &place) ||
      __builtin_add_overflow(peer, place, &found)) {
    return BadMaps(StatusCode::kBadArgument, "rank " + std::to_string(rank) + " with " +
                                                 std::to_string(targets) + " maps, from peer " +
                                                 std::to_string(peer) +
                                                 " on, gives a peer's number beyond 64 bits");
  }
  return found;
}

Status TransferSender::Mark(int64_t seq_id, int64_t begin, std::span<const ReceiveMap> maps,
                            int64_t peer, int64_t rank, int64_t first_row) {
  QUIRE_RETURN_IF_ERROR(marks_.RequireSink());
  QUIRE_RETURN_IF_ERROR(CheckMaps(seq_id, maps, begin, rank));
  std::vector<int64_t> peers;
  for (const ReceiveMap& map : maps) {
    QUIRE_ASSIGN_OR_RETURN(const int64_t to, PeerOf(map, peer, rank, std::ssize(peers),
                                                    static_cast<int64_t>(maps.size())));
    peers.push_back(to);
  }
  QUIRE_ASSIGN_OR_RETURN(auto mark, MakeMark(seq_id, begin, maps, peers, rank, first_row));
  mark->has_rows = has_rows_;
  mark->has_states = has_states_;
  for (const Sending& of : parts_) {
    const int64_t stored = std::min(of.part->SendableLength(seq_id), mark->end);
    if (mark->next < stored)
      QUIRE_RETURN_IF_ERROR(of.part->CheckHeld(kMark, seq_id, mark->next, stored));
  }
  marks_.Reserve();
  marks_.Put(std::move(mark));
  return Status();
}

void TransferSender::AppendFacts(int64_t seq_id, std::vector<int64_t>* facts) const {
  const SendMark* const mark = marks_.Find(seq_id);
  if (mark == nullptr) return;
  facts->insert(facts->end(),
                {mark->begin, mark->end, mark->next, mark->state_next, mark->active(), mark->rank});
  for (const SendMark::Target& target : mark->targets)
    facts->insert(facts->end(), {static_cast<int64_t>(target.map.epoch), target.peer});
}

void TransferSender::AppendAllFacts(std::vector<int64_t>* facts) const {
  for (const auto& mark : marks_.all()) {
    facts->push_back(mark->seq_id);
    AppendFacts(mark->seq_id, facts);
  }
}

void TransferSender::ShortenRows(SendMark* mark, int64_t length) noexcept {
  QUIRE_DCHECK(mark->given == 0) << "a forward sends these tokens";
  mark->ShortenTo(length);
}

void TransferSender::ShortenStates(int64_t seq_id, int64_t length) noexcept {
  SendMark* const mark = marks_.Find(seq_id);
  if (mark != nullptr && length < mark->state_next) mark->state_next = mark->begin;
}

// ---------------------------------------------------------------------- sending

bool TransferSender::IsStored(const SendMark& mark, int64_t position) {
  QUIRE_DCHECK(position >= mark.begin && position < mark.end);
  return std::ranges::any_of(mark.targets, [&](const SendMark::Target& target) {
    int64_t slot = -1;
    target.slots.Fill(position - mark.begin, std::span(&slot, 1));
    return slot >= 0;
  });
}

Status TransferSender::Give(SendMark* mark, int64_t layer, int64_t begin, const ReadLayer& from) {
  const LayerKV& rows = from.rows;
  QUIRE_DCHECK(begin >= mark->begin && begin + rows.k.dim(0) <= mark->end);
  mark->ranges.clear();
  const TransferLayer& of = layers_[static_cast<size_t>(layer)];
  const int64_t targets = static_cast<int64_t>(mark->targets.size());
  const size_t count = static_cast<size_t>(rows.k.dim(0));
  QUIRE_DCHECK(rows.k.dim(0) <= SendMarks::kRowsMax);
  for (int64_t t = 0; t < targets; ++t) {
    const SendMark::Target& target = mark->targets[static_cast<size_t>(t)];
    const HeadsOfTarget heads = HeadsFor(
        of.heads(), target.map.kv_heads[static_cast<size_t>(layer)], mark->rank, t, targets);
    const std::span<int64_t> remote =
        std::span(mark->remote_slots).subspan(static_cast<size_t>(t * SendMarks::kRowsMax), count);
    target.slots.Fill(begin - mark->begin, remote);
    for (size_t row = 0; row < count;) {
      size_t stop = row;
      while (stop < count && remote[stop] >= 0) ++stop;
      if (stop > row) {
        QUIRE_DCHECK(mark->ranges.size() < mark->ranges.capacity()) << "a forward would allocate";
        QUIRE_DCHECK(heads.head_count > 0) << "DisaggMarkSend takes no such heads";
        const int64_t offset = static_cast<int64_t>(row);
        const int64_t length = static_cast<int64_t>(stop - row);
        mark->ranges.push_back({.seq_id = mark->seq_id,
                                .epoch = target.map.epoch,
                                .first_position = begin + offset,
                                .first_row = begin - mark->begin + offset,
                                .count = length,
                                .local = RowsOf(rows, offset, length),
                                .memory = from.memory,
                                .local_head = heads.local_head,
                                .remote_head = heads.remote_head,
                                .head_count = heads.head_count,
                                .remote_slots = remote.subspan(row, stop - row),
                                .peer = target.peer});
      }
      row = stop + 1;
    }
  }
  if (mark->ranges.empty()) return Status();
  const Status given = marks_.sink().OnLayerAppended(layer, mark->ranges);
  mark->ranges.clear();  // the memory is for the next rows, unless the sink holds it
  return given;
}

void TransferSender::FinishRows(SendMark* mark, SendMarks::Outcome outcome) noexcept {
  marks_.Finish(mark, outcome, &SendMark::next, mark->next - mark->begin);
}

// Those at the sequence's end, or at the map's end if the sequence is longer.
void TransferSender::SendStates(SendMark* mark) noexcept {
  if (!has_states_ || !mark->active()) return;
  QUIRE_DCHECK(mark->given == 0) << "rows go before states";
  for (const Sending& of : parts_) {
    if (!of.has_states || !mark->failure.ok()) continue;
    const int64_t position = std::min(of.part->SendableLength(mark->seq_id), mark->end);
    if (position <= mark->state_next) continue;
    mark->given = position;
    mark->failure = GuardEntry([&] { return of.part->Send(mark, mark->state_next, position); });
  }
  if (mark->given == 0) return;
  marks_.Finish(mark, SendMarks::Outcome::kEnded, &SendMark::state_next,
                mark->given - 1 - mark->begin);
}

void TransferSender::FinishMarks(SendMarks::Outcome outcome) noexcept {
  for (const auto& mark : marks_.all()) {
    if (mark->given > 0) FinishRows(mark.get(), outcome);
    if (outcome == SendMarks::Outcome::kEnded) SendStates(mark.get());
  }
}

Status TransferSender::Flush(const char* call, int64_t seq_id) {
  QUIRE_RETURN_IF_ERROR(marks_.Require(call, seq_id));
  SendMark* const mark = marks_.Find(seq_id);
  if (!mark->active()) return mark->failure;
  for (const Sending& of : parts_) {
    if (of.has_states || !mark->failure.ok()) continue;
    const int64_t end = std::min(of.part->SendableLength(seq_id), mark->end);
    if (end > mark->next) mark->failure = of.part->Send(mark, mark->next, end);
  }
  if (mark->given > 0) FinishRows(mark, SendMarks::Outcome::kEnded);
  SendStates(mark);
  return mark->failure;
}

}  // namespace quire
