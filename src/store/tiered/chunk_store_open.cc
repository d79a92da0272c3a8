// The tiers that the options name, and the store above them.
#include <string>
#include <utility>

#include "base/clock.h"
#include "base/guard.h"
#include "quire/chunk_store.h"
#include "store/disk/disk_tier.h"
#include "store/redis/redis_tier.h"
#include "store/tiered/tiered_store.h"

namespace quire {

Result<std::unique_ptr<ChunkStore>> ChunkStore::Open(ChunkStoreOptions options) {
  return GuardEntry([&]() -> Result<std::unique_ptr<ChunkStore>> {
    const bool has_disk = !options.disk.directory.empty();
    const bool has_redis = !options.redis.endpoints.empty();
    QUIRE_RETURN_IF_ERROR(CheckStoreOptions(options, has_disk || has_redis));
    if (options.clock == nullptr) options.clock = MachineTime();
    SlowTiers slow;
    if (has_disk) {
      QUIRE_ASSIGN_OR_RETURN(slow[At(TierKind::kDisk)],
                             DiskTier::Open({.disk = options.disk,
                                             .eviction = options.eviction,
                                             .mac_key = options.mac_key,
                                             .clock = options.clock}));
    }
    if (has_redis) {
      QUIRE_ASSIGN_OR_RETURN(slow[At(TierKind::kRedis)],
                             CreateRedisTier(options.redis, options.mac_key, options.clock));
    }
    return TieredStore::Create(std::move(options), std::move(slow));
  });
}

}  // namespace quire
