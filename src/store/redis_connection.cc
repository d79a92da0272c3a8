#include "store/redis_connection.h"

#include <hiredis/hiredis.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <string>
#include <system_error>
#include <utility>

namespace quire {
namespace {

constexpr size_t kSpansMax = 64;  // of one sendmsg; IOV_MAX is at least 1024

// strerror is not for threads.
std::string ErrorText(int error) { return std::generic_category().message(error); }

Status Unavailable(const std::string& why) { return Status(StatusCode::kUnavailable, why); }

}  // namespace

Result<std::unique_ptr<RedisConnection>> RedisConnection::Start(
    const RedisAddress& address, std::shared_ptr<const TlsContext> tls, const std::string& host) {
  redisContext* context = address.port == 0
                              ? redisConnectUnixNonBlock(address.host.c_str())
                              : redisConnectNonBlock(address.host.c_str(), address.port);
  if (context == nullptr) return Status::OutOfMemory();
  if (context->err != 0) {
    const std::string why = PrintableError(context->errstr);
    redisFree(context);
    return Unavailable("cannot connect: " + why);
  }
  std::unique_ptr<RedisConnection> made(new RedisConnection(redisFreeKeepFd(context)));
  if (tls != nullptr) {
    QUIRE_ASSIGN_OR_RETURN(made->tls_, TlsSession::Start(std::move(tls), made->fd_, host));
  }
  return made;
}

RedisConnection::~RedisConnection() {
  tls_.reset();
  close(fd_);
}

Result<bool> RedisConnection::Connect() {
  if (!is_connected_) {
    int error = 0;
    socklen_t size = sizeof(error);
    if (getsockopt(fd_, SOL_SOCKET, SO_ERROR, &error, &size) != 0) error = errno;
    if (error != 0) return Unavailable("cannot connect: " + ErrorText(error));
    is_connected_ = true;
  }
  return tls_ == nullptr ? Result<bool>(true) : tls_->Handshake();
}

Status RedisConnection::Flush() { return tls_ == nullptr ? Status() : tls_->Flush(); }

Result<size_t> RedisConnection::Send(std::span<const std::span<const std::byte>> spans) {
  if (tls_ != nullptr) return tls_->Write(spans);
  std::array<iovec, kSpansMax> vectors;
  size_t count = 0;
  for (; count < spans.size() && count < kSpansMax; ++count) {
    // The kernel only reads from it.
    vectors[count] = {const_cast<std::byte*>(spans[count].data()), spans[count].size()};
  }
  msghdr message{};
  message.msg_iov = vectors.data();
  message.msg_iovlen = count;
  while (true) {
    const ssize_t sent = sendmsg(fd_, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent >= 0) return static_cast<size_t>(sent);
    if (errno == EAGAIN || errno == EWOULDBLOCK) return size_t{0};
    if (errno != EINTR) return Unavailable("sending failed: " + ErrorText(errno));
  }
}

Result<size_t> RedisConnection::Receive() {
  const auto [body, rest] = reader_.Space();
  if (tls_ != nullptr) {
    QUIRE_ASSIGN_OR_RETURN(const size_t count, tls_->Read(body.empty() ? rest : body));
    reader_.Filled(count);
    return count;
  }
  std::array<iovec, 2> vectors = {iovec{body.data(), body.size()}, iovec{rest.data(), rest.size()}};
  msghdr message{};
  message.msg_iov = body.empty() ? &vectors[1] : &vectors[0];
  message.msg_iovlen = body.empty() ? 1 : 2;
  while (true) {
    const ssize_t received = recvmsg(fd_, &message, MSG_DONTWAIT);
    if (received > 0) {
      reader_.Filled(static_cast<size_t>(received));
      return static_cast<size_t>(received);
    }
    if (received == 0) return Unavailable("the server closed the connection");
    if (errno == EAGAIN || errno == EWOULDBLOCK) return size_t{0};
    if (errno != EINTR) return Unavailable("receiving failed: " + ErrorText(errno));
  }
}

bool RedisConnection::IsStale() {
  pollfd polled{fd_, POLLIN, 0};
  const bool is_quiet = poll(&polled, 1, 0) == 0 && !has_buffered();
  return !is_quiet && (tls_ == nullptr || tls_->HasUnasked());
}

}  // namespace quire
