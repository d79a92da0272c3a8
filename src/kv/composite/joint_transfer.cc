#include "kv/composite/joint_transfer.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/check.h"
#include "kv/control/sequence_control.h"

namespace quire {

JointTransfer::JointTransfer(const CompositeState& state, std::span<PlannedState* const> planned,
                             const CallGate& gate)
    : state_(state),
      parts_(state.parts()),
      gate_(gate),
      states_(parts_, planned),
      receiver_(PartsAs<ReceivingPart>()),
      sender_(PartsAs<SendingPart>()) {
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

Status JointTransfer::RequireIdle(const char* call, int64_t seq_id) const {
  QUIRE_RETURN_IF_ERROR(RequireIdle(call));
  return state_.GetSequenceLength(seq_id).status();
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
      in_forward_ = true;
      break;
    case Kind::kEnd:
      in_forward_ = false;
      sender_.FinishForward(SendMarks::Outcome::kEnded);
      break;
    case Kind::kAbort:
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

// ---------------------------------------------------------------------- receiving

Result<ReceiveMap> JointTransfer::DisaggPrepareRecv(int64_t seq_id, int64_t count) {
  const char* const call = "DisaggPrepareRecv";
  return gate_.Enter(call, [&]() -> Result<ReceiveMap> {
    QUIRE_RETURN_IF_ERROR(RequireIdle(call, seq_id));
    return receiver_.Prepare(call, seq_id, count);
  });
}

Status JointTransfer::DisaggCommitRecv(uint64_t epoch, int64_t n) {
  const char* const call = "DisaggCommitRecv";
  return gate_.Enter(call, [&]() -> Status {
    if (n != 0) QUIRE_RETURN_IF_ERROR(RequireIdle(call));  // states are imported
    return receiver_.Commit(call, epoch, n);
  });
}

Status JointTransfer::DisaggCancelRecv(uint64_t epoch) {
  const char* const call = "DisaggCancelRecv";
  return gate_.Enter(call, [&] { return receiver_.Cancel(call, epoch); });
}

// ---------------------------------------------------------------------- sending

Status JointTransfer::SetLayerSink(std::shared_ptr<LayerSink> sink) {
  const char* const call = "SetLayerSink";
  return gate_.Enter(call, [&]() -> Status {
    QUIRE_RETURN_IF_ERROR(RequireIdle(call));
    return sender_.SetSink(std::move(sink));
  });
}

Status JointTransfer::DisaggMarkSend(int64_t seq_id, int64_t begin,
                                     std::span<const ReceiveMap> maps, int64_t peer, int64_t rank,
                                     int64_t first_row) {
  const char* const call = "DisaggMarkSend";
  return gate_.Enter(call, [&]() -> Status {
    QUIRE_RETURN_IF_ERROR(RequireIdle(call, seq_id));
    return sender_.Mark(seq_id, begin, maps, peer, rank, first_row);
  });
}

Status JointTransfer::DisaggUnmarkSend(int64_t seq_id) {
  const char* const call = "DisaggUnmarkSend";
  return gate_.Enter(call, [&]() -> Status {
    QUIRE_RETURN_IF_ERROR(RequireIdle(call, seq_id));
    return sender_.Unmark(call, seq_id);
  });
}

Result<int64_t> JointTransfer::DisaggDetachSend(int64_t seq_id) {
  const char* const call = "DisaggDetachSend";
  return gate_.Enter(call, [&]() -> Result<int64_t> {
    QUIRE_RETURN_IF_ERROR(RequireIdle(call, seq_id));
    return sender_.Detach(call, seq_id);
  });
}

Status JointTransfer::DisaggFlushSend(int64_t seq_id) {
  const char* const call = "DisaggFlushSend";
  return gate_.Enter(call, [&]() -> Status {
    QUIRE_RETURN_IF_ERROR(RequireIdle(call, seq_id));
    return sender_.Flush(call, seq_id);
  });
}

Result<SendProgress> JointTransfer::GetSendProgress(int64_t seq_id) const {
  const char* const call = "GetSendProgress";
  return gate_.Enter(call, [&]() -> Result<SendProgress> {
    QUIRE_RETURN_IF_ERROR(state_.GetSequenceLength(seq_id).status());
    return sender_.Progress(call, seq_id);
  });
}

}  // namespace quire
