// Transfer in the naive model: row by row, head by head, with one list of flags per layer.
#include <algorithm>
#include <limits>
#include <set>
#include <utility>

#include "base/checksum.h"
#include "kv/testing/kv_model.h"
#include "quire/chunk.h"
#include "quire/kv_export.h"

namespace quire {
namespace {

Status Bad(StatusCode code, const std::string& message) {
  return Status(code, "KVModel: " + message);
}

// All ranks' heads in a row: sender r has [r a, (r + 1) a) of them, receiver q [q b, (q + 1) b).
// What both have, counted within each; of equal counts, all.
struct CommonHeads {
  int64_t local = 0;
  int64_t remote = 0;
  int64_t count = 0;
};
CommonHeads CommonOf(int64_t a, int64_t r, int64_t b, int64_t q) {
  if (a == b) return {0, 0, a};
  const int64_t begin = std::max(r * a, q * b);
  const int64_t end = std::min((r + 1) * a, (q + 1) * b);
  return {begin - r * a, begin - q * b, end - begin};
}

}  // namespace

uint64_t KVModel::TransferLayout(const Sequence& sequence) const {
  std::string text;
  for (const AttentionLayerSpec& layer : options_.layers) {
    for (const int64_t x :
         {static_cast<int64_t>(layer.dtype), static_cast<int64_t>(layer.value_dtype()),
          layer.qk_head_dim, layer.v_head_dim, static_cast<int64_t>(layer.latent)})
      text += std::to_string(x) + " ";
    text += RopePassport(layer.rope ? *layer.rope : options_.rope, sequence.long_factors);
  }
  return Hash64(text);
}

// ---------------------------------------------------------------------- receiving

Result<ReceiveMap> KVModel::DisaggPrepareRecv(int64_t seq_id, int64_t count) {
  if (forward_) return Bad(StatusCode::kBadState, "a forward is open");
  if (!HasSequence(seq_id)) return Bad(StatusCode::kUnknownSequence, "no such sequence");
  Sequence& sequence = sequences_.at(seq_id);
  if (!sequence.is_committed()) return Bad(StatusCode::kBadState, "is not committed");
  if (sequence.retained) return Bad(StatusCode::kBadState, "retained");
  if (count < 1) return Bad(StatusCode::kBadArgument, "count");
  if (count > std::numeric_limits<int32_t>::max() - sequence.length())
    return Bad(StatusCode::kTooLarge, "count");
  ReceiveMap map;
  map.first_position = sequence.length();
  map.count = count;
  map.layout = TransferLayout(sequence);
  map.slots = {1, 0, count};
  QUIRE_RETURN_IF_ERROR(CheckRoom());
  AddPlaces(sequence, count);
  Receive receive;
  receive.seq_id = seq_id;
  receive.count = count;
  for (const AttentionLayerSpec& layer : options_.layers) {
    map.kv_heads.push_back(layer.num_kv_heads);
    receive.rows.emplace_back(layer, count);
    receive.heads.emplace_back(static_cast<size_t>(count * layer.num_kv_heads));
  }
  sequence.pending = count;
  sequence.receive = map.epoch = next_epoch_++;
  receives_.emplace(map.epoch, std::move(receive));
  FreeHidden();
  return map;
}

Result<KVModel::Receive*> KVModel::FindReceive(uint64_t epoch) {
  const auto found = receives_.find(epoch);
  if (found == receives_.end()) return Bad(StatusCode::kNotFound, "no such epoch");
  return &found->second;
}

Result<KVModel::Receive*> KVModel::FindPart(uint64_t epoch, int64_t layer,
                                            const ReceivePart& part) {
  QUIRE_ASSIGN_OR_RETURN(Receive * receive, FindReceive(epoch));
  if (layer < 0 || layer >= std::ssize(options_.layers))
    return Bad(StatusCode::kBadArgument, "layer");
  const int64_t heads = options_.layers[static_cast<size_t>(layer)].num_kv_heads;
  const bool fits = part.first_row >= 0 && part.count >= 1 && part.first_row < receive->count &&
                    part.count <= receive->count - part.first_row && part.first_head >= 0 &&
                    part.head_count >= 1 && part.first_head < heads &&
                    part.head_count <= heads - part.first_head;
  if (!fits) return Bad(StatusCode::kBadArgument, "part");
  return receive;
}

Result<ReceiveView> KVModel::View(uint64_t epoch, int64_t layer, const ReceivePart& part) {
  QUIRE_RETURN_IF_ERROR(FindPart(epoch, layer, part).status());
  AttentionLayerSpec spec = options_.layers[static_cast<size_t>(layer)];
  spec.num_kv_heads = part.head_count;
  const auto rows = std::make_shared<StoredRows>(spec, part.count);
  return ReceiveView{.rows = rows->view(), .memory = rows};
}

Status KVModel::Store(uint64_t epoch, int64_t layer, const ReceivePart& part,
                      const ReceiveView& view, std::optional<uint32_t> digest) {
  QUIRE_ASSIGN_OR_RETURN(Receive * receive, FindPart(epoch, layer, part));
  if (digest.has_value() && DigestOfHeads(view.rows, 0, part.head_count) != *digest) {
    const Status corrupt = Bad(StatusCode::kCorrupt, "digest");
    if (receive->failure.ok()) receive->failure = corrupt;
    return corrupt;
  }
  const size_t l = static_cast<size_t>(layer);
  CopyHeads(view.rows, 0, SomeTokens(receive->rows[l].view(), part.first_row, part.count),
            part.first_head, part.head_count);
  ForEachHead(layer, part, [&](size_t at) { receive->heads[l][at] = 1; });
  return Status();
}

Status KVModel::Complete(uint64_t epoch, int64_t layer, const ReceivePart& part) {
  QUIRE_ASSIGN_OR_RETURN(Receive * receive, FindPart(epoch, layer, part));
  std::vector<char>& heads = receive->heads[static_cast<size_t>(layer)];
  bool is_stored = true;
  ForEachHead(layer, part, [&](size_t at) { is_stored = is_stored && heads[at] != 0; });
  if (!is_stored) return Bad(StatusCode::kBadState, "not stored");
  ForEachHead(layer, part, [&](size_t at) { heads[at] = 2; });
  return Status();
}

Status KVModel::FailReceive(uint64_t epoch, const Status& why) {
  QUIRE_ASSIGN_OR_RETURN(Receive * receive, FindReceive(epoch));
  if (why.ok()) return Bad(StatusCode::kBadArgument, "an ok status is no failure");
  if (receive->failure.ok()) receive->failure = why;
  return Status();
}

// The number of rows of [row, end) all of whose heads are complete.
int64_t KVModel::CompleteRows(const Receive& receive, size_t layer, int64_t row,
                              int64_t end) const {
  const int64_t heads = options_.layers[layer].num_kv_heads;
  int64_t count = 0;
  for (; row < end; ++row) {
    const auto first = receive.heads[layer].begin() + row * heads;
    count += std::count(first, first + heads, 2) == heads;
  }
  return count;
}

Result<ReceiveProgress> KVModel::GetReceiveProgress(uint64_t epoch) const {
  QUIRE_ASSIGN_OR_RETURN(const Receive* receive, const_cast<KVModel*>(this)->FindReceive(epoch));
  ReceiveProgress progress{.count = receive->count,
                           .layer_rows = {},
                           .complete = receive->count,
                           .failure = receive->failure};
  for (size_t l = 0; l < options_.layers.size(); ++l) {
    progress.layer_rows.push_back(CompleteRows(*receive, l, 0, receive->count));
    while (CompleteRows(*receive, l, 0, progress.complete) < progress.complete) --progress.complete;
  }
  return progress;
}

// BadState unless the first n rows are complete.
Status KVModel::RequireRows(uint64_t epoch, int64_t n) {
  QUIRE_ASSIGN_OR_RETURN(const Receive* receive, FindReceive(epoch));
  if (n < 0 || n > receive->count) return Bad(StatusCode::kBadArgument, "n");
  for (size_t l = 0; l < options_.layers.size(); ++l) {
    if (CompleteRows(*receive, l, 0, n) < n) return Bad(StatusCode::kBadState, "is not complete");
  }
  return Status();
}

Status KVModel::WaitReceived(uint64_t epoch, int64_t n, Clock&, int64_t) const {
  const auto found = receives_.find(epoch);
  if (found == receives_.end()) return Bad(StatusCode::kCancelled, "the epoch is over");
  const Status status = const_cast<KVModel*>(this)->RequireRows(epoch, n);
  if (status.code() != StatusCode::kBadState) return status;
  return found->second.failure.ok() ? Bad(StatusCode::kTimeout, "is not complete")
                                    : found->second.failure;
}

Status KVModel::DisaggCommitRecv(uint64_t epoch, int64_t n) {
  QUIRE_RETURN_IF_ERROR(RequireRows(epoch, n));
  const Receive& receive = receives_.at(epoch);
  const Sequence& sequence = sequences_.at(receive.seq_id);
  for (size_t l = 0; l < options_.layers.size() && n > 0; ++l) {
    StoreTokens(sequence, static_cast<size_t>(sequence.length()), l,
                SomeTokens(receive.rows[l].view(), 0, n));
  }
  EndReceive(receive.seq_id, n);
  return Status();
}

Status KVModel::DisaggCancelRecv(uint64_t epoch) {
  QUIRE_ASSIGN_OR_RETURN(const Receive* receive, FindReceive(epoch));
  EndReceive(receive->seq_id, 0);
  return Status();
}

// The first n pending tokens stay, if there are any.
void KVModel::EndReceive(int64_t seq_id, int64_t n) {
  Sequence& sequence = sequences_.at(seq_id);
  if (sequence.pending == 0) return;
  receives_.erase(sequence.receive);
  sequence.tokens.resize(static_cast<size_t>(sequence.length() + n));
  sequence.pending = 0;
  sequence.receive = 0;
  if (n > 0) sequence.Slide();
  FreeHidden();
}

// ---------------------------------------------------------------------- sending

Status KVModel::SetLayerSink(std::shared_ptr<LayerSink> sink) {
  if (forward_) return Bad(StatusCode::kBadState, "a forward is open");
  if (std::ranges::any_of(marks_, [](const auto& mark) { return mark.second.active(); }))
    return Bad(StatusCode::kBadState, "there are marks");
  sink_ = std::move(sink);
  return Status();
}

Status KVModel::CheckMark(int64_t seq_id, int64_t begin, std::span<const ReceiveMap> maps,
                          int64_t rank, int64_t first_row) const {
  if (forward_) return Bad(StatusCode::kBadState, "a forward is open");
  if (!HasSequence(seq_id)) return Bad(StatusCode::kUnknownSequence, "no such sequence");
  if (sink_ == nullptr) return Bad(StatusCode::kBadState, "no sink");
  if (maps.empty() || begin < 0 || rank < 0) return Bad(StatusCode::kBadArgument, "numbers");
  const Sequence& sequence = sequences_.at(seq_id);
  const bool has_rotated_keys =
      options_.rope.mode == RopeMode::kNormal ||
      std::ranges::any_of(options_.layers, [](const AttentionLayerSpec& l) { return l.latent; });
  for (const ReceiveMap& map : maps) {
    if (map.kv_heads.size() != options_.layers.size() || map.layout != TransferLayout(sequence))
      return Bad(StatusCode::kIncompatible, "layout");
    if (map.count < 1 || map.count != maps[0].count) return Bad(StatusCode::kBadArgument, "count");
    if (has_rotated_keys && map.first_position != begin)
      return Bad(StatusCode::kIncompatible, "rotated keys");
    std::set<int64_t> senders;  // of the layers whose heads several of them fill
    for (size_t l = 0; l < options_.layers.size(); ++l) {
      const int64_t a = options_.layers[l].num_kv_heads;
      const int64_t b = map.kv_heads[l];
      if (a < b) senders.insert(b / a);
      const bool fits = a == b || (a < b && b % a == 0 && maps.size() == 1) ||
                        (a > b && b > 0 && a == b * std::ssize(maps));
      if (!fits) return Bad(StatusCode::kIncompatible, "heads");
    }
    if (senders.size() > 1) return Bad(StatusCode::kIncompatible, "layers of several divisions");
  }
  if (first_row < 0 || first_row >= maps[0].count) return Bad(StatusCode::kBadArgument, "row");
  for (int64_t p = begin + first_row; p < std::min(sequence.length(), begin + maps[0].count); ++p) {
    for (size_t g = 0; g < groups_.size(); ++g) {
      if (!IsHeld(sequence, p, g)) return Bad(StatusCode::kBadArgument, "not held");
    }
  }
  return Status();
}

Status KVModel::DisaggMarkSend(int64_t seq_id, int64_t begin, std::span<const ReceiveMap> maps,
                               int64_t peer, int64_t rank, int64_t first_row) {
  QUIRE_RETURN_IF_ERROR(CheckMark(seq_id, begin, maps, rank, first_row));
  Mark mark;
  mark.begin = begin;
  mark.next = begin + first_row;
  mark.peer = peer;
  mark.rank = rank;
  for (const ReceiveMap& map : maps) {
    mark.maps.push_back(map);
    QUIRE_ASSIGN_OR_RETURN(std::vector<int64_t> slots, DecodeSlots(map.slots, map.count));
    if (std::ssize(slots) != map.count) return Bad(StatusCode::kBadArgument, "slots");
    mark.slots.push_back(std::move(slots));
  }
  StopSend(seq_id, &mark);
  marks_.emplace(seq_id, std::move(mark));
  return Status();
}

// Receivers are numbered as their heads follow one another.
int64_t KVModel::PeerOf(const Mark& mark, size_t map) const {
  const auto maps = std::ssize(mark.maps);
  if (maps > 1) return mark.rank * maps + static_cast<int64_t>(map);
  int64_t receiver = mark.rank;
  for (size_t l = 0; l < options_.layers.size(); ++l) {
    const int64_t a = options_.layers[l].num_kv_heads;
    const int64_t b = mark.maps[map].kv_heads[l];
    if (a != b) receiver = mark.rank * a / b + static_cast<int64_t>(map);
  }
  return receiver;
}

void KVModel::SendLayer(size_t layer) {
  for (const int64_t id : batch_) {
    const auto mark = marks_.find(id);
    if (mark == marks_.end() || !mark->second.active()) continue;
    GiveRows(id, layer, std::min(sequences_.at(id).length(), mark->second.end()));
  }
}

void KVModel::GiveRows(int64_t seq_id, size_t layer, int64_t end) {
  Mark& mark = marks_.at(seq_id);
  if (mark.next >= end || !mark.failure.ok()) return;
  mark.given = end;
  for (int64_t p = mark.next; p < end; ++p) {
    if (IsHeld(sequences_.at(seq_id), p, group_of_layer_[layer])) continue;
    mark.failure = Bad(StatusCode::kBadArgument, "not held");
    return;
  }
  for (size_t map = 0; map < mark.maps.size(); ++map) {
    for (int64_t p = mark.next; p < end && mark.failure.ok(); ++p)
      mark.failure = GiveRow(seq_id, layer, map, p);
  }
}

Status KVModel::GiveRow(int64_t seq_id, size_t layer, size_t map, int64_t position) {
  const Mark& mark = marks_.at(seq_id);
  const int64_t row = position - mark.begin;
  const int64_t slot = mark.slots[map][static_cast<size_t>(row)];
  if (slot < 0) return Status();
  const AttentionLayerSpec& spec = options_.layers[layer];
  const int64_t receiver = PeerOf(mark, map);
  const CommonHeads heads =
      CommonOf(spec.num_kv_heads, mark.rank, mark.maps[map].kv_heads[layer], receiver);
  const StoredRows stored(spec, 1);
  QUIRE_RETURN_IF_ERROR(ExportKV(seq_id, static_cast<int64_t>(layer), position, stored.view()));
  const SendRange range{.seq_id = seq_id,
                        .epoch = mark.maps[map].epoch,
                        .first_position = position,
                        .first_row = row,
                        .count = 1,
                        .local = stored.view(),
                        .local_head = heads.local,
                        .remote_head = heads.remote,
                        .head_count = heads.count,
                        .remote_slots = std::span(&slot, 1),
                        .peer = mark.peer + receiver};
  return sink_->OnLayerAppended(static_cast<int64_t>(layer), std::span(&range, 1));
}

// The records of positions [first, end), one for each map.
std::vector<SendRecord> KVModel::RecordsOf(int64_t seq_id, int64_t first, int64_t end) const {
  const Mark& mark = marks_.at(seq_id);
  std::vector<SendRecord> records;
  for (size_t map = 0; map < mark.maps.size(); ++map) {
    records.push_back({.seq_id = seq_id,
                       .epoch = mark.maps[map].epoch,
                       .first_row = first - mark.begin,
                       .count = end - first,
                       .peer = mark.peer + PeerOf(mark, map)});
  }
  return records;
}

void KVModel::FinishSends(std::span<const int64_t> seq_ids, Outcome outcome) {
  for (const int64_t id : seq_ids) {
    const auto found = marks_.find(id);
    if (found == marks_.end() || found->second.given == 0) continue;
    Mark& mark = found->second;
    const int64_t given = std::exchange(mark.given, 0);
    const auto records = RecordsOf(id, mark.next, given);
    const bool ends = outcome == Outcome::kEnded && mark.failure.ok();
    const Status status = ends ? sink_->OnForwardEnded(records) : sink_->OnForwardAborted(records);
    if (ends && status.ok()) mark.next = given;
    if (mark.failure.ok()) mark.failure = status;
    if (mark.failure.ok()) continue;
    static_cast<void>(sink_->OnSendStopped(RecordsOf(id, mark.begin, mark.end()), mark.failure));
  }
}

// What `next` sends to goes on.
void KVModel::StopSend(int64_t seq_id, const Mark* next) {
  const auto mark = marks_.find(seq_id);
  if (mark == marks_.end()) return;
  auto records = RecordsOf(seq_id, mark->second.next, mark->second.end());
  std::erase_if(records, [&](const SendRecord& record) {
    for (size_t map = 0; next != nullptr && map < next->maps.size(); ++map) {
      if (next->maps[map].epoch == record.epoch && next->peer + PeerOf(*next, map) == record.peer)
        return true;
    }
    return false;
  });
  if (mark->second.active() && !records.empty()) {
    static_cast<void>(
        sink_->OnSendStopped(records, Bad(StatusCode::kCancelled, "the sender has stopped")));
  }
  marks_.erase(mark);
}

Status KVModel::DisaggUnmarkSend(int64_t seq_id) {
  QUIRE_RETURN_IF_ERROR(CheckControl(seq_id));
  if (marks_.count(seq_id) == 0) return Bad(StatusCode::kNotFound, "no mark");
  StopSend(seq_id);
  return Status();
}

Result<int64_t> KVModel::DisaggDetachSend(int64_t seq_id) {
  QUIRE_RETURN_IF_ERROR(CheckControl(seq_id));
  const auto mark = marks_.find(seq_id);
  if (mark == marks_.end()) return Bad(StatusCode::kNotFound, "no mark");
  if (!mark->second.failure.ok()) return mark->second.failure;
  const int64_t sent = mark->second.next - mark->second.begin;
  marks_.erase(mark);
  return sent;
}

Status KVModel::DisaggFlushSend(int64_t seq_id) {
  if (forward_) return Bad(StatusCode::kBadState, "a forward is open");
  if (!HasSequence(seq_id)) return Bad(StatusCode::kUnknownSequence, "no such sequence");
  const auto mark = marks_.find(seq_id);
  if (mark == marks_.end()) return Bad(StatusCode::kNotFound, "no mark");
  if (!mark->second.active()) return mark->second.failure;
  const int64_t end = std::min(sequences_.at(seq_id).length(), mark->second.end());
  for (size_t l = 0; l < options_.layers.size(); ++l) GiveRows(seq_id, l, end);
  FinishSends(std::span(&seq_id, 1), Outcome::kEnded);
  return mark->second.failure;
}

Result<SendProgress> KVModel::GetSendProgress(int64_t seq_id) const {
  if (!HasSequence(seq_id)) return Bad(StatusCode::kUnknownSequence, "no such sequence");
  const auto found = marks_.find(seq_id);
  if (found == marks_.end()) return Bad(StatusCode::kNotFound, "no mark");
  const Mark& mark = found->second;
  return SendProgress{.begin = mark.begin,
                      .count = mark.maps[0].count,
                      .sent = mark.next - mark.begin,
                      .active = mark.active(),
                      .failure = mark.failure};
}

}  // namespace quire
