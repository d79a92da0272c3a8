#include "kv/cache/kv_sender.h"

#include <algorithm>
#include <string>

#include "base/check.h"
#include "base/guard.h"
#include "kv/pages/kv_export_rows.h"
#include "kv/transfer/pending_receives.h"

namespace quire {
namespace {

constexpr const char* kMark = "DisaggMarkSend";

Status BadMaps(StatusCode code, const std::string& why) {
  return Status(code, std::string(kMark) + ": " + why);
}

// Which of the peers that share the receiver's heads gets what this rank has.
int64_t PeerOf(const std::vector<AttentionLayerSpec>& layers, const ReceiveMap& map, int64_t peer,
               int64_t rank, int64_t target, int64_t targets) {
  if (targets > 1) return peer + rank * targets + target;
  int64_t senders = 1;  // that fill one peer's heads together
  for (size_t l = 0; l < layers.size(); ++l)
    senders = std::max(senders, map.kv_heads[l] / layers[l].num_kv_heads);
  return peer + rank / senders;
}

}  // namespace

// ---------------------------------------------------------------------- marks

Status KVSender::CheckMaps(const Sequence& sequence, std::span<const ReceiveMap> maps,
                           int64_t begin, int64_t rank) const {
  if (maps.empty() || begin < 0 || rank < 0) {
    return BadMaps(StatusCode::kBadArgument,
                   std::to_string(maps.size()) + " maps, from position " + std::to_string(begin) +
                       " on, by rank " + std::to_string(rank) +
                       "; there must be a map, and neither may be negative");
  }
  const uint64_t layout = kv_.TransferLayout(sequence.long_factors);
  // The caller rotates for latent layers.
  const bool has_rotated_keys =
      kv_.options.rope.mode == RopeMode::kNormal ||
      std::ranges::any_of(kv_.options.layers, [](const AttentionLayerSpec& l) { return l.latent; });
  for (const ReceiveMap& map : maps) {
    if (map.kv_heads.size() != kv_.options.layers.size() || map.layout != layout) {
      return BadMaps(StatusCode::kIncompatible,
                     "the receiver stores other bytes than sequence " +
                         std::to_string(sequence.id) +
                         " here: its layers, RoPE or kernel path differ; compute the tokens there");
    }
    if (map.count < 1 || map.count != maps[0].count || map.count > kPositionsMax - begin) {
      return BadMaps(StatusCode::kBadArgument,
                     "a map of " + std::to_string(map.count) + " tokens beside one of " +
                         std::to_string(maps[0].count) + ", from position " +
                         std::to_string(begin) +
                         " on; all must have as many, at least 1, and positions end at 2^31");
    }
    if (has_rotated_keys && map.first_position != begin) {
      return BadMaps(StatusCode::kIncompatible,
                     "keys of position " + std::to_string(begin) +
                         " are rotated for it and would come to stand at " +
                         std::to_string(map.first_position));
    }
    for (size_t l = 0; l < kv_.options.layers.size(); ++l) {
      const int64_t heads = kv_.options.layers[l].num_kv_heads;
      const HeadsOfTarget part =
          HeadsFor(heads, map.kv_heads[l], rank, 0, static_cast<int64_t>(maps.size()));
      if (part.head_count > 0) continue;
      return BadMaps(StatusCode::kIncompatible,
                     "layer " + std::to_string(l) + " has " + std::to_string(heads) +
                         " kv heads here and " + std::to_string(map.kv_heads[l]) + " there, with " +
                         std::to_string(maps.size()) +
                         " maps; one must be a multiple of the other, and a sender with more "
                         "heads gives a map for each receiver that shares them");
    }
  }
  return Status();
}

Status KVSender::Mark(int32_t index, int64_t begin, std::span<const ReceiveMap> maps, int64_t peer,
                      int64_t rank, int64_t first_row) {
  QUIRE_RETURN_IF_ERROR(marks_.RequireSink());
  const Sequence& sequence = kv_.control[index];
  const int64_t seq_id = sequence.id;
  QUIRE_RETURN_IF_ERROR(CheckMaps(sequence, maps, begin, rank));
  std::vector<int64_t> peers;
  for (const ReceiveMap& map : maps) {
    peers.push_back(PeerOf(kv_.options.layers, map, peer, rank, std::ssize(peers),
                           static_cast<int64_t>(maps.size())));
  }
  QUIRE_ASSIGN_OR_RETURN(auto mark, MakeMark(seq_id, begin, maps, peers, rank, first_row));
  const int64_t stored = std::min(kv_.CommittedLength(sequence), mark->end);
  for (int g = 0; g < kv_.tree.group_count() && mark->next < stored; ++g)
    QUIRE_RETURN_IF_ERROR(kv_.CheckHeld(kMark, sequence, g, mark->next, stored));
  int64_t bytes = 0;
  for (const AttentionLayerSpec& spec : kv_.options.layers)
    bytes = std::max(bytes, LayerBytes(spec, SendMarks::kRowsMax));
  marks_.Reserve(index, bytes);
  marks_.Put(index, std::move(mark));
  return Status();
}

void KVSender::AppendFacts(int32_t index, std::vector<int64_t>* facts) const {
  const SendMark* const mark = marks_.Find(index);
  if (mark == nullptr) return;
  facts->insert(facts->end(), {mark->begin, mark->end, mark->next, mark->active(), mark->rank});
  for (const SendMark::Target& target : mark->targets)
    facts->insert(facts->end(), {static_cast<int64_t>(target.map.epoch), target.peer});
}

// ---------------------------------------------------------------------- sending

void KVSender::SendMembers(int64_t layer, const ForwardPlan& plan) noexcept {
  for (const ForwardMember& member : plan.members) {
    SendMark* const mark = marks_.Find(member.sequence);
    if (mark == nullptr || !mark->active()) continue;
    const int64_t length = member.is_tree() ? member.committed : member.position_end();
    SendRows(mark, kv_.control[member.sequence], layer, std::min(length, mark->end));
  }
}

void KVSender::SendRows(SendMark* mark, const Sequence& sequence, int64_t layer,
                        int64_t end) noexcept {
  QUIRE_DCHECK(end <= mark->end);
  if (mark->next >= end) return;
  mark->given = end;
  for (int64_t begin = mark->next; begin < end && mark->failure.ok();
       begin += SendMarks::kRowsMax) {
    const int64_t piece_end = std::min(end, begin + SendMarks::kRowsMax);
    mark->failure = GuardEntry([&] { return SendPiece(mark, sequence, layer, begin, piece_end); });
  }
}

Status KVSender::SendPiece(SendMark* mark, const Sequence& sequence, int64_t layer, int64_t begin,
                           int64_t end) {
  const size_t l = static_cast<size_t>(layer);
  const int group = kv_.layer_groups[l];
  // Tokens that only another sequence still saw may be gone since the mark was made.
  QUIRE_RETURN_IF_ERROR(kv_.CheckHeld("the mark", sequence, group, begin, end));
  const auto slots = marks_.rows_slots().first(static_cast<size_t>(end - begin));
  kv_.FillSlots(sequence.last, group, begin, slots);
  const LayerKV rows = LayerRowsIn(marks_.rows_memory(), kv_.options.layers[l], end - begin);
  ReadRows(kv_.storage->layer(layer), slots,
           {.k = rows.k.data(),
            .v = rows.v.data(),
            .k_scale = rows.k_scale.data_as<float>(),
            .v_scale = rows.v_scale.data_as<float>()},
           *kv_.options.runner);
  mark->ranges.clear();
  const int64_t targets = static_cast<int64_t>(mark->targets.size());
  const size_t count = static_cast<size_t>(end - begin);
  for (int64_t t = 0; t < targets; ++t) {
    const SendMark::Target& target = mark->targets[static_cast<size_t>(t)];
    const HeadsOfTarget heads = HeadsFor(kv_.options.layers[l].num_kv_heads, target.map.kv_heads[l],
                                         mark->rank, t, targets);
    const std::span<int64_t> remote =
        std::span(mark->remote_slots).subspan(static_cast<size_t>(t * SendMarks::kRowsMax), count);
    target.slots.Fill(begin - mark->begin, remote);
    for (size_t row = 0; row < count;) {
      size_t stop = row;
      while (stop < count && remote[stop] >= 0) ++stop;
      if (stop > row) {
        const int64_t offset = static_cast<int64_t>(row);
        const int64_t length = static_cast<int64_t>(stop - row);
        mark->ranges.push_back({.seq_id = sequence.id,
                                .epoch = target.map.epoch,
                                .first_position = begin + offset,
                                .first_row = begin - mark->begin + offset,
                                .count = length,
                                .local = RowsOf(rows, offset, length),
                                .local_head = heads.local_head,
                                .remote_head = heads.remote_head,
                                .head_count = heads.head_count,
                                .remote_slots = remote.subspan(row, stop - row),
                                .peer = target.peer});
      }
      row = stop + 1;
    }
  }
  return mark->ranges.empty() ? Status() : marks_.sink().OnLayerAppended(layer, mark->ranges);
}

void KVSender::FinishForward(const ForwardPlan& plan, SendMarks::Outcome outcome) noexcept {
  if (marks_.empty()) return;
  for (const ForwardMember& member : plan.members) {
    SendMark* const mark = marks_.Find(member.sequence);
    if (mark != nullptr && mark->given > 0) Finish(mark, outcome);
  }
}

void KVSender::Finish(SendMark* mark, SendMarks::Outcome outcome) noexcept {
  marks_.Finish(mark, outcome, mark->next - mark->begin);
}

Status KVSender::Flush(const char* call, int32_t index) {
  const Sequence& sequence = kv_.control[index];
  QUIRE_RETURN_IF_ERROR(marks_.Require(call, sequence.id, index));
  SendMark* const mark = marks_.Find(index);
  if (!mark->active()) return mark->failure;
  const int64_t end = std::min(kv_.CommittedLength(sequence), mark->end);
  if (end <= mark->next) return Status();
  for (size_t l = 0; l < kv_.options.layers.size(); ++l)
    SendRows(mark, sequence, static_cast<int64_t>(l), end);
  Finish(mark, SendMarks::Outcome::kEnded);
  return mark->failure;
}

}  // namespace quire
