// Messages over one connection, without the connection: WireSender cuts them into frames as the
// peer takes them, WireReceiver puts frames together again. Messages of several requests
// interleave frame by frame, so that a small one never waits behind a large one.
#ifndef QUIRE_WIRE_WIRE_LINK_H_
#define QUIRE_WIRE_WIRE_LINK_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "quire/host_tensor.h"
#include "quire/lookup_buffer.h"
#include "quire/status.h"
#include "wire/wire_format.h"

namespace quire::wire {

struct Message {
  Opcode opcode = Opcode::kPing;
  bool is_reply = false;
  uint64_t request = 0;
  StatusCode status = StatusCode::kOk;
  std::vector<std::byte> fields{};
  TensorBundle tensors{};  // its bytes are shared, never copied
};
// An answer that says why there is none. Long texts are cut.
Message ErrorReply(Opcode opcode, uint64_t request, const Status& status);
// TooLarge if the message's head is longer than a receiver takes.
Status CheckHead(const Message& message);

// What messages may hold while they come or go, over one connection or several. One thread.
class ByteBudget {
 public:
  explicit ByteBudget(int64_t bytes) : left_(bytes) {}
  int64_t left() const { return left_; }

  // A part of a budget, given back when it goes.
  class Hold {
   public:
    Hold() = default;
    Hold(Hold&& other) noexcept
        : budget_(std::exchange(other.budget_, nullptr)), bytes_(other.bytes_) {}
    Hold& operator=(Hold&& other) noexcept {
      std::swap(budget_, other.budget_);
      std::swap(bytes_, other.bytes_);
      return *this;
    }
    ~Hold() {
      if (budget_ != nullptr) budget_->left_ += bytes_;
    }

   private:
    friend class ByteBudget;
    Hold(ByteBudget* budget, int64_t bytes) : budget_(budget), bytes_(bytes) {
      budget_->left_ -= bytes;
    }
    ByteBudget* budget_ = nullptr;
    int64_t bytes_ = 0;
  };
  // nullopt if there are fewer left.
  std::optional<Hold> Take(int64_t bytes) {
    if (bytes > left_) return std::nullopt;
    return Hold(this, bytes);
  }

 private:
  int64_t left_;
};

class WireSender {
 public:
  // `hold` goes with the message. REQUIRES: CheckHead(message).ok()
  void Queue(Message message, ByteBudget::Hold hold = {});
  // Ends the message of a request whose last frame has not begun, and queues `instead`, or where a
  // part of it is out a frame that makes it void and says the same. Whether there was one.
  bool Abort(uint64_t request, Message instead);
  // Ends all messages in this way; `last` is the only one that follows.
  void End(Message last);

  bool has_output() const { return in_frame_ || !messages_.empty(); }
  size_t queued() const { return messages_.size(); }
  bool is_sending(uint64_t request) const;

  // Parts of what is to be written next; they stay valid until the next call that is not const.
  // Empty without output.
  std::vector<std::span<const std::byte>> Gather();
  // `bytes` of them are written.
  void Consume(size_t bytes);

 private:
  struct Outgoing {
    Message message;
    ByteBudget::Hold hold;
    std::vector<std::byte> head;
    uint64_t data_bytes = 0;
    uint64_t sent = 0;  // of the data, the current frame's included
    bool has_begun = false;
    bool is_aborted = false;
  };

  void StartFrame();
  void FinishFrame();
  void AddData(Outgoing& outgoing, uint64_t count);

  std::deque<Outgoing> messages_;  // the current frame is of the first
  uint64_t next_number_ = 0;
  bool in_frame_ = false;
  std::byte header_[kHeaderBytes] = {};
  std::vector<std::span<const std::byte>> parts_;  // of the current frame
  size_t frame_bytes_ = 0;
  size_t frame_sent_ = 0;
};

class WireReceiver {
 public:
  class Handler {
   public:
    virtual ~Handler() = default;
    // A message begins whose head is sound; `message` has all but the tensors, of which `tensors`
    // tells. Only with ok is there memory for them afterwards: else the data is skipped and
    // OnBroken follows with what this returned.
    virtual Status OnBegin(const Message& message, std::span<const TensorHeader> tensors,
                           int64_t data_bytes) = 0;
    // It is complete and its checksums are right.
    virtual void OnMessage(Message message) = 0;
    // Its frames are sound but what they hold is not, or it was aborted by its sender: nothing of
    // it remains. The connection goes on.
    virtual void OnBroken(const FrameHeader& header, const Status& why) = 0;
  };

  // `messages_max` unfinished messages at a time; one that its first frame finishes is none.
  // Without `budget` only what the handler admits bounds them.
  WireReceiver(Handler* handler, ByteBudget* budget, size_t messages_max)
      : handler_(handler), budget_(budget), messages_max_(messages_max) {}

  // The limit for the messages to come.
  void set_head_bytes_max(int64_t bytes) { head_bytes_max_ = bytes; }

  // Takes all of `bytes`, unless the handler calls Stop. An error: nothing that follows on this
  // connection can be trusted.
  Status Receive(std::span<const std::byte> bytes);
  // What follows is not looked at, what has not arrived to its end is freed. From within the
  // handler, too.
  void Stop();

  // Bytes allocated now, but for constant ones.
  int64_t memory_bytes() const;

 private:
  struct Incoming {
    Message message;
    std::vector<std::shared_ptr<std::byte[]>> buffers;  // of the tensors
    std::vector<TensorHeader> headers;
    ByteBudget::Hold hold;
    uint64_t data_bytes = 0;
    uint64_t received = 0;
    size_t tensor = 0;  // where the next byte goes
    int64_t tensor_at = 0;
    bool is_skipped = false;
  };
  using Messages = std::map<uint64_t, Incoming>;

  Status ReceiveParts(std::span<const std::byte> bytes);
  Status OnHeader();
  Status OnHead();
  Status BeginMessage();
  void BeginBody(Incoming* incoming);
  Status AllocateTensors(Incoming* incoming);
  void TakeData(std::span<const std::byte> bytes);
  void OnFrameEnd();
  void Break(Messages::iterator place, const Status& why);

  Handler* const handler_;
  ByteBudget* const budget_;
  const size_t messages_max_;
  int64_t head_bytes_max_ = kHeadBytesMax;
  bool is_stopped_ = false;
  bool is_receiving_ = false;
  uint64_t next_number_ = 0;

  enum class Expect : uint8_t { kHeader, kHead, kData };
  Expect expect_ = Expect::kHeader;
  std::byte header_bytes_[kHeaderBytes] = {};
  size_t have_ = 0;  // of header, head or data
  FrameHeader header_;
  std::vector<std::byte> head_;
  uint32_t data_crc_ = 0;
  Messages messages_;  // by request: begun and not complete
};

}  // namespace quire::wire

#endif  // QUIRE_WIRE_WIRE_LINK_H_
