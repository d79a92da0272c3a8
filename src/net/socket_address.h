// An endpoint as the system's calls want it.
#ifndef QUIRE_NET_SOCKET_ADDRESS_H_
#define QUIRE_NET_SOCKET_ADDRESS_H_

#include <sys/socket.h>

#include <cstdint>

#include "net/socket.h"

namespace quire {

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t size = 0;
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  // REQUIRES: an IPv4 or IPv6 address.
  uint16_t port() const;
};

SocketAddress AddressOf(const Endpoint& endpoint);

}  // namespace quire

#endif  // QUIRE_NET_SOCKET_ADDRESS_H_
