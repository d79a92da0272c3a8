#include "store/redis_tier.h"

#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/fake_clock.h"
#include "store/test_redis.h"

namespace quire {
namespace {

constexpr int64_t kMs = 1'000'000;
constexpr int64_t kLongNs = 10'000 * kMs;  // more than anything here should take

#define QUIRE_NEEDS_REDIS() \
  if (!HaveRedisServer()) GTEST_SKIP() << "redis-server is not installed; tools/setup.sh does it"

int64_t In(int64_t ns) { return MachineTime()->SteadyNs() + ns; }

struct Shape {
  int64_t layers = 3;
  int64_t head_dim = 64;
  int64_t tokens = 16;
  int64_t expires_ms = 0;
  const char* mac_key = "";
};

// Three megabytes: a piece for each layer.
constexpr Shape kThreePieces = {.layers = 3, .head_dim = 16384, .tokens = 16};

const KeySpace& Space(const std::string& salt = "") {
  static std::map<std::string, KeySpace> spaces;
  return spaces.try_emplace(salt, FingerprintOf("a passport"), salt).first->second;
}

std::shared_ptr<const StoredChunk> MakeChunk(int32_t first_token, const Shape& shape = {},
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
    const std::span<std::byte> bytes = writer.section(static_cast<int64_t>(s));
    for (size_t i = 0; i < bytes.size(); ++i)
      bytes[i] =
          static_cast<std::byte>(i * 7 + s * 31 + static_cast<size_t>(first_token) + i / 256);
  }
  ChunkHeader header = writer.header();
  ChunkBuffer buffer = *std::move(writer).Seal();
  return std::make_shared<const StoredChunk>(std::move(header), std::move(buffer));
}

ChunkId IdOf(const StoredChunk& chunk, const std::string& salt = "") {
  return {chunk.header().fingerprint, Space(salt).root(), chunk.header().key};
}

TierRead ReadOf(const StoredChunk& chunk, const std::string& salt = "") {
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

bool SameBytes(const StoredChunk& chunk, const ChunkBuffer& buffer) {
  return std::ranges::equal(chunk.bytes(), buffer.bytes());
}

std::unique_ptr<RedisTier> Open(const std::string& endpoints, RedisTierOptions options = {},
                                std::string mac_key = "", std::shared_ptr<Clock> clock = nullptr) {
  options.endpoints = endpoints;
  Result<std::unique_ptr<RedisTier>> tier =
      RedisTier::Create(options, std::move(mac_key), std::move(clock));
  EXPECT_TRUE(tier.ok()) << tier.status().ToString();
  return *std::move(tier);
}

Status WriteOne(RedisTier& tier, const StoredChunk& chunk, int64_t ns = kLongNs,
                const std::string& salt = "") {
  const TierWrite item{.id = IdOf(chunk, salt), .chunk = &chunk};
  const std::vector<Status> statuses = tier.Write(std::span(&item, 1), In(ns));
  EXPECT_EQ(statuses.size(), 1U);
  return statuses[0];
}

// Reads the chunk and compares its bytes.
Status ReadOne(RedisTier& tier, const StoredChunk& chunk, int64_t ns = kLongNs) {
  const TierRead read = ReadOf(chunk);
  Collector sink(1);
  tier.Read(std::span(&read, 1), In(ns), sink);
  EXPECT_EQ(sink.items[0].ends, 1);
  EXPECT_TRUE(!sink.items[0].status.ok() || SameBytes(chunk, sink.items[0].buffer));
  return sink.items[0].status;
}

std::vector<ChunkEvent::Kind> EventsOf(RedisTier& tier) {
  std::vector<ChunkEvent> events;
  tier.TakeEvents(&events);
  std::vector<ChunkEvent::Kind> kinds;
  for (const ChunkEvent& event : events) kinds.push_back(event.kind);
  return kinds;
}

std::string HeaderName(const StoredChunk& chunk) { return RedisHeaderName("", chunk.header().key); }
std::string PieceName(const StoredChunk& chunk, int64_t piece) {
  return RedisPieceName("", chunk.header().key, piece);
}

// ---- One server

TEST(RedisTier, WritesAndReadsBack) {
  QUIRE_NEEDS_REDIS();
  RedisServer server;
  for (const std::string& endpoint :
       {server.tcp(), server.unix_socket(), "localhost:" + std::to_string(server.port())}) {
    const auto tier = Open(endpoint);
    const auto small = MakeChunk(1), large = MakeChunk(1000, kThreePieces);
    EXPECT_EQ(ReadOne(*tier, *small).code(), StatusCode::kNotFound);
    EXPECT_EQ(tier->Knows(IdOf(*small)), -1);
    for (const auto& chunk : {small, large}) {
      EXPECT_TRUE(WriteOne(*tier, *chunk).ok());
      EXPECT_TRUE(ReadOne(*tier, *chunk).ok());
      EXPECT_EQ(tier->Knows(IdOf(*chunk)), 1);
      EXPECT_TRUE(tier->Pin(IdOf(*chunk), 1));
    }
    EXPECT_EQ(server.Command({"DBSIZE"}), "6");  // two headers, and 1 and 3 pieces
    EXPECT_TRUE(WriteOne(*tier, *small).ok());
    EXPECT_EQ(tier->Usage().deduplicated, 1);
    EXPECT_EQ(EventsOf(*tier), (std::vector{ChunkEvent::Kind::kStored, ChunkEvent::Kind::kStored}));
    EXPECT_EQ(server.Command({"FLUSHALL"}), "OK");
  }
}

// A reader hears that its chunk is there before the read has ended, and may remove it at once.
TEST(RedisTier, WhatIsRemovedWhileAReadEndsIsNotRemembered) {
  QUIRE_NEEDS_REDIS();
  RedisServer server;
  const auto tier = Open(server.tcp());
  const auto chunk = MakeChunk(1), other = MakeChunk(2);
  for (const auto& one : {chunk, other}) ASSERT_TRUE(WriteOne(*tier, *one).ok());
  const std::vector<TierRead> reads = {ReadOf(*chunk), ReadOf(*other)};
  Collector sink(2);
  sink.on_end = [&](size_t i) {
    if (i != 0) return;
    EXPECT_EQ(*tier->Remove(IdOf(*chunk), In(kLongNs)), true);
  };
  tier->Read(reads, In(kLongNs), sink);
  for (const auto& item : sink.items) EXPECT_TRUE(item.status.ok()) << item.status.ToString();
  EXPECT_EQ(tier->Knows(IdOf(*chunk)), -1);
  EXPECT_EQ(tier->Knows(IdOf(*other)), 1);  // since it was written
}

// Example 28: what was put through one tier is found by another process' tier.
TEST(RedisTier, PrefixIsFoundByAnotherTier) {
  QUIRE_NEEDS_REDIS();
  RedisServer server;
  const auto writer = Open(server.tcp());
  std::vector<std::shared_ptr<const StoredChunk>> chunks;
  std::vector<ChunkId> ids;
  std::vector<TierWrite> writes;
  for (int32_t i = 0; i < 8; ++i) {
    chunks.push_back(MakeChunk(i * 100));
    ids.push_back(IdOf(*chunks.back()));
    if (i < 5) writes.push_back({.id = ids.back(), .chunk = chunks.back().get()});
  }
  for (const Status& status : writer->Write(writes, In(kLongNs))) EXPECT_TRUE(status.ok());
  const auto reader = Open(server.unix_socket());
  EXPECT_EQ(*reader->Prefix(ids, In(kLongNs)), 5);
  EXPECT_EQ(*reader->Prefix(std::span(ids).subspan(5), In(kLongNs)), 0);
  EXPECT_EQ(*reader->Prefix({}, In(kLongNs)), 0);
  // Evicted from the middle: only what is in front of it is a prefix.
  server.Command({"DEL", HeaderName(*chunks[2])});
  EXPECT_EQ(*reader->Prefix(ids, In(kLongNs)), 2);
}

TEST(RedisTier, LayersOfAllItemsComeInOrder) {
  QUIRE_NEEDS_REDIS();
  RedisServer server;
  const auto tier = Open(server.tcp());
  std::vector<std::shared_ptr<const StoredChunk>> chunks;
  std::vector<TierRead> reads;
  for (int32_t i = 0; i < 5; ++i) {
    // Several layers in one piece, and one layer in two.
    chunks.push_back(MakeChunk(i * 100, {.layers = 9, .head_dim = i % 2 == 0 ? 4096 : 20000}));
    EXPECT_TRUE(WriteOne(*tier, *chunks.back()).ok());
    reads.push_back(ReadOf(*chunks.back()));
  }
  Collector sink(reads.size());
  tier->Read(reads, In(kLongNs), sink);
  EXPECT_TRUE(std::ranges::is_sorted(sink.layers));
  EXPECT_EQ(sink.layers.size(), 5U * 9 * 2);
  for (size_t i = 0; i < reads.size(); ++i) {
    EXPECT_TRUE(sink.items[i].status.ok()) << sink.items[i].status.ToString();
    EXPECT_EQ(sink.items[i].ends, 1);
    EXPECT_TRUE(SameBytes(*chunks[i], sink.items[i].buffer));
  }
}

// Example 31.
TEST(RedisTier, AMissingPieceIsAMissAndTheHeaderGoes) {
  QUIRE_NEEDS_REDIS();
  RedisServer server;
  const auto tier = Open(server.tcp());
  const auto chunk = MakeChunk(1, kThreePieces), neighbour = MakeChunk(2, kThreePieces);
  for (int64_t piece = 0; piece < 3; ++piece) {
    ASSERT_TRUE(WriteOne(*tier, *chunk).ok());
    ASSERT_TRUE(WriteOne(*tier, *neighbour).ok());
    EXPECT_EQ(server.Command({"DEL", PieceName(*chunk, piece)}), "1");
    const std::vector<TierRead> reads = {ReadOf(*chunk), ReadOf(*neighbour)};
    Collector sink(2);
    tier->Read(reads, In(kLongNs), sink);
    EXPECT_EQ(sink.items[0].status.code(), StatusCode::kNotFound);
    EXPECT_TRUE(sink.items[1].status.ok()) << sink.items[1].status.ToString();
    EXPECT_EQ(server.Command({"EXISTS", HeaderName(*chunk)}), "0");
    EXPECT_EQ(tier->Knows(IdOf(*chunk)), -1);
    EXPECT_EQ(tier->Usage().evicted, piece + 1);
  }
  EXPECT_EQ(server.Command({"DBSIZE"}), "4");
}

TEST(RedisTier, DamageAnywhereIsAMissAndIsRemoved) {
  QUIRE_NEEDS_REDIS();
  RedisServer server;
  const auto tier = Open(server.tcp());
  const auto chunk = MakeChunk(1), neighbour = MakeChunk(2);
  ASSERT_TRUE(WriteOne(*tier, *neighbour).ok());
  ASSERT_TRUE(WriteOne(*tier, *chunk).ok());
  const auto header_bytes =
      static_cast<size_t>(std::stoi(server.Command({"STRLEN", HeaderName(*chunk)})));
  int64_t corrupt = 0;
  const auto damage = [&](const std::string& name, size_t at, char mask) {
    ASSERT_TRUE(WriteOne(*tier, *chunk).ok());
    std::string value = server.Command({"GET", name});
    value[at] = static_cast<char>(value[at] ^ mask);
    server.Command({"SET", name, value});
    const Status status = ReadOne(*tier, *chunk);
    if (status.code() == StatusCode::kCorrupt) ++corrupt;
    EXPECT_FALSE(status.ok()) << name << " byte " << at;
    EXPECT_TRUE(ReadOne(*tier, *neighbour).ok());
    server.Command({"DEL", HeaderName(*chunk)});
  };
  for (size_t at = 0; at < header_bytes; at += 3) damage(HeaderName(*chunk), at, 1);
  const Section& section = chunk->header().sections[3];
  const size_t payload_at = static_cast<size_t>(section.offset - chunk->header().header_bytes);
  for (size_t at = 0; at < static_cast<size_t>(section.length); at += 97)
    damage(PieceName(*chunk, 0), payload_at + at, static_cast<char>(0x80));
  EXPECT_EQ(tier->Usage().corrupt, corrupt);
  EXPECT_GT(corrupt, 100);
  // The same bytes are taken again.
  EXPECT_TRUE(WriteOne(*tier, *chunk).ok());
  EXPECT_TRUE(ReadOne(*tier, *chunk).ok());
}

TEST(RedisTier, PiecesOfOtherLengthOrTypeAreMisses) {
  QUIRE_NEEDS_REDIS();
  RedisServer server;
  const auto tier = Open(server.tcp());
  const auto chunk = MakeChunk(1);
  const std::string name = PieceName(*chunk, 0);
  for (const std::vector<std::string>& command : {std::vector<std::string>{"APPEND", name, "x"},
                                                  {"SETRANGE", name, "9000000", "x"},
                                                  {"SET", name, ""},
                                                  {"SET", name, std::string(100000, 'y')}}) {
    ASSERT_TRUE(WriteOne(*tier, *chunk).ok());
    server.Command(command);
    EXPECT_FALSE(ReadOne(*tier, *chunk).ok()) << command[0];
    server.Command({"FLUSHALL"});
  }
  for (const std::string& key : {name, HeaderName(*chunk)}) {
    ASSERT_TRUE(WriteOne(*tier, *chunk).ok());
    server.Command({"DEL", key});
    server.Command({"RPUSH", key, "a list"});
    EXPECT_EQ(ReadOne(*tier, *chunk).code(), StatusCode::kCorrupt);
    EXPECT_EQ(server.Command({"EXISTS", key}), "0");
    server.Command({"FLUSHALL"});
  }
}

TEST(RedisTier, LeftOverPiecesGiveWayToThoseOfAWriter) {
  QUIRE_NEEDS_REDIS();
  RedisServer server;
  const auto tier = Open(server.tcp());
  const auto chunk = MakeChunk(1, kThreePieces);
  server.Command({"SET", PieceName(*chunk, 1), "of another time"});
  EXPECT_TRUE(WriteOne(*tier, *chunk).ok());
  EXPECT_TRUE(ReadOne(*tier, *chunk).ok());
}

TEST(RedisTier, OtherSaltPassportOrTokensAreMisses) {
  QUIRE_NEEDS_REDIS();
  RedisServer server;
  const auto tier = Open(server.tcp());
  const auto chunk = MakeChunk(1);
  ASSERT_TRUE(WriteOne(*tier, *chunk).ok());
  TierRead other_salt = ReadOf(*chunk), other_passport = other_salt, other_tokens = other_salt;
  other_salt.id.root = Space("tenant").root();
  other_passport.expected.fingerprint = FingerprintOf("another passport");
  const std::vector<int32_t> tokens(16, 7);
  other_tokens.expected.tokens = std::span<const int32_t>(tokens);
  const std::vector<TierRead> reads = {other_salt, other_passport, other_tokens, ReadOf(*chunk)};
  Collector sink(reads.size());
  tier->Read(reads, In(kLongNs), sink);
  for (size_t i = 0; i < 3; ++i)
    EXPECT_EQ(sink.items[i].status.code(), StatusCode::kIncompatible) << i;
  EXPECT_TRUE(sink.items[3].status.ok());
  EXPECT_EQ(tier->Usage().corrupt, 0);
  EXPECT_TRUE(ReadOne(*tier, *chunk).ok());  // still there
}

TEST(RedisTier, SignedChunksComeWholeAndForgedOnesNotAtAll) {
  QUIRE_NEEDS_REDIS();
  RedisServer server;
  const auto tier = Open(server.tcp(), {}, "key");
  Shape shape = kThreePieces;
  shape.mac_key = "key";
  const auto chunk = MakeChunk(1, shape);
  ASSERT_TRUE(WriteOne(*tier, *chunk).ok());
  TierRead read = ReadOf(*chunk);
  read.expected.mac_key = "key";
  Collector sink(1);
  sink.on_section = [&](size_t, int64_t) {
    EXPECT_TRUE(SameBytes(*chunk, sink.items[0].buffer)) << "a section before all had come";
  };
  tier->Read(std::span(&read, 1), In(kLongNs), sink);
  EXPECT_TRUE(sink.items[0].status.ok()) << sink.items[0].status.ToString();
  EXPECT_EQ(sink.items[0].sections.size(), 6U);
  EXPECT_TRUE(tier->Get(chunk->header().key, In(kLongNs)).ok());
  // Somebody with another key wrote it: sound checksums, wrong MAC.
  shape.mac_key = "forged";
  const auto forged = MakeChunk(2, shape);
  ASSERT_TRUE(WriteOne(*tier, *forged).ok());
  read = ReadOf(*forged);
  read.expected.mac_key = "key";
  Collector other(1);
  tier->Read(std::span(&read, 1), In(kLongNs), other);
  EXPECT_FALSE(other.items[0].status.ok());
  EXPECT_TRUE(other.items[0].sections.empty());
}

TEST(RedisTier, ExpiresWithTheChunkAndWithTheTimeToLive) {
  QUIRE_NEEDS_REDIS();
  RedisServer server;
  const int64_t now_ms = MachineTime()->WallMs();
  const auto forever = Open(server.tcp()), hour = Open(server.tcp(), {.ttl_ms = 3'600'000});
  const auto plain = MakeChunk(1), plain_hour = MakeChunk(2),
             minute = MakeChunk(3, {.expires_ms = now_ms + 60'000}),
             day = MakeChunk(4, {.expires_ms = now_ms + 86'400'000}),
             past = MakeChunk(5, {.expires_ms = now_ms - 1});
  const auto ttl = [&](const std::string& name) {
    return std::stoll(server.Command({"PTTL", name}));
  };
  ASSERT_TRUE(WriteOne(*forever, *plain).ok());
  EXPECT_EQ(ttl(HeaderName(*plain)), -1);
  for (const auto& chunk : {plain_hour, minute, day}) ASSERT_TRUE(WriteOne(*hour, *chunk).ok());
  for (const auto& name : {HeaderName(*minute), PieceName(*minute, 0)}) {
    EXPECT_GT(ttl(name), 0);
    EXPECT_LE(ttl(name), 60'000);
  }
  EXPECT_GT(ttl(PieceName(*plain_hour, 0)), 60'000);
  EXPECT_LE(ttl(HeaderName(*day)), 3'600'000);
  EXPECT_EQ(WriteOne(*hour, *past).code(), StatusCode::kNotFound);
  EXPECT_EQ(server.Command({"EXISTS", HeaderName(*past)}), "0");

  EXPECT_TRUE(forever->SetExpiry(IdOf(*plain), now_ms + 1000'000, In(kLongNs)).ok());
  EXPECT_GT(ttl(HeaderName(*plain)), 0);
  EXPECT_GT(ttl(PieceName(*plain, 0)), 0);
  EXPECT_TRUE(forever->SetExpiry(IdOf(*plain), 0, In(kLongNs)).ok());
  EXPECT_EQ(ttl(PieceName(*plain, 0)), -1);
  EXPECT_TRUE(forever->SetExpiry(IdOf(*plain), 1, In(kLongNs)).ok());
  EXPECT_EQ(ReadOne(*forever, *plain).code(), StatusCode::kNotFound);
  EXPECT_EQ(forever->SetExpiry(IdOf(*plain), 0, In(kLongNs)).code(), StatusCode::kNotFound);
}

TEST(RedisTier, ListsClearsRemovesAndCollects) {
  QUIRE_NEEDS_REDIS();
  RedisServer server;
  const auto tier = Open(server.tcp(), {.key_prefix = "q*?[a]:"});
  const auto foreign = Open(server.tcp(), {.key_prefix = "qxyz:"});
  ASSERT_TRUE(WriteOne(*foreign, *MakeChunk(77)).ok());
  server.Command({"SET", "q*?[a]:{nothing of ours}:h", "x"});
  std::vector<std::shared_ptr<const StoredChunk>> chunks;
  for (int32_t i = 0; i < 30; ++i) {
    const std::string salt = i % 3 == 0 ? "tenant" : "";
    chunks.push_back(MakeChunk(i, {}, salt));
    ASSERT_TRUE(WriteOne(*tier, *chunks.back(), kLongNs, salt).ok());
  }
  std::vector<ChunkListing> listings = *tier->List(In(kLongNs));
  ASSERT_EQ(listings.size(), 30U);
  EXPECT_EQ(listings[0].tier, TierKind::kRedis);
  EXPECT_EQ(listings[0].tokens, 16);
  EXPECT_EQ(listings[0].bytes, std::ssize(chunks[0]->bytes()));
  EXPECT_EQ(*tier->Clear(Space("tenant").fingerprint(), Space("tenant").root(), In(kLongNs)), 10);
  EXPECT_EQ(tier->List(In(kLongNs))->size(), 20U);
  EXPECT_TRUE(*tier->Remove(IdOf(*chunks[1]), In(kLongNs)));
  EXPECT_FALSE(*tier->Remove(IdOf(*chunks[1]), In(kLongNs)));
  EXPECT_EQ(tier->Get(chunks[1]->header().key, In(kLongNs)).status().code(), StatusCode::kNotFound);
  const auto got = tier->Get(chunks[2]->header().key, In(kLongNs));
  ASSERT_TRUE(got.ok()) << got.status().ToString();
  EXPECT_TRUE(std::ranges::equal((*got)->bytes(), chunks[2]->bytes()));

  const std::string prefix = "q*?[a]:";
  EXPECT_EQ(*tier->CollectGarbage(In(kLongNs)), 0);
  const ChunkKey& orphan = chunks[4]->header().key;
  server.Command({"DEL", RedisHeaderName(prefix, orphan)});
  server.Command({"SET", RedisPieceName(prefix, chunks[5]->header().key, 9), "1234567"});
  EXPECT_EQ(*tier->CollectGarbage(In(kLongNs)),
            std::ssize(chunks[4]->bytes()) - chunks[4]->header().header_bytes + 7);
  EXPECT_EQ(server.Command({"EXISTS", RedisPieceName(prefix, orphan, 0)}), "0");

  EXPECT_EQ(*tier->Verify(In(kLongNs)), 0);
  const std::string victim = RedisPieceName(prefix, chunks[7]->header().key, 0);
  server.Command({"SETRANGE", victim, "100", "damage"});
  server.Command({"DEL", RedisPieceName(prefix, chunks[8]->header().key, 0)});
  EXPECT_EQ(*tier->Verify(In(kLongNs)), 2);
  EXPECT_EQ(*tier->Verify(In(kLongNs)), 0);
  EXPECT_EQ(tier->List(In(kLongNs))->size(), 16U);
  EXPECT_EQ(foreign->List(In(kLongNs))->size(), 1U);
}

TEST(RedisTier, AFullServerTakesNothingAndServesWhatItHas) {
  QUIRE_NEEDS_REDIS();
  RedisServer server({"--maxmemory", "8mb", "--maxmemory-policy", "noeviction"});
  const auto tier = Open(server.tcp());
  std::vector<std::shared_ptr<const StoredChunk>> stored;
  Status status;
  for (int32_t i = 0; status.ok() && i < 20; ++i) {
    const auto chunk = MakeChunk(i, kThreePieces);
    status = WriteOne(*tier, *chunk);
    if (status.ok()) stored.push_back(chunk);
  }
  EXPECT_EQ(status.code(), StatusCode::kFull) << status.ToString();
  EXPECT_GE(stored.size(), 1U);
  for (const auto& chunk : stored) EXPECT_TRUE(ReadOne(*tier, *chunk).ok());
  // Nothing was left behind by what did not fit.
  EXPECT_EQ(*tier->CollectGarbage(In(kLongNs)), 0);
  EXPECT_TRUE(tier->Usage().available);
}

TEST(RedisTier, WhatTheServerEvictsIsAMissAndNeverWrong) {
  QUIRE_NEEDS_REDIS();
  RedisServer server({"--maxmemory", "12mb", "--maxmemory-policy", "allkeys-random"});
  const auto tier = Open(server.tcp());
  int hits = 0, misses = 0;
  for (int32_t i = 0; i < 24; ++i) {
    const auto chunk = MakeChunk(i, kThreePieces);
    const Status written = WriteOne(*tier, *chunk);
    EXPECT_TRUE(written.ok() || written.code() == StatusCode::kFull) << written.ToString();
    for (int32_t j = 0; j <= i; ++j) {
      const Status status = ReadOne(*tier, *MakeChunk(j, kThreePieces));
      EXPECT_TRUE(status.ok() || status.code() == StatusCode::kNotFound) << status.ToString();
      (status.ok() ? hits : misses) += 1;
    }
  }
  EXPECT_GT(hits, 0);
  EXPECT_GT(misses, 0);
}

TEST(RedisTier, PasswordsWorkAndStandInNoMessage) {
  QUIRE_NEEDS_REDIS();
  RedisServer server({"--requirepass", "sesame-open"});
  const auto chunk = MakeChunk(1);
  const auto right = Open(server.tcp(), {.password = "sesame-open"});
  EXPECT_TRUE(WriteOne(*right, *chunk).ok());
  EXPECT_TRUE(ReadOne(*right, *chunk).ok());
  EXPECT_TRUE(
      ReadOne(*Open(server.tcp(), {.username = "default", .password = "sesame-open"}), *chunk)
          .ok());
  const auto wrong = Open(server.tcp(), {.password = "sesame-shut"});
  const auto none = Open(server.tcp());
  for (const auto& tier : {wrong.get(), none.get()}) {
    const Status status = ReadOne(*tier, *chunk);
    EXPECT_EQ(status.code(), StatusCode::kUnavailable) << status.ToString();
    EXPECT_EQ(status.ToString().find("sesame"), std::string::npos) << status.ToString();
  }
  // A server that quotes what it was sent.
  FakeRedis parrot([](const std::vector<std::string>& command) {
    return "-ERR unknown command '" + command[0] + "', with args beginning with: '" +
           command.back() + "'\r\n";
  });
  const Status status = ReadOne(*Open(parrot.tcp(), {.password = "sesame-open"}), *chunk);
  EXPECT_FALSE(status.ok());
  EXPECT_EQ(status.ToString().find("sesame"), std::string::npos) << status.ToString();
}

TEST(RedisTier, WaitsForReplicas) {
  QUIRE_NEEDS_REDIS();
  RedisServer server({"--repl-diskless-sync-delay", "0"});
  RedisServer replica({"--replicaof", "127.0.0.1 " + std::to_string(server.port())});
  replica.AwaitLog("Finished with success");
  const auto tier = Open(server.tcp(), {.replicas = 1});
  const auto chunk = MakeChunk(1);
  EXPECT_TRUE(WriteOne(*tier, *chunk).ok());
  EXPECT_EQ(replica.Command({"EXISTS", HeaderName(*chunk)}), "1");
  const auto more = Open(server.tcp(), {.replicas = 2});
  EXPECT_EQ(WriteOne(*more, *MakeChunk(2), 200 * kMs).code(), StatusCode::kTimeout);
}

// ---- Outages

// Example 30.
TEST(RedisTier, ADeadServerCostsNothingOnceItIsKnown) {
  QUIRE_NEEDS_REDIS();
  RedisServer server;
  const auto clock = std::make_shared<FakeClock>();
  const auto tier = Open(server.tcp(), {}, "", clock);
  const auto chunk = MakeChunk(1);
  const int64_t deadline_ns = clock->SteadyNs() + kLongNs;
  const TierWrite item{.id = IdOf(*chunk), .chunk = chunk.get()};
  ASSERT_TRUE(tier->Write(std::span(&item, 1), deadline_ns)[0].ok());
  server.Kill();
  int dropped = 0;
  for (int i = 0; i < 1000; ++i) {
    const Status status = tier->Write(std::span(&item, 1), deadline_ns)[0];
    dropped += status.code() == StatusCode::kUnavailable ? 1 : 0;
  }
  EXPECT_EQ(dropped, 1000);
  EXPECT_FALSE(tier->Usage().available);
  const ChunkId id = IdOf(*chunk);
  EXPECT_EQ(tier->Prefix(std::span(&id, 1), deadline_ns).status().code(), StatusCode::kUnavailable);
  server.Start();
  // It is back, and nobody asks it before the back-off is over.
  EXPECT_EQ(tier->Prefix(std::span(&id, 1), deadline_ns).status().code(), StatusCode::kUnavailable);
  clock->Advance(10'000 * kMs - 1);
  EXPECT_TRUE(tier->Usage().available);
  EXPECT_EQ(*tier->Prefix(std::span(&id, 1), clock->SteadyNs() + kLongNs), 0);
  EXPECT_TRUE(tier->Write(std::span(&item, 1), clock->SteadyNs() + kLongNs)[0].ok());
  EXPECT_EQ(*tier->Prefix(std::span(&id, 1), clock->SteadyNs() + kLongNs), 1);
}

TEST(RedisTier, AServerThatWasStartedAgainIsUsedAtOnce) {
  QUIRE_NEEDS_REDIS();
  RedisServer server;
  const auto tier = Open(server.tcp());
  const auto chunk = MakeChunk(1);
  ASSERT_TRUE(WriteOne(*tier, *chunk).ok());
  server.Kill();
  server.Start();
  // The spare connection is dead, the server is not.
  EXPECT_EQ(ReadOne(*tier, *chunk).code(), StatusCode::kNotFound);
  EXPECT_TRUE(WriteOne(*tier, *chunk).ok());
  EXPECT_TRUE(ReadOne(*tier, *chunk).ok());
}

TEST(RedisTier, AServerThatHangsCostsTheDeadlineAndThenNothing) {
  QUIRE_NEEDS_REDIS();
  RedisServer server;
  const auto tier = Open(server.tcp());
  const auto chunk = MakeChunk(1, kThreePieces);
  ASSERT_TRUE(WriteOne(*tier, *chunk).ok());
  server.Signal(SIGSTOP);
  const int64_t begin_ns = MachineTime()->SteadyNs();
  EXPECT_EQ(ReadOne(*tier, *chunk, 50 * kMs).code(), StatusCode::kTimeout);
  EXPECT_GE(MachineTime()->SteadyNs() - begin_ns, 50 * kMs);
  EXPECT_FALSE(WriteOne(*tier, *MakeChunk(2, kThreePieces), 50 * kMs).ok());
  EXPECT_FALSE(ReadOne(*tier, *chunk, 50 * kMs).ok());
  EXPECT_EQ(ReadOne(*tier, *chunk).code(), StatusCode::kUnavailable);
  EXPECT_FALSE(tier->Usage().available);
  server.Signal(SIGCONT);
  Status status = ReadOne(*tier, *chunk);
  while (status.code() == StatusCode::kUnavailable) status = ReadOne(*tier, *chunk);
  EXPECT_TRUE(status.ok()) << status.ToString();
}

TEST(RedisTier, ADeadlineThatHasPassedAsksNobody) {
  FakeRedis server([](const auto&) { return "+OK\r\n"; });
  const auto tier = Open(server.tcp());
  EXPECT_EQ(ReadOne(*tier, *MakeChunk(1), -1).code(), StatusCode::kTimeout);
  EXPECT_EQ(WriteOne(*tier, *MakeChunk(1), -1).code(), StatusCode::kTimeout);
  EXPECT_EQ(server.command_count(), 0);
}

TEST(RedisTier, CancelledAndRefusedItemsEnd) {
  QUIRE_NEEDS_REDIS();
  RedisServer server;
  const auto tier = Open(server.tcp());
  std::vector<std::shared_ptr<const StoredChunk>> chunks;
  std::vector<TierRead> reads;
  for (int32_t i = 0; i < 4; ++i) {
    chunks.push_back(MakeChunk(i, {.layers = 24, .head_dim = 16384}));
    ASSERT_TRUE(WriteOne(*tier, *chunks.back()).ok());
    reads.push_back(ReadOf(*chunks.back()));
  }
  Collector sink(reads.size());
  sink.on_section = [&](size_t, int64_t) { sink.items[1].cancelled = true; };
  tier->Read(reads, In(kLongNs), sink);
  EXPECT_EQ(sink.items[1].status.code(), StatusCode::kCancelled);
  EXPECT_LT(sink.items[1].sections.size(), 48U);
  for (const size_t i : {0, 2, 3}) EXPECT_TRUE(sink.items[i].status.ok());
  Collector full(reads.size());
  full.refuse_headers = true;
  tier->Read(reads, In(kLongNs), full);
  for (const auto& item : full.items) {
    EXPECT_EQ(item.status.code(), StatusCode::kFull);
    EXPECT_EQ(item.ends, 1);
  }
}

// ---- Servers that lie

// A server without cluster support that answers all else with `answer`.
FakeRedis::Answer Standalone(FakeRedis::Answer answer) {
  return [answer = std::move(answer)](const std::vector<std::string>& command) {
    if (command[0] == "CLUSTER")
      return std::string("-ERR This instance has cluster support disabled\r\n");
    return answer(command);
  };
}

TEST(RedisTier, GarbageIsAnOutageAndNeverData) {
  const auto chunk = MakeChunk(1);
  for (const std::string& garbage :
       {std::string("HTTP/1.1 400 Bad Request\r\n\r\n"), std::string("$-7\r\n"),
        std::string("*99999999999999\r\n"), std::string("$99999999999999999999\r\n"),
        std::string("$5\r\nabcdefg\r\n"), std::string(100000, 'x'), std::string("$536870912\r\n"),
        std::string("*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n:1\r\n"),
        std::string("\r\n"), std::string("+\n"), std::string("+1\r\n+1\r\n+1\r\n"),
        FakeRedis::kHangUp}) {
    FakeRedis server(Standalone([&](const auto&) { return garbage; }));
    const auto tier = Open(server.tcp());
    const Status read = ReadOne(*tier, *chunk);
    EXPECT_TRUE(read.code() == StatusCode::kUnavailable || read.code() == StatusCode::kCorrupt)
        << garbage.substr(0, 20) << ": " << read.ToString();
    EXPECT_FALSE(WriteOne(*tier, *chunk).ok());
  }
}

// The values of a chunk, as a writer made them.
std::map<std::string, std::string> ValuesOf(const StoredChunk& chunk) {
  std::map<std::string, std::string> values;
  const std::vector<int64_t> pieces = CutRedisPieces(chunk.header());
  auto at = static_cast<size_t>(chunk.header().header_bytes);
  const std::string_view bytes(reinterpret_cast<const char*>(chunk.bytes().data()),
                               chunk.bytes().size());
  values[HeaderName(chunk)] = EncodeRedisHeader(Space().root(), pieces, chunk.bytes().first(at));
  for (size_t i = 0; i < pieces.size(); ++i) {
    values[PieceName(chunk, static_cast<int64_t>(i))] =
        bytes.substr(at, static_cast<size_t>(pieces[i]));
    at += static_cast<size_t>(pieces[i]);
  }
  return values;
}

TEST(RedisTier, RepliesThatEndEarlyAreMisses) {
  const auto chunk = MakeChunk(1, kThreePieces);
  const auto values = ValuesOf(*chunk);
  for (const double share : {0.0, 0.3, 0.99}) {
    FakeRedis* self = nullptr;
    std::atomic<bool> cut = false;
    FakeRedis server(Standalone([&](const std::vector<std::string>& command) {
      if (cut) return FakeRedis::kHangUp;
      const std::string reply = RespBulk(values.at(command[1]));
      if (command[1] != PieceName(*chunk, 1)) return reply;
      cut = true;
      return reply.substr(0, static_cast<size_t>(static_cast<double>(reply.size()) * share));
    }));
    self = &server;
    const auto tier = Open(self->tcp());
    EXPECT_EQ(ReadOne(*tier, *chunk, 2000 * kMs).code(), StatusCode::kUnavailable) << share;
  }
}

TEST(RedisTier, AnswersTheRightValuesOfAFakeServer) {
  const auto chunk = MakeChunk(1, kThreePieces);
  const auto values = ValuesOf(*chunk);
  FakeRedis server(Standalone(
      [&](const std::vector<std::string>& command) { return RespBulk(values.at(command[1])); }));
  EXPECT_TRUE(ReadOne(*Open(server.tcp()), *chunk).ok());
}

// "CLUSTER SLOTS" of one server that has all.
std::string SlotsAt(int port) {
  return RespArray(
      {RespArray({":0\r\n", ":16383\r\n",
                  RespArray({RespBulk("127.0.0.1"), ":" + std::to_string(port) + "\r\n",
                             RespBulk("an id")})})});
}

// Example 32, and a storm of MOVED.
TEST(RedisTier, MovedIsFollowedOnceAndAStormIsCutShort) {
  const auto chunk = MakeChunk(1, kThreePieces);
  const auto values = ValuesOf(*chunk);
  std::atomic<int> right_port = 0, map_port = 0;
  std::atomic<int64_t> asked_wrong = 0;
  const auto moved = [&] {
    ++asked_wrong;
    return "-MOVED " + std::to_string(RedisSlotOf(HeaderName(*chunk))) +
           " 127.0.0.1:" + std::to_string(right_port) + "\r\n";
  };
  FakeRedis wrong([&](const std::vector<std::string>& command) {
    return command[0] == "CLUSTER" ? SlotsAt(map_port) : moved();
  });
  FakeRedis right([&](const std::vector<std::string>& command) {
    if (command[0] == "CLUSTER") return SlotsAt(right_port);
    return RespBulk(values.at(command[1]));
  });
  right_port = right.port();
  map_port = wrong.port();
  const auto tier = Open(wrong.tcp() + "," + right.tcp());
  EXPECT_TRUE(ReadOne(*tier, *chunk).ok());
  EXPECT_EQ(asked_wrong, 1);  // the map was corrected by it
  map_port = right.port();
  EXPECT_TRUE(ReadOne(*tier, *chunk).ok());
  EXPECT_EQ(asked_wrong, 1);

  // All say it is elsewhere, for ever.
  FakeRedis* other = nullptr;
  std::atomic<int64_t> commands = 0;
  FakeRedis first([&](const std::vector<std::string>& command) {
    ++commands;
    if (command[0] == "CLUSTER") return SlotsAt(first.port());
    return "-MOVED 1 127.0.0.1:" + std::to_string(other->port()) + "\r\n";
  });
  FakeRedis second([&](const std::vector<std::string>& command) {
    ++commands;
    if (command[0] == "CLUSTER") return SlotsAt(second.port());
    return "-MOVED 1 127.0.0.1:" + std::to_string(first.port()) + "\r\n";
  });
  other = &second;
  const auto lost = Open(first.tcp() + "," + second.tcp());
  EXPECT_EQ(ReadOne(*lost, *chunk).code(), StatusCode::kUnavailable);
  EXPECT_LE(commands, 4);
}

TEST(RedisTier, NobodyIsFollowedToServersThatNoMapNames) {
  std::atomic<int64_t> stranger_asked = 0;
  FakeRedis stranger([&](const auto&) {
    ++stranger_asked;
    return std::string("+OK\r\n");
  });
  for (const std::string verb : {"MOVED", "ASK"}) {
    FakeRedis liar([&](const std::vector<std::string>& command) {
      if (command[0] == "CLUSTER") return SlotsAt(liar.port());
      if (command[0] == "AUTH") return std::string("+OK\r\n");
      return "-" + verb + " 1 127.0.0.1:" + std::to_string(stranger.port()) + "\r\n";
    });
    const auto tier = Open(liar.tcp(), {.password = "sesame-open"});
    EXPECT_FALSE(ReadOne(*tier, *MakeChunk(1)).ok());
  }
  EXPECT_EQ(stranger_asked, 0);
}

TEST(RedisTier, AskIsSentOnceBehindAsking) {
  const auto chunk = MakeChunk(1, kThreePieces);
  const auto values = ValuesOf(*chunk);
  std::mutex mutex;
  std::vector<std::string> log;
  std::atomic<int> target_port = 0, source_port = 0;
  const auto slots = [&] {
    const auto range = [](int first, int last, int port) {
      return RespArray({":" + std::to_string(first) + "\r\n", ":" + std::to_string(last) + "\r\n",
                        RespArray({RespBulk("127.0.0.1"), ":" + std::to_string(port) + "\r\n"})});
    };
    const int slot = RedisSlotOf(HeaderName(*chunk));
    return RespArray({range(slot, slot, source_port), range(0, slot - 1, target_port)});
  };
  FakeRedis target([&](const std::vector<std::string>& command) {
    const std::lock_guard<std::mutex> guard(mutex);
    log.push_back(command[0]);
    if (command[0] == "CLUSTER") return slots();
    if (command[0] == "ASKING") return std::string("+OK\r\n");
    if (log.size() < 2 || log[log.size() - 2] != "ASKING") return std::string("-MOVED 1 :1\r\n");
    return RespBulk(values.at(command[1]));
  });
  FakeRedis source([&](const std::vector<std::string>& command) {
    if (command[0] == "CLUSTER") return slots();
    return "-ASK 1 127.0.0.1:" + std::to_string(target_port) + "\r\n";
  });
  target_port = target.port();
  source_port = source.port();
  const auto tier = Open(source.tcp());
  EXPECT_TRUE(ReadOne(*tier, *chunk).ok());
  EXPECT_EQ(std::ranges::count(log, "ASKING"), 4);  // for the header and three pieces
}

TEST(RedisTier, ErrorsOfTheServerAreMissesAndDrops) {
  const auto chunk = MakeChunk(1);
  for (const std::string error :
       {"LOADING Redis is loading the dataset in memory", "CLUSTERDOWN The cluster is down",
        "TRYAGAIN Multiple keys request during rehashing of slot",
        "READONLY You can't write against a read only replica.",
        "MASTERDOWN Link with MASTER is down", "NOAUTH Authentication required.",
        "BUSY Redis is busy running a script.", "ERR anything", ""}) {
    FakeRedis server(Standalone([&](const auto&) { return "-" + error + "\r\n"; }));
    const auto tier = Open(server.tcp());
    EXPECT_FALSE(ReadOne(*tier, *chunk).ok()) << error;
    EXPECT_FALSE(WriteOne(*tier, *chunk).ok()) << error;
    const ChunkId id = IdOf(*chunk);
    EXPECT_FALSE(tier->Prefix(std::span(&id, 1), In(kLongNs)).ok()) << error;
  }
}

TEST(RedisTier, AHostThatNobodyKnowsIsAnOutage) {
  const auto tier = Open("no-such-host.invalid:6379", {.connect_timeout_ms = 100});
  const auto chunk = MakeChunk(1);
  for (int i = 0; i < 4; ++i) {
    const StatusCode code = ReadOne(*tier, *chunk, 300 * kMs).code();
    EXPECT_TRUE(code == StatusCode::kUnavailable || code == StatusCode::kTimeout);
  }
  EXPECT_FALSE(tier->Usage().available);
}

TEST(RedisTier, RefusesOptionsByName) {
  const auto code = [](RedisTierOptions options) {
    return RedisTier::Create(options, "", nullptr).status();
  };
  EXPECT_NE(code({.endpoints = "nonsense"}).message().find("nonsense"), std::string::npos);
  EXPECT_EQ(code({.endpoints = "h:1,"}).code(), StatusCode::kBadArgument);
  EXPECT_EQ(code({.endpoints = "h:0"}).code(), StatusCode::kBadArgument);
  EXPECT_EQ(code({.endpoints = "h:1", .key_prefix = "{a}"}).code(), StatusCode::kBadArgument);
  EXPECT_EQ(code({.endpoints = "h:1", .ttl_ms = -1}).code(), StatusCode::kBadArgument);
  EXPECT_EQ(code({.endpoints = "h:1", .io_timeout_ms = 0}).code(), StatusCode::kBadArgument);
  EXPECT_EQ(code({.endpoints = "h:1", .replicas = -1}).code(), StatusCode::kBadArgument);
  EXPECT_EQ(code({.endpoints = "h:1", .username = "u"}).code(), StatusCode::kBadArgument);
}

TEST(RedisTier, ManyThreadsShareATier) {
  QUIRE_NEEDS_REDIS();
  RedisServer server;
  const auto tier = Open(server.unix_socket());
  std::vector<std::thread> threads;
  for (int32_t t = 0; t < 6; ++t) {
    threads.emplace_back([&, t] {
      for (int32_t i = 0; i < 20; ++i) {
        const auto chunk = MakeChunk((t + i) % 8 * 100, {.layers = 4, .head_dim = 2048});
        EXPECT_TRUE(WriteOne(*tier, *chunk).ok());
        const Status status = ReadOne(*tier, *chunk);
        EXPECT_TRUE(status.ok() || status.code() == StatusCode::kNotFound) << status.ToString();
        if (i % 5 != 0) continue;
        EXPECT_TRUE(tier->Remove(IdOf(*chunk), In(kLongNs)).ok());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(tier->Usage().corrupt, 0);
}

// ---- A cluster

TEST(RedisTierCluster, SpreadsFollowsSlotsAndSurvivesAFailover) {
  QUIRE_NEEDS_REDIS();
  constexpr int32_t kChunks = 12;
  RedisServerCluster cluster;
  const auto tier = Open(cluster.seeds(), {.connect_timeout_ms = 200, .replicas = 1});
  std::vector<std::shared_ptr<const StoredChunk>> chunks;
  std::vector<TierWrite> writes;
  std::vector<TierRead> reads;
  std::vector<ChunkId> ids;
  for (int32_t i = 0; i < kChunks; ++i) {
    chunks.push_back(MakeChunk(i * 100, {.layers = 4, .head_dim = 8192}));
    ids.push_back(IdOf(*chunks.back()));
    writes.push_back({.id = ids.back(), .chunk = chunks.back().get()});
    reads.push_back(ReadOf(*chunks.back()));
  }
  for (const Status& status : tier->Write(writes, In(kLongNs)))
    EXPECT_TRUE(status.ok()) << status.ToString();
  EXPECT_EQ(*tier->Prefix(ids, In(kLongNs)), kChunks);
  const auto expect_all = [&] {
    Collector sink(reads.size());
    tier->Read(reads, In(kLongNs), sink);
    EXPECT_TRUE(std::ranges::is_sorted(sink.layers));
    for (size_t i = 0; i < reads.size(); ++i) {
      EXPECT_TRUE(sink.items[i].status.ok()) << sink.items[i].status.ToString();
      EXPECT_TRUE(SameBytes(*chunks[i], sink.items[i].buffer));
    }
  };
  expect_all();
  EXPECT_EQ(tier->List(In(kLongNs))->size(), size_t{kChunks});
  for (size_t i = 0; i < 3; ++i) EXPECT_NE(cluster.server(i).Command({"DBSIZE"}), "0");

  // A slot moves while we read it: first ASK, then MOVED.
  const int slot = RedisSlotOf(HeaderName(*chunks[0]));
  const size_t from = cluster.MasterOf(slot), to = (from + 1) % 3;
  const std::string from_id = cluster.server(from).Command({"CLUSTER", "MYID"});
  const std::string to_id = cluster.server(to).Command({"CLUSTER", "MYID"});
  const std::string slot_text = std::to_string(slot);
  const auto set_slot = [&](size_t server, const std::vector<std::string>& how) {
    std::vector<std::string> command = {"CLUSTER", "SETSLOT", slot_text};
    command.insert(command.end(), how.begin(), how.end());
    EXPECT_EQ(cluster.server(server).Command(command), "OK");
  };
  set_slot(to, {"IMPORTING", from_id});
  set_slot(from, {"MIGRATING", to_id});
  const auto migrate = [&](const std::string& name) {
    EXPECT_EQ(
        cluster.server(from).Command(
            {"MIGRATE", "127.0.0.1", std::to_string(cluster.server(to).port()), name, "0", "5000"}),
        "OK");
  };
  migrate(HeaderName(*chunks[0]));
  expect_all();
  for (int64_t piece = 0; piece < std::ssize(CutRedisPieces(chunks[0]->header())); ++piece)
    migrate(PieceName(*chunks[0], piece));
  expect_all();
  set_slot(to, {"NODE", to_id});
  set_slot(from, {"NODE", to_id});
  expect_all();
  expect_all();

  // A master dies: its chunks are misses until its replica has taken over, those of the others
  // hits.
  const size_t victim = cluster.MasterOf(RedisSlotOf(HeaderName(*chunks[5])));
  std::vector<bool> is_on_victim;
  for (const auto& chunk : chunks)
    is_on_victim.push_back(cluster.MasterOf(RedisSlotOf(HeaderName(*chunk))) == victim);
  cluster.server(victim).Kill();
  Collector sink(reads.size());
  tier->Read(reads, In(kLongNs), sink);
  for (size_t i = 0; i < reads.size(); ++i) {
    EXPECT_EQ(sink.items[i].ends, 1);
    EXPECT_TRUE(is_on_victim[i] || sink.items[i].status.ok()) << sink.items[i].status.ToString();
  }
  const int64_t until_ns = In(40'000 * kMs);
  Status status(StatusCode::kUnavailable, "not asked yet");
  while (!status.ok() && MachineTime()->SteadyNs() < until_ns)
    status = ReadOne(*tier, *chunks[5], 500 * kMs);
  EXPECT_TRUE(status.ok()) << status.ToString();
  expect_all();
}

}  // namespace
}  // namespace quire
