// The cache as a whole, where the walks beside the oracle (kv_walk_test) and the failure tests do
// not look: worked examples, shapes of tensors, long shared prefixes, groups of layers.
#include "kv/cache/paged_kv_cache.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "base/random.h"
#include "kv/testing/kv_test_forward.h"

namespace quire {
namespace {

using Ids = std::vector<int64_t>;

AttentionKVCacheOptions SmallOptions() {
  return TestCacheOptions(
      {{.num_qo_heads = 4, .num_kv_heads = 2, .qk_head_dim = 8, .v_head_dim = 8}},
      {.max_num_sequences = 16, .token_capacity = 64, .prefill_chunk_size = 1024, .page_size = 4});
}

std::vector<uint64_t> Tokens(uint64_t first, int64_t count) {
  std::vector<uint64_t> tokens;
  for (int64_t i = 0; i < count; ++i) tokens.push_back(first + static_cast<uint64_t>(i));
  return tokens;
}

std::vector<LayerOutputs> Forward(AttentionKVCache& cache, const AttentionKVCacheOptions& options,
                                  const Ids& ids,
                                  const std::vector<std::vector<uint64_t>>& tokens) {
  auto outputs = RunForward(cache, options.layers, ids, tokens);
  EXPECT_TRUE(outputs.ok()) << outputs.status().ToString();
  const Status sound = cache.CheckInvariants();
  EXPECT_TRUE(sound.ok()) << sound.ToString();
  return *std::move(outputs);
}

bool SameBytes(std::span<const std::byte> a, std::span<const std::byte> b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end());
}

// Section 6.1 and 6.2 of the KV specification, through the public calls.
TEST(PagedKVCache, ForkInMidPageKeepsLengthsAndPages) {
  const AttentionKVCacheOptions options = SmallOptions();
  const auto cache = MakeTestCache(options);
  EXPECT_TRUE(cache->Empty());
  EXPECT_EQ(cache->GetNumAvailablePages(), 17);
  ASSERT_TRUE(cache->AddSequence(0).ok());
  EXPECT_FALSE(cache->Empty());
  Forward(*cache, options, {0}, {Tokens(0, 10)});
  EXPECT_EQ(cache->GetNumAvailablePages(), 14);
  ASSERT_TRUE(cache->ForkSequence(0, 1, 6).ok());
  EXPECT_EQ(cache->GetNumAvailablePages(), 14);
  EXPECT_EQ(cache->GetTotalSequenceLength(), 16);
  EXPECT_EQ(cache->GetDistinctTokenCount(), 10);
  EXPECT_EQ(cache->PagesNeeded(Ids{1}, Ids{3}).value(), 2);
  Forward(*cache, options, {1}, {Tokens(100, 3)});
  EXPECT_EQ(cache->GetNumAvailablePages(), 12);
  ASSERT_TRUE(cache->BeginForward(Ids{0, 1}, Ids{1, 1}).ok());
  EXPECT_EQ(cache->GetQueryPositions().value()[0], 10);
  EXPECT_EQ(cache->GetQueryPositions().value()[1], 9);
  EXPECT_EQ(cache->GetSequenceLength(1).value(), 10);
  ASSERT_TRUE(cache->AbortForward().ok());
  EXPECT_EQ(cache->GetSequenceLength(1).value(), 9);
  ASSERT_TRUE(cache->RemoveSequence(0).ok());
  ASSERT_TRUE(cache->RemoveSequence(1).ok());
  EXPECT_EQ(cache->GetNumAvailablePages(), 17);
  EXPECT_EQ(cache->pages_in_use(), 0);
  EXPECT_TRUE(cache->Empty());
}

// 6.23, and every other wrong batch: an error changes no length.
TEST(PagedKVCache, ARefusedBatchChangesNothing) {
  const AttentionKVCacheOptions options = SmallOptions();
  const auto cache = MakeTestCache(options);
  ASSERT_TRUE(cache->AddSequence(0).ok());
  ASSERT_TRUE(cache->AddSequence(1).ok());
  Forward(*cache, options, {0, 1}, {Tokens(0, 4), Tokens(50, 4)});
  const uint64_t digest = cache->StateDigest();
  EXPECT_EQ(cache->BeginForward(Ids{0, 7}, Ids{3, 3}).code(), StatusCode::kUnknownSequence);
  EXPECT_EQ(cache->BeginForward(Ids{0, 0}, Ids{1, 1}).code(), StatusCode::kBadArgument);
  EXPECT_EQ(cache->BeginForward(Ids{0, 1}, Ids{1}).code(), StatusCode::kBadArgument);
  EXPECT_EQ(cache->BeginForward(Ids{0, 1}, Ids{1, 0}).code(), StatusCode::kBadArgument);
  EXPECT_EQ(cache->BeginForward(Ids{0, 1}, Ids{1024, 1}).code(), StatusCode::kTooLarge);
  EXPECT_EQ(cache->BeginForward(Ids{0, 1}, Ids{1, 61}).code(), StatusCode::kOutOfPages);
  EXPECT_EQ(cache->BeginForward(Ids{}, Ids{}).code(), StatusCode::kBadArgument);
  EXPECT_EQ(cache->StateDigest(), digest);
  EXPECT_EQ(cache->GetSequenceLength(0).value(), 4);
  EXPECT_EQ(cache->GetSequenceLength(1).value(), 4);
}

// Planning looks at members ahead of the one that it plans. Lengths tell the members apart.
TEST(PagedKVCache, BatchesOfAnySizeAndOrderArePlannedMemberByMember) {
  constexpr int64_t kSequences = 150;
  AttentionKVCacheOptions options = SmallOptions();
  options.max_num_sequences = kSequences;
  options.token_capacity = 3 * kSequences * options.page_size;
  const auto cache = MakeTestCache(options);
  Ids ids(kSequences);
  std::iota(ids.begin(), ids.end(), 0);
  std::vector<std::vector<uint64_t>> tokens;
  for (const int64_t id : ids) {
    ASSERT_TRUE(cache->AddSequence(id).ok());
    tokens.push_back(Tokens(0, 1 + id % 7));
  }
  Forward(*cache, options, ids, tokens);
  const uint64_t digest = cache->StateDigest();
  RandomSequence random(5);
  for (const size_t size : {1, 2, 15, 16, 17, 33, 47, 48, 49, 64, 65, 150}) {
    for (size_t i = 0; i < size; ++i)
      std::swap(ids[i],
                ids[i + static_cast<size_t>(random.Below(kSequences - static_cast<int64_t>(i)))]);
    const Ids batch(ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(size));
    const Ids ones(size, 1);
    ASSERT_TRUE(cache->BeginForward(batch, ones).ok());
    const std::span<const int32_t> positions = cache->GetQueryPositions().value();
    ASSERT_EQ(positions.size(), size);
    for (size_t i = 0; i < size; ++i) EXPECT_EQ(positions[i], 1 + batch[i] % 7) << "member " << i;
    ASSERT_TRUE(cache->AbortForward().ok());
    for (const int64_t wrong : {kSequences, batch[0]}) {
      Ids refused = batch;
      refused.push_back(wrong);
      EXPECT_FALSE(cache->BeginForward(refused, Ids(size + 1, 1)).ok());
    }
    const Status sound = cache->CheckInvariants();
    EXPECT_TRUE(sound.ok()) << sound.ToString();
    EXPECT_EQ(cache->StateDigest(), digest);
  }
}

TEST(PagedKVCache, ClearInAForwardStartsAnew) {
  const AttentionKVCacheOptions options = SmallOptions();
  const auto cache = MakeTestCache(options);
  const uint64_t digest = cache->StateDigest();
  ASSERT_TRUE(cache->AddSequence(0).ok());
  Forward(*cache, options, {0}, {Tokens(0, 9)});
  ASSERT_TRUE(cache->BeginForward(Ids{0}, Ids{9}).ok());
  ASSERT_TRUE(cache->Clear().ok());
  EXPECT_EQ(cache->StateDigest(), digest);
  EXPECT_EQ(cache->GetQueryPositions().status().code(), StatusCode::kBadState);
  ASSERT_TRUE(cache->AddSequence(0).ok());
  ASSERT_TRUE(cache->BeginForward(Ids{0}, Ids{5}).ok());
  EXPECT_NE(cache->DebugPlan().value().find("row 4 -> 1.0 opens"),
            std::string::npos);  // pages from 0 again
}

// The two forms of qkv and the two halves are one computation; rows behind the batch's are left
// alone.
TEST(PagedKVCache, FusedCallIsAppendThenAttend) {
  const AttentionKVCacheOptions options = SmallOptions();
  const AttentionLayerSpec& spec = options.layers[0];
  const std::vector<uint64_t> tokens = Tokens(7, 5);
  const TokenInputs inputs = MakeTokenInputs(spec, 0, DType::kF32, tokens);
  const auto halves = MakeTestCache(options);
  ASSERT_TRUE(halves->AddSequence(0).ok());
  ASSERT_TRUE(halves->BeginForward(Ids{0}, Ids{5}).ok());
  const TestTensor expected(DType::kF32, {5, 4, 8});
  const TestTensor lse(DType::kF32, {5, 4});
  ASSERT_TRUE(halves->Append(0, inputs.k.view(), inputs.v.view()).ok());
  ASSERT_TRUE(halves->Attend(0, inputs.q.view(), expected.view(), &lse.view(), 0.25).ok());
  const TestTensor again(DType::kF32, {5, 32});
  ASSERT_TRUE(halves->Attend(0, inputs.q.view(), again.view(), nullptr, 0.25).ok());
  EXPECT_TRUE(SameBytes(expected.bytes(), again.bytes()));
  for (int64_t i = 0; i < expected.count(); ++i) ASSERT_TRUE(std::isfinite(expected.Get(i))) << i;
  for (int64_t i = 0; i < lse.count(); ++i) ASSERT_TRUE(std::isfinite(lse.Get(i))) << i;

  for (const bool by_head : {false, true}) {
    const auto cache = MakeTestCache(options);
    ASSERT_TRUE(cache->AddSequence(0).ok());
    ASSERT_TRUE(cache->BeginForward(Ids{0}, Ids{5}).ok());
    TestTensor qkv(DType::kF32, {7, 8, 8});  // two rows of NaN behind
    for (int64_t i = 0; i < inputs.qkv.count(); ++i) qkv.Set(i, inputs.qkv.Get(i));
    const TestTensor o(DType::kF32, {6, 4, 8});
    const TensorView flat(qkv.view().data(), DType::kF32, {7, 64});
    const Status status =
        cache->AttentionWithFusedQKV(0, by_head ? qkv.view() : flat, o.view(), 0.25);
    ASSERT_TRUE(status.ok()) << status.ToString();
    ASSERT_TRUE(cache->EndForward().ok());
    EXPECT_TRUE(SameBytes(o.rows(0, 5), expected.bytes())) << by_head;
    for (int64_t i = 5 * 32; i < 6 * 32; ++i) ASSERT_TRUE(std::isnan(o.Get(i)));
  }
}

TEST(PagedKVCache, HeadsOfDifferentWidthGoFlat) {
  AttentionKVCacheOptions options = SmallOptions();
  options.layers = {{.num_qo_heads = 2, .num_kv_heads = 1, .qk_head_dim = 6, .v_head_dim = 10}};
  const auto fused = MakeTestCache(options);
  const auto halves = MakeTestCache(options);
  for (const auto& cache : {fused.get(), halves.get()}) ASSERT_TRUE(cache->AddSequence(0).ok());
  const auto a = RunForward(*fused, options.layers, Ids{0}, {Tokens(3, 9)});
  const auto b =
      RunForward(*halves, options.layers, Ids{0}, {Tokens(3, 9)}, {.calls = CallStyle::kHalves});
  ASSERT_TRUE(a.ok() && b.ok());
  EXPECT_TRUE(SameBytes((*a)[0].o.bytes(), (*b)[0].o.bytes()));
}

TEST(PagedKVCache, EndNamesTheFirstLayerThatWasNotRun) {
  AttentionKVCacheOptions options = SmallOptions();
  options.layers.resize(3, options.layers[0]);
  const auto cache = MakeTestCache(options);
  ASSERT_TRUE(cache->AddSequence(0).ok());
  ASSERT_TRUE(cache->BeginForward(Ids{0}, Ids{1}).ok());
  LayerOutputs outputs;
  ASSERT_TRUE(RunLayer(*cache, options.layers[0], 0, Tokens(0, 1), {}, &outputs).ok());
  const TokenInputs inputs = MakeTokenInputs(options.layers[1], 1, DType::kF32, Tokens(0, 1));
  ASSERT_TRUE(cache->Append(1, inputs.k.view(), inputs.v.view()).ok());
  const Status status = cache->EndForward();
  EXPECT_EQ(status.code(), StatusCode::kBadState);
  EXPECT_NE(status.message().find("layer 1 lacks its Attend"), std::string::npos)
      << status.ToString();
  const TestTensor o(DType::kF32, {1, 4, 8});
  ASSERT_TRUE(cache->Attend(1, inputs.q.view(), o.view(), nullptr, 1).ok());
  ASSERT_TRUE(RunLayer(*cache, options.layers[2], 2, Tokens(0, 1), {}, &outputs).ok());
  EXPECT_TRUE(cache->EndForward().ok());
}

TEST(PagedKVCache, PositionsStayReadableUntilTheNextForward) {
  const AttentionKVCacheOptions options = SmallOptions();
  const auto cache = MakeTestCache(options);
  ASSERT_TRUE(cache->AddSequence(0).ok());
  ASSERT_TRUE(cache->BeginForward(Ids{0}, Ids{3}).ok());
  const std::span<const int32_t> positions = cache->GetQueryPositions().value();
  LayerOutputs outputs;
  ASSERT_TRUE(RunLayer(*cache, options.layers[0], 0, Tokens(0, 3), {}, &outputs).ok());
  ASSERT_TRUE(cache->EndForward().ok());
  ASSERT_TRUE(cache->PagesNeeded(Ids{0}, Ids{900}).ok());
  ASSERT_TRUE(cache->ForkSequence(0, 1, 2).ok());
  EXPECT_TRUE(std::ranges::equal(positions, std::vector<int32_t>{0, 1, 2}));
}

TEST(PagedKVCache, DefaultPageSizesAreAsLongAsMemoryWants) {
  // 2 kv heads x (128 + 128) x 2 bytes = 1 KiB per token: 64 tokens have 64 KiB, 32 only half of
  // that.
  EXPECT_EQ(DefaultPageSize({4, 2, 128, 128, DType::kBF16}), 64);
  EXPECT_EQ(DefaultPageSize({4, 3, 128, 128, DType::kBF16}), 32);   // 48 KiB are enough
  EXPECT_EQ(DefaultPageSize({64, 64, 128, 128, DType::kF32}), 16);  // never less
  EXPECT_EQ(DefaultPageSize({1, 1, 16, 16, DType::kBF16}), 256);    // never more
}

TEST(PagedKVCache, LayersOfOtherShapesHavePagesOfTheirOwn) {
  AttentionKVCacheOptions options = SmallOptions();
  options.page_size = 0;
  options.token_capacity = 1000;
  options.layers = {{.num_qo_heads = 4, .num_kv_heads = 2, .qk_head_dim = 128, .v_head_dim = 128},
                    {.num_qo_heads = 8, .num_kv_heads = 8, .qk_head_dim = 128, .v_head_dim = 128},
                    {.num_qo_heads = 2, .num_kv_heads = 2, .qk_head_dim = 128, .v_head_dim = 128}};
  const auto cache = MakeTestCache(options);
  // Layers 0 and 2: 32 tokens of 2 KiB, 33 pages. Layer 1: 16 tokens of 8 KiB, 64 pages.
  EXPECT_EQ(cache->pages_allocated(), 33 + 64);
  EXPECT_EQ(cache->GetNumAvailablePages(), 33);
  ASSERT_TRUE(cache->AddSequence(0).ok());
  EXPECT_EQ(cache->PagesNeeded(Ids{0}, Ids{40}).value(), 3);
  Forward(*cache, options, {0}, {Tokens(0, 40)});
  EXPECT_EQ(cache->pages_in_use(), 2 + 3);
}

// Ask the outputs of the last token of each sequence again, alone in a fresh cache with another
// page size.
void ExpectAsAlone(const AttentionKVCacheOptions& options, const std::vector<uint64_t>& tokens,
                   std::span<const std::byte> last_row) {
  AttentionKVCacheOptions alone = options;
  alone.page_size = 48;
  const auto cache = MakeTestCache(alone);
  ASSERT_TRUE(cache->AddSequence(9).ok());
  const std::vector<LayerOutputs> outputs = Forward(*cache, alone, {9}, {tokens});
  EXPECT_TRUE(SameBytes(outputs[0].o.rows(static_cast<int64_t>(tokens.size()) - 1, 1), last_row));
}

struct LongCase {
  std::string path;
  DType dtype;
  RopeMode mode;
  int64_t page_size;
};

class PagedKVCacheLong : public testing::TestWithParam<LongCase> {};

// Prefixes of whole segments, shared at two depths by sequences that are interleaved in the batch,
// one of them with several new tokens: read once for all, yet every row is what it would be alone.
TEST_P(PagedKVCacheLong, SharedSegmentsCannotBeSeenInTheBits) {
  AttentionKVCacheOptions options = SmallOptions();
  options.kernel_path = GetParam().path;
  options.layers[0].dtype = GetParam().dtype;
  options.rope.mode = GetParam().mode;
  options.page_size = GetParam().page_size;
  options.token_capacity = 4000;
  options.runner = CreateThreadPool(2).value();
  const auto cache = MakeTestCache(options);
  std::vector<std::vector<uint64_t>> texts(6, Tokens(0, 300));
  ASSERT_TRUE(cache->AddSequence(0).ok());
  Forward(*cache, options, {0}, {texts[0]});
  ASSERT_TRUE(cache->AddSequence(5).ok());
  texts[5] = Tokens(5000, 20);
  Forward(*cache, options, {5}, {texts[5]});
  for (const int64_t id : {1, 2}) ASSERT_TRUE(cache->ForkSequence(0, id).ok());
  const std::vector<uint64_t> middle = Tokens(1000, 290);  // 590 tokens: a second whole segment
  Forward(*cache, options, {1}, {middle});
  texts[1].insert(texts[1].end(), middle.begin(), middle.end());
  for (const int64_t id : {3, 4}) {
    ASSERT_TRUE(cache->ForkSequence(1, id, 590 - (id == 4 ? 5 : 0)).ok());
    texts[static_cast<size_t>(id)] = texts[1];
  }
  texts[4].resize(585);

  const Ids batch = {3, 0, 5, 1, 2, 4};
  std::vector<std::vector<uint64_t>> fresh;
  for (const int64_t id : batch) {
    fresh.push_back(Tokens(static_cast<uint64_t>(2000 + 100 * id), id == 1 ? 5 : 1));
    std::vector<uint64_t>& text = texts[static_cast<size_t>(id)];
    text.insert(text.end(), fresh.back().begin(), fresh.back().end());
  }
  const std::vector<LayerOutputs> outputs = Forward(*cache, options, batch, fresh);
  int64_t row = -1;
  for (size_t i = 0; i < batch.size(); ++i) {
    row += static_cast<int64_t>(fresh[i].size());
    SCOPED_TRACE("sequence " + std::to_string(batch[i]));
    ExpectAsAlone(options, texts[static_cast<size_t>(batch[i])], outputs[0].o.rows(row, 1));
  }
}

std::vector<LongCase> LongCases() {
  std::vector<LongCase> cases;
  for (const std::string& path : KernelPaths()) {
    cases.push_back({path, DType::kF32, RopeMode::kNormal, 16});
    cases.push_back({path, DType::kF32, RopeMode::kNone, 40});
    cases.push_back({path, DType::kBF16, RopeMode::kInline, 256});
    cases.push_back({path, DType::kF16, RopeMode::kNormal, 32});
    cases.push_back({path, DType::kI8, RopeMode::kNormal, 64});
    cases.push_back({path, DType::kF8E4M3, RopeMode::kInline, 24});
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Paths, PagedKVCacheLong, testing::ValuesIn(LongCases()),
                         [](const auto& test) {
                           const LongCase& c = test.param;
                           return c.path + "_" + std::string(DTypeName(c.dtype)) + "_" +
                                  std::to_string(c.page_size);
                         });

// DebugSetKV of a shared token copies to own pages and leaves the others as they were.
TEST(PagedKVCache, DebugSetOfASharedTokenIsSeenByOneSequence) {
  AttentionKVCacheOptions options = SmallOptions();
  options.layers.push_back(options.layers[0]);
  const auto cache = MakeTestCache(options);
  ASSERT_TRUE(cache->AddSequence(0).ok());
  Forward(*cache, options, {0}, {Tokens(0, 10)});
  ASSERT_TRUE(cache->ForkSequence(0, 1).ok());
  const auto read = [&](int64_t id) {
    TestTensor k(DType::kF32, {2, 10, 2, 8});
    TestTensor v(DType::kF32, {2, 10, 2, 8});
    EXPECT_TRUE(cache->DebugGetKV(id, 0, 10, k.view(), v.view()).ok());
    std::vector<float> values;
    for (int64_t i = 0; i < k.count(); ++i) values.push_back(k.Get(i));
    for (int64_t i = 0; i < v.count(); ++i) values.push_back(v.Get(i));
    return values;
  };
  const std::vector<float> before = read(0);
  TestTensor k(DType::kF32, {2, 2, 2, 8});
  TestTensor v(DType::kF32, {2, 2, 2, 8});
  for (int64_t i = 0; i < k.count(); ++i) {
    k.Set(i, 0.5f);
    v.Set(i, -0.5f);
  }
  ASSERT_TRUE(cache->DebugSetKV(1, 5, k.view(), v.view()).ok());
  EXPECT_EQ(cache->pages_in_use(), 3 + 2);
  EXPECT_TRUE(cache->CheckInvariants().ok());
  EXPECT_EQ(read(0), before);
  const std::vector<float> after = read(1);
  const int64_t row = 16;
  for (int64_t layer = 0; layer < 2; ++layer) {
    for (int64_t i = 0; i < 10 * row; ++i) {
      const bool written = i / row == 5 || i / row == 6;
      const size_t at = static_cast<size_t>(layer * 10 * row + i);
      ASSERT_EQ(after[at], written ? 0.5f : before[at]) << at;
      ASSERT_EQ(after[320 + at], written ? -0.5f : before[320 + at]) << at;
    }
  }
  ASSERT_TRUE(cache->DebugSetKV(1, 5, k.view(), v.view()).ok());  // its own by now
  EXPECT_EQ(cache->pages_in_use(), 3 + 2);
}

// Calls the cache from within a kernel: the second call comes while the first is inside.
class IntrudingRunner final : public ParallelRunner {
 public:
  int worker_count() const noexcept override { return 1; }
  void Run(int64_t count, Task task, void* context) noexcept override {
    if (cache != nullptr) code = cache->AddSequence(77).code();
    for (int64_t i = 0; i < count; ++i) task(context, i, 0);
  }
  AttentionKVCache* cache = nullptr;
  StatusCode code = StatusCode::kOk;
};

TEST(PagedKVCache, ACallWithinACallIsRefused) {
  AttentionKVCacheOptions options = SmallOptions();
  const auto runner = std::make_shared<IntrudingRunner>();
  options.runner = runner;
  const auto cache = MakeTestCache(options);
  ASSERT_TRUE(cache->AddSequence(0).ok());
  runner->cache = cache.get();
  Forward(*cache, options, {0}, {Tokens(0, 3)});
  EXPECT_EQ(runner->code, StatusCode::kBadState);
  EXPECT_FALSE(cache->HasSequence(77));
  EXPECT_TRUE(cache->AddSequence(77).ok());
}

// Two caches get the same random calls. Before each forward the second one gets a call besides that
// changes nothing, but that the next forward is planned from the start.
class RepeatedForwards : public testing::Test {
 protected:
  static AttentionKVCacheOptions MakeOptions() {
    AttentionKVCacheOptions options = SmallOptions();
    options.layers.push_back(
        {.num_qo_heads = 1, .num_kv_heads = 1, .qk_head_dim = 4, .v_head_dim = 4});
    options.token_capacity = 1024;
    return options;
  }

  template <typename F>
  void CallBoth(F&& call, StatusCode expected = StatusCode::kOk) {
    const Status status = call(*repeating_);
    ASSERT_EQ(status.code(), expected) << status.ToString();
    ASSERT_EQ(call(*planning_).code(), expected);
  }
  void Begin(const Ids& ids, const Ids& lengths) {
    // So that nothing is as it was in the step before.
    EXPECT_TRUE(planning_->ForkSequence(ids.back(), kSequences + 1, 0).ok());
    EXPECT_TRUE(planning_->RemoveSequence(kSequences + 1).ok());
    CallBoth([&](AttentionKVCache& c) { return c.BeginForward(ids, lengths); });
    if (HasFatalFailure()) return;
    ASSERT_EQ(repeating_->DebugPlan().value(), planning_->DebugPlan().value());
    CallBoth([&](AttentionKVCache& c) { return c.PopN(ids[0], 1); }, StatusCode::kBadState);
    const Status sound = repeating_->CheckInvariants();
    ASSERT_TRUE(sound.ok()) << sound.ToString();
  }
  void Step(const Ids& ids, const Ids& lengths, bool aborts) {
    Begin(ids, lengths);
    if (HasFatalFailure()) return;
    std::vector<uint64_t> tokens;
    for (const int64_t length : lengths) {
      for (int64_t i = 0; i < length; ++i) tokens.push_back(next_token_++);
    }
    for (size_t l = 0; l < options_.layers.size() && !aborts; ++l) {
      LayerOutputs outputs[2];
      CallBoth([&](AttentionKVCache& c) {
        return RunLayer(c, options_.layers[l], static_cast<int64_t>(l), tokens, {},
                        &outputs[&c == repeating_.get()]);
      });
      EXPECT_TRUE(SameBytes(outputs[0].o.bytes(), outputs[1].o.bytes()));
    }
    CallBoth([&](AttentionKVCache& c) { return aborts ? c.AbortForward() : c.EndForward(); });
    ASSERT_EQ(repeating_->StateDigest(), planning_->StateDigest());
  }
  // Something between two steps; some of it concerns the batch.
  void Disturb(RandomSequence& random, const Ids& ids) {
    const int64_t id = random.Below(kSequences);
    switch (random.Below(6)) {
      case 0:
        CallBoth([&](AttentionKVCache& c) { return c.ForkSequence(id, kSequences); });
        if (random.Below(2) == 0) Step({kSequences, id}, {1, 1}, false);
        CallBoth([&](AttentionKVCache& c) { return c.RemoveSequence(kSequences); });
        break;
      case 1: {
        const int64_t length = repeating_->GetSequenceLength(id).value();
        const int64_t n = std::min<int64_t>(random.Below(6), length - 1);
        CallBoth([&](AttentionKVCache& c) { return c.PopN(id, n); });
        break;
      }
      case 2: {
        const int64_t parent = (id + 1) % kSequences;
        CallBoth([&](AttentionKVCache& c) { return c.RemoveSequence(id); });
        CallBoth([&](AttentionKVCache& c) { return c.ForkSequence(parent, id); });
        break;
      }
      case 3: {
        const Ids twos(ids.size(), 2);
        CallBoth([&](AttentionKVCache& c) { return c.PagesNeeded(ids, twos).status(); });
        CallBoth([&](AttentionKVCache& c) { return c.PagesNeeded(ids, Ids{}).status(); },
                 StatusCode::kBadArgument);
        break;
      }
      case 4: {
        const Ids ones(ids.size(), 1);
        CallBoth([&](AttentionKVCache& c) { return c.SetRetained(ids[0], true); });
        CallBoth([&](AttentionKVCache& c) { return c.BeginForward(ids, ones); },
                 StatusCode::kBadState);
        CallBoth([&](AttentionKVCache& c) { return c.SetRetained(ids[0], false); });
        break;
      }
      default:
        Step(ids, Ids(ids.size(), 1 + random.Below(2)), true);
    }
  }

  static constexpr int64_t kSequences = 6;
  const AttentionKVCacheOptions options_ = MakeOptions();
  const std::unique_ptr<AttentionKVCache> repeating_ = MakeTestCache(options_);
  const std::unique_ptr<AttentionKVCache> planning_ = MakeTestCache(options_);
  uint64_t next_token_ = 1;
};

TEST_F(RepeatedForwards, ArePlannedAsIfAnew) {
  RandomSequence random(1);
  for (int64_t id = 0; id < kSequences; ++id) {
    CallBoth([&](AttentionKVCache& c) { return c.AddSequence(id); });
    Step({id}, {1 + random.Below(10)}, false);
  }
  for (int round = 0; round < 150 && !HasFailure(); ++round) {
    Ids ids(kSequences);
    std::iota(ids.begin(), ids.end(), 0);
    for (size_t i = ids.size(); i-- > 1;) {
      std::swap(ids[i], ids[static_cast<size_t>(random.Below(static_cast<int64_t>(i) + 1))]);
    }
    ids.resize(static_cast<size_t>(1 + random.Below(kSequences)));
    const int64_t steps = 1 + random.Below(8);
    for (int64_t i = 0; i < steps && !HasFailure(); ++i) {
      Step(ids, Ids(ids.size(), random.Below(10) == 0 ? 2 : 1), false);
      if (!HasFailure() && random.Below(4) == 0) Disturb(random, ids);
    }
    for (const int64_t id : ids) {  // keeps them short
      const int64_t length = repeating_->GetSequenceLength(id).value();
      if (length > 60) CallBoth([&](AttentionKVCache& c) { return c.PopN(id, length - 5); });
    }
  }
  EXPECT_GT(static_cast<PagedKVCache&>(*repeating_).figures().repeated_forwards, 150);
  EXPECT_EQ(static_cast<PagedKVCache&>(*planning_).figures().repeated_forwards, 0);
}

}  // namespace
}  // namespace quire
