#include "store/redis/redis_slots.h"

#include <array>
#include <charconv>
#include <cstdint>

namespace quire {
namespace {

constexpr int kPortMax = 65535;
constexpr std::string_view kUnixPrefix = "unix:";

constexpr std::array<uint16_t, 256> MakeCrc16Table() {
  std::array<uint16_t, 256> table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte << 8;
    for (int bit = 0; bit < 8; ++bit) crc = (crc & 0x8000) != 0 ? crc << 1 ^ 0x1021 : crc << 1;
    table[byte] = static_cast<uint16_t>(crc);
  }
  return table;
}
constexpr std::array<uint16_t, 256> kCrc16Table = MakeCrc16Table();

uint32_t Crc16(std::string_view bytes) {
  uint32_t crc = 0;
  for (const char c : bytes)
    crc = (crc << 8 ^ kCrc16Table[(crc >> 8 ^ static_cast<uint8_t>(c)) & 0xFF]) & 0xFFFF;
  return crc;
}

bool ParseInt(std::string_view text, int max, int* value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *value);
  return error == std::errc() && end == text.data() + text.size() && *value >= 0 && *value <= max;
}

// "HOST:PORT", "[V6]:PORT", and "V6:PORT" as Redis writes it. An empty host stays empty.
std::optional<RedisAddress> ParseHostPort(std::string_view text) {
  const size_t colon = text.rfind(':');
  RedisAddress address;
  if (colon == text.npos) return std::nullopt;
  if (!ParseInt(text.substr(colon + 1), kPortMax, &address.port) || address.port == 0)
    return std::nullopt;
  std::string_view host = text.substr(0, colon);
  if (host.size() >= 2 && host.front() == '[' && host.back() == ']')
    host = host.substr(1, host.size() - 2);
  address.host = std::string(host);
  return address;
}

std::optional<RedisSlotRange> ParseRange(const RespValue& entry, const RedisAddress& asked) {
  if (entry.items.size() < 3) return std::nullopt;
  const RespValue& first = entry.items[0];
  const RespValue& last = entry.items[1];
  const RespValue& master = entry.items[2];
  if (first.type != RespType::kInteger || last.type != RespType::kInteger) return std::nullopt;
  if (first.integer < 0 || last.integer < first.integer || last.integer >= kRedisSlotCount)
    return std::nullopt;
  if (master.items.size() < 2 || master.items[1].type != RespType::kInteger) return std::nullopt;
  const int64_t port = master.items[1].integer;
  if (port < 1 || port > kPortMax) return std::nullopt;
  const std::string& host = master.items[0].text.empty() ? asked.host : master.items[0].text;
  return RedisSlotRange{static_cast<int>(first.integer),
                        static_cast<int>(last.integer),
                        {host, static_cast<int>(port)}};
}

}  // namespace

int RedisSlotOf(std::string_view key) {
  const size_t open = key.find('{');
  if (open != key.npos) {
    const size_t close = key.find('}', open + 1);
    if (close != key.npos && close > open + 1) key = key.substr(open + 1, close - open - 1);
  }
  return static_cast<int>(Crc16(key) % kRedisSlotCount);
}

std::string RedisAddress::ToString() const {
  if (port == 0) return std::string(kUnixPrefix) + host;
  const bool is_v6 = host.find(':') != host.npos;
  return (is_v6 ? "[" + host + "]" : host) + ":" + std::to_string(port);
}

Result<std::vector<RedisAddress>> ParseRedisEndpoints(std::string_view text) {
  std::vector<RedisAddress> addresses;
  while (true) {
    const size_t comma = text.find(',');
    const std::string_view item = text.substr(0, comma);
    std::optional<RedisAddress> address;
    if (item.starts_with(kUnixPrefix)) {
      address = RedisAddress{std::string(item.substr(kUnixPrefix.size())), 0};
    } else {
      address = ParseHostPort(item);
    }
    if (!address || address->host.empty()) {
      return Status(StatusCode::kBadArgument, "redis.endpoints: \"" + PrintableError(item) +
                                                  "\" is neither HOST:PORT nor unix:PATH");
    }
    addresses.push_back(*std::move(address));
    if (comma == text.npos) return addresses;
    text.remove_prefix(comma + 1);
  }
}

Result<std::vector<RedisSlotRange>> ParseClusterSlots(const RespValue& reply,
                                                      const RedisAddress& asked) {
  if (reply.type != RespType::kArray || reply.items.empty()) {
    return Status(StatusCode::kUnavailable,
                  "Redis " + asked.ToString() + ": its cluster has no slots yet");
  }
  std::vector<RedisSlotRange> ranges;
  for (const RespValue& entry : reply.items) {
    std::optional<RedisSlotRange> range = ParseRange(entry, asked);
    if (!range) {
      return Status(StatusCode::kCorrupt, "Redis " + asked.ToString() + ": entry " +
                                              std::to_string(ranges.size()) +
                                              " of its reply to CLUSTER SLOTS makes no sense");
    }
    ranges.push_back(*std::move(range));
  }
  return ranges;
}

std::optional<RedisRedirection> ParseRedirection(std::string_view error,
                                                 const RedisAddress& asked) {
  RedisRedirection redirection;
  if (error.starts_with("ASK ")) {
    redirection.ask = true;
    error.remove_prefix(4);
  } else if (error.starts_with("MOVED ")) {
    error.remove_prefix(6);
  } else {
    return std::nullopt;
  }
  const size_t space = error.find(' ');
  if (space == error.npos ||
      !ParseInt(error.substr(0, space), kRedisSlotCount - 1, &redirection.slot))
    return std::nullopt;
  std::optional<RedisAddress> to = ParseHostPort(error.substr(space + 1));
  if (!to) return std::nullopt;
  if (to->host.empty()) to->host = asked.host;
  redirection.to = *std::move(to);
  return redirection;
}

}  // namespace quire
