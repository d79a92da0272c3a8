// TlsSession: TLS over a socket that never blocks, as the client. OpenSSL does the work; nothing of
// it is seen outside.
#ifndef QUIRE_STORE_TLS_SESSION_H_
#define QUIRE_STORE_TLS_SESSION_H_

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "quire/chunk_store.h"
#include "quire/status.h"

struct ssl_ctx_st;
struct ssl_st;
struct bio_method_st;

namespace quire {

// What all sessions of one client have in common: whom it trusts, and who it is. All calls from any
// thread.
class TlsContext {
 public:
  // Reads the files that the options name. BadArgument with the option, the file and why.
  static Result<std::shared_ptr<const TlsContext>> Create(const RedisTierOptions& options);
  ~TlsContext();
  TlsContext(const TlsContext&) = delete;
  TlsContext& operator=(const TlsContext&) = delete;

 private:
  friend class TlsSession;
  TlsContext() = default;

  ssl_ctx_st* context_ = nullptr;
  bio_method_st* socket_method_ = nullptr;
  std::string server_name_;
  bool verify_ = true;
};

// From one thread at a time.
class TlsSession {
 public:
  // `fd` stays the caller's, and open. `host`: whose certificate it must be, unless the options
  // name somebody. Unavailable.
  static Result<std::unique_ptr<TlsSession>> Start(std::shared_ptr<const TlsContext> context,
                                                   int fd, const std::string& host);
  ~TlsSession();
  TlsSession(const TlsSession&) = delete;
  TlsSession& operator=(const TlsSession&) = delete;

  // Goes on with the handshake; true when it is done. Unavailable: the other side is not whom we
  // trust, does not trust us, or speaks no TLS.
  Result<bool> Handshake();
  // Takes bytes to be sent, in order: how many. 0: none now, those it has taken must go first.
  Result<size_t> Write(std::span<const std::span<const std::byte>> spans);
  // Sends what it has taken, as far as the socket lets it.
  Status Flush();
  // Bytes received; 0: none now. Unavailable at the end of the stream.
  Result<size_t> Read(std::span<std::byte> into);

  // It waits until the socket can be written to.
  bool wants_write() const { return blocked_on_write_ || sent_ < out_.size(); }
  // Bytes for Read are here already: the socket will not tell of them.
  bool has_buffered() const;
  // Something has come that is no reply: data, or the end of the stream.
  bool HasUnasked();

 private:
  explicit TlsSession(std::shared_ptr<const TlsContext> context) : context_(std::move(context)) {}
  Status Explain(int code, const char* what);

  const std::shared_ptr<const TlsContext> context_;
  ssl_st* session_ = nullptr;
  std::string peer_;            // for messages
  std::vector<std::byte> out_;  // taken, and from sent_ on not sent
  size_t sent_ = 0;
  bool blocked_on_write_ = false;
};

}  // namespace quire

#endif  // QUIRE_STORE_TLS_SESSION_H_
