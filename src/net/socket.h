// TCP and unix sockets that never block, a wait for several of them, and the system's random
// numbers: all that the remote buffers and the Redis tier ask of the operating system.
#ifndef QUIRE_NET_SOCKET_H_
#define QUIRE_NET_SOCKET_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "base/clock.h"
#include "quire/status.h"

namespace quire {

struct Endpoint {
  bool is_unix = false;
  std::string path{};  // of a unix socket
  std::string
      address{};  // numeric; of a link-local IPv6 address with its interface: "fe80::1%eth0"
  bool is_ipv6 = false;
  uint16_t port = 0;
  uint64_t file_device = 0, file_number = 0;  // of a unix socket that listens

  // "ADDRESS:PORT", "[ADDRESS]:PORT", "localhost:PORT", "unix:PATH"; BadArgument.
  static Result<Endpoint> Parse(std::string_view text);
  std::string ToString() const;
  // Only processes of this machine reach it.
  bool is_local() const;
};

class Socket {
 public:
  Socket() = default;
  explicit Socket(int fd) : fd_(fd) {}
  Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Socket();

  // Listens; `endpoint` gets the port that was taken, or says which file was made. A unix socket's
  // file that nobody listens at is replaced; only this user may connect.
  static Result<Socket> Listen(Endpoint* endpoint);
  // Begins to connect; done when it can be written to and ConnectError is ok.
  static Result<Socket> Connect(const Endpoint& endpoint);
  Status ConnectError() const;

  bool is_open() const { return fd_ >= 0; }
  int fd() const { return fd_; }
  // The system asks an idle peer now and then whether it is there: else firewalls forget a
  // connection of which nothing is heard. TCP alone.
  void KeepAlive() const noexcept;
  // Nobody waits: an unopened socket.
  Result<Socket> Accept() const;

  // Bytes read; 0: none now, try when readable. Unavailable when the peer has closed.
  Result<size_t> Read(std::span<std::byte> into) const;
  // The same into several places, in order; places of no bytes are passed over.
  Result<size_t> Read(std::span<const std::span<std::byte>> into) const;
  // Bytes written, in order; 0: none now.
  Result<size_t> Write(std::span<const std::span<const std::byte>> parts) const;
  // Nothing more is written: the peer reads the end after what was.
  void EndWrites() const noexcept;

 private:
  int fd_ = -1;
};

// Removes the file of a unix socket that Listen made, unless another one has taken the name since.
// Best before the socket is closed: from then on another file may get the same number.
void RemoveSocketFile(const Endpoint& endpoint) noexcept;

// Wakes a thread in PollSockets. Signal may be called from any thread.
class Waker {
 public:
  static Result<Waker> Create();
  void Signal() const noexcept;
  void Clear() const noexcept;
  int fd() const { return socket_.fd(); }

 private:
  Socket socket_;  // an eventfd
};

struct PollEntry {
  int fd = -1;
  bool wants_read = false;
  bool wants_write = false;
  bool can_read = false;  // or it has failed, which a read tells
  bool can_write = false;
};
// Waits for any of them, for at most timeout_ns (kNever: for ever). Allocates nothing for up to 18.
void PollSockets(std::span<PollEntry> entries, int64_t timeout_ns);

}  // namespace quire

#endif  // QUIRE_NET_SOCKET_H_
