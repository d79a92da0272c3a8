#include "kv/cache/cache_transfer.h"

#include <string>
#include <utility>

#include "base/guard.h"

namespace quire {

CacheTransfer::CacheTransfer(const CountingGate& gate, PagedSequences& kv, KVImporter& importer,
                             WindowBook& windows, std::shared_ptr<ParallelRunner> runner)
    : gate_(gate),
      kv_(kv),
      pages_(kv, importer, windows, std::move(runner)),
      receiver_(std::vector<ReceivingPart*>{&pages_}),
      rows_(kv, sender_),
      sender_(std::vector<SendingPart*>{&rows_}) {
  pages_.SetReceiver(&receiver_);
}

Status CacheTransfer::RequireAlone(const char* call) const {
  if (!rows_.is_part()) return Status();
  return Status(StatusCode::kBadState,
                std::string(call) +
                    ": this cache is a part of a CompositeState; call that state's transfer()");
}

// ---------------------------------------------------------------------- receiving

Result<ReceiveMap> CacheTransfer::DisaggPrepareRecv(int64_t seq_id, int64_t count) {
  const char* call = "DisaggPrepareRecv";
  return gate_.EnterAlone(call, [&]() -> Result<ReceiveMap> {
    QUIRE_RETURN_IF_ERROR(kv_.control.RequireIdle(call));
    QUIRE_RETURN_IF_ERROR(RequireAlone(call));
    return receiver_.Prepare(call, seq_id, count);
  });
}

Status CacheTransfer::DisaggCommitRecv(uint64_t epoch, int64_t n) {
  const char* call = "DisaggCommitRecv";
  return gate_.EnterAlone(call, [&] { return receiver_.Commit(call, epoch, n); });
}

Status CacheTransfer::DisaggCancelRecv(uint64_t epoch) {
  const char* call = "DisaggCancelRecv";
  return gate_.EnterAlone(call, [&] { return receiver_.Cancel(call, epoch); });
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

// ---------------------------------------------------------------------- sending

Status CacheTransfer::SetLayerSink(std::shared_ptr<LayerSink> sink) {
  const char* call = "SetLayerSink";
  return gate_.EnterAlone(call, [&]() -> Status {
    QUIRE_RETURN_IF_ERROR(kv_.control.RequireIdle(call));
    QUIRE_RETURN_IF_ERROR(RequireAlone(call));
    return sender_.SetSink(std::move(sink));
  });
}

Status CacheTransfer::DisaggMarkSend(int64_t seq_id, int64_t begin,
                                     std::span<const ReceiveMap> maps, int64_t peer, int64_t rank,
                                     int64_t first_row) {
  const char* call = "DisaggMarkSend";
  return gate_.EnterAlone(call, [&]() -> Status {
    QUIRE_RETURN_IF_ERROR(kv_.control.RequireIdle(call));
    QUIRE_RETURN_IF_ERROR(RequireAlone(call));
    QUIRE_RETURN_IF_ERROR(kv_.control.Find(call, seq_id).status());
    return sender_.Mark(seq_id, begin, maps, peer, rank, first_row);
  });
}

Status CacheTransfer::DisaggUnmarkSend(int64_t seq_id) {
  const char* call = "DisaggUnmarkSend";
  return gate_.EnterAlone(call, [&]() -> Status {
    QUIRE_RETURN_IF_ERROR(kv_.control.FindOutsideBatch(call, seq_id).status());
    return sender_.Unmark(call, seq_id);
  });
}

Result<int64_t> CacheTransfer::DisaggDetachSend(int64_t seq_id) {
  const char* call = "DisaggDetachSend";
  return gate_.EnterAlone(call, [&]() -> Result<int64_t> {
    QUIRE_RETURN_IF_ERROR(kv_.control.FindOutsideBatch(call, seq_id).status());
    return sender_.Detach(call, seq_id);
  });
}

Status CacheTransfer::DisaggFlushSend(int64_t seq_id) {
  const char* call = "DisaggFlushSend";
  return gate_.EnterAlone(call, [&]() -> Status {
    QUIRE_RETURN_IF_ERROR(kv_.control.RequireIdle(call));
    QUIRE_RETURN_IF_ERROR(kv_.control.Find(call, seq_id).status());
    return sender_.Flush(call, seq_id);
  });
}

Result<SendProgress> CacheTransfer::GetSendProgress(int64_t seq_id) const {
  const char* call = "GetSendProgress";
  return gate_.EnterAlone(call, [&]() -> Result<SendProgress> {
    QUIRE_RETURN_IF_ERROR(kv_.control.Find(call, seq_id).status());
    return sender_.Progress(call, seq_id);
  });
}

}  // namespace quire
