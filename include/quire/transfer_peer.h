// A connection that carries keys and values between caches of two processes, in both directions,
// over TCP, shared memory or UCX. docs/transfer.md has both halves by example.
//
//   receiver                              sender
//   SetReceiver(cache.transfer())         SetLayerSink(channel); channel->Connect(0, peer)
//   Request(job, map)        --job-->     request = NextRequest(...); DisaggMarkSend(.., map, 0)
//   WaitReceived(epoch, n)  <--parts--    forwards
#ifndef QUIRE_TRANSFER_PEER_H_
#define QUIRE_TRANSFER_PEER_H_

#include <chrono>
#include <cstdint>
#include <functional>
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
  // What both sides must have, without sending it. It authenticates the opening; what is sent is
  // neither encrypted nor signed. This, or TLS, is needed for addresses that other machines reach.
  std::string secret{};
  // TLS over TCP, between sides whose certificates an authority in the CA file signed. The files
  // are PEM; all or none. The listener's certificate must be tls_server_name's; "": that of the
  // address that is connected to. A listener reads its files once, a connection each time.
  std::string tls_ca_file{}, tls_cert_file{}, tls_key_file{}, tls_server_name{};
  // CachePassport of the caches of this side. The other side's must be equal but for the number of
  // heads, which may be a multiple, and block_tokens.
  Passport passport{};
  std::chrono::nanoseconds connect_timeout = std::chrono::seconds(2);
  std::chrono::nanoseconds heartbeat = std::chrono::milliseconds(500);
  std::chrono::nanoseconds dead_after = std::chrono::seconds(3);  // without a sign of life
  // How long a transfer lives without a renewal, which its receiver sends as long as it wants it.
  std::chrono::nanoseconds lease = std::chrono::seconds(30);
  // Bytes of parts on their way to this side, which the other one holds until they are taken here.
  // A receiver's staging memory must have room for a part: 1 MiB, or the window if that is less.
  int64_t window_bytes = int64_t{64} << 20;
  // Bytes of parts on their way from this side, however many the other one allows: they hold memory
  // here. A row must fit. 0: as many as window_bytes, but 64 MiB at least.
  int64_t send_bytes = 0;
  // How long a forward of this side waits for room in the other side's window before its mark ends.
  // A sender that has other work looks at send_room() first and lets such a prompt wait.
  std::chrono::nanoseconds send_wait = std::chrono::milliseconds(250);
  // TCP streams, 1 to 16, of a connection that this side opens; 1 with a listener of an older
  // Quire, over unix sockets and over UCX. A listener takes what the other side asks for.
  int64_t streams = 1;
};

// What a prompt is, for the process that is to compute it.
struct TransferJob {
  uint64_t id = 0;  // the receiver's choice; 0: none
  std::vector<int32_t> tokens{};
  // The tenant's salt, at most kSaltBytesMax bytes: keys of stores are made from it. It travels
  // only over TLS or a unix socket, or where both sides have shown the secret.
  std::string salt{};
  static constexpr int64_t kSaltBytesMax = 4096;
  // As the tokens are to be computed: window and sinks of SamplingOptions, LongRoPE's long factors.
  int64_t window = 0;
  int64_t sinks = 0;
  bool long_rope = false;
  // From the moment that it is sent, or received, on.
  int64_t deadline_ns = kNoDeadline;
  static constexpr int64_t kNoDeadline = INT64_MAX;
};

// A job with the reservation in which its tokens are wanted.
struct TransferRequest {
  TransferJob job{};
  ReceiveMap map{};
};

// What a process that computes for others says of itself, so that others can predict.
struct TransferLoad {
  int64_t queued_tokens = 0;  // that it has to compute before a job that comes now
  int64_t ns_per_token = 0;   // of prompts, as measured; 0: not yet
  bool operator==(const TransferLoad&) const = default;
};

struct TransferPeerStats {
  int64_t parts_sent = 0;
  int64_t parts_sent_again = 0;  // that arrived damaged
  int64_t bytes_sent = 0;        // of rows, without headers
  int64_t parts_received = 0, bytes_received = 0;
  int64_t sends_open = 0, receives_open = 0;  // transfers from here, and to here
  int64_t streams = 1;                        // that carry the connection
};

