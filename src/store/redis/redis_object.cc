#include "store/redis/redis_object.h"

#include <algorithm>
#include <charconv>
#include <cstring>

#include "base/checksum.h"
#include "chunk/chunk_layout.h"

namespace quire {
namespace {

using chunk_layout::Load;
using chunk_layout::Store;

constexpr std::string_view kMagic = "QKVREDI1";
constexpr size_t kPieceCountAt = 8;
constexpr size_t kCrcAt = 12;
constexpr size_t kRootAt = 16;
constexpr size_t kReservedAt = 48;
constexpr size_t kFixedBytes = 64;
constexpr size_t kPieceEntryBytes = 4;
static_assert(kRedisCountBytes == kPieceCountAt + sizeof(uint32_t));

// Redis moves values of about this size fastest (a SET of 1 MiB half as fast again as one of 16),
// and the smaller they are the sooner does the first layer arrive.
constexpr int64_t kPieceBytesWanted = int64_t{1} << 20;

Status Corrupt(std::string what) {
  return Status(StatusCode::kCorrupt, "header in Redis: " + std::move(what));
}

int64_t PieceCountMax(const ChunkLimits& limits) {
  // Writers cut at sections, and inside of those that are too long.
  return limits.section_count_max + limits.total_bytes_max / kRedisPieceBytesMax + 1;
}

int64_t EnvelopeBytes(int64_t piece_count) {
  return static_cast<int64_t>(kFixedBytes) + piece_count * static_cast<int64_t>(kPieceEntryBytes);
}

uint32_t EnvelopeCrc(std::span<const std::byte> envelope) {
  constexpr std::byte kZeros[sizeof(uint32_t)] = {};
  const uint32_t crc = Crc32c(kZeros, sizeof(kZeros), Crc32c(envelope.data(), kCrcAt));
  return Crc32c(envelope.data() + kRootAt, envelope.size() - kRootAt, crc);
}

// The last of the ascending `cuts` in (begin, limit], or 0.
int64_t LastCut(const std::vector<int64_t>& cuts, int64_t begin, int64_t limit) {
  const auto at = std::upper_bound(cuts.begin(), cuts.end(), limit);
  return at != cuts.begin() && *(at - 1) > begin ? *(at - 1) : 0;
}

}  // namespace

// ---- Names

std::string RedisHeaderName(std::string_view prefix, const ChunkKey& key) {
  return std::string(prefix) + "{" + key.digest.ToHex() + "}:h";
}

std::string RedisPieceName(std::string_view prefix, const ChunkKey& key, int64_t piece) {
  return std::string(prefix) + "{" + key.digest.ToHex() + "}:kv:" + std::to_string(piece);
}

std::optional<RedisName> ParseRedisName(std::string_view prefix, std::string_view name) {
  constexpr size_t kHexDigits = 64;
  if (!name.starts_with(prefix)) return std::nullopt;
  name.remove_prefix(prefix.size());
  if (name.size() < kHexDigits + 4 || name[0] != '{' || name[kHexDigits + 1] != '}')
    return std::nullopt;
  const Result<Digest> digest = Digest::FromHex(name.substr(1, kHexDigits));
  if (!digest.ok()) return std::nullopt;
  RedisName parsed{.key = {*digest}};
  name.remove_prefix(kHexDigits + 2);
  if (name == ":h") return parsed;
  if (!name.starts_with(":kv:")) return std::nullopt;
  name.remove_prefix(4);
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), parsed.piece);
  if (error != std::errc() || end != name.data() + name.size() || parsed.piece < 0)
    return std::nullopt;
  return parsed;
}

std::string RedisScanPattern(std::string_view prefix, std::string_view tail) {
  std::string pattern;
  for (const char c : prefix) {
    if (std::string_view("*?[]\\").find(c) != std::string_view::npos) pattern += '\\';
    pattern += c;
  }
  return pattern + "{*}" + std::string(tail);
}

// ---- Values

std::vector<int64_t> CutRedisPieces(const ChunkHeader& header) {
  std::vector<int64_t> sections, layers;
  for (size_t i = 1; i < header.sections.size(); ++i) {
    sections.push_back(header.sections[i].offset);
    if (header.sections[i].layer_first != header.sections[i - 1].layer_first)
      layers.push_back(header.sections[i].offset);
  }
  sections.push_back(header.total_bytes);
  layers.push_back(header.total_bytes);
  std::vector<int64_t> pieces;
  for (int64_t begin = header.header_bytes; begin < header.total_bytes;) {
    // As many layers as are wanted, else one, else some of its sections, else a part of one.
    int64_t end = LastCut(layers, begin, begin + kPieceBytesWanted);
    if (end == 0) {
      end = *std::upper_bound(layers.begin(), layers.end(), begin);
      if (end > begin + kRedisPieceBytesMax)
        end = LastCut(sections, begin, begin + kRedisPieceBytesMax);
      if (end == 0) end = begin + kRedisPieceBytesMax;
    }
    pieces.push_back(end - begin);
    begin = end;
  }
  return pieces;
}

