// The KVTransfer of a CompositeState. Attention layers' tokens go as their cache sends them; the
// states of recurrent layers follow as layers behind those, of one head and of one row: that of the
// last token before the state. So a channel needs to know nothing of states (docs/transfer.md).
//
// A state exists where a forward of the sender ended. There it is given to the sink, after all
// parts have ended the forward, and the receiver keeps the newest; its sequence stays as it was
// until DisaggCommitRecv, when its attention part takes over the tokens and the recurrent parts
// import the states, together or not at all.
#ifndef QUIRE_KV_COMPOSITE_JOINT_TRANSFER_H_
#define QUIRE_KV_COMPOSITE_JOINT_TRANSFER_H_

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "kv/chunks/kv_sections.h"
#include "kv/control/call_gate.h"
#include "kv/control/control_call.h"
#include "kv/transfer/slot_runs.h"
#include "quire/composite_state.h"
#include "quire/kv_transfer.h"

namespace quire {

class JointTransfer final : public KVTransfer {
 public:
  // The composite's parts and its gate, which outlive this.
  JointTransfer(const CompositeState::Parts& parts, std::span<PlannedState* const> planned,
                const CallGate& gate);

  // ---- What the composite's own calls have to do with it.

  // BadState for what a sequence may not do while tokens are pending.
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
                        int64_t peer, int64_t rank) override;
  Status DisaggUnmarkSend(int64_t seq_id) override;
  Status DisaggFlushSend(int64_t seq_id) override;
  Result<SendProgress> GetSendProgress(int64_t seq_id) const override;

 private:
  // A recurrent layer's state, or one of several.
  struct Tensor {
    size_t part = 0;
    int64_t index = 0;  // in the part
    DType dtype = DType::kF32;
    std::vector<int64_t> shape{};
    int64_t bytes = 0;
  };
  // What of a tensor is there: of the last of `rows` tokens.
  struct Arrival {
    int64_t row = -1;  // that is written, or was
    bool complete = false;
    int64_t rows() const { return complete ? row + 1 : 0; }
  };
  struct Receive {
    int64_t seq_id = -1;
    int64_t first_position = 0;
    int64_t count = 0;
    std::unique_ptr<std::byte[]> memory;
    std::vector<Arrival> arrivals{};  // [tensor]
    Status failure{};
  };
  struct Mark {
    int64_t begin = 0;
    int64_t end = 0;
    uint64_t epoch = 0;
    int64_t peer = 0;
    SlotRuns slots{};
    int64_t sent = 0;  // the position whose states are sent; 0: none
    Status failure{};
    bool active() const { return failure.ok() && sent < end; }
  };
  using Receives = std::map<uint64_t, std::shared_ptr<Receive>>;

  const RecurrentState& first() const { return *parts_.recurrent.front(); }
  int64_t LengthOf(int64_t seq_id) const;
  // Zeroed, for one state of each tensor.
  std::unique_ptr<std::byte[]> AllocateStates() const;
  // The state in memory in which tensors lie one behind the other; as a row of one head.
  TensorView StateIn(std::byte* memory, size_t tensor) const;
  LayerKV RowIn(std::byte* memory, size_t tensor) const;
  std::vector<TensorView> StatesIn(std::byte* memory) const;

  Status RequireIdle(const char* call) const;
  Status PlanImport(PlannedParts& parts, const Receive& receive, int64_t position) const;
  int64_t PendingOf(int64_t seq_id) const;
  void EndReceiveOf(int64_t seq_id) noexcept;
  void EndReceive(uint64_t epoch) noexcept;
  std::shared_ptr<Receive> FindLocked(uint64_t epoch) const;
  Result<std::shared_ptr<Receive>> Require(const char* call, uint64_t epoch) const;
  Result<size_t> FindPart(const char* call, const Receive& receive, uint64_t epoch, int64_t layer,
                          const ReceivePart& part) const;
  Status RequireStates(uint64_t epoch, const Receive& receive, int64_t n) const;

  Status CheckMap(int64_t seq_id, int64_t begin, std::span<const ReceiveMap> maps,
                  int64_t rank) const;
  SendRecord RecordOf(int64_t seq_id, const Mark& mark, int64_t first, int64_t count) const;
  void SendStates(int64_t seq_id, Mark& mark) noexcept;
  Status SendStatesAt(int64_t seq_id, const Mark& mark, int64_t position);
  void Tell(int64_t seq_id, const Mark& mark, const Status& why) noexcept;
  void StopTokens(int64_t seq_id) noexcept;
  void DropMark(int64_t seq_id, const char* why) noexcept;

  const CompositeState::Parts& parts_;
  const std::span<PlannedState* const> planned_;
  const CallGate& gate_;
  KVTransfer* const attention_;  // null without an attention part
  const int64_t attention_layers_;
  std::vector<Tensor> tensors_;
  std::vector<size_t> offsets_;  // of tensors in memory, and its size
  uint64_t layout_ = 0;          // of the states

  bool in_forward_ = false;
  std::shared_ptr<LayerSink> sink_;
  std::map<int64_t, Mark> marks_;         // by sequence
  std::unique_ptr<std::byte[]> sending_;  // states on their way to the sink

  // Below: any thread, under the lock.
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  uint64_t next_epoch_ = 1;  // without an attention part, whose epochs are this one's else
  Receives receives_;
};

}  // namespace quire

#endif  // QUIRE_KV_COMPOSITE_JOINT_TRANSFER_H_
