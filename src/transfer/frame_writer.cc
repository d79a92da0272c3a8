#include "transfer/frame_writer.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/checksum.h"

namespace quire {

using wire::TransferOpcode;

void FrameWriter::Queue(TransferOpcode opcode, std::vector<std::byte> head) {
  QUIRE_DCHECK(opcode != TransferOpcode::kPart) << "parts are queued with their rows";
  queue_.push_back({.opcode = opcode, .head = std::move(head)});
}

void FrameWriter::Queue(std::shared_ptr<OutgoingPart> part) {
  QUIRE_DCHECK(!part->runs.empty());
  QUIRE_DCHECK(part->head.bytes > 0) << "no data frame would end the part";
  queue_.push_back({.opcode = TransferOpcode::kPart, .part = std::move(part)});
}

void FrameWriter::QueueUrgent(TransferOpcode opcode, std::vector<std::byte> head) {
  QUIRE_DCHECK(opcode != TransferOpcode::kRecord && opcode != TransferOpcode::kStop)
      << "it would pass the parts that it is about";
  urgent_.push_back({.opcode = opcode, .head = std::move(head)});
}

void FrameWriter::DropUrgentSince(size_t count) noexcept {
  QUIRE_DCHECK(count <= urgent_.size()) << "frames were gathered since then";
  while (urgent_.size() > count) urgent_.pop_back();
}

void FrameWriter::End(std::vector<std::byte> head) {
  urgent_.clear();
  queue_.clear();
  Queue(TransferOpcode::kGoodbye, std::move(head));
}

std::shared_ptr<OutgoingPart> FrameWriter::WithoutDigest() const {
  const auto next = std::ranges::find_if(queue_, [](const Item& i) { return i.part != nullptr; });
  return next != queue_.end() && next->wants_digest() ? next->part : nullptr;
}

std::span<const std::span<const std::byte>> FrameWriter::Gather(size_t frames_max) {
  if (!spans_.empty()) return spans_;
  QUIRE_DCHECK(frames_.empty() && data_part_ == nullptr)
      << "they are kept as long as bytes are left";
  while (frames_.size() < frames_max && data_part_ == nullptr && !ends_plain_bytes_ && has_frame())
    StartFrame();
  return spans_;
}

void FrameWriter::StartFrame() {
  if (!urgent_.empty()) {
    ends_plain_bytes_ = urgent_.front().opcode == TransferOpcode::kStriped;
    SetFrame(urgent_.front().opcode, std::move(urgent_.front().head));
    urgent_.pop_front();
    return;
  }
  Item& item = queue_.front();
  if (item.part != nullptr) return StartPartFrame(&item);
  SetFrame(item.opcode, std::move(item.head));
  queue_.pop_front();
}

void FrameWriter::StartPartFrame(Item* item) {
  const OutgoingPart& part = *item->part;
  QUIRE_DCHECK(item->sent < part.head.bytes) << "the queue keeps a part that is sent";
  QUIRE_DCHECK(!part.wants_digest) << "the receiver would take its rows for damaged";
  if (item->sent < 0) {
    SetFrame(TransferOpcode::kPart, wire::Encode(part.head));
    item->sent = 0;
    return;
  }
  const int64_t count = std::min(part.head.bytes - item->sent, wire::kFrameDataBytesMax);
  data_part_ = item->part;
  SetFrame(TransferOpcode::kData,
           wire::Encode(wire::TransferData{.part = part.head.number, .offset = item->sent}), count);
  AddData(part, item->sent, count);
  item->sent += count;
  if (item->sent < part.head.bytes) return;
  last_whole_part_ = std::max(last_whole_part_, part.head.number);
  queue_.pop_front();
}

void FrameWriter::SetFrame(TransferOpcode opcode, std::vector<std::byte> head, int64_t data_bytes) {
  QUIRE_DCHECK(std::ssize(head) <= wire::kTransferHeadBytesMax) << "no peer takes such a head";
  QUIRE_DCHECK(data_bytes <= wire::kFrameDataBytesMax) << "nor such data";
  Frame& frame = frames_.emplace_back();
  frame.head = std::move(head);
  wire::EncodeTransferHeader({.opcode = opcode,
                              .number = next_number_++,
                              .head_bytes = static_cast<uint32_t>(frame.head.size()),
                              .data_bytes = static_cast<uint32_t>(data_bytes),
                              .head_crc = Crc32c(frame.head.data(), frame.head.size())},
                             frame.header);
  spans_.emplace_back(frame.header);
  if (!frame.head.empty()) spans_.emplace_back(frame.head);
}

void FrameWriter::AddData(const OutgoingPart& part, int64_t first, int64_t count) {
  auto skipped = static_cast<size_t>(first);
  auto left = static_cast<size_t>(count);
  for (const std::span<const std::byte>& run : part.runs) {
    const size_t from = std::min(skipped, run.size());
    const size_t bytes = std::min(left, run.size() - from);
    if (bytes > 0) spans_.push_back(run.subspan(from, bytes));
    skipped -= from;
    left -= bytes;
  }
  QUIRE_CHECK(left == 0) << "a part has fewer bytes than its head says";
}

void FrameWriter::Consume(size_t bytes) {
  while (bytes > 0) {
    QUIRE_CHECK(!spans_.empty()) << "more is written than there was";
    const size_t count = std::min(bytes, spans_.front().size());
    spans_.front() = spans_.front().subspan(count);
    bytes -= count;
    if (spans_.front().empty()) spans_.erase(spans_.begin());
  }
  if (!spans_.empty()) return;
  if (std::exchange(ends_plain_bytes_, false)) is_striped_ = true;
  frames_.clear();
  data_part_.reset();
}

}  // namespace quire
