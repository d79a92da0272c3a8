// TlsSession: TLS over a socket that never blocks, as the client or as the server. OpenSSL does the
// work; nothing of it is seen outside.
#ifndef QUIRE_NET_TLS_SESSION_H_
#define QUIRE_NET_TLS_SESSION_H_

#include <cstddef>
#include <memory>
#include <span>
#include <string>

#include "quire/status.h"

namespace quire {

struct TlsOptions {
  // What messages begin the names of the members below with: "redis.tls" makes
  // "redis.tls_ca_file".
  std::string prefix = "tls";
  // The side that accepts. It speaks TLS 1.3 alone, and resumes no session.
  bool is_server = false;
  bool verify = true;     // false: anybody may be the other side
  std::string ca_file{};  // PEM: the authorities that are trusted; "": those of the system
  std::string cert_file{}, key_file{};  // PEM, of this side: both or none. A server needs them
  std::string server_name{};            // of a client: whose certificate it must be; "": the host's
};

// What a side reads at most before the other one is known.
inline constexpr size_t kTlsHandshakeBytesMax = size_t{64} << 10;

// From one thread at a time.
class TlsSession {
 public:
  virtual ~TlsSession() = default;

  // Goes on with the handshake; true when it is done. Unavailable: the other side is not the
  // trusted one, does not trust us, or speaks no TLS.
  virtual Result<bool> Handshake() = 0;
  // Takes bytes to be sent, in order: how many. 0: none now, those it has taken must go first.
  virtual Result<size_t> Write(std::span<const std::span<const std::byte>> spans) = 0;
  // Sends what it has taken, as far as the socket lets it: whether that was all.
  virtual Result<bool> Flush() = 0;
  // Bytes received; 0: none now. Unavailable at the end of the stream.
  virtual Result<size_t> Read(std::span<std::byte> into) = 0;

  // It waits until the socket can be written to.
  virtual bool wants_write() const = 0;
  // Bytes for Read are here already: the socket will not tell of them.
  virtual bool has_buffered() const = 0;
  // Something has come that is no reply: data, or the end of the stream.
  virtual bool HasUnasked() = 0;
  // Tells the other side that nothing more is written, as far as the socket lets it.
  virtual void EndWrites() noexcept = 0;
};

// What all sessions of one side have in common: the authorities that it trusts, and its own
// certificate. All calls from any thread.
class TlsContext {
 public:
  // Reads the files that the options name. BadArgument with the option, the file and why; in a
  // build without TLS always, with the CMake option.
  static Result<std::shared_ptr<const TlsContext>> Create(const TlsOptions& options);
  virtual ~TlsContext() = default;

  // `fd` stays the caller's, and open. `host`, of a client: whose certificate it must be, unless
  // the options name somebody. The session keeps the context. Unavailable.
  virtual Result<std::unique_ptr<TlsSession>> Start(int fd, const std::string& host) const = 0;
};

}  // namespace quire

#endif  // QUIRE_NET_TLS_SESSION_H_
