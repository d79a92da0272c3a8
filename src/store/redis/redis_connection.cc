#include "store/redis/redis_connection.h"

#include <array>

namespace quire {
namespace {

Result<Endpoint> EndpointOf(const RedisAddress& address) {
  const bool is_ipv6 = address.host.find(':') != std::string::npos;
  Result<Endpoint> endpoint =
      Endpoint::Parse(address.port == 0 ? "unix:" + address.host
                                        : (is_ipv6 ? "[" + address.host + "]" : address.host) +
                                              ":" + std::to_string(address.port));
  if (endpoint.ok()) return endpoint;
  return Status(StatusCode::kUnavailable, std::string(endpoint.status().message()));
}

}  // namespace

Result<std::unique_ptr<RedisConnection>> RedisConnection::Start(
    const RedisAddress& address, const std::shared_ptr<const TlsContext>& tls,
    const std::string& host) {
  QUIRE_ASSIGN_OR_RETURN(const Endpoint endpoint, EndpointOf(address));
  QUIRE_ASSIGN_OR_RETURN(Socket socket, Socket::Connect(endpoint));
  std::unique_ptr<RedisConnection> made(new RedisConnection(std::move(socket)));
  if (tls != nullptr) {
    QUIRE_ASSIGN_OR_RETURN(made->tls_, tls->Start(made->fd(), host));
  }
  return made;
}

Result<bool> RedisConnection::Connect() {
  if (!is_connected_) {
    QUIRE_RETURN_IF_ERROR(socket_.ConnectError());
    is_connected_ = true;
  }
  return tls_ == nullptr ? Result<bool>(true) : tls_->Handshake();
}

Status RedisConnection::Flush() { return tls_ == nullptr ? Status() : tls_->Flush().status(); }

Result<size_t> RedisConnection::Send(std::span<const std::span<const std::byte>> spans) {
  return tls_ == nullptr ? socket_.Write(spans) : tls_->Write(spans);
}

Result<size_t> RedisConnection::Receive() {
  const std::array<std::span<std::byte>, 2> space = reader_.Space();  // a body, and what follows it
  const std::span<std::byte> first = space[0].empty() ? space[1] : space[0];
  QUIRE_ASSIGN_OR_RETURN(const size_t count,
                         tls_ == nullptr ? socket_.Read(space) : tls_->Read(first));
  reader_.Filled(count);
  return count;
}

bool RedisConnection::IsStale() {
  PollEntry entry{.fd = fd(), .wants_read = true};
  PollSockets(std::span(&entry, 1), /*timeout_ns=*/0);
  const bool is_quiet = !entry.can_read && !has_buffered();
  return !is_quiet && (tls_ == nullptr || tls_->HasUnasked());
}

}  // namespace quire
