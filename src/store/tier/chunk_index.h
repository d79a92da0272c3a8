// ChunkIndex: which chunks a tier holds and which of them goes next. Bookkeeping over ids and sizes
// without any I/O; the RAM tier and the disk tier each have one. Not thread-safe: its owner's lock.
//
// Never a victim: a pinned or busy chunk, one that another chunk of the tier hangs on (its key is
// the other's context), and, for the sake of another salt, one without which its salt would have
// less than its guaranteed share. What is keyed by its own tokens hangs on nothing: its context
// here is the root.
#ifndef QUIRE_STORE_TIER_CHUNK_INDEX_H_
#define QUIRE_STORE_TIER_CHUNK_INDEX_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "quire/chunk_store.h"
#include "store/tier/chunk_tier.h"

namespace quire {

struct IndexedChunk {
  ChunkId id{};
  ChunkKey context{};  // of the chunk before it in its chain; the root's for the first one
  int64_t bytes = 0;   // as they count against limits
  int64_t tokens = 0;
  int64_t first_token = -1;  // -1 = not known
  int64_t created_ms = 0;
  int64_t expires_ms = 0;  // 0 = never
  double recompute_seconds = 0;
  int priority = kDefaultPriority;
};

class ChunkIndex {
 public:
  static std::unique_ptr<ChunkIndex> Create(EvictionKind eviction, int64_t bytes_max);
  virtual ~ChunkIndex() = default;

  // REQUIRES: absent. Takes memory: std::bad_alloc, nothing changed.
  virtual void Insert(const IndexedChunk& chunk) = 0;
  virtual const IndexedChunk* Find(const ChunkId& id) const = 0;  // until the next Insert or Erase
  // The chunk with this key under any passport and salt; keys are digests that commit to both.
  virtual const IndexedChunk* FindKey(const ChunkKey& key) const = 0;
  virtual void Use(const ChunkId& id) noexcept = 0;
  virtual bool Pin(const ChunkId& id, int change) noexcept = 0;
  virtual int64_t pins(const ChunkId& id) const = 0;
  virtual void SetExpiry(const ChunkId& id, int64_t expires_ms) noexcept = 0;
  virtual void SetPriority(const ChunkId& id, int priority) noexcept = 0;
  virtual void SetBytes(const ChunkId& id, int64_t bytes) noexcept = 0;
  virtual bool Erase(const ChunkId& id) noexcept = 0;

  virtual void SetQuota(const ChunkKey& root, const ChunkQuota& quota) = 0;
  virtual ChunkQuota quota(const ChunkKey& root) const = 0;
  virtual int64_t bytes_of(const ChunkKey& root) const = 0;
  // Roots that have more than the bytes_max of their quota.
  virtual std::vector<ChunkKey> OverQuota() const = 0;

  // The victims whose going makes room for `bytes` more of `root`, in order; nullopt when there is
  // no such set. Nothing is erased. `unknown`: bytes in use beside those of the chunks here;
  // negative: of chunks that are gone, which are here all the same.
  virtual std::optional<std::vector<ChunkId>> Victims(const ChunkKey& root, int64_t bytes,
                                                      int64_t unknown = 0) const = 0;
  // Not pinned and past their time.
  virtual std::vector<ChunkId> Expired(int64_t now_ms) const = 0;
  virtual std::vector<IndexedChunk> All() const = 0;

  virtual int64_t size() const = 0;
  virtual int64_t bytes() const = 0;
  virtual int64_t bytes_max() const = 0;
  // The first violated invariant, or "". For tests.
  virtual std::string_view CheckInvariants() const = 0;
};

}  // namespace quire

#endif  // QUIRE_STORE_TIER_CHUNK_INDEX_H_
