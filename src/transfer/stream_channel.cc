// Bytes over a socket, as they are.
#include <utility>

#include "transfer/byte_channel.h"

namespace quire {
namespace {

class SocketStream final : public ByteChannel {
 public:
  explicit SocketStream(Socket socket) : socket_(std::move(socket)) {}

  Result<size_t> Read(std::span<const std::span<std::byte>> into) override {
    return socket_.Read(into);
  }
  Result<size_t> Write(std::span<const std::span<const std::byte>> parts) override {
    return socket_.Write(parts);
  }
  void EndWrites() noexcept override { socket_.EndWrites(); }
  Wait PrepareWait(bool wants_read, bool wants_write) override {
    // A peer that is gone would end each wait at once.
    if (!wants_read && !wants_write) return {};
    return {.entry = {.fd = socket_.fd(), .wants_read = wants_read, .wants_write = wants_write}};
  }
  int loss_fd() const noexcept override { return socket_.fd(); }

 private:
  const Socket socket_;
};

}  // namespace

std::unique_ptr<ByteChannel> StreamChannel(Socket socket) {
  return std::make_unique<SocketStream>(std::move(socket));
}

}  // namespace quire
