// The Redis tier against a real server: layout, misses, limits of the server, statistics.
#include "store/redis/redis_tier.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "base/random.h"
#include "base/testing/fake_clock.h"
#include "store/testing/test_events.h"
#include "store/testing/test_redis_tier.h"

namespace quire {
namespace {

using namespace redis_test;  // NOLINT(google-build-using-namespace)

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
      EXPECT_TRUE(tier->Pin(IdOf(*chunk).key, 1));
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
    EXPECT_EQ(*tier->Remove(IdOf(*chunk).key, In(kLongNs)), true);
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

  EXPECT_TRUE(forever->SetExpiry(IdOf(*plain).key, now_ms + 1000'000, In(kLongNs)).ok());
  EXPECT_GT(ttl(HeaderName(*plain)), 0);
  EXPECT_GT(ttl(PieceName(*plain, 0)), 0);
  EXPECT_TRUE(forever->SetExpiry(IdOf(*plain).key, 0, In(kLongNs)).ok());
  EXPECT_EQ(ttl(PieceName(*plain, 0)), -1);
  // What its own header lets end stays no longer: nobody would read it, nor remove it.
  for (const int64_t expires_ms : {int64_t{0}, now_ms + 10 * int64_t{86'400'000}}) {
    EXPECT_TRUE(forever->SetExpiry(IdOf(*day).key, expires_ms, In(kLongNs)).ok());
    for (const auto& name : {HeaderName(*day), PieceName(*day, 0)}) {
      EXPECT_GT(ttl(name), 3'600'000);
      EXPECT_LE(ttl(name), 86'400'000);
    }
  }
  EXPECT_TRUE(forever->SetExpiry(IdOf(*plain).key, 1, In(kLongNs)).ok());
  EXPECT_EQ(ReadOne(*forever, *plain).code(), StatusCode::kNotFound);
  EXPECT_EQ(forever->SetExpiry(IdOf(*plain).key, 0, In(kLongNs)).code(), StatusCode::kNotFound);
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
  EXPECT_TRUE(*tier->Remove(IdOf(*chunks[1]).key, In(kLongNs)));
  EXPECT_FALSE(*tier->Remove(IdOf(*chunks[1]).key, In(kLongNs)));
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

// However many chunks were there in the past.
TEST(RedisTier, TheNewestChunksAreRemembered) {
  FakeRedis server([](const std::vector<std::string>& command) -> std::string {
    if (command[0] == "EXISTS") return ":1\r\n";
    return "-ERR This instance has cluster support disabled\r\n";
  });
  const auto clock = std::make_shared<FakeClock>();
  const auto tier = Open(server.tcp(), {}, "", clock);
  std::vector<ChunkId> ids(70'000);
  for (size_t i = 0; i < ids.size(); ++i) {
    RandomSequence random(i);  // as in a digest
    for (uint8_t& byte : ids[i].key.digest.bytes) byte = static_cast<uint8_t>(random.Below(256));
  }
  EXPECT_EQ(*tier->Prefix(ids, kNever), std::ssize(ids));
  const auto known = std::count_if(ids.end() - 20'000, ids.end(),
                                   [&](const ChunkId& id) { return tier->Knows(id) == 1; });
  EXPECT_EQ(known, 20'000);
  clock->Advance(60'000 * kMs);
  EXPECT_EQ(tier->Knows(ids.back()), -1);
}

TEST(RedisTier, WaitsForReplicas) {
  QUIRE_NEEDS_REDIS();
  RedisServer server({"--repl-diskless-sync-delay", "0"});
  RedisServer replica({"--replicaof", "127.0.0.1 " + std::to_string(server.port())});
  replica.AwaitLog("Finished with success");
  // The server counts the replica once it has said that it is there, in a second or two.
  const auto tier = Open(server.tcp(), {.io_timeout_ms = 10'000, .replicas = 1});
  const auto chunk = MakeChunk(1);
  EXPECT_TRUE(WriteOne(*tier, *chunk).ok());
  EXPECT_EQ(replica.Command({"EXISTS", HeaderName(*chunk)}), "1");
  const auto more = Open(server.tcp(), {.replicas = 2});
  EXPECT_EQ(WriteOne(*more, *MakeChunk(2), 200 * kMs).code(), StatusCode::kTimeout);
}

}  // namespace
}  // namespace quire
