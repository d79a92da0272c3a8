#include "net/socket.h"

#include <arpa/inet.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <iterator>
#include <limits>
#include <system_error>
#include <vector>

#include "base/check.h"
#include "base/clock.h"
#include "net/socket_address.h"

namespace quire {
namespace {

// A frame has a header, a head and a few tensors; more parts take another call.
constexpr size_t kPartsMax = 64;
constexpr int kBacklog = 128;
constexpr size_t kEntriesWithoutMemory = 18;  // a connection of 16 streams, and what wakes it

Status SystemError(const std::string& what) {
  const int code = errno;
  return Status(StatusCode::kUnavailable, what + ": " + std::generic_category().message(code));
}

bool IsLater() { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

// A numeric address, with or without "%INTERFACE". False for anything else.
bool ReadIpv6(const std::string& text, sockaddr_in6* to) {
  const size_t percent = text.find('%');
  if (inet_pton(AF_INET6, text.substr(0, percent).c_str(), &to->sin6_addr) != 1) return false;
  if (percent == std::string::npos) return true;
  to->sin6_scope_id = ::if_nametoindex(text.substr(percent + 1).c_str());
  return to->sin6_scope_id != 0;
}

Socket NewSocket(const Endpoint& endpoint) {
  const int family = endpoint.is_unix ? AF_UNIX : endpoint.is_ipv6 ? AF_INET6 : AF_INET;
  return Socket(::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
}

// Small frames leave at once.
void SetNoDelay(int fd) {
  const int on = 1;
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));  // fails on unix sockets: no matter
}

// The file of a server that was killed is removed; that of one which listens is not.
void RemoveStaleFile(const Endpoint& endpoint, const SocketAddress& address) {
  struct stat info {};
  if (::lstat(endpoint.path.c_str(), &info) != 0 || !S_ISSOCK(info.st_mode)) return;
  const Socket probe = NewSocket(endpoint);
  if (probe.is_open() && ::connect(probe.fd(), address.get(), address.size) != 0 &&
      errno == ECONNREFUSED) {
    ::unlink(endpoint.path.c_str());
  }
}

void ReadPort(int fd, Endpoint* endpoint) {
  SocketAddress address;
  address.size = sizeof(address.storage);
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&address.storage), &address.size) != 0) return;
  endpoint->port = address.port();
}

// Whether the name is that of the endpoint's file.
bool HasFile(const Endpoint& endpoint) {
  struct stat info {};
  return ::lstat(endpoint.path.c_str(), &info) == 0 && info.st_dev == endpoint.file_device &&
         info.st_ino == endpoint.file_number;
}

Status ReadFile(Endpoint* endpoint) {
  struct stat info {};
  if (::lstat(endpoint->path.c_str(), &info) != 0) return SystemError(endpoint->ToString());
  endpoint->file_device = info.st_dev;
  endpoint->file_number = info.st_ino;
  return Status();
}

Status NoEndpoint(std::string_view text, const std::string& why) {
  return Status(StatusCode::kBadArgument,
                "endpoint \"" + std::string(text) + "\": " + why +
                    "; give ADDRESS:PORT with a numeric address or localhost, or unix:PATH");
}

Result<Endpoint> ParseUnix(std::string_view text) {
  Endpoint endpoint{.is_unix = true, .path = std::string(text.substr(5))};
  if (endpoint.path.empty() || endpoint.path.size() >= sizeof(sockaddr_un::sun_path) ||
      endpoint.path.find('\0') != std::string::npos) {
    return NoEndpoint(
        text, "a path has 1 to " + std::to_string(sizeof(sockaddr_un::sun_path) - 1) + " bytes");
  }
  return endpoint;
}

}  // namespace

SocketAddress AddressOf(const Endpoint& endpoint) {
  SocketAddress address;
  if (endpoint.is_unix) {
    auto* to = reinterpret_cast<sockaddr_un*>(&address.storage);
    to->sun_family = AF_UNIX;
    std::memcpy(to->sun_path, endpoint.path.data(), endpoint.path.size());
    address.size = sizeof(sockaddr_un);
  } else if (endpoint.is_ipv6) {
    auto* to = reinterpret_cast<sockaddr_in6*>(&address.storage);
    to->sin6_family = AF_INET6;
    to->sin6_port = htons(endpoint.port);
    ReadIpv6(endpoint.address, to);
    address.size = sizeof(sockaddr_in6);
  } else {
    auto* to = reinterpret_cast<sockaddr_in*>(&address.storage);
    to->sin_family = AF_INET;
    to->sin_port = htons(endpoint.port);
    inet_pton(AF_INET, endpoint.address.c_str(), &to->sin_addr);
    address.size = sizeof(sockaddr_in);
  }
  return address;
}

