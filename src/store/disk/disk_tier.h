// DiskTier: sealed chunks in a folder, a file each. docs/formats/disk.md is what the folder looks
// like.
//
//   auto tier = DiskTier::Open({.disk = options.disk, .eviction = EvictionKind::kLru});
//   (*tier)->AddPassport(fingerprint, passport_json);
//   (*tier)->Write(...), (*tier)->Read(...)
//
// No call hangs with the disk: all system calls are made by threads of the tier's own, for which a
// caller waits no longer than its deadline, or one I/O time-out without progress (io_lane.h).
#ifndef QUIRE_STORE_DISK_DISK_TIER_H_
#define QUIRE_STORE_DISK_DISK_TIER_H_

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "quire/chunk_store.h"
#include "quire/seams.h"
#include "store/disk/disk_folder.h"
#include "store/disk/file_system.h"
#include "store/disk/io_lane.h"
#include "store/tier/chunk_tier.h"

namespace quire {

struct DiskTierSetup {
  DiskTierOptions disk = {};
  EvictionKind eviction = EvictionKind::kLru;
  std::string mac_key = {};
  std::shared_ptr<Clock> clock = nullptr;       // null = MachineTime()
  std::shared_ptr<FileSystem> files = nullptr;  // null = the machine's
};

class DiskTier final : public ChunkTier {
 public:
  // Makes the directory if options.use says so, and starts to look through it in the background.
  // BadArgument by option, NotFound, IoError, Timeout, Unavailable without threads.
  static Result<std::unique_ptr<DiskTier>> Open(DiskTierSetup setup);
  // Waits for calls to the disk that are under way, one I/O time-out at most.
  ~DiskTier() override = default;

  // Waits until all that was there at the start is known: until then chunks are found by opening
  // their files, and List and eviction wait for it.
  Status AwaitScan(int64_t deadline_ns);

  Status AddPassport(const Digest& fingerprint, std::string_view passport_json) override;
  Result<std::vector<std::string>> Passports(int64_t deadline_ns) override;
  // 1 or -1, as another process may put what is not known.
  int Knows(const ChunkId& id) const override;
  bool IsStored(const ChunkId& id) const override;
  std::optional<ChunkWorth> Worth(const ChunkId& id) const override;
  Result<int64_t> Prefix(std::span<const ChunkId> ids, int64_t deadline_ns) override;
  void Read(std::span<const TierRead> items, int64_t deadline_ns, TierReadSink& sink) override;
  std::vector<Status> Write(std::span<const TierWrite> items, int64_t deadline_ns) override;

  void Touch(const ChunkKey& key) override;
  // Pins hold against this process's evictions, not against those of others on the same folder.
  bool Pin(const ChunkKey& key, int change) override;
  // BadState for a signed chunk, if the tier has no key.
  Status SetExpiry(const ChunkKey& key, int64_t expires_ms, int64_t deadline_ns) override;
  Status SetPriority(const ChunkKey& key, int priority, int64_t deadline_ns) override;
  void SetQuota(const ChunkKey& root, const ChunkQuota& quota) override;

  Result<bool> Remove(const ChunkKey& key, int64_t deadline_ns) override;
  Result<int64_t> Clear(const Digest& fingerprint, const ChunkKey& root,
                        int64_t deadline_ns) override;
  Result<std::vector<ChunkListing>> List(int64_t deadline_ns) override;
  Result<std::shared_ptr<const StoredChunk>> Get(const ChunkKey& key, int64_t deadline_ns) override;
  Result<int64_t> Verify(int64_t deadline_ns) override;
  Result<int64_t> CollectGarbage(int64_t deadline_ns) override;

  // Waits for calls to the disk that are under way, one I/O time-out at most.
  void Close() noexcept override;
  TierUsage Usage() const override;
  void TakeEvents(std::vector<ChunkEvent>* events) override;

 private:
  // What work on the lanes shares with the tier, which it may outlive.
  struct Shared;
  struct WriteJob;

  DiskTier(std::shared_ptr<Shared> shared, const DiskTierOptions& options);

  // Runs `call(FileSession&)`, a Status or a Result, on the lane. What it captures it owns.
  template <typename T, typename F>
  Result<T> Call(IoLane& lane, int64_t deadline_ns, F call);
  static void RunWrites(IoWork& work, Shared& shared, WriteJob& job);

  const std::shared_ptr<Shared> shared_;
  // Apart, so that puts and housekeeping never stand in front of a read.
  IoLane reads_, writes_, upkeep_;
  std::shared_ptr<IoWork> scan_;
};

}  // namespace quire

#endif  // QUIRE_STORE_DISK_DISK_TIER_H_
