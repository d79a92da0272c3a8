// DiskCatalog: what one process knows of a disk tier's folder, behind one lock and without I/O.
#ifndef QUIRE_STORE_DISK_DISK_CATALOG_H_
#define QUIRE_STORE_DISK_DISK_CATALOG_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <vector>

#include "store/tier/chunk_index.h"
#include "store/tier/chunk_tier.h"

namespace quire {

// All ids have short roots (disk_layout.h). All calls from any thread.
class DiskCatalog {
 public:
  DiskCatalog(EvictionKind eviction, int64_t bytes_max);

  // Once the first scan is over, chunks that were used during it count as newer than what it found.
  void EndScan();

  // Nothing if it is known already.
  void Insert(const IndexedChunk& chunk);
  std::optional<IndexedChunk> Find(const ChunkId& id) const;
  std::optional<ChunkId> FindKey(const ChunkKey& key) const;
  void Use(const ChunkId& id);
  bool Pin(const ChunkKey& key, int change);
  void SetExpiry(const ChunkId& id, int64_t expires_ms);
  void SetPriority(const ChunkId& id, int priority);
  void SetBytes(const ChunkId& id, int64_t bytes);
  bool Erase(const ChunkId& id);
  void SetQuota(const ChunkKey& root, const ChunkQuota& quota);
  // `used`: bytes of the folder, of files that are not known here among them.
  std::optional<std::vector<ChunkId>> Victims(const ChunkKey& root, int64_t bytes,
                                              int64_t used) const;
  // Victims whose going frees `bytes`, though the limits were kept: the disk itself is full.
  std::optional<std::vector<ChunkId>> VictimsToFree(int64_t bytes) const;
  std::vector<ChunkKey> OverQuota() const;
  std::vector<ChunkId> Expired(int64_t now_ms) const;
  std::vector<IndexedChunk> All() const;

  int64_t bytes() const;
  int64_t bytes_max() const;

  // What this process saw of a file's contents: it wrote or verified all of them; and they are
  // synced.
  struct Seen {
    bool verified = false, synced = false;
  };
  Seen seen(const ChunkId& id) const;
  void SetSeen(const ChunkId& id, Seen seen);

  void Tell(ChunkEvent::Kind kind, const ChunkKey& key);
  void CountDuplicate();
  TierUsage Usage() const;
  void TakeEvents(std::vector<ChunkEvent>* events);

 private:
  mutable std::mutex mutex_;
  std::unique_ptr<ChunkIndex> index_;
  bool scanned_ = false;
  std::vector<ChunkId> used_during_scan_;
  std::set<ChunkId> verified_, synced_;
  TierUsage counts_;
  std::deque<ChunkEvent> events_;  // not taken yet, the newest
};

}  // namespace quire

#endif  // QUIRE_STORE_DISK_DISK_CATALOG_H_
