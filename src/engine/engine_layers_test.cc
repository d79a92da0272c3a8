// Stored prefixes of models whose sequences cannot be cut anywhere, taken layer by layer in the
// forward behind them: windows of layers, recurrent layers, and both. What does not come, or comes
// late or damaged, costs its deadline and no bit. The plain case is in engine_store_test.cc.
#include <gtest/gtest.h>

#include <algorithm>
#include <ostream>

#include "engine/testing/test_store.h"

namespace quire {
namespace {

struct Kind {
  const char* name;
  int64_t window;
  bool recurrent;

  // As a chunk has them: attention, then the recurrent ones.
  int64_t layers() const { return FakeModel::kLayers + (recurrent ? 2 : 0); }
  // Without which no forward begins.
  int64_t first_layer() const { return recurrent ? FakeModel::kLayers : 0; }
};
void PrintTo(const Kind& kind, std::ostream* out) { *out << kind.name; }

class EngineLayers : public EngineStore, public testing::WithParamInterface<Kind> {
 protected:
  std::unique_ptr<Server> MakeOf(Sizes sizes = {}, bool attach = true) {
    sizes.layer_window = GetParam().window;
    sizes.recurrent = GetParam().recurrent;
    return Make(sizes, attach);
  }
  // The prompt's answer, whose KV the store has from then on.
  Answer Write(const Tokens& prompt, const SamplingOptions& options) {
    const auto writer = MakeOf();
    const Answer answer = writer->Generate(prompt, options);
    EXPECT_EQ(writer->engine->Stats().refused_chunks, 0);
    ExpectEqual(answer, MakeOf({.prefix_cache = false}, false)->Generate(prompt, options), "cold");
    return answer;
  }
  static constexpr int64_t kLayerNs = 10 * kMs;
};

INSTANTIATE_TEST_SUITE_P(Kinds, EngineLayers,
                         testing::Values(Kind{"Windows", 6, false}, Kind{"Recurrent", 0, true},
                                         Kind{"Both", 6, true}),
                         [](const auto& kind) { return std::string(kind.param.name); });

TEST_P(EngineLayers, AForwardTakesThemWhenItComesToThem) {
  const Kind kind = GetParam();
  for (const int64_t length : {50, 49, 20}) {
    const Tokens prompt = Text(length, static_cast<uint64_t>(length));
    const Answer want = Write(prompt, Greedy(5));
    for (const int64_t page_size : {1, 4, 16}) {
      SCOPED_TRACE(page_size);
      store_->layer_ns = kLayerNs;
      const auto server = MakeOf({.page_size = page_size});
      const int64_t start_ns = clock_->SteadyNs();
      int64_t begun_ns = -1;
      server->model->fault = [&](std::span<const int32_t>) {
        if (begun_ns < 0) begun_ns = clock_->SteadyNs() - start_ns;
        return Status();
      };
      const Answer answer = server->Generate(prompt, Greedy(5));
      ExpectEqual(answer, want, "by layers");
      EXPECT_EQ(begun_ns, (kind.first_layer() + 1) * kLayerNs) << "not before, and no later";
      EXPECT_EQ(clock_->SteadyNs() - start_ns, kind.layers() * kLayerNs);
      EXPECT_EQ(server->cache->loading_forwards, 1);
      EXPECT_EQ(answer.cached.tiers[kDisk], (length - 1) / 8 * 8);
      EXPECT_EQ(answer.miss, MissReason::kNone);
      const EngineStats stats = server->engine->Stats();
      EXPECT_EQ(stats.layer_loads, 1);
      EXPECT_EQ(stats.loads, 1);
      EXPECT_EQ(stats.stored_chunks, 0) << "all of it was there";
      EXPECT_EQ(server->engine->short_counts(), 0);
    }
  }
  EXPECT_EQ(store_->cancelled, 0);
}

// 4 ms of computing before each attention layer.
TEST_P(EngineLayers, WhatIsComputedMeanwhileIsTold) {
  const Tokens prompt = Text(50);
  Write(prompt, Greedy(3));
  store_->layer_ns = kLayerNs;
  const auto server = MakeOf();
  server->cache->fault = [&](std::string_view call) {
    if (call == "AttentionWithFusedQKV" && server->engine->Stats().layer_loads == 0)
      clock_->Advance(4 * kMs);
    return Status();
  };
  server->Generate(prompt, Greedy(3));
  EXPECT_EQ(server->engine->Stats().layer_loads, 1);
  // With recurrent layers these come last and are needed first: nothing is left to be overlapped
  // but what is between them.
  if (!GetParam().recurrent) {
    EXPECT_DOUBLE_EQ(server->engine->Stats().overlap_seconds, 0.004);
  }
}

// The requests go on in company: of sequences behind a fork, with a cancelled one, in batches.
TEST_P(EngineLayers, SeveralAtATimeAreAsEachAlone) {
  std::vector<Tokens> prompts = {Text(50), Text(70, 2), Text(33, 3)};
  for (const Tokens& prompt : prompts) Write(prompt, Greedy(8));
  Tokens parted(prompts[1].begin(), prompts[1].begin() + 40);
  const Tokens own = Text(9, 4);
  parted.insert(parted.end(), own.begin(), own.end());
  prompts.push_back(parted);
  store_->layer_ns = kLayerNs;
  const auto server = MakeOf({.chunk = 64});
  for (const Tokens& prompt : prompts) {
    SamplingOptions options = Greedy(8);
    options.n = 2;
    options.temperature = 1;
    server->Submit(prompt, options);
  }
  const int64_t gone = server->Submit(prompts[0], Greedy(30, "other"));
  ASSERT_TRUE(server->Step().ok());
  ASSERT_TRUE(server->engine->Cancel(gone).ok());
  server->Finish();
  for (size_t i = 0; i < prompts.size(); ++i) {
    SamplingOptions options = Greedy(8);
    options.n = 2;
    options.temperature = 1;
    const auto alone = MakeOf({.prefix_cache = false}, false);
    alone->Generate(prompts[i], options);
    for (const int64_t sample : {0, 1}) {
      ExpectEqual(server->answers[{static_cast<int64_t>(i), sample}], alone->answers[{0, sample}],
                  std::to_string(i) + ", sample " + std::to_string(sample));
    }
    EXPECT_GE((server->answers[{static_cast<int64_t>(i), 0}].cached_tokens), i < 3 ? 32 : 40);
  }
  EXPECT_GE(server->engine->Stats().layer_loads, 1);
}

// Each layer in turn does not come: the request computes.
TEST_P(EngineLayers, ALayerThatDoesNotComeIsComputed) {
  const Tokens prompt = Text(50);
  const Answer want = Write(prompt, Greedy(5));
  const std::pair<StatusCode, MissReason> cases[] = {
      {StatusCode::kTimeout, MissReason::kTimeout},
      {StatusCode::kCorrupt, MissReason::kCorrupt},
      {StatusCode::kUnavailable, MissReason::kUnavailable},
      {StatusCode::kOutOfMemory, MissReason::kNoRoom}};
  for (int64_t failing = GetParam().first_layer() + 1; failing < GetParam().layers(); ++failing) {
    for (const auto& [code, miss] : cases) {
      SCOPED_TRACE(std::string(StatusCodeName(code)) + " of layer " + std::to_string(failing));
      store_->layer_ns = kLayerNs;
      store_->layer_fault = [code = code, failing](int64_t layer) {
        return layer < failing ? Status() : Status(code, "injected");
      };
      const auto server = MakeOf();
      const Answer answer = server->Generate(prompt, Greedy(5));
      ExpectEqual(answer, want, "computed");
      EXPECT_EQ(server->cache->loading_forwards, 1);
      EXPECT_EQ(answer.miss, miss);
      EXPECT_EQ(answer.cached_tokens, 0);
      EXPECT_EQ(server->engine->Stats().layer_loads, 0);
      EXPECT_EQ(store_->live_fetches, 0);
      EXPECT_EQ(server->cache->out_of_pages, 0);
    }
  }
}

TEST_P(EngineLayers, ALayerThatIsLateCostsTheDeadlineAndNoMore) {
  const Tokens prompt = Text(50);
  const Answer want = Write(prompt, Greedy(5));
  options_.load_timeout_ms = 100;
  store_->layer_ns = 100 * kMs / GetParam().layers() + kMs;  // the last one is late
  const auto server = MakeOf();
  const int64_t start_ns = clock_->SteadyNs();
  const Answer answer = server->Generate(prompt, Greedy(5));
  ExpectEqual(answer, want, "computed");
  EXPECT_EQ(server->cache->loading_forwards, 1);
  EXPECT_EQ(clock_->SteadyNs() - start_ns, 100 * kMs);
  EXPECT_EQ(answer.miss, MissReason::kTimeout);
  EXPECT_EQ(answer.cached_tokens, 0);
}

// The store says that the layer is there, and its bytes are wrong.
TEST_P(EngineLayers, ADamagedLayerIsNotTaken) {
  const Tokens prompt = Text(50);
  const Answer want = Write(prompt, Greedy(5));
  store_->layer_ns = kLayerNs;
  for (const int64_t damaged : {0, 3, 5}) {
    SCOPED_TRACE(damaged);
    int64_t asked = 0;
    store_->is_damaged = [&] { return asked++ == damaged; };  // in its last layer
    const auto server = MakeOf();
    const Answer answer = server->Generate(prompt, Greedy(5));
    ExpectEqual(answer, want, "whatever was taken");
    // Only what is seen at the end is asked for of earlier chunks: no states, and of windows the
    // rows that reach there.
    const bool is_needed = damaged == 5;
    EXPECT_EQ(answer.cached_tokens, is_needed ? 40 : 48) << "the border before it";
    EXPECT_EQ(answer.miss, is_needed ? MissReason::kCorrupt : MissReason::kNone);
  }
}

// What lies in RAM, before a chunk whose layers do not come, is not lost with them.
TEST_P(EngineLayers, ChunksThatAreWholeAreKeptWhenTheOthersFail) {
  const Tokens prompt = Text(50);
  const Answer want = Write(prompt, Greedy(5));
  store_->layer_ns = kLayerNs;
  store_->whole_chunks = 2;
  store_->layer_fault = [](int64_t layer) {
    return layer <= GetParam().first_layer() ? Status()
                                             : Status(StatusCode::kUnavailable, "injected");
  };
  const auto server = MakeOf();
  const Answer answer = server->Generate(prompt, Greedy(5));
  ExpectEqual(answer, want, "partly computed");
  EXPECT_EQ(server->cache->loading_forwards, 1);
  EXPECT_EQ(answer.cached.tiers[kDisk], 16);
  EXPECT_EQ(answer.miss, MissReason::kUnavailable);
}

// The cache has no page for the load against the scheduler's count, or the forward fails for
// another reason and what has its layers still is cancelled with them.
TEST_P(EngineLayers, PreemptedAndCancelledRequestsGiveTheirLayersUp) {
  const Tokens prompts[] = {Text(50), Text(70, 2)};
  const Answer wants[] = {Write(prompts[0], Greedy(5)), Write(prompts[1], Greedy(5))};
  for (const StatusCode code : {StatusCode::kOutOfPages, StatusCode::kIoError}) {
    SCOPED_TRACE(StatusCodeName(code));
    store_->layer_ns = kLayerNs;
    const auto server = MakeOf({.chunk = 64});
    int64_t begun = 0;
    server->cache->fault = [&](std::string_view call) {
      const bool fails = call == "BeginLoadingForward" && begun++ < 2;
      return fails ? Status(code, "injected") : Status();
    };
    for (const Tokens& prompt : prompts) server->Submit(prompt, Greedy(5));
    if (code == StatusCode::kIoError) {
      ASSERT_TRUE(server->Step().ok());
      EXPECT_EQ(store_->live_fetches, 1);
      ASSERT_TRUE(server->engine->Cancel(1).ok());
      server->engine->CheckInvariants();
      EXPECT_EQ(store_->live_fetches, 0);
    }
    server->Finish();
    for (int64_t id : {0, 1}) {
      const Answer& answer = server->answers[{id, 0}];
      if (code == StatusCode::kOutOfPages) {
        ExpectEqual(answer, wants[id], "request " + std::to_string(id));
      } else {
        EXPECT_EQ(answer.reason, id == 0 ? FinishReason::kError : FinishReason::kCancelled);
      }
    }
    EXPECT_EQ(store_->live_fetches, 0);
  }
}

// With windows alone a prompt is computed in as many forwards as without a store, and every chunk
// of it is stored; states exist only where a forward ended.
TEST_P(EngineLayers, PromptsOfWindowsDoNotStopForTheStore) {
  const Tokens prompt = Text(75);
  int64_t forwards[2] = {};
  for (const bool attach : {false, true}) {
    const auto server = MakeOf({.chunk = 32}, attach);
    server->model->fault = [&](std::span<const int32_t>) {
      ++forwards[attach ? 1 : 0];
      return Status();
    };
    server->Generate(prompt, Greedy(1));
    EXPECT_EQ(server->engine->Stats().stored_chunks, attach ? 9 : 0);
  }
  EXPECT_EQ(forwards[0], 3);
  EXPECT_EQ(forwards[1], GetParam().recurrent ? 10 : 3);
  const auto reader = MakeOf();
  const Answer answer = reader->Generate(prompt, Greedy(5));
  EXPECT_EQ(answer.cached_tokens, 72);
  ExpectEqual(answer, MakeOf({.prefix_cache = false}, false)->Generate(prompt, Greedy(5)), "");
}

}  // namespace
}  // namespace quire
