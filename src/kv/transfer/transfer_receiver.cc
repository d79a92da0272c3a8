#include "kv/transfer/transfer_receiver.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/check.h"
#include "kv/control/control_call.h"
#include "kv/control/sequence_control.h"

namespace quire {
namespace {

// The slots of one group, as runs.
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

// ---------------------------------------------------------------------- parts

std::vector<TransferReceiver::Receiving> TransferReceiver::PlanOrder(
    std::span<ReceivingPart* const> parts) {
  std::vector<Receiving> receiving;
  Receiving next;
  for (ReceivingPart* const part : parts) {
    next.part = part;
    next.first_layer += std::exchange(next.layer_count, part->receive_layers().size());
    next.first_group += std::exchange(next.group_count, part->receive_groups());
    receiving.push_back(next);
  }
  std::ranges::reverse(receiving);
  return receiving;
}

std::vector<TransferLayer> TransferReceiver::LayersOf(std::span<ReceivingPart* const> parts) {
  std::vector<TransferLayer> layers;
  int group_count = 0;
  for (ReceivingPart* const part : parts) {
    for (TransferLayer layer : part->receive_layers()) {
      QUIRE_DCHECK(layers.empty() || !layers.back().is_state() || layer.is_state())
          << "rows come before states";
      layer.group += group_count;
      layers.push_back(layer);
    }
    group_count += static_cast<int>(part->receive_groups());
  }
  return layers;
}

TransferReceiver::TransferReceiver(std::span<ReceivingPart* const> parts)
    : parts_(PlanOrder(parts)), receives_(LayersOf(parts)) {
  for (Receiving& of : parts_) {
    planned_.push_back(&of);
    group_count_ += of.group_count;
  }
}

ReceiveShare TransferReceiver::ShareOf(PendingReceives::Receive& receive, const Receiving& of) {
  return {.epoch = receive.epoch,
          .seq_id = receive.seq_id,
          .first_position = receive.first_position,
          .count = receive.count,
          .layers = std::span(receive.layers).subspan(of.first_layer, of.layer_count),
          .slots = std::span(receive.slots).subspan(of.first_group, of.group_count)};
}

// ---------------------------------------------------------------------- calls

Result<ReceiveMap> TransferReceiver::Prepare(const char* call, int64_t seq_id, int64_t count) {
  if (receives_.PendingOf(seq_id) > 0) {
    return Status(StatusCode::kBadState,
                  OfSequence(call, seq_id) +
                      "has a reservation already; call DisaggCommitRecv or DisaggCancelRecv first");
  }
  PlannedHalves<Receiving> planned(planned_);
  ReceiveMap map;
  map.slots = {1, 0, count};
  map.count = count;
  int64_t page_size = 0;  // of the only group
  std::vector<uint64_t> layouts(parts_.size());
  QUIRE_DCHECK(!parts_.empty());
  QUIRE_RETURN_IF_ERROR(planned.PlanEach([&](size_t p) -> Status {
    QUIRE_ASSIGN_OR_RETURN(const ReservePlan plan,
                           parts_[p].part->PlanReserve(call, seq_id, count));
    QUIRE_DCHECK(p == 0 || plan.first_position == map.first_position) << "parts differ in length";
    map.first_position = plan.first_position;
    layouts[parts_.size() - 1 - p] = plan.layout;
    if (group_count_ != 1 || plan.page_size == 0) return Status();
    page_size = plan.page_size;
    map.slots.reserve(static_cast<size_t>(2 * plan.slot_runs + 1));
    return Status();
  }));
  for (const uint64_t layout : layouts) map.layout = JoinLayouts(map.layout, layout);
  for (const TransferLayer& layer : receives_.layers()) map.kv_heads.push_back(layer.heads());
  const auto receive = receives_.Prepare(seq_id, map.first_position, count, group_count_);
  map.epoch = receive->epoch;
  // A part may be asked as soon as its half is over, and must find the reservation then.
  receives_.Add(receive);
  planned.CommitEach(
      [&](size_t p) { parts_[p].part->CommitReserve(ShareOf(*receive, parts_[p])); });
  if (page_size > 0) EncodeSlots(receive->slots[0].targets, page_size, &map.slots);
  receives_.Open(*receive);
  return map;
}

Status TransferReceiver::Commit(const char* call, uint64_t epoch, int64_t n) {
  QUIRE_ASSIGN_OR_RETURN(PendingReceives::Ending ending, receives_.Take(call, epoch, n));
  PlannedHalves<Receiving> planned(planned_);
  QUIRE_RETURN_IF_ERROR(planned.PlanEach([&](size_t p) {
    return parts_[p].part->PlanTake(call, ShareOf(ending.receive(), parts_[p]), n);
  }));
  // As in Prepare.
  ending.End();
  planned.CommitEach([&](size_t p) { parts_[p].part->CommitTake(); });
  return Status();
}

}  // namespace quire
