#include "transfer/frame_reader.h"

#include <algorithm>

#include "base/check.h"
#include "base/checksum.h"

namespace quire {
namespace {

// Read at a time: what is read is hashed next, and is still in the cache then.
constexpr size_t kDataAtOnce = size_t{1} << 18;

}  // namespace

size_t FrameReader::due() const {
  if (expect_ == Expect::kHeader) return wire::kTransferHeaderBytes;
  return expect_ == Expect::kHead ? head_.size() : header_.data_bytes;
}

std::span<const std::span<std::byte>> FrameReader::Places() {
  QUIRE_CHECK(have_ < due()) << "what is complete was not handled";
  places_.clear();
  if (expect_ == Expect::kHeader) {
    places_.push_back(std::span(header_bytes_).subspan(have_));
  } else if (expect_ == Expect::kHead) {
    places_.push_back(std::span(head_).subspan(have_));
  } else {
    handler_->DataPlaces(std::min(kDataAtOnce, header_.data_bytes - have_), &places_);
  }
  QUIRE_DCHECK(!places_.empty() && !places_.front().empty()) << "there is no place to read to";
  return places_;
}

Status FrameReader::OnRead(size_t count) {
  QUIRE_CHECK(count <= due() - have_) << "more is read than there were places for";
  have_ += count;
  if (expect_ == Expect::kHeader) return have_ == due() ? OnHeader() : Status();
  if (expect_ == Expect::kHead) return have_ == due() ? OnHead() : Status();
  QUIRE_RETURN_IF_ERROR(handler_->OnData(count));
  if (have_ < due()) return Status();
  have_ = 0;
  expect_ = Expect::kHeader;
  return Status();
}

Status FrameReader::OnHeader() {
  QUIRE_ASSIGN_OR_RETURN(header_,
                         wire::DecodeTransferHeader(header_bytes_, next_number_, head_bytes_max_));
  QUIRE_DCHECK(header_.head_bytes <= head_bytes_max_) << "a peer could make this side allocate";
  QUIRE_DCHECK(header_.data_bytes == 0 || header_.opcode == wire::TransferOpcode::kData)
      << "only data frames have data";
  ++next_number_;
  have_ = 0;
  head_ = std::vector<std::byte>(header_.head_bytes);
  expect_ = Expect::kHead;
  return head_.empty() ? OnHead() : Status();
}

Status FrameReader::OnHead() {
  QUIRE_DCHECK(expect_ == Expect::kHead);
  QUIRE_DCHECK(have_ == header_.head_bytes) << "the head has not come";
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
