// JointTransfer: the KVTransfer of a CompositeState: one receiver and one sender for all parts. The
// layers of the attention caches come first, in the order of the caches; each state of recurrent
// layers is a further layer (StateTransfer). So a channel needs no code for states
// (docs/transfer.md).
//
// Invariants:
// - From the beginning to the end of this, the reservations and marks of the parts are those here.
// - Pending tokens are in the lengths of attention caches and in no other length.
#ifndef QUIRE_KV_COMPOSITE_JOINT_TRANSFER_H_
#define QUIRE_KV_COMPOSITE_JOINT_TRANSFER_H_

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kv/composite/state_transfer.h"
#include "kv/control/call_gate.h"
#include "kv/control/control_call.h"
#include "kv/transfer/arrivals.h"
#include "kv/transfer/pending_receives.h"
#include "kv/transfer/transfer_receiver.h"
#include "kv/transfer/transfer_sender.h"
#include "quire/composite_state.h"
#include "quire/kv_transfer.h"

namespace quire {

class JointTransfer final : public Arrivals {
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

  // ---- KVTransfer.
  Result<ReceiveMap> DisaggPrepareRecv(int64_t seq_id, int64_t count) override;
  Status DisaggCommitRecv(uint64_t epoch, int64_t n) override;
  Status DisaggCancelRecv(uint64_t epoch) override;
  Status SetLayerSink(std::shared_ptr<LayerSink> sink) override;
  Status DisaggMarkSend(int64_t seq_id, int64_t begin, std::span<const ReceiveMap> maps,
                        int64_t peer, int64_t rank, int64_t first_row) override;
  Status DisaggUnmarkSend(int64_t seq_id) override;
  Result<int64_t> DisaggDetachSend(int64_t seq_id) override;
  Status DisaggFlushSend(int64_t seq_id) override;
  Result<SendProgress> GetSendProgress(int64_t seq_id) const override;

 private:
  PendingReceives& arriving() noexcept override { return receiver_.receives(); }
  const PendingReceives& arriving() const noexcept override { return receiver_.receives(); }
  // The parts, in the order of layers.
  template <typename Part>
  std::vector<Part*> PartsAs();
  int64_t LengthOf(int64_t seq_id) const;
  Status RequireIdle(const char* call) const;
  // And that the sequence exists.
  Status RequireIdle(const char* call, int64_t seq_id) const;

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
