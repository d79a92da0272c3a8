// ChunkStore: KV that outlives its request. Chunks of prefix chains are kept in up to three tiers,
// looked up by tokens and brought back: RAM, a folder of files, Redis or Redis Cluster.
//
//   auto store = ChunkStore::Open({.disk = {.directory = "/var/cache/quire"}});
//   (*store)->AddPassport(passport);
//   const KeySpace keys(*passport.Fingerprint(), salt);
//   auto fetch = (*store)->Fetch({.keys = &keys, .tokens = prompt, .chunk_tokens = 256});
//   (*fetch)->Wait(deadline_ns);
//   for (int64_t i = 0; i < (*fetch)->ready(); ++i) use((*fetch)->chunk(i)->view());
//   ...
//   (*store)->Put(keys, std::move(sealed_chunk), {});
//
// A key alone names a chunk: it commits to passport, salt and tokens.
//
// Never wrong: what comes back is, byte for byte, what was put under that passport, salt and those
// tokens; whatever is doubtful is a miss. Never in the way: no call but Wait, Flush, Close and the
// ones under "Administration" waits for a disk or a network; memory and queues have limits; a tier
// that is slow, full or gone costs at most the deadline. A failure of a tier is a number in
// Statistics and an event, and a miss or a drop.
//
// All calls from any thread.
#ifndef QUIRE_CHUNK_STORE_H_
#define QUIRE_CHUNK_STORE_H_

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "quire/chunk.h"
#include "quire/seams.h"
#include "quire/status.h"

namespace quire {

enum class TierKind : uint8_t { kRam, kDisk, kRedis };  // fastest first
inline constexpr int kTierCount = 3;
std::string_view TierName(TierKind tier);  // "ram", "disk", "redis"

// When a put is acknowledged, and so what it survives.
enum class Durability : uint8_t {
  kNone,   // when it is in RAM; survives nothing
  kAsync,  // when it is in the bounded queue of writes; survives nothing
  kOs,     // when it is written and linked into place; survives the process
  kSync,   // when file and folder are synced, too; survives power loss
};

// Under the latter two a put is acknowledged in RAM, which they need; what a tier was written is as
// durable as the tier's options say.
enum class WritePolicy : uint8_t {
  kThrough,    // to every tier at once
  kSelective,  // to disk and Redis once a chunk was put or found admit_after times
  kBack,       // to disk and Redis when RAM gives the chunk up, and at Flush and Close
};

// Which chunk is evicted first when a tier is full; in a prefix chain always the deepest one that
// no other chunk depends on.
enum class EvictionKind : uint8_t {
  kLru,     // least recently used
  kS3Fifo,  // S3-FIFO: what was used only once is evicted early, so that one scan cannot empty the
            // tier
  kCost,    // least seconds of recompute saved per byte, aged by use
};

// Chunks of lower priority are evicted first.
inline constexpr int kPriorityMax = 100;
inline constexpr int kDefaultPriority = 50;

struct RamTierOptions {
  int64_t bytes_max = 0;  // 0 = no such tier
};

// What opening a disk tier does with its folder.
enum class FolderUse : uint8_t {
  kCreate,    // it is made if absent
  kExisting,  // NotFound if the folder is not that of a store
  kLook,      // the same, and nothing in it is changed: puts fail; damaged and expired chunks stay
};

struct DiskTierOptions {
  std::string directory = {};  // "" = no such tier. Several processes may share it
  FolderUse use = FolderUse::kCreate;
  int64_t bytes_max = 0;  // 0 = what is free in the file system at opening, less a tenth
  Durability durability = Durability::kOs;
  bool use_uring = true;  // false, or where the kernel or the build has none: threads
  int64_t io_timeout_ms = 2000;
};

struct RedisTierOptions {
  // "HOST:PORT", several with commas: seeds of a cluster if the first one that answers is in one,
  // else the first. "unix:PATH" too. "" = no such tier.
  std::string endpoints = {};
  std::string username = {};
  std::string password = {};  // never in messages
  // TLS to all servers, whose certificates an authority in the CA file ("" = of the system's)
  // signed for tls_server_name ("" = each server's own host). Files are PEM; this client's
  // certificate and key: both or none. Without tls_verify any machine may pose as the server.
  bool tls = false, tls_verify = true;
  std::string tls_ca_file = {}, tls_cert_file = {}, tls_key_file = {}, tls_server_name = {};
  std::string key_prefix = {};
  int64_t ttl_ms = 0;  // of written keys; 0 = unlimited (the server's policy decides)
  int64_t connect_timeout_ms = 500;
  int64_t io_timeout_ms = 2000;
  // > 0: a put is acknowledged when WAIT counted that number of replicas. What a cluster loses in a
  // failover is lost all the same.
  int64_t replicas = 0;
};

// Shorter keys can be guessed.
inline constexpr int64_t kMacKeyBytesMin = 16;

struct ChunkStoreOptions {
  RamTierOptions ram = {};
  DiskTierOptions disk = {};
  RedisTierOptions redis = {};
  WritePolicy write_policy = WritePolicy::kThrough;
  int64_t admit_after = 2;
  EvictionKind eviction = EvictionKind::kLru;
  bool promote = true;              // what came from a slower tier is kept in the faster ones, too
  int priority = kDefaultPriority;  // of what is put without one of its own
  int64_t queue_bytes_max = int64_t{256} << 20;  // of puts that wait to be written
  int64_t fetch_bytes_max = int64_t{1} << 30;    // of fetches under way and not yet given back
  int64_t pin_timeout_ms = 60'000;               // a forgotten pin ends by itself
  // Tampering (not only damage) is found if chunks are signed with this key; a store with a key
  // takes no chunk without its MAC. Never in messages. Empty = not signed, else kMacKeyBytesMin.
  std::string mac_key = {};
  int64_t scrub_bytes_per_second = 0;  // reads and verifies what lies on disk; 0 = only when asked
  std::shared_ptr<Clock> clock = nullptr;  // null = MachineTime()
};

// A sealed chunk in memory, shared by all its users and never changed.
class StoredChunk {
 public:
  StoredChunk(ChunkHeader header, ChunkBuffer buffer)
      : header_(std::move(header)), buffer_(std::move(buffer)) {}
  const ChunkHeader& header() const { return header_; }
  std::span<const std::byte> bytes() const { return buffer_.bytes(); }
  // Sections are verified when they are read from it.
  Result<ChunkView> View(const ChunkExpectation& expected, const ChunkLimits& limits) const {
    return ChunkView::Open(bytes(), expected, limits);
  }

