// Why the KV of a prompt was not all there: as its own salt knows it, and no other.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "engine/testing/test_server.h"

namespace quire {
namespace {

Tokens Text(int64_t count, uint64_t seed) {
  RandomSequence random(seed);
  return RandomTokens(count, &random);
}

PrefixMiss MissOf(Server* server, const Tokens& prompt, const std::string& salt = "") {
  return server->Generate(prompt, {.max_tokens = 4, .ignore_eos = true, .cache_salt = salt})
      .prefix_miss;
}

TEST(PrefixMissOfARequest, TellsWhereTheKnownTextEndsOrDeparts) {
  Server server({.pages = 100});
  const Tokens text = Text(40, 1);
  EXPECT_EQ(MissOf(&server, text), (PrefixMiss{.kind = PrefixMissKind::kNew}));
  EXPECT_EQ(MissOf(&server, text).kind, PrefixMissKind::kNone) << "all that can be used is there";
  Tokens other = text;
  other[30] += other[30] == 0 ? 1 : -1;
  EXPECT_EQ(MissOf(&server, other), (PrefixMiss{.kind = PrefixMissKind::kDiffers, .position = 30}));
  const Answer answer = server.Generate(text, {.max_tokens = 4, .ignore_eos = true});
  Tokens longer = text;
  longer.insert(longer.end(), answer.tokens.begin(), answer.tokens.end() - 1);
  for (int i = 0; i < 9; ++i) longer.push_back(i);
  const PrefixMiss miss = MissOf(&server, longer);
  EXPECT_EQ(miss, (PrefixMiss{.kind = PrefixMissKind::kNew, .position = 43}))
      << "the text went on behind what is known";
}

TEST(PrefixMissOfARequest, TellsWhatWasGivenUpAndWhen) {
  const auto clock = std::make_shared<FakeClock>();
  Server server({.pages = 12, .page_size = 16, .clock = clock});
  const Tokens text = Text(64, 1);
  EXPECT_EQ(MissOf(&server, text, "ann").kind, PrefixMissKind::kNew);
  EXPECT_EQ(MissOf(&server, Text(150, 2), "bob").kind, PrefixMissKind::kNew);  // takes all pages
  // Of the same text, a third one learns nothing: neither that it was there, nor that it went.
  EXPECT_EQ(MissOf(&server, text, "cid"), (PrefixMiss{.kind = PrefixMissKind::kNew}));
  clock->Advance(5'000'000);
  const PrefixMiss miss = MissOf(&server, text, "ann");
  EXPECT_EQ(miss.kind, PrefixMissKind::kEvicted);
  EXPECT_LT(miss.position, 64);
  EXPECT_EQ(miss.evicted_ms, 5);
  EXPECT_EQ(MissOf(&server, text, "ann").kind, PrefixMissKind::kNone) << "it is there again";
}

// What two tenants are told is what each of them is told alone.
TEST(PrefixMissOfARequest, OfTwoTenantsEachIsToldOfItsOwnAlone) {
  const auto told = [](bool with_bob) {
    Server server({.pages = 4000});  // nobody makes room for another
    RandomSequence random(3);
    std::vector<PrefixMiss> of_ann;
    for (int i = 0; i < 60; ++i) {
      Tokens prompt = Text(20 + 3 * static_cast<int64_t>(random.Below(4)), random.Below(3));
      prompt[random.Below(20)] = 1;
      if (with_bob) MissOf(&server, prompt, "bob");
      of_ann.push_back(MissOf(&server, prompt, "ann"));
      if (with_bob) MissOf(&server, Text(30, random.Below(3)), "bob");
      if (!with_bob) random.Below(3);
    }
    return of_ann;
  };
  const std::vector<PrefixMiss> alone = told(false);
  EXPECT_EQ(told(true), alone);
  EXPECT_GT(std::count(alone.begin(), alone.end(), PrefixMiss{}), 5);
}

TEST(PrefixMissOfARequest, ComesWithTheFirstTokens) {
  Server server({.pages = 100});
  server.engine->Submit(Text(40, 1), {.max_tokens = 4, .ignore_eos = true}).value();
  int64_t outputs = 0;
  while (!server.engine->Idle()) {
    const std::vector<StepOutput> step = server.engine->Step().value();
    for (const StepOutput& output : step) {
      const bool has_usage = outputs == 0 || output.finish_reason != FinishReason::kNone;
      EXPECT_EQ(output.prompt_tokens, has_usage ? 40 : 0);
      EXPECT_EQ(output.prefix_miss.kind, has_usage ? PrefixMissKind::kNew : PrefixMissKind::kNone);
      ++outputs;
    }
  }
  EXPECT_EQ(outputs, 4);
}

}  // namespace
}  // namespace quire
