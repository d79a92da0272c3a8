// Token trees at the cache: what the calls do and refuse, and that a node's row and a committed
// path are, bit for bit, those of the plain sequence with the same tokens.
#include "kv/pages/token_tree.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "base/random.h"
#include "kernels/backend.h"
#include "kv/testing/kv_test_forward.h"

namespace quire {
namespace {

using Ids = std::vector<int64_t>;
using Tokens = std::vector<uint64_t>;
using Outputs = std::vector<LayerOutputs>;  // [layer]

Tokens TokenRange(uint64_t first, int64_t count) {
  Tokens tokens(static_cast<size_t>(count));
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

Tokens Joined(const std::vector<Tokens>& parts) {
  Tokens all;
  for (const Tokens& part : parts) all.insert(all.end(), part.begin(), part.end());
  return all;
}

void ExpectSound(const AttentionKVCache& cache) {
  const Status status = cache.CheckInvariants();
  EXPECT_TRUE(status.ok()) << status.ToString();
}

// ---------------------------------------------------------------------- rules

class TokenTreeRules : public testing::Test {
 protected:
  AttentionKVCacheOptions options_;
  std::unique_ptr<AttentionKVCache> cache_;

  TokenTreeRules() {
    options_ = TestCacheOptions({{2, 1, 8, 8, DType::kF32}}, {.max_num_sequences = 8,
                                                              .token_capacity = 124,
                                                              .prefill_chunk_size = 128,
                                                              .page_size = 4,
                                                              .rope = RopeMode::kNone});
    options_.max_tree_size = 12;
    cache_ = MakeTestCache(options_);
  }
  void Add(int64_t id, int64_t length) {
    ASSERT_TRUE(cache_->AddSequence(id).ok());
    if (length == 0) return;
    const auto outputs = RunForward(*cache_, options_.layers, Ids{id}, {TokenRange(1000, length)});
    ASSERT_TRUE(outputs.ok()) << outputs.status().ToString();
  }
  Status Begin(const Ids& ids, const Ids& lengths, const Ids& parents) {
    return cache_->BeginTreeForward(ids, lengths, parents);
  }
  void Finish(int64_t rows) {
    const auto outputs = FinishForward(*cache_, options_.layers, TokenRange(5000, rows));
    ASSERT_TRUE(outputs.ok()) << outputs.status().ToString();
    ExpectSound(*cache_);
  }
  void Grow(int64_t id, const Ids& parents) {
    const Status status = Begin({id}, {std::ssize(parents)}, parents);
    ASSERT_TRUE(status.ok()) << status.ToString();
    ExpectSound(*cache_);
    Finish(std::ssize(parents));
  }
  Status Commit(const Ids& ids, const Ids& leaves) {
    const Status status = cache_->CommitAcceptedTokenTreeNodes(ids, leaves);
    ExpectSound(*cache_);
    return status;
  }
  int64_t Length(int64_t id) const { return *cache_->GetSequenceLength(id); }
  void ExpectRefused(StatusCode code, const Status& status, uint64_t digest,
                     const std::string& part) {
    EXPECT_EQ(status.code(), code) << status.ToString();
    EXPECT_NE(status.ToString().find(part), std::string::npos) << status.ToString();
    EXPECT_EQ(cache_->StateDigest(), digest);
    ExpectSound(*cache_);
  }
};

// Specification, 6.11.
TEST_F(TokenTreeRules, TreeOfSixBehindFiveTokens) {
  Add(0, 5);
  ASSERT_TRUE(Begin({0}, {6}, {-1, 0, 0, 1, 1, 2}).ok());
  const auto positions = cache_->GetQueryPositions();
  ASSERT_TRUE(positions.ok());
  EXPECT_EQ(std::vector<int32_t>(positions->begin(), positions->end()),
            (std::vector<int32_t>{5, 6, 6, 7, 7, 7}));
  Finish(6);
  EXPECT_EQ(Length(0), 11);
  EXPECT_EQ(*cache_->GetTreeSize(0), 6);
  EXPECT_EQ(cache_->GetDistinctTokenCount(), 11);
  EXPECT_EQ(cache_->GetTotalSequenceLength(), 11);
  EXPECT_EQ(*cache_->HeldTokens(0), 11);
  EXPECT_EQ(cache_->page_counts().exclusive, 2 + 2);
  ASSERT_TRUE(Commit({0}, {4}).ok());
  EXPECT_EQ(Length(0), 8);
  EXPECT_EQ(*cache_->GetTreeSize(0), 0);
  EXPECT_EQ(cache_->GetDistinctTokenCount(), 8);
  EXPECT_EQ(cache_->pages_in_use(), 2);
  Grow(0, {-1, 0, 0, 1, 1, 2});
  ASSERT_TRUE(Commit({0}, {-1}).ok());
  EXPECT_EQ(Length(0), 8);
  EXPECT_EQ(cache_->pages_in_use(), 2);
}

// Specification, 6.12: the path reaches into an earlier round (defect B7).
TEST_F(TokenTreeRules, SecondRound) {
  Add(0, 4);
  Grow(0, {-1});
  ASSERT_TRUE(Begin({0}, {2}, {0, 0}).ok());
  EXPECT_EQ((*cache_->GetQueryPositions())[0], 5);
  EXPECT_EQ((*cache_->GetQueryPositions())[1], 5);
  Finish(2);
  ASSERT_TRUE(Commit({0}, {2}).ok());
  EXPECT_EQ(Length(0), 6);
}

TEST_F(TokenTreeRules, CommitTakesAnySubsetInAnyOrder) {
  Add(0, 3);
  Add(1, 6);
  Add(2, 0);
  ASSERT_TRUE(Begin({0, 1, 2}, {3, 2, 4}, {-1, 0, 1, -1, -1, -1, 0, 1, 2}).ok());
  Finish(9);
  ASSERT_TRUE(Commit({2, 0}, {3, 0}).ok());
  EXPECT_EQ(Length(0), 4);
  EXPECT_EQ(Length(1), 8);
  EXPECT_EQ(Length(2), 4);
  const uint64_t digest = cache_->StateDigest();
  // Defect B8, also for -1.
  ExpectRefused(StatusCode::kBadState, Commit({1, 0}, {1, -1}), digest, "no uncommitted tree");
  ExpectRefused(StatusCode::kBadArgument, Commit({1, 1}, {1, 1}), digest, "named twice");
  ExpectRefused(StatusCode::kBadArgument, Commit({1}, {2}), digest, "none of them");
  ExpectRefused(StatusCode::kBadArgument, Commit({1}, {-2}), digest, "none of them");
  ExpectRefused(StatusCode::kBadArgument, Commit({1}, {}), digest, "0 leaves");
  ExpectRefused(StatusCode::kUnknownSequence, Commit({9}, {0}), digest, "does not exist");
  ASSERT_TRUE(Commit({}, {}).ok());
  ASSERT_TRUE(Commit({1}, {1}).ok());
  EXPECT_EQ(Length(1), 7);
}

TEST_F(TokenTreeRules, BadTreesChangeNothing) {
  Add(0, 5);
  Add(1, 2);
  Grow(1, {-1, 0});
  const uint64_t digest = cache_->StateDigest();
  ExpectRefused(StatusCode::kBadArgument, Begin({0}, {2}, {-1, 1}), digest, "node 1 of sequence 0");
  ExpectRefused(StatusCode::kBadArgument, Begin({0}, {1}, {-2}), digest, "the parent -2");
  ExpectRefused(StatusCode::kBadArgument, Begin({1}, {1}, {2}), digest, "node 2 of sequence 1");
  ExpectRefused(StatusCode::kBadArgument, Begin({0}, {2}, {-1}), digest, "1 are left");
  ExpectRefused(StatusCode::kBadArgument, Begin({0}, {1}, {-1, 0}), digest, "2 parents for 1");
  ExpectRefused(StatusCode::kBadArgument, Begin({0}, {0}, {}), digest, "the least is 1");
  ExpectRefused(StatusCode::kBadArgument, Begin({0, 0}, {1, 1}, {-1, -1}), digest, "twice");
  ExpectRefused(StatusCode::kBadArgument, Begin({}, {}, {}), digest, "empty");
  ExpectRefused(StatusCode::kUnknownSequence, Begin({7}, {1}, {-1}), digest, "does not exist");
  // At most max_tree_size nodes, of all rounds together.
  ExpectRefused(StatusCode::kTooLarge, Begin({1}, {11}, Ids(11, -1)), digest, "2 + 11 nodes");
  ExpectRefused(StatusCode::kTooLarge, Begin({0}, {13}, Ids(13, -1)), digest, "0 + 13 nodes");
  ASSERT_TRUE(Begin({0, 1}, {12, 10}, Ids(22, -1)).ok());
  ExpectRefused(StatusCode::kBadState, Commit({0}, {0}), cache_->StateDigest(),
                "a forward is open");
  ASSERT_TRUE(cache_->AbortForward().ok());
  EXPECT_EQ(cache_->StateDigest(), digest);
}

TEST_F(TokenTreeRules, WhatIsRefusedWhileUncommitted) {
  Add(0, 6);
  Grow(0, {-1, 0});
  const uint64_t digest = cache_->StateDigest();
  const std::string tree = "an uncommitted tree of 2 nodes";
  ExpectRefused(StatusCode::kBadState, cache_->BeginForward(Ids{0}, Ids{1}), digest, tree);
  ExpectRefused(StatusCode::kBadState, cache_->ForkSequence(0, 1, 7), digest, tree);
  ExpectRefused(StatusCode::kBadState, cache_->ForkSequence(0, 1, -1), digest, tree);
  ExpectRefused(StatusCode::kBadState, cache_->SetRetained(0, true), digest, tree);
  ExpectRefused(StatusCode::kBadState, cache_->EnableSlidingWindowForSeq(0, 4, 1), digest, tree);
  TestTensor rows(DType::kF32, {1, 2, 1, 8}), values(DType::kF32, {1, 2, 1, 8});
  EXPECT_TRUE(cache_->DebugGetKV(0, 5, 7, rows.view(), values.view()).ok());  // a token and a node
  ExpectRefused(StatusCode::kBadState, cache_->DebugSetKV(0, 1, rows.view(), rows.view()), digest,
                tree);
  TestTensor k(DType::kF32, {2, 1, 8}), v(DType::kF32, {2, 1, 8});
  const KVBlock block{{k.view(), v.view()}};
  ExpectRefused(StatusCode::kBadState, cache_->ExportKV(0, 0, 5, block[0]), digest, tree);
  ExpectRefused(StatusCode::kBadState, cache_->ImportKV(0, std::span(&block, 1)), digest, tree);
  EXPECT_TRUE(cache_->ExportKV(0, 0, 4, block[0]).ok());
  EXPECT_TRUE(cache_->DebugGetKV(0, 4, 6, rows.view(), values.view()).ok());
  // A fork of committed tokens has no tree.
  ASSERT_TRUE(cache_->ForkSequence(0, 1, 6).ok());
  ASSERT_TRUE(cache_->ForkSequence(0, 2, 3).ok());
  EXPECT_EQ(*cache_->GetTreeSize(1), 0);
  EXPECT_EQ(Length(1), 6);
  ASSERT_TRUE(cache_->BeginForward(Ids{1, 2}, Ids{3, 1}).ok());
  Finish(4);
  ASSERT_TRUE(Commit({0}, {1}).ok());
  EXPECT_EQ(Length(0), 8);
  EXPECT_EQ(Length(1), 9);
}

// Defect B9.
TEST_F(TokenTreeRules, PopTakesTheHighestNodesFirst) {
  Add(0, 6);
  const int64_t pages = cache_->pages_in_use();
  Grow(0, {-1, 0, 1, -1, 3});
  ASSERT_TRUE(cache_->PopN(0, 1).ok());
  EXPECT_EQ(Length(0), 10);
  EXPECT_EQ(*cache_->GetTreeSize(0), 4);
  ExpectSound(*cache_);
  ASSERT_TRUE(cache_->PopN(0, 2).ok());  // nodes 3 and 2: the tree is less deep
  EXPECT_EQ(*cache_->GetTreeSize(0), 2);
  ExpectSound(*cache_);
  ExpectRefused(StatusCode::kBadArgument, Begin({0}, {1}, {2}), cache_->StateDigest(), "node 2");
  Grow(0, {1, 1});
  ASSERT_TRUE(cache_->PopN(0, 6).ok());  // all four nodes and two tokens
  EXPECT_EQ(Length(0), 4);
  EXPECT_EQ(*cache_->GetTreeSize(0), 0);
  EXPECT_EQ(cache_->pages_in_use(), pages - 1);
  ExpectSound(*cache_);
  ASSERT_TRUE(cache_->BeginForward(Ids{0}, Ids{1}).ok());
  Finish(1);
  EXPECT_EQ(cache_->PopN(0, 6).code(), StatusCode::kBadArgument);
}

TEST_F(TokenTreeRules, RemoveClearAndAbortGiveAllPagesBack) {
  Add(0, 6);
  Add(1, 2);
  const uint64_t digest = cache_->StateDigest();
  ASSERT_TRUE(Begin({1, 0}, {5, 3}, {-1, 0, 0, 1, 1, -1, -1, -1}).ok());
  EXPECT_EQ(cache_->RemoveSequence(0).code(), StatusCode::kBadState);
  EXPECT_EQ(cache_->PopN(0, 1).code(), StatusCode::kBadState);
  ASSERT_TRUE(cache_->AbortForward().ok());
  EXPECT_EQ(cache_->StateDigest(), digest);
  Grow(0, {-1, 0, 0, 0, 0});
  Grow(1, {-1});
  const uint64_t with_trees = cache_->StateDigest();
  ASSERT_TRUE(Begin({1, 0}, {5, 3}, {-1, 0, 0, 1, 1, 4, 4, 6}).ok());
  ASSERT_TRUE(cache_->AbortForward().ok());
  EXPECT_EQ(cache_->StateDigest(), with_trees);
  ExpectSound(*cache_);
  ASSERT_TRUE(cache_->RemoveSequence(0).ok());
  ExpectSound(*cache_);
  EXPECT_EQ(cache_->pages_in_use(), 1 + 1);
  ASSERT_TRUE(cache_->Clear().ok());
  ExpectSound(*cache_);
  EXPECT_EQ(cache_->pages_in_use(), 0);
  Add(1, 1);
  EXPECT_EQ(*cache_->GetTreeSize(1), 0);
  Grow(1, {-1, -1});
}

// The commit finds its pages whatever others take between.
TEST_F(TokenTreeRules, PagesOfTheDeepestPathAreReserved) {
  Add(0, 7);
  Grow(0, {-1, 0, 1, 2, 3, 4, -1});  // 2 pages of nodes, positions up to 12
  EXPECT_EQ(cache_->pages_in_use(), 2 + 2 + 2);
  ASSERT_TRUE(cache_->ForkSequence(0, 1, 7).ok());
  const int64_t free = cache_->GetNumAvailablePages();
  ASSERT_TRUE(cache_->AddSequence(2).ok());
  const Status status = Begin({2}, {12}, Ids(12, -1));
  ASSERT_TRUE(status.ok()) << status.ToString();
  Finish(12);
  EXPECT_EQ(cache_->GetNumAvailablePages(), free - 4);
  ASSERT_TRUE(cache_->BeginForward(Ids{1}, Ids{(free - 4) * 4 - 3}).ok());
  Finish((free - 4) * 4 - 3);
  EXPECT_EQ(cache_->GetNumAvailablePages(), 0);
  const uint64_t digest = cache_->StateDigest();
  ExpectRefused(StatusCode::kOutOfPages, Begin({0}, {5}, {-1, -1, -1, -1, -1}), digest, "needs 1");
  ASSERT_TRUE(Begin({0}, {1}, {-1}).ok());  // fits where it is
  ASSERT_TRUE(cache_->AbortForward().ok());
  ASSERT_TRUE(Commit({0}, {5}).ok());
  EXPECT_EQ(Length(0), 13);
}

// ---------------------------------------------------------------------- exactness

struct TreeSequence {
  int64_t id = 0;
  Tokens committed{};
  Ids parents{};
  Tokens nodes{};
  SequenceWindow window{};

  Tokens PathTo(int64_t node) const {
    Tokens path;
    for (; node >= 0; node = parents[static_cast<size_t>(node)])
      path.push_back(nodes[static_cast<size_t>(node)]);
    std::reverse(path.begin(), path.end());
    return path;
  }
};

void EnableWindow(AttentionKVCache& cache, int64_t id, const SequenceWindow& window) {
  if (window == SequenceWindow{}) return;
  const Status status = cache.EnableSlidingWindowForSeq(id, window.window, window.sinks);
  ASSERT_TRUE(status.ok()) << status.ToString();
}

ForwardStyle Halves() {
  ForwardStyle style;
  style.calls = CallStyle::kHalves;
  return style;
}

// What the calls of one forward give, by layer.
struct Calls {
  Outputs whole, self, cross, shared;
};

// Runs all calls of all layers of a forward that has begun, and End.
Calls FinishWithPieces(AttentionKVCache& cache, const Tokens& rows) {
  Calls calls;
  const auto ok = [](const Status& status) { EXPECT_TRUE(status.ok()) << status.ToString(); };
  const int64_t n = std::ssize(rows);
  for (size_t l = 0; l < cache.options().layers.size(); ++l) {
    const AttentionLayerSpec& spec = cache.options().layers[l];
    const int64_t layer = static_cast<int64_t>(l);
    const TokenInputs inputs = MakeTokenInputs(spec, layer, DType::kF32, rows);
    const TokenInputs other = MakeTokenInputs(spec, 77, DType::kF32, rows);
    const double scale = ScoreScale(spec);
    for (Outputs* const to : {&calls.whole, &calls.self, &calls.cross, &calls.shared}) {
      to->push_back({TestTensor(DType::kF32, {n, spec.num_qo_heads, spec.v_head_dim}),
                     TestTensor(DType::kF32, {n, spec.num_qo_heads})});
    }
    // Before the append: what is no new node must not be read.
    ok(cache.CrossAttention(layer, inputs.q.view(), calls.cross[l].o.view(),
                            calls.cross[l].lse.view(), scale));
    ok(cache.Append(layer, inputs.k.view(), inputs.v.view()));
    ok(cache.Attend(layer, inputs.q.view(), calls.whole[l].o.view(), &calls.whole[l].lse.view(),
                    scale));
    ok(cache.SelfAttention(layer, inputs.q.view(), inputs.k.view(), inputs.v.view(),
                           calls.self[l].o.view(), calls.self[l].lse.view(), scale));
    ok(cache.AttentionWithSharedKV(layer, other.q.view(), calls.shared[l].o.view(),
                                   &calls.shared[l].lse.view(), scale));
  }
  ok(cache.EndForward());
  return calls;
}

// One sequence, in plain forwards, on one thread.
class PlainSequence {
 public:
  PlainSequence(AttentionKVCacheOptions options, const Tokens& tokens,
                const SequenceWindow& window) {
    options.page_size = 16;
    options.runner = std::make_shared<SerialRunner>();
    options.prefill_chunk_size = 2048;
    cache_ = MakeTestCache(options);
    EXPECT_TRUE(cache_->AddSequence(0).ok());
    EnableWindow(*cache_, 0, window);
    if (!tokens.empty()) Append(0, tokens);
  }
  // The rows of a path behind the sequence, of which the first `old` tokens come before.
  Calls RowsBehind(const Tokens& path, int64_t old) {
    EXPECT_TRUE(cache_->ForkSequence(0, 1, -1).ok());
    if (old > 0) Append(1, Tokens(path.begin(), path.begin() + old));
    const Tokens rows(path.begin() + old, path.end());
    EXPECT_TRUE(cache_->BeginForward(Ids{1}, Ids{std::ssize(rows)}).ok());
    Calls calls = FinishWithPieces(*cache_, rows);
    EXPECT_TRUE(cache_->RemoveSequence(1).ok());
    return calls;
  }
  Outputs Append(int64_t id, const Tokens& tokens) {
    auto outputs = RunForward(*cache_, cache_->options().layers, Ids{id}, {tokens}, Halves());
    EXPECT_TRUE(outputs.ok()) << outputs.status().ToString();
    return *std::move(outputs);
  }
  AttentionKVCache& cache() { return *cache_; }

 private:
  std::unique_ptr<AttentionKVCache> cache_;
};

bool SameRow(const TestTensor& a, int64_t a_row, const TestTensor& b, int64_t b_row) {
  const auto x = a.rows(a_row, 1);
  const auto y = b.rows(b_row, 1);
  return std::ranges::equal(x, y);
}

void ExpectSameRow(const Outputs& a, int64_t a_row, const Outputs& b, int64_t b_row,
                   const std::string& what) {
  for (size_t l = 0; l < a.size(); ++l) {
    EXPECT_TRUE(SameRow(a[l].o, a_row, b[l].o, b_row)) << what << ", o of layer " << l;
    EXPECT_TRUE(SameRow(a[l].lse, a_row, b[l].lse, b_row)) << what << ", lse of layer " << l;
  }
}

// All tokens that the sequences hold, bit for bit.
void ExpectSameKV(AttentionKVCache& a, int64_t a_id, AttentionKVCache& b, int64_t b_id,
                  const std::string& what) {
  const int64_t length = *a.GetSequenceLength(a_id);
  ASSERT_EQ(length, *b.GetSequenceLength(b_id)) << what;
  const auto& layers = a.options().layers;
  for (size_t l = 0; l < layers.size(); ++l) {
    const StoredRows a_rows(layers[l], 1);
    const StoredRows b_rows(layers[l], 1);
    const int64_t layer = static_cast<int64_t>(l);
    for (int64_t p = 0; p < length; ++p) {
      // Which pages are gone depends on the page size.
      if (!a.ExportKV(a_id, layer, p, a_rows.view()).ok()) continue;
      if (!b.ExportKV(b_id, layer, p, b_rows.view()).ok()) continue;
      ASSERT_TRUE(a_rows == b_rows) << what << ": layer " << l << ", position " << p;
    }
  }
}

template <typename T>
T Pick(RandomSequence& random, std::initializer_list<T> values) {
  return *(values.begin() + random.Below(std::ssize(values)));
}

AttentionKVCacheOptions RandomOptions(RandomSequence& random) {
  AttentionKVCacheOptions options;
  const DType dtype = Pick(random, {DType::kF32, DType::kF16, DType::kBF16});
  const int64_t kv_heads = Pick<int64_t>(random, {1, 2, 3});
  const int64_t group = Pick<int64_t>(random, {1, 2, 4, 17});
  const int64_t dim = Pick<int64_t>(random, {16, 18, 32});
  AttentionLayerSpec layer = {kv_heads * group, kv_heads, dim, dim, dtype};
  if (random.Below(3) == 0) layer.soft_cap = 5;
  if (random.Below(3) == 0) layer.head_sinks.assign(static_cast<size_t>(kv_heads * group), 0.5F);
  options.layers = {layer};
  if (random.Below(2) == 0) {
    layer.window = Pick<int64_t>(random, {1, 3, 16, 40, 300});
    options.layers.push_back(layer);
  }
  if (random.Below(3) == 0) {  // codes
    for (AttentionLayerSpec& spec : options.layers) {
      spec.dtype = Pick(random, {DType::kI8, DType::kF8E4M3, DType::kBF16});
      spec.v_dtype = Pick(random, {DType::kI8, DType::kF8E4M3, DType::kBF16});
    }
  }
  options.max_num_sequences = 8;
  options.token_capacity = 16384;
  options.prefill_chunk_size = 512;
  options.page_size = Pick<int64_t>(random, {1, 3, 5, 16, 32, 64});
  options.rope.mode = Pick(random, {RopeMode::kNone, RopeMode::kNormal, RopeMode::kInline});
  if (random.Below(4) == 0) {
    options.rope.scaling = RopeScaling::kLongRope;
    options.rope.original_max_position_embeddings = 64;
    options.rope.factor = 4;
    options.rope.short_factors.assign(static_cast<size_t>(dim / 2), 1.5);
    options.rope.long_factors.assign(static_cast<size_t>(dim / 2), 3.0);
    options.rope.use_long_factors = random.Below(2) == 0;
  }
  options.runner = CreateThreadPool(static_cast<int>(random.Below(3)) + 1).value();
  options.poison_freed_pages = true;
  const std::vector<std::string> paths = KernelPaths();
  options.kernel_path = paths[random.Below(4) == 0 ? paths.size() - 1 : 0];
  return options;
}

// New nodes: chains, stars and trees, of several roots.
Ids RandomParents(RandomSequence& random, int64_t size, int64_t count) {
  Ids parents;
  const int64_t shape = random.Below(4);
  for (int64_t n = size; n < size + count; ++n) {
    const int64_t any = random.Below(n + 1) - 1;
    parents.push_back(shape == 0   ? n - 1
                      : shape == 1 ? (n == 0 ? -1 : (n - 1) / 2)
                      : shape == 2 ? any
                                   : std::max<int64_t>(any, n - 1 - random.Below(3)));
  }
  return parents;
}

class TreeScenario {
 public:
  explicit TreeScenario(uint64_t seed)
      : random_(seed), options_(RandomOptions(random_)), cache_(MakeTestCache(options_)) {}

  void Run() {
    AddSequences();
    const int64_t rounds = random_.Below(3) + 1;
    for (int64_t round = 0; round < rounds && !testing::Test::HasFailure(); ++round) {
      RunRound();
      if (random_.Below(4) == 0) PopNodes();
    }
    CommitAll();
  }

 private:
  static constexpr int64_t kMaxRows = 40;

  void AddSequences() {
    const int64_t count = random_.Below(3) + 1;
    const bool forks = random_.Below(2) == 0;
    for (int64_t i = 0; i < count; ++i) {
      TreeSequence sequence{.id = i};
      if (random_.Below(3) == 0) {
        sequence.window.sinks = Pick<int64_t>(random_, {0, 1, 4, 20});
        sequence.window.window = sequence.window.sinks + 1 + random_.Below(40);
      }
      const int64_t length = Pick<int64_t>(random_, {0, 1, 5, 15, 16, 17, 31, 100, 250, 256, 300});
      if (i > 0 && forks) {
        const TreeSequence& parent = sequences_.front();
        const int64_t shared = std::ssize(parent.committed);
        sequence.window = parent.window;
        sequence.committed = parent.committed;
        ASSERT_TRUE(cache_->ForkSequence(0, i, shared).ok());
      } else {
        ASSERT_TRUE(cache_->AddSequence(i).ok());
        EnableWindow(*cache_, i, sequence.window);
        sequence.committed = {};
        AppendTo(sequence, length);
      }
      if (i > 0 && random_.Below(2) == 0) AppendTo(sequence, random_.Below(5));
      sequences_.push_back(std::move(sequence));
    }
  }
  Tokens NewTokens(int64_t count) {
    const Tokens tokens = TokenRange(next_token_, count);
    next_token_ += static_cast<uint64_t>(count);
    return tokens;
  }
  void AppendTo(TreeSequence& sequence, int64_t count) {
    if (count == 0) return;
    const Tokens tokens = NewTokens(count);
    const auto outputs = RunForward(*cache_, options_.layers, Ids{sequence.id}, {tokens}, Halves());
    ASSERT_TRUE(outputs.ok()) << outputs.status().ToString();
    sequence.committed = Joined({sequence.committed, tokens});
  }
  void RunRound() {
    Ids ids, lengths, parents;
    std::vector<size_t> members;
    Tokens rows;
    for (size_t s = sequences_.size(); s-- > 0;) {
      if (s > 0 && random_.Below(4) == 0) continue;
      TreeSequence& sequence = sequences_[s];
      const int64_t count = random_.Below(kMaxRows) + 1;
      const Ids more = RandomParents(random_, std::ssize(sequence.parents), count);
      const Tokens tokens = NewTokens(count);
      ids.push_back(sequence.id);
      lengths.push_back(count);
      parents.insert(parents.end(), more.begin(), more.end());
      rows = Joined({rows, tokens});
      sequence.parents.insert(sequence.parents.end(), more.begin(), more.end());
      sequence.nodes = Joined({sequence.nodes, tokens});
      members.push_back(s);
    }
    const Status status = cache_->BeginTreeForward(ids, lengths, parents);
    ASSERT_TRUE(status.ok()) << status.ToString();
    ExpectSound(*cache_);
    const Calls calls = FinishWithPieces(*cache_, rows);
    ExpectSound(*cache_);
    int64_t row = 0;
    for (size_t m = 0; m < members.size(); ++m) {
      CheckRows(sequences_[members[m]], lengths[m], calls, row);
      row += lengths[m];
    }
  }
  void CheckRows(const TreeSequence& sequence, int64_t count, const Calls& calls, int64_t row) {
    PlainSequence plain(options_, sequence.committed, sequence.window);
    const int64_t first = std::ssize(sequence.nodes) - count;
    for (int64_t n = first; n < first + count && !testing::Test::HasFailure(); ++n) {
      const Tokens path = sequence.PathTo(n);
      int64_t parent = n;
      while (parent >= first) parent = sequence.parents[static_cast<size_t>(parent)];
      const int64_t old = std::ssize(sequence.PathTo(parent));
      const Calls expected = plain.RowsBehind(path, old);
      const int64_t last = std::ssize(path) - old - 1;
      const auto expect_same = [&](const Outputs& got, const Outputs& of, const std::string& call) {
        ExpectSameRow(got, row + n - first, of, last,
                      call + " of node " + std::to_string(n) + " behind " +
                          std::to_string(sequence.committed.size()) + " tokens");
      };
      expect_same(calls.whole, expected.whole, "Attend");
      expect_same(calls.shared, expected.shared, "AttentionWithSharedKV");
      expect_same(calls.cross, expected.cross, "CrossAttention");
      // Where the path was cut shows in the last bits of this piece alone.
      if (old == 0) expect_same(calls.self, expected.self, "SelfAttention");
    }
  }
  void PopNodes() {
    TreeSequence& sequence = sequences_[0];
    const int64_t count = random_.Below(std::ssize(sequence.nodes) + 1);
    ASSERT_TRUE(cache_->PopN(sequence.id, count).ok());
    ExpectSound(*cache_);
    sequence.nodes.resize(sequence.nodes.size() - static_cast<size_t>(count));
    sequence.parents.resize(sequence.nodes.size());
  }
  void CommitAll() {
    Ids ids, leaves;
    for (TreeSequence& sequence : sequences_) {
      if (sequence.nodes.empty()) continue;
      const int64_t leaf = random_.Below(std::ssize(sequence.nodes) + 1) - 1;
      ids.push_back(sequence.id);
      leaves.push_back(leaf);
      sequence.committed = Joined({sequence.committed, sequence.PathTo(leaf)});
    }
    const Status status = cache_->CommitAcceptedTokenTreeNodes(ids, leaves);
    ASSERT_TRUE(status.ok()) << status.ToString();
    ExpectSound(*cache_);
    for (const TreeSequence& sequence : sequences_) {
      PlainSequence plain(options_, sequence.committed, sequence.window);
      const std::string what = "sequence " + std::to_string(sequence.id);
      ExpectSameKV(*cache_, sequence.id, plain.cache(), 0, what);
      const Tokens more = NewTokens(3);
      const auto outputs = RunForward(*cache_, options_.layers, Ids{sequence.id}, {more}, Halves());
      ASSERT_TRUE(outputs.ok()) << outputs.status().ToString();
      const Outputs expected = plain.Append(0, more);
      for (int64_t row = 0; row < 3; ++row)
        ExpectSameRow(*outputs, row, expected, row, what + " behind its commit");
    }
    ExpectSound(*cache_);
  }

  RandomSequence random_;
  AttentionKVCacheOptions options_;
  std::unique_ptr<AttentionKVCache> cache_;
  std::vector<TreeSequence> sequences_;
  uint64_t next_token_ = 1;
};

TEST(TokenTreeExactness, RowsAndCommitsAreThoseOfThePlainSequence) {
  for (uint64_t seed = 1; seed <= 40 && !testing::Test::HasFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    TreeScenario(seed).Run();
  }
}

}  // namespace
}  // namespace quire
