// A chunk as keys and values of Redis: docs/formats/redis.md.
#ifndef QUIRE_STORE_REDIS_REDIS_OBJECT_H_
#define QUIRE_STORE_REDIS_REDIS_OBJECT_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "quire/chunk.h"
#include "quire/status.h"

namespace quire {

inline constexpr int64_t kRedisPieceBytesMax = int64_t{8} << 20;

// ---- Names

// What a name is of. Piece -1 is the header.
struct RedisName {
  ChunkKey key{};
  int64_t piece = -1;
};

std::string RedisHeaderName(std::string_view prefix, const ChunkKey& key);
std::string RedisPieceName(std::string_view prefix, const ChunkKey& key, int64_t piece);
// nullopt: not one of ours.
std::optional<RedisName> ParseRedisName(std::string_view prefix, std::string_view name);
// A pattern of SCAN that matches `tail` behind all keys under the prefix.
std::string RedisScanPattern(std::string_view prefix, std::string_view tail);

// ---- Values

// Bytes of the pieces that the payload is cut into: at layers where that is possible.
std::vector<int64_t> CutRedisPieces(const ChunkHeader& header);

struct RedisHeader {
  ChunkKey root{};
  std::vector<int64_t> pieces{};  // bytes of each
  ChunkHeader chunk{};
  size_t chunk_at = 0;  // where in the value the chunk's header begins
};

// `chunk_header`: the header's bytes.
std::string EncodeRedisHeader(const ChunkKey& root, std::span<const int64_t> pieces,
                              std::span<const std::byte> chunk_header);
// Corrupt, TooLarge, Incompatible.
Result<RedisHeader> DecodeRedisHeader(std::span<const std::byte> value, const ChunkLimits& limits);
// Longest value that DecodeRedisHeader takes.
int64_t RedisHeaderBytesMax(const ChunkLimits& limits);
// The number of pieces as the value's first kRedisCountBytes bytes say; nullopt if they cannot be
// of a header.
inline constexpr int64_t kRedisCountBytes = 12;
std::optional<int64_t> RedisPieceCount(std::span<const std::byte> begin);

}  // namespace quire

#endif  // QUIRE_STORE_REDIS_REDIS_OBJECT_H_
