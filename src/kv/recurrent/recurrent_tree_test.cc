// Token trees over recurrent layers: a node starts from its parent's state, a commit leaves the
// state, checkpoints and inputs of the plain sequence, and the parts of a composite state do it
// together or not at all.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/random.h"
#include "kv/testing/allocation_refusal.h"
#include "kv/testing/kv_test_forward.h"
#include "kv/testing/recurrent_test_forward.h"
#include "quire/composite_state.h"
#include "quire/rnn_state.h"

namespace quire {
namespace {

using Ids = std::vector<int64_t>;
using Tokens = std::vector<uint64_t>;
using Values = std::vector<float>;

Tokens Range(uint64_t begin, uint64_t end) {
  Tokens tokens;
  for (uint64_t token = begin; token < end; ++token) tokens.push_back(token);
  return tokens;
}

Tokens Joined(Tokens a, const Tokens& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

bool SameBits(const Values& a, const Values& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

TensorView ColumnOf(Values& values) {
  return TensorView(values.data(), DType::kF32, {static_cast<int64_t>(values.size()), 1});
}

// ---------------------------------------------------------------------- RNNState

// The state of one number is a token's digits behind those of the tokens before.
class DigitState : public testing::Test {
 protected:
  std::unique_ptr<RNNState> state_;

  DigitState() {
    RNNStateOptions options;
    options.num_layers = 1;
    options.states = {{.shape = {1}}};
    options.max_num_sequences = 4;
    options.max_history = 2;
    options.max_tree_size = 6;
    options.max_tree_slots = 8;
    options.max_retained_slots = 4;
    options.poison_freed_slots = true;
    state_ = *RNNState::Create(options);
  }
  void Step(int64_t id, float value, int64_t length) {
    ASSERT_TRUE(state_->BeginForward(Ids{id}, Ids{length}).ok());
    Values values = {value};
    ASSERT_TRUE(state_->Set(0, 0, ColumnOf(values)).ok());
    ASSERT_TRUE(state_->EndForward().ok());
  }
  void SetRows(const Values& digits) {
    for (size_t row = 0; row < digits.size(); ++row) {
      Values value = {NAN};
      const Ids at = {static_cast<int64_t>(row)};
      ASSERT_TRUE(state_->GetBefore(0, 0, at, ColumnOf(value)).ok());
      value[0] = value[0] * 10 + digits[row];
      ASSERT_TRUE(state_->SetAt(0, 0, at, ColumnOf(value)).ok());
    }
  }
  void Grow(const Ids& ids, const Ids& lengths, const Ids& parents, const Values& digits) {
    const Status status = state_->BeginTreeForward(ids, lengths, parents);
    ASSERT_TRUE(status.ok()) << status.ToString();
    SetRows(digits);
    ASSERT_TRUE(state_->EndForward().ok());
    ExpectSound();
  }
  void ExpectSound() {
    const Status status = state_->CheckInvariants();
    EXPECT_TRUE(status.ok()) << status.ToString();
  }
  float Current(int64_t id) {
    float value = NAN;
    EXPECT_TRUE(state_->DebugGet(0, 0, id, TensorView(&value, DType::kF32, {1})).ok());
    return value;
  }
  void ExpectRefused(StatusCode code, uint64_t digest, const Status& status) {
    EXPECT_EQ(status.code(), code) << status.ToString();
    EXPECT_EQ(state_->StateDigest(), digest);
    ExpectSound();
  }
};

TEST_F(DigitState, ANodeStartsFromItsParent) {
  for (const int64_t id : {0, 1}) ASSERT_TRUE(state_->AddSequence(id).ok());
  Step(0, 5, 3);
  Grow({1, 0}, {2, 3}, {-1, 0, -1, 0, 0}, {1, 2, 3, 4, 6});
  EXPECT_EQ(*state_->GetSequenceLength(0), 6);
  EXPECT_EQ(*state_->GetTreeSize(0), 3);
  EXPECT_EQ(Current(0), 5);
  Grow({0}, {2}, {1, 2}, {7, 8});
  ASSERT_TRUE(state_->CommitAcceptedTokenTreeNodes(Ids{0, 1}, Ids{4, 1}).ok());
  ExpectSound();
  EXPECT_EQ(Current(0), 5368);
  EXPECT_EQ(Current(1), 12);
  EXPECT_EQ(*state_->GetSequenceLength(0), 6);
  // The commit is one step of history.
  ASSERT_TRUE(state_->PopN(0, 3).ok());
  EXPECT_EQ(Current(0), 5);
  Grow({0}, {1}, {-1}, {9});
  ASSERT_TRUE(state_->CommitAcceptedTokenTreeNodes(Ids{0}, Ids{-1}).ok());
  EXPECT_EQ(Current(0), 5);
  EXPECT_EQ(*state_->GetSequenceLength(0), 3);
  ExpectSound();
}

TEST_F(DigitState, WhatIsRefused) {
  for (const int64_t id : {0, 1}) ASSERT_TRUE(state_->AddSequence(id).ok());
  Step(0, 5, 3);
  Grow({0}, {3}, {-1, 0, 0}, {1, 2, 3});
  uint64_t digest = state_->StateDigest();
  const auto begin = [&](const Ids& ids, const Ids& lengths, const Ids& parents) {
    return state_->BeginTreeForward(ids, lengths, parents);
  };
  const auto commit = [&](const Ids& ids, const Ids& leaves) {
    return state_->CommitAcceptedTokenTreeNodes(ids, leaves);
  };
  ExpectRefused(StatusCode::kBadState, digest, state_->BeginForward(Ids{0}, Ids{1}));
  ExpectRefused(StatusCode::kBadState, digest, state_->ForkSequence(0, 2, 4));
  ExpectRefused(StatusCode::kBadState, digest, state_->ForkSequence(0, 2, -1));
  ExpectRefused(StatusCode::kBadState, digest, state_->SetRetained(0, true));
  ExpectRefused(StatusCode::kBadArgument, digest, begin({0}, {1}, {3}));
  ExpectRefused(StatusCode::kBadArgument, digest, begin({0}, {1}, {-2}));
  ExpectRefused(StatusCode::kBadArgument, digest, begin({0}, {2}, {1}));
  ExpectRefused(StatusCode::kBadArgument, digest, begin({0}, {1}, {1, 1}));
  ExpectRefused(StatusCode::kTooLarge, digest, begin({0}, {4}, {1, 1, 1, 1}));
  ExpectRefused(StatusCode::kOutOfPages, digest, begin({1}, {6}, {-1, -1, -1, -1, -1, -1}));
  ExpectRefused(StatusCode::kBadState, digest, commit({1}, {-1}));
  ExpectRefused(StatusCode::kBadArgument, digest, commit({0}, {3}));
  ExpectRefused(StatusCode::kBadArgument, digest, commit({0, 0}, {1, 1}));
  ASSERT_TRUE(state_->ForkSequence(0, 2, 3).ok());
  EXPECT_EQ(Current(2), 5);
  ASSERT_TRUE(begin({0, 1}, {1, 1}, {2, -1}).ok());
  digest = state_->StateDigest();
  Values two = {1, 2};
  ExpectRefused(StatusCode::kBadState, digest, state_->Set(0, 0, ColumnOf(two)));
  ExpectRefused(StatusCode::kBadState, digest, state_->EndForward());
  ExpectRefused(StatusCode::kBadState, digest, state_->GetAt(0, 0, Ids{0, 1}, ColumnOf(two)));
  ASSERT_TRUE(state_->AbortForward().ok());
  EXPECT_EQ(*state_->GetTreeSize(0), 3);
  EXPECT_EQ(*state_->GetTreeSize(1), 0);
  ExpectSound();
}

TEST_F(DigitState, PopTakesNodesFirst) {
  ASSERT_TRUE(state_->AddSequence(0).ok());
  Step(0, 5, 3);
  Grow({0}, {4}, {-1, 0, 1, -1}, {1, 2, 3, 4});
  ASSERT_TRUE(state_->PopN(0, 2).ok());
  EXPECT_EQ(*state_->GetTreeSize(0), 2);
  ExpectSound();
  Grow({0}, {1}, {1}, {6});
  ASSERT_TRUE(state_->PopN(0, 6).ok());
  EXPECT_EQ(*state_->GetTreeSize(0), 0);
  EXPECT_EQ(*state_->GetSequenceLength(0), 0);
  EXPECT_EQ(state_->slot_counts().free, state_->slot_counts().total);
  ExpectSound();
  Grow({0}, {4}, {-1, 0, 1, -1}, {1, 2, 3, 4});
  ASSERT_TRUE(state_->RemoveSequence(0).ok());
  EXPECT_EQ(state_->slot_counts().free, state_->slot_counts().total);
  ExpectSound();
}

// Whatever nodes there are, and whatever was pending in an earlier forward.
TEST_F(DigitState, GetGivesTheStateOfTheCommittedTokens) {
  for (const bool as_in_tvm : {false, true}) {
    RNNStateOptions options = state_->options();
    options.max_history = 1;
    options.tvm_rnn_history1 = as_in_tvm;
    state_ = *RNNState::Create(options);
    for (const int64_t id : {0, 1}) ASSERT_TRUE(state_->AddSequence(id).ok());
    Values values = {NAN, NAN};
    ASSERT_TRUE(state_->BeginTreeForward(Ids{1, 0}, Ids{1, 1}, Ids{-1, -1}).ok());
    const uint64_t digest = state_->StateDigest();
    ASSERT_TRUE(state_->Get(0, 0, ColumnOf(values)).ok());
    EXPECT_EQ(values, (Values{0, 0}));
    EXPECT_EQ(state_->StateDigest(), digest);
    ASSERT_TRUE(state_->AbortForward().ok());
    Step(0, 5, 3);
    Grow({0}, {2}, {-1, 0}, {1, 2});
    ASSERT_TRUE(state_->BeginTreeForward(Ids{1, 0}, Ids{1, 1}, Ids{-1, 1}).ok());
    values = {NAN, NAN};
    ASSERT_TRUE(state_->Get(0, 0, ColumnOf(values)).ok());
    EXPECT_EQ(values, (Values{0, 5}));
    SetRows({7, 8});
    ASSERT_TRUE(state_->Get(0, 0, ColumnOf(values)).ok());
    EXPECT_EQ(values, (Values{0, 5}));
    ASSERT_TRUE(state_->EndForward().ok());
    ExpectSound();
  }
}

// A chain's rows have states before them too.
TEST_F(DigitState, TheStateBeforeARowOfAChain) {
  ASSERT_TRUE(state_->AddSequence(0).ok());
  Step(0, 5, 3);
  ASSERT_TRUE(state_->BeginForward(Ids{0}, Ids{2}).ok());
  Values value = {NAN};
  ASSERT_TRUE(state_->GetBefore(0, 0, Ids{0}, ColumnOf(value)).ok());
  EXPECT_EQ(value[0], 5);
  EXPECT_EQ(state_->GetBefore(0, 0, Ids{1}, ColumnOf(value)).code(), StatusCode::kBadState);
  ASSERT_TRUE(state_->AbortForward().ok());
}

// ---------------------------------------------------------------------- RecurrentCache

RecurrentCacheOptions CacheOptions(const std::string& kernel_path) {
  RecurrentCacheOptions options;
  options.layers = AllRecurrentKinds();
  options.max_num_sequences = 4;
  options.prefill_chunk_size = 2000;
  options.recent_checkpoints = 2;
  options.thinned_checkpoints = 2;
  options.max_tree_slots = 600;
  options.runner = std::make_shared<SerialRunner>();
  options.kernel_path = kernel_path;
  options.poison_freed_slots = true;
  return options;
}

struct Plain {
  explicit Plain(const Tokens& tokens) : cache(*RecurrentCache::Create(CacheOptions("scalar"))) {
    EXPECT_TRUE(cache->AddSequence(0).ok());
    if (!tokens.empty()) {
      EXPECT_TRUE(RunRecurrentForward(*cache, Ids{0}, {tokens}, &outputs).ok());
    }
  }
  std::unique_ptr<RecurrentCache> cache;
  RecurrentOutputs outputs;
};

// One sequence through rounds of nodes, beside another one with a tree of its own.
class RecurrentScenario {
 public:
  RecurrentScenario(uint64_t seed, const std::string& kernel_path)
      : random_(seed), cache_(*RecurrentCache::Create(CacheOptions(kernel_path))) {}

  void Run() {
    const int64_t base = random_.Below(6) == 0 ? 0 : random_.Below(200);
    committed_ = Range(1, 1 + static_cast<uint64_t>(base));
    for (const int64_t id : {0, 1}) ASSERT_TRUE(cache_->AddSequence(id).ok());
    if (base > 0) {
      ASSERT_TRUE(RunRecurrentForward(*cache_, Ids{0}, {committed_}).ok());
    }
    if (random_.Below(2) == 0) {  // its last block of inputs is shared
      ASSERT_TRUE(cache_->ForkSequence(0, 2, -1).ok());
    }
    const int64_t rounds = 1 + random_.Below(3);
    for (int64_t i = 0; i < rounds && !testing::Test::HasFailure(); ++i) RunRound();
    Commit();
  }

 private:
  void RunRound() {
    Ids parents;
    const int64_t first = std::ssize(parents_);
    const int64_t count = 1 + random_.Below(70);
    const bool chain = random_.Below(2) == 0;
    for (int64_t n = first; n < first + count; ++n)
      parents.push_back(chain ? n - 1 : random_.Below(n + 1) - 1);
    const Tokens tokens = Range(next_, next_ + static_cast<uint64_t>(count));
    next_ += static_cast<uint64_t>(count);
    parents_.insert(parents_.end(), parents.begin(), parents.end());
    nodes_ = Joined(nodes_, tokens);
    Ids all = parents;
    all.push_back(-1);
    const Status status = cache_->BeginTreeForward(Ids{0, 1}, Ids{count, 1}, all);
    ASSERT_TRUE(status.ok()) << status.ToString();
    RecurrentOutputs outputs;
    ASSERT_TRUE(RunRecurrentLayers(*cache_, Joined(tokens, {7}), &outputs).ok());
    ASSERT_TRUE(cache_->EndForward().ok());
    ExpectSound();
    for (int64_t n = first; n < first + count; n += 1 + random_.Below(6)) {
      const Plain plain(Joined(committed_, PathTo(n)));
      for (size_t l = 0; l < outputs.size(); ++l) {
        const int64_t size = OutputSize(cache_->options().layers[l]);
        const auto row = outputs[l].begin() + (n - first) * size;
        EXPECT_TRUE(SameBits(Values(row, row + size),
                             Values(plain.outputs[l].end() - size, plain.outputs[l].end())))
            << "node " << n << " layer " << l << " behind " << committed_.size();
      }
    }
  }
  void Commit() {
    const int64_t leaf = random_.Below(std::ssize(nodes_) + 1) - 1;
    committed_ = Joined(committed_, PathTo(leaf));
    const Status status = cache_->CommitAcceptedTokenTreeNodes(Ids{1, 0}, Ids{-1, leaf});
    ASSERT_TRUE(status.ok()) << status.ToString();
    ExpectSound();
    const int64_t length = std::ssize(committed_);
    ASSERT_EQ(*cache_->GetSequenceLength(0), length);
    // As far back as the plain sequence reaches, by the inputs that the nodes left.
    const Plain plain(committed_);
    for (int64_t position = length; position >= std::max<int64_t>(length - 100, 0);
         position -= 1 + random_.Below(20)) {
      if (plain.cache->ReplayStart(0, position).value() != position) continue;
      ASSERT_EQ(cache_->ReplayStart(0, position).value(), position) << "of " << length;
      ASSERT_TRUE(cache_->ForkSequence(0, 3, position).ok());
      ASSERT_TRUE(plain.cache->ForkSequence(0, 3, position).ok());
      EXPECT_TRUE(SameBits(StatesOf(*cache_, 3), StatesOf(*plain.cache, 3)))
          << position << " of " << length;
      ASSERT_TRUE(cache_->RemoveSequence(3).ok());
      ASSERT_TRUE(plain.cache->RemoveSequence(3).ok());
    }
    ASSERT_TRUE(RunRecurrentForward(*cache_, Ids{0}, {{11, 12}}).ok());
    ASSERT_TRUE(RunRecurrentForward(*plain.cache, Ids{0}, {{11, 12}}).ok());
    EXPECT_TRUE(SameBits(StatesOf(*cache_, 0), StatesOf(*plain.cache, 0)));
    ExpectSound();
  }
  Tokens PathTo(int64_t node) const {
    Tokens path;
    for (; node >= 0; node = parents_[static_cast<size_t>(node)])
      path.push_back(nodes_[static_cast<size_t>(node)]);
    std::reverse(path.begin(), path.end());
    return path;
  }
  void ExpectSound() {
    const Status status = cache_->CheckInvariants();
    EXPECT_TRUE(status.ok()) << status.ToString();
  }

  RandomSequence random_;
  std::unique_ptr<RecurrentCache> cache_;
  Tokens committed_;
  Ids parents_;
  Tokens nodes_;
  uint64_t next_ = 10000;
};

TEST(RecurrentTree, RowsAndCommitsAreThoseOfThePlainSequence) {
  const std::vector<std::string> paths = KernelPaths();
  for (uint64_t seed = 1; seed <= 40 && !testing::Test::HasFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    RecurrentScenario(seed, paths[seed % paths.size()]).Run();
  }
}

// ---------------------------------------------------------------------- CompositeState

template <int64_t... kValues>
constexpr std::array<int64_t, sizeof...(kValues)> kIds = {kValues...};

// Attention, a cache and a caller's state; sequence 0 of 70 tokens, 1 empty.
struct Scene {
  std::shared_ptr<AttentionKVCache> attention;
  std::shared_ptr<RecurrentCache> cache;
  std::shared_ptr<RNNState> rnn;
  std::unique_ptr<CompositeState> state;

  explicit Scene(int64_t token_capacity = 256) {
    AttentionKVCacheOptions options;
    options.layers = {{2, 1, 4, 4, DType::kF32}};
    options.max_num_sequences = 4;
    options.token_capacity = token_capacity;
    options.prefill_chunk_size = 128;
    options.page_size = 16;
    options.runner = std::make_shared<SerialRunner>();
    options.poison_freed_pages = true;
    attention = *AttentionKVCache::Create(options);
    cache = *RecurrentCache::Create(CacheOptions("scalar"));
    RNNStateOptions rnn_options;
    rnn_options.num_layers = 1;
    rnn_options.states = {{.shape = {1}}};
    rnn_options.max_num_sequences = 4;
    rnn_options.max_tree_slots = 50;
    rnn_options.poison_freed_slots = true;
    rnn = *RNNState::Create(rnn_options);
    state = *CompositeState::Create({.attention = attention, .recurrent = {cache, rnn}});
    EXPECT_TRUE(state->AddSequence(0).ok());
    EXPECT_TRUE(state->AddSequence(1).ok());
    EXPECT_TRUE(state->BeginForward(kIds<0>, kIds<70>).ok());
    EXPECT_TRUE(RunLayers(Range(0, 70)).ok());
    Values value = {1};
    EXPECT_TRUE(rnn->Set(0, 0, ColumnOf(value)).ok());
    EXPECT_TRUE(state->EndForward().ok());
  }
  Status RunLayers(const Tokens& tokens) {
    LayerOutputs outputs;
    QUIRE_RETURN_IF_ERROR(
        RunLayer(*attention, attention->options().layers[0], 0, tokens, {}, &outputs));
    return RunRecurrentLayers(*cache, tokens, nullptr);
  }
  Status Begin() {
    return state->BeginTreeForward(kIds<1, 0>, kIds<2, 4>, kIds<-1, 0, -1, 0, 1, 1>);
  }
  Status Grow() {
    QUIRE_RETURN_IF_ERROR(Begin());
    QUIRE_RETURN_IF_ERROR(RunLayers(Range(500, 506)));
    Values values = {1, 2, 3, 4, 5, 6};
    QUIRE_RETURN_IF_ERROR(rnn->SetAt(0, 0, kIds<0, 1, 2, 3, 4, 5>, ColumnOf(values)));
    return state->EndForward();
  }
};

using Call = std::function<Status(Scene&)>;

void ExpectEachRefusalIsHarmless(const char* name, bool grown, const Call& call) {
  SCOPED_TRACE(name);
  for (int64_t n = 0;; ++n) {
    ASSERT_LT(n, 1000) << "never succeeds";
    Scene scene;
    if (grown) {
      ASSERT_TRUE(scene.Grow().ok());
    }
    const uint64_t digest = scene.state->StateDigest();
    Status status;
    bool refused = false;
    {
      const RefuseAllocation refusal(n);
      status = call(scene);
      refused = refusal.refused();
    }
    const Status sound = scene.state->CheckInvariants();
    ASSERT_TRUE(sound.ok()) << "allocation " << n << ": " << sound.ToString();
    if (!refused) {
      EXPECT_TRUE(status.ok()) << status.ToString();
      return;
    }
    if (status.ok()) continue;  // merges of blocks are left out when there is no memory for them
    ASSERT_EQ(status.code(), StatusCode::kOutOfMemory) << "allocation " << n;
    ASSERT_EQ(scene.state->StateDigest(), digest) << "allocation " << n;
    status = call(scene);
    ASSERT_TRUE(status.ok()) << "again after allocation " << n << ": " << status.ToString();
  }
}

TEST(CompositeTree, EachRefusedAllocationIsHarmless) {
  ExpectEachRefusalIsHarmless("begin", false, [](Scene& s) { return s.Begin(); });
  ExpectEachRefusalIsHarmless("second round", true, [](Scene& s) {
    return s.state->BeginTreeForward(kIds<0>, kIds<3>, kIds<3, 4, 5>);
  });
  ExpectEachRefusalIsHarmless("commit", true, [](Scene& s) {
    return s.state->CommitAcceptedTokenTreeNodes(kIds<0, 1>, kIds<3, 0>);
  });
  ExpectEachRefusalIsHarmless("pop", true, [](Scene& s) { return s.state->PopN(0, 2); });
  ExpectEachRefusalIsHarmless("pop tokens", true, [](Scene& s) { return s.state->PopN(0, 74); });
  ExpectEachRefusalIsHarmless("remove", true, [](Scene& s) { return s.state->RemoveSequence(0); });
}

TEST(CompositeTree, PartsGoTogether) {
  Scene scene;
  ASSERT_TRUE(scene.Grow().ok());
  EXPECT_EQ(*scene.state->GetTreeSize(0), 4);
  EXPECT_EQ(*scene.attention->GetTreeSize(0), 4);
  EXPECT_EQ(*scene.rnn->GetTreeSize(0), 4);
  EXPECT_EQ(*scene.state->GetSequenceLength(0), 74);
  ASSERT_TRUE(scene.state->CommitAcceptedTokenTreeNodes(kIds<0, 1>, kIds<3, -1>).ok());
  EXPECT_EQ(*scene.attention->GetSequenceLength(0), 73);
  EXPECT_EQ(*scene.cache->GetSequenceLength(0), 73);
  EXPECT_EQ(*scene.rnn->GetSequenceLength(0), 73);
  EXPECT_EQ(*scene.state->GetSequenceLength(1), 0);
  EXPECT_TRUE(scene.state->CheckInvariants().ok());
}

TEST(CompositeTree, AttentionThatLacksPagesStopsAllParts) {
  Scene scene(80);  // 5 pages and one: too few for nodes of two sequences
  const uint64_t digest = scene.state->StateDigest();
  EXPECT_EQ(scene.Begin().code(), StatusCode::kOutOfPages);
  EXPECT_EQ(scene.state->StateDigest(), digest);
  EXPECT_TRUE(scene.state->CheckInvariants().ok());
}

}  // namespace
}  // namespace quire
