// Forwards that begin while a part of their sequences' KV is still on its way: what they compute is
// what they would have computed after an import, and a layer that does not come leaves nothing
// behind. Refused allocations are in kv_failure_test.cc, random ones in kv_walk_test.cc.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "kernels/backend.h"
#include "kv/cache/paged_kv_cache.h"
#include "kv/testing/kv_test_forward.h"
#include "quire/attention_kv_cache.h"

namespace quire {
namespace {

using Ids = std::vector<int64_t>;
using Tokens = std::vector<uint64_t>;

AttentionKVCacheOptions MakeOptions(int64_t page_size = 4) {
  AttentionKVCacheOptions options = TestCacheOptions({{4, 2, 8, 8, DType::kF32},
                                                      {4, 2, 8, 8, DType::kF32},
                                                      {4, 4, 8, 4, DType::kF16},
                                                      {4, 2, 8, 8, DType::kI8}},
                                                     {.max_num_sequences = 8,
                                                      .token_capacity = 400,
                                                      .prefill_chunk_size = 40,
                                                      .page_size = page_size});
  options.runner = nullptr;
  return options;
}

// Tokens [start, start + count) of the text with this number.
Tokens Text(uint64_t number, int64_t start, int64_t count) {
  Tokens tokens;
  for (int64_t i = start; i < start + count; ++i)
    tokens.push_back(1000 * number + static_cast<uint64_t>(i));
  return tokens;
}

// Stored keys and values of some tokens of a sequence.
struct Stored {
  std::vector<StoredRows> layers;
  KVBlock block() const {
    KVBlock block;
    for (const StoredRows& rows : layers) block.push_back(rows.view());
    return block;
  }
};

Stored Export(AttentionKVCache& cache, int64_t id, int64_t start, int64_t count) {
  Stored stored;
  for (size_t l = 0; l < cache.options().layers.size(); ++l) {
    const AttentionLayerSpec& spec = cache.options().layers[l];
    stored.layers.emplace_back(spec, count);
    const Status status = cache.ExportKV(id, static_cast<int64_t>(l), start, stored.block().back());
    EXPECT_TRUE(status.ok()) << status.ToString();
  }
  return stored;
}

// The KV of a text, computed alone in another cache and cut into the blocks between `cuts`.
std::vector<Stored> ComputeText(AttentionKVCacheOptions options, uint64_t number,
                                const std::vector<int64_t>& cuts) {
  options.prefill_chunk_size = 400;
  for (AttentionLayerSpec& layer : options.layers) layer.window = 0;  // so that all is held
  const auto writer = MakeTestCache(options);
  EXPECT_TRUE(writer->AddSequence(0).ok());
  EXPECT_TRUE(RunForward(*writer, options.layers, Ids{0}, {Text(number, 0, cuts.back())}).ok());
  std::vector<Stored> parts;
  for (size_t i = 0; i + 1 < cuts.size(); ++i)
    parts.push_back(Export(*writer, 0, cuts[i], cuts[i + 1] - cuts[i]));
  return parts;
}

std::vector<KVBlock> BlocksOf(const std::vector<Stored>& parts) {
  std::vector<KVBlock> blocks;
  for (const Stored& part : parts) blocks.push_back(part.block());
  return blocks;
}

int64_t TokensOf(const std::vector<KVBlock>& blocks) {
  int64_t count = 0;
  for (const KVBlock& block : blocks) count += block[0].k.dim(0);
  return count;
}

void ExpectSameBytes(const TestTensor& a, const TestTensor& b, const std::string& what) {
  EXPECT_TRUE(std::ranges::equal(a.bytes(), b.bytes())) << what;
}

void ExpectSameOutputs(const std::vector<LayerOutputs>& a, const std::vector<LayerOutputs>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t l = 0; l < a.size(); ++l) {
    ExpectSameBytes(a[l].o, b[l].o, "o of layer " + std::to_string(l));
    ExpectSameBytes(a[l].lse, b[l].lse, "lse of layer " + std::to_string(l));
  }
}

void ExpectSameKV(AttentionKVCache& a, AttentionKVCache& b, int64_t id) {
  const int64_t length = a.GetSequenceLength(id).value();
  ASSERT_EQ(length, b.GetSequenceLength(id).value());
  ASSERT_EQ(a.HeldTokens(id).value(), b.HeldTokens(id).value());
  if (length != a.HeldTokens(id).value()) return;
  const Stored kv_a = Export(a, id, 0, length);
  const Stored kv_b = Export(b, id, 0, length);
  for (size_t l = 0; l < kv_a.layers.size(); ++l)
    EXPECT_TRUE(kv_a.layers[l] == kv_b.layers[l]) << "stored layer " << l;
}

// ---------------------------------------------------------------------- exactness

// A batch: sequence 0 is empty, 1 goes on behind 6 tokens, 2 is a fork that shares 4 of them, 3
// loads nothing.
struct Member {
  int64_t id;
  uint64_t text;
  int64_t held;      // tokens that it has
  int64_t imported;  // 0: loads nothing
  int64_t fresh;
};
const std::vector<Member>& Members() {
  static const std::vector<Member> members = {
      {0, 1, 0, 37, 3}, {1, 2, 6, 21, 1}, {2, 2, 4, 50, 5}, {3, 3, 9, 0, 4}};
  return members;
}

void BuildMembers(AttentionKVCache& cache) {
  const auto& layers = cache.options().layers;
  ASSERT_TRUE(cache.AddSequence(0).ok());
  ASSERT_TRUE(cache.AddSequence(1).ok());
  ASSERT_TRUE(cache.AddSequence(3).ok());
  ASSERT_TRUE(RunForward(cache, layers, Ids{1}, {Text(2, 0, 6)}).ok());
  ASSERT_TRUE(RunForward(cache, layers, Ids{3}, {Text(3, 0, 9)}).ok());
  ASSERT_TRUE(cache.ForkSequence(1, 2, 4).ok());
}

// What the members load, and the forward that loads it.
struct LoadingBatch {
  explicit LoadingBatch(const AttentionKVCacheOptions& options) {
    for (const Member& member : Members()) {
      ids.push_back(member.id);
      lengths.push_back(member.fresh);
      const int64_t end = member.held + member.imported;
      const Tokens fresh = Text(member.text, end, member.fresh);
      tokens.push_back(fresh);
      rows.insert(rows.end(), fresh.begin(), fresh.end());
      if (member.imported == 0) continue;
      stored[member.id] =
          ComputeText(options, member.text, {member.held, member.held + 1, member.held + 18, end});
      blocks[member.id] = BlocksOf(stored[member.id]);
      sources[member.id] = std::make_unique<BlockSource>(blocks[member.id]);
      loads.push_back({member.id, TokensOf(blocks[member.id]), sources[member.id].get()});
    }
  }
  Status Begin(AttentionKVCache& cache) const {
    return cache.BeginLoadingForward(ids, lengths, loads);
  }

