#include "kv/cache/kv_receiver.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"

namespace quire {
namespace {

// Room for EncodeSlots of `segments` runs of slots.
void ReserveSlots(std::vector<int64_t>& map, int64_t segments) {
  map.reserve(static_cast<size_t>(2 * segments + 1));
}

void EncodeSlots(std::span<const AppendTarget> targets, int64_t page_size,
                 std::vector<int64_t>* map) noexcept {
  map->assign(1, 0);
  for (const AppendTarget& target : targets) {
    const int64_t slot = target.page * page_size + target.slot;
    if (map->size() > 1 && slot == (*map)[map->size() - 2] + map->back()) {
      ++map->back();
      continue;
    }
    map->push_back(slot);
    map->push_back(1);
    ++map->front();
  }
}

std::vector<TransferLayer> LayersOf(const PagedSequences& kv) {
  std::vector<TransferLayer> layers;
  for (size_t l = 0; l < kv.options.layers.size(); ++l)
    layers.push_back({.rows = &kv.options.layers[l], .group = kv.layer_groups[l]});
  return layers;
}

}  // namespace

KVReceiver::KVReceiver(PagedSequences& kv, KVImporter& importer, WindowBook& windows,
                       std::shared_ptr<ParallelRunner> runner)
    : kv_(kv),
      importer_(importer),
      windows_(windows),
      runner_(std::move(runner)),
      receives_(LayersOf(kv), 0, this) {}

Status KVReceiver::CheckSequence(const char* call, int32_t index, int64_t count) const {
  QUIRE_RETURN_IF_ERROR(kv_.RequireCommitted(call, index));
  QUIRE_RETURN_IF_ERROR(kv_.control.RequireActive(call, index));
  const Sequence& sequence = kv_.control[index];
  return CheckReceiveCount(call, sequence.id, kv_.tree.End(sequence.last), count);
}

Result<ReceiveMap> KVReceiver::Prepare(const char* call, int32_t index, int64_t count) {
  QUIRE_RETURN_IF_ERROR(CheckSequence(call, index, count));
  Sequence& sequence = kv_.control[index];
  ForwardPlan plan;
  plan.StartBatch(1, kv_.groups.size());
  QUIRE_RETURN_IF_ERROR(
      importer_.Reserve(call, sequence, count, KVImporter::FirstPage::kOwn, &plan));
  auto receive =
      receives_.Prepare(sequence.id, kv_.tree.End(sequence.last), count, kv_.groups.size());
  TokenSlots tiles;
  tiles.targets.reserve(static_cast<size_t>(count));
  tiles.opens_tile.reserve(static_cast<size_t>(count));
  ReceiveMap map;
  map.first_position = receive->first_position;
  map.count = count;
  map.layout = kv_.TransferLayout(sequence.long_factors);
  const PagePool& pool = kv_.tree.pool(0);
  const bool pages_are_slots = kv_.groups.size() == 1;
  ReserveSlots(map.slots, pages_are_slots
                              ? pool.RangeCount(map.first_position, map.first_position + count)
                              : 1);
  for (const AttentionLayerSpec& layer : kv_.options.layers)
    map.kv_heads.push_back(layer.num_kv_heads);

  importer_.Commit(index, &plan);
  for (size_t g = 0; g < kv_.groups.size(); ++g) {
    std::ranges::copy(plan.group(static_cast<int>(g)).imports.targets,
                      receive->slots[g].targets.begin());
  }
  OpenTiles(*receive, &tiles);
  if (pages_are_slots) {
    EncodeSlots(receive->slots[0].targets, pool.page_size(), &map.slots);
  } else {
    map.slots = {1, 0, count};
  }
  sequence.reserved = sequence.pending = count;
  sequence.receive = map.epoch = receives_.Add(std::move(receive));
  QUIRE_DCHECK(kv_.CommittedLength(sequence) == map.first_position);
  windows_.UpdateHidden(index);
  windows_.FreeHidden();
  return map;
}

// Zeroes the first slot of every tile, and with it what else a tile must have zero.
void KVReceiver::OpenTiles(PendingReceives::Receive& receive, TokenSlots* tiles) noexcept {
  for (size_t g = 0; g < kv_.groups.size(); ++g) {
    tiles->targets.clear();
    for (size_t i = 0; i < receive.slots[g].targets.size(); ++i) {
      const AppendTarget target = receive.slots[g].targets[i];
      if (i == 0 || target.slot % kTilePositions == 0) tiles->targets.push_back(target);
    }
    const size_t count = tiles->targets.size();
    tiles->opens_tile.assign(count, 1);
    for (const int64_t layer : kv_.groups[g].layers) {
      const LayerKV rows = RowsOf(receive.layers[static_cast<size_t>(layer)].staging, 0,
                                  static_cast<int64_t>(count));
      for (const TensorView* tensor : {&rows.k, &rows.v, &rows.k_scale, &rows.v_scale}) {
        if (tensor->rank() == 0) continue;
        std::memset(tensor->data(), 0,
                    static_cast<size_t>(tensor->element_count() * DTypeBytes(tensor->dtype())));
      }
      importer_.Fill(*tiles, layer, 0, rows, {0, rows.k.dim(0)}, *kv_.options.runner);
    }
  }
}

void KVReceiver::StoreReceived(const TokenSlots& slots, int64_t layer, int64_t first,
                               const LayerKV& rows) noexcept {
  importer_.Fill(slots, layer, first, rows, {0, rows.k.dim(0)}, *runner_);
}

void KVReceiver::End(int32_t index, int64_t n) noexcept {
  Sequence& sequence = kv_.control[index];
  QUIRE_DCHECK(sequence.pending > 0);
  QUIRE_DCHECK(sequence.reserved == sequence.pending);
  QUIRE_DCHECK(n >= 0 && n <= sequence.pending);
  receives_.End(sequence.receive);  // from here on nobody writes to the pages
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

Status KVReceiver::Commit(const char* call, uint64_t epoch, int64_t n) {
  QUIRE_RETURN_IF_ERROR(receives_.RequireComplete(call, epoch, n));
  QUIRE_ASSIGN_OR_RETURN(const PendingReceives::Claim claim, receives_.Find(call, epoch));
  End(kv_.control.table().Find(claim.seq_id), n);
  return Status();
}

Status KVReceiver::Cancel(const char* call, uint64_t epoch) {
  QUIRE_ASSIGN_OR_RETURN(const PendingReceives::Claim claim, receives_.Find(call, epoch));
  End(kv_.control.table().Find(claim.seq_id), 0);
  return Status();
}

Status KVReceiver::CheckInvariants() const {
  int64_t pending = 0;
  for (const Sequence& sequence : kv_.control.table().entries()) {
    if (sequence.pending == 0) continue;
    ++pending;
    const auto claim = receives_.Find("CheckInvariants", sequence.receive);
    if (claim.ok() && claim->seq_id == sequence.id && claim->count == sequence.pending) continue;
    return Status(StatusCode::kInternal, "invariant violated: the pending tokens of sequence " +
                                             std::to_string(sequence.id) +
                                             " are of no reservation");
  }
  if (pending == receives_.count()) return Status();
  return Status(StatusCode::kInternal, "invariant violated: " + std::to_string(receives_.count()) +
                                           " reservations, " + std::to_string(pending) +
                                           " sequences have pending tokens");
}

}  // namespace quire
