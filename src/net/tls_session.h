// TlsSession: TLS over a socket that never blocks, as the client. OpenSSL does the work; nothing of
// it is seen outside.
#ifndef QUIRE_NET_TLS_SESSION_H_
#define QUIRE_NET_TLS_SESSION_H_

#include <cstddef>
#include <memory>
#include <span>
#include <string>

#include "quire/chunk_store.h"
#include "quire/status.h"

namespace quire {

// From one thread at a time.
class TlsSession {
 public:
  virtual ~TlsSession() = default;

  // Goes on with the handshake; true when it is done. Unavailable: the other side is not the
  // trusted one, does not trust us, or speaks no TLS.
  virtual Result<bool> Handshake() = 0;
  // Takes bytes to be sent, in order: how many. 0: none now, those it has taken must go first.
  virtual Result<size_t> Write(std::span<const std::span<const std::byte>> spans) = 0;
  // Sends what it has taken, as far as the socket lets it.
  virtual Status Flush() = 0;
  // Bytes received; 0: none now. Unavailable at the end of the stream.
  virtual Result<size_t> Read(std::span<std::byte> into) = 0;

  // It waits until the socket can be written to.
  virtual bool wants_write() const = 0;
  // Bytes for Read are here already: the socket will not tell of them.
  virtual bool has_buffered() const = 0;
  // Something has come that is no reply: data, or the end of the stream.
  virtual bool HasUnasked() = 0;
};

// What all sessions of one client have in common: the authorities that it trusts, and its own
// certificate. All calls from any thread.
class TlsContext {
 public:
  // Reads the files that the options name. BadArgument with the option, the file and why; in a
  // build without TLS always, with the CMake option.
  static Result<std::shared_ptr<const TlsContext>> Create(const RedisTierOptions& options);
  virtual ~TlsContext() = default;

  // `fd` stays the caller's, and open. `host`: whose certificate it must be, unless the options
  // name somebody. The session keeps the context. Unavailable.
  virtual Result<std::unique_ptr<TlsSession>> Start(int fd, const std::string& host) const = 0;
};

}  // namespace quire

#endif  // QUIRE_NET_TLS_SESSION_H_
