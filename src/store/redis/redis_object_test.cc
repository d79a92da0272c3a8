#include "store/redis/redis_object.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "base/checksum.h"
#include "chunk/testing/test_chunk.h"

namespace quire {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

// A chunk's header with sections of these sizes, two to a layer.
ChunkHeader HeaderOf(const std::vector<int64_t>& section_bytes) {
  ChunkHeader header;
  header.header_bytes = 4096;
  int64_t at = header.header_bytes;
  for (size_t i = 0; i < section_bytes.size(); ++i) {
    Section section;
    section.layer_first = section.layer_last = static_cast<int64_t>(i / 2);
    section.offset = at;
    section.length = section_bytes[i];
    header.sections.push_back(section);
    at += section_bytes[i];
  }
  header.total_bytes = at;
  return header;
}

TEST(RedisObject, CutsPiecesAtLayers) {
  const auto cut = [](const std::vector<int64_t>& sections) {
    return CutRedisPieces(HeaderOf(sections));
  };
  EXPECT_EQ(cut({}), std::vector<int64_t>{});
  EXPECT_EQ(cut({100, 100}), std::vector<int64_t>{200});
  // Small layers together, up to a megabyte.
  EXPECT_EQ(cut(std::vector<int64_t>(20, kMiB / 8)), (std::vector<int64_t>{kMiB, kMiB, kMiB / 2}));
  EXPECT_EQ(cut(std::vector<int64_t>(6, kMiB)), (std::vector<int64_t>(3, 2 * kMiB)));
  // A layer of more than eight is cut between its sections, and a section of more where it must be.
  EXPECT_EQ(cut({5 * kMiB, 5 * kMiB}), (std::vector<int64_t>(2, 5 * kMiB)));
  EXPECT_EQ(cut({20 * kMiB, 100, 100}),
            (std::vector<int64_t>{8 * kMiB, 8 * kMiB, 4 * kMiB + 100, 100}));
  for (const std::vector<int64_t>& sections :
       {std::vector<int64_t>{1, 9 * kMiB, 3, 64 * kMiB}, std::vector<int64_t>(64, kMiB / 2)}) {
    const std::vector<int64_t> pieces = cut(sections);
    EXPECT_EQ(std::reduce(pieces.begin(), pieces.end()),
              std::reduce(sections.begin(), sections.end()));
    for (const int64_t piece : pieces) EXPECT_LE(piece, kRedisPieceBytesMax);
  }
}

TEST(RedisObject, NamesReadBack) {
  const ChunkKey key = SampleFields().key;
  const std::string hex = key.digest.ToHex();
  EXPECT_EQ(RedisHeaderName("p:", key), "p:{" + hex + "}:h");
  EXPECT_EQ(RedisPieceName("", key, 12), "{" + hex + "}:kv:12");
  const auto header = ParseRedisName("p:", RedisHeaderName("p:", key));
  ASSERT_TRUE(header);
  EXPECT_EQ(header->key, key);
  EXPECT_EQ(header->piece, -1);
  EXPECT_EQ(ParseRedisName("", RedisPieceName("", key, 12))->piece, 12);
  for (const std::string& name :
       {std::string(), "{" + hex + "}", "{" + hex + "}:x",
        "{" + hex + "}:kv:", "{" + hex + "}:kv:-1", "{" + hex + "}:kv:1x", "(" + hex + "}:h",
        "{" + std::string(64, 'g') + "}:h", "p:{" + hex + "}:h"})
    EXPECT_FALSE(ParseRedisName("", name)) << name;
  EXPECT_EQ(RedisScanPattern("a*[b]?\\", ":h"), "a\\*\\[b\\]\\?\\\\{*}:h");
}

std::string SampleValue() {
  const std::vector<std::byte> chunk = SampleChunk();
  const ChunkHeader header = *DecodeChunkHeader(chunk, {});
  return EncodeRedisHeader(ChunkKey{SampleFields().context}, CutRedisPieces(header),
                           std::span(chunk).first(static_cast<size_t>(header.header_bytes)));
}

Result<RedisHeader> Decode(const std::string& value, const ChunkLimits& limits = {}) {
  return DecodeRedisHeader(std::as_bytes(std::span(value)), limits);
}

TEST(RedisObject, HeadersReadBack) {
  const std::string value = SampleValue();
  const auto header = Decode(value);
  ASSERT_TRUE(header.ok()) << header.status().ToString();
  EXPECT_EQ(header->root.digest, SampleFields().context);
  EXPECT_EQ(header->chunk.key, SampleFields().key);
  EXPECT_EQ(header->pieces,
            std::vector<int64_t>{header->chunk.total_bytes - header->chunk.header_bytes});
  EXPECT_LE(std::ssize(value), RedisHeaderBytesMax(ChunkLimits::Of(SamplePassport())));
  EXPECT_TRUE(Decode(value, ChunkLimits::Of(SamplePassport())).ok());
}

// docs/formats/redis.md, byte for byte.
TEST(RedisObject, BytesOfTheFormatPage) {
  const std::string value = SampleValue();
  EXPECT_EQ(value.substr(0, 8), "QKVREDI1");
  EXPECT_EQ(value.substr(8, 4), std::string("\x01\0\0\0", 4));
  std::string envelope = value.substr(0, 68);
  std::fill(envelope.begin() + 12, envelope.begin() + 16, '\0');
  uint32_t crc = 0;
  std::memcpy(&crc, value.data() + 12, 4);
  EXPECT_EQ(crc, Crc32c(envelope.data(), envelope.size()));
  EXPECT_EQ(0, std::memcmp(value.data() + 16, SampleFields().context.bytes.data(), 32));
  EXPECT_EQ(value.substr(48, 16), std::string(16, '\0'));
  EXPECT_EQ(value.substr(68, 8), "QKVCHNK1");
}

TEST(RedisObject, EveryFlippedBitAndEveryCutIsNoticed) {
  const std::string value = SampleValue();
  for (size_t i = 0; i < value.size() * 8; ++i) {
    std::string flipped = value;
    flipped[i / 8] = static_cast<char>(flipped[i / 8] ^ (1 << i % 8));
    EXPECT_FALSE(Decode(flipped).ok()) << "bit " << i;
  }
  for (size_t size = 0; size < value.size(); ++size)
    EXPECT_FALSE(Decode(value.substr(0, size)).ok()) << size;
  EXPECT_FALSE(Decode(value + "x").ok());
}

// Sound checksums, and a table that says something else.
TEST(RedisObject, PiecesThatMakeNoChunkAreRefused) {
  const std::vector<std::byte> chunk = SampleChunk();
  const ChunkHeader header = *DecodeChunkHeader(chunk, {});
  const int64_t payload = header.total_bytes - header.header_bytes;
  const auto decode = [&](const std::vector<int64_t>& pieces) {
    return Decode(EncodeRedisHeader(
                      {}, pieces, std::span(chunk).first(static_cast<size_t>(header.header_bytes))))
        .status()
        .code();
  };
  EXPECT_EQ(decode({payload}), StatusCode::kOk);
  EXPECT_EQ(decode({1, payload - 1}), StatusCode::kOk);
  for (const std::vector<int64_t>& pieces : {std::vector<int64_t>{},
                                             {payload - 1},
                                             {payload + 1},
                                             {payload, 0},
                                             {payload, int64_t{1} << 31},
                                             {kRedisPieceBytesMax + 1}}) {
    EXPECT_EQ(decode(pieces), StatusCode::kCorrupt);
  }
  EXPECT_EQ(decode(std::vector<int64_t>(20'000, 1)), StatusCode::kTooLarge);
}

}  // namespace
}  // namespace quire
