// Where a peer is, and how it is reached.
#ifndef QUIRE_TRANSFER_PEER_ENDPOINT_H_
#define QUIRE_TRANSFER_PEER_ENDPOINT_H_

#include <string>
#include <string_view>

#include "net/socket.h"

namespace quire {

struct PeerEndpoint {
  Endpoint address{};
  bool is_ucx = false;  // UCX finds the way; the address opens the connection

  // Where several streams may carry one connection.
  bool is_tcp() const { return !is_ucx && !address.is_unix; }

  // As Endpoint::Parse, and "ucx:ADDRESS:PORT".
  static Result<PeerEndpoint> Parse(std::string_view text);
  std::string ToString() const { return (is_ucx ? "ucx:" : "") + address.ToString(); }
};

}  // namespace quire

#endif  // QUIRE_TRANSFER_PEER_ENDPOINT_H_
