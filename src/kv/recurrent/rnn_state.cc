#include "kv/recurrent/rnn_state.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>
#include <string>

#include "base/check.h"
#include "kv/pages/page_storage.h"
#include "kv/plan/memory_overlap.h"
#include "tensor/checked_size.h"

namespace quire {
namespace {

// A slot is counted by int32 and its bytes by size_t; beyond this no machine has the memory.
constexpr int64_t kStateBytesMax = int64_t{1} << 46;

// States begin at multiples of a cache line.
constexpr size_t kStateAlignment = 64;

Status BadStateOption(const std::string& what) {
  return Status(StatusCode::kBadArgument, "RNNStateOptions: " + what);
}

Status CheckAtLeast(const char* name, int64_t value, int64_t least) {
  if (value >= least && value <= std::numeric_limits<int32_t>::max()) return Status();
  return BadStateOption(std::string(name) + " is " + std::to_string(value) +
                        "; it must be at least " + std::to_string(least) + " and below 2^31");
}

Result<int64_t> ElementCount(const RNNStateSpec& spec, size_t state) {
  const std::string name = "states[" + std::to_string(state) + "]";
  if (spec.shape.size() > static_cast<size_t>(TensorView::kMaxRank) - 1) {
    return BadStateOption(name + " has " + std::to_string(spec.shape.size()) +
                          " dimensions; at most " + std::to_string(TensorView::kMaxRank - 1));
  }
  int64_t count = 1;
  for (const int64_t dim : spec.shape) {
    if (dim < 1 || dim > kStateBytesMax / count) {
      return BadStateOption(name + " has a dimension of " + std::to_string(dim) +
                            "; dimensions are at least 1 and their product below 2^46");
    }
    count *= dim;
  }
  return count;
}

Status CheckInitial(const RNNStateSpec& spec, size_t state) {
  if (spec.initial.data() == nullptr) return Status();
  const bool fits = spec.initial.dtype() == spec.dtype && spec.initial.is_contiguous() &&
                    std::ranges::equal(spec.initial.shape(), spec.shape);
  if (fits) return Status();
  return BadStateOption("states[" + std::to_string(state) + "].initial is " +
                        spec.initial.ToString() +
                        "; it must be contiguous, of the state's shape and dtype");
}

Status CheckOptions(const RNNStateOptions& options) {
  QUIRE_RETURN_IF_ERROR(CheckAtLeast("num_layers", options.num_layers, 1));
  QUIRE_RETURN_IF_ERROR(CheckAtLeast("max_num_sequences", options.max_num_sequences, 1));
  QUIRE_RETURN_IF_ERROR(CheckAtLeast("max_history", options.max_history, 1));
  QUIRE_RETURN_IF_ERROR(CheckAtLeast("max_checkpoints", options.max_checkpoints, 0));
  QUIRE_RETURN_IF_ERROR(CheckAtLeast("max_retained_slots", options.max_retained_slots, 0));
  QUIRE_RETURN_IF_ERROR(CheckAtLeast("max_tree_size", options.max_tree_size, 1));
  QUIRE_RETURN_IF_ERROR(CheckAtLeast("max_tree_slots", options.max_tree_slots, 0));
  if (options.states.empty()) return BadStateOption("states is empty; give at least one state");
  return Status();
}

// An upper bound in double: the exact count may not fit into an int64.
Status CheckSlotCount(const RNNStateOptions& options, size_t slot_bytes) {
  const double per_sequence = static_cast<double>(options.max_history) +
                              2.0 * static_cast<double>(options.max_checkpoints) + 1;
  const double slots = static_cast<double>(options.max_num_sequences) * per_sequence +
                       static_cast<double>(options.max_retained_slots) +
                       static_cast<double>(options.max_tree_slots);
  const double bytes = slots * static_cast<double>(slot_bytes);
  if (slots < std::numeric_limits<int32_t>::max() && bytes < static_cast<double>(kStateBytesMax))
    return Status();
  return BadStateOption(
      "max_num_sequences, max_history, max_checkpoints, max_retained_slots and max_tree_slots ask "
      "for " +
      std::to_string(slots) + " states of " + std::to_string(slot_bytes) + " bytes");
}

}  // namespace

Result<std::unique_ptr<RNNState>> RNNState::Create(const RNNStateOptions& options) {
  return SlottedRNNState::Create(options);
}

Result<std::unique_ptr<RNNState>> SlottedRNNState::Create(const RNNStateOptions& options) {
  return GuardEntry([&]() -> Result<std::unique_ptr<RNNState>> {
    QUIRE_RETURN_IF_ERROR(CheckOptions(options));
    std::vector<StateLayout> layouts;
    size_t slot_bytes = 0;
    for (size_t s = 0; s < options.states.size(); ++s) {
      const RNNStateSpec& spec = options.states[s];
      QUIRE_ASSIGN_OR_RETURN(const int64_t count, ElementCount(spec, s));
      QUIRE_RETURN_IF_ERROR(CheckInitial(spec, s));
      StateLayout layout;
      layout.bytes = static_cast<size_t>(count * DTypeBytes(spec.dtype));
      layout.offset = slot_bytes;
      const size_t aligned =
          (layout.bytes + kStateAlignment - 1) / kStateAlignment * kStateAlignment;
      const std::optional<int64_t> of_layers =
          CheckedProduct({static_cast<int64_t>(aligned), options.num_layers});
      if (!of_layers) {
        return BadStateOption("num_layers is " + std::to_string(options.num_layers) +
                              "; with states[" + std::to_string(s) + "] of " +
                              std::to_string(layout.bytes) +
                              " bytes a slot would have more than 2^60 bytes");
      }
      slot_bytes += static_cast<size_t>(*of_layers);
      QUIRE_RETURN_IF_ERROR(CheckSlotCount(options, slot_bytes));
      layouts.push_back(std::move(layout));
    }
    const StateHistoryOptions history{
        .max_num_sequences = options.max_num_sequences,
        .max_retained_slots = options.max_retained_slots,
        .max_tree_size = options.max_tree_size,
        .max_tree_slots = options.max_tree_slots,
        .keep = {.history = options.max_history, .thinned = options.max_checkpoints}};
    const size_t bytes = static_cast<size_t>(StateSlotCount(history)) * slot_bytes;
    // First: it refuses sizes of which the initial states alone would be too much.
    QUIRE_ASSIGN_OR_RETURN(HostMemory storage, HostMemory::Allocate(bytes));
    for (size_t s = 0; s < layouts.size(); ++s) {
      const TensorView& initial = options.states[s].initial;
      layouts[s].initial = std::make_unique<std::byte[]>(layouts[s].bytes);
      if (initial.data() != nullptr)
        std::memcpy(layouts[s].initial.get(), initial.data(), layouts[s].bytes);
    }
    return std::unique_ptr<RNNState>(
        new SlottedRNNState(options, history, std::move(layouts), slot_bytes, std::move(storage)));
  });
}

namespace {

RNNStateOptions WithoutInitialData(RNNStateOptions options) {
  for (RNNStateSpec& spec : options.states) spec.initial = TensorView();
  return options;
}

}  // namespace

SlottedRNNState::SlottedRNNState(const RNNStateOptions& options, const StateHistoryOptions& history,
                                 std::vector<StateLayout> layouts, size_t slot_bytes,
                                 HostMemory storage)
    : RecurrentBase(history),
      options_(WithoutInitialData(options)),
      layouts_(std::move(layouts)),
      slot_bytes_(slot_bytes),
      storage_(std::move(storage)),
      is_set_(
          static_cast<size_t>(StateSlotCount(history) * options.num_layers) * options.states.size(),
          0) {
  history_.slots().set_listener(this);
  if (options_.poison_freed_slots) std::memset(storage_.data(), kPoisonByte, storage_.size());
}

void SlottedRNNState::OnSlotFreed(int32_t slot) noexcept {
  const size_t per_slot = static_cast<size_t>(options_.num_layers) * layouts_.size();
  QUIRE_DCHECK(slot >= 0 && (static_cast<size_t>(slot) + 1) * per_slot <= is_set_.size());
  std::memset(is_set_.data() + static_cast<size_t>(slot) * per_slot, 0, per_slot);
  if (!options_.poison_freed_slots) return;
  std::memset(storage_.data() + static_cast<size_t>(slot) * slot_bytes_, kPoisonByte, slot_bytes_);
}

void SlottedRNNState::AppendFacts(std::vector<int64_t>& facts) const {
  for (const StateMember& member : history_.members()) {
    if (!history_.in_forward()) break;
    const auto add = [&](int32_t slot) {
      for (int64_t layer = 0; layer < options_.num_layers; ++layer) {
        for (size_t s = 0; s < layouts_.size(); ++s)
          facts.push_back(IsSet(slot, layer, static_cast<int64_t>(s)));
      }
    };
    for (const StateRecord& record : member.pending) add(record.slot);
    for (int64_t i = 0; member.is_tree && i < member.row_count; ++i)
      add(history_.batch().SlotOfRow(member.first_row + i));
  }
}

// ---------------------------------------------------------------------- control

Status SlottedRNNState::PlanCall(const ControlCall& call) {
  if (call.kind == ControlCall::Kind::kEnd && history_.in_forward()) {
    QUIRE_RETURN_IF_ERROR(CheckAllSet());
  }
  if (call.kind == ControlCall::Kind::kImport) return PlanImport(call);
  return history_.Plan(call);
}

Status SlottedRNNState::PlanImport(const ControlCall& call) {
  const int64_t count = static_cast<int64_t>(call.states.size());
  if (count != options_.num_layers * state_count()) {
    return Status(StatusCode::kBadArgument, std::string(call.name()) + ": " +
                                                std::to_string(count) + " states; there are " +
                                                std::to_string(options_.num_layers) +
                                                " layers of " + std::to_string(state_count()));
  }
  for (int64_t i = 0; i < count; ++i) {
    QUIRE_RETURN_IF_ERROR(
        CheckTensor(call.name(), i % state_count(), -1, call.states[static_cast<size_t>(i)]));
  }
  QUIRE_RETURN_IF_ERROR(history_.Plan(call));
  for (int64_t i = 0; i < count; ++i) {
    Store(history_.import_slot(), i / state_count(), i % state_count(),
          call.states[static_cast<size_t>(i)].data_as<std::byte>());
  }
  return Status();
}

Status SlottedRNNState::CheckAllSet() const {
  for (const StateMember& member : history_.members()) {
    for (const StateRecord& record : member.pending) {
      QUIRE_RETURN_IF_ERROR(
          CheckSlotSet(member, record.slot, "at position " + std::to_string(record.position)));
    }
    for (int64_t row = member.first_row;
         member.is_tree && row < member.first_row + member.row_count; ++row) {
      QUIRE_RETURN_IF_ERROR(
          CheckSlotSet(member, history_.batch().SlotOfRow(row),
                       "at node " + std::to_string(history_.batch().NodeOfRow(member, row))));
    }
  }
  return Status();
}

Status SlottedRNNState::CheckSlotSet(const StateMember& member, int32_t slot,
                                     const std::string& where) const {
  for (int64_t layer = 0; layer < options_.num_layers; ++layer) {
    for (size_t s = 0; s < layouts_.size(); ++s) {
      if (IsSet(slot, layer, static_cast<int64_t>(s)) != 0) continue;
      return Status(StatusCode::kBadState, "EndForward: state " + std::to_string(s) + " of layer " +
                                               std::to_string(layer) + " of sequence " +
                                               std::to_string(history_.table()[member.index].id) +
                                               " was not set " + where +
                                               "; set every one, or call AbortForward");
    }
  }
  return Status();
}

// ---------------------------------------------------------------------- bytes

std::byte* SlottedRNNState::StateIn(int32_t slot, int64_t layer, int64_t state) const {
  QUIRE_DCHECK(slot >= 0 && slot < history_.slots().slot_count());
  QUIRE_DCHECK(layer >= 0 && layer < options_.num_layers);
  const StateLayout& layout = layouts_[static_cast<size_t>(state)];
  const size_t stride = (layout.bytes + kStateAlignment - 1) / kStateAlignment * kStateAlignment;
  return storage_.data() + static_cast<size_t>(slot) * slot_bytes_ + layout.offset +
         static_cast<size_t>(layer) * stride;
}

const std::byte* SlottedRNNState::StateOrInitial(int32_t slot, int64_t layer, int64_t state) const {
  if (slot < 0) return layouts_[static_cast<size_t>(state)].initial.get();
  return StateIn(slot, layer, state);
}

uint8_t& SlottedRNNState::IsSet(int32_t slot, int64_t layer, int64_t state) {
  QUIRE_DCHECK(slot >= 0) << "the initial state needs no Set";
  return is_set_[(static_cast<size_t>(slot) * static_cast<size_t>(options_.num_layers) +
                  static_cast<size_t>(layer)) *
                     layouts_.size() +
                 static_cast<size_t>(state)];
}

uint8_t SlottedRNNState::IsSet(int32_t slot, int64_t layer, int64_t state) const {
  return const_cast<SlottedRNNState*>(this)->IsSet(slot, layer, state);  // NOLINT: only read
}

void SlottedRNNState::Store(int32_t slot, int64_t layer, int64_t state,
                            const std::byte* from) noexcept {
  std::memcpy(StateIn(slot, layer, state), from, BytesOf(state));
  IsSet(slot, layer, state) = 1;
}

namespace {

// Row i of a tensor that is contiguous but for its first axis.
std::byte* RowOf(const TensorView& tensor, int64_t i) {
  QUIRE_DCHECK(i >= 0 && i < tensor.dim(0));
  return tensor.data_as<std::byte>() + i * tensor.stride(0) * DTypeBytes(tensor.dtype());
}

bool RowsAreContiguous(const TensorView& tensor) {
  int64_t stride = 1;
  for (int axis = tensor.rank(); axis-- > 1;) {
    if (tensor.dim(axis) != 1 && tensor.stride(axis) != stride) return false;
    stride *= tensor.dim(axis);
  }
  return true;
}

}  // namespace

// ---------------------------------------------------------------------- Get and Set

Status SlottedRNNState::CheckState(const char* call, int64_t layer, int64_t state) const {
  if (layer >= 0 && layer < options_.num_layers && state >= 0 && state < state_count())
    return Status();
  return Status(StatusCode::kBadArgument,
                std::string(call) + ": no state " + std::to_string(state) + " of layer " +
                    std::to_string(layer) + "; there are " + std::to_string(options_.num_layers) +
                    " layers of " + std::to_string(state_count()) + " states");
}

Status SlottedRNNState::CheckTensor(const char* call, int64_t state, int64_t count,
                                    const TensorView& tensor) const {
  const RNNStateSpec& spec = options_.states[static_cast<size_t>(state)];
  std::vector<int64_t> shape = spec.shape;
  if (count >= 0) shape.insert(shape.begin(), count);
  const bool contiguous = count >= 0 ? RowsAreContiguous(tensor) : tensor.is_contiguous();
  if (tensor.data() != nullptr && tensor.dtype() == spec.dtype && contiguous &&
      std::ranges::equal(tensor.shape(), shape)) {
    return Status();
  }
  const TensorView wanted(nullptr, spec.dtype, std::span<const int64_t>(shape));
  return Status(StatusCode::kBadArgument,
                std::string(call) + ": the tensor is " + tensor.ToString() + "; state " +
                    std::to_string(state) + " wants " + wanted.ToString() +
                    (count >= 0 ? ", contiguous but for its first axis" : ", contiguous"));
}

Status SlottedRNNState::CheckRows(const char* call, std::span<const int64_t> rows) const {
  for (const int64_t row : rows) {
    if (row >= 0 && row < history_.row_count()) continue;
    return Status(StatusCode::kBadArgument, std::string(call) + ": no row " + std::to_string(row) +
                                                " in a forward of " +
                                                std::to_string(history_.row_count()) + " tokens");
  }
  return Status();
}

Status SlottedRNNState::Get(int64_t layer, int64_t state, const TensorView& o) {
  return Enter("Get", [&]() -> Status {
    QUIRE_RETURN_IF_ERROR(history_.RequireForward("Get"));
    QUIRE_RETURN_IF_ERROR(CheckState("Get", layer, state));
    const auto members = history_.members();
    QUIRE_RETURN_IF_ERROR(CheckTensor("Get", state, static_cast<int64_t>(members.size()), o));
    QUIRE_RETURN_IF_ERROR(CheckOutputs({.name = "Get", .layer = layer}, {{"o", &o}}, {}, -1));
    // In a tree forward no state is the one after the forward: nothing is pending.
    const bool sees_set =
        options_.tvm_rnn_history1 && options_.max_history == 1 && !history_.batch().is_tree();
    for (size_t m = 0; m < members.size(); ++m) {
      int32_t slot = members[m].current;
      if (sees_set && IsSet(members[m].pending.back().slot, layer, state) != 0)
        slot = members[m].pending.back().slot;
      std::memcpy(RowOf(o, static_cast<int64_t>(m)), StateOrInitial(slot, layer, state),
                  BytesOf(state));
    }
    return Status();
  });
}

Status SlottedRNNState::Set(int64_t layer, int64_t state, const TensorView& data) {
  return Enter("Set", [&]() -> Status {
    QUIRE_RETURN_IF_ERROR(history_.RequireForward("Set"));
    QUIRE_RETURN_IF_ERROR(CheckState("Set", layer, state));
    if (history_.batch().is_tree()) {
      return Status(StatusCode::kBadState,
                    "Set: this is a forward of token trees, which have no one end; give the state "
                    "of each row to SetAt");
    }
    const auto members = history_.members();
    QUIRE_RETURN_IF_ERROR(CheckTensor("Set", state, static_cast<int64_t>(members.size()), data));
    for (size_t m = 0; m < members.size(); ++m) {
      QUIRE_DCHECK(!members[m].pending.empty()) << "a member has no state at its end";
      Store(members[m].pending.back().slot, layer, state, RowOf(data, static_cast<int64_t>(m)));
    }
    return Status();
  });
}

Status SlottedRNNState::GetAt(int64_t layer, int64_t state, std::span<const int64_t> rows,
                              const TensorView& o) {
  return Enter("GetAt", [&]() -> Status {
    QUIRE_RETURN_IF_ERROR(history_.RequireForward("GetAt"));
    QUIRE_RETURN_IF_ERROR(CheckState("GetAt", layer, state));
    QUIRE_RETURN_IF_ERROR(CheckRows("GetAt", rows));
    QUIRE_RETURN_IF_ERROR(CheckTensor("GetAt", state, static_cast<int64_t>(rows.size()), o));
    QUIRE_RETURN_IF_ERROR(CheckOutputs({.name = "GetAt", .layer = layer}, {{"o", &o}}, {}, -1));
    for (const int64_t row : rows) {
      const int32_t slot = history_.batch().SlotOfRow(row);
      if (slot >= 0 && IsSet(slot, layer, state) != 0) continue;
      return Status(StatusCode::kBadState, "GetAt: state " + std::to_string(state) + " of layer " +
                                               std::to_string(layer) + " was not set at row " +
                                               std::to_string(row));
    }
    for (size_t i = 0; i < rows.size(); ++i) {
      const int32_t slot = history_.batch().SlotOfRow(rows[i]);
      std::memcpy(RowOf(o, static_cast<int64_t>(i)), StateIn(slot, layer, state), BytesOf(state));
    }
    return Status();
  });
}

Status SlottedRNNState::GetBefore(int64_t layer, int64_t state, std::span<const int64_t> rows,
                                  const TensorView& o) {
  return Enter("GetBefore", [&]() -> Status {
    QUIRE_RETURN_IF_ERROR(history_.RequireForward("GetBefore"));
    QUIRE_RETURN_IF_ERROR(CheckState("GetBefore", layer, state));
    QUIRE_RETURN_IF_ERROR(CheckRows("GetBefore", rows));
    QUIRE_RETURN_IF_ERROR(CheckTensor("GetBefore", state, static_cast<int64_t>(rows.size()), o));
    QUIRE_RETURN_IF_ERROR(CheckOutputs({.name = "GetBefore", .layer = layer}, {{"o", &o}}, {}, -1));
    bool is_known = false;
    for (const int64_t row : rows) {
      const int32_t slot = history_.batch().SlotBeforeRow(row, &is_known);
      if (is_known && (slot < 0 || IsSet(slot, layer, state) != 0)) continue;
      return Status(StatusCode::kBadState, "GetBefore: state " + std::to_string(state) +
                                               " of layer " + std::to_string(layer) +
                                               " was not set at the token before row " +
                                               std::to_string(row));
    }
    for (size_t i = 0; i < rows.size(); ++i) {
      const int32_t slot = history_.batch().SlotBeforeRow(rows[i], &is_known);
      std::memcpy(RowOf(o, static_cast<int64_t>(i)), StateOrInitial(slot, layer, state),
                  BytesOf(state));
    }
    return Status();
  });
}

Status SlottedRNNState::CheckRoomForRows(std::span<const int64_t> rows) const {
  std::vector<int64_t> sorted(rows.begin(), rows.end());
  std::sort(sorted.begin(), sorted.end());
  std::vector<int64_t> added(history_.members().size(), 0);
  for (size_t i = 0; i < sorted.size(); ++i) {
    if (i > 0 && sorted[i] == sorted[i - 1]) {
      return Status(StatusCode::kBadArgument,
                    "SetAt: row " + std::to_string(sorted[i]) + " is given twice");
    }
    if (history_.batch().SlotOfRow(sorted[i]) >= 0) continue;
    const StateBatch::RowPlace place = history_.batch().FindRow(sorted[i]);
    if (++added[place.member] <= history_.batch().CheckpointRoom(place.member)) continue;
    const int64_t id = history_.table()[history_.members()[place.member].index].id;
    return Status(StatusCode::kTooLarge, "SetAt: row " + std::to_string(sorted[i]) +
                                             " would be one checkpoint of sequence " +
                                             std::to_string(id) + " more than max_checkpoints, " +
                                             std::to_string(options_.max_checkpoints));
  }
  return Status();
}

Status SlottedRNNState::SetAt(int64_t layer, int64_t state, std::span<const int64_t> rows,
                              const TensorView& data) {
  return Enter("SetAt", [&]() -> Status {
    QUIRE_RETURN_IF_ERROR(history_.RequireForward("SetAt"));
    QUIRE_RETURN_IF_ERROR(CheckState("SetAt", layer, state));
    QUIRE_RETURN_IF_ERROR(CheckRows("SetAt", rows));
    QUIRE_RETURN_IF_ERROR(CheckTensor("SetAt", state, static_cast<int64_t>(rows.size()), data));
    QUIRE_RETURN_IF_ERROR(CheckRoomForRows(rows));
    for (size_t i = 0; i < rows.size(); ++i) {
      int32_t slot = history_.batch().SlotOfRow(rows[i]);
      if (slot < 0) {
        const auto lock = gate_.Lock();
        slot = history_.batch().AddCheckpoint(history_.batch().FindRow(rows[i]));
      }
      Store(slot, layer, state, RowOf(data, static_cast<int64_t>(i)));
    }
    return Status();
  });
}

Status SlottedRNNState::DebugGet(int64_t layer, int64_t state, int64_t seq_id,
                                 const TensorView& o) {
  return Enter("DebugGet", [&]() -> Status {
    QUIRE_RETURN_IF_ERROR(CheckState("DebugGet", layer, state));
    QUIRE_ASSIGN_OR_RETURN(const int32_t index, history_.Find("DebugGet", seq_id));
    QUIRE_RETURN_IF_ERROR(CheckTensor("DebugGet", state, -1, o));
    const std::vector<StateRecord>& records = history_.track(index).records;
    std::memcpy(o.data(), StateOrInitial(records.empty() ? -1 : records.back().slot, layer, state),
                BytesOf(state));
    return Status();
  });
}

Status SlottedRNNState::ExportState(int64_t tensor, int64_t seq_id, int64_t position,
                                    const TensorView& o) {
  return Enter("ExportState", [&]() -> Status {
    const int64_t layer = tensor / state_count(), state = tensor % state_count();
    QUIRE_RETURN_IF_ERROR(CheckState("ExportState", layer, state));
    QUIRE_ASSIGN_OR_RETURN(const int32_t slot, history_.SlotAt("ExportState", seq_id, position));
    QUIRE_RETURN_IF_ERROR(CheckTensor("ExportState", state, -1, o));
    std::memcpy(o.data(), StateOrInitial(slot, layer, state), BytesOf(state));
    return Status();
  });
}

}  // namespace quire