 private:
  friend class SpareChunks;  // takes the memory back
  ChunkHeader header_;
  ChunkBuffer buffer_;
};

// ---- Bringing back

// Why a chunk is not there.
enum class MissReason : uint8_t {
  kNone,          // it is there
  kNotStored,     // in no tier
  kExpired,       // its time is over
  kCorrupt,       // damaged; it is gone now
  kIncompatible,  // sound bytes of something else
  kNotWorth,      // computing it was predicted to be faster
  kTimeout,       // the deadline passed
  kUnavailable,   // a tier that might have it did not answer
  kCancelled,
  kNoRoom,  // over fetch_bytes_max
};
inline constexpr int kMissReasonCount = 10;
std::string_view MissReasonName(MissReason reason);

struct FetchRequest {
  const KeySpace* keys = nullptr;        // REQUIRES: of a passport that was added
  std::span<const int32_t> tokens = {};  // from position 0 on; copied
  int64_t chunk_tokens = 0;
  bool tail = false;                     // also the shorter last chunk
  std::span<const ChunkKey> chain = {};  // the keys of all chunks; empty: they are hashed
  // What the leading chunks were put with; those after them have none. Copied.
  std::span<const std::string> extras = {};
  int64_t first_chunk = 0;  // chunks before it are not read: the caller has them
  // On the clock's SteadyNs; what is not there by then is a miss. 0 = none but the tiers' own.
  int64_t deadline_ns = 0;
  // Time that computing one token takes the caller, measured; 0 = take whatever is there.
  double compute_seconds_per_token = 0;
  int priority = 0;  // higher first, among fetches that wait
};

// The chunks of one request on their way. Destroying it cancels what is not there yet.
class ChunkFetch {
 public:
  virtual ~ChunkFetch() = default;

