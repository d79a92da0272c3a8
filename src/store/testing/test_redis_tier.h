// What the tests of the Redis tier share: chunks with bytes that follow from their tokens, a sink
// that checks what it is told, one write and one read.
#ifndef QUIRE_STORE_TESTING_TEST_REDIS_TIER_H_
#define QUIRE_STORE_TESTING_TEST_REDIS_TIER_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "store/redis/redis_tier.h"
#include "store/testing/test_redis.h"

namespace quire::redis_test {

inline constexpr int64_t kMs = 1'000'000;
inline constexpr int64_t kLongNs = 120'000 * kMs;  // more than anything here should take

#define QUIRE_NEEDS_REDIS() \
  if (!HaveRedisServer()) GTEST_SKIP() << "redis-server is not installed; tools/setup.sh does it"

inline int64_t In(int64_t ns) { return MachineTime()->SteadyNs() + ns; }

struct Shape {
  int64_t layers = 3;
  int64_t head_dim = 64;
  int64_t tokens = 16;
  int64_t expires_ms = 0;
  const char* mac_key = "";
};

// Three megabytes: a piece for each layer.
inline constexpr Shape kThreePieces = {.layers = 3, .head_dim = 16384, .tokens = 16};

inline const KeySpace& Space(const std::string& salt = "") {
  thread_local std::map<std::string, KeySpace> spaces;
  return spaces.try_emplace(salt, FingerprintOf("a passport"), salt).first->second;
}

inline std::shared_ptr<const StoredChunk> MakeChunk(int32_t first_token, const Shape& shape = {},
                                                    const std::string& salt = "") {
  const KeySpace& space = Space(salt);
  ChunkFields fields;
  for (int64_t i = 0; i < shape.tokens; ++i)
    fields.tokens.push_back(first_token + static_cast<int32_t>(i));
  fields.key = space.Next(space.root(), fields.tokens);
  fields.fingerprint = space.fingerprint();
  fields.expires_ms = shape.expires_ms;
  std::vector<SectionSpec> sections;
  for (int64_t layer = 0; layer < shape.layers; ++layer) {
    for (const SectionKind kind : {SectionKind::kKey, SectionKind::kValue})
      sections.push_back({kind, layer, layer, DType::kBF16, {shape.tokens, 1, shape.head_dim}});
  }
  ChunkWriter writer =
      *ChunkWriter::Create(fields, sections, {.mac_key = shape.mac_key, .limits = {}});
  for (size_t s = 0; s < sections.size(); ++s) {
    const std::span<std::byte> bytes = writer.section(static_cast<int64_t>(s)).value();
    for (size_t i = 0; i < bytes.size(); ++i)
      bytes[i] =
          static_cast<std::byte>(i * 7 + s * 31 + static_cast<size_t>(first_token) + i / 256);
  }
  ChunkHeader header = writer.header();
  ChunkBuffer buffer = *std::move(writer).Seal();
  return std::make_shared<const StoredChunk>(std::move(header), std::move(buffer));
}

inline ChunkId IdOf(const StoredChunk& chunk, const std::string& salt = "") {
  return {chunk.header().fingerprint, Space(salt).root(), chunk.header().key};
}

inline TierRead ReadOf(const StoredChunk& chunk, const std::string& salt = "") {
  TierRead read;
  read.id = IdOf(chunk, salt);
  read.expected = {.key = read.id.key,
                   .fingerprint = read.id.fingerprint,
                   .now_ms = MachineTime()->WallMs(),
                   .tokens = std::span<const int32_t>(chunk.header().tokens)};
  return read;
}

// Takes what is read, over memory that is full of garbage.
class Collector final : public TierReadSink {
 public:
  explicit Collector(size_t count) : items(count) {}

  struct Item {
    ChunkHeader header;
    ChunkBuffer buffer;
    std::vector<int64_t> sections;
    Status status;
    int ends = 0;
    bool cancelled = false;
  };

