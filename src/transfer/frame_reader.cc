#include "transfer/frame_reader.h"

#include <algorithm>

#include "base/check.h"
#include "base/copied_checksum.h"

namespace quire {
namespace {

// Read at a time. Where it is hashed after that, it is still in the cache then.
constexpr size_t kDataAtOnce = size_t{1} << 18;
constexpr size_t kNowhereBytes = size_t{1} << 16;

}  // namespace

void FrameRead::Check(size_t bytes) {
  CheckSummed(bytes, is_hashed ? Crc32cOfPieces(places, bytes, crc) : crc);
}

void FrameRead::CheckSummed(size_t bytes, uint32_t sum) {
  QUIRE_DCHECK(count == 0) << "they are checked already";
  size_t room = 0;
  for (const std::span<std::byte>& place : places) room += place.size();
  QUIRE_CHECK(bytes <= room) << "more is read than there were places for";
  count = bytes;
  crc = sum;
  memory.reset();  // for the next part
}

size_t FrameReader::due() const {
  if (expect_ == Expect::kHeader) return wire::kTransferHeaderBytes;
  return expect_ == Expect::kHead ? head_.size() : header_.data_bytes;
}

FrameRead FrameReader::Begin() {
  QUIRE_CHECK(have_ < due()) << "what is complete was not handled";
  FrameRead read{.number = ++reads_};
  places_.clear();
  if (expect_ == Expect::kHeader) {
    places_.push_back(std::span(header_bytes_).subspan(have_));  // its decoder has its checksum
  } else if (expect_ == Expect::kHead) {
    places_.push_back(std::span(head_).subspan(have_));
    read.is_hashed = true;
    read.crc = head_crc_;
  } else {
    const size_t count = std::min(kDataAtOnce, header_.data_bytes - have_);
    handler_->DataPlaces(count, &places_, &read);
    read.is_hashed = !places_.empty();
    if (places_.empty()) {
      nowhere_.resize(kNowhereBytes);
      places_.push_back(std::span(nowhere_).first(std::min(count, kNowhereBytes)));
    }
  }
  QUIRE_DCHECK(!places_.front().empty()) << "there is no place to read to";
  read.places = places_;
  return read;
}

Status FrameReader::OnRead(const FrameRead& read) {
  QUIRE_CHECK(read.number == reads_) << "two read from one connection";
  QUIRE_CHECK(read.count > 0) << "nothing was read, or it was not checked";
  QUIRE_CHECK(read.count <= due() - have_) << "more is read than there were places for";
  have_ += read.count;
  if (expect_ == Expect::kHeader) return have_ == due() ? OnHeader() : Status();
  if (expect_ == Expect::kHead) {
    head_crc_ = read.crc;
    return have_ == due() ? OnHead() : Status();
  }
  QUIRE_RETURN_IF_ERROR(handler_->OnData(read.count, read.crc));
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
  head_crc_ = 0;
  head_ = std::vector<std::byte>(header_.head_bytes);
  expect_ = Expect::kHead;
  return head_.empty() ? OnHead() : Status();
}

Status FrameReader::OnHead() {
  QUIRE_DCHECK(expect_ == Expect::kHead);
  QUIRE_DCHECK(have_ == header_.head_bytes) << "the head has not come";
  if (head_crc_ != header_.head_crc) {
    return Status(StatusCode::kCorrupt, "transfer frame: the head's checksum is wrong");
  }
  have_ = 0;
  expect_ = header_.data_bytes > 0 ? Expect::kData : Expect::kHeader;
  const std::vector<std::byte> head = std::move(head_);
  head_ = std::vector<std::byte>();
  return handler_->OnFrame(header_, head);
}

}  // namespace quire
