// CacheTransfer: what of transfers is a paged cache's. Alone, it is the cache's KVTransfer, of
// which it has the receiver, the sender and the rules. As a part of a composite state, the cache
// receives what that state's receiver reserves, and sends what its sender has marked: these calls,
// too, come through the cache's gate, and those of KVTransfer are BadState.
#ifndef QUIRE_KV_CACHE_CACHE_TRANSFER_H_
#define QUIRE_KV_CACHE_CACHE_TRANSFER_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "kv/cache/counting_gate.h"
#include "kv/cache/kv_importer.h"
#include "kv/cache/kv_receiver.h"
#include "kv/cache/kv_sender.h"
#include "kv/cache/paged_sequences.h"
#include "kv/cache/window_book.h"
#include "kv/transfer/transfer_calls.h"
#include "kv/transfer/transfer_receiver.h"
#include "kv/transfer/transfer_sender.h"
#include "quire/kv_transfer.h"
#include "quire/seams.h"
#include "quire/status.h"

namespace quire {

class CacheTransfer final : public TransferCalls, public ReceivingPart, public SendingPart {
 public:
  // All must outlive it. `runner` runs what Complete has to do, on any thread.
  CacheTransfer(const CountingGate& gate, PagedSequences& kv, KVImporter& importer,
                WindowBook& windows, std::shared_ptr<ParallelRunner> runner);

  KVSender& sender() { return rows_; }
  const KVSender& sender() const { return rows_; }
  KVReceiver& receiver() { return pages_; }
  const KVReceiver& receiver() const { return pages_; }
  // Every mark and every reservation ends; sinks hear of it. REQUIRES: the sequences are still
  // there.
  void Clear() noexcept {
    rows_.Clear();
    pages_.Clear();
  }

  // ---- ReceivingPart, for the receiver of a composite state.
  std::vector<TransferLayer> receive_layers() override { return pages_.receive_layers(); }
  size_t receive_groups() const override { return pages_.receive_groups(); }
  void SetReceiver(TransferReceiver* receiver) noexcept override {
    pages_.SetReceiver(receiver == nullptr ? &receiver_ : receiver);
  }
  Result<ReservePlan> PlanReserve(const char* call, int64_t seq_id, int64_t count) override;
  void CommitReserve(const ReceiveShare& share) noexcept override;
  Status PlanTake(const char* call, const ReceiveShare& share, int64_t n) override;
  void CommitTake() noexcept override;
  void DropPlanned() noexcept override;

  // ---- SendingPart, for the sender of a composite state.
  std::vector<TransferLayer> send_layers() override { return rows_.send_layers(); }
  void SetSender(TransferSender* sender, int64_t first_layer) noexcept override {
    rows_.SetSender(sender, first_layer);
  }
  uint64_t SendLayout(int64_t seq_id) const override;
  bool binds_positions() const override { return rows_.binds_positions(); }
  Status CheckHeld(const char* call, int64_t seq_id, int64_t begin, int64_t end) const override;
  int64_t SendableLength(int64_t seq_id) const override;
  Status Send(SendMark* mark, int64_t begin, int64_t end) override;

 private:
  // ---- The rules of TransferCalls.
  Status Open(const char* call) const override;
  void Close() const noexcept override { gate_.Close(); }
  Status RequireIdle(const char* call) const override { return kv_.control.RequireIdle(call); }
  Status RequireSequence(const char* call, int64_t seq_id) const override {
    return kv_.control.Find(call, seq_id).status();
  }
  Status RequireNotInForward(const char* call, int64_t seq_id) const override {
    return kv_.control.FindOutsideBatch(call, seq_id).status();
  }

  const CountingGate& gate_;
  const PagedSequences& kv_;
  KVReceiver pages_;
  TransferReceiver receiver_;  // of pages_ alone
  KVSender rows_;
  TransferSender sender_;  // of rows_ alone
};

}  // namespace quire

#endif  // QUIRE_KV_CACHE_CACHE_TRANSFER_H_
