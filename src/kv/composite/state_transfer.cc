#include "kv/composite/state_transfer.h"

#include <algorithm>
#include <string>

#include "base/check.h"
#include "base/checksum.h"
#include "base/guard.h"
#include "kv/chunks/kv_sections.h"
#include "kv/control/sequence_control.h"
#include "quire/recurrent_cache.h"

namespace quire {

TensorView TransferredState::StateIn(const void* memory) const {
  return TensorView(const_cast<void*>(memory), dtype, std::span(shape));
}

LayerKV TransferredState::RowIn(std::byte* memory) const {
  LayerKV row;
  row.k = TensorView(memory, dtype, {1, 1, elements()});
  return row;
}

StateTransfer::StateTransfer(const CompositeState::Parts& parts,
                             std::span<PlannedState* const> planned)
    : parts_(parts), planned_(planned) {
  std::string text;
  for (size_t p = 0; p < parts.recurrent.size(); ++p) {
    // Bits of a recurrence are those of the kernel path.
    const auto* const cache = dynamic_cast<const RecurrentCache*>(parts.recurrent[p].get());
    text += "|" + (cache == nullptr ? "" : cache->options().kernel_path);
    int64_t index = 0;
    const Result<std::vector<StateTensor>> tensors = StateTensorsOf(*parts.recurrent[p]);
    QUIRE_CHECK(tensors.ok()) << "CompositeState::Create takes states of this library alone";
    for (const StateTensor& tensor : *tensors) {
      states_.push_back(
          {.part = p, .index = index++, .dtype = tensor.dtype, .shape = tensor.shape});
      text += ";" + std::string(DTypeName(tensor.dtype));
      for (const int64_t dim : tensor.shape) text += "," + std::to_string(dim);
    }
  }
  layout_ = Hash64(text);
}

int64_t StateTransfer::largest_bytes() const {
  int64_t bytes = 0;
  for (const TransferredState& state : states_) bytes = std::max(bytes, state.bytes());
  return bytes;
}

std::vector<TransferLayer> StateTransfer::receive_layers() {
  std::vector<TransferLayer> layers;
  for (const TransferredState& state : states_)
    layers.push_back({.dtype = state.dtype, .elements = state.elements()});
  return layers;
}

template <typename F>
Status StateTransfer::PlanImport(PlannedParts& parts, int64_t seq_id, int64_t position,
                                 F&& state_in) const {
  std::vector<TensorView> states;
  for (size_t i = 0; i < states_.size(); ++i) states.push_back(states_[i].StateIn(state_in(i)));
  ControlCall call{.kind = ControlCall::Kind::kImport, .seq_id = seq_id, .count = position};
  size_t next = 0;
  return parts.Plan([&](size_t part) {
    const size_t begin = next;
    while (next < states_.size() && states_[next].part == part) ++next;
    QUIRE_DCHECK(next == states_.size() || states_[next].part > part) << "states are by parts";
    call.states = std::span(states).subspan(begin, next - begin);
    return call;
  });
}

// What would refuse the import refuses the reservation.
Result<ReservePlan> StateTransfer::PlanReserve(const char* call, int64_t seq_id, int64_t count) {
  QUIRE_DCHECK(!planned_.empty());
  QUIRE_DCHECK(!import_.has_value()) << "a commit is planned";
  QUIRE_ASSIGN_OR_RETURN(const int64_t length, parts_.recurrent.front()->GetSequenceLength(seq_id));
  QUIRE_RETURN_IF_ERROR(CheckReceiveCount(call, seq_id, length, count));
  const std::vector<std::byte> zeros(static_cast<size_t>(largest_bytes()));
  PlannedParts tried(planned_);
  QUIRE_RETURN_IF_ERROR(
      PlanImport(tried, seq_id, length + count, [&](size_t) { return zeros.data(); }));
  return ReservePlan{.first_position = length, .layout = layout_};
}

Status StateTransfer::PlanTake(const char* /*call*/, const ReceiveShare& share, int64_t n) {
  QUIRE_DCHECK(share.layers.size() == states_.size());
  QUIRE_DCHECK(!import_.has_value()) << "a commit is planned already";
  if (n == 0) return Status();
  import_.emplace(planned_);
  Status planned = GuardEntry([&] {
    return PlanImport(*import_, share.seq_id, share.first_position + n,
                      [&](size_t i) { return share.layers[i].state.data(); });
  });
  if (!planned.ok()) import_.reset();
  return planned;
}

void StateTransfer::CommitTake() noexcept {
  if (import_.has_value()) import_->Commit();
  import_.reset();
}

int64_t StateTransfer::SendableLength(int64_t seq_id) const {
  const RecurrentState& first = *parts_.recurrent.front();
  const Result<int64_t> nodes = first.GetTreeSize(seq_id);
  const Result<int64_t> length = first.GetSequenceLength(seq_id);
  return nodes.ok() && length.ok() && *nodes == 0 ? *length : 0;
}

Status StateTransfer::Send(SendMark* mark, int64_t /*begin*/, int64_t end) {
  QUIRE_CHECK(sender_ != nullptr) << "no sender has marked what is sent";
  if (!sender_->IsStored(*mark, end - 1)) return Status();
  for (size_t i = 0; i < states_.size(); ++i) {
    const TransferredState& state = states_[i];
    const auto memory = sender_->TakeMemory(state.bytes());
    const Status status = parts_.recurrent[state.part]->ExportState(state.index, mark->seq_id, end,
                                                                    state.StateIn(memory.get()));
    if (status.code() == StatusCode::kNeedsReplay) {
      return Status(status.code(), OfSequence("the mark", mark->seq_id) + "went past position " +
                                       std::to_string(end) +
                                       ", the map's end, within a forward, and holds no state "
                                       "there; end a forward there");
    }
    QUIRE_RETURN_IF_ERROR(status);
    const int64_t layer = first_layer_ + static_cast<int64_t>(i);
    QUIRE_RETURN_IF_ERROR(
        sender_->Give(mark, layer, end - 1, {.rows = state.RowIn(memory.get()), .memory = memory}));
  }
  return Status();
}

}  // namespace quire
