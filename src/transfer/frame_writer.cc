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

void FrameWriter::Queue(std::shared_ptr<const OutgoingPart> part) {
  QUIRE_DCHECK(part->bytes != nullptr);
  QUIRE_DCHECK(part->head.bytes > 0) << "no data frame would end the part";
  queue_.push_back({.opcode = TransferOpcode::kPart, .part = std::move(part)});
}

void FrameWriter::QueueUrgent(TransferOpcode opcode, std::vector<std::byte> head) {
  QUIRE_DCHECK(opcode != TransferOpcode::kRecord && opcode != TransferOpcode::kStop)
      << "it would pass the parts that it is about";
  urgent_.push_back({.opcode = opcode, .head = std::move(head)});
}

void FrameWriter::End(std::vector<std::byte> head) {
  urgent_.clear();
  queue_.clear();
  Queue(TransferOpcode::kGoodbye, std::move(head));
}

std::vector<uint64_t> FrameWriter::DropParts(uint64_t epoch) {
  std::vector<uint64_t> dropped;
  std::erase_if(queue_, [&](const Item& item) {
    if (item.part == nullptr || item.sent >= 0 || item.part->head.epoch != epoch) return false;
    dropped.push_back(item.part->head.number);
    return true;
  });
  return dropped;
}

std::span<const std::span<const std::byte>> FrameWriter::Gather() {
  if (!in_frame_ && has_output()) StartFrame();
  QUIRE_DCHECK(in_frame_ == !spans_.empty()) << "a frame is open as long as bytes of it are left";
  return spans_;
}

void FrameWriter::StartFrame() {
  if (!urgent_.empty()) {
    SetFrame(urgent_.front().opcode, std::move(urgent_.front().head), {});
    urgent_.pop_front();
    return;
  }
  Item& item = queue_.front();
  if (item.part != nullptr) return StartPartFrame(&item);
  SetFrame(item.opcode, std::move(item.head), {});
  queue_.pop_front();
}

void FrameWriter::StartPartFrame(Item* item) {
  const OutgoingPart& part = *item->part;
  QUIRE_DCHECK(item->sent < part.head.bytes) << "the queue keeps a part that is sent";
  if (item->sent < 0) {
    SetFrame(TransferOpcode::kPart, wire::Encode(part.head), {});
    item->sent = 0;
    return;
  }
  const int64_t count = std::min(part.head.bytes - item->sent, wire::kFrameDataBytesMax);
  const std::span data(part.bytes.get() + item->sent, static_cast<size_t>(count));
  frame_part_ = item->part;
  SetFrame(TransferOpcode::kData,
           wire::Encode(wire::TransferData{.part = part.head.number, .offset = item->sent}), data);
  item->sent += count;
  if (item->sent == part.head.bytes) queue_.pop_front();
}

void FrameWriter::SetFrame(TransferOpcode opcode, std::vector<std::byte> head,
                           std::span<const std::byte> data) {
  QUIRE_DCHECK(!in_frame_) << "bytes of another frame are still to be written";
  QUIRE_DCHECK(std::ssize(head) <= wire::kTransferHeadBytesMax) << "no peer takes such a head";
  QUIRE_DCHECK(std::ssize(data) <= wire::kFrameDataBytesMax) << "nor such data";
  head_ = std::move(head);
  wire::EncodeTransferHeader({.opcode = opcode,
                              .number = next_number_++,
                              .head_bytes = static_cast<uint32_t>(head_.size()),
                              .data_bytes = static_cast<uint32_t>(data.size()),
                              .head_crc = Crc32c(head_.data(), head_.size())},
                             header_);
  spans_.assign({std::span<const std::byte>(header_), std::span<const std::byte>(head_), data});
  std::erase_if(spans_, [](const auto& span) { return span.empty(); });
  in_frame_ = true;
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
  in_frame_ = false;
  frame_part_.reset();
}

}  // namespace quire
