// StagingMemory: where parts of reservations lie between their arrival and their page. It has a
// limit, whatever the number of reservations and of senders: a part that finds no room waits with
// its sender.
#ifndef QUIRE_KV_TRANSFER_STAGING_MEMORY_H_
#define QUIRE_KV_TRANSFER_STAGING_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>

#include "base/spare_memory.h"
#include "quire/kv_transfer.h"
#include "quire/status.h"

namespace quire {

// All calls from any thread.
class StagingMemory {
 public:
  // `bytes` bytes, which come back when the last holder lets go, whether or not the state is still
  // there. TooLarge: more than the limit; Full: more than is left of it. May throw std::bad_alloc.
  static Result<std::shared_ptr<std::byte[]>> Take(const std::shared_ptr<StagingMemory>& from,
                                                   int64_t bytes);
  // What parts hold beyond it they go on holding.
  void SetLimit(int64_t bytes);
  StagingUse use() const;

 private:
  // Memory that was used before; null: none of that size.
  Result<std::unique_ptr<std::byte[]>> TakeLocked(int64_t bytes);
  void GiveBack(std::unique_ptr<std::byte[]> memory, int64_t bytes) noexcept;
  void ShrinkSpareLocked() noexcept;

  // That no part has: the parts that come are of a few sizes.
  static constexpr int64_t kSpareBytesMax = int64_t{8} << 20;

  mutable std::mutex mutex_;
  StagingUse use_;
  SpareMemory spare_{kSpareBytesMax};  // with what is held no more than the limit
};

}  // namespace quire

#endif  // QUIRE_KV_TRANSFER_STAGING_MEMORY_H_
