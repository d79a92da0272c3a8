// Bytes of one connection over several streams: byte p of a direction goes over stream
// (p / kStripeBytes) mod n.
#ifndef QUIRE_TRANSFER_STRIPED_CHANNEL_H_
#define QUIRE_TRANSFER_STRIPED_CHANNEL_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "net/socket.h"
#include "quire/status.h"
#include "transfer/byte_channel.h"
#include "wire/transfer_frames.h"

namespace quire {

// Each direction goes over the first stream alone until it is told otherwise. The streams hold what
// arrives before it is due, as far as they have room: nothing is kept here. A stream that is lost
// is the connection's end.
class StripedChannel final : public ByteChannel {
 public:
  // REQUIRES: 1 to kStreamsMax of them.
  explicit StripedChannel(std::vector<std::unique_ptr<ByteChannel>> streams);

  // From here on that direction's bytes are counted, and go over all.
  void StripeReads() { read_.is_striped = true; }
  void StripeWrites() { write_.is_striped = true; }

  Result<size_t> Read(std::span<const std::span<std::byte>> into) override;
  Result<size_t> Write(std::span<const std::span<const std::byte>> parts) override;
  void EndWrites() noexcept override;
  bool HasLeft() noexcept override;
  Wait PrepareWait(bool wants_read, bool wants_write) override;

 private:
  struct Direction {
    bool is_striped = false;
    uint64_t position = 0;  // of the next byte, once it is striped
  };

  ByteChannel& StreamOf(const Direction& direction) { return *streams_[IndexOf(direction)]; }
  size_t IndexOf(const Direction& direction) const {
    return direction.position / wire::kStripeBytes % streams_.size();
  }
  template <typename Byte, typename F>
  Result<size_t> Move(Direction* direction, std::span<const std::span<Byte>> spans,
                      std::vector<std::span<Byte>>* stripe, F&& move);
  Status CheckStreams();

  const std::vector<std::unique_ptr<ByteChannel>> streams_;
  Direction read_, write_;
  // The stripe that is moved.
  std::vector<std::span<std::byte>> read_spans_;
  std::vector<std::span<const std::byte>> write_spans_;
  std::vector<PollEntry> others_;  // of the last wait, or of a look at the streams
};

}  // namespace quire

#endif  // QUIRE_TRANSFER_STRIPED_CHANNEL_H_
