#include "wire/wire_link.h"

#include <algorithm>

#include "base/check.h"
#include "base/checksum.h"
#include "base/guard.h"

namespace quire::wire {
namespace {

uint64_t DataBytes(const TensorBundle& tensors) {
  uint64_t bytes = 0;
  for (const auto& [name, tensor] : tensors) bytes += static_cast<uint64_t>(tensor.bytes());
  return bytes;
}

constexpr size_t kShapeRankMax = 255;  // one byte on the wire
constexpr size_t kNameBytesMax = 65535;

}  // namespace

Message ErrorReply(Opcode opcode, uint64_t request, const Status& status) {
  Message message{.opcode = opcode, .is_reply = true, .request = request, .status = status.code()};
  FieldWriter(&message.fields)
      .AddText(status.message().substr(0, static_cast<size_t>(kErrorTextBytesMax)));
  return message;
}

Status CheckHead(const Message& message) {
  size_t bytes = message.fields.size();
  for (const auto& [name, tensor] : message.tensors) {
    if (name.size() > kNameBytesMax || tensor.shape().size() > kShapeRankMax) {
      return Status(StatusCode::kTooLarge, "a tensor has a name of " + std::to_string(name.size()) +
                                               " bytes and " +
                                               std::to_string(tensor.shape().size()) +
                                               " dimensions; at most 65535 and 255 can be sent");
    }
    bytes += 8 + name.size() + tensor.shape().size() * sizeof(int64_t);
  }
  if (bytes <= static_cast<size_t>(kHeadBytesMax)) return {};
  return Status(StatusCode::kTooLarge, "names, shapes and keys take " + std::to_string(bytes) +
                                           " bytes; at most " + std::to_string(kHeadBytesMax) +
                                           " can be sent at once");
}

// ------------------------------------------------------------------------------------ WireSender

void WireSender::Queue(Message message, ByteBudget::Hold hold) {
  Outgoing outgoing;
  outgoing.hold = std::move(hold);
  outgoing.head = message.fields;
  for (const auto& [name, tensor] : message.tensors) {
    EncodeTensorHeader(name, tensor, &outgoing.head);
  }
  outgoing.data_bytes = DataBytes(message.tensors);
  outgoing.message = std::move(message);
  messages_.push_back(std::move(outgoing));
}

bool WireSender::is_sending(uint64_t request) const {
  return std::any_of(messages_.begin(), messages_.end(),
                     [&](const Outgoing& o) { return o.message.request == request; });
}

bool WireSender::Abort(uint64_t request, Message instead) {
  const auto place = std::find_if(messages_.begin(), messages_.end(), [&](const Outgoing& o) {
    const bool is_in_last_frame = o.has_begun && o.sent == o.data_bytes;
    return o.message.request == request && !o.is_aborted && !is_in_last_frame;
  });
  if (place == messages_.end()) return false;
  if (place->has_begun) {
    place->is_aborted = true;
    place->message.status = instead.status;
    place->message.fields = std::move(instead.fields);
    return true;
  }
  messages_.erase(place);
  Queue(std::move(instead));
  return true;
}

void WireSender::End(Message last) {
  std::erase_if(messages_, [](const Outgoing& o) { return !o.has_begun; });
  for (Outgoing& outgoing : messages_) {
    if (outgoing.sent == outgoing.data_bytes) continue;
    outgoing.is_aborted = true;
    outgoing.message.status = last.status;
    outgoing.message.fields = last.fields;
  }
  Queue(std::move(last));
}

void WireSender::StartFrame() {
  Outgoing& outgoing = messages_.front();
  FrameHeader header{.opcode = static_cast<uint8_t>(outgoing.message.opcode),
                     .request = outgoing.message.request,
                     .number = next_number_++,
                     .status = outgoing.message.status};
  if (outgoing.message.is_reply) header.flags |= kFlagReply;
  if (outgoing.has_begun) header.flags |= kFlagContinued;
  parts_.assign(1, header_);
  uint64_t count = 0;
  if (outgoing.is_aborted) {
    header.flags |= kFlagAborted;
    outgoing.head = outgoing.message.fields;
    header.position = outgoing.sent;
    outgoing.sent = outgoing.data_bytes;
  }
  if (!outgoing.has_begun || outgoing.is_aborted) {
    header.head_bytes = static_cast<uint32_t>(outgoing.head.size());
    header.field_bytes = static_cast<uint32_t>(outgoing.message.fields.size());
    header.head_crc = Crc32c(outgoing.head.data(), outgoing.head.size());
    if (!outgoing.head.empty()) parts_.emplace_back(outgoing.head);
  }
  if (!outgoing.is_aborted) {
    if (!outgoing.has_begun) {
      header.tensor_count = static_cast<uint32_t>(outgoing.message.tensors.size());
    }
    header.position = outgoing.has_begun ? outgoing.sent : outgoing.data_bytes;
    count = std::min(outgoing.data_bytes - outgoing.sent,
                     static_cast<uint64_t>(kFrameBytesMax) - kHeaderBytes - header.head_bytes);
    AddData(outgoing, count);
  }
  header.data_bytes = static_cast<uint32_t>(count);
  const size_t data_part = header.head_bytes > 0 ? 2 : 1;
  for (size_t i = data_part; i < parts_.size(); ++i) {
    header.data_crc = Crc32c(parts_[i].data(), parts_[i].size(), header.data_crc);
  }
  outgoing.has_begun = true;
  EncodeHeader(header, header_);
  frame_bytes_ = kHeaderBytes + header.head_bytes + count;
  frame_sent_ = 0;
  in_frame_ = true;
}

// Adds the next `count` bytes of the tensors to the parts.
void WireSender::AddData(Outgoing& outgoing, uint64_t count) {
  uint64_t begin = 0;  // of the tensor within the data
  const uint64_t end = outgoing.sent + count;
  for (const auto& [name, tensor] : outgoing.message.tensors) {
    const auto bytes = static_cast<uint64_t>(tensor.bytes());
    const uint64_t from = std::max(begin, outgoing.sent);
    const uint64_t to = std::min(begin + bytes, end);
    if (from < to) parts_.emplace_back(tensor.data() + (from - begin), to - from);
    begin += bytes;
  }
  outgoing.sent = end;
}

std::vector<std::span<const std::byte>> WireSender::Gather() {
  if (!in_frame_) {
    if (messages_.empty()) return {};
    StartFrame();
  }
  std::vector<std::span<const std::byte>> rest;
  size_t skip = frame_sent_;
  for (const std::span<const std::byte> part : parts_) {
    if (skip < part.size()) rest.push_back(part.subspan(skip));
    skip -= std::min(skip, part.size());
  }
  return rest;
}

void WireSender::Consume(size_t bytes) {
  QUIRE_CHECK(in_frame_ && bytes <= frame_bytes_ - frame_sent_);
  frame_sent_ += bytes;
  if (frame_sent_ == frame_bytes_) FinishFrame();
}

void WireSender::FinishFrame() {
  in_frame_ = false;
  parts_.clear();
  Outgoing outgoing = std::move(messages_.front());
  messages_.pop_front();
  // A message that was aborted behind the begin of its last frame has arrived.
  if (outgoing.sent == outgoing.data_bytes) return;
  // One that is void ends before another one begins: the peer counts those that have not ended.
  if (outgoing.is_aborted) return messages_.push_front(std::move(outgoing));
  messages_.push_back(std::move(outgoing));
}

// ---------------------------------------------------------------------------------- WireReceiver

void WireReceiver::Stop() {
  is_stopped_ = true;
  if (is_receiving_) return;
  messages_.clear();
  head_ = std::vector<std::byte>();  // frees; "= {}" would keep the memory
}

Status WireReceiver::Receive(std::span<const std::byte> bytes) {
  is_receiving_ = true;
  const Status status = ReceiveParts(bytes);
  is_receiving_ = false;
  if (is_stopped_ || !status.ok()) Stop();
  return status;
}

Status WireReceiver::ReceiveParts(std::span<const std::byte> bytes) {
  while (!is_stopped_) {
    if (expect_ == Expect::kHeader) {
      const size_t count = std::min(bytes.size(), kHeaderBytes - have_);
      std::copy_n(bytes.begin(), count, header_bytes_ + have_);
      have_ += count;
      bytes = bytes.subspan(count);
      if (have_ < kHeaderBytes) return {};
      QUIRE_RETURN_IF_ERROR(OnHeader());
    } else if (expect_ == Expect::kHead) {
      const size_t count = std::min(bytes.size(), header_.head_bytes - have_);
      head_.insert(head_.end(), bytes.begin(), bytes.begin() + static_cast<ptrdiff_t>(count));
      have_ += count;
      bytes = bytes.subspan(count);
      if (have_ < header_.head_bytes) return {};
      QUIRE_RETURN_IF_ERROR(OnHead());
    } else {
      const size_t count = std::min(bytes.size(), header_.data_bytes - have_);
      TakeData(bytes.first(count));
      have_ += count;
      bytes = bytes.subspan(count);
      if (have_ < header_.data_bytes) return {};
      OnFrameEnd();
    }
  }
  return {};
}

Status WireReceiver::OnHeader() {
  QUIRE_ASSIGN_OR_RETURN(header_, DecodeHeader(header_bytes_, next_number_, head_bytes_max_));
  ++next_number_;
  const auto place = messages_.find(header_.request);
  if (header_.is_continued() == (place == messages_.end())) {
    return Status(StatusCode::kCorrupt,
                  "frame: request " + std::to_string(header_.request) +
                      (header_.is_continued() ? " goes on that never began" : " begins twice"));
  }
  if (header_.is_continued()) {
    const Incoming& incoming = place->second;
    if (header_.position != incoming.received ||
        header_.data_bytes > incoming.data_bytes - incoming.received ||
        header_.opcode != static_cast<uint8_t>(incoming.message.opcode) ||
        header_.is_reply() != incoming.message.is_reply) {
      return Status(StatusCode::kCorrupt, "frame: request " + std::to_string(header_.request) +
                                              " goes on elsewhere than where it stopped");
    }
  } else if (header_.data_bytes < header_.position && messages_.size() >= messages_max_) {
    return Status(StatusCode::kTooLarge,
                  "frame: more than " + std::to_string(messages_max_) + " messages are unfinished");
  }
  have_ = 0;
  data_crc_ = 0;
  head_.clear();
  expect_ = Expect::kHead;
  return {};
}

Status WireReceiver::OnHead() {
  if (!header_.is_continued()) QUIRE_RETURN_IF_ERROR(BeginMessage());
  if (header_.is_continued() && header_.is_aborted()) {
    const auto place = messages_.find(header_.request);
    const bool was_skipped = place->second.is_skipped;
    messages_.erase(place);
    const bool is_sound = Crc32c(head_.data(), head_.size()) == header_.head_crc;
    const StatusCode code =
        header_.status == StatusCode::kOk ? StatusCode::kCancelled : header_.status;
    if (!was_skipped) {
      handler_->OnBroken(header_, Status(code, is_sound ? std::string(TextOf(head_))
                                                        : std::string("aborted by the sender")));
    }
    expect_ = Expect::kHeader;
    have_ = 0;
    return {};
  }
  have_ = 0;
  expect_ = Expect::kData;
  return {};
}

Status WireReceiver::BeginMessage() {
  const auto place = messages_.emplace(header_.request, Incoming{}).first;
  Incoming& incoming = place->second;
  incoming.data_bytes = header_.position;
  incoming.message = {.opcode = static_cast<Opcode>(header_.opcode),
                      .is_reply = header_.is_reply(),
                      .request = header_.request,
                      .status = header_.status};
  if (Crc32c(head_.data(), head_.size()) != header_.head_crc) {
    Break(place, Status(StatusCode::kCorrupt, "the head's checksum is wrong"));
    return {};
  }
  const auto fields_end = head_.begin() + header_.field_bytes;
  incoming.message.fields.assign(head_.begin(), fields_end);
  auto headers = DecodeTensorHeaders(std::span(head_).subspan(header_.field_bytes),
                                     header_.tensor_count, header_.position);
  if (!headers.ok()) {
    Break(place, headers.status());
    return {};
  }
  incoming.headers = *std::move(headers);
  BeginBody(&incoming);
  return {};
}

void WireReceiver::BeginBody(Incoming* incoming) {
  const auto place = messages_.find(header_.request);
  const auto bytes = static_cast<int64_t>(incoming->data_bytes);
  Status status = handler_->OnBegin(incoming->message, incoming->headers, bytes);
  if (status.ok() && budget_ != nullptr) {
    std::optional<ByteBudget::Hold> hold = budget_->Take(bytes);
    if (hold) {
      incoming->hold = *std::move(hold);
    } else {
      status = Status(StatusCode::kFull,
                      "the message has " + std::to_string(bytes) + " bytes and there is room for " +
                          std::to_string(budget_->left()) + " while others arrive; try again");
    }
  }
  if (status.ok()) status = GuardEntry([&] { return AllocateTensors(incoming); });
  if (!status.ok()) Break(place, status);
}

Status WireReceiver::AllocateTensors(Incoming* incoming) {
  for (const TensorHeader& header : incoming->headers) {
    auto buffer = std::make_shared_for_overwrite<std::byte[]>(static_cast<size_t>(header.bytes));
    QUIRE_ASSIGN_OR_RETURN(HostTensor tensor,
                           HostTensor::Share(header.dtype, header.shape, buffer));
    incoming->message.tensors.emplace_back(header.name, std::move(tensor));
    incoming->buffers.push_back(std::move(buffer));
  }
  return {};
}

void WireReceiver::TakeData(std::span<const std::byte> bytes) {
  data_crc_ = Crc32c(bytes.data(), bytes.size(), data_crc_);
  Incoming& incoming = messages_.find(header_.request)->second;
  incoming.received += bytes.size();
  while (!incoming.is_skipped && !bytes.empty()) {
    const int64_t left = incoming.headers[incoming.tensor].bytes - incoming.tensor_at;
    const size_t count = std::min(bytes.size(), static_cast<size_t>(left));
    std::copy_n(bytes.begin(), count, incoming.buffers[incoming.tensor].get() + incoming.tensor_at);
    incoming.tensor_at += static_cast<int64_t>(count);
    bytes = bytes.subspan(count);
    if (incoming.tensor_at == incoming.headers[incoming.tensor].bytes) {
      ++incoming.tensor;
      incoming.tensor_at = 0;
    }
  }
}

void WireReceiver::OnFrameEnd() {
  expect_ = Expect::kHeader;
  have_ = 0;
  head_ = std::vector<std::byte>();  // frees; "= {}" would keep the memory
  const auto place = messages_.find(header_.request);
  Incoming& incoming = place->second;
  if (data_crc_ != header_.data_crc && !incoming.is_skipped) {
    Break(place, Status(StatusCode::kCorrupt, "the data's checksum is wrong"));
  }
  if (incoming.received < incoming.data_bytes) return;
  Incoming complete = std::move(incoming);
  messages_.erase(place);
  if (!complete.is_skipped) handler_->OnMessage(std::move(complete.message));
}

// What is still to come of it is skipped.
void WireReceiver::Break(Messages::iterator place, const Status& why) {
  Incoming& incoming = place->second;
  incoming.is_skipped = true;
  incoming.message.tensors.clear();
  incoming.message.fields = std::vector<std::byte>();
  incoming.buffers.clear();
  incoming.headers.clear();
  incoming.hold = {};
  handler_->OnBroken(header_, why);
}

int64_t WireReceiver::memory_bytes() const {
  auto bytes = static_cast<int64_t>(head_.capacity());
  for (const auto& [request, incoming] : messages_) {
    bytes +=
        static_cast<int64_t>(sizeof(Messages::value_type) + incoming.message.fields.capacity());
    for (const TensorHeader& header : incoming.headers) {
      bytes += static_cast<int64_t>(sizeof(header) + header.name.capacity()) + header.bytes;
    }
  }
  return bytes;
}

}  // namespace quire::wire
