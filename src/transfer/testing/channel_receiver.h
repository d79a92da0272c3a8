// A receiver as a channel sees it: every call that a channel never makes is answered with an error.
#ifndef QUIRE_TRANSFER_TESTING_CHANNEL_RECEIVER_H_
#define QUIRE_TRANSFER_TESTING_CHANNEL_RECEIVER_H_

#include <cstdint>
#include <memory>
#include <span>

#include "quire/kv_transfer.h"

namespace quire {

class ChannelReceiver : public KVTransfer {
 public:
  Result<ReceiveMap> DisaggPrepareRecv(int64_t, int64_t) override { return Unasked(); }
  Status DisaggCommitRecv(uint64_t, int64_t) override { return Unasked(); }
  Status DisaggCancelRecv(uint64_t) override { return Unasked(); }
  Result<ReceiveProgress> GetReceiveProgress(uint64_t) const override { return Unasked(); }
  Status WaitReceived(uint64_t, int64_t, Clock&, int64_t) const override { return Unasked(); }
  Status SetStagingLimit(int64_t) override { return Unasked(); }
  Status SetLayerSink(std::shared_ptr<LayerSink>) override { return Unasked(); }
  Status DisaggMarkSend(int64_t, int64_t, std::span<const ReceiveMap>, int64_t, int64_t,
                        int64_t) override {
    return Unasked();
  }
  Status DisaggUnmarkSend(int64_t) override { return Unasked(); }
  Result<int64_t> DisaggDetachSend(int64_t) override { return Unasked(); }
  Status DisaggFlushSend(int64_t) override { return Unasked(); }
  Result<SendProgress> GetSendProgress(int64_t) const override { return Unasked(); }

 protected:
  virtual Status Unasked() const {
    return Status(StatusCode::kInternal, "a channel makes no control call");
  }
};

}  // namespace quire

#endif  // QUIRE_TRANSFER_TESTING_CHANNEL_RECEIVER_H_
