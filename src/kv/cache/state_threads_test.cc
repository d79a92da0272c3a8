// Const queries from several threads: beside each other their answers are those that one thread
// gets, and beside a thread that changes the state each is that of some moment. For the thread
// sanitizer above all.
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "kv/testing/kv_test_forward.h"
#include "kv/testing/recurrent_test_forward.h"
#include "quire/composite_state.h"
#include "quire/kv_transfer.h"
#include "quire/rnn_state.h"

namespace quire {
namespace {

using Ids = std::vector<int64_t>;
using Tokens = std::vector<uint64_t>;
// A query's answers as numbers.
using Answers = std::vector<int64_t>;

constexpr int kThreads = 4;
constexpr int kRounds = 200;
constexpr int64_t kCapacity = 200;

Tokens Text(int64_t count) {
  Tokens tokens;
  for (int64_t i = 0; i < count; ++i) tokens.push_back(static_cast<uint64_t>(i));
  return tokens;
}

void Add(const Result<int64_t>& result, Answers* answers) {
  answers->push_back(result.ok() ? *result : -static_cast<int64_t>(result.status().code()));
}

// On several threads at once, again and again.
void ExpectSameOnThreads(const std::function<Answers()>& ask) {
  const Answers alone = ask();
  std::atomic<int> different = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&] {
      for (int round = 0; round < kRounds; ++round) different += ask() != alone;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(different.load(), 0);
}

// `ask` on several threads, until `change` has come to its end on this one.
void AskBeside(const std::function<void()>& ask, const std::function<void()>& change) {
  std::atomic<bool> done = false;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads - 1; ++t) {
    threads.emplace_back([&] {
      while (!done.load()) ask();
    });
  }
  change();
  done.store(true);
  for (std::thread& thread : threads) thread.join();
}

// ---------------------------------------------------------------------- AttentionKVCache

std::unique_ptr<AttentionKVCache> MakeCache() {
  const auto options =
      TestCacheOptions({{2, 1, 4, 4, DType::kF32}, {2, 1, 4, 4, DType::kF32, {}, 4}},
                       {.token_capacity = kCapacity, .prefill_chunk_size = 16, .page_size = 4});
  auto cache = MakeTestCache(options);
  for (const int64_t id : {0, 1}) {
    EXPECT_TRUE(cache->AddSequence(id).ok());
    EXPECT_TRUE(RunForward(*cache, options.layers, Ids{id}, {Text(9)}).ok());
  }
  EXPECT_TRUE(cache->ForkSequence(0, 2, 7).ok());
  return cache;
}

Answers CountersOf(const AttentionKVCache& cache) {
  const PageCounts pages = cache.page_counts();
  EXPECT_EQ(pages.free + pages.exclusive + pages.shared + pages.retained_only, pages.total);
  Answers answers{cache.Empty(),
                  cache.GetNumAvailablePages(),
                  cache.GetTotalSequenceLength(),
                  cache.GetDistinctTokenCount(),
                  cache.sequence_count(),
                  cache.retained_sequence_count(),
                  cache.pages_in_use(),
                  cache.pages_allocated(),
                  cache.HasSequence(1),
                  cache.CanFork(0, 3),
                  pages.free,
                  pages.exclusive,
                  pages.shared};
  Add(cache.GetSequenceLength(2), &answers);
  Add(cache.GetTreeSize(2), &answers);
  Add(cache.HeldTokens(0), &answers);
  answers.push_back(cache.SlidRange(0).ok());
  answers.push_back(cache.GetWindows(0).ok());
  answers.push_back(cache.UsesLongRope(0).ok());
  Add(cache.PagesNeeded(Ids{0, 1}, Ids{3, 9}), &answers);
  Add(cache.PagesNeeded(Ids{2}, Ids{1}), &answers);
  Add(cache.PagesNeededForTree(Ids{1, 2}, Ids{2, 2}, Ids{-1, 0, -1, -1}), &answers);
  return answers;
}

TEST(StateThreads, QueriesOfAnIdleCache) {
  const auto cache = MakeCache();
  const uint64_t digest = cache->StateDigest();
  ExpectSameOnThreads([&] {
    Answers answers = CountersOf(*cache);
    answers.push_back(static_cast<int64_t>(cache->StateDigest()));
    answers.push_back(cache->CheckInvariants().ok());
    return answers;
  });
  EXPECT_EQ(cache->StateDigest(), digest);
}

TEST(StateThreads, QueriesBesideForwards) {
  const auto cache = MakeCache();
  const std::vector<AttentionLayerSpec> layers = cache->options().layers;
  AskBeside([&] { CountersOf(*cache); },
            [&] {
              for (int round = 0; round < kRounds / 4; ++round) {
                ASSERT_TRUE(RunForward(*cache, layers, Ids{0, 1}, {Text(2), Text(1)}).ok());
                ASSERT_TRUE(cache->BeginTreeForward(Ids{2}, Ids{2}, Ids{-1, -1}).ok());
                ASSERT_TRUE(FinishForward(*cache, layers, Text(2)).ok());
                ASSERT_TRUE(cache->CommitAcceptedTokenTreeNodes(Ids{2}, Ids{-1}).ok());
                ASSERT_TRUE(cache->ForkSequence(0, 3, -1).ok());
                ASSERT_TRUE(cache->SetRetained(3, true).ok());
                ASSERT_TRUE(cache->RemoveSequence(3).ok());
                ASSERT_TRUE(cache->PopN(0, 2).ok());
              }
            });
  const Status sound = cache->CheckInvariants();
  EXPECT_TRUE(sound.ok()) << sound.ToString();
}

// ---------------------------------------------------------------------- recurrent states

std::shared_ptr<RNNState> MakeRNNState() {
  RNNStateOptions options;
  options.num_layers = 1;
  options.states = {{.shape = {2}}};
  options.max_num_sequences = 8;
  options.max_history = 4;
  options.max_checkpoints = 4;
  options.max_retained_slots = 8;
  return *RNNState::Create(options);
}

std::shared_ptr<RecurrentCache> MakeRecurrentCache() {
  RecurrentCacheOptions options;
  options.layers = AllRecurrentKinds();
  options.max_num_sequences = 8;
  options.prefill_chunk_size = 64;
  options.max_tree_slots = 8;
  options.max_retained_slots = 8;
  options.runner = std::make_shared<SerialRunner>();
  return *RecurrentCache::Create(options);
}

Answers CountersOf(const RecurrentState& state) {
  const StateSlotCounts slots = state.slot_counts();
  Answers answers{state.HasSequence(0), state.sequence_count(), state.retained_sequence_count(),
                  slots.free, state.storage_bytes()};
  Add(state.GetSequenceLength(0), &answers);
  Add(state.GetTreeSize(0), &answers);
  Add(state.ReplayStart(0, 0), &answers);
  return answers;
}

void ExpectIdleAnswers(const RecurrentState& state) {
  ExpectSameOnThreads([&] {
    Answers answers = CountersOf(state);
    answers.push_back(static_cast<int64_t>(state.StateDigest()));
    answers.push_back(state.CheckInvariants().ok());
    return answers;
  });
}

void ForkAndPop(RecurrentState& state, int64_t popped) {
  ASSERT_TRUE(state.ForkSequence(0, 1).ok());
  ASSERT_TRUE(state.SetRetained(1, true).ok());
  ASSERT_TRUE(state.RemoveSequence(1).ok());
  ASSERT_TRUE(state.PopN(0, popped).ok());
}

TEST(StateThreads, QueriesOfAnRNNState) {
  const auto state = MakeRNNState();
  ASSERT_TRUE(state->AddSequence(0).ok());
  ExpectIdleAnswers(*state);
  const TestTensor row(DType::kF32, {1, 2});
  AskBeside([&] { CountersOf(*state); },
            [&] {
              for (int round = 0; round < kRounds; ++round) {
                ASSERT_TRUE(state->BeginForward(Ids{0}, Ids{2}).ok());
                ASSERT_TRUE(state->Get(0, 0, row.view()).ok());
                ASSERT_TRUE(state->SetAt(0, 0, Ids{0}, row.view()).ok());
                ASSERT_TRUE(state->Set(0, 0, row.view()).ok());
                ASSERT_TRUE(state->EndForward().ok());
                ASSERT_NO_FATAL_FAILURE(ForkAndPop(*state, 2));
              }
            });
  EXPECT_TRUE(state->CheckInvariants().ok());
}

TEST(StateThreads, QueriesOfARecurrentCache) {
  const auto cache = MakeRecurrentCache();
  ASSERT_TRUE(cache->AddSequence(0).ok());
  ExpectIdleAnswers(*cache);
  AskBeside([&] { CountersOf(*cache); },
            [&] {
              for (int round = 0; round < kRounds / 4; ++round) {
                ASSERT_TRUE(RunRecurrentForward(*cache, Ids{0}, {Text(2)}).ok());
                ASSERT_NO_FATAL_FAILURE(ForkAndPop(*cache, 1));
              }
            });
  EXPECT_TRUE(cache->CheckInvariants().ok());
}

TEST(StateThreads, QueriesOfACompositeState) {
  const std::shared_ptr<AttentionKVCache> attention =
      MakeTestCache(TestCacheOptions({{2, 1, 4, 4, DType::kF32}}, {.token_capacity = kCapacity}));
  const auto cache = MakeRecurrentCache();
  const auto state = *CompositeState::Create({.attention = attention, .recurrent = {cache}});
  ASSERT_TRUE(state->AddSequence(0).ok());
  const auto ask = [&] {
    Answers answers{state->HasSequence(0), state->sequence_count()};
    Add(state->GetSequenceLength(0), &answers);
    Add(state->GetTreeSize(0), &answers);
    Add(state->ReplayStart(0, 0), &answers);
    return answers;
  };
  ExpectSameOnThreads([&] {
    Answers answers = ask();
    answers.push_back(static_cast<int64_t>(state->StateDigest()));
    answers.push_back(state->CheckInvariants().ok());
    return answers;
  });
  AskBeside(ask, [&] {
    for (int round = 0; round < kRounds / 4; ++round) {
      ASSERT_TRUE(state->BeginForward(Ids{0}, Ids{2}).ok());
      LayerOutputs outputs;
      ASSERT_TRUE(
          RunLayer(*attention, attention->options().layers[0], 0, Text(2), {}, &outputs).ok());
      ASSERT_TRUE(RunRecurrentLayers(*cache, Text(2), nullptr).ok());
      ASSERT_TRUE(state->EndForward().ok());
      ASSERT_TRUE(state->ForkSequence(0, 1).ok());
      ASSERT_TRUE(state->RemoveSequence(1).ok());
    }
  });
  EXPECT_TRUE(state->CheckInvariants().ok());
}

// Queries of the parts themselves, beside calls that make and end reservations in all of them.
TEST(StateThreads, QueriesOfPartsBesideReservations) {
  const std::shared_ptr<AttentionKVCache> attention =
      MakeTestCache(TestCacheOptions({{2, 1, 4, 4, DType::kF32}}, {.token_capacity = kCapacity}));
  const auto cache = MakeRecurrentCache();
  const auto state = *CompositeState::Create({.attention = attention, .recurrent = {cache}});
  ASSERT_TRUE(state->AddSequence(0).ok());
  std::atomic<int> violated = 0;
  AskBeside(
      [&] { violated += !attention->CheckInvariants().ok() || !cache->CheckInvariants().ok(); },
      [&] {
        for (int round = 0; round < kRounds; ++round) {
          const auto map = state->transfer()->DisaggPrepareRecv(0, 5);
          ASSERT_TRUE(map.ok()) << map.status().ToString();
          ASSERT_TRUE(state->transfer()->DisaggCancelRecv(map->epoch).ok());
        }
      });
  EXPECT_EQ(violated.load(), 0);
}

// The same beside commits of token trees, which take blocks for inputs before they are committed.
TEST(StateThreads, QueriesOfPartsBesideCommitsOfTrees) {
  const std::shared_ptr<AttentionKVCache> attention =
      MakeTestCache(TestCacheOptions({{2, 1, 4, 4, DType::kF32}}, {.token_capacity = kCapacity}));
  const auto cache = MakeRecurrentCache();
  const auto state = *CompositeState::Create({.attention = attention, .recurrent = {cache}});
  std::atomic<int> violated = 0;
  AskBeside(
      [&] { violated += !attention->CheckInvariants().ok() || !cache->CheckInvariants().ok(); },
      [&] {
        for (int round = 0; round < kRounds; ++round) {
          ASSERT_TRUE(state->AddSequence(0).ok());
          ASSERT_TRUE(state->BeginTreeForward(Ids{0}, Ids{3}, Ids{-1, 0, -1}).ok());
          LayerOutputs outputs;
          ASSERT_TRUE(
              RunLayer(*attention, attention->options().layers[0], 0, Text(3), {}, &outputs).ok());
          ASSERT_TRUE(RunRecurrentLayers(*cache, Text(3), nullptr).ok());
          ASSERT_TRUE(state->EndForward().ok());
          ASSERT_TRUE(state->CommitAcceptedTokenTreeNodes(Ids{0}, Ids{1}).ok());
          ASSERT_TRUE(state->RemoveSequence(0).ok());
        }
      });
  EXPECT_EQ(violated.load(), 0);
}

}  // namespace
}  // namespace quire
