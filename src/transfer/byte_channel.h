// A connection's bytes, whatever carries them: TCP, TLS over it, several of them, memory that two
// processes share, or UCX.
#ifndef QUIRE_TRANSFER_BYTE_CHANNEL_H_
#define QUIRE_TRANSFER_BYTE_CHANNEL_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "net/socket.h"
#include "net/tls_session.h"
#include "quire/status.h"

namespace quire {

// Never blocks. One thread at a time.
class ByteChannel {
 public:
  virtual ~ByteChannel() = default;

  // Bytes read, in order; 0: none now. Unavailable when the peer has gone, Corrupt for what no peer
  // of this version does.
  virtual Result<size_t> Read(std::span<const std::span<std::byte>> into) = 0;
  // The same; `crc`, the CRC-32C of what came before, goes on over these bytes as they are in
  // `into`.
  virtual Result<size_t> ReadSummed(std::span<const std::span<std::byte>> into, uint32_t* crc);
  // Bytes taken, in order; 0: none now.
  virtual Result<size_t> Write(std::span<const std::span<const std::byte>> parts) = 0;

  // Nothing more is written: the peer reads the end after what was.
  virtual void EndWrites() noexcept = 0;
  // After EndWrites: whether what was written reaches the peer without this side. Until then this
  // is to be called again after a wait.
  virtual bool HasLeft() noexcept { return true; }

  struct Wait {
    PollEntry entry{};      // what PollSockets is to wait for: nothing where nothing is wanted
    bool is_ready = false;  // Read or Write has something to do: do not wait
    // The same of further streams; valid until the next call.
    std::span<const PollEntry> more{};
  };
  // Before a wait: the peer wakes it from here on.
  virtual Wait PrepareWait(bool wants_read, bool wants_write) = 0;
  // A file whose poll for nothing ends when the peer is lost; -1: none.
  virtual int loss_fd() const noexcept { return -1; }
};

// Where connections come in. Never blocks. One thread at a time.
class ByteListener {
 public:
  virtual ~ByteListener() = default;

  // The next one; null: none now.
  virtual Result<std::unique_ptr<ByteChannel>> Accept() = 0;
  virtual ByteChannel::Wait PrepareWait() = 0;
};

std::unique_ptr<ByteChannel> StreamChannel(Socket socket);
// The session is of the socket. No byte passes before the handshake is done.
std::unique_ptr<ByteChannel> TlsChannel(Socket socket, std::unique_ptr<TlsSession> session);
// Over a unix socket. The connecting side makes the memory and passes it to the other one.
Result<std::unique_ptr<ByteChannel>> ConnectSharedMemory(Socket socket);
std::unique_ptr<ByteChannel> AcceptSharedMemory(Socket socket);
// Over UCX, with libquire_ucx.so. The address is no unix socket's. Connecting ends with the first
// bytes that are read, or a failure there. BadArgument without the library, with what to install.
Result<std::unique_ptr<ByteChannel>> ConnectUcx(const Endpoint& endpoint);
// `endpoint` gets the port that was taken.
Result<std::unique_ptr<ByteListener>> ListenUcx(Endpoint* endpoint);

}  // namespace quire

#endif  // QUIRE_TRANSFER_BYTE_CHANNEL_H_
