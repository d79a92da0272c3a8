// One side of a connection between two processes that move KV, without the connection: bytes in,
// bytes out, and the time. docs/formats/transfer-wire.md is the protocol.
//
//   hello --> (prove) --> passport --> (streams --> joins) --> open --> ending --> over
//     \--> joined: the socket is another connection's from then on
//
// Both sides are alike: each may ask for tokens (ReceiveHalf) and give them (SendHalf). How many
// streams carry the connection is the connecting side's choice, as far as the listener lets it.
#ifndef QUIRE_TRANSFER_TRANSFER_SESSION_H_
#define QUIRE_TRANSFER_TRANSFER_SESSION_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "quire/status.h"
#include "transfer/frame_reader.h"
#include "transfer/frame_writer.h"
#include "transfer/receive_half.h"
#include "transfer/send_half.h"
#include "wire/transfer_frames.h"

namespace quire {

// One thread at a time. One thread alone reads, writes, lets time pass, and ends the session.
class TransferSession final : private FrameReader::Handler {
 public:
  // What brings further streams to a connection.
  struct StreamsGranted {
    wire::Instance connection{};  // the listener's instance
    std::string key{};            // of proofs: wire::JoinKey
    uint16_t count = 0;
  };
  class Owner : public SendHalf::Owner {
   public:
    // The two sides match; the peer takes `window_bytes` of parts, and `receiver` names it.
    virtual void OnOpen(int64_t window_bytes, const wire::Instance& receiver) = 0;
    virtual void OnLoad(const TransferLoad& load) = 0;
    // The connection is to have `streams.count` streams, of which it has one. OnJoined follows when
    // the others are there.
    virtual void OnStreams(const StreamsGranted& streams) = 0;
    // A peer says that this socket is to be a stream of another connection; `hello` is what this
    // side has said on it. Ok: the session is joined, and the socket that connection's.
    virtual Status OnJoin(const wire::TransferJoin& join, const wire::TransferHello& hello) = 0;
    // Nothing begins on it any more. Called before receives and sends are ended: what waits for
    // them finds the reason.
    virtual void OnOver(const Status& why) noexcept = 0;

   protected:
    ~Owner() = default;
  };
  struct Options {
    bool is_connector = false;
    std::string secret{};
    std::string passport{};  // canonical JSON
    wire::Instance instance{};
    std::array<std::byte, wire::kNonceBytes> nonce{};
    wire::StreamToken token{};  // of a listener, for connections of several streams
    // That a connecting side wants, and that a listener gives at most.
    int64_t streams = 1;
    uint16_t version = wire::kTransferVersion;  // the last one that is spoken here
    int64_t heartbeat_ns = 0;
    int64_t dead_after_ns = 0;
    int64_t lease_ns = 0;
    int64_t window_bytes = 0;
    int64_t send_bytes = 0;      // as in TransferPeerOptions
    int64_t send_wait_ns = 0;    // of the owner's callers
    bool carries_salts = false;  // nobody else reads or writes what is sent
  };
  TransferSession(Owner* owner, Options options, int64_t now_ns);

  // The next bytes of the peer. When they are there and checked, OnRead takes them. Calls of others
  // are allowed meanwhile: a transfer that ends lets go of its bytes, and the memory that they come
  // to is the FrameRead's. REQUIRES: what was due in receives() is stored.
  FrameRead BeginRead() { return reader_.Begin(); }
  void OnRead(const FrameRead& read, int64_t now_ns);
  // Takes all of them, and stores what is due.
  void Receive(std::span<const std::byte> bytes, int64_t now_ns);
  bool accepts_input() const;

  bool has_output() const { return writer_.has_output(); }
  // The part that is written next, if its digest is to be made: nothing of it is gathered before it
  // has one. Calls of others are allowed meanwhile. Null: there is none.
  std::shared_ptr<OutgoingPart> WithoutDigest() const { return writer_.WithoutDigest(); }
  // What is to be written; Sent tells what was. Calls of others are allowed meanwhile. Empty also
  // where a part wants its digest.
  std::span<const std::span<const std::byte>> Gather(size_t frames_max) {
    return writer_.Gather(frames_max);
  }
  void Sent(size_t bytes, int64_t now_ns);

