#include "kv/cache/kv_receiver.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "kv/pages/kv_export_rows.h"

namespace quire {
namespace {

void ZeroHead(const LayerKV& rows, int64_t row, int64_t head) {
  for (const TensorView* tensor : {&rows.k, &rows.v, &rows.k_scale, &rows.v_scale}) {
    if (tensor->rank() == 0) continue;
    const int64_t bytes = DTypeBytes(tensor->dtype());
    std::memset(
        tensor->data_as<std::byte>() + (row * tensor->stride(0) + head * tensor->stride(1)) * bytes,
        0, static_cast<size_t>(tensor->stride(1) * bytes));
  }
}

}  // namespace

KVReceiver::KVReceiver(PagedSequences& kv, KVImporter& importer, WindowBook& windows,
                       std::shared_ptr<ParallelRunner> runner)
    : kv_(kv), importer_(importer), windows_(windows), runner_(std::move(runner)) {}

void KVReceiver::SetReceiver(TransferReceiver* receiver) noexcept {
  receiver_ = receiver;
  kv_.receives = &receiver->receives();
}

std::vector<TransferLayer> KVReceiver::receive_layers() {
  std::vector<TransferLayer> layers;
  for (size_t l = 0; l < kv_.options.layers.size(); ++l) {
    layers.push_back({.rows = &kv_.options.layers[l],
                      .group = kv_.layer_groups[l],
                      .pages = this,
                      .layer = static_cast<int64_t>(l)});
  }
  return layers;
}

// ---------------------------------------------------------------------- reservations

Status KVReceiver::CheckSequence(const char* call, int32_t index, int64_t count) const {
  QUIRE_RETURN_IF_ERROR(kv_.RequireCommitted(call, index));
  QUIRE_RETURN_IF_ERROR(kv_.control.RequireActive(call, index));
  const Sequence& sequence = kv_.control[index];
  return CheckReceiveCount(call, sequence.id, kv_.tree.End(sequence.last), count);
}

Result<ReservePlan> KVReceiver::PlanReserve(const char* call, int64_t seq_id, int64_t count) {
  QUIRE_ASSIGN_OR_RETURN(const int32_t index, kv_.control.Find(call, seq_id));
  QUIRE_RETURN_IF_ERROR(CheckSequence(call, index, count));
  const Sequence& sequence = kv_.control[index];
  ForwardPlan reserve;
  reserve.StartBatch(1, kv_.groups.size());
  QUIRE_RETURN_IF_ERROR(
      importer_.Reserve(call, sequence, count, KVImporter::FirstPage::kOwn, &reserve));
  const int64_t first = kv_.tree.End(sequence.last);
  ReservePlan plan{.first_position = first, .layout = kv_.TransferLayout(sequence.long_factors)};
  if (kv_.groups.size() == 1) {
    plan.page_size = kv_.tree.pool(0).page_size();
    plan.slot_runs = kv_.tree.pool(0).RangeCount(first, first + count);
  }
  index_ = index;
  reserve_ = std::move(reserve);
  return plan;
}

void KVReceiver::CommitReserve(const ReceiveShare& share) noexcept {
  QUIRE_DCHECK(index_ != SequenceTable::kAbsent && kv_.control[index_].id == share.seq_id);
  QUIRE_DCHECK(kv_.control[index_].reserved == 0) << "a sequence has one reservation at most";
  importer_.Commit(index_, &reserve_);
  for (size_t g = 0; g < kv_.groups.size(); ++g) {
    std::ranges::copy(reserve_.group(static_cast<int>(g)).imports.targets,
                      share.slots[g].targets.begin());
  }
  Sequence& sequence = kv_.control[index_];
  sequence.reserved = sequence.pending = share.count;
  sequence.receive = share.epoch;
  QUIRE_DCHECK(kv_.CommittedLength(sequence) == share.first_position);
  windows_.UpdateHidden(index_);
  windows_.FreeHidden();
  reserve_ = {};
}

// All that the receiver writes to pages.
void KVReceiver::Write(const TokenSlots& slots, int64_t layer, int64_t first, const LayerKV& rows,
                       int64_t count) noexcept {
  const auto opens = slots.opens_tile.begin() + first;
  tiles_opened_ += std::count(opens, opens + count, uint8_t{1});
  importer_.Fill(slots, layer, first, rows, {0, count}, *runner_);
}

void KVReceiver::StoreReceived(const TokenSlots& slots, int64_t layer, const ReceivePart& part,
                               const LayerKV& rows, OtherHeads& others) noexcept {
  const AttentionLayerSpec& spec = kv_.options.layers[static_cast<size_t>(layer)];
  if (part.head_count == spec.num_kv_heads)
    return Write(slots, layer, part.first_row, rows, part.count);
  for (int64_t done = 0; done < part.count; done += kTilePositions) {
    ReceivePart piece = part;
    piece.first_row += done;
    piece.count = std::min<int64_t>(kTilePositions, part.count - done);
    StoreHeads(slots, layer, piece, RowsOf(rows, done, piece.count), others.tile.data(),
               others.is_there.data() + done * spec.num_kv_heads);
  }
}

// Pages take whole rows: the other heads go in once more as they are there, or as zero.
void KVReceiver::StoreHeads(const TokenSlots& slots, int64_t layer, const ReceivePart& part,
                            const LayerKV& rows, std::byte* tile,
                            const uint8_t* is_there) noexcept {
  const AttentionLayerSpec& spec = kv_.options.layers[static_cast<size_t>(layer)];
  const int64_t heads = spec.num_kv_heads;
  QUIRE_DCHECK(part.count <= kTilePositions);
  const LayerKV all = LayerRowsIn(tile, spec, part.count);
  ReadRows(kv_.storage->layer(layer),
           std::span(slots.targets)
               .subspan(static_cast<size_t>(part.first_row), static_cast<size_t>(part.count)),
           {.k = all.k.data(),
            .v = all.v.data(),
            .k_scale = all.k_scale.data_as<float>(),
            .v_scale = all.v_scale.data_as<float>()},
           *runner_);
  for (int64_t row = 0; row < part.count; ++row) {
    for (int64_t head = 0; head < heads; ++head) {
      if (is_there[row * heads + head] == 0) ZeroHead(all, row, head);
    }
  }
  CopyHeads(rows, 0, all, part.first_head, part.head_count);
  Write(slots, layer, part.first_row, all, part.count);
}

// ---------------------------------------------------------------------- the end

Status KVReceiver::PlanTake(const char* /*call*/, const ReceiveShare& share, int64_t n) {
  index_ = kv_.control.table().Find(share.seq_id);
  QUIRE_DCHECK(index_ != SequenceTable::kAbsent) << "a reservation is left of no sequence";
  QUIRE_DCHECK(kv_.control[index_].receive == share.epoch);
  taken_ = n;
  return Status();
}

void KVReceiver::Keep(int32_t index, int64_t n) noexcept {
  Sequence& sequence = kv_.control[index];
  QUIRE_DCHECK(sequence.pending > 0);
  QUIRE_DCHECK(sequence.reserved == sequence.pending);
  QUIRE_DCHECK(n >= 0 && n <= sequence.pending);
  const int64_t committed = kv_.CommittedLength(sequence);
  // The pending positions are the sequence's alone, so they go without a split.
  if (n < sequence.pending) {
    kv_.tree.hidden().Unhide(index);
    sequence.last = kv_.tree.Pop(sequence.last, committed + n);
  }
  sequence.reserved = sequence.pending = 0;
  sequence.receive = 0;
  if (n > 0) {
    windows_.SlideTo(index);
  } else {
    windows_.UpdateHidden(index);
  }
  windows_.FreeHidden();
}

void KVReceiver::End(int32_t index) noexcept {
  receiver_->receives().EndOf(kv_.control[index].id);
  Keep(index, 0);
}

Status KVReceiver::CheckInvariants() const {
  const PendingReceives& receives = receiver_->receives();
  int64_t pending = 0;
  for (const Sequence& sequence : kv_.control.table().entries()) {
    if (sequence.pending == 0) continue;
    ++pending;
    const auto claim = receives.Find("CheckInvariants", sequence.receive);
    if (claim.ok() && claim->seq_id == sequence.id && claim->count == sequence.pending) continue;
    return Status(StatusCode::kInternal, "invariant violated: the pending tokens of sequence " +
                                             std::to_string(sequence.id) +
                                             " are of no reservation");
  }
  if (pending == receives.count()) return Status();
  return Status(StatusCode::kInternal, "invariant violated: " + std::to_string(receives.count()) +
                                           " reservations, " + std::to_string(pending) +
                                           " sequences have pending tokens");
}

}  // namespace quire
