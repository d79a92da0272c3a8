#include "kv/cache/cache_transfer.h"

#include <string>
#include <utility>

#include "base/guard.h"

namespace quire {

CacheTransfer::CacheTransfer(const CountingGate& gate, PagedSequences& kv, KVImporter& importer,
                             WindowBook& windows, std::shared_ptr<ParallelRunner> runner)
    : TransferCalls(receiver_, sender_),
      gate_(gate),
      kv_(kv),
      pages_(kv, importer, windows, std::move(runner)),
      receiver_(std::vector<ReceivingPart*>{&pages_}),
      rows_(kv, sender_),
      sender_(std::vector<SendingPart*>{&rows_}) {
  pages_.SetReceiver(&receiver_);
}

Status CacheTransfer::Open(const char* call) const {
  QUIRE_RETURN_IF_ERROR(gate_.Open(call));
  if (!rows_.is_part()) return Status();
  gate_.Close();
  return Status(StatusCode::kBadState,
                std::string(call) +
                    ": this cache is a part of a CompositeState; call that state's transfer()");
}

// ---------------------------------------------------------------------- as a part

Result<ReservePlan> CacheTransfer::PlanReserve(const char* call, int64_t seq_id, int64_t count) {
  QUIRE_RETURN_IF_ERROR(gate_.Open(call));
  auto planned = GuardEntry([&] { return pages_.PlanReserve(call, seq_id, count); });
  if (!planned.ok()) gate_.Close();
  return planned;
}

void CacheTransfer::CommitReserve(const ReceiveShare& share) noexcept {
  pages_.CommitReserve(share);
  gate_.Close();
}

Status CacheTransfer::PlanTake(const char* call, const ReceiveShare& share, int64_t n) {
  QUIRE_RETURN_IF_ERROR(gate_.Open(call));
  Status planned = pages_.PlanTake(call, share, n);
  if (!planned.ok()) gate_.Close();
  return planned;
}

void CacheTransfer::CommitTake() noexcept {
  pages_.CommitTake();
  gate_.Close();
}

void CacheTransfer::DropPlanned() noexcept {
  pages_.DropPlanned();
  gate_.Close();
}

uint64_t CacheTransfer::SendLayout(int64_t seq_id) const {
  const auto lock = gate_.Lock();
  return rows_.SendLayout(seq_id);
}

Status CacheTransfer::CheckHeld(const char* call, int64_t seq_id, int64_t begin,
                                int64_t end) const {
  const auto lock = gate_.Lock();
  return rows_.CheckHeld(call, seq_id, begin, end);
}

int64_t CacheTransfer::SendableLength(int64_t seq_id) const {
  const auto lock = gate_.Lock();
  return rows_.SendableLength(seq_id);
}

Status CacheTransfer::Send(SendMark* mark, int64_t begin, int64_t end) {
  return gate_.EnterAlone("DisaggFlushSend", [&] { return rows_.Send(mark, begin, end); });
}

}  // namespace quire
