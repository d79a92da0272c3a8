#include "kv/transfer/transfer_calls.h"

#include <utility>

#include "base/guard.h"

namespace quire {

template <typename F>
std::invoke_result_t<F> TransferCalls::Inside(const char* call, F&& body) const {
  return GuardEntry([&]() -> std::invoke_result_t<F> {
    QUIRE_RETURN_IF_ERROR(Open(call));
    struct Leave {
      const TransferCalls& state;
      ~Leave() { state.Close(); }
    } leave{*this};
    return body();
  });
}

// ---------------------------------------------------------------------- receiving

Result<ReceiveMap> TransferCalls::DisaggPrepareRecv(int64_t seq_id, int64_t count) {
  const char* const call = "DisaggPrepareRecv";
  return Inside(call, [&]() -> Result<ReceiveMap> {
    QUIRE_RETURN_IF_ERROR(RequireIdle(call));
    QUIRE_RETURN_IF_ERROR(RequireSequence(call, seq_id));
    return receiver_.Prepare(call, seq_id, count);
  });
}

Status TransferCalls::DisaggCommitRecv(uint64_t epoch, int64_t n) {
  const char* const call = "DisaggCommitRecv";
  return Inside(call, [&]() -> Status {
    // States are imported, pages are there already.
    if (n != 0 && receiver_.has_states()) QUIRE_RETURN_IF_ERROR(RequireIdle(call));
    return receiver_.Commit(call, epoch, n);
  });
}

Status TransferCalls::DisaggCancelRecv(uint64_t epoch) {
  const char* const call = "DisaggCancelRecv";
  return Inside(call, [&] { return receiver_.Cancel(call, epoch); });
}

// ---------------------------------------------------------------------- channels, any thread

Result<ReceiveView> TransferCalls::View(uint64_t epoch, int64_t layer, const ReceivePart& part) {
  return GuardEntry([&] { return receiver_.receives().View(epoch, layer, part); });
}

Status TransferCalls::Store(uint64_t epoch, int64_t layer, const ReceivePart& part,
                            const ReceiveView& view, std::optional<uint32_t> digest) {
  return GuardEntry([&] { return receiver_.receives().Store(epoch, layer, part, view, digest); });
}

Status TransferCalls::Complete(uint64_t epoch, int64_t layer, const ReceivePart& part) {
  return GuardEntry([&] { return receiver_.receives().Complete(epoch, layer, part); });
}

Status TransferCalls::SetStagingLimit(int64_t bytes) {
  return GuardEntry([&] { return receiver_.receives().SetStagingLimit(bytes); });
}

Status TransferCalls::FailReceive(uint64_t epoch, const Status& why) {
  return GuardEntry([&] { return receiver_.receives().Fail(epoch, why); });
}

Result<ReceiveProgress> TransferCalls::GetReceiveProgress(uint64_t epoch) const {
  return GuardEntry([&] { return receiver_.receives().Progress(epoch); });
}

Status TransferCalls::WaitReceived(uint64_t epoch, int64_t n, Clock& clock,
                                   int64_t until_ns) const {
  return GuardEntry([&] { return receiver_.receives().Wait(epoch, n, clock, until_ns); });
}

// ---------------------------------------------------------------------- sending

Status TransferCalls::SetLayerSink(std::shared_ptr<LayerSink> sink) {
  const char* const call = "SetLayerSink";
  return Inside(call, [&]() -> Status {
    QUIRE_RETURN_IF_ERROR(RequireIdle(call));
    return sender_.SetSink(std::move(sink));
  });
}

Status TransferCalls::DisaggMarkSend(int64_t seq_id, int64_t begin,
                                     std::span<const ReceiveMap> maps, int64_t peer, int64_t rank,
                                     int64_t first_row) {
  const char* const call = "DisaggMarkSend";
  return Inside(call, [&]() -> Status {
    QUIRE_RETURN_IF_ERROR(RequireIdle(call));
    QUIRE_RETURN_IF_ERROR(RequireSequence(call, seq_id));
    return sender_.Mark(seq_id, begin, maps, peer, rank, first_row);
  });
}

Status TransferCalls::DisaggUnmarkSend(int64_t seq_id) {
  const char* const call = "DisaggUnmarkSend";
  return Inside(call, [&]() -> Status {
    QUIRE_RETURN_IF_ERROR(RequireNotInForward(call, seq_id));
    return sender_.Unmark(call, seq_id);
  });
}

Result<int64_t> TransferCalls::DisaggDetachSend(int64_t seq_id) {
  const char* const call = "DisaggDetachSend";
  return Inside(call, [&]() -> Result<int64_t> {
    QUIRE_RETURN_IF_ERROR(RequireNotInForward(call, seq_id));
    return sender_.Detach(call, seq_id);
  });
}

Status TransferCalls::DisaggFlushSend(int64_t seq_id) {
  const char* const call = "DisaggFlushSend";
  return Inside(call, [&]() -> Status {
    QUIRE_RETURN_IF_ERROR(RequireIdle(call));
    QUIRE_RETURN_IF_ERROR(RequireSequence(call, seq_id));
    return sender_.Flush(call, seq_id);
  });
}

Result<SendProgress> TransferCalls::GetSendProgress(int64_t seq_id) const {
  const char* const call = "GetSendProgress";
  return Inside(call, [&]() -> Result<SendProgress> {
    QUIRE_RETURN_IF_ERROR(RequireSequence(call, seq_id));
    return sender_.Progress(call, seq_id);
  });
}

}  // namespace quire
