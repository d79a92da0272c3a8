// Frames that come in over one connection, without the connection. It says where the next bytes are
// to be put, so that rows go from a socket straight to where they are wanted.
//
//   Begin --> the bytes are read, FrameRead::Check --> OnRead
//
// A FrameRead needs nothing but itself. So what the handler guards by a lock is free while bytes
// are read and hashed, and may be dropped meanwhile.
#ifndef QUIRE_TRANSFER_FRAME_READER_H_
#define QUIRE_TRANSFER_FRAME_READER_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "quire/status.h"
#include "wire/transfer_frames.h"

namespace quire {

// Bytes that are being read: where they go, whose memory it keeps, and their checksum.
struct FrameRead {
  std::span<const std::span<std::byte>> places{};  // never empty
  std::shared_ptr<const void> memory{};            // of the places, if it is not the reader's
  bool is_hashed = false;
  uint32_t crc = 0;     // CRC-32C of what came before and belongs to them; after Check with them
  size_t count = 0;     // that are there
  uint64_t number = 0;  // of the read

  // `bytes` of them are there, and nothing writes to their places any more.
  void Check(size_t bytes);
  // The same where `sum`, crc with them, is known.
  void CheckSummed(size_t bytes, uint32_t sum);
};

// One thread, which may use a FrameRead beside calls of other threads to the handler.
class FrameReader {
 public:
  class Handler {
   public:
    virtual ~Handler() = default;
    // The head of a frame is complete and its checksum is right. An error ends the connection.
    virtual Status OnFrame(const wire::TransferHeader& header, std::span<const std::byte> head) = 0;
    // Where the next `count` bytes of the data frame that OnFrame has seen go, with the memory of
    // the places and the checksum of what came before. No places: nobody wants the bytes.
    virtual void DataPlaces(size_t count, std::vector<std::span<std::byte>>* places,
                            FrameRead* read) = 0;
    // `count` of them are there. `crc` is theirs and that of what came before, if they had places.
    virtual Status OnData(size_t count, uint32_t crc) = 0;
  };

  explicit FrameReader(Handler* handler) : handler_(handler) {}

  // The longest head that is taken from now on.
  void set_head_bytes_max(int64_t bytes) { head_bytes_max_ = bytes; }

  // The next bytes. Those of a FrameRead before it are not taken any more.
  FrameRead Begin();
  // They are checked, and at least one is there. An error: nothing that follows on this connection
  // can be trusted.
  Status OnRead(const FrameRead& read);

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
  uint32_t head_crc_ = 0;  // of what has come of it
  size_t have_ = 0;        // of header, head or data
  uint64_t reads_ = 0;     // that have begun
  std::vector<std::span<std::byte>> places_;
  std::vector<std::byte> nowhere_;
};

}  // namespace quire

#endif  // QUIRE_TRANSFER_FRAME_READER_H_
