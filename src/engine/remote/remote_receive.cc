#include "engine/remote/remote_receive.h"

#include <utility>

#include "base/check.h"

namespace quire {

RemoteReceive::RemoteReceive(KVTransfer* transfer, std::shared_ptr<TransferPeer> peer,
                             int64_t sequence_id, const ReceiveMap& map)
    : transfer_(transfer),
      peer_(std::move(peer)),
      sequence_id_(sequence_id),
      epoch_(map.epoch),
      first_(map.first_position),
      count_(map.count),
      unwanted_(StatusCode::kCancelled, "the receiver cancelled it") {}

Result<std::unique_ptr<RemoteReceive>> RemoteReceive::Start(KVTransfer* transfer,
                                                            std::shared_ptr<TransferPeer> peer,
                                                            int64_t sequence_id, int64_t count,
                                                            const TransferJob& job) {
  QUIRE_ASSIGN_OR_RETURN(const ReceiveMap map, transfer->DisaggPrepareRecv(sequence_id, count));
  QUIRE_CHECK(map.count == count) << "sequence " << sequence_id;
  std::unique_ptr<RemoteReceive> receive;
  try {
    receive.reset(new RemoteReceive(transfer, std::move(peer), sequence_id, map));
  } catch (const std::bad_alloc&) {
    const Status cancelled = transfer->DisaggCancelRecv(map.epoch);
    QUIRE_CHECK(cancelled.ok()) << cancelled.ToString();
    throw;
  }
  QUIRE_RETURN_IF_ERROR(receive->peer_->Request(job, map));
  return receive;
}

RemoteReceive::~RemoteReceive() {
  if (is_over_) return;
  // The cache first: from then on nothing that arrives is of any use. A peer that is gone, or does
  // not know the job, has no need to be told.
  const Status cancelled = transfer_->DisaggCancelRecv(epoch_);
  QUIRE_CHECK(cancelled.ok()) << cancelled.ToString();
  static_cast<void>(peer_->Cancel(epoch_, unwanted_));
}

Result<RemoteReceive::Progress> RemoteReceive::Poll() const {
  QUIRE_CHECK(!is_over_);
  QUIRE_ASSIGN_OR_RETURN(const ReceiveProgress progress, transfer_->GetReceiveProgress(epoch_));
  return Progress{.complete = progress.complete, .failure = progress.failure};
}

// A peer that is gone, or has ended the job itself, has no need to be told.
void RemoteReceive::TellEnd(const Status& why) noexcept {
  QUIRE_CHECK(!is_over_);
  static_cast<void>(peer_->Cancel(epoch_, why));
}

void RemoteReceive::Await(Clock& clock, int64_t until_ns) const {
  QUIRE_CHECK(!is_over_);
  // What it returns is what Poll tells.
  static_cast<void>(transfer_->WaitReceived(epoch_, count_, clock, until_ns));
}

Status RemoteReceive::Finish(int64_t n) {
  QUIRE_CHECK(!is_over_) << "a receive has one end";
  QUIRE_CHECK(n >= 0);
  QUIRE_CHECK(n <= count_);
  QUIRE_RETURN_IF_ERROR(transfer_->DisaggCommitRecv(epoch_, n));
  is_over_ = true;
  static_cast<void>(peer_->Cancel(epoch_, unwanted_));  // the peer need not send more of it
  return {};
}

}  // namespace quire
