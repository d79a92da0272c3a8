#include "kv/cache/cache_transfer.h"

#include <cstddef>
#include <utility>

#include "base/guard.h"

namespace quire {

void CacheTransfer::Clear(const ForwardPlan& plan) noexcept {
  sender_.FinishForward(plan, SendMarks::Outcome::kAborted);
  for (size_t i = 0; i < kv_.control.table().entries().size(); ++i)
    sender_.Stop(static_cast<int32_t>(i), "the cache was cleared");
  receiver_.Clear();
}

// ---------------------------------------------------------------------- receiving

Result<ReceiveMap> CacheTransfer::DisaggPrepareRecv(int64_t seq_id, int64_t count) {
  const char* call = "DisaggPrepareRecv";
  return gate_.EnterAlone(call, [&]() -> Result<ReceiveMap> {
    QUIRE_RETURN_IF_ERROR(kv_.control.RequireIdle(call));
    QUIRE_ASSIGN_OR_RETURN(const int32_t index, kv_.control.Find(call, seq_id));
    return receiver_.Prepare(call, index, count);
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

// From any thread: not through the gate.

Result<ReceiveView> CacheTransfer::View(uint64_t epoch, int64_t layer, const ReceivePart& part) {
  return GuardEntry([&] { return receiver_.receives().View(epoch, layer, part); });
}

Status CacheTransfer::Complete(uint64_t epoch, int64_t layer, const ReceivePart& part,
                               uint32_t digest) {
  return GuardEntry([&] { return receiver_.receives().Complete(epoch, layer, part, digest); });
}

Status CacheTransfer::FailReceive(uint64_t epoch, const Status& why) {
  return GuardEntry([&] { return receiver_.receives().Fail(epoch, why); });
}

Result<ReceiveProgress> CacheTransfer::GetReceiveProgress(uint64_t epoch) const {
  return GuardEntry([&] { return receiver_.receives().Progress(epoch); });
}

Status CacheTransfer::WaitReceived(uint64_t epoch, int64_t n, Clock& clock,
                                   int64_t until_ns) const {
  return GuardEntry([&] { return receiver_.receives().Wait(epoch, n, clock, until_ns); });
}

// ---------------------------------------------------------------------- sending

Status CacheTransfer::SetLayerSink(std::shared_ptr<LayerSink> sink) {
  const char* call = "SetLayerSink";
  return gate_.EnterAlone(call, [&]() -> Status {
    QUIRE_RETURN_IF_ERROR(kv_.control.RequireIdle(call));
    return sender_.SetSink(std::move(sink));
  });
}

Status CacheTransfer::DisaggMarkSend(int64_t seq_id, int64_t begin,
                                     std::span<const ReceiveMap> maps, int64_t peer, int64_t rank,
                                     int64_t first_row) {
  const char* call = "DisaggMarkSend";
  return gate_.EnterAlone(call, [&]() -> Status {
    QUIRE_RETURN_IF_ERROR(kv_.control.RequireIdle(call));
    QUIRE_ASSIGN_OR_RETURN(const int32_t index, kv_.control.Find(call, seq_id));
    return sender_.Mark(index, begin, maps, peer, rank, first_row);
  });
}

Status CacheTransfer::DisaggUnmarkSend(int64_t seq_id) {
  const char* call = "DisaggUnmarkSend";
  return gate_.EnterAlone(call, [&]() -> Status {
    QUIRE_ASSIGN_OR_RETURN(const int32_t index, kv_.control.FindOutsideBatch(call, seq_id));
    return sender_.Unmark(call, index);
  });
}

Result<int64_t> CacheTransfer::DisaggDetachSend(int64_t seq_id) {
  const char* call = "DisaggDetachSend";
  return gate_.EnterAlone(call, [&]() -> Result<int64_t> {
    QUIRE_ASSIGN_OR_RETURN(const int32_t index, kv_.control.FindOutsideBatch(call, seq_id));
    return sender_.Detach(call, index);
  });
}

Status CacheTransfer::DisaggFlushSend(int64_t seq_id) {
  const char* call = "DisaggFlushSend";
  return gate_.EnterAlone(call, [&]() -> Status {
    QUIRE_RETURN_IF_ERROR(kv_.control.RequireIdle(call));
    QUIRE_ASSIGN_OR_RETURN(const int32_t index, kv_.control.Find(call, seq_id));
    return sender_.Flush(call, index);
  });
}

Result<SendProgress> CacheTransfer::GetSendProgress(int64_t seq_id) const {
  const char* call = "GetSendProgress";
  return gate_.EnterAlone(call, [&]() -> Result<SendProgress> {
    QUIRE_ASSIGN_OR_RETURN(const int32_t index, kv_.control.Find(call, seq_id));
    return sender_.Progress(call, index);
  });
}

}  // namespace quire
