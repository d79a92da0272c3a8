#include "net/tls_session.h"

#include <arpa/inet.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <memory>
#include <system_error>
#include <utility>
#include <vector>

#include "net/host_resolver.h"

namespace quire {
namespace {

constexpr size_t kRecordBytes = 16384;  // what one TLS record holds

// ---- The socket under a session: never waits, and raises no signal when the other side is gone.

int FdOf(BIO* bio) { return static_cast<int>(reinterpret_cast<intptr_t>(BIO_get_data(bio))); }

// What a send or recv comes to, as BIO wants it.
int Outcome(BIO* bio, ssize_t count, bool is_write) {
  BIO_clear_retry_flags(bio);
  if (count >= 0) return static_cast<int>(count);
  if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) {
    if (is_write) {
      BIO_set_retry_write(bio);
    } else {
      BIO_set_retry_read(bio);
    }
  }
  return -1;
}

int WriteSocket(BIO* bio, const char* data, int size) {
  const ssize_t count =
      send(FdOf(bio), data, static_cast<size_t>(size), MSG_NOSIGNAL | MSG_DONTWAIT);
  return Outcome(bio, count, true);
}

int ReadSocket(BIO* bio, char* data, int size) {
  const ssize_t count = recv(FdOf(bio), data, static_cast<size_t>(size), MSG_DONTWAIT);
  return Outcome(bio, count, false);
}

long ControlSocket(BIO*, int command, long, void*) {  // NOLINT(google-runtime-int): OpenSSL's
  return command == BIO_CTRL_FLUSH ? 1 : 0;
}

// The oldest error of this thread's list, and an empty list.
std::string TakeError() {
  const unsigned long code = ERR_get_error();  // NOLINT(google-runtime-int): OpenSSL's
  const char* const reason = code == 0 ? nullptr : ERR_reason_error_string(code);
  std::string text = reason != nullptr ? reason : "no reason is given";
  if (ERR_SYSTEM_ERROR(code)) text = std::generic_category().message(ERR_GET_REASON(code));
  ERR_clear_error();
  return text;
}

Status BadFile(const char* option, const std::string& path) {
  return Status(StatusCode::kBadArgument,
                std::string("redis.") + option + " \"" + path + "\" is of no use: " + TakeError());
}

Status Unavailable(const std::string& why) { return Status(StatusCode::kUnavailable, why); }

class OpenSslContext final : public TlsContext,
                             public std::enable_shared_from_this<OpenSslContext> {
 public:
  ~OpenSslContext() override {
    SSL_CTX_free(context_);
    BIO_meth_free(socket_method_);
  }
  Status Read(const RedisTierOptions& options);
  Result<std::unique_ptr<TlsSession>> Start(int fd, const std::string& host) const override;

 private:
  friend class OpenSslSession;

  SSL_CTX* context_ = nullptr;
  BIO_METHOD* socket_method_ = nullptr;
  std::string server_name_;
  bool verify_ = true;
};

class OpenSslSession final : public TlsSession {
 public:
  explicit OpenSslSession(std::shared_ptr<const OpenSslContext> context)
      : context_(std::move(context)) {}
  ~OpenSslSession() override { SSL_free(session_); }
  OpenSslSession(const OpenSslSession&) = delete;
  OpenSslSession& operator=(const OpenSslSession&) = delete;
  Status Open(int fd, const std::string& host);

  Result<bool> Handshake() override;
  Result<size_t> Write(std::span<const std::span<const std::byte>> spans) override;
  Status Flush() override;
  Result<size_t> Read(std::span<std::byte> into) override;
  bool wants_write() const override { return blocked_on_write_ || sent_ < out_.size(); }
  bool has_buffered() const override;
  bool HasUnasked() override;

 private:
  Status Explain(int code, const char* what);

