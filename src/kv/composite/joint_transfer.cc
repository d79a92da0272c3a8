#include "kv/composite/joint_transfer.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/checksum.h"
#include "kv/control/sequence_control.h"
#include "kv/transfer/pending_receives.h"
#include "quire/recurrent_cache.h"

namespace quire {
namespace {

// Of states in memory: what kernels and vector loads like.
constexpr size_t kAlignment = 64;

std::string Name(uint64_t epoch) { return "epoch " + std::to_string(epoch); }

std::byte* Aligned(std::byte* memory) {
  const auto rest = reinterpret_cast<uintptr_t>(memory) % kAlignment;
  return memory + (kAlignment - rest) % kAlignment;
}

}  // namespace

JointTransfer::JointTransfer(const CompositeState::Parts& parts,
                             std::span<PlannedState* const> planned, const CallGate& gate)
    : parts_(parts),
      planned_(planned),
      gate_(gate),
      attention_(parts.attention == nullptr ? nullptr : parts.attention->transfer()),
      attention_layers_(
          parts.attention == nullptr ? 0 : std::ssize(parts.attention->options().layers)) {
  std::string text;
  offsets_.push_back(0);
  for (size_t p = 0; p < parts.recurrent.size(); ++p) {
    // Bits of a recurrence are those of the kernel path.
    const auto* const cache = dynamic_cast<const RecurrentCache*>(parts.recurrent[p].get());
    text += "|" + (cache == nullptr ? "" : cache->options().kernel_path);
    int64_t index = 0;
    const Result<std::vector<StateTensor>> states = StateTensorsOf(*parts.recurrent[p]);
    QUIRE_CHECK(states.ok()) << "CompositeState::Create takes states of this library alone";
    for (const StateTensor& state : *states) {
      Tensor tensor{.part = p, .index = index++, .dtype = state.dtype, .shape = state.shape};
      tensor.bytes =
          TensorView(nullptr, state.dtype, state.shape).element_count() * DTypeBytes(state.dtype);
      text += ";" + std::string(DTypeName(state.dtype));
      for (const int64_t dim : state.shape) text += "," + std::to_string(dim);
      const size_t end = offsets_.back() + static_cast<size_t>(tensor.bytes);
      offsets_.push_back((end + kAlignment - 1) / kAlignment * kAlignment);
      tensors_.push_back(std::move(tensor));
    }
  }
  layout_ = Hash64(text);
}

// ---------------------------------------------------------------------- states in memory

std::unique_ptr<std::byte[]> JointTransfer::AllocateStates() const {
  return std::unique_ptr<std::byte[]>(new std::byte[offsets_.back() + kAlignment]());
}

TensorView JointTransfer::StateIn(std::byte* memory, size_t tensor) const {
  const Tensor& t = tensors_[tensor];
  return TensorView(Aligned(memory) + offsets_[tensor], t.dtype, std::span(t.shape));
}

LayerKV JointTransfer::RowIn(std::byte* memory, size_t tensor) const {
  const TensorView state = StateIn(memory, tensor);
  LayerKV row;
  row.k = TensorView(state.data(), state.dtype(), {1, 1, state.element_count()});
  return row;
}

std::vector<TensorView> JointTransfer::StatesIn(std::byte* memory) const {
  std::vector<TensorView> states;
  for (size_t t = 0; t < tensors_.size(); ++t) states.push_back(StateIn(memory, t));
  return states;
}

int64_t JointTransfer::LengthOf(int64_t seq_id) const {
  const Result<int64_t> length = first().GetSequenceLength(seq_id);
  return length.ok() ? *length : 0;
}

Status JointTransfer::RequireIdle(const char* call) const {
  return in_forward_ ? ForwardIsOpen(call) : Status();
}

// ---------------------------------------------------------------------- the composite's calls

int64_t JointTransfer::PendingOf(int64_t seq_id) const {
  const std::lock_guard lock(mutex_);
  for (const auto& [epoch, receive] : receives_) {
    if (receive->seq_id == seq_id) return receive->count;
  }
  return 0;
}

Status JointTransfer::Check(const ControlCall& call) const {
  using Kind = ControlCall::Kind;
  const auto refuse = [&](int64_t seq_id) {
    if (PendingOf(seq_id) == 0) return Status();
    return Status(StatusCode::kBadState,
                  OfSequence(call.name(), seq_id) +
                      "waits for tokens of another state; commit them with DisaggCommitRecv, or "
                      "cancel");
  };
  const bool retains = call.kind == Kind::kRetain && call.retained;
  if (retains || call.kind == Kind::kImport) return refuse(call.seq_id);
  if (call.kind != Kind::kBegin && call.kind != Kind::kBeginTree) return Status();
  for (const int64_t id : call.seq_ids) QUIRE_RETURN_IF_ERROR(refuse(id));
  return Status();
}

ControlCall JointTransfer::ForAttention(const ControlCall& call) const {
  ControlCall asked = call;
  const bool is_cut = call.kind == ControlCall::Kind::kPop || call.kind == ControlCall::Kind::kFork;
  const int64_t pending = is_cut ? PendingOf(call.seq_id) : 0;
  if (pending == 0) return asked;
  if (call.kind == ControlCall::Kind::kPop && call.count > 0) asked.count += pending;
  if (call.kind == ControlCall::Kind::kFork && call.count < 0) asked.count = LengthOf(call.seq_id);
  return asked;
}

void JointTransfer::Finish(const ControlCall& call) noexcept {
  using Kind = ControlCall::Kind;
  switch (call.kind) {
    case Kind::kBegin:
    case Kind::kBeginTree:
      in_forward_ = true;
      break;
    case Kind::kEnd:
      in_forward_ = false;
      for (auto& [id, mark] : marks_) SendStates(id, mark);
      break;
    case Kind::kAbort:
      in_forward_ = false;
      break;
    case Kind::kClear: {
      in_forward_ = false;
      while (!marks_.empty()) DropMark(marks_.begin()->first, "all sequences were dropped");
      const std::lock_guard lock(mutex_);
      receives_.clear();
      changed_.notify_all();
      break;
    }
    case Kind::kRemove:
      DropMark(call.seq_id, "the sequence was removed");
      EndReceiveOf(call.seq_id);
      break;
    case Kind::kPop: {
      if (call.count > 0) EndReceiveOf(call.seq_id);
      const auto mark = marks_.find(call.seq_id);
      if (mark == marks_.end()) break;
      // What is computed anew there is sent anew.
      if (LengthOf(call.seq_id) < mark->second.sent) mark->second.sent = 0;
      break;
    }
    case Kind::kAdd:
    case Kind::kFork:
    case Kind::kRetain:
    case Kind::kCommitTree:
    case Kind::kImport:
      break;
  }
}

void JointTransfer::AppendFacts(std::vector<int64_t>* facts) const {
  for (const auto& [id, mark] : marks_) {
    facts->insert(facts->end(), {id, mark.begin, mark.end, static_cast<int64_t>(mark.epoch),
                                 mark.peer, mark.sent, mark.active()});
  }
  const std::lock_guard lock(mutex_);
  for (const auto& [epoch, receive] : receives_)
    facts->insert(facts->end(), {static_cast<int64_t>(epoch), receive->seq_id,
                                 receive->first_position, receive->count});
}

// ---------------------------------------------------------------------- receiving

// As if the states in the reservation's memory were imported now.
Status JointTransfer::PlanImport(PlannedParts& parts, const Receive& receive,
                                 int64_t position) const {
  const std::vector<TensorView> states = StatesIn(receive.memory.get());
  ControlCall call{.kind = ControlCall::Kind::kImport, .seq_id = receive.seq_id, .count = position};
  size_t next = 0;
  return parts.Plan([&](size_t part) {
    const size_t begin = next;
    while (next < tensors_.size() && tensors_[next].part == part) ++next;
    call.states = std::span(states).subspan(begin, next - begin);
    return call;
  });
}

Result<ReceiveMap> JointTransfer::DisaggPrepareRecv(int64_t seq_id, int64_t count) {
  const char* const call = "DisaggPrepareRecv";
  return gate_.Enter(call, [&]() -> Result<ReceiveMap> {
    QUIRE_RETURN_IF_ERROR(RequireIdle(call));
    QUIRE_ASSIGN_OR_RETURN(const int64_t length, first().GetSequenceLength(seq_id));
    if (PendingOf(seq_id) > 0) {
      return Status(StatusCode::kBadState,
                    OfSequence(call, seq_id) + "has a reservation already; commit or cancel it");
    }
    QUIRE_RETURN_IF_ERROR(CheckReceiveCount(call, seq_id, length, count));
    auto receive = std::make_shared<Receive>();
    receive->seq_id = seq_id;
    receive->first_position = length;
    receive->count = count;
    receive->memory = AllocateStates();
    receive->arrivals.resize(tensors_.size());
    Receives one;
    one.emplace(0, receive);
    ReceiveMap own;
    own.slots = {1, 0, count};
    own.first_position = length;
    own.count = count;
    std::vector<int64_t> heads(static_cast<size_t>(attention_layers_) + tensors_.size(), 1);
    {
      PlannedParts planned(planned_);  // whatever refuses the import refuses it here
      QUIRE_RETURN_IF_ERROR(PlanImport(planned, *receive, length + count));
    }
    if (attention_ != nullptr) {
      QUIRE_ASSIGN_OR_RETURN(own, attention_->DisaggPrepareRecv(seq_id, count));
      std::ranges::copy(own.kv_heads, heads.begin());
    }
    own.kv_heads = std::move(heads);
    own.layout ^= layout_;
    const std::lock_guard lock(mutex_);
    if (attention_ == nullptr) own.epoch = next_epoch_++;
    auto node = one.extract(one.begin());
    node.key() = own.epoch;
    receives_.insert(std::move(node));
    return own;
  });
}

std::shared_ptr<JointTransfer::Receive> JointTransfer::FindLocked(uint64_t epoch) const {
  const auto found = receives_.find(epoch);
  return found == receives_.end() ? nullptr : found->second;
}

// REQUIRES: the lock.
Result<std::shared_ptr<JointTransfer::Receive>> JointTransfer::Require(const char* call,
                                                                       uint64_t epoch) const {
  if (auto receive = FindLocked(epoch)) return receive;
  return Status(StatusCode::kNotFound,
                std::string(call) + ": there is no reservation of " + Name(epoch) +
                    "; it was committed or cancelled, or never made by DisaggPrepareRecv");
}

void JointTransfer::EndReceive(uint64_t epoch) noexcept {
  const std::lock_guard lock(mutex_);
  receives_.erase(epoch);
  changed_.notify_all();
}

void JointTransfer::EndReceiveOf(int64_t seq_id) noexcept {
  const std::lock_guard lock(mutex_);
  std::erase_if(receives_, [&](const auto& entry) { return entry.second->seq_id == seq_id; });
  changed_.notify_all();
}

Status JointTransfer::RequireStates(uint64_t epoch, const Receive& receive, int64_t n) const {
  for (size_t t = 0; t < tensors_.size(); ++t) {
    const int64_t rows = receive.arrivals[t].rows();
    if (rows == n) continue;
    std::string why = "DisaggCommitRecv: of layer " +
                      std::to_string(attention_layers_ + static_cast<int64_t>(t)) + " of " +
                      Name(epoch) + " the state behind token " + std::to_string(n) + " is wanted, ";
    why += rows == 0 ? std::string("and none is complete")
                     : "and that behind token " + std::to_string(rows) + " is here";
    if (!receive.failure.ok()) why += " (" + receive.failure.ToString() + ")";
    return Status(StatusCode::kBadState,
                  why + "; wait for it, commit as many tokens, or cancel and compute them here");
  }
  return Status();
}

Status JointTransfer::DisaggCommitRecv(uint64_t epoch, int64_t n) {
  const char* const call = "DisaggCommitRecv";
  if (n == 0) return DisaggCancelRecv(epoch);
  return gate_.Enter(call, [&]() -> Status {
    QUIRE_RETURN_IF_ERROR(RequireIdle(call));
    std::unique_lock lock(mutex_);
    QUIRE_ASSIGN_OR_RETURN(const auto receive, Require(call, epoch));
    if (n < 0 || n > receive->count) {
      return Status(StatusCode::kBadArgument,
                    std::string(call) + ": the reservation of " + Name(epoch) + " has " +
                        std::to_string(receive->count) + " tokens, not " + std::to_string(n));
    }
    QUIRE_RETURN_IF_ERROR(RequireStates(epoch, *receive, n));
    PlannedParts planned(planned_);
    QUIRE_RETURN_IF_ERROR(PlanImport(planned, *receive, receive->first_position + n));
    if (attention_ != nullptr) QUIRE_RETURN_IF_ERROR(attention_->DisaggCommitRecv(epoch, n));
    planned.Commit();
    receives_.erase(epoch);
    changed_.notify_all();
    return Status();
  });
}

Status JointTransfer::DisaggCancelRecv(uint64_t epoch) {
  const char* const call = "DisaggCancelRecv";
  return gate_.Enter(call, [&]() -> Status {
    {
      const std::lock_guard lock(mutex_);
      QUIRE_RETURN_IF_ERROR(Require(call, epoch).status());
    }
    if (attention_ != nullptr) QUIRE_RETURN_IF_ERROR(attention_->DisaggCancelRecv(epoch));
    EndReceive(epoch);
    return Status();
  });
}

// REQUIRES: the lock.
Result<size_t> JointTransfer::FindPart(const char* call, const Receive& receive, uint64_t epoch,
                                       int64_t layer, const ReceivePart& part) const {
  const int64_t end = attention_layers_ + std::ssize(tensors_);
  if (layer < attention_layers_ || layer >= end) {
    return Status(StatusCode::kBadArgument, std::string(call) + ": no layer " +
                                                std::to_string(layer) + "; there are " +
                                                std::to_string(end));
  }
  const bool fits = part.first_row >= 0 && part.first_row < receive.count && part.count == 1 &&
                    part.first_head == 0 && part.head_count == 1;
  if (fits) return static_cast<size_t>(layer - attention_layers_);
  return Status(StatusCode::kBadArgument,
                std::string(call) + ": layer " + std::to_string(layer) + " of " + Name(epoch) +
                    " is a state, which goes as one head of one row, that of one of " +
                    std::to_string(receive.count) + " tokens");
}

Result<ReceiveView> JointTransfer::View(uint64_t epoch, int64_t layer, const ReceivePart& part) {
  if (attention_ != nullptr && layer < attention_layers_)
    return attention_->View(epoch, layer, part);
  return GuardEntry([&]() -> Result<ReceiveView> {
    const std::lock_guard lock(mutex_);
    QUIRE_ASSIGN_OR_RETURN(const auto receive, Require("View", epoch));
    QUIRE_ASSIGN_OR_RETURN(const size_t t, FindPart("View", *receive, epoch, layer, part));
    receive->arrivals[t] = {.row = part.first_row, .complete = false};
    std::byte* const memory = receive->memory.get();
    return ReceiveView{.rows = RowIn(memory, t), .memory = std::shared_ptr<void>(receive, memory)};
  });
}

Status JointTransfer::Complete(uint64_t epoch, int64_t layer, const ReceivePart& part,
                               uint32_t digest) {
  if (attention_ != nullptr && layer < attention_layers_)
    return attention_->Complete(epoch, layer, part, digest);
  return GuardEntry([&]() -> Status {
    const std::lock_guard lock(mutex_);
    QUIRE_ASSIGN_OR_RETURN(const auto receive, Require("Complete", epoch));
    QUIRE_ASSIGN_OR_RETURN(const size_t t, FindPart("Complete", *receive, epoch, layer, part));
    Arrival& arrival = receive->arrivals[t];
    const uint32_t found = DigestOfHeads(RowIn(receive->memory.get(), t), 0, 1);
    Status status;
    if (arrival.row != part.first_row) {
      status = Status(StatusCode::kBadState,
                      "Complete: the state behind token " + std::to_string(part.first_row + 1) +
                          " of layer " + std::to_string(layer) + " of " + Name(epoch) +
                          " was not viewed last; a later one has taken its place");
    } else if (found != digest) {
      status = Status(StatusCode::kCorrupt,
                      "Complete: the state of layer " + std::to_string(layer) + " of " +
                          Name(epoch) + " has the digest " + std::to_string(found) + ", not " +
                          std::to_string(digest) +
                          "; send it again, or cancel and compute the tokens here");
      if (receive->failure.ok()) receive->failure = status;
    } else {
      arrival.complete = true;
    }
    changed_.notify_all();
    return status;
  });
}

Status JointTransfer::FailReceive(uint64_t epoch, const Status& why) {
  if (attention_ != nullptr) QUIRE_RETURN_IF_ERROR(attention_->FailReceive(epoch, why));
  return GuardEntry([&]() -> Status {
    const std::lock_guard lock(mutex_);
    QUIRE_ASSIGN_OR_RETURN(const auto receive, Require("FailReceive", epoch));
    QUIRE_RETURN_IF_ERROR(NoteFailure(epoch, why, &receive->failure));
    changed_.notify_all();
    return Status();
  });
}

Result<ReceiveProgress> JointTransfer::GetReceiveProgress(uint64_t epoch) const {
  return GuardEntry([&]() -> Result<ReceiveProgress> {
    ReceiveProgress progress;
    if (attention_ != nullptr) {
      QUIRE_ASSIGN_OR_RETURN(progress, attention_->GetReceiveProgress(epoch));
    }
    const std::lock_guard lock(mutex_);
    QUIRE_ASSIGN_OR_RETURN(const auto receive, Require("GetReceiveProgress", epoch));
    progress.count = receive->count;
    for (const Arrival& arrival : receive->arrivals) progress.layer_rows.push_back(arrival.rows());
    if (progress.failure.ok()) progress.failure = receive->failure;
    return progress;
  });
}

Status JointTransfer::WaitReceived(uint64_t epoch, int64_t n, Clock& clock,
                                   int64_t until_ns) const {
  const char* const call = "WaitReceived";
  if (attention_ != nullptr)
    QUIRE_RETURN_IF_ERROR(attention_->WaitReceived(epoch, n, clock, until_ns));
  return GuardEntry([&]() -> Status {
    std::unique_lock lock(mutex_);
    for (;;) {
      const std::shared_ptr<Receive> receive = FindLocked(epoch);
      if (receive == nullptr) {
        return Status(StatusCode::kCancelled,
                      std::string(call) + ": the reservation of " + Name(epoch) + " is over");
      }
      if (n < 0 || n > receive->count) {
        return Status(StatusCode::kBadArgument,
                      std::string(call) + ": the reservation of " + Name(epoch) + " has " +
                          std::to_string(receive->count) + " tokens, not " + std::to_string(n));
      }
      const bool here =
          std::ranges::all_of(receive->arrivals, [&](const Arrival& a) { return a.rows() >= n; });
      if (here) return Status();
      if (!receive->failure.ok()) return receive->failure;
      if (clock.SteadyNs() >= until_ns) {
        return Status(StatusCode::kTimeout,
                      std::string(call) + ": the states behind token " + std::to_string(n) +
                          " of " + Name(epoch) +
                          " did not come in time; cancel and compute the tokens here, or wait "
                          "again");
      }
      clock.Wait(changed_, lock, until_ns);
    }
  });
}

}  // namespace quire
