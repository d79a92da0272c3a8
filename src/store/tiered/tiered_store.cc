#include "store/tiered/tiered_store.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/guard.h"
#include "base/start_thread.h"

namespace quire {
namespace {

constexpr int64_t kTtlMaxMs = int64_t{1} << 50;  // 35 000 years; sums with times fit
// Redis decides itself what it evicts.
constexpr std::array<TierKind, 2> kPinningTiers = {TierKind::kRam, TierKind::kDisk};

Status BadOption(const std::string& name, const std::string& value, const std::string& rule) {
  return Status(StatusCode::kBadArgument,
                "ChunkStore::Open: " + name + " is " + value + "; it must be " + rule);
}

Status CheckPriority(const char* call, int priority) {
  static_assert(kPriorityMax == 100);
  if (priority >= 0 && priority <= kPriorityMax) return {};
  return Status(StatusCode::kBadArgument, std::string("ChunkStore::") + call + ": priority is " +
                                              std::to_string(priority) +
                                              "; it must be in [0, 100]");
}

}  // namespace

Status CheckStoreOptions(const ChunkStoreOptions& options, bool has_slow_tier) {
  struct Bound {
    const char* name;
    int64_t value;
    int64_t min;
    int64_t max = std::numeric_limits<int64_t>::max();
  };
  constexpr int64_t kDayMs = 86'400'000;                  // in nanoseconds it fits in 63 bits
  constexpr int64_t kPinTimeoutMaxMs = int64_t{1} << 40;  // the same
  for (const Bound& bound :
       {Bound{"ram.bytes_max", options.ram.bytes_max, 0},
        Bound{"disk.bytes_max", options.disk.bytes_max, 0},
        Bound{"disk.io_timeout_ms", options.disk.io_timeout_ms, 1, kDayMs},
        Bound{"redis.ttl_ms", options.redis.ttl_ms, 0, kTtlMaxMs},
        Bound{"redis.connect_timeout_ms", options.redis.connect_timeout_ms, 1, kDayMs},
        Bound{"redis.io_timeout_ms", options.redis.io_timeout_ms, 1, kDayMs},
        Bound{"redis.replicas", options.redis.replicas, 0},
        Bound{"admit_after", options.admit_after, 1},
        Bound{"queue_bytes_max", options.queue_bytes_max, 1},
        Bound{"fetch_bytes_max", options.fetch_bytes_max, 1},
        Bound{"pin_timeout_ms", options.pin_timeout_ms, 1, kPinTimeoutMaxMs},
        Bound{"scrub_bytes_per_second", options.scrub_bytes_per_second, 0}}) {
    const std::string value = std::to_string(bound.value);
    if (bound.value < bound.min)
      return BadOption(bound.name, value, "at least " + std::to_string(bound.min));
    if (bound.value > bound.max)
      return BadOption(bound.name, value, "at most " + std::to_string(bound.max));
  }
  QUIRE_RETURN_IF_ERROR(CheckPriority("Open", options.priority));
  const auto key_bytes = static_cast<int64_t>(options.mac_key.size());
  if (key_bytes > 0 && key_bytes < kMacKeyBytesMin) {
    return Status(StatusCode::kBadArgument,
                  "ChunkStore::Open: mac_key has " + std::to_string(key_bytes) +
                      " bytes; it must have at least " + std::to_string(kMacKeyBytesMin) +
                      ", or be empty, which switches signing off");
  }
  const bool has_ram = options.ram.bytes_max > 0;
  if (!has_ram && !has_slow_tier)
    return Status(StatusCode::kBadArgument,
                  "ChunkStore::Open: no tier; give ram.bytes_max, disk.directory or "
                  "redis.endpoints");
  if (!has_ram && options.write_policy != WritePolicy::kThrough)
    return BadOption("write_policy", "selective or back", "through without a RAM tier");
  return {};
}

Result<std::unique_ptr<ChunkStore>> TieredStore::Create(ChunkStoreOptions options, SlowTiers slow) {
  return GuardEntry([&]() -> Result<std::unique_ptr<ChunkStore>> {
    const bool has_slow =
        std::any_of(slow.begin(), slow.end(), [](const auto& tier) { return tier != nullptr; });
    QUIRE_RETURN_IF_ERROR(CheckStoreOptions(options, has_slow));
    return ThreadOrStatus("a chunk store", [&]() -> std::unique_ptr<ChunkStore> {
      auto parts = std::make_shared<StoreParts>(std::move(options));
      parts->AddTiers(std::move(slow));
      return std::make_unique<TieredStore>(std::move(parts));
    });
  });
}

TieredStore::TieredStore(std::shared_ptr<StoreParts> parts)
    : parts_(std::move(parts)), fetcher_(parts_), keeper_(parts_) {}

TieredStore::~TieredStore() { Close(); }

// ---------------------------------------------------------------------- checks

Status TieredStore::CheckOpen(const char* call) const {
  if (!closed_) return {};
  return Status(StatusCode::kClosed, std::string("ChunkStore::") + call + ": the store is closed");
}

Status TieredStore::CheckKeys(const char* call, const KeySpace& keys) const {
  QUIRE_RETURN_IF_ERROR(CheckOpen(call));
  if (parts_->passports.Find(keys.fingerprint()) != nullptr) return {};
  return Status(StatusCode::kBadArgument, std::string("ChunkStore::") + call + ": the passport " +
                                              keys.fingerprint().ToHex() +
                                              " was not added; call AddPassport first");
}

Status TieredStore::CheckTier(const char* call, TierKind tier) const {
  QUIRE_RETURN_IF_ERROR(CheckOpen(call));
  const bool present =
      tier == TierKind::kRam ? parts_->has_memory() : parts_->slow[At(tier)] != nullptr;
  if (present) return {};
  return Status(StatusCode::kNotFound, std::string("ChunkStore::") + call + ": the store has no " +
                                           std::string(TierName(tier)) + " tier");
}

Status TieredStore::AddPassport(const Passport& passport) {
  return GuardEntry([&]() -> Status {
    QUIRE_RETURN_IF_ERROR(CheckOpen("AddPassport"));
    QUIRE_ASSIGN_OR_RETURN(const std::string json, passport.ToJson());
    const Digest fingerprint = FingerprintOf(json);
    for (const auto& tier : parts_->slow)
      if (tier != nullptr) QUIRE_RETURN_IF_ERROR(tier->tier->AddPassport(fingerprint, json));
    parts_->passports.Add(fingerprint, passport);
    return {};
  });
}

// ---------------------------------------------------------------------- bringing back

Result<std::vector<std::shared_ptr<ChunkFetch>>> TieredStore::StartFetches(
    const char* call, std::span<const FetchRequest> requests, bool to_memory) {
  return GuardEntry([&]() -> Result<std::vector<std::shared_ptr<ChunkFetch>>> {
    const auto bad = [&](const std::string& what) {
      return Status(StatusCode::kBadArgument, std::string("ChunkStore::") + call + ": " + what);
    };
    QUIRE_RETURN_IF_ERROR(CheckOpen(call));
    for (const FetchRequest& request : requests) {
      if (request.keys == nullptr) return bad("keys is null");
      QUIRE_RETURN_IF_ERROR(CheckKeys(call, *request.keys));
      if (request.chunk_tokens < 1)
        return bad("chunk_tokens is " + std::to_string(request.chunk_tokens) +
                   "; it must be at least 1");
      if (request.first_chunk < 0)
        return bad("first_chunk is " + std::to_string(request.first_chunk) +
                   "; it must not be negative");
      const int64_t in_tail = std::ssize(request.tokens) % request.chunk_tokens;
      const int64_t chunks =
          std::ssize(request.tokens) / request.chunk_tokens + (request.tail && in_tail > 0 ? 1 : 0);
      if (!request.chain.empty() && std::ssize(request.chain) != chunks)
        return bad("chain has " + std::to_string(request.chain.size()) + " keys, but there are " +
                   std::to_string(chunks) + " chunks");
    }
    parts_->ReleaseExpiredPins();
    return fetcher_.Start(requests, to_memory);
  });
}

Result<std::vector<std::shared_ptr<ChunkFetch>>> TieredStore::FetchAll(
    std::span<const FetchRequest> requests) {
  return StartFetches("FetchAll", requests, /*to_memory=*/parts_->options.promote);
}

Result<std::shared_ptr<ChunkFetch>> TieredStore::Fetch(const FetchRequest& request) {
  QUIRE_ASSIGN_OR_RETURN(const auto fetches, StartFetches("Fetch", std::span(&request, 1),
                                                          /*to_memory=*/parts_->options.promote));
  return fetches.front();
}

Result<std::shared_ptr<ChunkFetch>> TieredStore::Prefetch(const FetchRequest& request) {
  QUIRE_ASSIGN_OR_RETURN(const auto fetches,
                         StartFetches("Prefetch", std::span(&request, 1), /*to_memory=*/true));
  ++prefetches_;
  return fetches.front();
}

int64_t TieredStore::KnownPrefix(const KeySpace& keys, std::span<const ChunkKey> chain) {
  if (closed_) return 0;
  int64_t known = 0;
  for (const ChunkKey& key : chain) {
    if (!parts_->Knows({keys.fingerprint(), keys.root(), key})) break;
    ++known;
  }
  return known;
}

// ---------------------------------------------------------------------- putting

std::vector<bool> TieredStore::Wanted(const KeySpace& keys, std::span<const ChunkKey> chain) {
  std::vector<bool> wanted(chain.size(), false);
  if (closed_) return wanted;
  for (size_t i = 0; i < chain.size(); ++i) {
    const ChunkId id{keys.fingerprint(), keys.root(), chain[i]};
    wanted[i] = !parts_->Knows(id) &&
                std::none_of(parts_->writes.begin(), parts_->writes.end(),
                             [&](const auto& queue) { return queue && queue->Has(id); });
  }
  return wanted;
}

// Checks that the bytes are a chunk of keys' space.
Result<KeptChunk> TieredStore::Admit(const KeySpace& keys, ChunkBuffer sealed,
                                     const PutOptions& options) {
  QUIRE_RETURN_IF_ERROR(CheckKeys("Put", keys));
  const int priority = options.priority.value_or(parts_->options.priority);
  QUIRE_RETURN_IF_ERROR(CheckPriority("Put", priority));
  if (!std::isfinite(options.recompute_seconds) || options.recompute_seconds < 0)
    return Status(StatusCode::kBadArgument,
                  "ChunkStore::Put: recompute_seconds is " +
                      std::to_string(options.recompute_seconds) +
                      "; it must be a number of seconds, or 0 if it is not known");
  const ChunkLimits limits = parts_->passports.Find(keys.fingerprint())->limits;
  const std::span<const std::byte> bytes = std::as_const(sealed).bytes();
  QUIRE_ASSIGN_OR_RETURN(const int64_t header_bytes, ChunkHeaderBytes(bytes, limits));
  if (header_bytes > static_cast<int64_t>(bytes.size()))
    return Status(StatusCode::kCorrupt,
                  "ChunkStore::Put: the chunk has " + std::to_string(bytes.size()) +
                      " bytes, its header alone " + std::to_string(header_bytes));
  QUIRE_ASSIGN_OR_RETURN(ChunkHeader header,
                         DecodeChunkHeader(bytes.first(static_cast<size_t>(header_bytes)), limits));
  const ChunkExpectation expected{.key = header.key,
                                  .fingerprint = keys.fingerprint(),
                                  .now_ms = parts_->clock->WallMs(),
                                  .approximate = keys.approximate(),
                                  .tokens = {},
                                  .mac_key = parts_->options.mac_key};
  QUIRE_RETURN_IF_ERROR(ChunkView::Open(bytes, expected, limits).status());
  const ChunkKey key = header.contextual
                           ? keys.Segment(header.tokens)
                           : keys.Next(ChunkKey{header.context}, header.tokens, options.extras);
  const bool begins_chain = !header.contextual && header.first_position == 0;
  if (key != header.key || (begins_chain && ChunkKey{header.context} != keys.root()))
    return Status(
        StatusCode::kBadArgument,
        "ChunkStore::Put: the key " + header.key.digest.ToHex() +
            " is not that of the chunk's tokens and extras in this key space; another salt?");
  const ChunkId id{keys.fingerprint(), keys.root(), header.key};
  return KeptChunk{id,
                   std::make_shared<StoredChunk>(std::move(header), std::move(sealed)),
                   {options.recompute_seconds, priority}};
}

Result<std::shared_ptr<ChunkPut>> TieredStore::Put(const KeySpace& keys, ChunkBuffer sealed,
                                                   const PutOptions& options) {
  return GuardEntry([&]() -> Result<std::shared_ptr<ChunkPut>> {
    QUIRE_ASSIGN_OR_RETURN(const KeptChunk kept, Admit(keys, std::move(sealed), options));
    parts_->ReleaseExpiredPins();
    return std::shared_ptr<ChunkPut>(Distribute(kept));
  });
}

bool TieredStore::IsAwaited(TierKind tier) const {
  const ChunkStoreOptions& options = parts_->options;
  if (options.write_policy != WritePolicy::kThrough) return false;
  if (tier == TierKind::kDisk)
    return options.disk.durability == Durability::kOs ||
           options.disk.durability == Durability::kSync;
  return options.redis.replicas > 0 || parts_->slow[At(TierKind::kDisk)] == nullptr;
}

// Gives the chunk to the tiers that the policy says. Nothing here waits.
std::shared_ptr<PutState> TieredStore::Distribute(const KeptChunk& kept) {
  const WritePolicy policy = parts_->options.write_policy;
  int awaited = 0;
  for (const TierKind tier : kSlowTiers)
    if (parts_->slow[At(tier)] != nullptr && IsAwaited(tier)) ++awaited;
  const auto put = std::make_shared<PutState>(parts_->clock, 1 + awaited);
  const Removals::Move move = parts_->removals.BeginMove();
  const bool in_memory = parts_->has_memory() &&
                         parts_->Keep(kept, policy == WritePolicy::kBack && parts_->HasSlow()) !=
                             MemoryTier::Outcome::kNoRoom;
  if (policy == WritePolicy::kSelective) parts_->Wanted(kept);
  // What RAM does not take under write-back is what RAM gives up.
  const bool to_slow =
      policy == WritePolicy::kThrough || (policy == WritePolicy::kBack && !in_memory);
  bool is_taken = in_memory;
  Status failed;
  for (const TierKind tier : kSlowTiers) {
    if (!to_slow || parts_->slow[At(tier)] == nullptr) continue;
    Status status;
    try {
      status = parts_->writes[At(tier)]->Push(kept, IsAwaited(tier) ? put : nullptr);
    } catch (const std::bad_alloc&) {
      parts_->writes[At(tier)]->CountDropped();
      status = Status::OutOfMemory();
    }
    is_taken = is_taken || status.ok();
    if (status.ok()) continue;
    failed = status;
    if (IsAwaited(tier)) put->Report(status);
  }
  if (!is_taken && failed.ok())
    failed = Status(StatusCode::kFull, "ChunkStore::Put: RAM has no room for the chunk's " +
                                           std::to_string(kept.chunk->bytes().size()) +
                                           " bytes: the rest is pinned, in use or guaranteed to "
                                           "others");
  put->Report(failed);
  return put;
}

// ---------------------------------------------------------------------- control

int64_t TieredStore::Pin(std::span<const ChunkKey> chunks) {
  if (closed_) return 0;
  parts_->ReleaseExpiredPins();
  int64_t pinned = 0;
  for (const ChunkKey& key : chunks) {
    PinnedChunk pin{key};
    for (const TierKind tier : kPinningTiers)
      if (parts_->PinIn(tier, key, 1)) pin.tiers |= TierBit(tier);
    if (pin.tiers == 0) continue;
    try {
      parts_->pins.Add(pin, /*named=*/true, parts_->clock->SteadyNs());
    } catch (const std::bad_alloc&) {
      parts_->Unpin(pin);
      break;
    }
    ++pinned;
  }
  return pinned;
}

int64_t TieredStore::Unpin(std::span<const ChunkKey> chunks) {
  int64_t ended = 0;
  for (const ChunkKey& key : chunks) {
    const auto pin = parts_->pins.ReleaseNamed(key);
    if (!pin) continue;
    parts_->Unpin(*pin);
    ++ended;
  }
  return ended;
}

void TieredStore::Touch(std::span<const ChunkKey> chunks) {
  if (closed_) return;
  for (const ChunkKey& key : chunks) {
    if (parts_->has_memory()) parts_->memory->Touch(key);
    for (const auto& tier : parts_->slow)
      if (tier != nullptr) tier->tier->Touch(key);
  }
}

template <typename InMemory, typename InTier>
Result<int64_t> TieredStore::ForEachOf(std::span<const ChunkKey> chunks, InMemory in_memory,
                                       InTier in_tier) {
  Status failed;
  int64_t count = 0;
  // Which took all its time for a chunk: the others would each wait as long.
  std::array<bool, kTierCount> hangs{};
  for (const ChunkKey& key : chunks) {
    bool is_there = parts_->has_memory() && in_memory(*parts_->memory, key);
    for (const TierKind tier : kSlowTiers) {
      if (parts_->slow[At(tier)] == nullptr || hangs[At(tier)]) continue;
      Status status = in_tier(*parts_->slow[At(tier)]->tier, key, parts_->AdminDeadline(tier));
      is_there = is_there || status.ok();
      hangs[At(tier)] = status.code() == StatusCode::kTimeout;
      if (!status.ok() && status.code() != StatusCode::kNotFound) failed = std::move(status);
    }
    count += is_there ? 1 : 0;
  }
  if (!failed.ok()) return failed;
  return count;
}

Result<int64_t> TieredStore::SetTtl(std::span<const ChunkKey> chunks, int64_t ttl_ms) {
  return GuardEntry([&]() -> Result<int64_t> {
    QUIRE_RETURN_IF_ERROR(CheckOpen("SetTtl"));
    if (ttl_ms < 0 || ttl_ms > kTtlMaxMs)
      return Status(
          StatusCode::kBadArgument,
          "ChunkStore::SetTtl: ttl_ms is " + std::to_string(ttl_ms) + "; it must be in [0, 2^50]");
    const int64_t expires_ms = ttl_ms == 0 ? 0 : parts_->clock->WallMs() + ttl_ms;
    for (const auto& queue : parts_->writes)
      for (const ChunkKey& key : chunks)
        if (queue != nullptr) queue->SetExpiry(key, expires_ms);
    return ForEachOf(
        chunks,
        [&](MemoryTier& memory, const ChunkKey& key) { return memory.SetExpiry(key, expires_ms); },
        [&](ChunkTier& tier, const ChunkKey& key, int64_t deadline_ns) {
          return tier.SetExpiry(key, expires_ms, deadline_ns);
        });
  });
}

Result<int64_t> TieredStore::SetPriority(std::span<const ChunkKey> chunks, int priority) {
  return GuardEntry([&]() -> Result<int64_t> {
    QUIRE_RETURN_IF_ERROR(CheckOpen("SetPriority"));
    QUIRE_RETURN_IF_ERROR(CheckPriority("SetPriority", priority));
    return ForEachOf(
        chunks,
        [&](MemoryTier& memory, const ChunkKey& key) { return memory.SetPriority(key, priority); },
        [&](ChunkTier& tier, const ChunkKey& key, int64_t deadline_ns) {
          return tier.SetPriority(key, priority, deadline_ns);
        });
  });
}

Status TieredStore::SetQuota(const KeySpace& keys, const ChunkQuota& quota) {
  return GuardEntry([&]() -> Status {
    QUIRE_RETURN_IF_ERROR(CheckOpen("SetQuota"));
    const auto bad = [](const char* name, int64_t value, const char* rule) {
      return Status(StatusCode::kBadArgument, std::string("ChunkStore::SetQuota: ") + name +
                                                  " is " + std::to_string(value) + "; it must " +
                                                  rule);
    };
    if (quota.bytes_max < 0) return bad("bytes_max", quota.bytes_max, "not be negative");
    if (quota.bytes_guaranteed < 0)
      return bad("bytes_guaranteed", quota.bytes_guaranteed, "not be negative");
    if (quota.bytes_max > 0 && quota.bytes_guaranteed > quota.bytes_max)
      return bad("bytes_guaranteed", quota.bytes_guaranteed, "not be more than bytes_max");
    if (parts_->has_memory()) parts_->memory->SetQuota(keys.root(), quota);
    for (const auto& tier : parts_->slow)
      if (tier != nullptr) tier->tier->SetQuota(keys.root(), quota);
    return {};
  });
}

// ---------------------------------------------------------------------- administration

Status TieredStore::Settle(const char* call, const Removals::Scope& removal) {
  fetcher_.Disown(removal);
  removal.AwaitMoves();
  Status late;
  for (const TierKind tier : kSlowTiers) {
    WriteQueue* queue = parts_->writes[At(tier)].get();
    if (queue == nullptr) continue;
    // A write that has just begun may take until its deadline and one time-out of the tier.
    const int64_t until_ns = parts_->AdminDeadline(tier) + parts_->slow[At(tier)]->io_timeout_ns;
    if (queue->Forget(removal, until_ns)) continue;
    late = Status(StatusCode::kTimeout, std::string("ChunkStore::") + call + ": " +
                                            std::string(TierName(tier)) +
                                            " still writes a chunk of it; call again");
  }
  return late;
}

Result<std::vector<Passport>> TieredStore::Passports() {
  return GuardEntry([&]() -> Result<std::vector<Passport>> {
    QUIRE_RETURN_IF_ERROR(CheckOpen("Passports"));
    for (const auto& tier : parts_->slow) {
      if (tier == nullptr) continue;
      QUIRE_ASSIGN_OR_RETURN(const std::vector<std::string> passports,
                             tier->tier->Passports(kNever));
      for (const std::string& json : passports) {
        const Result<Passport> passport = Passport::FromJson(json);
        // A newer version may write what this one cannot read: its chunks are not for us.
        if (passport.ok()) parts_->passports.Add(FingerprintOf(json), *passport);
      }
    }
    return parts_->passports.All();
  });
}

Result<int64_t> TieredStore::Remove(std::span<const ChunkKey> chunks) {
  return GuardEntry([&]() -> Result<int64_t> {
    QUIRE_RETURN_IF_ERROR(CheckOpen("Remove"));
    const Removals::Scope removal(parts_->removals, chunks);
    const Status late = Settle("Remove", removal);
    QUIRE_ASSIGN_OR_RETURN(const int64_t removed,
                           ForEachOf(
                               chunks,
                               [](MemoryTier& memory, const ChunkKey& key) {
                                 return memory.Remove(key, ChunkEvent::Kind::kRemoved);
                               },
                               [](ChunkTier& tier, const ChunkKey& key, int64_t deadline_ns) {
                                 const Result<bool> was_there = tier.Remove(key, deadline_ns);
                                 const bool is_absent = was_there.ok() && !*was_there;
                                 return is_absent ? Status(StatusCode::kNotFound, "")
                                                  : was_there.status();
                               }));
    if (!late.ok()) return late;
    return removed;
  });
}

Result<int64_t> TieredStore::Clear(const KeySpace& keys) {
  return GuardEntry([&]() -> Result<int64_t> {
    QUIRE_RETURN_IF_ERROR(CheckOpen("Clear"));
    const Removals::Scope removal(parts_->removals, keys.fingerprint(), keys.root());
    const Status late = Settle("Clear", removal);
    int64_t cleared =
        parts_->has_memory() ? parts_->memory->Clear(keys.fingerprint(), keys.root()) : 0;
    for (const TierKind tier : kSlowTiers) {
      if (parts_->slow[At(tier)] == nullptr) continue;
      QUIRE_ASSIGN_OR_RETURN(const int64_t count, parts_->slow[At(tier)]->tier->Clear(
                                                      keys.fingerprint(), keys.root(), kNever));
      cleared += count;
    }
    if (!late.ok()) return late;
    return cleared;
  });
}

Result<std::vector<ChunkListing>> TieredStore::List(TierKind tier) {
  return GuardEntry([&]() -> Result<std::vector<ChunkListing>> {
    QUIRE_RETURN_IF_ERROR(CheckTier("List", tier));
    if (tier == TierKind::kRam) return parts_->memory->List();
    return parts_->slow[At(tier)]->tier->List(kNever);
  });
}

Result<std::shared_ptr<const StoredChunk>> TieredStore::Get(TierKind tier, const ChunkKey& key) {
  return GuardEntry([&]() -> Result<std::shared_ptr<const StoredChunk>> {
    QUIRE_RETURN_IF_ERROR(CheckTier("Get", tier));
    if (tier != TierKind::kRam)
      return parts_->slow[At(tier)]->tier->Get(key, parts_->AdminDeadline(tier));
    auto chunk = parts_->memory->Get(key);
    if (chunk == nullptr)
      return Status(StatusCode::kNotFound,
                    "ChunkStore::Get: RAM has no chunk " + key.digest.ToHex());
    QUIRE_RETURN_IF_ERROR(CheckSections(*chunk));
    return chunk;
  });
}

Result<int64_t> TieredStore::Verify(TierKind tier) {
  return GuardEntry([&]() -> Result<int64_t> {
    QUIRE_RETURN_IF_ERROR(CheckTier("Verify", tier));
    if (tier == TierKind::kRam) return parts_->memory->Verify();
    return parts_->slow[At(tier)]->tier->Verify(kNever);
  });
}

Result<int64_t> TieredStore::CollectGarbage(TierKind tier) {
  return GuardEntry([&]() -> Result<int64_t> {
    QUIRE_RETURN_IF_ERROR(CheckTier("CollectGarbage", tier));
    if (tier == TierKind::kRam) return parts_->CollectMemory();
    return parts_->slow[At(tier)]->tier->CollectGarbage(kNever);
  });
}

// One chunk that only RAM has, to all queues. Full: `*full` has no room for its bytes.
Status TieredStore::WriteBackOne(const ChunkId& id, WriteQueue** full, int64_t* bytes) {
  const Removals::Move move = parts_->removals.BeginMove();
  const std::optional<KeptChunk> kept = parts_->memory->TakeUnwritten(id);
  if (!kept) return {};  // it was evicted, and written by that, or removed
  Status failed;
  for (const auto& queue : parts_->writes) {
    if (queue == nullptr) continue;
    try {
      Status pushed = queue->Push(*kept, nullptr);
      if (pushed.ok()) continue;
      if (pushed.code() == StatusCode::kFull) *full = queue.get();
      failed = std::move(pushed);
    } catch (const std::bad_alloc&) {
      failed = Status::OutOfMemory();
    }
  }
  if (!failed.ok()) parts_->memory->MarkUnwritten(id);
  *bytes = static_cast<int64_t>(kept->chunk->bytes().size());
  return failed;
}

Status TieredStore::WriteBack(int64_t until_ns) {
  if (!parts_->has_memory() || !parts_->HasSlow()) return {};
  Status failed;
  for (const ChunkId& id : parts_->memory->Unwritten()) {
    Status status;
    WriteQueue* full = nullptr;
    int64_t bytes = 0;
    do {
      status = WriteBackOne(id, &full, &bytes);
    } while (status.code() == StatusCode::kFull && full->AwaitRoom(bytes, until_ns));
    if (!status.ok()) failed = std::move(status);
  }
  return failed;
}

Status TieredStore::Flush(int64_t until_ns) {
  return GuardEntry([&]() -> Status {
    QUIRE_RETURN_IF_ERROR(CheckOpen("Flush"));
    Status written = WriteBack(until_ns);
    for (const TierKind tier : kSlowTiers) {
      WriteQueue* queue = parts_->writes[At(tier)].get();
      if (queue == nullptr || queue->Drain(until_ns)) continue;
      return Status(StatusCode::kTimeout, "ChunkStore::Flush: " + std::to_string(queue->bytes()) +
                                              " bytes wait for " + std::string(TierName(tier)) +
                                              " still");
    }
    return written;
  });
}

void TieredStore::Close() noexcept {
  if (closed_.exchange(true)) return;
  keeper_.Stop();
  fetcher_.Close();
  try {
    // Ends: each write has a deadline, and a tier that keeps missing it is left alone.
    static_cast<void>(WriteBack(kNever));
  } catch (const std::bad_alloc&) {
    // What only RAM had is lost, as if it had not been put.
  }
  for (const auto& queue : parts_->writes)
    if (queue != nullptr) queue->Close();
  // Spaces and fetches hold the parts, and so the tiers, for longer.
  for (const auto& tier : parts_->slow)
    if (tier != nullptr) tier->tier->Close();
  keeper_.Close();  // whose call to the disk has ended with the tier
}

ChunkStoreStatistics TieredStore::Statistics() const {
  ChunkStoreStatistics statistics;
  if (parts_->has_memory()) statistics.tiers[At(TierKind::kRam)] = parts_->memory->Statistics();
  for (const TierKind tier : kSlowTiers)
    if (parts_->slow[At(tier)] != nullptr)
      statistics.tiers[At(tier)] =
          parts_->slow[At(tier)]->Statistics(parts_->writes[At(tier)]->bytes());
  statistics.fetches = fetcher_.started();
  statistics.prefetches = prefetches_;
  statistics.fetched_tokens = parts_->fetched_tokens;
  for (size_t i = 0; i < statistics.misses.size(); ++i) statistics.misses[i] = parts_->misses[i];
  statistics.pins = parts_->pins.size();
  statistics.forced_unpins = parts_->pins.forced();
  statistics.events_dropped = parts_->events.dropped();
  for (const auto& tier : parts_->slow)
    if (tier != nullptr) statistics.events_dropped += tier->tier->Usage().events_dropped;
  return statistics;
}

std::vector<ChunkEvent> TieredStore::TakeEvents() {
  parts_->CollectEvents();
  return parts_->events.Take();
}

}  // namespace quire
