// Memory for parts on their way, used again: fresh memory costs more than the copy into it.
#ifndef QUIRE_TRANSFER_PART_POOL_H_
#define QUIRE_TRANSFER_PART_POOL_H_

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "transfer/frame_writer.h"

namespace quire {

// Rows are sent in parts of at most this size, so that each travels in one frame; only a row that
// is longer makes a longer part.
inline constexpr int64_t kPartBytes = wire::kFrameDataBytesMax;

// All calls from any thread.
class PartPool {
 public:
  // A part of `bytes` bytes, which gives its memory back when it goes. May throw std::bad_alloc.
  static std::shared_ptr<OutgoingPart> Take(const std::shared_ptr<PartPool>& pool, int64_t bytes);

 private:
  void GiveBack(std::unique_ptr<std::byte[]> memory) noexcept;

  std::mutex mutex_;
  std::vector<std::unique_ptr<std::byte[]>> spare_;  // of kPartBytes
};

}  // namespace quire

#endif  // QUIRE_TRANSFER_PART_POOL_H_