  Result<std::span<std::byte>> OnHeader(size_t i, const ChunkHeader& header) override {
    if (refuse_headers) return Status(StatusCode::kFull, "no room");
    items[i].header = header;
    items[i].buffer = ChunkBuffer(header.total_bytes);
    std::ranges::fill(items[i].buffer.bytes(), std::byte{0xA5});
    return items[i].buffer.bytes();
  }
  void OnSection(size_t i, int64_t section) override {
    EXPECT_EQ(items[i].ends, 0);
    const Section& entry = items[i].header.sections[static_cast<size_t>(section)];
    const auto bytes = items[i].buffer.bytes().subspan(static_cast<size_t>(entry.offset),
                                                       static_cast<size_t>(entry.length));
    EXPECT_TRUE(CheckSection(items[i].header, section, bytes).ok());
    items[i].sections.push_back(section);
    layers.push_back(entry.layer_first);
    if (on_section) on_section(i, section);
  }
  void OnEnd(size_t i, const Status& status) override {
    ++items[i].ends;
    items[i].status = status;
    // Nobody may write here any more.
    if (!status.ok()) items[i].buffer = ChunkBuffer();
    if (on_end) on_end(i);
  }
  bool Cancelled(size_t i) const override { return items[i].cancelled; }

  std::vector<Item> items;
  std::vector<int64_t> layers;  // of all sections, in the order in which they came
  std::function<void(size_t, int64_t)> on_section;
  std::function<void(size_t)> on_end;
  bool refuse_headers = false;
};

inline bool SameBytes(const StoredChunk& chunk, const ChunkBuffer& buffer) {
  return std::ranges::equal(chunk.bytes(), buffer.bytes());
}

inline std::unique_ptr<RedisTier> Open(const std::string& endpoints, RedisTierOptions options = {},
                                       std::string mac_key = "",
                                       std::shared_ptr<Clock> clock = nullptr) {
  options.endpoints = endpoints;
  // A busy machine is no outage.
  if (options.connect_timeout_ms == RedisTierOptions().connect_timeout_ms)
    options.connect_timeout_ms = 30'000;
  if (options.io_timeout_ms == RedisTierOptions().io_timeout_ms) options.io_timeout_ms = 60'000;
  Result<std::unique_ptr<RedisTier>> tier =
      RedisTier::Create(options, std::move(mac_key), std::move(clock));
  EXPECT_TRUE(tier.ok()) << tier.status().ToString();
  return *std::move(tier);
}

inline Status WriteOne(RedisTier& tier, const StoredChunk& chunk, int64_t ns = kLongNs,
                       const std::string& salt = "") {
  const TierWrite item{.id = IdOf(chunk, salt), .chunk = &chunk};
  const std::vector<Status> statuses = tier.Write(std::span(&item, 1), In(ns));
  EXPECT_EQ(statuses.size(), 1U);
  return statuses[0];
}

// Reads the chunk and compares its bytes.
inline Status ReadOne(RedisTier& tier, const StoredChunk& chunk, int64_t ns = kLongNs) {
  const TierRead read = ReadOf(chunk);
  Collector sink(1);
  tier.Read(std::span(&read, 1), In(ns), sink);
  EXPECT_EQ(sink.items[0].ends, 1);
  EXPECT_TRUE(!sink.items[0].status.ok() || SameBytes(chunk, sink.items[0].buffer));
  return sink.items[0].status;
}

// Asks a server that hangs, until it is taken for dead: then nobody waits for it any more.
inline void AwaitOutage(RedisTier& tier, const StoredChunk& chunk) {
  // Each try that hangs doubles the time until the next one, so a few are enough.
  for (int i = 0; i < 50; ++i) {
    const Status status = ReadOne(tier, chunk, 50 * kMs);
    EXPECT_FALSE(status.ok());
    if (status.code() == StatusCode::kUnavailable && !tier.Usage().available) return;
  }
  ADD_FAILURE() << "it is asked again and again";
}

inline std::string HeaderName(const StoredChunk& chunk) {
  return RedisHeaderName("", chunk.header().key);
}
inline std::string PieceName(const StoredChunk& chunk, int64_t piece) {
  return RedisPieceName("", chunk.header().key, piece);
}

}  // namespace quire::redis_test

#endif  // QUIRE_STORE_TESTING_TEST_REDIS_TIER_H_
