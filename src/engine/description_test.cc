// What an engine tells of its KV: sharing, salts, the store, and what it costs.
#include "engine/description.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "chunk/sha256.h"
#include "engine/testing/fake_chunk_store.h"
#include "engine/testing/test_server.h"

namespace quire {
namespace {

Tokens Text(int64_t count, uint64_t seed) {
  RandomSequence random(seed);
  return RandomTokens(count, &random);
}
Tokens Joined(Tokens a, const Tokens& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}
SamplingOptions Greedy(int64_t max_tokens, std::string salt = "") {
  return {.max_tokens = max_tokens, .ignore_eos = true, .cache_salt = std::move(salt)};
}

EngineDescription Describe(Server& server) {
  Result<EngineDescription> description = server.engine->Describe();
  EXPECT_TRUE(description.ok()) << description.status().ToString();
  const EngineDescription& told = *description;
  EXPECT_LE(std::ssize(told.blocks), kDescribedMax);
  EXPECT_LE(std::ssize(told.sequences), kDescribedMax);
  EXPECT_LE(std::ssize(told.waiting), kDescribedMax);
  EXPECT_LE(told.visited, std::ssize(told.blocks) + 2 * std::ssize(told.sequences));
  return *std::move(description);
}

std::string DigestOf(const EngineDescription& told, const std::string& salt) {
  const Digest digest = HmacSha256(told.salt_key).Update(std::as_bytes(std::span(salt))).Finish();
  std::string text;
  for (size_t i = 0; i < 8; ++i) {
    char digits[3];
    std::snprintf(digits, sizeof(digits), "%02x", static_cast<unsigned>(digest.bytes[i]));
    text += digits;
  }
  return text;
}

TEST(EngineDescription, TellsWhichRequestsShareABlockAndWhoWaits) {
  const auto clock = std::make_shared<FakeClock>();
  Server server({.sequences = 2, .clock = clock});
  const Tokens common = Text(20, 1);
  server.Generate(Joined(common, Text(5, 2)), Greedy(4));  // retained afterwards: 28 tokens
  const int64_t first = server.Submit(Joined(common, Text(6, 3)), Greedy(9));
  const int64_t second = server.Submit(Joined(common, Text(7, 4)), Greedy(9));
  const int64_t third = server.Submit(Joined(common, Text(8, 5)), Greedy(9));
  ASSERT_TRUE(server.Step().ok());
  clock->Advance(3'000'000'000);
  const EngineDescription told = Describe(server);

  ASSERT_EQ(told.sequences.size(), 3u);
  EXPECT_EQ(told.sequences[0].request_id, first);
  EXPECT_EQ(told.sequences[0].tokens, 26);
  EXPECT_EQ(told.sequences[1].request_id, second);
  EXPECT_EQ(told.sequences[1].tokens, 27);
  EXPECT_EQ(told.sequences[2].request_id, DescribedSequence::kRetained);
  EXPECT_EQ(told.sequences[2].tokens, 28);
  ASSERT_EQ(told.waiting.size(), 1u);
  EXPECT_EQ(told.waiting[0].request_id, third);
  EXPECT_EQ(told.waiting[0].prompt_tokens, 28);
  EXPECT_EQ(told.waiting[0].seconds, 3);
  EXPECT_EQ(told.stats.running, 2);
  EXPECT_FALSE(told.cut);

  ASSERT_EQ(told.blocks.size(), 4u);  // what all three see, and one for each
  EXPECT_EQ(told.blocks[0].begin, 0);
  EXPECT_EQ(told.blocks[0].end, 20);
  EXPECT_EQ(told.blocks[0].sequences, 3);
  int64_t bytes = 0;
  for (const DescribedBlock& block : told.blocks) bytes += block.bytes;
  EXPECT_GE(bytes, told.stats.pages_in_use * told.stats.page_size * told.stats.kv_bytes_per_token);
  for (const DescribedSequence& sequence : told.sequences) {
    const DescribedBlock& end = told.blocks[static_cast<size_t>(sequence.block)];
    EXPECT_EQ(end.parent, 0);
    EXPECT_EQ(end.begin, 20);
    EXPECT_EQ(end.end, sequence.tokens);
    EXPECT_EQ(end.sequences, 1);
  }
}

TEST(EngineDescription, TellsForWhomKVIsKeptAndNotTheSalt) {
  Server server;
  const Tokens prompt = Text(20, 1);
  server.Generate(prompt, Greedy(4, "a secret"));
  server.Generate(prompt, Greedy(4, "another"));
  server.Generate(prompt, Greedy(4));
  const EngineDescription told = Describe(server);
  ASSERT_EQ(told.sequences.size(), 3u);
  ASSERT_EQ(told.blocks.size(), 3u);  // nothing is shared
  const std::vector<std::string> digests{"", DigestOf(told, "another"), DigestOf(told, "a secret")};
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(told.sequences[i].salt_digest, digests[i]);
    EXPECT_EQ(told.blocks[static_cast<size_t>(told.sequences[i].block)].salt_digest, digests[i]);
  }
  EXPECT_EQ(Describe(server).salt_key, told.salt_key);
  Server another;  // its digests are others, so that nobody learns of equal salts elsewhere
  EXPECT_NE(Describe(another).salt_key, told.salt_key);
  EXPECT_EQ(told.salt_key.size(), 32u);
}

TEST(EngineDescription, TellsWhatTheStoreHasToo) {
  const auto clock = std::make_shared<FakeClock>();
  const auto store = std::make_shared<FakeChunkStore>(clock);
  Server server({.clock = clock});
  Passport identity;
  identity.model = "fake";
  identity.block_tokens = 8;
  ASSERT_TRUE(
      server.engine->AttachStore(store, identity, {.chunk_tokens = 8, .clock = clock}).ok());
  server.Generate(Text(21, 1), Greedy(4));
  ASSERT_TRUE(server.engine->FlushStore(1000).ok());
  const EngineDescription told = Describe(server);
  ASSERT_EQ(told.blocks.size(), 1u);
  EXPECT_EQ(told.blocks[0].end, 24);
  EXPECT_GE(told.blocks[0].stored_tokens, 16);
  EXPECT_LE(told.blocks[0].stored_tokens, 24);
}

TEST(EngineDescription, OfMoreThanAThousandIsCutAndSaysSo) {
  Server server({.pages = 6000, .waiting = 2000});
  const Tokens common = Text(6, 1);
  for (uint64_t i = 0; i < 1300; ++i) {
    server.Submit(Joined(common, Text(8, 100 + i)), Greedy(1));
  }
  const EngineDescription queue = Describe(server);
  EXPECT_TRUE(queue.cut);
  EXPECT_EQ(std::ssize(queue.waiting), kDescribedMax);
  server.Finish();
  const EngineDescription told = Describe(server);
  EXPECT_TRUE(told.cut);
  EXPECT_EQ(told.stats.retained_sequences, 1300);
  EXPECT_EQ(std::ssize(told.sequences), kDescribedMax);
  EXPECT_EQ(std::ssize(told.blocks), kDescribedMax);
  // What was used last is told.
  const int64_t last = server.Submit(Joined(common, Text(8, 100)), Greedy(5));
  ASSERT_TRUE(server.Step().ok());
  const EngineDescription after = Describe(server);
  EXPECT_EQ(after.sequences[0].request_id, last);
  EXPECT_GE(after.sequences[0].block, 0);
}

TEST(EngineDescription, OfAnEngineWithoutRequestsIsEmpty) {
  for (const bool recurrent : {false, true}) {
    Server server({.recurrent = recurrent});
    const EngineDescription told = Describe(server);
    EXPECT_TRUE(told.blocks.empty());
    EXPECT_TRUE(told.sequences.empty());
    EXPECT_EQ(told.visited, 0);
    server.Generate(Text(20, 1), Greedy(4));
    EXPECT_EQ(Describe(server).sequences.size(), 1u);
    EXPECT_EQ(Describe(server).blocks.size(), 1u);
  }
}

}  // namespace
}  // namespace quire