  const std::shared_ptr<const OpenSslContext> context_;
  SSL* session_ = nullptr;
  std::string peer_;            // for messages
  std::vector<std::byte> out_;  // taken, and from sent_ on not sent
  size_t sent_ = 0;
  bool blocked_on_write_ = false;
};

// ---- OpenSslContext

Status OpenSslContext::Read(const RedisTierOptions& options) {
  ERR_clear_error();
  server_name_ = options.tls_server_name;
  verify_ = options.tls_verify;
  socket_method_ = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "quire socket");
  context_ = SSL_CTX_new(TLS_client_method());
  SSL_CTX* const context = context_;
  if (context == nullptr || socket_method_ == nullptr) return Status::OutOfMemory();
  BIO_meth_set_write(socket_method_, WriteSocket);
  BIO_meth_set_read(socket_method_, ReadSocket);
  BIO_meth_set_ctrl(socket_method_, ControlSocket);
  SSL_CTX_set_min_proto_version(context, TLS1_2_VERSION);
  SSL_CTX_set_options(context, SSL_OP_NO_RENEGOTIATION);
  SSL_CTX_set_mode(context, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
  SSL_CTX_set_verify(context, verify_ ? SSL_VERIFY_PEER : SSL_VERIFY_NONE, nullptr);
  if (options.tls_ca_file.empty()) {
    SSL_CTX_set_default_verify_paths(context);  // what is missing there, no certificate will match
    ERR_clear_error();
  } else if (SSL_CTX_load_verify_file(context, options.tls_ca_file.c_str()) != 1) {
    return BadFile("tls_ca_file", options.tls_ca_file);
  }
  if (options.tls_cert_file.empty() != options.tls_key_file.empty()) {
    return Status(StatusCode::kBadArgument,
                  "redis.tls_cert_file and redis.tls_key_file go together; give both or none");
  }
  // OpenSSL would ask for it at the terminal.
  SSL_CTX_set_default_passwd_cb(context, [](char*, int, int, void*) { return 0; });
  if (!options.tls_cert_file.empty()) {
    const std::string& path = options.tls_cert_file;
    if (SSL_CTX_use_certificate_chain_file(context, path.c_str()) != 1)
      return BadFile("tls_cert_file", path);
    const std::string& key = options.tls_key_file;
    if (SSL_CTX_use_PrivateKey_file(context, key.c_str(), SSL_FILETYPE_PEM) != 1 ||
        SSL_CTX_check_private_key(context) != 1)
      return BadFile("tls_key_file", key);
  }
  return Status();
}

Result<std::unique_ptr<TlsSession>> OpenSslContext::Start(int fd, const std::string& host) const {
  auto made = std::make_unique<OpenSslSession>(weak_from_this().lock());
  QUIRE_RETURN_IF_ERROR(made->Open(fd, host));
  return std::unique_ptr<TlsSession>(std::move(made));
}

// ---- OpenSslSession

Status OpenSslSession::Open(int fd, const std::string& host) {
  ERR_clear_error();
  session_ = SSL_new(context_->context_);
  BIO* const bio = BIO_new(context_->socket_method_);
  if (session_ == nullptr || bio == nullptr) {
    BIO_free(bio);
    return Status::OutOfMemory();
  }
  BIO_set_data(bio, reinterpret_cast<void*>(static_cast<intptr_t>(fd)));
  BIO_set_init(bio, 1);
  SSL_set_bio(session_, bio, bio);
  peer_ = context_->server_name_.empty() ? host : context_->server_name_;
  bool is_set = true;
  if (IsIpAddress(peer_)) {
    is_set = X509_VERIFY_PARAM_set1_ip_asc(SSL_get0_param(session_), peer_.c_str()) == 1;
  } else {
    SSL_set_hostflags(session_, X509_CHECK_FLAG_NO_PARTIAL_WILDCARDS);
    is_set = SSL_set1_host(session_, peer_.c_str()) == 1 &&
             SSL_set_tlsext_host_name(session_, peer_.c_str()) == 1;
  }
  if (!is_set) return Unavailable("TLS: \"" + peer_ + "\" is no name of a server");
  SSL_set_connect_state(session_);
  return Status();
}

// What an OpenSSL call that did nothing means: ok, and later again; else why never.
Status OpenSslSession::Explain(int code, const char* what) {
  const int error_number = errno;
  const int error = SSL_get_error(session_, code);
  blocked_on_write_ = error == SSL_ERROR_WANT_WRITE;
  if (blocked_on_write_ || error == SSL_ERROR_WANT_READ) return Status();
  if (error == SSL_ERROR_ZERO_RETURN) return Unavailable("the server closed the connection");
  const long verified = SSL_get_verify_result(session_);  // NOLINT(google-runtime-int): OpenSSL's
  const bool is_other =
      verified == X509_V_ERR_HOSTNAME_MISMATCH || verified == X509_V_ERR_IP_ADDRESS_MISMATCH;
  if (context_->verify_ && is_other) {
    return Unavailable("TLS: the server's certificate is not " + peer_ +
                       "'s; redis.tls_server_name says whose it is to be");
  }
  if (context_->verify_ && verified != X509_V_OK) {
    return Unavailable(std::string("TLS: the server's certificate is refused: ") +
                       X509_verify_cert_error_string(verified) +
                       "; redis.tls_ca_file names the authorities to trust");
  }
  if (error == SSL_ERROR_SYSCALL && ERR_peek_error() == 0) {
    const std::string why = error_number == 0 ? "the server closed the connection"
                                              : std::generic_category().message(error_number);
    return Unavailable(std::string("TLS: ") + what + " failed: " + why);
  }
  const bool is_plain = ERR_GET_REASON(ERR_peek_error()) == SSL_R_WRONG_VERSION_NUMBER;
  return Unavailable(std::string("TLS: ") + what + " failed: " + TakeError() +
                     (is_plain ? "; is this the server's port for TLS?" : ""));
}

Result<bool> OpenSslSession::Handshake() {
  ERR_clear_error();
  errno = 0;
  const int code = SSL_do_handshake(session_);
  blocked_on_write_ = false;
  if (code == 1) return true;
  QUIRE_RETURN_IF_ERROR(Explain(code, "the handshake"));
  return false;
}

Status OpenSslSession::Flush() {
  while (sent_ < out_.size()) {
    ERR_clear_error();
    errno = 0;
    size_t count = 0;
    const int code = SSL_write_ex(session_, out_.data() + sent_, out_.size() - sent_, &count);
    blocked_on_write_ = false;
    if (code != 1) return Explain(code, "sending");
    sent_ += count;
  }
  out_.clear();
  sent_ = 0;
  return Status();
}

// What is taken counts as sent: OpenSSL wants the same bytes again where the socket took none, and
// the caller may have given up on them by then.
Result<size_t> OpenSslSession::Write(std::span<const std::span<const std::byte>> spans) {
  QUIRE_RETURN_IF_ERROR(Flush());
  if (!out_.empty()) return size_t{0};
  out_.reserve(kRecordBytes);
  for (const std::span<const std::byte> span : spans) {
    const size_t count = std::min(span.size(), kRecordBytes - out_.size());
    out_.insert(out_.end(), span.begin(), span.begin() + static_cast<ptrdiff_t>(count));
    if (count < span.size()) break;
  }
  const size_t taken = out_.size();
  QUIRE_RETURN_IF_ERROR(Flush());
  return taken;
}

Result<size_t> OpenSslSession::Read(std::span<std::byte> into) {
  ERR_clear_error();
  errno = 0;
  size_t count = 0;
  const int code = SSL_read_ex(session_, into.data(), into.size(), &count);
  if (code == 1) return count;
  QUIRE_RETURN_IF_ERROR(Explain(code, "receiving"));
  return size_t{0};
}

bool OpenSslSession::has_buffered() const { return SSL_has_pending(session_) == 1; }

bool OpenSslSession::HasUnasked() {
  ERR_clear_error();
  std::byte byte;
  size_t count = 0;
  const int code = SSL_peek_ex(session_, &byte, 1, &count);
  // Tickets of the server and the like are read by that, and are nothing.
  return code == 1 || SSL_get_error(session_, code) != SSL_ERROR_WANT_READ;
}

}  // namespace

Result<std::shared_ptr<const TlsContext>> TlsContext::Create(const RedisTierOptions& options) {
  auto made = std::make_shared<OpenSslContext>();
  QUIRE_RETURN_IF_ERROR(made->Read(options));
  return std::shared_ptr<const TlsContext>(std::move(made));
}

}  // namespace quire
