// Channels: how bytes get from a sender's LayerSink to a receiver's KVTransfer.
#ifndef QUIRE_TRANSFER_H_
#define QUIRE_TRANSFER_H_

#include <cstdint>
#include <memory>

#include "quire/kv_transfer.h"
#include "quire/seams.h"
#include "quire/status.h"

namespace quire {

// Between caches of one process: bytes are stored at the receiver, with the digest of the sender's
// rows, in OnLayerAppended, and completed in OnForwardEnded. Connect and Disconnect from any
// thread; several senders may share a channel, and do not wait for each other.
class LocalChannel : public LayerSink {
 public:
  // `receiver` must live until Disconnect. BadArgument for null or a number that is taken.
  virtual Status Connect(int64_t peer, KVTransfer* receiver) = 0;
  // What was given for it and has not ended is dropped; later ranges to it are Unavailable.
  // NotFound.
  virtual Status Disconnect(int64_t peer) = 0;
};

std::shared_ptr<LocalChannel> CreateLocalChannel();

}  // namespace quire

#endif  // QUIRE_TRANSFER_H_
