// Frames that go out over one connection, in order, without the connection. Messages that must not
// wait (jobs, credits, signs of life) pass the rows that do, and not each other.
#ifndef QUIRE_TRANSFER_FRAME_WRITER_H_
#define QUIRE_TRANSFER_FRAME_WRITER_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "wire/transfer_frames.h"

namespace quire {

// Rows that are sent, kept until the receiver has them: it may ask for them again.
struct OutgoingPart {
  wire::TransferPart head{};
  std::vector<std::span<const std::byte>> runs{};  // head.bytes of them, in order
  std::shared_ptr<const void> memory{};            // of the runs
  bool wants_digest = false;                       // head.digest is made just before it is written
};

class FrameWriter {
 public:
  // After all that is queued. Parts are numbered in the order in which they are queued first.
  void Queue(wire::TransferOpcode opcode, std::vector<std::byte> head);
  void Queue(std::shared_ptr<OutgoingPart> part);
  // After the frames that were gathered.
  void QueueUrgent(wire::TransferOpcode opcode, std::vector<std::byte> head);
  // Urgent frames that were queued since urgent_count() was `count` are not sent. REQUIRES: no
  // Gather since then.
  void DropUrgentSince(size_t count) noexcept;
  // Drops what has not begun; `head` is the goodbye, and nothing follows it.
  void End(std::vector<std::byte> head);
  // Parts of that transfer that have not begun are not sent; `dropped` is told their numbers. Needs
  // no memory: connections end that way.
  template <typename F>
  void DropParts(uint64_t epoch, F&& dropped) {
    std::erase_if(queue_, [&](const Item& item) {
      if (item.part == nullptr || item.sent >= 0 || item.part->head.epoch != epoch) return false;
      dropped(item.part->head.number);
      return true;
    });
  }

  // The last part of which all was gathered: every part of a lower number was, too, or was dropped.
  uint64_t last_whole_part() const { return last_whole_part_; }

  // Whether the frame that says that all later ones are striped was written since the last call.
  // No later one is gathered before it is.
  bool TakeStriped() { return std::exchange(is_striped_, false); }

  bool has_output() const { return !spans_.empty() || has_queued(); }
  size_t urgent_count() const { return urgent_.size(); }

  // The next part, if it wants its digest. Null: there is none.
  std::shared_ptr<OutgoingPart> WithoutDigest() const;
  // What is to be written next: at most frames_max frames, the last of which alone has data. Valid
  // until the next Gather or Consume, whatever is queued or dropped meanwhile. Empty without
  // output, and where the next frame is of a part that wants its digest.
  std::span<const std::span<const std::byte>> Gather(size_t frames_max);
  // `bytes` of them are written.
  void Consume(size_t bytes);

 private:
  struct Item {
    wire::TransferOpcode opcode{};
    std::vector<std::byte> head{};
    std::shared_ptr<OutgoingPart> part{};  // kPart
    int64_t sent = -1;                     // of its bytes; -1: not even its head

    bool wants_digest() const { return part != nullptr && part->wants_digest; }
  };

  bool has_queued() const { return !urgent_.empty() || !queue_.empty(); }
  bool has_frame() const {
    return !urgent_.empty() || (!queue_.empty() && !queue_.front().wants_digest());
  }
  void StartFrame();
  void StartPartFrame(Item* item);
  void SetFrame(wire::TransferOpcode opcode, std::vector<std::byte> head, int64_t data_bytes = 0);
  // The frame's data: `count` bytes of the part's from `first` on.
  void AddData(const OutgoingPart& part, int64_t first, int64_t count);

  std::deque<Item> urgent_;
  std::deque<Item> queue_;
  struct Frame {
    std::byte header[wire::kTransferHeaderBytes] = {};
    std::vector<std::byte> head{};
  };

  bool ends_plain_bytes_ = false;  // the last frame that was gathered is kStriped
  bool is_striped_ = false;
  uint64_t next_number_ = 0;
  uint64_t last_whole_part_ = 0;
  std::deque<Frame> frames_;                       // that were gathered
  std::shared_ptr<const OutgoingPart> data_part_;  // keeps the data of the last of them
  std::vector<std::span<const std::byte>> spans_;  // of them, what is not written
};

}  // namespace quire

#endif  // QUIRE_TRANSFER_FRAME_WRITER_H_
