#include "store/tiered/store_parts.h"

#include <algorithm>

namespace quire {
namespace {

// Elements of a layer's sections in a full chunk, about. In double: a passport may name any sizes.
double ElementsOf(const PassportLayer& layer, int64_t chunk_tokens) {
  const auto heads = static_cast<double>(layer.kv_heads);
  const auto width = static_cast<double>(layer.head_dim);
  const auto v_width = static_cast<double>(layer.v_head_dim);
  const auto tokens = static_cast<double>(chunk_tokens);
  switch (layer.kind) {
    case StateKind::kAttention:
      return tokens * heads * (width + v_width);
    case StateKind::kLatent:
      return tokens * heads * width;
    case StateKind::kRecurrent:
      return heads * width * v_width;
    case StateKind::kCaller:
      break;
  }
  double elements = 1;
  for (const int64_t dim : layer.state_shape) elements *= static_cast<double>(dim);
  return elements;
}

// Bytes of the sections of a full chunk.
int64_t BlockBytes(const Passport& passport) {
  constexpr double kBytesMax = 1LL << 60;
  double bytes = 0;
  for (const PassportLayer& layer : passport.layers) {
    bytes += ElementsOf(layer, passport.block_tokens) * static_cast<double>(layer.dtype.bytes());
  }
  return static_cast<int64_t>(std::min(bytes, kBytesMax));
}

}  // namespace

void PassportTable::Add(const Digest& fingerprint, const Passport& passport) {
  const Entry entry{ChunkLimits::Of(passport), BlockBytes(passport), passport};
  const std::lock_guard lock(mutex_);
  entries_.try_emplace(fingerprint, entry);
}

const PassportTable::Entry* PassportTable::Find(const Digest& fingerprint) const {
  const std::lock_guard lock(mutex_);
  const auto at = entries_.find(fingerprint);
  return at == entries_.end() ? nullptr : &at->second;
}

std::vector<Passport> PassportTable::All() const {
  const std::lock_guard lock(mutex_);
  std::vector<Passport> passports;
  for (const auto& [fingerprint, entry] : entries_) passports.push_back(entry.passport);
  return passports;
}

StoreParts::StoreParts(ChunkStoreOptions store_options)
    : options(std::move(store_options)),
      clock(options.clock),
      pins(options.pin_timeout_ms * 1'000'000),
      admission(options.admit_after),
      fetch_budget(std::make_shared<ByteBudget>(options.fetch_bytes_max)),
      spares(std::make_shared<SpareChunks>(fetch_budget)) {
  if (options.ram.bytes_max > 0)
    memory = std::make_unique<MemoryTier>(options.eviction, options.ram.bytes_max, &events, &pins);
}

void StoreParts::CollectEvents() {
  for (const auto& tier : slow) {
    if (tier == nullptr) continue;
    std::vector<ChunkEvent> collected;
    tier->tier->TakeEvents(&collected);
    for (const ChunkEvent& event : collected) events.Add(event);
  }
}

bool StoreParts::Knows(const ChunkId& id) const {
  if (has_memory() && memory->Has(id, clock->WallMs())) return true;
  return std::any_of(slow.begin(), slow.end(), [&](const auto& tier) {
    return tier != nullptr && tier->tier->Knows(id) == 1;
  });
}

int64_t StoreParts::AdminDeadline(TierKind tier) const {
  return clock->SteadyNs() + slow[At(tier)]->io_timeout_ns;
}

void StoreParts::AddTiers(SlowTiers tiers) {
  for (const TierKind kind : kSlowTiers) {
    if (tiers[At(kind)] == nullptr) continue;
    const int64_t timeout_ms =
        kind == TierKind::kDisk ? options.disk.io_timeout_ms : options.redis.io_timeout_ms;
    slow[At(kind)] =
        std::make_unique<SlowTier>(kind, std::move(tiers[At(kind)]), timeout_ms, clock);
    writes[At(kind)] =
        std::make_unique<WriteQueue>(slow[At(kind)].get(), clock, options.queue_bytes_max);
  }
}

void StoreParts::WriteToSlow(const KeptChunk& kept) noexcept {
  if (removals.Covers(kept.id)) return;
  for (const auto& queue : writes) {
    if (queue == nullptr) continue;
    try {
      // A drop is counted by the queue.
      static_cast<void>(queue->Push(kept, nullptr));
    } catch (const std::bad_alloc&) {
      queue->CountDropped();
    }
  }
}

void StoreParts::Wanted(const KeptChunk& kept) noexcept {
  if (options.write_policy == WritePolicy::kSelective && admission.Admit(kept.id.key))
    WriteToSlow(kept);
}

MemoryTier::Outcome StoreParts::Keep(const KeptChunk& kept, bool unwritten) {
  std::vector<KeptChunk> evicted;
  const MemoryTier::Outcome outcome = memory->Insert(kept, unwritten, clock->WallMs(), &evicted);
  for (const KeptChunk& each : evicted) WriteToSlow(each);
  return outcome;
}

int64_t StoreParts::CollectMemory() {
  struct Written {
    ~Written() {
      for (const KeptChunk& each : evicted) parts.WriteToSlow(each);
    }
    StoreParts& parts;
    std::vector<KeptChunk> evicted{};
  };
  const Removals::Move move = removals.BeginMove();
  Written written{*this};  // also when memory runs out
  return memory->CollectGarbage(clock->WallMs(), &written.evicted);
}

bool StoreParts::PinIn(TierKind tier, const ChunkKey& key, int change) noexcept {
  if (tier == TierKind::kRam) return has_memory() && memory->Pin(key, change);
  return slow[At(tier)] != nullptr && slow[At(tier)]->tier->Pin(key, change);
}

void StoreParts::Unpin(const PinnedChunk& pin) noexcept {
  for (const TierKind tier : {TierKind::kRam, TierKind::kDisk, TierKind::kRedis})
    if ((pin.tiers & TierBit(tier)) != 0) PinIn(tier, pin.key, -1);
}

void StoreParts::ReleaseExpiredPins() noexcept {
  const int64_t now = clock->SteadyNs();
  while (const std::optional<PinnedChunk> pin = pins.ReleaseExpired(now)) Unpin(*pin);
}

}  // namespace quire
