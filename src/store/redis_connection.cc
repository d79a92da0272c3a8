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

namespace quire {
namespace {

constexpr size_t kSpansMax = 64;  // of one sendmsg; IOV_MAX is at least 1024

// strerror is not for threads.
std::string ErrorText(int error) { return std::generic_category().message(error); }

Status Unavailable(const std::string& why) { return Status(StatusCode::kUnavailable, why); }

}  // namespace

Result<std::unique_ptr<RedisConnection>> RedisConnection::Start(const RedisAddress& address) {
  redisContext* context = address.port == 0
                              ? redisConnectUnixNonBlock(address.host.c_str())
                              : redisConnectNonBlock(address.host.c_str(), address.port);
  if (context == nullptr) return Status::OutOfMemory();
  if (context->err != 0) {
    const std::string why = PrintableError(context->errstr);
    redisFree(context);
    return Unavailable("cannot connect: " + why);
  }
  return std::unique_ptr<RedisConnection>(new RedisConnection(redisFreeKeepFd(context)));
}

RedisConnection::~RedisConnection() { close(fd_); }

Status RedisConnection::FinishConnect() {
  int error = 0;
  socklen_t size = sizeof(error);
  if (getsockopt(fd_, SOL_SOCKET, SO_ERROR, &error, &size) != 0) error = errno;
  return error == 0 ? Status() : Unavailable("cannot connect: " + ErrorText(error));
}

Result<size_t> RedisConnection::Send(std::span<const std::span<const std::byte>> spans) {
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

bool RedisConnection::IsStale() const {
  pollfd polled{fd_, POLLIN, 0};
  return poll(&polled, 1, 0) != 0;
}

}  // namespace quire