  // Chunks asked for, first_chunk not counted. Chunk i here is chunk first_chunk + i of the chain.
  virtual int64_t chunk_count() const = 0;
  // Chunks that will come as far as is known: leading ones found. Final with located().
  virtual bool located() const = 0;
  virtual int64_t found() const = 0;
  // Leading chunks that are complete and verified. Only grows.
  virtual int64_t ready() const = 0;
  virtual bool done() const = 0;  // nothing changes any more
  // Waits for done() or the moment. False if it is not done then.
  virtual bool Wait(int64_t until_ns) = 0;
  // Waits until `layer` of all chunks that were found is there and verified: ok, Timeout, or why it
  // will never be (Corrupt, Unavailable, Cancelled). Layers come in order, layer 0 of all chunks
  // first; chunks with a MAC only whole.
  virtual Status WaitLayer(int64_t layer, int64_t until_ns) = 0;
  // REQUIRES: i < ready(), or i < found() and WaitLayer was ok: then only those layers' sections.
  virtual std::shared_ptr<const StoredChunk> chunk(int64_t i) const = 0;
  virtual TierKind tier(int64_t i) const = 0;  // that chunk i came from
  // Why chunk found() is none, as far as is known, and once done() why chunk ready() is none.
  // REQUIRES: located().
  virtual MissReason miss() const = 0;
  virtual void Cancel() noexcept = 0;
};

// ---- Putting

struct PutOptions {
  // Seconds that computing the chunk again would take; 0 = not known, then its tokens count.
  double recompute_seconds = 0;
  std::optional<int> priority = std::nullopt;  // 0 to kPriorityMax; nullopt: the store's
  // What the chunk's key was made with beside its tokens (KeySpace::Next). The chunk does not keep
  // them.
  std::string_view extras = {};
};

// What became of a put.
class ChunkPut {
 public:
  virtual ~ChunkPut() = default;
  virtual bool done() const = 0;
  virtual bool Wait(int64_t until_ns) = 0;
  // Ok: acknowledged as the durability says, or it was there already. REQUIRES: done(). Full,
  // IoError, Unavailable, Closed, Cancelled (removed): of the last tier that failed, not of all.
  virtual Status status() const = 0;
};

// ---- Control

struct ChunkQuota {
  int64_t bytes_max = 0;         // of one salt, per tier; 0 = no limit of its own
  int64_t bytes_guaranteed = 0;  // other salts never evict below it
};

// A chunk in a tier, as List tells.
struct ChunkListing {
  TierKind tier = TierKind::kRam;
  ChunkKey key{};
  Digest fingerprint{};
  int64_t tokens = 0;
  int64_t first_token = -1;  // position of its first token; -1 = not known
  int64_t bytes = 0;
  int64_t created_ms = 0;
  int64_t expires_ms = 0;
};

struct ChunkEvent {
  enum class Kind : uint8_t { kStored, kRemoved, kEvicted, kExpired, kCorrupt };
  Kind kind = Kind::kStored;
  TierKind tier = TierKind::kRam;
  ChunkKey key{};
};

struct TierStatistics {
  bool present = false;
  int64_t chunks = 0, bytes = 0, bytes_max = 0;
  int64_t hits = 0, misses = 0, corrupt = 0, errors = 0, timeouts = 0;
  int64_t writes = 0, dropped_writes = 0, deduplicated = 0, evicted = 0, expired = 0;
  int64_t bytes_read = 0, bytes_written = 0;
  int64_t queue_bytes = 0;  // puts that wait for this tier
  // What a load is predicted to take: latency + bytes / bandwidth, measured. 0 = not measured yet.
  double latency_seconds = 0, bytes_per_second = 0;
  int64_t loads = 0;      // runs of chunks that were read at once
  int64_t not_worth = 0;  // runs that were not, as computing them was predicted to be faster
  // Sums over those loads that were predicted, so that the two can be compared.
  double predicted_seconds = 0, measured_seconds = 0;
  bool available = true;  // false: the circuit breaker is open
};

struct ChunkStoreStatistics {
  std::array<TierStatistics, kTierCount> tiers{};           // by TierKind
  int64_t fetches = 0, prefetches = 0, fetched_tokens = 0;  // prefetches count as fetches too
  std::array<int64_t, kMissReasonCount> misses{};           // by MissReason
  int64_t pins = 0, forced_unpins = 0, events_dropped = 0;
};

class ChunkStore {
 public:
  // BadArgument for an option by name and value or no tier at all; IoError when the directory
  // cannot be made. Redis that does not answer is no error: it may come later.
  static Result<std::unique_ptr<ChunkStore>> Open(ChunkStoreOptions options);
  virtual ~ChunkStore() = default;  // as Close

  // A passport whose chunks are fetched and put. Twice is fine.
  virtual Status AddPassport(const Passport& passport) = 0;

