// RedisConnection: one socket to one server, never blocking. hiredis connects it; commands go out
// from where they lie and replies come in through RespReader.
#ifndef QUIRE_STORE_REDIS_CONNECTION_H_
#define QUIRE_STORE_REDIS_CONNECTION_H_

#include <cstddef>
#include <memory>
#include <span>

#include "quire/status.h"
#include "store/redis_slots.h"
#include "store/resp.h"

namespace quire {

class RedisConnection {
 public:
  // Begins to connect; whether it worked shows when the socket can be written to. `address.host` is
  // a number or a path: names are resolved before. Unavailable.
  static Result<std::unique_ptr<RedisConnection>> Start(const RedisAddress& address);
  ~RedisConnection();
  RedisConnection(const RedisConnection&) = delete;
  RedisConnection& operator=(const RedisConnection&) = delete;

  int fd() const { return fd_; }
  RespReader& reader() { return reader_; }
  // The outcome of Start, once the socket can be written to.
  Status FinishConnect();
  // Bytes sent; 0: the socket takes none now.
  Result<size_t> Send(std::span<const std::span<const std::byte>> spans);
  // Bytes received into reader(); 0: there are none now. Unavailable at the end of the stream.
  Result<size_t> Receive();
  // The other side hung up, or sent what nobody asked for. REQUIRES: no reply is due.
  bool IsStale() const;

 private:
  explicit RedisConnection(int fd) : fd_(fd) {}

  const int fd_;
  RespReader reader_;
};

}  // namespace quire

#endif  // QUIRE_STORE_REDIS_CONNECTION_H_