  // After OnStreams: the streams are there.
  void OnJoined();
  // Whether what is read, or written, from now on comes over all streams. Each once, after OnRead
  // and OnJoined, or Sent.
  bool TakeReadsStriped() { return std::exchange(reads_striped_, false); }
  bool TakeWritesStriped() { return writer_.TakeStriped(); }
  // The socket is a stream of another connection, and this session is over.
  bool is_joined() const { return state_ == State::kJoined; }

  // Lets time pass; due at next_deadline().
  void Tick(int64_t now_ns);
  int64_t next_deadline() const;

  // The peer is told at the next Tick, or a little later.
  void SetLoad(const TransferLoad& load) { load_ = load; }

  // Tells the peer, and ends.
  void Close(const Status& why, int64_t now_ns);
  // The connection is lost.
  void Lose(const Status& why);

  bool is_open() const { return state_ == State::kOpen; }
  // The connection is to be closed: all is said, or the peer is dead.
  bool is_over() const { return state_ == State::kOver; }
  // Why it is ending or over; ok before.
  const Status& status() const { return status_; }

  // REQUIRES: is_open()
  ReceiveHalf& receives() { return receives_; }
  SendHalf& sends() { return sends_; }
  // Allocated for frames of the peer.
  size_t memory_bytes() const { return reader_.memory_bytes(); }

 private:
  enum class State : uint8_t {
    kHello,
    kProve,
    kPassport,
    kStreams,  // how many there are to be is not said yet
    kJoins,    // they are not there yet, or the peer has not said so
    kOpen,
    kJoined,
    kEnding,
    kOver
  };

  Status OnFrame(const wire::TransferHeader& header, std::span<const std::byte> head) override;
  void DataPlaces(size_t count, std::vector<std::span<std::byte>>* places,
                  FrameRead* read) override;
  Status OnData(size_t count, uint32_t crc) override;

  Status OnOpening(wire::TransferOpcode opcode, std::span<const std::byte> head);
  Status OnHello(std::span<const std::byte> head);
  Status OnProve(std::span<const std::byte> head);
  Status OnPassport(std::span<const std::byte> head);
  Status OnStreams(std::span<const std::byte> head);
  Status OnJoin(std::span<const std::byte> head);
  Status OnStriped(std::span<const std::byte> head);
  bool is_reading() const;
  void AwaitStreams(const wire::TransferStreams& granted);
  void BeginStripes();
  void Open();
  Status OnMessage(const wire::TransferHeader& header, std::span<const std::byte> head);
  void SendPassport();
  void End(const Status& why);

  Owner* const owner_;
  const Options options_;
  State state_ = State::kHello;
  Status status_;
  wire::TransferHello own_hello_;
  wire::TransferHello peer_hello_;
  uint16_t version_ = 0;         // that both speak
  bool has_joined_ = false;      // the streams are there
  bool awaits_striped_ = false;  // the peer's next frame says that later ones are
  bool is_striped_ = false;      // of a connecting side: the peer has said so
  bool reads_striped_ = false;
  FrameWriter writer_;
  FrameReader reader_;
  ReceiveHalf receives_;
  SendHalf sends_;
  int64_t heartbeat_ns_;  // no longer than the peer waits
  TransferLoad load_;
  TransferLoad told_load_;
  int64_t told_ns_ = 0;
  int64_t now_ns_ = 0;
  int64_t heard_ns_ = 0;         // from the peer
  int64_t sent_ns_ = 0;          // the peer took bytes
  int64_t end_deadline_ns_ = 0;  // of the opening, then of the ending
};

}  // namespace quire

#endif  // QUIRE_TRANSFER_TRANSFER_SESSION_H_