  // Starts to look for the chunks of a prefix chain and to bring the leading ones that are there.
  // Stops at the first one that is not. Its chunks are pinned while the fetch lives. BadArgument,
  // Closed.
  virtual Result<std::shared_ptr<ChunkFetch>> Fetch(const FetchRequest& request) = 0;
  // The same for several chains at once; [i]: of requests[i]. A tier is asked for all of them in
  // one call, and what it has of them is read together: layer 0 of all chunks of all chains first.
  // An error starts none of them.
  virtual Result<std::vector<std::shared_ptr<ChunkFetch>>> FetchAll(
      std::span<const FetchRequest> requests) = 0;
  // The leading chunks of the chain that the store knows of without asking a disk or a network.
  virtual int64_t KnownPrefix(const KeySpace& keys, std::span<const ChunkKey> chain) = 0;
  // Brings chunks into RAM (into the fastest tier there is) for a fetch to come.
  virtual Result<std::shared_ptr<ChunkFetch>> Prefetch(const FetchRequest& request) = 0;

  // Whether each chunk is new to the store: in no tier and no queue, as far as is known without
  // asking a disk or a network. Saves the caller an export.
  virtual std::vector<bool> Wanted(const KeySpace& keys, std::span<const ChunkKey> chain) = 0;
  // Takes a sealed chunk of keys' space. BadArgument, Corrupt if it is none, Closed. A tier whose
  // queue is full drops it: counted, and Full in the put's status.
  virtual Result<std::shared_ptr<ChunkPut>> Put(const KeySpace& keys, ChunkBuffer sealed,
                                                const PutOptions& options) = 0;

  // Keeps chunks from being evicted until Unpin or pin_timeout_ms. Counted: as many Unpins as Pins.
  // How many of them RAM or disk has and keeps now. A pin holds in this process alone, and nothing
  // of it is written: other processes may evict the chunk from the same folder. Redis has no pins.
  virtual int64_t Pin(std::span<const ChunkKey> chunks) = 0;
  virtual int64_t Unpin(std::span<const ChunkKey> chunks) = 0;  // how many pins it ended
  virtual void Touch(std::span<const ChunkKey> chunks) = 0;     // as a use
  // Time to live from now on; 0 = for ever. Disk and Redis keep it. An expiry in the chunk itself
  // stays. How many of them a tier has.
  virtual Result<int64_t> SetTtl(std::span<const ChunkKey> chunks, int64_t ttl_ms) = 0;
  // 0 to kPriorityMax. The folder keeps it; other processes learn of it when they open the folder.
  // Redis has no priorities. How many of them RAM or disk has. What waits to be written is not
  // changed: Flush first.
  virtual Result<int64_t> SetPriority(std::span<const ChunkKey> chunks, int priority) = 0;
  // Holds for this store as long as it is open, and is not written. Chunks go when more are put,
  // and at CollectGarbage. Nothing for Redis, whose limits are the server's.
  virtual Status SetQuota(const KeySpace& keys, const ChunkQuota& quota) = 0;

  // ---- Administration. These wait for the tiers.
  // Those that were added, and those of which the folder has chunks, which this adds. Redis keeps
  // no passports.
  virtual Result<std::vector<Passport>> Passports() = 0;
  // From all tiers and from queues; what is on its way to a fetch reaches it and is kept nowhere.
  // How many were there. What is put meanwhile may stay. Timeout: call again.
  virtual Result<int64_t> Remove(std::span<const ChunkKey> chunks) = 0;
  // Everything of the key space, in the same way; how many chunks.
  virtual Result<int64_t> Clear(const KeySpace& keys) = 0;
  virtual Result<std::vector<ChunkListing>> List(TierKind tier) = 0;
  // One chunk by its key, verified, whatever its passport. NotFound, Corrupt, Unavailable.
  virtual Result<std::shared_ptr<const StoredChunk>> Get(TierKind tier, const ChunkKey& key) = 0;
  // Reads and verifies everything in the tier; damaged chunks are removed. How many were damaged.
  virtual Result<int64_t> Verify(TierKind tier) = 0;
  // Removes what is expired, over quota, or left over by a process that died. Bytes freed.
  virtual Result<int64_t> CollectGarbage(TierKind tier) = 0;

  // Waits until all puts so far are as durable as promised, or the moment. Timeout.
  virtual Status Flush(int64_t until_ns) = 0;
  // Ends all fetches (Cancelled), writes what is queued, stops. Every later call returns Closed.
  virtual void Close() noexcept = 0;

  virtual ChunkStoreStatistics Statistics() const = 0;
  // Events since the last call, oldest first; the newest 65536 are kept.
  virtual std::vector<ChunkEvent> TakeEvents() = 0;
};

}  // namespace quire

#endif  // QUIRE_CHUNK_STORE_H_
