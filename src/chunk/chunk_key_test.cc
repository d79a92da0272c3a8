#include <gtest/gtest.h>

#include <limits>
#include <numeric>
#include <set>
#include <string>

#include "chunk/sha256.h"
#include "quire/chunk.h"

namespace quire {
namespace {

// The passport, keys and digests of example 21 of the specification.
constexpr std::string_view kExamplePassport =
    R"({"block":4,"dtype":"bf16","head_dim":8,"kv_heads":2,"layers":[0,4],"layout":"L2THD",)"
    R"("model":"toy","quant":"none","revision":"r0","rope":"theta=10000;scaling=none",)"
    R"("shard":"tp0of1.pp0of1","v":1})";

using Tokens = std::vector<int32_t>;

TEST(ChunkKey, ExampleVector) {
  const Digest fingerprint = FingerprintOf(kExamplePassport);
  EXPECT_EQ(fingerprint.ToHex(),
            "2827cd536db7eb87c2418a93164502690a11ebbd761935cc28a2401dec1142b4");
  const KeySpace space(fingerprint, "");
  EXPECT_EQ(space.root().digest.ToHex(),
            "f5b6f8e6bd783cdc57564251fd6a455625cfa96e8cc27910e670710189ee807b");
  const KeySpace tenant(fingerprint, "tenant-a");
  EXPECT_EQ(tenant.root().digest.ToHex(),
            "70e31844372376de820211f16642b7a966fd1180af3738bd5d69ac101b1f1a39");
  const ChunkKey first = space.Next(space.root(), Tokens{1, 2, 3, 4});
  EXPECT_EQ(first.digest.ToHex(),
            "6a87ebb0e162ecc6e269eddc7bb9838780b2032ca0d958925beefe0bbf888bab");
  EXPECT_EQ(space.Next(first, Tokens{5, 6, 7, 8}).digest.ToHex(),
            "41b4c43d51705c26a4b815d1fe6e77066235f52a62c1787fae26c84f0290ce2b");
  EXPECT_EQ(tenant.Next(tenant.root(), Tokens{1, 2, 3, 4}).digest.ToHex(),
            "e490267e6b9ca4baed18a5315ddd52ac18e4669046b037a1a8636183742c43d4");
  EXPECT_EQ(space.Segment(Tokens{5, 6, 7, 8}).digest.ToHex(),
            "f79861ffbf7792e677516ccf21d9277bbc531a5fca1d28b6a902e27ad0e9d459");
}

// The number of leading chunks of `query` that `stored` has: what a prefix lookup counts.
size_t PrefixHits(const std::set<ChunkKey>& stored, const std::vector<ChunkKey>& query) {
  size_t hits = 0;
  while (hits < query.size() && stored.contains(query[hits])) ++hits;
  return hits;
}

// Examples 22 and 23.
TEST(ChunkKey, PrefixHitsEndAtTheFirstDifference) {
  const Digest fingerprint = FingerprintOf(kExamplePassport);
  const KeySpace space(fingerprint, "");
  Tokens tokens(12);
  std::iota(tokens.begin(), tokens.end(), 1);
  const std::vector<ChunkKey> chain = space.Chain(tokens, 4).value();
  std::set<ChunkKey> stored(chain.begin(), chain.end());
  ASSERT_EQ(stored.size(), 3u);
  EXPECT_EQ(PrefixHits(stored, space.Chain(Tokens{1, 2, 3, 4, 5, 6, 7, 8, 99, 1, 2, 3}, 4).value()),
            2u);
  EXPECT_EQ(PrefixHits(stored, space.Chain(Tokens{9, 2, 3, 4, 5, 6, 7, 8}, 4).value()), 0u);
  EXPECT_EQ(PrefixHits(stored, KeySpace(fingerprint, "other").Chain(tokens, 4).value()), 0u);
  const Digest other_dtype = FingerprintOf(std::string(kExamplePassport).replace(19, 4, "f16"));
  EXPECT_EQ(PrefixHits(stored, KeySpace(other_dtype, "").Chain(tokens, 4).value()), 0u);
  EXPECT_EQ(PrefixHits(stored, KeySpace(fingerprint, "", true).Chain(tokens, 4).value()), 0u);
  stored.erase(chain[1]);
  EXPECT_EQ(PrefixHits(stored, chain), 1u);
}

TEST(ChunkKey, ChainIsNextAfterNextAndCountsTheTail) {
  const KeySpace space(FingerprintOf("p"), "s");
  const Tokens tokens{1, 2, 3, 4, 5};
  EXPECT_EQ(space.Chain(tokens, 2).value().size(), 2u);
  const std::vector<ChunkKey> chain = space.Chain(tokens, 2, /*tail=*/true).value();
  ASSERT_EQ(chain.size(), 3u);
  EXPECT_EQ(chain[0], space.Next(space.root(), Tokens{1, 2}));
  EXPECT_EQ(chain[1], space.Next(chain[0], Tokens{3, 4}));
  EXPECT_EQ(chain[2], space.Next(chain[1], Tokens{5}));
  EXPECT_TRUE(space.Chain(Tokens{}, 2, true).value().empty());
}

TEST(ChunkKey, ExtrasAreOfTheLeadingChunks) {
  const KeySpace space(FingerprintOf("p"), "s");
  const Tokens tokens{1, 2, 3, 4, 5};
  const std::vector<std::string> extras{"", "image"};
  const std::vector<ChunkKey> plain = space.Chain(tokens, 2, /*tail=*/true).value();
  const std::vector<ChunkKey> chain = space.Chain(tokens, 2, /*tail=*/true, extras).value();
  ASSERT_EQ(chain.size(), 3u);
  EXPECT_EQ(chain[0], plain[0]);
  EXPECT_EQ(chain[1], space.Next(chain[0], Tokens{3, 4}, "image"));
  EXPECT_EQ(chain[2], space.Next(chain[1], Tokens{5}));
  EXPECT_NE(chain[2], plain[2]) << "the extras of a chunk are part of what follows it";
  const std::vector<std::string> too_many(3, "x");
  EXPECT_EQ(space.Chain(tokens, 2, /*tail=*/false, too_many).status().code(),
            StatusCode::kBadArgument);
  EXPECT_TRUE(space.Chain(tokens, 2, /*tail=*/true, too_many).ok());
}

// What is hashed says where each field ends, so that no two inputs are the same bytes.
TEST(ChunkKey, NoTwoInputsShareAKey) {
  const Digest fingerprint = FingerprintOf("p");
  std::set<ChunkKey> keys;
  size_t count = 0;
  const auto add = [&](const ChunkKey& key) {
    keys.insert(key);
    ++count;
  };
  for (const std::string_view salt : {"", "a", "ab", "b"}) {
    for (const bool approximate : {false, true}) {
      const KeySpace space(fingerprint, salt, approximate);
      add(space.root());
      for (const Tokens& tokens :
           {Tokens{}, Tokens{0}, Tokens{0, 0}, Tokens{1}, Tokens{256}, Tokens{-1}}) {
        add(space.Segment(tokens));
        for (const std::string_view extras : {"", "\1\0\0\0", "x"})
          add(space.Next(space.root(), tokens, extras));
      }
    }
  }
  EXPECT_EQ(keys.size(), count);
}

TEST(Digest, HexGoesThereAndBack) {
  const Digest digest = FingerprintOf("any");
  const Result<Digest> back = Digest::FromHex(digest.ToHex());
  ASSERT_TRUE(back.ok());
  EXPECT_EQ(*back, digest);
  std::string hex = digest.ToHex();
  for (const std::string& bad :
       {std::string(), hex.substr(1), hex + "0", "g" + hex.substr(1), "A" + hex.substr(1)}) {
    EXPECT_EQ(Digest::FromHex(bad).status().code(), StatusCode::kBadArgument) << bad;
  }
}

TEST(ShortId, IsTheBeginOfTheDigest) {
  EXPECT_EQ(ShortId(""), 0u);
  const Digest digest = FingerprintOf("numerics");
  for (int i = 0; i < 8; ++i)
    EXPECT_EQ(ShortId("numerics") >> 8 * i & 0xFF, digest.bytes[static_cast<size_t>(i)]);
}

TEST(KeySpace, ChainOfBlocksBelowOneTokenIsBadArgument) {
  const KeySpace space(Digest{}, "");
  for (const int64_t block_tokens :
       {int64_t{0}, int64_t{-1}, std::numeric_limits<int64_t>::min()}) {
    const Status status = space.Chain(std::vector<int32_t>{1, 2}, block_tokens).status();
    EXPECT_EQ(status.code(), StatusCode::kBadArgument);
    EXPECT_NE(status.message().find(std::to_string(block_tokens)), std::string_view::npos);
  }
}

}  // namespace
}  // namespace quire
