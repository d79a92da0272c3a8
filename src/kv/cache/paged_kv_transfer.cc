// Receiving tokens: the control calls of KVTransfer, and what a received row does to pages.
#include <algorithm>
#include <cstring>
#include <string>

#include "base/checksum.h"
#include "kv/cache/paged_kv_cache.h"
#include "quire/chunk.h"

namespace quire {
namespace {

// Room for EncodeSlots of so many segments.
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

}  // namespace

uint64_t PagedKVCache::TransferLayout(const Sequence& sequence) const {
  std::string text = options_.kernel_path;
  for (const AttentionLayerSpec& layer : options_.layers) {
    text += "|" + std::string(DTypeName(layer.dtype)) + "," +
            std::string(DTypeName(layer.value_dtype())) + "," + std::to_string(layer.qk_head_dim) +
            "," + std::to_string(layer.v_head_dim) + (layer.latent ? ",latent," : ",") +
            RopePassport(layer.rope ? *layer.rope : options_.rope, sequence.long_factors);
  }
  return Hash64(text);
}

Status PagedKVCache::CheckReceiver(const char* call, int32_t index, int64_t count) const {
  QUIRE_RETURN_IF_ERROR(RequireCommitted(call, index));
  QUIRE_RETURN_IF_ERROR(control_.RequireActive(call, index));
  const Sequence& sequence = control_[index];
  return CheckReceiveCount(call, sequence.id, tree_.End(sequence.last), count);
}

Result<ReceiveMap> PagedKVCache::DisaggPrepareRecv(int64_t seq_id, int64_t count) {
  const char* call = "DisaggPrepareRecv";
  return gate_.EnterAlone(call, [&]() -> Result<ReceiveMap> {
    QUIRE_RETURN_IF_ERROR(control_.RequireIdle(call));
    QUIRE_ASSIGN_OR_RETURN(const int32_t index, control_.Find(call, seq_id));
    QUIRE_RETURN_IF_ERROR(CheckReceiver(call, index, count));
    Sequence& sequence = control_[index];
    ForwardPlan plan;
    plan.StartBatch(1, groups_.size());
    QUIRE_RETURN_IF_ERROR(PlanImport(call, sequence, count, FirstPage::kOwn, &plan));
    auto receive = receives_.Prepare(seq_id, count, groups_.size());
    TokenSlots tiles;
    tiles.targets.reserve(static_cast<size_t>(count));
    tiles.opens_tile.reserve(static_cast<size_t>(count));
    ReceiveMap map;
    map.first_position = tree_.End(sequence.last);
    map.count = count;
    map.layout = TransferLayout(sequence);
    const PagePool& pool = tree_.pool(0);
    const bool pages_are_slots = groups_.size() == 1;
    ReserveSlots(map.slots, pages_are_slots
                                ? pool.RangeCount(map.first_position, map.first_position + count)
                                : 1);
    for (const AttentionLayerSpec& layer : options_.layers)
      map.kv_heads.push_back(layer.num_kv_heads);

    CommitImport(index, &plan);
    for (size_t g = 0; g < groups_.size(); ++g) {
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
    UpdateHidden(index);
    FreeHidden();
    return map;
  });
}

// Zeroes the first slot of every tile, and with it what else a tile must have zero.
void PagedKVCache::OpenTiles(PendingReceives::Receive& receive, TokenSlots* tiles) noexcept {
  for (size_t g = 0; g < groups_.size(); ++g) {
    tiles->targets.clear();
    for (size_t i = 0; i < receive.slots[g].targets.size(); ++i) {
      const AppendTarget target = receive.slots[g].targets[i];
      if (i == 0 || target.slot % kTilePositions == 0) tiles->targets.push_back(target);
    }
    const size_t count = tiles->targets.size();
    tiles->opens_tile.assign(count, 1);
    for (const int64_t layer : groups_[g].layers) {
      const LayerKV rows = RowsOf(receive.layers[static_cast<size_t>(layer)].staging, 0,
                                  static_cast<int64_t>(count));
      for (const TensorView* tensor : {&rows.k, &rows.v, &rows.k_scale, &rows.v_scale}) {
        if (tensor->rank() == 0) continue;
        std::memset(tensor->data(), 0,
                    static_cast<size_t>(tensor->element_count() * DTypeBytes(tensor->dtype())));
      }
      StoreImport(*tiles, layer, 0, rows, {0, rows.k.dim(0)}, *options_.runner);
    }
  }
}

void PagedKVCache::StoreReceived(const TokenSlots& slots, int64_t layer, int64_t first,
                                 const LayerKV& rows) noexcept {
  StoreImport(slots, layer, first, rows, {0, rows.k.dim(0)}, *receive_runner_);
}

void PagedKVCache::EndReceive(int32_t index, int64_t n) noexcept {
  Sequence& sequence = control_[index];
  receives_.End(sequence.receive);  // from here on nobody writes to the pages
  const int64_t committed = CommittedLength(sequence);
  // The pending positions are the sequence's alone, so they go without a split.
  if (n < sequence.pending) {
    tree_.Unhide(index);
    sequence.last = tree_.Pop(sequence.last, committed + n);
  }
  sequence.reserved = sequence.pending = 0;
  sequence.receive = 0;
  if (n > 0) {
    SlideTo(index);
  } else {
    UpdateHidden(index);
  }
  FreeHidden();
}

Status PagedKVCache::DisaggCommitRecv(uint64_t epoch, int64_t n) {
  const char* call = "DisaggCommitRecv";
  return gate_.EnterAlone(call, [&]() -> Status {
    QUIRE_RETURN_IF_ERROR(receives_.RequireComplete(call, epoch, n));
    QUIRE_ASSIGN_OR_RETURN(const PendingReceives::Claim claim, receives_.Find(call, epoch));
    EndReceive(control_.table().Find(claim.seq_id), n);
    return Status();
  });
}

Status PagedKVCache::DisaggCancelRecv(uint64_t epoch) {
  const char* call = "DisaggCancelRecv";
  return gate_.EnterAlone(call, [&]() -> Status {
    QUIRE_ASSIGN_OR_RETURN(const PendingReceives::Claim claim, receives_.Find(call, epoch));
    EndReceive(control_.table().Find(claim.seq_id), 0);
    return Status();
  });
}

Status PagedKVCache::CheckReceives() const {
  int64_t pending = 0;
  for (const Sequence& sequence : control_.table().entries()) {
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

// ---------------------------------------------------------------------- any thread

Result<ReceiveView> PagedKVCache::View(uint64_t epoch, int64_t layer, const ReceivePart& part) {
  return GuardEntry([&] { return receives_.View(epoch, layer, part); });
}

Status PagedKVCache::Complete(uint64_t epoch, int64_t layer, const ReceivePart& part,
                              uint32_t digest) {
  return GuardEntry([&] { return receives_.Complete(epoch, layer, part, digest); });
}

Status PagedKVCache::FailReceive(uint64_t epoch, const Status& why) {
  return GuardEntry([&] { return receives_.Fail(epoch, why); });
}

Result<ReceiveProgress> PagedKVCache::GetReceiveProgress(uint64_t epoch) const {
  return GuardEntry([&] { return receives_.Progress(epoch); });
}

Status PagedKVCache::WaitReceived(uint64_t epoch, int64_t n, Clock& clock, int64_t until_ns) const {
  return GuardEntry([&] { return receives_.Wait(epoch, n, clock, until_ns); });
}

}  // namespace quire
