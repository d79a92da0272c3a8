// Bytes over a socket through TLS.
#include <utility>

#include "base/guard.h"
#include "transfer/byte_channel.h"

namespace quire {
namespace {

class TlsStream final : public ByteChannel {
 public:
  TlsStream(Socket socket, std::unique_ptr<TlsSession> session)
      : socket_(std::move(socket)), session_(std::move(session)) {}

  Result<size_t> Read(std::span<const std::span<std::byte>> into) override {
    size_t count = 0;
    QUIRE_ASSIGN_OR_RETURN(const bool is_open, Open());
    if (!is_open) return count;
    for (std::span<std::byte> place : into) {
      while (!place.empty()) {
        const Result<size_t> got = session_->Read(place);
        if (!got.ok() && failure_.ok()) failure_ = got.status();
        // What came before a failure is read first.
        if (!got.ok() || *got == 0) return EndOfRead(count);
        place = place.subspan(*got);
        count += *got;
      }
    }
    return count;
  }

  Result<size_t> Write(std::span<const std::span<const std::byte>> parts) override {
    QUIRE_ASSIGN_OR_RETURN(const bool is_open, Open());
    return is_open ? session_->Write(parts) : Result<size_t>(size_t{0});
  }

  void EndWrites() noexcept override {
    session_->EndWrites();
    socket_.EndWrites();
  }

  Wait PrepareWait(bool wants_read, bool wants_write) override {
    bool is_flushed = true;
    if (is_open_ && failure_.ok()) {
      failure_ = GuardEntry([&]() -> Status {
        QUIRE_ASSIGN_OR_RETURN(is_flushed, session_->Flush());
        return Status();
      });
    }
    const bool writes = is_open_ ? wants_write || !is_flushed : session_->wants_write();
    if (!wants_read && !writes) return {};  // a peer that is gone would end each wait at once
    return {.entry = {.fd = socket_.fd(), .wants_read = wants_read, .wants_write = writes},
            .is_ready = wants_read && (session_->has_buffered() || !failure_.ok())};
  }
  int loss_fd() const noexcept override { return socket_.fd(); }

 private:
  // Whether the handshake is done.
  Result<bool> Open() {
    if (is_open_) return true;
    if (!failure_.ok()) return failure_;
    const Result<bool> done = session_->Handshake();
    if (!done.ok()) failure_ = done.status();
    is_open_ = done.ok() && *done;
    return done;
  }
  Result<size_t> EndOfRead(size_t count) const {
    if (count > 0 || failure_.ok()) return count;
    return failure_;
  }

  const Socket socket_;
  const std::unique_ptr<TlsSession> session_;  // before the socket is closed
  bool is_open_ = false;
  Status failure_;  // of the handshake, or of what was received or is to be sent
};

}  // namespace

std::unique_ptr<ByteChannel> TlsChannel(Socket socket, std::unique_ptr<TlsSession> session) {
  return std::make_unique<TlsStream>(std::move(socket), std::move(session));
}

}  // namespace quire
