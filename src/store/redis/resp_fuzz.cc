// Replies from anywhere, in portions of any size: the same replies or the same refusal as in one
// portion, nothing larger than was expected, and nothing beside the place for a value.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "base/check.h"
#include "store/redis/redis_object.h"
#include "store/redis/redis_slots.h"
#include "store/redis/resp.h"

namespace {

constexpr int64_t kBytesMax = 1000;
constexpr int64_t kItemsMax = 100;

int64_t CountItems(const quire::RespValue& value) {
  int64_t count = static_cast<int64_t>(value.items.size());
  for (const quire::RespValue& item : value.items) count += CountItems(item);
  return count;
}

int64_t CountBulkBytes(const quire::RespValue& value) {
  int64_t bytes =
      value.type == quire::RespType::kBulk ? static_cast<int64_t>(value.text.size()) : 0;
  for (const quire::RespValue& item : value.items) bytes += CountBulkBytes(item);
  return bytes;
}

void Print(const quire::RespValue& value, std::string* text) {
  *text += std::to_string(static_cast<int>(value.type)) + "," + std::to_string(value.integer) +
           (value.in_place ? "!" : "") + value.text + "(";
  for (const quire::RespValue& item : value.items) Print(item, text);
  *text += ")";
}

// What the stream was understood as.
std::string Parse(const uint8_t* data, size_t size, size_t portion) {
  std::vector<std::byte> guarded(64, std::byte{0xA5});
  const std::span<std::byte> place = std::span(guarded).subspan(16, 32);
  const quire::RespExpectation expected = {
      .place = place, .bytes_max = kBytesMax, .items_max = kItemsMax};
  quire::RespReader reader;
  std::string text;
  size_t at = 0;
  while (true) {
    const auto complete = reader.Next(expected);
    if (!complete.ok()) {
      text += "refused";
      break;
    }
    if (*complete) {
      const quire::RespValue reply = reader.Take();
      QUIRE_CHECK(CountItems(reply) <= kItemsMax && CountBulkBytes(reply) <= kBytesMax);
      Print(reply, &text);
      if (reply.in_place) text.append(reinterpret_cast<const char*>(place.data()), place.size());
      const quire::RedisAddress asked{"127.0.0.1", 1};
      (void)quire::ParseClusterSlots(reply, asked);
      (void)quire::ParseRedirection(reply.text, asked);
      (void)quire::DecodeRedisHeader(std::as_bytes(std::span(reply.text)), quire::ChunkLimits{});
      continue;
    }
    if (at == size) break;
    size_t left = std::min(portion, size - at), filled = 0;
    for (const std::span<std::byte> space : reader.Space()) {
      const size_t count = std::min(space.size(), left);
      if (count > 0) std::memcpy(space.data(), data + at, count);
      at += count;
      left -= count;
      filled += count;
    }
    reader.Filled(filled);
  }
  for (size_t i = 0; i < guarded.size(); ++i)
    QUIRE_CHECK((i >= 16 && i < 48) || guarded[i] == std::byte{0xA5});
  return text;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 1) return 0;
  const std::string whole = Parse(data + 1, size - 1, size);
  QUIRE_CHECK(Parse(data + 1, size - 1, 1 + data[0]) == whole);
  return 0;
}
