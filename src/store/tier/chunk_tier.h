// ChunkTier: a slow place where sealed chunks are kept: a folder, a Redis. TieredStore calls it
// from its worker threads; a call may block up to its deadline and never longer than that and one
// I/O time-out. Tiers are thread-safe.
//
// A tier verifies what it reads (header, expectation, each section's digest) before the sink hears
// of it, removes what is damaged, and tells so.
#ifndef QUIRE_STORE_TIER_CHUNK_TIER_H_
#define QUIRE_STORE_TIER_CHUNK_TIER_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "quire/chunk.h"
#include "quire/chunk_store.h"
#include "quire/status.h"

namespace quire {

// What a put says of a chunk's worth.
struct ChunkWorth {
  double recompute_seconds = 0;
  int priority = kDefaultPriority;

  bool operator==(const ChunkWorth&) const = default;
};

// Which chunk, and whose: two salts of one passport have different roots. The key alone is enough
// to find a chunk, as it commits to the other two; limits and removals of a whole space need these.
struct ChunkId {
  Digest fingerprint{};
  ChunkKey root{};  // KeySpace::root()
  ChunkKey key{};
  auto operator<=>(const ChunkId&) const = default;
};

// One chunk to read.
struct TierRead {
  ChunkId id{};
  ChunkExpectation expected{};
  ChunkLimits limits{};
};

// Where chunks that are read go. Called from one thread at a time per Read, items in any order.
class TierReadSink {
 public:
  virtual ~TierReadSink() = default;
  // The header of item i was verified. Memory for the whole chunk (header.total_bytes, aligned to
  // 4096), which stays until OnEnd; Full or Cancelled: the item ends with that.
  virtual Result<std::span<std::byte>> OnHeader(size_t item, const ChunkHeader& header) = 0;
  // Keeps that memory for a device that may write to it after the caller has left. Null: it stays
  // no longer, and bytes are copied into it.
  virtual std::shared_ptr<const void> OwnerOf(size_t) { return nullptr; }
  // Section `section` of item i is in place and verified. Without a MAC sections come layer by
  // layer: the first layer of all items, then the next.
  virtual void OnSection(size_t item, int64_t section) = 0;
  // Once per item: ok when all sections were there; NotFound, Corrupt, Incompatible, Timeout,
  // Unavailable, IoError, Cancelled.
  virtual void OnEnd(size_t item, const Status& status) = 0;
  // Nobody waits for the item any more: end it soon.
  virtual bool Cancelled(size_t item) const = 0;
};

// One chunk to write.
struct TierWrite {
  ChunkId id{};
  const StoredChunk* chunk = nullptr;
  double recompute_seconds = 0;
  int priority = kDefaultPriority;
};

struct TierUsage {
  int64_t chunks = 0, bytes = 0, bytes_max = 0;
  int64_t evicted = 0, expired = 0, corrupt = 0, deduplicated = 0;
  int64_t events_dropped = 0;  // that TakeEvents was too late for
  bool available = true;
};

class ChunkTier {
 public:
  virtual ~ChunkTier() = default;

  // Chunks of the passport will follow. Incompatible if what is there says something else.
  virtual Status AddPassport(const Digest& fingerprint, std::string_view passport_json) = 0;
  // The canonical JSON of each passport that the tier keeps, sound ones alone.
  virtual Result<std::vector<std::string>> Passports(int64_t deadline_ns) = 0;

  // Breakers of its own keep every call away now: one would end at once and say nothing.
  virtual bool IsUnavailable() const { return false; }
  // What is known without I/O: 1 there, 0 not there, -1 not known.
  virtual int Knows(const ChunkId& id) const = 0;
  // Whether a put of the chunk would write nothing, as far as is known without I/O: it is there,
  // and as durable as the options say.
  virtual bool IsStored(const ChunkId& id) const { return Knows(id) == 1; }
  // What the tier knows of the chunk's worth without I/O; nullopt: nothing.
  virtual std::optional<ChunkWorth> Worth(const ChunkId&) const { return std::nullopt; }
  // The number of leading ids that are there. Timeout, Unavailable, IoError.
  virtual Result<int64_t> Prefix(std::span<const ChunkId> ids, int64_t deadline_ns) = 0;
  // The same for several chains, in as few questions as the tier can; [i]: of chains[i]. May throw
  // std::bad_alloc.
  virtual std::vector<Result<int64_t>> Prefixes(std::span<const std::span<const ChunkId>> chains,
                                                int64_t deadline_ns) {
    std::vector<Result<int64_t>> there;
    for (const auto& ids : chains) there.push_back(Prefix(ids, deadline_ns));
    return there;
  }

  // Reads all items; returns when OnEnd was called for each.
  virtual void Read(std::span<const TierRead> items, int64_t deadline_ns, TierReadSink& sink) = 0;
  // [i]: what became of items[i]; ok = stored as durably as the options say, or it was there.
  virtual std::vector<Status> Write(std::span<const TierWrite> items, int64_t deadline_ns) = 0;

  virtual void Touch(const ChunkKey& key) = 0;
  // +1 or -1. While its pins are above 0 a chunk is not evicted. False if it is not there.
  virtual bool Pin(const ChunkKey& key, int change) = 0;
  // NotFound.
  virtual Status SetExpiry(const ChunkKey& key, int64_t expires_ms, int64_t deadline_ns) = 0;
  // NotFound, also in a tier that has no priorities.
  virtual Status SetPriority(const ChunkKey& key, int priority, int64_t deadline_ns) = 0;
  virtual void SetQuota(const ChunkKey& root, const ChunkQuota& quota) = 0;

  virtual Result<bool> Remove(const ChunkKey& key, int64_t deadline_ns) = 0;
  virtual Result<int64_t> Clear(const Digest& fingerprint, const ChunkKey& root,
                                int64_t deadline_ns) = 0;
  virtual Result<std::vector<ChunkListing>> List(int64_t deadline_ns) = 0;
  // By key alone, verified as far as that goes. NotFound, Corrupt.
  virtual Result<std::shared_ptr<const StoredChunk>> Get(const ChunkKey& key,
                                                         int64_t deadline_ns) = 0;
  // How many were damaged, and are removed now.
  virtual Result<int64_t> Verify(int64_t deadline_ns) = 0;
  virtual Result<int64_t> CollectGarbage(int64_t deadline_ns) = 0;

  virtual TierUsage Usage() const = 0;
  // Ends the tier's own threads. Calls that need them are Closed from now on, also those that are
  // under way; what is known without I/O is still told.
  virtual void Close() noexcept {}
  // Appends what happened since the last call: the newest EventRing::kEventsMax.
  virtual void TakeEvents(std::vector<ChunkEvent>* events) = 0;
};

}  // namespace quire

#endif  // QUIRE_STORE_TIER_CHUNK_TIER_H_
