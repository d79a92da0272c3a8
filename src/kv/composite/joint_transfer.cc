#include "kv/composite/joint_transfer.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/check.h"
#include "base/checksum.h"
#include "kv/control/sequence_control.h"
#include "quire/recurrent_cache.h"

namespace quire {

JointTransfer::JointTransfer(const CompositeState& state, std::span<PlannedState* const> planned,
                             const CallGate& gate)
    : state_(state),
      parts_(state.parts()),
      planned_(planned),
      gate_(gate),
      attention_(parts_.attention == nullptr ? nullptr : parts_.attention->transfer()),
      attention_layers_(
          parts_.attention == nullptr ? 0 : std::ssize(parts_.attention->options().layers)),
      states_(StatesOfParts(parts_)),
      receives_(StateLayers(), attention_layers_, nullptr) {}

// ---------------------------------------------------------------------- states

JointTransfer::States JointTransfer::StatesOfParts(const CompositeState::Parts& parts) {
  States states;
  std::string text;
  for (size_t p = 0; p < parts.recurrent.size(); ++p) {
    // Bits of a recurrence are those of the kernel path.
    const auto* const cache = dynamic_cast<const RecurrentCache*>(parts.recurrent[p].get());
    text += "|" + (cache == nullptr ? "" : cache->options().kernel_path);
    int64_t index = 0;
    const Result<std::vector<StateTensor>> tensors = StateTensorsOf(*parts.recurrent[p]);
    QUIRE_CHECK(tensors.ok()) << "CompositeState::Create takes states of this library alone";
    for (const StateTensor& tensor : *tensors) {
      states.tensors.push_back(
          {.part = p, .index = index++, .dtype = tensor.dtype, .shape = tensor.shape});
      text += ";" + std::string(DTypeName(tensor.dtype));
      for (const int64_t dim : tensor.shape) text += "," + std::to_string(dim);
    }
  }
  states.layout = Hash64(text);
  return states;
}

std::vector<TransferLayer> JointTransfer::StateLayers() const {
  std::vector<TransferLayer> layers;
  for (const Tensor& tensor : states_.tensors)
    layers.push_back({.dtype = tensor.dtype, .elements = tensor.elements()});
  return layers;
}

TensorView JointTransfer::Tensor::StateIn(const void* memory) const {
  return TensorView(const_cast<void*>(memory), dtype, std::span(shape));
}

LayerKV JointTransfer::Tensor::RowIn(std::byte* memory) const {
  LayerKV row;
  row.k = TensorView(memory, dtype, {1, 1, elements()});
  return row;
}

int64_t JointTransfer::LengthOf(int64_t seq_id) const {
  const Result<int64_t> length = state_.GetSequenceLength(seq_id);
  return length.ok() ? *length : 0;
}

Status JointTransfer::RequireIdle(const char* call) const {
  return in_forward_ ? ForwardIsOpen(call) : Status();
}

Status JointTransfer::RequireMappable(const char* call) const {
  if (parts_.more_attention.empty() && !parts_.recurrent.empty()) return Status();
  return Status(StatusCode::kBadState,
                std::string(call) +
                    ": a state of several attention caches, or without a recurrent part, sends and "
                    "receives nothing; compute the tokens, or give them to ImportState");
}

// ---------------------------------------------------------------------- the composite's calls

Status JointTransfer::Check(const ControlCall& call) const {
  using Kind = ControlCall::Kind;
  const auto refuse = [&](int64_t seq_id) {
    if (receives_.PendingOf(seq_id) == 0) return Status();
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
  const int64_t pending = is_cut ? receives_.PendingOf(call.seq_id) : 0;
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
      for (const auto& mark : marks_.all()) {
        if (mark != nullptr) SendStates(mark.get());
      }
      break;
    case Kind::kAbort:
      in_forward_ = false;
      break;
    case Kind::kClear: {
      in_forward_ = false;
      for (size_t i = 0; i < marks_.all().size(); ++i)
        marks_.Stop(static_cast<int32_t>(i), "all sequences were dropped");
      receives_.Clear();
      break;
    }
    case Kind::kRemove:
      DropMark(call.seq_id, "the sequence was removed");
      receives_.EndOf(call.seq_id);
      break;
    case Kind::kPop: {
      if (call.count > 0) receives_.EndOf(call.seq_id);
      const int32_t index = marks_.IndexOf(call.seq_id);
      const SendMark* const mark = marks_.Find(index);
      if (mark == nullptr) break;
      // The state at the sequence's end is sent again, even if it was sent before a longer one.
      if (LengthOf(call.seq_id) < mark->next) marks_.ShortenTo(index, mark->begin);
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
  std::vector<const SendMark*> by_sequence;
  for (const auto& mark : marks_.all()) {
    if (mark != nullptr) by_sequence.push_back(mark.get());
  }
  std::ranges::sort(by_sequence, {}, &SendMark::seq_id);
  for (const SendMark* const mark : by_sequence) {
    const SendMark::Target& target = mark->targets.front();
    facts->insert(facts->end(),
                  {mark->seq_id, mark->begin, mark->end, static_cast<int64_t>(target.map.epoch),
                   target.peer, mark->next, mark->active()});
  }
  receives_.AppendFacts(facts);
}

// ---------------------------------------------------------------------- receiving

// As if the states in the reservation's memory were imported now.
Status JointTransfer::PlanImport(PlannedParts& parts, const Receive& receive,
                                 int64_t position) const {
  const std::vector<Tensor>& tensors = states_.tensors;
  QUIRE_DCHECK(receive.layers.size() == tensors.size());
  std::vector<TensorView> states;
  for (size_t t = 0; t < tensors.size(); ++t)
    states.push_back(tensors[t].StateIn(receive.layers[t].staging.k.data()));
  ControlCall call{.kind = ControlCall::Kind::kImport, .seq_id = receive.seq_id, .count = position};
  size_t next = 0;
  return parts.Plan([&](size_t part) {
    const size_t begin = next;
    while (next < tensors.size() && tensors[next].part == part) ++next;
    call.states = std::span(states).subspan(begin, next - begin);
    return call;
  });
}

Result<ReceiveMap> JointTransfer::DisaggPrepareRecv(int64_t seq_id, int64_t count) {
  const char* const call = "DisaggPrepareRecv";
  return gate_.Enter(call, [&]() -> Result<ReceiveMap> {
    QUIRE_RETURN_IF_ERROR(RequireMappable(call));
    QUIRE_RETURN_IF_ERROR(RequireIdle(call));
    QUIRE_ASSIGN_OR_RETURN(const int64_t length, state_.GetSequenceLength(seq_id));
    if (receives_.PendingOf(seq_id) > 0) {
      return Status(StatusCode::kBadState,
                    OfSequence(call, seq_id) + "has a reservation already; commit or cancel it");
    }
    QUIRE_RETURN_IF_ERROR(CheckReceiveCount(call, seq_id, length, count));
    auto receive = receives_.Prepare(seq_id, length, count, 0);
    ReceiveMap own;
    own.slots = {1, 0, count};
    own.first_position = length;
    own.count = count;
    std::vector<int64_t> heads(static_cast<size_t>(attention_layers_) + states_.tensors.size(), 1);
    {
      PlannedParts planned(planned_);  // what would refuse the import refuses it here
      QUIRE_RETURN_IF_ERROR(PlanImport(planned, *receive, length + count));
    }
    if (attention_ != nullptr) {
      QUIRE_ASSIGN_OR_RETURN(own, attention_->DisaggPrepareRecv(seq_id, count));
      std::ranges::copy(own.kv_heads, heads.begin());
    }
    own.kv_heads = std::move(heads);
    own.layout ^= states_.layout;
    own.epoch = receives_.Add(std::move(receive), own.epoch);
    return own;
  });
}

Status JointTransfer::DisaggCommitRecv(uint64_t epoch, int64_t n) {
  const char* const call = "DisaggCommitRecv";
  if (n == 0) return DisaggCancelRecv(epoch);
  return gate_.Enter(call, [&]() -> Status {
    QUIRE_RETURN_IF_ERROR(RequireIdle(call));
    return receives_.Commit(call, epoch, n, [&](const Receive& receive) -> Status {
      PlannedParts planned(planned_);
      QUIRE_RETURN_IF_ERROR(PlanImport(planned, receive, receive.first_position + n));
      if (attention_ != nullptr) QUIRE_RETURN_IF_ERROR(attention_->DisaggCommitRecv(epoch, n));
      planned.Commit();
      return Status();
    });
  });
}

Status JointTransfer::DisaggCancelRecv(uint64_t epoch) {
  const char* const call = "DisaggCancelRecv";
  return gate_.Enter(call, [&]() -> Status {
    QUIRE_RETURN_IF_ERROR(receives_.Find(call, epoch).status());
    if (attention_ != nullptr) QUIRE_RETURN_IF_ERROR(attention_->DisaggCancelRecv(epoch));
    receives_.End(epoch);
    return Status();
  });
}

Result<ReceiveView> JointTransfer::View(uint64_t epoch, int64_t layer, const ReceivePart& part) {
  if (attention_ != nullptr && layer < attention_layers_)
    return attention_->View(epoch, layer, part);
  return GuardEntry([&] { return receives_.View(epoch, layer, part); });
}

Status JointTransfer::Complete(uint64_t epoch, int64_t layer, const ReceivePart& part,
                               uint32_t digest) {
  if (attention_ != nullptr && layer < attention_layers_)
    return attention_->Complete(epoch, layer, part, digest);
  return GuardEntry([&] { return receives_.Complete(epoch, layer, part, digest); });
}

Status JointTransfer::FailReceive(uint64_t epoch, const Status& why) {
  if (attention_ != nullptr) QUIRE_RETURN_IF_ERROR(attention_->FailReceive(epoch, why));
  return GuardEntry([&] { return receives_.Fail(epoch, why); });
}

Result<ReceiveProgress> JointTransfer::GetReceiveProgress(uint64_t epoch) const {
  return GuardEntry([&]() -> Result<ReceiveProgress> {
    ReceiveProgress progress;
    if (attention_ != nullptr) {
      QUIRE_ASSIGN_OR_RETURN(progress, attention_->GetReceiveProgress(epoch));
    }
    QUIRE_ASSIGN_OR_RETURN(const ReceiveProgress states, receives_.Progress(epoch));
    progress.count = states.count;
    const bool has_tokens = attention_ == nullptr || progress.complete >= states.complete;
    progress.complete = has_tokens ? states.complete : 0;
    progress.layer_rows.insert(progress.layer_rows.end(), states.layer_rows.begin(),
                               states.layer_rows.end());
    if (progress.failure.ok()) progress.failure = states.failure;
    return progress;
  });
}

Status JointTransfer::WaitReceived(uint64_t epoch, int64_t n, Clock& clock,
                                   int64_t until_ns) const {
  if (attention_ != nullptr)
    QUIRE_RETURN_IF_ERROR(attention_->WaitReceived(epoch, n, clock, until_ns));
  return GuardEntry([&] { return receives_.Wait(epoch, n, clock, until_ns); });
}

}  // namespace quire
