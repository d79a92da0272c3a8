// StoreKeeper: what a store does by itself. One thread ends forgotten pins, sweeps expired chunks
// out of RAM and collects the tiers' events every second; another one, if there is a disk, removes
// what is expired there and reads it through for damage.
#ifndef QUIRE_STORE_TIERED_STORE_KEEPER_H_
#define QUIRE_STORE_TIERED_STORE_KEEPER_H_

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>

#include "store/tiered/store_parts.h"

namespace quire {

class StoreKeeper {
 public:
  // std::system_error without threads.
  explicit StoreKeeper(std::shared_ptr<StoreParts> parts);
  ~StoreKeeper() { Close(); }
  // Nothing is begun any more. What looks through the disk goes on until the tier is closed.
  void Stop() noexcept;
  // Stops and waits for the threads.
  void Close() noexcept;

 private:
  void Sweep() noexcept;
  void Scrub() noexcept;
  void ScrubOnce(SlowTier& disk);
  // False if it is to stop.
  bool Sleep(int64_t ns) noexcept;

  const std::shared_ptr<StoreParts> parts_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool closing_ = false;
  std::thread sweeper_;
  std::thread scrubber_;
};

}  // namespace quire

#endif  // QUIRE_STORE_TIERED_STORE_KEEPER_H_
