// RedisConnection: one socket to one server, never blocking, with or without TLS. Commands go out
// from where they lie, and replies come in through RespReader.
#ifndef QUIRE_STORE_REDIS_REDIS_CONNECTION_H_
#define QUIRE_STORE_REDIS_REDIS_CONNECTION_H_

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "net/socket.h"
#include "net/tls_session.h"
#include "quire/status.h"
#include "store/redis/redis_slots.h"
#include "store/redis/resp.h"

namespace quire {

class RedisConnection {
 public:
  // Begins to connect. `address.host` is a number or a path: names are resolved before. `tls`: null
  // for none; `host`: whose certificate the server must have. Unavailable.
  static Result<std::unique_ptr<RedisConnection>> Start(
      const RedisAddress& address, const std::shared_ptr<const TlsContext>& tls,
      const std::string& host);

  int fd() const { return socket_.fd(); }
  RespReader& reader() { return reader_; }
  // Goes on with connecting when the socket is ready; true when bytes can be sent.
  Result<bool> Connect();
  // It waits until the socket can be written to, whatever its user has to send.
  bool wants_write() const { return !is_connected_ || (tls_ != nullptr && tls_->wants_write()); }
  // Something for Receive is here already: the socket will not tell of it.
  bool has_buffered() const { return tls_ != nullptr && tls_->has_buffered(); }
  // Sends what Send has taken and not sent.
  Status Flush();
  // Bytes taken; 0: none now.
  Result<size_t> Send(std::span<const std::span<const std::byte>> spans);
  // Bytes received into reader(); 0: there are none now. Unavailable at the end of the stream.
  Result<size_t> Receive();
  // The other side hung up, or sent what nobody asked for. REQUIRES: no reply is due.
  bool IsStale();

 private:
  explicit RedisConnection(Socket socket) : socket_(std::move(socket)) {}

  const Socket socket_;
  bool is_connected_ = false;        // the socket
  std::unique_ptr<TlsSession> tls_;  // over the socket, which outlives it; null: none
  RespReader reader_;
};

}  // namespace quire

#endif  // QUIRE_STORE_REDIS_REDIS_CONNECTION_H_
