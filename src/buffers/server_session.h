// What a server of buffers does with one connection, without the connection: bytes in, bytes out,
// and the time. docs/formats/wire.md is the protocol.
#ifndef QUIRE_BUFFERS_SERVER_SESSION_H_
#define QUIRE_BUFFERS_SERVER_SESSION_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "buffers/local_lookup_buffer.h"
#include "quire/store_buffer.h"
#include "wire/wire_format.h"
#include "wire/wire_link.h"

namespace quire {

// What all sessions of a server share. It outlives them.
struct ServedBuffers {
  LocalLookupBuffer* lookup = nullptr;  // null: not served
  StoreBuffer* store = nullptr;         // null: not served
  std::string secret{};                 // empty: nobody has to show one
  int64_t requests_max = 0;             // unfinished ones of a connection
  int64_t query_bytes_max = 0;          // tokens and roi of a take
  int64_t heartbeat_ns = 0;
  int64_t dead_after_ns = 0;
  int64_t lease_ns = 0;
  wire::ByteBudget budget{0};   // of requests that arrive
  wire::ByteBudget waiting{0};  // of queries that wait
};

// One thread at a time. A session that goes puts back every entry that was on its way.
class ServerSession final : private wire::WireReceiver::Handler {
 public:
  // `wake`: called from any thread and under locks when Wake has something to do.
  ServerSession(ServedBuffers* served, std::span<const std::byte, wire::kNonceBytes> nonce,
                std::function<void()> wake, int64_t now_ns);

  // Takes all of them. What is wrong with them is answered.
  void Receive(std::span<const std::byte> bytes, int64_t now_ns);
  // False while the peer does not take the answers that it has: nothing more is read then.
  bool accepts_input() const;
  void Wake(int64_t now_ns);
  // Lets time pass; due at next_deadline().
  void Tick(int64_t now_ns);
  int64_t next_deadline() const;

  bool has_output() const { return sender_.has_output(); }
  std::vector<std::span<const std::byte>> Gather() { return sender_.Gather(); }
  void Sent(size_t bytes, int64_t now_ns);

  // Answers everything that waits with Closed and ends.
  void Close(int64_t now_ns);
  // The connection is to be closed: all is said, or the peer is dead.
  bool is_over() const { return state_ == State::kOver; }
  bool is_open() const { return state_ == State::kOpen; }

  // Held for this peer but for tensors that are sent. The lookup buffer counts its own until they
  // are acknowledged. Those of a store may be replaced or deleted meanwhile: the answers to a peer
  // hold at most as many bytes as the store may have.
  int64_t memory_bytes() const;

 private:
  enum class State : uint8_t { kHello, kProve, kOpen, kEnding, kOver };
  // A take between its request and the end of its hand-over.
  struct Taking {
    std::unique_ptr<PendingTake> pending{};  // null: found
    wire::ByteBudget::Hold query{};          // of `pending`
    int64_t deadline_ns = 0;                 // of the search, then of the hand-over
    std::optional<Handover> handover{};
  };
  using Takes = std::map<uint64_t, Taking>;

  Status OnBegin(const wire::Message& message, std::span<const wire::TensorHeader> tensors,
                 int64_t data_bytes) override;
  void OnMessage(wire::Message message) override;
  void OnBroken(const wire::FrameHeader& header, const Status& why) override;

  Status CheckOpcode(const wire::Message& message) const;
  Status CheckBody(const wire::Message& message, size_t tensor_count, int64_t data_bytes) const;
  void OnHello(const wire::Message& message);
  void OnProve(const wire::Message& message);
  void OnTake(wire::Message message);
  // Counts the query of a take that waits, or refuses it.
  void Hold(Takes::iterator place, int64_t tokens);
  void OnAcknowledge(const wire::Message& message);
  void OnCancel(const wire::Message& message);
  void OnPut(wire::Message message);
  void OnGet(wire::Message message);
  // Those that wait, in their order.
  void AnswerGets();
  // False: it waits until the peer has taken more of the answers before it.
  bool AnswerGet(const wire::Message& get);
  void OnDelete(const wire::Message& message);
  void OnExists(const wire::Message& message);
  void OnStats(const wire::Message& message);

  void PollTakes();
  // True when the search is over and answered.
  bool PollTake(uint64_t request, Taking* taking);
  void SendEntry(uint64_t request, Taking* taking, Handover handover);
  void Reply(const wire::Message& request, std::vector<std::byte> fields, TensorBundle tensors,
             wire::ByteBudget::Hold hold = {});
  void ReplyError(const wire::Message& request, const Status& status);
  void Fail(const Status& status);
  bool ExpireTakes();

  ServedBuffers* const served_;
  const std::function<void()> wake_;
  State state_ = State::kHello;
  wire::ClientHello client_hello_;
  wire::ServerHello hello_;
  wire::ByteBudget stored_;  // of answers with tensors of the store
  wire::WireSender sender_;
  wire::WireReceiver receiver_;
  Takes takes_;
  std::deque<wire::Message> gets_;  // that wait
  int64_t now_ns_ = 0;
  int64_t heard_ns_ = 0;  // from the peer
  int64_t sent_ns_ = 0;   // the peer took bytes
  int64_t state_deadline_ns_ = 0;
};

}  // namespace quire

#endif  // QUIRE_BUFFERS_SERVER_SESSION_H_
