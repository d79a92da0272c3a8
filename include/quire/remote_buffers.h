// Lookup buffers and stores between processes: one process serves them, any number of others use
// them over TCP or a unix socket. docs/buffers.md says what holds when a side dies.
#ifndef QUIRE_REMOTE_BUFFERS_H_
#define QUIRE_REMOTE_BUFFERS_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "quire/lookup_buffer.h"
#include "quire/status.h"
#include "quire/store_buffer.h"

namespace quire {

// An endpoint is "ADDRESS:PORT", with a numeric address or "localhost" ("[::1]:PORT" for IPv6), or
// "unix:PATH".
struct BufferServerOptions {
  std::string endpoint = "127.0.0.1:0";  // port 0: any that is free
  // What clients must show that they have, without sending it. Needed for addresses other than
  // loopback and unix sockets. What is sent is neither encrypted nor signed.
  std::string secret{};
  std::optional<LookupBufferOptions> lookup{};  // at least one of the two
  std::optional<StoreBufferOptions> store{};
  int64_t connections_max = 1024;
  int64_t requests_max = 64;                   // unfinished ones of a connection
  int64_t query_bytes_max = int64_t{1} << 24;  // tokens and roi of a query: a million ids
  std::chrono::nanoseconds heartbeat = std::chrono::milliseconds(500);
  std::chrono::nanoseconds dead_after = std::chrono::seconds(3);  // without a sign of life
  // How long an entry may be on its way without a byte taken or an acknowledgement.
  std::chrono::nanoseconds lease = std::chrono::seconds(30);
};

// Owns the buffers that it serves; this process uses them directly. Calls from any thread.
class BufferServer {
 public:
  // BadArgument for options out of range and addresses that need a secret, Unavailable when the
  // address cannot be had.
  static Result<std::unique_ptr<BufferServer>> Start(const BufferServerOptions& options);
  virtual ~BufferServer() = default;  // as Close

  virtual const std::string& endpoint() const = 0;  // with the port that was taken
  virtual LookupBuffer* lookup() = 0;               // null: not served
  virtual StoreBuffer* store() = 0;                 // null: not served
  virtual int64_t connections() const = 0;          // that have said hello

  // Closes the buffers, tells the clients, and ends; waits for no peer. Twice is fine.
  virtual void Close() noexcept = 0;
};

struct RemoteBufferOptions {
  std::string secret{};  // the server's; a server that does not have it is refused
  std::chrono::nanoseconds connect_timeout = std::chrono::seconds(2);
  int64_t message_bytes_max = int64_t{1} << 34;  // of an entry or tensor that is received
};

// The consumer's side: Insert is WrongRole. Calls are the buffer's own, and Unavailable when the
// server cannot be reached or died, Remote when it failed or took the bytes for malformed. A lost
// connection is opened again by the next call. used_bytes, capacity_bytes, size and waiting ask the
// server, and are 0 when it does not answer. A Handover is put back on the server when it fails or
// this side dies.
Result<std::unique_ptr<LookupBuffer>> ConnectLookupBuffer(const std::string& endpoint,
                                                          const RemoteBufferOptions& options = {});

// A store that others use too; Close ends this client only.
Result<std::unique_ptr<StoreBuffer>> ConnectStoreBuffer(const std::string& endpoint,
                                                        const RemoteBufferOptions& options = {});

}  // namespace quire

#endif  // QUIRE_REMOTE_BUFFERS_H_
