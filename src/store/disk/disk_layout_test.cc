#include "store/disk/disk_layout.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <limits>
#include <string>

#include "chunk/testing/test_chunk.h"

namespace quire::disk_layout {
namespace {

Digest DigestOf(uint8_t byte) {
  Digest digest;
  digest.bytes.fill(byte);
  return digest;
}

std::string Repeat(std::string_view text, int count) {
  std::string all;
  for (int i = 0; i < count; ++i) all += text;
  return all;
}

TEST(DiskLayout, PathsOfTheFormatPage) {
  const ChunkId id = {DigestOf(0x1a), ChunkKey{DigestOf(0x2b)}, ChunkKey{DigestOf(0x3c)}};
  EXPECT_EQ(ChunkPath("/kv", id),
            "/kv/" + Repeat("1a", 8) + "/" + Repeat("2b", 8) + "/3c/" + Repeat("3c", 32) + ".qkv");
  EXPECT_EQ(ChunkPath("/kv", ShortRoot(id)), ChunkPath("/kv", id));
  EXPECT_EQ(PassportFolder("/kv", id.fingerprint), "/kv/" + Repeat("1a", 8));
}

TEST(DiskLayout, NamesAreReadAsTheyAreWritten) {
  const ChunkKey key{DigestOf(0x3c)};
  EXPECT_EQ(ParseChunkName(ChunkName(key)), key);
  for (const std::string& name :
       {std::string(), std::string(".qkv"), Repeat("3C", 32) + ".qkv", Repeat("3c", 32),
        Repeat("3c", 31) + ".qkv", Repeat("3c", 33) + ".qkv", Repeat("zz", 32) + ".qkv"})
    EXPECT_FALSE(ParseChunkName(name)) << name;
  EXPECT_EQ(ParseShortDigest(Repeat("2b", 8)), ShortRoot(ChunkKey{DigestOf(0x2b)}).digest);
  EXPECT_FALSE(ParseShortDigest(Repeat("2b", 7)));
  EXPECT_FALSE(ParseShortDigest("quarantine"));
  EXPECT_TRUE(IsLeafName("0f"));
  EXPECT_FALSE(IsLeafName("0F"));
  EXPECT_FALSE(IsLeafName("0f0"));
}

TEST(DiskLayout, AManifestTellsDamageFromAnotherVersion) {
  const std::string json = *SamplePassport().ToJson();
  const Digest fingerprint = FingerprintOf(json);
  const std::string text = EncodeManifest(fingerprint, json);
  EXPECT_EQ(text, "quire-disk 1 " + fingerprint.ToHex() + "\n" + json);
  const auto manifest = ParseManifest(text);
  ASSERT_TRUE(manifest.ok());
  EXPECT_EQ(manifest->fingerprint, fingerprint);
  EXPECT_EQ(manifest->passport_json, json);
  for (size_t i = 0; i < text.size(); ++i) {
    EXPECT_FALSE(ParseManifest(text.substr(0, i)).ok()) << i;
    std::string flipped = text;
    flipped[i] ^= 1;
    EXPECT_FALSE(ParseManifest(flipped).ok()) << i;
  }
  std::string newer = text;
  newer[11] = '2';
  EXPECT_EQ(ParseManifest(newer).status().code(), StatusCode::kIncompatible);
  newer.insert(13, "more ");
  EXPECT_EQ(ParseManifest(newer).status().code(), StatusCode::kIncompatible);
}

TEST(DiskLayout, ADamagedSumIsNone) {
  const auto record = EncodeUsage(int64_t{1} << 40);
  EXPECT_EQ(ParseUsage(record), int64_t{1} << 40);
  EXPECT_EQ(ParseUsage(EncodeUsage(0)), 0);
  EXPECT_FALSE(ParseUsage(EncodeUsage(-1)));
  EXPECT_FALSE(ParseUsage(std::span(record).first(23)));
  for (size_t i = 0; i < 20; ++i) {
    auto flipped = record;
    flipped[i] ^= std::byte{1};
    EXPECT_FALSE(ParseUsage(flipped)) << i;
  }
}

TEST(DiskLayout, ADamagedWorthIsNone) {
  const ChunkWorth worth{.recompute_seconds = 1.25, .priority = 7};
  const auto record = EncodeWorth(worth);
  EXPECT_EQ(ParseWorth(record), worth);
  EXPECT_EQ(ParseWorth(EncodeWorth({})), ChunkWorth{});
  for (const ChunkWorth& bad :
       {ChunkWorth{-1, 50}, ChunkWorth{std::numeric_limits<double>::infinity(), 50},
        ChunkWorth{std::numeric_limits<double>::quiet_NaN(), 50}, ChunkWorth{1, -1},
        ChunkWorth{1, 101}}) {
    EXPECT_FALSE(ParseWorth(EncodeWorth(bad))) << bad.recompute_seconds << " " << bad.priority;
  }
  EXPECT_FALSE(ParseWorth(std::span(record).first(23)));
  for (size_t i = 0; i < record.size(); ++i) {
    auto flipped = record;
    flipped[i] ^= std::byte{1};
    EXPECT_FALSE(ParseWorth(flipped)) << i;
  }
}

}  // namespace
}  // namespace quire::disk_layout
