#include "store/store_parts.h"

#include <algorithm>

namespace quire {
namespace {

// Bytes of the sections of a full chunk.
int64_t BlockBytes(const Passport& passport) {
  int64_t bytes = 0;
  for (const PassportLayer& layer : passport.layers) {
    const int64_t rows = layer.kind == StateKind::kRecurrent ? 1 : passport.block_tokens;
    const int64_t width =
        layer.kind == StateKind::kAttention ? layer.head_dim + layer.v_head_dim : layer.head_dim;
    bytes += rows * layer.kv_heads * width * layer.dtype.bytes();
  }
  return bytes;
}

ChunkStoreOptions WithClock(ChunkStoreOptions options) {
  if (options.clock == nullptr) options.clock = MachineTime();
  return options;
}

}  // namespace

void PassportTable::Add(const Digest& fingerprint, const Passport& passport) {
  const Entry entry{ChunkLimits::Of(passport), BlockBytes(passport)};
  const std::lock_guard lock(mutex_);
  entries_.try_emplace(fingerprint, entry);
}

std::optional<PassportTable::Entry> PassportTable::Find(const Digest& fingerprint) const {
  const std::lock_guard lock(mutex_);
  const auto at = entries_.find(fingerprint);
  if (at == entries_.end()) return std::nullopt;
  return at->second;
}

StoreParts::StoreParts(ChunkStoreOptions store_options)
    : options(WithClock(std::move(store_options))),
      clock(options.clock),
      pins(options.pin_timeout_ms * 1'000'000) {
  if (options.ram.bytes_max > 0)
    memory = std::make_unique<MemoryTier>(options.eviction, options.ram.bytes_max, &events, &pins);
}

bool StoreParts::Knows(const ChunkId& id) const {
  if (has_memory() && memory->Has(id, clock->WallMs())) return true;
  return std::any_of(slow.begin(), slow.end(),
                     [&](const auto& tier) { return tier != nullptr && tier->Knows(id) == 1; });
}

int64_t StoreParts::AdminDeadline(TierKind tier) const {
  const int64_t timeout_ms =
      tier == TierKind::kRedis ? options.redis.io_timeout_ms : options.disk.io_timeout_ms;
  return clock->SteadyNs() + timeout_ms * 1'000'000;
}

bool StoreParts::PinIn(TierKind tier, const ChunkId& id, int change) noexcept {
  if (tier == TierKind::kRam) return has_memory() && memory->Pin(id, change);
  return slow[At(tier)] != nullptr && slow[At(tier)]->Pin(id, change);
}

void StoreParts::Unpin(const PinnedChunk& pin) noexcept {
  for (const TierKind tier : {TierKind::kRam, TierKind::kDisk, TierKind::kRedis})
    if ((pin.tiers & TierBit(tier)) != 0) PinIn(tier, pin.id, -1);
}

void StoreParts::ReleaseExpiredPins() noexcept {
  const int64_t now = clock->SteadyNs();
  while (const std::optional<PinnedChunk> pin = pins.ReleaseExpired(now)) Unpin(*pin);
}

}  // namespace quire
