// CacheTransfer: the KVTransfer of a paged cache. It takes each call through the cache's gate,
// finds the sequence, and hands the call to the sender or the receiver, which it owns.
#ifndef QUIRE_KV_CACHE_CACHE_TRANSFER_H_
#define QUIRE_KV_CACHE_CACHE_TRANSFER_H_

#include <cstdint>
#include <memory>
#include <span>
#include <utility>

#include "kv/cache/counting_gate.h"
#include "kv/cache/kv_importer.h"
#include "kv/cache/kv_receiver.h"
#include "kv/cache/kv_sender.h"
#include "kv/cache/paged_sequences.h"
#include "kv/cache/window_book.h"
#include "kv/plan/forward_plan.h"
#include "quire/kv_transfer.h"
#include "quire/seams.h"
#include "quire/status.h"

namespace quire {

class CacheTransfer final : public KVTransfer {
 public:
  // All must outlive it. `runner` runs what Complete has to do, on any thread.
  CacheTransfer(const CountingGate& gate, PagedSequences& kv, KVImporter& importer,
                WindowBook& windows, std::shared_ptr<ParallelRunner> runner)
      : gate_(gate), kv_(kv), sender_(kv), receiver_(kv, importer, windows, std::move(runner)) {}

  KVSender& sender() { return sender_; }
  const KVSender& sender() const { return sender_; }
  KVReceiver& receiver() { return receiver_; }
  const KVReceiver& receiver() const { return receiver_; }
  // Every mark and every reservation ends; sinks hear of it. `plan`: of the open forward or the
  // last one. REQUIRES: the sequences are still there.
  void Clear(const ForwardPlan& plan) noexcept;

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
  KVSender sender_;
  KVReceiver receiver_;
};

}  // namespace quire

#endif  // QUIRE_KV_CACHE_CACHE_TRANSFER_H_
