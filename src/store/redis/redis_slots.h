// Where keys live in a Redis Cluster: slots, addresses, and what servers say about both.
#ifndef QUIRE_STORE_REDIS_REDIS_SLOTS_H_
#define QUIRE_STORE_REDIS_REDIS_SLOTS_H_

#include <compare>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "quire/status.h"
#include "store/redis/resp.h"

namespace quire {

inline constexpr int kRedisSlotCount = 16384;

// CRC-16/XMODEM of the key, or of its part in the first {...} that is not empty, modulo 16384.
int RedisSlotOf(std::string_view key);

struct RedisAddress {
  std::string host = {};  // a name or number; with port 0 the path of a unix socket
  int port = 0;
  auto operator<=>(const RedisAddress&) const = default;
  std::string ToString() const;
};

// "HOST:PORT" or "unix:PATH", several with commas. BadArgument.
Result<std::vector<RedisAddress>> ParseRedisEndpoints(std::string_view text);

struct RedisSlotRange {
  int first = 0, last = 0;  // inclusive
  RedisAddress master;
};

// The reply to CLUSTER SLOTS; `asked`: whose it is, for nodes that do not know their own address.
Result<std::vector<RedisSlotRange>> ParseClusterSlots(const RespValue& reply,
                                                      const RedisAddress& asked);

// "MOVED 3999 127.0.0.1:6381" and "ASK ...".
struct RedisRedirection {
  bool ask = false;
  int slot = 0;
  RedisAddress to;
};
std::optional<RedisRedirection> ParseRedirection(std::string_view error, const RedisAddress& asked);

}  // namespace quire

#endif  // QUIRE_STORE_REDIS_REDIS_SLOTS_H_
