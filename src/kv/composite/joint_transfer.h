// JointTransfer: the KVTransfer of a CompositeState. Attention layers' tokens are sent and received
// by their cache; the states of recurrent layers are further layers after those, of one head and
// one row: that of the last token before the state. So a channel needs no code for states
// (docs/transfer.md). Reservations and marks of states are those of kv/transfer, as the cache's
// are.
//
// A state exists where a forward of the sender ended. There it is given to the sink, after all
// parts have ended the forward, and the receiver keeps the newest; its sequence stays as it was
// until DisaggCommitRecv, when its attention part takes over the tokens and the recurrent parts
// import the states, together or not at all.
//
// Invariants:
// - With an attention part, a sequence has a reservation here exactly while it has one there, of
// the
//   same epoch and as many tokens: every call makes or ends both.
// - A mark here has one target, and its `next` is its begin, the position whose states were sent
//   last, or where it resumes: the receiver has those states. With an attention part it has a mark
//   there, too, unless that has failed or was ended with this one.
#ifndef QUIRE_KV_COMPOSITE_JOINT_TRANSFER_H_
#define QUIRE_KV_COMPOSITE_JOINT_TRANSFER_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kv/chunks/kv_sections.h"
#include "kv/control/call_gate.h"
#include "kv/control/control_call.h"
#include "kv/transfer/pending_receives.h"
#include "kv/transfer/send_marks.h"
#include "quire/composite_state.h"
#include "quire/kv_transfer.h"

namespace quire {

class JointTransfer final : public KVTransfer {
 public:
  // The composite, its recurrent parts in their order, and its gate, which outlive this. It is
  // asked for its parts here.
  JointTransfer(const CompositeState& state, std::span<PlannedState* const> planned,
                const CallGate& gate);

  // ---- What the composite's own calls have to do with it.

  // BadState for what a sequence may not do while it has pending tokens.
  Status Check(const ControlCall& call) const;
  // What the attention part is asked: it counts the pending tokens, the composite does not.
  ControlCall ForAttention(const ControlCall& call) const;
  // REQUIRES: all parts have carried out the call.
  void Finish(const ControlCall& call) noexcept;
  void AppendFacts(std::vector<int64_t>* facts) const;

  // ---- KVTransfer.
  Result<ReceiveMap> DisaggPrepareRecv(int64_t seq_id, int64_t count) override;
  Status DisaggCommitRecv(uint64_t epoch, int64_t n) override;
  Status DisaggCancelRecv(uint64_t epoch) override;
  Result<ReceiveView> View(uint64_t epoch, int64_t layer, const ReceivePart& part) override;
  Status Complete(uint64_t epoch, int64_t layer, const ReceivePart& part, uint32_t digest) override;
  Status FailReceive(uint64_t epoch, const Status& why) override;
  Result<ReceiveProgress> GetReceiveProgress(uint64_t epoch) const override;
  Status WaitReceived(uint64_t epoch, int64_t n, Clock& clock, int64_t until_ns) const override;
  Status SetLayerSink(std::shared_ptr<LayerSink> sink) override;
  Status DisaggMarkSend(int64_t seq_id, int64_t begin, std::span<const ReceiveMap> maps,
                        int64_t peer, int64_t rank, int64_t first_row) override;
  Status DisaggUnmarkSend(int64_t seq_id) override;
  Result<int64_t> DisaggDetachSend(int64_t seq_id) override;
  Status DisaggFlushSend(int64_t seq_id) override;
  Result<SendProgress> GetSendProgress(int64_t seq_id) const override;

 private:
  using Receive = PendingReceives::Receive;
  // A recurrent layer's state, or one of several.
  struct Tensor {
    size_t part = 0;
    int64_t index = 0;  // in the part
    DType dtype = DType::kF32;
    std::vector<int64_t> shape{};

    int64_t elements() const { return TensorView(nullptr, dtype, shape).element_count(); }
    // The same memory as a state, and as a row of one head.
    TensorView StateIn(const void* memory) const;
    LayerKV RowIn(std::byte* memory) const;
  };
  // The states of the recurrent parts, in the order in which chunks have them.
  struct States {
    std::vector<Tensor> tensors{};
    uint64_t layout = 0;  // equal for equal states, computed by equal kernels
  };
  static States StatesOfParts(const CompositeState::Parts& parts);
  std::vector<TransferLayer> StateLayers() const;

  int64_t LengthOf(int64_t seq_id) const;
  Status RequireIdle(const char* call) const;
  // BadState for parts whose tokens no map can describe.
  Status RequireMappable(const char* call) const;
  Status PlanImport(PlannedParts& parts, const Receive& receive, int64_t position) const;

  Status CheckMap(int64_t seq_id, int64_t begin, std::span<const ReceiveMap> maps,
                  int64_t rank) const;
  void SendStates(SendMark* mark) noexcept;
  Status SendStatesAt(SendMark* mark, int64_t position);
  void StopTokens(int64_t seq_id) noexcept;
  void DropMark(int64_t seq_id, const char* why) noexcept {
    marks_.Stop(marks_.IndexOf(seq_id), why);
  }

  const CompositeState& state_;
  const CompositeState::Parts& parts_;
  const std::span<PlannedState* const> planned_;
  const CallGate& gate_;
  KVTransfer* const attention_;  // null without an attention part
  const int64_t attention_layers_;
  const States states_;

  bool in_forward_ = false;
  SendMarks marks_;
  PendingReceives receives_;  // without an attention part it numbers the epochs
};

}  // namespace quire

#endif  // QUIRE_KV_COMPOSITE_JOINT_TRANSFER_H_
