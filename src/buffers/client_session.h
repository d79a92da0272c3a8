// What a client of remote buffers does with one connection, without the connection: bytes in, bytes
// out, and the time.
#ifndef QUIRE_BUFFERS_CLIENT_SESSION_H_
#define QUIRE_BUFFERS_CLIENT_SESSION_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "quire/status.h"
#include "wire/wire_format.h"
#include "wire/wire_link.h"

namespace quire {

// One thread at a time.
class ClientSession final : private wire::WireReceiver::Handler {
 public:
  class Owner {
   public:
    virtual ~Owner() = default;
    // The answer to a request, once for each: a failure that the server stated, or a message that
    // did not arrive sound.
    virtual void OnAnswer(uint64_t request, Result<wire::Message> answer) = 0;
  };
  struct Options {
    std::string secret{};
    uint32_t services = 0;
    int64_t message_bytes_max = 0;
  };

  ClientSession(Owner* owner, Options options, std::span<const std::byte, wire::kNonceBytes> nonce,
                int64_t now_ns);

  // Not ok: the connection has ended, and why. Requests without an answer get none.
  Status Receive(std::span<const std::byte> bytes, int64_t now_ns);
  Status Tick(int64_t now_ns);
  int64_t next_deadline() const;

  // The hello is done; requests may be sent.
  bool is_open() const { return state_ == State::kOpen; }
  int64_t requests_max() const { return hello_.requests_max; }

  // REQUIRES: is_open(), a request number that has no answer due, wire::CheckHead(message).ok()
  void Send(wire::Message message);
  // A request without an answer still gets one. The entry of a request that is answered is put
  // back.
  void Cancel(uint64_t request);

  bool has_output() const { return sender_.has_output(); }
  std::vector<std::span<const std::byte>> Gather() { return sender_.Gather(); }
  void Sent(size_t bytes) { sender_.Consume(bytes); }

 private:
  enum class State : uint8_t { kHello, kProve, kOpen };

  Status OnBegin(const wire::Message& message, std::span<const wire::TensorHeader> tensors,
                 int64_t data_bytes) override;
  void OnMessage(wire::Message message) override;
  void OnBroken(const wire::FrameHeader& header, const Status& why) override;
  void OnHello(const wire::Message& message);
  void OnProve(const wire::Message& message);
  void OnOpen();
  void End(const Status& status);
  void Answer(uint64_t request, Result<wire::Message> answer);

  Owner* const owner_;
  const Options options_;
  State state_ = State::kHello;
  Status end_;
  wire::ClientHello client_hello_;
  wire::ServerHello hello_;
  wire::WireSender sender_;
  wire::WireReceiver receiver_;
  std::map<uint64_t, wire::Opcode> due_;  // requests without an answer
  int64_t heard_ns_ = 0;
  int64_t next_ping_ns_ = 0;
};

}  // namespace quire

#endif  // QUIRE_BUFFERS_CLIENT_SESSION_H_
