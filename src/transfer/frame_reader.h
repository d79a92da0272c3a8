// Frames that come in over one connection, without the connection. It says where the next bytes are
// to be put, so that rows go from a socket straight to where they are wanted.
#ifndef QUIRE_TRANSFER_FRAME_READER_H_
#define QUIRE_TRANSFER_FRAME_READER_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "quire/status.h"
#include "wire/transfer_frames.h"

namespace quire {

class FrameReader {
 public:
  class Handler {
   public:
    virtual ~Handler() = default;
    // The head of a frame is complete and its checksum is right. An error ends the connection.
    virtual Status OnFrame(const wire::TransferHeader& header, std::span<const std::byte> head) = 0;
    // Where the next bytes of the data frame that OnFrame has seen go: at least one place that is
    // not empty, and at most `count` bytes in all.
    virtual void DataPlaces(size_t count, std::vector<std::span<std::byte>>* places) = 0;
    // `count` of them are there.
    virtual Status OnData(size_t count) = 0;
  };

  explicit FrameReader(Handler* handler) : handler_(handler) {}

  // The longest head that is taken from now on.
  void set_head_bytes_max(int64_t bytes) { head_bytes_max_ = bytes; }

  // Never empty. Valid until the next call.
  std::span<const std::span<std::byte>> Places();
  // `count` bytes are there. An error: nothing that follows on this connection can be trusted.
  Status OnRead(size_t count);

  // Allocated for frames on their way.
  size_t memory_bytes() const { return head_.capacity(); }

 private:
  enum class Expect : uint8_t { kHeader, kHead, kData };

  // Bytes of header, head or data that belong together.
  size_t due() const;
  Status OnHeader();
  Status OnHead();

  Handler* const handler_;
  int64_t head_bytes_max_ = wire::kOpeningHeadBytesMax;
  Expect expect_ = Expect::kHeader;
  uint64_t next_number_ = 0;
  std::byte header_bytes_[wire::kTransferHeaderBytes] = {};
  wire::TransferHeader header_;
  std::vector<std::byte> head_;
  size_t have_ = 0;  // of header, head or data
  std::vector<std::span<std::byte>> places_;
};

}  // namespace quire

#endif  // QUIRE_TRANSFER_FRAME_READER_H_
