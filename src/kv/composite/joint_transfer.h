// JointTransfer: the KVTransfer of a CompositeState, with one receiver and one sender for all
// parts: its rules, and what the composite's own calls have to do with transfers. The layers of the
// attention caches come first, in the order of the caches; each state of recurrent layers is a
// further layer (StateTransfer). So a channel needs no code for states (docs/transfer.md).
//
// Invariants:
// - From the beginning to the end of this, the reservations and marks of the parts are those here.
// - Pending tokens are in the lengths of attention caches and in no other length.
#ifndef QUIRE_KV_COMPOSITE_JOINT_TRANSFER_H_
#define QUIRE_KV_COMPOSITE_JOINT_TRANSFER_H_

#include <cstdint>
#include <span>
#include <vector>

#include "kv/composite/state_transfer.h"
#include "kv/control/call_gate.h"
#include "kv/control/control_call.h"
#include "kv/transfer/transfer_calls.h"
#include "kv/transfer/transfer_receiver.h"
#include "kv/transfer/transfer_sender.h"
#include "quire/composite_state.h"
#include "quire/kv_transfer.h"

namespace quire {

class JointTransfer final : public TransferCalls {
 public:
  // The composite, its recurrent parts in their order, and its gate, which outlive this. It is
  // asked for its parts here.
  JointTransfer(const CompositeState& state, std::span<PlannedState* const> planned,
                const CallGate& gate);
  // Cancels what is reserved, and stops what is sent: the parts may live on.
  ~JointTransfer() override;

  // ---- What the composite's own calls have to do with it.

  // BadState for what a sequence may not do while it has pending tokens.
  Status Check(const ControlCall& call) const;
  // What attention caches are asked: they count the pending tokens, the composite does not.
  ControlCall ForAttention(const ControlCall& call) const;
  // REQUIRES: all parts have carried out the call.
  void Finish(const ControlCall& call) noexcept;
  void AppendFacts(std::vector<int64_t>* facts) const;
  // Tokens that are reserved for the sequence.
  int64_t PendingOf(int64_t seq_id) const { return receiver_.receives().PendingOf(seq_id); }

 private:
  // ---- The rules of TransferCalls.
  Status Open(const char* call) const override { return gate_.Open(call); }
  void Close() const noexcept override { gate_.Close(); }
  Status RequireIdle(const char* call) const override;
  Status RequireSequence(const char* call, int64_t seq_id) const override;
  Status RequireNotInForward(const char* call, int64_t seq_id) const override;

  // The parts, in the order of layers.
  template <typename Part>
  std::vector<Part*> PartsAs();
  int64_t LengthOf(int64_t seq_id) const;

  const CompositeState& state_;
  const CompositeState::Parts& parts_;
  const CallGate& gate_;
  bool in_forward_ = false;
  StateTransfer states_;
  TransferReceiver receiver_;
  TransferSender sender_;
};

}  // namespace quire

#endif  // QUIRE_KV_COMPOSITE_JOINT_TRANSFER_H_
