// Transfer between processes: one connection carries keys and values from the caches of one process
// to those of another one, over TCP or shared memory (docs/transfer.md has both halves by example,
// docs/formats/transfer-wire.md the bytes).
//
//   receiver                                         sender
//   peer = TransferPeer::Connect(endpoint)           listener = TransferListener::Start(options)
//   peer->SetReceiver(cache.transfer())              peer = listener->Accept(...)
//   map = DisaggPrepareRecv(seq, n)                  channel->Connect(0, peer);
//   SetLayerSink(channel) peer->Request(job, map)                --job-->  request =
//   peer->NextRequest(...)
//                                                    DisaggMarkSend(seq, begin, {request.map}, 0)
//   WaitReceived(map.epoch, n)           <--parts--  forwards
//   DisaggCommitRecv(map.epoch, n)
//
// Either side may listen, and one connection may carry both directions.
#ifndef QUIRE_TRANSFER_PEER_H_
#define QUIRE_TRANSFER_PEER_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "quire/chunk.h"
#include "quire/kv_transfer.h"
#include "quire/seams.h"
#include "quire/status.h"

namespace quire {

struct TransferPeerOptions {
  // What both sides must have, without sending it. Needed for addresses other than loopback and
  // unix sockets. It authenticates the opening; what is sent is neither encrypted nor signed.
  std::string secret{};
  // CachePassport of the caches of this side. The other side's must be equal but for the number of
  // heads, which may be a multiple, and block_tokens.
  Passport passport{};
  std::chrono::nanoseconds connect_timeout = std::chrono::seconds(2);
  std::chrono::nanoseconds heartbeat = std::chrono::milliseconds(500);
  std::chrono::nanoseconds dead_after = std::chrono::seconds(3);  // without a sign of life
  // How long a transfer lives without a renewal, which its receiver sends as long as it wants it.
  std::chrono::nanoseconds lease = std::chrono::seconds(30);
  // Bytes of parts on their way to this side: what the other one holds until they are taken here.
  int64_t window_bytes = int64_t{64} << 20;
};

// What a prompt is, for the process that is to compute it.
struct TransferJob {
  uint64_t id = 0;  // the receiver's choice; 0: none
  std::vector<int32_t> tokens{};
  Digest salt{};  // of the tenant's salt, which does not travel
  // From the moment that it is sent, or received, on.
  int64_t deadline_ns = kNoDeadline;
  static constexpr int64_t kNoDeadline = INT64_MAX;
};

// A job with the reservation in which its tokens are wanted.
struct TransferRequest {
  TransferJob job{};
  ReceiveMap map{};
};

struct TransferPeerStats {
  int64_t parts_sent = 0;
  int64_t parts_sent_again = 0;  // that arrived damaged
  int64_t bytes_sent = 0;        // of rows, without headers
  int64_t parts_received = 0;
  int64_t bytes_received = 0;
  int64_t sends_open = 0;     // transfers from here
  int64_t receives_open = 0;  // transfers to here
};

// One connection. As a sink it sends what was asked for over it, whatever number of a peer a range
// has; a call waits while the window is full, until the transfer is over at the latest. All calls
// from any thread.
class TransferPeer : public LayerSink {
 public:
  // "ADDRESS:PORT" with a numeric address or "localhost": TCP. "unix:PATH": shared memory, with the
  // socket to open it. Returns when both sides have compared passports. Unavailable, Timeout;
  // Incompatible with the first field that differs and both values; Remote with the other side's
  // reason; BadArgument.
  static Result<std::shared_ptr<TransferPeer>> Connect(const std::string& endpoint,
                                                       const TransferPeerOptions& options);

  virtual const std::string& endpoint() const = 0;
  // Ok while the connection is open; then why it is not.
  virtual Status status() const = 0;
  virtual TransferPeerStats stats() const = 0;
  // Tells the other side. Its transfers end with Cancelled, waiting calls with Closed. Twice is
  // fine.
  virtual void Close() noexcept = 0;

  // ---- Receiving
  // Where parts go; it must live until SetReceiver(nullptr), which ends all transfers to here.
  // BadState if another one is set.
  virtual Status SetReceiver(KVTransfer* receiver) = 0;
  // Asks for the map's tokens. When the connection is lost or the job's deadline is over, the
  // reservation fails (FailReceive), which WaitReceived tells. A reservation that is committed or
  // cancelled ends its transfer within a heartbeat, at once by Cancel.
  // BadState without a receiver, TooLarge for a job or map of more than a frame, the connection's
  // status.
  virtual Status Request(const TransferJob& job, const ReceiveMap& map) = 0;
  // The sender is told; nothing more arrives for the epoch. NotFound.
  virtual Status Cancel(uint64_t epoch) = 0;

  // ---- Sending
  // The oldest request that no call has returned; none until until_ns of `clock`. The connection's
  // status.
  virtual Result<std::optional<TransferRequest>> NextRequest(Clock& clock, int64_t until_ns) = 0;
  // Ends a request that is not going to be computed; the receiver learns why. NotFound.
  virtual Status Refuse(uint64_t epoch, const Status& why) = 0;
};

struct TransferListenerOptions {
  std::string endpoint = "127.0.0.1:0";  // as TransferPeer::Connect; port 0: any that is free
  TransferPeerOptions peer{};
  int64_t peers_max = 64;  // connections at a time
};

// Calls from any thread.
class TransferListener {
 public:
  // BadArgument for options out of range and addresses that need a secret; Unavailable when the
  // address cannot be had.
  static Result<std::unique_ptr<TransferListener>> Start(const TransferListenerOptions& options);
  virtual ~TransferListener() = default;  // as Close

  virtual const std::string& endpoint() const = 0;  // with the port that was taken
  // The next connection whose opening is done; none until until_ns of `clock`. Closed.
  virtual Result<std::optional<std::shared_ptr<TransferPeer>>> Accept(Clock& clock,
                                                                      int64_t until_ns) = 0;
  // Connections that were refused, and why the last one was.
  virtual int64_t refused() const = 0;
  virtual Status last_refusal() const = 0;
  // Connections that Accept returned go on. Twice is fine.
  virtual void Close() noexcept = 0;
};

// A sink whose peers are sinks: ranges for peer `peer` of DisaggMarkSend go to the connection of
// that number. All calls from any thread.
class RemoteChannel : public LayerSink {
 public:
  // BadArgument for null or a number that is taken.
  virtual Status Connect(int64_t peer, std::shared_ptr<LayerSink> connection) = 0;
  // NotFound.
  virtual Status Disconnect(int64_t peer) = 0;
};

std::shared_ptr<RemoteChannel> CreateRemoteChannel();

}  // namespace quire

#endif  // QUIRE_TRANSFER_PEER_H_
