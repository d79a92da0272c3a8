#include "store/tiered/store_keeper.h"

#include <algorithm>
#include <new>
#include <utility>
#include <vector>

namespace quire {
namespace {

constexpr int64_t kSecondNs = 1'000'000'000;
// Pins and expired chunks stay at most this much longer than they must.
constexpr int64_t kSweepNs = kSecondNs;
// Expired files are no hits from their moment on; only their bytes wait.
constexpr int64_t kDiskSweepNs = 60 * kSecondNs;
// Memory of chunks that nobody fetched for this number of sweeps goes back to the system.
constexpr int kSpareSweeps = 60;

}  // namespace

StoreKeeper::StoreKeeper(std::shared_ptr<StoreParts> parts) : parts_(std::move(parts)) {
  sweeper_ = std::thread([this] { Sweep(); });
  if (parts_->slow[At(TierKind::kDisk)] == nullptr) return;
  try {
    scrubber_ = std::thread([this] { Scrub(); });
  } catch (...) {
    Close();
    throw;
  }
}

void StoreKeeper::Stop() noexcept {
  const std::lock_guard lock(mutex_);
  closing_ = true;
  changed_.notify_all();
}

void StoreKeeper::Close() noexcept {
  Stop();
  if (sweeper_.joinable()) sweeper_.join();
  if (scrubber_.joinable()) scrubber_.join();
}

bool StoreKeeper::Sleep(int64_t ns) noexcept {
  std::unique_lock lock(mutex_);
  const int64_t until = parts_->clock->SteadyNs() + ns;
  try {
    WaitUntil(*parts_->clock, changed_, lock, until, [&] { return closing_; });
  } catch (const std::bad_alloc&) {
    // A host's clock may take memory to wait. Sweeping early does no harm.
  }
  return !closing_;
}

void StoreKeeper::Sweep() noexcept {
  while (Sleep(kSweepNs)) {
    parts_->ReleaseExpiredPins();
    parts_->spares->Age(kSpareSweeps);
    try {
      if (parts_->has_memory()) parts_->CollectMemory();
      parts_->CollectEvents();
    } catch (const std::bad_alloc&) {
      // The next time will do.
    }
  }
}

void StoreKeeper::Scrub() noexcept {
  SlowTier& disk = *parts_->slow[At(TierKind::kDisk)];
  while (Sleep(kDiskSweepNs)) {
    if (!disk.usable()) continue;
    try {
      // A large folder takes its time. A disk that hangs still ends it, as does closing the tier.
      static_cast<void>(disk.tier->CollectGarbage(kNever));  // what is left goes the next time
      if (parts_->options.scrub_bytes_per_second > 0) ScrubOnce(disk);
    } catch (const std::bad_alloc&) {
      // The next time will do.
    }
  }
}

// Reads every chunk once. The tier removes what is damaged, and counts it.
void StoreKeeper::ScrubOnce(SlowTier& disk) {
  const Result<std::vector<ChunkListing>> listings = disk.tier->List(kNever);
  if (!listings.ok()) return;
  const double seconds_per_byte = 1.0 / static_cast<double>(parts_->options.scrub_bytes_per_second);
  for (const ChunkListing& listing : *listings) {
    static_cast<void>(disk.tier->Get(listing.key, parts_->AdminDeadline(TierKind::kDisk)));
    const double seconds = static_cast<double>(listing.bytes) * seconds_per_byte;
    constexpr double kSecondsMax = 3600;  // one chunk; keeps the sum in range
    if (!Sleep(static_cast<int64_t>(std::min(seconds, kSecondsMax) * 1e9))) return;
  }
}

}  // namespace quire
