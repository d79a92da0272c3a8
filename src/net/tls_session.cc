#include "net/tls_session.h"

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

namespace quire {
namespace {

constexpr size_t kRecordBytes = 16384;  // what one TLS record holds

// ---- The socket under a session: never waits, and raises no signal when the other side is gone.

struct Wire {
  int fd = -1;
  bool is_trusted = false;  // the handshake is done
  size_t handshake_left = kTlsHandshakeBytesMax;
};

Wire& WireOf(BIO* bio) { return *static_cast<Wire*>(BIO_get_data(bio)); }

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
      send(WireOf(bio).fd, data, static_cast<size_t>(size), MSG_NOSIGNAL | MSG_DONTWAIT);
  return Outcome(bio, count, true);
}

int ReadSocket(BIO* bio, char* data, int size) {
  Wire& wire = WireOf(bio);
  size_t most = static_cast<size_t>(size);
  if (!wire.is_trusted) most = std::min(most, wire.handshake_left);
  if (most == 0) {
    errno = EMSGSIZE;
    return Outcome(bio, -1, false);
  }
  const ssize_t count = recv(wire.fd, data, most, MSG_DONTWAIT);
  if (!wire.is_trusted && count > 0) wire.handshake_left -= static_cast<size_t>(count);
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

Status BadFile(const std::string& option, const std::string& path) {
  return Status(StatusCode::kBadArgument,
                option + " \"" + path + "\" is of no use: " + TakeError());
}

Status Unavailable(const std::string& why) { return Status(StatusCode::kUnavailable, why); }

class OpenSslContext final : public TlsContext,
                             public std::enable_shared_from_this<OpenSslContext> {
 public:
  ~OpenSslContext() override {
    SSL_CTX_free(context_);
    BIO_meth_free(socket_method_);
  }
  Status Read(const TlsOptions& options);
  Result<std::unique_ptr<TlsSession>> Start(int fd, const std::string& host) const override;

 private:
  friend class OpenSslSession;

  void SetRole();
  Status ReadFiles();

  TlsOptions options_;
  SSL_CTX* context_ = nullptr;
  BIO_METHOD* socket_method_ = nullptr;
};

class OpenSslSession final : public TlsSession {
 public:
  explicit OpenSslSession(std::shared_ptr<const OpenSslContext> context)
      : context_(std::move(context)), side_(context_->options_.is_server ? "client" : "server") {}
  ~OpenSslSession() override { SSL_free(session_); }
  OpenSslSession(const OpenSslSession&) = delete;
  OpenSslSession& operator=(const OpenSslSession&) = delete;
  Status Open(int fd, const std::string& host);

  Result<bool> Handshake() override;
  Result<size_t> Write(std::span<const std::span<const std::byte>> spans) override;
  Result<bool> Flush() override;
  Result<size_t> Read(std::span<std::byte> into) override;
  bool wants_write() const override { return blocked_on_write_ || sent_ < out_.size(); }
  bool has_buffered() const override;
  bool HasUnasked() override;
  void EndWrites() noexcept override;

 private:
  bool SetServerName(const std::string& host);
  // 1: all that was taken is sent.
  int SendTaken() noexcept;
  Status Explain(int code, const char* what);
  Status Refused(int64_t verified) const;

  const std::shared_ptr<const OpenSslContext> context_;
  const std::string side_;  // the other one, for messages
  Wire wire_;
  SSL* session_ = nullptr;
  std::string peer_;            // whose certificate the server's must be
  std::vector<std::byte> out_;  // taken, and from sent_ on not sent
  size_t sent_ = 0;
  bool blocked_on_write_ = false;
};

// ---- OpenSslContext

Status OpenSslContext::Read(const TlsOptions& options) {
  ERR_clear_error();
  options_ = options;
  socket_method_ = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "quire socket");
  context_ = SSL_CTX_new(options.is_server ? TLS_server_method() : TLS_client_method());
  if (context_ == nullptr || socket_method_ == nullptr) return Status::OutOfMemory();
  BIO_meth_set_write(socket_method_, WriteSocket);
  BIO_meth_set_read(socket_method_, ReadSocket);
  BIO_meth_set_ctrl(socket_method_, ControlSocket);
  SSL_CTX_set_options(context_, SSL_OP_NO_RENEGOTIATION);
  SSL_CTX_set_mode(context_, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
  SSL_CTX_set_max_cert_list(context_, kTlsHandshakeBytesMax);
  // OpenSSL would ask for it at the terminal.
  SSL_CTX_set_default_passwd_cb(context_, [](char*, int, int, void*) { return 0; });
  SetRole();
  return ReadFiles();
}

void OpenSslContext::SetRole() {
  const int verify = options_.verify ? SSL_VERIFY_PEER : SSL_VERIFY_NONE;
  if (!options_.is_server) {
    SSL_CTX_set_min_proto_version(context_, TLS1_2_VERSION);
    return SSL_CTX_set_verify(context_, verify, nullptr);
  }
  SSL_CTX_set_min_proto_version(context_, TLS1_3_VERSION);
  SSL_CTX_set_session_cache_mode(context_, SSL_SESS_CACHE_OFF);
  SSL_CTX_set_num_tickets(context_, 0);
  SSL_CTX_set_verify(context_, options_.verify ? verify | SSL_VERIFY_FAIL_IF_NO_PEER_CERT : verify,
                     nullptr);
}

Status OpenSslContext::ReadFiles() {
  const std::string& prefix = options_.prefix;
  if (options_.ca_file.empty()) {
    SSL_CTX_set_default_verify_paths(context_);  // what is missing there, no certificate will match
    ERR_clear_error();
  } else if (SSL_CTX_load_verify_file(context_, options_.ca_file.c_str()) != 1) {
    return BadFile(prefix + "_ca_file", options_.ca_file);
  }
  const std::string& cert = options_.cert_file;
  const std::string& key = options_.key_file;
  if (cert.empty() != key.empty()) {
    return Status(StatusCode::kBadArgument,
                  prefix + "_cert_file and " + prefix + "_key_file go together; give both or none");
  }
  if (cert.empty()) return Status();
  if (SSL_CTX_use_certificate_chain_file(context_, cert.c_str()) != 1)
    return BadFile(prefix + "_cert_file", cert);
  if (SSL_CTX_use_PrivateKey_file(context_, key.c_str(), SSL_FILETYPE_PEM) != 1 ||
      SSL_CTX_check_private_key(context_) != 1)
    return BadFile(prefix + "_key_file", key);
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
  wire_.fd = fd;
  BIO_set_data(bio, &wire_);
  BIO_set_init(bio, 1);
  SSL_set_bio(session_, bio, bio);
  if (context_->options_.is_server) {
    SSL_set_accept_state(session_);
    return Status();
  }
  const std::string& name = context_->options_.server_name;
  peer_ = name.empty() ? host : name;
  if (!SetServerName(peer_)) return Unavailable("TLS: \"" + peer_ + "\" is no name of a server");
  SSL_set_connect_state(session_);
  return Status();
}

bool OpenSslSession::SetServerName(const std::string& host) {
  // The first call takes addresses in numbers alone.
  if (X509_VERIFY_PARAM_set1_ip_asc(SSL_get0_param(session_), host.c_str()) == 1) return true;
  SSL_set_hostflags(session_, X509_CHECK_FLAG_NO_PARTIAL_WILDCARDS);
  return SSL_set1_host(session_, host.c_str()) == 1 &&
         SSL_set_tlsext_host_name(session_, host.c_str()) == 1;
}

// Why the certificate of the other side is not taken.
Status OpenSslSession::Refused(int64_t verified) const {
  const std::string& prefix = context_->options_.prefix;
  if (verified == X509_V_ERR_HOSTNAME_MISMATCH || verified == X509_V_ERR_IP_ADDRESS_MISMATCH) {
    return Unavailable("TLS: the server's certificate is not " + peer_ + "'s; " + prefix +
                       "_server_name says whose it is to be");
  }
  return Unavailable("TLS: the " + side_ +
                     "'s certificate is refused: " + X509_verify_cert_error_string(verified) +
                     "; " + prefix + "_ca_file names the authorities to trust");
}

// What an OpenSSL call that did nothing means: ok, and later again; else why never.
Status OpenSslSession::Explain(int code, const char* what) {
  const int error_number = errno;
  const int error = SSL_get_error(session_, code);
  blocked_on_write_ = error == SSL_ERROR_WANT_WRITE;
  if (blocked_on_write_ || error == SSL_ERROR_WANT_READ) return Status();
  const std::string closed = "the " + side_ + " closed the connection";
  if (error == SSL_ERROR_ZERO_RETURN) return Unavailable(closed);
  const int64_t verified = SSL_get_verify_result(session_);
  if (context_->options_.verify && verified != X509_V_OK) return Refused(verified);
  const std::string failed = std::string("TLS: ") + what + " failed: ";
  const int reason = ERR_GET_REASON(ERR_peek_error());
  if (error == SSL_ERROR_SYSCALL && ERR_peek_error() == 0) {
    return Unavailable(
        failed + (error_number == 0 ? closed : std::generic_category().message(error_number)));
  }
  const bool is_plain = reason == SSL_R_WRONG_VERSION_NUMBER || reason == SSL_R_HTTP_REQUEST;
  const char* hint = context_->options_.is_server ? "; does the client speak TLS?"
                                                  : "; is this the server's port for TLS?";
  // Alerts are what the other side says of this one.
  const std::string says = reason > SSL_AD_REASON_OFFSET ? "the " + side_ + " says: " : "";
  return Unavailable(failed + says + TakeError() + (is_plain ? hint : ""));
}

Result<bool> OpenSslSession::Handshake() {
  ERR_clear_error();
  errno = 0;
  const int code = SSL_do_handshake(session_);
  blocked_on_write_ = false;
  wire_.is_trusted = code == 1;
  if (code == 1) return true;
  QUIRE_RETURN_IF_ERROR(Explain(code, "the handshake"));
  return false;
}

int OpenSslSession::SendTaken() noexcept {
  while (sent_ < out_.size()) {
    ERR_clear_error();
    errno = 0;
    size_t count = 0;
    const int code = SSL_write_ex(session_, out_.data() + sent_, out_.size() - sent_, &count);
    blocked_on_write_ = false;
    if (code != 1) return code;
    sent_ += count;
  }
  out_.clear();
  sent_ = 0;
  return 1;
}

Result<bool> OpenSslSession::Flush() {
  const int code = SendTaken();
  if (code == 1) return true;
  QUIRE_RETURN_IF_ERROR(Explain(code, "sending"));
  return false;
}

void OpenSslSession::EndWrites() noexcept {
  if (!wire_.is_trusted || SendTaken() != 1) return;
  ERR_clear_error();
  SSL_shutdown(session_);  // one way: nothing is waited for
  ERR_clear_error();
}

// What is taken counts as sent: OpenSSL wants the same bytes again where the socket took none, and
// the caller may have given up on them by then.
Result<size_t> OpenSslSession::Write(std::span<const std::span<const std::byte>> spans) {
  QUIRE_ASSIGN_OR_RETURN(const bool is_sent, Flush());
  if (!is_sent) return size_t{0};
  out_.reserve(kRecordBytes);
  for (const std::span<const std::byte> span : spans) {
    const size_t count = std::min(span.size(), kRecordBytes - out_.size());
    out_.insert(out_.end(), span.begin(), span.begin() + static_cast<ptrdiff_t>(count));
    if (count < span.size()) break;
  }
  const size_t taken = out_.size();
  QUIRE_RETURN_IF_ERROR(Flush().status());
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

// Whole records alone count: the rest of the next one comes through the socket.
bool OpenSslSession::has_buffered() const { return SSL_pending(session_) > 0; }

bool OpenSslSession::HasUnasked() {
  ERR_clear_error();
  std::byte byte;
  size_t count = 0;
  const int code = SSL_peek_ex(session_, &byte, 1, &count);
  // Tickets of the server and the like are read by that, and are nothing.
  return code == 1 || SSL_get_error(session_, code) != SSL_ERROR_WANT_READ;
}

}  // namespace

Result<std::shared_ptr<const TlsContext>> TlsContext::Create(const TlsOptions& options) {
  auto made = std::make_shared<OpenSslContext>();
  QUIRE_RETURN_IF_ERROR(made->Read(options));
  return std::shared_ptr<const TlsContext>(std::move(made));
}

}  // namespace quire
