#include "transfer/frame_reader.h"

#include <algorithm>

#include "base/checksum.h"

namespace quire {
namespace {

// Read at a time: what is read is hashed next, and is still in the cache then.
constexpr size_t kDataAtOnce = size_t{1} << 18;

}  // namespace

std::span<const std::span<std::byte>> FrameReader::Places() {
  places_.clear();
  if (expect_ == Expect::kHeader) {
    places_.push_back(std::span(header_bytes_).subspan(have_));
  } else if (expect_ == Expect::kHead) {
    places_.push_back(std::span(head_).subspan(have_));
  } else {
    handler_->DataPlaces(std::min(kDataAtOnce, header_.data_bytes - have_), &places_);
  }
  return places_;
}

Status FrameReader::OnRead(size_t count) {
  have_ += count;
  if (expect_ == Expect::kHeader) {
    return have_ == wire::kTransferHeaderBytes ? OnHeader() : Status();
  }
  if (expect_ == Expect::kHead) return have_ == head_.size() ? OnHead() : Status();
  QUIRE_RETURN_IF_ERROR(handler_->OnData(count));
  if (have_ < header_.data_bytes) return Status();
  have_ = 0;
  expect_ = Expect::kHeader;
  return Status();
}

Status FrameReader::OnHeader() {
  QUIRE_ASSIGN_OR_RETURN(header_,
                         wire::DecodeTransferHeader(header_bytes_, next_number_, head_bytes_max_));
  ++next_number_;
  have_ = 0;
  head_ = std::vector<std::byte>(header_.head_bytes);
  expect_ = Expect::kHead;
  return head_.empty() ? OnHead() : Status();
}

Status FrameReader::OnHead() {
  if (Crc32c(head_.data(), head_.size()) != header_.head_crc) {
    return Status(StatusCode::kCorrupt, "transfer frame: the head's checksum is wrong");
  }
  have_ = 0;
  expect_ = header_.data_bytes > 0 ? Expect::kData : Expect::kHeader;
  const std::vector<std::byte> head = std::move(head_);
  head_ = std::vector<std::byte>();
  return handler_->OnFrame(header_, head);
}

}  // namespace quire
