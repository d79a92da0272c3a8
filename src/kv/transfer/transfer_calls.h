// TransferCalls: the KVTransfer of a state, whatever parts the state has: it takes each call to the
// state's receiver or sender. The state has the rules: how a call gets inside, and which calls it
// allows at the moment.
//
// What channels call for a reservation may come from any thread and does not go through the gate;
// all other calls do.
#ifndef QUIRE_KV_TRANSFER_TRANSFER_CALLS_H_
#define QUIRE_KV_TRANSFER_TRANSFER_CALLS_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <type_traits>

#include "kv/transfer/transfer_receiver.h"
#include "kv/transfer/transfer_sender.h"
#include "quire/kv_transfer.h"
#include "quire/seams.h"
#include "quire/status.h"

namespace quire {

class TransferCalls : public KVTransfer {
 public:
  TransferCalls(const TransferCalls&) = delete;
  TransferCalls& operator=(const TransferCalls&) = delete;

  Result<ReceiveMap> DisaggPrepareRecv(int64_t seq_id, int64_t count) final;
  Status DisaggCommitRecv(uint64_t epoch, int64_t n) final;
  Status DisaggCancelRecv(uint64_t epoch) final;

  Result<ReceiveView> View(uint64_t epoch, int64_t layer, const ReceivePart& part) final;
  Status Store(uint64_t epoch, int64_t layer, const ReceivePart& part, const ReceiveView& view,
               std::optional<uint32_t> digest) final;
  Status Complete(uint64_t epoch, int64_t layer, const ReceivePart& part) final;
  Status FailReceive(uint64_t epoch, const Status& why) final;
  Result<ReceiveProgress> GetReceiveProgress(uint64_t epoch) const final;
  Status WaitReceived(uint64_t epoch, int64_t n, Clock& clock, int64_t until_ns) const final;
  StagingUse staging() const final { return receiver_.receives().staging(); }
  Status SetStagingLimit(int64_t bytes) final;

  Status SetLayerSink(std::shared_ptr<LayerSink> sink) final;
  Status DisaggMarkSend(int64_t seq_id, int64_t begin, std::span<const ReceiveMap> maps,
                        int64_t peer, int64_t rank, int64_t first_row) final;
  Status DisaggUnmarkSend(int64_t seq_id) final;
  Result<int64_t> DisaggDetachSend(int64_t seq_id) final;
  Status DisaggFlushSend(int64_t seq_id) final;
  Result<SendProgress> GetSendProgress(int64_t seq_id) const final;

 protected:
  // Those of the state, which may be made after this; they are not used here.
  TransferCalls(TransferReceiver& receiver, TransferSender& sender)
      : receiver_(receiver), sender_(sender) {}
  ~TransferCalls() override = default;

 private:
  // ---- The state's rules. `call` is the name for its message.
  // The call is inside from an Open that worked until Close. What follows is asked inside.
  virtual Status Open(const char* call) const = 0;
  virtual void Close() const noexcept = 0;
  // BadState while a forward is open.
  virtual Status RequireIdle(const char* call) const = 0;
  // UnknownSequence.
  virtual Status RequireSequence(const char* call, int64_t seq_id) const = 0;
  // That the sequence exists and no open forward sends for it. BadState also in any forward, if the
  // state does not know the forward's batch.
  virtual Status RequireNotInForward(const char* call, int64_t seq_id) const = 0;

  // Runs the body of a call inside. std::bad_alloc becomes OutOfMemory.
  template <typename F>
  std::invoke_result_t<F> Inside(const char* call, F&& body) const;

  TransferReceiver& receiver_;
  TransferSender& sender_;
};

}  // namespace quire

#endif  // QUIRE_KV_TRANSFER_TRANSFER_CALLS_H_