std::string EncodeRedisHeader(const ChunkKey& root, std::span<const int64_t> pieces,
                              std::span<const std::byte> chunk_header) {
  const auto envelope_bytes = static_cast<size_t>(EnvelopeBytes(std::ssize(pieces)));
  std::string value(envelope_bytes + chunk_header.size(), '\0');
  const std::span<std::byte> bytes = std::as_writable_bytes(std::span(value));
  std::memcpy(bytes.data(), kMagic.data(), kMagic.size());
  Store(bytes, kPieceCountAt, static_cast<uint32_t>(pieces.size()));
  std::memcpy(bytes.data() + kRootAt, root.digest.bytes.data(), root.digest.bytes.size());
  for (size_t i = 0; i < pieces.size(); ++i)
    Store(bytes, kFixedBytes + i * kPieceEntryBytes, static_cast<uint32_t>(pieces[i]));
  Store(bytes, kCrcAt, EnvelopeCrc(bytes.first(envelope_bytes)));
  std::memcpy(bytes.data() + envelope_bytes, chunk_header.data(), chunk_header.size());
  return value;
}

std::optional<int64_t> RedisPieceCount(std::span<const std::byte> begin) {
  if (std::ssize(begin) < kRedisCountBytes) return std::nullopt;
  if (std::memcmp(begin.data(), kMagic.data(), kMagic.size()) != 0) return std::nullopt;
  return Load<uint32_t>(begin, kPieceCountAt);
}

int64_t RedisHeaderBytesMax(const ChunkLimits& limits) {
  return EnvelopeBytes(PieceCountMax(limits)) +
         chunk_layout::RoundUp(
             chunk_layout::HeaderContentBytes(limits.section_count_max, limits.token_count_max,
                                              /*has_mac=*/true),
             chunk_layout::kFileAlignment);
}

Result<RedisHeader> DecodeRedisHeader(std::span<const std::byte> value, const ChunkLimits& limits) {
  const std::optional<int64_t> count = RedisPieceCount(value);
  if (!count || value.size() < kFixedBytes)
    return Corrupt("it does not begin with " + std::string(kMagic));
  if (*count > PieceCountMax(limits)) {
    return Status(StatusCode::kTooLarge, "header in Redis: it has " + std::to_string(*count) +
                                             " pieces; the limit is " +
                                             std::to_string(PieceCountMax(limits)));
  }
  const auto envelope_bytes = static_cast<size_t>(EnvelopeBytes(*count));
  if (envelope_bytes > value.size())
    return Corrupt("its " + std::to_string(*count) + " pieces do not fit into it");
  const std::span<const std::byte> envelope = value.first(envelope_bytes);
  if (EnvelopeCrc(envelope) != Load<uint32_t>(envelope, kCrcAt))
    return Corrupt("its checksum is wrong");
  for (size_t i = kReservedAt; i < kFixedBytes; ++i) {
    if (envelope[i] != std::byte{0})
      return Status(StatusCode::kIncompatible, "header in Redis: it is of a newer format");
  }
  RedisHeader header;
  header.chunk_at = envelope_bytes;
  std::memcpy(header.root.digest.bytes.data(), envelope.data() + kRootAt,
              header.root.digest.bytes.size());
  QUIRE_ASSIGN_OR_RETURN(header.chunk, DecodeChunkHeader(value.subspan(envelope_bytes), limits));
  int64_t total = header.chunk.header_bytes;
  for (int64_t i = 0; i < *count; ++i) {
    const int64_t bytes =
        Load<uint32_t>(envelope, kFixedBytes + static_cast<size_t>(i) * kPieceEntryBytes);
    if (bytes < 1 || bytes > kRedisPieceBytesMax)
      return Corrupt("piece " + std::to_string(i) + " has " + std::to_string(bytes) + " bytes");
    header.pieces.push_back(bytes);
    total += bytes;
  }
  if (total != header.chunk.total_bytes) {
    return Corrupt("its pieces make " + std::to_string(total) + " bytes of a chunk of " +
                   std::to_string(header.chunk.total_bytes));
  }
  if (std::ssize(value) != std::ssize(envelope) + header.chunk.header_bytes)
    return Corrupt("it is longer than the chunk's header");
  return header;
}

}  // namespace quire