// One connection. As a sink it sends what was asked for over it, whatever number of a peer a range
// has; a call waits while the window is full, for send_wait at most. All calls from any thread.
class TransferPeer : public LayerSink {
 public:
  // "ADDRESS:PORT", numeric or "localhost": TCP. "unix:PATH": shared memory. "ucx:ADDRESS:PORT":
  // UCX, by libquire_ucx.so. Returns when both sides have compared passports. Unavailable, Timeout;
  // Incompatible with the field and both values; Remote with the other's reason; BadArgument.
  static Result<std::shared_ptr<TransferPeer>> Connect(const std::string& endpoint,
                                                       const TransferPeerOptions& options);

  virtual const std::string& endpoint() const = 0;
  // Ok while the connection is open; then why it is not.
  virtual Status status() const = 0;
  virtual TransferPeerStats stats() const = 0;
  // `wake` is called, from the connection's thread, after a request or a load has come, a request
  // has ended, the window has room again, and the connection is over; several may be one call. It
  // may call this peer, but for SetWake, and must not wait for a thread that does. After SetWake
  // has returned, the one before is not called any more. What happened before is told to nobody:
  // look.
  virtual void SetWake(std::function<void()> wake) = 0;
  // Tells the other side how busy this one is, 20 times a second at most. The connection's status.
  virtual Status SetLoad(const TransferLoad& load) = 0;
  // What the other side has said last.
  virtual TransferLoad load() const = 0;
  // Tells the other side. Transfers end with Cancelled, waiting calls with Closed. Twice is fine.
  virtual void Close() noexcept = 0;

  // ---- Receiving
  // Where parts go; it must live until SetReceiver(nullptr), which ends all transfers to here.
  // BadState if another one is set, BadArgument if its staging memory is too small for a part.
  virtual Status SetReceiver(KVTransfer* receiver) = 0;
  // Asks for the map's tokens. When the connection is lost or the job's deadline is over, the
  // reservation fails (FailReceive), which WaitReceived tells. A reservation that is committed or
  // cancelled ends its transfer within a heartbeat, at once by Cancel.
  // BadState without a receiver, BadArgument for a salt over a connection that carries none,
  // TooLarge for a job or map of more than a frame, or a salt of more than kSaltBytesMax; the
  // connection's status.
  virtual Status Request(const TransferJob& job, const ReceiveMap& map) = 0;
  // The sender is told, and why; nothing more arrives for the epoch. NotFound; BadArgument for an
  // ok status.
  virtual Status Cancel(uint64_t epoch, const Status& why) = 0;

  // ---- Sending
  // The oldest request that no call has returned; none until until_ns of `clock`. The connection's
  // status.
  virtual Result<std::optional<TransferRequest>> NextRequest(Clock& clock, int64_t until_ns) = 0;
  // Ok while the epoch's transfer from here is open; then why it ended, as far as that is known
  // still; NotFound. So a job that was cancelled leaves a queue before it is marked.
  virtual Status SendStatus(uint64_t epoch) const = 0;
  // Bytes of rows that can be sent now without waiting.
  virtual int64_t send_room() const = 0;
  // Ends a request that is not going to be computed; the receiver learns why. NotFound; BadArgument
  // for an ok status.
  virtual Status Refuse(uint64_t epoch, const Status& why) = 0;
};

struct TransferListenerOptions {
  std::string endpoint = "127.0.0.1:0";  // as TransferPeer::Connect; port 0: any that is free
  TransferPeerOptions peer{};
  int64_t peers_max = 64;  // connections at a time; one that is not open yet may go for the next
  // Called from the listener's thread for each connection that is refused, with the reason, which
  // has no line breaks. It must not wait, and must not call the listener. Null: nothing is called.
  std::function<void(const Status& why)> on_refused{};
};

// Calls from any thread.
class TransferListener {
 public:
  // BadArgument for options out of range, files of no use and addresses that need a secret or TLS;
  // Unavailable when the address cannot be had.
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
