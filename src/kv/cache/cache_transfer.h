// CacheTransfer: the KVTransfer of a paged cache. It takes each call through the cache's gate,
// finds the sequence, and hands the call to the sender or the receiver.
#ifndef QUIRE_KV_CACHE_CACHE_TRANSFER_H_
#define QUIRE_KV_CACHE_CACHE_TRANSFER_H_

#include <cstdint>
#include <memory>
#include <span>

#include "kv/cache/counting_gate.h"
#include "kv/cache/kv_receiver.h"
#include "kv/cache/kv_sender.h"
#include "kv/cache/paged_sequences.h"
#include "quire/kv_transfer.h"
#include "quire/status.h"

namespace quire {

class CacheTransfer final : public KVTransfer {
 public:
  // All must outlive it.
  CacheTransfer(const CountingGate& gate, const PagedSequences& kv, KVSender& sender,
                KVReceiver& receiver)
      : gate_(gate), kv_(kv), sender_(sender), receiver_(receiver) {}

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
  const CountingGate& gate_;
  const PagedSequences& kv_;
  KVSender& sender_;
  KVReceiver& receiver_;
};

}  // namespace quire

#endif  // QUIRE_KV_CACHE_CACHE_TRANSFER_H_
