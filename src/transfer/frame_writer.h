// Frames that go out over one connection, in order, without the connection. Messages that must not
// wait (jobs, credits, signs of life) pass the rows that do, and not each other.
#ifndef QUIRE_TRANSFER_FRAME_WRITER_H_
#define QUIRE_TRANSFER_FRAME_WRITER_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "wire/transfer_frames.h"

namespace quire {

// Rows that are sent, kept until the receiver has them: it may ask for them again.
struct OutgoingPart {
  wire::TransferPart head{};
  std::unique_ptr<std::byte[]> bytes{};  // head.bytes of them
};

class FrameWriter {
 public:
  // After all that is queued.
  void Queue(wire::TransferOpcode opcode, std::vector<std::byte> head);
  void Queue(std::shared_ptr<const OutgoingPart> part);
  // At the next border of frames.
  void QueueUrgent(wire::TransferOpcode opcode, std::vector<std::byte> head);
  // Drops what has not begun; `head` is the goodbye, and nothing follows it.
  void End(std::vector<std::byte> head);
  // Parts of that transfer that have not begun are not sent: their numbers.
  std::vector<uint64_t> DropParts(uint64_t epoch);

  bool has_output() const { return in_frame_ || !urgent_.empty() || !queue_.empty(); }
  size_t urgent_count() const { return urgent_.size(); }

  // What is to be written next; valid until the next call that is not const. Empty without output.
  std::span<const std::span<const std::byte>> Gather();
  // `bytes` of them are written.
  void Consume(size_t bytes);

 private:
  struct Item {
    wire::TransferOpcode opcode{};
    std::vector<std::byte> head{};
    std::shared_ptr<const OutgoingPart> part{};  // kPart
    int64_t sent = -1;                           // of its bytes; -1: not even its head
  };

  void StartFrame();
  void StartPartFrame(Item* item);
  void SetFrame(wire::TransferOpcode opcode, std::vector<std::byte> head,
                std::span<const std::byte> data);

  std::deque<Item> urgent_;
  std::deque<Item> queue_;
  uint64_t next_number_ = 0;
  bool in_frame_ = false;
  std::byte header_[wire::kTransferHeaderBytes] = {};
  std::vector<std::byte> head_;
  std::shared_ptr<const OutgoingPart> frame_part_;  // keeps the frame's data
  std::vector<std::span<const std::byte>> spans_;   // of the frame, what is not written
};

}  // namespace quire

#endif  // QUIRE_TRANSFER_FRAME_WRITER_H_
