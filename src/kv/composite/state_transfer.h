// StateTransfer: what the recurrent parts of a composite state receive and send: their states, each
// of them a layer of one head and one row, that of the last token before the state
// (docs/transfer.md). A reservation takes nothing of the parts; when it is committed, they import
// the states, together or not at all. States are sent where a forward ended.
#ifndef QUIRE_KV_COMPOSITE_STATE_TRANSFER_H_
#define QUIRE_KV_COMPOSITE_STATE_TRANSFER_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "kv/control/control_call.h"
#include "kv/transfer/transfer_receiver.h"
#include "kv/transfer/transfer_sender.h"
#include "quire/attention_kv_cache.h"
#include "quire/composite_state.h"
#include "quire/tensor.h"

namespace quire {

// A recurrent layer's state, or one of several.
struct TransferredState {
  size_t part = 0;
  int64_t index = 0;  // in the part
  DType dtype = DType::kF32;
  std::vector<int64_t> shape{};

  int64_t elements() const { return TensorView(nullptr, dtype, shape).element_count(); }
  int64_t bytes() const { return elements() * DTypeBytes(dtype); }
  // The same memory as a state, and as a row of one head.
  TensorView StateIn(const void* memory) const;
  LayerKV RowIn(std::byte* memory) const;
};

class StateTransfer final : public ReceivingPart, public SendingPart {
 public:
  // The recurrent parts of a composite, of this library, and the same for control calls; both
  // outlive it.
  StateTransfer(const CompositeState::Parts& parts, std::span<PlannedState* const> planned);

  // ---- ReceivingPart.
  std::vector<TransferLayer> receive_layers() override;
  size_t receive_groups() const override { return 0; }
  void SetReceiver(TransferReceiver* /*receiver*/) noexcept override {}
  Result<ReservePlan> PlanReserve(const char* call, int64_t seq_id, int64_t count) override;
  void CommitReserve(const ReceiveShare& /*share*/) noexcept override {}
  Status PlanTake(const char* call, const ReceiveShare& share, int64_t n) override;
  void CommitTake() noexcept override;
  void DropPlanned() noexcept override { import_.reset(); }

  // ---- SendingPart.
  std::vector<TransferLayer> send_layers() override { return receive_layers(); }
  void SetSender(TransferSender* sender, int64_t first_layer) noexcept override {
    sender_ = sender;
    first_layer_ = first_layer;
  }
  uint64_t SendLayout(int64_t /*seq_id*/) const override { return layout_; }
  bool binds_positions() const override { return true; }
  // A state that is not held is told of when it is to be sent.
  Status CheckHeld(const char* /*call*/, int64_t /*seq_id*/, int64_t /*begin*/,
                   int64_t /*end*/) const override {
    return Status();
  }
  // 0 for a sequence with an uncommitted tree.
  int64_t SendableLength(int64_t seq_id) const override;
  Status Send(SendMark* mark, int64_t begin, int64_t end) override;

 private:
  int64_t largest_bytes() const;  // of a state
  // state_in(i): where the i'th state is.
  template <typename F>
  Status PlanImport(PlannedParts& parts, int64_t seq_id, int64_t position, F&& state_in) const;

  const CompositeState::Parts& parts_;
  const std::span<PlannedState* const> planned_;
  std::vector<TransferredState> states_;  // in the order in which chunks have them
  uint64_t layout_ = 0;                   // equal for equal states, computed by equal kernels
  TransferSender* sender_ = nullptr;
  int64_t first_layer_ = 0;
  std::optional<PlannedParts> import_;  // from PlanTake to its end
};

}  // namespace quire

#endif  // QUIRE_KV_COMPOSITE_STATE_TRANSFER_H_