uint16_t SocketAddress::port() const {
  return ntohs(storage.ss_family == AF_INET6
                   ? reinterpret_cast<const sockaddr_in6*>(&storage)->sin6_port
                   : reinterpret_cast<const sockaddr_in*>(&storage)->sin_port);
}

Result<Endpoint> Endpoint::Parse(std::string_view text) {
  if (text.substr(0, 5) == "unix:") return ParseUnix(text);
  const size_t colon = text.rfind(':');
  if (colon == std::string_view::npos) return NoEndpoint(text, "it has no port");
  std::string_view host = text.substr(0, colon);
  const std::string_view digits = text.substr(colon + 1);
  Endpoint endpoint;
  const auto [end, error] =
      std::from_chars(digits.data(), digits.data() + digits.size(), endpoint.port);
  if (error != std::errc() || end != digits.data() + digits.size()) {
    return NoEndpoint(text, "the port is no number below 65536");
  }
  endpoint.is_ipv6 = host.size() > 2 && host.front() == '[' && host.back() == ']';
  if (endpoint.is_ipv6) host = host.substr(1, host.size() - 2);
  endpoint.address = host == "localhost" ? "127.0.0.1" : std::string(host);
  in_addr ipv4{};
  sockaddr_in6 ipv6{};
  const bool is_numeric = endpoint.is_ipv6
                              ? ReadIpv6(endpoint.address, &ipv6)
                              : inet_pton(AF_INET, endpoint.address.c_str(), &ipv4) == 1;
  if (!is_numeric) return NoEndpoint(text, "the address is not numeric");
  return endpoint;
}

std::string Endpoint::ToString() const {
  if (is_unix) return "unix:" + path;
  return (is_ipv6 ? "[" + address + "]" : address) + ":" + std::to_string(port);
}

bool Endpoint::is_local() const {
  if (is_unix) return true;
  if (!is_ipv6) return address.substr(0, 4) == "127.";
  sockaddr_in6 parsed{};
  return ReadIpv6(address, &parsed) && IN6_IS_ADDR_LOOPBACK(&parsed.sin6_addr);
}

Socket::~Socket() {
  if (fd_ >= 0) ::close(fd_);
}