  Ids ids, lengths;
  std::vector<Tokens> tokens;
  Tokens rows;
  std::map<int64_t, std::vector<Stored>> stored;
  std::map<int64_t, std::vector<KVBlock>> blocks;
  std::map<int64_t, std::unique_ptr<BlockSource>> sources;
  std::vector<LayerLoad> loads;
};

struct Setting {
  const char* name;
  AttentionKVCacheOptions options;
  bool windows = false;  // of sequences
};

std::vector<Setting> Settings() {
  std::vector<Setting> settings = {
      {"pages of 4", MakeOptions(4)},    {"pages of 16", MakeOptions(16)},
      {"pages of 3", MakeOptions(3)},    {"default pages", MakeOptions(0)},
      {"inline", MakeOptions(16)},       {"no rope", MakeOptions(16)},
      {"layer windows", MakeOptions(4)}, {"sequence windows", MakeOptions(4), true},
      {"scalar", MakeOptions(16)}};
  settings[3].options.token_capacity = 4000;
  settings[4].options.rope.mode = RopeMode::kInline;
  settings[5].options.rope.mode = RopeMode::kNone;
  settings[6].options.layers[1].window = 12;
  settings[8].options.kernel_path = "scalar";
  return settings;
}

class LayerLoadExactness : public testing::TestWithParam<size_t> {};

void EnableWindows(AttentionKVCache& cache) {
  ASSERT_TRUE(cache.EnableSlidingWindowForSeq(0, 15, 2).ok());
  ASSERT_TRUE(cache.EnableSlidingWindowForSeq(2, 31, 0).ok());
}

TEST_P(LayerLoadExactness, IsAnImportBeforeTheForward) {
  const Setting setting = Settings()[GetParam()];
  SCOPED_TRACE(setting.name);
  for (const CallStyle calls : {CallStyle::kFused, CallStyle::kHalves}) {
    const AttentionKVCacheOptions& options = setting.options;
    const LoadingBatch batch(options);
    const auto loading = MakeTestCache(options);
    const auto importing = MakeTestCache(options);
    for (AttentionKVCache* const cache : {loading.get(), importing.get()}) {
      BuildMembers(*cache);
      if (setting.windows) EnableWindows(*cache);
    }
    ASSERT_TRUE(batch.Begin(*loading).ok());
    ASSERT_TRUE(loading->CheckInvariants().ok());
    const auto outputs = FinishForward(*loading, options.layers, batch.rows, {.calls = calls});
    ASSERT_TRUE(outputs.ok()) << outputs.status().ToString();

    for (const auto& [id, blocks] : batch.blocks) ASSERT_TRUE(importing->ImportKV(id, blocks).ok());
    const auto expected =
        RunForward(*importing, options.layers, batch.ids, batch.tokens, {.calls = calls});
    ASSERT_TRUE(expected.ok()) << expected.status().ToString();
    ExpectSameOutputs(*outputs, *expected);
    for (const int64_t id : batch.ids) ExpectSameKV(*loading, *importing, id);

    // It goes on as any other.
    for (uint64_t step = 0; step < 3; ++step) {
      const std::vector<Tokens> next(batch.ids.size(), Tokens{70 + step});
      const auto a = RunForward(*loading, options.layers, batch.ids, next);
      const auto b = RunForward(*importing, options.layers, batch.ids, next);
      ASSERT_TRUE(a.ok() && b.ok());
      ExpectSameOutputs(*a, *b);
      ASSERT_TRUE(loading->CheckInvariants().ok());
    }
    EXPECT_EQ(loading->GetTotalSequenceLength(), importing->GetTotalSequenceLength());
    EXPECT_EQ(loading->GetDistinctTokenCount(), importing->GetDistinctTokenCount());
  }
}

INSTANTIATE_TEST_SUITE_P(Settings, LayerLoadExactness,
                         testing::Range<size_t>(0, Settings().size()));

TEST(LayerLoad, AStepBehindALoadIsPlannedAnewAndTheNextOneRepeated) {
  const AttentionKVCacheOptions options = MakeOptions(16);
  const auto cache = MakeTestCache(options);
  const auto& paged = static_cast<const PagedKVCache&>(*cache);
  ASSERT_TRUE(cache->AddSequence(0).ok());
  const std::vector<Stored> parts = ComputeText(options, 1, {0, 20});
  BlockSource source(BlocksOf(parts));
  const std::vector<LayerLoad> loads = {{0, 20, &source}};
  ASSERT_TRUE(cache->BeginLoadingForward(Ids{0}, Ids{1}, loads).ok());
  ASSERT_TRUE(FinishForward(*cache, options.layers, Tokens{1}).ok());
  ASSERT_TRUE(RunForward(*cache, options.layers, Ids{0}, {Tokens{2}}).ok());
  EXPECT_EQ(paged.figures().repeated_forwards, 0);
  ASSERT_TRUE(RunForward(*cache, options.layers, Ids{0}, {Tokens{3}}).ok());
  EXPECT_EQ(paged.figures().repeated_forwards, 1);
}

// ---------------------------------------------------------------------- order

// A layer is asked for when it is touched and no sooner, so the layers before it are computed by
// then.
TEST(LayerLoad, ALayerIsTakenRightBeforeItIsTouched) {
  const AttentionKVCacheOptions options = MakeOptions();
  const auto cache = MakeTestCache(options);
  BuildMembers(*cache);
  const LoadingBatch batch(options);
  std::vector<std::string> events;
  for (const auto& [id, source] : batch.sources) {
    source->arrive = [&events, id = id](int64_t layer) {
      events.push_back("load " + std::to_string(layer) + " of " + std::to_string(id));
      return Status();
    };
  }
  ASSERT_TRUE(batch.Begin(*cache).ok());
  EXPECT_TRUE(events.empty());
  // The query's positions are known before anything has come.
  const auto positions = cache->GetQueryPositions();
  ASSERT_TRUE(positions.ok());
  EXPECT_EQ(std::vector<int32_t>(positions->begin(), positions->end()),
            (std::vector<int32_t>{37, 38, 39, 27, 54, 55, 56, 57, 58, 9, 10, 11, 12}));
  for (int64_t l = 0; l < 4; ++l) {
    LayerOutputs outputs;
    const ForwardStyle style = {.calls = l == 1 ? CallStyle::kFused : CallStyle::kHalves};
    ASSERT_TRUE(
        RunLayer(*cache, options.layers[static_cast<size_t>(l)], l, batch.rows, style, &outputs)
            .ok());
    events.push_back("computed " + std::to_string(l));
  }
  ASSERT_TRUE(cache->EndForward().ok());
  EXPECT_EQ(events,
            (std::vector<std::string>{"load 0 of 0", "load 0 of 1", "load 0 of 2", "computed 0",
                                      "load 1 of 0", "load 1 of 1", "load 1 of 2", "computed 1",
                                      "load 2 of 0", "load 2 of 1", "load 2 of 2", "computed 2",
                                      "load 3 of 0", "load 3 of 1", "load 3 of 2", "computed 3"}));
}

// A layer whose window is one token long takes nothing of what is loaded. Its row stands in
// mid-tile of a page that begins with it, in which nothing was ever stored.
TEST(LayerLoad, ARowBehindALoadThatALayerLeavesOutOpensItsTile) {
  for (const std::string& path : KernelPaths()) {
    for (const int64_t page_size : {16, 32, 64, 7}) {
      for (const int64_t loaded : {24, 37}) {
        SCOPED_TRACE(path + ", pages of " + std::to_string(page_size) + ", " +
                     std::to_string(loaded) + " loaded tokens");
        AttentionKVCacheOptions options = MakeOptions(page_size);
        options.kernel_path = path;
        for (AttentionLayerSpec& layer : options.layers) layer.window = 1;
        const std::vector<Stored> stored = ComputeText(options, 1, {0, loaded});
        const std::vector<KVBlock> blocks = BlocksOf(stored);
        const auto cache = MakeTestCache(options);
        const auto imported = MakeTestCache(options);
        ASSERT_TRUE(cache->AddSequence(0).ok());
        ASSERT_TRUE(imported->AddSequence(0).ok());
        ASSERT_TRUE(imported->ImportKV(0, blocks).ok());
        std::vector<StoredRows> nothing;
        KVBlock no_rows;
        for (const AttentionLayerSpec& layer : options.layers)
          no_rows.push_back(nothing.emplace_back(layer, 0).view());
        BlockSource source(std::span(&no_rows, 1));
        const LayerLoad load = {0, loaded, &source, /*only_visible=*/true};
        ASSERT_TRUE(cache->BeginLoadingForward(Ids{0}, Ids{3}, std::span(&load, 1)).ok());
        const auto rows = FinishForward(*cache, options.layers, Text(1, loaded, 3));
        ASSERT_TRUE(rows.ok()) << rows.status().ToString();
        const auto expected = RunForward(*imported, options.layers, Ids{0}, {Text(1, loaded, 3)});
        ASSERT_TRUE(expected.ok()) << expected.status().ToString();
        ExpectSameOutputs(*rows, *expected);
        for (const LayerOutputs& layer : *rows) {
          for (int64_t i = 0; i < layer.o.count(); ++i)
            ASSERT_TRUE(std::isfinite(layer.o.Get(i))) << i;
        }
      }
    }
  }
}

TEST(LayerLoad, EndNeedsEveryLayer) {
  const AttentionKVCacheOptions options = MakeOptions();
  const auto cache = MakeTestCache(options);
  BuildMembers(*cache);
  const LoadingBatch batch(options);
  ASSERT_TRUE(batch.Begin(*cache).ok());
  LayerOutputs outputs;
  ASSERT_TRUE(RunLayer(*cache, options.layers[0], 0, batch.rows, {}, &outputs).ok());
  EXPECT_EQ(cache->EndForward().code(), StatusCode::kBadState);
  ASSERT_TRUE(cache->AbortForward().ok());
}

// ---------------------------------------------------------------------- failures

struct Failure {
  int64_t layer;
  int64_t member;
  StatusCode code;
};

TEST(LayerLoad, ALayerThatDoesNotComeLeavesNothingBehind) {
  const AttentionKVCacheOptions options = MakeOptions();
  const LoadingBatch batch(options);
  const auto expected_cache = MakeTestCache(options);
  BuildMembers(*expected_cache);
  ASSERT_TRUE(batch.Begin(*expected_cache).ok());
  const auto expected = FinishForward(*expected_cache, options.layers, batch.rows);
  ASSERT_TRUE(expected.ok());
  for (int64_t layer = 0; layer < 3; ++layer) {
    for (const auto& [member, failing] : batch.sources) {
      for (const StatusCode code :
           {StatusCode::kCorrupt, StatusCode::kTimeout, StatusCode::kIncompatible}) {
        for (const CallStyle calls : {CallStyle::kFused, CallStyle::kHalves}) {
          const auto cache = MakeTestCache(options);
          BuildMembers(*cache);
          const uint64_t digest = cache->StateDigest();
          const int64_t available = cache->GetNumAvailablePages();
          failing->arrive = [&, layer = layer](int64_t l) {
            return l == layer ? Status(code, "the test's layer") : Status();
          };
          ASSERT_TRUE(batch.Begin(*cache).ok());
          const auto outputs = FinishForward(*cache, options.layers, batch.rows, {.calls = calls});
          failing->arrive = nullptr;
          ASSERT_EQ(outputs.status().code(), code);
          const std::string message(outputs.status().message());
          for (const std::string& part :
               {"layer " + std::to_string(layer), "sequence " + std::to_string(member),
                std::string("the test's layer"), std::string("AbortForward")}) {
            EXPECT_NE(message.find(part), std::string::npos) << message;
          }
          // Only AbortForward and Clear are legal.
          LayerOutputs none;
          EXPECT_EQ(RunLayer(*cache, options.layers[2], 2, batch.rows, {}, &none).code(),
                    StatusCode::kBadState);
          EXPECT_EQ(cache->EndForward().code(), StatusCode::kBadState);
          ASSERT_TRUE(cache->CheckInvariants().ok());
          ASSERT_TRUE(cache->AbortForward().ok());
          EXPECT_EQ(cache->StateDigest(), digest);
          EXPECT_EQ(cache->GetNumAvailablePages(), available);
          ASSERT_TRUE(cache->CheckInvariants().ok());
          // The same once more, now that everything comes.
          ASSERT_TRUE(batch.Begin(*cache).ok());
          const auto again = FinishForward(*cache, options.layers, batch.rows);
          ASSERT_TRUE(again.ok()) << again.status().ToString();
          ExpectSameOutputs(*again, *expected);
        }
      }
    }
  }
}

TEST(LayerLoad, AbortAfterSomeLayersAndClear) {
  const AttentionKVCacheOptions options = MakeOptions();
  const LoadingBatch batch(options);
  const auto cache = MakeTestCache(options);
  BuildMembers(*cache);
  const uint64_t digest = cache->StateDigest();
  ASSERT_TRUE(batch.Begin(*cache).ok());
  EXPECT_NE(cache->StateDigest(), digest);
  LayerOutputs outputs;
  ASSERT_TRUE(RunLayer(*cache, options.layers[0], 0, batch.rows, {}, &outputs).ok());
  ASSERT_TRUE(cache->AbortForward().ok());
  EXPECT_EQ(cache->StateDigest(), digest);
  ASSERT_TRUE(batch.Begin(*cache).ok());
  ASSERT_TRUE(cache->Clear().ok());
  EXPECT_EQ(cache->pages_in_use(), 0);
  EXPECT_TRUE(cache->CheckInvariants().ok());
}

// A source that gives other tensors than it should.
TEST(LayerLoad, WhatASourceGivesIsChecked) {
  const AttentionKVCacheOptions options = MakeOptions();
  const std::vector<Stored> parts = ComputeText(options, 1, {0, 5, 12});
  const std::vector<KVBlock> right = BlocksOf(parts);
  std::vector<KVBlock> swapped = right;
  swapped[1][1] = right[1][2];  // other heads and another dtype
  std::vector<KVBlock> no_memory = right;
  no_memory[0][1].v = TensorView(static_cast<void*>(nullptr), DType::kF32, {5, 2, 8});
  std::vector<KVBlock> longer_values = right;
  longer_values[0][1].v = right[1][1].v;
  const std::vector<KVBlock> fewer(right.begin(), right.begin() + 1);
  std::vector<KVBlock> more = right;
  more.push_back(right[0]);
  for (const std::vector<KVBlock>& wrong : {swapped, no_memory, longer_values, fewer, more}) {
    const auto cache = MakeTestCache(options);
    ASSERT_TRUE(cache->AddSequence(0).ok());
    const uint64_t digest = cache->StateDigest();
    BlockSource source(wrong);
    const std::vector<LayerLoad> loads = {{0, 12, &source}};
    ASSERT_TRUE(cache->BeginLoadingForward(Ids{0}, Ids{2}, loads).ok());
    EXPECT_EQ(FinishForward(*cache, options.layers, Tokens{1, 2}).status().code(),
              StatusCode::kBadArgument);
    ASSERT_TRUE(cache->AbortForward().ok());
    EXPECT_EQ(cache->StateDigest(), digest);
  }
}

// A source cannot call the cache that waits for it.
TEST(LayerLoad, ACallOutOfASourceIsRefused) {
  const AttentionKVCacheOptions options = MakeOptions();
  const auto cache = MakeTestCache(options);
  ASSERT_TRUE(cache->AddSequence(0).ok());
  const std::vector<Stored> parts = ComputeText(options, 1, {0, 12});
  BlockSource source(BlocksOf(parts));
  source.arrive = [&](int64_t) {
    EXPECT_EQ(cache->AbortForward().code(), StatusCode::kBadState);
    EXPECT_EQ(cache->RemoveSequence(0).code(), StatusCode::kBadState);
    return Status();
  };
  const std::vector<LayerLoad> loads = {{0, 12, &source}};
  ASSERT_TRUE(cache->BeginLoadingForward(Ids{0}, Ids{1}, loads).ok());
  EXPECT_TRUE(FinishForward(*cache, options.layers, Tokens{1}).ok());
}

TEST(LayerLoad, BadLoadsChangeNothing) {
  const AttentionKVCacheOptions options = MakeOptions();
  const auto cache = MakeTestCache(options);
  BuildMembers(*cache);
  const std::vector<Stored> parts = ComputeText(options, 1, {0, 12});
  BlockSource source(BlocksOf(parts));
  const uint64_t digest = cache->StateDigest();
  const auto begin = [&](const std::vector<LayerLoad>& loads) {
    const Status status = cache->BeginLoadingForward(Ids{0, 1}, Ids{2, 2}, loads);
    EXPECT_EQ(cache->StateDigest(), digest) << status.ToString();
    EXPECT_TRUE(cache->CheckInvariants().ok());
    return status.code();
  };
  const int64_t longest = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(begin({{0, 0, &source}}), StatusCode::kBadArgument);
  EXPECT_EQ(begin({{0, -1, &source}}), StatusCode::kBadArgument);
  EXPECT_EQ(begin({{0, 12, nullptr}}), StatusCode::kBadArgument);
  EXPECT_EQ(begin({{3, 12, &source}}), StatusCode::kBadArgument);  // no member
  EXPECT_EQ(begin({{1, 12, &source}, {0, 12, &source}}), StatusCode::kBadArgument);
  EXPECT_EQ(begin({{0, 12, &source}, {0, 12, &source}}), StatusCode::kBadArgument);
  EXPECT_EQ(begin({{0, longest, &source}}), StatusCode::kTooLarge);
  EXPECT_EQ(begin({{1, std::numeric_limits<int32_t>::max() - 7, &source}}), StatusCode::kTooLarge);
  // As many tokens as no page is left for: with those of the rows, one more than there is room for.
  const int64_t room = cache->GetNumAvailablePages() * 4;
  EXPECT_EQ(begin({{0, room - 1, &source}}), StatusCode::kOutOfPages);
  ASSERT_TRUE(cache->BeginForward(Ids{0}, Ids{1}).ok());
  const std::vector<LayerLoad> good = {{1, 12, &source}};
  EXPECT_EQ(cache->BeginLoadingForward(Ids{1}, Ids{1}, good).code(), StatusCode::kBadState);
}

// More tokens than a forward may compute, up to the last page.
TEST(LayerLoad, ImportedTokensAreNoNewTokens) {
  AttentionKVCacheOptions options = MakeOptions();
  options.prefill_chunk_size = 2;
  const auto cache = MakeTestCache(options);
  ASSERT_TRUE(cache->AddSequence(0).ok());
  const std::vector<Stored> parts = ComputeText(options, 1, {0, 398});
  BlockSource source(BlocksOf(parts));
  const std::vector<LayerLoad> loads = {{0, 398, &source}};
  ASSERT_EQ(cache->BeginLoadingForward(Ids{0}, Ids{3}, loads).code(), StatusCode::kTooLarge);
  ASSERT_TRUE(cache->BeginLoadingForward(Ids{0}, Ids{2}, loads).ok());
  const Result<std::string> plan = cache->DebugPlan();
  ASSERT_TRUE(plan.ok());
  EXPECT_NE(plan->find("rows [0, 2) positions [398, 400) behind imports of [0, 398)"),
            std::string::npos)
      << *plan;
  EXPECT_NE(plan->find("  import 397 -> "), std::string::npos);
  EXPECT_TRUE(FinishForward(*cache, options.layers, Tokens{1, 2}).ok());
}

// While a forward loads, the others can be forked, popped and removed.
TEST(LayerLoad, ControlCallsOnOthersMeanwhile) {
  const AttentionKVCacheOptions options = MakeOptions();
  const auto cache = MakeTestCache(options);
  BuildMembers(*cache);
  const std::vector<Stored> parts = ComputeText(options, 1, {0, 30});
  BlockSource source(BlocksOf(parts));
  const std::vector<LayerLoad> loads = {{0, 30, &source}};
  ASSERT_TRUE(cache->BeginLoadingForward(Ids{0}, Ids{2}, loads).ok());
  EXPECT_EQ(cache->ForkSequence(0, 5).code(), StatusCode::kBadState);
  EXPECT_EQ(cache->PopN(0, 31).code(), StatusCode::kBadState);
  EXPECT_EQ(cache->RemoveSequence(0).code(), StatusCode::kBadState);
  ASSERT_TRUE(cache->ForkSequence(1, 5, 3).ok());
  ASSERT_TRUE(cache->PopN(3, 4).ok());
  ASSERT_TRUE(cache->RemoveSequence(2).ok());
  const auto outputs = FinishForward(*cache, options.layers, Tokens{1, 2});
  ASSERT_TRUE(outputs.ok());
  ASSERT_TRUE(cache->CheckInvariants().ok());

  const auto alone = MakeTestCache(options);
  ASSERT_TRUE(alone->AddSequence(0).ok());
  ASSERT_TRUE(alone->ImportKV(0, BlocksOf(parts)).ok());
  const auto expected = RunForward(*alone, options.layers, Ids{0}, {Tokens{1, 2}});
  ASSERT_TRUE(expected.ok());
  ExpectSameOutputs(*outputs, *expected);
}

}  // namespace
}  // namespace quire
