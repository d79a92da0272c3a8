// Cases that random walks meet seldom or never, each on the cache and on the naive model side by
// side: after every call both have the same counters, the cache is sound and has as many pages in
// use as it may, and what attention computes is within the model's bounds.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "kernels/backend.h"
#include "kv/cache/paged_kv_cache.h"
#include "kv/testing/kv_model.h"
#include "kv/testing/kv_test_forward.h"

namespace quire {
namespace {

using Ids = std::vector<int64_t>;
using Tokens = std::vector<uint64_t>;

class KVCases : public testing::Test {
 protected:
  void Create(const AttentionKVCacheOptions& options) {
    options_ = options;
    cache_ = MakeTestCache(options);
    model_ = std::make_unique<KVModel>(options, cache_.get());
    ids_.clear();
  }
  template <typename F>
  void Call(F&& call) {
    const Status status = call(*cache_);
    ASSERT_TRUE(status.ok()) << status.ToString();
    const Status expected = call(*model_);
    ASSERT_TRUE(expected.ok()) << expected.ToString();
    ExpectSame();
  }
  void Add(int64_t id) {
    ids_.push_back(id);
    Call([&](AttentionKVCache& c) { return c.AddSequence(id); });
  }
  void Fork(int64_t parent, int64_t child, int64_t position) {
    ids_.push_back(child);
    Call([&](AttentionKVCache& c) { return c.ForkSequence(parent, child, position); });
  }
  void Remove(int64_t id) {
    ids_.erase(std::find(ids_.begin(), ids_.end(), id));
    Call([&](AttentionKVCache& c) { return c.RemoveSequence(id); });
  }
  void Pop(int64_t id, int64_t n) {
    Call([&](AttentionKVCache& c) { return c.PopN(id, n); });
  }
  void Retain(int64_t id) {
    Call([&](AttentionKVCache& c) { return c.SetRetained(id, true); });
  }
  void Begin(const Ids& ids, const Ids& lengths) {
    Call([&](AttentionKVCache& c) { return c.BeginForward(ids, lengths); });
  }
  // All layers of the open forward and End.
  void Finish(int64_t rows) {
    Tokens tokens(static_cast<size_t>(rows));
    std::iota(tokens.begin(), tokens.end(), next_token_);
    next_token_ += static_cast<uint64_t>(rows);
    ForwardStyle style;
    style.calls = CallStyle::kHalves;
    for (size_t l = 0; l < options_.layers.size(); ++l) {
      LayerOutputs outputs[2];
      Call([&](AttentionKVCache& c) {
        return RunLayer(c, options_.layers[l], static_cast<int64_t>(l), tokens, style,
                        &outputs[&c == cache_.get() ? 0 : 1]);
      });
      if (HasFatalFailure()) return;
      ExpectWithin(outputs[0].o, outputs[1].o, model_->last_bounds().o);
      ExpectWithin(outputs[0].lse, outputs[1].lse, model_->last_bounds().lse);
    }
    Call([](AttentionKVCache& c) { return c.EndForward(); });
  }
  void Forward(const Ids& ids, const Ids& lengths) {
    Begin(ids, lengths);
    if (!HasFatalFailure()) Finish(std::accumulate(lengths.begin(), lengths.end(), int64_t{0}));
  }
  int64_t repeated_forwards() const {
    return static_cast<const PagedKVCache&>(*cache_).figures().repeated_forwards;
  }

  AttentionKVCacheOptions options_;
  std::unique_ptr<AttentionKVCache> cache_;
  std::unique_ptr<KVModel> model_;

 private:
  static void ExpectWithin(const TestTensor& got, const TestTensor& expected,
                           const std::vector<double>& bounds) {
    for (size_t i = 0; i < bounds.size(); ++i) {
      const auto at = static_cast<int64_t>(i);
      const double difference = std::abs(double{got.Get(at)} - double{expected.Get(at)});
      ASSERT_LE(difference, bounds[i]) << "element " << i;
    }
  }
  void ExpectSame() {
    const Status sound = cache_->CheckInvariants();
    ASSERT_TRUE(sound.ok()) << sound.ToString();
    EXPECT_GE(cache_->pages_in_use(), model_->PagesInUse().least);
    EXPECT_LE(cache_->pages_in_use(), model_->PagesInUse().most);
    for (const int64_t id : ids_) {
      EXPECT_EQ(*cache_->GetSequenceLength(id), *model_->GetSequenceLength(id)) << id;
      EXPECT_EQ(*cache_->HeldTokens(id), *model_->HeldTokens(id)) << id;
      EXPECT_EQ(*cache_->SlidRange(id), *model_->SlidRange(id)) << id;
    }
  }

