// How a socket becomes a stream of a connection, without the sockets: what the connecting side says
// on it, and what a listener knows of the connections that wait for streams.
#ifndef QUIRE_TRANSFER_STREAM_JOINS_H_
#define QUIRE_TRANSFER_STREAM_JOINS_H_

#include <atomic>
#include <bitset>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "quire/status.h"
#include "transfer/byte_channel.h"
#include "transfer/frame_reader.h"
#include "transfer/frame_writer.h"
#include "transfer/transfer_session.h"
#include "wire/transfer_frames.h"

namespace quire {

// The connecting side on one socket: it reads the listener's hello and says which stream of which
// connection this is to be. What the listener sends after its hello is not read.
class StreamJoin final : private FrameReader::Handler {
 public:
  StreamJoin(TransferSession::StreamsGranted granted, uint16_t stream)
      : granted_(std::move(granted)), stream_(stream), reader_(this) {}

  // Whether it has heard all that it needs. REQUIRES, for the next two: not yet.
  bool has_heard() const { return has_heard_; }
  FrameRead BeginRead() { return reader_.Begin(); }
  Status OnRead(const FrameRead& read) { return reader_.OnRead(read); }

  bool has_output() const { return writer_.has_output(); }
  std::span<const std::span<const std::byte>> Gather() { return writer_.Gather(1); }
  void Sent(size_t bytes) { writer_.Consume(bytes); }

 private:
  Status OnFrame(const wire::TransferHeader& header, std::span<const std::byte> head) override;
  void DataPlaces(size_t, std::vector<std::span<std::byte>>*, FrameRead*) override {}
  Status OnData(size_t, uint32_t) override { return Status(); }

  const TransferSession::StreamsGranted granted_;
  const uint16_t stream_;
  bool has_heard_ = false;
  FrameReader reader_;
  FrameWriter writer_;
};

// The connections of a listener that wait for streams. From any thread.
class StreamBook : public std::enable_shared_from_this<StreamBook> {
  using Take = std::function<void(uint16_t stream, std::unique_ptr<ByteChannel>)>;

  struct Waiting {
    TransferSession::StreamsGranted streams;
    Take take;
    std::bitset<wire::kStreamsMax> is_claimed{};
    std::atomic<size_t> claims_ended = 0;
  };

 public:
  // As long as it lives, streams may join. It may be empty.
  class Entry {
   public:
    Entry() = default;
    Entry(std::shared_ptr<StreamBook> book, std::shared_ptr<Waiting> waiting)
        : book_(std::move(book)), waiting_(std::move(waiting)) {}
    Entry(Entry&&) noexcept = default;
    Entry& operator=(Entry&& other) noexcept {
      Leave();
      book_ = std::move(other.book_);
      waiting_ = std::move(other.waiting_);
      return *this;
    }
    ~Entry() { Leave(); }

   private:
    void Leave() noexcept;

    std::shared_ptr<StreamBook> book_;
    std::shared_ptr<Waiting> waiting_;
  };
  // The right to be one stream of one connection. The connection has a place for it as long as it
  // lives.
  class Claim {
   public:
    Claim() = default;
    Claim(std::shared_ptr<Waiting> waiting, uint16_t stream)
        : waiting_(std::move(waiting)), stream_(stream) {}
    Claim(Claim&&) noexcept = default;
    Claim& operator=(Claim&& other) noexcept {
      End();
      waiting_ = std::move(other.waiting_);
      stream_ = other.stream_;
      return *this;
    }
    ~Claim() { End(); }
    bool is_empty() const { return waiting_ == nullptr; }
    // Once. REQUIRES: it is not empty.
    void Deliver(std::unique_ptr<ByteChannel> channel) const noexcept;

   private:
    void End() noexcept {
      if (waiting_ != nullptr) ++waiting_->claims_ended;
    }

    std::shared_ptr<Waiting> waiting_;
    uint16_t stream_ = 0;
  };

  // `take` is called for each stream once, from any thread, also after the entry has gone; it must
  // not throw.
  Entry Expect(const TransferSession::StreamsGranted& streams, Take take);
  // Remote for a join that no connection waits for. `hello` is what was said on the socket.
  Result<Claim> Check(const wire::TransferJoin& join, const wire::TransferHello& hello);
  // Streams that connections wait for, those with a claim included.
  size_t due() const;

 private:
  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<Waiting>> waiting_;
};

}  // namespace quire

#endif  // QUIRE_TRANSFER_STREAM_JOINS_H_
