#include "kv/composite/joint_transfer.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/check.h"
#include "kv/control/sequence_control.h"

namespace quire {

JointTransfer::JointTransfer(const CompositeState& state, std::span<PlannedState* const> planned,
                             const CallGate& gate)
    : TransferCalls(receiver_, sender_),
      state_(state),
      parts_(state.parts()),
      gate_(gate),
      states_(parts_, planned),
      receiver_(PartsAs<ReceivingPart>()),
      sender_(PartsAs<SendingPart>()) {
  QUIRE_CHECK(planned.size() == parts_.recurrent.size());
  for (ReceivingPart* const part : PartsAs<ReceivingPart>()) part->SetReceiver(&receiver_);
  int64_t first_layer = 0;
  for (SendingPart* const part : PartsAs<SendingPart>()) {
    part->SetSender(&sender_, first_layer);
    first_layer += std::ssize(part->send_layers());
  }
}

JointTransfer::~JointTransfer() {
  sender_.StopAll("its state was destroyed");
  while (const uint64_t epoch = receiver_.receives().any_epoch()) {
    const Status cancelled = receiver_.Cancel("~CompositeState", epoch);
    QUIRE_CHECK(cancelled.ok()) << cancelled.ToString();
  }
  for (ReceivingPart* const part : PartsAs<ReceivingPart>()) part->SetReceiver(nullptr);
  for (SendingPart* const part : PartsAs<SendingPart>()) part->SetSender(nullptr, 0);
}

template <typename Part>
std::vector<Part*> JointTransfer::PartsAs() {
  std::vector<Part*> parts;
  const auto add = [&](AttentionKVCache& cache) {
    parts.push_back(dynamic_cast<Part*>(cache.transfer()));
    QUIRE_CHECK(parts.back() != nullptr)
        << "CompositeState::Create takes states of this library alone";
  };
  if (parts_.attention != nullptr) add(*parts_.attention);
  for (const auto& cache : parts_.more_attention) add(*cache);
  if (!parts_.recurrent.empty()) parts.push_back(&states_);
  return parts;
}

int64_t JointTransfer::LengthOf(int64_t seq_id) const {
  const Result<int64_t> length = state_.GetSequenceLength(seq_id);
  return length.ok() ? *length : 0;
}

Status JointTransfer::RequireIdle(const char* call) const {
  return in_forward_ ? ForwardIsOpen(call) : Status();
}

Status JointTransfer::RequireSequence(const char* call, int64_t seq_id) const {
  return state_.HasSequence(seq_id) ? Status() : NoSuchSequence(call, seq_id);
}

// Only the parts know which sequences are in the batch.
Status JointTransfer::RequireNotInForward(const char* call, int64_t seq_id) const {
  QUIRE_RETURN_IF_ERROR(RequireIdle(call));
  return RequireSequence(call, seq_id);
}

// ---------------------------------------------------------------------- the composite's calls

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
      QUIRE_DCHECK(!in_forward_) << "the parts take no forward within another one";
      in_forward_ = true;
      break;
    case Kind::kEnd:
      QUIRE_DCHECK(in_forward_) << "a part has ended a forward that was not begun here";
      in_forward_ = false;
      sender_.FinishForward(SendMarks::Outcome::kEnded);
      break;
    case Kind::kAbort:
      QUIRE_DCHECK(in_forward_) << "a part has ended a forward that was not begun here";
      in_forward_ = false;
      sender_.FinishForward(SendMarks::Outcome::kAborted);
      break;
    case Kind::kClear:
      in_forward_ = false;
      sender_.FinishForward(SendMarks::Outcome::kAborted);
      sender_.StopAll("all sequences were dropped");
      receiver_.receives().Clear();
      break;
    case Kind::kRemove:
      sender_.Stop(call.seq_id, "the sequence was removed");
      receiver_.receives().EndOf(call.seq_id);
      break;
    case Kind::kPop:
      if (call.count > 0) receiver_.receives().EndOf(call.seq_id);
      sender_.ShortenStates(call.seq_id, LengthOf(call.seq_id));
      break;
    case Kind::kAdd:
    case Kind::kFork:
    case Kind::kRetain:
    case Kind::kCommitTree:
    case Kind::kImport:
      break;
  }
}

void JointTransfer::AppendFacts(std::vector<int64_t>* facts) const {
  sender_.AppendAllFacts(facts);
  receiver_.receives().AppendFacts(facts);
}

}  // namespace quire