  Ids ids_;
  uint64_t next_token_ = 1;
};

AttentionKVCacheOptions Options(std::vector<AttentionLayerSpec> layers, int64_t page_size) {
  return TestCacheOptions(std::move(layers), {.max_num_sequences = 12,
                                              .token_capacity = 2048,
                                              .prefill_chunk_size = 512,
                                              .page_size = page_size});
}

const AttentionLayerSpec kPlain = {2, 1, 8, 8, DType::kF32};

AttentionLayerSpec WithWindow(int64_t window) {
  AttentionLayerSpec layer = kPlain;
  layer.window = window;
  return layer;
}

// ---------------------------------------------------------------------- pages of one range

// Sequence 4 has 8 tokens in four pages of one page range: its next token copies them. While the
// forward is open it sees the old pages and the new one.
class CopyingForward : public KVCases {
 protected:
  // `before`: tokens in whole pages before that range.
  void Build(const AttentionKVCacheOptions& options, int64_t before = 0) {
    Create(options);
    Add(0);
    Forward({0}, {before + 4});
    for (int64_t i = 1; i <= 3; ++i) {
      Fork(i - 1, i, before + 2 * i);
      Forward({i}, {4});
    }
    Fork(3, 4, before + 8);
  }
};

TEST_F(CopyingForward, PagesOfTheOldPathAreTheMembersWhileTheForwardIsOpen) {
  for (const int64_t page_size : {16, 64}) {
    for (const int others : {0, 1, 2}) {  // stay, are removed meanwhile, are retained
      SCOPED_TRACE("pages of " + std::to_string(page_size) + ", others " + std::to_string(others));
      Build(Options({kPlain, WithWindow(40)}, page_size));
      for (int64_t id = 0; id < 4 && others == 2; ++id) Retain(id);
      const int64_t before = cache_->pages_in_use();
      Begin({4}, {3});
      ASSERT_FALSE(HasFatalFailure());
      EXPECT_EQ(cache_->pages_in_use() - before, 2);  // one in each group
      EXPECT_EQ(cache_->page_counts().exclusive, 2);
      EXPECT_EQ(cache_->page_counts().shared, 2 * 4);
      for (int64_t id = 0; id < 4 && others == 1; ++id) Remove(id);
      EXPECT_EQ(cache_->page_counts().exclusive, others == 1 ? 2 * 5 : 2);
      EXPECT_EQ(cache_->page_counts().retained_only, 0);
      Finish(3);
      EXPECT_EQ(cache_->page_counts().exclusive, others == 0 ? 2 * 2 : 2);
      EXPECT_EQ(cache_->page_counts().retained_only, others == 2 ? 2 * 4 : 0);
    }
  }
}

// The member sees the pages before the range twice, by its old path and its new one, and is one
// sequence all the same.
TEST_F(CopyingForward, PagesBeforeTheRangeAreTheMembersToo) {
  for (const bool commits : {true, false}) {
    Build(Options({kPlain}, 16), 32);
    Begin({4}, {3});
    ASSERT_FALSE(HasFatalFailure());
    EXPECT_EQ(cache_->page_counts().shared, 2 + 4);
    for (int64_t id = 0; id < 4; ++id) Remove(id);
    EXPECT_EQ(cache_->page_counts().shared, 0);
    EXPECT_EQ(cache_->page_counts().exclusive, 2 + 5);
    if (commits) {
      Finish(3);
    } else {
      Call([](AttentionKVCache& c) { return c.AbortForward(); });
    }
    EXPECT_EQ(cache_->page_counts().shared, 0);
    EXPECT_EQ(cache_->page_counts().exclusive, cache_->pages_in_use());
  }
}

TEST_F(CopyingForward, AnAbortGivesTheOldCountsBack) {
  Build(Options({kPlain}, 16));
  Retain(2);
  const PageCounts before = cache_->page_counts();
  Begin({4, 1}, {3, 1});
  Call([](AttentionKVCache& c) { return c.AbortForward(); });
  EXPECT_EQ(cache_->page_counts().exclusive, before.exclusive);
  EXPECT_EQ(cache_->page_counts().shared, before.shared);
  EXPECT_EQ(cache_->page_counts().retained_only, before.retained_only);
}

// What is written into a shared token makes copies from it on: behind four pages of the range all
// of them are gathered.
TEST_F(CopyingForward, ACopyBehindFourPagesGathersThem) {
  Build(Options({kPlain}, 16));
  TestTensor k(DType::kF32, {1, 1, 1, 8});
  TestTensor v(DType::kF32, {1, 1, 1, 8});
  for (int64_t i = 0; i < 8; ++i) {
    k.Set(i, static_cast<float>(i));
    v.Set(i, static_cast<float>(-i));
  }
  Call([&](AttentionKVCache& c) { return c.DebugSetKV(4, 7, k.view(), v.view()); });
  Forward({4, 3}, {2, 2});
}

// However many branches a page range has, a path has at most four pages of it, in every group.
TEST_F(KVCases, NoPathHasAFifthPageOfARange) {
  for (const std::vector<int64_t>& steps : {Ids{1, 1, 1, 1, 1, 1}, Ids{3, 2, 3, 2, 3, 2}}) {
    Create(Options({kPlain, WithWindow(6)}, 16));
    Add(0);
    Forward({0}, {3});
    for (int64_t i = 1; i <= std::ssize(steps); ++i) {
      const int64_t length = *cache_->GetSequenceLength(i - 1);
      Fork(i - 1, i, length - 1);
      Forward({i, i - 1}, {steps[static_cast<size_t>(i - 1)], 1});
      ASSERT_FALSE(HasFailure()) << i;
    }
    for (int64_t i = 0; i < std::ssize(steps); ++i) Remove(i);
    EXPECT_LE(cache_->pages_in_use(), 2 * 2 * 4);
  }
}

// ---------------------------------------------------------------------- what has slid

// A fork has lost what its parent had lost at that length, and no more.
TEST_F(KVCases, AForkHasSlidAsFarAsItsOwnEndSays) {
  for (const int64_t page_size : {1, 4, 16}) {
    Create(Options({kPlain}, page_size));
    Add(0);
    Forward({0}, {200});
    Call([](AttentionKVCache& c) { return c.EnableSlidingWindowForSeq(0, 68, 4); });
    Forward({0}, {1});
    EXPECT_EQ(*cache_->SlidRange(0), (TokenRange{4, 138}));
    int64_t child = 1;
    for (const int64_t position : {200, 196, 192, 16, 2, 0}) {
      if (!model_->CanFork(0, position)) continue;
      ASSERT_TRUE(cache_->CanFork(0, position)) << position;
      Fork(0, child, position);
      const int64_t slid = std::max<int64_t>(0, position - 68 + 1);
      const TokenRange expected = slid == 0 ? TokenRange() : TokenRange{4, 4 + slid};
      EXPECT_EQ(*cache_->SlidRange(child), expected) << position;
      Forward({child}, {1});
      ASSERT_FALSE(HasFailure()) << "position " << position << ", pages of " << page_size;
      ++child;
    }
    EXPECT_GT(child, 2);
    if (model_->CanFork(0, 200)) Pop(0, 1);
    Forward({0}, {3});
    for (int64_t id = 0; id < child; ++id) Remove(id);
    EXPECT_EQ(cache_->pages_in_use(), 0);
  }
}

// A block with freed ranges is split by forks on both sides of them, popped and merged again.
TEST_F(KVCases, FreedRangesAreCountedThroughSplitsAndMerges) {
  for (const int64_t page_size : {4, 16}) {
    AttentionLayerSpec half = kPlain;
    half.dtype = DType::kBF16;
    Create(Options({kPlain, half}, page_size));
    Add(0);
    Forward({0}, {150});
    Call([](AttentionKVCache& c) { return c.EnableSlidingWindowForSeq(0, 60, 20); });
    Forward({0}, {40});
    Forward({0}, {40});
    Fork(0, 1, 230);
    Fork(0, 2, 16);
    Forward({1, 0}, {2, 2});
    Forward({2}, {1});
    Pop(0, 1);
    Fork(1, 3, 231);
    Retain(1);
    Forward({3, 0}, {20, 1});
    Remove(0);
    Remove(2);
    Forward({3}, {40});
    ASSERT_FALSE(HasFailure()) << page_size;
    Remove(1);
    Forward({3}, {1});
    Remove(3);
    EXPECT_EQ(cache_->pages_in_use(), 0);
  }
}

// Decode steps are planned as the step before, one token later: not those behind a switch.
TEST_F(KVCases, AStepBehindASwitchOfWindowsIsPlannedAnew) {
  for (const bool tvm : {false, true}) {
    AttentionKVCacheOptions options = Options({kPlain, WithWindow(16)}, 4);
    options.tvm_window_span = tvm;
    Create(options);
    Add(0);
    Add(1);
    Forward({0, 1}, {29, 21});
    const auto decode = [&](int64_t steps) {
      for (int64_t i = 0; i < steps; ++i) Forward({0, 1}, {1, 1});
    };
    decode(3);
    EXPECT_GE(repeated_forwards(), 1);
    Call([](AttentionKVCache& c) { return c.EnableSlidingWindowForSeq(1, 12, 2); });
    decode(5);
    Call([](AttentionKVCache& c) { return c.DisableSlidingWindowForSeq(1); });
    decode(3);
    Call([](AttentionKVCache& c) { return c.EnableSlidingWindowForSeq(0, 9, 0); });
    decode(12);
    ASSERT_FALSE(HasFailure()) << tvm;
  }
}

TEST_F(KVCases, AStepBehindASwitchOfFactorsIsPlannedAnew) {
  AttentionKVCacheOptions options = Options({kPlain}, 4);
  options.rope.scaling = RopeScaling::kLongRope;
  options.rope.short_factors = {1, 1.1, 1.2, 1.3};
  options.rope.long_factors = {2, 3, 4, 5};
  options.rope.factor = 4;
  options.rope.original_max_position_embeddings = 64;
  Create(options);
  Add(0);
  Call([](AttentionKVCache& c) { return c.SelectLongRope(0, true); });
  Add(1);
  Forward({0}, {5});
  Forward({0}, {1});
  Forward({0}, {1});
  EXPECT_EQ(repeated_forwards(), 1);
  Pop(0, 7);
  Call([](AttentionKVCache& c) { return c.SelectLongRope(0, false); });
  Forward({0}, {5});
  Forward({0}, {1});
}

// ---------------------------------------------------------------------- commits of trees

Tokens Range(uint64_t first, int64_t count) {
  Tokens tokens(static_cast<size_t>(count));
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

Tokens Joined(Tokens tokens, const Tokens& more) {
  tokens.insert(tokens.end(), more.begin(), more.end());
  return tokens;
}

// The outputs of the last of these tokens, computed alone.
std::vector<LayerOutputs> LastOf(const AttentionKVCacheOptions& options, const Tokens& tokens) {
  const auto cache = MakeTestCache(options);
  EXPECT_TRUE(cache->AddSequence(0).ok());
  const Tokens before(tokens.begin(), tokens.end() - 1);
  EXPECT_TRUE(RunForward(*cache, options.layers, Ids{0}, {before}).ok());
  auto outputs = RunForward(*cache, options.layers, Ids{0}, {{tokens.back()}});
  EXPECT_TRUE(outputs.ok()) << outputs.status().ToString();
  return *std::move(outputs);
}

// Two sequences whose ends share a page, in a tile that is not the page's first: the committed path
// of one goes on in place, that of the other opens the tile of its slot in a page of its own. What
// lies beside the path in the two tiles is then as if the tokens had been appended.
TEST(KVCommit, APathOpensTheTileOfItsSlotInAPageOfItsOwn) {
  for (const std::string& path : KernelPaths()) {
    for (const int64_t length : {5, 20, 37, 40, 47, 63}) {
      for (const int64_t page_size : {16, 48, 64}) {
        SCOPED_TRACE(path + ", " + std::to_string(length) + " tokens, pages of " +
                     std::to_string(page_size));
        AttentionLayerSpec half = kPlain;
        half.dtype = DType::kBF16;
        AttentionKVCacheOptions options = Options({kPlain, WithWindow(24), half}, page_size);
        options.kernel_path = path;
        const auto cache = MakeTestCache(options);
        const Tokens prefix = Range(1000, length);
        ASSERT_TRUE(cache->AddSequence(0).ok());
        ASSERT_TRUE(RunForward(*cache, options.layers, Ids{0}, {prefix}).ok());
        ASSERT_TRUE(cache->ForkSequence(0, 1).ok());
        const Ids ids = {0, 1};
        ASSERT_TRUE(cache->BeginTreeForward(ids, Ids{3, 3}, Ids{-1, -1, 1, -1, -1, 1}).ok());
        ASSERT_TRUE(FinishForward(*cache, options.layers, Range(2000, 6)).ok());
        ASSERT_TRUE(cache->CommitAcceptedTokenTreeNodes(ids, Ids{2, 2}).ok());
        const Status sound = cache->CheckInvariants();
        ASSERT_TRUE(sound.ok()) << sound.ToString();
        const auto outputs = RunForward(*cache, options.layers, ids, {{3000}, {3001}});
        ASSERT_TRUE(outputs.ok()) << outputs.status().ToString();
        for (const uint64_t s : {0, 1}) {
          const Tokens path_tokens = {2001 + 3 * s, 2002 + 3 * s, 3000 + s};
          const auto expected = LastOf(options, Joined(prefix, path_tokens));
          for (size_t l = 0; l < expected.size(); ++l) {
            EXPECT_TRUE(std::ranges::equal((*outputs)[l].o.rows(static_cast<int64_t>(s), 1),
                                           expected[l].o.bytes()))
                << "o of layer " << l << " of sequence " << s;
          }
        }
      }
    }
  }
}

// The layers hold none of the imported tokens, so the tile of the path's first slot has no others:
// it is read where it lies, and what is stale in it must not be met.
TEST(KVCommit, APathBehindTokensThatAreNotHeldOpensItsTile) {
  for (const std::string& path : KernelPaths()) {
    for (const int64_t length : {5, 20, 37, 40, 47}) {
      for (const int64_t page_size : {16, 48, 64}) {
        SCOPED_TRACE(path + ", " + std::to_string(length) + " tokens, pages of " +
                     std::to_string(page_size));
        AttentionLayerSpec half = WithWindow(1);
        half.dtype = DType::kBF16;
        AttentionKVCacheOptions options = Options({WithWindow(1), half}, page_size);
        options.kernel_path = path;
        const auto cache = MakeTestCache(options);
        const Ids id = {0};
        ASSERT_TRUE(cache->AddSequence(0).ok());
        std::vector<StoredRows> nothing;
        KVBlock no_rows;
        for (const AttentionLayerSpec& layer : options.layers)
          no_rows.push_back(nothing.emplace_back(layer, 0).view());
        const KVImport import = {.blocks = std::span(&no_rows, 1), .tokens = std::span(&length, 1)};
        const Status imported = cache->ImportVisibleKV(0, import);
        ASSERT_TRUE(imported.ok()) << imported.ToString();
        ASSERT_TRUE(cache->BeginTreeForward(id, Ids{2}, Ids{-1, -1}).ok());
        ASSERT_TRUE(FinishForward(*cache, options.layers, Range(2000, 2)).ok());
        ASSERT_TRUE(cache->CommitAcceptedTokenTreeNodes(id, Ids{1}).ok());
        const auto outputs = RunForward(*cache, options.layers, id, {{3000}});
        ASSERT_TRUE(outputs.ok()) << outputs.status().ToString();
        const auto expected = LastOf(options, Joined(Range(1000, length), {2001, 3000}));
        for (size_t l = 0; l < expected.size(); ++l) {
          EXPECT_TRUE(std::ranges::equal((*outputs)[l].o.bytes(), expected[l].o.bytes()))
              << "o of layer " << l;
        }
      }
    }
  }
}

// ---------------------------------------------------------------------- values that are not finite

// A forward of the given new tokens by halves, the value of one head of one of them replaced.
struct BadValue {
  int64_t row = -1;
  int64_t head = 0;
  float value = 0;
};
std::vector<LayerOutputs> RunWithBadValue(AttentionKVCache& cache, const Tokens& tokens,
                                          const BadValue& bad) {
  std::vector<LayerOutputs> all;
  const auto n = std::ssize(tokens);
  EXPECT_TRUE(cache.BeginForward(Ids{0}, Ids{n}).ok());
  for (size_t l = 0; l < cache.options().layers.size(); ++l) {
    const AttentionLayerSpec& spec = cache.options().layers[l];
    const auto layer = static_cast<int64_t>(l);
    TokenInputs inputs = MakeTokenInputs(spec, layer, DType::kF32, tokens);
    if (bad.row >= 0) {
      const int64_t first = (bad.row * spec.num_kv_heads + bad.head) * spec.v_head_dim;
      inputs.v.Set(first + spec.v_head_dim / 2, bad.value);
    }
    EXPECT_TRUE(cache.Append(layer, inputs.k.view(), inputs.v.view()).ok());
    LayerOutputs outputs = {TestTensor(DType::kF32, {n, spec.num_qo_heads, spec.v_head_dim}),
                            TestTensor(DType::kF32, {n, spec.num_qo_heads})};
    EXPECT_TRUE(
        cache
            .Attend(layer, inputs.q.view(), outputs.o.view(), &outputs.lse.view(), ScoreScale(spec))
            .ok());
    all.push_back(std::move(outputs));
  }
  EXPECT_TRUE(cache.EndForward().ok());
  return all;
}

// Rows [first, end) see nothing of the bad value, and rows before `first` do, in its head's
// queries.
void ExpectHidden(const std::vector<LayerOutputs>& got, const std::vector<LayerOutputs>& clean,
                  int64_t first, int64_t end, const AttentionLayerSpec& spec, int64_t head) {
  const int64_t group = spec.num_qo_heads / spec.num_kv_heads;
  for (size_t l = 0; l < got.size(); ++l) {
    EXPECT_TRUE(
        std::ranges::equal(got[l].o.rows(first, end - first), clean[l].o.rows(first, end - first)))
        << "rows from " << first << " of layer " << l;
    for (int64_t row = 0; row < first; ++row) {
      for (int64_t h = 0; h < spec.num_qo_heads; ++h) {
        const int64_t at = (row * spec.num_qo_heads + h) * spec.v_head_dim + spec.v_head_dim / 2;
        EXPECT_EQ(std::isfinite(got[l].o.Get(at)), h / group != head) << "row " << row;
      }
    }
  }
}

// Token 0 has a value that is not finite in one head. The first row of the next chunk sees the
// whole tile of token 0; the others do not see token 0, which the layer's window has left behind.
TEST(KVNonfinite, ALaterRowOfAChunkDoesNotMeetWhatTheWindowLeftBehind) {
  constexpr float kBad[] = {std::numeric_limits<float>::quiet_NaN(),
                            std::numeric_limits<float>::infinity()};
  for (const std::string& path : KernelPaths()) {
    for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
      for (const int64_t page_size : {16, 32, 5}) {
        for (const int64_t heads : {1, 3}) {
          for (int64_t head = 0; head < heads; ++head) {
            SCOPED_TRACE(path + ", " + std::string(DTypeName(dtype)) + ", pages of " +
                         std::to_string(page_size) + ", head " + std::to_string(head));
            AttentionLayerSpec spec = {2 * heads, heads, 8, 24, dtype};
            spec.window = 16;
            AttentionKVCacheOptions options = Options({spec}, page_size);
            options.kernel_path = path;
            std::vector<std::vector<LayerOutputs>> chunks;
            for (const BadValue& bad : {BadValue{}, BadValue{0, head, kBad[head % 2]}}) {
              const auto cache = MakeTestCache(options);
              ASSERT_TRUE(cache->AddSequence(0).ok());
              RunWithBadValue(*cache, Range(1, 15), bad);
              chunks.push_back(RunWithBadValue(*cache, Range(16, 9), {}));
            }
            ExpectHidden(chunks[1], chunks[0], 1, 9, spec, head);
          }
        }
      }
    }
  }
}

// The same between the heads of one token: whichever head it is, its tile is known to have it.
TEST(KVNonfinite, EarlierRowsDoNotMeetAValueOfALaterTokenInAnyHead) {
  for (const std::string& path : KernelPaths()) {
    for (int64_t head = 0; head < 4; ++head) {
      SCOPED_TRACE(path + ", head " + std::to_string(head));
      const AttentionLayerSpec spec = {4, 4, 8, 8, DType::kF32};
      AttentionKVCacheOptions options = Options({spec}, 16);
      options.kernel_path = path;
      std::vector<std::vector<LayerOutputs>> chunks;
      for (const int64_t row : {-1, 7}) {
        const auto cache = MakeTestCache(options);
        ASSERT_TRUE(cache->AddSequence(0).ok());
        chunks.push_back(RunWithBadValue(*cache, Range(1, 12),
                                         {row, head, std::numeric_limits<float>::quiet_NaN()}));
      }
      EXPECT_TRUE(std::ranges::equal(chunks[0][0].o.rows(0, 7), chunks[1][0].o.rows(0, 7)));
      for (int64_t h = 0; h < 4; ++h) {
        EXPECT_EQ(std::isfinite(chunks[1][0].o.Get((7 * 4 + h) * 8 + 4)), h != head) << h;
      }
    }
  }
}

}  // namespace
}  // namespace quire
