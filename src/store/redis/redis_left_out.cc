// The Redis tier in a build without it: refused.
#include "store/redis/redis_tier.h"

namespace quire {

Result<std::unique_ptr<ChunkTier>> CreateRedisTier(const RedisTierOptions&, std::string,
                                                   std::shared_ptr<Clock>) {
  return Status(StatusCode::kBadArgument,
                "redis.endpoints: this build has no Redis tier; configure it with "
                "-DQUIRE_REDIS=ON");
}

}  // namespace quire
