// The engine over a chunk store: whatever the store brings, loses, damages or delays, answers are
// those of the request alone, bit for bit, and nothing waits longer than its deadline. Time is
// fake.
#include <gtest/gtest.h>

#include <numeric>
#include <set>

#include "engine/testing/test_store.h"

namespace quire {
namespace {

TEST_F(EngineStore, AnotherEngineStartsBehindWhatOneHasComputed) {
  const Tokens prompt = Text(50);
  const auto writer = Make();
  const Answer first = writer->Generate(prompt, Greedy(20));
  EXPECT_EQ(first.cached_tokens, 0);
  EXPECT_EQ(first.miss, MissReason::kNotStored);
  EXPECT_EQ(store_->puts.size(), 8U);  // of the 69 tokens whose KV was needed
  EXPECT_EQ(writer->engine->Stats().stored_chunks, 8);
  for (const int64_t page_size : {1, 4, 16}) {
    const auto reader = Make({.page_size = page_size});
    const Answer answer = reader->Generate(prompt, Greedy(20));
    ExpectEqual(answer, first, "page size " + std::to_string(page_size));
    EXPECT_EQ(answer.cached.tiers[kDisk], 48);
    EXPECT_EQ(answer.cached.memory, 0);
    EXPECT_EQ(answer.cached_tokens, 48);
    EXPECT_EQ(answer.miss, MissReason::kNone);
    const EngineStats stats = reader->engine->Stats();
    EXPECT_EQ(stats.loaded_tokens[kDisk], 48);
    EXPECT_EQ(stats.loads, 1);
    EXPECT_EQ(stats.stored_chunks, 0) << "all of it was there";
  }
}

TEST_F(EngineStore, ConversationsGoOnAcrossEngines) {
  Tokens text = Text(30);
  for (int turn = 0; turn < 6; ++turn) {
    const Answer want = Cold(text, Greedy(15));
    const auto server = Make({.chunk = 16});
    const Answer answer = server->Generate(text, Greedy(15));
    ExpectEqual(answer, want, "turn " + std::to_string(turn));
    if (turn > 0) {
      EXPECT_GE(answer.cached_tokens, static_cast<int64_t>(text.size()) - 5 - 8 - 1);
    }
    text.insert(text.end(), answer.tokens.begin(), answer.tokens.end());
    const Tokens more = Text(4, 100 + static_cast<uint64_t>(turn));
    text.insert(text.end(), more.begin(), more.end());
  }
}

TEST_F(EngineStore, APromptThatComesAgainWordForWordIsFoundToItsEnd) {
  options_.chunk_tokens = 32;
  for (const int64_t length : {52, 64, 20}) {  // with a tail, without one, only a tail
    SCOPED_TRACE(length);
    const Tokens prompt = Text(length, static_cast<uint64_t>(length));
    const Answer want = Make()->Generate(prompt, Greedy(3));
    const Answer again = Make()->Generate(prompt, Greedy(3));
    ExpectEqual(again, want, "again");
    EXPECT_EQ(again.cached_tokens, length - 1) << "the last token is computed for its logits";
    EXPECT_EQ(again.cached.tiers[kDisk], length - 1);
  }
  options_.tails = false;
  const Answer without = Make()->Generate(Text(52, 52), Greedy(3));
  EXPECT_EQ(without.cached_tokens, 32);
}

TEST_F(EngineStore, LooksOnlyForWhatMemoryDoesNotHave) {
  const Tokens prompt = Text(60);
  const Answer want = Make()->Generate(prompt, Greedy(2));
  const auto server = Make();
  server->Generate(Tokens(prompt.begin(), prompt.begin() + 20), Greedy(1));  // 20 in memory
  store_->served.clear();
  const Answer answer = server->Generate(prompt, Greedy(2));
  ExpectEqual(answer, want, "from both");
  EXPECT_EQ(answer.cached.memory, 16);  // up to a border of chunks
  EXPECT_EQ(answer.cached.tiers[kDisk], 40);
  EXPECT_EQ(store_->served.size(), 5U);
  const int64_t fetches = store_->fetches;
  const Answer warm = server->Generate(prompt, Greedy(2));
  EXPECT_EQ(warm.cached.memory, 59);
  EXPECT_EQ(store_->fetches, fetches) << "memory had all of it";
}

TEST_F(EngineStore, SaltsKeepTenantsApartInEveryTier) {
  const Tokens prompt = Text(50);
  const auto server = Make();
  server->Generate(prompt, Greedy(4, "a"));
  const Answer other = server->Generate(prompt, Greedy(4, "b"));
  EXPECT_EQ(other.cached_tokens, 0) << "from memory";
  const Answer none = server->Generate(prompt, Greedy(4));
  EXPECT_EQ(none.cached_tokens, 0);
  const Answer same = server->Generate(prompt, Greedy(4, "a"));
  EXPECT_EQ(same.cached.memory, 49);
  ExpectEqual(same, other, "the salt cannot be seen in the answer");

  store_->chunks.clear();
  Make()->Generate(prompt, Greedy(4, "a"));
  EXPECT_EQ(Make()->Generate(prompt, Greedy(4, "b")).cached_tokens, 0) << "from the store";
  EXPECT_EQ(Make()->Generate(prompt, Greedy(4, "a")).cached.tiers[kDisk], 48);
}

// Both at once: none waits for the other's prefix or forks from it.
TEST_F(EngineStore, RunningRequestsOfAnotherSaltAreNoPrefix) {
  const Tokens prompt = Text(50);
  const Answer want = Cold(prompt, Greedy(6));
  const auto server = Make();
  server->Submit(prompt, Greedy(6, "a"));
  ASSERT_TRUE(server->Step().ok());
  server->Submit(prompt, Greedy(6, "b"));
  server->Finish();
  for (int64_t id = 0; id < 2; ++id) {
    ExpectEqual(server->answers[{id, 0}], want, "request " + std::to_string(id));
    EXPECT_EQ((server->answers[{id, 0}].cached_tokens), 0);
  }
}

TEST_F(EngineStore, LongFactorsHaveChunksOfTheirOwn) {
  const Tokens prompt = Text(30);
  const Sizes sizes{.long_rope = true};
  const Tokens shorter(prompt.begin(), prompt.begin() + 12);
  options_.chunk_tokens = 4;
  options_.tails = false;
  const Answer want_long = Cold(prompt, Greedy(3), true);
  Make(sizes)->Generate(prompt, Greedy(3));
  const Answer again = Make(sizes)->Generate(prompt, Greedy(3));
  ExpectEqual(again, want_long, "long factors");
  EXPECT_EQ(again.cached_tokens, 28);
  const size_t chunks = store_->chunks.size();
  Make(sizes)->Generate(shorter, Greedy(3));  // the same tokens with the short factors
  EXPECT_EQ(store_->chunks.size(), chunks + 3);
}

// ---- Waiting

TEST_F(EngineStore, OthersGoOnWhileOneLoads) {
  const Tokens prompt = Text(50);
  const Answer want = Make()->Generate(prompt, Greedy(5));
  store_->chunk_ns = 10 * kMs;
  const auto server = Make();
  const Tokens other = Text(12, 7);
  const Answer want_other = Cold(other, Greedy(5));
  server->Submit(prompt, Greedy(5));
  server->Submit(other, Greedy(5));  // too short to be looked for
  const int64_t start_ns = clock_->SteadyNs();
  while (server->answers[{1, 0}].reason == FinishReason::kNone) ASSERT_TRUE(server->Step().ok());
  EXPECT_EQ(clock_->SteadyNs(), start_ns) << "a step waited although there was something to do";
  EXPECT_EQ(server->engine->Stats().loading, 1);
  server->Finish();
  ExpectEqual(server->answers[{0, 0}], want, "loaded");
  ExpectEqual(server->answers[{1, 0}], want_other, "computed meanwhile");
  EXPECT_EQ((server->answers[{0, 0}].cached_tokens), 48);
  EXPECT_EQ(clock_->SteadyNs() - start_ns, 60 * kMs);
  EXPECT_DOUBLE_EQ((server->answers[{0, 0}].load_seconds), 0.06);
}

TEST_F(EngineStore, ChunksOfARequestThatHasToWaitComeIntoRamMeanwhile) {
  store_->has_ram = true;
  const Tokens prompt = Text(50);
  const Answer want = Make()->Generate(prompt, Greedy(5));
  EXPECT_EQ(store_->prefetches, 0) << "nothing is ahead of it";
  const auto server = Make();
  server->Submit(Text(12, 7), Greedy(20));
  store_->served.clear();
  server->Submit(prompt, Greedy(5));
  EXPECT_EQ(store_->prefetches, 1);
  EXPECT_EQ(store_->live_fetches, 1);
  EXPECT_EQ(store_->served.size(), 6U) << "before any step";
  server->Submit(Text(12, 8), Greedy(1));  // too short to be looked for
  EXPECT_EQ(store_->prefetches, 1);
  server->Finish();
  EXPECT_EQ(store_->live_fetches, 0);
  ExpectEqual(server->answers[{1, 0}], want, "prefetched");
  EXPECT_EQ((server->answers[{1, 0}].cached_tokens), 48);

  server->Submit(Text(12, 9), Greedy(1));
  server->Submit(prompt, Greedy(5));
  EXPECT_EQ(store_->prefetches, 1) << "the prefix cache has it";
  server->Finish();
}

TEST_F(EngineStore, APromptIsHashedOnce) {
  store_->has_ram = true;
  const auto server = Make();
  server->Submit(Text(12, 7), Greedy(20));  // too short to be looked for
  server->Submit(Text(50), Greedy(5));
  ASSERT_EQ(store_->prefetches, 1);
  server->Finish();
  ASSERT_EQ(store_->chains.size(), 2U) << "of the prefetch and the load";
  EXPECT_EQ(store_->chains[0], store_->chains[1]);
}

TEST_F(EngineStore, AWaitAsksALoadOnceATurn) {
  store_->hangs = true;
  const auto server = Make();
  server->Submit(Text(50), Greedy(5));
  ASSERT_TRUE(server->Step().ok());
  EXPECT_EQ(store_->polls, 2) << "before waiting and behind it";
  server->Finish();
}

TEST_F(EngineStore, PrefetchesAreFewEndWithTheirRequestAndMayFail) {
  store_->has_ram = true;
  store_->hangs = true;
  const auto server = Make({.sequences = 1});
  server->Submit(Text(12, 7), Greedy(20));
  for (uint64_t seed = 0; seed < 12; ++seed) server->Submit(Text(40, 100 + seed), Greedy(1));
  EXPECT_EQ(store_->prefetches, kPrefetchesMax);
  EXPECT_EQ(store_->live_fetches, kPrefetchesMax);
  for (int64_t id = 1; id <= 12; ++id) EXPECT_TRUE(server->engine->Cancel(id).ok());
  EXPECT_EQ(store_->live_fetches, 0);
  store_->fetch_fault = [] { return Status(StatusCode::kUnavailable, "injected"); };
  EXPECT_EQ(server->Submit(Text(40, 1), Greedy(1)), 13) << "what fails costs nothing";
  EXPECT_EQ(store_->prefetches, kPrefetchesMax + 1);
  store_->hangs = store_->has_ram = false;
  server->Finish();

  const auto without_ram = Make();
  without_ram->Submit(Text(12, 7), Greedy(2));
  without_ram->Submit(Text(40, 2), Greedy(2));
  EXPECT_EQ(store_->prefetches, kPrefetchesMax + 1) << "there is no faster tier to bring it to";
  without_ram->Finish();
}

TEST_F(EngineStore, AStoreThatIsSlowOrHangsCostsItsDeadlineAndNoMore) {
  const Tokens prompt = Text(50);
  const Answer want = Make()->Generate(prompt, Greedy(5));
  for (const bool hangs : {false, true}) {
    SCOPED_TRACE(hangs);
    store_->hangs = hangs;
    store_->chunk_ns = 40 * kMs;
    const auto server = Make();
    const int64_t start_ns = clock_->SteadyNs();
    const Answer answer = server->Generate(prompt, Greedy(5));
    ExpectEqual(answer, want, "after the deadline");
    EXPECT_EQ(clock_->SteadyNs() - start_ns, 100 * kMs);
    EXPECT_EQ(answer.miss, MissReason::kTimeout);
    EXPECT_EQ(answer.cached_tokens, hangs ? 0 : 16) << "what came in time is used";
    EXPECT_EQ(server->engine->Stats().misses[static_cast<size_t>(MissReason::kTimeout)], 1);
  }
  EXPECT_EQ(store_->cancelled, 1) << "the one that hung";
}

// A step that waits for nothing but a store lets others in between.
TEST_F(EngineStore, AStepWaitsASliceAtMost) {
  const Tokens prompt = Text(50);
  Make()->Generate(prompt, Greedy(1));
  store_->hangs = true;
  options_.load_timeout_ms = 10'000;
  const auto server = Make();
  const int64_t id = server->Submit(prompt, Greedy(1));
  const int64_t start_ns = clock_->SteadyNs();
  ASSERT_TRUE(server->Step().ok());
  EXPECT_LE(clock_->SteadyNs() - start_ns, 50 * kMs);
  EXPECT_FALSE(server->engine->Idle());
  EXPECT_TRUE(server->engine->Cancel(id).ok());
  server->engine->CheckInvariants();
  EXPECT_EQ(store_->live_fetches, 0);
  EXPECT_EQ(store_->cancelled, 1);
  server->Finish();
  EXPECT_EQ((server->answers[{id, 0}].reason), FinishReason::kCancelled);
  EXPECT_TRUE(server->cache->Empty());
}

TEST_F(EngineStore, WhatOneRequestLoadsAnotherDoesNotLoadAgain) {
  const Tokens prompt = Text(64);
  Make()->Generate(prompt, Greedy(1));
  store_->chunk_ns = 5 * kMs;
  const auto server = Make();
  std::vector<Answer> wants;
  for (uint64_t i = 0; i < 4; ++i) {
    Tokens text(prompt.begin(), prompt.begin() + 60);
    text.push_back(static_cast<int32_t>(i));
    wants.push_back(Cold(text, Greedy(3)));
    server->Submit(text, Greedy(3));
  }
  store_->served.clear();
  server->Finish();
  for (int64_t id = 0; id < 4; ++id) {
    ExpectEqual(server->answers[{id, 0}], wants[static_cast<size_t>(id)],
                "request " + std::to_string(id));
    EXPECT_GE((server->answers[{id, 0}].cached_tokens), 56);
  }
  EXPECT_EQ(store_->served.size(), 7U);
  for (const auto& [key, count] : store_->served) EXPECT_EQ(count, 1);
}

// Cancelled while its first chunk, or its first layer, is on its way.
TEST_F(EngineStore, GoesOnAloneWhenTheOneThatLoadedIsCancelled) {
  const Tokens prompt = Text(50);
  const Answer want = Make()->Generate(prompt, Greedy(3));
  options_.load_timeout_ms = 1000;
  for (const bool by_layers : {false, true}) {
    SCOPED_TRACE(by_layers);
    store_->chunk_ns = by_layers ? 0 : 20 * kMs;  // so that all take longer than a step waits
    store_->layer_ns = by_layers ? 80 * kMs : 0;
    store_->cancelled = 0;
    const auto server = Make();
    const int64_t first = server->Submit(prompt, Greedy(3));
    const int64_t second = server->Submit(prompt, Greedy(3));
    ASSERT_TRUE(server->Step().ok());
    EXPECT_EQ(store_->live_fetches, 1);
    ASSERT_TRUE(server->engine->Cancel(first).ok());
    server->engine->CheckInvariants();
    EXPECT_EQ(store_->cancelled, 1);
    server->Finish();
    ExpectEqual(server->answers[{second, 0}], want, "the second one");
    EXPECT_EQ((server->answers[{second, 0}].cached_tokens), 48);
    EXPECT_EQ(server->cache->loading_forwards, by_layers ? 1 : 0);
  }
}

// ---- Layer by layer

// The first layers are computed while the others are on their way: all is done when the last layer
// is there, and what runs beside it is not held up before the first.
TEST_F(EngineStore, ComputesALayerWhileTheNextOneIsOnItsWay) {
  const Tokens prompt = Text(50);
  const Answer want = Make()->Generate(prompt, Greedy(5));
  for (const int64_t page_size : {1, 4, 16}) {
    SCOPED_TRACE(page_size);
    store_->layer_ns = 10 * kMs;
    const auto server = Make({.page_size = page_size});
    const int64_t start_ns = clock_->SteadyNs();
    std::vector<std::string> events;
    const auto note = [&](const std::string& what) {
      events.push_back(what + " at " + std::to_string((clock_->SteadyNs() - start_ns) / kMs));
    };
    store_->layer_fault = [&](int64_t layer) {
      if (!events.empty()) note("take " + std::to_string(layer));
      return Status();
    };
    server->model->fault = [&](std::span<const int32_t> tokens) {
      if (tokens.size() > 1) note("forward of " + std::to_string(tokens.size()));
      return Status();
    };
    server->cache->fault = [&](std::string_view call) {
      if (call == "AttentionWithFusedQKV" && events.size() < 6) note("compute");
      return Status();
    };
    const Answer answer = server->Generate(prompt, Greedy(5));
    ExpectEqual(answer, want, "by layers");
    EXPECT_EQ(events,
              (std::vector<std::string>{"forward of 2 at 10", "compute at 10", "take 0 at 10",
                                        "compute at 10", "take 1 at 10", "compute at 20"}));
    EXPECT_EQ(clock_->SteadyNs() - start_ns, 20 * kMs);
    EXPECT_EQ(server->cache->loading_forwards, 1);
    EXPECT_EQ(answer.cached.tiers[kDisk], 48);
    EXPECT_EQ(answer.cached_tokens, 48);
    EXPECT_EQ(answer.miss, MissReason::kNone);
    EXPECT_DOUBLE_EQ(answer.load_seconds, 0.02);
    const EngineStats stats = server->engine->Stats();
    EXPECT_EQ(stats.loaded_tokens[kDisk], 48);
    EXPECT_EQ(stats.cached_tokens, 48);
    EXPECT_EQ(stats.loads, 1);
    EXPECT_EQ(stats.loading, 0);
    EXPECT_EQ(stats.layer_loads, 1);
    EXPECT_EQ(stats.overlap_seconds, 0) << "computing takes no time here";
  }
  EXPECT_EQ(store_->cancelled, 0);
}

// A step that waited for more than it decided by would sleep beside a layer that is there.
TEST_F(EngineStore, AForwardBeginsWithALayerThatComesAtAnyMomentOfTheDecision) {
  const Tokens prompt = Text(50);
  Make()->Generate(prompt, Greedy(1));
  store_->layer_ns = 10 * kMs;
  for (const int64_t look : {1, 2, 3}) {  // the third ends the wait
    SCOPED_TRACE(look);
    const auto server = Make();
    const int64_t start_ns = clock_->SteadyNs();
    store_->layer_fault = [this, look, looks = int64_t{0}](int64_t) mutable {
      if (++looks == look) clock_->Advance(store_->layer_ns);  // layer 0 comes
      return Status();
    };
    int64_t begun_ns = -1;
    server->model->fault = [&](std::span<const int32_t>) {
      if (begun_ns < 0) begun_ns = clock_->SteadyNs() - start_ns;
      return Status();
    };
    server->Generate(prompt, Greedy(1));
    EXPECT_EQ(begun_ns, 10 * kMs);
    EXPECT_EQ(server->cache->loading_forwards, 1);
  }
}

// 4 ms for layer 0, while layer 1 is on its way for another 10.
TEST_F(EngineStore, TellsWhatWasComputedMeanwhile) {
  const Tokens prompt = Text(50);
  Make()->Generate(prompt, Greedy(1));
  store_->layer_ns = 10 * kMs;
  const auto server = Make();
  server->cache->fault = [&](std::string_view call) {
    if (call == "AttentionWithFusedQKV") clock_->Advance(4 * kMs);
    return Status();
  };
  const int64_t start_ns = clock_->SteadyNs();
  server->Generate(prompt, Greedy(1));
  EXPECT_EQ(clock_->SteadyNs() - start_ns, 20 * kMs);
  const EngineStats stats = server->engine->Stats();
  EXPECT_EQ(stats.layer_loads, 1);
  EXPECT_DOUBLE_EQ(stats.load_seconds, 0.02);
  EXPECT_DOUBLE_EQ(stats.overlap_seconds, 0.004);
}

// A prompt of which all is there, behind a part that memory has, and several samples.
TEST_F(EngineStore, LayersComeBehindWhatMemoryHasAndUpToTheLastToken) {
  const Tokens prompt = Text(48);
  SamplingOptions options = Greedy(4);
  options.n = 3;
  options.temperature = 1;
  options.seed = 5;
  const auto writer = Make();
  writer->Generate(prompt, options);
  store_->layer_ns = 10 * kMs;
  const auto server = Make({.page_size = 16});
  server->Generate(Tokens(prompt.begin(), prompt.begin() + 20), Greedy(1));
  const int64_t before = server->cache->loading_forwards;
  const int64_t id = server->Submit(prompt, options);
  server->Finish();
  for (int64_t sample = 0; sample < 3; ++sample) {
    ExpectEqual(server->answers[{id, sample}], writer->answers[{0, sample}],
                "sample " + std::to_string(sample));
  }
  EXPECT_EQ(server->cache->loading_forwards, before + 1);
  EXPECT_EQ((server->answers[{id, 0}].cached.memory), 16);
  EXPECT_EQ((server->answers[{id, 0}].cached.tiers[kDisk]), 31) << "the last token is computed";
}

// Forwards that take time: decodes and short prompts 6 ms, others 6 ms a token.
constexpr int64_t kTokenNs = 6 * kMs;

class EngineStorePace : public EngineStore {
 protected:
  // An engine that has measured its speed.
  std::unique_ptr<Server> MakeMeasured() {
    auto server = Make({}, false);
    server->model->fault = [this](std::span<const int32_t> tokens) {
      const auto count = static_cast<int64_t>(tokens.size());
      clock_->Advance(count < 16 ? kTokenNs : count * kTokenNs);
      return Status();
    };
    server->Generate(Text(32, 99), Greedy(1));
    EXPECT_DOUBLE_EQ(server->engine->Stats().compute_seconds_per_token, 0.006);
    Attach(server.get());
    return server;
  }
};

// Layers are copied while others are on their way: a forward of two tokens, 12 ms, and of 48 copied
// ones, 48 ms, begins with the first of two layers that come after 30 and 60 ms.
TEST_F(EngineStorePace, CopyingLayersTakesTimeToo) {
  const std::vector<Tokens> prompts = {Text(50), Text(50, 2)};
  std::vector<Answer> want;
  for (const Tokens& prompt : prompts) want.push_back(Make()->Generate(prompt, Greedy(1)));
  store_->layer_ns = 30 * kMs;
  const auto server = MakeMeasured();
  server->cache->fault = [&](std::string_view call) {
    if (call == "ImportKV") clock_->Advance(8 * kMs);  // a chunk of 8 tokens
    return Status();
  };
  for (const size_t i : {0, 1}) {
    ExpectEqual(server->Generate(prompts[i], Greedy(1)), want[i], "loaded");
    EXPECT_EQ(server->engine->Stats().layer_loads, i) << "the first one measures the copying";
    EXPECT_EQ(server->engine->Stats().loaded_tokens[kDisk], 48 * (i + 1));
  }
}

// While others run, a forward takes a load only if it will not wait for it: two layers and two
// tokens to compute.
TEST_F(EngineStorePace, ALoadJoinsOthersOnceItsLayersComeInTime) {
  const Tokens prompt = Text(50);
  const Answer want = Make()->Generate(prompt, Greedy(5));
  const Tokens other = Text(12, 7);
  const Answer want_other = Cold(other, Greedy(30));
  for (const int64_t layer_ms : {9, 30}) {
    SCOPED_TRACE(layer_ms);
    store_->layer_ns = layer_ms * kMs;
    const auto server = MakeMeasured();
    const bool joins = layer_ms == 9;
    const int64_t loads = server->engine->Stats().loads;
    const int64_t first = server->Submit(prompt, Greedy(5));
    const int64_t second = server->Submit(other, Greedy(30));
    const int64_t start_ns = clock_->SteadyNs();
    server->Finish();
    ExpectEqual(server->answers[{first, 0}], want, "loaded");
    ExpectEqual(server->answers[{second, 0}], want_other, "beside it");
    EXPECT_EQ((server->answers[{first, 0}].cached.tiers[kDisk]), 48);
    EXPECT_EQ(clock_->SteadyNs() - start_ns, 30 * kTokenNs) << "nobody waited";
    EXPECT_EQ(server->cache->loading_forwards, joins ? 1 : 0);
    const EngineStats stats = server->engine->Stats();
    EXPECT_EQ(stats.layer_loads, joins ? 1 : 0);
    EXPECT_EQ(stats.loads, loads + 1);
    EXPECT_EQ(stats.loaded_tokens[kDisk], 48);
    EXPECT_DOUBLE_EQ(stats.compute_seconds_per_token, 0.006);
  }
}

// A forward alone may wait for as long as it computes, here 12 ms: the second layer comes at most
// 24 ms behind the first one.
TEST_F(EngineStorePace, AForwardAloneWaitsNoLongerThanItComputes) {
  const Tokens prompt = Text(50);
  const Answer want = Make()->Generate(prompt, Greedy(5));
  for (const int64_t layer_ms : {12, 24, 25}) {
    SCOPED_TRACE(layer_ms);
    store_->layer_ns = layer_ms * kMs;
    const auto server = MakeMeasured();
    const int64_t before = server->engine->Stats().layer_loads;
    ExpectEqual(server->Generate(prompt, Greedy(5)), want, "loaded");
    EXPECT_EQ(server->engine->Stats().layer_loads - before, layer_ms <= 24 ? 1 : 0);
    EXPECT_EQ(server->engine->Stats().loaded_tokens[kDisk], 48);
  }
}

// Nobody waits inside a forward for a load that takes longer than what is to be computed behind it:
// the step returns after its slice, as if the load came whole.
TEST_F(EngineStorePace, AForwardBeginsLateBehindASlowLoad) {
  const Tokens prompt = Text(50);
  const Answer want = Make()->Generate(prompt, Greedy(5));
  store_->layer_ns = 40 * kMs;
  const auto server = MakeMeasured();
  const int64_t id = server->Submit(prompt, Greedy(5));
  const int64_t start_ns = clock_->SteadyNs();
  ASSERT_TRUE(server->Step().ok());
  EXPECT_EQ(clock_->SteadyNs() - start_ns, 50 * kMs);
  EXPECT_EQ(server->engine->Stats().loading, 1);
  server->Finish();
  ExpectEqual(server->answers[{id, 0}], want, "whole");
  EXPECT_EQ(clock_->SteadyNs() - start_ns, 80 * kMs + 5 * kTokenNs);
  EXPECT_EQ(server->cache->loading_forwards, 0);
}

// A layer in the middle is damaged, or its tier dies: the request computes, and those that share
// its forward lose nothing but the step that is repeated.
TEST_F(EngineStorePace, ALayerThatDoesNotComeIsComputed) {
  const Tokens prompt = Text(50);
  const Answer want = Make()->Generate(prompt, Greedy(5));
  const Tokens other = Text(12, 7);
  const Answer want_other = Cold(other, Greedy(30));
  const std::pair<StatusCode, MissReason> cases[] = {
      {StatusCode::kTimeout, MissReason::kTimeout},
      {StatusCode::kCorrupt, MissReason::kCorrupt},
      {StatusCode::kIncompatible, MissReason::kIncompatible},
      {StatusCode::kNotFound, MissReason::kExpired},
      {StatusCode::kUnavailable, MissReason::kUnavailable},
      {StatusCode::kIoError, MissReason::kUnavailable},
      {StatusCode::kFull, MissReason::kNoRoom},
      {StatusCode::kOutOfPages, MissReason::kNoRoom},
      {StatusCode::kOutOfMemory, MissReason::kNoRoom},
      {StatusCode::kCancelled, MissReason::kCancelled}};
  for (const auto& [code, miss] : cases) {
    SCOPED_TRACE(StatusCodeName(code));
    store_->layer_ns = 10 * kMs;
    store_->layer_fault = [code = code](int64_t layer) {
      return layer == 0 ? Status() : Status(code, "injected");
    };
    const auto server = MakeMeasured();
    const int64_t first = server->Submit(prompt, Greedy(5));
    const int64_t second = server->Submit(other, Greedy(30));
    server->Finish();
    ExpectEqual(server->answers[{first, 0}], want, "computed");
    ExpectEqual(server->answers[{second, 0}], want_other, "beside it");
    EXPECT_EQ((server->answers[{first, 0}].cached_tokens), 0);
    EXPECT_EQ((server->answers[{first, 0}].miss), miss);
    EXPECT_EQ(server->cache->loading_forwards, 1);
    const EngineStats stats = server->engine->Stats();
    EXPECT_EQ(stats.misses[static_cast<size_t>(miss)], 1);
    EXPECT_EQ(stats.loaded_tokens[kDisk], 0);
    EXPECT_EQ(stats.layer_loads, 0);
    EXPECT_EQ(store_->live_fetches, 0);
    EXPECT_EQ(server->cache->out_of_pages, 0);
  }
}

TEST_F(EngineStore, ALayerThatIsLateCostsTheDeadlineAndNoMore) {
  const Tokens prompt = Text(50);
  const Answer want = Make()->Generate(prompt, Greedy(5));
  store_->layer_ns = 60 * kMs;
  const auto server = Make();
  const int64_t start_ns = clock_->SteadyNs();
  const Answer answer = server->Generate(prompt, Greedy(5));
  ExpectEqual(answer, want, "computed");
  EXPECT_EQ(server->cache->loading_forwards, 1);
  EXPECT_EQ(clock_->SteadyNs() - start_ns, 100 * kMs);
  EXPECT_EQ(answer.miss, MissReason::kTimeout);
  EXPECT_EQ(answer.cached_tokens, 0);
  EXPECT_DOUBLE_EQ(answer.load_seconds, 0.1);
}

// Two loads in one forward, of which one fails: the other one is taken in the step's second try.
TEST_F(EngineStore, ALoadThatFailsLeavesTheOtherOne) {
  const Tokens prompts[] = {Text(50), Text(70, 2)};
  const auto writer = Make();
  const Answer wants[] = {writer->Generate(prompts[0], Greedy(5)),
                          writer->Generate(prompts[1], Greedy(5))};
  for (const int64_t failing : {0, 1}) {
    SCOPED_TRACE(failing);
    store_->layer_ns = 10 * kMs;
    int64_t asked = 0;
    // The chunks of one of them, one after another.
    store_->is_damaged = [&] { return (asked++ < 6) == (failing == 0); };
    const auto server = Make({.chunk = 64});
    for (const Tokens& prompt : prompts) server->Submit(prompt, Greedy(5));
    server->Finish();
    for (int64_t id : {0, 1}) {
      const Answer& answer = server->answers[{id, 0}];
      ExpectEqual(answer, wants[id], "request " + std::to_string(id));
      EXPECT_EQ(answer.miss, id == failing ? MissReason::kCorrupt : MissReason::kNone);
      EXPECT_EQ(answer.cached_tokens, id == failing ? 0 : id == 0 ? 48 : 64);
    }
    const EngineStats stats = server->engine->Stats();
    EXPECT_EQ(stats.loads, 2);
    EXPECT_EQ(stats.layer_loads, 1);
  }
}

// What lies in RAM, before a chunk whose layers do not come, is not lost with them.
TEST_F(EngineStore, ChunksThatAreWholeAreKeptWhenTheOthersFail) {
  const Tokens prompt = Text(50);
  const Answer want = Make()->Generate(prompt, Greedy(5));
  store_->layer_ns = 10 * kMs;
  store_->whole_chunks = 2;
  store_->layer_fault = [](int64_t layer) {
    return layer == 0 ? Status() : Status(StatusCode::kUnavailable, "injected");
  };
  const auto server = Make();
  const Answer answer = server->Generate(prompt, Greedy(5));
  ExpectEqual(answer, want, "partly computed");
  EXPECT_EQ(server->cache->loading_forwards, 1);
  EXPECT_EQ(answer.cached.tiers[kDisk], 16);
  EXPECT_EQ(answer.miss, MissReason::kUnavailable);
  const EngineStats stats = server->engine->Stats();
  EXPECT_EQ(stats.cached_tokens, 16);
  EXPECT_EQ(stats.loaded_tokens[kDisk], 16);
  EXPECT_EQ(stats.loads, 1);
  EXPECT_EQ(std::accumulate(stats.misses.begin(), stats.misses.end(), int64_t{0}), 1);
}

// The cache has no page for the load against the scheduler's count: the younger request is
// preempted with its layers, and the last one computes without shared pages.
TEST_F(EngineStore, RequestsWithLayersArePreemptedAndGoOn) {
  const Tokens prompts[] = {Text(50), Text(70, 2)};
  const auto writer = Make();
  const Answer wants[] = {writer->Generate(prompts[0], Greedy(5)),
                          writer->Generate(prompts[1], Greedy(5))};
  for (const int64_t failures : {1, 2}) {
    SCOPED_TRACE(failures);
    store_->layer_ns = 10 * kMs;
    const auto server = Make({.chunk = 64});
    int64_t begun = 0;
    server->cache->fault = [&](std::string_view call) {
      const bool fails = call == "BeginLoadingForward" && begun++ < failures;
      return fails ? Status(StatusCode::kOutOfPages, "injected") : Status();
    };
    for (const Tokens& prompt : prompts) server->Submit(prompt, Greedy(5));
    server->Finish();
    for (int64_t id : {0, 1}) {
      ExpectEqual(server->answers[{id, 0}], wants[id], "request " + std::to_string(id));
    }
    EXPECT_EQ((server->answers[{0, 0}].cached_tokens), failures == 1 ? 48 : 0);
    EXPECT_GE(server->engine->Stats().preemptions, 1);
    EXPECT_EQ(store_->live_fetches, 0);
  }
}

// A forward that fails for another reason ends its first request; the second one still has its
// layers, and is cancelled with them, or goes on.
TEST_F(EngineStore, CancelsARunningRequestThatHasLayers) {
  const Tokens prompts[] = {Text(50), Text(70, 2)};
  const auto writer = Make();
  writer->Generate(prompts[0], Greedy(5));
  const Answer want = writer->Generate(prompts[1], Greedy(5));
  for (const bool cancels : {false, true}) {
    SCOPED_TRACE(cancels);
    store_->layer_ns = 10 * kMs;
    const auto server = Make({.chunk = 64});
    int64_t begun = 0;
    server->cache->fault = [&](std::string_view call) {
      const bool fails = call == "BeginLoadingForward" && begun++ < 2;
      return fails ? Status(StatusCode::kIoError, "injected") : Status();
    };
    for (const Tokens& prompt : prompts) server->Submit(prompt, Greedy(5));
    ASSERT_TRUE(server->Step().ok());
    EXPECT_EQ(begun, 2);
    EXPECT_EQ(store_->live_fetches, 1);
    if (cancels) {
      ASSERT_TRUE(server->engine->Cancel(1).ok());
      server->engine->CheckInvariants();
      EXPECT_EQ(store_->live_fetches, 0);
    }
    server->Finish();
    EXPECT_EQ((server->answers[{0, 0}].reason), FinishReason::kError);
    if (cancels) {
      EXPECT_EQ((server->answers[{1, 0}].reason), FinishReason::kCancelled);
      EXPECT_TRUE(server->cache->Empty());
    } else {
      ExpectEqual(server->answers[{1, 0}], want, "goes on");
      EXPECT_EQ((server->answers[{1, 0}].cached_tokens), 64);
    }
  }
}

// The sample that would take the layers is stopped before it did. The next one takes them, or, if
// memory has more for it than for the first one, which began at a border of chunks, it needs none.
TEST_F(EngineStore, LayersOfALeaderThatIsStopped) {
  const Tokens prompts[] = {Text(50), Text(70, 2)};
  SamplingOptions options = Greedy(5);
  options.n = 2;
  options.temperature = 1;
  const auto writer = Make();
  writer->Generate(prompts[0], Greedy(5));
  writer->Generate(prompts[1], options);
  for (const int64_t in_memory : {0, 21}) {
    SCOPED_TRACE(in_memory);
    store_->layer_ns = 10 * kMs;
    const auto server = Make({.chunk = 64}, false);
    if (in_memory > 0) {
      server->Generate(Tokens(prompts[1].begin(), prompts[1].begin() + in_memory), Greedy(1));
    }
    Attach(server.get());
    int64_t begun = 0;
    server->cache->fault = [&](std::string_view call) {
      const bool fails = call == "BeginLoadingForward" && begun++ < 2;
      return fails ? Status(StatusCode::kIoError, "injected") : Status();
    };
    server->Submit(prompts[0], Greedy(5));
    const int64_t id = server->Submit(prompts[1], options);
    ASSERT_TRUE(server->Step().ok());
    EXPECT_EQ(begun, 2);
    EXPECT_EQ(store_->live_fetches, 1);
    ASSERT_TRUE(server->engine->Stop(id, 0, 0).ok());
    ASSERT_TRUE(server->Step().ok());
    EXPECT_EQ(store_->live_fetches, 0);
    EXPECT_EQ(begun, in_memory == 0 ? 3 : 2);
    server->Finish();
    ExpectEqual(server->answers[{id, 1}], writer->answers[{1, 1}], "the second sample");
  }
}

// Preempted, its samples have answers of their own, and the layers are those of the first one's.
TEST_F(EngineStore, LayersOfALeadersAnswerAreNotTheNextOnes) {
  const Tokens prompt = Text(12, 3);
  SamplingOptions options = Greedy(20);
  options.n = 2;
  options.temperature = 1.5F;
  const Answer want = Alone({{prompt, options}}).at({0, 1});
  const auto server = Make({.chunk = 64, .prefix_cache = false});
  const int64_t oldest = server->Submit(Text(10, 4), Greedy(60));
  server->Submit(Text(50), Greedy(60));
  const int64_t id = server->Submit(prompt, options);
  while (server->answers[{id, 1}].tokens.size() < 14) ASSERT_TRUE(server->Step().ok());
  store_->layer_ns = 10 * kMs;
  int64_t plain = 0;
  int64_t loading = 0;
  server->cache->fault = [&](std::string_view call) {
    if (call == "BeginForward" && plain++ < 2) return Status(StatusCode::kOutOfPages, "injected");
    if (call == "BeginLoadingForward" && loading++ < 2)
      return Status(StatusCode::kIoError, "injected");
    return Status();
  };
  ASSERT_TRUE(server->Step().ok());  // without the younger two
  EXPECT_EQ(server->engine->Stats().preemptions, 2);
  ASSERT_TRUE(server->engine->Cancel(oldest).ok());
  ASSERT_TRUE(server->Step().ok());  // both load; the first one of them ends with the error
  EXPECT_EQ(loading, 2);
  EXPECT_EQ(store_->live_fetches, 1);
  const auto given = static_cast<int64_t>(server->answers[{id, 0}].tokens.size());
  ASSERT_TRUE(server->engine->Stop(id, 0, given).ok());
  ASSERT_TRUE(server->Step().ok());
  EXPECT_EQ(store_->live_fetches, 0);
  server->Finish();
  ExpectEqual(server->answers[{id, 1}], want, "the second sample");
}

// More is loaded than the cache has pages beside what is retained, for page sizes that divide
// chunks and that do not.
TEST_F(EngineStore, PagesOfLoadsAreFoundBeforeTheForwardBegins) {
  const Tokens prompt = Text(95);
  const Answer want = Make()->Generate(prompt, Greedy(10));
  store_->layer_ns = 10 * kMs;
  for (const int64_t page_size : {1, 4, 6, 16, 64}) {
    SCOPED_TRACE(page_size);
    const int64_t pages = (105 + page_size - 1) / page_size + 1;
    const auto server = Make({.pages = pages, .page_size = page_size});
    server->Generate(Text(90, 100 + static_cast<uint64_t>(page_size)), Greedy(10));  // fills it
    const Answer answer = server->Generate(prompt, Greedy(10));
    ExpectEqual(answer, want, "behind others");
    EXPECT_EQ(answer.cached_tokens, 88);
    EXPECT_EQ(server->cache->loading_forwards, 1);
    EXPECT_EQ(server->cache->out_of_pages, 0);
    EXPECT_EQ(server->engine->Stats().preemptions, 0);
  }
}

// Room for one of two at a time: the second one does not come in for pages that the first one's
// load is about to take.
TEST_F(EngineStore, PagesOfALoadAreNotGivenToOthers) {
  const Tokens prompts[] = {Text(90), Text(70, 2)};
  const auto writer = Make();
  const Answer wants[] = {writer->Generate(prompts[0], Greedy(10)),
                          writer->Generate(prompts[1], Greedy(10))};
  store_->layer_ns = 10 * kMs;
  for (const int64_t page_size : {1, 4, 6, 16}) {
    SCOPED_TRACE(page_size);
    const int64_t pages = (100 + page_size - 1) / page_size + 30 / page_size + 1;
    const auto server = Make({.pages = pages, .page_size = page_size, .chunk = 64});
    for (const Tokens& prompt : prompts) server->Submit(prompt, Greedy(10));
    server->Finish();
    for (int64_t id : {0, 1}) {
      ExpectEqual(server->answers[{id, 0}], wants[id], "request " + std::to_string(id));
      EXPECT_GE((server->answers[{id, 0}].cached_tokens), 64);
    }
    EXPECT_EQ(server->cache->loading_forwards, 1);
    EXPECT_EQ(server->cache->out_of_pages, 0);
    EXPECT_EQ(server->engine->Stats().preemptions, 0);
  }
}

// The store says that the layer is there, and its bytes are wrong.
TEST_F(EngineStore, ADamagedLayerIsNotTaken) {
  const Tokens prompt = Text(50);
  const Answer want = Make()->Generate(prompt, Greedy(5));
  int64_t asked = 0;
  store_->is_damaged = [&] { return asked++ == 3; };  // in its last layer
  store_->layer_ns = 10 * kMs;
  const auto server = Make();
  const Answer answer = server->Generate(prompt, Greedy(5));
  ExpectEqual(answer, want, "computed");
  EXPECT_EQ(server->cache->loading_forwards, 1);
  EXPECT_EQ(answer.cached_tokens, 24) << "of the chunks before it";
  EXPECT_EQ(answer.miss, MissReason::kCorrupt);
}

// Others that wait for the same beginning fork from the one that loads it.
TEST_F(EngineStore, OneLoadsLayersForAll) {
  const Tokens prompt = Text(64);
  Make()->Generate(prompt, Greedy(1));
  store_->layer_ns = 20 * kMs;
  const auto server = Make();
  std::vector<Answer> wants;
  for (uint64_t i = 0; i < 4; ++i) {
    Tokens text(prompt.begin(), prompt.begin() + 60);
    text.push_back(static_cast<int32_t>(i));
    wants.push_back(Cold(text, Greedy(3)));
    server->Submit(text, Greedy(3));
  }
  store_->served.clear();
  ASSERT_TRUE(server->engine->Cancel(3).ok());
  server->Finish();
  for (int64_t id = 0; id < 3; ++id) {
    ExpectEqual(server->answers[{id, 0}], wants[static_cast<size_t>(id)],
                "request " + std::to_string(id));
    EXPECT_GE((server->answers[{id, 0}].cached_tokens), 56);
  }
  EXPECT_EQ(server->cache->loading_forwards, 1);
  for (const auto& [key, count] : store_->served) EXPECT_EQ(count, 1);
}

// ---- Failures of the store

TEST_F(EngineStore, ADamagedChunkIsAMiss) {
  const Tokens prompt = Text(50);
  const Answer want = Make()->Generate(prompt, Greedy(5));
  int64_t asked = 0;
  store_->is_damaged = [&] { return asked++ == 3; };
  const auto server = Make();
  const Answer answer = server->Generate(prompt, Greedy(5));
  ExpectEqual(answer, want, "three chunks were sound");
  EXPECT_EQ(answer.cached_tokens, 24);
  EXPECT_EQ(answer.miss, MissReason::kCorrupt);
}

TEST_F(EngineStore, ErrorsOfTheStoreAreMisses) {
  const Tokens prompt = Text(50);
  const Answer want = Cold(prompt, Greedy(5));
  store_->put_fault = [] { return Status(StatusCode::kFull, "injected"); };
  const auto writer = Make();
  ExpectEqual(writer->Generate(prompt, Greedy(5)), want, "full");
  EXPECT_EQ(writer->engine->Stats().refused_chunks, 6);
  store_->put_fault = nullptr;
  Make()->Generate(prompt, Greedy(5));
  for (const StatusCode code : {StatusCode::kFull, StatusCode::kClosed, StatusCode::kOutOfMemory}) {
    store_->fetch_fault = [&] { return Status(code, "injected"); };
    const Answer answer = Make()->Generate(prompt, Greedy(5));
    ExpectEqual(answer, want, "no fetch");
    EXPECT_EQ(answer.miss,
              code == StatusCode::kClosed ? MissReason::kUnavailable : MissReason::kNoRoom);
  }
}

// ---- Storing

TEST_F(EngineStore, WhatIsPutAfterAStepIsBoundedAndTheRestFollows) {
  const auto server = Make({.chunk = 200});
  server->Submit(Text(160), Greedy(3));
  ASSERT_TRUE(server->Step().ok());
  EXPECT_EQ(store_->puts.size(), 20U);  // 20 chunks of 1 KiB are far below the bound
}

TEST_F(EngineStore, KVFromBeforeTheStoreIsPutWhenItIsGivenUp) {
  const Tokens prompt = Text(60);
  const auto server = Make({.pages = 32}, false);
  const Answer want = server->Generate(prompt, Greedy(4));
  Attach(server.get());
  EXPECT_EQ(store_->puts.size(), 0U);
  server->Generate(Text(80, 5), Greedy(40));  // needs its pages
  EXPECT_GT(server->engine->Stats().stored_chunks, 7);
  const Answer again = server->Generate(prompt, Greedy(4));
  ExpectEqual(again, want, "again");
  EXPECT_GE(again.cached_tokens, 56);
  EXPECT_GT(again.cached.tiers[kDisk], 0);
}

TEST_F(EngineStore, FlushPutsAllThatIsInMemory) {
  const Tokens prompt = Text(60);
  const auto server = Make({}, false);
  EXPECT_TRUE(server->engine->FlushStore(10).ok());
  server->Generate(prompt, Greedy(4));
  server->Submit(Text(40, 9), Greedy(20));
  ASSERT_TRUE(server->Step().ok());
  ASSERT_TRUE(server->Step().ok());
  Attach(server.get());
  int64_t refusals = 3;  // what a full queue refuses is offered again
  store_->put_fault = [&] {
    return refusals-- > 0 ? Status(StatusCode::kFull, "injected") : Status();
  };
  EXPECT_TRUE(server->engine->FlushStore(1000).ok());
  EXPECT_EQ(store_->flushes, 2);
  EXPECT_EQ(store_->chunks.size(), 7U + 5U);
  server->Finish();
  EXPECT_EQ(server->engine->FlushStore(-1).code(), StatusCode::kBadArgument);
}

TEST_F(EngineStore, AReaderPutsNothing) {
  options_.write = false;
  const auto server = Make();
  server->Generate(Text(50), Greedy(5));
  EXPECT_TRUE(server->engine->FlushStore(0).ok());
  EXPECT_TRUE(store_->puts.empty());
}

TEST_F(EngineStore, WithoutAPrefixCacheChunksComeAndGoAsWell) {
  const Tokens prompt = Text(50);
  const Sizes sizes{.chunk = 16, .prefix_cache = false};
  const Answer want = Make(sizes)->Generate(prompt, Greedy(5));
  const auto server = Make(sizes);
  const Answer answer = server->Generate(prompt, Greedy(5));
  ExpectEqual(answer, want, "again");
  EXPECT_EQ(answer.cached_tokens, 48);
  EXPECT_TRUE(server->cache->Empty());
}

TEST_F(EngineStore, TheStoreHearsHowFastPromptsAreComputed) {
  const auto server = Make();
  server->model->fault = [&](std::span<const int32_t> tokens) {
    clock_->Advance(static_cast<int64_t>(tokens.size()) * 2000);
    return Status();
  };
  server->Generate(Text(50), Greedy(2));
  EXPECT_EQ(store_->compute_seconds_per_token, 0) << "not measured yet";
  server->Generate(Text(50, 2), Greedy(2));
  EXPECT_NEAR(store_->compute_seconds_per_token, 2e-6, 1e-9);
  EXPECT_NEAR(server->engine->Stats().compute_seconds_per_token, 2e-6, 1e-9);
  options_.load_always = true;
  const auto eager = Make();
  eager->model->fault = server->model->fault;
  eager->Generate(Text(50, 3), Greedy(2));
  eager->Generate(Text(50, 4), Greedy(2));
  EXPECT_EQ(store_->compute_seconds_per_token, 0);
}

TEST_F(EngineStore, SaysWhatIsWrongWithItsArguments) {
  const auto server = Make({}, false);
  const auto attach = [&](std::shared_ptr<ChunkStore> store, const StoreUseOptions& options) {
    return server->engine->AttachStore(std::move(store), identity_, options);
  };
  EXPECT_EQ(attach(nullptr, options_).code(), StatusCode::kBadArgument);
  StoreUseOptions bad = options_;
  bad.chunk_tokens = -1;
  EXPECT_EQ(attach(store_, bad).code(), StatusCode::kBadArgument);
  bad = options_;
  bad.load_timeout_ms = 0;
  const Status status = attach(store_, bad);
  EXPECT_EQ(status.code(), StatusCode::kBadArgument);
  EXPECT_NE(status.ToString().find("load_timeout_ms is 0"), std::string::npos);
  bad = options_;
  bad.mac_key = "short";
  EXPECT_EQ(attach(store_, bad).code(), StatusCode::kBadArgument);
  EXPECT_TRUE(attach(store_, options_).ok());
  EXPECT_EQ(attach(store_, options_).code(), StatusCode::kBadState);
}

// ---- Everything at once

// Two engines with few pages share a store that is slow, loses, damages and refuses; requests are
// cancelled and preempted, and the engines are replaced by new ones.
TEST_F(EngineStore, NothingThatTheStoreDoesCanBeSeenInAnAnswer) {
  std::vector<Job> jobs = RandomJobs(20, 31);
  int64_t needed = 0;
  for (size_t i = 0; i < jobs.size(); ++i) {
    jobs[i].options.cache_salt = std::string(i % 3, 's');
    needed = std::max(needed, PagesForRequest(static_cast<int64_t>(jobs[i].prompt.size()),
                                              jobs[i].options.max_tokens, jobs[i].options.n, 4));
  }
  const Answers want = Alone(jobs);
  int64_t loaded = 0;
  int64_t preemptions = 0;
  int64_t loading_forwards = 0;
  int64_t corrupt = 0;
  int64_t timeouts = 0;
  for (uint64_t seed = 0; seed < 24; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    RandomSequence random(seed, 5);
    store_->chunks.clear();
    store_->chunk_ns = random.Below(3) * 10 * kMs;
    store_->layer_ns = seed % 2 == 0 ? 0 : (1 + random.Below(4)) * 10 * kMs;
    store_->layer_fault = [&](int64_t) {
      return random.Below(40) == 0 ? Status(StatusCode::kUnavailable, "injected") : Status();
    };
    store_->is_damaged = [&] { return random.Below(20) == 0; };
    store_->fetch_fault = [&] {
      return random.Below(15) == 0 ? Status(StatusCode::kFull, "injected") : Status();
    };
    store_->put_fault = [&] {
      return random.Below(10) == 0 ? Status(StatusCode::kFull, "injected") : Status();
    };
    store_->has_ram = seed % 3 == 0;
    options_.chunk_tokens = 1 + random.Below(12);
    options_.tails = random.Below(2) == 0;
    const Sizes sizes{.pages = needed + random.Below(12),
                      .chunk = 4 + random.Below(40),
                      .prefix_cache = random.Below(4) != 0};
    for (int generation = 0; generation < 2; ++generation) {
      const std::unique_ptr<Server> servers[] = {Make(sizes), Make(sizes)};
      for (const auto& server : servers) {
        server->model->fault = [&](std::span<const int32_t> token_ids) {
          if (seed % 4 == 1) clock_->Advance(static_cast<int64_t>(token_ids.size()) * kMs);
          return Status();
        };
      }
      std::vector<size_t> job_of[2];
      for (int moves = 0;; ++moves) {
        ASSERT_LT(moves, 50'000) << "no progress";
        const int64_t which = random.Below(2);
        Server& server = *servers[which];
        std::vector<size_t>& ids = job_of[which];
        const int64_t move = random.Below(12);
        const bool all_in = ids.size() >= jobs.size();
        if (all_in && server.engine->Idle() && servers[1 - which]->engine->Idle() &&
            job_of[1 - which].size() >= jobs.size()) {
          break;
        }
        if (move < 3 && !all_in) {
          ids.push_back(static_cast<size_t>(random.Below(static_cast<int64_t>(jobs.size()))));
          const Job& job = jobs[ids.back()];
          ASSERT_EQ(server.Submit(job.prompt, job.options), static_cast<int64_t>(ids.size()) - 1);
        } else if (move == 3 && !ids.empty() && random.Below(6) == 0) {
          const Status status =
              server.engine->Cancel(random.Below(static_cast<int64_t>(ids.size())));
          EXPECT_TRUE(status.ok() || status.code() == StatusCode::kUnknownSequence);
          server.engine->CheckInvariants();
        } else if (move == 4) {
          clock_->Advance(random.Below(20) * kMs);
        } else {
          const Status status = server.Step();
          ASSERT_TRUE(status.ok()) << status.ToString();
        }
      }
      for (int which = 0; which < 2; ++which) {
        for (auto& [key, got] : servers[which]->answers) {
          if (got.reason == FinishReason::kCancelled) continue;
          const auto job = static_cast<int64_t>(job_of[which][static_cast<size_t>(key.first)]);
          ExpectEqual(got, want.at({job, key.second}), "job " + std::to_string(job));
        }
        const EngineStats stats = servers[which]->engine->Stats();
        EXPECT_EQ(stats.pages_in_use, stats.retained_pages);
        loaded += std::accumulate(stats.loaded_tokens.begin(), stats.loaded_tokens.end(), 0L);
        preemptions += stats.preemptions;
        loading_forwards += servers[which]->cache->loading_forwards;
        corrupt += stats.misses[static_cast<size_t>(MissReason::kCorrupt)];
        timeouts += stats.misses[static_cast<size_t>(MissReason::kTimeout)];
      }
      ASSERT_FALSE(HasFailure());
    }
  }
  EXPECT_GT(loaded, 2000);
  EXPECT_GT(preemptions, 20);
  EXPECT_GT(loading_forwards, 50);
  EXPECT_GT(corrupt, 10);
  EXPECT_GT(timeouts, 10);
  EXPECT_GT(store_->prefetches, 50);
}

// Every call to cache, model and store fails once while chunks are loaded and stored.
TEST_F(EngineStore, RecoversFromAnErrorAtEveryCall) {
  std::vector<Job> jobs = RandomJobs(6, 20);
  for (Job& job : jobs) job.prompt.insert(job.prompt.begin(), 40, 9);
  const Answers want = Alone(jobs);
  options_.chunk_tokens = 5;
  {
    const auto writer = Make();
    for (const Job& job : jobs) writer->Submit(job.prompt, job.options);
    writer->Finish();
  }
  const auto full = store_->chunks;
  const std::pair<StatusCode, int64_t> runs[] = {{StatusCode::kOutOfMemory, 0},
                                                 {StatusCode::kOutOfPages, 0},
                                                 {StatusCode::kOutOfMemory, 10 * kMs},
                                                 {StatusCode::kOutOfPages, 10 * kMs}};
  for (const auto& run : runs) {
    const StatusCode code = run.first;
    store_->layer_ns = run.second;
    for (int64_t fail_at = 0;; fail_at += 1 + fail_at / 20) {
      store_->chunks = full;
      const auto server = Make({.pages = 60, .chunk = 16});
      int64_t calls = 0;
      const auto fault = [&](std::string_view call) {
        if (call == "PopN" && code == StatusCode::kOutOfPages) return Status();
        return calls++ == fail_at ? Status(code, "injected") : Status();
      };
      server->cache->fault = fault;
      server->model->fault = [&](std::span<const int32_t>) { return fault("Forward"); };
      store_->fetch_fault = [&] { return fault("Fetch"); };
      store_->put_fault = [&] { return fault("Put"); };
      for (const Job& job : jobs) server->Submit(job.prompt, job.options);
      for (int step = 0; !server->engine->Idle() && step < 5000; ++step) {
        const Status status = server->Step();
        EXPECT_TRUE(status.ok() || status.code() == code) << status.ToString();
      }
      ASSERT_TRUE(server->engine->Idle()) << "call " << fail_at;
      std::set<int64_t> failed;
      for (const auto& [key, answer] : want) {
        const Answer& got = server->answers[key];
        if (got.reason == FinishReason::kError) {
          failed.insert(key.first);
          EXPECT_NE(got.error.find("injected"), std::string::npos) << got.error;
        } else {
          ExpectEqual(got, answer, "call " + std::to_string(fail_at));
        }
      }
      EXPECT_LE(failed.size(), 1U) << "call " << fail_at;
      store_->fetch_fault = nullptr;
      store_->put_fault = nullptr;
      if (calls <= fail_at) break;
    }
  }
}

}  // namespace
}  // namespace quire