Result<Socket> Socket::Listen(Endpoint* endpoint) {
  const std::string name = "listening at " + endpoint->ToString();
  const SocketAddress address = AddressOf(*endpoint);
  if (endpoint->is_unix) RemoveStaleFile(*endpoint, address);
  Socket socket = NewSocket(*endpoint);
  if (!socket.is_open()) return SystemError(name);
  const int on = 1;
  ::setsockopt(socket.fd(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (::bind(socket.fd(), address.get(), address.size) != 0) return SystemError(name);
  // Nobody connects before it listens, so nobody slips in before the mode is set.
  if (endpoint->is_unix && ::chmod(endpoint->path.c_str(), S_IRUSR | S_IWUSR) != 0) {
    return SystemError(name);
  }
  if (endpoint->is_unix) QUIRE_RETURN_IF_ERROR(ReadFile(endpoint));
  if (::listen(socket.fd(), kBacklog) != 0) return SystemError(name);
  if (!endpoint->is_unix) ReadPort(socket.fd(), endpoint);
  return socket;
}

Result<Socket> Socket::Connect(const Endpoint& endpoint) {
  const std::string name = "connecting to " + endpoint.ToString();
  Socket socket = NewSocket(endpoint);
  if (!socket.is_open()) return SystemError(name);
  if (!endpoint.is_unix) SetNoDelay(socket.fd());
  const SocketAddress address = AddressOf(endpoint);
  if (::connect(socket.fd(), address.get(), address.size) != 0 && errno != EINPROGRESS) {
    return SystemError(name);
  }
  return socket;
}

Status Socket::ConnectError() const {
  int code = 0;
  socklen_t size = sizeof(code);
  if (::getsockopt(fd_, SOL_SOCKET, SO_ERROR, &code, &size) != 0) code = errno;
  if (code == 0) return {};
  return Status(StatusCode::kUnavailable, "connecting: " + std::generic_category().message(code));
}

Result<Socket> Socket::Accept() const {
  Socket accepted(::accept4(fd_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (accepted.is_open()) {
    SetNoDelay(accepted.fd());
    return accepted;
  }
  // A peer that went before it was accepted is nobody's error.
  if (IsLater() || errno == ECONNABORTED) return Socket();
  return SystemError("accepting a connection");
}

void Socket::KeepAlive() const noexcept {
  const int on = 1;
  const int idle_seconds = 30;  // firewalls keep idle connections for minutes
  const int every_seconds = 10;
  const int tries = 3;
  ::setsockopt(fd_, IPPROTO_TCP, TCP_KEEPIDLE, &idle_seconds, sizeof(idle_seconds));
  ::setsockopt(fd_, IPPROTO_TCP, TCP_KEEPINTVL, &every_seconds, sizeof(every_seconds));
  ::setsockopt(fd_, IPPROTO_TCP, TCP_KEEPCNT, &tries, sizeof(tries));
  ::setsockopt(fd_, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
}

Result<size_t> Socket::Read(std::span<std::byte> into) const {
  return Read(std::span<const std::span<std::byte>>(&into, 1));
}

Result<size_t> Socket::Read(std::span<const std::span<std::byte>> into) const {
  iovec vectors[kPartsMax];
  size_t count = 0;
  for (const std::span<std::byte>& part : into) {
    if (!part.empty() && count < kPartsMax) vectors[count++] = {part.data(), part.size()};
  }
  msghdr message{};
  message.msg_iov = vectors;
  message.msg_iovlen = count;
  const ssize_t received = ::recvmsg(fd_, &message, 0);
  if (received > 0) return static_cast<size_t>(received);
  if (received == 0) return Status(StatusCode::kUnavailable, "the peer closed the connection");
  if (IsLater()) return size_t{0};
  return SystemError("reading from the connection");
}

Result<size_t> Socket::Write(std::span<const std::span<const std::byte>> parts) const {
  iovec vectors[kPartsMax];
  const size_t count = std::min(parts.size(), kPartsMax);
  for (size_t i = 0; i < count; ++i) {
    vectors[i] = {const_cast<std::byte*>(parts[i].data()), parts[i].size()};
  }
  msghdr message{};
  message.msg_iov = vectors;
  message.msg_iovlen = count;
  const ssize_t written = ::sendmsg(fd_, &message, MSG_NOSIGNAL);
  if (written >= 0) return static_cast<size_t>(written);
  if (IsLater()) return size_t{0};
  return SystemError("writing to the connection");
}

void Socket::EndWrites() const noexcept { ::shutdown(fd_, SHUT_WR); }

void RemoveSocketFile(const Endpoint& endpoint) noexcept {
  if (endpoint.is_unix && HasFile(endpoint)) ::unlink(endpoint.path.c_str());
}

Result<Waker> Waker::Create() {
  Waker waker;
  waker.socket_ = Socket(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  if (!waker.socket_.is_open()) return SystemError("eventfd");
  return waker;
}

void Waker::Signal() const noexcept {
  const uint64_t one = 1;
  // It fails only when it is signalled 2^64 times already.
  [[maybe_unused]] const ssize_t count = ::write(fd(), &one, sizeof(one));
}

void Waker::Clear() const noexcept {
  uint64_t count = 0;
  [[maybe_unused]] const ssize_t got = ::read(fd(), &count, sizeof(count));
}

void PollSockets(std::span<PollEntry> entries, int64_t timeout_ns) {
  // Threads that must not fail wait for a few: no memory is taken for those.
  std::array<pollfd, kEntriesWithoutMemory> few{};
  std::vector<pollfd> many(entries.size() > few.size() ? entries.size() : 0);
  pollfd* const fds = many.empty() ? few.data() : many.data();
  for (size_t i = 0; i < entries.size(); ++i) {
    fds[i].fd = entries[i].fd;
    if (entries[i].wants_read) fds[i].events |= POLLIN;
    if (entries[i].wants_write) fds[i].events |= POLLOUT;
  }
  // Rounded up, so that a moment that is waited for has come.
  const int64_t timeout_ms = std::min<int64_t>(
      timeout_ns / kNsPerMs + (timeout_ns % kNsPerMs > 0 ? 1 : 0), std::numeric_limits<int>::max());
  const int count =
      ::poll(fds, entries.size(), timeout_ns == kNever ? -1 : static_cast<int>(timeout_ms));
  for (size_t i = 0; i < entries.size(); ++i) {
    const int events = count > 0 ? fds[i].revents : 0;
    entries[i].can_read = (events & (POLLIN | POLLHUP | POLLERR | POLLNVAL)) != 0;
    entries[i].can_write = (events & (POLLOUT | POLLHUP | POLLERR)) != 0;
  }
}

}  // namespace quire
